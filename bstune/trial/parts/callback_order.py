"""Orders a Trainer's call-backs, with a trial's own ones at both ends."""

from bstune.core.errors import ConfigError
from bstune.trial.backend import refuse_rate_and_batch_size_finders
from bstune.trial.lightning.installed import Callback, LightningModule, Trainer
from bstune.trial.lightning.packages import of_package, package_of


def order_callbacks(
    trainer: Trainer,
    module: LightningModule,
    first: Callback | None,
    last: Callback,
    *,
    stops_early: bool = True,
) -> None:
    """Put two call-backs of a trial before and after all others, the module's own included.

    Args:
        trainer: whose setup is under way.
        module: that it trains.
        first: writes a trial's state before others prepare an evaluation, as by averaging the
            weights; None: no state is written.
        last: counts a step after the others, whose work after a step is still training. The
            Trainer has it already, unlike ``first``.
        stops_early: whether EarlyStopping may end the trial. Else it is left out. Its patience
            counts evaluations or epochs: at a large batch size these have few steps, so that it
            would run out too soon. And a trial that it ended could not go on.

    Raises:
        ConfigError: for a call-back that makes steps of several batches, or sets a value that
            bstune sets.
    """
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    # Call-backs from the module's configure_callbacks can be refused only here, before they act.
    refuse_rate_and_batch_size_finders(callbacks)
    scheduler = of_package(package_of(module), "callbacks.GradientAccumulationScheduler")
    if any(isinstance(callback, scheduler) for callback in callbacks):
        raise ConfigError(
            "GradientAccumulationScheduler makes steps of several batches, but batch sizes count "
            "all accumulated examples: leave it out"
        )
    left_out: tuple[type, ...] = ()
    if not stops_early:
        left_out = (of_package(package_of(module), "callbacks.EarlyStopping"),)
    ordered = list[Callback]()
    for callback in callbacks:
        if callback is not last and not isinstance(callback, left_out):
            ordered.append(callback)
    if first is not None:
        ordered.insert(0, first)
    ordered.append(last)
    trainer.callbacks = ordered  # type: ignore[attr-defined]
