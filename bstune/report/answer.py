"""What a study answers, in words: all of them, from its result.

    answer(result).headline

Each line of the answer is a function of the result, in the table ``LINES``, ``ACTIONS`` or
``DETAILS``. The console, the figure's title, the pages, comparisons and MLflow's note take their
words from here. What a study does not know is left out.

* USE has the median over fresh seeds with the 90% interval of that median: the seeds' scatter, the
  evaluations' grid and, of seconds, the error of tau(B). A machine's speed changes from minute to
  minute, which that error holds.
* GAIN is the mean ratio over the fresh seeds that both ran on. Its interval pools their scatter with
  that of all trials (:mod:`bstune.study.planning.baseline`). One that holds 1 says so.
* AS GOOD takes each batch size at its best learning rate (:mod:`bstune.study.analysis.as_good`).
* DEVICES takes each device to be as fast as this one. Above the critical batch size a larger batch
  saves few steps, yet on one device it can still be the fastest.
* CAUTION names fresh seeds that missed the target, a configuration that may be better and had none,
  a target that is met at the first look, a noisy machine, an open interval.

``--json`` writes the result's JSON to standard output, and all else to standard error.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from bstune.core.records import Merit
from bstune.core.scaling import RULES
from bstune.report import budget_answer
from bstune.result import (
    INTERVAL_LEVEL,
    MAXIMAL_DATA_PARALLELISM,
    PERFECT_SCALING,
    AtEqualSeconds,
    BaselineResult,
    Confirmed,
    CriticalAtTarget,
    CriticalBatchSize,
    DevicePlan,
    Exponent,
    Growth,
    StudyResult,
    Unreached,
    WinnerResult,
)
from bstune.system.console import (
    WIDTH,
    format_count,
    format_number,
    format_seconds,
    plural,
    time_unit,
    wrapped,
)

Line = tuple[str, tuple[str, ...]]
"""A label, and texts: the second one and further ones stand below the first."""
# Columns of a label on the console.
INDENT = 10
PREDICTED = "predicted, not run again on fresh seeds"
# The upper end of B_crit's interval over its lower one: up to this, nothing narrower is advised.
NARROW_RATIO = 1.5
# The same, up to which the interval is called good.
GOOD_RATIO = 3.0
NOTHING_REACHED = "nothing that was tried reached the target"
# Chance of reaching the target from which on a winner is called no risk: nine of ten, and some
# room.
SURE_CHANCE = 0.8
# Relative error of a step's seconds, on a quiet machine at most.
NOISY_ERROR = 0.1
# Share of the time that steps wait for a processor, on a quiet machine at most.
BUSY_SHARE = 0.1
# Below this efficiency more than half of each device is lost: that number is the last one named.
LEAST_EFFICIENCY = 0.5
# Times what was spent, where more of it is the advice.
ADVISED_TIMES = 4
# The name of a training loop that is not bstune's begins so.
LIGHTNINGS = "Lightning's: "
# The name of a loop whose steps were to be captured as a graph, and were not, begins so.
NOT_CAPTURED = "lean, not graph: "
# On the console and in a notebook; the page has all of them.
SHOWN_CAUTIONS = 3


@dataclass(frozen=True)
class Trust:
    """How far one part of the answer can be trusted."""

    name: str
    """``range`` of the curve, its ``coverage``, ``seeds`` or ``noise``."""
    text: str
    """What was seen of it, in words."""
    good: bool
    """Whether that is enough."""


@dataclass(frozen=True)
class Answer:
    """A study's answer.

    Args:
        title: what was asked: workload, target, device and number of trials.
        headline: the answer as one sentence.
        lines: label and texts of the answer, in the order in which it is read.
        actions: label and texts of what to do next: a command, or what to change.
        details: label and texts of what the page has besides.
    """

    title: str
    headline: str
    lines: tuple[Line, ...]
    actions: tuple[Line, ...]
    details: tuple[Line, ...]


def answer(result: StudyResult) -> Answer:
    """Put into words what a study answers."""
    title = f"{question(result)} · {plural(result.trials, 'trial')}"
    headline = _headline(result)
    if result.objective == "loss":
        return Answer(
            title,
            headline,
            lines=_told_lines(BUDGET_LINES, result),
            actions=_told_lines(BUDGET_ACTIONS, result),
            details=_told_lines(BUDGET_DETAILS, result),
        )
    return Answer(
        title,
        headline,
        lines=_told_lines(LINES, result),
        actions=_told_lines(ACTIONS, result),
        details=_told_lines(DETAILS, result),
    )


def question(result: StudyResult) -> str:
    """Say what was asked: the workload, the target and the devices."""
    parts = [result.workload, result.target, *map(device_text, result.devices)]
    if result.study != result.workload:
        parts.insert(0, f"study {result.study}")
    return " · ".join(part for part in parts if part)


def _told_lines(lines: "Lines", result: StudyResult) -> tuple[Line, ...]:
    """Give the lines that have a text."""
    told = list[Line]()
    for label, tell in lines:
        texts = tuple(text for text in tell(result) if text)
        if texts:
            told.append((label, texts))
    return tuple(told)


def block(found: Answer, further: Sequence[Line] = (), width: int = WIDTH) -> list[str]:
    """Give an answer as lines of the console, of so many columns.

    ``further`` follows, such as the page's path. Neither it nor a command is broken.
    """
    rows = [*wrapped(found.title, width), ""]
    shown = shown_lines(found)
    # The lines of the answer come first, then what to do, which may be a command.
    count = len(found.lines)
    for label, texts in shown[:count]:
        rows += labelled_rows(label, texts, width)
    for label, texts in (*shown[count:], *further):
        rows += labelled_rows(label, texts, None)
    return rows


def shown_lines(found: Answer) -> list[Line]:
    """Give the lines that the console and a notebook show: the first cautions, then what to do."""
    shown = list[Line]()
    for label, texts in found.lines:
        if label == "CAUTION" and len(texts) > SHOWN_CAUTIONS:
            not_shown = len(texts) - SHOWN_CAUTIONS
            texts = (*texts[:SHOWN_CAUTIONS], f"{not_shown} more in the page")
        shown.append((label, texts))
    # What would show more is for the page's reader: the console says what to do next.
    for label, texts in found.actions:
        if label != "MORE":
            shown.append((label, texts))
    return shown


def labelled_rows(label: str, texts: Sequence[str], width: int | None) -> list[str]:
    """Lay out a labelled line, its texts below each other, wrapped to the width; None: whole."""
    texts_rows = list[str]()
    for text in texts:
        if width is None:
            texts_rows.append(text)
        else:
            texts_rows += wrapped(text, width - INDENT)
    rows = list[str]()
    for row in texts_rows:
        shown_label = "" if rows else label
        rows.append(f"{shown_label:<{INDENT}}{row}")
    return rows


def _headline(result: StudyResult) -> str:
    if result.at_budget is not None:
        point = result.at_budget.winner
        value = format_number(point.expected, 3)
        size = format_count(point.batch_size)
        return f"{result.workload}: use B = {size}, {result.metric} {value}"
    use = result.winner
    if use is None:
        return f"{result.workload}: {unreached_text(result)}"
    text = f"{result.workload}: use B = {format_count(use.batch_size)}"
    critical = result.critical_batch_size
    if critical is None or critical.is_of_one_size:
        return f"{text}; critical batch size not known"
    # A headline has no room for the interval's level.
    span = interval_text(critical).partition(": ")[2] or "open at both ends"
    if critical.value is None:
        return f"{text}; critical batch size undetermined ({span})"
    return f"{text}; critical batch size {format_number(critical.value, 2)} ({span})"


def device_text(device: str) -> str:
    """Write ``cpu, 1 thread`` for ``cpu (1 thread)``."""
    if device == "replay":
        return "replayed"
    return device.replace(" (", ", ").removesuffix(")")


def _use(result: StudyResult) -> Iterator[str | None]:
    """Give the winner and what it takes; without one, the point that came closest."""
    use = result.winner
    if use is None:
        yield from _unreached(result)
        return
    yield f"{winner_text(use, result.tokens)}: {expected_text(use)}"
    yield budget_answer.overridden_words(result, use.lr)


def _test(result: StudyResult) -> Iterator[str | None]:
    """Give the winner's metrics on the test set."""
    if result.use is None:
        return
    # The other winner's metrics are not those of this point.
    metrics = result.test.get(result.use, {})
    values = ", ".join(f"{name} {format_number(value)}" for name, value in metrics.items())
    if values:
        yield f"{values} of one run, on data that took no part in the choice"


