"""What a trial comes to whose schedule ends with it, read between recorded runs of that kind.

What is interpolated is the log of the metric's best value so far at each share of the horizon, a
share being a step over the horizon's steps: linearly in log h between the two horizons of a cell
that are around, then bilinearly in (log B, log lr) between the cells around. The target is met
where the line between two of these evaluations crosses it, in log steps, and missed if all of them
miss it. Not the values themselves are interpolated, as runs dip below a target at steps of their
own: between two that met it, it would be missed.

A horizon longer than all of a cell has the course of the longest, step by step, and its last value
from there on. One shorter than all has the course of the shortest, share by share, with a metric as
many times worse as the horizon is shorter, but no worse than any of the table. Beyond a batch
size's learning rates, and the table's batch sizes, it is as at their edge. Where the nearest run
diverged, so does the trial, at the same step; other runs that diverged do not count.
"""

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from bstune.core.records import Target
from bstune.trial.recorded_run import Outcome, Run, at_share, weights_around

Array = NDArray[np.float64]
# A cell's runs of one seed, from the shortest horizon to the longest.
Ladder = tuple[Run, ...]


@dataclass(frozen=True)
class HorizonTable:
    """Recorded runs with horizons, and how to read between them.

    Args:
        cells: the runs of each (batch size, learning rate), in order of their seeds.
        batch_sizes: all of them, ascending.
    """

    cells: Mapping[tuple[int, float], tuple[Run, ...]]
    batch_sizes: tuple[int, ...]

    def outcome(
        self, batch_size: float, lr: float, horizon: int, seed: int, target: Target
    ) -> Outcome:
        """Give what a trial comes to whose schedule ends after ``horizon`` steps.

        The target's value is above 0. Of a cell's seeds one is drawn by ``seed``, the same place in
        every cell.
        """
        share = float(np.random.default_rng(seed).random())
        return self.read(batch_size, lr, horizon, target, share)

    def read(
        self, batch_size: float, lr: float, horizon: int, target: Target, share: float
    ) -> Outcome:
        """Give :meth:`outcome` with the seed at ``share`` of a cell's, in their order."""
        ladders = list[Ladder]()
        weights = list[float]()
        for size, size_weight in weights_around(self.batch_sizes, batch_size):
            for rate, rate_weight in weights_around(self._lrs_of[size], lr):
                ladders.append(at_share(self._ladders[size, rate], share))
                weights.append(size_weight * rate_weight)
        nearest = _nearest(ladders[weights.index(max(weights))], horizon)
        if nearest.diverged:
            return _diverged(nearest, horizon, target)
        usable = list[tuple[Ladder, float]]()
        for ladder, weight in zip(ladders, weights, strict=True):
            if not _nearest(ladder, horizon).diverged:
                usable.append((ladder, weight))
        whole = sum(weight for _, weight in usable)
        log_shares = _evaluated(nearest, horizon)
        log_best = np.zeros(len(log_shares))
        log_tau = 0.0
        for ladder, weight in usable:
            log_best += weight / whole * _log_best(ladder, horizon, log_shares, target.sign)
            log_tau += weight / whole * math.log(ladder[0].seconds_per_step)
        log_best = np.clip(log_best, *self._log_metric_range)
        return _outcome(target, horizon, log_shares, log_best, math.exp(log_tau))

    @cached_property
    def _ladders(self) -> Mapping[tuple[int, float], tuple[Ladder, ...]]:
        """Those of each cell, a seed each, in the order of their seeds."""
        ladders = dict[tuple[int, float], tuple[Ladder, ...]]()
        for cell, runs in self.cells.items():
            of_cell = list[Ladder]()
            for _, of_seed in groupby(runs, key=lambda run: run.seed):
                of_cell.append(tuple(sorted(of_seed, key=_horizon)))
            ladders[cell] = tuple(of_cell)
        return ladders

    @cached_property
    def _lrs_of(self) -> Mapping[int, tuple[float, ...]]:
        """The learning rates of each batch size, ascending."""
        lrs: dict[int, list[float]] = {}
        for batch_size, lr in self.cells:
            lrs.setdefault(batch_size, []).append(lr)
        return {batch_size: tuple(sorted(of_size)) for batch_size, of_size in lrs.items()}

    @cached_property
    def _log_metric_range(self) -> tuple[float, float]:
        """The log of the lowest and of the highest value of runs that did not diverge."""
        values = list[float]()
        for runs in self.cells.values():
            for run in runs:
                if not run.diverged:
                    values += run.metric
        return math.log(min(values)), math.log(max(values))


def _horizon(run: Run) -> int:
    """Give the horizon of a run that has one."""
    if run.horizon is None:
        raise ValueError("trials with horizons are read from runs with horizons, and this has none")
    return run.horizon


