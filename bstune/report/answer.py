"""The answer in words: typed rows, the verdict first, and their text for a terminal.

Rows only write what a result states. A value stands in one row alone, and a row that has nothing to
say is absent. ``WORDINGS``, at the end, has the rows of each objective.
"""

import math
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from bstune.core.question import Objective
from bstune.core.records import Record
from bstune.core.space import Configuration
from bstune.study.result import Confirmed, Critical, Phases, Speedup, StudyResult
from bstune.system import console
from bstune.system.files import StudyFolder

# The most warnings of an answer; the page has all.
MOST_WARNINGS = 2
# The phase that row Took leaves out where it took less than a second.
PREPARATION = "survey and preflight"
# How the baseline's median run ended, where it did not reach the target.
BASELINE_ENDS = {
    "budget": "did not reach the target in its whole budget",
    "stopped": "bstune stopped before the target",
    "failed": "failed",
}
# Where nothing reached the target: what most trials did, and what to do about it.
TRENDS = {
    "diverged": ("most trials diverged", "search lower learning rates"),
    "still falling": ("most trials were still falling", "raise the budget"),
    "flat": ("most trials were flat at their end", "choose an easier target"),
    "stopped early": ("most trials were stopped long before the budget", "run more trials"),
    "failed": ("most trials failed", "mend the error"),
}
LEAST = {"min": "lowest", "max": "highest"}


@dataclass(frozen=True)
class Row:
    """One statement of an answer: a label such as ``Time``, and its text in one line."""

    label: str
    text: str

    def __str__(self) -> str:
        return console.wrap(self.label, self.text)


@dataclass(frozen=True)
class Wording:
    """How the answer to an objective is written.

    Args:
        rows: those between its first line and its warnings, in their order: a label, and what
            writes the text, or None where there is nothing to say.
        least: what is sought.
        verb, better, than: of a comparison with the baseline.
        steps_first: steps stand before seconds.
    """

    rows: Mapping[str, Callable[[StudyResult], str | None]]
    least: str = ""
    verb: str = ""
    better: str = ""
    than: str = ""
    steps_first: bool = False


def answer(result: StudyResult) -> tuple[Row, ...]:
    """Write an answer's rows: the verdict, those of its objective, and what to do."""
    texts = [(label, write(result)) for label, write in WORDINGS[result.objective].rows.items()]
    texts += [("Warning", f"{one.state}: {one.fix}") for one in result.warnings[:MOST_WARNINGS]]
    texts += [("Next", _row_next(result)), ("Train", _row_train(result))]
    rows = [Row(label, text) for label, text in texts if text is not None]
    return (_first_row(result), *rows)


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
    lines += map(str, answer(result))
    return console.plain("\n".join(lines))


def files_row(folder: Path) -> Row:
    """Write where a study's files are."""
    return Row("Files", f"{folder}, page {StudyFolder(folder).page}")


def took_row(result: StudyResult, total: float) -> Row:
    """Write the seconds of a command, by what they went to."""
    spent = result.spent.phases
    # They are those of an earlier command where this one had nothing to train.
    if spent.total > total:
        return Row("Took", f"{total:.0f} s")
    parts = phases(spent, "{:.0f}".format, after=total - spent.total)
    if spent.preparation < 1.0:
        del parts[PREPARATION]
    named = ", ".join(f"{name} {seconds}" for name, seconds in parts.items())
    return Row("Took", f"{total:.0f} s: {named}")


def phases(spent: Phases, write: Callable[[float], str], after: float = 0.0) -> dict[str, str]:
    """Write the seconds of a command's phases, by their names.

    Args:
        spent: the seconds.
        write: writes seconds.
        after: the seconds that files and MLflow took, which belong to the answer.
    """
    return {
        "start": write(spent.start),
        PREPARATION: write(spent.preparation),
        "baseline": write(spent.baseline),
        "other configurations": f"{write(spent.others)} ({spent.share_of_others:.0%})",
        "new seeds": write(spent.confirmation),
        "answer": write(spent.answer + after),
    }


def one_run(record: Record) -> str:
    """Write what a training of one configuration came to."""
    metric = (record.finite_values or [math.nan])[-1]
    return (
        f"batch size {record.batch_size}, lr {console.number(record.lr)}: {record.status} after "
        f"{record.steps} steps, {console.seconds(record.train_seconds)} of training, "
        f"metric {metric:.4g}"
    )


