"""The config that a study's folder holds, as data: what a report needs of it, and nothing that it names is called.

A ``config.yaml`` says by name what is imported and called (``_target_``) and what is read of the environment
(``${oc.env:NAME}``). Whoever runs the study has written it; whoever looks at a folder has not. So a report builds two
things by a name of the file, the scaling rule and the class of the sampler, and only where bstune itself has them.
References within the file are followed, as ``${scaling.lr}``; all others stay the text that they are.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from bstune.config import check as check_options
from bstune.config import choices_in, read_yaml
from bstune.core.errors import ConfigError, StudyError
from bstune.options import OPTIONS
from bstune.system.inputs import one_line

# A whole value that refers to another one, or to it or else a plain word, as conf/config.yaml does. A reference within
# a longer text is none: texts of texts grow without end.
_REFERENCE = re.compile(r"\$\{(?:[A-Za-z_][\w.]*|oc\.select:[A-Za-z_][\w.]*(?:,[\w.-]*)?)\}")
RULE_ARGUMENTS = {
    "_target_",
    "_partial_",
    "reference_batch_size",
    "reference_lr",
    "noise_scale",
}


def config_of_folder(values: Mapping[str, Any], file: Path, trust: bool = False) -> DictConfig:
    """Check the config of a study's folder and give it as far as a report needs it.

    Args:
        values: the content of ``config.yaml``.
        file: its path, for messages.
        trust: call what it names, too: for a study with a rule or a sampler of its owner's.

    Raises:
        StudyError: where it is no config of this version, or names code that is not bstune's.
    """
    known = {name: value for name, value in values.items() if name in OPTIONS}
    try:
        config = OmegaConf.create(known if trust else _inert(known))
        # What a Trainer takes may be classes of the user's, which nobody needs here.
        config.trainer = {}
        config.workload.pop("trainer", None)
        if not trust:
            _check_rule(config.scaling.rule, file)
            config.sampler = {"_target_": _own_sampler(config.sampler, file)}
        return check_options(config)
    except (
        ConfigError,
        OmegaConfBaseException,
        AttributeError,
        KeyError,
        TypeError,
        ValueError,
        RecursionError,
    ) as error:
        reason = one_line((str(error).splitlines() or [type(error).__name__])[0])
        raise StudyError(f"{file} is no config of this version of bstune: {reason}") from error


def _inert(value: Any) -> Any:
    """Give a value with all references escaped that are more than the name of another option."""
    if isinstance(value, dict):
        return {key: _inert(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_inert(item) for item in value]
    if isinstance(value, str) and "${" in value and not _REFERENCE.fullmatch(value):
        return value.replace("${", "\\${")
    return value


def _check_rule(rule: Any, file: Path) -> None:
    """Refuse a scaling rule that is not bstune's, or that takes anything but numbers."""
    target = rule.get("_target_")
    if target not in _targets("scaling", "rule"):
        raise StudyError(_names_code(file, f"scaling.rule {one_line(str(target))}"))
    arguments = OmegaConf.to_container(rule)
    assert isinstance(arguments, dict)  # noqa: S101 (it has a target)
    nested = [name for name, value in arguments.items() if isinstance(value, dict | list)]
    unknown = sorted({*nested, *(arguments.keys() - RULE_ARGUMENTS)}, key=str)
    if unknown:
        raise StudyError(f"{file}: scaling.rule takes no {one_line(', '.join(map(str, unknown)))}")
    if arguments.get("_partial_") is not True:
        raise StudyError(f"{file}: scaling.rule must have _partial_: true")


def _own_sampler(sampler: Any, file: Path) -> str:
    """Give the name of the sampler's class, of which a report asks how it searched; it is never built."""
    target = str(sampler.get("_target_"))
    if target not in _targets("sampler"):
        raise StudyError(_names_code(file, f"sampler {one_line(target)}"))
    return target


def _targets(group: str, *keys: str) -> set[str]:
    """Collect what the choices of a config group name: what bstune itself offers."""
    found = set()
    for choice in choices_in(group):
        node = read_yaml(f"{group}/{choice}.yaml")
        for key in keys:
            node = node[key]
        found.add(node["_target_"])
    return found


def _names_code(file: Path, what: str) -> str:
    return (
        f"{file} names code that is not bstune's, {what}: a report calls none of it; "
        "add --trust if you trust whoever made the folder"
    )
