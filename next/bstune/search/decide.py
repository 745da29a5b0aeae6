"""One decision: which configuration is run next, whether a pruned trial is resumed, and how far.

Thompson sampling: one draw of the posterior is taken for the truth, and the candidate of the least
cost in it is chosen, with a bonus for little left to train. A new trial gets a part of what the
best configuration takes, and a pruned one is resumed when a draw prefers it.

Measured on the five shipped tables (``tests/benchmarks/README.md``). 3% of decisions at random made
no difference there. The old search, without resuming, reached the target first after 9.3 in place
of 4.5 times the best trial's cost, and came to 1.24 in place of 1.16 after 10 times.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bstune.core.question import Question
from bstune.core.records import Frozen, Record, Spec, StepTime
from bstune.core.space import Space
from bstune.search.curve_decision import choose_for_curve
from bstune.search.findings import OWN_DEVIATION, Prediction, predictions
from bstune.search.law import NOISE
from bstune.search.posterior import BOUND, Posterior, sample_posterior
from bstune.search.schedule_length import least_cost

Array = NDArray[np.float64]

# Draws of the posterior for a decision, its moves, and the new configurations that are compared, a
# third of them around the best ones. With three times as many of each, 30 searches were 1.28 times
# as far off after 10 times the best trial's cost (90%: 1.07 to 1.57), and as far after 20 and 40
# times; with 48, 1 and 60 they were 1.04 times as far off (0.98 to 1.11) as with these.
DRAWS = 64
MOVES = 2
CANDIDATES = 90
AROUND_BEST = 30
# Under ``curve`` the law has twice the parameters.
CURVE_DRAWS = 192
CURVE_MOVES = 3
BEST = 4
# Their standard deviation, in octaves: of rates around a draw's best one, and of batch size and
# rate around the best configurations.
OCTAVES = 0.5
# The score of a candidate is log(value) + REMAINING_WEIGHT * min(what is left of it / the whole of
# the best, MOST_REMAINING), all predicted by one draw: of two that are as good, the one that is
# nearly done is run. It is a log and a ratio, so that for small differences both are relative.
REMAINING_WEIGHT = 0.5
MOST_REMAINING = 10.0
# Where value and cost differ, log(cost / value) counts by this weight: under ``steps`` the largest
# batch sizes take the fewest steps, and many examples.
COST_WEIGHT = 0.1
# Log steps are kept below this: exp must not overflow.
MOST_LOG_STEPS = 50.0
# No trial runs longer than so many times the best configuration's predicted cost: its give-up cost.
GIVE_UP = 1.2
# A pruned trial that has used this share of the give-up cost is not resumed.
WORTH_RESUMING = 0.95
# A trial first runs to a probe limit, the lesser of this share of the give-up cost and this share
# of its own prediction. One that has run this share of its probe limit may run to the give-up cost.
PROBE_OF_GIVE_UP = 0.4
PROBE_OF_OWN = 0.6
TRIED = 0.75
# It then runs to so many times its own prediction: one that is that far off it is compared with
# the others again. Without it, 30 searches were 1.02 times as far off after 20 times the best's
# cost and, under ``steps``, 1.15 times as far off after 5 times.
RESUMED_OF_OWN = 1.5
# Before any trial has reached the target: a share of all that was spent, for a new one and for a
# resumed one, at least this share of the budget. With 0.12 and 0.5, 4 of 60 searches had reached
# nothing after 10 times the best trial's cost, with these one (old search, five tables).
SHARE_OF_SPENT = 0.2
RESUMED_SHARE_OF_SPENT = 0.25
LEAST_SHARE_OF_BUDGET = 1 / 64
# A resumed trial runs on for at least these shares of its steps, before and after the first hit.
LEAST_RESUMED = 1.4
LEAST_RESUMED_AFTER_HIT = 1.3
LEAST_STEPS = 10
# Where schedules end with their trials: before the first hit one costs at most as much as all that
# was spent, so that costs double; then this share of it, or little more than what the best takes.
LENGTH_OF_SPENT = 0.5
# The score of a candidate for each e-fold of steps that it needs over the budget.
OUT_OF_REACH = 1e3


class Proposal(Frozen):
    """What to run next."""

    batch_size: int
    lr: float
    max_steps: int
    """The step at which it stops, steps of the trial that it resumes included."""
    resumed_from: int | None


@dataclass(frozen=True)
class Waiting:
    """A pruned trial that may be resumed, and its place in the posterior's rows."""

    record: Record
    place: int


