"""The gradient of a large batch, accumulated from micro-batches of different sizes."""

from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import LightningModule
from toolbox import column

from bstune.core.errors import ConfigError
from bstune.trial.batches.accumulation import weight_micro_batches
from bstune.trial.devices import distributed


class Mean(LightningModule):
    """Has a loss that is the mean of its batch, as a tensor, in a dictionary, or none."""

    def __init__(self, returns=lambda loss: loss):
        super().__init__()
        self.returns = returns

    def training_step(self, batch, batch_idx=None):
        return self.returns(batch.mean())


def losses(module, batch, micro_batch_sizes):
    """The losses of the steps on the micro-batches, under a Trainer that counts them from an odd number on."""
    weight_micro_batches(module, micro_batch_sizes, len(batch))
    found = []
    for number, micro_batch in enumerate(batch.split_with_sizes(micro_batch_sizes)):
        loop = SimpleNamespace(batch_idx=len(micro_batch_sizes) * 3 + number)
        module._trainer = SimpleNamespace(fit_loop=loop)
        found.append(module.training_step(micro_batch))
    return found


@pytest.mark.parametrize("micro_batch_sizes", [(8,), (3, 3, 2), (1, 7)])
def test_lightnings_mean_of_the_losses_is_the_mean_over_the_batch(micro_batch_sizes):
    batch = torch.arange(8.0)
    found = losses(Mean(), batch, micro_batch_sizes)
    # Lightning divides each loss by their number.
    assert sum(found) / len(found) == pytest.approx(batch.mean().item())


def test_what_a_step_returns_beside_its_loss_stays():
    batch = torch.arange(8.0)
    found = losses(Mean(lambda loss: {"loss": loss, "mean": loss}), batch, (6, 2))
    assert column(found, "mean") == [batch[:6].mean(), batch[6:].mean()]
    # Twice the share of the batch: 6/8 and 2/8.
    assert column(found, "loss") == [batch[:6].mean() * 1.5, batch[6:].mean() * 0.5]
    assert losses(Mean(lambda loss: None), batch, (6, 2)) == [None, None]


@pytest.mark.parametrize(
    ("devices", "text"),
    [
        (1, "accumulated from micro-batches: set protocol.micro_batch_size=null"),
        (2, "split over devices: set devices=1"),
    ],
)
def test_a_module_that_steps_its_optimizers_itself_is_refused(devices, text, monkeypatch):
    module = Mean()
    module.automatic_optimization = False
    monkeypatch.setattr(distributed, "count", lambda: devices)
    with pytest.raises(ConfigError, match=f"Mean steps its optimizers itself .* cannot be {text}"):
        weight_micro_batches(module, (4, 4), 8)