def _nearest(ladder: Sequence[Run], horizon: int) -> Run:
    """Choose the run whose horizon is nearest in the logarithm; of two, the shorter one."""
    return min(ladder, key=lambda run: abs(math.log(_horizon(run) / horizon)))


def _log_shares(run: Run) -> Array:
    """Give the logs of each evaluated step over the horizon."""
    return np.array([math.log(step / _horizon(run)) for step in run.steps])


def _best_of(run: Run, log_shares: Array, worse: float) -> Array:
    """Give the log of a run's best value so far at shares of its horizon, by their logs.

    Past its ends it is as there. ``worse`` is 1 for a metric that is to fall, -1 for one that is to
    rise.
    """
    log_metric = np.array([math.log(value) for value in run.metric])
    log_best = worse * np.minimum.accumulate(worse * log_metric)
    return np.interp(log_shares, _log_shares(run), log_best)


def _evaluated(run: Run, horizon: int) -> Array:
    """Give the log of the shares of a horizon at which a trial is evaluated as a run was."""
    log_shares = _log_shares(run)
    longer = math.log(horizon / _horizon(run))
    if longer <= 0.0:
        return log_shares
    # At the same steps where the horizon is longer, and at its end.
    return np.append(log_shares - longer, 0.0)


def _log_best(ladder: Ladder, horizon: int, log_shares: Array, worse: float) -> Array:
    """Give the log of the best value so far at these shares of a horizon.

    It is read between a cell's runs of one seed. ``worse`` is 1 for a metric that is to fall, -1
    for one that is to rise.
    """
    horizons = [_horizon(run) for run in ladder]
    if horizon <= horizons[0]:
        shorter = math.log(horizons[0] / horizon)
        return _best_of(ladder[0], log_shares, worse) + worse * shorter
    if horizon >= horizons[-1]:
        longer = math.log(horizon / horizons[-1])
        return _best_of(ladder[-1], log_shares + longer, worse)
    above = bisect_left(horizons, horizon)
    low = ladder[above - 1]
    high = ladder[above]
    if low.diverged or high.diverged:
        return _best_of(_nearest((low, high), horizon), log_shares, worse)
    weight = math.log(horizon / _horizon(low)) / math.log(_horizon(high) / _horizon(low))
    at_low = _best_of(low, log_shares, worse)
    at_high = _best_of(high, log_shares, worse)
    return (1.0 - weight) * at_low + weight * at_high


def _diverged(run: Run, horizon: int, target: Target) -> Outcome:
    """Give what a trial comes to as a run that diverged, at the same steps.

    It may have met the target before.
    """
    end = min(run.end, horizon)
    met = run.steps_to(target)
    if met is not None and met <= end:
        return Outcome(
            steps=met,
            end=met,
            seconds_per_step=run.seconds_per_step,
            history=run.history_to(met),
            diverged=False,
        )
    return Outcome(
        steps=None,
        end=end,
        seconds_per_step=run.seconds_per_step,
        history=run.history_to(end),
        diverged=True,
    )


def _outcome(
    target: Target, horizon: int, log_shares: Array, log_best: Array, seconds_per_step: float
) -> Outcome:
    """Give the outcome of a course over a horizon: its history ends where the target is met.

    Args:
        target: its goal counts, on a metric over 0.
        horizon: in steps.
        log_shares: of the horizon, at each evaluation, rising (n,).
        log_best: of the best metric until then, (n,).
        seconds_per_step: of the run.
    """
    sign = target.sign
    # A goal that is not known yet is met by nothing.
    goal = -sign * math.inf if target.is_open else math.log(target.value)
    course: dict[int, float] = {}
    for log_share, value in zip(log_shares, log_best, strict=True):
        # Of evaluations that fall together the last stays.
        course[max(1, round(horizon * math.exp(log_share)))] = float(value)
    missed: dict[int, float] = {}
    met = None
    for step, value in course.items():
        if sign * (value - goal) <= 0.0:
            met = step
            if missed:
                last_missed = max(missed)
                met = _crossing(last_missed, missed[last_missed], step, value, goal)
            break
        missed[step] = value
    history = [(step, math.exp(value)) for step, value in missed.items()]
    if met is None:
        return Outcome(
            steps=None,
            end=horizon,
            seconds_per_step=seconds_per_step,
            history=tuple(history),
            diverged=False,
        )
    history.append((met, target.value))
    return Outcome(
        steps=met,
        end=met,
        seconds_per_step=seconds_per_step,
        history=tuple(history),
        diverged=False,
    )


def _crossing(before: int, value_before: float, step: int, value: float, goal: float) -> int:
    """Give the step, after ``before``, at which a line in log steps crosses the goal."""
    share = (value_before - goal) / (value_before - value)
    log_step = math.log(before) + share * math.log(step / before)
    crossing = round(math.exp(log_step))
    return min(max(crossing, before + 1), step)
