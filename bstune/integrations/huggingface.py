"""Hugging Face's Trainer under a study: a call-back evaluates, times, stops and saves a trial.

::

    study = bstune.Study("mine", target="eval_loss <= 0.5", baseline=(32, 5e-5), budget=2000)
    for trial in study:
        trainer = Trainer(
            model_init=make_model,
            args=training_arguments(trial),
            train_dataset=train,
            eval_dataset=val,
            callbacks=[StopAtTarget(trial, len(val))],
        )
        trainer.train(resume_from_checkpoint=trial.resume_from)
    print(study.result)
"""

import shutil
from collections.abc import Sized
from contextlib import suppress
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from bstune.core.errors import InputError
from bstune.system.files import discard
from bstune.trial.evaluations import Evaluations
from bstune.trial.trial import BatchSizeRefused, Trial, check_batch_size


def _arguments_of_trial(trial: Trial) -> dict[str, Any]:
    """The arguments that every trial has to have."""
    return {
        "learning_rate": trial.lr,
        "seed": trial.seed,
        "max_steps": trial.total_steps,
        # An epoch's last batch may be smaller. Evaluations keep theirs.
        "dataloader_drop_last": True,
        "eval_strategy": "no",
    }


def training_arguments(trial: Trial, **others: Any) -> TrainingArguments:
    """Arguments that train a trial; it is evaluated and saved by :class:`StopAtTarget` alone.

    Args:
        trial: to train.
        others: further arguments, such as ``lr_scheduler_type="constant"``; a batch that does not
            fit is ``per_device_train_batch_size`` times ``gradient_accumulation_steps``.
    """
    defaults = {
        "output_dir": str(trial.save_to or mkdtemp(prefix="bstune-")),
        "per_device_train_batch_size": trial.batch_size,
        "save_strategy": "no",
        "report_to": "none",
    }
    return TrainingArguments(**defaults | _arguments_of_trial(trial) | others)


class StopAtTarget(TrainerCallback):  # type: ignore[misc]
    """Ends a training where its trial ends: at the target, at its last step, or at divergence.

    It evaluates at the steps of :mod:`bstune.core.evaluation_schedule`, without a change to the
    training, and counts the seconds of training alone. A trial that is pruned is saved to
    ``trial.save_to``.

    Args:
        trial: that the evaluations are reported to.
        examples: of the validation data.

    Raises:
        InputError: the arguments are not the trial's, or the target's metric is none of the
            evaluation's, as ``eval_loss`` is.
    """

    def __init__(self, trial: Trial, examples: int) -> None:
        self.trial = trial
        self._examples = examples
        self._is_due = False
        self._is_saving = False

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        train_dataloader: Any = None,
        **_: Any,
    ) -> None:
        """See that the arguments are the trial's, and start the clock."""
        trial = self.trial
        batch_size = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
        if batch_size != trial.batch_size:
            raise InputError(
                f"the Trainer takes {batch_size} examples a step on {args.n_gpu} GPUs and "
                f"{args.world_size} processes, but trial.batch_size is {trial.batch_size}: give it "
                f"training_arguments(trial), and one GPU by CUDA_VISIBLE_DEVICES=0"
            )
        needed = _arguments_of_trial(trial).items()
        wrong = [f"{name}={value}" for name, value in needed if getattr(args, name) != value]
        if wrong:
            raise InputError(
                f"TrainingArguments must have {', '.join(wrong)}: give training_arguments(trial)"
            )
        data = getattr(train_dataloader, "dataset", None)
        try:
            if isinstance(data, Sized):
                check_batch_size(batch_size, len(data))
        except BatchSizeRefused as error:
            trial.fail(error)
            control.should_training_stop = True
        # The loader of the training is made already.
        args.dataloader_drop_last = False
        self._evaluations = Evaluations(trial)
        self._evaluations.begin(state.global_step, self._examples, args.device.type == "cuda")

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Let the Trainer evaluate where an evaluation is due."""
        step = state.global_step
        due = min(self._evaluations.due, self.trial.max_steps)
        self._is_due = step >= due or self.trial.is_late
        if self._is_due:
            self._evaluations.pause(step)
            control.should_evaluate = True
        else:
            self._evaluations.step(step)

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        metrics: dict[str, float],
        **_: Any,
    ) -> None:
        """Report the evaluation, and go on or stop."""
        if not self._is_due:
            return
        self._is_due = False
        step, name = state.global_step, self.trial.target.metric
        if name not in metrics:
            raise InputError(
                f"the target's metric is {name!r}, but the Trainer evaluates {', '.join(metrics)}"
            )
        is_scheduled = step >= self._evaluations.due
        if self._evaluations.report(step, metrics[name], is_scheduled):
            self._evaluations.go_on(step)
            return
        control.should_training_stop = True
        control.should_save = self._is_saving = self.trial.worth_saving

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Put the checkpoint of a trial that is pruned where it is resumed from."""
        if self._is_saving and self.trial.save_to is not None:
            self._is_saving = False
            partial = self.trial.save_to.with_suffix(".partial")
            shutil.move(Path(args.output_dir) / f"checkpoint-{state.global_step}", partial)
            discard(self.trial.save_to)
            partial.replace(self.trial.save_to)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Put the argument back, and leave no empty folder: it would be a checkpoint."""
        args.dataloader_drop_last = True
        with suppress(OSError):
            Path(args.output_dir).rmdir()
