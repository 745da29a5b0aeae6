"""tau(B) with its error: the seconds of a step as a smooth law, from timings that scatter.

``log tau(B) = log line(B) + r(B)``, with the line ``overhead + per_example B`` and a smooth
residual r, a Gaussian process over log2 B (Rasmussen and Williams 2006, eq. 2.25 and 2.26). Both
parameters of the line are as uncertain as the timings leave them: the derivatives of log tau by
them are part of the process. The more the timings scatter, the more a batch size is drawn to its
neighbours and to the line; where they hardly do, tau is what was measured. It does not fall with B,
but where the timings fall by far more than their errors: on tensor cores, B = 129 can be slower
than 136.

A draw of tau is a draw of r, made monotone likewise, times one factor for all batch sizes: what a
busy machine adds to all of them is not seen in their scatter, nor what the machine does in other
minutes than those of the timings. The trials' own steps tell the latter. Where a survey had no time
for more than a few visits, the trials' own steps join its timings
(:meth:`StepTimeLaw.joined_with`).
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
from scipy.interpolate import PchipInterpolator
from scipy.optimize import isotonic_regression

from bstune.core.errors import HardwareError
from bstune.core.interval import INTERVAL_LEVEL, INTERVAL_QUANTILE
from bstune.core.step_time import StepTime, fit_line
from bstune.core.step_timings import (
    TELLING_REPEATS,
    OwnSteps,
    TimedSize,
    Timing,
    scatter_of_few,
    timings_of_trials,
    with_errors,
)

Array = NDArray[np.float64]
# Octaves of batch size over which the residual stays alike.
RESIDUAL_OCTAVES = 1.5
# Octaves between timed batch sizes. Across a wider gap log tau is no straight line in log B: with
# timings at B = 2 and 6,256 alone that line is 3.3 times what overhead and examples come to at
# B = 32.
WIDEST_GAP = 1.5
# Across a gap of more octaves the trials' own steps tell more of a step than the timings at its
# ends.
UNTOLD_GAP = 2.5
# Within a wide gap the law is worked out at batch sizes that lie at most so many octaves apart.
FILLED_OCTAVES = 1.0
# Least standard deviation of the residual: no step is a straight line in B.
LEAST_RESIDUAL = 0.05
# Standard deviation of the logarithms of the line's two parameters, before any timing.
LINE_SPREAD = 2.0
# Least share of a step that overhead, and examples, take at the smaller and the larger end: on a
# quiet machine, and the most that it is on any.
LEAST_PART = 0.01
MOST_LEAST_PART = 0.3
# Fits of the law, each around a line that is fitted to the one before.
REFITS = 3
# A fall of tau is confirmed by so many of the combined standard errors.
CONFIRMED = 4.0
# Seconds by which a step of Lightning's loop, with its hooks, and one of the lean loop may differ.
LOOPS_APART = 5e-4
# The law's batch sizes lie so many octaves apart where trials' own steps join the timings.
SIZES_APART = 0.125
# Fewest trials whose own steps say how a machine's speed changes from minute to minute.
TRIALS_OF_FACTOR = 10
# Relative error of the factor of all batch sizes: on a quiet machine, and on one that waits all the
# time. Measured on digits beside two busy processes, their wait left out: steps took 1.0 to 2.2
# times as long.
QUIET_FACTOR = 0.02
BUSY_FACTOR = 0.6


@dataclass(frozen=True)
class StepTimeLaw(StepTime):
    """tau(B) with its error; called, it gives the seconds of a step at a batch size.

    Args:
        sizes: the n batch sizes at which steps were timed, and those that fill wide gaps between
            them, in ascending order.
        seconds: tau at each of them, by the law.
        residual: the median relative error of the line at the timed batch sizes.
        log_covariance: covariance of log tau at these, (n, n).
        errors: relative standard error of the timings of each timed size.
        factor_error: relative standard deviation of a factor that all batch sizes share.
        falls: positions in ``sizes`` at which tau is confirmed to fall from the one before.
        timings: those that it was fitted to, in ascending order of batch size.
        of_trainer: whether Lightning's own loop took the steps that were timed.
        takes_trials: whether the timings are so few that the trials' own steps join them.
    """

    sizes: tuple[float, ...]
    seconds: tuple[float, ...]
    residual: float
    log_covariance: tuple[tuple[float, ...], ...]
    errors: tuple[float, ...]
    factor_error: float
    falls: tuple[int, ...]
    timings: tuple[Timing, ...]
    of_trainer: bool
    takes_trials: bool

    def __call__(self, batch_size: float) -> float:
        """Compute tau(B) in seconds.

        Beyond the timed sizes it follows the line overhead + per_example B, scaled to meet the
        curve at the nearest of them.
        """
        nearest = min(max(batch_size, self.sizes[0]), self.sizes[-1])
        line = self.overhead + self.per_example * batch_size
        line_at_nearest = self.overhead + self.per_example * nearest
        seconds = math.exp(float(self._log_interpolator(math.log(nearest))))
        return seconds * line / line_at_nearest

    def draws(self, count: int, rng: np.random.Generator) -> "StepTimeDraws":
        """Draw ``count`` functions tau(B) from the uncertainty that the timings leave.

        Each rises with B, but for falls of tau that the timings confirm. One random factor for all
        batch sizes stands for how fast the machine is at another time.
        """
        log_law = np.log(self.seconds)
        covariance = np.array(self.log_covariance)
        # eigh also takes a covariance that rounding has left just short of positive.
        drawn = rng.multivariate_normal(log_law, covariance, size=count, method="eigh")
        rising = np.stack([_made_rising(row, np.diag(covariance), self.falls) for row in drawn])
        factor = rng.normal(0.0, self.factor_error, size=(count, 1))
        return StepTimeDraws(self, rising + factor)

    def relative_error(self, batch_size: float) -> float:
        """Compute the standard deviation of log tau(B).

        It includes that of the machine's speed from one time to another, which changes tau at all
        batch sizes by one factor.
        """
        deviation = np.sqrt(np.diag(np.array(self.log_covariance)))
        deviation_here = float(np.interp(math.log(batch_size), np.log(self.sizes), deviation))
        return math.hypot(deviation_here, self.factor_error)

    def ratio_error(self, first: float, second: float) -> float:
        """Compute the standard deviation of log(tau(first)/tau(second)) of two batch sizes.

        The machine's speed changes both by one factor, which their ratio does not have.
        """
        weights = self._weights(first) - self._weights(second)
        variance = float(weights @ np.array(self.log_covariance) @ weights)
        # By rounding it may be just below 0.
        return math.sqrt(max(variance, 0.0))

    def joined_with(self, own_steps: Sequence[OwnSteps]) -> "StepTimeLaw":
        """Fit the law anew to its timings and to the trials' own seconds of a step.

        Without trials that may join, and where the timings are enough (``takes_trials`` is false),
        it stays as it is. Trials of about the same batch size make one timing. Lightning's training
        loop and bstune's lean one take steps of somewhat different length. So where the trials'
        loop is not that of the timings, all of them may be off alike by ``LOOPS_APART`` seconds.
        """
        joining = [steps for steps in own_steps if steps.may_join]
        if not self.takes_trials or not joining:
            return self
        joined = list(self.timings)
        for of_trainer in (False, True):
            seconds_apart = 0.0 if of_trainer == self.of_trainer else LOOPS_APART
            measured = [
                (steps.batch_size, steps.seconds)
                for steps in joining
                if steps.of_trainer == of_trainer
            ]
            for timing in timings_of_trials(measured):
                joined.append(replace(timing, between_loops=seconds_apart / timing.seconds))
        joined.sort(key=lambda timing: timing.batch_size)
        # At these batch sizes the law is worked out: near a surveyed one no further one is needed.
        surveyed = [timing.batch_size for timing in self.timings]
        sizes = _with_sizes_apart(surveyed, [timing.batch_size for timing in joined])
        # A survey of so few timings has confirmed no fall of tau.
        return _fit_law(
            joined,
            sizes,
            falls=(),
            factor_error=self.factor_error,
            of_trainer=self.of_trainer,
        )

    def without_trials(self) -> "StepTimeLaw":
        """Give the same law, marked to stay as it is in :meth:`joined_with`.

        It is for trials that run beside each other and slow each other down, and for a law that
        was fitted to the trials already.
        """
        return replace(self, takes_trials=False)

    def widened_by_trials(self, own_steps: Sequence[OwnSteps]) -> "StepTimeLaw":
        """Widen the error of the machine's speed (``factor_error``) to what trials' steps show.

        A survey sees some seconds of a machine whose speed may change from minute to minute; the
        trials see the minutes of a whole study. The error added is such that nine of ten trials lie
        within 1.645 times this error of the law. Below ten trials the law stays as it is. Where
        another training loop than that of the timings took the trials' steps, only their scatter
        counts, and not how far they are off the law on average.
        """
        if len(own_steps) < TRIALS_OF_FACTOR:
            return self
        log_ratio = np.array(
            [math.log(steps.seconds / self(steps.batch_size)) for steps in own_steps]
        )
        if any(steps.of_trainer != self.of_trainer for steps in own_steps):
            log_ratio = log_ratio - np.median(log_ratio)
        return replace(self, factor_error=math.hypot(self.factor_error, _deviation(log_ratio)))

    def _weights(self, batch_size: float) -> Array:
        """Compute how much each of the law's n sizes weighs in log tau at a batch size: (n,).

        log tau is interpolated linearly over log B. Beyond the ends, the end has all the weight.
        """
        log_size = math.log(batch_size)
        log_sizes = np.log(self.sizes)
        # A size's weight is the interpolation of 1 at that size and 0 at all others.
        return np.array(
            [float(np.interp(log_size, log_sizes, unit)) for unit in np.eye(log_sizes.size)]
        )

    @cached_property
    def _log_interpolator(self) -> PchipInterpolator:
        """Interpolates log tau over log B between the law's sizes."""
        # Unlike a cubic spline it keeps a rising sequence rising.
        return PchipInterpolator(np.log(self.sizes), np.log(self.seconds))


