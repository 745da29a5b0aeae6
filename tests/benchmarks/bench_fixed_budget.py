"""The best metric within a budget: bstune's objective ``loss`` beside Optuna's samplers.

    python tests/benchmarks/bench_fixed_budget.py table [--tables ...] [--seeds 3]
        [--searches ...] [--json FILE]
    python tests/benchmarks/bench_fixed_budget.py laws [--laws 10] [--seeds 1]
        [--searches ...] [--json FILE]
    python tests/benchmarks/bench_fixed_budget.py ends [--tables ...] [--seeds 3] [--json FILE]

No clock goes in. Spending is counted in full trials, one that runs to its budget's end; a search is
judged by the metric that the point which it recommends has at the budget's end, in per cent above
the best point's, after 3, 5, 10, 20 and 40 of them. What a search recommends counts from the end of
the trial that made it so. Every search's first trial is the geometric middle of the batch sizes and
of the learning rates, run to the end. With ``--json`` results are kept in FILE, and a second run
does only what is not there.

- ``bstune``: the sampler as its docstring shows it. It recommends the trial whose fresh seed is
  predicted to be best.
- ``TPE`` and ``GP`` of Optuna search log B and the rate's distance from the square-root rule
  through the middle; the value is the log of the metric, a diverged trial's the worst of the
  table. They recommend the best trial.
- ``TPE, Hyperband``: trials report at 1/27, 1/9, 1/3 and 1 of the budget, and the pruner stops
  them.

``table``: recorded runs that can be stopped anywhere. The budget is T seconds, the least median
time of a cell to the table's target. Between recorded cells, the log of the running metric at the
same share of T is bilinear in (log B, log lr); a trial draws one of a cell's seeds, and a point is
judged by the mean over all of them. ``scatter`` is how much one seed's log metric differs from
another's in the cells within 10% of the best one. A step is cut in a thousand, so that it is T
alone that ends a trial, and no search knows more than the shares.

``laws``: made curves. The metric falls as f + (m_0 - f) (1 + s/s_0)^-p, and meets its target after
S(B, lr) steps of a law that ``bench_coverage.py`` draws, with its noise from seed to seed; f, p,
and how many times the least time to the target the budget lasts are drawn too. At the end of
bstune's searches what they say is held against the truth: whether AS GOOD holds the best batch
size, and the interval of the exponent with which the best batch size grows with the budget.

``ends``: bstune's searches on the tables, whole, and after each fourth trial what a study would say
is left to gain. For each share of a seed's scatter that ``search.least_gain`` may be: when the
search would have ended, and how much worse what it recommends then is than at its end.
"""

import argparse
import json
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import optuna
from bench_coverage import draw_law
from common import machine, write
from numpy.typing import NDArray
from optuna.distributions import FloatDistribution, IntDistribution
from optuna.trial import TrialState
from synthetic import FLOOR, START, STEEPNESS, TARGET, Law
from torch import device

from bstune.core.records import TrialResult, TrialSpec
from bstune.search.budget_findings import (
    BUDGET_SHARES,
    BudgetFindings,
    findings_of,
    gain_left_of,
)
from bstune.search.fixed_budget import rank_full_trials
from bstune.search.sampler import RECORD, RESUMED_FROM, FrontierSampler
from bstune.study.analysis.model import MOVES, REPORT_PARTICLES
from bstune.study.searching.early_end import FEWEST_FULL, LOOK_EVERY, LOOK_PARTICLES
from bstune.trial.recorded_run import Run
from bstune.trial.replay import Table, read_index, read_table

