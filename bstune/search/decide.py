"""One decision: which configuration is run next, whether a pruned trial is resumed, and how far.

Thompson sampling: one draw of the posterior is taken for the truth, and the candidate of the least
value in it is chosen, with a bonus for little left to train. The best metric is sought by expected
improvement over all draws: on three tables and four grids of language-model shape its choice was
1.6 and 5.2 standard deviations over seeds above the best after 5 full trials, by one draw 3.0 and
10.6 (6 seeds). A new trial gets a part of what the best configuration takes
(:mod:`bstune.search.limits`), and a pruned one is resumed when a draw prefers it.

Measured on the five shipped tables (``tests/benchmarks/README.md``). 3% of decisions at random made
no difference there. Without resuming, the target was first reached after 9.3 in place of 4.5 times
the best trial's cost, and the choice came to 1.24 in place of 1.16 after 10 times.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from bstune.core.question import Question
from bstune.core.records import Record, Records, Spec, StepTime
from bstune.core.space import Configuration, Space
from bstune.search.choices import (
    OCTAVES,
    SHARE,
    Choices,
    choices_in_draw,
    configuration_of,
    new_configurations,
    waiting_places,
    with_histories,
)
from bstune.search.curve_decision import choose_for_curve
from bstune.search.findings import predictions
from bstune.search.fit import NOTHING, SurveyedSizes
from bstune.search.limits import (
    PROBE_OF_BUDGET,
    affordable_length,
    limit_after_hit,
    limit_before_hit,
    schedule_length,
)
from bstune.search.posterior import BOUND, Posterior, Rows, sample_posterior

Array = NDArray[np.float64]

# Draws of the posterior for a decision, and its moves. With three times as many of each and of the
# new configurations that are compared, 54 searches of nine kinds of synthetic curves, on which
# these were not chosen, were 1.00, 0.99 and 0.99 times as far off after 10, 20 and 40 times the
# best trial's cost (90%: 0.97 to 1.02); with 48, 1 and 60, 30 of the five tables were 1.04 times as
# far off after 10 times (0.98 to 1.11).
DRAWS = 64
MOVES = 2
# With a misfit, or with two further values, the law has twice the parameters. On 30 laws with two
# values 64 draws and 2 moves were 1.03 times as far off after 20 times the best trial's cost.
MISFIT_DRAWS = 192
MISFIT_MOVES = 3
# The score of a candidate is log(value) + REMAINING_WEIGHT * min(what is left of it / the whole of
# the best, MOST_REMAINING), all predicted by one draw: of two that are as good, the one that is
# nearly done is run. It is a log and a ratio, so that for small differences both are relative.
REMAINING_WEIGHT = 0.5
MOST_REMAINING = 10.0
# Where value and cost differ, log(cost / value) counts by this weight: under ``steps`` the largest
# batch sizes take the fewest steps, and many examples.
COST_WEIGHT = 0.1
# What a trial of the best metric costs beside its training, in budgets: one that is nearly done is
# not for free.
TRIAL_COST = 0.3
# New configurations within so many octaves of a run are not tried for the best metric: on four
# grids of language-model shape the choice was 0.3 for 0.7 standard deviations over seeds above the
# best after 20 full trials, on three tables 0.65 for 0.77 (6 seeds).
TOO_NEAR = 0.25
# What is added to a score for each e-fold of steps over the budget.
OUT_OF_REACH = 1e3
# A trial is first evaluated by this share of the steps that are predicted.
FIRST_EVALUATION = 1 / 20


class Proposal(Configuration):
    """What to run next."""

    max_steps: int
    """The step at which it stops, steps of the trial that it resumes included."""
    resumed_from: int | None = None
    first_evaluation: int | None = None
    """The step by which it is first evaluated."""


def propose(
    question: Question,
    space: Space,
    step_time: StepTime,
    records: Records,
    seed: int,
    running: Sequence[Spec] = (),
    resumable: Callable[[int], bool] = lambda number: True,
    fits: SurveyedSizes = NOTHING,
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
        fits: what a survey has found of batch sizes.
    """
    posterior = _posterior_of_decision(question, space, records, seed, running)
    rng = np.random.default_rng([seed, len(records), len(running), 1])
    draw = posterior.theta[[rng.integers(len(posterior.theta))]]
    best = sorted(predictions(posterior, question, step_time), key=lambda one: one.log_value)
    best_value = math.exp(best[0].log_value) if best else None
    may_resume = _unless_resumed(records, running, resumable)
    waiting = waiting_places(question, step_time, posterior, best_value, may_resume)
    new = new_configurations(posterior, space, records, running, fits, best, rng)
    choices = choices_in_draw(question, step_time, posterior, draw, waiting, new)
    x, z, u = choices.x, choices.z, choices.u
    limit_of_curve = None
    if best and not question.seeks_best:
        chosen, limit_of_curve = choose_for_curve(
            posterior, x, z, choices.ran, choices.cost_per_step / choices.chance, u
        )
    elif best and question.seeks_metric:
        chosen = most_improving(posterior, choices, waiting, best[0].log_value)
    else:
        chosen = best_in_draw(choices, question.schedule_ends, bool(best))
    pruned = None
    configuration = configuration_of(space, x[chosen], z[chosen], u[chosen])
    batch_size = configuration.batch_size
    if chosen < len(waiting):
        pruned = posterior.chains[waiting[chosen]]
        batch_size = pruned.batch_size
    last_step = question.last_step(batch_size)
    if question.seeks_metric:
        # A trial that is resumed runs its whole budget.
        is_whole = pruned is not None or not probes_tell(posterior, may_resume)
        limit = last_step if is_whole else PROBE_OF_BUDGET * last_step
    else:
        spent = _spent_seconds(question, step_time, records)
        limit = _last_step_of_trial(
            question, choices, chosen, draw, spent, best_value, limit_of_curve, last_step
        )
    max_steps = max(min(math.ceil(limit), last_step), int(choices.ran[chosen]) + 1)
    if pruned is not None:
        return resumption(pruned, max_steps)
    of_law = posterior.law.log_steps(posterior.theta, x[[chosen]], z[[chosen]], u[[chosen]])
    return Proposal(
        **configuration.model_dump(),
        max_steps=max_steps,
        first_evaluation=first_evaluation(math.exp(of_law.mean())),
    )


