"""The next trial: which batch size and learning rate, for how many steps, and whether it continues a stopped one.

Trials differ in cost by orders of magnitude, so what is weighed is cost, in seconds of training. A decision is one draw
of the posterior: the candidate that this draw likes best is run. It is first given a share of what it would take, then
continued from its checkpoint as long as draws still prefer it, and never past what would change the answer.
"""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bstune.errors import ConfigError
from bstune.records import Target, TrialResult
from bstune.search.foretell import foretell, log_excess
from bstune.search.posterior import (
    B_CRIT,
    NOISE,
    OTHER,
    Observations,
    Prior,
    log_steps,
    optimum,
    sample_posterior,
)
from bstune.search.residual import Process, Residuals, draw_process, draw_residual, mean_residual
from bstune.search.steptime import StepTimes, fit_step_times

Array = NDArray[np.float64]
Weight = Callable[[Array], Array]

FEWEST_STEPS = 10.0  # of any trial: a shorter one costs more to set up than to train
FINALISTS = 4  # reached trials around which a third of the candidates lie
ENOUGH = 3  # reached trials before the objective ``curve`` looks at what it learns
SETUP = 1.0  # what a trial costs beside its steps, over the cheapest one's cost: few trials rather than many
MISFIT = 0.08  # of the model of the frontier, in log S: what no number of trials at one point averages out
SMOOTHING_DRAWS = 4  # of the posterior, for the mean
ROOM = 0.1  # octaves below a batch size that ran out of memory
LUCK = 1.5  # at most so much is the least own result bettered by the others around it
TAIL = 1.5  # in log T: what is further from the best does not matter to it
CURVE_MARGIN = 1.6  # a trial of the objective ``curve`` ends at this many times what was expected of it


@dataclass(frozen=True)
class Policy:
    """How the search spends.

    Args:
        particles, moves: of the posterior's sampler.
        candidates: points that a decision chooses from.
        first: the first trial gets this share of the settings' budget.
        share: until a trial has reached the target, none adds more than this share of what has been spent.
        look: a new trial is first given this share of the cost of the incumbent.
        half: ... but no more than this share of the steps that the draw foretells it.
        margin: a trial ends once it costs this many times the incumbent.
        saving: weight of the cost to go, in log T per incumbent's cost, between candidates that a draw likes equally.
        strays: share of the decisions that look at a random place, in case the model is wrong everywhere.
        curve_after: once so many times the incumbent's cost have been spent, whatever the objective ...
        curve_share: ... this share of the decisions goes to what the objective ``curve`` would ask.

    Raises:
        ConfigError: for a value that cannot be.
    """

    particles: int
    moves: int
    candidates: int
    first: float
    share: float
    look_share: float
    look: float
    half: float
    margin: float
    saving: float
    strays: float
    curve_after: float
    curve_share: float

    def __post_init__(self) -> None:
        whole = {"particles": 10, "moves": 1, "candidates": 10}
        above = {"first": 0.0, "share": 0.0, "look_share": 0.0, "look": 0.0, "half": 0.0, "margin": 1.0}
        shares = {"strays": 1.0, "curve_share": 1.0, "saving": math.inf, "curve_after": math.inf}
        for name, value in vars(self).items():
            if name in whole and not value >= whole[name]:
                raise ConfigError(f"sampler.policy.{name} must be at least {whole[name]}, but got {value}")
            if name in above and not above[name] < value < math.inf:
                raise ConfigError(f"sampler.policy.{name} must be a number above {above[name]:g}, but got {value}")
            if name in shares and not 0 <= value <= shares[name]:
                raise ConfigError(f"sampler.policy.{name} must lie within 0 and {shares[name]:g}, but got {value}")


