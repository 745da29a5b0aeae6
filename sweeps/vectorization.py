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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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

# Tf32 is a mode of products in fp32, and no type of numbers.
FLOATS = {name: dtype for name, dtype in DTYPES.items() if name != "tf32"}
PRODUCT_FIGURE_INCHES = (15.0, 4.5)
CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
# A call reads at least so many bytes, next to which the call itself takes no time.
READ_BYTES = 2**26
# Bytes of a KiB, and of a number in fp32.
KIB = 2**10
FP32_BYTES = 4
# The most KiB of a vector: 4 GiB.
MOST_VECTOR_KIB = 2**22
NO_CACHE = "no cache"
# Numbers between two that are read one after another: 64 bytes, a line of most processors' caches.
STRIDE = 16
# Seconds of a call below which torch read a clock that stands still: torch takes 1e-9 then.
STANDING_STILL = 1e-8
ORDER_NAMES = ("in order", f"in strides of {STRIDE}", "at random")
Way = Callable[[Tensor, Tensor, Tensor], None]
# Calls to time, by the name of a way.
Calls = Mapping[str, Callable[[], object]]
# The seconds of one call in a repeat, by way; ways that have had their time are left out.
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
    """Give the four ways to multiply two matrices by name, the smallest pieces first."""
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
        repeats: how often all ways are timed, each time in a newly shuffled order.
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
    """Measure GFLOP/s of the ways, and GB/s of readings and orders: medians and quartiles.

    Args:
        log: keeps the repeats.
        device: on which all is timed.
        dtype: of the matrices; vectors are in fp32.
        size: rows, and columns, of each matrix.
        block: columns of a block.
        working_sets: KiB of the vectors that are read again and again.
        gathered_kib: KiB of the vector whose numbers are gathered.
        repeats: how often all ways, all readings and all orders are timed.
        segment_seconds: calls between two readings of the clock take about so long.
        limit_seconds: a way that has taken so long is not repeated again.
        seed: of the matrices and of all orders.
        only: the repeats to measure now; empty: all.
        now: the clock, in seconds; tests replace it.
    """
    # A missing device is reported before anything else.
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
    # A device without a number is the first one.
    device_text = device_name({"accelerator": place.type, "devices": [place.index or 0]})
    # Repeats that are kept are compared by the device itself, whatever the option calls it.
    log.begin(device_text, ("repeats", "device"))
    # The generator is the CPU's, so that every device multiplies the same numbers.
    generator = torch.Generator().manual_seed(seed)
    ways_of_product = ways(block)
    make_products = _products(ways_of_product, size, FLOATS[dtype], place, generator)

    def clock() -> float:
        # CUDA's calls return before their work is done.
        synchronize(place)
        return now()

    rng = np.random.default_rng(seed)
    timing = RepeatTiming(repeats, segment_seconds, limit_seconds)

    def measured(
        repeat_names: Sequence[str], way_names: Sequence[str], make_calls: Callable[[], Calls]
    ) -> dict[str, RepeatSeconds]:
        """Time the ways in each repeat that is not kept: seconds of one call, by repeat and way."""
        plan = UnitPlan(
            names=repeat_names,
            only=only,
            noun="repeat",
            read=READ_REPEAT.validate_python,
            choices=unit_names,
        )
        return measure(log, plan, way_names, make_calls, timing, rng, clock)

    product_repeats = measured(product_names, list(ways_of_product), make_products)
    sizes_kib = sorted(set(working_sets))
    named_sizes = list(map(str, sizes_kib))
    make_reads = functools.partial(reading, sizes_kib, place)
    reading_repeats = measured(reading_names, named_sizes, make_reads)
    make_gathers = functools.partial(gathering, gathered_kib, place, generator)
    order_repeats = measured(order_names, ORDER_NAMES, make_gathers)
    log.check_finished(unit_names, {*product_repeats, *reading_repeats, *order_repeats})
    levels = cache_levels(place)
    # A product has n^3 multiplications and as many additions.
    product_rows = _product_rows(by_way(product_repeats, ways_of_product), 2.0 * size**3)
    read_seconds = by_way(reading_repeats, named_sizes)
    read_rows = [_read_row(kib, read_seconds[str(kib)], levels) for kib in sizes_kib]
    order_rows = _order_rows(by_way(order_repeats, ORDER_NAMES), gathered_kib * KIB)
    title = f"A = B C of {size} x {size} matrices in {dtype}, {device_text}"
    return _make_finding(product_rows, read_rows, order_rows, levels, title, device_text)


