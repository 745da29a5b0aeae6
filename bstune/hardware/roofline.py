"""The roofline of a workload on a device: the device's limits, a step's cost, and what they allow.

Williams et al. 2009, "Roofline: an insightful visual performance model for multicore
architectures": attainable FLOP/s = min(peak FLOP/s, bytes/s x intensity); the two meet at the
ridge. The limits are measured by matrix products in the trial's precision and copies in the
device's memory: a share of peak is not one of the vendor's figure.

FLOPs of a step are those that ``torch.utils.flop_counter`` finds, forward and backward, in
products, convolutions and attention. Bytes follow from the shapes of that step. Assumptions:

1. Each tensor moves once a use, and nothing stays in a cache between layers. Forward, a layer reads
   its input and weights and writes its output. Backward, it reads the gradient of its output, its
   input (unless all of its weights are frozen) and, where its input needs a gradient, its weights;
   it writes the gradients of what needs one.
2. A layer is a module without children. One that is called several times in a step moves its
   weights once a pass; a weight that several layers share is counted in the first of them. A view
   (Flatten) moves nothing.
3. Every floating-point tensor is as wide as the device limits' dtype; mixed precision keeps some
   wider.
4. What happens between the layers (additions of residual branches, functional calls) is seen only
   in its FLOPs and in the weights that it uses, as the layer ``OUTSIDE``. The optimizer's update is
   left out.
"""

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from bstune.core.errors import HardwareError
from bstune.system.failures import place_of
from bstune.trial.devices.device import convolutions_in_tf32, products_in_tf32

TracedModule = TypeVar("TracedModule", bound=nn.Module)
Batch = TypeVar("Batch")

Arithmetic = Literal["fp64", "fp32", "tf32", "bf16", "fp16"]
DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "tf32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
# By Lightning's name of a precision, without -true or -mixed.
ARITHMETICS: dict[str, Arithmetic] = {"32": "fp32", "16": "fp16", "bf16": "bf16"}
# The compute capability from which on a device has tf32: Ampere's.
TF32_CAPABILITY = 8
# Multiples of 16 bytes. fp32 has none, whatever other sources ask for (16, say): without tf32 its
# products do not run on tensor cores at all.
TENSOR_CORE_MULTIPLES = {"tf32": 4, "bf16": 8, "fp16": 8}
TENSOR_CORE_SOURCE = "NVIDIA, Matrix Multiplication Background, table 1"


@dataclass(frozen=True)
class DeviceLimits:
    """What a device can do at most, as measured."""

    dtype: Arithmetic
    """The arithmetic of the matrix products."""
    flops_per_second: float
    """The rate of the best matrix product."""
    bytes_per_second: float
    """The rate of the best copy; each byte copied counts twice, read and written."""
    misaligned_flops_per_second: float | None = None
    """The rate of the best product whose sides miss the tensor cores' multiple by one.

    None where no such product was measured.
    """

    @property
    def ridge(self) -> float:
        """FLOPs per byte above which the device computes longer than it moves bytes."""
        return self.flops_per_second / self.bytes_per_second


def arithmetic_of(precision: str, device: torch.device, convolves: bool) -> Arithmetic:
    """Give the arithmetic of a network's products under a precision, such as ``bf16-mixed``.

    On a device with tf32, products under fp32 may be in tf32. A network that ``convolves`` has most
    of its FLOPs in convolutions, which cuDNN computes in tf32 by default. Matrix products are in
    tf32 if PyTorch is set to that.
    """
    name = ARITHMETICS[precision.partition("-")[0]]
    if name != "fp32" or device.type != "cuda":
        return name
    if torch.cuda.get_device_capability(device)[0] < TF32_CAPABILITY:
        return name
    is_in_tf32 = convolutions_in_tf32() if convolves else products_in_tf32()
    return "tf32" if is_in_tf32 else name


def is_convolutional(module: nn.Module) -> bool:
    """Whether a module has a convolution in it."""
    return any(isinstance(part, nn.modules.conv._ConvNd) for part in module.modules())


