"""The posterior of a study's trials: chains joined, histories extrapolated, step times fitted, parameters sampled.

A stopped trial counts as what its history extrapolates to (:mod:`bstune.search.histories`). Where
schedules end with the trial, the metric over horizons takes the place of that
(:mod:`bstune.search.horizon`).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr

from bstune.core.records import Target, TrialResult
from bstune.core.step_time import StepTime, StepTimes, fit_step_times
from bstune.core.step_time_law import StepTimeDraws, StepTimeLaw
from bstune.search.histories import (
    History,
    Slowdown,
    extrapolate_history,
    fit_slowdown,
    is_flat,
    read_history,
)
from bstune.search.horizon import (
    OUTLIERS,
    RELIABLE,
    Ends,
    least_cost,
    log_met,
    misfit,
)
from bstune.search.posterior import (
    NOISE,
    LikelihoodData,
    Prior,
    Start,
    log_steps,
    sample_posterior,
    steps_seen,
    variance_seen,
)

Array = NDArray[np.float64]
# What steps are multiplied with to give the objective, over log2 batch sizes.
StepWeight = Callable[[Array], Array]
# Log2 of batch size and of learning rate, and the other hyper-parameters.
Point = tuple[float, float, tuple[float, ...]]

# In log S: what the model misses at one point. The trial predicted to be best takes 1.075 times the
# best cell (three shipped tables, time and steps, 8 seeds, 40 times the best trial's cost); with
# 0.05 to 0.3 it is 1.070 to 1.081, by the posterior mean alone 1.087, and the luckiest trial takes
# 1.103.
POINT_MISFIT = 0.1
# Times the steps expected: what a run counts as that diverged where others reached the target.
FAILURE_FACTOR = 4.0
# Of the steps of a trial that reached the target at its first evaluation: those that missed it.
FIRST_MISS_SHARE = 0.5
# Log excess of a trial that missed the target at its horizon's end, at least.
LEAST_MISS = 0.003
# Trials that reached the target, whose rates a stopped one is shrunk towards.
SIMILAR = 8
# Deviation of log S around a bound, in place of a history's.
BOUND_DEVIATION = 0.05
# Five times the steps or more (e^1.6), with a deviation of half of that in log, is a guess: it says
# that S is large, not how large.
GUESSED_LOG_FACTOR = 1.6
GUESSED_SPREAD = 0.5

# Of many trials a posterior is sampled from that of fewer of them, at sizes that are the same for
# every decision; this is the first of these sizes, in trials.
FIRST_START = 80
# 1.25: the next posterior is near, two or three temperatures away, and a study of 1,000 trials has
# ten of them.
START_GROWTH = 1.25
# Of the trials, at most, that a start is made of: those before that were slow to end are in by
# then.
SETTLED_SHARE = 0.9
START_SEED = 20120711
STARTS_KEPT = 64
_starts: dict[tuple[object, ...], Start] = {}


@dataclass(frozen=True)
class Observation:
    """A trial, or a chain of trials that continue each other, as the last one left it."""

    number: int
    status: str
    steps: int
    # Of a reached one: the last step that missed the target, 0 if it was not looked at before.
    steps_low: int
    seconds_per_step: float | None
    x: float
    """Log2 of the batch size."""
    z: float
    """Log2 of the learning rate."""
    other: tuple[float, ...]
    """Further hyper-parameters, each in [0, 1]."""
    # Extrapolated log(steps to target/steps), and its standard deviation; None if the history does
    # not allow it.
    log_factor: float | None
    spread: float
    # True if resuming added no steps, as where a replayed record ended.
    stuck: bool
    # True if it would take many times its steps even at the most that its recent rate may be.
    flat: bool = False
    # Steps after which its schedule ends, where it ends with the trial.
    horizon: int | None = None
    # Least log excess over the horizon; None if the trial ended before, or has no metric.
    excess: float | None = None

    @property
    def point(self) -> Point:
        """What a run on a fresh seed has in common with it."""
        return self.x, self.z, self.other


@dataclass(frozen=True)
class Posterior:
    """All that a decision rests on: the observations, the draws of the parameters, the step times, the cost so far."""

    observations: tuple[Observation, ...]
    data: LikelihoodData
    theta: Array
    tau: StepTimes
    spent: float
    prior: Prior
    # Log2 of the smallest batch size that ran out of memory, infinite if none did.
    too_large: float
    # The longest horizon over batch size; None: any.
    budget: Callable[[float], float] | None = None
    # That were paid for: each part of a chain counts.
    trials: int = 0
    # A draw of tau for each draw of the parameters; None where tau has no error.
    tau_draws: StepTimeDraws | None = None

    @property
    def reached(self) -> list[Observation]:
        """The observations that reached the target."""
        return [trial for trial in self.observations if trial.status == "reached"]

    @property
    def stopped(self) -> list[Observation]:
        """The observations that were stopped before they reached it."""
        return [trial for trial in self.observations if trial.status == "stopped"]

    def drawn_weight(self, row: int) -> StepWeight:
        """Give what steps are multiplied with to give seconds, by one draw of tau: log2 B (n,) gives (n,)."""
        tau = self.tau
        draws = self.tau_draws
        if draws is None:
            return lambda x: tau(np.exp2(x))
        drawn = replace(draws, log_seconds=draws.log_seconds[[row]])
        return lambda x: tau(np.exp2(x)) * drawn.over_law(np.exp2(x))[0]


def infer(
    trials: Sequence[TrialResult],
    others: Mapping[int, tuple[float, ...]],
    *,
    prior: Prior,
    target: Target | None,
    ideal: float | None,
    step_time: Callable[[float], float] | None,
    in_examples: bool,
    particles: int,
    moves: int,
    rng: np.random.Generator,
    budget: Callable[[float], float] | None = None,
    independent: bool = True,
    start: Start | None = None,
) -> Posterior:
    """Sample the posterior.

    Histories are read with a ``target``, costs count in seconds or ``in_examples``.

    Unless trials are ``independent``, those of one history count as one: on a table they repeat a
    recorded run. ``start`` is a posterior of fewer of these trials, from which this one is sampled,
    see :func:`start_from_fewer`.
    """
    last, observations = read_observations(trials, others, prior, target, ideal)
    measured = [(t.batch_size, t.seconds_per_step) for t in last if t.seconds_per_step is not None]
    tau = fit_step_times(measured, 2.0**prior.log_mid, step_time)
    if in_examples:
        tau = StepTimes(StepTime(0.0, 1.0))
    sizes = np.array([float(trial.batch_size) for trial in trials])
    # As a cost asks for them, and as a place in the model does.
    tau.prepare(np.concatenate([sizes, np.exp2([trial.x for trial in observations])]))
    data = _likelihood_of_runs(observations, last, prior, independent)
    theta = sample_posterior(data, prior, rng, particles, moves, start)
    tau_draws: StepTimeDraws | None = None
    if isinstance(step_time, StepTimeLaw) and not in_examples:
        tau_draws = step_time.draws(len(theta), rng)
    too_large = [trial.batch_size for trial in trials if trial.status == "out of memory"]
    return Posterior(
        observations=observations,
        data=data,
        theta=theta,
        tau=tau,
        spent=_cost_so_far(trials, tau),
        prior=prior,
        too_large=math.log2(min(too_large, default=math.inf)),
        budget=budget,
        trials=len(trials),
        tau_draws=tau_draws,
    )


def _cost_so_far(trials: Sequence[TrialResult], tau: StepTimes) -> float:
    """Add up the costs of each trial's own steps: those that it continues are not paid again."""
    earlier_steps = steps_before(trials)
    costs = list[float]()
    for trial in trials:
        own_steps = max(trial.steps - earlier_steps[trial.number], 0)
        costs.append(float(own_steps * tau(np.array(float(trial.batch_size)))))
    return sum(costs)


