"""Is a power of two faster than its neighbours? Sebastian Raschka's benchmark, with a test.

Raschka 2022, "No, We Don't Have to Choose Batch Sizes As Powers Of 2", timed ten epochs of
MobileNetV3 once at each of a few batch sizes around 128 and 512, and says that repeated runs would
be more reliable. Here the steps of short trials are timed at such batch sizes. A round times each
of them once, in shuffled order, and a test over the rounds says whether one of them is out of line
with its neighbours (:mod:`bstune.sweeps.statistics`). A multiple of 8 that is no power of two is
among them, since hardware may prefer those. So is the memory ceiling, since other batch sizes serve
to fill the memory. His 100, 128 and 156 are compared with each other, and on several devices (his
255, 256 and 257) the steps are those of DDP.

The ceiling and each round are kept as they end (:mod:`bstune.sweeps.unit_log`).
"""

import functools
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from bstune.config import Composed
from bstune.core.errors import ConfigError
from bstune.core.records import TrialProtocol
from bstune.hardware.memory import Ceiling, ProbeResult
from bstune.hardware.probe import measure_ceiling
from bstune.hardware.several_devices import shared_steps
from bstune.hardware.timing import (
    StepTiming,
    busy_seconds,
    summarize_visits,
    time_trial,
    visit_order,
)
from bstune.options import StudyOptions
from bstune.recipe import Recipe
from bstune.report.drawing import BLUE, GREY, INK, VERMILION
from bstune.sweeps.harness import Finding
from bstune.sweeps.statistics import (
    ALIGNED,
    Choice,
    Effect,
    choose_batch_sizes,
    is_power_of_two,
    kind_of_size,
    off_the_line,
    speed_gain,
    triplet_effects,
    triplets,
)
from bstune.sweeps.unit_log import UnitLog, UnitPlan, check_only
from bstune.system.console import format_number
from bstune.trial.devices.device import device_name
from bstune.trial.loop import Workload
from bstune.trial.workload import load_workload, resolve

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from rich.console import Console

POWERS_FIGURE_INCHES = (13.0, 5.2)
# The colour of a batch size, by its kind as kind_of_size() names it.
COLOUR_OF_KIND = {"power of two": VERMILION, "multiple of 8": BLUE, "": GREY}
OTHER_KIND = "other batch size"
# The order of the figure's legend.
LEGEND_ORDER = ("power of two", "multiple of 8", OTHER_KIND, "ceiling")
# Visits to each batch size that measure the share of the device's time that is in use.
BUSY_VISITS = 3
# The names of the units that are no rounds.
CEILING_UNIT = "ceiling"
BUSY_UNIT = "busy"
# Times steps of a workload's trials, at a batch size and a learning rate; the last argument says
# how many. Gives the seconds of each step ...
Timer = Callable[[Workload, TrialProtocol, int, float, int], tuple[float, ...]]
# ... or the seconds of one step in which the device is at work.
BusyTimer = Callable[[Workload, TrialProtocol, int, float, int], float]
# Seconds of a step in each round, by batch size.
RoundsBySize = Mapping[int, Sequence[float]]


@dataclass
class CeilingProbe:
    """How :func:`bstune.hardware.probe.measure_ceiling` finds a ceiling that is not given."""

    low: int
    high: int
    # The limit on a CPU; None: the memory that is free.
    cpu_bytes: int | None
    relative: float
    steps: int
    seconds: float
    verify: int


