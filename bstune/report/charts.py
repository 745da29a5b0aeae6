"""The charts of a study's page, each as HTML; empty where there is nothing to show."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from bstune.core.records import TrialResult
from bstune.core.scaling import linear, none, sqrt
from bstune.report.answer import (
    STATUS_WORDS,
    critical_text,
    expected_text,
    growth_text,
    interval_text,
)
from bstune.report.html import axis, chart, label, paragraph, text
from bstune.report.rows import WINNERS, Row
from bstune.report.study_folder import StudyFolder
from bstune.system.console import format_count, format_number, format_seconds, plural

CURVE_POINTS = 48  # of a learning curve, at most: the page is to stay small


def curves(study: StudyFolder) -> str:
    """Return steps and time to target over batch size."""
    summary = study.summary
    steps = _frontier(study, "steps", lambda trial: trial.steps, "steps to target S")
    seconds = ""
    if any(trial.seconds_per_step for trial in study.trials):
        seconds = _frontier(
            study,
            "time",
            lambda trial: trial.steps * (trial.seconds_per_step or math.nan),
            "time to target T (seconds)",
        )
    if not steps + seconds:
        return ""
    critical = summary["critical"]
    caption = (
        f"Shaded: the critical batch size, {critical_text(critical)}."
        if _has_interval(critical)
        else ""
    )
    stopped = "Hollow triangles are trials that were stopped: they need more steps than that."
    return f'<div class="pair">{steps}{seconds}</div>{paragraph(f"{caption} {stopped}".strip(), "faint")}'


def _frontier(
    study: StudyFolder, merit: str, value: Callable[[TrialResult], float], title: str
) -> str:
    """Return the chart of steps or of time to target over batch size."""
    summary, trials = study.summary, study.trials
    reached = [trial for trial in trials if trial.reached]
    stopped = [trial for trial in trials if trial.status == "censored" and trial.steps_low > 0]
    traces: list[dict[str, Any]] = []
    curve = summary["curve"]
    if curve and (merit == "steps" or is_timed(curve)):
        tau = curve["seconds_per_step"] if merit == "time" else [1.0] * len(curve["batch_size"])
        low, middle, high = (
            [a * b for a, b in zip(curve[name], tau, strict=True)]
            for name in ("low", "steps", "high")
        )
        traces += _band(curve["batch_size"], low, high, "90% band")
        hover = [
            f"B = {format_count(b)}: {_merit_text(merit, s)}"
            for b, s in zip(curve["batch_size"], middle, strict=True)
        ]
        traces.append(
            _line(
                curve["batch_size"],
                middle,
                "S*(B), all trials" if merit == "steps" else "S*(B) tau(B)",
                hover,
            )
        )
        if merit == "steps":
            fewest = min(b * s for b, s in zip(curve["batch_size"], middle, strict=True))
            ends = [curve["batch_size"][0], curve["batch_size"][-1]]
            name = "twice the batch, half the steps"
            traces.append(
                _line(ends, [fewest / size for size in ends], name, None, "--faint", "dash")
            )
    traces.append(_dots(reached, value, "reached the target", "--blue"))
    traces.append(_dots(stopped, value, "stopped before it", "--grey", "triangle-up-open"))
    if (winner := _star(summary, merit)) is not None:
        traces.append(winner)
    values, shown = (
        [value(trial) for trial in reached],
        _range([trial.batch_size for trial in reached], 0.12),
    )
    layout = {
        "xaxis": axis("batch size B (examples)", **shown),
        "yaxis": axis(title, **_range(values, 0.15)),
    }
    if _has_interval(summary["critical"]) and shown:
        layout |= _critical_marks(summary["critical"], [10.0**end for end in shown["range"]])
    return chart(traces, layout)


def is_timed(curve: Row | None) -> bool:
    """Return whether the curve has seconds per step."""
    return bool(curve) and None not in curve["seconds_per_step"]  # type: ignore[index]


def _has_interval(critical: Row | None) -> bool:
    """Return whether the trials set an end of the critical batch size's interval; one batch size says nothing of it."""
    if not critical or critical["smallest"] == critical["largest"]:
        return False
    return critical["b_crit_low"] is not None or critical["b_crit_high"] is not None


def _critical_marks(critical: Row, ends: Sequence[float]) -> dict[str, Any]:
    """Return the layout's line and span of the critical batch size, its name in place; an open one reaches the ends."""
    value, low, high = (critical[name] for name in ("b_crit", "b_crit_low", "b_crit_high"))
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
    name = (
        interval_text(critical, "b_crit").partition(": ")[2]
        if value is None
        else format_number(value, 2)
    )
    # plotly takes a shape's x as it is and an annotation's as its logarithm
    at = math.log10(min(max(value or low or high, ends[0]), ends[1]))
    note = {
        "x": at,
        "y": 1,
        "yref": "paper",
        "yanchor": "bottom",
        "showarrow": False,
        "font": {"color": "--purple"},
    }
    return {"shapes": shapes, "annotations": [note | {"text": f"B_crit {name}"}]}


