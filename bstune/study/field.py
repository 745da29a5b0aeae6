"""Who may be the best configuration: the candidates, compared by the search and the new seeds."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bstune.core.question import Question
from bstune.core.records import Records, Spec, StepTime, last_of_chains
from bstune.core.space import Space
from bstune.core.step_time import StepTimeModel
from bstune.search.findings import Prediction, predictions
from bstune.search.metric import behind_best
from bstune.search.posterior import Posterior, places_of, sample_posterior
from bstune.study.confirm import (
    LAW_DEGREES,
    SURE,
    Candidate,
    Outcome,
    SeedDeviation,
    predicted_share,
)
from bstune.study.estimates import step_time_of
from bstune.study.plan import Plan
from bstune.study.trials import least_steps, new_seeds_of, without_new_seeds

# A run tells whether its seed reaches the target where it was allowed so many times the steps that
# are predicted.
ALLOWED = 2.0
# 5% of a normal distribution lie beyond so many standard deviations.
NORMAL_95 = 1.645


@dataclass(frozen=True)
class Field:
    """Who may be the best, and what the choice and the claims stand on."""

    candidates: list[Candidate]
    """Other than the baseline; none where nothing else reached the target."""
    runs: dict[int, list[float | None]]
    """Log value of each run on new seeds, by the number of its candidate; None for a miss."""
    noise: float
    """Standard deviation of log steps from seed to seed."""
    outcomes: list[Outcome]
    """Of the runs that tell of the share of seeds which reach the target."""
    step_time: StepTime
    """tau(B) by which they are compared, as of :func:`_tied_step_time`."""

    @property
    def deviation_of_law(self) -> SeedDeviation:
        """The law's own deviation, before any new seed."""
        return SeedDeviation(self.noise, LAW_DEGREES)


def field_of(plan: Plan, records: Records) -> Field:
    """Who may be the best, by the search's trials and the new seeds."""
    # New seeds of a configuration do not count for its prediction.
    of_search = without_new_seeds(records)
    step_time = step_time_of(plan, records)
    posterior = sample_posterior(plan.question, plan.space, of_search, seed=plan.seed)
    predicted = _predictions_of_others(plan, posterior, step_time)
    if predicted and plan.question.counts_seconds and isinstance(step_time, StepTimeModel):
        best = min(predicted, key=lambda one: one.log_value)
        step_time = _tied_step_time(step_time, best.record.batch_size)
        predicted = _predictions_of_others(plan, posterior, step_time)
    outcomes = _outcomes(plan, posterior, records)
    log_values = _log_values(plan.question, records, step_time)
    runs: dict[int, list[float | None]] = {}
    for prediction in predicted:
        number = prediction.record.number
        runs[number] = [log_values.get(run.number) for run in new_seeds_of(records, number)]
    return Field(
        candidates=[_candidate(plan, prediction, outcomes) for prediction in predicted],
        runs=runs,
        noise=posterior.noise,
        outcomes=outcomes,
        step_time=step_time,
    )


def _predictions_of_others(
    plan: Plan, posterior: Posterior, step_time: StepTime
) -> list[Prediction]:
    """What new seeds of each configuration but the baseline are predicted to take."""
    predicted = predictions(posterior, plan.question, step_time)
    return [one for one in predicted if not plan.is_baseline(one.record)]


def _tied_step_time(step_time: StepTimeModel, best: int) -> StepTime:
    """tau(B) that is the best size's wherever the 90% intervals of both overlap.

    What differs by less than is known does not decide: steps do.
    """
    log_best = math.log(step_time(best))
    error = step_time.error(best)

    def tied(batch_size: float) -> float:
        distance = abs(math.log(step_time(batch_size)) - log_best)
        overlap = distance < NORMAL_95 * (error + step_time.error(batch_size))
        return step_time(best if overlap else batch_size)

    return tied


def _candidate(plan: Plan, prediction: Prediction, outcomes: Sequence[Outcome]) -> Candidate:
    """A configuration as the choice sees it."""
    record = prediction.record
    log_value = prediction.log_value
    schedule_steps = None
    if prediction.length is None:
        share = predicted_share(*place_of(plan.space, record), outcomes, prior=SURE)
    else:
        # Its schedule's length decides how many seeds reach; the value has their misses.
        share = prediction.length.share
        log_value += math.log(share)
        schedule_steps = math.ceil(prediction.length.steps)
    rank = 0
    if plan.question.counts_steps:
        # Of sizes that tie in steps the smallest costs least.
        rank = record.batch_size
    return Candidate(
        number=record.number,
        log_value=log_value,
        deviation=prediction.deviation,
        share=share,
        rank=rank,
        schedule_steps=schedule_steps,
    )


def place_of(space: Space, spec: Spec) -> tuple[float, float]:
    """Where a configuration stands among others: log2 of its size, and of its rate by the rule."""
    return math.log2(spec.batch_size), math.log2(spec.lr / space.rule_lr(spec.batch_size))


def _log_values(question: Question, records: Records, step_time: StepTime) -> dict[int, float]:
    """Log of what each run that reached took, in what the question minimises, by its number."""
    chains = [chain for chain in last_of_chains(records) if chain.steps > 0]
    log_values = {}
    if question.seeks_metric:
        for chain, behind in zip(chains, behind_best(chains, question), strict=True):
            if chain.reached and behind is not None:
                log_values[chain.number] = behind.log_factor
        return log_values
    for chain in chains:
        if chain.reached:
            value = question.value(least_steps(chain), chain.batch_size, step_time)
            log_values[chain.number] = math.log(value)
    return log_values


def _outcomes(plan: Plan, posterior: Posterior, records: Records) -> list[Outcome]:
    """The runs that tell of the share of seeds which reach the target.

    They are those that were allowed ``ALLOWED`` times their predicted steps, or the whole budget,
    however they ended: most trials of the search are stopped too early to tell.
    """
    runs = last_of_chains([record for record in records if record.steps > 0])
    log_steps = posterior.law.log_steps(posterior.theta, *places_of(plan.space, runs))
    predicted = np.exp(log_steps.mean(axis=0))
    outcomes = []
    for run, steps in zip(runs, predicted, strict=True):
        # A time limit may have ended a pruned one before its last step.
        allowed = run.steps if run.status == "pruned" else run.max_steps
        budget = plan.question.last_step(run.batch_size)
        if allowed >= min(ALLOWED * steps, budget):
            place = place_of(plan.space, run)
            outcomes.append(Outcome(*place, run.reached, run.role == "search"))
    return outcomes