def run(
    composed: Composed,
    console: "Console",
    log: UnitLog,
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
    only: list[str],
    timer: Timer = time_trial,
    busy: BusyTimer = busy_seconds,
    find_ceiling: Callable[..., Ceiling] = measure_ceiling,
) -> Finding:
    """Time the steps of a workload's trials around powers of two, and test which are out of line.

    Args:
        composed: the workload.
        console: for lines.
        log: keeps the ceiling, the rounds and the busy seconds of the device.
        batch_sizes: timed alone, without neighbours.
        against_each_other: three rising batch sizes to compare, or none.
        centres: batch sizes that are tested against their neighbours, one below and one above.
        ceiling: the largest batch size that fits; None: it is measured.
        probe: how the ceiling is measured.
        repeats: the number of rounds.
        steps: timed at a visit, one batch size's turn in a round.
        lr: of all trials.
        level: the nominal coverage of the intervals, between 0 and 1.
        seed: of the order.
        only: the units to measure now; empty: all.
        timer: times steps; tests replace it.
        busy: times the device's work in steps; tests replace it.
        find_ceiling: measures the ceiling; tests replace it.
    """
    _check_choices(repeats, steps, level, lr, against_each_other)
    batch_sizes = [*batch_sizes, *against_each_other]
    # The ceiling is not known yet. Choosing under one above all batch sizes (3 is the least that
    # there may be) refuses, before any probe, those that no ceiling would allow.
    ceiling_above_all = max([*batch_sizes, *centres, 3])
    choose_batch_sizes(batch_sizes, centres, ceiling_above_all)
    options, recipe = resolve(composed.options, composed.trained_recipe)
    workload, protocol = load_workload(options, recipe)
    if ceiling is not None and ceiling > workload.train_examples:
        raise ConfigError(
            f"sweep.experiment.ceiling={ceiling} is larger than the training data "
            f"({workload.train_examples} examples)"
        )
    round_names = [f"round/{number}" for number in range(1, repeats + 1)]
    unit_names = _unit_names(round_names, options, ceiling)
    check_only(only, unit_names)
    device = device_name(protocol.trainer, protocol.devices)
    # More rounds, or another level, keep the rounds that the log already has.
    log.begin(device, ("repeats", "level"))
    if ceiling is None:
        measure_now = functools.partial(
            _measure_ceiling,
            functools.partial(find_ceiling, options, recipe),
            workload.train_examples,
            probe,
            _limit_of(options, probe),
            console,
        )
        ceiling = _ceiling_of_log(log, measure_now)
    choice = choose_batch_sizes(batch_sizes, centres, ceiling)
    if choice.left_out:
        console.print(
            f"left out, as they do not fit under {ceiling}: {', '.join(map(str, choice.left_out))}"
        )
    timed_steps = _TimedSteps(
        options=options,
        recipe=recipe,
        workload=workload,
        protocol=protocol,
        batch_sizes=choice.sizes,
        steps=steps,
        lr=lr,
        timer=timer,
        busy=busy,
    )
    visits_of_round = _visits_by_round(choice.sizes, round_names, seed)
    rounds_plan = UnitPlan(
        names=round_names, only=only, noun="round", read=_read_round, choices=unit_names
    )
    measured_rounds = log.measure_as_they_end(
        rounds_plan, functools.partial(timed_steps.time_rounds, visits_of_round)
    )
    busy_units = _measure_busy(log, timed_steps, unit_names, only)
    log.check_finished(unit_names, {CEILING_UNIT, *measured_rounds, *busy_units})
    title = f"{options.workload.name} in {options.precision}, {device}; n = {repeats} rounds"
    return _make_finding(
        choice=choice,
        # The figure has a panel of its own for batch sizes that only the ceiling brings in.
        asked={*batch_sizes, *triplets(centres)},
        timed=_rounds_by_size(choice.sizes, measured_rounds.values()),
        busy_by_size=busy_units.get(BUSY_UNIT, {}),
        against_each_other=against_each_other,
        level=level,
        device=device,
        title=title,
    )


def _ceiling_of_log(log: UnitLog, measure: Callable[[], int]) -> int:
    """Give the ceiling that the log has kept, or measure it now, by ``measure``."""
    # It is measured whatever units are chosen: the other batch sizes follow from it.
    plan = UnitPlan(names=[CEILING_UNIT], only=(), noun="ceiling", read=int)
    return log.measure(plan, lambda name: measure())[CEILING_UNIT]