@dataclass(frozen=True)
class Domain:
    """Where the search may go.

    Args:
        low, high: batch sizes.
        snap: returns the batch size that a trial uses.
        lrs: returns the lowest and highest log2 learning rate over log2 batch sizes, two arrays (n,).
        others: columns of other hyper-parameters, each in [0, 1].
    """

    low: int
    high: int
    snap: Callable[[float], int]
    lrs: Callable[[Array], tuple[Array, Array]]
    others: int


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
class Proposal:
    """What to run: for steps up to ``limit``, from the start or on from the stopped trial ``parent``."""

    x: float
    z: float
    other: tuple[float, ...]
    limit: int
    parent: int | None


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
    policy: Policy,
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
        policy: how many particles.
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
    theta = sample_posterior(observations, prior, rng, policy.particles, policy.moves)
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


@dataclass(frozen=True)
class _Choices:
    """Points (m,), (m,), (m, k) to choose from; the first ``len(arms)`` of them are arms that can be continued."""

    arms: tuple[Arm, ...]
    x: Array
    z: Array
    other: Array
    done: Array


def decide(
    known: Known,
    pending: Sequence[tuple[float, float, int | None]],
    *,
    objective: str,
    domain: Domain,
    budget: Callable[[float], float],
    resumable: Callable[[int], bool],
    policy: Policy,
    rng: np.random.Generator,
) -> Proposal:
    """Return the next trial.

    Args:
        known: from :func:`learn`.
        pending: log2 batch size, log2 learning rate and parent of the trials that run now.
        objective: ``time``, ``steps`` or ``curve``.
        domain: where to look.
        budget: the settings' budget in steps over batch size; a scale, not a limit.
        resumable: whether a stopped trial can be continued, by number.
        policy: how to spend.
        rng: the source of chance.
    """
    weight = _weight(objective, known.tau)
    reached = [arm for arm in known.arms if arm.status == "reached"]
    ranked = sorted(smoothed(known, objective, rng), key=lambda pair: pair[0])
    own = min((_merit(arm, weight) for arm in reached), default=math.inf)
    incumbent = min(ranked[0][0], LUCK * own) if ranked else None
    maps = objective == "curve"
    if ranked and not maps:
        cost = ranked[0][1].steps * float(known.tau(np.exp2(ranked[0][1].x)))
        maps = known.spent > policy.curve_after * cost and rng.random() < policy.curve_share
    maps &= len(reached) >= ENOUGH
    choices = _choices(known, pending, domain, None if maps else incumbent, weight, resumable, policy, rng)
    if maps:
        chosen, expected = _most_learned(known, choices, pending)
        cap = CURVE_MARGIN * expected
        limit = cap if choices.done[chosen] >= policy.look * expected else policy.look * expected
        return _proposal(choices, chosen, max(limit, 1.3 * float(choices.done[chosen])))
    draw = known.theta[int(rng.integers(len(known.theta)))]
    if known.arms and rng.random() < policy.strays:
        chosen, foretold = len(choices.arms) + 2, math.inf
        choices.x[chosen], choices.z[chosen] = _anywhere(domain, rng)
    else:
        chosen, foretold = _liked_best(known, choices, draw, weight, pending, policy, rng)
    done, seconds = float(choices.done[chosen]), float(known.tau(np.exp2(choices.x[chosen])))
    if incumbent is None:
        share = policy.share if done else policy.look_share
        first = max(policy.first * budget(float(np.exp2(choices.x[chosen]))), FEWEST_STEPS)
        added = max(share * known.spent / seconds, first)
        return _proposal(choices, chosen, done + max(added, 0.4 * done))
    cap = policy.margin * incumbent / float(weight(choices.x[chosen]))
    # A second stage: where nothing can be continued, the first look is the last.
    look = min(policy.look * cap, policy.half * foretold)
    looks = resumable is not never_resumable and done < 0.75 * look
    return _proposal(choices, chosen, look if looks else cap)


def never_resumable(number: int) -> bool:
    """Return False: no stopped trial can be continued."""
    return False


