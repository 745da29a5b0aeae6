"""Which of the steps a gradient scaler left out, without a read of the device where that can be."""

import torch

from bstune.trial.lightning.installed import LightningModule, Trainer


class SkippedSteps:
    """Tells after each step whether a gradient scaler left it out, as its gradients had overflowed.

    A scaler reads once a step whether they have, and calls an optimizer that it steps itself only
    if not: that is noted here. An optimizer that looks at the overflow itself, as fused ones do, is
    called in either case, and under manual optimization not every batch has a step: there the scale
    is read, which is lowered at these steps alone.
    """

    def __init__(self, trainer: Trainer, module: LightningModule) -> None:
        self._scaler = getattr(trainer.precision_plugin, "scaler", None)
        self._is_applied = False
        self._is_noted = False
        if self._scaler is None:
            return
        is_alone = len(trainer.optimizers) == 1 and module.automatic_optimization
        optimizer: object = trainer.optimizers[0] if is_alone else None
        looks_itself = getattr(optimizer, "_step_supports_amp_scaling", False)
        if isinstance(optimizer, torch.optim.Optimizer) and not looks_itself:
            optimizer.register_step_post_hook(self._note)
            self._is_noted = True
        else:
            self._scale = self._scaler.get_scale()

    def _note(self, optimizer: torch.optim.Optimizer, arguments: object, options: object) -> None:
        self._is_applied = True

    def skipped(self, loss: object) -> bool:
        """Say whether the step that has just ended was left out.

        One without ``loss`` (None) is never scaled.
        """
        if self._scaler is None:
            return False
        if self._is_noted:
            is_applied = self._is_applied
            self._is_applied = False
            return not is_applied and loss is not None
        former_scale = self._scale
        self._scale = self._scaler.get_scale()
        return bool(self._scale < former_scale)
