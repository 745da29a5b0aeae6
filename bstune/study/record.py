"""Writes a replay table: ``python -m bstune record``, from a dense grid of real training or from a study.

A grid is trained one run after another, each appended to ``FILE.runs`` as it ends: the same command goes on where an
earlier one stopped. The file itself is written once all runs are there. The metric is recorded as the workload logs it:
whether it has to fall or to rise is for the target of the replay to say.
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

from bstune.core.errors import ConfigError, Interrupted, TableError
from bstune.core.files import check_writable, write_text
from bstune.core.records import TrialResult, TrialSpec, dump_json

THINNED = 1.12  # ratio of the recorded steps, but for those that brought a new best value
METRIC_DIGITS = 6  # so many that rounding takes no value past a target
SECONDS_DIGITS = 4  # of seconds per step: far below the noise from run to run
USABLE = ("reached", "censored", "diverged")  # an out-of-memory or failed trial says nothing of steps


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
        "metric": [_rounded(value, METRIC_DIGITS) for _, value in history],
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

    Raises:
        TableError: if ``path.runs`` holds something else.
    """
    partial = _runs_file(path)
    partial.parent.mkdir(parents=True, exist_ok=True)
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
    Runs that went out of memory are left out, and so is a batch size at which no run timed a step.

    Raises:
        TableError: if fewer than two batch sizes are left.
    """
    ordered = [_thinned(known) for known in sorted(rows, key=_point) if known["status"] in USABLE]
    times: dict[int, list[float]] = {}
    for known in ordered:
        if known["seconds_per_step"] is not None:
            times.setdefault(known["batch_size"], []).append(known["seconds_per_step"])
    pooled = {size: _rounded(statistics.median(found), SECONDS_DIGITS) for size, found in times.items()}
    lines = [
        dump_json({**known, "seconds_per_step": pooled[known["batch_size"]]})
        for known in ordered
        if known["batch_size"] in pooled and (known["steps"] or known["status"] == "diverged")
    ]
    if len(pooled) < 2:
        raise TableError(
            f"{len(lines)} usable runs at {len(pooled)} batch size(s): a table needs two batch sizes or more"
        )
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


def _rounded(value: float, digits: int) -> float:
    return float(f"{value:.{digits}g}")


def _point(known: Mapping[str, Any]) -> tuple[int, float, int]:
    return known["batch_size"], known["lr"], known["seed"]


def _runs_file(path: Path) -> Path:
    return path.with_name(path.name + ".runs")  # write_text has a temporary name of its own


def _read_partial(partial: Path) -> list[dict[str, Any]]:
    """Return the rows of an earlier run; a last line that was cut short is dropped."""
    if not partial.exists():
        return []
    whole = partial.read_text(encoding="utf-8").rpartition("\n")[0]
    write_text(partial, whole + "\n" if whole else "")
    try:
        rows: list[dict[str, Any]] = [json.loads(line) for line in whole.splitlines()]
        for known in rows:
            _point(known)
    except (ValueError, KeyError, TypeError) as error:
        raise TableError(
            f"{partial} holds other lines than those of an earlier run: delete it to begin anew"
        ) from error
    return rows


def main(argv: Sequence[str]) -> None:
    """Record a table."""
    parser = argparse.ArgumentParser(
        prog="python -m bstune record",
        usage="%(prog)s FILE --batch-sizes N,... --lrs X,... [--seeds N,...] +workload=NAME [OPTION=VALUE ...]\n"
        "       %(prog)s FILE --trials TRIALS_JSONL",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("file", metavar="FILE", type=Path, help="the table to write")
    parser.add_argument("--trials", type=Path, help="trials.jsonl of a study, in place of a grid")
    parser.add_argument("--batch-sizes", type=_integers, help="such as 8,16,32")
    parser.add_argument("--lrs", type=_numbers, help="such as 0.001,0.002,0.004")
    parser.add_argument("--seeds", type=_integers, default=(0,), help="such as 0,1 (default: 0)")
    arguments, overrides = parser.parse_known_args(argv)
    try:
        _check_file(arguments.file)
        if arguments.trials is None:
            _record(arguments, overrides)
        elif arguments.batch_sizes or arguments.lrs or overrides:
            raise ConfigError("--trials takes a study as it is: leave out the grid and the workload's options")
        else:
            write_table(arguments.file, rows_of_study(read_trials(arguments.trials)))
    except KeyboardInterrupt as error:
        kept = _runs_file(arguments.file)
        raise Interrupted(f"interrupted: {kept} keeps what is there; the same command goes on") from error
    print(f"wrote {arguments.file}: python -m bstune +workload=replay workload.table={arguments.file} ...")


def _check_file(path: Path) -> None:
    if path.exists():
        raise TableError(f"{path} is there already: choose another name, or delete it")
    check_writable(path, "FILE")


def read_trials(path: Path) -> list[TrialResult]:
    """Return the records of a study's ``trials.jsonl``.

    Raises:
        ConfigError: if it cannot be read or holds something else.
    """
    try:
        return [TrialResult.from_json(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except OSError as error:
        raise ConfigError(f"--trials={path} cannot be read: {error.strerror}") from error
    except (ValueError, TypeError) as error:
        raise ConfigError(f"--trials={path} is no trials.jsonl of bstune: {error}") from error


def rows_of_study(trials: Iterable[TrialResult]) -> list[dict[str, Any]]:
    """Return the rows of a study's trials; of a trial and those that continue it, the one with the most steps."""
    longest: dict[tuple[int, float, int], TrialResult] = {}
    for trial in trials:
        point = trial.batch_size, trial.lr, trial.seed
        if trial.status in USABLE and (point not in longest or trial.steps > longest[point].steps):
            longest[point] = trial
    return [row(trial) for trial in longest.values()]


