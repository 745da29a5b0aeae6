"""The end of a trial whose schedule ends with it, interpolated between recorded runs of that kind.

The step at which a schedule ends is its horizon h. A share of a horizon is a step over h. The runs
at one batch size and learning rate are a cell.

Interpolated is the log of the metric's best value so far, at each share of the horizon: linearly in
log h between the two nearest horizons of a cell, then bilinearly in (log B, log lr) between the
nearest cells. The values themselves are not interpolated, as each run dips below a target at steps
of its own: between two runs that met it, the target would be missed. The target is met where the
line between two evaluations crosses it, in log steps. It is missed if all evaluations miss it.

A horizon longer than all of a cell has the values of the longest at the same steps, and its last
value from there on. One shorter than all has the values of the shortest at the same shares, with a
metric that is as many times worse as the horizon is shorter, but no worse than any in the table.
Beyond a batch size's learning rates, and beyond the table's batch sizes, the value at their edge is
taken. Where the nearest run diverged, so does the trial, at the same step. Other runs that diverged
do not count.
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
RunsOfSeed = tuple[Run, ...]


@dataclass(frozen=True)
class HorizonTable:
    """Recorded runs with horizons, between which trials are interpolated.

    Args:
        cells: the runs of each (batch size, learning rate), in order of their seeds.
        batch_sizes: of all runs, ascending.
    """

    cells: Mapping[tuple[int, float], tuple[Run, ...]]
    batch_sizes: tuple[int, ...]

    def outcome(
        self, batch_size: float, lr: float, horizon: int, seed: int, target: Target
    ) -> Outcome:
        """Give the end of a trial whose schedule ends after ``horizon`` steps.

        The target's value is above 0. Of the recorded seeds of each pair of batch size and learning
        rate one is drawn by ``seed``, at the same place in every pair's list.
        """
        share = float(np.random.default_rng(seed).random())
        return self.read(batch_size, lr, horizon, target, share)

    def read(
        self, batch_size: float, lr: float, horizon: int, target: Target, share: float
    ) -> Outcome:
        """Give the end of a trial as :meth:`outcome` does, for a given choice of recorded seeds.

        A cell is a recorded batch size and learning rate. ``share``, in [0, 1], chooses one of its
        seeds: 0 the first, 1 the last.
        """
        cells = self._weighted_cells(batch_size, lr, share)
        # The first of the cells with the largest weight.
        runs_of_nearest_cell, _ = max(cells, key=lambda cell: cell[1])
        nearest = _nearest(runs_of_nearest_cell, horizon)
        if nearest.diverged:
            return _outcome_of_diverged_run(nearest, horizon, target)
        usable = list[tuple[RunsOfSeed, float]]()
        for runs, weight in cells:
            if not _nearest(runs, horizon).diverged:
                usable.append((runs, weight))
        # Without the diverged cells the weights add up to less than 1.
        total_weight = sum(weight for _, weight in usable)
        # The trial is evaluated at these shares of its horizon.
        log_shares = _evaluated_log_shares(nearest, horizon)
        # Means of logarithms, by the weights of the cells: of the best metric so far at each of the
        # shares, and of the seconds of a step.
        log_best = np.zeros(len(log_shares))
        log_seconds_per_step = 0.0
        for runs, weight in usable:
            log_best += weight / total_weight * _log_best(runs, horizon, log_shares, target.sign)
            log_seconds_per_step += weight / total_weight * math.log(runs[0].seconds_per_step)
        # At horizons that are shorter than all recorded ones the metric is extrapolated, but not
        # beyond the recorded values.
        log_best = np.clip(log_best, *self._log_metric_range)
        return _outcome(target, horizon, log_shares, log_best, math.exp(log_seconds_per_step))

    def _weighted_cells(
        self, batch_size: float, lr: float, share: float
    ) -> list[tuple[RunsOfSeed, float]]:
        """Give the cells around a trial's batch size and learning rate, with their weights.

        There are at most four, and their weights add up to 1. Of each cell there are the runs of
        one seed, which ``share`` chooses as in :meth:`read`.
        """
        cells = list[tuple[RunsOfSeed, float]]()
        for size, size_weight in weights_around(self.batch_sizes, batch_size):
            for rate, rate_weight in weights_around(self._lrs_of[size], lr):
                runs = at_share(self._runs_of_seeds[size, rate], share)
                cells.append((runs, size_weight * rate_weight))
        return cells

    @cached_property
    def _runs_of_seeds(self) -> Mapping[tuple[int, float], tuple[RunsOfSeed, ...]]:
        """For each (batch size, learning rate) its runs of each seed, in the order of the seeds.

        A seed's runs differ in their horizon, and are sorted by it.
        """
        runs_of_seeds = dict[tuple[int, float], tuple[RunsOfSeed, ...]]()
        for cell, runs in self.cells.items():
            of_cell = list[RunsOfSeed]()
            # The runs of a cell are in the order of their seeds already.
            for _, of_seed in groupby(runs, key=lambda run: run.seed):
                of_cell.append(tuple(sorted(of_seed, key=_horizon)))
            runs_of_seeds[cell] = tuple(of_cell)
        return runs_of_seeds

    @cached_property
    def _lrs_of(self) -> Mapping[int, tuple[float, ...]]:
        """The learning rates of each batch size, ascending."""
        lrs: dict[int, list[float]] = {}
        for batch_size, lr in self.cells:
            lrs.setdefault(batch_size, []).append(lr)
        return {batch_size: tuple(sorted(of_size)) for batch_size, of_size in lrs.items()}

    @cached_property
    def _log_metric_range(self) -> tuple[float, float]:
        """The logs of the lowest and the highest metric of all runs that did not diverge."""
        values = list[float]()
        for runs in self.cells.values():
            for run in runs:
                if not run.diverged:
                    values += run.metric
        return math.log(min(values)), math.log(max(values))


def _horizon(run: Run) -> int:
    """Give a run's horizon; a ValueError for a run without one."""
    if run.horizon is None:
        raise ValueError("trials with horizons are read from runs with horizons, and this has none")
    return run.horizon


