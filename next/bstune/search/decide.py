"""One decision: which configuration is run next, whether a pruned trial is resumed, and how far.

Thompson sampling: one draw of the posterior is taken for the truth, and the candidate of the least
value in it is chosen, with a bonus for little left to train. A new trial gets a part of what the
best configuration takes (:mod:`bstune.search.limits`), and a pruned one is resumed when a draw
prefers it.

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
from bstune.search.findings import Prediction, predictions
from bstune.search.fit import NOTHING, Ends, chance_to_fit, sizes_to_try
from bstune.search.law import NOISE
from bstune.search.limits import (
    GIVE_UP,
    affordable_length,
    limit_after_hit,
    limit_before_hit,
    schedule_length,
)
from bstune.search.posterior import BOUND, Posterior, sample_posterior

Array = NDArray[np.float64]

# Draws of the posterior for a decision, its moves, and the new configurations that are compared, of
# which so many lie around the best ones. With three times as many of each, 54 searches of nine
# kinds of synthetic curves, on which these were not chosen, were 1.00, 0.99 and 0.99 times as far
# off after 10, 20 and 40 times the best trial's cost (90%: 0.97 to 1.02); with 48, 1 and 60, 30 of
# the five tables were 1.04 times as far off after 10 times (0.98 to 1.11).
DRAWS = 64
MOVES = 2
CANDIDATES = 90
AROUND_BEST = 30
# So many of the best configurations.
BEST = 4
# Under ``curve`` the law has twice the parameters.
CURVE_DRAWS = 192
CURVE_MOVES = 3
# Standard deviation of candidates, in octaves: of rates around a draw's best one, and of batch size
# and rate around the best configurations.
OCTAVES = 0.5
# The score of a candidate is log(value) + REMAINING_WEIGHT * min(what is left of it / the whole of
# the best, MOST_REMAINING), all predicted by one draw: of two that are as good, the one that is
# nearly done is run. It is a log and a ratio, so that for small differences both are relative.
REMAINING_WEIGHT = 0.5
MOST_REMAINING = 10.0
# Where value and cost differ, log(cost / value) counts by this weight: under ``steps`` the largest
# batch sizes take the fewest steps, and many examples.
COST_WEIGHT = 0.1
# A candidate's value is divided by the chance that its batch size fits; where none fits, by this.
LEAST_CHANCE = 1e-3
# What is added to a score for each e-fold of steps over the budget.
OUT_OF_REACH = 1e3
# A trial is first evaluated by this share of the steps that are predicted.
FIRST_EVALUATION = 1 / 20
# A pruned trial that has used this share of the give-up cost is not resumed.
WORTH_RESUMING = 0.95


class Proposal(Frozen):
    """What to run next."""

    batch_size: int
    lr: float
    max_steps: int
    """The step at which it stops, steps of the trial that it resumes included."""
    resumed_from: int | None
    first_evaluation: int | None = None
    """The step by which it is first evaluated."""


def propose(
    question: Question,
    space: Space,
    step_time: StepTime,
    records: Sequence[Record],
    seed: int,
    running: Sequence[Spec] = (),
    resumable: Callable[[int], bool] = lambda number: True,
    fits: Ends = NOTHING,
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
        fits: the largest batch size that fits and the smallest that does not, where a survey has
            found them.
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
    for place in _waiting(posterior, question, step_time, best_value):
        number = posterior.chains[place].number
        if number not in resumed_before and resumable(number):
            waiting.append(place)

    draw = posterior.theta[[rng.integers(len(posterior.theta))]]
    new_x, new_z = _candidates(posterior, sizes_to_try(space, records, fits), best[:BEST], rng)
    tried = {(spec.batch_size, spec.lr) for spec in (*records, *running)}
    pairs = [_pair(space, *one) for one in zip(new_x, new_z, strict=True)]
    chance = chance_to_fit([batch_size for batch_size, _ in pairs], records, fits)
    kept = np.array([pair not in tried for pair in pairs]) & (chance > 0.0)
    if not kept.any():
        kept = chance >= chance.max()
    choices = _choices(
        posterior, draw, waiting, new_x[kept], new_z[kept], chance[kept], question, step_time
    )
    limit_of_curve = None
    if best and is_of_curve:
        chosen, limit_of_curve = choose_for_curve(
            posterior, choices.x, choices.z, choices.ran, choices.cost_per_step / choices.chance
        )
    else:
        chosen = best_in_draw(choices, question.schedule_ends, bool(best))

    resumed = posterior.chains[waiting[chosen]] if chosen < len(waiting) else None
    batch_size, lr = _pair(space, choices.x[chosen], choices.z[chosen])
    first_step = 0
    if resumed is not None:
        batch_size, lr = resumed.batch_size, resumed.lr
        first_step = resumed.steps
    last_step = question.budget.last_step(batch_size)
    cost_per_step = float(choices.cost_per_step[chosen])
    spent = _spent(question, step_time, records) / cost_per_step
    best_steps = None
    if best_value is not None:
        best_steps = best_value / float(choices.value_per_step[chosen])
    log_steps = float(choices.log_steps[chosen])
    of_law = posterior.law.log_steps(posterior.theta, choices.x[[chosen]], choices.z[[chosen]])
    first_evaluation = max(int(FIRST_EVALUATION * math.exp(of_law.mean())), 1)
    if question.schedule_ends:
        cheapest = float((choices.cost_per_step * choices.longest).min()) / cost_per_step
        affordable = limit_of_curve or affordable_length(spent, cheapest, best_steps)
        latest = math.inf if best_steps is None or is_of_curve else best_steps
        longest = min(affordable, float(choices.longest[chosen]))
        limit = schedule_length(draw, log_steps, longest, latest)
    elif limit_of_curve is not None:
        limit = limit_of_curve
    elif best_steps is not None:
        limit = limit_after_hit(best_steps, math.exp(log_steps), first_step)
    else:
        limit = limit_before_hit(spent, last_step, first_step)
    return Proposal(
        batch_size=batch_size,
        lr=lr,
        max_steps=max(min(math.ceil(limit), last_step), first_step + 1),
        resumed_from=resumed.number if resumed else None,
        first_evaluation=resumed.first_evaluation if resumed else first_evaluation,
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
    """What is minimised, of a step."""
    cost_per_step: Array
    """Training seconds of a step."""
    longest: Array
    """Steps of the budget."""
    chance: Array
    """That the batch size fits."""


def _choices(
    posterior: Posterior,
    draw: Array,
    waiting: Sequence[int],
    new_x: Array,
    new_z: Array,
    chance: Array,
    question: Question,
    step_time: StepTime,
) -> Choices:
    """Compare the chains at some places of the posterior's rows with new configurations."""
    chains = [posterior.chains[place] for place in waiting]
    x = np.concatenate([np.log2([chain.batch_size for chain in chains]), new_x])
    z = np.concatenate([np.log2([chain.lr for chain in chains]), new_z])
    log_steps = posterior.law.log_steps(draw, x, z)[0]
    rows = posterior.rows
    log_steps[: len(chains)] = informed(
        log_steps[: len(chains)],
        rows.log_steps[waiting],
        rows.deviation[waiting],
        rows.kind[waiting] == BOUND,
        math.exp(2.0 * draw[0, NOISE]),
    )
    return Choices(
        x=x,
        z=z,
        ran=np.concatenate([[chain.steps for chain in chains], np.zeros(new_x.size)]),
        log_steps=log_steps,
        # Values and costs are in proportion to steps.
        value_per_step=np.array([question.value(1.0, 2.0**size, step_time) for size in x]),
        cost_per_step=np.array([question.cost(1.0, 2.0**size, step_time) for size in x]),
        longest=np.array([float(question.budget.last_step(2.0**size)) for size in x]),
        # Pruned trials have run.
        chance=np.concatenate([np.ones(len(chains)), np.maximum(chance, LEAST_CHANCE)]),
    )


