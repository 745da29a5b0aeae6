"""Chooses what takes the steps of a fit: Lightning's loop, the lean loop or CUDA graphs.

It is this room's entry for code that trains::

    steps = take_steps(trainer, protocol.fast)
    trainer.fit(module, batches)
    print(steps.name)  # lean, graph, or Lightning's and why

``protocol.fast=auto`` is the lean loop, whose weights, logged values and counters are Lightning's,
bit for bit. Lightning's own loop takes the steps where something overrides their hooks; under
manual optimization, accumulation, a gradient scaler, several devices, LBFGS or a profiler; and with
a version of Lightning that the loop does not know (:mod:`bstune.trial.fast.reasons`). ``graph``
also captures the steps on CUDA (:mod:`bstune.trial.fast.graph`). A trial's record names the loop
that took its steps in ``training_loop``.
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
    """Takes the steps of a fit."""

    @property
    def name(self) -> str | None:
        """``lean``, ``graph`` or ``Lightning's``; with the reason where another was asked for.

        None where no step was begun.
        """

    @property
    def runs(self) -> bool:
        """Whether it takes the fit's steps in place of Lightning's loop; False before the first."""


def take_steps(
    trainer: Trainer,
    mode: FastMode,
    around: Callable[[], AbstractContextManager[object]] = nullcontext,
    start: Callable[[], object] = lambda: None,
) -> StepTaker:
    """Let the steps of a Trainer's fit take less time, with the same results bit for bit.

    Where the results could differ, Lightning's own loop takes the steps, or they are not captured.
    The ``name`` of the object that is given then says why.

    Args:
        trainer: which has not begun to train.
        mode: ``auto`` for the lean loop, which leaves out hooks that do nothing; ``graph`` for
            steps that are also captured on CUDA; or ``off`` for Lightning's loop in any case.
        around: makes a context within which steps are captured, such as one that stops the
            training's clock.
        start: is called each time before the lean loop takes some steps in a row, such as to start
            that clock.
    """
    return LeanLoop(trainer, mode, around, start)


def eager_steps(mode: FastMode, device: torch.device) -> int:
    """Give the number of steps at a trial's start that are not replays of a captured step."""
    if not captures(mode, device):
        return 0
    return WARM_STEPS