def _first_row(result: StudyResult) -> Row:
    """Write line 1: the verdict or, where the question asks for none, the critical batch size."""
    if result.verdict is not None:
        return Row(result.verdict.capitalize(), _verdict_text(result))
    text = "batch size"
    critical = result.critical
    if critical is not None:
        text = critical_text(critical)
        if critical.linear_below is not None and critical.no_gain_above is not None:
            below, above = (
                _whole_number(critical.linear_below),
                _whole_number(critical.no_gain_above),
            )
            text += f": perfect scaling below {below}, maximal data parallelism above {above}"
    return Row("Critical", text)


def _verdict_text(result: StudyResult) -> str:
    """Write line 1 behind its verdict."""
    best = result.best
    baseline = result.baseline
    speedup = result.speedup
    if not result.reached:
        return _unreached_text(result)
    missing = f"missing: {result.missing}"
    words = WORDINGS[result.objective]
    if best is None:
        return missing
    if result.seeks_metric:
        return _metric_verdict_text(result, best)
    if result.verdict == "use":
        return f"{_name_of_best(best)}: {words.least}"
    if speedup is None or baseline is None:
        return f"{_name_of_best(best)} is the best so far; {missing}"
    best_other = f"the best of {console.count(result.configurations, 'other')}"
    if result.verdict == "keep" and speedup.high is not None:
        at_most = f"at most {console.speedup(speedup.high)} {words.better}"
        return f"{_name_of_best(best)}: {best_other} {words.verb} {at_most}"
    compared = _speedup_text(result, speedup, baseline)
    if result.verdict == "switch":
        return f"to {_name_of_best(best)}: {compared}"
    faster = best_other if best.number == baseline.number else _name_of_best(best)
    return f"{faster} {words.verb} {compared}; {missing}"


def _metric_verdict_text(result: StudyResult, best: Confirmed) -> str:
    """Write the best metric beside the baseline's, and the difference with its interval."""
    improvement = result.improvement
    better = "lower" if result.target.mode == "min" else "higher"
    metric = result.target.metric
    if result.verdict == "keep" and improvement is not None and improvement.high is not None:
        others = console.count(result.configurations, "other")
        if improvement.high <= 0.0:
            return f"{_name_of_best(best)}: none of {others} has a {better} {metric}"
        at_most = f"at most {console.number(improvement.high, 2)} {better}"
        return f"{_name_of_best(best)}: {metric} of the best of {others} is {at_most}"
    _, compared = _compared_with(result, best)
    text = f"{_name_of_best(best)}: {metric} {_metric_text(best)}"
    if compared is not None:
        text += f" instead of {_metric_text(compared)}"
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


def _compared_with(result: StudyResult, best: Confirmed) -> tuple[str, Confirmed | None]:
    """Name what the best is compared with: the baseline or, where it is that, the best other."""
    if _is_baseline(result, best):
        return "best other", result.other
    return "baseline", result.baseline


def _metric_text(configuration: Confirmed) -> str:
    """Write a metric with four digits: two runs may differ by little."""
    return "none" if configuration.metric is None else console.number(configuration.metric, 4)


def _row_budget(result: StudyResult) -> str | None:
    """Write what the budget takes, and the runs that line 1 stands on."""
    best = result.best
    if best is None or not best.runs:
        return None
    text = f"{result.budget}: {_steps_of_budget(result, best)}"
    name, compared = _compared_with(result, best)
    if compared is not None:
        text += f"; {name} ({_configuration_text(compared)}) {_steps_of_budget(result, compared)}"
    return f"{text}; {console.count(best.runs, 'new seed')} each"


def _steps_of_budget(result: StudyResult, configuration: Confirmed) -> str:
    """Write the steps of a budget, with their seconds where these are not the budget."""
    if result.budget.is_whole_run:
        return console.seconds(configuration.seconds)
    if result.budget.seconds is None:
        return _time_and_steps(result, configuration)
    return f"{_whole_number(configuration.steps)} steps"


def _unreached_text(result: StudyResult) -> str:
    """Write line 1 where nothing reached the target: how close a trial came."""
    text = f"nothing reached {result.target}"
    if result.seeks_metric:
        text = f"no trial trained for its whole budget of {result.budget}"
    closest = result.closest
    if closest is None:
        return f"{text}: {result.missing}"
    trend, _ = TRENDS[closest.trend]
    if result.target.mode == "max":
        trend = trend.replace("falling", "rising")
    value = console.number(closest.value)
    return f"{text}: closest {value} ({_configuration_text(closest.configuration)}); {trend}"