def _products(
    ways_of_product: Mapping[str, Way],
    size: int,
    dtype: torch.dtype,
    place: torch.device,
    generator: torch.Generator,
) -> Callable[[], Calls]:
    """Draw two square matrices, and give the function that makes each way's call on them, by name.

    A way is a function (a, b, c) that writes the product b c into a. ``size`` is the rows, and the
    columns, of each matrix, and ``place`` the device that they are on.
    """
    b = torch.randn(size, size, generator=generator).to(place, dtype)
    c = torch.randn(size, size, generator=generator).to(place, dtype)
    a = torch.zeros_like(b)

    def make_calls() -> Calls:
        return {name: functools.partial(way, a, b, c) for name, way in ways_of_product.items()}

    return make_calls


def _make_finding(
    rows: Sequence[ProductRow],
    read_rows: Sequence[ReadRow],
    order_rows: Sequence[OrderRow],
    levels: Mapping[str, int],
    title: str,
    device: str,
) -> Finding:
    """Make the finding from the rows of the product's ways, of readings and of orders.

    ``levels`` are the sizes of the caches, in bytes.
    """
    # A slow way has fewer repeats than were asked for.
    n = min(row["repeats"] for row in [*rows, *read_rows, *order_rows])
    sentences = (sentence(rows, n), read_sentence(read_rows), order_sentence(order_rows))
    return Finding(
        # The sentence on readings is empty where there are fewer than two.
        sentence=" ".join(filter(None, sentences)),
        rows=[*rows, *read_rows, *order_rows],
        n=n,
        device=device,
        paint=functools.partial(_paint_rates, rows, read_rows, order_rows, levels, title),
        inches=PRODUCT_FIGURE_INCHES,
        details={"cache_bytes": levels},
    )


def _check_choices(
    dtype: str, working_sets: Sequence[int], gathered_kib: int, positive: Mapping[str, float]
) -> None:
    """Refuse choices out of their range; the values of ``positive`` are to be positive."""
    if dtype not in FLOATS:
        raise ConfigError(
            f"sweep.experiment.dtype must be one of {', '.join(FLOATS)}, but got {dtype!r}"
        )
    for name, value in positive.items():
        if not (math.isfinite(value) and value > 0):
            raise ConfigError(f"sweep.experiment.{name} must be positive, but got {value}")
    if not all(1 <= kib <= MOST_VECTOR_KIB for kib in working_sets):
        raise ConfigError(
            f"sweep.experiment.working_sets must be KiB from 1 to {MOST_VECTOR_KIB}, but got "
            f"{list(working_sets)}"
        )
    if not 1 <= gathered_kib <= MOST_VECTOR_KIB:
        raise ConfigError(
            f"sweep.experiment.gathered_kib must be KiB from 1 to {MOST_VECTOR_KIB}, but got "
            f"{gathered_kib}"
        )