Array = NDArray[np.float64]
SPENDINGS = (3.0, 5.0, 10.0, 20.0, 40.0)
MAX_TRIALS = 600
# Of evaluations: each comes at this many times the steps of the one before, and the first at a
# 150th of the budget.
CADENCE = 1.04
FIRST_EVALUATION = 1.0 / 150.0
STEPS_A_STEP = 1000.0
# Hyperband may stop a trial at these shares of the budget.
RUNGS = (1 / 27, 1 / 9, 1 / 3, 1.0)
# The seeds of cells whose metric is so little above the best cell's tell the scatter.
NEAR_BEST = 0.10
LOW = 8
HIGH = 4096
LR_LOW = 2.0**-11
LR_HIGH = 2.0**1.25
# What search.least_gain may be: what is left to gain, in what one seed differs from another.
LEAST_GAINS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0)
# Of a look: full trials' cost, full trials, what is left in scatters, and scatters above the best.
LOOK_COST, LOOK_FULL, LOOK_LEFT, LOOK_ABOVE = 1, 2, 3, 4
SEARCHES = ("bstune", "TPE", "TPE, Hyperband", "GP")


def shares_evaluated() -> Array:
    """Give the shares of a budget at which a full trial is evaluated, its end the last."""
    count = int(math.log(1.0 / FIRST_EVALUATION) / math.log(CADENCE))
    return np.power(CADENCE, -np.arange(count, -1, -1.0))


SHARES = shares_evaluated()


class Problem(Protocol):
    """Trials with a budget, and the truth about them."""

    sizes: tuple[int, int]
    lrs: tuple[float, float]
    worst: float  # of the metric

    def budget(self, batch_size: float) -> float:
        """Give the steps at which a trial ends."""
        ...

    def curve(self, batch_size: float, lr: float, seed: int) -> Array:
        """Give a run's metric at ``SHARES``: NaN before the first evaluation.

        It is infinite from where the run diverged.
        """
        ...

    def truth(self, batch_size: float, lr: float) -> float:
        """Give the metric at the budget's end of a point, without the luck of a seed."""
        ...

    @property
    def best(self) -> float:
        """The least truth."""
        ...


