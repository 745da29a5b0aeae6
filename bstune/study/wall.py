"""The wall time of a study: what its commands have taken, and what is kept for the replicates of its winners.

It is counted from the start of the owner's process, so that imports, survey and preflight are part of it, over all
commands that have owned the study. The others that run its trials count by the owner's clock.
"""

import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import optuna

from bstune.core.records import TrialResult, TrialSpec
from bstune.study.plan import SearchBudget, searched
from bstune.study.replicates import MERITS, ranked

# Attributes of the study: when it would have begun if its commands had run without a break, and what they have taken.
BEGAN, TAKEN = "bstune:began", "bstune:wall_seconds"
# The report takes at least so many seconds, and as long as so many decisions: a busy machine slows both down. Before
# each replicate the posterior is drawn more finely than for a decision. Measured on digits: 30 to 40 and 3 to 10.
REPORT_SECONDS, REPORT_DECISIONS, REPLICATE_DECISIONS = 3.0, 40, 10


class WallTime:
    """What is left of ``search.wall_seconds``; without that limit, all the time there is."""

    def __init__(
        self,
        study: optuna.Study,
        budget: SearchBudget,
        elapsed: Callable[[], float],
        owner: bool,
        now: Callable[[], float] = time.time,
    ) -> None:
        """``elapsed`` seconds are this command's."""
        self._study, self._budget, self._owner = study, budget, owner
        self._limit = math.inf if budget.wall_seconds is None else budget.wall_seconds
        self._between: list[float] = []  # seconds between two trials, as a decision takes
        self._since: float | None = None  # the end of the last trial
        self._taken: Callable[[], float] = elapsed
        if math.isfinite(self._limit):
            before = study.user_attrs.get(TAKEN, 0.0)
            if owner:
                self._taken = lambda: before + elapsed()
                study.set_user_attr(BEGAN, now() - self._taken())
            else:
                began = study.user_attrs.get(BEGAN, now())
                self._taken = lambda: now() - began

    def keep(self) -> None:
        """Store what the study has taken, for the command that continues it."""
        if self._owner and math.isfinite(self._limit):
            self._study.set_user_attr(TAKEN, self._taken())

    @contextmanager
    def trial(self) -> Iterator[None]:
        """Note when trials run: what the command does between them takes time, too."""
        if self._since is not None:
            self._between.append(self._taken() - self._since)
        yield
        self._since = self._taken()

    @property
    def decision(self) -> float:
        """Seconds between two trials."""
        return statistics.fmean(self._between) if self._between else 0.0

    @property
    def left(self) -> float:
        """Seconds until the report has to begin."""
        return self._limit - max(REPORT_SECONDS, REPORT_DECISIONS * self.decision) - self._taken()

    def spent(self, done: Sequence[TrialResult]) -> str | None:
        """Return the sentence that says that a search has nothing left; None if it has."""
        reserve, walls = self.reserve(done), [trial.wall_seconds for trial in searched(done)]
        one_more = self.decision + (statistics.fmean(walls) if walls else 0.0)
        if self.left > reserve + one_more * (1 if reserve else 1 + self._budget.replicates):
            return None
        kept = f", {reserve:.1f} s of them kept for running the winner again" if reserve else ""
        return (
            f"stopped: search.wall_seconds={self._limit:g} are spent{kept} ({self._taken():.1f} s)"
        )

    def reserve(self, done: Sequence[TrialResult]) -> float:
        """Return the seconds that replicates of the winners so far are predicted to take."""
        winners = best(done, self._budget)
        return self._budget.replicates * sum(
            self.replicate_seconds(done, trial) for trial in winners
        )

    def replicate_seconds(self, done: Sequence[TrialResult], trial: TrialResult) -> float:
        """Return the seconds that one replicate of a trial is predicted to take."""
        return REPLICATE_DECISIONS * self.decision + chain_seconds(done, trial)

    def max_steps(
        self,
        done: Sequence[TrialResult],
        spec: TrialSpec,
        step_time: Callable[[float], float],
        share: float,
    ) -> int:
        """Return the step up to which a trial can be trained so that the replicates of the winner can still be run.

        Before anything has reached the target, that is so of a trial that may be the first. ``share`` of evaluation in
        training is what is known of other costs before the first trial.
        """
        parent = next((trial for trial in done if trial.number == spec.resumed_from), None)
        first = 0 if parent is None else parent.steps
        reserve, left = self.reserve(done), self.left
        if not reserve:
            before = REPLICATE_DECISIONS * self.decision + (
                0.0 if parent is None else chain_seconds(done, parent)
            )
            left = (left - self._budget.replicates * before) / (1 + self._budget.replicates)
        seconds = step_time(spec.batch_size) * slowness(done, step_time, share)
        return first + max(1, math.floor(min((left - reserve) / seconds, 1e15)))


def best(done: Sequence[TrialResult], budget: SearchBudget) -> list[TrialResult]:
    """Return the reached trial that stands first by each merit of the objective."""
    return [trials[0] for merit in MERITS[budget.objective] if (trials := ranked(done, merit))]


def chain_seconds(done: Iterable[TrialResult], trial: TrialResult) -> float:
    """Return the wall seconds of a trial and of those that it continues."""
    by_number = {one.number: one for one in done}
    seconds, last = trial.wall_seconds, trial
    while last.resumed_from is not None:
        last = by_number[last.resumed_from]
        seconds += last.wall_seconds
    return seconds


def slowness(
    done: Sequence[TrialResult], step_time: Callable[[float], float], share: float
) -> float:
    """Return the wall seconds of trials over those that their steps take by tau(B); 1 + ``share`` before the first."""
    steps = {trial.number: trial.steps for trial in done}
    wall = training = 0.0
    for trial in searched(done):
        own = trial.steps - (0 if trial.resumed_from is None else steps[trial.resumed_from])
        wall, training = wall + trial.wall_seconds, training + own * step_time(trial.batch_size)
    return wall / training if training else 1.0 + share
