"""One line on what a training came to, and whether that meets the target."""

from bstune.core.records import Target
from bstune.system.console import format_number, plural

# A value that just misses the target must not look like it.
DIGITS = 6


def outcome_line(target: Target, value: float | None, steps: int) -> str:
    """Say what a training came to, and whether it meets the target, where that has a value.

    Args:
        target: of the study.
        value: of its metric at the end; None: it is not finite, or was not logged.
        steps: of the training.
    """
    came_to = "has no value" if value is None else format_number(value, DIGITS)
    line = f"{target.metric} {came_to} after {plural(steps, 'step')}"
    if target.is_open:
        return line
    is_met = value is not None and target.reached(value)
    verdict = "meets" if is_met else "misses"
    return f"{line}: it {verdict} the target, {target}"
