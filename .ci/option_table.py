"""Write the table of options in ``conf/README.md``: ``python .ci/option_table.py``.

What an option is, and what it may be, is said in ``bstune/options.py`` alone, and its default in
``conf/config.yaml``. Ranges are left out: a value out of its range is refused with them. Options
that are seldom set share a row. A test reads the table, too.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from bstune.config import read_yaml
from bstune.options import TrainedOptions

README = Path(__file__).parents[1] / "conf" / "README.md"
# What follows it in the README is made here.
MARK = "<!-- written by .ci/option_table.py -->\n"
# The section whose options have no defaults of bstune's, and what stands for a name in it.
WORKLOAD = "workload"
ANY_NAME = "NAME"
# Options that are seldom set: those below each of these share a row,
SHARED_ROWS = (
    "prior",
    "trial",
    "mlflow",
    "hardware.memory",
    "hardware.step_time",
    "hardware.ceilings",
    "hardware.scale_out",
    WORKLOAD,
)
# and these share a row of their section.
SELDOM = (
    "search.candidates",
    "search.lease_seconds",
    "search.stratified",
    "scaling.lr_octaves_sigma",
    "scaling.lr_octaves",
    "protocol.evaluation_ratio",
    "protocol.evaluation_share",
    "protocol.evaluation_cost",
    "protocol.close_to_target",
    "protocol.warmup_steps",
    "protocol.divergence",
)


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


def choices_of(annotation: Any) -> list[str]:
    """List the words that an option may be; empty where it is a number or a text."""
    if get_origin(annotation) is Literal:
        return [str(one) for one in get_args(annotation)]
    words = list[str]()
    for part in get_args(annotation):
        words += choices_of(part)
    return words


def default_of(name: str, values: Mapping[str, Any]) -> str:
    """Write the default that an option has in YAML; empty for one that has none there."""
    value: Any = values
    for part in name.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return ""
        value = value[part]
    if isinstance(value, str):
        return value
    lines = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=1000).splitlines()
    # A scalar ends with a line of three dots.
    return lines[0]


def tables() -> str:
    """Write the table: the study's own options first, then section by section."""
    values = read_yaml("config.yaml")
    of_section: dict[str, list[Option]] = {"": [], **{name: [] for name in values}, WORKLOAD: []}
    # Written into a config by its groups' files, not by name.
    of_groups = ("sampler", "scaling.rule")
    for option in all_options():
        section = option.name.partition(".")[0] if "." in option.name else ""
        if option.name not in of_groups:
            of_section[section].append(option)
    lines = ["| option | default | meaning |", "| --- | --- | --- |"]
    for section, options in of_section.items():
        lines += rows_of(section, options, values)
    return "\n".join(lines) + "\n"


def rows_of(section: str, options: list[Option], values: Mapping[str, Any]) -> list[str]:
    """Write a section's rows, those that options share last."""
    of_shared_row: dict[str, list[Option]] = {}
    rows = list[list[str]]()
    for option in options:
        shared = [name for name in SHARED_ROWS if option.name.startswith(f"{name}.")]
        if option.name in SELDOM:
            shared = [section]
        if shared:
            of_shared_row.setdefault(shared[0], []).append(option)
        else:
            rows.append(own_cells(option, values))
    for name, options_of_row in of_shared_row.items():
        rows.append(shared_cells(name, options_of_row, values))
    return [f"| {' | '.join(cells)} |" for cells in rows]


def first_line(section: type[BaseModel] | None) -> str:
    """Give the line of what a section is."""
    (first, *_) = str(section.__doc__).splitlines()
    return first


def own_cells(option: Option, values: Mapping[str, Any]) -> list[str]:
    """Give an option's cells: its name, its default, what it is, and its choices unless named there."""
    meaning = option.meaning.replace("|", "\\|")
    words = [word for word in choices_of(option.type) if word != "auto"]
    if not all(word in meaning for word in words):
        meaning += f" One of {', '.join(f'`{word}`' for word in words)}."
    default = default_of(option.name, values)
    return [f"`{option.name}`", f"`{default}`" if default else "", meaning]


def shared_cells(name: str, options: list[Option], values: Mapping[str, Any]) -> list[str]:
    """Give the cells of options that share a row: their names, with defaults where they have one."""
    section: type[BaseModel] | None = TrainedOptions
    for part in name.split("."):
        section = section_of(section.model_fields[part])
    settings = list[str]()
    for option in options:
        default = default_of(option.name, values)
        below = option.name.removeprefix(f"{name}.")
        settings.append(f"`{below}={default}`" if default else f"`{below}`")
    meaning = first_line(section) if name in SHARED_ROWS else "Seldom set."
    return [f"`{name}`", ", ".join(settings), meaning]


if __name__ == "__main__":
    before = README.read_text(encoding="utf-8").partition(MARK)[0]
    README.write_text(f"{before}{MARK}\n{tables()}", encoding="utf-8")
