"""Tells which steps a gradient scaler has skipped, without reading the device where possible."""

import torch

from bstune.trial.lightning.installed import LightningModule, Trainer


class SkippedSteps:
    """Tells after each step whether a gradient scaler has skipped it, as its gradients overflowed.

    Mostly the scaler calls the optimizer only if they have not, and a hook here notes that call. An
    optimizer that checks for the overflow itself, as fused ones do, is called in either case, and
    under manual optimization not every batch has a step. There the scaler's scale is read from the
    device instead: it is lowered at skipped steps, and only there.
    """

    def __init__(self, trainer: Trainer, module: LightningModule) -> None:
        self._scaler = getattr(trainer.precision_plugin, "scaler", None)
        # Whether the optimizer was called in the present step, where that is noted.
        self._is_applied = False
        # Whether a hook notes the optimizer's calls; else the scale is read.
        self._is_noted = False
        if self._scaler is None:
            return
        is_alone = len(trainer.optimizers) == 1 and module.automatic_optimization
        optimizer: object = trainer.optimizers[0] if is_alone else None
        # A fused optimizer is called for each step, and leaves one out by itself.
        looks_itself = getattr(optimizer, "_step_supports_amp_scaling", False)
        if isinstance(optimizer, torch.optim.Optimizer) and not looks_itself:
            optimizer.register_step_post_hook(self._note)
            self._is_noted = True
        else:
            self._scale = self._scaler.get_scale()

    def _note(self, optimizer: torch.optim.Optimizer, arguments: object, options: object) -> None:
        """Note, as a hook after it, that the optimizer was called."""
        self._is_applied = True

    def skipped(self, loss: object) -> bool:
        """Whether the step that has just ended was skipped.

        ``loss`` is the step's; a step without one (None) is not scaled, and so not skipped.
        """
        if self._scaler is None:
            return False
        if self._is_noted:
            is_applied = self._is_applied
            self._is_applied = False
            return not is_applied and loss is not None
        # A scaler lowers its scale after a step that it has skipped.
        former_scale = self._scale
        self._scale = self._scaler.get_scale()
        return bool(self._scale < former_scale)
