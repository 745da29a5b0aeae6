"""What measuring the noise scale costs: a trial's training with the call-back over the same trial's without it.

Both sides are bstune trials of the same seed, in turns, after one pair that is thrown away. Seconds are those of the
training clock; a ratio is one pair's. After each pair the weights are compared bit for bit on a CPU. Rows: small steps
that are all overhead, and steps that are mostly arithmetic; whole batches, which are split, and micro-batches.

    python tests/benchmarks/bench_noise.py [--repeats 7] [--every N] [--json FILE]

fashion_cnn needs Fashion-MNIST under $BSTUNE_DATA and is left out where that is not set.
"""

import os
import statistics
from typing import Any

import torch
from common import load_for, machine, options_of, spread, train, write

from bstune.core.records import TrialSpec
from bstune.trial.noise_scale import NoiseScale

PLAIN = ("~workload.module.schedule", "~workload.module.average")
CASES = (  # workload, batch size, steps, micro-batch size, overrides
    ("digits", 32, 1280, None, PLAIN),
    ("digits", 512, 640, None, PLAIN),
    ("digits", 128, 320, 32, PLAIN),
    ("fashion_cnn", 128, 256, None, ()),
    ("fashion_cnn", 128, 256, 32, ()),
)


def measure(
    name: str, batch_size: int, steps: int, micro: int | None, overrides: Any, options: Any
) -> dict[str, Any]:
    """Print and return the pairs of one case; an error if the two sides came to other weights."""
    settings = (
        *overrides,
        "protocol.noise_scale_every=null",
        f"protocol.micro_batch_size={micro or 'null'}",
    )
    workload, protocol = load_for(name, options.device, steps, *settings)

    def pair(repeat: int) -> tuple[float, float]:
        spec = TrialSpec(0, 0, batch_size, 0.01, None, repeat)
        with_it, measured = train(
            workload, spec, protocol, [NoiseScale(every=options.every, weights="examples")]
        )
        without, plain = train(workload, spec, protocol)
        same = zip(measured.state_dict().values(), plain.state_dict().values(), strict=True)
        if options.device.type == "cpu" and not all(torch.equal(x, y) for x, y in same):
            raise RuntimeError(f"the noise scale changed the training in pair {repeat}")
        return with_it.train_seconds, without.train_seconds

    pairs = [pair(repeat) for repeat in range(options.repeats + 1)][1:]
    ratios = [with_it / without for with_it, without in pairs]
    ms = 1e3 * statistics.median(without for _, without in pairs) / steps
    print(
        f"{name:<12} {batch_size:>5} {micro or '-':>6} {steps:>6} {ms:>8.3f}  {spread(ratios)}",
        flush=True,
    )
    return {
        "workload": name,
        "batch_size": batch_size,
        "micro_batch_size": micro,
        "steps": steps,
        "pairs": pairs,
    }


if __name__ == "__main__":
    options = options_of(
        __doc__,
        ("--repeats", {"type": int, "default": 7, "help": "pairs per row"}),
        ("--quick", {"action": "store_true", "help": "a quarter of the steps a run"}),
        ("--every", {"type": int, "help": "steps between measurements, in place of the default"}),
    )
    about = machine(options.device, options.repeats)
    print(
        f"{'workload':<12} {'B':>5} {'micro':>6} {'steps':>6} {'ms/step':>8}  ratio: least, "
        "median, most"
    )
    rows = []
    for name, batch_size, steps, micro, overrides in CASES:
        if name == "fashion_cnn" and not os.environ.get("BSTUNE_DATA"):
            print(
                "fashion_cnn is left out: set BSTUNE_DATA to the folder that holds (or shall "
                "hold) Fashion-MNIST"
            )
            continue
        rows.append(
            measure(
                name, batch_size, steps // (4 if options.quick else 1), micro, overrides, options
            )
        )
    write(options.json, about, rows)
