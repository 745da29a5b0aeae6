"""What a study answers, in words: all of them, from ``curve.json``'s mapping.

The console, the figure's title, the pages, comparisons and MLflow's note take their words from here. What a study does
not know is left out.
"""

import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from bstune.report.rows import REGIMES, WINNERS, Row, winner_to_use
from bstune.system.console import format_count, format_number, format_seconds, plural, time_unit

Line = tuple[
    str, tuple[str, ...]
]  # a label, and texts: the second one and further ones stand below the first
WIDTH, INDENT, MAX_LINES = 120, 10, 25  # of the block that the console shows
STATUS_WORDS = {
    "reached": "reached",
    "censored": "stopped",
    "diverged": "diverged",
    "oom": "out of memory",
    "failed": "failed",
}
RULE_WORDS = {
    "none": "a constant rate",
    "sqrt": "the square root",
    "linear": "linear scaling",
    "saturating": "the saturating rule",
    "surge": "the surge rule",
}
POWERS = ("none", "sqrt", "linear")
PREDICTED = "predicted, not run again on fresh seeds"
NARROW, NARROW_ENOUGH = (
    1.5,
    3.0,
)  # times its low end: an interval this narrow is good, and good enough
NOISY = 0.2  # by how much steps at one batch size may differ on a quiet machine
HALF = 0.5  # efficiency: the first number of devices below it is the last that is named
MORE = 4  # times what was spent, where more of it is the advice
LIGHTNINGS = "Lightning's: "  # begins the name of a training loop that is not bstune's
NOT_CAPTURED = "lean, not graph: "  # and of one whose steps were to be captured
NOTES_LEFT = "and {} in curve.json"
SPARE = (
    "RUNS",
    "LR",
    "FASTEST",
    "FEWEST",
    "DEVICES",
    "more",
    "TRUST",
)  # left out in this order, if there is no room


@dataclass(frozen=True)
class Trust:
    """How far one part of the answer can be trusted: ``range`` of the curve, its ``coverage``, ``seeds``, ``noise``."""

    name: str
    text: str
    good: bool


@dataclass(frozen=True)
class Answer:
    """A study's answer.

    Args:
        title: what was asked: workload, target, device and number of runs.
        headline: the answer as one sentence.
        lines: label and texts of what is known, in the order in which it is read.
        actions: likewise, what to do with it: the command that trains the winner, and what would narrow the interval.
    """

    title: str
    headline: str
    lines: tuple[Line, ...]
    actions: tuple[Line, ...]


def answer(summary: Row) -> Answer:
    """Return what a study answers, from the mapping of its ``curve.json``."""
    use, other = _winners(summary)
    lines: dict[str, Iterable[str | None]] = {
        "USE": []
        if use is None
        else [_point_text(use, summary.get("tokens")), expected_text(use), _test_text(summary)],
        "GAIN": [_gain_text(summary)],
        "WARNING": [
            *(text for one in (use, other) if (text := _warning(one))),
            _first_look_text(summary.get("baseline")),
        ],
        "RESULT": [unreached_text(summary), _predicted_text(summary)] if use is None else [],
        "WHY": [_cause(summary)[0]] if use is None else [],
        "TRY": [_cause(summary)[1]] if use is None else [],
        "CRITICAL": _critical_texts(summary),
        _other_label(summary): [] if other is None else [_other_text(summary, other)],
        "LR": [] if use is None else [_lr_text(summary.get("lr_exponent") or {})],
        "DEVICES": [_devices_text(summary)],
        "RUNS": [_runs_text(summary)],
        "TRUST": ["; ".join(one.text for one in trust(summary))],
        "NOTE": [*(summary.get("notes") or ()), *_loop_notes(summary)],
    }
    actions: dict[str, list[str | None]] = {
        "train it": [summary.get("train")],
        "more": list(_more(summary)) if use is not None else [],
    }
    title = [
        summary.get("workload"),
        summary.get("target"),
        *map(device_text, summary.get("devices") or ()),
    ]
    title += [plural(summary["trials"], "run")] if "trials" in summary else []
    return Answer(
        " · ".join(str(one) for one in title if one),
        _headline(summary),
        _only(lines),
        _only(actions),
    )


