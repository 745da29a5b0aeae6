"""The answer in words: typed rows, the verdict first, and their text for a terminal.

Rows only write what a result states. A value stands in one row alone, and a row that has nothing to
say is absent.
"""

import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from bstune.core.question import WORDINGS
from bstune.core.space import Configuration
from bstune.study.result import Confirmed, Critical, Speedup, StudyResult
from bstune.system import console

# The most warnings of an answer; the page has all.
MOST_WARNINGS = 2
# How the baseline's median run ended, where it did not reach the target.
BASELINE_ENDS = {
    "budget": "did not reach the target in its whole budget",
    "stopped": "bstune stopped before the target",
    "failed": "failed",
}
# Where nothing reached the target: what to do about what most trials did.
FIXES = {
    "diverged": "search lower learning rates",
    "still falling": "raise the budget",
    "flat": "choose an easier target",
    "stopped early": "run more trials",
    "failed": "mend the error",
}
LEAST = {"min": "lowest", "max": "highest"}
TRENDS = {
    "diverged": "most trials diverged",
    "still falling": "most trials were still falling",
    "flat": "most trials were flat at their end",
    "stopped early": "most trials were stopped long before the budget",
    "failed": "most trials failed",
}


@dataclass(frozen=True)
class Row:
    """One statement of an answer: a label such as ``Time``, and its text in one line."""

    label: str
    text: str


def answer(result: StudyResult) -> tuple[Row, ...]:
    """Write an answer's rows: the verdict, then those that the question names, in its order."""
    texts = {
        "Best": _best(result),
        "Time": _with_faster(result),
        "Steps": _with_faster(result),
        "Budget": _budget(result),
        "Range": _range(result),
        "Rates": rates(result),
        "Easier": _easier(result),
        "Also good": _also_good(result),
        "Scaling": _scaling(result),
        "Warning": _warnings(result),
        "Next": _next(result),
        "Train": _train(result),
    }
    rows = [_first(result)]
    for label in WORDINGS[result.objective].rows:
        rows += [Row(label, text) for text in texts[label]]
    return tuple(rows)


def where(result: StudyResult) -> str:
    """Write the device, and a CPU's threads: cpu with 1 thread."""
    if result.device == "cpu" and result.threads:
        return f"cpu with {console.count(result.threads, 'thread')}"
    return result.device


def header(result: StudyResult) -> str:
    """Write what was asked, where, and how much was tried."""
    tried = console.count(result.configurations, "configuration")
    asked = str(result.target)
    if result.seeks_metric:
        asked = f"{LEAST[result.target.mode]} {result.target.metric}"
    if result.ran_for is not None:
        asked += f" by trials run for {result.ran_for}"
    return f"{result.workload}, {asked}, {where(result)}, {tried} (90% intervals)"


def render(result: StudyResult) -> str:
    """Write the header and the rows, in 80 columns."""
    lines = [textwrap.fill(header(result), console.LINE_WIDTH), ""]
    lines += [console.wrap(row.label, row.text) for row in answer(result)]
    return console.plain("\n".join(lines))


def _first(result: StudyResult) -> Row:
    """Write line 1: the verdict or, where the question asks for none, the critical batch size."""
    if result.verdict is not None:
        return Row(result.verdict.capitalize(), _verdict(result))
    text = "batch size"
    critical = result.critical
    if critical is not None:
        text = critical_text(critical)
        if critical.linear_below is not None and critical.no_gain_above is not None:
            below, above = _whole(critical.linear_below), _whole(critical.no_gain_above)
            text += f": perfect scaling below {below}, maximal data parallelism above {above}"
    return Row("Critical", text)


