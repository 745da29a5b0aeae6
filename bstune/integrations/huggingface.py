"""Hugging Face's Trainer under a study: a call-back reports evaluations to a trial, and ends it.

>>> from transformers import Trainer, TrainingArguments
>>> import bstune
>>> from bstune.integrations.huggingface import TrialCallback, last_checkpoint
>>> study = bstune.Study(
...     target="eval_loss<=0.5",
...     batch_sizes=(8, 64),
...     reference=(64, 0.1),
...     budget=bstune.Budget(examples=100_000),
... )
>>> for trial in study:  # doctest: +SKIP
...     arguments = TrainingArguments(
...         output_dir=str(trial.save_to),
...         per_device_train_batch_size=trial.batch_size,
...         learning_rate=trial.lr,
...         seed=trial.seed,
...         max_steps=trial.max_steps,
...         lr_scheduler_type="constant",
...         dataloader_drop_last=True,
...         eval_strategy="steps",
...         eval_steps=20,
...         save_strategy="no",
...     )
...     callbacks = [TrialCallback(trial)]
...     trainer = Trainer(
...         make_model(), arguments, train_dataset=train, eval_dataset=val, callbacks=callbacks
...     )
...     trainer.train(resume_from_checkpoint=last_checkpoint(trial))

Arguments that do not train the trial are refused by name. To train with the answer, ``best =
study.result.best``, give ``TrainingArguments(per_device_train_batch_size=best.batch_size,
learning_rate=best.lr, ...)``, with the other arguments as the trials had them. It needs
``pip install 'bstune[huggingface]'``.
"""

import time
from collections.abc import Callable, Sized
from pathlib import Path
from typing import Any, TypeGuard

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint, has_length

from bstune.core.errors import ConfigError
from bstune.trial.devices.device import synchronize
from bstune.trial.devices.errors import warn_once
from bstune.trial.own_loop.loop_trial import LoopTrial, check_examples, name_what_ends

# The Trainer's evaluation has these beside its metrics; endings of their names.
NO_METRICS = ("epoch", "_runtime", "_per_second", "_preparation_time")
# A divisor of the validation rows that is smaller by more than this factor is no batch size.
FAR_SMALLER = 8
# Schedules that do not depend on the number of a trial's steps.
SCHEDULES = ("constant", "constant_with_warmup", "inverse_sqrt")
# A warm-up of more steps for so many than for one is a share of them.
MANY_STEPS = 10**9


def last_checkpoint(trial: LoopTrial) -> str | None:
    """Give the checkpoint from which a trial goes on, for ``resume_from_checkpoint``.

    None if it begins afresh.
    """
    if trial.resume_from is None:
        return None
    checkpoint: str | None = get_last_checkpoint(str(trial.resume_from))
    return checkpoint


