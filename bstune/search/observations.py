"""The posterior of a study's trials.

Chains of trials are joined, histories extrapolated, step times fitted and parameters sampled. A
stopped trial counts as what its history extrapolates to (:mod:`bstune.search.histories`). Where
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
from bstune.core.step_timings import own_steps
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
    log_steps_seen,
    noise_variance,
    sample_posterior,
    variance_seen,
)

Array = NDArray[np.float64]
# The factor that turns steps into the objective, at log2 batch sizes (n,): (n,).
StepWeight = Callable[[Array], Array]
# Log2 of batch size and of learning rate, and the other hyper-parameters.
Point = tuple[float, float, tuple[float, ...]]

# Standard deviation, in log S, of what the model misses at one point. The trial predicted to be
# best takes 1.075 times the best cell (three shipped tables, time and steps, 8 seeds, 40 times the
# best trial's cost); with 0.05 to 0.3 it is 1.070 to 1.081, by the posterior mean alone 1.087, and
# the luckiest trial takes 1.103.
POINT_MISFIT = 0.1
# A run that diverged where others reached the target counts as so many times the expected steps.
FAILURE_FACTOR = 4.0
# Where a trial reached the target at its first evaluation, the last step that missed it counts as
# this share of its steps.
FIRST_MISS_SHARE = 0.5
# Least log excess of a trial that missed the target at its horizon's end.
LEAST_MISS = 0.003
# How many trials that reached the target a stopped one is compared with.
SIMILAR = 8
# Deviation of log S around a bound of which no history tells.
BOUND_DEVIATION = 0.05
# Five times the steps or more (e^1.6), with a deviation of half of that in log, is a guess: it says
# that S is large, not how large.
GUESSED_LOG_FACTOR = 1.6
GUESSED_SPREAD = 0.5
# The largest deviation of log S around such a guess's bound.
GUESSED_BOUND_SPREAD = 0.5

# The posterior of many trials is sampled from that of fewer of them, its start. Starts have the
# same numbers of trials at every decision; this is the first number.
FIRST_START = 80
# The next start has so many times the trials: with 1.25 it is near, two or three temperatures away,
# and a study of 1,000 trials has ten of them.
START_GROWTH = 1.25
# A start has at most this share of the trials: slow ones among the first have ended by then.
SETTLED_SHARE = 0.9
START_SEED = 20120711
STARTS_KEPT = 64
_starts: dict[tuple[object, ...], Start] = {}


@dataclass(frozen=True)
class Observation:
    """A trial, or a chain of trials that continue each other, as the last one left it."""

    number: int
    status: str
    """``reached``, ``stopped`` or ``diverged``."""
    steps: int
    """All steps of the chain, at least 1."""
    steps_low: int
    """The last step known to have missed the target, if that was reached; 0 if there is none."""
    seconds_per_step: float | None
    """None where no step was timed."""
    x: float
    """Log2 of the batch size."""
    z: float
    """Log2 of the learning rate."""
    other: tuple[float, ...]
    """The other hyper-parameters, each in [0, 1]."""
    log_factor: float | None
    """Extrapolated log(steps to target/steps); None if the history does not allow it."""
    log_factor_spread: float
    """Standard deviation of ``log_factor``; 0 where that is None."""
    stuck: bool
    """Whether resuming it added no steps, as where a replayed record ended."""
    flat: bool = False
    """Whether it would take many times its steps even at the fastest likely rate."""
    horizon: int | None = None
    """Steps after which its schedule ends, where schedules end with the trial."""
    log_excess: float | None = None
    """The least log excess over the horizon; None if the trial ended before, or has no metric."""

    @property
    def point(self) -> Point:
        """Log2 of batch size and learning rate, and the others: what a fresh seed repeats."""
        return self.x, self.z, self.other


@dataclass(frozen=True)
class Posterior:
    """All that a decision rests on: observations, draws of the parameters, step times, the cost."""

    observations: tuple[Observation, ...]
    data: LikelihoodData
    """The observations as the likelihood takes them, in the same order."""
    theta: Array
    """Draws of the parameters, (m, p)."""
    tau: StepTimes
    """The cost of a step over batch size: seconds, or examples where they are counted instead."""
    spent: float
    """The cost of all trials so far, in units of ``tau``."""
    prior: Prior
    too_large: float
    """Log2 of the smallest batch size that ran out of memory, infinite if none did."""
    budget: Callable[[float], float] | None = None
    """Gives the longest horizon at a batch size; None: any."""
    trials: int = 0
    """How many trials were paid for: each part of a chain counts."""
    tau_draws: StepTimeDraws | None = None
    """A draw of tau for each draw of the parameters; None where tau has no error."""

    @property
    def reached(self) -> list[Observation]:
        """The observations that reached the target."""
        return [trial for trial in self.observations if trial.status == "reached"]

    @property
    def stopped(self) -> list[Observation]:
        """The observations that were stopped before they reached the target."""
        return [trial for trial in self.observations if trial.status == "stopped"]

    def drawn_weight(self, row: int) -> StepWeight:
        """Give the seconds of a step over log2 batch sizes (n,) by one draw of their law, tau.

        ``row`` is the draw's place. Where tau has no error, it is tau itself.
        """
        tau = self.tau
        draws = self.tau_draws
        if draws is None:
            return lambda x: tau(np.exp2(x))
        drawn = replace(draws, log_seconds=draws.log_seconds[[row]])
        # The draw's seconds over those of tau are a factor, one for each batch size.
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
    """Sample the posterior of the frontier's parameters, given the trials so far.

    The frontier is the steps to the target at the best learning rate, over batch size.

    Args:
        trials: the records so far.
        others: the other hyper-parameters by the trial's number, each in [0, 1].
        prior: of the parameters.
        target: the metric's goal, by which histories are extrapolated; None: they are not read.
        ideal: the best value of the target's metric; None if unknown.
        step_time: gives the seconds of a step at a batch size, as they were measured before the
            first trial; None if they were not.
        in_examples: whether a step costs its number of examples rather than its seconds.
        particles: how many draws to take.
        moves: Metropolis steps at each temperature.
        rng: the source of chance.
        budget: gives the longest horizon (length of a schedule that ends with its trial) at a batch
            size; None: any.
        independent: False where trials may repeat a recorded run: those of one history then count
            as one.
        start: a posterior of fewer of these trials, from which this one is sampled, see
            :func:`start_from_fewer`; None: it is sampled from the prior.
    """
    # Trials that continue each other are a chain, whose last one counts.
    chain_ends, observations = read_observations(trials, others, prior, target, ideal)
    if isinstance(step_time, StepTimeLaw):
        # Fitted to the survey's timings and, where these are few, to the trials' own steps.
        step_time = step_time.joined_with(own_steps(trials))
    # A step costs its seconds, or 1 for each of its examples and nothing besides.
    if in_examples:
        tau = StepTimes(StepTime(overhead=0.0, per_example=1.0))
    else:
        tau = _fit_seconds(chain_ends, 2.0**prior.log_mid, step_time)
    sizes = np.array([float(trial.batch_size) for trial in trials])
    # Worked out at once, tau costs less than one call for each batch size. Costs ask for it at the
    # recorded batch sizes, the model at powers of their log2, which differ from them by rounding.
    tau.prepare(np.concatenate([sizes, np.exp2([trial.x for trial in observations])]))
    data = _weighed_data(observations, chain_ends, prior, independent)
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


def _fit_seconds(
    chain_ends: Sequence[TrialResult],
    middle: float,
    step_time: Callable[[float], float] | None,
) -> StepTimes:
    """Fit the seconds of a step over batch size to those that the trials recorded.

    Args:
        chain_ends: the last trial of each chain of trials that continue each other.
        middle: the batch size at which half of a step is overhead, where no seconds are known.
        step_time: gives the seconds that were measured before the first trial; None: none were.
    """
    # Where they follow a law, each record has the law's seconds at the time when the trial ended.
    # These say nothing that the law does not.
    if isinstance(step_time, StepTimeLaw):
        return fit_step_times([], middle, step_time)
    recorded = list[tuple[int, float]]()
    for trial in chain_ends:
        if trial.seconds_per_step is not None:
            recorded.append((trial.batch_size, trial.seconds_per_step))
    return fit_step_times(recorded, middle, step_time)


def _cost_so_far(trials: Sequence[TrialResult], tau: StepTimes) -> float:
    """Add up what all trials have cost; the steps of a continued trial are not paid again."""
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
    """Read the trials as observations: one for each chain of trials that continue each other.

    A stopped trial's history is extrapolated to the target. Trials that failed or ran out of memory
    are left out.

    Args:
        trials: the records so far.
        others: the other hyper-parameters by the trial's number, each in [0, 1].
        prior: of the posterior's parameters; it says whether schedules end with the trial.
        target: the metric's goal; None: histories are not read.
        ideal: the best value of the target's metric; None if unknown.

    Returns:
        The last trial of each chain, and their observations, in the same order.
    """
    usable = [trial for trial in trials if trial.status in ("reached", "stopped", "diverged")]
    resumed = {trial.resumed_from for trial in usable}
    chain_ends = [trial for trial in usable if trial.number not in resumed]
    histories = {trial.number: _history_towards(trial, target, ideal) for trial in chain_ends}
    # One or two evaluations do not show how a history goes on.
    reached = [trial for trial in chain_ends if trial.reached and len(histories[trial.number]) > 2]
    slowdown = fit_slowdown([_until_target(trial, histories) for trial in reached])
    earlier_steps = steps_before(trials)
    reached_trials = ReachedTrials(reached)
    observations = list[Observation]()
    for trial in chain_ends:
        observation = _observation(
            trial,
            others.get(trial.number, ()),
            earlier_steps[trial.number],
            histories,
            reached_trials,
            slowdown,
        )
        if prior.horizon:
            observation = _with_end_of_horizon(observation, trial, histories[trial.number])
        observations.append(observation)
    return chain_ends, tuple(observations)


def _history_towards(trial: TrialResult, target: Target | None, ideal: float | None) -> History:
    """Read a trial's history as the log excess at each log step; empty without a target.

    The excess is the metric's distance from its ideal value over the target's distance from that.
    """
    if target is None:
        return History()
    return read_history(trial.history, target, ideal)


def _until_target(trial: TrialResult, histories: Mapping[int, History]) -> tuple[History, float]:
    """Pair the history of a trial that reached the target with the log of its steps."""
    return histories[trial.number], math.log(trial.steps)


def steps_before(trials: Sequence[TrialResult]) -> dict[int, int]:
    """Map each trial's number to the steps of the trial that it continues; 0 if it has none."""
    steps = {trial.number: trial.steps for trial in trials}
    earlier_steps = dict[int, int]()
    for trial in trials:
        earlier_steps[trial.number] = 0
        if trial.resumed_from is not None:
            earlier_steps[trial.number] = steps.get(trial.resumed_from, 0)
    return earlier_steps


