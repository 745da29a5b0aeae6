"""Asks for a trial: a suggestion, the baseline, a run on a fresh seed, or a continuation.

Four transactions write a trial. One makes it, with its parameters and all that is known before it
runs; then come its record, from which on a killed process loses nothing of it, what Optuna's
dashboard shows, and its end with its values (see :mod:`bstune.study.storage.telling`).
"""

import copy
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import optuna
from optuna.distributions import FloatDistribution, IntDistribution
from optuna.exceptions import ExperimentalWarning, UpdateFinishedTrialError
from optuna.samplers import BaseSampler, PartialFixedSampler, RandomSampler
from optuna.trial import FrozenTrial, TrialState

from bstune.core.records import Target, TrialResult, TrialSpec
from bstune.core.search_space import Space
from bstune.search.acquisition import MIN_STEPS
from bstune.search.coordinates import nearest_value
from bstune.search.sampler import RECORD, RESUMED_FROM
from bstune.study.planning.baseline import Baseline, baseline_spec
from bstune.study.planning.plan import FIRST_REPLICATE, SearchBudget, SearchEnd
from bstune.study.planning.replicates import Winner
from bstune.study.storage.attributes import LEARNING_RATE, LOST, SPEC
from bstune.study.storage.dense_steps import dense_search_steps, dense_steps_of
from bstune.study.storage.draft import Draft
from bstune.study.storage.patience import patient
from bstune.study.storage.trials import (
    AskedTrial,
    end_trial,
    read_trials,
    record_of,
    spec_of,
    text_of,
    trial_index_of,
    worker_of,
)
from bstune.study.storage.turns import (
    HOLDS_INDEX,
    TRIES,
    Turn,
    count_failures,
    failed_at,
    failed_by_itself,
    turn_at,
)
from bstune.system.secrets import redact_values

# The step at which samplers see the one value of a stopped trial.
REPORTED = 1
# A run on a fresh seed ends after so many times the steps of the trial that it repeats, or of those
# predicted, whichever are more.
REPLICATE_LIMIT = 2


def _begin(
    study: optuna.Study, turn: Turn, template: FrozenTrial, spec: TrialSpec
) -> AskedTrial | None:
    """Store a trial that was suggested; None if another process has begun one at its index before.

    One transaction stores all of it and gives it a number, in rising order. Of two trials at one
    index the one with the smaller number stays.

    Args:
        study: in its storage.
        turn: the index, and the trials as they were when it was free.
        template: the trial with its parameters and attributes.
        spec: what the trial is asked to do.
    """
    if any(_has_begun(trial, turn.trial_index) for trial in turn.trials):
        return None
    storage = study._storage
    study_id = study._study_id
    expected = len(turn.trials)
    # Optuna's ask() cannot store parameters and attributes in the transaction that makes the trial.
    trial_id = patient(storage.create_new_trial)(study_id, template)
    id_at_number = patient(storage.get_trial_id_from_study_id_trial_number)
    if id_at_number(study_id, expected) == trial_id:
        # No trial was begun since the index was found free.
        return trial_id, replace(spec, number=expected)
    # Others were begun meanwhile. One of them may be at this index.
    trials = read_trials(study)
    number = next(trial.number for trial in trials if trial._trial_id == trial_id)
    for earlier in trials:
        if earlier.number >= number or not _has_begun(earlier, turn.trial_index):
            continue
        if worker_of(earlier) != turn.worker:
            _drop(study, trial_id)
            return None
        # This process made the earlier one: the storage did not answer, and was asked again.
        _drop(study, earlier._trial_id)
    return trial_id, replace(spec, number=number)


def _has_begun(trial: FrozenTrial, trial_index: int) -> bool:
    """Whether a trial holds an index: it runs there, or has run without failing."""
    return trial.state in HOLDS_INDEX and trial_index_of(trial) == trial_index


def _drop(study: optuna.Study, trial_id: int) -> None:
    """End a trial that never runs, as another one holds its index, and mark it as not asked.

    Another process may have ended it before.
    """
    with suppress(UpdateFinishedTrialError):
        patient(study._storage.set_trial_user_attr)(trial_id, LOST, True)
    end_trial(study, trial_id, TrialState.FAIL)


