"""What bstune's own model is told of a job, and what it tells of B_crit."""

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from bstune.preflight import Job
from bstune.records import TrialResult
from bstune.search.foretell import ideal_value
from bstune.search.frontier import Coordinates
from bstune.search.hint import study_prior
from bstune.search.known import Known, learn
from bstune.search.mapping import b_crit_quantiles
from bstune.search.study import distributions

INTERVAL = (0.05, 0.95)  # of B_crit's posterior, for search.precision
MOVES = 10  # of its sampler: at the few of a decision, intervals come out too narrow


def own_arguments(job: Job, ended: Collection[int] = ()) -> dict[str, Any]:
    """Return what bstune's own sampler is told of the job, where ``ended`` trials go no further."""
    space = job.space

    def resumable(number: int) -> bool:
        return number not in ended and job.runner.resumable(number, job.output)

    return {
        "objective": job.plan.objective,
        "rule": space.rule,
        "budget": lambda batch_size: float(job.protocol.budget.last_step(round(batch_size))),
        "target": job.protocol.target,
        "ideal": _ideal(job),
        "resumable": resumable if job.runner.stops else None,
        "snap": space.snap,
        "lr_range": (space.lr_low, space.lr_high),
        "step_time": job.runner.step_time,
        "search_space": distributions(space),
    }


def _ideal(job: Job) -> float | None:
    bounds = job.config.workload.target.bounds
    return ideal_value(job.protocol.target, None if bounds is None else list(bounds))


def known_of(job: Job, done: Sequence[TrialResult], particles: int) -> Known:
    """Return the posterior of the frontier after these trials, whatever sampler asked them."""
    space = job.space
    coordinates = Coordinates(distributions(space), space.rule, space.snap, (space.lr_low, space.lr_high))
    prior = study_prior(
        done,
        low=space.low,
        high=space.high,
        rule=coordinates.log_rule,
        budget=lambda batch_size: job.protocol.budget.last_step(round(batch_size)),
        sigma=job.config.scaling.level_sigma,
        exponent_sigma=job.config.scaling.exponent_sigma,
        noise_scale=job.config.scaling.noise_scale,
        others=coordinates.columns,
    )
    return learn(
        [trial for trial in done if trial.status != "failed"],
        {trial.number: coordinates.others(trial.settings) for trial in done},
        prior=prior,
        target=job.protocol.target,
        ideal=_ideal(job),
        step_time=job.runner.step_time,
        in_examples=False,
        particles=particles,
        moves=MOVES,
        rng=np.random.default_rng(job.plan.seed),
    )


def b_crit_interval(job: Job, known: Known) -> list[float]:
    """Return the low end, the median and the high end of B_crit's interval, in examples."""
    rng = np.random.default_rng([job.plan.seed, len(known.arms)])
    return [float(value) for value in b_crit_quantiles(known, (INTERVAL[0], 0.5, INTERVAL[1]), rng)]
