"""``bstune survey``: a survey as tables, advice, hardware.json and roofline.png.

And the lines of it that stand before a study.
"""

import functools
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
from bstune.hardware.survey import Survey, probe_text
from bstune.hardware.survey_cache import compose_survey, survey_of
from bstune.hardware.threads import threads_text
from bstune.hardware.timing import StepTiming
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
# So many dimensions of layers does the advice name.
MAX_MISALIGNED = 8
# The advice names batch sizes at which the framework takes more than this share of a step.
MUCH_OVERHEAD = 0.2
# Inches of the roofline's figure: its width, and the heights of the roof, of a layer's row below
# it, and of the title and the legend.
ROOFLINE_WIDTH = 11.0
ROOF_HEIGHT = 3.6
LAYER_HEIGHT = 0.24
TITLE_AND_LEGEND_HEIGHT = 1.4
# The figure is begun at this size: its height follows from the number of layers, which is known
# only when they are drawn.
ROOFLINE_INCHES = (ROOFLINE_WIDTH, 1.0)
# Letters of a line of the figure's title.
ROOFLINE_TITLE_WIDTH = 120
# So many layers are drawn: those to which the roofline allows the most time.
MAX_LAYERS = 14


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
    console = plain_console()
    missing_figures = list[str]()
    output = Output(Path(options.output))
    # A folder that cannot be written to is refused before minutes of measuring.
    check_writable(output.survey, f"output={options.output}")

    def report(line: str) -> None:
        console.print(line, soft_wrap=True)

    # A folder that has another study's results is refused, and left as it is.
    with owned(output, Identity.of(options.study, options.storage)):
        survey, cached = survey_of(options, composed.trained_recipe, report)
        write_survey(survey, output, missing_figures)
    console.print(survey_tables(survey))
    for line in missing_figures:
        report(line)
    if cached:
        console.print("kept from before; measure again with hardware.refresh=true")
    for path in (output.survey, output.roofline):
        if path.exists():
            report(f"written {path}")


def survey_json(survey: Survey) -> str:
    """Write the survey as strict JSON: its fields, and under ``derived`` what follows from them."""
    model = survey.step_time
    step_time: dict[str, float] | None = None
    if model is not None:
        step_time = {
            "overhead": model.overhead,
            "per_example": model.per_example,
            "residual": model.residual,
        }
    values = asdict(survey)
    values["derived"] = {
        "step_time": step_time,
        "left_out_error": survey.left_out_error,
        "turning_batch_size": survey.turning_batch_size,
        "achieved": [asdict(row) for row in survey.achieved],
        "elsewhere": [asdict(row) for row in survey.elsewhere],
        "plateau": survey.plateau.batch_size,
        "bound": bound_text(survey),
        "advice": advice(survey),
    }
    return dump_json(values, indent=2) + "\n"


def write_survey(survey: Survey, output: Output, missing_figures: list[str]) -> None:
    """Write ``hardware.json`` and, where the step's cost is known, ``roofline.png``.

    ``missing_figures`` gets a line if the figure cannot be drawn.
    """
    write_text(output.survey, survey_json(survey))
    if survey.cost is not None and survey.limits is not None:
        paint = functools.partial(_paint, survey=survey, cost=survey.cost, limits=survey.limits)
        with optional("no figure of the roofline", missing_figures):
            save_figure(paint, ROOFLINE_INCHES, output.roofline)


def survey_figure(survey: Survey) -> "Picture":
    """Draw the roofline as a picture with a page's resolution. HardwareError if it is not known."""
    # The survey's notes say why it is not known.
    if survey.cost is None or survey.limits is None:
        raise HardwareError("\n".join(["the roofline is not known", *survey.notes]))
    paint = functools.partial(_paint, survey=survey, cost=survey.cost, limits=survey.limits)
    return figure_of(paint, ROOFLINE_INCHES, PAGE_DPI)


def survey_html(survey: Survey) -> str:
    """Give the HTML of the tables that the command prints, and of the roofline if it is known."""
    tables_html = printed_html(survey_tables(survey))
    if survey.cost is None or survey.limits is None:
        return tables_html
    return tables_html + image(survey_figure(survey), f"roofline of {survey.workload}")


