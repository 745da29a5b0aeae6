"""A Lightning call-back that measures the gradient noise scale in training.

It leaves the training as it was.

    # Trainer of lightning.pytorch or of pytorch_lightning
    trainer = Trainer(callbacks=[noise_scale := NoiseScale()])
    trainer.fit(module, data)
    print(noise_scale.estimate)

The arithmetic is :mod:`bstune.core.noise_scale`'s.
"""

import copy
import math
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import chain, islice, pairwise
from typing import Any, Literal, TypeGuard

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from bstune.core.errors import ConfigError, check_positive_integer
from bstune.core.interval import INTERVAL_LEVEL
from bstune.core.noise_scale import (
    MIN_BLOCKS,
    WINDOW,
    GradientNorms,
    NoiseScaleEstimate,
    combine_norms,
    estimate_noise_scale,
    moving_estimate,
)
from bstune.trial.devices.randomness import random_state, set_random_state
from bstune.trial.lightning.installed import (
    Callback,
    DummyLogger,
    LightningModule,
    Trainer,
    is_param_in_hook_signature,
)

# Steps from one measurement to the next: per part of a split batch, and where norms are read. With
# steps of about 1 ms, all overhead, a split in two parts took as long as four to six steps, and
# reading the norms of four micro-batches as long as about one (tests/benchmarks/bench_noise.py).
STEPS_PER_PART = 128
STEPS_PER_READING = 32
# The strategies that can be measured, by name, as lightning.pytorch and pytorch_lightning have
# classes of their own.
STRATEGIES = ("SingleDeviceStrategy", "DDPStrategy")


