"""``bstune survey``: a survey as tables, advice, hardware.json and roofline.png; and the lines of it before a study."""

import functools
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console, Group
from rich.table import Table

from bstune.core.console import format_count, format_number, format_seconds
from bstune.core.errors import HardwareError
from bstune.core.figures import BLUE, GREY, INK, PURPLE, VERMILION, save_figure
from bstune.core.files import Output, check_writable, locked, write_text
from bstune.core.records import dump_json
from bstune.hardware.roofline import (
    TENSOR_CORE_SOURCE,
    Achieved,
    DeviceLimits,
    LayerCost,
    StepCost,
    achieved,
    allowed_seconds,
    intensity,
    layer_seconds,
    turning_batch_size,
)
from bstune.hardware.survey import Survey, compose_survey, probe_text, survey_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_MISALIGNED = 8  # rows
MUCH_OVERHEAD = 0.2  # of a step


def main(arguments: list[str]) -> None:
    """Survey the hardware for a workload, print what was found, and write it with its figure."""
    if {"--help", "-h"} & set(arguments):
        sys.stdout.write(
            "usage: bstune survey workload=NAME [OPTION=VALUE ...]\n\n"
            "Measures what the hardware allows for a workload, without a search.\n"
            "The options are those of bstune --help; hardware.* are the survey's own.\n"
        )
        return
    config, console = compose_survey(arguments), Console()
    output = Output(Path(config.output))
    check_writable(output.survey, f"output={config.output}")
    with locked(output):
        survey, cached = survey_of(config, lambda line: console.print(line, highlight=False, soft_wrap=True))
        write_survey(survey, output)
    console.print(survey_tables(survey))
    if cached:
        console.print("kept from before; measure again with hardware.refresh=true")
    for path in (output.survey, output.roofline):
        if path.exists():
            console.print(f"written {path}", soft_wrap=True)


def survey_json(survey: Survey) -> str:
    """Return the survey as strict JSON, with what follows from it."""
    model, values = survey.step_time, asdict(survey)
    values["ceiling"]["foretold"] = values["ceiling"].pop("model_error")  # the file's key since its first version
    derived = {
        "step_time": None
        if model is None
        else {"overhead": model.overhead, "per_example": model.per_example, "residual": model.residual},
        "left_out_error": survey.left_out_error,
        "turning_batch_size": survey.turning_batch_size,
        "achieved": [asdict(row) for row in survey.achieved],
        "misaligned": [asdict(row) for row in survey.misaligned],
        "plateau": survey.plateau.batch_size,
        "advice": advice(survey),
    }
    return dump_json({**values, "derived": derived}, indent=2) + "\n"


def write_survey(survey: Survey, output: Output) -> None:
    """Write ``hardware.json`` and, where the step's cost is known, ``roofline.png``."""
    write_text(output.survey, survey_json(survey))
    if survey.cost is not None and survey.limits is not None:
        sizes = [size for size, _ in survey.pairs]
        draw_roofline(survey.cost, survey.limits, sizes, survey.pairs, survey.workload, output.roofline)


def headline(survey: Survey, kept: bool) -> tuple[str, ...]:
    """Return the lines that a study's plan says of a survey; ``kept``: it was measured before."""
    sizes = [timing.batch_size for timing in survey.measured.timings]
    taken = "kept from before" if kept else f"measured in {format_seconds(survey.seconds)}"
    lines = [
        f"{_ceiling_text(survey)}; tau(B) at {len(sizes)} batch sizes from {format_count(sizes[0])} to "
        f"{format_count(sizes[-1])} ({taken})"
    ]
    return (*lines, *survey.notes)


def survey_tables(survey: Survey) -> Group:
    """Return all that a survey found, for 80 columns."""
    facts = Table.grid(padding=(0, 2))
    facts.add_column(no_wrap=True, style="bold")
    facts.add_column(overflow="fold")
    facts.add_row("device", f"{survey.device} in {survey.precision}{_limits_text(survey)}")
    facts.add_row("memory", _ceiling_text(survey))
    facts.add_row("probes", f"{len(survey.ceiling.probes)}: " + "; ".join(map(probe_text, survey.ceiling.probes)))
    facts.add_row("step time", _model_text(survey))
    if survey.cost is not None:
        facts.add_row("roofline", _roofline_text(survey))
    for note in survey.notes:
        facts.add_row("note", note)
    for line in advice(survey):
        facts.add_row("advice", line)
    facts.add_row("took", format_seconds(survey.seconds))
    return Group(_timings_table(survey), facts)


