"""The machine that a study's seconds are of, as the worker sees it."""

import platform
from importlib.metadata import version

from bstune import __version__
from bstune.core.errors import InputError
from bstune.core.records import Frozen

# Packages whose versions change a history or a step time.
PACKAGES = ("torch", "lightning", "numpy", "optuna")


class Machine(Frozen):
    """A device and what it runs; it is the study's hardware.json."""

    device: str
    """``cpu``, or the accelerator's name."""
    threads: int
    """Of torch on the CPU."""
    processor: str
    python: str
    versions: dict[str, str]


RECORDED = Machine(
    device="recorded runs",
    threads=0,
    processor="",
    python=platform.python_version(),
    versions={"bstune": __version__},
)


def describe_machine(device: str, threads: int | None) -> Machine:
    """Look at the machine; called in the worker's process, as it imports torch.

    Args:
        device: ``cpu``, ``cuda`` or ``auto``.
        threads: of torch; None: torch's own number.

    Raises:
        InputError: there is no such device.
    """
    import torch

    has_cuda = torch.cuda.is_available()
    if device == "cuda" and not has_cuda:
        raise InputError("device=cuda, but torch finds no CUDA device: give device=cpu")
    uses_cuda = has_cuda and device != "cpu"
    return Machine(
        device=torch.cuda.get_device_name() if uses_cuda else "cpu",
        threads=threads or torch.get_num_threads(),
        processor=platform.processor() or platform.machine(),
        python=platform.python_version(),
        versions={"bstune": __version__, **{name: version(name) for name in PACKAGES}},
    )
