"""Another question to the trials of a study: each run is read as if it had been asked that.

A run that met an easier target on its way is one that ended there, and what resumed it was never
asked. One that did not meet the target leaves the bound that it left. Of a smaller budget a run
tells the best metric if it trained as long. So B_crit is told at easier targets, too.
"""

import math
import statistics
from dataclasses import replace
from typing import Any

import numpy as np

from bstune.core.errors import InputError
from bstune.core.question import Question
from bstune.core.records import Record, Records, Target, last_of_chains
from bstune.search.histories import excess_scale, log_curve
from bstune.study.advice import closest_trial
from bstune.study.critical import critical_batch_size
from bstune.study.estimates import answer_posterior
from bstune.study.plan import Plan
from bstune.study.result import CriticalAt

# B_crit is told at so many targets between the study's own and what half of the trials that reached
# it had met after this share of their steps.
TARGETS = 5
EARLY = 0.2
# Draws and moves of the posterior of each.
DRAWS = 300
MOVES = 4
# With more trials they would take over 2 s.
MOST_TRIALS = 300


def retargeted(
    own: Question, question: Question, records: Records, schedule_follows: bool = False
) -> list[Record]:
    """The records that a study's runs would have left, had they been asked another question.

    ``bstune report target=GOAL`` and ``result.at`` ask so.

    Args:
        own: the question that they were run for.
        question: of the same metric.
        records: of all finished trials, in order of their numbers.
        schedule_follows: whether a schedule follows the trial's length, which the budget sets.

    Raises:
        InputError: where they do not tell: no run came as far as the target or the budget, all met
            the target at their first evaluation, one met the study's own before the budget's end,
            or schedules ended with their trials, or would end with another budget.
    """
    if own.schedule_ends:
        raise InputError(
            "schedules ended with their trials, which tell nothing of another target or budget: "
            "run a study for it"
        )
    if schedule_follows and question.budget != own.budget:
        raise InputError(
            f"a schedule follows the trial's length, and those trials had that of {own.budget}: "
            f"ask for a target, or run a study for this budget"
        )
    if question.seeks_metric:
        _check_budget(question, records)
    again = records_ended_by(question, records)
    if not any(record.reached for record in again):
        raise InputError(_nothing_reached(question, records))
    met_at_once = [len(one.history) == 1 and one.reached for one in again if one.history]
    if all(met_at_once) and not question.seeks_metric:
        raise InputError(
            f"all trials met {question.target} at their first evaluation, as untrained weights "
            f"may: ask for a harder target"
        )
    return again


def _nothing_reached(question: Question, records: Records) -> str:
    """Say what no run came to."""
    if question.seeks_metric:
        return "all first evaluations lie beyond this budget: ask for a larger one"
    target = question.target
    closest = closest_trial(target, records)
    value = "none" if closest is None else f"{target.best(closest.finite_values):.4g}"
    return (
        f"no trial reached {target}, the closest value is {value}: ask for an easier "
        f"target, or run a study for this one"
    )


def _check_budget(question: Question, records: Records) -> None:
    """InputError where no run trained to the budget's end, or the best were stopped before it."""
    reached: list[float] = []
    others: list[float] = []
    for record in records:
        share = record.steps / question.last_step(record.batch_size)
        (reached if record.status == "reached" else others).append(share)
    # The best ones met the study's target, and were stopped there.
    longest = min(reached) if reached else max(others, default=0.0)
    if longest < 1.0:
        raise InputError(
            f"the trials tell of {math.floor(100 * longest)}% of this budget, where the best or "
            f"all ended: ask for at most so much, or run a study for it"
        )


def records_ended_by(question: Question, records: Records) -> list[Record]:
    """The records of runs that another question ends; arguments as of :func:`retargeted`."""
    steps: dict[int | None, int] = {record.number: record.steps for record in records}
    again = []
    # The trial in which a chain ended, by the numbers of that one and of all that resume it.
    ended_in: dict[int | None, int] = {}
    for record in records:
        if record.resumed_from in ended_in:
            ended_in[record.number] = ended_in[record.resumed_from]
            continue
        if question.seeks_metric:
            changes = _changes_by_budget(record, question.last_step(record.batch_size))
        else:
            changes = _changes_by_target(record, question.target)
        before = steps.get(record.resumed_from, 0)
        kept = max(changes.get("steps", record.steps) - before, 0)
        share = kept / max(record.steps - before, 1)
        changes["train_seconds"] = share * record.train_seconds
        changes["other_seconds"] = share * record.other_seconds
        changes["repeats"] = ended_in.get(record.repeats, record.repeats)
        again.append(record.model_copy(update=changes))
        if again[-1].reached:
            ended_in[record.number] = record.number
    return again


def _changes_by_target(record: Record, target: Target) -> dict[str, Any]:
    """What changes in a record whose run a target ends."""
    missed = 0
    for place, (step, value) in enumerate(record.history, start=1):
        if value is not None and target.reached(value):
            changes = {"status": "reached", "steps": step, "steps_low": missed}
            return changes | {"history": record.history[:place]}
        missed = step
    return {"status": {"reached": "pruned", "finished": "missed"}.get(record.status, record.status)}


def _changes_by_budget(record: Record, last_step: int) -> dict[str, Any]:
    """What changes in a record whose run a budget ends; its metric there is interpolated."""
    within = [one for one in record.finite_history if one[0] < last_step]
    beyond = [one for one in record.finite_history if one[0] >= last_step]
    if beyond and (within or beyond[0][0] == last_step):
        steps, values = zip(*within[-1:], beyond[0], strict=True)
        value = float(np.interp(math.log(last_step), np.log(np.maximum(steps, 1)), values))
        history = (*within, (last_step, value))
        changes = {"status": "finished", "steps": last_step, "steps_low": last_step}
        return changes | {"history": history}
    if beyond:
        # Its first evaluation lies beyond the budget, and tells nothing.
        return {"status": "pruned", "steps": 0, "history": ()}
    return {"status": "pruned"} if record.has_trained else {}


def critical_over_targets(plan: Plan, records: Records) -> tuple[CriticalAt, ...]:
    """B_crit with its interval at easier targets, the easiest first, for the figure's fourth panel.

    There are none where a schedule ends with its trial, or the best metric is sought.
    """
    question = plan.question
    if question.schedule_ends or question.seeks_metric or len(records) > MOST_TRIALS:
        return ()
    found = []
    for target in targets_on_the_way(question.target, records):
        asked = replace(question, target=target)
        again = records_ended_by(asked, records)
        posterior = answer_posterior(replace(plan, question=asked), again, DRAWS, MOVES)
        interval = critical_batch_size(posterior, again).interval
        found.append(CriticalAt(goal=target.goal, interval=interval))
    return tuple(found)


def targets_on_the_way(target: Target, records: Records) -> list[Target]:
    """Targets that trials met early on the way, the easiest first.

    They are evenly spaced in the log excess of search/histories.
    """
    chains = last_of_chains(records)
    scale = excess_scale(target, chains)
    early = []
    for chain in chains:
        log_steps, log_excess = log_curve(chain, target, scale).T
        before = log_excess[log_steps <= math.log(max(EARLY * chain.steps, 1.0))]
        if chain.reached and len(before) and before[-1] > 0.0:
            early.append(float(before[-1]))
    targets = []
    for place in range(TARGETS, 0, -1):
        if early and target.goal is not None:
            gap = scale * math.expm1(statistics.median(early) * place / TARGETS)
            goal = target.goal + (gap if target.mode == "min" else -gap)
            targets.append(replace(target, goal=float(f"{goal:.3g}")))
    return targets
