"""Time and cost to target for 1 to N data-parallel devices, from S*(B) and seconds per step tau(B).

With n devices of b examples each the batch is B = n b, and T(n, b) = S*(n b) (tau(b)^g +
c(n)^g)^(1/g), with c(n) the seconds of an all-reduce of the gradients and g how far it overlaps the
step (Pollux, eq. 10). For each n the plan takes the b that makes T least. Assumptions: every device
is as fast as the one measured, tau does not change with n, and S* depends on B alone (the learning
rate is at its best for B, and normalisation sees its usual batch on each device).
"""

import math
import textwrap
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from rich import box
from rich.table import Table

from bstune.core.curve import CurveBand
from bstune.core.step_time import fit_step_times, fit_sync, iteration_seconds, sync_seconds
from bstune.report.drawing import (
    BLUE,
    GREY,
    GUIDE,
    INK,
    PAGE_DPI,
    PAGE_INCHES,
    VERMILION,
    Label,
    log_axis,
    log_limits,
    place_labels,
    save_figure,
)
from bstune.result import DevicePlan, DevicePlans
from bstune.search.frontier_findings import best_learning_rate, steps_band
from bstune.search.posterior import Posterior
from bstune.study.analysis.critical import INTERVAL
from bstune.study.prepared import PreparedStudy
from bstune.system.console import format_count, format_number, format_seconds, time_unit

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Below this efficiency more than half of the devices' time is lost. The table marks the first such
# row.
HALF_EFFICIENCY = 0.5
SCALE_OUT_INCHES = (PAGE_INCHES, 4.2)
# Letters in a line of the figure's title.
SCALE_OUT_WIDTH = 105
# Gives the seconds of a step at batch sizes, in their shape.
StepTimesOfSizes = Callable[[NDArray[np.float64]], NDArray[np.float64]]
# Up to so many numbers of devices have a tick each; of more, only the powers of two.
MOST_DEVICE_TICKS = 12


def scale_out(
    prepared: PreparedStudy, posterior: Posterior, tau: StepTimesOfSizes | None, largest: int
) -> DevicePlans:
    """Plan for several devices, without an all-reduce and with the one that the config states.

    The second plan is empty where the config states none, both where nothing was timed.

    Args:
        prepared: the study.
        posterior: of its frontier.
        tau: gives the seconds of a step on one device; None: nothing was timed.
        largest: batch size up to which the curve is claimed; no plan has a larger one.
    """
    # Without seconds there is no time to compare.
    if tau is None:
        return DevicePlans()
    settings = prepared.options.hardware.scale_out
    space = prepared.space
    backend = prepared.backend
    all_sizes = size_ladder(space.high, space.multiple, settings.candidate_ratio)
    sizes = [size for size in all_sizes if size >= space.low]
    reduce = settings.all_reduce
    planned = partial(
        plan,
        predict=lambda batches: steps_band(posterior, batches, INTERVAL),
        step_seconds=lambda size: float(tau(np.array(float(size)))),
        best_lr=partial(best_learning_rate, posterior),
        devices=list(settings.devices),
        device_batch_sizes=sizes,
        overlap=reduce.overlap,
        max_examples=min(largest, backend.train_examples or largest),
    )
    ideal = tuple(planned())
    # Seconds that were measured come before those that follow from the link.
    if reduce.seconds is not None:
        measured = [(int(count), float(seconds)) for count, seconds in reduce.seconds.items()]
        # The seconds are fitted as alpha + beta (devices - 2).
        alpha, beta = fit_sync(measured)
        real = planned(all_reduce_seconds=lambda count: sync_seconds(count, alpha, beta))
        return DevicePlans(ideal=ideal, with_all_reduce=tuple(real))
    if reduce.bytes_per_second is not None and backend.gradient_bytes is not None:
        link = (float(backend.gradient_bytes), reduce.bytes_per_second, reduce.latency)
        real = planned(all_reduce_seconds=lambda count: ring_all_reduce(count, *link))
        return DevicePlans(ideal=ideal, with_all_reduce=tuple(real))
    return DevicePlans(ideal=ideal)