class Recorded:
    """A shipped table as a problem with a budget of seconds."""

    def __init__(self, name: str) -> None:
        source = read_index()[name]
        self._table: Table = read_table(source.path)
        sizes = self._table.batch_sizes
        lrs = self._table.lrs
        self.sizes = (sizes[0], sizes[-1])
        self.lrs = (lrs[0], lrs[-1])
        self._taus = []
        for size in sizes:
            taus = [run.seconds_per_step for run in self._table.runs if run.batch_size == size]
            self._taus.append(statistics.median(taus))
        tau_of = dict(zip(sizes, self._taus, strict=True))
        self.seconds = math.inf
        for (size, _), runs in self._table.cells.items():
            steps = [run.steps_to(source.target) or math.inf for run in runs]
            self.seconds = min(self.seconds, statistics.median(steps) * tau_of[size])
        self._curves = {}
        for cell, runs in self._table.cells.items():
            self._curves[cell] = [self._on_shares(run, tau_of[cell[0]]) for run in runs]
        self._seeds = max(len(runs) for runs in self._curves.values())
        self.worst = max(max(run.metric, default=0.0) for run in self._table.runs)

    def _on_shares(self, run: Run, tau: float) -> Array:
        """Give a recorded run's metric as of each share of the budget."""
        times = SHARES * self.seconds
        recorded = np.array(run.steps, dtype=np.float64) * tau
        # An evaluation at the very share counts, however it is rounded.
        last = np.searchsorted(recorded, times * (1.0 + 1e-9), side="right") - 1
        # NaN stands behind the metric of a run without any evaluation.
        values = np.array([*run.metric, math.nan])[np.maximum(last, 0)]
        values[last < 0] = math.nan
        end = recorded[-1] if recorded.size else 0.0
        if run.diverged:
            values[times > 1.001 * end] = math.inf
        return values

    def budget(self, batch_size: float) -> float:
        """Give the thousandths of steps in the budget's seconds."""
        log_sizes = np.log(self._table.batch_sizes)
        log_tau = np.interp(math.log(batch_size), log_sizes, np.log(self._taus))
        return STEPS_A_STEP * self.seconds / math.exp(float(log_tau))

    def curve(self, batch_size: float, lr: float, seed: int) -> Array:
        """Give a run's metric at ``SHARES``, of the cells' seed that ``seed`` draws."""
        return self._between(batch_size, lr, float(np.random.default_rng(seed).random()))

    def _between(self, batch_size: float, lr: float, share: float) -> Array:
        """Give the metric between the cells around a point; of each cell the seed at ``share``."""
        corners = []
        for size, by_size in _around(self._table.batch_sizes, batch_size):
            for rate, by_rate in _around(self._table.lrs, lr):
                runs = self._curves[self._nearest(size, rate)]
                corners.append(
                    (runs[min(int(share * len(runs)), len(runs) - 1)], by_size * by_rate)
                )
        # A corner that diverged or did not get to the end has no logarithm to weigh: then the
        # nearest corner stands for all.
        if any(np.isinf(values).any() or np.isnan(values[-1]) for values, _ in corners):
            return max(corners, key=lambda corner: corner[1])[0]
        total = np.zeros(SHARES.size)
        for values, weight in corners:
            total += weight * np.log(values)
        return np.exp(total)

    def _nearest(self, size: float, rate: float) -> tuple[int, float]:
        def distance(cell: tuple[int, float]) -> float:
            return math.log(cell[0] / size) ** 2 + math.log(cell[1] / rate) ** 2

        return min(self._curves, key=distance)

    def truth(self, batch_size: float, lr: float) -> float:
        """Give the mean over the seeds of the best metric within the budget."""
        least = []
        for i in range(self._seeds):
            values = self._between(batch_size, lr, (i + 0.5) / self._seeds)
            finite = values[np.isfinite(values)]
            least.append(float(finite.min()) if finite.size else math.nan)
        return float(np.mean(least))

    @cached_property
    def best(self) -> float:
        """The best cell's metric."""
        truths = [self.truth(*cell) for cell in self._curves]
        return float(np.nanmin(truths))

    @cached_property
    def scatter(self) -> float:
        """How much the log metric of a seed differs from another's, near the best cell."""
        squares = list[float]()
        freedom = 0
        for (size, rate), runs in self._curves.items():
            ends = np.array([np.nanmin(values) for values in runs if np.isfinite(values[-1])])
            is_near = self.truth(size, rate) < (1.0 + NEAR_BEST) * self.best
            if is_near and ends.size > 1:
                logs = np.log(ends)
                squares.append(float(((logs - logs.mean()) ** 2).sum()))
                freedom += ends.size - 1
        return math.sqrt(sum(squares) / freedom) if freedom else math.nan


def _around(values: Sequence[float], value: float) -> list[tuple[Any, float]]:
    """Give the recorded values around one, with their weights, linear in the logarithm."""
    place = float(np.interp(math.log(value), np.log(values), np.arange(len(values))))
    below = int(place + 1e-9)
    weight = place - below
    if weight < 1e-9:
        return [(values[below], 1.0)]
    return [(values[below], 1.0 - weight), (values[below + 1], weight)]


