"""``hydra/sweeper=bstune``: its keys, and the class that Hydra makes of them.

Hydra imports this module at the start of every application: what does the work,
:mod:`bstune.integrations.hydra_sweeper`, is imported when a sweep begins.
"""

from copy import deepcopy
from functools import partial
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, read_write

from bstune.integrations.hydra_job import TAKEN, call_timed
from bstune.system.secrets import hide_in_text

# Options of a study; null: the default of bstune's conf/config.yaml.
OPTIONS = (
    *("objective", "target", "scaling", "trials", "wall_seconds", "seeds", "workers", "sampler"),
    *("study", "schedule_ends", "device", "output", "storage", "debug"),
)
# What hydra-optuna-sweeper has beside these.
OF_OPTUNA = (*("direction", "n_trials", "n_jobs", "study_name", "max_failure_rate"),)


class BstuneSweeper(Sweeper):
    """Tunes the batch size and the learning rate of an application."""

    hydra_context: HydraContext
    config: DictConfig
    launcher: Launcher

    def __init__(self, **given: Any) -> None:
        self.given = given

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        """Take the application's config, and make the launcher that it names."""
        self.hydra_context = hydra_context
        self.config = config
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context,
            task_function=partial(call_timed, task_function),
            config=_of_jobs(config),
        )

    def sweep(self, arguments: list[str]) -> None:
        """Run or continue the study; an error that the user can mend ends the process."""
        from bstune.integrations.hydra_sweeper import sweep

        sweep(self, arguments)


def _of_jobs(config: DictConfig) -> DictConfig:
    """The config of an application's jobs, beside each of which Hydra writes it.

    What is said to the sweeper is left out where it has a secret, such as the storage's password.
    """
    own = deepcopy(config)
    kept = []
    for word in config.hydra.overrides.hydra:
        if not word.lstrip("+").startswith("hydra.sweeper.") or hide_in_text(word) == word:
            kept.append(word)
    with read_write(own):
        own.hydra.overrides.hydra = kept
    return own


ConfigStore.instance().store(
    group="hydra/sweeper",
    name="bstune",
    node={
        # Of an application that chooses one of hydra-optuna-sweeper's samplers.
        "defaults": [{"optional sampler": None}],
        "_target_": "hydra_plugins.bstune_sweeper.BstuneSweeper",
        # A sampler stays a node.
        "_recursive_": False,
        "_convert_": "all",
        "params": {},
        "budget": {"steps": None, "examples": None},
        "baseline": {"batch_size": None, "lr": None, "values": None},
        "mlflow": {},
        **dict.fromkeys((*TAKEN, *OF_OPTUNA, *OPTIONS)),
    },
    provider="bstune",
)
