"""Measures a trial's noise scale so that an error of the measurement does not end the trial."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from bstune.core.errors import BstuneError
from bstune.core.records import NO_NOISE_SCALE
from bstune.system.failures import cause
from bstune.trial.devices.errors import USER_CODE_ERRORS, is_out_of_memory, warn_once
from bstune.trial.lightning.installed import LightningModule, Trainer
from bstune.trial.noise_scale import NoiseScale

# The smallest batch that is split in two: normalisation layers refuse parts of a single example.
MIN_SPLIT = 4


class TrialNoiseScale:
    """Measures the gradient noise scale beside a trial's training, where that is possible.

    An error of it ends the measuring, and not the trial.

    Args:
        every: steps from one measured step to the next; None: nothing is measured.
        around: makes a context in which the parts of a batch are measured, off the training's
            clock.
        alone: whether this process trains the trial by itself; else nothing is measured.

    Attributes:
        missing: the error by which the measuring has ended, in a line; None: there was none.
    """

    def __init__(
        self, every: int | None, around: Callable[[], AbstractContextManager[object]], alone: bool
    ) -> None:
        self._is_asked = every is not None
        self._trains_alone = alone
        # A trial weights each micro-batch by its examples, so that they add up to the batch's
        # gradient.
        self._noise_scale = NoiseScale(every=every, weights="examples", around=around)
        # setup decides.
        self._measures = False
        self.missing: str | None = None

    @property
    def measurements(self) -> tuple[tuple[int, float, float], ...]:
        """Each measured step, with its unbiased |G|^2 and tr Sigma.

        G is the gradient, and Sigma the covariance of the gradients of single examples.
        """
        return self._noise_scale.measurements

    def state_dict(self) -> dict[str, Any]:
        """Give the measurements for a trial that goes on, as plain data."""
        if not self._is_asked:
            return {}
        return {"noise_scale": self._noise_scale.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up the measurements of the stopped trial, if it has made any."""
        if self._is_asked and "noise_scale" in state:
            self._noise_scale.load_state_dict(state["noise_scale"])

    def setup(
        self, trainer: Trainer, module: LightningModule, stage: str, batch_size: int, parts: int
    ) -> None:
        """Begin to measure, if steps have several micro-batches or one that can be split.

        Args:
            trainer: of the trial.
            module: that it trains.
            stage: of the Trainer, such as ``fit``.
            batch_size: examples of a step.
            parts: micro-batches of a step.
        """
        # A process that shares a trial with others is not to measure, and a module that steps its
        # optimizers itself cannot be measured.
        is_possible = self._trains_alone and module.automatic_optimization
        has_parts = parts > 1 or batch_size >= MIN_SPLIT
        self._measures = self._is_asked and is_possible and has_parts
        if self._measures:
            self._attempt(self._noise_scale.setup, trainer, module, stage)

    def teardown(self, trainer: Trainer, module: LightningModule, stage: str) -> None:
        """Remove the hooks from the module's parameters."""
        if self._measures:
            self._attempt(self._noise_scale.teardown, trainer, module, stage)

    def before_batch(
        self, trainer: Trainer, module: LightningModule, batch: object, batch_idx: int
    ) -> None:
        """Measure a step on parts of its batch, or get ready to read its micro-batches."""
        if self._measures:
            measure = self._noise_scale.on_train_batch_start
            self._attempt(measure, trainer, module, batch, batch_idx, on_part=True)

    def after_backward(self, trainer: Trainer, module: LightningModule) -> None:
        """Measure a step after its last micro-batch."""
        if self._measures:
            self._attempt(self._noise_scale.on_after_backward, trainer, module)

    def _attempt(
        self,
        measure: Callable[..., None],
        trainer: Trainer,
        module: LightningModule,
        *arguments: object,
        on_part: bool = False,
    ) -> None:
        """Call a hook of the noise scale; an error in it ends the measuring, with one warning.

        ``on_part``: whether the hook runs the training step on a part of its batch.
        """
        try:
            measure(trainer, module, *arguments)
        except USER_CODE_ERRORS as error:
            self._measures = False
            self._noise_scale.on_exception(trainer, module, error)
            why = cause(error)
            # The step takes the whole batch in training, so that its code is not blamed.
            is_users = not isinstance(error, BstuneError) and not is_out_of_memory(error)
            if on_part and is_users:
                why = (
                    "batches cannot be split into parts by their first dimension (a part alone: "
                    f"{type(error).__name__})"
                )
            self.missing = f"{NO_NOISE_SCALE}: {why}; protocol.noise_scale_every=null leaves it out"
            warn_once(self.missing)
