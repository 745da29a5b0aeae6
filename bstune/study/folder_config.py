"""The options that a study's folder holds, read as data: nothing that they name is called.

A ``config.yaml`` says by name what is imported and called (``_target_``). Whoever runs the study
has written it; whoever looks at a folder has not. So a report builds two things by a name of the
file, the scaling rule and the class of the sampler, and only where bstune itself has them.
"""

from collections.abc import Mapping
from functools import cache
from pathlib import Path

import yaml
from pydantic import ValidationError

from bstune.config import read_yaml
from bstune.core.errors import StudyError
from bstune.options import OPTION_NAMES, Node, PlainLookup, StudyOptions, kind_of_options, mistake
from bstune.system.inputs import one_line
from bstune.system.secrets import redact_values
from bstune.system.shipped import choices_in

# Arguments of a scaling rule.
RULE_NUMBERS = {"reference_batch_size", "reference_lr", "noise_scale"}


def text_of_options(options: StudyOptions) -> str:
    """Write the options as YAML, without secrets: the content of a folder's ``config.yaml``."""
    values = redact_values(options.model_dump(mode="json"))
    text: str = yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
    return text


def options_of_folder(
    values: Mapping[str, object], file: Path, trust: bool = False
) -> StudyOptions:
    """Check the options that a study's folder holds, and give those that a report needs.

    Args:
        values: the content of ``config.yaml``.
        file: its path, for messages.
        trust: keep a scaling rule or a sampler that is not bstune's, too.

    Raises:
        StudyError: where they are no options of this version, or name code that is not bstune's.
    """
    known = with_new_options(values)
    workload = known.get("workload")
    # Who trains the winner again needs the plain values that a Trainer got. Nodes and lists may
    # name classes of the user's.
    known["trainer"] = _plain_values(known.get("trainer"))
    if isinstance(workload, Mapping):
        trainer = _plain_values(workload.get("trainer"))
        known["workload"] = {**workload, "trainer": trainer}
    if not trust:
        scaling = known.get("scaling")
        rule: object = None
        if isinstance(scaling, Mapping):
            rule = scaling.get("rule")
        _check_rule(_node(rule, "scaling.rule", file), file)
        sampler = _node(known.get("sampler"), "sampler", file)
        # A report asks which sampler it was, and builds none: its settings may name code.
        known["sampler"] = {"_target_": _own_sampler(sampler, file)}
    # The checks look other options up, in these plain values in place of a composed config.
    try:
        return kind_of_options(workload).model_validate(known, context=PlainLookup(known))
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"])
        raise StudyError(_not_ours(file, mistake(name, first))) from error
    except RecursionError as error:
        raise StudyError(_not_ours(file, "its values lie too deep")) from error


def _plain_values(arguments: object) -> dict[str, object]:
    """Select the arguments of a Trainer that are single values; none of what is no mapping."""
    if not isinstance(arguments, Mapping):
        return {}
    plain = dict[str, object]()
    for name, value in arguments.items():
        if value is None or isinstance(value, bool | int | float | str):
            plain[name] = value
    return plain


def with_new_options(values: Mapping[str, object]) -> dict[str, object]:
    """Give a folder's options, with defaults for those that bstune got after it was written."""
    return _with_defaults(_options_among(values), _usual_options())


@cache
def _usual_options() -> dict[str, object]:
    """Read the defaults that ship with bstune, once for all folders.

    Callers must not change them.
    """
    return _options_among(read_yaml("config.yaml"))


def _options_among(values: Mapping[str, object]) -> dict[str, object]:
    """Select the options among a config's keys; others, such as Hydra's own, are left out."""
    return {name: value for name, value in values.items() if name in OPTION_NAMES}


def _with_defaults(
    values: Mapping[str, object], defaults: Mapping[str, object]
) -> dict[str, object]:
    """Add the defaults of options that ``values`` lacks, in sections, too.

    A default that refers to another option is left out: it has no value by itself.
    """
    filled = dict(values)
    for name, default in defaults.items():
        if isinstance(default, Mapping):
            section = values.get(name, {})
            if isinstance(section, Mapping):
                filled[name] = _with_defaults(section, default)
            continue
        refers = isinstance(default, str) and "${" in default
        if name not in values and not refers:
            filled[name] = default
    return filled


def _not_ours(file: Path, reason: str) -> str:
    """Word the refusal of a file whose options are not of this version."""
    return f"{file} is no config of this version of bstune: {one_line(reason.splitlines()[0])}"


def _node(value: object, name: str, file: Path) -> Node:
    """Check that an option which names a thing to build is a mapping; StudyError otherwise."""
    if not isinstance(value, dict):
        raise StudyError(_not_ours(file, f"{name} must be a mapping, but got {value!r:.100}"))
    return value


def _check_rule(rule: Node, file: Path) -> None:
    """Refuse a scaling rule that is not bstune's, or that takes anything but numbers."""
    target = rule.get("_target_")
    if target not in _targets("scaling", "rule"):
        raise StudyError(_names_code(file, f"scaling.rule {one_line(str(target))}"))
    if rule.get("_partial_") is not True:
        raise StudyError(f"{file}: scaling.rule must have _partial_: true")
    unknown = []
    for name, value in rule.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        is_argument = name in RULE_NUMBERS and (is_number or value is None)
        if name not in ("_target_", "_partial_") and not is_argument:
            unknown.append(str(name))
    if unknown:
        raise StudyError(f"{file}: scaling.rule takes no {one_line(', '.join(sorted(unknown)))}")


def _own_sampler(sampler: Node, file: Path) -> str:
    """Give the name of the sampler's class; StudyError where bstune does not offer it.

    A report asks the class how it searched, and never builds it.
    """
    target = str(sampler.get("_target_"))
    if target not in _targets("sampler"):
        raise StudyError(_names_code(file, f"sampler {one_line(target)}"))
    return target


def _targets(group: str, *keys: str) -> set[str]:
    """Collect the ``_target_`` of all choices of a config group: what bstune itself offers.

    ``keys`` lead to the node that names it within a choice.
    """
    names = set[str]()
    for choice in choices_in(group):
        node = read_yaml(f"{group}/{choice}.yaml")
        for key in keys:
            node = node[key]
        names.add(node["_target_"])
    return names


def _names_code(file: Path, what: str) -> str:
    """Word the refusal of a file that names code which is not bstune's."""
    return (
        f"{file} names code that is not bstune's, {what}: a report calls none of it; "
        "add --trust if you trust whoever made the folder"
    )
