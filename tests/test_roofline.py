import math
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from bstune.core.errors import HardwareError
from bstune.hardware.report import draw_roofline
from bstune.hardware.roofline import (
    OUTSIDE,
    DeviceLimits,
    LayerCost,
    Line,
    StepCost,
    achieved,
    allowed_seconds,
    intensity,
    step_cost,
    training_loss,
    turning_batch_size,
)
from bstune.workloads.classifier import Classifier
from bstune.workloads.layers import BatchNorm
from bstune.workloads.models import mlp, simple_cnn
from bstune.workloads.resnet9 import ResNet9

LIMITS = DeviceLimits("device", "fp16", 100.0, 10.0, misaligned_flops_per_second=50.0)
NOTHING = Line(0.0, 0.0)
RESNET9 = ResNet9(
    10,
    8,
    0.125,
    pool="before_norm",
    activation=nn.CELU,
    norm=partial(BatchNorm, ghost_size=2),
    whitening=None,
    identity_init=False,
)


def cost_of(module, shape, arithmetic="fp32", batch_sizes=(2, 4), needs_gradient=False, loss=None):
    return step_cost(
        module,
        lambda size: torch.randn(size, *shape, requires_grad=needs_gradient),
        loss or (lambda model, batch: model(batch).sum()),
        arithmetic,
        batch_sizes,
    )


def layer(flops=NOTHING, moved=NOTHING, **changes):
    return LayerCost("l", "Linear", 1, flops, moved, NOTHING, NOTHING, **changes)


def step(*layers):
    return StepCost(layers, (), ())


@pytest.mark.parametrize(("arithmetic", "width"), [("fp64", 8), ("fp32", 4), ("tf32", 4), ("bf16", 2), ("fp16", 2)])
@pytest.mark.parametrize("needs_gradient", [True, False])
def test_linear(arithmetic, width, needs_gradient):
    inputs, outputs = 12, 5
    cost = cost_of(nn.Linear(inputs, outputs), (inputs,), arithmetic, needs_gradient=needs_gradient)
    (only,) = cost.layers
    product = 2 * inputs * outputs
    weights = inputs * outputs + outputs
    # 2 B in out forward, 4 B in out backward: the first layer of a network has no gradient of its input to compute
    assert only.flops == Line(0, product * (3 if needs_gradient else 2))
    # x forward, x and dx backward; y and dy; w forward, w and dw backward
    assert only.inputs == Line(0, inputs * (3 if needs_gradient else 2) * width)
    assert only.outputs == Line(0, outputs * 2 * width)
    assert only.weights == Line(weights * (3 if needs_gradient else 2) * width, 0)
    assert (only.kind, only.calls, only.rows_per_example) == ("Linear", 1, 1)
    assert only.dimensions == (("in_features", inputs), ("out_features", outputs))
    assert intensity(cost, 10) == only.flops.at(10) / only.bytes.at(10)


@pytest.mark.parametrize(("groups", "dimensions"), [(1, (4, 8)), (2, (2, 4)), (4, None)])
def test_convolution(groups, dimensions):
    module = nn.Conv2d(4, 8, 3, padding=1, groups=groups, bias=False)
    (only,) = cost_of(module, (4, 6, 5), needs_gradient=True).layers
    product = 2 * 6 * 5 * 9 * 4 * 8 // groups
    assert only.flops == Line(0, 3 * product)
    assert only.inputs == Line(0, 3 * 4 * 30 * 4)
    assert only.outputs == Line(0, 2 * 8 * 30 * 4)
    assert only.weights == Line(3 * 9 * 4 * 8 // groups * 4, 0)
    expected = () if dimensions is None else (("in_channels", dimensions[0]), ("out_channels", dimensions[1]))
    assert only.dimensions == expected


def test_transposed_convolution():
    (only,) = cost_of(
        nn.ConvTranspose2d(4, 6, 2, stride=2, groups=2, bias=False), (4, 5, 5), needs_gradient=True
    ).layers
    assert only.flops == Line(0, 3 * 2 * 4 * 25 * 4 * 6 // 2)


def test_two_layers():
    cost = cost_of(nn.Sequential(nn.Flatten(), nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3)), (2, 3))
    assert [one.name for one in cost.layers] == ["1", "2", "3"]  # a view moves nothing
    assert [one.flops.per_example for one in cost.layers] == [4 * 24, 0, 6 * 12]
    relu = cost.layers[1]
    assert relu.bytes == Line(0, 4 * (4 * 3 + 4 * 2))
    assert cost.uncounted == ("2",)
    assert cost.superlinear == ()
    assert cost.flops == Line(0, 4 * 24 + 6 * 12)
    assert cost.bytes.constant == 4 * (2 * 28 + 3 * 15)


def test_in_place_layers_move_bytes_and_cut_backward_as_others_do():
    def network(inplace):
        return nn.Sequential(nn.Linear(6, 4), nn.ReLU(inplace=inplace), nn.Linear(4, 3))

    assert cost_of(network(True), (6,)) == cost_of(network(False), (6,))


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 4, bias=False), nn.Linear(6, 4, bias=False)

    def forward(self, x):
        return self.first(x) + self.second(x)


