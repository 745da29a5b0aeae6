"""What a study does next: one pure function of its records.

The baseline first, then the search, then new seeds for its best configuration and for the baseline;
under ``curve`` the search alone, until B_crit is known. Under a time limit
:mod:`bstune.study.deadline` says how long each may take.
Any process that sees the same records plans the same step, so that a study can be killed and
continued anywhere.
"""

import hashlib
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from bstune.core.errors import BstuneError, InputError, UserCodeError
from bstune.core.question import Question
from bstune.core.records import Frozen, Record, Role, Spec, StepTime, ends
from bstune.core.space import Configuration, Space
from bstune.core.step_time import StepTimeModel, Surveyed, step_time_of_trials
from bstune.search.decide import FIRST_EVALUATION, Proposal, propose
from bstune.search.findings import Prediction, predictions
from bstune.search.fit import NOTHING, Ends, sizes_to_try, trained_sizes
from bstune.search.limits import LEAST_STEPS
from bstune.search.posterior import Posterior, sample_posterior
from bstune.study.confirm import (
    SURE,
    Candidate,
    Outcome,
    best_confirmed,
    next_confirmation,
    predicted_share,
)
from bstune.study.critical import critical_batch_size, is_narrow
from bstune.study.deadline import Deadline

# Runs on new seeds end after so many times the steps that are predicted, and under a time limit the
# baseline's after so many times the best's value.
NEW_SEED_LIMIT = 4
# A run tells whether its seed reaches the target where it was allowed so many times the steps that
# are predicted.
ALLOWED = 2.0
# The search may take so many places a configuration: resumptions and sizes that do not fit, too.
PLACES_PER_CONFIGURATION = 3
# The first configurations lie this far from a baseline that reached the target, in rate and in
# batch size, and run to this share of the steps with which they would be as good as the best. On
# five recorded tables with 8 seeds, from the shipped baselines and from a fourth of their rates,
# the choice then takes 0.85 times the time or steps after 5 times the best cell's cost, 0.95 after
# 10 and 0.99 after 20; a share of 0.48, or all four whatever the rates gave, is no better.
NEAR = 3.0
NEAR_SHARE = 0.7
# Under ``curve`` the search ends once B_crit's interval is narrow, and so many trials have reached
# the target.
LEAST_FOR_CURVE = 8
# 5% of a normal distribution lie beyond so many standard deviations.
NORMAL_95 = 1.645
# Failures that end a study with the user's own error.
FAILURES = 3
# Draws and moves of the posterior that the answer stands on. By the sampler's seed alone B_crit
# then moves by 2 to 6% on four recorded studies; with half the moves by up to 17%.
DRAWS = 600
MOVES = 12


class Ask(Frozen):
    """A trial to run: a spec without a number, which the storage gives."""

    place: str
    role: Role
    batch_size: int
    lr: float
    values: dict[str, int | float] = {}
    seed: int
    max_steps: int
    schedule_steps: int | None = None
    first_evaluation: int | None = None
    resumed_from: int | None = None
    repeats: int | None = None
    until: float | None = None
    """The time at which it stops, by the clock that ``now`` was read from; None: no limit."""


@dataclass(frozen=True)
class Wait:
    """Other processes run what this one waits for."""


@dataclass(frozen=True)
class Done:
    """Nothing is left to run."""


@dataclass(frozen=True)
class Plan:
    """All that decides what a study does, but for its records.

    Args:
        trials: configurations of the search, the baseline not counted.
        seeds: new seeds of the best and the baseline.
        seed: of the study, from which all others follow.
        step_time: tau(B) where it is known beforehand; None: it is fitted to the trials.
        resumable: whether a pruned trial can be resumed here.
        fits: what a survey has found of batch sizes.
        timings: of a survey: batch size, seconds of a step, their relative standard deviation.
    """

    question: Question
    space: Space
    baseline: Configuration | None
    trials: int
    seeds: int
    seed: int
    deadline: Deadline | None = None
    step_time: StepTime | None = None
    resumable: Callable[[int], bool] = lambda number: True
    fits: Ends = NOTHING
    timings: tuple[Surveyed, ...] = ()


