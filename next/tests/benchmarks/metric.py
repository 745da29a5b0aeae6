"""Gate *metric*: the best metric within a budget of seconds, beside Optuna's TPE and GP.

    python tests/benchmarks/metric.py [--seeds 20] [--searches bstune TPE GP]

Spending is counted in full trials. A search is judged by the metric that the configuration which
it recommends has at the budget's end, the mean over all recorded seeds, in standard deviations over
seeds above the best cell's, after 5, 10 and 20 full trials. All begin with the middle of both
ranges.

Problems are the five shipped tables, with the budget in which the fastest cell meets its target,
and synthetic grids of language-model shape. ``HELD_OUT`` took no part in any choice of a number.
"""

import math
import statistics
from functools import cache, cached_property
from typing import Any

import numpy as np
import optuna
from common import TABLES, add_rows, jobs_of, parser, read_rows

from bstune.core.question import Question
from bstune.core.records import Budget, Record, Target
from bstune.core.space import Space
from bstune.search.decide import propose
from bstune.search.findings import predictions
from bstune.search.posterior import sample_posterior
from bstune.trial.recorded_run import around
from bstune.trial.table import find_table

HELD_OUT = ("mnist_cnn", "shakespeare_lstm", *(f"language {number}" for number in range(5)))
LANGUAGES = tuple(f"language {number}" for number in range(9))
PROBLEMS = (*TABLES, *LANGUAGES)
SPENDINGS = (5.0, 10.0, 20.0)
MOST_TRIALS = 600
# Evaluations come at so many times the steps of the one before, the first at this share.
CADENCE = 1.04
FIRST_EVALUATION = 1 / 150
# A step is cut in so many, so that the budget alone ends a trial.
STEPS_A_STEP = 1000.0
# The seeds of cells whose metric is so little above the best cell's tell the deviation.
NEAR_BEST = 0.10


def shares_evaluated():
    count = int(math.log(1.0 / FIRST_EVALUATION) / math.log(CADENCE))
    return CADENCE ** -np.arange(count, -1, -1.0)


SHARES = shares_evaluated()


class Recorded:
    """A shipped table with a budget of seconds."""

    def __init__(self, name):
        self.table = find_table(name)
        self.sizes = self.table.range
        self.lrs = self.table.lrs[0], self.table.lrs[-1]
        self.seconds = math.inf
        for (size, _), runs in self.table.cells.items():
            steps = [run.steps_to(self.table.target) or math.inf for run in runs]
            self.seconds = min(self.seconds, statistics.median(steps) * self._tau(size))
        self.curves = {}
        for cell, runs in self.table.cells.items():
            self.curves[cell] = [self._on_shares(run) for run in runs]
        self.seeds = max(len(runs) for runs in self.curves.values())
        self.worst = max(max(run.metric, default=0.0) for run in self.table.runs)
        self.metric = self.table.target.metric

    def _tau(self, size):
        return self.table.step_time(size)

    def step_time(self, size):
        return self._tau(size) / STEPS_A_STEP

    def _on_shares(self, run):
        times = SHARES * self.seconds
        recorded = np.array(run.steps) * self._tau(run.batch_size)
        last = np.searchsorted(recorded, times * (1.0 + 1e-9), side="right") - 1
        values = np.array([*run.metric, math.nan])[np.maximum(last, 0)]
        values[last < 0] = math.nan
        if run.diverged:
            values[times > 1.001 * (recorded[-1] if recorded.size else 0.0)] = math.inf
        return values

    def curve(self, size, lr, seed):
        return self._between(size, lr, float(np.random.default_rng(seed).random()))

    def _between(self, size, lr, share):
        corners = []
        for one, size_weight in around(self.table.batch_sizes, size):
            for rate, lr_weight in around(self.table.lrs, lr):
                runs = self.curves[self._nearest(one, rate)]
                corners.append(
                    (runs[min(int(share * len(runs)), len(runs) - 1)], size_weight * lr_weight)
                )
        if any(np.isinf(values).any() or np.isnan(values[-1]) for values, _ in corners):
            return max(corners, key=lambda corner: corner[1])[0]
        return np.exp(sum(weight * np.log(values) for values, weight in corners))

    def _nearest(self, size, rate):
        def distance(cell):
            return math.log(cell[0] / size) ** 2 + math.log(cell[1] / rate) ** 2

        return min(self.curves, key=distance)

    def truth(self, size, lr):
        least = []
        for seed in range(self.seeds):
            values = self._between(size, lr, (seed + 0.5) / self.seeds)
            finite = values[np.isfinite(values)]
            least.append(float(finite.min()) if finite.size else math.nan)
        return float(np.mean(least))

    @cached_property
    def best(self):
        return float(np.nanmin([self.truth(*cell) for cell in self.curves]))

    @cached_property
    def deviation(self):
        """Of log metric over seeds, near the best cell."""
        squares, freedom = 0.0, 0
        for cell, runs in self.curves.items():
            ends = np.array([np.nanmin(values) for values in runs if np.isfinite(values[-1])])
            if self.truth(*cell) < (1.0 + NEAR_BEST) * self.best and ends.size > 1:
                squares += float(((np.log(ends) - np.log(ends).mean()) ** 2).sum())
                freedom += ends.size - 1
        return math.sqrt(squares / freedom)


