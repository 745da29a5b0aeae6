"""A search against a replay table: what it may know, what it spends, and what counts.

A :class:`Search` is asked for one trial after another and is answered from the table (:func:`bstune.trial.replay.replay`).
It is charged the simulated training seconds of every trial, stopped ones included. A trial counts from when it has
finished: one that a limit on the spending cuts through is not in.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal, Protocol

from bstune.core.curve import CurveError, FrontierPoint, fit_curve, frontier_points
from bstune.core.errors import ConfigError, TableError
from bstune.core.records import Budget, Status, Target, TrialResult, TrialSpec
from bstune.trial.replay import Table, never_reached, replay

Objective = Literal["time", "curve"]
MULTIPLES: dict[Objective, tuple[float, ...]] = {"time": (5.0, 10.0, 20.0, 40.0, 60.0), "curve": (1.0, 3.0, 10.0)}
STOP_FACTOR = 2.0  # a trial is stopped once it has cost this many times the best so far
BUDGET_FACTOR = 4.0  # the first budget over what the best cell needs
WITHIN = 1.25
MOST_TRIALS = 1000
ROUNDING = 1.0 + 1e-9  # a limit that is met exactly is kept


@dataclass(frozen=True)
class Problem:
    """What a search is told before its first trial; nothing of what the table holds at its learning rates.

    Args:
        batch_sizes: those of the table, ascending; any integer between the first and the last may be tried.
        lr_low, lr_high: range of the learning rates.
        target: what to reach.
        objective: ``time`` (the least time to target) or ``curve`` (B_crit).
        reference_batch_size, reference_lr: B0 and lr0 of the scaling rules.
        budget: the settings' first budget: what a trial is given while nothing has reached the target.
        seconds_per_step: tau at each of ``batch_sizes``: a study measures it before its first trial, and not at the
            expense of its budget.
        noise_scale: for the rules that take one, B_crit of the table's dense fit: more than a study would know; None
            where the table does not determine it.
    """

    batch_sizes: tuple[int, ...]
    lr_low: float
    lr_high: float
    target: Target
    objective: Objective
    reference_batch_size: float
    reference_lr: float
    budget: Budget
    seconds_per_step: tuple[float, ...]
    noise_scale: float | None

    def clip_lr(self, lr: float) -> float:
        """Return the learning rate of the range that is nearest."""
        return min(max(lr, self.lr_low), self.lr_high)

    def tau(self, batch_size: float) -> float:
        """Return seconds per step, log tau linear in log B between the batch sizes of the table, its ends beyond."""
        pairs = list(zip(self.batch_sizes, self.seconds_per_step, strict=True))
        if batch_size <= pairs[0][0]:
            return pairs[0][1]
        for (low, before), (high, after) in pairwise(pairs):
            if batch_size <= high:
                share = math.log(batch_size / low) / math.log(high / low)
                return float(before * (after / before) ** share)
        return pairs[-1][1]


class Search(Protocol):
    """A search in the contest; made anew for each (problem, seed).

    ``finished`` are all trials so far, in order. Its own trials are told to a search nowhere else.
    """

    def propose(self, finished: Sequence[TrialResult]) -> TrialSpec:
        """Return the next trial.

        ``number`` is ``len(finished)``. ``limit`` is the last step, None for the problem's budget: a search stops
        itself, :func:`stopping_step` is the common rule. A ``parent`` is one of ``finished``, at the same batch size,
        learning rate and seed; its steps are not paid again.
        """
        ...

    def incumbent(self, finished: Sequence[TrialResult]) -> TrialResult | None:
        """Return the trial whose batch size and learning rate would be used now, None if none reached the target."""
        return fastest(finished)

    def b_crit(self, finished: Sequence[TrialResult]) -> float | None:
        """Return the estimate of B_crit, None if there is none."""
        return critical(frontier_points(finished))


@dataclass(frozen=True)
class Task:
    """A problem, the table that answers it, and the truth that the answers are measured against.

    Args:
        name: of the table.
        table: the recorded runs.
        problem: what a search is told.
        best: batch size, learning rate and seconds of the table's fastest cell, the median over its seeds.
        frontier_seconds: the frontier's cost: the sum over batch sizes of the fastest cell that reached the target.
        b_crit: of the dense fit to the median runs of all cells; None where they do not determine it.
    """

    name: str
    table: Table
    problem: Problem
    best: tuple[int, float, float]
    frontier_seconds: float
    b_crit: float | None

    @property
    def unit(self) -> float:
        """What spending is counted in, in seconds: the best trial's cost, or the frontier's for ``curve``."""
        return self.best[2] if self.problem.objective == "time" else self.frontier_seconds


@dataclass(frozen=True)
class Played:
    """How one search did on one task with one seed.

    Args:
        path: (spending in ``Task.unit``, incumbent's time over the best) after each trial that changed the ratio;
            None where the incumbent's point does not reach the target in half of the table's runs.
        b_crit: estimate over the dense fit after each of the multiples, for the objective ``curve``; None: no estimate.
        trials: those that finished within the spending.
        spent: what they cost, in ``Task.unit``.
        complete: False if the search was ended by the cap on trials, not by the spending.
    """

    path: tuple[tuple[float, float | None], ...]
    b_crit: tuple[float | None, ...]
    trials: int
    spent: float
    complete: bool


def make_task(
    name: str, table: Table, target: Target, objective: Objective, lr_factor: float = 1.0, budget_factor: float = 1.0
) -> Task:
    """Return the task that a table poses.

    The reference is the geometric middle of the table's batch sizes and learning rates. The first budget is
    ``BUDGET_FACTOR`` times the steps, and times the examples, of the best cell, whichever takes longer: at no batch
    size less than that many times the frontier, as S* falls and B S* rises with B.

    Args:
        name: of the table.
        table: the recorded runs.
        target: what to reach.
        objective: ``time`` or ``curve``.
        lr_factor: the reference learning rate is off by this factor.
        budget_factor: so is the first budget.

    Raises:
        TableError: if in no cell more than half the runs reach the target, or ``curve`` is asked of a table that does
            not determine B_crit.
        ConfigError: for a factor that is not positive.
    """
    for option, factor in (("--lr-factor", lr_factor), ("--budget-factor", budget_factor)):
        if not (math.isfinite(factor) and factor > 0):
            raise ConfigError(f"{option} must be a positive number, but got {factor}")
    best = table.best(target)
    if best is None:
        why = never_reached(table, target) or (
            f"in no cell do more than half the runs reach {target}: choose a target that is easier to reach"
        )
        raise TableError(f"{name}: {why}")
    b_crit = critical(dense_points(table, target))
    if objective == "curve" and b_crit is None:
        raise TableError(
            f"{name}: its runs do not determine B_crit at {target}, so that no estimate can be compared with it: "
            "use --objective time, or a table with larger and smaller batch sizes"
        )
    sizes, rates = table.batch_sizes, table.lrs
    seconds = {size: _seconds_per_step(table, size) for size in sizes}
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
    return Task(name, table, problem, best, _frontier_seconds(table, target), b_crit)


def _seconds_per_step(table: Table, batch_size: int) -> float:
    return statistics.median(run.seconds_per_step for run in table.runs if run.batch_size == batch_size)


def _frontier_seconds(table: Table, target: Target) -> float:
    cheapest: dict[int, float] = {}
    for batch_size, lr in table.cells:
        seconds = table.median_time(batch_size, lr, target)
        if seconds is not None:
            cheapest[batch_size] = min(seconds, cheapest.get(batch_size, math.inf))
    return sum(cheapest.values())


def dense_points(table: Table, target: Target) -> list[FrontierPoint]:
    """Return the frontier of the table's cells, each with the median over its seeds of steps to target.

    A cell of which half the runs miss the target counts as censored, at the last step that all of them ran.
    """
    medians = []
    for number, ((batch_size, lr), runs) in enumerate(table.cells.items()):
        reached = [run.steps_to(target) for run in runs]
        steps = statistics.median(math.inf if s is None else float(s) for s in reached)
        last = max(1, round(steps)) if math.isfinite(steps) else min(run.end for run in runs)
        result = replay(table, TrialSpec(number, number, batch_size, lr, None, 0), target, last)
        status: Status = (
            "reached" if math.isfinite(steps) else "diverged" if any(run.diverged for run in runs) else "censored"
        )
        low = 0 if status == "reached" else last
        medians.append(replace(result, status=status, steps=last, steps_low=low))
    return frontier_points(medians)


def critical(points: Sequence[FrontierPoint]) -> float | None:
    """Return B_crit of the fit; None where there are too few points for one, or they do not determine it."""
    try:
        return fit_curve(points).b_crit
    except CurveError:
        return None


def fastest(finished: Sequence[TrialResult]) -> TrialResult | None:
    """Return the trial with the least time to target, the first of equals; None if none reached it."""
    times = [(time, trial.number, trial) for trial in finished if (time := trial.time_to_target) is not None]
    return min(times)[2] if times else None


def stopping_step(problem: Problem, batch_size: int, finished: Sequence[TrialResult]) -> int:
    """Return the last step of a trial at ``batch_size`` under the rule that all general searches follow.

    While nothing has reached the target it is the budget's. After that, for ``time``, a trial ends once it has cost
    ``STOP_FACTOR`` times the seconds of the fastest. For ``curve`` that would cut both ends of the frontier off: there
    a trial ends once it has taken as many times the steps of a trial at no larger a batch size, or the examples of one
    at no smaller: S* falls and B S* rises with B. No trial runs past the budget.
    """
    budget = problem.budget.last_step(batch_size)
    reached = [trial for trial in finished if trial.reached]
    best = fastest(reached)
    if best is None or best.time_to_target is None:
        return budget
    if problem.objective == "time":
        steps = best.time_to_target / problem.tau(batch_size)
    else:
        steps = min(t.steps if t.batch_size <= batch_size else t.examples / batch_size for t in reached)
    return max(1, min(budget, math.floor(STOP_FACTOR * steps * ROUNDING)))


def play(search: Search, task: Task, multiples: Sequence[float], most_trials: int = MOST_TRIALS) -> Played:
    """Let a search spend up to the largest of ``multiples`` of ``Task.unit``.

    Args:
        search: new, for ``task.problem``.
        task: what is searched.
        multiples: of the spending at which B_crit is asked for, ascending.
        most_trials: a search is ended after so many, whatever it has spent; it keeps what it had then.

    Raises:
        ConfigError: if a search continues a trial that does not exist, or at another point.
    """
    finished: list[TrialResult] = []
    path: list[tuple[float, float | None]] = []
    estimates: list[float | None] = []
    spent = 0.0
    while True:
        trial = _answer(search.propose(finished), task, finished) if len(finished) < most_trials else None
        after = spent + trial.train_seconds if trial is not None else math.inf
        while len(estimates) < len(multiples) and after > multiples[len(estimates)] * task.unit * ROUNDING:
            estimates.append(_estimate(search, task, finished))
        if trial is None or len(estimates) == len(multiples):
            break
        finished.append(trial)
        spent = after
        incumbent = search.incumbent(finished)
        if incumbent is None:
            continue
        seconds = task.table.median_time(incumbent.batch_size, incumbent.lr, task.problem.target)
        ratio = None if seconds is None else seconds / task.best[2]
        if not path or path[-1][1] != ratio:
            path.append((spent / task.unit, ratio))
    return Played(tuple(path), tuple(estimates), len(finished), spent / task.unit, trial is not None)


def _answer(spec: TrialSpec, task: Task, finished: Sequence[TrialResult]) -> TrialResult:
    if spec.number != len(finished):
        raise ConfigError(f"a search must number its trials from 0: expected {len(finished)}, but got {spec.number}")
    resumed_from = None
    if spec.resumed_from is not None:
        resumed_from = finished[spec.resumed_from] if 0 <= spec.resumed_from < len(finished) else None
        point = spec.batch_size, spec.lr, spec.seed
        if (
            resumed_from is None
            or (resumed_from.batch_size, resumed_from.lr, resumed_from.seed) != point
            or resumed_from.status != "censored"
        ):
            raise ConfigError(
                f"trial {spec.number} continues trial {spec.resumed_from}, which is no stopped trial at batch size, "
                f"learning rate and seed {point}"
            )
    last = task.problem.budget.last_step(spec.batch_size) if spec.max_steps is None else spec.max_steps
    done = 0 if resumed_from is None else resumed_from.steps
    if last <= done:
        raise ConfigError(f"trial {spec.number} needs a limit past the {done} steps it has, but got {last}")
    return replay(task.table, spec, task.problem.target, last, resumed_from)


def _estimate(search: Search, task: Task, finished: Sequence[TrialResult]) -> float | None:
    if task.problem.objective != "curve" or task.b_crit is None:
        return None
    found = search.b_crit(finished)
    return None if found is None else found / task.b_crit


def ratio_after(path: Sequence[tuple[float, float | None]], multiple: float) -> float:
    """Return the incumbent's time over the best after spending ``multiple``; infinite if none reached the target."""
    ratio = math.inf
    for spent, value in path:
        if spent <= multiple * ROUNDING:
            ratio = math.inf if value is None else value
    return ratio


def spending_within(path: Sequence[tuple[float, float | None]], within: float = WITHIN) -> float:
    """Return the spending at which the ratio is first at most ``within``; infinite if it never is."""
    return next((spent for spent, ratio in path if ratio is not None and ratio <= within * ROUNDING), math.inf)


def factor(ratio: float | None) -> float:
    """Return by what factor an estimate is off, max(x, 1/x); infinite where there is none."""
    return math.inf if ratio is None or ratio <= 0.0 else max(ratio, 1.0 / ratio)


def percentile(values: Sequence[float], share: float) -> float:
    """Return the least of ``values`` that at least ``share`` of them do not exceed; infinite ones count as largest."""
    return sorted(values)[max(0, math.ceil(share * len(values) / ROUNDING) - 1)]
