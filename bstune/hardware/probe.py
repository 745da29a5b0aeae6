"""One probe of memory: a few training steps and one evaluation at one batch size, in a process of its own.

``python -m bstune.hardware.probe`` reads requests as JSON lines from stdin and writes JSON lines to stdout: what a
probe says, then how its process ended. Each request is answered in a process that is forked from this one, which has
only imported what they all need (5 s that no probe has to spend again) and never touches the device: CUDA cannot be
used on both sides of a fork. So the process that asks never holds what a probe took, nor is it the one that the system
ends.

On a CPU the peak is the process's resident memory (VmHWM, the interpreter and the libraries with it), reset at the
edges of the phases, where the system lets it. The C library keeps freed blocks as it sees fit, so two processes that
train alike differ by several percent; to have it return them at once would cost a CPU trial tens of percent of its
time (mallopt's M_MMAP_THRESHOLD, measured), so the probe takes the allocator as the trials do, noise and all.

A limit on the address space (RLIMIT_AS) would be no limit on memory: torch reserves far more than it touches. So the
process that forks the probes compares the resident memory of one with the limit every few milliseconds and ends it
when it is passed, and what slips between two looks is in the peak, which is compared at the end. (A thread of the
probe's own would change what it watches: its objects make Python's collector free tensors at other times.) A probe
offers itself first to the system's out-of-memory killer, whose verdict counts as not fitting.

On CUDA the peak is what the caching allocator had reserved, with all that was taken on the device when the process
began: its own context, and what others hold. The limit is the allocator's own.
"""

import importlib
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf

from bstune.core.clock import Phase, TrialClock
from bstune.core.errors import BstuneError
from bstune.hardware.memory import Outcome, ProbeResult, cap_cuda_memory, peak_resident_bytes, resident_bytes

IMPORTED_ONCE = ("bstune.trial.workload",)
LAST_WORDS = 20_000  # bytes of what a probe wrote besides: its end is read for the error
LOOK_SECONDS = 0.004  # between two looks of the watching thread
PHASES: Mapping[Phase, Outcome] = {
    Phase.STARTUP: "startup",
    Phase.TRAINING: "training",
    Phase.EVALUATION: "evaluation",
    Phase.CLOSING: "evaluation",
}


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
        tell: is told each phase as it begins.
    """

    def __init__(
        self,
        peak: Callable[[], int],
        reset: Callable[[], object],
        tell: Callable[[Phase], object] = lambda phase: None,
    ) -> None:
        super().__init__()
        self.peaks: dict[Phase, int] = {}
        self.phase = Phase.STARTUP
        self.last = Phase.STARTUP
        self._peak, self._reset, self._tell = peak, reset, tell
        tell(self.phase)

    def enter(self, phase: Phase) -> float:
        """Note the peak of the phase that is left, as :meth:`TrialClock.enter` does its seconds."""
        elapsed = super().enter(phase)
        self.peaks[self.phase] = max(self.peaks.get(self.phase, 0), self._peak())
        self._reset()
        self.last, self.phase = self.phase, phase
        self._tell(phase)
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
    from bstune.core.records import Budget, TrialSpec
    from bstune.trial.loop import run_trial
    from bstune.trial.workload import load, resolve

    config = resolve(OmegaConf.create(request["config"]))
    meter = meter_of(torch.device(config.device))
    workload, protocol = load(config)
    spec = TrialSpec(0, 0, request["batch_size"], float(config.scaling.lr), None, 0)
    measures = None if protocol.noise_scale_every is None else 1  # as trials do at some of their steps
    probe = replace(
        protocol,
        target=protocol.target.never_met,
        budget=Budget(request["steps"], 1),
        noise_scale_every=measures,
        trainer={**protocol.trainer, "num_sanity_val_steps": 0},
    )
    result = run_trial(workload, spec, probe, clock=meter)
    error = (result.message or "out of memory") if result.status == "oom" else None
    return judge(meter, spec.batch_size, limit, error, config.device == "cpu")


def main() -> int:
    """Answer the requests on stdin, each in a process of its own, until there are no more."""
    from bstune.core.console import quieten

    out = os.dup(1)
    os.dup2(2, 1)  # what a workload prints is no answer
    quieten()
    for module in IMPORTED_ONCE:
        importlib.import_module(module)
    for line in sys.stdin:
        _serve(json.loads(line), out)
    return 0


def _serve(request: Mapping[str, Any], out: int) -> None:
    """Fork a process that answers a request, and tell how it ended; it is ended when its seconds are over."""
    with tempfile.TemporaryFile() as errors:
        child = os.fork()
        if child == 0:
            status = 1
            try:
                os.dup2(errors.fileno(), 2)
                os.dup2(errors.fileno(), 1)
                status = _probe(request, out)
            finally:  # whatever happens, this process goes no further: the loop is its parent's
                if sys.exc_info()[0] is not None:
                    traceback.print_exc()
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)
        status, reason = _wait(child, float(request["seconds"]), request["limit"] if _on_cpu(request) else None)
        errors.seek(0)
        said = errors.read()[-LAST_WORDS:].decode(errors="replace")
        _tell(out, ended=status, stderr=said, **reason)


def _on_cpu(request: Mapping[str, Any]) -> bool:
    return not str(request["config"]["device"]).startswith("cuda")


def _wait(child: int, seconds: float, limit: int | None) -> tuple[int, dict[str, Any]]:
    """Return a process's exit status, as subprocess has it, and why it was ended, if it was.

    ``late``: it took longer than the seconds; ``held``: the bytes that it held, over the limit.
    """
    end = time.monotonic() + seconds
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status), {}
        held = 0 if limit is None else resident_bytes(child)
        late = time.monotonic() > end
        if late or (limit is not None and held > limit):
            os.kill(child, signal.SIGKILL)
            return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), {"late": True} if late else {"held": held}
        time.sleep(LOOK_SECONDS)


def _probe(request: Mapping[str, Any], out: int) -> int:
    write_if_allowed("/proc/self/oom_score_adj", "1000")
    name = str(request["config"]["device"])
    if name.startswith("cuda") and not torch.cuda.is_available():
        return _tell(out, outcome="device", message=f"torch finds no CUDA device for device={name}")
    limit = int(request["limit"] or 0)

    def tell(phase: Phase) -> None:
        _tell(out, phase=PHASES[phase])

    if _on_cpu(request):
        meter = Meter(peak_resident_bytes, lambda: write_if_allowed("/proc/self/clear_refs", "5"), tell)
    else:
        meter, limit = _cuda_meter(torch.device(name), request["limit"], tell)
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
    os.write(out, (json.dumps(values) + "\n").encode())  # one write: its lines and its parent's do not mix
    return 0


def _cuda_meter(device: torch.device, limit: int | None, tell: Callable[[Phase], object]) -> tuple[Meter, int]:
    """Return a meter of the device's memory, and the limit: the one that is given, or the device's memory."""
    free, total = torch.cuda.mem_get_info(device)
    held = total - free
    if limit is not None:
        cap_cuda_memory(device, (limit - held) / total)
    meter = Meter(
        lambda: held + torch.cuda.max_memory_reserved(device),
        lambda: torch.cuda.reset_peak_memory_stats(device),
        tell,
    )
    return meter, total if limit is None else limit


if __name__ == "__main__":
    sys.exit(main())
