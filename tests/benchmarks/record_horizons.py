"""Records tables of runs whose schedule ends with the trial: digits_linear, mnist_mlp_linear, airbench.

    python tests/benchmarks/record_horizons.py digits digits_linear.jsonl
    python tests/benchmarks/record_horizons.py mnist_mlp mnist_mlp_linear.jsonl
    python tests/benchmarks/record_horizons.py airbench_cifar airbench_cifar.jsonl   # on a GPU

The learning rate falls by a straight line from its value to zero at the horizon; airbench_cifar has its source's
schedule. :data:`PLANS` has the batch sizes, and the learning rates and the horizons of each. A run goes on to its
horizon's end, whether or not it meets the target before. It is evaluated as a trial near its target is, at steps whose
ratio is 1.05. Of these evaluations a table keeps those from ``FIRST_SHARE`` of the horizon on whose ratio is
``KEPT_RATIO``, the two between which the target is met, and the last.

Each run is appended to FILE.runs as it ends, so that the same command goes on where an earlier one stopped. FILE itself
is written once all runs are there; a step of a batch size then has the median of its runs' seconds.
"""

import argparse
import json
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch

from bstune.core.records import Target, TrialResult, TrialSpec, dump_json
from bstune.study.prepare import compose_checked
from bstune.system.console import quieten
from bstune.system.files import append_text, write_text
from bstune.trial.workload import LightningBackend, build_workload, checked_protocol, resolve

# A line of a table.
Row = dict[str, Any]

# No evaluation before this share of the horizon is kept.
FIRST_SHARE = 0.05
# The steps of evaluations that are kept differ by this ratio at least.
KEPT_RATIO = 1.2
METRIC_DIGITS = 4
SECONDS_DIGITS = 3
# The target always counts as near, and evaluations may cost as much as the training.
DENSE = (
    "protocol.close_to_target=1000",
    "protocol.evaluation_share=1",
    "protocol.evaluation_cost=0.1",
)


@dataclass(frozen=True)
class Plan:
    """Which runs of a workload are recorded."""

    # The table's target: a run goes on beyond it.
    target: Target
    never: float  # a value of the metric that no run comes to, so that none ends before its horizon
    middle_lrs: dict[int, float]  # by batch size: where it trains well
    lr_factors: tuple[float, ...]  # of the middle one
    # The shortest horizon is ``least_steps + least_examples / B`` steps, somewhat below S*(B).
    least_steps: float
    least_examples: float
    horizon_ratio: float
    horizon_count: int
    arguments: tuple[str, ...] = ("device=cpu", "schedule=linear", *DENSE)
    seeds: tuple[int, ...] = (0, 1)

    def horizon(self, batch_size: int, rung: int) -> int:
        """Give a horizon of a batch size, in steps; that of rung 0 is the shortest."""
        shortest = self.least_steps + self.least_examples / batch_size
        return round(shortest * self.horizon_ratio**rung)

    def specs(self) -> Iterator[TrialSpec]:
        """Give all runs; batch sizes take turns, so that what else the machine does slows all of them alike."""
        rungs = range(self.horizon_count)
        for seed, factor, rung in product(self.seeds, self.lr_factors, rungs):
            for size, middle in self.middle_lrs.items():
                horizon = self.horizon(size, rung)
                yield TrialSpec(0, 0, size, middle * factor, None, seed, max_steps=horizon)


PLANS = {
    "digits": Plan(
        target=Target("val/loss", 0.1, "min"),
        never=0.001,
        # Batch sizes 300^(1/7) = 2.26 times apart.
        middle_lrs={4: 0.2, 9: 0.4, 20: 0.4, 45: 0.8, 103: 0.8, 234: 1.6, 530: 1.6, 1200: 1.6},
        lr_factors=(0.25, 0.5, 1.0, 2.0, 4.0),
        least_steps=40.0,
        least_examples=1700.0,
        horizon_ratio=1.6,
        horizon_count=6,
    ),
    "mnist_mlp": Plan(
        target=Target("val/error", 0.06, "min"),
        never=0.0001,
        # Batch sizes 3 times apart.
        middle_lrs={8: 0.1, 24: 0.2, 72: 0.4, 216: 0.4, 648: 0.4, 1944: 0.4},
        lr_factors=(0.25, 0.5, 1.0, 2.0, 4.0),
        least_steps=45.0,
        least_examples=6000.0,
        horizon_ratio=1.7,
        horizon_count=5,
    ),
    # On a GPU, where its source's run, 476 steps of 1024 at a rate of 1.5, takes two seconds. The
    # horizons are 0.8, 1 and 1.25 times its examples, without a part that is counted in steps.
    "airbench_cifar": Plan(
        target=Target("val/error", 0.06, "min"),
        never=0.0001,
        # By the square root of the batch size from the source's pair.
        middle_lrs={256: 0.75, 512: 1.06, 1024: 1.5, 1448: 1.78, 2048: 2.12, 4096: 3.0},
        # The middle first: a machine that is lent for minutes may end the command.
        lr_factors=(1.0, 1.41, 0.71, 2.0),
        least_steps=0.0,
        least_examples=390_000.0,
        horizon_ratio=1.25,
        horizon_count=3,
        # Errors of 0.07 and below count as near the target.
        arguments=("device=cuda", "protocol.close_to_target=700"),
        seeds=(0,),
    ),
}