@dataclass(frozen=True)
class Ranking:
    """Shows stopped trials to a sampler that ranks them by a reported value, as TPE does."""

    target: Target

    def seen(self, trials: Sequence[FrozenTrial]) -> list[FrozenTrial]:
        """Give the trials as the sampler is to see them.

        A stopped one has the gap of its metric to the target as its one value. TPE ranks pruned
        trials by their last reported step, then by the value there. Steps mean different things at
        different batch sizes, so that all trials get the same one. The gap alone then ranks them.
        """
        return [self._with_gap(trial) for trial in trials]

    def _with_gap(self, trial: FrozenTrial) -> FrozenTrial:
        """Copy a stopped trial as if it had reported how far its metric was from the target.

        A trial that reached the target, has no metric or was not stopped is given as it is.
        """
        if trial.state != TrialState.PRUNED or RECORD not in trial.user_attrs:
            return trial
        result = record_of(trial.user_attrs[RECORD])
        values = [value for _, value in result.history if value is not None]
        if result.reached or not values:
            return trial
        seen = copy.copy(trial)
        seen.intermediate_values = {REPORTED: self.target.gap(values[-1])}
        return seen


def _unlimited(spec: TrialSpec) -> TrialSpec:
    """Leave a suggested trial as it is."""
    return spec


def ask(
    study: optuna.Study,
    turn: Turn,
    budget: SearchBudget,
    space: Space,
    sampler: BaseSampler,
    stops: bool,
    baseline: tuple[Baseline, int | None] | None = None,
    ranking: Ranking | None = None,
    limited: Callable[[TrialSpec], TrialSpec | SearchEnd] = _unlimited,
) -> AskedTrial | SearchEnd | None:
    """Ask a trial at an index: the sampler's suggestion, or again one that was cut short.

    Args:
        study: in its storage.
        turn: the index, and the trials as they were when it was free.
        budget: of the search, which has its seeds and strata.
        space: that is searched.
        sampler: of this one trial.
        stops: whether a trial can be stopped early and continued; else a limit of the sampler's is
            only the length of a schedule.
        baseline: what index 0 runs in place of a suggestion, and the step at which it ends (None:
            at its budget). None: index 0 is suggested, too.
        ranking: shows stopped trials to a sampler that ranks them by what they reported; None for
            another sampler.
        limited: limits the suggested trial to the time that is left, or gives the end of the search
            where that is too short.

    Returns:
        The trial that was stored, or the end of the search. None where another process has begun a
        trial at the index meanwhile.
    """
    draft, spec = _draft(study, turn, budget, space, sampler, stops, baseline, ranking)
    limited_spec = limited(spec)
    if isinstance(limited_spec, SearchEnd):
        return limited_spec
    return _begin(study, turn, _template(draft, turn, limited_spec), limited_spec)


def _draft(
    study: optuna.Study,
    turn: Turn,
    budget: SearchBudget,
    space: Space,
    sampler: BaseSampler,
    stops: bool,
    baseline: tuple[Baseline, int | None] | None,
    ranking: Ranking | None,
) -> tuple[Draft, TrialSpec]:
    """Choose the trial of an index, and write it down as a draft that is not stored yet.

    It is the point of the index's last trial if that failed and has not been given up, else the
    baseline at index 0, else the sampler's suggestion.

    Args:
        study: in its storage.
        turn: the index, and the trials as they were when it was free.
        budget: of the search, which has its seeds.
        space: that is searched.
        sampler: of this one trial.
        stops: whether a trial can be stopped early and continued.
        baseline: the user's own configuration and the step at which it ends, None for its budget;
            None: index 0 is suggested, too.
        ranking: shows stopped trials to a sampler that ranks them; None for another sampler.
    """
    trial_index = turn.trial_index
    failed = failed_at(turn.trials, trial_index)
    if failed and not _is_given_up(failed):
        earlier = failed[-1]
        draft, trial = _suggested(study, turn, space, sampler, dict(earlier.params), ranking)
        return draft, replace(spec_of(earlier), number=trial.number)
    if trial_index == 0 and baseline is not None and not failed:
        return _draft_baseline(study, turn, space, budget, *baseline)
    return _draft_suggestion(study, turn, budget, space, sampler, stops, ranking)


