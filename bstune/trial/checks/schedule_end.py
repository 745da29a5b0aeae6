"""Finds where a schedule of a fixed length ends, by stepping a copy of it ahead.

The schedules are torch's, which Lightning steps, or which a module keeps to step itself. A schedule
that is built from the trial's own steps ends with the trial, and is not found here.
"""

import copy
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from bstune.system.failures import cause
from bstune.trial.checks.attributes import CONTAINERS, plain_values
from bstune.trial.lightning.installed import LightningModule, Trainer

# The most steps of a schedule's own that it is stepped ahead.
MAX_STEPS_AHEAD = 10_000
# The longest time for stepping one schedule.
MAX_SECONDS_AHEAD = 1.0
# The clock is read once in so many steps.
STEPS_BETWEEN_LOOKS = 100
# A rate of at most this share of the highest one is as good as none.
AS_GOOD_AS_NONE = 1e-6
# A schedule has ended if it has no rate for more than this share of a trial's steps. A rate of 0 in
# the last step alone is common.
MIN_IDLE_SHARE = 0.05
HOW_TO_FIT = (
    "build it from the trial's own steps (trial.total_steps in Python, ${trial.total_steps} in "
    "YAML, self.trainer.estimated_stepping_batches in the module)"
)


@dataclass(frozen=True)
class ScheduleCopy:
    """A copy of a schedule in the middle of a training, with an optimizer of its own.

    Args:
        name: of the schedule's class.
        schedule: the copy.
        every: optimizer steps for each of its own steps.
        done: optimizer steps that the training has taken.
    """

    name: str
    schedule: LRScheduler
    every: int
    done: int


@dataclass(frozen=True)
class ScheduleEnd:
    """The end of a schedule before that of a trial.

    Args:
        name: of the schedule's class.
        step: the number of optimizer steps for which it has a rate.
        error: that it raises after them, in words; None: its rate stays at 0.
    """

    name: str
    step: int
    error: str | None

    def text(self, module: str, batch_size: int, last_step: int) -> str:
        """Word the end in a line, with advice: that the rate stays at 0, or an error comes.

        Args:
            module: the name of the module's class.
            batch_size: of the trial.
            last_step: of the trial.
        """
        trials = f"and a trial at batch size {batch_size} may take {last_step:,}"
        if self.error is None:
            return (
                f"{self.name} of {module} is at 0 after {self.step:,} steps, {trials}: {HOW_TO_FIT}"
            )
        return (
            f"{self.name} of {module} ends after {self.step:,} steps with an error, {trials} "
            f"({self.error}): {HOW_TO_FIT}, or let budget.steps and budget.examples end trials "
            "before"
        )


def copies_of_schedules(
    trainer: Trainer, module: LightningModule, done: int
) -> tuple[ScheduleCopy, ...]:
    """Copy the schedules of a training that has taken ``done`` optimizer steps.

    One that cannot be copied is left out.
    """
    # deepcopy takes an object whose id it finds here as its own copy. A schedule's functions may
    # refer to the module and the Trainer, which are not copied. Each optimizer is replaced by one
    # without weights.
    shared: dict[int, Any] = {id(module): module, id(trainer): trainer}
    for optimizer in trainer.optimizers:
        shared[id(optimizer)] = _stand_in(optimizer)
    copies = []
    for schedule, every in _schedules(trainer, module, done):
        try:
            copied = copy.deepcopy(schedule, dict(shared))
        except Exception:  # noqa: BLE001, S112 (a schedule of any library may refuse to be copied)
            continue
        copies.append(
            ScheduleCopy(name=type(schedule).__name__, schedule=copied, every=every, done=done)
        )
    return tuple(copies)