def winner_text(winner: WinnerResult, tokens: int | None = None) -> str:
    """Write ``batch size 204, learning rate 1.13``, and further hyper-parameters and the horizon.

    ``tokens``: of an example, where it has some; then ``batch size 204 (13,056 tokens)``.
    """
    return point_text(winner.batch_size, winner.lr, winner.hyperparameters, winner.horizon, tokens)


def _baseline_text(baseline: BaselineResult) -> str:
    return point_text(baseline.batch_size, baseline.lr, baseline.hyperparameters)


def point_text(
    batch_size: int,
    lr: float,
    hyperparameters: Mapping[str, float | None],
    horizon: int | None = None,
    tokens: int | None = None,
) -> str:
    """Write ``batch size 204, learning rate 1.13``, with what else is searched, and the horizon."""
    size = f"batch size {format_count(batch_size)}"
    if tokens is not None:
        size += f" ({format_count(batch_size * tokens)} tokens)"
    parts = [size, f"learning rate {format_number(lr)}"]
    for name, value in hyperparameters.items():
        parts.append(f"{name} {format_number(value)}")
    if horizon is not None:
        parts.append(f"a schedule of {plural(horizon, 'step')}")
    return ", ".join(parts)


def expected_text(winner: WinnerResult) -> str:
    """Write what a winner takes: the median over fresh seeds, and its interval.

    ``613 ms, 53 steps (3 of 3 fresh seeds reached it; 90%: 480 to 737 ms, 48 to 88 steps)``
    """
    medians = list[str]()
    if winner.time_to_target is not None:
        medians.append(format_seconds(winner.time_to_target))
    if winner.steps is not None:
        medians.append(plural(round(winner.steps), "step"))
    expected = ", ".join(medians)
    fresh = winner.confirmed
    if fresh is None:
        return f"{expected} ({PREDICTED})"
    reached = fresh_text(fresh)
    ranges = [range_text("time", fresh), range_text("steps", fresh)]
    interval = ", ".join(text for text in ranges if text)
    if not interval:
        return f"not known: {reached} reached the target"
    # Where half of the seeds missed the target the median is one that missed it.
    if not expected:
        return f"not known: only {reached} reached the target ({interval})"
    seeds = f"{reached} reached it"
    if winner.reaching is not None:
        seeds += f", predicted for {winner.reaching.chance:.0%} of further ones"
    return f"{expected} ({seeds}; {INTERVAL_LEVEL:.0%}: {interval})"


