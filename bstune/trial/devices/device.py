"""The device that a trial runs on: its choice, name and settings, and how to wait for it."""

import functools
import platform
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

import bstune
from bstune.core.errors import ConfigError
from bstune.system.lightning_package import DISTRIBUTIONS, installed_lightning
from bstune.system.processor_wait import processor_wait
from bstune.trial.devices.distributed import threads_each

# A device is full where no more than this share of its memory is free: a library may then lack the
# megabytes for its handle.
FULL_SHARE = 0.01


def resolve_device(name: str, option: str = "workload.data.device") -> torch.device:
    """Give the device that ``auto``, ``cpu``, ``cuda`` or ``cuda:N`` names.

    A ConfigError, which names ``option``, says that there is no such device.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kind, _, index = str(name).partition(":")
    if kind not in ("cpu", "cuda") or (index and not index.isdecimal()):
        raise ConfigError(f"{option} must be auto, cpu, cuda or cuda:N, but got {name!r}")
    if kind == "cuda" and int(index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"{option}={name}, but torch sees {torch.cuda.device_count()} CUDA devices: use auto "
            "or cpu"
        )
    return torch.device(name)


def device_of(trainer_options: Mapping[str, Any]) -> torch.device:
    """Give the device on which this process trains, from the Trainer's arguments in a protocol."""
    if trainer_options.get("accelerator") == "cuda":
        return torch.device("cuda", trainer_options["devices"][0])
    return torch.device("cpu")


def device_name(trainer_options: Mapping[str, Any], devices: int = 1) -> str:
    """Name the device of trials: ``NVIDIA H200``, ``cpu (2 threads)``, ``2 x cpu (1 thread)``."""
    several = f"{devices} x " if devices > 1 else ""
    if trainer_options.get("accelerator") == "cuda":
        return several + torch.cuda.get_device_name(device_of(trainer_options))
    threads = threads_each(devices)
    noun = "thread" if threads == 1 else "threads"
    return f"{several}cpu ({threads} {noun})"


def without_threads(device: str) -> str:
    """Leave the number of torch's threads out of a CPU's name: ``cpu`` of ``cpu (2 threads)``."""
    name, _, threads = device.partition("cpu (")
    return f"{name}cpu" if threads else device


def processor_wait_of(device: torch.device) -> Callable[[], float]:
    """Give a function that tells for how many seconds training has waited for a processor so far.

    On CUDA it gives 0: the device works on while the host waits.
    """
    if device.type == "cpu":
        return processor_wait()
    return lambda: 0.0


def has_bfloat16(device: str) -> bool:
    """Whether a CUDA device has units for bfloat16, as those from Ampere on (8.0) do."""
    return torch.cuda.get_device_capability(device)[0] >= 8


def processor() -> str:
    """Name the processor's model, as the system does; empty where it does not."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    for line in lines:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return ""


def synchronize(device: torch.device | None = None) -> None:
    """Wait until a device has finished its work. None: the current CUDA device, if there is one.

    A CPU is not waited for. Nor is CUDA where nothing has used it, as that would open a context.
    """
    has_work = device is not None and device.type == "cuda"
    if device is None:
        has_work = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if has_work:
        torch.cuda.synchronize(device)


def products_in_tf32() -> bool:
    """Whether float32 matrix products run in tf32, on a CUDA device that has it."""
    products = torch.backends.cuda.matmul
    # torch has this name from 2.9 on, where the former one may raise.
    if hasattr(products, "fp32_precision"):
        return bool(products.fp32_precision == "tf32")
    return torch.get_float32_matmul_precision() != "highest"


def convolutions_in_tf32() -> bool:
    """Whether cuDNN computes float32 convolutions in tf32, on a CUDA device that has it."""
    # torch has this name from 2.9 on, where the former one may raise.
    by_operator = getattr(torch.backends.cudnn, "conv", None)
    if by_operator is not None:
        return bool(by_operator.fp32_precision == "tf32")
    return bool(torch.backends.cudnn.allow_tf32)


@contextmanager
def products_in(tf32: bool) -> Iterator[None]:
    """Within the context, float32 matrix products of CUDA run in tf32, or do not."""
    products = torch.backends.cuda.matmul
    name = "allow_tf32"
    value: str | bool = tf32
    # torch has this name from 2.9 on, where the former one may raise.
    if hasattr(products, "fp32_precision"):
        name = "fp32_precision"
        value = "tf32" if tf32 else "ieee"
    former = getattr(products, name)
    setattr(products, name, value)
    try:
        yield
    finally:
        setattr(products, name, former)


def cuda_settings(device: torch.device) -> dict[str, str]:
    """Give the versions and present settings, by name, on which results and times on CUDA depend.

    There are none for a CPU.
    """
    if device.type != "cuda":
        return {}
    in_tf32 = list[str]()
    if products_in_tf32():
        in_tf32.append("products")
    if convolutions_in_tf32():
        in_tf32.append("convolutions")
    return {
        "cuda": str(torch.version.cuda),
        "cudnn": str(torch.backends.cudnn.version()),  # type: ignore[no-untyped-call]
        "cudnn.benchmark": str(torch.backends.cudnn.benchmark).lower(),
        "tf32": " and ".join(in_tf32) or "none",
    }


def memory_ran_out(device: torch.device | None = None) -> bool:
    """Whether an allocation has failed on a CUDA device, or the device is full.

    torch counts the failed ones since :func:`forget_failed_allocations`, also those that it catches
    itself, as where cuDNN tries one convolution after another. Allocations by a library are not
    counted; they fail where the device is full.
    """
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return False
    try:
        free, total = torch.cuda.mem_get_info(device)
        failed_allocations = torch.cuda.memory_stats(device).get("num_ooms", 0)
    # It is raised where the device does not compute any more, as after an assertion of CUDA.
    except RuntimeError:
        return False
    return failed_allocations > 0 or free < FULL_SHARE * total


def forget_failed_allocations(device: torch.device) -> None:
    """Begin to count a CUDA device's failed allocations anew, where the device is in use."""
    if device.type == "cuda" and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.reset_accumulated_memory_stats(device)


@functools.cache
def versions() -> Mapping[str, str]:
    """Give the version of each package on which a trial's result depends, by the package's name."""
    names = ("torch", DISTRIBUTIONS[installed_lightning()])
    installed = {name: version(name) for name in names}
    return {"bstune": bstune.__version__, **installed}