def _schedules(
    trainer: Trainer, module: LightningModule, done: int
) -> Iterator[tuple[LRScheduler, int]]:
    """Yield a training's schedules, each with the optimizer steps between two of its own steps.

    They are torch's, without those that look at a metric. ``done``: optimizer steps taken so far.
    """
    steps_of_epoch = trainer.num_training_batches // trainer.accumulate_grad_batches
    configured = [config.scheduler for config in trainer.lr_scheduler_configs]
    for config in trainer.lr_scheduler_configs:
        schedule = config.scheduler
        is_of_torch = isinstance(schedule, LRScheduler)
        if not is_of_torch or isinstance(schedule, ReduceLROnPlateau):
            continue
        # A module that steps its schedules itself is taken to go on at its pace so far.
        if not module.automatic_optimization:
            yield from _as_stepped_so_far(schedule, done)
        elif config.interval == "step":
            yield schedule, config.frequency
        # Any other schedule is stepped at the ends of epochs, which endless data do not have.
        elif steps_of_epoch != float("inf"):
            yield schedule, config.frequency * max(1, int(steps_of_epoch))
    # A module may keep further schedules in attributes, and step them itself.
    for _, value in plain_values(trainer, module):
        several = value if isinstance(value, CONTAINERS) else [value]
        for part in several:
            if not isinstance(part, LRScheduler) or isinstance(part, ReduceLROnPlateau):
                continue
            if not any(part is schedule for schedule in configured):
                yield from _as_stepped_so_far(part, done)


def _as_stepped_so_far(schedule: LRScheduler, done: int) -> Iterator[tuple[LRScheduler, int]]:
    """Yield a schedule that the module steps, and how many optimizer steps each step of it took.

    That number is the mean over the ``done`` optimizer steps so far. A schedule that was not
    stepped yet is left out.
    """
    # torch counts a schedule's steps in ``last_epoch``.
    schedule_steps = int(getattr(schedule, "last_epoch", 0))
    if schedule_steps > 0:
        yield schedule, max(1, round(done / schedule_steps))


def _stand_in(optimizer: Optimizer) -> Optimizer:
    """Make an optimizer without weights that has the same parameter groups' options."""
    # Schedules read and set the groups' options alone, whatever the optimizer's class.
    stand_in = torch.optim.SGD([torch.zeros(())])
    stand_in.defaults = dict(optimizer.defaults)
    groups = []
    for group in optimizer.param_groups:
        values = {name: value for name, value in group.items() if name != "params"}
        for name, value in values.items():
            if isinstance(value, Tensor):
                values[name] = value.detach().clone()
        groups.append(values | {"params": []})
    stand_in.param_groups = groups
    return stand_in


def end_of_schedule(
    ahead: ScheduleCopy, last_step: int, *, now: Callable[[], float] = time.monotonic
) -> ScheduleEnd | None:
    """Step a schedule's copy ahead to the last step of a trial, and find where it ends.

    Args:
        ahead: the copy.
        last_step: of the trial.
        now: a clock, in seconds.

    Returns:
        Its end; None where it has none before the trial's, or none was found within
        ``MAX_STEPS_AHEAD`` and ``MAX_SECONDS_AHEAD``.
    """
    began = now()
    # The optimizer step at which the schedule was last stepped.
    step = ahead.done - ahead.done % ahead.every
    highest = _highest_rate(ahead.schedule)
    # The optimizer step since which the rate is as good as none; None: it is not.
    nothing_since: int | None = None
    with warnings.catch_warnings(action="ignore"):
        for number in range(1, MAX_STEPS_AHEAD + 1):
            if step + ahead.every > last_step:
                break
            try:
                ahead.schedule.step()
            except Exception as error:  # noqa: BLE001 (a schedule may raise anything)
                return ScheduleEnd(ahead.name, step, error=cause(error))
            step += ahead.every
            rate = _highest_rate(ahead.schedule)
            highest = max(highest, rate)
            if rate > AS_GOOD_AS_NONE * highest:
                nothing_since = None
            elif nothing_since is None:
                nothing_since = step
            if number % STEPS_BETWEEN_LOOKS == 0 and now() - began > MAX_SECONDS_AHEAD:
                return None
    # A schedule whose rate was 0 from the first step has not ended.
    if highest == 0.0 or nothing_since is None:
        return None
    # Many schedules come to 0 at the end itself, which costs a trial nothing.
    if last_step - nothing_since <= MIN_IDLE_SHARE * last_step:
        return None
    return ScheduleEnd(ahead.name, nothing_since, error=None)


def _highest_rate(schedule: LRScheduler) -> float:
    """Give the highest learning rate of its optimizer's parameter groups, by its absolute value."""
    return max(abs(float(group["lr"])) for group in schedule.optimizer.param_groups)