def weight_of_histories(trials: Sequence[TrialResult]) -> Array:
    """Weigh the trials so that those that repeat one recorded run count as one: (n,).

    Two trials repeat a run where the history of one begins that of the other: chains may end at
    different steps.
    """
    # Runs are grouped by their first evaluation: only histories that share it can be alike.
    runs_by_first = dict[tuple[int, float | None], list[list[int]]]()
    longest_first = sorted(range(len(trials)), key=lambda place: -len(trials[place].history))
    weight = np.ones(len(trials))
    for place in longest_first:
        history = trials[place].history
        if not history:
            continue
        runs = runs_by_first.setdefault(history[0], [])
        # The first trial of a run has its longest history, which this one may begin.
        same = [run for run in runs if trials[run[0]].history[: len(history)] == history]
        if same:
            same[0].append(place)
        else:
            runs.append([place])
    for runs in runs_by_first.values():
        for run in runs:
            weight[run] = 1.0 / len(run)
    return weight


def _weighed_data(
    observations: Sequence[Observation],
    chain_ends: Sequence[TrialResult],
    prior: Prior,
    independent: bool,
) -> LikelihoodData:
    """Give observations as the likelihood takes them.

    Unless they are independent, those that repeat one recorded run count together as one.
    ``chain_ends`` are the trials that the observations were read from, in the same order.
    """
    data = likelihood_data(observations, prior)
    if independent:
        return data
    return replace(data, weight=weight_of_histories(chain_ends))


