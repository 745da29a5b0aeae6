"""The training-only timer: a trial's seconds by phase, and the seconds per training step.

Training runs in segments between evaluations. The clock synchronises the device at the edges of
segments alone, so that asynchronous kernels are counted where they belong and nothing waits inside
a segment.

A segment's seconds are those of a machine that has nothing else to do: what the training waited for
a processor meanwhile is left out of them. The seconds by phase are the wall's.
"""

import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from pathlib import Path

IMPORTED = time.monotonic()
# Least share of a segment's seconds that counts as running: no step takes no time.
LEAST_RUNNING = 0.01


class Phase(Enum):
    """What a trial's time goes to; what is measured beside the training counts as evaluation."""

    STARTUP = "startup"
    TRAINING = "training"
    EVALUATION = "evaluation"
    CLOSING = "closing"


class TrialClock:
    """Counts a trial's seconds by phase; it starts in ``STARTUP``.

    Args:
        now: a monotonic clock, in seconds; tests give their own.
        synchronize: waits for the device.
        waited: tells for how many seconds the training has waited for a processor so far.
    """

    def __init__(
        self,
        now: Callable[[], float] = time.perf_counter,
        synchronize: Callable[[], None] = lambda: None,
        waited: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._now = now
        self._synchronize = synchronize
        self._waited = waited
        self._seconds = dict.fromkeys(Phase, 0.0)
        # Steps and seconds of the training between evaluations, in order.
        self.segments: list[tuple[int, float]] = []
        self._phase = Phase.STARTUP
        # Seconds of the running segment before it was last interrupted.
        self._segment_seconds = 0.0
        self._since = now()
        self._waited_since = waited()

    def enter(self, phase: Phase) -> float:
        """Leave the present phase for ``phase``, and give the seconds that the old one has run.

        These are the wall's seconds since it was entered, less those that it waited for a
        processor.
        """
        self._synchronize()
        now = self._now()
        waited = self._waited()
        elapsed = now - self._since
        running = elapsed - (waited - self._waited_since)
        self._seconds[self._phase] += elapsed
        self._phase = phase
        self._since = now
        self._waited_since = waited
        # The two clocks are not read at one moment: the wait may come out as long as the segment.
        return max(running, LEAST_RUNNING * elapsed)

    def train(self) -> None:
        """Enter ``TRAINING`` unless it is the present phase."""
        if self._phase is not Phase.TRAINING:
            self.enter(Phase.TRAINING)

    def end_segment(self, steps: int, phase: Phase) -> None:
        """Close a training segment of ``steps`` optimizer steps and enter ``phase``."""
        elapsed = self._segment_seconds + self.enter(phase)
        self._segment_seconds = 0.0
        # A segment whose steps the gradient scaler all skipped has no seconds per step.
        if steps > 0:
            self.segments.append((steps, elapsed))

    @contextmanager
    def interrupt_segment(self, phase: Phase) -> Iterator[None]:
        """Count the seconds of the body to ``phase``; the training segment goes on afterwards.

        A segment is the training between two evaluations.
        """
        # enter gives the seconds that the training has run since it last began.
        self._segment_seconds += self.enter(phase)
        try:
            yield
        finally:
            self.enter(Phase.TRAINING)

    def seconds(self, phase: Phase) -> float:
        """Give the seconds spent in ``phase`` up to the last change of phase."""
        return self._seconds[phase]

    @property
    def total_seconds(self) -> float:
        """Seconds spent in all phases up to the last change of phase."""
        return sum(self._seconds.values())


def seconds_per_step(segments: Sequence[tuple[int, float]], warmup_steps: int) -> float | None:
    """Compute tau(B), the median over segments of the seconds per step; None without segments.

    The first segment and all that begin before step ``warmup_steps`` are left out, as first steps
    take longer. Where none would remain, the last one counts.

    Args:
        segments: steps and seconds of each, in order.
        warmup_steps: that are not timed.
    """
    warm = list[tuple[int, float]]()
    start = 0
    for steps, seconds in segments:
        if start >= max(1, warmup_steps):
            warm.append((steps, seconds))
        start += steps
    counted = warm or segments[-1:]
    if not counted:
        return None
    return statistics.median(seconds / steps for steps, seconds in counted)


def stopwatch(now: Callable[[], float] = time.monotonic) -> Callable[[], float]:
    """Start a stopwatch: a function that tells the seconds since this call."""
    start = now()
    return lambda: now() - start


def process_seconds() -> float:
    """Tell the seconds since this process began.

    Where the system does not say, they are those since it imported this module.
    """
    try:
        fields = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return time.monotonic() - IMPORTED
    # The start is field 22 of proc(5), in clock ticks since the machine began. The fields begin
    # with the third here: the process's number and name are cut off, as a name may hold spaces.
    began = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - began
