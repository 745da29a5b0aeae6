"""The charts of a study's page, each as HTML; empty where there is nothing to show."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from bstune.core.records import Merit, TrialResult
from bstune.core.scaling import RULES
from bstune.report.answer import (
    critical_text,
    expected_text,
    growth_text,
    interval_text,
)
from bstune.report.html import axis, chart, label, paragraph, text
from bstune.report.schema import HardwareFile
from bstune.report.study_folder import StudyFolder
from bstune.result import WINNERS, CriticalAtTarget, CriticalBatchSize, Curve, StudyResult
from bstune.system.console import format_count, format_number, format_seconds, plural

CURVE_POINTS = 48  # of a learning curve, at most: the page is to stay small


def curves(study: StudyFolder) -> str:
    """Return steps and time to target over batch size."""
    steps = _frontier(study, "steps", lambda trial: trial.steps, "steps to target S")
    seconds = ""
    if any(trial.seconds_per_step for trial in study.files.trials):
        seconds = _frontier(
            study,
            "time",
            lambda trial: trial.steps * (trial.seconds_per_step or math.nan),
            "time to target T (seconds)",
        )
    if not steps + seconds:
        return ""
    caption = ""
    critical = _shown_critical(study.result)
    if critical is not None:
        caption = f"Shaded: the critical batch size, {critical_text(critical)}."
    stopped = "Hollow triangles are trials that were stopped: they need more steps than that."
    return f'<div class="pair">{steps}{seconds}</div>{paragraph(f"{caption} {stopped}".strip(), "faint")}'


def _frontier(
    study: StudyFolder, merit: Merit, value: Callable[[TrialResult], float], title: str
) -> str:
    """Return the chart of steps or of time to target over batch size."""
    result, trials = study.result, study.files.trials
    reached = [trial for trial in trials if trial.reached]
    stopped = [trial for trial in trials if trial.status == "stopped" and trial.steps_low > 0]
    traces: list[dict[str, Any]] = []
    traces += _curve_traces(result.curve, merit)
    traces.append(_dots(reached, value, "reached the target", "--blue"))
    traces.append(_dots(stopped, value, "stopped before it", "--grey", "triangle-up-open"))
    winner = _star(result, merit)
    if winner is not None:
        traces.append(winner)
    values = [value(trial) for trial in reached]
    shown = _range([trial.batch_size for trial in reached], 0.12)
    layout = {
        "xaxis": axis("batch size B (examples)", **shown),
        "yaxis": axis(title, **_range(values, 0.15)),
    }
    critical = _shown_critical(result)
    if critical is not None and shown:
        layout |= _critical_marks(critical, [10.0**end for end in shown["range"]])
    return chart(traces, layout)


def _curve_traces(curve: Curve | None, merit: Merit) -> list[dict[str, Any]]:
    """S*(B), or S*(B) tau(B), with its band; none where it is not known."""
    if curve is None:
        return []
    tau = curve.seconds_per_step
    if merit == "steps":
        tau = (1.0,) * len(curve.batch_size)
    if tau is None:
        return []
    low, middle, high = (
        [steps * seconds for steps, seconds in zip(values, tau, strict=True)]
        for values in (curve.low, curve.steps, curve.high)
    )
    pairs = list(zip(curve.batch_size, middle, strict=True))
    hover = [f"B = {format_count(size)}: {_merit_text(merit, value)}" for size, value in pairs]
    name = "S*(B), all trials" if merit == "steps" else "S*(B) tau(B)"
    traces = _band(curve.batch_size, low, high, "90% band")
    traces.append(_line(curve.batch_size, middle, name, hover))
    if merit == "steps":
        fewest = min(size * steps for size, steps in pairs)
        ends = [curve.batch_size[0], curve.batch_size[-1]]
        slope = [fewest / size for size in ends]
        traces.append(
            _line(ends, slope, "twice the batch, half the steps", None, "--faint", "dash")
        )
    return traces


def _shown_critical(result: StudyResult) -> CriticalBatchSize | None:
    """Give the critical batch size where the trials set an end of its interval; one batch size says nothing of it."""
    critical = result.critical_batch_size
    if critical is None or critical.is_of_one_size:
        return None
    if critical.low is None and critical.high is None:
        return None
    return critical


def _critical_marks(critical: CriticalBatchSize, ends: Sequence[float]) -> dict[str, Any]:
    """Return the layout's line and span of the critical batch size, its name in place; an open one reaches the ends."""
    value, low, high = critical.value, critical.low, critical.high
    tall = {"yref": "paper", "y0": 0, "y1": 1, "layer": "below"}
    span = {
        "x0": low or ends[0],
        "x1": high or ends[1],
        "fillcolor": "--interval",
        "line": {"width": 0},
    }
    shapes = [{"type": "rect", **span, **tall}]
    if value is not None:
        shapes.append(
            {
                "type": "line",
                "x0": value,
                "x1": value,
                **tall,
                "line": {"color": "--purple", "width": 2},
            }
        )
    name = interval_text(critical).partition(": ")[2]
    if value is not None:
        name = format_number(value, 2)
    # plotly takes a shape's x as it is and an annotation's as its logarithm
    at = math.log10(min(max(value or low or high or ends[0], ends[0]), ends[1]))
    note = {
        "x": at,
        "y": 1,
        "yref": "paper",
        "yanchor": "bottom",
        "showarrow": False,
        "font": {"color": "--purple"},
    }
    return {"shapes": shapes, "annotations": [note | {"text": f"B_crit {name}"}]}


