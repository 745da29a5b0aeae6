"""What a bstune trial's training costs over a plain PyTorch loop that takes the same steps, for each shipped workload.

Both sides draw the same batches from the same stream and train the whole module as its config has it, schedule and
average of the weights included. They run in turns, after one pair that is thrown away; after each pair the weights are
compared, so that both did the same work. The trial's seconds are those of its training clock, warm-up included; the
loop's those from its first batch to its last step. The trial evaluates in between, as the default protocol has it: that
share is shown apart (resnet_cifar evaluates one batch, at the end).

    python tests/benchmarks/bench_trial_overhead.py [--quick | --start] [--repeats 7] [--workload digits] [--json FILE]

With ``--start``: what a trial of one step takes of CPU time, beside the construction of its module alone. On a busy
machine CPU time says more than wall time does; evaluations are of one batch.

resnet_cifar has a small batch size here: at its own, a step takes half a minute on a CPU. mobilenet_cifar is left out:
it needs torchvision and a GPU. A ratio of at most 1.05 is asked of steps over 5 ms.
"""

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from common import load_for, machine, options_of, spread, train, write
from lightning.pytorch import seed_everything
from torch import Tensor

from bstune.core.records import Budget, TrialSpec
from bstune.trial.device import synchronize
from bstune.trial.loop import Workload

CASES = (  # workload, batch size, steps, the folder of its data under $BSTUNE_DATA
    ("airfoil", 100, 1500, "airfoil"),
    ("digits", 32, 1500, None),
    ("digits", 512, 800, None),
    ("fashion_mlp", 128, 800, "fashion-mnist"),
    ("mnist_cnn", 64, 500, "mnist"),
    ("cifar_mlp", 128, 400, "cifar-10-batches-bin"),
    ("fashion_cnn", 32, 80, "fashion-mnist"),
    ("fashion_cnn", 512, 8, "fashion-mnist"),
    ("resnet_cifar", 8, 4, "cifar-10-batches-bin"),
)


def run_loop(workload: Workload, spec: TrialSpec, steps: int, device: torch.device) -> tuple[float, list[Tensor]]:
    """Train with a plain loop; return its seconds and its weights as trained, or their average where it keeps one."""
    seed_everything(spec.seed, verbose=False)
    module: Any = workload.build_module(spec).to(device).train()
    optimizer, schedule = module.configure_optimizers(), None
    if isinstance(optimizer, dict):
        optimizer, schedule = optimizer["optimizer"], optimizer["lr_scheduler"]["scheduler"]
    rule = getattr(module, "average", None)
    weights = [value.detach() for value in (*module.parameters(), *module.buffers())]
    average = [value.clone() for value in weights]
    updated = 0
    stream = iter(workload.train_batches(spec))
    synchronize(device)
    start = time.perf_counter()
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
    synchronize(device)
    return time.perf_counter() - start, weights if rule is None else average


def measure(name: str, batch_size: int, steps: int, repeats: int, device: torch.device) -> dict[str, Any]:
    """Print and return the pairs of one case; an error if the two sides came to other weights."""
    workload, protocol = load_for(name, device, steps)
    if name == "resnet_cifar":
        protocol = replace(protocol, trainer={**protocol.trainer, "num_sanity_val_steps": 0, "limit_val_batches": 1})

    def pair(repeat: int) -> tuple[float, float, float]:
        # A small rate: both sides must stay finite however many steps are asked for.
        spec = TrialSpec(0, 0, batch_size, 0.01, None, repeat)
        result, ours = train(workload, spec, protocol)
        seconds, plain = run_loop(workload, spec, steps, device)
        for a, b in zip(ours.parameters(), plain, strict=False):
            if not torch.allclose(a.detach().to(b), b, rtol=1e-3, atol=1e-5):
                raise RuntimeError(f"the trial and the loop came to other weights in pair {repeat}")
        return result.train_seconds, seconds, result.eval_seconds

    pairs = [pair(repeat) for repeat in range(repeats + 1)][1:]
    ratios = [trial / loop for trial, loop, _ in pairs]
    trial = 1e3 * statistics.median(trial for trial, _, _ in pairs) / steps
    loop = 1e3 * statistics.median(loop for _, loop, _ in pairs) / steps
    over = statistics.median(1e6 * (trial - loop) / steps for trial, loop, _ in pairs)
    share = statistics.median(evaluation / trial for trial, _, evaluation in pairs)
    head = f"{name:<13} {batch_size:>5} {steps:>6} {trial:>9.3f} {loop:>9.3f}"
    print(f"{head}  {spread(ratios):<25} {over:>12.0f} {share:>11.3f}", flush=True)
    return {"workload": name, "batch_size": batch_size, "steps": steps, "pairs": pairs}


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

    pairs = [(milliseconds(workload.build_module, seed), milliseconds(one_step, seed)) for seed in range(repeats + 3)][
        3:
    ]
    build, trial = (statistics.median(column) for column in zip(*pairs, strict=True))
    print(f"{name:<13} {batch_size:>5} {build:>9.1f} {trial:>9.1f}", flush=True)
    return {"workload": name, "batch_size": batch_size, "pairs": pairs}


if __name__ == "__main__":
    options = options_of(
        __doc__,
        ("--repeats", {"type": int, "help": "pairs per row: 7, or 3 with --quick"}),
        ("--quick", {"action": "store_true", "help": "a quarter of the steps a run"}),
        ("--start", {"action": "store_true", "help": "CPU time of a trial of one step instead"}),
        ("--workload", {"choices": sorted({name for name, *_ in CASES}), "help": "this one alone"}),
    )
    repeats = options.repeats or (3 if options.quick else 7)
    about = machine(options.device, repeats)
    if options.start:
        print(f"{'workload':<13} {'B':>5} {'module ms':>9} {'trial ms':>9}")
    else:
        head = f"{'workload':<13} {'B':>5} {'steps':>6} {'trial ms':>9} {'loop ms':>9}"
        print(f"{head}  {'ratio: least, median, most':<25} {'overhead us':>11} {'eval/train':>11}")
    rows = []
    for name, batch_size, steps, folder in CASES:
        if options.workload not in (None, name):
            continue
        if folder is not None and not (Path(os.environ.get("BSTUNE_DATA", "/nowhere")) / folder).is_dir():
            print(f"{name} is left out: set BSTUNE_DATA to the folder that holds {folder}")
            continue
        steps = max(2, steps // (4 if options.quick else 1))
        if options.start:
            rows.append(measure_start(name, batch_size, repeats, options.device))
        else:
            rows.append(measure(name, batch_size, steps, repeats, options.device))
    write(options.json, about, rows)
