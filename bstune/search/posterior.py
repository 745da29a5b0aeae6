"""The posterior of a study's trials: their observations, the seconds of a step, and draws.

That of many trials is sampled from that of fewer of them, which is kept.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from bstune.core.records import Target, TrialResult
from bstune.core.step_time import StepTime, StepTimes, fit_step_times
from bstune.core.step_time_law import StepTimeDraws, StepTimeLaw
from bstune.core.step_timings import own_steps
from bstune.search.frontier_law import Array, Prior
from bstune.search.likelihood import LikelihoodData
from bstune.search.monte_carlo import Start, sample_posterior
from bstune.search.observations import Observation, read_observations, steps_before, weighed_data

# The factor that turns steps into the objective, at log2 batch sizes (n,): (n,).
StepWeight = Callable[[Array], Array]
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
    data = weighed_data(observations, chain_ends, prior, independent)
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
        data = weighed_data(observations, chain_ends, prior, independent)
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
