"""A matrix product in four ways: what a device does with the same arithmetic in pieces of different size.

Zhang, Lipton, Li and Smola, Dive into Deep Learning, 12.5.1 and 12.5.2: A = B C element by element (dot products),
column by column (products of the matrix and a vector), in blocks of columns, and whole. A product of n x n matrices is
counted as 2 n^3 FLOPs, a multiplication and an addition being one each.
"""

import functools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from omegaconf import DictConfig
from torch import Tensor
from torch.utils.benchmark import Timer

from bstune.core.console import format_number
from bstune.core.errors import ConfigError
from bstune.core.figures import BLUE, INK
from bstune.hardware.roofline import DTYPES
from bstune.sweeps.harness import Finding
from bstune.trial.device import device_name, resolve_device, synchronize

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import Console

FLOATS = {name: dtype for name, dtype in DTYPES.items() if name != "tf32"}  # tf32 is a mode of fp32's, no type
FIGURE_INCHES = (7.5, 4.5)
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
    config: DictConfig,
    console: "Console",
    *,
    device: str,
    dtype: str,
    size: int,
    block: int,
    repeats: int,
    segment_seconds: float,
    limit_seconds: float,
    seed: int,
    now: Callable[[], float] = time.perf_counter,
) -> Finding:
    """Measure the four ways and return their GFLOP/s, median and quartiles over the repeats."""
    place = resolve_device(device, "sweep.experiment.device")
    if dtype not in FLOATS:
        raise ConfigError(f"sweep.experiment.dtype must be one of {', '.join(FLOATS)}, but got {dtype!r}")
    counts = {"size": size, "block": block, "repeats": repeats}
    for name, value in {**counts, "segment_seconds": segment_seconds, "limit_seconds": limit_seconds}.items():
        if not (math.isfinite(value) and value > 0):
            raise ConfigError(f"sweep.experiment.{name} must be positive, but got {value}")
    generator = torch.Generator().manual_seed(seed)
    b, c = (torch.randn(size, size, generator=generator).to(place, FLOATS[dtype]) for _ in range(2))
    a = torch.zeros_like(b)
    named = {name: functools.partial(way, a, b, c) for name, way in ways(block).items()}

    def clock() -> float:
        synchronize(place)
        return now()

    seconds = measure(named, repeats, segment_seconds, limit_seconds, np.random.default_rng(seed), clock)
    rows = list(_rows(seconds, 2.0 * size**3))
    name = device_name({"accelerator": place.type, "devices": [place.index or 0]})
    n = min(row["repeats"] for row in rows)
    title = f"A = B C of {size} x {size} matrices in {dtype}, {name}"
    return Finding(sentence(rows, n), rows, n, name, functools.partial(_paint, rows, title), FIGURE_INCHES)


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
        standing_still = once < 1e-8  # torch takes a clock that stands still for one that read 1e-9 s
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
        low, middle, high = (float(value) for value in np.quantile(flops / np.array(values) / 1e9, QUARTILES))
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


def _paint(rows: Sequence[Mapping[str, Any]], title: str, figure: "Figure") -> None:
    """Draw one bar a way, with its quartiles and its number."""
    axes = figure.subplots()
    values = [row["gflops"] for row in rows]
    reach = [[value - row["gflops_low"] for value, row in zip(values, rows, strict=True)]]
    reach.append([row["gflops_high"] - value for value, row in zip(values, rows, strict=True)])
    names = [f"{row['way'].replace(' by ', chr(10) + 'by ')}\nn = {row['repeats']}" for row in rows]
    axes.bar(names, values, color=BLUE, width=0.6, zorder=2)
    axes.errorbar(range(len(rows)), values, yerr=reach, fmt="none", ecolor=INK, capsize=4.0, zorder=3)
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
    axes.set_title(title, fontsize=10.5, parse_math=False)
