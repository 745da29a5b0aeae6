"""The best full trial's curve as a ruler: when it had a metric that another trial has now.

Two trials of a fixed budget are compared by time, not by metric: a trial that has a metric m at the
share s of its budget is behind the ruler by

    behind = log s - log s_ruler(m),

with s_ruler(m) the share at which the ruler's running best first was m. It is 0 for the ruler
itself, and log c for a trial whose curve is the ruler's with c times the steps. No unit of the
metric is left in it: between two metrics that the ruler had, only their order and the ruler's own
steps count, up to the line that is drawn between two evaluations. Beyond the ruler's best its own
slope goes on, which needs a scale on which curves are nearly straight over log s:

- where the metric's ideal value is known, the log of the distance from it, as metrics fall about as
  a power of the steps (Hestness et al. 2017, arXiv 1712.00409);
- elsewhere the metric itself, whatever its sign, by its local slope dm/dlog s.

The slope is a median over the best trials, since the end of one curve is noisy; it is at least a
share of the slope over the last tenfold of the steps: a curve that happens to be flat at its end
would make an hour of a hair's breadth.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bstune.core.records import Mode, sign_of
from bstune.search.histories import Evaluations

Array = NDArray[np.float64]

# Share of the budget from which on the slope at its end is measured.
LATE_SHARE = 1 / 3
# Share of the budget from which on the slope is measured that the least one is a part of.
TENFOLD_SHARE = 0.1
# The slope at the start is measured up to so many times the first evaluation's steps.
EARLY_FACTOR = 3.0
# How many of the best curves have a say in the slope at the end.
BEST_CURVES = 5
# Least evaluations that a line is fitted to; fewer are joined by their ends.
LEAST_POINTS = 3
# The slope of a curve that never moves.
LEAST_SLOPE = 1e-12


@dataclass(frozen=True)
class Scale:
    """Converts the metric into a height, which falls while training goes on, and back.

    Args:
        mode: ``min`` for a metric that falls, ``max`` for one that rises.
        ideal: its best value; None where there is none, as of a log-likelihood.
        closest: the least distance from the ideal value that is told apart: nearer values count as
            this near, so that the logarithm is finite.
    """

    mode: Mode
    ideal: float | None
    closest: float = 1e-6

    @property
    def _sign(self) -> float:
        """1 for a metric that falls, -1 for one that rises."""
        return sign_of(self.mode)

    def height(self, metric: Array) -> Array:
        """Convert metrics to heights: the log of the distance from the ideal value.

        No distance is less than ``closest``: at the ideal value itself there is no logarithm.
        Without an ideal value the height is the metric itself, with its sign changed if it rises.
        """
        if self.ideal is None:
            return self._sign * metric
        return np.log(np.maximum(self._sign * (metric - self.ideal), self.closest))

    def metric(self, height: Array) -> Array:
        """Convert heights back to metrics."""
        if self.ideal is None:
            return self._sign * height
        # An exponential beyond this would overflow.
        return self.ideal + self._sign * np.exp(np.minimum(height, 700.0))


def choose_scale(histories: Iterable[Evaluations], mode: Mode, ideal: float | None) -> Scale:
    """Choose the scale on which a study's histories are read.

    A metric that falls and is positive throughout, as errors and most losses are, has the ideal
    value 0 unless ``ideal`` gives another.
    """
    values = list[float]()
    for history in histories:
        values += [value for _, value in _finite_evaluations(history)]
    metrics = np.array(values, dtype=np.float64)
    if ideal is None and mode == "min" and metrics.size and metrics.min() > 0.0:
        ideal = 0.0
    if ideal is None:
        return Scale(mode, None)
    # A metric at the ideal value counts as half of the least distance seen from it: no error among
    # 1,000 examples, say, as half an error.
    distances = np.abs(metrics - ideal)
    positive = distances[distances > 0.0]
    if not positive.size:
        return Scale(mode, ideal)
    return Scale(mode, ideal, closest=0.5 * float(positive.min()))


def _finite_evaluations(history: Evaluations) -> list[tuple[int, float]]:
    """Keep the evaluations whose metric is finite."""
    finite = list[tuple[int, float]]()
    for step, value in history:
        if value is not None and math.isfinite(value):
            finite.append((step, value))
    return finite


@dataclass(frozen=True)
class RunningBest:
    """A trial's least height, the metric on a scale that falls, by each evaluation: (n,) each."""

    log_shares: Array
    """Log of the share of the budget at each evaluation, at most 0."""
    heights: Array
    """The least height so far."""

    @property
    def best(self) -> float:
        """The least height that the trial had at all."""
        return float(self.heights[-1])

    def slope(self, since: float) -> float | None:
        """Compute the slope of the fall, -dh/dlog s, from the share ``since`` of the budget on.

        None where the curve ends before that.
        """
        # An evaluation at this very share counts, in spite of rounding.
        late = self.log_shares >= math.log(since) - 1e-9
        if np.count_nonzero(late) >= LEAST_POINTS:
            slope, _ = np.polyfit(self.log_shares[late], self.heights[late], 1)
            return -float(slope)
        # Too few evaluations for a line: the mean slope, from that share, or the curve's start if
        # that is later, to the curve's end.
        log_start = max(math.log(since), float(self.log_shares[0]))
        width = float(self.log_shares[-1]) - log_start
        if width <= 0.0:
            return None
        height_at_start = float(np.interp(log_start, self.log_shares, self.heights))
        return (height_at_start - self.best) / width