def _loop_notes(summary: Row) -> Iterator[str]:
    """Yield why another loop took the steps of trials than the option asks for."""
    for name in summary.get("training_loops") or ():
        if name.startswith(LIGHTNINGS) and "protocol.fast" not in name:
            yield f"Lightning's own loop took the steps, not the lean one: {name.removeprefix(LIGHTNINGS)}"
        elif name.startswith(NOT_CAPTURED):
            yield f"steps were not captured as a CUDA graph: {name.removeprefix(NOT_CAPTURED)}"


def _only(lines: Mapping[str, Iterable[str | None]]) -> tuple[Line, ...]:
    texts = {label: tuple(text for text in some if text) for label, some in lines.items()}
    return tuple((label, some) for label, some in texts.items() if some)


def block(found: Answer, further: Sequence[Line] = (), width: int = WIDTH) -> list[str]:
    """Return an answer as at most 25 lines of the console, of so many columns.

    ``further`` are paths and commands: they are not broken, nor is the command that trains the winner.
    """
    lines = _block(found, further, width, ())
    there = {label for label, _ in (*found.lines, *found.actions)}
    spare = [label for label in SPARE if label in there]
    for i in range(len(spare)):
        if len(lines) > MAX_LINES:
            lines = _block(found, further, width, spare[: i + 1])
    return lines


def _block(
    found: Answer, further: Sequence[Line], width: int, left_out: Sequence[str]
) -> list[str]:
    answered = [
        line
        for one in found.lines
        if one[0] not in ("NOTE", *left_out)
        for line in _rows(*one, width)
    ]
    answered += _rows("PAGE", [f"{', '.join(left_out)}: in report.html"], width) if left_out else []
    notes = next((texts for label, texts in found.lines if label == "NOTE"), ())
    actions = [one for one in found.actions if one[0] not in left_out]
    done = [
        line
        for one in (*actions, *further)
        for line in _rows(*one, width if one[0] == "more" else None)
    ]
    fixed = [*_wrapped(found.title, width), "", *answered]
    kept = len(notes)
    while kept and len(fixed) + len(_notes(notes, kept, width)) + 1 + len(done) > MAX_LINES:
        kept -= 1
    return [*fixed, *_notes(notes, kept, width), "", *done]


def _notes(notes: Sequence[str], kept: int, width: int) -> list[str]:
    left = [NOTES_LEFT.format(plural(len(notes) - kept, "further note" if kept else "note"))] * (
        kept < len(notes)
    )
    return _rows("NOTE", (*notes[:kept], *left), width) if notes else []


def _rows(label: str, texts: Sequence[str], width: int | None) -> list[str]:
    """Return a labelled line with its texts below each other, wrapped to the width; None: not wrapped."""
    rows = (
        texts
        if width is None
        else [row for text in texts for row in _wrapped(text, width - INDENT)]
    )
    return [f"{label if i == 0 else '':<{INDENT}}{row}" for i, row in enumerate(rows)]


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)


def _winners(summary: Row) -> tuple[Row | None, Row | None]:
    """Return the winner by the study's objective, and the other one if it is another point."""
    first, use = winner_to_use(summary)
    other = next((summary.get(name) for name in WINNERS if name != first), None)
    if use is None or other is None or other["number"] == use["number"]:
        return use, None
    return use, other


def _headline(summary: Row) -> str:
    use, _ = _winners(summary)
    name = summary.get("workload", "study")
    if use is None:
        return f"{name}: {unreached_text(summary)}"
    text = f"{name}: use B = {format_count(use['batch_size'])}, lr = {format_number(use['lr'])}"
    critical = summary.get("critical") or {}
    low, high = critical.get("b_crit_low"), critical.get("b_crit_high")
    if critical.get("b_crit") is None:
        return f"{text}; up to where more pays is not known"
    ends = f"{format_number(low, 2)} to {format_number(high, 2)}"
    span = ends if None not in (low, high) else interval_text(critical, "b_crit").partition(": ")[2]
    return f"{text}; more pays up to B = {format_number(critical['b_crit'], 2)} ({span})"


def device_text(device: str) -> str:
    """Return ``cpu, 1 thread`` for ``cpu (1 thread)``."""
    return "replayed" if device == "replay" else device.replace(" (", ", ").removesuffix(")")


