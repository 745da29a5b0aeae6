import copy
import os
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from bstune.core.errors import ConfigError
from bstune.workloads import layers as whitening
from bstune.workloads.datasets import load_cifar10
from bstune.workloads.images import ImageData
from bstune.workloads.layers import Whitening, patch_moments

PAGE = {"kernel_size": 3, "eps": 1e-2, "images": 60, "signed": False, "bias": False, "padding": 1}
AIRBENCH = {"kernel_size": 2, "eps": 5e-4, "images": 60, "signed": True, "bias": True, "padding": 0}


def correlated(n=60, channels=3, height=9, width=7, seed=0):
    """Return images whose pixels go with their neighbours and channels with one another."""
    generator = torch.Generator().manual_seed(seed)
    smooth = nn.functional.avg_pool2d(torch.randn(n, channels, height + 2, width + 2, generator=generator), 3, 1)
    return 3.0 * (smooth + smooth.mean(dim=1, keepdim=True)) + 0.1


def patches_of(images, k):
    """Return all patches (n, C k k) in the plainest way."""
    array = images.double().numpy()
    _, _, height, width = array.shape
    cut = [array[:, :, y : y + k, x : x + k] for y in range(height - k + 1) for x in range(width - k + 1)]
    return np.concatenate([piece.reshape(len(array), -1) for piece in cut])


@pytest.mark.parametrize("chunk", [7, 1000])
@pytest.mark.parametrize(("k", "channels"), [(1, 3), (2, 3), (3, 3), (2, 1)])
def test_moments_are_numpys(k, channels, chunk, monkeypatch):
    monkeypatch.setattr(whitening, "CHUNK", chunk)
    images = correlated(channels=channels)
    values, vectors = patch_moments(images, k)
    rows = patches_of(images, k)
    moments = rows.T @ rows / len(rows)
    expected, basis = np.linalg.eigh(moments)
    np.testing.assert_allclose(values.numpy(), expected[::-1], rtol=1e-8, atol=1e-12)
    flat = vectors.flatten(1).numpy()
    np.testing.assert_allclose(np.abs(flat @ basis[:, ::-1]), np.eye(len(flat)), atol=1e-5)  # the signs are anyone's
    assert vectors.shape == (channels * k * k, channels, k, k)


def test_the_images_may_be_of_any_kind_and_layout():
    images = correlated()
    expected = patch_moments(images, 2)[0]
    assert torch.equal(patch_moments(images.contiguous(memory_format=torch.channels_last), 2)[0], expected)
    torch.testing.assert_close(patch_moments(images.bfloat16(), 2)[0], expected, rtol=0.05, atol=0.01)


@pytest.mark.parametrize("k", [2, 3])
@pytest.mark.parametrize("eps", [1e-2, 5e-4])
def test_whitened_patches_have_the_moments_of_the_closed_form(k, eps):
    """With W = diag(1/sqrt(L + eps)) V' and moments V diag(L) V', those of W x are diag(L/(L + eps))."""
    images = correlated()
    values, _ = patch_moments(images, k)
    layer = Whitening(kernel_size=k, eps=eps, images=60, signed=False, bias=False, padding=0)
    layer.initialise_from(images)
    rows = layer(images).permute(0, 2, 3, 1).reshape(-1, layer.out_channels).double()
    moments = rows.T @ rows / len(rows)
    torch.testing.assert_close(moments, torch.diag(values / (values + eps)), rtol=1e-4, atol=1e-4)


DATA = os.environ.get("BSTUNE_DATA")


@pytest.mark.skipif(
    DATA is None or not (Path(DATA) / "cifar-10-batches-bin").exists(), reason="CIFAR-10 is not at hand (BSTUNE_DATA)"
)
@pytest.mark.parametrize("source", [PAGE, AIRBENCH])
def test_on_real_images_all_but_the_faintest_directions_come_out_alike(source):
    data = ImageData(
        load=partial(load_cifar10, root=DATA), device="cpu", validation="test", split_seed=0, eval_batch_size=1000
    )
    images = data.first_images(2000)
    assert (images.dtype, images.shape) == (torch.float32, (2000, 3, 32, 32))
    layer = Whitening(**{**source, "images": 2000, "padding": 0})
    layer.initialise_from(images)
    with torch.no_grad():
        rows = layer(images).permute(0, 2, 3, 1).reshape(-1, layer.out_channels).double()
    own = layer.channels * layer.kernel_size**2
    moments = rows.T @ rows / len(rows)
    values, _ = patch_moments(images, layer.kernel_size)
    assert values[0] > 100 * values[-1]  # they are far from alike before it
    assert own in (12, 27)
    torch.testing.assert_close(moments[:own, :own], torch.diag(values / (values + layer.eps)), rtol=1e-3, atol=1e-3)
    large = values > 20 * layer.eps
    assert large.sum() >= 5
    assert (moments.diagonal()[:own][large] - 1.0).abs().max() < 0.05
    if layer.signed:
        torch.testing.assert_close(moments[:own, own:], -moments[:own, :own])