def headline(survey: Survey, cached: bool) -> tuple[str, ...]:
    """Give the lines on a survey in a study's plan. ``cached`` says that it was measured before."""
    sizes = [format_count(size) for size, _ in survey.pairs]
    origin = f"measured in {format_seconds(survey.seconds)}"
    if cached:
        origin = "kept from before"
    times = f"tau(B) at {len(sizes)} batch sizes from {sizes[0]} to {sizes[-1]} ({origin})"
    lines = [f"{_ceiling_text(survey)}; {times}"]
    if survey.threads is not None:
        threads = threads_text(survey.threads)
        if threads:
            lines.append(f"threads: {threads}")
    return (*lines, *survey.notes)


def survey_tables(survey: Survey) -> Group:
    """Give the tables of all that a survey found, for a console of 80 columns.

    The first has the steps that were timed. Two on other devices follow, where their makers'
    figures allow a prediction. The last has a line for each other fact.
    """
    facts = Table.grid(padding=(0, 2))
    facts.add_column(no_wrap=True, style="bold")
    facts.add_column(overflow="fold")
    device = f"{survey.device} in {survey.precision}"
    if survey.limits is not None:
        device += f"; {_limits_text(survey.limits)}"
    facts.add_row("device", device)
    facts.add_row("memory", _ceiling_text(survey))
    probes = survey.ceiling.probes
    facts.add_row("probes", f"{len(probes)}: {'; '.join(map(probe_text, probes))}")
    facts.add_row("step time", _model_text(survey))
    bound = bound_text(survey)
    if bound is not None:
        facts.add_row("roofline", bound)
    for note in survey.notes:
        facts.add_row("note", note)
    for line in advice(survey):
        facts.add_row("advice", line)
    facts.add_row("took", format_seconds(survey.seconds))
    tables = [_timings_table(survey)]
    if survey.elsewhere:
        tables.append(_elsewhere_table(survey, "ridge, turning batch size", _turning_text))
        # The largest batch size that was timed, and the seconds of its step on this device.
        largest, seconds = survey.pairs[-1]
        tables.append(
            _elsewhere_table(
                survey,
                f"least time, B = {format_count(largest)} (here {format_seconds(seconds)})",
                lambda row: format_seconds(row.least_seconds),
            )
        )
    return Group(*tables, facts)


def advice(survey: Survey) -> list[str]:
    """Give sentences on what follows for the choice of a batch size, each with its number."""
    return [
        *_throughput_advice(survey),
        *_ceiling_advice(survey),
        *_overhead_advice(survey),
        *_tensor_core_advice(survey),
        *_bound_advice(survey),
    ]


def _throughput_advice(survey: Survey) -> Iterator[str]:
    """Say from which batch size on a larger one gives hardly more examples a second."""
    plateau = survey.plateau
    ceiling = survey.ceiling.batch_size
    if len(survey.pairs) < 2:
        yield "too little was timed to say more: raise hardware.seconds"
    elif plateau.batch_size < ceiling:
        size = format_count(plateau.batch_size)
        at_plateau = format_number(plateau.throughput)
        most = format_number(max(timing.throughput for timing in survey.measured.timings))
        yield (
            f"from batch size {size} on, a larger one hardly gives more examples a second "
            f"({at_plateau} there, {most} at most): beyond it only fewer steps can pay"
        )
    else:
        yield f"examples a second still rise at the largest batch size, {format_count(ceiling)}"


def _ceiling_advice(survey: Survey) -> Iterator[str]:
    """Say that a batch size above a power of two fits, or that the range ends before the memory."""
    ceiling = survey.ceiling.batch_size
    power = 2 ** (ceiling.bit_length() - 1)
    tau = survey.step_time
    # Who halves a batch size until it fits ends at a power of two: what that costs is told.
    if survey.ceiling.above is not None and power != ceiling:
        more = ""
        if tau is not None:
            gain = ceiling / tau(ceiling) * tau(power) / power - 1.0
            more = f" ({gain:+.1%} examples a second)"
        yield (
            f"{format_count(ceiling)} fits: no need to fall back to {format_count(power)}, the "
            f"power of two below it{more}"
        )
    elif survey.ceiling.above is None and ceiling == survey.high:
        end = format_count(ceiling)
        yield f"the range ends at {end}, not the memory: see search.batch_size.high"