def _point_text(winner: Row, tokens: int | None = None) -> str:
    """Return ``batch size 204, learning rate 1.13``, with further hyper-parameters and the horizon if there are any.

    ``tokens``: of an example, where it has some; then ``batch size 204 (13,056 tokens)``.
    """
    others = [
        f"{name} {format_number(value)}"
        for name, value in (winner.get("hyperparameters") or {}).items()
    ]
    if winner.get("horizon") is not None:
        others.append(f"a schedule of {plural(winner['horizon'], 'step')}")
    size, rate = format_count(winner["batch_size"]), format_number(winner["lr"])
    size += f" ({format_count(winner['batch_size'] * tokens)} tokens)" if tokens else ""
    return ", ".join([f"batch size {size}", f"learning rate {rate}", *others])


def expected_text(winner: Row) -> str:
    """Return what a winner takes: ``613 ms, 53 steps (3 of 3 fresh seeds: 480 to 737 ms, 48 to 88 steps)``."""
    fresh, seconds, steps = winner["confirmed"], winner["time_to_target"], winner["steps"]
    middle = [] if seconds is None else [format_seconds(seconds)]
    middle += [] if steps is None else [plural(round(steps), "step")]
    if fresh is None:
        return f"{', '.join(middle)} ({PREDICTED})"
    reached = fresh_text(fresh)
    ranges = [text for text in (range_text("time", fresh), range_text("steps", fresh)) if text]
    if not ranges:
        return f"not known: {reached} reached the target"
    if not middle:
        return f"not known: only {reached} reached the target ({', '.join(ranges)})"
    return f"{', '.join(middle)} ({reached}: {', '.join(ranges)})"


def fresh_text(fresh: Row) -> str:
    """Return ``3 of 3 fresh seeds``."""
    return f"{fresh['reached']} of {plural(fresh['runs'], 'fresh seed')}"


def range_text(name: str, fresh: Row) -> str | None:
    """Return ``480 to 737 ms``, or ``48 to 88 steps``, over fresh seeds; None where none reached the target."""
    low, high = fresh.get(f"{name}_low"), fresh.get(f"{name}_high")
    if low is None:
        return None
    (scale, unit), text = (
        (time_unit(low), format_number) if name == "time" else ((1.0, "steps"), format_count)
    )
    if high is None:
        return f"{text(low / scale)} {unit} and more"
    return f"{text(low / scale)}{f' to {text(high / scale)}' if high > low else ''} {unit}"


def _warning(winner: Row | None) -> str | None:
    fresh = None if winner is None else winner["confirmed"]
    if winner is None or fresh is None or fresh["reached"] == fresh["runs"]:
        return None
    return f"only {fresh_text(fresh)} reached the target at {_point_text(winner)}"


def _first_look_text(baseline: Row | None) -> str | None:
    """Return that the target is too easy to tell batch sizes apart, and one that would; None where it is not."""
    value = (baseline or {}).get("telling_target")
    if baseline is None or value is None:
        return None
    return (
        f"your {_point_text(baseline)} met the target at its first look, after "
        f"{plural(baseline['steps'], 'step')}, where batch sizes differ little: a harder target "
        f"tells more, such as workload.target.value={format_number(value, 2)}"
    )


def _test_text(summary: Row) -> str | None:
    tests = summary.get("test") or {}
    metrics: Row = (
        tests.get(winner_to_use(summary)[0]) or {}
    )  # the other winner's are not those of this point
    values = ", ".join(f"{name} {format_number(value)}" for name, value in metrics.items())
    return f"{values} of one run, on data that took no part in the choice" if values else None


def _other_label(summary: Row) -> str:
    return "FASTEST" if summary.get("use") == "best_by_steps" else "FEWEST"


def _other_text(summary: Row, winner: Row) -> str:
    """Return ``46 steps at batch size 660, learning rate 1.34 (3 of 3 fresh seeds)``."""
    fresh = winner["confirmed"]
    how = "predicted" if fresh is None else fresh_text(fresh)
    by_time = _other_label(summary) == "FASTEST"
    value = winner["time_to_target"] if by_time else winner["steps"]
    if value is None:
        return f"{_point_text(winner)} ({how})"
    text = format_seconds(value) if by_time else plural(round(value), "step")
    return f"{text} at {_point_text(winner)} ({how})"


