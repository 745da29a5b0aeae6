"""Answers trials from a table of recorded runs in place of training, in milliseconds each.

A table is a file of JSON lines, one for each recorded run. A line has ``batch_size``, ``lr``,
``seed``, ``steps`` (the evaluated steps), ``metric`` (a value at each of them: an error, or another
metric that the target names) and ``seconds_per_step``. ``status`` may be ``diverged``, and
``hyperparameters`` has the values, by name, that were searched besides. Runs of the same batch size
and learning rate are a cell; cells need not fill a rectangle.

A run may have ``horizon``, the step at which its schedule ended, and has then been recorded to that
step. In a table all runs have one or none has. A table with horizons is replayed as a workload
whose schedule ends with the trial.

``bstune record FILE ...`` writes a table; see :mod:`bstune.study.verbs.record`.
"""

import hashlib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby, pairwise
from pathlib import Path
from statistics import median
from typing import Any, TypeGuard

import numpy as np
import yaml

import bstune
from bstune.core.errors import ConfigError, TableError
from bstune.core.numbers import is_finite_number
from bstune.core.records import REPLAY_DEVICE, Target, TrialProtocol, TrialResult, TrialSpec
from bstune.core.search_space import Space
from bstune.core.trial_end import status_at, steps_low_of
from bstune.options import ReplayedWorkload, StudyOptions, flatten
from bstune.system.files import Output
from bstune.system.inputs import STANDARD_INPUT, parse_json, read_bytes, read_text
from bstune.trial.backend import TrialBackend, chooses_horizons
from bstune.trial.recorded_run import Outcome, Run, at_share, weights_around
from bstune.trial.replay_horizon import HorizonTable

# The metric of a user's own table, unless the target names another.
METRIC = "val/error"
# The folder of the tables that ship with bstune.
SHIPPED = Path(__file__).parent / "tables"


