"""Recorded runs, which answer trials in place of training: a tabular benchmark.

A table is a file of JSON lines, one a run: ``batch_size``, ``lr``, ``seed``, ``steps`` (of the
evaluations), ``metric`` (a value at each of them), ``seconds_per_step`` and, for a run that
diverged after them, ``"status": "diverged"``. Other fields, such as further hyper-parameters of a
run, are passed over. Runs of one batch size and rate are a cell; cells need not fill a rectangle.
"""

import math
import statistics
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    FiniteFloat,
    ValidationError,
    model_validator,
)

from bstune.core.errors import InputError
from bstune.core.records import Budget, Target
from bstune.system.files import read_text, read_yaml
from bstune.trial.trial import Trial

SHIPPED = Path(__file__).parent / "tables"

Cell = tuple[float, float]
"""Batch size and learning rate of recorded runs."""


def _rising(steps: tuple[int, ...]) -> tuple[int, ...]:
    if list(steps) != sorted(set(steps)):
        raise ValueError("must rise")
    return steps


Positive = Annotated[FiniteFloat, Field(gt=0)]


class Run(BaseModel):
    """One recorded run: ``metric[i]`` was seen after ``steps[i]`` steps."""

    model_config = ConfigDict(frozen=True)

    batch_size: Positive
    lr: Positive
    seed: int
    steps: Annotated[tuple[Annotated[int, Field(ge=1)], ...], AfterValidator(_rising)]
    metric: tuple[FiniteFloat, ...]
    seconds_per_step: Positive
    status: str | None = None
    horizon: Annotated[int, Field(ge=1)] | None = None
    """The step at which its schedule ended; None: its schedule has no end."""

    @model_validator(mode="after")
    def _fits(self) -> "Run":
        if len(self.steps) != len(self.metric):
            raise ValueError(
                f"steps and metric must be equally long, but got {len(self.steps)} and "
                f"{len(self.metric)}"
            )
        if not self.steps and not self.diverged:
            raise ValueError("steps must not be empty, but for a run whose status is 'diverged'")
        return self

    @property
    def diverged(self) -> bool:
        """Whether it diverged after its last evaluation."""
        return self.status == "diverged"

    @property
    def end(self) -> int:
        """The last evaluated step; 1 for a run that diverged before any evaluation."""
        return self.steps[-1] if self.steps else 1

    def steps_to(self, target: Target) -> int | None:
        """The first evaluated step that met the target; None if none did."""
        for step, value in zip(self.steps, self.metric, strict=True):
            if target.reached(value):
                return step
        return None

    def history(self, end: float = math.inf, scale: float = 1.0) -> tuple[tuple[int, float], ...]:
        """(step, metric) up to the recorded step ``end``, with the steps times ``scale``.

        Where two evaluations fall on one step, the later one stays.
        """
        scaled = {}
        for step, value in zip(self.steps, self.metric, strict=True):
            if step <= end:
                scaled[max(1, round(step * scale))] = value
        return tuple(scaled.items())


@dataclass(frozen=True)
class Outcome:
    """What training would have come to at one batch size, rate and seed."""

    steps: int | None
    """To the target; None if it was not reached."""
    end: int
    """The last step of the history."""
    seconds_per_step: float
    history: tuple[tuple[int, float], ...]
    diverged: bool


