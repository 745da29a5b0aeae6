"""One probe of memory: a few training steps and one evaluation at one batch size, in a process of its own.

``python -m bstune.hardware.probe`` reads a request as JSON from stdin and writes its answer as JSON lines to stdout,
so the process that asks never holds what a probe took, nor is it the one that the system ends.

On a CPU the peak is the process's resident memory (VmHWM, the interpreter and the libraries with it), reset at the
edges of the phases, where the system lets it. The C library keeps freed blocks as it sees fit, so two processes that
train alike differ by several percent; to have it return them at once would cost a CPU trial tens of percent of its
time (mallopt's M_MMAP_THRESHOLD, measured), so the probe takes the allocator as the trials do, noise and all.

A limit on the address space (RLIMIT_AS) would be no limit on memory: torch reserves far more than it touches. So a
thread compares the resident memory with the limit every few milliseconds and ends the process when it is passed, and
what slips between two looks is in the peak, which is compared at the end. The process offers itself first to the
system's out-of-memory killer, whose verdict counts as not fitting.

On CUDA the peak is what the caching allocator had reserved, with all that was taken on the device when the process
began: its own context, and what others hold. The limit is the allocator's own.
"""

import json
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from bstune.clock import Phase, TrialClock
from bstune.errors import BstuneError, ConfigError, HardwareError
from bstune.hardware.memory import Ceiling, Outcome, ProbeResult, find_ceiling, search_range

LOOK_SECONDS = 0.004  # between two looks of the watching thread
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
PHASES: Mapping[Phase, Outcome] = {
    Phase.STARTUP: "startup",
    Phase.TRAINING: "training",
    Phase.EVALUATION: "evaluation",
    Phase.CLOSING: "evaluation",
}


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


