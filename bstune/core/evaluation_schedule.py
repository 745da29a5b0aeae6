"""When a trial is evaluated: a rule over examples and past values.

The rule never looks at measured seconds: the history must not depend on the clock. One evaluation
costs ``cost`` x (validation examples), in examples trained. The next one waits until both hold:

* Its step is ``ratio`` times the last one's (at least one step on), rounded down. Steps to target
  are known to that ratio.
* The cost of all evaluations, with it, is at most ``share`` of the examples trained so far. Far
  from the target it is half of that, which saves up for the dense evaluations near it.

Near means that the target is predicted within ``near`` times the steps so far, by a straight line
in log steps through the last evaluation and the latest one at least ``LOOK_BACK`` times earlier.
Metrics mostly flatten in log steps, so the line is early rather than late. A trial that has once
been near stays near: a noisy metric would switch back and forth.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

LOOK_BACK = 1.25
# Ratio and share of a trial that is evaluated densely.
DENSE_RATIO = 1.02
DENSE_SHARE = 1.0


@dataclass(frozen=True)
class EvaluationSchedule:
    """When a trial is evaluated: the options of the rule in the module's docstring."""

    ratio: float
    """The most between the steps of two evaluations near the target, over 1."""
    share: float
    """The cost of all evaluations over the examples trained, at most, in (0, 1]."""
    cost: float
    """The cost of evaluating one example, in examples trained."""
    near: float
    """The target counts as near when it is predicted within this many times the steps so far."""


# The schedule of a trial that is evaluated at its last step alone.
AT_THE_END = EvaluationSchedule(ratio=1e6, share=1e-12, cost=1.0, near=1.0)


def is_near(
    history: Sequence[tuple[int, float | None]], gap_of: Callable[[float], float], near: float
) -> bool:
    """Whether the target is predicted within ``near`` times the steps of the last evaluation.

    Args:
        history: step and value of each evaluation; fewer than two finite values predict nothing.
        gap_of: how far a value is from the target, such as :meth:`bstune.core.records.Target.gap`;
            0 or negative once it is met.
        near: a factor over 1.
    """
    gaps = [(step, gap_of(value)) for step, value in history if value is not None and step > 0]
    if len(gaps) < 2:
        return False
    step, gap = gaps[-1]
    # The gap is predicted by a straight line in log steps. Through two close evaluations it would
    # show their noise. So it goes through the last one and the latest one that is at least
    # LOOK_BACK times earlier; without such a one, through the first.
    earlier = gaps[0]
    for pair in gaps[:-1]:
        if pair[0] * LOOK_BACK <= step:
            earlier = pair
    step_before, gap_before = earlier
    slope = (gap - gap_before) / math.log(step / step_before)
    return gap + slope * math.log(near) <= 0.0


def next_evaluation(
    step: int,
    batch_size: int,
    validation_examples: int,
    evaluations: int,
    near: bool,
    schedule: EvaluationSchedule,
) -> int:
    """Choose the step of a trial's next evaluation, by the rule in the module's docstring.

    It is ``schedule.ratio`` times the last one's, at least one step on, and late enough for all
    evaluations together to cost at most the fraction ``schedule.share`` of the examples trained.

    Args:
        step: the last evaluation's; 0: there was none.
        batch_size: in examples.
        validation_examples: the examples of one evaluation.
        evaluations: how many evaluations there were.
        near: whether the target is near, see :func:`is_near`.
        schedule: the rule's options.
    """
    # The cost of all evaluations with the next one, in examples trained.
    cost = (evaluations + 1) * schedule.cost * validation_examples
    # Far from the target half of that fraction is saved for the closer evaluations near it.
    allowed = schedule.share if near else schedule.share / 2
    affordable = math.ceil(cost / (allowed * batch_size))
    return max(step + 1, math.floor(schedule.ratio * step), affordable)


def next_dense_evaluation(
    step: int,
    batch_size: int,
    validation_examples: int,
    evaluations: int,
    near: bool,
    schedule: EvaluationSchedule,
    dense_steps: tuple[int, int],
) -> int:
    """Choose the step of the next evaluation of a trial that is evaluated densely in some steps.

    There it is expected to meet the target, and its steps to target are to be known closely.

    Args:
        step: the last evaluation's; 0: there was none.
        batch_size: in examples.
        validation_examples: the examples of one evaluation.
        evaluations: how many evaluations there were.
        near: whether the target is near.
        schedule: the rule's options, which hold before and after the dense steps.
        dense_steps: the first and the last of the steps that are evaluated densely.
    """
    usual = next_evaluation(step, batch_size, validation_examples, evaluations, near, schedule)
    first, last = dense_steps
    if step >= last:
        return usual
    if step < first:
        return min(usual, first)
    # Within the dense steps evaluations lie closer, and may cost more.
    ratio = min(schedule.ratio, DENSE_RATIO)
    dense = replace(schedule, ratio=ratio, share=DENSE_SHARE)
    closely = next_evaluation(
        step, batch_size, validation_examples, evaluations, near=True, schedule=dense
    )
    return min(usual, closely)
