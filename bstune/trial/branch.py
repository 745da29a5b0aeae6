"""A branch: a trial that goes on from a checkpoint of a user's run, at another batch size.

It begins with the checkpoint's weights and the states of its optimizers and call-backs.
"""

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from bstune.core.errors import ConfigError, InputError
from bstune.core.evaluation_schedule import AT_THE_END
from bstune.core.records import Budget, TrialProtocol, TrialResult, TrialSpec
from bstune.system.inputs import one_line, open_regular
from bstune.trial.lightning.installed import Callback, LightningModule, Trainer
from bstune.trial.lightning.internals import load_callbacks
from bstune.trial.lightning.packages import package_of
from bstune.trial.lightning.trainer import builds_layers_later, without_recording_or_stopping
from bstune.trial.loop import Workload, run_trial

if TYPE_CHECKING:
    from lightning.pytorch.utilities.types import LRSchedulerConfig

# What a checkpoint must have: the type of each part, and the words for it where it is missing.
NEEDED_PARTS = {
    "state_dict": (dict, "weights"),
    "optimizer_states": (list, "an optimizer's state, as one that is saved with weights alone"),
}


def read_checkpoint(path: Path, trusted: bool) -> dict[str, Any]:
    """Read a checkpoint of Lightning's.

    A ConfigError refuses a file that is none, and one that holds more than plain data unless it is
    ``trusted``: reading that runs code which is in it.
    """
    try:
        with open(open_regular(path, "the checkpoint"), "rb") as file:
            checkpoint = torch.load(file, map_location="cpu", weights_only=not trusted)
    except InputError:
        raise
    except pickle.UnpicklingError as error:
        raise ConfigError(
            f"{path} holds more than plain data, such as objects of a project's own, or is no "
            "checkpoint: --trusted reads it all the same, and runs whatever code is in it"
        ) from error
    except Exception as error:
        raise ConfigError(
            f"{path} cannot be read as a checkpoint: {type(error).__name__}: {one_line(str(error))}"
        ) from error
    # Each part without which training cannot go on, with its type and a word for the message.
    for name, (kind, what) in NEEDED_PARTS.items():
        part = checkpoint.get(name) if isinstance(checkpoint, dict) else None
        if not part or not isinstance(part, kind):
            raise ConfigError(
                f"{path} is no checkpoint that training can go on from: it lacks {what}: {name}"
            )
    # Other parts may be missing, and then count as empty.
    weights = checkpoint["state_dict"].values()
    states = checkpoint["optimizer_states"]
    fits = {
        "state_dict": all(isinstance(value, torch.Tensor) for value in weights),
        "optimizer_states": all(isinstance(state, dict) for state in states),
        "callbacks": isinstance(checkpoint.get("callbacks", {}), dict),
        "global_step": isinstance(checkpoint.get("global_step", 0), int),
    }
    for name, has_its_type in fits.items():
        if not has_its_type:
            raise ConfigError(
                f"{path} is no checkpoint of Lightning's: its {name} is of another type"
            )
    return dict(checkpoint)


def examples_seen(checkpoint: Mapping[str, Any], batch_size: int) -> float | None:
    """Compute how many examples a run had trained on, at ``batch_size`` in each step.

    None where the checkpoint does not tell. Lightning's ``global_step`` adds up the steps of all
    optimizers, so with several of them it is no number of batches. It is 0 or missing in a
    checkpoint that was saved without a count of steps.
    """
    steps = checkpoint.get("global_step", 0)
    if len(checkpoint["optimizer_states"]) > 1 or steps < 1:
        return None
    return float(steps * batch_size)


