"""Recorded trials in place of training: the same records, milliseconds each.

A table is a file of JSON lines, one a recorded run: ``batch_size``, ``lr``, ``seed``, ``steps`` (the evaluated steps),
``metric`` (one value a step: an error, or another metric that the target names) and ``seconds_per_step``;
``status`` may be ``diverged``, and ``hyperparameters`` has what was searched besides, by name. Runs
of the same batch size and learning rate are a cell; cells need not fill a rectangle.

``bstune record FILE ...`` writes a table; see :mod:`bstune.study.record`.
"""

import hashlib
import math
import re
import sys
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby, pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import yaml

import bstune
from bstune.core.errors import ConfigError, TableError
from bstune.core.records import Status, Target, TrialProtocol, TrialResult, TrialSpec
from bstune.core.search_space import Space
from bstune.options import ReplayedWorkload, StudyOptions, flatten
from bstune.system.files import Output
from bstune.system.inputs import STANDARD_INPUT, parse_json, read_bytes, read_text
from bstune.trial.backend import TrialBackend

DEVICE = "replay"
METRIC = "val/error"  # of a file of one's own
SHIPPED = Path(__file__).parent / "tables"


@dataclass(frozen=True)
class Run:
    """One recorded run: ``metric[i]`` was seen after ``steps[i]`` steps; a diverged one may have no evaluation."""

    batch_size: int
    lr: float
    seed: int
    steps: tuple[int, ...]
    metric: tuple[float, ...]
    seconds_per_step: float
    diverged: bool
    # What was searched besides, by name; replays take it as it comes.
    hyperparameters: Mapping[str, float] = field(default_factory=dict)

    @property
    def end(self) -> int:
        """The last evaluated step, which ends the record; 1 for a run that diverged before its first evaluation."""
        return self.steps[-1] if self.steps else 1

    def steps_to(self, target: Target) -> int | None:
        """Return the first evaluated step that met the target, None if none did."""
        return next(
            (
                step
                for step, value in zip(self.steps, self.metric, strict=True)
                if target.reached(value)
            ),
            None,
        )


@dataclass(frozen=True)
class Outcome:
    """Steps to target at one (batch size, learning rate, seed), None if not reached, and the history to ``end``."""

    steps: int | None
    end: int
    seconds_per_step: float
    history: tuple[tuple[int, float], ...]
    diverged: bool


@dataclass(frozen=True)
class Table:
    """Recorded runs, and how to read between them."""

    runs: tuple[Run, ...]

    @cached_property
    def cells(self) -> Mapping[tuple[int, float], tuple[Run, ...]]:
        """The runs of each (batch size, learning rate), in order of their seeds."""
        ordered = sorted(self.runs, key=lambda run: (run.batch_size, run.lr, run.seed))
        return {
            cell: tuple(runs)
            for cell, runs in groupby(ordered, key=lambda run: (run.batch_size, run.lr))
        }

    @cached_property
    def batch_sizes(self) -> tuple[int, ...]:
        """All batch sizes, ascending."""
        return tuple(sorted({run.batch_size for run in self.runs}))

    @cached_property
    def lrs(self) -> tuple[float, ...]:
        """All learning rates, ascending."""
        return tuple(sorted({run.lr for run in self.runs}))

    def outcome(self, batch_size: float, lr: float, seed: int, target: Target) -> Outcome:
        """Return what a trial comes to; outside of the table's range as at its edge.

        Where all corners of the grid around the point reached the target, log S and log tau are bilinear in
        (log B, log lr), and the history is the nearest corner's with its steps rescaled; elsewhere the outcome is the
        nearest corner's. A corner that was not recorded is its nearest recorded cell, in (log B, log lr). Of several
        runs in a cell, one is drawn by ``seed``, the same place in every cell.
        """
        return self.read(batch_size, lr, target, float(np.random.default_rng(seed).random()))

    def read(self, batch_size: float, lr: float, target: Target, share: float) -> Outcome:
        """Return :meth:`outcome` with, of a cell's runs in the order of their seeds, the one at ``share`` of them."""
        corners = [
            (self._draw(size, rate, share), size_weight * rate_weight)
            for size, size_weight in _bracket(self.batch_sizes, batch_size)
            for rate, rate_weight in _bracket(self.lrs, lr)
            if size_weight * rate_weight > 0
        ]
        runs, weights = zip(*corners, strict=True)
        nearest: Run = runs[weights.index(max(weights))]
        hit = nearest.steps_to(target)
        reached = [steps for run in runs if (steps := run.steps_to(target)) is not None]
        if hit is None:
            return Outcome(
                None, nearest.end, nearest.seconds_per_step, _rescaled(nearest), nearest.diverged
            )
        if len(reached) < len(runs):
            return Outcome(hit, hit, nearest.seconds_per_step, _rescaled(nearest, hit), False)
        steps = round(_geometric_mean(reached, weights))
        tau = _geometric_mean([run.seconds_per_step for run in runs], weights)
        return Outcome(steps, steps, tau, _rescaled(nearest, hit, steps / hit), False)

    def _draw(self, batch_size: int, lr: float, share: float) -> Run:
        runs = self.cells.get((batch_size, lr))
        if runs is None:
            distance = ((np.log(list(self.cells)) - np.log([batch_size, lr])) ** 2).sum(axis=1)
            runs = list(self.cells.values())[int(distance.argmin())]
        return runs[min(int(share * len(runs)), len(runs) - 1)]


