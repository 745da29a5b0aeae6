"""Batch size and learning rate to a target, answered from recorded trainings.

Each answer has a cost: that of the training.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any
from typing import Literal

import numpy as np
import optuna
import optunahub


try:
    from bstune.trial.recorded_run import Run as Recorded
    from bstune.trial.replay import read_index
    from bstune.trial.replay import read_table
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "benchmarks/batch_size is answered from bstune's tables: pip install PATH_OF_BSTUNE"
    ) from error


Params = Mapping[str, Any]
Objective = Literal["time", "steps"]
MISSES = ("penalty", "inf")
# A miss counts as so many times the costliest recorded run, as in the PAR2 score of algorithm
# configuration.
PENALTY = 2.0
# A run's metric is reported to a pruner at so many costs, each half of the next one, the last
# that of the costliest recorded run.
REPORTS = 8


@dataclass(frozen=True)
class Run:
    """The result of a training.

    Args:
        batch_size: in examples per step.
        lr: the learning rate.
        status: ``reached`` the target, ``stopped`` before it, or ``diverged``.
        steps: all steps taken, with those of the run that it continues.
        seconds_per_step: of training alone, on the machine of the recording.
        cost: its own seconds or steps, without those of the run that it continues.
        history: (step, metric) of its evaluations.
        can_go_on: whether more steps are recorded.
        place: which of the recorded seeds it is, as a share of them.
    """

    batch_size: int
    lr: float
    status: Literal["reached", "stopped", "diverged"]
    steps: int
    seconds_per_step: float
    cost: float
    history: Sequence[tuple[int, float]]
    can_go_on: bool
    place: float

    @property
    def is_censored(self) -> bool:
        """Whether its steps to the target are only known to be more than ``steps``."""
        return self.status != "reached"


class Problem(optunahub.benchmarks.BaseProblem):  # type: ignore[misc]
    """The least seconds, or the fewest steps, to a target over batch size and learning rate.

    Args:
        table: one of :attr:`available_tables`.
        objective: ``time`` or ``steps``.
        seed: draws one of the recorded seeds at each evaluation. None: the first one each time.
        miss: what a run that misses the target counts as: ``penalty``, twice the costliest
            recorded run, or ``inf``.

    Attributes:
        spent: what all evaluations so far have cost, in seconds or steps.
        runs: what was run in each trial, by the trial's number.
    """

    available_tables: tuple[str, ...] = tuple(sorted(read_index()))

    def __init__(
        self,
        table: str = "fashion_mlp",
        objective: Objective = "time",
        seed: int | None = None,
        miss: Literal["penalty", "inf"] = "penalty",
    ) -> None:
        if table not in self.available_tables:
            raise ValueError(
                f"table must be one of {', '.join(self.available_tables)}, but got {table!r}"
            )
        if objective not in ("time", "steps"):
            raise ValueError(f"objective must be time or steps, but got {objective!r}")
        if miss not in MISSES:
            raise ValueError(f"miss must be one of {', '.join(MISSES)}, but got {miss!r}")
        source = read_index()[table]
        self.target = source.target
        self.objective = objective
        self._miss = miss
        self._table = read_table(source.path)
        # The cost of the costliest recorded run, in seconds or steps.
        self._highest_cost = max(self._cost_of(run) for run in self._table.runs)
        self.spent = 0.0
        self.runs: dict[int, Run] = {}
        self.reseed(seed)

    def reseed(self, seed: int | None = None) -> None:
        """Begin to draw recorded seeds anew from ``seed``; None: take the first one each time."""
        self._random = None if seed is None else np.random.default_rng(seed)

    @property
    def search_space(self) -> dict[str, optuna.distributions.BaseDistribution]:
        """The batch sizes and learning rates of the table, both on a log scale."""
        sizes = self._table.batch_sizes
        rates = self._table.lrs
        return {
            "batch_size": optuna.distributions.IntDistribution(sizes[0], sizes[-1], log=True),
            "lr": optuna.distributions.FloatDistribution(rates[0], rates[-1], log=True),
        }

    @property
    def directions(self) -> list[optuna.study.StudyDirection]:
        """Less is better."""
        return [optuna.study.StudyDirection.MINIMIZE]

    @property
    def penalty(self) -> float:
        """The value of a run that misses the target."""
        if self._miss == "inf":
            return np.inf
        return PENALTY * self._highest_cost

    @property
    def best_params(self) -> dict[str, float]:
        """The recorded batch size and learning rate with the least value, a mean over seeds."""
        return self._best[1]

    @property
    def best_value(self) -> float:
        """The value at :attr:`best_params`; between recorded points it can be a little less."""
        return self._best[0]

    @property
    def _best(self) -> tuple[float, dict[str, float]]:
        """The least value of a point that reached the target on all seeds, and the point."""
        reached = list[tuple[float, dict[str, float]]]()
        for (batch_size, lr), runs in self._table.cells.items():
            if all(run.steps_to(self.target) is not None for run in runs):
                value = mean(self._value_of(run) for run in runs)
                reached.append((value, {"batch_size": batch_size, "lr": lr}))
        return min(reached, key=lambda pair: pair[0])

    def _cost_of_step(self, seconds_per_step: float) -> float:
        """Give the cost of a step: its seconds, or 1 where the objective is ``steps``."""
        return seconds_per_step if self.objective == "time" else 1.0

    def _cost_of(self, run: Recorded) -> float:
        """Give the cost of a whole recorded run."""
        return run.end * self._cost_of_step(run.seconds_per_step)

    def _value_of(self, run: Recorded) -> float:
        """Give a recorded run's seconds or steps to the target, or the penalty of a miss."""
        steps = run.steps_to(self.target)
        if steps is None:
            return self.penalty
        return steps * self._cost_of_step(run.seconds_per_step)

    def evaluate(self, params: Params) -> float:
        """Train to the target, or until the record ends, and give the seconds or steps to it.

        A miss has the value :attr:`penalty`. The cost is added to :attr:`spent`.
        """
        return self.value(self.run(params))

    def value(self, run: Run) -> float:
        """Give a run's seconds or steps to the target, or the penalty of a miss."""
        if run.is_censored:
            return self.penalty
        return run.steps * self._cost_of_step(run.seconds_per_step)

    def run(
        self, params: Params, max_steps: int | None = None, resumed_from: Run | None = None
    ) -> Run:
        """Train, and add the cost to :attr:`spent`.

        Args:
            params: ``batch_size`` and ``lr``. Outside of the table's range they count as at its
                edge.
            max_steps: the last step, counted from the very first one on. None: it runs to the
                target or the end of its record.
            resumed_from: a stopped run, at the same params, that it continues on the same recorded
                seed. Only the new steps cost.
        """
        if resumed_from is None:
            run = self._read(params, self._place(), max_steps)
        else:
            run = self._read(params, resumed_from.place, max_steps, resumed_from.steps)
        self.spent += run.cost
        return run

    def _place(self) -> float:
        """Draw which of the recorded seeds a run has: a number in [0, 1), 0 being the first one.

        It is 0 without a generator, so that each run has the first seed.
        """
        if self._random is None:
            return 0.0
        return float(self._random.random())

    def _read(
        self, params: Params, place: float, max_steps: int | None = None, first_step: int = 0
    ) -> Run:
        """Read a run from the table.

        Args:
            params: ``batch_size`` and ``lr``.
            place: which of the recorded seeds, as :meth:`_place` gives it.
            max_steps: the last step, counted from the very first one on; None: the run goes to the
                target or the end of its record.
            first_step: the steps of the run that it continues, which cost nothing.
        """
        batch_size = int(params["batch_size"])
        lr = float(params["lr"])
        recorded = self._table.read(batch_size, lr, self.target, place)
        steps = recorded.end
        if max_steps is not None:
            # A run that continues another one ends no sooner than that one did.
            steps = min(steps, max(max_steps, first_step))
        status: Literal["reached", "stopped", "diverged"] = "stopped"
        if recorded.steps is not None and recorded.steps <= steps:
            status = "reached"
        elif recorded.diverged and steps == recorded.end:
            status = "diverged"
        return Run(
            batch_size=batch_size,
            lr=lr,
            status=status,
            steps=steps,
            seconds_per_step=recorded.seconds_per_step,
            cost=(steps - first_step) * self._cost_of_step(recorded.seconds_per_step),
            history=tuple(pair for pair in recorded.history if pair[0] <= steps),
            can_go_on=steps < recorded.end,
            place=place,
        )

    def suggest(self, trial: optuna.Trial) -> dict[str, float]:
        """Suggest a trial's batch size and learning rate."""
        sizes = self._table.batch_sizes
        rates = self._table.lrs
        return {
            "batch_size": trial.suggest_int("batch_size", sizes[0], sizes[-1], log=True),
            "lr": trial.suggest_float("lr", rates[0], rates[-1], log=True),
        }

    def tell(self, trial: optuna.Trial, run: Run) -> float:
        """Keep a run among the attributes of its trial, and give the trial's value.

        The user attributes are ``cost`` (of the trial), ``spent`` (of all trials so far),
        ``censored``, ``status``, ``steps`` and ``seconds_per_step``.

        Raises:
            optuna.TrialPruned: for a run that could go on, whose value is not known.
        """
        self.runs[trial.number] = run
        trial.set_user_attr("cost", run.cost)
        trial.set_user_attr("spent", self.spent)
        trial.set_user_attr("censored", run.is_censored)
        trial.set_user_attr("status", run.status)
        trial.set_user_attr("steps", run.steps)
        trial.set_user_attr("seconds_per_step", run.seconds_per_step)
        if run.can_go_on:
            raise optuna.TrialPruned
        return self.value(run)

    def __call__(self, trial: optuna.Trial) -> float:
        """Run a trial to its end, or until the study's pruner stops it.

        The best metric so far is reported at eight costs. Each is twice the one before, and the
        last is the cost of the costliest recorded run. So a pruner compares trials that have cost
        the same.

        Returns:
            The seconds or steps to the target; :attr:`penalty` for a run that misses it.

        Raises:
            optuna.TrialPruned: where the pruner stops the trial.
        """
        params = self.suggest(trial)
        # Both reads below are of the same recorded seed.
        place = self._place()
        whole = self._read(params, place)
        # The step at which the pruner stops the trial; None: it does not.
        max_steps: int | None = None
        cost_of_step = self._cost_of_step(whole.seconds_per_step)
        for report in range(REPORTS):
            limit = self._highest_cost * 2.0 ** (report + 1 - REPORTS)
            last_step = int(limit / cost_of_step)
            # The run ends by itself before this cost.
            if last_step >= whole.steps:
                break
            metrics_so_far = [value for step, value in whole.history if step <= last_step]
            if not metrics_so_far:
                continue
            trial.report(min(metrics_so_far), report)
            if trial.should_prune():
                max_steps = last_step
                break
        # A pruned trial costs, and shows, only its steps so far: it is read again up to there.
        run = self._read(params, place, max_steps)
        self.spent += run.cost
        return self.tell(trial, run)
