"""Schedules that end with the trial: bstune's choice of horizons beside a fixed horizon and Optuna's TPE.

    python tests/benchmarks/bench_horizon.py laws [--laws 12] [--seeds 2] [--floor F] [--searches ...] [--jobs 2]
        [--json FILE]
    python tests/benchmarks/bench_horizon.py digits [--seeds 5] [--fresh 8] [--searches ...] [--jobs 2] [--json FILE]
    python tests/benchmarks/bench_horizon.py table [--tables ...] [--seeds 3] [--searches ...] [--jobs 2] [--json FILE]

No clock goes in. All searches get the same budget, in examples: it is the fixed horizon, and caps the chosen ones. TPE
searches delta, off the square-root rule, and the share of the budget that the horizon takes; its value is the log of
seconds to target, for a miss that of the budget plus the log of the metric over the target. After the first hit no
trial of it costs more than twice the fastest. bstune's incumbent is the trial that its posterior recommends, with the
horizon that it names; TPE's its fastest. An incumbent is judged by the seconds that its point and horizon take on fresh
seeds until one meets the target, runs that miss included, over the least; ``own`` is the incumbent's own run instead,
with its luck.

``laws``: a run with horizon h meets the target if h >= S(B, lr) exp(noise z), z drawn by its seed, and costs tau(B) for
each step until then, or all h. What no search sees: at its horizon's end the metric is f + (target - f)(S/h)^p and
a scatter; the target is met at step S^(1-k) h^k. A law draws p, f (or ``--floor``), k, the noise, and S, lr*(B), tau
as ``bench_coverage.py`` does; the budget is 1 to 4 times the examples of the best point. Spending is counted in the
least cost of any (B, lr, h). ``bstune, reference first``: as a study does, trial 0 is a user's own pair with the whole
budget as its horizon, and the square-root rule goes through it; it lies up to two octaves of B and 1.5 of the learning
rate from the best point.

``digits``: that workload with ``schedule=linear``, trained, and its own budget. Seconds are steps times a fixed tau(B).
Spending is counted in the least cost of any incumbent; every incumbent is judged by the same number of fresh seeds.

``table``: recorded runs over (B, lr, horizon), replayed (:meth:`bstune.trial.replay_horizon.HorizonTable`). The
budget is the least that no recorded run exceeds, the reference that of the recorded workload, and the square-root rule
goes through the middle of the table. An incumbent is judged by all of the table's seeds. Spending is counted in the
least cost of any point of a grid over (B, lr, horizon), finer than the table by ``BETWEEN``.
"""

import argparse
import math
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import optuna
from bench_coverage import draw_law
from common import machine, write
from optuna.distributions import FloatDistribution, IntDistribution
from scipy.special import ndtr
from synthetic import START, TARGET, Law
from torch import device

from bstune.core.records import Budget, Target, TrialResult, TrialSpec
from bstune.search.predictions import fresh_horizons
from bstune.search.sampler import RECORD, FrontierSampler
from bstune.study.prepare import compose_checked
from bstune.system.console import quieten
from bstune.trial.replay import Table, options_from_table, read_index, read_table, replay
from bstune.trial.workload import LightningBackend, build_workload, checked_protocol, resolve

SPENDINGS = (10.0, 20.0, 40.0)
LOW = 8
HIGH = 4096
LR_LOW = 2.0**-11
LR_HIGH = 2.0**1.25
# The shortest of TPE's horizons, as a share of the budget.
SHORTEST = 1 / 64
STOP_FACTOR = 2.0
MAX_TRIALS = 400
# Steps of the grid, between two recorded values, on which the least cost of a table is sought.
BETWEEN = 2
HORIZONS = 60  # of that grid
# What a user of a recorded workload runs today: batch size and learning rate of its config.
REFERENCES = {"digits_linear": (64, 0.4), "mnist_mlp_linear": (64, 0.2)}
# The steps times tau(B) that a search on digits spends.
DIGITS_SECONDS = 3.0
ERROR = Target("error", TARGET, "min")
REFERENCE_FIRST = "bstune, reference first"
SEARCHES = ("bstune", REFERENCE_FIRST, "bstune, fixed horizon", "TPE", "TPE, fixed horizon")


