"""The searches that are compared, each a :class:`bstune.sweeps.search_problem.Search`.

- bstune's own :class:`~bstune.search.sampler.FrontierSampler`, in an Optuna study in memory, with
  the problem's budget, tau(B), the target and the range of learning rates, and no noise scale;
  ``bstune/none`` and ``bstune/linear`` take another scaling rule as prior mean than the square
  root.
- Optuna's random, QMC, TPE and GP samplers, over (batch size, learning rate) or over (batch size,
  delta) with a scaling rule as axis, in two forms: a stopped trial is recorded as pruned, or as
  complete at its bound.
- Shallue et al. 2018, arXiv 1811.03600: every batch size of the table is tuned by itself.
- Zeus (You et al., NSDI 2023): pruning, then Gaussian Thompson sampling, over the table's batch
  sizes.
"""

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Literal

import numpy as np
import optuna
from optuna.distributions import FloatDistribution, IntDistribution
from optuna.exceptions import ExperimentalWarning
from optuna.samplers import BaseSampler, GPSampler, QMCSampler, RandomSampler, TPESampler
from optuna.trial import TrialState

from bstune.core import scaling
from bstune.core.errors import ConfigError
from bstune.core.records import TrialResult, TrialSpec
from bstune.core.search_space import van_der_corput
from bstune.search.coordinates import BATCH_SIZE, LR
from bstune.search.sampler import RECORD, RESUMED_FROM, FrontierSampler
from bstune.study.analysis.critical import critical_batch
from bstune.study.analysis.model import MOVES, REPORT_PARTICLES
from bstune.sweeps.search_problem import MAX_TRIALS, Problem, Search, least, merit, stopping_step

Form = Literal["pruned", "bound"]
FORMS: tuple[Form, ...] = ("pruned", "bound")
AXES = ("lr", "sqrt", "linear", "saturating", "surge")
SAMPLERS = ("random", "qmc", "tpe", "gp")
# Samplers that never look at values: both forms are the same.
BLIND = ("random", "qmc")
# Rules that take a noise scale.
WITH_NOISE_SCALE = ("saturating", "surge")
FRONTIER = "bstune"
# The other rules that bstune's search takes as prior mean, besides the square root.
FRONTIER_RULES = ("none", "linear")
# Zeus prunes in so many rounds.
PRUNING_ROUNDS = 2
# Optuna's GP takes 0.1 to 0.2 s for a trial, a hundred times as long as TPE. Its 60 trials take 10
# to 12 s for each seed.
MAX_GP_TRIALS = 60
# What a seed is drawn for, see trial_seed: a trial itself, a search's sampler or fixed shifts, the
# order of a round, and the draws of Thompson sampling.
FOR_TRIAL, FOR_SEARCH, FOR_ORDER, FOR_THOMPSON = range(4)


@dataclass(frozen=True)
class Entry:
    """A search that can be chosen by name: ``NAME``, ``NAME/AXIS`` or ``NAME/AXIS/FORM``."""

    name: str
    # None for a search that has an axis of its own.
    axis: str | None
    # How a stopped trial is recorded; None where that makes no difference.
    form: Form | None
    # Makes the search of a problem and a seed.
    make: Callable[[Problem, int], Search]
    max_trials: int = MAX_TRIALS
    # Whether its axis is a rule that takes a noise scale.
    needs_noise_scale: bool = False

    @property
    def group(self) -> str:
        """Name and axis, such as ``tpe/none``; of a group's forms only the best one is shown."""
        return "/".join(filter(None, (self.name, self.axis)))

    @property
    def key(self) -> str:
        """Name, axis and form."""
        return "/".join(filter(None, (self.name, self.axis, self.form)))


