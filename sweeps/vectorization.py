"""A matrix product in four ways: what a device does with the same arithmetic in pieces of different size.

Zhang, Lipton, Li and Smola, Dive into Deep Learning, 12.5.1 and 12.5.2: A = B C element by element (dot products),
column by column (products of the matrix and a vector), in blocks of columns, and whole. A product of n x n matrices is
counted as 2 n^3 FLOPs, a multiplication and an addition being one each. What pieces cost is their calls, and what they
leave in the caches (12.5.1): so vectors of growing size are read as well, each again and again by sums over it.
"""

import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

import numpy as np
import torch
from torch import Tensor
from torch.utils.benchmark import Timer

from bstune.core.errors import ConfigError
from bstune.hardware.roofline import DTYPES
from bstune.report.drawing import BLUE, INK
from bstune.sweeps.harness import Finding
from bstune.sweeps.statistics import QUARTILES
from bstune.system.console import format_number
from bstune.trial.devices.device import device_name, resolve_device, synchronize

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Tf32 is a mode of fp32's, no type.
FLOATS = {name: dtype for name, dtype in DTYPES.items() if name != "tf32"}
PRODUCT_FIGURE_INCHES = (12.0, 4.5)
CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
# In one call at least, so that what a call costs is no part of it.
READ_BYTES = 2**26
# Bytes of a KiB, and of a number in fp32.
KIB = 2**10
FP32_BYTES = 4
NO_CACHE = "no cache"
# Seconds, below which torch read a clock that stands still: it takes 1e-9 then.
STANDING_STILL = 1e-8
Way = Callable[[Tensor, Tensor, Tensor], None]


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
    """Write b c, both (n, n), into a: products of a matrix and ``block`` columns, the last one maybe fewer."""
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


def run(
    *,
    device: str,
    dtype: str,
    size: int,
    block: int,
    working_sets: list[int],
    repeats: int,
    segment_seconds: float,
    limit_seconds: float,
    seed: int,
    now: Callable[[], float] = time.perf_counter,
) -> Finding:
    """Measure the four ways and the readings: their GFLOP/s and GB/s, median and quartiles over repeats."""
    place = resolve_device(device, "sweep.experiment.device")
    if dtype not in FLOATS:
        raise ConfigError(
            f"sweep.experiment.dtype must be one of {', '.join(FLOATS)}, but got {dtype!r}"
        )
    positive = {
        "size": size,
        "block": block,
        "repeats": repeats,
        "segment_seconds": segment_seconds,
        "limit_seconds": limit_seconds,
    }
    for name, value in positive.items():
        if not (math.isfinite(value) and value > 0):
            raise ConfigError(f"sweep.experiment.{name} must be positive, but got {value}")
    if not all(1 <= kib <= 2**22 for kib in working_sets):
        raise ConfigError(
            f"sweep.experiment.working_sets must be KiB from 1 to {2**22}, but got "
            f"{list(working_sets)}"
        )
    generator = torch.Generator().manual_seed(seed)
    b = torch.randn(size, size, generator=generator).to(place, FLOATS[dtype])
    c = torch.randn(size, size, generator=generator).to(place, FLOATS[dtype])
    a = torch.zeros_like(b)
    products = {name: functools.partial(way, a, b, c) for name, way in ways(block).items()}

    def clock() -> float:
        synchronize(place)
        return now()

    rng = np.random.default_rng(seed)
    seconds = measure(products, repeats, segment_seconds, limit_seconds, rng, clock)
    rows = _product_rows(seconds, 2.0 * size**3)
    reads = reading(working_sets, place)
    named_reads = {str(kib): read for kib, read in reads.items()}
    read_seconds = measure(named_reads, repeats, segment_seconds, limit_seconds, rng, clock)
    levels = cache_levels(place)
    read_rows = [_read_row(kib, read_seconds[str(kib)], levels) for kib in reads]
    device_text = device_name({"accelerator": place.type, "devices": [place.index or 0]})
    n = min(row["repeats"] for row in [*rows, *read_rows])
    title = f"A = B C of {size} x {size} matrices in {dtype}, {device_text}"
    return Finding(
        sentence=f"{sentence(rows, n)} {read_sentence(read_rows)}".strip(),
        rows=[*rows, *read_rows],
        n=n,
        device=device_text,
        paint=functools.partial(_paint_rates, rows, read_rows, levels, title),
        inches=PRODUCT_FIGURE_INCHES,
        details={"cache_bytes": levels},
    )


