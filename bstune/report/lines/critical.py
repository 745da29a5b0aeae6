"""CRITICAL: the critical batch size, its regimes, how it grows with the target, the noise scale."""

from collections.abc import Iterator

from bstune.report.words import b_opt_text, critical_text
from bstune.result import (
    MAXIMAL_DATA_PARALLELISM,
    PERFECT_SCALING,
    CriticalBatchSize,
    Growth,
    StudyResult,
)
from bstune.system.console import format_count, format_number


def critical_lines(result: StudyResult) -> Iterator[str]:
    """Give the critical batch size, its regimes, its growth with the target, the noise scale."""
    critical = result.critical_batch_size
    if critical is None:
        return
    if critical.is_of_one_size:
        size = format_count(critical.smallest)
        yield f"not known, as batch size {size} alone reached the target"
        return
    text = f"batch size {critical_text(critical)}"
    if result.tokens is not None and critical.value is not None:
        # The number is written in full, yet to no more digits than the batch size is known to.
        rounded = float(format_number(critical.value * result.tokens, 2))
        text += f", {format_count(rounded)} tokens"
    yield text
    # The regimes are bounded by multiples of B_crit.
    if critical.value is not None:
        yield regimes_text(result, critical)
    if critical.b_opt is not None:
        opt = f"{format_number(critical.b_opt, 2)} ({b_opt_text(critical)})"
        yield f"fewest examples at batch size {opt}; smaller batches need more of them"
    if result.over_target_growth is not None:
        yield growth_text(result.over_target_growth, result.metric)
    noise = result.noise_scale
    if noise is not None and noise.noise_scale is not None:
        low = format_number(noise.low, 2)
        high = format_number(noise.high, 2)
        value = format_number(noise.noise_scale, 2)
        yield f"gradient noise scale {value} ({noise.level:.0%}: {low} to {high}), a hint at it"


def growth_text(growth: Growth, metric: str) -> str:
    """Write how B_crit changes with the target: as a power of the metric.

    ``rises as the target gets harder: as val/loss^-4.3 (90%: -5.1 to -3.5) from 2.6 to 2``
    """
    # The base of the power falls as the target gets harder, so a negative exponent means a rise.
    how = "shows no sure change"
    if growth.high < 0.0:
        how = "rises"
    elif growth.low > 0.0:
        how = "falls"
    base = metric
    if growth.ideal != 0.0:
        base = f"|{metric} - {growth.ideal:g}|"
    interval = f"{growth.level:.0%}: {growth.low:z.1f} to {growth.high:z.1f}"
    span = f"from {format_number(growth.start)} to {format_number(growth.end)}"
    return f"{how} as the target gets harder: as {base}^{growth.exponent:z.1f} ({interval}) {span}"


def regimes_text(result: StudyResult, critical: CriticalBatchSize) -> str:
    """Write up to where twice the batch halves the steps, and from where on it gains nothing.

    If no trial was in one of these two regimes, the text says that it is not shown.
    """
    below = format_number(critical.perfect_scaling_below, 2)
    above = format_number(critical.maximal_data_parallelism_above, 2)
    halves = f"below {below} twice the batch halves the steps"
    span = f"{format_count(critical.smallest)} to {format_count(critical.largest)}"
    is_small_seen = result.has_regime(PERFECT_SCALING)
    is_large_seen = result.has_regime(MAXIMAL_DATA_PARALLELISM)
    if is_small_seen and is_large_seen:
        return f"{halves}; above {above} it gains nothing"
    if is_small_seen:
        return f"{halves}; sizes {span} do not show where it gains nothing"
    if is_large_seen:
        gains = f"above {above} a larger batch gains nothing"
        return f"{gains}; sizes {span} do not show where it halves the steps"
    return (
        f"sizes {span} do not show where twice the batch halves the steps or where it gains nothing"
    )