def advice(survey: Survey) -> list[str]:
    """Return what follows for the choice of a batch size, each with its number."""
    lines = []
    plateau, ceiling = survey.plateau, survey.ceiling.batch_size
    if len(survey.pairs) < 2:
        lines.append("too little was timed to say more: raise hardware.seconds")
    elif plateau.batch_size < ceiling:
        lines.append(
            f"from batch size {format_count(plateau.batch_size)} on, a larger one hardly gives more examples a second "
            f"({format_number(plateau.throughput)} there, {format_number(_most(survey))} at most): beyond it only "
            "fewer steps can pay"
        )
    else:
        lines.append(f"examples a second still rise at the largest batch size, {format_count(ceiling)}")
    power, tau = 2 ** (ceiling.bit_length() - 1), survey.step_time
    if survey.ceiling.above is not None and power != ceiling:
        more = "" if tau is None else f" ({ceiling / tau(ceiling) * tau(power) / power - 1.0:+.1%} examples a second)"
        below = format_count(power)
        lines.append(f"{format_count(ceiling)} fits: no need to fall back to {below}, the power of two below it{more}")
    elif survey.ceiling.above is None and ceiling == survey.high:
        lines.append(f"the range ends at {format_count(ceiling)}, not the memory: see search.batch_size.high")
    heavy = [timing for timing in survey.measured.timings if (timing.overhead_share or 0.0) > MUCH_OVERHEAD]
    if heavy:
        lines.append(
            f"the framework takes {heavy[0].overhead_share:.0%} of a step at batch size "
            f"{format_count(heavy[0].batch_size)}, over {MUCH_OVERHEAD:.0%} up to {format_count(heavy[-1].batch_size)}"
        )
    dtype = None if survey.limits is None else survey.limits.dtype
    if survey.misaligned:
        lines.append(f"tensor cores take {dtype} in multiples of {survey.multiple}, 16 bytes ({TENSOR_CORE_SOURCE})")
    elif dtype == "fp32" and survey.device_type == "cuda":
        lines.append("fp32 does not run on tensor cores, so no multiple is asked of layers or batch; in tf32 it is 4")
    for row in survey.misaligned[:MAX_MISALIGNED]:
        gain = "" if row.predicted_gain is None else f": predicted {row.predicted_gain:.2f} times its throughput"
        lines.append(f"{row.name} ({row.kind}): pad {row.dimension} from {row.size} to {row.padded}{gain}")
    return lines


def _most(survey: Survey) -> float:
    return max(timing.throughput for timing in survey.measured.timings)


def _ceiling_text(survey: Survey) -> str:
    found = survey.ceiling
    limit, law = f"{found.at.limit / 2**20:,.0f} MiB", ""
    if found.model is not None:
        per_example = format_number(found.model.per_example / 2**10)
        law = f" ({found.model.base / 2**20:,.0f} MiB and {per_example} KiB an example)"
    if found.above is None:
        return f"batch size {format_count(found.batch_size)}, the largest of the range, fits in {limit}{law}"
    exact = "exactly" if found.precision == 1 else f"to {format_count(found.precision)} examples"
    beyond = format_count(found.above.batch_size)
    like, noise = found.spread_examples, ""
    if found.spread is not None and like is not None and like > found.precision:
        noise = f"; like processes differ by {found.spread:.1%}, or {format_count(like)} examples"
    return f"ceiling {format_count(found.batch_size)} {exact}: {beyond} does not fit in {limit}{law}{noise}"


def _limits_text(survey: Survey) -> str:
    limits = survey.limits
    if limits is None:
        return ""
    flops, moved = (format_number(rate / 1e9) for rate in (limits.flops_per_second, limits.bytes_per_second))
    ridge = format_number(limits.ridge)
    return f"; measured ceilings {flops} GFLOP/s in {limits.dtype}, {moved} GB/s, ridge {ridge} FLOPs per byte"


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


def _roofline_text(survey: Survey) -> str:
    turning = survey.turning_batch_size
    turns = (
        "memory-bound at any batch size"
        if turning is None
        else f"memory-bound below batch size {format_count(turning)}, compute-bound from there on"
    )
    return f"by its shapes the step is {turns}"


