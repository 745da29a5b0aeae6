"""Gate *search*: the search on recorded runs beside the old package's, in counted costs, no clock.

    python tests/benchmarks/bench_search.py run --rows ROWS [--seeds 5] [--tables NAME ...]
    python tests/benchmarks/bench_search.py summary --rows NEW --old OLD

A search knows the table's batch sizes, range of rates, step times and target, and a budget of 4
times the best cell's steps; the rule goes through the geometric middle of both ranges, and no
baseline is run first. A line is how many times the best cell's time its choice takes (median over
the recorded seeds, by the posterior's mean) after 5, 10, 20 and 40 times what the best cell costs.
Costs are recorded seconds, pruned trials included. The old rows come from old_search.py.
"""

import argparse
import json
import math
import statistics
import tomllib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

import bstune.core
from bstune.core.question import Question
from bstune.core.records import Budget, Record, Spec, Status
from bstune.core.space import Space
from bstune.search.decide import Proposal, propose
from bstune.search.findings import predictions
from bstune.search.posterior import sample_posterior
from bstune.trial.table import Table, find_table

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"
TABLES = ("fashion_mlp", "mnist_cnn", "cifar_mlp", "shakespeare_lstm", "mnist_mlp")
# Spendings at which searches are compared, in costs of the best cell.
MULTIPLES = (5.0, 10.0, 20.0, 40.0)
# A trial's budget, in steps of the best cell.
BUDGET_FACTOR = 4.0
MOST_TRIALS = 1000
# A limit that is met exactly still holds, whatever its arithmetic has rounded.
FOR_ROUNDING = 1.0 + 1e-9
# Ratios count as at most this in means: a search without a choice has none.
WORST = 10.0
RESAMPLES = 2000


@dataclass(frozen=True)
class Problem:
    """A table, and what a search knows of it before its first trial."""

    name: str
    table: Table

    @cached_property
    def best(self) -> tuple[float, float, float]:
        """Batch size, rate and median seconds of the best cell."""
        times = {}
        for cell in self.table.cells:
            seconds = self.median_seconds(*cell)
            if seconds is not None:
                times[cell] = seconds
        cell = min(times, key=lambda cell: (times[cell], cell))
        return *cell, times[cell]

    def median_seconds(self, batch_size: float, lr: float) -> float | None:
        """Median seconds to the target over the recorded seeds; None if half of them miss it."""
        # A multiple of each cell's number of runs: each is read equally often.
        draws = math.lcm(*map(len, self.table.cells.values()))
        seconds = []
        for draw in range(draws):
            share = (draw + 0.5) / draws
            outcome = self.table.outcome_at(batch_size, lr, share, self.table.target)
            steps = math.inf if outcome.steps is None else outcome.steps
            seconds.append(steps * outcome.seconds_per_step)
        median = statistics.median(seconds)
        return median if math.isfinite(median) else None

    @cached_property
    def question(self) -> Question:
        """Least time to the table's target."""
        batch_size, _, seconds = self.best
        # The step time that a search knows, which is not exactly the best cell's own.
        steps = BUDGET_FACTOR * seconds / self.table.step_time(batch_size)
        budget = Budget(steps=max(1, round(steps)), examples=max(1, round(steps * batch_size)))
        return Question(self.table.target, budget)

    @cached_property
    def space(self) -> Space:
        """All of the table, and the square-root rule through its middle."""
        low, high = self.table.range
        lr_low, lr_high = self.table.lrs[0], self.table.lrs[-1]
        middle = math.sqrt(low * high), math.sqrt(lr_low * lr_high)
        return Space(low, high, lr_low, lr_high, "sqrt", middle)

    def answer(self, number: int, proposal: Proposal, seed: int, records: list[Record]) -> Record:
        """A trial that stops at exactly its last step, as the old package's comparison had it."""
        parent = None if proposal.resumed_from is None else records[proposal.resumed_from]
        spec = Spec(
            number=number,
            place=f"search/{number}",
            role="search",
            seed=parent.seed if parent else trial_seed(seed, number),
            **proposal.model_dump(),
        )
        outcome = self.table.outcome(spec.batch_size, spec.lr, spec.seed, self.table.target)
        before = parent.steps if parent else 0
        steps = min(outcome.end, max(spec.max_steps, before))
        status: Status = "pruned"
        if outcome.steps is not None and outcome.steps <= steps:
            status = "reached"
        elif outcome.diverged and steps == outcome.end:
            status = "diverged"
        elif steps >= self.question.budget.last_step(spec.batch_size):
            status = "missed"
        history = [(step, value) for step, value in outcome.history if step <= steps]
        missed = [step for step, value in history if not self.table.target.reached(value)]
        return Record(
            **spec.model_dump(),
            status=status,
            steps=steps,
            steps_low=max(missed, default=0) if status == "reached" else steps,
            seconds_per_step=outcome.seconds_per_step,
            train_seconds=(steps - before) * outcome.seconds_per_step,
            history=tuple(history),
        )


