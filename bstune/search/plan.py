"""The plan of a study: its slots, and what each slot's seeds and batch size are, as functions of the study's seed."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from bstune.errors import ConfigError
from bstune.records import TrialResult
from bstune.search.space import Space

OBJECTIVES = ("time", "steps", "both")


@dataclass(frozen=True)
class Plan:
    """What a study will do.

    Args:
        objective: ``time``, ``steps`` or ``both``.
        trials: slots of the whole study.
        seconds: of training, over the whole study; None for no limit.
        wall_seconds: of trials' wall time, over the whole study; None for no limit.
        stratified: share of the slots whose batch size is spread evenly over log B.
        seed: of the study.
    """

    objective: str
    trials: int
    seconds: float | None
    wall_seconds: float | None
    stratified: float
    seed: int

    def __post_init__(self) -> None:
        if self.objective not in OBJECTIVES:
            raise ConfigError(f"search.objective must be one of {', '.join(OBJECTIVES)}, but got {self.objective!r}")
        if self.trials < 1:
            raise ConfigError(f"search.trials must be at least 1, but got {self.trials}")
        for name, value in (("seconds", self.seconds), ("wall_seconds", self.wall_seconds)):
            if value is not None and not value > 0:
                raise ConfigError(f"search.{name} must be positive, or null for no limit, but got {value}")
        if not 0.0 <= self.stratified <= 1.0:
            raise ConfigError(f"search.stratified must be a share from 0 to 1, but got {self.stratified}")
        if self.seed < 0:
            raise ConfigError(f"seed must be at least 0, but got {self.seed}")

    def trial_seed(self, slot: int) -> int:
        """Return the seed of the slot's trial: initial weights, order of the data, augmentation."""
        return _seed(self.seed, slot, 0)

    def sampler_seed(self, slot: int) -> int:
        """Return the seed of the sampler at the slot: a sampler seeded once would repeat itself after a restart."""
        return _seed(self.seed, slot, 1)

    def stratum(self, slot: int, space: Space) -> int | None:
        """Return the batch size of a stratified slot; None where the sampler chooses it."""
        before, after = math.floor(slot * self.stratified), math.floor((slot + 1) * self.stratified)
        if before == after:
            return None
        return space.stratum(before, _seed(self.seed, 0, 2) / 2**32)

    def spent(self, results: Iterable[TrialResult]) -> str | None:
        """Return which of the two limits in seconds the finished trials have reached, in words; None if none."""
        done = list(results)
        train, wall = sum(r.train_seconds for r in done), sum(r.wall_seconds for r in done)
        if self.seconds is not None and train >= self.seconds:
            return f"search.seconds={self.seconds:g} of training are spent ({train:.1f} s)"
        if self.wall_seconds is not None and wall >= self.wall_seconds:
            return f"search.wall_seconds={self.wall_seconds:g} are spent ({wall:.1f} s)"
        return None


def _seed(study_seed: int, slot: int, purpose: int) -> int:
    return int(np.random.SeedSequence([study_seed, slot, purpose]).generate_state(1)[0])
