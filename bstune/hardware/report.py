"""``bstune survey``: a survey as tables, advice, hardware.json and roofline.png; and the lines of it before a study."""

import functools
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from rich import box
from rich.console import Group
from rich.table import Table

from bstune.core.errors import HardwareError
from bstune.core.records import dump_json
from bstune.hardware import roofline
from bstune.hardware.known_devices import Prediction
from bstune.hardware.roofline import TENSOR_CORE_SOURCE, DeviceLimits, LayerCost, StepCost
from bstune.hardware.survey import Survey, compose_survey, probe_text, survey_of
from bstune.hardware.threads import threads_text
from bstune.report.drawing import (
    BLUE,
    GREY,
    INK,
    PAGE_DPI,
    PURPLE,
    VERMILION,
    figure_of,
    save_figure,
)
from bstune.report.notebook import image, printed_html
from bstune.system.console import format_count, format_number, format_seconds, plain_console
from bstune.system.failures import optional
from bstune.system.files import Identity, Output, check_writable, owned, write_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from bstune.report.picture import Picture

Array = NDArray[np.float64]
MAX_MISALIGNED = 8  # rows
MUCH_OVERHEAD = 0.2  # of a step
FIGURE_WIDTH, ROOF_HEIGHT, ROW_HEIGHT = 11.0, 3.6, 0.24  # inches
TITLE_WIDTH = 120  # letters
MAX_ROWS = 14  # of layers: those that take the most of the time allowed


def main(arguments: list[str]) -> None:
    """Survey the hardware for a workload, print what was found, and write it with its figure."""
    if {"--help", "-h"} & set(arguments):
        sys.stdout.write(
            "usage: bstune survey workload=NAME [OPTION=VALUE ...]\n\n"
            "Measures what the hardware allows for a workload, without a search.\n"
            "The options are those of bstune --help; hardware.* are the survey's own.\n"
        )
        return
    composed = compose_survey(arguments)
    options = composed.options
    console, missing = plain_console(), list[str]()
    output = Output(Path(options.output))
    check_writable(output.survey, f"output={options.output}")
    with owned(output, Identity.of(options.study, options.storage)):
        survey, cached = survey_of(
            options, composed.trained, lambda line: console.print(line, soft_wrap=True)
        )
        write_survey(survey, output, missing)
    console.print(survey_tables(survey))
    for line in missing:
        console.print(line, soft_wrap=True)
    if cached:
        console.print("kept from before; measure again with hardware.refresh=true")
    for path in (output.survey, output.roofline):
        if path.exists():
            console.print(f"written {path}", soft_wrap=True)


def survey_json(survey: Survey) -> str:
    """Return the survey as strict JSON, with what follows from it."""
    model, values = survey.step_time, asdict(survey)
    values["derived"] = {
        "step_time": model
        and {name: getattr(model, name) for name in ("overhead", "per_example", "residual")},
        "left_out_error": survey.left_out_error,
        "turning_batch_size": survey.turning_batch_size,
        "achieved": [asdict(row) for row in survey.achieved],
        "elsewhere": [asdict(row) for row in survey.elsewhere],
        "plateau": survey.plateau.batch_size,
        "bound": bound_text(survey),
        "advice": advice(survey),
    }
    return dump_json(values, indent=2) + "\n"


def write_survey(survey: Survey, output: Output, missing: list[str]) -> None:
    """Write ``hardware.json`` and, where the step's cost is known, ``roofline.png``, or a line why not."""
    write_text(output.survey, survey_json(survey))
    if survey.cost is not None and survey.limits is not None:
        paint = functools.partial(_paint, survey=survey, cost=survey.cost, limits=survey.limits)
        with optional("no figure of the roofline", missing):
            save_figure(paint, (FIGURE_WIDTH, 1.0), output.roofline)


def survey_figure(survey: Survey) -> "Picture":
    """Draw the roofline, of a page's resolution; HardwareError where it is not known."""
    if survey.cost is None or survey.limits is None:
        raise HardwareError("\n".join(["the roofline is not known", *survey.notes]))
    paint = functools.partial(_paint, survey=survey, cost=survey.cost, limits=survey.limits)
    return figure_of(paint, (FIGURE_WIDTH, 1.0), PAGE_DPI)


