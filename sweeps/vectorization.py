"""A matrix product in four ways: the same arithmetic in pieces of different size.

Zhang, Lipton, Li and Smola, Dive into Deep Learning, 12.5.1 and 12.5.2: A = B C element by element
(dot products), column by column (products of the matrix and a vector), in blocks of columns, and
whole. A product of n x n matrices is counted as 2 n^3 FLOPs, a multiplication and an addition being
one each. What pieces cost is their calls, and what they leave in the caches (12.5.1): so vectors of
growing size are read as well, each again and again by sums over it. A vector's numbers are then
gathered in three orders, which differ in nothing but the addresses: in order, with a stride, and at
random. Memory gives a line of many numbers whichever of them is asked for, and fetches ahead what
comes in order.

A repeat of all ways, one of all readings and one of all orders is kept as it ends
(:mod:`bstune.sweeps.unit_log`).
"""

import functools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

import numpy as np
import torch
from pydantic import TypeAdapter
from torch import Tensor
from torch.utils.benchmark import Timer

from bstune.core.errors import ConfigError
from bstune.hardware.roofline import DTYPES
from bstune.report.drawing import BLUE, INK
from bstune.sweeps.harness import Finding
from bstune.sweeps.statistics import QUARTILES
from bstune.sweeps.unit_log import UnitLog, UnitPlan, check_only
from bstune.system.console import format_number
from bstune.trial.devices.device import device_name, resolve_device, synchronize

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Tf32 is a mode of fp32's, no type.
FLOATS = {name: dtype for name, dtype in DTYPES.items() if name != "tf32"}
PRODUCT_FIGURE_INCHES = (15.0, 4.5)
CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
# In one call at least, so that what a call costs is no part of it.
READ_BYTES = 2**26
# Bytes of a KiB, and of a number in fp32.
KIB = 2**10
FP32_BYTES = 4
NO_CACHE = "no cache"
# Numbers between two that are read one after another: 64 bytes, a line of most processors' caches.
STRIDE = 16
# Seconds, below which torch read a clock that stands still: it takes 1e-9 then.
STANDING_STILL = 1e-8
Way = Callable[[Tensor, Tensor, Tensor], None]
# Of a repeat: seconds of one call, by way; without those that have had their time.
RepeatSeconds = dict[str, float]
READ_REPEAT: TypeAdapter[RepeatSeconds] = TypeAdapter(RepeatSeconds)


class ProductRow(TypedDict):
    """A way's GFLOP/s over its repeats: the median and the quartiles."""

    way: str
    repeats: int
    gflops: float
    gflops_low: float
    gflops_high: float
    times_as_fast: float


class ReadRow(TypedDict):
    """GB/s of reading a vector again and again: the median and the quartiles."""

    way: str
    repeats: int
    gb_per_second: float
    gb_low: float
    gb_high: float
    # The smallest cache that holds it; None where the system does not say.
    fits: str | None
    kib: int


class OrderRow(TypedDict):
    """GB/s of gathering a vector's numbers in one order: the median and the quartiles."""

    way: str
    repeats: int
    gb_per_second: float
    gb_low: float
    gb_high: float
    # Seconds over those in order.
    times_as_long: float


def element_by_element(a: Tensor, b: Tensor, c: Tensor) -> None:
    """Write b c, both (n, n), into a: n^2 dot products."""
    n = len(a)
    for i in range(n):
        for j in range(n):
            a[i, j] = torch.dot(b[i, :], c[:, j])


def column_by_column(a: Tensor, b: Tensor, c: Tensor) -> None:
    """Write b c, both (n, n), into a: n products of a matrix and a vector."""
    for j in range(len(a)):
        a[:, j] = torch.mv(b, c[:, j])


def in_blocks(a: Tensor, b: Tensor, c: Tensor, block: int) -> None:
    """Write b c, both (n, n), into a: products of a matrix and ``block`` columns at a time."""
    for j in range(0, len(a), block):
        a[:, j : j + block] = torch.mm(b, c[:, j : j + block])


def whole(a: Tensor, b: Tensor, c: Tensor) -> None:
    """Write b c, both (n, n), into a: one product of matrices."""
    torch.mm(b, c, out=a)


def ways(block: int) -> dict[str, Way]:
    """Give the four ways by name, from the smallest pieces to the largest."""
    return {
        "element by element": element_by_element,
        "column by column": column_by_column,
        f"blocks of {block} columns": functools.partial(in_blocks, block=block),
        "whole": whole,
    }