def start_sizes(count: int) -> list[int]:
    """List how many trials each start has on the way to the posterior of ``count`` trials.

    A start is the posterior of the first trials, from which that of more of them is sampled. Each
    start has ``START_GROWTH`` times the trials of the one before. The largest has at most
    ``SETTLED_SHARE`` of all trials: the slow ones among these have mostly ended by then, so that
    the start stays the same at later decisions. Empty for few trials.
    """
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
    """Sample the posterior of the first trials, from which that of all of them is then sampled.

    None for few trials. Arguments are as of :func:`infer`; ``prior_of`` makes the prior of some of
    the trials.

    The start is itself sampled from a start of fewer trials, down to one that is sampled from the
    prior, each with a seed of its own. So it is a function of the trials alone: a study that goes
    on after a kill, in another process, decides as if nothing had happened. Starts are remembered.
    """
    sizes = start_sizes(len(trials))
    if not sizes:
        return None
    largest = sizes[-1]
    first = sorted(trials, key=lambda trial: trial.number)[:largest]
    prior = prior_of(first)
    facts = [_start_facts(trial, others.get(trial.number)) for trial in first]
    key = (*facts, prior.fingerprint, target, ideal, particles, moves, independent)
    if key not in _starts:
        chain_ends, observations = read_observations(first, others, prior, target, ideal)
        data = _weighed_data(observations, chain_ends, prior, independent)
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
        # Rearranged, the data cost the likelihood less time.
        _starts[key] = Start(theta, data.rearranged(prior), prior)
    return _starts[key]