@dataclass(frozen=True)
class Table:
    """Recorded runs, between which trials are interpolated."""

    runs: tuple[Run, ...]

    @cached_property
    def cells(self) -> Mapping[tuple[int, float], tuple[Run, ...]]:
        """The runs of each (batch size, learning rate), in order of their seeds."""
        ordered = sorted(self.runs, key=lambda run: (run.batch_size, run.lr, run.seed))
        cells = dict[tuple[int, float], tuple[Run, ...]]()
        for cell, runs in groupby(ordered, key=lambda run: (run.batch_size, run.lr)):
            cells[cell] = tuple(runs)
        return cells

    @cached_property
    def batch_sizes(self) -> tuple[int, ...]:
        """All batch sizes, ascending."""
        return tuple(sorted({run.batch_size for run in self.runs}))

    @cached_property
    def lrs(self) -> tuple[float, ...]:
        """All learning rates, ascending."""
        return tuple(sorted({run.lr for run in self.runs}))

    def outcome(self, batch_size: float, lr: float, seed: int, target: Target) -> Outcome:
        """Give the end of a trial, interpolated between the recorded cells around it.

        The corners are the cells at the next recorded batch sizes and learning rates. Where all of
        them reached the target, the logs of steps to target S and seconds per step tau are bilinear
        in (log B, log lr), and the history is the nearest corner's with its steps rescaled.
        Where some did not, the end is the nearest corner's. For a corner that was not recorded the
        nearest recorded cell in (log B, log lr) is taken, and beyond the table's range the value at
        its edge. Of several runs in a cell one is drawn by ``seed``: the one at the same place in
        every cell's list.
        """
        return self.read(batch_size, lr, target, float(np.random.default_rng(seed).random()))

    def read(self, batch_size: float, lr: float, target: Target, share: float) -> Outcome:
        """Give the end of a trial as :meth:`outcome` does, from one given run of each cell.

        A cell is a recorded pair of batch size and learning rate. The end is interpolated between
        the cells around the trial's pair, at most four. Of each cell's runs, in the order of their
        seeds, the one at ``share`` of the way counts: 0 is the first. Where not all of these runs
        reached the target, the nearest cell's run alone counts.
        """
        runs = list[Run]()
        weights = list[float]()
        for size, size_weight in weights_around(self.batch_sizes, batch_size):
            for rate, rate_weight in weights_around(self.lrs, lr):
                if size_weight * rate_weight > 0:
                    runs.append(self._draw(size, rate, share))
                    weights.append(size_weight * rate_weight)
        nearest = runs[weights.index(max(weights))]
        seconds_of_nearest = nearest.seconds_per_step
        steps_of_nearest = nearest.steps_to(target)
        if steps_of_nearest is None:
            return Outcome(
                steps=None,
                end=nearest.end,
                seconds_per_step=seconds_of_nearest,
                history=nearest.history_to(),
                diverged=nearest.diverged,
            )
        steps_of_runs = list[int]()
        for run in runs:
            steps_of_run = run.steps_to(target)
            if steps_of_run is not None:
                steps_of_runs.append(steps_of_run)
        # Steps to target cannot be read between a run that reached it and one that did not.
        if len(steps_of_runs) < len(runs):
            return Outcome(
                steps=steps_of_nearest,
                end=steps_of_nearest,
                seconds_per_step=seconds_of_nearest,
                history=nearest.history_to(steps_of_nearest),
                diverged=False,
            )
        steps = round(_geometric_mean(steps_of_runs, weights))
        seconds_per_step = _geometric_mean([run.seconds_per_step for run in runs], weights)
        # The evaluations are the nearest run's, stretched so that the last one is at ``steps``.
        history = nearest.history_to(steps_of_nearest, scale=steps / steps_of_nearest)
        return Outcome(
            steps=steps,
            end=steps,
            seconds_per_step=seconds_per_step,
            history=history,
            diverged=False,
        )

    @cached_property
    def has_horizons(self) -> bool:
        """Whether the schedules of its runs ended with the runs."""
        return any(run.horizon is not None for run in self.runs)

    @cached_property
    def horizon_table(self) -> HorizonTable:
        """The same runs as a table of runs whose schedules ended with them."""
        return HorizonTable(self.cells, self.batch_sizes)

    def _draw(self, batch_size: int, lr: float, share: float) -> Run:
        """Choose one of a cell's runs: ``share`` 0 is the first, 1 the last.

        For a cell that was not recorded the nearest recorded one in (log B, log lr) is taken.
        """
        runs = self.cells.get((batch_size, lr))
        if runs is None:
            log_distances = np.log(list(self.cells)) - np.log([batch_size, lr])
            squared_distances = (log_distances**2).sum(axis=1)
            runs = list(self.cells.values())[int(squared_distances.argmin())]
        return at_share(runs, share)


def _geometric_mean(values: Sequence[float], weights: Sequence[float]) -> float:
    """Give the weighted geometric mean of positive values; the weights add up to 1."""
    # Where the trial's batch size and learning rate were recorded, so is the answer, to the bit.
    if len(values) == 1:
        return values[0]
    log_mean = sum(weight * math.log(value) for value, weight in zip(values, weights, strict=True))
    return math.exp(log_mean)


