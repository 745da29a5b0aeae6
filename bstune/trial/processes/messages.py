"""The messages between this process and one that trains, and the function that trains.

A process gets trials and calls. It answers a trial with :class:`Finished`, and a call with lines
(:class:`SaidLine`) and a :class:`CallAnswer`.
"""

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bstune.core.errors import BstuneError
from bstune.core.records import TrialResult, TrialSpec
from bstune.system.failures import described, note_users_code, steps_before
from bstune.system.files import Output, full_disk

# Trains a trial, which may go on from the record of a stopped one, and gives its record.
Train = Callable[[TrialSpec, Output, TrialResult | None], TrialResult]
# Errors of reading what a process sent before it died.
PICKLE_ERRORS = (
    pickle.PickleError,
    TypeError,
    ValueError,
    AttributeError,
    LookupError,
    RuntimeError,
    ImportError,
)


@dataclass(frozen=True)
class Finished:
    """A trial that is over: its record, or the error that ends the study."""

    spec: TrialSpec
    record: TrialResult | None = None
    error: BstuneError | None = None
    # The lines of the user's code that a failed trial's error came through, as text.
    frames: str = ""
    # The error that a trial in this process failed with; None for any other trial.
    cause: Exception | None = None
    # Whether the user's training loop left the trial before the step at which it was to be compared
    # with others.
    is_cut: bool = False

    def result(self) -> TrialResult:
        """Give the record, or raise the error that ends the study."""
        if self.record is not None:
            return self.record
        if self.error is not None:
            raise self.error
        raise RuntimeError(f"trial {self.spec.number} is over with neither record nor error")


def failed(spec: TrialSpec, error: BaseException, seconds: float) -> Finished:
    """Describe a trial that an error of the user's code has ended, after ``seconds`` of wall time.

    It has failed, and has the frames of the user's own files. A full disk ends the study instead,
    as every trial would fail.
    """
    full = full_disk(error)
    if full is not None:
        return Finished(spec, error=full)
    message, frames = described(error)
    steps = steps_before(error)
    record = TrialResult.unmeasured(
        spec,
        "failed",
        steps=steps,
        examples=steps * spec.batch_size,
        message=message,
        wall_seconds=seconds,
    )
    return Finished(spec, record, frames=frames)


@dataclass(frozen=True)
class Call:
    """A request to a process: to call a method of the object with which it trains."""

    method: str
    arguments: tuple[Any, ...]


@dataclass(frozen=True)
class SaidLine:
    """A line for the user, which a process sends while it answers a call."""

    text: str


@dataclass(frozen=True)
class CallAnswer:
    """The answer of a process to a call: a value, or an error.

    Args:
        value: that the method returned.
        error: for the user, in lines; None: the method returned.
        cause: the error of the user's own code behind ``error``, pickled; None: there is none, or
            it cannot be pickled.
    """

    value: Any = None
    error: BstuneError | None = None
    cause: bytes | None = None

    def result(self) -> Any:
        """Return the value, or raise the error, with the user's own error as its cause."""
        if self.error is None:
            return self.value
        if self.cause is None:
            raise self.error
        try:
            cause = pickle.loads(self.cause)  # noqa: S301 (of a process that this one started)
        # The classes of the user's error may be missing in this process.
        except PICKLE_ERRORS:
            raise self.error from None
        # Pickling has dropped the traceback, by which an error of the user's code is known.
        note_users_code(cause)
        raise self.error from cause
