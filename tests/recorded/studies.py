"""Studies whose trials are recorded: their posterior, inferred again as a report infers it.

A record has of each trial the evaluations that mark its way, not all of them, and nothing of which
trial continued which. So what is derived here differs a little from what the study itself reported.
"""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from optuna.distributions import FloatDistribution, IntDistribution
from recorded.figure import rows_of

from bstune.config import compose
from bstune.core.curve import CurveBand, FrontierPoint, frontier_points
from bstune.core.objectives import Objective
from bstune.core.records import Target, TrialResult
from bstune.core.scaling import sqrt
from bstune.result import CriticalBatchSize, LearningRateLaw
from bstune.search.frontier_findings import steps_band
from bstune.search.frontier_law import frontier
from bstune.search.posterior import Posterior
from bstune.search.sampler import FrontierSampler
from bstune.study.analysis.critical import INTERVAL, critical_batch
from bstune.study.analysis.model import MOVES, REPORT_PARTICLES, fit_lr_exponent

Arguments = tuple[str, ...]
LR_RANGE = (1e-4, 10.0)
# Of batch sizes, at each end of the curve: the slope of log S* there.
END_SPAN = 4.0
# At which a curve is drawn.
CURVE_SIZES = 49


@dataclass(frozen=True)
class Asked:
    """What a study was to find."""

    target: Target
    reference: tuple[float, float]
    """Batch size and learning rate."""
    batch_sizes: tuple[int, int]
    budget: tuple[int, int]
    """Steps and examples: a trial ends when both are spent."""
    objective: Objective
    level_sigma: float
    """Of the prior of the best learning rate, in octaves."""


@dataclass(frozen=True)
class Found:
    """What the trials say."""

    trials: int
    reached: int
    critical: CriticalBatchSize
    slopes: tuple[float, float]
    exponent: LearningRateLaw | None
    fewest_steps: int
    band: CurveBand
    """S*(B) over the batch sizes that reached the target, with its interval."""
    points: tuple[FrontierPoint, ...]
    """The frontier's trials that reached the target."""
    posterior: Posterior


def asked(arguments: Arguments) -> Asked:
    """Read what a study with these arguments of the command line is to find."""
    options = compose(arguments).options
    target = options.workload.target
    return Asked(
        target=Target(target.metric, target.value, target.mode),
        reference=(options.scaling.batch_size, options.scaling.lr),
        batch_sizes=(options.search.batch_size.low, options.search.batch_size.high),
        budget=(options.budget.steps, options.budget.examples),
        objective=options.search.objective,
        level_sigma=options.prior.level_sigma,
    )


def trial_of(number: int, row: dict[str, Any], target: Target) -> TrialResult:
    """Read one recorded trial: its record as it stood when it met the target, or ended."""
    history = list(zip(row["steps"], row["metric"], strict=True))
    hit = next((step for step, value in history if target.reached(value)), None)
    end = row["steps"][-1] if row["steps"] else 1
    # Where it missed all the way, up to its end.
    last_miss = end
    if hit is not None:
        end = hit
        last_miss = max((step for step, _ in history if step < hit), default=0)
    status = row["status"]
    # The record's run went on beyond the target, where a trial ends.
    if status == "stopped" and hit is not None:
        status = "reached"
    seconds = end * row["seconds_per_step"]
    return TrialResult(
        number=number,
        trial_index=number,
        batch_size=row["batch_size"],
        lr=row["lr"],
        delta=None,
        seed=row["seed"],
        status=status,
        steps=end,
        steps_low=last_miss,
        examples=end * row["batch_size"],
        train_seconds=seconds,
        eval_seconds=0.0,
        startup_seconds=0.0,
        wall_seconds=seconds,
        seconds_per_step=row["seconds_per_step"],
        device="cpu",
        versions={},
        history=tuple((step, value) for step, value in history if step <= end),
    )


def trials_of(path: Path, target: Target) -> list[TrialResult]:
    return [trial_of(number, row, target) for number, row in enumerate(rows_of(path))]


