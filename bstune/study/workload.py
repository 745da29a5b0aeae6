"""What a study tunes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import yaml

from bstune.options import Options
from bstune.recipe.recipe import Recipe
from bstune.study.commands import Commands
from bstune.study.machine import Machine
from bstune.system.secrets import hide
from bstune.trial.table import Table
from bstune.trial.table import train as train_from_table
from bstune.trial.trial import Trial


@dataclass(frozen=True)
class Workload:
    """What is trained, from a config or from Python objects.

    Args:
        name: of the workload.
        settings: what must not change while a study goes on, as JSON.
        config: the config as YAML, without secrets.
        commands: how the study is begun, and what runs it again.
        table: recorded runs that answer in place of training.
        recipe: of what is trained; None for recorded runs, and where whoever runs the study trains.
        machine: that trains; None: it is looked at.
    """

    name: str
    settings: Mapping[str, object]
    config: str
    commands: Commands
    table: Table | None = None
    recipe: Recipe | None = None
    machine: Machine | None = None

    @property
    def train(self) -> Callable[[Trial], None] | None:
        """Trains one trial; it is sent to the worker with cloudpickle.

        None: whoever runs the study trains them.
        """
        if self.recipe is not None:
            return partial(_train_by_lightning, self.recipe)
        return None if self.table is None else partial(train_from_table, self.table)


def config_of(options: Options) -> str:
    """The config of a study that no file tells, as YAML, without secrets."""
    return yaml.safe_dump(hide(options.model_dump(mode="json")), sort_keys=False)


def _train_by_lightning(recipe: Recipe, trial: Trial) -> None:
    # It is imported in the worker.
    from bstune.trial.lightning import train

    train(recipe, trial)
