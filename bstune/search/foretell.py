"""What a stopped trial's history foretells of its steps to target: a factor still to go, with its uncertainty.

Metrics fall about as a power of the steps, ``log excess = -rate log(step/S)``, where the excess is the distance from
the best possible value over the target's own distance from it: 1 at the target. The rate over what is left is the
trial's own recent one, shrunk towards those of the trials that did reach the target, taken from the same excess on.
That is an estimate with a wide error, never a bound: a trial that flattens out above the target shows a rate near 0.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bstune.records import Target

History = Sequence[tuple[int, float | None]]

RATE = 0.4  # of error in steps where nothing has reached the target yet
RATE_SPREAD = 0.6  # standard deviation of its logarithm
SIMILARITY = 0.2  # at least this much do the logarithms of rates differ between trials
RECENT = 3.0  # the own rate is taken over this factor of steps
SLOWDOWN = 0.9  # rates fall as training goes on: the rest is slower than the recent past by this factor ...
SLOWDOWN_SPREAD = 0.3  # ... give or take this, in the logarithm
SCATTER = 0.04  # of the log excess from one evaluation to the next
FASTEST, SLOWEST = 3.0, 0.02  # rates are kept within these


@dataclass(frozen=True)
class Foretold:
    """``log_factor``: log of steps to target over the steps done, with its standard deviation ``spread``."""

    log_factor: float
    spread: float


def ideal_value(target: Target, bounds: Sequence[float] | None) -> float | None:
    """Return the best value that the metric can take: from its bounds, or 0 for one that falls to a positive goal."""
    if bounds is not None and len(bounds) == 2:
        best = bounds[0] if target.mode == "min" else bounds[1]
        if math.isfinite(best) and target.gap(best) < 0:
            return best
    return 0.0 if target.mode == "min" and target.value > 0 else None


def log_excess(history: History, target: Target, ideal: float | None) -> list[tuple[float, float]]:
    """Return (log step, log excess) of the finite evaluations; the excess is 1 at the target.

    Without an ideal value, the distance from goal to ideal is taken as a quarter of the first gap.
    """
    known = [(step, target.gap(value)) for step, value in history if step > 0 and value is not None]
    known = [(step, gap) for step, gap in known if math.isfinite(gap)]
    if not known:
        return []
    scale = abs(target.value - ideal) if ideal is not None else max(known[0][1], 1e-12) / 4.0
    return [(math.log(step), math.log(max(1.0 + gap / scale, 1e-3))) for step, gap in known]


def reached_rate(curve: Sequence[tuple[float, float]], log_steps: float, excess: float) -> float | None:
    """Return at which rate a trial that reached the target went on from this log excess; None if it began below it."""
    low = math.inf
    before: tuple[float, float] | None = None
    for log_step, value in curve:
        if value < low:
            low = value
            if low <= excess:
                if before is None:
                    return None
                # between the evaluations around it
                share = (before[1] - excess) / max(before[1] - value, 1e-9)
                start = before[0] + min(max(share, 0.0), 1.0) * (log_step - before[0])
                return excess / max(log_steps - start, 0.02)
            before = (log_step, value)
    return None


def foretell(
    curve: Sequence[tuple[float, float]], steps: int, reached: Sequence[tuple[Sequence[tuple[float, float]], float]]
) -> Foretold | None:
    """Return how far a stopped trial still has to go; None if its history does not say.

    Args:
        curve: the trial's (log step, log excess).
        steps: steps that it was trained for.
        reached: curve and log steps to target of trials that reached the target, most similar ones first.
    """
    if not curve:
        return None
    end = math.log(steps)
    recent = [(s, e) for s, e in curve if s >= curve[-1][0] - math.log(RECENT)]
    own: tuple[float, float] | None = None
    level = max(min(e for _, e in recent[-3:]), 0.02)
    if len(recent) >= 3 and recent[-1][0] > recent[0][0]:
        x, e = (np.array(values) for values in zip(*recent, strict=True))
        x = x - x.mean()
        square = float(x @ x)
        slope = -float(x @ e) / square
        residual = e - e.mean() + slope * x
        scatter = math.hypot(SCATTER, math.sqrt(float(residual @ residual) / max(len(e) - 2, 1)))
        # One that gets worse says no more than a flat one; its misfit would favour fast rates, whose spread is wide.
        own = max(slope, 0.0) * SLOWDOWN, scatter / math.sqrt(square)
        level = max(float(e.mean() - slope * x[-1]), 0.02)
    rates = [rate for other, log_steps in reached if (rate := reached_rate(other, log_steps, level)) is not None]
    log_rate, spread = math.log(RATE), RATE_SPREAD
    if rates:
        logs = np.log(np.clip(rates, SLOWEST, FASTEST))
        weight = 1.0 / (1.0 + np.arange(len(logs)) / 3.0)
        mean = float(weight @ logs / weight.sum())
        within = float(weight @ (logs - mean) ** 2 / weight.sum())
        between = 1.0 / (1.0 / RATE_SPREAD**2 + min(len(logs), 6) / SIMILARITY**2)
        share = between / RATE_SPREAD**2
        log_rate, spread = share * log_rate + (1.0 - share) * mean, math.sqrt(between + within + SIMILARITY**2)
    if own is not None:
        log_rate, spread = _combine(log_rate, spread, *own)
    rate = min(max(math.exp(log_rate), SLOWEST), FASTEST)
    away = level / rate
    # to the evaluation that was last; what was trained since then counts as done
    log_factor = max(curve[-1][0] + away - end, 0.02)
    return Foretold(log_factor, math.hypot(0.15, math.hypot(SCATTER / rate, away * spread)))


def _combine(log_rate: float, spread: float, slope: float, error: float) -> tuple[float, float]:
    """Return the posterior mean and deviation of the log rate: a normal prior, and a slope with a normal error."""
    grid = np.linspace(math.log(SLOWEST), math.log(FASTEST), 60)
    rate = np.exp(grid)
    sigma = np.hypot(error, SLOWDOWN_SPREAD * rate)
    density = -0.5 * ((grid - log_rate) / spread) ** 2 - 0.5 * ((slope - rate) / sigma) ** 2 - np.log(sigma)
    weight = np.exp(density - density.max())
    weight /= weight.sum()
    mean = float(weight @ grid)
    return mean, math.sqrt(max(float(weight @ (grid - mean) ** 2), 0.01))
