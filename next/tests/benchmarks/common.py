"""What gates share: searches on recorded runs or on a synthetic law, rows, and old beside new.

A search knows the batch sizes, the range of rates, step times and target, and a budget of 4 times
the best cell's steps. Costs are recorded seconds, or examples under ``steps``, pruned trials
included; the unit is what the best cell costs. No clock goes into them. Definitions are those of
the old package's benchmark (38d319c7, sweeps/search_problem.py).
"""

import argparse
import functools
import json
import math
import statistics
from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

import bstune
from bstune.core.question import Objective, Question
from bstune.core.records import Budget, Record, Spec
from bstune.core.space import Space
from bstune.search.decide import Proposal, propose
from bstune.search.findings import predictions
from bstune.search.posterior import sample_posterior
from bstune.trial.table import Table, find_table

ROWS = Path(__file__).parent / "rows"
TABLES = ("fashion_mlp", "mnist_cnn", "cifar_mlp", "shakespeare_lstm", "mnist_mlp")
# Spendings at which searches are compared, in costs of the best cell.
MULTIPLES = (5.0, 10.0, 20.0, 40.0)
# A trial's budget, in steps of the best cell.
BUDGET_FACTOR = 4.0
MOST_TRIALS = 1000
# A limit that is met exactly still holds, whatever its arithmetic has rounded.
FOR_ROUNDING = 1.0 + 1e-9
# Ratios count as at most this in comparisons: a search without a choice has none.
WORST = 10.0
RESAMPLES = 2000

Row = dict[str, Any]


@dataclass(frozen=True)
class Problem:
    """What a search knows before its first trial, and the table that answers its trials.

    Args:
        table: recorded runs, with their target.
        objective: of the search; ``curve`` costs and counts seconds, as ``time`` does.
        baseline: batch size and rate of the first trial, which the rule goes through; without one
            the rule goes through the geometric middle of both ranges.
        rule: the scaling rule.
    """

    table: Table
    objective: Objective = "time"
    baseline: tuple[int, float] | None = None
    rule: str = "sqrt"

    def step_time(self, batch_size):
        """What a step costs, as a search knows it: seconds, or examples under ``steps``."""
        return float(batch_size) if self.objective == "steps" else self.table.step_time(batch_size)

    def value(self, cost, batch_size):
        """What is minimised, of a configuration that costs so much: the cost, or its steps."""
        return cost / batch_size if self.objective == "steps" else cost

    def median_cost(self, batch_size, lr):
        """Median cost to the target over the recorded seeds; None if half of them miss it."""
        # A multiple of each cell's number of runs: each is read equally often.
        draws = math.lcm(*map(len, self.table.cells.values()))
        costs = []
        for draw in range(draws):
            share = (draw + 0.5) / draws
            outcome = self.table.outcome_at(batch_size, lr, share, self.table.target)
            steps = math.inf if outcome.steps is None else outcome.steps
            costs.append(steps * self._step_cost(batch_size, outcome.seconds_per_step))
        median = statistics.median(costs)
        return median if math.isfinite(median) else None

    def _step_cost(self, batch_size, seconds):
        return float(batch_size) if self.objective == "steps" else seconds

    @cached_property
    def best(self):
        """Batch size, rate and median cost of the best cell; of equals the cheapest, smallest."""
        costs = {}
        for cell in self.table.cells:
            cost = self.median_cost(*cell)
            if cost is not None:
                costs[cell] = cost
        best = min(costs, key=lambda cell: (self.value(costs[cell], cell[0]), costs[cell], cell))
        return *best, costs[best]

    @cached_property
    def question(self):
        """The objective, to the table's target within ``BUDGET_FACTOR`` times the best's steps."""
        batch_size, _, cost = self.best
        # The step time that a search knows, which is not exactly the best cell's own.
        steps = BUDGET_FACTOR * cost / self.step_time(batch_size)
        budget = Budget(steps=max(1, round(steps)), examples=max(1, round(steps * batch_size)))
        return Question(self.table.target, budget, self.objective)

    @cached_property
    def space(self):
        """All of the table, and the rule."""
        low, high = self.table.range
        lr_low, lr_high = self.table.lrs[0], self.table.lrs[-1]
        middle = math.sqrt(low * high), math.sqrt(lr_low * lr_high)
        return Space(low, high, lr_low, lr_high, self.rule, self.baseline or middle)

    def ratio_of_choice(self, records, seed):
        """How many times the best cell's value the choice takes, by the posterior's mean.

        The choice's value is its median over the recorded seeds; infinite if half of them miss.
        """
        posterior = sample_posterior(self.question, self.space, records, seed=seed)
        predicted = predictions(posterior, self.question, self.step_time)
        chosen = min(predicted, key=lambda one: one.log_value).record
        cost = self.median_cost(chosen.batch_size, chosen.lr)
        if cost is None:
            return math.inf
        best_size, _, best_cost = self.best
        return self.value(cost, chosen.batch_size) / self.value(best_cost, best_size)

    def first_trial(self):
        """The baseline, to its whole budget."""
        if self.baseline is None:
            return None
        size, lr = self.baseline
        last_step = self.question.budget.last_step(size)
        return Proposal(batch_size=size, lr=lr, max_steps=last_step, resumed_from=None)

    def answer(self, proposal, seed, records):
        """The next trial's end; it stops at exactly its last step, as in the old benchmark."""
        number = len(records)
        parent = None if proposal.resumed_from is None else records[proposal.resumed_from]
        is_baseline = number == 0 and self.baseline is not None
        role = "baseline" if is_baseline else "search"
        spec = Spec(
            number=number,
            place=f"{role}/{number}",
            role=role,
            seed=parent.seed if parent else trial_seed(seed, number),
            **proposal.model_dump(),
        )
        outcome = self.table.outcome(spec.batch_size, spec.lr, spec.seed, self.table.target)
        before = parent.steps if parent else 0
        steps = min(outcome.end, max(spec.max_steps, before))
        status = "pruned"
        if outcome.steps is not None and outcome.steps <= steps:
            status = "reached"
        elif outcome.diverged and steps == outcome.end:
            status = "diverged"
        elif steps >= self.question.budget.last_step(spec.batch_size):
            status = "missed"
        history = [(step, value) for step, value in outcome.history if step <= steps]
        missed = [step for step, value in history if not self.table.target.reached(value)]
        step_cost = self._step_cost(spec.batch_size, outcome.seconds_per_step)
        return Record(
            **spec.model_dump(),
            status=status,
            steps=steps,
            steps_low=max(missed, default=0) if status == "reached" else steps,
            seconds_per_step=step_cost,
            train_seconds=(steps - before) * step_cost,
            history=tuple(history),
        )