def _timings_table(survey: Survey) -> Table:
    """Return one row a batch size; spread is between the quartiles over the median, drift between repeats."""
    table = Table(title="seconds per step", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
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


FIGURE_WIDTH, ROOF_HEIGHT, ROW_HEIGHT = 11.0, 3.6, 0.24  # inches
MOST_ROWS = 14  # of layers: those that take the most of the time allowed


def draw_roofline(
    cost: StepCost,
    limits: DeviceLimits,
    batch_sizes: Sequence[int],
    measured: Iterable[tuple[int, float]],
    title: str,
    path: Path,
) -> None:
    """Write the roofline: attainable FLOP/s over FLOPs per byte, layers and the whole step on it, measured steps below.

    Args:
        cost: of the step.
        limits: of the device.
        batch_sizes: those at which layers and step are drawn, at least one; each layer is a line through them.
        measured: (B, tau(B) in seconds) pairs; none are drawn for none.
        title: names the workload; device and ceilings are added.
        path: written under a temporary name beside it, then renamed.

    Raises:
        HardwareError: for no batch size, one below 1, or seconds that are not positive.
    """
    if not batch_sizes:
        raise HardwareError("the roofline needs at least one batch size to draw the layers at")
    steps = achieved(cost, limits, measured)
    paint = functools.partial(
        _paint, cost=cost, limits=limits, batch_sizes=sorted(set(batch_sizes)), steps=steps, title=title
    )
    save_figure(paint, (FIGURE_WIDTH, ROOF_HEIGHT), path)


def _paint(
    figure: "Figure",
    cost: StepCost,
    limits: DeviceLimits,
    batch_sizes: Sequence[int],
    steps: Sequence[Achieved],
    title: str,
) -> None:
    sizes = batch_sizes
    layers = [layer for layer in cost.layers if layer.flops.at(sizes[-1]) and layer.bytes.at(sizes[-1])]
    layers = sorted(layers, key=lambda layer: -layer_seconds(layer, limits, sizes[-1]))[:MOST_ROWS]
    rows = len(layers) + 1
    figure.set_size_inches(FIGURE_WIDTH, ROOF_HEIGHT + ROW_HEIGHT * rows + 1.4)
    heights = [ROOF_HEIGHT, ROW_HEIGHT * rows]
    roof, ranges = figure.subplots(2, 1, sharex=True, gridspec_kw={"height_ratios": heights})
    parts: list[LayerCost | StepCost] = [cost, *layers]
    points = [[_point(part, size) for size in sizes] for part in parts]
    _draw_roof(roof, limits, points)
    _draw_step(roof, cost, limits, points[0], sizes, steps)
    _draw_ranges(ranges, limits, points, sizes, _names(cost, layers, limits, sizes[-1]))
    for axes in (roof, ranges):
        axes.axvline(limits.ridge, color=GREY, linewidth=0.9, linestyle="--", zorder=1)
        axes.grid(color=INK, alpha=0.07, linewidth=0.6)
    figure.suptitle(_title(cost, limits, title), fontsize=10.5, parse_math=False)
    handles, labels = roof.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=8.5, frameon=False)


def _title(cost: StepCost, limits: DeviceLimits, title: str) -> str:
    turning = turning_batch_size(cost, limits.ridge)
    turns = "memory-bound at any batch size" if turning is None else f"compute-bound from batch size {turning:,.0f} on"
    flops, moved = (format_number(rate / 1e9) for rate in (limits.flops_per_second, limits.bytes_per_second))
    return (
        f"{title}: the step is {turns}, by its shapes\n"
        f"{limits.device}; measured ceilings: {flops} GFLOP/s in {limits.dtype}, {moved} GB/s"
    )


def _names(cost: StepCost, layers: Sequence[LayerCost], limits: DeviceLimits, size: int) -> list[str]:
    """Return the rows' names, each layer with its share of the time that the roofline allows the step."""
    whole = allowed_seconds(cost, limits, size)
    shares = [layer_seconds(layer, limits, size) / whole for layer in layers]
    named = [f"{layer.name} ({layer.kind}), {share:.0%}" for layer, share in zip(layers, shares, strict=True)]
    return [f"whole step; layers without FLOPs or not listed take {max(0.0, 1.0 - sum(shares)):.0%}", *named]