class NoiseScale(Callback):
    """A Lightning call-back that measures the noise scale every few steps.

    That is B_simple = tr(Sigma)/|G|^2, in examples, over the parameters of the module's optimizer
    (:mod:`bstune.core.noise_scale` has the source).

    Where a step has several micro-batches (gradient accumulation), several devices (DDP), or both,
    the norms of their gradients are read as the backward passes make them, before DDP reduces them.
    Otherwise the step's own batch is split into parts, whose gradients are taken ahead of the step,
    beside the training. In either case they are gradients before clipping, without a gradient
    scaler's factor.

    Training stays as it was, bit for bit. A pass over a part changes no ``.grad``, and its logs are
    dropped. After it the random number generators (Python's, numpy's, torch's on CPU and the
    current CUDA device) and the attributes of the modules (buffers, metrics, numbers, tensors,
    generators, and lists, dicts and sets of them) are put back. Anything that ``training_step``
    changes elsewhere, or deeper in attributes, is changed by each pass. A pass takes at most the
    memory of a step with one more gradient. Reentrant activation checkpointing cannot be measured
    in this way.

    Normalisation layers see the micro-batch or part, so the noise is that of training with this
    ghost batch. Dropout draws a mask for each, and its noise counts as part of Sigma. The loss has
    to be a mean over the examples of its batch. Short last batches of an epoch, and micro-batches
    left over there, are passed over.

    After each measured step the loggers get, against the number of applied steps, the moving
    estimate as ``noise_scale``, ``noise_scale_low`` and ``noise_scale_high`` (each left out while
    undetermined or open) and the terms ``noise_scale_squared_gradient`` and ``noise_scale_trace``.
    The module's own metrics are left alone.

    Args:
        every: steps from one measured step to the next. None: 128 for each part where batches are
            split (256 with two parts), and 32 where norms are read, which is under 5% of the
            training time even if steps are all overhead.
        parts: into which a batch is split. More parts take longer where overhead dominates, and
            reduce the variance of |G|^2, which goes with parts/(parts - 1).
        window: how many measured steps, the latest, are in the moving estimate. Older ones are from
            when the noise was smaller.
        level: probability of the estimate's interval.
        weights: of the micro-batches' gradients in the step's. ``equal``: 1/k for each of k, as in
            Lightning. ``examples``: n_i/B for one of n_i examples, as in bstune's trials.
        around: makes a context in which the parts of a split batch are measured, such as one that
            stops a clock of the training. Norms that are read in the training's own backward passes
            are outside of it.

    Raises:
        ConfigError: at once for a setting out of its range. When training starts: if the module
            steps its optimizers itself, or the strategy is neither for a single device nor DDP. In
            training: for a batch that cannot be counted or split along dimension 0, or a sparse
            gradient.
    """

    def __init__(
        self,
        every: int | None = None,
        parts: int = 2,
        window: int = WINDOW,
        level: float = INTERVAL_LEVEL,
        weights: Literal["equal", "examples"] = "equal",
        around: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        if every is not None:
            _check_at_least("every", every, smallest=1)
        _check_at_least("parts", parts, smallest=2)
        _check_at_least("window", window, smallest=MIN_BLOCKS)
        if weights not in ("equal", "examples"):
            raise ConfigError(
                f"the noise scale's weights must be equal or examples, but got {weights!r}"
            )
        # Called to refuse a level out of its range.
        estimate_noise_scale([], [], level)
        self.every = every
        self.parts = parts
        self.window = window
        self.level = level
        self.weights = weights
        self._around = around
        self.passed_over = 0
        # The number, the unbiased |G|^2 and tr Sigma of each measured step.
        self.measurements: tuple[tuple[int, float, float], ...] = ()
        # How many of them the loggers have been given.
        self._logged = 0
        # Reads the micro-batches of a step that is being measured; None at other steps.
        self._reading: _Reading | None = None

    @property
    def estimate(self) -> NoiseScaleEstimate:
        """The moving estimate, from the latest ``window`` measured steps.

        Steps that were due but not measured (a gradient that is not finite, a micro-batch without
        any) are counted in ``passed_over``. A parameter without gradient counts as one whose
        gradient is 0.
        """
        return moving_estimate(self.measurements, self.window, self.level)

    def state_dict(self) -> dict[str, Any]:
        """Give all measurements, as plain data."""
        return {
            "measurements": [list(measurement) for measurement in self.measurements],
            "passed_over": self.passed_over,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up the measurements that :meth:`state_dict` gave."""
        measurements = list[tuple[int, float, float]]()
        for step, squared_gradient, trace in state_dict["measurements"]:
            measurements.append((int(step), float(squared_gradient), float(trace)))
        self.measurements = tuple(measurements)
        # The loggers got these in the fit that measured them.
        self._logged = len(self.measurements)
        self.passed_over = int(state_dict["passed_over"])

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Raise a ConfigError for a module or a strategy that cannot be measured."""
        if stage != "fit":
            return
        if not pl_module.automatic_optimization:
            raise ConfigError(
                f"{type(pl_module).__name__} steps its optimizers itself (manual optimization), so "
                "the noise scale cannot tell which gradients make a step: leave NoiseScale out, "
                "or let Lightning step"
            )
        strategy = type(trainer.strategy)
        if not any(base.__name__ in STRATEGIES for base in strategy.__mro__):
            raise ConfigError(
                "the noise scale needs whole gradients on each device, but the strategy is "
                f"{strategy.__name__}: train on a single device or with strategy='ddp', or leave "
                "it out"
            )
        if is_param_in_hook_signature(pl_module.training_step, "dataloader_iter", explicit=True):
            raise ConfigError(
                f"{type(pl_module).__name__}.training_step takes dataloader_iter, so the noise "
                "scale sees no batch: let it take batch"
            )

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Measure the step on parts of its batch, or get ready to read its micro-batches."""
        micro_batches = trainer.accumulate_grad_batches
        begins_step = batch_idx % micro_batches == 0
        if begins_step:
            # The step before may have ended early, or had no gradient to read.
            self._pass_over_unread()
            # A single micro-batch has nothing to be compared with, so it is split.
            is_split = micro_batches * trainer.world_size == 1
            every = self.every
            # By default a measurement is so rare that it takes under 5% of the training time.
            if not every:
                every = STEPS_PER_PART * self.parts if is_split else STEPS_PER_READING
            # The step that begins is not in ``global_step`` yet.
            if (trainer.global_step + 1) % every:
                return
            if is_split:
                with self._around():
                    self._measure_parts(trainer, pl_module, batch, batch_idx)
            else:
                self._reading = _Reading(optimized_parameters(trainer, pl_module))
        if self._reading is not None:
            self._reading.examples.append(count_examples(batch))
            self._reading.norms.append([])

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take in the measurement of a step after its last micro-batch."""
        # Each backward pass of the measured step has read the gradients of its micro-batch so far.
        reading = self._reading
        if reading is None or len(reading.examples) < trainer.accumulate_grad_batches:
            return
        self._end_reading()
        # An error in a hook was kept until the backward pass has ended.
        if reading.error is not None:
            raise reading.error
        gradients = dict[str, Tensor]()
        for name, parameter in reading.parameters.items():
            if parameter.grad is not None:
                gradients[name] = parameter.grad
        norms = self._combined(trainer, reading, _norms(gradients))
        if norms is None:
            self.passed_over += 1
        else:
            self._add(trainer, norms)

    def _combined(
        self, trainer: Trainer, reading: "_Reading", norms_of_step: list[Tensor]
    ) -> GradientNorms | None:
        """Combine the norms of a step's micro-batches, over all devices, with the step's own.

        With weights w_i of micro-batches of n_i examples, and g_i their gradients, the step's
        gradient is the sum of w_i g_i. The batch sizes that small and big norms belong to are one
        over the sums of w_i/n_i and of w_i^2/n_i (derived in :mod:`bstune.core.noise_scale`).

        Args:
            trainer: knows the devices and a gradient scaler.
            reading: of this device's micro-batches.
            norms_of_step: the norm of each parameter's gradient of the whole step.

        Returns:
            The mean squared norms at both batch sizes; None where a micro-batch of some device has
            no gradient.
        """
        *squares, big = _squares([*reading.norms, norms_of_step])
        examples = reading.examples
        weights = [1.0 / len(examples)] * len(examples)
        if self.weights == "examples":
            weights = [n / sum(examples) for n in examples]
        # A scaler's factor is the same for all micro-batches of a step.
        squared_scale = loss_scale(trainer) ** 2
        micro_batches = list(zip(squares, weights, examples, strict=True))
        # The gradient that was read is w g_i, so its square over w is w |g_i|^2.
        small = sum(square / (squared_scale * w) for square, w, _ in micro_batches)
        inverse_small = sum(w / n for _, w, n in micro_batches)
        inverse_big = sum(w * w / n for _, w, n in micro_batches)
        # 0 if a micro-batch of this device has no norms, as no parameter had a gradient there.
        is_whole = float(all(reading.norms))
        devices = trainer.world_size
        sums = torch.tensor((small, inverse_small, inverse_big, is_whole), dtype=torch.float64)
        if devices > 1:
            on_device = sums.to(trainer.strategy.root_device)
            sums = trainer.strategy.reduce(on_device, reduce_op="sum").cpu()
        small, inverse_small, inverse_big, whole_devices = sums.tolist()
        if whole_devices < devices:
            return None
        # DDP averages the gradients over d devices, so the weights of the whole step are w_i/d.
        return GradientNorms(
            small=small / devices,
            small_size=devices / inverse_small,
            big=big / squared_scale,
            big_size=devices**2 / inverse_big,
        )

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log the moving estimate after a measured step."""
        if len(self.measurements) == self._logged:
            return
        self._logged = len(self.measurements)
        estimate = self.estimate
        terms = {
            "noise_scale_low": estimate.low,
            "noise_scale_high": estimate.high,
            "noise_scale_squared_gradient": estimate.squared_gradient,
            "noise_scale_trace": estimate.trace,
            "noise_scale": estimate.noise_scale,
        }
        step = self.measurements[-1][0]
        for logger in trainer.loggers:
            # Each logger gets a dict of its own, as it may write to what it is given.
            metrics = {name: value for name, value in terms.items() if value is not None}
            logger.log_metrics(metrics, step=step)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Pass over a step whose micro-batches the epoch's end has cut short."""
        self._pass_over_unread()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Remove the hooks from the parameters."""
        self._end_reading()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Remove the hooks from the parameters."""
        self._end_reading()

    def _pass_over_unread(self) -> None:
        """Pass over a step that is still being read: it ended early, or without a gradient."""
        if self._reading is not None:
            self.passed_over += 1
        self._end_reading()

    def _end_reading(self) -> None:
        """Remove the hooks of the step that is being read, if one is."""
        if self._reading is not None:
            for hook in self._reading.hooks:
                hook.remove()
            self._reading = None

    def _measure_parts(
        self, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Measure a step from the gradients of parts of its batch, ahead of the step itself."""
        examples = count_examples(batch)
        # In a short last batch of an epoch some part would have one example, or none.
        if trainer.is_last_batch and examples < 2 * self.parts:
            self.passed_over += 1
            return
        parts = cut_batch(batch, self.parts)
        sizes = [count_examples(part) for part in parts]
        parameters = optimized_parameters(trainer, module)
        factor = loss_scale(trainer)
        norms: list[list[Tensor]] = []
        total: dict[str, Tensor] = {}
        with untouched(trainer, module):
            for part, size in zip(parts, sizes, strict=True):
                gradients = gradients_of(trainer, module, parameters, part, batch_idx, factor)
                if not gradients:
                    self.passed_over += 1
                    return
                norms.append(_norms(gradients))
                for name, gradient in gradients.items():
                    # The product is a new tensor, as parameters may share one gradient.
                    weighted = gradient * (size / examples)
                    if name in total:
                        total[name].add_(weighted)
                    else:
                        total[name] = weighted
        scaled_squares = _squares([*norms, _norms(total)])
        *squares_of_parts, square_of_batch = [square / factor**2 for square in scaled_squares]
        self._add(trainer, combine_norms(squares_of_parts, sizes, square_of_batch))

    def _add(self, trainer: Trainer, norms: GradientNorms) -> None:
        """Add a step's measurement of |G|^2 and tr Sigma; pass it over if one is not finite."""
        if math.isfinite(norms.squared_gradient) and math.isfinite(norms.trace):
            # The optimizer has not taken the measured step yet, so ``global_step`` leaves it out.
            number = trainer.global_step + 1
            self.measurements += ((number, norms.squared_gradient, norms.trace),)
        else:
            self.passed_over += 1


def _check_at_least(name: str, value: int, smallest: int) -> None:
    """Raise a ConfigError for a setting that is no integer, or below ``smallest``."""
    check_positive_integer(f"the noise scale's {name}", value)
    if value < smallest:
        raise ConfigError(f"the noise scale's {name} must be at least {smallest}, but got {value}")


def count_examples(batch: object) -> int:
    """Give the number of examples in a batch: the length of all its tensors along dimension 0.

    Lists of other things, such as texts, must have that length too. A ConfigError refuses a batch
    whose examples cannot be counted so.
    """
    lengths = {len(leaf) for leaf in _leaves(batch, "batch")}
    if not lengths:
        raise _not_split("batch", "no tensor")
    if len(lengths) > 1:
        listed = ", ".join(map(str, sorted(lengths)))
        raise _not_split("batch", f"tensors of lengths {listed}")
    return lengths.pop()


def cut_batch(batch: object, parts: int) -> list[object]:
    """Cut a batch into consecutive parts along dimension 0, whose sizes are at most one apart.

    Tensors are views of the batch's. There are fewer parts where the batch has fewer examples. A
    ConfigError refuses a batch of a single example.
    """
    examples = count_examples(batch)
    if examples < 2:
        raise ConfigError(
            f"a batch of {examples} example cannot be split to measure the noise scale: take a "
            "larger batch, or accumulate gradients over several (accumulate_grad_batches=2)"
        )
    parts = min(parts, examples)
    edges = [examples * part // parts for part in range(parts + 1)]
    return [_slice(batch, slice(start, end)) for start, end in pairwise(edges)]


def _leaves(batch: object, place: str) -> Iterator[Tensor | list[object]]:
    """Yield the parts of a batch that have the examples along dimension 0.

    They are its tensors, and its lists of plain values such as texts, but for empty ones. ``place``
    names the batch, or the part of it, in messages.
    """
    if isinstance(batch, Tensor):
        if batch.dim() == 0:
            raise _not_split(place, "a tensor without dimensions")
        yield batch
    elif isinstance(batch, Mapping):
        for key, value in batch.items():
            yield from _leaves(value, f"{place}[{key!r}]")
    elif _is_plain_list(batch):
        if batch:
            yield batch
    elif isinstance(batch, list | tuple):
        for index, value in enumerate(batch):
            yield from _leaves(value, f"{place}[{index}]")
    else:
        raise _not_split(place, type(batch).__name__)


def _is_plain_list(batch: object) -> TypeGuard[list[object]]:
    """Whether it is a list of plain values: no tensors, and no containers that may hold some."""
    if not isinstance(batch, list):
        return False
    return not any(isinstance(item, Tensor | Mapping | list | tuple) for item in batch)


def _slice(batch: Any, part: slice) -> object:
    """Give the examples ``part`` of a batch, in containers of the batch's types."""
    if isinstance(batch, Tensor) or _is_plain_list(batch):
        return batch[part]
    if isinstance(batch, Mapping):
        # It is copied, as a mapping of another type may take other arguments. One that cannot be
        # written to becomes a dict.
        sliced = copy.copy(batch) if isinstance(batch, MutableMapping) else dict(batch)
        for key, value in batch.items():
            sliced[key] = _slice(value, part)
        return sliced
    values = [_slice(value, part) for value in batch]
    # A named tuple takes its values one by one.
    if hasattr(batch, "_fields"):
        return type(batch)(*values)
    return type(batch)(values)


def _not_split(place: str, content: str) -> ConfigError:
    """Make the error for a batch that cannot be split, whose part ``place`` holds ``content``."""
    return ConfigError(
        f"{place} is or holds {content}: make the batch of tensors of one length, the number of "
        "its examples, in tuples, lists or dicts"
    )


class _Reading:
    """Reads the norms of one step's micro-batch gradients on this device.

    Hooks on the parameters read each gradient before it is added to ``.grad``.

    Attributes:
        parameters: of the optimizer, by name.
        examples: in each micro-batch so far.
        norms: of each micro-batch so far, the norms of its gradients.
        error: that a gradient cannot be read; it is raised after the training's backward pass.
        hooks: on the parameters.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self.parameters = parameters
        self.examples: list[int] = []
        self.norms: list[list[Tensor]] = []
        self.error: ConfigError | None = None
        self.hooks = list[RemovableHandle]()
        for name, parameter in parameters.items():
            hook = partial(self._read, name)
            self.hooks.append(parameter.register_hook(hook))  # type: ignore[no-untyped-call]

    def _read(self, name: str, gradient: Tensor) -> None:
        """Take the norm of a parameter's gradient of this micro-batch, as a hook on it."""
        try:
            self.norms[-1] += _norms({name: gradient})
        # Raised here it would end the backward pass, and with it the trial.
        except ConfigError as error:
            self.error = error


def optimized_parameters(trainer: Trainer, module: LightningModule) -> dict[str, nn.Parameter]:
    """Give the trainable parameters of the module's first optimizer, by name.

    The ``.grad`` of other parameters is not zeroed from step to step.
    """
    optimized = set[int]()
    for group in trainer.optimizers[0].param_groups:
        optimized.update(id(parameter) for parameter in group["params"])
    chosen = dict[str, nn.Parameter]()
    for name, parameter in module.named_parameters():
        if id(parameter) in optimized and parameter.requires_grad:
            chosen[name] = parameter
    return chosen


def step_arguments(
    step: Callable[..., object], batch: object, batch_idx: int
) -> tuple[object, ...]:
    """Give the arguments with which Lightning calls a step: the index only where it takes one."""
    # Lightning also takes the second of two parameters for the index, whatever its name.
    if is_param_in_hook_signature(step, "batch_idx", min_args=2):
        return (batch, batch_idx)
    return (batch,)


def gradients_of(
    trainer: Trainer,
    module: LightningModule,
    parameters: Mapping[str, nn.Parameter],
    batch: object,
    batch_idx: int,
    factor: float,
) -> dict[str, Tensor]:
    """Take the gradient of a batch's loss with respect to each parameter, by the parameter's name.

    The loss is multiplied by ``factor``, a gradient scaler's. Parameters that the loss does not
    depend on are left out. The dict is empty where the training step returns no loss.
    """
    with torch.enable_grad():
        with trainer.precision_plugin.train_step_context():
            output = module.training_step(*step_arguments(module.training_step, batch, batch_idx))
        loss = output["loss"] if isinstance(output, Mapping) else output
        if loss is None:
            return {}
        gradients = torch.autograd.grad(loss * factor, list(parameters.values()), allow_unused=True)
    by_name = dict[str, Tensor]()
    for name, gradient in zip(parameters, gradients, strict=True):
        if gradient is not None:
            by_name[name] = gradient
    return by_name


def _norms(gradients: Mapping[str, Tensor]) -> list[Tensor]:
    """Take the norm of each dense gradient, without waiting for the device."""
    for name, gradient in gradients.items():
        if gradient.layout != torch.strided:
            raise ConfigError(
                f"the gradient of {name} is sparse ({gradient.layout}), and the noise scale needs "
                "dense ones: set sparse=False in its layer, or leave NoiseScale out"
            )
    norms = list[Tensor]()
    for gradient in gradients.values():
        # In half precision the squares would overflow.
        wide = gradient.detach().to(torch.promote_types(gradient.dtype, torch.float32))
        # Norms of one type can be stacked. It is float64, which only MPS lacks.
        dtype = torch.float32 if wide.is_mps else torch.float64
        norms.append(torch.linalg.vector_norm(wide).to(dtype))
    return norms


def _squares(groups: Sequence[list[Tensor]]) -> list[float]:
    """Give the sum of squares of each group of norms; 0 for an empty group.

    All norms are read from the device at once, which is waited for.
    """
    norms = list(chain(*groups))
    if not norms:
        return [0.0] * len(groups)
    values = iter(torch.stack(norms).tolist())
    squares = list[float]()
    for group in groups:
        squares.append(sum(value * value for value in islice(values, len(group))))
    return squares


def loss_scale(trainer: Trainer) -> float:
    """Read the factor by which a gradient scaler multiplies the loss; 1 without a scaler."""
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    if scaler is None:
        return 1.0
    return float(scaler.get_scale())


@contextmanager
def untouched(trainer: Trainer, module: LightningModule) -> Iterator[None]:
    """At the end of the context, put random generators and the modules' attributes back.

    Attributes are put back in place, and so are lists, dicts, sets, tensors and generators that are
    values of attributes or lie in such a container. Logs of the module are dropped meanwhile.
    """
    random = random_state()
    loggers = trainer.loggers
    # Pairs of a live object and a copy of its state, for each kind of object.
    attributes = list[tuple[dict[str, Any], dict[str, Any]]]()
    values = list[object]()
    for part in module.modules():
        attributes.append((part.__dict__, dict(part.__dict__)))
        values += part.__dict__.values()
    containers = list[tuple[Any, Any]]()
    for value in values:
        if isinstance(value, dict | list | set):
            containers.append((value, value.copy()))
    # From here on the values that lie in a container count, too.
    for _, contents in containers:
        values += contents.values() if isinstance(contents, dict) else contents
    generators = list[tuple[torch.Generator, Tensor]]()
    for value in values:
        if isinstance(value, torch.Generator):
            generators.append((value, value.get_state()))
    clones = list[tuple[Tensor, Tensor]]()
    for tensor in _written_tensors(values, module):
        # A tensor that takes a gradient is not state that a pass overwrites in place. An inference
        # tensor cannot be overwritten here.
        if not tensor.requires_grad and not tensor.is_inference():
            clones.append((tensor, tensor.clone()))
    trainer.loggers = [DummyLogger() for _ in loggers]
    # These are attributes of the object, which go when its attributes are put back.
    module.log = lambda *args, **kwargs: None  # type: ignore[method-assign]
    module.log_dict = lambda *args, **kwargs: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        trainer.loggers = loggers
        for live, saved in attributes:
            live.clear()
            live.update(saved)
        _put_back_contents(containers)
        for generator, state in generators:
            generator.set_state(state)
        with torch.no_grad():
            for tensor, clone in clones:
                tensor.copy_(clone)
        set_random_state(random)


def _put_back_contents(containers: Sequence[tuple[Any, Any]]) -> None:
    """Give each list, dict or set of the pairs the contents of its copy, in place."""
    for container, contents in containers:
        container.clear()
        if isinstance(container, list):
            container.extend(contents)
        else:
            container.update(contents)


def _written_tensors(values: Sequence[object], module: LightningModule) -> list[Tensor]:
    """Choose the tensors of a module that a forward pass may write to.

    They are tensors among ``values``, which are attributes of its parts, and frozen parameters. A
    forward pass does not write to trained parameters. A tensor's version does not tell whether it
    was written to, because batch norm does not count its writes there.
    """
    tensors = list[Tensor]()
    for value in values:
        if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
            tensors.append(value)
    frozen = list[Tensor]()
    frozen_size = 0
    trained_size = 0
    for parameter in module.parameters():
        if parameter.requires_grad:
            trained_size += parameter.numel()
        else:
            frozen.append(parameter)
            frozen_size += parameter.numel()
    # Frozen parameters may be a momentum encoder's, which is as large as the trained part and is
    # written to. A larger frozen part is a backbone, a copy of which would not fit everywhere.
    if frozen_size <= trained_size:
        tensors += frozen
    return tensors
