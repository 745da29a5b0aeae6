"""Recorded runs whose schedules ended with them, interpolated over the schedule's length, too.

What is interpolated is the log of the best metric so far, at each share of the schedule: linear in
log length between the two nearest lengths of a cell (a batch size and a rate), then bilinear in
(log B, log lr) between the nearest cells. The target is reached where the line between two
evaluations crosses it, in log steps. (Steps to the target are not interpolated: each run reaches it
at the end of its own schedule, or not at all.)

A schedule longer than all of a cell has the longest one's values at the same steps, and its last
value from there on. One shorter than all has the shortest one's values at the same shares, as many
times worse as it is shorter, within the recorded values. Where the nearest run diverged, so does
the trial; other runs that diverged do not count.
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
from bstune.trial.recorded_run import Outcome, Run, around

Array = NDArray[np.float64]


@dataclass(frozen=True)
class LengthTable:
    """Recorded runs of several schedule lengths, all metrics over 0.

    Args:
        runs: each with a ``horizon``.
    """

    runs: tuple[Run, ...]

    @cached_property
    def cells(self) -> Mapping[float, Mapping[float, tuple[tuple[Run, ...], ...]]]:
        """By batch size and rate, ascending: the runs of each seed, by rising length."""
        cells: dict[float, dict[float, tuple[tuple[Run, ...], ...]]] = {}
        ordered = sorted(self.runs, key=lambda run: (run.batch_size, run.lr, run.seed, length(run)))
        for (size, lr), of_cell in groupby(ordered, key=lambda run: (run.batch_size, run.lr)):
            seeds = [tuple(runs) for _, runs in groupby(of_cell, key=lambda run: run.seed)]
            cells.setdefault(size, {})[lr] = tuple(seeds)
        return cells

    @cached_property
    def log_range(self) -> tuple[float, float]:
        """Logs of the least and the largest metric of all runs that did not diverge."""
        values = [value for run in self.runs if not run.diverged for value in run.metric]
        return math.log(min(values)), math.log(max(values))

    def outcome_at(
        self, batch_size: float, lr: float, steps: int, quantile: float, target: Target
    ) -> Outcome:
        """How a trial ends whose schedule ends after ``steps``.

        ``quantile``, from 0 to 1, chooses one seed of each cell's list.
        """
        cells = []
        for size, size_weight in around(tuple(self.cells), batch_size):
            of_size = self.cells[size]
            for rate, rate_weight in around(tuple(of_size), lr):
                seeds = of_size[rate]
                chosen = seeds[min(int(quantile * len(seeds)), len(seeds) - 1)]
                cells.append((chosen, size_weight * rate_weight))
        nearest = _nearest(max(cells, key=lambda cell: cell[1])[0], steps)
        if nearest.diverged:
            return _diverged_outcome(nearest, steps, target)
        usable = [cell for cell in cells if not _nearest(cell[0], steps).diverged]
        total = sum(weight for _, weight in usable)
        log_shares = _log_shares_of(nearest, steps)
        log_best = np.zeros(log_shares.size)
        log_seconds = 0.0
        for runs, weight in usable:
            log_best += weight / total * _log_best(runs, steps, log_shares, target)
            log_seconds += weight / total * math.log(runs[0].seconds_per_step)
        log_best = np.clip(log_best, *self.log_range)
        log_values: dict[int, float] = {}
        for log_share, value in zip(log_shares, log_best, strict=True):
            log_values[max(1, round(steps * math.exp(log_share)))] = float(value)
        return _until_reached(log_values, steps, target, math.exp(log_seconds))


def length(run: Run) -> int:
    """The length of a run's schedule; ValueError for a run whose schedule has no end."""
    if run.horizon is None:
        raise ValueError("the run's schedule has no end")
    return run.horizon


def _nearest(runs: Sequence[Run], steps: int) -> Run:
    """The run of the nearest length in the logarithm; of two equally near ones the shorter."""
    return min(runs, key=lambda run: abs(math.log(length(run) / steps)))


def _diverged_outcome(run: Run, steps: int, target: Target) -> Outcome:
    """A trial that follows a run which diverged: step by step, up to its own last step."""
    reached = run.steps_to(target)
    end = min(run.end, steps)
    if reached is not None and reached <= end:
        end = reached
    else:
        reached = None
    return Outcome(
        steps=reached,
        end=end,
        seconds_per_step=run.seconds_per_step,
        history=run.history(end),
        diverged=reached is None,
    )


def _log_shares_of(run: Run, steps: int) -> Array:
    """Log shares of a schedule at which a trial is evaluated, (n,).

    They are a run's own or, for a longer schedule, its steps and the end.
    """
    log_shares = np.log(np.array(run.steps) / length(run))
    log_ratio = math.log(steps / length(run))
    return np.append(log_shares - log_ratio, 0.0) if log_ratio > 0.0 else log_shares


def _log_best(runs: Sequence[Run], steps: int, log_shares: Array, target: Target) -> Array:
    """Log of the best metric so far of one cell and seed, at log shares of a schedule, (n,)."""
    sign = 1.0 if target.mode == "min" else -1.0

    def of_run(run: Run, at: Array) -> Array:
        log_best = sign * np.minimum.accumulate(sign * np.log(run.metric))
        return np.interp(at, np.log(np.array(run.steps) / length(run)), log_best)

    lengths = [length(run) for run in runs]
    if steps <= lengths[0]:
        return of_run(runs[0], log_shares) + sign * math.log(lengths[0] / steps)
    if steps >= lengths[-1]:
        return of_run(runs[-1], log_shares + math.log(steps / lengths[-1]))
    place = bisect_left(lengths, steps)
    low, high = runs[place - 1], runs[place]
    if low.diverged or high.diverged:
        return of_run(_nearest((low, high), steps), log_shares)
    weight = math.log(steps / length(low)) / math.log(length(high) / length(low))
    return (1.0 - weight) * of_run(low, log_shares) + weight * of_run(high, log_shares)


def _until_reached(
    log_values: Mapping[int, float], steps: int, target: Target, seconds_per_step: float
) -> Outcome:
    """The outcome of log metrics at rising steps: it ends where they cross the target."""
    sign = 1.0 if target.mode == "min" else -1.0
    # Options refuse a search for the best metric where schedules end with their trials.
    goal = target.goal or math.inf
    log_goal = math.log(goal)
    history: list[tuple[int, float]] = []
    missed: tuple[int, float] | None = None
    reached = None
    for step, log_value in log_values.items():
        # In logs a recorded goal is met to the bit.
        if sign * (log_value - log_goal) <= 0.0:
            reached = step
            if missed is not None:
                share = (missed[1] - log_goal) / (missed[1] - log_value)
                crossing = round(missed[0] * math.exp(share * math.log(step / missed[0])))
                reached = min(max(crossing, missed[0] + 1), step)
            history.append((reached, goal))
            break
        missed = step, log_value
        history.append((step, math.exp(log_value)))
    return Outcome(
        steps=reached,
        end=reached or steps,
        seconds_per_step=seconds_per_step,
        history=tuple(history),
        diverged=False,
    )
