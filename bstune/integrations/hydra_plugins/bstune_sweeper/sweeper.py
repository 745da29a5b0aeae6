"""``hydra/sweeper=bstune``: its config, and the class that Hydra makes of it.

Hydra imports this at the start of every application. The sweep itself is imported when it begins.
"""

from dataclasses import dataclass, field
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


@dataclass
class BstuneSweeperConf:
    """The keys below ``hydra.sweeper``.

    Where nothing else is said, null means the default of :class:`bstune.Study`.
    """

    _target_: str = "hydra_plugins.bstune_sweeper.sweeper.BstuneSweeper"
    # A sampler stays a node, which the study makes.
    _recursive_: bool = False
    _convert_: str = "all"
    # Ranges by key, as the Optuna sweeper has them: interval, tag(log, ...), int(...), choice,
    # range.
    params: dict[str, Any] | None = None
    # Keys of the batch size and the learning rate; null: the parameter of such a name.
    batch_size: str | None = None
    lr: str | None = None
    # Keys that a trial's other values go to; null: the application takes none.
    seed: str | None = None
    max_steps: str | None = None
    resume_from: str | None = None
    save_to: str | None = None
    # Where a job leaves what it can go on from, below its output folder, in place of save_to.
    checkpoint: str | None = None
    # Whether a job's learning rate schedule ends at its max_steps. Then no job is stopped before,
    # and the search chooses how long each schedule is.
    schedule_ends: bool = False
    # val_loss<=0.5, or a metric alone; its mode where the name does not say which way is better.
    target: str | None = None
    mode: str | None = None
    # steps and examples, both of which a trial spends at most.
    budget: dict[str, int] | None = None
    # time (tasks return seconds_per_step), steps, both, curve or loss; null: loss where tasks
    # return a metric, time where they return seconds_per_step, else steps.
    objective: str | None = None
    # The meaning of a number that the task returns: steps (to the target) or metric (at the
    # budget's end).
    returns: str | None = None
    # A batch size and a learning rate that go together; null: the application's own.
    reference: list[float] | None = None
    # A name of conf/sampler, or a node with a _target_.
    sampler: Any = None
    # Further options of the study, as on bstune's command line.
    options: list[str] = field(default_factory=list)
    n_trials: int | None = None
    # Jobs that are launched at once.
    n_jobs: int = 1
    # The study's name; null: the application's.
    study_name: str | None = None
    storage: str | None = None
    load_if_exists: bool = True


class BstuneSweeper(Sweeper):
    """Searches the batch size and learning rate of an application.

    :mod:`bstune.integrations.hydra_sweep` does the work.
    """

    def __init__(self, **settings: Any) -> None:
        self.settings = settings

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        """Take the application's config, and make the launcher that it names."""
        self.hydra_context = hydra_context
        self.config = config
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> None:
        """Run or continue the search; an error that the user can mend ends the process."""
        # Imported here: Hydra imports this module in every application, also without a sweep.
        # ``loading`` starts a thread that says what is waited for.
        from bstune.system.loading import loading

        with loading(training=True):
            # This import takes seconds, as it loads Optuna and torch.
            from bstune.integrations.hydra_sweep import run_sweep

        run_sweep(self, arguments)


ConfigStore.instance().store(
    group="hydra/sweeper", name="bstune", node=BstuneSweeperConf, provider="bstune"
)
