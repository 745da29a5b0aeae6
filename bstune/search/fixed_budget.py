"""The best metric within a budget: trials read as how far they are behind the best one.

A budget is of seconds, of steps or of examples. In each case a trial at batch size B ends after
budget(B) steps, T/tau(B) of them for T seconds, and all that is needed of the clock is the share of
its budget, s = step/budget(B), at which a trial had a metric.

The best full trial's curve is the ruler (:mod:`bstune.search.ruler`). The level that it has at its
budget's end is met by a trial at (B, lr) after S(B, lr) steps, and a trial that is ``behind`` says

    log S = log budget(B) + behind + error.

That is what the posterior of the frontier takes (:mod:`bstune.search.frontier_law`), so that its
law over batch sizes and learning rates holds here as for a target. The metric at the budget's end
is best where

    log S(B, lr) - log budget(B)

is least: there the level is met earliest within the budget, and most is left to go on. The level
moves as better trials end, and every decision reads all trials again.

- Before the end ``behind`` moves: large batches begin slowly, and high rates flatten out soon. How
  far it moves on average is learned from full trials and added (:mod:`bstune.search.drift`).
- The error of a trial that ended at the share s is hypot(spread, drift sqrt(-log s)) + 0.15
  max(behind, 0): what ``behind`` will be at the end wanders from what it is now, and of a trial far
  behind only the order of magnitude counts. There is no bound: a trial may be ahead.
- A trial that diverged says that its learning rate was too high, however good it was before.
- One without an evaluation, or before any trial is full, says that S is more than its steps.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from bstune.core.objectives import Objective
from bstune.core.records import Mode, TrialResult
from bstune.search.acquisition import Policy
from bstune.search.budget_runs import (
    BudgetRun,
    best_first,
    joined_runs,
    last_whole_step,
    measure_behind,
)
from bstune.search.candidates import log_over_sizes
from bstune.search.drift import Drift, fit_drift, stopped_spread
from bstune.search.frontier_law import Prior, log_steps, noise_variance
from bstune.search.likelihood import LikelihoodData
from bstune.search.monte_carlo import sample_posterior
from bstune.search.observations import Point, steps_before
from bstune.search.predictions import FAILURE_FACTOR
from bstune.search.ruler import Array, Ruler, Scale, choose_scale, make_ruler

LOSS: Objective = "loss"
# Standard deviation of ``behind`` of a full trial: evaluations have a distance.
FULL_SPREAD = 0.02
# Standard deviation that is added for a trial that is behind, over how far it is.
BEHIND_SPREAD = 0.15
# Standard deviation of log S of a trial of which only a bound is known.
BOUND_SPREAD = 0.3
# Standard deviation, in log S, of what the law misses at one place. After 5 full trials' cost the
# recommended trial is 2.0 of a seed's scatter above the best with 0.5, and 2.4 with the 0.1 that is
# used for steps to a target (tests/benchmarks/bench_fixed_budget.py, five tables, 13 seeds, means).
PLACE_MISFIT = 0.5


@dataclass(frozen=True)
class BudgetPosterior:
    """All that a decision rests on: the runs, the draws of the parameters, the ruler, the cost."""

    runs: tuple[BudgetRun, ...]
    data: LikelihoodData
    """The runs as the likelihood takes them, in the same order."""
    theta: Array
    """Draws of the parameters of log S, (m, p)."""
    prior: Prior
    budget: Callable[[float], float]
    """Gives the step at which a trial ends, at a batch size."""
    scale: Scale
    ruler: Ruler | None
    """None before any trial is full."""
    spent: float
    """What the search has spent: 1 is the cost of a trial that runs to its budget's end."""
    too_large: float
    """Log2 of the smallest batch size that ran out of memory, infinite if none did."""

    def log_budget(self, x: Array) -> Array:
        """Compute the log of the budget's steps at log2 batch sizes ``x`` (n,)."""
        return log_over_sizes(self.budget, x)

    @property
    def full(self) -> list[BudgetRun]:
        """The full trials, the best metric first."""
        return best_first(self.runs)


