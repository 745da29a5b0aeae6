"""The memory ceiling of a workload on this machine, measured by probes in processes of their own."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from bstune.errors import ConfigError, HardwareError
from bstune.hardware.memory import Ceiling, ProbeResult, find_ceiling, search_range
from bstune.hardware.memory_limit import memory_limit, resident_bytes

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
        subprocess.Popen(  # noqa: S603  # this interpreter and our module
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment
        ) as server,
    ):
        requests, answers = server.stdin, server.stdout
        assert requests  # noqa: S101  # pipes, as asked for
        assert answers  # noqa: S101

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
