"""How long a survey of the hardware may take within a study's time, and whether there is one."""

import math
from collections.abc import Callable

from bstune.core.records import TrialSpec
from bstune.options import StudyOptions
from bstune.study.planning.plan import most_start_seconds, wall_limit
from bstune.study.storage.opening import stored_time_taken

# The least search.wall_seconds with a survey: a shorter study has no seconds for one.
LEAST_SURVEYED = 100.0
# The least that may be left of them: a start may have taken most of them.
LEAST_LEFT = 50.0
# The share of what is left of search.wall_seconds that timing steps may take: the search is to have
# the rest.
SURVEY_SHARE = 0.1
# Where a budget is one of seconds, the survey says how many steps it is at each batch size.
SURVEY_SHARE_OF_BUDGET = 0.25


def seconds_left_of(options: StudyOptions, elapsed: Callable[[], float]) -> Callable[[], float]:
    """Make the function that gives what is left of a study's wall time; inf without a limit.

    ``elapsed``: says how many seconds ago the command began, which has not begun a trial yet.
    """
    limit = wall_limit(options)
    if limit is None:
        return lambda: math.inf
    before = stored_time_taken(options.study, options.storage)
    most_start = most_start_seconds(options)
    return lambda: limit - before.with_start(elapsed()).counted(most_start)


def needs_survey(options: StudyOptions) -> bool:
    """Whether a study cannot do without a survey, however little time it has.

    Several trials side by side take their seconds from it, and so does a budget of seconds.
    """
    return options.search.workers > 1 or options.budget.seconds is not None


def _may_be_surveyed(options: StudyOptions, wall_seconds: float | None) -> bool:
    """Whether the hardware is surveyed for a study that has so many seconds; None: any."""
    has_time = wall_seconds is None or wall_seconds >= LEAST_SURVEYED
    return options.hardware.enabled and (has_time or needs_survey(options))


def is_surveyed(options: StudyOptions, trial: TrialSpec | None) -> bool:
    """Whether the hardware is surveyed: for a study that allows it, and has time or need for it."""
    return trial is None and _may_be_surveyed(options, wall_limit(options))


def survey_limit(options: StudyOptions, seconds_left: float) -> float:
    """Give the seconds that a survey may take: a share of those left, at most hardware.seconds.

    A budget in seconds is counted by the survey's timings, so that its share is larger. Where
    nearly nothing is left, a survey that has to be made takes the share of ``LEAST_LEFT``.
    """
    share = SURVEY_SHARE
    if options.budget.seconds is not None:
        share = SURVEY_SHARE_OF_BUDGET
    return min(options.hardware.seconds, share * max(seconds_left, LEAST_LEFT))


def survey_seconds(options: StudyOptions, wall_seconds: float, seconds_left: float) -> float:
    """Predict how long a study with so much wall time may survey its hardware.

    ``seconds_left``: of it, when the survey would begin.
    """
    has_survey = _may_be_surveyed(options, wall_seconds)
    if not has_survey or (seconds_left < LEAST_LEFT and not needs_survey(options)):
        return 0.0
    return survey_limit(options, seconds_left)