def propose(
    question: Question,
    space: Space,
    step_time: StepTime,
    records: Sequence[Record],
    seed: int,
    running: Sequence[Spec] = (),
    resumable: Callable[[int], bool] = lambda number: True,
) -> Proposal:
    """Choose what to run next; the same arguments give the same proposal.

    Args:
        question: what is minimised, to which target, within which budget.
        space: the configurations that are allowed.
        step_time: tau(B).
        records: of all finished trials; none is enough.
        seed: of the study.
        running: trials that run elsewhere.
        resumable: whether a pruned trial, by its number, can be resumed.
    """
    is_of_curve = not question.seeks_best
    posterior = sample_posterior(
        question,
        space,
        records,
        seed=seed,
        running=running,
        misfit=is_of_curve,
        draws=CURVE_DRAWS if is_of_curve else DRAWS,
        moves=CURVE_MOVES if is_of_curve else MOVES,
    )
    rng = np.random.default_rng([seed, len(records), len(running), 1])
    best = sorted(predictions(posterior, question, step_time), key=lambda one: one.log_value)
    best_value = math.exp(best[0].log_value) if best else None
    # One whose resumption failed is not tried again.
    resumed_before = {spec.resumed_from for spec in (*records, *running)}
    waiting = []
    for one in _waiting(posterior, question, step_time, best_value):
        if one.record.number not in resumed_before and resumable(one.record.number):
            waiting.append(one)

    draw = posterior.theta[[rng.integers(len(posterior.theta))]]
    new_x, new_z = _candidates(posterior, space, best[:BEST], largest_size(space, records), rng)
    tried = {(spec.batch_size, spec.lr) for spec in (*records, *running)}
    is_new = np.array([_pair(space, *one) not in tried for one in zip(new_x, new_z, strict=True)])
    if is_new.any():
        new_x, new_z = new_x[is_new], new_z[is_new]
    choices = _choices(posterior, draw, waiting, new_x, new_z, question, step_time)
    limit_of_curve = None
    if best and is_of_curve:
        chosen, limit_of_curve = choose_for_curve(
            posterior, choices.x, choices.z, choices.ran, choices.cost_per_step
        )
    else:
        chosen = _best_in_draw(choices, question, bool(best))

    resumed = waiting[chosen].record if chosen < len(waiting) else None
    batch_size, lr = _pair(space, choices.x[chosen], choices.z[chosen])
    first_step = 0
    if resumed is not None:
        batch_size, lr = resumed.batch_size, resumed.lr
        first_step = resumed.steps
    last_step = question.budget.last_step(batch_size)
    # What all trials cost, and what the best one takes, in steps of this one.
    spent = _spent(question, step_time, records) / float(choices.cost_per_step[chosen])
    best_steps = None
    if best_value is not None:
        best_steps = best_value / float(choices.value_per_step[chosen])
    predicted = math.exp(choices.log_steps[chosen])
    if question.schedule_ends:
        limit = _schedule_length(draw, choices, chosen, spent, best_steps, limit_of_curve)
    elif limit_of_curve is not None:
        limit = limit_of_curve
    elif best_steps is not None:
        limit = _limit_after_hit(GIVE_UP * best_steps, predicted, first_step)
    else:
        limit = _limit_before_hit(spent, last_step, first_step)
    return Proposal(
        batch_size=batch_size,
        lr=lr,
        max_steps=max(min(math.ceil(limit), last_step), first_step + 1),
        resumed_from=resumed.number if resumed else None,
    )


@dataclass(frozen=True)
class Choices:
    """What a decision compares, (n,) each: pruned trials that wait, then new configurations."""

    x: Array
    """log2 of the batch size."""
    z: Array
    """log2 of the rate."""
    ran: Array
    """Steps that a pruned trial has run; 0 for a new one."""
    log_steps: Array
    """log S in one draw."""
    value_per_step: Array
    cost_per_step: Array
    longest: Array
    """Steps of the budget."""


