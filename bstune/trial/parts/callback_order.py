"""The order of a Trainer's call-backs, in which the trial's own stand at both ends."""

from bstune.core.errors import ConfigError
from bstune.trial.backend import refuse_finders
from bstune.trial.lightning.installed import Callback, LightningModule, Trainer
from bstune.trial.lightning.packages import of_package, package_of


def order_callbacks(
    trainer: Trainer, module: LightningModule, first: Callback | None, last: Callback
) -> None:
    """Put two call-backs before and behind all others, the module's own among them.

    A ConfigError refuses a call-back that makes steps of several batches, or sets what bstune sets.

    Args:
        trainer: whose setup is under way.
        module: that it trains.
        first: writes a state ahead of what others do for an evaluation, such as averaging the
            weights; None: none.
        last: counts steps behind what others do after them, which is still training.
    """
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    # Those that configure_callbacks returns are seen here alone, before any of them does something.
    refuse_finders(callbacks)
    scheduler = of_package(package_of(module), "callbacks.GradientAccumulationScheduler")
    if any(isinstance(callback, scheduler) for callback in callbacks):
        raise ConfigError(
            "GradientAccumulationScheduler makes steps of several batches, but batch sizes count "
            "all accumulated examples: leave it out"
        )
    ordered = [callback for callback in callbacks if callback is not last]
    if first is not None:
        ordered.insert(0, first)
    ordered.append(last)
    trainer.callbacks = ordered  # type: ignore[attr-defined]
