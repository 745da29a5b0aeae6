"""Tells which steps a gradient scaler has skipped, without reading the device where possible."""

import torch

from bstune.trial.lightning.installed import LightningModule, Trainer


class SkippedSteps:
    """Tells after each step whether a gradient scaler has skipped it, as its gradients overflowed.

    A scaler calls most optimizers only if no gradient has overflowed, and a hook here notes the
    call. An optimizer that looks for the overflow itself, as a fused one does, is always called;
    and under manual optimization not every batch has a step. In these cases the scaler's scale is
    read from the device instead: the scaler lowers it after skipped steps alone.
    """

    def __init__(self, trainer: Trainer, module: LightningModule) -> None:
        self._scaler = getattr(trainer.precision_plugin, "scaler", None)
        # Whether the optimizer was called in the present step, as the hook notes it.
        self._was_called = False
        # Whether a hook notes the optimizer's calls; else the scale is read.
        self._notes_calls = False
        if self._scaler is None:
            return
        is_alone = len(trainer.optimizers) == 1 and module.automatic_optimization
        optimizer: object = trainer.optimizers[0] if is_alone else None
        # A fused optimizer is called in every step, and skips one by itself.
        finds_overflow = getattr(optimizer, "_step_supports_amp_scaling", False)
        if isinstance(optimizer, torch.optim.Optimizer) and not finds_overflow:
            optimizer.register_step_post_hook(self._note_call)
            self._notes_calls = True
        else:
            self._scale = self._scaler.get_scale()

    def _note_call(self, *arguments: object) -> None:
        """Note, as a hook that torch calls after each step, that the optimizer was called."""
        self._was_called = True

    def skipped(self, loss: object) -> bool:
        """Whether the step that has just ended was skipped.

        ``loss`` is the step's; a step without one (None) is not scaled, and so not skipped.
        """
        if self._scaler is None:
            return False
        if self._notes_calls:
            was_called = self._was_called
            self._was_called = False
            return not was_called and loss is not None
        # A scaler lowers its scale after a step that it has skipped.
        former_scale = self._scale
        self._scale = self._scaler.get_scale()
        return bool(self._scale < former_scale)