def replay(
    table: Table,
    spec: TrialSpec,
    target: Target,
    last_step: int,
    resumed_from: TrialResult | None = None,
) -> TrialResult:
    """Answer a trial from the table, with a record like that of a trained trial.

    Args:
        table: of recorded runs.
        spec: of the trial.
        target: that ends it.
        last_step: after which it ends, counted from the first step of the trial that it continues.
            Where the table has horizons, it is the trial's horizon.
        resumed_from: the record of the stopped trial that it continues; None: it starts afresh.
            Only the steps after it cost seconds.
    """
    steps_before = 0 if resumed_from is None else resumed_from.steps
    # None where the schedules of the recorded runs had no end, so that a trial may stop anywhere.
    horizon: int | None = None
    if table.has_horizons:
        horizon = last_step
        outcome = table.horizon_table.outcome(spec.batch_size, spec.lr, horizon, spec.seed, target)
    else:
        outcome = table.outcome(spec.batch_size, spec.lr, spec.seed, target)
    # The trial ends at its limit, or where the recorded run ends. One that goes on has at least the
    # steps of the stopped trial that it continues.
    steps = min(outcome.end, max(last_step, steps_before))
    reached = outcome.steps is not None and outcome.steps <= steps
    has_diverged = outcome.diverged and steps == outcome.end
    # The trial ends here in any case, so this step is its last one.
    status = status_at(steps, steps, reached, has_diverged)
    assert status is not None  # noqa: S101 (the last step is this one)
    history = tuple((step, value) for step, value in outcome.history if step <= steps)
    missed = [step for step, value in history if not target.reached(value)]
    last_missed = max(missed, default=0)
    seconds = (steps - steps_before) * outcome.seconds_per_step
    return TrialResult(
        **spec.trial_fields(),
        status=status,
        steps=steps,
        steps_low=steps_low_of(status, steps, last_missed),
        examples=steps * spec.batch_size,
        train_seconds=seconds,
        eval_seconds=0.0,
        startup_seconds=0.0,
        wall_seconds=seconds,
        seconds_per_step=outcome.seconds_per_step,
        device=REPLAY_DEVICE,
        versions={"bstune": bstune.__version__},
        history=history,
        message="the recorded run diverged" if status == "diverged" else None,
        horizon=horizon,
    )


def extended_to(record: TrialResult, last_step: int) -> TrialResult:
    """Extend a record that ended before ``last_step`` to that step, with its last value.

    The recorded run may have ended early because it met a target of its own. A longer run would
    have come at least as far, as the best value so far counts. Only stopped trials with a history
    are extended; others are given as they are. A stopped trial has not met the study's target, so
    its ``steps_low``, the steps known to have missed it, are extended too.
    """
    if record.status != "stopped" or record.steps >= last_step or not record.history:
        return record
    _, value = record.history[-1]
    return replace(
        record,
        **record.fields_after(last_step),
        steps_low=last_step,
        history=(*record.history, (last_step, value)),
    )


def _is_positive(value: object) -> bool:
    return is_finite_number(value) and value > 0


def _is_integer(value: object) -> TypeGuard[float]:
    return is_finite_number(value) and value == int(value)


def _is_positive_integer(value: object) -> bool:
    return _is_integer(value) and value > 0


def _are_numbers(value: object) -> bool:
    return isinstance(value, list) and all(map(is_finite_number, value))


def _are_steps(value: object) -> bool:
    """Whether it is a list of positive integers, each larger than the one before."""
    if not isinstance(value, list) or not all(map(_is_integer, value)):
        return False
    return all(step < following for step, following in pairwise([0, *value]))


# For each column of a row, the kind of value in words, and a function that checks a value.
COLUMNS: Mapping[str, tuple[str, Callable[[object], bool]]] = {
    "batch_size": ("a positive integer", _is_positive_integer),
    "lr": ("a positive number", _is_positive),
    "seed": ("an integer", _is_integer),
    "steps": ("a list of ascending positive integers", _are_steps),
    "metric": ("a list of finite numbers, which ends before any other", _are_numbers),
    "seconds_per_step": ("a positive number", _is_positive),
}


def read_table(path: Path) -> Table:
    """Read the table in a file of JSON lines.

    A BstuneError says that the file has no table, or one that cannot be searched.
    """
    # Standard input could not be read again when the study goes on, so "-" is a file's name here.
    file = path.absolute() if path == STANDARD_INPUT else path
    lines = read_text(file, "the table").splitlines()
    runs: dict[tuple[int, float, int, int | None], Run] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        run = _read_run(line, f"{path}, line {number}")
        key = run.batch_size, run.lr, run.seed, run.horizon
        if key in runs:
            horizon = "" if run.horizon is None else f", horizon={run.horizon}"
            raise TableError(
                f"{path}, line {number}: batch_size={run.batch_size}, lr={run.lr:g}, "
                f"seed={run.seed}{horizon} is there twice: drop one of the two, or give them "
                "different seeds"
            )
        runs[key] = run
    table = Table(tuple(runs.values()))
    _check_searchable(table, path)
    return table