def _bracket(values: Sequence[float], value: float) -> list[tuple[Any, float]]:
    """Return the recorded values around ``value``, each with its weight, linear in the logarithm."""
    value = min(max(value, values[0]), values[-1])
    above = bisect_left(values, value)
    if values[above] == value:
        return [(values[above], 1.0)]
    low, high = values[above - 1], values[above]
    weight = math.log(value / low) / math.log(high / low)
    return [(low, 1.0 - weight), (high, weight)]


def _geometric_mean(values: Sequence[float], weights: Sequence[float]) -> float:
    if len(values) == 1:  # a recorded point is answered as it was recorded, to the last bit
        return values[0]
    return math.exp(
        sum(weight * math.log(value) for value, weight in zip(values, weights, strict=True))
    )


def _rescaled(run: Run, end: float = math.inf, scale: float = 1.0) -> tuple[tuple[int, float], ...]:
    """Return (step, metric) up to ``end`` with the steps rescaled; of evaluations that fall together the last stays."""
    pairs = zip(run.steps, run.metric, strict=True)
    return tuple(
        {max(1, round(step * scale)): value for step, value in pairs if step <= end}.items()
    )


def replay(
    table: Table,
    spec: TrialSpec,
    target: Target,
    last_step: int,
    resumed_from: TrialResult | None = None,
) -> TrialResult:
    """Return the record of a trial that is answered from the table.

    ``last_step`` counts from the first step of the trial that it continues, if any; only what is added costs seconds.
    """
    done = 0 if resumed_from is None else resumed_from.steps
    outcome = table.outcome(spec.batch_size, spec.lr, spec.seed, target)
    steps = min(outcome.end, max(last_step, done))
    reached = outcome.steps is not None and outcome.steps <= steps
    status: Status = (
        "reached"
        if reached
        else "diverged"
        if outcome.diverged and steps == outcome.end
        else "stopped"
    )
    history = tuple((step, value) for step, value in outcome.history if step <= steps)
    missed = [step for step, value in history if not target.reached(value)]
    seconds = (steps - done) * outcome.seconds_per_step
    return TrialResult(
        **spec.trial_fields(),
        status=status,
        steps=steps,
        steps_low=(missed[-1] if missed else 0) if reached else steps,
        examples=steps * spec.batch_size,
        train_seconds=seconds,
        eval_seconds=0.0,
        startup_seconds=0.0,
        wall_seconds=seconds,
        seconds_per_step=outcome.seconds_per_step,
        device=DEVICE,
        versions={"bstune": bstune.__version__},
        history=history,
        message="the recorded run diverged" if status == "diverged" else None,
    )


def _is_number(value: Any) -> bool:
    # NaN compares false; an integer may be too large for a float.
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and abs(value) <= sys.float_info.max
    )


def _is_integer(value: Any) -> bool:
    return _is_number(value) and value == int(value)


def _is_list(value: Any, is_valid: Callable[[Any], bool]) -> bool:
    return isinstance(value, list) and all(map(is_valid, value))


# What each column of a row must be.
COLUMNS: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    "batch_size": ("a positive integer", lambda value: _is_integer(value) and value > 0),
    "lr": ("a positive number", lambda value: _is_number(value) and value > 0),
    "seed": ("an integer", _is_integer),
    "steps": (
        "a list of ascending positive integers",
        lambda value: (
            _is_list(value, _is_integer)
            and all(before < after for before, after in pairwise([0, *value]))
        ),
    ),
    "metric": (
        "a list of finite numbers, which ends before any other",
        lambda value: _is_list(value, _is_number),
    ),
    "seconds_per_step": ("a positive number", lambda value: _is_number(value) and value > 0),
}


