"""What an attacker downloads: the extractor, before and after immunization, and what harmful data become in it."""

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor, nn

from immunization.attacks.altered import BATCH, Precision, rounded
from immunization.compute.machine import onto, room
from immunization.data.fields import mirrored
from immunization.data.images import ImagePair
from immunization.data.task import SPLITS, Once, Split, Task
from immunization.data.text import TextSplit
from immunization.errors import Inapplicable
from immunization.evaluation.comparison import Comparison
from immunization.models.activations import take
from immunization.models.base import Model
from immunization.models.blocks import Operations
from immunization.models.chain import Network, same_code
from immunization.runs.records import Role, Stage

INNER = 5
"""Of so many training rows of a class one takes the place of a validation row, where there are none."""

GIB = 2**30
KEPT_IMAGES = 4
"""GiB of images that an attack on a net keeps in memory; on a GPU at most a quarter of what it has free."""


class Victim:
    """The task of `role`, a harmful one, as an attacker sees it through the extractor of each stage.

    `start` is the extractor's state dict before immunization. Features are float64, computed once per stage, split and
    precision of the weights; `precision=None` leaves them as they are. Where the task has no validation rows, the
    attacker takes every `INNER`-th training row of a class for that. `most`: training rows of a class that they have.
    """

    def __init__(
        self,
        model: Model,
        comparison: Comparison,
        start: Mapping[str, Tensor],
        role: Role = "harmful",
        most: int | None = None,
    ) -> None:
        self.model, self.comparison, self.start, self.role = model, comparison, start, role
        self.task: Task = comparison.tasks[role]
        self._inner: dict[str, Tensor] = {}
        if not len(self.task.val):
            self._hold_out()
        if most is not None:
            self._take(self.task.few(most, seed=0))
        self.once = Once()  # also for what attacks keep of it
        self.kept: dict[tuple[object, ...], dict[str, Tensor]] = {}
        self.stages: list[Stage] = ["immunized", "baseline"]
        if self._starts_elsewhere():
            self.stages.append("start")

    def features(
        self, stage: Stage, split: str, precision: Precision | None = None, role: Role | None = None
    ) -> Tensor:
        """Features [N, D] of one split of a task, the attacked one by default."""
        role = role or self.role
        if role == self.role and split in self._inner:
            train = self._features(stage, "train", precision, role)
            return train[self._inner[split].to(train.device)]
        return self._features(stage, split, precision, role)

    def _features(self, stage: Stage, split: str, precision: Precision | None, role: Role) -> Tensor:
        raw = stage == "baseline" and self.raw(role, split)  # the map is I, which every precision holds
        if raw or (precision is None and stage != "start"):
            return self.comparison.features(role, split, "immunized" if stage == "immunized" else "baseline")
        key = ("features", stage, split, precision, role)
        return self.once(key, lambda: self._extract(self.extractor(stage, precision), role, split))

    def _hold_out(self) -> None:
        """Split the training rows into those that the attacker learns from and those that they choose on."""
        train = self.task.train
        y = train.y.cpu() if self.task.classes else torch.zeros(len(train))
        rows = [(y == label).nonzero()[:, 0] for label in y.unique()]
        held = torch.cat([own[::INNER] for own in rows if len(own) > 1] or [torch.zeros(0)]).long().sort().values
        if not len(held):
            return
        rest = torch.ones(len(train), dtype=torch.bool)
        rest[held] = False
        self._inner = {"train": rest.nonzero()[:, 0], "val": held}
        self.task = replace(self.task, train=_some(train, self._inner["train"]), val=_some(train, self._inner["val"]))

    def _take(self, rows: Tensor) -> None:
        """Leave only some training rows to the attacker."""
        self._inner["train"] = self._inner["train"][rows] if "train" in self._inner else rows
        self.task = replace(self.task, train=_some(self.task.train, rows))

    def extractor(self, stage: Stage, precision: Precision | None = None) -> nn.Module:
        """A copy of the extractor, its weights rounded to `precision`. Raises Inapplicable."""
        if precision is not None:
            self.check_changeable()
        if stage != "immunized" and self.model.before is not None:
            return rounded(copy.deepcopy(self.model.before.extractor), precision)
        extractor = copy.deepcopy(self.model.extractor)
        if stage != "immunized":
            extractor.load_state_dict(self.start)
        return rounded(extractor, precision)

    def theta(self, stage: Stage, precision: Precision | None = None) -> Tensor:
        """theta [D_in, D_out] in float64 of a linear model, or of the map folded behind a net."""
        theta = self.model.last_map(self.extractor("immunized" if stage == "baseline" else stage, precision))
        if theta is None:
            raise Inapplicable("the extractor holds no linear map that could be inverted")
        return torch.eye(len(theta)).to(theta.detach().double()) if stage == "baseline" else theta.detach().double()

    def _starts_elsewhere(self) -> bool:
        """Whether theta_0 differs from the baseline, where that is the inputs, and from theta_I."""
        current = self.model.extractor.state_dict()
        if not self.raw(self.role, "train") or all(torch.equal(self.start[n].to(t), t) for n, t in current.items()):
            return False
        extractor = self.extractor("start")
        with torch.no_grad():
            root = self.task.root.to(next(extractor.parameters()))
            return not torch.equal(extractor(root), root)

    def raw(self, role: str, split: str) -> bool:
        """Whether features of the baseline are the inputs as they are."""
        return self.model.baseline_features(role, split) is None

    @torch.no_grad()
    def _extract(self, extractor: nn.Module, role: str, split: str) -> Tensor:
        inputs, like = getattr(self.comparison.tasks[role], split).x, next(extractor.parameters())
        return torch.cat([extractor(onto(part, like)).double() for part in inputs.split(256)])

    def network(self, stage: Stage, precision: Precision | None = None) -> Network:
        """A copy of the whole net, images -> features [N, D], all of it trainable and in eval mode."""
        if not self.model.deep:
            raise Inapplicable("a linear map has no layers to fine-tune: this attack needs a deep net")
        if precision is not None:
            self.check_changeable()
        if stage == "immunized":
            network = self.model.network()
        elif self.model.before is not None:
            network = self.model.before.network()
        else:
            network = self.model.network(self.start)
        if self.model.before is not None:
            before = self.model.before
            network.trained = self.once("changed", lambda: self._changed(before))
        return rounded(network, precision).to(next(network.parameters())).eval().requires_grad_(True)

    def check_changeable(self, reference: bool = False) -> None:
        """Raise Inapplicable where nobody can change the net of a stage; `reference`: that of the baseline."""
        for model in (None if reference and self.model.before else self.model, self.model.before):
            if model is not None and model.fixed:
                raise Inapplicable(model.fixed)

    def same_outside(self, part: str) -> bool:
        """Whether theta_I and the baseline have the same modules, and differ in nothing but a part of them."""
        if not self.model.deep:
            return False
        after, before = (self.network(stage) for stage in ("immunized", "baseline"))
        inside = {module for own in after.part(part) for module in own.modules()}
        names = tuple(f"{name}." for name, module in after.named_modules() if name and module in inside)
        own, other = after.state_dict(), before.state_dict()
        if own.keys() != other.keys():  # a map is folded in
            return False
        return after in inside or all(n.startswith(names) or torch.equal(x, other[n]) for n, x in own.items())

    def same_blocks(self) -> bool:
        """Whether theta_I has every block of the baseline as it was, as behind a map that is folded in."""
        return self.model.deep and self.once("same_blocks", self._same_blocks)

    def _same_blocks(self) -> bool:
        after, before = (self.network(stage).whole.state_dict() for stage in ("immunized", "baseline"))
        return after.keys() == before.keys() and all(torch.equal(x, before[name]) for name, x in after.items())

    def same_until(self) -> int:
        """Index of the first unit of the net that immunization changed; 0 where those before it may not be the same.

        They are where their classes, attributes, weights and buffers are, and what they give for some images.
        """
        return self.once("same_until", self._same_until) if self.model.deep else 0

    @torch.no_grad()
    def _same_until(self) -> int:
        after, before = (self.network(stage) for stage in ("immunized", "baseline"))
        own, other = ({**dict(net.named_buffers()), **net.state_dict()} for net in (after, before))
        images, _ = self.images("val")
        if own.keys() != other.keys() or images.ndim != 4 or not same_code(after, before):
            return 0
        weights = [[*after.get_submodule(name).parameters(recurse=False)] for name in _changed(own, other)]
        start = after.start_of(p for own in weights for p in own) if all(weights) else 0
        some = images[torch.linspace(0, len(images) - 1, 16).long()]
        alike = torch.equal(*(net.before(some.clone(), start) for net in (after, before)))
        return start if alike and start < len(after.units) else 0

    def unchanged(self) -> bool:
        """Whether theta_I is a net with the weights of the baseline, so that attacks need not be repeated."""
        return self.once("unchanged", lambda: self.same_outside("head"))

    def _changed(self, reference: Model) -> list[str]:
        """Modules of the net whose weights or statistics are not those of the net it is compared with, by name."""
        after, before = (model.network().state_dict() for model in (self.model, reference))
        if after.keys().isdisjoint(before):  # another kind of net
            return ["whole"]
        return _changed(after, before)

    def activations(
        self, stage: Stage, precision: Precision | None, rows: tuple[int, ...] | None, start: int, mirrored: bool
    ) -> list[dict[str, Tensor]] | None:
        """Outputs of the units before `start` for images, by split: [N, ...]; for training only for `rows`.

        The list has the images and, with `mirrored`, their mirror images. Computed once. None where they take more
        memory than images may; to stay below that, those of other units are dropped.
        """
        if stage == "immunized" and start <= self.same_until():
            stage = "baseline"
        place = ("activations", stage, precision, start, rows)
        keys = [(*place, flipped) for flipped in range(1 + mirrored)]
        if not all(key in self.kept for key in keys):
            images = {split: self.images(split, rows if split == "train" else None)[0] for split in SPLITS}
            network = self.network(stage, precision)
            with torch.no_grad():
                one = network.before(images["train"][:1], start)
            size = len(keys) * sum(map(len, images.values())) * one.numel() * one.itemsize
            if size > (most := room(one.device, KEPT_IMAGES * GIB)):
                return None
            others = [key for key in self.kept if key[:-1] != place]
            if size + sum(x.nbytes for key in others for x in self.kept[key].values()) > most:
                for key in others:
                    del self.kept[key]
            for key in keys:
                if key not in self.kept:
                    self.kept[key] = _before(network, start, images, bool(key[-1]))
        return [self.kept[key] for key in keys]

    def images(self, split: str, rows: tuple[int, ...] | None = None) -> tuple[Tensor, Tensor]:
        """Images [N, C, H, W], preprocessed for the net, and labels [N]: some rows of a split of the attacked task."""
        return self.once(("images", split, rows), lambda: self._images(split, rows))

    def _images(self, split: str, rows: tuple[int, ...] | None) -> tuple[Tensor, Tensor]:
        split, rows = self._place(split, rows)
        part: Split = getattr(self.comparison.tasks[self.role], split)
        chosen = torch.arange(len(part)) if rows is None else torch.tensor(rows)
        if not len(chosen):
            return onto(take(part.x, chosen), self.model.head.weight), part.y[:0]
        batches, most = [], room(part.y.device, KEPT_IMAGES * GIB) / GIB
        for images, labels in self.model.image_batches(self.role, split, None if rows is None else chosen):
            size = len(chosen) * images[0].numel() * images.itemsize / GIB
            if size > most:
                raise Inapplicable(
                    f"{len(chosen)} images take {size:.2g} GiB; lower samples to come under {most:.2g} GiB"
                )
            batches.append((images, labels))
        images, labels = (torch.cat(parts) for parts in zip(*batches, strict=True))
        return images, labels

    def _place(self, split: str, rows: tuple[int, ...] | None) -> tuple[str, tuple[int, ...] | None]:
        """The split of the task, and the rows of it, that some rows of the attacker's split are."""
        if split not in self._inner:
            return split, rows
        own = self._inner[split]
        return "train", tuple((own if rows is None else own[list(rows)]).tolist())

    def texts(self) -> dict[str, list[str]] | None:
        """The texts of the attacked task by split, in the order of `images`; None where only tokens are known."""
        splits, found = cast(ImagePair, self.model.images).tasks[self.role].splits, {}
        for split in SPLITS:
            name, rows = self._place(split, None)
            if not isinstance(own := splits.get(name), TextSplit):
                return None
            texts = own.texts
            found[split] = texts if rows is None else [texts[row] for row in rows]
        return found

    def flops_per_row(self, stage: Stage) -> float:
        """Floating-point operations of one forward pass of one input through the net of a stage, or a linear model."""
        return self.once(("flops", stage), lambda: self._flops(stage))

    def _flops(self, stage: Stage) -> float:
        if not self.model.deep:
            return forward_flops(self.extractor("immunized"), torch.zeros(1, self.task.dim))
        network = self.network(stage)
        return forward_flops(network, network.sample[:1])