def _star(result: StudyResult, merit: Merit) -> dict[str, Any] | None:
    """Return the winner by a merit with its range over fresh seeds."""
    winner = result.winner_by(merit)
    value = None if winner is None else winner.expected(merit)
    if winner is None or value is None:
        return None
    low, high = (None, None) if winner.confirmed is None else winner.confirmed.ends(merit)
    words = [
        next(one.heading for one in WINNERS.values() if one.merit == merit),
        f"B = {format_count(winner.batch_size)}, lr = {format_number(winner.lr)}",
    ]
    star: dict[str, Any] = {
        "type": "scatter",
        "mode": "markers",
        "name": f"best by {merit}",
        "x": [winner.batch_size],
        "y": [value],
        "marker": {
            "symbol": "star",
            "size": 17,
            "color": "--vermilion",
            "line": {"width": 1, "color": "--ground"},
        },
        "hoverinfo": "text",
        "text": "<br>".join(map(label, [*words, expected_text(winner)])),
    }
    if low is not None and high is not None:
        bars = {
            "type": "data",
            "symmetric": False,
            "array": [high - value],
            "arrayminus": [value - low],
        }
        star["error_y"] = bars | {"color": "--vermilion"}
    return star


def _merit_text(merit: str, value: float) -> str:
    return format_seconds(value) if merit == "time" else f"{format_count(value)} steps"


def _band(
    x: Sequence[float], low: Sequence[float], high: Sequence[float], name: str
) -> list[dict[str, Any]]:
    outline = {
        "x": [*x, *reversed(x)],
        "y": [*high, *reversed(low)],
        "fill": "toself",
        "fillcolor": "--band",
    }
    return [
        {
            "type": "scatter",
            "mode": "lines",
            "line": {"width": 0},
            "hoverinfo": "skip",
            "name": name,
            **outline,
        }
    ]


def _line(
    x: Sequence[float],
    y: Sequence[float | None],
    name: str,
    hover: Sequence[str] | None = None,
    color: str = "--blue",
    dash: str = "solid",
    width: float = 2.0,
) -> dict[str, Any]:
    """Return a line; without ``hover``, texts for each point, it shows none."""
    texts = (
        {"hoverinfo": "skip"}
        if hover is None
        else {"hoverinfo": "text", "text": list(map(label, hover))}
    )
    line = {"color": color, "dash": dash, "width": width}
    return {
        "type": "scatter",
        "mode": "lines",
        "name": name,
        "x": list(x),
        "y": list(y),
        "line": line,
        **texts,
    }


def _dots(
    trials: Sequence[TrialResult],
    value: Callable[[TrialResult], float],
    name: str,
    color: str,
    symbol: str = "circle",
) -> dict[str, Any]:
    """Return trials as dots, each with what is known of it on hover."""
    return {
        "type": "scatter",
        "mode": "markers",
        "name": name,
        "x": [trial.batch_size for trial in trials],
        "y": [value(trial) for trial in trials],
        "marker": {"color": color, "symbol": symbol, "size": 7, "opacity": 0.8},
        "hoverinfo": "text",
        "text": ["<br>".join(map(label, _trial_lines(trial))) for trial in trials],
    }