def _overhead_advice(survey: Survey) -> Iterator[str]:
    """Say at which batch sizes the framework takes much of a step."""
    heavy = list[StepTiming]()
    for timing in survey.measured.timings:
        if timing.overhead_share is not None and timing.overhead_share > MUCH_OVERHEAD:
            heavy.append(timing)
    if not heavy:
        return
    smallest = heavy[0]
    largest = format_count(heavy[-1].batch_size)
    yield (
        f"the framework takes {smallest.overhead_share:.0%} of a step at batch size "
        f"{format_count(smallest.batch_size)}, over {MUCH_OVERHEAD:.0%} up to {largest}"
    )


def _tensor_core_advice(survey: Survey) -> Iterator[str]:
    """Say which dimensions to pad for tensor cores, or that no multiple is asked for."""
    dtype: str | None = None
    if survey.limits is not None:
        dtype = survey.limits.dtype
    if survey.misaligned:
        multiple = f"multiples of {survey.multiple}, 16 bytes"
        yield f"tensor cores take {dtype} in {multiple} ({TENSOR_CORE_SOURCE})"
    elif dtype == "fp32" and survey.device_type == "cuda":
        yield (
            "fp32 does not run on tensor cores, so no multiple is asked of layers or batch; in "
            "tf32 it is 4"
        )
    for row in survey.misaligned[:MAX_MISALIGNED]:
        gain = ""
        if row.predicted_gain is not None:
            gain = f": predicted {row.predicted_gain:.2f} times its throughput"
        yield f"{row.name} ({row.kind}): pad {row.dimension} from {row.size} to {row.padded}{gain}"


def _bound_advice(survey: Survey) -> Iterator[str]:
    """Say up to which batch size a faster device would gain nothing."""
    if not survey.bound_by_neither:
        return
    size = format_count(survey.bound_by_neither[-1].batch_size)
    how = "fewer and larger operations do"
    if survey.device_type == "cuda":
        how += " (compile=default, protocol.fast=graph)"
    yield f"up to batch size {size} a faster device gains nothing, {how}"


def _ceiling_text(survey: Survey) -> str:
    """Say which batch size fits, in how much memory, and how exactly that is known."""
    ceiling = survey.ceiling
    memory = f"{ceiling.at.limit / 2**20:,.0f} MiB"
    if ceiling.model is not None:
        base = f"{ceiling.model.base / 2**20:,.0f} MiB"
        per_example = f"{format_number(ceiling.model.per_example / 2**10)} KiB"
        memory += f" ({base} and {per_example} an example)"
    size = format_count(ceiling.batch_size)
    # A ceiling that no probe has shown says so.
    if ceiling.predicted is not None:
        probed = format_count(ceiling.at.batch_size)
        predicted = format_count(ceiling.predicted)
        return f"batch size {probed} fits in {memory}, {predicted} by prediction"
    if ceiling.above is None:
        return f"batch size {size}, the largest that was tried, fits in {memory}"
    exact = "exactly"
    if ceiling.precision != 1:
        exact = f"to {format_count(ceiling.precision)} examples"
    beyond = format_count(ceiling.above.batch_size)
    text = f"ceiling {size} {exact}: {beyond} does not fit in {memory}"
    spread_examples = ceiling.spread_examples
    if ceiling.spread is None or spread_examples is None:
        return text
    # The spread between processes matters where it is more than the ceiling's own precision.
    if spread_examples > ceiling.precision:
        examples = f"{format_count(spread_examples)} examples"
        text += f"; like processes differ by {ceiling.spread:.1%}, or {examples}"
    return text


