"""The gain of padding a layer whose dimensions miss the multiple that tensor cores take.

NVIDIA's guide to matrix products asks for dimensions in multiples of 16 bytes: 8 in 16 bits, 4 in
tf32. The survey of a workload names the layers that miss it, and predicts the gain of padding by
the roofline. Here each of them is timed alone, forward and backward, as it is and padded, in turns.
Weights and inputs are random, in the arithmetic's type. A layer's timings are kept as they end
(:mod:`bstune.sweeps.unit_log`).
"""

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np
import torch
from pydantic import TypeAdapter
from torch import Tensor, nn
from torch.utils.benchmark import Timer

from bstune.config import Composed
from bstune.core.errors import ConfigError
from bstune.core.records import TrialProtocol, TrialSpec
from bstune.hardware import roofline
from bstune.hardware.roofline import DTYPES, Arithmetic, TensorCoreMisalignment
from bstune.options import StudyOptions
from bstune.report.drawing import BLUE, INK
from bstune.sweeps.harness import Finding
from bstune.sweeps.statistics import QUARTILES
from bstune.sweeps.unit_log import UnitLog, UnitPlan, check_only
from bstune.system.console import format_number, plural
from bstune.trial.checks.start import at_start
from bstune.trial.devices.device import device_name, device_of, products_in, synchronize
from bstune.trial.loop import Workload
from bstune.trial.workload import load_workload, on_device, resolve

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PADDING_FIGURE_INCHES = (9.0, 4.5)
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
# The seconds of a layer as it is and padded, in each round.
READ_TIMES = TypeAdapter(list[tuple[float, float]])
CONVOLUTION_OPTIONS = ("kernel_size", "stride", "padding", "dilation", "groups", "padding_mode")


class PaddingRow(TypedDict):
    """A layer's throughput when padded over that as it is: median and quartiles over rounds.

    ``seconds`` are those of a pass, forward and backward, of the layer as it is.
    """

    layer: str
    kind: str
    dimension: str
    size: int
    padded: int
    rounds: int
    seconds: float
    gain: float
    gain_low: float
    gain_high: float


def run(
    composed: Composed,
    log: UnitLog,
    *,
    batch_size: int,
    multiple: int | None,
    rounds: int,
    seconds: float,
    lr: float,
    only: list[str],
    clock: Callable[[], float] = time.perf_counter,
) -> Finding:
    """Time each layer with a dimension that is no multiple of ``multiple``, as it is and padded.

    Args:
        composed: the workload.
        log: keeps the timings.
        batch_size: of the layers' inputs.
        multiple: that dimensions should be of; None: the one that the device's tensor cores take.
        rounds: the number of rounds.
        seconds: how long either form of a layer is timed in a round.
        lr: with which the module is built.
        only: the dimensions to time now; empty: all.
        clock: in seconds; tests replace it.
    """
    _check_positive(
        {
            "batch_size": batch_size,
            "rounds": rounds,
            "seconds": seconds,
            "lr": lr,
            "multiple": multiple,
        }
    )
    options, recipe = resolve(composed.options, composed.trained_recipe)
    workload, protocol = load_workload(options, recipe)
    misaligned = _find_misaligned(options, workload, protocol, batch_size, multiple, lr)
    check_only(only, list(misaligned.dimensions))
    device_text = device_name(protocol.trainer, protocol.devices)
    log.begin(device_text, ())

    # A dimension's name is LAYER/DIMENSION.
    def time_layer(name: str) -> list[tuple[float, float]]:
        row = misaligned.dimensions[name]
        layer = misaligned.module.get_submodule(row.name)
        with products_in(tf32=misaligned.arithmetic == "tf32"):
            return padding_times(
                layer,
                row,
                misaligned.shapes[row.name],
                device_of(protocol.trainer),
                misaligned.arithmetic,
                rounds,
                seconds,
                clock,
            )

    plan = UnitPlan(
        names=list(misaligned.dimensions),
        only=only,
        noun="dimension",
        read=READ_TIMES.validate_python,
    )
    times = log.measure(plan, time_layer)
    log.check_finished(plan.names, times)
    rows = [row_of(row, times[name]) for name, row in misaligned.dimensions.items()]
    title = (
        f"{options.workload.name} at B = {batch_size} in {misaligned.arithmetic}, multiples of "
        f"{misaligned.multiple}, {device_text}"
    )
    return Finding(
        sentence=sentence(rows, rounds),
        rows=rows,
        n=rounds,
        device=device_text,
        paint=functools.partial(_paint_gains, rows, title),
        inches=PADDING_FIGURE_INCHES,
        details={"arithmetic": misaligned.arithmetic, "multiple": misaligned.multiple},
    )


