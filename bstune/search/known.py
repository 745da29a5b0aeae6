"""What the trials of a study tell: chains joined, histories foretold, the posterior sampled, step times fitted.

A decision (:mod:`bstune.search.decide`) and a report rest on it alone.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bstune.records import Target, TrialResult
from bstune.search.foretell import foretell, log_excess
from bstune.search.posterior import NOISE, OTHER, Observations, Prior, log_steps, sample_posterior
from bstune.search.residual import Process, Residuals, draw_process, mean_residual
from bstune.search.steptime import StepTimes, fit_step_times

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
    usable = [trial for trial in trials if trial.status in ("reached", "budget", "diverged")]
    parents = {trial.parent for trial in usable}
    last = [trial for trial in usable if trial.number not in parents]
    curves = {t.number: log_excess(t.history, target, ideal) if target is not None else [] for t in last}
    reached = [t for t in last if t.reached and len(curves[t.number]) > 2]
    steps = {trial.number: trial.steps for trial in trials}
    stuck = {t.number for t in last if t.parent is not None and t.steps <= steps.get(t.parent, 0)}
    arms = tuple(_arm(t, others.get(t.number, ()), t.number in stuck, curves, reached) for t in last)
    measured = [(t.batch_size, t.seconds_per_step) for t in last if t.seconds_per_step is not None]
    seconds = fit_step_times(measured, 2.0**prior.log_mid, step_time)
    tau = StepTimes(0.0, 1.0) if in_examples else seconds
    done = {t.number: 0 if t.parent is None else steps.get(t.parent, 0) for t in trials}
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
    if trial.status == "budget" and curves[trial.number]:
        similar = sorted(reached, key=lambda known: _distance(known, trial))[:8]
        known = [(curves[other.number], math.log(other.steps)) for other in similar]
        foretold = foretell(curves[trial.number], trial.steps, known)
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
