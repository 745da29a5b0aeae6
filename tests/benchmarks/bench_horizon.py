"""Schedules that end with the trial: bstune's choice of horizons beside a fixed horizon and Optuna's TPE.

    python tests/benchmarks/bench_horizon.py [--laws 12] [--seeds 2] [--searches ...] [--jobs 2] [--json FILE]

Studies are answered from laws, no clock goes in. A run with horizon h meets the target if h >= S(B, lr) exp(noise z), z
drawn by its seed, and costs tau(B) for each step until then, or all h. What no search is told: at its horizon's end the
metric is f + (target - f)(S/h)^p, times a scatter; the target is met at step S^(1-k) h^k. A law draws p, f, k, the
noise, and S, lr*(B), tau as ``bench_coverage.py`` does. All searches get the same budget, in examples, 1 to 4 times the
best point's: the fixed horizon, and the cap of the searched ones. TPE searches delta, off the square-root rule, and the
share of the budget that the horizon takes; its value is the log of seconds to target, for a miss that of the budget
plus the log of the metric over the target. After the first hit no trial of it costs more than twice the fastest.

Spending is counted in the least cost of any (B, lr, h). An incumbent is judged by the law: seconds that its point and
horizon take on fresh seeds until one meets the target, runs that miss included, over the least; ``own`` is the
incumbent's own run instead, with its luck.
"""

import argparse
import math
import statistics
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from itertools import product
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

from bstune.core.records import Target, TrialResult, TrialSpec
from bstune.search.sampler import RECORD, FrontierSampler

SPENDINGS = (10.0, 20.0, 40.0)
LOW, HIGH = 8, 4096
LR_LOW, LR_HIGH = 2.0**-11, 2.0**1.25
SHORTEST = 1 / 64  # of the budget, of TPE's horizons
STOP_FACTOR = 2.0
SEARCHES = ("bstune", "bstune, fixed horizon", "TPE", "TPE, fixed horizon")