@dataclass(frozen=True)
class Made:
    """A law's runs, with a budget of seconds; see the module's docstring."""

    law: Law
    floor: float  # f
    power: float  # p
    seconds: float
    sizes: tuple[int, int] = (LOW, HIGH)
    lrs: tuple[float, float] = (LR_LOW, LR_HIGH)
    worst: float = START

    def budget(self, batch_size: float) -> float:
        """Give the thousandths of steps in the budget's seconds."""
        return STEPS_A_STEP * self.seconds / self.law.tau(batch_size)

    def curve(self, batch_size: float, lr: float, seed: int) -> Array:
        """Give a run's metric at ``SHARES``, with its own noise."""
        rng = np.random.default_rng([seed, 77])
        steps = self.law.steps(batch_size, lr)
        if steps is None:
            # Above the rates that train, a run diverges within a tenth of the budget.
            return np.where(SHARES > 0.1, math.inf, START)
        luck = math.exp(self.law.noise * rng.standard_normal())
        exact = self._metric(SHARES * self.seconds / self.law.tau(batch_size), steps * luck)
        # Evaluations scatter by 1% of what lies above the floor.
        return self.floor + (exact - self.floor) * np.exp(0.01 * rng.standard_normal(SHARES.size))

    def _metric(self, at: Array, steps: float) -> Array:
        """Give the metric after ``at`` steps of a run that meets the target after ``steps``."""
        height = (START - self.floor) / (TARGET - self.floor)
        # s_0 of f + (m_0 - f) (1 + S/s_0)^-p = target.
        scale = steps / (height ** (1.0 / self.power) - 1.0)
        return self.floor + (START - self.floor) * (1.0 + at / scale) ** -self.power

    def truth(self, batch_size: float, lr: float, share: float = 1.0) -> float:
        """Give the metric at the budget's end, or a share of it, without noise."""
        steps = self.law.steps(batch_size, lr)
        if steps is None:
            return START
        at = np.array([share * self.seconds / self.law.tau(batch_size)])
        return float(self._metric(at, steps)[0])

    def best_size(self, share: float = 1.0) -> float:
        """Give the batch size whose metric is best at a share of the budget, at its best rate."""
        # Batch sizes 1/16 octave apart, which is 4.4%.
        grid = np.exp2(np.arange(math.log2(LOW), math.log2(HIGH) + 1e-9, 1 / 16))
        truths = [self.truth(size, self._best_lr(size), share) for size in grid]
        return float(grid[int(np.argmin(truths))])

    def _best_lr(self, batch_size: float) -> float:
        return min(max(self.law.best_lr(batch_size), LR_LOW), LR_HIGH)

    @property
    def best(self) -> float:
        """The least truth."""
        size = self.best_size()
        return self.truth(size, self._best_lr(size))


def draw(number: int) -> Made:
    """Draw a law of a kind, its metric's course, and its budget."""
    kinds = ("noise 10%", "exponent 0.7", "exponent 1.5", "sharp knee", "u-shape")
    law = draw_law(number, kinds[number % len(kinds)])
    rng = np.random.default_rng([number, 11])
    sizes = np.exp2(np.arange(math.log2(LOW), math.log2(HIGH) + 1e-9, 1 / 4))
    fastest = min(law.frontier(size) * law.tau(size) for size in sizes)
    return Made(
        law=law,
        floor=float(rng.uniform(0.0, FLOOR)),
        power=STEEPNESS * math.exp(rng.uniform(-0.5, 0.5)),
        seconds=fastest * math.exp(rng.uniform(math.log(0.5), math.log(4.0))),
    )


def result_of(problem: Problem, spec: TrialSpec, values: Array, last_step: int) -> TrialResult:
    """Give the record of a run up to a step of it, whose metric at ``SHARES`` these are."""
    budget = problem.budget(spec.batch_size)
    whole = math.floor(budget * (1.0 + 1e-9))
    history: dict[int, float | None] = {}
    status: Any = "stopped"
    steps = last_step
    for share, value in zip(SHARES, values, strict=True):
        step = max(1, min(round(share * budget), whole))
        if step > last_step:
            break
        if math.isinf(value):
            status = "diverged"
            steps = step
            break
        if not math.isnan(value):
            history[step] = float(value)
    return TrialResult.unmeasured(
        spec,
        status,
        steps=steps,
        steps_low=steps,
        examples=steps * spec.batch_size,
        history=tuple(history.items()),
    )


