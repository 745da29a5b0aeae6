"""The lines of the answer of the objective loss: what has the best metric when the budget ends."""

import math
from collections.abc import Iterator

from bstune.report.lines.cautions import (
    gain_of_single_run,
    not_on_fresh_seeds,
    unused_seed,
)
from bstune.report.lines.gain import has_few_configurations, text_without_better
from bstune.report.lines.next_steps import advice_to_compare, on_limits
from bstune.report.lines.unreached import MEND_STUCK, failures_text, stuck_text
from bstune.report.lines.use import overridden_text
from bstune.report.trust import NOISY_ERROR
from bstune.report.words import PREDICTED, beyond_text, memory_text, point_text
from bstune.result import (
    INTERVAL_LEVEL,
    AtBudget,
    FreshValues,
    GainAtBudget,
    PointAtBudget,
    SameAtBudget,
    StudyResult,
)
from bstune.system.console import format_count, format_number, format_seconds, plural

INTERVAL_TEXT = f"{INTERVAL_LEVEL:.0%}"
# The option that ends a search once little is left to gain.
LEAST_GAIN = "search.least_gain"
# A winner that takes so many times as long as the baseline to the budget's end is told to do so.
MUCH_LONGER = 1.25
# An interval over this share of the searched batch sizes' octaves tells nothing of the best one.
NEARLY_ALL_SIZES = 0.75
# USE is named beside the best batch size where the two are more than this factor apart.
FAR_FROM_USE = 2.0
# The fewest and the most significant digits of a metric.
LEAST_DIGITS = 3
MOST_DIGITS = 6


def budget_words(at_budget: AtBudget) -> str:
    """Write the budget of a trial: ``1.00 min``, ``60,000 examples`` or ``500 steps``."""
    if at_budget.seconds is not None:
        return format_seconds(at_budget.seconds)
    if at_budget.examples is not None:
        return plural(at_budget.examples, "example")
    return plural(at_budget.steps or 0, "step")


def point_words(point: PointAtBudget) -> str:
    """Write ``batch size 204, learning rate 1.13``, and further hyper-parameters."""
    return point_text(point.batch_size, point.lr, point.hyperparameters, point.horizon)


def metric_words(value: float, at_budget: AtBudget) -> str:
    """Write a metric's value to three digits, or to the first one in which seeds differ."""
    digits = LEAST_DIGITS
    if value != 0.0 and at_budget.seed_scatter > 0.0:
        decade = math.floor(math.log10(abs(value)))
        decade_of_scatter = math.floor(math.log10(at_budget.seed_scatter))
        # From the first digit of the value to that of the scatter.
        digits = min(max(digits, 1 + decade - decade_of_scatter), MOST_DIGITS)
    return format_number(value, digits)


def fresh_words(fresh: FreshValues, at_budget: AtBudget) -> str:
    """Write ``mean of 3 fresh seeds, 0.301 to 0.309``."""
    seeds = plural(len(fresh.values), "fresh seed")
    least = metric_words(min(fresh.values), at_budget)
    most = metric_words(max(fresh.values), at_budget)
    # One value has no mean and no range.
    if len(fresh.values) == 1:
        return f"one {seeds.removeprefix('1 ')}"
    return f"mean of {seeds}, {least} to {most}"


def use(result: StudyResult) -> Iterator[str | None]:
    """Give the point to use, and the metric to expect of it at the budget's end.

    A text that is None is left out.
    """
    at_budget = result.at_budget
    if at_budget is None:
        yield "nothing yet: no trial has run to its budget's end with a metric"
        return
    winner = at_budget.winner
    how = PREDICTED
    if winner.fresh is not None:
        how = fresh_words(winner.fresh, at_budget)
    duration = ""
    # Trials of a budget in seconds all take these.
    if winner.seconds is not None and at_budget.seconds is None:
        duration = f" in {format_seconds(winner.seconds)}"
    yield (
        f"{point_words(winner)}: {result.metric} {metric_words(winner.expected, at_budget)} after "
        f"{budget_words(at_budget)}, {plural(winner.steps, 'step')}{duration} ({how})"
    )
    yield overridden_text(result, winner.lr)


