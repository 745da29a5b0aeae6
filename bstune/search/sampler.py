"""bstune's own sampler: an ``optuna.samplers.BaseSampler`` that knows what a batch size is.

In a study of one's own::

    study = optuna.create_study(sampler=FrontierSampler(objective="time", seed=0))
    trial = study.ask()
    batch_size = trial.suggest_int("batch_size", 8, 4096, log=True)
    lr = trial.suggest_float("lr", 1e-4, 1, log=True)
    max_steps = study.sampler.max_steps(trial.number)
    resumed_from = study.sampler.resumed_from(trial.number)
    ...  # train for at most `max_steps` steps, calling trial.report(value, step) at each evaluation
    trial.set_user_attr("steps", steps)  # that were trained
    trial.set_user_attr("seconds_per_step", tau)
    study.tell(trial, seconds_to_target)  # or state=TrialState.PRUNED if the target was not reached

With ``target`` it reads the reported values. A stopped trial is suggested again, to be continued
from its checkpoint, only where ``resumable`` allows it. Further parameters of the study join the
model.

The best metric within a budget needs no target. A trial runs to a share of its budget first, waits,
and goes on if it is chosen again (:mod:`bstune.search.fixed_budget`)::

    sampler = FrontierSampler(
        objective="loss", budget=lambda size: 300.0 / tau(size), resumable=lambda number: True
    )
    study = optuna.create_study(direction="minimize", sampler=sampler)
    trial = study.ask()
    batch_size = trial.suggest_int("batch_size", 8, 4096, log=True)
    lr = trial.suggest_float("lr", 1e-4, 1, log=True)
    max_steps = sampler.max_steps(trial.number)
    resumed_from = sampler.resumed_from(trial.number)
    if resumed_from is not None:  # train on from its checkpoint
        trial.set_user_attr("bstune:resumed_from", resumed_from)
    ...  # train up to step `max_steps`; trial.report(value, step) at each evaluation, and there
    trial.set_user_attr("steps", max_steps)
    study.tell(trial, value)  # at the budget's end; before it, state=TrialState.PRUNED, and
    # trial.set_user_attr("status", "diverged") with it if the training broke
"""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from functools import cache, lru_cache
from importlib.resources import files
from typing import Any

import numpy as np
import optuna
import yaml
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.samplers import BaseSampler
from optuna.search_space import IntersectionSearchSpace
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from bstune.core.errors import ConfigError
from bstune.core.objectives import OBJECTIVES, Objective
from bstune.core.records import Mode, Status, Target, TrialResult, TrialSpec
from bstune.search.acquisition import Policy, suggest
from bstune.search.budget_decision import suggest_within_budget
from bstune.search.budget_runs import last_whole_step
from bstune.search.candidates import Pending, Suggestion
from bstune.search.coordinates import BATCH_SIZE, DELTA, LR, Coordinates, value_at
from bstune.search.fixed_budget import (
    LOSS,
    BudgetPosterior,
    infer_at_budget,
    rank_full_trials,
    shortened,
)
from bstune.search.frontier_law import Prior, make_prior
from bstune.search.noise_scale_prior import noise_scale_prior
from bstune.search.posterior import Posterior, infer, start_from_fewer
from bstune.search.predictions import predict_objectives

logger = logging.getLogger(__name__)
# User attribute of a trial: its record, as JSON.
RECORD = "bstune:record"
# User attribute of a trial: the number of the trial that it continues.
RESUMED_FROM = "bstune:resumed_from"
# A posterior that others are sampled from has so many times the draws of a decision's.
START_DRAWS = 2
# Parsed records that are remembered: every decision reads all of them, most of them once more.
PARSED_RECORDS = 4096
# What a finished trial of a study of one's own has to tell, by the objective.
_STEPS_AND_SECONDS = (
    "set its user attributes 'steps', 1 or more, and 'seconds_per_step', above 0; its value stands "
    "in for the second alone"
)
NEEDED: Mapping[Objective, str] = {
    "time": _STEPS_AND_SECONDS,
    "curve": _STEPS_AND_SECONDS,
    "steps": "set its user attribute 'steps', 1 or more, or return them as its value",
    "both": (
        "set its user attributes 'steps', 1 or more, and 'seconds_per_step', above 0, or return "
        "steps and seconds to the target as its two values"
    ),
    "loss": "set its user attribute 'steps', 1 or more, or report its metric",
}
# The budget in steps where there is none: no trial has as many.
NO_BUDGET = 1e12
# The budget in steps that the prior of log S is made from where there is none.
USUAL_BUDGET = 1000.0