def fresh_text(fresh: Confirmed) -> str:
    """Write ``3 of 3 fresh seeds``."""
    return f"{fresh.reached} of {plural(fresh.runs, 'fresh seed')}"


def range_text(merit: Merit, fresh: Confirmed) -> str | None:
    """Write the interval over fresh seeds, ``480 to 737 ms`` or ``48 to 88 steps``.

    None where none of them reached the target.
    """
    low, high = fresh.ends(merit)
    if low is None:
        return None
    first = format_count(low)
    last = format_count(high)
    unit = "steps"
    if merit == "time":
        # Both ends have the median's unit, so that they are compared at a glance.
        scale, unit = time_unit(fresh.time_median or low)
        first = format_number(low / scale, 3)
        if high is not None:
            last = format_number(high / scale, 3)
    if high is None:
        return f"{first} {unit} and more"
    if first == last:
        return f"{first} {unit}"
    return f"{first} to {last} {unit}"


def _gain(result: StudyResult) -> Iterator[str | None]:
    """How much faster the winner is than the user's own configuration, or why that is not known."""
    baseline = result.baseline
    if baseline is None:
        return
    yours = f"your {_baseline_text(baseline)}"
    so_far = result.so_far
    # Without a winner there are no times to the target: the metric is compared instead.
    if result.winner is None and so_far is not None and so_far.compared is not None:
        yield _compared_text(so_far.compared, yours)
        return
    gain = result.gain
    if gain is None:
        yield _no_gain_text(baseline, result.winner, yours)
        return
    better = "fewer steps than"
    if gain.merit == "time":
        better = "as fast as"
    ratio = _ratio_text(gain.ratio)
    if gain.at_least or gain.low is None:
        yield f"at least {ratio} times {better} {yours}, stopped before the target"
        return
    interval = f"{gain.level:.0%} interval: {_ratio_text(gain.low)} to {_ratio_text(gain.high)}"
    if gain.low <= 1.0:
        yield f"not shown to be faster than {yours}: keep what you have ({ratio} times, {interval})"
    else:
        yield f"{ratio} times {better} {yours} ({interval})"


def _ratio_text(ratio: float | None) -> str:
    """Write a ratio to as many digits as tell it from 1."""
    digits = 2
    if ratio is not None and ratio < 2.0:
        digits = 3
    return format_number(ratio, digits)


def _compared_text(compared: AtEqualSeconds, yours: str) -> str:
    """Tell what the closest point and the user's own had come to after equal seconds."""
    value = format_number(compared.value, 3)
    of_baseline = format_number(compared.baseline_value, 3)
    seconds = format_seconds(compared.seconds)
    closest = f"after {seconds} of training the closest point was at {value}"
    return f"{closest}, {yours} at {of_baseline} (one run each)"


def _no_gain_text(baseline: BaselineResult, use: WinnerResult | None, yours: str) -> str:
    """Why there is no gain, and what the user's own configuration came to."""
    after = plural(baseline.steps, "step")
    if baseline.status == "out of memory":
        return f"not known: {yours} ran out of memory after {after}"
    if baseline.status == "diverged":
        return f"not known: {yours} diverged after {after}"
    if use is None:
        return f"not known: {NOTHING_REACHED}, nor did {yours} in {after}"
    if _is_at(use, baseline):
        return f"none: {yours} is the best that was found"
    return f"not known: {yours} {baseline.status} after {after}"


def _is_at(winner: WinnerResult, baseline: BaselineResult) -> bool:
    """Whether the winner is the user's own configuration."""
    return winner.batch_size == baseline.batch_size and winner.lr == baseline.lr


def _as_good(result: StudyResult) -> Iterator[str | None]:
    """Give the batch sizes that are as good, as a range."""
    as_good = result.as_good
    if as_good is None or result.winner is None:
        return
    least = "least number of steps"
    if as_good.merit == "time":
        least = "least time"
    within = f"within {as_good.within:.0%} of the {least}"
    if as_good.low == as_good.high:
        yield f"no other batch size that was tried is {within}"
        return
    # The middle may be one of the ends.
    lr_of_size = {
        as_good.low: as_good.lr_low,
        as_good.middle: as_good.lr_middle,
        as_good.high: as_good.lr_high,
    }
    rates = ", ".join(
        f"{format_number(lr, 3)} at {format_count(size)}" for size, lr in lr_of_size.items()
    )
    sizes = f"batch sizes {format_count(as_good.low)} to {format_count(as_good.high)}"
    text = f"{sizes}, predicted {within}; learning rate {rates}"
    unknown = list[str]()
    if as_good.is_low_open:
        unknown.append("smaller")
    if as_good.is_high_open:
        unknown.append("larger")
    if unknown:
        text += f"; {' and '.join(unknown)} ones are not known"
    yield text


