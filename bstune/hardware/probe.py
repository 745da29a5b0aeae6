"""One probe of memory: a few training steps and one evaluation at one batch size, in a process of its own.

The probes' processes are forked by multiprocessing's fork server, which has imported what they all need (5 s that no
probe has to spend again) and never touches the device: CUDA cannot be used on both sides of a fork. So this process
never holds a probe's memory, nor is it the one that the system ends.

On a CPU the peak is the process's resident memory (VmHWM, the interpreter and the libraries with it), reset at the
edges of the phases, where the system lets it. The C library keeps freed blocks as it sees fit, so two processes that
train alike differ by several percent; returning them at once (mallopt's M_MMAP_THRESHOLD) was measured to cost a
CPU trial tens of percent of its time, so the probe uses the allocator as the trials do.

A limit on the address space (RLIMIT_AS) would be no limit on memory: torch reserves far more than it touches. So this
process looks at the probe's resident memory every few milliseconds and ends it above the limit; a peak in between is
compared at the end. (A thread that looks, in the probe, would change when Python's collector frees tensors.) The
system's out-of-memory killer ends a probe first, by its score; that counts as not fitting.

On CUDA the peak is what the caching allocator had reserved, plus the most that was taken on the device beside it: the
context and the libraries, which load with their first use, and what other processes use. The allocator enforces the
limit for itself alone, so where one is given the peak is compared with it too.
"""

import math
import os
import re
import signal
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from bstune.core.clock import Phase, TrialClock
from bstune.core.errors import BstuneError, ConfigError, HardwareError
from bstune.core.records import Budget, TrialSpec
from bstune.core.step_time import StepTime
from bstune.hardware import memory
from bstune.hardware.memory import Ceiling, Outcome, ProbeResult, find_ceiling
from bstune.options import StudyOptions
from bstune.recipe import Recipe
from bstune.system.console import quieten
from bstune.system.secrets import redact
from bstune.system.watchdog import waiting_for
from bstune.trial.checks.preflight import PreflightFindings
from bstune.trial.devices.distributed import join
from bstune.trial.lightning.trainer import without_monitors
from bstune.trial.loop import run_trial
from bstune.trial.processes.workers import CONTEXT, lead_group, start_process, start_server
from bstune.trial.workload import load

LOOK_SECONDS = 0.004  # between two looks at a probe's memory
EVALUATION_SECONDS = 5.0  # that a probe's evaluation may take: it reads as many batches, or one
# Of a probe's seconds, that its steps may be predicted to take: its start and the noise scale take
# some of them, and the prediction is from a few steps at other batch sizes.
PROBE_ROOM = 1 / 3
DEVICE_LOST = re.compile(
    "No CUDA GPUs are available|no CUDA-capable device|busy or unavailable|GPU is lost|fallen off the bus|"
    "uncorrectable ECC|CUDA driver|unspecified launch failure"
)
PHASES: Mapping[Phase, Outcome] = {
    Phase.STARTUP: "startup",
    Phase.TRAINING: "training",
    Phase.EVALUATION: "evaluation",
    Phase.CLOSING: "evaluation",
}


class MemoryClock(TrialClock):
    """A trial's clock that notes the peak memory of each phase, and calls ``report`` as each begins."""

    def __init__(
        self,
        peak: Callable[[], int],  # bytes since the last reset
        reset: Callable[[], object],
        report: Callable[[Phase], object] = lambda phase: None,
    ) -> None:
        super().__init__()
        self.peaks: dict[Phase, int] = {}
        self.last = Phase.STARTUP
        self._peak, self._reset, self._report = peak, reset, report
        report(self.last)

    def enter(self, phase: Phase) -> float:
        """Note the peak of the phase that ends."""
        self.last = self._phase
        elapsed = super().enter(phase)
        self.peaks[self.last] = max(self.peaks.get(self.last, 0), self._peak())
        self._reset()
        self._report(phase)
        return elapsed

    def result(
        self, batch_size: int, limit: int, out_of_memory: str | None, enforced: bool
    ) -> ProbeResult:
        """Return the result of a probe that ended by itself; peaks count unless the device ``enforced`` the limit."""
        training = None if out_of_memory else self.peaks.get(Phase.TRAINING)
        over = (
            []
            if enforced
            else [PHASES[phase] for phase in PHASES if self.peaks.get(phase, 0) > limit]
        )
        outcome: Outcome = (
            PHASES[self.last] if out_of_memory is not None else over[0] if over else "fits"
        )
        return ProbeResult(
            batch_size, outcome, limit, training, max(self.peaks.values()), out_of_memory
        )