@dataclass(frozen=True)
class _Misaligned:
    """The dimensions of a module's layers that miss the multiple, and what timing them takes."""

    module: nn.Module
    arithmetic: Arithmetic
    multiple: int
    # The shape of each layer's input, by the layer's name.
    shapes: Mapping[str, tuple[int, ...]]
    # The dimensions that can be timed, by LAYER/DIMENSION.
    dimensions: Mapping[str, TensorCoreMisalignment]


def _find_misaligned(
    options: StudyOptions,
    workload: Workload,
    protocol: TrialProtocol,
    batch_size: int,
    multiple: int | None,
    lr: float,
) -> _Misaligned:
    """Trace a step of the workload, and find the layers' dimensions that are no multiple.

    Args:
        options: of the study.
        workload: whose layers are traced.
        protocol: of its trials.
        batch_size: of the layers' inputs.
        multiple: that dimensions should be of; None: the one that the device's tensor cores take.
        lr: with which the module is built.
    """
    first = TrialSpec(number=0, trial_index=0, batch_size=batch_size, lr=lr, delta=None, seed=0)
    module, trainer = at_start(workload, first, protocol)
    # Layers are traced as they train, with the trainer's casts.
    device = device_of(protocol.trainer)
    module = module.to(device).train()
    precision = trainer.precision_plugin

    def draw(size: int) -> Any:
        spec = TrialSpec(number=0, trial_index=0, batch_size=size, lr=lr, delta=None, seed=0)
        return on_device(workload, module, next(iter(workload.train_batches(spec))), device)

    def loss(module: Any, batch: Any) -> Tensor:
        with precision.train_step_context():
            return roofline.training_loss(module, precision.convert_input(batch))

    convolves = roofline.is_convolutional(module)
    arithmetic = roofline.arithmetic_of(options.precision, device, convolves)
    multiple = multiple or roofline.tensor_core_multiple(arithmetic, device.type)
    if multiple is None:
        raise ConfigError(
            f"{arithmetic} on {device.type} does not run on tensor cores, which ask for a "
            "multiple: give another precision, or a multiple with sweep.experiment.multiple=8"
        )
    sizes = options.hardware.ceilings.traced_batch_sizes
    cost = roofline.step_cost(module, draw, loss, arithmetic, sizes)
    # Shapes are taken at the first traced batch size, and scaled to the wanted one.
    shapes = input_shapes(module, draw(sizes[0]), loss, batch_size / sizes[0])
    # The device's limits predict a gain, which is not used here: any limits do.
    limits = roofline.DeviceLimits(dtype=arithmetic, flops_per_second=1.0, bytes_per_second=1.0)
    misalignments = roofline.misalignments(cost, limits, multiple, batch_size)
    dimensions = _can_be_timed(misalignments, module, shapes)
    return _Misaligned(module, arithmetic, multiple, shapes, dimensions)


def _can_be_timed(
    misalignments: Sequence[TensorCoreMisalignment],
    module: nn.Module,
    shapes: Mapping[str, tuple[int, ...]],
) -> dict[str, TensorCoreMisalignment]:
    """Keep the misaligned dimensions of layers that can be timed alone, by ``LAYER/DIMENSION``.

    ``shapes`` has the shape of each layer's input: a layer that no pass reaches has none.
    """
    misaligned = dict[str, TensorCoreMisalignment]()
    for row in misalignments:
        can_be_made_anew = layer_like(module.get_submodule(row.name), {}) is not None
        if row.name in shapes and can_be_made_anew:
            misaligned[f"{row.name}/{row.dimension}"] = row
    return misaligned