def _cautions(result: StudyResult) -> Iterator[str | None]:
    """Give what would change the answer, the worst first; without a winner, why there is none."""
    if result.winner is None:
        yield _cause(result).why
        return
    yield from _missed(result)
    yield from _may_miss(result)
    # Only where a limit ended the search would more of it change the answer.
    if result.search.limit is not None and result.stop_reason is not None:
        yield result.stop_reason
    yield from _not_run_again(result)
    yield from _too_easy(result)
    yield from _untold(result)
    noise = _noise(result)
    if noise is not None and not noise.good:
        yield noise.text
    yield from _open_interval(result)


def warnings(result: StudyResult) -> tuple[str, ...]:
    """Tell what stands beside a study wherever it is compared.

    That is, that nothing, or not all, reached the target, or that it was too easy.
    """
    if result.winner is None:
        return tuple(_unreached(result))
    return (*_missed(result), *_too_easy(result))


def _missed(result: StudyResult) -> Iterator[str]:
    """Winners that some fresh seeds missed, or that had none."""
    for winner in (result.winner, result.other_winner):
        if winner is None or winner.confirmed is None or winner.confirmed.all_reached:
            continue
        yield f"only {fresh_text(winner.confirmed)} reached the target at {winner_text(winner)}"
    if result.search.replicates == 0:
        yield "USE is one run's luck, too: search.replicates=3 runs it again on fresh seeds"


def _may_miss(result: StudyResult) -> Iterator[str]:
    """Name a schedule that further seeds are not sure to reach the target with.

    The few fresh ones may have reached it all the same.
    """
    winner = result.winner
    if winner is None or winner.reaching is None or winner.horizon is None:
        return
    reaching = winner.reaching
    if reaching.chance >= SURE_CHANCE:
        return
    seeds = f"{reaching.chance:.0%} of further seeds are predicted to reach the target"
    text = f"{seeds} with a schedule of {plural(winner.horizon, 'step')}"
    if reaching.longest > winner.horizon:
        longest = f"the longest one, of {format_count(reaching.longest)}"
        text += f", {reaching.best_chance:.0%} with {longest}"
    yield text


def _not_run_again(result: StudyResult) -> Iterator[str]:
    """Give a point that is predicted to be better and got no fresh seeds."""
    left_out = result.not_run_again
    if left_out is None:
        return
    size = format_count(left_out.batch_size)
    point = f"batch size {size}, learning rate {format_number(left_out.lr)}"
    how = "the study ended before, and a longer one does it"
    if left_out.candidates is not None:
        how = f"search.candidates={left_out.candidates + 1} does it"
    yield f"{point} may be better, and did not run on fresh seeds: {how}"


def _too_easy(result: StudyResult) -> Iterator[str]:
    """Tell of a target that is too easy to tell batch sizes apart."""
    baseline = result.baseline
    if baseline is None or baseline.telling_target is None:
        return
    value = format_number(baseline.telling_target, 2)
    steps = plural(baseline.steps, "step")
    yield (
        f"your {_baseline_text(baseline)} met the target at its first look, after {steps}, where "
        "batch sizes differ little: a harder target tells more, such as "
        f"workload.target.value={value}"
    )


def _untold(result: StudyResult) -> Iterator[str]:
    """Tell of fresh seeds whose steps are not known, as their first evaluation met the target."""
    if result.winner is None:
        return
    fresh = result.winner.confirmed
    if fresh is not None and fresh.untold:
        yield (
            f"{fresh.untold} of {plural(fresh.runs, 'fresh seed')} met the target at their first "
            "evaluation: when, could not be told"
        )


def _open_interval(result: StudyResult) -> Iterator[str]:
    """Tell what would show a critical batch size whose interval is open."""
    critical = result.critical_batch_size
    if critical is None or critical.is_of_one_size or not critical.is_open:
        return
    open_ends = list[str]()
    if critical.low is None:
        open_ends.append("lower")
    if critical.high is None:
        open_ends.append("upper")
    missing = f"the critical batch size has no {' and no '.join(open_ends)} end yet"
    yield f"{missing}: {_narrower(critical, result.search.trials)}"


def _unreached(result: StudyResult) -> Iterator[str]:
    """Say that the target was not reached, and what the closest point is predicted to take."""
    yield f"nothing yet: {unreached_text(result)}"
    so_far = result.so_far
    if so_far is None:
        return
    if so_far.predicted_steps is None:
        yield "whether it would meet the target cannot be told from its history"
        return
    parts = [plural(round(so_far.predicted_steps), "step")]
    if so_far.predicted_seconds is not None:
        parts.append(f"{format_seconds(so_far.predicted_seconds)} of training")
    yield f"that trial is predicted to meet the target after about {', '.join(parts)} in all"