def read_observations(
    trials: Sequence[TrialResult],
    others: Mapping[int, tuple[float, ...]],
    prior: Prior,
    target: Target | None,
    ideal: float | None,
) -> tuple[list[TrialResult], tuple[Observation, ...]]:
    """Give the last trial of each chain, and what it says once its history is extrapolated."""
    usable = [trial for trial in trials if trial.status in ("reached", "stopped", "diverged")]
    resumed = {trial.resumed_from for trial in usable}
    last = [trial for trial in usable if trial.number not in resumed]
    histories = {trial.number: _history_towards(trial, target, ideal) for trial in last}
    reached = [trial for trial in last if trial.reached and len(histories[trial.number]) > 2]
    slowdown = fit_slowdown([_until_target(trial, histories) for trial in reached])
    earlier_steps = steps_before(trials)
    reached_trials = ReachedTrials(reached)
    observations = list[Observation]()
    for trial in last:
        observation = _observation(
            trial,
            others.get(trial.number, ()),
            earlier_steps[trial.number],
            histories,
            reached_trials,
            slowdown,
        )
        if prior.horizon:
            observation = _with_end(observation, trial, histories[trial.number])
        observations.append(observation)
    return last, tuple(observations)


def _history_towards(trial: TrialResult, target: Target | None, ideal: float | None) -> History:
    """Read a trial's history; without a target it says nothing."""
    if target is None:
        return History()
    return read_history(trial.history, target, ideal)