@dataclass(frozen=True)
class Expected:
    """A full trial, and how far behind the best one a fresh seed of it is predicted to be."""

    behind: float
    run: BudgetRun


def infer_at_budget(
    trials: Sequence[TrialResult],
    others: Mapping[int, tuple[float, ...]],
    *,
    prior: Prior,
    budget: Callable[[float], float],
    mode: Mode,
    ideal: float | None,
    policy: Policy,
    rng: np.random.Generator,
    particles: int | None = None,
    moves: int | None = None,
) -> BudgetPosterior:
    """Read from each trial how far it is behind the best one, and sample the posterior of log S.

    The curve of the best full trial is the ruler by which all others are read. By how much a trial
    moves against it until its budget's end, the drift, is learned from the full trials. Before any
    trial is full, having run to its budget's end, there is neither: a trial that has not diverged
    then gives a lower bound of S.

    Args:
        trials: the records so far; those that failed are left out.
        others: the other hyper-parameters by the trial's number, each in [0, 1].
        prior: of the parameters of log S.
        budget: gives the step at which a trial ends, at a batch size.
        mode: ``min`` for a metric that is to fall, ``max`` for one that is to rise.
        ideal: the metric's best value; None where there is none.
        policy: has the deviations of how far a trial is behind, and how many draws to take.
        rng: the source of chance.
        particles: how many draws to take; None for the policy's number.
        moves: Metropolis steps at each temperature; None for the policy's number.
    """
    scale = choose_scale((trial.history for trial in trials), mode, ideal)
    runs = joined_runs(trials, others, budget, scale)
    # Of the full trials, the best one first.
    curves = [run.curve for run in best_first(runs) if run.curve is not None]
    # Before any trial is full these are None, and so is how far each run is behind.
    ruler: Ruler | None = None
    drift: Drift | None = None
    if curves:
        ruler = make_ruler(curves, policy.loss_least_slope)
        runs = tuple(replace(run, behind=measure_behind(run, ruler)) for run in runs)
        drift = fit_drift(best_first(runs), ruler, policy)
    data = _data_at_budget(runs, drift, prior, budget, policy)
    theta = sample_posterior(data, prior, rng, particles or policy.particles, moves or policy.moves)
    too_large = [trial.batch_size for trial in trials if trial.status == "out of memory"]
    return BudgetPosterior(
        runs=runs,
        data=data,
        theta=theta,
        prior=prior,
        budget=budget,
        scale=scale,
        ruler=ruler,
        spent=_full_trials_paid(trials, budget),
        too_large=math.log2(min(too_large, default=math.inf)),
    )


def shortened(
    trials: Sequence[TrialResult], budget: Callable[[float], float], share: float
) -> list[TrialResult]:
    """Cut the trials as a budget of ``share`` times ``budget`` would have left them.

    One that diverged, or reached a target, after its cut counts as stopped there.
    """
    cut = list[TrialResult]()
    for trial in trials:
        last_step = last_whole_step(share * budget(float(trial.batch_size)))
        if trial.steps <= last_step:
            cut.append(trial)
            continue
        history = tuple((step, value) for step, value in trial.history if step <= last_step)
        status = trial.status
        if status in ("diverged", "reached"):
            status = "stopped"
        cut.append(replace(trial, steps=last_step, status=status, history=history))
    return cut