@dataclass(frozen=True)
class StepTimeDraws:
    """Draws of tau(B) from a law with its error."""

    law: StepTimeLaw
    log_seconds: Array
    """log tau at the law's batch sizes, (draws, sizes)."""

    def over_law(self, batch_size: Array) -> Array:
        """Compute the ratio of each draw's tau to the law's tau at batch sizes (n,): (draws, n)."""
        log_sizes = np.log(self.law.sizes)
        log_law = np.log(self.law.seconds)
        log_batch_size = np.log(batch_size)
        log_ratios = list[Array]()
        for log_draw in self.log_seconds:
            log_ratios.append(np.interp(log_batch_size, log_sizes, log_draw - log_law))
        return np.asarray(np.exp(np.stack(log_ratios)))


def fit_step_time_law(
    timings: Sequence[TimedSize], waited: float = 0.0, of_trainer: bool = False
) -> StepTimeLaw:
    """Fit tau(B), the seconds of a step, with its error.

    Args:
        timings: of two or more batch sizes, each once.
        waited: the fraction of the wall time for which the timed steps waited for a processor.
        of_trainer: whether Lightning's own training loop took the steps, not bstune's lean one.

    Raises:
        HardwareError: for fewer batch sizes, a repeated one, or seconds that are not positive.
    """
    pairs = sorted((timing.batch_size, timing.seconds) for timing in timings)
    are_positive = all(math.isfinite(seconds) and seconds > 0 for _, seconds in pairs)
    if len({size for size, _ in pairs}) < max(2, len(pairs)) or not are_positive:
        raise HardwareError(
            f"tau(B) needs positive seconds at two or more batch sizes, each once, but got {pairs}"
        )
    ordered = with_errors(timings)
    sizes = [timing.batch_size for timing in ordered]
    # Where tau falls with B by far more than the errors. Elsewhere the law may only rise.
    falls = _confirmed_falls(ordered)
    # Whatever kept the processor busy may slow the steps of all batch sizes by one factor, at other
    # times. The error of that factor grows with the wait.
    factor_error = QUIET_FACTOR + BUSY_FACTOR * waited
    return _fit_law(ordered, sizes, falls, factor_error, of_trainer)


