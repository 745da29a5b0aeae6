"""The gradient noise scale beside a trial's training by Lightning, which stays as it was.

Now and then the batch that is trained on next is taken in two halves by a copy of the module. What
the halves do to the copy goes with it, and random numbers are put back: the training is the same,
bit for bit. Normalisation layers see a half, and dropout's noise counts as the gradient's.
"""

import copy
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

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
# The first measurement is expected to take as long as so many steps.
FIRST_STEPS = 6.0
# Normalisation layers refuse a half of one example.
LEAST_EXAMPLES = 4


class NoiseBesideTraining(Callback):
    """Measures the noise scale of a trial ahead of the first step after an evaluation.

    What the user's code raises at half a batch, such as for its size, ends the measuring alone.

    Args:
        own: the call-back that evaluates the trial.
    """

    def __init__(self, own: "StopAtTarget") -> None:
        self._own = own
        self._measured_at = 0
        # Seconds of each measurement; infinite where one raised: no other is made.
        self._took: list[float] = []

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Measure, if the training has been long enough; its clock then starts again."""
        own = self._own
        is_first = own.steps == own.trial.steps and own.steps != self._measured_at
        if not is_first or not self._has_time():
            return
        self._measured_at = own.steps
        began = time.perf_counter()
        try:
            terms = measure(trainer, pl_module, batch, batch_idx)
        except Exception:  # noqa: BLE001
            self._took.append(float("inf"))
        else:
            own.trial.noise_scale += [(own.steps, *one) for one in terms]
            self._took.append(time.perf_counter() - began)
        own.clock.start()

    def _has_time(self) -> bool:
        """Whether one more measurement leaves their share of the training seconds."""
        segments = self._own.clock.segments
        if not segments:
            return False
        seconds = self._own.clock.seconds
        expected = FIRST_STEPS * seconds / sum(steps for steps, _ in segments)
        if self._took:
            expected = sum(self._took) / len(self._took)
        return sum(self._took) + expected <= SHARE * seconds


class CheckNoiseScale(Callback):
    """Measures the noise scale at the first step; InputError with the reason where it cannot."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Leave out the evaluation."""
        trainer.limit_val_batches = 0

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Measure."""
        try:
            measure(trainer, pl_module, batch, batch_idx)
        except InputError:
            raise
        # Whatever the user's code raises.
        except Exception as error:
            raise InputError(
                f"noise_scale=true takes batches in two halves, but half a batch raised "
                f"{type(error).__name__}: {error}; leave it out"
            ) from error


def measure(trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int) -> list[Terms]:
    """|G|^2 and tr(Sigma) of a micro-batch; nothing of a small one, or if they are not finite.

    Args:
        trainer, module: that train.
        batch, batch_idx: that the training step gets next.

    Raises:
        InputError: the module steps its optimizers itself, or examples are not a batch's first
            dimension.
        Exception: whatever the user's code raises.
    """
    if not module.automatic_optimization:
        raise InputError(
            f"{type(module).__name__} steps its optimizers itself (manual optimization), so that "
            f"the noise scale cannot be measured: leave out noise_scale=true"
        )
    loader: Any = trainer.train_dataloader
    parts = loader.batch_sampler.parts
    part = parts[batch_idx % len(parts)]
    size = part.stop - part.start
    if size < LEAST_EXAMPLES:
        return []
    lengths = set[int]()
    apply_to_collection(batch, Tensor, lambda tensor: lengths.add(len(tensor)))
    if lengths != {size}:
        raise InputError(
            f"noise_scale=true needs batches of tensors whose first dimension is the {size} "
            f"examples, but got {sorted(lengths) or 'none'}: leave it out"
        )
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    scale = 1.0 if scaler is None else scaler.get_scale()
    noise = NoiseScale()
    random = rng_state()
    try:
        copied = _copy_of(trainer, module)
        step = type(copied).training_step
        has_index = is_param_in_hook_signature(step, "batch_idx", min_args=2)
        for half in (range(size // 2), range(size // 2, size)):
            inputs = apply_to_collection(batch, Tensor, _taken, half)
            with trainer.precision_plugin.train_step_context():
                output = step(copied, inputs, *([batch_idx] if has_index else []))
            loss = output["loss"] if isinstance(output, Mapping) else output
            (loss * (scale * len(half) / size)).backward()
            noise.add(copied.parameters(), len(half))
        noise.step(scale)
    finally:
        set_rng_state(random)
    return noise.measured


def _taken(tensor: Tensor, places: range) -> Tensor:
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