def _gain_text(summary: Row) -> str | None:
    """Return how much faster the winner is than the user's own configuration; None where there is none to compare."""
    baseline, gain = summary.get("baseline"), summary.get("gain")
    if not baseline:
        return None
    own = f"your {_point_text(baseline)}"
    use, _ = _winners(summary)
    if use is None and (compared := (summary.get("so_far") or {}).get("compared")):
        return _compared_text(compared, own)
    if gain is None:
        return _no_gain_text(baseline, use, own)
    better = "as fast as" if gain["merit"] == "time" else "fewer steps than"
    ratio = format_number(gain["ratio"], 3 if gain["ratio"] < 2.0 else 2)
    if gain["at_least"]:
        return f"at least {ratio} times {better} {own}, stopped before the target"
    ends = f"{format_number(gain['low'], 2)} to {format_number(gain['high'], 2)}"
    span = f"{gain['level']:.0%}: {ends}"
    if gain["low"] <= 1.0:
        return f"not shown to be faster than {own}: keep what you have ({ratio} times, {span})"
    return f"{ratio} times {better} {own} ({span})"


def _compared_text(compared: Row, own: str) -> str:
    """Return what the closest point and the user's own had come to after as many seconds of training."""
    value, of_baseline = (format_number(compared[name], 3) for name in ("value", "baseline_value"))
    seconds = format_seconds(compared["seconds"])
    return f"after {seconds} of training the closest point was at {value}, {own} at {of_baseline} (one run each)"


def _predicted_text(summary: Row) -> str | None:
    """Return what the closest point is predicted to take to the target; None where there is none."""
    so_far = summary.get("so_far")
    if not so_far:
        return None
    if so_far["predicted_steps"] is None:
        return "whether it would meet the target cannot be told from its history"
    parts = [plural(round(so_far["predicted_steps"]), "step")]
    if so_far["predicted_seconds"] is not None:
        parts.append(f"{format_seconds(so_far['predicted_seconds'])} of training")
    return f"that point is predicted to meet the target after about {', '.join(parts)}"


def _no_gain_text(baseline: Row, use: Row | None, own: str) -> str | None:
    """Return why there is no gain, and what the user's own configuration came to."""
    status = baseline["status"]
    if status in ("diverged", "oom"):
        words = "ran out of memory" if status == "oom" else "diverged"
        return f"not known: {own} {words} after {plural(baseline['steps'], 'step')}"
    if use is None:
        return None
    same = use["batch_size"] == baseline["batch_size"] and use["lr"] == baseline["lr"]
    if same:
        return f"none: {own} is the best that was found"
    return f"not known: {own} {STATUS_WORDS[status]} after {plural(baseline['steps'], 'step')}"


def critical_text(critical: Row) -> str:
    """Return ``67 (90%: 41 to 110)``: B_crit in examples and its interval."""
    value = critical["b_crit"]
    return f"{'undetermined' if value is None else format_number(value, 2)} ({interval_text(critical, 'b_crit')})"


def interval_text(row: Row, name: str) -> str:
    """Return ``90%: 41 to 110``, ``90%: above 41``, ..."""
    low, high = (row.get(f"{name}_{end}") for end in ("low", "high"))
    if low is None and high is None:
        return f"{row['level']:.0%} interval open at both ends"
    if low is None or high is None:
        end = (
            f"above {format_number(low, 2)}" if high is None else f"below {format_number(high, 2)}"
        )
    else:
        end = f"{format_number(low, 2)} to {format_number(high, 2)}"
    return f"{row['level']:.0%}: {end}"


