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
from dataclasses import replace
from functools import cache, cached_property, partial
from operator import itemgetter

import numpy as np
import optuna
from common import TABLES, run_gate

from bstune.core.question import Question
from bstune.core.records import Budget, Record, Target
from bstune.core.space import Space
from bstune.search.decide import Proposal, propose
from bstune.search.findings import predictions
from bstune.search.posterior import sample_posterior
from bstune.sweeps.search_benchmark import axis_of, lr_at
from bstune.trial.recorded_run import around
from bstune.trial.table import Table, find_table

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
SHARES = CADENCE ** -np.arange(int(-math.log(FIRST_EVALUATION) / math.log(CADENCE)), -1, -1.0)


class Recorded(Table):
    """A shipped table with a budget of seconds."""

    @cached_property
    def seconds(self):
        """In which the fastest cell meets the target."""
        times = []
        for (size, _), runs in self.cells.items():
            steps = [run.steps_to(self.target) or math.inf for run in runs]
            times.append(statistics.median(steps) * super().step_time(size))
        return min(times)

    @property
    def worst(self):
        return max(max(run.metric, default=0.0) for run in self.runs)

    def step_time(self, size):
        return super().step_time(size) / STEPS_A_STEP

    @cached_property
    def curves(self):
        """The metric at each of ``SHARES`` by batch size, rate and seed; infinite: it diverged."""
        times = SHARES * self.seconds
        curves = {}
        for run in self.runs:
            recorded = np.array(run.steps) * super().step_time(run.batch_size)
            last = np.searchsorted(recorded, times * (1.0 + 1e-9), side="right") - 1
            values = np.array([*run.metric, math.nan])[np.maximum(last, 0)]
            values[last < 0] = math.nan
            if run.diverged:
                values[times > 1.001 * (recorded[-1] if recorded.size else 0.0)] = math.inf
            curves[run.batch_size, run.lr, run.seed] = values
        return curves

    def curve(self, size, lr, seed):
        return self._between(size, lr, float(np.random.default_rng(seed).random()))

    def _between(self, size, lr, share):
        corners = []
        for one, size_weight in around(self.batch_sizes, size):
            for rate, lr_weight in around(self.lrs, lr):
                run = self._run_of_cell(one, rate, share)
                values = self.curves[run.batch_size, run.lr, run.seed]
                corners.append((values, size_weight * lr_weight))
        if any(np.isinf(values).any() or np.isnan(values[-1]) for values, _ in corners):
            return max(corners, key=itemgetter(1))[0]
        return np.exp(sum(weight * np.log(values) for values, weight in corners))

    def truth(self, size, lr):
        seeds = max(map(len, self.cells.values()))
        least = []
        for seed in range(seeds):
            values = self._between(size, lr, (seed + 0.5) / seeds)
            least.append(min(values[np.isfinite(values)], default=math.nan))
        return float(np.mean(least))

    @cached_property
    def best(self):
        return float(np.nanmin([self.truth(*cell) for cell in self.cells]))

    @cached_property
    def deviation(self):
        """Of log metric over seeds, near the best cell."""
        squares, freedom = 0.0, 0
        for cell, runs in self.cells.items():
            values = [self.curves[*cell, run.seed] for run in runs]
            logs = np.log([np.nanmin(one) for one in values if np.isfinite(one[-1])])
            if self.truth(*cell) < (1.0 + NEAR_BEST) * self.best and logs.size > 1:
                squares += float(((logs - logs.mean()) ** 2).sum())
                freedom += logs.size - 1
        return math.sqrt(squares / freedom)


class Language:
    """L + A n^-a of the examples n, which distances from the best batch size and rate divide."""

    range = (8, 4096)
    lrs = (2.0**-13, 2.0**-3)
    worst = 11.0
    target = Target("val/loss", None, "min")
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
        return self.truth(2.0**self.best_x, 2.0**self.best_z)


@cache
def problem_of(name):
    if name in TABLES:
        table = find_table(name)
        return Recorded(table.runs, table.target)
    return Language(int(name.split()[1]))


def space_of(problem):
    """All sizes and rates, and the square-root rule through the middle of both."""
    rates = problem.lrs[0], problem.lrs[-1]
    return Space.around(problem.range, rates, "sqrt", None, multiple=1)


