"""A matrix product in four ways: what a device does with the same arithmetic in pieces of different size.

Zhang, Lipton, Li and Smola, Dive into Deep Learning, 12.5.1 and 12.5.2: A = B C element by element (dot products),
column by column (products of the matrix and a vector), in blocks of columns, and whole. A product of n x n matrices is
counted as 2 n^3 FLOPs, a multiplication and an addition being one each. What pieces cost is their calls, and what they
leave in the caches (12.5.1): so vectors of growing size are read as well, each again and again by sums over it.
"""

import functools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.benchmark import Timer

from bstune.core.errors import ConfigError
from bstune.hardware.roofline import DTYPES
from bstune.report.drawing import BLUE, INK
from bstune.sweeps.harness import Finding
from bstune.system.console import format_number
from bstune.trial.devices.device import device_name, resolve_device, synchronize

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FLOATS = {
    name: dtype for name, dtype in DTYPES.items() if name != "tf32"
}  # tf32 is a mode of fp32's, no type
FIGURE_INCHES = (12.0, 4.5)
CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
READ_BYTES = 2**26  # in one call at least, so that what a call costs is no part of it
QUARTILES = (0.25, 0.5, 0.75)
Way = Callable[[Tensor, Tensor, Tensor], None]


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
    """Return the four ways by name, from the smallest pieces to the largest."""
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
    """Measure the four ways and the readings, and return their GFLOP/s and GB/s, median and quartiles over repeats."""
    place = resolve_device(device, "sweep.experiment.device")
    if dtype not in FLOATS:
        raise ConfigError(
            f"sweep.experiment.dtype must be one of {', '.join(FLOATS)}, but got {dtype!r}"
        )
    counts = {"size": size, "block": block, "repeats": repeats}
    for name, value in {
        **counts,
        "segment_seconds": segment_seconds,
        "limit_seconds": limit_seconds,
    }.items():
        if not (math.isfinite(value) and value > 0):
            raise ConfigError(f"sweep.experiment.{name} must be positive, but got {value}")
    if not all(1 <= kib <= 2**22 for kib in working_sets):
        raise ConfigError(
            f"sweep.experiment.working_sets must be KiB from 1 to {2**22}, but got {list(working_sets)}"
        )
    generator = torch.Generator().manual_seed(seed)
    b, c = (torch.randn(size, size, generator=generator).to(place, FLOATS[dtype]) for _ in range(2))
    a = torch.zeros_like(b)
    named = {name: functools.partial(way, a, b, c) for name, way in ways(block).items()}

    def clock() -> float:
        synchronize(place)
        return now()

    rng = np.random.default_rng(seed)
    rows = list(
        _rows(measure(named, repeats, segment_seconds, limit_seconds, rng, clock), 2.0 * size**3)
    )
    reads = reading(working_sets, place)
    seconds = measure(
        {str(kib): read for kib, read in reads.items()},
        repeats,
        segment_seconds,
        limit_seconds,
        rng,
        clock,
    )
    levels = cache_levels(place)
    read_rows = [_read_row(kib, seconds[str(kib)], levels) for kib in reads]
    name = device_name({"accelerator": place.type, "devices": [place.index or 0]})
    n = min(row["repeats"] for row in [*rows, *read_rows])
    title = f"A = B C of {size} x {size} matrices in {dtype}, {name}"
    text = f"{sentence(rows, n)} {read_sentence(read_rows)}".strip()
    painter = functools.partial(_paint, rows, read_rows, levels, title)
    return Finding(
        text, [*rows, *read_rows], n, name, painter, FIGURE_INCHES, details={"cache_bytes": levels}
    )


def reading(working_sets: Sequence[int], place: torch.device) -> dict[int, Callable[[], Tensor]]:
    """Return calls that read a vector of so many KiB of fp32 again and again, by these: one call reads READ_BYTES."""
    calls: dict[int, Callable[[], Tensor]] = {}
    for kib in sorted(set(working_sets)):
        vector = torch.ones(
            kib * 2**10 // 4, device=place
        )  # ones: untouched pages of a host are not memory
        calls[kib] = functools.partial(torch.sum, vector.expand(_times(kib), len(vector)), dim=1)
    return calls