def _until_target(trial: TrialResult, histories: Mapping[int, History]) -> tuple[History, float]:
    """Give the history and the log steps of a trial that reached the target."""
    return histories[trial.number], math.log(trial.steps)


def steps_before(trials: Sequence[TrialResult]) -> dict[int, int]:
    """Give the steps of what each trial continues, by its number; 0 of one that starts afresh."""
    steps = {trial.number: trial.steps for trial in trials}
    earlier_steps = dict[int, int]()
    for trial in trials:
        earlier_steps[trial.number] = 0
        if trial.resumed_from is not None:
            earlier_steps[trial.number] = steps.get(trial.resumed_from, 0)
    return earlier_steps


def weight_of_histories(trials: Sequence[TrialResult]) -> Array:
    """Weigh the trials so that those that repeat one recorded run count as one.

    They do so where the history of one begins that of the other: a run is repeated in chains that
    end at other steps.
    """
    # By the first evaluation: only histories that share it can be alike.
    runs_by_first = dict[tuple[int, float | None], list[list[int]]]()
    longest_first = sorted(range(len(trials)), key=lambda place: -len(trials[place].history))
    weight = np.ones(len(trials))
    for place in longest_first:
        history = trials[place].history
        if not history:
            continue
        runs = runs_by_first.setdefault(history[0], [])
        for run in runs:
            longest = trials[run[0]].history
            if longest[: len(history)] == history:
                run.append(place)
                break
        else:
            runs.append([place])
    for runs in runs_by_first.values():
        for run in runs:
            weight[run] = 1.0 / len(run)
    return weight


def _likelihood_of_runs(
    observations: Sequence[Observation],
    last: Sequence[TrialResult],
    prior: Prior,
    independent: bool,
) -> LikelihoodData:
    """Give what the likelihood takes of observations and of the trials behind them."""
    data = likelihood_data(observations, prior)
    if independent:
        return data
    return replace(data, weight=weight_of_histories(last))


def start_sizes(count: int) -> list[int]:
    """Tell how many trials the posteriors on the way to so many are made of; none for few."""
    sizes = list[int]()
    size = FIRST_START
    while size <= SETTLED_SHARE * count:
        sizes.append(size)
        size = math.ceil(START_GROWTH * size)
    return sizes


def start_from_fewer(
    trials: Sequence[TrialResult],
    others: Mapping[int, tuple[float, ...]],
    *,
    prior_of: Callable[[Sequence[TrialResult]], Prior],
    target: Target | None,
    ideal: float | None,
    particles: int,
    moves: int,
    independent: bool,
) -> Start | None:
    """Give the posterior from which that of all these trials is sampled: of the first ones.

    None for few.

    It is made of the one before it in the same way, down to one that is sampled from the prior,
    each with a seed of its own. So it is a function of the trials alone, that is remembered and not
    a state that is carried: a study that goes on after a kill, in another process, decides as if
    nothing had happened.
    """
    sizes = start_sizes(len(trials))
    if not sizes:
        return None
    first = sorted(trials, key=lambda trial: trial.number)[: sizes[-1]]
    prior = prior_of(first)
    facts = [_start_facts(trial, others.get(trial.number)) for trial in first]
    key = (*facts, prior.fingerprint, target, ideal, particles, moves, independent)
    if key not in _starts:
        last, observations = read_observations(first, others, prior, target, ideal)
        data = _likelihood_of_runs(observations, last, prior, independent)
        smaller_start = start_from_fewer(
            first,
            others,
            prior_of=prior_of,
            target=target,
            ideal=ideal,
            particles=particles,
            moves=moves,
            independent=independent,
        )
        rng = np.random.default_rng([START_SEED, len(first)])
        theta = sample_posterior(data, prior, rng, particles, moves, smaller_start)
        if len(_starts) >= STARTS_KEPT:
            oldest = next(iter(_starts))
            del _starts[oldest]
        _starts[key] = Start(theta, data.many(prior), prior)
    return _starts[key]