def _record(arguments: argparse.Namespace, overrides: Sequence[str]) -> None:
    if not arguments.batch_sizes or not arguments.lrs:
        raise ConfigError("a grid needs --batch-sizes and --lrs; or give --trials=TRIALS_JSONL of a study")
    grid = Grid(arguments.batch_sizes, arguments.lrs, arguments.seeds)
    _check_grid(grid)
    from bstune.config import is_replayed
    from bstune.core.console import quieten
    from bstune.study.prepare import compose_checked, prepare

    config = compose_checked([*overrides, "mlflow.enabled=false"])
    quieten(training=not is_replayed(config))
    config.search.batch_size.low, config.search.batch_size.high = min(grid.batch_sizes), max(grid.batch_sizes)
    config.protocol.noise_scale_every = None  # a table does not hold it
    config.hardware.enabled = False  # a grid is trained as it is given
    config.search.workers = 1  # and one run after another: its seconds are measured
    try:
        prepared = prepare(config)
    except ConfigError as error:
        raise ConfigError(str(error).replace("search.batch_size.high", "--batch-sizes")) from error
    settings = _check_settings(arguments.file, prepared.frozen_settings, prepared.config.budget)
    try:
        record_grid(
            grid, lambda spec: prepared.backend.run(spec, None, None), arguments.file, lambda s: print(s, flush=True)
        )
    except SystemExit as error:  # Lightning turns an interruption into it
        raise KeyboardInterrupt from error
    settings.unlink()


def _check_grid(grid: Grid) -> None:
    for option, values, least in (
        ("--batch-sizes", grid.batch_sizes, 1),
        ("--lrs", grid.lrs, sys.float_info.min),
        ("--seeds", grid.seeds, 0),
    ):
        bad = [value for value in values if not least <= value < math.inf]
        if bad:
            raise ConfigError(f"{option} must be finite and {'positive' if least else 'at least 0'}, but got {bad[0]}")
        if len(set(values)) < len(values):
            raise ConfigError(f"{option} names a value twice: {','.join(str(value) for value in values)}")
    if len(grid.batch_sizes) < 2:
        raise ConfigError(f"a table needs two batch sizes or more, but got --batch-sizes {grid.batch_sizes[0]}")


def _check_settings(path: Path, fingerprint: Mapping[str, Any], budget: Mapping[str, Any]) -> Path:
    """Refuse to go on with runs that were recorded with other settings; return the file that holds the settings."""
    kept = ("workload.", "protocol.", "trainer.", "precision", "device", "compile")
    settings = {name: value for name, value in fingerprint.items() if name.startswith(kept)}
    settings |= {f"budget.{name}": value for name, value in budget.items()}
    file = path.with_name(path.name + ".settings")
    text = dump_json(settings, indent=1)
    if file.exists() and _runs_file(path).exists():
        before, now = json.loads(file.read_text(encoding="utf-8")), json.loads(text)
        changed = [name for name in sorted(before.keys() | now.keys()) if before.get(name) != now.get(name)]
        if changed:
            lines = [f"  {name}: was {before.get(name)!r}, now {now.get(name)!r}" for name in changed]
            raise TableError(
                f"the runs in {_runs_file(path)} were recorded with other settings:\n"
                + "\n".join(lines)
                + f"\ngo on with those, or delete {_runs_file(path)} to begin anew"
            )
    file.parent.mkdir(parents=True, exist_ok=True)
    write_text(file, text + "\n")
    return file


def _integers(text: str) -> tuple[int, ...]:
    return _parsed(text, int, "integers", "8,16,32")


def _numbers(text: str) -> tuple[float, ...]:
    return _parsed(text, float, "numbers", "0.001,0.002,0.004")


def _parsed(text: str, kind: Callable[[str], Any], what: str, example: str) -> tuple[Any, ...]:
    try:
        return tuple(kind(part) for part in text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"takes {what} with commas between, such as {example}, but got {text!r}"
        ) from error