@dataclass(frozen=True)
class Table:
    """Recorded runs, between which trials are interpolated.

    Args:
        runs: at least one with an evaluation.
        target: that the runs were recorded for; None where it is not known.
    """

    runs: tuple[Run, ...]
    target: Target | None = None

    @classmethod
    def read(cls, path: Path, target: Target | None = None) -> "Table":
        """Read a file of JSON lines.

        Raises:
            InputError: with file and line, for a line that is no run, a run that is there twice,
                and runs whose schedules ended with them (``horizon``).
        """
        runs: dict[tuple[float, float, int, int | None], Run] = {}
        for number, line in enumerate(read_text(path).splitlines(), start=1):
            if not line.strip():
                continue
            place = f"{path}, line {number}"
            run = _read_run(line, place)
            if run.horizon is not None:
                raise InputError(
                    f"{place}: the run's schedule ended with it (horizon {run.horizon}): give "
                    f"runs whose schedules have no end"
                )
            key = run.batch_size, run.lr, run.seed, run.horizon
            if key in runs:
                raise InputError(
                    f"{place}: batch size {run.batch_size:g}, lr {run.lr:g}, seed {run.seed} is "
                    f"there twice: drop one, or give them different seeds"
                )
            runs[key] = run
        if not any(run.steps for run in runs.values()):
            raise InputError(f"{path} must have a run with an evaluation, but has none")
        return cls(tuple(runs.values()), target)

    @cached_property
    def cells(self) -> Mapping[Cell, tuple[Run, ...]]:
        """The runs of each batch size and learning rate, in order of their seeds."""
        cells: dict[Cell, tuple[Run, ...]] = {}
        for run in sorted(self.runs, key=lambda run: (run.batch_size, run.lr, run.seed)):
            cell = run.batch_size, run.lr
            cells[cell] = (*cells.get(cell, ()), run)
        return cells

    @cached_property
    def batch_sizes(self) -> tuple[float, ...]:
        """All batch sizes, ascending."""
        return tuple(sorted({run.batch_size for run in self.runs}))

    @cached_property
    def lrs(self) -> tuple[float, ...]:
        """All learning rates, ascending."""
        return tuple(sorted({run.lr for run in self.runs}))

    @property
    def range(self) -> tuple[int, int]:
        """The smallest and the largest whole batch size within the recorded ones."""
        return math.ceil(self.batch_sizes[0]), math.floor(self.batch_sizes[-1])

    @property
    def budget(self) -> Budget:
        """A budget that no recorded run exceeds."""
        steps = max(run.end for run in self.runs if run.batch_size == self.batch_sizes[-1])
        examples = [run.end * run.batch_size for run in self.runs if run.end > steps]
        return Budget(steps=steps, examples=math.ceil(max(examples, default=1)))

    @cached_property
    def step_seconds(self) -> tuple[float, ...]:
        """Median seconds of a step at each of the batch sizes."""
        medians = []
        for size in self.batch_sizes:
            of_size = [run.seconds_per_step for run in self.runs if run.batch_size == size]
            medians.append(statistics.median(of_size))
        return tuple(medians)

    def step_time(self, batch_size: float) -> float:
        """tau(B) in seconds: log tau is linear in log B between the batch sizes, flat beyond."""
        log_sizes = np.log(self.batch_sizes)
        log_seconds = np.log(self.step_seconds)
        return float(np.exp(np.interp(math.log(batch_size), log_sizes, log_seconds)))

    def outcome(self, batch_size: float, lr: float, seed: int, target: Target) -> Outcome:
        """How a trial ends; its seed draws one of several runs in a cell."""
        quantile = float(np.random.default_rng(seed).random())
        return self.outcome_at(batch_size, lr, quantile, target)

    def outcome_at(self, batch_size: float, lr: float, quantile: float, target: Target) -> Outcome:
        """How a trial ends, by the run at ``quantile`` of each cell's list.

        Between cells that all reached the target, log steps and log seconds are bilinear in (log B,
        log lr), and the history is the nearest cell's with its steps rescaled; else the nearest
        cell's run alone counts. A cell that was not recorded is stood in for by the nearest one
        that was, and beyond the table's range the value at its edge counts.
        """
        runs = []
        weights = []
        for size, size_weight in _around(self.batch_sizes, batch_size):
            for rate, rate_weight in _around(self.lrs, lr):
                runs.append(self._run_of_cell(size, rate, quantile))
                weights.append(size_weight * rate_weight)
        nearest = runs[weights.index(max(weights))]
        nearest_steps = nearest.steps_to(target)
        all_steps = [run.steps_to(target) for run in runs]
        known_steps = [steps for steps in all_steps if steps is not None]
        if nearest_steps is None or len(known_steps) < len(runs):
            return Outcome(
                steps=nearest_steps,
                end=nearest_steps or nearest.end,
                seconds_per_step=nearest.seconds_per_step,
                history=nearest.history(nearest_steps or math.inf),
                diverged=nearest.diverged and nearest_steps is None,
            )
        steps = round(_geometric_mean(known_steps, weights))
        return Outcome(
            steps=steps,
            end=steps,
            seconds_per_step=_geometric_mean([run.seconds_per_step for run in runs], weights),
            history=nearest.history(nearest_steps, scale=steps / nearest_steps),
            diverged=False,
        )

    def _run_of_cell(self, batch_size: float, lr: float, quantile: float) -> Run:
        """The run at ``quantile``, from 0 to 1, of a cell's runs in the order of their seeds.

        For a cell that was not recorded it is the nearest one in (log B, log lr).
        """
        runs = self.cells.get((batch_size, lr))
        if runs is None:
            distances = np.log(list(self.cells)) - np.log([batch_size, lr])
            nearest = int((distances**2).sum(axis=1).argmin())
            runs = list(self.cells.values())[nearest]
        return runs[min(int(quantile * len(runs)), len(runs) - 1)]


