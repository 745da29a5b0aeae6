"""Is a batch size that is a power of two faster than its neighbours? Sebastian Raschka's benchmark, with a test.

Raschka 2022, "No, We Don't Have to Choose Batch Sizes As Powers Of 2", timed ten epochs of MobileNetV3 once at each of
a few batch sizes around 128 and 512, and says that repeated runs would be more reliable. Here the steps of short trials
are timed at such batch sizes in rounds of shuffled order; whether one of them is out of line with its neighbours is
tested over the rounds (:mod:`bstune.sweeps.statistics`). A multiple of 8 that is no power of two is among them, since
hardware may prefer those; and so is the memory ceiling, since other batch sizes serve to fill the memory. His 100, 128
and 156 are stated against each other, and on several devices (his 255, 256 and 257) the steps are those of DDP.
"""

import functools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from rich.progress import track

from bstune.config import Composed
from bstune.core.errors import ConfigError
from bstune.core.records import TrialProtocol
from bstune.hardware.memory import Ceiling, ProbeResult
from bstune.hardware.probe import measure_ceiling
from bstune.hardware.several import shared_steps
from bstune.hardware.timing import StepTiming, busy_seconds, summarize, time_trial, visits
from bstune.report.drawing import BLUE, GREY, INK, VERMILION
from bstune.sweeps.harness import Finding
from bstune.sweeps.statistics import (
    ALIGNED,
    Choice,
    Effect,
    choose_batch_sizes,
    effects,
    gain,
    is_power_of_two,
    kind,
    off_the_line,
)
from bstune.system.console import format_number
from bstune.trial.devices.device import device_name
from bstune.trial.loop import Workload
from bstune.trial.workload import load, resolve

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from rich.console import Console

FIGURE_INCHES = (13.0, 5.2)
COLOURS = {"power of two": VERMILION, "multiple of 8": BLUE, "": GREY}  # by kind()
Timer = Callable[[Workload, TrialProtocol, int, float, int], tuple[float, ...]]
BUSY_VISITS = 3  # to each batch size, for the share of the device's time that is in use


@dataclass
class CeilingProbe:
    """How the memory ceiling is measured where none is given; see :func:`bstune.hardware.memory.measure_ceiling`."""

    low: int
    high: int
    cpu_bytes: int | None  # the limit on a CPU; None: what is free there
    relative: float
    steps: int
    seconds: float
    verify: int