def informed(
    of_law: Array,
    own: Array,
    deviation: Array,
    is_bound: NDArray[np.bool_],
    noise_variance: float,
) -> Array:
    """log S of n pruned trials by the law and their own histories, (n,).

    What a history says of the trial's own seed counts the more, the more exactly it says it.

    Args:
        of_law: log S by the law, (n,).
        own: log S by their histories, or the least that they leave, (n,).
        deviation: standard deviation of ``own``, (n,).
        is_bound: whether ``own`` is the least, (n,).
        noise_variance: of log S from seed to seed.
    """
    share_of_own = noise_variance / (noise_variance + deviation**2)
    return np.where(is_bound, np.maximum(of_law, own), of_law + share_of_own * (own - of_law))


def best_in_draw(choices: Choices, schedule_ends: bool, has_reached: bool) -> int:
    """The place of the least score.

    Args:
        choices: what is compared.
        schedule_ends: whether schedules end with their trials.
        has_reached: whether some trial has reached the target. Until then what is left counts by
            its cost, whatever is minimised: dear trials wait.
    """
    steps = np.exp(choices.log_steps)
    cost = choices.cost_per_step * steps
    value = choices.value_per_step * steps
    counted = value if has_reached else cost
    share_left = np.maximum(1.0 - choices.ran / steps, 0.0)
    remaining = np.minimum(share_left * counted / counted[value.argmin()], MOST_REMAINING)
    score = np.log(value) + REMAINING_WEIGHT * remaining + COST_WEIGHT * np.log(cost / value)
    score -= np.log(choices.chance)
    if schedule_ends:
        score += OUT_OF_REACH * np.maximum(choices.log_steps - np.log(choices.longest), 0.0)
    return int(score.argmin())


def _pair(space: Space, x: float, z: float) -> tuple[int, float]:
    """The batch size and rate that are allowed at log2 coordinates."""
    return space.snap(2.0**x), space.snap_lr(float(2.0**z))


def _waiting(
    posterior: Posterior, question: Question, step_time: StepTime, best_value: float | None
) -> list[int]:
    """Places of the pruned chains that have room in their budget and may still beat the best."""
    most = math.inf if best_value is None else WORTH_RESUMING * GIVE_UP * best_value
    waiting = []
    for place, chain in enumerate(posterior.chains):
        value = question.value(chain.steps, chain.batch_size, step_time)
        has_room = chain.steps < question.budget.last_step(chain.batch_size)
        if chain.status == "pruned" and has_room and value < most:
            waiting.append(place)
    return waiting


def _candidates(
    posterior: Posterior,
    space: Space,
    best: Sequence[Prediction],
    rng: np.random.Generator,
) -> tuple[Array, Array]:
    """log2 batch sizes and rates of new configurations, within a space that may be narrowed.

    Most lie anywhere in the batch sizes, both ends included, near the best rate of some draw; the
    others around the best configurations.
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
    snapped = np.log2([space.snap(2.0**size) for size in x])
    return snapped, np.clip(z, math.log2(space.lr_low), math.log2(space.lr_high))


def _spent(question: Question, step_time: StepTime, records: Sequence[Record]) -> float:
    """What all trials cost, in training seconds; a resumed one without the steps before it."""
    steps_of = {record.number: record.steps for record in records}
    spent = 0.0
    for record in records:
        before = steps_of.get(record.resumed_from, 0) if record.resumed_from is not None else 0
        spent += question.cost(record.steps - before, record.batch_size, step_time)
    return spent
