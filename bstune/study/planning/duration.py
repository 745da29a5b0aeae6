"""How long a study takes on this machine: what would make it fit, and after each trial what is left."""

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
# Of a search: fewer show too little, so that a limit of time is the better advice.
FEWEST_TRIALS = 10


@dataclass(frozen=True)
class Pace:
    """How fast a search went: the wall seconds of a point, and the number of the point at which it took so many.

    Start-up, evaluation, continuations of stopped trials and the decisions between trials are in
    the seconds.
    """

    seconds: float
    point: float


@dataclass(frozen=True)
class Runs:
    """Runs on fresh seeds that are still to come: how many, and the wall seconds of one."""

    count: int
    seconds: float


def pace_of(ends: Sequence[float], points_before: int) -> Pace | None:
    """Measure the pace of the later half of the points that this command has ended.

    None before the first.

    The first ones, the baseline among them, are unlike those that follow: libraries warm up, and
    the baseline goes to its budget.

    Args:
        ends: the seconds at which the command began its search, and at which each point ended.
        points_before: of the study, that ended before.
    """
    points = len(ends) - 1
    if points < 1:
        return None
    first = points // 2
    seconds = (ends[-1] - ends[first]) / (points - first)
    return Pace(seconds, points_before + (first + points) / 2)


def seconds_to_go(
    pace: Pace,
    points: int,
    points_left: int,
    runs: tuple[Runs, ...],
    report: float,
    limit: float = math.inf,
) -> float:
    """Add up the wall seconds until a study's answer: of its points, its runs on fresh seeds and its report.

    Args:
        pace: of the search.
        points: that have ended.
        points_left: that are still to come.
        runs: on fresh seeds.
        report: seconds of the report.
        limit: what is left of ``search.wall_seconds``.
    """
    middle = points + points_left / 2
    growth = math.pow(middle / pace.point, POINT_GROWTH)
    search = points_left * pace.seconds * growth
    fresh_seeds = sum(of_point.count * of_point.seconds for of_point in runs)
    return min(search + fresh_seeds + report, max(0.0, limit))


def replicates_to_come(ran: int, replicates: int, winners: int) -> int:
    """Count the runs on fresh seeds that are still to come.

    A point that is run again has ``replicates`` runs, one after another. Before the first of them
    each of the ``winners`` is expected to be run again. From then on only the rest of the point
    that runs is certain: whether a further one follows is decided by what it comes to.

    Args:
        ran: runs on fresh seeds so far, of all points.
        replicates: runs of each point.
        winners: points that stand first by a merit of the objective.
    """
    if ran == 0:
        return replicates * winners
    if replicates == 0:
        return 0
    # What is missing to the next whole number of points.
    return -ran % replicates


def trials_that_fit(seconds: float, trials: int) -> int | None:
    """Say how many of a search's trials end within an hour, none reaching the target.

    ``seconds`` are those of all ``trials``. None: so few that fewer trials are no advice.
    """
    fitting = int(trials * LONG_SECONDS / seconds)
    if not FEWEST_TRIALS <= fitting < trials:
        return None
    return fitting


def advice_on_time(seconds: float, trials: int, device: str, limited: bool) -> str | None:
    """Say what a long study takes and what would make it fit; None for one that is not long.

    Args:
        seconds: of all trials, none reaching the target.
        trials: of the search.
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
