"""The posterior of a study's trials: chains joined, histories extrapolated, step times fitted, parameters sampled.

Extrapolation: metrics fall about as a power of the steps, ``log excess = -rate log(step/S)``, where the excess is the
distance from the best possible value over the target's own distance from it: 1 at the target. The rate over the rest
is the trial's own recent one times a slowdown, shrunk towards those of the trials that reached the target, taken from
the same excess on. The slowdown is what those trials show, had they been stopped on the way: it belongs to a workload.
That is an estimate with a wide error, never a bound: a trial that flattens out above the target has a rate near 0.
Where schedules end with the trial, the metric over horizons takes the place of that (:mod:`bstune.search.horizon`).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr

from bstune.core.records import Target, TrialResult
from bstune.core.step_time import StepTime, StepTimes, fit_step_times
from bstune.core.step_time_law import StepTimeDraws, StepTimeLaw
from bstune.search.horizon import OUTLIERS, RELIABLE, Ends, least_cost, log_met, misfit
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
Weight = Callable[[Array], Array]
Curve = Sequence[tuple[float, float]]  # (log step, log excess) of a trial's evaluations


class History(tuple[tuple[float, float], ...]):
    """A curve that is looked up by again and again: its hash is worked out once."""

    __hash = 0

    def __hash__(self) -> int:
        """Give a tuple's hash."""
        if self.__hash == 0:
            self.__hash = tuple.__hash__(self)
        return self.__hash


Slowdown = tuple[
    float, float
]  # log of the rate of the rest over the recent one: mean and standard deviation
# In log S: what the model misses at one place. The trial predicted to be best takes 1.075 times the best cell (three
# shipped tables, time and steps, 8 seeds, 40 times the best trial's cost); with 0.05 to 0.3 it is 1.070 to 1.081, by
# the posterior mean alone 1.087, and the luckiest trial takes 1.103.
MISFIT = 0.1
FAILURE_FACTOR = 4.0  # times the steps expected: what a run counts as that diverged where others reached the target
LEAST_SHARE = 0.5  # of the steps of a trial that reached the target at its first evaluation: those that missed it
# Histories, and pairs of two: every decision reads them all, most of them once more. A study of 1,000 trials that were
# stopped has 8,000 pairs.
CACHED = 32_768
LEAST_SCALE = 1e-300  # of a distance that others are divided by
MOST_EXCESS = 1e30
SIMILAR = 8  # trials that reached the target, whose rates a stopped one is shrunk towards


@dataclass(frozen=True)
class Observation:
    """A trial, or a chain of trials that continue each other, as the last one left it."""

    number: int
    status: str
    steps: int
    steps_low: int  # of a reached one: the last step that missed the target, 0 if it was not looked at before
    seconds_per_step: float | None
    x: float  # log2 of the batch size
    z: float  # log2 of the learning rate
    other: tuple[float, ...]
    log_factor: (
        float | None
    )  # extrapolated log(steps to target/steps); None if the history does not allow it
    spread: float  # its standard deviation
    stuck: bool  # True if resuming added no steps (a replayed record ended)
    flat: bool = False  # True if it would take many times its steps even at the most that its recent rate may be
    horizon: int | None = None  # steps after which its schedule ends, where it ends with the trial
    excess: float | None = (
        None  # least log excess over the horizon; None if the trial ended before, or has no metric
    )


