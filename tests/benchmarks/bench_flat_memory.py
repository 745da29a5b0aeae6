"""Whether memory stays flat over many trials in one process.

Runs trials of one workload one after the other, as a study does, and reads the process's resident memory after each,
Python's collector run before; on CUDA also what torch has allocated on the device. The slope is that of the straight
line of least squares through all trials after the first 10, with its standard error. What is kept for each trial (its
record) is a few KiB.

    python tests/benchmarks/bench_flat_memory.py [--trials 50] [--case digits] [--json FILE]

resnet_cifar runs on random images, so that no data are needed. Compiled cases need a C++ compiler.
"""

import argparse
import gc
import json
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from scipy.stats import linregress

from bstune.core.console import quieten
from bstune.core.files import Output
from bstune.core.records import TrialSpec
from bstune.hardware.memory import resident_bytes
from bstune.study.prepare import compose_checked
from bstune.trial.device import resolve_device
from bstune.trial.workload import LightningBackend, load, resolve
from bstune.workloads.datasets import ImageDataset, Images

LEFT_OUT = 10  # of the first trials: libraries load, allocators and caches fill

RESNET = (
    "+workload=resnet_cifar",
    "workload.module.model.width=8",
    "workload.data.load._target_=__main__.random_images",
    "~workload.data.load.root",
    "budget.steps=6",
    "budget.examples=1",
)
DIGITS = ("+workload=digits", "budget.steps=60", "budget.examples=1")
CASES = {
    "digits": DIGITS,
    "digits compiled": (*DIGITS, "compile=default"),
    "resnet_cifar": RESNET,
    "resnet_cifar compiled": (*RESNET, "compile=default"),
}


@dataclass(frozen=True)
class Row:
    """Bytes after each trial; ``device`` is empty on a CPU."""

    case: str
    host: tuple[int, ...]
    device: tuple[int, ...]
    seconds: float


def random_images() -> ImageDataset:
    """Return a data set of CIFAR-10's shape."""
    random = np.random.default_rng(0)

    def images(n: int) -> Images:
        pixels = random.integers(0, 256, (n, 3, 32, 32), np.uint8)
        return Images(pixels, random.integers(0, 10, n, np.int64))

    return ImageDataset("random images", 255, images(512), images(64))


def measure(name: str, trials: int, device: str) -> Row:
    """Run the trials of a case, which leave their states, at batch sizes that go round; return the memory after each.

    Raises:
        RuntimeError: if a trial does not run its steps.
    """
    config = resolve(compose_checked([*CASES[name], f"device={device}", "precision=32-true"]))
    workload, protocol = load(config)
    protocol = replace(protocol, target=protocol.target.never_met)
    backend = LightningBackend(config, workload, protocol)
    host, on_device, start = [], [], time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        output = Output(Path(folder))
        output.checkpoints.mkdir(parents=True)
        for number in range(trials):
            steps = protocol.budget.steps
            spec = TrialSpec(number, number, (16, 24, 32)[number % 3], 1e-3, 0.0, number, steps)
            result = backend.run(spec, output, None)
            if result.steps != steps or result.message is not None:
                raise RuntimeError(f"the trial ended after {result.steps} steps: {result.status} ({result.message})")
            output.state(number).unlink()
            gc.collect()
            host.append(resident_bytes())
            if device != "cpu":
                on_device.append(torch.cuda.memory_allocated())
    return Row(name, tuple(host), tuple(on_device), time.perf_counter() - start)


def slope(values: Sequence[int], left_out: int = LEFT_OUT) -> tuple[float, float]:
    """Return KiB a trial, and its standard error."""
    later = [value / 1024 for value in values[left_out:]]
    if len(set(later)) == 1:
        return 0.0, 0.0
    line = linregress(range(len(later)), later)
    return float(line.slope), float(line.stderr)


def table(rows: Sequence[Row]) -> str:
    """Return the rows as text."""
    lines = [f"{'case':<24} {'trials':>6} {'first MiB':>10} {'last MiB':>9} {'KiB a trial':>12} {'+-':>7} {'s':>7}"]
    for row in rows:
        for where, values in (("", row.host), (" (device)", row.device)):
            if values:
                rise, error = slope(values)
                first, last = (values[i] / 2**20 for i in (LEFT_OUT, -1))
                lines.append(
                    f"{row.case + where:<24} {len(values):>6} {first:>10.1f} {last:>9.1f} {rise:>12.1f} {error:>7.1f}"
                    f" {row.seconds:>7.1f}"
                )
    return "\n".join(lines)


def main() -> int:
    """Measure, print the table, and write the JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=50, help="trials a case")
    parser.add_argument("--case", choices=sorted(CASES), help="this one alone")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or auto")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every number to FILE")
    options = parser.parse_args()
    if options.trials < LEFT_OUT + 3:
        parser.error(f"--trials must be at least {LEFT_OUT + 3}, but got {options.trials}")
    quieten()
    warnings.filterwarnings("ignore", message=".*LeafSpec.*")
    device = resolve_device(options.device).type
    run = partial(measure, trials=options.trials, device=device)
    rows = [run(name) for name in CASES if options.case in (None, name)]
    print(table(rows))
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
