"""When a trial is evaluated: a rule over examples and past values, never over a clock.

One evaluation costs ``COST`` times its examples, in examples trained. The next one waits until both
hold:

* Its step is ``RATIO`` times the last one's (at least one step on), rounded down: steps to target
  are known to that ratio.
* The cost of all evaluations, with it, is at most ``SHARE`` of the examples trained so far. Far
  from the target it is half of that, which is saved for the dense evaluations near it.

The first evaluation may be asked for earlier than that, where the target may be met soon. Those
that come earlier then count no cost, and lie a factor of ``EARLY_RATIO`` apart: after the first one
alone a target could be passed by the tenfold.
"""

import math
from collections.abc import Sequence

from bstune.core.records import Target

RATIO = 1.05
SHARE = 0.25
COST = 0.5
# Evaluations that are made whatever they cost: at so many times the steps of the one before.
EARLY_RATIO = 2.0
# The target is near when it is predicted within this many times the steps so far.
NEAR = 1.5
# The prediction's line goes through the last evaluation and one at least so many times earlier:
# through two close ones it would show their noise.
LOOK_BACK = 1.25


def has_been_near(history: Sequence[tuple[int, float | None]], target: Target) -> bool:
    """Whether the target is predicted within ``NEAR`` times the steps of some evaluation.

    A straight line in log steps predicts it. Metrics mostly flatten in log steps, so the line is
    early rather than late. A trial that has once been near stays near. Values that are None or at
    step 0 predict nothing, and a target without a goal is never near.
    """
    if target.goal is None:
        return False
    gaps = [(step, target.gap(value)) for step, value in history if value is not None and step > 0]
    return any(_predicted_near(gaps[: place + 1]) for place in range(1, len(gaps)))


def _predicted_near(gaps: list[tuple[int, float]]) -> bool:
    """Whether the line to the last of some (step, gap) meets 0 within ``NEAR`` times its step."""
    step, gap = gaps[-1]
    earlier = gaps[0]
    for pair in gaps[:-1]:
        if pair[0] * LOOK_BACK <= step:
            earlier = pair
    slope = (gap - earlier[1]) / math.log(step / earlier[0])
    return gap + slope * math.log(NEAR) <= 0.0


def next_evaluation(
    history: Sequence[tuple[int, float | None]],
    target: Target,
    batch_size: int,
    examples: int,
    first: int | None = None,
) -> int:
    """The step of a trial's next evaluation, by the rule of the module's docstring.

    Args:
        history: (step, metric) of its evaluations so far.
        target: whose nearness makes evaluations denser.
        batch_size: in examples.
        examples: of one evaluation.
        first: the step by which the first one is made, whatever it costs.
    """
    last = history[-1][0] if history else 0
    far = SHARE / 2 * batch_size
    allowed = SHARE * batch_size if has_been_near(history, target) else far
    free = 0 if first is None else sum(step < COST * examples / far for step, _ in history)
    counted = len(history) - free + 1
    due = max(last + 1, math.floor(RATIO * last), math.ceil(counted * COST * examples / allowed))
    if first is None or free < len(history):
        return due
    return min(due, max(last + 1, math.ceil(EARLY_RATIO * last)) if history else first)
