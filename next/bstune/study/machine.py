"""The machine that a study's seconds are of, as the worker sees it."""

import os
import platform
from importlib.metadata import version

from bstune import __version__
from bstune.core.errors import InputError
from bstune.core.records import Frozen
from bstune.recipe.recipe import resolve_device, resolve_precision

# Packages whose versions change a history or a step time.
PACKAGES = ("torch", "lightning", "numpy", "optuna")


class Machine(Frozen):
    """A device and what it runs; it is the study's hardware.json."""

    device: str
    """``cpu``, or the accelerator's name; ``2 x cpu`` where several share each batch."""
    precision: str = ""
    """Of training, as Lightning's Trainer names it."""
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


def describe_machine(
    device: str, threads: int | None, precision: str = "auto", devices: int = 1
) -> Machine:
    """Look at the machine; called in the worker's process, as it imports torch.

    Args:
        device: ``cpu``, ``cuda`` or ``auto``.
        threads: of torch; None: torch's own number.
        precision: of training, or ``auto``.
        devices: that share each batch.

    Raises:
        InputError: there is no such device, or it cannot do the precision.
    """
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        raise InputError("device=cuda, but torch finds no CUDA device: give device=cpu")
    kind = resolve_device(device)
    uses_cuda = kind == "cuda"
    there = torch.cuda.device_count() if uses_cuda else len(os.sched_getaffinity(0))
    if devices > there:
        what = "CUDA devices" if uses_cuda else "processors"
        raise InputError(
            f"devices must be at most {there}, the {what} there are, but got {devices}"
        )
    name = torch.cuda.get_device_name() if uses_cuda else "cpu"
    return Machine(
        device=name if devices == 1 else f"{devices} x {name}",
        precision=resolve_precision(precision, kind),
        threads=threads or torch.get_num_threads(),
        processor=platform.processor() or platform.machine(),
        python=platform.python_version(),
        versions={"bstune": __version__, **{name: version(name) for name in PACKAGES}},
    )
