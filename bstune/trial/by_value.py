"""What a worker and its DataLoaders' processes send each other, where ``__main__`` is the user's.

The script's classes and functions come to the worker by value: its own ``__main__`` has none of
them, so that multiprocessing could not write them. They go on by value, as cloudpickle writes them.
"""

import functools
import importlib
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from types import FunctionType
from typing import Any, cast

import cloudpickle

from bstune.system.failures import is_users

# Classes whose written form is kept: batches of an own class are sent at each step.
CLASSES = 64


def users_modules() -> tuple[str, ...]:
    """Names of the user's own modules, in the order in which this process began to import them.

    One that is still being imported is left out: it may be what runs the study.
    """
    names = []
    for name, module in sys.modules.copy().items():
        # Not getattr: modules that load others when they are asked for something may fail.
        attributes = getattr(module, "__dict__", {})
        file, spec = attributes.get("__file__"), attributes.get("__spec__")
        is_whole = name != "__main__" and not getattr(spec, "_initializing", False)
        if is_whole and isinstance(file, str) and is_users(file):
            names.append(name)
    return tuple(names)


def import_in_order(modules: Sequence[str]) -> None:
    """Import a script's modules as it did; pickle would take them in the order in which it reads.

    An error shows where something of that module is used.
    """
    for name in modules:
        with suppress(Exception):
            importlib.import_module(name)


def send_by_value(modules: Sequence[str]) -> None:
    """Let multiprocessing send what ``__main__`` defines, in this process and those it starts.

    Args:
        modules: of :func:`users_modules`, which each process imports before it reads anything.
    """

    def reduce(pickler: ForkingPickler, item: object) -> Any:
        """How pickle writes an item; NotImplemented: as ever."""
        if isinstance(item, BaseProcess):
            make, arguments, state, *_ = cast(tuple[Any, ...], item.__reduce_ex__(2))
            return _make_process, (modules, make, arguments), state
        if isinstance(item, type | FunctionType) and item.__module__ == "__main__":
            if isinstance(item, type):
                return _read_class, (_written_class(item),)
            return cloudpickle.loads, (cloudpickle.dumps(item),)
        return NotImplemented

    ForkingPickler.reducer_override = reduce  # type: ignore[method-assign,assignment]


@functools.lru_cache(CLASSES)
def _written_class(item: type) -> bytes:
    """Write a class once."""
    written: bytes = cloudpickle.dumps(item)
    return written


@functools.lru_cache(CLASSES)
def _read_class(written: bytes) -> Any:
    """Read a class once, so that it stays the same one."""
    return cloudpickle.loads(written)


def _make_process(
    modules: Sequence[str], make: Callable[..., Any], arguments: tuple[Any, ...]
) -> Any:
    """Make a process's object where it starts, before pickle reads what is in it."""
    import_in_order(modules)
    send_by_value(modules)
    return make(*arguments)