class TrialCallback(TrainerCallback):  # type: ignore[misc]
    """Reports evaluations to a trial, stops the training with it, and finishes it.

    Where ``output_dir`` is ``trial.save_to``, a trial that is stopped leaves its checkpoint there,
    and can go on. The seconds are those from the first step after an evaluation to the next
    evaluation.

    Args:
        trial: of a study whose target is a metric of the Trainer's evaluation, such as
            ``eval_loss``.
        now: a monotonic clock, in seconds.

    Raises:
        ConfigError: when training starts, where the arguments are not the trial's, nothing is
            evaluated, the Trainer chooses its batch size itself, or the study may ask for larger
            batches than the training data have examples.

    A trial has failed, and the search goes on, where its batch size alone is at fault: where an
    epoch's last step has fewer examples than the trial's, or no step is taken.
    """

    def __init__(self, trial: LoopTrial, now: Callable[[], float] = time.perf_counter) -> None:
        self._trial = trial
        self._now = now
        self._seconds = 0.0
        # The moment from which on seconds are counted now; None: they are not.
        self._since: float | None = None
        self._has_stepped = False
        # Whether the untrained weights were reported.
        self._has_start = False

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        train_dataloader: Sized | None = None,
        **_: Any,
    ) -> None:
        """Refuse arguments that are not the trial's, and end a trial whose steps would differ."""
        mistakes = _mistakes(args, self._trial, train_dataloader)
        odd_step = _odd_step(args.gradient_accumulation_steps, train_dataloader)
        if odd_step is not None and not mistakes:
            # Other batch sizes may divide an epoch, so that the study goes on.
            self._trial.fail(ConfigError(odd_step))
            control.should_training_stop = True
            return
        if odd_step is not None:
            mistakes.append(odd_step)
        if len(mistakes) > 1:
            listed = "\n".join(f"  {mistake}" for mistake in mistakes)
            raise ConfigError(f"the Trainer does not train the trial:\n{listed}")
        if mistakes:
            raise ConfigError(mistakes[0])

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Begin to count seconds, unless they are counted already."""
        if self._since is None:
            # The work that the device has left to do is no part of these seconds.
            synchronize()
            self._since = self._now()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Have the trial's last step evaluated, and stop counting before an evaluation."""
        self._has_stepped = True
        if state.global_step >= self._trial.max_steps:
            control.should_evaluate = True
        if control.should_evaluate or control.should_training_stop:
            self._pause()

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Stop counting before an evaluation between epochs."""
        if control.should_evaluate:
            self._pause()

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        metrics: dict[str, float],
        eval_dataloader: Sized | None = None,
        **_: Any,
    ) -> None:
        """Report the metric, and stop the training once the trial ends.

        A trial that may go on is saved. Evaluations after the trial's end are not reported.
        """
        trial = self._trial
        if trial.finished is not None:
            return
        left_out = _left_out(args, eval_dataloader)
        if trial.metric not in metrics:
            raise ConfigError(left_out or _without_metric(trial.metric, metrics))
        if left_out is not None:
            warn_once(left_out)
        # Of a trial that goes on, this step was reported before the trial was stopped.
        if 0 < state.global_step <= trial.first_step:
            return
        # The untrained weights may be evaluated twice, as by eval_on_start and by the user's code.
        is_start = state.global_step == 0
        if is_start and self._has_start:
            return
        self._has_start |= is_start
        goes_on = trial.report(state.global_step, metrics[trial.metric])
        if goes_on:
            return
        control.should_training_stop = True
        # A checkpoint elsewhere is not found by the trial that continues this one.
        if trial.worth_saving and Path(args.output_dir) == trial.save_to:
            control.should_save = True

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Finish the trial with the counted seconds; it has failed where no step was taken."""
        self._pause()
        trial = self._trial
        if trial.finished is not None:
            return
        if not self._has_stepped:
            trial.fail(
                ConfigError(
                    "the Trainer took no step, as where an epoch has no whole batch of "
                    f"{trial.batch_size} examples: lower the largest of batch_sizes, or give more "
                    "training data"
                )
            )
            return
        stoppers = [name for name in state.stateful_callbacks if "EarlyStopping" in name]
        if stoppers:
            name_what_ends(trial, stoppers[0])
        trial.finish(seconds=self._seconds)

    def _pause(self) -> None:
        """Stop counting seconds."""
        if self._since is not None:
            # The steps count until the device, too, has ended them.
            synchronize()
            self._seconds += self._now() - self._since
            self._since = None


def _mistakes(
    args: TrainingArguments, trial: LoopTrial, train_dataloader: Sized | None
) -> list[str]:
    """List the arguments and the data with which the Trainer would not train the trial."""
    mistakes = list[str]()
    if args.eval_strategy == "no":
        mistakes.append(
            "the Trainer evaluates nothing, and a trial ends by its metric: give "
            "TrainingArguments(eval_strategy='steps', eval_steps=...)"
        )
    if args.auto_find_batch_size:
        mistakes.append("bstune sets the batch size: leave auto_find_batch_size out")
    if args.world_size > 1:
        mistakes.append(
            f"the Trainer runs in {args.world_size} processes, each of which would search by "
            "itself: run it in one"
        )
    batch_size = args.train_batch_size * args.gradient_accumulation_steps
    if batch_size != trial.batch_size:
        mistakes.append(
            f"the Trainer takes {batch_size} examples a step, but the trial's batch size is "
            f"{trial.batch_size}: give per_device_train_batch_size=trial.batch_size"
        )
    trial_values = {"learning_rate": trial.lr, "seed": trial.seed, "max_steps": trial.max_steps}
    trial_names = {"learning_rate": "lr"}
    for name, value in trial_values.items():
        if getattr(args, name) != value:
            mistakes.append(
                f"the Trainer has {name}={getattr(args, name)}, but the trial {value}: give "
                f"{name}=trial.{trial_names.get(name, name)}"
            )
    if not args.dataloader_drop_last:
        mistakes.append(
            "the last batch of an epoch may be smaller than the trial's: give "
            "dataloader_drop_last=True"
        )
    if not trial.schedule_ends:
        mistakes += _mistakes_of_schedule(args)
    mistakes += _mistakes_of_data(args, trial, train_dataloader)
    return mistakes


