"""The next trial: which batch size and learning rate, for how many steps, and whether it continues a stopped one.

A decision is one draw of the posterior (Thompson sampling): the best candidate of this draw, for its cost, is run. It
is first given a share of its expected cost, then continued from its checkpoint as long as draws still prefer it.

A draw of the frontier is the model's, at its best learning rates, plus a draw of the residual. Its B_crit is that of
S_min (1 + B_crit/B) fitted to it by least squares in log S, even in log B: the number that a dense sweep over batch
sizes would end with. The model's own parameter leans on the batch sizes that were tried most.
"""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bstune.core.curve import CurveBand
from bstune.core.errors import ConfigError
from bstune.search import observations
from bstune.search.gaussian_process import draw_process
from bstune.search.observations import Observation, Posterior, Weight, objective_so_far, smoothed
from bstune.search.posterior import B_CRIT, NOISE, OTHER, frontier, log_steps, optimum

Array = NDArray[np.float64]
Pending = Sequence[tuple[float, float, int | None]]  # log2 B, log2 lr and resumed_from of the trials that run now
MIN_STEPS = 10.0  # of any trial: a shorter one costs more to set up than to train
CENTRES = 4  # reached trials around which a third of the candidates lie
ROOM = 0.1  # octaves below a batch size that ran out of memory
MAX_LUCK = 1.5  # the least own result divided by its smoothed value counts for at most this

# Of a frontier's draw, and of the choice for the objective curve.
PER_OCTAVE = 2  # batch sizes at which a frontier is drawn
MAX_PENALTY = 0.7  # in log S: trials with a larger one carry little information on the frontier
MAX_GAP = 1.0  # in log S: a trial further off its draw is taken for an outlier
REACH = math.log(100.0)  # B_crit is sought within this factor of the batch sizes
B_CRIT_GRID = 400  # values of B_crit that are tried
DECISION_DRAWS = 64
SETUP = 0.2  # what a trial costs beside its steps, over the cheapest one's cost: few trials rather than many
GIVEN_UP_AT = 1.6  # times the steps that are expected of a trial: where it ends
MISFIT = 0.14  # in log S: what one more trial at a place still misses of the frontier there


@dataclass(frozen=True)
class Policy:
    """How the search spends; the defaults stand in ``conf/sampler/frontier.yaml``."""

    particles: int  # draws of the posterior, at least 10
    moves: int  # Metropolis steps of its sampler at each temperature
    candidates: int  # points that a decision chooses from, at least 10
    initial_fraction: float  # of the budget's steps, given to the first trial
    max_growth: float  # before the target is reached, the most that continuing a trial adds, over what has been spent
    max_first_growth: float  # likewise for a new trial
    probe_fraction: float  # of the incumbent's cost, given to a new trial first ...
    max_predicted_fraction: float  # ... but at most this fraction of the predicted steps to target
    stop_factor: float  # a trial ends once it costs this many times the incumbent
    cost_weight: float  # of the remaining cost in the score (log T per incumbent cost)
    random_fraction: float  # of the decisions, made at random in case the model is wrong everywhere
    curve_after: float  # once this many times the incumbent's cost has been spent, whatever the objective ...
    curve_share: float  # ... this fraction of the decisions is made as for the objective ``curve``

    def __post_init__(self) -> None:
        least = {"particles": 10, "moves": 1, "candidates": 10}
        least |= dict.fromkeys(("cost_weight", "random_fraction", "curve_after", "curve_share"), 0)
        above = {"stop_factor": 1}  # the other fractions: above 0
        for name, value in vars(self).items():
            if name in least and not value >= least[name]:
                raise ConfigError(f"sampler.policy.{name} must be at least {least[name]}, but got {value}")
            if name not in least and not above.get(name, 0) < value < math.inf:
                raise ConfigError(f"sampler.policy.{name} must be a number above {above.get(name, 0)}, but got {value}")
            if name in ("random_fraction", "curve_share") and value > 1:
                raise ConfigError(f"sampler.policy.{name} must be at most 1, but got {value}")


@dataclass(frozen=True)
class Domain:
    """Where the search may go: batch sizes, learning rates, and columns of other hyper-parameters, each in [0, 1]."""

    low: int
    high: int
    snap: Callable[[float], int]  # to the batch size that a trial uses
    lrs: Callable[[Array], tuple[Array, Array]]  # lowest and highest log2 learning rate over log2 batch sizes (n,)
    others: int