def searches() -> tuple[Entry, ...]:
    """Give all searches that have a name.

    An axis is the coordinate for the learning rate, which a rule may scale; a form is a way to
    record a stopped trial. Each of Optuna's samplers is there with every axis and form.
    """
    entries = [Entry(FRONTIER, axis=None, form=None, make=FrontierSearch)]
    for rule in FRONTIER_RULES:
        entries.append(
            Entry(name=FRONTIER, axis=rule, form=None, make=partial(FrontierSearch, rule=rule))
        )
    for name in SAMPLERS:
        forms: tuple[Form | None, ...] = FORMS
        # A sampler that reads no results does not see how a stopped trial is recorded.
        if name in BLIND:
            forms = (None,)
        for axis, form in product(AXES, forms):
            entries.append(_optuna_entry(name, axis, form))
    entries.append(Entry("shallue", axis=None, form=None, make=EveryBatchSize))
    entries.append(Entry("zeus", axis=None, form=None, make=Zeus))
    return tuple(entries)


def _optuna_entry(name: str, axis: str, form: Form | None) -> Entry:
    """Make the entry of one of Optuna's samplers among the searches.

    ``axis``: the rule from which the learning rate is searched, or ``lr``. ``form``: how a stopped
    trial is recorded; None where that makes no difference.
    """
    max_trials = MAX_TRIALS
    # A trial takes Optuna's GP a hundred times as long as the other samplers.
    if name == "gp":
        max_trials = MAX_GP_TRIALS
    return Entry(
        name=name,
        axis=axis,
        form=form,
        make=partial(_optuna_search, name=name, axis=axis, form=form),
        max_trials=max_trials,
        needs_noise_scale=axis in WITH_NOISE_SCALE,
    )


def _optuna_search(
    problem: Problem, seed: int, *, name: str, axis: str, form: Form | None
) -> Search:
    """Make the search of one of Optuna's samplers for a problem and a seed.

    Args:
        problem: what is searched.
        seed: of the search.
        name: of the sampler.
        axis: the rule from which the learning rate is searched, or ``lr``.
        form: how a stopped trial is recorded; None where that makes no difference.
    """
    if form is None:
        form = FORMS[0]
    sampler_seed = trial_seed(seed, 0, FOR_SEARCH)
    # Some samplers are experimental to Optuna, which would say so for each seed.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)
        sampler = _sampler(name, sampler_seed)
        return OptunaSearch(problem, seed, sampler, rule_of(problem, axis), form)


def _sampler(name: str, seed: int) -> BaseSampler:
    """Make Optuna's sampler with a name of SAMPLERS."""
    if name == "random":
        return RandomSampler(seed=seed)
    if name == "qmc":
        # Optuna draws a study's first trial by this one, as it does not know the parameters yet.
        first = RandomSampler(seed=seed)
        return QMCSampler(
            scramble=True, seed=seed, independent_sampler=first, warn_independent_sampling=False
        )
    if name == "tpe":
        return TPESampler(seed=seed)
    return GPSampler(seed=seed, warn_independent_sampling=False)


def rule_of(problem: Problem, axis: str) -> scaling.ScalingRule | None:
    """Give the scaling rule through the problem's reference pair; None for the axis ``lr``."""
    reference = {
        "reference_batch_size": problem.reference_batch_size,
        "reference_lr": problem.reference_lr,
    }
    plain = {"none": scaling.none, "sqrt": scaling.sqrt, "linear": scaling.linear}
    if axis in plain:
        return partial(plain[axis], **reference)
    if axis in WITH_NOISE_SCALE:
        if problem.noise_scale is None:
            raise ConfigError(
                f"the axis {axis} needs a noise scale, and the table does not determine its B_crit"
            )
        rules = {"saturating": scaling.saturating, "surge": scaling.surge}
        return partial(rules[axis], **reference, noise_scale=problem.noise_scale)
    return None


def trial_seed(seed: int, number: int, purpose: int = FOR_TRIAL) -> int:
    """Give the seed of trial ``number`` in the search with ``seed``.

    A sampler's seed, or another one of a further ``purpose``, is independent of the trials'.
    """
    return int(np.random.SeedSequence([seed, number, purpose]).generate_state(1)[0])


