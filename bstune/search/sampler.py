"""The search as an ordinary Optuna sampler, for a study of one's own."""

import math
from collections.abc import Sequence
from typing import Any

from optuna.distributions import BaseDistribution, FloatDistribution, IntDistribution
from optuna.samplers import BaseSampler, RandomSampler
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState

from bstune.core.errors import InputError
from bstune.core.question import Objective, Question
from bstune.core.records import Budget, Record, Spec, Status, StepTime, Target
from bstune.core.space import Space
from bstune.core.step_time import step_time_of_trials
from bstune.search.decide import Proposal, propose

BATCH_SIZE = "batch_size"
LR = "lr"
# A user attribute of trials.
SECONDS_PER_STEP = "seconds_per_step"


def ranges_of(space: Space) -> dict[str, IntDistribution | FloatDistribution]:
    """Batch size and learning rate as Optuna's parameters."""
    return {
        BATCH_SIZE: IntDistribution(space.low, space.high, log=True),
        LR: FloatDistribution(space.lr_low, space.lr_high, log=True),
    }


class FrontierSampler(BaseSampler):
    """Suggests batch size and learning rate, and says how many steps a trial is worth.

    A trial is trained up to its proposal's ``max_steps`` and reports its metric on the way; the
    sampler reads what it reported. It has reached the target at the first value that meets it, and
    diverged where a value is NaN. Trials that reported nothing, and failed ones, tell nothing. Any
    further parameters are drawn at random. For example::

        >>> import optuna
        >>> from bstune import FrontierSampler
        >>> def objective(trial):
        ...     batch_size = trial.suggest_int("batch_size", 8, 512, log=True)
        ...     lr = trial.suggest_float("lr", 0.001, 1.0, log=True)
        ...     speed = 0.1 * lr / (lr + 0.1) ** 2 / (1 + 64 / batch_size)
        ...     for step in range(1, sampler.proposal_of(trial.number).max_steps + 1):
        ...         loss = 1 / (1 + speed * step)  # train a step, and evaluate
        ...         trial.report(loss, step)
        ...         if loss <= 0.1:
        ...             return step * step_time(batch_size)
        ...     raise optuna.TrialPruned
        >>> step_time = lambda batch_size: 0.001 + 0.00001 * batch_size  # in seconds
        >>> ranges = {"batch_size": (8, 512), "lr": (0.001, 1.0), "step_time": step_time}
        >>> sampler = FrontierSampler(target="loss <= 0.1", budget=2000, **ranges)
        >>> optuna.logging.set_verbosity(optuna.logging.WARNING)
        >>> study = optuna.create_study(sampler=sampler)
        >>> study.optimize(objective, n_trials=30)
        >>> 0.05 < study.best_params["lr"] < 0.2
        True

    Args:
        target: such as ``"val/loss <= 0.1"``.
        budget: steps, or a Budget, after which a trial ends without the target.
        batch_size: the smallest and the largest.
        objective: ``time``, ``steps`` or ``curve``, what is sought.
        baseline: batch size and rate that the scaling rule goes through; the first trial runs them.
        lr: the smallest and the largest rate; 10 octaves around the rule's without.
        scaling: the rule, a name as of :func:`bstune.lr_of`.
        step_time: seconds of a step over the batch size; without, the trials' own
            ``seconds_per_step`` count.
        multiple: batch sizes are multiples of it.
        seed: of all decisions.

    Raises:
        InputError: for neither ``lr`` nor ``baseline``, and for a target or rule of no such form.
    """

    def __init__(
        self,
        *,
        target: str | Target,
        budget: int | Budget,
        batch_size: tuple[int, int],
        objective: Objective = "time",
        baseline: tuple[int, float] | None = None,
        lr: tuple[float, float] | None = None,
        scaling: str = "sqrt",
        step_time: StepTime | None = None,
        multiple: int = 1,
        seed: int = 0,
    ) -> None:
        self.question = Question(
            target=Target.parse(target) if isinstance(target, str) else target,
            budget=Budget(steps=budget) if isinstance(budget, int) else budget,
            objective=objective,
        )
        # Without a baseline the rule goes through the geometric middle of both ranges.
        space = Space.around(batch_size, lr or (None, None), scaling, baseline, multiple)
        if space is None:
            raise InputError(
                "give lr=(low, high) or baseline=(batch size, learning rate), but got none"
            )
        self.space = space
        self.baseline = baseline
        self._step_time = step_time
        self._seed = seed
        self._proposals: dict[int, Proposal] = {}
        self._random = RandomSampler(seed=seed)

    def proposal_of(self, number: int) -> Proposal:
        """The configuration of a trial of this process, and the step at which it stops.

        KeyError for a trial that this sampler was not asked for.
        """
        return self._proposals[number]

    def infer_relative_search_space(
        self, study: Study, trial: FrozenTrial
    ) -> dict[str, BaseDistribution]:
        """Batch size and learning rate, which are suggested together."""
        return dict(ranges_of(self.space))

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """Suggest batch size and learning rate, and note the rest of the proposal."""
        others = [one for one in study.get_trials(deepcopy=False) if one.number != trial.number]
        proposal = self._propose(others)
        self._proposals[trial.number] = proposal
        return {BATCH_SIZE: proposal.batch_size, LR: proposal.lr}

    def _propose(self, trials: Sequence[FrozenTrial]) -> Proposal:
        """The baseline first, then what the search proposes; no trial is resumed."""
        if self.baseline is not None and not trials:
            batch_size, lr = self.baseline
            last_step = self.question.budget.last_step(batch_size)
            return Proposal(batch_size=batch_size, lr=lr, max_steps=last_step)
        records = []
        running = []
        for trial in trials:
            record = record_of(trial, self.question)
            if record is not None:
                records.append(record)
            elif trial.state == TrialState.RUNNING and {BATCH_SIZE, LR} <= trial.params.keys():
                running.append(spec_of_whole_budget(trial, self.question))
        step_time = self._step_time or step_time_of_trials(records, 2.0**self.space.middle)
        never = lambda number: False  # noqa: E731
        return propose(
            self.question, self.space, step_time, records, self._seed, running, resumable=never
        )

    def sample_independent(
        self,
        study: Study,
        trial: FrozenTrial,
        param_name: str,
        param_distribution: BaseDistribution,
    ) -> Any:
        """Draw a further parameter at random.

        InputError for a batch size or rate: Optuna asks here where the range of ``suggest_int`` or
        ``suggest_float`` does not hold what was proposed.
        """
        if param_name in (BATCH_SIZE, LR):
            ranges = self.infer_relative_search_space(study, trial)
            raise InputError(
                f"suggest {param_name} within the sampler's own range, {ranges[param_name]}, "
                f"but got {param_distribution}"
            )
        return self._random.sample_independent(study, trial, param_name, param_distribution)

    def reseed_rng(self) -> None:
        """Reseed what is drawn at random; Optuna calls it in processes that are copies."""
        self._random.reseed_rng()