def test_layers_whose_input_needs_no_gradient_are_not_charged_for_others():
    assert [one.flops.per_example for one in cost_of(Branches(), (6,)).layers] == [4 * 24, 4 * 24]


class Repeated(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4, bias=False)

    def forward(self, x):
        return self.layer(self.layer(self.layer(x)))


def test_a_layer_called_several_times_moves_its_weights_once():
    (only,) = cost_of(Repeated(), (4,)).layers
    assert only.calls == 3
    assert only.flops == Line(0, (3 * 4 + 2 * 2) * 16)  # the first call has no gradient of its input
    assert only.weights == Line(3 * 16 * 4, 0)
    assert only.inputs == Line(0, (2 + 3 + 3) * 4 * 4)


def test_shared_weights_are_counted_once():
    module = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    module[1].weight = module[0].weight
    first, second = cost_of(module, (4,)).layers
    assert first.weights == Line(2 * 16 * 4, 0)
    assert second.weights == NOTHING
    assert second.flops == Line(0, 6 * 16)


def test_frozen_weights_have_no_gradient():
    module = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    module[1].weight.requires_grad = False
    second = cost_of(module, (4,)).layers[1]
    assert second.flops == Line(0, 4 * 16)
    assert second.weights == Line(2 * 16 * 4, 0)
    assert second.inputs == Line(0, 2 * 4 * 4)  # x forward, dx backward


class Functional(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 4))
        self.layer = nn.Linear(4, 4, bias=False)

    def forward(self, x):
        return nn.functional.linear(self.layer(x), self.weight)


def test_what_no_layer_calls_is_seen_in_flops_and_weights():
    inner, outside = cost_of(Functional(), (4,)).layers
    assert (inner.name, inner.flops) == ("layer", Line(0, 4 * 16))
    assert (outside.name, outside.flops) == (OUTSIDE, Line(0, 6 * 20))
    assert (outside.inputs, outside.outputs, outside.weights) == (NOTHING, NOTHING, Line(3 * 20 * 4, 0))


class Checkpointed(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False)


def test_checkpointing_repeats_the_forward_pass():
    inner = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU())
    plain, again = cost_of(inner, (4,)), cost_of(Checkpointed(inner), (4,))
    assert again.flops == plain.flops + Line(0, 2 * 2 * 16)
    assert [one.flops.per_example for one in again.layers] == [6 * 16, 0, 8 * 16, 0]


def test_a_cost_that_outgrows_the_batch_is_named():
    class Pairs(nn.Module):
        def forward(self, x):
            return (x @ x.T).sum()

    module = nn.Sequential(nn.Linear(4, 4, bias=False), Pairs())
    cost = cost_of(module, (4,), batch_sizes=(2, 8), loss=lambda model, batch: model(batch))
    assert cost.superlinear == ("1",)
    assert cost.layers[1].flops == Line(0, 6 * 4 * 8)  # 2 B^2 4 forward and twice backward, at B = 8


def test_the_module_is_left_as_it_was():
    module = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Dropout(0.5), nn.Linear(3, 2))
    module[0].weight.grad = torch.ones(3, 4)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    torch.manual_seed(0)
    cost_of(module, (4,))
    drawn = torch.rand(3)  # the batches are drawn outside the trace
    torch.manual_seed(0)
    torch.randn(2, 4), torch.randn(4, 4)
    assert torch.equal(drawn, torch.rand(3))
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert torch.equal(module[0].weight.grad, torch.ones(3, 4))
    assert module[3].weight.grad is None
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in module.modules())


@pytest.mark.parametrize("network", [mlp(784, [64], 10), simple_cnn(10), RESNET9])
def test_the_line_holds_at_other_batch_sizes(network):
    module = Classifier(network, nn.CrossEntropyLoss(), torch.optim.SGD, 0.1)
    shape = (3, 32, 32) if network is RESNET9 else (1, 28, 28)

    def batch(size):
        return torch.randn(size, *shape), torch.randint(10, (size,))

    near, far = (step_cost(module, batch, training_loss, "fp32", sizes) for sizes in ((2, 3), (7, 11)))
    assert near == far
    counter = torch.utils.flop_counter.FlopCounterMode(display=False)
    with counter:
        training_loss(module, batch(5)).backward()
    assert near.flops.at(5) == counter.get_total_flops()


def test_losses_in_a_mapping():
    class Module:
        def training_step(self, batch, index):
            return {"loss": batch, "other": 0}

    assert training_loss(Module(), torch.ones(())) == 1


