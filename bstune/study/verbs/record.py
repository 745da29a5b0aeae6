"""Writes a replay table: ``bstune record``, from a dense grid of real training or from a study.

A grid is trained one run after another, each appended to ``FILE.runs`` as it ends: the same command
continues where an earlier one stopped. The file itself is written once all runs are there. The
metric is recorded as the workload logs it: the target of the replay sets whether it has to fall or
to rise.
"""

import argparse
import json
import math
import os
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from bstune.core.errors import ConfigError, InputError, Interrupted, RecordError, TableError
from bstune.core.records import TrialResult, TrialSpec, dump_json
from bstune.core.search_space import HALF_LIVES, OVERRIDE_LR
from bstune.options import with_option
from bstune.study.prepare import compose_checked, prepare
from bstune.study.prepared import PreparedStudy
from bstune.study.storage.opening import changed_settings
from bstune.system.console import quieten
from bstune.system.exits import is_interruption
from bstune.system.files import append_text, check_writable, write_text
from bstune.system.inputs import parse_json, read_text
from bstune.system.terminal import ArgumentParser, parse_values, write_out
from bstune.trial.replay import COLUMNS

# Ratio of recorded steps to the ones before, but for those that brought a new best value.
THINNING_RATIO = 1.12
# Digits of a metric: so many that rounding takes no value past a target.
METRIC_DIGITS = 6
# Digits of seconds per step: rounding is far below the noise from run to run.
SECONDS_DIGITS = 4
# Statuses of rows: an out-of-memory or failed trial bounds no steps.
RECORDED_STATUSES = ("reached", "stopped", "diverged")
# Settings that begin so must be the same when a table is continued.
FROZEN = (
    "workload.",
    "protocol.",
    "trainer.",
    "precision",
    "device",
    "compile",
    *HALF_LIVES,
    OVERRIDE_LR,
)

GridPoint = tuple[int, float, int]
"""Batch size, learning rate and seed."""
TableRow = dict[str, Any]
"""A row of a table, by its columns."""


def main(arguments: list[str]) -> None:
    """Run ``bstune record`` with the arguments after it."""
    options, overrides = _parser().parse_known_args(arguments)
    if os.path.lexists(options.file):
        raise TableError(f"{options.file} is there already: choose another name, or delete it")
    check_writable(options.file, "FILE")
    if options.trials is not None:
        if options.batch_sizes or options.lrs or overrides:
            raise ConfigError(
                "--trials takes a study as it is: leave out the grid and the workload's options"
            )
        write_table(options.file, rows_of_study(recorded_trials(options.trials)))
    elif not options.batch_sizes or not options.lrs:
        raise ConfigError(
            "a grid needs --batch-sizes and --lrs; or give --trials=TRIALS_JSONL of a study"
        )
    else:
        # A whole grid of one seed comes before the next one.
        points = [
            (batch_size, lr, seed)
            for seed, batch_size, lr in product(options.seeds, options.batch_sizes, options.lrs)
        ]
        try:
            _train_grid(points, options.file, overrides)
        except (KeyboardInterrupt, SystemExit) as error:
            if not is_interruption(error):
                raise
            runs = _runs_file(options.file)
            raise Interrupted(
                f"interrupted: {runs} keeps what is there; the same command continues"
            ) from error
    write_out(f"wrote {options.file}: bstune workload=replay workload.table={options.file} ...")