def _choices(
    posterior: Posterior,
    draw: Array,
    waiting: Sequence[Waiting],
    new_x: Array,
    new_z: Array,
    question: Question,
    step_time: StepTime,
) -> Choices:
    x = np.concatenate([np.log2([one.record.batch_size for one in waiting]), new_x])
    z = np.concatenate([np.log2([one.record.lr for one in waiting]), new_z])
    log_steps = posterior.law.log_steps(draw, x, z)[0]
    log_steps[: len(waiting)] = _informed(log_steps, posterior, draw, waiting)
    return Choices(
        x=x,
        z=z,
        ran=np.concatenate([[one.record.steps for one in waiting], np.zeros(new_x.size)]),
        log_steps=np.minimum(log_steps, MOST_LOG_STEPS),
        # Values and costs are in proportion to steps.
        value_per_step=np.array([question.value(1.0, 2.0**size, step_time) for size in x]),
        cost_per_step=np.array([question.cost(1.0, 2.0**size, step_time) for size in x]),
        longest=np.array([float(question.budget.last_step(2.0**size)) for size in x]),
    )


def _best_in_draw(choices: Choices, question: Question, has_reached: bool) -> int:
    """The place of the least score."""
    steps = np.exp(choices.log_steps)
    cost = choices.cost_per_step * steps
    value = choices.value_per_step * steps
    # Until the target has been reached, what is left costs: dear trials wait.
    counted = value if has_reached else cost
    share_left = np.maximum(1.0 - choices.ran / steps, 0.0)
    ratio = np.minimum(share_left * counted / counted[value.argmin()], MOST_REMAINING)
    score = np.log(value) + REMAINING_WEIGHT * ratio + COST_WEIGHT * np.log(cost / value)
    # Schedules that end with their trials end within the budget; what none reaches comes last.
    if question.schedule_ends:
        score += OUT_OF_REACH * np.maximum(choices.log_steps - np.log(choices.longest), 0.0)
    return int(score.argmin())


def _schedule_length(
    draw: Array,
    choices: Choices,
    chosen: int,
    spent: float,
    best_steps: float | None,
    limit_of_curve: float | None,
) -> float:
    """The steps of a schedule that ends with its trial: those of least expected cost.

    Args:
        draw: of the posterior, (1, parameters).
        choices, chosen: what was compared, and the place of the choice.
        spent: on all trials, in steps of this one.
        best_steps: in which this one would equal the best; None before the first hit.
        limit_of_curve: the most steps that are worth what they tell of B_crit; None for another
            objective and before the first hit.
    """
    cost_per_step = choices.cost_per_step
    first = LEAST_SHARE_OF_BUDGET * float((cost_per_step * choices.longest).min())
    affordable = max(spent, first / float(cost_per_step[chosen]))
    latest = math.inf
    if limit_of_curve is not None:
        affordable = limit_of_curve
    elif best_steps is not None:
        latest = best_steps
        affordable = max(LENGTH_OF_SPENT * spent, GIVE_UP * latest)
    # The draw's S is known but for what seeds and the configuration itself add.
    deviation = math.hypot(math.exp(draw[0, NOISE]), OWN_DEVIATION)
    longest = min(affordable, float(choices.longest[chosen]))
    length = least_cost(draw, float(choices.log_steps[chosen]), deviation, longest, latest)
    return max(length.steps, LEAST_STEPS)


def _pair(space: Space, x: float, z: float) -> tuple[int, float]:
    """The batch size and rate that are allowed at log2 coordinates."""
    return space.snap(2.0**x), space.snap_lr(float(2.0**z))


def _waiting(
    posterior: Posterior, question: Question, step_time: StepTime, best_value: float | None
) -> list[Waiting]:
    """The pruned trials that have room in their budget and may still beat the best."""
    most = math.inf if best_value is None else WORTH_RESUMING * GIVE_UP * best_value
    waiting = []
    for place, record in enumerate(posterior.chains):
        value = question.value(record.steps, record.batch_size, step_time)
        has_room = record.steps < question.budget.last_step(record.batch_size)
        if record.status == "pruned" and has_room and value < most:
            waiting.append(Waiting(record, place))
    return waiting


