import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from small import QUIET
from torch import nn
from torch.utils.data import DataLoader

from bstune.workloads.averaging import UPDATES_IN_WINDOW, RunningWeightAverage

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers")
BATCHES = DataLoader(range(400))


class Counter(LightningModule):
    """Its one weight is the number of steps."""

    def __init__(self, average):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        self.average = average
        self.trained, self.evaluated = [], []

    def training_step(self, batch, batch_idx):
        self.trained.append(self.weight.item())
        return -self.weight

    def validation_step(self, batch, batch_idx):
        self.evaluated.append(self.weight.item())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)

    def configure_callbacks(self):
        return [self.average]


def averages(fraction, steps):
    """The average of 1, 2, ... after each step, by each snapshot's cumulative weight."""
    snapshots, expected = [], []
    for step in range(1, steps + 1):
        if not snapshots or step >= snapshots[-1] * (1 + fraction / UPDATES_IN_WINDOW):
            snapshots.append(step)
        shares = [(snapshot / snapshots[-1]) ** (1 / fraction) for snapshot in snapshots]
        weights = [share - before for share, before in zip(shares, [0.0, *shares], strict=False)]
        products = [weight * value for weight, value in zip(weights, snapshots, strict=True)]
        expected.append(sum(products))
    return expected


def test_evaluates_the_polynomial_average_and_trains_the_weights():
    fraction, steps = 0.5, 400
    module = Counter(RunningWeightAverage(fraction))
    trainer = Trainer(
        accelerator="cpu",
        max_steps=steps,
        max_epochs=-1,
        val_check_interval=1,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        **QUIET,
    )
    trainer.fit(module, BATCHES, DataLoader(range(1)))
    assert module.trained == list(range(steps))
    assert module.evaluated == pytest.approx(averages(fraction, steps), rel=1e-5)
    # The mean age of what counts is the stated share of the steps; the last update is recent.
    assert module.evaluated[-1] == pytest.approx(steps / (1 + fraction), rel=0.03)
    assert module.weight.item() == module.evaluated[-1]
