"""What a study tries first: configurations near a baseline that reached the target."""

import math
from collections.abc import Collection, Iterator, Sequence

from bstune.core.records import Record, Records, Spec
from bstune.core.space import Configuration, Space
from bstune.search.choices import key_of, tried_keys
from bstune.search.decide import Proposal, first_evaluation
from bstune.search.fit import sizes_to_try
from bstune.search.limits import LEAST_STEPS
from bstune.study.estimates import step_time_of
from bstune.study.plan import Plan
from bstune.study.trials import baseline_of, without_new_seeds

# They lie this far from the baseline, in rate and in batch size, and run to this share of the steps
# with which they would be as good as the best. On five recorded tables with 8 seeds, from the
# shipped baselines and from a fourth of their rates, the choice then takes 0.85 times the time or
# steps after 5 times the best cell's cost, 0.95 after 10 and 0.99 after 20; a share of 0.48, or all
# four whatever the rates gave, is no better.
NEAR = 3.0
NEAR_SHARE = 0.7


def next_near_baseline(plan: Plan, records: Records, running: Sequence[Spec]) -> Proposal | None:
    """The next of the first configurations; None: there are none, or no more."""
    baseline = baseline_of(records)
    # Nobody has measured whether they help the curve, the metric, or schedules that end with their
    # trials.
    question = plan.question
    is_wanted = question.seeks_best and not question.seeks_metric and not question.schedule_ends
    if not (is_wanted and baseline is not None and baseline.reached):
        return None
    step_time = step_time_of(plan, records)

    def value(record: Record) -> float:
        return plan.question.value(record.steps_to_target, record.batch_size, step_time)

    reached = sorted((one for one in without_new_seeds(records) if one.reached), key=value)
    space = sizes_to_try(plan.space, records, plan.fits)
    tried = tried_keys(records, running)
    for batch_size, lr in _near_configurations(
        space, baseline, reached, {size for size, *_ in tried}
    ):
        near = Configuration(batch_size=batch_size, lr=lr, values=baseline.values)
        if key_of(near) not in tried:
            best_value = value(reached[0])
            as_good = best_value / plan.question.value(1.0, batch_size, step_time)
            steps = max(math.ceil(NEAR_SHARE * as_good), LEAST_STEPS)
            return Proposal(
                **near.model_dump(),
                max_steps=min(steps, plan.question.last_step(near.batch_size)),
                first_evaluation=first_evaluation(as_good),
            )
    return None


def _near_configurations(
    space: Space, baseline: Record, reached: Records, tried_sizes: Collection[float]
) -> Iterator[tuple[int, float]]:
    """Batch sizes and rates near the baseline, in the order in which they are tried.

    They are three times its rate and, unless that reached the target, a third of it; then three
    times its batch size and a third of it, at the rule's rate times what helped at its own.

    Args:
        space: narrowed to the batch sizes that are worth a trial.
        baseline: that reached the target.
        reached: the trials that did, the best first.
        tried_sizes: batch sizes.
    """
    size, lr = baseline.batch_size, baseline.lr
    rates = [one.lr for one in reached if one.batch_size == size]
    yield size, space.snap_lr(NEAR * lr)
    if len(rates) == 1:
        yield size, space.snap_lr(lr / NEAR)
    helped = rates[0] / lr
    for other in (space.snap(NEAR * size), space.snap(size / NEAR)):
        if other not in tried_sizes:
            yield other, space.snap_lr(helped * space.rule_lr(other))