@cache
def _defaults(name: str, section: str) -> dict[str, Any]:
    """Read the values of a section of a file in ``conf/``: every default stands there once."""
    text = files("bstune.conf").joinpath(name).read_text(encoding="utf-8")
    values = yaml.safe_load(text)[section]
    return {key: value for key, value in values.items() if key != "_target_"}


def default_policy() -> Policy:
    """Read the policy of ``conf/sampler/frontier.yaml``."""
    return Policy(**_defaults("sampler/frontier.yaml", "policy"))


class FrontierSampler(BaseSampler):
    """Searches batch size and learning rate in any Optuna study, and says when a trial is to stop.

    A suggestion is the best one for its cost in one draw of a posterior over the steps to the
    target. The module's docstring has a study of one's own. The study needs an integer
    ``batch_size`` and either ``lr`` or, with a rule, ``delta`` = log2(lr / rule(B)), in all of its
    trials; its values are minimized. Failed trials are passed over. So are those that do not tell
    their steps: by the user attribute ``steps``, by the last step that they report or, for
    ``steps`` and ``both``, by their value.

    Args:
        objective: ``time`` (steps x seconds per step), ``steps``, ``both`` (in turn, of a study
            whose two values are steps and seconds), ``curve`` (B_crit), or ``loss`` (the best
            metric at the budget's end).
        rule: learning rate over batch size, the prior mean of the best one; None: the square-root
            rule through the middle of both ranges.
        sigma: how far from the rule, in octaves: the scale of a Student's t with 3 degrees of
            freedom; None for ``prior.level_sigma`` of ``conf/config.yaml``.
        exponent_sigma: how far the exponent of lr*(B) may lie from the rule's: one standard
            deviation; None for ``prior.exponent_sigma`` of ``conf/config.yaml``.
        noise_scale: in examples, a wide prior of B_crit; None for the one that trials measured, if
            they did (see :mod:`bstune.search.frontier_law`).
        budget: steps over batch size at which a trial ends in any case; None for none, and then the
            first trial has no limit. The objective ``loss`` needs it.
        target: the target of the values that are reported; None: they are not read. The objective
            ``loss`` takes nothing but its mode from it, which else is the study's direction.
        ideal: the best value of the target's metric; None if unknown.
        resumable: whether a stopped trial can be continued, by number; None: none can.
        snap: returns the batch size that a trial uses; None for rounding.
        lr_range: smallest and largest learning rate that can be had; None for what the parameters
            allow.
        step_time: seconds per step over batch size, measured before the first trial; None: not
            measured.
        horizon: whether a trial's schedule ends with its ``max_steps``, which are then chosen so
            that it just reaches the target, within the budget; set the user attribute ``horizon``
            to them. For ``loss``: the budget's.
        search_space: the study's parameters, if they are fixed before the first trial.
        policy: how to spend; None for that of ``conf/sampler/frontier.yaml``.
        seed: None for one that is drawn.

    Raises:
        ConfigError: for an unknown objective or a number that cannot be; as trials are asked, for a
            study that is maximized, or whose trials share parameters but not those above.
    """

    # The arguments that a study fills in. Any sampler may have it, and max_steps and resumed_from.
    context: tuple[str, ...] = (
        "objective",
        "rule",
        "budget",
        "target",
        "ideal",
        "resumable",
        "snap",
        "lr_range",
        "step_time",
        "horizon",
        "search_space",
    )

    def __init__(
        self,
        *,
        objective: Objective = "time",
        rule: Callable[[float], float] | None = None,
        sigma: float | None = None,
        exponent_sigma: float | None = None,
        noise_scale: float | None = None,
        budget: Callable[[float], float] | None = None,
        target: Target | None = None,
        ideal: float | None = None,
        resumable: Callable[[int], bool] | None = None,
        snap: Callable[[float], int] | None = None,
        lr_range: tuple[float, float] | None = None,
        step_time: Callable[[float], float] | None = None,
        horizon: bool = False,
        search_space: Mapping[str, BaseDistribution] | None = None,
        policy: Policy | None = None,
        seed: int | None = None,
    ) -> None:
        if objective not in OBJECTIVES:
            raise ConfigError(
                f"the objective must be one of {', '.join(OBJECTIVES)}, but got {objective!r}"
            )
        if objective == LOSS and budget is None:
            raise ConfigError(
                "the objective loss is the best metric at a budget's end: give budget, the steps "
                "over batch size"
            )
        scales = {"sigma": sigma, "exponent_sigma": exponent_sigma, "noise_scale": noise_scale}
        for name, value in scales.items():
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ConfigError(f"{name} must be a positive number, but got {value}")
        self.objective = objective
        self._rule = rule
        prior = _defaults("config.yaml", "prior")
        self._sigma = prior["level_sigma"] if sigma is None else sigma
        self._exponent_sigma = prior["exponent_sigma"] if exponent_sigma is None else exponent_sigma
        self._noise_scale = noise_scale
        self._budget = budget
        self._target = target
        self._ideal = ideal
        self._resumable = resumable
        self._snap = snap or round
        self._lr_range = lr_range
        self._step_time = step_time
        self.horizon = horizon
        self._search_space = dict(search_space) if search_space is not None else None
        self._intersection = IntersectionSearchSpace(include_pruned=True)
        self._policy = policy or default_policy()
        self._rng = np.random.default_rng(seed)
        # By a trial's number: the step to train to, the trial it continues, the one it repeats.
        self._max_steps: dict[int, int] = {}
        self._resumed_from: dict[int, int] = {}
        self._repeats: dict[int, int] = {}
        # Whether a warning has told of trials that are passed over.
        self._has_warned = False

    def max_steps(self, number: int) -> int | None:
        """Look up the step to which trial ``number`` is to be trained; None without a limit."""
        return self._max_steps.get(number)

    def resumed_from(self, number: int) -> int | None:
        """Look up the stopped trial that trial ``number`` continues; None if it begins afresh."""
        return self._resumed_from.get(number)

    def repeats(self, number: int) -> int | None:
        """Look up the trial that trial ``number`` runs again on a fresh seed; None if none."""
        return self._repeats.get(number)

    def reseed_rng(self) -> None:
        """Draw a new seed, as Optuna asks of a sampler that is copied to another process."""
        self._rng = np.random.default_rng()

    def infer_relative_search_space(
        self, study: optuna.Study, trial: FrozenTrial
    ) -> dict[str, BaseDistribution]:
        """Find the parameters that all trials share; empty before the first one has finished."""
        if StudyDirection.MAXIMIZE in study.directions and self.objective != LOSS:
            raise ConfigError(
                f"steps and seconds are minimized, but study {study.study_name!r} maximizes"
            )
        return self._space(study)

    def _space(self, study: optuna.Study) -> dict[str, BaseDistribution]:
        """Find the parameters that all trials of a study share, and check that they are usable."""
        space = self._search_space or self._intersection.calculate(study)
        has_rate = LR in space or (DELTA in space and self._rule is not None)
        if space and not (BATCH_SIZE in space and has_rate):
            raise ConfigError(
                "FrontierSampler needs batch_size and lr, or delta and a rule, as parameters of "
                f"all trials of a study, but what they share is {', '.join(sorted(space))}"
            )
        return dict(space)

    def _space_of_trials(
        self, trials: optuna.Study | Sequence[TrialResult]
    ) -> dict[str, BaseDistribution] | None:
        """Find the parameters of a study. Records alone have those that the sampler was made with.

        None, or an empty mapping, where there are none.
        """
        if isinstance(trials, optuna.Study):
            return self._space(trials)
        return self._search_space

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """Choose the next trial's parameters.

        What Optuna has no place for is noted by the trial's number: its last step, and the trial
        that it continues or repeats. :meth:`max_steps`, :meth:`resumed_from` and :meth:`repeats`
        tell it to the study. Empty where the trials so far share no batch size, as before the first
        one has finished.
        """
        if BATCH_SIZE not in search_space:
            return {}
        coordinates = Coordinates(search_space, self._rule, self._snap, self._lr_range)
        trials = [t for t in study.get_trials(deepcopy=False) if t.number != trial.number]
        pending = _pending(trials, coordinates)
        # Both methods note the trial's last step, too.
        if self.objective == LOSS:
            suggestion = self._suggest_at_budget(study, trials, pending, coordinates, trial.number)
        else:
            suggestion = self._suggest_to_target(trials, pending, coordinates, trial.number)
        same_as: int | None = None
        if suggestion.repeats is not None:
            self._repeats[trial.number] = suggestion.repeats
            same_as = suggestion.repeats
        if suggestion.resumed_from is not None:
            self._resumed_from[trial.number] = suggestion.resumed_from
            same_as = suggestion.resumed_from
        if same_as is None:
            return coordinates.parameters(suggestion)
        # What goes on or runs again has its trial's own values: on the way to the logs in which
        # points are suggested, and back, they would be rounded.
        same = next(t for t in trials if t.number == same_as)
        return {name: same.params[name] for name in search_space}

    def _suggest_to_target(
        self,
        trials: Sequence[FrozenTrial],
        pending: Pending,
        coordinates: Coordinates,
        number: int,
    ) -> Suggestion:
        """Choose trial ``number`` for a target, and note the limit of its steps, if any."""
        results, others = self._finished_records(trials, coordinates)
        posterior = self._infer(results, others, coordinates, self._rng)
        objective: str = self.objective
        if objective == "both":
            # The two objectives take turns. A failed trial does not count: the one that is asked
            # for in its place has the same turn.
            turns = sum(t.state != TrialState.FAIL for t in trials)
            objective = "time" if turns % 2 == 0 else "steps"
        suggestion = suggest(
            posterior,
            pending,
            objective=objective,
            domain=coordinates.domain(),
            budget=self._budget or _no_budget,
            resumable=self._resumable,
            policy=self._policy,
            rng=self._rng,
        )
        # Without a budget nothing limits a trial before one has reached the target.
        if self.horizon or self._budget is not None or posterior.reached:
            self._max_steps[number] = suggestion.max_steps
        return suggestion

    def _suggest_at_budget(
        self,
        study: optuna.Study,
        trials: Sequence[FrozenTrial],
        pending: Pending,
        coordinates: Coordinates,
        number: int,
    ) -> Suggestion:
        """Choose trial ``number`` for the best metric at a budget's end, and note its last step."""
        results, others = self._finished_records(trials, coordinates)
        mode = self._mode(study)
        posterior = self._infer_at_budget(results, others, coordinates, mode, self._rng)
        # A schedule that ends with the budget cannot be stopped on the way and compared there.
        resumable = None if self.horizon else self._resumable
        suggestion = suggest_within_budget(
            posterior,
            pending,
            domain=coordinates.domain(),
            resumable=resumable,
            policy=self._policy,
            rng=self._rng,
        )
        self._max_steps[number] = suggestion.max_steps
        return suggestion

    def sample_independent(
        self,
        study: optuna.Study,
        trial: FrozenTrial,
        param_name: str,
        param_distribution: BaseDistribution,
    ) -> Any:
        """Choose a parameter that the trials do not share.

        A number is the middle of its range in the first trial, and any value of the range later:
        after a first trial that fails, the next one must be another. A category is any of them.
        """
        if isinstance(param_distribution, CategoricalDistribution):
            choices = param_distribution.choices
            return choices[int(self._rng.integers(len(choices)))]
        if isinstance(param_distribution, IntDistribution | FloatDistribution):
            share = 0.5 if trial.number == 0 else self._rng.random()
            return value_at(share, param_distribution)
        raise ConfigError(
            f"the parameter {param_name} has a distribution of unknown kind, {param_distribution}"
        )

    def posterior(
        self,
        trials: optuna.Study | Sequence[TrialResult],
        *,
        particles: int | None = None,
        moves: int | None = None,
        rng: np.random.Generator | None = None,
        independent: bool = True,
    ) -> Posterior | None:
        """Sample the posterior of the frontier; None before the study has parameters.

        The call does not change the sampler's next decision.

        Args:
            trials: a study, or records of its trials, whose ``hyperparameters`` are the further
                parameters; records need ``search_space``.
            particles: how many draws to take; None for the policy's number.
            moves: Metropolis steps at each temperature; None for the policy's number, with which
                intervals come out too narrow.
            rng: the source of chance; None for a copy of the sampler's own.
            independent: False where trials may repeat a recorded run: those of one history then
                count as one.

        Raises:
            ConfigError: if the trials share parameters, but not ``batch_size`` and ``lr`` or
                ``delta``.
        """
        space = self._space_of_trials(trials)
        if not space:
            return None
        coordinates = Coordinates(space, self._rule, self._snap, self._lr_range)
        records, others = self._read_records(trials, coordinates)
        # Whoever looks at the posterior must not move the next decision.
        if rng is None:
            rng = deepcopy(self._rng)
        return self._infer(
            records,
            others,
            coordinates,
            rng,
            particles=particles,
            moves=moves,
            independent=independent,
        )

    def budget_posterior(
        self,
        trials: optuna.Study | Sequence[TrialResult],
        *,
        mode: Mode | None = None,
        share: float = 1.0,
        particles: int | None = None,
        moves: int | None = None,
        rng: np.random.Generator | None = None,
    ) -> BudgetPosterior | None:
        """Sample the posterior of the objective ``loss``; None before the study has parameters.

        Args:
            trials: a study, or records of its trials, whose ``hyperparameters`` are the further
                parameters; records need ``search_space``.
            mode: whether the metric falls or rises; None for the target's, else the study's
                direction.
            share: of the budget, at which the trials are cut: what a shorter budget would have
                shown.
            particles: how many draws to take; None for the policy's number.
            moves: Metropolis steps at each temperature; None for the policy's number.
            rng: the source of chance; None for a copy of the sampler's own.

        Raises:
            ConfigError: for another objective, or records without any mode.
        """
        if self.objective != LOSS:
            raise ConfigError(f"budget_posterior is of the objective loss, not {self.objective}")
        space = self._space_of_trials(trials)
        if not space:
            return None
        if mode is None:
            study = trials if isinstance(trials, optuna.Study) else None
            mode = self._mode(study)
        coordinates = Coordinates(space, self._rule, self._snap, self._lr_range)
        records, others = self._read_records(trials, coordinates)
        # Whoever looks at the posterior must not move the next decision.
        if rng is None:
            rng = deepcopy(self._rng)
        return self._infer_at_budget(
            records, others, coordinates, mode, rng, share=share, particles=particles, moves=moves
        )

    def _read_records(
        self, trials: optuna.Study | Sequence[TrialResult], coordinates: Coordinates
    ) -> tuple[list[TrialResult], dict[int, tuple[float, ...]]]:
        """Read the usable records of a study's trials, or choose those among given records.

        Their other hyper-parameters go with them, by the trial's number and in [0, 1].
        """
        if isinstance(trials, optuna.Study):
            return self._finished_records(trials.get_trials(deepcopy=False), coordinates)
        records = [trial for trial in trials if trial.status != "failed"]
        others = {trial.number: coordinates.others(trial.hyperparameters) for trial in records}
        return records, others

    def _mode(self, study: optuna.Study | None) -> Mode:
        """Tell whether the metric is to fall, ``min``, or to rise, ``max``.

        The target says so, else the study's direction.
        """
        if self._target is not None:
            return self._target.mode
        if study is None:
            raise ConfigError("records do not say whether their metric falls or rises: give mode")
        return "max" if study.directions[0] == StudyDirection.MAXIMIZE else "min"

    def _infer_at_budget(
        self,
        results: Sequence[TrialResult],
        others: Mapping[int, tuple[float, ...]],
        coordinates: Coordinates,
        mode: Mode,
        rng: np.random.Generator,
        *,
        share: float = 1.0,
        particles: int | None = None,
        moves: int | None = None,
    ) -> BudgetPosterior:
        """Sample the posterior of the objective ``loss`` for a share of the budget.

        Arguments are as of :meth:`budget_posterior`.
        """
        whole = self._budget
        if whole is None:
            raise ConfigError("the objective loss needs a budget")
        budget = whole
        if share != 1.0:
            results = shortened(results, whole, share)

            def budget(batch_size: float) -> float:
                """Compute the steps of the shorter budget."""
                return share * whole(batch_size)

        middle = math.sqrt(coordinates.low * coordinates.high)
        prior = make_prior(
            low=coordinates.low,
            high=coordinates.high,
            rule=coordinates.log_rule,
            # S is the steps to the best trial's metric at its budget's end, so it is about the
            # budget. ``make_prior`` guesses that S is a quarter of the budget: hence the factor.
            log_budget=math.log(4.0 * budget(middle)),
            sigma=self._sigma,
            exponent_sigma=self._exponent_sigma,
            noise_scale=self._noise_scale,
            others=coordinates.columns,
        )
        return infer_at_budget(
            results,
            others,
            prior=prior,
            budget=budget,
            mode=mode,
            ideal=self._ideal,
            policy=self._policy,
            rng=rng,
            particles=particles,
            moves=moves,
        )

    def recommended(self, study: optuna.Study) -> int | None:
        """Name the trial whose fresh seed is predicted to be best, by time for ``both``.

        It is one that reached the target, or for ``loss`` one that ran to its budget's end; None
        before there is any.
        """
        if self.objective == LOSS:
            at_budget = self.budget_posterior(study)
            if at_budget is None:
                return None
            expected = rank_full_trials(at_budget)
            if not expected:
                return None
            return expected[0].run.number
        posterior = self.posterior(study)
        if posterior is None or not posterior.reached:
            return None
        # For the curve, or for steps and time, the fastest is recommended.
        objective = "steps" if self.objective == "steps" else "time"
        _, best = min(predict_objectives(posterior, objective), key=lambda pair: pair[0])
        return best.number

    def _finished_records(
        self, trials: Sequence[FrozenTrial], coordinates: Coordinates
    ) -> tuple[list[TrialResult], dict[int, tuple[float, ...]]]:
        """Read the records of the finished trials, and their other hyper-parameters by number.

        Trials without usable numbers are passed over, with a warning at the first of them.
        """
        results = list[TrialResult]()
        others = dict[int, tuple[float, ...]]()
        for trial in trials:
            finished = trial.state in (TrialState.COMPLETE, TrialState.PRUNED)
            if not finished or not coordinates.complete(trial.params):
                continue
            result = self._read_result(trial, coordinates)
            if result is not None:
                results.append(result)
                others[trial.number] = coordinates.others(trial.params)
            # The first one is enough, as the other trials of a study lack the same.
            elif not self._has_warned:
                self._has_warned = True
                self._warn_of(trial)
        return results, others

    def _warn_of(self, trial: FrozenTrial) -> None:
        """Warn that a trial is passed over, and others like it, with what they lack."""
        given = {name: trial.user_attrs.get(name) for name in ("steps", "seconds_per_step")}
        told = ", ".join(f"{name}={value!r}" for name, value in given.items())
        logger.warning(
            "trial %d is passed over, as are others like it, so that nothing is learned from them: "
            "%s; it has %s, values=%s",
            trial.number,
            NEEDED[self.objective],
            told,
            trial.values,
        )

    def _read_result(self, trial: FrozenTrial, coordinates: Coordinates) -> TrialResult | None:
        """Read a finished trial's record; None without usable numbers."""
        if self.objective == LOSS and self._budget is not None and RECORD not in trial.user_attrs:
            return result_at_budget(trial, coordinates, self._budget)
        return trial_result(trial, coordinates, self.objective)

    def _infer(
        self,
        results: Sequence[TrialResult],
        others: Mapping[int, tuple[float, ...]],
        coordinates: Coordinates,
        rng: np.random.Generator,
        *,
        particles: int | None = None,
        moves: int | None = None,
        independent: bool = True,
    ) -> Posterior:
        """Sample the posterior of the frontier.

        ``results`` and ``others`` are as :meth:`_read_records` gives them, the other arguments as
        of :meth:`posterior`. Of many trials it is sampled from the posterior of fewer of them,
        which is near and remembered.
        """

        def prior_of(trials: Sequence[TrialResult]) -> Prior:
            """Make the prior that these trials' noise scale sets."""
            return self._prior(trials, coordinates)

        # One start serves calls with any number of particles and moves.
        start = start_from_fewer(
            results,
            others,
            prior_of=prior_of,
            target=self._target,
            ideal=self._ideal,
            particles=START_DRAWS * self._policy.particles,
            moves=self._policy.moves,
            independent=independent,
        )
        return infer(
            results,
            others,
            prior=prior_of(results),
            target=self._target,
            ideal=self._ideal,
            step_time=self._step_time,
            # Where the fewest steps are sought, no clock has a say in what a trial costs.
            in_examples=self.objective == "steps",
            particles=particles or self._policy.particles,
            moves=moves or self._policy.moves,
            rng=rng,
            budget=self._budget,
            independent=independent,
            start=start,
        )

    def _prior(self, results: Sequence[TrialResult], coordinates: Coordinates) -> Prior:
        """Make the prior of the posterior's parameters.

        B_crit is guessed to be the given noise scale, else the one that the trials measured.
        """
        # The steps to the target are guessed to be a share of the budget.
        budget = USUAL_BUDGET
        if self._budget is not None:
            budget = self._budget(math.sqrt(coordinates.low * coordinates.high))
        noise_scale = self._noise_scale
        # Of a noise scale that is given no error is known.
        spread = 0.0
        if noise_scale is None:
            noise_scale, spread = noise_scale_prior(results)
        return make_prior(
            low=coordinates.low,
            high=coordinates.high,
            rule=coordinates.log_rule,
            log_budget=math.log(budget),
            sigma=self._sigma,
            exponent_sigma=self._exponent_sigma,
            noise_scale=noise_scale,
            noise_scale_spread=spread,
            others=coordinates.columns,
            horizon=self.horizon,
        )


