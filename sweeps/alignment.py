"""A linear layer's step over its outputs: around multiples, and padded to one.

NVIDIA, Matrix Multiplication Background, 2.2: tensor cores are used most efficiently where
dimensions are multiples of 16 bytes, 8 numbers of 16 bits. The outputs are N of the product for the
outputs, K of that for the inputs' gradient and M of that for the weights': 6 FLOPs for each weight
and row in all.
"""

from functools import partial
from itertools import product
from pathlib import Path
from typing import Literal

import torch
from matplotlib.figure import Figure
from pandas import DataFrame
from pydantic import PositiveFloat, PositiveInt
from torch import Tensor, nn

from bstune.core.records import Frozen
from bstune.recipe.recipe import resolve_device
from bstune.study.machine import describe_machine
from bstune.sweeps.timed import Ways, timed


class Layer(Frozen):
    """A linear layer, and the numbers of outputs that it is timed with."""

    rows: PositiveInt
    """Of its input, such as examples times positions."""
    inputs: PositiveInt
    outputs: list[PositiveInt]


def run(
    output: Path,
    *,
    device: str,
    layers: list[Layer],
    dtypes: list[Literal["float32", "bfloat16", "float16"]],
    rounds: PositiveInt,
    seconds: PositiveFloat,
) -> tuple[DataFrame, Figure]:
    """Time each layer's step.

    Args:
        output: the sweep's folder.
        device: ``cpu``, ``cuda`` or ``auto``.
        layers: of different rows or inputs.
        dtypes: of weights and inputs.
        rounds, seconds: as of :func:`bstune.sweeps.timed.timed`.
    """
    machine = describe_machine(device, None)
    ways: Ways = {}
    with torch.device(resolve_device(device)):
        for layer, dtype in product(layers, dtypes):
            ways |= layer_steps(layer, dtype)
    return timed(output, machine, ways, rounds, seconds)


def layer_steps(layer: Layer, dtype: str) -> Ways:
    """Steps of a layer; each call gives the gradients of inputs, weights and biases."""
    of_dtype = getattr(torch, dtype)
    group = f"{layer.rows} rows, {layer.inputs} inputs, {dtype}, GFLOP/s"
    x = torch.randn(layer.rows, layer.inputs, dtype=of_dtype, requires_grad=True)
    ways: Ways = {}
    for outputs in layer.outputs:
        linear = nn.Linear(layer.inputs, outputs, dtype=of_dtype)
        call = partial(gradients, linear, x, torch.randn_like(linear(x)))
        ways[group, f"{outputs} outputs"] = 6e-9 * linear.weight.numel() * layer.rows, call
    return ways


def gradients(linear: nn.Linear, x: Tensor, of_outputs: Tensor) -> tuple[Tensor, ...]:
    """Pass forward and backward: the gradients of inputs, weights and biases.

    Args:
        linear: the layer.
        x: (rows, inputs).
        of_outputs: their gradient, (rows, outputs).
    """
    return torch.autograd.grad(linear(x), (x, *linear.parameters()), of_outputs)