def make_backend(workload: str, plan: Plan) -> LightningBackend:
    """Build what trains a workload, each run to its horizon's end."""
    arguments = [
        f"workload={workload}",
        *plan.arguments,
        "mlflow.enabled=false",
        f"output={tempfile.mkdtemp()}/o",
        # Met at its own target a trial would end.
        f"workload.target.value={plan.never}",
        "protocol.noise_scale_every=null",
    ]
    composed = compose_checked(arguments)
    options, recipe = resolve(composed.options, composed.trained_recipe)
    protocol = checked_protocol(options, recipe)
    return LightningBackend(options, recipe, build_workload(options, recipe), protocol)


def row_of(result: TrialResult, target: Target) -> Row:
    """Give the line of a run, with the evaluations that are kept of it."""
    # "reached" would mean that ``never`` was met, and the run is too short.
    if result.status not in ("stopped", "diverged"):
        raise RuntimeError(
            f"a run has to end with its horizon or diverge, but got {result.status}: {result}"
        )
    history = [(step, value) for step, value in result.history if value is not None]
    kept = _kept(history, result.horizon or 0, target)
    return {
        "batch_size": result.batch_size,
        "lr": result.lr,
        "horizon": result.horizon,
        "seed": result.seed,
        "steps": [step for step, _ in kept],
        "metric": [_rounded(value, METRIC_DIGITS) for _, value in kept],
        "seconds_per_step": result.seconds_per_step,
        "status": result.status,
    }


def _kept(
    history: Sequence[tuple[int, float]], horizon: int, target: Target
) -> list[tuple[int, float]]:
    """Choose the evaluations that stand in a table; see the module's docstring."""
    met = [i for i, (_, value) in enumerate(history) if target.reached(value)]
    wanted = {len(history) - 1}
    if met:
        # The step at which the target was met lies between the two.
        wanted |= {met[0] - 1, met[0]}
    last = 0.0
    for i, (step, _) in enumerate(history):
        if step >= FIRST_SHARE * horizon and step >= KEPT_RATIO * last:
            wanted.add(i)
            last = step
    return [pair for i, pair in enumerate(history) if i in wanted]


def _rounded(value: float, digits: int) -> float:
    return float(f"{value:.{digits}g}")


def _key(row: Row) -> tuple[int, float, int, int]:
    return row["batch_size"], row["lr"], row["seed"], row["horizon"]


def record(workload: str, path: Path) -> None:
    """Train all runs that FILE.runs lacks, then write FILE."""
    plan = PLANS[workload]
    runs = path.with_name(path.name + ".runs")
    rows: list[Row] = []
    if runs.exists():
        rows = [json.loads(line) for line in runs.read_text().splitlines()]
    done = {_key(row) for row in rows}
    backend = make_backend(workload, plan)
    specs = list(plan.specs())
    for number, spec in enumerate(specs, start=1):
        # It was recorded before the command was stopped.
        if (spec.batch_size, spec.lr, spec.seed, spec.max_steps) in done:
            continue
        row = row_of(backend.run(spec, None, None), plan.target)
        rows.append(row)
        append_text(runs, dump_json(row) + "\n")
        end = f"{row['status']}, {row['metric'][-1:]}"
        print(
            f"run {number}/{len(specs)}: B {spec.batch_size}, lr {spec.lr:g}, "
            f"horizon {spec.max_steps}, seed {spec.seed}: {end}",
            flush=True,
        )
    write_rows(path, rows)


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    """Write a table: a step of each batch size has the median of its runs' seconds."""
    lines = []
    for row in sorted(rows, key=_key):
        seconds = [
            other["seconds_per_step"]
            for other in rows
            if other["batch_size"] == row["batch_size"] and other["seconds_per_step"] is not None
        ]
        median = _rounded(statistics.median(seconds), SECONDS_DIGITS)
        lines.append(dump_json({**row, "seconds_per_step": median}))
    write_text(path, "\n".join(lines) + "\n")


def main() -> None:
    """Record what is asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("workload", choices=PLANS)
    parser.add_argument("file", type=Path, help="the table to write")
    options = parser.parse_args()
    torch.set_num_threads(1)
    quieten()
    record(options.workload, options.file)


if __name__ == "__main__":
    main()