def _critical_texts(summary: Row) -> Iterator[str]:
    critical = summary.get("critical")
    if not critical:
        return
    if critical["smallest"] == critical["largest"]:
        yield f"not known, as batch size {format_count(critical['smallest'])} alone reached the target"
        return
    tokens = summary.get("tokens")
    counted = tokens is not None and critical["b_crit"] is not None
    said = (
        f", {format_count(float(format_number(critical['b_crit'] * tokens, 2)))} tokens"
        if counted
        else ""
    )
    yield f"batch size {critical_text(critical)}{said}"
    if critical["b_crit"] is not None:
        yield regimes_text(summary.get("regimes") or (), critical)
    if critical.get("b_opt") is not None:
        opt = f"{format_number(critical['b_opt'], 2)} ({interval_text(critical, 'b_opt')})"
        yield f"fewest examples at batch size {opt}; smaller batches need more of them"
    if summary.get("over_target_growth"):
        yield growth_text(summary["over_target_growth"], str(summary.get("metric") or "metric"))
    noise = summary.get("noise_scale") or {}
    if noise.get("noise_scale") is not None:
        ends = f"{noise['level']:.0%}: {format_number(noise['low'], 2)} to {format_number(noise['high'], 2)}"
        yield f"gradient noise scale {format_number(noise['noise_scale'], 2)} ({ends}), a hint at it"


def growth_text(row: Row, metric: str) -> str:
    """Return ``rises as the target gets harder: as val/loss^-4.3 (90%: -5.1 to -3.5) from 2.6 to 2``."""
    how = "rises" if row["high"] < 0.0 else "falls" if row["low"] > 0.0 else "shows no sure change"
    base = metric if row["ideal"] == 0.0 else f"|{metric} - {row['ideal']:g}|"
    ends = f"{row['level']:.0%}: {row['low']:z.1f} to {row['high']:z.1f}"
    span = f"from {format_number(row['from'])} to {format_number(row['to'])}"
    return f"{how} as the target gets harder: as {base}^{row['exponent']:z.1f} ({ends}) {span}"


def regimes_text(regimes: Sequence[Row], critical: Row) -> str:
    """Return up to where twice the batch halves the steps, and from where on it gains nothing, if that was seen."""
    low, high = (
        critical.get("perfect_scaling_below"),
        critical.get("maximal_data_parallelism_above"),
    )
    seen = {row["name"] for row in regimes}
    texts = []
    if REGIMES[0] in seen:
        texts.append(f"below {format_number(low, 2)} twice the batch halves the steps")
    if REGIMES[2] in seen:
        texts.append(f"above {format_number(high, 2)} it gains nothing")
        texts[-1] = (
            texts[-1] if len(texts) == 2 else texts[-1].replace("it gains", "a larger batch gains")
        )
    if len(texts) == 2:
        return "; ".join(texts)
    names = {REGIMES[0]: "where it halves the steps", REGIMES[2]: "where it gains nothing"}
    missing = " or ".join(text for name, text in names.items() if name not in seen)
    span = f"{format_count(critical['smallest'])} to {format_count(critical['largest'])}"
    texts.append(
        f"sizes {span} do not show {missing if texts else missing.replace('it', 'twice the batch', 1)}"
    )
    return "; ".join(texts)


def _lr_text(row: Row) -> str | None:
    """Return ``grew as B^0.22 (0.16 to 0.27): slower than the square root``."""
    if not row:
        return None
    below = row.get("below_b_crit")
    texts = [_exponent_text(row)]
    if row.get("identified") and below and below["identified"] and below["end"] < row["end"]:
        texts.append(f"up to the critical batch size {_exponent_text(below)}")
    return "; ".join(texts)


def _exponent_text(row: Row) -> str:
    if not row["identified"]:
        trials = plural(row["reached"], "trial")
        over = (
            f" over {row['octaves']:.1f} octaves of batch size"
            if row.get("octaves") is not None
            else ""
        )
        return f"not known: {trials}{over} reached the target"
    verb = "fell" if row["exponent"] < 0.0 else "grew"
    power = f"{verb} as B^{row['exponent']:z.2f} ({row['low']:z.2f} to {row['high']:z.2f})"
    return (
        f"{power}: {verdict(row['low'], row['high'], row['rules'])}" if row.get("rules") else power
    )


def verdict(low: float, high: float, exponents: Mapping[str, float]) -> str:
    """Return which scaling rules fit an interval of the exponent, as a phrase; ``exponents`` are those of the rules."""
    ordered = sorted(exponents.items(), key=lambda item: item[1])
    fitting = [RULE_WORDS[name] for name, exponent in ordered if low <= exponent <= high]
    if len(fitting) > 1:
        return f"{', '.join(fitting[:-1])} and {fitting[-1]} {'both' if len(fitting) == 2 else 'all'} fit"
    if fitting:
        return f"{fitting[0]} fits"
    powers = [
        (name, exponent) for name, exponent in ordered if name in POWERS
    ]  # which everybody knows
    below = [name for name, exponent in powers if exponent < low]
    above = [name for name, exponent in powers if exponent > high]
    if not above:
        return f"faster than {RULE_WORDS[below[-1]]}"
    if not below or below[-1] == "none":
        return f"slower than {RULE_WORDS[above[0]]}"
    return f"between {RULE_WORDS[below[-1]]} and {RULE_WORDS[above[0]]}"