def _measure_busy(
    log: UnitLog, timed_steps: "_TimedSteps", unit_names: Sequence[str], only: Sequence[str]
) -> dict[str, dict[int, float]]:
    """Give the seconds of a step in which the device is at work, by batch size, as one unit.

    They are those that the log has kept, or measured now. It is empty where the sweep has no such
    unit, and where that is not kept and ``only``, the units to measure now, leaves it out.
    """
    if BUSY_UNIT not in unit_names:
        return {}
    plan = UnitPlan(
        names=[BUSY_UNIT], only=only, noun="measurement", read=_read_busy, choices=unit_names
    )
    return log.measure(plan, lambda name: timed_steps.time_busy())


def _rounds_by_size(
    sizes: Iterable[int], rounds: Iterable[Mapping[int, tuple[float, ...]]]
) -> dict[int, list[tuple[float, ...]]]:
    """Group the seconds of steps by batch size: a tuple for each round.

    ``rounds`` has the seconds of the round's steps by batch size, for each round.
    """
    by_size: dict[int, list[tuple[float, ...]]] = {size: [] for size in sizes}
    for visits in rounds:
        for size, seconds in visits.items():
            by_size[size].append(seconds)
    return by_size


def _visits_by_round(
    sizes: Sequence[int], round_names: Sequence[str], seed: int
) -> dict[str, Sequence[int]]:
    """Give the order in which each round visits all batch sizes, by the round's name."""
    order = visit_order(sizes, len(round_names), seed)
    visits = dict[str, Sequence[int]]()
    for number, name in enumerate(round_names):
        first = number * len(sizes)
        visits[name] = order[first : first + len(sizes)]
    return visits


def _unit_names(
    round_names: Sequence[str], options: StudyOptions, ceiling: int | None
) -> list[str]:
    """Name all units: the ceiling unless it is given, the rounds, and the device's time in use.

    The ceiling is the largest batch size that fits into memory.
    """
    names = list(round_names)
    if ceiling is None:
        names.insert(0, CEILING_UNIT)
    # Several devices have no one share of time in use.
    if options.devices == 1:
        names.append(BUSY_UNIT)
    return names


def _limit_of(options: StudyOptions, probe: CeilingProbe) -> int | None:
    """Give the bytes that a probe may take; None on CUDA, whose device's memory is the limit."""
    if options.device == "cpu":
        return probe.cpu_bytes
    return None


@dataclass(frozen=True)
class _TimedSteps:
    """Times steps of a workload's trials, by batch size."""

    options: StudyOptions
    recipe: Recipe
    workload: Workload
    protocol: TrialProtocol
    batch_sizes: Sequence[int]
    # The steps of a visit.
    steps: int
    lr: float
    timer: Timer
    busy: BusyTimer

    def time_rounds(
        self, visits_of_round: Mapping[str, Sequence[int]], names: Sequence[str]
    ) -> Iterator[tuple[str, dict[int, tuple[float, ...]]]]:
        """Yield each round's name, and the seconds of its steps by batch size.

        ``visits_of_round`` has the batch sizes of each round in the order in which they are
        visited.
        """
        with ExitStack() as processes:
            time_steps: Callable[[int, float, int], tuple[float, ...]]
            time_steps = functools.partial(self.timer, self.workload, self.protocol)
            if self.options.devices > 1:
                # The steps run in the devices' processes, not in this one.
                time_steps = processes.enter_context(
                    shared_steps(self.options, self.recipe, self.protocol.warmup_steps)
                )
            for name in names:
                sizes = visits_of_round[name]
                yield name, {size: time_steps(size, self.lr, self.steps) for size in sizes}

    def time_busy(self) -> dict[int, float]:
        """Give the seconds of a step in which the device is at work, by batch size.

        They are the median of BUSY_VISITS visits to the batch size, of ``self.steps`` steps each.
        """
        medians = dict[int, float]()
        for size in self.batch_sizes:
            seconds = list[float]()
            for _ in range(BUSY_VISITS):
                seconds.append(self.busy(self.workload, self.protocol, size, self.lr, self.steps))
            medians[size] = statistics.median(seconds)
        return medians


