"""The noise scale of a loop's accumulated gradients: closed forms, Lightning's call-back, and what is refused."""

import math

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from toolbox import measured_steps
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import bstune
from bstune.core.errors import ConfigError
from bstune.core.noise_scale import combine_norms

QUIET = {
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": False,
    "accelerator": "cpu",
}


def points(count, generator):
    """Inputs and targets of a line with noise, (count, 3) and (count, 1)."""
    inputs = torch.randn(count, 3, generator=generator)
    return inputs, inputs.sum(1, keepdim=True) + torch.randn(count, 1, generator=generator)


def loss_of(model, batch):
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def accumulate(noise, model, parts, factors, scale=1.0):
    """Take one step's backward passes, each loss times its factor."""
    model.zero_grad()
    for part, factor in zip(parts, factors, strict=True):
        (scale * factor * loss_of(model, part)).backward()
        noise.measure(model.parameters(), len(part[0]))
    noise.step(scale)


@pytest.mark.parametrize(
    ("weights", "sizes", "factors", "scale"),
    [
        ("equal", (6, 6), (0.5, 0.5), 1.0),
        # As a gradient scaler has it.
        ("equal", (4, 4, 4), (1 / 3, 1 / 3, 1 / 3), 1024.0),
        ("examples", (8, 4), (2 / 3, 1 / 3), 1.0),
        ("examples", (5, 4, 3), (5 / 12, 4 / 12, 3 / 12), 8.0),
    ],
)
def test_it_is_that_of_the_parts_gradients(weights, sizes, factors, scale):
    generator = torch.Generator().manual_seed(0)
    model = nn.Linear(3, 1)
    batch = points(12, generator)
    inputs, targets = batch
    parts = list(zip(inputs.split(sizes), targets.split(sizes), strict=True))
    noise = bstune.LoopNoiseScale(weights=weights)
    accumulate(noise, model, parts, factors, scale)
    # Straight from the definition, without accumulated gradients.
    squares = [gradient_of(model, part).square().sum().item() for part in parts]
    big = gradient_of(model, batch).square().sum().item()
    expected = combine_norms(squares, sizes, big)
    ((step, squared_gradient, trace),) = noise.measurements
    assert step == 1
    assert squared_gradient == pytest.approx(expected.squared_gradient, rel=1e-4)
    assert trace == pytest.approx(expected.trace, rel=1e-4)


def gradient_of(model, batch):
    gradients = torch.autograd.grad(loss_of(model, batch), list(model.parameters()))
    return torch.cat([one.flatten() for one in gradients])


def two_parts():
    """Two micro-batches of four examples."""
    first = torch.Generator().manual_seed(0)
    second = torch.Generator().manual_seed(1)
    return [points(4, first), points(4, second)]


def test_it_comes_to_the_scale_of_a_known_noise():
    """Gradients of examples are 2 and a normal of variance 9 in each of 4 dimensions: tr/|G|^2 = 36/16."""
    generator = torch.Generator().manual_seed(1)
    weight = nn.Parameter(torch.zeros(4))
    noise = bstune.LoopNoiseScale(window=400)
    for _ in range(400):
        weight.grad = None
        for _ in range(2):
            examples = 2.0 + 3.0 * torch.randn(8, 4, generator=generator)
            (0.5 * (weight * examples).sum(1).mean()).backward()
            noise.measure([weight], 8)
        noise.step()
    estimate = noise.estimate
    assert estimate.low < 36 / 16 < estimate.high
    # Over 400 steps of 2 x 8 examples its standard deviation is 4%.
    assert estimate.noise_scale == pytest.approx(36 / 16, rel=0.15)
    assert estimate.measurements == 400