def _draft_suggestion(
    study: optuna.Study,
    turn: Turn,
    budget: SearchBudget,
    space: Space,
    sampler: BaseSampler,
    stops: bool,
    ranking: Ranking | None,
) -> tuple[Draft, TrialSpec]:
    """Draft the trial that the sampler suggests, which may continue a stopped one.

    The arguments are those of :func:`_draft`.
    """
    fixed = _fixed_batch_size(sampler, budget, turn.trial_index, space)
    draft, trial = _suggested(study, turn, space, sampler, fixed, ranking)
    batch_size = space.snap(trial.params["batch_size"])
    lr = space.lr(batch_size, trial.params["delta"])
    seed = budget.trial_seed(turn.trial_index)
    # A sampler may limit the trial's steps, and have it continue a stopped trial.
    max_steps, resumed_from = _limit_and_parent(sampler, trial.number, stops)
    if resumed_from is not None:
        # A continuation has the rate and seed of the trial that it continues, even where that lies
        # outside of the ranges, as the baseline may.
        continued = record_of(turn.trials[resumed_from].user_attrs[RECORD])
        lr = continued.lr
        seed = continued.seed
    # The octaves from the scaling rule's learning rate to ``lr``. They may be others than the
    # sampler's, as the rate is clipped to its range, or the continued trial's.
    delta = space.delta(batch_size, lr)
    # The sampler searches some hyper-parameters as their complement: these are their own values.
    values = space.searched(trial.params)
    # The steps between which the trial is evaluated more often, as it may meet the target there.
    dense_steps: tuple[int, int] | None = None
    # A continuation is evaluated as often as the trial that it continues.
    if resumed_from is None:
        dense_steps = dense_search_steps(turn.trials, batch_size)
    return draft, TrialSpec(
        number=trial.number,
        trial_index=turn.trial_index,
        batch_size=batch_size,
        lr=lr,
        delta=delta,
        seed=seed,
        max_steps=max_steps,
        resumed_from=resumed_from,
        hyperparameters=values,
        dense_steps=dense_steps,
    )


def _fixed_batch_size(
    sampler: BaseSampler, budget: SearchBudget, trial_index: int, space: Space
) -> dict[str, int | float]:
    """Give the batch size that the study itself chooses for a trial, by the parameter's name.

    It is empty where the sampler chooses the batch size, as one that stops trials always does.
    """
    if _stops_trials(sampler) or getattr(sampler, "chooses_batch_sizes", False):
        return {}
    stratum = budget.stratum(trial_index, space)
    if stratum is None:
        return {}
    return {"batch_size": stratum}


def _limit_and_parent(
    sampler: BaseSampler, number: int, stops: bool
) -> tuple[int | None, int | None]:
    """Give the step at which a suggested trial ends, and the number of the trial that it continues.

    The sampler chooses both. They are None for a sampler that stops no trials. They are None as
    well where trials cannot be stopped, unless the step is the end of a schedule (``horizon``).
    """
    if not _stops_trials(sampler) or not (stops or getattr(sampler, "horizon", False)):
        return None, None
    # Optuna's base class has neither of these methods.
    stopping: Any = sampler
    return stopping.max_steps(number), stopping.resumed_from(number)


def _stops_trials(sampler: BaseSampler) -> bool:
    """Whether a sampler stops and continues trials. Optuna has no class of such samplers."""
    return hasattr(sampler, "max_steps")


def _is_given_up(failed: Sequence[FrozenTrial]) -> bool:
    """Whether a point's trials have failed so often that another point takes its place.

    Where the last trial was cut short, the point is asked again in any case.
    """
    return failed_by_itself(failed[-1]) and count_failures(failed) % TRIES == 0


def _draft_baseline(
    study: optuna.Study,
    turn: Turn,
    space: Space,
    budget: SearchBudget,
    baseline: Baseline,
    max_steps: int | None,
) -> tuple[Draft, TrialSpec]:
    """Draft the user's own configuration as a trial.

    It gives the draft, whose parameters are the nearest ones within the ranges, as Optuna demands,
    and the trial to run, which has the configuration's own values.

    ``max_steps``: the step at which it ends; None: at its budget.
    """
    # By how many octaves the user's learning rate lies above the scaling rule's.
    delta = space.delta(baseline.batch_size, baseline.lr)
    # Hyper-parameters as the sampler searches them: some as their complement.
    searched = space.searched(baseline.hyperparameters)
    parameters = {"batch_size": baseline.batch_size, "delta": delta, **searched}
    fixed = {
        name: nearest_value(parameters[name], distribution)
        for name, distribution in distributions(space).items()
    }
    # The sampler draws nothing, as all values are fixed.
    draft, trial = _suggested(study, turn, space, RandomSampler(seed=0), fixed)
    seed = budget.trial_seed(turn.trial_index)
    return draft, baseline_spec(baseline, trial.number, space, seed, max_steps)