def step_times(
    posterior: Posterior, high: int, surveyed: Callable[[float], float] | None
) -> StepTimesOfSizes | None:
    """Fit tau(B) in seconds: the survey's, corrected by the trials' own seconds.

    It is None where nothing was timed.

    Args:
        posterior: has the trials.
        high: largest batch size.
        surveyed: gives the seconds of a step by the survey; None without one.
    """
    timed = list[tuple[float, float]]()
    for observation in posterior.observations:
        if observation.seconds_per_step is not None:
            timed.append((2.0**observation.x, observation.seconds_per_step))
    if not timed and surveyed is None:
        return None
    return fit_step_times(timed, float(high), surveyed)


def ring_all_reduce(
    devices: int, gradient_bytes: float, bytes_per_second: float, latency: float
) -> float:
    """Predict the seconds of a ring all-reduce, its additions left out.

    They are 2 (n - 1)/n bytes/bandwidth + 2 (n - 1) latency: a reduce-scatter and an all-gather of
    n - 1 messages of bytes/n each (Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce
    algorithms for clusters of workstations"; latency as in Thakur et al. 2005, "... operations in
    MPICH").
    """
    return 2.0 * (devices - 1) * (gradient_bytes / devices / bytes_per_second + latency)


def plan(
    predict: Callable[[Sequence[int]], CurveBand],
    step_seconds: Callable[[int], float],
    best_lr: Callable[[float], float],
    devices: Sequence[int],
    device_batch_sizes: Sequence[int],
    all_reduce_seconds: Callable[[int], float] = lambda devices: 0.0,
    overlap: float = 1.0,
    max_examples: int | None = None,
) -> list[DevicePlan]:
    """Choose the batch size with which each number of devices is fastest, in rising order.

    A number of devices that is no faster than a smaller one is left out, as is one too large for
    the data.

    Args:
        predict: gives S*(B), the steps to the target, with its interval at batch sizes.
        step_seconds: gives tau(b), the seconds of a step of one device.
        best_lr: gives the best learning rate at a batch size.
        devices: the numbers of devices to plan for.
        device_batch_sizes: candidates for b, the batch size of each device.
        all_reduce_seconds: gives c(n), the seconds of an all-reduce over n devices.
        overlap: g, 1 for an all-reduce after the step, inf for one beside it.
        max_examples: of a batch, n b; None: any.
    """
    sizes = sorted(set(device_batch_sizes))
    # One device is the yardstick of the others.
    counts = sorted({1, *devices})
    # Rows are numbers of devices, columns batch sizes of each.
    batches = np.outer(counts, sizes)
    bands = predict(batches.ravel().tolist())
    steps = np.reshape(bands.steps, batches.shape)
    low = np.reshape(bands.low, batches.shape)
    high = np.reshape(bands.high, batches.shape)
    tau = [step_seconds(size) for size in sizes]
    seconds_per_step = np.empty(batches.shape)
    for i, count in enumerate(counts):
        wait = all_reduce_seconds(count)
        seconds_per_step[i] = [iteration_seconds(seconds, wait, overlap) for seconds in tau]
    most_examples = math.inf if max_examples is None else max_examples
    fits = batches <= most_examples
    # The column of the fastest batch size, in each row.
    fastest = np.where(fits, steps * seconds_per_step, math.inf).argmin(axis=1)
    rows = list[DevicePlan]()
    for i, (count, k) in enumerate(zip(counts, fastest.tolist(), strict=True)):
        # The data do not suffice for so many devices, nor for more.
        if not fits[i, k]:
            break
        per_step = float(seconds_per_step[i, k])
        seconds = float(steps[i, k]) * per_step
        # Fewer devices are as fast.
        if rows and seconds >= rows[-1].seconds:
            continue
        seconds_of_one = seconds
        if rows:
            seconds_of_one = rows[0].seconds
        speed_up = seconds_of_one / seconds
        rows.append(
            DevicePlan(
                devices=count,
                device_batch_size=sizes[k],
                batch_size=count * sizes[k],
                lr=best_lr(count * sizes[k]),
                steps=float(steps[i, k]),
                seconds_per_step=per_step,
                seconds=seconds,
                seconds_low=float(low[i, k]) * per_step,
                seconds_high=float(high[i, k]) * per_step,
                device_seconds=count * seconds,
                speed_up=speed_up,
                efficiency=speed_up / count,
            )
        )
    # One device is the yardstick even where it was not asked for.
    return [row for row in rows if row.devices in devices]


