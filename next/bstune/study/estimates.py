"""The step time and the law's posterior, as the records of a study tell them."""

from collections.abc import Sequence

from bstune.core.records import Record, StepTime
from bstune.core.step_time import step_time_of_trials
from bstune.search.posterior import Posterior, sample_posterior
from bstune.study.plan import Plan

# Draws and moves of the posterior that the answer stands on. By the sampler's seed alone B_crit
# then moves by 2 to 6% on four recorded studies; with half the moves by up to 17%.
DRAWS = 600
MOVES = 12


def step_time_of(plan: Plan, records: Sequence[Record]) -> StepTime:
    """tau(B), in seconds: known beforehand, or by the survey's timings and the trials' own."""
    return plan.step_time or step_time_of_trials(records, 2.0**plan.space.middle, plan.timings)


def answer_posterior(plan: Plan, records: Sequence[Record]) -> Posterior:
    """The posterior of all trials, with the misfit, that the answer stands on."""
    return sample_posterior(
        plan.question,
        plan.space,
        records,
        seed=plan.seed,
        misfit=True,
        draws=DRAWS,
        moves=MOVES,
    )
