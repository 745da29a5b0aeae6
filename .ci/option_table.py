"""Write the table of options in ``conf/README.md``: ``python .ci/option_table.py``.

What an option is, and what it may be, is said in ``bstune/options/`` alone, and its default in
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
# A workload's own options, which its YAML states, are not in the table; and what stands for a name.
WORKLOAD = "workload"
ANY_NAME = "NAME"
# Sections whose options share a row.
SHARED_ROWS = ("prior", "trial", "mlflow")
# Options, or groups of them, that are seldom set: they share a row of their section.
SELDOM = (
    "hardware.memory",
    "hardware.step_time",
    "hardware.ceilings",
    "hardware.scale_out",
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
    of_section: dict[str, list[Option]] = {"": [], **{name: [] for name in values}}
    # Written into a config by its groups' files, not by name.
    of_groups = ("sampler", "scaling.rule")
    for option in all_options():
        section = option.name.partition(".")[0] if "." in option.name else ""
        if section != WORKLOAD and option.name not in of_groups:
            of_section[section].append(option)
    lines = ["| option | default | meaning |", "| --- | --- | --- |"]
    for section, options in of_section.items():
        lines += [f"| {' | '.join(cells)} |" for cells in rows_of(section, options, values)]
    return "\n".join(lines) + "\n"


def rows_of(section: str, options: list[Option], values: Mapping[str, Any]) -> list[list[str]]:
    """Give the cells of a section's rows, those that are seldom set in the last one."""
    if section in SHARED_ROWS:
        settings = [setting(option.name, values) for option in options]
        meaning = first_line(section_of(TrainedOptions.model_fields[section]))
        return [[f"`{section}`", ", ".join(settings), meaning]]
    rows = [own_cells(option, values) for option in options if seldom_name(option.name) is None]
    seldom = dict.fromkeys(seldom_name(option.name) for option in options)
    settings = [setting(name, values) for name in seldom if name is not None]
    if settings:
        rows.append([f"`{section}`", ", ".join(settings), "Seldom set."])
    return rows


def seldom_name(name: str) -> str | None:
    """Give the entry of SELDOM that an option is or belongs to; None: it has a row of its own."""
    for seldom in SELDOM:
        if name == seldom or name.startswith(f"{seldom}."):
            return seldom
    return None


def setting(name: str, values: Mapping[str, Any]) -> str:
    """Write an option without its section, with its default; a group as its name and a star."""
    _, _, below = name.partition(".")
    default = default_of(name, values)
    return f"`{below}.*`" if default.startswith("{") else f"`{below}={default}`"


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


if __name__ == "__main__":
    before = README.read_text(encoding="utf-8").partition(MARK)[0]
    README.write_text(f"{before}{MARK}\n{tables()}", encoding="utf-8")
