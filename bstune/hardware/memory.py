"""The memory ceiling: the largest batch size that fits, from a few probes and a linear model of what they took.

A probe trains and evaluates at one batch size, elsewhere, and says what that took; this module only decides what to
probe next. Whatever it returns was probed: the ceiling, which fits, and a size close above it, which does not.

The memory ceiling of a workload on this machine, measured by probes in processes of their own.

What a process may take of this machine's memory, and what it holds.
"""

import json
import math
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from omegaconf import DictConfig, OmegaConf

from bstune.core.errors import ConfigError, HardwareError

if TYPE_CHECKING:
    import torch

# What a probe came to: all of it fits; the first part that does not; it failed for another reason; the device is gone.
Outcome = Literal["fits", "startup", "training", "evaluation", "error", "device"]
GROWTH = 16  # between the first probes, which only look for a size whose memory can be told from the base
TOLD_APART = 0.05  # of the memory that is left: a smaller rise is no ground to extrapolate from


@dataclass(frozen=True)
class ProbeResult:
    """What one probe came to.

    Args:
        batch_size: B.
        outcome: ``fits``, or what went wrong.
        limit: bytes that it was allowed.
        training_bytes: peak of the training steps, with all that the process holds; None if they did not end.
        peak_bytes: of the probe as a whole; a lower bound where it was stopped, None where nobody knows.
        message: the error, or what was stopped.
    """

    batch_size: int
    outcome: Outcome
    limit: int
    training_bytes: int | None = None
    peak_bytes: int | None = None
    message: str | None = None

    @property
    def fits(self) -> bool:
        """Whether the training steps and the evaluation ended within the limit."""
        return self.outcome == "fits"


Probe = Callable[[int], ProbeResult]


@dataclass(frozen=True)
class MemoryModel:
    """Bytes of training at batch size B: base + per_example B.

    Args:
        base, per_example: bytes.
        residual: the largest relative error of the line at the probes that it was fitted to; 0 at two of them.
        points: how many they were.
    """

    base: float
    per_example: float
    residual: float
    points: int

    def __call__(self, batch_size: float) -> float:
        """Return the bytes at a batch size."""
        return self.base + self.per_example * batch_size

    def largest(self, limit: float) -> float:
        """Return the batch size at which ``limit`` bytes are reached; inf if memory does not rise with it."""
        return (limit - self.base) / self.per_example if self.per_example > 0 else math.inf


@dataclass(frozen=True)
class Ceiling:
    """The largest batch size that fits.

    Args:
        at: the probe at it.
        above: the smallest probe over it, which does not fit; None: the range ends at the ceiling.
        smallest: the smallest batch size that runs.
        precision: examples between the two probes at most.
        spread: largest over smallest peak of the probes at the ceiling that fit, less 1; None if it was not verified.
        model: fitted to every probe that fits; None if there were fewer than two batch sizes.
        foretold: the relative error of the bytes that the model foretold for the ceiling from the smaller probes alone;
            None where there were not two.
        probes: all, in order.
        notes: what the reader has to know besides.
    """

    at: ProbeResult
    above: ProbeResult | None
    smallest: int
    precision: int
    spread: float | None
    model: MemoryModel | None
    foretold: float | None
    probes: tuple[ProbeResult, ...]
    notes: tuple[str, ...] = ()

    @property
    def batch_size(self) -> int:
        """The ceiling itself, in examples."""
        return self.at.batch_size

    @property
    def spread_examples(self) -> int | None:
        """The examples whose memory is as much as probes at the ceiling differ by; None where that is not known."""
        if self.spread is None or self.at.peak_bytes is None or self.model is None or self.model.per_example <= 0.0:
            return None
        return round(self.spread * self.at.peak_bytes / self.model.per_example)


