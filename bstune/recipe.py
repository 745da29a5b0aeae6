"""What builds a study's data and its modules: the one thing in a study that is code and no value.

A study is :class:`bstune.options.StudyOptions`, which are plain values, and a recipe. There are two
kinds: :class:`bstune.hydra_recipe.HydraRecipe` of a config's nodes, and
:class:`bstune.trial.own_project.python_recipe.PythonRecipe` of Python objects. A recipe is sent
whole, pickled, to a process that trains; it is never stored, and never read from a study's folder.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from lightning.pytorch import LightningDataModule, LightningModule

# Names of an argument, or of a number in a config, that is the learning rate.
RATES = ("lr", "learning_rate")


@dataclass(frozen=True)
class TrialValues:
    """The values of one trial that its module is built from."""

    batch_size: int
    lr: float
    seed: int
    total_steps: int
    """After which a schedule that ends with the trial is to end."""
    hyperparameters: Mapping[str, float] = field(default_factory=dict)
    """What the study searches besides, by the tunable's name."""


class Recipe(Protocol):
    """Builds what a study trains."""

    @property
    def data_name(self) -> str:
        """The name of what builds the data, for messages."""

    @property
    def module_name(self) -> str:
        """The name of what builds a module, for messages."""

    def data(self) -> "LightningDataModule":
        """Build the data module; the caller prepares it and sets it up."""

    @property
    def data_at(self) -> "Callable[[int], LightningDataModule] | None":
        """Builds the data of a batch size, where the user gives a function of it.

        None: they are the same at each.
        """

    def module(self, values: TrialValues) -> "LightningModule":
        """Build a trial's module, with weights of its own."""

    def trainer(self) -> dict[str, object]:
        """Build the user's arguments of Lightning's Trainer."""

    def takes(self, name: str) -> bool:
        """Whether what is built depends on a value of the trial: ``lr`` or ``total_steps``."""

    @property
    def override(self) -> str:
        """What sets the rate in the optimizer, in the words of whoever gives the recipe: ``override_lr=True``."""

    def advice_on_rate(self) -> str:
        """Say what to change so that the module takes the trial's learning rate."""

    def on(self, device: str, precision: str) -> "Recipe":
        """Give the recipe for a device and a precision that are no longer ``auto``."""