class BudgetSearch:
    """bstune's sampler, as its docstring shows it."""

    def __init__(self, problem: Problem, seed: int) -> None:
        self._problem = problem
        self._seed = seed
        self.sampler = FrontierSampler(
            objective="loss",
            budget=problem.budget,
            ideal=0.0,
            resumable=lambda number: True,
            search_space={
                "batch_size": IntDistribution(*problem.sizes, log=True),
                "lr": FloatDistribution(*problem.lrs, log=True),
            },
            seed=seed,
        )
        self.study = optuna.create_study(sampler=self.sampler)
        self._results: list[TrialResult] = []

    def recommended(self) -> tuple[int, float] | None:
        """Give the point to use by the trials that it was told of."""
        number = self.sampler.recommended(self.study)
        if number is None:
            return None
        return self._results[number].batch_size, self._results[number].lr

    def costs(self) -> Iterator[float]:
        """Run trials; yield what each cost before the search is told of it."""
        problem = self._problem
        while True:
            trial = self.study.ask()
            size = trial.suggest_int("batch_size", *problem.sizes, log=True)
            lr = trial.suggest_float("lr", *problem.lrs, log=True)
            parent = self.sampler.resumed_from(trial.number)
            before = 0
            run_seed = 1000 * self._seed + trial.number
            if parent is not None:
                before = self._results[parent].steps
                # A trial that goes on has the seed of its parent.
                run_seed = self._results[parent].seed
            number = trial.number
            spec = TrialSpec(number, number, size, lr, None, run_seed, resumed_from=parent)
            values = problem.curve(size, lr, run_seed)
            result = result_of(problem, spec, values, self.sampler.max_steps(number) or 1)
            last_step = math.floor(problem.budget(size) * (1.0 + 1e-9))
            yield (result.steps - before) / last_step
            self._results.append(result)
            trial.set_user_attr(RECORD, result.to_json())
            if parent is not None:
                trial.set_user_attr(RESUMED_FROM, parent)
            # A trial that was stopped early has no value.
            if result.status == "stopped" and result.steps == last_step and result.history:
                self.study.tell(trial, min(value for _, value in result.history if value))
            else:
                self.study.tell(trial, state=TrialState.PRUNED)

    def look(self) -> tuple[int, float, tuple[int, float]] | None:
        """Tell how many trials are full, what is left to gain in scatters, and the best's point."""
        posterior = self.sampler.budget_posterior(
            self._results, mode="min", particles=LOOK_PARTICLES, moves=MOVES
        )
        left = None if posterior is None else gain_left_of(posterior)
        if posterior is None or left is None:
            return None
        best = self._results[rank_full_trials(posterior)[0].run.number]
        point = best.batch_size, best.lr
        return len(posterior.full), left.at_most / left.seed_scatter, point

    def findings(self) -> BudgetFindings | None:
        """Give what a report would say."""
        posteriors = {}
        for share in BUDGET_SHARES:
            posterior = self.sampler.budget_posterior(
                self._results, mode="min", share=share, particles=REPORT_PARTICLES, moves=MOVES
            )
            if posterior is not None:
                posteriors[share] = posterior
        return findings_of(posteriors)


