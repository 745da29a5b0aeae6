"""The best of a study trained in the user's own process, as the user's own Trainer trains."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer

from bstune.recipe.recipe import PACKAGES, Recipe, TrialSettings
from bstune.system.secrets import hide
from bstune.trial.lightning import HYPER_PARAMETERS, CountsSteps, fit


class _StopAtStep(CountsSteps):
    """Ends a fit after so many optimizer steps."""

    def __init__(self, last: int) -> None:
        super().__init__()
        self._last = last

    @property
    def goes_on(self) -> bool:
        return self.steps < self._last

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        for name in HYPER_PARAMETERS:
            if name in checkpoint:
                checkpoint[name] = hide(checkpoint[name])

    def on_train_batch_end(self, trainer: Trainer, *arguments: Any) -> None:
        self.has_stepped(trainer)
        trainer.should_stop |= not self.goes_on


def train_best(
    recipe: Recipe,
    trial: TrialSettings,
    steps: int,
    folder: Path,
    arguments: Mapping[str, Any],
) -> tuple[LightningModule, Trainer]:
    """Train for exactly so many optimizer steps, and test once what has a test.

    It is what ``result.train()`` does with the best.

    Args:
        recipe: of the project.
        trial: its configuration, its seed and the length of its schedule.
        steps: that are made, at most that length.
        folder: that the Trainer writes to where it has none of its own.
        arguments: of the Trainer, in place of the recipe's.

    Returns:
        The module and the Trainer; ``callback_metrics`` has those of the test, too.

    Raises:
        Exception: whatever the user's code raises.
    """
    own = {"default_root_dir": folder, **recipe.trainer(trial), **arguments}
    recipe = replace(recipe, trainer=lambda trial: own)
    threads = torch.get_num_threads()
    try:
        trainer = fit(recipe, trial, [_StopAtStep(steps)], quiet=False)
        module, data = trainer.lightning_module, getattr(trainer, "datamodule", None)
        if _has_own(module, "test_step") and _has_own(data, "test_dataloader"):
            validated = dict(trainer.callback_metrics)
            trainer.test(module, datamodule=data)
            trainer.callback_metrics.update(validated | trainer.callback_metrics)
    finally:
        torch.set_num_threads(threads)
    return module, trainer


def _has_own(part: Any, hook: str) -> bool:
    """Whether a module's or data's class has a hook that is not Lightning's."""
    return part is not None and not getattr(type(part), hook).__module__.startswith(PACKAGES)