def run(
    composed: Composed,
    console: "Console",
    *,
    batch_sizes: list[int],
    against_each_other: list[int],
    centres: list[int],
    ceiling: int | None,
    probe: CeilingProbe,
    repeats: int,
    steps: int,
    lr: float,
    level: float,
    seed: int,
    timer: Timer = time_trial,
    busy: Callable[[Workload, TrialProtocol, int, float, int], float] = busy_seconds,
    find_ceiling: Callable[..., Ceiling] = measure_ceiling,
) -> Finding:
    """Time the steps of a workload's trials around powers of two; tests replace the last three."""
    for name, value, least in (("repeats", repeats, 2), ("steps", steps, 1)):
        if value < least:
            raise ConfigError(f"sweep.experiment.{name} must be at least {least}, but got {value}")
    if not (0.0 < level < 1.0 and math.isfinite(lr) and lr > 0.0):
        raise ConfigError(
            f"sweep.experiment.level must lie between 0 and 1 and lr be positive, but got level={level} and lr={lr}"
        )
    if (
        len(against_each_other) not in (0, 3)
        or sorted(set(against_each_other)) != against_each_other
    ):
        raise ConfigError(
            "sweep.experiment.against_each_other must be three rising batch sizes or none, "
            f"but got {against_each_other}"
        )
    batch_sizes = [*batch_sizes, *against_each_other]
    choose_batch_sizes(
        batch_sizes, centres, max([*batch_sizes, *centres, 3])
    )  # refuses them before any probe
    options, recipe = resolve(composed.options, composed.trained)
    workload, protocol = load(options, recipe)
    if ceiling is None:
        find = functools.partial(find_ceiling, options, recipe)
        limit = probe.cpu_bytes if options.device == "cpu" else None
        ceiling = _measured(find, workload.train_examples, probe, limit, console)
    elif ceiling > workload.train_examples:
        raise ConfigError(
            f"sweep.experiment.ceiling={ceiling} is larger than the training data ({workload.train_examples} examples)"
        )
    choice = choose_batch_sizes(batch_sizes, centres, ceiling)
    if choice.left_out:
        console.print(
            f"left out, as they do not fit under {ceiling}: {', '.join(map(str, choice.left_out))}"
        )

    timed: dict[int, list[tuple[float, ...]]] = {size: [] for size in choice.sizes}
    order = visits(choice.sizes, repeats, seed)
    rounds_of = f"{repeats} rounds of {len(choice.sizes)} batch sizes"
    with ExitStack() as processes:
        time_steps = functools.partial(timer, workload, protocol)
        if options.devices > 1:
            # Of all the devices' processes, in place of trials in this one.
            time_steps = processes.enter_context(
                shared_steps(options, recipe, protocol.warmup_steps)
            )
        for size in track(order, rounds_of, console=console, transient=True):
            timed[size].append(time_steps(size, lr, steps))
    medians = {
        size: [statistics.median(visit) for visit in rounds] for size, rounds in timed.items()
    }
    found = effects(medians, choice.centres, level)
    filled = gain(medians, choice.power, choice.ceiling, level)
    in_use = {}
    if options.devices == 1:
        for size in choice.sizes:
            seconds = statistics.median(
                busy(workload, protocol, size, lr, steps) for _ in range(BUSY_VISITS)
            )
            in_use[size] = seconds / statistics.median(medians[size])
    summaries = {size: summarize(size, rounds) for size, rounds in timed.items()}
    rows = _rows(choice, summaries, medians, found, filled, in_use)
    parts = [sentence(found, choice, medians, filled, level)]
    if against_each_other and against_each_other[-1] <= choice.ceiling:
        parts.append(sentence_of_three(*against_each_other, medians, level))
    if in_use:
        ends = " and ".join(
            f"{in_use[size]:.0%} at B = {size}" for size in (choice.sizes[0], choice.ceiling)
        )
        parts.append(f"The device's time is in use to {ends}.")
    device = device_name(protocol.trainer, protocol.devices)
    title = f"{options.workload.name} in {options.precision}, {device}; n = {repeats} rounds"
    asked = {*batch_sizes, *(size + step for size in centres for step in (-1, 0, 1))}
    return Finding(
        sentence=" ".join(parts),
        rows=rows,
        n=repeats,
        device=device,
        paint=functools.partial(_paint, choice, asked, medians, found, level, title),
        inches=FIGURE_INCHES,
    )


def _measured(
    find: Callable[..., Ceiling],
    train_examples: int,
    probe: CeilingProbe,
    limit: int | None,
    console: "Console",
) -> int:
    """Measure the ceiling within a limit in bytes (None: what is free), and print it."""

    def report(result: ProbeResult) -> None:
        console.print(f"memory at batch size {result.batch_size}: {result.outcome}")

    found = find(
        probe.low,
        probe.high,
        train_examples,
        limit=limit,
        multiple=1,
        relative=probe.relative,
        steps=probe.steps,
        seconds=probe.seconds,
        largest_first=False,
        verify=probe.verify,
        report=report,
    )
    reached = (
        f"under {found.at.limit / 2**20:,.0f} MiB"
        if found.above is not None
        else "where the range ends"
    )
    console.print(f"ceiling {found.batch_size}, {reached}")
    for note in found.notes:
        console.print(note)
    return found.batch_size


