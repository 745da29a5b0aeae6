"""One search run on one recorded table: what it knows beforehand, its costs, and what counts.

A :class:`Search` proposes one trial after another; each is answered from the table
(:func:`bstune.trial.replay.replay`) and charged its simulated training seconds, stopped trials
included. A trial counts once it has finished. The one that would end past the limit on the spending
is left out.
"""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal, Protocol

import numpy as np

from bstune.core.curve import CurveError, FrontierPoint, fit_curve, frontier_points, half_slope
from bstune.core.errors import ConfigError, TableError
from bstune.core.records import Budget, Status, Target, TrialResult, TrialSpec
from bstune.trial.recorded_run import Outcome, Run
from bstune.trial.replay import Table, replay, unusable_target

SearchObjective = Literal["time", "steps", "curve"]
# Batch size, learning rate and cost.
BestCell = tuple[int, float, float]
# Spendings at which searches are compared, in Benchmark.unit. For the first two objectives that is
# the best cell's cost, for ``curve`` the cost of the whole frontier, which is larger.
OF_BEST = (5.0, 10.0, 20.0, 40.0, 60.0)
MULTIPLES_OF_UNIT: dict[SearchObjective, tuple[float, ...]] = {
    "time": OF_BEST,
    "steps": OF_BEST,
    "curve": (1.0, 3.0, 10.0),
}
# A trial is stopped once it has cost this many times the best so far.
STOP_FACTOR = 2.0
# A trial's first budget, as a multiple of what the best cell needs.
BUDGET_FACTOR = 4.0
# A search is as good as the best from this ratio to it on.
WITHIN = 1.25
MAX_TRIALS = 1000
# B_crit is sought so far outside of a table's batch sizes, in log B.
SOUGHT_BEYOND = 5.0
# A limit that is met exactly still holds, whatever its arithmetic has rounded.
FOR_ROUNDING = 1.0 + 1e-9


@dataclass(frozen=True)
class Problem:
    """All that a search knows before its first trial: nothing of the table's runs.

    ``budget`` is that of a trial while nothing has reached the target. ``seconds_per_step`` is tau
    at each of ``batch_sizes``: a study measures it before its first trial, at no cost to its
    budget. ``noise_scale`` is the table's own B_crit, more than a study would know; None where the
    table does not determine it.
    """

    # Those of the table, ascending; any integer between the first and the last is allowed.
    batch_sizes: tuple[int, ...]
    lr_low: float
    lr_high: float
    target: Target
    # time: the least time to target; steps: the fewest steps, costs in examples; curve: B_crit.
    objective: SearchObjective
    # B0 of the scaling rules.
    reference_batch_size: float
    reference_lr: float
    budget: Budget
    seconds_per_step: tuple[float, ...]
    noise_scale: float | None

    def clip_lr(self, lr: float) -> float:
        """Give the nearest learning rate within the range."""
        return min(max(lr, self.lr_low), self.lr_high)

    def tau(self, batch_size: float) -> float:
        """Give the seconds of a step at a batch size.

        log tau is linear in log B between the table's batch sizes, and constant beyond them.
        """
        pairs = list(zip(self.batch_sizes, self.seconds_per_step, strict=True))
        if batch_size <= pairs[0][0]:
            return pairs[0][1]
        for (low, before), (high, after) in pairwise(pairs):
            if batch_size <= high:
                share = math.log(batch_size / low) / math.log(high / low)
                return float(before * (after / before) ** share)
        return pairs[-1][1]


class Search(Protocol):
    """A search to compare, made anew for each problem and seed.

    ``finished`` are all of its trials so far, in order.
    """

    def propose(self, finished: Sequence[TrialResult]) -> TrialSpec:
        """Choose the next trial, with ``number`` = ``len(finished)``.

        ``max_steps`` None means the problem's budget; :func:`stopping_step` is the common stopping
        rule. ``resumed_from`` names a stopped trial at the same batch size, learning rate and seed:
        its steps are not paid again.
        """
        ...

    def incumbent(self, finished: Sequence[TrialResult]) -> TrialResult | None:
        """Name the trial whose point would be used now; None if none reached the target."""
        return least(finished)

    def b_crit(self, finished: Sequence[TrialResult]) -> float | None:
        """Estimate B_crit by the fit to frontier points; None if there is none."""
        try:
            return fit_curve(frontier_points(finished)).critical_batch_size
        except CurveError:
            return None