def _no_budget(batch_size: float) -> float:
    """Give the steps at which a trial ends where there is no budget: more than any has."""
    return NO_BUDGET


def _pending(trials: Sequence[FrozenTrial], coordinates: Coordinates) -> Pending:
    """List the trials that run now: log2 of batch size and rate, and the trial that each continues.

    The last is its number; None: the trial begins afresh.
    """
    pending = list[tuple[float, float, int | None]]()
    for trial in trials:
        if trial.state == TrialState.RUNNING and coordinates.complete(trial.params):
            x, z = coordinates.point(trial.params)
            pending.append((x, z, trial.user_attrs.get(RESUMED_FROM)))
    return pending


# All records are read for each decision, and most of them were read for the one before.
@lru_cache(maxsize=PARSED_RECORDS)
def _parsed_record(text: str) -> TrialResult:
    """Parse a record's JSON, once for all decisions."""
    return TrialResult.from_json(text)


def trial_result(
    trial: FrozenTrial, coordinates: Coordinates, objective: str
) -> TrialResult | None:
    """Read a finished trial's record, or make one from the attributes of a foreign trial.

    A foreign trial is one that was not written by bstune. None without usable numbers.
    """
    if RECORD in trial.user_attrs:
        return _parsed_record(trial.user_attrs[RECORD])
    told_steps = _steps_told(trial, objective)
    if told_steps is None or not (math.isfinite(told_steps) and told_steps >= 1):
        return None
    steps = round(told_steps)
    seconds = _seconds_told(trial, objective, steps)
    if seconds is not None and not (math.isfinite(seconds) and seconds > 0):
        return None
    spec = _spec_of(trial, coordinates)
    # A complete trial has met the target at its last step. The last one that missed it is not told:
    # the step before stands for it.
    status: Status = "reached"
    steps_low = steps - 1
    if trial.state != TrialState.COMPLETE:
        status = trial.user_attrs.get("status", "stopped")
        steps_low = steps
    history = sorted(trial.intermediate_values.items())
    return TrialResult.unmeasured(
        spec,
        status,
        steps=steps,
        steps_low=steps_low,
        examples=steps * spec.batch_size,
        train_seconds=steps * (seconds or 0.0),
        seconds_per_step=seconds,
        history=tuple((step, _finite_or_none(value)) for step, value in history),
        horizon=trial.user_attrs.get("horizon"),
    )