def survey_html(survey: Survey) -> str:
    """Show what the command prints, and the roofline where it is known."""
    shown = printed_html(survey_tables(survey))
    if survey.cost is None or survey.limits is None:
        return shown
    return shown + image(survey_figure(survey), f"roofline of {survey.workload}")


def headline(survey: Survey, cached: bool) -> tuple[str, ...]:
    """Return the lines of a survey in a study's plan."""
    sizes = [format_count(size) for size, _ in survey.pairs]
    taken = "kept from before" if cached else f"measured in {format_seconds(survey.seconds)}"
    times = f"tau(B) at {len(sizes)} batch sizes from {sizes[0]} to {sizes[-1]} ({taken})"
    threads = None if survey.threads is None else threads_text(survey.threads)
    more = [f"threads: {threads}"] if threads else []
    return (f"{_ceiling_text(survey)}; {times}", *more, *survey.notes)


def survey_tables(survey: Survey) -> Group:
    """Return all that a survey found, for 80 columns."""
    facts = Table.grid(padding=(0, 2))
    facts.add_column(no_wrap=True, style="bold")
    facts.add_column(overflow="fold")
    limits = "" if survey.limits is None else f"; {_limits_text(survey.limits)}"
    facts.add_row("device", f"{survey.device} in {survey.precision}{limits}")
    facts.add_row("memory", _ceiling_text(survey))
    facts.add_row(
        "probes",
        f"{len(survey.ceiling.probes)}: " + "; ".join(map(probe_text, survey.ceiling.probes)),
    )
    facts.add_row("step time", _model_text(survey))
    bound = bound_text(survey)
    if bound is not None:
        facts.add_row("roofline", bound)
    for note in survey.notes:
        facts.add_row("note", note)
    for line in advice(survey):
        facts.add_row("advice", line)
    facts.add_row("took", format_seconds(survey.seconds))
    tables = [_timings_table(survey), *([_elsewhere_table(survey)] if survey.elsewhere else [])]
    return Group(*tables, facts)


def advice(survey: Survey) -> list[str]:
    """Return what follows for the choice of a batch size, each with its number."""
    lines = []
    plateau, ceiling = survey.plateau, survey.ceiling.batch_size
    most = max(timing.throughput for timing in survey.measured.timings)
    if len(survey.pairs) < 2:
        lines.append("too little was timed to say more: raise hardware.seconds")
    elif plateau.batch_size < ceiling:
        lines.append(
            f"from batch size {format_count(plateau.batch_size)} on, a larger one hardly gives more examples a second "
            f"({format_number(plateau.throughput)} there, {format_number(most)} at most): beyond it only "
            "fewer steps can pay"
        )
    else:
        lines.append(
            f"examples a second still rise at the largest batch size, {format_count(ceiling)}"
        )
    power, tau = 2 ** (ceiling.bit_length() - 1), survey.step_time
    if survey.ceiling.above is not None and power != ceiling:
        more = (
            ""
            if tau is None
            else f" ({ceiling / tau(ceiling) * tau(power) / power - 1.0:+.1%} examples a second)"
        )
        below = format_count(power)
        lines.append(
            f"{format_count(ceiling)} fits: no need to fall back to {below}, the power of two below it{more}"
        )
    elif survey.ceiling.above is None and ceiling == survey.high:
        lines.append(
            f"the range ends at {format_count(ceiling)}, not the memory: see search.batch_size.high"
        )
    heavy = [
        timing
        for timing in survey.measured.timings
        if (timing.overhead_share or 0.0) > MUCH_OVERHEAD
    ]
    if heavy:
        lines.append(
            f"the framework takes {heavy[0].overhead_share:.0%} of a step at batch size "
            f"{format_count(heavy[0].batch_size)}, over {MUCH_OVERHEAD:.0%} up to {format_count(heavy[-1].batch_size)}"
        )
    dtype = None if survey.limits is None else survey.limits.dtype
    if survey.misaligned:
        lines.append(
            f"tensor cores take {dtype} in multiples of {survey.multiple}, 16 bytes ({TENSOR_CORE_SOURCE})"
        )
    elif dtype == "fp32" and survey.device_type == "cuda":
        lines.append(
            "fp32 does not run on tensor cores, so no multiple is asked of layers or batch; in tf32 it is 4"
        )
    for row in survey.misaligned[:MAX_MISALIGNED]:
        gain = ""
        if row.predicted_gain is not None:
            gain = f": predicted {row.predicted_gain:.2f} times its throughput"
        lines.append(
            f"{row.name} ({row.kind}): pad {row.dimension} from {row.size} to {row.padded}{gain}"
        )
    if survey.bound_by_neither:
        last = format_count(survey.bound_by_neither[-1].batch_size)
        how = "fewer and larger operations do"
        if survey.device_type == "cuda":
            how += " (compile=default, protocol.fast=graph)"
        lines.append(f"up to batch size {last} a faster device gains nothing, {how}")
    return lines


