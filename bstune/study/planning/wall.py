"""The wall time of a study: what its commands took, and what is kept for after the search.

It is counted from the start of the owner's process, so that imports, survey and preflight are part
of it, over all commands that have owned the study. Under a limit that nobody has stated, they count
for half of it at most. The others that run its trials count by the owner's clock.

The study plans backwards. The report takes its time at the end, before it the winner's fresh seeds.
Where nothing has reached the target yet, a share is kept to continue the most promising trial until
it does.
"""

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, replace

import numpy as np
import optuna
from scipy.optimize import nnls

from bstune.core.objectives import SOUGHT
from bstune.core.records import TrialResult, TrialSpec
from bstune.search.acquisition import LEAST_GROWTH, MIN_STEPS
from bstune.study.planning.plan import (
    MEANS_SHARE,
    RESCUE_SHARE,
    SearchBudget,
    SearchEnd,
    compares,
    count_points,
    trials_of_search,
)
from bstune.study.planning.replicates import fresh_runs, ranked, same_point

# Attribute of the study: when it would have begun if its commands had run without a break.
BEGAN = "bstune:began"
# Attribute of the study: the seconds that its commands have taken.
TAKEN = "bstune:wall_seconds"
# Attribute of the study: those of them before each command's first trial.
STARTS = "bstune:start_seconds"
# Attribute of the study: the shortest of these starts, without a survey of the hardware.
SHORTEST_START = "bstune:shortest_start"
# Before each replicate, and once before the answer, the posterior is drawn more finely than for a
# decision. Until that has been measured it is taken to last as long as so many of them: on digits
# they were 1 to 4 of what lies between two trials, for 7 to 64 points, on busy cores.
REPORT_DECISIONS = 3
# Seconds of what else comes before the answer: 0.1 to 1.4 on ten projects, on busy cores.
REPORT_SECONDS = 0.5
# At most this share of the limit is kept for fresh seeds of further candidates than the first, and
# for the baseline's beyond its first.
OTHERS_SHARE = 0.1
# The first run of the baseline may take so many times its share.
BASELINE_SLACK = 2.0
# While a single configuration has been tried, the second one may take so many times its seconds
# before any are kept for fresh seeds.
SECOND_SLACK = 2.0
# In the fit of costs, what is known of evaluation beforehand counts as so many trials.
PRIOR_ROWS = 1.0
# More than any trial takes, and a double has each integer up to it.
UNLIMITED_STEPS = 1e15


@dataclass(frozen=True)
class TrialCost:
    """What a trial takes in wall seconds: a fixed part, and one in proportion to its training."""

    fixed: float
    """Wall seconds of any trial."""
    slope: float
    """Wall seconds per second that its steps take by tau(B)."""
    tau: Callable[[float], float]
    """Gives the seconds of a step at a batch size."""

    def seconds(self, steps: float, batch_size: float) -> float:
        """Predict the wall seconds of a trial of so many steps."""
        return self.fixed + self.slope * steps * self.tau(batch_size)

    def steps(self, seconds: float, batch_size: float) -> int:
        """Count the steps that a trial can take within ``seconds`` of wall time; 0 at least.

        ``tau`` gives the training seconds of a step at a batch size.
        """
        steps = (seconds - self.fixed) / (self.slope * self.tau(batch_size))
        return max(0, math.floor(min(steps, UNLIMITED_STEPS)))