def _read_run(line: str, place: str) -> Run:
    try:
        return Run.model_validate_json(line)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        field = ".".join(str(part) for part in first["loc"])
        got = repr(first["input"])[:60]
        raise InputError(f"{place}: {field or 'run'}: {first['msg']}, but got {got}") from error


def _around(values: Sequence[float], value: float) -> list[tuple[float, float]]:
    """The recorded values around a value, with weights linear in the logarithm.

    There is one where ``value`` itself was recorded, or lies beyond all.
    """
    inside = min(max(value, values[0]), values[-1])
    place = bisect_left(values, inside)
    high = values[place]
    if high == inside:
        return [(high, 1.0)]
    low = values[place - 1]
    weight = math.log(inside / low) / math.log(high / low)
    return [(low, 1.0 - weight), (high, weight)]


def _geometric_mean(values: Sequence[float], weights: Sequence[float]) -> float:
    # What was recorded is answered to the bit.
    if len(values) == 1:
        return values[0]
    logs = [weight * math.log(value) for value, weight in zip(values, weights, strict=True)]
    return math.exp(sum(logs))


def find_table(name: str) -> Table:
    """Read a shipped table by its name, with its target, or a file of one's own.

    Raises:
        InputError: for a name that is neither, and as :meth:`Table.read`.
    """
    index = read_yaml(SHIPPED / "tables.yaml")
    if name in index:
        return Table.read(SHIPPED / f"{name}.jsonl", Target.parse(index[name]))
    path = Path(name).expanduser()
    if not path.is_file():
        raise InputError(
            f"table must be a file of recorded runs, or one of {', '.join(index)}, but got {name!r}"
        )
    return Table.read(path)


def train(table: Table, trial: Trial) -> None:
    """Answer a trial: report the recorded evaluations until it stops.

    A recorded run that ends before the trial does is taken to go on with its last value. The
    seconds are the steps of this trial times the recorded seconds of a step.
    """
    outcome = table.outcome(trial.batch_size, trial.lr, trial.seed, trial.target)
    evaluations = list(outcome.history)
    if outcome.diverged:
        evaluations.append((outcome.end + 1, math.nan))
    else:
        evaluations.append((max(trial.max_steps, outcome.end + 1), outcome.history[-1][1]))
    for step, value in evaluations:
        seconds = (step - trial.first_step) * outcome.seconds_per_step
        if step > trial.first_step and not trial.report(step, value, seconds=seconds):
            return