def _mistakes_of_schedule(args: TrainingArguments) -> list[str]:
    """List what lets the learning rate depend on the number of a trial's steps."""
    # The type is a member of an enum, or its text.
    schedule = getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type)
    if schedule not in SCHEDULES:
        return [
            f"lr_scheduler_type={schedule} depends on max_steps, which differ from trial to trial: "
            f"give bstune.Study(schedule_ends=True), or one of {', '.join(SCHEDULES)}"
        ]
    # The constant schedule has no warm-up, whatever the arguments say.
    if schedule == "constant" or args.get_warmup_steps(1) == args.get_warmup_steps(MANY_STEPS):
        return []
    return [
        f"warmup_steps={args.warmup_steps:g} is a share of max_steps, which differ from trial to "
        "trial: give bstune.Study(schedule_ends=True), or a whole number of steps"
    ]


def _mistakes_of_data(args: TrainingArguments, trial: LoopTrial, loader: Sized | None) -> list[str]:
    """List what the training data lack for batches of all of the study's sizes."""
    micro_batches = args.gradient_accumulation_steps
    mistakes = list[str]()
    if micro_batches > 1 and not _has_length(loader):
        mistakes.append(
            f"gradient_accumulation_steps={micro_batches} needs training data with a length, as an "
            "epoch's last step may be smaller than the trial's: give such data, or leave it out"
        )
    examples = _examples_of(loader, args.train_batch_size)
    if examples is not None:
        try:
            check_examples(trial, examples)
        except ConfigError as error:
            mistakes.append(str(error))
    return mistakes


def _odd_step(micro_batches: int, loader: Sized | None) -> str | None:
    """Say that an epoch's last step would have fewer micro-batches; None: each step has all.

    The Trainer would take that step with the micro-batches that are left.
    """
    if loader is None or micro_batches == 1 or not _has_length(loader):
        return None
    micro_batches_left = len(loader) % micro_batches
    if not micro_batches_left:
        return None
    return (
        f"an epoch of {len(loader)} micro-batches ends with a step of {micro_batches_left} in "
        f"place of gradient_accumulation_steps={micro_batches}: leave out "
        "examples of the training data until they are a multiple of the trial's batch "
        "size, or leave gradient_accumulation_steps out"
    )


def _has_length(data: object) -> TypeGuard[Sized]:
    """Whether data, or a loader of them, have a length."""
    return data is not None and bool(has_length(data))


def _examples_of(loader: Sized | None, micro_batch_size: int) -> int | None:
    """Count the examples of an epoch, before its last batch is dropped; None: not known.

    A sampler may draw more than the data set has.
    """
    data_set = getattr(loader, "dataset", None)
    if loader is None or not _has_length(loader) or not _has_length(data_set):
        return None
    return max(len(data_set), len(loader) * micro_batch_size)


def _without_metric(metric: str, metrics: dict[str, float]) -> str:
    """Say that an evaluation had another ``metric`` than the target's, and which it had."""
    found = sorted(name for name in metrics if not name.endswith(NO_METRICS))
    if not found:
        return (
            f"the target's metric is {metric!r}, but the Trainer's evaluation has no metric: give "
            "compute_metrics, or validation data with labels"
        )
    return (
        f"the target's metric is {metric!r}, but the Trainer evaluates {', '.join(found)}: let the "
        "target name one of them"
    )


def _left_out(args: TrainingArguments, loader: Sized | None) -> str | None:
    """Say which validation rows ``dataloader_drop_last`` leaves out; None: none, or not known."""
    rows_of = getattr(loader, "dataset", None)
    if loader is None or not _has_length(loader) or not _has_length(rows_of):
        return None
    rows = len(rows_of)
    left_out = rows - len(loader) * args.eval_batch_size
    # A loader that keeps its last batch covers all rows.
    if left_out <= 0 or left_out >= args.eval_batch_size:
        return None
    divisors = [size for size in range(1, args.eval_batch_size + 1) if rows % size == 0]
    divisor = divisors[-1] if FAR_SMALLER * divisors[-1] >= args.eval_batch_size else rows
    return (
        f"the evaluation leaves out {left_out} of {rows} rows, as dataloader_drop_last drops its "
        f"last batch too: give per_device_eval_batch_size={divisor}, which divides them"
    )