@pytest.mark.parametrize(("source", "channels", "size"), [(PAGE, 27, (9, 7)), (AIRBENCH, 24, (8, 6))])
def test_the_sources_layers(source, channels, size):
    layer = Whitening(**source)
    images = correlated()
    layer.initialise_from(images)
    output = layer(images)
    assert output.shape == (60, channels, *size)
    assert layer.out_channels == channels
    assert [name for name, _ in layer.named_parameters()] == (["bias"] if source["bias"] else [])
    if source["signed"]:
        torch.testing.assert_close(output[:, 12:], -output[:, :12])
        output.sum().backward()
        assert layer.bias.grad is not None
    else:
        assert not output.requires_grad


def test_directions_without_any_variation_stay_finite():
    layer = Whitening(**{**PAGE, "images": 2})
    layer.initialise_from(torch.ones(2, 3, 8, 8))
    assert layer.weight.isfinite().all()


def test_only_the_first_images_count():
    images = correlated()
    layers = [Whitening(**{**PAGE, "images": 20}) for _ in range(3)]
    changed = images.clone()
    changed[20:] = 0.0
    for layer, given in zip(layers, (images, images[:20], changed), strict=True):
        layer.initialise_from(given)
    assert torch.equal(layers[0].weight, layers[1].weight)
    assert torch.equal(layers[0].weight, layers[2].weight)


def test_the_filters_go_with_the_state_and_with_copies():
    layer, images = Whitening(**AIRBENCH), correlated()
    with pytest.raises(ConfigError, match="the whitening has no filters yet: call initialise_from with training"):
        layer(images)
    layer.initialise_from(images)
    loaded = Whitening(**AIRBENCH)
    loaded.load_state_dict(layer.state_dict())
    assert torch.equal(loaded(images), layer(images))
    assert torch.equal(copy.deepcopy(layer)(images), layer(images))
    network = nn.Sequential(Whitening(**AIRBENCH), nn.GELU()).to(torch.bfloat16, memory_format=torch.channels_last)
    network[0].initialise_from(images)
    assert network[0].weight.dtype == torch.bfloat16
    assert network[0].weight.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(network[0].weight, layer.weight.bfloat16())


def test_no_random_number_is_drawn():
    before = torch.get_rng_state()
    layer = Whitening(**AIRBENCH)
    layer.initialise_from(correlated())
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("images", "text"),
    [
        (torch.zeros(60, 1, 9, 9), r"whitening needs images of 3 channel\(s\) and at least 3 pixels a side, but got"),
        (torch.zeros(60, 3, 2, 9), r"at least 3 pixels a side, but got the shape \(60, 3, 2, 9\)"),
        (torch.zeros(60, 4), r"but got the shape \(60, 4\)"),
        (torch.zeros(59, 3, 9, 9), "takes its statistics from 60 images, but there are 59: lower whitening.images"),
    ],
)
def test_images_that_cannot_be_whitened(images, text):
    with pytest.raises(ConfigError, match=text):
        Whitening(**PAGE).initialise_from(images)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"kernel_size": 0}, r"whitening\.kernel_size must be a positive integer, but got 0"),
        ({"images": -1}, r"whitening\.images must be a positive integer, but got -1"),
        ({"eps": 0.0}, r"whitening\.eps must be positive, but got 0\.0"),
        ({"padding": -1}, r"whitening\.padding must be at least 0, but got -1"),
    ],
)
def test_impossible_settings(options, text):
    with pytest.raises(ConfigError, match=text):
        Whitening(**(PAGE | options))
