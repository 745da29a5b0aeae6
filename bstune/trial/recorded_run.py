"""A recorded run, what training would have come to, and the recorded values around another one."""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, FiniteFloat, model_validator

from bstune.core.records import Count, Target


def _rising(steps: tuple[int, ...]) -> tuple[int, ...]:
    """Check that steps rise; pydantic makes its own error of a ValueError."""
    if list(steps) != sorted(set(steps)):
        raise ValueError("must rise")
    return steps


# Products of such numbers are floats.
Positive = Annotated[FiniteFloat, Field(gt=1e-30, lt=1e30)]


class Run(BaseModel):
    """One recorded run: ``metric[i]`` was seen after ``steps[i]`` steps."""

    model_config = ConfigDict(frozen=True)

    batch_size: Positive
    lr: Positive
    seed: int
    steps: Annotated[tuple[Count, ...], AfterValidator(_rising)]
    metric: tuple[FiniteFloat, ...]
    seconds_per_step: Positive
    status: str | None = None
    horizon: Count | None = None
    """The step at which its schedule ended; None: its schedule has no end."""

    @model_validator(mode="after")
    def _fits(self) -> "Run":
        """Check that fields belong together, likewise."""
        if len(self.steps) != len(self.metric):
            raise ValueError(
                f"steps and metric must be equally long, but got {len(self.steps)} and "
                f"{len(self.metric)}"
            )
        if not self.steps and not self.diverged:
            raise ValueError("steps must not be empty, but for a run whose status is 'diverged'")
        if self.horizon is not None and min(self.metric, default=1.0) <= 0.0:
            raise ValueError("metrics of runs with a horizon must be over 0: logs are interpolated")
        return self

    @property
    def diverged(self) -> bool:
        """Whether it diverged after its last evaluation."""
        return self.status == "diverged"

    @property
    def end(self) -> int:
        """The last evaluated step; 1 for a run that diverged before any evaluation."""
        return self.steps[-1] if self.steps else 1

    def steps_to(self, target: Target) -> int | None:
        """The first evaluated step that met the target; None if none did."""
        for step, value in zip(self.steps, self.metric, strict=True):
            if target.reached(value):
                return step
        return None

    def history(self, end: float = math.inf, scale: float = 1.0) -> tuple[tuple[int, float], ...]:
        """(step, metric) up to the recorded step ``end``, with the steps times ``scale``.

        Where two evaluations fall on one step, the later one stays.
        """
        scaled = {}
        for step, value in zip(self.steps, self.metric, strict=True):
            if step <= end:
                scaled[max(1, round(step * scale))] = value
        return tuple(scaled.items())


@dataclass(frozen=True)
class Outcome:
    """What training would have come to at one batch size, rate and seed."""

    steps: int | None
    """To the target; None if it was not reached."""
    end: int
    """The last step of the history."""
    seconds_per_step: float
    history: tuple[tuple[int, float], ...]
    diverged: bool


def around(values: Sequence[float], value: float) -> list[tuple[float, float]]:
    """The recorded values around a value, with weights linear in the logarithm.

    There is one where ``value`` itself was recorded, or lies beyond all.
    """
    inside = min(max(value, values[0]), values[-1])
    place = bisect_left(values, inside)
    high = values[place]
    if high == inside:
        return [(high, 1.0)]
    low = values[place - 1]
    weight = math.log(inside / low) / math.log(high / low)
    return [(low, 1.0 - weight), (high, weight)]
