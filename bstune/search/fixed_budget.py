"""The best metric within a budget: trials read as how far they are behind the best one.

A budget is of seconds, of steps or of examples. In each case a trial at batch size B ends after
budget(B) steps, T/tau(B) of them for T seconds, and all that is needed of the clock is the share of
its budget, s = step/budget(B), at which a trial had a metric.

The best full trial's curve is the ruler (:mod:`bstune.search.ruler`). The level that it has at its
budget's end is met by a trial at (B, lr) after S(B, lr) steps, and a trial that is ``behind`` says

    log S = log budget(B) + behind + error.

That is what the posterior of the frontier takes (:mod:`bstune.search.posterior`), so that its law
over batch sizes and learning rates holds here as for a target. The metric at the budget's end is
best where

    log S(B, lr) - log budget(B)

is least: there the level is met earliest within the budget, and most is left to go on. The level
moves as better trials end, and every decision reads all trials again.

- Before the end ``behind`` moves: large batches begin slowly, and high rates flatten out soon. How
  far it moves on average is learned from full trials and added (:class:`Drift`).
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
from bstune.core.records import TrialResult
from bstune.search.acquisition import Policy
from bstune.search.observations import FAILURE_FACTOR
from bstune.search.posterior import NOISE, LikelihoodData, Prior, log_steps, sample_posterior
from bstune.search.ruler import (
    Array,
    Mode,
    Ruler,
    RunningBest,
    Scale,
    make_ruler,
    running_best,
    scale_of,
)

LOSS: Objective = "loss"
FULL_SPREAD = 0.02  # of ``behind`` of a full trial: evaluations have a distance
BEHIND_SPREAD = 0.15  # of ``behind``, of a trial that is
FARTHEST = 4.0  # ``behind`` or ahead, at most: 55 times the steps
BOUND_SPREAD = 0.3  # in log S, of a trial that has a bound alone
# Mean and standard deviation of how ``behind`` moves for an octave of batch size, and of rate, more
# than the ruler's, over log(budget/steps). Recorded runs of the five tables have -0.02 to -0.2 an
# octave of batch size, and -0.07 to 0.2 of rate; with them 2.0 as below, 2.4 without.
SIZE_DRIFT = (-0.07, 0.07)
RATE_DRIFT = (0.0, 0.05)
# In log S: what the law misses at one place. After 5 full trials' cost what is recommended is 2.0
# of a seed's scatter above the best with 0.5, and 2.4 with the 0.1 that is used for steps to a
# target (tests/benchmarks/bench_fixed_budget.py, five tables, 13 seeds, means).
PLACE_MISFIT = 0.5
DRIFT_MISREAD = 0.3  # of ``behind``, in what a full trial shows of that


@dataclass(frozen=True)
class BudgetRun:
    """A trial, or a chain of trials that continue each other, as the last one left it."""

    number: int
    x: float  # log2 of the batch size
    z: float  # log2 of the learning rate
    other: tuple[float, ...]
    steps: int
    share: float  # of its budget, that it has run
    diverged: bool
    curve: RunningBest | None  # None without a finite evaluation
    behind: float | None = None  # the ruler; None where that cannot be said

    @property
    def full(self) -> bool:
        """Whether it has run to its budget's end and has a metric there."""
        return self.share >= 1.0 and not self.diverged and self.curve is not None

    @property
    def stopped(self) -> bool:
        """Whether it waits within its budget."""
        return self.share < 1.0 and not self.diverged

    @property
    def place(self) -> tuple[float, float, tuple[float, ...]]:
        """What a run on a fresh seed has in common with it."""
        return self.x, self.z, self.other


@dataclass(frozen=True)
class BudgetPosterior:
    """All that a decision rests on: the runs, the draws of the parameters, the ruler, the cost."""

    runs: tuple[BudgetRun, ...]
    data: LikelihoodData
    theta: Array
    prior: Prior
    budget: Callable[[float], float]  # steps over batch size
    scale: Scale
    ruler: Ruler | None  # None before any trial is full
    spent: float  # in full trials
    too_large: float  # log2 of the smallest batch size that ran out of memory, infinite if none did

    def log_budget(self, x: Array) -> Array:
        """Give the log of the budget's steps at log2 batch sizes."""
        return np.log([self.budget(float(size)) for size in np.exp2(x)])

    @property
    def full(self) -> list[BudgetRun]:
        """The full trials, the best metric first."""
        return sorted((run for run in self.runs if run.full), key=_best_height)


@dataclass(frozen=True)
class Expected:
    """What a fresh seed of a full trial is predicted to be: how far behind the ruler."""

    behind: float
    run: BudgetRun


