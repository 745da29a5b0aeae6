"""Whether the seconds that a study states for its winner are those that further seeds take, and the least there are.

    python tests/benchmarks/bench_seconds.py +workload=digits [OPTION=VALUE ...] [--studies 10] [--fresh 20]
        [--busy 0] [--best B,LR] [--results FOLDER [--studies-only]] --rows FILE

First a sweep finds the point of least time: batch sizes a factor of two apart times learning rates a factor of two
apart around the scaling rule's, two seeds each, then half as far apart around the best, more seeds for the best ones.
``--best`` takes the place of the sweep: a recorded table's best cell, say, where a sweep would take hours.
Each study has a seed of its own, as on the command line. When it has ended, its winner and the sweep's best train on
further seeds in one process, in turns; seconds are steps to the target, of a run that is evaluated at each step, times
the seconds per step of the same run with the workload's own evaluations. ``--busy N`` keeps N processes computing
beside the study, and none beside the further seeds: the seconds that a study on a busy machine states are to be those
of a quiet one. ``--busy other`` says that other work keeps the machine busy: ``--studies-only`` runs the studies
beside it, and the same command without it the further seeds once the machine is quiet. A row of JSON a sweep and a
study is appended to FILE, and the same command goes on.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

SPIN = "while True: pass"
SHOWN = ("seed", "batch_size", "stated", "low", "high", "median", "holds", "over_best", "seconds")


@contextmanager
def busy(count: int) -> Iterator[None]:
    """Keep so many processes computing meanwhile."""
    processes = [subprocess.Popen([sys.executable, "-c", SPIN]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def run_study(arguments: Sequence[str], seed: int, folder: Path) -> dict[str, Any]:
    """Run a study as its user does; return its result."""
    # The study runs in a folder of its own, from which a relative folder of configs is not found.
    given = [str(Path(one).absolute()) if Path(one).is_dir() else one for one in arguments]
    command = [sys.executable, "-m", "bstune", *given, f"seed={seed}", "study=s", "output=out"]
    environment = {**os.environ, "BSTUNE_CACHE": str(folder / "cache")}
    subprocess.run(
        [*command, "mlflow.enabled=false"],
        cwd=folder,
        env=environment,
        check=True,
        capture_output=True,
    )
    result: dict[str, Any] = json.loads((folder / "out/curve.json").read_text())
    return result


Point = tuple[int, float, dict[str, Any]]
"""Batch size, learning rate, and what else is tuned."""
OCTAVES = (-2, -1, 0, 1, 2, 3)
"""Of the sweep's learning rates over the scaling rule's."""
SWEEP_THREADS = 1
SWEPT_SEEDS = 2
BEST_OF_SWEEP = 6
"""Points of the sweep that run on more seeds."""
BEST_SEEDS = 6


class Trainer:
    """Trains points of one workload in this process, as its studies do."""

    def __init__(self, arguments: Sequence[str], threads: int | None, seconds_of: str) -> None:
        import torch

        from bstune.study.prepare import compose_checked
        from bstune.trial.workload import (
            LightningBackend,
            build_workload,
            checked_protocol,
            resolve,
        )

        composed = compose_checked(arguments)
        self.options, recipe = resolve(composed.options, composed.recipe)
        protocol = checked_protocol(self.options, recipe)
        if seconds_of == "trainer":
            protocol = replace(protocol, fast="off")
        if threads is not None:
            torch.set_num_threads(threads)
        workload = build_workload(self.options, recipe)
        self.budget = protocol.budget
        self.backend = LightningBackend(self.options, recipe, workload, protocol)

    def run(
        self, point: Point, seed: int, max_steps: int, dense: tuple[int, int] | None = None
    ) -> Any:
        from bstune.core.records import TrialSpec

        batch_size, lr, hyperparameters = point
        spec = TrialSpec(
            number=0,
            trial_index=0,
            batch_size=batch_size,
            lr=lr,
            delta=None,
            seed=10_000 + seed,
            max_steps=max_steps,
            dense_steps=dense,
            hyperparameters=hyperparameters,
        )
        return self.backend.run(spec, None, None)

    def seconds(self, point: Point, seed: int, expected: float | None = None) -> float:
        """Give the seconds to the target, infinite where it is missed.

        Args:
            point: what trains.
            seed: of the weights and the order of examples.
            expected: steps to the target; None: the first run finds them.
        """
        # Whoever takes four times as long as expected has missed.
        most = self.budget.last_step(point[0]) if expected is None else math.ceil(4 * expected)
        plain = self.run(point, seed, most)
        if not plain.reached:
            return math.inf
        first = max(1, plain.steps_low)
        # Every step from the last miss to the hit is evaluated.
        found = self.run(point, seed, most, (first, plain.steps))
        return float(found.steps * plain.seconds_per_step)


def sweep(arguments: Sequence[str]) -> dict[str, Any]:
    """Find the point of least time by a sweep; return the row."""
    began = time.monotonic()
    trainer = Trainer(arguments, SWEEP_THREADS, "lean")
    options = trainer.options
    low = options.search.batch_size.low
    high = options.search.batch_size.high
    reference = options.scaling.batch_size
    found = dict[tuple[int, float], list[float]]()

    def take(batch_size: int, lr: float, seeds: int) -> None:
        seconds = found.setdefault((batch_size, lr), [])
        for seed in range(len(seconds), seeds):
            seconds.append(trainer.seconds((batch_size, lr, {}), seed))

    sizes = [low * 2**i for i in range(math.floor(math.log2(high / low)) + 1)]
    for batch_size in sizes:
        for octave in OCTAVES:
            lr = options.scaling.lr * math.sqrt(batch_size / reference) * 2.0**octave
            take(batch_size, lr, SWEPT_SEEDS)
    # Half as far apart around the best one.
    batch_size, lr = min(found, key=lambda point: statistics.median(found[point]))
    for i in (-1, 0, 1):
        for j in (-1, 0, 1):
            size = min(max(round(batch_size * 2 ** (i / 2)), low), high)
            take(size, lr * 2 ** (j / 2), SWEPT_SEEDS)
    for point in sorted(found, key=lambda one: statistics.median(found[one]))[:BEST_OF_SWEEP]:
        take(*point, BEST_SEEDS)
    full = {point: runs for point, runs in found.items() if len(runs) == BEST_SEEDS}
    best = min(full, key=lambda one: statistics.median(full[one]))
    return {
        "arguments": [*arguments],
        "sweep": [[*point, runs] for point, runs in found.items()],
        "best": best,
        "seconds": statistics.median(full[best]),
        "sweep_seconds": round(time.monotonic() - began),
    }


def study_result(
    arguments: Sequence[str], seed: int, others: int | str, results: Path | None
) -> tuple[dict[str, Any], float]:
    """Run a study, or read what it came to from ``results``; return its result and its seconds."""
    file: Path | None = None
    if results is not None:
        words = "_".join(argument.rpartition("/")[2] for argument in arguments)
        file = results / f"{words}_{seed}_{others}.json"
        if file.exists():
            kept = json.loads(file.read_text())
            return kept["result"], kept["seconds"]
    began = time.monotonic()
    spinning = others if isinstance(others, int) else 0
    with tempfile.TemporaryDirectory() as name, busy(spinning):
        result = run_study(arguments, seed, Path(name))
    seconds = time.monotonic() - began
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({"result": result, "seconds": seconds}))
    return result, seconds


def measure(
    arguments: Sequence[str],
    best: Sequence[float],
    seed: int,
    fresh: int,
    others: int | str,
    results: Path | None,
) -> dict[str, Any]:
    """Run one study, and its winner's further seeds in turns with the sweep's best; return the row."""
    began = time.monotonic()
    result, study_seconds = study_result(arguments, seed, others, results)
    winner = result[result["use"]]
    timing = result["timing"]
    confirmed = winner["confirmed"]
    trainer = Trainer(arguments, timing["threads"], timing["seconds_of"])
    own = (winner["batch_size"], winner["lr"], winner["hyperparameters"])
    sweeps = (int(best[0]), best[1], {})
    further = list[float]()
    bests = list[float]()
    for number in range(1, fresh + 1):
        further.append(trainer.seconds(own, 1000 + number, winner["steps"]))
        bests.append(trainer.seconds(sweeps, 1000 + number))
    middle = statistics.median(further)
    least = statistics.median(bests)
    low = confirmed["time_low"]
    high = confirmed["time_high"]
    return {
        "arguments": [*arguments],
        "seed": seed,
        "busy": others,
        "batch_size": winner["batch_size"],
        "lr": winner["lr"],
        "stated": confirmed["time_median"],
        "low": low,
        "high": high,
        "timing": timing,
        "further": further,
        "median": middle,
        "bests": bests,
        "over_best": middle / least,
        "holds": low is not None and low <= middle and (high is None or middle <= high),
        "study_seconds": round(study_seconds),
        "seconds": round(time.monotonic() - began),
    }


def main() -> None:
    """Run the studies that the file lacks, and print how often the interval holds."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--studies", type=int, default=10)
    parser.add_argument("--fresh", type=int, default=20)
    parser.add_argument("--busy", default="0", metavar="N|other")
    parser.add_argument("--results", type=Path, help="a folder that keeps the studies' results")
    parser.add_argument("--studies-only", action="store_true")
    parser.add_argument("--best", help="batch size and learning rate in place of the sweep's best")
    parser.add_argument("--rows", type=Path, required=True, metavar="FILE")
    options, arguments = parser.parse_known_args()
    others: int | str = options.busy if options.busy == "other" else int(options.busy)
    if options.studies_only:
        for seed in range(options.studies):
            study_result(arguments, seed, others, options.results)
        return
    rows = list[dict[str, Any]]()
    if options.rows.exists():
        rows = [json.loads(line) for line in options.rows.read_text().splitlines()]
    rows = [row for row in rows if row["arguments"] == arguments]

    def taken(make: Callable[[], dict[str, Any]], shown: Sequence[str]) -> dict[str, Any]:
        row = make()
        with options.rows.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(json.dumps({key: row[key] for key in shown}), flush=True)
        return row

    swept = [row for row in rows if "sweep" in row]
    if not swept and options.best is not None:
        batch_size, lr = options.best.split(",")
        given = {"arguments": arguments, "sweep": [], "best": [int(batch_size), float(lr)]}
        swept = [taken(lambda: given, ("best",))]
    if not swept:
        swept = [taken(lambda: sweep(arguments), ("best", "seconds", "sweep_seconds"))]
    done = [row for row in rows if row.get("busy") == others]
    for seed in range(len(done), options.studies):
        make = partial(
            measure, arguments, swept[0]["best"], seed, options.fresh, others, options.results
        )
        done.append(taken(make, SHOWN))
    holds = sum(row["holds"] for row in done)
    ratios = sorted(row["stated"] / row["median"] for row in done if row["stated"])
    print(f"{holds} of {len(done)} intervals hold the median of {options.fresh} further seeds")
    if ratios:
        print(
            f"stated over median: {ratios[0]:.2f} to {ratios[-1]:.2f}, median "
            f"{statistics.median(ratios):.2f}"
        )
    over = sorted(row["over_best"] for row in done)
    high = over[math.ceil(0.9 * len(over)) - 1]
    print(f"winner over the sweep's best: median {statistics.median(over):.2f}, 90% {high:.2f}")


if __name__ == "__main__":
    main()