@dataclass(frozen=True)
class Benchmark:
    """A problem, the table of recorded runs that answers it, and the truth to compare with."""

    # The table's name.
    name: str
    table: Table
    problem: Problem
    # Batch size, learning rate and cost of the best cell: the fastest or, for the objective steps,
    # that of the fewest steps. The cost is the median over its seeds, in seconds, or in examples
    # for steps.
    best: BestCell
    # The sum over batch sizes of the cost of the cheapest cell that reached the target.
    frontier_cost: float
    # The table's own B_crit, from all of its cells: see dense_b_crit.
    b_crit: float | None

    @property
    def unit(self) -> float:
        """The unit of spending: what the best cell costs.

        For ``curve`` it is what the cheapest cells of all batch sizes cost together.
        """
        if self.problem.objective == "curve":
            return self.frontier_cost
        _batch_size, _lr, cost = self.best
        return cost

    def ratio(self, batch_size: int, lr: float) -> float | None:
        """Give a point's median seconds (or steps) to target over the best cell's.

        None if half of the point's runs miss the target.
        """
        cost = median_time(self.table, batch_size, lr, self.problem.target)
        if cost is None:
            return None
        best_size, _lr, best_cost = self.best
        objective = self.problem.objective
        return merit(objective, cost, batch_size) / merit(objective, best_cost, best_size)


@dataclass(frozen=True)
class SearchRun:
    """The results of a search on a benchmark with one seed; spendings are in ``Benchmark.unit``."""

    # (spending, incumbent's time over the best) after each trial that changed the ratio. The ratio
    # is None if the incumbent's point does not reach the target in half of the table's runs.
    path: tuple[tuple[float, float | None], ...]
    # For ``curve``, the estimate of B_crit over the table's own after each multiple.
    b_crit: tuple[float | None, ...]
    # The number of trials that finished within the spending.
    trials: int
    spent: float
    # False if the cap on trials ended the search, not the spending.
    complete: bool


def make_benchmark(
    name: str,
    table: Table,
    target: Target,
    objective: SearchObjective,
    lr_factor: float = 1.0,
    budget_factor: float = 1.0,
) -> Benchmark:
    """Make the benchmark of a table.

    The reference, at which a search starts, is the geometric middle of the table's batch sizes and
    learning rates. A trial's first budget is ``BUDGET_FACTOR`` times the steps, and as many times
    the examples, of the best cell, whichever takes longer. So every batch size could reach the
    target in it, as the fewest steps fall and the fewest examples rise with the batch size.
    ``lr_factor`` and ``budget_factor`` multiply the reference's learning rate and that budget, for
    a harder problem. TableError for a table that cannot answer the objective.
    """
    for option, value in {"lr_factor": lr_factor, "budget_factor": budget_factor}.items():
        if not (math.isfinite(value) and value > 0):
            raise ConfigError(
                f"sweep.experiment.{option} must be a positive number, but got {value}"
            )
    # Under this objective a trial's cost is its examples, whatever its seconds.
    if objective == "steps":
        table = _in_examples(table)
    times = _times_to_target(table, target)
    if not times:
        why = unusable_target(table, target) or (
            f"in no cell do more than half the runs reach {target}: choose a target that is easier "
            "to reach"
        )
        raise TableError(f"{name}: {why}")
    best = _best_cell(times, objective)
    b_crit = dense_b_crit(table, target)
    if objective == "curve" and b_crit is None:
        raise TableError(
            f"{name}: its runs do not determine B_crit at {target}, so no estimate can be compared "
            "with it: use sweep.experiment.objective=time, or a table with larger and smaller "
            "batch sizes"
        )
    # The least time of each batch size; the frontier costs their sum.
    cheapest = dict[int, float]()
    for (batch_size, _), time in times.items():
        cheapest[batch_size] = min(time, cheapest.get(batch_size, math.inf))
    return Benchmark(
        name=name,
        table=table,
        problem=_make_problem(table, target, objective, best, b_crit, lr_factor, budget_factor),
        best=best,
        frontier_cost=sum(cheapest.values()),
        b_crit=b_crit,
    )


