"""Schedules that end with their trials: what a run tells of the steps to target, and which length.

A run whose schedule ends after h steps, its length, reaches the target if h is at least S(B, lr) of
its seed: S is the shortest schedule that reaches it. How a run ended says how far S is:

- It missed: S lies above h, by ``log(S/h) = scale excess^power``. The excess is the log of the
  metric's distance from its best value over the target's distance (0 at the target), mostly that
  at the schedule's end. With power 1 that distance falls as a power of h; below 1 it flattens out.
- It reached the target at its schedule's end: the same law with the opposite sign.
- It reached the target at step s, before that: ``log(S/s) = waste tanh(early/waste) - share early``
  with early = log(h/s). The share m/(1 - m) says that the target is reached at S^(1 - m) h^m: 0
  where the length does not matter, and the larger, the more is gained at the schedule's end alone.
  The waste is of steps at rates near zero, which train little: log 2 for a straight line to zero if
  progress is the sum of the rates.

The four numbers are the workload's, and are sampled with the law's parameters. All three formulas
are assumptions, each with an error of its own.

What is measured is the excess, or s; log S is made of it by a draw's own law. So the density of log
S is multiplied by the derivative of log S to what was measured: without it a draw that maps all
data to about the same log S would be preferred, and 72 searches cost 1.10 times as much (1.02 to
1.19; ``tests/benchmarks/schedule_lengths.py``).
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import log_ndtr, ndtr

from bstune.core.records import Records, Target
from bstune.search.histories import log_curve

Array = NDArray[np.float64]

# Columns of the draws, the last ones: logs of scale, power, share and waste; prior means and
# standard deviations. With its wide prior, m itself is nearly uniform.
MEANS = (math.log(2.0), math.log(0.8), 0.0, math.log(0.18))
SPREADS = (0.6, 0.25, 1.8, 1.2)
# Standard deviation of each term of the law, as a share of it, and of log S at least.
MISFIT = 0.25
LEAST_DEVIATION = 0.03
# The least log excess that a run which missed is read with, and that is told from 0.
LEAST_EXCESS = 0.003
RESOLUTION = 0.01
# A run that missed has hardly left its start where its log excess is this share of the largest.
STILL_AT_START = 0.9
# Share of the runs that miss the target whatever their schedule's length.
OUTLIERS = 0.04
# The largest log(h/s) of a length h that is compared, and the largest log of a cost over S.
MOST_EARLY = 12.0
MOST_LOG_COST = 50.0
# With a length so many deviations above log S 9 of 10 seeds reach the target: a normal
# distribution's quantile.
RELIABLE = 1.2816


@dataclass(frozen=True)
class Ends:
    """How n runs ended: (n,) arrays."""

    excess: Array
    """Log excess of a run that ended its schedule: above 0 it missed. 0 for other runs."""
    early: Array
    """log(h/s) of a run that reached the target before its schedule's end; else 0."""

    @property
    def is_at_start(self) -> NDArray[np.bool_]:
        """Whether a run missed and its metric has hardly left its start.

        However far S is, the metric is no worse: S is at least what the law makes of it. The run
        that missed by most always counts as one.
        """
        largest = max(float(self.excess.max(initial=0.0)), LEAST_EXCESS)
        return np.asarray(self.excess >= STILL_AT_START * largest)


@dataclass(frozen=True)
class Reading:
    """What m draws make of n runs, (m, n) each."""

    log_over: Array
    """log(S/steps)."""
    variance: Array
    """Of that."""
    log_slope: Array
    """Log of abs(d log S/d datum), of what was measured."""


def ends_of(chains: Records, target: Target, scale: float) -> Ends:
    """How runs ended their schedules; ``scale`` is the target's distance from the best value."""
    excess = np.zeros(len(chains))
    early = np.zeros(len(chains))
    for place, chain in enumerate(chains):
        length = chain.schedule_steps or chain.steps
        curve = log_curve(chain, target, scale)
        if chain.status == "missed" and len(curve):
            excess[place] = max(float(curve[:, 1].min()), LEAST_EXCESS)
        elif chain.reached and chain.steps < length:
            early[place] = math.log(length / chain.steps)
        elif chain.reached:
            excess[place] = min(float(curve[:, 1].min()), -LEAST_EXCESS)
    return Ends(excess, early)