def fit_cost(
    trials: Sequence[TrialResult], tau: Callable[[float], float], share: float
) -> TrialCost:
    """Fit the wall seconds of trials, by least squares of the relative errors; no part is below 0.

    Args:
        trials: that have ended.
        tau: gives the seconds of a step at a batch size.
        share: seconds of evaluation per second of training, as they are expected before the first
            trial.
    """
    steps = {trial.number: trial.steps for trial in trials}
    # wall = fixed + slope x training, each row over the trial's wall seconds, so that its error is
    # relative. The first row is what is known beforehand: training and its evaluation, nothing
    # fixed. PRIOR_ROWS is its weight, in trials.
    rows = [[0.0, PRIOR_ROWS]]
    walls = [PRIOR_ROWS * (1.0 + share)]
    for trial in trials:
        if trial.status == "failed" or trial.wall_seconds <= 0.0:
            continue
        # The first steps of a continuation were taken by the trial that it continues.
        steps_before = 0
        if trial.resumed_from is not None:
            steps_before = steps.get(trial.resumed_from, 0)
        training = max(trial.steps - steps_before, 0) * tau(trial.batch_size)
        rows.append([1.0 / trial.wall_seconds, training / trial.wall_seconds])
        walls.append(1.0)
    (fixed, slope), _ = nnls(np.array(rows), np.array(walls))
    # A step takes its own seconds at least: a smaller slope would be noise.
    return TrialCost(float(fixed), max(float(slope), 1.0), tau)


@dataclass(frozen=True)
class TimeTaken:
    """The wall seconds that the commands of a study have taken."""

    starts: float = 0.0
    """Before the first trial of each command."""
    searches: float = 0.0
    """From those trials on."""
    shortest_start: float = 0.0
    """Of the starts, without its survey: no later command is likely to begin a trial sooner."""

    @classmethod
    def of(cls, study: optuna.Study) -> "TimeTaken":
        """Read what the earlier commands of a study have stored."""
        starts = float(study.user_attrs.get(STARTS, 0.0))
        taken = float(study.user_attrs.get(TAKEN, 0.0))
        shortest = float(study.user_attrs.get(SHORTEST_START, 0.0))
        return cls(starts, max(taken - starts, 0.0), shortest)

    def with_start(self, seconds: float) -> "TimeTaken":
        """Give what it is after another start of so many seconds."""
        return replace(self, starts=self.starts + seconds)

    @property
    def seconds(self) -> float:
        """All of them."""
        return self.starts + self.searches

    def counted(self, most_start: float) -> float:
        """Give the seconds that count where the starts count for ``most_start`` at most."""
        return min(self.starts, most_start) + self.searches