def _point(part: LayerCost | StepCost, size: int) -> float:
    return intensity(part, size) or 0.0


def _attainable(limits: DeviceLimits, x: float) -> float:
    return min(limits.flops_per_second, limits.bytes_per_second * x) / 1e9


def _draw_roof(axes: "Axes", limits: DeviceLimits, points: Sequence[Sequence[float]]) -> None:
    every = [limits.ridge, *(value for row in points for value in row if value)]
    low, high = min(every) / 2.0, max(every) * 2.0
    axes.set(xscale="log", yscale="log", xlim=(low, high), ylabel="attainable GFLOP/s")
    axes.set_ylim(_attainable(limits, low) / 1.5, limits.flops_per_second / 1e9 * 2.5)  # room for labels above the roof
    x = [low, limits.ridge, high]
    axes.plot(x, [_attainable(limits, value) for value in x], color=INK, linewidth=1.8, label="ceilings of the device")
    for row in points[1:]:
        axes.plot(row, [_attainable(limits, value) for value in row], "o", color=BLUE, markersize=4, alpha=0.5)
    axes.annotate(
        f"ridge: {format_number(limits.ridge)} FLOPs per byte",
        (limits.ridge, 0.03),
        xycoords=("data", "axes fraction"),
        xytext=(5.0, 0.0),
        textcoords="offset points",
        color="#555555",
        fontsize=8.5,
    )


def _draw_step(
    axes: "Axes",
    cost: StepCost,
    limits: DeviceLimits,
    points: Sequence[float],
    sizes: Sequence[int],
    steps: Sequence[Achieved],
) -> None:
    """Draw the whole step on the roof, and what was measured below it."""
    axes.plot([], [], "o", color=BLUE, markersize=4, label="layers, where the roofline puts them")
    roof = [_attainable(limits, value) for value in points]
    axes.plot(points, roof, "D", color=VERMILION, markersize=6.5, label="whole step, by the sum of its bytes")
    for at in {0, len(sizes) - 1}:
        axes.annotate(
            f"B = {sizes[at]:,}",
            (points[at], roof[at]),
            xytext=(0.0, 8.0),
            textcoords="offset points",
            ha="left" if at else "right",
            color=VERMILION,
            fontsize=8.5,
        )
    if not steps:
        return
    x = [_point(cost, row.batch_size) for row in steps]
    y = [row.share_of_peak * limits.flops_per_second / 1e9 for row in steps]
    axes.set_ylim(bottom=min(axes.get_ylim()[0], min(y) / 2.5))  # room for a label below
    axes.plot(x, y, "*-", color=PURPLE, markersize=10, linewidth=0.8, label="whole step, measured: share of peak")
    for at in {0, len(steps) - 1}:
        axes.annotate(
            f"B = {steps[at].batch_size:,}: {steps[at].share_of_peak:.0%}",
            (x[at], y[at]),
            xytext=(0.0, -9.0),
            textcoords="offset points",
            ha="left" if at else "right",
            va="top",
            color=PURPLE,
            fontsize=8.5,
        )


def _draw_ranges(
    axes: "Axes",
    limits: DeviceLimits,
    points: Sequence[Sequence[float]],
    sizes: Sequence[int],
    names: Sequence[str],
) -> None:
    """Draw one row for the step and for each layer: FLOPs per byte from the smallest to the largest batch size."""
    for row, values in enumerate(points):
        colour = BLUE if row else VERMILION
        axes.plot(values, [row] * len(values), color=colour, linewidth=1.2, alpha=0.6)
        areas = [14.0 + 46.0 * at / max(1, len(sizes) - 1) for at in range(len(sizes))]
        axes.scatter(values, [row] * len(values), s=areas, color=colour, zorder=3)
    axes.set_yticks(range(len(names)), names, fontsize=8.5)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.axvspan(limits.ridge, axes.get_xlim()[1], color="#e6f0f8", linewidth=0, zorder=-2)
    batches = ", ".join(f"{size:,}" for size in sizes)
    axes.set_xlabel(
        f"FLOPs per byte moved; dots grow with the batch size B = {batches}; shaded: compute-bound\n"
        f"behind each layer: its share of the time that the roofline allows a step at B = {sizes[-1]:,}"
    )