def read_table(path: Path) -> Table:
    """Return the table in a file of JSON lines; a BstuneError if it is none, or is no use to a search."""
    # A table is read again whenever its study goes on: a file called - is no standard input.
    lines = read_text(path.absolute() if path == STANDARD_INPUT else path, "the table").splitlines()
    runs: dict[tuple[int, float, int], Run] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        run = _run(line, f"{path}, line {number}")
        key = run.batch_size, run.lr, run.seed
        if key in runs:
            raise TableError(
                f"{path}, line {number}: batch_size={run.batch_size}, lr={run.lr:g}, seed={run.seed} is there twice: "
                "drop one of the two, or give them different seeds"
            )
        runs[key] = run
    if not any(run.steps for run in runs.values()):
        raise TableError(
            f"the table {path} holds no evaluated run: it needs one a line, with {', '.join(COLUMNS)}"
        )
    table = Table(tuple(runs.values()))
    if len(table.batch_sizes) == 1:
        raise TableError(
            f"the table {path} has batch size {table.batch_sizes[0]} only: a search over batch sizes needs two or more"
        )
    return table


def _run(line: str, place: str) -> Run:
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
    if not isinstance(searched, dict) or not all(map(_is_number, searched.values())):
        raise TableError(
            f"{place}: hyperparameters must be numbers by name, but got {searched!r:.60}"
        )
    steps, metric, diverged = values["steps"], values["metric"], values.get("status") == "diverged"
    if len(steps) != len(metric):
        raise TableError(
            f"{place} has {len(steps)} steps but {len(metric)} values of the metric: one a step is needed"
        )
    if not steps and not diverged:
        raise TableError(
            f"{place} has no evaluation: only a run whose status is diverged may have none"
        )
    return Run(
        batch_size=int(values["batch_size"]),
        lr=float(values["lr"]),
        seed=int(values["seed"]),
        steps=tuple(int(step) for step in steps),
        metric=tuple(float(value) for value in metric),
        seconds_per_step=float(values["seconds_per_step"]),
        diverged=diverged,
        hyperparameters={name: float(value) for name, value in searched.items()},
    )


def unusable_target(table: Table, target: Target) -> str | None:
    """Return why a search for the target is no use: no run reaches it, or all do at once; None if it is of use."""
    if all(run.steps and target.reached(run.metric[0]) for run in table.runs):
        return (
            f"{target} is met by every run in this table at its first evaluation: "
            "check workload.target.mode and workload.target.value"
        )
    if any(run.steps_to(target) is not None for run in table.runs):
        return None
    value, run = min(
        ((v, run) for run in table.runs for v in run.metric), key=lambda pair: target.gap(pair[0])
    )
    word = "lowest" if target.mode == "min" else "highest"
    return (
        f"{target} is never reached in this table; {word} {target.metric} {value:g}, at batch size {run.batch_size} "
        f"and learning rate {run.lr:g}: set workload.target.value to one that some run reached"
    )


@dataclass(frozen=True)
class Source:
    """A table's file, the target that it was recorded for, and the command that made it."""

    path: Path
    target: Target
    command: str


def find_table(name: str) -> Path:
    """Return the path of a table: a file, relative to the working directory, or a shipped table's bare name."""
    try:
        path = Path(name).expanduser()
        if path.is_file():
            return path
        reason = "is a folder" if path.is_dir() else "is no file"
    except (
        OSError,
        ValueError,
        RuntimeError,
    ) as error:  # no permission; a null byte or too long; no such user
        raise TableError(f"workload.table={name!r} cannot be read: {error}") from error
    shipped = sorted(path.stem for path in SHIPPED.glob("*.jsonl"))
    if name in shipped:
        return SHIPPED / f"{name}.jsonl"
    raise TableError(
        f"workload.table={name} {reason}: give a file of recorded runs as JSON lines, or name a shipped one: "
        f"{', '.join(shipped)}"
    )


def read_index() -> dict[str, Source]:
    """Return the tables that ship, by name, as ``tables.yaml`` beside them lists them; all metrics are errors."""
    listed = yaml.safe_load((SHIPPED / "tables.yaml").read_text(encoding="utf-8"))
    return {
        name: Source(
            SHIPPED / f"{name}.jsonl", Target(one["metric"], one["target"], "min"), one["command"]
        )
        for name, one in listed.items()
    }


def _name_of(path: Path) -> str:
    """Return the name of a table's workload, and so of its study: of a file's name and content, if it does not ship."""
    if path.resolve().parent == SHIPPED.resolve():
        return f"replay-{path.stem}"
    stem = re.sub(r"[^\w.-]+", "-", path.stem)[:40]
    return f"replay-{stem}-{_content(path)[:6]}"


def _content(path: Path) -> str:
    """Return what tells a table's content from another's, wherever it lies."""
    return hashlib.sha256(read_bytes(path.absolute(), "the table")).hexdigest()[:16]