def tensor_core_multiple(arithmetic: str, device_type: str) -> int | None:
    """Give the number that dimensions should be multiples of for tensor cores.

    It is 8 in 16 bits and 4 in tf32; None where any dimension is as good.
    """
    if device_type != "cuda":
        return None
    return TENSOR_CORE_MULTIPLES.get(arithmetic)


# The name of a step's cost that no layer has.
OUTSIDE = "(between layers)"


@dataclass(frozen=True)
class AffineCost:
    """A cost over batch size: constant + per_example B."""

    constant: float
    per_example: float

    def at(self, batch_size: float) -> float:
        """Give the cost at ``batch_size``."""
        return self.constant + self.per_example * batch_size

    def __mul__(self, factor: float) -> "AffineCost":
        return AffineCost(self.constant * factor, self.per_example * factor)

    def __add__(self, other: "AffineCost") -> "AffineCost":
        return AffineCost(self.constant + other.constant, self.per_example + other.per_example)


@dataclass(frozen=True)
class LayerCost:
    """The cost of one layer in a training step, forward and backward."""

    name: str
    """Its path in the module; ``OUTSIDE`` for what lies between layers."""
    kind: str
    """The name of its class."""
    flops: AffineCost
    """Its FLOPs in a step."""
    inputs: AffineCost
    """Bytes moved of its inputs and of their gradients."""
    outputs: AffineCost
    """Bytes moved of its outputs and of their gradients."""
    weights: AffineCost
    """Bytes moved of its weights and of their gradients."""
    dimensions: tuple[tuple[str, int], ...] = ()
    """Those of NVIDIA's guides to tensor cores: features of a Linear, channels of a group of a
    convolution that is not depthwise."""
    rows_per_example: int | None = None
    """The rows of a Linear's product that an example makes; None for other layers."""

    @property
    def bytes(self) -> AffineCost:
        """Bytes that the layer moves."""
        return self.inputs + self.outputs + self.weights


@dataclass(frozen=True)
class StepCost:
    """The cost of a training step."""

    layers: tuple[LayerCost, ...]
    """In the order of their first call, without those of no FLOPs and no bytes."""
    superlinear: tuple[str, ...]
    """Layers whose cost grows faster than the batch (a loss over pairs, say): the line through 0
    and the larger traced batch stands for it."""

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
    """Examples of the step."""
    share_of_peak: float
    """FLOP/s over the device's."""
    share_of_roofline: float
    """Allowed over measured seconds; above 1 where tensors stay in caches between layers."""
    intensity: float
    """FLOPs per byte moved."""


class Trainable(Protocol):
    """A module with a step of training, as a LightningModule is."""

    @property
    def training_step(self) -> Callable[..., Any]:
        """Takes a batch and its number."""


def training_loss(module: Trainable, batch: object, index: int = 0) -> Tensor:
    """Run a LightningModule's ``training_step`` outside a Trainer and give its loss.

    HardwareError if it asks for a Trainer, steps its optimizers itself or returns no loss.
    """
    step = f"{type(module).__name__}.training_step{place_of(module.training_step)}"
    if not getattr(module, "automatic_optimization", True):
        raise HardwareError(
            f"{step} steps its optimizers itself (manual optimization), and a step's cost is "
            "traced by the loss that Lightning would go back from"
        )
    try:
        output = module.training_step(batch, index)
    except RuntimeError as error:
        if "not attached to a `Trainer`" not in str(error):
            raise
        raise HardwareError(
            f"{step} asks for its Trainer, so it cannot be run without one: let it take what it "
            "needs of the Trainer in a hook, such as on_train_start"
        ) from error
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if not isinstance(loss, Tensor):
        raise HardwareError(f"{step} returned no loss for a batch, as a step that is to be skipped")
    return loss


