"""A trial of an Optuna study of one's own that uses :class:`bstune.FrontierSampler`."""

import math

import optuna

from bstune.search.sampler import SECONDS_PER_STEP, FrontierSampler, spec_of_whole_budget
from bstune.trial.trial import Trial


class OptunaTrial(Trial):
    """It reports to Optuna what is reported to it, and ends where Optuna's pruner says so, too.

    :class:`bstune.StopAtTarget` makes it, where it is given a sampler.

    Args:
        trial: Optuna's, whose batch size and rate were suggested.
        sampler: that suggested them.
    """

    def __init__(self, trial: optuna.Trial, sampler: FrontierSampler) -> None:
        self._optuna, self._question = trial, sampler.question
        proposal = sampler.proposal_of(trial.number)
        spec = spec_of_whole_budget(trial, self._question)  # type: ignore[arg-type]
        own = {"max_steps": proposal.max_steps, "first_evaluation": proposal.first_evaluation}
        total_steps = self._question.last_step(spec.batch_size)
        target = self._question.target
        super().__init__(spec.model_copy(update=own), target, total_steps=total_steps)

    def report(self, step: int, value: float, seconds: float | None = None) -> bool:
        """Judge an evaluation, as :meth:`bstune.trial.trial.Trial.report` does."""
        goes_on = super().report(step, value, seconds)
        self._optuna.report(value, step)
        if goes_on and self._optuna.should_prune():
            self.status = "pruned"
        return self.status is None

    def value(self) -> float:
        """What the objective returns; optuna.TrialPruned where the target was not reached."""
        record = self.record()
        seconds = record.seconds_per_step
        if seconds is not None:
            self._optuna.set_user_attr(SECONDS_PER_STEP, seconds)
        if not record.reached:
            raise optuna.TrialPruned(record.message)
        return self._question.value(record.steps, self.batch_size, lambda _: seconds or math.nan)
