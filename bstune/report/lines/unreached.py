"""Texts on a study that has not reached its target: the closest point, why, and what to change."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from bstune.result import SearchPlan, StudyResult, Unreached
from bstune.system.console import format_count, format_number, format_seconds, plural

# The option that bounds a study's time, and so its fresh seeds.
WALL_SECONDS = "search.wall_seconds"
NOTHING_REACHED = "nothing that was tried reached the target"
# Where more trials or a larger budget are advised, they are this many times as many.
ADVISED_TIMES = 4
# A budget that ends in time is advised from this share of the user's own run on.
LEAST_SHARE_OF_RUN = 0.25
# Why a metric never changes.
MEND_STUCK = "the training or the metric: nothing trains, or the metric is not of what is trained"
# At a rate so many times below the user's own one, a training that diverges has another cause.
FAR_BELOW = 100.0


def closest_texts(result: StudyResult) -> Iterator[str]:
    """Say that the target was not reached, and predict the closest point's steps and time to it."""
    yield f"nothing yet: {unreached_text(result)}"
    # The trial that came closest; None where none was evaluated.
    so_far = result.so_far
    if so_far is None:
        return
    if so_far.more_than is not None:
        limit = "the budget of a trial"
        if not so_far.beyond_budget:
            limit = "far beyond what it ran: how many is not known"
        steps = plural(so_far.more_than, "step")
        yield f"that trial is predicted to need more than {steps}, {limit}"
        return
    if so_far.predicted_steps is None:
        yield "whether it would meet the target cannot be told from its history"
        return
    parts = [plural(round(so_far.predicted_steps), "step")]
    if so_far.predicted_seconds is not None:
        parts.append(f"{format_seconds(so_far.predicted_seconds)} of training")
    yield f"that trial is predicted to meet the target after about {', '.join(parts)} in all"


def none_to_use(result: StudyResult) -> str:
    """Say why a result has no point to use: nothing reached the target, or too few trials did.

    Trials for another target may have passed this one on fresh seeds alone, which are no points of
    the search.
    """
    reached = result.statuses["reached"]
    if reached:
        return f"only {reached} of {plural(result.trials, 'trial')} reached the target"
    return NOTHING_REACHED


def unreached_text(result: StudyResult) -> str:
    """Write that the target was not reached, and the closest value with its point."""
    if not result.trials:
        return f"no trial has run, so {result.target} was not reached"
    reached = result.statuses["reached"]
    if reached:
        return f"{result.target} was reached in only {reached} of {plural(result.trials, 'trial')}"
    missed = f"{result.target} was not reached in {plural(result.trials, 'trial')}"
    if result.unreached is None or result.unreached.closest is None:
        return missed
    closest = result.unreached.closest
    value = format_number(closest.value)
    size = format_count(closest.batch_size)
    rate = format_number(closest.lr)
    after = f"after {plural(closest.steps, 'step')}"
    return f"{missed}; the closest was {value}, at batch size {size}, learning rate {rate}, {after}"


def unreached_advice(result: StudyResult) -> str:
    """Write in one line that the target was not reached, the likely cause, and what to try."""
    likely = cause_of(result)
    texts = [unreached_text(result)]
    if likely.why:
        texts.append(likely.why)
    if likely.change:
        texts.append(f"try {likely.change}")
    return "; ".join(texts)


@dataclass(frozen=True)
class Cause:
    """Why no trial reached the target, and what to change. None stands for what is not known."""

    why: str | None = None
    change: str | None = None


def failures_text(result: StudyResult) -> str | None:
    """Write how many trials failed by themselves, and the last one's error. None where none did."""
    failures = result.failures
    if failures is None:
        return None
    share = f"{failures.trials} of {plural(result.trials, 'trial')}"
    return f"{share} failed, the last one with {failures.message}"


def cause_of(result: StudyResult) -> Cause:
    """Find why no trial reached the target, by the status that most trials ended with.

    Failures win a tie, as the user can mend them.
    """
    statuses = dict(result.statuses)
    # Trials that were cut short with their process are no cause.
    failures = result.failures
    statuses["failed"] = 0 if failures is None else failures.trials
    unreached = result.unreached
    if not any(statuses.values()):
        # Without a trial only the end of the search can tell why.
        return Cause(result.stop_reason)
    if result.few_passed is not None:
        return Cause(f"the histories do not suffice for {result.target}: {result.few_passed}")
    # Of trials that were run for another target the number of stopped ones is not known, nor is why
    # they did not reach this one.
    if unreached is None or unreached.stopped is None:
        return Cause()
    most = max(statuses, key=lambda status: (statuses[status], status == "failed"))
    if most == "failed":
        return Cause(failures_text(result), "to mend what fails; the same command goes on")
    share = f"{statuses[most]} of {plural(result.trials, 'trial')}"
    if most == "out of memory":
        return Cause(f"{share} ran out of memory", "a smaller search.batch_size.high")
    if most == "diverged" and unreached.smallest_diverged_lr is not None:
        smallest = unreached.smallest_diverged_lr
        if smallest <= result.reference.lr / FAR_BELOW:
            why = f"{share} diverged, at learning rates down to {format_number(smallest, 2)}"
            return Cause(why, "to mend the loss or the metric: so small a rate changes little")
        # Well below the smallest rate that diverged.
        rate = format_number(smallest / 10.0, 2)
        return Cause(f"{share} diverged", f"smaller learning rates: scaling.lr={rate}")
    cause = _cause_of_stops(unreached, unreached.stopped, result)
    if unreached.as_fraction is None:
        return cause
    fraction = f"the target as a fraction (workload.target.value={unreached.as_fraction:g})"
    return replace(cause, change=f"{fraction} or {cause.change}")