def _verdict(result: StudyResult) -> str:
    best = result.best
    baseline = result.baseline
    speedup = result.speedup
    if not result.reached:
        return _unreached(result)
    missing = f"missing: {result.missing}"
    words = WORDINGS[result.objective]
    if best is None:
        return missing
    if result.seeks_metric:
        return _of_metric(result, best)
    if result.verdict == "use":
        return f"{_named(best)}: {words.least}"
    if speedup is None or baseline is None:
        return f"{_named(best)} is the best so far; {missing}"
    best_other = f"the best of {console.count(result.configurations, 'other')}"
    if result.verdict == "keep" and speedup.high is not None:
        at_most = f"at most {console.speedup(speedup.high)} {words.better}"
        return f"{_named(best)}: {best_other} {words.verb} {at_most}"
    compared = _speedup_text(result, speedup, baseline)
    if result.verdict == "switch":
        return f"to {_named(best)}: {compared}"
    faster = best_other if best.number == baseline.number else _named(best)
    return f"{faster} {words.verb} {compared}; {missing}"


def _of_metric(result: StudyResult, best: Confirmed) -> str:
    """Write the best metric beside the baseline's, and the difference with its interval."""
    improvement = result.improvement
    better = "lower" if result.target.mode == "min" else "higher"
    metric = result.target.metric
    if result.verdict == "keep" and improvement is not None and improvement.high is not None:
        others = console.count(result.configurations, "other")
        if improvement.high <= 0.0:
            return f"{_named(best)}: none of {others} has a {better} {metric}"
        at_most = f"at most {console.number(improvement.high, 2)} {better}"
        return f"{_named(best)}: {metric} of the best of {others} is {at_most}"
    compared = result.other if _is_baseline(result, best) else result.baseline
    text = f"{_named(best)}: {metric} {_metric(best)}"
    if compared is not None:
        text += f" instead of {_metric(compared)}"
    text += f" in {result.budget}"
    if improvement is not None:
        # Where the baseline is the best so far, it is better than the other one by as much.
        sign = -1.0 if _is_baseline(result, best) else 1.0
        text += f" ({console.number(sign * improvement.value, 2)} {better}"
        if improvement.low is not None and improvement.high is not None:
            low, high = sorted((sign * improvement.low, sign * improvement.high))
            text += f", {console.number(low, 2)} to {console.number(high, 2)}"
        text += ")"
    if result.verdict == "switch":
        return f"to {text}"
    return text if result.verdict == "use" else f"{text}; missing: {result.missing}"


def _is_baseline(result: StudyResult, configuration: Confirmed) -> bool:
    return result.baseline is not None and configuration.number == result.baseline.number


def _metric(configuration: Confirmed) -> str:
    """Write a metric with four digits: two runs may differ by little."""
    return "none" if configuration.metric is None else console.number(configuration.metric, 4)


def _budget(result: StudyResult) -> Iterator[str]:
    """Write what the budget takes, and the runs that line 1 stands on."""
    best = result.best
    if best is None or not best.runs:
        return
    text = f"{result.budget}: {_took_budget(result, best)}"
    compared = result.other if _is_baseline(result, best) else result.baseline
    if compared is not None:
        name = "baseline" if _is_baseline(result, compared) else "best other"
        text += f"; {name} ({_pair(compared)}) {_took_budget(result, compared)}"
    yield f"{text}; {console.count(best.runs, 'new seed')} each"


def _took_budget(result: StudyResult, configuration: Confirmed) -> str:
    """Write the steps of a budget, with their seconds where these are not the budget."""
    if result.budget.is_whole_run:
        return console.seconds(configuration.seconds)
    if result.budget.seconds is None:
        return _took(result, configuration)
    return f"{_whole(configuration.steps)} steps"


def _unreached(result: StudyResult) -> str:
    text = f"nothing reached {result.target}"
    if result.seeks_metric:
        text = f"no trial trained for its whole budget of {result.budget}"
    closest = result.closest
    if closest is None:
        return f"{text}: {result.missing}"
    trend = TRENDS[closest.trend]
    if result.target.mode == "max":
        trend = trend.replace("falling", "rising")
    value = console.number(closest.value)
    return f"{text}: closest {value} ({_pair(closest.configuration)}); {trend}"


