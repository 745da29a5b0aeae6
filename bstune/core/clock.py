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
# Blocks that a training's steps are divided into: the median over them leaves out a stall, and each
# has its share of what an epoch's start costs.
BLOCKS = 5
# Least share of a segment that counts as running: the two clocks are of different resolutions.
LEAST_RUNNING = 0.01
# The most times that both clocks are read for one moment.
READINGS = 10
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
        self._began = self._read()

    def stop(self, steps: int, timed: int | None = None) -> None:
        """End the segment that was begun, and keep it if one of its steps at least was timed.

        Args:
            steps: of the segment.
            timed: those that ran since :meth:`start`, None: all; the others are taken to be as
                long.
        """
        if self._began is None:
            return
        self._synchronize()
        began, waited_before = self._began
        now, waited = self._read()
        elapsed = now - began
        running = max(elapsed - (waited - waited_before), LEAST_RUNNING * elapsed)
        self._began = None
        timed = steps if timed is None else timed
        if timed > 0:
            self.segments.append((steps, running * steps / timed))

    def _read(self) -> tuple[float, float]:
        """The time, and the waits up to it: a wait between the two readings reads both again."""
        for _ in range(READINGS):
            waited = self._waited()
            now = self._now()
            if self._waited() == waited:
                break
        return now, waited

    @property
    def seconds(self) -> float:
        """Seconds of all segments."""
        return sum(seconds for _, seconds in self.segments)


def seconds_per_step(segments: Sequence[Segment]) -> float | None:
    """tau(B): the median over blocks of steps of the seconds of a step; None without a segment.

    Segments that begin within the first ``WARMUP_STEPS`` steps are left out. Where none would
    remain, the last one counts. A block is of whole segments.
    """
    warm = []
    first_step = 0
    for segment in segments:
        if first_step >= WARMUP_STEPS:
            warm.append(segment)
        first_step += segment[0]
    counted = warm or segments[-1:]
    if not counted:
        return None
    enough = sum(steps for steps, _ in counted) / BLOCKS
    means = []
    block = (0, 0.0)
    for steps, seconds in counted:
        block = block[0] + steps, block[1] + seconds
        if block[0] >= enough:
            means.append(block[1] / block[0])
            block = (0, 0.0)
    return statistics.median(means)


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
