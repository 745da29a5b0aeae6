"""What a bstune trial's training costs over a plain PyTorch loop that takes the same steps, for each shipped workload.

All sides draw the same batches from the same stream and train the whole module as its config has it, schedule and
average of the weights included, so that they do the same work: a trial under the lean loop, a trial under Lightning's
own (``protocol.fast=off``), the plain loop, and the plain loop that stops at each step at which the trial evaluates,
outside of its clock too, to pass the same data through the network: what comes next finds the caches full of
that. They run in turns in one process, after one round that is thrown away; after each the weights are compared. The
trial's time is that of its training clock, warm-up included; a loop's that from its first batch to its last step. CPU
time and wall time are of the same runs: on a busy machine the first says more, and the second what a person waits for.
The trial also measures the noise scale in between, as the default protocol has it; what it spends on evaluations and
that is shown apart (resnet_cifar evaluates one batch).

    python tests/benchmarks/bench_trial_overhead.py [--quick | --start] [--repeats 7] [--workload digits] [--json FILE]

With ``--start``: what a trial of one step takes of CPU time, beside the construction of its module alone; evaluations
are of one batch.

resnet_cifar has a small batch size here: at its own, a step takes half a minute on a CPU. mobilenet_cifar is left out:
it needs torchvision and a GPU. A ratio of at most 1.10 is asked of all steps, of 1.02 of those over 5 ms.
"""

import os
import statistics
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import load_for, machine, options_of, spread, train, write
from lightning.pytorch import seed_everything
from torch import Tensor

from bstune.core.clock import Phase, TrialClock
from bstune.core.records import Budget, FastMode, TrialSpec
from bstune.trial.devices.device import synchronize
from bstune.trial.loop import Workload

CIFAR = "cifar-10-batches-bin"
LOOPS: tuple[FastMode, ...] = ("auto", "off")
CASES = (  # workload, batch size, steps, the folder of its data under $BSTUNE_DATA
    ("airfoil", 100, 1500, "airfoil"),
    ("digits", 8, 1500, None),
    ("digits", 32, 1500, None),
    ("digits", 128, 1200, None),
    ("digits", 512, 800, None),
    ("fashion_mlp", 8, 1200, "fashion-mnist"),
    ("fashion_mlp", 32, 1000, "fashion-mnist"),
    ("fashion_mlp", 128, 800, "fashion-mnist"),
    ("fashion_mlp", 512, 300, "fashion-mnist"),
    ("mnist_cnn", 8, 800, "mnist"),
    ("mnist_cnn", 32, 600, "mnist"),
    ("mnist_cnn", 128, 300, "mnist"),
    ("mnist_cnn", 512, 80, "mnist"),
    ("cifar_mlp", 8, 500, CIFAR),
    ("cifar_mlp", 32, 400, CIFAR),
    ("cifar_mlp", 128, 300, CIFAR),
    ("cifar_mlp", 512, 100, CIFAR),
    ("fashion_cnn", 8, 120, "fashion-mnist"),
    ("fashion_cnn", 32, 60, "fashion-mnist"),
    ("fashion_cnn", 128, 20, "fashion-mnist"),
    ("fashion_cnn", 512, 8, "fashion-mnist"),
    ("resnet_cifar", 8, 4, CIFAR),
)

# The two clocks of a side: seconds of the CPU and of the wall.
CPU = 0
WALL = 1


class BothClocks(TrialClock):
    """A trial's clock of CPU time, beside which ``wall`` counts wall time."""

    def __init__(self) -> None:
        super().__init__(time.process_time, synchronize)
        self.wall = TrialClock(synchronize=synchronize)

    def enter(self, phase: Phase) -> float:
        self.wall.enter(phase)
        return super().enter(phase)

    @property
    def training(self) -> tuple[float, float]:
        """Seconds of CPU time and of wall time in training."""
        return self.seconds(Phase.TRAINING), self.wall.seconds(Phase.TRAINING)


def run_loop(
    workload: Workload,
    spec: TrialSpec,
    steps: int,
    device: torch.device,
    evaluations: Collection[int] = (),
) -> tuple[tuple[float, float], list[Tensor]]:
    """Train with a plain loop, with a pause after ``evaluations`` to pass the validation data through the network.

    Return its seconds of CPU time and of wall time, and its weights as trained, or their average where it keeps one.
    """
    seed_everything(spec.seed, verbose=False)
    module: Any = workload.build_module(spec).to(device).train()
    optimizer = module.configure_optimizers()
    schedule = None
    if isinstance(optimizer, dict):
        optimizer, schedule = optimizer["optimizer"], optimizer["lr_scheduler"]["scheduler"]
    rule = getattr(module, "average", None)
    weights = [value.detach() for value in (*module.parameters(), *module.buffers())]
    average = [value.clone() for value in weights]
    updated = 0
    batches = workload.train_batches(spec)
    # A DataLoader's batches end with the epoch.
    stream = chain.from_iterable(repeat(batches))
    clock = BothClocks()
    clock.enter(Phase.TRAINING)
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
        if step + 1 in evaluations:
            with clock.interrupt_segment(Phase.EVALUATION):
                evaluate(workload, module)
    clock.enter(Phase.CLOSING)
    return clock.training, weights if rule is None else average


@torch.no_grad()
def evaluate(workload: Workload, module: Any) -> None:
    """Pass the validation data through the network, and leave what it counts as it is."""
    buffers = [value.clone() for value in module.buffers()]
    for number, batch in enumerate(workload.validation_batches):
        module.eval().training_step(batch, number)
    for value, kept in zip(module.train().buffers(), buffers, strict=True):
        value.copy_(kept)


