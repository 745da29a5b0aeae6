"""The device that a trial runs on: its choice, its name, how to wait for it, and the versions of what runs there."""

import functools
import platform
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

import bstune
from bstune.core.errors import ConfigError
from bstune.trial.distributed import threads_each


def resolve_device(name: str, option: str = "data.device") -> torch.device:
    """Return the device for ``auto``, ``cpu``, ``cuda`` or ``cuda:N``; a ConfigError names ``option``."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kind, _, index = str(name).partition(":")
    if kind not in ("cpu", "cuda") or (index and not index.isdecimal()):
        raise ConfigError(f"{option} must be auto, cpu, cuda or cuda:N, but got {name!r}")
    if kind == "cuda" and int(index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"{option}={name}, but torch sees {torch.cuda.device_count()} CUDA devices: use auto or cpu")
    return torch.device(name)


def device_name(trainer_options: Mapping[str, Any], devices: int = 1) -> str:
    """Return the name of what trials run on, such as ``NVIDIA H200``, ``cpu (2 threads)`` or ``2 x cpu (1 thread)``."""
    several = f"{devices} x " if devices > 1 else ""
    if trainer_options.get("accelerator") == "cuda":
        return several + torch.cuda.get_device_name(trainer_options["devices"][0])
    threads = threads_each(devices)
    return f"{several}cpu ({threads} thread{'s' if threads > 1 else ''})"


def processor() -> str:
    """Return the processor's model where the system names it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def synchronize(device: torch.device | None = None) -> None:
    """Wait until a device has finished its work: the current CUDA device by default; a CPU never has any left."""
    if torch.cuda.is_available() if device is None else device.type == "cuda":
        torch.cuda.synchronize(device)


@functools.cache
def versions() -> Mapping[str, str]:
    """Return the versions of the packages that a trial's result depends on."""
    return {"bstune": bstune.__version__, "torch": version("torch"), "lightning": version("lightning")}