def _make_finding(
    choice: Choice,
    asked: set[int],
    timed: Mapping[int, Sequence[tuple[float, ...]]],
    busy_by_size: Mapping[int, float],
    against_each_other: Sequence[int],
    level: float,
    device: str,
    title: str,
) -> Finding:
    """Test the contrasts and make the finding.

    Args:
        choice: the batch sizes, with the ceiling, the largest that fits into memory.
        asked: the batch sizes that the user asked for, whatever the ceiling.
        timed: the seconds of each step of each round, by batch size.
        busy_by_size: the seconds of a step in which the device is at work, by batch size; empty
            where they were not measured.
        against_each_other: three rising batch sizes, or none.
        level: the nominal coverage of the intervals, between 0 and 1.
        device: its name.
        title: of the figure.
    """
    medians = dict[int, list[float]]()
    for size, rounds in timed.items():
        medians[size] = list(map(statistics.median, rounds))
    tested = triplet_effects(medians, choice.centres, level)
    ceiling_gain = speed_gain(medians, choice.power, choice.ceiling, level)
    in_use = dict[int, float]()
    for size, seconds in busy_by_size.items():
        in_use[size] = seconds / statistics.median(medians[size])
    summaries = {size: summarize_visits(size, rounds) for size, rounds in timed.items()}
    parts = [sentence(tested, choice, medians, ceiling_gain, level)]
    # The middle one's steps are compared with a line through the other two: all three must fit.
    if against_each_other and against_each_other[-1] <= choice.ceiling:
        low, middle, high = against_each_other
        parts.append(sentence_of_three(low, middle, high, medians, level))
    if in_use:
        smallest = choice.sizes[0]
        parts.append(
            f"The device's time is in use to {in_use[smallest]:.0%} at B = {smallest} and "
            f"{in_use[choice.ceiling]:.0%} at B = {choice.ceiling}."
        )
    return Finding(
        sentence=" ".join(parts),
        rows=_rows_of_sizes(choice, summaries, medians, tested, ceiling_gain, in_use),
        n=len(medians[choice.ceiling]),
        device=device,
        paint=functools.partial(_paint_speeds, choice, asked, medians, tested, level, title),
        inches=POWERS_FIGURE_INCHES,
    )


def _read_round(values: Mapping[str, Sequence[float]]) -> dict[int, tuple[float, ...]]:
    """Read the seconds of a round's steps by batch size, which is a text in JSON."""
    return {int(size): tuple(seconds) for size, seconds in values.items()}


def _read_busy(values: Mapping[str, float]) -> dict[int, float]:
    """Read the busy seconds of a step by batch size, which is a text in JSON."""
    return {int(size): float(seconds) for size, seconds in values.items()}


def _check_choices(
    repeats: int, steps: int, level: float, lr: float, against_each_other: Sequence[int]
) -> None:
    """Refuse numbers that are out of their range."""
    if repeats < 2:
        raise ConfigError(f"sweep.experiment.repeats must be at least 2, but got {repeats}")
    if steps < 1:
        raise ConfigError(f"sweep.experiment.steps must be at least 1, but got {steps}")
    if not (0.0 < level < 1.0 and math.isfinite(lr) and lr > 0.0):
        raise ConfigError(
            "sweep.experiment.level must lie between 0 and 1 and lr be positive, but got "
            f"level={level} and lr={lr}"
        )
    rising = sorted(set(against_each_other)) == against_each_other
    if len(against_each_other) not in (0, 3) or not rising:
        raise ConfigError(
            "sweep.experiment.against_each_other must be three rising batch sizes or none, "
            f"but got {against_each_other}"
        )


