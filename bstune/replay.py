"""Recorded trials in place of training: the same records, milliseconds each.

A table is a file of JSON lines, one a recorded run: ``batch_size``, ``lr``, ``seed``, ``steps`` (the evaluated steps),
``metric`` (an error, one value a step) and ``seconds_per_step``; ``status`` may say that the run ``diverged``. Runs of
the same batch size and learning rate are a cell; cells need not fill a rectangle.

``python -m bstune.replay record FILE ...`` writes a table; see :mod:`bstune.record`.
"""

import json
import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from bstune.errors import TableError
from bstune.records import Status, Target, TrialResult, TrialSpec

COLUMNS = ("batch_size", "lr", "seed", "steps", "metric", "seconds_per_step")
DEVICE = "replay"


@dataclass(frozen=True)
class Run:
    """One recorded run: ``metric[i]`` was seen after ``steps[i]`` steps."""

    batch_size: int
    lr: float
    seed: int
    steps: tuple[int, ...]
    metric: tuple[float, ...]
    seconds_per_step: float
    diverged: bool

    def steps_to(self, target: Target) -> int | None:
        """Return the first evaluated step that met the target, None if none did."""
        return next((step for step, value in zip(self.steps, self.metric, strict=True) if target.reached(value)), None)


@dataclass(frozen=True)
class Outcome:
    """What the table says of one (batch size, learning rate, seed).

    ``steps`` are steps to target, None if it was not reached within ``end`` steps; ``history`` is (step, metric).
    """

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
        found: dict[tuple[int, float], list[Run]] = {}
        for run in sorted(self.runs, key=lambda run: (run.batch_size, run.lr, run.seed)):
            found.setdefault((run.batch_size, run.lr), []).append(run)
        return {cell: tuple(runs) for cell, runs in found.items()}

    @cached_property
    def batch_sizes(self) -> tuple[int, ...]:
        """All batch sizes, ascending."""
        return tuple(sorted({run.batch_size for run in self.runs}))

    @cached_property
    def lrs(self) -> tuple[float, ...]:
        """All learning rates, ascending."""
        return tuple(sorted({run.lr for run in self.runs}))

    @cached_property
    def _log_cells(self) -> tuple[list[tuple[int, float]], Any]:
        cells = list(self.cells)
        return cells, np.log(np.array(cells, dtype=np.float64))

    def nearest_cell(self, batch_size: float, lr: float) -> tuple[int, float]:
        """Return the recorded cell nearest in (log B, log lr); of equals the first in order."""
        if (batch_size, lr) in self.cells:
            return int(batch_size), lr
        cells, logs = self._log_cells
        distance = ((logs - np.log([batch_size, lr])) ** 2).sum(axis=1)
        return cells[int(distance.argmin())]

    def outcome(self, batch_size: float, lr: float, seed: int, target: Target) -> Outcome:
        """Return what a trial comes to; outside of the table's range its edge speaks.

        Where all corners of the grid around the point reached the target, log S and log tau are bilinear in
        (log B, log lr), and the history is the nearest corner's with its steps rescaled; elsewhere the outcome is the
        nearest corner's. A corner that was not recorded is its nearest recorded cell. Of several runs in a cell, one
        is drawn by ``seed``, the same place in every cell.
        """
        share = float(np.random.default_rng(seed).random())
        return self._read(batch_size, lr, target, share)

    def median_time(self, batch_size: float, lr: float, target: Target) -> float | None:
        """Return the median time to target in seconds over the seeds; None if half of them did not reach it."""
        draws = math.lcm(*{len(runs) for runs in self.cells.values()})
        outcomes = [self._read(batch_size, lr, target, (i + 0.5) / draws) for i in range(draws)]
        times = [o.steps * o.seconds_per_step if o.steps is not None else math.inf for o in outcomes]
        middle = median(times)
        return middle if math.isfinite(middle) else None

    def _read(self, batch_size: float, lr: float, target: Target, share: float) -> Outcome:
        sizes, wb = _bracket(self.batch_sizes, batch_size)
        rates, wl = _bracket(self.lrs, lr)
        corners = [
            (self._draw(size, rate, share), ws * wr)
            for size, ws in zip(sizes, wb, strict=True)
            for rate, wr in zip(rates, wl, strict=True)
            if ws * wr > 0
        ]
        nearest = max(corners, key=lambda corner: corner[1])[0]
        reached = [run.steps_to(target) for run, _ in corners]
        own = nearest.steps_to(target)
        if own is None or any(steps is None for steps in reached):
            history = tuple(zip(nearest.steps, nearest.metric, strict=True))
            return Outcome(own, own or nearest.steps[-1], nearest.seconds_per_step, history, nearest.diverged)
        log_steps = sum(w * math.log(steps or 1) for steps, (_, w) in zip(reached, corners, strict=True))
        log_tau = sum(w * math.log(run.seconds_per_step) for run, w in corners)
        steps = max(1, round(math.exp(log_steps)))
        history = _rescaled(nearest, steps / own)
        return Outcome(steps, steps, math.exp(log_tau), history, False)

    def _draw(self, batch_size: int, lr: float, share: float) -> Run:
        runs = self.cells[self.nearest_cell(batch_size, lr)]
        return runs[min(int(share * len(runs)), len(runs) - 1)]

    def best(self, target: Target) -> tuple[int, float, float] | None:
        """Return batch size, learning rate and median time of the fastest cell; None if none reached the target."""
        times = {cell: self.median_time(*cell, target) for cell in self.cells}
        found = [(time, cell) for cell, time in times.items() if time is not None]
        if not found:
            return None
        time, (batch_size, lr) = min(found)
        return batch_size, lr, time


