"""Where Hydra finds this package's sweeper: it takes plugins from here alone, and imports them at every start."""

from typing import Any

from hydra.plugins.sweeper import Sweeper


class OptunaSweeper(Sweeper):
    """`sweeper=optuna`; immunization/multirun/search.py has what it does, which loads Optuna."""

    def __init__(self, **options: Any) -> None:
        self.options = options

    def setup(self, *, hydra_context: Any, task_function: Any, config: Any) -> None:
        from hydra.core.plugins import Plugins

        self.hydra_context, self.config = hydra_context, config
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> Any:
        from immunization.multirun.search import Search

        return Search(self, arguments, self.options).run()