def _check_searchable(table: Table, path: Path) -> None:
    """Raise a TableError for a table that cannot be searched.

    It lacks evaluated runs, has horizons in some runs only, or has a single batch size.
    """
    if not any(run.steps for run in table.runs):
        raise TableError(
            f"the table {path} holds no evaluated run: it needs one a line, with "
            f"{', '.join(COLUMNS)}"
        )
    without = sum(run.horizon is None for run in table.runs)
    if table.has_horizons and without > 0:
        raise TableError(
            f"of the {len(table.runs)} runs in the table {path} {without} lack horizon, and the "
            "others have one: the schedules of a workload end with the trial or do not, so make "
            "two tables of them"
        )
    if len(table.batch_sizes) == 1:
        raise TableError(
            f"the table {path} has batch size {table.batch_sizes[0]} only: a search over batch "
            "sizes needs two or more"
        )


def _read_run(line: str, place: str) -> Run:
    """Read a recorded run from a line of JSON; ``place`` is its file and number, for messages."""
    values = parse_json(line, place)
    if not isinstance(values, dict):
        values = {}
    missing = [name for name in COLUMNS if name not in values]
    if missing:
        raise TableError(f"{place} lacks {', '.join(missing)}: a run has {', '.join(COLUMNS)}")
    # What each value must be, in words for the message and as a function that tells.
    for name, (kind, is_valid) in COLUMNS.items():
        if not is_valid(values[name]):
            raise TableError(f"{place}: {name} must be {kind}, but got {values[name]!r:.60}")
    searched = values.get("hyperparameters", {})
    if not isinstance(searched, dict) or not all(map(is_finite_number, searched.values())):
        raise TableError(
            f"{place}: hyperparameters must be numbers by name, but got {searched!r:.60}"
        )
    steps = values["steps"]
    metric = values["metric"]
    diverged = values.get("status") == "diverged"
    if len(steps) != len(metric):
        raise TableError(
            f"{place} has {len(steps)} steps but {len(metric)} values of the metric: one a step is "
            "needed"
        )
    if not steps and not diverged:
        raise TableError(
            f"{place} has no evaluation: only a run whose status is diverged may have none"
        )
    horizon = values.get("horizon")
    if horizon is not None:
        horizon = _checked_horizon(horizon, values, diverged, place)
    return Run(
        batch_size=int(values["batch_size"]),
        lr=float(values["lr"]),
        seed=int(values["seed"]),
        steps=tuple(int(step) for step in steps),
        metric=tuple(float(value) for value in metric),
        seconds_per_step=float(values["seconds_per_step"]),
        diverged=diverged,
        hyperparameters={name: float(value) for name, value in searched.items()},
        horizon=horizon,
    )


def _checked_horizon(horizon: object, values: Mapping[str, Any], diverged: bool, place: str) -> int:
    """Give the horizon of a line's run as an int, once it and the run's values are checked.

    A TableError says that it is no positive integer, that the run was not evaluated at it, or that
    the metric is not above 0.
    """
    if not _is_integer(horizon) or horizon < 1:
        raise TableError(f"{place}: horizon must be a positive integer, but got {horizon!r:.60}")
    last = values["steps"][-1] if values["steps"] else 0
    if last > horizon or (last < horizon and not diverged):
        raise TableError(
            f"{place}: the last evaluation must be at the horizon's end, step {horizon}, but got "
            f"{last}: go on recording a run that has met the target"
        )
    lowest = min(values["metric"], default=1.0)
    if lowest <= 0.0:
        raise TableError(
            f"{place}: between horizons the log of the metric is read, which must be above 0, but "
            f"got {lowest}"
        )
    return int(horizon)


def unusable_target(table: Table, target: Target) -> str | None:
    """Say why a target cannot be searched for; None if it can.

    It cannot if no run reaches it, or if all runs do at their first evaluation.
    """
    # A target that the study's first trial will set is not known yet.
    if target.is_open:
        return None
    if all(run.steps and target.reached(run.metric[0]) for run in table.runs):
        return (
            f"{target} is met by every run in this table at its first evaluation: "
            "check workload.target.mode and workload.target.value"
        )
    if any(run.steps_to(target) is not None for run in table.runs):
        return None
    evaluations = list[tuple[float, Run]]()
    for run in table.runs:
        evaluations += [(value, run) for value in run.metric]
    value, run = min(evaluations, key=lambda evaluation: target.gap(evaluation[0]))
    word = "lowest" if target.mode == "min" else "highest"
    return (
        f"{target} is never reached in this table; {word} {target.metric} {value:g}, at batch size "
        f"{run.batch_size} and learning rate {run.lr:g}: set workload.target.value to one that "
        "some run reached"
    )


