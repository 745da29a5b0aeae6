"""The plan of a study: its slots, and what each slot's seeds and batch size are, as functions of the study's seed.

How long a study may take, for the plan that is printed before it: from a few timed steps, or from its own trials.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from bstune.core.errors import ConfigError
from bstune.core.records import TrialResult
from bstune.core.search_space import Space

OBJECTIVES = ("time", "steps", "both", "curve")
CONFIRMATIONS = 1_000_000  # slots of confirmation runs begin here; no search has so many


@dataclass(frozen=True)
class SearchBudget:
    """What a study will do.

    Args:
        objective: ``time``, ``steps``, ``both`` or ``curve``.
        trials: slots of the search.
        seconds: of training, over the whole search; None for no limit.
        wall_seconds: of trials' wall time, over the whole search; None for no limit.
        stratified: share of the slots whose batch size is spread evenly over log B, for samplers other than bstune's.
        seed: of the study.
        precision: the search ends once B_crit's interval is narrower than this factor; None: it does not.
        confirmations: fresh seeds on which each finalist runs again; 0 for none.
        finalists: how many trials may be confirmed.
    """

    objective: str
    trials: int
    seconds: float | None
    wall_seconds: float | None
    stratified: float
    seed: int
    precision: float | None = None
    confirmations: int = 0
    finalists: int = 1

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
        if self.precision is not None and not self.precision > 1:
            raise ConfigError(
                f"search.precision must be a factor over 1, or null for no such end, but got {self.precision}"
            )
        if self.confirmations < 0 or self.finalists < 1:
            raise ConfigError(
                "search.confirmations must be at least 0 and search.finalists at least 1, but got "
                f"{self.confirmations} and {self.finalists}"
            )
        if self.seed < 0:
            raise ConfigError(f"seed must be at least 0, but got {self.seed}")

    def trial_seed(self, trial_index: int) -> int:
        """Return the seed of the slot's trial: initial weights, order of the data, augmentation."""
        return _seed(self.seed, trial_index, 0)

    def replicate_index(self, trial_index: int, replicate: int) -> int:
        """Return the slot of the run that confirms the trial of ``slot`` for the ``replicate``-th time, from 0.

        It does not depend on how many confirmations there are: their number may grow while a study goes on.
        """
        return CONFIRMATIONS * (1 + replicate) + trial_index

    def sampler_seed(self, trial_index: int) -> int:
        """Return the seed of the sampler at the slot: a sampler seeded once would repeat itself after a restart."""
        return _seed(self.seed, trial_index, 1)

    def stratum(self, trial_index: int, space: Space) -> int | None:
        """Return the batch size of a stratified slot; None where the sampler chooses it."""
        before, after = math.floor(trial_index * self.stratified), math.floor((trial_index + 1) * self.stratified)
        if before == after:
            return None
        return space.stratum(before, _seed(self.seed, 0, 2) / 2**32)

    def spent(self, results: Iterable[TrialResult]) -> str | None:
        """Return which of the two limits in seconds the finished trials have reached, in words; None if none.

        Confirmations come after the search and are not counted.
        """
        done = [result for result in results if result.replicate_of is None]
        train, wall = sum(r.train_seconds for r in done), sum(r.wall_seconds for r in done)
        if self.seconds is not None and train >= self.seconds:
            return f"search.seconds={self.seconds:g} of training are spent ({train:.1f} s)"
        if self.wall_seconds is not None and wall >= self.wall_seconds:
            return f"search.wall_seconds={self.wall_seconds:g} are spent ({wall:.1f} s)"
        return None


def _seed(study_seed: int, trial_index: int, purpose: int) -> int:
    return int(np.random.SeedSequence([study_seed, trial_index, purpose]).generate_state(1)[0])


QUADRATURE = 64  # batch sizes at which the mean over log B is taken


def max_seconds(
    plan: SearchBudget,
    space: Space,
    last_step: Callable[[int], int],
    step_time: Callable[[float], float],
    evaluation_share: float,
) -> float:
    """Return the seconds of a study in which every trial runs to its end, evaluation included.

    The mean over batch sizes is taken evenly over log B; trials that reach the target end earlier.

    Args:
        plan: trials and limits of the study.
        space: batch sizes.
        last_step: steps at a batch size after which a trial gives up.
        step_time: seconds per step at a batch size.
        evaluation_share: of evaluation in training, in seconds.
    """
    shares = [(i + 0.5) / QUADRATURE for i in range(QUADRATURE)]
    sizes = [round(space.low * (space.high / space.low) ** share) for share in shares]
    training = [last_step(size) * step_time(size) for size in sizes]
    seconds = plan.trials * sum(training) / len(training)
    if plan.seconds is not None:
        seconds = min(seconds, plan.seconds + max(training))
    return seconds * (1.0 + evaluation_share)


def remaining_seconds(plan: SearchBudget, results: Sequence[TrialResult]) -> float | None:
    """Return the seconds that the rest of a search takes if its trials go on as they did; None before the first."""
    done = [result.wall_seconds for result in results if result.status != "failed" and result.replicate_of is None]
    if not done:
        return None
    return max(0, plan.trials - len(done)) * sum(done) / len(done)
