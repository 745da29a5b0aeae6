"""One probe of memory: a few steps and one evaluation at one batch size, in a process of its own.

The probes' processes are forked by multiprocessing's fork server, which has imported what they all
need (5 s that no probe has to spend again) and never touches the device: CUDA cannot be used on
both sides of a fork. So this process never holds a probe's memory, nor is it the one that the
system ends.

On a CPU the peak is the process's resident memory (VmHWM, the interpreter and the libraries with
it), reset at the edges of the phases, where the system lets it. The C library keeps freed blocks as
it sees fit, so two processes that train alike differ by several percent; returning them at once
(mallopt's M_MMAP_THRESHOLD) was measured to cost a CPU trial tens of percent of its time, so the
probe uses the allocator as the trials do.

A limit on the address space (RLIMIT_AS) would be no limit on memory: torch reserves far more than
it touches. So this process looks at the probe's resident memory every few milliseconds and ends it
above the limit; a peak in between is compared at the end. (A thread that looks, in the probe, would
change when Python's collector frees tensors.) The system's out-of-memory killer ends a probe first,
by its score; that counts as not fitting.

On CUDA the peak is what the caching allocator had reserved, plus the most that was taken on the
device beside it: the context and the libraries, which load with their first use, and what other
processes use. The allocator enforces the limit for itself alone, so where one is given the peak is
compared with it too.
"""

import math
import os
import re
import signal
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeGuard

import torch

from bstune.core.clock import Phase, TrialClock
from bstune.core.errors import BstuneError, ConfigError, HardwareError
from bstune.core.records import Budget, TrialProtocol, TrialSpec
from bstune.core.step_time import StepTime
from bstune.hardware import memory
from bstune.hardware.memory import Ceiling, ProbeOutcome, ProbeResult, find_ceiling, fit_memory
from bstune.options import StudyOptions
from bstune.recipe import Recipe
from bstune.system import interruption
from bstune.system.console import quieten
from bstune.system.secrets import redact
from bstune.system.watchdog import waiting_for
from bstune.trial.checks.preflight import PreflightFindings
from bstune.trial.devices.distributed import join
from bstune.trial.lightning.trainer import without_recording_or_stopping
from bstune.trial.loop import run_trial
from bstune.trial.processes.fork_server import (
    CONTEXT,
    make_process,
    start_process,
    start_server,
)
from bstune.trial.workload import load_workload

# Seconds between two looks at a probe's memory.
PROBE_LOOK_SECONDS = 0.004
# A probe's evaluation reads as many batches as take so long, or one.
EVALUATION_SECONDS = 5.0
# The share of a probe's seconds that its steps are to take by prediction. Its start and the noise
# scale take some too, and the prediction is from a few steps at other batch sizes.
PROBE_ROOM = 1 / 3
# The message of a probe that was ended by its time begins so.
TOO_SLOW = "it did not end within"
DEVICE_LOST = re.compile(
    "No CUDA GPUs are available|no CUDA-capable device|busy or unavailable|GPU is lost|"
    "fallen off the bus|uncorrectable ECC|CUDA driver|unspecified launch failure"
)
PHASES: Mapping[Phase, ProbeOutcome] = {
    Phase.STARTUP: "startup",
    Phase.TRAINING: "training",
    Phase.EVALUATION: "evaluation",
    Phase.CLOSING: "evaluation",
}


Message = ProbeOutcome | ProbeResult | BstuneError
"""A message of a probe's process. It sends each phase as it begins, as the outcome of a probe that
ends there; then a result, or an error that the workload has at any batch size."""