def _trial_lines(trial: TrialResult) -> list[str]:
    """Return what is known of a trial, in lines."""
    others = [f"{name} {format_number(value)}" for name, value in trial.hyperparameters.items()]
    if trial.reached:
        steps = f"{format_count(trial.steps)} steps (missed at {format_count(trial.steps_low)})"
    else:
        steps = f"{trial.status}, after {format_count(trial.steps)} steps"
    lines = [
        part_text(trial),
        ", ".join(
            [f"B = {format_count(trial.batch_size)}", f"lr = {format_number(trial.lr)}", *others]
        ),
        steps,
        f"{format_seconds(trial.time_to_target)} to target"
        if trial.time_to_target is not None
        else "",
        f"{format_seconds(trial.seconds_per_step)} a step"
        if trial.seconds_per_step is not None
        else "",
    ]
    return [line for line in lines if line]


def part_text(trial: TrialResult) -> str:
    """Return a trial by its number, and the one that it runs again or continues."""
    again = "" if trial.replicate_of is None else f", {trial.replicate_of} again on a fresh seed"
    more = "" if trial.resumed_from is None else f", continues {trial.resumed_from}"
    return f"trial {trial.number}{again}{more}"


def _range(values: Iterable[float], pad: float) -> dict[str, Any]:
    """Return a logarithmic axis's range around the values, its pad in shares of their span; plotly's own of none."""
    logs = [math.log10(value) for value in values if value > 0.0]
    if not logs:
        return {}
    span = max(max(logs) - min(logs), 0.3)
    return {"range": [min(logs) - pad * span, max(logs) + pad * span]}


def learning_rates(study: StudyFolder) -> str:
    """Return the learning rates of all trials over batch size, the best one, and the scaling rules."""
    result, trials = study.result, study.files.trials
    if not trials:
        return ""
    traces: list[dict[str, Any]] = []
    curve, reference = result.curve, result.reference
    if curve is not None:
        sizes = curve.batch_size
        traces += _band(sizes, curve.lr_low, curve.lr_high, "90% band")
        hover = [
            f"B = {format_count(b)}: lr = {format_number(lr)}"
            for b, lr in zip(sizes, curve.lr, strict=True)
        ]
        traces.append(_line(sizes, curve.lr, "best learning rate", hover))
        for name, rule in RULES.items():
            if rule.exponent is None:
                continue
            rates = [rule.lr(size, reference.batch_size, reference.lr) for size in sizes]
            traces.append(_line(sizes, rates, f"rule {name}", None, "--faint", "dot", 1.2))
    kinds = (
        ("reached", "--blue", "circle"),
        ("stopped", "--grey", "triangle-up-open"),
        ("diverged", "--vermilion", "x"),
    )
    for status, color, symbol in kinds:
        some = [trial for trial in trials if trial.status == status]
        traces.append(_dots(some, lambda trial: trial.lr, status, color, symbol))
    reached = [trial.lr for trial in trials if trial.reached]
    layout = {
        "xaxis": axis("batch size B (examples)"),
        "yaxis": axis("learning rate", **_range(reached, 0.25)),
    }
    caption = ""
    if result.lr_exponent is not None and curve is not None:
        caption = "Dotted: the scaling rules through the workload's reference."
    return chart(traces, layout, caption)


def over_target(result: StudyResult) -> str:
    """Return the critical batch size at each target where it is known, or why it is not."""
    critical, goal, metric = result.critical_batch_size, result.target_value, result.metric
    rows = list(result.over_target)
    if not rows:
        note = result.over_target_note
        if critical is None or not note:
            return ""
        return paragraph(f"Only known at the study's own target: {note}.")
    if critical is not None:
        own = CriticalAtTarget(
            target=goal,
            passed=result.statuses["reached"],
            value=critical.value,
            low=critical.low,
            high=critical.high,
        )
        rows.append(own)
    # Of several rows at one target the last one counts.
    known = {row.target: row for row in rows}
    seen = list[CriticalAtTarget]()
    values, up, down = list[float](), list[float](), list[float]()
    hover = list[str]()
    for target in sorted(known):
        row = known[target]
        if row.value is None:
            continue
        seen.append(row)
        values.append(row.value)
        up.append(0.0 if row.high is None else abs(row.high - row.value))
        down.append(0.0 if row.low is None else abs(row.low - row.value))
        passed = f"passed by {plural(row.passed, 'trial')}"
        hover.append(f"{metric} {format_number(target)}: {critical_text(row)}; {passed}")
    trace = {
        "type": "scatter",
        "mode": "lines+markers",
        "x": [row.target for row in seen],
        "y": values,
        "error_y": {
            "type": "data",
            "symmetric": False,
            "array": up,
            "arrayminus": down,
            "color": "--purple",
        },
        "line": {"color": "--purple", "dash": "dot"},
        "marker": {
            "size": [12 if row.target == goal else 8 for row in seen],
            "color": "--purple",
        },
        "hoverinfo": "text",
        "text": list(map(label, hover)),
        "showlegend": False,
    }
    layout = {
        "xaxis": axis(f"target: {metric}", log=False),
        "yaxis": axis("critical batch size (examples)"),
    }
    found = result.over_target_growth
    caption = "From the same histories, at targets that enough trials passed; the large dot is this page's target."
    caption += f" It {growth_text(found, metric)}." if found is not None else ""
    return chart([trace], layout, caption, height=360)