@functools.cache
def table_problem(name, *given):
    """The problem of a shipped table; ``given`` are the further arguments of a problem."""
    return Problem(find_table(name), *given)


def trial_seed(seed, number):
    """The seed of a trial, as in the old benchmark."""
    return int(np.random.SeedSequence([seed, number, 0]).generate_state(1)[0])


def search(problem, seed, most, proposer=propose):
    """What was spent and all records, after each trial, until trials have cost ``most``."""
    records = []
    spent = 0.0

    def resumable(number):
        # The recorded run of a trial that ended before its last step goes no further.
        return records[number].steps >= records[number].max_steps

    while len(records) < MOST_TRIALS:
        proposal = None if records else problem.first_trial()
        proposal = proposal or proposer(
            problem.question, problem.space, problem.step_time, records, seed, resumable=resumable
        )
        record = problem.answer(proposal, seed, records)
        spent += record.train_seconds / problem.best[2]
        if spent > most * FOR_ROUNDING:
            return
        records.append(record)
        yield spent, records


def path_of(problem, seed, proposer=propose):
    """Trials, spending at the first hit, and the ratio after each of ``MULTIPLES``."""
    path = []
    trials = 0
    for spent, records in search(problem, seed, MULTIPLES[-1], proposer):
        trials = len(records)
        if records[-1].reached:
            path.append((spent, problem.ratio_of_choice(records, seed)))
    return {
        "trials": trials,
        "first": path[0][0] if path else None,
        "ratios": [ratio_after(path, multiple) for multiple in MULTIPLES],
    }


def ratio_after(path, multiple):
    """The ratio of a search's choice after a spending; None without one that reaches the target."""
    ratio = math.inf
    for spent, value in path:
        if spent <= multiple * FOR_ROUNDING:
            ratio = value
    return ratio if math.isfinite(ratio) else None


def read_rows(path):
    """The rows of a file; none where there is no file."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines()]


def jobs_of(**fields):
    """One job for each combination of the fields' values."""
    return [dict(zip(fields, values, strict=True)) for values in product(*fields.values())]