def posterior_of(trials: list[TrialResult], of: Asked) -> Posterior:
    """Sample the posterior that a report has; the rule is the square root through the reference."""
    steps, examples = of.budget
    sampler = FrontierSampler(
        objective=of.objective,
        rule=lambda batch_size: sqrt(batch_size, *of.reference),
        target=of.target,
        # All recorded targets are of losses and errors.
        ideal=0.0,
        sigma=of.level_sigma,
        budget=lambda batch_size: max(steps, examples / batch_size),
        lr_range=LR_RANGE,
        search_space={
            "batch_size": IntDistribution(*of.batch_sizes, log=True),
            "lr": FloatDistribution(*LR_RANGE, log=True),
        },
    )
    rng = np.random.default_rng(0)
    posterior = sampler.posterior(trials, particles=REPORT_PARTICLES, moves=MOVES, rng=rng)
    assert posterior is not None
    return posterior


@cache
def found(path: Path, arguments: Arguments) -> Found:
    """Infer what the trials of one study say; ``arguments`` are those of its command."""
    of = asked(arguments)
    trials = trials_of(path, of.target)
    posterior = posterior_of(trials, of)
    critical = critical_batch(posterior)
    assert critical is not None
    # A stopped point is a bound, and is not drawn.
    reached = [trial for trial in trials if trial.reached]
    ladder = np.geomspace(critical.smallest, critical.largest, CURVE_SIZES)
    points = [point for point in frontier_points(trials) if not point.stopped]
    return Found(
        trials=len(trials),
        reached=len(reached),
        critical=critical,
        slopes=end_slopes(posterior, critical),
        exponent=fit_lr_exponent(posterior, *of.batch_sizes, critical.value),
        fewest_steps=min(trial.steps for trial in reached),
        band=steps_band(posterior, ladder.tolist(), INTERVAL),
        points=tuple(points),
        posterior=posterior,
    )


def end_slopes(posterior: Posterior, critical: CriticalBatchSize) -> tuple[float, float]:
    """Give the slopes of log S* over log B over a factor of 4 at both ends of what reached the
    target."""
    slopes = list[float]()
    for start in (critical.smallest, critical.largest / END_SPAN):
        # The curve is drawn with this interval.
        band = steps_band(posterior, [start, start * END_SPAN], (0.05, 0.95))
        steps = np.log(band.steps)
        slopes.append(float((steps[1] - steps[0]) / np.log(END_SPAN)))
    return slopes[0], slopes[1]


def steps_at(study: Found, batch_size: float) -> float:
    """Give the posterior's median of S*(B)."""
    return float(steps_band(study.posterior, [batch_size], INTERVAL).steps[0])


def crossing(first: Found, second: Found) -> tuple[float, float, float]:
    """Give the batch size up to which ``first`` takes fewer steps: its 5%, 50% and 95% quantiles.

    Of batch sizes at which both reached the target. The studies are independent, so that each draw
    of one posterior stands beside any of the other; one that does not cross counts as an end.
    """
    smallest = max(first.critical.smallest, second.critical.smallest)
    largest = min(first.critical.largest, second.critical.largest)
    ladder = np.geomspace(smallest, largest, CURVE_SIZES)
    drawn = list[np.ndarray]()
    for study in (first, second):
        posterior = study.posterior
        at = posterior.prior.points_at(np.log2(ladder))
        drawn.append(frontier(posterior.theta, at, posterior.prior))
    # Posteriors may have different numbers of particles.
    count = min(map(len, drawn))
    is_fewer = drawn[0][:count] < drawn[1][:count]
    # The last batch size at which it takes fewer; the smallest where it never does.
    last = CURVE_SIZES - 1 - np.argmax(is_fewer[:, ::-1], axis=1)
    last[~is_fewer.any(axis=1)] = 0
    low, middle, high = np.quantile(ladder[last], (0.05, 0.5, 0.95)).tolist()
    return low, middle, high
