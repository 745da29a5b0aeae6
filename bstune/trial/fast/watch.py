"""Watches whether a training step uses something that differs from step to step.

That is the Trainer, its loggers, or the number of the batch. Code that was compiled or captured
with their values would be wrong in the next step, or be made anew in each.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from bstune.trial.lightning.installed import LightningModule
from bstune.trial.lightning.internals import put_trainer_within, trainer_within

# The methods of ``int`` that compute with a number: a step that calls any of them depends on the
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
    """The number of a batch, which notes in ``uses`` that something is computed with it.

    It is a subclass of ``int`` with other operators. Plainer ways tell less:

    * A comparison of a step's results at two numbers shows only a difference between these two.
      ``batch_idx % 50 == 0``, say for a log line, is mostly the same for both. (A replay is
      compared with its step at another number nevertheless. That shows where C code reads an int
      without an operator, as in ``0.5 * batch_idx``.)
    * The code of ``training_step`` tells that it mentions the number, but most modules only hand it
      on: ``self.shared_step(batch, batch_idx)``.
    * An object that is no int breaks a step that checks its type or counts with it. The watched
      step is one of the training, and cannot be taken back.
    """

    uses: list[str]

    def __new__(cls, number: int, uses: list[str]) -> "WatchedNumber":
        """Make a number that is equal to ``number``."""
        watched = super().__new__(cls, number)
        watched.uses = uses
        return watched


def _noting(name: str) -> Callable[..., object]:
    """Make ``int``'s method ``name`` for WatchedNumber, which notes that the number was used."""
    method_of_int = getattr(int, name)

    def call(number: WatchedNumber, *arguments: object) -> object:
        number.uses.append("batch_idx")
        return method_of_int(number, *arguments)

    return call


for _name in OPERATIONS:
    setattr(WatchedNumber, _name, _noting(_name))


class _WatchedTrainer:
    """Stands for a Trainer, and notes in ``uses`` which of its attributes are read."""

    def __init__(self, trainer: Any, uses: list[str]) -> None:
        self._watched = trainer
        self._uses = uses

    def __getattr__(self, name: str) -> Any:
        self._uses.append(f"trainer.{name}")
        return getattr(self._watched, name)


@contextmanager
def watching_uses(module: LightningModule, uses: list[str]) -> Iterator[None]:
    """Within the context, note in ``uses`` which attributes of the Trainer a module reads.

    A call of ``self.log`` is noted too. Modules inside the module are watched as well.
    """
    parts: list[Any] = [part for part in module.modules() if trainer_within(part) is not None]
    trainers = [trainer_within(part) for part in parts]
    # Some objects hold logging functions of their own, such as those of a surrounding context.
    own_logs = [_own_logs(part) for part in parts]
    for part, trainer in zip(parts, trainers, strict=True):
        for name in LOGS:
            setattr(part, name, _noting_logs(getattr(part, name), uses))
        put_trainer_within(part, _WatchedTrainer(trainer, uses))
    try:
        yield
    finally:
        for part, trainer, logs in zip(parts, trainers, own_logs, strict=True):
            for name in LOGS:
                delattr(part, name)
            vars(part).update(logs)
            put_trainer_within(part, trainer)


def _own_logs(part: Any) -> dict[str, Callable[..., None]]:
    """Give the logging functions, by name, that a module object holds itself, not its class."""
    return {name: vars(part)[name] for name in LOGS if name in vars(part)}


def _noting_logs(log: Callable[..., None], uses: list[str]) -> Callable[..., None]:
    """Make a logging function that also notes its calls in ``uses``."""

    def note(*arguments: object, **options: object) -> None:
        uses.append("self.log")
        log(*arguments, **options)

    return note