def _nearest(runs: Sequence[Run], horizon: int) -> Run:
    """Choose the run whose horizon is nearest in the logarithm; of two equally near, the first."""
    return min(runs, key=lambda run: abs(math.log(_horizon(run) / horizon)))


def _log_shares(run: Run) -> Array:
    """Give the log of the share of its horizon at each of a run's evaluations, (n,)."""
    return np.array([math.log(step / _horizon(run)) for step in run.steps])


def _log_best_of(run: Run, log_shares: Array, sign: float) -> Array:
    """Give the log of a run's best metric so far, interpolated at shares of its horizon.

    Args:
        run: one that did not diverge.
        log_shares: the logs of the shares, (n,); before the run's first evaluation and after its
            last one the value there is taken.
        sign: 1 for a metric that is to fall, -1 for one that is to rise.
    """
    log_metric = np.array([math.log(value) for value in run.metric])
    # The metric times its sign falls as it gets better.
    log_best = sign * np.minimum.accumulate(sign * log_metric)
    return np.interp(log_shares, _log_shares(run), log_best)


def _evaluated_log_shares(run: Run, horizon: int) -> Array:
    """Give the logs of the shares of a trial's ``horizon`` at which it is evaluated, as a run was.

    Up to the run's own horizon the trial is evaluated at the same shares. With a longer horizon it
    is evaluated at the same steps, and at its end.
    """
    log_shares = _log_shares(run)
    log_ratio = math.log(horizon / _horizon(run))
    if log_ratio <= 0.0:
        return log_shares
    # Beyond the run's own end its last value holds, so one evaluation at the horizon is enough.
    return np.append(log_shares - log_ratio, 0.0)


