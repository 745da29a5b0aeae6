"""bstune's own sampler: an ``optuna.samplers.BaseSampler`` that knows what a batch size is.

In a study of one's own::

    study = optuna.create_study(sampler=FrontierSampler(objective="time", seed=0))
    trial = study.ask()
    batch_size, lr = trial.suggest_int("batch_size", 8, 4096, log=True), trial.suggest_float("lr", 1e-4, 1, log=True)
    max_steps, resumed_from = study.sampler.max_steps(trial.number), study.sampler.resumed_from(trial.number)
    ...  # train for at most `max_steps` steps, calling trial.report(value, step) at each evaluation
    trial.set_user_attr("steps", steps)  # that were trained
    trial.set_user_attr("seconds_per_step", tau)
    study.tell(trial, seconds_to_target)  # or state=TrialState.PRUNED if the target was not reached

With ``target`` it reads the reported values. A stopped trial is suggested again, to be continued from its checkpoint,
only where ``resumable`` allows it. Further parameters of the study join the model.

The best metric within a budget needs no target. A trial runs to a share of its budget first, waits, and goes on if it
is chosen again (:mod:`bstune.search.fixed_budget`)::

    sampler = FrontierSampler(objective="loss", budget=lambda size: 300.0 / tau(size), resumable=lambda number: True)
    study = optuna.create_study(direction="minimize", sampler=sampler)
    trial = study.ask()
    batch_size, lr = trial.suggest_int("batch_size", 8, 4096, log=True), trial.suggest_float("lr", 1e-4, 1, log=True)
    max_steps, resumed_from = sampler.max_steps(trial.number), sampler.resumed_from(trial.number)
    trial.set_user_attr("bstune:resumed_from", resumed_from)  # where it is not None: train on from its checkpoint
    ...  # train up to step `max_steps`, with trial.report(value, step) at each evaluation and at the end
    trial.set_user_attr("steps", max_steps)
    study.tell(trial, value)  # at the budget's end; before it, state=TrialState.PRUNED, and
    # trial.set_user_attr("status", "diverged") with it if the training broke
"""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from functools import cache, cached_property, lru_cache
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
from bstune.core.records import Target, TrialResult, TrialSpec
from bstune.search.acquisition import Array, Domain, Pending, Policy, Suggestion, suggest
from bstune.search.budget_decision import suggest_within_budget
from bstune.search.fixed_budget import (
    LOSS,
    BudgetPosterior,
    infer_at_budget,
    last_step_of,
    rank_full_trials,
    shortened,
)
from bstune.search.observations import Posterior, infer, smoothed, start_of
from bstune.search.posterior import Prior, make_prior, noise_scale_prior
from bstune.search.ruler import Mode

logger = logging.getLogger(__name__)
RECORD = "bstune:record"  # the trial's record, as JSON, among its user attributes
RESUMED_FROM = "bstune:resumed_from"  # number of the trial that it continues
BELOW, ABOVE, GRID = (
    1.0,
    12.0,
    0.25,
)  # octaves beyond the batch sizes, and between two, of the rule as tabulated
BATCH_SIZE, LR, DELTA = "batch_size", "lr", "delta"
START_DRAWS = 2  # of a posterior that others are sampled from, over those of a decision


@cache
def _defaults(name: str, section: str) -> dict[str, Any]:
    """Return a section of a file in ``conf/``: every default stands there once."""
    values = yaml.safe_load(files("bstune.conf").joinpath(name).read_text(encoding="utf-8"))[
        section
    ]
    return {key: value for key, value in values.items() if key != "_target_"}


def default_policy() -> Policy:
    """Return the policy of ``conf/sampler/frontier.yaml``."""
    return Policy(**_defaults("sampler/frontier.yaml", "policy"))


