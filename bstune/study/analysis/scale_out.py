"""Time and cost to target for 1 to N data-parallel devices, from steps to target S*(B) and seconds per step tau(B).

With n devices of b examples each the batch is B = n b, and T(n, b) = S*(n b) (tau(b)^g + c(n)^g)^(1/g), with c(n) the
seconds of an all-reduce of the gradients and g how far it overlaps the step (Pollux, eq. 10). For each n the plan takes
the b that makes T least. Assumptions: every device is as fast as the one measured, tau does not change with n, and S*
depends on B alone (the learning rate is at its best for B, and normalisation sees its usual batch on each device).
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
from bstune.search.acquisition import best_learning_rate, steps_band
from bstune.search.observations import Posterior
from bstune.study.analysis.critical import INTERVAL
from bstune.study.prepare import PreparedStudy
from bstune.system.console import format_count, format_number, format_seconds, time_unit

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

HALF = 0.5
FIGURE_INCHES = PAGE_INCHES, 4.2
TITLE_WIDTH = 105  # in letters


def scale_out(prepared: PreparedStudy, posterior: Posterior, largest: int) -> DevicePlans:
    """Give the plan without an all-reduce, and the one with the all-reduce that the config states (empty if none).

    No batch is larger than ``largest``, as far as the curve is claimed.
    """
    settings, space, backend = prepared.options.hardware.scale_out, prepared.space, prepared.backend
    sizes = [
        size
        for size in candidates(space.high, space.multiple, settings.candidate_ratio)
        if size >= space.low
    ]
    tau = step_times(posterior, space.high, backend.step_time)
    if tau is None:
        return DevicePlans()
    reduce = settings.all_reduce
    planned = partial(
        plan,
        lambda batches: steps_band(posterior, batches, INTERVAL),
        lambda size: float(tau(np.array(float(size)))),
        partial(best_learning_rate, posterior),
        list(settings.devices),
        sizes,
        overlap=reduce.overlap,
        max_examples=min(largest, backend.train_examples or largest),
    )
    ideal = tuple(planned())
    if reduce.seconds is not None:
        alpha, beta = fit_sync(
            [(int(count), float(seconds)) for count, seconds in reduce.seconds.items()]
        )
        real = planned(lambda count: sync_seconds(count, alpha, beta))
        return DevicePlans(ideal=ideal, with_all_reduce=tuple(real))
    if reduce.bytes_per_second is not None and backend.gradient_bytes is not None:
        link = (float(backend.gradient_bytes), reduce.bytes_per_second, reduce.latency)
        real = planned(lambda count: ring_all_reduce(count, *link))
        return DevicePlans(ideal=ideal, with_all_reduce=tuple(real))
    return DevicePlans(ideal=ideal)


def step_times(
    posterior: Posterior, high: int, surveyed: Callable[[float], float] | None
) -> Callable[[NDArray[np.float64]], NDArray[np.float64]] | None:
    """Return tau(B) in seconds: what was surveyed, corrected by the trials; None where nothing was timed."""
    timed = [
        (2.0**one.x, one.seconds_per_step)
        for one in posterior.observations
        if one.seconds_per_step is not None
    ]
    return fit_step_times(timed, float(high), surveyed) if timed or surveyed is not None else None


def ring_all_reduce(
    devices: int, gradient_bytes: float, bytes_per_second: float, latency: float
) -> float:
    """Return the seconds of a ring all-reduce, 2 (n - 1)/n bytes/bandwidth + 2 (n - 1) latency; additions left out."""
    # A reduce-scatter and an all-gather of n - 1 messages of bytes/n each (Patarasuk and Yuan 2009, "Bandwidth optimal
    # all-reduce algorithms for clusters of workstations"; latency as in Thakur et al. 2005, "... operations in MPICH").
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
    """Return the best that each number of devices can do, in rising order, as far as more of them are faster.

    There is none for one too many for the data. ``overlap`` is g: 1 for an all-reduce after the step, inf for one
    beside it; ``max_examples`` bounds n b.
    """
    sizes = sorted(set(device_batch_sizes))
    counts = sorted({1, *devices})  # one device is the yardstick
    tau = [step_seconds(size) for size in sizes]
    waits = [all_reduce_seconds(count) for count in counts]
    batches = np.outer(counts, sizes)  # (devices, sizes)
    bands = predict(batches.ravel().tolist())
    steps, low, high = (
        np.reshape(values, batches.shape) for values in (bands.steps, bands.low, bands.high)
    )
    fits = batches <= (math.inf if max_examples is None else max_examples)
    seconds_per_step = np.array(
        [[iteration_seconds(one, wait, overlap) for one in tau] for wait in waits]
    )
    best = np.where(fits, steps * seconds_per_step, math.inf).argmin(axis=1)
    rows: list[DevicePlan] = []
    for i, (count, k) in enumerate(zip(counts, best.tolist(), strict=True)):
        if not fits[i, k]:
            break
        per_step = float(seconds_per_step[i, k])
        seconds = float(steps[i, k]) * per_step
        if rows and seconds >= rows[-1].seconds:
            continue  # the others would do better without some of them
        speed_up = (rows[0].seconds if rows else seconds) / seconds
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
    return [row for row in rows if row.devices in set(devices)]


def candidates(ceiling: int, multiple: int, ratio: float) -> list[int]:
    """Return batch sizes per device: multiples, at most ``ratio`` apart if they can be, up to the ceiling and it."""
    sizes, size = [], multiple
    while size < ceiling:
        sizes.append(size)
        size = max(size + multiple, int(size * ratio) // multiple * multiple)
    return [*sizes, ceiling]


def half_efficient(rows: Sequence[DevicePlan]) -> DevicePlan | None:
    """Return the first row whose efficiency is under 50%; None if there is none."""
    return next((row for row in rows if row.efficiency < HALF), None)


def scale_out_table(rows: Sequence[DevicePlan], title: str) -> Table:
    """Return the plan as a table for 80 columns; the row where efficiency first falls under 50% is marked."""
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
        table.add_row(
            format_count(row.devices),
            format_count(row.batch_size),
            format_count(row.device_batch_size),
            format_number(row.lr),
            format_count(row.steps),
            format_seconds(row.seconds),
            f"{row.seconds_low / row.seconds - 1.0:+.0%} {row.seconds_high / row.seconds - 1.0:+.0%}",
            format_seconds(row.device_seconds),
            f"{row.efficiency:.0%}",
            style="bold yellow" if row is half else None,
        )
    return table


def _caption(rows: Sequence[DevicePlan]) -> str:
    half = half_efficient(rows)
    if half is None:
        return "efficiency stays at 50% or above"
    point = f"batch size {format_count(half.batch_size)}, learning rate {format_number(half.lr)}"
    return f"efficiency falls under 50% at {format_count(half.devices)} devices ({point})"


def draw_scale_out(
    ideal: Sequence[DevicePlan], real: Sequence[DevicePlan], title: str, path: Path
) -> None:
    """Write the plan's figure, without and (if not empty) with an all-reduce: time on the left, efficiency right."""
    save_figure(
        partial(_paint, ideal=ideal, real=real, title=title),
        FIGURE_INCHES,
        path,
        dots_per_inch=PAGE_DPI,
    )


