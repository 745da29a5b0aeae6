"""Optuna's own samplers in the search's place: TPE, a Gaussian process, quasi-random and random.

Each proposal is asked of a study in memory that is made of the records, so that it follows from
these and the seed alone. There a trial that reached the target is complete, with the log of what is
minimised, and one that finished, where the best metric counts, with that. The others are pruned,
and TPE ranks them by their metric. The Gaussian process reads complete trials alone: to it the
others are complete with the worst value of those.

On the way to a target a trial ends a little beyond the best value so far, where it can no longer be
the best: no pruner is needed, and no trial is resumed (on three tables the MedianPruner beside it,
or a trial of twice the best, led no further). Where the best metric counts Optuna's MedianPruner
judges a trial after the first part of its budget, and one that passes is resumed to the end; not
with the Gaussian process, which would learn nothing of those that do not.
"""

import math
from collections.abc import Callable, Sequence
from warnings import catch_warnings, simplefilter

import numpy as np
import optuna
from optuna.distributions import BaseDistribution, FloatDistribution
from optuna.exceptions import ExperimentalWarning
from optuna.pruners import MedianPruner
from optuna.samplers import BaseSampler, GPSampler, QMCSampler, RandomSampler, TPESampler
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState, create_trial

from bstune.core.question import Question
from bstune.core.records import Record, Records, Spec, StepTime, last_of_chains
from bstune.core.space import Configuration, Space
from bstune.search.choices import key_of, tried_keys
from bstune.search.decide import Proposal, first_evaluation, resumption
from bstune.search.fit import NOTHING, SurveyedSizes, chance_to_fit, sizes_to_try
from bstune.search.limits import PROBE_OF_BUDGET, limit_beside_best
from bstune.search.sampler import BATCH_SIZE, LR, ranges_of

# A sampler that repeats a configuration, or proposes a size that failed, is asked so often at most.
MOST_ASKED = 20
# Where the best metric counts nothing is pruned before so many trials have finished.
FIRST = 5
# The step at which all metrics are told: of two pruned trials TPE prefers the longer one.
STEP = 1


def propose_by(
    sampler: str,
    question: Question,
    space: Space,
    step_time: StepTime,
    records: Records,
    seed: int,
    running: Sequence[Spec] = (),
    resumable: Callable[[int], bool] = lambda number: True,
    fits: SurveyedSizes = NOTHING,
) -> Proposal:
    """Choose what to run next by a sampler of Optuna; the same arguments give the same proposal.

    Args:
        sampler: ``tpe``, ``gp``, ``qmc`` or ``random``.
        question, space, step_time, records, seed, running, resumable, fits: as of
            :func:`bstune.search.decide.propose`.
    """
    allowed = sizes_to_try(space, records, fits)
    chains = [one for one in last_of_chains(records) if not one.is_unfit and one.status != "failed"]
    values = {
        one.number: _minimised_value(question, step_time, one) for one in chains if one.reached
    }
    configurations = 0
    for spec in (*records, *running):
        configurations += spec.role == "search" and spec.resumed_from is None
    study = _study_in_memory(sampler, seed, configurations)
    told = {}
    for chain in chains:
        value = values.get(chain.number)
        if value is None and sampler == "gp":
            value = max(values.values(), default=None)
        state = TrialState.PRUNED if value is None else TrialState.COMPLETE
        metric = _ranking_metric(question, chain)
        told[chain.number] = _optuna_trial(allowed, chain, state, value, {STEP: metric})
    study.add_trials(told.values())
    study.add_trials(_optuna_trial(allowed, spec, TrialState.RUNNING) for spec in running)
    waiting = []
    if question.seeks_metric:
        resumed = {spec.resumed_from for spec in running}
        waiting = [one for one in chains if one.status == "pruned" and one.number not in resumed]
    can_resume = [one for one in waiting if resumable(one.number)]
    for chain in can_resume:
        if not study.pruner.prune(study, told[chain.number]):
            return resumption(chain, question.last_step(chain.batch_size))
    if sampler == "qmc":
        # Its sequence goes on after what it has given.
        for _ in range(configurations):
            study.ask(_distributions(allowed))
    configuration = _new_configuration(study, allowed, records, running, fits)
    batch_size = configuration.batch_size
    last_step = question.last_step(batch_size)
    best_steps = math.inf
    if values and not question.seeks_metric:
        best_steps = math.exp(min(values.values())) / question.value(1.0, batch_size, step_time)
    limit = limit_beside_best(best_steps, last_step)
    # Where no trial can be resumed each runs to its end at once.
    may_prune = question.seeks_metric and sampler != "gp" and (can_resume or not waiting)
    if may_prune and len(values) >= FIRST:
        limit = math.ceil(PROBE_OF_BUDGET * last_step)
    return Proposal(
        **configuration.model_dump(),
        max_steps=limit,
        first_evaluation=first_evaluation(min(best_steps, last_step)),
    )