def _ceiling_text(survey: Survey) -> str:
    found = survey.ceiling
    limit, law = f"{found.at.limit / 2**20:,.0f} MiB", ""
    if found.model is not None:
        per_example = format_number(found.model.per_example / 2**10)
        law = f" ({found.model.base / 2**20:,.0f} MiB and {per_example} KiB an example)"
    if found.predicted is not None:
        probed, predicted = format_count(found.at.batch_size), format_count(found.predicted)
        return f"batch size {probed} fits in {limit}{law}, {predicted} by prediction"
    if found.above is None:
        return f"batch size {format_count(found.batch_size)}, the largest that was tried, fits in {limit}{law}"
    exact = "exactly" if found.precision == 1 else f"to {format_count(found.precision)} examples"
    beyond = format_count(found.above.batch_size)
    like, noise = found.spread_examples, ""
    if found.spread is not None and like is not None and like > found.precision:
        noise = f"; like processes differ by {found.spread:.1%}, or {format_count(like)} examples"
    return f"ceiling {format_count(found.batch_size)} {exact}: {beyond} does not fit in {limit}{law}{noise}"


def _limits_text(limits: DeviceLimits) -> str:
    flops, moved = (
        format_number(rate / 1e9) for rate in (limits.flops_per_second, limits.bytes_per_second)
    )
    ridge = format_number(limits.ridge)
    return f"measured ceilings {flops} GFLOP/s in {limits.dtype}, {moved} GB/s, ridge {ridge} FLOPs per byte"


def bound_text(survey: Survey) -> str | None:
    """Say in one sentence what bounds a step; None where its cost is not known.

    Where the measured steps take ten times what the roofline allows, neither arithmetic nor memory
    bounds them, whatever their shapes. Elsewhere it is what the shapes say.
    """
    if survey.cost is None or survey.limits is None:
        return None
    neither, turning = survey.bound_by_neither, survey.turning_batch_size
    if not neither:
        if turning is None:
            return "a step is memory-bound at any batch size"
        size = format_count(turning)
        return f"a step is memory-bound below batch size {size}, compute-bound from there on"
    last = neither[-1].batch_size
    share = max(row.share_of_roofline for row in neither)
    text = (
        f"a step is bound by neither arithmetic nor memory up to batch size {format_count(last)}: "
        f"they take {share:.1%} of it at most"
    )
    if len(neither) == len(survey.achieved):
        return text
    if turning is None:
        return f"{text}; beyond it is memory-bound"
    if turning <= last:
        return f"{text}; beyond it is compute-bound"
    size = format_count(turning)
    return f"{text}; beyond it is memory-bound, from batch size {size} on compute-bound"


def _model_text(survey: Survey) -> str:
    model, measured = survey.step_time, survey.measured
    if model is None:
        return "one batch size was measured: no model between them"
    text = (
        f"tau(B) = {format_seconds(model.overhead)} + {format_number(1e6 * model.per_example)} us B within "
        f"{model.residual:.1%} (median), joined through the measured sizes"
    )
    if survey.left_out_error is not None:
        text += f"; a size left out is predicted within {survey.left_out_error:.1%} (median)"
    if measured.left_out:
        text += f"; left out for time: {', '.join(map(format_count, measured.left_out))}"
    if measured.cut:
        text += f"; fewer repeats for time: {', '.join(map(format_count, measured.cut))}"
    return text


