"""The training clock: seconds of training alone, by segments between evaluations.

It synchronises the device at the edges of segments alone, so that asynchronous kernels are counted
where they belong and nothing waits inside a segment. What the training thread waited for a
processor is left out: a segment's seconds are those of a machine that has nothing else to do.
"""

import os
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

# Steps that are not timed: the first ones compile, allocate and warm caches.
WARMUP_STEPS = 5
# Least share of a segment that counts as running: the two clocks are not read at one moment.
LEAST_RUNNING = 0.01
NANOSECOND = 1e-9

Segment = tuple[int, float]
"""Optimizer steps and seconds of the training between two evaluations."""


class TrainingClock:
    """Adds up training seconds and the segments that they come in.

    Args:
        now: a monotonic clock, in seconds; tests give their own.
        synchronize: waits for the device.
        waited: the seconds that this thread has waited for a processor so far.
    """

    def __init__(
        self,
        now: Callable[[], float] = time.perf_counter,
        synchronize: Callable[[], None] = lambda: None,
        waited: Callable[[], float] | None = None,
    ) -> None:
        self._now = now
        self._synchronize = synchronize
        self._waited = waited or processor_wait()
        self.segments: list[Segment] = []
        self._began: tuple[float, float] | None = None

    def start(self) -> None:
        """Begin a segment; one that runs is begun again."""
        self._synchronize()
        self._began = self._now(), self._waited()

    def stop(self, steps: int) -> None:
        """End the segment of ``steps`` optimizer steps; nothing if none was begun."""
        if self._began is None:
            return
        self._synchronize()
        began, waited = self._began
        elapsed = self._now() - began
        running = max(elapsed - (self._waited() - waited), LEAST_RUNNING * elapsed)
        self._began = None
        if steps > 0:
            self.segments.append((steps, running))

    @property
    def seconds(self) -> float:
        """Seconds of all segments."""
        return sum(seconds for _, seconds in self.segments)


def seconds_per_step(segments: Sequence[Segment]) -> float | None:
    """tau(B): the median over segments of the seconds of a step; None without a segment.

    Segments that begin within the first ``WARMUP_STEPS`` steps are left out. Where none would
    remain, the last one counts.
    """
    warm = []
    first_step = 0
    for steps, seconds in segments:
        if first_step >= WARMUP_STEPS:
            warm.append((steps, seconds))
        first_step += steps
    counted = warm or segments[-1:]
    if not counted:
        return None
    return statistics.median(seconds / steps for steps, seconds in counted)


def processor_wait() -> Callable[[], float]:
    """Make a function that tells how long the calling thread has waited for a processor.

    Linux counts it for each thread (proc(5), schedstat: nanoseconds on a processor, nanoseconds on
    a run queue, time slices). Where the system does not count it, it is always 0.
    """
    path = Path(f"/proc/{os.getpid()}/task/{threading.get_native_id()}/schedstat")

    def waited() -> float:
        try:
            fields = path.read_bytes().split()
        except OSError:
            return 0.0
        return int(fields[1]) * NANOSECOND if len(fields) == 3 else 0.0

    return waited
