"""Recorded trials in place of training: the same records, milliseconds each.

A table is a file of JSON lines, one a recorded run: ``batch_size``, ``lr``, ``seed``, ``steps``
(the evaluated steps), ``metric`` (one value a step: an error, or another metric that the target
names) and ``seconds_per_step``; ``status`` may be ``diverged``, and ``hyperparameters`` has what
was searched besides, by name. Runs of the same batch size and learning rate are a cell; cells need
not fill a rectangle.

A run may have ``horizon``, the steps after which its schedule ended, and has then been recorded to
its end. In a table all runs have one or none has: with them it is replayed as a workload whose
schedule ends with the trial.

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
from bstune.core.records import Target, TrialProtocol, TrialResult, TrialSpec
from bstune.core.search_space import Space
from bstune.core.trial_end import status_at, steps_low_of
from bstune.options import ReplayedWorkload, StudyOptions, flatten
from bstune.system.files import Output
from bstune.system.inputs import STANDARD_INPUT, parse_json, read_bytes, read_text
from bstune.trial.backend import TrialBackend, chooses_horizons
from bstune.trial.recorded_run import Outcome, Run, at_share, weights_around
from bstune.trial.replay_horizon import HorizonTable

REPLAY_DEVICE = "replay"
# Of a file of one's own.
METRIC = "val/error"
SHIPPED = Path(__file__).parent / "tables"


@dataclass(frozen=True)
class Table:
    """Recorded runs, and how to read between them."""

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
        """Give what a trial comes to; outside of the table's range as at its edge.

        Where all corners of the grid around the point reached the target, log S and log tau are
        bilinear in (log B, log lr), and the history is the nearest corner's with its steps
        rescaled; elsewhere the outcome is the nearest corner's. A corner that was not recorded is
        its nearest recorded cell, in (log B, log lr). Of several runs in a cell, one is drawn by
        ``seed``, the same place in every cell.
        """
        return self.read(batch_size, lr, target, float(np.random.default_rng(seed).random()))

    def read(self, batch_size: float, lr: float, target: Target, share: float) -> Outcome:
        """Give :meth:`outcome` with the run at ``share`` of a cell's.

        Runs are in the order of their seeds.
        """
        runs = list[Run]()
        weights = list[float]()
        for size, size_weight in weights_around(self.batch_sizes, batch_size):
            for rate, rate_weight in weights_around(self.lrs, lr):
                if size_weight * rate_weight > 0:
                    runs.append(self._draw(size, rate, share))
                    weights.append(size_weight * rate_weight)
        nearest = runs[weights.index(max(weights))]
        nearest_tau = nearest.seconds_per_step
        hit = nearest.steps_to(target)
        if hit is None:
            return Outcome(
                steps=None,
                end=nearest.end,
                seconds_per_step=nearest_tau,
                history=nearest.history_to(),
                diverged=nearest.diverged,
            )
        steps_of_runs = list[int]()
        for run in runs:
            steps_of_run = run.steps_to(target)
            if steps_of_run is not None:
                steps_of_runs.append(steps_of_run)
        # Steps to target cannot be read between a corner that reached it and one that did not.
        if len(steps_of_runs) < len(runs):
            return Outcome(
                steps=hit,
                end=hit,
                seconds_per_step=nearest_tau,
                history=nearest.history_to(hit),
                diverged=False,
            )
        steps = round(_geometric_mean(steps_of_runs, weights))
        tau = _geometric_mean([run.seconds_per_step for run in runs], weights)
        history = nearest.history_to(hit, steps / hit)
        return Outcome(
            steps=steps, end=steps, seconds_per_step=tau, history=history, diverged=False
        )

    @cached_property
    def has_horizons(self) -> bool:
        """Whether the schedules of its runs ended with them."""
        return any(run.horizon is not None for run in self.runs)

    @cached_property
    def of_horizons(self) -> HorizonTable:
        """How to read between runs whose schedules ended with them."""
        return HorizonTable(self.cells, self.batch_sizes)

    def _draw(self, batch_size: int, lr: float, share: float) -> Run:
        """Choose the run at a share of a cell's.

        Of a cell that was not recorded, of the nearest one's.
        """
        runs = self.cells.get((batch_size, lr))
        if runs is None:
            away = np.log(list(self.cells)) - np.log([batch_size, lr])
            distance = (away**2).sum(axis=1)
            runs = list(self.cells.values())[int(distance.argmin())]
        return at_share(runs, share)


def _geometric_mean(values: Sequence[float], weights: Sequence[float]) -> float:
    # A recorded point is answered as it was recorded, to the last bit.
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
    """Answer a trial from the table, as the record of one that was trained.

    ``last_step`` counts from the first step of the trial that it continues, if any; only what is
    added costs seconds. Where the table has horizons it is the trial's own.
    """
    done = 0 if resumed_from is None else resumed_from.steps
    horizon = None
    if table.has_horizons:
        horizon = last_step
        outcome = table.of_horizons.outcome(spec.batch_size, spec.lr, horizon, spec.seed, target)
    else:
        outcome = table.outcome(spec.batch_size, spec.lr, spec.seed, target)
    steps = min(outcome.end, max(last_step, done))
    reached = outcome.steps is not None and outcome.steps <= steps
    # An outcome that diverges reaches nothing, and one that ends otherwise has no step left.
    status = status_at(steps, steps, reached, outcome.diverged and steps == outcome.end)
    assert status is not None  # noqa: S101 (the last step is this one)
    history = tuple((step, value) for step, value in outcome.history if step <= steps)
    missed = [step for step, value in history if not target.reached(value)]
    last_missed = max(missed, default=0)
    seconds = (steps - done) * outcome.seconds_per_step
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


def held_to(record: TrialResult, last_step: int) -> TrialResult:
    """Let a record that ended before ``last_step`` stay at its last value until then.

    The recorded run may have ended early because it met a target of its own. A longer one would
    have come at least as far, as the best value so far counts.
    """
    if record.status != "stopped" or record.steps >= last_step or not record.history:
        return record
    _, value = record.history[-1]
    return replace(
        record,
        **record.after(last_step),
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
    if not isinstance(value, list) or not all(map(_is_integer, value)):
        return False
    return all(step < following for step, following in pairwise([0, *value]))


# What each column of a row must be, in words, and what tells whether a value is.
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

    A BstuneError if it is none, or is no use to a search.
    """
    # A table is read again whenever its study goes on: a file called - is no standard input.
    file = path.absolute() if path == STANDARD_INPUT else path
    lines = read_text(file, "the table").splitlines()
    runs: dict[tuple[int, float, int, int | None], Run] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        run = _run(line, f"{path}, line {number}")
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
    """Refuse a table that is no use to a search."""
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


