"""What a bstune trial's training costs over a plain PyTorch loop that takes the same steps, for each shipped workload.

Both sides draw the same batches from the same stream and train the whole module as its config has it: training_step,
zero_grad, backward, optimizer step, the schedule stepped and the average of the weights updated where there is one.
They run in one process, in turns (trial, loop, trial, loop, ...), after one run of each that is thrown away; at the end
of each pair the weights are compared, so that both did the same work. The trial's seconds are those of its training
clock, warm-up included; the loop's those from its first batch to its last step, the device synchronised at both ends. A
ratio is one pair's; the overhead is the difference of the two, a step, in microseconds. The trial evaluates in between,
as the default protocol has it: that share is shown apart, but for resnet_cifar, which evaluates one batch only, at the
end. At most 1.05 is asked of rows whose step takes over 5 ms.

    python tests/benchmarks/bench_trial_overhead.py [--quick] [--cpu-time] [--repeats 7] [--json FILE]

With --cpu-time the clock is that of the process's own processor time, all its threads': what another process takes from
a shared machine does not count, nor does waiting for a device.

Workloads whose data are not under $BSTUNE_DATA are left out, and so is mobilenet_cifar, which needs torchvision and a
GPU. resnet_cifar is timed at a small batch size on a CPU: at its own, a step takes half a minute.
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
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from hydra import compose, initialize_config_module
from lightning.pytorch import LightningModule, seed_everything
from omegaconf import DictConfig
from torch import Tensor

from bstune.core.clock import TrialClock
from bstune.core.console import quieten
from bstune.core.records import Budget, EvaluationSchedule, Target, TrialProtocol, TrialResult, TrialSpec
from bstune.trial.device import device_name, resolve_device, versions
from bstune.trial.loop import Workload, run_trial
from bstune.trial.workload import build_workload


@dataclass(frozen=True)
class Case:
    """One row: a workload at one batch size, ``steps`` optimizer steps a run."""

    workload: str
    batch_size: int
    steps: int
    folder: str | None = None  # of its data, under $BSTUNE_DATA
    evaluates: bool = True


CASES = (
    Case("airfoil", 100, 1500, "airfoil"),
    Case("digits", 32, 1500),
    Case("digits", 512, 800),
    Case("fashion_mlp", 128, 800, "fashion-mnist"),
    Case("mnist_cnn", 64, 500, "mnist"),
    Case("cifar_mlp", 128, 400, "cifar-10-batches-bin"),
    Case("fashion_cnn", 32, 80, "fashion-mnist"),
    Case("fashion_cnn", 512, 8, "fashion-mnist"),
    Case("resnet_cifar", 8, 4, "cifar-10-batches-bin", evaluates=False),
)
Now = Callable[[], float]
LEFT_OUT = "mobilenet_cifar is LEFT OUT: it needs torchvision and a GPU"
ASKED_OF, ASKED = 5.0, 1.05  # milliseconds a step from which on the ratio is asked for


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
    def overheads(self) -> list[float]:
        """Return the trial's seconds less the loop's, in microseconds a step, pair by pair."""
        return [1e6 * (a - b) / self.steps for a, b in zip(self.trial, self.loop, strict=True)]

    @property
    def evaluation_shares(self) -> list[float]:
        """Return the seconds of evaluation over those of training, trial by trial."""
        return [a / b for a, b in zip(self.evaluation, self.trial, strict=True)]


def compose_case(case: Case, device: torch.device) -> DictConfig:
    """Return the case's config, everything else at its default."""
    overrides = [f"+workload={case.workload}", f"device={device.type}", "precision=32-true"]
    with initialize_config_module("bstune.conf", version_base="1.3"):
        return compose("config", overrides)


