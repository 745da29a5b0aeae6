"""When a trial is evaluated: a rule over examples and past values.

The rule never looks at measured seconds: the history must not depend on the clock. One evaluation
costs ``cost`` x (validation examples), in examples trained. The next one waits until both hold:

* its step is ``ratio`` times the last one's (at least one step on), rounded down: steps to target
  is known to that;
* the cost of all evaluations with it is at most ``share`` of the examples trained near the target,
  and half of that far from it, so that half is saved up for the dense evaluations near it.

Near means that the target is predicted within ``near`` times the steps so far, by a straight line
in log steps through the last evaluation and the latest one at least ``LOOK_BACK`` times earlier.
Metrics mostly flatten in log steps, so the line is early rather than late. A trial that has once
been near stays near: a noisy metric would switch back and forth.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

LOOK_BACK = 1.25
# Of a trial that is looked at closely: of steps between evaluations, and what all of these may
# cost, in examples, over those that it trains on.
DENSE_RATIO = 1.02
DENSE_SHARE = 1.0


@dataclass(frozen=True)
class EvaluationSchedule:
    """When a trial is evaluated: the options of the rule in the module's docstring."""

    ratio: float
    """Of steps between evaluations near the target, over 1."""
    share: float
    """Of evaluation in training, both counted in examples, in (0, 1]."""
    cost: float
    """Of evaluating one example, in examples trained."""
    near: float
    """The target counts as near when it is predicted within this many times the steps so far."""


# Evaluated at the last step alone.
AT_THE_END = EvaluationSchedule(ratio=1e6, share=1e-12, cost=1.0, near=1.0)


def is_near(
    history: Sequence[tuple[int, float | None]], gap_of: Callable[[float], float], near: float
) -> bool:
    """Tell whether the target is predicted within ``near`` times the steps of the last evaluation.

    Args:
        history: step and value of each evaluation; fewer than two finite values predict nothing.
        gap_of: how far a value is from the target, such as :meth:`bstune.core.records.Target.gap`.
        near: times the steps so far, over 1.
    """
    gaps = [(step, gap_of(value)) for step, value in history if value is not None and step > 0]
    if len(gaps) < 2:
        return False
    step, gap = gaps[-1]
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
    """Give the step of a trial's next evaluation, by the rule in the module's docstring.

    Args:
        step: of the last evaluation; 0: there was none.
        batch_size: in examples.
        validation_examples: of one evaluation.
        evaluations: how many there were.
        near: whether the target is near, see :func:`is_near`.
        schedule: the rule's options.
    """
    # In examples trained, of all evaluations with the next one.
    cost = (evaluations + 1) * schedule.cost * validation_examples
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
    """Give the step of the next evaluation of a trial that is to be looked at closely between two steps.

    Arguments as of :func:`next_evaluation`; elsewhere it is evaluated as any trial.
    """
    usual = next_evaluation(step, batch_size, validation_examples, evaluations, near, schedule)
    first, last = dense_steps
    if step >= last:
        return usual
    if step < first:
        return min(usual, first)
    ratio = min(schedule.ratio, DENSE_RATIO)
    dense = replace(schedule, ratio=ratio, share=DENSE_SHARE)
    closely = next_evaluation(
        step, batch_size, validation_examples, evaluations, near=True, schedule=dense
    )
    return min(usual, closely)