def _has_steps_and_seconds(trial: FrozenTrial) -> bool:
    """Whether a trial is a complete one of a study of two values, which are steps and seconds."""
    return trial.state == TrialState.COMPLETE and len(trial.values) == 2


def _steps_told(trial: FrozenTrial, objective: str) -> float | None:
    """Read a foreign trial's steps: its attribute, else its last report, else its value."""
    steps: float | None = trial.user_attrs.get("steps")
    if steps is None and trial.intermediate_values:
        steps = max(trial.intermediate_values)
    counts_steps = objective == "steps" and trial.state == TrialState.COMPLETE
    if steps is None and (counts_steps or _has_steps_and_seconds(trial)):
        steps = trial.values[0]
    return steps


def _seconds_told(trial: FrozenTrial, objective: str, steps: int) -> float | None:
    """Read the seconds of a foreign trial's step: its attribute, else its value over its steps."""
    seconds: float | None = trial.user_attrs.get("seconds_per_step")
    counts_seconds = objective in ("time", "curve") and trial.state == TrialState.COMPLETE
    if seconds is None and (counts_seconds or _has_steps_and_seconds(trial)):
        seconds = trial.values[-1] / steps
    return seconds


def _spec_of(trial: FrozenTrial, coordinates: Coordinates) -> TrialSpec:
    """Describe what a foreign trial was asked to do; its seed is not told, and stands as 0."""
    x, z = coordinates.point(trial.params)
    return TrialSpec(
        number=trial.number,
        trial_index=trial.number,
        batch_size=round(2.0**x),
        lr=2.0**z,
        delta=None,
        seed=0,
        resumed_from=trial.user_attrs.get(RESUMED_FROM),
    )


