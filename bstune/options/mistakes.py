"""A mistake in the options, as the one line that the user reads."""

from collections.abc import Mapping
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel

from bstune.options.refusal import refusal
from bstune.options.study import StudyOptions


def mistake(name: str, error: Mapping[str, Any]) -> str:
    """Write one of pydantic's errors as a line: the option, the allowed values, the value received.

    ``name`` is the dotted name of the option.
    """
    if error["type"] == "missing":
        allowed = _choices_of(StudyOptions, name)
        if allowed:
            return f"{name} is missing: give it one of {', '.join(allowed)}, as {name}={allowed[0]}"
        return f"{name} is missing: give it a value, {name}=..."
    return refusal(name, error)


def _choices_of(section: type[BaseModel], name: str) -> list[str]:
    """List the words that an option may be; none if it may be another value, or is unknown.

    ``name`` is the option's dotted name from ``section`` on.
    """
    first, _, rest = name.partition(".")
    field = section.model_fields.get(first)
    if field is None:
        return []
    annotation: object = field.annotation
    if rest:
        is_section = isinstance(annotation, type) and issubclass(annotation, BaseModel)
        return _choices_of(annotation, rest) if is_section else []  # type: ignore[arg-type]
    if get_origin(annotation) is not Literal:
        return []
    return [str(word) for word in get_args(annotation)]


def options_of_section(options: type[BaseModel], name: str) -> list[str]:
    """List the options of the section that the dotted ``name`` lies in; none if it lies in none.

    ``options``: the model of all options. A name without a dot lies in no section.
    """
    section: object = options
    *sections, _ = name.split(".")
    if not sections:
        return []
    for key in sections:
        is_section = isinstance(section, type) and issubclass(section, BaseModel)
        # A mapping with keys of the user's own has no model.
        if not is_section or key not in section.model_fields:  # type: ignore[attr-defined]
            return []
        section = section.model_fields[key].annotation  # type: ignore[attr-defined]
    if not isinstance(section, type) or not issubclass(section, BaseModel):
        return []
    return list(section.model_fields)
