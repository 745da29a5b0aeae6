"""Hydra's sweepers on one application that knows neither: the best value over the seconds that its jobs trained.

    python tests/benchmarks/bench_hydra_sweepers.py collect FOLDER >> tests/benchmarks/hydra_sweepers.jsonl
    python tests/benchmarks/bench_hydra_sweepers.py [tests/benchmarks/hydra_sweepers.jsonl]

The first reads ``FOLDER/SWEEPER-SEED/JOB/metrics.json``, as the application wrote it into the output
folder of each job: ``batch_size``, ``lr``, ``first`` (steps of the job that it continues), ``steps``,
``val_loss`` and ``seconds`` (its own, CPU time of the training steps).
``FOLDER/fresh-SWEEPER-SEED`` holds runs of the sweep's best pair on further seeds.

The second prints, for each sweeper, the median over seeds of the best value after so many jobs and after
so many seconds, and the mean of the runs on further seeds. A job that stopped
before the end of its examples has spent seconds, and has no value. Seconds are steps times those of a
step at the job's batch size, by one line through all jobs of all sweeps: other work on the machine
counts for none of them.
"""

import argparse
import itertools
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bstune.core.step_time import StepTime, fit_line

EXAMPLES = 60_000
JOBS = (4, 8, 12, 16)
SPENT = (5.0, 10.0, 15.0, 20.0, 30.0, 40.0)
KEPT = ("job", "batch_size", "lr", "first", "steps", "val_loss", "seconds")
FILE = Path(__file__).parent / "hydra_sweepers.jsonl"
Job = Mapping[str, Any]


def read_jobs(sweep: Path) -> list[Job]:
    """Read what the jobs of a sweep came to, in the order in which they ran."""
    jobs = []
    for file in sweep.glob("*/metrics.json"):
        found = json.loads(file.read_text(encoding="utf-8"))
        jobs.append({**found, "job": int(file.parent.name)})
    jobs.sort(key=lambda job: job["ended"])
    return [{name: job[name] for name in KEPT} for job in jobs]


def collect(folder: Path) -> None:
    """Print a line a sweep."""
    for sweep in sorted(folder.glob("*-[0-9]*")):
        name, _, seed = sweep.name.rpartition("-")
        # Fresh runs are read with the sweep that they are of.
        if name.startswith("fresh-") or not sweep.is_dir():
            continue
        fresh = read_jobs(folder / f"fresh-{sweep.name}")
        row = {"sweeper": name, "seed": int(seed), "jobs": read_jobs(sweep)}
        print(json.dumps({**row, "fresh": [job["val_loss"] for job in fresh]}))


def cost(job: Job, step_time: StepTime) -> float:
    """Give the seconds that a job trained itself."""
    return (job["steps"] - job["first"]) * step_time(job["batch_size"])


def best_of(jobs: Sequence[Job]) -> float | None:
    """Give the best value of the jobs that ran to their end; None: none did."""
    whole = [job["val_loss"] for job in jobs if job["steps"] * job["batch_size"] >= EXAMPLES]
    return min(whole, default=None)


def within(jobs: Sequence[Job], step_time: StepTime, spent: float) -> Sequence[Job]:
    """Give the jobs that had ended after so many seconds."""
    ends = itertools.accumulate(cost(job, step_time) for job in jobs)
    # One after the other, as on one machine.
    return jobs[: sum(end <= spent for end in ends)]


def median_of(values: Sequence[float | None]) -> str:
    """Write the median; where a sweep has no value yet there is none."""
    known = [value for value in values if value is not None]
    # The median of those alone that have one would be too good.
    return f"{statistics.median(known):.4f}" if len(known) == len(values) else "-"


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print the table."""
    per_step = []
    for row in rows:
        for job in row["jobs"]:
            seconds = job["seconds"] / (job["steps"] - job["first"])
            per_step.append((job["batch_size"], seconds))
    step_time = fit_line(per_step)
    heads = [f"{count} jobs" for count in JOBS] + [f"{spent:g} s" for spent in SPENT]
    print("| " + " | ".join(["sweeper", "seeds", "seconds", *heads, "fresh seeds"]) + " |")
    for name in dict.fromkeys(row["sweeper"] for row in rows):
        runs = []
        fresh = []
        seconds = []
        for row in rows:
            if row["sweeper"] == name:
                runs.append(row["jobs"])
                fresh += row["fresh"]
                seconds.append(sum(cost(job, step_time) for job in row["jobs"]))
        cells = [name, str(len(runs)), f"{statistics.median(seconds):.1f}"]
        for count in JOBS:
            cells.append(median_of([best_of(jobs[:count]) for jobs in runs]))
        for spent in SPENT:
            cells.append(median_of([best_of(within(jobs, step_time, spent)) for jobs in runs]))
        cells.append(f"{statistics.fmean(fresh):.4f}" if fresh else "-")
        print("| " + " | ".join(cells) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", nargs="*", help="collect FOLDER, or a file of rows")
    what = parser.parse_args().what
    if what[:1] == ["collect"]:
        collect(Path(what[1]))
        return
    lines = Path(what[0] if what else FILE).read_text(encoding="utf-8").splitlines()
    show([json.loads(line) for line in lines])


if __name__ == "__main__":
    sys.exit(main())
