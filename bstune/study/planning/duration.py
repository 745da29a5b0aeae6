"""How long a study takes on this machine, what would make it fit, and what is left of it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from bstune.system.console import format_seconds, plural

# From so many seconds on a study is said to be long.
LONG_SECONDS = 3600.0
# Later points take longer: more of them are continued, and the posterior has more to explain.
# Seconds of a point grow with this power of its number, as in seven studies of digits with 10 to 64
# points.
POINT_GROWTH = 0.3
# So many points have to end in a command before its pace is known. The first one has the start of
# the libraries in it, and is the baseline's: a study of 27 min was predicted by it, of 3 min left.
FEWEST_ENDED = 2
# The fewest trials of a search: fewer show too little, so that a limit of time is the better
# advice.
FEWEST_TRIALS = 10


@dataclass(frozen=True)
class Pace:
    """How fast a search went.

    Args:
        seconds: wall seconds of a point. Start-up, evaluation, continuations of stopped trials and
            the decisions between trials are in them.
        point: number of the point at which one took so many; half numbers lie between two points.
    """

    seconds: float
    point: float


@dataclass(frozen=True)
class Runs:
    """Runs of one point on fresh seeds that are still to come."""

    count: int
    seconds: float
    """Wall seconds of each."""


def pace_of(ends: Sequence[float], points_before: int) -> Pace | None:
    """Measure the pace over the later half of the points that ended in this command.

    It is None before ``FEWEST_ENDED`` have. The earlier half is left out, as it is unlike what
    follows: libraries warm up, and the baseline goes to its budget.

    Args:
        ends: the seconds at which the command began its search, then those at which each point
            ended.
        points_before: how many points of the study earlier commands ended.
    """
    points = len(ends) - 1
    if points < FEWEST_ENDED:
        return None
    first = points // 2
    seconds = (ends[-1] - ends[first]) / (points - first)
    middle = points_before + (first + points) / 2
    return Pace(seconds=seconds, point=middle)


def seconds_to_go(
    pace: Pace,
    points: int,
    points_left: float,
    runs: tuple[Runs, ...],
    report: float,
    limit: float = math.inf,
) -> float:
    """Add up the wall seconds until a study's answer: points, runs on fresh seeds and report.

    Args:
        pace: of the search.
        points: how many have ended.
        points_left: how many are still to come.
        runs: those on fresh seeds that are still to come.
        report: seconds of the report.
        limit: seconds left of ``search.wall_seconds``; the sum is no larger.
    """
    # Later points take longer, by a power of their number. On average those to come take what the
    # one in their middle takes.
    middle = points + points_left / 2
    growth = math.pow(middle / pace.point, POINT_GROWTH)
    search = points_left * pace.seconds * growth
    fresh_seeds = sum(of_point.count * of_point.seconds for of_point in runs)
    return min(search + fresh_seeds + report, max(0.0, limit))


def trials_that_fit(seconds: float, trials: int) -> int | None:
    """Count the trials that end within an hour, if all ``trials`` take ``seconds`` together.

    It is None where all do, and where fewer than ``FEWEST_TRIALS`` do: they would tell too little.
    """
    fitting = int(trials * LONG_SECONDS / seconds)
    if not FEWEST_TRIALS <= fitting < trials:
        return None
    return fitting


def advice_on_time(seconds: float, trials: int, device: str, limited: bool) -> str | None:
    """Say what a long study takes and what would make it fit; None for one that is not long.

    Args:
        seconds: of all trials, if each runs to its budget.
        trials: how many the search may try.
        device: that trains, as torch names it.
        limited: whether the search's time has a limit already.
    """
    if limited or seconds <= LONG_SECONDS:
        return None
    ways = list[str]()
    fitting = trials_that_fit(seconds, trials)
    if fitting is not None:
        ways.append(f"fewer configurations (search.trials={fitting})")
    ways.append("search.wall_seconds=3600, which ends it after an hour with what it knows")
    if device.startswith("cpu"):
        ways.append("a GPU")
    each = format_seconds(seconds / trials)
    tried = plural(trials, "configuration")
    return (
        f"a study takes up to {format_seconds(seconds)} here: {tried} of up to {each}, if each "
        f"runs to its budget; to make it fit: {', or '.join(ways)}. It goes on"
    )