@dataclass(frozen=True)
class HorizonLaw:
    """A law of S(B, lr), and what happens over a horizon; see the module's docstring."""

    law: Law
    # p of the module's docstring.
    power: float
    # f of it.
    floor: float
    # k of it.
    share: float
    budget_factor: float
    # Octaves of batch size and of learning rate, that the reference lies from the best point.
    off: tuple[float, float]
    sizes: tuple[int, int] = (LOW, HIGH)
    lrs: tuple[float, float] = (LR_LOW, LR_HIGH)
    target: Target = ERROR

    def tau(self, batch_size: float) -> float:
        """Seconds per step."""
        return self.law.tau(batch_size)

    def rule(self, batch_size: float) -> float:
        """The learning rate of the square-root rule through the middle of both ranges."""
        return math.sqrt(LR_LOW * LR_HIGH) * math.sqrt(batch_size / math.sqrt(LOW * HIGH))

    def run(self, number: int, batch_size: int, lr: float, horizon: int, seed: int) -> TrialResult:
        """The record of a run."""
        law = self.law
        rng = np.random.default_rng([seed, 77])
        tau = self.tau(batch_size)
        spec = TrialSpec(number, number, batch_size, lr, None, seed)
        shortest = law.steps(batch_size, lr)
        if shortest is None:
            # A run that diverges does so after a tenth of its steps.
            steps = max(1, round(0.1 * min(horizon, law.frontier(batch_size))))
            return self._record(spec, "diverged", steps, horizon, ((steps, None),), tau)
        shortest *= math.exp(law.noise * rng.standard_normal())
        height = (shortest / horizon) ** self.power * math.exp(0.03 * rng.standard_normal())
        value = min(self.floor + (TARGET - self.floor) * height, START)
        # Whatever its scatter, a horizon that is too short misses and a longer one meets.
        if horizon < shortest:
            value = max(value, math.nextafter(TARGET, 1.0))
            return self._record(spec, "stopped", horizon, horizon, ((horizon, value),), tau)
        met = min(max(1, round(shortest ** (1.0 - self.share) * horizon**self.share)), horizon)
        value = min(value, TARGET) if met == horizon else TARGET
        return self._record(spec, "reached", met, horizon, ((met, value),), tau)

    @staticmethod
    def _record(
        spec: TrialSpec, status: Any, steps: int, horizon: int, history: tuple[Any, ...], tau: float
    ) -> TrialResult:
        # The evaluation before was 5% of the steps earlier.
        low = steps - max(1, steps // 20) if status == "reached" else steps
        return TrialResult.unmeasured(
            spec, status, steps=steps, steps_low=low, examples=steps * spec.batch_size, train_seconds=steps * tau,
            seconds_per_step=tau, history=history, horizon=horizon,
        )  # fmt: skip

    def cost(self, batch_size: float, lr: float, horizon: float) -> float:
        """The seconds until a run meets the target, those that miss included: infinite if none does."""
        shortest = self.law.steps(batch_size, lr)
        if shortest is None:
            return math.inf
        # The share of seeds with S exp(noise z) <= h.
        reaches = float(ndtr(math.log(horizon / shortest) / self.law.noise))
        if reaches < 1e-6:
            return math.inf
        met = min(shortest ** (1.0 - self.share) * horizon**self.share, horizon)
        # Before a run that meets, (1 - p)/p miss on average, each after all of h.
        return self.law.tau(batch_size) * (met + horizon * (1.0 - reaches) / reaches)

    @cached_property
    def best(self) -> tuple[float, float, float]:
        """The least cost, and its batch size and horizon."""
        sizes = 2.0 ** np.arange(math.log2(LOW), math.log2(HIGH) + 1e-9, 0.125)
        points = []
        for size in sizes:
            rate = min(max(self.law.best_lr(size), LR_LOW), LR_HIGH)
            steps = self.law.steps(size, rate)
            if steps is None:
                continue
            for ratio in RATIOS:
                horizon = steps * ratio
                points.append((self.cost(size, rate, horizon), size, horizon))
        return min(points)

    @property
    def reference(self) -> tuple[int, float]:
        """A user's own batch size and learning rate."""
        size = min(max(self.best[1] * 2.0 ** self.off[0], LOW), HIGH)
        lr = self.law.best_lr(size) * 2.0 ** self.off[1]
        return round(size), min(max(lr, LR_LOW), LR_HIGH)

    def budget(self, batch_size: float) -> float:
        """The steps of the budget, a number of examples."""
        _, size, horizon = self.best
        return max(1.0, self.budget_factor * size * horizon / batch_size)


# Horizons of 0.74 to 2.2 times S.
RATIOS = np.exp(np.linspace(-0.3, 0.8, 45))


def draw(seed: int, floor: float | None) -> HorizonLaw:
    """A law of its own for each seed; with ``floor``, the metric's lowest value is this one."""
    rng = np.random.default_rng([seed, 5])
    power = math.exp(rng.uniform(math.log(0.3), math.log(1.2)))
    drawn = rng.uniform(0.0, 0.08)
    return HorizonLaw(
        law=draw_law(seed, "noise 10%"),
        power=power,
        floor=drawn if floor is None else floor,
        share=(0.2, 0.5, 0.8, 1.0)[seed % 4],
        budget_factor=math.exp(rng.uniform(0.0, math.log(4.0))),
        off=(rng.uniform(-2.0, 2.0), rng.uniform(-1.5, 1.5)),
    )


class Digits:
    """The workload ``digits`` with ``schedule=linear``; its modules are built once a process."""

    target = Target("val/loss", 0.1, "min")
    sizes = (4, 1200)
    reference = (64, 0.4)
    # The range is five octaves to either side of the reference.
    lrs = (0.4 / 32.0, 0.4 * 32.0)

    def __init__(self) -> None:
        quieten()
        arguments = ["workload=digits", "schedule=linear", "device=cpu", "mlflow.enabled=false"]
        composed = compose_checked([*arguments, f"output={tempfile.mkdtemp()}/o"])
        options, recipe = resolve(composed.options, composed.trained_recipe)
        protocol = checked_protocol(options, recipe)
        workload = build_workload(options, recipe)
        self._backend = LightningBackend(options, recipe, workload, protocol)
        self._budget = protocol.budget

    def tau(self, batch_size: float) -> float:
        """Seconds per step, as ``bench_trial_overhead.py`` found them: 0.77 ms at 32, 1.25 at 512."""
        return 0.74e-3 + 1e-6 * batch_size

    def rule(self, batch_size: float) -> float:
        """The learning rate of the square-root rule through the reference."""
        return 0.4 * math.sqrt(batch_size / 64.0)

    def budget(self, batch_size: float) -> float:
        """The steps of the workload's own budget."""
        return float(self._budget.last_step(round(batch_size)))

    def run(self, number: int, batch_size: int, lr: float, horizon: int, seed: int) -> TrialResult:
        """The record of a run, its seconds those of :meth:`tau`."""
        spec = TrialSpec(number, number, batch_size, lr, None, seed, max_steps=horizon)
        result = self._backend.run(spec, None, None)
        tau = self.tau(batch_size)
        return replace(
            result,
            seconds_per_step=tau,
            train_seconds=result.steps * tau,
            measured_seconds_per_step=None,
        )


class Recorded:
    """A shipped table of runs over (B, lr, horizon); its seconds are those of the table."""

    def __init__(self, name: str) -> None:
        source = read_index(horizon=True)[name]
        self.table: Table = read_table(source.path)
        self.target = source.target
        self._seeds = len({run.seed for run in self.table.runs})
        sizes = self.table.batch_sizes
        self.sizes = (sizes[0], sizes[-1])
        self.lrs = (self.table.lrs[0], self.table.lrs[-1])
        self.reference = REFERENCES[name]
        filled = options_from_table({"table": name})
        self._budget = Budget(filled["workload.budget.steps"], filled["workload.budget.examples"])
        by_size = {run.batch_size: run.seconds_per_step for run in self.table.runs}
        self._log_sizes = np.log(sizes)
        self._log_taus = np.log([by_size[size] for size in sizes])

    def tau(self, batch_size: float) -> float:
        """Seconds per step, linear in the logarithms between the recorded ones."""
        log_tau = np.interp(math.log(batch_size), self._log_sizes, self._log_taus)
        return math.exp(float(log_tau))

    def rule(self, batch_size: float) -> float:
        """The learning rate of the square-root rule through the middle of both ranges."""
        middle_size = math.sqrt(self.sizes[0] * self.sizes[1])
        middle_lr = math.sqrt(self.lrs[0] * self.lrs[1])
        return middle_lr * math.sqrt(batch_size / middle_size)

    def budget(self, batch_size: float) -> float:
        """The steps of the least budget that no recorded run exceeds."""
        return float(self._budget.last_step(round(batch_size)))

    def run(self, number: int, batch_size: int, lr: float, horizon: int, seed: int) -> TrialResult:
        """The record of a run."""
        spec = TrialSpec(number, number, batch_size, lr, None, seed, max_steps=horizon)
        return replay(self.table, spec, self.target, horizon)

    def cost(self, batch_size: float, lr: float, horizon: float) -> float:
        """The seconds until a run meets the target, over all seeds: infinite if none does."""
        seconds = 0.0
        reached = 0
        # The middle of the share that draws each seed.
        for share in (np.arange(self._seeds) + 0.5) / self._seeds:
            outcome = self.table.horizon_table.read(
                batch_size, lr, round(horizon), self.target, share
            )
            seconds += outcome.end * outcome.seconds_per_step
            reached += outcome.steps is not None
        return seconds / reached if reached else math.inf

    @cached_property
    def best(self) -> tuple[float, float, float, float]:
        """The least cost, and its batch size, learning rate and horizon."""
        horizons = [run.horizon for run in self.table.runs if run.horizon is not None]
        # Between recorded cells as well: a search that tries such a point is not to beat the best.
        grid = product(
            _finer(self.table.batch_sizes),
            _finer(self.table.lrs),
            np.geomspace(min(horizons), max(horizons), HORIZONS),
        )
        costs = list[tuple[float, float, float, float]]()
        for size, lr, horizon in grid:
            point = (round(size), lr, round(horizon))
            if point[2] <= self.budget(point[0]):
                costs.append((self.cost(*point), *point))
        return min(costs)


def _finer(values: Sequence[float]) -> list[float]:
    """The values, and ``BETWEEN`` - 1 between each two, evenly in the logarithm."""
    places = np.arange(0.0, len(values) - 1 + 1e-9, 1.0 / BETWEEN)
    logs = np.interp(places, np.arange(len(values)), np.log(values))
    return np.exp(logs).tolist()


Problem = HorizonLaw | Digits | Recorded


class Frontier:
    """bstune's sampler, as a study uses it."""

    def __init__(self, problem: Problem, seed: int, chooses: bool, reference_first: bool) -> None:
        self._problem = problem
        self._chooses = chooses
        self._reference_first = reference_first
        self.sampler = FrontierSampler(
            objective="time",
            rule=self._rule,
            budget=problem.budget,
            target=problem.target,
            ideal=0.0,
            lr_range=problem.lrs,
            step_time=problem.tau,
            horizon=chooses,
            search_space={
                "batch_size": IntDistribution(*problem.sizes, log=True),
                "lr": FloatDistribution(*problem.lrs, log=True),
            },
            seed=seed,
        )
        self.study = optuna.create_study(sampler=self.sampler)
        self._incumbent: TrialResult | None = None

    def _rule(self, batch_size: float) -> float:
        if not self._reference_first:
            return self._problem.rule(batch_size)
        size, lr = self._problem.reference
        return lr * math.sqrt(batch_size / size)

    def ask(self, finished: Sequence[TrialResult]) -> tuple[optuna.Trial, int, float, int]:
        """The next trial, its batch size, learning rate and horizon."""
        is_reference = self._reference_first and not finished
        if is_reference:
            size, lr = self._problem.reference
            self.study.enqueue_trial({"batch_size": size, "lr": lr})
        trial = self.study.ask()
        size = trial.suggest_int("batch_size", *self._problem.sizes, log=True)
        lr = trial.suggest_float("lr", *self._problem.lrs, log=True)
        if is_reference:
            return trial, size, lr, math.ceil(self._problem.budget(size))
        chosen = self.sampler.max_steps(trial.number) if self._chooses else None
        return trial, size, lr, chosen or math.ceil(self._problem.budget(size))

    def tell(self, trial: optuna.Trial, result: TrialResult) -> None:
        """Take in a result."""
        trial.set_user_attr(RECORD, result.to_json())
        if result.time_to_target is None:
            self.study.tell(trial, state=optuna.trial.TrialState.PRUNED)
        else:
            self.study.tell(trial, result.time_to_target)

    def incumbent(self, finished: Sequence[TrialResult]) -> TrialResult | None:
        """The recommended trial, asked for as trials reach the target."""
        if finished[-1].reached:
            number = self.sampler.recommended(self.study)
            posterior = self.sampler.posterior(self.study)
            if number is not None and posterior is not None:
                again = (
                    fresh_horizons(posterior)[number] if self._chooses else finished[number].horizon
                )
                self._incumbent = replace(finished[number], horizon=again)
        return self._incumbent


class Tpe:
    """Optuna's TPE."""

    def __init__(self, problem: Problem, seed: int, chooses: bool) -> None:
        self._problem = problem
        self._chooses = chooses
        self.study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=seed))

    def ask(self, finished: Sequence[TrialResult]) -> tuple[optuna.Trial, int, float, int]:
        """The next trial, its batch size, learning rate and horizon."""
        trial = self.study.ask()
        problem = self._problem
        size = trial.suggest_int("batch_size", *problem.sizes, log=True)
        half = 0.5 * math.log2(problem.lrs[1] / problem.lrs[0])
        delta = trial.suggest_float("delta", -half, half)
        lr = min(max(problem.rule(size) * 2.0**delta, problem.lrs[0]), problem.lrs[1])
        steps = problem.budget(size)
        if self._chooses:
            steps *= trial.suggest_float("horizon", SHORTEST, 1.0, log=True)
            best = self.incumbent(finished)
            if best is not None:
                steps = min(
                    steps, STOP_FACTOR * (best.time_to_target or math.inf) / problem.tau(size)
                )
        return trial, size, lr, max(1, math.ceil(steps))

    def tell(self, trial: optuna.Trial, result: TrialResult) -> None:
        """Take in a result."""
        if result.time_to_target is not None:
            self.study.tell(trial, math.log(result.time_to_target))
            return
        value = result.history[-1][1]
        whole = self._problem.budget(result.batch_size) * self._problem.tau(result.batch_size)
        # A run that diverged counts as 20 times the target.
        off = math.log(20.0 if value is None else max(value / self._problem.target.value, 1.0))
        self.study.tell(trial, math.log(whole) + off)

    def incumbent(self, finished: Sequence[TrialResult]) -> TrialResult | None:
        """The fastest trial."""
        times = []
        for one in finished:
            if one.time_to_target is not None:
                times.append((one.time_to_target, one.number))
        return finished[min(times)[1]] if times else None


