"""The fit of the curve to points alone, in words: a sentence and a small table."""

from bstune.core.curve import CurveFit
from bstune.report.words import span_text
from bstune.system.console import format_number


def fit_lines(fit: CurveFit) -> list[str]:
    """Write a fit in lines: the critical batch size in a sentence, then the other values."""
    value = fit.critical_batch_size
    span = span_text(fit.critical_batch_size_low, fit.critical_batch_size_high, fit.level, digits=4)
    sentence = f"The critical batch size is undetermined ({span})."
    if value is not None:
        sentence = f"The critical batch size is {format_number(value)} examples ({span})."
    lines = [sentence]
    if fit.note is not None:
        lines.append(f"{fit.note[0].upper()}{fit.note[1:]}.")
    rows = (
        ("fewest steps", fit.s_min),
        ("fewest examples", fit.e_min),
        ("batch size with the fewest examples", fit.b_opt),
        ("perfect scaling below", fit.perfect_scaling_below),
        ("maximal data parallelism above", fit.maximal_data_parallelism_above),
        ("noise of the logarithm of the steps", fit.noise),
    )
    lines.append("")
    for name, number in rows:
        if number is not None:
            lines.append(f"{name:<38}{format_number(number)}")
    lines.append(f"{'law':<38}{len(fit.points)} points, {fit.law}")
    return lines