def _bracket(values: Sequence[float], value: float) -> tuple[tuple[Any, ...], tuple[float, ...]]:
    """Return the recorded values around ``value`` and their weights, linear in the logarithm."""
    value = min(max(value, values[0]), values[-1])
    above = bisect_left(values, value)
    if values[above] == value:
        return (values[above],), (1.0,)
    low, high = values[above - 1], values[above]
    weight = math.log(value / low) / math.log(high / low)
    return (low, high), (1.0 - weight, weight)


def _rescaled(run: Run, scale: float) -> tuple[tuple[int, float], ...]:
    history: dict[int, float] = {}
    for step, value in zip(run.steps, run.metric, strict=True):
        history.setdefault(max(1, round(step * scale)), value)
    return tuple(history.items())


def replay(
    table: Table, spec: TrialSpec, target: Target, last_step: int, parent: TrialResult | None = None
) -> TrialResult:
    """Return the record of a trial that is answered from the table.

    Args:
        table: the recorded runs.
        spec: batch size, learning rate and seed.
        target: what to reach.
        last_step: the trial's budget in steps.
        parent: a trial at the same point that was stopped; steps go on from there, and only what is added costs.
    """
    outcome = table.outcome(spec.batch_size, spec.lr, spec.seed, target)
    steps = min(outcome.end, last_step)
    reached = outcome.steps is not None and outcome.steps <= steps
    status: Status = "reached" if reached else "diverged" if outcome.diverged and steps == outcome.end else "budget"
    history = tuple((step, value) for step, value in outcome.history if step <= steps)
    missed = [step for step, value in history if not target.reached(value)]
    done = 0 if parent is None else parent.steps
    seconds = (steps - done) * outcome.seconds_per_step
    return TrialResult(
        number=spec.number,
        slot=spec.slot,
        batch_size=spec.batch_size,
        lr=spec.lr,
        delta=spec.delta,
        seed=spec.seed,
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
        versions={},
        history=history,
        message="the recorded run diverged" if status == "diverged" else None,
        parent=spec.parent,
    )


def read_table(path: Path) -> Table:
    """Return the table in a file of JSON lines.

    Raises:
        TableError: if it cannot be read, a line is no such run, a run is there twice, or there is one batch size only.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise TableError(f"the table {path} cannot be read ({error}): give the path of a file of JSON lines") from error
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
    if len({size for size, _, _ in runs}) < 2:
        raise TableError(
            f"{path} has {len(runs)} runs at {len({size for size, _, _ in runs})} batch size(s): "
            "a search over batch sizes needs runs at two or more"
        )
    return Table(tuple(runs.values()))


def _run(line: str, place: str) -> Run:
    try:
        values = json.loads(line)
    except ValueError as error:
        raise TableError(f"{place} is not JSON ({error}): each line is one recorded run") from error
    missing = [name for name in COLUMNS if not isinstance(values, dict) or name not in values]
    if missing:
        raise TableError(f"{place} lacks {', '.join(missing)}: a run has {', '.join(COLUMNS)}")
    steps, metric = values["steps"], values["metric"]
    if not (isinstance(steps, list) and isinstance(metric, list) and len(steps) == len(metric) > 0):
        raise TableError(f"{place}: steps and metric must be lists of one length, at least 1")
    for name in ("batch_size", "lr", "seconds_per_step"):
        if not _is_number(values[name]) or values[name] <= 0:
            raise TableError(f"{place}: {name} must be a positive number, but got {values[name]!r}")
    for name in ("batch_size", "seed"):
        if not _is_number(values[name]) or values[name] != int(values[name]):
            raise TableError(f"{place}: {name} must be an integer, but got {values[name]!r}")
    if not all(_is_number(value) for value in metric):
        bad = next(value for value in metric if not _is_number(value))
        raise TableError(f"{place}: metric must hold finite numbers, but got {bad!r}: end the run before that step")
    if not all(_is_number(step) and step == int(step) and step > 0 for step in steps) or any(
        b <= a for a, b in zip(steps, steps[1:], strict=False)
    ):
        raise TableError(f"{place}: steps must be ascending positive integers, but got {str(steps)[:60]}")
    return Run(
        batch_size=int(values["batch_size"]),
        lr=float(values["lr"]),
        seed=int(values["seed"]),
        steps=tuple(int(step) for step in steps),
        metric=tuple(float(value) for value in metric),
        seconds_per_step=float(values["seconds_per_step"]),
        diverged=values.get("status") == "diverged",
    )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def never_reached(table: Table, target: Target) -> str | None:
    """Return why no trial can reach the target in this table, with the best value in it; None if some run did."""
    if any(run.steps_to(target) is not None for run in table.runs):
        return None
    value, run = min(((v, run) for run in table.runs for v in run.metric), key=lambda pair: target.gap(pair[0]))
    word = "lowest" if target.mode == "min" else "highest"
    return (
        f"{target} is never reached in this table; {word} {target.metric} {value:g}, at batch size {run.batch_size} "
        f"and learning rate {run.lr:g}: set workload.target.value to one that some run reached"
    )


def main(arguments: Iterable[str]) -> int:
    """Run ``record``; return the exit status."""
    import sys

    from bstune.record import main as record

    command, *rest = [*arguments, ""]
    if command != "record":
        print("usage: python -m bstune.replay record FILE ... (--help lists the options)", file=sys.stderr)
        return 2
    return record([argument for argument in rest if argument])


if __name__ == "__main__":
    import sys

    sys.exit(main(sys.argv[1:]))