def _new_configuration(
    study: Study, allowed: Space, records: Records, running: Sequence[Spec], fits: SurveyedSizes
) -> Configuration:
    """What the sampler asks that is new and may fit; the last one, where it repeats itself."""
    tried = tried_keys(records, running)
    for _ in range(MOST_ASKED):
        asked = study.ask(_distributions(allowed)).params
        configuration = Configuration(
            batch_size=allowed.snap(asked[BATCH_SIZE]),
            lr=allowed.snap_lr(asked[LR]),
            values=allowed.values_at([asked[one.name] for one in allowed.tunables]),
        )
        may_fit = chance_to_fit([configuration.batch_size], records, fits)[0] > 0.0
        if may_fit and key_of(configuration) not in tried:
            break
    return configuration


def _study_in_memory(sampler: str, seed: int, configurations: int) -> Study:
    """A study in memory, for the proposal after so many configurations."""
    seed_of_proposal = int(np.random.SeedSequence([seed, configurations]).generate_state(1)[0])
    with catch_warnings():
        # Optuna calls QMCSampler and some arguments experimental.
        simplefilter("ignore", ExperimentalWarning)
        own: BaseSampler
        match sampler:
            case "tpe":
                own = TPESampler(seed=seed_of_proposal, multivariate=True, constant_liar=True)
            case "gp":
                # It imports torch into this process, which no other search does.
                own = GPSampler(seed=seed_of_proposal)
            case "qmc":
                # One sequence for all proposals.
                own = QMCSampler(seed=seed, scramble=True)
            case _:
                own = RandomSampler(seed=seed_of_proposal)
    return optuna.create_study(sampler=own, pruner=MedianPruner(n_startup_trials=FIRST))


def _distributions(space: Space) -> dict[str, BaseDistribution]:
    """The ranges of a space; further values are searched by their coordinates."""
    of_values = {tunable.name: FloatDistribution(0.0, 1.0) for tunable in space.tunables}
    return {**ranges_of(space), **of_values}


def _optuna_trial(
    space: Space,
    spec: Spec,
    state: TrialState,
    value: float | None = None,
    metrics: dict[int, float] | None = None,
) -> FrozenTrial:
    """A trial as Optuna's samplers read it, all of them with the ranges of now."""
    names = [tunable.name for tunable in space.tunables]
    places = dict(zip(names, space.places(spec.values), strict=True))
    return create_trial(
        state=state,
        value=value,
        params={
            BATCH_SIZE: space.snap(spec.batch_size),
            LR: space.snap_lr(spec.lr),
            **places,
        },
        distributions=_distributions(space),
        intermediate_values=metrics,
    )


def _minimised_value(question: Question, step_time: StepTime, record: Record) -> float:
    """What Optuna minimises, of a trial that reached the target or finished."""
    if question.seeks_metric:
        return min(question.target.gap(value) for _, value in record.finite_history)
    return math.log(question.value(record.steps_to_target, record.batch_size, step_time))


def _ranking_metric(question: Question, record: Record) -> float:
    """The best metric, as its gap, by which trials are ranked and pruned; NaN is the worst.

    Where the best metric counts it is that of the first part of the budget.
    """
    last_step = math.inf
    if question.seeks_metric:
        last_step = PROBE_OF_BUDGET * question.last_step(record.batch_size)
    gaps: list[float] = []
    for step, value in record.finite_history:
        gaps.append(question.target.gap(value))
        if step >= last_step:
            break
    return math.nan if record.status == "diverged" else min(gaps, default=math.nan)