class Language:
    """L + A n^-a of the examples n, which distances from the best batch size and rate divide."""

    sizes = (8, 4096)
    lrs = (2.0**-13, 2.0**-3)
    worst = 11.0
    metric = "val/loss"
    deviation = 0.001

    def __init__(self, number):
        rng = np.random.default_rng([number, 63])
        self.floor = rng.uniform(1.5, 2.5)
        self.scale = rng.uniform(5.0, 9.0)
        self.power = rng.uniform(0.1, 0.35)
        self.examples = 10 ** rng.uniform(2.0, 4.0)
        self.best_x = rng.uniform(5.0, 10.0)
        self.size_curvature = rng.uniform(0.02, 0.15)
        self.best_z = rng.uniform(-10.0, -6.0)
        self.slope = rng.uniform(0.2, 0.8)
        self.lr_curvature = rng.uniform(0.05, 0.4)

    def step_time(self, size):
        # The budget is one of examples.
        return size / 4096 / STEPS_A_STEP

    seconds = 1.0

    def _exact(self, size, lr, share):
        x, z = math.log2(size), math.log2(lr)
        off_size = self.size_curvature * (x - self.best_x) ** 2
        off_lr = self.lr_curvature * (z - self.best_z - self.slope * (x - self.best_x)) ** 2
        n = share * self.examples * np.exp(-off_size - off_lr)
        return self.floor + self.scale * (1.0 + n) ** -self.power

    def curve(self, size, lr, seed):
        rng = np.random.default_rng([seed, 7])
        noise = self.deviation * (
            0.8 * rng.standard_normal() + 0.6 * rng.standard_normal(SHARES.size)
        )
        z_off = math.log2(lr) - self.best_z - self.slope * (math.log2(size) - self.best_x)
        values = self._exact(size, lr, SHARES) * np.exp(self.deviation * noise)
        if z_off > 3.0:
            values[SHARES > 0.1] = math.inf
        return values

    def truth(self, size, lr):
        return float(self._exact(size, lr, 1.0))

    @cached_property
    def best(self):
        return float(self.floor + self.scale * (1.0 + self.examples) ** -self.power)


@cache
def problem_of(name):
    if name in TABLES:
        return Recorded(name)
    return Language(int(name.split()[1]))


class BstuneSearch:
    def __init__(self, problem, seed):
        self.problem, self.seed = problem, seed
        low, high = problem.sizes
        middle = math.sqrt(low * high), math.sqrt(problem.lrs[0] * problem.lrs[1])
        self.space = Space(low, high, *problem.lrs, "sqrt", middle)
        target = Target(problem.metric, None, "min")
        budget = Budget(steps=1, seconds=problem.seconds)
        self.question = Question(target, budget, "metric", budget_step_time=problem.step_time)
        self.records = []

    def recommended(self):
        if not self.records:
            return None
        posterior = sample_posterior(self.question, self.space, self.records, seed=self.seed)
        ranked = predictions(posterior, self.question, self.problem.step_time)
        if not ranked:
            return None
        record = min(ranked, key=lambda one: one.log_value).record
        return record.batch_size, record.lr

    def costs(self):
        problem = self.problem
        while True:
            number = len(self.records)
            proposal = propose(
                self.question, self.space, problem.step_time, self.records, self.seed
            )
            if number == 0:
                size, lr = self.space.snap(2**self.space.middle), self.space.anchor[1]
                last = self.question.last_step(size)
                proposal = proposal.model_copy(
                    update={"batch_size": size, "lr": lr, "max_steps": last, "resumed_from": None}
                )
            parent = None if proposal.resumed_from is None else self.records[proposal.resumed_from]
            run_seed = parent.seed if parent else 1000 * self.seed + number
            values = problem.curve(proposal.batch_size, proposal.lr, run_seed)
            last_step = self.question.last_step(proposal.batch_size)
            history = []
            status, steps = "pruned", proposal.max_steps
            for share, value in zip(SHARES, values, strict=True):
                step = max(1, min(round(share * last_step), last_step))
                if step > proposal.max_steps:
                    break
                if math.isinf(value):
                    status, steps = "diverged", step
                    break
                if not math.isnan(value) and (not history or step > history[-1][0]):
                    history.append((step, float(value)))
            if status == "pruned" and steps >= last_step:
                status = "finished" if history else "diverged"
            before = parent.steps if parent else 0
            yield (steps - before) / last_step
            self.records.append(
                Record(
                    number=number, place=f"search/{number}", role="search", seed=run_seed,
                    **proposal.model_dump(), status=status, steps=steps, history=tuple(history),
                    train_seconds=(steps - before) * problem.step_time(proposal.batch_size),
                )
            )  # fmt: skip