def _cause_of_cuts(unreached: Unreached, stopped: str, result: StudyResult) -> Cause:
    """Word the cause where the study's time cut most trials before their schedule's end.

    A budget that ends in time is advised only where it is a real share of the user's own run: in
    less of it a warm-up may not even end.

    ``stopped``: the number of stopped trials, in words.
    """
    why = f"{unreached.cut_schedules} of {stopped} ended before the schedule did"
    more_time = more_of_limit(result.search)
    # A budget lasts until all of its limits are spent.
    of_steps = (unreached.budget_steps or 1) * result.reference.batch_size
    of_own_run = max(of_steps, unreached.budget_examples or 1)
    if not unreached.cut_examples or unreached.cut_examples < LEAST_SHARE_OF_RUN * of_own_run:
        return Cause(why, more_time or f"a much larger {WALL_SECONDS}")
    budget = f"budget.examples={unreached.cut_examples}"
    # One step leaves the length to the examples.
    if unreached.budget_steps is not None and unreached.budget_steps > 1:
        budget = f"budget.steps=1 {budget}"
    change = f"a budget whose schedule ends in time, such as {budget}"
    if more_time is not None:
        change += f", or {more_time}"
    return Cause(why, change)


def stuck_text(result: StudyResult) -> str | None:
    """Say that the metric never changed, in any trial; None where it did."""
    if result.only_value is None:
        return None
    return f"{result.metric} is {format_number(result.only_value)} in all evaluations of all trials"


def _cause_of_stops(unreached: Unreached, count: int, result: StudyResult) -> Cause:
    """Find why stopped trials did not reach the target, by how many of them still improved.

    ``count``: how many trials were stopped.
    """
    of_stopped = plural(count, "stopped trial")
    stuck = stuck_text(result)
    # Untrained weights would meet any easier target.
    if stuck is not None:
        return Cause(stuck, f"to mend {MEND_STUCK}")
    so_far = result.so_far
    # More trials of the same budget would not reach what takes more steps than that.
    is_beyond = so_far is not None and so_far.beyond_budget
    # Most were stopped before their schedule had brought the learning rate down: that tells nothing
    # of where a whole schedule ends.
    if 2 * unreached.cut_schedules >= count:
        return _cause_of_cuts(unreached, of_stopped, result)
    improving = unreached.improving
    too_few_evaluations = unreached.untold
    # Most were evaluated once or never: they show no change.
    if 2 * too_few_evaluations >= count:
        why = (
            f"{too_few_evaluations} of {of_stopped} had fewer than two evaluations, which show no "
            "improvement"
        )
        is_at_budget = 2 * unreached.untold_at_budget >= too_few_evaluations
        if is_beyond:
            return Cause(why, _more_steps(unreached, result.search, is_at_budget=True))
        more_steps = _more_steps(unreached, result.search, is_at_budget)
        return Cause(why, f"evaluations more often, or {more_steps}")
    # Most no longer improved: more steps would not bring them to the target.
    if 2 * improving < count - too_few_evaluations:
        changes = ["another learning rate (scaling.lr), another model or schedule"]
        # What the target is as a fraction is told in its place.
        if unreached.easier is not None and unreached.as_fraction is None:
            changes.insert(0, f"an easier target (workload.target.value={unreached.easier!r})")
        flat = count - too_few_evaluations - improving
        why = f"{flat} of {of_stopped} no longer improved when stopped"
        return Cause(why, " or ".join(changes))
    why = f"{improving} of {of_stopped} still improved when the search ended"
    at_budget = unreached.improving_at_budget
    is_at_budget = 2 * at_budget >= improving
    if is_at_budget:
        why = f"{at_budget} of {of_stopped} still improved at the end of the budget"
    return Cause(why, _more_steps(unreached, result.search, is_at_budget or is_beyond))


def _more_steps(unreached: Unreached, search: SearchPlan, is_at_budget: bool) -> str:
    """Write what gives trials more steps: more of the limit that stopped most of them.

    ``is_at_budget``: whether that was their budget; else the search ended before it was spent.
    """
    if is_at_budget:
        return f"a larger budget: {_larger_budget(unreached)}"
    limit = more_of_limit(search)
    if limit is not None:
        return f"{limit}: the same command continues them"
    if not search.trials:
        return "more search.trials"
    trials = ADVISED_TIMES * search.trials
    return f"search.trials={trials}: the same command continues them"


def more_of_limit(search: SearchPlan) -> str | None:
    """Write the limit that ended a search with a value to raise it to; None without a limit.

    A result of an earlier version does not tell the value that it had.
    """
    if search.limit is None:
        return None
    if search.limit_value is None:
        return f"a much larger {search.limit}"
    value = ADVISED_TIMES * search.limit_value
    if search.least_limit is not None:
        value = max(value, search.least_limit)
    return f"{search.limit}={math.ceil(value)}"


def _larger_budget(unreached: Unreached) -> str:
    """Write the options of a larger budget, which lasts until all of its limits are spent.

    A limit of 1 is left out: it leaves the length to the other one.
    """
    options = list[str]()
    for name, limit in (("steps", unreached.budget_steps), ("examples", unreached.budget_examples)):
        if limit is not None and limit > 1:
            options.append(f"budget.{name}={ADVISED_TIMES * limit}")
    return " ".join(options) or f"budget.steps={ADVISED_TIMES}"