def _make_problem(
    table: Table,
    target: Target,
    objective: SearchObjective,
    best: BestCell,
    b_crit: float | None,
    lr_factor: float,
    budget_factor: float,
) -> Problem:
    """Make the problem of a table: all that a search knows before its first trial.

    Args:
        table: the recorded runs.
        target: to reach.
        objective: what the search minimises, or the curve that it estimates.
        best: batch size, learning rate and cost of the table's best cell.
        b_crit: the table's own; None where it determines none.
        lr_factor: multiplies the reference's learning rate, for a harder problem.
        budget_factor: multiplies a trial's first budget, for a harder problem.
    """
    sizes = table.batch_sizes
    rates = table.lrs
    seconds = {size: _seconds_per_step(table, size) for size in sizes}
    best_size, _lr, best_cost = best
    # A step's cost is in ``seconds``, so this is a number of steps.
    budget_steps = BUDGET_FACTOR * budget_factor * best_cost / seconds[best_size]
    return Problem(
        batch_sizes=sizes,
        lr_low=rates[0],
        lr_high=rates[-1],
        target=target,
        objective=objective,
        reference_batch_size=math.sqrt(sizes[0] * sizes[-1]),
        reference_lr=math.sqrt(rates[0] * rates[-1]) * lr_factor,
        budget=Budget(
            steps=max(1, round(budget_steps)), examples=max(1, round(budget_steps * best_size))
        ),
        seconds_per_step=tuple(seconds.values()),
        # A rule that takes a noise scale gets B_crit itself, which a noise scale estimates.
        noise_scale=b_crit,
    )


@dataclass(frozen=True)
class _TableInExamples(Table):
    """A table in which a step costs the examples of the point's own batch size, recorded or not."""

    # The table that answers.
    recorded: Table

    def outcome(self, batch_size: float, lr: float, seed: int, target: Target) -> Outcome:
        """Give the outcome of a trial, with the examples of a step in place of its seconds."""
        outcome = self.recorded.outcome(batch_size, lr, seed, target)
        return replace(outcome, seconds_per_step=float(batch_size))

    def read(self, batch_size: float, lr: float, target: Target, share: float) -> Outcome:
        """Give the outcome of one run near a point, with a step's examples in place of its seconds.

        ``share``, from 0 to 1, says how far down the list of a cell's runs that run lies.
        """
        outcome = self.recorded.read(batch_size, lr, target, share)
        return replace(outcome, seconds_per_step=float(batch_size))


def _in_examples(table: Table) -> Table:
    """Give the table with examples in place of seconds, for the objective ``steps``."""
    runs = list[Run]()
    for run in table.runs:
        runs.append(replace(run, seconds_per_step=float(run.batch_size)))
    return _TableInExamples(tuple(runs), table)


def _times_to_target(table: Table, target: Target) -> dict[tuple[int, float], float]:
    """Give the median time to target of each cell that reaches it, by batch size and rate.

    It is in seconds, or in examples in a table of the objective ``steps``.
    """
    times = dict[tuple[int, float], float]()
    for batch_size, lr in table.cells:
        time = median_time(table, batch_size, lr, target)
        if time is not None:
            times[batch_size, lr] = time
    return times


def _best_cell(times: Mapping[tuple[int, float], float], objective: SearchObjective) -> BestCell:
    """Give the best cell by the objective, from the cells' times.

    Of equally good cells it is the one of least cost, then the smallest.
    """

    def order(cell: tuple[int, float]) -> tuple[float, float, tuple[int, float]]:
        batch_size, _lr = cell
        return merit(objective, times[cell], batch_size), times[cell], cell

    best = min(times, key=order)
    batch_size, lr = best
    return batch_size, lr, times[best]