def next_step(
    plan: Plan, records: Sequence[Record], running: Sequence[Spec], now: float
) -> Ask | Wait | Done:
    """Plan the next step.

    Args:
        plan: what stays fixed.
        records: of all finished trials, in order of their numbers.
        running: the trials that run somewhere.
        now: the time, in seconds.
    """
    if plan.baseline is not None and not _taken(records, running, "baseline"):
        return _ask_baseline(plan, plan.baseline, now)
    if _searches(plan, records, running, now):
        return _ask_search(plan, records, running, now)
    if any(spec.role != "new seed" for spec in running):
        return Wait()
    if not plan.question.seeks_best:
        return Done()
    step = _ask_new_seed(plan, records, running, now)
    if step is not None:
        return step
    return Wait() if running else Done()


def trial_seed(study_seed: int, place: str) -> int:
    """The seed of a place in the plan, 31 bits."""
    digest = hashlib.sha256(f"{study_seed}/{place}".encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1


def step_time_of(plan: Plan, records: Sequence[Record]) -> StepTime:
    """tau(B), in seconds: known beforehand, or by the survey's timings and the trials' own."""
    return plan.step_time or step_time_of_trials(records, 2.0**plan.space.middle, plan.timings)


def search_posterior(plan: Plan, records: Sequence[Record]) -> Posterior:
    """The posterior of the trials before new seeds, by which configurations are chosen for them."""
    of_search = [record for record in records if record.role != "new seed"]
    return sample_posterior(plan.question, plan.space, of_search, seed=plan.seed)


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


def field_of(plan: Plan, records: Sequence[Record]) -> Field:
    """Who may be the best, by the search's trials and the new seeds."""
    posterior = search_posterior(plan, records)
    step_time = step_time_of(plan, records)
    outcomes = _outcomes(plan, posterior, records)
    candidates = []
    runs: dict[int, list[float | None]] = {}

    def others(step_time: StepTime) -> list[Prediction]:
        predicted = predictions(posterior, plan.question, step_time)
        own = plan.baseline
        return [one for one in predicted if own is None or not is_of(one.record, own)]

    if isinstance(step_time, StepTimeModel) and others(step_time):
        best = min(others(step_time), key=lambda one: one.log_value)
        step_time = _tied_step_time(step_time, best.record.batch_size)
    for prediction in others(step_time):
        record = prediction.record
        share = predicted_share(*place_of(plan.space, record), outcomes, prior=SURE)
        log_value = prediction.log_value
        length = None
        if prediction.length is not None:
            # Its length decides how many seeds reach; the value has their misses.
            share = prediction.length.share
            log_value += math.log(share)
            length = math.ceil(prediction.length.steps)
        # Of sizes that tie in steps the smallest costs least.
        rank = record.batch_size if plan.question.objective == "steps" else 0
        candidates.append(
            Candidate(record.number, log_value, prediction.deviation, share, rank, length)
        )
        for run in new_seeds_of(records, record.number):
            value = plan.question.value(least_steps(run), run.batch_size, step_time)
            runs.setdefault(record.number, []).append(math.log(value) if run.reached else None)
    return Field(candidates, runs, posterior.noise, outcomes, step_time)


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


def place_of(space: Space, spec: Spec) -> tuple[float, float]:
    """Where a configuration stands among others: log2 of its size, and of its rate by the rule."""
    return math.log2(spec.batch_size), math.log2(spec.lr / space.rule_lr(spec.batch_size))


def _outcomes(plan: Plan, posterior: Posterior, records: Sequence[Record]) -> list[Outcome]:
    """The runs that tell of the share of seeds which reach the target.

    They are those that were allowed ``ALLOWED`` times their predicted steps, or the whole budget,
    however they ended: most trials of the search are stopped too early to tell.
    """
    runs = ends([record for record in records if record.steps > 0])
    x = np.log2([run.batch_size for run in runs])
    z = np.log2([run.lr for run in runs])
    predicted = np.exp(posterior.law.log_steps(posterior.theta, x, z).mean(axis=0))
    outcomes = []
    for run, steps in zip(runs, predicted, strict=True):
        # A time limit may have ended a pruned one before its last step.
        allowed = run.steps if run.status == "pruned" else run.max_steps
        budget = plan.question.budget.last_step(run.batch_size)
        if allowed >= min(ALLOWED * steps, budget):
            place = place_of(plan.space, run)
            outcomes.append(Outcome(*place, run.reached, run.role == "search"))
    return outcomes


def least_steps(run: Record) -> float:
    """Steps to the target, or those that a run was seen not to reach it in; at least 1.

    A run that diverged or failed would not have reached it in all that it was allowed.
    """
    if run.status in ("reached", "missed", "pruned"):
        return max(run.steps_to_target, 1.0)
    return float(run.max_steps)


def is_of(record: Spec, configuration: Configuration) -> bool:
    """Whether a trial ran a configuration."""
    same_pair = (record.batch_size, record.lr) == (configuration.batch_size, configuration.lr)
    return same_pair and record.values == configuration.values


def baseline_of(records: Sequence[Record]) -> Record | None:
    """The baseline's first run; where it failed and the error was mended, the one after that."""
    baselines = [record for record in records if record.role == "baseline"]
    return baselines[-1] if baselines else None


def new_seeds_of(records: Sequence[Record], number: int) -> list[Record]:
    """The finished runs of a trial's configuration on new seeds, in the order of the seeds."""
    runs = ends([record for record in records if record.repeats == number])
    return sorted(runs, key=lambda record: int(record.place.rpartition("/")[2]))


def fatal_error(space: Space, records: Sequence[Record], since: int = 0) -> BstuneError | None:
    """The error that ends a study; None: it goes on.

    It is that of three failed trials in a row at sizes at which another trial has trained. While no
    size has trained, it is that of three trials that failed or were refused, or of the smallest
    size where memory is short for that.

    Args:
        space: of the study.
        records: of all finished trials.
        since: the number of the first trial that counts as a failure.
    """
    trained = trained_sizes([record for record in records if record.status != "failed"])
    recent = [record for record in records if record.number >= since]
    for record in recent:
        is_smallest = record.batch_size == space.low
        if not trained and is_smallest and record.status == "out of memory":
            return InputError(record.message)
    counted = [record for record in recent if record.status in ("failed", "refused")]
    if trained:
        recent = [record for record in recent if record.batch_size in trained][-FAILURES:]
        counted = [record for record in recent if record.status == "failed"]
    if len(counted) < FAILURES:
        return None
    return UserCodeError(counted[-1].message)


def count_configurations(records: Sequence[Record], running: Sequence[Spec] = ()) -> int:
    """How many configurations the search has tried.

    A resumption is none, and neither is a size that does not fit or that the user's code refuses.
    """
    unfit = {record.number for record in records if record.is_unfit}
    tried = [spec for spec in (*records, *running) if spec.role == "search"]
    return sum(spec.resumed_from is None and spec.number not in unfit for spec in tried)


def _taken(records: Sequence[Record], running: Sequence[Spec], place: str) -> bool:
    return any(spec.place == place for spec in (*records, *running))


def _ask_baseline(plan: Plan, baseline: Configuration, now: float) -> Ask:
    last_step = plan.question.budget.last_step(baseline.batch_size)
    return Ask(
        place="baseline",
        role="baseline",
        **baseline.model_dump(),
        seed=trial_seed(plan.seed, "baseline"),
        max_steps=last_step,
        schedule_steps=last_step if plan.question.schedule_ends else None,
        first_evaluation=max(int(FIRST_EVALUATION * last_step), 1),
        until=None if plan.deadline is None else now + plan.deadline.baseline_seconds,
    )


def _searches(plan: Plan, records: Sequence[Record], running: Sequence[Spec], now: float) -> bool:
    """Whether the search goes on."""
    if plan.deadline is not None:
        took = _confirmation_seconds(plan, plan.deadline, records, now)
        # Without another configuration that reaches the target new seeds would have nothing to do.
        end = plan.deadline.end if took is None else _search_end(plan, plan.deadline, records, now)
        if now > end:
            return False
    places = [spec for spec in (*records, *running) if spec.role == "search"]
    has_room = len(places) < PLACES_PER_CONFIGURATION * plan.trials
    if count_configurations(records, running) >= plan.trials or not has_room:
        return False
    return plan.question.seeks_best or not _is_b_crit_known(plan, records)


def _is_b_crit_known(plan: Plan, records: Sequence[Record]) -> bool:
    """Whether B_crit's 90% interval, as the answer states it, is narrow."""
    if sum(record.reached for record in records) < LEAST_FOR_CURVE:
        return False
    return is_narrow(critical_batch_size(answer_posterior(plan, records), records).interval)


def took_seconds(record: Record, records: Sequence[Record]) -> float:
    """What a trial took, in seconds by the clock on the wall, with those that it resumes."""
    seconds = record.train_seconds + record.other_seconds
    for parent in records:
        if parent.number == record.resumed_from:
            seconds += took_seconds(parent, records)
    return seconds


def _confirmation_seconds(
    plan: Plan, deadline: Deadline, records: Sequence[Record], now: float
) -> float | None:
    """What all runs on new seeds would take, by the search's trials, with the time between two.

    None while no other configuration than the baseline has reached the target.
    """
    took = []
    for record in records:
        is_other = plan.baseline is None or not is_of(record, plan.baseline)
        if record.reached and record.role == "search" and is_other:
            took.append(took_seconds(record, records))
    if not took:
        return None
    of_best = statistics.median(took)
    of_baseline = 0.0
    baseline = baseline_of(records)
    if baseline is not None:
        of_baseline = NEW_SEED_LIMIT * of_best
        if baseline.reached:
            of_baseline = min(of_baseline, took_seconds(baseline, records))
    all_took = sum(record.train_seconds + record.other_seconds for record in records)
    between = deadline.between_trials(now, all_took, len(records))
    return plan.seeds * (of_best + of_baseline + 2.0 * between)


def _search_end(plan: Plan, deadline: Deadline, records: Sequence[Record], now: float) -> float:
    """When the search ends under a time limit."""
    if not plan.question.seeks_best:
        return deadline.end
    baseline = baseline_of(records)
    of_baseline = 0.0 if baseline is None else took_seconds(baseline, records)
    confirmation = _confirmation_seconds(plan, deadline, records, now)
    return deadline.search_end(of_baseline, confirmation)


def _near_baseline(
    plan: Plan, records: Sequence[Record], running: Sequence[Spec]
) -> Proposal | None:
    """The next of the first configurations, which lie near a baseline that reached the target.

    They are three times its rate and, unless that reached the target, a third of it; then three
    times its batch size and a third of it, at the rule's rate times what helped at its own.
    """
    baseline = baseline_of(records)
    # Nobody has measured whether they help the curve, or schedules that end with their trials.
    is_wanted = plan.deadline is not None or not plan.question.schedule_ends
    if not (is_wanted and plan.question.seeks_best and baseline is not None and baseline.reached):
        return None
    space = sizes_to_try(plan.space, records, plan.fits)
    step_time = step_time_of(plan, records)
    size, lr = baseline.batch_size, baseline.lr

    def value(record: Record) -> float:
        return plan.question.value(record.steps_to_target, record.batch_size, step_time)

    tried = {(spec.batch_size, spec.lr) for spec in (*records, *running)}
    reached = [one for one in records if one.reached and one.role != "new seed"]
    at_size = [one for one in reached if one.batch_size == size]
    rates = [NEAR * lr] if len(at_size) > 1 else [NEAR * lr, lr / NEAR]
    pairs = [(size, space.snap_lr(rate)) for rate in rates]
    factor = min(at_size, key=value).lr / lr
    sizes = {tried_size for tried_size, _ in tried}
    for other in (space.snap(NEAR * size), space.snap(size / NEAR)):
        if other not in sizes:
            pairs.append((other, space.snap_lr(factor * space.rule_lr(other))))
    for batch_size, rate in pairs:
        if (batch_size, rate) in tried:
            continue
        as_good = min(map(value, reached)) / plan.question.value(1.0, batch_size, step_time)
        steps = NEAR_SHARE * as_good
        if baseline.schedule_steps is not None:
            length = baseline.schedule_steps
            steps = min(max(steps, length / NEAR), length * NEAR)
        last_step = plan.question.budget.last_step(batch_size)
        return Proposal(
            batch_size=batch_size,
            lr=rate,
            max_steps=min(max(math.ceil(steps), LEAST_STEPS), last_step),
            resumed_from=None,
            first_evaluation=max(int(FIRST_EVALUATION * as_good), 1),
        )
    return None


def _ask_search(plan: Plan, records: Sequence[Record], running: Sequence[Spec], now: float) -> Ask:
    place = 0
    while _taken(records, running, f"search/{place}"):
        place += 1
    until = None
    if plan.deadline is not None:
        end = _search_end(plan, plan.deadline, records, now)
        until = plan.deadline.trial_until(now, end)
    proposal = _near_baseline(plan, records, running) or propose(
        plan.question,
        plan.space,
        step_time_of(plan, records),
        [record for record in records if record.role != "new seed"],
        plan.seed,
        running,
        resumable=plan.resumable,
        fits=plan.fits,
    )
    seed = trial_seed(plan.seed, f"search/{place}")
    values: dict[str, int | float] = {}
    if proposal.resumed_from is not None:
        parent = next(record for record in records if record.number == proposal.resumed_from)
        seed = parent.seed
        values = parent.values
    return Ask(
        place=f"search/{place}",
        role="search",
        batch_size=proposal.batch_size,
        lr=proposal.lr,
        values=values,
        seed=seed,
        max_steps=proposal.max_steps,
        schedule_steps=proposal.max_steps if plan.question.schedule_ends else None,
        first_evaluation=proposal.first_evaluation,
        resumed_from=proposal.resumed_from,
        until=until,
    )


def _ask_new_seed(
    plan: Plan, records: Sequence[Record], running: Sequence[Spec], now: float
) -> Ask | None:
    """The next run on a new seed: the best configuration first, then the baseline.

    Under a time limit the baseline follows on each seed, so that there are pairs whenever the time
    is over, and nothing begins that has not the time that the best takes.
    """
    field = field_of(plan, records)
    by_number = {candidate.number: candidate for candidate in field.candidates}
    for spec in running:
        # A running one counts as done at its prediction.
        if spec.repeats in by_number:
            candidate = by_number[spec.repeats]
            field.runs.setdefault(candidate.number, []).append(candidate.log_value)
    leader = best_confirmed(field.candidates, field.runs, field.noise)
    if leader is None:
        return None
    if plan.deadline is not None:
        of_leader = new_seeds_of(records, leader) or [
            record for record in records if record.number == leader
        ]
        took = statistics.median(took_seconds(run, records) for run in of_leader)
        if now + took > plan.deadline.end:
            return None
    last = max((record.number for record in records if record.role == "search"), default=0)
    before = sum(record.repeats in by_number and record.number < last for record in records)
    number = next_confirmation(field.candidates, field.runs, plan.seeds, field.noise, before)
    asked = None
    if number is None or plan.deadline is not None:
        asked = _ask_seed_of_baseline(plan, records, running, field)
    if asked is None and number is not None:
        asked = _ask_seed_of_candidate(plan, field, records, running, by_number[number])
    return asked or _ask_stopped(plan, records, running)


def _ask_seed_of_candidate(
    plan: Plan,
    field: Field,
    records: Sequence[Record],
    running: Sequence[Spec],
    candidate: Candidate,
) -> Ask:
    record = next(record for record in records if record.number == candidate.number)
    # All new seeds of a configuration have the schedule of its first one.
    lengths = [run.schedule_steps for run in new_seeds_of(records, candidate.number)]
    length = lengths[0] if lengths else candidate.schedule_steps
    per_step = plan.question.value(1.0, record.batch_size, field.step_time)
    predicted = math.exp(candidate.log_value) / per_step
    limit = math.ceil(NEW_SEED_LIMIT * max(predicted, record.steps))
    return _repeat(plan, records, running, record, length or limit, length)


def _ask_seed_of_baseline(
    plan: Plan, records: Sequence[Record], running: Sequence[Spec], field: Field
) -> Ask | None:
    """The baseline's next run on a seed that a candidate has run on; None: no more.

    Under a time limit it ends after ``NEW_SEED_LIMIT`` times what that candidate takes.
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
    limit = plan.question.budget.last_step(baseline.batch_size)
    if plan.deadline is not None:
        step_time = step_time_of(plan, records)
        steps = statistics.median(map(least_steps, of_other))
        value = plan.question.value(steps, of_other[0].batch_size, step_time)
        per_step = plan.question.value(1.0, baseline.batch_size, step_time)
        limit = math.ceil(NEW_SEED_LIMIT * value / per_step)
    return _repeat(plan, records, running, baseline, limit, baseline.schedule_steps)


# What a resumed run has of the one before; how it is evaluated, too.
_OF_RESUMED = {
    *("role", "batch_size", "lr", "values", "seed"),
    *("schedule_steps", "first_evaluation", "repeats"),
}


def _ask_stopped(plan: Plan, records: Sequence[Record], running: Sequence[Spec]) -> Ask | None:
    """Resume the baseline's next run on a new seed that a time limit stopped; None: no more."""
    baseline = baseline_of(records)
    if baseline is None:
        return None
    for run in new_seeds_of(records, baseline.number):
        place = f"resumed/{run.number}/{run.place.rpartition('/')[2]}"
        is_free = not _taken(records, running, place) and plan.resumable(run.number)
        if run.status == "pruned" and is_free:
            return Ask(
                **run.model_dump(include=_OF_RESUMED),
                place=place,
                max_steps=plan.question.budget.last_step(run.batch_size),
                resumed_from=run.number,
                until=_end(plan),
            )
    return None


def _repeat(
    plan: Plan,
    records: Sequence[Record],
    running: Sequence[Spec],
    record: Record,
    limit: int,
    schedule_steps: int | None,
) -> Ask:
    """Ask a trial's configuration on its first free seed; all configurations share the seeds."""
    index = 0
    while _taken(records, running, f"seed/{record.number}/{index}"):
        index += 1
    budget = plan.question.budget.last_step(record.batch_size)
    return Ask(
        place=f"seed/{record.number}/{index}",
        role="new seed",
        batch_size=record.batch_size,
        lr=record.lr,
        values=record.values,
        seed=trial_seed(plan.seed, f"seed/{index}"),
        max_steps=min(limit, budget),
        schedule_steps=schedule_steps,
        first_evaluation=max(int(FIRST_EVALUATION * record.steps), 1),
        repeats=record.number,
        until=_end(plan),
    )


def _end(plan: Plan) -> float | None:
    """When the last trial has to stop under a time limit."""
    return None if plan.deadline is None else plan.deadline.end