def _start_facts(trial: TrialResult, other: tuple[float, ...] | None) -> tuple[object, ...]:
    """Collect all of a trial that a start depends on: a part of the start's key."""
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
        """Batch sizes of the trials, (n,)."""
        return np.array([trial.batch_size for trial in self.trials], dtype=np.float64)

    @cached_property
    def _learning_rates(self) -> Array:
        """Learning rates of the trials, (n,)."""
        return np.array([trial.lr for trial in self.trials], dtype=np.float64)

    def nearest(self, trial: TrialResult) -> list[TrialResult]:
        """List the ``SIMILAR`` trials nearest to one in octaves of batch size plus learning rate.

        Of a tie the earlier one comes first.
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
        other: its other hyper-parameters, each in [0, 1].
        continued_steps: the steps of the trial that it continues; 0: it continues none.
        histories: (log step, log excess) of each trial's evaluations, by its number; the log excess
            falls to 0 at the target.
        reached: trials that reached the target, which show how histories go on.
        slowdown: by how much histories fall more slowly over the rest of a trial.
    """
    history = histories[trial.number]
    # The log of (steps to the target / steps that it has run), and its deviation. Only a stopped
    # trial has them.
    log_factor: float | None = None
    log_factor_spread = 0.0
    flat = False
    if trial.status == "stopped" and history:
        flat = is_flat(history)
        similar = [_until_target(near, histories) for near in reached.nearest(trial)]
        log_factor, log_factor_spread = extrapolate_history(history, trial.steps, similar, slowdown)
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
        log_factor_spread=log_factor_spread,
        # It was continued, and got no further.
        stuck=trial.resumed_from is not None and trial.steps <= continued_steps,
        flat=flat,
    )


def _with_end_of_horizon(
    observation: Observation, trial: TrialResult, history: History
) -> Observation:
    """Add a trial's horizon and its least log excess, where schedules end with the trial.

    The excess is the metric's distance from its ideal value over the target's distance: its log is
    0 at the target and less beyond it. It replaces the extrapolation of the history, and is None
    where the trial ended before its horizon or has no finite evaluation.

    ``history``: the evaluations as (log step, log excess).
    """
    # A record without a horizon is taken to have ended at it.
    horizon = max(observation.steps, trial.horizon or 0)
    least: float | None = None
    if history and observation.steps == horizon:
        # Any evaluation on the way may meet the target, so the least excess counts. Where a
        # schedule anneals the learning rate, the least one is that at its end.
        least = min(log_excess for _, log_excess in history)
    return replace(
        observation, horizon=horizon, log_excess=least, log_factor=None, log_factor_spread=0.0
    )


