"""The largest batch size that fits, from a few probes: memory is a straight line in B.

A probe trains some steps and evaluates, in a process of its own (:mod:`bstune.hardware.timing`);
this module chooses the sizes, and reads what a process may take of the machine and has taken.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bstune.hardware.roofline import Line

# Of the limit a probe near it is to take so much: processes that train alike differ by percents.
NEAR = 0.97
# The largest that fits and the smallest that does not end so close, as a factor.
CLOSE = 1.05
# A size that no probe was run at is taken to fit where the line says so much of the limit.
FAR_BELOW = 0.5
# Sizes are rounded to even numbers of at most this part of them, as a divisor.
ROUND_PART = 16
# Where even the first size does not fit, the next one is smaller by this factor.
STEP_DOWN = 4


@dataclass(frozen=True)
class Probe:
    """What a process took that trained and evaluated at one batch size."""

    fits: bool
    peak: float
    """Bytes at most."""
    limit: float
    """Bytes that it may take."""
    start: float = 0.0
    """Bytes before the training."""
    step: float = 0.0
    """Seconds of a step."""
    refused: str = ""
    """The error of the user's code, if it was none of memory."""


@dataclass(frozen=True)
class Memory:
    """Which batch sizes fit."""

    largest_fit: int | None
    """None: no size fits."""
    smallest_unfit: int | None
    """None: no probe failed for memory."""
    probes: dict[int, Probe]
    """In the order in which they ran."""
    whole: bool
    """Whether the largest that fits was probed."""


def find_largest_fit(
    probe: Callable[[int], Probe],
    low: int,
    high: int,
    first: int,
    multiple: int = 1,
    has_time: Callable[[int], bool] = lambda size: True,
) -> Memory:
    """Find the largest batch size up to ``high`` that fits.

    The first probe bounds the bytes of an example from above, two give a line, which predicts the
    size at the limit; that size is probed, too. Where a prediction fails, the bracket is halved in
    log B. A size that the user's code refuses counts as one that does not fit.

    Args:
        probe: runs a process at a batch size.
        low, high: the range of sizes.
        first: where to begin, such as the baseline's.
        multiple: of which other sizes are.
        has_time: whether a probe at a size would end in time; the first one runs in any case.
    """
    probes: dict[int, Probe] = {}
    size: int | None = first
    is_in_time = True
    while size is not None and is_in_time:
        probes[size] = probe(size)
        size = _next_size(probes, low, high, multiple)
        is_in_time = size is None or has_time(size)
    fits = [size for size, one in probes.items() if one.fits]
    ends = [size for size, one in probes.items() if not one.fits]
    unfit = min((size for size in ends if not probes[size].refused), default=None)
    largest = max(fits, default=None)
    if largest is not None and not is_in_time:
        end = min([high, *(size - 1 for size in ends)])
        safe = _size_at(probes, FAR_BELOW)
        largest = max(largest, math.floor(min(safe, end) / multiple) * multiple)
    return Memory(largest, unfit, probes, is_in_time)


def memory_line(probes: dict[int, Probe]) -> Line | None:
    """Bytes over batch size, through the two largest sizes that fit.

    With one size alone it begins at the bytes before the training, which is an upper bound beyond
    that size. None where no size fits.
    """
    fits = sorted(size for size, one in probes.items() if one.fits)
    if not fits:
        return None
    last = probes[fits[-1]]
    before = (0.0, last.start) if len(fits) == 1 else (fits[-2], probes[fits[-2]].peak)
    return Line.through(before, (fits[-1], last.peak))


def _size_at(probes: dict[int, Probe], share: float) -> float:
    """The batch size that takes a share of the limit by the line; infinite if none does."""
    line = memory_line(probes)
    if line is None or line.per_example <= 0.0:
        return math.inf
    limit = min(one.limit for one in probes.values())
    return (share * limit - line.constant) / line.per_example


def _next_size(probes: dict[int, Probe], low: int, high: int, multiple: int) -> int | None:
    """The size to probe next; None: the largest that fits is known."""
    fit = max((size for size, one in probes.items() if one.fits), default=0)
    unfit = min((size for size, one in probes.items() if not one.fits), default=high + multiple)
    if fit == 0:
        return max(low, _rounded(unfit / STEP_DOWN, multiple)) if unfit > low else None
    wanted = min(_size_at(probes, NEAR), high)
    if unfit <= CLOSE * fit or (wanted < CLOSE * fit and wanted < high):
        return None
    if wanted == high and unfit > high:
        return high if fit < high else None
    size = _rounded(wanted, multiple)
    if not fit < size < unfit:
        # The prediction failed: the middle in log B.
        size = _rounded(math.sqrt(fit * unfit), multiple)
    return size if fit < size < unfit else None


def _rounded(size: float, multiple: int) -> int:
    """Round down to a multiple, and of 2 to 8 where that is a small part: more code takes it."""
    even = 2 ** min(max(int(math.log2(size / ROUND_PART)), 0), 3) if size > ROUND_PART else 1
    step = math.lcm(multiple, even)
    return math.floor(size / step) * step


def available_bytes(own: float, root: Path = Path("/")) -> float:
    """Bytes that a process may take: the least of what machine and control groups have.

    Args:
        own: bytes that it has already.
        root: of the system's files.
    """
    free = []
    for line in _lines(root / "proc/meminfo"):
        if line.startswith("MemAvailable:"):
            free.append(1024.0 * int(line.split()[1]))
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            top, names = root / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            top = root / "sys/fs/cgroup/memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        # In a container the group's own folder may be missing; then the limit is at the top.
        place = top / group.lstrip("/")
        free += [_left_of_group(folder, *names) for folder in (place, *place.parents)]
    return own + min(free, default=math.inf)


def _left_of_group(folder: Path, limit: str, usage: str, cache: str) -> float:
    """Bytes that a control group leaves; what its files are cached in can be given back."""
    limits, used = _lines(folder / limit), _lines(folder / usage)
    # Without a limit it is "max".
    if not limits or not used or not limits[0].isdigit():
        return math.inf
    cached = [line for line in _lines(folder / "memory.stat") if line.startswith(f"{cache} ")]
    return int(limits[0]) - int(used[0]) + sum(int(line.split()[1]) for line in cached)


def _lines(path: Path) -> list[str]:
    """A system file's lines; none where it cannot be read."""
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def resident_bytes(field: str) -> float:
    """Memory of this process by its status (proc(5)): ``VmRSS`` now, ``VmHWM`` its most."""
    for line in _lines(Path("/proc/self/status")):
        if line.startswith(f"{field}:"):
            return 1024.0 * int(line.split()[1])
    return 0.0
