"""What a training step asks of its surroundings that differs from step to step.

These are the Trainer, its loggers, its number.

Code that was compiled or captured with the answer would be wrong in the next step, or be made anew
in each.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from bstune.trial.lightning.installed import LightningModule
from bstune.trial.lightning.internals import put_trainer_within, trainer_within

# What may be done with a number, by the names of ``int``: a step that does any of it depends on the
# number.
OPERATIONS = (
    "__eq__",
    "__ne__",
    "__lt__",
    "__le__",
    "__gt__",
    "__ge__",
    "__hash__",
    "__bool__",
    "__int__",
    "__float__",
    "__index__",
    "__str__",
    "__repr__",
    "__format__",
    "__round__",
    "__trunc__",
    "__floor__",
    "__ceil__",
    "__abs__",
    "__neg__",
    "__pos__",
    "__invert__",
    "__add__",
    "__radd__",
    "__sub__",
    "__rsub__",
    "__mul__",
    "__rmul__",
    "__truediv__",
    "__rtruediv__",
    "__floordiv__",
    "__rfloordiv__",
    "__mod__",
    "__rmod__",
    "__divmod__",
    "__rdivmod__",
    "__pow__",
    "__rpow__",
    "__lshift__",
    "__rlshift__",
    "__rshift__",
    "__rrshift__",
    "__and__",
    "__rand__",
    "__or__",
    "__ror__",
    "__xor__",
    "__rxor__",
)
LOGS = ("log", "log_dict")


class WatchedNumber(int):
    """The number of a batch, which notes in ``asked`` that something is computed with it.

    It is a subclass of ``int`` with other operators. What would be plainer does not tell the same:

    * The results of two numbers, compared, tell only of what differs between these two: ``batch_idx
      % 50 == 0``, a log line or a weight that is seldom, is the same for both. (A replay is
      compared with its step at another number nevertheless: that sees what C code reads of an int
      without calling an operator, as in ``0.5 * batch_idx``.)
    * The code of ``training_step`` tells that it mentions the number, and most modules only hand it
      on: ``self.shared_step(batch, batch_idx)``.
    * Another object in the number's place, which is no int, breaks a step that checks its type or
      counts with it; the step that is watched is one of the training, and cannot be taken back.
    """

    asked: list[str]

    def __new__(cls, number: int, asked: list[str]) -> "WatchedNumber":
        """Make a number that is equal to ``number``."""
        watched = super().__new__(cls, number)
        watched.asked = asked
        return watched


def _noting(name: str) -> Callable[..., object]:
    """Make an operation of ``int`` that notes that it was called."""
    of_int = getattr(int, name)

    def call(number: WatchedNumber, *arguments: object) -> object:
        number.asked.append("batch_idx")
        return of_int(number, *arguments)

    return call


for _name in OPERATIONS:
    setattr(WatchedNumber, _name, _noting(_name))


class _WatchedTrainer:
    """Stands for a Trainer, and notes what of it is asked for."""

    def __init__(self, trainer: Any, asked: list[str]) -> None:
        self._watched = trainer
        self._asked = asked

    def __getattr__(self, name: str) -> Any:
        self._asked.append(f"trainer.{name}")
        return getattr(self._watched, name)


@contextmanager
def watching_uses(module: LightningModule, asked: list[str]) -> Iterator[None]:
    """Note in ``asked`` what the module asks of the Trainer, and that it logs.

    Those inside it do so, too.
    """
    parts: list[Any] = [part for part in module.modules() if trainer_within(part) is not None]
    trainers = [trainer_within(part) for part in parts]
    # Functions of the objects themselves, such as those of a call of this function that is under
    # way.
    own_logs = [_own_logs(part) for part in parts]
    for part, trainer in zip(parts, trainers, strict=True):
        for name in LOGS:
            setattr(part, name, _noting_logs(getattr(part, name), asked))
        put_trainer_within(part, _WatchedTrainer(trainer, asked))
    try:
        yield
    finally:
        for part, trainer, logs in zip(parts, trainers, own_logs, strict=True):
            for name in LOGS:
                delattr(part, name)
            vars(part).update(logs)
            put_trainer_within(part, trainer)


def _own_logs(part: Any) -> dict[str, Callable[..., None]]:
    """Give the functions for logging that stand in a module itself, and not in its class."""
    return {name: vars(part)[name] for name in LOGS if name in vars(part)}


def _noting_logs(log: Callable[..., None], asked: list[str]) -> Callable[..., None]:
    def note(*arguments: object, **options: object) -> None:
        asked.append("self.log")
        log(*arguments, **options)

    return note
