"""What a bstune trial's training costs over a plain PyTorch loop that takes the same steps.

Both sides draw the same batches from the same stream and use the same model, loss and optimizer: zero_grad, forward,
backward, step. They run in one process, in turns (trial, loop, trial, loop, ...), after one run of each that is thrown
away; at the end of each pair the weights are compared, so that both did the same work. The trial's seconds are those of
its training clock, warm-up included; the loop's those from its first batch to its last step, the device synchronised at
both ends. A ratio is one pair's. The trial evaluates in between, as the default protocol has it: that share is shown
apart. Schedules and averaging of weights are left out on both sides.

    python tests/benchmarks/bench_trial_overhead.py [--repeats 7] [--json FILE]

fashion_cnn needs Fashion-MNIST under $BSTUNE_DATA and is left out where that is not set.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from hydra import compose, initialize_config_module
from lightning.pytorch import LightningModule, seed_everything
from omegaconf import DictConfig

from bstune.cadence import Cadence
from bstune.command import quieten
from bstune.data.module import resolve_device
from bstune.protocol import Budget, Protocol
from bstune.records import Target, TrialResult, TrialSpec
from bstune.trial import device_name, run_trial, versions
from bstune.workload import Workload, build_workload

NEVER = Target("val/error", -1.0, "min")


@dataclass(frozen=True)
class Case:
    """One row: a workload at one batch size, ``steps`` optimizer steps a run."""

    workload: str
    batch_size: int
    steps: int
    overrides: tuple[str, ...] = ()


CASES = (
    Case("fashion_cnn", 32, 200),
    Case("fashion_cnn", 512, 30),
    Case("digits", 32, 2000, ("~workload.module.schedule", "~workload.module.average")),
    Case("digits", 512, 1000, ("~workload.module.schedule", "~workload.module.average")),
)


@dataclass(frozen=True)
class Row:
    """Seconds of ``len(trial)`` pairs; ``evaluation`` is what each trial spent on evaluation beside its training."""

    workload: str
    batch_size: int
    steps: int
    trial: tuple[float, ...]
    loop: tuple[float, ...]
    evaluation: tuple[float, ...]

    @property
    def ratios(self) -> list[float]:
        """Return the trial's seconds over the loop's, pair by pair."""
        return [a / b for a, b in zip(self.trial, self.loop, strict=True)]

    @property
    def evaluation_shares(self) -> list[float]:
        """Return the seconds of evaluation over those of training, trial by trial."""
        return [a / b for a, b in zip(self.evaluation, self.trial, strict=True)]


def compose_case(case: Case, device: torch.device) -> DictConfig:
    """Return the case's config, everything else at its default."""
    overrides = [f"+workload={case.workload}", f"device={device.type}", "precision=32-true", *case.overrides]
    with initialize_config_module("bstune.conf", version_base="1.3"):
        return compose("config", overrides)


def protocol(config: DictConfig, target: Target, budget: Budget) -> Protocol:
    """Return the default protocol with another target and budget."""
    rules = config.protocol
    return Protocol(
        target=target,
        budget=budget,
        cadence=Cadence(rules.evaluation_ratio, rules.evaluation_share, rules.evaluation_cost, rules.near),
        micro_batch_size=None,
        warmup_steps=rules.warmup_steps,
        divergence=rules.divergence,
        noise_scale_every=rules.noise_scale_every,
        compile=None,
        trainer={"accelerator": config.device, "devices": 1, "precision": config.precision},
    )


def run_bstune(workload: Workload, spec: TrialSpec, rules: Protocol) -> tuple[TrialResult, LightningModule]:
    """Run one trial; return its record and its module as trained."""
    built: list[LightningModule] = []

    def build(spec: TrialSpec) -> LightningModule:
        built.append(workload.build_module(spec))
        return built[0]

    data = workload.train_batches, workload.validation_batches, workload.validation_examples
    return run_trial(spec, build, *data, rules), built[0]


def run_loop(workload: Workload, spec: TrialSpec, steps: int, device: torch.device) -> tuple[float, LightningModule]:
    """Train with a plain loop; return its seconds and its module as trained."""
    seed_everything(spec.seed, verbose=False)
    module = workload.build_module(spec).to(device).train()
    optimizer = module.configure_optimizers()
    model, loss = module.model, module.loss
    stream = iter(workload.train_batches(spec))
    synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    synchronize()
    start = time.perf_counter()
    for _ in range(steps):
        images, labels = next(stream)
        optimizer.zero_grad()
        loss(model(images), labels).backward()
        optimizer.step()
    synchronize()
    return time.perf_counter() - start, module


