"""What measuring the noise scale costs: a trial's training with the call-back over the same trial's without it.

Both sides are bstune trials of the same seed, in one process, in turns (with, without, with, ...), after one pair that
is thrown away. Seconds are those of the training clock; a ratio is one pair's. After each pair the weights are compared
bit for bit, so that both did the same work. Rows: small steps that are all overhead, and steps that are mostly
arithmetic; whole batches, which are split at the default interval, and micro-batches, whose norms are read.

    python tests/benchmarks/bench_noise.py [--repeats 7] [--every N] [--json FILE]

fashion_cnn needs Fashion-MNIST under $BSTUNE_DATA and is left out where that is not set.
"""

import argparse
import json
import os
import statistics
import sys
import warnings
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from bench_trial_overhead import NEVER, Case, compose_case, machine, protocol
from lightning.pytorch import LightningModule

from bstune.core.console import quieten
from bstune.core.records import Budget, TrialSpec
from bstune.trial.device import resolve_device
from bstune.trial.loop import Workload, run_trial
from bstune.trial.noise_scale import NoiseScale
from bstune.trial.workload import build_workload

PLAIN = ("~workload.module.schedule", "~workload.module.average")
CASES = (
    (Case("digits", 32, 1280, PLAIN), None),
    (Case("digits", 512, 640, PLAIN), None),
    (Case("digits", 128, 320, PLAIN), 32),
    (Case("fashion_cnn", 128, 256), None),
    (Case("fashion_cnn", 128, 256), 32),
)


@dataclass(frozen=True)
class Row:
    """Training seconds of the pairs of one case; what was measured at the end of the last."""

    workload: str
    batch_size: int
    micro_batch_size: int | None
    steps: int
    measured: int
    with_it: tuple[float, ...]
    without: tuple[float, ...]
    found: str

    @property
    def ratios(self) -> list[float]:
        """Return the seconds with the call-back over those without, pair by pair."""
        return [a / b for a, b in zip(self.with_it, self.without, strict=True)]


def train(workload: Workload, case: Case, micro_batch_size: int | None, seed: int, options: argparse.Namespace,
          callback: NoiseScale | None) -> tuple[float, LightningModule]:  # fmt: skip
    """Run one trial; return its training seconds and its module as trained."""
    built: list[LightningModule] = []

    def build(spec: TrialSpec) -> LightningModule:
        module = workload.build_module(spec)
        if callback is not None:
            module.configure_callbacks = lambda: [callback]
        built.append(module)
        return module

    config = compose_case(case, resolve_device(options.device))
    rules = replace(protocol(config, NEVER, Budget(case.steps, 1)), micro_batch_size=micro_batch_size)
    spec = TrialSpec(0, 0, case.batch_size, 0.01, None, seed)
    result = run_trial(replace(workload, build_module=build), spec, rules)
    if result.steps != case.steps:
        raise RuntimeError(f"the trial ended after {result.steps} of {case.steps} steps: {result.status}")
    return result.train_seconds, built[0]


def measure(case: Case, micro_batch_size: int | None, options: argparse.Namespace) -> Row:
    """Run the pairs of a case.

    Raises:
        RuntimeError: if the two sides did not come to the same weights, or a trial did not run its steps.
    """
    config = compose_case(case, resolve_device(options.device))
    config.protocol.micro_batch_size = micro_batch_size
    workload = build_workload(config)
    with_it, without = [], []
    for repeat in range(options.repeats + 1):
        callback = NoiseScale(every=options.every, weights="examples")
        a, measured = train(workload, case, micro_batch_size, repeat, options, callback)
        b, plain = train(workload, case, micro_batch_size, repeat, options, None)
        same = zip(measured.state_dict().values(), plain.state_dict().values(), strict=True)
        if resolve_device(options.device).type == "cpu" and not all(torch.equal(x, y) for x, y in same):
            raise RuntimeError(f"the noise scale changed the training in pair {repeat}")
        if repeat:
            with_it.append(a)
            without.append(b)
    return Row(
        case.workload, case.batch_size, micro_batch_size, case.steps, len(callback.measurements),
        tuple(with_it), tuple(without), str(callback.estimate),
    )  # fmt: skip


HEAD = (
    f"{'workload':<12} {'B':>5} {'micro':>6} {'steps':>6} {'measured':>9} {'ms/step':>8}"
    f" {'ratio min':>10} {'median':>7} {'max':>7}  last estimate"
)


def line(row: Row) -> str:
    """Return a row as text."""
    ms = 1000 * statistics.median(row.without) / row.steps
    return (
        f"{row.workload:<12} {row.batch_size:>5} {row.micro_batch_size or '-':>6} {row.steps:>6} {row.measured:>9}"
        f" {ms:>8.3f} {min(row.ratios):>10.3f} {statistics.median(row.ratios):>7.3f} {max(row.ratios):>7.3f}"
        f"  {row.found}"
    )


def main() -> int:
    """Measure, print the table, and write the JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7, help="pairs per row")
    parser.add_argument("--steps", type=int, help="steps per run, in place of each row's own")
    parser.add_argument("--every", type=int, help="steps between measurements, in place of the default")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or auto")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every number to FILE")
    options = parser.parse_args()
    if options.repeats < 1 or (options.steps is not None and options.steps < 1):
        parser.error("--repeats and --steps must be at least 1")
    quieten()
    warnings.filterwarnings("ignore", message=".*LeafSpec.*")

    about = machine(resolve_device(options.device), options.repeats)
    print(", ".join(f"{name} {value}" for name, value in about.items()))
    print(HEAD)
    rows = []
    for case, micro_batch_size in CASES:
        if case.workload == "fashion_cnn" and not os.environ.get("BSTUNE_DATA"):
            print("fashion_cnn is LEFT OUT: set BSTUNE_DATA to the folder that holds (or shall hold) Fashion-MNIST")
            continue
        rows.append(measure(replace(case, steps=options.steps or case.steps), micro_batch_size, options))
        print(line(rows[-1]), flush=True)
    if options.json:
        values = [{**asdict(row), "ratios": row.ratios} for row in rows]
        options.json.write_text(json.dumps({"machine": about, "rows": values}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