class FrontierSampler(BaseSampler):
    """Suggests the trial that is best in one draw of the frontier's posterior, for its cost.

    The study needs an integer ``batch_size`` and either ``lr`` or, with a rule, ``delta`` = log2(lr / rule(B)), in all
    of its trials; its values are minimized. Failed trials are passed over, and so are those with neither steps nor
    a positive, finite value.

    Args:
        objective: ``time`` (steps x seconds per step), ``steps``, ``both`` (in turn, of a study whose two values are
            steps and seconds), ``curve`` (B_crit), or ``loss`` (the best metric at the budget's end).
        rule: learning rate over batch size, the prior mean of the best one; None: the square-root rule through the
            middle of both ranges.
        sigma: how far from the rule, in octaves: the scale of a Student's t with 3 degrees of freedom; None for
            ``prior.level_sigma`` of ``conf/config.yaml``.
        exponent_sigma: how far the exponent of lr*(B) may lie from the rule's: one standard deviation; None for
            ``prior.exponent_sigma`` of ``conf/config.yaml``.
        noise_scale: in examples, a wide prior of B_crit; None for the one that trials measured, if they did (see
            :mod:`bstune.search.posterior`).
        budget: steps over batch size at which a trial ends in any case; None for none, and then the first trial has no
            limit. The objective ``loss`` needs it.
        target: of the values that are reported; None: they are not read. The objective ``loss`` takes nothing but its
            mode from it; without it, that is the study's direction.
        ideal: the best value of the target's metric; None if unknown.
        resumable: whether a stopped trial can be continued, by number; None: none can.
        snap: returns the batch size that a trial uses; None for rounding.
        lr_range: smallest and largest learning rate that can be had; None for what the parameters allow.
        step_time: seconds per step over batch size, measured before the first trial; None: not measured.
        horizon: whether a trial's schedule ends with its ``max_steps``, which are then chosen so that it just reaches
            the target, within the budget; set the user attribute ``horizon`` to them. For ``loss``: the
            budget's.
        search_space: of the study, if it is fixed before the first trial.
        policy: how to spend; None for that of ``conf/sampler/frontier.yaml``.
        seed: None for one that is drawn.

    Raises:
        ConfigError: for an unknown objective or a number that cannot be; as trials are asked, for a study that is
            maximized, or whose trials share parameters but not those above.
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
    )
    context += ("step_time", "horizon", "search_space")

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
                "the objective loss is the best metric at a budget's end: give budget, the steps over batch size"
            )
        for name, value in (
            ("sigma", sigma),
            ("exponent_sigma", exponent_sigma),
            ("noise_scale", noise_scale),
        ):
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ConfigError(f"{name} must be a positive number, but got {value}")
        self.objective = objective
        self._rule = rule
        prior = _defaults("config.yaml", "prior")
        self._sigma = prior["level_sigma"] if sigma is None else sigma
        self._exponent_sigma = prior["exponent_sigma"] if exponent_sigma is None else exponent_sigma
        self._noise_scale = noise_scale
        self._budget, self._target, self._ideal = budget, target, ideal
        self._resumable = resumable
        self._snap = snap or round
        self._lr_range, self._step_time, self.horizon = lr_range, step_time, horizon
        self._search_space = dict(search_space) if search_space is not None else None
        self._intersection = IntersectionSearchSpace(include_pruned=True)
        self._policy = policy or default_policy()
        self._rng = np.random.default_rng(seed)
        self._max_steps: dict[int, int] = {}
        self._resumed_from: dict[int, int] = {}
        self._repeats: dict[int, int] = {}
        self._passed_over: set[int] = set()

    def max_steps(self, number: int) -> int | None:
        """Return the steps up to which trial ``number`` is to be trained; None where there is no limit."""
        return self._max_steps.get(number)

    def resumed_from(self, number: int) -> int | None:
        """Return the number of the stopped trial that trial ``number`` continues; None if it starts afresh."""
        return self._resumed_from.get(number)

    def repeats(self, number: int) -> int | None:
        """Name the trial that trial ``number`` runs again on a fresh seed; None if it is no such one."""
        return self._repeats.get(number)

    def reseed_rng(self) -> None:
        """Draw a new seed, as Optuna asks of a sampler that is copied to another process."""
        self._rng = np.random.default_rng()

    def infer_relative_search_space(
        self, study: optuna.Study, trial: FrozenTrial
    ) -> dict[str, BaseDistribution]:
        """Return the parameters that all trials share; empty before the first one has finished."""
        if StudyDirection.MAXIMIZE in study.directions and self.objective != LOSS:
            raise ConfigError(
                f"steps and seconds are minimized, but study {study.study_name!r} maximizes"
            )
        return self._space(study)

    def _space(self, study: optuna.Study) -> dict[str, BaseDistribution]:
        space = self._search_space or self._intersection.calculate(study)
        if space and not (
            BATCH_SIZE in space and (LR in space or (DELTA in space and self._rule is not None))
        ):
            raise ConfigError(
                "FrontierSampler needs batch_size and lr, or delta and a rule, as parameters of all trials of a study, "
                f"but what they share is {', '.join(sorted(space))}"
            )
        return dict(space)

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """Return the next trial's parameters; :meth:`max_steps` and :meth:`resumed_from` go with them."""
        if BATCH_SIZE not in search_space:
            return {}
        coordinates = Coordinates(search_space, self._rule, self._snap, self._lr_range)
        trials = [t for t in study.get_trials(deepcopy=False) if t.number != trial.number]
        pending = [
            (*coordinates.point(t.params), t.user_attrs.get(RESUMED_FROM))
            for t in trials
            if t.state == TrialState.RUNNING and coordinates.complete(t.params)
        ]
        if self.objective == LOSS:
            suggestion = self._suggest_at_budget(study, trials, pending, coordinates)
            self._max_steps[trial.number] = suggestion.max_steps
        else:
            suggestion = self._suggest(trials, pending, coordinates, trial.number)
        if suggestion.repeats is not None:
            self._repeats[trial.number] = suggestion.repeats
        again = suggestion.repeats if suggestion.resumed_from is None else suggestion.resumed_from
        if suggestion.resumed_from is not None:
            self._resumed_from[trial.number] = suggestion.resumed_from
        if again is not None:
            same = next(t for t in trials if t.number == again)
            return {name: same.params[name] for name in search_space}
        return coordinates.parameters(suggestion)

    def _suggest(
        self,
        trials: Sequence[FrozenTrial],
        pending: Pending,
        coordinates: "Coordinates",
        number: int,
    ) -> Suggestion:
        """Choose the next trial for a target, and the limit of its steps where there is one."""
        posterior = self._infer(*self._records(trials, coordinates), coordinates, self._rng)
        objective: str = self.objective
        if objective == "both":
            asked = sum(
                t.state != TrialState.FAIL for t in trials
            )  # a trial that is asked again is the same turn
            objective = "time" if asked % 2 == 0 else "steps"
        suggestion = suggest(
            posterior,
            pending,
            objective=objective,
            domain=coordinates.domain(),
            budget=self._budget or (lambda batch_size: 1e12),
            resumable=self._resumable,
            policy=self._policy,
            rng=self._rng,
        )
        if (
            self.horizon
            or self._budget is not None
            or any(one.status == "reached" for one in posterior.observations)
        ):
            self._max_steps[number] = suggestion.max_steps
        return suggestion

    def _suggest_at_budget(
        self,
        study: optuna.Study,
        trials: Sequence[FrozenTrial],
        pending: Pending,
        coordinates: "Coordinates",
    ) -> Suggestion:
        """Choose the next trial for the best metric at the budget's end."""
        results, others = self._records(trials, coordinates)
        posterior = self._infer_at_budget(
            results, others, coordinates, self._mode(study), self._rng
        )
        # A schedule that ends with the budget cannot be stopped on the way and compared there.
        return suggest_within_budget(
            posterior,
            pending,
            domain=coordinates.domain(),
            resumable=None if self.horizon else self._resumable,
            policy=self._policy,
            rng=self._rng,
        )

    def sample_independent(
        self,
        study: optuna.Study,
        trial: FrozenTrial,
        param_name: str,
        param_distribution: BaseDistribution,
    ) -> Any:
        """Return the middle of a range in the first trial, anything in it later: a first trial that fails must move."""
        if isinstance(param_distribution, CategoricalDistribution):
            return param_distribution.choices[
                int(self._rng.integers(len(param_distribution.choices)))
            ]
        if isinstance(param_distribution, IntDistribution | FloatDistribution):
            return _unscaled(0.5 if trial.number == 0 else self._rng.random(), param_distribution)
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
        """Return the posterior of the frontier; None before the study has parameters. It changes nothing.

        Args:
            trials: a study, or records of its trials, whose ``hyperparameters`` are the further parameters; records
                need ``search_space``.
            particles: draws; None for the policy's.
            moves: Metropolis steps at each temperature; None for the policy's. With the few of a decision, intervals
                come out too narrow.
            rng: the source of chance; None for a copy of the sampler's own.
            independent: False where trials may repeat a recorded run: those of one history then count as one.

        Raises:
            ConfigError: if the trials share parameters, but not ``batch_size`` and ``lr`` or ``delta``.
        """
        space = self._space(trials) if isinstance(trials, optuna.Study) else self._search_space
        if not space:
            return None
        coordinates = Coordinates(space, self._rule, self._snap, self._lr_range)
        records, others = self._records_of(trials, coordinates)
        rng = deepcopy(self._rng) if rng is None else rng
        return self._infer(records, others, coordinates, rng, particles, moves, independent)

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
        """Give the posterior of the objective ``loss``; None before the study has parameters.

        Args:
            trials: a study, or records of its trials, as for :meth:`posterior`.
            mode: whether the metric falls or rises; None for the target's, else the study's direction.
            share: of the budget: what a shorter one would have come to is read from the same trials.
            particles: draws; None for the policy's.
            moves: Metropolis steps at each temperature; None for the policy's.
            rng: the source of chance; None for a copy of the sampler's own.

        Raises:
            ConfigError: for another objective, or records without any mode.
        """
        if self.objective != LOSS:
            raise ConfigError(f"budget_posterior is of the objective loss, not {self.objective}")
        space = self._space(trials) if isinstance(trials, optuna.Study) else self._search_space
        if not space:
            return None
        if mode is None:
            mode = self._mode(trials if isinstance(trials, optuna.Study) else None)
        coordinates = Coordinates(space, self._rule, self._snap, self._lr_range)
        records, others = self._records_of(trials, coordinates)
        rng = deepcopy(self._rng) if rng is None else rng
        return self._infer_at_budget(
            records, others, coordinates, mode, rng, share, particles, moves
        )

    def _records_of(
        self, trials: optuna.Study | Sequence[TrialResult], coordinates: "Coordinates"
    ) -> tuple[list[TrialResult], dict[int, tuple[float, ...]]]:
        """Give the records of a study, or the usable ones of some, and their other hyper-parameters."""
        if isinstance(trials, optuna.Study):
            return self._records(trials.get_trials(deepcopy=False), coordinates)
        records = [trial for trial in trials if trial.status != "failed"]
        others = {trial.number: coordinates.others(trial.hyperparameters) for trial in records}
        return records, others

    def _mode(self, study: optuna.Study | None) -> Mode:
        """Whether the metric falls or rises: by the target, else by the study's direction."""
        if self._target is not None:
            return self._target.mode
        if study is None:
            raise ConfigError("records do not say whether their metric falls or rises: give mode")
        return "max" if study.directions[0] == StudyDirection.MAXIMIZE else "min"

    def _infer_at_budget(
        self,
        results: Sequence[TrialResult],
        others: Mapping[int, tuple[float, ...]],
        coordinates: "Coordinates",
        mode: Mode,
        rng: np.random.Generator,
        share: float = 1.0,
        particles: int | None = None,
        moves: int | None = None,
    ) -> BudgetPosterior:
        whole = self._budget
        if whole is None:
            raise ConfigError("the objective loss needs a budget")
        budget = whole
        if share != 1.0:
            results = shortened(results, whole, share)

            def budget(batch_size: float) -> float:
                return share * whole(batch_size)

        low, high = coordinates.low, coordinates.high
        prior = make_prior(
            low=low,
            high=high,
            rule=coordinates.log_rule,
            # The level is what the best trial has at its budget's end: S is about the budget.
            log_budget=math.log(4.0 * budget(math.sqrt(low * high))),
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
        """Return the number of the reached trial best by the posterior's mean (``both``: by time), else None.

        For ``loss`` it is the full trial whose fresh seed is predicted to be best.
        """
        if self.objective == LOSS:
            at_budget = self.budget_posterior(study)
            expected = [] if at_budget is None else rank_full_trials(at_budget)
            return expected[0].run.number if expected else None
        posterior, objective = (
            self.posterior(study),
            "steps" if self.objective == "steps" else "time",
        )
        ranked = [] if posterior is None else smoothed(posterior, objective)
        return min(ranked, key=lambda pair: pair[0])[1].number if ranked else None

    def _records(
        self, trials: Sequence[FrozenTrial], coordinates: "Coordinates"
    ) -> tuple[list[TrialResult], dict[int, tuple[float, ...]]]:
        """Return the records of the finished trials, and their other hyper-parameters."""
        results, others = [], {}
        finished = [
            trial for trial in trials if trial.state in (TrialState.COMPLETE, TrialState.PRUNED)
        ]
        for trial in (one for one in finished if coordinates.complete(one.params)):
            result = self._result(trial, coordinates)
            if result is not None:
                results.append(result)
                others[trial.number] = coordinates.others(trial.params)
            elif trial.number not in self._passed_over:
                self._passed_over.add(trial.number)
                needed = "'steps' and 'seconds_per_step', or a positive value"
                if self.objective == LOSS:
                    needed = "'steps', or report its metric"
                logger.warning(
                    "trial %d is passed over: set its user attributes %s; its values are %s",
                    trial.number,
                    needed,
                    trial.values,
                )
        return results, others

    def _result(self, trial: FrozenTrial, coordinates: "Coordinates") -> TrialResult | None:
        if self.objective == LOSS and self._budget is not None and RECORD not in trial.user_attrs:
            return result_at_budget(trial, coordinates, self._budget)
        return trial_result(trial, coordinates, self.objective)

    def _infer(
        self,
        results: Sequence[TrialResult],
        others: Mapping[int, tuple[float, ...]],
        coordinates: "Coordinates",
        rng: np.random.Generator,
        particles: int | None = None,
        moves: int | None = None,
        independent: bool = True,
    ) -> Posterior:
        def prior_of(trials: Sequence[TrialResult]) -> Prior:
            return self._prior(trials, coordinates)

        start = start_of(
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
            in_examples=self.objective == "steps",
            particles=particles or self._policy.particles,
            moves=moves or self._policy.moves,
            rng=rng,
            budget=self._budget,
            independent=independent,
            start=start,
        )

    def _prior(self, results: Sequence[TrialResult], coordinates: "Coordinates") -> Prior:
        """Return the prior that these trials' noise scale sets, where none is given."""
        low, high = coordinates.low, coordinates.high
        budget = 1000.0 if self._budget is None else self._budget(math.sqrt(low * high))
        noise_scale, spread = (
            noise_scale_prior(results) if self._noise_scale is None else (self._noise_scale, 0.0)
        )
        return make_prior(
            low=low,
            high=high,
            rule=coordinates.log_rule,
            log_budget=math.log(budget),
            sigma=self._sigma,
            exponent_sigma=self._exponent_sigma,
            noise_scale=noise_scale,
            noise_scale_spread=spread,
            others=coordinates.columns,
            horizon=self.horizon,
        )


class Coordinates:
    """The study's parameters as the model's: log2 B, log2 lr, and the others scaled to [0, 1]."""

    def __init__(
        self,
        space: Mapping[str, BaseDistribution],
        rule: Callable[[float], float] | None,
        snap: Callable[[float], int],
        lr_range: tuple[float, float] | None,
    ) -> None:
        self._space = dict(space)
        others = space.keys() - {BATCH_SIZE, LR, DELTA}
        self._names = sorted(name for name in others if not space[name].single())
        low, high = lr_range or (0.0, math.inf)
        self._log_lrs = math.log2(low) if low > 0 else -math.inf, math.log2(high)
        self._snap = snap
        sizes = space[BATCH_SIZE]
        if not isinstance(sizes, IntDistribution):
            raise ConfigError(
                f"batch_size must be an integer parameter, but got {sizes}: use suggest_int"
            )
        self._sizes, self.low, self.high = sizes, sizes.low, sizes.high
        self._axis = LR if LR in space else DELTA
        rates = space[self._axis]
        if not isinstance(rates, FloatDistribution) or (self._axis == LR and rates.low <= 0):
            raise ConfigError(
                f"{self._axis} must be a float parameter over positive rates, but got {rates}"
            )
        self._rates = rates
        middle = math.sqrt(rates.low * rates.high) if self._axis == LR else 1.0
        self._rule = rule or (
            lambda batch_size: middle * math.sqrt(batch_size / math.sqrt(self.low * self.high))
        )

    @cached_property
    def log_rule(self) -> Callable[[Array], Array]:
        """Log2 of the rule's learning rate over log2 batch sizes, in their shape; constant far beyond the range."""
        # A decision asks for hundreds.
        grid = np.arange(math.log2(self.low) - BELOW, math.log2(self.high) + ABOVE, GRID)
        values = [math.log2(self._rule(2.0**x)) for x in grid.tolist()]
        return lambda x: np.interp(x, grid, values)

    @property
    def columns(self) -> int:
        """How many columns the other parameters take: a category takes one for each choice."""
        return sum(_columns(self._space[name]) for name in self._names)

    def complete(self, params: Mapping[str, Any]) -> bool:
        """Return whether a trial has all parameters."""
        return self._space.keys() <= params.keys()

    def point(self, params: Mapping[str, Any]) -> tuple[float, float]:
        """Return log2 batch size and log2 learning rate."""
        batch_size = self._snap(params[BATCH_SIZE])
        if self._axis == LR:
            return math.log2(batch_size), math.log2(params[LR])
        return math.log2(batch_size), math.log2(self._rule(batch_size)) + params[DELTA]

    def others(self, params: Mapping[str, Any]) -> tuple[float, ...]:
        """Return the other parameters, each column in [0, 1]."""
        return tuple(
            value for name in self._names for value in _scaled(params[name], self._space[name])
        )

    def domain(self) -> Domain:
        """Return where the search may go."""
        return Domain(self.low, self.high, self._snapped, self._bounds, self.columns)

    def _snapped(self, batch_size: float) -> int:
        return int(nearest(self._snap(batch_size), self._sizes))

    def _bounds(self, x: Array) -> tuple[Array, Array]:
        bottom, top = self._rates.low, self._rates.high
        if self._axis == LR:
            bottom, top, rule = math.log2(bottom), math.log2(top), np.zeros(x.shape)
        else:
            rule = self.log_rule(x)
        return np.clip(rule + bottom, *self._log_lrs), np.clip(rule + top, *self._log_lrs)

    def parameters(self, suggestion: Suggestion) -> dict[str, Any]:
        """Return a suggestion as parameters of the study."""
        batch_size = self._snapped(2.0**suggestion.x)
        rate = (
            2.0**suggestion.z
            if self._axis == LR
            else suggestion.z - math.log2(self._rule(batch_size))
        )
        params: dict[str, Any] = {BATCH_SIZE: batch_size, self._axis: nearest(rate, self._rates)}
        columns = iter(suggestion.other)
        for name in self._names:
            distribution = self._space[name]
            values = [next(columns) for _ in range(_columns(distribution))]
            if isinstance(distribution, CategoricalDistribution):
                params[name] = distribution.choices[int(np.argmax(values))]
            elif isinstance(distribution, IntDistribution | FloatDistribution):
                params[name] = _unscaled(values[0], distribution)
        return params


def _columns(distribution: BaseDistribution) -> int:
    return len(distribution.choices) if isinstance(distribution, CategoricalDistribution) else 1


def _scaled(value: Any, distribution: BaseDistribution) -> list[float]:
    if isinstance(distribution, CategoricalDistribution):
        return [float(choice == value) for choice in distribution.choices]
    if not isinstance(distribution, IntDistribution | FloatDistribution):
        raise ConfigError(f"a parameter has a distribution of unknown kind, {distribution}")
    low, high = float(distribution.low), float(distribution.high)
    if distribution.log:
        return [math.log(value / low) / math.log(high / low)]
    return [(value - low) / (high - low)]


def _unscaled(share: float, distribution: IntDistribution | FloatDistribution) -> int | float:
    low, high = float(distribution.low), float(distribution.high)
    return nearest(
        low * (high / low) ** share if distribution.log else low + share * (high - low),
        distribution,
    )


def nearest(value: float, distribution: IntDistribution | FloatDistribution) -> int | float:
    """Return the nearest value of the distribution: Optuna silently drops one that is not on its grid."""
    if distribution.step is not None:
        value = (
            distribution.low
            + round((value - distribution.low) / distribution.step) * distribution.step
        )
    value = min(max(value, distribution.low), distribution.high)
    return round(value) if isinstance(distribution, IntDistribution) else value


_parsed = lru_cache(maxsize=4096)(
    TrialResult.from_json
)  # every decision reads all records, most of them once more


def trial_result(
    trial: FrozenTrial, coordinates: Coordinates, objective: str
) -> TrialResult | None:
    """Return a finished trial's record, or one made of a foreign trial's attributes; None without usable numbers."""
    if RECORD in trial.user_attrs:
        return _parsed(trial.user_attrs[RECORD])
    complete = trial.state == TrialState.COMPLETE
    history = tuple(sorted(trial.intermediate_values.items()))
    steps = trial.user_attrs.get("steps")
    if steps is None and history:
        steps = history[-1][0]
    if steps is None and complete and (objective == "steps" or len(trial.values) == 2):
        steps = trial.values[0]
    if steps is None or not (math.isfinite(steps) and steps >= 1):
        return None
    steps = round(steps)
    seconds = trial.user_attrs.get("seconds_per_step")
    if seconds is None and complete and (objective in ("time", "curve") or len(trial.values) == 2):
        seconds = trial.values[-1] / steps
    if seconds is not None and not (math.isfinite(seconds) and seconds > 0):
        return None
    x, z = coordinates.point(trial.params)
    resumed_from = trial.user_attrs.get(RESUMED_FROM)
    spec = TrialSpec(
        trial.number, trial.number, round(2.0**x), 2.0**z, None, 0, resumed_from=resumed_from
    )
    return TrialResult.unmeasured(
        spec,
        "reached" if complete else trial.user_attrs.get("status", "stopped"),
        steps=steps,
        steps_low=steps - 1 if complete else steps,
        examples=steps * spec.batch_size,
        train_seconds=0.0 if seconds is None else steps * seconds,
        seconds_per_step=seconds,
        history=tuple((step, value if math.isfinite(value) else None) for step, value in history),
        horizon=trial.user_attrs.get("horizon"),
    )


def result_at_budget(
    trial: FrozenTrial, coordinates: Coordinates, budget: Callable[[float], float]
) -> TrialResult | None:
    """Make the record of a foreign trial of the objective ``loss``; None without usable numbers.

    A complete trial has run to its budget's end, and its value is its metric there; another one to its attribute
    ``steps``, else to the last step that it reported.
    """
    x, z = coordinates.point(trial.params)
    batch_size = round(2.0**x)
    last_step = last_step_of(budget(float(batch_size)))
    history: dict[int, float | None] = {}
    for step, value in sorted(trial.intermediate_values.items()):
        history[step] = value if math.isfinite(value) else None
    steps = trial.user_attrs.get("steps", max(history, default=None))
    status = trial.user_attrs.get("status", "stopped")
    if trial.state == TrialState.COMPLETE:
        steps = last_step
        value = trial.values[0]
        history[last_step] = value if math.isfinite(value) else None
    if steps is None and status == "diverged":
        steps = 1
    if steps is None or not (math.isfinite(steps) and steps >= 1):
        return None
    spec = TrialSpec(
        trial.number,
        trial.number,
        batch_size,
        2.0**z,
        None,
        0,
        resumed_from=trial.user_attrs.get(RESUMED_FROM),
    )
    return TrialResult.unmeasured(
        spec,
        status,
        steps=round(steps),
        steps_low=round(steps),
        examples=round(steps) * batch_size,
        history=tuple(history.items()),
    )