def _check_positive(values: Mapping[str, float | None]) -> None:
    """Refuse values that are not positive; None is left out."""
    for name, value in values.items():
        if value is not None and not value > 0:
            raise ConfigError(f"sweep.experiment.{name} must be positive, but got {value}")


def input_shapes(
    module: nn.Module, batch: Any, loss: Callable[[Any, Any], Tensor], factor: float
) -> dict[str, tuple[int, ...]]:
    """Give the shape of each layer's first input, by the layer's name, for a larger batch.

    The larger batch is ``factor`` times ``batch``, which is passed through the module once without
    gradients. For a layer that is called several times it is the shape of the last call.
    """
    shapes: dict[str, tuple[int, ...]] = {}

    def note(name: str, layer: nn.Module, inputs: tuple[Any, ...]) -> None:
        if inputs and isinstance(inputs[0], Tensor) and inputs[0].dim():
            shapes[name] = (round(len(inputs[0]) * factor), *inputs[0].shape[1:])

    with ExitStack() as hooks, torch.no_grad():
        for name, layer in module.named_modules():
            # Only leaves are timed, not containers.
            if next(layer.children(), None) is None:
                hooks.enter_context(layer.register_forward_pre_hook(functools.partial(note, name)))
        loss(module, batch)
    return shapes