def rank_full_trials(posterior: BudgetPosterior) -> list[Expected]:
    """Rank the full trials by how good a fresh seed of them is predicted to be, the best first.

    A full trial has run to its budget's end. The prediction is by how many log steps a fresh seed
    lags the best one's metric at the end, ``behind``. It lies between the posterior's mean, which
    all trials inform, and the runs at the very place. These count the more, the smaller their noise
    from seed to seed is compared with what the law misses at one place. A run at the place that
    diverged counts as far behind.
    """
    data = posterior.data
    theta = posterior.theta
    log_s_by_law = log_steps(theta, data.points, posterior.prior).mean(axis=0)
    noise = noise_variance(theta)
    behind_by_law = log_s_by_law - posterior.log_budget(data.points.x)
    runs_at = dict[Point, list[int]]()
    for row, run in enumerate(posterior.runs):
        if run.full or run.diverged:
            runs_at.setdefault(run.point, []).append(row)
    # How far each run is above the law, in log S.
    log_gap = np.where(data.diverged, math.log(FAILURE_FACTOR), data.y - log_s_by_law)
    expected = list[Expected]()
    for rows in runs_at.values():
        # The share of the runs' mean gap that belongs to the place, and is not the seeds' luck.
        share_of_place = PLACE_MISFIT**2 / (PLACE_MISFIT**2 + noise / len(rows))
        behind = float(behind_by_law[rows[0]]) + share_of_place * float(np.mean(log_gap[rows]))
        for row in rows:
            if posterior.runs[row].full:
                expected.append(Expected(behind, posterior.runs[row]))
    return sorted(expected, key=lambda trial: (trial.behind, trial.run.best_height))


def _data_at_budget(
    runs: Sequence[BudgetRun],
    drift: Drift | None,
    prior: Prior,
    budget: Callable[[float], float],
    policy: Policy,
) -> LikelihoodData:
    """Give n runs as the likelihood takes them: log S = log budget + behind.

    S is the steps in which a run reaches the metric with which the best full trial (one that ran to
    its budget's end) ended. ``behind`` is how far the run will lag that trial at its budget's end,
    in log steps: how far it does now, and how far it is expected to move. A run of which that is
    not known gives a lower bound of S, the steps that it has run. ``drift`` predicts how runs move;
    it is None before any trial is full.
    """
    count = len(runs)
    y = np.zeros(count)
    spread = np.full(count, BOUND_SPREAD)
    bound = np.zeros(count, dtype=np.bool_)
    for row, run in enumerate(runs):
        log_budget = math.log(budget(2.0**run.x))
        if run.behind is None:
            bound[row] = not run.diverged
            # The share of a run that took no step is 0, which has no logarithm.
            y[row] = log_budget + math.log(max(run.share, 1e-9))
        else:
            moved, deviation = _until_the_end(run, drift, policy)
            y[row] = log_budget + run.behind + moved
            # Only the order of magnitude counts of a trial that is far behind.
            spread[row] = deviation + BEHIND_SPREAD * max(run.behind, 0.0)
    x = np.array([run.x for run in runs])
    z = np.array([run.z for run in runs])
    other = np.array([run.other for run in runs], dtype=np.float64).reshape(count, prior.others)
    return LikelihoodData(
        points=prior.points_at(x, z, other),
        y=y,
        spread=spread,
        # A run that is ahead of the best full trial has that one's final metric already: S need not
        # exceed the steps that it has run, and -inf stands for no such bound.
        log_steps_missed=np.full(count, -np.inf),
        bound=bound,
        diverged=np.array([run.diverged for run in runs], dtype=np.bool_),
    )


def _until_the_end(run: BudgetRun, drift: Drift | None, policy: Policy) -> tuple[float, float]:
    """Predict how far a run moves against the best one until its budget's end, and the deviation.

    Both are in log steps. A full run moves no more: its deviation is that with which evaluations,
    which lie apart, show where it is. Without a ``drift`` no run moves on average, but it wanders.
    """
    if not run.stopped or run.curve is None:
        return 0.0, FULL_SPREAD
    log_left = -float(run.curve.log_shares[-1])
    wandering = stopped_spread(log_left, policy)
    if drift is None:
        return 0.0, wandering
    moved, variance = drift.until_the_end(run, log_left)
    return moved, math.hypot(wandering, math.sqrt(variance))


def _full_trials_paid(trials: Sequence[TrialResult], budget: Callable[[float], float]) -> float:
    """Add up what the trials have cost, in full trials; steps of a continued trial count once."""
    earlier_steps = steps_before(trials)
    paid = 0.0
    for trial in trials:
        own_steps = max(trial.steps - earlier_steps[trial.number], 0)
        paid += own_steps / last_whole_step(budget(float(trial.batch_size)))
    return paid
