"""The Lightning module of the shipped workloads: it classifies, with any model and optimizer."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from bstune.core.errors import ConfigError
from bstune.trial.lightning.installed import Callback, LightningModule
from bstune.workloads.averaging import OptimizersAverage
from bstune.workloads.schedules import constant


class Classifier(LightningModule):
    """Trains ``model`` on (images, labels), and logs its error and loss.

    They are ``val/error``, ``val/loss``, ``test/error`` and ``test/loss``. If ``loss`` smooths
    labels or ``test_time`` averages views, the losses are of that.

    Args:
        model: maps images (N, C, H, W) to logits (N, classes).
        loss: of (logits, labels), averaged over examples.
        optimizer: called with parameters and ``lr``.
        lr: learning rate.
        schedule: called with the optimizer; None keeps the rate constant.
        average: a call-back that averages weights; None evaluates the weights as they are.
        callbacks: others, such as :class:`~bstune.workloads.averaging.Lookahead`, called before the
            average is taken.
        groups: called with this module and ``lr``, returns the optimizer's parameter groups; None:
            one group of all. See :func:`~bstune.workloads.optim.parameter_groups`.
        channels_last: whether model and images are put in that memory format, best for convolutions
            in half precision.
        test_time: called with a function from images to logits, and with images; returns the logits
            for validation and test in place of the model's own. See :mod:`bstune.workloads.layers`.

    Raises:
        ConfigError: for ``channels_last`` and a model without convolutions; from
            ``configure_optimizers``, for an option of a group that the optimizer does not read, and
            for an optimizer that keeps an average of its own without
            :class:`~bstune.workloads.averaging.OptimizersAverage`, or the reverse.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[Tensor, Tensor], Tensor],
        optimizer: Callable[..., Optimizer],
        lr: float,
        schedule: Callable[[Optimizer], LRScheduler] | None = None,
        average: Callback | None = None,
        *,
        callbacks: Sequence[Callback] = (),
        groups: Callable[..., list[dict[str, Any]]] | None = None,
        channels_last: bool = False,
        test_time: Callable[[Callable[[Tensor], Tensor], Tensor], Tensor] | None = None,
    ) -> None:
        super().__init__()
        if channels_last:
            if not any(parameter.dim() == 4 for parameter in model.parameters()):
                raise ConfigError(
                    f"channels_last is for convolutions, but the model, {type(model).__name__}, "
                    "has none: set workload.module.channels_last=false"
                )
            model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.model = model
        self.channels_last = channels_last
        self.test_time = test_time
        self.loss = loss
        self.make_optimizer = optimizer
        self.lr = lr
        self.make_schedule = schedule
        self.average = average
        self.callbacks = tuple(callbacks)
        self.make_groups = groups
        # The wrong labels, the summed loss and the examples of each batch of the evaluation.
        self._sums: list[Tensor] = []

    def forward(self, images: Tensor) -> Tensor:
        """Compute logits (N, classes)."""
        if self.channels_last:
            images = images.contiguous(memory_format=torch.channels_last)
        logits: Tensor = self.model(images)
        return logits

    @property
    def initial_images(self) -> int:
        """How many images :meth:`initialise_from` needs; 0 if no part of the model needs any."""
        return max((part.images for part in self._parts_from_images()), default=0)

    def initialise_from(self, images: Tensor) -> None:
        """Hand normalised training images (N, C, H, W) to each part that starts from images."""
        for part in self._parts_from_images():
            part.initialise_from(images)

    def _parts_from_images(self) -> list[Any]:
        """Give the parts of the model that start from images, such as whitening."""
        return [part for part in self.model.modules() if hasattr(part, "initialise_from")]

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Compute the batch's mean loss."""
        images, labels = batch
        return self.loss(self(images), labels)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Add up errors and losses on the device, of ``test_time``'s logits where it is given."""
        images, labels = batch
        logits = self(images) if self.test_time is None else self.test_time(self, images)
        self.add_up(logits, labels)

    test_step = validation_step

    def add_up(self, logits: Tensor, labels: Tensor) -> None:
        """Add the errors and losses of logits (N, classes) to the sums of the evaluation."""
        # Three digits of bfloat16 are too few.
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        loss = self.loss(logits, labels).float() * len(labels)
        wrong = (logits.argmax(dim=1) != labels).sum()
        self._sums.append(torch.stack([wrong.float(), loss, torch.full_like(loss, len(labels))]))

    def on_validation_epoch_end(self) -> None:
        """Log ``val/error`` and ``val/loss``."""
        self._log("val")

    def on_test_epoch_end(self) -> None:
        """Log ``test/error`` and ``test/loss``."""
        self._log("test")

    def configure_optimizers(self) -> Any:
        """Make the optimizer, with its schedule stepped once per optimizer step."""
        if self.make_groups is None:
            optimizer = self.make_optimizer(self.parameters(), lr=self.lr)
        else:
            optimizer = self.make_optimizer(self.make_groups(self, lr=self.lr), lr=self.lr)
            _check_groups(optimizer)
        _check_average(optimizer, self.average)
        schedule = self.make_schedule
        if schedule is None and self.make_groups is None:
            return optimizer
        # A group that is trained on its first examples alone needs a schedule even where the rate
        # is constant.
        scheduler = (schedule or constant)(optimizer)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }

    def configure_callbacks(self) -> Sequence[Callback] | Callback:
        """List the call-backs; the one that averages is the last."""
        if self.average is None:
            return [*self.callbacks]
        return [*self.callbacks, self.average]

    def _log(self, stage: str) -> None:
        """Log the error and the loss of an evaluation, ``val`` or ``test``, and drop its sums."""
        # Counts are summed before they are divided: a mean of means would miss a target of 0.1 at
        # 500 of 5,000.
        wrong, loss, examples = torch.stack(self._sums).sum(dim=0)
        self._sums.clear()
        self.log_dict({f"{stage}/error": wrong / examples, f"{stage}/loss": loss / examples})


def _check_average(optimizer: Optimizer, average: Callback | None) -> None:
    """Refuse an optimizer whose own average is not evaluated, and one that has none to evaluate."""
    # Such an optimizer has the methods that OptimizersAverage calls; torch's have none of them.
    keeps_average = callable(getattr(optimizer, "eval", None))
    is_evaluated = isinstance(average, OptimizersAverage)
    if keeps_average == is_evaluated:
        return
    name = type(optimizer).__name__
    if keeps_average:
        raise ConfigError(
            f"{name} keeps an average of its weights, which is to be evaluated: set "
            "schedule=schedule_free"
        )
    raise ConfigError(
        f"schedule=schedule_free evaluates the optimizer's own average, but {name} keeps none: "
        "set algorithm=schedule_free_adamw, or choose another schedule"
    )


def _check_groups(optimizer: Optimizer) -> None:
    """Refuse an option of a group that the optimizer does not read, and that torch would ignore."""
    # The last two are read by schedules.
    known = {*optimizer.defaults, "params", "steps", "fade"}
    unknown = sorted(set[str]().union(*optimizer.param_groups) - known)
    if unknown:
        raise ConfigError(
            f"{type(optimizer).__name__} knows no option {unknown[0]!r} of a group of parameters "
            f"(workload.module.groups.kinds): it has {', '.join(sorted(optimizer.defaults))}"
        )
