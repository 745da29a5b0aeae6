"""Options by their dotted keys: looked up, replaced, written as arguments or as flat settings."""

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel

from bstune.core.search_space import MODULE
from bstune.options.study import StudyOptions
from bstune.options.values import Section

AnySection = TypeVar("AnySection", bound=Section)


def option_at(options: BaseModel, key: str) -> object:
    """Look up an option, or a part of a node, by its dotted key; None where there is none."""
    value: object = options
    for part in key.split("."):
        if isinstance(value, BaseModel):
            value = getattr(value, part, None)
        elif isinstance(value, Mapping):
            value = value.get(part)
        elif isinstance(value, list) and part.isdigit() and int(part) < len(value):
            # A key may name an element of a list by its position, such as betas.1.
            value = value[int(part)]
        else:
            return None
    return value


def with_option(options: AnySection, key: str, value: object) -> AnySection:
    """Copy the options with ``value`` in the place of the option at a dotted key.

    The value is not checked: it is bstune's own, or that of a tunable.

    Raises:
        AttributeError: for a key that no option has.
    """
    name, _, rest = key.partition(".")
    if name not in type(options).model_fields:
        raise AttributeError(f"{type(options).__name__} has no option {name}")
    if rest:
        value = with_option(getattr(options, name), rest, value)
    return options.model_copy(update={name: value})


def with_tuned(options: StudyOptions, values: Mapping[str, float]) -> StudyOptions:
    """Copy the options with the values of a trial's tunables, such as a half-life.

    Tunables below ``workload.module`` are left out: the recipe builds the module from those.
    """
    for name, value in values.items():
        key = options.workload.tunable[name].key
        if not key.startswith(MODULE):
            options = with_option(options, key, value)
    return options


def overrides(options: StudyOptions, values: Mapping[str, float]) -> list[str]:
    """Write the arguments of a command line that give tunables these values."""
    return [f"{options.workload.tunable[name].key}={value!r}" for name, value in values.items()]


def flat_settings(options: StudyOptions) -> dict[str, object]:
    """Collect the settings, by dotted key, that must not change while a study goes on.

    The trials' budget, the sampler, and the number of trials and other limits of the search may
    change. So may the folder of the data, whose checksums are pinned.
    """
    sections = ("workload", "scaling", "prior", "protocol", "trainer")
    values = flatten(options.model_dump(mode="json", include=set(sections)))
    values |= flatten({"search": {"batch_size": options.search.batch_size.model_dump()}})
    for name in ("trials", "budget.steps", "budget.examples"):
        values.pop(f"workload.{name}", None)
    # A tunable that this study does not search may change.
    searched = tuple(f"workload.tunable.{name}." for name in options.search.tune)
    for key in list(values):
        if key.startswith("workload.tunable") and not key.startswith(searched):
            del values[key]
    # A study that was begun before this option existed has no such key, and continues.
    if not options.scaling.override_lr:
        del values["scaling.override_lr"]
    if options.search.objective == "loss":
        # This objective seeks the best metric within the budget, which is fixed then. The target's
        # value is not used.
        values |= flatten({"budget": options.budget.model_dump()})
        values.pop("workload.target.value", None)
    return {**values, "search.objective": options.search.objective, "seed": options.seed}


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested mappings into one, whose keys are the nested keys joined by dots.

    ``prefix`` is put before each key.
    """
    flat: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            flat.update(flatten(value, f"{name}."))
        else:
            flat[name] = value
    return flat