def _measure_ceiling(
    find: Callable[..., Ceiling],
    train_examples: int,
    probe: CeilingProbe,
    limit: int | None,
    console: "Console",
) -> int:
    """Measure the memory ceiling, print it, and give it: the largest batch size that fits.

    ``find`` is ``measure_ceiling``, whose other options are those of ``probe``. ``limit`` is in
    bytes; None: all that is free.
    """

    def report(result: ProbeResult) -> None:
        console.print(f"memory at batch size {result.batch_size}: {result.outcome}")

    ceiling = find(
        probe.low,
        probe.high,
        train_examples,
        limit=limit,
        # Any batch size may be the ceiling.
        multiple=1,
        relative=probe.relative,
        steps=probe.steps,
        seconds=probe.seconds,
        # Probes go up from the low end, as the high end need not fit.
        largest_first=False,
        verify=probe.verify,
        report=report,
    )
    reached = "where the range ends"
    if ceiling.above is not None:
        reached = f"under {ceiling.at.limit / 2**20:,.0f} MiB"
    console.print(f"ceiling {ceiling.batch_size}, {reached}")
    for note in ceiling.notes:
        console.print(note)
    return ceiling.batch_size


def _rows_of_sizes(
    choice: Choice,
    timings: Mapping[int, StepTiming],
    medians: RoundsBySize,
    tested: Sequence[Effect],
    ceiling_gain: Effect,
    in_use: Mapping[int, float],
) -> list[dict[str, object]]:
    """Make a row for each batch size, then one for each effect over several of them.

    The row of a triplet's centre has its contrast: how much longer its step takes than the mean of
    its two neighbours'.

    Args:
        choice: the batch sizes, with the ceiling, the largest that fits into memory.
        timings: summaries of the steps of all rounds, by batch size.
        medians: the median seconds of a step in each round, by batch size.
        tested: the effects.
        ceiling_gain: the ceiling's examples per second over those at the power of two below it.
        in_use: the share of the device's time in use, by batch size; empty where not measured.
    """
    effect_of_centre = dict[int, Effect]()
    for effect in tested:
        if len(effect.centres) == 1:
            (centre,) = effect.centres
            effect_of_centre[centre] = effect
    rows = list[dict[str, object]]()
    for size in choice.sizes:
        size_text = _what_it_is(size)
        over_power_of_two = dict[str, object]()
        if size == choice.ceiling:
            size_text = "ceiling"
            over_power_of_two = asdict(ceiling_gain)
        share_in_use = dict[str, object]()
        if in_use:
            share_in_use = {"share": in_use[size], "visits": BUSY_VISITS}
        speeds = _speeds(size, medians[size])
        rows.append(
            {
                "batch_size": size,
                "what": size_text,
                "n": len(speeds),
                "ms": 1e3 * statistics.mean(medians[size]),
                "ms_sd": _three_digits(1e3 * statistics.stdev(medians[size])),
                "examples_per_second": statistics.mean(speeds),
                "examples_per_second_sd": _three_digits(statistics.stdev(speeds)),
                "in_use": share_in_use,
                **_effect_cells(effect_of_centre.get(size)),
                "seconds_of_rounds": list(medians[size]),
                # Median and quartiles over the steps of all rounds.
                "seconds_of_steps": asdict(timings[size]),
                "over_power_of_two": over_power_of_two,
            }
        )
    for effect in tested:
        if len(effect.centres) > 1:
            size_text = f"{ALIGNED} x k"
            if _is_of_powers(effect):
                size_text = "2^k"
            rows.append({"what": size_text, "n": effect.rounds, **_effect_cells(effect)})
    return rows


def _speeds(size: int, seconds: Sequence[float]) -> list[float]:
    """Give the examples per second of each round, from the seconds of a step in it."""
    return [size / seconds_of_round for seconds_of_round in seconds]


def _is_of_powers(effect: Effect) -> bool:
    """Tell whether an effect is about powers of two alone."""
    return all(map(is_power_of_two, effect.centres))


def _what_it_is(size: int) -> str:
    """Write a batch size as ``2^7`` or ``8 x 15``; empty for another one."""
    if is_power_of_two(size):
        return f"2^{size.bit_length() - 1}"
    if kind_of_size(size):
        return f"{ALIGNED} x {size // ALIGNED}"
    return ""


def _three_digits(value: float) -> float:
    """Round a standard deviation to three digits: over few rounds its own error is far larger."""
    return float(f"{value:.3g}")


