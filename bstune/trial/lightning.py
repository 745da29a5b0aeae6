"""A trial by Lightning: one call-back evaluates, times, stops and saves the user's own training."""

import functools
import itertools
import math
import os
import warnings
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils._pytree import tree_leaves

from bstune.core.errors import InputError
from bstune.recipe.recipe import PACKAGES, Recipe, TrialSettings
from bstune.search.sampler import FrontierSampler
from bstune.trial.batches import (
    AnyLoader,
    RngState,
    count_examples,
    micro_batches,
    rebatch,
    rng_state,
    seed_everything,
    set_rng_state,
    validation_in_batches,
)
from bstune.trial.evaluations import Evaluations
from bstune.trial.noise_beside import NoiseBesideTraining
from bstune.trial.optuna_trial import OptunaTrial
from bstune.trial.other_optimizer import OtherOptimizer
from bstune.trial.trainer import EpochLimit, RateOverride, make_trainer
from bstune.trial.trial import Trial, as_printed
from bstune.trial.worker import tell_where_on_signal

# Parts of a Lightning checkpoint that hold objects of the user's, and that no resumption reads.
HYPER_PARAMETERS = (
    "hyper_parameters",
    "hparams_name",
    "hparams_type",
    "datamodule_hyper_parameters",
    "datamodule_hparams_name",
    "datamodule_hparams_type",
)


# A training whose first so many batches make no step counts none: a scaler skips some 20 at most.
BATCHES_TO_STEP = 300
# A number that no training's batches come to.
NEVER = 10**18


def train(recipe: Recipe, trial: Trial) -> None:
    """Train a trial by Lightning's Trainer until it ends, and report its evaluations.

    A study's worker calls it with each trial.

    Raises:
        InputError: the data's loader or the target's metric cannot be used.
        Exception: whatever the user's code raises.
    """
    own = StopAtTarget(trial)
    callbacks = [NoiseBesideTraining(own), own] if recipe.noise_scale else [own]
    fit(recipe, trial, callbacks, resume_from=trial.resume_from)


def fit(
    recipe: Recipe,
    trial: TrialSettings,
    callbacks: Sequence[Callback],
    resume_from: Path | None = None,
    *,
    quiet: bool = True,
) -> Trainer:
    """Build what is trained, and give it to the user's Trainer, in batches of exactly B examples.

    All training goes through it: trials, that of the best, and a few steps of look-up and survey.

    Args:
        recipe: what is trained.
        trial: its batch size, rate, seed and length.
        callbacks: which evaluate and stop it.
        resume_from: a checkpoint of the same trial.
        quiet: nothing is printed, logged or written; else as the user's Trainer does it.

    Returns:
        The Trainer, which has the module as ``lightning_module``.

    Raises:
        InputError: the data's loader cannot be used.
        Exception: whatever the user's code raises.
    """
    with warnings.catch_warnings():
        if quiet:
            # Lightning's advice, such as on the number of a loader's workers.
            for package in PACKAGES:
                warnings.filterwarnings("ignore", module=package.partition(".")[0])
        return _fit(recipe, trial, callbacks, resume_from, quiet)


