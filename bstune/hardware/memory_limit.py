"""What a process may take of this machine's memory, and what it holds."""

import os
import resource
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bstune.errors import HardwareError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class MemoryLimit:
    """Bytes that a probe may take, and where the number comes from, in words."""

    bytes: int
    source: str


def memory_limit(root: Path, resident: int) -> MemoryLimit:
    """Return what a further process may take on this machine: in its container, or in the memory that is free.

    The container's limit is the least ``memory.max`` (cgroup v2) or ``memory.limit_in_bytes`` (v1) from the process's
    own group up, less what this process holds: it goes on beside its probes.

    Args:
        root: ``/``; a test's own folder with the same files.
        resident: bytes that this process holds.

    Raises:
        HardwareError: if neither can be read, or nothing is left.
    """
    found = [MemoryLimit(limit - resident, f"the container's {limit:,} bytes") for limit in _cgroup_limits(root)]
    available = _available(root)
    if available is not None:
        found.append(MemoryLimit(available, "the memory that is free"))
    if not found:
        raise HardwareError(
            f"neither a container's memory limit nor the free memory can be read under {root}: give a limit in bytes"
        )
    least = min(found, key=lambda limit: limit.bytes)
    if least.bytes <= 0:
        raise HardwareError(f"no memory is left for a probe: {least.source}, and this process holds {resident:,}")
    return least


def _cgroup_limits(root: Path) -> list[int]:
    try:
        groups = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    limits = []
    for line in groups:
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            top, name = root / "sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            top, name = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        own = top / group.lstrip("/")  # in a container it may not be there: the top is the container's own then
        for folder in (own, *own.parents):
            if folder.is_relative_to(top) and (folder / name).is_file():
                text = (folder / name).read_text().strip()
                limits += [int(text)] if text.isdigit() else []  # "max": none
    return limits


def _available(root: Path) -> int | None:
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
    except OSError:
        names = os.sysconf_names
        if root != Path("/") or not {"SC_PHYS_PAGES", "SC_PAGE_SIZE"} <= set(names):
            return None
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    values = {line.partition(":")[0]: line.partition(":")[2].split() for line in lines}
    fields = values.get("MemAvailable") or values.get("MemTotal")
    return int(fields[0]) * 1024 if fields else None


def resident_bytes(process: int | None = None) -> int:
    """Return the resident memory of a process, by default this one; where /proc is missing, this one's peak.

    0 for a process that has just ended.
    """
    try:
        pages = Path(f"/proc/{process or 'self'}/statm").read_text().split()[1]
    except OSError:
        return peak_resident_bytes() if process is None else 0
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def peak_resident_bytes() -> int:
    """Return VmHWM, the peak since it was last reset; where /proc is missing, the peak since the process began."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
    line = next(line for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


def cap_cuda_memory(device: "torch.device", share: float) -> None:
    """Let this process take at most a share, cut to 0 to 1, of a CUDA device's memory."""
    import torch

    # Torch wants the device's number said.
    torch.cuda.set_per_process_memory_fraction(min(1.0, max(0.0, share)), torch.device("cuda", device.index or 0))
