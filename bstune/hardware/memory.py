"""The memory ceiling: the largest batch size that fits, from a few probes and a linear model.

A probe (:mod:`bstune.hardware.probe`) trains and evaluates at one batch size in a process of its
own; this module only chooses the batch sizes. Both ends of its answer were probed: the ceiling,
which fits, and a size close above it, which does not. It also reads what a process may take of this
machine's memory, and what it has taken.
"""

import math
import os
import resource
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch

from bstune.core.errors import HardwareError

# All of a trial fits; or the first part of it that does not; or it failed for another reason than
# memory; or the device is gone.
ProbeOutcome = Literal["fits", "startup", "training", "evaluation", "error", "device"]
# The first probes grow by this factor, until memory differs from that of the smallest batch size.
PROBE_GROWTH = 16
# No line is drawn through a difference below this share of the memory that is left.
MIN_RISE = 0.05
# Where a line says wrongly that a failed size fits, the next probe is this part of the bracket
# below the failed one.
FIRST_STEP_BACK = 1 / 8
# Probes of one size differ by some percent. One that takes less than this share of the limit need
# not be repeated.
FAR_BELOW = 0.5
BYTES_PER_MIB = 2**20


@dataclass(frozen=True)
class ProbeResult:
    """One probe: its outcome, and the most memory that its process took."""

    batch_size: int
    outcome: ProbeOutcome
    limit: int
    """The bytes that it was allowed."""
    training_bytes: int | None = None
    """The peak while training; None where the training steps did not end."""
    peak_bytes: int | None = None
    """The peak of all; a lower bound if the probe was stopped, None where it is not known."""
    message: str | None = None
    """The error, or the reason for stopping."""

    @property
    def fits(self) -> bool:
        """Whether the training steps and the evaluation ended within the limit."""
        return self.outcome == "fits"


Probe = Callable[[int], ProbeResult]
"""Trains and evaluates at a batch size."""


@dataclass(frozen=True)
class MemoryModel:
    """Bytes of training at batch size B: base + per_example B."""

    base: float
    per_example: float

    def __call__(self, batch_size: float) -> float:
        """Give the bytes of training at ``batch_size``."""
        return self.base + self.per_example * batch_size


@dataclass(frozen=True)
class Ceiling:
    """The largest batch size that fits, with the probes that show it."""

    at: ProbeResult
    """The probe of the largest batch size that fitted."""
    above: ProbeResult | None
    """The smallest probe over it, which does not fit; None: the range ends at the ceiling."""
    smallest: int
    """The smallest batch size that runs."""
    precision: int
    """The most examples between those two probes."""
    spread: float | None
    """The largest peak of the probes at the ceiling over the smallest, less 1.

    None where it was probed once.
    """
    model: MemoryModel | None
    """The line through all probes that fit; None for fewer than two batch sizes."""
    model_error: float | None
    """The relative error at the ceiling of a line through the smaller batch sizes.

    None where there are fewer than two of them.
    """
    probes: tuple[ProbeResult, ...]
    """All of them, in the order in which they ran."""
    notes: tuple[str, ...] = ()
    predicted: int | None = None
    """The largest batch size by the model; None where the largest one was probed."""

    @property
    def batch_size(self) -> int:
        """The ceiling itself, in examples."""
        if self.predicted is not None:
            return self.predicted
        return self.at.batch_size

    def is_far_below_limit(self, batch_size: int) -> bool:
        """Whether a batch size takes less than half of the limit by the model, if there is one.

        So far from the limit a line through two probes is good enough.
        """
        return self.model is not None and self.model(batch_size) <= FAR_BELOW * self.at.limit

    def extended(self, largest: int) -> "Ceiling":
        """Raise the ceiling to ``largest``, or as far towards it as the model says that it fits.

        The sizes in between were not probed: there was no time. They take less than half of the
        limit by the model, and so far from it a line through two probes is good enough.
        """
        if self.model is None or largest <= self.at.batch_size:
            return self
        # What the batch may take of that half of the limit.
        bytes_of_batch = FAR_BELOW * self.at.limit - self.model.base
        slope = self.model.per_example
        predicted = largest
        if slope * largest > bytes_of_batch:
            predicted = math.floor(bytes_of_batch / slope)
        beyond = f"batch sizes past {self.at.batch_size}"
        if predicted <= self.at.batch_size:
            text = f"{beyond} are left out: their memory was not probed, for lack of time"
            return replace(self, notes=(*self.notes, text))
        text = (
            f"the memory of {beyond} is predicted, up to {predicted}: a probe would not have ended "
            "in time (hardware.seconds, hardware.memory.probe_seconds)"
        )
        return replace(self, predicted=predicted, notes=(*self.notes, text))

    @property
    def spread_examples(self) -> int | None:
        """The spread of the probes at the ceiling, as a number of examples; None if not known."""
        if self.spread is None or self.at.peak_bytes is None:
            return None
        if self.model is None or self.model.per_example <= 0.0:
            return None
        return round(self.spread * self.at.peak_bytes / self.model.per_example)


