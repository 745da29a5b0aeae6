"""How a trial ends, and between which steps it has met its target: one rule, whether it is trained or replayed."""

from bstune.core.records import Status


def status_at(
    steps: int, last_step: int, has_reached: bool, has_diverged: bool = False
) -> Status | None:
    """Say how a trial ends at an evaluation; None: it goes on.

    Args:
        steps: applied so far.
        last_step: after which its budget is spent.
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
    """Give the lower bound of a trial's steps to target.

    Args:
        status: of the trial; None: it goes on.
        steps: applied so far: all of them have missed the target where it is not reached.
        last_missed: step of the last evaluation that missed the target, 0 if none did.
    """
    if status == "reached":
        return last_missed
    return steps
