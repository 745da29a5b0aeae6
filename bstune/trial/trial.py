"""One trial that is reported to: it judges each evaluation, and becomes a record.

Every way of training (Lightning, a recorded table, a loop of one's own) is a function that is given
a trial and reports to it.
"""

import errno
import math
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bstune.core.clock import TrainingClock, seconds_per_step
from bstune.core.errors import BstuneError, InputError
from bstune.core.records import Record, Spec, Status, Target
from bstune.system.failures import one_line
from bstune.system.secrets import hide_in_error

# What torch, CUDA and Python write where memory is short.
OUT_OF_MEMORY = ("out of memory", "can't allocate memory")


def may_be_of_size(error: BaseException) -> bool:
    """Whether what the user's code raised may be for its batch size; bstune's own refusals say."""
    return isinstance(error, BatchSizeRefused) or not isinstance(error, BstuneError)


class BatchSizeRefused(InputError):
    """The user's data or code does not take this batch size; another one may do."""


class Trial:
    """A configuration that is trained on one seed, and what has been reported of it.

    Args:
        spec: the configuration, its seed and the step at which it stops.
        target: what ends it.
        total_steps: its budget, where its schedule ends.
        earlier: the record of the pruned trial that it resumes.
        save_to: where to save its state if it is pruned; None where it will not be resumed.
        keep: save its state there however it ends.
        resume_from: the state of the trial that it resumes.
        until: the time of ``now`` at which it is pruned; None: no limit.
        now: a clock, in seconds.
        clock: for loops that report no seconds: the time between reports counts.
    """

    def __init__(
        self,
        spec: Spec,
        target: Target,
        *,
        total_steps: int,
        earlier: Record | None = None,
        save_to: Path | None = None,
        keep: bool = False,
        resume_from: Path | None = None,
        until: float | None = None,
        now: Callable[[], float] = time.monotonic,
        clock: TrainingClock | None = None,
    ) -> None:
        self.spec = spec
        self.target = target
        self.number = spec.number
        self.batch_size = spec.batch_size
        self.lr = spec.lr
        self.values: Mapping[str, int | float] = spec.values
        self.seed = spec.seed
        self.max_steps = spec.max_steps
        self.total_steps = total_steps
        self.first_step = earlier.steps if earlier else 0
        self.save_to = save_to
        self._keep = keep
        self.resume_from = resume_from
        self.history = list(earlier.history) if earlier else []
        self.noise_scale = list(earlier.noise_scale) if earlier else []
        self.status: Status | None = None
        self.has_stepped = bool(self.history)
        self.has_seconds = False
        self.went_on = False
        self.is_building = False
        self.on_progress: Callable[[], None] = lambda: None
        self._evaluations_before = len(self.history)
        self._now = now
        self._at_budget: Status = "finished" if target.goal is None else "missed"
        self._until = math.inf if until is None else until
        self._message = ""
        self._began = time.perf_counter()
        self._clock = clock or TrainingClock()
        self._clock.start()

    @property
    def worth_saving(self) -> bool:
        """Whether its state may be resumed: it goes on, or was pruned."""
        may_be_resumed = self._keep or self.status in (None, "pruned")
        return self.save_to is not None and may_be_resumed

    @property
    def has_deadline(self) -> bool:
        """Whether its time is limited."""
        return self._until < math.inf

    @property
    def is_late(self) -> bool:
        """Whether its next evaluation is its last, as its time is over."""
        return self._now() >= self._until

    @property
    def steps(self) -> int:
        """Steps at the last evaluation, those of the trial that it resumes included."""
        return self.history[-1][0] if self.history else 0

    def report(self, step: int, value: float, seconds: float | None = None) -> bool:
        """Judge an evaluation; whether the trial goes on. Once it has ended nothing is recorded.

        Args:
            step: optimizer steps so far, those of the trial that it resumes included.
            value: of the target's metric; a value that is no finite number ends the trial.
            seconds: training seconds of this run so far. Without them the time between reports
                counts, evaluation included.
        """
        self.on_progress()
        if self.status is not None:
            self.went_on = True
            return False
        # They may be of numpy, torch or JAX.
        step, value = int(step), as_printed(float(value))
        self.has_seconds = seconds is not None
        if self.history and step <= self.steps:
            self.fail(
                f"step {step} was reported after step {self.steps}: report the optimizer steps of "
                f"the whole trial, trial.report(trial.first_step + step, value)"
            )
            return False
        if seconds is None:
            self._clock.stop(step - self.steps)
        elif seconds < self._clock.seconds:
            self.fail(
                f"{seconds:g} seconds were reported after {self._clock.seconds:g}: report the "
                f"training seconds so far, trial.report(step, value, seconds=seconds)"
            )
            return False
        else:
            self._clock.segments.append((step - self.steps, seconds - self._clock.seconds))
        is_finite = math.isfinite(value)
        self.history.append((step, value if is_finite else None))
        if not is_finite:
            self.status = "diverged"
            self._message = f"{self.target.metric} is {value} at step {step}"
        elif self.target.reached(value):
            self.status = "reached"
        elif step >= self.total_steps:
            self.status = self._at_budget
        elif step >= self.max_steps or self.is_late:
            self.status = "pruned"
        self._clock.start()
        return self.status is None

    def batches(self, examples: int) -> Iterator[np.ndarray]:
        """Endless batches of exactly ``batch_size`` indices of so many examples.

        They come from shuffled epochs; what is left over of one begins the next. They follow from
        the seed, and begin after the steps of the trial that this one resumes. A batch that is
        larger than the data has examples twice: its size is refused, and the next report ends the
        trial.
        """
        try:
            check_batch_size(self.batch_size, examples)
        except BatchSizeRefused as error:
            self.fail(error)

        def shuffled(epoch: int) -> list[int]:
            order: list[int] = (
                np.random.default_rng([self.seed, epoch]).permutation(examples).tolist()
            )
            return order

        for batch in endless_batches(shuffled, self.batch_size, self.first_step):
            yield np.array(batch)
            # Who asks for another batch has trained on this one.
            self.has_stepped = True

    def fail(self, error: BaseException | str) -> None:
        """End the trial by an error, or by a line that says what to do; the first end counts.

        An error before the first step is that of a batch size which the user's code refuses, but
        for one of a module that is being built with further values.
        """
        if self.status is not None:
            return
        self.status = "failed"
        may_be_of_size = not (self.history or self.has_stepped or self.is_building)
        if isinstance(error, BaseException):
            if is_out_of_memory(error):
                self.status = "out of memory"
            elif isinstance(error, BatchSizeRefused) or may_be_of_size:
                self.status = "refused"
        # A message of bstune's own says what to do; where it was raised helps nobody.
        if isinstance(error, str | BstuneError):
            self._message = str(error)
        else:
            self._message = one_line(error)

    def finish(self) -> None:
        """End a trial whose loop is over; one that never reported has failed."""
        if len(self.history) == self._evaluations_before:
            self.fail(
                f"the trial reported nothing: evaluate at its last step, trial.max_steps="
                f"{self.max_steps}, too, and write `if not trial.report(step, value): break`"
            )
        if self.status is not None:
            return
        # A loop that evaluates every so many steps may have ended before it was to do so again.
        steps = [0, *(step for step, _ in self.history)]
        due = 2 * steps[-1] - steps[-2]
        self.status = self._at_budget if due > self.total_steps else "pruned"
        self._message = (
            f"its training ended before trial.report gave False: train on to "
            f"trial.max_steps={self.max_steps}, and evaluate there"
        )

    def record(self) -> Record:
        """Finish the trial, and tell how it ended."""
        self.finish()
        assert self.status is not None  # noqa: S101 (finish sets it)
        misses = [0]
        for step, value in self.history:
            if value is not None and not self.target.reached(value):
                misses.append(step)
        train_seconds = self._clock.seconds
        return Record(
            **self.spec.model_dump(),
            status=self.status,
            steps=self.steps,
            steps_low=misses[-1],
            # Tables and loops may report 0 seconds: that is no step time.
            seconds_per_step=seconds_per_step(self._clock.segments) or None,
            train_seconds=train_seconds,
            other_seconds=max(0.0, time.perf_counter() - self._began - train_seconds),
            history=tuple(self.history),
            noise_scale=tuple(self.noise_scale),
            message=self._message,
        )


