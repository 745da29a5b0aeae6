"""LR: how the best learning rate grows with the batch size, and which scaling rules fit."""

from collections.abc import Iterator, Mapping

from bstune.core.scaling import RULES
from bstune.result import Exponent, StudyResult
from bstune.system.console import plural


def lr_growth(result: StudyResult) -> Iterator[str]:
    """Tell how the best learning rate grew with the batch size, and which scaling rules fit.

    ``grew as B^0.22 (0.16 to 0.27): slower than the square root``
    """
    law = result.lr_exponent
    if result.winner is None or law is None:
        return
    text = _exponent_text(law)
    below = law.below_b_crit
    # Where no trial lies beyond B_crit, the exponent up to there is the one that is told already.
    if law.identified and below is not None and below.identified and below.end < law.end:
        text += f"; up to the critical batch size {_exponent_text(below)}"
    yield text


def _exponent_text(law: Exponent) -> str:
    """Write an exponent with its interval and the rules that fit it, or why it is not known."""
    if not law.identified:
        seen = f"{plural(law.reached, 'trial')} over {law.octaves:.1f} octaves of batch size"
        return f"not known: {seen} reached the target"
    verb = "fell" if law.exponent < 0.0 else "grew"
    power = f"{verb} as B^{law.exponent:z.2f} ({law.low:z.2f} to {law.high:z.2f})"
    if not law.rules:
        return power
    return f"{power}: {fitting_rules_text(law.low, law.high, law.rules)}"


def fitting_rules_text(low: float, high: float, exponents: Mapping[str, float]) -> str:
    """Write which scaling rules fit the interval of an exponent.

    Such as ``slower than linear``. ``exponents``: by a rule's name, the power of B by which it
    grows over the study's batch sizes. Rules that are no power of B have one there, too.
    """
    # The words below go from the slowest growth to the fastest.
    ordered = sorted(exponents.items(), key=lambda item: item[1])
    fitting = [RULES[name].words for name, exponent in ordered if low <= exponent <= high]
    if len(fitting) > 1:
        all_of_them = "both" if len(fitting) == 2 else "all"
        return f"{', '.join(fitting[:-1])} and {fitting[-1]} {all_of_them} fit"
    if fitting:
        return f"{fitting[0]} fits"
    # Where no rule fits, the exponent is told by its neighbours among the rules that are powers of
    # B, which everybody knows.
    below = list[str]()
    above = list[str]()
    for name, exponent in ordered:
        if RULES[name].exponent is None:
            continue
        if exponent < low:
            below.append(name)
        else:
            above.append(name)
    if not above:
        return f"faster than {RULES[below[-1]].words}"
    # "faster than a constant rate" says nothing: where no other rule grows more slowly, the upper
    # neighbour alone is named.
    if not below or below[-1] == "none":
        return f"slower than {RULES[above[0]].words}"
    return f"between {RULES[below[-1]].words} and {RULES[above[0]].words}"
