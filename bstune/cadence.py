"""When a trial is evaluated: a rule that looks at examples and past values, never at measured seconds.

One evaluation costs ``cost`` x (validation examples), in examples trained. With N examples trained and E the cost of
the evaluations so far, the next evaluation waits until both hold:

* its step is ``ratio`` times the last one's (at least one step on), rounded down, so that steps to target is known to
  that ratio;
* E + one evaluation <= allowed x N, where allowed is ``share`` near the target and half of it far from it, so that far
  from the target half of the share is saved up for the dense evaluations near it.

Near means that the target is predicted within ``near`` times the steps so far, by a straight line in log steps through
the last evaluation and the latest one at least ``LOOK_BACK`` times earlier. Metrics mostly flatten in log steps, so
the line is early rather than late. A trial that has once been near stays near: a noisy metric would otherwise switch
back, and the evaluations already paid for would put off the next one until the steps had doubled.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from bstune.errors import ConfigError
from bstune.records import Target

LOOK_BACK = 1.25


@dataclass(frozen=True)
class Cadence:
    """Settings of the rule above.

    Args:
        ratio: of steps between evaluations near the target, over 1.
        share: of evaluation in training, both counted in examples, in (0, 1].
        cost: of evaluating one example, in examples trained.
        near: the target counts as near when it is predicted within this many times the steps so far, over 1.
    """

    ratio: float
    share: float
    cost: float
    near: float

    def __post_init__(self) -> None:
        if not (self.ratio > 1 and 0 < self.share <= 1 and self.cost > 0 and self.near > 1):
            raise ConfigError(
                "an evaluation rule needs ratio > 1, 0 < share <= 1, cost > 0 and near > 1, but got "
                f"ratio={self.ratio}, share={self.share}, cost={self.cost}, near={self.near}"
            )


def is_near(history: Sequence[tuple[int, float | None]], target: Target, near: float) -> bool:
    """Return whether the target is predicted within ``near`` times the last evaluation's step.

    Values that are None (not finite) are passed over; with fewer than two evaluations the answer is False.
    """
    known = [(step, target.gap(value)) for step, value in history if value is not None and step > 0]
    if len(known) < 2:
        return False
    step, gap = known[-1]
    earlier = [pair for pair in known[:-1] if pair[0] * LOOK_BACK <= step] or known[:1]
    step_before, gap_before = earlier[-1]
    slope = (gap - gap_before) / math.log(step / step_before)
    return gap + slope * math.log(near) <= 0.0


def next_evaluation(
    step: int, batch_size: int, validation_examples: int, evaluations: int, near: bool, cadence: Cadence
) -> int:
    """Return the step of the next evaluation.

    Args:
        step: of the last evaluation, 0 before the first.
        batch_size: examples per step.
        validation_examples: examples in one evaluation.
        evaluations: how many there have been.
        near: from :func:`is_near`.
        cadence: the rule's settings.
    """
    cost = (evaluations + 1) * cadence.cost * validation_examples
    allowed = cadence.share if near else cadence.share / 2
    affordable = math.ceil(cost / (allowed * batch_size))
    return max(step + 1, math.floor(cadence.ratio * step), affordable)
