"""A method whose steps wait while a file says so: jobs that are surely running when something happens to them."""

import time
from contextlib import suppress
from pathlib import Path

from torch import Tensor

from immunization.methods import Method
from immunization.models import Batch, Model

CONF = "_target_: helpers.gated.Gated\nepochs: 1000\ngate: ???\nnumber: ${seed}\n"
"""Of `conf/method/gated.yaml`."""


class Gated(Method):
    """Descend on L(D_P), in steps of 0.2 s while the file `gate`/`number` is there; of 3 GB if it says `memory`."""

    epochs = 1000
    gate: str
    number: int

    def step(self, model: Model, primary: Batch, harmful: Batch) -> dict[str, Tensor]:
        gate = Path(self.gate, str(self.number))
        with suppress(FileNotFoundError):
            if gate.read_text() == "memory":
                self.much = bytes(1) * 3_000_000_000
            time.sleep(0.2)
        loss = self.pair.primary.loss(model.outputs(primary)[0], primary.y)
        return {"loss": loss}


def written(folder: Path) -> tuple[str, ...]:
    """Make the files of the method in `folder`/conf; returns the arguments that choose it, gates in `folder`/gate."""
    (folder / "conf" / "method").mkdir(parents=True)
    (folder / "conf" / "method" / "gated.yaml").write_text(CONF)
    (folder / "gate").mkdir()
    chosen = ("--config-dir", str(folder / "conf"), "method=gated", "trusted=[helpers.gated]")
    return *chosen, f"method.gate={folder / 'gate'}", "tracker=none", "evaluation=[rir]", "dataset.max_samples=20"