def _speedup_text(result: StudyResult, speedup: Speedup, baseline: Confirmed) -> str:
    """Write how much better the best is, as far as the baseline's end allows to say it."""
    pair = f"your baseline, batch size {baseline.batch_size:,} and lr {console.number(baseline.lr)}"
    words = WORDINGS[result.objective]
    better = f"{console.speedup(speedup.value)} {words.better}"
    if speedup.at_least:
        end = BASELINE_ENDS[result.baseline_limit or "budget"]
        return f"at least {better} {words.than} {pair}, whose median run {end}"
    return f"{better}{brackets(speedup.low, speedup.high, _speedup_end)} {words.than} {pair}"


def _speedup_end(value: float) -> str:
    """Write an end of a speedup; more digits where two would hide on which side of 1 it lies."""
    text = console.number(value, 2)
    return console.number(value, 4) if text == "1" else text


def _row_runs(result: StudyResult) -> str | None:
    """Write what the runs took, and what is predicted to be faster than the best in seconds."""
    text = _runs_text(result)
    faster = result.faster
    if text is None or faster is None:
        return text
    times = console.speedup(faster.speedup)
    return f"{text}; {_configuration_text(faster)} is predicted to be {times} as fast in seconds"


def _runs_text(result: StudyResult) -> str | None:
    """Write what the best and the baseline took on new seeds."""
    best = result.best
    if best is None or not best.runs:
        return None
    runs = _count_reached(best)
    share = f"({_share_in_tenths(best.predicted_share)} predicted)"
    took_best = _time_and_steps(result, best)
    name, compared = _compared_with(result, best)
    if _is_baseline(result, best):
        took_best = f"baseline {took_best}"
    if compared is None or not compared.runs:
        return f"{took_best}; {runs} new seeds reached it {share}"
    pair = f" ({_configuration_text(compared)})" if compared is result.other else ""
    seeds = f"{runs} new seeds each reached it {share}"
    if _count_reached(compared) != runs:
        seeds = f"{runs} new seeds reached it {share}; {name} {_count_reached(compared)}"
    return f"{took_best}; {name}{pair} {_time_and_steps(result, compared)}; {seeds}"


def _row_easier(result: StudyResult) -> str | None:
    """Write the goal that a quarter of the trials reached; None where the target was reached."""
    if result.easier_goal is None:
        return None
    return f"a quarter of the trials reached {result.easier_goal:g}: {result.easier}"


def _row_also_good(result: StudyResult) -> str | None:
    """Write the near-optimal batch sizes and what the rate alone gains; None for neither."""
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
    return "; ".join(parts) or None


def _row_scaling(result: StudyResult) -> str | None:
    """Write B_crit and the noise scale; None where B_crit is not computed."""
    if result.critical is None:
        return None
    text = f"critical {critical_text(result.critical)}"
    if result.critical.interval.value is not None:
        text += ", beyond which steps fall by half at most"
    noise = noise_scale(result)
    return text if noise is None else f"{text}; {noise}"


def noise_scale(result: StudyResult) -> str | None:
    """Write the gradient noise scale, where it is known."""
    noise = result.noise_scale
    if noise is None:
        return None
    write = partial(console.number, digits=2)
    ends = brackets(noise.low, noise.high, write)
    return f"noise scale {write(noise.value)}{ends}, a rough proxy"


def critical_text(critical: Critical) -> str:
    """Write the critical batch size, without its first word."""
    ends = critical.interval
    if ends.value is not None:
        return (
            f"batch size {_whole_number(ends.value)}{brackets(ends.low, ends.high, _whole_number)}"
        )
    if ends.low is not None:
        last = f"{critical.largest:,}"
        return (
            f"batch size above {_whole_number(ends.low)}: no trial above {last} reached the target"
        )
    if ends.high is not None:
        last = f"{critical.smallest:,}"
        return (
            f"batch size below {_whole_number(ends.high)}: no trial below {last} reached the target"
        )
    if critical.smallest == critical.largest:
        return f"batch size unknown: only batch size {critical.smallest:,} reached the target"
    reached = f"{critical.smallest:,} to {critical.largest:,}"
    return f"batch size unknown: batch sizes {reached} that reached the target show none"


