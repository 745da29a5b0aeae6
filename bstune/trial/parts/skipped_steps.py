"""Which of the steps a gradient scaler left out, without a read of the device where that can be."""

from typing import Any

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
        self._applied = self._noted = False
        if self._scaler is None:
            return
        alone = (
            trainer.optimizers[0]
            if len(trainer.optimizers) == 1 and module.automatic_optimization
            else None
        )
        looks_itself = getattr(alone, "_step_supports_amp_scaling", False)
        if isinstance(alone, torch.optim.Optimizer) and not looks_itself:
            alone.register_step_post_hook(self._note)
            self._noted = True
        else:
            self._scale = self._scaler.get_scale()

    def _note(self, optimizer: torch.optim.Optimizer, arguments: Any, options: Any) -> None:
        self._applied = True

    def skipped(self, loss: Any) -> bool:
        """Return whether the step that has just ended was left out.

        One without ``loss`` (None) is never scaled.
        """
        if self._scaler is None:
            return False
        if self._noted:
            applied, self._applied = self._applied, False
            return not applied and loss is not None
        before, self._scale = self._scale, self._scaler.get_scale()
        return bool(self._scale < before)