@dataclass(frozen=True)
class Drift:
    """How far ``behind`` will have moved at the budget's end, by where a trial lies.

    Larger batches and lower rates begin slowly and flatten out late. For each octave by which a
    trial's batch size, and its rate, lie above the ruler's, ``behind`` moves by a coefficient times
    log(1/s) from the share s on. The coefficients are normal; full trials show them.
    """

    x: float  # log2 of the ruler's batch size
    z: float  # log2 of its rate
    mean: Array  # (2,)
    covariance: Array  # (2, 2)

    def until_the_end(self, run: BudgetRun, left: float) -> tuple[float, float]:
        """Give mean and variance of what is added to ``behind``, where ``left`` is log(1/s)."""
        away = left * np.array([run.x - self.x, run.z - self.z])
        return float(away @ self.mean), float(away @ self.covariance @ away)


def fit_drift(full: Sequence[BudgetRun], ruler: Ruler, policy: Policy) -> Drift:
    """Fit the coefficients to what full trials were at the first share, the ruler's the first."""
    best = full[0]
    precision = np.diag([SIZE_DRIFT[1] ** -2.0, RATE_DRIFT[1] ** -2.0])
    weighed = precision @ np.array([SIZE_DRIFT[0], RATE_DRIFT[0]])
    for run in full[1:]:
        curve = run.curve
        if curve is None or run.behind is None:
            continue
        seen = curve.log_shares <= math.log(policy.loss_first_share) + 1e-9
        if not seen.any():
            continue
        left = -float(curve.log_shares[seen][-1])
        then = -left - float(ruler.log_share(curve.heights[seen][-1:])[0])
        away = left * np.array([run.x - best.x, run.z - best.z])
        misread = DRIFT_MISREAD * max(then, run.behind, 0.0)
        variance = stopped_spread(left, policy) ** 2 + misread**2
        precision = precision + np.outer(away, away) / variance
        weighed = weighed + away * (run.behind - then) / variance
    covariance = np.linalg.inv(precision)
    return Drift(best.x, best.z, covariance @ weighed, covariance)


def last_step_of(budget: float) -> int:
    """Give the last whole step of a budget: at least one, and never past it."""
    return max(1, math.floor(budget * (1.0 + 1e-9)))


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
    """Read trials as how far they are behind the best one, and sample the posterior of that.

    Args:
        trials: the records so far; those that failed say nothing.
        others: further hyper-parameters by the trial's number, each in [0, 1].
        prior: of log S.
        budget: the steps over batch size at which a trial ends.
        mode: ``min`` for a metric that is to fall, ``max`` for one that is to rise.
        ideal: the metric's best value; None where there is none.
        policy: for the errors of what is read, and the draws.
        rng: the source of chance.
        particles: draws; None for the policy's.
        moves: Metropolis steps at each temperature; None for the policy's.
    """
    scale = scale_of((trial.history for trial in trials), mode, ideal)
    runs = _joined(trials, others, budget, scale)
    full = sorted((run for run in runs if run.full), key=_best_height)
    curves = [run.curve for run in full if run.curve is not None]
    ruler = make_ruler(curves, policy.loss_least_slope) if curves else None
    runs = tuple(replace(run, behind=_behind(run, ruler)) for run in runs)
    drift = None
    if ruler is not None:
        full = sorted((run for run in runs if run.full), key=_best_height)
        drift = fit_drift(full, ruler, policy)
    data = _likelihood_data(runs, drift, prior, budget, policy)
    theta = sample_posterior(data, prior, rng, particles or policy.particles, moves or policy.moves)
    sizes = [trial.batch_size for trial in trials if trial.status == "out of memory"]
    return BudgetPosterior(
        runs=runs,
        data=data,
        theta=theta,
        prior=prior,
        budget=budget,
        scale=scale,
        ruler=ruler,
        spent=_spent(trials, budget),
        too_large=math.log2(min(sizes)) if sizes else math.inf,
    )


def stopped_spread(left: float, policy: Policy) -> float:
    """Give the standard deviation of ``behind`` at the end, where ``left`` is log(1/s)."""
    return math.hypot(policy.loss_spread, policy.loss_drift * math.sqrt(left))