def trial_seed(seed: int, number: int) -> int:
    """The seed of a trial, as the old package's comparison had it."""
    return int(np.random.SeedSequence([seed, number, 0]).generate_state(1)[0])


def search(problem: Problem, seed: int) -> dict[str, Any]:
    """Search a table until its trials have cost the last of ``MULTIPLES``; a row."""
    step_time = problem.table.step_time
    unit = problem.best[2]
    records: list[Record] = []
    path: list[tuple[float, float]] = []
    spent = 0.0

    def resumable(number: int) -> bool:
        # The recorded run of a trial that ended before its last step goes no further.
        return records[number].steps >= records[number].max_steps

    while len(records) < MOST_TRIALS:
        proposal = propose(
            problem.question, problem.space, step_time, records, seed, resumable=resumable
        )
        record = problem.answer(len(records), proposal, seed, records)
        spent += record.train_seconds / unit
        if spent > MULTIPLES[-1] * FOR_ROUNDING:
            break
        records.append(record)
        if record.reached:
            posterior = sample_posterior(problem.question, problem.space, records, seed=seed)
            predicted = predictions(posterior, problem.question, step_time)
            chosen = min(predicted, key=lambda it: it.log_value).record
            seconds = problem.median_seconds(chosen.batch_size, chosen.lr)
            path.append((spent, math.inf if seconds is None else seconds / unit))
    return {
        "table": problem.name,
        "seed": seed,
        "bstune": bstune.core.__file__,
        "version": tomllib.loads(PYPROJECT.read_text())["project"]["version"],
        "trials": len(records),
        "first": path[0][0] if path else None,
        "ratios": [ratio_after(path, multiple) for multiple in MULTIPLES],
    }


def ratio_after(path: Sequence[tuple[float, float]], multiple: float) -> float | None:
    """The ratio of a search's choice after a spending; None without one that reaches the target."""
    ratio = math.inf
    for spent, value in path:
        if spent <= multiple * FOR_ROUNDING:
            ratio = value
    return ratio if math.isfinite(ratio) else None


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a file; none where there is no file."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines()]


def run(path: Path, tables: Sequence[str], seeds: Sequence[int]) -> None:
    """Add the rows that a file lacks."""
    there = {(row["table"], row["seed"]) for row in read_rows(path)}
    for name in tables:
        problem = Problem(name, find_table(name))
        for seed in seeds:
            if (name, seed) not in there:
                with path.open("a") as file:
                    file.write(json.dumps(search(problem, seed)) + "\n")


def values_of(row: dict[str, Any]) -> list[float]:
    """First hit and the ratios, infinite where there is none."""
    return [math.inf if value is None else value for value in (row["first"], *row["ratios"])]


def summary(new: Sequence[dict[str, Any]], old: Sequence[dict[str, Any]]) -> list[str]:
    """Pair rows by table and seed: a line for the first hit and for each spending.

    The ratio is the geometric mean of new over old, with a 90% interval by bootstrap over pairs
    within their tables; no ratio counts as more than ``WORST``.
    """
    olds = {(row["table"], row["seed"]): values_of(row) for row in old}
    pairs = defaultdict(list)
    for row in new:
        if (row["table"], row["seed"]) in olds:
            key = row["table"], row["seed"]
            pairs[row["table"]].append((values_of(row), olds[key]))
    count = sum(map(len, pairs.values()))
    lines = [f"{count} pairs     median new old   90th new old   new/old (90%)"]
    rng = np.random.default_rng(0)
    for place, name in enumerate(["first hit", *(f"{multiple:g}x" for multiple in MULTIPLES)]):
        worst = MULTIPLES[-1] if place == 0 else WORST
        groups = []
        for of_table in pairs.values():
            groups.append(np.array([(one[place], other[place]) for one, other in of_table]))
        both = np.concatenate(groups)
        logs = []
        for group in groups:
            logs.append(np.diff(np.log(np.minimum(group[:, ::-1], worst)))[:, 0])
        means = []
        for _ in range(RESAMPLES):
            drawn = [rng.choice(of_table, len(of_table)) for of_table in logs]
            means.append(np.concatenate(drawn).mean())
        low, high = np.exp(np.quantile(means, (0.05, 0.95)))
        middle = np.median(both, axis=0)
        last = np.quantile(both, 0.9, axis=0, method="inverted_cdf")
        mean = math.exp(np.concatenate(logs).mean())
        lines.append(
            f"{name:>9}        {middle[0]:5.2f} {middle[1]:5.2f}    {last[0]:5.2f} {last[1]:5.2f}"
            f"    {mean:.3f} ({low:.3f} to {high:.3f})"
        )
    return lines


def main() -> None:
    """Run searches, or summarise their rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["run", "summary"])
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--old", type=Path)
    parser.add_argument("--tables", nargs="+", default=TABLES)
    parser.add_argument("--seeds", type=int, default=5)
    options = parser.parse_args()
    if options.what == "run":
        run(options.rows, options.tables, range(options.seeds))
    else:
        print("\n".join(summary(read_rows(options.rows), read_rows(options.old))))


if __name__ == "__main__":
    main()