class SeenLogSteps(NamedTuple):
    """What a trial says of log S, as :class:`LikelihoodData` has it."""

    y: float
    """Log S, its estimate or its lower bound."""
    spread: float
    """Standard deviation of y beside the noise from seed to seed."""
    bound: bool
    """Whether y is a lower bound."""
    log_steps_missed: float = -math.inf
    """Where y is an estimate, the log of the steps at which the target was still missed."""


def likelihood_data(observations: Sequence[Observation], prior: Prior) -> LikelihoodData:
    """Give the observations as the likelihood takes them.

    S is the steps to the target. A stopped trial counts as an estimate of S where its history
    allows one, else as a bound of S. Where schedules end with the trial (the prior has a
    ``horizon``), what each says of S follows from how far from the target its schedule ended.
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
    # Without any trial there are six empty columns.
    x, z, y, spread, bound, log_steps_missed = np.array(rows, dtype=np.float64).reshape(-1, 6).T
    diverged = np.array([trial.status == "diverged" for trial in observations], dtype=np.bool_)
    others = np.array([trial.other for trial in observations], dtype=np.float64)
    return LikelihoodData(
        points=prior.points_at(x, z, others.reshape(len(observations), prior.others)),
        y=y,
        spread=spread,
        log_steps_missed=log_steps_missed,
        bound=(bound > 0.0) & ~diverged,
        diverged=diverged,
        ends=ends,
    )


def _seen_at_end(observation: Observation, spread: float) -> SeenLogSteps:
    """Read what a trial says of log S by how it ended its horizon.

    ``y`` is the log of its steps. The likelihood adds log(S/steps), by the law of the metric over
    horizons, whose error has the deviation ``spread``.
    """
    log_done = math.log(observation.steps)
    if observation.status != "stopped":
        return SeenLogSteps(log_done, spread, bound=False)
    # The law starts from the metric at the horizon's end. Without one, S is only known to exceed
    # the steps.
    if observation.log_excess is None:
        return SeenLogSteps(log_done, spread, bound=True)
    return SeenLogSteps(log_done, spread, bound=False, log_steps_missed=log_done)


def _seen_by_history(observation: Observation) -> SeenLogSteps:
    """Read what a trial says of log S, the log of its steps to the target, from its history.

    This is for trials whose schedules do not end with them.
    """
    log_done = math.log(observation.steps)
    if observation.status == "reached":
        # S lies between the last evaluation that missed the target and the first one that reached
        # it.
        missed = max(observation.steps_low, FIRST_MISS_SHARE * observation.steps)
        log_width = math.log(observation.steps / missed)
        # The standard deviation of a uniform distribution of this width.
        spread = log_width / math.sqrt(12.0)
        return SeenLogSteps(log_done - 0.5 * log_width, spread, bound=False)
    log_factor = observation.log_factor
    # Without an extrapolated history all that is known is that S exceeds the steps.
    if log_factor is None:
        return SeenLogSteps(log_done, BOUND_DEVIATION, bound=True)
    spread = observation.log_factor_spread
    is_unsure = spread > GUESSED_SPREAD * log_factor
    # Of a guess only a lower bound is taken: one deviation below the guess, but no less than the
    # steps run already.
    if log_factor > GUESSED_LOG_FACTOR and is_unsure:
        log_least = log_done + max(log_factor - spread, 0.0)
        return SeenLogSteps(log_least, min(spread, GUESSED_BOUND_SPREAD), bound=True)
    return SeenLogSteps(log_done + log_factor, spread, bound=False, log_steps_missed=log_done)


def _read_ends(observations: Sequence[Observation]) -> Ends:
    """Read how n trials ended their horizons, the lengths of schedules that end with the trial.

    The excess is the metric's distance from its best value over the target's distance from that, so
    that its log is 0 at the target. The log excess of a trial that missed the target is at least
    ``LEAST_MISS``, and that of one that met it at most -``LEAST_MISS``. A metric next to the target
    would else come out at 0, or on its other side.
    """
    # At the horizon's end: above 0 the target was missed. 0 without a metric there.
    log_excess = np.zeros(len(observations))
    # Log(steps/horizon): below 0 the target was met before the horizon's end.
    log_share_run = np.zeros(len(observations))
    # Log(horizon/step) of the last evaluation that missed the target, where the end met it.
    log_over_last_miss = np.full(len(observations), np.inf)
    for place, trial in enumerate(observations):
        if trial.status == "reached":
            if trial.log_excess is not None:
                log_excess[place] = min(trial.log_excess, -LEAST_MISS)
            if trial.horizon is not None:
                log_share_run[place] = math.log(trial.steps / trial.horizon)
                if trial.log_excess is not None and trial.steps_low > 0:
                    log_over_last_miss[place] = math.log(trial.horizon / trial.steps_low)
        elif trial.log_excess is not None and trial.status != "diverged":
            log_excess[place] = max(trial.log_excess, LEAST_MISS)
    return Ends(log_excess, log_share_run, log_over_last_miss)


def objective_weight(objective: str, tau: StepTimes) -> StepWeight:
    """Choose the factor from steps to the objective: seconds per step, or 1 for ``steps``."""
    if objective == "steps":
        return np.ones_like
    return lambda x: tau(np.exp2(x))


def objective_so_far(observation: Observation, weight: StepWeight) -> float:
    """Compute the objective of a trial as far as it has run: its steps, or their seconds."""
    return observation.steps * float(weight(np.array(observation.x)))


def fresh_steps(posterior: Posterior) -> dict[int, float]:
    """Predict the steps that a fresh seed takes at each reached observation's point, by its number.

    A point is a batch size, a learning rate and other hyper-parameters. The prediction lies between
    the posterior mean of log S, which all trials inform, and the runs at the very point. These
    count the more, the smaller their noise from seed to seed is compared with what the model misses
    at one point. A stopped run counts as its estimate or bound, one that diverged as far slower
    than expected.

    Where schedules end with the trial, the steps are those of all runs at :func:`fresh_horizons`
    until one reaches the target, those that miss it included.
    """
    if posterior.prior.horizon:
        return {number: cost.steps for number, cost in _least_costs(posterior).items()}
    steps = dict[int, float]()
    for place, log_s in _fresh_log_steps(posterior).items():
        steps[posterior.observations[place].number] = math.exp(log_s)
    return steps


def fresh_horizons(posterior: Posterior) -> dict[int, int]:
    """Choose the horizon, in steps, with which each reached observation would cost least.

    A horizon is the length of a schedule that ends with its trial. The result is by the
    observation's number; empty where schedules do not end with the trial. The trial's own horizon
    was chosen before its S was seen: a longer one may miss the target less often, a shorter one may
    cost less. Only those with which nine of ten runs are predicted to reach the target are
    considered: what needs several seeds is no answer to a search.
    """
    if not posterior.prior.horizon:
        return {}
    return {number: round(cost.horizon) for number, cost in _least_costs(posterior).items()}


def chance_of_reaching(posterior: Posterior, number: int, horizon: float) -> float:
    """Compute the chance that a fresh seed at an observation's point meets the target in a horizon.

    It is ``(1 - outliers) Phi((log horizon - E[log S])/sd)``, with sd the deviation of log S over
    the posterior and from seed to seed. ``number`` is that of an observation that reached the
    target, ``horizon`` is in steps.
    """
    at_reached = _fresh_at_horizons(posterior)
    numbers = [trial.number for trial in posterior.observations]
    log_s, deviation = at_reached[numbers.index(number)]
    return (1.0 - OUTLIERS) * float(ndtr((math.log(horizon) - log_s) / deviation))


class LeastCost(NamedTuple):
    """The horizon with which a point costs least."""

    steps: float
    """The steps that its runs take until one reaches the target."""
    horizon: float
    """The steps after which such a run's schedule ends."""