def _star(summary: Row, merit: str) -> dict[str, Any] | None:
    """Return the winner by a merit with its range over fresh seeds."""
    key, criterion = next((key, one) for key, one in WINNERS.items() if one.merit == merit)
    winner = summary[key]
    if winner is None or winner[criterion.field] is None:
        return None
    value, fresh = winner[criterion.field], winner["confirmed"] or {}
    ends = [fresh.get(f"{merit}_{end}") for end in ("high", "low")]
    words = [
        criterion.heading,
        f"B = {format_count(winner['batch_size'])}, lr = {format_number(winner['lr'])}",
    ]
    star: dict[str, Any] = {
        "type": "scatter",
        "mode": "markers",
        "name": f"best by {merit}",
        "x": [winner["batch_size"]],
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
    if None not in ends:
        bars = {
            "type": "data",
            "symmetric": False,
            "array": [ends[0] - value],
            "arrayminus": [value - ends[1]],
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
        steps = f"{STATUS_WORDS[trial.status]}, after {format_count(trial.steps)} steps"
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
    summary, trials = study.summary, study.trials
    if not trials:
        return ""
    traces: list[dict[str, Any]] = []
    curve, reference = summary["curve"], summary["reference"]
    if curve and curve.get("lr"):
        sizes = curve["batch_size"]
        traces += _band(sizes, curve["lr_low"], curve["lr_high"], "90% band")
        hover = [
            f"B = {format_count(b)}: lr = {format_number(lr)}"
            for b, lr in zip(sizes, curve["lr"], strict=True)
        ]
        traces.append(_line(sizes, curve["lr"], "best learning rate", hover))
        for rule in (none, sqrt, linear) if reference else ():
            rates = [rule(size, reference["batch_size"], reference["lr"]) for size in sizes]
            traces.append(_line(sizes, rates, f"rule {rule.__name__}", None, "--faint", "dot", 1.2))
    kinds = (
        ("reached", "--blue", "circle"),
        ("censored", "--grey", "triangle-up-open"),
        ("diverged", "--vermilion", "x"),
    )
    for status, color, symbol in kinds:
        some = [trial for trial in trials if trial.status == status]
        traces.append(_dots(some, lambda trial: trial.lr, STATUS_WORDS[status], color, symbol))
    reached = [trial.lr for trial in trials if trial.reached]
    layout = {
        "xaxis": axis("batch size B (examples)"),
        "yaxis": axis("learning rate", **_range(reached, 0.25)),
    }
    exponent = summary["lr_exponent"]
    caption = (
        "" if exponent is None else "Dotted: the scaling rules through the workload's reference."
    )
    return chart(traces, layout, caption if reference and curve else "")


def over_target(summary: Row) -> str:
    """Return the critical batch size at each target where it is known, or why it is not."""
    critical, rows = summary["critical"], list(summary["over_target"])
    goal = summary.get("goal")
    if not rows:
        note = summary["over_target_note"]
        return (
            paragraph(f"Only known at the study's own target: {note}.") if critical and note else ""
        )
    if critical and goal is not None:
        rows.append({"target": goal, "passed": summary["statuses"].get("reached", 0), **critical})
    # Of several rows at one target the last one counts.
    known = {row["target"]: row for row in rows if row["b_crit"] is not None}
    seen = [known[value] for value in sorted(known)]
    values = [row["b_crit"] for row in seen]
    up, down = (
        [
            0.0 if row[f"b_crit_{end}"] is None else abs(row[f"b_crit_{end}"] - row["b_crit"])
            for row in seen
        ]
        for end in ("high", "low")
    )
    metric = str(summary.get("metric") or "target")
    hover = [
        f"{metric} {format_number(row['target'])}: {critical_text(row)}; passed by {plural(row['passed'], 'trial')}"
        for row in seen
    ]
    trace = {
        "type": "scatter",
        "mode": "lines+markers",
        "x": [row["target"] for row in seen],
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
            "size": [12 if row["target"] == goal else 8 for row in seen],
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
    found = summary["over_target_growth"]
    caption = "From the same histories, at targets that enough trials passed; the large dot is this page's target."
    caption += f" It {growth_text(found, metric)}." if found else ""
    return chart([trace], layout, caption, height=360)


def learning_curves(study: StudyFolder) -> str:
    """Return the metric over steps, a line a trial: a trial that was continued is the last of its parts."""
    continued = {trial.resumed_from for trial in study.trials if trial.status != "failed"}
    shown = [trial for trial in study.trials if trial.number not in continued and trial.history]
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
    metric, goal = str(study.summary.get("metric") or "metric"), study.summary.get("goal")
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
    if goal is not None and (goal > 0 or not positive):
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
    if not any(trial.reached for trial in study.trials):
        return ""
    in_seconds = any(trial.time_to_target is not None for trial in study.trials)
    spent, best, total = list[float](), list[float | None](), 0.0
    values = list[float | None]()
    for trial in study.trials:
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
        for trial, x, y in zip(study.trials, spent, values, strict=True)
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


def hardware(hardware: Mapping[str, Any] | None) -> str:
    """Return what the survey found; empty where there was none."""
    if hardware is None:
        return ""
    derived = hardware.get("derived") or {}
    advice = "".join(f"<li>{text(line)}</li>" for line in derived.get("advice") or ())
    facts = paragraph(f"{hardware.get('device', '?')} in {hardware.get('precision', '?')}")
    charts = [_step_times(hardware), _memory(hardware), _roofline(hardware)]
    return f'{facts}<ul>{advice}</ul><div class="pair">{"".join(charts)}</div>'


def _step_times(hardware: Mapping[str, Any]) -> str:
    timings = (hardware.get("measured") or {}).get("timings") or []
    if not timings:
        return ""
    sizes = [row["batch_size"] for row in timings]
    hover = [
        f"B = {format_count(row['batch_size'])}: {format_seconds(row['seconds'])}, "
        f"{format_number(row['batch_size'] / row['seconds'])} examples a second"
        for row in timings
    ]
    bars = {"type": "data", "symmetric": False, "color": "--blue"}
    bars["array"] = [row["high"] - row["seconds"] for row in timings]
    bars["arrayminus"] = [row["seconds"] - row["low"] for row in timings]
    measured = _line(sizes, [row["seconds"] for row in timings], "measured, with quartiles", hover)
    traces = [measured | {"mode": "lines+markers", "error_y": bars}]
    if all(row.get("bare") for row in timings):
        traces.append(
            _line(
                sizes,
                [row["bare"] for row in timings],
                "without the framework",
                None,
                "--grey",
                "dash",
            )
        )
    layout = {"xaxis": axis("batch size B (examples)"), "yaxis": axis("seconds per step, tau(B)")}
    return chart(traces, layout, height=380)


def _memory(hardware: Mapping[str, Any]) -> str:
    ceiling = hardware.get("ceiling") or {}
    probes = [one for one in ceiling.get("probes") or () if one.get("peak_bytes")]
    if not probes:
        return ""
    mebi = 2.0**20
    hover = [
        f"B = {format_count(one['batch_size'])}: {format_count(one['peak_bytes'] / mebi)} MiB, {one['outcome']}"
        for one in probes
    ]
    dots = _line(
        [one["batch_size"] for one in probes],
        [one["peak_bytes"] / mebi for one in probes],
        "probes",
        hover,
    )
    traces = [dots | {"mode": "markers", "marker": {"size": 9, "color": "--blue"}}]
    model, ends = ceiling.get("model"), [ceiling["smallest"], hardware["high"]]
    if model:
        line = [(model["base"] + model["per_example"] * size) / mebi for size in ends]
        traces.append(_line(ends, line, "base + B x an example's"))
    limit = ceiling["at"]["limit"] / mebi
    traces.append(_line(ends, [limit, limit], "limit", None, "--vermilion", "dash"))
    layout = {"xaxis": axis("batch size B (examples)"), "yaxis": axis("memory (MiB)")}
    return chart(traces, layout, height=380)


def _roofline(hardware: Mapping[str, Any]) -> str:
    limits = hardware.get("limits")
    rows = [
        row for row in (hardware.get("derived") or {}).get("achieved") or () if row.get("intensity")
    ]
    if not limits or not rows:
        return ""
    peak, ridge = (
        limits["flops_per_second"] / 1e9,
        limits["flops_per_second"] / limits["bytes_per_second"],
    )
    at = [row["intensity"] for row in rows]
    corners = sorted({min(ridge, *at) / 2.0, ridge, max(ridge, *at) * 2.0})
    roof = [min(peak, limits["bytes_per_second"] / 1e9 * x) for x in corners]
    reached = [row["share_of_peak"] * peak for row in rows]
    hover = [
        f"B = {format_count(row['batch_size'])}: {format_number(rate)} GFLOP/s, {row['share_of_peak']:.1%} of the peak"
        for row, rate in zip(rows, reached, strict=True)
    ]
    steps = _line(at, reached, "whole step, measured", hover, "--purple")
    traces = [
        _line(corners, roof, "what the device can do", None, "--ink"),
        steps | {"mode": "lines+markers"},
    ]
    layout = {"xaxis": axis("FLOPs per byte moved"), "yaxis": axis("GFLOP/s")}
    return chart(traces, layout, height=380)
