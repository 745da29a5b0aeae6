"""Write the reference of the public names in ``bstune/README.md``: ``python .ci/api_reference.py``.

It has the names of arguments and members; ``help()`` says the rest. A name's purpose is said in
its docstring alone. A test compares it with the README.
"""

import inspect
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import bstune
from bstune.study.result import Result
from bstune.trial.own_loop.loop_trial import LoopTrial

README = Path(bstune.__file__).parent / "README.md"
# What stands between them in the README is made here.
BEGIN = "<!-- written by .ci/api_reference.py -->\n"
END = "<!-- end of what .ci/api_reference.py wrote -->\n"
VERSION = "__version__"
# Values whose members help bstune itself, and of them those that nobody makes by a call.
VALUES = ("Budget", "Target", "TrialResult")
RECORDS = ("TrialResult",)
# What public names give and nobody makes.
GIVEN = (Result, LoopTrial)
# Public members that bstune itself calls.
FOR_BSTUNE = {
    *("from_composed", "join", "run_on"),  # of Study
    *("again", "after", "unmeasured"),  # of TrialResult
    *("from_findings", "recipe", "records"),  # of Result
    *("spec", "finished", "abandon", "may_go_on", "start_gap", "schedule_ends"),  # of LoopTrial
}


def reference() -> str:
    """Write the list of the public names, and that of what they give."""
    lines = list[str]()
    for name in bstune.__all__:
        if name == VERSION:
            continue
        thing = getattr(bstune, name)
        members = [*sections_of(thing).get("Attributes", {}), *members_of(thing)]
        call = name if name in RECORDS else called(name, thing)
        lines.append(item(call, thing) + names_of([] if name in VALUES else members))
    lines += ["", "They give:", ""]
    for thing in GIVEN:
        members = [*fields_of(thing), *members_of(thing)]
        lines.append(item(thing.__name__, thing) + names_of(members))
    return "\n".join(lines) + "\n"


def item(call: str, thing: Any) -> str:
    """Begin the item of a name: how it is called, where it stands, what it is for."""
    file = Path(inspect.getfile(inspect.unwrap(thing))).relative_to(README.parent)
    return f"* **`{call}`** ([{file}]({file})). {first_sentence(docstring_of(thing))}"


def names_of(members: list[str]) -> str:
    """End an item with the names of its members."""
    return f" Has {', '.join(f'`{name}`' for name in members)}." if members else ""


def called(name: str, thing: Any) -> str:
    """Write a call with the names of all parameters; those in brackets may be left out."""
    signature = inspect.signature(thing)
    if thing is bstune.tune and signature == inspect.signature(bstune.Study):
        return f"{name}(the arguments of Study)"
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    needed = list[str]()
    optional = list[str]()
    is_by_name = False
    for parameter in signature.parameters.values():
        parts = needed if is_needed(parameter) else optional
        if parameter.kind is parameter.KEYWORD_ONLY and not is_by_name:
            parts.append("*")
        parts.append(f"{stars.get(parameter.kind, '')}{parameter.name}")
        is_by_name = is_by_name or parameter.kind in (
            parameter.KEYWORD_ONLY,
            parameter.VAR_POSITIONAL,
        )
    in_brackets = [f"[{', '.join(optional)}]"] if optional else []
    return f"{name}({', '.join([*needed, *in_brackets])})"


def is_needed(parameter: inspect.Parameter) -> bool:
    """Whether a call has to name it; of ``*arguments`` there may be none, which the star says."""
    return parameter.default is parameter.empty


def docstring_of(thing: Any) -> str:
    """Give a docstring without its indentation; empty where there is none."""
    return inspect.getdoc(thing) or ""


def as_markdown(text: str) -> str:
    """Write a docstring's words on one line, as Markdown."""
    text = " ".join(text.split()).replace("S*(B)", "S\\*(B)").replace("lr*(B)", "lr\\*(B)")
    return re.sub(r":\w+:`(?:bstune\.)?(\w+|bstune[\w.]+)`", r"`\1`", text).replace("``", "`")


def sections_of(thing: Any) -> Mapping[str, Mapping[str, str]]:
    """Give what a docstring says of each argument and attribute, by ``Args`` and ``Attributes``, then by name."""
    sections = dict[str, Mapping[str, str]]()
    for heading in ("Args", "Attributes"):
        pattern = rf"^{heading}:\n((?:    .*\n?|\n)+)"
        found = re.search(pattern, docstring_of(thing), flags=re.MULTILINE)
        entries = re.split(r"\n(?=    \w)", found[1].rstrip()) if found else []
        meanings = [entry.strip().partition(": ") for entry in entries]
        sections[heading] = {name: first_sentence(meaning) for name, _, meaning in meanings}
    return sections


def first_sentence(text: str) -> str:
    """Give a text up to its first full stop, as Markdown."""
    sentence, *_ = re.split(r"(?<=\.)\s", as_markdown(text), maxsplit=1)
    return f"{sentence[:1].upper()}{sentence[1:].rstrip('.')}."


def members_of(thing: Any) -> list[str]:
    """List the public methods and properties of a class that are bstune's own, in their order."""
    if not isinstance(thing, type):
        return []
    others = set(FOR_BSTUNE)
    for base in thing.__mro__[1:]:
        if not base.__module__.startswith("bstune."):
            others.update(vars(base))
    names = list[str]()
    for name, value in vars(thing).items():
        is_member = inspect.isroutine(value) or hasattr(type(value), "__get__")
        if is_member and not name.startswith("_") and name not in others:
            names.append(name)
    return names


def fields_of(thing: type) -> list[str]:
    """List the values that a class holds, without those for bstune itself."""
    names = inspect.get_annotations(thing)
    return [name for name in names if not name.startswith("_") and name not in FOR_BSTUNE]


if __name__ == "__main__":
    before, _, rest = README.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    README.write_text(f"{before}{BEGIN}\n{reference()}\n{END}{after}", encoding="utf-8")
