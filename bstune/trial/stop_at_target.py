"""A Lightning call-back that ends a fit at its target, and tells the steps and seconds to it.

    stop = StopAtTarget(Target("val_loss", 0.1, mode="min"))
    trainer = Trainer(val_check_interval=50, callbacks=[stop])
    trainer.fit(module, data)
    print(stop.steps_low, stop.steps, stop.time_to_target)

With :class:`bstune.FrontierSampler` it makes the trials of anyone's Optuna study:

>>> import optuna
>>> from lightning.pytorch import Trainer
>>> from bstune import FrontierSampler, StopAtTarget, Target
>>> target = Target("val/accuracy", 0.9, mode="max")
>>> study = optuna.create_study(sampler=FrontierSampler(target=target, seed=0))
>>> def objective(trial):
...     batch_size = trial.suggest_int("batch_size", 8, 256, log=True)
...     lr = trial.suggest_float("lr", 1e-3, 1.0, log=True)
...     stop = StopAtTarget(target)
...     trainer = Trainer(
...         # max_steps is None where the sampler sets no limit.
...         max_steps=study.sampler.max_steps(trial.number) or 300,
...         val_check_interval=5,
...         check_val_every_n_epoch=None,
...         callbacks=[stop],
...     )
...     trainer.fit(MyModule(lr), MyData(batch_size))
...     trial.set_user_attr("steps", stop.steps)  # to the target: in (stop.steps_low, stop.steps]
...     trial.set_user_attr("seconds_per_step", stop.seconds_per_step)
...     for step, value in stop.history:
...         trial.report(value, step)
...     if not stop.reached:
...         raise optuna.TrialPruned
...     return stop.time_to_target
>>> study.optimize(objective, n_trials=6)  # doctest: +SKIP
>>> print(study.best_params, study.best_value)  # doctest: +SKIP

Steps and seconds are counted as in bstune's own trials (:mod:`bstune.trial.loop`).
"""

import time
from collections.abc import Callable
from typing import Any

from bstune.core.clock import Phase, TrialClock, seconds_per_step
from bstune.core.errors import ConfigError
from bstune.core.records import Target
from bstune.trial.devices.device import synchronize
from bstune.trial.lightning.installed import Callback, LightningModule, Trainer
from bstune.trial.parts.metric import metric


class StopAtTarget(Callback):
    """A Lightning call-back that ends a fit at the first evaluation that meets a target.

    It tells the steps and the seconds that this took, and works with both of Lightning's packages.

    Evaluations are the fit's own (``val_check_interval``, ``check_val_every_n_epoch``), its sanity
    check left out. On several devices the fit ends once the target is met on any of them; log the
    metric with ``sync_dist=True``.

    Args:
        target: such as ``Target("val_loss", 0.1, mode="min")``; a value that is not finite does not
            meet it.
        warmup_steps: first steps that are left out of the seconds per step.
        now: a monotonic clock, in seconds.

    Attributes:
        reached: whether the target was met.
        steps: optimizer steps applied until then, or so far. A step that a gradient scaler skips
            does not count; one that several optimizers take counts once.
        steps_low: steps at the last evaluation that missed the target: the steps to target are in
            (``steps_low``, ``steps``].
        history: steps and value of each evaluation; a value of None was not finite.

    Raises:
        ConfigError: at an evaluation that does not log the target's metric.
    """

    def __init__(
        self, target: Target, warmup_steps: int = 5, now: Callable[[], float] = time.perf_counter
    ) -> None:
        self.target = target
        self._warmup_steps = warmup_steps
        self._now = now
        self._reset()

    def _reset(self) -> None:
        """Begin to count from nothing."""
        self.reached = False
        self.steps = 0
        self.steps_low = 0
        self.history: list[tuple[int, float | None]] = []
        self._clock = TrialClock(self._now, synchronize)
        self._is_fitting = False
        # The steps that were taken when the clock's present stretch of training began.
        self._segment_start = 0

    @property
    def seconds_per_step(self) -> float | None:
        """Seconds of a training step: the median over the stretches between evaluations.

        Evaluations are left out. None before the first one.
        """
        return seconds_per_step(self._clock.segments, self._warmup_steps)

    @property
    def time_to_target(self) -> float | None:
        """Steps to target times seconds per step; None if the target was not met."""
        seconds_per_step = self.seconds_per_step
        if not self.reached or seconds_per_step is None:
            return None
        return self.steps * seconds_per_step

    @property
    def train_seconds(self) -> float:
        """Seconds of training so far, evaluations left out."""
        return self._clock.seconds(Phase.TRAINING)

    def state_dict(self) -> dict[str, Any]:
        """Give the counts and the history, which a checkpoint stores.

        A fit that goes on from the checkpoint counts on from them. Its seconds begin anew.
        """
        return {name: getattr(self, name) for name in ("reached", "steps", "steps_low", "history")}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Count on from what :meth:`state_dict` gave."""
        vars(self).update(state_dict)
        self._segment_start = self.steps

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Begin to count anew, where a fit begins."""
        if stage == "fit":
            self._reset()
            self._is_fitting = True

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Ignore evaluations from here on: they are none of the fit's."""
        self._is_fitting = False

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock, which does not run during evaluations.

        The gradient scaler's scale and the count of optimizer steps are noted: by them
        :meth:`on_train_batch_end` tells which batches ended a step.
        """
        self._scaler = getattr(trainer.precision_plugin, "scaler", None)
        self._scale = None if self._scaler is None else self._scaler.get_scale()
        self._optimizer_steps = trainer.global_step
        self._clock.enter(Phase.TRAINING)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count a step if this batch ended one, and a gradient scaler did not skip it."""
        # ``global_step`` rises once an optimizer has stepped, after all batches of the step.
        has_stepped = trainer.global_step > self._optimizer_steps
        self._optimizer_steps = trainer.global_step
        if has_stepped and self._scaler is not None:
            # A scale is lowered at the steps that are skipped, and only then.
            scale = self._scaler.get_scale()
            has_stepped = scale >= self._scale
            self._scale = scale
        if has_stepped and not self.reached:
            self.steps += 1

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop the clock until the evaluation ends."""
        if self._is_fitting and not trainer.sanity_checking and not self.reached:
            self._clock.end_segment(self.steps - self._segment_start, Phase.EVALUATION)
            self._segment_start = self.steps

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Look at the metric, and end the fit or go on."""
        if not self._is_fitting or trainer.sanity_checking or self.reached:
            return
        name = self.target.metric
        if name not in trainer.callback_metrics:
            logged = ", ".join(sorted(trainer.callback_metrics)) or "nothing"
            raise ConfigError(f"the target's metric is {name!r}, but the module logs {logged}")
        value = metric(trainer, name)
        self.history.append((self.steps, value))
        met = value is not None and self.target.reached(value)
        # Once the target is met on one device, the fit ends on all.
        self.reached = trainer.strategy.reduce_boolean_decision(met, all=False)
        if self.reached:
            trainer.should_stop = True
            self._clock.enter(Phase.CLOSING)
        else:
            # The steps to target are more than these.
            self.steps_low = self.steps
            self._clock.enter(Phase.TRAINING)
