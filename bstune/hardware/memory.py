"""The largest batch size that fits, from a few probes: memory is a straight line in B.

A probe trains some steps and evaluates, in a process of its own (:mod:`bstune.hardware.timing`);
this module chooses the sizes, and reads what a process may take of the machine and has taken.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bstune.hardware.roofline import Line
from bstune.search.fit import inferred_multiple

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
    log B. A size that the user's code refuses counts as one that does not fit, unless a multiple
    explains it; then the other sizes are of that multiple.

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
        combined = _combined_multiple(probes, multiple)
        size = _next_size(probes, low, high, combined)
        is_in_time = size is None or has_time(size)
    fitting, others = _fitting_and_others(probes, combined)
    largest = None
    if fitting:
        largest = fitting[-1]
        if not is_in_time:
            below = others[0] - 1 if others else high
            safe = min(_size_at(probes, FAR_BELOW), below, high)
            largest = max(largest, math.floor(safe / combined) * combined)
    short = [size for size in others if not probes[size].refused]
    return Memory(largest, min(short, default=None), probes, is_in_time)


def _combined_multiple(probes: dict[int, Probe], multiple: int) -> int:
    """The least common multiple with the one that explains what the user's code refused."""
    taken = {size for size, one in probes.items() if one.fits}
    refused = {size for size, one in probes.items() if one.refused}
    return math.lcm(multiple, inferred_multiple(taken, refused))


def _fitting_and_others(probes: dict[int, Probe], multiple: int = 1) -> tuple[list[int], list[int]]:
    """The batch sizes that fit, and those that do not, ascending.

    Refused sizes that are no multiple tell nothing of others, and are in neither.
    """
    fitting = []
    others = []
    for size in sorted(probes):
        if probes[size].fits:
            fitting.append(size)
        elif size % multiple == 0 or not probes[size].refused:
            others.append(size)
    return fitting, others


def memory_line(probes: dict[int, Probe]) -> Line | None:
    """Bytes over batch size, through the two largest sizes that fit.

    With one size alone it begins at the bytes before the training, which is an upper bound beyond
    that size. None where no size fits.
    """
    fitting, _ = _fitting_and_others(probes)
    if not fitting:
        return None
    last = probes[fitting[-1]]
    before = 0.0, last.start
    if len(fitting) > 1:
        before = fitting[-2], probes[fitting[-2]].peak
    return Line.through(before, (fitting[-1], last.peak))


def _size_at(probes: dict[int, Probe], share: float) -> float:
    """The batch size that takes a share of the limit by the line; infinite if none does."""
    line = memory_line(probes)
    if line is None or line.per_example <= 0.0:
        return math.inf
    limit = min(one.limit for one in probes.values())
    return (share * limit - line.constant) / line.per_example


def _next_size(probes: dict[int, Probe], low: int, high: int, multiple: int) -> int | None:
    """The size to probe next; None: the largest that fits is known."""
    fitting, others = _fitting_and_others(probes, multiple)
    high = high // multiple * multiple
    unfit = others[0] if others else high + multiple
    if not fitting:
        return max(low, _rounded_down(unfit / STEP_DOWN, multiple)) if unfit > low else None
    fit = fitting[-1]
    wanted = min(_size_at(probes, NEAR), high)
    if unfit <= CLOSE * fit or (wanted < CLOSE * fit and wanted < high):
        return None
    if wanted == high and unfit > high:
        return high if fit < high else None
    size = _rounded_down(wanted, multiple)
    if not fit < size < unfit:
        # The prediction failed: the middle in log B.
        size = _rounded_down(math.sqrt(fit * unfit), multiple)
    return size if fit < size < unfit else None


def _rounded_down(size: float, multiple: int) -> int:
    """Round down to a multiple; where that takes little, of 2, 4 or 8 too: more code takes it."""
    even = 1
    if size > ROUND_PART:
        even = 2 ** min(int(math.log2(size / ROUND_PART)), 3)
    step = math.lcm(multiple, even)
    return math.floor(size / step) * step


def available_bytes(taken: float, root: Path = Path("/")) -> float:
    """Bytes that a process may take: the least of what machine and control groups have.

    Args:
        taken: bytes that it has already.
        root: of the system's files.
    """
    free = []
    of_machine = _field(root / "proc/meminfo", "MemAvailable:")
    if of_machine is not None:
        free.append(1024.0 * of_machine)
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
        for folder in (place, *place.parents):
            free.append(_free_in_group(folder, *names))
    return taken + min(free, default=math.inf)


def _free_in_group(folder: Path, limit: str, usage: str, cache: str) -> float:
    """Bytes that a control group leaves; its inactive file cache can be given back.

    ``limit`` and ``usage`` are names of files, ``cache`` that of the field of memory.stat.
    """
    limits, used = _lines(folder / limit), _lines(folder / usage)
    # Without a limit it is "max".
    if not limits or not used or not limits[0].isdigit():
        return math.inf
    cached = _field(folder / "memory.stat", f"{cache} ") or 0
    return int(limits[0]) - int(used[0]) + cached


def _lines(path: Path) -> list[str]:
    """A system file's lines; none where it cannot be read."""
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _field(path: Path, start: str) -> int | None:
    """The number in a system file's line that begins so; None where there is no such line."""
    for line in _lines(path):
        if line.startswith(start):
            return int(line.split()[1])
    return None


def resident_bytes(field: str) -> float:
    """Memory of this process by its status (proc(5)): ``VmRSS`` now, ``VmHWM`` its most."""
    return 1024.0 * (_field(Path("/proc/self/status"), f"{field}:") or 0)