@dataclass(frozen=True)
class HorizonLaw:
    """A law of S(B, lr), and what happens over a horizon; see the module's docstring."""

    law: Law
    power: float  # p
    floor: float  # f
    share: float  # k
    budget_factor: float

    def run(self, number: int, batch_size: int, lr: float, horizon: int, seed: int) -> TrialResult:
        """Return the record of a run."""
        law, rng = self.law, np.random.default_rng([seed, 77])
        tau, spec = law.tau(batch_size), TrialSpec(number, number, batch_size, lr, None, seed)
        shortest = law.steps(batch_size, lr)
        if shortest is None:
            steps = max(1, round(0.1 * min(horizon, law.frontier(batch_size))))
            return self._record(spec, "diverged", steps, horizon, ((steps, None),), tau)
        shortest *= math.exp(law.noise * rng.standard_normal())
        height = (shortest / horizon) ** self.power * math.exp(0.03 * rng.standard_normal())
        value = min(self.floor + (TARGET - self.floor) * height, START)
        if horizon < shortest:
            value = max(value, math.nextafter(TARGET, 1.0))
            return self._record(spec, "censored", horizon, horizon, ((horizon, value),), tau)
        met = min(max(1, round(shortest ** (1.0 - self.share) * horizon**self.share)), horizon)
        value = min(value, TARGET) if met == horizon else TARGET
        return self._record(spec, "reached", met, horizon, ((met, value),), tau)

    @staticmethod
    def _record(
        spec: TrialSpec, status: Any, steps: int, horizon: int, history: tuple[Any, ...], tau: float
    ) -> TrialResult:
        low = steps - max(1, steps // 20) if status == "reached" else steps
        return TrialResult.unmeasured(
            spec, status, steps=steps, steps_low=low, examples=steps * spec.batch_size, train_seconds=steps * tau,
            seconds_per_step=tau, history=history, horizon=horizon,
        )  # fmt: skip

    def cost(self, batch_size: float, lr: float, horizon: float) -> float:
        """Return the seconds until a run meets the target, those that miss included: infinite if none does."""
        shortest = self.law.steps(batch_size, lr)
        if shortest is None:
            return math.inf
        reaches = float(ndtr(math.log(horizon / shortest) / self.law.noise))
        if reaches < 1e-6:
            return math.inf
        met = min(shortest ** (1.0 - self.share) * horizon**self.share, horizon)
        return self.law.tau(batch_size) * (met + horizon * (1.0 - reaches) / reaches)

    @cached_property
    def best(self) -> tuple[float, float, float]:
        """The least cost, and its batch size and horizon."""
        sizes = 2.0 ** np.arange(math.log2(LOW), math.log2(HIGH) + 1e-9, 0.125)
        rates = {size: min(max(self.law.best_lr(size), LR_LOW), LR_HIGH) for size in sizes}
        points = [(size, (self.law.steps(size, rates[size]) or math.inf) * r) for size in sizes for r in RATIOS]
        return min((self.cost(size, rates[size], h), size, h) for size, h in points if math.isfinite(h))

    def budget(self, batch_size: float) -> float:
        """Return the steps of the budget, a number of examples."""
        _, size, horizon = self.best
        return max(1.0, self.budget_factor * size * horizon / batch_size)


RATIOS = np.exp(np.linspace(-0.3, 0.8, 45))


def draw(seed: int) -> HorizonLaw:
    """Return a law of its own for each seed."""
    rng = np.random.default_rng([seed, 5])
    return HorizonLaw(
        law=draw_law(seed, "noise 10%"),
        power=math.exp(rng.uniform(math.log(0.3), math.log(1.2))),
        floor=rng.uniform(0.0, 0.08),
        share=(0.2, 0.5, 0.8, 1.0)[seed % 4],
        budget_factor=math.exp(rng.uniform(0.0, math.log(4.0))),
    )


class Frontier:
    """bstune's sampler, as a study uses it."""

    def __init__(self, law: HorizonLaw, seed: int, chooses: bool) -> None:
        self._law, self._chooses = law, chooses
        self.sampler = FrontierSampler(
            objective="time",
            rule=lambda size: math.sqrt(LR_LOW * LR_HIGH) * math.sqrt(size / math.sqrt(LOW * HIGH)),
            budget=law.budget,
            target=Target("error", TARGET, "min"),
            ideal=0.0,
            lr_range=(LR_LOW, LR_HIGH),
            step_time=law.law.tau,
            horizon=chooses,
            search_space={
                "batch_size": IntDistribution(LOW, HIGH, log=True),
                "lr": FloatDistribution(LR_LOW, LR_HIGH, log=True),
            },
            seed=seed,
        )
        self.study = optuna.create_study(sampler=self.sampler)
        self._incumbent: TrialResult | None = None

    def ask(self, finished: Sequence[TrialResult]) -> tuple[optuna.Trial, int, float, int]:
        trial = self.study.ask()
        size = trial.suggest_int("batch_size", LOW, HIGH, log=True)
        lr = trial.suggest_float("lr", LR_LOW, LR_HIGH, log=True)
        fixed = math.ceil(self._law.budget(size))
        return trial, size, lr, (self.sampler.max_steps(trial.number) or fixed) if self._chooses else fixed

    def tell(self, trial: optuna.Trial, result: TrialResult) -> None:
        trial.set_user_attr(RECORD, result.to_json())
        if result.time_to_target is None:
            self.study.tell(trial, state=optuna.trial.TrialState.PRUNED)
        else:
            self.study.tell(trial, result.time_to_target)

    def incumbent(self, finished: Sequence[TrialResult]) -> TrialResult | None:
        if finished[-1].reached:
            number = self.sampler.recommended(self.study)
            self._incumbent = None if number is None else finished[number]
        return self._incumbent


class Tpe:
    """Optuna's TPE."""

    def __init__(self, law: HorizonLaw, seed: int, chooses: bool) -> None:
        self._law, self._chooses = law, chooses
        self.study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=seed))

    def ask(self, finished: Sequence[TrialResult]) -> tuple[optuna.Trial, int, float, int]:
        trial = self.study.ask()
        size = trial.suggest_int("batch_size", LOW, HIGH, log=True)
        half = 0.5 * math.log2(LR_HIGH / LR_LOW)
        delta = trial.suggest_float("delta", -half, half)
        rule = math.sqrt(LR_LOW * LR_HIGH) * math.sqrt(size / math.sqrt(LOW * HIGH))
        lr = min(max(rule * 2.0**delta, LR_LOW), LR_HIGH)
        steps = self._law.budget(size)
        if self._chooses:
            steps *= trial.suggest_float("horizon", SHORTEST, 1.0, log=True)
            best = self.incumbent(finished)
            if best is not None:
                steps = min(steps, STOP_FACTOR * (best.time_to_target or math.inf) / self._law.law.tau(size))
        return trial, size, lr, max(1, math.ceil(steps))

    def tell(self, trial: optuna.Trial, result: TrialResult) -> None:
        if result.time_to_target is not None:
            self.study.tell(trial, math.log(result.time_to_target))
            return
        value = result.history[-1][1]
        whole = self._law.budget(result.batch_size) * self._law.law.tau(result.batch_size)
        self.study.tell(trial, math.log(whole) + math.log((2.0 * START if value is None else value) / TARGET))

    def incumbent(self, finished: Sequence[TrialResult]) -> TrialResult | None:
        times = [(one.time_to_target, one.number) for one in finished if one.time_to_target is not None]
        return finished[min(times)[1]] if times else None


