import copy

import pytest
import torch
from torch import nn

from bstune.core.errors import ConfigError
from bstune.workloads.layers import BatchNorm

CHANNELS = 5
FORMATS = (torch.contiguous_format, torch.channels_last)


def images(n, height=3, width=4, dtype=torch.float32, memory=torch.contiguous_format, seed=0):
    generator = torch.Generator().manual_seed(seed)
    values = 2.0 * torch.randn(n, CHANNELS, height, width, generator=generator) + torch.arange(CHANNELS).view(-1, 1, 1)
    return values.to(dtype).contiguous(memory_format=memory)


def filled(layer, seed=1):
    """Give a layer parameters and statistics that are not where it starts."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in (*layer.parameters(), layer.running_mean, layer.running_var):
            tensor.copy_(torch.rand(CHANNELS, generator=generator) + 0.5)
    return layer


def gradients(layer, x, weights):
    """Return output, gradient of the input and of the parameters for the loss sum(weights * output)."""
    x = x.detach().requires_grad_()
    output = layer(x)
    (output * weights).sum().backward()
    return output.detach(), x.grad, {name: parameter.grad for name, parameter in layer.named_parameters()}


def groups_of(n, size):
    """Return which examples are in which group, as the class says, from its words alone."""
    if n <= size:
        return [list(range(n))]
    count = n // size
    groups = [[i for i in range(count * size) if i % count == group] for group in range(count)]
    rest = list(range(count * size, n))
    return groups + ([rest] if rest else [])


def by_a_loop(layer, x, weights, groups):
    """Return what ``layer`` should give: torch's layer on each group by itself, in float64."""
    n = len(x)
    x = x.detach().double().requires_grad_()
    output = torch.zeros_like(x)
    reference = nn.BatchNorm2d(CHANNELS, eps=layer.eps, momentum=1.0).double()
    with torch.no_grad():
        reference.weight.copy_(layer.weight)
        reference.bias.copy_(layer.bias)
    mean, var = 0.0, 0.0
    for group in groups:
        output[group] = reference(x[group])
        mean, var = mean + reference.running_mean * len(group) / n, var + reference.running_var * len(group) / n
    (output * weights.double()).sum().backward()
    m = layer.momentum
    running = (layer.running_mean.double() * (1 - m) + m * mean, layer.running_var.double() * (1 - m) + m * var)
    return output.detach(), x.grad, {"weight": reference.weight.grad, "bias": reference.bias.grad}, running


