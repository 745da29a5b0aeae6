"""One search run on one recorded table: what the search may know, what it is charged, and what counts.

A :class:`Search` proposes one trial after another; each is answered from the table (:func:`bstune.trial.replay.replay`)
and charged its simulated training seconds, stopped trials included. A trial counts once it has finished: one that the
limit on the spending cuts through is left out.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal, Protocol

import numpy as np

from bstune.core.curve import CurveError, FrontierPoint, fit_curve, frontier_points, half_slope
from bstune.core.errors import ConfigError, TableError
from bstune.core.records import Budget, Status, Target, TrialResult, TrialSpec
from bstune.trial.replay import Table, replay, unusable_target

Objective = Literal["time", "steps", "curve"]
# Spendings at which searches are compared, in Benchmark.unit
OF_BEST = (5.0, 10.0, 20.0, 40.0, 60.0)
MULTIPLES: dict[Objective, tuple[float, ...]] = {
    "time": OF_BEST,
    "steps": OF_BEST,
    "curve": (1.0, 3.0, 10.0),
}
STOP_FACTOR = 2.0  # a trial is stopped once it has cost this many times the best so far
BUDGET_FACTOR = 4.0  # the first budget over what the best cell needs
WITHIN = 1.25
MAX_TRIALS = 1000
BEYOND = 5.0  # in log B: as far outside of a table's batch sizes is its B_crit sought
ROUNDING = 1.0 + 1e-9  # a limit that is met exactly still holds


@dataclass(frozen=True)
class Problem:
    """What a search knows before its first trial; nothing of what the table holds at its learning rates.

    ``budget`` is what a trial gets while nothing has reached the target. ``seconds_per_step`` is tau at each of
    ``batch_sizes``: a study measures it before its first trial, at no cost to its budget. ``noise_scale`` is the
    table's own B_crit, more than a study would know; None where the table does not determine it.
    """

    batch_sizes: tuple[
        int, ...
    ]  # those of the table, ascending; any integer between the first and the last is allowed
    lr_low: float
    lr_high: float
    target: Target
    objective: Objective  # time: the least time to target; steps: the fewest steps, costs in examples; curve: B_crit
    reference_batch_size: float  # B0 of the scaling rules
    reference_lr: float
    budget: Budget
    seconds_per_step: tuple[float, ...]
    noise_scale: float | None

    def clip_lr(self, lr: float) -> float:
        """Return the nearest learning rate within the range."""
        return min(max(lr, self.lr_low), self.lr_high)

    def tau(self, batch_size: float) -> float:
        """Return seconds per step: log tau is linear in log B between the table's batch sizes, constant beyond."""
        pairs = list(zip(self.batch_sizes, self.seconds_per_step, strict=True))
        if batch_size <= pairs[0][0]:
            return pairs[0][1]
        for (low, before), (high, after) in pairwise(pairs):
            if batch_size <= high:
                share = math.log(batch_size / low) / math.log(high / low)
                return float(before * (after / before) ** share)
        return pairs[-1][1]


class Search(Protocol):
    """A search to compare, made anew for each (problem, seed); ``finished`` are all its trials so far, in order."""

    def propose(self, finished: Sequence[TrialResult]) -> TrialSpec:
        """Return the next trial, with ``number`` = ``len(finished)``.

        ``max_steps`` None means the problem's budget; :func:`stopping_step` is the common stopping rule.
        ``resumed_from`` names a stopped trial at the same batch size, learning rate and seed: its steps are not paid
        again.
        """
        ...

    def incumbent(self, finished: Sequence[TrialResult]) -> TrialResult | None:
        """Return the trial whose batch size and learning rate would be used now, None if none reached the target."""
        return least(finished)

    def b_crit(self, finished: Sequence[TrialResult]) -> float | None:
        """Return the estimate of B_crit, by the fit to frontier points; None if there is none."""
        try:
            return fit_curve(frontier_points(finished)).critical_batch_size
        except CurveError:
            return None