def _least_costs(posterior: Posterior) -> dict[int, LeastCost]:
    """Find the horizon of least cost at each reached observation's point, by its number.

    The cost of a horizon is the steps that its runs take until one of them reaches the target.
    """
    # The log of (the step at which a run of each horizon meets the target / S), with S the shortest
    # horizon that meets it. Horizons and costs are relative to S here, too.
    log_met_over_s = log_met(posterior.theta[:, posterior.prior.horizon_law])
    costs = dict[int, LeastCost]()
    for place, (log_s, deviation) in _fresh_at_horizons(posterior).items():
        trial = posterior.observations[place]
        log_longest = math.inf
        if posterior.budget is not None:
            log_longest = math.log(posterior.budget(2.0**trial.x)) - log_s
        # A horizon so far above S (in deviations) that nine of ten runs reach the target: an answer
        # is not to need several seeds.
        log_horizon, cost = least_cost(log_met_over_s, deviation, log_longest, shortest=RELIABLE)
        costs[trial.number] = LeastCost(
            steps=cost * math.exp(log_s), horizon=math.exp(log_s + log_horizon)
        )
    return costs


def _fresh_at_horizons(posterior: Posterior) -> dict[int, tuple[float, float]]:
    """Predict a fresh seed's log S where schedules end with the trial: mean and deviation.

    S is the shortest horizon (length of the schedule) that meets the target. Each reached
    observation has a pair, by its place among all. The prediction by the model is moved towards the
    runs at the same point, the same hyper-parameters, in each draw of the posterior by itself: what
    a run says of S depends on the law of the metric over horizons, which differs from draw to draw.
    A run counts the less, the larger its noise from seed to seed and the error of that law are. One
    that met the target early in a long horizon says little of how short the horizon could be.
    """
    data = posterior.data
    theta = posterior.theta
    expected_log_s = log_steps(theta, data.points, posterior.prior)
    log_s_seen = log_steps_seen(theta, data, posterior.prior)
    variance_of_law = variance_seen(theta, data, posterior.prior)
    # How far each run is above the model. A run that diverged has no S, and counts as far above.
    log_gap = np.where(data.diverged, math.log(FAILURE_FACTOR), log_s_seen - expected_log_s)
    noise = np.exp(2.0 * theta[:, NOISE, None])
    fresh = dict[int, tuple[float, float]]()
    for runs in _runs_at_points(posterior.observations):
        # What the model misses at the point is normal with the deviation POINT_MISFIT. After these
        # runs, this is its variance, and then its mean.
        precision = 1.0 / (noise + variance_of_law[..., runs])
        variance_left = 1.0 / (POINT_MISFIT**-2 + precision.sum(axis=1))
        misses = variance_left * (precision * log_gap[:, runs]).sum(axis=1)
        for place in runs:
            if posterior.observations[place].status == "reached":
                log_drawn = expected_log_s[:, place] + misses
                variance = float(log_drawn.var() + variance_left.mean() + noise.mean())
                fresh[place] = float(log_drawn.mean()), math.sqrt(variance)
    return fresh