def _run(line: str, place: str) -> Run:
    """Read a recorded run from a line, of which ``place`` names file and number in messages."""
    values = parse_json(line, place)
    if not isinstance(values, dict):
        values = {}
    missing = [name for name in COLUMNS if name not in values]
    if missing:
        raise TableError(f"{place} lacks {', '.join(missing)}: a run has {', '.join(COLUMNS)}")
    for name, (what, is_valid) in COLUMNS.items():
        if not is_valid(values[name]):
            raise TableError(f"{place}: {name} must be {what}, but got {values[name]!r:.60}")
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
    """Refuse a horizon that is none, or whose run does not say how the metric came to its end."""
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
    """Tell why a search for the target is no use: no run reaches it, or all do at once.

    None if it is of use.
    """
    # One that a first trial sets is not known yet.
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
    """Find the path of a table.

    Its name is that of a file, relative to the working directory, or a shipped table's bare name.
    """
    try:
        path = Path(name).expanduser()
        if path.is_file():
            return path
        reason = "is a folder" if path.is_dir() else "is no file"
    # No permission; a null byte or too long; no such user.
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
    """List the tables that ship, by name, as ``tables.yaml`` beside them lists them.

    All metrics are errors.

    Args:
        horizon: of runs whose schedule ended with them; else of the others, which can be stopped
            anywhere.
    """
    listed = yaml.safe_load((SHIPPED / "tables.yaml").read_text(encoding="utf-8"))
    sources = dict[str, TableSource]()
    for name, entry in listed.items():
        if entry.get("horizon", False) == horizon:
            target = Target(entry["metric"], entry["target"], "min")
            sources[name] = TableSource(SHIPPED / f"{name}.jsonl", target, entry["command"])
    return sources


def _name_of(path: Path) -> str:
    """Name a table's workload, and so its study.

    The name is by the file's name and content, if it does not ship.
    """
    if path.resolve().parent == SHIPPED.resolve():
        return f"replay-{path.stem}"
    stem = re.sub(r"[^\w.-]+", "-", path.stem)[:40]
    return f"replay-{stem}-{_content(path)[:6]}"


def _content(path: Path) -> str:
    """Give what tells a table's content from another's, wherever it lies."""
    return hashlib.sha256(read_bytes(path.absolute(), "the table")).hexdigest()[:16]