def _seconds_per_step(table: Table, batch_size: int) -> float:
    """Give the median seconds per step of the runs at a batch size."""
    of_size = list[float]()
    for run in table.runs:
        if run.batch_size == batch_size:
            of_size.append(run.seconds_per_step)
    return statistics.median(of_size)


def merit(objective: SearchObjective, cost: float, batch_size: int) -> float:
    """Give the value that a search minimises: the cost in seconds, or for ``steps`` the steps.

    For ``steps`` costs are in examples.
    """
    return cost / batch_size if objective == "steps" else cost


def median_time(table: Table, batch_size: float, lr: float, target: Target) -> float | None:
    """Give the median seconds to target over the seeds; None if half of them did not reach it.

    In a table for the objective ``steps``, whose steps cost their examples, it gives examples.
    """
    # Cells may have different numbers of runs. A reading, at a fraction from 0 to 1, takes the run
    # that lies so far down the list of each cell around the point. The number of readings is a
    # multiple of every cell's number of runs, so that each run is read equally often.
    draws = math.lcm(*set(map(len, table.cells.values())))
    times = list[float]()
    for draw in range(draws):
        outcome = table.read(batch_size, lr, target, (draw + 0.5) / draws)
        if outcome.steps is None:
            times.append(math.inf)
        else:
            times.append(outcome.steps * outcome.seconds_per_step)
    middle = statistics.median(times)
    if math.isinf(middle):
        return None
    return middle


def median_steps(runs: Iterable[Run], target: Target) -> float:
    """Give the median over runs of the steps to a target; infinite where half of them miss it."""
    steps = list[float]()
    for run in runs:
        hit = run.steps_to(target)
        steps.append(math.inf if hit is None else float(hit))
    return statistics.median(steps)


def dense_points(table: Table, target: Target) -> list[FrontierPoint]:
    """Give the frontier of the table's cells, each at the median steps to target of its seeds.

    A cell has the runs of one batch size and learning rate, one for each seed. If half of them miss
    the target, it counts as diverged where a run diverged, else as stopped at the last step that
    all of them ran.
    """
    medians = list[TrialResult]()
    for number, ((batch_size, lr), runs) in enumerate(table.cells.items()):
        steps_to_target = median_steps(runs, target)
        status: Status = "stopped"
        steps = min(run.end for run in runs)
        # The last step that is known to have missed the target.
        steps_low = steps
        # Of a reached cell the frontier takes the steps alone, without such a bound.
        if math.isfinite(steps_to_target):
            status = "reached"
            steps = max(1, round(steps_to_target))
            steps_low = 0
        elif any(run.diverged for run in runs):
            status = "diverged"
        spec = TrialSpec(
            number=number, trial_index=number, batch_size=batch_size, lr=lr, delta=None, seed=0
        )
        # A replayed run gives all other fields of a result, such as the seconds of a step.
        result = replay(table, spec, target, steps)
        medians.append(replace(result, status=status, steps=steps, steps_low=steps_low))
    return frontier_points(medians)


def dense_b_crit(table: Table, target: Target) -> float | None:
    """Give a table's B_crit, where the slope of log S* over log B is -1/2, from all of its cells.

    S*(B), the fewest steps, is the law that is fitted to the cells, times their distance from it,
    interpolated over the batch size. A small-batch term of the law is left out, as in a study's
    B_crit. None where the cells leave B_crit open.
    """
    points = dense_points(table, target)
    try:
        fit = fit_curve(points)
    except CurveError:
        return None
    b_crit = fit.critical_batch_size
    if b_crit is None:
        return None
    reached = [(point.batch_size, point.steps) for point in points if not point.stopped]
    sizes, steps = np.array(reached).T
    # A fit without a small-batch term has no b_opt.
    law = 1.0 + b_crit / sizes + ((fit.b_opt or 0.0) / sizes) ** 2
    # The table need not follow the law. Its distance from the law is carried over to the batch
    # sizes at which the slope is sought.
    log_distance = np.log(steps) - np.log(law)
    log_low = math.log(sizes[0]) - SOUGHT_BEYOND
    log_high = math.log(sizes[-1]) + SOUGHT_BEYOND
    log_sizes = np.linspace(log_low, log_high, 400)
    # The law without its small-batch term.
    log_law = np.log1p(b_crit / np.exp(log_sizes))
    log_frontier = log_law + np.interp(log_sizes, np.log(sizes), log_distance)
    # half_slope takes several curves, (m, n): here is one.
    (log_b_crit,) = half_slope(log_sizes, log_frontier[None])
    return math.exp(log_b_crit)


