"""The attributes that a study and its trials have in Optuna's storage, and what their values must be."""

from collections.abc import Mapping
from typing import Any

from pydantic import TypeAdapter

from bstune.search.sampler import RECORD, RESUMED_FROM
from bstune.study.planning import wall

# Attributes in the storage. Studies of another FORMAT name other fields in their specs and records.
FORMAT_VERSION = 4
FORMAT, FROZEN_SETTINGS = "bstune:format", "bstune:settings"
STUDY_ID, OUTPUT = "bstune:study_id", "bstune:output"
TESTS = "bstune:tests"  # test metrics by trial number
DEVICE, ARGUMENTS = (
    "bstune:device",
    "bstune:arguments",
)  # whose seconds count; what composes the config elsewhere
BUDGET_TIMES = "bstune:budget_times"  # batch sizes and seconds of a step, of a budget of seconds
GOAL = "bstune:goal"  # of the target, where the study's first trial sets it
SPEC = "bstune:spec"  # what a trial is asked to do, and the process that runs it, as JSON
WORKER = "worker"  # in a trial's spec: the id of that process's lease
LOST = "bstune:lost"  # of a trial at whose index another one had been begun: it never ran
# What Optuna's dashboard shows of a trial beside its parameters and values.
LEARNING_RATE, OUTCOME = "lr", "outcome"
WINNER = "winner"  # and of the study: trial, batch size and learning rate, by what it is the best
# What those that are there must be; those of a study must be there, but for some.
STUDY_ATTRIBUTES: Mapping[str, TypeAdapter[Any]] = {
    STUDY_ID: TypeAdapter(str),
    OUTPUT: TypeAdapter(str),
    DEVICE: TypeAdapter(str),
    ARGUMENTS: TypeAdapter(list[str]),
    FROZEN_SETTINGS: TypeAdapter(str),
    TESTS: TypeAdapter(dict[str, dict[str, float]]),
    GOAL: TypeAdapter(float),
    BUDGET_TIMES: TypeAdapter(list[list[int | float]]),
    wall.BEGAN: TypeAdapter(float),
    wall.TAKEN: TypeAdapter(float),
}
OPTIONAL_ATTRIBUTES = (TESTS, GOAL, BUDGET_TIMES, wall.BEGAN, wall.TAKEN)
TRIAL_ATTRIBUTES: Mapping[str, TypeAdapter[Any]] = {
    SPEC: TypeAdapter(str),
    RECORD: TypeAdapter(str),
    RESUMED_FROM: TypeAdapter(int),
    LOST: TypeAdapter(bool),
}