def _fit(
    recipe: Recipe,
    trial: TrialSettings,
    callbacks: Sequence[Callback],
    resume_from: Path | None,
    quiet: bool,
) -> Trainer:
    tell_where_on_signal()
    if recipe.threads is not None:
        torch.set_num_threads(recipe.threads)
    rank = int(os.environ["RANK"]) if recipe.devices > 1 else 0
    parts = micro_batches(trial.batch_size, recipe.micro_batch_size, rank, recipe.devices)
    seed_everything(trial.seed)
    # Until the module is built an error may be that of the further values.
    trial.is_building = bool(trial.values)
    module = recipe.module(trial)
    trial.is_building = False
    data = recipe.data(trial)
    is_data_module = hasattr(data, "train_dataloader")
    users_loader = data.train_dataloader if is_data_module else lambda: data[0]
    users_validation = data.val_dataloader if is_data_module else lambda: data[1]

    @functools.cache
    def train_loader() -> AnyLoader:
        """The user's loader in batches of the trial, made once: bstune's call-backs ask, too."""
        return rebatch(
            users_loader(),
            trial.batch_size,
            trial.seed,
            parts,
            limit,
            made_for_size=recipe.data_follows,
            batches_had=trial.first_step,
        )

    keeps_size = recipe.validation_batch_size is None

    def validation_loaders() -> Any:
        given = users_validation()
        return given if keeps_size else validation_in_batches(given, trial.batch_size)

    first: list[Callback] = [EpochLimit(train_loader, trial.total_steps)]
    sizes = [part.stop - part.start for part in parts]
    algorithm, schedule = recipe.algorithm(trial), recipe.schedule(trial)
    if algorithm or schedule:
        first.append(OtherOptimizer(algorithm, schedule))
    if recipe.override_lr:
        first.append(RateOverride(trial.lr))
    callbacks = [*first, *callbacks]
    trainer = make_trainer(recipe, trial, module, callbacks, sizes, quiet=quiet)
    # The loader ends its epochs there itself: a fit that is resumed has to know where one ended.
    limit, trainer.limit_train_batches = trainer.limit_train_batches, 1.0
    fitted: Any = module
    if recipe.compile:
        # torch 2.13 cannot trace what Lightning's log inspects.
        module.log = torch.compiler.disable(module.log)  # type: ignore[method-assign, no-untyped-call]
        # Lightning's way: the steps of the module are compiled, its hooks are not.
        fitted = torch.compile(module, mode=recipe.compile)
    if resume_from is not None:
        # Not every version of Lightning refuses what is more than plain data and tensors.
        torch.load(resume_from, map_location="cpu", weights_only=True, mmap=True)
    start = functools.partial(trainer.fit, fitted, ckpt_path=resume_from)
    if is_data_module:
        # The data module stays the user's, with all its hooks, but for its training loader.
        data.train_dataloader = train_loader
        if not keeps_size:
            data.val_dataloader = validation_loaders
        try:
            start(datamodule=data)
        finally:
            # A survey fits the same data again, at another batch size.
            data.train_dataloader, data.val_dataloader = users_loader, users_validation
    else:
        start(train_dataloaders=train_loader(), val_dataloaders=validation_loaders())
    return trainer


