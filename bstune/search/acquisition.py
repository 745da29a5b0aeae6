"""The next trial: which batch size and learning rate, for how many steps, and whether it continues a stopped one.

Trials differ in cost by orders of magnitude, so what is weighed is cost, in seconds of training. A decision is one draw
of the posterior: the candidate that this draw likes best is run. It is first given a share of what it would take, then
continued from its checkpoint as long as draws still prefer it, and never past what would change the answer.

The curve S*(B) as the trials tell it, its B_crit, and the trial that would tell most of it.

A draw of the frontier is the model's, at the model's best learning rates, plus a draw of the residual: it follows the
trials where there are some near the best learning rate, and the model where there are none. Its B_crit is that of
S_min (1 + B_crit/B) fitted to it by least squares in log S, even in log B: the number that a dense sweep over batch
sizes would end with, whether or not the frontier has just that shape. The model's own parameter leans on the batch
sizes that happened to be tried most; where the shape is wrong it is off by more than its interval.
"""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bstune.core.curve import CurveBand
from bstune.core.errors import ConfigError
from bstune.search.gaussian_process import Residuals, draw_process, draw_residual
from bstune.search.observations import Arm, Known, Weight, merit, objective_weight, residual_process, smoothed
from bstune.search.posterior import B_CRIT, NOISE, OTHER, frontier, log_steps, optimum

Array = NDArray[np.float64]
FEWEST_STEPS = 10.0  # of any trial: a shorter one costs more to set up than to train
FINALISTS = 4  # reached trials around which a third of the candidates lie
ROOM = 0.1  # octaves below a batch size that ran out of memory
LUCK = 1.5  # at most so much is the least own result bettered by the others around it


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
class Proposal:
    """What to run: for steps up to ``limit``, from the start or on from the stopped trial ``parent``."""

    x: float
    z: float
    other: tuple[float, ...]
    max_steps: int
    resumed_from: int | None


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
    weight = objective_weight(objective, known.tau)
    reached = [arm for arm in known.arms if arm.status == "reached"]
    ranked = sorted(smoothed(known, objective, rng), key=lambda pair: pair[0])
    own = min((merit(arm, weight) for arm in reached), default=math.inf)
    incumbent = min(ranked[0][0], LUCK * own) if ranked else None
    maps = objective == "curve"
    if ranked and not maps:
        cost = ranked[0][1].steps * float(known.tau(np.exp2(ranked[0][1].x)))
        maps = known.spent > policy.curve_after * cost and rng.random() < policy.curve_share
    maps &= bool(reached)  # before that, the objective ``curve`` too looks for what is fast
    choices = _choices(known, pending, domain, None if maps else incumbent, weight, resumable, policy, rng)
    if maps:
        chosen, expected = most_learned(known, choices.x, choices.z, choices.other, choices.done, pending, rng)
        cap = GIVEN_UP_AT * expected
        max_steps = cap if choices.done[chosen] >= policy.look * expected else policy.look * expected
        return _proposal(choices, chosen, max(max_steps, 1.3 * float(choices.done[chosen])))
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
    taken = {resumed_from for _, _, resumed_from in pending}
    stopped = [arm for arm in known.arms if arm.status == "censored" and not arm.stuck]
    arms = [arm for arm in stopped if arm.number not in taken and resumable(arm.number)]
    if incumbent is not None:
        arms = [arm for arm in arms if merit(arm, weight) < 0.95 * policy.margin * incumbent]
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
    reached = sorted((arm for arm in known.arms if arm.status == "reached"), key=lambda arm: merit(arm, weight))
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
    drawn = np.minimum(drawn + draw_residual(residual_process(known, draw, weight, rng), at, rng), 50.0)
    score = drawn + np.log(weight(choices.x))
    cost = np.exp(drawn) * known.tau(np.exp2(choices.x))
    to_go = cost * np.maximum(1.0 - choices.done / np.exp(drawn), 0.0)
    score += policy.saving * np.minimum(to_go / cost[int(score.argmin())], 10.0)
    for x, z, _ in pending:
        score[(np.abs(choices.x - x) < 0.3) & (np.abs(choices.z - z) < 0.3)] += 0.3
    chosen = int(score.argmin())
    return chosen, float(np.exp(drawn[chosen]))