def _parser() -> ArgumentParser:
    """Make the parser of the verb's arguments."""
    parser = ArgumentParser(
        prog="bstune record",
        usage="%(prog)s FILE --batch-sizes N,... --lrs X,... [--seeds N,...] "
        "workload=NAME [OPTION=VALUE ...]\n"
        "       %(prog)s FILE --trials TRIALS_JSONL",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("file", metavar="FILE", type=Path, help="the table to write")
    parser.add_argument("--trials", type=Path, help="trials.jsonl of a study, in place of a grid")
    parser.add_argument(
        "--batch-sizes",
        type=partial(parse_values, int, 1, 10**15),
        help="positive integers such as 8,16,32",
    )
    parser.add_argument(
        "--lrs", type=partial(parse_values, float, 1e-15, 1e15), help="such as 0.001,0.002,0.004"
    )
    parser.add_argument(
        "--seeds",
        type=partial(parse_values, int, 0, 2**32 - 1),
        default=(0,),
        help="such as 0,1 (default: 0)",
    )
    return parser


def _train_grid(points: Sequence[GridPoint], path: Path, overrides: Sequence[str]) -> None:
    """Train the points of a grid and write their table, going on where an earlier command stopped.

    Raises:
        ConfigError: for a workload or options that cannot be recorded.
        TableError: where the earlier command's runs had other settings.
    """
    prepared = _prepared_for_grid(points, overrides)
    settings_file = path.with_name(path.name + ".settings")
    text = dump_json(_recorded_settings(prepared), indent=1)
    runs = _runs_file(path)
    if settings_file.exists():
        lines = changed_settings(_read_settings(settings_file), json.loads(text))
        if lines and runs.exists():
            raise TableError(
                f"the runs in {runs} were recorded with other settings:\n{lines}\ncontinue with "
                f"those, or delete {runs} to begin anew"
            )
    # Reading them refuses a file of other lines, before anything is written.
    _read_runs(runs)
    settings_file.parent.mkdir(parents=True, exist_ok=True)
    write_text(settings_file, text + "\n")
    record_grid(points, partial(_run_once, prepared), path)
    settings_file.unlink()


def _prepared_for_grid(points: Sequence[GridPoint], overrides: Sequence[str]) -> PreparedStudy:
    """Compose and prepare the workload whose runs at the points of a grid are recorded.

    Raises:
        ConfigError: for a workload or options that cannot be recorded.
    """
    sizes = sorted({size for size, _, _ in points})
    if len(sizes) < 2:
        raise ConfigError(
            f"a table needs two batch sizes or more, but got --batch-sizes {sizes[0]}"
        )
    composed = compose_checked([*overrides, "mlflow.enabled=false"])
    options = composed.options
    quieten(training=composed.recipe is not None)
    if options.devices > 1:
        raise ConfigError(
            f"a table is recorded on one device, but got devices={options.devices}: use devices=1"
        )
    options = with_option(options, "search.batch_size.low", sizes[0])
    options = with_option(options, "search.batch_size.high", sizes[-1])
    # A table does not hold the noise scale.
    options = with_option(options, "protocol.noise_scale_every", None)
    # A grid is trained as it is given, one run after another in this process: its seconds are
    # measured.
    options = with_option(options, "hardware.enabled", False)
    options = with_option(options, "search.workers", 0)
    try:
        prepared = prepare(options, composed.recipe)
    # The user gave --batch-sizes, from which the option above was set.
    except ConfigError as error:
        raise ConfigError(str(error).replace("search.batch_size.high", "--batch-sizes")) from error
    if not prepared.backend.stops:
        raise ConfigError(
            "the workload's schedule ends with its budget, so that no run replays at another "
            "length: record one whose schedule has no horizon, such as schedule=warmup"
        )
    return prepared


def _run_once(prepared: PreparedStudy, spec: TrialSpec) -> TrialResult:
    """Train a trial that continues none and leaves no files."""
    return prepared.backend.run(spec, folder=None, resumed_from=None)


def _recorded_settings(prepared: PreparedStudy) -> dict[str, object]:
    """Collect the settings on which a run depends. A table is continued with the same ones only."""
    settings: dict[str, object] = {
        name: value for name, value in prepared.frozen_settings.items() if name.startswith(FROZEN)
    }
    budget = prepared.options.budget
    return {**settings, "budget.steps": budget.steps, "budget.examples": budget.examples}


def _read_settings(path: Path) -> dict[str, object]:
    """Read the settings of an earlier command; TableError where the file holds none."""
    try:
        settings = parse_json(read_text(path, "the settings"), str(path))
    except InputError:
        settings = None
    # Every settings file has this option, so that a file without it is another one.
    if not isinstance(settings, dict) or "budget.steps" not in settings:
        raise TableError(
            f"{path} holds other text than the settings of an earlier run: choose another FILE"
        )
    return settings


def record_grid(
    points: Sequence[GridPoint], train: Callable[[TrialSpec], TrialResult], path: Path
) -> None:
    """Train every point that the file of runs beside ``path`` lacks, then write the table.

    Each run is appended to that file as it ends, and a line is printed for it.
    """
    runs = _runs_file(path)
    rows = _read_runs(runs)
    done = {_point(recorded) for recorded in rows}
    for number, point in enumerate(points):
        if point in done:
            continue
        batch_size, lr, seed = point
        spec = TrialSpec(
            number=number, trial_index=number, batch_size=batch_size, lr=lr, delta=None, seed=seed
        )
        result = train(spec)
        rows.append(row(result))
        append_text(runs, dump_json(rows[-1]) + "\n")
        place = f"B {batch_size}  lr {lr:.4g}  seed {seed}"
        status = f"{result.status} at {result.steps}"
        write_out(f"run {number + 1}/{len(points)}  {place}  {status}")
    # An earlier grid may have left runs of other points in the same file.
    write_table(path, [recorded for recorded in rows if _point(recorded) in points])
    runs.unlink()


def row(result: TrialResult) -> TableRow:
    """Make the row of a trial; evaluations that were not finite are left out."""
    history = [(step, value) for step, value in result.history if value is not None]
    searched: dict[str, object] = {}
    if result.hyperparameters:
        searched["hyperparameters"] = dict(result.hyperparameters)
    return {
        "batch_size": result.batch_size,
        "lr": result.lr,
        **searched,
        "seed": result.seed,
        "steps": [step for step, _ in history],
        "metric": [_rounded(value, METRIC_DIGITS) for _, value in history],
        "seconds_per_step": result.seconds_per_step,
        "status": result.status,
    }


def write_table(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write a table of the usable rows, sorted by batch size, learning rate and seed.

    Rows are left out whose status is not one of ``RECORDED_STATUSES``, that were stopped before
    their first evaluation, or at whose batch size no seconds are known. In the others, the seconds
    per step are the batch size's median, and evaluations are thinned as :func:`_thinned` says.

    Raises:
        TableError: where seconds are known at fewer than two batch sizes.
    """
    ordered = list[TableRow]()
    for recorded in sorted(rows, key=_point):
        if recorded["status"] in RECORDED_STATUSES:
            ordered.append(_thinned(recorded))
    step_times = _median_step_times(ordered)
    lines = list[str]()
    for recorded in ordered:
        # A run that was stopped before its first evaluation tells nothing.
        tells = recorded["steps"] or recorded["status"] == "diverged"
        seconds = step_times.get(recorded["batch_size"])
        if tells and seconds is not None:
            lines.append(dump_json({**recorded, "seconds_per_step": seconds}))
    if len(step_times) < 2:
        raise TableError(
            f"{len(lines)} usable runs at {len(step_times)} batch size(s): "
            "a table needs two batch sizes or more"
        )
    write_text(path, "\n".join(lines) + "\n")


def _median_step_times(rows: Iterable[TableRow]) -> dict[int, float]:
    """Give the median seconds of a step at each batch size, over its rows that have them.

    A step takes the same time at every learning rate. What else ran on the machine shows in single
    rows alone, which the median leaves out.
    """
    times: dict[int, list[float]] = {}
    for recorded in rows:
        if recorded["seconds_per_step"] is not None:
            times.setdefault(recorded["batch_size"], []).append(recorded["seconds_per_step"])
    return {
        batch_size: _rounded(statistics.median(seconds), SECONDS_DIGITS)
        for batch_size, seconds in times.items()
    }


def _thinned(recorded: Mapping[str, Any]) -> TableRow:
    """Thin the evaluations of a row so that the steps to any target stay the same.

    New lowest and new highest values are kept, as the metric may fall or rise; so are the last
    evaluation, and others ``THINNING_RATIO`` apart in steps.
    """
    steps: list[int] = []
    metric: list[float] = []
    lowest = math.inf
    highest = -math.inf
    # The step of the last evaluation that is kept; 0 before the first one, which is kept always.
    last = 0
    for step, value in zip(recorded["steps"], recorded["metric"], strict=True):
        is_final = step == recorded["steps"][-1]
        is_record = value < lowest or value > highest
        if is_record or step >= THINNING_RATIO * last or is_final:
            steps.append(step)
            metric.append(value)
            last = step
        lowest = min(lowest, value)
        highest = max(highest, value)
    return {**recorded, "steps": steps, "metric": metric}


def _rounded(value: float, digits: int) -> float:
    """Round to so many significant digits."""
    return float(f"{value:.{digits}g}")


def _point(recorded: Mapping[str, Any]) -> GridPoint:
    """Read the point of the grid that a row is of."""
    return recorded["batch_size"], recorded["lr"], recorded["seed"]


def _runs_file(path: Path) -> Path:
    """Name the file that keeps the runs until the table ``path`` is written."""
    return path.with_name(path.name + ".runs")


def _read_runs(path: Path) -> list[TableRow]:
    """Read the rows that an earlier command has recorded.

    A last line that was cut short is dropped.

    Raises:
        TableError: where the file holds other lines.
    """
    if not os.path.lexists(path):
        return []
    if path.is_symlink() or not path.is_file():
        raise TableError(f"{path} is no regular file: move it away, or choose another FILE")
    rows: list[TableRow] = []
    try:
        whole = read_text(path, "the file").rpartition("\n")[0]
        for number, line in enumerate(whole.splitlines(), start=1):
            recorded = parse_json(line, f"line {number}")
            if not isinstance(recorded, dict) or not _is_row(recorded):
                raise InputError(f"line {number} is no recorded run")
            rows.append(recorded)
    except InputError as error:
        raise TableError(
            f"{path} holds other lines than those of an earlier run ({error}): "
            "delete it to begin anew"
        ) from error
    # The cut line is left out, as the next row would go on in it and be no JSON.
    write_text(path, f"{whole}\n" if whole else "")
    return rows


def _is_row(recorded: Mapping[str, Any]) -> bool:
    """Whether a row has the fields and the values that :func:`row` writes.

    A trial that did not run has no seconds per step.
    """
    if not {*COLUMNS, "status"} <= recorded.keys():
        return False
    fits = {name: is_valid(recorded[name]) for name, (_, is_valid) in COLUMNS.items()}
    fits["seconds_per_step"] |= recorded["seconds_per_step"] is None
    fits["status"] = isinstance(recorded["status"], str)
    return all(fits.values()) and len(recorded["steps"]) == len(recorded["metric"])


def recorded_trials(path: Path) -> list[TrialResult]:
    """Read the records of a study's ``trials.jsonl``.

    One that cannot be read ends in a ConfigError.
    """
    trials = list[TrialResult]()
    for number, line in enumerate(read_text(path, "--trials").splitlines(), start=1):
        try:
            trials.append(TrialResult.from_json(line))
        except RecordError as error:
            raise ConfigError(
                f"--trials={path} is no trials.jsonl of this version of bstune: "
                f"line {number}: {error}"
            ) from error
    return trials


def rows_of_study(trials: Iterable[TrialResult]) -> list[TableRow]:
    """Make the rows of a study's trials.

    Several trials at one point and seed, such as one and its continuations, give one row: that of
    the trial with the most steps. Further hyper-parameters stand in its ``hyperparameters``.

    Raises:
        TableError: where schedules end with the trial: a history then says nothing of a run with a
            schedule of another length.
    """
    longest: dict[GridPoint, TrialResult] = {}
    for trial in trials:
        if trial.horizon is not None:
            raise TableError(
                f"the schedule of trial {trial.number} ends with the trial, at step "
                f"{trial.horizon}: its history does not replay at another length. Record a study "
                "whose schedule has no horizon, such as schedule=warmup"
            )
        point = trial.batch_size, trial.lr, trial.seed
        is_longer = point not in longest or trial.steps > longest[point].steps
        if is_longer and trial.status in RECORDED_STATUSES:
            longest[point] = trial
    return [row(trial) for trial in longest.values()]