def _fresh_log_steps(posterior: Posterior) -> dict[int, float]:
    """Predict a fresh seed's log S where no schedule ends with the trial.

    Gives a prediction for each observation that reached the target, by its place among all. The
    model's mean is moved towards the runs at the observation's point, which are those with the same
    hyper-parameters (:func:`fresh_steps`).
    """
    data = posterior.data
    expected_log_s = log_steps(posterior.theta, data.points, posterior.prior).mean(axis=0)
    # How far each run is above the model. A run that diverged has no S, and counts as far above.
    log_gap = np.where(data.diverged, math.log(FAILURE_FACTOR), data.y - expected_log_s)
    noise = noise_variance(posterior.theta)
    fresh = dict[int, float]()
    for runs in _runs_at_points(posterior.observations):
        # The share of the runs' mean gap that belongs to the point, and is not the seeds' luck.
        own_variance = POINT_MISFIT**2
        misses = float(log_gap[runs].mean()) * own_variance / (own_variance + noise / len(runs))
        for place in runs:
            if posterior.observations[place].status == "reached":
                fresh[place] = float(expected_log_s[place]) + misses
    return fresh


def _runs_at_points(observations: Sequence[Observation]) -> list[list[int]]:
    """Group the places of the observations by their point."""
    places = dict[Point, list[int]]()
    for place, trial in enumerate(observations):
        places.setdefault(trial.point, []).append(place)
    return list(places.values())


def predict_objectives(posterior: Posterior, objective: str) -> list[tuple[float, Observation]]:
    """Predict the objective of a fresh seed at each reached observation's point.

    Gives pairs of the prediction, in steps or in their cost, and the observation.
    """
    steps = fresh_steps(posterior)
    weight = objective_weight(objective, posterior.tau)
    predictions = list[tuple[float, Observation]]()
    for trial in posterior.reached:
        predictions.append((steps[trial.number] * float(weight(np.array(trial.x))), trial))
    return predictions