def unreached_text(result: StudyResult) -> str:
    """Write that the target was not reached, and the closest value."""
    if not result.trials:
        return f"no trial has run, so {result.target} was not reached"
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
    """Write that the target was not reached, why, and what to try, in one line."""
    cause = _cause(result)
    texts = [unreached_text(result)]
    if cause.why:
        texts.append(cause.why)
    if cause.change:
        texts.append(f"try {cause.change}")
    return "; ".join(texts)


@dataclass(frozen=True)
class _Cause:
    """Why no trial reached the target, and what to change; None where that is not known."""

    why: str | None = None
    change: str | None = None


def _cause(result: StudyResult) -> _Cause:
    """Find the cause in what most trials ended with."""
    statuses = result.statuses
    total = sum(statuses.values())
    if not total:
        # Only what ended the search can say why no trial has run.
        return _Cause(result.stop_reason)
    unreached = result.unreached
    if unreached is None or unreached.stopped is None:
        return _Cause()
    most = max(statuses, key=lambda status: statuses[status])
    share = f"{statuses[most]} of {plural(total, 'trial')}"
    if most == "failed":
        why = f"{share} failed, the last one with {unreached.message}"
        return _Cause(why, "mend what fails; the same command goes on")
    if most == "out of memory":
        return _Cause(f"{share} ran out of memory", "a smaller search.batch_size.high")
    if most == "diverged" and unreached.smallest_diverged_lr is not None:
        rate = format_number(unreached.smallest_diverged_lr / 10.0, 2)
        return _Cause(f"{share} diverged", f"smaller learning rates: scaling.lr={rate}")
    return _cause_of_stops(unreached, unreached.stopped, result)


def _cause_of_stops(unreached: Unreached, count: int, result: StudyResult) -> _Cause:
    """Why stopped trials, so many, did not reach the target: by how many still improved."""
    stopped = plural(count, "stopped trial")
    improving = unreached.improving
    if 2 * improving < count:
        changes = ["another learning rate (scaling.lr), another model or schedule"]
        if unreached.easier:
            value = format_number(unreached.easier, 2)
            changes.insert(0, f"an easier target (workload.target.value={value})")
        why = f"{count - improving} of {stopped} no longer improved when they were stopped"
        return _Cause(why, " or ".join(changes))
    improving_at_budget = unreached.improving_at_budget
    if 2 * improving_at_budget >= improving:
        why = f"{improving_at_budget} of {stopped} still improved at the end of their budget"
        steps = ADVISED_TIMES * (unreached.budget_steps or 0)
        examples = ADVISED_TIMES * (unreached.budget_examples or 0)
        return _Cause(why, f"a larger budget: budget.steps={steps} budget.examples={examples}")
    why = f"{improving} of {stopped} still improved when the search ended and stopped them"
    search = result.search
    if search.limit:
        return _Cause(why, f"more of {search.limit}: the same command continues them")
    if not search.trials:
        return _Cause(why, "more search.trials")
    trials = ADVISED_TIMES * search.trials
    return _Cause(why, f"search.trials={trials}: the same command continues them")


def _critical(result: StudyResult) -> Iterator[str | None]:
    """Give the critical batch size, its regimes, its growth with the target, the noise scale."""
    critical = result.critical_batch_size
    if critical is None:
        return
    if critical.is_of_one_size:
        size = format_count(critical.smallest)
        yield f"not known, as batch size {size} alone reached the target"
        return
    text = f"batch size {critical_text(critical)}"
    if result.tokens is not None and critical.value is not None:
        # In full, yet to no more digits than the batch size is known.
        rounded = float(format_number(critical.value * result.tokens, 2))
        text += f", {format_count(rounded)} tokens"
    yield text
    # The regimes are bounded by multiples of B_crit.
    if critical.value is not None:
        yield regimes_text(result, critical)
    if critical.b_opt is not None:
        opt = f"{format_number(critical.b_opt, 2)} ({b_opt_text(critical)})"
        yield f"fewest examples at batch size {opt}; smaller batches need more of them"
    if result.over_target_growth is not None:
        yield growth_text(result.over_target_growth, result.metric)
    noise = result.noise_scale
    if noise is not None and noise.noise_scale is not None:
        low = format_number(noise.low, 2)
        high = format_number(noise.high, 2)
        value = format_number(noise.noise_scale, 2)
        yield f"gradient noise scale {value} ({noise.level:.0%}: {low} to {high}), a hint at it"


def critical_text(critical: CriticalBatchSize | CriticalAtTarget) -> str:
    """Write ``67 (90%: 41 to 110)``: B_crit in examples and its interval."""
    value = "undetermined"
    if critical.value is not None:
        value = format_number(critical.value, 2)
    return f"{value} ({interval_text(critical)})"


def interval_text(critical: CriticalBatchSize | CriticalAtTarget) -> str:
    """Write ``90%: 41 to 110``, ``90%: above 41``, ...: the interval of B_crit."""
    return span_text(critical.low, critical.high, critical.level)


def b_opt_text(critical: CriticalBatchSize) -> str:
    """Write the interval of the batch size with the fewest examples."""
    return span_text(critical.b_opt_low, critical.b_opt_high, critical.level)