def _weight(objective: str, tau: StepTimes) -> Weight:
    """Return the factor that makes the objective of steps: seconds per step, or 1."""
    if objective == "steps":
        return lambda x: np.ones_like(x)
    return lambda x: tau(np.exp2(x))


def _choices(
    known: Known,
    pending: Sequence[tuple[float, float, int | None]],
    domain: Domain,
    incumbent: float | None,
    weight: Weight,
    resumable: Callable[[int], bool],
    policy: Policy,
    rng: np.random.Generator,
) -> _Choices:
    """Return the arms that may be continued, and new points along the posterior's optima and around the best trials."""
    taken = {parent for _, _, parent in pending}
    stopped = [arm for arm in known.arms if arm.status == "budget" and not arm.stuck]
    arms = [arm for arm in stopped if arm.number not in taken and resumable(arm.number)]
    if incumbent is not None:
        arms = [arm for arm in arms if _merit(arm, weight) < 0.95 * policy.margin * incumbent]
    low, n = math.log2(domain.low), policy.candidates
    high = max(low, min(math.log2(domain.high), known.too_large - ROOM))
    x = rng.uniform(low, high, n)
    x[:2] = low, high
    rows = known.theta[rng.integers(len(known.theta), size=-(-n // 8))]
    best = np.concatenate([optimum(row[None], x[8 * i : 8 * i + 8], known.prior)[0] for i, row in enumerate(rows)])
    z = best[:n] + rng.normal(0.0, 0.5, n)
    other = rng.random((n, domain.others))
    for j in range(domain.others):
        preferred = known.theta[rng.integers(len(known.theta), size=n), OTHER + 3 * j] + rng.normal(0.0, 0.1, n)
        other[::2, j] = np.clip(preferred[::2], 0.0, 1.0)
    reached = sorted((arm for arm in known.arms if arm.status == "reached"), key=lambda arm: _merit(arm, weight))
    for i, arm in enumerate((reached[:FINALISTS] * n)[: n // 3]):
        x[n - 1 - i] = arm.x + rng.normal(0.0, 0.5)
        z[n - 1 - i] = arm.z + rng.normal(0.0, 0.5)
        other[n - 1 - i] = np.clip(np.array(arm.other) + rng.normal(0.0, 0.1, domain.others), 0.0, 1.0)
    x = np.array([math.log2(domain.snap(2.0 ** min(max(value, low), high))) for value in x])
    bottom, top = domain.lrs(x)
    return _Choices(
        arms=tuple(arms),
        x=np.concatenate([[arm.x for arm in arms], x]),
        z=np.concatenate([[arm.z for arm in arms], np.clip(z, bottom, top)]),
        other=np.concatenate([np.array([arm.other for arm in arms]).reshape(len(arms), domain.others), other]),
        done=np.concatenate([[float(arm.steps) for arm in arms], np.zeros(n)]),
    )


def _merit(arm: Arm, weight: Weight) -> float:
    return arm.steps * float(weight(np.array(arm.x)))


def _anywhere(domain: Domain, rng: np.random.Generator) -> tuple[float, float]:
    x = math.log2(domain.snap(2.0 ** rng.uniform(math.log2(domain.low), math.log2(domain.high))))
    bottom, top = domain.lrs(np.array([x]))
    return x, float(rng.uniform(bottom[0], top[0]))


def _liked_best(
    known: Known,
    choices: _Choices,
    draw: Array,
    weight: Weight,
    pending: Sequence[tuple[float, float, int | None]],
    policy: Policy,
    rng: np.random.Generator,
) -> tuple[int, float]:
    """Return the choice with the least objective in one draw, and its steps in that draw.

    Of choices that are liked about equally, it is the one with the least to go.
    """
    drawn = log_steps(draw[None], choices.x, choices.z, choices.other, known.prior)[0]
    at = np.column_stack([choices.x, choices.z, choices.other])
    drawn = np.minimum(drawn + draw_residual(_process(known, draw, weight, rng), at, rng), 50.0)
    score = drawn + np.log(weight(choices.x))
    cost = np.exp(drawn) * known.tau(np.exp2(choices.x))
    to_go = cost * np.maximum(1.0 - choices.done / np.exp(drawn), 0.0)
    score += policy.saving * np.minimum(to_go / cost[int(score.argmin())], 10.0)
    for x, z, _ in pending:
        score[(np.abs(choices.x - x) < 0.3) & (np.abs(choices.z - z) < 0.3)] += 0.3
    chosen = int(score.argmin())
    return chosen, float(np.exp(drawn[chosen]))


def _process(known: Known, draw: Array, weight: Weight, rng: np.random.Generator) -> Process:
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
    weight = _weight(objective, known.tau)
    x, z = np.array([arm.x for arm in reached]), np.array([arm.z for arm in reached])
    other = np.array([arm.other for arm in reached]).reshape(len(reached), -1)
    total = np.zeros(len(reached))
    for _ in range(SMOOTHING_DRAWS):
        draw = known.theta[int(rng.integers(len(known.theta)))]
        process = _process(known, draw, weight, rng)
        total += log_steps(draw[None], x, z, other, known.prior)[0]
        total += mean_residual(process, np.column_stack([x, z, other]))
    values = np.exp(total / SMOOTHING_DRAWS + np.log(weight(x)))
    return list(zip(values.tolist(), reached, strict=True))


def _most_learned(
    known: Known, choices: _Choices, pending: Sequence[tuple[float, float, int | None]]
) -> tuple[int, float]:
    """Return the choice that tells most of log B_crit for its cost, and the steps that it is expected to take.

    Told is the fall of the variance of log B_crit by one observation of log S there, as if all were jointly normal:
    cov(log S, log B_crit)^2 / (var log S + noise^2).
    """
    steps = log_steps(known.theta, choices.x, choices.z, choices.other, known.prior)
    b_crit = known.theta[:, B_CRIT]
    # Trials at about one batch size share the model's misfit, so that another one there tells less and less of it.
    near = np.array([arm.x for arm in known.arms if arm.status == "reached"])
    crowd = (np.abs(choices.x[:, None] - near[None, :]) < 0.5).sum(axis=1)
    noise = float(np.mean(np.exp(2.0 * known.theta[:, NOISE]))) + MISFIT**2 * (1 + crowd)
    centred = steps - steps.mean(axis=0)
    gain = (centred.T @ (b_crit - b_crit.mean()) / len(b_crit)) ** 2 / (centred.var(axis=0) + noise)
    expected = np.exp(np.minimum(np.median(steps, axis=0), 50.0))
    whole = expected * known.tau(np.exp2(choices.x))
    to_go = whole * np.maximum(1.0 - choices.done / expected, 0.1) + SETUP * whole.min()
    for x, z, _ in pending:
        gain[(np.abs(choices.x - x) < 0.5) & (np.abs(choices.z - z) < 0.5)] *= 0.3
    chosen = int((gain / to_go).argmax())
    return chosen, float(expected[chosen])


def _proposal(choices: _Choices, chosen: int, limit: float) -> Proposal:
    arm = choices.arms[chosen] if chosen < len(choices.arms) else None
    done = int(choices.done[chosen])
    return Proposal(
        x=float(choices.x[chosen]),
        z=float(choices.z[chosen]),
        other=tuple(float(value) for value in choices.other[chosen]),
        limit=max(math.ceil(min(limit, 1e15)), done + 1),
        parent=None if arm is None else arm.number,
    )


def b_crit_quantiles(known: Known, shares: Collection[float]) -> Array:
    """Return quantiles of the posterior of B_crit, in examples."""
    return np.asarray(np.exp2(known.prior.log_mid) * np.exp(np.quantile(known.theta[:, B_CRIT], list(shares))))
