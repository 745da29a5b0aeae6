"""Recorded runs, which answer trials in place of training: a tabular benchmark.

A table is a file of JSON lines, one a run: ``batch_size``, ``lr``, ``seed``, ``steps`` (of the
evaluations), ``metric`` (a value at each of them), ``seconds_per_step`` and, for a run that
diverged after them, ``"status": "diverged"``. ``horizon`` is the step at which a run's schedule
ended with it. Other fields, such as further hyper-parameters of a run, are passed over. Runs of one
batch size and rate are a cell; cells need not fill a rectangle.
"""

import math
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from pydantic import ValidationError

from bstune.core.errors import InputError
from bstune.core.records import Budget, Target
from bstune.system.files import read_text, read_yaml
from bstune.trial.recorded_run import Outcome, Run, around
from bstune.trial.table_lengths import LengthTable
from bstune.trial.trial import Trial

SHIPPED = Path(__file__).parent / "tables"

Cell = tuple[float, float]
"""Batch size and learning rate of recorded runs."""


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
                and a run whose schedule ended with it (``horizon``) beside others.
        """
        runs: dict[tuple[float, float, int, int | None], Run] = {}
        for number, line in enumerate(read_text(path).splitlines(), start=1):
            if not line.strip():
                continue
            place = f"{path}, line {number}"
            run = _read_run(line, place)
            first = next(iter(runs.values()), run)
            if (first.horizon is None) != (run.horizon is None):
                raise InputError(
                    f"{place}: give a horizon for all runs or for none, but got {run.horizon}"
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

    @property
    def schedule_ends(self) -> bool:
        """Whether the schedules of the runs ended with them."""
        return self.runs[0].horizon is not None

    @cached_property
    def lengths(self) -> LengthTable:
        """The same runs over the lengths of their schedules, where these ended with them."""
        return LengthTable(self.runs)

    @cached_property
    def cells(self) -> Mapping[Cell, Sequence[Run]]:
        """The runs of each batch size and learning rate, in order of their seeds."""
        cells: dict[Cell, list[Run]] = {}
        for run in sorted(self.runs, key=lambda run: (run.batch_size, run.lr, run.seed)):
            cells.setdefault((run.batch_size, run.lr), []).append(run)
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
        seconds: dict[float, list[float]] = {size: [] for size in self.batch_sizes}
        for run in self.runs:
            seconds[run.batch_size].append(run.seconds_per_step)
        return tuple(map(statistics.median, seconds.values()))

    def step_time(self, batch_size: float) -> float:
        """tau(B) in seconds: log tau is linear in log B between the batch sizes, flat beyond."""
        log_sizes = np.log(self.batch_sizes)
        log_seconds = np.log(self.step_seconds)
        return float(np.exp(np.interp(math.log(batch_size), log_sizes, log_seconds)))

    def outcome(
        self, batch_size: float, lr: float, seed: int, target: Target, total_steps: int = 1
    ) -> Outcome:
        """How a trial ends; its seed draws one of several runs in a cell.

        Its schedule ends after ``total_steps``, where those of the runs ended with them.
        """
        quantile = float(np.random.default_rng(seed).random())
        if self.schedule_ends:
            return self.lengths.outcome_at(batch_size, lr, total_steps, quantile, target)
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
        for size, size_weight in around(self.batch_sizes, batch_size):
            for rate, rate_weight in around(self.lrs, lr):
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
    """Read a line; InputError says where it is wrong."""
    try:
        return Run.model_validate_json(line)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        field = ".".join(str(part) for part in first["loc"])
        got = repr(first["input"])[:60]
        raise InputError(f"{place}: {field or 'run'}: {first['msg']}, but got {got}") from error


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
    # os.path leaves a ~name that is no home as it is; then it is no file.
    path = Path(os.path.expanduser(name))
    if not os.path.isfile(path):
        raise InputError(
            f"table must be a file of recorded runs, or one of {', '.join(index)}, but got {name!r}"
        )
    return Table.read(path)


def train(table: Table, trial: Trial) -> None:
    """Answer a trial: report the recorded evaluations until it stops.

    A recorded run that ends before the trial does is taken to go on with its last value. The
    seconds are the steps of this trial times the recorded seconds of a step.
    """
    outcome = table.outcome(trial.batch_size, trial.lr, trial.seed, trial.target, trial.total_steps)
    evaluations = list(outcome.history)
    if outcome.diverged:
        evaluations.append((outcome.end + 1, math.nan))
    else:
        evaluations.append((max(trial.max_steps, outcome.end + 1), outcome.history[-1][1]))
    for step, value in evaluations:
        seconds = (step - trial.first_step) * outcome.seconds_per_step
        if step > trial.first_step and not trial.report(step, value, seconds=seconds):
            return