def layer_like(layer: nn.Module, changes: Mapping[str, int]) -> nn.Module | None:
    """Make a new Linear or convolution like a layer, with other sizes of some dimensions.

    ``changes`` has sizes by ``in_features``, ``out_features``, ``in_channels`` or ``out_channels``;
    other names change nothing. The channels of a grouped convolution are those of one group. None
    if the layer is of another kind.
    """
    has_bias = getattr(layer, "bias", None) is not None
    if isinstance(layer, nn.Linear):
        inputs = changes.get("in_features", layer.in_features)
        outputs = changes.get("out_features", layer.out_features)
        return nn.Linear(inputs, outputs, has_bias)
    for kind in CONVOLUTIONS:
        if isinstance(layer, kind):
            options = {name: getattr(layer, name) for name in CONVOLUTION_OPTIONS}
            for name in ("in_channels", "out_channels"):
                size = changes.get(name, getattr(layer, name) // layer.groups)
                options[name] = layer.groups * size
            return kind(**options, bias=has_bias)
    return None


def padded_shape(row: TensorCoreMisalignment, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Give the shape of a layer's input once the dimension of ``row`` is padded."""
    place = {"batch": 0, "in_features": -1, "in_channels": 1}.get(row.dimension)
    padded = list(shape)
    # A padded output does not change the input's shape. The input grows in proportion: an example
    # may have several rows, and the channels of a grouped convolution are those of one group.
    if place is not None:
        padded[place] = shape[place] * row.padded // row.size
    return tuple(padded)


def padding_times(
    layer: nn.Module,
    row: TensorCoreMisalignment,
    shape: tuple[int, ...],
    device: torch.device,
    arithmetic: Arithmetic,
    rounds: int,
    seconds: float,
    clock: Callable[[], float],
) -> list[tuple[float, float]]:
    """Time forward and backward passes of a layer as it is and padded, in turns.

    Args:
        layer: the workload's own, which is not changed.
        row: says which dimension is padded.
        shape: of the layer's input.
        device: on which it runs.
        arithmetic: the type of weights and inputs.
        rounds: the number of rounds.
        seconds: how long either form is timed in a round.
        clock: in seconds; tests replace it.

    Returns:
        The seconds of a pass as the layer is and padded, for each round.
    """

    def read() -> float:
        synchronize(device)
        return clock()

    def timer(layer: nn.Module, shape: tuple[int, ...]) -> Timer:
        x = torch.randn(shape, device=device).to(DTYPES[arithmetic])
        layer = layer.to(device, DTYPES[arithmetic])
        if len(shape) == 4:
            # Convolutions of this format reach tensor cores without a copy.
            x = x.contiguous(memory_format=torch.channels_last)
            layer = layer.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        x.requires_grad_()
        # There is no loss, whose own time would be part of both.
        gradient = torch.randn_like(layer(x))
        call = "x.grad = None; layer.zero_grad(); layer(x).backward(gradient)"
        names = {"x": x, "layer": layer, "gradient": gradient}
        return Timer(call, timer=read, globals=names, num_threads=torch.get_num_threads())

    # Both are new layers, without the workload's hooks and memory format.
    plain = layer_like(layer, {})
    padded = layer_like(layer, {row.dimension: row.padded})
    if plain is None or padded is None:
        raise TypeError(f"{row.name} is no Linear and no convolution, but {type(layer).__name__}")
    timers = (timer(plain, shape), timer(padded, padded_shape(row, shape)))
    times = list[tuple[float, float]]()
    for number in range(rounds):
        # The two forms take turns at being first: neither is always timed on the warmer device.
        order = (0, 1) if number % 2 == 0 else (1, 0)
        seconds_of_forms = [0.0, 0.0]
        for form in order:
            timed = timers[form].blocked_autorange(min_run_time=seconds)
            seconds_of_forms[form] = timed.median
        times.append((seconds_of_forms[0], seconds_of_forms[1]))
    return times


def row_of(row: TensorCoreMisalignment, times: list[tuple[float, float]]) -> PaddingRow:
    """Make the row of a dimension: how many times its throughput the layer has once it is padded.

    It has the median and the quartiles over rounds. ``times`` has the seconds of a pass of the
    layer as it is, and padded, for each round.
    """
    seconds_as_is, seconds_padded = np.array(times).T
    # A padded batch has more examples, which count as work. Features and channels that a layer is
    # padded with are of no use.
    useful_work = 1.0
    if row.dimension == "batch":
        useful_work = row.padded / row.size
    low, middle, high = np.quantile(useful_work * seconds_as_is / seconds_padded, QUARTILES)
    return {
        "layer": row.name,
        "kind": row.kind,
        "dimension": row.dimension,
        "size": row.size,
        "padded": row.padded,
        "rounds": len(times),
        "seconds": float(np.median(seconds_as_is)),
        "gain": float(middle),
        "gain_low": float(low),
        "gain_high": float(high),
    }


def sentence(rows: Sequence[PaddingRow], rounds: int) -> str:
    """Say how many dimensions padding makes faster, and which one gains most."""
    if not rows:
        return "Every layer that can be padded is aligned: there is nothing to time."
    best = max(rows, key=lambda row: row["gain"])
    # The lower quartile decides: a median alone is over 1 by chance half of the time.
    faster = sum(row["gain_low"] > 1.0 for row in rows)
    return (
        f"Padding makes {faster} of {plural(len(rows), 'dimension')} faster by the lower quartile; "
        f"{best['layer']} gains most, {format_number(best['gain'])} times its throughput with "
        f"{best['dimension']} {best['padded']} for {best['size']} (medians, n = {rounds})."
    )


def _paint_gains(rows: Sequence[PaddingRow], title: str, figure: "Figure") -> None:
    """Draw a bar for each dimension, with its quartiles."""
    axes = figure.subplots()
    names = list[str]()
    gains = list[float]()
    below = list[float]()
    above = list[float]()
    for row in rows:
        names.append(f"{row['layer']}\n{row['dimension']} {row['size']}")
        gains.append(row["gain"])
        below.append(row["gain"] - row["gain_low"])
        above.append(row["gain_high"] - row["gain"])
    axes.barh(names, gains, xerr=[below, above], color=BLUE, ecolor=INK, capsize=3.0)
    axes.axvline(1.0, color=INK, linewidth=0.9, linestyle="--")
    axes.set_xlabel("throughput when padded over that as it is, median and quartiles")
    axes.set_title(title, fontsize=10.5, parse_math=False)