def gain(result: StudyResult) -> Iterator[str | None]:
    """Tell how much better USE is than the baseline, and how much sooner it is as good."""
    at_budget = result.at_budget
    if at_budget is None:
        return
    if at_budget.baseline is None:
        yield "not known: no run of your own configuration came to its budget's end"
        return
    baseline = at_budget.baseline
    # All schedules are as long as the budget, so that none is named.
    point = point_text(baseline.batch_size, baseline.lr, baseline.hyperparameters, horizon=None)
    yours = f"your {point}"
    difference = at_budget.gain
    if difference is None:
        yield text_without_better(result, yours)
        return
    baseline_value = metric_words(baseline.expected, at_budget)
    basis = _basis_text(difference, baseline, at_budget.winner)
    compared = f"{yours}, which comes to {baseline_value}{basis}"
    if not _is_better(at_budget, difference):
        yield f"not shown to be better than {compared}: keep what you have"
        return
    better = "higher"
    if result.mode == "min":
        better = "lower"
    amount = format_number(abs(difference.difference), 2)
    yield f"{result.metric} {amount} {better} than {compared}"
    if difference.share is not None and difference.share < 1.0:
        yield f"has that {baseline_value} after {difference.share:.0%} of the budget"
    yield _slower_text(at_budget.winner, baseline)


def _slower_text(winner: PointAtBudget, baseline: PointAtBudget) -> str | None:
    """Say how many times as long as the baseline the winner takes, where that is much longer."""
    if winner.seconds is None or not baseline.seconds:
        return None
    ratio = winner.seconds / baseline.seconds
    if ratio < MUCH_LONGER:
        return None
    return f"takes {format_number(ratio, 2)} times as long as yours"


def _basis_text(difference: GainAtBudget, baseline: PointAtBudget, winner: PointAtBudget) -> str:
    """Write the interval of a gain, or on which runs it was measured."""
    seeds = plural(difference.seeds, "fresh seed")
    if difference.low is not None and difference.high is not None:
        span = f"{format_number(difference.low, 2)} to {format_number(difference.high, 2)}"
        return f" ({INTERVAL_TEXT}: {span}, {seeds})"
    # Of a single seed, or of recorded runs, the scatter is not known.
    if difference.seeds:
        return f", on {seeds} of both"
    return f"; {_runs_words('yours', baseline)}, {_runs_words('USE', winner)}"


def _runs_words(name: str, point: PointAtBudget) -> str:
    """Write on which runs the metric of a point was measured, such as ``USE on 3 fresh seeds``.

    ``name``: the point's name in the line.
    """
    if point.fresh is None:
        return f"{name} predicted from its single search trial"
    return f"{name} on {plural(len(point.fresh.values), 'fresh seed')}"


def _is_better(at_budget: AtBudget, difference: GainAtBudget) -> bool:
    """Whether the winner is better than the baseline.

    The interval must lie above 0; without one, the difference above the scatter of seeds.
    """
    if difference.low is not None:
        return difference.low > 0.0
    return difference.difference > at_budget.seed_scatter


def as_good(result: StudyResult) -> Iterator[str]:
    """Tell which batch sizes are not shown to be worse than the best one."""
    at_budget = result.at_budget
    if at_budget is None:
        return
    sizes = at_budget.as_good
    low = format_count(sizes.low)
    high = format_count(sizes.high)
    text = f"no other batch size than about {low}"
    if sizes.low != sizes.high:
        lr_low = format_number(sizes.lr_low, 3)
        lr_high = format_number(sizes.lr_high, 3)
        text = (
            f"batch sizes {low} to {high} are not shown to be worse; learning rate {lr_low} at "
            f"{low}, {lr_high} at {high}"
        )
    beyond = beyond_text(sizes.is_low_open, sizes.is_high_open, "are not known")
    yield f"{text}{beyond}{memory_text(result)}"