def span_text(low: float | None, high: float | None, level: float, digits: int = 2) -> str:
    """Write ``90%: 41 to 110``, or what is open of it."""
    if low is None and high is None:
        return f"{level:.0%} interval open at both ends"
    if low is None:
        return f"{level:.0%}: below {format_number(high, digits)}"
    if high is None:
        return f"{level:.0%}: above {format_number(low, digits)}"
    return f"{level:.0%}: {format_number(low, digits)} to {format_number(high, digits)}"


def growth_text(growth: Growth, metric: str) -> str:
    """Write how B_crit moves with the target, and as which power of the metric.

    ``rises as the target gets harder: as val/loss^-4.3 (90%: -5.1 to -3.5) from 2.6 to 2``
    """
    # What is raised to the power falls as the target gets harder: a negative exponent is a rise.
    how = "shows no sure change"
    if growth.high < 0.0:
        how = "rises"
    elif growth.low > 0.0:
        how = "falls"
    base = metric
    if growth.ideal != 0.0:
        base = f"|{metric} - {growth.ideal:g}|"
    interval = f"{growth.level:.0%}: {growth.low:z.1f} to {growth.high:z.1f}"
    span = f"from {format_number(growth.start)} to {format_number(growth.end)}"
    return f"{how} as the target gets harder: as {base}^{growth.exponent:z.1f} ({interval}) {span}"


def regimes_text(result: StudyResult, critical: CriticalBatchSize) -> str:
    """Write up to where twice the batch halves the steps, and from where on it gains nothing.

    What was not seen is said to be so.
    """
    below = format_number(critical.perfect_scaling_below, 2)
    above = format_number(critical.maximal_data_parallelism_above, 2)
    halves = f"below {below} twice the batch halves the steps"
    span = f"{format_count(critical.smallest)} to {format_count(critical.largest)}"
    is_small_seen = result.has_regime(PERFECT_SCALING)
    is_large_seen = result.has_regime(MAXIMAL_DATA_PARALLELISM)
    if is_small_seen and is_large_seen:
        return f"{halves}; above {above} it gains nothing"
    if is_small_seen:
        return f"{halves}; sizes {span} do not show where it gains nothing"
    if is_large_seen:
        gains = f"above {above} a larger batch gains nothing"
        return f"{gains}; sizes {span} do not show where it halves the steps"
    return (
        f"sizes {span} do not show where twice the batch halves the steps or where it gains nothing"
    )


def _fewest(result: StudyResult) -> Iterator[str | None]:
    """Give the point with the fewest steps, where another one is to use."""
    winner = result.other_winner
    if winner is None or result.use == "best_by_steps" or not _is_less(result, "steps"):
        return
    value: str | None = None
    if winner.steps is not None:
        value = plural(round(winner.steps), "step")
    yield _other_text(winner, value)


def _fastest(result: StudyResult) -> Iterator[str | None]:
    """Give the point with the least time, where another one is to use."""
    winner = result.other_winner
    if winner is None or result.use != "best_by_steps" or not _is_less(result, "time"):
        return
    value: str | None = None
    if winner.time_to_target is not None:
        value = format_seconds(winner.time_to_target)
    yield _other_text(winner, value)


def _is_less(result: StudyResult, merit: Merit) -> bool:
    """Whether the other winner takes less than the one to use, as far as both are known."""
    if result.winner is None or result.other_winner is None:
        return False
    of_use = result.winner.expected(merit)
    of_other = result.other_winner.expected(merit)
    return of_other is None or of_use is None or of_other < of_use


def _other_text(winner: WinnerResult, value: str | None) -> str:
    """Write ``46 steps at batch size 660, learning rate 1.34 (3 of 3 fresh seeds)``."""
    how = "predicted"
    if winner.confirmed is not None:
        how = fresh_text(winner.confirmed)
    if value is None:
        return f"{winner_text(winner)} ({how})"
    return f"{value} at {winner_text(winner)} ({how})"


def _lr(result: StudyResult) -> Iterator[str | None]:
    """Write ``grew as B^0.22 (0.16 to 0.27): slower than the square root``."""
    law = result.lr_exponent
    if result.winner is None or law is None:
        return
    text = _exponent_text(law)
    below = law.below_b_crit
    if law.identified and below is not None and below.identified and below.end < law.end:
        text += f"; up to the critical batch size {_exponent_text(below)}"
    yield text


def _exponent_text(law: Exponent) -> str:
    if not law.identified:
        seen = f"{plural(law.reached, 'trial')} over {law.octaves:.1f} octaves of batch size"
        return f"not known: {seen} reached the target"
    verb = "fell" if law.exponent < 0.0 else "grew"
    power = f"{verb} as B^{law.exponent:z.2f} ({law.low:z.2f} to {law.high:z.2f})"
    if not law.rules:
        return power
    return f"{power}: {verdict(law.low, law.high, law.rules)}"