def _rows(
    choice: Choice,
    timings: Mapping[int, StepTiming],
    medians: Mapping[int, Sequence[float]],
    found: Sequence[Effect],
    filled: Effect,
    in_use: Mapping[int, float],
) -> list[dict[str, Any]]:
    """Return one row a batch size, with its contrast if it is a centre, then one a group of centres."""
    single = {effect.centres[0]: effect for effect in found if len(effect.centres) == 1}
    rows: list[dict[str, Any]] = []
    for size in choice.sizes:
        speeds = [size / seconds for seconds in medians[size]]
        rows.append(
            {
                "batch_size": size,
                "what": "ceiling" if size == choice.ceiling else _sign(size),
                "n": len(speeds),
                "ms": 1e3 * statistics.mean(medians[size]),
                "ms_sd": _rounded(1e3 * statistics.stdev(medians[size])),
                "examples_per_second": statistics.mean(speeds),
                "examples_per_second_sd": _rounded(statistics.stdev(speeds)),
                "in_use": {"share": in_use[size], "visits": BUSY_VISITS} if in_use else {},
                **_effect_cells(single.get(size)),
                "seconds_of_rounds": list(medians[size]),
                "seconds_of_steps": asdict(timings[size]),  # median and quartiles over all of them
                "over_power_of_two": asdict(filled) if size == choice.ceiling else {},
            }
        )
    for effect in found:
        if len(effect.centres) > 1:
            what = "2^k" if all(map(is_power_of_two, effect.centres)) else f"{ALIGNED} x k"
            rows.append({"what": what, "n": effect.rounds, **_effect_cells(effect)})
    return rows


def _sign(size: int) -> str:
    """Return a batch size as what it is of: ``2^7``, ``8 x 15``, or nothing."""
    if is_power_of_two(size):
        return f"2^{size.bit_length() - 1}"
    return f"{ALIGNED} x {size // ALIGNED}" if kind(size) else ""


def _rounded(value: float) -> float:
    return float(f"{value:.3g}")


def _effect_cells(effect: Effect | None) -> dict[str, Any]:
    """Return what the table shows of an effect, p corrected and rounded up, and all of it for ``result.json``."""
    if effect is None:
        return {"percent": None, "p": None, "contrast": {}}
    shown = {"percent": round(100 * effect.mean, 2), "p": math.ceil(1e3 * effect.corrected) / 1e3}
    return {**shown, "contrast": asdict(effect)}


def share_text(effect: Effect) -> str:
    """Return an effect with its interval in percent: ``-0.42% (-1.10 to 0.26)``."""
    return f"{100 * effect.mean:+.2f}% ({100 * effect.low:+.2f} to {100 * effect.high:+.2f})"


def p_text(effect: Effect) -> str:
    """Return the corrected p: ``p = 0.021``, ``p < 0.001``."""
    return "p < 0.001" if effect.corrected < 0.001 else f"p = {effect.corrected:.2g}"


def sentence(
    found: Sequence[Effect],
    choice: Choice,
    medians: Mapping[int, Sequence[float]],
    filled: Effect,
    level: float,
) -> str:
    """Return the finding in words: which batch sizes differ from their neighbours, and what the ceiling gives."""
    rounds = found[0].rounds
    significant = [effect for effect in found if effect.corrected < 1.0 - level]
    room = max(max(abs(effect.low), abs(effect.high)) for effect in found)
    if significant:
        listed = "; ".join(
            f"{effect.name} {share_text(effect)}, {p_text(effect)}" for effect in significant
        )
        first = (
            f"Over {rounds} rounds a step's time differs from the mean of its two neighbours' at {listed}"
            f" ({level:.0%} intervals, p corrected for {len(found)} tests)"
        )
    else:
        first = (
            f"Over {rounds} rounds no power of two and no multiple of 8 differs significantly from the mean of its two"
            f" neighbours (least {p_text(min(found, key=lambda effect: effect.corrected))}, corrected for"
            f" {len(found)} tests); the {level:.0%} intervals leave room for {format_number(100 * room, 2)}% at most"
        )
    speeds = [_speed_text(size, medians[size]) for size in (choice.ceiling, choice.power)]
    return (
        f"{first}. At the ceiling, B = {choice.ceiling}, {speeds[0]} examples/s, against {speeds[1]} at"
        f" B = {choice.power}, the largest power of two below it: {share_text(filled)}."
    )


def sentence_of_three(
    low: int, middle: int, high: int, medians: Mapping[int, Sequence[float]], level: float
) -> str:
    """Return in words what three batch sizes give a second, and whether the middle one is off the others' line."""
    speeds = [share_text(gain(medians, *pair, level)) for pair in ((low, middle), (middle, high))]
    return (
        f"Against each other: B = {middle} gives {speeds[0]} examples/s over {low}, {high} {speeds[1]} over {middle}; "
        f"a step at {middle} takes {share_text(off_the_line(medians, low, middle, high, level))} against the line "
        f"through {low} and {high}."
    )