def by_bstune(problem, seed):
    """The search of a study: the cost of each trial, and what gives the choice before it."""
    space = space_of(problem)
    target = replace(problem.target, goal=None)
    budget = Budget(steps=1, seconds=problem.seconds)
    question = Question(target, budget, "metric", budget_step_time=problem.step_time)
    records = []

    def choice():
        posterior = sample_posterior(question, space, records, seed=seed)
        ranked = predictions(posterior, question, problem.step_time)
        best = min(ranked, key=lambda one: one.log_value, default=None)
        return best and (best.record.batch_size, best.record.lr)

    while True:
        number = len(records)
        size, lr = space.snap(2**space.middle), space.anchor[1]
        proposal = Proposal(batch_size=size, lr=lr, max_steps=question.last_step(size))
        if records:
            proposal = propose(question, space, problem.step_time, records, seed)
        parent = None if proposal.resumed_from is None else records[proposal.resumed_from]
        run_seed = parent.seed if parent else 1000 * seed + number
        last_step = question.last_step(proposal.batch_size)
        status, steps = "pruned", proposal.max_steps
        history = {}
        values = problem.curve(proposal.batch_size, proposal.lr, run_seed)
        for share, value in zip(SHARES, values, strict=True):
            step = max(1, min(round(share * last_step), last_step))
            if step > proposal.max_steps:
                break
            if math.isinf(value):
                status, steps = "diverged", step
                break
            if not math.isnan(value):
                history.setdefault(step, float(value))
        if status == "pruned" and steps >= last_step:
            status = "finished" if history else "diverged"
        trained = steps - (parent.steps if parent else 0)
        yield trained / last_step, choice
        records.append(
            Record(
                number=number, place=f"search/{number}", role="search", seed=run_seed,
                **proposal.model_dump(), status=status, steps=steps, history=tuple(history.items()),
                train_seconds=trained * problem.step_time(proposal.batch_size),
            )
        )  # fmt: skip


def by_optuna(problem, seed, sampler):
    """The same of a sampler of Optuna's, whose choice is its best trial."""
    space = space_of(problem)
    study = optuna.create_study(sampler=sampler(seed=seed))
    name, low, high, _ = axis_of(space, on_rule=True)
    study.enqueue_trial({"batch_size": round(2**space.middle), name: 0.0})
    found = [(math.inf, None)]

    def choice():
        return min(found, key=itemgetter(0))[1]

    while True:
        trial = study.ask()
        size = trial.suggest_int("batch_size", *problem.range, log=True)
        lr = lr_at(space, size, trial.suggest_float(name, low, high), on_rule=True)
        values = problem.curve(size, lr, 1000 * seed + trial.number)
        broken = np.flatnonzero(np.isinf(values))
        yield (float(SHARES[broken[0]]) if broken.size else 1.0), choice
        value = math.inf if broken.size else float(np.nanmin([*values, math.inf]))
        found.append((value, (size, lr)))
        study.tell(trial, math.log(min(value, problem.worst)))


SEARCHES = {
    "bstune": by_bstune,
    "TPE": partial(by_optuna, sampler=optuna.samplers.TPESampler),
    "GP": partial(by_optuna, sampler=optuna.samplers.GPSampler),
}


def measure(problem, seed, search):
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    one = problem_of(problem)
    spent, deviations = 0.0, []
    for count, (cost, choice) in enumerate(SEARCHES[search](one, seed)):
        while len(deviations) < len(SPENDINGS) and spent + cost > SPENDINGS[len(deviations)] + 1e-6:
            chosen = choice()
            truth = one.truth(*chosen) if chosen else math.nan
            deviations.append(round(math.log(truth / one.best) / one.deviation, 3))
        if len(deviations) == len(SPENDINGS) or count == MOST_TRIALS:
            return {"trials": count, "of_deviation": deviations}
        spent += cost
    raise AssertionError


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
    run_gate(
        __doc__,
        "metric.jsonl",
        measure,
        summary,
        seeds=20,
        problems=("problem", PROBLEMS),
        searches=("search", (*SEARCHES,)),
    )