def running_best(history: Evaluations, last_step: int, scale: Scale) -> RunningBest | None:
    """Read the running best of a history up to ``last_step``, where the budget ends.

    The best is the least height: the metric on the ``scale``, on which it falls as it gets better.
    None without a finite evaluation until then.
    """
    finite = _finite_evaluations(history)
    within_budget = [evaluation for evaluation in finite if 0 < evaluation[0] <= last_step]
    if not within_budget:
        return None
    steps, values = np.array(within_budget, dtype=np.float64).T
    heights = np.minimum.accumulate(scale.height(values))
    return RunningBest(np.log(steps / last_step), heights)


@dataclass(frozen=True)
class Ruler:
    """The best full trial's curve: when it first had each height, the metric on a falling scale.

    Args:
        log_shares: log of the share of the budget at which each height was first had, ascending.
            The last one is 0, the budget's end: there the trial has its best metric, even where it
            had it a little earlier.
        heights: these heights, descending.
        slope: -dh/dlog s at the budget's end and beyond.
        first_slope: -dh/dlog s before the first evaluation.
    """

    log_shares: Array
    heights: Array
    slope: float
    first_slope: float

    def log_share(self, heights: Array) -> Array:
        """Compute the log share of its budget at which the ruler had, or would have, these heights.

        It lies above 0 for heights below the ruler's last: they would take a longer budget.
        """
        # The heights fall over the shares: np.interp needs them to rise.
        inside = np.interp(-heights, -self.heights, self.log_shares)
        beyond = np.maximum(self.heights[-1] - heights, 0.0) / self.slope
        before = np.maximum(heights - self.heights[0], 0.0) / self.first_slope
        return np.asarray(inside + beyond - before)

    def height(self, log_shares: Array) -> Array:
        """Give the heights that the ruler had, or would have, at log shares of its budget."""
        inside = np.interp(log_shares, self.log_shares, self.heights)
        beyond = np.maximum(log_shares, 0.0) * self.slope
        before = np.maximum(self.log_shares[0] - log_shares, 0.0) * self.first_slope
        return np.asarray(inside - beyond + before)


def make_ruler(curves: Sequence[RunningBest], least_slope: float) -> Ruler:
    """Make the ruler, the best curve, from the curves of full trials, the best first.

    A curve has the least height so far, the metric on a scale that falls, over the log of the share
    of the budget. The slope at the ruler's end is that of several curves, see :func:`_end_slope`.
    """
    # The evaluations at which the best metric so far improved.
    improved = np.append(True, np.diff(curves[0].heights) < 0.0)
    log_shares = curves[0].log_shares[improved]
    heights = curves[0].heights[improved]
    # Its best metric is that at the budget's end, even where it had it a little earlier.
    log_shares[-1] = 0.0
    slope = _end_slope(curves, least_slope)
    early = log_shares <= log_shares[0] + math.log(EARLY_FACTOR)
    width = float(log_shares[early][-1] - log_shares[0])
    # A curve falls no slower at its start than at its end.
    first_slope = slope
    if width > 0.0:
        first_slope = max(slope, float(heights[0] - heights[early][-1]) / width)
    return Ruler(log_shares=log_shares, heights=heights, slope=slope, first_slope=first_slope)


def _end_slope(curves: Sequence[RunningBest], least_slope: float) -> float:
    """Estimate -dh/dlog s at the budget's end from the best curves, as one curve's end is noisy.

    The height h is the metric on a scale that falls, s the share of the budget. The estimate is the
    median of the curves' slopes from ``LATE_SHARE`` of the budget on, and at least
    ``least_slope`` times that over the last tenfold of the steps: where a curve happens to be flat
    at its end, any better metric would seem to take for ever.
    """
    end_slopes = list[float]()
    tenfold_slopes = list[float]()
    for curve in curves[:BEST_CURVES]:
        end_slope = curve.slope(LATE_SHARE)
        tenfold_slope = curve.slope(TENFOLD_SHARE)
        if end_slope is not None and tenfold_slope is not None:
            end_slopes.append(end_slope)
            tenfold_slopes.append(tenfold_slope)
    if end_slopes:
        least = least_slope * float(np.median(tenfold_slopes))
        return max(float(np.median(end_slopes)), least, LEAST_SLOPE)
    # No trial has evaluations enough for a slope: what their best heights differ by stands for the
    # fall over one unit of log s.
    return max(float(np.ptp([curve.best for curve in curves])), LEAST_SLOPE)
