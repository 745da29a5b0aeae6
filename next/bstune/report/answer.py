"""The answer in words: typed rows, the verdict first, and their text for a terminal.

Rows only write what a result states. A value stands in one row alone, and a row that has nothing to
say is absent.
"""

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass

from bstune.core.question import ROWS
from bstune.core.space import Configuration
from bstune.study.result import Confirmed, Speedup, StudyResult
from bstune.system import console

# The most warnings of an answer; the page has all.
MOST_WARNINGS = 2
# How the baseline's median run ended, where it did not reach the target.
BASELINE_ENDS = {
    "budget": "did not reach the target in its whole budget",
    "stopped": "was stopped before the target",
    "failed": "failed",
}
# Where nothing reached the target: what to do about what most trials did.
FIXES = {
    "diverged": "search lower learning rates",
    "still falling": "raise the budget",
    "flat": "choose an easier target",
    "failed": "mend the error",
}
TRENDS = {
    "diverged": "most trials diverged",
    "still falling": "most trials were still falling",
    "flat": "most trials were flat at their end",
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
        "Time": _time(result),
        "Easier": _easier(result),
        "Also good": _also_good(result),
        "Scaling": _scaling(result),
        "Warning": _warnings(result),
        "Next": _next(result),
        "Train": _train(result),
    }
    rows = [Row(str(result.verdict).capitalize(), _verdict(result))]
    for label in ROWS[result.objective]:
        rows += [Row(label, text) for text in texts[label]]
    return tuple(rows)


def header(result: StudyResult) -> str:
    """Write what was asked, where, and how much was tried."""
    where = result.device
    if where == "cpu":
        where += f" with {console.count(result.threads, 'thread')}"
    tried = console.count(result.configurations, "configuration")
    return f"{result.workload}, {result.target}, {where}, {tried} (90% in brackets)"


def render(result: StudyResult) -> str:
    """Write the header and the rows, in 80 columns."""
    lines = [textwrap.fill(header(result), console.LINE_WIDTH), ""]
    lines += [console.wrap(row.label, row.text) for row in answer(result)]
    return "\n".join(lines)


def _verdict(result: StudyResult) -> str:
    best = result.best
    baseline = result.baseline
    speedup = result.speedup
    if not result.reached:
        return _unreached(result)
    missing = f"missing: {result.missing}"
    if best is None:
        return missing
    if result.verdict == "use":
        return f"{_pair(best)}: the least time to the target"
    if speedup is None or baseline is None:
        return f"{_pair(best)} is the best so far; {missing}"
    best_other = f"the best of {console.count(result.configurations, 'other')}"
    if result.verdict == "keep" and speedup.high is not None:
        return f"{_pair(best)}: {best_other} is at most {_fast(speedup.high)}"
    compared = _speedup_text(speedup, baseline, result.baseline_limit)
    if result.verdict == "switch":
        return f"to {_pair(best)}: {compared}"
    faster = best_other if best.number == baseline.number else _pair(best)
    return f"{faster} is {compared}; {missing}"


def _unreached(result: StudyResult) -> str:
    text = f"nothing reached {result.target}"
    closest = result.closest
    if closest is None:
        return f"{text}: {result.missing}"
    trend = TRENDS[closest.trend]
    if result.target.mode == "max":
        trend = trend.replace("falling", "rising")
    value = console.number(closest.value)
    return f"{text}: closest {value} ({_pair(closest.configuration)}); {trend}"


def _speedup_text(speedup: Speedup, baseline: Confirmed, limit: str | None) -> str:
    """Write how fast the best is, as far as the baseline's end allows to say it."""
    pair = f"your baseline, batch size {baseline.batch_size:,} and lr {console.number(baseline.lr)}"
    if speedup.at_most:
        return f"at most {_fast(speedup.value)} as {pair}, as it missed the target on new seeds"
    if speedup.at_least:
        end = BASELINE_ENDS[limit or "budget"]
        return f"at least {_fast(speedup.value)} as {pair}, whose median run {end}"
    low = None if speedup.low is None else console.number(speedup.low, 2)
    high = None if speedup.high is None else console.number(speedup.high, 2)
    return f"{_fast(speedup.value)}{_brackets(low, high)} as {pair}"