def reading(working_sets: Sequence[int], place: torch.device) -> dict[int, Callable[[], Tensor]]:
    """Give calls that read a vector of so many KiB of fp32 again and again, by these: one call reads READ_BYTES."""
    calls = dict[int, Callable[[], Tensor]]()
    for kib in sorted(set(working_sets)):
        # Ones, as untouched pages of a host are not memory.
        vector = torch.ones(kib * KIB // FP32_BYTES, device=place)
        again = vector.expand(_reads_of_call(kib), len(vector))
        calls[kib] = functools.partial(torch.sum, again, dim=1)
    return calls


def _reads_of_call(kib: int) -> int:
    return max(1, READ_BYTES // (kib * KIB))


def cache_levels(place: torch.device, folder: Path = CACHES) -> dict[str, int]:
    """Give the bytes of each cache that holds data, the smallest first; empty where the system does not say."""
    if place.type == "cuda":
        return {"L2": int(torch.cuda.get_device_properties(place).L2_cache_size)}
    levels = dict[str, int]()
    for cache in sorted(folder.glob("index*")):
        kind = (cache / "type").read_text().strip()
        level = (cache / "level").read_text().strip()
        size = (cache / "size").read_text().strip()
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


def _smallest_that_holds(kib: int, levels: Mapping[str, int]) -> str | None:
    """Name the smallest cache that holds so much; None where the system does not say."""
    for level, size in levels.items():
        if kib * KIB <= size:
            return level
    return NO_CACHE if levels else None


def _size_text(kib: int) -> str:
    return f"{kib // KIB} MiB" if kib % KIB == 0 else f"{kib} KiB"


def read_sentence(rows: Sequence[ReadRow]) -> str:
    """Say what the fastest reading has over that of the largest vector; nothing for fewer than two."""
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


def _where_text(row: ReadRow) -> str:
    """Give a vector's size, and which cache it fits."""
    size = _size_text(row["kib"])
    if row["fits"] is None:
        return size
    if row["fits"] == NO_CACHE:
        return f"{size}, which fits no cache,"
    return f"{size}, which fits {row['fits']},"


def measure(
    named: Mapping[str, Callable[[], object]],
    repeats: int,
    segment_seconds: float,
    limit_seconds: float,
    rng: np.random.Generator,
    clock: Callable[[], float],
) -> dict[str, list[float]]:
    """Return the seconds of one call of each, once a repeat, warm-up left out; each repeat has an order of its own.

    Calls between two readings of the clock take about ``segment_seconds``. A way that has taken ``limit_seconds`` is
    not repeated again.
    """
    timers = dict[str, Timer]()
    calls = dict[str, int]()
    for name, way in named.items():
        names = {"way": way}
        timer = Timer("way()", globals=names, timer=clock, num_threads=torch.get_num_threads())
        once = timer.timeit(1).median
        timers[name] = timer
        calls[name] = 1
        if once >= STANDING_STILL:
            calls[name] = max(1, math.ceil(segment_seconds / once))
    seconds: dict[str, list[float]] = {name: [] for name in named}
    for _ in range(repeats):
        for name in rng.permutation(list(named)).tolist():
            if not seconds[name] or calls[name] * sum(seconds[name]) < limit_seconds:
                seconds[name].append(timers[name].timeit(calls[name]).median)
    return seconds


def _product_rows(seconds: Mapping[str, Sequence[float]], flops: float) -> list[ProductRow]:
    rows = list[ProductRow]()
    for name, values in seconds.items():
        low, middle, high = np.quantile(flops / np.array(values) / 1e9, QUARTILES).tolist()
        # The first way has the smallest pieces and is the slowest.
        slowest = rows[0]["gflops"] if rows else middle
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
    levels: Mapping[str, int],
    title: str,
    figure: "Figure",
) -> None:
    """Draw one bar a way, with its quartiles and its number, and the rates of reading over the vector's size."""
    axes, reads = figure.subplots(1, 2)
    values = [row["gflops"] for row in rows]
    below = [row["gflops"] - row["gflops_low"] for row in rows]
    above = [row["gflops_high"] - row["gflops"] for row in rows]
    names = list[str]()
    for row in rows:
        way = row["way"].replace(" by ", "\nby ")
        names.append(f"{way}\nn = {row['repeats']}")
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
    axes.set_yscale("log")
    axes.set_ylim(min(values) / 3.0, max(values) * 3.0)
    axes.set_ylabel("GFLOP/s, median and quartiles")
    axes.grid(axis="y", color=INK, alpha=0.07, linewidth=0.6)
    sizes = [row["kib"] for row in read_rows]
    rates = [row["gb_per_second"] for row in read_rows]
    low = [row["gb_low"] for row in read_rows]
    high = [row["gb_high"] for row in read_rows]
    reads.plot(sizes, rates, "o-", color=BLUE, label="a vector, read again and again")
    reads.fill_between(sizes, low, high, color=BLUE, alpha=0.2)
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
    figure.suptitle(title, fontsize=10.5, parse_math=False)