def step_cost(
    module: TracedModule,
    make_batch: Callable[[int], Batch],
    loss: Callable[[TracedModule, Batch], Tensor],
    arithmetic: Arithmetic,
    batch_sizes: Sequence[int] = (2, 4),
) -> StepCost:
    """Trace a training step at two batch sizes, and give its cost over batch size.

    The cost of each layer is a line through both. The module is left with gradients of the step.

    Args:
        module: on the device, in training mode.
        make_batch: makes a batch of a size.
        loss: runs a step, and gives its loss.
        arithmetic: says how wide floating-point tensors count.
        batch_sizes: two sizes, the smaller one first.

    Raises:
        HardwareError: where no FLOPs are found.
    """
    if len(batch_sizes) != 2 or not 1 <= batch_sizes[0] < batch_sizes[1]:
        raise HardwareError(
            f"hardware.ceilings.traced_batch_sizes must be two rising sizes, but got {batch_sizes}"
        )
    width = DTYPES[arithmetic].itemsize
    small, large = batch_sizes
    at_small = _trace(module, make_batch(small), loss, width)
    at_large = _trace(module, make_batch(large), loss, width)
    if not any(layer.counts["flops"] for layer in at_large):
        raise HardwareError(
            "the FLOP counter found none in a training step: the roofline needs a model with "
            "products, convolutions or attention that PyTorch runs itself"
        )
    layers = list[LayerCost]()
    superlinear = list[str]()
    small_layers = {layer.name: layer for layer in at_small}
    for layer in at_large:
        if not any(layer.counts.values()):
            continue
        # A layer that the smaller batch did not call is taken to cost the same at any batch size.
        small_layer = small_layers.get(layer.name, layer)
        costs = dict[str, AffineCost]()
        for name, count in layer.counts.items():
            small_count = small_layer.counts[name]
            slope = (count - small_count) / (large - small)
            constant = small_count - slope * small
            costs[name] = AffineCost(constant, slope)
            # A count that rises faster than the batch, as of attention over the batch, has no such
            # line: it is taken as in proportion to the batch size, from the larger one.
            if constant < 0.0:
                costs[name] = AffineCost(0.0, count / large)
                superlinear.append(layer.name)
        rows: int | None = None
        if layer.rows is not None:
            rows = max(1, round(layer.rows / large))
        layers.append(
            LayerCost(
                layer.name, layer.kind, **costs, dimensions=layer.dimensions, rows_per_example=rows
            )
        )
    return StepCost(tuple(layers), tuple(dict.fromkeys(superlinear)))


def intensity(cost: LayerCost | StepCost, batch_size: float) -> float:
    """Give FLOPs per byte at ``batch_size``."""
    return cost.flops.at(batch_size) / cost.bytes.at(batch_size)


def in_width(cost: StepCost, factor: float) -> StepCost:
    """Give the cost with tensors ``factor`` times as wide, such as 0.5 for fp32 in 16 bits.

    Tensors of whole numbers are scaled with the others.
    """
    layers = list[LayerCost]()
    for layer in cost.layers:
        scaled = replace(
            layer,
            inputs=layer.inputs * factor,
            outputs=layer.outputs * factor,
            weights=layer.weights * factor,
        )
        layers.append(scaled)
    return replace(cost, layers=tuple(layers))


def turning_batch_size(cost: LayerCost | StepCost, ridge: float) -> float | None:
    """Give the batch size from which on the cost is compute-bound, at least 1; None if it never is.

    There F(B)/bytes(B) = ridge: with F = f + F' B and bytes = a + b B, it is
    B = (ridge a - f)/(F' - ridge b).
    """
    # F' - ridge b: without a rise the FLOPs never catch up with the bytes.
    rise = cost.flops.per_example - ridge * cost.bytes.per_example
    if rise <= 0.0:
        return None
    return max(1.0, (ridge * cost.bytes.constant - cost.flops.constant) / rise)


def allowed_seconds(cost: StepCost, limits: DeviceLimits, batch_size: float) -> float:
    """Give the seconds that the roofline allows for a step: the sum of :func:`layer_seconds`."""
    return sum(layer_seconds(layer, limits, batch_size) for layer in cost.layers)


def layer_seconds(layer: LayerCost, limits: DeviceLimits, batch_size: float) -> float:
    """Give the seconds of a layer at the device's limits: of its FLOPs, or of its bytes if more."""
    computing = layer.flops.at(batch_size) / limits.flops_per_second
    moving = layer.bytes.at(batch_size) / limits.bytes_per_second
    return max(computing, moving)


