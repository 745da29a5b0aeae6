"""One trial again as a plain ``Trainer.fit``: the same weights, batches and steps, without clock and target."""

import copy
from typing import Any

from lightning.fabric.utilities.data import sized_len
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything

from bstune.core.records import TrialProtocol, TrialSpec
from bstune.trial.batch_sizes import BatchSizes
from bstune.trial.batches import micro_batch_sizes, weight_micro_batches
from bstune.trial.loop import Workload
from bstune.trial.trainer import lengths, listed, of_package, package_of, serving


class Growth(Callback):
    """Lets a Trainer go through the batch sizes of a trial, where they change."""

    def __init__(self, sizes: BatchSizes) -> None:
        self._sizes, self._batches = sizes, 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Raise the learning rates with the batch size from now on."""
        self._sizes.start(trainer)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Let the Trainer know how long the epoch is."""
        if trainer.current_epoch > 0:
            self._sizes.start_epoch(trainer)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Count micro-batches from an epoch's first one on."""
        if batch_idx == 0:
            self._sizes.start_micro_batches(trainer)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Go on to the next size after the last batch of one."""
        self._batches += (batch_idx + 1) % self._sizes.micro == 0
        if self._batches == self._sizes.end:
            self._sizes.change(trainer, self._batches, batch_idx + 1)


def fit(
    workload: Workload, spec: TrialSpec, protocol: TrialProtocol, steps: int, **arguments: Any
) -> tuple[LightningModule, Trainer]:
    """Train a trial's module for ``steps`` steps, validate it, and return it with its Trainer.

    ``arguments`` of the Trainer come before the protocol's; of its call-backs and loggers copies are used. Where the
    batch size changes on the way, a call-back of bstune's changes what goes with it.
    """
    seed_everything(spec.seed, workers=False, verbose=False)
    sizes = BatchSizes(protocol.plan(spec.batch_size), protocol.micro_batch_size, batches=0)
    module, validation = workload.build_module(spec), workload.validation_batches
    train = (
        workload.train_batches(spec, plan=sizes.plan)
        if sizes.plan.changes
        else workload.train_batches(spec)
    )
    if sizes.accumulates:
        weight_micro_batches(module, lambda: sizes.micro)
    parts = int(sizes.micro)
    own = lengths(train, parts, steps, module.automatic_optimization)
    if sized_len(train) is None:  # one endless epoch
        counts = sizes.plan.counts(steps)
        all_parts = sum(
            count * len(micro_batch_sizes(size, protocol.micro_batch_size))
            for size, count in counts
        )
        own = {"max_steps": steps, "check_val_every_n_epoch": None, "val_check_interval": all_parts}
    elif sizes.plan.changes:
        own["max_epochs"] = sizes.epochs(train, steps)
    copied = {
        name: copy.deepcopy(value)
        for name, value in protocol.trainer.items()
        if name in ("callbacks", "logger")
    }
    options = {**protocol.trainer, **copied, **own, "accumulate_grad_batches": parts, **arguments}
    if sizes.plan.changes:
        options["callbacks"] = [*listed(options.get("callbacks")), Growth(sizes)]
    trainer: Trainer = of_package(package_of(module), "Trainer")(**options)
    data = workload.data_module
    if data is None:
        trainer.fit(module, train, validation)
        trainer.validate(module, validation, verbose=False)
    else:
        served = serving(data, sizes.micro.sizes[0], train=train, val=validation)
        trainer.fit(module, datamodule=served)
        trainer.validate(module, datamodule=served, verbose=False)
    return module, trainer