def _paint(
    figure: "Figure", ideal: Sequence[DevicePlan], real: Sequence[DevicePlan], title: str
) -> None:
    left, right = figure.subplots(1, 2)
    scale, unit = time_unit(min(row.seconds for row in [*ideal, *real]))
    devices = [row.devices for row in ideal]
    perfect = np.array([ideal[0].seconds * ideal[0].devices / count / scale for count in devices])
    left.plot(devices, perfect, color=INK, linewidth=0.8, linestyle="--", gid=GUIDE)
    right.axhline(100.0 * HALF, color=GREY, linewidth=0.9, linestyle="--", gid=GUIDE)
    labels = {
        left: [
            Label("twice the devices,\nhalf the time", np.stack([devices, perfect], axis=-1), INK)
        ],
        right: [],
    }
    for rows, colour, name in (
        (ideal, BLUE, "no all-reduce"),
        (real, VERMILION, "with the all-reduce"),
    ):
        if rows:
            points = _draw_rows(left, right, rows, colour, scale)
            labels[left].append(Label(name, points, colour))
            labels[right] += [_half_label(half, colour)] if (half := half_efficient(rows)) else []
    shown = [
        value / scale
        for row in [*ideal, *real]
        for value in (row.seconds, row.seconds_low, row.seconds_high)
    ]
    log_axis(left, "y", log_limits(shown, (0.15, 0.08)))
    right.set(ylim=(0.0, 108.0))
    for axes, name in (
        (left, f"time to target, {unit}; band: of the curve"),
        (right, "speed-up over devices, %"),
    ):
        axes.set(xscale="log", xlabel="devices")
        axes.set_title(name, loc="left", fontsize=9.0)
        ticks = (
            devices
            if len(devices) <= 12
            else [count for count in devices if count & (count - 1) == 0]
        )
        axes.set_xticks(ticks, [format_count(count) for count in ticks])
        axes.set_xticks([], minor=True)
        axes.grid(color=INK, alpha=0.07, linewidth=0.6)
    lines = [textwrap.fill(line, TITLE_WIDTH) for line in (title, _caption(real or ideal))]
    figure.suptitle("\n".join(lines), x=0.01, ha="left", fontsize=10.5, parse_math=False)
    figure.draw_without_rendering()
    for axes, some in labels.items():
        place_labels(axes, some, 8.5)
    figure.set_layout_engine("none")  # the places are those of this layout


def _half_label(half: DevicePlan, colour: str) -> Label:
    place = f"B = {format_count(half.batch_size)}, lr = {format_number(half.lr)}"
    text = f"{format_count(half.devices)} devices: {half.efficiency:.0%}\n{place}"
    return Label(text, np.array([[half.devices, 100.0 * half.efficiency]]), colour)


def _draw_rows(
    left: "Axes", right: "Axes", rows: Sequence[DevicePlan], colour: str, scale: float
) -> NDArray[np.float64]:
    """Draw a plan's time with its band, and its efficiency; return the points of its time, (n, 2)."""
    devices = [row.devices for row in rows]
    low, middle, high = (
        [getattr(row, name) / scale for row in rows]
        for name in ("seconds_low", "seconds", "seconds_high")
    )
    left.fill_between(devices, low, high, color=colour, alpha=0.15, linewidth=0)
    left.plot(devices, middle, "o-", color=colour, markersize=4)
    right.plot(devices, [100.0 * row.efficiency for row in rows], "o-", color=colour, markersize=4)
    return np.stack([devices, middle], axis=-1)
