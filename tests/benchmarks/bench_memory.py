"""How many probes the memory ceiling takes, beside Lightning's BatchSizeFinder by bisection, at the same limits.

Memory is linear in the batch size, and none is really taken, as only probes are counted: Lightning's is a real Trainer
whose module raises an out-of-memory error above the limit, with one step a probe, no margin, and no cap but the data's
length. The last column is the ratio of the probes, Lightning's over ours to 1%.

    python tests/benchmarks/bench_memory.py
"""

import warnings

import torch
from common import machine, options_of
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.tuner import Tuner
from torch.utils.data import DataLoader, TensorDataset

from bstune.hardware.memory import ProbeResult, find_ceiling

CEILINGS = (30, 130, 500, 1163)
EXAMPLES = 20_000
# Bytes, and bytes an example.
BASE = 500_000_000
PER_EXAMPLE = 400_000


class Limited(LightningModule):
    """Runs out of memory above a batch size, and notes the sizes that it was asked for."""

    def __init__(self, ceiling: int) -> None:
        super().__init__()
        self.batch_size = 2
        self.ceiling = ceiling
        self.asked = []
        self.layer = torch.nn.Linear(1, 1)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(TensorDataset(torch.zeros(EXAMPLES, 1)), batch_size=self.batch_size)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        self.asked.append(len(batch[0]))
        # Lightning knows a lack of memory by these words.
        if len(batch[0]) > self.ceiling:
            raise RuntimeError("CUDA out of memory.")
        return self.layer(batch[0]).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def lightning(ceiling: int) -> tuple[int, int]:
    """Lightning's answer and its number of probes."""
    module = Limited(ceiling)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    tuner = Tuner(Trainer(accelerator="cpu", max_epochs=1, **quiet))
    options = {
        "mode": "binsearch",
        "steps_per_trial": 1,
        "max_trials": 100,
        "margin": 0.0,
        "max_val": EXAMPLES,
    }
    return int(tuner.scale_batch_size(module, **options) or 0), len(module.asked)


def ours(ceiling: int, relative: float) -> tuple[int, int]:
    """Our answer and our number of probes."""
    limit = BASE + PER_EXAMPLE * ceiling

    def probe(size: int) -> ProbeResult:
        taken = BASE + PER_EXAMPLE * size
        return ProbeResult(size, "fits" if taken <= limit else "training", limit, taken, taken)

    options = {
        "multiple": 1,
        "relative": relative,
        "largest_first": False,
        "verify": 1 if relative else 0,
    }
    found = find_ceiling(probe, 1, EXAMPLES, **options)
    return found.batch_size, len(found.probes)


if __name__ == "__main__":
    options = options_of(__doc__)
    warnings.filterwarnings("ignore")
    machine(options.device, 1)
    print(
        f"{'ceiling':>8} {'exact':>12} {'to 1%, verified':>16} {'Lightning':>12} {'ratio':>6}   "
        "(found / probes)"
    )
    for ceiling in CEILINGS:
        rows = ours(ceiling, 0.0), ours(ceiling, 0.01), lightning(ceiling)
        cells = " ".join(
            f"{f'{found} / {probes}':>{width}}"
            for (found, probes), width in zip(rows, (12, 16, 12), strict=True)
        )
        print(f"{ceiling:>8} {cells} {rows[2][1] / rows[1][1]:>6.1f}")
