"""Recorded trials in place of training: the same records, milliseconds each.

A table is a file of JSON lines, one a recorded run: ``batch_size``, ``lr``, ``seed``, ``steps`` (the evaluated steps),
``metric`` (one value a step: an error, or another metric that the target names) and ``seconds_per_step``;
``status`` may be ``diverged``, and ``hyperparameters`` has what was searched besides, by name. Runs
of the same batch size and learning rate are a cell; cells need not fill a rectangle.

A run may have ``horizon``, the steps after which its schedule ended, and has then been recorded to its end. In a table
all runs have one or none has: with them it is replayed as a workload whose schedule ends with the trial.

``bstune record FILE ...`` writes a table; see :mod:`bstune.study.record`.
"""

import hashlib
import math
import re
import sys
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby, pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray

import bstune
from bstune.core.errors import ConfigError, TableError
from bstune.core.records import Target, TrialProtocol, TrialResult, TrialSpec
from bstune.core.search_space import Space
from bstune.core.trial_end import status_at, steps_low_of
from bstune.options import ReplayedWorkload, StudyOptions, flatten
from bstune.system.files import Output
from bstune.system.inputs import STANDARD_INPUT, parse_json, read_bytes, read_text
from bstune.trial.backend import TrialBackend, chooses_horizons

Array = NDArray[np.float64]
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
    horizon: int | None = None  # steps after which its schedule ended; None: it has no horizon

    @property
    def end(self) -> int:
        """The last evaluated step, which ends the record; 1 for a run that diverged before its first evaluation."""
        return self.steps[-1] if self.steps else 1

    def log_best(self, worse: float) -> tuple[Array, Array]:
        """Return the logs of each evaluated step over the horizon, and of the best value of the metric so far.

        ``worse`` is 1 for a metric that is to fall, -1 for one that is to rise.
        """
        log_shares = [math.log(step / _horizon(self)) for step in self.steps]
        log_metric = [math.log(value) for value in self.metric]
        best = worse * np.minimum.accumulate(worse * np.array(log_metric))
        return np.array(log_shares), best

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

    @cached_property
    def has_horizons(self) -> bool:
        """Whether the schedules of its runs ended with them."""
        return any(run.horizon is not None for run in self.runs)

    def outcome_of_horizon(
        self, batch_size: float, lr: float, horizon: int, seed: int, target: Target
    ) -> Outcome:
        """Return what a trial comes to whose schedule ends after ``horizon`` steps; the target's value is above 0.

        What is interpolated is the log of the metric's best value so far at each share of the horizon, a share being a
        step over the horizon's steps: linearly in log h between the two horizons of a cell that are around, then
        bilinearly in (log B, log lr) between the cells around. The target is met where the line between two of these
        evaluations crosses it, in log steps, and missed if all of them miss it. Not the values themselves are
        interpolated, as runs dip below a target at steps of their own: between two that met it, it would be missed.

        A horizon longer than all of a cell has the course of the longest, step by step, and its last value from there
        on. One shorter than all has the course of the shortest, share by share, with a metric as many times worse as
        the horizon is shorter, but no worse than any of the table. Beyond a batch size's learning rates, and the
        table's batch sizes, it is as at their edge. Where the nearest run diverged, so does the trial, at the same
        step; other runs that diverged do not count. Of a cell's seeds one is drawn by ``seed``, the same place in every
        cell.
        """
        share = float(np.random.default_rng(seed).random())
        return self.read_horizon(batch_size, lr, horizon, target, share)

    def read_horizon(
        self, batch_size: float, lr: float, horizon: int, target: Target, share: float
    ) -> Outcome:
        """Return :meth:`outcome_of_horizon` with, of a cell's seeds in their order, the one at ``share`` of them."""
        corners = [
            (self._ladder(size, rate, share), size_weight * rate_weight)
            for size, size_weight in _bracket(self.batch_sizes, batch_size)
            for rate, rate_weight in _bracket(self._lrs_of[size], lr)
        ]
        nearest_ladder, _ = max(corners, key=lambda corner: corner[1])
        nearest = _nearest(nearest_ladder, horizon)
        if nearest.diverged:
            return _diverged(nearest, horizon, target)
        usable = [corner for corner in corners if not _nearest(corner[0], horizon).diverged]
        whole = sum(weight for _, weight in usable)
        log_shares = _evaluated(nearest, horizon)
        log_best = np.zeros(len(log_shares))
        log_tau = 0.0
        for ladder, weight in usable:
            log_best += weight / whole * _log_best(ladder, horizon, log_shares, target.sign)
            log_tau += weight / whole * math.log(ladder[0].seconds_per_step)
        log_best = np.clip(log_best, *self._log_metric_range)
        return _outcome(target, horizon, log_shares, log_best, math.exp(log_tau))

    def _ladder(self, batch_size: int, lr: float, share: float) -> tuple[Run, ...]:
        """Return a cell's runs of the seed at ``share`` of its seeds, from the shortest horizon to the longest."""
        of_seeds = self._ladders[batch_size, lr]
        return of_seeds[min(int(share * len(of_seeds)), len(of_seeds) - 1)]

    @cached_property
    def _ladders(self) -> Mapping[tuple[int, float], tuple[tuple[Run, ...], ...]]:
        """The runs of each cell: for each of its seeds, in their order, from the shortest horizon to the longest."""
        ladders = {}
        for cell, runs in self.cells.items():
            of_seeds = [tuple(some) for _, some in groupby(runs, key=lambda run: run.seed)]
            ladders[cell] = tuple(tuple(sorted(some, key=_horizon)) for some in of_seeds)
        return ladders

    @cached_property
    def _lrs_of(self) -> Mapping[int, tuple[float, ...]]:
        """The learning rates of each batch size, ascending."""
        rates: dict[int, list[float]] = {}
        for size, rate in self.cells:
            rates.setdefault(size, []).append(rate)
        return {size: tuple(sorted(some)) for size, some in rates.items()}

    @cached_property
    def _log_metric_range(self) -> tuple[float, float]:
        """The log of the lowest and of the highest value of runs that did not diverge."""
        values = [value for run in self.runs if not run.diverged for value in run.metric]
        return math.log(min(values)), math.log(max(values))

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