def _speedup_text(result: StudyResult, speedup: Speedup, baseline: Confirmed) -> str:
    """Write how much better the best is, as far as the baseline's end allows to say it."""
    pair = f"your baseline, batch size {baseline.batch_size:,} and lr {console.number(baseline.lr)}"
    words = WORDINGS[result.objective]
    than = words.than
    better = f"{console.speedup(speedup.value)} {words.better}"
    if speedup.at_least:
        end = BASELINE_ENDS[result.baseline_limit or "budget"]
        return f"at least {better} {than} {pair}, whose median run {end}"
    return f"{better}{brackets(speedup.low, speedup.high, _end)} {than} {pair}"


def _end(value: float) -> str:
    """Write an end of a speedup; more digits where two would hide on which side of 1 it lies."""
    text = console.number(value, 2)
    return console.number(value, 4) if text == "1" else text


def _with_faster(result: StudyResult) -> Iterator[str]:
    """Write what the runs took, and what is faster in seconds."""
    for text in _runs(result):
        faster = result.faster
        if faster is not None:
            times = console.speedup(faster.speedup)
            text += f"; {_pair(faster)} is predicted to be {times} as fast in seconds"
        yield text


def _runs(result: StudyResult) -> Iterator[str]:
    """Write what the best and the baseline took on new seeds."""
    best = result.best
    if best is None or not best.runs:
        return
    runs = _reached(best)
    share = f"({_share(best.predicted_share)} predicted)"
    took_best = _took(result, best)
    name = "baseline"
    pair = ""
    compared = result.baseline
    if compared is not None and compared.number == best.number:
        # Where the best is the baseline, it is compared with the best other one.
        took_best = f"baseline {took_best}"
        name = "best other"
        compared = result.other
        if compared is not None:
            pair = f" ({_pair(compared)})"
    if compared is None or not compared.runs:
        yield f"{took_best}; {runs} new seeds reached it {share}"
        return
    seeds = f"{runs} new seeds each reached it {share}"
    if _reached(compared) != runs:
        seeds = f"{runs} new seeds reached it {share}; {name} {_reached(compared)}"
    yield f"{took_best}; {name}{pair} {_took(result, compared)}; {seeds}"


def _easier(result: StudyResult) -> Iterator[str]:
    if result.easier_goal is not None:
        yield f"a quarter of the trials reached {result.easier_goal:g}: {result.easier}"


def _also_good(result: StudyResult) -> Iterator[str]:
    parts = []
    if result.near_optimal is not None and result.verdict != "not yet":
        low, high = result.near_optimal
        if low < high:
            parts.append(f"batch sizes {low:,} to {high:,}")
    alone = result.lr_alone
    if alone is not None:
        times = console.speedup(alone.speedup)
        if result.speedup is not None and times == console.speedup(result.speedup.value):
            times = "as much"
        elif result.speedup is not None and result.speedup.at_least:
            times = f"at least {times}"
        lr = console.number(alone.lr)
        parts.append(f"at your batch size, lr {lr} alone is predicted to give {times}")
    if parts:
        yield "; ".join(parts)


def _scaling(result: StudyResult) -> Iterator[str]:
    if result.critical is not None:
        text = f"critical {critical_text(result.critical)}"
        if result.critical.interval.value is not None:
            text += ", beyond which steps fall by half at most"
        yield "; ".join([text, *noise_scale(result)])


def noise_scale(result: StudyResult) -> Iterator[str]:
    """Write the gradient noise scale, where it is known."""
    noise = result.noise_scale
    if noise is not None:
        write = partial(console.number, digits=2)
        ends = brackets(noise.low, noise.high, write)
        yield f"noise scale {write(noise.value)}{ends}, a rough proxy"


def critical_text(critical: Critical) -> str:
    """Write the critical batch size, without its first word."""
    ends = critical.interval
    if ends.value is not None:
        return f"batch size {_whole(ends.value)}{brackets(ends.low, ends.high, _whole)}"
    if ends.low is not None:
        last = f"{critical.largest:,}"
        return f"batch size above {_whole(ends.low)}: no trial above {last} reached the target"
    if ends.high is not None:
        last = f"{critical.smallest:,}"
        return f"batch size below {_whole(ends.high)}: no trial below {last} reached the target"
    if critical.smallest == critical.largest:
        return f"batch size unknown: only batch size {critical.smallest:,} reached the target"
    reached = f"{critical.smallest:,} to {critical.largest:,}"
    return f"batch size unknown: batch sizes {reached} that reached the target show none"