@pytest.mark.parametrize("memory", FORMATS)
@pytest.mark.parametrize("scale", [None, 0.25])
@pytest.mark.parametrize(
    ("n", "size"), [(12, 4), (13, 4), (15, 4), (7, 4), (5, 4), (4, 4), (3, 4), (2, 100), (9, 1), (9, 2), (64, 32)]
)
def test_it_is_torchs_layer_on_each_group(n, size, scale, memory):
    layer = filled(BatchNorm(CHANNELS, ghost_size=size, scale=scale, momentum=0.3, eps=0.01))
    assert torch.equal(layer.weight, torch.full((CHANNELS,), 0.25)) == (scale is not None)
    x, weights = images(n, memory=memory), images(n, seed=7)
    output, of_input, of_parameters, running = by_a_loop(layer, x, weights, groups_of(n, size))
    got, got_input, got_parameters = gradients(layer, x, weights)
    torch.testing.assert_close(got, output.float(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got_input, of_input.float(), rtol=1e-4, atol=1e-5)
    assert set(got_parameters) == ({"weight", "bias"} if scale is None else {"bias"})
    for name, gradient in got_parameters.items():
        torch.testing.assert_close(gradient, of_parameters[name].float(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(layer.running_mean, running[0].float())
    torch.testing.assert_close(layer.running_var, running[1].float())
    assert got.is_contiguous(memory_format=memory)
    assert got_input.is_contiguous(memory_format=memory)


@pytest.mark.parametrize("n", [12, 13])
def test_the_gradients_of_channels_last_images_are_those_of_finite_differences(n):
    layer = filled(BatchNorm(CHANNELS, ghost_size=4)).double()
    x = images(n, 2, 2, torch.float64, torch.channels_last).requires_grad_()

    def apart(x):
        return copy.deepcopy(layer)(x)  # the running statistics are not to move between its calls

    assert torch.autograd.gradcheck(apart, (x,), fast_mode=True)


@pytest.mark.parametrize(
    ("n", "groups"),
    [
        (9, [[0, 1, 2, 3], [4, 5, 6, 7, 8]]),  # 4, 4, 1: the last two are joined
        (5, [[0, 1, 2, 3, 4]]),  # 4, 1
        (10, [[0, 2, 4, 6], [1, 3, 5, 7], [8, 9]]),
        (13, [[0, 2, 4, 6], [1, 3, 5, 7], [8, 9, 10, 11, 12]]),
    ],
)
@pytest.mark.parametrize("memory", FORMATS)
def test_a_last_group_of_one_value_is_joined_to_the_one_before(n, groups, memory):
    layer = filled(BatchNorm(CHANNELS, ghost_size=4))
    x, weights = images(n, 1, 1, memory=memory), images(n, 1, 1, seed=7)
    output, of_input, _, running = by_a_loop(layer, x, weights, groups)
    got, got_input, _ = gradients(layer, x, weights)
    torch.testing.assert_close(got, output.float(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got_input, of_input.float(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(layer.running_var, running[1].float())


@pytest.mark.parametrize("size", [None, 8, 100])
@pytest.mark.parametrize("memory", FORMATS)
def test_without_options_or_in_one_group_it_is_torchs_layer_to_the_bit(size, memory):
    ours, torchs = filled(BatchNorm(CHANNELS, ghost_size=size)), filled(nn.BatchNorm2d(CHANNELS))
    assert list(ours.state_dict()) == list(torchs.state_dict())
    for step in range(3):
        x, weights = images(8, memory=memory, seed=step), images(8, seed=7)
        mine, its = gradients(ours, x, weights), gradients(torchs, x, weights)
        assert torch.equal(mine[0], its[0])
        assert torch.equal(mine[1], its[1])
        assert all(torch.equal(gradient, its[2][name]) for name, gradient in mine[2].items())
        assert all(torch.equal(value, torchs.state_dict()[name]) for name, value in ours.state_dict().items())
    assert torch.equal(ours.eval()(x), torchs.eval()(x))


def test_evaluation_uses_the_running_statistics_alone():
    layer = filled(BatchNorm(CHANNELS, ghost_size=4, scale=0.5)).eval()
    before = copy.deepcopy(layer.state_dict())
    x = images(13)
    by_channel = [value.view(-1, 1, 1) for value in (layer.running_mean, layer.running_var, layer.bias)]
    expected = 0.5 * (x - by_channel[0]) / (by_channel[1] + layer.eps).sqrt() + by_channel[2]
    torch.testing.assert_close(layer(x), expected)
    assert all(torch.equal(value, before[name]) for name, value in layer.state_dict().items())


def test_groups_are_normalised_apart_from_one_another():
    """What ghost batches are for: another group's examples do not matter."""
    layer = BatchNorm(CHANNELS, ghost_size=4)
    x = images(8)
    changed = x.clone()
    changed[1::2] += 100.0 * images(4, seed=3)
    assert torch.equal(layer(x)[::2], layer(changed)[::2])
    assert not torch.allclose(layer(x)[1::2], layer(changed)[1::2])


@pytest.mark.parametrize("memory", FORMATS)
@pytest.mark.parametrize("n", [12, 13])
@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
def test_it_stays_in_float32_when_the_network_is_cast(kind, n, memory):
    layer = filled(BatchNorm(CHANNELS, ghost_size=4))
    network = nn.Sequential(copy.deepcopy(layer), nn.Conv2d(CHANNELS, 1, 1)).to(kind)
    assert network[1].weight.dtype == kind
    cast = network[0]
    for name, value in cast.state_dict().items():
        assert torch.equal(value, layer.state_dict()[name])
        assert value.dtype == layer.state_dict()[name].dtype
    x, weights = images(n, dtype=kind, memory=memory), images(n, seed=7)
    # What is known of the images is what is left of them in few bits; all else is as in float32.
    output, of_input, of_parameters = gradients(layer, x.float(), weights)
    got, got_input, got_parameters = gradients(cast, x, weights)
    assert (got.dtype, got_input.dtype) == (kind, kind)
    bits = torch.finfo(kind).eps
    torch.testing.assert_close(got.float(), output, rtol=bits, atol=bits)
    torch.testing.assert_close(got_input.float(), of_input, rtol=4 * bits, atol=8 * bits)
    torch.testing.assert_close(got_parameters["bias"], of_parameters["bias"], rtol=4 * bits, atol=8 * bits)
    torch.testing.assert_close(cast.running_var, layer.running_var)


def test_it_is_float32_in_a_network_that_is_built_in_half_precision():
    torch.set_default_dtype(torch.bfloat16)
    try:
        layer = BatchNorm(CHANNELS, ghost_size=4, scale=1.0)
        layer(images(13))
    finally:
        torch.set_default_dtype(torch.float32)
    kinds = {name: value.dtype for name, value in layer.state_dict().items() if value.is_floating_point()}
    assert set(kinds.values()) == {torch.float32}
    assert BatchNorm(CHANNELS).double().weight.dtype == torch.float64


@pytest.mark.parametrize("memory", FORMATS)
@pytest.mark.parametrize("n", [12, 14])
def test_compiled_it_gives_the_same(n, memory):
    torch.compiler.reset()
    eager = filled(BatchNorm(CHANNELS, ghost_size=4, scale=0.25))
    own = copy.deepcopy(eager)
    compiled = torch.compile(own, fullgraph=True)
    x, weights = images(n, memory=memory), images(n, seed=7)
    expected = gradients(eager, x, weights)
    x = x.detach().requires_grad_()
    output = compiled(x)
    (output * weights).sum().backward()
    torch.testing.assert_close(output.detach(), expected[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(x.grad, expected[1], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(own.bias.grad, expected[2]["bias"], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(own.running_mean, eager.running_mean)
    torch.testing.assert_close(own.running_var, eager.running_var)


@pytest.mark.parametrize("memory", FORMATS)
def test_an_activation_in_place_may_follow(memory):
    layers = [nn.Sequential(BatchNorm(CHANNELS, ghost_size=4), nn.ReLU(inplace=inplace)) for inplace in (True, False)]
    x, weights = images(8, memory=memory), images(8, seed=7)
    inplace, apart = (gradients(layer, x, weights) for layer in layers)
    assert torch.equal(inplace[0], apart[0])
    assert torch.equal(inplace[1], apart[1])


def test_a_frozen_scale_is_kept_and_not_learnt():
    layer = BatchNorm(CHANNELS, scale=0.25)
    assert [name for name, _ in layer.named_parameters()] == ["bias"]
    assert torch.equal(layer.state_dict()["weight"], torch.full((CHANNELS,), 0.25))
    layer.reset_parameters()
    assert torch.equal(layer.weight, torch.full((CHANNELS,), 0.25))
    assert "ghost_size=None, scale=0.25" in repr(layer)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"ghost_size": 0}, "the ghost size of batch normalisation must be a positive integer, but got 0"),
        ({"ghost_size": 2.5}, "the ghost size of batch normalisation must be a positive integer, but got 2.5"),
        ({"scale": 0.0}, "the frozen scale of batch normalisation must be positive, but got 0.0"),
        ({"scale": float("nan")}, "the frozen scale of batch normalisation must be positive, but got nan"),
    ],
)
def test_impossible_settings(options, text):
    with pytest.raises(ConfigError) as error:
        BatchNorm(CHANNELS, **options)
    assert str(error.value) == text


def test_single_values_and_other_shapes_are_refused_as_by_torch():
    with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
        BatchNorm(CHANNELS, ghost_size=1)(images(4, 1, 1))
    with pytest.raises(ValueError, match="expected 4D input"):
        BatchNorm(CHANNELS, ghost_size=1)(torch.zeros(4, CHANNELS))
