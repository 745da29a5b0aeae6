"""Questions about a target that may not be the one that was meant. They refuse nothing."""

from bstune.core.metric_names import fraction_meant, mode_of
from bstune.core.records import Target


def doubt_of_direction(target: Target) -> str | None:
    """Ask to check a target whose direction contradicts its metric's name; None where it does not.

    It is no refusal, as a name may mislead.
    """
    usual = mode_of(target.metric)
    if usual is None or usual == target.mode:
        return None
    verb = "fall"
    opposite = "rise"
    if usual == "max":
        verb = "rise"
        opposite = "fall"
    return (
        f"check the direction of {target.metric}: by its name it is to {verb}, and the study has "
        f"it {opposite}"
    )


def doubt_of_scale(target: Target, start: float | None) -> str | None:
    """Ask to check a target in percent of a metric that looks like a share; None without doubt.

    It is no refusal: a metric may begin at a share of one and rise to a hundred.

    Args:
        target: of the study.
        start: the metric before training; None where not known.
    """
    if start is None:
        return None
    fraction = fraction_meant(target, start, closest=start)
    if fraction is None:
        return None
    return (
        f"check the scale of {target.metric}: it starts at {start:.3g}, and its target is "
        f"{target.value:g}: if it is a fraction, {fraction:g} is meant"
    )
