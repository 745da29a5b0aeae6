"""Trials of a fixed budget as runs: chains joined, each as far behind the ruler as it was left.

A run says where it stands by one number, ``behind`` (:mod:`bstune.search.ruler`), and by the share
of its budget that it has run.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from bstune.core.records import TrialResult
from bstune.search.observations import Point
from bstune.search.ruler import Ruler, RunningBest, Scale, running_best

# The farthest that a run counts as behind or ahead: e^4, or 55 times the steps.
FARTHEST = 4.0


@dataclass(frozen=True)
class BudgetRun:
    """A trial, or a chain of trials that continue each other, as the last one left it."""

    number: int
    x: float
    """Log2 of the batch size."""
    z: float
    """Log2 of the learning rate."""
    other: tuple[float, ...]
    """The other hyper-parameters, each in [0, 1]."""
    steps: int
    share: float
    """The share of its budget that it has run."""
    diverged: bool
    curve: RunningBest | None
    """Its best metric so far at each evaluation; None without a finite evaluation."""
    behind: float | None = None
    """How far behind the ruler (the best full trial) it was left; None where that is not known."""

    @property
    def full(self) -> bool:
        """Whether it has run to its budget's end and has a metric there."""
        return self.share >= 1.0 and not self.diverged and self.curve is not None

    @property
    def stopped(self) -> bool:
        """Whether it was stopped before its budget's end, and did not diverge."""
        return self.share < 1.0 and not self.diverged

    @property
    def point(self) -> Point:
        """Log2 of batch size and learning rate, and the others: what a fresh seed repeats."""
        return self.x, self.z, self.other

    @property
    def best_height(self) -> float:
        """The least height that it had; infinite without a finite evaluation."""
        return math.inf if self.curve is None else self.curve.best


def last_whole_step(budget: float) -> int:
    """Round a budget of steps down to a whole step, which is at least 1."""
    # Rounding may have left a whole number of steps a little too small.
    return max(1, math.floor(budget * (1.0 + 1e-9)))


def best_first(runs: Sequence[BudgetRun]) -> list[BudgetRun]:
    """List the full runs, the best metric first."""
    full = [run for run in runs if run.full]
    return sorted(full, key=lambda run: run.best_height)


def joined_runs(
    trials: Sequence[TrialResult],
    others: Mapping[int, tuple[float, ...]],
    budget: Callable[[float], float],
    scale: Scale,
) -> tuple[BudgetRun, ...]:
    """Join each chain of trials that continue each other into one run, as the last one left it.

    Args:
        trials: the records so far; those that failed are left out.
        others: the other hyper-parameters by the trial's number, each in [0, 1].
        budget: gives the step at which a trial ends, at a batch size.
        scale: on which the metric is read.
    """
    usable = [trial for trial in trials if trial.status in ("reached", "stopped", "diverged")]
    by_number = {trial.number: trial for trial in usable}
    continued = {trial.resumed_from for trial in usable}
    runs = list[BudgetRun]()
    for trial in usable:
        if trial.number in continued:
            continue
        last_step = last_whole_step(budget(float(trial.batch_size)))
        curve = running_best(_whole_history(trial, by_number), last_step, scale)
        share = min(trial.steps / last_step, 1.0)
        # A trial that ran to its end and never had a finite metric is as useless as one that broke.
        useless = share >= 1.0 and curve is None
        runs.append(
            BudgetRun(
                number=trial.number,
                x=math.log2(trial.batch_size),
                z=math.log2(trial.lr),
                other=others.get(trial.number, ()),
                steps=trial.steps,
                share=share,
                diverged=trial.status == "diverged" or useless,
                curve=curve,
            )
        )
    return tuple(runs)


def _whole_history(
    trial: TrialResult, by_number: Mapping[int, TrialResult]
) -> list[tuple[int, float | None]]:
    """List the evaluations of a trial and of those that it continues, by step.

    Where two of them have the same step, the later trial's counts.
    """
    chain = [trial]
    parent = trial.resumed_from
    while parent is not None and parent in by_number:
        chain.append(by_number[parent])
        parent = chain[-1].resumed_from
    values = dict[int, float | None]()
    for link in reversed(chain):
        values.update(link.history)
    return sorted(values.items())


def measure_behind(run: BudgetRun, ruler: Ruler) -> float | None:
    """Measure how far a run is behind the best full trial, the ruler, in log steps.

    It is log s - log s_ruler(m), with m the run's best metric, s the share of its budget at its
    last evaluation, 1 for a full run, and s_ruler(m) the share at which the ruler first had m. It
    is kept within ``FARTHEST`` on both sides, as the ruler's curve says little farther off. None
    without a finite evaluation.
    """
    if run.curve is None:
        return None
    log_share = 0.0 if run.full else float(run.curve.log_shares[-1])
    behind = log_share - float(ruler.log_share(run.curve.heights[-1:])[0])
    return min(max(behind, -FARTHEST), FARTHEST)
