"""Puts back, in a trial that goes on from a stopped one, what Lightning's checkpoint does not.

Some of it hooks may have reset.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from bstune.trial.lightning.installed import LightningModule, Trainer
from bstune.trial.lightning.internals import (
    count_epoch_as_whole,
    go_on_amid_epoch,
    repeat_validation,
)
from bstune.trial.parts.accumulated import restore_metrics
from bstune.trial.parts.checkpoint import StoppedState


class Resume:
    """Makes a trial go on as if it had not been stopped.

    Args:
        stopped: the state of the stopped trial; None: this one starts afresh, and nothing is put
            back.

    Attributes:
        stopped: as it was given.
        evaluates_again: whether the next evaluation repeats the stopped trial's last one.
    """

    def __init__(self, stopped: StoppedState | None) -> None:
        self.stopped = stopped
        # What the methods below take of the stopped trial's state to put it back later: weights,
        # names of frozen parameters, and what metrics of the epoch have accumulated. Each is put
        # back once, and is then None.
        self._weights: dict[str, Tensor] | None = None
        self._frozen: tuple[str, ...] | None = None
        self._accumulated: Mapping[str, Any] | None = None
        # Whether the trial goes on in the middle of an epoch and has not read a batch yet.
        self._amid_epoch = False
        self.evaluates_again = False

    def keep_weights(self, module: LightningModule) -> None:
        """Copy the weights that were just loaded from the checkpoint: later hooks may set some."""
        if self.stopped is not None:
            self._weights = _copied_tensors(module)

    def begin(self, trainer: Trainer, has_epochs: bool) -> None:
        """Prepare the Trainer to go on where the trial was stopped."""
        if self.stopped is None:
            return
        self._frozen = self.stopped.frozen
        # Lightning reads these metrics next, where it steps a schedule by one of them.
        trainer.callback_metrics.update(self.stopped.metrics)
        # By this number Lightning takes the trial as stopped in an evaluation, and that evaluation
        # as done unless it is repeated.
        trainer.val_check_batch = trainer.fit_loop.batch_idx + 1
        if has_epochs:
            # What the metrics of the epoch have accumulated; put back before the next batch.
            self._accumulated = self.stopped.epoch
            self._amid_epoch = True

    def lacks_evaluation(self, at_epoch_end: bool) -> bool:
        """Whether the evaluation at the stop has to be repeated.

        It has if the trial would have been evaluated there without its stop, as the state was saved
        before the evaluation. ``at_epoch_end`` says whether the trial was stopped at the end of an
        epoch, and is evaluated at epochs' ends.
        """
        # Schedules and call-backs use an evaluation only where epochs end.
        if self.stopped is None or not self._amid_epoch:
            return False
        return at_epoch_end or self.stopped.steps >= self.stopped.due_step

    def evaluate_again(self, trainer: Trainer) -> None:
        """Let Lightning begin with the evaluation at the stop: schedules or call-backs use it."""
        self.evaluates_again = True
        repeat_validation(trainer)

    def before_batch(self, trainer: Trainer, module: LightningModule) -> None:
        """Before a resumed trial's training batch, put back what has not been put back yet."""
        if self.stopped is None:
            return
        self.put_back_stopped_state(trainer, module)
        # Lightning would take the batch for the first of an epoch, and reset accumulated metrics.
        if self._amid_epoch:
            go_on_amid_epoch(trainer)
            self._amid_epoch = False

    def end_epoch(self, trainer: Trainer, module: LightningModule) -> None:
        """Prepare the end of an epoch, at which Lightning steps schedules by a metric."""
        # A trial that was stopped after the epoch's last batch has put nothing back yet.
        self.put_back_stopped_state(trainer, module)
        # Lightning would not step these schedules in an epoch in which a fit was resumed.
        count_epoch_as_whole(trainer)
        self._amid_epoch = False

    def put_back_stopped_state(self, trainer: Trainer, module: LightningModule) -> None:
        """Put back the weights, the frozen parameters and the accumulated metrics, once.

        Hooks at the start of the fit may have reset what the checkpoint had loaded.
        """
        if self._weights is not None:
            _put_back_tensors(module, self._weights)
            self._weights = None
        if self._frozen is not None:
            _freeze(module, self._frozen)
            self._frozen = None
        if self._accumulated is not None:
            restore_metrics(trainer, module, self._accumulated)
            self._accumulated = None


def _copied_tensors(module: LightningModule) -> dict[str, Tensor]:
    """Copy a module's weights and buffers."""
    copies = {}
    for name, value in module.state_dict().items():
        if isinstance(value, Tensor):
            copies[name] = value.detach().clone()
    return copies


def _put_back_tensors(module: LightningModule, copies: Mapping[str, Tensor]) -> None:
    """Set a module's weights and buffers to those of a copy.

    All are set, whether they differ or not: a comparison would wait for the device while the
    trial's clock runs.
    """
    present = module.state_dict()
    with torch.no_grad():
        for name, value in copies.items():
            tensor = present.get(name)
            if isinstance(tensor, Tensor) and tensor.shape == value.shape:
                tensor.copy_(value)


def _freeze(module: LightningModule, names: tuple[str, ...]) -> None:
    """Freeze the parameters of these names, and no others."""
    for name, parameter in module.named_parameters():
        is_frozen = name in names
        if parameter.requires_grad == is_frozen:
            parameter.requires_grad_(not is_frozen)