def search(
    problem: Problem, name: str, seed: int, seconds: float
) -> Iterator[tuple[float, TrialResult | None]]:
    """Run a search; yield the seconds spent after each trial, and the incumbent then."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    chooses = "fixed" not in name
    one: Frontier | Tpe = Tpe(problem, seed, chooses)
    if name.startswith("bstune"):
        one = Frontier(problem, seed, chooses, name == REFERENCE_FIRST)
    finished: list[TrialResult] = []
    spent = 0.0
    while spent < seconds and len(finished) < MAX_TRIALS:
        trial, size, lr, horizon = one.ask(finished)
        finished.append(
            problem.run(len(finished), size, lr, horizon, 10_000 * seed + len(finished))
        )
        spent += finished[-1].train_seconds
        one.tell(trial, finished[-1])
        yield spent, one.incumbent(finished)


def at(path: Sequence[tuple[float, Any]], spending: float) -> Any:
    """The last entry of a path before its spending exceeds this; None if there is none."""
    return next((value for spent, value in reversed(path) if spent <= spending), None)


def first_spending(path: Sequence[tuple[float, Any]], unit: float) -> float | None:
    """The spending at the first incumbent of a path, in this unit; None if there is none."""
    for spent, chosen in path:
        if chosen is not None:
            return spent / unit
    return None


def of_law(job: tuple[int, int, str], floor: float | None) -> dict[str, Any]:
    """Run one search on one law with one seed; return the judged and the own ratio after each spending."""
    number, seed, name = job
    law = draw(number, floor)
    unit = law.best[0]
    path = list(search(law, name, 1000 * number + seed, SPENDINGS[-1] * unit))
    rows = []
    for spending in SPENDINGS:
        chosen = at(path, spending * unit)
        judged = math.inf
        own = math.inf
        if chosen is not None:
            judged = law.cost(chosen.batch_size, chosen.lr, float(chosen.horizon)) / unit
            own = chosen.time_to_target / unit
        rows.append((judged, own))
    first = first_spending(path, unit)
    size, lr = law.reference
    reference = law.cost(size, lr, law.budget(size)) / unit
    return {
        "law": number,
        "seed": seed,
        "search": name,
        "trials": len(path),
        "first": first,
        "reference": reference,
        "ratios": rows,
        "share": law.share,
        "power": law.power,
        "floor": law.floor,
        "budget_factor": law.budget_factor,
    }


def of_table(job: tuple[str, int, str]) -> dict[str, Any]:
    """Run one search on one table with one seed; return the judged and the own ratio after each spending."""
    table, seed, name = job
    problem = recorded(table)
    unit = problem.best[0]
    path = list(search(problem, name, seed, SPENDINGS[-1] * unit))
    first = first_spending(path, unit)
    row = {"table": table, "seed": seed, "search": name, "trials": len(path), "first": first}
    return {**row, "ratios": [judged(problem, at(path, one * unit)) for one in SPENDINGS]}


def judged(problem: Recorded, incumbent: TrialResult | None) -> tuple[float, float]:
    """The cost of an incumbent's point and horizon, and of its own run, over the least; infinite without one."""
    if incumbent is None:
        return math.inf, math.inf
    cost = problem.cost(incumbent.batch_size, incumbent.lr, incumbent.horizon or 0)
    own = incumbent.time_to_target or math.inf
    return cost / problem.best[0], own / problem.best[0]


