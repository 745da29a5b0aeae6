import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import nn
from torch.utils.data import DataLoader

from bstune.workloads.averaging import UPDATES_IN_WINDOW, RunningWeightAverage
from bstune.workloads.classifier import Classifier
from bstune.workloads.datasets import load_digits
from bstune.workloads.images import ImageData
from bstune.workloads.models import mlp
from bstune.workloads.schedules import warmup_then_constant

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers")
BATCHES = DataLoader(range(400))


def fit(module, loaders, steps, *callbacks, resume_from=None):
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    trainer = Trainer(
        accelerator="cpu",
        max_steps=steps,
        max_epochs=-1,
        val_check_interval=1,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        enable_checkpointing=False,
        callbacks=list(callbacks),
        **quiet,
    )
    trainer.fit(module, *loaders, ckpt_path=resume_from)


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


@pytest.mark.parametrize("fraction", [0.1, 0.5, 1.0])
def test_evaluates_the_polynomial_average_and_trains_the_weights(fraction):
    steps = 400
    module = Counter(RunningWeightAverage(fraction))
    fit(module, (BATCHES, DataLoader(range(1))), steps)
    assert module.trained == list(range(steps))
    assert module.evaluated == pytest.approx(averages(fraction, steps), rel=1e-5)
    # The mean age of what counts is the stated share of the steps; the last update is recent.
    assert module.evaluated[-1] == pytest.approx(steps / (1 + fraction), rel=0.03)
    assert module.weight.item() == module.evaluated[-1]


class SaveAt(Callback):
    def __init__(self, step, path):
        self.step, self.path = step, path

    def on_validation_end(self, trainer, pl_module):
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


# At step 230 the average is some steps old.
@pytest.mark.parametrize("stop", [3, 230])
def test_resumes_bit_for_bit(tmp_path, stop):
    data = ImageData(load_digits(), 1200, validation=300, validation_batch_size=300, test=297)
    # One batch an epoch, in one order.
    train = DataLoader(data.split.train, 1200, collate_fn=data.split.normalise)

    def build():
        seed_everything(0, verbose=False)
        return Classifier(
            mlp(64, [16], 10),
            nn.CrossEntropyLoss(),
            lambda parameters, lr: torch.optim.SGD(parameters, lr, momentum=0.9),
            lr=0.1,
            schedule=lambda optimizer: warmup_then_constant(optimizer, 4800, 1200),
            average=RunningWeightAverage(0.1),
        )

    steps = stop + 20
    whole, resumed = build(), build()
    saved = tmp_path / "saved.ckpt"
    fit(whole, (train, data.val_dataloader()), steps, SaveAt(stop, saved))
    fit(resumed, (train, data.val_dataloader()), steps, resume_from=saved)
    states = zip(whole.state_dict().values(), resumed.state_dict().values(), strict=True)
    assert all(torch.equal(one, other) for one, other in states)
