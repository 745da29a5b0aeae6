"""The attributes of a study and its trials in Optuna's storage, with the types of their values."""

from collections.abc import Mapping
from typing import Any

from pydantic import TypeAdapter

from bstune.search.sampler import RECORD, RESUMED_FROM
from bstune.study.planning import wall

# Attributes in the storage. Studies of another FORMAT name other fields in their specs and records.
FORMAT_VERSION = 4
FORMAT = "bstune:format"
FROZEN_SETTINGS = "bstune:settings"
# The frozen setting that is true where nobody has chosen torch's threads: neither the user nor a
# timing. Other studies lack it.
THREADS_ARE_OPEN = "threads_are_open"
STUDY_ID = "bstune:study_id"
# The folder of the study's files.
OUTPUT = "bstune:output"
# Test metrics by trial number.
TESTS = "bstune:tests"
# The kind of device whose seconds count.
DEVICE_KIND = "bstune:device"
# Arguments of the command line, which compose the config elsewhere.
ARGUMENTS = "bstune:arguments"
# Batch sizes and seconds of a step, of a budget of seconds.
BUDGET_TIMES = "bstune:budget_times"
# The target's value, where the study's first trial sets it.
GOAL = "bstune:goal"
# What a trial is asked to do, and the process that runs it, as JSON.
SPEC = "bstune:spec"
# In a trial's spec: the id of that process's lease.
WORKER = "worker"
# Marks a trial at whose index another one had been begun: it never ran.
LOST = "bstune:lost"
# What Optuna's dashboard shows of a trial beside its parameters and values.
LEARNING_RATE = "lr"
OUTCOME = "outcome"
# What the dashboard shows of the study: its winner's trial, batch size and learning rate, for each
# merit by which there is one.
WINNER = "winner"
# The type of each attribute. Those of a study must be there, but for the optional ones.
STUDY_ATTRIBUTES: Mapping[str, TypeAdapter[Any]] = {
    STUDY_ID: TypeAdapter(str),
    OUTPUT: TypeAdapter(str),
    DEVICE_KIND: TypeAdapter(str),
    ARGUMENTS: TypeAdapter(list[str]),
    FROZEN_SETTINGS: TypeAdapter(str),
    TESTS: TypeAdapter(dict[str, dict[str, float]]),
    GOAL: TypeAdapter(float),
    BUDGET_TIMES: TypeAdapter(list[list[int | float]]),
    wall.BEGAN: TypeAdapter(float),
    wall.TAKEN: TypeAdapter(float),
    wall.STARTS: TypeAdapter(float),
    wall.SHORTEST_START: TypeAdapter(float),
}
OPTIONAL_ATTRIBUTES = (
    TESTS,
    GOAL,
    BUDGET_TIMES,
    wall.BEGAN,
    wall.TAKEN,
    wall.STARTS,
    wall.SHORTEST_START,
)
TRIAL_ATTRIBUTES: Mapping[str, TypeAdapter[Any]] = {
    SPEC: TypeAdapter(str),
    RECORD: TypeAdapter(str),
    RESUMED_FROM: TypeAdapter(int),
    LOST: TypeAdapter(bool),
}