class _FromCheckpoint(Callback):
    """Lets a module train on from a checkpoint: its weights, call-backs and optimizers.

    Args:
        path: the checkpoint's, for messages.
        checkpoint: as :func:`read_checkpoint` gives it.
        metric: the name of the target's metric.
        lr_factor: by which the checkpoint's learning rates are multiplied; then they stay.
    """

    def __init__(
        self, path: Path, checkpoint: Mapping[str, Any], metric: str, lr_factor: float
    ) -> None:
        self._path = path
        self._checkpoint = checkpoint
        self._metric = metric
        self._lr_factor = lr_factor
        # The metric before the first step; None if none was logged.
        self.start: float | None = None

    def attach(self, module: LightningModule) -> LightningModule:
        """Give the module the checkpoint's weights, and itself as one of the module's call-backs.

        Weights of layers that the module builds in ``configure_model`` are loaded after it.
        """
        configure = module.configure_callbacks
        build = module.configure_model

        def configured() -> Sequence[Callback]:
            # A short run from the checkpoint is neither stopped early nor saved.
            others = without_recording_or_stopping({"callbacks": configure()})
            return [self, *others.get("callbacks", ())]

        def built() -> None:
            build()
            self._load(module)

        module.configure_callbacks = configured  # type: ignore[method-assign]
        if builds_layers_later(module, self._checkpoint["state_dict"]):
            module.configure_model = built  # type: ignore[method-assign]
        else:
            self._load(module)
        return module

    def _load(self, module: LightningModule) -> None:
        """Put the checkpoint's weights into a module.

        A ConfigError names the first weight that is missing in one of the two or has another shape.
        """
        checkpoint = {**self._checkpoint, "state_dict": dict(self._checkpoint["state_dict"])}
        module.on_load_checkpoint(checkpoint)
        saved = checkpoint["state_dict"]
        weights = module.state_dict()
        for name in [*weights, *saved]:
            saved_shape = _shape_text(saved, name)
            own_shape = _shape_text(weights, name)
            if saved_shape != own_shape:
                raise ConfigError(
                    f"{self._path} is of another workload: {name} is {saved_shape} in it, and "
                    f"{own_shape} in {type(module).__name__}"
                )
        module.load_state_dict(saved)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Give the Trainer's call-backs their states of the checkpoint."""
        # Lightning would warn of the states of call-backs that the Trainer does not have.
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        keys = {callback.state_key for callback in callbacks}
        saved = self._checkpoint.get("callbacks", {})
        states = {key: state for key, state in saved.items() if key in keys}
        checkpoint = {**self._checkpoint, "callbacks": states}
        load_callbacks(package_of(pl_module), trainer, checkpoint)

    def on_sanity_check_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Record the metric of the checkpoint's weights, before the first step."""
        value = trainer.callback_metrics.get(self._metric)
        self.start = None if value is None else float(value)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Put optimizers back, fix their rates, and count steps on from the checkpoint's."""
        self._load_optimizers(trainer, pl_module)
        _fix_rates(trainer)
        # Steps are counted on, as an average of the weights may go by their number. So the limit
        # rises by the steps before.
        steps_before = int(self._checkpoint.get("global_step", 0))
        loop = trainer.fit_loop.epoch_loop
        # Lightning counts the optimizer steps that were begun (``ready``) and completed.
        counted_steps = loop.automatic_optimization.optim_progress.optimizer.step.total
        counted_steps.ready = steps_before
        counted_steps.completed = steps_before
        if loop.max_steps > 0:
            loop.max_steps += steps_before

    def _load_optimizers(self, trainer: Trainer, module: LightningModule) -> None:
        """Put the checkpoint's states into the optimizers, and multiply their learning rates."""
        saved = self._checkpoint["optimizer_states"]
        optimizers = trainer.optimizers
        if len(saved) != len(optimizers):
            raise ConfigError(
                f"{self._path} is of another workload: it has {len(saved)} optimizers' states, and "
                f"{type(module).__name__} {len(optimizers)}"
            )
        for optimizer, state in zip(optimizers, saved, strict=True):
            try:
                optimizer.load_state_dict(state)
            except (ValueError, LookupError, RuntimeError, TypeError, AttributeError) as error:
                raise ConfigError(
                    f"{self._path} is of another workload: its optimizer's state is not one of "
                    f"{type(optimizer).__name__} here: {str(error).splitlines()[0]}"
                ) from error
            for group in optimizer.param_groups:
                group["lr"] = group["lr"] * self._lr_factor