def measure(
    name: str, batch_size: int, steps: int, repeats: int, device: torch.device
) -> dict[str, Any]:
    """Print and return the rounds of one case; an error if its sides came to other weights."""
    workload, protocol = load_for(name, device, steps)
    if name == "resnet_cifar":
        protocol = replace(
            protocol,
            trainer={**protocol.trainer, "num_sanity_val_steps": 0, "limit_val_batches": 1},
        )
        workload = replace(workload, validation_batches=[next(iter(workload.validation_batches))])

    def go(repeat: int) -> tuple[tuple[float, float], ...]:
        # A small rate: all sides must stay finite however many steps are asked for.
        spec = TrialSpec(0, 0, batch_size, 0.01, None, repeat)
        clocks = []
        weights = []
        for fast in LOOPS:
            clocks.append(BothClocks())
            record, module = train(workload, spec, replace(protocol, fast=fast), clock=clocks[-1])
            weights.append(list(module.parameters()))
        evaluations = {step for step, _ in record.history if step < steps}
        loops = [run_loop(workload, spec, steps, device, when) for when in ((), evaluations)]
        weights += [values for _, values in loops]
        for others in weights[:-1]:
            for a, b in zip(others, weights[-1], strict=False):
                if not torch.allclose(a.detach().to(b), b, rtol=1e-3, atol=1e-5):
                    raise RuntimeError(
                        f"the trial and the loop came to other weights in round {repeat}"
                    )
        beside = (clocks[0].seconds(Phase.EVALUATION), clocks[0].wall.seconds(Phase.EVALUATION))
        return *(clock.training for clock in clocks), *(seconds for seconds, _ in loops), beside

    rounds = [go(repeat) for repeat in range(repeats + 1)][1:]
    lean, lightning, loop, evaluating, beside = np.moveaxis(np.array(rounds), 1, 0)
    columns = ""
    for side in (lean, lightning, loop):
        columns += f"{1e6 * np.median(side[:, CPU]) / steps:>9.0f} "
    for ratios in (
        lean[:, CPU] / loop[:, CPU],
        lean[:, CPU] / evaluating[:, CPU],
        lean[:, WALL] / loop[:, WALL],
        lightning[:, CPU] / loop[:, CPU],
    ):
        columns += f" {spread(ratios.tolist()):<20}"
    share = np.median(beside[:, CPU] / lean[:, CPU])
    print(f"{name:<13} {batch_size:>5} {steps:>6} {columns} {share:>9.2f}", flush=True)
    return {"workload": name, "batch_size": batch_size, "steps": steps, "rounds": rounds}


def measure_start(name: str, batch_size: int, repeats: int, device: torch.device) -> dict[str, Any]:
    """Print and return the milliseconds of CPU time of a one-step trial, and of building its module, for one case."""
    workload, protocol = load_for(name, device, 1)
    protocol = replace(protocol, trainer={**protocol.trainer, "limit_val_batches": 1})

    def milliseconds(do: Callable[[TrialSpec], object], seed: int) -> float:
        start = time.process_time()
        do(TrialSpec(0, 0, batch_size, 0.01, None, seed))
        return 1e3 * (time.process_time() - start)

    def one_step(spec: TrialSpec) -> object:
        return train(workload, spec, replace(protocol, budget=Budget(1, 1)))

    # The first three find nothing loaded, and are left out.
    pairs = [
        (milliseconds(workload.build_module, seed), milliseconds(one_step, seed))
        for seed in range(repeats + 3)
    ][3:]
    build, trial = (statistics.median(column) for column in zip(*pairs, strict=True))
    print(f"{name:<13} {batch_size:>5} {build:>9.1f} {trial:>9.1f}", flush=True)
    return {"workload": name, "batch_size": batch_size, "pairs": pairs}


if __name__ == "__main__":
    options = options_of(
        __doc__,
        ("--repeats", {"type": int, "help": "rounds per row: 7, or 3 with --quick"}),
        ("--quick", {"action": "store_true", "help": "a quarter of the steps a run"}),
        ("--start", {"action": "store_true", "help": "CPU time of a trial of one step instead"}),
        ("--workload", {"choices": sorted({case[0] for case in CASES}), "help": "this one alone"}),
    )
    repeats = options.repeats or (3 if options.quick else 7)
    about = machine(options.device, repeats)
    if options.start:
        print(f"{'workload':<13} {'B':>5} {'module ms':>9} {'trial ms':>9}")
    else:
        head = (
            f"{'workload':<13} {'B':>5} {'steps':>6} {'lean us':>9} {'Lightning':>9} {'loop us':>9}"
        )
        ratios = ("lean / loop", "lean / evaluating", "lean / loop, wall", "Lightning / loop")
        print(head + "  " + " ".join(f"{ratio:<20}" for ratio in ratios) + f" {'eval/lean':>9}")
    rows = []
    for name, batch_size, steps, folder in CASES:
        if options.workload not in (None, name):
            continue
        if (
            folder is not None
            and not (Path(os.environ.get("BSTUNE_DATA", "/nowhere")) / folder).is_dir()
        ):
            print(f"{name} is left out: set BSTUNE_DATA to the folder that holds {folder}")
            continue
        steps = max(2, steps // (4 if options.quick else 1))
        if options.start:
            rows.append(measure_start(name, batch_size, repeats, options.device))
        else:
            rows.append(measure(name, batch_size, steps, repeats, options.device))
    write(options.json, about, rows)