def learning_curves(study: StudyFolder) -> str:
    """Return the metric over steps, a line a trial: a trial that was continued is the last of its parts."""
    continued = {trial.resumed_from for trial in study.files.trials if trial.status != "failed"}
    shown = [
        trial for trial in study.files.trials if trial.number not in continued and trial.history
    ]
    if not shown:
        return ""
    sizes = [math.log(trial.batch_size) for trial in shown]
    low, high = min(sizes), max(sizes)
    traces: list[dict[str, Any]] = []
    for trial, size in zip(shown, sizes, strict=True):
        history = _thinned([pair for pair in trial.history if pair[0] > 0])
        share = (size - low) / (high - low) if high > low else 0.5
        traces.append(
            {
                "type": "scatter",
                "mode": "lines",
                "x": [step for step, _ in history],
                "y": [value for _, value in history],
                "line": {"color": f"hsl({round(215 - 190 * share)}, 65%, 50%)", "width": 1.4},
                "opacity": 0.85 if trial.reached else 0.35,
                "hoverinfo": "x+y+text",
                "text": "<br>".join(map(label, _trial_lines(trial))),
                "showlegend": False,
            }
        )
    metric, goal = study.result.metric, study.result.target_value
    positive = all(value > 0 for trial in shown for _, value in trial.history if value is not None)
    # one that diverged, or its start, would leave the others no room
    near = [
        value
        for trial in shown
        if trial.status != "diverged"
        for _, value in trial.history[1:]
        if value is not None
    ]
    ends = _range(near, 0.05) if positive else {}
    layout: dict[str, Any] = {
        "xaxis": axis("optimizer steps"),
        "yaxis": axis(metric, log=positive, **ends),
    }
    if goal > 0 or not positive:
        line = {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": goal, "y1": goal}
        layout["shapes"] = [line | {"line": {"color": "--ink", "width": 1, "dash": "dash"}}]
    smallest, largest = (
        format_count(size([trial.batch_size for trial in shown])) for size in (min, max)
    )
    caption = f"Blue to red: batch size {smallest} to {largest}. Faint: did not reach the target (dashed line)."
    return chart(traces, layout, caption, height=460)


def _thinned(history: Sequence[tuple[int, float | None]]) -> list[tuple[int, float | None]]:
    """Return at most ``CURVE_POINTS`` of a history, evenly over log steps, its ends among them."""
    if len(history) <= CURVE_POINTS:
        return list(history)
    first, last = math.log(history[0][0]), math.log(history[-1][0])
    kept: dict[int, tuple[int, float | None]] = {}
    for pair in history:
        place = round((CURVE_POINTS - 1) * (math.log(pair[0]) - first) / (last - first))
        kept[place] = pair  # the last one there
    return [history[0], *(pair for pair in kept.values() if pair != history[0])]


def progress(study: StudyFolder) -> str:
    """Return the best time, or steps, so far over what the search has spent."""
    if not any(trial.reached for trial in study.files.trials):
        return ""
    in_seconds = any(trial.time_to_target is not None for trial in study.files.trials)
    spent, best, total = list[float](), list[float | None](), 0.0
    values = list[float | None]()
    for trial in study.files.trials:
        total += trial.train_seconds + trial.eval_seconds + trial.startup_seconds
        value = (
            trial.time_to_target if in_seconds else float(trial.steps) if trial.reached else None
        )
        first = trial.replicate_of is None and value is not None
        so_far = best[-1] if best else None
        best.append(value if first and (so_far is None or value < so_far) else so_far)  # type: ignore[operator]
        spent.append(total)
        values.append(value)
    pairs = [
        (trial, x, y)
        for trial, x, y in zip(study.files.trials, spent, values, strict=True)
        if y is not None
    ]
    traces = [
        _line(spent, best, "best run so far")
        | {"line": {"color": "--vermilion", "shape": "hv", "width": 2}}
    ]
    for again, name, symbol in (
        (False, "trial that reached the target", "circle"),
        (True, "on a fresh seed", "diamond-open"),
    ):
        some = [(trial, x, y) for trial, x, y in pairs if (trial.replicate_of is not None) == again]
        dots = _dots([trial for trial, _, _ in some], lambda trial: 0.0, name, "--blue", symbol)
        traces.append(dots | {"x": [x for _, x, _ in some], "y": [y for _, _, y in some]})
    title = "time to target (seconds)" if in_seconds else "steps to target"
    layout = {
        "xaxis": axis("seconds spent in trials", log=False, rangemode="tozero"),
        "yaxis": axis(title),
    }
    return chart(traces, layout, height=360)


def hardware(hardware: HardwareFile | None) -> str:
    """Return what the survey found; empty where there was none."""
    if hardware is None:
        return ""
    advice = "".join(f"<li>{text(line)}</li>" for line in hardware.derived.advice)
    facts = paragraph(f"{hardware.device} in {hardware.precision}")
    charts = [_step_times(hardware), _memory(hardware), _roofline(hardware)]
    return f'{facts}<ul>{advice}</ul><div class="pair">{"".join(charts)}</div>'


def _step_times(hardware: HardwareFile) -> str:
    timings = hardware.measured.timings
    if not timings:
        return ""
    sizes = [row.batch_size for row in timings]
    hover = [
        f"B = {format_count(row.batch_size)}: {format_seconds(row.seconds)}, "
        f"{format_number(row.batch_size / row.seconds)} examples a second"
        for row in timings
    ]
    bars = {"type": "data", "symmetric": False, "color": "--blue"}
    bars["array"] = [row.high - row.seconds for row in timings]
    bars["arrayminus"] = [row.seconds - row.low for row in timings]
    measured = _line(sizes, [row.seconds for row in timings], "measured, with quartiles", hover)
    traces = [measured | {"mode": "lines+markers", "error_y": bars}]
    if all(row.bare for row in timings):
        traces.append(
            _line(
                sizes,
                [row.bare for row in timings],
                "without the framework",
                None,
                "--grey",
                "dash",
            )
        )
    layout = {"xaxis": axis("batch size B (examples)"), "yaxis": axis("seconds per step, tau(B)")}
    return chart(traces, layout, height=380)


def _memory(hardware: HardwareFile) -> str:
    ceiling = hardware.ceiling
    mebi = 2.0**20
    sizes, taken, hover = list[int](), list[float](), list[str]()
    for probe in ceiling.probes:
        if not probe.peak_bytes:
            continue
        size, mebibytes = probe.batch_size, probe.peak_bytes / mebi
        sizes.append(size)
        taken.append(mebibytes)
        hover.append(f"B = {format_count(size)}: {format_count(mebibytes)} MiB, {probe.outcome}")
    if not sizes:
        return ""
    dots = _line(sizes, taken, "probes", hover)
    traces = [dots | {"mode": "markers", "marker": {"size": 9, "color": "--blue"}}]
    model, ends = ceiling.model, [ceiling.smallest, hardware.high]
    if model is not None:
        line = [(model.base + model.per_example * size) / mebi for size in ends]
        traces.append(_line(ends, line, "base + B x an example's"))
    if ceiling.at.limit is not None:
        limit = ceiling.at.limit / mebi
        traces.append(_line(ends, [limit, limit], "limit", None, "--vermilion", "dash"))
    layout = {"xaxis": axis("batch size B (examples)"), "yaxis": axis("memory (MiB)")}
    return chart(traces, layout, height=380)


def _roofline(hardware: HardwareFile) -> str:
    limits = hardware.limits
    if limits is None:
        return ""
    peak = limits.flops_per_second / 1e9
    ridge = limits.flops_per_second / limits.bytes_per_second
    at, reached, hover = list[float](), list[float](), list[str]()
    for row in hardware.derived.achieved:
        if not row.intensity:
            continue
        rate = row.share_of_peak * peak
        at.append(row.intensity)
        reached.append(rate)
        share = f"{row.share_of_peak:.1%} of the peak"
        hover.append(f"B = {format_count(row.batch_size)}: {format_number(rate)} GFLOP/s, {share}")
    if not at:
        return ""
    corners = sorted({min(ridge, *at) / 2.0, ridge, max(ridge, *at) * 2.0})
    roof = [min(peak, limits.bytes_per_second / 1e9 * x) for x in corners]
    steps = _line(at, reached, "whole step, measured", hover, "--purple")
    traces = [
        _line(corners, roof, "what the device can do", None, "--ink"),
        steps | {"mode": "lines+markers"},
    ]
    layout = {"xaxis": axis("FLOPs per byte moved"), "yaxis": axis("GFLOP/s")}
    return chart(traces, layout, height=380)
