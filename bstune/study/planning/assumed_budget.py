"""The budget of a trial where nobody has stated one, fitted to the time that the study has.

A schedule that ends with its trial is as long as the trial's budget. Where bstune has assumed that
budget, the study's time may cut the schedule while it still warms up: such a trial tells nothing of
the workload. So the budget becomes one that the reference ends well within the time.
"""

import math
from dataclasses import dataclass

from bstune.core.records import Budget
from bstune.search.acquisition import MIN_STEPS

# The share of the study's seconds that the reference's first schedule may take.
SCHEDULE_SHARE = 0.25
SCHEDULE_SHARE_IN_WORDS = "a quarter of the study's time"
# The seconds of training that a schedule of less than an epoch takes at least: what a network has
# learnt in a few steps is no target, and tells nothing of the reference.
LEAST_SECONDS = 15.0


@dataclass(frozen=True)
class SecondsLeft:
    """The seconds that a study has left for its trials.

    Args:
        training: of training; None: any number.
        wall: of wall time, which may be over already; None: any number.
        wall_per_training: wall seconds for a second of training.
    """

    training: float | None
    wall: float | None
    wall_per_training: float

    @property
    def trained(self) -> float:
        """The seconds of training that both limits allow; 0 at least."""
        limits = [math.inf]
        if self.training is not None:
            limits.append(self.training)
        if self.wall is not None:
            limits.append(self.wall / self.wall_per_training)
        return max(0.0, min(limits))


def budget_in_time(
    assumed: Budget, epoch: int, batch_size: int, seconds_per_step: float, left: SecondsLeft
) -> Budget:
    """Shorten an assumed budget to whole epochs that take ``SCHEDULE_SHARE`` of the seconds left.

    It is one epoch at least where there is time for one. Otherwise it is what the share allows, but
    no less than an epoch or ``LEAST_SECONDS`` of training, whichever is shorter, nor than
    ``MIN_STEPS``: the study then takes longer, or ends without an answer. Steps and examples are
    shortened in proportion.

    Args:
        assumed: is given back where it ends in time.
        epoch: examples of an epoch.
        batch_size: of the reference.
        seconds_per_step: of the reference.
        left: the study's seconds.
    """
    examples_per_second = batch_size / seconds_per_step
    examples_in_time = left.trained * examples_per_second
    examples = SCHEDULE_SHARE * examples_in_time
    if examples >= assumed.examples:
        return assumed
    if examples_in_time >= epoch:
        examples = epoch * max(1, math.floor(examples / epoch))
    # A shorter trial is not worth its start.
    least = max(MIN_STEPS * batch_size, min(epoch, LEAST_SECONDS * examples_per_second))
    examples = math.floor(max(least, examples))
    if examples >= assumed.examples:
        return assumed
    steps = max(1, math.floor(assumed.steps * examples / assumed.examples))
    return Budget(steps=steps, examples=examples)