class OptunaSearch:
    """Any Optuna sampler, with or without a pruner."""

    def __init__(self, problem: Problem, seed: int, name: str) -> None:
        self._problem = problem
        self._seed = seed
        sampler: Any = optuna.samplers.TPESampler(seed=seed)
        if name == "GP":
            sampler = optuna.samplers.GPSampler(seed=seed, warn_independent_sampling=False)
        pruner: optuna.pruners.BasePruner = optuna.pruners.NopPruner()
        if "Hyperband" in name:
            # Its resources are powers of 3, as the shares of RUNGS.
            pruner = optuna.pruners.HyperbandPruner(
                min_resource=1, max_resource=3 ** (len(RUNGS) - 1), reduction_factor=3
            )
        self._prunes = "Hyperband" in name
        # Hyperband tells its brackets apart by the study's name.
        self.study = optuna.create_study(
            sampler=sampler, pruner=pruner, study_name=f"{name} {seed}"
        )
        middle = round(math.sqrt(problem.sizes[0] * problem.sizes[1]))
        self.study.enqueue_trial({"batch_size": middle, "delta": 0.0})
        self._best = (math.inf, (0, 0.0))

    def recommended(self) -> tuple[int, float] | None:
        """Give the best trial's point."""
        return self._best[1] if math.isfinite(self._best[0]) else None

    def costs(self) -> Iterator[float]:
        """Run trials; yield what each cost before the search is told of it."""
        problem = self._problem
        while True:
            trial = self.study.ask()
            size = trial.suggest_int("batch_size", *problem.sizes, log=True)
            # delta is in octaves from the rule.
            half = 0.5 * math.log2(problem.lrs[1] / problem.lrs[0])
            lr = self._rule(size) * 2.0 ** trial.suggest_float("delta", -half, half)
            lr = min(max(lr, problem.lrs[0]), problem.lrs[1])
            values = problem.curve(size, lr, 1000 * self._seed + trial.number)
            cost, value, pruned = self._run(trial, values)
            yield cost
            if value < self._best[0]:
                self._best = value, (size, lr)
            if pruned:
                self.study.tell(trial, state=TrialState.PRUNED)
            else:
                self.study.tell(trial, math.log(min(value, problem.worst)))

    def _rule(self, batch_size: float) -> float:
        (low, high) = self._problem.sizes
        (slow, fast) = self._problem.lrs
        return math.sqrt(slow * fast) * math.sqrt(batch_size / math.sqrt(low * high))

    def _run(self, trial: optuna.Trial, values: Array) -> tuple[float, float, bool]:
        """Run a trial; give its cost, a full trial's metric, and whether it was pruned."""
        broken = np.flatnonzero(np.isinf(values))
        end = float(SHARES[broken[0]]) if broken.size else 1.0
        if self._prunes:
            for place, rung in enumerate(RUNGS[:-1]):
                if rung > end:
                    break
                seen = values[(rung * (1.0 + 1e-9) >= SHARES) & np.isfinite(values)]
                metric = float(seen.min()) if seen.size else self._problem.worst
                trial.report(math.log(metric), 3**place)
                if trial.should_prune():
                    return rung, math.inf, True
        finite = values[np.isfinite(values)]
        if broken.size or not finite.size:
            return end, math.inf, False
        return 1.0, float(finite.min()), False