def run_trial(train: Callable[[Trial], object], trial: Trial) -> Record:
    """Train a trial; whatever the user's code raises is a record.

    Args:
        train: trains and reports.
        trial: that has not begun.
    """
    try:
        train(trial)
    # The user's code may raise anything, or call sys.exit.
    except (Exception, SystemExit) as error:
        # No other trial could do what bstune itself refuses, other than a batch size.
        if not may_be_of_size(error):
            raise
        # A worker's error stream is the study's trials.log.
        print(hide_in_error(traceback.format_exc()), file=sys.stderr)
        trial.fail(error)
    return trial.record()


def check_batch_size(batch_size: int, examples: int) -> None:
    """BatchSizeRefused for a batch that is larger than the data."""
    if batch_size > examples:
        raise BatchSizeRefused(
            f"a batch size must be at most {examples}, the examples of the training data, but got "
            f"{batch_size}"
        )


def as_printed(value: float) -> float:
    """A metric as Python prints it: the 0.9 of float32 is 0.9, which meets ``>= 0.9``."""
    with np.errstate(over="ignore"):
        single = np.float32(value)
    return float(str(single)) if float(single) == value else value


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory was short, on a device or on the machine."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    # A loader that starts a process.
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return True
    # JAX begins with a capital.
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(words in text for words in OUT_OF_MEMORY)


def endless_batches(
    draw: Callable[[int], Sequence[Any]], batch_size: int, first: int = 0
) -> Iterator[list[Any]]:
    """Yield batches of exactly ``batch_size`` of one epoch after another, without an end.

    What an epoch leaves over begins the next one.

    Args:
        draw: the order of an epoch, by its number; they are drawn one after another, so that one
            that counts its own epochs is right.
        batch_size: in examples.
        first: batches that are left out.
    """
    order = list[Any]()
    place = first * batch_size
    epoch = 0
    while True:
        while place + batch_size > len(order):
            used = min(place, len(order))
            place -= used
            order = [*order[used:], *draw(epoch)]
            epoch += 1
        yield order[place : place + batch_size]
        place += batch_size
