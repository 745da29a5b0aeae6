"""The budget of a study's search, its seeds, and how long it takes at most."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from bstune.core.objectives import Objective
from bstune.core.records import TrialProtocol, TrialResult
from bstune.core.search_space import Space
from bstune.options import StudyOptions
from bstune.trial.backend import TrialBackend

# Trial indices of replicates begin here; no search has so many.
FIRST_REPLICATE = 1_000_000
# The share of a study's seconds that is kept for the most promising trial while none has reached
# the target.
RESCUE_SHARE = 0.4
# The share of a study's seconds for the baseline's first run, and once more for its fresh seeds.
MEANS_SHARE = 0.125
# Seconds of wall time that a study with quick=true has.
QUICK_SECONDS = 120.0
# Of a limit that nobody has stated, at most this share is spent on the starts of the study's
# commands: on a busy machine imports and preflight alone would take all of it.
START_SHARE = 0.5
# Batch sizes at which the mean over log B is taken.
QUADRATURE = 64
# What a seed is for. It is made of this, the study's seed and the trial's index.
TRIAL_PURPOSE = 0
SAMPLER_PURPOSE = 1
STRATA_PURPOSE = 2


@dataclass(frozen=True)
class SearchEnd:
    """What ended a search.

    Args:
        sentence: what ended it, in words for the user.
        limit: the option that ended it before all its trials had run; None for another end.
        least_limit: the least value of that option with which two configurations can be tried, or
            another one where two were tried and the last command had no time for any; None where
            the search has had time for such, or where it is not known.
    """

    sentence: str
    limit: Literal["search.seconds", "search.wall_seconds", "search.least_gain"] | None = None
    least_limit: int | None = None


@dataclass(frozen=True)
class SearchBudget:
    """How long a study searches, and for what.

    Args:
        objective: of the study.
        trials: how many the search may try; one that continues another is the same trial.
        seconds: of training, over the whole search; None: any.
        wall_seconds: of the study's wall time, see :mod:`bstune.study.planning.wall`; None: any.
        most_start: of those seconds, as many as the starts of its commands count for at most.
        stratified: share of trials whose batch size is spread evenly over log B, for samplers that
            stop no trials.
        seed: of the study.
        precision: the search ends once the upper end of B_crit's interval is less than so many
            times the lower one; None: it does not end by that.
        least_gain: the search for the objective loss ends once no more is left to gain than this
            multiple of the metric's scatter from seed to seed; None: it does not end by that.
        replicates: fresh seeds on which each candidate runs again.
        candidates: how many trials may run again on fresh seeds.
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
    most_start: float = math.inf

    def trial_seed(self, trial_index: int) -> int:
        """Give the seed of a trial, for its initial weights, order of data and augmentation."""
        return self._seed(trial_index, TRIAL_PURPOSE)

    def sampler_seed(self, trial_index: int, attempt: int = 0) -> int:
        """Give the seed with which the sampler suggests one trial.

        A sampler that is seeded once would repeat itself after a restart. ``attempt``: how many
        points were given up at this trial's index, as their trials failed.
        """
        if attempt == 0:
            return self._seed(trial_index, SAMPLER_PURPOSE)
        return self._seed(trial_index, SAMPLER_PURPOSE, attempt)

    def replicate_index(self, trial_index: int, replicate: int) -> int:
        """Give the trial index at which a trial runs again on a fresh seed.

        ``replicate`` counts those runs from 0. No two runs share an index, as the search's own
        indices stay below ``FIRST_REPLICATE``.
        """
        return FIRST_REPLICATE * (1 + replicate) + trial_index

    def stratum(self, trial_index: int, space: Space) -> int | None:
        """Give the batch size of a trial, if it is one of those spread evenly over log B.

        It is None where the sampler chooses it.
        """
        # The share ``stratified`` of the first n trials is spread, rounded down: this trial is one
        # of them where their number rises with it.
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

    @staticmethod
    def trained_seconds(trials: Iterable[TrialResult]) -> float:
        """Add up the seconds of training of the search, without runs on fresh seeds."""
        return sum(trial.train_seconds for trial in trials if trial.replicate_of is None)

    def end_if_spent(
        self, results: Iterable[TrialResult], continues: bool = False
    ) -> SearchEnd | None:
        """Give the end of a search whose seconds of training are spent; None if they are not.

        ``continues``: whether a stopped trial can go on. Until a trial has reached the target, a
        share of the seconds is kept for that.
        """
        if self.seconds is None:
            return None
        trials = list(results)
        trained = self.trained_seconds(trials)
        keeps_share = continues and not any(trial.reached for trial in trials)
        share = 1.0 - RESCUE_SHARE if keeps_share else 1.0
        if trained < share * self.seconds:
            return None
        return SearchEnd(
            f"stopped: search.seconds={self.seconds:g} of training are spent ({trained:.1f} s)",
            "search.seconds",
        )


