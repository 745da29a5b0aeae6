"""Timings of steps with their errors: those of a survey's visits, and trials' own seconds."""

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from bstune.core.records import LIGHTNINGS_LOOP, TrialResult
from bstune.core.step_time import fit_line

Array = NDArray[np.float64]
# Least relative standard error of a batch size's timings.
LEAST_ERROR = 0.01
# A median's standard error over a mean's, of normal values.
MEDIAN_ERROR = 1.2533
# Distance between a normal distribution's quartiles, in standard deviations.
QUARTILES_APART = 1.349
# A normal distribution's standard deviation over its median absolute deviation.
MEDIAN_ABSOLUTE = 1.4826
# Trials so near to each other in batch size were timed at one place.
PLACES_PER_OCTAVE = 4
# The interpolated quartiles of n normal values lie 1 - this/n as far apart as those of many.
FEW_NEARER = 1.15
# All sizes' pooled scatter counts as so many timings of a batch size.
POOLED_TIMINGS = 4.0
# Visits beyond each batch size's first: from so many on they tell their scatter. With fewer it is
# drawn to UNSEEN_SCATTER, a relative standard deviation. Of two visits of three steps, all that a
# survey of 14 s had time for on an H200, one was 4 times too long.
TELLING_REPEATS = 3
UNSEEN_SCATTER = 0.3
# Fewest steps of a trial whose seconds join a survey's: of fewer, the first ones count much.
FEWEST_OWN_STEPS = 10


class TimedSize(Protocol):
    """The timings of one batch size as the fit reads them: a survey's, or those of its file."""

    @property
    def batch_size(self) -> float:
        """Examples of a step."""

    @property
    def seconds(self) -> float:
        """Seconds of a step: the median over some visits."""

    @property
    def low(self) -> float:
        """Lower quartile of the seconds."""

    @property
    def high(self) -> float:
        """Upper quartile of the seconds."""

    @property
    def visits(self) -> int:
        """How many times this batch size was timed."""


@dataclass(frozen=True)
class Timing:
    """A batch size's seconds of a step, with their error."""

    batch_size: float
    seconds: float
    error: float
    """Relative standard error of the seconds."""
    visits: int
    """Of how many visits, or trials, the seconds are the median."""
    between_loops: float = 0.0
    """Relative error that all timings of another loop than the law's have alike."""


@dataclass(frozen=True)
class OwnSteps:
    """A trial's own seconds of a step."""

    batch_size: int
    seconds: float
    of_trainer: bool
    """Whether Lightning's own loop took the steps."""
    may_join: bool
    """Whether they may join a survey's timings: enough steps, and no other trial ran beside."""


def own_steps(trials: Iterable[TrialResult]) -> list[OwnSteps]:
    """Collect the seconds of a step of each trial that timed its own, and did not fail."""
    collected = list[OwnSteps]()
    for trial in trials:
        # A record whose seconds were replaced by those of a law keeps the trial's own, too.
        seconds = trial.measured_seconds_per_step or trial.seconds_per_step
        if not seconds or trial.status not in ("reached", "stopped", "diverged"):
            continue
        # Only steps that no trial beside slowed, and enough of them, may be fitted with a survey's.
        collected.append(
            OwnSteps(
                batch_size=trial.batch_size,
                seconds=seconds,
                of_trainer=took_trainers_steps(trial),
                may_join=trial.ran_alone and trial.steps >= FEWEST_OWN_STEPS,
            )
        )
    return collected


def took_trainers_steps(trial: TrialResult) -> bool:
    """Whether Lightning's own loop took a trial's steps."""
    return (trial.training_loop or "").startswith(LIGHTNINGS_LOOP)


def with_step_time(result: TrialResult, step_time: Callable[[float], float]) -> TrialResult:
    """Give a trial's record with the seconds of a step that a law predicts for its batch size.

    The trial's own seconds of a step are kept as ``measured_seconds_per_step``. A record without
    seconds of a step is left as it is.
    """
    if result.seconds_per_step is None:
        return result
    # A record that has another law's seconds keeps the trial's own.
    trials_own = result.measured_seconds_per_step or result.seconds_per_step
    by_law = float(step_time(result.batch_size))
    return replace(result, seconds_per_step=by_law, measured_seconds_per_step=trials_own)


def with_errors(timings: Sequence[TimedSize]) -> list[Timing]:
    """Give a survey's timings with their errors, in ascending order of batch size."""
    ordered = sorted(timings, key=lambda timing: timing.batch_size)
    known = list[Timing]()
    for timing, error in zip(ordered, _errors_of(ordered).tolist(), strict=True):
        known.append(Timing(timing.batch_size, timing.seconds, error, timing.visits))
    return known