def _range(result: StudyResult) -> Iterator[str]:
    searched = result.searched
    if searched is not None:
        octaves = console.count(searched.octaves, "octave")
        text = (
            f"batch sizes {searched.low:,} to {searched.high:,}: {searched.reached} of {octaves} "
            f"have a trial that reached the target"
        )
        if searched.to_add:
            text += f"; around {console.sizes(searched.to_add)} none did"
        yield text


def rates(result: StudyResult) -> Iterator[str]:
    """Write how the best rate grows with batch size, and which scaling rules that allows."""
    rules = ", ".join(f"scaling={rule}" for rule in result.allowed_rules) or "no scaling rule"
    for text in growth(result):
        yield f"{text}, as by {rules}"


def growth(result: StudyResult) -> Iterator[str]:
    """Write how the best rate grows with batch size."""
    exponent = result.lr_exponent
    if exponent is not None and exponent.value is not None:
        ends = brackets(exponent.low, exponent.high, "{:.2f}".format)
        yield f"the best lr scales as batch size^{exponent.value:.2f}{ends}"


def _warnings(result: StudyResult) -> Iterator[str]:
    for warning in result.warnings[:MOST_WARNINGS]:
        yield f"{warning.state}: {warning.fix}"


def _next(result: StudyResult) -> Iterator[str]:
    parts = []
    if result.verdict is None and result.missing is not None:
        parts.append(result.missing)
    elif result.verdict != "not yet":
        return
    if result.closest is not None:
        parts.append(FIXES[result.closest.trend])
        if result.missing is not None:
            parts.append(result.missing)
    if result.next is not None:
        parts.append(result.next)
    if parts:
        yield ": ".join(parts)


def _train(result: StudyResult) -> Iterator[str]:
    if result.train_command is not None and result.verdict in ("switch", "use"):
        yield result.train_command


def _named(best: Confirmed) -> str:
    """Name the best: with further values by its file, as row Best has them."""
    return "the configuration in best.yaml" if best.values else _pair(best)


def _best(result: StudyResult) -> Iterator[str]:
    """Write the best with its further values, which line 1 leaves out."""
    if result.reached and result.best is not None and result.best.values:
        yield _pair(result.best)


def _pair(configuration: Configuration) -> str:
    pair = f"batch size {configuration.batch_size:,}, lr {console.number(configuration.lr)}"
    for name, value in configuration.values.items():
        pair += f", {name} {console.exact(value)}"
    if isinstance(configuration, Confirmed) and configuration.schedule_steps is not None:
        pair += f", a schedule of {console.count(configuration.schedule_steps, 'step')}"
    return pair


def _reached(configuration: Confirmed) -> str:
    reached, runs = configuration.reached, configuration.runs
    return f"all {runs}" if reached == runs > 1 else f"{reached} of {runs}"


def _share(share: float) -> str:
    """Write a share of seeds in tenths; it is never all of them, as it is predicted."""
    return f"{min(round(10 * share), 9)} of 10"


def _took(result: StudyResult, configuration: Confirmed) -> str:
    """Write seconds and steps to the target, what is minimised first."""
    parts = [console.seconds(configuration.seconds), f"{_whole(configuration.steps)} steps"]
    if "Steps" in WORDINGS[result.objective].rows:
        parts.reverse()
    took = ", ".join(parts)
    # Where the median is a bound it took longer.
    return f"over {took}" if configuration.is_bound else took


def _whole(value: float) -> str:
    return console.number(round(value))


def brackets(low: float | None, high: float | None, write: Callable[[float], str]) -> str:
    """Write an interval behind its value; an end that is not known is open."""
    if low is not None and high is not None:
        return f" ({write(low)} to {write(high)})"
    if low is not None:
        return f" (above {write(low)})"
    if high is not None:
        return f" (below {write(high)})"
    return ""