@dataclass(frozen=True)
class TrialProbe:
    """Probes a workload: a short trial in a process of its own at each batch size that it is called with."""

    options: StudyOptions
    recipe: Recipe
    limit: int | None  # bytes; None: all memory of a CUDA device
    steps: int
    seconds: float  # after which a probe fails
    evaluation_batches: int | None = None  # that it evaluates; None: all of them

    @property
    def on_cpu(self) -> bool:
        """Whether the peak is of this machine's memory, not of a CUDA device's."""
        return not self.options.device.startswith("cuda")

    def __call__(self, batch_size: int) -> ProbeResult:
        """Run a probe; ConfigError if its workload cannot be built at any batch size."""
        start_server()
        receiver, sender = CONTEXT.Pipe(duplex=False)
        what = f"the survey's probe of memory at batch size {batch_size}"
        with receiver, tempfile.NamedTemporaryFile() as log, waiting_for(what):
            process = CONTEXT.Process(
                target=_run, args=(self, batch_size, sender, log.name, dict(os.environ))
            )
            messages: list[Any] = []
            stopped: str | int | None = None  # the reason, or the bytes that were over the limit
            end = time.monotonic() + self.seconds
            try:
                start_process(process)
                sender.close()
                while process.exitcode is None and stopped is None:
                    process.join(LOOK_SECONDS)
                    messages += _received(receiver)  # a pipe that nobody reads would fill
                    resident = memory.resident_bytes(process.pid) if self.on_cpu else 0
                    if time.monotonic() > end:
                        stopped = f"it did not end within {self.seconds:g} s"
                    elif self.limit is not None and resident > self.limit:
                        stopped = resident
            finally:  # an interruption leaves no probe behind
                if process.pid is not None:
                    process.kill()
                    process.join()
            messages += _received(receiver)
            errors = log.read().decode(errors="replace")
        return _read(batch_size, self.limit or 0, messages, stopped, process.exitcode, errors)


def _received(receiver: Connection) -> list[Any]:
    """Return the messages that wait in a pipe; one that a killed process left unfinished is dropped."""
    messages: list[Any] = []
    with suppress(EOFError, OSError):  # the other end is closed
        while receiver.poll():
            messages.append(receiver.recv())
    return messages


def _read(
    size: int,
    limit: int,
    messages: list[Any],
    stopped: str | int | None,
    exitcode: int | None,
    errors: str,
) -> ProbeResult:
    """Return the result among a probe's messages, or else what its phases, its exit and its error output mean."""
    last: Any = messages[-1] if messages else "startup"
    if isinstance(last, BstuneError):
        raise ConfigError(str(last))
    if isinstance(last, ProbeResult):
        return last
    if isinstance(stopped, str):
        return ProbeResult(size, "error", limit, message=stopped)
    if stopped is not None:
        message = f"stopped at {stopped / 2**20:,.0f} MiB"
        return ProbeResult(size, last, limit, peak_bytes=stopped, message=message)
    if exitcode == -signal.SIGKILL:
        return ProbeResult(
            size, last, limit, message="ended by the system, as it does when memory runs out"
        )
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    message = (
        redact(lines[-1])
        if lines
        else f"the probe ended with status {exitcode} and printed nothing"
    )
    return ProbeResult(
        size, "device" if DEVICE_LOST.search(errors) else "error", limit, message=message
    )


def _write_if_allowed(path: str, text: str) -> None:
    with suppress(OSError):  # not every system has it, or lets a process write to it
        Path(path).write_text(text)