@dataclass
class _Traced:
    """One layer in one traced step."""

    name: str
    kind: str
    dimensions: tuple[tuple[str, int], ...] = ()
    counts: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(("flops", "inputs", "outputs", "weights"), 0)
    )
    """FLOPs and bytes, as in :class:`LayerCost`."""
    rows: int | None = None
    """The rows of a Linear's product, over the whole batch; None for other layers."""
    parameters: list[nn.Parameter] = field(default_factory=list)
    """Its parameters, without those that a layer before it has, too."""
    passes_gradient: bool = False
    """Whether its input gets a gradient."""


def _trace(
    module: TracedModule, batch: Batch, loss: Callable[[TracedModule, Batch], Tensor], width: int
) -> list[_Traced]:
    """Run one training step, and give the FLOPs and bytes of its layers.

    They are in the order of their first call. The last one, ``OUTSIDE``, has what runs between the
    layers. ``width`` is the bytes of a floating-point number.
    """
    tracer = _Tracer(width)
    with ExitStack() as hooks:
        for name, layer in module.named_modules():
            # A module with children is counted by these.
            if not list(layer.children()):
                after = functools.partial(tracer.after, name)
                before_hook = layer.register_forward_pre_hook(tracer.before, with_kwargs=True)
                after_hook = layer.register_forward_hook(after, with_kwargs=True)
                hooks.enter_context(before_hook)
                hooks.enter_context(after_hook)
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
    """Hooks that charge FLOPs and bytes to the layer that runs.

    In the backward pass that is the layer whose call made the autograd node. (torch's own module
    tracker lets a layer whose input needs no gradient run until the end of the pass.)
    """

    def __init__(self, width: int) -> None:
        """Trace tensors whose floating-point elements have ``width`` bytes."""
        self.counter = FlopCounterMode(display=False, custom_mapping=FLOP_FORMULAS)
        self._width = width
        self._layers: dict[str, _Traced] = {}
        # The autograd nodes of all layers so far, and of their inputs.
        self._nodes: set[Node] = set()
        # The parameters that some layer has already: a shared one counts in the first of them.
        self._claimed: set[nn.Parameter] = set()
        # FLOPs that are charged already, or were counted outside of layers.
        self._counted = 0
        # The inputs of the running layer, by the address of their storage. Their versions, which
        # writing in place raises, are those before the call.
        self._storages: dict[int, tuple[Tensor, int]] = {}
        # Whether the running layer's inputs need a gradient.
        self._needs_gradient: list[bool] = []

    def before(self, module: nn.Module, args: object, kwargs: object) -> None:
        """Note a layer's inputs as they are before its call, which may change them in place."""
        self._storages = {}
        self._needs_gradient = []
        for tensor in _tensors((args, kwargs)):
            # The walk back from the layer's outputs ends at these nodes, which are not its own.
            if tensor.grad_fn is not None:
                self._nodes.add(tensor.grad_fn)
            # An output in the same storage is a view of this input, and moves no bytes.
            self._storages[tensor.untyped_storage().data_ptr()] = (tensor, tensor._version)
            self._needs_gradient.append(tensor.requires_grad)
        # FLOPs between the last layer and this one count for neither.
        self._counted = self.counter.get_total_flops()

    def after(
        self, name: str, module: nn.Module, args: object, kwargs: object, output: object
    ) -> None:
        """Charge a call's FLOPs and bytes to its layer, and mark the call's autograd nodes."""
        layer = self._layers.setdefault(
            name, _Traced(name, type(module).__name__, _dimensions(module))
        )
        self._charge(layer)
        inputs = _tensors((args, kwargs))
        outputs = _tensors(output)
        weights = list(module.parameters(recurse=False))
        for weight in weights:
            if weight not in self._claimed:
                self._claimed.add(weight)
                layer.parameters.append(weight)
        # Each vector of a linear layer's input makes a row of its product.
        if isinstance(module, nn.Linear):
            layer.rows = max(layer.rows or 0, inputs[0].numel() // module.in_features)
        self._tag(layer, outputs)
        # A view moves nothing.
        if all(self._is_view(tensor) for tensor in outputs):
            return
        is_frozen = bool(weights) and not any(weight.requires_grad for weight in weights)
        self._charge_bytes(layer, inputs, outputs, is_frozen)

    def _charge_bytes(
        self, layer: _Traced, inputs: list[Tensor], outputs: list[Tensor], is_frozen: bool
    ) -> None:
        """Charge to a layer the bytes of its inputs and outputs, forward and backward.

        Nothing stays in a cache between two uses of a tensor, so each use moves it.

        ``is_frozen``: whether the layer has weights, of which none is trained.
        """
        has_backward = any(tensor.requires_grad for tensor in outputs)
        # The backward pass reads the input again, but for frozen weights, which get no gradient.
        reads_input = has_backward and not is_frozen
        for tensor, needs_gradient in zip(inputs, self._needs_gradient, strict=True):
            # Read forward, read backward, its own gradient written.
            uses = 1 + reads_input + (has_backward and needs_gradient)
            layer.counts["inputs"] += self._bytes(tensor) * uses
        # An output is written forward, its gradient read backward.
        for tensor in outputs:
            layer.counts["outputs"] += self._bytes(tensor) * (1 + tensor.requires_grad)
        layer.passes_gradient |= has_backward and any(self._needs_gradient)

    def layers(self, parameters: Iterable[nn.Parameter]) -> list[_Traced]:
        """Give the layers once the step has ended, with the bytes of their weights.

        ``parameters`` are all parameters of the module.
        """
        layers = list(self._layers.values())
        outside = _Traced(OUTSIDE, "")
        outside.counts["flops"] = self.counter.get_total_flops()
        for layer in layers:
            outside.counts["flops"] -= layer.counts["flops"]
            for parameter in layer.parameters:
                # Read forward, read backward for the inputs' gradient, its own gradient written.
                uses = 1 + layer.passes_gradient + (parameter.grad is not None)
                layer.counts["weights"] += self._bytes(parameter) * uses
        for parameter in parameters:
            if parameter not in self._claimed and parameter.grad is not None:
                # Read forward and backward, and its gradient written.
                outside.counts["weights"] += 3 * self._bytes(parameter)
        return [*layers, outside]

    def _bytes(self, tensor: Tensor) -> int:
        """Give a tensor's bytes in the traced width; whole numbers keep their own width."""
        width = tensor.element_size()
        if tensor.is_floating_point():
            width = self._width
        return tensor.numel() * width

    def _is_view(self, tensor: Tensor) -> bool:
        """Whether an output is one of the inputs seen otherwise, and not written in place."""
        source, version = self._storages.get(tensor.untyped_storage().data_ptr(), (None, 0))
        return source is not None and source._version == version

    def _tag(self, layer: _Traced, outputs: list[Tensor]) -> None:
        """Have the autograd nodes between a layer's outputs and its inputs charge it backward.

        Layers are tagged in the order of the forward pass, so that the walk back from the outputs
        ends at nodes of earlier layers. Before a node runs, :meth:`_enter` leaves out the FLOPs
        since the last one; after it, those of the node are charged to its layer.
        """
        stack = [tensor.grad_fn for tensor in outputs]
        while stack:
            node = stack.pop()
            # A node with a variable adds up a parameter's gradient, and computes nothing.
            if node is None or node in self._nodes or hasattr(node, "variable"):
                continue
            self._nodes.add(node)
            node.register_prehook(self._enter)
            node.register_hook(lambda *gradients, layer=layer: self._charge(layer))
            stack.extend(following for following, _ in node.next_functions)

    def _enter(self, gradients: object) -> None:
        """Leave out the FLOPs since the last autograd node: they belong to no layer."""
        self._counted = self.counter.get_total_flops()

    def _charge(self, layer: _Traced) -> None:
        """Charge to a layer the FLOPs that were counted since the last charge."""
        total = self.counter.get_total_flops()
        layer.counts["flops"] += total - self._counted
        self._counted = total


def _convolution_backward(
    gradient: torch.Size, x: torch.Size, weight: torch.Size, *arguments: Any, **others: object
) -> int:
    """Count the FLOPs of a convolution's gradients that are asked for: of its input and its weight.

    It replaces torch's own count, which gives ``groups`` times the FLOPs of the weight's gradient.
    """
    # After bias sizes, stride, padding and dilation; then come output padding, groups and the mask
    # of the gradients that are asked for.
    is_transposed = arguments[4]
    needs_input, needs_weight, *_ = arguments[7]
    # A filter has the shape weight[1:]. Each element of the output, or of the input if the
    # convolution is transposed, takes a multiplication and an addition for each of the filter's.
    positions = math.prod(x if is_transposed else gradient)
    one_gradient = 2 * positions * math.prod(weight[1:])
    return int(one_gradient * (needs_input + needs_weight))


FLOP_FORMULAS = {torch.ops.aten.convolution_backward: _convolution_backward}


def _tensors(values: object) -> list[Tensor]:
    """Give all dense tensors in the arguments or the output of a layer, however nested."""
    tensors = list[Tensor]()
    for leaf in tree_leaves(values):
        if isinstance(leaf, Tensor) and leaf.layout == torch.strided:
            tensors.append(leaf)
    return tensors


def _dimensions(module: nn.Module) -> tuple[tuple[str, int], ...]:
    """Give the names and sizes of a layer's dimensions that tensor cores want in multiples."""
    if isinstance(module, nn.Linear):
        return ("in_features", module.in_features), ("out_features", module.out_features)
    if isinstance(module, nn.modules.conv._ConvNd):
        # A depthwise convolution, a group for each channel, has no product over channels.
        is_depthwise = module.groups > 1 and module.groups == module.in_channels
        if is_depthwise:
            return ()
        in_channels = module.in_channels // module.groups
        out_channels = module.out_channels // module.groups
        return ("in_channels", in_channels), ("out_channels", out_channels)
    return ()


@dataclass(frozen=True)
class TensorCoreMisalignment:
    """A dimension that misses the tensor cores' multiple, and what padding is predicted to give."""

    name: str
    """The layer's."""
    kind: str
    """The layer's class."""
    dimension: str
    """in_features, out_features, in_channels, out_channels or batch (in examples)."""
    size: int
    """As it is."""
    padded: int
    """The next size that is aligned."""
    predicted_gain: float | None
    """The throughput with the padded size over that as it is, by the roofline.

    None where the rate of misaligned products is not known.
    """


def misalignments(
    cost: StepCost, limits: DeviceLimits, multiple: int, batch_size: int
) -> list[TensorCoreMisalignment]:
    """Give the dimensions that miss ``multiple`` at a batch size, with the gain of padding them.

    The multiple is that of :func:`tensor_core_multiple`.
    """
    rows = list[TensorCoreMisalignment]()
    for layer in cost.layers:
        sizes = [(dimension, size, multiple) for dimension, size in layer.dimensions]
        if layer.rows_per_example is not None:
            # An example may have several rows: then fewer examples make a multiple of rows.
            of_batch_size = multiple // math.gcd(multiple, layer.rows_per_example)
            sizes.append(("batch", batch_size, of_batch_size))
        for dimension, size, needed_multiple in sizes:
            padded = -(-size // needed_multiple) * needed_multiple
            if padded != size:
                gain = _padding_gain(layer, dimension, padded / size, limits, batch_size)
                rows.append(
                    TensorCoreMisalignment(
                        name=layer.name,
                        kind=layer.kind,
                        dimension=dimension,
                        size=size,
                        padded=padded,
                        predicted_gain=gain,
                    )
                )
    return rows


def _padding_gain(
    layer: LayerCost, dimension: str, factor: float, limits: DeviceLimits, batch_size: int
) -> float | None:
    """Predict by how much padding a dimension multiplies a layer's examples a second.

    ``factor`` is the padded size over the size. None where the rate of misaligned products is not
    known.
    """
    if limits.misaligned_flops_per_second is None:
        return None
    as_is = replace(limits, flops_per_second=limits.misaligned_flops_per_second)
    seconds = layer_seconds(layer, as_is, batch_size)
    # The padded batch has so many times the examples.
    if dimension == "batch":
        return factor * seconds / layer_seconds(layer, limits, batch_size * factor)
    # Weights and FLOPs grow with a layer's input and output dimensions alike.
    padded = replace(layer, flops=layer.flops * factor, weights=layer.weights * factor)
    if dimension.startswith("in_"):
        padded = replace(padded, inputs=layer.inputs * factor)
    else:
        padded = replace(padded, outputs=layer.outputs * factor)
    return seconds / layer_seconds(padded, limits, batch_size)
