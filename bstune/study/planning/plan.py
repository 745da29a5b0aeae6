"""The budget of a study's search, its seeds and batch sizes as functions of the study's seed, and how long it takes."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from bstune.core.objectives import Objective
from bstune.core.records import TrialProtocol, TrialResult
from bstune.core.search_space import Space
from bstune.trial.backend import TrialBackend

FIRST_REPLICATE = 1_000_000  # trial indices of replicates begin here; no search has so many
RESCUE_SHARE = (
    0.4  # of a study's seconds, kept for the most promising trial while none has reached the target
)
MEANS_SHARE = 0.125  # of a study's seconds: for the baseline's first run, and for its fresh seeds
QUICK_SECONDS = 120.0  # of wall time, of a study with quick=true
QUADRATURE = 64  # batch sizes at which the mean over log B is taken


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
    """How long a study searches, and for what."""

    objective: Objective
    trials: int  # of the search; one that continues another is the same trial
    seconds: float | None  # of training, over the whole search
    wall_seconds: float | None  # of the command's wall time, see bstune.study.planning.wall
    stratified: float  # share of trials whose batch size is spread evenly over log B, for samplers that stop no trials
    seed: int  # of the study
    precision: float | None = (
        None  # the search ends once B_crit's interval is narrower than this factor
    )
    # Of the objective loss: the search ends once so many seeds' scatters are all that is left to gain.
    least_gain: float | None = None
    replicates: int = 0  # fresh seeds on which each candidate runs again
    candidates: int = 1  # how many trials may run again
    baseline: bool = False  # whether trial 0 is the configuration that the user runs today

    def trial_seed(self, trial_index: int) -> int:
        """Return the seed of a trial: initial weights, order of the data, augmentation."""
        return self._seed(trial_index, 0)

    def sampler_seed(self, trial_index: int, attempt: int = 0) -> int:
        """Return the sampler's seed at a trial: a sampler seeded once would repeat itself after a restart."""
        return self._seed(trial_index, 1, *([attempt] if attempt else []))

    def replicate_index(self, trial_index: int, replicate: int) -> int:
        """Return the index of a trial's replicate, counted from 0, however many replicates there are."""
        return FIRST_REPLICATE * (1 + replicate) + trial_index

    def stratum(self, trial_index: int, space: Space) -> int | None:
        """Return the batch size of a stratified trial; None where the sampler chooses it."""
        before, after = (
            math.floor(trial_index * self.stratified),
            math.floor((trial_index + 1) * self.stratified),
        )
        return None if before == after else space.stratum(before, self._seed(0, 2) / 2**32)

    def _seed(self, trial_index: int, *purpose: int) -> int:
        return int(np.random.SeedSequence([self.seed, trial_index, *purpose]).generate_state(1)[0])

    def spent(self, results: Iterable[TrialResult], continues: bool = False) -> SearchEnd | None:
        """Say that the seconds of training are spent; None if they are not.

        ``continues``: whether a stopped trial can go on, for which a share is kept while none has reached the target.
        """
        if self.seconds is None:
            return None
        done = list(results)
        train = sum(result.train_seconds for result in done if result.replicate_of is None)
        keeps = continues and not any(result.reached for result in done)
        share = 1.0 - RESCUE_SHARE if keeps else 1.0
        if train < share * self.seconds:
            return None
        return SearchEnd(
            f"stopped: search.seconds={self.seconds:g} of training are spent ({train:.1f} s)",
            "search.seconds",
        )


def is_baseline_replicate(trial_index: int) -> bool:
    """Return whether an index is that of the baseline on a winner's fresh seed: it replicates index 0."""
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
    shares = [(i + 0.5) / QUADRATURE for i in range(QUADRATURE)]
    sizes = [round(space.low * (space.high / space.low) ** share) for share in shares]
    training = [backend.longest(size, protocol) * backend.step_time(size) for size in sizes]
    seconds = budget.trials * sum(training) / len(training)
    if budget.seconds is not None:
        seconds = min(seconds, budget.seconds + max(training))
    return seconds * (1.0 + backend.evaluation_share)


def remaining_seconds(budget: SearchBudget, results: Sequence[TrialResult]) -> float | None:
    """Return the seconds that the rest of a search takes if its trials go on as they did; None before the first."""
    done = searched(results)
    points = sum(result.resumed_from is None for result in done)
    if not points:
        return None
    return max(0, budget.trials - points) * sum(result.wall_seconds for result in done) / points


def searched(results: Iterable[TrialResult]) -> list[TrialResult]:
    """Return the search's trials: neither replicates, which may have begun before, nor failed ones."""
    return [trial for trial in results if trial.replicate_of is None and trial.status != "failed"]