@dataclass(frozen=True)
class RepeatTiming:
    """How calls are timed.

    Args:
        repeats: of all ways, each in an order of its own.
        segment_seconds: calls between two readings of the clock take about so long.
        limit_seconds: a way that has taken so long is not repeated again.
    """

    repeats: int
    segment_seconds: float
    limit_seconds: float


def run(
    log: UnitLog,
    *,
    device: str,
    dtype: str,
    size: int,
    block: int,
    working_sets: list[int],
    gathered_kib: int,
    repeats: int,
    segment_seconds: float,
    limit_seconds: float,
    seed: int,
    only: list[str],
    now: Callable[[], float] = time.perf_counter,
) -> Finding:
    """Measure GFLOP/s of the ways and GB/s of readings and orders: median, quartiles of repeats."""
    # Before anything else, so that a missing device is what is said.
    place = resolve_device(device, "sweep.experiment.device")
    _check_choices(
        dtype,
        working_sets,
        gathered_kib,
        {
            "size": size,
            "block": block,
            "repeats": repeats,
            "segment_seconds": segment_seconds,
            "limit_seconds": limit_seconds,
        },
    )
    product_names = _repeat_names("product", repeats)
    reading_names = _repeat_names("reading", repeats)
    order_names = _repeat_names("order", repeats)
    unit_names = [*product_names, *reading_names, *order_names]
    check_only(only, unit_names)
    device_text = device_name({"accelerator": place.type, "devices": [place.index or 0]})
    # The device has its own place in the header, whatever it is called here.
    log.begin(device_text, ("repeats", "device"))
    # Drawn on the CPU, so that every device multiplies the same numbers.
    generator = torch.Generator().manual_seed(seed)
    b = torch.randn(size, size, generator=generator).to(place, FLOATS[dtype])
    c = torch.randn(size, size, generator=generator).to(place, FLOATS[dtype])
    a = torch.zeros_like(b)
    products = {name: functools.partial(way, a, b, c) for name, way in ways(block).items()}

    def clock() -> float:
        # CUDA's calls return before their work is done.
        synchronize(place)
        return now()

    rng = np.random.default_rng(seed)
    timing = RepeatTiming(repeats, segment_seconds, limit_seconds)

    def measured(
        names: Sequence[str], timed: Mapping[str, Callable[[], object]]
    ) -> dict[str, RepeatSeconds]:
        plan = UnitPlan(
            names=names,
            only=only,
            noun="repeat",
            read=READ_REPEAT.validate_python,
            choices=unit_names,
        )
        return measure(log, plan, timed, timing, rng, clock)

    product_repeats = measured(product_names, products)
    reads = reading(working_sets, place)
    named_reads = {str(kib): read for kib, read in reads.items()}
    reading_repeats = measured(reading_names, named_reads)
    gathers = gathering(gathered_kib, place, generator)
    order_repeats = measured(order_names, gathers)
    log.check_finished(unit_names, {*product_repeats, *reading_repeats, *order_repeats})
    # Of a product: n^3 multiplications and as many additions.
    rows = _product_rows(by_way(product_repeats, products), 2.0 * size**3)
    read_seconds = by_way(reading_repeats, named_reads)
    levels = cache_levels(place)
    read_rows = list[ReadRow]()
    for kib in reads:
        read_rows.append(_read_row(kib, read_seconds[str(kib)], levels))
    order_rows = _order_rows(by_way(order_repeats, gathers), gathered_kib * KIB)
    # A slow way has fewer repeats than were asked for.
    n = min(row["repeats"] for row in [*rows, *read_rows, *order_rows])
    title = f"A = B C of {size} x {size} matrices in {dtype}, {device_text}"
    return Finding(
        sentence=" ".join(
            filter(None, (sentence(rows, n), read_sentence(read_rows), order_sentence(order_rows)))
        ),
        rows=[*rows, *read_rows, *order_rows],
        n=n,
        device=device_text,
        paint=functools.partial(_paint_rates, rows, read_rows, order_rows, levels, title),
        inches=PRODUCT_FIGURE_INCHES,
        details={"cache_bytes": levels},
    )