def add_rows(options, jobs, measure):
    """Measure the jobs of this part that the file lacks, and add a row of each.

    Args:
        options: of :func:`parser`.
        jobs: the fields that tell a row from others, which are the arguments of ``measure``.
        measure: gives a row's other fields.
    """
    part, parts = options.part
    options.rows.parent.mkdir(parents=True, exist_ok=True)
    for job in list(jobs)[part - 1 :: parts]:
        if any(job.items() <= row.items() for row in read_rows(options.rows)):
            continue
        code = {"bstune": bstune.__file__, "version": bstune.__version__}
        line = json.dumps({**job, **code, **measure(**job)}) + "\n"
        # One write: processes may add to one file.
        with options.rows.open("a") as file:
            file.write(line)


def parser(description, rows, seeds):
    """The options that gates share: their file of rows, seeds, and the part of the jobs to run."""

    def part(text):
        number, parts = map(int, text.split("/"))
        return number, parts

    options = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--rows", type=Path, default=ROWS / rows, help=f"default: rows/{rows}")
    options.add_argument("--seeds", type=int, default=seeds, help="0: only sum up the rows")
    options.add_argument("--part", type=part, default=(1, 1), help="1/2 and 2/2: of two processes")
    return options


@dataclass(frozen=True)
class Compared:
    """New beside old at one place of their paths, over pairs of the same table and seed."""

    name: str
    pairs: int
    medians: tuple[float, float]
    """New and old."""
    nineties: tuple[float, float]
    """90th percentiles, new and old."""
    ratio: tuple[float, float, float]
    """Geometric mean of new over old, and the ends of its 90% interval."""
    ratio_of_nineties: tuple[float, float, float]

    def __str__(self):
        new, old = self.medians
        new_ninety, old_ninety = self.nineties
        return (
            f"{self.name:>9} {new:6.2f} {old:5.2f} {new_ninety:8.2f} {old_ninety:5.2f}"
            f"    {_spelled(self.ratio)}    {_spelled(self.ratio_of_nineties)}"
        )


HEAD = f"{'':9} median new old   90th new old    new/old (90%)             of 90ths (90%)"


def _spelled(interval):
    return "{:.3f} ({:.3f} to {:.3f})".format(*interval)


def compare(new, old):
    """Compare the first hit and the ratio after each of ``MULTIPLES``.

    Intervals are by bootstrap over pairs within their tables; no ratio counts as more than
    ``WORST``, nor a first hit as later than the last of ``MULTIPLES``.
    """
    olds = {(row["table"], row["seed"]): _values(row) for row in old}
    pairs = defaultdict(list)
    for row in new:
        if (row["table"], row["seed"]) in olds:
            pairs[row["table"]].append((_values(row), olds[row["table"], row["seed"]]))
    rng = np.random.default_rng(0)
    compared = []
    names = ["first hit", *(f"{multiple:g}x" for multiple in MULTIPLES)]
    for place, name in enumerate(names if pairs else []):
        groups = [np.array([(a[place], b[place]) for a, b in group]) for group in pairs.values()]
        both = np.concatenate(groups)
        worst = MULTIPLES[-1] if place == 0 else WORST
        groups = [np.minimum(group, worst) for group in groups]
        means, nineties = [], []
        for _ in range(RESAMPLES):
            drawn = [group[rng.integers(len(group), size=len(group))] for group in groups]
            mean, ninety = _ratios(np.concatenate(drawn))
            means.append(mean)
            nineties.append(ninety)
        mean, ninety = _ratios(np.minimum(both, worst))
        compared.append(
            Compared(
                name=name,
                pairs=len(both),
                medians=tuple(np.median(both, axis=0)),
                nineties=tuple(_ninety(both)),
                ratio=(mean, *np.quantile(means, (0.05, 0.95))),
                ratio_of_nineties=(ninety, *np.quantile(nineties, (0.05, 0.95))),
            )
        )
    return compared


def _values(row):
    """First hit and the ratios, infinite where there is none."""
    return [math.inf if value is None else value for value in (row["first"], *row["ratios"])]


def _ninety(both):
    return np.quantile(both, 0.9, axis=0, method="inverted_cdf")


def _ratios(both):
    """New over old, of columns new and old: the geometric mean, and of the 90th percentiles."""
    mean = math.exp(-np.diff(np.log(both), axis=1).mean())
    new, old = _ninety(both)
    return mean, float(new / old)