def shortened(
    trials: Sequence[TrialResult], budget: Callable[[float], float], share: float
) -> list[TrialResult]:
    """Give the trials as a shorter budget would have left them: what a share of ``budget`` allows.

    One that diverged later has not diverged then; the order in which they were chosen stays.
    """
    cut = list[TrialResult]()
    for trial in trials:
        last_step = last_step_of(share * budget(float(trial.batch_size)))
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
    """Rank the full trials by what a fresh seed of them is predicted to be, the best first.

    The prediction is the posterior's mean, which leans on all trials around, drawn to the runs at
    the very place as far as their noise from seed to seed is small beside what the law misses at
    one place, as for a target (:func:`bstune.search.observations.fresh_steps`). A run at the place
    that diverged counts as far behind.
    """
    data, theta = posterior.data, posterior.theta
    law = log_steps(theta, data.points, posterior.prior).mean(axis=0)
    noise = float(np.mean(np.exp(2.0 * theta[:, NOISE])))
    behind_by_law = law - posterior.log_budget(data.points.x)
    at_place: dict[tuple[float, float, tuple[float, ...]], list[int]] = {}
    for i, run in enumerate(posterior.runs):
        if run.full or run.diverged:
            at_place.setdefault(run.place, []).append(i)
    expected = list[Expected]()
    for rows in at_place.values():
        gaps = [
            math.log(FAILURE_FACTOR) if posterior.runs[i].diverged else data.y[i] - law[i]
            for i in rows
        ]
        believed = PLACE_MISFIT**2 / (PLACE_MISFIT**2 + noise / len(rows))
        behind = float(behind_by_law[rows[0]]) + believed * float(np.mean(gaps))
        expected += [Expected(behind, posterior.runs[i]) for i in rows if posterior.runs[i].full]
    return sorted(expected, key=_rank)


def _rank(expected: Expected) -> tuple[float, float]:
    return expected.behind, _best_height(expected.run)


def _best_height(run: BudgetRun) -> float:
    return math.inf if run.curve is None else run.curve.best


def _joined(
    trials: Sequence[TrialResult],
    others: Mapping[int, tuple[float, ...]],
    budget: Callable[[float], float],
    scale: Scale,
) -> tuple[BudgetRun, ...]:
    """Join chains: the last trial of each, with the evaluations of those that it continues."""
    usable = [trial for trial in trials if trial.status in ("reached", "stopped", "diverged")]
    by_number = {trial.number: trial for trial in usable}
    continued = {trial.resumed_from for trial in usable}
    runs = list[BudgetRun]()
    for trial in usable:
        if trial.number in continued:
            continue
        last_step = last_step_of(budget(float(trial.batch_size)))
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
    """Give a trial's evaluations after those of the trials that it continues, each step once."""
    chain = [trial]
    parent = trial.resumed_from
    while parent is not None and parent in by_number:
        chain.append(by_number[parent])
        parent = chain[-1].resumed_from
    seen: dict[int, float | None] = {}
    for one in reversed(chain):
        seen.update(one.history)
    return sorted(seen.items())


def _behind(run: BudgetRun, ruler: Ruler | None) -> float | None:
    """Give log s - log s_ruler(m) at a run's last evaluation, or at the end of a full one."""
    if run.curve is None or ruler is None:
        return None
    at = 0.0 if run.full else float(run.curve.log_shares[-1])
    behind = at - float(ruler.log_share(run.curve.heights[-1:])[0])
    return min(max(behind, -FARTHEST), FARTHEST)


def _likelihood_data(
    runs: Sequence[BudgetRun],
    drift: Drift | None,
    prior: Prior,
    budget: Callable[[float], float],
    policy: Policy,
) -> LikelihoodData:
    """Give the runs as the posterior takes them; see the module's docstring."""
    count = len(runs)
    y, spread = np.zeros(count), np.full(count, BOUND_SPREAD)
    bound = np.zeros(count, dtype=np.bool_)
    for i, run in enumerate(runs):
        log_budget = math.log(budget(2.0**run.x))
        if run.behind is None:
            bound[i] = not run.diverged
            y[i] = log_budget + math.log(max(run.share, 1e-9))
            continue
        y[i] = log_budget + run.behind
        spread[i] = FULL_SPREAD
        if run.stopped and run.curve is not None:
            left = -float(run.curve.log_shares[-1])
            spread[i] = stopped_spread(left, policy)
            if drift is not None:
                moved, variance = drift.until_the_end(run, left)
                y[i] += moved
                spread[i] = math.hypot(spread[i], math.sqrt(variance))
        spread[i] += BEHIND_SPREAD * max(run.behind, 0.0)
    x = np.array([run.x for run in runs])
    z = np.array([run.z for run in runs])
    other = np.array([run.other for run in runs], dtype=np.float64).reshape(count, prior.others)
    diverged = np.array([run.diverged for run in runs], dtype=np.bool_)
    return LikelihoodData(
        points=prior.at(x, z, other),
        y=y,
        spread=spread,
        least=np.full(count, -np.inf),
        bound=bound,
        diverged=diverged,
    )


def _spent(trials: Sequence[TrialResult], budget: Callable[[float], float]) -> float:
    """Give what the trials have cost, in full trials: those that they continue are paid once."""
    steps = {trial.number: trial.steps for trial in trials}
    spent = 0.0
    for trial in trials:
        before = 0 if trial.resumed_from is None else steps.get(trial.resumed_from, 0)
        own = max(trial.steps - before, 0)
        spent += own / last_step_of(budget(float(trial.batch_size)))
    return spent