def _shape_text(states: Mapping[str, torch.Tensor], name: str) -> str:
    """Say in words what shape the weight ``name`` has, or that there is none."""
    if name not in states:
        return "no such weight"
    return f"one of {tuple(states[name].shape)}"


def _fix_rates(trainer: Trainer) -> None:
    """Replace each of torch's schedules by one that keeps the present rates, and drop all others.

    A schedule goes by steps. A branch at a larger batch size takes fewer of them on as many
    examples, so its rates would be others. The new schedule stands in for the old one where a
    module asks its schedule for the rate.
    """
    kept: list[LRSchedulerConfig] = []
    for config in trainer.lr_scheduler_configs:
        schedule: object = config.scheduler
        if not isinstance(schedule, LRScheduler):
            continue
        optimizer = schedule.optimizer
        # A new schedule sets the rate to its factor, here 1, times the initial rate.
        for group in optimizer.param_groups:
            group["initial_lr"] = group["lr"]
        config.scheduler = LambdaLR(optimizer, lambda step: 1.0)
        config.reduce_on_plateau = False
        kept.append(config)
    trainer.strategy.lr_scheduler_configs = kept


def branch(
    workload: Workload,
    protocol: TrialProtocol,
    path: Path,
    checkpoint: Mapping[str, Any],
    users_spec: TrialSpec,
    batch_size: int,
    examples: int,
    lr_exponent: float,
) -> tuple[TrialResult, float | None]:
    """Train on from a checkpoint of a user's run, at a batch size and a constant learning rate.

    Args:
        workload: of the run.
        protocol: of its study; the target does not end the branch.
        path: the checkpoint's, for messages.
        checkpoint: as :func:`read_checkpoint` gives it.
        users_spec: the run's batch size and learning rate, and the branch's seed.
        batch_size: of the branch.
        examples: that the branch trains on, rounded to whole batches.
        lr_exponent: the checkpoint's learning rates are multiplied by
            (batch_size / users_spec.batch_size)^lr_exponent.

    Returns:
        The record, and the metric before the first step (None if it was not logged).

    Raises:
        ConfigError: where the branch ends before its last step, or logs no metric there.
    """
    lr_factor = (batch_size / users_spec.batch_size) ** lr_exponent
    from_checkpoint = _FromCheckpoint(path, checkpoint, protocol.target.metric, lr_factor)
    steps = max(1, round(examples / batch_size))
    protocol = replace(
        # A budget lasts until both its steps and its examples are spent. Its one example is spent
        # by the first step, so that the steps alone decide.
        protocol.for_steps_only(Budget(steps=steps, examples=1)),
        trainer=without_recording_or_stopping(protocol.trainer),
        evaluation_schedule=AT_THE_END,
        noise_scale_every=None,
    )

    # The module is the run's own one, whatever the branch's batch size.
    def build_from_checkpoint(spec: TrialSpec) -> LightningModule:
        return from_checkpoint.attach(workload.build_module(users_spec))

    continued = replace(workload, build_module=build_from_checkpoint)
    record = run_trial(continued, replace(users_spec, batch_size=batch_size), protocol)
    # A branch that has diverged may end early: its record says so.
    was_stopped = record.status == "stopped"
    if was_stopped and record.steps < steps:
        raise ConfigError(
            f"a branch at batch size {batch_size} ended after {record.steps} of its {steps} steps: "
            f"{record.end_message or 'something stopped its Trainer'}"
        )
    if was_stopped and (not record.history or record.history[-1][0] < steps):
        raise ConfigError(
            f"the module does not log {protocol.target.metric} at the end of a branch at batch "
            f"size {batch_size}, after {steps} steps: log it in each validation, or give other "
            "--examples"
        )
    return record, from_checkpoint.start