def _speed_text(size: int, seconds: Sequence[float]) -> str:
    speeds = [size / value for value in seconds]
    return f"{format_number(statistics.mean(speeds), 4)} (SD {format_number(statistics.stdev(speeds), 2)})"


def _paint(
    choice: Choice,
    asked: set[int],
    medians: Mapping[int, Sequence[float]],
    found: Sequence[Effect],
    level: float,
    title: str,
    figure: "Figure",
) -> None:
    """Draw examples per second of each group of batch sizes, and the contrasts with their intervals."""
    near = [size for size in choice.sizes if size in asked]
    top = [size for size in choice.sizes if size not in asked]
    groups = [group for group in (near, top) if group]
    widths = [len(group) + 1.0 for group in groups]
    panels = figure.subplots(1, len(groups) + 1, width_ratios=[*widths, 0.8 * sum(widths)])
    for axes, group in zip(panels, groups, strict=False):
        _draw_speeds(axes, group, medians, choice)
    panels[0].set_ylabel("examples per second, mean and standard deviation over rounds")
    _draw_effects(panels[-1], found, level)
    figure.suptitle(title, fontsize=10.5, parse_math=False)
    handles: dict[str, Any] = {}
    for axes in panels:
        handles |= dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    names = [
        name
        for name in ("power of two", "multiple of 8", "other batch size", "ceiling")
        if name in handles
    ]
    figure.legend(
        [handles[name] for name in names],
        names,
        loc="outside lower center",
        ncols=4,
        fontsize=8.5,
        frameon=False,
    )


def _draw_speeds(
    axes: "Axes", group: Sequence[int], medians: Mapping[int, Sequence[float]], choice: Choice
) -> None:
    """Draw one point a batch size, evenly spaced: 127, 128 and 129 would be one on a true axis."""
    for place, size in enumerate(group):
        speeds = [size / seconds for seconds in medians[size]]
        mean, deviation = statistics.mean(speeds), statistics.stdev(speeds)
        if size == choice.ceiling:
            ring: dict[str, Any] = {
                "facecolor": "none",
                "edgecolor": INK,
                "s": 130,
                "linewidths": 1.0,
            }
            axes.scatter([place], [mean], label="ceiling", **ring)
        axes.errorbar(
            place,
            mean,
            yerr=deviation,
            fmt="o",
            color=COLOURS[kind(size)],
            capsize=3.5,
            markersize=6.0,
            label=kind(size) or "other batch size",
        )
    axes.set_xticks(
        range(len(group)),
        [format_number(size, 6) for size in group],
        rotation=45 if len(group) > 5 else 0,
    )
    axes.set_xlim(-0.6, len(group) - 0.4)
    axes.set_xlabel("batch size B")
    axes.grid(axis="y", color=INK, alpha=0.07, linewidth=0.6)


def _draw_effects(axes: "Axes", found: Sequence[Effect], level: float) -> None:
    """Draw one row an effect, with its interval and its p."""
    axes.axvline(0.0, color=INK, linewidth=0.8)
    for row, effect in enumerate(found):
        reach = [[100 * (effect.mean - effect.low)], [100 * (effect.high - effect.mean)]]
        colour = VERMILION if all(is_power_of_two(centre) for centre in effect.centres) else BLUE
        marker = "o" if len(effect.centres) == 1 else "D"
        axes.errorbar(
            100 * effect.mean,
            row,
            xerr=reach,
            fmt=marker,
            color=colour,
            capsize=3.5,
            markersize=6.0,
        )
        axes.annotate(
            p_text(effect),
            (100 * effect.mean, row),
            xytext=(0.0, 7.0),
            textcoords="offset points",
            ha="center",
            fontsize=8.5,
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.75, "pad": 0.5},
        )
    axes.set_yticks(range(len(found)), [effect.name.replace(" (", "\n(") for effect in found])
    axes.set_ylim(len(found) - 0.4, -0.6)
    axes.set_xlabel(
        f"step time against the mean of both neighbours, %\n(left of 0: faster; {level:.0%} intervals, p by Holm)"
    )
    axes.grid(axis="x", color=INK, alpha=0.07, linewidth=0.6)
