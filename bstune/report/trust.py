"""How far the parts of an answer can be trusted: its curve, its winner's seeds, its timings."""

import math
from dataclasses import dataclass

from bstune.report.words import fresh_text, sizes_that_reached
from bstune.result import MAXIMAL_DATA_PARALLELISM, PERFECT_SCALING, StudyResult
from bstune.system.console import format_count, format_number, plural

# An interval of B_crit is good if its upper end is at most this many times its lower one.
GOOD_INTERVAL = 3.0
# Timings are noisy if the relative error of a step's seconds is larger than this.
NOISY_ERROR = 0.1
# From this factor on, the winner's own seconds and those that were timed are told apart.
APART_FROM_SURVEY = 1.5
# A machine is busy if timed steps wait for a processor for a larger share of the time than this.
BUSY_SHARE = 0.1


@dataclass(frozen=True)
class Trust:
    """How far one part of the answer can be trusted."""

    name: str
    """``range`` of the curve, its ``coverage``, ``seeds`` or ``noise``."""
    text: str
    """How well that part is known, in words."""
    good: bool
    """Whether that is good enough to rely on."""


def trust(result: StudyResult) -> tuple[Trust, ...]:
    """Judge how far the parts of the answer can be trusted. Parts that it lacks are left out."""
    parts = (
        _trust_in_range(result),
        _trust_in_coverage(result),
        _trust_in_seeds(result),
        trust_in_timing(result),
    )
    return tuple(part for part in parts if part)


def _trust_in_range(result: StudyResult) -> Trust | None:
    """Judge the curve by its batch sizes, and by how narrow the interval of B_crit is.

    None where fewer than two batch sizes reached the target.
    """
    critical = result.critical_batch_size
    if critical is None or critical.is_of_one_size:
        return None
    sizes = sizes_that_reached(result)
    count = plural(len(sizes), "size")
    seen = f"curve: {count} over {format_count(min(sizes))} to {format_count(max(sizes))}"
    if critical.low is None or critical.high is None:
        return Trust("range", f"{seen}, an open interval", good=False)
    if critical.high <= GOOD_INTERVAL * critical.low:
        return Trust("range", f"{seen}, good", good=True)
    ratio = format_number(critical.high / critical.low, 2)
    return Trust("range", f"{seen}, an interval of {ratio} times", good=False)


def _trust_in_coverage(result: StudyResult) -> Trust | None:
    """Judge whether trials saw both ends of the curve: perfect scaling, and where it is flat.

    None where B_crit is not known.
    """
    if result.critical_batch_size is None or result.critical_batch_size.value is None:
        return None
    missing = list[str]()
    if not result.has_regime(PERFECT_SCALING):
        missing.append("small")
    if not result.has_regime(MAXIMAL_DATA_PARALLELISM):
        missing.append("large")
    if not missing:
        return Trust("coverage", "both its ends seen", good=True)
    if len(missing) == 1:
        return Trust("coverage", f"its {missing[0]} end not seen", good=False)
    return Trust("coverage", "neither end seen", good=False)


def _trust_in_seeds(result: StudyResult) -> Trust | None:
    """Judge the winner by its fresh seeds. None without a winner."""
    if result.winner is None:
        return None
    text = "winner not run again"
    is_good = False
    fresh = result.winner.confirmed
    if fresh is not None:
        text = f"winner: {fresh_text(fresh)}"
        is_good = fresh.all_reached
    if result.seed_scatter is not None:
        text += f", steps scatter by {result.seed_scatter.scatter:.0%}"
    return Trust("seeds", text, is_good)


def _meaning_for_use(result: StudyResult) -> str:
    """Say what an error of a step's seconds means for those of USE.

    It is empty where USE has no seconds.
    """
    winner = result.winner
    if winner is None:
        return ""
    if winner.confirmed is None:
        return "" if winner.time_to_target is None else ", and those predicted for USE no better"
    # The interval holds the error. Seeds that all missed the target have none.
    low, _ = winner.confirmed.interval_by("time")
    return "" if low is None else ", as USE's interval says"


def trust_in_timing(result: StudyResult) -> Trust | None:
    """Judge how well the seconds of a step are known. None where steps were not timed."""
    timing = result.timing
    if timing is None:
        return None
    error = f"a step's seconds are known to {timing.relative_error:.0%}"
    if timing.not_told_apart:
        sizes = " and ".join(map(format_count, timing.not_told_apart))
        error += f", too little to tell USE from batch size {sizes}"
    # A busy machine is told apart from timings that are noisy by themselves.
    if timing.waited > BUSY_SHARE:
        waited = f"timed steps waited for a processor {timing.waited:.0%} of the time"
        busy = f"the machine was busy: {waited}, which is left out"
        # What slows all batch sizes alike does not change a ratio of two of them.
        of_gain = ""
        if result.gain is not None and result.gain.merit == "time":
            of_gain = "; GAIN's counts the part that differs between its two batch sizes"
        return Trust("noise", f"{busy}; {error}{_meaning_for_use(result)}{of_gain}", good=False)
    own = timing.own_over_timed
    # What a survey timed is what a quiet machine takes; the user waited for the runs themselves.
    if own is not None and abs(math.log(own)) > math.log(APART_FROM_SURVEY):
        text = f"the runs of USE took {format_number(own, 2)} times the seconds that were timed"
        busier = "they ran" if own > 1.0 else "steps were timed"
        why = f"the machine was busier while {busier}, or steps change their cost while they train"
        return Trust("noise", f"{text}: {why}; {error}", good=False)
    if timing.relative_error > NOISY_ERROR or timing.not_told_apart:
        # Seconds that trials measured themselves cannot be measured anew, so this says what their
        # error means for USE. After a survey it is left out: the caution names the option that
        # times the steps anew.
        of_use = "" if timing.surveyed else _meaning_for_use(result)
        return Trust("noise", f"timings are noisy: {error}{of_use}", good=False)
    return Trust("noise", f"timings: {error}", good=True)
