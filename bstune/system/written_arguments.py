"""The arguments of a class or function by its source alone: nothing is imported, which takes time."""

import ast
import sys
from contextlib import suppress
from pathlib import Path

from bstune.core.errors import InputError
from bstune.system.inputs import read_text


def written_arguments(path: str) -> tuple[str, ...]:
    """Name the arguments of a class's ``__init__``, or of a function, as its source has them.

    It is empty where they are not found: for a class without an ``__init__`` of its own, a name
    that its module only imports, and a module that is no file of Python's.

    ``path``: of the class or function, as ``my_project.models.Net``.
    """
    module, _, name = path.rpartition(".")
    source = _source_of(module)
    if source is None:
        return ()
    # A file that cannot be read is reported where it is imported.
    with suppress(InputError, SyntaxError, ValueError):
        for statement in ast.parse(read_text(source, "the module")).body:
            if isinstance(statement, ast.FunctionDef) and statement.name == name:
                return _names(statement)
            if isinstance(statement, ast.ClassDef) and statement.name == name:
                return _names_of_init(statement)
    return ()


def _source_of(module: str) -> Path | None:
    """Find the file of a module below the folders that Python imports from; None if there is none."""
    if not module:
        return None
    parts = module.split(".")
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
