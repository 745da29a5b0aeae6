"""Compares what a call of :class:`bstune.Study` states with a study that has begun, before torch.

To complete the arguments takes PyTorch and Lightning, minutes on a busy machine. Those that are
stated are known before: the others are taken to be what the study began with. So this refuses
nothing that the study would take; what the project itself tells is compared when the study runs.
"""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bstune.config import compose_given, read_yaml
from bstune.core.errors import ConfigError, StudyError
from bstune.core.metric_names import mode_of, parse_target
from bstune.core.option_names import in_python
from bstune.core.records import Target
from bstune.options import Node, StudyOptions
from bstune.study.early_checks import check_unchanged

# The workload of a call until its own values are known. The study's places do not depend on them.
ANY_WORKLOAD: Node = {
    "name": "any",
    "reference": {"batch_size": 1, "lr": 1.0},
    "batch_size": {"low": 1, "high": 2},
    "budget": {"steps": 1, "examples": 2, "assumed_epoch": None},
    "target": {"metric": "any", "value": 0.0, "mode": "min"},
    "tunable": {},
    "given_data": "any",
    "given_module": "any",
    "given_trainer": {},
}
# The name of a study without a module. That of a module's study is the class's.
LOOP_NAME = "a loop of yours"
# A budget may be assumed, by what the project tells.
BUDGET = "budget."
# One that is not stated may be settled later, as by whether the jobs of a sweep return seconds.
OBJECTIVE = "search.objective"
WORKLOAD = "workload."


@dataclass(frozen=True)
class StatedArguments:
    """The arguments of a call that a study must not change, as they were given; None: left out.

    Args:
        module: a class or a function.
        target: a text or a :class:`Target`.
        batch_sizes: the smallest and the largest one.
        reference: a batch size and a learning rate.
        options: as on the command line.
        chosen: values of options that the other arguments set, by dotted name.
    """

    module: object
    target: object
    batch_sizes: object
    reference: object
    options: Sequence[str]
    chosen: Mapping[str, Any]


def check_arguments(stated: StatedArguments) -> None:
    """Refuse arguments that a study which has begun must not change; StudyError names them.

    Arguments that cannot be used, and a storage that does not answer, are left to later checks.
    """
    values = _stated_workload(stated)
    # Where neither a name nor a class is at hand, the study is not known yet.
    if values is None:
        return
    options_to_find_study = _composed(_merged(ANY_WORKLOAD, values), stated)
    if options_to_find_study is None:
        return
    began = _began_with(options_to_find_study)
    if began is None:
        return
    options = _composed(_merged(_merged(ANY_WORKLOAD, began), values), stated)
    if options is None:
        return
    # A budget is not compared yet, as it may be assumed by what the project tells. Nor is an
    # objective that is not stated, as it may be settled later, by what the trials tell.
    unknown: tuple[str, ...] = (BUDGET,)
    if OBJECTIVE not in stated.chosen and not _has_option(stated, OBJECTIVE):
        unknown += (OBJECTIVE,)
    try:
        check_unchanged(options, unknown)
    except StudyError as error:
        raise StudyError(in_python(str(error))) from error


def _stated_workload(stated: StatedArguments) -> Node | None:
    """Collect what the arguments state of the workload; None where the study's name is not known.

    Arguments of another kind than they are to have are left out.
    """
    values: Node = {}
    is_named = "study" in stated.chosen or _has_option(stated, "study")
    if stated.module is None:
        values["name"] = LOOP_NAME
    elif inspect.isclass(stated.module):
        values["name"] = stated.module.__name__
    elif not is_named:
        return None
    target = _target_of(stated.target)
    if target is not None:
        values["target"] = target
    sizes = _pair_of(stated.batch_sizes)
    if sizes is not None:
        values["batch_size"] = {"low": sizes[0], "high": sizes[1]}
    reference = _pair_of(stated.reference)
    if reference is not None:
        values["reference"] = {"batch_size": reference[0], "lr": reference[1]}
    return values


def _has_option(stated: StatedArguments, name: str) -> bool:
    """Whether the options of the command line set one by this name."""
    return any(option.startswith(f"{name}=") for option in _texts(stated.options))


def _texts(options: object) -> list[str]:
    """Give the options that are texts; empty where they are no list."""
    if isinstance(options, str) or not isinstance(options, Sequence):
        return []
    return [option for option in options if isinstance(option, str)]


def _target_of(target: object) -> Node | None:
    """Give a target as a workload has it; None where it is left out, or cannot be used."""
    if isinstance(target, str) and any(sign in target for sign in "<>="):
        try:
            target = Target(*parse_target(target, "target"))
        except ConfigError:
            return None
    if isinstance(target, str):
        return {"metric": target, "value": "auto", "mode": mode_of(target)}
    if not isinstance(target, Target):
        return None
    value: str | float = "auto" if target.is_open else target.value
    return {"metric": target.metric, "value": value, "mode": target.mode}


def _as_python(item: object) -> object:
    """Turn a number of numpy into Python's own; leave anything else as it is."""
    return item.item() if isinstance(item, np.generic) else item


def _pair_of(value: object) -> tuple[float, float] | None:
    """Give an argument of two numbers, numpy's as Python's own; None for anything else."""
    if not isinstance(value, tuple | list) or len(value) != 2:
        return None
    first, second = map(_as_python, value)
    if not isinstance(first, int | float) or not isinstance(second, int | float):
        return None
    return first, second


def _composed(workload: Node, stated: StatedArguments) -> StudyOptions | None:
    """Compose the options of a workload with those that are stated; None where they are refused."""
    searched = {"search.tune": list(workload["tunable"])}
    try:
        return compose_given(workload, _texts(stated.options), {**stated.chosen, **searched})
    except ConfigError:
        return None


def _began_with(options: StudyOptions) -> Node | None:
    """Read the workload that the options' study began with; None where it has not begun."""
    # It imports Optuna.
    from bstune.study.storage.opening import begun_study, settings_of

    try:
        study = begun_study(options.study, options.storage)
    except StudyError:
        return None
    if study is None:
        return None
    workload: Node = {}
    for key, value in settings_of(study).items():
        if not key.startswith(WORKLOAD):
            continue
        *sections, name = key.removeprefix(WORKLOAD).split(".")
        section = workload
        for part in sections:
            section = section.setdefault(part, {})
        section[name] = value
    return workload


def _merged(below: Node, above: Node) -> Node:
    """Lay ``below``, and ``above`` over that, over the defaults of ``python.yaml``.

    A section of ``below`` replaces the default one whole. A section of ``above`` is joined with the
    one that lies beneath it, whose values it replaces.
    """
    merged = {**read_yaml("python.yaml"), **below}
    for key, value in above.items():
        old = merged.get(key)
        if isinstance(old, dict) and isinstance(value, dict):
            merged[key] = {**old, **value}
        else:
            merged[key] = value
    return merged