class LearningRateAxis:
    """The coordinate that a search has for the learning rate.

    It is the learning rate itself or, with a rule, the octaves between it and the rule's.

    Attributes:
        name: of the coordinate, ``lr`` or, with a rule, ``delta`` = log2(lr / rule(B)).
        low, high: its range. That of ``delta`` is half of the learning rates' range in octaves, to
            either side.
        is_log: whether it is searched on a log scale.
    """

    def __init__(self, problem: Problem, rule: scaling.ScalingRule | None) -> None:
        self._problem = problem
        self._rule = rule
        self.name = "lr"
        self.low = problem.lr_low
        self.high = problem.lr_high
        self.is_log = True
        if rule is not None:
            # Octaves off the rule: as many as the learning rates span, half of them on each side.
            half_span = 0.5 * math.log2(problem.lr_high / problem.lr_low)
            self.name = "delta"
            self.low = -half_span
            self.high = half_span
            self.is_log = False

    def suggest(self, trial: optuna.Trial) -> float:
        """Ask Optuna for the trial's coordinate."""
        return trial.suggest_float(self.name, self.low, self.high, log=self.is_log)

    def rate_at(self, batch_size: int, coordinate: float) -> tuple[float, float | None]:
        """Give the learning rate at a coordinate, clipped into the range, and ``delta``.

        Without a rule the coordinate is the learning rate itself, and ``delta`` is None.
        """
        if self._rule is None:
            return coordinate, None
        lr = self._problem.clip_lr(self._rule(batch_size) * math.exp2(coordinate))
        return lr, coordinate


class OptunaSearch(Search):
    """Any Optuna sampler, asked and told in memory.

    The parameters are ``batch_size`` (log integer) and the coordinate of :class:`LearningRateAxis`.
    The value is the logarithm of seconds (or steps) to target. A trial that did not reach the
    target is ``pruned``, with its last distance from the target as the intermediate value that
    ranks it. Or it is complete at its ``bound``, the seconds at which it would have been stopped.
    That holds for a diverged trial too: its own seconds would make it look fast.
    """

    def __init__(
        self,
        problem: Problem,
        seed: int,
        sampler: BaseSampler,
        rule: scaling.ScalingRule | None,
        form: Form,
    ) -> None:
        self._problem = problem
        self._seed = seed
        self._axis = LearningRateAxis(problem, rule)
        # How a trial that missed the target is told, ``pruned`` or at its ``bound``.
        self._form = form
        # Trials end by the stopping rule of all searches, so Optuna's pruner is not asked.
        self.study = optuna.create_study(sampler=sampler, pruner=optuna.pruners.NopPruner())
        # The trial that was asked last, and the step at which it was to end; None once it is told.
        self._asked: tuple[optuna.Trial, int] | None = None

    def incumbent(self, finished: Sequence[TrialResult]) -> TrialResult | None:
        """Name the trial that is best by the objective."""
        return least(finished, self._problem.objective)

    def propose(self, finished: Sequence[TrialResult]) -> TrialSpec:
        """Tell Optuna the result of the last trial, and ask it for the next one."""
        if self._asked is not None:
            self.tell(*self._asked, finished[-1])
        problem = self._problem
        number = len(finished)
        trial = self.study.ask()
        batch_size = trial.suggest_int(
            "batch_size", problem.batch_sizes[0], problem.batch_sizes[-1], log=True
        )
        # ``delta``: the octaves from a scaling rule's learning rate to ``lr``; None without a rule.
        lr, delta = self._axis.rate_at(batch_size, self._axis.suggest(trial))
        # ``resumed_from``: the number of the stopped trial that this one continues, if any.
        last_step, resumed_from = self.last_step_and_start(trial, batch_size, finished)
        self._asked = trial, last_step
        spec = TrialSpec(
            number=number,
            trial_index=number,
            batch_size=batch_size,
            lr=lr,
            delta=delta,
            seed=trial_seed(self._seed, number),
            max_steps=last_step,
            resumed_from=resumed_from,
        )
        if resumed_from is None:
            return spec
        # It continues a stopped trial with that trial's exact numbers: the suggested ones went
        # through a logarithm, and may differ by rounding.
        stopped = finished[resumed_from]
        return replace(
            spec,
            batch_size=stopped.batch_size,
            lr=stopped.lr,
            delta=stopped.delta,
            seed=stopped.seed,
        )

    def last_step_and_start(
        self, trial: optuna.Trial, batch_size: int, finished: Sequence[TrialResult]
    ) -> tuple[int, int | None]:
        """Give a trial's last step, and the number of the stopped trial that it continues.

        None: it begins at step 0, as each does here. A subclass may decide both otherwise.
        """
        return stopping_step(self._problem, batch_size, finished), None

    def tell(self, trial: optuna.Trial, last_step: int, result: TrialResult) -> None:
        """Tell the study the result of a trial that was to end at ``last_step``."""
        cost = result.time_to_target
        # The trial would have cost at least as much as this bound.
        if cost is None and self._form == "bound":
            cost = last_step * self._problem.tau(result.batch_size)
        if cost is not None:
            value = math.log(merit(self._problem.objective, cost, result.batch_size))
            self.study.tell(trial, value)
            return
        values = [value for _, value in result.history if value is not None]
        if values:
            # All are reported at step 1: TPE ranks by step first, and steps differ between batch
            # sizes.
            trial.report(self._problem.target.gap(values[-1]), step=1)
        self.study.tell(trial, state=TrialState.PRUNED)


