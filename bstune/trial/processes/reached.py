"""How far a process is with its trial, told by numbers in memory that it shares.

The trial writes them as it goes on, which costs well under a microsecond a step. Another process
reads them when it has a line to print::

    numbers = shared_numbers()
    ...  # in the process that trains
    tell_in(numbers)
    ...  # in the other one
    reached_by(numbers).steps
"""

import math
from collections.abc import MutableSequence
from typing import Any, NamedTuple

# A step and a value of an evaluation; None where the value is not finite.
Evaluation = tuple[int, float | None]
# Places of the numbers: steps taken, the step of the last evaluation, its value. A step below 0 is
# not known.
_STEPS, _EVALUATED, _VALUE = range(3)
_UNKNOWN = (-1.0, -1.0, 0.0)


class Reached(NamedTuple):
    """How far a trial is, as far as it is known where it is asked for."""

    steps: int | None = None
    """Optimizer steps that were taken."""
    evaluation: Evaluation | None = None
    """The last evaluation."""


class _Teller:
    """Writes the numbers of this process's trial, at first into a list of its own."""

    def __init__(self) -> None:
        self.numbers: MutableSequence[float] = list(_UNKNOWN)


_teller = _Teller()


def shared_numbers() -> Any:
    """Make numbers that a process of the fork server can share, with nothing known in them."""
    # It takes a moment to import, and a process that trains need not make any.
    from multiprocessing.sharedctypes import RawArray

    return RawArray("d", _UNKNOWN)


def tell_in(numbers: MutableSequence[float]) -> None:
    """Let trials of this process write these numbers from now on."""
    _teller.numbers = numbers


def told_here() -> Reached:
    """Give how far the trial is that this process trains itself."""
    return reached_by(_teller.numbers)


def forget(numbers: MutableSequence[float] | None = None) -> None:
    """Note that nothing is known of the trial that begins; None: in this process."""
    told = _teller.numbers if numbers is None else numbers
    told[:] = list(_UNKNOWN)


def tell_steps(steps: int) -> None:
    """Note the steps that this process's trial has taken."""
    _teller.numbers[_STEPS] = steps


def tell_evaluation(step: int, value: float | None) -> None:
    """Note the last evaluation of this process's trial; None: its value was not finite."""
    numbers = _teller.numbers
    numbers[_VALUE] = float("nan") if value is None else value
    numbers[_EVALUATED] = step


def reached_by(numbers: MutableSequence[float]) -> Reached:
    """Read the numbers that a trial writes."""
    steps, evaluated, value = numbers
    evaluation: Evaluation | None = None
    if evaluated >= 0:
        evaluation = int(evaluated), None if math.isnan(value) else value
    return Reached(int(steps) if steps >= 0 else None, evaluation)