class WallTime:
    """What is left of ``search.wall_seconds``; without that limit, all the time there is."""

    def __init__(
        self,
        study: optuna.Study,
        budget: SearchBudget,
        elapsed: Callable[[], float],
        owner: bool,
        now: Callable[[], float] = time.time,
        surveyed: float = 0.0,
    ) -> None:
        """Begin to count.

        Args:
            study: has what its earlier commands took.
            budget: has the limit, if any.
            elapsed: gives the seconds that this command has taken.
            owner: whether this process owns the study, so that its clock counts.
            now: gives the seconds of the wall clock, by which the others count.
            surveyed: the seconds that this command's survey of the hardware took.
        """
        self._study = study
        self._budget = budget
        self._owner = owner
        self._elapsed = elapsed
        # Seconds of this command before its first trial; None: it has begun none.
        self._start: float | None = None
        self.limit = math.inf if budget.wall_seconds is None else budget.wall_seconds
        # Seconds between two trials, which the decision on the second one takes.
        self._between: list[float] = []
        # Seconds of each decision by a posterior with many draws.
        self._looks: list[float] = []
        # When the last trial ended.
        self._last_end: float | None = None
        # What the commands before this one have taken.
        self._earlier = TimeTaken.of(study)
        # Gives the seconds of the limit that the study has taken. The owner adds up those of its
        # commands, and stores when, by the wall clock, the first would have begun, had there been
        # no pauses between them. The other processes count from that moment.
        self._taken: Callable[[], float] = elapsed
        self._now = now
        self._surveyed = surveyed
        if math.isfinite(self.limit):
            if owner:
                self._taken = lambda: self._in_all().counted(budget.most_start)
                self._store_begin()
            else:
                began = study.user_attrs.get(BEGAN, now())
                self._taken = lambda: now() - began

    def _in_all(self) -> TimeTaken:
        """Add up what this command and those before it have taken."""
        elapsed = self._elapsed()
        if self._start is None:
            return self._earlier.with_start(elapsed)
        before = self._earlier
        shortest = self._start - self._surveyed
        # Zero: no earlier command has stored its start.
        if before.shortest_start > 0.0:
            shortest = min(shortest, before.shortest_start)
        searched = elapsed - self._start
        return TimeTaken(before.starts + self._start, before.searches + searched, shortest)

    def _store_begin(self) -> None:
        """Store the moment from which the other processes count."""
        self._study.set_user_attr(BEGAN, self._now() - self._taken())

    def within(self, limit: float) -> "WallTime":
        """Give what would be left if the user stated another limit: of that one shares are kept."""
        other = copy(self)
        other.limit = limit
        other._budget = replace(self._budget, most_start=math.inf)
        return other

    def begin_trial(self) -> None:
        """Note that a trial begins now: from the first one on this command's seconds count."""
        if self._start is None:
            self._start = self._elapsed()
            # The end of a start that did not count in full makes the study younger.
            if self._owner and math.isfinite(self._budget.most_start):
                self._store_begin()

    def pause(self) -> None:
        """Leave the time from now to the next trial out of what a decision on a trial takes."""
        self._last_end = None

    def keep(self) -> None:
        """Store what the study has taken, for the command that continues it.

        Under a limit it is to be called as each trial ends: a process that is killed then loses one
        trial's at most. The seconds of a command that began no trial are not counted: it came to
        nothing, and the next one has to start anew. Those of a command without a limit are: the
        next one may have one.
        """
        if self._start is not None and self._owner:
            in_all = self._in_all()
            self._study.set_user_attr(TAKEN, in_all.seconds)
            if self._study.user_attrs.get(STARTS) != in_all.starts:
                self._study.set_user_attr(STARTS, in_all.starts)
                self._study.set_user_attr(SHORTEST_START, in_all.shortest_start)

    @property
    def has_begun_trial(self) -> bool:
        """Whether this command has begun a trial."""
        return self._start is not None

    @property
    def start_seconds(self) -> float:
        """Seconds of this command before its first trial; up to now where it has begun none."""
        return self._elapsed() if self._start is None else self._start

    def charged(self, reserve: float, runs_follow: bool) -> float:
        """Give the seconds that will be spent when the command that continues the study begins.

        Args:
            reserve: seconds that are kept for what follows the search in this command.
            runs_follow: whether this command will run fresh seeds, even if it has begun no trial.
        """
        if self._start is None and not runs_follow:
            # A command that began no trial is not charged for its own seconds.
            return self._earlier.seconds
        # A limit that the next command states counts the starts in full.
        taken = self._in_all().seconds if self._owner else self._taken()
        return taken + min(reserve, max(self.seconds_left, 0.0)) + self.report_seconds

    @property
    def report_seconds(self) -> float:
        """Seconds of the report and what else comes before the answer."""
        return REPORT_SECONDS + self.fine_decision_seconds

    @contextmanager
    def trial(self) -> Iterator[None]:
        """Note the time between trials: the body waits for a trial to end."""
        if self._last_end is not None:
            self._between.append(self._taken() - self._last_end)
        yield
        self._last_end = self._taken()

    @contextmanager
    def fine_look(self) -> Iterator[None]:
        """Note how long the body takes: it decides by a posterior with many draws."""
        # In a start that no longer counts, what the study has taken stands still.
        began = self._elapsed()
        yield
        self._looks.append(self._elapsed() - began)

    @property
    def decision_seconds(self) -> float:
        """Mean seconds between two trials."""
        return statistics.fmean(self._between) if self._between else 0.0

    @property
    def fine_decision_seconds(self) -> float:
        """Mean seconds of a decision by a posterior with many draws; predicted before the first."""
        if self._looks:
            return statistics.fmean(self._looks)
        return REPORT_DECISIONS * self.decision_seconds

    @property
    def seconds_left(self) -> float:
        """Seconds until the report has to begin."""
        return self.limit - self.report_seconds - self._taken()

    @property
    def shared_seconds(self) -> float:
        """Seconds of which shares are kept: of an assumed limit, what the starts leave."""
        if math.isfinite(self._budget.most_start):
            return self.limit - min(self._in_all().starts, self._budget.most_start)
        return self.limit

    def trial_limit(self, is_baseline: bool) -> float:
        """Give the wall seconds after which a trial that begins now ends with its next step.

        A trial's steps are chosen so that it ends long before. This limit is for a machine that has
        become slower. The baseline has at most ``BASELINE_SLACK`` times its share of the limit.
        """
        limit = max(self.seconds_left, 0.0)
        if is_baseline:
            limit = min(limit, BASELINE_SLACK * MEANS_SHARE * self.limit)
        return limit

    def is_spent(self, trials: Sequence[TrialResult], cost: TrialCost, reserve: float) -> bool:
        """Whether no time is left for another point of the search.

        Args:
            trials: that have ended.
            cost: of a trial.
            reserve: seconds that are kept for what follows the search.
        """
        return self.seconds_left <= reserve + self._seconds_of_one_more(trials, cost)

    def _seconds_of_one_more(self, trials: Sequence[TrialResult], cost: TrialCost) -> float:
        """Predict the wall seconds of one more trial of the search, with the decision before it."""
        # Before a trial has ended only its fixed part is predicted.
        wall_seconds = [trial.wall_seconds for trial in trials_of_search(trials)]
        usual_trial = statistics.fmean(wall_seconds) if wall_seconds else cost.fixed
        return self.decision_seconds + usual_trial

    def reserve_beside_second(
        self, trials: Sequence[TrialResult], cost: TrialCost, reserve: float
    ) -> float:
        """Cut the seconds that are kept for fresh seeds to what a second configuration leaves.

        Fresh seeds of the only one that was tried would be compared with nothing.

        Args:
            trials: that have ended.
            cost: of a trial.
            reserve: seconds that are kept once there are several configurations.
        """
        if compares(self._budget, trials) or not math.isfinite(self.limit):
            return reserve
        left = self.seconds_left - SECOND_SLACK * self._seconds_of_one_more(trials, cost)
        return min(reserve, max(left, 0.0))

    def search_end(
        self, trials: Sequence[TrialResult], reserve: float, advised: int | None
    ) -> SearchEnd:
        """Make the end of a search that has no time for another point.

        Its sentence says for what the rest of the time is kept.

        Args:
            trials: that have ended.
            reserve: seconds that are kept.
            advised: the ``search.wall_seconds`` that has time for two trials, or, if two points
                were tried already, for another one; None: no such limit need be advised.
        """
        purpose = "for fresh seeds"
        if self._budget.objective != "loss" and not leaders(trials, self._budget):
            purpose = "to continue the most promising trial"
        seconds_kept = min(reserve, self.seconds_left)
        kept = f", {seconds_kept:.1f} s kept {purpose}" if seconds_kept > 0.0 else ""
        advice = ""
        if advised is not None:
            what = "two trials"
            if count_points(trials) >= 2:
                what = "another trial"
            advice = (
                f"; with another start, {what} and what follows, the study takes {advised} s in "
                f"all here: search.wall_seconds={advised}, and a multiple of it for a search"
            )
        return SearchEnd(
            f"stopped: search.wall_seconds={self.limit:g} leaves no time for another point "
            f"({self._taken():.1f} s taken{kept}){advice}",
            "search.wall_seconds",
            least_limit=advised,
        )

    def reserve(
        self,
        trials: Sequence[TrialResult],
        cost: TrialCost,
        baseline: TrialResult | None = None,
    ) -> float:
        """Give the seconds to keep for what follows the search.

        Before a trial has reached the target, that is a share of the seconds that the search has,
        to continue the most promising trial. After that it is the time of the runs on fresh seeds
        that are still to come: all those of the winners, and the baseline's first. The baseline's
        other runs and those of further candidates get at most ``OTHERS_SHARE`` of the search's
        seconds. While the baseline itself is the best, one run of it is kept, and one of a winner
        that may still be found.

        Args:
            trials: that have ended.
            cost: of a trial.
            baseline: its first run, if it is to run again; else None.
        """
        if not math.isfinite(self.limit):
            return 0.0
        winners = leaders(trials, self._budget)
        if not winners:
            return RESCUE_SHARE * self.shared_seconds
        replicates = self._budget.replicates

        def run_seconds(trial: TrialResult) -> float:
            return self.replicate_seconds(trial.steps, trial.batch_size, cost)

        # Fresh seeds of the user's own configuration alone would be compared with nothing: the
        # search needs their time more. What is faster takes no longer than the baseline. What takes
        # fewer steps may well do: then as much is kept as for any winner.
        is_for_time = self._budget.objective == "time"
        if (
            baseline is not None
            and is_for_time
            and all(same_point(winner, baseline) for winner in winners)
        ):
            runs_kept = 2 if replicates else 0
            return runs_kept * run_seconds(baseline)
        runs = fresh_runs(trials)
        of_winners = 0.0
        of_others = 0.0
        for winner in winners:
            # Several trials may be at the winner's point. Its runs on fresh seeds repeat one of
            # them, which need not be today's winner.
            runs_of_point = 0
            for trial in trials:
                if same_point(trial, winner):
                    runs_of_point = max(runs_of_point, len(runs.get(trial.number, ())))
            of_winners += max(replicates - runs_of_point, 0) * run_seconds(winner)
            # Beside each winner further points may run on all seeds, about as long as it.
            of_others += (self._budget.candidates - 1) * replicates * run_seconds(winner)
        of_first = 0.0
        if baseline is not None and baseline not in winners:
            runs_left = max(replicates - len(runs.get(baseline.number, ())), 0)
            # Without a fresh seed of it the gain would stand on its single search trial.
            if runs_left == replicates and replicates > 0:
                of_first = run_seconds(baseline)
                runs_left -= 1
            of_others += runs_left * run_seconds(baseline)
        return of_winners + of_first + min(of_others, OTHERS_SHARE * self.shared_seconds)

    def replicate_seconds(self, steps: float, batch_size: float, cost: TrialCost) -> float:
        """Predict the wall seconds of one run on a fresh seed, with the decision before it."""
        return self.fine_decision_seconds + cost.seconds(steps, batch_size)

    def max_steps(
        self,
        trials: Sequence[TrialResult],
        spec: TrialSpec,
        cost: TrialCost,
        reserve: float,
    ) -> int | None:
        """Give the step up to which a trial may train, so that ``reserve`` seconds are left.

        It is None if the time allows fewer than ``MIN_STEPS``, or less than ``LEAST_GROWTH`` times
        the steps of the trial that it continues: so short a trial is not worth its start.
        """
        if not math.isfinite(self.limit):
            return round(UNLIMITED_STEPS)
        parent = next((trial for trial in trials if trial.number == spec.resumed_from), None)
        steps_before = 0 if parent is None else parent.steps
        steps_now = cost.steps(self.seconds_left - reserve, spec.batch_size)
        last_step = steps_before + steps_now
        if last_step < max(MIN_STEPS, LEAST_GROWTH * steps_before):
            return None
        return last_step


def leaders(trials: Sequence[TrialResult], budget: SearchBudget) -> list[TrialResult]:
    """List the first trial by steps, by time or by both, as the objective seeks them.

    It is empty before a trial has reached the target.
    """
    first = list[TrialResult]()
    for merit in SOUGHT[budget.objective].merits:
        first += ranked(trials, merit)[:1]
    return first
