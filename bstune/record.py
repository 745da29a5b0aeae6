"""Writes a replay table: ``python -m bstune.replay record``, from a dense grid of real training or from a study.

A grid is trained one run after another, each appended to ``FILE.runs`` as it ends: the same command goes on where an
earlier one stopped. The file itself is written once all runs are there.
"""

import argparse
import json
import math
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bstune.errors import BstuneError, ConfigError
from bstune.output import check_writable, write_text
from bstune.records import TrialResult, TrialSpec, dump_json

THINNED = 1.12  # ratio of the recorded steps, but for those that brought a new best value
DIGITS = 4  # of a recorded metric and of seconds per step: far below the noise from seed to seed


@dataclass(frozen=True)
class Grid:
    """Every combination of batch size, learning rate and seed, the seeds outermost."""

    batch_sizes: Sequence[int]
    lrs: Sequence[float]
    seeds: Sequence[int]

    def points(self) -> list[tuple[int, float, int]]:
        """Return (batch size, learning rate, seed) in the order in which they are trained."""
        return [(size, lr, seed) for seed in self.seeds for size in self.batch_sizes for lr in self.lrs]


def row(result: TrialResult) -> dict[str, Any]:
    """Return a trial as a row of a table; evaluations that were not finite are left out."""
    history = [(step, value) for step, value in result.history if value is not None]
    return {
        "batch_size": result.batch_size,
        "lr": result.lr,
        "seed": result.seed,
        "steps": [step for step, _ in history],
        "metric": [_rounded(value) for _, value in history],
        "seconds_per_step": result.seconds_per_step,
        "status": result.status,
    }


def record_grid(grid: Grid, train: Callable[[TrialSpec], TrialResult], path: Path, say: Callable[[str], None]) -> None:
    """Train every point that ``path.runs`` lacks, then write ``path``.

    Args:
        grid: what to train.
        train: trains one trial.
        path: of the table.
        say: told of each run.
    """
    partial = path.with_name(path.name + ".runs")  # write_text has a temporary name of its own
    rows = _read_partial(partial)
    done = {_point(known) for known in rows}
    points = grid.points()
    for number, point in enumerate(points):
        if point in done:
            continue
        size, lr, seed = point
        result = train(TrialSpec(number, number, size, lr, None, seed))
        rows.append(row(result))
        with partial.open("a", encoding="utf-8") as file:
            file.write(dump_json(rows[-1]) + "\n")
        say(f"run {number + 1}/{len(points)}  B {size}  lr {lr:.4g}  seed {seed}  {result.status} at {result.steps}")
    wanted = set(points)
    write_table(path, [known for known in rows if _point(known) in wanted])
    partial.unlink()


def write_table(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write a table, its rows in order of batch size, learning rate and seed.

    A row's seconds per step are the median over all rows of its batch size: a step takes the same time at every
    learning rate, and what else ran on the machine meanwhile shows in single rows alone. Evaluations are thinned to a
    ratio of ``THINNED``, and those kept that brought a new lowest or highest value: steps to any target stay the same.
    """
    ordered = [_thinned(known) for known in sorted(rows, key=_point)]
    times: dict[int, list[float]] = {}
    for known in ordered:
        if known["seconds_per_step"] is not None:
            times.setdefault(known["batch_size"], []).append(known["seconds_per_step"])
    pooled = {size: _rounded(statistics.median(found)) for size, found in times.items()}
    lines = [
        dump_json({**known, "seconds_per_step": pooled[known["batch_size"]]})
        for known in ordered
        if known["batch_size"] in pooled and known["steps"]
    ]
    write_text(path, "\n".join(lines) + "\n")


def _thinned(known: Mapping[str, Any]) -> dict[str, Any]:
    kept: list[tuple[int, float]] = []
    low, high, last = math.inf, -math.inf, 0
    for step, value in zip(known["steps"], known["metric"], strict=True):
        final = step == known["steps"][-1]
        if value < low or (value > high and last) or step >= THINNED * last or final:
            kept.append((step, value))
            last = step
        low, high = min(low, value), max(high, value)
    return {**known, "steps": [step for step, _ in kept], "metric": [value for _, value in kept]}


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")


def _point(known: Mapping[str, Any]) -> tuple[int, float, int]:
    return known["batch_size"], known["lr"], known["seed"]


def _read_partial(partial: Path) -> list[dict[str, Any]]:
    """Return the rows of an earlier run; a last line that was cut short is dropped."""
    if not partial.exists():
        return []
    whole = partial.read_text(encoding="utf-8").rpartition("\n")[0]
    write_text(partial, whole + "\n" if whole else "")
    return [json.loads(line) for line in whole.splitlines()]


def main(argv: Sequence[str]) -> int:
    """Record a table; return the exit status, 2 for bad input."""
    parser = argparse.ArgumentParser(prog="python -m bstune.replay record", description=__doc__)
    parser.add_argument("file", type=Path, help="the table to write")
    parser.add_argument("--trials", type=Path, help="trials.jsonl of a study, in place of a grid")
    parser.add_argument("--batch-sizes", type=_integers, help="such as 8,16,32")
    parser.add_argument("--lrs", type=_numbers, help="such as 0.001,0.002,0.004")
    parser.add_argument("--seeds", type=_integers, default=(0,), help="such as 0,1")
    arguments, overrides = parser.parse_known_args(argv)
    try:
        check_writable(arguments.file, "FILE")
        if arguments.trials is not None:
            write_table(arguments.file, [row(trial) for trial in read_trials(arguments.trials) if trial.history])
        else:
            _record(arguments, overrides)
    except BstuneError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def read_trials(path: Path) -> list[TrialResult]:
    """Return the records of a study's ``trials.jsonl``.

    Raises:
        ConfigError: if it cannot be read or holds something else.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        return [TrialResult.from_json(line) for line in lines]
    except OSError as error:
        raise ConfigError(f"--trials={path} cannot be read: {error.strerror}") from error
    except (ValueError, TypeError) as error:
        raise ConfigError(f"--trials={path} is no trials.jsonl of bstune: {error}") from error


def _record(arguments: argparse.Namespace, overrides: Sequence[str]) -> None:
    if not arguments.batch_sizes or not arguments.lrs:
        raise ConfigError("a grid needs --batch-sizes and --lrs; or give --trials=TRIALS_JSONL of a study")
    from bstune.command import compose_checked, quieten
    from bstune.preflight import prepare
    from bstune.workload import train

    config = compose_checked([*overrides, "mlflow.enabled=false"])
    quieten()
    config.search.batch_size.low, config.search.batch_size.high = min(arguments.batch_sizes), max(arguments.batch_sizes)
    job = prepare(config)
    grid = Grid(arguments.batch_sizes, arguments.lrs, arguments.seeds)
    record_grid(
        grid, lambda spec: train(job.workload, spec, job.protocol), arguments.file, lambda s: print(s, flush=True)
    )


def _integers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def _numbers(text: str) -> tuple[float, ...]:
    return tuple(float(part) for part in text.split(","))