def _start_facts(trial: TrialResult, other: tuple[float, ...] | None) -> tuple[object, ...]:
    """Give all of a trial that a start depends on."""
    return (
        trial.number,
        trial.batch_size,
        trial.lr,
        trial.status,
        trial.steps,
        trial.steps_low,
        trial.resumed_from,
        trial.horizon,
        trial.history,
        other,
    )


@dataclass(frozen=True)
class ReachedTrials:
    """Trials that reached the target, by which stopped ones are extrapolated."""

    trials: Sequence[TrialResult]

    @cached_property
    def _sizes(self) -> Array:
        return np.array([trial.batch_size for trial in self.trials], dtype=np.float64)

    @cached_property
    def _learning_rates(self) -> Array:
        return np.array([trial.lr for trial in self.trials], dtype=np.float64)

    def nearest(self, trial: TrialResult) -> list[TrialResult]:
        """Give the ``SIMILAR`` nearest, in octaves of batch size and of learning rate.

        The earlier one of a tie.
        """
        octaves_of_size = np.abs(np.log2(self._sizes / trial.batch_size))
        octaves_of_rate = np.abs(np.log2(self._learning_rates / trial.lr))
        order = np.argsort(octaves_of_size + octaves_of_rate, kind="stable")
        return [self.trials[place] for place in order[:SIMILAR]]


def _observation(
    trial: TrialResult,
    other: tuple[float, ...],
    continued_steps: int,
    histories: Mapping[int, History],
    reached: ReachedTrials,
    slowdown: Slowdown,
) -> Observation:
    """Read a trial, and extrapolate its history to the target where it was stopped.

    Args:
        trial: the last one of its chain.
        other: further hyper-parameters, each in [0, 1].
        continued_steps: those of the trial that it continues; 0: it continues none.
        histories: towards the target, by the trial's number.
        reached: trials that reached it, which show how histories go on.
        slowdown: by how much histories fall more slowly than before, over the rest of a trial.
    """
    history = histories[trial.number]
    log_factor: float | None = None
    spread = 0.0
    flat = False
    if trial.status == "stopped" and history:
        flat = is_flat(history)
        similar = [_until_target(near, histories) for near in reached.nearest(trial)]
        log_factor, spread = extrapolate_history(history, trial.steps, similar, slowdown)
    return Observation(
        number=trial.number,
        status=trial.status,
        steps=max(trial.steps, 1),
        steps_low=trial.steps_low,
        seconds_per_step=trial.seconds_per_step,
        x=math.log2(trial.batch_size),
        z=math.log2(trial.lr),
        other=other,
        log_factor=log_factor,
        spread=spread,
        stuck=trial.resumed_from is not None and trial.steps <= continued_steps,
        flat=flat,
    )


def _with_end(observation: Observation, trial: TrialResult, history: History) -> Observation:
    """Give the observation with how it ended its horizon, in place of what its history extrapolates to."""
    horizon = max(observation.steps, trial.horizon or 0)
    excess: float | None = None
    if history and observation.steps == horizon:
        # The least on the way, as the target is met by any evaluation: where a schedule anneals,
        # that at its end.
        excess = min(value for _, value in history)
    return replace(observation, horizon=horizon, excess=excess, log_factor=None, spread=0.0)


class SeenLogSteps(NamedTuple):
    """What a trial says of log S, as :class:`LikelihoodData` has it."""

    y: float
    spread: float
    bound: bool
    least: float = -math.inf


def likelihood_data(observations: Sequence[Observation], prior: Prior) -> LikelihoodData:
    """Give the observations as the likelihood takes them.

    A stopped one counts as an estimate where its history allows it and as a bound elsewhere; where
    schedules end with the trial, as how it ended its horizon.
    """
    ends: Ends | None = None
    rows = list[tuple[float, ...]]()
    if prior.horizon:
        ends = _read_ends(observations)
        for observation, spread in zip(observations, misfit(ends).tolist(), strict=True):
            rows.append((observation.x, observation.z, *_seen_at_end(observation, spread)))
    else:
        for observation in observations:
            rows.append((observation.x, observation.z, *_seen_by_history(observation)))
    x, z, y, spread, bound, least = np.array(rows, dtype=np.float64).reshape(-1, 6).T
    diverged = np.array([trial.status == "diverged" for trial in observations], dtype=np.bool_)
    others = np.array([trial.other for trial in observations], dtype=np.float64)
    return LikelihoodData(
        points=prior.at(x, z, others.reshape(len(observations), prior.others)),
        y=y,
        spread=spread,
        least=least,
        bound=(bound > 0.0) & ~diverged,
        diverged=diverged,
        ends=ends,
    )