def _timings_table(survey: Survey) -> Table:
    """Return one row a batch size; spread is between the quartiles over the median, drift between repeats."""
    table = Table(
        title="seconds per step", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False
    )
    names = ["batch size", "step", "spread", "drift", "examples/s", "overhead", "roof", "peak"]
    for name in names if survey.achieved else names[:-2]:
        table.add_column(name, justify="right", no_wrap=True)
    shares = {row.batch_size: row for row in survey.achieved}
    for timing in survey.measured.timings:
        row = shares.get(timing.batch_size)
        table.add_row(
            format_count(timing.batch_size),
            format_seconds(timing.seconds),
            f"{(timing.high - timing.low) / timing.seconds:.0%}",
            f"{timing.drift:.0%}",
            format_number(timing.throughput),
            "-" if timing.overhead_share is None else f"{timing.overhead_share:.0%}",
            *(() if row is None else (f"{row.share_of_roofline:.0%}", f"{row.share_of_peak:.0%}")),
        )
    return table


def _elsewhere_table(survey: Survey) -> Table:
    """Return one row a known device: its ridge and the predicted turning batch size in each arithmetic."""
    title = "elsewhere, predicted: ridge, turning batch size"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    kinds = list(dict.fromkeys(row.dtype for row in survey.elsewhere))
    kinds.sort(key=list(roofline.DTYPES).index)
    for name in ("device", *kinds):
        table.add_column(name, justify="right" if name in kinds else "left", no_wrap=True)
    for device in dict.fromkeys(row.device for row in survey.elsewhere):
        rows = {row.dtype: row for row in survey.elsewhere if row.device == device}
        table.add_row(device, *(_turning_text(rows.get(kind)) for kind in kinds))
    return table


def _turning_text(row: Prediction | None) -> str:
    if row is None:
        return "-"
    turning = "never" if row.turning_batch_size is None else format_count(row.turning_batch_size)
    return f"{format_number(row.ridge, 3)}: {turning}"


def _paint(figure: "Figure", survey: Survey, cost: StepCost, limits: DeviceLimits) -> None:
    """Draw the roofline: attainable FLOP/s over FLOPs per byte, layers and step on it, measured steps below."""
    sizes = [size for size, _ in survey.pairs]
    largest = sizes[-1]
    seconds = {
        layer: roofline.layer_seconds(layer, limits, largest)
        for layer in cost.layers
        if layer.flops.at(largest) and layer.bytes.at(largest)
    }
    layers = sorted(seconds, key=lambda layer: -seconds[layer])[:MAX_ROWS]
    rows_height = ROW_HEIGHT * (len(layers) + 1)
    figure.set_size_inches(FIGURE_WIDTH, ROOF_HEIGHT + rows_height + 1.4)
    roof, ranges = figure.subplots(
        2, 1, sharex=True, gridspec_kw={"height_ratios": [ROOF_HEIGHT, rows_height]}
    )
    parts: list[LayerCost | StepCost] = [cost, *layers]
    points = np.array([[roofline.intensity(part, size) for size in sizes] for part in parts])
    _draw_roof(roof, limits, points, survey)
    # Each layer has its share of the time that the roofline allows the step.
    shares = [seconds[layer] / roofline.allowed_seconds(cost, limits, largest) for layer in layers]
    names = [
        f"{layer.name} ({layer.kind}), {share:.0%}"
        for layer, share in zip(layers, shares, strict=True)
    ]
    rest = f"whole step; layers without FLOPs or not listed take {max(0.0, 1.0 - sum(shares)):.0%}"
    _draw_ranges(ranges, limits, points, sizes, [rest, *names])
    for axes in (roof, ranges):
        axes.axvline(limits.ridge, color=GREY, linewidth=0.9, linestyle="--", zorder=1)
        axes.grid(color=INK, alpha=0.07, linewidth=0.6)
    bound = textwrap.fill(f"{survey.workload}: {bound_text(survey)}", TITLE_WIDTH)
    title = f"{bound}\n{survey.device}; {_limits_text(limits)}"
    figure.suptitle(title, fontsize=10.5, parse_math=False)
    figure.legend(
        *roof.get_legend_handles_labels(),
        loc="outside lower center",
        ncols=4,
        fontsize=8.5,
        frameon=False,
    )


