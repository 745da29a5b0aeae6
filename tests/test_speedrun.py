"""What speedrun_cifar has beside airbench_muon: its augmentation, its views at evaluation and its optimizer."""

import math
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from bstune.core.errors import ConfigError
from bstune.workloads.images import random_crop_flip
from bstune.workloads.layers import mirrored
from bstune.workloads.speedrun import (
    SeldomNormalisingMuon,
    random_crop_flip_jitter,
    six_views_where_unsure,
)

MEAN = torch.tensor([125.0, 123.0, 114.0]).view(1, 3, 1, 1)
COEFFICIENTS = (3.4576, -4.7391, 2.0843)


def images(n=40, side=32, seed=0):
    return torch.randint(
        0, 256, (n, 3, side, side), generator=torch.Generator().manual_seed(seed)
    ).to(torch.uint8)


def generator(seed=7):
    return torch.Generator().manual_seed(seed)


# Brightness and contrast


def test_pixels_are_moved_and_stretched_about_the_mean_of_their_channel():
    sizes = (8.0, 9.0, 10.0)
    contrast = 0.25
    found = (
        random_crop_flip_jitter(images(), generator(), 2, sizes, contrast, mean=MEAN)
        .double()
        .numpy()
    )
    drawn = generator()
    cropped = random_crop_flip(images(), drawn, 2).numpy().astype(np.float64)
    for image, result, u, v in zip(
        cropped, found, *(2 * torch.rand(2, 40, generator=drawn) - 1).tolist(), strict=True
    ):
        for channel, size in enumerate(sizes):
            mean = float(MEAN[0, channel])
            expected = mean + (1 + contrast * v) * (image[channel] - mean + size * u)
            np.testing.assert_allclose(result[channel], expected, atol=1e-3)


def test_without_a_range_only_the_crop_is_left():
    mirror = torch.arange(40) % 2 == 0
    plain = random_crop_flip(images(), generator(), 2, mirror=mirror)
    found = random_crop_flip_jitter(images(), generator(), 2, (0.0, 0.0, 0.0), 0.0, mirror, MEAN)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, plain.float(), rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"brightness": (1.0, 1.0)},
            r"must be 3 numbers of at least 0, one for each channel, but got \[1.0",
        ),
        ({"brightness": (1.0, -1.0, 1.0)}, "brightness must be 3 numbers of at least 0"),
        ({"contrast": 1.0}, r"contrast must lie in \[0, 1\), but got 1.0"),
        ({"contrast": -0.1}, r"contrast must lie in \[0, 1\), but got -0.1"),
        ({"mean": None}, "needs the mean of the pixels: take batches from TrainBatches"),
        ({"padding": 32}, "augment.padding must be at least 0 and below"),
    ],
)
def test_options_of_the_augmentation_that_cannot_be(changes, text):
    options = {"padding": 2, "brightness": (1.0, 1.0, 1.0), "contrast": 0.1, "mean": MEAN} | changes
    with pytest.raises(ConfigError, match=text):
        random_crop_flip_jitter(images(2), generator(), **options)


# Views