def spec_of_whole_budget(trial: FrozenTrial, question: Question) -> Spec:
    """The spec of an Optuna trial of a study of one's own, to the end of its budget.

    Where it was to stop knows only the process that asked (:meth:`FrontierSampler.proposal_of`).
    """
    return Spec(
        number=trial.number,
        place=f"search/{trial.number}",
        role="search",
        batch_size=trial.params[BATCH_SIZE],
        lr=trial.params[LR],
        seed=0,
        max_steps=question.budget.last_step(trial.params[BATCH_SIZE]),
    )


def record_of(trial: FrozenTrial, question: Question) -> Record | None:
    """How a trial ended, by what it reported; None if that tells nothing."""
    has_ended = trial.state in (TrialState.COMPLETE, TrialState.PRUNED)
    history = sorted((step, value) for step, value in trial.intermediate_values.items())
    if not has_ended or not history or not {BATCH_SIZE, LR} <= trial.params.keys():
        return None
    spec = spec_of_whole_budget(trial, question)
    hits = [step for step, value in history if question.target.reached(value)]
    steps = hits[0] if hits else history[-1][0]
    misses = [step for step, _ in history if step < steps]
    status: Status = "pruned"
    if hits:
        status = "reached"
    elif not all(math.isfinite(value) for _, value in history):
        status = "diverged"
    elif steps >= spec.max_steps:
        status = "finished" if question.seeks_metric else "missed"
    return Record(
        **spec.model_dump(),
        status=status,
        steps=steps,
        steps_low=max(misses, default=0),
        seconds_per_step=trial.user_attrs.get(SECONDS_PER_STEP),
        history=tuple(history),
    )
