"""Layers whose dimensions miss the multiples that tensor cores take, and what padding them is predicted to give."""

import math
from dataclasses import dataclass, replace

from bstune.hardware.device_limits import DeviceLimits
from bstune.hardware.roofline import LayerCost, StepCost, check_batch_size, layer_seconds


@dataclass(frozen=True)
class Misaligned:
    """A dimension that misses the tensor cores' multiple, and what padding it is predicted to give, not measured.

    ``dimension`` is ``in_features``, ``out_features``, ``in_channels``, ``out_channels`` or ``batch`` (in examples);
    ``padded`` the next size that is aligned. ``predicted_gain`` is the layer's throughput with it over its throughput
    as it is, by the roofline, as if nothing else in it were misaligned; below 1 padding costs more than it gives. None
    where the device's rate for misaligned products is not known.
    """

    name: str
    kind: str
    dimension: str
    size: int
    padded: int
    predicted_gain: float | None


def misaligned(cost: StepCost, limits: DeviceLimits, multiple: int | None, batch_size: int) -> list[Misaligned]:
    """Return the dimensions that miss the tensor cores' multiple at ``batch_size``, with what padding would give.

    The multiples and the dimensions are those of NVIDIA's guides to linear layers and convolutions; embeddings and
    depthwise convolutions do not run there.

    ``multiple`` is :func:`bstune.hardware.device_limits.tensor_core_multiple`; None, for any size, returns none.
    HardwareError is raised for a batch size below 1.
    """
    check_batch_size(batch_size)
    rows = []
    if multiple is None:
        return []
    for layer in cost.layers:
        for dimension, size in layer.dimensions:
            if size % multiple:
                padded = -(-size // multiple) * multiple
                gain = _gain(layer, _pad(layer, dimension, padded / size), limits, batch_size, batch_size)
                rows.append(Misaligned(layer.name, layer.kind, dimension, size, padded, gain))
        if layer.rows_per_example is not None and batch_size * layer.rows_per_example % multiple:
            step = multiple // math.gcd(multiple, layer.rows_per_example)
            padded = -(-batch_size // step) * step
            gain = _gain(layer, layer, limits, batch_size, padded)
            rows.append(Misaligned(layer.name, layer.kind, "batch", batch_size, padded, gain))
    return rows


def _pad(layer: LayerCost, dimension: str, factor: float) -> LayerCost:
    side = "inputs" if dimension.startswith("in_") else "outputs"
    return replace(layer, **{name: getattr(layer, name) * factor for name in ("flops", "weights", side)})


def _gain(layer: LayerCost, padded: LayerCost, limits: DeviceLimits, now: int, then: int) -> float | None:
    """Return the examples/s of ``padded`` at batch size ``then`` over those of ``layer``, misaligned, at ``now``."""
    if limits.misaligned_flops_per_second is None:
        return None
    slow = replace(limits, flops_per_second=limits.misaligned_flops_per_second)
    return layer_seconds(layer, slow, now) / layer_seconds(padded, limits, then) * then / now