def new_trial(
    problem: Problem, seed: int, batch_size: int, lr: float, finished: Sequence[TrialResult]
) -> TrialSpec:
    """Make the next trial of a search that has no scaling rule.

    The stopping rule that searches share sets its last step. ``seed`` is the search's.
    """
    number = len(finished)
    return TrialSpec(
        number=number,
        trial_index=number,
        batch_size=batch_size,
        lr=lr,
        delta=None,
        seed=trial_seed(seed, number),
        max_steps=stopping_step(problem, batch_size, finished),
    )


class EveryBatchSize(Search):
    """Every batch size of the table tuned by itself (Shallue et al. 2018, arXiv 1811.03600).

    The learning rates are quasi-random over the range's logarithm, an independent sequence at each
    batch size. All get one trial before any gets another, in an order drawn anew each round, so
    that after any spending all have nearly as many. (They also fixed the number of trials; here the
    spending ends the search.)
    """

    def __init__(self, problem: Problem, seed: int) -> None:
        self._problem = problem
        self._seed = seed
        rng = np.random.default_rng(trial_seed(seed, 0, FOR_SEARCH))
        # A shift of the one quasi-random sequence for each batch size makes the sequences differ.
        self._shifts = rng.random(len(problem.batch_sizes))

    def propose(self, finished: Sequence[TrialResult]) -> TrialSpec:
        """Choose the next learning rate of the next batch size."""
        problem = self._problem
        number = len(finished)
        # A turn goes through all batch sizes once, in an order of its own.
        turn, place = divmod(number, len(problem.batch_sizes))
        rng = np.random.default_rng(trial_seed(self._seed, turn, FOR_ORDER))
        order = rng.permutation(len(problem.batch_sizes))
        index = int(order[place])
        # A place from 0 to 1 within the logarithm of the learning rates' range. One quasi-random
        # sequence serves all batch sizes, each with a shift of its own.
        share = (van_der_corput(turn) + float(self._shifts[index])) % 1.0
        batch_size = problem.batch_sizes[index]
        lr = problem.clip_lr(problem.lr_low * (problem.lr_high / problem.lr_low) ** share)
        return new_trial(problem, self._seed, batch_size, lr, finished)