@dataclass(frozen=True)
class Suggestion:
    """What to run: for steps up to ``max_steps``, from the start or on from the stopped trial ``resumed_from``."""

    x: float
    z: float
    other: tuple[float, ...]
    max_steps: int
    resumed_from: int | None


@dataclass(frozen=True)
class Candidates:
    """Points (m,), (m,), (m, k) to choose from; the first ``len(stopped)`` of them are trials to be continued."""

    stopped: tuple[Observation, ...]
    x: Array
    z: Array
    other: Array
    done: Array

    def suggestion(self, chosen: int, max_steps: float) -> Suggestion:
        """Return one of them; it is given one step more than it has, at least."""
        return Suggestion(
            x=float(self.x[chosen]),
            z=float(self.z[chosen]),
            other=tuple(float(value) for value in self.other[chosen]),
            max_steps=max(math.ceil(min(max_steps, 1e15)), int(self.done[chosen]) + 1),
            resumed_from=self.stopped[chosen].number if chosen < len(self.stopped) else None,
        )


def suggest(
    posterior: Posterior,
    pending: Pending,
    *,
    objective: str,
    domain: Domain,
    budget: Callable[[float], float],
    resumable: Callable[[int], bool] | None,
    policy: Policy,
    rng: np.random.Generator,
) -> Suggestion:
    """Return the next trial for the objective ``time``, ``steps`` or ``curve``; ``budget`` is a scale, not a limit."""
    weight = observations.objective_weight(objective, posterior.tau)
    reached = [one for one in posterior.observations if one.status == "reached"]
    ranked = sorted(smoothed(posterior, objective, rng), key=lambda pair: pair[0])
    least = min((objective_so_far(one, weight) for one in reached), default=math.inf)
    incumbent = min(ranked[0][0], MAX_LUCK * least) if ranked else None
    maps = objective == "curve"
    if ranked and not maps:
        cost = ranked[0][1].steps * float(posterior.tau(np.exp2(ranked[0][1].x)))
        maps = posterior.spent > policy.curve_after * cost and rng.random() < policy.curve_share
    maps &= bool(reached)  # before that, the objective ``curve`` too looks for what is fast
    options = _candidates(posterior, pending, domain, None if maps else incumbent, weight, resumable, policy, rng)
    if maps:
        chosen, expected = max_variance_reduction(posterior, options, pending, rng)
        probe = policy.probe_fraction * expected
        max_steps = GIVEN_UP_AT * expected if options.done[chosen] >= probe else probe
        return options.suggestion(chosen, max(max_steps, 1.3 * float(options.done[chosen])))
    draw = posterior.theta[int(rng.integers(len(posterior.theta)))]
    if posterior.observations and rng.random() < policy.random_fraction:
        chosen, predicted = len(options.stopped) + 2, math.inf
        x = math.log2(domain.snap(2.0 ** rng.uniform(math.log2(domain.low), math.log2(domain.high))))
        bottom, top = domain.lrs(np.array([x]))
        options.x[chosen], options.z[chosen] = x, rng.uniform(bottom[0], top[0])
    else:
        chosen, predicted = thompson_sample(posterior, options, draw, weight, pending, policy, rng)
    done, seconds = float(options.done[chosen]), float(posterior.tau(np.exp2(options.x[chosen])))
    if incumbent is None:
        growth = policy.max_growth if done else policy.max_first_growth
        first = max(policy.initial_fraction * budget(float(np.exp2(options.x[chosen]))), MIN_STEPS)
        added = max(growth * posterior.spent / seconds, first)
        return options.suggestion(chosen, done + max(added, 0.4 * done))
    cap = policy.stop_factor * incumbent / float(weight(options.x[chosen]))
    # A second stage: where nothing can be continued, the first probe is the last.
    probe = min(policy.probe_fraction * cap, policy.max_predicted_fraction * predicted)
    return options.suggestion(chosen, probe if resumable is not None and done < 0.75 * probe else cap)


