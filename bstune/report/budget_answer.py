"""The lines of the answer of the objective loss: what has the best metric when the budget ends."""

import math
from collections.abc import Iterator

from bstune.result import (
    INTERVAL_LEVEL,
    AtBudget,
    FreshValues,
    PointAtBudget,
    SameAtBudget,
    StudyResult,
)
from bstune.system.console import format_count, format_number, format_seconds, plural

INTERVAL_TEXT = f"{INTERVAL_LEVEL:.0%}"
LEAST_GAIN = "search.least_gain"
# Significant digits of a metric.
LEAST_DIGITS = 3
MOST_DIGITS = 6


def budget_words(found: AtBudget) -> str:
    """Write the budget of a trial: ``1.00 min``, ``60,000 examples`` or ``500 steps``."""
    if found.seconds is not None:
        return format_seconds(found.seconds)
    if found.examples is not None:
        return plural(found.examples, "example")
    return plural(found.steps or 0, "step")


def point_words(point: PointAtBudget) -> str:
    """Write ``batch size 204, learning rate 1.13``, and what else is searched."""
    parts = [
        f"batch size {format_count(point.batch_size)}",
        f"learning rate {format_number(point.lr)}",
    ]
    parts += [f"{name} {format_number(value)}" for name, value in point.hyperparameters.items()]
    if point.horizon is not None:
        parts.append(f"a schedule of {plural(point.horizon, 'step')}")
    return ", ".join(parts)


def metric_words(value: float, found: AtBudget) -> str:
    """Write a value of the metric with three digits, or down to the first that differs between seeds."""
    digits = LEAST_DIGITS
    if value != 0.0 and found.seed_scatter > 0.0:
        apart = math.floor(math.log10(abs(value))) - math.floor(math.log10(found.seed_scatter))
        digits = min(max(digits, 1 + apart), MOST_DIGITS)
    return format_number(value, digits)


def fresh_words(fresh: FreshValues, found: AtBudget) -> str:
    """Write ``mean of 3 fresh seeds, 0.301 to 0.309``."""
    seeds = plural(len(fresh.values), "fresh seed")
    least = metric_words(min(fresh.values), found)
    most = metric_words(max(fresh.values), found)
    if len(fresh.values) == 1:
        return f"one {seeds.removeprefix('1 ')}"
    return f"mean of {seeds}, {least} to {most}"


def use(result: StudyResult) -> Iterator[str | None]:
    """Give the point to use, and the metric to expect of it."""
    found = result.at_budget
    if found is None:
        yield "nothing yet: no trial has run to its budget's end with a metric"
        return
    winner = found.winner
    how = "predicted, not run again on fresh seeds"
    if winner.fresh is not None:
        how = fresh_words(winner.fresh, found)
    yield (
        f"{point_words(winner)}: {result.metric} {metric_words(winner.expected, found)} after "
        f"{budget_words(found)}, {plural(winner.steps, 'step')} ({how})"
    )
    yield overridden_words(result, winner.lr)


def overridden_words(result: StudyResult, lr: float) -> str | None:
    """Say where a learning rate belongs that was set in the optimizer; None where the module takes it."""
    if not result.overrides_lr:
        return None
    return (
        f"the rate was set in the optimizer (override_lr), the largest of its groups and all others in proportion: "
        f"write {format_number(lr)} in configure_optimizers"
    )


def gain(result: StudyResult) -> Iterator[str | None]:
    """Tell by how much that is better than the baseline, and how much sooner it has what that has."""
    found = result.at_budget
    if found is None:
        return
    if found.baseline is None:
        yield "not known: no run of your own configuration came to its budget's end"
        return
    own = (
        f"your batch size {format_count(found.baseline.batch_size)}, learning rate "
        f"{format_number(found.baseline.lr)}"
    )
    if found.gain is None:
        yield f"none: {own} is the best that was found"
        return
    reached = metric_words(found.baseline.expected, found)
    told = found.gain
    by = f"{result.metric} {format_number(abs(told.difference), 2)}"
    interval = ""
    if told.low is not None and told.high is not None:
        ends = f"{format_number(told.low, 2)} to {format_number(told.high, 2)}"
        interval = f" ({INTERVAL_TEXT}: {ends}, {plural(told.seeds, 'fresh seed')})"
    elif told.difference > 0.0:
        interval = ", one run of each"
    better = "lower" if result.mode == "min" else "higher"
    is_shown = told.low is None or told.low > 0.0
    if told.difference <= 0.0 or not is_shown:
        yield f"not shown to be better than {own}, which comes to {reached}{interval}: keep what you have"
        return
    yield f"{by} {better} than {own}, which comes to {reached}{interval}"
    if told.share is not None and told.share < 1.0:
        yield f"has that {reached} after {told.share:.0%} of the budget"