class Counting(nn.Module):
    """A linear model of images of 4x4 pixels that notes how many it has seen."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.linear = nn.Linear(48, 5)
        self.seen = []

    def forward(self, x):
        self.seen.append(len(x))
        return self.linear(x.flatten(1))


def test_views_are_of_the_least_confident_images_alone():
    x = torch.randn(20, 3, 4, 4, generator=generator())
    model = Counting()
    with torch.no_grad():
        one = model(x)
        found = six_views_where_unsure(model, x, 0.25)
        # A quarter of the 20.
        unsure = set(one.softmax(1).amax(1).argsort()[:5].tolist())
        padded = nn.functional.pad(x, (1, 1, 1, 1), mode="reflect")
        # The pixel at (0, 0) is now at (1, 1), and the other way round.
        moved = [
            x,
            padded[:, :, :4, :4],
            padded[:, :, 2:, 2:],
        ]
        six = sum(mirrored(model, view) for view in moved) / 3
    assert torch.equal(moved[1][:, :, 1:, 1:], x[:, :, :3, :3])
    for place in range(20):
        expected = six[place] if place in unsure else one[place]
        torch.testing.assert_close(found[place], expected)
    # All once, then six views of the five.
    assert model.seen[1:8] == [20] + 6 * [5]


# 0.8 of an image is none.
@pytest.mark.parametrize(("share", "passes"), [(0.0, [20]), (0.04, [20]), (1.0, 7 * [20])])
def test_a_share_of_none_and_of_all(share, passes):
    model = Counting()
    found = six_views_where_unsure(model, torch.randn(20, 3, 4, 4), share)
    assert model.seen == passes
    assert found.shape == (20, 5)


@pytest.mark.parametrize("share", [-0.1, 1.1, math.nan])
def test_a_share_that_cannot_be(share):
    with pytest.raises(ConfigError, match=r"share must lie in \[0, 1\], but got"):
        six_views_where_unsure(Counting(), torch.randn(2, 3, 4, 4), share)


# Muon that normalises seldom


def optimizer_of(parameters, **changes):
    options = {
        "momentum": 0.655,
        "nesterov": True,
        "steps": 3,
        "coefficients": COEFFICIENTS,
        "weight_decay": 0.05,
    }
    groups = [{"params": parameters, "orthogonalise": True}]
    return SeldomNormalisingMuon(groups, lr=0.2, total_steps=30, **(options | changes))


SHAPES = [(8, 4, 3, 3), (8, 4, 3, 3), (16, 8, 3, 3)]


def weights():
    drawn = generator(3)
    return [torch.randn(shape, generator=drawn) for shape in SHAPES]


def gradients(step):
    drawn = generator(100 + step)
    return [torch.randn(shape, generator=drawn) for shape in SHAPES]


def written_out(steps):
    """The weights by the description, one at a time, and the steps at which they were normalised."""
    a, b, c = COEFFICIENTS
    current = weights()
    last = 0
    at = []
    buffers = [torch.zeros_like(weight) for weight in current]
    for step in range(1, steps + 1):
        # Two steps at first, 17 at the end.
        due = step - last >= 2 + math.floor(15 * step / 30)
        if due:
            last = step
            at.append(step)
        for weight, buffer, gradient in zip(current, buffers, gradients(step), strict=True):
            buffer.mul_(0.655).add_(gradient)
            x = (gradient + 0.655 * buffer).flatten(1)
            x = x / x.norm()
            for _ in range(3):
                square = x @ x.T
                x = a * x + (b * square + c * square @ square) @ x
            if due:
                weight.mul_(len(weight) ** 0.5 / weight.norm())
            weight.sub_(0.2 * x.view(weight.shape)).mul_(1 - 0.2 * 0.05)
    return current, at


def take(optimizer, parameters, steps):
    for step in steps:
        for parameter, gradient in zip(parameters, gradients(step), strict=True):
            parameter.grad = gradient
        optimizer.step()


def test_weights_are_normalised_at_intervals_that_grow():
    expected, at = written_out(30)
    assert at == [3, 9, 21]
    parameters = list(map(nn.Parameter, weights()))
    take(optimizer_of(parameters), parameters, range(1, 31))
    for parameter, weight in zip(parameters, expected, strict=True):
        torch.testing.assert_close(parameter.detach(), weight, rtol=1e-4, atol=1e-5)


def test_a_checkpoint_has_when_weights_were_normalised():
    through = list(map(nn.Parameter, weights()))
    stopped = list(map(nn.Parameter, weights()))
    resumed = list(map(nn.Parameter, weights()))
    take(optimizer_of(through), through, range(1, 21))
    first = optimizer_of(stopped)
    second = optimizer_of(resumed)
    take(first, stopped, range(1, 9))
    with torch.no_grad():
        for parameter, weight in zip(resumed, stopped, strict=True):
            parameter.copy_(weight)
    second.load_state_dict(first.state_dict())
    take(second, resumed, range(9, 21))
    for parameter, weight in zip(resumed, through, strict=True):
        assert torch.equal(parameter, weight)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (partial(SeldomNormalisingMuon, total_steps=0), "needs at least one step, but got 0"),
        (
            partial(SeldomNormalisingMuon, total_steps=5, coefficients=(1.0, 2.0)),
            r"three coefficients, but got \[1.0",
        ),
    ],
)
def test_options_of_the_optimizer_that_cannot_be(make, text):
    options = {"lr": 0.1, "momentum": 0.5, "nesterov": True, "steps": 3, "orthogonalise": True}
    with pytest.raises(ConfigError, match=text):
        make([nn.Parameter(torch.ones(2, 2))], **options)
