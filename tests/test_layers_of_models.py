"""Ghost batch normalisation, patch whitening, identity initialisation and views at test time."""

import copy
from functools import partial

import numpy as np
import pytest
import torch
from learners import Operators
from toolbox import data_root
from torch import nn

from bstune.core.errors import ConfigError
from bstune.workloads import layers
from bstune.workloads.datasets import load_cifar10
from bstune.workloads.images import ImageData
from bstune.workloads.layers import (
    BatchNorm,
    Whitening,
    dirac_init,
    mirrored,
    mirrored_and_shifted,
    patch_moments,
)

CHANNELS = 5
FORMATS = (torch.contiguous_format, torch.channels_last)
same = partial(torch.testing.assert_close, rtol=0, atol=0)


# Batch normalisation


def images(n, height=3, width=4, dtype=torch.float32, memory=torch.contiguous_format, seed=0):
    generator = torch.Generator().manual_seed(seed)
    # Each channel has a mean of its own, so that none is centred by chance.
    values = 2.0 * torch.randn(n, CHANNELS, height, width, generator=generator) + torch.arange(
        CHANNELS
    ).view(-1, 1, 1)
    return values.to(dtype).contiguous(memory_format=memory)


def filled(layer, seed=1):
    """Give a layer parameters and statistics that are not where it starts."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in (*layer.parameters(), layer.running_mean, layer.running_var):
            tensor.copy_(torch.rand(CHANNELS, generator=generator) + 0.5)
    return layer


def gradients(layer, x, weights):
    """Output, gradient of the input and of the parameters for the loss sum(weights * output)."""
    # Weights of the output make all gradients differ.
    x = x.detach().requires_grad_()
    output = layer(x)
    (output * weights).sum().backward()
    return (
        output.detach(),
        x.grad,
        {name: parameter.grad for name, parameter in layer.named_parameters()},
    )


def statistics(layer):
    return [layer.running_mean, layer.running_var]


def by_a_loop(layer, x, weights, groups):
    """The reference of ``layer``: torch's layer on each group by itself, in float64."""
    n = len(x)
    x = x.detach().double().requires_grad_()
    output = torch.zeros_like(x)
    reference = nn.BatchNorm2d(CHANNELS, eps=layer.eps, momentum=1.0).double()
    with torch.no_grad():
        reference.weight.copy_(layer.weight)
        reference.bias.copy_(layer.bias)
    # What torch's layer would have, a group at a time.
    running = [(1 - layer.momentum) * statistic.double() for statistic in statistics(layer)]
    for group in groups:
        output[group] = reference(x[group])
        for statistic, of_group in zip(running, statistics(reference), strict=True):
            statistic += layer.momentum * of_group * len(group) / n
    (output * weights.double()).sum().backward()
    of_parameters = {}
    for name, parameter in reference.named_parameters():
        of_parameters[name] = parameter.grad.float()
    return (
        output.detach().float(),
        x.grad.float(),
        of_parameters,
        [statistic.float() for statistic in running],
    )


