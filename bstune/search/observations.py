"""What each trial of a study tells of S(B, lr), the steps to the target.

Chains of trials are joined, and histories extrapolated. A stopped trial counts as what its history
extrapolates to (:mod:`bstune.search.histories`). Where schedules end with the trial, the metric
over horizons takes the place of that (:mod:`bstune.search.horizon`).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from bstune.core.records import Target, TrialResult
from bstune.search.frontier_law import Array, Prior
from bstune.search.histories import (
    History,
    Slowdown,
    extrapolate_history,
    fit_slowdown,
    is_flat,
    read_history,
)
from bstune.search.horizon import Ends, misfit
from bstune.search.likelihood import LikelihoodData

# Log2 of batch size and of learning rate, and the other hyper-parameters.
Point = tuple[float, float, tuple[float, ...]]
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


def weighed_data(
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