def _times(kib: int) -> int:
    return max(1, READ_BYTES // (kib * 2**10))


def cache_levels(place: torch.device, folder: Path = CACHES) -> dict[str, int]:
    """Return the bytes of each cache that holds data, the smallest first; empty where the system does not say."""
    if place.type == "cuda":
        return {"L2": int(torch.cuda.get_device_properties(place).L2_cache_size)}
    levels = {}
    for cache in sorted(folder.glob("index*")):
        kind, level, size = (
            (cache / name).read_text().strip() for name in ("type", "level", "size")
        )
        if kind != "Instruction" and size.endswith("K"):
            levels[f"L{level}"] = int(size[:-1]) * 2**10
    return dict(sorted(levels.items(), key=lambda item: item[1]))


def _read_row(kib: int, seconds: Sequence[float], levels: Mapping[str, int]) -> dict[str, Any]:
    low, middle, high = (
        float(v)
        for v in np.quantile(_times(kib) * kib * 2**10 / np.array(seconds) / 1e9, QUARTILES)
    )
    return {
        "way": f"reading {_size(kib)}",
        "repeats": len(seconds),
        "gb_per_second": middle,
        "gb_low": low,
        "gb_high": high,
        "fits": next(
            (level for level, size in levels.items() if kib * 2**10 <= size),
            "no cache" if levels else None,
        ),
        "kib": kib,
    }


def _size(kib: int) -> str:
    return f"{kib // 2**10} MiB" if kib % 2**10 == 0 else f"{kib} KiB"


def read_sentence(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return in words what the fastest reading has over that of the largest vector; nothing for fewer than two."""
    if len(rows) < 2:
        return ""
    best, last = max(rows, key=lambda row: float(row["gb_per_second"])), rows[-1]

    def where(row: Mapping[str, Any]) -> str:
        inside = {None: "", "no cache": ", which fits no cache,"}.get(
            row["fits"], f", which fits {row['fits']},"
        )
        return f"{_size(row['kib'])}{inside}"

    rates = [format_number(row["gb_per_second"]) for row in (best, last)]
    times = format_number(best["gb_per_second"] / last["gb_per_second"])
    first = f"A vector of {where(best)} is read at {rates[0]} GB/s"
    return f"{first}, {times} times as fast as one of {where(last)} at {rates[1]}."


def measure(
    named: Mapping[str, Callable[[], None]],
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
    timers = {
        name: Timer("way()", globals={"way": way}, timer=clock, num_threads=torch.get_num_threads())
        for name, way in named.items()
    }
    calls = {}
    for name, timer in timers.items():
        once = timer.timeit(1).median
        standing_still = (
            once < 1e-8
        )  # torch takes a clock that stands still for one that read 1e-9 s
        calls[name] = 1 if standing_still else max(1, math.ceil(segment_seconds / once))
    seconds: dict[str, list[float]] = {name: [] for name in named}
    for _ in range(repeats):
        for name in rng.permutation(list(named)).tolist():
            if not seconds[name] or calls[name] * sum(seconds[name]) < limit_seconds:
                seconds[name].append(timers[name].timeit(calls[name]).median)
    return seconds


def _rows(seconds: Mapping[str, Sequence[float]], flops: float) -> Iterator[dict[str, Any]]:
    slowest: float | None = None
    for name, values in seconds.items():
        low, middle, high = (
            float(value) for value in np.quantile(flops / np.array(values) / 1e9, QUARTILES)
        )
        slowest = slowest or middle
        yield {
            "way": name,
            "repeats": len(values),
            "gflops": middle,
            "gflops_low": low,
            "gflops_high": high,
            "times_as_fast": middle / slowest,
        }


def sentence(rows: Sequence[Mapping[str, Any]], n: int) -> str:
    """Return the finding in words, from the rows of the four ways in their order."""
    _, columns, blocks, last = rows
    return (
        f"The whole product is {format_number(last['times_as_fast'])} times as fast as element by element and"
        f" {format_number(last['gflops'] / columns['gflops'])} times as fast as column by column;"
        f" {blocks['way']} reach {blocks['gflops'] / last['gflops']:.0%} of it (medians, n = {n} or more)."
    )


def _paint(
    rows: Sequence[Mapping[str, Any]],
    read_rows: Sequence[Mapping[str, Any]],
    levels: Mapping[str, int],
    title: str,
    figure: "Figure",
) -> None:
    """Draw one bar a way, with its quartiles and its number, and the rates of reading over the vector's size."""
    axes, reads = figure.subplots(1, 2)
    values = [row["gflops"] for row in rows]
    reach = [[value - row["gflops_low"] for value, row in zip(values, rows, strict=True)]]
    reach.append([row["gflops_high"] - value for value, row in zip(values, rows, strict=True)])
    names = [f"{row['way'].replace(' by ', chr(10) + 'by ')}\nn = {row['repeats']}" for row in rows]
    axes.bar(names, values, color=BLUE, width=0.6, zorder=2)
    axes.errorbar(
        range(len(rows)), values, yerr=reach, fmt="none", ecolor=INK, capsize=4.0, zorder=3
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
    sizes, rates = ([row[name] for row in read_rows] for name in ("kib", "gb_per_second"))
    reads.plot(sizes, rates, "o-", color=BLUE, label="a vector, read again and again")
    reads.fill_between(
        sizes,
        *([row[name] for row in read_rows] for name in ("gb_low", "gb_high")),
        color=BLUE,
        alpha=0.2,
    )
    for level, size in levels.items():
        reads.axvline(size / 2**10, color=INK, linewidth=0.9, linestyle="--")
        reads.text(size / 2**10, 0.97, f" {level}", transform=reads.get_xaxis_transform(), va="top")
    reads.set(
        xscale="log",
        ylim=(0.0, None),
        xlabel="KiB of the vector",
        ylabel="GB/s, median and quartiles",
    )
    reads.grid(color=INK, alpha=0.07, linewidth=0.6)
    figure.suptitle(title, fontsize=10.5, parse_math=False)
