"""How a trial ends, trained or replayed, and between which steps it met its target."""

from bstune.core.records import Status


def status_at(
    steps: int, last_step: int, has_reached: bool, has_diverged: bool = False
) -> Status | None:
    """Decide how a trial ends at an evaluation; None: it goes on.

    Args:
        steps: the steps applied so far.
        last_step: the step after which its budget is spent.
        has_reached: whether the evaluation met the target.
        has_diverged: whether the training is lost, whatever the evaluation says.
    """
    if has_diverged:
        return "diverged"
    if has_reached:
        return "reached"
    if steps >= last_step:
        return "stopped"
    return None


def steps_low_of(status: Status | None, steps: int, last_missed: int) -> int:
    """Bound a trial's steps to the target from below: the last step known to have missed it.

    Args:
        status: of the trial; None: it goes on.
        steps: the steps applied so far. Where the target is not reached, all of them missed it.
        last_missed: step of the last evaluation that missed the target, 0 if none did.
    """
    if status == "reached":
        return last_missed
    return steps