def wall_limit(options: StudyOptions) -> float | None:
    """Give the seconds of wall time that a study has, stated or assumed; None: any number."""
    if options.search.wall_seconds is not None:
        return options.search.wall_seconds
    return QUICK_SECONDS if options.quick else None


def most_start_seconds(options: StudyOptions) -> float:
    """Give the seconds for which the starts of a study's commands count at most, in all.

    A limit that the user has stated holds for the starts, too.
    """
    is_assumed = options.quick and options.search.wall_seconds is None
    return START_SHARE * QUICK_SECONDS if is_assumed else math.inf


def is_baseline_replicate(trial_index: int) -> bool:
    """Whether a trial index is that of the baseline's run on a winner's fresh seed.

    Such a run is a replicate of index 0.
    """
    return trial_index >= FIRST_REPLICATE and trial_index % FIRST_REPLICATE == 0


def max_seconds(
    budget: SearchBudget,
    space: Space,
    protocol: TrialProtocol,
    backend: TrialBackend,
    trial_seconds: float | None = None,
) -> float:
    """Predict the seconds of a search in which every trial runs to its budget, with evaluation.

    Args:
        budget: of the search.
        space: the batch sizes, of which each octave is taken to have as many trials.
        protocol: has the budget of a trial in steps or examples.
        backend: knows the seconds of a step.
        trial_seconds: the budget of a trial, if that is one of seconds; None: the protocol's.
    """
    if trial_seconds is not None:
        return budget.trials * trial_seconds * (1.0 + backend.evaluation_share)
    # The mean over log B, by the midpoint rule.
    training = list[float]()
    for place in range(QUADRATURE):
        share_of_range = (place + 0.5) / QUADRATURE
        batch_size = round(space.low * (space.high / space.low) ** share_of_range)
        steps = backend.longest(batch_size, protocol)
        training.append(steps * backend.step_time(batch_size))
    seconds = budget.trials * sum(training) / len(training)
    if budget.seconds is not None:
        # The last trial may begin just before they are spent.
        seconds = min(seconds, budget.seconds + max(training))
    return seconds * (1.0 + backend.evaluation_share)


def remaining_seconds(budget: SearchBudget, results: Sequence[TrialResult]) -> float | None:
    """Predict the seconds of the rest of a search from the mean of its points so far.

    It is None before its first trial has ended.
    """
    trials = trials_of_search(results)
    points = count_points(trials)
    if not points:
        return None
    points_left = max(0, budget.trials - points)
    return points_left * sum(trial.wall_seconds for trial in trials) / points


def trials_of_search(results: Iterable[TrialResult]) -> list[TrialResult]:
    """Select the trials of the search itself: no runs on fresh seeds, and none that failed."""
    return [trial for trial in results if trial.replicate_of is None and trial.status != "failed"]


def count_points(trials: Iterable[TrialResult]) -> int:
    """Count the configurations that a search has tried.

    A trial that continues another one, or runs it once more from its first step, is the same
    configuration.
    """
    of_search = trials_of_search(trials)
    begun = sum(trial.resumed_from is None for trial in of_search)
    return begun - len(reruns(of_search))


def reruns(trials: Iterable[TrialResult]) -> dict[int, int]:
    """Map each trial that repeats a stopped one from step 0 to the last part of the repeated one.

    Both are given by their numbers. A stopped trial begins anew where its state cannot be read, or
    none is kept: its second run has the same seed and values, and continues no trial.
    """
    last_part = dict[tuple[object, ...], int]()
    begun_anew = dict[int, int]()
    for trial in sorted(trials_of_search(trials), key=lambda trial: trial.number):
        values = tuple(sorted(trial.hyperparameters.items()))
        identity = (trial.batch_size, trial.lr, trial.seed, values)
        if trial.resumed_from is None and identity in last_part:
            begun_anew[trial.number] = last_part[identity]
        # Only a stopped trial has anything to run once more for.
        if trial.status == "stopped":
            last_part[identity] = trial.number
    return begun_anew


def compares(budget: SearchBudget, trials: Iterable[TrialResult]) -> bool:
    """Whether a study's fresh seeds compare configurations: two were tried, or one was asked for.

    The fresh seeds of a single configuration, which is often the user's own, choose nothing: the
    second one comes first.
    """
    return count_points(trials) >= min(2, budget.trials)