def _seen_at_end(observation: Observation, spread: float) -> SeenLogSteps:
    """Give where a trial ended its horizon; the law of the metric over horizons says the rest."""
    done = math.log(observation.steps)
    if observation.status != "stopped":
        return SeenLogSteps(done, spread, bound=False)
    if observation.excess is None:
        return SeenLogSteps(done, spread, bound=True)
    return SeenLogSteps(done, spread, bound=False, least=done)


def _seen_by_history(observation: Observation) -> SeenLogSteps:
    """Give what a trial says of log S where no horizon matters."""
    done = math.log(observation.steps)
    if observation.status == "reached":
        # S lies between the last evaluation that missed the target and the first one that reached
        # it.
        missed = max(observation.steps_low, FIRST_MISS_SHARE * observation.steps)
        width = math.log(observation.steps / missed)
        # The standard deviation of a uniform distribution of this width.
        return SeenLogSteps(done - 0.5 * width, width / math.sqrt(12.0), bound=False)
    log_factor = observation.log_factor
    if log_factor is None:
        return SeenLogSteps(done, BOUND_DEVIATION, bound=True)
    is_unsure = observation.spread > GUESSED_SPREAD * log_factor
    if log_factor > GUESSED_LOG_FACTOR and is_unsure:
        at_least = done + max(log_factor - observation.spread, 0.0)
        return SeenLogSteps(at_least, min(observation.spread, 0.5), bound=True)
    return SeenLogSteps(done + log_factor, observation.spread, bound=False, least=done)


def _read_ends(observations: Sequence[Observation]) -> Ends:
    """Read how trials ended their horizons.

    One that missed has an excess above 0, whatever its metric's rounding.
    """
    excess = np.zeros(len(observations))
    early = np.zeros(len(observations))
    late = np.full(len(observations), np.inf)
    for place, trial in enumerate(observations):
        if trial.status == "reached":
            if trial.excess is not None:
                excess[place] = min(trial.excess, -LEAST_MISS)
            if trial.horizon is not None:
                early[place] = math.log(trial.steps / trial.horizon)
                if trial.excess is not None and trial.steps_low > 0:
                    late[place] = math.log(trial.horizon / trial.steps_low)
        elif trial.excess is not None and trial.status != "diverged":
            excess[place] = max(trial.excess, LEAST_MISS)
    return Ends(excess, early, late)


def objective_weight(objective: str, tau: StepTimes) -> StepWeight:
    """Give what steps are multiplied with to give the objective: seconds per step, or 1."""
    if objective == "steps":
        return np.ones_like
    return lambda x: tau(np.exp2(x))


def objective_so_far(observation: Observation, weight: StepWeight) -> float:
    """Give the objective of a trial as far as it has run."""
    return observation.steps * float(weight(np.array(observation.x)))


def fresh_steps(posterior: Posterior) -> dict[int, float]:
    """Predict the steps that a fresh seed takes at each reached observation, by its number.

    It is the posterior mean of log S, which leans on all trials around, drawn to the runs at the
    very point as far as their noise from seed to seed is small beside what the model misses at one
    point. Of these runs a stopped one counts as its estimate or bound, and one that diverged as far
    slower than expected. Where schedules end with the trial, it is what runs at
    :func:`fresh_horizons` take until one reaches the target, those that miss it included.
    """
    if posterior.prior.horizon:
        return {number: cost.steps for number, cost in _least_costs(posterior).items()}
    steps = dict[int, float]()
    for place, log_s in _fresh_log_steps(posterior).items():
        steps[posterior.observations[place].number] = math.exp(log_s)
    return steps


def fresh_horizons(posterior: Posterior) -> dict[int, int]:
    """Give the horizon at which each reached observation's point costs least, by its number.

    Its own was chosen before its S was seen: a longer one may miss less often, a shorter one may
    cost less. Of those that nine of ten runs are predicted to reach the target with: a winner that
    needs several seeds is none. Empty where schedules do not end with the trial.
    """
    if not posterior.prior.horizon:
        return {}
    return {number: round(cost.horizon) for number, cost in _least_costs(posterior).items()}


