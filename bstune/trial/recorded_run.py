"""A recorded run, what a trial comes to that recorded runs answer, and weights between them."""

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
    """Those that were evaluated; a run that diverged may have none."""
    metric: tuple[float, ...]
    seconds_per_step: float
    diverged: bool
    hyperparameters: Mapping[str, float] = field(default_factory=dict)
    """What was searched besides, by name; replays take it as it comes."""
    horizon: int | None = None
    """Steps after which its schedule ended; None: it has no horizon."""

    @property
    def end(self) -> int:
        """The last evaluated step, which ends the record; 1 of a run that diverged before any."""
        return self.steps[-1] if self.steps else 1

    def steps_to(self, target: Target) -> int | None:
        """Give the first evaluated step that met the target, None if none did."""
        for step, value in zip(self.steps, self.metric, strict=True):
            if target.reached(value):
                return step
        return None

    def history_to(
        self, end: float = math.inf, scale: float = 1.0
    ) -> tuple[tuple[int, float], ...]:
        """Give (step, metric) up to the step ``end``, the steps times ``scale``.

        Of evaluations that fall together the last stays.
        """
        history: dict[int, float] = {}
        for step, value in zip(self.steps, self.metric, strict=True):
            if step <= end:
                history[max(1, round(step * scale))] = value
        return tuple(history.items())


@dataclass(frozen=True)
class Outcome:
    """What a trial comes to at one (batch size, learning rate, seed)."""

    steps: int | None
    """To the target, None if it was not reached."""
    end: int
    """The last step of its history."""
    seconds_per_step: float
    history: tuple[tuple[int, float], ...]
    diverged: bool


def weights_around(values: Sequence[Number], value: float) -> list[tuple[Number, float]]:
    """Give the recorded values around ``value``, each with its weight, linear in the logarithm.

    ``values`` rise; beyond them it is as at their edge.
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
    """Choose the item at a share, in [0, 1], of some items."""
    return items[min(int(share * len(items)), len(items) - 1)]