def _proposal(choices: _Choices, chosen: int, max_steps: float) -> Proposal:
    arm = choices.arms[chosen] if chosen < len(choices.arms) else None
    done = int(choices.done[chosen])
    return Proposal(
        x=float(choices.x[chosen]),
        z=float(choices.z[chosen]),
        other=tuple(float(value) for value in choices.other[chosen]),
        max_steps=max(math.ceil(min(max_steps, 1e15)), done + 1),
        resumed_from=None if arm is None else arm.number,
    )


PER_OCTAVE = 2  # batch sizes at which a frontier is drawn
NEAR = 0.7  # in log S: trials with more than this penalty say little of the frontier
STRANGE = 1.0  # in log S: a trial further off its draw is taken for an outlier
REACH = math.log(100.0)  # B_crit is sought within this factor of the batch sizes
FITTED = 400  # values of B_crit that are tried
DECISION_DRAWS = 64
SETUP = 0.2  # what a trial costs beside its steps, over the cheapest one's cost: few trials rather than many
GIVEN_UP_AT = 1.6  # times the steps that are expected of a trial: where it ends
MISFIT = 0.14  # in log S: what one more trial at a place still misses of the frontier there


@dataclass(frozen=True)
class Frontiers:
    """Draws of the frontier.

    Args:
        theta: the model's parameters, shape (m, p).
        x: log2 batch sizes, shape (g,).
        residual: of log S*, shape (m, g).
        log_b_crit: log of B_crit of each draw, in examples, shape (m,).
        log_steps: log S* of each draw at ``x``, shape (m, g).
    """

    theta: Array
    x: Array
    residual: Array
    log_b_crit: Array
    log_steps: Array


def draw_frontiers(known: Known, count: int, rng: np.random.Generator) -> Frontiers:
    """Return draws of the frontier, one for each of ``count`` draws of the posterior (all, if there are fewer)."""
    prior, seen = known.prior, known.observations
    theta = known.theta[rng.permutation(len(known.theta))[:count]]
    high = max(prior.log_low, min(prior.log_high, known.too_large))
    x = np.linspace(prior.log_low, high, 1 + round(PER_OCTAVE * (high - prior.log_low)))
    log_front = frontier(theta, x, prior)
    best = optimum(theta, x, prior)
    fitted = log_steps(theta, seen.x, seen.z, seen.other, prior)
    gap = seen.y - fitted
    off = fitted - frontier(theta, seen.x, prior)
    told = ~seen.diverged & ~seen.bound & (off < NEAR) & (np.abs(gap) < STRANGE)
    at = np.column_stack([seen.x, seen.z])
    residual = np.empty_like(log_front)
    for i, row in enumerate(theta):
        use = told[i]
        variance = seen.spread[use] ** 2 + math.exp(2.0 * row[NOISE])
        process = draw_process(Residuals(at[use], gap[i, use], variance), rng)
        residual[i] = draw_residual(process, np.column_stack([x, best[i]]), rng)
    # Over less than an octave there is no curve to fit: the model's own B_crit stands.
    own = prior.log_mid * math.log(2.0) + theta[:, B_CRIT]
    drawn = log_front + residual
    log_b_crit = _fit(x, drawn) if x.size > PER_OCTAVE else own
    return Frontiers(theta, x, residual, log_b_crit, drawn)


def _fit(x: Array, log_front: Array) -> Array:
    """Return log B_crit of S_min (1 + B_crit/B) fitted to each frontier (m, g) by least squares, shape (m,)."""
    log_batch = x * math.log(2.0)
    tried = np.linspace(log_batch[0] - REACH, log_batch[-1] + REACH, FITTED)
    shape = np.logaddexp(0.0, tried[:, None] - log_batch)
    shape -= shape.mean(axis=1, keepdims=True)
    centred = log_front - log_front.mean(axis=1, keepdims=True)
    # The square of the difference, but for what all values of B_crit share.
    error = (shape**2).sum(axis=1) - 2.0 * centred @ shape.T
    return np.asarray(tried[error.argmin(axis=1)])