def protocol(config: DictConfig, target: Target, budget: Budget) -> TrialProtocol:
    """Return the default protocol with another target and budget."""
    rules = config.protocol
    return TrialProtocol(
        target=target,
        budget=budget,
        evaluation_schedule=EvaluationSchedule(
            rules.evaluation_ratio, rules.evaluation_share, rules.evaluation_cost, rules.near
        ),
        micro_batch_size=None,
        warmup_steps=rules.warmup_steps,
        divergence=rules.divergence,
        noise_scale_every=rules.noise_scale_every,
        compile=None,
        trainer={"accelerator": config.device, "devices": 1, "precision": config.precision},
    )


def run_bstune(
    workload: Workload, spec: TrialSpec, rules: TrialProtocol, now: Now = time.perf_counter
) -> tuple[TrialResult, LightningModule]:
    """Run one trial by a clock; return its record and its module as trained."""
    built: list[LightningModule] = []

    def build(spec: TrialSpec) -> LightningModule:
        built.append(workload.build_module(spec))
        return built[0]

    clock = TrialClock(now, torch.cuda.synchronize if torch.cuda.is_available() else lambda: None)
    return run_trial(replace(workload, build_module=build), spec, rules, clock=clock), built[0]


def run_loop(
    workload: Workload, spec: TrialSpec, steps: int, device: torch.device, now: Now
) -> tuple[float, list[Tensor]]:
    """Train with a plain loop; return its seconds and its weights as trained, or their average where it keeps one."""
    seed_everything(spec.seed, verbose=False)
    module: Any = workload.build_module(spec).to(device).train()
    configured = module.configure_optimizers()
    optimizer, schedule = configured, None
    if isinstance(configured, dict):
        optimizer, schedule = configured["optimizer"], configured["lr_scheduler"]["scheduler"]
    rule = getattr(module, "average", None)
    weights = [value.detach() for value in (*module.parameters(), *module.buffers())]
    average = [value.clone() for value in weights]
    updated = 0
    stream = iter(workload.train_batches(spec))
    synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    synchronize()
    start = now()
    for step in range(steps):
        batch = next(stream)
        optimizer.zero_grad()
        module.training_step(batch, step).backward()
        optimizer.step()
        if schedule is not None:
            schedule.step()
        if rule is not None and rule.should_update(step_idx=step):
            torch._foreach_lerp_(average, weights, 1.0 - rule.decay(step + 1) if updated else 1.0)
            updated = rule._latest_update_step = step + 1
    synchronize()
    seconds = now() - start
    return seconds, [value.detach() for value in module.parameters()] if rule is None else average


def measure(case: Case, repeats: int, device: torch.device, now: Now, note: Callable[[str], None]) -> Row:
    """Run ``repeats`` pairs of a case, in turns, after one pair that is thrown away.

    Raises:
        RuntimeError: if the two sides did not come to the same weights, or the trial did not run its steps.
    """
    config = compose_case(case, device)
    workload = build_workload(config)
    rules = protocol(config, Target(config.workload.target.metric, -1.0, "min"), Budget(case.steps, 1))
    if not case.evaluates:
        rules = replace(rules, trainer={**rules.trainer, "num_sanity_val_steps": 0, "limit_val_batches": 1})
    trial, loop, evaluation = [], [], []
    for repeat in range(repeats + 1):
        note(f"{case.workload} at {case.batch_size}: pair {repeat} of {repeats}")
        # A small rate: both sides must stay finite however many steps are asked for.
        spec = TrialSpec(0, 0, case.batch_size, 0.01, None, repeat)
        result, ours = run_bstune(workload, spec, rules, now)
        seconds, plain = run_loop(workload, spec, case.steps, device, now)
        if result.steps != case.steps:
            raise RuntimeError(f"the trial ended after {result.steps} of {case.steps} steps: {result.status}")
        for a, b in zip(ours.parameters(), plain, strict=False):
            if not torch.allclose(a.detach().to(b), b, rtol=1e-3, atol=1e-5):
                raise RuntimeError(f"the trial and the loop came to other weights in pair {repeat}")
        if repeat:
            trial.append(result.train_seconds)
            loop.append(seconds)
            evaluation.append(result.eval_seconds)
    return Row(case.workload, case.batch_size, case.steps, tuple(trial), tuple(loop), tuple(evaluation))