def _limits_text(limits: DeviceLimits) -> str:
    """Write the device's measured ceilings and their ridge."""
    flops = f"{format_number(limits.flops_per_second / 1e9)} GFLOP/s in {limits.dtype}"
    bandwidth = f"{format_number(limits.bytes_per_second / 1e9)} GB/s"
    ridge = f"{format_number(limits.ridge)} FLOPs per byte"
    return f"measured ceilings {flops}, {bandwidth}, ridge {ridge}"


def bound_text(survey: Survey) -> str | None:
    """Say in one sentence what bounds a step; None where its cost is not known.

    If the measured steps take ten times the seconds that the roofline allows, neither arithmetic
    nor memory bounds them. If not, the shapes of the layers say whether arithmetic or memory does.
    """
    if survey.cost is None or survey.limits is None:
        return None
    # The measured batch sizes, from the smallest on, at which neither bounds the step.
    bound_by_neither = survey.bound_by_neither
    # From this batch size on, a step is compute-bound by its shapes; None: it never is.
    turning = survey.turning_batch_size
    if not bound_by_neither:
        if turning is None:
            return "a step is memory-bound at any batch size"
        size = format_count(turning)
        return f"a step is memory-bound below batch size {size}, compute-bound from there on"
    largest = bound_by_neither[-1].batch_size
    # The seconds that arithmetic and memory need, over those that the step was measured to take.
    share = max(row.share_of_roofline for row in bound_by_neither)
    text = (
        "a step is bound by neither arithmetic nor memory up to batch size "
        f"{format_count(largest)}: they take {share:.1%} of it at most"
    )
    # No larger batch size was measured.
    if len(bound_by_neither) == len(survey.achieved):
        return text
    if turning is None:
        return f"{text}; beyond it is memory-bound"
    if turning <= largest:
        return f"{text}; beyond it is compute-bound"
    size = format_count(turning)
    return f"{text}; beyond it is memory-bound, from batch size {size} on compute-bound"


def _model_text(survey: Survey) -> str:
    """Write tau(B), the seconds of a step, with its error, and what was not timed for lack of time.

    Batch sizes may be left out, or have fewer repeats.
    """
    model = survey.step_time
    measured = survey.measured
    if model is None:
        return "one batch size was measured: no model between them"
    overhead = format_seconds(model.overhead)
    microseconds = format_number(1e6 * model.per_example)
    text = (
        f"tau(B) = {overhead} + {microseconds} us B within {model.residual:.1%} (median), joined "
        "through the measured sizes"
    )
    if survey.left_out_error is not None:
        text += f"; a size left out is predicted within {survey.left_out_error:.1%} (median)"
    if measured.left_out:
        text += f"; left out for time: {', '.join(map(format_count, measured.left_out))}"
    if measured.cut:
        text += f"; fewer repeats for time: {', '.join(map(format_count, measured.cut))}"
    return text


def _timings_table(survey: Survey) -> Table:
    """Give the table of timings, a row for each batch size.

    Spread is the distance of the quartiles over the median; drift is the largest visit over the
    smallest, less 1. Roof and peak are how near the step came to the roofline's least seconds and
    to the device's FLOP/s.
    """
    table = Table(
        title="seconds per step", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False
    )
    names = ["batch size", "step", "spread", "drift", "examples/s", "overhead"]
    if survey.achieved:
        names += ["roof", "peak"]
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    shares = {row.batch_size: row for row in survey.achieved}
    for timing in survey.measured.timings:
        overhead = "-"
        if timing.overhead_share is not None:
            overhead = f"{timing.overhead_share:.0%}"
        cells = [
            format_count(timing.batch_size),
            format_seconds(timing.seconds),
            f"{(timing.high - timing.low) / timing.seconds:.0%}",
            f"{timing.drift:.0%}",
            format_number(timing.throughput),
            overhead,
        ]
        row = shares.get(timing.batch_size)
        if row is not None:
            cells += [f"{row.share_of_roofline:.0%}", f"{row.share_of_peak:.0%}"]
        table.add_row(*cells)
    return table


