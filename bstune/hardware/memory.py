"""The memory ceiling: the largest batch size that fits, from a few probes and a linear model of their memory.

A probe (:mod:`bstune.hardware.probe`) trains and evaluates at one batch size in a process of its own; this module only
chooses the batch sizes. Both ends of its answer were probed: the ceiling, which fits, and a size close above it, which
does not. It also reads what a process may take of this machine's memory, and what it has taken.
"""

import math
import os
import resource
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from bstune.core.errors import HardwareError

# All of it fits; the first part that does not; it failed for another reason; the device is gone.
Outcome = Literal["fits", "startup", "training", "evaluation", "error", "device"]
GROWTH = 16  # between the first probes, which only look for a size whose memory differs from the smallest's
MIN_RISE = 0.05  # of the memory that is left: no line is drawn through a smaller difference
# Of the limit. Probes of one size differ by some percent, so one that takes less need not be repeated.
FAR_BELOW = 0.5


@dataclass(frozen=True)
class ProbeResult:
    """One probe: its outcome, and the most memory that its process took."""

    batch_size: int
    outcome: Outcome
    limit: int  # bytes that it was allowed
    training_bytes: int | None = None  # None: the training steps did not end
    peak_bytes: int | None = None  # a lower bound if the probe was stopped; None: not known
    message: str | None = None  # the error, or the reason for stopping

    @property
    def fits(self) -> bool:
        """Whether the training steps and the evaluation ended within the limit."""
        return self.outcome == "fits"


Probe = Callable[[int], ProbeResult]


@dataclass(frozen=True)
class MemoryModel:
    """Bytes of training at batch size B: base + per_example B."""

    base: float
    per_example: float

    def __call__(self, batch_size: float) -> float:
        """Return the bytes at a batch size."""
        return self.base + self.per_example * batch_size


@dataclass(frozen=True)
class Ceiling:
    """The largest batch size that fits, with the probes that show it."""

    at: ProbeResult
    above: (
        ProbeResult | None
    )  # the smallest probe over it, which does not fit; None: the range ends at the ceiling
    smallest: int  # batch size that runs
    precision: int  # examples between the two probes at most
    spread: (
        float | None
    )  # largest over smallest peak of the probes at the ceiling, less 1; None: probed once
    model: MemoryModel | None  # fitted to every probe that fits; None: fewer than two batch sizes
    model_error: (
        float | None
    )  # relative, of the model without the ceiling's own probe; None: fewer than two others
    probes: tuple[ProbeResult, ...]  # in order
    notes: tuple[str, ...] = ()
    # The largest batch size by the model, where there was no time to probe it; None: it was probed.
    predicted: int | None = None

    @property
    def batch_size(self) -> int:
        """The ceiling itself, in examples."""
        return self.at.batch_size if self.predicted is None else self.predicted

    def extended(self, largest: int) -> "Ceiling":
        """Return the ceiling with batch sizes up to ``largest`` that were not probed, as far as the model allows it.

        They take less than half of the limit by the model, which two probes are enough for.
        """
        if self.model is None or largest <= self.at.batch_size:
            return self
        room = FAR_BELOW * self.at.limit - self.model.base
        slope = self.model.per_example
        predicted = largest if slope * largest <= room else math.floor(room / slope)
        if predicted <= self.at.batch_size:
            text = f"batch sizes past {self.at.batch_size} are left out: their memory was not probed, for lack of time"
            return replace(self, notes=(*self.notes, text))
        text = (
            f"the memory of batch sizes past {self.at.batch_size} is predicted, up to {predicted}: a probe would not "
            "have ended in time (hardware.seconds, hardware.memory.probe_seconds)"
        )
        return replace(self, predicted=predicted, notes=(*self.notes, text))

    @property
    def spread_examples(self) -> int | None:
        """The spread of the probes at the ceiling as a number of examples; None where it is not known."""
        if (
            self.spread is None
            or self.at.peak_bytes is None
            or self.model is None
            or self.model.per_example <= 0.0
        ):
            return None
        return round(self.spread * self.at.peak_bytes / self.model.per_example)


