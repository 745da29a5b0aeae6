"""The roofline of a workload on a device: the device's limits, a training step's cost, and what they allow.

Williams et al. 2009, "Roofline: an insightful visual performance model for multicore architectures": attainable
FLOP/s = min(peak FLOP/s, bytes/s x intensity); the two meet at the ridge. The limits are measured by matrix products
in the trial's precision and copies in the device's memory: a share of peak is not one of the vendor's figure.

FLOPs of a step are those that ``torch.utils.flop_counter`` finds, forward and backward, in products, convolutions and
attention. Bytes follow from the shapes of that step. Assumptions:

1. Each tensor moves once a use, and nothing stays in a cache between layers. Forward, a layer reads its input and
   weights and writes its output. Backward, it reads the gradient of its output, its input (unless all of its weights
   are frozen) and, where its input needs a gradient, its weights; it writes the gradients of what needs one.
2. A layer is a module without children. One that is called several times in a step moves its weights once a pass; a
   weight that several layers share is counted in the first of them. A view (Flatten) moves nothing.
3. Every floating-point tensor is as wide as the device limits' dtype; mixed precision keeps some wider.
4. What happens between the layers (additions of residual branches, functional calls) is seen only in its FLOPs and in
   the weights that it uses, as the layer ``OUTSIDE``. The optimizer's update is left out.
"""

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from bstune.core.errors import HardwareError
from bstune.system.failures import place_of
from bstune.trial.devices.device import convolutions_in_tf32, products_in_tf32

Arithmetic = Literal["fp64", "fp32", "tf32", "bf16", "fp16"]
DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "tf32": torch.float32}
DTYPES |= {"bf16": torch.bfloat16, "fp16": torch.float16}
PRECISIONS: dict[str, Arithmetic] = {
    "32": "fp32",
    "16": "fp16",
    "bf16": "bf16",
}  # Lightning's, without -true or -mixed
# Multiples of 16 bytes. fp32 has none, whatever other sources ask for (16, say): without tf32 its products do not run
# on tensor cores at all.
TENSOR_CORE_MULTIPLES = {"tf32": 4, "bf16": 8, "fp16": 8}
TENSOR_CORE_SOURCE = "NVIDIA, Matrix Multiplication Background, table 1"


@dataclass(frozen=True)
class DeviceLimits:
    """What a device can do at most, as measured."""

    dtype: Arithmetic  # of the matrix product
    flops_per_second: float  # of the best matrix product
    bytes_per_second: float  # of the best copy; each byte copied counts twice, read and written
    # Of the best product whose sides miss the tensor cores' multiple by one; None where there is no such multiple.
    misaligned_flops_per_second: float | None = None

    @property
    def ridge(self) -> float:
        """FLOPs per byte above which the device computes longer than it moves bytes."""
        return self.flops_per_second / self.bytes_per_second


def arithmetic_of(precision: str, device: torch.device, convolves: bool) -> Arithmetic:
    """Return the arithmetic of a network's products under a precision of the config, such as ``bf16-mixed``.

    One that ``convolves`` has most of its FLOPs in convolutions, which cuDNN by default computes in tf32 where the
    device has it; matrix products are in tf32 where PyTorch is set to that.
    """
    name = PRECISIONS[precision.partition("-")[0]]
    if name != "fp32" or device.type != "cuda" or torch.cuda.get_device_capability(device)[0] < 8:
        return name
    return "tf32" if (convolutions_in_tf32() if convolves else products_in_tf32()) else name


def is_convolutional(module: nn.Module) -> bool:
    """Return whether a module has a convolution in it."""
    return any(isinstance(part, nn.modules.conv._ConvNd) for part in module.modules())


def tensor_core_multiple(arithmetic: str, device_type: str) -> int | None:
    """Return what dimensions should be multiples of (8 in 16 bits, 4 in tf32); None for any."""
    return TENSOR_CORE_MULTIPLES.get(arithmetic) if device_type == "cuda" else None


OUTSIDE = "(between layers)"


@dataclass(frozen=True)
class AffineCost:
    """A cost over batch size: constant + per_example B."""

    constant: float
    per_example: float

    def at(self, batch_size: float) -> float:
        """Return the cost at ``batch_size``."""
        return self.constant + self.per_example * batch_size

    def __mul__(self, factor: float) -> "AffineCost":
        return AffineCost(self.constant * factor, self.per_example * factor)

    def __add__(self, other: "AffineCost") -> "AffineCost":
        return AffineCost(self.constant + other.constant, self.per_example + other.per_example)