def _devices_text(summary: Row) -> str | None:
    """Return ``2 at 62% efficiency, 4 at 39%``; None where there is no plan."""
    plans = summary.get("scale_out") or {}
    rows = [
        row
        for row in plans.get("with_all_reduce") or plans.get("ideal") or ()
        if row["devices"] > 1
    ]
    if not rows:
        return None
    pay = [row for row in rows if row["efficiency"] >= HALF]
    shown = [*pay[-2:], *[row for row in rows if row["efficiency"] < HALF][:1]]
    texts = [f"{row['devices']} at {row['efficiency']:.0%}" for row in shown]
    texts[0] += " efficiency"
    link = "with the" if plans.get("with_all_reduce") else "without an"
    return f"{', '.join(texts)}, {link} all-reduce"


def counts_text(summary: Row) -> str:
    """Return ``37 reached the target, 26 stopped before, 4 diverged``."""
    words = STATUS_WORDS | {"reached": "reached the target", "censored": "stopped before"}
    return ", ".join(
        f"{format_count(n)} {words[status]}" for status, n in summary["statuses"].items() if n
    )


def _runs_text(summary: Row) -> str | None:
    if "statuses" not in summary:
        return None
    return "; ".join(text for text in (counts_text(summary), summary.get("stop_reason")) if text)


def trust(summary: Row) -> tuple[Trust, ...]:
    """Return what tells how far the answer can be trusted, as far as it is known."""
    return tuple(
        one
        for one in (_range(summary), _coverage(summary), _seeds(summary), _noise(summary))
        if one
    )


def _range(summary: Row) -> Trust | None:
    critical = summary.get("critical")
    if not critical or critical["smallest"] == critical["largest"]:
        return None
    sizes = {point["batch_size"] for point in summary.get("points") or () if not point["censored"]}
    sizes |= {critical["smallest"], critical["largest"]}
    low, high = critical.get("b_crit_low"), critical.get("b_crit_high")
    good = None not in (low, high) and high <= NARROW_ENOUGH * low
    span = f"{plural(len(sizes), 'size')} over {format_count(min(sizes))} to {format_count(max(sizes))}"
    width = (
        "an open interval"
        if None in (low, high)
        else f"an interval of {format_number(high / low, 2)} times"
    )
    return Trust("range", f"curve: {span}, {'good' if good else width}", good)


def _coverage(summary: Row) -> Trust | None:
    critical, seen = summary.get("critical"), {row["name"] for row in summary.get("regimes") or ()}
    if not critical or critical.get("b_crit") is None:
        return None
    missing = [
        end for end, name in (("small", REGIMES[0]), ("large", REGIMES[2])) if name not in seen
    ]
    text = {
        0: "both its ends seen",
        1: f"its {missing[0] if missing else ''} end not seen",
        2: "neither end seen",
    }
    return Trust("coverage", text[len(missing)], not missing)


def _seeds(summary: Row) -> Trust | None:
    use, _ = _winners(summary)
    if use is None:
        return None
    fresh, scatter = use["confirmed"], summary.get("seed_scatter")
    text = "winner not run again" if fresh is None else f"winner: {fresh_text(fresh)}"
    differ = f", steps scatter by {scatter['scatter']:.0%}" if scatter else ""
    return Trust("seeds", text + differ, fresh is not None and fresh["reached"] == fresh["runs"])


def _noise(summary: Row) -> Trust | None:
    machine = summary.get("load")
    if not machine:
        return None
    ratio = machine["high"] / machine["low"]
    noisy = ratio > 1.0 + NOISY
    much = f"{ratio - 1.0:.0%}" if ratio < 2.0 else f"a factor of {ratio:.1f}"
    what = f"trials' steps, over the survey's, differ by {much}"
    return Trust("noise", f"seconds: {f'noisy machine ({what})' if noisy else what}", not noisy)