class Zeus(Search):
    """The batch size optimizer of Zeus (You et al., NSDI 2023, sections 4.3 and 4.4), in seconds.

    It tries a list of batch sizes, here the table's, with the learning rate of the square-root
    rule.

    1. Pruning, two rounds: from the default batch size (the one nearest the reference; in the
       second round the cheapest of the first) downwards until one fails to reach the target within
       twice the least cost, then upwards. Those that reached it are left for the next round.
    2. Thompson sampling over what is left: the reward of a batch size is minus its cost, Gaussian
       with an unknown mean (flat prior) and the variance of its own trials, stopped ones included.

    Zeus gives up where no batch size reaches the target in a round; here the pruning starts over.
    """

    def __init__(self, problem: Problem, seed: int) -> None:
        self._problem = problem
        self._seed = seed
        reference = problem.reference_batch_size
        self._rule = partial(
            scaling.sqrt,
            reference_batch_size=reference,
            reference_lr=problem.reference_lr,
        )
        # The batch sizes that no round of pruning has thrown out, and the one to begin a round at.
        self.left: tuple[int, ...] = problem.batch_sizes
        self._default = min(self.left, key=lambda size: abs(math.log(size / reference)))
        # The trials of the present round of pruning, and how many rounds have ended.
        self._round = list[TrialResult]()
        self._rounds_ended = 0

    def propose(self, finished: Sequence[TrialResult]) -> TrialSpec:
        """Choose the next batch size of the pruning, or of the Thompson sampling."""
        # While the pruning lasts, the last trial is one of its present round.
        if finished and self._rounds_ended < PRUNING_ROUNDS:
            self._round.append(finished[-1])
        batch_size: int | None = None
        # Where a round has no batch size left, the next round begins, or the pruning is over.
        while batch_size is None and self._rounds_ended < PRUNING_ROUNDS:
            batch_size = next_to_prune(self.left, self._default, self._round)
            if batch_size is None:
                self._end_round()
        if batch_size is None:
            batch_size = self._thompson(finished)
        lr = self._problem.clip_lr(self._rule(batch_size))
        return new_trial(self._problem, self._seed, batch_size, lr, finished)

    def _end_round(self) -> None:
        """Keep the batch sizes that reached the target in this round, or start over if none did."""
        # They are ordered by cost, then by batch size: of two equal ones the smaller is taken.
        reached = list[tuple[float, int]]()
        for trial in self._round:
            if trial.reached:
                reached.append((trial.train_seconds, trial.batch_size))
        self._round = []
        if reached:
            self._rounds_ended += 1
            self.left = tuple(sorted(batch_size for _, batch_size in reached))
            _, self._default = min(reached)
        else:
            # Zeus itself would give up here.
            self._rounds_ended = 0
            self.left = self._problem.batch_sizes

    def _thompson(self, finished: Sequence[TrialResult]) -> int:
        """Draw each batch size's mean cost from its posterior, and give the cheapest one."""
        rng = np.random.default_rng(trial_seed(self._seed, len(finished), FOR_THOMPSON))
        draws = list[tuple[float, int]]()
        for batch_size in self.left:
            costs = [trial.train_seconds for trial in finished if trial.batch_size == batch_size]
            # With a flat prior and a known variance the posterior of the mean is normal, around the
            # mean of the trials, as wide as its standard error.
            standard_error = float(np.std(costs)) / math.sqrt(len(costs))
            draws.append((rng.normal(float(np.mean(costs)), standard_error), batch_size))
        _, cheapest = min(draws)
        return cheapest