def _changed(after: Mapping[str, Tensor], before: Mapping[str, Tensor]) -> list[str]:
    """Names of the modules whose weights or statistics differ between two state dicts."""
    own = [name for name, x in after.items() if name not in before or not torch.equal(x, before[name].to(x))]
    return list(dict.fromkeys(name.rpartition(".")[0] for name in own))


def _some(split: Split, rows: Tensor) -> Split:
    """Some rows of a split; inputs that are no rows of features have only their shape."""
    y = split.y[rows.to(split.y.device)]
    if isinstance(split.x, Tensor) and split.x.ndim == 2:
        return Split(split.x[rows.to(split.x.device)], y)
    return Split(torch.empty(len(rows), *split.x.shape[1:], device="meta"), y)


@torch.no_grad()
def _before(network: Network, start: int, images: Mapping[str, Tensor], flipped: bool) -> dict[str, Tensor]:
    return {
        split: torch.cat([network.before(mirrored(part) if flipped else part, start) for part in x.split(BATCH)])
        for split, x in images.items()
    }


def forward_flops(network: nn.Module, sample: Tensor) -> float:
    """Floating-point operations of the inputs in `sample`, a multiplication and an addition counting as two."""
    with torch.no_grad(), Operations() as counted:
        network(onto(sample, next(network.parameters())))
    return counted.total


def require_held_out(task: Task) -> None:
    """Raise Inapplicable for a task without validation or test rows."""
    for split in ("val", "test"):
        if not len(getattr(task, split)):
            raise Inapplicable(f"the attacked task has no {split} split: set dataset.{split}_fraction above 0")


def images_of(victim: Victim) -> dict[str, Tensor]:
    """What the net reads, by split. Raises Inapplicable for a linear map, and where a split to measure on is empty."""
    require_held_out(victim.task)
    if not victim.model.deep:
        raise Inapplicable("a linear map reads rows of features: this attack needs the images of a deep net")
    return {split: victim.images(split)[0] for split in SPLITS}
