"""The wall time of a study: what its commands have taken, and what is kept for what has to come after the search.

It is counted from the start of the owner's process, so that imports, survey and preflight are part of it, over all
commands that have owned the study. The others that run its trials count by the owner's clock.

The study plans backwards. The report takes its time at the end, before it the winner's fresh seeds. Where nothing has
reached the target yet, a share is kept to continue the most promising trial until it does.
"""

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import optuna
from scipy.optimize import nnls

from bstune.core.objectives import SOUGHT
from bstune.core.records import TrialResult, TrialSpec
from bstune.search.acquisition import LEAST_GROWTH, MIN_STEPS
from bstune.study.planning.plan import MEANS_SHARE, RESCUE_SHARE, SearchBudget, SearchEnd, searched
from bstune.study.planning.replicates import ranked

# Attributes of the study: when it would have begun if its commands had run without a break, and what they have taken.
BEGAN, TAKEN = "bstune:began", "bstune:wall_seconds"
# Before each replicate, and once before the answer, the posterior is drawn more finely than for a decision. Until that
# has been measured it is taken to last as long as so many of them: on digits they were 1 to 4 of what lies between two
# trials, for 7 to 64 points, on busy cores.
REPORT_DECISIONS = 3
REPORT_SECONDS = (
    0.5  # of what else comes before the answer: 0.1 to 1.4 on ten projects, on busy cores
)
OTHERS_SHARE = (
    0.1  # and for fresh seeds of further candidates than the first, and of the baseline, at most
)
BASELINE_SLACK = 2.0  # times its share, that the first run of the baseline may take
PRIOR_ROWS = 1.0  # trials that what is known of evaluation beforehand counts for


@dataclass(frozen=True)
class TrialCost:
    """The wall seconds of a trial: ``fixed``, and ``slope`` times the seconds that its steps take by tau(B)."""

    fixed: float
    slope: float

    def seconds(self, training: float) -> float:
        """Return the wall seconds of a trial whose steps take ``training`` seconds."""
        return self.fixed + self.slope * training

    def steps(self, seconds: float, seconds_per_step: float) -> int:
        """Return how many steps a trial can take within so many wall seconds; none below 0."""
        steps = (seconds - self.fixed) / (self.slope * seconds_per_step)
        return max(0, math.floor(min(steps, 1e15)))