def growth(result: StudyResult) -> Iterator[str]:
    """Tell how the best batch size grows with the budget, and predict it for a longer one."""
    at_budget = result.at_budget
    if at_budget is None or at_budget.growth is None:
        return
    law = at_budget.growth
    parts = list[str]()
    # They are listed from the shortest budget to the whole one.
    for best in reversed(law.best_sizes):
        parts.append(f"{format_count(round(best.batch_size))} at {best.share:.3g}")
    # At an end of the batch sizes the best one may lie beyond it, so its growth is not known.
    if all(best.is_at_end for best in law.best_sizes):
        ends = {format_count(round(best.batch_size)) for best in law.best_sizes}
        if len(ends) == 1:
            yield (
                f"the best batch size is {ends.pop()}, an end of those that were searched, at each "
                "part of the budget"
            )
        else:
            yield (
                "the best batch size is an end of those that were searched at each part of the "
                f"budget: {', '.join(parts)}"
            )
        return
    whole = law.best_sizes[0]
    interval_of_whole = f"{INTERVAL_TEXT}: {_sizes_words(whole.low, whole.high)}"
    if has_few_configurations(result):
        tried = plural(result.configurations or 0, "configuration")
        yield f"how the best batch size grows with the budget is not known from {tried}"
        return
    if _share_of_searched(at_budget, whole.low, whole.high) >= NEARLY_ALL_SIZES:
        yield (
            "how the best batch size grows with the budget is not known: nearly any may be the "
            f"best of the whole one ({interval_of_whole})"
        )
        return
    power = f"B ~ budget^{_exponent(law.exponent)}"
    interval = f"{INTERVAL_TEXT}: {_exponent(law.low)} to {_exponent(law.high)}"
    text = f"the best batch size is {', '.join(parts)} of the budget: {power} ({interval})"
    if law.low <= 0.0 <= law.high:
        text += ", which is not told apart from no growth"
    later = law.later
    # An interval as wide as the batch sizes that were searched foretells nothing.
    if _share_of_searched(at_budget, later.low, later.high) < 1.0:
        text += (
            f"; at {later.times:g} times the budget {format_count(round(later.batch_size))} is "
            f"foretold ({INTERVAL_TEXT}: {_sizes_words(later.low, later.high)})"
        )
    yield text
    used = at_budget.winner.batch_size
    if max(used / whole.batch_size, whole.batch_size / used) > FAR_FROM_USE:
        place = "within" if whole.low <= used <= whole.high else "outside of"
        yield (
            f"USE's {format_count(used)}, the best of what ran, lies {place} the interval of the "
            f"best batch size at 1 ({interval_of_whole})"
        )


def _sizes_words(low: float, high: float) -> str:
    """Write two batch sizes as the ends of an interval."""
    return f"{format_count(round(low))} to {format_count(round(high))}"


def _share_of_searched(at_budget: AtBudget, low: float, high: float) -> float:
    """Give the octaves from ``low`` to ``high`` as a share of those that were searched."""
    searched = at_budget.curve[-1].batch_size / at_budget.curve[0].batch_size
    # A single batch size that was searched has no octaves to spread over.
    if searched <= 1.0:
        return 0.0
    return math.log(high / low) / math.log(searched)


def gain_left(result: StudyResult) -> Iterator[str]:
    """Tell how much there is still to gain, and whether that ended the search.

    The scatter between seeds stands beside it: ``search.least_gain``, at which the search ends, is
    a fraction of that scatter.
    """
    at_budget = result.at_budget
    if at_budget is None:
        return
    most = format_number(at_budget.gain_left_at_most, 2)
    by_next = format_number(at_budget.gain_left, 2)
    scatter = format_number(at_budget.seed_scatter, 2)
    text = (
        f"more points are expected to gain {result.metric} {most} at most, the next one {by_next}; "
        f"one seed differs from another by {scatter}"
    )
    if result.search.limit == LEAST_GAIN:
        yield f"{text}: that ended the search, a smaller {LEAST_GAIN} goes on"
    elif at_budget.gain_left_at_most > at_budget.seed_scatter:
        yield f"{text}: {_how_to_go_on(result)}"
    else:
        yield text


def _exponent(value: float) -> str:
    """Write an exponent with two decimals. Rounded to 0 it has no sign."""
    return f"{value:z.2f}"