class MemoryClock(TrialClock):
    """A trial's clock that notes the peak memory of each phase.

    Args:
        peak: reads the peak since the last reset, in bytes.
        reset: makes the next peak begin.
        report: takes each phase as it begins.
    """

    def __init__(
        self,
        peak: Callable[[], int],
        reset: Callable[[], object],
        report: Callable[[Phase], object] = lambda phase: None,
    ) -> None:
        super().__init__()
        self.peaks: dict[Phase, int] = {}
        # The phase that ended last: at a trial's end, the one in which memory may have run out.
        self.last = Phase.STARTUP
        self._peak = peak
        self._reset = reset
        self._report = report
        report(self.last)

    def enter(self, phase: Phase) -> float:
        """Enter a phase, note the peak of the one that ends, and give its seconds."""
        self.last = self._phase
        elapsed = super().enter(phase)
        self.peaks[self.last] = max(self.peaks.get(self.last, 0), self._peak())
        self._reset()
        self._report(phase)
        return elapsed

    def result(
        self, batch_size: int, limit: int, out_of_memory: str | None, enforced: bool
    ) -> ProbeResult:
        """Give the result of a probe that ended by itself.

        Args:
            batch_size: of the probe.
            limit: the bytes that it was allowed.
            out_of_memory: the device's own error; None where it had enough memory.
            enforced: whether the device itself enforced the limit. If not, the peaks are compared
                with it.
        """
        training_bytes: int | None = None
        outcome: ProbeOutcome = "fits"
        if out_of_memory is not None:
            # The peak then says how much memory there was, not how much training needs: the
            # training bytes stay None.
            outcome = PHASES[self.last]
        else:
            training_bytes = self.peaks.get(Phase.TRAINING)
            if not enforced:
                outcome = self._first_over(limit)
        return ProbeResult(
            batch_size=batch_size,
            outcome=outcome,
            limit=limit,
            training_bytes=training_bytes,
            peak_bytes=max(self.peaks.values()),
            message=out_of_memory,
        )

    def _first_over(self, limit: int) -> ProbeOutcome:
        """Name the first phase whose peak is over ``limit`` bytes; ``fits`` if there is none."""
        for phase, outcome in PHASES.items():
            if self.peaks.get(phase, 0) > limit:
                return outcome
        return "fits"


@dataclass(frozen=True)
class TrialProbe:
    """Probes a workload: a call runs a short trial at a batch size, in a process of its own."""

    options: StudyOptions
    recipe: Recipe
    limit: int | None
    """The bytes that it may take; None: all memory of a CUDA device."""
    steps: int
    """The number of training steps."""
    seconds: float
    """A probe that takes longer fails."""
    evaluation_batches: int | None = None
    """The number of batches that it evaluates; None: all of them."""

    @property
    def on_cpu(self) -> bool:
        """Whether the peak is of this machine's memory, not of a CUDA device's."""
        return not self.options.device.startswith("cuda")

    def __call__(self, batch_size: int) -> ProbeResult:
        """Run a probe at ``batch_size``. ConfigError if the workload cannot be built at any."""
        start_server()
        receiver, sender = CONTEXT.Pipe(duplex=False)
        what = f"the survey's probe of memory at batch size {batch_size}"
        with receiver, tempfile.NamedTemporaryFile() as log, waiting_for(what):
            arguments = (self, batch_size, sender, log.name, dict(os.environ))
            process = make_process(_run, arguments)
            messages = list[Message]()
            # Why the process is to be stopped: a sentence if it takes too long, or the bytes if
            # they are over the limit.
            stopped: str | int | None = None
            end = time.monotonic() + self.seconds
            try:
                start_process(process)
                # This end stays open in the probe's process alone, and closes when that ends.
                sender.close()
                while process.exitcode is None and stopped is None:
                    process.join(PROBE_LOOK_SECONDS)
                    # A pipe that nobody reads would fill, and the probe would wait for ever.
                    messages += _received(receiver)
                    # On a GPU the probe limits itself.
                    resident = memory.resident_bytes(process.pid) if self.on_cpu else 0
                    if time.monotonic() > end:
                        stopped = f"{TOO_SLOW} {self.seconds:g} s"
                    elif self.limit is not None and resident > self.limit:
                        stopped = resident
            finally:
                # An interruption leaves no probe behind, and none leaves its loader's workers.
                if process.pid is not None:
                    interruption.kill(process)
                    process.join()
            messages += _received(receiver)
            errors = log.read().decode(errors="replace")
        return _result_of(batch_size, self.limit or 0, messages, stopped, process.exitcode, errors)