@dataclass(frozen=True)
class Benchmark:
    """A problem, the table that answers it, and the truth that the answers are measured against."""

    name: str  # of the table
    table: Table
    problem: Problem
    # Batch size, lr and cost of the best cell, the median over its seeds: the fastest or, for the objective steps, the
    # one of the fewest steps. A cost is in seconds, or in examples for steps.
    best: tuple[int, float, float]
    frontier_cost: float  # the sum over batch sizes of the cheapest cell that reached the target
    b_crit: float | None  # see dense_b_crit

    @property
    def unit(self) -> float:
        """What spending is counted in: the best trial's cost, or the frontier's for ``curve``."""
        return self.frontier_cost if self.problem.objective == "curve" else self.best[2]

    def ratio(self, batch_size: int, lr: float) -> float | None:
        """Return a point's median seconds (steps) over the best cell's; None if half of its runs miss the target."""
        cost = median_time(self.table, batch_size, lr, self.problem.target)
        return (
            None
            if cost is None
            else merit(self.problem.objective, cost, batch_size)
            / merit(self.problem.objective, self.best[2], self.best[0])
        )


@dataclass(frozen=True)
class SearchRun:
    """What one search came to on one benchmark with one seed; spendings are in ``Benchmark.unit``."""

    # (spending, incumbent's time over the best) after each trial that changed the ratio; the ratio is None where the
    # incumbent's point does not reach the target in half of the table's runs
    path: tuple[tuple[float, float | None], ...]
    b_crit: tuple[
        float | None, ...
    ]  # estimate over the table's own after each multiple, for ``curve``
    trials: int  # finished within the spending
    spent: float
    complete: bool  # False if the cap on trials ended the search, not the spending


def make_benchmark(
    name: str,
    table: Table,
    target: Target,
    objective: Objective,
    lr_factor: float = 1.0,
    budget_factor: float = 1.0,
) -> Benchmark:
    """Return the benchmark that a table poses; the two factors put its reference lr and its first budget off.

    The reference is the geometric middle of the table's batch sizes and learning rates. The first budget is
    ``BUDGET_FACTOR`` times the steps, and times the examples, of the best cell, whichever takes longer: at every batch
    size at least that many times the frontier, as S* falls and B S* rises with B.
    """
    for option, factor in (("lr_factor", lr_factor), ("budget_factor", budget_factor)):
        if not (math.isfinite(factor) and factor > 0):
            raise ConfigError(
                f"sweep.experiment.{option} must be a positive number, but got {factor}"
            )
    if objective == "steps":  # hardware has no part in it
        table = replace(
            table,
            runs=tuple(replace(run, seconds_per_step=float(run.batch_size)) for run in table.runs),
        )
    times = {
        cell: time
        for cell in table.cells
        if (time := median_time(table, *cell, target)) is not None
    }
    if not times:
        why = unusable_target(table, target) or (
            f"in no cell do more than half the runs reach {target}: choose a target that is easier to reach"
        )
        raise TableError(f"{name}: {why}")
    best_cell = min(
        times, key=lambda cell: (merit(objective, times[cell], cell[0]), times[cell], cell)
    )
    best = (*best_cell, times[best_cell])
    b_crit = dense_b_crit(table, target)
    if objective == "curve" and b_crit is None:
        raise TableError(
            f"{name}: its runs do not determine B_crit at {target}, so no estimate can be compared with it: "
            "use sweep.experiment.objective=time, or a table with larger and smaller batch sizes"
        )
    sizes, rates = table.batch_sizes, table.lrs
    seconds = {
        size: statistics.median(
            run.seconds_per_step for run in table.runs if run.batch_size == size
        )
        for size in sizes
    }
    steps = BUDGET_FACTOR * budget_factor * best[2] / seconds[best[0]]
    problem = Problem(
        batch_sizes=sizes,
        lr_low=rates[0],
        lr_high=rates[-1],
        target=target,
        objective=objective,
        reference_batch_size=math.sqrt(sizes[0] * sizes[-1]),
        reference_lr=math.sqrt(rates[0] * rates[-1]) * lr_factor,
        budget=Budget(max(1, round(steps)), max(1, round(steps * best[0]))),
        seconds_per_step=tuple(seconds.values()),
        noise_scale=b_crit,
    )
    cheapest: dict[int, float] = {}
    for (batch_size, _), time in times.items():
        cheapest[batch_size] = min(time, cheapest.get(batch_size, math.inf))
    return Benchmark(name, table, problem, best, sum(cheapest.values()), b_crit)