@dataclass(frozen=True)
class Posterior:
    """All that a decision rests on: the observations, the draws of the parameters, the step times, the cost so far."""

    observations: tuple[Observation, ...]
    data: LikelihoodData
    theta: Array
    tau: StepTimes
    spent: float
    prior: Prior
    too_large: float  # log2 of the smallest batch size that ran out of memory, infinite if none did
    budget: Callable[[float], float] | None = None  # the longest horizon over batch size; None: any
    trials: int = 0  # that were paid for: each part of a chain counts
    # A draw of tau for each draw of the parameters; None where tau has no error.
    tau_draws: StepTimeDraws | None = None

    def drawn_weight(self, row: int) -> Weight:
        """Give what steps are multiplied with to give seconds, by one draw of tau: log2 B (n,) gives (n,)."""
        tau, draws = self.tau, self.tau_draws
        if draws is None:
            return lambda x: tau(np.exp2(x))
        one = replace(draws, log_seconds=draws.log_seconds[[row]])
        return lambda x: tau(np.exp2(x)) * one.over_law(np.exp2(x))[0]


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
    """Return the posterior; histories are read with a ``target``, costs count in seconds or ``in_examples``.

    Unless trials are ``independent``, those of one history count as one: on a table they repeat a recorded run.
    ``start`` is a posterior of fewer of these trials, from which this one is sampled, see :func:`start_of`.
    """
    last, observations = observed(trials, others, prior, target, ideal)
    measured = [(t.batch_size, t.seconds_per_step) for t in last if t.seconds_per_step is not None]
    in_seconds = fit_step_times(measured, 2.0**prior.log_mid, step_time)
    tau = StepTimes(StepTime(0.0, 1.0)) if in_examples else in_seconds
    sizes = np.array([float(trial.batch_size) for trial in trials])
    # As a cost asks for them, and as a place in the model does.
    tau.prepare(np.concatenate([sizes, np.exp2([one.x for one in observations])]))
    # A trial's own steps: those that it continues are not paid again.
    before = _steps_before(trials)
    spent = sum(
        float(max(t.steps - before[t.number], 0) * tau(np.array(float(t.batch_size))))
        for t in trials
    )
    too_large = min(
        (trial.batch_size for trial in trials if trial.status == "out of memory"), default=math.inf
    )
    data = likelihood_data(observations, prior)
    if not independent:
        data = replace(data, weight=weight_of_histories(last))
    theta = sample_posterior(data, prior, rng, particles, moves, start)
    tau_draws: StepTimeDraws | None = None
    if isinstance(step_time, StepTimeLaw) and not in_examples:
        tau_draws = step_time.draws(len(theta), rng)
    return Posterior(
        observations,
        data,
        theta,
        tau,
        spent,
        prior,
        math.log2(too_large),
        budget,
        trials=len(trials),
        tau_draws=tau_draws,
    )


def observed(
    trials: Sequence[TrialResult],
    others: Mapping[int, tuple[float, ...]],
    prior: Prior,
    target: Target | None,
    ideal: float | None,
) -> tuple[list[TrialResult], tuple[Observation, ...]]:
    """Return the last trial of each chain, and what it says once its history is extrapolated."""
    usable = [trial for trial in trials if trial.status in ("reached", "stopped", "diverged")]
    resumed = {trial.resumed_from for trial in usable}
    last = [trial for trial in usable if trial.number not in resumed]
    curves = {
        t.number: _curve(t.history, target, ideal) if target is not None else History()
        for t in last
    }
    reached = [t for t in last if t.reached and len(curves[t.number]) > 2]
    slowdown = fit_slowdown([(curves[t.number], math.log(t.steps)) for t in reached])
    before = _steps_before(trials)
    passed = ReachedTrials(reached)
    observations = tuple(
        _observation(t, others.get(t.number, ()), before[t.number], curves, passed, slowdown)
        for t in last
    )
    if prior.horizon:
        observations = tuple(
            _with_end(one, t, curves[t.number]) for one, t in zip(observations, last, strict=True)
        )
    return last, observations


def _steps_before(trials: Sequence[TrialResult]) -> dict[int, int]:
    """Return the steps of what each trial continues, by its number; 0 of one that starts afresh."""
    steps = {trial.number: trial.steps for trial in trials}
    before = dict[int, int]()
    for trial in trials:
        resumed_from = trial.resumed_from
        before[trial.number] = 0 if resumed_from is None else steps.get(resumed_from, 0)
    return before


def weight_of_histories(trials: Sequence[TrialResult]) -> Array:
    """Return the weight of each trial where those that repeat one recorded run count as one.

    They do so where the history of one begins that of the other: a run is repeated in chains that end at other steps.
    """
    runs = dict[tuple[int, float | None], list[list[int]]]()
    longest_first = sorted(range(len(trials)), key=lambda place: -len(trials[place].history))
    weight = np.ones(len(trials))
    for place in longest_first:
        history = trials[place].history
        if not history:
            continue
        alike = runs.setdefault(history[0], [])
        for run in alike:
            if trials[run[0]].history[: len(history)] == history:
                run.append(place)
                break
        else:
            alike.append([place])
    for alike in runs.values():
        for run in alike:
            weight[run] = 1.0 / len(run)
    return weight