@pytest.mark.parametrize("memory", FORMATS)
@pytest.mark.parametrize("scale", [None, 0.25])
@pytest.mark.parametrize(
    ("pixels", "size", "groups"),
    [
        # Groups take every third image, so that each has images from all over the batch.
        ((3, 4), 4, [range(0, 12, 3), range(1, 12, 3), range(2, 12, 3)]),
        ((3, 4), 4, [range(0, 12, 3), range(1, 12, 3), range(2, 12, 3), [12]]),
        # A batch that is no multiple of the ghost size in whole groups of four.
        ((3, 4), 4, [range(4), range(4, 7)]),
        ((3, 4), 4, [range(3)]),
        ((3, 4), 1, [[i] for i in range(9)]),
        ((3, 4), 32, [range(0, 64, 2), range(1, 64, 2)]),
        # Groups of 4, 4 and 1: a last group of one value is joined to the one before.
        (
            (1, 1),
            4,
            [[0, 1, 2, 3], [4, 5, 6, 7, 8]],
        ),
        ((1, 1), 4, [[0, 1, 2, 3, 4]]),
        ((1, 1), 4, [[0, 2, 4, 6], [1, 3, 5, 7], [8, 9]]),
        ((1, 1), 4, [[0, 2, 4, 6], [1, 3, 5, 7], [8, 9, 10, 11, 12]]),
    ],
)
def test_it_is_torchs_layer_on_each_group(pixels, size, groups, scale, memory):
    n = sum(map(len, groups))
    layer = filled(BatchNorm(CHANNELS, ghost_size=size, scale=scale, momentum=0.3, eps=0.01))
    assert torch.equal(layer.weight, torch.full((CHANNELS,), 0.25)) == (scale is not None)
    x = images(n, *pixels, memory=memory)
    weights = images(n, *pixels, seed=7)
    output, of_input, of_parameters, running = by_a_loop(layer, x, weights, groups)
    got, got_input, got_parameters = gradients(layer, x, weights)
    torch.testing.assert_close(got, output, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got_input, of_input, rtol=1e-4, atol=1e-5)
    if scale is not None:
        del of_parameters["weight"]
    torch.testing.assert_close(got_parameters, of_parameters, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(statistics(layer), running)
    assert got.is_contiguous(memory_format=memory)
    assert got_input.is_contiguous(memory_format=memory)


@pytest.mark.parametrize("size", [None, 8, 100])
@pytest.mark.parametrize("memory", FORMATS)
def test_without_options_or_in_one_group_it_is_torchs_layer_to_the_bit(size, memory):
    ours = filled(BatchNorm(CHANNELS, ghost_size=size))
    torchs = filled(nn.BatchNorm2d(CHANNELS))
    assert list(ours.state_dict()) == list(torchs.state_dict())
    # Three steps, whose running statistics add up.
    for step in range(3):
        x = images(8, memory=memory, seed=step)
        weights = images(8, seed=7)
        same(gradients(ours, x, weights), gradients(torchs, x, weights))
    x = images(20, memory=memory)
    # In evaluation it goes by the running statistics, whatever the group size.
    same(ours.eval()(x), torchs.eval()(x))
    same(ours.state_dict(), torchs.state_dict())


@pytest.mark.parametrize("memory", FORMATS)
@pytest.mark.parametrize("n", [12, 13])
@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
def test_it_stays_in_float32_when_the_network_is_cast(kind, n, memory):
    layer = filled(BatchNorm(CHANNELS, ghost_size=4))
    network = nn.Sequential(copy.deepcopy(layer), nn.Conv2d(CHANNELS, 1, 1)).to(kind)
    assert network[1].weight.dtype == kind
    cast = network[0]
    same(cast.state_dict(), layer.state_dict())
    x = images(n, dtype=kind, memory=memory)
    weights = images(n, seed=7)
    # The images have few bits; all else is as in float32.
    output, of_input, of_parameters = gradients(layer, x.float(), weights)
    got, got_input, got_parameters = gradients(cast, x, weights)
    assert (got.dtype, got_input.dtype) == (kind, kind)
    # The distance between 1 and the next number of the type.
    bits = torch.finfo(kind).eps
    torch.testing.assert_close(got.float(), output, rtol=bits, atol=bits)
    torch.testing.assert_close(got_input.float(), of_input, rtol=4 * bits, atol=8 * bits)
    torch.testing.assert_close(
        got_parameters["bias"], of_parameters["bias"], rtol=4 * bits, atol=8 * bits
    )
    torch.testing.assert_close(cast.running_var, layer.running_var)
    torch.set_default_dtype(kind)
    try:
        built = BatchNorm(CHANNELS, ghost_size=4, scale=1.0)
    finally:
        torch.set_default_dtype(torch.float32)
    for value in built.state_dict().values():
        assert value.dtype == torch.float32 or not value.is_floating_point()


@pytest.mark.parametrize(
    # So many operators as it has now: one more is a launch more in each step.
    ("memory", "most"),
    [(torch.contiguous_format, 9), (torch.channels_last, 13)],
)
def test_ghost_groups_take_few_operators(memory, most):
    """An accelerator's time of a short step is that of launching them."""
    layer = filled(BatchNorm(CHANNELS, ghost_size=4, scale=1.0))
    x = images(32, memory=memory).requires_grad_()
    weights = images(32, memory=memory, seed=7)
    with Operators() as operators:
        layer(x).backward(weights)
    assert len(operators.names) <= most, operators.names


# A compilation takes two seconds, so CI has each number and each format once.
@pytest.mark.parametrize(
    ("n", "memory"),
    [
        pytest.param(12, torch.contiguous_format, marks=pytest.mark.slow),
        pytest.param(14, torch.channels_last, marks=pytest.mark.slow),
        pytest.param(12, torch.channels_last, marks=pytest.mark.soak),
        pytest.param(14, torch.contiguous_format, marks=pytest.mark.soak),
    ],
)
def test_compiled_it_gives_the_same(n, memory):
    torch.compiler.reset()
    eager = filled(BatchNorm(CHANNELS, ghost_size=4, scale=0.25))
    own = copy.deepcopy(eager)
    x = images(n, memory=memory)
    weights = images(n, seed=7)
    expected = gradients(eager, x, weights)
    got = gradients(torch.compile(own, fullgraph=True), x, weights)
    torch.testing.assert_close(got[0], expected[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got[1], expected[1], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(own.bias.grad, eager.bias.grad, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(statistics(own), statistics(eager))


# It overwrites the output, which the backward pass must not need.
@pytest.mark.parametrize("memory", FORMATS)
def test_an_activation_in_place_may_follow(memory):
    in_place = nn.Sequential(BatchNorm(CHANNELS, ghost_size=4), nn.ReLU(inplace=True))
    copying = nn.Sequential(BatchNorm(CHANNELS, ghost_size=4), nn.ReLU(inplace=False))
    x = images(8, memory=memory)
    weights = images(8, seed=7)
    same(gradients(in_place, x, weights)[:2], gradients(copying, x, weights)[:2])


# Whitening

PAGE = {"kernel_size": 3, "eps": 1e-2, "images": 60, "signed": False, "bias": False, "padding": 1}
AIRBENCH = {"kernel_size": 2, "eps": 5e-4, "images": 60, "signed": True, "bias": True, "padding": 0}


def correlated(n=60, channels=3, height=9, width=7, seed=0):
    """Images whose pixels go with their neighbours and channels with one another."""
    generator = torch.Generator().manual_seed(seed)
    smooth = nn.functional.avg_pool2d(
        # A mean over neighbours, and one over the channels.
        torch.randn(n, channels, height + 2, width + 2, generator=generator),
        3,
        1,
    )
    return 3.0 * (smooth + smooth.mean(dim=1, keepdim=True)) + 0.1


def moments_after(layer, x):
    """The second moments of what a layer makes of images, and the eigenvalues before it."""
    layer.initialise_from(x)
    rows = layer(x).detach().permute(0, 2, 3, 1).reshape(-1, layer.out_channels).double()
    return rows.T @ rows / len(rows), patch_moments(x, layer.kernel_size)[0]


@pytest.mark.parametrize(
    ("k", "channels", "eps", "chunk"),
    [(1, 3, 1e-2, 7), (2, 3, 1e-2, 1000), (3, 3, 5e-4, 7), (2, 1, 5e-4, 7)],
)
def test_whitened_patches_have_the_moments_of_the_closed_form(k, channels, eps, chunk, monkeypatch):
    """With W = diag(1/sqrt(L + eps)) V' and moments V diag(L) V', those of W x are diag(L/(L + eps))."""
    # In chunks, as many images would not fit into memory: 7 leaves a smaller last one.
    monkeypatch.setattr(layers, "CHUNK_OF_IMAGES", chunk)
    x = correlated(channels=channels)
    layer = Whitening(
        kernel_size=k, eps=eps, images=60, signed=False, bias=False, padding=0, channels=channels
    )
    moments, values = moments_after(layer, x)
    torch.testing.assert_close(moments, torch.diag(values / (values + eps)), rtol=1e-4, atol=1e-4)
    assert (values.diff() <= 0).all()
    torch.testing.assert_close(
        patch_moments(x.contiguous(memory_format=torch.channels_last), k)[0], values
    )
    # bfloat16 has three digits.
    torch.testing.assert_close(patch_moments(x.bfloat16(), k)[0], values, rtol=0.05, atol=0.01)


# On made images the moments are those of the closed form, above.
@pytest.mark.parametrize(
    "source",
    [
        pytest.param(PAGE, marks=pytest.mark.soak),
        pytest.param(AIRBENCH, marks=pytest.mark.slow),
    ],
)
def test_on_real_images_all_but_the_faintest_directions_come_out_alike(source):
    load = partial(load_cifar10, root=data_root("cifar-10-batches-bin"))
    data = ImageData(load=load, device="cpu", validation="test", split_seed=0, eval_batch_size=1000)
    layer = Whitening(**{**source, "images": 2000, "padding": 0})
    moments, values = moments_after(layer, data.first_images(2000))
    own = len(values)
    # Before the layer the directions are far from alike.
    assert values[0] > 100 * values[-1]
    torch.testing.assert_close(
        moments[:own, :own], torch.diag(values / (values + layer.eps)), rtol=1e-3, atol=1e-3
    )
    large = values > 20 * layer.eps
    assert large.sum() >= 5
    assert (moments.diagonal()[:own][large] - 1.0).abs().max() < 0.05
    if layer.signed:
        torch.testing.assert_close(moments[:own, own:], -moments[:own, :own])


@pytest.mark.parametrize(
    # 9 pixels x 3 channels are 27 filters; 4 x 3 = 12, and their negatives.
    ("source", "channels", "size"),
    [(PAGE, 27, (9, 7)), (AIRBENCH, 24, (8, 6))],
)
def test_the_sources_layers(source, channels, size):
    before = torch.get_rng_state()
    layer = Whitening(**source)
    x = correlated()
    layer.initialise_from(x)
    assert torch.equal(torch.get_rng_state(), before)
    output = layer(x)
    assert output.shape == (60, layer.out_channels, *size) == (60, channels, *size)
    assert [name for name, _ in layer.named_parameters()] == ["bias"] * source["bias"]
    assert output.requires_grad == source["bias"]
    if source["signed"]:
        # The second half are the negatives of the first.
        torch.testing.assert_close(output[:, 12:], -output[:, :12])


def test_only_the_first_images_count_and_constant_ones_stay_finite():
    x = correlated()
    initialised = []
    for given in (x[:20], torch.cat([x[:20], 0 * x[20:]]), torch.ones_like(x)):
        layer = Whitening(**{**PAGE, "images": 20})
        layer.initialise_from(given)
        initialised.append(layer.weight)
    few, with_zeros, constant = initialised
    assert torch.equal(few, with_zeros)
    assert constant.isfinite().all()


def test_the_filters_go_with_the_state_and_with_copies():
    layer = Whitening(**AIRBENCH)
    x = correlated()
    layer.initialise_from(x)
    loaded = Whitening(**AIRBENCH)
    loaded.load_state_dict(layer.state_dict())
    assert torch.equal(loaded(x), layer(x))
    assert torch.equal(copy.deepcopy(layer)(x), layer(x))
    network = nn.Sequential(Whitening(**AIRBENCH), nn.GELU()).to(
        torch.bfloat16, memory_format=torch.channels_last
    )
    network[0].initialise_from(x)
    assert network[0].weight.dtype == torch.bfloat16
    assert network[0].weight.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(network[0].weight, layer.weight.bfloat16())


# Convolutions that start as the identity


@pytest.mark.parametrize("kernel_size", [1, 3])
@pytest.mark.parametrize(("inputs", "outputs"), [(4, 4), (4, 9), (6, 3)])
def test_a_convolution_passes_its_input_on_and_other_layers_stay_as_they_were(
    inputs, outputs, kernel_size
):
    layer = nn.Conv2d(inputs, outputs, kernel_size, padding=kernel_size // 2, bias=False)
    others = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 2))
    # A frozen layer must stay frozen.
    others[0].weight.requires_grad_(False)
    drawn, before = copy.deepcopy((layer.weight, others.state_dict()))
    dirac_init(nn.Sequential(layer, nn.ReLU(), others))
    x = torch.randn(2, inputs, 5, 6)
    # As many channels as there are on both sides.
    passed = min(inputs, outputs)
    assert torch.equal(layer(x)[:, :passed], x[:, :passed])
    assert torch.equal(layer.weight[inputs:], drawn[inputs:])
    assert layer.weight.requires_grad
    same(others.state_dict(), before)


# Views at test time


def moved(x, by):
    """Images moved down and to the right by ``by`` pixels; what comes in is the reflection."""

    def index(size):
        places = np.abs(np.arange(size) - by)
        # Beyond the last pixel the image is reflected, too.
        return np.where(places < size, places, 2 * (size - 1) - places)

    return x[:, :, index(x.shape[2])][:, :, :, index(x.shape[3])]


@pytest.mark.parametrize(
    ("views", "moves"),
    # The weights of all views, each mirrored too, add up to 1.
    [(mirrored, [(0.5, 0)]), (mirrored_and_shifted, [(0.25, 0), (0.125, 1), (0.125, -1)])],
)
def test_logits_are_the_weighted_mean_over_the_views(views, moves):
    x = torch.randn(4, 2, 5, 6, generator=torch.Generator().manual_seed(0))
    seen = []

    def model(images):
        seen.append(images)
        # The row differs in all views, and the weights of the views do not enter linearly.
        return images[:, 0, 1].exp()

    expected = []
    mean = 0.0
    for weight, by in moves:
        for view in (moved(x, by), moved(x, by).flip(-1)):
            expected.append(tuple(view.flatten().tolist()))
            mean += weight * view[:, 0, 1].exp()
    torch.testing.assert_close(views(model, x), mean)
    assert {tuple(view.flatten().tolist()) for view in seen} == set(expected)


# Bad input

GHOST = BatchNorm(CHANNELS, ghost_size=4)
SIDES = r"whitening needs images of 3 channel\(s\) and at least 3 pixels a side, but got the shape "
VIEWED = (
    r"test_time mirrors images \(N, C, H, W\), but got the shape \(7, 5\): set "
    r"workload\.module\.test_time=null"
)


def whitened(*shape):
    return lambda: Whitening(**PAGE).initialise_from(torch.zeros(shape))


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            partial(BatchNorm, CHANNELS, ghost_size=2.5),
            "normalisation must be a positive integer, but got 2.5",
        ),
        (
            partial(BatchNorm, CHANNELS, scale=0.0),
            "scale of batch normalisation must be positive, but got 0.0",
        ),
        (
            partial(BatchNorm, CHANNELS, scale=np.nan),
            "scale of batch normalisation must be positive, but got nan",
        ),
        (
            partial(GHOST.check_batch, 3, None),
            r"ghost size 4 is over the batch size 3: lower workload\.module\.model\.",
        ),
        (partial(GHOST.check_batch, 8, 3), "ghost size 4 is over the micro-batch size 3: lower"),
        (
            lambda: Whitening(**PAGE | {"kernel_size": 0}),
            r"whitening\.kernel_size must be a positive integer, but",
        ),
        (
            lambda: Whitening(**PAGE | {"eps": 0.0}),
            r"whitening\.eps must be positive, but got 0\.0",
        ),
        (
            lambda: Whitening(**PAGE | {"padding": -1}),
            r"whitening\.padding must be at least 0, but got -1",
        ),
        (whitened(60, 1, 9, 9), SIDES),
        (whitened(60, 3, 2, 9), SIDES + r"\(60, 3, 2, 9\)"),
        (whitened(60, 4), SIDES + r"\(60, 4\)"),
        (
            whitened(59, 3, 9, 9),
            "takes its statistics from 60 images, but there are 59: lower whitening.images",
        ),
        (
            lambda: Whitening(**PAGE)(correlated()),
            "the whitening has no filters yet: call initialise_from with train",
        ),
        (lambda: mirrored(nn.Linear(5, 3), torch.zeros(7, 5)), VIEWED),
        (lambda: mirrored_and_shifted(nn.Linear(5, 3), torch.zeros(7, 5)), VIEWED),
    ],
)
def test_refuses(call, text):
    # Neither of these is too small.
    for sizes in ((4, None), (100, 4)):
        GHOST.check_batch(*sizes)
    with pytest.raises(ConfigError, match=text):
        call()