def _horizon(run: Run) -> int:
    """Return the horizon of a run that has one."""
    if run.horizon is None:
        raise ValueError("trials with horizons are read from runs with horizons, and this has none")
    return run.horizon


def _nearest(ladder: Sequence[Run], horizon: int) -> Run:
    """Return the run whose horizon is nearest in the logarithm; of two, the shorter one."""
    return min(ladder, key=lambda run: abs(math.log(_horizon(run) / horizon)))


def _evaluated(run: Run, horizon: int) -> Array:
    """Return the log of the shares of a horizon at which a trial is evaluated as a run was."""
    log_shares, _ = run.log_best(1.0)
    longer = math.log(horizon / _horizon(run))
    # At the same steps where the horizon is longer, and at its end.
    return np.append(log_shares - longer, 0.0) if longer > 0.0 else log_shares


def _log_best(ladder: Sequence[Run], horizon: int, log_shares: Array, worse: float) -> Array:
    """Return the log of the best value so far at these shares of a horizon, between a cell's runs of one seed.

    ``worse`` is 1 for a metric that is to fall, -1 for one that is to rise.
    """
    horizons = [_horizon(run) for run in ladder]
    if horizon <= horizons[0]:
        shorter = math.log(horizons[0] / horizon)
        return np.interp(log_shares, *ladder[0].log_best(worse)) + worse * shorter
    if horizon >= horizons[-1]:
        longer = math.log(horizon / horizons[-1])
        return np.interp(log_shares + longer, *ladder[-1].log_best(worse))
    above = bisect_left(horizons, horizon)
    low, high = ladder[above - 1], ladder[above]
    if low.diverged or high.diverged:
        return np.interp(log_shares, *_nearest((low, high), horizon).log_best(worse))
    weight = math.log(horizon / _horizon(low)) / math.log(_horizon(high) / _horizon(low))
    at_low = np.interp(log_shares, *low.log_best(worse))
    at_high = np.interp(log_shares, *high.log_best(worse))
    return (1.0 - weight) * at_low + weight * at_high