def complete(workload: Mapping[str, object]) -> dict[str, object]:
    """Give what a replayed workload leaves open (``???``), by dotted key of the config.

    It is taken from its table.

    These are its name, so that two tables are two studies; the range of batch sizes; the reference,
    the geometric middle of batch sizes and of learning rates; a budget that no recorded run
    exceeds, so that it is the records that end trials; and a shipped table's metric and target. A
    file's metric is taken for an error.

    Args:
        workload: the values that it has; those that are missing are not among them.
    """
    if "table" not in workload:
        raise ConfigError(
            "workload.table is missing: name a file of recorded runs, workload.table=FILE"
        )
    path = find_table(str(workload["table"]))
    table = read_table(path)
    low = table.batch_sizes[0]
    high = table.batch_sizes[-1]
    # The least budget that no run exceeds: the longest run's steps at the largest batch size, or
    # the most examples of a run that took more steps.
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
        seen = list[float]()
        for run in table.runs:
            seen += run.metric
        raise ConfigError(
            "workload.target.value is missing: give the value to reach, such as "
            f"workload.target.value=0.1 (this table's values lie between {min(seen):g} and "
            f"{max(seen):g})"
        )
    filled = {f"workload.{key}": value for key, value in defaults.items() if key not in stated}
    return {"device": REPLAY_DEVICE, **filled}


def _shipped_target(path: Path) -> Target | None:
    """Give the target that a table was recorded for, if it ships."""
    for source in (read_index() | read_index(horizon=True)).values():
        if source.path.resolve() == path.resolve():
            return source.target
    return None


def _searched_note(table: Table) -> list[str]:
    """Say that recorded runs differ in more than batch size and learning rate, where they do."""
    names = set[str]()
    for run in table.runs:
        names.update(run.hyperparameters)
    if not names:
        return []
    listed = ", ".join(sorted(names))
    return [f"each recorded run has its own {listed}, which are not searched here"]


def _step_time(table: Table) -> Callable[[float], float]:
    """Give the median seconds at each batch size, linear in the logarithms between them."""
    seconds_at: dict[int, list[float]] = {size: [] for size in table.batch_sizes}
    for run in table.runs:
        seconds_at[run.batch_size].append(run.seconds_per_step)
    taus = [median(seconds) for seconds in seconds_at.values()]
    log_sizes = np.log(table.batch_sizes)
    log_taus = np.log(taus)

    def step_time(batch_size: float) -> float:
        return float(np.exp(np.interp(math.log(batch_size), log_sizes, log_taus)))

    return step_time


class ReplayBackend(TrialBackend):
    """Answers each trial from a table of recorded runs.

    :func:`complete` has filled the options.
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
        self.horizon = self.table.has_horizons
        self.stops = not self.horizon
        self.device = REPLAY_DEVICE
        self.description = f"recorded runs ({path.stem})"
        self.versions = {"bstune": bstune.__version__}
        self.lr_range = lrs[0], lrs[-1]
        # A fixed budget compares trials that have all spent it.
        self._holds = options.search.objective == "loss" and not self.horizon
        # Where schedules end with the budget, it is part of the workload.
        budget = flatten({"budget": options.budget.model_dump()})
        if self.stops or chooses_horizons(options):
            budget = {}
        table = {"workload.table": f"sha256 {_content(path)}"}
        self.frozen_settings = {**table, **budget, "device": REPLAY_DEVICE}
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
        """Answer one trial from the table."""
        last_step = spec.max_steps
        if last_step is None:
            last_step = self._protocol.budget.last_step(spec.batch_size)
        target = self._protocol.with_goal_of(spec).target
        record = replay(self.table, spec, target, last_step, resumed_from)
        if not self._holds:
            return record
        # By the same seconds as the budget's, not those of the nearest recorded run.
        held = held_to(record, last_step)
        seconds_per_step = self.step_time(spec.batch_size)
        steps_before = 0 if resumed_from is None else resumed_from.steps
        seconds = max(held.steps - steps_before, 0) * seconds_per_step
        return replace(
            held,
            seconds_per_step=seconds_per_step,
            train_seconds=seconds,
            wall_seconds=seconds,
        )

    def longest(self, batch_size: int, protocol: TrialProtocol) -> int:
        """Give the steps of the longest record at the nearest batch size, within the budget.

        Where the table has horizons a trial that never reaches the target takes all of its own.
        """
        if self.horizon:
            return protocol.budget.last_step(batch_size)
        nearest = min(self.table.batch_sizes, key=lambda size: abs(math.log(size / batch_size)))
        longest = max(run.end for run in self.table.runs if run.batch_size == nearest)
        return min(longest, protocol.budget.last_step(batch_size))

    def check(self, space: Space, trial: TrialSpec | None) -> None:
        """Refuse a target that is no use to the table, and points outside of it."""
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
    """Refuse a value outside of the range of recorded ones, which rise."""
    if not recorded[0] <= value <= recorded[-1]:
        raise ConfigError(
            f"{option}={value:g} lies outside of the table's {what}, {recorded[0]:g} to "
            f"{recorded[-1]:g}"
        )
