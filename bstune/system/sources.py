"""What a user's module holds, by its source alone: nothing is imported, which takes seconds."""

import ast
import importlib.util
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from bstune.core.errors import InputError
from bstune.system.inputs import read_text

# Where Python and what is installed stand. Their modules may make names as they are imported.
INSTALLED = tuple(
    {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
)
# A module with one of these words may make names, too.
MAKES_NAMES = ("globals(", "__getattr__", "setattr(", "exec(", "import *")


def written_arguments(path: str) -> tuple[str, ...]:
    """Name the arguments of a class's ``__init__``, or of a function, as its source has them.

    It is empty where they are not found: for a class without an ``__init__`` of its own, a name
    that its module only imports, and a module that is no file of Python's.

    ``path``: of the class or function, as ``my_project.models.Net``.
    """
    module, _, name = path.rpartition(".")
    source = _source_of(module.split("."))
    if source is None:
        return ()
    for statement in _statements(source):
        if isinstance(statement, ast.FunctionDef) and statement.name == name:
            return _names(statement)
        if isinstance(statement, ast.ClassDef) and statement.name == name:
            return _names_of_init(statement)
    return ()


def missing_target(path: str) -> str | None:
    """Say what is missing of a class or function that a config names; None if it may be there.

    A package is missing where Python finds none of that name, and a name where a module of the
    user's own neither defines nor imports it. What cannot be told by the source may be there.

    ``path``: of the class or function, as ``my_project.models.Net``.
    """
    parts = path.split(".")
    if len(parts) < 2 or not all(part.isidentifier() for part in parts):
        return None
    if parts[0] not in sys.modules and importlib.util.find_spec(parts[0]) is None:
        return no_module_text(parts[0], path)
    # The module is the longest part of the path that is a file.
    for count in range(len(parts) - 1, 0, -1):
        source = _source_of(parts[:count])
        if source is not None:
            if _may_hold(source, parts[count]):
                return None
            return no_name_text(".".join(parts[:count]), parts[count], path)
    return None


def no_module_text(module: str, path: str) -> str:
    """Say that there is no module, for the class or function at ``path``."""
    return (
        f"there is no module {module}, for {path}: run bstune in the folder that holds it, "
        "or install it"
    )


def no_name_text(module: str, name: str, path: str) -> str:
    """Say that a module lacks a name, for the class or function at ``path``."""
    return f"{module} has no {name}, for {path}"


def _may_hold(source: Path, name: str) -> bool:
    """Whether a module may have a name: it defines or imports it, or its source does not tell."""
    if str(source).startswith(INSTALLED):
        return True
    # A package's name may be a module in it, also a compiled one.
    if source.name == "__init__.py":
        package = source.parent
        if (package / name).exists() or any(package.glob(f"{name}.*")):
            return True
    with suppress(InputError):
        text = read_text(source, "the module")
        if any(word in text for word in MAKES_NAMES):
            return True
    statements = _statements(source)
    # A file that is empty or cannot be read is reported where it is imported.
    return not statements or name in set(_defined(statements))


def _statements(source: Path) -> list[ast.stmt]:
    """Parse a module's statements; none for a file that cannot be read as Python."""
    with suppress(InputError, SyntaxError, ValueError):
        return ast.parse(read_text(source, "the module")).body
    return []


def _defined(statements: Sequence[ast.stmt]) -> Iterator[str]:
    """Name what statements define or import, also below an ``if``, ``try``, ``with`` or loop."""
    for statement in statements:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield statement.name
            continue
        if isinstance(statement, ast.Import | ast.ImportFrom):
            for alias in statement.names:
                yield alias.asname or alias.name.partition(".")[0]
        for node in ast.walk(statement):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                yield node.id
        for block in ("body", "orelse", "finalbody"):
            yield from _defined(getattr(statement, block, ()))
        for handler in getattr(statement, "handlers", ()):
            yield from _defined(handler.body)


def _source_of(parts: Sequence[str]) -> Path | None:
    """Find a module's file below the folders that Python imports from; None if there is none.

    ``parts``: of the module's name.
    """
    if not all(parts):
        return None
    for folder in sys.path:
        place = Path(folder, *parts)
        for file in (place.with_name(f"{place.name}.py"), place / "__init__.py"):
            if file.is_file():
                return file
    return None


def _names_of_init(definition: ast.ClassDef) -> tuple[str, ...]:
    """Name the arguments of a class's own ``__init__``; empty if it has none."""
    for statement in definition.body:
        if isinstance(statement, ast.FunctionDef) and statement.name == "__init__":
            return _names(statement)
    return ()


def _names(function: ast.FunctionDef) -> tuple[str, ...]:
    """Name the arguments of a function that a caller can name."""
    arguments = function.args
    return tuple(argument.arg for argument in (*arguments.args, *arguments.kwonlyargs))