def fit_memory(results: Sequence[ProbeResult]) -> MemoryModel | None:
    """Return the line of least relative squares through probes' training bytes; None below two batch sizes."""
    points = sorted(
        {(r.batch_size, r.training_bytes) for r in results if r.training_bytes is not None}
    )
    if len({size for size, _ in points}) < 2:
        return None
    size, taken = (np.array(column, dtype=np.float64) for column in zip(*points, strict=True))
    slope, base = np.polyfit(size, taken, 1, w=1.0 / taken)
    if slope <= 0:
        slope, base = 0.0, float(np.mean(taken))
    return MemoryModel(float(base), float(slope))


@dataclass
class _Bracket:
    """The probes so far, and what :func:`find_ceiling` was given."""

    probe: Probe
    low: int
    high: int
    multiple: int
    relative: float
    report: Callable[[ProbeResult], None]
    is_late: Callable[[], bool]  # whether there is no time for another probe
    done: list[ProbeResult] = field(default_factory=list)
    bad: ProbeResult | None = None  # the smallest that does not fit

    def run(self, batch_size: int) -> ProbeResult:
        """Probe a batch size; a lost device raises HardwareError."""
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
        """Say whether a batch size fits in as many more probes; the first that does not ends it.

        None is needed where the last probe took far less than its limit, and none is run without time for it.
        """
        peak = self.done[-1].peak_bytes
        if peak is not None and peak < FAR_BELOW * self.done[-1].limit:
            return True
        return all(self.is_late() or self.run(batch_size).fits for _ in range(times))

    def precision(self, at: int) -> int:
        """Return how far apart, in examples, the two ends of the bracket may stay."""
        return max(self.multiple, math.floor(self.relative * at))

    def snap(self, batch_size: float, above: int) -> int:
        """Return the candidate at or below ``batch_size``, but over ``above``: a multiple, or the largest of all."""
        if batch_size >= self.high:
            return self.high
        first = (above // self.multiple + 1) * self.multiple
        return min(max(math.floor(batch_size / self.multiple) * self.multiple, first), self.high)


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
    """Return the largest batch size that fits, exact to ``multiple``, or to the ``relative`` share of itself if larger.

    ``largest_first`` probes ``high`` first; if it fits, only ``low`` besides. It has to fit ``verify`` more times. Once
    ``is_late()``, the answer is the largest one that has fitted, however far above it the probe that did not fit lies,
    and a note says so; the smallest batch size, and with ``largest_first`` the largest, is probed in any case.
    """
    # low, then sizes each 16 times larger until memory rises by MIN_RISE; a line through the largest sizes that fit
    # says where the limit is, and a probe on either side confirms it. A probe that contradicts the line draws it anew;
    # where two probes have not halved the bracket, the next one does. So both ends are tested whatever the law of
    # memory; where memory falls as the batch grows, sizes beyond `above` may fit again.
    bracket = _Bracket(probe, low, high, multiple, relative, report, is_late)
    lines = list(notes)
    all_fits = (
        largest_first and low < high and bracket.run(high).fits and bracket.passes(high, verify)
    )
    at_high = bracket.done[-1:]
    fit = _smallest_that_runs(bracket)
    smallest = fit.batch_size
    if smallest > low:
        reason = next(r.message for r in bracket.done if r.batch_size == low)
        lines.append(
            f"batch size {low} fails for another reason than memory ({reason}): the range starts at {smallest}"
        )
    if all_fits:
        (fit,) = at_high
    else:
        fit = _close_in(bracket, fit)
        while not bracket.passes(fit.batch_size, verify):
            fit = _close_in(bracket, _largest_below(bracket, fit.batch_size))
    bad = bracket.bad
    end = high if bad is None else bad.batch_size
    precision = bracket.precision(fit.batch_size)
    if bad is not None and is_late() and end - fit.batch_size > precision:
        precision = end - fit.batch_size
        lines.append(
            f"batch sizes between {fit.batch_size} and {end} were not probed, for lack of time (hardware.seconds): "
            "they are left out"
        )
    if bad is not None and bad.outcome == "error":
        lines.append(
            f"batch size {bad.batch_size} fails for another reason than memory ({bad.message}): the range ends below it"
        )
    fitting = [r for r in bracket.done if r.fits]
    peaks = [
        r.peak_bytes for r in fitting if r.batch_size == fit.batch_size and r.peak_bytes is not None
    ]
    without = fit_memory([r for r in fitting if r.batch_size < fit.batch_size])
    return Ceiling(
        at=fit,
        above=bad,
        smallest=smallest,
        precision=precision,
        spread=max(peaks) / min(peaks) - 1.0 if len(peaks) > 1 else None,
        model=fit_memory(fitting),
        model_error=abs(without(fit.batch_size) / fit.training_bytes - 1.0)
        if without and fit.training_bytes
        else None,
        probes=tuple(bracket.done),
        notes=tuple(lines),
    )


def _largest_below(bracket: _Bracket, batch_size: int) -> ProbeResult:
    """Return the probe of the largest size below one that failed its verification."""
    failed = {r.batch_size for r in bracket.done if not r.fits}
    below = [
        r
        for r in bracket.done
        if r.fits and r.batch_size < batch_size and r.batch_size not in failed
    ]
    if not below:
        raise _does_not_fit(bracket.done[-1])
    return max(below, key=lambda result: result.batch_size)


def _smallest_that_runs(bracket: _Bracket) -> ProbeResult:
    """Probe ``low``; where it fails for another reason than memory, find the smallest batch size that does not."""
    too_large = bracket.bad
    result = first = bracket.run(bracket.low)
    failed, step = bracket.low, 1
    while result.outcome == "error" and result.batch_size < bracket.high:
        failed = result.batch_size
        result = bracket.run(min(failed + step, bracket.high))
        step *= 2
    if result.outcome == "error":
        raise HardwareError(
            f"training fails at every batch size that was tried, from {bracket.low} to {bracket.high}, for another "
            f"reason than memory: {first.message}"
        )
    if not result.fits:
        raise _does_not_fit(result)
    while result.batch_size - failed > 1:
        middle = bracket.run((failed + result.batch_size) // 2)
        if middle.fits:
            result = middle
        else:
            failed = middle.batch_size
    bracket.bad = too_large
    return result


def _does_not_fit(result: ProbeResult) -> HardwareError:
    size, limit = result.batch_size, f"{result.limit / 2**20:,.0f} MiB"
    taken = (
        "" if result.peak_bytes is None else f" (it had taken {result.peak_bytes / 2**20:,.0f} MiB)"
    )
    if result.outcome == "startup":
        return HardwareError(
            f"the data and the model alone do not fit in {limit}{taken}: use smaller ones, or raise it"
        )
    if result.outcome == "evaluation":
        return HardwareError(
            f"training at batch size {size} fits in {limit}, but the evaluation does not{taken}: "
            "lower workload.data.eval_batch_size, or the batch size of the validation data"
        )
    return HardwareError(
        f"there is no memory for batch size {size}: training does not fit in {limit}{taken}: "
        "use a smaller model or a lower precision, set protocol.micro_batch_size, or raise the limit"
    )


def _close_in(bracket: _Bracket, fit: ProbeResult) -> ProbeResult:
    """Probe until the bracket is as narrow as the precision, or the range ends; return its end that fits."""
    widths: list[float] = []
    up = down = (
        0  # how often in a row a size fitted beyond where the line ends, or failed before it
    )
    while True:
        size, bracketed = fit.batch_size, bracket.bad is not None
        end = bracket.high if bracket.bad is None else bracket.bad.batch_size
        precision = bracket.precision(size)
        if size == end or (
            bracketed and (end - size <= precision or bracket.snap(end - 1, size) >= end)
        ):
            return fit
        if bracket.is_late():
            return fit
        widths.append(end - size if bracketed else math.inf)
        limit_at = _limit_at(bracket.done, fit)
        close = bracketed and end <= 2 * size
        confirms = backs_off = False
        if limit_at is None:
            wanted = math.sqrt(size * end) if bracketed else size * GROWTH
        elif close and len(widths) > 2 and widths[-1] > widths[-3] / 2:
            wanted = (size + end) / 2
        elif (
            bracketed and limit_at >= end
        ):  # contradicted: the farther the extrapolation, the farther back
            backs_off = True
            wanted = end - max(precision, (end - size) / 8) * 2**down
        elif limit_at - size <= precision:
            confirms = True
            wanted = size + precision * 2**up
        else:  # a margin, so that a bracket of one precision has the limit in its middle
            wanted = limit_at - (precision / 2 if precision > bracket.multiple else 0)
        if bracketed and not size < bracket.snap(wanted, size) < end:
            wanted = (size + end) / 2
        result = bracket.run(bracket.snap(wanted, size))
        up = up + 1 if confirms and result.fits else 0
        down = down + 1 if backs_off and not result.fits else 0
        fit = result if result.fits else fit


def _limit_at(done: Sequence[ProbeResult], fit: ProbeResult) -> float | None:
    """Return where the line through the largest sizes that fit meets the limit; None if their memory hardly differs."""
    if fit.training_bytes is None:
        return None
    sizes = {
        r.batch_size: r.training_bytes for r in done if r.fits and r.training_bytes is not None
    }
    below = sorted((size, taken) for size, taken in sizes.items() if size < fit.batch_size)
    # The slope comes from `fit` and the largest smaller size whose memory is far enough below: a law with jumps is
    # straight only nearby, and between two close sizes noise outweighs the slope.
    for size, taken in reversed(below):
        rise = fit.training_bytes - taken
        if rise >= MIN_RISE * (fit.limit - below[0][1]):
            return (
                fit.batch_size + (fit.limit - fit.training_bytes) * (fit.batch_size - size) / rise
            )
    return None


def memory_limit(root: Path, resident: int) -> int:
    """Return the bytes that a further process may take beside this one's ``resident`` bytes; ``root`` is ``/``."""
    limits = [
        (limit - resident, f"the container's {limit:,} bytes") for limit in _cgroup_limits(root)
    ]
    lowest, source = min([*limits, (_available(root), "the memory that is free")])
    if lowest <= 0:
        raise HardwareError(
            f"no memory is left for a probe: {source}, and this process takes {resident:,}"
        )
    return lowest


def _cgroup_limits(root: Path) -> list[int]:
    """Return every ``memory.max`` (cgroup v2) or ``memory.limit_in_bytes`` (v1) from the process's own group up."""
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
        group_folder = top / group.lstrip(
            "/"
        )  # missing in some containers, whose limit is at the top then
        for folder in (group_folder, *group_folder.parents):
            if folder.is_relative_to(top) and (folder / name).is_file():
                text = (folder / name).read_text().strip()
                limits += [int(text)] if text.isdigit() else []  # "max": none
    return limits


def _available(root: Path) -> int:
    """Return the bytes that are free; where /proc is missing, all that the machine has."""
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
    except OSError:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    kibibytes = dict(line.split()[:2] for line in lines)
    return int(kibibytes.get("MemAvailable:") or kibibytes["MemTotal:"]) * 1024


def resident_bytes(process: int | None = None) -> int:
    """Return the resident memory of a process, by default this one; 0 for one that has ended."""
    try:
        pages = Path(f"/proc/{process or 'self'}/statm").read_text().split()[1]
    except OSError:
        return peak_resident_bytes() if process is None else 0  # where /proc is missing, the peak
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


def cap_cuda_memory(device: torch.device, share: float) -> None:
    """Let this process take at most a share, cut to 0 to 1, of a CUDA device's memory."""
    # set_per_process_memory_fraction refuses a device without an index
    torch.cuda.set_per_process_memory_fraction(
        min(1.0, max(0.0, share)), torch.device("cuda", device.index or 0)
    )
