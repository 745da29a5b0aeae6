"""Plain Trainer runs to a target, read at bstune's evaluations and at all of their own."""

import math

from lightning.pytorch import Callback, seed_everything
from projects import plain_trainer

from bstune.core.evaluation_schedule import next_evaluation
from bstune.core.records import Record


class UntilTarget(Callback):
    """Ends a plain fit once an evaluation of bstune's schedule has met the target.

    The fit is evaluated more often than that. Where the metric dips under the target and rises
    again, the two readings differ.

    Args:
        target: to reach.
        batch_size: of the run.
        examples: of one evaluation.
        every: steps between two evaluations of the fit.
        first: the step by which bstune evaluates first.

    Attributes:
        steps: to the target as bstune would have recorded them; infinite where it is missed.
        first_steps: to the target by all evaluations.
    """

    def __init__(self, target, batch_size, examples, every, first):
        self.target = target
        self.of_schedule = (target, batch_size, examples, first)
        self.every = every
        self.history = []
        self.steps = math.inf
        self.first_steps = math.inf

    def on_validation_end(self, trainer, module):
        step = trainer.global_step
        value = float(trainer.callback_metrics[self.target.metric])
        reached = self.target.reached(value)
        if reached and self.first_steps == math.inf:
            # The target was reached at one of the steps since the last evaluation.
            self.first_steps = step - (self.every - 1) / 2
        if step < next_evaluation(self.history, *self.of_schedule):
            return
        missed = max([0, *(earlier for earlier, _ in self.history)])
        self.history.append((step, value))
        if reached:
            record = Record(
                number=0, place="seed/0/0", role="new seed", batch_size=1, lr=1, seed=0,
                max_steps=step, status="reached", steps=step, steps_low=missed,
            )  # fmt: skip
            self.steps = record.steps_to_target
            trainer.should_stop = True


def first_evaluation(records, number):
    """The step by which new seeds of a trial's configuration were first evaluated; None: none."""
    return next((run.first_evaluation for run in records if run.repeats == number), None)


def plain_run(build, target, batch_size, most, seed, every, first=None, **arguments):
    """Train module and data that ``build`` gives, for at most so many steps.

    It is evaluated each ``every`` steps, and read as bstune would that evaluates by ``first``.
    """
    seed_everything(seed, verbose=False)
    module, data = build()
    data.setup("fit")
    examples = len(data.val_dataloader().dataset)
    until = UntilTarget(target, batch_size, examples, every, first)
    evaluated = {"val_check_interval": every, "check_val_every_n_epoch": None}
    trainer = plain_trainer(max_steps=most, callbacks=[until], **evaluated, **arguments)
    trainer.fit(module, datamodule=data)
    return until