def _draw_roof(axes: "Axes", limits: DeviceLimits, points: Array, survey: Survey) -> None:
    """Draw the roof, the layers and the whole step on it, and what was measured, its ends with their batch size."""
    peak = limits.flops_per_second / 1e9  # all in GFLOP/s
    known = points[points > 0.0]
    corners = np.array(
        [min(limits.ridge, *known) / 2.0, limits.ridge, max(limits.ridge, *known) * 2.0]
    )
    corner_rates, attainable = (
        np.minimum(peak, limits.bytes_per_second / 1e9 * x) for x in (corners, points)
    )
    measured = [row.share_of_peak * peak for row in survey.achieved]  # at the same batch sizes
    axes.set(
        xscale="log", yscale="log", xlim=(corners[0], corners[-1]), ylabel="attainable GFLOP/s"
    )
    axes.set_ylim(min(corner_rates[0] / 1.5, min(measured) / 2.5), peak * 2.5)  # room for labels
    axes.plot(corners, corner_rates, color=INK, linewidth=1.8, label="ceilings of the device")
    for x, y in zip(points[1:], attainable[1:], strict=True):
        axes.plot(x, y, "o", color=BLUE, markersize=4, alpha=0.5)
    axes.plot([], [], "o", color=BLUE, markersize=4, label="layers, where the roofline puts them")
    axes.text(
        limits.ridge,
        0.03,
        "  ridge",
        transform=axes.get_xaxis_transform(),
        color="#555555",
        fontsize=8.5,
    )
    step, roof = points[0], attainable[0]
    axes.plot(
        step,
        roof,
        "D",
        color=VERMILION,
        markersize=6.5,
        label="whole step, by the sum of its bytes",
    )
    label = "whole step, measured: share of peak"
    axes.plot(step, measured, "*-", color=PURPLE, markersize=10, linewidth=0.8, label=label)
    for at, side in ((0, "right"), (-1, "left")):
        row = survey.achieved[at]
        annotate = functools.partial(
            axes.annotate, textcoords="offset points", ha=side, fontsize=8.5
        )
        annotate(
            f"B = {row.batch_size:,}", (step[at], roof[at]), xytext=(0.0, 8.0), color=VERMILION
        )
        share = f"B = {row.batch_size:,}: {row.share_of_peak:.0%}"
        annotate(share, (step[at], measured[at]), xytext=(0.0, -9.0), va="top", color=PURPLE)


def _draw_ranges(
    axes: "Axes", limits: DeviceLimits, points: Array, sizes: Sequence[int], names: Sequence[str]
) -> None:
    """Draw one row for the step and for each layer: FLOPs per byte from the smallest to the largest batch size."""
    areas = np.linspace(14.0, 60.0, len(sizes))
    for row, values in enumerate(points):
        color = BLUE if row else VERMILION
        axes.plot(values, [row] * len(values), color=color, linewidth=1.2, alpha=0.6)
        axes.scatter(values, [row] * len(values), s=areas, color=color, zorder=3)
    axes.set_yticks(range(len(names)), names, fontsize=8.5)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.axvspan(limits.ridge, axes.get_xlim()[1], color="#e6f0f8", linewidth=0, zorder=-2)
    batches = ", ".join(f"{size:,}" for size in sizes)
    axes.set_xlabel(
        f"FLOPs per byte moved; dots grow with the batch size B = {batches}\n"
        "shaded: compute-bound by its shapes\n"
        f"behind each layer: its share of the time that the roofline allows a step at B = {sizes[-1]:,}"
    )
