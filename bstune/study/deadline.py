"""A time limit, and what each phase of a study may take of it; no clock is read here.

The start takes ``START`` of a limit on a quiet machine. Of what start and answer leave, survey and
preflight take ``PREPARATION`` at most, the baseline's first run ``BASELINE`` at most, and other
configurations ``OTHERS`` at least. Runs on new seeds have the rest.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from bstune.core.errors import InputError
from bstune.system.console import seconds

START = 0.15
PREPARATION = 0.1
BASELINE = 0.2
OTHERS = 0.5
# New seeds are left so much while no configuration tells what they take, and at least the second;
# they are expected to take so many times what the search's trials took.
CONFIRMATION = 0.2
LEAST_CONFIRMATION = 0.1
SPARE = 1.5
# A trial of the search: so much of what is left for others, but at least so much of everything.
TRIAL = 1 / 3
LEAST_TRIAL = 1 / 30
# The answer (analysis, figure, page and MLflow) takes 4.0 CPU seconds where the start takes 2.9: so
# much longer, however busy the machine is. That is kept for it, but at most this share of a limit,
# and so many seconds.
ANSWER_OF_START = 1.3
ANSWER = 0.15
ANSWER_SECONDS = 15.0
# MLflow's part of it, of the start; it is left out where the answer would then be later than this
# share of the limit beyond it, or these seconds.
MLFLOW_OF_START = 0.8
LATE = 0.05
LATE_SECONDS = 10.0
# A target that nobody gave is what the baseline reaches in this share of the limit, at least so
# many seconds; without a limit in so many.
PILOT = 1 / 30
LEAST_PILOT_SECONDS = 2.0
PILOT_SECONDS = 10.0


@dataclass(frozen=True)
class Deadline:
    """A time limit; times are those of the clock that ``began`` was read from, in seconds.

    Args:
        began: when the command began.
        seconds: the limit.
        start: seconds that the start took.
        preparation: seconds that survey and preflight took after it.
    """

    began: float
    seconds: float
    start: float = 0.0
    preparation: float = 0.0

    @property
    def end(self) -> float:
        """When the last trial has to end, so that the answer is in time."""
        answer = min(ANSWER_OF_START * self.start, ANSWER * self.seconds, ANSWER_SECONDS)
        return self.began + self.seconds - answer

    def allows_mlflow(self, now: float) -> bool:
        """Whether the answer, whose files are written, is in time with MLflow."""
        latest = self.began + self.seconds + max(LATE * self.seconds, LATE_SECONDS)
        return now + MLFLOW_OF_START * self.start <= latest

    @property
    def shared(self) -> float:
        """Seconds that start and answer leave."""
        return max(self.end - self.began - self.start, 0.0)

    @property
    def preparation_seconds(self) -> float:
        """Seconds that survey and preflight may take."""
        return PREPARATION * self.shared

    @property
    def preflight_until(self) -> float:
        """When the preflight ends, which trains as the baseline does: once it has taken its share.

        The survey is left what it leaves of theirs.
        """
        return self.began + self.start + self.baseline_seconds

    @property
    def baseline_seconds(self) -> float:
        """Seconds that the baseline's first run may take."""
        return BASELINE * self.shared

    def seconds_between_trials(self, now: float, took: float, trials: int) -> float:
        """Seconds between two trials so far, in which the next one is chosen.

        Args:
            now: the time.
            took: seconds of the trials by then.
            trials: how many.
        """
        passed = now - self.began - self.start - self.preparation
        return max(passed - took, 0.0) / trials

    def search_end(self, baseline: float, confirmation: float | None) -> float:
        """When the search ends: new seeds then still have their time.

        Args:
            baseline: seconds that the baseline's first run took.
            confirmation: seconds that the runs on new seeds would take, by the search's trials;
                None while no other configuration has reached the target.
        """
        expected = CONFIRMATION * self.shared
        if confirmation is not None:
            expected = max(SPARE * confirmation, LEAST_CONFIRMATION * self.shared)
        others_began = self.began + self.start + self.preparation
        others_began += min(baseline, self.baseline_seconds)
        return min(max(self.end - expected, others_began + OTHERS * self.shared), self.end)

    def trial_until(self, now: float, search_end: float) -> float:
        """When a trial of the search that begins now has to stop."""
        seconds = max(TRIAL * (search_end - now), LEAST_TRIAL * self.shared)
        return min(now + seconds, self.end)


def deadline_after_start(wall_seconds: float | None, began: float, start: float) -> Deadline | None:
    """The time limit of a command, once its start is over; None: there is none.

    Args:
        wall_seconds: the limit.
        began: when the command began.
        start: seconds that its start took.

    Raises:
        InputError: it took all of the limit.
    """
    if wall_seconds is None:
        return None
    deadline = Deadline(began, wall_seconds, start)
    if deadline.shared == 0.0:
        raise InputError(
            f"wall_seconds={wall_seconds:g} is too short for two trials: the start alone took "
            f"{seconds(start)}; give at least wall_seconds={math.ceil(least_limit(start, []))}"
        )
    return deadline


def pilot_seconds(limit: float | None) -> float:
    """Training seconds that set a target which nobody gave, of a limit in seconds."""
    return PILOT_SECONDS if limit is None else max(PILOT * limit, LEAST_PILOT_SECONDS)


def least_limit(start: float, trials: Sequence[float]) -> float:
    """The least limit, in seconds, in which trials fit beside the start.

    Args:
        start: seconds that it took.
        trials: seconds that each takes.
    """
    answer = min(ANSWER_OF_START * start, ANSWER_SECONDS)
    return max(start + sum(trials) + answer, start / START)