class CountsSteps(Callback):
    """Counts optimizer steps, where Lightning counts others.

    They are those that a gradient scaler skips, and those of each of several optimizers.
    """

    def __init__(self) -> None:
        self.steps = 0

    @property
    @abstractmethod
    def goes_on(self) -> bool:
        """Whether further steps are to come."""

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave the end to this call-back, where Lightning counts other steps."""
        self._scaler: Any = getattr(trainer.precision_plugin, "scaler", None)
        if self._scaler is not None or not pl_module.automatic_optimization:
            trainer.fit_loop.epoch_loop.max_steps = -1
        if self._scaler is not None:
            self._move_schedules_by_steps(trainer, pl_module)

    def _move_schedules_by_steps(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keep schedules that move by step at their place where a scaler skips the step.

        One that ends with the trial, such as OneCycleLR, would else be asked beyond its end.
        """
        move = pl_module.lr_scheduler_step

        def move_unless_skipped(scheduler: Any, metric: Any) -> None:
            """Move as the module does; a schedule by step only if the scaler did not just skip."""
            by_step = [
                one.scheduler for one in trainer.lr_scheduler_configs if one.interval == "step"
            ]
            is_skipped = self._scaler.get_scale() < self._scale_before
            if not (is_skipped and scheduler in by_step):
                move(scheduler, metric)

        pl_module.lr_scheduler_step = move_unless_skipped  # type: ignore[method-assign]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin to count, also where a training is resumed."""
        self._global_step = trainer.global_step
        self._scale_before = self._scaler.get_scale() if self._scaler is not None else 0.0

    def has_stepped(self, trainer: Trainer) -> bool:
        """Count the batch that ended; whether it made a step, of one optimizer or of several.

        A gradient scaler lowers its scale at the steps that it skips, and only then.
        """
        has_stepped = trainer.global_step > self._global_step
        self._global_step = trainer.global_step
        if has_stepped and self._scaler is not None:
            scale = self._scaler.get_scale()
            has_stepped = scale >= self._scale_before
            self._scale_before = scale
        self.steps += has_stepped
        return has_stepped

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Go on as long as the trial does, also where skipped steps make its epochs more."""
        # Lightning updates no ReduceLROnPlateau at the end of an epoch in which it resumed: it ends
        # that state too late.
        trainer.fit_loop._restarting = False
        limit = trainer.fit_loop.max_epochs or -1
        if self.goes_on and limit == trainer.current_epoch + 1:
            trainer.fit_loop.max_epochs = limit + 1


class StopAtTarget(CountsSteps):
    """Ends a fit where its trial ends: at the target, at its last step, or at divergence.

    It evaluates at the steps of :mod:`bstune.core.evaluation_schedule`, without a change to the
    training, and at each epoch's end where ``ReduceLROnPlateau`` reads a metric there. The clock
    runs over training steps alone. A trial that is pruned is saved to ``trial.save_to``; to resume
    it, give ``trial.resume_from`` to ``Trainer.fit`` as ``ckpt_path``.

    In an Optuna study and a Trainer of one's own the loader has to give batches of the size that
    was suggested, and pruned trials are not resumed::

        def objective(trial):
            batch_size = trial.suggest_int("batch_size", 8, 512, log=True)
            lr = trial.suggest_float("lr", 0.001, 1.0, log=True)
            stop = StopAtTarget(trial, sampler)
            loader = DataLoader(data, batch_size, shuffle=True, drop_last=True)
            Trainer(max_epochs=-1, callbacks=[stop]).fit(MyModule(lr), loader, validation_loader)
            return stop.trial.value()

    Args:
        trial: that the evaluations are reported to, a Trial or Optuna's.
        sampler: that suggested Optuna's trial.

    Raises:
        InputError: without validation data, or where the target's metric is not logged.
    """

    def __init__(self, trial: Any, sampler: FrontierSampler | None = None) -> None:
        super().__init__()
        self.trial: Trial = OptunaTrial(trial, sampler) if sampler else trial
        self._is_due = False
        self._is_saving = False
        self._resumed: RngState | None = None
        self.evaluations = Evaluations(self.trial)
        # What schedules read of the evaluations of the schedule.
        self._metrics: dict[str, torch.Tensor] = {}

    @property
    def goes_on(self) -> bool:
        """Whether the trial has not ended."""
        return self.trial.status is None

    def state_dict(self) -> dict[str, Any]:
        """Give what a checkpoint has to keep, in plain data."""
        return {
            "steps": self.steps,
            "on_schedule": self.evaluations.on_schedule,
            "metrics": self._metrics,
            "random": rng_state(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from what :meth:`state_dict` gave, once the training starts."""
        self.steps = state_dict["steps"]
        self.evaluations = Evaluations(self.trial, state_dict["on_schedule"])
        self._metrics = state_dict["metrics"]
        self._resumed = state_dict["random"]

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Let Lightning ask after each batch whether to evaluate."""
        trainer.check_val_every_n_epoch = None
        trainer.val_check_interval = 1

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Put a resumed trial where it was, and start the clock."""
        examples = validation_examples(trainer, self.trial.batch_size)
        self._evaluates_epochs = any(
            config.reduce_on_plateau and config.interval == "epoch"
            for config in trainer.lr_scheduler_configs
        )
        if self._resumed is not None:
            set_rng_state(self._resumed)
            trainer.callback_metrics.update(self._metrics)
            if isinstance(trainer.train_dataloader, AnyLoader):
                trainer.train_dataloader.seek(_batches_trained(trainer))
        super().on_train_start(trainer, pl_module)
        self.evaluations.begin(self.steps, examples, on_cuda=pl_module.device.type == "cuda")

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count the step, and let Lightning evaluate where an evaluation is due."""
        has_stepped = self.has_stepped(trainer)
        self.trial.on_progress()
        most = BATCHES_TO_STEP * trainer.accumulate_grad_batches
        if self.steps == 0 and _batches_trained(trainer) >= most:
            raise InputError(
                f"no optimizer step was made in {BATCHES_TO_STEP} batches: in training_step, step "
                f"the optimizers that self.optimizers() gives"
            )
        self._is_scheduled = self.steps >= self.evaluations.due
        if self._evaluates_epochs and trainer.is_last_batch:
            self._is_scheduled = True
        is_last = self.steps >= self.trial.max_steps or self._is_late(trainer)
        self._is_due = self.steps > self.trial.steps and (self._is_scheduled or is_last)
        # Lightning evaluates after batches whose number is a multiple of this.
        trainer.val_check_batch = _batches_trained(trainer) if self._is_due else NEVER
        if self._is_due:
            self.evaluations.pause(self.steps)
            self._metrics = _copies(trainer.callback_metrics)
        elif has_stepped:
            self.evaluations.step(self.steps)

    def _is_late(self, trainer: Trainer) -> bool:
        """Whether the trial's time is over: for all devices, or for none."""
        is_late = self.trial.is_late
        if trainer.world_size > 1 and self.trial.has_deadline:
            is_late = trainer.strategy.reduce_boolean_decision(is_late, all=False)
        return is_late

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, *arguments: Any
    ) -> None:
        """Say that the evaluation goes on."""
        self.trial.on_progress()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Report the evaluation, and go on or stop."""
        # Lightning evaluates on its own before a training, and where another call-back ends it.
        if not self._is_due:
            return
        name = self.trial.target.metric
        if name not in trainer.callback_metrics:
            logged = ", ".join(sorted(trainer.callback_metrics)) or "nothing"
            raise InputError(f"the target's metric is {name!r}, but the module logs {logged}")
        value = trainer.strategy.broadcast(as_printed(float(trainer.callback_metrics[name])))
        if self._is_scheduled:
            self._metrics = _copies(trainer.callback_metrics)
        goes_on = self.evaluations.report(self.steps, value, self._is_scheduled)
        is_saved = self.trial.worth_saving
        # The first device decides, on one device as on many.
        goes_on, is_saved = trainer.strategy.broadcast((goes_on, is_saved))
        if goes_on:
            # The step at an epoch's start is timed, as the start is a part of the training.
            self.evaluations.go_on(self.steps, cold_steps=0 if trainer.is_last_batch else 1)
            return
        trainer.should_stop = True
        if self.trial.save_to is not None and is_saved:
            self._is_saving = True
            # Beside its place first: a process that is killed meanwhile leaves no half of it.
            partial = self.trial.save_to.with_suffix(".partial")
            trainer.save_checkpoint(partial)
            if trainer.is_global_zero:
                partial.replace(self.trial.save_to)
            self._is_saving = False

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Tell the trial whether the user's code took a step: without one its size is refused."""
        self.trial.has_stepped = self.steps > 0

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Leave out of a trial's own checkpoint what is no plain data."""
        if self._is_saving:
            for name in HYPER_PARAMETERS:
                checkpoint.pop(name, None)


def validation_examples(trainer: Trainer, batch_size: int) -> int:
    """Count the examples that one evaluation takes; InputError where there are none.

    Args:
        trainer: that evaluates.
        batch_size: of batches that do not tell how many they have.
    """
    examples = 0
    loaders = tree_leaves(trainer.val_dataloaders)
    for loader, batches in zip(loaders, trainer.num_val_batches, strict=False):
        try:
            examples += math.ceil(len(loader.dataset) * batches / len(loader))
        # A stream tells it once it is gone through.
        except (TypeError, AttributeError):
            end = None if batches == math.inf else int(batches)
            for batch in itertools.islice(loader, end):
                examples += count_examples(batch) or batch_size
    if examples == 0:
        raise InputError("there is no validation data: give a validation loader")
    return examples


def _batches_trained(trainer: Trainer) -> int:
    """Batches trained so far."""
    return trainer.fit_loop.total_batch_idx + 1


def _copies(metrics: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copy metrics that Lightning goes on to change."""
    return {name: value.detach().clone() for name, value in metrics.items()}
