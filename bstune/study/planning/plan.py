"""The budget of a study's search, its seeds and batch sizes as functions of its seed, and how long it takes."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from bstune.core.objectives import Objective
from bstune.core.records import TrialProtocol, TrialResult
from bstune.core.search_space import Space
from bstune.trial.backend import TrialBackend

# Trial indices of replicates begin here; no search has so many.
FIRST_REPLICATE = 1_000_000
# Of a study's seconds, kept for the most promising trial while none has reached the target.
RESCUE_SHARE = 0.4
# Of a study's seconds: for the baseline's first run, and for its fresh seeds.
MEANS_SHARE = 0.125
# Seconds of wall time, of a study with quick=true.
QUICK_SECONDS = 120.0
# Batch sizes at which the mean over log B is taken.
QUADRATURE = 64
# What a seed is of, beside the study's seed and the trial's index.
TRIAL_PURPOSE = 0
SAMPLER_PURPOSE = 1
STRATA_PURPOSE = 2


@dataclass(frozen=True)
class SearchEnd:
    """What ended a search.

    Args:
        sentence: it, for the user.
        limit: the option that ended it before its trials were through; None for another end.
    """

    sentence: str
    limit: Literal["search.seconds", "search.wall_seconds", "search.least_gain"] | None = None


@dataclass(frozen=True)
class SearchBudget:
    """How long a study searches, and for what.

    Args:
        objective: of the study.
        trials: of the search; one that continues another is the same trial.
        seconds: of training, over the whole search.
        wall_seconds: of the command's wall time, see :mod:`bstune.study.planning.wall`.
        stratified: share of trials whose batch size is spread evenly over log B, for samplers that
            stop no trials.
        seed: of the study.
        precision: the search ends once B_crit's interval is narrower than this factor.
        least_gain: of the objective loss: the search ends once so many seeds' scatters are all that
            is left to gain.
        replicates: fresh seeds on which each candidate runs again.
        candidates: how many trials may run again.
        baseline: whether trial 0 is the configuration that the user runs today.
    """

    objective: Objective
    trials: int
    seconds: float | None
    wall_seconds: float | None
    stratified: float
    seed: int
    precision: float | None = None
    least_gain: float | None = None
    replicates: int = 0
    candidates: int = 1
    baseline: bool = False

    def trial_seed(self, trial_index: int) -> int:
        """Give the seed of a trial: initial weights, order of the data, augmentation."""
        return self._seed(trial_index, TRIAL_PURPOSE)

    def sampler_seed(self, trial_index: int, attempt: int = 0) -> int:
        """Give the sampler's seed at a trial: a sampler seeded once would repeat itself after a restart."""
        if attempt == 0:
            return self._seed(trial_index, SAMPLER_PURPOSE)
        return self._seed(trial_index, SAMPLER_PURPOSE, attempt)

    def replicate_index(self, trial_index: int, replicate: int) -> int:
        """Give the index of a trial's replicate, counted from 0, however many replicates there are."""
        return FIRST_REPLICATE * (1 + replicate) + trial_index

    def stratum(self, trial_index: int, space: Space) -> int | None:
        """Give the batch size of a stratified trial; None where the sampler chooses it."""
        strata_before = math.floor(trial_index * self.stratified)
        strata_after = math.floor((trial_index + 1) * self.stratified)
        if strata_before == strata_after:
            return None
        # One shift of all strata, uniform in [0, 1): the study's seed sets it.
        shift = self._seed(0, STRATA_PURPOSE) / 2**32
        return space.stratum(strata_before, shift)

    def _seed(self, trial_index: int, *purpose: int) -> int:
        """Draw 32 bits that are independent of those of other trials and purposes."""
        return int(np.random.SeedSequence([self.seed, trial_index, *purpose]).generate_state(1)[0])

    def spent(self, results: Iterable[TrialResult], continues: bool = False) -> SearchEnd | None:
        """Say that the seconds of training are spent; None if they are not.

        ``continues``: whether a stopped trial can go on, for which a share is kept while none has
        reached the target.
        """
        if self.seconds is None:
            return None
        trials = list(results)
        train = sum(trial.train_seconds for trial in trials if trial.replicate_of is None)
        keeps_share = continues and not any(trial.reached for trial in trials)
        share = 1.0 - RESCUE_SHARE if keeps_share else 1.0
        if train < share * self.seconds:
            return None
        return SearchEnd(
            f"stopped: search.seconds={self.seconds:g} of training are spent ({train:.1f} s)",
            "search.seconds",
        )


def is_baseline_replicate(trial_index: int) -> bool:
    """Say whether an index is that of the baseline on a winner's fresh seed: it replicates index 0."""
    return trial_index >= FIRST_REPLICATE and trial_index % FIRST_REPLICATE == 0


def max_seconds(
    budget: SearchBudget,
    space: Space,
    protocol: TrialProtocol,
    backend: TrialBackend,
    trial_seconds: float | None = None,
) -> float:
    """Give the seconds of a search in which every trial runs to its budget, evaluation included.

    Args:
        budget: of the search.
        space: whose batch sizes count evenly over log B.
        protocol: has the budget of a trial.
        backend: knows the seconds of a step.
        trial_seconds: the budget of a trial where it is one of seconds; None: the protocol's is.
    """
    if trial_seconds is not None:
        return budget.trials * trial_seconds * (1.0 + backend.evaluation_share)
    training = list[float]()
    for place in range(QUADRATURE):
        share = (place + 0.5) / QUADRATURE
        batch_size = round(space.low * (space.high / space.low) ** share)
        steps = backend.longest(batch_size, protocol)
        training.append(steps * backend.step_time(batch_size))
    seconds = budget.trials * sum(training) / len(training)
    if budget.seconds is not None:
        # The last trial may begin just before they are spent.
        seconds = min(seconds, budget.seconds + max(training))
    return seconds * (1.0 + backend.evaluation_share)


def remaining_seconds(budget: SearchBudget, results: Sequence[TrialResult]) -> float | None:
    """Predict the seconds of the rest of a search, if it goes on as it did.

    None before its first trial.
    """
    trials = searched(results)
    points = points_of(trials)
    if not points:
        return None
    points_left = max(0, budget.trials - points)
    return points_left * sum(trial.wall_seconds for trial in trials) / points


def searched(results: Iterable[TrialResult]) -> list[TrialResult]:
    """Give the search's trials: neither replicates, which may have begun before, nor failed ones."""
    return [trial for trial in results if trial.replicate_of is None and trial.status != "failed"]


def points_of(trials: Iterable[TrialResult]) -> int:
    """Count the search's points: a trial that continues another one is the same point."""
    return sum(trial.resumed_from is None for trial in searched(trials))