def _elsewhere_table(survey: Survey, title: str, text_of: Callable[[Prediction], str]) -> Table:
    """Give a table of predictions: a row for each known device, a column for each arithmetic.

    ``text_of`` writes a cell.
    """
    table = Table(
        title=f"elsewhere, predicted: {title}",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    kinds = list(dict.fromkeys(row.dtype for row in survey.elsewhere))
    # From the widest numbers to the narrowest, whatever the devices' own order.
    kinds.sort(key=list(roofline.DTYPES).index)
    table.add_column("device", justify="left", no_wrap=True)
    for kind in kinds:
        table.add_column(kind, justify="right", no_wrap=True)
    for device in dict.fromkeys(row.device for row in survey.elsewhere):
        texts = dict.fromkeys(kinds, "-")
        for row in survey.elsewhere:
            if row.device == device:
                texts[row.dtype] = text_of(row)
        table.add_row(device, *texts.values())
    return table


def _turning_text(row: Prediction) -> str:
    """Write a device's ridge, and the batch size from which on the step is compute-bound there."""
    turning = "never"
    if row.turning_batch_size is not None:
        turning = format_count(row.turning_batch_size)
    return f"{format_number(row.ridge, 3)}: {turning}"


def _paint(figure: "Figure", survey: Survey, cost: StepCost, limits: DeviceLimits) -> None:
    """Draw the roofline: attainable FLOP/s over FLOPs per byte, layers, step and measured steps.

    Below it stand the layers, each with its FLOPs per byte from the smallest to the largest batch
    size.
    """
    sizes = [size for size, _ in survey.pairs]
    largest = sizes[-1]
    seconds = dict[LayerCost, float]()
    for layer in cost.layers:
        # Without FLOPs, or bytes, a layer has no place on logarithmic axes.
        if layer.flops.at(largest) and layer.bytes.at(largest):
            seconds[layer] = roofline.layer_seconds(layer, limits, largest)
    layers = sorted(seconds, key=lambda layer: -seconds[layer])[:MAX_LAYERS]
    rows_height = LAYER_HEIGHT * (len(layers) + 1)
    figure_height = ROOF_HEIGHT + rows_height + TITLE_AND_LEGEND_HEIGHT
    figure.set_size_inches(ROOFLINE_WIDTH, figure_height)
    roof, ranges = figure.subplots(
        2, 1, sharex=True, gridspec_kw={"height_ratios": [ROOF_HEIGHT, rows_height]}
    )
    parts: list[LayerCost | StepCost] = [cost, *layers]
    # FLOPs per byte of each part at each batch size.
    intensities = np.empty((len(parts), len(sizes)))
    for i, part in enumerate(parts):
        intensities[i] = [roofline.intensity(part, size) for size in sizes]
    _draw_roof(roof, limits, intensities, survey)
    # Each layer has its share of the time that the roofline allows the step.
    allowed = roofline.allowed_seconds(cost, limits, largest)
    shares = [seconds[layer] / allowed for layer in layers]
    names = list[str]()
    for layer, share in zip(layers, shares, strict=True):
        names.append(f"{layer.name} ({layer.kind}), {share:.0%}")
    share_left = max(0.0, 1.0 - sum(shares))
    step_name = f"whole step; layers without FLOPs or not listed take {share_left:.0%}"
    _draw_ranges(ranges, limits, intensities, sizes, [step_name, *names])
    for axes in (roof, ranges):
        axes.axvline(limits.ridge, color=GREY, linewidth=0.9, linestyle="--", zorder=1)
        axes.grid(color=INK, alpha=0.07, linewidth=0.6)
    bound = textwrap.fill(f"{survey.workload}: {bound_text(survey)}", ROOFLINE_TITLE_WIDTH)
    title = f"{bound}\n{survey.device}; {_limits_text(limits)}"
    figure.suptitle(title, fontsize=10.5, parse_math=False)
    figure.legend(
        *roof.get_legend_handles_labels(),
        loc="outside lower center",
        ncols=4,
        fontsize=8.5,
        frameon=False,
    )


def _draw_roof(axes: "Axes", limits: DeviceLimits, intensities: Array, survey: Survey) -> None:
    """Draw the roof, the layers and the whole step on it, and the measured steps below it.

    The smallest and the largest batch size are named. ``intensities`` are FLOPs per byte, of shape
    (parts, batch sizes); the first part is the whole step, the others are layers.
    """
    # All rates are in GFLOP/s, or in bytes/s over 1e9.
    peak = limits.flops_per_second / 1e9
    bandwidth = limits.bytes_per_second / 1e9
    # A step without FLOPs has no place on the logarithmic axis.
    known = intensities[intensities > 0.0]
    start = min(limits.ridge, *known) / 2.0
    end = max(limits.ridge, *known) * 2.0
    corners = np.array([start, limits.ridge, end])
    corner_rates = np.minimum(peak, bandwidth * corners)
    attainable = np.minimum(peak, bandwidth * intensities)
    # At the same batch sizes as the intensities.
    measured = [row.share_of_peak * peak for row in survey.achieved]
    axes.set(xscale="log", yscale="log", xlim=(start, end), ylabel="attainable GFLOP/s")
    # With room for labels above and below.
    axes.set_ylim(min(corner_rates[0] / 1.5, min(measured) / 2.5), peak * 2.5)
    axes.plot(corners, corner_rates, color=INK, linewidth=1.8, label="ceilings of the device")
    for of_layer, rates in zip(intensities[1:], attainable[1:], strict=True):
        axes.plot(of_layer, rates, "o", color=BLUE, markersize=4, alpha=0.5)
    # The legend names the layers once, not once for each.
    axes.plot([], [], "o", color=BLUE, markersize=4, label="layers, where the roofline puts them")
    axes.text(
        limits.ridge,
        0.03,
        "  ridge",
        transform=axes.get_xaxis_transform(),
        color="#555555",
        fontsize=8.5,
    )
    step = intensities[0]
    roof = attainable[0]
    label = "whole step, by the sum of its bytes"
    axes.plot(step, roof, "D", color=VERMILION, markersize=6.5, label=label)
    label = "whole step, measured: share of peak"
    axes.plot(step, measured, "*-", color=PURPLE, markersize=10, linewidth=0.8, label=label)
    for index, side in ((0, "right"), (-1, "left")):
        row = survey.achieved[index]
        size = f"B = {row.batch_size:,}"
        style: dict[str, Any] = {"textcoords": "offset points", "ha": side, "fontsize": 8.5}
        at_roof = (step[index], roof[index])
        axes.annotate(size, at_roof, xytext=(0.0, 8.0), color=VERMILION, **style)
        at_measured = (step[index], measured[index])
        share = f"{size}: {row.share_of_peak:.0%}"
        axes.annotate(share, at_measured, xytext=(0.0, -9.0), va="top", color=PURPLE, **style)


def _draw_ranges(
    axes: "Axes",
    limits: DeviceLimits,
    intensities: Array,
    sizes: Sequence[int],
    names: Sequence[str],
) -> None:
    """Draw a row for the step and for each layer: their FLOPs per byte over the batch sizes.

    ``intensities`` are those of :func:`_draw_roof`; ``names`` are the labels of their rows.
    """
    areas = np.linspace(14.0, 60.0, len(sizes))
    for row, values in enumerate(intensities):
        # The whole step is the first one.
        color = BLUE if row else VERMILION
        axes.plot(values, [row] * len(values), color=color, linewidth=1.2, alpha=0.6)
        axes.scatter(values, [row] * len(values), s=areas, color=color, zorder=3)
    axes.set_yticks(range(len(names)), names, fontsize=8.5)
    # The first row is at the top.
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.axvspan(limits.ridge, axes.get_xlim()[1], color="#e6f0f8", linewidth=0, zorder=-2)
    batches = ", ".join(f"{size:,}" for size in sizes)
    axes.set_xlabel(
        f"FLOPs per byte moved; dots grow with the batch size B = {batches}\n"
        "shaded: compute-bound by its shapes\n"
        "behind each layer: its share of the time that the roofline allows a step at "
        f"B = {sizes[-1]:,}"
    )