def _finite_or_none(value: float) -> float | None:
    """Replace a number that is not finite by None."""
    return value if math.isfinite(value) else None


def result_at_budget(
    trial: FrozenTrial, coordinates: Coordinates, budget: Callable[[float], float]
) -> TrialResult | None:
    """Make the record of a foreign trial of the objective ``loss``; None without usable numbers.

    A complete trial has run to its budget's end, and its value is its metric there. Another one has
    run to its attribute ``steps``, else to the last step that it reported.
    """
    spec = _spec_of(trial, coordinates)
    last_step = last_whole_step(budget(float(spec.batch_size)))
    history = dict[int, float | None]()
    for step, value in sorted(trial.intermediate_values.items()):
        history[step] = _finite_or_none(value)
    steps = trial.user_attrs.get("steps", max(history, default=None))
    # No trial of this objective reaches a target: one that has run to its end is stopped there.
    status = trial.user_attrs.get("status", "stopped")
    if trial.state == TrialState.COMPLETE:
        steps = last_step
        history[last_step] = _finite_or_none(trial.values[0])
    # A diverged trial counts as such, whatever its steps.
    if steps is None and status == "diverged":
        steps = 1
    if steps is None or not (math.isfinite(steps) and steps >= 1):
        return None
    steps = round(steps)
    return TrialResult.unmeasured(
        spec,
        status,
        steps=steps,
        steps_low=steps,
        examples=steps * spec.batch_size,
        history=tuple(history.items()),
    )