def _effect_cells(effect: Effect | None) -> dict[str, object]:
    """Make a row's cells of an effect: percent, p corrected and rounded up, and all its values.

    They are None for no effect.
    """
    if effect is None:
        return {"percent": None, "p": None, "contrast": {}}
    # A p that is rounded up does not look more significant than it is.
    return {
        "percent": round(100 * effect.mean, 2),
        "p": math.ceil(1e3 * effect.corrected) / 1e3,
        "contrast": asdict(effect),
    }


def share_text(effect: Effect) -> str:
    """Write an effect with its interval in percent: ``-0.42% (-1.10 to +0.26)``."""
    return f"{100 * effect.mean:+.2f}% ({100 * effect.low:+.2f} to {100 * effect.high:+.2f})"


def p_text(effect: Effect) -> str:
    """Write the corrected p of an effect: ``p = 0.021``, ``p < 0.001``."""
    if effect.corrected < 0.001:
        return "p < 0.001"
    return f"p = {effect.corrected:.2g}"


def sentence(
    tested: Sequence[Effect],
    choice: Choice,
    medians: RoundsBySize,
    ceiling_gain: Effect,
    level: float,
) -> str:
    """Say which batch sizes differ from their neighbours, and how fast the ceiling is.

    The ceiling is the largest batch size that fits into memory. ``tested`` has the contrasts.
    """
    at_ceiling = _speed_text(choice.ceiling, medians[choice.ceiling])
    at_power = _speed_text(choice.power, medians[choice.power])
    return (
        f"{_contrasts_in_words(tested, level)}. At the ceiling, B = {choice.ceiling}, {at_ceiling} "
        f"examples/s, against {at_power} at B = {choice.power}, the largest power of two below it: "
        f"{share_text(ceiling_gain)}."
    )


def _contrasts_in_words(tested: Sequence[Effect], level: float) -> str:
    """Say which batch sizes differ from their neighbours; if none, how large an effect may be."""
    rounds = tested[0].rounds
    significant = [effect for effect in tested if effect.corrected < 1.0 - level]
    if significant:
        texts = list[str]()
        for effect in significant:
            texts.append(f"{effect.name} {share_text(effect)}, {p_text(effect)}")
        return (
            f"Over {rounds} rounds a step's time differs from the mean of its two neighbours' at "
            f"{'; '.join(texts)} ({level:.0%} intervals, p corrected for {len(tested)} tests)"
        )
    # No significant effect does not mean no effect: one up to this size would not have been seen.
    largest_unseen = max(max(abs(effect.low), abs(effect.high)) for effect in tested)
    room = format_number(100 * largest_unseen, 2)
    least = min(tested, key=lambda effect: effect.corrected)
    return (
        f"Over {rounds} rounds no power of two and no multiple of 8 differs significantly from the "
        f"mean of its two neighbours (least {p_text(least)}, corrected for {len(tested)} tests); "
        f"the {level:.0%} intervals leave room for {room}% at most"
    )


def sentence_of_three(low: int, middle: int, high: int, medians: RoundsBySize, level: float) -> str:
    """Compare the speeds of three batch sizes, and the middle one's step with the other two's.

    The middle one's seconds are compared with the straight line through the others' over batch
    size. ``medians`` has the median seconds of a step in each round; ``level``: of the intervals.
    """
    lower = share_text(speed_gain(medians, low, middle, level))
    upper = share_text(speed_gain(medians, middle, high, level))
    off_line = share_text(off_the_line(medians, low, middle, high, level))
    return (
        f"Against each other: B = {middle} gives {lower} examples/s over {low}, {high} {upper} "
        f"over {middle}; a step at {middle} takes {off_line} against the line through {low} and "
        f"{high}."
    )


def _speed_text(size: int, seconds: Sequence[float]) -> str:
    """Write the mean of examples per second over rounds, with its standard deviation."""
    speeds = _speeds(size, seconds)
    mean = format_number(statistics.mean(speeds), 4)
    deviation = format_number(statistics.stdev(speeds), 2)
    return f"{mean} (SD {deviation})"