def fit_memory(results: Sequence[ProbeResult]) -> MemoryModel | None:
    """Fit the line of least relative squares through probes' training bytes.

    None for fewer than two batch sizes.
    """
    distinct = set[tuple[int, int]]()
    for result in results:
        if result.training_bytes is not None:
            distinct.add((result.batch_size, result.training_bytes))
    if len({size for size, _ in distinct}) < 2:
        return None
    points = np.array(sorted(distinct), dtype=np.float64)
    sizes = np.ascontiguousarray(points[:, 0])
    training_bytes = np.ascontiguousarray(points[:, 1])
    # Each residual is divided by the bytes, so that it counts as a share of them.
    slope, base = np.polyfit(sizes, training_bytes, 1, w=1.0 / training_bytes)
    # Memory that falls as the batch grows is noise: all of it counts as the base.
    if slope <= 0:
        return MemoryModel(float(np.mean(training_bytes)), 0.0)
    return MemoryModel(float(base), float(slope))


@dataclass
class _Bracket:
    """The probes so far, and the arguments of :func:`find_ceiling`.

    The bracket lies between the largest batch size that fits and the smallest that does not.
    """

    probe: Probe
    low: int
    high: int
    multiple: int
    relative: float
    report: Callable[[ProbeResult], None]
    is_late: Callable[[], bool]
    """Whether there is no time for another probe."""
    done: list[ProbeResult] = field(default_factory=list)
    """All probes, in the order in which they ran."""
    bad: ProbeResult | None = None
    """The smallest probe that does not fit; None while all fit."""

    @property
    def end(self) -> int:
        """The upper end: the smallest size that does not fit, or the end of the range."""
        if self.bad is None:
            return self.high
        return self.bad.batch_size

    @property
    def fitting(self) -> list[ProbeResult]:
        """The probes that fit, in order."""
        return [result for result in self.done if result.fits]

    def run(self, batch_size: int) -> ProbeResult:
        """Probe a batch size, keep the result and report it.

        A size that does not fit becomes the bracket's upper end. HardwareError if the device is
        lost.
        """
        result = self.probe(batch_size)
        self.done.append(result)
        self.report(result)
        if result.outcome == "device":
            raise HardwareError(
                f"the device was lost while batch size {batch_size} was probed: {result.message}. "
                "Check that it is there and free, then run again"
            )
        if not result.fits:
            self.bad = result
        return result

    def passes(self, batch_size: int, times: int) -> bool:
        """Whether the batch size that was probed last fits in ``times`` more probes.

        The first one that does not fit ends them. If the last probe took far less than its limit,
        or there is no time, no probe runs, and the size passes.
        """
        peak = self.done[-1].peak_bytes
        if peak is not None and peak < FAR_BELOW * self.done[-1].limit:
            return True
        return all(self.is_late() or self.run(batch_size).fits for _ in range(times))

    def precision(self, batch_size: int) -> int:
        """Give how many examples apart the two ends of the bracket may stay."""
        return max(self.multiple, math.floor(self.relative * batch_size))

    def is_narrow(self, largest_fit: int) -> bool:
        """Whether the ends are within the precision, or no size to probe lies between them."""
        if self.end - largest_fit <= self.precision(largest_fit):
            return True
        return self.snap(self.end - 1, above=largest_fit) >= self.end

    def snap(self, batch_size: float, above: int) -> int:
        """Give the largest batch size to probe at or below ``batch_size``, but over ``above``.

        Where none lies between the two it is the next one over ``above``, so that probing goes on.
        Batch sizes to probe are the multiples of ``multiple``, and the largest of the range.
        """
        if batch_size >= self.high:
            return self.high
        first = (above // self.multiple + 1) * self.multiple
        below = math.floor(batch_size / self.multiple) * self.multiple
        return min(max(below, first), self.high)


def find_ceiling(
    probe: Probe,
    low: int,
    high: int,
    *,
    multiple: int,
    relative: float,
    largest_first: bool,
    verify: int,
    notes: Sequence[str] = (),
    report: Callable[[ProbeResult], None] = lambda result: None,
    is_late: Callable[[], bool] = lambda: False,
) -> Ceiling:
    """Find the largest batch size that fits.

    It probes ``low``, then sizes each 16 times larger, until memory rises by MIN_RISE. A line of
    memory over batch size, through the largest sizes that fit, then predicts the size at the limit,
    and a probe on either side of that size checks the prediction. Each probe that contradicts it
    gives a new line.

    The bracket lies between the largest size that fits and the smallest that does not, and both of
    these are probed. Where two probes have not halved it, the next one does, however memory grows.
    Where memory falls as the batch grows, sizes beyond the bracket may fit again.

    Args:
        probe: trains at a batch size.
        low: the smallest batch size, which is probed in any case.
        high: the largest batch size that is asked for.
        multiple: the answer is exact to this number of examples.
        relative: or to this share of the answer, where that is more.
        largest_first: whether ``high`` is probed first, in any case. If it fits, only ``low`` is
            probed besides.
        verify: how many more times the answer has to fit.
        notes: lines that the answer begins with.
        report: takes the result of each probe.
        is_late: whether there is no time for another probe. Then the answer is the largest one that
            has fitted, however far above it the probe that did not fit lies, and a note says so.
    """
    bracket = _Bracket(
        probe=probe,
        low=low,
        high=high,
        multiple=multiple,
        relative=relative,
        report=report,
        is_late=is_late,
    )
    lines = list(notes)
    # The last probe of ``high`` where all its probes fit.
    fit_at_high: ProbeResult | None = None
    if largest_first and low < high and bracket.run(high).fits and bracket.passes(high, verify):
        fit_at_high = bracket.done[-1]
    fit = _smallest_that_runs(bracket)
    smallest = fit.batch_size
    if smallest > low:
        lines.append(_raised_start_note(bracket, smallest))
    if fit_at_high is not None:
        fit = fit_at_high
    else:
        fit = _close_in(bracket, fit)
        # A size that fails when it is repeated is the new upper end.
        while not bracket.passes(fit.batch_size, verify):
            fit = _close_in(bracket, _largest_below(bracket, fit.batch_size))
    bad = bracket.bad
    width = bracket.end - fit.batch_size
    precision = bracket.precision(fit.batch_size)
    # Time ran out before the bracket was narrow enough: the answer is no more precise.
    if bad is not None and is_late() and width > precision:
        precision = width
        lines.append(
            f"batch sizes between {fit.batch_size} and {bracket.end} were not probed, for lack of "
            "time (hardware.seconds): they are left out"
        )
    if bad is not None and bad.outcome == "error":
        lines.append(
            f"batch size {bad.batch_size} fails for another reason than memory ({bad.message}): "
            "the range ends below it"
        )
    return Ceiling(
        at=fit,
        above=bad,
        smallest=smallest,
        precision=precision,
        spread=_spread_at(bracket, fit.batch_size),
        model=fit_memory(bracket.fitting),
        model_error=_model_error(bracket, fit),
        probes=tuple(bracket.done),
        notes=tuple(lines),
    )


def _raised_start_note(bracket: _Bracket, smallest: int) -> str:
    """Say that the range starts at ``smallest``, and why its own smallest size failed."""
    low = bracket.low
    reason = next(result.message for result in bracket.done if result.batch_size == low)
    return (
        f"batch size {low} fails for another reason than memory ({reason}): the range starts at "
        f"{smallest}"
    )


def _spread_at(bracket: _Bracket, batch_size: int) -> float | None:
    """Give the largest peak of the probes that fit at a batch size over the smallest, less 1.

    None for fewer than two of them.
    """
    peaks = list[int]()
    for result in bracket.fitting:
        if result.batch_size == batch_size and result.peak_bytes is not None:
            peaks.append(result.peak_bytes)
    if len(peaks) < 2:
        return None
    return max(peaks) / min(peaks) - 1.0


def _model_error(bracket: _Bracket, largest: ProbeResult) -> float | None:
    """Give the relative error with which smaller batch sizes predict the memory of the largest one.

    They predict it by a line of training's bytes over the batch size. None where fewer than two of
    them fit, and where no bytes were measured at the largest one.

    ``largest``: a probe of the largest batch size that fits.
    """
    smaller = [result for result in bracket.fitting if result.batch_size < largest.batch_size]
    model = fit_memory(smaller)
    if model is None or not largest.training_bytes:
        return None
    return abs(model(largest.batch_size) / largest.training_bytes - 1.0)


def _largest_below(bracket: _Bracket, batch_size: int) -> ProbeResult:
    """Give the largest probe below ``batch_size`` whose size has fitted each time.

    HardwareError where there is none.
    """
    failed = {result.batch_size for result in bracket.done if not result.fits}
    below = list[ProbeResult]()
    for result in bracket.fitting:
        if result.batch_size < batch_size and result.batch_size not in failed:
            below.append(result)
    if not below:
        raise _does_not_fit(bracket.done[-1])
    return max(below, key=lambda result: result.batch_size)


def _smallest_that_runs(bracket: _Bracket) -> ProbeResult:
    """Give the probe of the smallest batch size that trains, which is ``low`` if that does.

    Some modules fail at small batch sizes for another reason than memory. Then growing steps find a
    size that trains, and halving finds the smallest. HardwareError where all sizes fail, or the
    smallest does not fit.
    """
    # Each failed probe becomes the bracket's upper end. Small batches that fail are no such end, so
    # the end of before is put back once the smallest size is found.
    bad_before = bracket.bad
    first = bracket.run(bracket.low)
    result = first
    failed = bracket.low
    step = 1
    while result.outcome == "error" and result.batch_size < bracket.high:
        failed = result.batch_size
        result = bracket.run(min(failed + step, bracket.high))
        step *= 2
    if result.outcome == "error":
        raise HardwareError(
            f"training fails at every batch size that was tried, from {bracket.low} to "
            f"{bracket.high}, for another reason than memory: {first.message}"
        )
    if not result.fits:
        raise _does_not_fit(result)
    while result.batch_size - failed > 1:
        middle = bracket.run((failed + result.batch_size) // 2)
        if middle.fits:
            result = middle
        else:
            failed = middle.batch_size
    bracket.bad = bad_before
    return result


def _does_not_fit(result: ProbeResult) -> HardwareError:
    """Make the error that says why the smallest batch size does not fit, and what to change."""
    size = result.batch_size
    limit = f"{result.limit / BYTES_PER_MIB:,.0f} MiB"
    peak = ""
    if result.peak_bytes is not None:
        peak = f" (it had taken {result.peak_bytes / BYTES_PER_MIB:,.0f} MiB)"
    if result.outcome == "startup":
        return HardwareError(
            f"the data and the model alone do not fit in {limit}{peak}: use smaller ones, or "
            "raise it"
        )
    if result.outcome == "evaluation":
        return HardwareError(
            f"training at batch size {size} fits in {limit}, but the evaluation does not{peak}: "
            "lower workload.data.eval_batch_size, or the batch size of the validation data"
        )
    return HardwareError(
        f"there is no memory for batch size {size}: training does not fit in {limit}{peak}: use a "
        "smaller model or a lower precision, set protocol.micro_batch_size, or raise the limit"
    )


def _close_in(bracket: _Bracket, fit: ProbeResult) -> ProbeResult:
    """Probe until the bracket is as narrow as the precision, or the range or the time ends.

    :func:`_next_size` chooses each size. ``fit`` is the largest probe that fits at the beginning;
    the result is the largest one that fits at the end.
    """
    # The bracket's width before each probe, in examples; infinite while nothing has failed.
    widths = list[float]()
    # How often in a row a size beyond the limit fitted after all, or one a step back failed.
    fitted_beyond = 0
    failed_after_step_back = 0
    while True:
        size = fit.batch_size
        end = bracket.end
        is_closed = bracket.bad is not None
        if size == end or (is_closed and bracket.is_narrow(size)):
            return fit
        if bracket.is_late():
            return fit
        widths.append(end - size if is_closed else math.inf)
        chosen = _next_size(bracket, fit, widths, fitted_beyond, failed_after_step_back)
        result = bracket.run(chosen.batch_size)
        if chosen.is_beyond_limit and result.fits:
            fitted_beyond += 1
        else:
            fitted_beyond = 0
        if chosen.steps_back and not result.fits:
            failed_after_step_back += 1
        else:
            failed_after_step_back = 0
        if result.fits:
            fit = result


class _NextSize(NamedTuple):
    """The batch size to probe next, and which of two rules has chosen it, if either."""

    batch_size: int
    is_beyond_limit: bool = False
    """Whether it is just above the limit that the line predicts, and is expected to fail."""
    steps_back: bool = False
    """Whether it is a step below a size that failed, though the line predicted that it fits."""


def _next_size(
    bracket: _Bracket,
    fit: ProbeResult,
    widths: Sequence[float],
    fitted_beyond: int,
    failed_after_step_back: int,
) -> _NextSize:
    """Choose the batch size to probe next, by the first of these cases that holds.

    "The line" goes through the largest sizes that fit, and "the limit" is where it meets the bytes
    that a probe may take. A bracket is closed once a size has failed.

    1. There is no line yet: the middle of a closed bracket in log B, else a size far above.
    2. The last two probes have not halved a bracket whose ends are within a factor of 2: its
       middle, which does.
    3. The limit is at a size that has failed, or beyond it: a size below the failed one, farther
       below each time that the line is wrong in a row.
    4. The limit is within the precision of the largest size that fits: a size just above that one,
       which is expected to fail; farther above each time that it fits in a row.
    5. Else the limit itself. Where the precision is more than one multiple, half of the precision
       below it: if that fits, one more probe a precision above it closes the bracket around the
       limit.

    A size outside of a closed bracket is replaced by the bracket's middle.

    Args:
        bracket: with the probes so far.
        fit: the probe of the largest size that fits.
        widths: the bracket's width before each probe, this one included.
        fitted_beyond: how often in a row the size of case 4 has fitted.
        failed_after_step_back: how often in a row the size of case 3 has failed.
    """
    size = fit.batch_size
    # The smallest size that has failed, or the end of the range while none has.
    end = bracket.end
    is_closed = bracket.bad is not None
    precision = bracket.precision(size)
    limit_at = _limit_at(bracket.done, fit)
    is_within_factor_2 = is_closed and end <= 2 * size
    is_not_halved = len(widths) > 2 and widths[-1] > widths[-3] / 2
    is_beyond_limit = False
    steps_back = False
    # Case 1, in a closed bracket and in an open one.
    if limit_at is None and is_closed:
        wanted = math.sqrt(size * end)
    elif limit_at is None:
        wanted = size * PROBE_GROWTH
    # Case 2.
    elif is_within_factor_2 and is_not_halved:
        wanted = (size + end) / 2
    # Case 3.
    elif is_closed and limit_at >= end:
        steps_back = True
        wanted = end - max(precision, (end - size) * FIRST_STEP_BACK) * 2**failed_after_step_back
    # Case 4.
    elif limit_at - size <= precision:
        is_beyond_limit = True
        wanted = size + precision * 2**fitted_beyond
    # Case 5, for a precision of several multiples and of one.
    elif precision > bracket.multiple:
        wanted = limit_at - precision / 2
    else:
        wanted = limit_at
    if is_closed and not size < bracket.snap(wanted, above=size) < end:
        wanted = (size + end) / 2
    return _NextSize(bracket.snap(wanted, above=size), is_beyond_limit, steps_back)


def _limit_at(done: Sequence[ProbeResult], fit: ProbeResult) -> float | None:
    """Give the batch size at which a line through the largest sizes that fit meets the limit.

    None where their memory hardly differs, or training bytes are not known.
    """
    if fit.training_bytes is None:
        return None
    # Training bytes by batch size. Of several probes of one size the last one counts.
    bytes_at = dict[int, int]()
    for result in done:
        is_smaller = result.batch_size < fit.batch_size
        if result.fits and result.training_bytes is not None and is_smaller:
            bytes_at[result.batch_size] = result.training_bytes
    if not bytes_at:
        return None
    least = bytes_at[min(bytes_at)]
    # The slope comes from `fit` and the largest smaller size whose memory is far enough below: a
    # law with jumps is straight only nearby, and between two close sizes noise outweighs the slope.
    for size in sorted(bytes_at, reverse=True):
        rise = fit.training_bytes - bytes_at[size]
        if rise >= MIN_RISE * (fit.limit - least):
            bytes_left = fit.limit - fit.training_bytes
            return fit.batch_size + bytes_left * (fit.batch_size - size) / rise
    return None


def memory_limit(root: Path, resident: int) -> int:
    """Give the bytes that one more process may take beside the ``resident`` bytes of this one.

    It is the least of what the machine has free and of what the container's limits leave.
    ``root`` is ``/``; tests have another. HardwareError where nothing is left.
    """
    # What this process takes is not free any more. A container's limit still includes it.
    limits = [(_available(root), "the memory that is free")]
    for limit in _cgroup_limits(root):
        limits.append((limit - resident, f"the container's {limit:,} bytes"))
    lowest, source = min(limits)
    if lowest <= 0:
        raise HardwareError(
            f"no memory is left for a probe: {source}, and this process takes {resident:,}"
        )
    return lowest


def _cgroup_limits(root: Path) -> list[int]:
    """Read the memory limits of this process's control group and of those above it, in bytes.

    They stand in ``memory.max`` (cgroup v2) or ``memory.limit_in_bytes`` (v1). Without a limit the
    list is empty.
    """
    try:
        groups = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    limits = list[int]()
    for line in groups:
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            top = root / "sys/fs/cgroup"
            name = "memory.max"
        elif "memory" in controllers.split(","):
            top = root / "sys/fs/cgroup/memory"
            name = "memory.limit_in_bytes"
        else:
            continue
        # The group's own folder is missing in some containers, whose limit is at the top then.
        group_folder = top / group.lstrip("/")
        for folder in (group_folder, *group_folder.parents):
            file = folder / name
            if not folder.is_relative_to(top) or not file.is_file():
                continue
            text = file.read_text().strip()
            # Without a limit it is "max".
            if text.isdigit():
                limits.append(int(text))
    return limits


def _available(root: Path) -> int:
    """Read the bytes of memory that are free; all of the machine's if the system does not tell."""
    # Only Linux has /proc.
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
    except OSError:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    kibibytes = dict(line.split()[:2] for line in lines)
    # Some kernels and containers do not tell what is available.
    return int(kibibytes.get("MemAvailable:") or kibibytes["MemTotal:"]) * 1024


def resident_bytes(process: int | None = None) -> int:
    """Read the resident memory of a process, by default this one; 0 for one that has ended."""
    try:
        pages = Path(f"/proc/{process or 'self'}/statm").read_text().split()[1]
    except OSError:
        if process is not None:
            return 0
        # Where /proc is missing the peak has to do.
        return peak_resident_bytes()
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def peak_resident_bytes() -> int:
    """Read this process's peak of resident memory since it was last reset (VmHWM), in bytes.

    Where /proc is missing, it is the peak since the process began.
    """
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        # Bytes on macOS, kibibytes elsewhere.
        if sys.platform == "darwin":
            return peak
        return peak * 1024
    line = next(line for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


def cap_cuda_memory(device: torch.device, share: float) -> None:
    """Let this process take at most ``share`` of a CUDA device's memory, cut to 0 to 1."""
    fraction = min(1.0, max(0.0, share))
    # set_per_process_memory_fraction refuses a device without an index.
    indexed = torch.device("cuda", device.index or 0)
    torch.cuda.set_per_process_memory_fraction(fraction, indexed)