class Module(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(3, 1)

    def training_step(self, batch, batch_idx):
        return loss_of(self.net, batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


# Lightning gives advice to whoever trains a toy.
@pytest.mark.filterwarnings("ignore")
def test_it_measures_what_lightnings_call_back_does():
    data = TensorDataset(*points(48, torch.Generator().manual_seed(2)))
    loader = DataLoader(data, batch_size=4)
    torch.manual_seed(0)
    module = Module()
    of_trainer = bstune.NoiseScale(every=1)
    arguments = {**QUIET, "max_epochs": 1, "accumulate_grad_batches": 3}
    Trainer(**arguments, callbacks=[of_trainer]).fit(module, loader)
    torch.manual_seed(0)
    module = Module()
    noise = bstune.LoopNoiseScale()
    optimizer = module.configure_optimizers()
    batches = list(loader)
    for first in range(0, len(batches), 3):
        accumulate(noise, module.net, batches[first : first + 3], [1 / 3] * 3)
        optimizer.step()
    # 48 examples, 4 a batch, 3 batches a step.
    assert len(noise.measurements) == 4
    for own, other in zip(noise.measurements, of_trainer.measurements, strict=True):
        assert own == pytest.approx(other, rel=1e-4)


def test_its_measurements_so_far_are_not_copied_at_each_step():
    """A measured step adds one entry to what was measured; what was handed out before stays as it was."""
    model = nn.Linear(3, 1)
    noise = bstune.LoopNoiseScale()
    parts = two_parts()
    accumulate(noise, model, parts, (0.5, 0.5))
    kept = noise._measurements
    first = noise.measurements
    accumulate(noise, model, parts, (0.5, 0.5))
    assert noise._measurements is kept
    assert noise.measurements == tuple(kept)
    assert (first, len(kept)) == (noise.measurements[:1], 2)


def test_steps_in_between_are_not_measured():
    model = nn.Linear(3, 1)
    noise = bstune.LoopNoiseScale(every=3)
    parts = two_parts()
    for _ in range(7):
        accumulate(noise, model, parts, (0.5, 0.5))
    assert measured_steps(noise.measurements) == [3, 6]
    assert noise.estimate.undetermined == "2 of at least 4 steps were measured"


def test_the_steps_of_a_trial_that_goes_on_are_counted_on():
    model = nn.Linear(3, 1)
    noise = bstune.LoopNoiseScale(every=3, first_step=100)
    parts = two_parts()
    for _ in range(7):
        accumulate(noise, model, parts, (0.5, 0.5))
    # The multiples of 3 among the steps 101 to 107.
    assert measured_steps(noise.measurements) == [102, 105]


@pytest.mark.parametrize("factor", [math.nan, math.inf])
def test_a_step_whose_gradient_is_not_finite_is_passed_over(factor):
    model = nn.Linear(3, 1)
    noise = bstune.LoopNoiseScale()
    parts = two_parts()
    accumulate(noise, model, parts, (factor, 0.5))
    assert (noise.measurements, noise.passed_over) == ((), 1)


def test_a_micro_batch_without_a_gradient_is_passed_over():
    noise = bstune.LoopNoiseScale()
    model = nn.Linear(3, 1)
    # No backward pass was taken.
    noise.measure(model.parameters(), 4)
    noise.measure(model.parameters(), 4)
    noise.step()
    assert (noise.measurements, noise.passed_over) == ((), 1)


def sparse():
    embedding = nn.Embedding(4, 2, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    bstune.LoopNoiseScale().measure(embedding.parameters(), 1)


@pytest.mark.parametrize(
    ("misuse", "message"),
    [
        (lambda: bstune.LoopNoiseScale(every=0), "every must be a positive integer, but got 0"),
        (lambda: bstune.LoopNoiseScale(first_step=-1), "a whole number of steps, but got -1"),
        (lambda: bstune.LoopNoiseScale(first_step=1.5), r"a whole number of steps, but got 1\.5"),
        (lambda: bstune.LoopNoiseScale(weights="mean"), "equal or examples, but got 'mean'"),
        (lambda: bstune.LoopNoiseScale(level=1.0), r"must lie in \(0, 1\), but got 1\.0"),
        (lambda: bstune.LoopNoiseScale().measure([], 0), "a positive integer, but got 0"),
        (lambda: bstune.LoopNoiseScale().step(), "two micro-batches a step or more, but got 0"),
        (sparse, "dense gradients"),
    ],
)
def test_what_cannot_be_measured(misuse, message):
    with pytest.raises(ConfigError, match=message):
        misuse()
