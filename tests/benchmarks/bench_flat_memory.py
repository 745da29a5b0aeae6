"""Whether memory stays flat over many trials in one process.

Runs trials of one workload one after the other, as a study does, and reads the process's resident memory after each,
Python's collector run before; on CUDA also what torch has allocated on the device. The slope is that of the straight
line of least squares through all trials after the first 10, with its standard error.

    python tests/benchmarks/bench_flat_memory.py [--trials 50] [--case digits] [--json FILE]

resnet_cifar runs on random images, so that no data are needed. Compiled cases need a C++ compiler.
"""

import gc
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import machine, options_of, write
from scipy.stats import linregress

from bstune.core.records import TrialSpec
from bstune.hardware.memory import resident_bytes
from bstune.study.prepare import compose_checked
from bstune.system.files import Output
from bstune.trial.workload import LightningBackend, load_workload, resolve
from bstune.workloads.datasets import ImageDataset, Images

# In the first trials libraries load, allocators and caches fill.
LEFT_OUT = 10
RESNET = (
    "workload=resnet_cifar",
    "workload.module.model.width=8",
    "workload.data.load._target_=__main__.random_images",
    "~workload.data.load.root",
    "budget.steps=6",
    "budget.examples=1",
)
DIGITS = ("workload=digits", "budget.steps=60", "budget.examples=1")
CASES = {"digits": DIGITS, "resnet_cifar": RESNET}
CASES |= {f"{name} compiled": (*options, "compile=default") for name, options in CASES.items()}


def random_images() -> ImageDataset:
    """A data set of CIFAR-10's shape."""
    random = np.random.default_rng(0)
    train, test = (
        Images(
            random.integers(0, 256, (n, 3, 32, 32), np.uint8), random.integers(0, 10, n, np.int64)
        )
        for n in (512, 64)
    )
    return ImageDataset("random images", 255, train, test)


def measure(name: str, trials: int, device: torch.device) -> dict[str, Any]:
    """The bytes after each trial of a case; they leave their states, at batch sizes that take turns."""
    composed = compose_checked([*CASES[name], f"device={device}", "precision=32-true"])
    options, recipe = resolve(composed.options, composed.trained_recipe)
    workload, protocol = load_workload(options, recipe)
    protocol = protocol.for_steps_only()
    backend = LightningBackend(options, recipe, workload, protocol)
    host = []
    on_device = []
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        output = Output(Path(folder))
        output.checkpoints.mkdir(parents=True)
        for number in range(trials):
            spec = TrialSpec(
                number, number, (16, 24, 32)[number % 3], 1e-3, 0.0, number, protocol.budget.steps
            )
            result = backend.run(spec, output, None)
            if result.steps != spec.max_steps or result.message is not None:
                raise RuntimeError(
                    f"the trial ended after {result.steps} steps: {result.status} "
                    f"({result.message})"
                )
            # No trial goes on from it.
            output.state(number).unlink()
            # Cycles that wait for the collector are no leak.
            gc.collect()
            host.append(resident_bytes())
            if device.type == "cuda":
                on_device.append(torch.cuda.memory_allocated())
    return {"case": name, "host": host, "device": on_device, "seconds": time.perf_counter() - start}


def show(name: str, values: Sequence[int], seconds: float) -> None:
    """Print a row of the table."""
    later = values[LEFT_OUT:]
    line = linregress(range(len(later)), later)
    first = later[0] / 2**20
    last = later[-1] / 2**20
    slope = line.slope / 2**10
    error = line.stderr / 2**10
    numbers = f"{len(values):>6} {first:>10.1f} {last:>9.1f} {slope:>12.1f} {error:>7.1f}"
    print(f"{name:<32} {numbers} {seconds:>7.1f}", flush=True)


if __name__ == "__main__":
    options = options_of(
        __doc__,
        (
            "--trials",
            # A slope's standard error needs three points.
            {"type": int, "default": 50, "help": f"trials a case, at least {LEFT_OUT + 3}"},
        ),
        ("--case", {"choices": sorted(CASES), "help": "this one alone"}),
    )
    trials = max(options.trials, LEFT_OUT + 3)
    about = machine(options.device, trials)
    print(
        f"{'case':<32} {'trials':>6} {'first MiB':>10} {'last MiB':>9} {'KiB a trial':>12} "
        f"{'+-':>7} {'s':>7}"
    )
    rows = []
    for name in CASES if options.case is None else (options.case,):
        rows.append(row := measure(name, trials, options.device))
        for place in ("host", "device") if row["device"] else ("host",):
            show(f"{name} ({place})", row[place], row["seconds"])
    write(options.json, about, rows)