def _received(receiver: Connection) -> list[Message]:
    """Receive the messages that wait in a pipe, without one that a kill left unfinished."""
    messages = list[Message]()
    # The other end may be closed.
    with suppress(EOFError, OSError):
        while receiver.poll():
            messages.append(receiver.recv())
    return messages


def _result_of(
    batch_size: int,
    limit: int,
    messages: list[Message],
    stopped: str | int | None,
    exitcode: int | None,
    errors: str,
) -> ProbeResult:
    """Give the result of a probe whose process has ended.

    The last message may be the result itself. If it is a phase, the result follows from that and
    from how the process ended. ConfigError where the workload cannot be built at any batch size.

    Args:
        batch_size: of the probe.
        limit: the bytes that it was allowed.
        messages: the phases, as they began, then a result or an error.
        stopped: a sentence where the process took too long, the bytes where they were over the
            limit, and None where it ended by itself.
        exitcode: of the process.
        errors: what the process printed.
    """
    # Where memory runs out, the outcome is the phase in which it did.
    latest: Message = messages[-1] if messages else "startup"
    if isinstance(latest, BstuneError):
        raise ConfigError(str(latest))
    if isinstance(latest, ProbeResult):
        return latest
    if isinstance(stopped, str):
        # A start that takes long is due to the data, and says nothing about the batch size.
        if latest == "startup":
            stopped += ", and had not begun to train"
        return ProbeResult(batch_size, "error", limit, message=stopped)
    if stopped is not None:
        message = f"stopped at {stopped / memory.BYTES_PER_MIB:,.0f} MiB"
        return ProbeResult(batch_size, latest, limit, peak_bytes=stopped, message=message)
    if exitcode == -signal.SIGKILL:
        message = "ended by the system, as it does when memory runs out"
        return ProbeResult(batch_size, latest, limit, message=message)
    message = f"the probe ended with status {exitcode} and printed nothing"
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    if lines:
        # The last line that Python prints of an error is the error itself.
        message = redact(lines[-1])
    outcome: ProbeOutcome = "error"
    if DEVICE_LOST.search(errors):
        outcome = "device"
    return ProbeResult(batch_size, outcome, limit, message=message)


def _write_if_allowed(path: str, text: str) -> None:
    """Write to a file of the system, if it is there and this process may write to it."""
    with suppress(OSError):
        Path(path).write_text(text)