def least(
    finished: Sequence[TrialResult], objective: SearchObjective = "time"
) -> TrialResult | None:
    """Give the trial of the least time to target, or of the fewest steps, the first of equals.

    None if none reached the target.
    """
    reached = list[tuple[float, int, TrialResult]]()
    for trial in finished:
        time = trial.time_to_target
        if time is not None:
            reached.append((merit(objective, time, trial.batch_size), trial.number, trial))
    if not reached:
        return None
    # Of equal merits the smallest number of a trial decides.
    _merit, _number, best = min(reached)
    return best


def stopping_step(problem: Problem, batch_size: int, finished: Sequence[TrialResult]) -> int:
    """Give the last step of a trial at ``batch_size``, by the stopping rule that searches share.

    A trial ends once it has taken ``STOP_FACTOR`` times what the best of ``finished`` took to the
    target: in seconds for ``time``, in steps for ``steps``. For ``curve`` that would cut off
    trials at the smallest and the largest batch sizes. There a trial is compared with the fewest
    steps that its own batch size needs, as the others bound them: no more than the steps of a trial
    at a smaller one, and no more examples than those of a trial at a larger one. No trial runs past
    its budget, the only limit until one has reached the target.
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
        steps = min(_bound_on_fewest_steps(trial, batch_size) for trial in reached)
    return max(1, min(budget, math.floor(STOP_FACTOR * steps * FOR_ROUNDING)))


def _bound_on_fewest_steps(trial: TrialResult, batch_size: int) -> float:
    """Give an upper bound on the fewest steps to the target at another batch size.

    ``trial`` reached the target. The bound is its own steps if its batch was smaller, else its
    examples divided by the batch size: as the batch size rises, the fewest steps fall and the
    fewest examples rise.
    """
    if trial.batch_size <= batch_size:
        return trial.steps
    return trial.examples / batch_size


def run_search(
    search: Search, benchmark: Benchmark, multiples: Sequence[float], max_trials: int = MAX_TRIALS
) -> SearchRun:
    """Run a search on a table until its trials have cost the last of the rising ``multiples``.

    Costs are in ``Benchmark.unit``. The search estimates B_crit each time that it has spent one of
    the multiples. It ends early once it has run ``max_trials``.
    """
    finished = list[TrialResult]()
    path = list[tuple[float, float | None]]()
    estimates = list[float | None]()
    spent = 0.0
    while True:
        # Where the search has had all of its trials no other one ends: all multiples that are left
        # get the present estimate.
        trial: TrialResult | None = None
        spent_after = math.inf
        if len(finished) < max_trials:
            trial = _answer(search.propose(finished), benchmark, finished)
            spent_after = spent + trial.train_seconds
        # The multiples that this trial's cost passes get the estimate from the trials before it.
        for multiple in multiples[len(estimates) :]:
            # Costs that meet a multiple exactly may come out a little above it.
            if spent_after <= multiple * benchmark.unit * FOR_ROUNDING:
                break
            estimates.append(_estimate(search, benchmark, finished))
        # A trial whose cost passes the last multiple does not count any more.
        if trial is None or len(estimates) == len(multiples):
            break
        finished.append(trial)
        spent = spent_after
        incumbent = search.incumbent(finished)
        if incumbent is None:
            continue
        # How many times the best cell's time, or steps, the search's choice takes.
        ratio = benchmark.ratio(incumbent.batch_size, incumbent.lr)
        # The path has the spendings at which the ratio changes.
        if not path or path[-1][1] != ratio:
            path.append((spent / benchmark.unit, ratio))
    return SearchRun(
        path=tuple(path),
        b_crit=tuple(estimates),
        trials=len(finished),
        spent=spent / benchmark.unit,
        complete=trial is not None,
    )


def _answer(spec: TrialSpec, benchmark: Benchmark, finished: Sequence[TrialResult]) -> TrialResult:
    """Give a proposed trial's result, from the recorded runs of the table.

    ConfigError if the search may not propose it.
    """
    if spec.number != len(finished):
        raise ConfigError(
            f"a search must number its trials from 0: expected {len(finished)}, but got "
            f"{spec.number}"
        )
    resumed_from = _continued(spec, finished)
    problem = benchmark.problem
    last_step = spec.max_steps
    if last_step is None:
        last_step = problem.budget.last_step(spec.batch_size)
    done = 0
    if resumed_from is not None:
        done = resumed_from.steps
    if last_step <= done:
        raise ConfigError(
            f"trial {spec.number} needs max_steps past the {done} steps it has, but got {last_step}"
        )
    return replay(benchmark.table, spec, problem.target, last_step, resumed_from)


def _continued(spec: TrialSpec, finished: Sequence[TrialResult]) -> TrialResult | None:
    """Give the trial that a proposed one continues; None if it begins afresh.

    ConfigError if that is no stopped trial at the same batch size, learning rate and seed.
    """
    number = spec.resumed_from
    if number is None:
        return None
    point = spec.batch_size, spec.lr, spec.seed
    if 0 <= number < len(finished):
        trial = finished[number]
        same_point = (trial.batch_size, trial.lr, trial.seed) == point
        if same_point and trial.status == "stopped":
            return trial
    raise ConfigError(
        f"trial {spec.number} continues trial {number}, which is no stopped trial at batch size, "
        f"learning rate and seed {point}"
    )


def _estimate(
    search: Search, benchmark: Benchmark, finished: Sequence[TrialResult]
) -> float | None:
    """Give the search's B_crit over the table's own, for ``curve``; None if either is not known."""
    if benchmark.problem.objective != "curve" or benchmark.b_crit is None:
        return None
    b_crit = search.b_crit(finished)
    if b_crit is None:
        return None
    return b_crit / benchmark.b_crit


def ratio_after(path: Sequence[tuple[float, float | None]], multiple: float) -> float:
    """Give how many times the best cell's time a search's choice takes, after some spending.

    ``path`` has pairs of a spending and the ratio from there on, and ``multiple`` is the spending.
    Infinite before the search has chosen, and where its choice does not reach the target.
    """
    ratio = math.inf
    for spent, value in path:
        # The last change within the spending counts: a later incumbent may be worse.
        if spent <= multiple * FOR_ROUNDING:
            ratio = math.inf if value is None else value
    return ratio


def spending_within(path: Sequence[tuple[float, float | None]], within: float = WITHIN) -> float:
    """Give the spending at which a search's choice first takes at most ``within`` times the best.

    ``path`` has pairs of a spending and the ratio from there on. Infinite if it never gets there.
    """
    for spent, ratio in path:
        if ratio is not None and ratio <= within * FOR_ROUNDING:
            return spent
    return math.inf


def factor_off(ratio: float | None) -> float:
    """Give the factor by which an estimate is off, max(x, 1/x); infinite without an estimate."""
    if ratio is None or ratio <= 0.0:
        return math.inf
    return max(ratio, 1.0 / ratio)


def percentile(values: Sequence[float], share: float) -> float:
    """Give the least of ``values`` that at least a fraction ``share`` of them do not exceed."""
    # Where the product is whole, its rounding must not lead to the next rank.
    rank = math.ceil(share * len(values) / FOR_ROUNDING)
    return sorted(values)[max(0, rank - 1)]