def search(
    problem: Problem, name: str, seed: int
) -> tuple[list[float], int, BudgetSearch | OptunaSearch]:
    """Run a search; give the truth of its point after each spending, its trials and itself."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    one: BudgetSearch | OptunaSearch = BudgetSearch(problem, seed)
    if name != "bstune":
        one = OptunaSearch(problem, seed, name)
    spent = 0.0
    count = 0
    truths = list[float]()
    for cost in one.costs():
        # What is recommended counts until a trial ends beyond the spending.
        while len(truths) < len(SPENDINGS) and spent + cost > SPENDINGS[len(truths)] + 1e-6:
            truths.append(_truth(problem, one.recommended()))
        if len(truths) == len(SPENDINGS) or count == MAX_TRIALS:
            break
        spent = spent + cost
        count = count + 1
    while len(truths) < len(SPENDINGS):
        truths.append(_truth(problem, one.recommended()))
    return truths, count, one


def _truth(problem: Problem, point: tuple[int, float] | None) -> float:
    return math.nan if point is None else problem.truth(*point)


def per_cent_above(best: float, metrics: Sequence[float]) -> list[float]:
    """Give how far metrics lie above the best one, in hundredths of a logarithm."""
    return [100.0 * math.log(metric / best) for metric in metrics]


def row_of_table(problem: Recorded, table: str, seed: int, name: str) -> dict[str, Any]:
    """Run one search on one table with one seed."""
    truths, count, _ = search(problem, name, seed)
    above = per_cent_above(problem.best, truths)
    of_scatter = [value / (100.0 * problem.scatter) for value in above]
    return {
        "problem": table,
        "seed": seed,
        "search": name,
        "trials": count,
        "above": above,
        "of_scatter": of_scatter,
    }


def row_of_ends(problem: Recorded, table: str, seed: int) -> dict[str, Any]:
    """Run one search; after each fourth trial tell what is left to gain, in scatters as said there.

    ``looks`` has the trials, their cost, the full ones, what is left, and the truth of what is
    recommended in units of the table's own scatter.
    """
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    one = BudgetSearch(problem, seed)
    looks = list[list[float]]()
    spent = 0.0
    count = 0
    for cost in one.costs():
        if count and count % LOOK_EVERY == 0:
            look = one.look()
            if look is not None:
                full, left, point = look
                above = math.log(problem.truth(*point) / problem.best) / problem.scatter
                looks.append([count, round(spent, 2), full, round(left, 3), round(above, 2)])
        if spent + cost > SPENDINGS[-1] or count == MAX_TRIALS:
            break
        spent = spent + cost
        count = count + 1
    return {"problem": table, "seed": seed, "search": "ends", "looks": looks}


def show_ends(rows: Sequence[dict[str, Any]]) -> None:
    """Print what ``search.least_gain`` would have saved and lost."""
    for least_gain in LEAST_GAINS:
        costs = list[float]()
        above = list[float]()
        lost = list[float]()
        for row in rows:
            looks = row["looks"]
            end = _end_of(looks, least_gain)
            costs.append(end[LOOK_COST])
            above.append(end[LOOK_ABOVE])
            lost.append(end[LOOK_ABOVE] - looks[-1][LOOK_ABOVE])
        print(
            f"least_gain {least_gain:g}: n {len(rows)}, ends after "
            f"{_median_p90(costs)} full trials' cost, "
            f"mean {statistics.fmean(costs):.1f}; scatters above the best "
            f"{_median_p90(above)}, mean {statistics.fmean(above):.2f}, "
            f"{statistics.fmean(lost):.2f} more than at the end"
        )


def _end_of(looks: Sequence[Sequence[float]], least_gain: float) -> Sequence[float]:
    """Give the look at which a search would have ended, or its last one."""
    for look in looks:
        if look[LOOK_FULL] >= FEWEST_FULL and look[LOOK_LEFT] <= least_gain:
            return look
    return looks[-1]


def row_of_law(number: int, seed: int, name: str) -> dict[str, Any]:
    """Run one search on one law with one seed; hold bstune's findings against the truth."""
    problem = draw(number)
    truths, count, one = search(problem, name, 100 * number + seed)
    row: dict[str, Any] = {
        "problem": f"law {number}",
        "seed": seed,
        "search": name,
        "trials": count,
        "above": per_cent_above(problem.best, truths),
    }
    findings = one.findings() if isinstance(one, BudgetSearch) else None
    if findings is None or findings.growth is None:
        return row
    good = findings.as_good
    growth = findings.growth
    best = problem.best_size()
    shares = [size.share for size in growth.best_sizes]
    log_sizes = [math.log(problem.best_size(share)) for share in shares]
    # The slope of log B*, over the logarithm of the budget.
    exponent = float(np.polyfit(np.log(shares), log_sizes, 1)[0])
    return row | {
        "best_size": best,
        "as_good": [good.low, good.high],
        # The best size stands on a grid of 4.4%.
        "holds_best": good.low <= best * 1.05 and best <= good.high * 1.05,
        "exponent": exponent,
        "exponent_found": [growth.low, growth.exponent, growth.high],
        "holds_exponent": growth.low <= exponent <= growth.high,
        "gain_left": [findings.gain_left.next_point, findings.gain_left.at_most],
    }


def show(rows: Sequence[dict[str, Any]], scatters: dict[str, float]) -> None:
    """Print median and 90th percentile, in per cent above the best, of each search and problem."""
    problems = list(dict.fromkeys(row["problem"] for row in rows))
    groups = [*problems, "all"] if scatters else ["all"]
    for problem in groups:
        some = [row for row in rows if problem in (row["problem"], "all")]
        scatter = scatters.get(problem)
        note = "" if scatter is None else f", one seed's scatter {100.0 * scatter:.1f}%"
        print(f"{problem}{note}: % above the best, median/p90 after {SPENDINGS} full trials")
        for name in dict.fromkeys(row["search"] for row in some):
            own = [row for row in some if row["search"] == name]
            cells = _cells(own, "above")
            trials = statistics.median(row["trials"] for row in own)
            print(f"   {name:15s} n {len(own):3d}, {trials:g} trials: {', '.join(cells)}")
            if problem == "all" and scatters:
                cells = _cells(own, "of_scatter")
                print(f"   {'':15s} in units of one seed's scatter: {', '.join(cells)}")
    _show_judged(rows)