@dataclass(frozen=True)
class LayerCost:
    """What one layer costs in a training step, forward and backward."""

    name: str
    kind: str
    flops: AffineCost  # in a step
    inputs: AffineCost  # bytes moved of them and of their gradients, as in the next two
    outputs: AffineCost
    weights: AffineCost
    # Those of NVIDIA's guides to tensor cores: features of a Linear, channels of a group of a convolution that is not
    # depthwise.
    dimensions: tuple[tuple[str, int], ...] = ()
    rows_per_example: int | None = None  # of a Linear's product

    @property
    def bytes(self) -> AffineCost:
        """Bytes that the layer moves."""
        return self.inputs + self.outputs + self.weights


@dataclass(frozen=True)
class StepCost:
    """What a training step costs."""

    layers: tuple[
        LayerCost, ...
    ]  # in the order of their first call, without those of no FLOPs and no bytes
    # Those whose cost grows faster than the batch (a loss over pairs, say): the line through 0 and the larger traced
    # batch stands for it.
    superlinear: tuple[str, ...]

    @property
    def flops(self) -> AffineCost:
        """FLOPs of the whole step."""
        return sum((layer.flops for layer in self.layers), AffineCost(0.0, 0.0))

    @property
    def bytes(self) -> AffineCost:
        """Bytes that the whole step moves."""
        return sum((layer.bytes for layer in self.layers), AffineCost(0.0, 0.0))


@dataclass(frozen=True)
class Achieved:
    """How near a measured step came to the device's limits."""

    batch_size: int
    share_of_peak: float  # FLOP/s over the device's
    share_of_roofline: (
        float  # allowed over measured seconds; above 1 where tensors stay in caches between layers
    )
    intensity: float  # FLOPs per byte moved


def training_loss(module: Any, batch: Any, index: int = 0) -> Tensor:
    """Return the loss of a LightningModule's ``training_step`` outside a Trainer, HardwareError if it asks for one."""
    try:
        output = module.training_step(batch, index)
    except RuntimeError as error:
        if "not attached to a `Trainer`" not in str(error):
            raise
        raise HardwareError(
            f"{type(module).__name__}.training_step{place_of(module.training_step)} asks for its Trainer, so it cannot "
            "be run without one: let it take what it needs of the Trainer in a hook, such as on_train_start"
        ) from error
    return output if isinstance(output, Tensor) else output["loss"]


def step_cost(
    module: nn.Module,
    make_batch: Callable[[int], Any],
    loss: Callable[[Any, Any], Tensor],
    arithmetic: Arithmetic,
    batch_sizes: Sequence[int] = (2, 4),
) -> StepCost:
    """Trace a training step at two batch sizes and return its cost over batch size; the module takes the gradients."""
    if len(batch_sizes) != 2 or not 1 <= batch_sizes[0] < batch_sizes[1]:
        raise HardwareError(
            f"hardware.ceilings.traced_batch_sizes must be two rising sizes, but got {batch_sizes}"
        )
    width = DTYPES[arithmetic].itemsize
    low, high = (_trace(module, make_batch(size), loss, width) for size in batch_sizes)
    if not any(layer.counts["flops"] for layer in high):
        raise HardwareError(
            "the FLOP counter found none in a training step: the roofline needs a model with products, convolutions "
            "or attention that PyTorch runs itself"
        )
    small, large = batch_sizes
    layers, superlinear = [], []
    before = {layer.name: layer for layer in low}
    for layer in high:
        if not any(layer.counts.values()):
            continue
        lines = {}
        for name, count in layer.counts.items():
            fewer = before.get(layer.name, layer).counts[name]
            slope = (count - fewer) / (large - small)
            constant = fewer - slope * small
            lines[name] = (
                AffineCost(constant, slope) if constant >= 0.0 else AffineCost(0.0, count / large)
            )
            superlinear += [layer.name] if constant < 0.0 else []
        rows = None if layer.rows is None else max(1, round(layer.rows / large))
        layers.append(
            LayerCost(
                layer.name, layer.kind, **lines, dimensions=layer.dimensions, rows_per_example=rows
            )
        )
    return StepCost(tuple(layers), tuple(dict.fromkeys(superlinear)))


def intensity(cost: LayerCost | StepCost, batch_size: float) -> float:
    """Return FLOPs per byte at ``batch_size``."""
    return cost.flops.at(batch_size) / cost.bytes.at(batch_size)


def in_width(cost: StepCost, factor: float) -> StepCost:
    """Return the cost with tensors so many times as wide (0.5: fp32 in 16 bits); whole numbers count as the others."""
    layers = (
        replace(
            layer,
            **{name: getattr(layer, name) * factor for name in ("inputs", "outputs", "weights")},
        )
        for layer in cost.layers
    )
    return replace(cost, layers=tuple(layers))