def resident_bytes() -> int:
    """Return the resident memory of this process; where /proc is missing, its peak."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return peak_resident_bytes()
    return pages * os.sysconf("SC_PAGE_SIZE")


def peak_resident_bytes() -> int:
    """Return VmHWM, the peak since it was last reset; where /proc is missing, the peak since the process began."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
    line = next(line for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


def write_if_allowed(path: str, text: str) -> bool:
    """Write to a file of the system's; return whether that was possible."""
    try:
        Path(path).write_text(text)
    except OSError:
        return False
    return True


class Meter(TrialClock):
    """A trial's clock that notes the peak memory of each phase beside its seconds.

    Args:
        peak: returns the peak in bytes since the last reset.
        reset: sets the peak to what is held now.
    """

    def __init__(self, peak: Callable[[], int], reset: Callable[[], object]) -> None:
        super().__init__()
        self.peaks: dict[Phase, int] = {}
        self.phase = Phase.STARTUP
        self.last = Phase.STARTUP
        self._peak, self._reset = peak, reset

    def enter(self, phase: Phase) -> float:
        """Note the peak of the phase that is left, as :meth:`TrialClock.enter` does its seconds."""
        elapsed = super().enter(phase)
        self.peaks[self.phase] = max(self.peaks.get(self.phase, 0), self._peak())
        self._reset()
        self.last, self.phase = self.phase, phase
        return elapsed


def judge(meter: Meter, batch_size: int, limit: int, out_of_memory: str | None, has_to_compare: bool) -> ProbeResult:
    """Return what a probe came to that ran to its end, or until memory ran out.

    Args:
        meter: of the probe.
        batch_size: of the probe.
        limit: of the probe, in bytes.
        out_of_memory: the error, if memory ran out.
        has_to_compare: whether the peak has to be compared with the limit, because nothing enforces it.
    """
    training = None if out_of_memory else meter.peaks.get(Phase.TRAINING)
    peak = max(meter.peaks.values())
    outcome: Outcome = "fits"
    if out_of_memory is not None:
        outcome = PHASES[meter.last]
    elif has_to_compare:
        over = [phase for phase in PHASES if meter.peaks.get(phase, 0) > limit]
        outcome = PHASES[over[0]] if over else "fits"
    return ProbeResult(batch_size, outcome, limit, training, peak, out_of_memory)


def answer(request: Mapping[str, Any], meter_of: Callable[[torch.device], Meter], limit: int) -> ProbeResult:
    """Build the workload of a request, train it for the request's steps, evaluate it once, and return the result.

    Raises:
        BstuneError: if the workload cannot be built.
    """
    from bstune.preflight import make_protocol
    from bstune.protocol import Budget
    from bstune.records import Target, TrialSpec
    from bstune.training import settle
    from bstune.workload import build_workload, train

    settled = settle(OmegaConf.create(request["config"]))
    config = settled.config
    device = torch.device(config.device)
    meter = meter_of(device)
    mode = config.workload.target.mode
    never = Target(config.workload.target.metric, -1e300 if mode == "min" else 1e300, mode)
    protocol = make_protocol(config, never, {**settled.trainer, "num_sanity_val_steps": 0})
    workload = build_workload(config)
    spec = TrialSpec(0, 0, request["batch_size"], float(config.scaling.lr), None, 0)
    result = train(workload, spec, replace(protocol, budget=Budget(request["steps"], 1)), clock=meter)
    error = (result.message or "out of memory") if result.status == "oom" else None
    return judge(meter, spec.batch_size, limit, error, device.type == "cpu")


def main() -> int:
    """Answer the request on stdin: one JSON line a phase, and one at the end."""
    from bstune.command import quieten

    out = os.dup(1)
    os.dup2(2, 1)  # what the workload prints is no answer
    write_if_allowed("/proc/self/oom_score_adj", "1000")
    request = json.load(sys.stdin)
    quieten()
    name = str(request["config"]["device"])
    if name.startswith("cuda") and not torch.cuda.is_available():
        return _tell(out, outcome="device", message=f"torch finds no CUDA device for device={name}")
    limit = int(request["limit"] or 0)
    cuda = torch.cuda.is_available() and name != "cpu"
    if cuda:
        meter, limit = _cuda_meter(torch.device("cuda" if name == "auto" else name), request["limit"])
    else:
        meter = Meter(peak_resident_bytes, lambda: write_if_allowed("/proc/self/clear_refs", "5"))
        threading.Thread(target=_watch, args=(out, meter, limit), daemon=True).start()
    try:
        result = answer(request, lambda device: meter, limit)
    except BstuneError as error:
        return _tell(out, refused=str(error))
    return _tell(
        out,
        outcome=result.outcome,
        limit=limit,
        training_bytes=result.training_bytes,
        peak_bytes=result.peak_bytes,
        message=result.message,
    )


def _tell(out: int, **values: Any) -> int:
    os.write(out, (json.dumps(values) + "\n").encode())  # one write: two threads' lines do not mix
    return 0


def _watch(out: int, meter: Meter, limit: int) -> None:
    phase = None
    while True:
        if meter.phase != phase:
            phase = meter.phase
            _tell(out, phase=PHASES[phase])
        held = resident_bytes()
        if held > limit:
            message = f"stopped at {held / 2**20:,.0f} MiB"
            _tell(out, outcome=PHASES[meter.phase], limit=limit, peak_bytes=held, message=message)
            os._exit(0)
        time.sleep(LOOK_SECONDS)


def _cuda_meter(device: torch.device, limit: int | None) -> tuple[Meter, int]:
    """Return a meter of the device's memory, and the limit: the one that is given, or the device's memory."""
    free, total = torch.cuda.mem_get_info(device)
    held = total - free
    if limit is not None:
        torch.cuda.set_per_process_memory_fraction(min(1.0, max(0.0, limit - held) / total), device)
    meter = Meter(
        lambda: held + torch.cuda.max_memory_reserved(device), lambda: torch.cuda.reset_peak_memory_stats(device)
    )
    return meter, total if limit is None else limit


def read_answer(batch_size: int, limit: int, status: int, stdout: str, stderr: str) -> ProbeResult:
    """Return what a probe's process said, or what its end says where it said nothing.

    Args:
        batch_size: of the request.
        limit: of the request, for a process that did not say its own.
        status: exit status.
        stdout: JSON lines.
        stderr: whose last line is the error.

    Raises:
        ConfigError: if the workload cannot be built at any batch size; the message is the probe's own.
    """
    said: dict[str, Any] = {}
    for line in stdout.splitlines():
        said |= json.loads(line)
    if "refused" in said:
        raise ConfigError(said["refused"])
    if "outcome" in said:
        own = {name: said.get(name) for name in ("training_bytes", "peak_bytes", "message")}
        return ProbeResult(batch_size, said["outcome"], said.get("limit", limit), **own)
    if status in KILLED:
        message = "ended by the system, as it does when memory runs out"
        return ProbeResult(batch_size, said.get("phase", "training"), limit, message=message)
    lines = [line for line in stderr.splitlines() if line.strip()]
    message = lines[-1].strip() if lines else f"the probe ended with status {status} and said nothing"
    lost = any(words in stderr for words in LOST)
    return ProbeResult(batch_size, "device" if lost else "error", limit, message=message)


def make_probe(config: DictConfig, limit: int | None, steps: int, seconds: float) -> Callable[[int], ProbeResult]:
    """Return a probe of a workload: each call trains and evaluates in a process of its own.

    Args:
        config: the composed and checked config.
        limit: bytes; None on CUDA: the device's memory.
        steps: training steps; the optimizer's state is there from the second on.
        seconds: after which a probe is ended, as one that fails.

    Raises:
        HardwareError: if there is no limit for a CPU.
    """
    if limit is None and (config.device == "cpu" or not torch.cuda.is_available()):
        raise HardwareError("a probe on a CPU needs a memory limit in bytes: give one, or take memory_limit()'s")
    values = OmegaConf.to_container(config, resolve=False)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path)}

    def probe(batch_size: int) -> ProbeResult:
        request = {"config": values, "batch_size": batch_size, "steps": steps, "limit": limit}
        try:
            done = subprocess.run(  # this interpreter and this module
                [sys.executable, "-m", "bstune.hardware.probe"],
                input=json.dumps(request),
                capture_output=True,
                text=True,
                timeout=seconds,
                env=environment,
                check=False,
            )
        except subprocess.TimeoutExpired:
            message = f"it did not end within {seconds:g} s"
            return ProbeResult(batch_size, "error", limit or 0, message=message)
        return read_answer(batch_size, limit or 0, done.returncode, done.stdout, done.stderr)

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
) -> Ceiling:
    """Return the largest batch size of a workload that fits, measured; see :func:`find_ceiling` and :func:`make_probe`.

    Args:
        config: the composed and checked config.
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

    Raises:
        HardwareError: as those do.
        ConfigError: if the workload cannot be built.
    """
    low, high, notes = search_range(low, high, train_examples)
    if limit is None and (config.device == "cpu" or not torch.cuda.is_available()):
        limit = memory_limit(Path("/"), resident_bytes()).bytes
    probe = make_probe(config, limit, steps, seconds)
    return find_ceiling(
        probe,
        low,
        high,
        multiple=multiple,
        relative=relative,
        largest_first=largest_first,
        verify=verify,
        notes=notes,
        report=report,
    )


if __name__ == "__main__":
    sys.exit(main())