def next_to_prune(
    batch_sizes: Sequence[int], default: int, tried: Sequence[TrialResult]
) -> int | None:
    """Choose the next batch size of a round of Zeus's pruning; None if the round is over.

    The order is from ``default`` downwards to the first that failed to reach the target, then from
    above it upwards to the first that failed. ``tried`` are the trials of the round.
    """
    reached = {trial.batch_size: trial.reached for trial in tried}
    down = [size for size in sorted(batch_sizes, reverse=True) if size <= default]
    up = [size for size in sorted(batch_sizes) if size > default]
    for direction in (down, up):
        for size in direction:
            if size not in reached:
                return size
            if not reached[size]:
                break
    return None


class FrontierSearch(OptunaSearch):
    """bstune's sampler, in the place of one of Optuna's.

    Every stopped trial can be continued, except one that ended before its ``max_steps``: its record
    goes no further.
    """

    def __init__(self, problem: Problem, seed: int, rule: str = "sqrt") -> None:
        # Numbers of the stopped trials whose record goes no further.
        self._exhausted: set[int] = set()
        self._incumbent: TrialResult | None = None
        self.sampler = FrontierSampler(
            objective=problem.objective,
            rule=rule_of(problem, rule),
            budget=lambda batch_size: problem.budget.last_step(round(batch_size)),
            target=problem.target,
            # The metric of a table is an error.
            ideal=0.0,
            resumable=lambda number: number not in self._exhausted,
            lr_range=(problem.lr_low, problem.lr_high),
            step_time=problem.tau,
            search_space={
                BATCH_SIZE: IntDistribution(
                    problem.batch_sizes[0], problem.batch_sizes[-1], log=True
                ),
                LR: FloatDistribution(problem.lr_low, problem.lr_high, log=True),
            },
            seed=trial_seed(seed, 0, FOR_SEARCH),
        )
        # The sampler has the rule itself, and reads how a trial ended from the trial's record.
        super().__init__(problem, seed, self.sampler, rule=None, form="pruned")

    def last_step_and_start(
        self, trial: optuna.Trial, batch_size: int, finished: Sequence[TrialResult]
    ) -> tuple[int, int | None]:
        """Give the last step and the continued trial that the sampler decided."""
        max_steps = self.sampler.max_steps(trial.number)
        resumed_from = self.sampler.resumed_from(trial.number)
        if resumed_from is not None:
            trial.set_user_attr(RESUMED_FROM, resumed_from)
        # Where the sampler states no step, the stopping rule of the other searches holds.
        if max_steps is None:
            max_steps, _continued = super().last_step_and_start(trial, batch_size, finished)
        return max_steps, resumed_from

    def tell(self, trial: optuna.Trial, last_step: int, result: TrialResult) -> None:
        """Tell the study the trial's result, whose record the sampler reads."""
        # The table's run ended before the trial was to end: it cannot be continued.
        if result.status == "stopped" and result.steps < last_step:
            self._exhausted.add(result.number)
        trial.set_user_attr(RECORD, result.to_json())
        super().tell(trial, last_step, result)

    def incumbent(self, finished: Sequence[TrialResult]) -> TrialResult | None:
        """Name the trial whose point is best by the posterior's mean, not the luckiest one."""
        # Only a trial that reached the target changes the incumbent.
        if not finished or not finished[-1].reached:
            return self._incumbent
        # The last trial is told now: the next proposal, which would do it, is too late.
        if self._asked is not None:
            self.tell(*self._asked, finished[-1])
            self._asked = None
        number = self.sampler.recommended(self.study)
        self._incumbent = None
        if number is not None:
            self._incumbent = finished[number]
        return self._incumbent

    def b_crit(self, finished: Sequence[TrialResult]) -> float | None:
        """Give the B_crit that a study would report, the posterior's median; None without one."""
        # A study's own report takes as many particles and moves.
        posterior = self.sampler.posterior(self.study, particles=REPORT_PARTICLES, moves=MOVES)
        if posterior is None:
            return None
        critical = critical_batch(posterior)
        if critical is None:
            return None
        return critical.value