def turning_batch_size(cost: LayerCost | StepCost, ridge: float) -> float | None:
    """Return the batch size from which on the cost is compute-bound: F(B)/bytes(B) = ridge, at least 1; None for never.

    With F = f + F' B and bytes = a + b B, it is B = (ridge a - f)/(F' - ridge b).
    """
    gain = cost.flops.per_example - ridge * cost.bytes.per_example
    if gain <= 0.0:
        return None
    return max(1.0, (ridge * cost.bytes.constant - cost.flops.constant) / gain)


def allowed_seconds(cost: StepCost, limits: DeviceLimits, batch_size: float) -> float:
    """Return the seconds that the roofline allows for a step: each layer's larger time, summed."""
    return sum(layer_seconds(layer, limits, batch_size) for layer in cost.layers)


def layer_seconds(layer: LayerCost, limits: DeviceLimits, batch_size: float) -> float:
    """Return the larger of the seconds that FLOPs and bytes take at the device's limits."""
    flops, moved = layer.flops.at(batch_size), layer.bytes.at(batch_size)
    return max(flops / limits.flops_per_second, moved / limits.bytes_per_second)


@dataclass
class _Traced:
    """One layer in one traced step."""

    name: str
    kind: str
    dimensions: tuple[tuple[str, int], ...] = ()
    # FLOPs and bytes as in :class:`LayerCost`
    counts: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(("flops", "inputs", "outputs", "weights"), 0)
    )
    rows: int | None = None
    parameters: list[nn.Parameter] = field(default_factory=list)  # that no layer before it has
    passes_gradient: bool = False  # to its input


def _trace(
    module: nn.Module, batch: Any, loss: Callable[[Any, Any], Tensor], width: int
) -> list[_Traced]:
    """Run one training step and return its layers in the order of their first call, ``OUTSIDE`` last."""
    tracer = _Tracer(width)
    with ExitStack() as hooks:
        for name, layer in module.named_modules():
            if next(layer.children(), None) is None:
                after = functools.partial(tracer.after, name)
                hooks.enter_context(
                    layer.register_forward_pre_hook(tracer.before, with_kwargs=True)
                )
                hooks.enter_context(layer.register_forward_hook(after, with_kwargs=True))
        module.zero_grad()
        with tracer.counter:
            value = loss(module, batch)
            if not value.requires_grad:
                raise HardwareError(
                    "the training step's loss has no gradient: a parameter must be trainable"
                )
            value.backward()  # type: ignore[no-untyped-call]
        return tracer.layers(module.parameters())