def _posterior_of_decision(
    question: Question, space: Space, records: Records, seed: int, running: Sequence[Spec]
) -> Posterior:
    """The posterior of a decision; with more parameters it takes more draws."""
    is_of_curve = not question.seeks_best
    draws, moves = DRAWS, MOVES
    if is_of_curve or question.seeks_metric or space.tunables:
        draws, moves = MISFIT_DRAWS, MISFIT_MOVES
    return sample_posterior(
        question,
        space,
        records,
        seed=seed,
        running=running,
        misfit=is_of_curve,
        draws=draws,
        moves=moves,
    )


def _unless_resumed(
    records: Records, running: Sequence[Spec], resumable: Callable[[int], bool]
) -> Callable[[int], bool]:
    """Whether a trial may be resumed: one whose resumption failed is not tried again."""
    resumed = {spec.resumed_from for spec in (*records, *running)}
    return lambda number: number not in resumed and resumable(number)


def leading_probe(
    question: Question,
    space: Space,
    step_time: StepTime,
    records: Records,
    seed: int,
    running: Sequence[Spec],
    resumable: Callable[[int], bool],
) -> Proposal | None:
    """Where the metric counts and no configuration is left: resume the run predicted to be best.

    None: it has run its whole budget.

    Args:
        question, space, step_time, records, seed, running, resumable: as of :func:`propose`.
    """
    posterior = sample_posterior(question, space, records, seed=seed)
    finished = [one.log_value for one in predictions(posterior, question, step_time)]
    may_resume = _unless_resumed(records, running, resumable)
    waiting = waiting_places(question, step_time, posterior, None, may_resume)
    if not finished or not waiting:
        return None
    of_law = posterior.log_steps_of_rows()[:, waiting]
    log_steps = with_histories(of_law, posterior.rows, waiting, posterior.theta).mean(axis=0)
    pruned = [posterior.chains[place] for place in waiting]
    per_step = [question.value(1.0, chain.batch_size, step_time) for chain in pruned]
    log_values = log_steps + np.log(per_step)
    if log_values.min() >= min(finished):
        return None
    leader = pruned[int(log_values.argmin())]
    return resumption(leader, question.last_step(leader.batch_size))


def resumption(pruned: Record, max_steps: int) -> Proposal:
    """The proposal to resume a pruned trial, the same configuration, up to a step.

    Args:
        pruned: the trial's record.
        max_steps: as of :class:`Proposal`.
    """
    return Proposal(
        **pruned.model_dump(include=set(Configuration.model_fields)),
        max_steps=max_steps,
        resumed_from=pruned.number,
        first_evaluation=pruned.first_evaluation,
    )


