"""What the trials of a study tell: chains joined, histories foretold, the posterior sampled, step times fitted.

A decision (:mod:`bstune.search.acquisition`) and a report rest on it alone.

What a stopped trial's history foretells of its steps to target: a factor still to go, with its uncertainty.

Metrics fall about as a power of the steps, ``log excess = -rate log(step/S)``, where the excess is the distance from
the best possible value over the target's own distance from it: 1 at the target. The rate over what is left is the
trial's own recent one, shrunk towards those of the trials that did reach the target, taken from the same excess on.
That is an estimate with a wide error, never a bound: a trial that flattens out above the target shows a rate near 0.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bstune.core.records import Target, TrialResult
from bstune.core.step_time import StepTimes, fit_step_times
from bstune.search.gaussian_process import Process, Residuals, draw_process, mean_residual
from bstune.search.posterior import NOISE, OTHER, Observations, Prior, log_steps, sample_posterior

Array = NDArray[np.float64]
Weight = Callable[[Array], Array]
SMOOTHING_DRAWS = 4  # of the posterior, for the mean
TAIL = 1.5  # in log T: what is further from the best does not matter to it


@dataclass(frozen=True)
class Arm:
    """A trial, or a chain of trials that continue each other, as the last one left it.

    ``log_factor`` is what its history foretells of log(steps to target/steps), with ``spread``; None if nothing.
    ``stuck`` is one that did not get on when it was last continued, as where a record ends.
    """

    number: int
    status: str
    steps: int
    seconds_per_step: float | None
    x: float
    z: float
    other: tuple[float, ...]
    log_factor: float | None
    spread: float
    stuck: bool


@dataclass(frozen=True)
class Known:
    """All that a decision rests on: the arms, the posterior's draws, the step times, and what has been spent.

    ``too_large`` is log2 of the smallest batch size that ran out of memory, infinite if none did.
    """

    arms: tuple[Arm, ...]
    observations: Observations
    theta: Array
    tau: StepTimes
    spent: float
    prior: Prior
    too_large: float


def learn(
    trials: Sequence[TrialResult],
    others: dict[int, tuple[float, ...]],
    *,
    prior: Prior,
    target: Target | None,
    ideal: float | None,
    step_time: Callable[[float], float] | None,
    in_examples: bool,
    particles: int,
    moves: int,
    rng: np.random.Generator,
) -> Known:
    """Return what the finished trials tell.

    Args:
        trials: the finished ones; chains are joined, failed ones and those out of memory are passed over.
        others: the other hyper-parameters of each trial by number, each in [0, 1]; absent: none.
        prior: of the posterior's parameters.
        target: of the histories; None: they are not read.
        ideal: the best value of the target's metric, None if unknown.
        step_time: seconds per step over batch size, measured before the first trial; None: not measured.
        in_examples: count costs in examples, not in seconds, so that they do not depend on the clock.
        particles: of the posterior's sampler.
        moves: of each at each temperature.
        rng: the source of chance.
    """
    usable = [trial for trial in trials if trial.status in ("reached", "censored", "diverged")]
    parents = {trial.resumed_from for trial in usable}
    last = [trial for trial in usable if trial.number not in parents]
    curves = {t.number: log_excess(t.history, target, ideal) if target is not None else [] for t in last}
    reached = [t for t in last if t.reached and len(curves[t.number]) > 2]
    steps = {trial.number: trial.steps for trial in trials}
    stuck = {t.number for t in last if t.resumed_from is not None and t.steps <= steps.get(t.resumed_from, 0)}
    arms = tuple(_arm(t, others.get(t.number, ()), t.number in stuck, curves, reached) for t in last)
    measured = [(t.batch_size, t.seconds_per_step) for t in last if t.seconds_per_step is not None]
    seconds = fit_step_times(measured, 2.0**prior.log_mid, step_time)
    tau = StepTimes(0.0, 1.0) if in_examples else seconds
    done = {t.number: 0 if t.resumed_from is None else steps.get(t.resumed_from, 0) for t in trials}
    spent = sum(_cost(trial, max(trial.steps - done[trial.number], 0), tau) for trial in trials)
    too_large = min((trial.batch_size for trial in trials if trial.status == "oom"), default=math.inf)
    observations = observe(arms, (prior.mean.size - OTHER) // 3)
    theta = sample_posterior(observations, prior, rng, particles, moves)
    return Known(arms, observations, theta, tau, spent, prior, math.log2(too_large))


def _arm(
    trial: TrialResult,
    other: tuple[float, ...],
    stuck: bool,
    curves: dict[int, list[tuple[float, float]]],
    reached: Sequence[TrialResult],
) -> Arm:
    foretold = None
    if trial.status == "censored" and curves[trial.number]:
        similar = sorted(reached, key=lambda known: _distance(known, trial))[:8]
        known = [(curves[other.number], math.log(other.steps)) for other in similar]
        foretold = extrapolate(curves[trial.number], trial.steps, known)
    return Arm(
        number=trial.number,
        status=trial.status,
        steps=max(trial.steps, 1),
        seconds_per_step=trial.seconds_per_step,
        x=math.log2(trial.batch_size),
        z=math.log2(trial.lr),
        other=other,
        log_factor=None if foretold is None else foretold.log_factor,
        spread=0.0 if foretold is None else foretold.spread,
        stuck=stuck,
    )


def _distance(a: TrialResult, b: TrialResult) -> float:
    return abs(math.log2(a.batch_size / b.batch_size)) + abs(math.log2(a.lr / b.lr))


def _cost(trial: TrialResult, added: int, tau: StepTimes) -> float:
    """Return what the trial cost, measured in its own steps: those that it continues are not paid again."""
    return float(added * tau(np.array(float(trial.batch_size))))


def observe(arms: Sequence[Arm], others: int) -> Observations:
    """Return the arms, with ``others`` further hyper-parameters, as the likelihood takes them.

    A stopped trial whose history says how far it is from the target is an estimate; one that is far away, or whose
    history does not say, is a bound.
    """
    y, spread, bound = [], [], []
    for arm in arms:
        done = math.log(arm.steps)
        if arm.status == "reached":
            values = done, 0.0, False
        elif arm.log_factor is None:
            values = done, 0.05, True
        elif arm.log_factor > 1.6 and arm.spread > 0.5 * arm.log_factor:
            values = done + max(arm.log_factor - arm.spread, 0.0), min(arm.spread, 0.5), True
        else:
            values = done + arm.log_factor, arm.spread, False
        y.append(values[0])
        spread.append(values[1])
        bound.append(values[2] and arm.status != "diverged")
    return Observations(
        x=np.array([arm.x for arm in arms], dtype=np.float64),
        z=np.array([arm.z for arm in arms], dtype=np.float64),
        other=np.array([arm.other for arm in arms], dtype=np.float64).reshape(len(arms), others),
        y=np.array(y, dtype=np.float64),
        spread=np.array(spread, dtype=np.float64),
        bound=np.array(bound, dtype=np.bool_),
        diverged=np.array([arm.status == "diverged" for arm in arms], dtype=np.bool_),
    )


def objective_weight(objective: str, tau: StepTimes) -> Weight:
    """Return the factor that makes the objective of steps: seconds per step, or 1."""
    if objective == "steps":
        return lambda x: np.ones_like(x)
    return lambda x: tau(np.exp2(x))


def merit(arm: Arm, weight: Weight) -> float:
    """Return the objective of a trial as far as it has run."""
    return arm.steps * float(weight(np.array(arm.x)))


def residual_process(known: Known, draw: Array, weight: Weight, rng: np.random.Generator) -> Process:
    """Return the process of what one draw of the parameters leaves of the trials."""
    seen = known.observations
    fitted = log_steps(draw[None], seen.x, seen.z, seen.other, known.prior)[0]
    gap = seen.y - fitted
    # A bound matters where it lies above the draw. Where both the draw and the trial are far from the best, the
    # residual would only learn the tails' shape.
    told = ~seen.diverged & (~seen.bound | (gap > 0))
    gap = np.clip(gap, -TAIL, TAIL)
    level = np.minimum(seen.y, fitted) + np.log(weight(seen.x))
    if told.any():
        told &= level < level[told].min() + TAIL
    variance = seen.spread**2 + math.exp(2.0 * draw[NOISE])
    at = np.column_stack([seen.x, seen.z, seen.other])
    return draw_process(Residuals(at[told], gap[told], variance[told]), rng)


def smoothed(known: Known, objective: str, rng: np.random.Generator) -> list[tuple[float, Arm]]:
    """Return the reached arms with the posterior mean of their objective: seconds, or steps for ``steps``.

    A trial's own result is a lucky one where it is the least of many; the mean leans on all trials around it.
    """
    reached = [arm for arm in known.arms if arm.status == "reached"]
    if not reached:
        return []
    weight = objective_weight(objective, known.tau)
    x, z = np.array([arm.x for arm in reached]), np.array([arm.z for arm in reached])
    other = np.array([arm.other for arm in reached]).reshape(len(reached), -1)
    total = np.zeros(len(reached))
    for _ in range(SMOOTHING_DRAWS):
        draw = known.theta[int(rng.integers(len(known.theta)))]
        process = residual_process(known, draw, weight, rng)
        total += log_steps(draw[None], x, z, other, known.prior)[0]
        total += mean_residual(process, np.column_stack([x, z, other]))
    values = np.exp(total / SMOOTHING_DRAWS + np.log(weight(x)))
    return list(zip(values.tolist(), reached, strict=True))


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
class Extrapolation:
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


def extrapolate(
    curve: Sequence[tuple[float, float]], steps: int, reached: Sequence[tuple[Sequence[tuple[float, float]], float]]
) -> Extrapolation | None:
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
    return Extrapolation(log_factor, math.hypot(0.15, math.hypot(SCATTER / rate, away * spread)))


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