def complete(workload: Mapping[str, object]) -> dict[str, object]:
    """Return what a replayed workload leaves open (``???``), from its table, by dotted key of the config.

    These are its name, so that two tables are two studies; the range of batch sizes; the reference, the geometric
    middle of batch sizes and of learning rates; a budget that no recorded run exceeds, so that it is the records that
    end trials; and a shipped table's metric and target. A file's metric is taken for an error.

    Args:
        workload: the values that it has; those that are missing are not among them.
    """
    if "table" not in workload:
        raise ConfigError(
            "workload.table is missing: name a file of recorded runs, workload.table=FILE"
        )
    path = find_table(str(workload["table"]))
    table = read_table(path)
    low, high = table.batch_sizes[0], table.batch_sizes[-1]
    # The least budget that no run exceeds: the longest run's steps at the largest batch size, or the most examples of a
    # run that took more steps.
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
    sources = read_index().values()
    targets = [source.target for source in sources if source.path.resolve() == path.resolve()]
    defaults["target.metric"] = METRIC
    if targets:
        defaults["target.metric"] = targets[0].metric
        defaults["target.value"] = targets[0].value
    stated = flatten(workload)
    if "target.value" not in stated and not targets:
        seen = [value for run in table.runs for value in run.metric]
        raise ConfigError(
            "workload.target.value is missing: give the value to reach, such as workload.target.value=0.1 "
            f"(this table's values lie between {min(seen):g} and {max(seen):g})"
        )
    filled = {f"workload.{key}": value for key, value in defaults.items() if key not in stated}
    return {"device": DEVICE, **filled}


def _searched_note(table: Table) -> list[str]:
    """Say that recorded runs differ in more than batch size and learning rate, where they do."""
    names = sorted({name for run in table.runs for name in run.hyperparameters})
    if not names:
        return []
    return [f"each recorded run has its own {', '.join(names)}, which are not searched here"]


class ReplayBackend(TrialBackend):
    """Answers each trial from a table of recorded runs, by options that :func:`complete` has filled."""

    def __init__(self, options: StudyOptions, protocol: TrialProtocol) -> None:
        if options.compile is not None:
            raise ConfigError(
                f"compile={options.compile} does not apply to recorded runs: leave it out"
            )
        assert isinstance(options.workload, ReplayedWorkload)  # noqa: S101 (others are trained)
        path = find_table(options.workload.table)
        self.table = read_table(path)
        self._protocol = protocol
        sizes, lrs = self.table.batch_sizes, self.table.lrs
        # The median at each recorded batch size, linear in the logarithms between them.
        taus = [
            median(run.seconds_per_step for run in self.table.runs if run.batch_size == size)
            for size in sizes
        ]
        log_sizes, log_taus = np.log(sizes), np.log(taus)
        self.step_time = lambda batch_size: float(
            np.exp(np.interp(math.log(batch_size), log_sizes, log_taus))
        )
        self.device = DEVICE
        self.description = f"recorded runs ({path.stem})"
        self.versions = {"bstune": bstune.__version__}
        self.lr_range = lrs[0], lrs[-1]
        self.frozen_settings = {"workload.table": f"sha256 {_content(path)}", "device": DEVICE}
        self.notes = (
            f"answered from {len(self.table.runs)} recorded runs at {len(sizes)} batch sizes and {len(lrs)} learning "
            "rates: seconds are simulated, and a trial also ends where its record does",
            *_searched_note(self.table),
        )

    def run(
        self, spec: TrialSpec, folder: Output | None, resumed_from: TrialResult | None
    ) -> TrialResult:
        """Answer one trial from the table."""
        last_step = (
            self._protocol.budget.last_step(spec.batch_size)
            if spec.max_steps is None
            else spec.max_steps
        )
        return replay(self.table, spec, self._protocol.target, last_step, resumed_from)

    def longest(self, batch_size: int, protocol: TrialProtocol) -> int:
        """Return the steps of the longest record at the nearest batch size, within the budget."""
        nearest = min(self.table.batch_sizes, key=lambda size: abs(math.log(size / batch_size)))
        longest = max(run.end for run in self.table.runs if run.batch_size == nearest)
        return min(longest, protocol.budget.last_step(batch_size))

    def check(self, space: Space, trial: TrialSpec | None) -> None:
        """Refuse a target that no recorded run reaches, or all do at once, and points outside of the table."""
        reason = unusable_target(self.table, self._protocol.target)
        if reason is not None:
            raise TableError(reason)
        sizes, lrs = ("batch sizes", self.table.batch_sizes), ("learning rates", self.table.lrs)
        asked: list[tuple[str, float, tuple[str, Sequence[float]]]]
        if trial is None:
            asked = [
                ("search.batch_size.low", space.low, sizes),
                ("search.batch_size.high", space.high, sizes),
            ]
        else:
            asked = [("trial.batch_size", trial.batch_size, sizes), ("trial.lr", trial.lr, lrs)]
        for option, value, (what, values) in asked:
            if not values[0] <= value <= values[-1]:
                raise ConfigError(
                    f"{option}={value:g} lies outside of the table's {what}, {values[0]:g} to {values[-1]:g}"
                )