def _check_choices(
    dtype: str, working_sets: Sequence[int], gathered_kib: int, positive: Mapping[str, float]
) -> None:
    """Refuse values that cannot be, such as ``positive`` ones that are not."""
    if dtype not in FLOATS:
        raise ConfigError(
            f"sweep.experiment.dtype must be one of {', '.join(FLOATS)}, but got {dtype!r}"
        )
    for name, value in positive.items():
        if not (math.isfinite(value) and value > 0):
            raise ConfigError(f"sweep.experiment.{name} must be positive, but got {value}")
    if not all(1 <= kib <= 2**22 for kib in working_sets):
        raise ConfigError(
            f"sweep.experiment.working_sets must be KiB from 1 to {2**22}, but got "
            f"{list(working_sets)}"
        )
    if not 1 <= gathered_kib <= 2**22:
        raise ConfigError(
            f"sweep.experiment.gathered_kib must be KiB from 1 to {2**22}, but got {gathered_kib}"
        )


def reading(working_sets: Sequence[int], place: torch.device) -> dict[int, Callable[[], Tensor]]:
    """Give calls, by KiB, that read a vector of fp32 again and again, READ_BYTES in a call."""
    calls = dict[int, Callable[[], Tensor]]()
    for kib in sorted(set(working_sets)):
        # Ones, as untouched pages of a host are not memory.
        vector = torch.ones(kib * KIB // FP32_BYTES, device=place)
        # Rows of stride 0: the same bytes, so that only the vector itself has to fit a cache.
        again = vector.expand(_reads_of_call(kib), len(vector))
        calls[kib] = functools.partial(torch.sum, again, dim=1)
    return calls


def _reads_of_call(kib: int) -> int:
    return max(1, READ_BYTES // (kib * KIB))


def orders(count: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Give three orders of the places 0 to ``count`` - 1, a multiple of STRIDE, by name."""
    places = torch.arange(count)
    return {
        "in order": places,
        f"in strides of {STRIDE}": places.view(-1, STRIDE).T.flatten(),
        "at random": torch.randperm(count, generator=generator),
    }


def gathering(
    kib: int, place: torch.device, generator: torch.Generator
) -> dict[str, Callable[[], Tensor]]:
    """Give calls, by order, that gather every number of a vector of fp32 once."""
    count = kib * KIB // FP32_BYTES
    vector = torch.ones(count, device=place)
    into = torch.empty_like(vector)
    calls = dict[str, Callable[[], Tensor]]()
    for name, places in orders(count, generator).items():
        calls[name] = functools.partial(torch.index_select, vector, 0, places.to(place), out=into)
    return calls


def cache_levels(place: torch.device, folder: Path = CACHES) -> dict[str, int]:
    """Give the bytes of each cache that holds data, the smallest first, if the system says them."""
    if place.type == "cuda":
        return {"L2": int(torch.cuda.get_device_properties(place).L2_cache_size)}
    levels = dict[str, int]()
    for cache in sorted(folder.glob("index*")):
        kind = (cache / "type").read_text().strip()
        level = (cache / "level").read_text().strip()
        size = (cache / "size").read_text().strip()
        # Linux gives these sizes in KiB.
        if kind != "Instruction" and size.endswith("K"):
            levels[f"L{level}"] = int(size[:-1]) * KIB
    return dict(sorted(levels.items(), key=lambda item: item[1]))


def _read_row(kib: int, seconds: Sequence[float], levels: Mapping[str, int]) -> ReadRow:
    read_bytes = _reads_of_call(kib) * kib * KIB
    low, middle, high = np.quantile(read_bytes / np.array(seconds) / 1e9, QUARTILES).tolist()
    return {
        "way": f"reading {_size_text(kib)}",
        "repeats": len(seconds),
        "gb_per_second": middle,
        "gb_low": low,
        "gb_high": high,
        "fits": _smallest_that_holds(kib, levels),
        "kib": kib,
    }


def _order_rows(seconds: Mapping[str, Sequence[float]], read_bytes: int) -> list[OrderRow]:
    rows = list[OrderRow]()
    for name, values in seconds.items():
        low, middle, high = np.quantile(read_bytes / np.array(values) / 1e9, QUARTILES).tolist()
        in_order = middle
        if rows:
            in_order = rows[0]["gb_per_second"]
        rows.append(
            {
                "way": f"gathering {name}",
                "repeats": len(values),
                "gb_per_second": middle,
                "gb_low": low,
                "gb_high": high,
                "times_as_long": in_order / middle,
            }
        )
    return rows


def _smallest_that_holds(kib: int, levels: Mapping[str, int]) -> str | None:
    """Name the smallest cache that holds so much; None where the system does not say."""
    if not levels:
        return None
    for level, size in levels.items():
        if kib * KIB <= size:
            return level
    return NO_CACHE


def _size_text(kib: int) -> str:
    if kib % KIB == 0:
        return f"{kib // KIB} MiB"
    return f"{kib} KiB"


def read_sentence(rows: Sequence[ReadRow]) -> str:
    """Say what the fastest reading has over the largest vector's; nothing for fewer than two."""
    if len(rows) < 2:
        return ""
    best = max(rows, key=lambda row: row["gb_per_second"])
    last = rows[-1]
    times = format_number(best["gb_per_second"] / last["gb_per_second"])
    best_rate = format_number(best["gb_per_second"])
    last_rate = format_number(last["gb_per_second"])
    return (
        f"A vector of {_where_text(best)} is read at {best_rate} GB/s, {times} times as fast as "
        f"one of {_where_text(last)} at {last_rate}."
    )


def order_sentence(rows: Sequence[OrderRow]) -> str:
    """Say how much longer the numbers take in strides and at random than in order."""
    _, strided, random = rows
    return (
        f"{strided['way'].capitalize()} takes {format_number(strided['times_as_long'])} times as "
        f"long as in order, at random {format_number(random['times_as_long'])} times."
    )


def _where_text(row: ReadRow) -> str:
    """Give a vector's size, and which cache it fits."""
    size = _size_text(row["kib"])
    if row["fits"] is None:
        return size
    if row["fits"] == NO_CACHE:
        return f"{size}, which fits no cache,"
    return f"{size}, which fits {row['fits']},"


def _repeat_names(group: str, repeats: int) -> list[str]:
    return [f"{group}/{number}" for number in range(1, repeats + 1)]


def measure(
    log: UnitLog,
    plan: UnitPlan[RepeatSeconds],
    named: Mapping[str, Callable[[], object]],
    timing: RepeatTiming,
    rng: np.random.Generator,
    clock: Callable[[], float],
) -> dict[str, RepeatSeconds]:
    """Give the seconds of one call of each way by repeat, warm-up left out."""
    # All of them are drawn, so that a repeat has the same order whichever repeats are kept.
    orders = {name: rng.permutation(list(named)).tolist() for name in plan.names}
    kept = log.recorded(plan)

    def time_repeats(names: Sequence[str]) -> Iterator[tuple[str, RepeatSeconds]]:
        timers = _timers(named, clock)
        calls = {name: _calls_of_segment(timers[name], timing) for name in named}
        spent = by_way(kept, named)
        for repeat in names:
            seconds = RepeatSeconds()
            for way in orders[repeat]:
                # Element by element takes a thousand times as long as the whole: each has its
                # own limit, and one repeat at least.
                has_time = calls[way] * sum(spent[way]) < timing.limit_seconds
                if not spent[way] or has_time:
                    seconds[way] = timers[way].timeit(calls[way]).median
                    spent[way].append(seconds[way])
            yield repeat, seconds

    return log.measure_as_they_end(plan, time_repeats)


def _timers(
    named: Mapping[str, Callable[[], object]], clock: Callable[[], float]
) -> dict[str, Timer]:
    timers = dict[str, Timer]()
    for name, way in named.items():
        names = {"way": way}
        timers[name] = Timer(
            "way()", globals=names, timer=clock, num_threads=torch.get_num_threads()
        )
    return timers


def _calls_of_segment(timer: Timer, timing: RepeatTiming) -> int:
    """Time a call, to tell how many of them a segment has."""
    once = timer.timeit(1).median
    if once < STANDING_STILL:
        return 1
    return max(1, math.ceil(timing.segment_seconds / once))


def by_way(
    repeats: Mapping[str, RepeatSeconds], named: Mapping[str, object]
) -> dict[str, list[float]]:
    """Give the seconds of one call over the repeats, by way."""
    seconds: dict[str, list[float]] = {name: [] for name in named}
    for of_repeat in repeats.values():
        for name, value in of_repeat.items():
            seconds[name].append(value)
    return seconds


def _product_rows(seconds: Mapping[str, Sequence[float]], flops: float) -> list[ProductRow]:
    rows = list[ProductRow]()
    slowest = math.nan
    for name, values in seconds.items():
        low, middle, high = np.quantile(flops / np.array(values) / 1e9, QUARTILES).tolist()
        # The first way has the smallest pieces and is the slowest.
        if not rows:
            slowest = middle
        rows.append(
            {
                "way": name,
                "repeats": len(values),
                "gflops": middle,
                "gflops_low": low,
                "gflops_high": high,
                "times_as_fast": middle / slowest,
            }
        )
    return rows


def sentence(rows: Sequence[ProductRow], n: int) -> str:
    """Put the finding into words, from the rows of the four ways in their order."""
    _, columns, blocks, last = rows
    return (
        f"The whole product is {format_number(last['times_as_fast'])} times as fast as element by "
        f"element and {format_number(last['gflops'] / columns['gflops'])} times as fast as column "
        f"by column; {blocks['way']} reach {blocks['gflops'] / last['gflops']:.0%} of it (medians, "
        f"n = {n} or more)."
    )


def _paint_rates(
    rows: Sequence[ProductRow],
    read_rows: Sequence[ReadRow],
    order_rows: Sequence[OrderRow],
    levels: Mapping[str, int],
    title: str,
    figure: "Figure",
) -> None:
    """Draw the ways of the product, the rates of reading over the vector's size, and the orders."""
    axes, reads, gathers = figure.subplots(1, 3, width_ratios=[1.2, 1.2, 0.8])
    _draw_products(axes, rows)
    _draw_readings(reads, read_rows, levels)
    _draw_orders(gathers, order_rows)
    figure.suptitle(title, fontsize=10.5, parse_math=False)


def _draw_products(axes: "Axes", rows: Sequence[ProductRow]) -> None:
    names = list[str]()
    values = list[float]()
    below = list[float]()
    above = list[float]()
    for row in rows:
        way = row["way"].replace(" by ", "\nby ")
        names.append(f"{way}\nn = {row['repeats']}")
        values.append(row["gflops"])
        below.append(row["gflops"] - row["gflops_low"])
        above.append(row["gflops_high"] - row["gflops"])
    axes.bar(names, values, color=BLUE, width=0.6, zorder=2)
    axes.errorbar(
        range(len(rows)),
        values,
        yerr=[below, above],
        fmt="none",
        ecolor=INK,
        capsize=4.0,
        zorder=3,
    )
    for place, row in enumerate(rows):
        axes.annotate(
            format_number(row["gflops"]),
            (place, row["gflops_high"]),
            xytext=(0.0, 5.0),
            textcoords="offset points",
            ha="center",
        )
    # The smallest pieces are a thousandth as fast as the whole.
    axes.set_yscale("log")
    axes.set_ylim(min(values) / 3.0, max(values) * 3.0)
    axes.set_ylabel("GFLOP/s, median and quartiles")
    axes.grid(axis="y", color=INK, alpha=0.07, linewidth=0.6)


def _draw_readings(reads: "Axes", read_rows: Sequence[ReadRow], levels: Mapping[str, int]) -> None:
    sizes = list[int]()
    rates = list[float]()
    low = list[float]()
    high = list[float]()
    for row in read_rows:
        sizes.append(row["kib"])
        rates.append(row["gb_per_second"])
        low.append(row["gb_low"])
        high.append(row["gb_high"])
    reads.plot(sizes, rates, "o-", color=BLUE, label="a vector, read again and again")
    reads.fill_between(sizes, low, high, color=BLUE, alpha=0.2)
    # A rate falls where a vector no longer fits a cache.
    for level, size in levels.items():
        reads.axvline(size / KIB, color=INK, linewidth=0.9, linestyle="--")
        reads.text(size / KIB, 0.97, f" {level}", transform=reads.get_xaxis_transform(), va="top")
    reads.set(
        xscale="log",
        ylim=(0.0, None),
        xlabel="KiB of the vector",
        ylabel="GB/s, median and quartiles",
    )
    reads.grid(color=INK, alpha=0.07, linewidth=0.6)


def _draw_orders(axes: "Axes", rows: Sequence[OrderRow]) -> None:
    names = list[str]()
    values = list[float]()
    below = list[float]()
    above = list[float]()
    for row in rows:
        names.append(row["way"].removeprefix("gathering "))
        values.append(row["gb_per_second"])
        below.append(row["gb_per_second"] - row["gb_low"])
        above.append(row["gb_high"] - row["gb_per_second"])
    axes.bar(names, values, color=BLUE, width=0.6, zorder=2)
    axes.errorbar(
        range(len(rows)), values, yerr=[below, above], fmt="none", ecolor=INK, capsize=4.0, zorder=3
    )
    axes.set_ylabel("GB/s of one vector gathered, median and quartiles")
    axes.grid(axis="y", color=INK, alpha=0.07, linewidth=0.6)
