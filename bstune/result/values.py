"""What every part of a result is made of: types with their bounds, and the frozen model."""

import math
import shlex
from collections.abc import Iterator
from typing import Annotated, TypeVar

from pydantic import AfterValidator, BaseModel, Field

# The largest count or measurement: beyond what any study reports, yet below the numbers at which
# floats begin to lose integers.
LARGEST_COUNT = 1e15
# The most items of a list.
MAX_ITEMS = 100_000
# The most characters of a text.
MAX_TEXT = 100_000

Count = Annotated[int, Field(ge=0, le=LARGEST_COUNT)]
FromOne = Annotated[int, Field(ge=1, le=LARGEST_COUNT)]
# A batch size, in examples.
BatchSize = FromOne
# Metrics and their distances may be as large as a float can be, of trials that diverge.
Real = Annotated[float, Field(allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0.0, le=LARGEST_COUNT, allow_inf_nan=False)]
Positive = Annotated[float, Field(ge=1e-15, le=LARGEST_COUNT, allow_inf_nan=False)]
Level = Annotated[float, Field(gt=0.0, lt=1.0)]
Share = Annotated[float, Field(ge=0.0, le=1.0)]
Text = Annotated[str, Field(max_length=MAX_TEXT)]
# An integer stays one: a width of 15.0 is none.
Whole = Annotated[int, Field(ge=-LARGEST_COUNT, le=LARGEST_COUNT)]
Hyperparameters = dict[Text, Whole | Real | None]

Item = TypeVar("Item")
Items = Annotated[tuple[Item, ...], Field(max_length=MAX_ITEMS)]


def _checked_command(value: str) -> str:
    """Give the text itself, if a shell takes it for a single command of bstune: people paste it.

    ValueError for any other text, which pydantic reports.
    """
    words = shlex.split(value)
    if words[:1] != ["bstune"] or shlex.join(words) != value:
        raise ValueError("must be one command that begins with bstune")
    return value


Command = Annotated[Text, AfterValidator(_checked_command)]


def finite(value: float | None) -> float | None:
    """Give a number as a result may hold it: None in place of an infinite one, or of NaN."""
    if value is None or not math.isfinite(value):
        return None
    return value


# mypy sees that a model is frozen where its own class says so.
class Part(BaseModel, strict=True, extra="forbid", frozen=True):
    """A part of a result: no value is converted, none changes, and there is no other key."""

    def __repr_args__(self) -> Iterator[tuple[str | None, object]]:
        """Give the fields as ``repr`` shows them: numbers with four digits, as everywhere else.

        The attributes themselves have all digits.
        """
        for name, value in super().__repr_args__():
            shown = value
            if isinstance(value, float):
                shown = float(f"{value:.4g}")
            yield name, shown


class TrialPoint(Part, frozen=True):
    """A trial by its number, its seed and its configuration."""

    number: Count
    """The trial's number."""
    seed: Count
    """The trial's seed."""
    batch_size: BatchSize
    """Examples of a step."""
    lr: Positive
    """The learning rate."""
    hyperparameters: Hyperparameters
    """Further hyper-parameters that the study searches, by name."""
    horizon: Count | None
    """Steps after which its schedule ends; None where none does."""