def read_ends(theta: Array, ends: Ends) -> Reading:
    """log(S/steps) of n runs by m draws of all parameters, (m, p); see the module."""
    log_scale, log_power, log_share, log_waste = theta.T[-len(MEANS) :, :, None]
    distance = np.maximum(np.abs(ends.excess), RESOLUTION)
    by_excess = np.exp(log_scale + np.exp(log_power) * np.log(distance))
    waste = np.exp(log_waste)
    bend = np.tanh(ends.early / waste)
    wasted = waste * bend
    saved = np.exp(log_share) * ends.early
    has_ended = ends.excess != 0.0
    by_excess = by_excess * has_ended
    # d log S/d excess = scale power excess^(power - 1), and as log s = log h - early,
    # d log S/d log s = 1 - (1 - tanh^2) + share.
    of_excess = log_scale + log_power + (np.exp(log_power) - 1.0) * np.log(distance)
    of_step = np.log(np.exp(log_share) + bend**2 + 1e-12)
    log_slope = np.where(has_ended, of_excess, np.where(ends.early > 0.0, of_step, 0.0))
    terms = by_excess**2 + wasted**2 + saved**2
    return Reading(
        log_over=np.sign(ends.excess) * by_excess + wasted - saved,
        variance=LEAST_DEVIATION**2 + MISFIT**2 * terms,
        log_slope=log_slope,
    )


@dataclass(frozen=True)
class Length:
    """The length of a schedule, and what it is expected to cost, in steps."""

    steps: float
    cost: float
    """Of all runs until one reaches the target; infinite where none is in time."""
    share: float
    """Of the seeds that are predicted to reach the target."""


def length_of(theta: Array, log_s: float, deviation: float, steps: float) -> Length:
    """What a given length is expected to cost; other arguments as of :func:`least_cost`."""
    log_length = np.array([math.log(steps) - log_s])
    log_lengths, log_reached = _steps_of_lengths(theta)
    log_step = np.interp(log_length, log_lengths, log_reached)
    reaches, cost = _chance_and_cost(log_length, np.minimum(log_step, log_length), deviation)
    return Length(steps, math.exp(log_s) * float(cost[0]), float(reaches[0]))


def least_cost(
    theta: Array,
    log_s: float,
    deviation: float,
    longest: float,
    latest: float = math.inf,
    reliable: bool = False,
) -> Length:
    """The length of least expected cost, where log S is normal.

    A run that misses costs h and is run again; one that reaches the target ends there, at step s.
    So the cost is ``s + h (1 - P)/P``, P being the chance that S is at most h. Where all is gained
    at the end that is h/P: least 17% above an S that is known to 10%. The less is gained there, the
    less a longer schedule costs. Of an S that is hardly known the best length is below its median.

    Args:
        theta: draws of all parameters, (m, p); the medians of the last ones count.
        log_s: mean of log S.
        deviation: of log S, from seed to seed and of what is known.
        longest: steps of the longest schedule.
        latest: the step by which the target has to be reached.
        reliable: only lengths that 9 of 10 seeds reach the target with, outliers not counted, as
            far as ``longest``.
    """
    log_longest = math.log(longest) - log_s
    log_lengths, log_reached = _steps_of_lengths(theta)
    # h/P is least above S exp(-deviation^2): d log P/d log h is over log(S/h)/deviation^2.
    below = np.linspace(-deviation * (deviation + 1.0), 0.0, 200, endpoint=False)
    # The longest schedule itself is among them.
    at_longest = min(float(np.interp(log_longest, log_lengths, log_reached)), log_longest)
    log_lengths = np.concatenate([below, log_lengths, [log_longest]])
    log_reached = np.concatenate([below, log_reached, [at_longest]])
    reaches, cost = _chance_and_cost(log_lengths, log_reached, deviation)
    is_allowed = (log_lengths <= log_longest) & (log_reached <= math.log(latest) - log_s)
    if reliable:
        is_allowed &= log_lengths >= min(RELIABLE * deviation, log_longest)
    best = int(np.where(is_allowed, cost, np.inf).argmin())
    if not is_allowed[best]:
        return Length(min(latest, longest), math.inf, 0.0)
    return Length(
        steps=min(math.exp(log_s + log_lengths[best]), longest),
        cost=math.exp(log_s) * float(cost[best]),
        share=float(reaches[best]),
    )


def _steps_of_lengths(theta: Array) -> tuple[Array, Array]:
    """log(h/S) of rising lengths h from S on, and log(s/S) of where they reach the target."""
    share, waste = np.exp(np.median(theta[:, -2:], axis=0))
    # They lie closest at the beginning, where the law is steepest.
    early = np.linspace(0.0, MOST_EARLY**0.25, 400) ** 4
    log_over = waste * np.tanh(early / waste) - share * early
    return early - log_over, -log_over


def _chance_and_cost(
    log_lengths: Array, log_reached: Array, deviation: float
) -> tuple[Array, Array]:
    """The chance to reach the target, and the expected cost over S, at some lengths over S."""
    reaches = (1.0 - OUTLIERS) * ndtr(log_lengths / deviation)
    log_reaches = math.log(1.0 - OUTLIERS) + log_ndtr(log_lengths / deviation)
    log_misses = log_lengths + np.log1p(-reaches) - log_reaches
    # exp must not overflow.
    cost = np.exp(np.minimum([log_reached, log_misses], MOST_LOG_COST)).sum(axis=0)
    return reaches, np.asarray(cost)