def verdict(low: float, high: float, exponents: Mapping[str, float]) -> str:
    """Write which scaling rules fit an interval of the exponent, as a phrase.

    ``exponents`` are those of the rules, by name.
    """
    # From the slowest growth to the fastest, as the words below are said.
    ordered = sorted(exponents.items(), key=lambda item: item[1])
    fitting = [RULES[name].words for name, exponent in ordered if low <= exponent <= high]
    if len(fitting) > 1:
        all_of_them = "both" if len(fitting) == 2 else "all"
        return f"{', '.join(fitting[:-1])} and {fitting[-1]} {all_of_them} fit"
    if fitting:
        return f"{fitting[0]} fits"
    # Where none fits, the exponent is told by its neighbours among the powers of B: these are the
    # rules that everybody knows.
    below = list[str]()
    above = list[str]()
    for name, exponent in ordered:
        if RULES[name].exponent is None:
            continue
        if exponent < low:
            below.append(name)
        else:
            above.append(name)
    if not above:
        return f"faster than {RULES[below[-1]].words}"
    if not below or below[-1] == "none":
        return f"slower than {RULES[above[0]].words}"
    return f"between {RULES[below[-1]].words} and {RULES[above[0]].words}"


def _devices(result: StudyResult) -> Iterator[str | None]:
    """Give the critical batch size, and what further devices would be worth."""
    critical = result.critical_batch_size
    if result.winner is None:
        if any(result.statuses.values()):
            yield f"not known: {NOTHING_REACHED}"
        return
    if critical is None:
        yield "not known yet"
        return
    if critical.is_of_one_size:
        size = format_count(critical.smallest)
        yield f"critical batch size not known, as batch size {size} alone reached the target"
        return
    plan = _plan_text(result) or "not known yet"
    yield f"{plan}; critical batch size {critical_text(critical)}"


def _plan_text(result: StudyResult) -> str | None:
    """Tell what further devices are predicted to be worth, up to where more is wasted.

    ``up to 8 pay: predicted 2.9 times as fast on 4 (batch size 900 in all), 4.5 times on 8 (batch
    size 1,500), only 6.9 times on 16``
    """
    paying = list[DevicePlan]()
    wasting = list[DevicePlan]()
    for row in result.scale_out.told:
        if row.devices <= 1:
            continue
        if row.efficiency >= LEAST_EFFICIENCY:
            paying.append(row)
        else:
            wasting.append(row)
    communication = ", communication not counted"
    if result.scale_out.with_all_reduce:
        communication = ""
    if not paying and not wasting:
        return None
    if not paying:
        count = wasting[0].devices
        speed_up = format_number(wasting[0].speed_up, 3)
        return f"no: {count} are predicted to be only {speed_up} times as fast{communication}"
    # The last that pays and the one before it show what a further one still gives.
    texts = list[str]()
    for row in paying[-2:]:
        speed_up = format_number(row.speed_up, 3)
        size = format_count(row.batch_size)
        if texts:
            texts.append(f"{speed_up} times on {row.devices} (batch size {size})")
        else:
            # The first one says in full what the numbers of both are.
            texts.append(f"{speed_up} times as fast on {row.devices} (batch size {size} in all)")
    most = paying[-1].devices
    text = f"up to {most} pay (each gives at least half): predicted {', '.join(texts)}"
    if wasting:
        text += f", only {format_number(wasting[0].speed_up, 3)} times on {wasting[0].devices}"
    return f"{text}{communication}"


def counts_text(result: StudyResult) -> str:
    """Write ``37 reached, 26 stopped, 4 diverged``."""
    counts = list[str]()
    for status, count in result.statuses.items():
        if count:
            counts.append(f"{format_count(count)} {status}")
    return ", ".join(counts)


def _ends(result: StudyResult) -> Iterator[str | None]:
    """Tell what became of the trials, and what ended the search."""
    texts = (counts_text(result), result.stop_reason)
    yield "; ".join(text for text in texts if text)


def trust(result: StudyResult) -> tuple[Trust, ...]:
    """Tell how far the parts of the answer can be trusted, as far as it is known."""
    parts = (_range(result), _coverage(result), _seeds(result), _noise(result))
    return tuple(part for part in parts if part)


def _range(result: StudyResult) -> Trust | None:
    critical = result.critical_batch_size
    if critical is None or critical.is_of_one_size:
        return None
    # The frontier has a point for each half octave: the ends may lie beyond its own.
    sizes = {point.batch_size for point in result.points if not point.stopped}
    sizes |= {critical.smallest, critical.largest}
    count = plural(len(sizes), "size")
    seen = f"curve: {count} over {format_count(min(sizes))} to {format_count(max(sizes))}"
    if critical.low is None or critical.high is None:
        return Trust("range", f"{seen}, an open interval", False)
    if critical.high <= GOOD_RATIO * critical.low:
        return Trust("range", f"{seen}, good", True)
    ratio = format_number(critical.high / critical.low, 2)
    return Trust("range", f"{seen}, an interval of {ratio} times", False)


def _coverage(result: StudyResult) -> Trust | None:
    if result.critical_batch_size is None or result.critical_batch_size.value is None:
        return None
    missing = list[str]()
    if not result.has_regime(PERFECT_SCALING):
        missing.append("small")
    if not result.has_regime(MAXIMAL_DATA_PARALLELISM):
        missing.append("large")
    if not missing:
        return Trust("coverage", "both its ends seen", True)
    if len(missing) == 1:
        return Trust("coverage", f"its {missing[0]} end not seen", False)
    return Trust("coverage", "neither end seen", False)


