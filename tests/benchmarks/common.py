"""What the benchmarks share: their options, the machine that a number is read with, and trials to train."""

import argparse
import os
import platform
import statistics
import sys
import warnings
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule

from bstune.core.records import Budget, TrialProtocol, TrialResult, TrialSpec, dump_json
from bstune.study.prepare import compose_checked
from bstune.system.console import quieten
from bstune.system.files import write_text
from bstune.trial.devices.device import device_name, processor, resolve_device
from bstune.trial.loop import Workload, run_trial
from bstune.trial.workload import load_workload

# This is where synthetic.py lies.
sys.path.append(str(Path(__file__).parents[1]))
PACKAGES = ("bstune", "lightning", "numpy", "optuna", "scipy", "torch")


def options_of(doc: str | None, *arguments: tuple[str, dict[str, Any]]) -> argparse.Namespace:
    """The parsed options of a benchmark; each has ``--json`` and ``--device``, numbers must be positive."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, settings in arguments:
        parser.add_argument(name, **settings)
    parser.add_argument("--device", default="cpu", help="cpu, cuda or auto")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every number to FILE")
    options = parser.parse_args()
    options.device = resolve_device(options.device)
    # Without a single repeat there is no median.
    for name, value in vars(options).items():
        if name in ("repeats", "seeds", "runs") and value is not None and value < 1:
            parser.error(f"--{name} must be at least 1, but got {value}")
    quieten()
    warnings.filterwarnings("ignore", message=".*LeafSpec.*")
    return options


def machine(device: torch.device, n: int) -> dict[str, str | int]:
    """Print and return what a number has to be read with: hardware, threads, versions and n."""
    about = {
        "cpu": processor(),
        "device": device_name({"accelerator": device.type, "devices": [device.index or 0]}),
        "threads": torch.get_num_threads(),
        "cpus": os.cpu_count() or 0,
        "python": platform.python_version(),
        **{name: version(name) for name in PACKAGES},
        "n": n,
    }
    print(", ".join(f"{name} {value}" for name, value in about.items()))
    return about


def write(
    path: Path | None, about: dict[str, Any], rows: Sequence[dict[str, Any]], **more: Any
) -> None:
    """Write every number as JSON, if a path was given."""
    if path is not None:
        write_text(path, dump_json({"machine": about, "rows": rows, **more}, indent=1) + "\n")


def load_for(
    workload: str, device: torch.device, steps: int, *overrides: str
) -> tuple[Workload, TrialProtocol]:
    """A shipped workload and its protocol with ``steps`` as budget and a target that is never met."""
    arguments = [f"workload={workload}", f"device={device}", "precision=32-true", *overrides]
    composed = compose_checked(arguments)
    ready, protocol = load_workload(composed.options, composed.trained_recipe)
    # One example: the steps alone are the budget.
    return ready, protocol.for_steps_only(Budget(steps, 1))


def train(
    workload: Workload,
    spec: TrialSpec,
    protocol: TrialProtocol,
    callbacks: Sequence[Any] = (),
    **options: Any,
) -> tuple[TrialResult, LightningModule]:
    """Run one trial, all of its steps; return its record and its module as trained. ``options`` are run_trial's."""
    built: list[LightningModule] = []

    def build(spec: TrialSpec) -> LightningModule:
        module = workload.build_module(spec)
        # A module brings its own call-backs, as a user's does.
        if callbacks:
            module.configure_callbacks = lambda: [*callbacks]
        built.append(module)
        return module

    result = run_trial(replace(workload, build_module=build), spec, protocol, **options)
    steps = protocol.budget.last_step(spec.batch_size)
    if result.steps != steps:
        # A time of fewer steps would look fast.
        raise RuntimeError(
            f"the trial ended after {result.steps} of {steps} steps: {result.status} "
            f"({result.message})"
        )
    return result, built[0]


def spread(values: Sequence[float], digits: int = 3) -> str:
    """``least, median, most``."""
    return ", ".join(
        f"{value:.{digits}f}" for value in (min(values), statistics.median(values), max(values))
    )