def _candidates(
    posterior: Posterior,
    space: Space,
    best: Sequence[Prediction],
    largest: float,
    rng: np.random.Generator,
) -> tuple[Array, Array]:
    """log2 batch sizes and rates of new configurations, within the space and up to a largest size.

    Most lie anywhere in the batch sizes, near the best rate of some draw; the others around the
    best configurations.
    """
    law = posterior.law
    x = rng.uniform(law.low, law.high, CANDIDATES)
    x[:2] = law.low, law.high
    theta = posterior.theta[rng.integers(len(posterior.theta), size=CANDIDATES)]
    # Each draw's rate at a batch size of its own.
    best_rate = law.best_rate(theta, x[:, None])[:, 0]
    z = best_rate + rng.normal(0.0, OCTAVES, CANDIDATES)
    if best:
        centres = [best[place % len(best)].record for place in range(AROUND_BEST)]
        sizes = np.log2([centre.batch_size for centre in centres])
        rates = np.log2([centre.lr for centre in centres])
        x[-AROUND_BEST:] = sizes + rng.normal(0.0, OCTAVES, AROUND_BEST)
        z[-AROUND_BEST:] = rates + rng.normal(0.0, OCTAVES, AROUND_BEST)
    snapped = np.log2([space.snap(min(2.0**size, largest)) for size in x])
    return snapped, np.clip(z, math.log2(space.lr_low), math.log2(space.lr_high))


def largest_size(space: Space, records: Sequence[Record]) -> float:
    """The largest batch size to try: halfway in log B to the smallest one that does not fit.

    It lies between that and the largest one that has trained. Without one that does not fit, it is
    the space's.
    """
    trained = float(space.low)
    for record in records:
        if record.steps > 0 and not record.is_unfit:
            trained = max(trained, record.batch_size)
    unfit = [record.batch_size for record in records if record.is_unfit]
    above = [size for size in unfit if size > trained]
    return math.sqrt(trained * min(above)) if above else float(space.high)


def _informed(
    log_steps: Array, posterior: Posterior, draw: Array, waiting: Sequence[Waiting]
) -> list[float]:
    """log S of waiting trials in a draw, given their own histories too."""
    noise_variance = math.exp(2.0 * draw[0, NOISE])
    informed = []
    for of_law, one in zip(log_steps, waiting, strict=False):
        own = posterior.rows.log_steps[one.place]
        if posterior.rows.kind[one.place] == BOUND:
            informed.append(max(of_law, own))
            continue
        variance = noise_variance + posterior.rows.deviation[one.place] ** 2
        informed.append(of_law + noise_variance / variance * (own - of_law))
    return informed


def _limit_after_hit(give_up: float, predicted: float, first_step: int) -> float:
    """The step at which a trial stops once the target has been reached.

    Args:
        give_up: steps that cost ``GIVE_UP`` times the best configuration's value.
        predicted: its own steps to the target.
        first_step: steps of the trial that it resumes.
    """
    probe = min(PROBE_OF_GIVE_UP * give_up, PROBE_OF_OWN * predicted)
    limit = probe if first_step < TRIED * probe else min(give_up, RESUMED_OF_OWN * predicted)
    return max(limit, LEAST_RESUMED_AFTER_HIT * first_step, LEAST_STEPS)


def _limit_before_hit(spent: float, last_step: int, first_step: int) -> float:
    """The step at which a trial stops while no trial has reached the target.

    Args:
        spent: on all trials, in steps of this one.
        last_step: of the budget.
        first_step: steps of the trial that it resumes.
    """
    share = RESUMED_SHARE_OF_SPENT if first_step else SHARE_OF_SPENT
    more = max(share * spent, LEAST_SHARE_OF_BUDGET * last_step, LEAST_STEPS)
    return max(first_step + more, LEAST_RESUMED * first_step)


def _spent(question: Question, step_time: StepTime, records: Sequence[Record]) -> float:
    """What all trials cost."""
    steps_of = {record.number: record.steps for record in records}
    spent = 0.0
    for record in records:
        before = steps_of.get(record.resumed_from, 0) if record.resumed_from is not None else 0
        spent += question.cost(record.steps - before, record.batch_size, step_time)
    return spent
