"""AS GOOD: the batch sizes that take nearly as little as the best one."""

import math
from collections.abc import Iterator

from bstune.report.words import beyond_text, memory_text, sizes_that_reached
from bstune.result import StudyResult
from bstune.system.console import format_count, format_number, plural

# Of so few batch sizes that reached the target none shows that others are worse. In each of 16
# studies of 8 trials on recorded tables (4 tables, 1 to 4 such sizes), a batch size outside the
# predicted range, within an octave of USE's, took at most 1.1 times USE's time.
FEW_SIZES = 4


def as_good(result: StudyResult) -> Iterator[str]:
    """Give the batch sizes that are nearly as good as the best one, as a range.

    The smallest one that ran out of memory bounds what can be used.
    """
    for text in _sizes_as_good(result):
        yield text + memory_text(result)


def _sizes_as_good(result: StudyResult) -> Iterator[str]:
    """Give the range, or say why there is none."""
    nearly_best = result.as_good
    if nearly_best is None or result.winner is None:
        return
    least = "least number of steps"
    if nearly_best.merit == "time":
        least = "least time"
    within = f"within {nearly_best.within:.0%} of the {least}"
    if result.configurations == 1:
        yield "not known: no other batch size was tried"
        return
    critical = result.critical_batch_size
    if critical is not None and critical.is_of_one_size:
        only_size = format_count(result.winner.batch_size)
        yield f"not known, as batch size {only_size} alone reached the target"
        return
    # The range is USE's size alone: sizes near it count as USE's.
    if nearly_best.low == nearly_best.high:
        sizes_reached = sizes_that_reached(result)
        if len(sizes_reached) <= FEW_SIZES:
            # The smallest and the largest size may share a half octave with another one.
            half_octaves = {math.floor(2.0 * math.log2(size)) for size in sizes_reached}
            count = plural(len(half_octaves), "half octave")
            yield f"not known, as the target was reached within {count} of B alone"
            return
        yield f"no batch size but about USE's is predicted {within}"
        return
    # A middle that is one of the ends is listed once.
    lr_of_size = {
        nearly_best.low: nearly_best.lr_low,
        nearly_best.middle: nearly_best.lr_middle,
        nearly_best.high: nearly_best.lr_high,
    }
    # USE's rate has run; the others are those predicted to be best. Where USE's lies off their
    # trend, it is marked as its own.
    values = list(lr_of_size.values())
    is_monotone = values in (sorted(values), sorted(values, reverse=True))
    rates = list[str]()
    for size, lr in lr_of_size.items():
        rate = f"{format_number(lr, 3)} at {format_count(size)}"
        if size == result.winner.batch_size and not is_monotone:
            rate = f"USE's own {rate}"
        rates.append(rate)
    sizes = f"batch sizes {format_count(nearly_best.low)} to {format_count(nearly_best.high)}"
    beyond = beyond_text(nearly_best.is_low_open, nearly_best.is_high_open, "are not known")
    yield f"{sizes}, predicted {within}; learning rate {', '.join(rates)}{beyond}"
