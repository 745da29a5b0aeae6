"""A recipe builds a study's data and modules: the one thing in a study that is code and no value.

A study is :class:`bstune.options.StudyOptions`, which are plain values, and a recipe. There are two
kinds: :class:`bstune.hydra_recipe.HydraRecipe` of a config's nodes, and
:class:`bstune.trial.own_project.python_recipe.PythonRecipe` of Python objects. A recipe is sent
whole, pickled, to a process that trains; it is never stored, and never read from a study's folder.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from lightning.pytorch import LightningDataModule, LightningModule

# Names of an argument, or of a number in a config, that is the learning rate.
RATES = ("lr", "learning_rate")


def left_to_bstune(names: Iterable[str]) -> str:
    """Write the line that names arguments of the user's in whose place bstune has its own."""
    return f"left to bstune: {', '.join(names)}"


def looks_like_rate(name: str) -> bool:
    """Whether a name has the word "lr" or the words "learning rate", as ``base_lr`` does."""
    # Words may also be parted by capitals, as in baseLr.
    parted = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()
    words = re.findall(r"[a-z]+", parted)
    return "lr" in words or "learning_rate" in "_".join(words)


# What to do in YAML with data that cannot be read in batches of another size.
HOW_IN_YAML = (
    "let the data be built for each batch size, by batch_size: ${trial.batch_size} in "
    "workload.data; their batches are then taken as they come"
)


def how_in_python(name: str | None = None, default: int | None = None) -> str:
    """Say what to do in Python with data that cannot be read in batches of another size.

    Args:
        name: of the user's data module; None: it is not known, or the data are loaders.
        default: the user's own batch size, where the function's default is to say it.
    """
    argument = "batch_size" if default is None else f"batch_size={default}"
    built = f"{name or 'MyData'}(..., batch_size=batch_size)"
    return (
        f"let the data be made for each batch size, by data=lambda {argument}: {built} or "
        "(train, val); their batches are then taken as they come"
    )


# The same, where it is not known how the study is given.
HOW_TO_GIVE = f"{how_in_python()}; in YAML, {HOW_IN_YAML}"


@dataclass(frozen=True)
class TrialValues:
    """The values of one trial that its module is built from."""

    batch_size: int
    lr: float
    seed: int
    total_steps: int
    """The steps after which a schedule that ends with the trial is to end."""
    hyperparameters: Mapping[str, float] = field(default_factory=dict)
    """The values of the other searched hyper-parameters, by the tunable's name."""


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
        """The function that builds the data for a batch size, where the user's depend on it.

        None: the data are the same at each batch size.
        """

    @property
    def how_to_give_data(self) -> str:
        """What the user can do with data that cannot be read in other batch sizes, for messages."""

    def module(self, values: TrialValues) -> "LightningModule":
        """Build a trial's module, with weights of its own."""

    def trainer(self) -> dict[str, object]:
        """Build the user's arguments of Lightning's Trainer."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Lines of the printed plan on what the recipe leaves out."""

    def takes(self, name: str) -> bool:
        """Whether the module depends on a value of the trial: ``lr`` or ``total_steps``."""

    @property
    def override(self) -> str:
        """The setting that puts the trial's learning rate into the optimizer.

        It is written as the user would write it, such as ``override_lr=True``.
        """

    def advice_on_rate(self) -> str:
        """Say what to change so that the module takes the trial's learning rate."""

    def on(self, device: str, precision: str) -> "Recipe":
        """Give the recipe for this device and precision, which are no longer ``auto``."""