def of_digits(job: tuple[int, str]) -> dict[str, Any]:
    """Run one search on the workload; return its path, each incumbent as (B, lr, horizon, own seconds)."""
    seed, name = job
    problem = digits()
    path = list[tuple[float, tuple[float, ...] | None]]()
    for spent, trial in search(problem, name, seed, DIGITS_SECONDS):
        incumbent = None
        if trial is not None:
            incumbent = (trial.batch_size, trial.lr, trial.horizon, trial.time_to_target)
        path.append((spent, incumbent))
    return {"seed": seed, "search": name, "path": path}


def fresh_cost(job: tuple[tuple[int, float, int], int]) -> float:
    """The seconds until a run meets the target, over so many fresh seeds; infinite if none does."""
    (size, lr, horizon), fresh = job
    seconds = 0.0
    reached = 0
    for i in range(fresh):
        # Seeds that no search of these benchmarks draws.
        run = digits().run(i, size, lr, horizon, 1_000_000 + i)
        seconds += run.train_seconds
        reached += run.reached
    return seconds / reached if reached else math.inf


digits = cache(Digits)
recorded = cache(Recorded)


def judge_digits(rows: Sequence[dict[str, Any]], fresh: int, pool: ProcessPoolExecutor) -> None:
    """Give each search's row the ratios after each spending, and print the best point."""
    points = set()
    for row in rows:
        for _, chosen in row["path"]:
            if chosen is not None:
                points.add(chosen[:3])
    points = sorted(points)
    seconds = pool.map(fresh_cost, product(points, (fresh,)))
    costs = dict(zip(points, seconds, strict=True))
    best = min(points, key=lambda point: costs[point])
    unit = costs[best]
    print(
        f"{len(points)} incumbents; best: B {best[0]}, lr {best[1]:.3g}, horizon {best[2]}: "
        f"{1e3 * unit:.1f} ms"
    )
    for row in rows:
        ratios = []
        for spending in SPENDINGS:
            chosen = at(row["path"], spending * unit)
            if chosen is None:
                ratios.append((math.inf, math.inf))
            else:
                ratios.append((costs[chosen[:3]] / unit, chosen[3] / unit))
        row["ratios"] = ratios
        row["first"] = first_spending(row["path"], unit)
        row["trials"] = len(row.pop("path"))