def _candidates(
    posterior: Posterior,
    pending: Pending,
    domain: Domain,
    incumbent: float | None,
    weight: Weight,
    resumable: Callable[[int], bool] | None,
    policy: Policy,
    rng: np.random.Generator,
) -> Candidates:
    """Return the trials to be continued, and new points along the posterior's optima and around the best trials."""
    taken = {resumed_from for _, _, resumed_from in pending}
    most = math.inf if incumbent is None else 0.95 * policy.stop_factor * incumbent
    stopped = [
        one for one in posterior.observations if one.status == "censored" and objective_so_far(one, weight) < most
    ]
    stopped = [one for one in stopped if not one.stuck and one.number not in taken]
    stopped = [one for one in stopped if resumable is not None and resumable(one.number)]
    low, n, theta = math.log2(domain.low), policy.candidates, posterior.theta
    high = max(low, min(math.log2(domain.high), posterior.too_large - ROOM))
    x = rng.uniform(low, high, n)
    x[:2] = low, high
    rows = theta[rng.integers(len(theta), size=-(-n // 8))]
    best = [optimum(row[None], x[8 * i : 8 * i + 8], posterior.prior)[0] for i, row in enumerate(rows)]
    z = np.concatenate(best)[:n] + rng.normal(0.0, 0.5, n)
    other = rng.random((n, domain.others))
    for j in range(domain.others):
        preferred = theta[rng.integers(len(theta), size=n), OTHER + 3 * j] + rng.normal(0.0, 0.1, n)
        other[::2, j] = np.clip(preferred[::2], 0.0, 1.0)
    reached = [one for one in posterior.observations if one.status == "reached"]
    reached = sorted(reached, key=lambda one: objective_so_far(one, weight))
    for i, one in enumerate((reached[:CENTRES] * n)[: n // 3]):
        x[n - 1 - i] = one.x + rng.normal(0.0, 0.5)
        z[n - 1 - i] = one.z + rng.normal(0.0, 0.5)
        other[n - 1 - i] = np.clip(np.array(one.other) + rng.normal(0.0, 0.1, domain.others), 0.0, 1.0)
    x = np.array([math.log2(domain.snap(2.0 ** min(max(value, low), high))) for value in x])
    bottom, top = domain.lrs(x)
    return Candidates(
        stopped=tuple(stopped),
        x=np.concatenate([[one.x for one in stopped], x]),
        z=np.concatenate([[one.z for one in stopped], np.clip(z, bottom, top)]),
        other=np.concatenate([np.array([one.other for one in stopped]).reshape(len(stopped), domain.others), other]),
        done=np.concatenate([[float(one.steps) for one in stopped], np.zeros(n)]),
    )


def thompson_sample(
    posterior: Posterior,
    candidates: Candidates,
    draw: Array,
    weight: Weight,
    pending: Pending,
    policy: Policy,
    rng: np.random.Generator,
) -> tuple[int, float]:
    """Return the candidate with the least objective in one draw, in cost too if nearly equal, and its steps there."""
    drawn = log_steps(draw[None], candidates.x, candidates.z, candidates.other, posterior.prior)[0]
    at = np.column_stack([candidates.x, candidates.z, candidates.other])
    drawn = np.minimum(drawn + observations.residual_process(posterior, draw, weight, rng).draw(at, rng), 50.0)
    score = drawn + np.log(weight(candidates.x))
    cost = np.exp(drawn) * posterior.tau(np.exp2(candidates.x))
    to_go = cost * np.maximum(1.0 - candidates.done / np.exp(drawn), 0.0)
    score += policy.cost_weight * np.minimum(to_go / cost[int(score.argmin())], 10.0)
    for x, z, _ in pending:
        score[(np.abs(candidates.x - x) < 0.3) & (np.abs(candidates.z - z) < 0.3)] += 0.3
    chosen = int(score.argmin())
    return chosen, float(np.exp(drawn[chosen]))


@dataclass(frozen=True)
class Frontiers:
    """Draws of the frontier over log2 batch sizes ``x`` (g,)."""

    theta: Array  # the model's parameters, shape (m, p)
    x: Array
    residual: Array  # of log S*, shape (m, g)
    log_b_crit: Array  # of each draw, in examples, shape (m,)
    log_steps: Array  # log S*, shape (m, g)


def draw_frontiers(posterior: Posterior, count: int, rng: np.random.Generator) -> Frontiers:
    """Return draws of the frontier, one for each of ``count`` draws of the posterior (all, if there are fewer)."""
    prior, data = posterior.prior, posterior.data
    theta = posterior.theta[rng.permutation(len(posterior.theta))[:count]]
    high = max(prior.log_low, min(prior.log_high, posterior.too_large))
    x = np.linspace(prior.log_low, high, 1 + round(PER_OCTAVE * (high - prior.log_low)))
    log_front = frontier(theta, x, prior)
    best = optimum(theta, x, prior)
    fitted = log_steps(theta, data.x, data.z, data.other, prior)
    gap, off = data.y - fitted, fitted - frontier(theta, data.x, prior)
    near = ~data.diverged & ~data.bound & (off < MAX_PENALTY) & (np.abs(gap) < MAX_GAP)
    at = np.column_stack([data.x, data.z])
    residual = np.empty_like(log_front)
    for i, row in enumerate(theta):
        use = near[i]
        variance = data.spread[use] ** 2 + math.exp(2.0 * row[NOISE])
        process = draw_process(at[use], gap[i, use], variance, rng)
        residual[i] = process.draw(np.column_stack([x, best[i]]), rng)
    drawn = log_front + residual
    if x.size <= PER_OCTAVE:  # less than an octave shows no curve: the model's own B_crit stands
        return Frontiers(theta, x, residual, prior.log_mid * math.log(2.0) + theta[:, B_CRIT], drawn)
    log_batch = x * math.log(2.0)
    tried = np.linspace(log_batch[0] - REACH, log_batch[-1] + REACH, B_CRIT_GRID)
    shape = np.logaddexp(0.0, tried[:, None] - log_batch)
    shape -= shape.mean(axis=1, keepdims=True)
    centred = drawn - drawn.mean(axis=1, keepdims=True)
    # The square of the difference, but for what all values of B_crit share.
    error = (shape**2).sum(axis=1) - 2.0 * centred @ shape.T
    return Frontiers(theta, x, residual, tried[error.argmin(axis=1)], drawn)


def max_variance_reduction(
    posterior: Posterior, candidates: Candidates, pending: Pending, rng: np.random.Generator
) -> tuple[int, float]:
    """Return the candidate with the largest reduction of Var[log B_crit] per unit cost, and its expected steps."""
    # Jointly normal, one log S reduces it by cov(log S, log B_crit)^2 / (var log S + noise^2).
    x, z, done = candidates.x, candidates.z, candidates.done
    drawn = draw_frontiers(posterior, DECISION_DRAWS, rng)
    nearest = np.abs(x[:, None] - drawn.x).argmin(axis=1)
    steps = log_steps(drawn.theta, x, z, candidates.other, posterior.prior) + drawn.residual[:, nearest]
    noise = float(np.mean(np.exp(2.0 * drawn.theta[:, NOISE]))) + MISFIT**2
    centred = steps - steps.mean(axis=0)
    b_crit = drawn.log_b_crit - drawn.log_b_crit.mean()
    gain = (centred.T @ b_crit / len(b_crit)) ** 2 / (centred.var(axis=0) + noise)
    expected = np.exp(np.minimum(np.median(steps, axis=0), 50.0))
    whole = expected * posterior.tau(np.exp2(x))
    to_go = whole * np.maximum(1.0 - done / expected, 0.1) + SETUP * whole.min()
    # A stopped trial past its expected steps shows that the model is wrong there: more steps of it add nothing.
    gain[done >= GIVEN_UP_AT * expected] = 0.0
    for log_size, log_rate, _ in pending:
        gain[(np.abs(x - log_size) < 0.5) & (np.abs(z - log_rate) < 0.5)] *= 0.3
    chosen = int((gain / to_go).argmax())
    return chosen, float(expected[chosen])


def b_crit_quantiles(posterior: Posterior, shares: Collection[float], rng: np.random.Generator) -> Array:
    """Return quantiles of B_crit over draws of the frontier, in examples."""
    drawn = draw_frontiers(posterior, len(posterior.theta), rng)
    return np.asarray(np.exp(np.quantile(drawn.log_b_crit, list(shares))))


def steps_band(
    posterior: Posterior, batch_sizes: Sequence[int], interval: tuple[float, float], rng: np.random.Generator
) -> CurveBand:
    """Return the median of S*(B) and two quantiles over drawn frontiers, each continued by its own B_crit."""
    drawn = draw_frontiers(posterior, len(posterior.theta), rng)
    sizes = np.array(batch_sizes, dtype=np.float64)
    within = np.array([np.interp(np.log2(sizes), drawn.x, row) for row in drawn.log_steps])
    last = drawn.x[-1] * math.log(2.0)
    scale = drawn.log_b_crit[:, None]
    beyond = np.logaddexp(0.0, scale - np.maximum(np.log(sizes), last)) - np.logaddexp(0.0, scale - last)
    low, middle, high = np.exp(np.quantile(within + beyond, (interval[0], 0.5, interval[1]), axis=0))
    return CurveBand(sizes, middle, low, high)


def best_learning_rate(posterior: Posterior, batch_size: float) -> float:
    """Return the posterior's median of the best learning rate at a batch size, other hyper-parameters in the middle."""
    return float(np.median(np.exp2(optimum(posterior.theta, np.array([math.log2(batch_size)]), posterior.prior))))
