"""A recorded run, the end of a trial that recorded runs answer, and interpolation between runs."""

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from bstune.core.records import Target

Number = TypeVar("Number", int, float)
Item = TypeVar("Item")


@dataclass(frozen=True)
class Run:
    """One recorded run: ``metric[i]`` was seen after ``steps[i]`` steps."""

    batch_size: int
    lr: float
    seed: int
    steps: tuple[int, ...]
    """The steps that were evaluated; a run that diverged may have none."""
    metric: tuple[float, ...]
    seconds_per_step: float
    diverged: bool
    hyperparameters: Mapping[str, float] = field(default_factory=dict)
    """What was searched besides batch size and learning rate, by name."""
    horizon: int | None = None
    """The step at which its schedule ended; None: its schedule has no end."""

    @property
    def end(self) -> int:
        """The last evaluated step. It is 1 for a run that diverged before any evaluation."""
        return self.steps[-1] if self.steps else 1

    def steps_to(self, target: Target) -> int | None:
        """Give the first evaluated step that met the target; None if none did."""
        for step, value in zip(self.steps, self.metric, strict=True):
            if target.reached(value):
                return step
        return None

    def history_to(
        self, end: float = math.inf, scale: float = 1.0
    ) -> tuple[tuple[int, float], ...]:
        """Give the (step, metric) pairs up to the recorded step ``end``.

        Their steps are multiplied by ``scale`` and rounded, for a trial between recorded runs that
        takes more or fewer steps. Where two evaluations fall on one step, the later one is kept.
        """
        history: dict[int, float] = {}
        for step, value in zip(self.steps, self.metric, strict=True):
            if step <= end:
                history[max(1, round(step * scale))] = value
        return tuple(history.items())


@dataclass(frozen=True)
class Outcome:
    """How a replayed trial ends at one (batch size, learning rate, seed)."""

    steps: int | None
    """Steps to the target; None if it was not reached."""
    end: int
    """The last step of its history."""
    seconds_per_step: float
    history: tuple[tuple[int, float], ...]
    diverged: bool


def weights_around(values: Sequence[Number], value: float) -> list[tuple[Number, float]]:
    """Give the recorded values around ``value`` that an interpolation takes, with their weights.

    There are two values, whose weights are linear in the logarithm and add up to 1. There is one
    where ``value`` itself was recorded, or lies beyond the first or the last recorded value.
    ``values`` rise.
    """
    value = min(max(value, values[0]), values[-1])
    above = bisect_left(values, value)
    if values[above] == value:
        return [(values[above], 1.0)]
    low = values[above - 1]
    high = values[above]
    weight = math.log(value / low) / math.log(high / low)
    return [(low, 1.0 - weight), (high, weight)]


def at_share(items: Sequence[Item], share: float) -> Item:
    """Give the item at a share of the way through a list: the first at 0, the last at 1."""
    return items[min(int(share * len(items)), len(items) - 1)]
