"""Write the table of options in ``conf/README.md``: ``python .ci/option_table.py``; a test reads it, too."""

import re
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel, TypeAdapter

from bstune.options import TrainedOptions

CONF = Path(__file__).parents[1] / "conf"
README = CONF / "README.md"
GROUPS = {
    "batch_schedule": "doubling"
}  # groups without a choice by default, whose options stand in one's file


def option_types(section: type[BaseModel] = TrainedOptions, prefix: str = "") -> dict[str, Any]:
    """Return the type of every option, by its dotted name."""
    types = {}
    for name, field in section.model_fields.items():
        kind = field.annotation
        if get_origin(kind) in (Union, UnionType):  # a section that may be left out
            kind = next(
                (
                    inner
                    for one in get_args(kind)
                    if is_section(inner := (get_args(one) or [one])[0])
                ),
                kind,
            )
        if is_section(kind):
            types |= option_types(kind, f"{prefix}{name}.")
        else:
            types[f"{prefix}{name}"] = field.rebuild_annotation()
    return types


def is_section(kind: Any) -> bool:
    """Return whether a type is a group of options."""
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def allowed(schema: dict[str, Any]) -> str:
    """Return what a JSON schema allows, as a phrase."""
    if "anyOf" in schema:
        return " or ".join(allowed(one) for one in schema["anyOf"])
    if "enum" in schema or "const" in schema:
        return ", ".join(f"`{value}`" for value in schema.get("enum", [schema.get("const")]))
    if schema.get("type") == "array":
        return f"list of {allowed(schema['items'])}"
    names = {
        "integer": "integer",
        "number": "number",
        "boolean": "`true`, `false`",
        "string": "text",
        "null": "`null`",
    }
    ends = {
        "minimum": "from",
        "exclusiveMinimum": "over",
        "maximum": "to",
        "exclusiveMaximum": "below",
    }
    bounds = [f"{word} {number(schema[name])}" for name, word in ends.items() if name in schema]
    return " ".join([names.get(schema.get("type", ""), "mapping"), *bounds])


def number(value: float) -> str:
    """Return a bound in few characters: 1000, 1e6, 4294967295."""
    power = f"{value:.0e}".replace("e+", "e").replace("e-0", "e-").replace("e0", "e")
    return (
        power if float(power) == value and (value >= 1e5 or 0 < value < 1e-2) else f"{value:.10g}"
    )


def comments() -> dict[str, tuple[str, str]]:
    """Return the default of each option in conf/config.yaml or GROUPS, and the comment at the end of its line."""
    found = comments_of(CONF / "config.yaml")
    for group, choice in GROUPS.items():
        own = comments_of(CONF / group / f"{choice}.yaml")
        found |= {
            f"{group}.{name}": value
            for name, value in own.items()
            if not name.startswith("tunable")
        }
    return found


def comments_of(file: Path) -> dict[str, tuple[str, str]]:
    """Return the values of a YAML file by dotted name, each with the comment at the end of its line."""
    stack: list[str] = []
    found = {}
    for line in file.read_text().splitlines():
        entry = re.match(r"( *)(\w+):([^#]*)(?:# (.*))?$", line)
        if entry:
            stack[len(entry[1]) // 2 :] = [entry[2]]
            found[".".join(stack)] = (entry[3].strip(), entry[4] or "")
    return found


def table() -> str:
    """Return the table of options that conf/README.md should hold."""
    lines = ["| option | default | allowed | what |", "| --- | --- | --- | --- |"]
    types = option_types()
    for name, (default, what) in comments().items():
        if name in types:
            schema = TypeAdapter(types[name]).json_schema()
            cells = (f"`{name}`", f"`{default}`" if default else "", allowed(schema), what)
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    text = README.read_text()
    README.write_text(
        re.sub(r"\| option \| default .*?\n(?!\|)", lambda _: table() + "\n", text, flags=re.S)
    )