def _time(result: StudyResult) -> Iterator[str]:
    best = result.best
    if best is None or not best.runs:
        return
    runs = f"{best.reached} of {best.runs}"
    # Where the best is the baseline, it is compared with the best other one.
    name = "baseline"
    compared = result.baseline
    if result.other is not None:
        name = "best other"
        compared = result.other
    if compared is None or not compared.runs:
        yield f"{_took(best)}; {runs} new seeds"
    elif compared.number == best.number:
        yield f"baseline {_took(best)}; {runs} new seeds"
    else:
        pair = "" if result.other is None else f" ({_pair(compared)})"
        compared_runs = f"{compared.reached} of {compared.runs}"
        seeds = "new seeds each" if runs == compared_runs else f"new seeds, {name} {compared_runs}"
        yield f"{_took(best)}; {name}{pair} {_took(compared)}; {runs} {seeds}"


def _easier(result: StudyResult) -> Iterator[str]:
    if result.easier_goal is not None:
        yield f"a quarter of the trials reached {result.easier_goal:g}: {result.easier}"


def _also_good(result: StudyResult) -> Iterator[str]:
    best = result.best
    if best is None or result.near_optimal is None or result.verdict == "not yet":
        return
    low, high = result.near_optimal
    if low == high:
        return
    text = f"batch sizes {low:,} to {high:,}"
    alone = result.lr_alone
    if alone is not None and result.baseline is not None:
        at = f"at your {result.baseline.batch_size:,}, lr {console.number(alone.lr)} alone"
        text += f"; {at} is predicted to give {console.speedup(alone.speedup)}"
    yield text


def _scaling(result: StudyResult) -> Iterator[str]:
    critical = result.critical
    if critical is None:
        return
    ends = critical.interval
    low = None if ends.low is None else _examples(ends.low)
    high = None if ends.high is None else _examples(ends.high)
    if ends.value is not None:
        yield f"critical batch size {_examples(ends.value)}{_brackets(low, high)}"
    elif low is not None and high is not None:
        yield f"critical batch size between {low} and {high}"
    elif low is not None:
        size = f"{critical.largest:,}, the largest that reached the target"
        yield f"critical batch size above {low}: steps still fall at {size}"
    elif high is not None:
        size = f"{critical.smallest:,}, the smallest that reached the target"
        yield f"critical batch size below {high}: steps are already level at {size}"
    else:
        reached = f"{critical.smallest:,} to {critical.largest:,}"
        yield f"no critical batch size: batch sizes {reached} that reached the target show none"


def _warnings(result: StudyResult) -> Iterator[str]:
    for warning in result.warnings[:MOST_WARNINGS]:
        yield f"{warning.state}: {warning.fix}"


def _next(result: StudyResult) -> Iterator[str]:
    if result.verdict != "not yet":
        return
    parts = []
    if result.closest is not None:
        parts.append(FIXES[result.closest.trend])
        if result.missing is not None:
            parts.append(result.missing)
    if result.next is not None:
        parts.append(result.next)
    if parts:
        yield ": ".join(parts)


def _train(result: StudyResult) -> Iterator[str]:
    if result.train is not None and result.verdict in ("switch", "use"):
        yield result.train


def _pair(configuration: Configuration) -> str:
    pair = f"batch size {configuration.batch_size:,}, lr {console.number(configuration.lr)}"
    if isinstance(configuration, Confirmed) and configuration.schedule_steps is not None:
        pair += f", a schedule of {console.count(configuration.schedule_steps, 'step')}"
    return pair


def _fast(times: float) -> str:
    return f"{console.speedup(times)} as fast"


def _took(configuration: Confirmed) -> str:
    """Write seconds and steps to the target; where they are bounds it took longer."""
    took = f"{console.seconds(configuration.seconds)}, {console.number(configuration.steps)} steps"
    return f"over {took}" if configuration.is_bound else took


def _examples(batch_size: float) -> str:
    return console.number(round(batch_size))


def _brackets(low: str | None, high: str | None) -> str:
    """Write an interval behind its value; an end that is not known is open."""
    if low is not None and high is not None:
        return f" ({low} to {high})"
    if low is not None:
        return f" (above {low})"
    return "" if high is None else f" (below {high})"