def _run(
    probe: TrialProbe, batch_size: int, sender: Connection, log: str, environment: Mapping[str, str]
) -> None:
    """Run a probe's trial; this is what its process does.

    It sends each phase as it begins, then the result or a ConfigError. Whatever is printed goes to
    the file ``log``. ``environment`` is that of the process that started it.
    """
    # The survey that waited for the result was interrupted.
    if not _prepare_process(log, environment):
        return
    options = probe.options
    device = torch.device(options.device)
    if not probe.on_cpu and not torch.cuda.is_available():
        message = f"torch finds no CUDA device for device={device}"
        sender.send(
            ProbeResult(batch_size, outcome="device", limit=probe.limit or 0, message=message)
        )
        return
    clock, limit = _clock(device, probe.limit, lambda phase: sender.send(PHASES[phase]))
    # The largest share of a batch that one of the devices trains, rounded up.
    share = -(-batch_size // options.devices)
    try:
        if options.devices > 1:
            # A process group of one makes the trial use DDP, whose buffers count, too.
            join(rank=0, count=1)
        workload, protocol = load_workload(options, probe.recipe)
        # Memory does not depend on the rate: the user's own, from which the study scales, will do.
        spec = TrialSpec(
            number=0, trial_index=0, batch_size=share, lr=options.scaling.lr, delta=None, seed=0
        )
        # A schedule that ends with the trial has the length that it would have in a study.
        horizon = max(probe.steps, protocol.last_step(batch_size))
        short = _short_protocol(protocol, probe)
        result = run_trial(workload, spec, short, clock=clock, horizon=horizon)
    except BstuneError as error:
        sender.send(ConfigError(str(error)))
        return
    out_of_memory: str | None = None
    if result.status == "out of memory":
        out_of_memory = result.message or "out of memory"
    # A CUDA device without a limit refuses by itself what is more than it has.
    is_enforced = not probe.on_cpu and probe.limit is None
    sender.send(clock.result(batch_size, limit, out_of_memory, enforced=is_enforced))


def _prepare_process(log: str, environment: Mapping[str, str]) -> bool:
    """Set up a probe's process. False where the survey was interrupted before it began.

    What is printed from here on goes to the file ``log``.
    """
    # An interrupted survey has deleted the file.
    try:
        descriptor = os.open(log, os.O_WRONLY | os.O_APPEND)
    except FileNotFoundError:
        return False
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    # The fork server has the environment of the moment when it started.
    os.environ.update(environment)
    # Where memory runs out, the system is to end the probe before any other process.
    _write_if_allowed("/proc/self/oom_score_adj", "1000")
    quieten()
    return True


def _short_protocol(protocol: TrialProtocol, probe: TrialProbe) -> TrialProtocol:
    """Give a trial's protocol with a probe's few steps and evaluation, on one device."""
    trainer = {**without_recording_or_stopping(protocol.trainer), "num_sanity_val_steps": 0}
    if probe.evaluation_batches is not None:
        trainer["limit_val_batches"] = probe.evaluation_batches
    # Trials measure the noise scale at some of their steps, a probe at each of its few.
    noise_scale_every: int | None = None
    if protocol.noise_scale_every is not None:
        noise_scale_every = 1
    return replace(
        protocol.for_steps_only(Budget(steps=probe.steps)),
        devices=1,
        noise_scale_every=noise_scale_every,
        trainer=trainer,
    )


def _clock(
    device: torch.device, limit: int | None, report: Callable[[Phase], object]
) -> tuple[MemoryClock, int]:
    """Make a clock that notes the memory of the device.

    Gives the limit in bytes, too: the given one, or else all memory of a CUDA device.
    """
    if device.type == "cpu":
        # Writing 5 there makes the system's record of the peak, VmHWM, begin anew.
        reset = partial(_write_if_allowed, "/proc/self/clear_refs", "5")
        # On a CPU a limit is always given; the 0 is for the type checker.
        return MemoryClock(memory.peak_resident_bytes, reset, report), limit or 0
    free_at_start, total = torch.cuda.mem_get_info(device)
    # What other processes take, and this one outside of tensors.
    taken_at_start = total - free_at_start

    def peak() -> int:
        # Memory outside of tensors grows after the start: kernels and libraries are loaded with
        # their first use.
        free, _ = torch.cuda.mem_get_info(device)
        outside = max(taken_at_start, total - free - torch.cuda.memory_reserved(device))
        return outside + torch.cuda.max_memory_reserved(device)

    if limit is not None:
        memory.cap_cuda_memory(device, (limit - taken_at_start) / total)
    else:
        limit = total
    clock = MemoryClock(peak, lambda: torch.cuda.reset_peak_memory_stats(device), report)
    return clock, limit


def evaluated_batches(tried: PreflightFindings | None) -> int | None:
    """Give how many validation batches a probe reads; None: all of them, as that takes few seconds.

    One batch takes as much memory as all of them, unless a module keeps what it sees.
    """
    if tried is None or tried.evaluation_seconds <= EVALUATION_SECONDS:
        return None
    share = EVALUATION_SECONDS / tried.evaluation_seconds
    return max(1, round(share * tried.evaluation_batches))


def largest_in_time(high: int, low: int, seconds: float, step_time: StepTime) -> int:
    """Give the largest batch size from ``low`` to ``high`` whose step is predicted to end in time.

    A step may take ``seconds``, or twice as long as at ``low`` if that is more: no step is much
    shorter than that one.
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
    """Find the largest batch size of a workload that fits, at most the size of the training data.

    Args:
        options: of the study.
        recipe: builds the workload.
        low: the smallest batch size.
        high: the largest batch size that is asked for.
        train_examples: the examples of the training data; 0: not known, as those of a stream.
        limit: the bytes that a probe may take; None: all that the device has.
        steps: the training steps of a probe.
        seconds: a probe that takes longer is ended.
        tried: what a few steps have shown. Batch sizes whose probe would not end in time are then
            not probed, and their memory is predicted. None: all may be probed.
        wanted_seconds: a probe is planned to take at most so long.
        search: the other arguments of :func:`find_ceiling`.
    """
    # Where the number is not known, it leaves out no batch size.
    train_examples = train_examples or high
    if low > train_examples:
        raise HardwareError(
            f"the smallest batch size, {low}, is larger than the training data ({train_examples} "
            "examples): lower search.batch_size.low"
        )
    notes = list[str]()
    if high > train_examples:
        notes.append(
            f"batch size {high} is larger than the training data: the ceiling was looked for up to "
            f"{train_examples}"
        )
    largest = min(high, train_examples)
    largest_to_probe = largest
    if tried is not None:
        # Its start and an evaluation take a part of a probe's time, too.
        step_seconds = PROBE_ROOM * min(seconds, wanted_seconds) / steps
        largest_to_probe = largest_in_time(largest, low, step_seconds, tried.step_time)
    devices = options.devices
    if devices > 1:
        room = "the memory of one"
        if options.device == "cpu":
            room = f"1/{devices} of the memory"
        notes.append(
            f"{devices} devices: a probe trains the share of one, ceil(B/{devices}), in {room}"
        )
    if limit is None and options.device == "cpu":
        limit = memory.memory_limit(Path("/"), memory.resident_bytes())
    probe = TrialProbe(
        options=options,
        recipe=recipe,
        limit=limit,
        steps=steps,
        seconds=seconds,
        evaluation_batches=evaluated_batches(tried),
    )
    ceiling = find_ceiling(probe, low, largest_to_probe, notes=notes, **search)
    own = options.scaling.whole_batch_size
    if _was_too_slow(ceiling.above) and ceiling.at.batch_size < own < ceiling.above.batch_size:
        report = search.get("report", lambda result: None)
        return _about_own(ceiling, own, probe, report, notes)
    if ceiling.above is not None:
        return ceiling
    # All that was probed fits: larger sizes may be left, which there was no time to probe.
    return ceiling.extended(largest)


def _was_too_slow(result: ProbeResult | None) -> TypeGuard[ProbeResult]:
    """Whether a probe was ended by its time, which tells nothing of the memory."""
    if result is None or result.message is None:
        return False
    return result.outcome == "error" and result.message.startswith(TOO_SLOW)


def _about_own(
    ceiling: Ceiling,
    own: int,
    probe: memory.Probe,
    report: Callable[[ProbeResult], None],
    notes: Sequence[str],
) -> Ceiling:
    """Give the ceiling where a probe was too slow on a busy machine, and the answer far below.

    The user's own batch size runs today: it is probed, whatever the time. It fits, too, where its
    probe is too slow as well. Larger sizes may follow by the memory of both, up to the middle of
    log B between it and the one that was too slow.

    Args:
        ceiling: as it was found, below ``own``.
        own: the user's own batch size.
        probe: trains at a batch size.
        report: takes the result of the probe.
        notes: lines that the answer begins with.
    """
    slow = ceiling.above
    assert slow is not None  # noqa: S101 (the caller has looked)
    result = probe(own)
    report(result)
    probes = (*ceiling.probes, result)
    text = f"batch size {slow.batch_size} was not probed to its end ({slow.message})"
    lines = (*notes, text)
    if _was_too_slow(result):
        return replace(ceiling, above=None, probes=probes, predicted=own, notes=lines)
    if not result.fits:
        return replace(ceiling, above=result, probes=probes)
    model = fit_memory([each for each in probes if each.fits])
    found = replace(ceiling, at=result, above=None, probes=probes, model=model, notes=lines)
    return found.extended(math.floor(math.sqrt(own * slow.batch_size)))
