"""The gradient noise scale beside a trial's training by Lightning, which stays as it was.

Now and then the batch that is trained on next is taken in two halves by a copy of the module. What
the halves do to the copy goes with it, and random numbers are put back: the training is the same,
bit for bit. Normalisation layers see a half, and dropout's noise counts as the gradient's.
"""

import copy
import math
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from lightning_utilities import apply_to_collection
from torch import Tensor

from bstune.core.errors import InputError
from bstune.core.noise_scale import Terms
from bstune.trial.batches import rng_state, set_rng_state
from bstune.trial.noise_scale import NoiseScale

if TYPE_CHECKING:
    from bstune.trial.lightning import StopAtTarget

# The most of a trial's training seconds that measuring takes.
SHARE = 0.05
# The first measurement is expected to take as long as so many steps: those of the workloads that
# ship took 0.7 to 4.8, most where all is overhead (one CPU thread, torch 2.13).
FIRST_STEPS = 4.0


class NoiseBesideTraining(Callback):
    """Measures the noise scale of a trial ahead of the first step after an evaluation.

    Args:
        own: the call-back that evaluates the trial; None: the first batch is measured alone, to see
            that it can be.
    """

    def __init__(self, own: "StopAtTarget | None" = None) -> None:
        self._own = own
        # What a measurement takes, in steps.
        self._cost = FIRST_STEPS

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Measure where there is time for it; the training's clock then starts again."""
        own = self._own
        if own is None:
            measure(trainer, pl_module, batch, batch_idx)
            return
        trial = own.trial
        is_first = batch_idx % trainer.accumulate_grad_batches == 0
        due = (len(trial.noise_scale) + 1) * self._cost / SHARE
        if not is_first or own.steps != trial.steps or own.steps < due:
            return
        began = time.perf_counter()
        try:
            terms = measure(trainer, pl_module, batch, batch_idx)
            trial.noise_scale += [(own.steps, *one) for one in terms]
            steps = own.steps - trial.first_step
            if steps:
                self._cost = (time.perf_counter() - began) * steps / own.evaluations.clock.seconds
        # Half a batch may be too small for the user's code, or the copy too large for the memory.
        except InputError:
            self._cost = math.inf
        own.evaluations.clock.start()


def measure(trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int) -> list[Terms]:
    """|G|^2 and tr(Sigma) of a micro-batch, or nothing if they are not finite.

    Args:
        trainer, module: that train.
        batch, batch_idx: that the training step gets next.

    Raises:
        InputError: they cannot be measured.
    """
    if not module.automatic_optimization:
        raise InputError(
            f"{type(module).__name__} steps its optimizers itself (manual optimization), so that "
            f"the noise scale cannot be measured: leave out noise_scale=true"
        )
    loader: Any = trainer.train_dataloader
    parts = loader.parts
    part = parts[batch_idx % len(parts)]
    random = rng_state()
    try:
        return _measure_halves(trainer, module, batch, batch_idx, part.stop - part.start)
    # The user's code may raise anything.
    except Exception as error:
        raise InputError(
            f"noise_scale=true takes batches in two halves, which raised {type(error).__name__}: "
            f"{error}; leave it out"
        ) from error
    finally:
        set_rng_state(random)


def _measure_halves(
    trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int, size: int
) -> list[Terms]:
    """Measure a micro-batch of so many examples; ValueError where these are not dimension 0."""
    lengths = set[int]()
    apply_to_collection(batch, Tensor, lambda tensor: lengths.add(len(tensor)))
    if lengths != {size}:
        raise ValueError(
            f"tensors have lengths {sorted(lengths)} in their first dimension, not the {size} "
            f"examples"
        )
    copied = _copy_of(trainer, module)
    parameters = [one for one in copied.parameters() if one.requires_grad]
    step = type(copied).training_step
    index = [batch_idx] if is_param_in_hook_signature(step, "batch_idx", min_args=2) else []
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    # Without a scaler's factor gradients in half precision would vanish.
    scale = 1.0 if scaler is None else scaler.get_scale()
    halves = range(size // 2), range(size // 2, size)
    gradients = []
    for half in halves:
        inputs = apply_to_collection(batch, Tensor, _some_examples, half)
        with trainer.precision_plugin.train_step_context():
            output = step(copied, inputs, *index)
        loss = output["loss"] if isinstance(output, Mapping) else output
        scaled = torch.autograd.grad(loss * scale, parameters, allow_unused=True)
        gradients.append([one if one is None else one / scale for one in scaled])
    noise = NoiseScale()
    noise.add(gradients, [len(half) for half in halves])
    return noise.measured


def _some_examples(tensor: Tensor, places: range) -> Tensor:
    """Some examples, which the user's code may write to."""
    return tensor[places.start : places.stop].clone()


def _copy_of(trainer: Trainer, module: LightningModule) -> Any:
    """A module of the same state, whose logs are dropped."""
    # What torch.compile has put in the place of methods is of the original.
    copied = copy.deepcopy(module, {id(module._compiler_ctx): None})
    for name in list(vars(copied)):
        if callable(getattr(type(copied), name, None)):
            del vars(copied)[name]
    copied.trainer = trainer
    modules: Any = copied.modules()
    for part in modules:
        if hasattr(part, "log_dict"):
            part.log = part.log_dict = _drop
    return copied


def _drop(*arguments: Any, **options: Any) -> None:
    """Log nothing."""