def _seeds(result: StudyResult) -> Trust | None:
    if result.winner is None:
        return None
    text = "winner not run again"
    is_good = False
    fresh = result.winner.confirmed
    if fresh is not None:
        text = f"winner: {fresh_text(fresh)}"
        is_good = fresh.all_reached
    if result.seed_scatter is not None:
        text += f", steps scatter by {result.seed_scatter.scatter:.0%}"
    return Trust("seeds", text, is_good)


def _noise(result: StudyResult) -> Trust | None:
    timing = result.timing
    if timing is None:
        return None
    error = f"a step's seconds are known to {timing.relative_error:.0%}"
    if timing.not_told_apart:
        sizes = " and ".join(map(format_count, timing.not_told_apart))
        error += f", too little to tell USE from batch size {sizes}"
    if timing.waited > BUSY_SHARE:
        waited = f"timed steps waited for a processor {timing.waited:.0%} of the time"
        busy = f"the machine was busy: {waited}, which is left out"
        return Trust("noise", f"{busy}; {error}, as USE's interval says", False)
    if timing.relative_error > NOISY_ERROR or timing.not_told_apart:
        return Trust("noise", f"timings are noisy: {error}", False)
    return Trust("noise", f"timings: {error}", True)


def _notes_of(result: StudyResult) -> Iterator[str | None]:
    """Give the result's notes, and why another loop took steps than the option asks for."""
    yield from result.notes
    for name in result.training_loops:
        # Where the option itself asks for Lightning's loop there is nothing to explain.
        if name.startswith(LIGHTNINGS) and "protocol.fast" not in name:
            why = name.removeprefix(LIGHTNINGS)
            yield f"Lightning's own loop took the steps, not the lean one: {why}"
        elif name.startswith(NOT_CAPTURED):
            yield f"steps were not captured as a CUDA graph: {name.removeprefix(NOT_CAPTURED)}"


def _next(result: StudyResult) -> Iterator[str | None]:
    """Give the command that trains the winner; without one, what to change."""
    if result.winner is not None:
        baseline = result.baseline
        # The answer may be to change nothing; whoever wants USE all the same is not kept from it.
        is_own = baseline is not None and _is_at(result.winner, baseline)
        gain = result.gain
        is_shown = gain is None or gain.low is None or gain.low > 1.0
        if result.train is not None and is_own:
            yield "keep your configuration; to train with it:"
        elif result.train is not None and not is_shown:
            yield "keep your configuration; to train with USE all the same:"
        elif result.train is not None:
            yield "to train with USE:"
        yield result.train
        return
    change = _cause(result).change
    if change is not None:
        yield f"try {change}"


def _more(result: StudyResult) -> Iterator[str | None]:
    """Tell what would narrow the interval, or show more, as options of the same command."""
    critical = result.critical_batch_size
    if result.winner is None or critical is None or critical.is_of_one_size:
        return
    yield critical.note
    yield _narrower(critical, result.search.trials)


def _narrower(critical: CriticalBatchSize, trials: int) -> str | None:
    """Tell what would close or narrow the interval; None where it is narrow."""
    is_narrow = False
    if critical.low is not None and critical.high is not None:
        is_narrow = critical.high <= NARROW_RATIO * critical.low
    is_closed = not critical.is_open
    if is_closed and is_narrow and not critical.next_trials:
        return None
    effect = "narrows the interval"
    if critical.is_open:
        effect = "looks further"
    text = f"search.trials={2 * trials} {effect}"
    if critical.next_trials:
        sizes = " and ".join(format_count(trial.batch_size) for trial in critical.next_trials[:2])
        text += f" (first at batch sizes {sizes})"
    return text


Lines = Sequence[tuple[str, Callable[[StudyResult], Iterable[str | None]]]]
# The lines of the answer, in the order in which they are read; one without a text is left out.
LINES: Lines = (
    ("USE", _use),
    ("GAIN", _gain),
    ("AS GOOD", _as_good),
    ("DEVICES", _devices),
    ("CAUTION", _cautions),
)
# What to do with the answer.
ACTIONS: Lines = (("NEXT", _next), ("MORE", _more))
# The tables of the objective loss.
BUDGET_LINES: Lines = (
    ("USE", budget_answer.use),
    ("GAIN", budget_answer.gain),
    ("AS GOOD", budget_answer.as_good),
    ("BUDGET", budget_answer.growth),
    ("LEFT", budget_answer.left),
    ("CAUTION", budget_answer.cautions),
)
BUDGET_ACTIONS: Lines = (("NEXT", budget_answer.next_steps),)
BUDGET_DETAILS: Lines = (("TRIALS", _ends), ("NOTE", _notes_of))
# What the page has besides.
DETAILS: Lines = (
    ("CRITICAL", _critical),
    ("TEST", _test),
    ("FEWEST", _fewest),
    ("FASTEST", _fastest),
    ("LR", _lr),
    ("TRIALS", _ends),
    ("NOTE", _notes_of),
)