def cautions(result: StudyResult) -> Iterator[str | None]:
    """Give all that weakens the answer, the worst first. Before there is one, say why not.

    A text that is None is left out.
    """
    at_budget = result.at_budget
    failed = failures_text(result)
    if at_budget is None:
        if failed is not None:
            yield failed
        yield from result.notes
        yield result.stop_reason
        return
    # Where all trials have the same metric at the budget's end, none is known to be best. That is
    # the worst.
    if at_budget.same is not None:
        stuck = stuck_text(result)
        if stuck is not None:
            # Nothing tells whether a value of the metric is the best that it can have.
            yield f"{stuck}: mend {MEND_STUCK}; if it is as good as can be, evaluate earlier"
        else:
            yield _same_text(result.metric, at_budget, at_budget.same)
    yield from unused_seed(result)
    # The mean leaves these seeds out. With them it would be worse.
    if at_budget.winner.fresh is not None and at_budget.winner.fresh.broken:
        broken = plural(at_budget.winner.fresh.broken, "fresh seed")
        yield f"{broken} of USE diverged, or ended before the budget did"
    if at_budget.winner.fresh is None:
        yield from not_on_fresh_seeds(result)
    # Without a gain USE is the baseline itself.
    compared = at_budget.baseline if at_budget.gain is not None else None
    if compared is not None and compared.fresh is None:
        yield from gain_of_single_run(result)
    yield from _unsure_count(at_budget)
    if failed is not None:
        yield failed
    # A search that ended by least_gain found what it looked for: that needs no caution.
    if result.search.limit not in (None, LEAST_GAIN) and result.stop_reason is not None:
        yield result.stop_reason


def _unsure_count(at_budget: AtBudget) -> Iterator[str]:
    """Warn where a step's seconds are known too badly to compare USE with the user's batch size.

    A budget in seconds is counted out as steps. An error in that count favours one of the two.
    """
    if at_budget.count_error is None or at_budget.count_error <= NOISY_ERROR:
        return
    yield (
        f"how many steps of USE fit into {budget_words(at_budget)}, beside those of your batch "
        f"size, is known to {at_budget.count_error:.0%}: on a quiet machine, a new study with "
        "hardware.refresh=true counts by steps timed anew"
    )


def _same_text(metric: str, at_budget: AtBudget, same: SameAtBudget) -> str:
    """Say that all trials have the same metric at the budget's end.

    If the trials differed earlier, the text names the smallest budget at whose end they do.
    """
    value = f"{metric} is {format_number(same.value, 3)} in all trials at their budget's end"
    share = same.differs_at
    if share is None:
        return (
            f"{value}, and did not differ before: it tells nothing of batch sizes, nor do these "
            "runs say which longer budget would"
        )
    if at_budget.seconds is not None:
        budget = f"budget.seconds={format_number(share * at_budget.seconds, 3)}"
    elif at_budget.examples is not None:
        budget = f"budget.examples={math.ceil(share * at_budget.examples)}"
    else:
        # A budget without seconds and examples has steps.
        budget = f"budget.steps={math.ceil(share * (at_budget.steps or 1))}"
    return f"{value}: {budget} is the smallest that shows a difference"


def _how_to_go_on(result: StudyResult) -> str:
    """Name the option that lets the search go on: the one that ended it, else more trials."""
    if result.search.limit is not None:
        return f"a larger {result.search.limit} goes on"
    return f"search.trials={2 * result.search.trials} goes on"


def next_steps(result: StudyResult) -> Iterator[str]:
    """Give the command that trains the winner, and say so where nothing better was shown."""
    if result.at_budget is None or result.train is None:
        return
    yield advice_to_keep(result) or "to train with USE:"
    yield result.train
    yield from on_limits(result.train)


def advice_to_keep(result: StudyResult) -> str | None:
    """Advise to keep the user's own configuration, as GAIN does if USE is not shown to be better.

    The command that trains USE follows the text. None where USE is shown to be better, or where
    there is no baseline.
    """
    at_budget = result.at_budget
    if at_budget is None or at_budget.baseline is None:
        return None
    # Without a gain USE is the baseline itself.
    if at_budget.gain is None and has_few_configurations(result):
        return advice_to_compare(result.search)
    if at_budget.gain is None:
        return "keep your configuration; to train with it:"
    if _is_better(at_budget, at_budget.gain):
        return None
    return (
        "keep your configuration, and train as you do today; to train with USE, batch size "
        f"{format_count(at_budget.winner.batch_size)}, all the same:"
    )