def search_range(low: int, high: int, train_examples: int) -> tuple[int, int, tuple[str, ...]]:
    """Return the batch sizes to search, cut to the length of the data set, and a note where they were cut.

    Raises:
        HardwareError: if the smallest is not a batch size, or already larger than the data set.
    """
    if not 1 <= low <= high:
        raise HardwareError(f"the memory ceiling needs 1 <= low <= high, but got low={low} and high={high}")
    if low > train_examples:
        raise HardwareError(
            f"the smallest batch size, {low}, is larger than the training data ({train_examples} examples): "
            "lower search.batch_size.low"
        )
    if high <= train_examples:
        return low, high, ()
    note = f"batch size {high} is larger than the training data: the ceiling was looked for up to {train_examples}"
    return low, train_examples, (note,)


def fit_memory(results: Sequence[ProbeResult]) -> MemoryModel | None:
    """Return the line of least relative squares through the training bytes of probes, with no negative slope.

    Probes without a training peak are left out; None if fewer than two batch sizes are left.
    """
    points = sorted({(r.batch_size, r.training_bytes) for r in results if r.training_bytes is not None})
    if len({size for size, _ in points}) < 2:
        return None
    size, taken = (np.array(column, dtype=np.float64) for column in zip(*points, strict=True))
    slope, base = np.polyfit(size, taken, 1, w=1.0 / taken)
    if slope <= 0:
        slope, base = 0.0, float(np.mean(taken))
    residual = float(np.max(np.abs((base + slope * size) / taken - 1.0)))
    return MemoryModel(float(base), float(slope), residual, len(points))