class _Tracer:
    """Hooks that charge FLOPs and bytes to the layer that runs, backward to the one whose call made the autograd node.

    torch's own module tracker takes a layer whose input needs no gradient to run until the end.
    """

    def __init__(self, width: int) -> None:
        self.counter = FlopCounterMode(display=False, custom_mapping=FLOP_FORMULAS)
        self._width = width
        self._layers: dict[str, _Traced] = {}
        self._nodes: set[Node] = set()
        self._claimed: set[nn.Parameter] = set()
        self._counted = 0
        self._storages: dict[int, tuple[Tensor, int]] = {}
        self._needs: list[bool] = []

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        inputs = _tensors((args, kwargs))
        # a layer's nodes lie between its output and these
        self._nodes.update(tensor.grad_fn for tensor in inputs if tensor.grad_fn is not None)
        self._storages = {
            tensor.untyped_storage().data_ptr(): (tensor, tensor._version) for tensor in inputs
        }
        self._needs = [
            tensor.requires_grad for tensor in inputs
        ]  # now: a call in place would change it
        self._counted = self.counter.get_total_flops()

    def after(self, name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        layer = self._layers.setdefault(
            name, _Traced(name, type(module).__name__, _dimensions(module))
        )
        self._charge(layer)
        inputs, outputs = _tensors((args, kwargs)), _tensors(output)
        for parameter in module.parameters(recurse=False):
            if parameter not in self._claimed:
                self._claimed.add(parameter)
                layer.parameters.append(parameter)
        if isinstance(module, nn.Linear):
            layer.rows = max(layer.rows or 0, inputs[0].numel() // module.in_features)
        self._tag(layer, outputs)
        if all(self._is_view(tensor) for tensor in outputs):
            return
        backward = any(tensor.requires_grad for tensor in outputs)
        weights = list(module.parameters(recurse=False))
        reads_input = backward and (not weights or any(weight.requires_grad for weight in weights))
        for tensor, needs_gradient in zip(inputs, self._needs, strict=True):
            layer.counts["inputs"] += self._bytes(tensor) * (
                1 + reads_input + (backward and needs_gradient)
            )
        layer.counts["outputs"] += sum(
            self._bytes(tensor) * (1 + tensor.requires_grad) for tensor in outputs
        )
        layer.passes_gradient |= backward and any(self._needs)

    def layers(self, parameters: Iterable[nn.Parameter]) -> list[_Traced]:
        found = list(self._layers.values())
        for layer in found:
            moved = (
                self._bytes(p) * (1 + layer.passes_gradient + (p.grad is not None))
                for p in layer.parameters
            )
            layer.counts["weights"] = sum(moved)
        rest = _Traced(OUTSIDE, "")
        rest.counts["flops"] = self.counter.get_total_flops() - sum(
            layer.counts["flops"] for layer in found
        )
        others = [p for p in parameters if p not in self._claimed and p.grad is not None]
        rest.counts["weights"] = sum(3 * self._bytes(parameter) for parameter in others)
        return [*found, rest]

    def _bytes(self, tensor: Tensor) -> int:
        return tensor.numel() * (
            self._width if tensor.is_floating_point() else tensor.element_size()
        )

    def _is_view(self, tensor: Tensor) -> bool:
        source, version = self._storages.get(tensor.untyped_storage().data_ptr(), (None, 0))
        return source is not None and source._version == version

    def _tag(self, layer: _Traced, outputs: list[Tensor]) -> None:
        stack = [tensor.grad_fn for tensor in outputs]
        while stack:
            node = stack.pop()
            if node is None or node in self._nodes or hasattr(node, "variable"):
                continue
            self._nodes.add(node)
            node.register_prehook(self._enter)
            node.register_hook(lambda *gradients, layer=layer: self._charge(layer))
            stack.extend(following for following, _ in node.next_functions)

    def _enter(self, gradients: Any) -> None:
        self._counted = self.counter.get_total_flops()

    def _charge(self, layer: _Traced) -> None:
        total = self.counter.get_total_flops()
        layer.counts["flops"] += total - self._counted
        self._counted = total


def _convolution_backward(
    gradient: torch.Size, x: torch.Size, weight: torch.Size, *arguments: Any, **others: Any
) -> int:
    """Return FLOPs of the gradients that are asked for: torch's own count multiplies the weight's by the groups."""
    transposed, needs = arguments[4], arguments[7]
    positions = math.prod(x if transposed else gradient)
    return int(2 * positions * math.prod(weight[1:]) * (needs[0] + needs[1]))


FLOP_FORMULAS = {torch.ops.aten.convolution_backward: _convolution_backward}


def _tensors(values: Any) -> list[Tensor]:
    return [
        leaf
        for leaf in tree_leaves(values)
        if isinstance(leaf, Tensor) and leaf.layout == torch.strided
    ]


def _dimensions(module: nn.Module) -> tuple[tuple[str, int], ...]:
    if isinstance(module, nn.Linear):
        return ("in_features", module.in_features), ("out_features", module.out_features)
    if isinstance(module, nn.modules.conv._ConvNd) and not 1 < module.groups == module.in_channels:
        groups = module.groups
        return ("in_channels", module.in_channels // groups), (
            "out_channels",
            module.out_channels // groups,
        )
    return ()


@dataclass(frozen=True)
class TensorCoreMisalignment:
    """A dimension that misses the tensor cores' multiple, and what padding it is predicted to give."""

    name: str
    kind: str
    dimension: str  # in_features, out_features, in_channels, out_channels or batch (in examples)
    size: int
    padded: int  # the next size that is aligned
    # Throughput with it over that as it is, by the roofline; None: the rate of misaligned products is not known.
    predicted_gain: float | None


def misalignments(
    cost: StepCost, limits: DeviceLimits, multiple: int, batch_size: int
) -> list[TensorCoreMisalignment]:
    """Return the dimensions that miss :func:`tensor_core_multiple` at a batch size, with what padding would give."""
    rows = []
    for layer in cost.layers:
        sizes = [(*dimension, multiple) for dimension in layer.dimensions]
        if layer.rows_per_example is not None:
            sizes.append(
                ("batch", batch_size, multiple // math.gcd(multiple, layer.rows_per_example))
            )
        for dimension, size, step in sizes:
            padded = -(-size // step) * step
            if padded != size:
                gain = _gain(layer, dimension, padded / size, limits, batch_size)
                rows.append(
                    TensorCoreMisalignment(layer.name, layer.kind, dimension, size, padded, gain)
                )
    return rows


def _gain(
    layer: LayerCost, dimension: str, factor: float, limits: DeviceLimits, batch_size: int
) -> float | None:
    """Return the layer's examples/s with a dimension padded by a factor over those as it is, misaligned."""
    if limits.misaligned_flops_per_second is None:
        return None
    seconds = layer_seconds(
        layer, replace(limits, flops_per_second=limits.misaligned_flops_per_second), batch_size
    )
    if dimension == "batch":
        return factor * seconds / layer_seconds(layer, limits, batch_size * factor)
    side = "inputs" if dimension.startswith("in_") else "outputs"
    padded = replace(
        layer, **{name: getattr(layer, name) * factor for name in ("flops", "weights", side)}
    )
    return seconds / layer_seconds(padded, limits, batch_size)
