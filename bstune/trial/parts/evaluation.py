"""What a trial does around an evaluation: when it is due, what is kept, what follows."""

from bstune.trial.devices import distributed
from bstune.trial.lightning.installed import LightningModule, Trainer
from bstune.trial.parts.assemble import Parts
from bstune.trial.parts.metric import checks_all_data, mean_loss


def is_evaluation_due(parts: Parts, trainer: Trainer) -> bool:
    """Say whether to evaluate after this step.

    An evaluation is due, or the trial, an epoch or the Trainer ends with it.
    """
    steps = parts.state.steps
    if steps >= parts.cadence.due_step or steps >= parts.state.last_step:
        return True
    if trainer.should_stop or parts.epoch_ends.evaluates(trainer):
        return True
    loop = trainer.fit_loop.epoch_loop
    return 0 < loop.max_steps <= loop.global_step


def begin_evaluation(parts: Parts, trainer: Trainer, module: LightningModule) -> None:
    """Leave the training as it is after this step.

    That is its clock, its random numbers, and the state of a stopped trial.
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
        has_epochs=parts.epoch_ends.exist,
    )


def end_evaluation(parts: Parts, trainer: Trainer, lean_loop_runs: bool) -> None:
    """Take in an evaluation, and end the trial or go on.

    Where the lean loop runs, it starts the clock again: Lightning is not done with the evaluation
    yet.
    """
    # A module may log nothing in the sanity check.
    if trainer.sanity_checking and not parts.metric.is_logged(trainer):
        return
    loss = mean_loss(parts.state.loss)
    asked = parts.agreed_stop.is_asked(trainer)
    value, loss, stops = distributed.agree(parts.metric.value(trainer), loss, asked)
    if trainer.sanity_checking:
        if value is not None and checks_all_data(trainer):
            parts.verdict.begin(value)
        return
    judge(parts, trainer, value, loss, stops)
    stops = stops or parts.state.ended
    parts.agreed_stop.decide(trainer, stops)
    parts.generators.restore()
    parts.phases.end_evaluation(stops, trains=not lean_loop_runs)


def judge(parts: Parts, trainer: Trainer, value: float | None, loss: float, stops: bool) -> None:
    """Let an evaluation end the trial, or say when the next one is due.

    Args:
        parts: of the trial.
        trainer: whose metrics tell whether this evaluation has logged the target's.
        value: of the target's metric; None if it is not finite.
        loss: of the last training step.
        stops: whether something else ends the trial.
    """
    state = parts.state
    if parts.metric.is_from_before(trainer):
        parts.verdict.leave_out(loss)
        if not state.ended:
            parts.cadence.pass_over(state.steps, state.history, stops)
    elif not parts.resume.evaluates_again:
        parts.verdict.judge(value, loss)
        if not state.ended:
            parts.cadence.take_in(state.steps, state.history, stops)
    parts.resume.evaluates_again = False