def study(job: tuple[int, int, str]) -> dict[str, Any]:
    """Run one search on one law with one seed; return the judged and the own ratio after each spending."""
    number, seed, name = job
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    law = draw(number)
    kind = Frontier if name.startswith("bstune") else Tpe
    search: Frontier | Tpe = kind(law, 1000 * number + seed, "fixed" not in name)
    unit = law.best[0]
    finished: list[TrialResult] = []
    spent, first, rows = 0.0, None, []
    chosen: TrialResult | None = None
    while len(rows) < len(SPENDINGS):
        trial, size, lr, horizon = search.ask(finished)
        result = law.run(len(finished), size, lr, horizon, 10_000 * seed + len(finished))
        spent += result.train_seconds / unit
        while len(rows) < len(SPENDINGS) and (spent > SPENDINGS[len(rows)] or len(finished) >= 400):
            rows.append(ratios(law, chosen))
        search.tell(trial, result)
        finished.append(result)
        chosen = search.incumbent(finished)
        if first is None and result.reached:
            first = spent
    return {"law": number, "seed": seed, "search": name, "trials": len(finished), "first": first, "ratios": rows,
            "share": law.share, "power": law.power, "floor": law.floor, "budget_factor": law.budget_factor}  # fmt: skip


def ratios(law: HorizonLaw, chosen: TrialResult | None) -> tuple[float, float]:
    """Return the incumbent's cost on fresh seeds, and its own, over the least."""
    if chosen is None:
        return math.inf, math.inf
    judged = law.cost(chosen.batch_size, chosen.lr, float(chosen.horizon or chosen.steps))
    return judged / law.best[0], (chosen.time_to_target or math.inf) / law.best[0]


def show(rows: Sequence[dict[str, Any]]) -> None:
    """Print medians, 90th percentiles and shares within 1.2 of each search after each spending."""
    for name in dict.fromkeys(row["search"] for row in rows):
        some = [row for row in rows if row["search"] == name]
        first = statistics.median(math.inf if row["first"] is None else row["first"] for row in some)
        trials = statistics.median(row["trials"] for row in some)
        print(f"{name}: first hit after {first:.1f}x, {trials:g} trials (medians of {len(some)})")
        for i, spending in enumerate(SPENDINGS):
            judged, own = (sorted(row["ratios"][i][j] for row in some) for j in (0, 1))
            within = sum(ratio <= 1.2 for ratio in judged) / len(judged)
            tails = [some[int(0.9 * len(some))] for some in (judged, own)]
            print(
                f"   after {spending:g}x: fresh {statistics.median(judged):.2f}, p90 {tails[0]:.2f}, within 1.2 "
                f"{within:.0%}; own {statistics.median(own):.2f}, p90 {tails[1]:.2f}"
            )


def main() -> None:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--laws", type=int, default=12)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--searches", nargs="+", default=list(SEARCHES), choices=SEARCHES)
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--json", type=Path, help="file for every study's numbers")
    options = parser.parse_args()
    about = machine(device("cpu"), options.laws * options.seeds)
    jobs = list(product(range(options.laws), range(options.seeds), options.searches))
    with ProcessPoolExecutor(options.jobs) as pool:
        rows = list(pool.map(study, jobs))
    show(rows)
    write(options.json, about, rows)


if __name__ == "__main__":
    main()