class OptunaSearch:
    def __init__(self, problem, seed, name):
        self.problem, self.seed = problem, seed
        sampler: Any = optuna.samplers.TPESampler(seed=seed)
        if name == "GP":
            sampler = optuna.samplers.GPSampler(seed=seed, warn_independent_sampling=False)
        self.study = optuna.create_study(sampler=sampler)
        low, high = problem.sizes
        self.study.enqueue_trial({"batch_size": round(math.sqrt(low * high)), "delta": 0.0})
        self.best = math.inf, None

    def recommended(self):
        return self.best[1]

    def costs(self):
        problem = self.problem
        low, high = problem.sizes
        half = 0.5 * math.log2(problem.lrs[1] / problem.lrs[0])
        while True:
            trial = self.study.ask()
            size = trial.suggest_int("batch_size", low, high, log=True)
            rule = math.sqrt(problem.lrs[0] * problem.lrs[1]) * math.sqrt(
                size / math.sqrt(low * high)
            )
            lr = rule * 2.0 ** trial.suggest_float("delta", -half, half)
            lr = min(max(lr, problem.lrs[0]), problem.lrs[1])
            values = problem.curve(size, lr, 1000 * self.seed + trial.number)
            broken = np.flatnonzero(np.isinf(values))
            finite = values[np.isfinite(values)]
            cost = float(SHARES[broken[0]]) if broken.size else 1.0
            value = math.inf if broken.size or not finite.size else float(finite.min())
            yield cost
            if value < self.best[0]:
                self.best = value, (size, lr)
            self.study.tell(trial, math.log(min(value, problem.worst)))


def measure(problem, seed, search):
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    one = problem_of(problem)
    run = BstuneSearch(one, seed) if search == "bstune" else OptunaSearch(one, seed, search)
    spent, count, truths = 0.0, 0, []

    def truth():
        pair = run.recommended()
        return math.nan if pair is None else one.truth(*pair)

    for cost in run.costs():
        while len(truths) < len(SPENDINGS) and spent + cost > SPENDINGS[len(truths)] + 1e-6:
            truths.append(truth())
        if len(truths) == len(SPENDINGS) or count == MOST_TRIALS:
            break
        spent += cost
        count += 1
    of_deviation = [round(math.log(value / one.best) / one.deviation, 3) for value in truths]
    return {"trials": count, "of_deviation": of_deviation}


def main():
    options = parser(__doc__, "metric.jsonl", seeds=20)
    options.add_argument("--problems", nargs="*", default=PROBLEMS)
    options.add_argument("--searches", nargs="*", default=["bstune", "TPE", "GP"])
    given = options.parse_args()
    jobs = jobs_of(seed=range(given.seeds), problem=given.problems, search=given.searches)
    add_rows(given, jobs, measure)
    for line in summary(read_rows(given.rows)):
        print(*line, sep="   ")


def summary(rows):
    """Each group of problems, with median/90th percentile after ``SPENDINGS`` of each search."""
    for kind, all_names in (("tables", TABLES), ("grids", LANGUAGES)):
        for group, is_held_out in (("held-out", True), ("other", False)):
            names = [name for name in all_names if (name in HELD_OUT) == is_held_out]
            told = []
            for search in ("bstune", "TPE", "GP", "old"):
                own = [r for r in rows if r["problem"] in names and r["search"] == search]
                by = np.array([row["of_deviation"] for row in own], float).T
                both = [f"{np.nanmedian(v):.2f}/{np.nanquantile(v, 0.9):.2f}" for v in by]
                told.append(", ".join(both))
            yield f"{group} {kind}", *told


if __name__ == "__main__":
    main()