def _row_range(result: StudyResult) -> str | None:
    """Write which octaves have a trial that reached; None where no trial did."""
    searched = result.searched
    if searched is None:
        return None
    octaves = console.count(searched.octaves, "octave")
    text = (
        f"batch sizes {searched.low:,} to {searched.high:,}: {searched.reached} of {octaves} "
        f"have a trial that reached the target"
    )
    if searched.unreached:
        text += f"; around {console.sizes(searched.unreached)} none did"
    return text


def rates(result: StudyResult) -> str | None:
    """Write how the best rate grows with batch size, and which scaling rules that allows."""
    text = growth(result)
    rules = ", ".join(f"scaling={rule}" for rule in result.allowed_rules) or "no scaling rule"
    return None if text is None else f"{text}, as by {rules}"


def growth(result: StudyResult) -> str | None:
    """Write how the best rate grows with batch size."""
    exponent = result.lr_exponent
    if exponent is None or exponent.value is None:
        return None
    ends = brackets(exponent.low, exponent.high, "{:.2f}".format)
    return f"the best lr scales as batch size^{exponent.value:.2f}{ends}"


def _row_next(result: StudyResult) -> str | None:
    """Write what to do next; None where the verdict leaves nothing open."""
    if result.verdict not in (None, "not yet"):
        return None
    fix = None
    if result.closest is not None:
        _, fix = TRENDS[result.closest.trend]
    # Else line 1 says it.
    missing = result.missing if fix or result.verdict is None else None
    return ": ".join(filter(None, (fix, missing, result.next))) or None


def _row_train(result: StudyResult) -> str | None:
    """Write what trains the best; None under another verdict than switch or use."""
    return result.train_command if result.verdict in ("switch", "use") else None


def _name_of_best(best: Confirmed) -> str:
    """Name the best: with further values by its file, as row Best has them."""
    return "the configuration in best.yaml" if best.values else _configuration_text(best)


def _row_best(result: StudyResult) -> str | None:
    """Write the best with its further values, which line 1 leaves out."""
    if result.best is None or not result.reached or not result.best.values:
        return None
    return _configuration_text(result.best)


def _configuration_text(configuration: Configuration) -> str:
    """Write batch size, rate, further values and a schedule's length."""
    pair = f"batch size {configuration.batch_size:,}, lr {console.number(configuration.lr)}"
    for name, value in configuration.values.items():
        pair += f", {name} {console.exact(value)}"
    if isinstance(configuration, Confirmed) and configuration.schedule_steps is not None:
        pair += f", a schedule of {console.count(configuration.schedule_steps, 'step')}"
    return pair


def _count_reached(configuration: Confirmed) -> str:
    """Write how many runs reached the target: all 3, 2 of 3."""
    reached, runs = configuration.reached, configuration.runs
    return f"all {runs}" if reached == runs > 1 else f"{reached} of {runs}"


def _share_in_tenths(share: float) -> str:
    """Write a share of seeds in tenths; it is never all of them, as it is predicted."""
    return f"{min(round(10 * share), 9)} of 10"


def _time_and_steps(result: StudyResult, configuration: Confirmed) -> str:
    """Write seconds and steps to the target, what is minimised first."""
    parts = [console.seconds(configuration.seconds), f"{_whole_number(configuration.steps)} steps"]
    if WORDINGS[result.objective].steps_first:
        parts.reverse()
    took = ", ".join(parts)
    # Where the median is a bound it took longer.
    return f"over {took}" if configuration.is_bound else took


def _whole_number(value: float) -> str:
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


WORDINGS: dict[Objective, Wording] = {
    "time": Wording(
        rows={
            "Best": _row_best,
            "Time": _row_runs,
            "Easier": _row_easier,
            "Also good": _row_also_good,
            "Scaling": _row_scaling,
        },
        least="the least time to the target",
        verb="is",
        better="as fast",
        than="as",
    ),
    "steps": Wording(
        rows={
            "Best": _row_best,
            "Steps": _row_runs,
            "Easier": _row_easier,
            "Also good": _row_also_good,
            "Scaling": _row_scaling,
        },
        least="the fewest steps to the target",
        verb="takes",
        better="fewer steps",
        than="than",
        steps_first=True,
    ),
    "curve": Wording(rows={"Range": _row_range, "Rates": rates, "Easier": _row_easier}),
    "metric": Wording(rows={"Best": _row_best, "Budget": _row_budget, "Also good": _row_also_good}),
}