def first_evaluation(steps: float) -> int:
    """The step by which a trial is first evaluated that is predicted to take so many."""
    return max(int(FIRST_EVALUATION * steps), 1)


def probes_tell(posterior: Posterior, may_resume: Callable[[int], bool]) -> bool:
    """Whether trials may run a part of their budget: a run has finished, by which that is read.

    They may not where a pruned one cannot be resumed, or where its metric tells nothing.
    """
    for chain, is_bound in zip(posterior.chains, posterior.rows.kind == BOUND, strict=False):
        if chain.status == "pruned" and (is_bound or not may_resume(chain.number)):
            return False
    return any(chain.status == "finished" for chain in posterior.chains)


def _last_step_of_trial(
    question: Question,
    choices: Choices,
    chosen: int,
    draw: Array,
    spent: float,
    best_value: float | None,
    limit_of_curve: float | None,
    last_step: int,
) -> float:
    """The step at which the chosen trial stops, or the length of its schedule.

    Args:
        question: what is minimised.
        choices: what was compared.
        chosen: the place among them.
        draw: of the posterior, by which it was chosen.
        spent: on all trials, in training seconds.
        best_value: predicted, of the best configuration; None: nothing has reached the target.
        limit_of_curve: under ``curve``, once a trial has reached the target.
        last_step: of its budget.
    """
    cost_per_step = float(choices.cost_per_step[chosen])
    spent_steps = spent / cost_per_step
    first_step = int(choices.ran[chosen])
    log_steps = float(choices.log_steps[chosen])
    best_steps = None
    if best_value is not None:
        best_steps = best_value / float(choices.value_per_step[chosen])
    if question.schedule_ends:
        cheapest = float((choices.cost_per_step * choices.longest).min()) / cost_per_step
        affordable = limit_of_curve or affordable_length(spent_steps, cheapest, best_steps)
        latest = math.inf
        if best_steps is not None and question.seeks_best:
            latest = best_steps
        longest = min(affordable, float(choices.longest[chosen]))
        return schedule_length(draw, log_steps, longest, latest)
    if limit_of_curve is not None:
        return limit_of_curve
    if best_steps is not None:
        return limit_after_hit(best_steps, math.exp(log_steps), first_step)
    return limit_before_hit(spent_steps, last_step, first_step)


def most_improving(
    posterior: Posterior, choices: Choices, waiting: Sequence[int], best_log_value: float
) -> int:
    """Where the metric counts: the place of the largest expected improvement for its cost.

    The improvement of a run is that of its log value over the best one's, and its cost the training
    seconds that are left of its budget, over the median of whole budgets.

    Args:
        posterior: of the study.
        choices: what is compared.
        waiting: places of the pruned trials among the posterior's chains.
        best_log_value: predicted.
    """
    theta = posterior.theta
    count = len(waiting)
    log_steps = posterior.law.log_steps(theta, choices.x, choices.z, choices.u)
    log_steps[:, :count] = with_histories(log_steps[:, :count], posterior.rows, waiting, theta)
    log_values = log_steps + np.log(choices.value_per_step)
    improvements = np.maximum(best_log_value - log_values, 0.0).mean(axis=0) * choices.chance
    improvements[count:][_too_near(choices, posterior.rows)[count:]] = 0.0
    if improvements.max() == 0.0:
        return int(log_values.mean(axis=0).argmin())
    seconds = choices.cost_per_step * choices.longest
    left = (1.0 - choices.ran / choices.longest) * seconds / np.median(seconds)
    return int((improvements / (left + TRIAL_COST)).argmax())


def _too_near(choices: Choices, rows: Rows) -> NDArray[np.bool_]:
    """Whether each choice lies next to a run, (n,): it would tell what that has told."""
    places = []
    for x, z, u in ((choices.x, choices.z, choices.u), (rows.x, rows.z, rows.u)):
        # Further values count as what candidates scatter by.
        places.append(np.column_stack([x, z, OCTAVES / SHARE * u]))
    distances = np.linalg.norm(places[0][:, None] - places[1], axis=2)
    return np.asarray(distances.min(axis=1) < TOO_NEAR)


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


def _spent_seconds(question: Question, step_time: StepTime, records: Records) -> float:
    """What all trials cost, in training seconds; a resumed one without the steps before it."""
    steps_of: dict[int | None, int] = {record.number: record.steps for record in records}
    spent = 0.0
    for record in records:
        before = steps_of.get(record.resumed_from, 0)
        spent += question.cost(record.steps - before, record.batch_size, step_time)
    return spent
