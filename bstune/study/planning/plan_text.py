"""A study's plan in words: what it seeks, where it looks, what its trials may take."""

from collections.abc import Sequence

from bstune.core.records import Budget, TrialResult
from bstune.search.each_batch_size import batch_sizes
from bstune.study.at_budget import question_of
from bstune.study.planning.duration import advice_on_time
from bstune.study.planning.plan import count_points, max_seconds, remaining_seconds
from bstune.study.planning.survey_time import seconds_left_of
from bstune.study.prepared import PreparedStudy
from bstune.system.console import format_count, format_number, format_seconds, plural
from bstune.trial.backend import chooses_batch_sizes, chooses_horizons, stops_trials

# Of the wall time, what is spent before the search begins is told from this share on.
TOLD_SHARE = 0.1


def plan_text(prepared: PreparedStudy, done: Sequence[TrialResult]) -> str:
    """Write the plan in a few lines.

    ``done``: the trials that an earlier run of the study has finished.
    """
    wall_seconds_left = max(seconds_left_of(prepared.options, prepared.elapsed)(), 0.0)
    lines = [
        _question_line(prepared),
        f"  {_space_text(prepared)}",
        f"  {_means_text(prepared, wall_seconds_left)}{_ends_text(prepared)}",
    ]
    ranges = list[str]()
    for tunable in prepared.space.tunables:
        span = f"{format_number(tunable.low)} to {format_number(tunable.high)}"
        ranges.append(f"{tunable.name} ({span})")
    if ranges:
        lines.append(f"  searches {', '.join(ranges)} as well")
    duration = _duration_text(prepared, done, wall_seconds_left)
    if duration is not None:
        lines.append(f"  {duration}")
    lines += [f"  {note}" for note in prepared.notes]
    return "\n".join(lines)


def _question_line(prepared: PreparedStudy) -> str:
    """Say what the study seeks, and on which device."""
    objective = prepared.budget.objective
    question = str(prepared.protocol.target)
    if objective == "loss":
        question = question_of(prepared.options)
    asked = f"study {prepared.options.study}: {question}, objective {objective}"
    if prepared.backend.objective_is_open:
        asked += " (steps, if the first trials tell no seconds)"
    return f"{asked}, on {prepared.backend.description}"


def _space_text(prepared: PreparedStudy) -> str:
    """Say which batch sizes and learning rates are searched."""
    space = prepared.space
    scaling = prepared.options.scaling
    rule = scaling.rule["_target_"].rpartition(".")[2]
    sizes = f"batch sizes {format_count(space.low)} to {format_count(space.high)}"
    factor = format_number(2**space.delta_bound)
    rates = f"learning rates within a factor of {factor} of rule {rule}"
    size = format_count(scaling.batch_size)
    reference = f"through B = {size}, lr = {format_number(scaling.lr)}"
    text = f"{sizes}, {rates} {reference}"
    # Without bounds of the user's the lower one is 0, which bounds nothing.
    if space.lr_low > 0:
        text += f", within {format_number(space.lr_low)} to {format_number(space.lr_high)}"
    return text


def _means_text(prepared: PreparedStudy, wall_seconds_left: float) -> str:
    """Say what the search may spend, and what of its wall time is left."""
    budget = prepared.budget
    means = [plural(budget.trials, "configuration")]
    if budget.seconds is not None:
        means.append(f"{format_seconds(budget.seconds)} of training")
    if budget.wall_seconds is not None:
        wall_time = f"{format_seconds(budget.wall_seconds)} of wall time"
        # The start of this command, and what earlier ones took.
        if wall_seconds_left < (1.0 - TOLD_SHARE) * budget.wall_seconds:
            why = ""
            if prepared.elapsed() > budget.most_start:
                why = ": the start counts for half at most"
            wall_time += f" ({format_seconds(wall_seconds_left)} of it left{why})"
        means.append(wall_time)
    return ", ".join(means)


def _ends_text(prepared: PreparedStudy) -> str:
    """Say what ends a trial, in words that end a line of the plan."""
    budget = prepared.budget
    backend = prepared.backend
    if budget.objective == "loss":
        if backend.stops:
            return "; each ends at its budget, and waits on the way while another is better"
        return "; each ends at its budget"
    at_most = budget_text(prepared.protocol.budget)
    # A sampler that has no ``max_steps`` stops no trials, whether or not the backend could.
    if not stops_trials(prepared.options):
        spread = _turns_text(prepared)
        if spread is None:
            spread = f"{budget.stratified:.0%} of them spread evenly over log B"
        return f", {spread}; each ends at the target or after {at_most}"
    # Any other stops them, where no schedule ends with its trial.
    if backend.stops:
        text = "; each ends at the target or once it cannot matter"
        if backend.continues:
            text += ", and may be continued"
        if budget.replicates and budget.candidates:
            text += "; winners run again"
        return text
    if backend.horizon and chooses_horizons(prepared.options):
        return (
            "; each ends at the target or with its schedule, at a horizon that the search chooses, "
            f"at most {at_most}"
        )
    return f"; each ends at the target or after {at_most}"


def _turns_text(prepared: PreparedStudy) -> str | None:
    """Say how a sampler that tunes each batch size by itself goes through the batch sizes.

    It is None for another sampler.
    """
    space = prepared.space
    trials = prepared.budget.trials
    if not chooses_batch_sizes(prepared.options):
        return None
    ratio = prepared.options.sampler["ratio"]
    count = len(batch_sizes(space.low, space.high, ratio, space.snap))
    if trials < count:
        return (
            f"at the {trials} smallest of {count} batch sizes alone: choose search.trials as a "
            f"multiple of {count}"
        )
    text = f"at each of {plural(count, 'batch size')} in turn"
    remainder = trials % count
    if remainder:
        text += f", one more at the {remainder} smallest"
    return text


def _duration_text(
    prepared: PreparedStudy, done: Sequence[TrialResult], wall_seconds_left: float
) -> str | None:
    """Say how long the study takes.

    None where that is not known, or where the study's limit of time, another line, says it.
    """
    options = prepared.options
    budget = prepared.budget
    # Trials that have ended tell it; before the first one the seconds of a step give a bound.
    remaining = remaining_seconds(budget, done)
    if remaining is not None:
        seconds_to_go = remaining / max(1, options.search.workers)
        seconds = format_seconds(min(seconds_to_go, wall_seconds_left))
        tried = plural(count_points(done), "configuration")
        return f"continues after {tried}; about {seconds} to go"
    if prepared.backend.knows_step_time:
        most = max_seconds(
            budget, prepared.space, prepared.protocol, prepared.backend, options.budget.seconds
        )
        most /= max(1, options.search.workers)
        # A replay answers at once, however long its runs took.
        limited = budget.wall_seconds is not None or budget.seconds is not None
        limited = limited or prepared.recipe is None
        advice = advice_on_time(most, budget.trials, options.device, limited)
        if advice is not None:
            return advice
        # A shorter limit of wall time has a line of its own.
        if budget.wall_seconds is None or most < budget.wall_seconds:
            return f"at most about {format_seconds(most)} if every trial ran to its budget"
    return None


def budget_text(budget: Budget) -> str:
    """Say in words after how many steps and examples a trial gives up.

    A limit of one is no limit: it is met at the first step, and both have to be met.
    """
    steps = plural(budget.steps, "step")
    examples = plural(budget.examples, "example")
    if budget.steps <= 1:
        return examples
    if budget.examples <= 1:
        return steps
    return f"{steps} and {examples}"
