"""How long a thread was ready to run while other programs had the processors.

Linux counts it for each thread (``/proc/PID/task/TID/schedstat``, proc(5): nanoseconds on a
processor, nanoseconds on a run queue, time slices). A duration less this wait is what a step takes
on a machine that has nothing else to do. It leaves out what a busy machine does to the caches and
clock rates, and to further threads of the same computation.
"""

import os
import threading
import weakref
from collections.abc import Callable
from pathlib import Path

NANOSECOND = 1e-9
# Bytes that are read of it: more than its three numbers can have.
SCHEDSTAT_BYTES = 100


def processors() -> int:
    """Count the processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def processor_wait() -> Callable[[], float]:
    """Make a function that tells for how many seconds this thread has waited for a processor.

    It tells those of the thread that makes it, whichever thread calls it. Where the system does not
    count them, it is always 0.
    """
    path = Path(f"/proc/{os.getpid()}/task/{threading.get_native_id()}/schedstat")
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return lambda: 0.0
    # Some sandboxes have an empty file.
    if len(os.pread(descriptor, SCHEDSTAT_BYTES, 0).split()) != 3:
        os.close(descriptor)
        return lambda: 0.0

    def seconds() -> float:
        """Read the seconds that the thread has waited so far."""
        _running, waiting, _slices = os.pread(descriptor, SCHEDSTAT_BYTES, 0).split()
        return int(waiting) * NANOSECOND

    weakref.finalize(seconds, os.close, descriptor)
    return seconds