def _diverged(run: Run, horizon: int, target: Target) -> Outcome:
    """Return what a trial comes to as a run that diverged, at the same steps; it may have met the target before."""
    end = min(run.end, horizon)
    met = run.steps_to(target)
    if met is not None and met <= end:
        return Outcome(met, met, run.seconds_per_step, _rescaled(run, met), False)
    return Outcome(None, end, run.seconds_per_step, _rescaled(run, end), True)


def _outcome(
    target: Target, horizon: int, log_shares: Array, log_best: Array, seconds_per_step: float
) -> Outcome:
    """Return the outcome of a course over a horizon: its history ends where the target is met."""
    sign = target.sign
    # A goal that is not known yet is met by nothing.
    goal = -sign * math.inf if target.is_open else math.log(target.value)
    course: dict[int, float] = {}
    for log_share, value in zip(log_shares, log_best, strict=True):
        # Of evaluations that fall together the last stays.
        course[max(1, round(horizon * math.exp(log_share)))] = float(value)
    missed: dict[int, float] = {}
    met = None
    for step, value in course.items():
        if sign * (value - goal) <= 0.0:
            met = step if not missed else _crossing(*max(missed.items()), step, value, goal)
            break
        missed[step] = value
    history = [(step, math.exp(value)) for step, value in missed.items()]
    if met is None:
        return Outcome(None, horizon, seconds_per_step, tuple(history), False)
    history.append((met, target.value))
    return Outcome(met, met, seconds_per_step, tuple(history), False)


def _crossing(before: int, value_before: float, step: int, value: float, goal: float) -> int:
    """Return the step, after ``before``, at which a line in log steps crosses the goal."""
    share = (value_before - goal) / (value_before - value)
    log_step = math.log(before) + share * math.log(step / before)
    crossing = round(math.exp(log_step))
    return min(max(crossing, before + 1), step)


def replay(
    table: Table,
    spec: TrialSpec,
    target: Target,
    last_step: int,
    resumed_from: TrialResult | None = None,
) -> TrialResult:
    """Return the record of a trial that is answered from the table.

    ``last_step`` counts from the first step of the trial that it continues, if any; only what is added costs seconds.
    Where the table has horizons it is the trial's own.
    """
    done = 0 if resumed_from is None else resumed_from.steps
    horizon = last_step if table.has_horizons else None
    if horizon is None:
        outcome = table.outcome(spec.batch_size, spec.lr, spec.seed, target)
    else:
        outcome = table.outcome_of_horizon(spec.batch_size, spec.lr, horizon, spec.seed, target)
    steps = min(outcome.end, max(last_step, done))
    reached = outcome.steps is not None and outcome.steps <= steps
    # An outcome that diverges reaches nothing, and one that ends otherwise has no step left.
    status = status_at(steps, steps, reached, outcome.diverged and steps == outcome.end)
    assert status is not None  # noqa: S101 (the last step is this one)
    history = tuple((step, value) for step, value in outcome.history if step <= steps)
    missed = [step for step, value in history if not target.reached(value)]
    seconds = (steps - done) * outcome.seconds_per_step
    return TrialResult(
        **spec.trial_fields(),
        status=status,
        steps=steps,
        steps_low=steps_low_of(status, steps, missed[-1] if missed else 0),
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
        horizon=horizon,
    )