def fit_cost(
    done: Sequence[TrialResult], step_time: Callable[[float], float], share: float
) -> TrialCost:
    """Return what trials cost, by least squares over the relative errors; neither part is below 0.

    ``share`` of evaluation in training is what is known of other costs before the first trial.
    """
    steps = {trial.number: trial.steps for trial in done}
    rows, walls = [[0.0, PRIOR_ROWS]], [PRIOR_ROWS * (1.0 + share)]
    for trial in done:
        before = 0 if trial.resumed_from is None else steps.get(trial.resumed_from, 0)
        training = max(trial.steps - before, 0) * step_time(trial.batch_size)
        if trial.status == "failed" or trial.wall_seconds <= 0.0:
            continue
        rows.append([1.0 / trial.wall_seconds, training / trial.wall_seconds])
        walls.append(1.0)
    (fixed, slope), _ = nnls(np.array(rows), np.array(walls))
    return TrialCost(float(fixed), max(float(slope), 1.0))


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
        self.limit = math.inf if budget.wall_seconds is None else budget.wall_seconds
        self._between: list[float] = []  # seconds between two trials, as a decision takes
        self._looks: list[
            float
        ] = []  # seconds of looks at the posterior as it is drawn for a replicate
        self._since: float | None = None  # the end of the last trial
        self._taken: Callable[[], float] = elapsed
        if math.isfinite(self.limit):
            before = study.user_attrs.get(TAKEN, 0.0)
            if owner:
                self._taken = lambda: before + elapsed()
                study.set_user_attr(BEGAN, now() - self._taken())
            else:
                began = study.user_attrs.get(BEGAN, now())
                self._taken = lambda: now() - began

    def keep(self) -> None:
        """Store what the study has taken, for the command that continues it."""
        if self._owner and math.isfinite(self.limit):
            self._study.set_user_attr(TAKEN, self._taken())

    @contextmanager
    def trial(self) -> Iterator[None]:
        """Note when trials run: what the command does between them takes time, too."""
        if self._since is not None:
            self._between.append(self._taken() - self._since)
        yield
        self._since = self._taken()

    @contextmanager
    def fine_look(self) -> Iterator[None]:
        """Note how long a look at the finely drawn posterior takes."""
        began = self._taken()
        yield
        self._looks.append(self._taken() - began)

    @property
    def decision(self) -> float:
        """Seconds between two trials."""
        return statistics.fmean(self._between) if self._between else 0.0

    @property
    def fine_decision(self) -> float:
        """Seconds of a look at the posterior as it is drawn before a replicate, and for the answer."""
        if self._looks:
            return statistics.fmean(self._looks)
        return REPORT_DECISIONS * self.decision

    @property
    def left(self) -> float:
        """Seconds until the report has to begin."""
        return self.limit - REPORT_SECONDS - self.fine_decision - self._taken()

    def trial_limit(self, is_baseline: bool) -> float:
        """Return the wall seconds after which a trial that begins now ends with its next step.

        Its steps are chosen so that it ends long before; on a machine that has become slower this
        binds. The baseline has ``BASELINE_SLACK`` times its share of the limit.
        """
        limit = max(self.left, 0.0)
        return min(limit, BASELINE_SLACK * MEANS_SHARE * self.limit) if is_baseline else limit

    def spent(
        self, done: Sequence[TrialResult], cost: TrialCost, reserve: float, shortest: float
    ) -> SearchEnd | None:
        """Say that a search has no time for another point; None if it has.

        ``shortest``: as in :meth:`end`.
        """
        walls = [trial.wall_seconds for trial in searched(done)]
        one_more = self.decision + (statistics.fmean(walls) if walls else cost.fixed)
        if self.left > reserve + one_more:
            return None
        return self.end(done, reserve, shortest)

    def end(self, done: Sequence[TrialResult], reserve: float, shortest: float) -> SearchEnd:
        """Say that no time is left for another point, and for what the rest is kept.

        Where not even two trials had time it says how much they need; ``shortest`` are the wall seconds of the least
        trial that is worth its start.
        """
        purpose = "to run the winner again"
        if self._budget.objective != "loss" and not best(done, self._budget):
            purpose = "to continue the most promising trial"
        kept = f", {min(reserve, self.left):.1f} s kept {purpose}" if self.left > 0.0 else ""
        return SearchEnd(
            f"stopped: search.wall_seconds={self.limit:g} leave no time for another point "
            f"({self._taken():.1f} s taken{kept}){self._advice(done, shortest)}",
            "search.wall_seconds",
        )

    def _advice(self, done: Sequence[TrialResult], shortest: float) -> str:
        """Return what would have been time for two trials, as the end of a sentence; empty once two have run."""
        if len(searched(done)) >= 2:
            return ""
        seconds = math.ceil(self.seconds_of_two(done, shortest))
        return (
            f"; with what comes before and after, two trials take {seconds} s here: "
            f"search.wall_seconds={seconds}, and a multiple of it for a search"
        )

    def seconds_of_two(self, done: Sequence[TrialResult], shortest: float) -> float:
        """Return the least ``search.wall_seconds`` that two trials, and what comes before and after, would have met."""
        walls = [trial.wall_seconds for trial in done]
        before = self._taken() - sum(walls)
        after = REPORT_SECONDS + self.fine_decision
        return before + 2.0 * (self.decision + max([shortest, *walls])) + after

    def reserve(
        self,
        done: Sequence[TrialResult],
        cost: TrialCost,
        step_time: Callable[[float], float],
        baseline: TrialResult | None = None,
    ) -> float:
        """Return the seconds that are kept: for fresh seeds, or to continue the most promising trial.

        Fresh seeds are those of the winners by the objective and, as far as a share of the limit goes, those of further
        candidates and of the ``baseline``, if it has reached the target.
        """
        if not math.isfinite(self.limit):
            return 0.0
        winners = best(done, self._budget)
        if not winners:
            return RESCUE_SHARE * self.limit
        count = self._budget.replicates

        def again(trial: TrialResult) -> float:
            return count * self.replicate_seconds(trial.steps, step_time(trial.batch_size), cost)

        first = sum(again(trial) for trial in winners)
        others = (self._budget.candidates - 1) * first
        if baseline is not None and baseline.reached and baseline not in winners:
            others += again(baseline)
        return first + min(others, OTHERS_SHARE * self.limit)

    def replicate_seconds(self, steps: float, seconds_per_step: float, cost: TrialCost) -> float:
        """Return the seconds that one replicate of so many steps is predicted to take."""
        return self.fine_decision + cost.seconds(steps * seconds_per_step)

    def max_steps(
        self,
        done: Sequence[TrialResult],
        spec: TrialSpec,
        cost: TrialCost,
        step_time: Callable[[float], float],
        reserve: float,
    ) -> int | None:
        """Return the step up to which a trial can be trained with ``reserve`` seconds left; None if it is too short.

        No trial is worth its start that has fewer than ``MIN_STEPS``, or less than ``LEAST_GROWTH`` times those of the
        one that it continues.
        """
        if not math.isfinite(self.limit):
            return round(1e15)
        parent = next((trial for trial in done if trial.number == spec.resumed_from), None)
        first = 0 if parent is None else parent.steps
        last = first + cost.steps(self.left - reserve, step_time(spec.batch_size))
        return last if last >= max(MIN_STEPS, LEAST_GROWTH * first) else None


def best(done: Sequence[TrialResult], budget: SearchBudget) -> list[TrialResult]:
    """Return the reached trial that stands first by each merit of the objective."""
    return [
        trials[0] for merit in SOUGHT[budget.objective].merits if (trials := ranked(done, merit))
    ]