@dataclass(frozen=True)
class TableSource:
    """A table's file, the target that it was recorded for, and the command that made it."""

    path: Path
    target: Target
    command: str


def find_table(name: str) -> Path:
    """Find the path of a table by its name, or raise a TableError.

    The name is a file's path, relative to the working directory, or a shipped table's bare name.
    """
    try:
        path = Path(name).expanduser()
        if path.is_file():
            return path
        reason = "is a folder" if path.is_dir() else "is no file"
    # They say respectively that there is no permission, that the path has a null byte or is too
    # long, and that there is no such user.
    except (OSError, ValueError, RuntimeError) as error:
        raise TableError(f"workload.table={name!r} cannot be read: {error}") from error
    shipped = sorted(path.stem for path in SHIPPED.glob("*.jsonl"))
    if name in shipped:
        return SHIPPED / f"{name}.jsonl"
    raise TableError(
        f"workload.table={name} {reason}: give a file of recorded runs as JSON lines, or name a "
        f"shipped one: {', '.join(shipped)}"
    )


def read_index(horizon: bool = False) -> dict[str, TableSource]:
    """List the tables that ship, by name, from the ``tables.yaml`` beside them.

    Their metrics are errors, which are to fall.

    Args:
        horizon: whether to list the tables of runs whose schedules ended with them; else those of
            runs that can be stopped anywhere are listed.
    """
    listed = yaml.safe_load((SHIPPED / "tables.yaml").read_text(encoding="utf-8"))
    sources = dict[str, TableSource]()
    for name, entry in listed.items():
        if entry.get("horizon", False) == horizon:
            target = Target(entry["metric"], entry["target"], "min")
            sources[name] = TableSource(SHIPPED / f"{name}.jsonl", target, entry["command"])
    return sources


def _name_of(path: Path) -> str:
    """Name the workload of a table, and so its study.

    Unless the table ships, its content is in the name, so that two tables are two studies.
    """
    if path.resolve().parent == SHIPPED.resolve():
        return f"replay-{path.stem}"
    stem = re.sub(r"[^\w.-]+", "-", path.stem)[:40]
    return f"replay-{stem}-{_digest(path)[:6]}"


def _digest(path: Path) -> str:
    """Give a digest of a table's content, in 16 hexadecimal digits."""
    return hashlib.sha256(read_bytes(path.absolute(), "the table")).hexdigest()[:16]


def options_from_table(workload: Mapping[str, object]) -> dict[str, object]:
    """Fill in the options that a replayed workload leaves open (``???``), from its table.

    - The name.
    - The range of batch sizes.
    - The reference: the geometric middle of the batch sizes, and that of the learning rates.
    - A budget that no recorded run exceeds, so that trials end where their records do.
    - The target's metric. That of a user's own table is taken for an error.
    - The target's value, if the table is one of those that ship with bstune.

    Args:
        workload: the values that the workload states, without those that are missing.

    Returns:
        The value of each option that was left open, by its dotted key in the config. The device is
        always among them: nothing is trained, so it is ``REPLAY_DEVICE`` whatever was stated.

    Raises:
        ConfigError: for a workload without a table, and for a user's table without a target.
    """
    if "table" not in workload:
        raise ConfigError(
            "workload.table is missing: name a file of recorded runs, workload.table=FILE"
        )
    path = find_table(str(workload["table"]))
    table = read_table(path)
    low = table.batch_sizes[0]
    high = table.batch_sizes[-1]
    # A trial ends once both its steps and its examples are spent. The steps are those of the
    # longest run at the largest batch size. Runs that took more steps need the examples besides.
    # Without such runs the steps alone decide, and the examples are the least that there can be: 1.
    steps = max(run.end for run in table.runs if run.batch_size == high)
    longer = [run.end * run.batch_size for run in table.runs if run.end > steps]
    defaults: dict[str, object] = {
        "name": _name_of(path),
        "batch_size.low": low,
        "batch_size.high": high,
        "reference.batch_size": math.sqrt(low * high),
        "reference.lr": math.sqrt(table.lrs[0] * table.lrs[-1]),
        "budget.steps": steps,
        "budget.examples": max(longer, default=1),
    }
    target = _shipped_target(path)
    defaults["target.metric"] = METRIC
    if target is not None:
        defaults["target.metric"] = target.metric
        defaults["target.value"] = target.value
    stated = flatten(workload)
    if "target.value" not in stated and target is None:
        raise _no_target_value(table)
    filled = {f"workload.{key}": value for key, value in defaults.items() if key not in stated}
    return {"device": REPLAY_DEVICE, **filled}