def merit(objective: Objective, cost: float, batch_size: int) -> float:
    """Return what is minimised, by the cost of a run to the target: seconds, or steps where costs are examples."""
    return cost / batch_size if objective == "steps" else cost


def median_time(table: Table, batch_size: float, lr: float, target: Target) -> float | None:
    """Return the median time to target in seconds over the seeds; None if half of them did not reach it."""
    draws = math.lcm(*{len(runs) for runs in table.cells.values()})
    outcomes = [table.read(batch_size, lr, target, (i + 0.5) / draws) for i in range(draws)]
    middle = statistics.median(
        o.steps * o.seconds_per_step if o.steps is not None else math.inf for o in outcomes
    )
    return middle if math.isfinite(middle) else None


def dense_points(table: Table, target: Target) -> list[FrontierPoint]:
    """Return the frontier of the table's cells, each with the median over its seeds of steps to target.

    A cell of which half the runs miss the target counts as stopped, at the last step that all of them ran.
    """
    medians = []
    for number, ((batch_size, lr), runs) in enumerate(table.cells.items()):
        reached = [run.steps_to(target) for run in runs]
        steps = statistics.median(math.inf if s is None else float(s) for s in reached)
        last = max(1, round(steps)) if math.isfinite(steps) else min(run.end for run in runs)
        result = replay(table, TrialSpec(number, number, batch_size, lr, None, 0), target, last)
        status: Status = (
            "reached"
            if math.isfinite(steps)
            else "diverged"
            if any(run.diverged for run in runs)
            else "stopped"
        )
        low = 0 if status == "reached" else last
        medians.append(replace(result, status=status, steps=last, steps_low=low))
    return frontier_points(medians)


def dense_b_crit(table: Table, target: Target) -> float | None:
    """Return where the slope of log S* over log B is -1/2, by all cells; None where they do not determine it.

    Between and beyond the batch sizes S* is as far off the law fitted to them as at the nearest; a small-batch term of
    the fit is left out, as it is of a study's B_crit.
    """
    points = dense_points(table, target)
    try:
        fit = fit_curve(points)
    except CurveError:
        return None
    if fit.critical_batch_size is None:
        return None
    sizes, steps = np.array(
        [(point.batch_size, point.steps) for point in points if not point.stopped]
    ).T
    off = np.log(steps) - np.log(
        1.0 + fit.critical_batch_size / sizes + ((fit.b_opt or 0.0) / sizes) ** 2
    )
    grid = np.linspace(math.log(sizes[0]) - BEYOND, math.log(sizes[-1]) + BEYOND, 400)
    frontier = np.log1p(fit.critical_batch_size / np.exp(grid)) + np.interp(
        grid, np.log(sizes), off
    )
    return math.exp(half_slope(grid, frontier[None])[0])


def least(finished: Sequence[TrialResult], objective: Objective = "time") -> TrialResult | None:
    """Return the trial with the least time to target, or the fewest steps, the first of equals; None if none did."""
    times = [
        (merit(objective, time, trial.batch_size), trial.number, trial)
        for trial in finished
        if (time := trial.time_to_target) is not None
    ]
    return min(times)[2] if times else None


def stopping_step(problem: Problem, batch_size: int, finished: Sequence[TrialResult]) -> int:
    """Return the last step of a trial at ``batch_size`` under the rule that all general searches follow.

    While nothing has reached the target it is the budget's. After that, for ``time``, a trial ends once it has cost
    ``STOP_FACTOR`` times the seconds of the fastest (for ``steps``, the steps of the one with the fewest). For
    ``curve`` that would cut off both ends of the frontier: there a trial ends once it has taken as many times the steps
    of a trial at no larger a batch size, or the examples of one at no smaller: S* falls and B S* rises with B. No trial
    runs past the budget.
    """
    budget = problem.budget.last_step(batch_size)
    reached = [trial for trial in finished if trial.reached]
    best = least(reached, problem.objective)
    if best is None or best.time_to_target is None:
        return budget
    if problem.objective == "time":
        steps = best.time_to_target / problem.tau(batch_size)
    elif problem.objective == "steps":
        steps = float(best.steps)
    else:
        steps = min(
            t.steps if t.batch_size <= batch_size else t.examples / batch_size for t in reached
        )
    return max(1, min(budget, math.floor(STOP_FACTOR * steps * ROUNDING)))


