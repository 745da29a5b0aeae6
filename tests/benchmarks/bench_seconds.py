"""Whether the seconds that a study states for its winner are those that further seeds take.

    python tests/benchmarks/bench_seconds.py +workload=digits [OPTION=VALUE ...] [--studies 10] [--fresh 20]
        [--busy 0] --rows FILE

Each study has a seed of its own, as on the command line. When it has ended, its winner trains on further seeds in one
process, one after the other; seconds are steps to the target times that run's own seconds per step. ``--busy N`` keeps
N processes computing beside the study, and none beside the further seeds: the seconds that a study on a busy machine
states are to be those of a quiet one. A row of JSON a study is appended to FILE, and the same command goes on.
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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

SPIN = "while True: pass"


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
    command = [sys.executable, "-m", "bstune", *arguments, f"seed={seed}", "study=s", "output=out"]
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


def further_seeds(
    arguments: Sequence[str], result: dict[str, Any], count: int
) -> list[float | None]:
    """Train a study's winner on further seeds; return the seconds to the target, None where it was missed."""
    import torch

    from bstune.core.records import TrialSpec
    from bstune.study.prepare import compose_checked
    from bstune.trial.workload import LightningBackend, build_workload, checked_protocol, resolve

    timing, winner = result["timing"], result[result["use"]]
    composed = compose_checked(arguments)
    options, recipe = resolve(composed.options, composed.recipe)
    protocol = checked_protocol(options, recipe)
    if timing["seconds_of"] == "trainer":
        protocol = replace(protocol, fast="off")
    if timing["threads"] is not None:
        torch.set_num_threads(timing["threads"])
    backend = LightningBackend(options, recipe, build_workload(options, recipe), protocol)
    seconds = list[float | None]()
    expected = winner["steps"] or winner["single_run"]["steps"]
    for seed in range(1, count + 1):
        spec = TrialSpec(
            number=0,
            trial_index=0,
            batch_size=winner["batch_size"],
            lr=winner["lr"],
            delta=None,
            seed=10_000 + seed,
            max_steps=math.ceil(4 * expected),
            dense_steps=(max(1, round(0.3 * expected)), math.ceil(3 * expected)),
            hyperparameters=winner["hyperparameters"],
        )
        record = backend.run(spec, None, None)
        seconds.append(record.time_to_target)
    return seconds


def measure(arguments: Sequence[str], seed: int, fresh: int, others: int) -> dict[str, Any]:
    """Run one study and its winner's further seeds; return the row."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as name, busy(others):
        result = run_study(arguments, seed, Path(name))
    winner = result[result["use"]]
    confirmed = winner["confirmed"]
    found = further_seeds(arguments, result, fresh)
    middle = statistics.median(math.inf if one is None else one for one in found)
    low, high = confirmed["time_low"], confirmed["time_high"]
    return {
        "arguments": [*arguments],
        "seed": seed,
        "busy": others,
        "batch_size": winner["batch_size"],
        "lr": winner["lr"],
        "stated": confirmed["time_median"],
        "low": low,
        "high": high,
        "timing": result["timing"],
        "further": found,
        "median": middle,
        "holds": low is not None and high is not None and low <= middle <= high,
        "study_seconds": round(time.monotonic() - began),
    }


def main() -> None:
    """Run the studies that the file lacks, and print how often the interval holds."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--studies", type=int, default=10)
    parser.add_argument("--fresh", type=int, default=20)
    parser.add_argument("--busy", type=int, default=0)
    parser.add_argument("--rows", type=Path, required=True, metavar="FILE")
    options, arguments = parser.parse_known_args()
    rows = list[dict[str, Any]]()
    if options.rows.exists():
        rows = [json.loads(line) for line in options.rows.read_text().splitlines()]
    done = [row for row in rows if row["arguments"] == arguments and row["busy"] == options.busy]
    for seed in range(len(done), options.studies):
        row = measure(arguments, seed, options.fresh, options.busy)
        done.append(row)
        with options.rows.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(
            json.dumps(
                {
                    key: row[key]
                    for key in ("seed", "batch_size", "stated", "low", "high", "median", "holds")
                }
            )
        )
    holds = sum(row["holds"] for row in done)
    ratios = sorted(row["stated"] / row["median"] for row in done if row["stated"])
    print(f"{holds} of {len(done)} intervals hold the median of {options.fresh} further seeds")
    if ratios:
        print(
            f"stated over median: {ratios[0]:.2f} to {ratios[-1]:.2f}, median {statistics.median(ratios):.2f}"
        )


if __name__ == "__main__":
    main()