def chance_of_reaching(posterior: Posterior, number: int, horizon: float) -> float:
    """Give the chance that a fresh seed at a reached observation's point meets the target with a horizon.

    ``P = (1 - outliers) Phi((log h - E[log S])/sd)``, the deviation that of log S over the
    posterior and from seed to seed.
    """
    at_reached = _fresh_at_horizons(posterior)
    numbers = [trial.number for trial in posterior.observations]
    log_s, deviation = at_reached[numbers.index(number)]
    return (1.0 - OUTLIERS) * float(ndtr((math.log(horizon) - log_s) / deviation))


class LeastCost(NamedTuple):
    """The steps that runs take until one reaches the target, and the horizon with which they are fewest."""

    steps: float
    horizon: float


def _least_costs(posterior: Posterior) -> dict[int, LeastCost]:
    """Find the horizon of least cost at each reached observation's point, by its number.

    The cost of a horizon is the steps that its runs take until one of them reaches the target. The
    logarithms of both are over S, the steps of a fresh seed.
    """
    # The step at which a run of each horizon meets the target.
    met = log_met(posterior.theta[:, posterior.prior.horizon_law])
    costs = dict[int, LeastCost]()
    for place, (log_s, deviation) in _fresh_at_horizons(posterior).items():
        trial = posterior.observations[place]
        longest = math.inf
        if posterior.budget is not None:
            longest = math.log(posterior.budget(2.0**trial.x)) - log_s
        above, cost = least_cost(met, deviation, longest, shortest=RELIABLE)
        costs[trial.number] = LeastCost(cost * math.exp(log_s), math.exp(log_s + above))
    return costs


def _fresh_at_horizons(posterior: Posterior) -> dict[int, tuple[float, float]]:
    """Give mean and deviation of a fresh seed's log S at each reached observation, by its place.

    As in :func:`_fresh_log_steps` the runs at a point draw the model towards them, but in each draw
    of the posterior, as the law of the metric over horizons, and with it what a run says of S, is
    one of a draw. A run counts by its noise and by what that law misses of it: one that met the
    target early in a long horizon says little of how short the horizon could have been.
    """
    data = posterior.data
    theta = posterior.theta
    expected = log_steps(theta, data.points, posterior.prior)
    seen = steps_seen(theta, data, posterior.prior)
    variance_of_law = variance_seen(theta, data, posterior.prior)
    gap = np.where(data.diverged, math.log(FAILURE_FACTOR), seen - expected)
    noise = np.exp(2.0 * theta[:, NOISE, None])
    fresh = dict[int, tuple[float, float]]()
    for runs in _runs_at_points(posterior.observations):
        precision = 1.0 / (noise + variance_of_law[..., runs])
        # The variance that is left of what the model misses at the point.
        left = 1.0 / (POINT_MISFIT**-2 + precision.sum(axis=1))
        misses = left * (precision * gap[:, runs]).sum(axis=1)
        for place in runs:
            if posterior.observations[place].status == "reached":
                drawn = expected[:, place] + misses
                variance = float(drawn.var() + left.mean() + noise.mean())
                fresh[place] = float(drawn.mean()), math.sqrt(variance)
    return fresh


def _fresh_log_steps(posterior: Posterior) -> dict[int, float]:
    """Give the log S of a fresh seed at each reached observation, by its place, where no horizon matters."""
    data = posterior.data
    expected = log_steps(posterior.theta, data.points, posterior.prior).mean(axis=0)
    gap = np.where(data.diverged, math.log(FAILURE_FACTOR), data.y - expected)
    noise = float(np.mean(np.exp(2.0 * posterior.theta[:, NOISE])))
    fresh = dict[int, float]()
    for runs in _runs_at_points(posterior.observations):
        misses = float(gap[runs].mean()) * POINT_MISFIT**2 / (POINT_MISFIT**2 + noise / len(runs))
        for place in runs:
            if posterior.observations[place].status == "reached":
                fresh[place] = float(expected[place]) + misses
    return fresh


def _runs_at_points(observations: Sequence[Observation]) -> list[list[int]]:
    """Group the places of observations that share a point."""
    places = dict[Point, list[int]]()
    for place, trial in enumerate(observations):
        places.setdefault(trial.point, []).append(place)
    return list(places.values())


def predict_objectives(posterior: Posterior, objective: str) -> list[tuple[float, Observation]]:
    """Give the reached observations with what fresh seeds are predicted to give of the objective."""
    steps = fresh_steps(posterior)
    weight = objective_weight(objective, posterior.tau)
    ranked = list[tuple[float, Observation]]()
    for trial in posterior.reached:
        ranked.append((steps[trial.number] * float(weight(np.array(trial.x))), trial))
    return ranked
