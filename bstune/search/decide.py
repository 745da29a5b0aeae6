"""The next trial: which batch size and learning rate, for how many steps, and whether it continues a stopped one.

Trials differ in cost by orders of magnitude, so what is weighed is cost, in seconds of training. A decision is one draw
of the posterior: the candidate that this draw likes best is run. It is first given a share of what it would take, then
continued from its checkpoint as long as draws still prefer it, and never past what would change the answer.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from bstune.records import Target, TrialResult
from bstune.search.foretell import foretell, log_excess
from bstune.search.posterior import (
    B_CRIT,
    NOISE,
    Observations,
    Prior,
    frontier,
    log_steps,
    optimum,
    sample_posterior,
)
from bstune.search.residual import Residuals, draw_residual
from bstune.search.steptime import StepTimes, fit_step_times

Array = NDArray[np.float64]

LN2 = math.log(2.0)


@dataclass(frozen=True)
class Policy:
    """How the search spends.

    Args:
        particles, moves: of the posterior's sampler.
        candidates: points that a decision chooses from.
        share: until a trial has reached the target, none adds more than this share of what has been spent.
        first: the first trial gets this share of the settings' budget.
        look: a new trial is first given this share of the cost of the incumbent.
        margin: a trial ends once it costs this many times the incumbent.
        saving: weight of the cost to go, in log T per incumbent's cost, between candidates that a draw likes equally.
        strays: share of the decisions that look at a random place, in case the model is wrong everywhere.
    """

    particles: int = 192
    moves: int = 3
    candidates: int = 240
    share: float = 0.35
    first: float = 1.0 / 64.0
    look: float = 0.4
    margin: float = 1.1
    saving: float = 0.15
    strays: float = 0.05


@dataclass(frozen=True)
class Domain:
    """Where the search may go.

    Args:
        low, high: batch sizes.
        snap: returns the batch size that a trial uses.
        lrs: returns the lowest and highest log2 learning rate over log2 batch sizes, two arrays (n,).
    """

    low: int
    high: int
    snap: Callable[[float], int]
    lrs: Callable[[Array], tuple[Array, Array]]


@dataclass(frozen=True)
class Arm:
    """A trial, or a chain of trials that continue each other, as the last one left it."""

    number: int
    batch_size: int
    lr: float
    status: str
    steps: int
    seconds_per_step: float | None
    x: float
    z: float
    log_factor: float | None
    spread: float


@dataclass(frozen=True)
class Proposal:
    """What to run: at most ``limit`` steps, continuing trial ``parent`` if there is one."""

    batch_size: int
    lr: float
    limit: int
    parent: int | None


def arms(trials: Sequence[TrialResult], target: Target | None, ideal: float | None) -> list[Arm]:
    """Return the trials with chains joined, each with what its history foretells; failed and oom ones are left out."""
    parents = {trial.parent for trial in trials if trial.parent is not None}
    last = [trial for trial in trials if trial.number not in parents and trial.status in ("reached", "budget", "diverged")]
    curves = {t.number: log_excess(t.history, target, ideal) if target is not None else [] for t in last}
    reached = [t for t in last if t.reached and len(curves[t.number]) > 2]
    return [_arm(trial, curves, reached) for trial in last]


def _arm(trial: TrialResult, curves: dict[int, list[tuple[float, float]]], reached: Sequence[TrialResult]) -> Arm:
    factor, spread = None, 0.0
    if trial.status == "budget" and curves[trial.number]:
        similar = sorted(reached, key=lambda other: _distance(other, trial))[:8]
        foretold = foretell(
            curves[trial.number], trial.steps, [(curves[o.number], math.log(o.steps)) for o in similar]
        )
        if foretold is not None:
            factor, spread = foretold.log_factor, foretold.spread
    return Arm(
        trial.number,
        trial.batch_size,
        trial.lr,
        trial.status,
        max(trial.steps, 1),
        trial.seconds_per_step,
        math.log2(trial.batch_size),
        math.log2(trial.lr),
        factor,
        spread,
    )


def _distance(a: TrialResult, b: TrialResult) -> float:
    return abs(math.log2(a.batch_size / b.batch_size)) + abs(math.log2(a.lr / b.lr))


def observe(seen: Sequence[Arm]) -> Observations:
    """Return the arms as the likelihood takes them.

    A stopped trial whose history says how far it is from the target is an estimate; one that is further than its
    estimate's own error away, or whose history does not say, is a bound.
    """
    y, spread, bound = [], [], []
    for arm in seen:
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
        bound.append(values[2])
    return Observations(
        x=np.array([arm.x for arm in seen], dtype=np.float64),
        z=np.array([arm.z for arm in seen], dtype=np.float64),
        y=np.array(y, dtype=np.float64),
        spread=np.array(spread, dtype=np.float64),
        bound=np.array([b and arm.status != "diverged" for b, arm in zip(bound, seen, strict=True)], dtype=np.bool_),
        diverged=np.array([arm.status == "diverged" for arm in seen], dtype=np.bool_),
    )


def decide(
    trials: Sequence[TrialResult],
    pending: Sequence[tuple[int, float, int | None]],
    *,
    objective: str,
    domain: Domain,
    prior: Prior,
    budget: Callable[[float], float],
    target: Target | None,
    ideal: float | None,
    policy: Policy,
    rng: np.random.Generator,
) -> Proposal:
    """Return the next trial.

    Args:
        trials: the finished ones.
        pending: batch size, learning rate and parent of those that run now.
        objective: ``time``, ``steps`` or ``curve``.
        domain: where to look.
        prior: of the posterior's parameters.
        budget: the settings' budget in steps over batch size; a scale, not a limit.
        target: of the histories; None: they are not read.
        ideal: the best value of the target's metric, None if unknown.
        policy: how to spend.
        rng: the source of chance.
    """
    seen = arms(trials, target, ideal)
    measured = [(arm.batch_size, arm.seconds_per_step) for arm in seen if arm.seconds_per_step is not None]
    tau = fit_step_times([(b, s) for b, s in measured if s is not None], 2.0**prior.log_mid)
    spent = sum(_cost(trial, tau) for trial in trials)
    observations = observe(seen)
    theta = sample_posterior(observations, prior, rng, policy.particles, policy.moves)
    draw = theta[int(rng.integers(len(theta)))]
    taken = {parent for _, _, parent in pending if parent is not None}
    reached = [arm for arm in seen if arm.status == "reached"]
    weight = _objective_weight(objective, tau)
    incumbent = min((arm.steps * weight(arm.x) for arm in reached), default=None)
    open_arms = [arm for arm in seen if arm.status == "budget" and arm.number not in taken]
    if incumbent is not None:
        open_arms = [arm for arm in open_arms if arm.steps * weight(arm.x) < 0.97 * policy.margin * incumbent]
    x, z = _candidates(theta, seen, domain, prior, policy, rng)
    all_x = np.concatenate([[arm.x for arm in open_arms], x])
    all_z = np.concatenate([[arm.z for arm in open_arms], z])
    if rng.random() < policy.strays and seen:
        stray = len(open_arms) + int(rng.integers(len(x)))
        all_x[stray], all_z[stray] = _anywhere(domain, rng)
        chosen = stray
        drawn = log_steps(draw[None], all_x, all_z, prior)[0]
    else:
        drawn = _draw(draw, theta, observations, seen, all_x, all_z, weight, prior, rng)
        score = drawn + np.log(weight(all_x))
        score += policy.saving * _to_go(drawn, all_x, open_arms, tau, score)
        for size, lr, _ in pending:
            near = (np.abs(all_x - math.log2(size)) < 0.3) & (np.abs(all_z - math.log2(lr)) < 0.3)
            score[near] += 0.3
        chosen = int(score.argmin())
    return _proposal(chosen, drawn, all_x, all_z, open_arms, domain, tau, weight, incumbent, spent, budget, policy, theta)


def _objective_weight(objective: str, tau: StepTimes) -> Callable[[Array | float], Array]:
    if objective == "steps":
        return lambda x: np.ones_like(np.asarray(x, dtype=np.float64))
    return lambda x: tau(np.exp2(np.asarray(x, dtype=np.float64)))


def _cost(trial: TrialResult, tau: StepTimes) -> float:
    if trial.train_seconds > 0:
        return trial.train_seconds
    return float(trial.steps * tau(np.array(float(trial.batch_size))))


def _candidates(
    theta: Array, seen: Sequence[Arm], domain: Domain, prior: Prior, policy: Policy, rng: np.random.Generator
) -> tuple[Array, Array]:
    """Return points to choose from: some along the posterior's optima, some anywhere, some near good trials."""
    n = policy.candidates
    low, high = math.log2(domain.low), math.log2(domain.high)
    x = rng.uniform(low, high, n)
    x[:2] = low, high
    along = theta[rng.integers(len(theta), size=n)]
    best = np.array([optimum(row[None], np.array([value]), prior)[0, 0] for row, value in zip(along, x, strict=True)])
    z = best + rng.normal(0.0, 0.5, n)
    near = [arm for arm in seen if arm.status == "reached"]
    near = sorted(near, key=lambda arm: arm.steps * (arm.seconds_per_step or 1.0))[:4]
    for i, arm in enumerate(near * (n // 16)):
        if i >= n // 3:
            break
        x[n - 1 - i] = arm.x + rng.normal(0.0, 0.5)
        z[n - 1 - i] = arm.z + rng.normal(0.0, 0.5)
    x = np.array([math.log2(domain.snap(2.0 ** min(max(value, low), high))) for value in x])
    bottom, top = domain.lrs(x)
    return x, np.clip(z, bottom, top)


def _anywhere(domain: Domain, rng: np.random.Generator) -> tuple[float, float]:
    x = math.log2(domain.snap(2.0 ** rng.uniform(math.log2(domain.low), math.log2(domain.high))))
    bottom, top = domain.lrs(np.array([x]))
    return x, float(rng.uniform(bottom[0], top[0]))


def _draw(
    draw: Array,
    theta: Array,
    observations: Observations,
    seen: Sequence[Arm],
    x: Array,
    z: Array,
    weight: Callable[[Array | float], Array],
    prior: Prior,
    rng: np.random.Generator,
) -> Array:
    """Return log S at the points in one draw of the posterior, residual included."""
    base = log_steps(draw[None], x, z, prior)[0]
    if not seen:
        return np.asarray(base)
    fitted = log_steps(draw[None], observations.x, observations.z, prior)[0]
    gap = observations.y - fitted
    # A bound matters where it lies above the draw; far from the best the residual would only learn the tails' shape.
    told = ~observations.diverged & (~observations.bound | (gap > 0))
    level = np.maximum(observations.y, fitted) + np.log(weight(observations.x))
    if told.any():
        told &= level < level[told].min() + 1.5
    variance = observations.spread**2 + math.exp(2.0 * draw[NOISE])
    residuals = Residuals(observations.x[told], observations.z[told], gap[told], variance[told])
    return np.asarray(base + draw_residual(residuals, x, z, rng)[0])


def _to_go(drawn: Array, x: Array, open_arms: Sequence[Arm], tau: StepTimes, score: Array) -> Array:
    """Return the cost to go of each candidate over the cost of the one that is liked best."""
    done = np.zeros(x.size)
    done[: len(open_arms)] = [arm.steps for arm in open_arms]
    seconds = np.maximum(np.exp(np.minimum(drawn, 50.0)) - done, 0.0) * tau(np.exp2(x))
    best = int(score.argmin())
    whole = float(np.exp(min(drawn[best], 50.0)) * tau(np.exp2(x[best])))
    return np.asarray(np.minimum(seconds / max(whole, 1e-300), 10.0))


def _proposal(
    chosen: int,
    drawn: Array,
    x: Array,
    z: Array,
    open_arms: Sequence[Arm],
    domain: Domain,
    tau: StepTimes,
    weight: Callable[[Array | float], Array],
    incumbent: float | None,
    spent: float,
    budget: Callable[[float], float],
    policy: Policy,
    theta: Array,
) -> Proposal:
    batch_size = domain.snap(2.0 ** float(x[chosen]))
    seconds = float(tau(np.array(float(batch_size))))
    arm = open_arms[chosen] if chosen < len(open_arms) else None
    done = 0 if arm is None else arm.steps
    if incumbent is None:
        added = max(policy.share * spent / seconds, policy.first * budget(batch_size))
        limit = done + max(added, 0.4 * done, 1.0)
    else:
        cap = policy.margin * incumbent / float(weight(float(x[chosen])))
        limit = policy.look * cap if arm is None else cap
        if arm is not None and done < 0.3 * cap:
            limit = policy.look * cap
    lr = 2.0 ** float(z[chosen]) if arm is None else arm.lr
    size = batch_size if arm is None else arm.batch_size
    return Proposal(size, lr, max(math.ceil(limit), done + 1), None if arm is None else arm.number)