def _log_best(runs: RunsOfSeed, horizon: int, log_shares: Array, sign: float) -> Array:
    """Give the log of a trial's best metric so far, interpolated between runs of other horizons.

    Between two horizons it is linear in log h. Where one of the two runs diverged, the one whose
    horizon is nearer is taken.

    Args:
        runs: of one cell and seed, by rising horizon.
        horizon: of the trial, in steps.
        log_shares: the logs of the shares of its horizon that are asked for, (n,).
        sign: 1 for a metric that is to fall, -1 for one that is to rise.
    """
    horizons = [_horizon(run) for run in runs]
    if horizon <= horizons[0]:
        # The metric is assumed to be as many times worse as the horizon is shorter.
        log_penalty = math.log(horizons[0] / horizon)
        return _log_best_of(runs[0], log_shares, sign) + sign * log_penalty
    if horizon >= horizons[-1]:
        # The same steps are larger shares of the longest run's horizon.
        log_ratio = math.log(horizon / horizons[-1])
        return _log_best_of(runs[-1], log_shares + log_ratio, sign)
    above = bisect_left(horizons, horizon)
    low = runs[above - 1]
    high = runs[above]
    if low.diverged or high.diverged:
        return _log_best_of(_nearest((low, high), horizon), log_shares, sign)
    weight = math.log(horizon / _horizon(low)) / math.log(_horizon(high) / _horizon(low))
    log_at_low = _log_best_of(low, log_shares, sign)
    log_at_high = _log_best_of(high, log_shares, sign)
    return (1.0 - weight) * log_at_low + weight * log_at_high


def _outcome_of_diverged_run(run: Run, horizon: int, target: Target) -> Outcome:
    """Give the end of a trial that follows one recorded run, which diverged.

    The trial has the run's metric at each step up to ``horizon``. It has diverged too, unless it
    met the target before.
    """
    end = min(run.end, horizon)
    steps_to_target = run.steps_to(target)
    if steps_to_target is not None and steps_to_target <= end:
        return Outcome(
            steps=steps_to_target,
            end=steps_to_target,
            seconds_per_step=run.seconds_per_step,
            history=run.history_to(steps_to_target),
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
    """Give the end of a trial from the best metric at its evaluations.

    Its history has the evaluations that missed the target, and ends where the target is met.

    Args:
        target: whose value is above 0.
        horizon: in steps.
        log_shares: log of the share of the horizon at each evaluation, rising, (n,).
        log_best: log of the best metric so far at each evaluation, (n,).
        seconds_per_step: of the trial.
    """
    sign = target.sign
    # A goal that is not known yet is met by no value.
    log_goal = -sign * math.inf if target.is_open else math.log(target.value)
    log_best_at: dict[int, float] = {}
    for log_share, log_value in zip(log_shares, log_best, strict=True):
        # Where two evaluations fall on one step, the later one is kept.
        log_best_at[max(1, round(horizon * math.exp(log_share)))] = float(log_value)
    missed: dict[int, float] = {}
    step_met = None
    for step, log_value in log_best_at.items():
        # The value is as good as the goal: lower for a sign of 1, higher for one of -1.
        if sign * (log_value - log_goal) <= 0.0:
            step_met = step
            # The goal may have been met between the last evaluation that missed it and this one.
            if missed:
                last_missed = max(missed)
                step_met = _crossing(
                    last_missed,
                    log_missed=missed[last_missed],
                    step=step,
                    log_met=log_value,
                    log_goal=log_goal,
                )
            break
        missed[step] = log_value
    history = [(step, math.exp(log_value)) for step, log_value in missed.items()]
    if step_met is None:
        return Outcome(
            steps=None,
            end=horizon,
            seconds_per_step=seconds_per_step,
            history=tuple(history),
            diverged=False,
        )
    history.append((step_met, target.value))
    return Outcome(
        steps=step_met,
        end=step_met,
        seconds_per_step=seconds_per_step,
        history=tuple(history),
        diverged=False,
    )


def _crossing(
    last_missed: int, log_missed: float, step: int, log_met: float, log_goal: float
) -> int:
    """Give the step at which the line between two evaluations crosses the goal, in log steps.

    Args:
        last_missed: step of the evaluation that missed the goal.
        log_missed: log of the metric there.
        step: of the next evaluation, which met it.
        log_met: log of the metric there.
        log_goal: log of the goal.
    """
    share = (log_missed - log_goal) / (log_missed - log_met)
    log_step = math.log(last_missed) + share * math.log(step / last_missed)
    crossing = round(math.exp(log_step))
    # The step that missed the goal cannot be the one that met it, however the crossing is rounded.
    return min(max(crossing, last_missed + 1), step)