def show(rows: Sequence[dict[str, Any]]) -> None:
    """Print medians, 90th percentiles and shares within 1.2 of each search after each spending."""
    for name in dict.fromkeys(row["search"] for row in rows):
        some = [row for row in rows if row["search"] == name]
        first = statistics.median(
            math.inf if row["first"] is None else row["first"] for row in some
        )
        trials = statistics.median(row["trials"] for row in some)
        print(f"{name}: first hit after {first:.1f}x, {trials:g} trials (medians of {len(some)})")
        for i, spending in enumerate(SPENDINGS):
            judged, own = map(sorted, zip(*(row["ratios"][i] for row in some), strict=True))
            within = sum(ratio <= 1.2 for ratio in judged) / len(judged)
            tail = int(0.9 * len(some))
            print(
                f"   after {spending:g}x: fresh {statistics.median(judged):.2f}, p90 "
                f"{judged[tail]:.2f}, within 1.2 "
                f"{within:.0%}; own {statistics.median(own):.2f}, p90 {own[tail]:.2f}"
            )


def main() -> None:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    kinds = parser.add_subparsers(required=True, dest="what")
    for name, seeds in (("laws", 2), ("digits", 5), ("table", 3)):
        kind = kinds.add_parser(name)
        kind.add_argument("--seeds", type=int, default=seeds)
        kind.add_argument("--searches", nargs="+", default=list(SEARCHES), choices=SEARCHES)
        kind.add_argument("--jobs", type=int, default=2, help="processes")
        kind.add_argument("--json", type=Path, help="file for every study's numbers")
    kinds.choices["laws"].add_argument("--laws", type=int, default=12)
    kinds.choices["laws"].add_argument("--floor", type=float, help="of the metric, in all laws")
    kinds.choices["digits"].add_argument(
        "--fresh", type=int, default=8, help="seeds that judge an incumbent"
    )
    tables = list(read_index(horizon=True))
    kinds.choices["table"].add_argument("--tables", nargs="+", default=tables, choices=tables)
    options = parser.parse_args()
    about = machine(device("cpu"), options.seeds * (options.laws if options.what == "laws" else 1))
    with ProcessPoolExecutor(options.jobs, get_context("spawn")) as pool:
        if options.what == "laws":
            jobs = product(range(options.laws), range(options.seeds), options.searches)
            rows = list(pool.map(partial(of_law, floor=options.floor), jobs))
        elif options.what == "table":
            jobs = product(options.tables, range(options.seeds), options.searches)
            rows = list(pool.map(of_table, jobs))
        else:
            rows = list(pool.map(of_digits, product(range(options.seeds), options.searches)))
            judge_digits(rows, options.fresh, pool)
    for table in dict.fromkeys(row.get("table") for row in rows):
        if table is not None:
            cost, size, lr, horizon = recorded(table).best
            best = f"B {size}, lr {lr:.3g}, horizon {horizon}"
            print(f"{table}, the least cost: {1e3 * cost:.1f} ms at {best}")
        show([row for row in rows if row.get("table") == table])
    write(options.json, about, rows)


if __name__ == "__main__":
    main()
