"""The work of a trial around an evaluation: whether one is due, and what comes before and after."""

from bstune.trial.devices import distributed
from bstune.trial.lightning.installed import LightningModule, Trainer
from bstune.trial.parts.assemble import Parts
from bstune.trial.parts.metric import checks_all_data, mean_loss


def is_evaluation_due(parts: Parts, trainer: Trainer) -> bool:
    """Whether to evaluate after this step.

    It is evaluated where an evaluation is due, and where the trial, an epoch or the Trainer ends.
    """
    steps = parts.state.steps
    if steps >= parts.cadence.due_step or steps >= parts.state.last_step:
        return True
    if trainer.should_stop or parts.epoch_ends.evaluates(trainer):
        return True
    # The Trainer ends at its max_steps, unless that is -1, for no limit.
    loop = trainer.fit_loop.epoch_loop
    return 0 < loop.max_steps <= loop.global_step


def begin_evaluation(parts: Parts, trainer: Trainer, module: LightningModule) -> None:
    """Prepare an evaluation: close the clock's segment, and keep what the evaluation may change.

    The states of random generators are kept; those of a trial that stops here go into its state.
    """
    parts.phases.begin_evaluation()
    generators = parts.generators.keep()
    parts.snapshot.take(
        parts.state,
        parts.cadence,
        parts.verdict.start_gap,
        generators,
        trainer,
        module,
        has_epochs=parts.epoch_ends.epochs_end,
    )


def end_evaluation(parts: Parts, trainer: Trainer, lean_loop_runs: bool) -> None:
    """Take in an evaluation that has ended, and end the trial or let it go on.

    ``lean_loop_runs`` says whether bstune's own loop takes the steps. It starts the clock again by
    itself, after Lightning has finished with the evaluation.
    """
    # In the sanity check a module may log nothing.
    if trainer.sanity_checking and not parts.metric.is_logged(trainer):
        return
    loss = mean_loss(parts.state.loss)
    is_asked_to_stop = parts.agreed_stop.is_asked(trainer)
    # Processes that train together must all go on, or all stop.
    value, loss, is_asked_to_stop = distributed.agree(
        parts.metric.value(trainer), loss, is_asked_to_stop
    )
    if trainer.sanity_checking:
        # The metric of the untrained weights is measured where all data were evaluated.
        if value is not None and checks_all_data(trainer):
            parts.verdict.begin(value)
        return
    judge(parts, trainer, value, loss, is_asked_to_stop)
    stops = is_asked_to_stop or parts.state.ended
    parts.agreed_stop.decide(trainer, stops)
    # Random numbers that the evaluation drew must not change the training.
    parts.generators.restore()
    parts.phases.end_evaluation(stops, trains=not lean_loop_runs)


def judge(parts: Parts, trainer: Trainer, value: float | None, loss: float, stops: bool) -> None:
    """Take in an evaluation: it ends the trial, or sets the step of the next one.

    Args:
        parts: of the trial.
        trainer: whose metrics tell whether this evaluation has logged the target's.
        value: of the target's metric; None if it is not finite.
        loss: of the last training step.
        stops: whether something else ends the trial.
    """
    state = parts.state
    # This evaluation has not logged the metric: Lightning still has the value of an earlier one.
    if parts.metric.is_from_before(trainer):
        parts.verdict.judge_by_loss(loss)
        # It is in no history, so the cadence need not remember whether it was due.
        if not state.ended:
            parts.cadence.schedule_next(state.steps, state.history, stops)
    # A repeated evaluation was judged before the stop.
    elif not parts.resume.evaluates_again:
        parts.verdict.judge(value, loss)
        if not state.ended:
            parts.cadence.take_in(state.steps, state.history, stops)
    parts.resume.evaluates_again = False