@dataclass
class _Search:
    """The probes so far; ``bad`` is the smallest one over the bracket, which does not fit."""

    probe: Probe
    low: int
    high: int
    multiple: int
    relative: float
    report: Callable[[ProbeResult], None]
    done: list[ProbeResult] = field(default_factory=list)
    bad: ProbeResult | None = None

    def run(self, batch_size: int) -> ProbeResult:
        """Probe a batch size.

        Raises:
            HardwareError: if the device is lost.
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

    @property
    def end(self) -> int:
        """The largest batch size of which it is not known that it fits."""
        return self.high if self.bad is None else self.bad.batch_size

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
) -> Ceiling:
    """Return the largest batch size that fits, exact to ``multiple``, or to a share of itself if that is more.

    It probes ``low``, then sizes each 16 times larger until memory rises by what can be told apart; a line through the
    largest sizes that fit says where the limit is, and a probe on either side confirms it. Where one of them
    contradicts the line, it is drawn anew; where two probes have not halved the bracket, the next one does. The bracket
    always holds a probed size that fits and, unless the range ends, one that does not, so both ends of the answer are
    tested whatever the law of memory; where memory falls as the batch grows, sizes beyond ``above`` may fit again.

    Args:
        probe: trains and evaluates at a batch size, in a process of its own.
        low: the smallest batch size.
        high: the largest; it is always a candidate itself.
        multiple: candidates are ``low``, multiples of this, and ``high``.
        relative: precision as a share of the batch size, such as 0.01 where memory is noisy; 0: exact to ``multiple``.
        largest_first: probe ``high`` first; if it fits, only ``low`` is probed besides.
        verify: how many probes more the ceiling has to pass before it is returned, where memory is noisy. One that it
            fails makes it the size that does not fit, and the search goes on below.
        notes: go to the result.
        report: called with each probe's result.

    Raises:
        HardwareError: if not even ``low`` fits, no batch size runs, or the device is lost.
    """
    search = _Search(probe, low, high, multiple, relative, report)
    said = list(notes)
    whole = largest_first and low < high and search.run(high).fits and _verified(search, high, verify)
    largest = search.done[-1] if whole else None
    fit = _smallest_that_runs(search)
    smallest = fit.batch_size
    if smallest > low:
        first = next(r for r in search.done if r.batch_size == low)
        said.append(
            f"batch size {low} fails for another reason than memory ({first.message}): the range starts at {smallest}"
        )
    if largest is not None:
        fit = largest
    else:
        fit = _close_in(search, fit)
        while not _verified(search, fit.batch_size, verify):
            fit = _close_in(search, _largest_below(search, fit.batch_size))
    bad = search.bad
    if bad is not None and bad.outcome == "error":
        said.append(
            f"batch size {bad.batch_size} fails for another reason than memory ({bad.message}): the range ends below it"
        )
    return Ceiling(
        at=fit,
        above=bad,
        smallest=smallest,
        precision=search.precision(fit.batch_size),
        spread=_spread(search.done, fit.batch_size),
        model=fit_memory([r for r in search.done if r.fits]),
        foretold=_foretold(fit, search.done),
        probes=tuple(search.done),
        notes=tuple(said),
    )


def _spread(probes: Sequence[ProbeResult], batch_size: int) -> float | None:
    peaks = [r.peak_bytes for r in probes if r.batch_size == batch_size and r.fits and r.peak_bytes is not None]
    return max(peaks) / min(peaks) - 1.0 if len(peaks) > 1 else None


def _verified(search: _Search, batch_size: int, times: int) -> bool:
    """Return whether a batch size fits in as many probes more; the first that does not ends it."""
    return all(search.run(batch_size).fits for _ in range(times))


def _largest_below(search: _Search, batch_size: int) -> ProbeResult:
    """Return the probe of the largest size below one that failed its verification.

    Raises:
        HardwareError: if there is none.
    """
    failed = {r.batch_size for r in search.done if not r.fits}
    below = [r for r in search.done if r.fits and r.batch_size < batch_size and r.batch_size not in failed]
    if not below:
        raise HardwareError(_does_not_fit(search.done[-1]))
    return max(below, key=lambda result: result.batch_size)


def _foretold(ceiling: ProbeResult, probes: Sequence[ProbeResult]) -> float | None:
    model = fit_memory([r for r in probes if r.fits and r.batch_size < ceiling.batch_size])
    if model is None or ceiling.training_bytes is None:
        return None
    return abs(model(ceiling.batch_size) / ceiling.training_bytes - 1.0)


def _smallest_that_runs(search: _Search) -> ProbeResult:
    """Probe ``low``; where it fails for another reason than memory, find the smallest batch size that does not.

    Raises:
        HardwareError: if none fits, or none runs.
    """
    too_large = search.bad
    result = first = search.run(search.low)
    failed, step = search.low, 1
    while result.outcome == "error" and result.batch_size < search.high:
        failed = result.batch_size
        result = search.run(min(failed + step, search.high))
        step *= 2
    if result.outcome == "error":
        raise HardwareError(
            f"training fails at every batch size that was tried, from {search.low} to {search.high}, for another "
            f"reason than memory: {first.message}"
        )
    if not result.fits:
        raise HardwareError(_does_not_fit(result))
    while result.batch_size - failed > 1:
        middle = search.run((failed + result.batch_size) // 2)
        if middle.fits:
            result = middle
        else:
            failed = middle.batch_size
    search.bad = too_large
    return result


def _does_not_fit(result: ProbeResult) -> str:
    limit = f"{result.limit / 2**20:,.0f} MiB"
    taken = "" if result.peak_bytes is None else f" (it had taken {result.peak_bytes / 2**20:,.0f} MiB)"
    what = {
        "startup": (f"the data and the model alone do not fit in {limit}{taken}", "use smaller ones, or raise it"),
        "evaluation": (
            f"training at batch size {result.batch_size} fits in {limit}, but the evaluation does not{taken}",
            "lower workload.data.eval_batch_size, or the batch size of the validation data",
        ),
    }.get(
        result.outcome,
        (
            f"there is no memory for batch size {result.batch_size}: training does not fit in {limit}{taken}",
            "use a smaller model or a lower precision, set protocol.micro_batch_size, or raise the limit",
        ),
    )
    return f"{what[0]}: {what[1]}"


def _close_in(search: _Search, fit: ProbeResult) -> ProbeResult:
    """Probe until the bracket is as narrow as the precision, or the range ends; return its end that fits."""
    widths: list[float] = []
    up = down = 0  # how often in a row a size fitted beyond where the line ends, or failed before it
    while True:
        size, end, bracketed = fit.batch_size, search.end, search.bad is not None
        precision = search.precision(size)
        if size == end or (bracketed and (end - size <= precision or search.snap(end - 1, size) >= end)):
            return fit
        widths.append(end - size if bracketed else math.inf)
        limit_at = _limit_at(search.done, fit)
        near = bracketed and end <= 2 * size
        replicate_of = backs_off = False
        if limit_at is None:
            wanted = math.sqrt(size * end) if bracketed else size * GROWTH
        elif near and len(widths) > 2 and widths[-1] > widths[-3] / 2:
            wanted = (size + end) / 2
        elif bracketed and limit_at >= end:  # contradicted: the farther the line was drawn out, the farther back
            backs_off = True
            wanted = end - max(precision, (end - size) / 8) * 2**down
        elif limit_at - size <= precision:
            replicate_of = True
            wanted = size + precision * 2**up
        else:  # a margin, so that a bracket of one precision has the limit in its middle
            wanted = limit_at - (precision / 2 if precision > search.multiple else 0)
        if bracketed and not size < search.snap(wanted, size) < end:
            wanted = (size + end) / 2
        result = search.run(search.snap(wanted, size))
        up = up + 1 if replicate_of and result.fits else 0
        down = down + 1 if backs_off and not result.fits else 0
        fit = result if result.fits else fit


def _limit_at(done: Sequence[ProbeResult], fit: ProbeResult) -> float | None:
    """Return where the line through the largest sizes that fit meets the limit; None if they cannot be told apart.

    The slope comes from ``fit`` and the largest smaller size whose memory is far enough below: a law with jumps is
    straight only nearby, and two close sizes would say more of the noise than of the slope.
    """
    if fit.training_bytes is None:
        return None
    sizes = {r.batch_size: r.training_bytes for r in done if r.fits and r.training_bytes is not None}
    below = sorted((size, taken) for size, taken in sizes.items() if size < fit.batch_size)
    for size, taken in reversed(below):
        rise = fit.training_bytes - taken
        if rise >= TOLD_APART * (fit.limit - below[0][1]):
            return fit.batch_size + (fit.limit - fit.training_bytes) * (fit.batch_size - size) / rise
    return None


KILLED = (-9, 137)  # SIGKILL, as the exit status of a process and of a shell that ran it
LOST = (
    "No CUDA GPUs are available",
    "no CUDA-capable device",
    "busy or unavailable",
    "GPU is lost",
    "fallen off the bus",
    "uncorrectable ECC",
    "CUDA driver",
    "unspecified launch failure",
)

Ask = Callable[[Mapping[str, Any]], Mapping[str, Any]]


def read_answer(batch_size: int, limit: int, seconds: float, said: Mapping[str, Any]) -> ProbeResult:
    """Return what a probe's process said, or what its end says where it said nothing.

    Args:
        batch_size: of the request.
        limit: of the request, for a process that did not say its own.
        seconds: of the request.
        said: all that it said, the last of each kind, then ``ended``, its exit status; ``late`` or ``held``, why it
            had to be ended; and ``stderr``, whose last line is the error.

    Raises:
        ConfigError: if the workload cannot be built at any batch size; the message is the probe's own.
    """
    if "refused" in said:
        raise ConfigError(said["refused"])
    if "outcome" in said:
        own = {name: said.get(name) for name in ("training_bytes", "peak_bytes", "message")}
        return ProbeResult(batch_size, said["outcome"], said.get("limit", limit), **own)
    if "late" in said:
        return ProbeResult(batch_size, "error", limit, message=f"it did not end within {seconds:g} s")
    if "held" in said:
        held = int(said["held"])
        message = f"stopped at {held / 2**20:,.0f} MiB"
        return ProbeResult(batch_size, said.get("phase", "startup"), limit, peak_bytes=held, message=message)
    if said["ended"] in KILLED:
        message = "ended by the system, as it does when memory runs out"
        return ProbeResult(batch_size, said.get("phase", "training"), limit, message=message)
    message = _last_line(said["stderr"]) or f"the probe ended with status {said['ended']} and said nothing"
    lost = any(words in said["stderr"] for words in LOST)
    return ProbeResult(batch_size, "device" if lost else "error", limit, message=message)


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1].strip() if lines else ""


@contextmanager
def probe_server() -> Iterator[Ask]:
    """Start the process that forks the probes, and give a function that sends it a request and returns what is said.

    It begins to import at once, while this process goes on; what it takes is given back at the end.
    """
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path),
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # asked whether there is CUDA, torch leaves it alone: forks need that
    }
    command = [sys.executable, "-m", "bstune.hardware.probe"]
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(  # this interpreter and our module
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment
        ) as server,
    ):
        requests, answers = server.stdin, server.stdout
        assert requests  # pipes, as asked for
        assert answers

        def ask(request: Mapping[str, Any]) -> Mapping[str, Any]:
            said: dict[str, Any] = {}
            try:
                requests.write(json.dumps(request) + "\n")
                requests.flush()
                while "ended" not in said:
                    said |= json.loads(answers.readline())
            except (BrokenPipeError, json.JSONDecodeError) as error:  # of an empty line: it is gone
                errors.seek(0)
                reason = _last_line(errors.read())
                raise HardwareError(f"the process that starts the probes is gone: {reason}") from error
            return said

        try:
            yield ask
        finally:
            server.kill()  # it holds nothing; a probe that an exception leaves behind ends at its next write


def make_probe(
    ask: Ask, config: DictConfig, limit: int | None, steps: int, seconds: float
) -> Callable[[int], ProbeResult]:
    """Return a probe of a workload: each call trains and evaluates in a process of its own.

    Args:
        ask: from :func:`probe_server`; a probe raises HardwareError if that process is gone.
        config: the composed and checked config, device and precision settled.
        limit: bytes; None on CUDA: the device's memory.
        steps: training steps; the optimizer's state is there from the second on.
        seconds: after which a probe is ended, as one that fails.

    Raises:
        HardwareError: if there is no limit for a CPU.
    """
    if limit is None and config.device == "cpu":
        raise HardwareError("a probe on a CPU needs a memory limit in bytes: give one, or take memory_limit()'s")
    values = OmegaConf.to_container(config, resolve=False)

    def probe(batch_size: int) -> ProbeResult:
        request = {"config": values, "batch_size": batch_size, "steps": steps, "limit": limit, "seconds": seconds}
        return read_answer(batch_size, limit or 0, seconds, ask(request))

    return probe


def measure_ceiling(
    config: DictConfig,
    low: int,
    high: int,
    train_examples: int,
    *,
    limit: int | None,
    multiple: int,
    relative: float,
    steps: int,
    seconds: float,
    largest_first: bool,
    verify: int,
    report: Callable[[ProbeResult], None] = lambda result: None,
    ask: Ask | None = None,
) -> Ceiling:
    """Return the largest batch size of a workload that fits, measured; see :func:`find_ceiling` and :func:`make_probe`.

    Args:
        config: the composed and checked config, device and precision settled.
        low: the smallest batch size of the range.
        high: the largest; it is cut to the length of the data set.
        train_examples: that length.
        limit: bytes; None: the device's memory on CUDA, and :func:`memory_limit`'s on a CPU.
        multiple: candidates are multiples of this.
        relative: precision as a share of the batch size.
        steps: of a probe.
        seconds: after which one probe is ended.
        largest_first: probe ``high`` first.
        verify: probes that the ceiling has to pass besides.
        report: called with each probe's result.
        ask: from :func:`probe_server`; None: one is started.

    Raises:
        HardwareError: as those do.
        ConfigError: if the workload cannot be built.
    """
    low, high, notes = search_range(low, high, train_examples)
    if limit is None and config.device == "cpu":
        limit = memory_limit(Path("/"), resident_bytes()).bytes
    with probe_server() if ask is None else nullcontext(ask) as served:
        return find_ceiling(
            make_probe(served, config, limit, steps, seconds),
            low,
            high,
            multiple=multiple,
            relative=relative,
            largest_first=largest_first,
            verify=verify,
            notes=notes,
            report=report,
        )


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
