"""Write the tables of options in ``conf/README.md``: ``python .ci/option_table.py``.

What an option is, and what it may be, is said in ``bstune/options/`` alone, and its default in
``conf/config.yaml``. A test reads these tables, too.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args, get_origin

import yaml
from pydantic import BaseModel, TypeAdapter
from pydantic.fields import FieldInfo

from bstune.config import read_yaml
from bstune.options import TrainedOptions

README = Path(__file__).parents[1] / "conf" / "README.md"
# What follows it in the README is made here.
MARK = "<!-- written by .ci/option_table.py -->\n"
# The section whose options have no defaults of bstune's, and what stands for a name in it.
WORKLOAD = "workload"
ANY_NAME = "NAME"


@dataclass(frozen=True)
class Option:
    """One line of a table."""

    name: str
    """Dotted, as on the command line."""
    type: Any
    """With its bounds."""
    meaning: str


def all_options(section: type[BaseModel] = TrainedOptions, prefix: str = "") -> Iterator[Option]:
    """List the options of a section and of those below it, by dotted names."""
    for name, field in section.model_fields.items():
        below = section_of(field)
        if below is None:
            meaning = " ".join((field.description or "").split())
            yield Option(f"{prefix}{name}", field.rebuild_annotation(), meaning)
        elif get_origin(field.annotation) is dict:
            yield from all_options(below, f"{prefix}{name}.{ANY_NAME}.")
        else:
            yield from all_options(below, f"{prefix}{name}.")


def section_of(field: FieldInfo) -> type[BaseModel] | None:
    """Find the section that a field holds, itself or by names of the user's; None: it is an option."""
    for kind in (field.annotation, *get_args(field.annotation)):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind
    return None


def allowed(schema: Mapping[str, Any]) -> str:
    """Say what a JSON schema allows, as a phrase."""
    if "anyOf" in schema:
        return " or ".join(allowed(one) for one in schema["anyOf"])
    if "enum" in schema or "const" in schema:
        return ", ".join(f"`{value}`" for value in schema.get("enum", [schema.get("const")]))
    if schema.get("type") == "array":
        return f"list of {allowed(schema['items'])}"
    names = {
        "integer": "integer",
        "boolean": "`true`, `false`",
        "string": "text",
        "null": "`null`",
    }
    ends = {
        "minimum": "",
        "exclusiveMinimum": "over ",
        "maximum": "to ",
        "exclusiveMaximum": "to below ",
    }
    bounds = [f"{word}{number(schema[name])}" for name, word in ends.items() if name in schema]
    kind = schema.get("type", "")
    if kind == "number":
        # Where a range stands, nothing else is a number's.
        return " ".join(bounds or ["number"])
    return " ".join([names.get(kind, "mapping"), *bounds])


def number(value: float) -> str:
    """Write a bound in few characters: 1000, -1e15, 2^60, 4294967295."""
    if isinstance(value, int) and value > 1e9 and value & (value - 1) == 0:
        return f"2^{value.bit_length() - 1}"
    power = f"{value:.0e}".replace("e+", "e").replace("e-0", "e-").replace("e0", "e")
    is_short = float(power) == value and (abs(value) >= 1e5 or 0 < value < 1e-2)
    return power if is_short else f"{value:.10g}"


def default_of(name: str, values: Mapping[str, Any]) -> str:
    """Write the default that an option has in YAML; empty for one that has none there."""
    value: Any = values
    for part in name.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return ""
        value = value[part]
    if isinstance(value, str):
        return f"`{value}`"
    # A scalar ends with a line of three dots.
    text = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=1000).splitlines()[
        0
    ]
    return f"`{text}`"


def tables() -> str:
    """Write a table a section: the study's own options first, those of a workload last."""
    values = read_yaml("config.yaml")
    of_section: dict[str, list[Option]] = {"": [], **{name: [] for name in values}, WORKLOAD: []}
    # Written into a config by its groups' files, not by name.
    of_groups = ("sampler", "scaling.rule")
    for option in all_options():
        section = option.name.partition(".")[0] if "." in option.name else ""
        if option.name not in of_groups:
            of_section[section].append(option)
    parts = []
    for section, options in of_section.items():
        if options:
            rows = [row(option, values) for option in options]
            head = ["| option | default | allowed | what |", "| --- | --- | --- | --- |"]
            parts.append("\n".join([*heading(section), *head, *rows]))
    return "\n\n".join(parts) + "\n"


def heading(section: str) -> list[str]:
    """Give a section's title and the one line of what it is."""
    if not section:
        return ["### Of the study", ""]
    field = TrainedOptions.model_fields[section]
    (first, *_) = str(section_of(field).__doc__).splitlines()
    return [f"### {section}", "", first, ""]


def row(option: Option, values: Mapping[str, Any]) -> str:
    """Write an option's line."""
    schema = TypeAdapter(option.type).json_schema()
    what = option.meaning.replace("|", "\\|")
    cells = (f"`{option.name}`", default_of(option.name, values), allowed(schema), what)
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    before = README.read_text(encoding="utf-8").partition(MARK)[0]
    README.write_text(f"{before}{MARK}\n{tables()}", encoding="utf-8")