def _fit_law(
    timings: Sequence[Timing],
    sizes: Sequence[float],
    falls: Sequence[int],
    factor_error: float,
    of_trainer: bool,
) -> StepTimeLaw:
    """Fit tau(B) to timings in ascending order of batch size.

    Args:
        timings: seconds of a step with their errors, in ascending order of batch size.
        sizes: two or more of the timed batch sizes, at which the law is worked out.
        falls: positions among the timings at which tau is confirmed to fall from the one before.
        factor_error: relative standard deviation of a factor that all batch sizes share.
        of_trainer: whether Lightning's own training loop took the steps.
    """
    pairs = [(timing.batch_size, timing.seconds) for timing in timings]
    timed_sizes = [size for size, _ in pairs]
    line = fit_line(pairs)
    # A Gaussian process of log tau is fitted around the line. The line is then fitted anew to the
    # seconds that the process gives, which scatter less than the timings.
    smoothed_line = line
    for _ in range(REFITS):
        middle, _ = _fit_process(timings, smoothed_line, falls, timed_sizes)
        smoothed_line = fit_line(list(zip(timed_sizes, np.exp(middle).tolist(), strict=True)))
    # The line that the law states is the one through the timings, with its relative errors there.
    off_line = [abs(line(size) / seconds - 1.0) for size, seconds in pairs]
    filled = _with_gaps_filled(sizes)
    middle, covariance = _fit_process(timings, smoothed_line, falls, filled)
    # The falls are at positions among the timings; here they are needed among the filled sizes.
    filled_falls = tuple(filled.index(timed_sizes[position]) for position in falls)
    smooth = _made_rising(middle, np.diag(covariance), filled_falls)
    repeats = sum(timing.visits - 1 for timing in timings)
    gaps = [math.log2(high / low) for low, high in pairwise(sizes)]
    # Across a wide gap, or where few timings were repeated, trials' own steps tell more.
    takes_trials = max(gaps) > UNTOLD_GAP or repeats < TELLING_REPEATS
    return StepTimeLaw(
        overhead=line.overhead,
        per_example=line.per_example,
        sizes=tuple(filled),
        seconds=tuple(np.exp(smooth).tolist()),
        residual=statistics.median(off_line),
        log_covariance=tuple(map(tuple, covariance.tolist())),
        errors=tuple(timing.error for timing in timings),
        factor_error=factor_error,
        falls=filled_falls,
        timings=tuple(timings),
        of_trainer=of_trainer,
        takes_trials=takes_trials,
    )