def ask_replicate(
    study: optuna.Study,
    winner: Winner,
    replicate: int,
    budget: SearchBudget,
    space: Space,
    stops: bool,
    worker: str = "",
    horizon: int | None = None,
    seed_of: TrialResult | None = None,
    is_baseline: bool = False,
    last_step: int | None = None,
) -> AskedTrial | None:
    """Ask a trial with the hyper-parameters of a point, on a fresh seed.

    It is None if another process runs it.

    Args:
        study: in its storage.
        winner: the point that runs again; the baseline may be one.
        replicate: how many runs on fresh seeds it has had.
        budget: of the search, which has its indices and seeds.
        space: that is searched.
        stops: whether a trial can be stopped early and continued. If so it takes at most
            ``REPLICATE_LIMIT`` times the steps that the point's trial took, or is predicted to.
        worker: the id of this process's lease.
        horizon: steps of the schedule to run with, where the search chooses its length; None: as
            many as the point's trial had.
        seed_of: another point's run whose seed it takes; None: a new seed.
        is_baseline: whether the point is the baseline.
        last_step: to which it runs in any case; None: it is limited as above.
    """
    original = winner.trial
    index_of_point = original.trial_index
    # The baseline's runs count as replicates of index 0, even where its first run went on at
    # another index.
    if is_baseline:
        index_of_point = 0
    trial_index = budget.replicate_index(index_of_point, replicate)
    turn = turn_at(study, trial_index, worker)
    stored = turn.trials[original.number]
    spec = spec_of(stored)
    # The steps between which the run is evaluated more often, as it may meet the target there.
    dense_steps: tuple[int, int] | None = None
    if last_step is not None:
        # Nothing tells when this run may meet the target: the objective loss has none, and a
        # baseline whose first run missed it has no steps to it.
        max_steps: int | None = last_step
    else:
        max_steps = _replicate_steps(winner, spec.max_steps, stops, horizon)
        dense_steps = dense_steps_of(original, winner.steps)
    seed = budget.trial_seed(trial_index)
    if seed_of is not None:
        seed = seed_of.seed
    spec = replace(
        spec,
        trial_index=trial_index,
        seed=seed,
        max_steps=max_steps,
        resumed_from=None,
        replicate_of=original.number,
        dense_steps=dense_steps,
    )
    return _ask_again(study, turn, space, stored, spec)


def _replicate_steps(
    winner: Winner, original_limit: int | None, stops: bool, horizon: int | None
) -> int | None:
    """Give the step at which a run on a fresh seed ends; None: at its budget.

    Args:
        winner: the point that runs again.
        original_limit: the step at which the trial that it repeats was to end; None: at its budget.
        stops: whether trials can be stopped early. Else each ends with its schedule.
        horizon: the step at which the search would end the schedule; None: that of the trial.
    """
    if stops:
        expected = max(winner.trial.steps, winner.steps)
        return math.ceil(max(REPLICATE_LIMIT * expected, MIN_STEPS))
    if original_limit is None:
        return None
    # All fresh seeds of a point have the schedule of its first one, so that they compare.
    if winner.runs:
        return winner.horizon
    return horizon or original_limit


def ask_continuation(
    study: optuna.Study,
    stopped: TrialResult,
    max_steps: int,
    space: Space,
    worker: str = "",
    *,
    afresh: bool = False,
) -> AskedTrial | None:
    """Ask a trial that continues a stopped one, at an index of its own.

    It is None if another process has taken that index.

    Args:
        study: in its storage.
        stopped: the trial to continue.
        max_steps: up to which it runs.
        space: that is searched.
        worker: the id of this process's lease.
        afresh: whether it is trained again from its first step, as nothing can be continued.
    """
    trials = read_trials(study)
    # A trial that bstune did not ask has no index, and takes none.
    indices = [trial_index_of(trial) or 0 for trial in trials]
    # The indices of runs on fresh seeds are far above those of the search.
    last = max(index for index in indices if index < FIRST_REPLICATE)
    turn = Turn(last + 1, worker, trials)
    parent = trials[stopped.number]
    resumed_from = None if afresh else stopped.number
    spec = replace(
        spec_of(parent),
        trial_index=turn.trial_index,
        max_steps=max_steps,
        resumed_from=resumed_from,
    )
    return _ask_again(study, turn, space, parent, spec)


