"""Whether the critical batch sizes of two studies differ.

The studies are independent. The posterior of log B_crit is taken to be normal on either side of its
median, as wide as the interval says. So the ratio of two has an interval, from the halves that face
each other, and they differ where it leaves out 1. Of several pairs each gets its share of the error
(Bonferroni): all the intervals hold together at the stated level. Where an interval is open two
studies are said to differ only if the intervals do not overlap.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import NormalDist

from bstune.report.compared_study import Compared
from bstune.system.console import format_number

# The level at which the intervals of all ratios hold together.
RATIO_LEVEL = 0.9
# The chance of an error is a sum of floats, which may lie this much above what it is compared with.
ERROR_ROUNDING = 1e-9


@dataclass(frozen=True)
class Pair:
    """The critical batch sizes of two studies, and whether they differ."""

    larger: str
    """Name of the study with the larger critical batch size."""
    smaller: str
    """Name of the study with the smaller one."""
    ratio: float | None
    """The larger over the smaller; None where one of them is not known."""
    low: float | None
    """Lower end of the ratio's interval; None where it is open."""
    high: float | None
    """Upper end of the ratio's interval; None where it is open."""
    differ: bool | None
    """Whether they differ; None where it is not known."""
    unlike: tuple[str, ...] = ()
    """What else differs that a critical batch size depends on: ``workload``, ``target``."""

    @property
    def interval(self) -> str:
        """The interval of the ratio, in words."""
        if self.low is None and self.high is None:
            return "open"
        # Three digits tell a ratio of 1.04 from 1.
        low = format_number(self.low, 3)
        high = format_number(self.high, 3)
        if self.high is None:
            return f"above {low}"
        if self.low is None:
            return f"below {high}"
        return f"{low} to {high}"

    @property
    def verdict(self) -> str:
        """Whether the two critical batch sizes differ, in words."""
        if self.differ is None:
            return "not known"
        if self.differ:
            return "differ"
        return "not shown to differ"

    def __str__(self) -> str:
        """Write ``a over b: 2.9 times (1.6 to 5.1), differ``."""
        studies = f"{self.larger} over {self.smaller}"
        verdict = self.verdict
        if self.unlike:
            verdict += f" (another {' and another '.join(self.unlike)})"
        if self.ratio is not None:
            ratio = format_number(self.ratio, 2)
            return f"{studies}: {ratio} times ({self.interval}), {verdict}"
        if self.low is not None:
            return f"{studies}: {self.interval} times, {verdict}"
        return f"{studies}: {verdict}"


def compared_pairs(studies: Sequence[Compared], level: float = RATIO_LEVEL) -> list[Pair]:
    """Compare the critical batch sizes of each two studies: their ratio, with its interval.

    ``level`` is the chance that all the intervals hold the truth together.
    """
    both = list(combinations(studies, 2))
    # Bonferroni: each pair gets its share of the error.
    return [_compared_pair(first, second, (1.0 - level) / len(both)) for first, second in both]


def _compared_pair(first: Compared, second: Compared, error: float) -> Pair:
    """Compare the critical batch sizes of two studies, the larger one first.

    ``error`` is the chance that the interval of their ratio leaves out the truth.
    """
    large, small = sorted((first, second), key=_known_size, reverse=True)
    ratio: float | None = None
    high: float | None = None
    if large.b_crit is None or small.b_crit is None:
        low = _least_ratio(large, small, error)
        # Only intervals that do not overlap have a least ratio: then the two differ.
        differ = None if low is None else True
    else:
        ratio = large.b_crit / small.b_crit
        low, high = _ratio_interval(large, small, ratio, error)
        differ = None if low is None else low > 1.0
    return Pair(
        larger=large.name,
        smaller=small.name,
        ratio=ratio,
        low=low,
        high=high,
        differ=differ,
        unlike=_unlike(large, small),
    )


def _ratio_interval(
    large: Compared, small: Compared, ratio: float, error: float
) -> tuple[float | None, float | None]:
    """Give the ends of the interval of ``ratio``, that of two critical batch sizes.

    None for an end that an open end of the studies' own intervals leaves open. ``error``: the
    chance that the interval leaves out the truth.
    """
    # The ratio is least with the larger size at the low end of its interval and the smaller size at
    # its high end. Deviations are of the logarithm.
    deviation_below = _joint_deviation(
        _log_deviation(large.b_crit_low, large.b_crit, large.level),
        _log_deviation(small.b_crit, small.b_crit_high, small.level),
    )
    deviation_above = _joint_deviation(
        _log_deviation(large.b_crit, large.b_crit_high, large.level),
        _log_deviation(small.b_crit_low, small.b_crit, small.level),
    )
    low: float | None = None
    if deviation_below is not None:
        low = ratio * math.exp(-_normal_quantile(error) * deviation_below)
    high: float | None = None
    if deviation_above is not None:
        high = ratio * math.exp(_normal_quantile(error) * deviation_above)
    return low, high


def _unlike(one: Compared, other: Compared) -> tuple[str, ...]:
    """Name the differences of two studies by which critical batch sizes may differ, too.

    These are the workload and the target. A critical batch size does not depend on the device.
    """
    unlike = list[str]()
    if one.workload != other.workload:
        unlike.append("workload")
    if one.target != other.target:
        unlike.append("target")
    return tuple(unlike)


def _least_ratio(large: Compared, small: Compared, error: float) -> float | None:
    """Give the least ratio of two critical batch sizes whose intervals do not overlap.

    It is the lower end of the larger one over the upper end of the smaller one. None where the
    intervals overlap, one of these ends is open, or the chance that either end misses the truth is
    larger than ``error``.
    """
    low_end = large.b_crit_low
    high_end = small.b_crit_high
    # An interval misses the truth at either of its ends with chance (1 - level)/2: this is the sum
    # for two ends.
    missed = 1.0 - (large.level + small.level) / 2.0
    if low_end is None or high_end is None or missed > error + ERROR_ROUNDING:
        return None
    if low_end <= high_end:
        return None
    return low_end / high_end


def _known_size(study: Compared) -> float:
    """Give B_crit or, where it is not known, an end of its interval. 0 where both ends are open."""
    return study.b_crit or study.b_crit_low or study.b_crit_high or 0.0


def _log_deviation(low: float | None, high: float | None, level: float) -> float | None:
    """Give the standard deviation of log B_crit on one side of its median.

    ``low`` and ``high`` are the median and the interval's end on that side, the smaller one first.
    None where that end is open.
    """
    if low is None or high is None:
        return None
    # Each side is taken as half of a normal posterior of log B_crit.
    return math.log(high / low) / _normal_quantile(1.0 - level)


def _joint_deviation(first: float | None, second: float | None) -> float | None:
    """Give the standard deviation of the difference of two independent values, from their own.

    None where one of these is not known.
    """
    if first is None or second is None:
        return None
    return math.hypot(first, second)


def _normal_quantile(error: float) -> float:
    """Give the half width of an interval around the median of a normal distribution.

    It is in standard deviations. The interval misses the truth with the chance ``error``.
    """
    return NormalDist().inv_cdf(1.0 - error / 2.0)
