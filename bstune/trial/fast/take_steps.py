"""The one way into this room for whoever trains: who takes the steps of a fit, and how fast.

steps = take_steps(trainer, protocol.fast)
trainer.fit(module, batches)
print(steps.name)  # lean, graph, or Lightning's and why

``protocol.fast=auto`` is the lean loop, whose weights, logged values and counters are Lightning's,
bit for bit. Lightning's own loop takes the steps where something overrides their hooks; under
manual optimization, accumulation, a gradient scaler, several devices, LBFGS or a profiler; and with
a version of Lightning that the loop does not know (:mod:`bstune.trial.fast.reasons`). ``graph``
captures the steps on CUDA, too (:mod:`bstune.trial.fast.graph`). A trial's record says in
``training_loop`` what took its steps.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch

from bstune.core.records import FastMode
from bstune.trial.fast.graph import WARM_STEPS, captures
from bstune.trial.fast.lean_loop import LeanLoop
from bstune.trial.lightning.installed import Trainer


class StepTaker(Protocol):
    """What takes the steps of a fit."""

    @property
    def name(self) -> str | None:
        """``lean``, ``graph`` or ``Lightning's``.

        With the reason where it is not what was asked for.

        None where no step was begun.
        """

    @property
    def runs(self) -> bool:
        """Whether it has taken steps in place of Lightning's loop, and goes on."""


def take_steps(
    trainer: Trainer,
    mode: FastMode,
    around: Callable[[], AbstractContextManager[object]] = nullcontext,
    start: Callable[[], object] = lambda: None,
) -> StepTaker:
    """Let the steps of a Trainer's fit be taken in less time, where nobody can tell the difference.

    Where one could, Lightning's own loop takes them, or they are not captured, and the name says
    why.

    Args:
        trainer: which has not begun to train.
        mode: ``auto``, ``off`` for Lightning's loop in any case, or ``graph`` for steps that are
            captured on CUDA, too.
        around: makes a context for what captures them, which is no step of the training.
        start: is called ahead of the first of some steps that follow one another, where it is not
            Lightning's loop that takes them.
    """
    return LeanLoop(trainer, mode, around, start)


def eager_steps(mode: FastMode, device: torch.device) -> int:
    """Tell how many steps of a trial come before the first replay of a captured one."""
    if not captures(mode, device):
        return 0
    return WARM_STEPS