def as_good(result: StudyResult) -> Iterator[str | None]:
    """Tell which batch sizes are not shown to be worse."""
    found = result.at_budget
    if found is None:
        return
    sizes = found.as_good
    if sizes.low == sizes.high:
        text = f"no other batch size than about {format_count(sizes.low)}"
    else:
        rates = (
            f"{format_number(sizes.lr_low, 3)} at {format_count(sizes.low)}, "
            f"{format_number(sizes.lr_high, 3)} at {format_count(sizes.high)}"
        )
        text = (
            f"batch sizes {format_count(sizes.low)} to {format_count(sizes.high)} are not shown to be "
            f"worse; learning rate {rates}"
        )
    open_ends = [
        word
        for word, is_open in (("smaller", sizes.is_low_open), ("larger", sizes.is_high_open))
        if is_open
    ]
    if open_ends:
        text += f"; {' and '.join(open_ends)} ones were not searched"
    yield text


def growth(result: StudyResult) -> Iterator[str | None]:
    """Tell how the best batch size moves with the budget."""
    found = result.at_budget
    if found is None or found.growth is None:
        return
    law = found.growth
    if all(one.is_at_end for one in law.best_sizes):
        end = format_count(round(law.best_sizes[0].batch_size))
        yield f"the best batch size is {end}, an end of those that were searched, at each part of the budget"
        return
    sizes = ", ".join(
        f"{format_count(round(one.batch_size))} at {one.share:.3g}"
        for one in reversed(law.best_sizes)
    )
    ends = f"{_exponent(law.low)} to {_exponent(law.high)}"
    text = f"the best batch size is {sizes} of the budget: B ~ budget^{_exponent(law.exponent)}"
    text += f" ({INTERVAL_TEXT}: {ends})"
    if law.low <= 0.0 <= law.high:
        text += ", which is not told apart from no growth"
    later = law.later
    sizes = f"{format_count(round(later.low))} to {format_count(round(later.high))}"
    yield (
        f"{text}; at {later.times:g} times the budget {format_count(round(later.batch_size))} is foretold "
        f"({INTERVAL_TEXT}: {sizes})"
    )


def left(result: StudyResult) -> Iterator[str | None]:
    """Tell what is still to gain, beside what one seed differs from another, and whether that ended the search."""
    found = result.at_budget
    if found is None:
        return
    text = (
        f"more points are expected to gain {result.metric} {format_number(found.gain_left_at_most, 2)} at most, "
        f"the next one {format_number(found.gain_left, 2)}; one seed differs from another by "
        f"{format_number(found.seed_scatter, 2)}"
    )
    if result.search.limit == LEAST_GAIN:
        yield f"{text}: that ended the search, a smaller {LEAST_GAIN} goes on"
    elif found.gain_left_at_most > found.seed_scatter:
        yield f"{text}: {_how_to_go_on(result)}"
    else:
        yield text


def _exponent(value: float) -> str:
    return f"{value:z.2f}"


def cautions(result: StudyResult) -> Iterator[str | None]:
    """Say what weakens the answer."""
    found = result.at_budget
    if found is None:
        yield from result.notes
        yield result.stop_reason
        return
    if found.same is not None:
        yield _same(result.metric, found, found.same)
    if found.winner.fresh is not None and found.winner.fresh.broken:
        broken = plural(found.winner.fresh.broken, "fresh seed")
        yield f"{broken} of USE diverged, or ended before the budget did"
    if found.winner.fresh is None:
        yield "USE is one run's luck, too: search.replicates=3 runs it again on fresh seeds"
    if result.search.limit not in (None, LEAST_GAIN) and result.stop_reason is not None:
        yield result.stop_reason


def _same(metric: str, found: AtBudget, same: SameAtBudget) -> str:
    """Say that the budget tells no trial from another, and which does, where the runs say it."""
    value = f"{metric} is {format_number(same.value, 3)} in all trials at their budget's end"
    if same.differs_at is None:
        return (
            f"{value}, and did not differ before: it tells nothing of batch sizes, nor do these runs say which "
            "longer budget would"
        )
    if found.seconds is not None:
        budget = f"budget.seconds={format_number(same.differs_at * found.seconds, 3)}"
    elif found.examples is not None:
        budget = f"budget.examples={math.ceil(same.differs_at * found.examples)}"
    else:
        budget = f"budget.steps={math.ceil(same.differs_at * (found.steps or 1))}"
    return f"{value}: {budget} is the smallest that shows a difference"


def _how_to_go_on(result: StudyResult) -> str:
    if result.search.limit is not None:
        return f"a larger {result.search.limit} goes on"
    return f"search.trials={2 * result.search.trials} goes on"


def next_steps(result: StudyResult) -> Iterator[str | None]:
    """Give the command that trains the winner."""
    found = result.at_budget
    if found is None or result.train is None:
        return
    told = found.gain
    keeps = told is None or told.difference <= 0.0 or (told.low is not None and told.low <= 0.0)
    if found.baseline is not None and keeps:
        yield "keep your configuration; to train with USE all the same:"
    else:
        yield "to train with USE:"
    yield result.train