def run_search(
    search: Search, benchmark: Benchmark, multiples: Sequence[float], max_trials: int = MAX_TRIALS
) -> SearchRun:
    """Let a new search spend up to the largest of the ascending ``multiples`` of ``Benchmark.unit``.

    B_crit is asked for at each multiple. After ``max_trials`` a search ends and keeps what it has found.
    """
    finished: list[TrialResult] = []
    path: list[tuple[float, float | None]] = []
    estimates: list[float | None] = []
    spent = 0.0
    while True:
        trial = (
            _answer(search.propose(finished), benchmark, finished)
            if len(finished) < max_trials
            else None
        )
        after = spent + trial.train_seconds if trial is not None else math.inf
        while (
            len(estimates) < len(multiples)
            and after > multiples[len(estimates)] * benchmark.unit * ROUNDING
        ):
            estimates.append(_estimate(search, benchmark, finished))
        if trial is None or len(estimates) == len(multiples):
            break
        finished.append(trial)
        spent = after
        incumbent = search.incumbent(finished)
        if incumbent is None:
            continue
        ratio = benchmark.ratio(incumbent.batch_size, incumbent.lr)
        if not path or path[-1][1] != ratio:
            path.append((spent / benchmark.unit, ratio))
    return SearchRun(
        tuple(path), tuple(estimates), len(finished), spent / benchmark.unit, trial is not None
    )


def _answer(spec: TrialSpec, benchmark: Benchmark, finished: Sequence[TrialResult]) -> TrialResult:
    if spec.number != len(finished):
        raise ConfigError(
            f"a search must number its trials from 0: expected {len(finished)}, but got {spec.number}"
        )
    resumed_from = None
    if spec.resumed_from is not None:
        resumed_from = (
            finished[spec.resumed_from] if 0 <= spec.resumed_from < len(finished) else None
        )
        point = spec.batch_size, spec.lr, spec.seed
        if (
            resumed_from is None
            or (resumed_from.batch_size, resumed_from.lr, resumed_from.seed) != point
            or resumed_from.status != "stopped"
        ):
            raise ConfigError(
                f"trial {spec.number} continues trial {spec.resumed_from}, which is no stopped trial at batch size, "
                f"learning rate and seed {point}"
            )
    problem = benchmark.problem
    last = problem.budget.last_step(spec.batch_size) if spec.max_steps is None else spec.max_steps
    done = 0 if resumed_from is None else resumed_from.steps
    if last <= done:
        raise ConfigError(
            f"trial {spec.number} needs max_steps past the {done} steps it has, but got {last}"
        )
    return replay(benchmark.table, spec, problem.target, last, resumed_from)


def _estimate(
    search: Search, benchmark: Benchmark, finished: Sequence[TrialResult]
) -> float | None:
    if benchmark.problem.objective != "curve" or benchmark.b_crit is None:
        return None
    b_crit = search.b_crit(finished)
    return None if b_crit is None else b_crit / benchmark.b_crit


def ratio_after(path: Sequence[tuple[float, float | None]], multiple: float) -> float:
    """Return the incumbent's time over the best after spending ``multiple``; infinite if none reached the target."""
    ratio = math.inf
    for spent, value in path:
        if spent <= multiple * ROUNDING:
            ratio = math.inf if value is None else value
    return ratio


def spending_within(path: Sequence[tuple[float, float | None]], within: float = WITHIN) -> float:
    """Return the spending at which the ratio is first at most ``within``; infinite if it never is."""
    return next(
        (spent for spent, ratio in path if ratio is not None and ratio <= within * ROUNDING),
        math.inf,
    )


def factor(ratio: float | None) -> float:
    """Return by what factor an estimate is off, max(x, 1/x); infinite where there is none."""
    return math.inf if ratio is None or ratio <= 0.0 else max(ratio, 1.0 / ratio)


def percentile(values: Sequence[float], share: float) -> float:
    """Return the least of ``values`` that at least ``share`` of them do not exceed; infinite ones count as largest."""
    return sorted(values)[max(0, math.ceil(share * len(values) / ROUNDING) - 1)]