def size_ladder(ceiling: int, multiple: int, ratio: float) -> list[int]:
    """List the batch sizes of a device to compare: multiples below the ceiling, and the ceiling.

    Each is at most ``ratio`` times the one before, or the next multiple where that is farther.
    """
    sizes = list[int]()
    size = multiple
    while size < ceiling:
        sizes.append(size)
        # At least one multiple further: near small sizes the ratio itself makes no step.
        size = max(size + multiple, int(size * ratio) // multiple * multiple)
    return [*sizes, ceiling]


def half_efficient(rows: Sequence[DevicePlan]) -> DevicePlan | None:
    """Give the first row whose efficiency is under 50%; None if there is none."""
    for row in rows:
        if row.efficiency < HALF_EFFICIENCY:
            return row
    return None


def scale_out_table(rows: Sequence[DevicePlan], title: str) -> Table:
    """Lay the plan out as a table for 80 columns.

    The row where efficiency first falls under 50% is marked.
    """
    caption = f"{_caption(rows)}; cost is in device-seconds"
    table = Table(
        title=title,
        caption=caption,
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    for name in (
        "devices",
        "batch",
        "each",
        "lr",
        "steps",
        "time",
        "interval",
        "cost",
        "efficiency",
    ):
        table.add_column(name, justify="right", no_wrap=True)
    half = half_efficient(rows)
    for row in rows:
        below = row.seconds_low / row.seconds - 1.0
        above = row.seconds_high / row.seconds - 1.0
        style = "bold yellow" if row is half else None
        table.add_row(
            format_count(row.devices),
            format_count(row.batch_size),
            format_count(row.device_batch_size),
            format_number(row.lr),
            format_count(row.steps),
            format_seconds(row.seconds),
            f"{below:+.0%} {above:+.0%}",
            format_seconds(row.device_seconds),
            f"{row.efficiency:.0%}",
            style=style,
        )
    return table


def _caption(rows: Sequence[DevicePlan]) -> str:
    """Say from how many devices on the efficiency is under 50%."""
    half = half_efficient(rows)
    if half is None:
        return "efficiency stays at 50% or above"
    point = f"batch size {format_count(half.batch_size)}, learning rate {format_number(half.lr)}"
    return f"efficiency falls under 50% at {format_count(half.devices)} devices ({point})"


def draw_scale_out(
    ideal: Sequence[DevicePlan], real: Sequence[DevicePlan], title: str, path: Path
) -> None:
    """Draw the plan without an all-reduce, and the one with it, if not empty, to a file.

    Time stands on the left, efficiency on the right.
    """
    save_figure(
        partial(_paint, ideal=ideal, real=real, title=title),
        SCALE_OUT_INCHES,
        path,
        dots_per_inch=PAGE_DPI,
    )


def _paint(
    figure: "Figure", ideal: Sequence[DevicePlan], real: Sequence[DevicePlan], title: str
) -> None:
    """Draw the two panels of :func:`draw_scale_out` on a figure."""
    times, efficiencies = figure.subplots(1, 2)
    all_rows = [*ideal, *real]
    scale, unit = time_unit(min(row.seconds for row in all_rows))
    devices = [row.devices for row in ideal]
    perfect = np.array([ideal[0].seconds * ideal[0].devices / count / scale for count in devices])
    times.plot(devices, perfect, color=INK, linewidth=0.8, linestyle="--", gid=GUIDE)
    half_percent = 100.0 * HALF_EFFICIENCY
    efficiencies.axhline(half_percent, color=GREY, linewidth=0.9, linestyle="--", gid=GUIDE)
    perfect_points = np.stack([devices, perfect], axis=-1)
    time_labels = [Label("twice the devices,\nhalf the time", perfect_points, INK)]
    half_labels = list[Label]()
    for rows, colour, name in (
        (ideal, BLUE, "no all-reduce"),
        (real, VERMILION, "with the all-reduce"),
    ):
        if not rows:
            continue
        points = _draw_rows(times, efficiencies, rows, colour, scale)
        time_labels.append(Label(name, points, colour))
        half = half_efficient(rows)
        if half is not None:
            half_labels.append(_half_label(half, colour))
    times_shown = list[float]()
    for row in all_rows:
        times_shown += [row.seconds / scale, row.seconds_low / scale, row.seconds_high / scale]
    log_axis(times, "y", log_limits(times_shown, pads=(0.15, 0.08)))
    efficiencies.set(ylim=(0.0, 108.0))
    times.set_title(f"time to target, {unit}; band: of the curve", loc="left", fontsize=9.0)
    efficiencies.set_title("speed-up over devices, %", loc="left", fontsize=9.0)
    ticks = devices
    # Where the labels of all would overlap, those of powers of two stay.
    if len(devices) > MOST_DEVICE_TICKS:
        ticks = [count for count in devices if count & (count - 1) == 0]
    for axes in (times, efficiencies):
        axes.set(xscale="log", xlabel="devices")
        axes.set_xticks(ticks, [format_count(count) for count in ticks])
        axes.set_xticks([], minor=True)
        axes.grid(color=INK, alpha=0.07, linewidth=0.6)
    caption = textwrap.fill(_caption(real or ideal), SCALE_OUT_WIDTH)
    heading = f"{textwrap.fill(title, SCALE_OUT_WIDTH)}\n{caption}"
    figure.suptitle(heading, x=0.01, ha="left", fontsize=10.5, parse_math=False)
    # Labels are placed once all else has its place.
    figure.draw_without_rendering()
    place_labels(times, time_labels, 8.5)
    place_labels(efficiencies, half_labels, 8.5)
    # The places are those of this layout.
    figure.set_layout_engine("none")


def _half_label(half: DevicePlan, colour: str) -> Label:
    """Make the label of the first row whose efficiency is under 50%."""
    place = f"B = {format_count(half.batch_size)}, lr = {format_number(half.lr)}"
    text = f"{format_count(half.devices)} devices: {half.efficiency:.0%}\n{place}"
    return Label(text, np.array([[half.devices, 100.0 * half.efficiency]]), colour)


def _draw_rows(
    times: "Axes", efficiencies: "Axes", rows: Sequence[DevicePlan], colour: str, scale: float
) -> NDArray[np.float64]:
    """Draw a plan's time with its band, and its efficiency.

    ``scale``: seconds of the axis's unit of time. The points (devices, time) come back, of shape
    (n, 2).
    """
    devices = list[int]()
    low = list[float]()
    middle = list[float]()
    high = list[float]()
    percents = list[float]()
    for row in rows:
        devices.append(row.devices)
        low.append(row.seconds_low / scale)
        middle.append(row.seconds / scale)
        high.append(row.seconds_high / scale)
        percents.append(100.0 * row.efficiency)
    times.fill_between(devices, low, high, color=colour, alpha=0.15, linewidth=0)
    times.plot(devices, middle, "o-", color=colour, markersize=4)
    efficiencies.plot(devices, percents, "o-", color=colour, markersize=4)
    return np.stack([devices, middle], axis=-1)