def unreached_text(summary: Row) -> str:
    """Return that the target was not reached, and the closest value."""
    target, count = summary.get("target", "the target"), plural(summary.get("trials", 0), "run")
    if not summary.get("trials"):
        return f"no trial has run, so {target} was not reached"
    closest = (summary.get("unreached") or {}).get("closest")
    if closest is None:
        return f"{target} was not reached in {count}"
    value, number = format_number(closest["value"]), closest["number"]
    where = f"batch size {format_count(closest['batch_size'])}, learning rate {format_number(closest['lr'])}"
    after = plural(closest["steps"], "step")
    return f"{target} was not reached in {count}; the closest was {value}, at {where}, after {after} (trial {number})"


def unreached_advice(summary: Row) -> str:
    """Return that the target was not reached, why, and what to try, in one line."""
    why, change = _cause(summary)
    texts = (unreached_text(summary), why, change and f"try {change}")
    return "; ".join(text for text in texts if text)


def _cause(summary: Row) -> tuple[str | None, str | None]:
    """Return why no trial reached the target, and what to change."""
    row = summary.get("unreached")
    statuses = summary.get("statuses") or {}
    total = sum(statuses.values())
    if not row or row.get("stopped") is None or not total:
        return None, None
    most = max(statuses, key=lambda status: statuses[status])
    share = f"{statuses[most]} of {plural(total, 'trial')}"
    if most == "failed":
        return (
            f"{share} failed, the last one with {row['message']}",
            "mend what fails; the same command goes on",
        )
    if most == "oom":
        return f"{share} ran out of memory", "a smaller search.batch_size.high"
    if most == "diverged":
        rate = format_number(row["smallest_diverged_lr"] / 10.0, 2)
        return f"{share} diverged", f"smaller learning rates: scaling.lr={rate}"
    ended, improving, spent = row["stopped"], row["improving"], row["improving_at_budget"]
    if 2 * improving < ended:
        easier = (
            f"an easier target (workload.target.value={format_number(row['easier'], 2)})"
            if row["easier"]
            else ""
        )
        rates = "another learning rate (scaling.lr), another model or schedule"
        why = f"{ended - improving} of {plural(ended, 'stopped trial')} no longer improved when they were stopped"
        return why, " or ".join(text for text in (easier, rates) if text)
    if 2 * spent >= improving:
        why = (
            f"{spent} of {plural(ended, 'stopped trial')} still improved at the end of their budget"
        )
        steps, examples = MORE * row["budget_steps"], MORE * row["budget_examples"]
        return why, f"a larger budget: budget.steps={steps} budget.examples={examples}"
    trials = (summary.get("search") or {}).get("trials")
    why = f"{improving} of {plural(ended, 'stopped trial')} still improved when the search ended and stopped them"
    limits = summary.get("search") or {}
    if limits.get("limit"):
        return why, f"more of {limits['limit']}: the same command continues them"
    return (
        why,
        f"search.trials={MORE * trials}: the same command continues them"
        if trials
        else "more search.trials",
    )


def _more(summary: Row) -> Iterator[str]:
    """Yield what would narrow the interval, or show more, as options of the same command."""
    critical, search = summary.get("critical") or {}, summary.get("search") or {}
    if not search:
        return
    low, high = critical.get("b_crit_low"), critical.get("b_crit_high")
    open_ended = low is None or high is None
    if critical.get("note"):
        yield critical["note"]
    if critical.get("next_trials") or (low and high and high > NARROW * low):
        sizes = " and ".join(
            format_count(one["batch_size"]) for one in (critical.get("next_trials") or ())[:2]
        )
        at = f" (first at batch sizes {sizes})" if sizes else ""
        what = "closes" if open_ended else "narrows"
        yield f"search.trials={2 * search['trials']} {what} the interval{at}"
    if search.get("replicates") == 0:
        yield "search.replicates=3 runs the winner again on fresh seeds"
    if summary.get("not_run_again"):
        row = summary["not_run_again"]
        yield (
            f"search.candidates={row['candidates'] + 1} runs batch size {format_count(row['batch_size'])}, "
            f"learning rate {format_number(row['lr'])} again too, predicted to be better"
        )
