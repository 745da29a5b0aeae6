"""The device's limits, a step's FLOPs and bytes against closed forms, what the limits allow, and alignment."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from bstune.core.errors import HardwareError
from bstune.hardware import roofline
from bstune.hardware.known_devices import predictions
from bstune.hardware.roofline import (
    Achieved,
    AffineCost,
    DeviceLimits,
    LayerCost,
    StepCost,
    arithmetic_of,
    intensity,
    step_cost,
)
from bstune.hardware.timing import _best_rate, measure_limits
from bstune.workloads.classifier import Classifier
from bstune.workloads.layers import BatchNorm
from bstune.workloads.models import mlp, simple_cnn
from bstune.workloads.resnet9 import ResNet9
from tests.toolbox import FakeTime, make_survey

CPU = torch.device("cpu")
# The ridge is 100/10 = 10 operations a byte.
LIMITS = DeviceLimits("fp16", 100.0, 10.0, misaligned_flops_per_second=50.0)
NOTHING = AffineCost(0.0, 0.0)
BATCH_NORM = partial(BatchNorm, ghost_size=2)
RESNET9 = ResNet9(
    10,
    8,
    0.125,
    pool="before_norm",
    activation=nn.CELU,
    norm=BATCH_NORM,
    whitening=None,
    identity_init=False,
)


class Calls(nn.Module):
    """Calls its parts as a function says."""

    def __init__(self, call, **parts):
        super().__init__()
        self.call = call
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x):
        return self.call(self, x)


def linear(inputs=4, outputs=4):
    return nn.Linear(inputs, outputs, bias=False)


def cost_of(module, shape, arithmetic="fp32", batch_sizes=(2, 4), needs_gradient=False, loss=None):
    return step_cost(
        module,
        lambda size: torch.randn(size, *shape, requires_grad=needs_gradient),
        loss or (lambda model, batch: model(batch).sum()),
        arithmetic,
        batch_sizes,
    )


def layer(flops, moved, **changes):
    return LayerCost("l", "Linear", flops, moved, NOTHING, NOTHING, **changes)


def step(*layers):
    return StepCost(layers, ())


@pytest.mark.parametrize(
    ("arithmetic", "width", "needs_gradient"),
    [
        ("fp64", 8, True),
        ("fp32", 4, False),
        ("tf32", 4, True),
        ("bf16", 2, False),
        ("fp16", 2, True),
    ],
)
def test_linear(arithmetic, width, needs_gradient):
    inputs = 12
    outputs = 5
    cost = cost_of(nn.Linear(inputs, outputs), (inputs,), arithmetic, needs_gradient=needs_gradient)
    (only,) = cost.layers
    product = 2 * inputs * outputs
    weights = inputs * outputs + outputs
    # 2 B in out forward, 4 B in out backward: the first layer of a network has no gradient of its
    # input to compute
    assert only.flops == AffineCost(0, product * (3 if needs_gradient else 2))
    # x forward, x and dx backward; y and dy; w forward, w and dw backward
    assert only.inputs == AffineCost(0, inputs * (3 if needs_gradient else 2) * width)
    assert only.outputs == AffineCost(0, outputs * 2 * width)
    assert only.weights == AffineCost(weights * (3 if needs_gradient else 2) * width, 0)
    assert (only.kind, only.rows_per_example) == ("Linear", 1)
    assert only.dimensions == (("in_features", inputs), ("out_features", outputs))
    assert intensity(cost, 10) == only.flops.at(10) / only.bytes.at(10)


def forward_intensity(layer, batch_size, flops):
    """FLOPs per byte of a layer's forward pass, of whose step backward is two thirds of all uses.

    Backward reads its input and its weights and writes the gradients of both; of its output there
    is the gradient alone.
    """
    moved = layer.inputs.at(batch_size) / 3
    moved += layer.outputs.at(batch_size) / 2
    moved += layer.weights.at(batch_size) / 3
    return flops / moved


@pytest.mark.parametrize(("batch_size", "expected"), [(512, 315), (1, 1)])
def test_a_linear_layers_intensity_is_that_of_nvidias_table(batch_size, expected):
    """NVIDIA, GPU Performance Background, table 1: 1024 inputs, 4096 outputs, fp16, forward."""
    cost = cost_of(linear(1024, 4096), (1024,), "fp16", needs_gradient=True)
    (only,) = cost.layers
    flops = only.flops.at(batch_size) / 3
    assert round(forward_intensity(only, batch_size, flops)) == expected


@pytest.mark.parametrize("batch_size", [1, 512])
def test_a_relus_intensity_is_that_of_nvidias_table(batch_size):
    """The same table: one FLOP an element, which is read and written in 2 bytes each."""
    elements = 64
    module = nn.Sequential(linear(elements, elements), nn.ReLU())
    cost = cost_of(module, (elements,), "fp16", needs_gradient=True)
    relu = cost.layers[-1]
    assert relu.kind == "ReLU"
    # The counter sees products, convolutions and attention alone.
    assert relu.flops.at(batch_size) == 0
    flops = elements * batch_size
    assert forward_intensity(relu, batch_size, flops) == pytest.approx(0.25)


@pytest.mark.parametrize(("groups", "dimensions"), [(1, (4, 8)), (2, (2, 4)), (4, ())])
def test_convolution(groups, dimensions):
    module = nn.Conv2d(4, 8, 3, padding=1, groups=groups, bias=False)
    (only,) = cost_of(module, (4, 6, 5), needs_gradient=True).layers
    # Forward and two gradients; 2 operations for each of 6 x 5 pixels, 9 places, and channels in
    # and out.
    assert only.flops == AffineCost(0, 3 * 2 * 6 * 5 * 9 * 4 * 8 // groups)
    # Of 30 pixels in 4 bytes: x forward, x and dx backward; y and dy.
    moved = 3 * 4 * 30 * 4, 2 * 8 * 30 * 4
    assert (only.inputs, only.outputs) == (AffineCost(0, moved[0]), AffineCost(0, moved[1]))
    assert only.weights == AffineCost(3 * 9 * 4 * 8 // groups * 4, 0)
    assert only.dimensions == tuple(zip(("in_channels", "out_channels"), dimensions, strict=False))
    transposed = nn.ConvTranspose2d(4, 6, 2, stride=2, groups=2, bias=False)
    (only,) = cost_of(transposed, (4, 5, 5), needs_gradient=True).layers
    # A transposed convolution does its work for each pixel that it reads.
    assert only.flops == AffineCost(0, 3 * 2 * 4 * 25 * 4 * 6 // 2)


def flops_of(cost):
    """The operations of each layer an example."""
    return [layer.flops.per_example for layer in cost.layers]


def test_two_layers():
    cost = cost_of(nn.Sequential(nn.Flatten(), nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3)), (2, 3))
    # A view moves nothing, and so is no layer.
    linear_first, relu, linear_last = cost.layers
    assert (linear_first.name, relu.name, linear_last.name) == ("1", "2", "3")
    assert flops_of(cost) == [4 * 24, 0, 6 * 12]
    assert cost.layers[1].bytes == AffineCost(0, 4 * (4 * 3 + 4 * 2))
    assert cost.superlinear == ()
    assert cost.flops == AffineCost(0, 4 * 24 + 6 * 12)
    # 28 weights without, and 15 with a gradient of the input.
    assert cost.bytes.constant == 4 * (2 * 28 + 3 * 15)


def test_each_layer_is_charged_for_itself():
    inside = nn.Sequential(nn.Linear(6, 4), nn.ReLU(inplace=True), nn.Linear(4, 3))
    copying = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3))
    assert cost_of(inside, (6,)) == cost_of(copying, (6,))
    # inputs that need no gradient: there is no autograd node between the two
    branches = Calls(
        lambda module, x: module.first(x) + module.second(x), first=linear(6), second=linear(6)
    )
    assert flops_of(cost_of(branches, (6,))) == [4 * 24, 4 * 24]


def test_a_layer_called_several_times_moves_its_weights_once():
    (only,) = cost_of(
        Calls(lambda module, x: module.part(module.part(module.part(x))), part=linear()), (4,)
    ).layers
    # The first call has no gradient of its input.
    assert only.flops == AffineCost(0, (3 * 4 + 2 * 2) * 16)
    assert only.weights == AffineCost(3 * 16 * 4, 0)
    assert only.inputs == AffineCost(0, (2 + 3 + 3) * 4 * 4)


def test_weights_that_are_shared_are_counted_once_and_frozen_ones_have_no_gradient():
    module = nn.Sequential(linear(), linear())
    module[1].weight = module[0].weight
    first, second = cost_of(module, (4,)).layers
    assert first.weights == AffineCost(2 * 16 * 4, 0)
    assert (second.weights, second.flops) == (NOTHING, AffineCost(0, 6 * 16))
    # Nothing is learnt of the second layer, and yet its input has a gradient.
    frozen = nn.Sequential(linear(), linear().requires_grad_(False))
    second = cost_of(frozen, (4,)).layers[1]
    assert (second.weights, second.flops) == (AffineCost(2 * 16 * 4, 0), AffineCost(0, 4 * 16))
    # These are x forward and dx backward.
    assert second.inputs == AffineCost(0, 2 * 4 * 4)


def test_what_no_layer_calls_is_seen_in_flops_and_weights():
    # A layer in everything but name.
    weight = nn.Parameter(torch.randn(5, 4))
    functional = Calls(
        lambda module, x: nn.functional.linear(module.part(x), module.weight),
        weight=weight,
        part=linear(),
    )
    inner, outside = cost_of(functional, (4,)).layers
    assert (inner.name, inner.flops) == ("part", AffineCost(0, 4 * 16))
    assert (outside.name, outside.flops) == (roofline.OUTSIDE, AffineCost(0, 6 * 20))
    assert (outside.inputs, outside.outputs, outside.weights) == (
        NOTHING,
        NOTHING,
        AffineCost(3 * 20 * 4, 0),
    )


def test_checkpointing_repeats_the_forward_pass():
    inner = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU())
    checkpointed = Calls(
        lambda module, x: checkpoint(module.inner, x, use_reentrant=False), inner=inner
    )
    plain = cost_of(inner, (4,))
    again = cost_of(checkpointed, (4,))
    # The forward pass of both layers once more: 2 x 16 operations each.
    assert again.flops == plain.flops + AffineCost(0, 2 * 2 * 16)
    assert flops_of(again) == [6 * 16, 0, 8 * 16, 0]


def test_a_cost_that_outgrows_the_batch_is_named():
    module = nn.Sequential(linear(), Calls(lambda module, x: (x @ x.T).sum()))
    cost = cost_of(module, (4,), batch_sizes=(2, 8), loss=lambda model, batch: model(batch))
    assert cost.superlinear == ("1",)
    # 2 B^2 4 operations forward and twice as many backward, at B = 8.
    assert cost.layers[1].flops == AffineCost(0, 6 * 4 * 8)


@pytest.mark.parametrize("network", [mlp(784, [64], 10), simple_cnn(10, 32), RESNET9])
def test_the_line_holds_at_other_batch_sizes(network):
    module = Classifier(network, nn.CrossEntropyLoss(), torch.optim.SGD, 0.1)
    shape = (3, 32, 32) if network is RESNET9 else (1, 28, 28)

    def batch(size):
        return torch.randn(size, *shape), torch.randint(10, (size,))

    near = step_cost(module, batch, roofline.training_loss, "fp32", (2, 3))
    far = step_cost(module, batch, roofline.training_loss, "fp32", (7, 11))
    # The cost is a line over the batch size, so that any two sizes give it.
    assert near == far
    counter = torch.utils.flop_counter.FlopCounterMode(display=False)
    with counter:
        roofline.training_loss(module, batch(5)).backward()
    assert near.flops.at(5) == counter.get_total_flops()


def test_losses():
    module = SimpleNamespace(training_step=lambda batch, index: {"loss": batch, "other": 0})
    assert roofline.training_loss(module, torch.ones(())) == 1
    module = Classifier(linear(), nn.CrossEntropyLoss(), torch.optim.SGD, 0.1)
    module.training_step = lambda batch, index: module.trainer
    with pytest.raises(HardwareError, match=r"Classifier\.training_step .* asks for its Trainer"):
        roofline.training_loss(module, None)


@pytest.mark.parametrize("output", [None, {}, {"loss": None}, torch.ones(())])
@pytest.mark.parametrize("is_automatic", [True, False])
def test_a_step_without_a_loss_to_go_back_from_has_no_roofline(output, is_automatic):
    module = Classifier(linear(), nn.CrossEntropyLoss(), torch.optim.SGD, 0.1)
    module.training_step = lambda batch, index: output
    module.automatic_optimization = is_automatic
    if is_automatic and isinstance(output, torch.Tensor):
        assert roofline.training_loss(module, None) is output
        return
    with pytest.raises(HardwareError, match=r"Classifier\.training_step"):
        roofline.training_loss(module, None)


@pytest.mark.parametrize(
    ("flops", "moved", "expected"),
    [
        # 40 B = 10 (200 + 2 B) at B = 100.
        (AffineCost(0, 40), AffineCost(200, 2), 100.0),
        # It is compute-bound at any size.
        (AffineCost(0, 40), AffineCost(0, 2), 1.0),
        # It is compute-bound from B = 1/2 on.
        (AffineCost(0, 40), AffineCost(1, 2), 1.0),
        # It approaches the ridge from below.
        (AffineCost(0, 20), AffineCost(200, 2), None),
        # 500 + 40 B = 10 (200 + 2 B).
        (AffineCost(500, 40), AffineCost(200, 2), 75.0),
    ],
)
def test_turning_batch_size(flops, moved, expected):
    assert roofline.turning_batch_size(step(layer(flops, moved)), LIMITS.ridge) == expected
    if expected is not None and expected > 1.0:
        assert intensity(layer(flops, moved), expected) == pytest.approx(LIMITS.ridge)


def test_the_linear_layer_turns_where_its_closed_form_says():
    cost = cost_of(linear(64, 64), (64,), needs_gradient=True)
    # n = 64: 6 B n^2 = ridge 4 (3 n^2 + 5 B n), so B = 12 ridge n / (6 n - 20 ridge), never if
    # ridge >= 0.3 n
    assert roofline.turning_batch_size(cost, 10.0) == pytest.approx(12 * 10 * 64 / (6 * 64 - 200))
    assert roofline.turning_batch_size(cost, 20.0) is None


def test_time_allowed_is_the_larger_of_each_layer():
    cost = step(
        layer(AffineCost(0, 100), AffineCost(5, 1)), layer(AffineCost(0, 10), AffineCost(0, 8))
    )
    # at B = 10: 10 s of compute over 1.5 s of memory, and 8 s of memory over 1 s of compute
    assert roofline.allowed_seconds(cost, LIMITS, 10) == pytest.approx(10 + 8)
    survey = make_survey(((1, 2.0), (10, 36.0)), cost=cost, limits=LIMITS)
    # 1,100 operations in 36 s, of 100 a second; 18 s of 36 are allowed.
    assert survey.achieved[1] == Achieved(
        10, pytest.approx(1100 / 36 / 100), pytest.approx(0.5), pytest.approx(intensity(cost, 10))
    )


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: cost_of(nn.Linear(2, 2), (2,), batch_sizes=(2, 2)), r"two rising sizes"),
        (lambda: cost_of(nn.BatchNorm1d(2), (2,)), "the FLOP counter found none"),
        (lambda: cost_of(nn.Linear(2, 2).requires_grad_(False), (2,)), "loss has no gradient"),
        (
            # 10^15 numbers fit into no memory.
            lambda: measure_limits(CPU, "fp32", 0.01, [8], [10**15]),
            "ceilings of cpu cannot be measured in fp32: ",
        ),
    ],
)
def test_what_cannot_be_used(call, message):
    with pytest.raises(HardwareError, match=message):
        call()


@pytest.mark.parametrize(
    ("seconds", "sizes", "best", "called"),
    [
        # The largest size has the best rate: 80% of 1e6.
        (1e4, [80, 20, 40], 0.8e6, {20, 40, 80}),
        # A call at 20 takes 0.08 s, and one at 400 takes 128 s.
        (90.0, [20, 400], 0.2e6, {20}),
        # The libraries take 80 s to load.
        (10.0, [20, 40], 0.4e6, {20, 40}),
    ],
)
def test_the_best_of_the_sizes_that_there_is_time_for_is_the_limit(seconds, sizes, best, called):
    """A call is of ``size`` cubed operations; small ones are slower, the first one of all a thousandfold."""
    time = FakeTime()
    calls = set()

    def prepare(size):
        def call():
            slow = 1.0 if calls else 1000.0
            calls.add(size)
            time.sleep(slow * 2 * size**3 / (1e6 * min(1.0, size / 100)))

        return call

    rate = _best_rate(prepare, sizes, CPU, seconds, power=3, clock=time)
    assert rate == pytest.approx(best)
    assert calls == called
    assert time.now < 80.0 + 1.2 * seconds


@pytest.mark.parametrize(
    ("precision", "device", "products", "convolves", "capability", "expected", "multiple"),
    [
        # A CPU has no tensor cores.
        ("32-true", "cpu", "tf32", None, None, "fp32", None),
        ("bf16-mixed", "cuda", "ieee", "tf32", (9, 0), "bf16", 8),
        ("32-true", "cuda", "ieee", None, (9, 0), "fp32", None),
        # That is torch's default, of a convolution.
        ("32-true", "cuda", "ieee", "tf32", (9, 0), "tf32", 4),
        ("32-true", "cuda", "tf32", "ieee", (9, 0), "fp32", None),
        ("32-true", "cuda", "tf32", None, (9, 0), "tf32", 4),
        ("32-true", "cuda", "tf32", None, (8, 0), "tf32", 4),
        # Before compute capability 8.0 there is no TF32.
        ("32-true", "cuda", "tf32", "tf32", (7, 5), "fp32", None),
        ("16-mixed", "cuda", "tf32", None, (9, 0), "fp16", 8),
    ],
)
def test_arithmetic_and_its_multiple(
    monkeypatch, precision, device, products, convolves, capability, expected, multiple
):
    monkeypatch.setattr(roofline, "products_in_tf32", lambda: products == "tf32")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(roofline, "convolutions_in_tf32", lambda: convolves == "tf32")
    found = arithmetic_of(precision, torch.device(device), convolves is not None)
    assert (found, roofline.tensor_core_multiple(found, device)) == (expected, multiple)


@pytest.mark.parametrize(
    ("module", "expected"),
    [(nn.Sequential(nn.Linear(2, 2)), False), (nn.Sequential(nn.Conv1d(2, 2, 1)), True)],
)
def test_a_convolution_is_found(module, expected):
    assert roofline.is_convolutional(module) == expected


@pytest.mark.parametrize(
    ("dimensions", "rows", "batch", "multiple", "expected"),
    [
        ((("in_features", 16), ("out_features", 8)), 1, 8, 8, []),
        # Each size is padded to a multiple.
        (
            (("in_features", 15), ("out_features", 10)),
            1,
            8,
            4,
            [("in_features", 15, 16), ("out_features", 10, 12)],
        ),
        ((("in_channels", 3), ("out_channels", 64)), None, 7, 8, [("in_channels", 3, 8)]),
        ((("in_features", 8), ("out_features", 8)), 1, 9, 8, [("batch", 9, 16)]),
        # Four rows an example: an even batch size makes their number a multiple of 8.
        ((("in_features", 8), ("out_features", 8)), 4, 9, 8, [("batch", 9, 10)]),
        ((("in_features", 8), ("out_features", 8)), 8, 9, 8, []),
        ((), None, 9, 8, []),
    ],
)
def test_alignment(dimensions, rows, batch, multiple, expected):
    one = layer(AffineCost(0, 100), AffineCost(0, 1), dimensions=dimensions, rows_per_example=rows)
    found = roofline.misalignments(step(one), LIMITS, multiple, batch)
    assert [(row.dimension, row.size, row.padded) for row in found] == expected


def test_gain_of_padding_is_predicted_from_the_measured_limits():
    def padded(flops, outputs, rows, limits=LIMITS):
        parts = (AffineCost(0, flops), AffineCost(0, 1), AffineCost(0, outputs), NOTHING)
        one = LayerCost("l", "Linear", *parts, (("in_features", 6),), rows)
        return roofline.misalignments(step(one), limits, 8, 12)

    feature, batch = padded(120, 1, 1)
    # Misaligned it runs at 50, padded at 100 and with 8/6 of the work.
    assert feature.predicted_gain == pytest.approx((120 / 50) / (120 * 8 / 6 / 100))
    assert (batch.padded, batch.predicted_gain) == (16, pytest.approx(2.0))
    (feature,) = padded(1, 3, 8)
    # A memory-bound step moves only more with padding.
    assert feature.predicted_gain == pytest.approx(4 / (8 / 6 + 3))
    # Without a measured rate of what is misaligned nothing can be said.
    assert padded(120, 1, 1, DeviceLimits("fp16", 100.0, 10.0))[0].predicted_gain is None


def test_a_cost_in_half_the_width_moves_half_the_bytes():
    moved = (AffineCost(0, 12), AffineCost(0, 2), AffineCost(0, 4))
    one = LayerCost("l", "Linear", *moved, AffineCost(8, 0))
    half = roofline.in_width(step(one), 0.5)
    assert (half.bytes, half.flops) == (AffineCost(4, 3), AffineCost(0, 12))


@pytest.mark.parametrize(
    ("device", "dtype", "batch_size", "seconds"),
    [
        # FLOPs 1e6 B, bytes in fp32 4e3 B + 4e6, half of them in 16 bits.
        ("A100 40 GB", "fp16", 10_000, 1e10 / 312e12),
        ("A100 40 GB", "fp32", 10_000, 1e10 / 19.5e12),
        ("A100 40 GB", "fp16", 1, 2.002e6 / 1555e9),
        ("V100", "fp32", 1, 4.004e6 / 900e9),
        ("H100", "bf16", 1, 2.002e6 / 3350e9),
    ],
)
def test_the_least_seconds_of_a_step_on_a_device_that_one_does_not_have(
    device, dtype, batch_size, seconds
):
    weights = AffineCost(4e6, 0)
    layer = LayerCost("l", "Linear", AffineCost(0, 1e6), AffineCost(0, 4e3), NOTHING, weights)
    found = {(row.device, row.dtype): row for row in predictions(step(layer), "fp32", batch_size)}[
        device, dtype
    ]
    assert (found.batch_size, found.least_seconds) == (batch_size, pytest.approx(seconds))


@pytest.mark.parametrize(
    ("device", "dtype", "ridge", "turning"),
    [
        # FLOPs 1000 B, bytes in fp32 4 B + 400: B = 400 w ridge/(1000 - 4 w ridge), w the width
        # over fp32's
        ("A100 40 GB", "fp16", 201, 200 * 201 / (1000 - 2 * 201)),
        ("A100 40 GB", "tf32", 100, 400 * 100 / (1000 - 4 * 100)),
        ("A100 80 GB", "bf16", 153, 200 * 153 / (1000 - 2 * 153)),
        ("H100", "bf16", 295, 200 * 295 / (1000 - 2 * 295)),
        ("V100", "fp16", 139, 200 * 139 / (1000 - 2 * 139)),
        ("V100", "fp32", 17.4, 400 * 17.4 / (1000 - 4 * 17.4)),
        ("T4", "fp16", 203, 200 * 203 / (1000 - 2 * 203)),
    ],
)
def test_where_a_step_turns_on_a_device_that_one_does_not_have(device, dtype, ridge, turning):
    cost = step(
        LayerCost("l", "Linear", AffineCost(0, 1000), AffineCost(0, 4), NOTHING, AffineCost(400, 0))
    )
    (found,) = [
        row for row in predictions(cost, "fp32", 8) if (row.device, row.dtype) == (device, dtype)
    ]
    assert (found.ridge, found.turning_batch_size) == pytest.approx((ridge, turning), rel=1e-2)
    # A layer that only moves data never turns.
    never = step(LayerCost("l", "ReLU", AffineCost(0, 1), AffineCost(0, 4), NOTHING, NOTHING))
    for row in predictions(never, "bf16", 8):
        assert row.turning_batch_size is None