def measure(case: Case, repeats: int, device: torch.device, note: Callable[[str], None]) -> Row:
    """Run ``repeats`` pairs of a case, in turns, after one pair that is thrown away.

    Raises:
        RuntimeError: if the two sides did not come to the same weights, or the trial did not run its steps.
    """
    config = compose_case(case, device)
    workload = build_workload(config)
    rules = protocol(config, NEVER, Budget(case.steps, 1))
    trial, loop, evaluation = [], [], []
    for repeat in range(repeats + 1):
        note(f"{case.workload} at {case.batch_size}: pair {repeat} of {repeats}")
        # A small rate: both sides must stay finite however many steps are asked for.
        spec = TrialSpec(0, 0, case.batch_size, 0.01, None, repeat)
        result, ours = run_bstune(workload, spec, rules)
        seconds, plain = run_loop(workload, spec, case.steps, device)
        if result.steps != case.steps:
            raise RuntimeError(f"the trial ended after {result.steps} of {case.steps} steps: {result.status}")
        for a, b in zip(ours.parameters(), plain.parameters(), strict=True):
            if not torch.allclose(a.to(b), b, rtol=1e-3, atol=1e-5):
                raise RuntimeError(f"the trial and the loop came to other weights in pair {repeat}")
        if repeat:
            trial.append(result.train_seconds)
            loop.append(seconds)
            evaluation.append(result.eval_seconds)
    return Row(case.workload, case.batch_size, case.steps, tuple(trial), tuple(loop), tuple(evaluation))


def train_to_target(case: Case, device: torch.device) -> TrialResult:
    """Run one real trial: the workload's own target, budget, reference rate scaled by the square root, whole module."""
    config = compose_case(Case(case.workload, case.batch_size, case.steps), device)
    own, reference = config.workload.target, config.workload.reference
    rules = protocol(
        config, Target(own.metric, own.value, own.mode), Budget(config.budget.steps, config.budget.examples)
    )
    lr = reference.lr * (case.batch_size / reference.batch_size) ** 0.5
    result, _ = run_bstune(build_workload(config), TrialSpec(0, 0, case.batch_size, lr, None, 0), rules)
    return result


def table(rows: Sequence[Row]) -> str:
    """Return the rows as text: milliseconds per step, ratios and evaluation's share."""
    lines = [
        f"{'workload':<12} {'B':>5} {'steps':>6} {'trial ms':>9} {'loop ms':>9}"
        f" {'ratio min':>10} {'median':>7} {'max':>7} {'eval/train':>11}"
    ]
    for row in rows:
        trial, loop = (1000 * statistics.median(side) / row.steps for side in (row.trial, row.loop))
        ratios, share = row.ratios, statistics.median(row.evaluation_shares)
        lines.append(
            f"{row.workload:<12} {row.batch_size:>5} {row.steps:>6} {trial:>9.3f} {loop:>9.3f}"
            f" {min(ratios):>10.3f} {statistics.median(ratios):>7.3f} {max(ratios):>7.3f} {share:>11.3f}"
        )
    return "\n".join(lines)


def target_line(result: TrialResult) -> str:
    """Return a real trial's seconds in words."""
    share = result.eval_seconds / result.train_seconds
    return (
        f"to the target at B={result.batch_size}: {result.status} after {result.steps} steps, "
        f"train {result.train_seconds:.2f} s, evaluation {result.eval_seconds:.2f} s ({share:.1%} of training, "
        f"{len(result.history)} evaluations and one at the start), start-up {result.startup_seconds:.2f} s"
    )


def machine(device: torch.device, repeats: int) -> dict[str, str | int]:
    """Return what a timing has to be read with."""
    return {
        "cpu": cpu_model(),
        "device": device_name({"accelerator": device.type}),
        "threads": torch.get_num_threads(),
        "cpus_of_the_process": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count() or 0,
        "python": platform.python_version(),
        **versions(),
        "n": repeats,
    }


def cpu_model() -> str:
    """Return the processor's name; what the platform knows where there is no /proc/cpuinfo."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def main() -> int:
    """Measure, print the table, and write the JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7, help="pairs per row")
    parser.add_argument("--steps", type=int, help="steps per run, in place of each row's own")
    parser.add_argument("--workload", choices=sorted({case.workload for case in CASES}), help="this one alone")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or auto")
    parser.add_argument("--to-target", action="store_true", help="also run one real trial per row to its target")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every number to FILE")
    options = parser.parse_args()
    if options.repeats < 1 or (options.steps is not None and options.steps < 1):
        parser.error("--repeats and --steps must be at least 1")
    quieten()
    warnings.filterwarnings("ignore", message=".*LeafSpec.*")

    device = resolve_device(options.device)
    cases = [case for case in CASES if options.workload in (None, case.workload)]
    if not os.environ.get("BSTUNE_DATA"):
        cases = [case for case in cases if case.workload != "fashion_cnn"]
        print("fashion_cnn is LEFT OUT: set BSTUNE_DATA to the folder that holds (or shall hold) Fashion-MNIST")
    about = machine(device, options.repeats)
    print(", ".join(f"{name} {value}" for name, value in about.items()))
    rows, trials = [], []
    for case in cases:
        steps = options.steps or case.steps
        case = Case(case.workload, case.batch_size, steps, case.overrides)
        rows.append(measure(case, options.repeats, device, lambda text: print(text, file=sys.stderr)))
        if options.to_target:
            trials.append(train_to_target(case, device))
    print(table(rows))
    for result in trials:
        print(target_line(result))
    if options.json:
        values = [{**asdict(row), "ratios": row.ratios, "evaluation_shares": row.evaluation_shares} for row in rows]
        records = [json.loads(result.to_json()) for result in trials]
        options.json.write_text(json.dumps({"machine": about, "rows": values, "to_target": records}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
