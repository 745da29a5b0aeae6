"""What a bstune trial's training costs over a plain PyTorch loop that takes the same steps, for each shipped workload.

Both sides draw the same batches from the same stream and train the whole module as its config has it: training_step,
zero_grad, backward, optimizer step, the schedule stepped and the average of the weights updated where there is one.
They run in one process, in turns, after one pair that is thrown away; at the end of each pair the weights are compared,
so that both did the same work. The trial's seconds are those of its training clock, warm-up included; the loop's those
from its first batch to its last step, the device synchronised at both ends. A ratio is one pair's; the overhead is the
difference of the two, a step. The trial evaluates in between, as the default protocol has it: that share is shown
apart, but for resnet_cifar, which evaluates one batch only, at the end. At most 1.05 is asked of steps over 5 ms.

    python tests/benchmarks/bench_trial_overhead.py [--quick] [--cpu-time] [--repeats 7] [--json FILE]

With --cpu-time the clock is the process's own processor time, all threads': what another process takes from a shared
machine does not count, nor does waiting for a device. Workloads whose data are not under $BSTUNE_DATA are left out, and
so is mobilenet_cifar, which needs torchvision and a GPU. resnet_cifar has a small batch size here: at its own, a step
takes half a minute on a CPU.
"""

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from common import load_for, machine, options_of, spread, take_turns, train, write
from lightning.pytorch import seed_everything
from torch import Tensor

from bstune.core.clock import TrialClock
from bstune.core.records import TrialSpec
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
Now = Callable[[], float]
ASKED_OF, ASKED = 5.0, 1.05  # milliseconds a step from which on the ratio is asked for


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
    synchronize(device)
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
    synchronize(device)
    seconds = now() - start
    return seconds, [value.detach() for value in module.parameters()] if rule is None else average


def measure(name: str, batch_size: int, steps: int, repeats: int, device: torch.device, now: Now) -> dict[str, Any]:
    """Return the seconds of the pairs of one case; an error if the two sides came to other weights."""
    workload, protocol = load_for(name, device, steps)
    if name == "resnet_cifar":
        protocol = replace(protocol, trainer={**protocol.trainer, "num_sanity_val_steps": 0, "limit_val_batches": 1})

    def pair(repeat: int) -> tuple[float, float, float]:
        # A small rate: both sides must stay finite however many steps are asked for.
        spec = TrialSpec(0, 0, batch_size, 0.01, None, repeat)
        result, ours = train(workload, spec, protocol, TrialClock(now, lambda: synchronize(device)))
        seconds, plain = run_loop(workload, spec, steps, device, now)
        for a, b in zip(ours.parameters(), plain, strict=False):
            if not torch.allclose(a.detach().to(b), b, rtol=1e-3, atol=1e-5):
                raise RuntimeError(f"the trial and the loop came to other weights in pair {repeat}")
        return result.train_seconds, seconds, result.eval_seconds

    pairs = take_turns(pair, repeats)
    return {
        "workload": name,
        "batch_size": batch_size,
        "steps": steps,
        "trial": [trial for trial, _, _ in pairs],
        "loop": [loop for _, loop, _ in pairs],
        "ratios": [trial / loop for trial, loop, _ in pairs],
        "overheads": [1e6 * (trial - loop) / steps for trial, loop, _ in pairs],
        "evaluation_shares": [evaluation / trial for trial, _, evaluation in pairs],
    }


def line(row: dict[str, Any]) -> str:
    """Return a row as text: milliseconds a step, ratios, microseconds of overhead a step, and evaluation's share."""
    trial, loop = (1e3 * statistics.median(row[side]) / row["steps"] for side in ("trial", "loop"))
    over, share = (statistics.median(row[name]) for name in ("overheads", "evaluation_shares"))
    missed = f"  OVER {ASKED}" if loop > ASKED_OF and statistics.median(row["ratios"]) > ASKED else ""
    head = f"{row['workload']:<13} {row['batch_size']:>5} {row['steps']:>6} {trial:>9.3f} {loop:>9.3f}"
    return f"{head}  {spread(row['ratios']):<25} {over:>12.0f} {share:>11.3f}{missed}"


if __name__ == "__main__":
    options = options_of(
        __doc__,
        ("--repeats", {"type": int, "help": "pairs per row: 7, or 3 with --quick"}),
        ("--cpu-time", {"action": "store_true", "help": "seconds of the process's processor time"}),
        ("--quick", {"action": "store_true", "help": "a quarter of the steps a run"}),
        ("--steps", {"type": int, "help": "steps per run, in place of each row's own"}),
        ("--workload", {"choices": sorted({name for name, *_ in CASES}), "help": "this one alone"}),
    )
    repeats = options.repeats or (3 if options.quick else 7)
    about = machine(options.device, repeats)
    print("mobilenet_cifar is left out: it needs torchvision and a GPU")
    print(
        f"{'workload':<13} {'B':>5} {'steps':>6} {'trial ms':>9} {'loop ms':>9}  {'ratio: least, median, most':<25}",
        end="",
    )
    print(f" {'overhead us':>11} {'eval/train':>11}")
    now = time.process_time if options.cpu_time else time.perf_counter
    rows = []
    for name, batch_size, steps, folder in CASES:
        if options.workload not in (None, name):
            continue
        if folder is not None and not (Path(os.environ.get("BSTUNE_DATA", "/nowhere")) / folder).is_dir():
            print(f"{name} is left out: set BSTUNE_DATA to the folder that holds {folder}")
            continue
        steps = options.steps or max(2, steps // (4 if options.quick else 1))
        rows.append(measure(name, batch_size, steps, repeats, options.device, now))
        print(line(rows[-1]), flush=True)
    write(options.json, about, rows)