# Of many trials a posterior is sampled from that of fewer of them, at sizes that are the same for every decision.
# 1.25: the next posterior is near, two or three temperatures away, and a study of 1,000 trials has ten of them.
FIRST_START = 80  # trials
START_GROWTH = 1.25
# Of the trials, at most, that a start is made of: those before that were slow to end are in by then.
SETTLED_SHARE = 0.9
START_SEED = 20120711
STARTS_KEPT = 64
_starts: dict[tuple[Any, ...], Start] = {}


def start_sizes(count: int) -> list[int]:
    """Return how many trials the posteriors on the way to so many are made of; none for few."""
    sizes = list[int]()
    size = FIRST_START
    while size <= SETTLED_SHARE * count:
        sizes.append(size)
        size = math.ceil(START_GROWTH * size)
    return sizes


def start_of(
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
    """Return the posterior from which that of all these trials is sampled: of the first ones; None for few.

    It is made of the one before it in the same way, down to one that is sampled from the prior, each with a seed of
    its own. So it is a function of the trials alone, that is remembered and not a state that is carried: a study that
    goes on after a kill, in another process, decides as if nothing had happened.
    """
    sizes = start_sizes(len(trials))
    if not sizes:
        return None
    first = sorted(trials, key=lambda trial: trial.number)[: sizes[-1]]
    prior = prior_of(first)
    facts = [
        (
            trial.number,
            trial.batch_size,
            trial.lr,
            trial.status,
            trial.steps,
            trial.steps_low,
            trial.resumed_from,
            trial.horizon,
            trial.history,
            others.get(trial.number),
        )
        for trial in first
    ]
    key = (*facts, prior.fingerprint, target, ideal, particles, moves, independent)
    if key not in _starts:
        last, observations = observed(first, others, prior, target, ideal)
        data = likelihood_data(observations, prior)
        if not independent:
            data = replace(data, weight=weight_of_histories(last))
        before = start_of(
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
        theta = sample_posterior(data, prior, rng, particles, moves, before)
        if len(_starts) >= STARTS_KEPT:
            del _starts[next(iter(_starts))]
        _starts[key] = Start(theta, data.many(prior), prior)
    return _starts[key]


@dataclass(frozen=True)
class ReachedTrials:
    """Trials that reached the target, by which stopped ones are extrapolated."""

    trials: Sequence[TrialResult]

    @cached_property
    def _places(self) -> tuple[Array, Array]:
        """Batch sizes and learning rates."""
        sizes = np.array([trial.batch_size for trial in self.trials], dtype=np.float64)
        rates = np.array([trial.lr for trial in self.trials], dtype=np.float64)
        return sizes, rates

    def nearest(self, trial: TrialResult) -> list[TrialResult]:
        """Return the ``SIMILAR`` nearest, in octaves of batch size and of learning rate; the earlier one of a tie."""
        sizes, rates = self._places
        distance = np.abs(np.log2(sizes / trial.batch_size)) + np.abs(np.log2(rates / trial.lr))
        places = np.argsort(distance, kind="stable")[:SIMILAR]
        return [self.trials[place] for place in places]


def _observation(
    trial: TrialResult,
    other: tuple[float, ...],
    before: int,
    curves: Mapping[int, Curve],
    reached: ReachedTrials,
    slowdown: Slowdown,
) -> Observation:
    log_factor, spread, flat = None, 0.0, False
    if trial.status == "stopped" and curves[trial.number]:
        recent = _recent(curves[trial.number])
        flat = recent is not None and recent[1] > FAR * (recent[0] + 2.0 * recent[2])
        similar = [(curves[near.number], math.log(near.steps)) for near in reached.nearest(trial)]
        log_factor, spread = extrapolate(curves[trial.number], trial.steps, similar, slowdown)
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
        stuck=trial.resumed_from is not None and trial.steps <= before,
        flat=flat,
    )


def _with_end(one: Observation, trial: TrialResult, curve: Curve) -> Observation:
    """Return the observation with how it ended its horizon, in place of what its history extrapolates to."""
    horizon = max(one.steps, trial.horizon or 0)
    # The least on the way, as the target is met by any evaluation: where a schedule anneals, that at its end.
    excess = min(value for _, value in curve) if curve and one.steps == horizon else None
    return replace(one, horizon=horizon, excess=excess, log_factor=None, spread=0.0)


def likelihood_data(observations: Sequence[Observation], prior: Prior) -> LikelihoodData:
    """Return the observations, a stopped one as an estimate where its history allows it and as a bound elsewhere."""
    seen = []
    ends = _ends(observations) if prior.horizon else None
    misfits = None if ends is None else misfit(ends)
    for i, one in enumerate(observations):
        done, least = math.log(one.steps), -math.inf
        if misfits is not None:
            missed = one.status == "stopped"
            values = done, float(misfits[i]), missed and one.excess is None
            least = done if missed and one.excess is not None else -math.inf
        elif one.status == "reached":
            # S lies between the last evaluation that missed the target and the first one that reached it.
            width = math.log(one.steps / max(one.steps_low, LEAST_SHARE * one.steps))
            values = done - 0.5 * width, width / math.sqrt(12.0), False
        elif one.log_factor is None:
            values = done, 0.05, True
        elif one.log_factor > 1.6 and one.spread > 0.5 * one.log_factor:
            # Five times as far or more, by a guess: it says that S is large, not how large.
            values = done + max(one.log_factor - one.spread, 0.0), min(one.spread, 0.5), True
        else:
            values, least = (done + one.log_factor, one.spread, False), done
        seen.append((one.x, one.z, *values, least))
    x, z, y, spread, bound, leasts = np.array(seen, dtype=np.float64).reshape(-1, 6).T
    diverged = np.array([one.status == "diverged" for one in observations], dtype=np.bool_)
    other = np.array([one.other for one in observations], dtype=np.float64).reshape(
        len(observations), prior.others
    )
    return LikelihoodData(
        prior.at(x, z, other), y, spread, leasts, (bound > 0.0) & ~diverged, diverged, ends=ends
    )


def _ends(observations: Sequence[Observation]) -> Ends:
    """Return how trials ended their horizons; one that missed has an excess above 0, whatever its metric's rounding."""
    excess, early = np.zeros((2, len(observations)))
    late = np.full(len(observations), np.inf)
    for i, one in enumerate(observations):
        if one.excess is not None and one.status != "diverged":
            excess[i] = (
                min(one.excess, -LEAST_MISS)
                if one.status == "reached"
                else max(one.excess, LEAST_MISS)
            )
        if one.status == "reached" and one.horizon is not None:
            early[i] = math.log(one.steps / one.horizon)
            if one.excess is not None and one.steps_low > 0:
                late[i] = math.log(one.horizon / one.steps_low)
    return Ends(excess, early, late)


def objective_weight(objective: str, tau: StepTimes) -> Weight:
    """Return what steps are multiplied with to give the objective: seconds per step, or 1."""
    return np.ones_like if objective == "steps" else lambda x: tau(np.exp2(x))


def objective_so_far(observation: Observation, weight: Weight) -> float:
    """Return the objective of a trial as far as it has run."""
    return observation.steps * float(weight(np.array(observation.x)))


def fresh_steps(posterior: Posterior) -> dict[int, float]:
    """Return the steps that a fresh seed is predicted to take at each reached observation, by its number.

    It is the posterior mean of log S, which leans on all trials around, drawn to the runs at the very place as far as
    their noise from seed to seed is small beside what the model misses at one place. Of these runs a stopped one counts
    as its estimate or bound, and one that diverged as far slower than expected. Where schedules end with the trial, it
    is what runs at :func:`fresh_horizons` take until one reaches the target, those that miss it included.
    """
    if posterior.prior.horizon:
        return {number: steps for number, (steps, _) in _least_costs(posterior).items()}
    return {
        posterior.observations[i].number: math.exp(log_s)
        for i, log_s in _fresh_log_steps(posterior).items()
    }


def fresh_horizons(posterior: Posterior) -> dict[int, int]:
    """Return the horizon at which each reached observation's point costs least, by its number.

    Its own was chosen before its S was seen: a longer one may miss less often, a shorter one may cost less. Of those
    that nine of ten runs are predicted to reach the target with: a winner that needs several seeds is none. Empty where
    schedules do not end with the trial.
    """
    least = _least_costs(posterior) if posterior.prior.horizon else {}
    return {number: round(horizon) for number, (_, horizon) in least.items()}


def chance_of_reaching(posterior: Posterior, number: int, horizon: float) -> float:
    """Give the chance that a fresh seed at a reached observation's point meets the target with a horizon.

    ``P = (1 - outliers) Phi((log h - E[log S])/sd)``, the deviation that of log S over the posterior and
    from seed to seed.
    """
    at_reached = _fresh_at_horizons(posterior)
    place = [one.number for one in posterior.observations].index(number)
    log_s, spread = at_reached[place]
    return (1.0 - OUTLIERS) * float(ndtr((math.log(horizon) - log_s) / spread))


def _least_costs(posterior: Posterior) -> dict[int, tuple[float, float]]:
    """Return the steps until a run reaches the target and the horizon with which they are fewest, by number."""
    met = log_met(posterior.theta[:, posterior.prior.horizon_law])
    found = {}
    for i, (log_s, spread) in _fresh_at_horizons(posterior).items():
        one = posterior.observations[i]
        longest = (
            math.inf if posterior.budget is None else math.log(posterior.budget(2.0**one.x)) - log_s
        )
        above, cost = least_cost(met, spread, longest, shortest=RELIABLE)
        found[one.number] = cost * math.exp(log_s), math.exp(log_s + above)
    return found


def _fresh_at_horizons(posterior: Posterior) -> dict[int, tuple[float, float]]:
    """Give mean and deviation of a fresh seed's log S at each reached observation, by its place.

    As in :func:`_fresh_log_steps` the runs at a place draw the model towards them, but in each draw of the
    posterior, as the law of the metric over horizons, and with it what a run says of S, is one of a draw. A run
    counts by its noise and by what that law misses of it: one that met the target early in a long horizon says
    little of how short the horizon could have been.
    """
    data = posterior.data
    expected = log_steps(posterior.theta, data.points, posterior.prior)
    seen = steps_seen(posterior.theta, data, posterior.prior)
    own = variance_seen(posterior.theta, data, posterior.prior)
    gap = np.where(data.diverged, math.log(FAILURE_FACTOR), seen - expected)
    noise = np.exp(2.0 * posterior.theta[:, NOISE, None])
    fresh: dict[int, tuple[float, float]] = {}
    for runs in _places(posterior.observations):
        precision = 1.0 / (noise + own[..., runs])
        of_runs = precision.sum(axis=1)
        left = 1.0 / (MISFIT**-2 + of_runs)  # variance of what the model misses at the place
        misses = left * (precision * gap[:, runs]).sum(axis=1)
        for i in runs:
            if posterior.observations[i].status == "reached":
                drawn = expected[:, i] + misses
                variance = float(drawn.var() + left.mean() + noise.mean())
                fresh[i] = float(drawn.mean()), math.sqrt(variance)
    return fresh


def _noise(theta: Array) -> float:
    """Return the mean variance of log S from seed to seed."""
    return float(np.mean(np.exp(2.0 * theta[:, NOISE])))


def _fresh_log_steps(posterior: Posterior) -> dict[int, float]:
    """Return the log S of a fresh seed at each reached observation, by its place, where no horizon matters."""
    data = posterior.data
    expected = log_steps(posterior.theta, data.points, posterior.prior).mean(axis=0)
    gap = np.where(data.diverged, math.log(FAILURE_FACTOR), data.y - expected)
    noise = _noise(posterior.theta)
    fresh: dict[int, float] = {}
    for runs in _places(posterior.observations):
        misses = float(gap[runs].mean()) * MISFIT**2 / (MISFIT**2 + noise / len(runs))
        fresh |= {
            i: float(expected[i]) + misses
            for i in runs
            if posterior.observations[i].status == "reached"
        }
    return fresh


def _places(observations: Sequence[Observation]) -> list[list[int]]:
    """Group the places of observations that share a point."""
    places: dict[tuple[float, float, tuple[float, ...]], list[int]] = {}
    for i, one in enumerate(observations):
        places.setdefault((one.x, one.z, one.other), []).append(i)
    return list(places.values())


def smoothed(posterior: Posterior, objective: str) -> list[tuple[float, Observation]]:
    """Return the reached observations with what fresh seeds are predicted to give of the objective."""
    steps, weight = fresh_steps(posterior), objective_weight(objective, posterior.tau)
    reached = [one for one in posterior.observations if one.status == "reached"]
    return [(steps[one.number] * float(weight(np.array(one.x))), one) for one in reached]


LEAST_MISS = 0.003  # log excess of a trial that missed the target at its horizon's end, at least
RATE = 0.4  # of error in steps where nothing has reached the target yet
RATE_SPREAD = 0.6  # standard deviation of its logarithm
SIMILARITY = 0.2  # standard deviation of the logarithms of rates between trials, at least
RECENT = 3.0  # a trial's own rate is taken over its last steps within this factor
SLOWDOWN: Slowdown = (
    math.log(0.9),
    0.3,
)  # rates fall as training goes on; before any trial has shown by how much, ...
PRIOR_TRIALS = 2.0  # ... as if so many had
SHARES = (0.25, 0.5)  # of its steps to target, at which a trial that reached it is looked at
SCATTER = 0.04  # of the log excess from one evaluation to the next
FASTEST, SLOWEST = 3.0, 0.02  # rates are kept within these
FAR = 2.0  # log of steps to target over steps, from which on a trial is flat
LEAST_EXCESS = 0.02  # in the logarithm, of a trial that has not reached the target


def ideal_value(target: Target, bounds: Sequence[float] | None) -> float | None:
    """Return the best value that the metric can take: from its bounds, or 0 for one that falls to a positive goal."""
    if bounds is not None and len(bounds) == 2:
        best = bounds[0] if target.mode == "min" else bounds[1]
        if math.isfinite(best) and target.gap(best) < 0:
            return best
    return 0.0 if target.mode == "min" and target.value > 0 else None


def log_excess(
    history: Sequence[tuple[int, float | None]], target: Target, ideal: float | None
) -> list[tuple[float, float]]:
    """Return (log step, log excess) of the finite evaluations; the excess is 1 at the target.

    Without an ideal value, the distance from goal to ideal is taken as a quarter of the first gap.
    """
    gaps = [(step, target.gap(value)) for step, value in history if step > 0 and value is not None]
    gaps = [(step, gap) for step, gap in gaps if math.isfinite(gap)]
    if not gaps:
        return []
    scale = abs(target.value - ideal) if ideal is not None else max(gaps[0][1], 1e-12) / 4.0
    # A target next to the ideal value has an excess that no float holds: it is beyond any other anyway.
    excesses = [(step, min(1.0 + gap / max(scale, LEAST_SCALE), MOST_EXCESS)) for step, gap in gaps]
    return [(math.log(step), math.log(max(excess, 1e-3))) for step, excess in excesses]


@lru_cache(maxsize=CACHED)
def reached_rate(curve: Curve, log_steps: float, excess: float) -> float | None:
    """Return the rate of a trial that reached the target from this log excess on; None if it began below it."""
    low, before = math.inf, None
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


@lru_cache(maxsize=CACHED)
def _curve(
    history: tuple[tuple[int, float | None], ...], target: Target, ideal: float | None
) -> Curve:
    return History(log_excess(history, target, ideal))


@lru_cache(maxsize=CACHED)
def _recent(curve: Curve) -> tuple[float, float, float] | None:
    """Return a curve's recent rate, its excess at the end by that line, and the rate's error; None for two points."""
    recent = [(s, e) for s, e in curve if s >= curve[-1][0] - math.log(RECENT)]
    if len(recent) < 3 or recent[-1][0] == recent[0][0]:
        return None
    x, e = (np.array(values) for values in zip(*recent, strict=True))
    x = x - x.mean()
    square = float(x @ x)
    slope = float(x @ e) / square
    residual = e - e.mean() - slope * x
    scatter = math.hypot(SCATTER, math.sqrt(float(residual @ residual) / (len(e) - 2)))
    return -slope, max(float(e.mean() + slope * x[-1]), LEAST_EXCESS), scatter / math.sqrt(square)


@lru_cache(maxsize=CACHED)
def _slowdowns(curve: Curve, end: float) -> tuple[float, ...]:
    """Return the logs of what a trial that reached the target at ``end`` slowed down by from each of ``SHARES`` on."""
    logs = []
    for share in SHARES:
        start = tuple((s, e) for s, e in curve if s <= end + math.log(share))
        recent = _recent(start) if start else None
        if recent is not None and recent[0] > SLOWEST:
            logs.append(math.log(recent[1] / (end - start[-1][0]) / recent[0]))
    return tuple(logs)


def fit_slowdown(reached: Sequence[tuple[Curve, float]]) -> Slowdown:
    """Return the slowdown of trials that reached the target, given as curve and log steps, shrunk towards the prior."""
    mean, spread = SLOWDOWN
    seen = [np.array(logs) for curve, end in reached if (logs := _slowdowns(_history(curve), end))]
    count = PRIOR_TRIALS + len(seen)
    fitted = (PRIOR_TRIALS * mean + sum(float(logs.mean()) for logs in seen)) / count
    square = PRIOR_TRIALS * spread**2 + sum(float(((logs - fitted) ** 2).mean()) for logs in seen)
    return fitted, math.sqrt(square / count)


def extrapolate(
    curve: Curve, steps: int, reached: Sequence[tuple[Curve, float]], slowdown: Slowdown = SLOWDOWN
) -> tuple[float, float]:
    """Return log(steps to target/steps) and its deviation, by ``reached`` curves and log steps, most similar first."""
    others = tuple((_history(other), log_steps) for other, log_steps in reached)
    return _extrapolated(_history(curve), steps, others, slowdown)


def _history(curve: Curve) -> History:
    return curve if isinstance(curve, History) else History(curve)


@lru_cache(maxsize=CACHED)
def _extrapolated(
    curve: History, steps: int, reached: tuple[tuple[History, float], ...], slowdown: Slowdown
) -> tuple[float, float]:
    end = math.log(steps)
    own, recent = None, _recent(curve)
    level = max(min(e for _, e in curve[-3:]), LEAST_EXCESS)
    if recent is not None:
        slope, level, error = recent
        # One that gets worse counts as flat; its misfit would favour fast rates, whose spread is wide.
        own = max(slope, 0.0) * math.exp(slowdown[0]), error
    rates = [
        rate
        for other, log_steps in reached
        if (rate := reached_rate(other, log_steps, level)) is not None
    ]
    log_rate, spread = math.log(RATE), RATE_SPREAD
    if rates:
        logs = np.log(np.clip(rates, SLOWEST, FASTEST))
        weight = 1.0 / (1.0 + np.arange(len(logs)) / 3.0)
        mean = float(weight @ logs / weight.sum())
        within = float(weight @ (logs - mean) ** 2 / weight.sum())
        between = 1.0 / (1.0 / RATE_SPREAD**2 + min(len(logs), 6) / SIMILARITY**2)
        share = between / RATE_SPREAD**2
        log_rate, spread = (
            share * log_rate + (1.0 - share) * mean,
            math.sqrt(between + within + SIMILARITY**2),
        )
    if own is not None:
        log_rate, spread = _combine(log_rate, spread, *own, slowdown[1])
    rate = min(max(math.exp(log_rate), SLOWEST), FASTEST)
    away = level / rate
    # From the last evaluation; the steps since then count as done.
    log_factor = max(curve[-1][0] + away - end, 0.02)
    return log_factor, math.hypot(0.15, math.hypot(SCATTER / rate, away * spread))


def _combine(
    log_rate: float, spread: float, slope: float, error: float, relative: float
) -> tuple[float, float]:
    """Return the posterior mean and deviation of the log rate: a normal prior, and a slope with normal errors."""
    grid = np.linspace(math.log(SLOWEST), math.log(FASTEST), 60)
    rate = np.exp(grid)
    sigma = np.hypot(error, relative * rate)
    density = (
        -0.5 * ((grid - log_rate) / spread) ** 2
        - 0.5 * ((slope - rate) / sigma) ** 2
        - np.log(sigma)
    )
    weight = np.exp(density - density.max())
    weight /= weight.sum()
    mean = float(weight @ grid)
    return mean, math.sqrt(max(float(weight @ (grid - mean) ** 2), 0.01))