def reading(sizes_kib: Sequence[int], place: torch.device) -> dict[str, Callable[[], Tensor]]:
    """Give calls that read a vector of fp32 again and again, by the vector's KiB.

    A call reads about READ_BYTES.
    """
    calls = dict[str, Callable[[], Tensor]]()
    for kib in sizes_kib:
        # The ones are written: a host gives memory to a page only once something is written to it.
        vector = torch.ones(kib * KIB // FP32_BYTES, device=place)
        # Its rows have stride 0: all are the same bytes, so that only the vector itself has to fit
        # a cache.
        repeated_rows = vector.expand(_reads_of_call(kib), len(vector))
        calls[str(kib)] = functools.partial(torch.sum, repeated_rows, dim=1)
    return calls


def _reads_of_call(kib: int) -> int:
    """Give how often a call reads a vector of so many KiB: READ_BYTES in all, but once at least."""
    return max(1, READ_BYTES // (kib * KIB))


def orders(count: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Give three orders of the places 0 to ``count`` - 1 by name: rising, in strides, at random.

    In strides, each place lies STRIDE further than the one before; ``count`` is a multiple of it.
    """
    places = torch.arange(count)
    in_strides = places.view(-1, STRIDE).T.flatten()
    at_random = torch.randperm(count, generator=generator)
    return dict(zip(ORDER_NAMES, (places, in_strides, at_random), strict=True))


def gathering(
    kib: int, place: torch.device, generator: torch.Generator
) -> dict[str, Callable[[], Tensor]]:
    """Give calls that gather every number of a vector of fp32 once, by the name of the order.

    The vector has ``kib`` KiB. The three orders are rising, in strides and at random.
    """
    count = kib * KIB // FP32_BYTES
    vector = torch.ones(count, device=place)
    gathered = torch.empty_like(vector)
    calls = dict[str, Callable[[], Tensor]]()
    for name, places in orders(count, generator).items():
        calls[name] = functools.partial(
            torch.index_select, vector, 0, places.to(place), out=gathered
        )
    return calls


def cache_levels(place: torch.device, folder: Path = CACHES) -> dict[str, int]:
    """Give the bytes of each cache that holds data, the smallest first, by its name, such as L2.

    ``folder`` is where Linux states them. Empty where the system states none.
    """
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
    """Make the row of a vector's size, from the seconds of one call in each repeat."""
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
    """Make a row for each order in which a vector's numbers are gathered.

    ``seconds`` has those of one call in each repeat, by order; a call reads ``read_bytes``.
    """
    rows = list[OrderRow]()
    for name, values in seconds.items():
        low, middle, high = np.quantile(read_bytes / np.array(values) / 1e9, QUARTILES).tolist()
        # The first order is the one to which the others are compared.
        rate_in_order = middle
        if rows:
            rate_in_order = rows[0]["gb_per_second"]
        rows.append(
            {
                "way": f"gathering {name}",
                "repeats": len(values),
                "gb_per_second": middle,
                "gb_low": low,
                "gb_high": high,
                "times_as_long": rate_in_order / middle,
            }
        )
    return rows


def _smallest_that_holds(kib: int, levels: Mapping[str, int]) -> str | None:
    """Name the smallest cache that holds ``kib`` KiB: NO_CACHE if none does.

    ``levels`` has the bytes of each cache, the smallest first. None if the system names no caches.
    """
    if not levels:
        return None
    for level, size in levels.items():
        if kib * KIB <= size:
            return level
    return NO_CACHE


def _size_text(kib: int) -> str:
    """Write a size in MiB where they are whole, else in KiB."""
    if kib % KIB == 0:
        return f"{kib // KIB} MiB"
    return f"{kib} KiB"


def read_sentence(rows: Sequence[ReadRow]) -> str:
    """Compare the fastest reading with that of the largest vector; empty for fewer than two."""
    if len(rows) < 2:
        return ""
    best = max(rows, key=lambda row: row["gb_per_second"])
    largest = rows[-1]
    times = format_number(best["gb_per_second"] / largest["gb_per_second"])
    best_rate = format_number(best["gb_per_second"])
    last_rate = format_number(largest["gb_per_second"])
    return (
        f"A vector of {_where_text(best)} is read at {best_rate} GB/s, {times} times as fast as "
        f"one of {_where_text(largest)} at {last_rate}."
    )


def order_sentence(rows: Sequence[OrderRow]) -> str:
    """Say how much longer gathering takes in strides and at random than in order."""
    _, strided, random = rows
    return (
        f"{strided['way'].capitalize()} takes {format_number(strided['times_as_long'])} times as "
        f"long as in order, at random {format_number(random['times_as_long'])} times."
    )


def _where_text(row: ReadRow) -> str:
    """Write a vector's size, and which cache it fits."""
    size = _size_text(row["kib"])
    if row["fits"] is None:
        return size
    if row["fits"] == NO_CACHE:
        return f"{size}, which fits no cache,"
    return f"{size}, which fits {row['fits']},"


def _repeat_names(group: str, repeats: int) -> list[str]:
    """Name the repeats of a group, such as ``product/1``."""
    return [f"{group}/{number}" for number in range(1, repeats + 1)]


def measure(
    log: UnitLog,
    plan: UnitPlan[RepeatSeconds],
    way_names: Sequence[str],
    make_calls: Callable[[], Calls],
    timing: RepeatTiming,
    rng: np.random.Generator,
    clock: Callable[[], float],
) -> dict[str, RepeatSeconds]:
    """Time the repeats of a plan that are not kept, and give the seconds of one call by repeat.

    A repeat times each of several ways to do the same work.

    Args:
        log: keeps the repeats.
        plan: of the repeats.
        way_names: the ways' names.
        make_calls: makes the call of each way; only where a repeat is to be measured.
        timing: how calls are timed.
        rng: shuffles the ways of each repeat.
        clock: in seconds.
    """
    # The orders of all repeats are drawn, so that each has the same one whichever are kept.
    ways_in_order = {name: rng.permutation(list(way_names)).tolist() for name in plan.names}
    kept_repeats = log.recorded(plan)

    def time_repeats(names: Sequence[str]) -> Iterator[tuple[str, RepeatSeconds]]:
        timers = _timers(make_calls(), clock)
        # A repeat times a segment of so many calls of each way, and keeps the seconds of one call.
        call_count = {name: _calls_of_segment(timers[name], timing) for name in way_names}
        seconds_so_far = by_way(kept_repeats, way_names)
        for repeat in names:
            seconds = RepeatSeconds()
            for way in ways_in_order[repeat]:
                # The slowest way takes a thousand times as long as the fastest, so that each has
                # the limit for itself. Each is timed once at least.
                spent = call_count[way] * sum(seconds_so_far[way])
                if not seconds_so_far[way] or spent < timing.limit_seconds:
                    seconds[way] = timers[way].timeit(call_count[way]).median
                    seconds_so_far[way].append(seconds[way])
            yield repeat, seconds

    return log.measure_as_they_end(plan, time_repeats)


def _timers(calls: Calls, clock: Callable[[], float]) -> dict[str, Timer]:
    """Make torch's timer of each call, by the name of the way that it does its work."""
    timers = dict[str, Timer]()
    for name, way in calls.items():
        names = {"way": way}
        timers[name] = Timer(
            "way()", globals=names, timer=clock, num_threads=torch.get_num_threads()
        )
    return timers


def _calls_of_segment(timer: Timer, timing: RepeatTiming) -> int:
    """Time one call, and give how many calls take about ``timing.segment_seconds``."""
    once = timer.timeit(1).median
    # By a clock that stands still, as a test's may, a segment would never end.
    if once < STANDING_STILL:
        return 1
    return max(1, math.ceil(timing.segment_seconds / once))


def by_way(repeats: Mapping[str, RepeatSeconds], named: Iterable[str]) -> dict[str, list[float]]:
    """Group the seconds of one call by the way to compute it: one number for each repeat.

    ``named``: the names of all ways; one that no repeat has timed gets an empty list.
    """
    seconds: dict[str, list[float]] = {name: [] for name in named}
    for repeat_seconds in repeats.values():
        # A repeat lacks the ways that had taken their time.
        for name, value in repeat_seconds.items():
            seconds[name].append(value)
    return seconds


def _product_rows(seconds: Mapping[str, Sequence[float]], flops: float) -> list[ProductRow]:
    """Make a row for each way of the product, from the seconds of one call in each repeat."""
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
    """Compare the four ways in words, from their rows in order; each has ``n`` repeats or more."""
    _elements, columns, blocks, whole_product = rows
    over_elements = format_number(whole_product["times_as_fast"])
    over_columns = format_number(whole_product["gflops"] / columns["gflops"])
    share_of_blocks = blocks["gflops"] / whole_product["gflops"]
    return (
        f"The whole product is {over_elements} times as fast as element by element and "
        f"{over_columns} times as fast as column by column; {blocks['way']} reach "
        f"{share_of_blocks:.0%} of it (medians, n = {n} or more)."
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
    """Draw a bar for each way of the product, with its quartiles."""
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
    """Draw the rate of reading over the vector's size, and the sizes of the caches."""
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
    """Draw a bar for each order, with its quartiles."""
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