def _no_target_value(table: Table) -> ConfigError:
    """Make the error that the target's value is missing, with the range of the table's values."""
    recorded = list[float]()
    for run in table.runs:
        recorded += run.metric
    return ConfigError(
        "workload.target.value is missing: give the value to reach, such as "
        f"workload.target.value=0.1 (this table's values lie between {min(recorded):g} and "
        f"{max(recorded):g})"
    )


def _shipped_target(path: Path) -> Target | None:
    """Give the target that a shipped table was recorded for; None for any other table."""
    # To read the index takes far longer than to see that a table is none of those.
    if path.resolve() not in map(Path.resolve, SHIPPED.glob("*.jsonl")):
        return None
    for source in (read_index() | read_index(horizon=True)).values():
        if source.path.resolve() == path.resolve():
            return source.target
    return None


def _searched_note(table: Table) -> list[str]:
    """Give a line that names the further hyperparameters in which recorded runs differ.

    The list is empty where runs differ in batch size and learning rate alone.
    """
    names = set[str]()
    for run in table.runs:
        names.update(run.hyperparameters)
    if not names:
        return []
    listed = ", ".join(sorted(names))
    return [f"each recorded run has its own {listed}, which are not searched here"]


def _step_time(table: Table) -> Callable[[float], float]:
    """Make the function that gives the seconds of a step at a batch size.

    They are the recorded runs' median at each batch size, and linear in the logarithms between.
    """
    seconds_at: dict[int, list[float]] = {size: [] for size in table.batch_sizes}
    for run in table.runs:
        seconds_at[run.batch_size].append(run.seconds_per_step)
    medians = [median(seconds) for seconds in seconds_at.values()]
    log_sizes = np.log(table.batch_sizes)
    log_medians = np.log(medians)

    def step_time(batch_size: float) -> float:
        return float(np.exp(np.interp(math.log(batch_size), log_sizes, log_medians)))

    return step_time


def _frozen_budget(options: StudyOptions, table: Table) -> dict[str, object]:
    """Give the options of the budget, by name, if a change of it changes what a trial is.

    It does where schedules end with the budget. Empty where trials can be stopped anywhere, or
    where the sampler chooses each trial's horizon.
    """
    if not table.has_horizons or chooses_horizons(options):
        return {}
    return flatten({"budget": options.budget.model_dump()})


