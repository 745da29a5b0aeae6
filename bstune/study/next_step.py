"""What a study does next: one pure function of its records.

The baseline first, then the search, then new seeds for its best configuration and for the baseline;
under ``curve`` the search alone, until B_crit is known. Under a time limit
:mod:`bstune.study.deadline` says how long each may take.
Any process that sees the same records plans the same step, so that a study can be killed and
continued anywhere.
"""

from collections.abc import Sequence

from bstune.core.errors import BstuneError, InputError, UserCodeError
from bstune.core.records import Records, Spec
from bstune.core.space import Configuration, Space
from bstune.search.decide import first_evaluation
from bstune.search.fit import trained_sizes
from bstune.study.new_seeds import ask_new_seed
from bstune.study.plan import Ask, Done, Plan, Wait, trial_seed
from bstune.study.search_trials import ask_search, search_goes_on

# Failures that end a study with the user's own error.
FAILURES = 3


def next_step(
    plan: Plan, records: Records, running: Sequence[Spec], now: float
) -> Ask | Wait | Done:
    """Plan the next step.

    Args:
        plan: what stays fixed.
        records: of all finished trials, in order of their numbers.
        running: the trials that run somewhere.
        now: the time, in seconds.
    """
    begun = any(spec.role == "baseline" for spec in (*records, *running))
    if plan.baseline is not None and not begun:
        return _ask_baseline(plan, plan.baseline, now)
    if search_goes_on(plan, records, running, now):
        return ask_search(plan, records, running, now)
    if any(spec.role != "new seed" for spec in running):
        return Wait()
    if not plan.question.seeks_best:
        return Done()
    step = ask_new_seed(plan, records, running, now)
    if step is not None:
        return step
    return Wait() if running else Done()


def _ask_baseline(plan: Plan, baseline: Configuration, now: float) -> Ask:
    """The baseline's first run, to its budget; a time limit may end it before."""
    last_step = plan.question.last_step(baseline.batch_size)
    schedule_steps = None
    if plan.question.schedule_ends:
        schedule_steps = last_step
    until = None
    if plan.deadline is not None:
        # A part of the budget would not tell what its best metric is.
        is_whole = plan.question.seeks_metric
        until = plan.end if is_whole else now + plan.deadline.baseline_seconds
    return Ask(
        place="baseline",
        role="baseline",
        **baseline.model_dump(),
        seed=trial_seed(plan.seed, "baseline"),
        max_steps=last_step,
        schedule_steps=schedule_steps,
        first_evaluation=first_evaluation(last_step),
        until=until,
    )


def fatal_error(space: Space, records: Records, since: int = 0) -> BstuneError | None:
    """The error that ends a study; None: it goes on.

    It is that of three failed trials in a row at sizes at which another trial has trained. While no
    size has trained, it is that of three trials that failed or were refused, or of the smallest
    size where memory is short for that.

    Args:
        space: of the study.
        records: of all finished trials.
        since: the number of the first trial that counts as a failure.
    """
    trained = trained_sizes([record for record in records if record.status != "failed"])
    recent = [record for record in records if record.number >= since]
    failures: list[str] = []
    for record in recent:
        if not trained:
            if record.status == "out of memory" and record.batch_size == space.low:
                return InputError(record.message)
            if record.status in ("failed", "refused"):
                failures.append(record.message)
        elif record.batch_size in trained:
            if record.status == "failed":
                failures.append(record.message)
            else:
                failures.clear()
    if len(failures) < FAILURES:
        return None
    return UserCodeError(failures[-1])