RIDGE = 10.0


@pytest.mark.parametrize(
    ("flops", "moved", "expected"),
    [
        (Line(0, 40), Line(200, 2), 100.0),  # 40 B = 10 (200 + 2 B)
        (Line(0, 40), Line(0, 2), 1.0),  # compute-bound at any size
        (Line(0, 40), Line(1, 2), 1.0),  # from B = 1/2 on
        (Line(0, 20), Line(200, 2), None),  # approaches the ridge from below
        (Line(0, 10), Line(200, 2), None),
        (Line(500, 40), Line(200, 2), 75.0),
        (Line(0, 0), Line(0, 2), None),
    ],
)
def test_turning_batch_size(flops, moved, expected):
    assert turning_batch_size(layer(flops, moved), RIDGE) == expected
    assert turning_batch_size(step(layer(flops, moved)), RIDGE) == expected
    if expected is not None and expected > 1.0:
        assert intensity(layer(flops, moved), expected) == pytest.approx(RIDGE)


@pytest.mark.parametrize(("ridge", "turns"), [(10.0, 12 * 10 * 64 / (6 * 64 - 200)), (20.0, None)])
def test_the_linear_layer_turns_where_its_closed_form_says(ridge, turns):
    n = 64
    cost = cost_of(nn.Linear(n, n, bias=False), (n,), needs_gradient=True)
    # 6 B n^2 = ridge 4 (3 n^2 + 5 B n), so B = 12 ridge n / (6 n - 20 ridge), never if ridge >= 0.3 n
    assert turning_batch_size(cost, ridge) == (None if turns is None else pytest.approx(turns))


def test_time_allowed_is_the_larger_of_each_layer():
    cost = step(layer(Line(0, 100), Line(5, 1)), layer(Line(0, 10), Line(0, 8)))
    # at B = 10: 10 s of compute over 1.5 s of memory, and 8 s of memory over 1 s of compute
    assert allowed_seconds(cost, LIMITS, 10) == pytest.approx(10 + 8)
    far, near = achieved(cost, LIMITS, [(10, 36.0), (1, 2.0)])
    assert (far.batch_size, near.batch_size) == (1, 10)
    assert near.allowed_seconds == pytest.approx(18)
    assert near.share_of_roofline == pytest.approx(0.5)
    assert near.share_of_peak == pytest.approx(1100 / 36 / 100)
    assert near.compute_bound  # 1100 FLOPs over 95 bytes: above 10
    assert not far.compute_bound  # 110 over 14
    assert achieved(cost, LIMITS, []) == []


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: cost_of(nn.Linear(2, 2), (2,), batch_sizes=(0, 2)), r"batch_sizes must be two rising.*\(0, 2\)"),
        (lambda: cost_of(nn.Linear(2, 2), (2,), batch_sizes=(2, 2)), r"two rising sizes"),
        (lambda: cost_of(nn.Linear(2, 2), (2,), "fp8"), "arithmetic must be one of .* but got 'fp8'"),
        (lambda: cost_of(nn.BatchNorm1d(2), (2,)), "the FLOP counter found none"),
        (lambda: cost_of(nn.Linear(2, 2).requires_grad_(False), (2,)), "loss has no gradient"),
        (lambda: intensity(layer(), 0), "a batch size is at least 1 example, but got 0"),
        (lambda: allowed_seconds(step(layer()), LIMITS, math.nan), "a batch size is at least 1 example, but got nan"),
        (lambda: achieved(step(layer()), LIMITS, [(0, 1.0)]), "a batch size is at least 1"),
        (lambda: achieved(step(layer()), LIMITS, [(2, math.nan)]), "seconds per step at batch size 2 .* but got nan"),
        (lambda: turning_batch_size(layer(), math.inf), "the ridge must be .* but got inf"),
    ],
)
def test_what_cannot_be_used(call, message):
    with pytest.raises(HardwareError, match=message):
        call()


def test_a_layer_without_bytes_has_no_intensity():
    assert intensity(layer(Line(0, 4)), 2) is None


@pytest.mark.parametrize("measured", [[], [(2, 1e-3), (64, 2e-3)]])
def test_figure(tmp_path, measured):
    cost = cost_of(nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3)), (6,))
    path = tmp_path / "roofline.png"
    draw_roofline(cost, DeviceLimits("cpu", "fp32", 1e11, 2e10), (1, 8, 64), measured, "digits", path)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert list(tmp_path.iterdir()) == [path]


def test_figure_needs_a_batch_size(tmp_path):
    with pytest.raises(HardwareError, match="at least one batch size"):
        draw_roofline(step(layer(Line(0, 1), Line(0, 1))), LIMITS, (), [], "digits", tmp_path / "x.png")