def most_learned(
    known: Known,
    x: Array,
    z: Array,
    other: Array,
    done: Array,
    pending: Sequence[tuple[float, float, int | None]],
    rng: np.random.Generator,
) -> tuple[int, float]:
    """Return the choice that tells most of log B_crit for its cost, and the steps that it is expected to take.

    Told is the fall of the variance of log B_crit by one observation of log S there, as if all were jointly normal:
    cov(log S, log B_crit)^2 / (var log S + noise^2).

    Args:
        known: what the trials tell.
        x: log2 of the batch sizes to choose from, shape (n,).
        z: log2 of their learning rates, shape (n,).
        other: their other hyper-parameters, shape (n, k).
        done: steps that are already paid, shape (n,).
        pending: log2 batch size, log2 learning rate and parent of the trials that run now.
        rng: the source of chance.
    """
    drawn = draw_frontiers(known, DECISION_DRAWS, rng)
    nearest = np.abs(x[:, None] - drawn.x).argmin(axis=1)
    steps = log_steps(drawn.theta, x, z, other, known.prior) + drawn.residual[:, nearest]
    noise = float(np.mean(np.exp(2.0 * drawn.theta[:, NOISE]))) + MISFIT**2
    centred = steps - steps.mean(axis=0)
    b_crit = drawn.log_b_crit - drawn.log_b_crit.mean()
    gain = (centred.T @ b_crit / len(b_crit)) ** 2 / (centred.var(axis=0) + noise)
    expected = np.exp(np.minimum(np.median(steps, axis=0), 50.0))
    whole = expected * known.tau(np.exp2(x))
    to_go = whole * np.maximum(1.0 - done / expected, 0.1) + SETUP * whole.min()
    # A stopped trial that is past what is expected of it says that the model is wrong there: more of it tells nothing.
    gain[done >= GIVEN_UP_AT * expected] = 0.0
    for log_size, log_rate, _ in pending:
        gain[(np.abs(x - log_size) < 0.5) & (np.abs(z - log_rate) < 0.5)] *= 0.3
    chosen = int((gain / to_go).argmax())
    return chosen, float(expected[chosen])


def b_crit_quantiles(known: Known, shares: Collection[float], rng: np.random.Generator) -> Array:
    """Return quantiles of B_crit over draws of the frontier, in examples."""
    drawn = draw_frontiers(known, len(known.theta), rng)
    return np.asarray(np.exp(np.quantile(drawn.log_b_crit, list(shares))))


def steps_band(
    known: Known, batch_sizes: Sequence[int], interval: tuple[float, float], rng: np.random.Generator
) -> CurveBand:
    """Return S*(B) of the drawn frontiers; beyond the largest batch size, each goes on as 1 + B_crit/B with its B_crit.

    Args:
        known: what the trials tell.
        batch_sizes: where, in examples; below the smallest batch size of the study, its own steps are returned.
        interval: the quantiles of its ends; the steps are the median.
        rng: the source of chance.
    """
    drawn = draw_frontiers(known, len(known.theta), rng)
    sizes = np.array(batch_sizes, dtype=np.float64)
    within = np.array([np.interp(np.log2(sizes), drawn.x, row) for row in drawn.log_steps])
    last = drawn.x[-1] * math.log(2.0)
    scale = drawn.log_b_crit[:, None]
    beyond = np.logaddexp(0.0, scale - np.maximum(np.log(sizes), last)) - np.logaddexp(0.0, scale - last)
    low, middle, high = np.exp(np.quantile(within + beyond, (interval[0], 0.5, interval[1]), axis=0))
    return CurveBand(sizes, middle, low, high)


def best_learning_rate(known: Known, batch_size: float) -> float:
    """Return the posterior's median of the best learning rate at a batch size, other hyper-parameters in the middle."""
    return float(np.median(np.exp2(optimum(known.theta, np.array([math.log2(batch_size)]), known.prior))))
