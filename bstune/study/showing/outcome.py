"""One line on what a training came to, and whether that meets the target."""

from bstune.core.records import Target
from bstune.system.console import format_number, plural

# A value that just misses the target must not look like it.
DIGITS = 6


def outcome_line(target: Target, value: float | None, steps: int) -> str:
    """Say what a training came to, and whether it meets the target, where both have a value.

    Args:
        target: of the study.
        value: of its metric at the end; None: it is not finite, or was not logged.
        steps: of the training.
    """
    if value is None:
        return f"{target.metric} has no value after {plural(steps, 'step')}"
    line = f"{target.metric} {format_number(value, DIGITS)} after {plural(steps, 'step')}"
    if target.is_open:
        return line
    verdict = "meets" if target.reached(value) else "misses"
    return f"{line}: it {verdict} the target, {target}"