def leave_one_out(timings: Sequence[TimedSize]) -> tuple[float, ...]:
    """Predict tau at each timed size but the ends from all other sizes, and give the errors.

    They are relative to the timed seconds, in ascending order of batch size.
    """
    ordered = sorted(timings, key=lambda timing: timing.batch_size)
    errors = list[float]()
    for i in range(1, len(ordered) - 1):
        others = [*ordered[:i], *ordered[i + 1 :]]
        left_out = ordered[i]
        predicted = fit_step_time_law(others)(left_out.batch_size)
        errors.append(abs(predicted / left_out.seconds - 1.0))
    return tuple(errors)


def law_of_trials(measured: Sequence[tuple[int, float]]) -> StepTimeLaw | None:
    """Fit tau(B) to trials' own seconds of a step, (batch size, seconds) each.

    Trials of about the same batch size make one timing, as in
    :func:`bstune.core.step_timings.timings_of_trials`. None where there are fewer than two timings.
    The trials' scatter about the law is how much the machine's speed varies between runs
    (``factor_error``): a further run has its own minutes, too.
    """
    timings = timings_of_trials(measured)
    if len(timings) < 2:
        return None
    sizes = [timing.batch_size for timing in timings]
    law = _fit_law(timings, sizes, _confirmed_falls(timings), QUIET_FACTOR, of_trainer=False)
    log_ratio = np.array([math.log(seconds / law(batch_size)) for batch_size, seconds in measured])
    # The law's line, which was fitted to these trials, takes two degrees of freedom.
    scatter = scatter_of_few(_deviation(log_ratio), len(measured), fitted=2)
    law = replace(law, factor_error=math.hypot(QUIET_FACTOR, scatter))
    # The trials are in the law already: they must not join it a second time.
    return law.without_trials()


def _deviation(log_ratio: Array) -> float:
    """Estimate the standard deviation of values about 0 by the distance that holds nine of ten.

    Of a normal distribution that distance is 1.645 standard deviations.
    """
    return float(np.quantile(np.abs(log_ratio), INTERVAL_LEVEL)) / INTERVAL_QUANTILE


def _with_sizes_apart(surveyed: Sequence[float], candidates: Sequence[float]) -> list[float]:
    """Add candidate batch sizes to the surveyed ones, and give all in ascending order.

    Candidates within ``SIZES_APART`` octaves of a size that is there already are left out.
    """
    sizes = list(surveyed)
    for candidate in candidates:
        octaves = [abs(math.log2(candidate / size)) for size in sizes]
        if min(octaves) >= SIZES_APART:
            sizes.append(candidate)
    return sorted(sizes)


def _with_gaps_filled(sizes: Sequence[float]) -> list[float]:
    """Add batch sizes within each gap of over ``WIDEST_GAP`` octaves, evenly over log B.

    The law is worked out at all sizes and interpolated between them. Across a wide gap that would
    be wrong, as log tau is no straight line in log B there. ``sizes`` are in ascending order, and
    so is the answer.
    """
    filled = [sizes[0]]
    for low, high in pairwise(sizes):
        octaves = math.log2(high / low)
        parts = 1
        if octaves > WIDEST_GAP:
            # No two neighbours are then over FILLED_OCTAVES apart.
            parts = math.ceil(octaves / FILLED_OCTAVES)
        filled += [low * (high / low) ** (part / parts) for part in range(1, parts)]
        filled.append(high)
    return filled


