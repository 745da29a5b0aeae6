"""What a training step asks of its surroundings that differs from step to step: the Trainer, its loggers, its number.

Code that was compiled or captured with the answer would be wrong in the next step, or be made anew in each.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch import LightningModule

# What may be done with a number: a step that does any of it depends on the number.
COMPUTING = (
    *(
        "eq",
        "ne",
        "lt",
        "le",
        "gt",
        "ge",
        "bool",
        "int",
        "float",
        "index",
        "str",
        "repr",
        "format",
        "neg",
        "divmod",
    ),
    *(
        "add",
        "radd",
        "sub",
        "rsub",
        "mul",
        "rmul",
        "truediv",
        "rtruediv",
        "floordiv",
        "rfloordiv",
        "mod",
        "rmod",
    ),
)
LOGS = ("log", "log_dict")


class Number(int):
    """The number of a batch, which notes in ``asked`` that something is computed with it."""

    asked: list[str]

    def __new__(cls, number: int, asked: list[str]) -> "Number":
        """Return a number that is equal to ``number``."""
        made = super().__new__(cls, number)
        made.asked = asked
        return made


def _noting(name: str) -> Callable[..., Any]:
    of_int = getattr(int, name)

    def call(number: Number, *arguments: Any) -> Any:
        number.asked.append("batch_idx")
        return of_int(number, *arguments)

    return call


for _name in COMPUTING:
    setattr(Number, f"__{_name}__", _noting(f"__{_name}__"))


class _Watched:
    """Stands for a Trainer, and notes what of it is asked for."""

    def __init__(self, thing: Any, asked: list[str]) -> None:
        self._thing, self._asked = thing, asked

    def __getattr__(self, name: str) -> Any:
        self._asked.append(f"trainer.{name}")
        return getattr(self._thing, name)


@contextmanager
def watching(module: LightningModule, asked: list[str]) -> Iterator[None]:
    """Note in ``asked`` what the module, and those inside it, ask of the Trainer, and that they log."""
    parts: list[Any] = [
        part for part in module.modules() if getattr(part, "_trainer", None) is not None
    ]
    before = [
        {name: vars(part)[name] for name in ("_trainer", *LOGS) if name in vars(part)}
        for part in parts
    ]
    for part in parts:
        for name in LOGS:
            setattr(part, name, _noting_logs(getattr(part, name), asked))
        part._trainer = _Watched(part._trainer, asked)
    try:
        yield
    finally:
        for part, attributes in zip(parts, before, strict=True):
            for name in LOGS:
                delattr(part, name)
            vars(part).update(attributes)


def _noting_logs(log: Callable[..., None], asked: list[str]) -> Callable[..., None]:
    def note(*arguments: Any, **options: Any) -> None:
        asked.append("self.log")
        log(*arguments, **options)

    return note
