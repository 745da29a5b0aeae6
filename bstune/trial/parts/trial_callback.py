"""The one call-back of a trial, which passes Lightning's hooks on to the trial's parts.

With a call-back for each part, Lightning's calls would take some percent of a short step. Within a
hook the parts are called in a fixed order: a step is counted before any part reads the count.
"""

from collections.abc import Mapping
from typing import Any

from bstune.trial.batches.half_lives import effective_lr
from bstune.trial.devices import distributed
from bstune.trial.fast.take_steps import StepTaker
from bstune.trial.lightning.installed import Callback, LightningModule, Trainer
from bstune.trial.parts.assemble import Parts
from bstune.trial.parts.callback_order import order_callbacks
from bstune.trial.parts.evaluation import begin_evaluation, end_evaluation, is_evaluation_due


class TrialCallback(Callback):
    """Passes Lightning's hooks on to the parts of a trial, in a fixed order.

    Attributes:
        parts: of the trial.
        module: that is trained; None before the fit.
        step_taker: takes the steps in place of Lightning's loop, where it can; None until a Trainer
            is made.
    """

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self._micro_batches = len(parts.micro_batch_sizes)
        self.module: LightningModule | None = None
        self.step_taker: StepTaker | None = None

    def state_dict(self) -> dict[str, Any]:
        """Give the measurements of the noise scale, for a checkpoint."""
        return self.parts.noise_scale.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up the stopped trial's measurements of the noise scale."""
        self.parts.noise_scale.load_state_dict(state_dict)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Take the last place among the call-backs, and prepare the parts for the first step."""
        parts = self.parts
        self.module = pl_module
        order_callbacks(
            trainer,
            pl_module,
            first=parts.snapshot.writer,
            last=self,
            # A target ends trials, and EarlyStopping would end some before it. An open target is
            # none, or is not known yet: it ends no trial.
            stops_early=parts.protocol.target.is_open,
        )
        # A resumed trial may lack a single step, so that its first step is the last one.
        parts.last_step.bring_forward()
        parts.snapshot.prepare_if_last_step_is_next(parts.state)
        batch_size = parts.spec.batch_size
        parts.noise_scale.setup(trainer, pl_module, stage, batch_size, self._micro_batches)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Take the noise scale's hooks off the module."""
        self.parts.noise_scale.teardown(trainer, pl_module, stage)

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Replace an error of DDP's by a line about the module, where there is one."""
        distributed.explain_ddp(exception)

    def on_sanity_check_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Count the sanity check as evaluation."""
        self.parts.phases.begin_sanity_check()

    def on_sanity_check_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Count start-up again."""
        self.parts.phases.end_sanity_check()

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keep the loaded weights of a trial that goes on, before other hooks change them."""
        self.parts.resume.keep_weights(pl_module)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Prepare the parts for the training, or for going on, and start the training's clock.

        A trial may have been stopped just before an evaluation that it would have had without its
        stop. Then that evaluation comes first, and counts as evaluation.
        """
        parts = self.parts
        # For the record: lr/(1 - m) of SGD or RMSprop with a momentum m.
        parts.state.effective_lr = effective_lr(trainer.optimizers)
        parts.step_count.begin(trainer, pl_module)
        # A resumed trial goes on with the random numbers of its stop, whatever start-up has drawn.
        parts.generators.restore()
        parts.epoch_ends.begin(trainer, pl_module)
        # From here on the seconds count as training.
        parts.phases.begin_training()
        # These two ask whether epochs end, which ``epoch_ends.begin`` has found out.
        parts.resume.begin(trainer, parts.epoch_ends.epochs_end)
        if parts.resume.lacks_evaluation(parts.epoch_ends.evaluates(trainer)):
            # The evaluation may draw random numbers: the states are put back at its end.
            parts.generators.keep()
            parts.resume.evaluate_again(trainer)
            parts.phases.repeat_evaluation()

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Before a batch, restore what a resumed trial lacks; compile and measure off the clock."""
        parts = self.parts
        parts.resume.before_batch(trainer, pl_module)
        parts.compiling.before_training_step(trainer, pl_module, batch, batch_idx)
        parts.noise_scale.before_batch(trainer, pl_module, batch, batch_idx)

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Measure the gradients of the micro-batches."""
        self.parts.noise_scale.after_backward(trainer, pl_module)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count the step, and ask for an evaluation where one is due."""
        parts = self.parts
        # Lightning validates after a batch whose number is a multiple of val_check_batch, so not
        # after this one, unless it is set below.
        trainer.val_check_batch = batch_idx + 2
        # The user's code may have forked this process in the step: a copy ends here.
        parts.one_process.exit_if_forked()
        # Processes that train together stop only where an evaluation has made them agree.
        parts.agreed_stop.hold(trainer)
        parts.state.loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        # The step is not complete: further micro-batches follow.
        if (batch_idx + 1) % self._micro_batches:
            return
        parts.step_count.end_step(trainer)
        # Once the time is over, the next step is the last one.
        parts.last_step.bring_forward()
        parts.snapshot.prepare_if_last_step_is_next(parts.state)
        if is_evaluation_due(parts, trainer):
            trainer.val_check_batch = batch_idx + 1
            begin_evaluation(parts, trainer, pl_module)
        # An evaluation closes the clock's segment itself.
        else:
            parts.phases.close_warmup_segment()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Let Lightning end the epoch, and add another one if the trial lacks steps."""
        # A hook at the end of the epoch may have asked for a stop that not all processes know of.
        self.parts.agreed_stop.hold(trainer)
        self.parts.resume.end_epoch(trainer, pl_module)
        self.parts.epoch_ends.end(trainer)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Put back what hooks have reset, and remember the metric from before the evaluation."""
        self.parts.resume.put_back_stopped_state(trainer, pl_module)
        self.parts.metric.before_evaluation(trainer)

    def on_validation_batch_start(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Compile code for this batch if it needs any, off the clock of the evaluation."""
        self.parts.compiling.before_validation_step(trainer, pl_module, batch, batch_idx)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take in the evaluation: the trial ends, or goes on."""
        # The user's code may have forked this process in the evaluation: a copy ends here.
        self.parts.one_process.exit_if_forked()
        # bstune's own loop, the lean one, takes the steps where it can do what Lightning's does.
        lean_loop_runs = self.step_taker is not None and self.step_taker.runs
        end_evaluation(self.parts, trainer, lean_loop_runs)