def _paint_speeds(
    choice: Choice,
    asked: set[int],
    medians: RoundsBySize,
    tested: Sequence[Effect],
    level: float,
    title: str,
    figure: "Figure",
) -> None:
    """Draw examples per second by group of batch sizes, and the contrasts with their intervals.

    ``asked`` has the batch sizes that the user asked for. The others are the ceiling, which is the
    largest that fits into memory, and the largest power of two below it with its neighbours.
    """
    # Batch sizes around the ceiling are far from the others, and have a scale of their own.
    asked_sizes = [size for size in choice.sizes if size in asked]
    other_sizes = [size for size in choice.sizes if size not in asked]
    groups = list(filter(None, (asked_sizes, other_sizes)))
    widths = [len(group) + 1.0 for group in groups]
    # The last panel has the contrasts.
    panels = figure.subplots(1, len(groups) + 1, width_ratios=[*widths, 0.8 * sum(widths)])
    for axes, group in zip(panels, groups, strict=False):
        _draw_speeds(axes, group, medians, choice)
    panels[0].set_ylabel("examples per second, mean and standard deviation over rounds")
    _draw_effects(panels[-1], tested, level)
    figure.suptitle(title, fontsize=10.5, parse_math=False)
    handles: dict[str, Artist] = {}
    for axes in panels:
        handles_of_panel, labels = axes.get_legend_handles_labels()
        handles |= dict(zip(labels, handles_of_panel, strict=True))
    in_order = dict[str, "Artist"]()
    for name in LEGEND_ORDER:
        if name in handles:
            in_order[name] = handles[name]
    figure.legend(
        list(in_order.values()),
        list(in_order),
        loc="outside lower center",
        ncols=4,
        fontsize=8.5,
        frameon=False,
    )


def _draw_speeds(axes: "Axes", group: Sequence[int], medians: RoundsBySize, choice: Choice) -> None:
    """Draw a point for each batch size, evenly spaced: on a true axis 127 to 129 would be one.

    The ceiling is the largest batch size that fits into memory.
    """
    for place, size in enumerate(group):
        speeds = _speeds(size, medians[size])
        mean = statistics.mean(speeds)
        if size == choice.ceiling:
            # The ceiling has a ring around its point, which keeps its colour.
            axes.scatter(
                [place],
                [mean],
                label="ceiling",
                facecolor="none",
                edgecolor=INK,
                s=130,
                linewidths=1.0,
            )
        axes.errorbar(
            place,
            mean,
            yerr=statistics.stdev(speeds),
            fmt="o",
            color=COLOUR_OF_KIND[kind_of_size(size)],
            capsize=3.5,
            markersize=6.0,
            label=kind_of_size(size) or OTHER_KIND,
        )
    labels = [format_number(size, 6) for size in group]
    # So many labels side by side would run into each other.
    rotation = 45 if len(group) > 5 else 0
    axes.set_xticks(range(len(group)), labels, rotation=rotation)
    axes.set_xlim(-0.6, len(group) - 0.4)
    axes.set_xlabel("batch size B")
    axes.grid(axis="y", color=INK, alpha=0.07, linewidth=0.6)


def _draw_effects(axes: "Axes", tested: Sequence[Effect], level: float) -> None:
    """Draw a row for each effect, with its interval and its p."""
    axes.axvline(0.0, color=INK, linewidth=0.8)
    for row, effect in enumerate(tested):
        reach = [[100 * (effect.mean - effect.low)], [100 * (effect.high - effect.mean)]]
        colour = VERMILION if _is_of_powers(effect) else BLUE
        # A group of batch sizes is a diamond, as a mean over several usually is.
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
    axes.set_yticks(range(len(tested)), [effect.name.replace(" (", "\n(") for effect in tested])
    # The first effect stands at the top.
    axes.set_ylim(len(tested) - 0.4, -0.6)
    axes.set_xlabel(
        f"step time against the mean of both neighbours, %\n(left of 0: faster; {level:.0%} "
        "intervals, p by Holm)"
    )
    axes.grid(axis="x", color=INK, alpha=0.07, linewidth=0.6)