def _ask_again(
    study: optuna.Study, turn: Turn, space: Space, earlier: FrozenTrial, spec: TrialSpec
) -> AskedTrial | None:
    """Store a trial with the parameters of an earlier one, and ``spec`` as what it is asked to do.

    Args:
        study: in its storage.
        turn: the trial's index, its place in the study's plan, and the trials so far.
        space: that is searched.
        earlier: the trial whose parameters it gets.
        spec: what it is asked to do.

    Returns:
        The trial that was stored; None if another process has begun one at the index before.
    """
    # A trial gets its parameters from a sampler alone, in a draft that is not stored yet. Here the
    # sampler draws nothing, as all values are fixed.
    draft, _ = _suggested(study, turn, space, RandomSampler(seed=0), dict(earlier.params))
    return _begin(study, turn, _template(draft, turn, spec), spec)


def _suggested(
    study: optuna.Study,
    turn: Turn,
    space: Space,
    sampler: BaseSampler,
    fixed: Mapping[str, int | float],
    ranking: Ranking | None = None,
) -> tuple[Draft, optuna.Trial]:
    """Let the sampler suggest the parameters of a trial that is not stored.

    It gives the draft that keeps them, and the trial in it. Calls that may reach the storage are
    made again until it answers (``patient``).

    Args:
        study: in its storage.
        turn: has the study's earlier trials.
        space: that is searched.
        sampler: suggests the parameters.
        fixed: values of parameters that the sampler does not choose.
        ranking: shows stopped trials to a sampler that ranks them; None for another sampler.
    """
    earlier = turn.trials
    if ranking is not None:
        earlier = ranking.seen(turn.trials)
    draft = Draft(study, earlier)
    # Optuna warns that PartialFixedSampler is experimental.
    with warnings.catch_warnings(action="ignore", category=ExperimentalWarning):
        if fixed:
            sampler = PartialFixedSampler(dict(fixed), sampler)
        # A sampler may store here what it has to remember of the study.
        trial = patient(optuna.Trial)(draft.study(sampler), draft.trial_id)
        for name, values in distributions(space).items():
            if isinstance(values, IntDistribution):
                patient(trial.suggest_int)(name, values.low, values.high, log=values.log)
            else:
                patient(trial.suggest_float)(name, values.low, values.high, log=values.log)
    return draft, trial


def _template(draft: Draft, turn: Turn, spec: TrialSpec) -> FrozenTrial:
    """Make the trial as the storage gets it before it runs: parameters and attributes."""
    attributes = {LEARNING_RATE: spec.lr, SPEC: text_of(spec, turn.worker)}
    if spec.resumed_from is not None:
        attributes[RESUMED_FROM] = spec.resumed_from
    return draft.template(redact_values(attributes))


def distributions(space: Space) -> dict[str, IntDistribution | FloatDistribution]:
    """Give the ranges of the parameters that :func:`ask` suggests, by name.

    ``delta`` is by how many octaves the learning rate lies above the scaling rule's.
    """
    searched: dict[str, IntDistribution | FloatDistribution] = {
        "batch_size": IntDistribution(space.low, space.high, log=True),
        "delta": FloatDistribution(-space.delta_bound, space.delta_bound),
    }
    for tunable in space.tunables:
        if tunable.integer:
            low = round(tunable.low)
            searched[tunable.name] = IntDistribution(low, round(tunable.high), log=tunable.log)
        else:
            # A parameter near 1, such as a momentum, is searched as its complement 1 - x, so that
            # the range's upper end becomes the lower one.
            ends = sorted((tunable.searched(tunable.low), tunable.searched(tunable.high)))
            searched[tunable.name] = FloatDistribution(ends[0], ends[1], log=tunable.log)
    return searched
