"""A trial that a sampler suggests before the storage has it.

The storage then makes it with its parameters and attributes in one transaction, in place of one for
each of them::

    draft = Draft(study, trials)
    drafted = draft.study(sampler)
    trial = optuna.Trial(drafted, draft.trial_id)
    trial.suggest_int("batch_size", 8, 1024, log=True)
    draft.template({"lr": 0.1})  # for create_new_trial
"""

import copy
import datetime
from collections.abc import Container, Mapping, Sequence
from typing import Any

import optuna
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler
from optuna.storages import BaseStorage
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState, create_trial

# The id of the trial that is not stored yet: no storage gives it to another one.
DRAFT_ID = -1


class Draft(BaseStorage):
    """A study's storage as a sampler sees it: the trials as they were read, and one more that runs.

    What a sampler stores of the new trial is kept here; what it stores of the study, as
    ``QMCSampler`` its place in the sequence, goes to the study's own storage at once.
    """

    trial_id = DRAFT_ID

    def __init__(self, study: optuna.Study, trials: Sequence[FrozenTrial]) -> None:
        """Begin a draft after ``trials``, which are the study's, in order of their numbers."""
        self._study = study
        self._storage = study._storage
        self._trials = trials
        self._trial = FrozenTrial(
            number=len(trials),
            state=TrialState.RUNNING,
            value=None,
            datetime_start=datetime.datetime.now(),
            datetime_complete=None,
            params={},
            distributions={},
            user_attrs={},
            system_attrs={},
            intermediate_values={},
            trial_id=DRAFT_ID,
        )

    def study(self, sampler: BaseSampler) -> optuna.Study:
        """Make the study that has the draft as its last trial, and ``sampler`` to suggest it."""
        return optuna.Study(self._study.study_name, self, sampler)

    def template(self, user_attributes: Mapping[str, Any]) -> FrozenTrial:
        """Make the trial as it was suggested, with these attributes."""
        return create_trial(
            state=TrialState.RUNNING,
            params=self._trial.params,
            distributions=self._trial.distributions,
            user_attrs={**self._trial.user_attrs, **user_attributes},
            system_attrs=self._trial.system_attrs,
        )

    # What Optuna's storages answer about a trial.

    def set_trial_param(
        self,
        trial_id: int,
        param_name: str,
        param_value_internal: float,
        distribution: BaseDistribution,
    ) -> None:
        """Keep a parameter of the draft."""
        self._check(trial_id)
        self._trial.params[param_name] = distribution.to_external_repr(param_value_internal)
        self._trial.distributions[param_name] = distribution

    def set_trial_user_attr(self, trial_id: int, key: str, value: Any) -> None:
        """Keep an attribute of the draft."""
        self._check(trial_id)
        self._trial.user_attrs[key] = value

    def set_trial_system_attr(self, trial_id: int, key: str, value: Any) -> None:
        """Keep an attribute of the draft."""
        self._check(trial_id)
        self._trial.system_attrs[key] = value

    def get_trial(self, trial_id: int) -> FrozenTrial:
        """Give the draft, or a trial of the study."""
        if trial_id == DRAFT_ID:
            return copy.deepcopy(self._trial)
        return self._storage.get_trial(trial_id)

    def get_all_trials(
        self,
        study_id: int,
        deepcopy: bool = True,
        states: Container[TrialState] | None = None,
    ) -> list[FrozenTrial]:
        """Give the study's trials and the draft, in order of their numbers."""
        wanted = [
            trial
            for trial in (*self._trials, self._trial)
            if states is None or trial.state in states
        ]
        return copy.deepcopy(wanted) if deepcopy else wanted

    @staticmethod
    def _check(trial_id: int) -> None:
        """Raise ValueError for another trial than the draft."""
        if trial_id != DRAFT_ID:
            raise ValueError("a sampler may only change the trial that it suggests")

    # What Optuna's storages answer about the study.

    def get_study_id_from_name(self, study_name: str) -> int:
        """Give the id of the study in its own storage."""
        return self._study._study_id

    def get_study_name_from_id(self, study_id: int) -> str:
        """Give the study's name."""
        return self._study.study_name

    def get_study_directions(self, study_id: int) -> list[StudyDirection]:
        """Give the direction of each of the study's values."""
        return self._study.directions

    def get_study_user_attrs(self, study_id: int) -> dict[str, Any]:
        """Give the study's own attributes."""
        return self._storage.get_study_user_attrs(study_id)

    def get_study_system_attrs(self, study_id: int) -> dict[str, Any]:
        """Give what samplers have stored of the study."""
        return self._storage.get_study_system_attrs(study_id)

    def set_study_user_attr(self, study_id: int, key: str, value: Any) -> None:
        """Store an attribute of the study."""
        self._storage.set_study_user_attr(study_id, key, value)

    def set_study_system_attr(self, study_id: int, key: str, value: Any) -> None:
        """Store what a sampler has to remember from trial to trial."""
        self._storage.set_study_system_attr(study_id, key, value)

    # What no sampler asks

    def get_all_studies(self) -> list[Any]:
        """Give the studies of the storage."""
        return list(self._storage.get_all_studies())

    def create_new_study(
        self, directions: Sequence[StudyDirection], study_name: str | None = None
    ) -> int:
        """Refuse: the study is there."""
        raise NotImplementedError

    def delete_study(self, study_id: int) -> None:
        """Refuse: the study is being worked on."""
        raise NotImplementedError

    def create_new_trial(self, study_id: int, template_trial: FrozenTrial | None = None) -> int:
        """Refuse: the one new trial is there from the start."""
        raise NotImplementedError

    def set_trial_state_values(
        self, trial_id: int, state: TrialState, values: Sequence[float] | None = None
    ) -> bool:
        """Refuse: a trial that is only suggested does not end."""
        raise NotImplementedError

    def set_trial_intermediate_value(
        self, trial_id: int, step: int, intermediate_value: float
    ) -> None:
        """Refuse: a trial that is only suggested has no values."""
        raise NotImplementedError