def train_to_target(case: Case, device: torch.device) -> TrialResult:
    """Run one real trial: the workload's own target, budget, reference rate scaled by the square root, whole module."""
    config = compose_case(case, device)
    own, reference = config.workload.target, config.workload.reference
    rules = protocol(
        config, Target(own.metric, own.value, own.mode), Budget(config.budget.steps, config.budget.examples)
    )
    lr = reference.lr * (case.batch_size / reference.batch_size) ** 0.5
    result, _ = run_bstune(build_workload(config), TrialSpec(0, 0, case.batch_size, lr, None, 0), rules)
    return result


def table(rows: Sequence[Row]) -> str:
    """Return the rows as text: milliseconds and microseconds of overhead a step, ratios, and evaluation's share."""
    lines = [
        f"{'workload':<13} {'B':>5} {'steps':>6} {'trial ms':>9} {'loop ms':>9}"
        f" {'ratio min':>10} {'median':>7} {'max':>7} {'overhead us':>12} {'eval/train':>11}"
    ]
    for row in rows:
        trial, loop = (1000 * statistics.median(side) / row.steps for side in (row.trial, row.loop))
        ratios, share = row.ratios, statistics.median(row.evaluation_shares)
        over = loop > ASKED_OF and statistics.median(ratios) > ASKED
        lines.append(
            f"{row.workload:<13} {row.batch_size:>5} {row.steps:>6} {trial:>9.3f} {loop:>9.3f}"
            f" {min(ratios):>10.3f} {statistics.median(ratios):>7.3f} {max(ratios):>7.3f}"
            f" {statistics.median(row.overheads):>12.0f} {share:>11.3f}{f'  OVER {ASKED}' if over else ''}"
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
    parser.add_argument("--repeats", type=int, help="pairs per row: 7, or 3 with --quick")
    parser.add_argument("--cpu-time", action="store_true", help="seconds of the process's processor time")
    parser.add_argument("--quick", action="store_true", help="a quarter of the steps a run")
    parser.add_argument("--steps", type=int, help="steps per run, in place of each row's own")
    parser.add_argument("--workload", choices=sorted({case.workload for case in CASES}), help="this one alone")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or auto")
    parser.add_argument("--to-target", action="store_true", help="also run one real trial per row to its target")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every number to FILE")
    options = parser.parse_args()
    options.repeats = (3 if options.quick else 7) if options.repeats is None else options.repeats
    if options.repeats < 1 or (options.steps is not None and options.steps < 1):
        parser.error("--repeats and --steps must be at least 1")
    quieten()
    warnings.filterwarnings("ignore", message=".*LeafSpec.*")

    device = resolve_device(options.device)
    cases = [case for case in CASES if options.workload in (None, case.workload)]
    data = Path(os.environ.get("BSTUNE_DATA", "/nowhere"))
    for case in [case for case in cases if case.folder is not None and not (data / case.folder).is_dir()]:
        cases.remove(case)
        print(f"{case.workload} is LEFT OUT: set BSTUNE_DATA to the folder that holds {case.folder}")
    print(LEFT_OUT)
    now = time.process_time if options.cpu_time else time.perf_counter
    about = machine(device, options.repeats)
    print(", ".join(f"{name} {value}" for name, value in about.items()))
    rows, trials = [], []
    for case in cases:
        case = replace(case, steps=options.steps or max(2, case.steps // (4 if options.quick else 1)))
        rows.append(measure(case, options.repeats, device, now, lambda text: print(text, file=sys.stderr)))
        if options.to_target:
            trials.append(train_to_target(case, device))
    print(table(rows))
    for result in trials:
        print(target_line(result))
    if options.json:
        values = [
            asdict(row) | {name: getattr(row, name) for name in ("ratios", "overheads", "evaluation_shares")}
            for row in rows
        ]
        records = [json.loads(result.to_json()) for result in trials]
        options.json.write_text(json.dumps({"machine": about, "rows": values, "to_target": records}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