def _run(
    probe: TrialProbe, batch_size: int, sender: Connection, log: str, environment: Mapping[str, str]
) -> None:
    """Run in the probe's process: send each phase as it begins, then the result or a ConfigError; print to ``log``."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that started it ends it
    lead_group()
    try:
        descriptor = os.open(log, os.O_WRONLY | os.O_APPEND)
    except FileNotFoundError:  # the survey was interrupted meanwhile
        return
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.environ.update(environment)  # the server's is that of the moment when it started
    _write_if_allowed("/proc/self/oom_score_adj", "1000")
    quieten()
    options = probe.options
    device = torch.device(options.device)
    if not probe.on_cpu and not torch.cuda.is_available():
        message = f"torch finds no CUDA device for device={device}"
        sender.send(ProbeResult(batch_size, "device", probe.limit or 0, message=message))
        return
    clock, limit = _clock(device, probe.limit, lambda phase: sender.send(PHASES[phase]))
    share = -(-batch_size // options.devices)  # the largest of the devices'
    try:
        if options.devices > 1:
            join(0, 1)  # DDP's buffers count, too
        workload, protocol = load(options, probe.recipe)
        spec = TrialSpec(0, 0, share, options.scaling.lr, None, 0)
        horizon = max(probe.steps, protocol.last_step(batch_size))
        protocol = replace(
            protocol.for_steps_only(Budget(probe.steps, 1)),
            devices=1,
            # As trials do at some of their steps.
            noise_scale_every=None if protocol.noise_scale_every is None else 1,
            trainer={
                **without_monitors(protocol.trainer),
                "num_sanity_val_steps": 0,
                **_limits(probe.evaluation_batches),
            },
        )
        result = run_trial(workload, spec, protocol, clock=clock, horizon=horizon)
    except BstuneError as error:
        sender.send(ConfigError(str(error)))
        return
    out_of_memory = (
        (result.message or "out of memory") if result.status == "out of memory" else None
    )
    sender.send(
        clock.result(
            batch_size, limit, out_of_memory, enforced=not probe.on_cpu and probe.limit is None
        )
    )


def _limits(evaluation_batches: int | None) -> dict[str, int]:
    return {} if evaluation_batches is None else {"limit_val_batches": evaluation_batches}


def _clock(
    device: torch.device, limit: int | None, report: Callable[[Phase], object]
) -> tuple[MemoryClock, int]:
    """Return a clock of the device's memory, and the limit: the one that is given, or the device's memory."""
    if device.type == "cpu":
        reset = partial(_write_if_allowed, "/proc/self/clear_refs", "5")
        return MemoryClock(memory.peak_resident_bytes, reset, report), limit or 0
    free, total = torch.cuda.mem_get_info(device)
    taken = total - free

    def peak() -> int:
        # What is no tensor grows after the start: kernels and libraries are loaded with their first use.
        free = torch.cuda.mem_get_info(device)[0]
        outside = max(taken, total - free - torch.cuda.memory_reserved(device))
        return outside + torch.cuda.max_memory_reserved(device)

    if limit is not None:
        memory.cap_cuda_memory(device, (limit - taken) / total)
    clock = MemoryClock(peak, lambda: torch.cuda.reset_peak_memory_stats(device), report)
    return clock, total if limit is None else limit


def evaluated_batches(tried: PreflightFindings | None) -> int | None:
    """Return how many validation batches a probe reads; None: all, as they take few seconds.

    The first batch takes as much memory as the others, but where a module keeps what it sees.
    """
    if tried is None or tried.evaluation_seconds <= EVALUATION_SECONDS:
        return None
    share = EVALUATION_SECONDS / tried.evaluation_seconds
    return max(1, round(share * tried.evaluation_batches))


def largest_in_time(high: int, low: int, seconds: float, step_time: StepTime) -> int:
    """Return the largest batch size from ``low`` to ``high`` whose step is predicted to end in time.

    Those that take at most twice as long as the smallest are in time, as nothing much shorter is to be had.
    """
    limit = max(seconds, 2.0 * step_time(low))
    if step_time(high) <= limit:
        return high
    in_time = (limit - step_time.overhead) / step_time.per_example
    return max(low, min(high, math.floor(in_time)))


def measure_ceiling(
    options: StudyOptions,
    recipe: Recipe,
    low: int,
    high: int,
    train_examples: int,
    *,
    limit: int | None,
    steps: int,
    seconds: float,
    tried: PreflightFindings | None = None,
    wanted_seconds: float = math.inf,
    **search: Any,
) -> Ceiling:
    """Return the largest batch size of a workload that fits, measured in the range as far as there are examples.

    ``limit`` is in bytes, by default all that the device has; a probe is ended after ``seconds``. ``tried`` is what a
    few steps have shown: no probe is started that would not end in time, within ``wanted_seconds`` too. What a larger
    batch size takes is predicted then; ``search`` is :func:`find_ceiling`'s.
    """
    # 0: of a stream they are not known.
    train_examples = train_examples or high
    if low > train_examples:
        raise HardwareError(
            f"the smallest batch size, {low}, is larger than the training data ({train_examples} examples): "
            "lower search.batch_size.low"
        )
    notes = []
    if high > train_examples:
        notes.append(
            f"batch size {high} is larger than the training data: the ceiling was looked for up to {train_examples}"
        )
    high = largest = min(high, train_examples)
    if tried is not None:
        step_seconds = PROBE_ROOM * min(seconds, wanted_seconds) / steps
        high = largest_in_time(largest, low, step_seconds, tried.step_time)
    devices = options.devices
    if devices > 1:
        each = f"1/{devices} of the memory" if options.device == "cpu" else "the memory of one"
        notes.append(
            f"{devices} devices: a probe trains the share of one, ceil(B/{devices}), in {each}"
        )
    if limit is None and options.device == "cpu":
        limit = memory.memory_limit(Path("/"), memory.resident_bytes())
    probe = TrialProbe(options, recipe, limit, steps, seconds, evaluated_batches(tried))
    found = find_ceiling(probe, low, high, notes=notes, **search)
    return found if found.above is not None else found.extended(largest)