class ReplayBackend(TrialBackend):
    """Answers each trial from a table of recorded runs.

    Args:
        options: of the study, with what :func:`options_from_table` has filled in.
        protocol: of all trials.
    """

    def __init__(self, options: StudyOptions, protocol: TrialProtocol) -> None:
        if options.compile is not None:
            raise ConfigError(
                f"compile={options.compile} does not apply to recorded runs: leave it out"
            )
        assert isinstance(options.workload, ReplayedWorkload)  # noqa: S101 (others are trained)
        path = find_table(options.workload.table)
        self.table = read_table(path)
        self._protocol = protocol
        sizes = self.table.batch_sizes
        lrs = self.table.lrs
        self.step_time = _step_time(self.table)
        # Runs whose schedules ended with them tell nothing of a trial that is stopped earlier.
        self.horizon = self.table.has_horizons
        self.stops = not self.horizon
        self.device = REPLAY_DEVICE
        self.description = f"recorded runs ({path.stem})"
        self.versions = {"bstune": bstune.__version__}
        self.lr_range = lrs[0], lrs[-1]
        # Trials at a fixed budget are compared once all have spent it, so records that ended
        # earlier are extended. Where schedules end with the trial, a record does not end earlier.
        self._fills_budget = options.search.objective == "loss" and not self.horizon
        # These must not change while a study goes on.
        self.frozen_settings = {
            "workload.table": f"sha256 {_digest(path)}",
            **_frozen_budget(options, self.table),
            "device": REPLAY_DEVICE,
        }
        how_it_ends = "a trial also ends where its record does"
        if self.horizon:
            how_it_ends = "a trial's schedule ends with it"
        self.notes = (
            f"answered from {len(self.table.runs)} recorded runs at {len(sizes)} batch sizes and "
            f"{len(lrs)} learning rates: seconds are simulated, and {how_it_ends}",
            *_searched_note(self.table),
        )

    def run(
        self, spec: TrialSpec, folder: Output | None, resumed_from: TrialResult | None
    ) -> TrialResult:
        """Answer one trial from the table.

        Where trials are compared at a fixed budget, its record lasts to the trial's last step.
        """
        last_step = spec.max_steps
        if last_step is None:
            last_step = self._protocol.budget.last_step(spec.batch_size)
        # The target's value may be the one that the study's first trial came to.
        target = self._protocol.with_goal_of(spec).target
        record = replay(self.table, spec, target, last_step, resumed_from)
        if not self._fills_budget:
            return record
        extended = extended_to(record, last_step)
        # A budget in seconds becomes steps by the recorded runs' median seconds at each batch size.
        # With the seconds of single runs, trials of equally many steps would differ in seconds.
        seconds_per_step = self.step_time(spec.batch_size)
        steps_before = 0 if resumed_from is None else resumed_from.steps
        seconds = max(extended.steps - steps_before, 0) * seconds_per_step
        return replace(
            extended,
            seconds_per_step=seconds_per_step,
            train_seconds=seconds,
            wall_seconds=seconds,
        )

    def longest(self, batch_size: int, protocol: TrialProtocol) -> int:
        """Give the steps of a trial that never reaches the target.

        They are those of the longest run at the nearest batch size, within the budget. Where the
        table has horizons (its runs' schedules ended with them), such a trial takes the whole
        budget.
        """
        if self.horizon:
            return protocol.budget.last_step(batch_size)
        nearest = min(self.table.batch_sizes, key=lambda size: abs(math.log(size / batch_size)))
        longest = max(run.end for run in self.table.runs if run.batch_size == nearest)
        return min(longest, protocol.budget.last_step(batch_size))

    def check(self, space: Space, trial: TrialSpec | None) -> None:
        """Raise a BstuneError for a target that the table cannot serve, or values outside of it.

        The values are the range of batch sizes; or the batch size and learning rate of ``trial``,
        the only trial to run where there is to be no study.
        """
        reason = unusable_target(self.table, self._protocol.target)
        if reason is not None:
            raise TableError(reason)
        sizes = self.table.batch_sizes
        if trial is None:
            _check_within("search.batch_size.low", space.low, "batch sizes", sizes)
            _check_within("search.batch_size.high", space.high, "batch sizes", sizes)
        else:
            _check_within("trial.batch_size", trial.batch_size, "batch sizes", sizes)
            _check_within("trial.lr", trial.lr, "learning rates", self.table.lrs)


def _check_within(option: str, value: float, what: str, recorded: Sequence[float]) -> None:
    """Raise a ConfigError for an option's value outside of the recorded ones, which rise.

    ``what`` names the recorded values in the message.
    """
    if not recorded[0] <= value <= recorded[-1]:
        raise ConfigError(
            f"{option}={value:g} lies outside of the table's {what}, {recorded[0]:g} to "
            f"{recorded[-1]:g}"
        )