def _cells(rows: Sequence[dict[str, Any]], key: str) -> list[str]:
    """Give median and 90th percentile over the rows, after each spending."""
    by_spending = np.array([row[key] for row in rows]).T
    return list(map(_median_p90, by_spending.tolist()))


def _show_judged(rows: Sequence[dict[str, Any]]) -> None:
    """Print how often bstune's intervals hold the truth, where a law gives it."""
    held = 0
    exponents = 0
    widths = list[float]()
    for row in rows:
        if "holds_best" in row:
            low, high = row["as_good"]
            held += row["holds_best"]
            exponents += row["holds_exponent"]
            widths.append(math.log2(high / low))
    if widths:
        print(
            f"AS GOOD holds the best batch size in {held} of {len(widths)}, its width "
            f"{statistics.median(widths):.1f} octaves (median); "
            f"the exponent's interval holds it in {exponents}"
        )


def _median_p90(values: Sequence[float]) -> str:
    return f"{np.nanmedian(values):.1f}/{np.nanquantile(values, 0.9):.1f}"


def main() -> None:
    """Run what is asked for and is not there yet."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    kinds = parser.add_subparsers(required=True, dest="what")
    tables = list(read_index())
    for name, seeds in (("table", 3), ("laws", 1), ("ends", 3)):
        kind = kinds.add_parser(name)
        kind.add_argument("--seeds", type=int, default=seeds)
        searches = ["ends"] if name == "ends" else list(SEARCHES)
        kind.add_argument("--searches", nargs="+", default=searches, choices=searches)
        kind.add_argument(
            "--json", type=Path, help="file for every study's numbers, and to go on from"
        )
    for name in ("table", "ends"):
        kinds.choices[name].add_argument("--tables", nargs="+", default=tables, choices=tables)
    kinds.choices["laws"].add_argument("--laws", type=int, default=10)
    options = parser.parse_args()
    rows = list[dict[str, Any]]()
    if options.json is not None and options.json.exists():
        rows = json.loads(options.json.read_text(encoding="utf-8"))["rows"]
    done = {(row["problem"], row["seed"], row["search"]) for row in rows}
    scatters: dict[str, float] = {}
    jobs: list[tuple[str, Callable[[int, str], dict[str, Any]]]] = []
    if options.what != "laws":
        for table in options.tables:
            problem = Recorded(table)
            scatters[table] = problem.scatter
            print(f"{table}: T {problem.seconds:.3g} s, best metric {problem.best:.4g}")
            jobs.append((table, _of_table(problem, table)))
    else:
        jobs = [(f"law {number}", _of_law(number)) for number in range(options.laws)]
    about = machine(device("cpu"), options.seeds * len(jobs))
    for seed in range(options.seeds):
        for name in options.searches:
            for problem_name, run in jobs:
                if (problem_name, seed, name) not in done:
                    rows.append(run(seed, name))
                    write(options.json, about, rows)
    if options.what == "ends":
        show_ends(rows)
        return
    show([row for row in rows if row["search"] in options.searches], scatters)


def _of_table(problem: Recorded, table: str) -> Callable[[int, str], dict[str, Any]]:
    def row(seed: int, name: str) -> dict[str, Any]:
        if name == "ends":
            return row_of_ends(problem, table, seed)
        return row_of_table(problem, table, seed, name)

    return row


def _of_law(number: int) -> Callable[[int, str], dict[str, Any]]:
    return lambda seed, name: row_of_law(number, seed, name)


if __name__ == "__main__":
    main()