def _errors_of(timings: Sequence[TimedSize]) -> Array:
    """Estimate the relative standard error of each batch size's median: (n,).

    A visit is one measurement of a batch size; the median is over visits. The few visits of a size
    hardly tell how they scatter, so their scatter is averaged with that of all sizes together.
    """
    visits = np.array([timing.visits for timing in timings])
    repeats = visits - 1
    log_apart = np.log([timing.high / timing.low for timing in timings])
    # The standard deviation of normal values is the distance between their quartiles over
    # QUARTILES_APART. The quartiles of a few visits lie nearer to each other than those of many,
    # which FEW_NEARER makes up for. Both quartiles of a single visit are the visit: its scatter
    # is 0.
    scatter = log_apart / (QUARTILES_APART * (1.0 - FEW_NEARER / np.maximum(visits, 2.0)))
    seen_variance = 0.0
    if repeats.any():
        seen_variance = float(np.average(scatter**2, weights=repeats))
    pooled = _drawn_to_usual(seen_variance, int(repeats.sum()))
    # The scatter of all sizes counts as so many timings, beside the repeats of the size itself.
    variance = (POOLED_TIMINGS * pooled + repeats * scatter**2) / (POOLED_TIMINGS + repeats)
    errors = [
        _error_of_median(scatter_of_visit, count)
        for scatter_of_visit, count in zip(np.sqrt(variance).tolist(), visits.tolist(), strict=True)
    ]
    return np.array(errors)


def timings_of_trials(measured: Sequence[tuple[int, float]]) -> list[Timing]:
    """Group trials' own seconds of a step, (batch size, seconds) each, into a timing per place.

    Trials within a quarter of an octave of batch size count as visits of one place. The place is at
    the geometric middle of their batch sizes. Its seconds are the median of theirs, each scaled
    there by the line through all trials. The scatter of one visit is that of all trials about the
    medians of neighbouring places.
    """
    if not measured:
        return []
    line = fit_line(measured)
    # Of each trial at a place its batch size, and the log of its seconds over the line's.
    places: dict[int, list[tuple[int, float]]] = {}
    for batch_size, seconds in measured:
        place = round(PLACES_PER_OCTAVE * math.log2(batch_size))
        places.setdefault(place, []).append((batch_size, math.log(seconds / line(batch_size))))
    rising = [places[place] for place in sorted(places)]
    middles = [statistics.median(log_ratio for _, log_ratio in visits) for visits in rising]
    scatter = _scatter_of_trials(rising, middles)
    timings = list[Timing]()
    for visits, log_ratio in zip(rising, middles, strict=True):
        size = math.exp(statistics.fmean(math.log(batch_size) for batch_size, _ in visits))
        error = _error_of_place(scatter, len(visits), len(measured))
        timings.append(Timing(size, line(size) * math.exp(log_ratio), error, len(visits)))
    return timings


def _error_of_place(scatter: float, visits: int, trials: int) -> float:
    """Estimate the relative standard error of the median of ``visits`` trials at one place.

    A place stands for batch sizes that are about the same. ``scatter`` is the relative standard
    deviation of one trial, as all ``trials`` show it. The scatter does not show that one or two
    trials may both have run in a busy minute: the fewer they are, the more it is widened, and
    averaged with ``UNSEEN_SCATTER``.
    """
    # The deviations of few trials come out too small, by as much as their quartiles' distance. One
    # trial is widened as two are.
    widened = scatter / (1.0 - FEW_NEARER / max(visits, 2))
    # The only trial of all shows no scatter.
    telling = min(visits, trials - 1)
    return _error_of_median(math.sqrt(_drawn_to_usual(widened**2, telling)), visits)


def _scatter_of_trials(
    places: Sequence[Sequence[tuple[int, float]]], middles: Sequence[float]
) -> float:
    """Estimate the standard deviation of a trial's log seconds, by the median absolute deviation.

    A place stands for batch sizes that are about the same. A trial's deviation is from the median
    of its place and the two next to it, as few trials lie at one place.

    Args:
        places: of each trial at each place its batch size, and the log of its seconds over those of
            the line that is fitted to all trials; in ascending order of batch size.
        middles: the median of these logs at each place.
    """
    deviations = list[float]()
    for i, visits in enumerate(places):
        near_middle = statistics.median(middles[max(0, i - 1) : i + 2])
        deviations += [abs(log_ratio - near_middle) for _, log_ratio in visits]
    # The factor makes a standard deviation of it, as for normal values. Few trials may agree by
    # chance, so that it has a least value.
    return max(MEDIAN_ABSOLUTE * statistics.median(deviations), LEAST_ERROR)


def _drawn_to_usual(variance: float, repeats: int) -> float:
    """Average the variance that repeated timings show with a usual one, where they are few.

    Where there are fewer than ``TELLING_REPEATS``, the missing ones count as if they had shown the
    relative standard deviation ``UNSEEN_SCATTER``.
    """
    missing = max(TELLING_REPEATS - repeats, 0)
    return (repeats * variance + missing * UNSEEN_SCATTER**2) / (repeats + missing)


def scatter_of_few(deviation: float, count: int, fitted: int) -> float:
    """Correct the standard deviation that values show about a law that was fitted to them.

    They lie nearer to it than further values will, the more so the fewer they are. Where hardly
    any are left beyond the law's own parameters, it is averaged with ``UNSEEN_SCATTER``.

    Args:
        deviation: the values' standard deviation about the law, estimated as if the law were known:
            a root mean square, or a quantile over that of a normal distribution.
        count: how many values there are.
        fitted: how many parameters of the law were fitted to them.
    """
    left = max(count - fitted, 0)
    variance = 0.0
    if left:
        variance = deviation**2 * count / left
    return math.sqrt(_drawn_to_usual(variance, left))


def _error_of_median(scatter: float, visits: int) -> float:
    """Estimate the relative standard error of the median of some visits.

    ``scatter`` is the relative standard deviation of a single visit.
    """
    return max(MEDIAN_ERROR * scatter / math.sqrt(visits), LEAST_ERROR)
