"""The record of a short trial of the preflight, which the checks read.

A :class:`~bstune.trial.checks.recorder.Recorder` makes it while the trial trains.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from torch import Tensor

from bstune.core.records import TrialResult, TrialSpec
from bstune.trial.checks.continuation import Course
from bstune.trial.checks.doubled_batch import DoubledLoss
from bstune.trial.checks.monitors import Monitors
from bstune.trial.checks.schedule_end import ScheduleCopy
from bstune.trial.devices.randomness import GeneratorStates


@dataclass(frozen=True)
class SeenModule:
    """The module that a short trial has trained.

    Args:
        name: of its class.
        place: the file and line of its configure_optimizers, as text; empty if not known.
        automatic: whether Lightning steps its optimizers; else the module does so itself.
        parameters: the number of trained parameters.
    """

    name: str
    place: str
    automatic: bool
    parameters: int


@dataclass(frozen=True)
class GroupRate:
    """The learning rate of one of an optimizer's groups of parameters."""

    # The name of the optimizer's class.
    optimizer: str
    lr: float
    # The rate before any schedule, if a schedule has noted it; else the same as ``lr``.
    initial_lr: float


@dataclass(frozen=True)
class ComparedWeights:
    """Weights of a short trial, to be compared with another trial's after as many steps.

    Args:
        steps: after which they are compared.
        before: weights before the first step, by name.
        after: weights after the last of these steps; None: the trial ended before.
        rates: learning rates after that step, of each group of each optimizer.
    """

    steps: int
    before: Mapping[str, Tensor]
    after: Mapping[str, Tensor] | None
    rates: tuple[GroupRate, ...]


@dataclass(frozen=True)
class SeenSchedules:
    """Copies of a short trial's schedules, as they were at its end.

    A check steps its copies ahead, so each of the two checks has copies of its own.

    Args:
        to_end: copies that are stepped to their end.
        to_compare: copies that are stepped beside those of another trial.
        unknown: class names of schedules that are not torch's, which cannot be copied.
    """

    to_end: tuple[ScheduleCopy, ...] = ()
    to_compare: tuple[ScheduleCopy, ...] = ()
    unknown: tuple[str, ...] = ()


@dataclass(frozen=True)
class ShortTrial:
    """A trial of a few steps, and the records of it.

    Args:
        spec: of the trial.
        result: the trial's own record.
        module: that was trained.
        step_ends: when each step ended, in seconds by one clock.
        batches: the number of batches trained on; each micro-batch counts.
        optimizer_steps: the number of steps of each optimizer, in their order.
        weights: to be compared with another trial's.
        schedules: as they were at its end.
        generators: states of the random generators, by moment and by library.
        start_metric: the target's metric of the untrained weights; None: it was not evaluated, or
            is not finite.
        course: the record of its last steps; None: they were not to be recorded.
        monitors: call-backs of the module that stop a training early or save it.
        has_epochs: whether its epochs end.
        losses: of its last batch, once and twice over; None: they were not, or could not be,
            compared.
    """

    spec: TrialSpec
    result: TrialResult
    module: SeenModule
    step_ends: tuple[float, ...]
    batches: int
    optimizer_steps: tuple[int, ...]
    weights: ComparedWeights
    schedules: SeenSchedules
    generators: Mapping[str, GeneratorStates]
    start_metric: float | None
    course: Course | None
    monitors: Monitors = field(default_factory=Monitors)
    has_epochs: bool = False
    losses: DoubledLoss | None = None

    @property
    def seconds(self) -> float:
        """Seconds of the fastest step, without the first one; 0 where there was one step at most.

        A step's seconds run from the end of the step before it, so the first step has none.
        """
        seconds_of_steps = (end - start for start, end in pairwise(self.step_ends))
        return min(seconds_of_steps, default=0.0)
