"""New seeds of the best configuration and of the baseline: which run is next, and what all take."""

import math
import statistics
from collections.abc import Collection, Sequence

from bstune.core.records import Record, Records, Spec
from bstune.search.decide import first_evaluation
from bstune.study.confirm import Candidate, best_confirmed, next_confirmation
from bstune.study.deadline import Deadline
from bstune.study.estimates import step_time_of
from bstune.study.field import Field, field_of
from bstune.study.plan import Ask, Plan, trial_seed
from bstune.study.trials import (
    baseline_of,
    first_free,
    least_steps,
    new_seeds_of,
    record_numbered,
    took_seconds,
)

# Runs on new seeds end after so many times the steps that are predicted, and under a time limit the
# baseline's after so many times the best's value.
NEW_SEED_LIMIT = 4


def confirmation_seconds(
    plan: Plan, deadline: Deadline, records: Records, now: float
) -> float | None:
    """Seconds of all runs on new seeds, by the search's trials, and of the choice between two runs.

    None while no other configuration than the baseline has reached the target.
    """
    search_seconds = []
    for record in records:
        if record.reached and record.role == "search" and not plan.is_baseline(record):
            search_seconds.append(took_seconds(record, records))
    if not search_seconds:
        return None
    of_best = statistics.median(search_seconds)
    of_baseline = 0.0
    baseline = baseline_of(records)
    if baseline is not None:
        of_baseline = NEW_SEED_LIMIT * of_best
        if baseline.reached:
            of_baseline = min(of_baseline, took_seconds(baseline, records))
    all_took = sum(record.train_seconds + record.other_seconds for record in records)
    between = deadline.seconds_between_trials(now, all_took, len(records))
    return plan.seeds * (of_best + of_baseline + 2.0 * between)


def ask_new_seed(plan: Plan, records: Records, running: Sequence[Spec], now: float) -> Ask | None:
    """The next run on a new seed: the best configuration first, then the baseline.

    Under a time limit the baseline follows on each seed, so that there are pairs whenever the time
    is over, and nothing begins that has not the time that it or the best takes.
    """
    field = field_of(plan, records)
    by_number = {candidate.number: candidate for candidate in field.candidates}
    for spec in running:
        # A running one counts as done at its prediction.
        if spec.repeats in by_number:
            candidate = by_number[spec.repeats]
            field.runs[candidate.number].append(candidate.log_value)
    leader = best_confirmed(field.candidates, field.runs, field.noise)
    if leader is None:
        return None
    before = _runs_before_search(records, by_number)
    number = next_confirmation(field.candidates, field.runs, plan.seeds, field.noise, before)
    asked = None
    if number is None or plan.deadline is not None:
        asked = _ask_seed_of_baseline(plan, records, running, field)
    if asked is None and number is not None:
        asked = _ask_seed_of_candidate(plan, field, records, running, by_number[number])
    if asked is not None and plan.deadline is not None:
        took = _seconds_on_new_seed(leader, records)
        if asked.repeats is not None:
            took = min(took, _seconds_on_new_seed(asked.repeats, records))
        if now + took > plan.deadline.end:
            return None
    return asked


def _seconds_on_new_seed(number: int, records: Records) -> float:
    """What a configuration takes on a new seed; before the first one what its trial took."""
    runs = new_seeds_of(records, number) or [record_numbered(records, number)]
    return statistics.median(took_seconds(run, records) for run in runs)


def _runs_before_search(records: Records, candidates: Collection[int]) -> int:
    """How many runs on new seeds of the candidates the search's last trial came after."""
    before = 0
    so_far = 0
    for record in records:
        if record.repeats in candidates:
            so_far += 1
        elif record.role == "search":
            before = so_far
    return before


def _ask_seed_of_candidate(
    plan: Plan,
    field: Field,
    records: Records,
    running: Sequence[Spec],
    candidate: Candidate,
) -> Ask:
    """A candidate's next run, which ends after ``NEW_SEED_LIMIT`` times its predicted steps."""
    record = record_numbered(records, candidate.number)
    schedule_steps = candidate.schedule_steps
    earlier = new_seeds_of(records, candidate.number)
    if earlier:
        # All new seeds of a configuration have the schedule of its first one.
        schedule_steps = earlier[0].schedule_steps
    per_step = plan.question.value(1.0, record.batch_size, field.step_time)
    predicted = math.exp(candidate.log_value) / per_step
    most_steps = schedule_steps or math.ceil(NEW_SEED_LIMIT * max(predicted, record.steps))
    return _ask_on_new_seed(plan, records, running, record, most_steps, schedule_steps)


def _ask_seed_of_baseline(
    plan: Plan, records: Records, running: Sequence[Spec], field: Field
) -> Ask | None:
    """The baseline's next run on a seed that a candidate has run on; None: no more.

    Under a time limit it ends after ``NEW_SEED_LIMIT`` times what that candidate takes to the
    target.
    """
    baseline = baseline_of(records)
    if baseline is None:
        return None
    of_others = [new_seeds_of(records, candidate.number) for candidate in field.candidates]
    of_other = max(of_others, key=len)
    of_baseline = new_seeds_of(records, baseline.number)
    at_work = sum(spec.repeats == baseline.number for spec in running)
    if len(of_baseline) + at_work >= len(of_other):
        return None
    step_time = step_time_of(plan, records)
    most_steps = plan.question.last_step(baseline.batch_size)
    if plan.deadline is not None and not plan.question.seeks_metric:
        steps = statistics.median(map(least_steps, of_other))
        value = plan.question.value(steps, of_other[0].batch_size, step_time)
        per_step = plan.question.value(1.0, baseline.batch_size, step_time)
        most_steps = math.ceil(NEW_SEED_LIMIT * value / per_step)
    return _ask_on_new_seed(plan, records, running, baseline, most_steps, baseline.schedule_steps)


def _ask_on_new_seed(
    plan: Plan,
    records: Records,
    running: Sequence[Spec],
    record: Record,
    most_steps: int,
    schedule_steps: int | None,
) -> Ask:
    """Ask a trial's configuration on its first free seed; all configurations share the seeds."""
    index = first_free(f"seed/{record.number}", records, running)
    budget = plan.question.last_step(record.batch_size)
    return Ask(
        place=f"seed/{record.number}/{index}",
        role="new seed",
        batch_size=record.batch_size,
        lr=record.lr,
        values=record.values,
        seed=trial_seed(plan.seed, f"seed/{index}"),
        max_steps=min(most_steps, budget),
        schedule_steps=schedule_steps,
        first_evaluation=first_evaluation(record.steps),
        repeats=record.number,
        until=plan.end,
    )