def _fit_process(
    timings: Sequence[Timing], line: StepTime, falls: Sequence[int], new_sizes: Sequence[float]
) -> tuple[Array, Array]:
    """Fit log tau(B) = log line(B) + r(B) to timings, with r a Gaussian process over log2 B.

    Args:
        timings: of n batch sizes, in ascending order.
        line: overhead and seconds per example.
        falls: positions of the timings at which tau is confirmed to fall from the one before.
        new_sizes: the m batch sizes at which the law is asked for.

    Returns:
        Posterior mean (m,) and covariance (m, m) of log tau at these batch sizes.
    """
    sizes = np.array([timing.batch_size for timing in timings])
    new = np.array(new_sizes)
    errors = np.array([timing.error for timing in timings])
    between_loops = np.array([timing.between_loops for timing in timings])
    # Timings that scatter may hide overhead, or seconds per example, that the line lacks. Each is
    # taken to be at least this fraction of a step, at the smallest and the largest size.
    least_part = min(max(LEAST_PART, float(errors.mean())), MOST_LEAST_PART)
    overhead = max(line.overhead, least_part * line(sizes[0]))
    per_example = max(line.per_example, least_part * line(sizes[-1]) / sizes[-1])
    log_seconds = np.log([timing.seconds for timing in timings])
    residual = log_seconds - np.log(overhead + per_example * sizes)
    # The part of the residuals that the timings' errors do not explain is a bend of the law. There
    # is always some: no step is a straight line in B.
    residual_variance = float(np.mean(residual**2 - errors**2 - between_loops**2))
    amplitude = math.sqrt(max(residual_variance, LEAST_RESIDUAL**2))

    def prior(first: Array, second: Array) -> Array:
        """Give the prior covariance of log tau at batch sizes (n,) and (m,): (n, m)."""
        # The residual r is alike at batch sizes within some octaves.
        apart = (np.log2(first)[:, None] - np.log2(second)[None, :]) / RESIDUAL_OCTAVES
        covariance = amplitude**2 * np.exp(-0.5 * apart**2)
        # Batch sizes on the two sides of a confirmed fall say nothing of each other.
        falls_at = sizes[list(falls)]
        side = np.searchsorted(falls_at, first, side="right")
        other_side = np.searchsorted(falls_at, second, side="right")
        covariance[side[:, None] != other_side[None, :]] = 0.0
        # Before any timing, the logs of the line's two parameters have the standard deviation
        # LINE_SPREAD. The derivative of log tau by the log of the overhead is the overhead's
        # fraction of a step, that by the log of the seconds per example is the rest.
        fraction = overhead / (overhead + per_example * first)
        other_fraction = overhead / (overhead + per_example * second)
        by_overhead = np.outer(fraction, other_fraction)
        by_examples = np.outer(1.0 - fraction, 1.0 - other_fraction)
        return np.asarray(covariance + LINE_SPREAD**2 * (by_overhead + by_examples))

    # Timings of another training loop than the law's are all off alike: their errors go together.
    noise = np.diag(errors**2) + np.outer(between_loops, between_loops)
    # Rasmussen and Williams 2006, eq. 2.25 and 2.26.
    between = prior(new, sizes)
    gain = np.linalg.solve(prior(sizes, sizes) + noise, between.T).T
    covariance = prior(new, new) - gain @ between.T
    log_line = np.log(overhead + per_example * new)
    # Rounding leaves the covariance not quite symmetric: it is averaged with its transpose.
    return log_line + gain @ residual, 0.5 * (covariance + covariance.T)


def _confirmed_falls(timings: Sequence[Timing]) -> tuple[int, ...]:
    """Find the positions of timings at which tau is confirmed to fall from the one before.

    It falls there by ``CONFIRMED`` times the errors of both, which were timed more than once.
    """
    falls = list[int]()
    for i, (before, timing) in enumerate(pairwise(timings), start=1):
        log_fall = math.log(before.seconds / timing.seconds)
        is_repeated = min(before.visits, timing.visits) > 1
        if is_repeated and log_fall > CONFIRMED * math.hypot(before.error, timing.error):
            falls.append(i)
    return tuple(falls)


def _made_rising(log_seconds: Array, variance: Array, falls: Sequence[int]) -> Array:
    """Make log tau rise with B between confirmed falls, by least squares weighted by precision.

    Args:
        log_seconds: log tau at n ascending batch sizes, (n,).
        variance: of log tau there, (n,).
        falls: positions at which tau is confirmed to fall from the one before.
    """
    # A variance may be 0 but for rounding.
    weights = 1.0 / np.maximum(variance, 1e-12)
    parts = list[Array]()
    for part, weight in zip(np.split(log_seconds, falls), np.split(weights, falls), strict=True):
        parts.append(isotonic_regression(part, weights=weight).x)
    return np.concatenate(parts)
