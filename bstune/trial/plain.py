"""A plain ``Trainer.fit`` that trains as a trial does, without clock and target.

It has the trial's initial weights, batches and steps, so it tells what a trial adds to a fit.
"""

import copy
from collections.abc import Iterable
from typing import Any

from bstune.core.records import TrialProtocol, TrialSpec
from bstune.trial.batches.accumulation import weight_micro_batches
from bstune.trial.batches.micro_batches import micro_batch_sizes_of
from bstune.trial.fast.take_steps import take_steps
from bstune.trial.lightning.installed import LightningModule, Trainer, seed_everything, sized_len
from bstune.trial.lightning.packages import of_package, package_of
from bstune.trial.lightning.trainer import length_arguments, serving
from bstune.trial.loop import Workload


def fit(
    workload: Workload,
    spec: TrialSpec,
    protocol: TrialProtocol,
    steps: int,
    fast: bool = False,
    **arguments: Any,
) -> tuple[LightningModule, Trainer]:
    """Train a trial's module for ``steps`` steps, validate it, and give it with its Trainer.

    This is a ``Trainer.fit`` without a trial's clock and target, to be compared with a trial.
    ``fast`` lets bstune's own loop take the steps in place of Lightning's, where the results are
    the same. ``arguments`` are the Trainer's, and replace those of the protocol. The protocol's
    call-backs and loggers are copied.
    """
    seed_everything(spec.seed, workers=False, verbose=False)
    micro_batch_sizes = micro_batch_sizes_of(spec.batch_size, protocol.micro_batch_size)
    module = workload.build_module(spec)
    validation = workload.validation_batches
    train = workload.train_batches(spec)
    if len(micro_batch_sizes) > 1:
        weight_micro_batches(module, micro_batch_sizes, spec.batch_size)
    options = dict(protocol.trainer)
    # Call-backs and loggers hold state, which this fit must not leave in the protocol.
    for name in ("callbacks", "logger"):
        if name in options:
            options[name] = copy.deepcopy(options[name])
    options |= _length_of_fit(
        train, len(micro_batch_sizes), steps, automatic=module.automatic_optimization
    )
    options["accumulate_grad_batches"] = len(micro_batch_sizes)
    options |= arguments
    # Of Lightning's two packages, a Trainer takes modules of its own alone.
    trainer: Trainer = of_package(package_of(module), "Trainer")(**options)
    if fast:
        take_steps(trainer, protocol.fast)
    data = workload.data_module
    if data is None:
        trainer.fit(module, train, validation)
        trainer.validate(module, validation, verbose=False)
    else:
        served = serving(data, micro_batch_sizes[0], train=train, val=validation)
        trainer.fit(module, datamodule=served)
        trainer.validate(module, datamodule=served, verbose=False)
    return module, trainer


def _length_of_fit(
    train: Iterable[object], parts: int, steps: int, automatic: bool
) -> dict[str, Any]:
    """Give the Trainer's arguments with which a fit takes ``steps`` steps.

    ``parts``: micro-batches of a step. ``automatic``: whether Lightning steps the optimizers.
    """
    if sized_len(train) is not None:
        return length_arguments(train, parts, steps, automatic)
    # Without a length the batches are one endless epoch. The fit validates after its last
    # micro-batch.
    return {
        "max_steps": steps,
        "check_val_every_n_epoch": None,
        "val_check_interval": steps * parts,
    }