def held_to(record: TrialResult, last_step: int) -> TrialResult:
    """Let a record that ended before ``last_step``, as where it met a target, stay at its last value until then.

    That is the least that a longer run would have come to, as the best value so far counts.
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
    runs: dict[tuple[int, float, int, int | None], Run] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        run = _run(line, f"{path}, line {number}")
        key = run.batch_size, run.lr, run.seed, run.horizon
        if key in runs:
            horizon = "" if run.horizon is None else f", horizon={run.horizon}"
            raise TableError(
                f"{path}, line {number}: batch_size={run.batch_size}, lr={run.lr:g}, seed={run.seed}{horizon} is there "
                "twice: drop one of the two, or give them different seeds"
            )
        runs[key] = run
    if not any(run.steps for run in runs.values()):
        raise TableError(
            f"the table {path} holds no evaluated run: it needs one a line, with {', '.join(COLUMNS)}"
        )
    table = Table(tuple(runs.values()))
    without = sum(run.horizon is None for run in table.runs)
    if table.has_horizons and without > 0:
        raise TableError(
            f"of the {len(table.runs)} runs in the table {path} {without} lack horizon, and the others have one: the "
            "schedules of a workload end with the trial or do not, so make two tables of them"
        )
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
    horizon = values.get("horizon")
    if horizon is not None:
        _check_horizon(horizon, values, diverged, place)
        horizon = int(horizon)
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


def _check_horizon(horizon: Any, values: Mapping[str, Any], diverged: bool, place: str) -> None:
    """Refuse a horizon that is none, or whose run does not say how the metric came to its end."""
    if not _is_integer(horizon) or horizon < 1:
        raise TableError(f"{place}: horizon must be a positive integer, but got {horizon!r:.60}")
    last = values["steps"][-1] if values["steps"] else 0
    if last > horizon or (last < horizon and not diverged):
        raise TableError(
            f"{place}: the last evaluation must be at the horizon's end, step {horizon}, but got {last}: go on "
            "recording a run that has met the target"
        )
    lowest = min(values["metric"], default=1.0)
    if lowest <= 0.0:
        raise TableError(
            f"{place}: between horizons the log of the metric is read, which must be above 0, but got {lowest}"
        )


def unusable_target(table: Table, target: Target) -> str | None:
    """Return why a search for the target is no use: no run reaches it, or all do at once; None if it is of use.

    One that a first trial sets is not known yet.
    """
    if target.is_open:
        return None
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


def read_index(horizon: bool = False) -> dict[str, Source]:
    """Return the tables that ship, by name, as ``tables.yaml`` beside them lists them; all metrics are errors.

    Args:
        horizon: of runs whose schedule ended with them; else of the others, which can be stopped anywhere.
    """
    listed = yaml.safe_load((SHIPPED / "tables.yaml").read_text(encoding="utf-8"))
    return {
        name: Source(
            SHIPPED / f"{name}.jsonl", Target(one["metric"], one["target"], "min"), one["command"]
        )
        for name, one in listed.items()
        if one.get("horizon", False) == horizon
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
    sources = (read_index() | read_index(horizon=True)).values()
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
        self.horizon = self.table.has_horizons
        self.stops = not self.horizon
        self.device = DEVICE
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
        self.frozen_settings = {**table, **budget, "device": DEVICE}
        ends = "a trial also ends where its record does"
        if self.horizon:
            ends = "a trial's schedule ends with it"
        self.notes = (
            f"answered from {len(self.table.runs)} recorded runs at {len(sizes)} batch sizes and {len(lrs)} learning "
            f"rates: seconds are simulated, and {ends}",
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
        target = self._protocol.of(spec).target
        record = replay(self.table, spec, target, last_step, resumed_from)
        if not self._holds:
            return record
        # By the same seconds as the budget's, not those of the nearest recorded run.
        held = held_to(record, last_step)
        seconds_per_step = self.step_time(spec.batch_size)
        before = 0 if resumed_from is None else resumed_from.steps
        seconds = max(held.steps - before, 0) * seconds_per_step
        return replace(
            held,
            seconds_per_step=seconds_per_step,
            train_seconds=seconds,
            wall_seconds=seconds,
        )

    def longest(self, batch_size: int, protocol: TrialProtocol) -> int:
        """Return the steps of the longest record at the nearest batch size, within the budget.

        Where the table has horizons a trial that never reaches the target takes all of its own.
        """
        if self.horizon:
            return protocol.budget.last_step(batch_size)
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
