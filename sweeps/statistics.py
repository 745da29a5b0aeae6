"""Tests of what was measured: triplets of batch sizes over rounds, and pairs of values by seed.

Is one batch size off the line through its neighbours? Of a triplet P - 1, P, P + 1 the contrast of
a round is c = log tau(P) - (log tau(P - 1) + log tau(P + 1)) / 2, with tau the seconds per step.
For tau = alpha + beta B it is -log(1 - x^2)/2 with x = beta/(alpha + beta P) <= 1/P: under 4e-5
from P = 120 on. What is common to a round, such as a machine that is slower for a while, drops out
too. So a mean over rounds that is not 0 is the batch size's own.

Assumed is that rounds are independent, and that what disturbs a visit knows nothing of its batch
size: hence the shuffled order.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from bstune.core.errors import ConfigError, HardwareError

Array = NDArray[np.float64]
QUARTILES = (0.25, 0.5, 0.75)
# The multiple that NVIDIA's guide to matrix products asks of 16-bit tensor cores.
ALIGNED = 8


@dataclass(frozen=True)
class Choice:
    """The batch sizes to measure, all rising."""

    sizes: tuple[int, ...]
    # Of the triplets P - 1, P, P + 1 that lie wholly below the ceiling or end at it.
    centres: tuple[int, ...]
    ceiling: int  # the largest batch size that fits
    power: int  # the largest power of two below it
    left_out: tuple[int, ...]  # asked for, but over the ceiling


@dataclass(frozen=True)
class Effect:
    """The mean of some contrasts over rounds, as shares: 0.01 is a step that takes 1% longer."""

    name: str
    centres: tuple[int, ...]  # of the triplets that it rests on
    rounds: int
    mean: float  # exp(mean contrast) - 1
    low: float  # ends of its interval, by Student's t, not corrected for the number of effects
    high: float
    p: float  # of the one-sample t-test against 0
    corrected: float  # p after Holm's correction; p itself where there was none


def is_power_of_two(number: int) -> bool:
    """Tell whether a positive number is 1, 2, 4, 8, ..."""
    return number > 0 and number & (number - 1) == 0


def choose_batch_sizes(alone: Iterable[int], centres: Iterable[int], ceiling: int) -> Choice:
    """Choose the batch sizes ``alone``, the triplets and the ceiling, each once, if they fit.

    One triplet more than asked for is around the largest power of two below the ceiling.
    """
    alone = set(alone)
    centres = set(centres)
    if min(alone, default=1) < 1:
        raise ConfigError(f"sweep.experiment.batch_sizes must be positive, but got {sorted(alone)}")
    odd = [centre for centre in sorted(centres) if centre < 2 or not kind(centre)]
    if odd:
        raise ConfigError(
            f"sweep.experiment.centres must be powers of two or multiples of {ALIGNED}, and at "
            f"least 2, but got {odd}"
        )
    if ceiling < 3:
        raise HardwareError(
            f"the ceiling is {ceiling}: below it there is no power of two with two neighbours; "
            "give the training more memory, or a smaller model"
        )
    # Below a ceiling that is a power of two itself: a centre needs an upper neighbour that fits.
    power = 1 << (ceiling - 1).bit_length() - 1
    # The upper neighbour of a centre below the ceiling is the ceiling at most.
    fitting = {centre for centre in centres if centre < ceiling} | {power}
    asked = alone | _triplets(centres | {power}) | {ceiling}
    sizes = {size for size in alone if size <= ceiling} | _triplets(fitting) | {ceiling}
    return Choice(
        sizes=tuple(sorted(sizes)),
        centres=tuple(sorted(fitting)),
        ceiling=ceiling,
        power=power,
        left_out=tuple(sorted(asked - sizes)),
    )


def _triplets(centres: Iterable[int]) -> set[int]:
    """Give the batch sizes of all the triplets."""
    sizes = set[int]()
    for centre in centres:
        sizes.update(_triplet(centre))
    return sizes


def _triplet(centre: int) -> tuple[int, int, int]:
    return centre - 1, centre, centre + 1


def kind(size: int) -> str:
    """Give ``power of two``, ``multiple of 8`` where it is that alone, or nothing."""
    if is_power_of_two(size):
        return "power of two"
    if size % ALIGNED == 0:
        return f"multiple of {ALIGNED}"
    return ""


def contrasts(seconds: Mapping[int, Sequence[float]], centre: int) -> Array:
    """Give c of every round, (rounds,), from tau of every round by batch size."""
    rounds = np.array(list(map(seconds.__getitem__, _triplet(centre))), dtype=np.float64)
    if not np.all(np.isfinite(rounds) & (rounds > 0.0)):
        raise HardwareError(
            f"a contrast needs positive seconds, but got {rounds.ravel().tolist()} around batch "
            f"size {centre}: the clock is too coarse for such steps"
        )
    below, at, above = np.log(rounds)
    return np.asarray(at - (below + above) / 2.0)


def speed_gain(
    seconds: Mapping[int, Sequence[float]], before: int, after: int, level: float
) -> Effect:
    """Compare examples per second at ``after`` with those at ``before``: their ratio less 1."""
    # Paired by round: what is common to a round drops out.
    log_after = np.log(after / np.array(seconds[after], dtype=np.float64))
    log_before = np.log(before / np.array(seconds[before], dtype=np.float64))
    ratios = np.asarray(log_after - log_before)
    return estimate(f"{after} over {before}", (after, before), ratios, level)


def off_the_line(
    seconds: Mapping[int, Sequence[float]], low: int, middle: int, high: int, level: float
) -> Effect:
    """Compare tau at a batch size with the one on the line through two others, less 1, by round."""
    below = np.array(seconds[low], dtype=np.float64)
    at = np.array(seconds[middle], dtype=np.float64)
    above = np.array(seconds[high], dtype=np.float64)
    line = below + (above - below) * (middle - low) / (high - low)
    ratios = np.asarray(np.log(at / line))
    return estimate(f"{middle} between {low} and {high}", (middle,), ratios, level)


def estimate(name: str, centres: Sequence[int], values: Array, level: float) -> Effect:
    """Give mean, interval and test of an effect.

    Args:
        name: of the effect.
        centres: the batch sizes that it is about.
        values: logs of ratios, one a round, of two rounds or more.
        level: of the interval.

    Returns:
        The effect, whose p is not corrected: :func:`holm` corrects those of several.
    """
    # Student's t divides by the scatter.
    if np.ptp(values) == 0.0:
        raise HardwareError(
            f"{name}: all {len(values)} rounds took the same time to the last digit: the clock is "
            "too coarse"
        )
    test = stats.ttest_1samp(values, 0.0)
    interval = test.confidence_interval(level)
    p = float(test.pvalue)
    return Effect(
        name=name,
        centres=tuple(centres),
        rounds=len(values),
        mean=math.expm1(float(values.mean())),
        low=math.expm1(float(interval.low)),
        high=math.expm1(float(interval.high)),
        p=p,
        corrected=p,
    )


def effects(
    seconds: Mapping[int, Sequence[float]], centres: Sequence[int], level: float
) -> tuple[Effect, ...]:
    """Test the effects of each triplet, of all powers of two and of all multiples of 8 together.

    Together means the mean contrast of a round, so n stays the number of rounds: triplets of one
    round are not independent. A group of one triplet, or of the same triplets as another one, is
    left out. The p-values are corrected for the number of all effects, since the finding names
    whichever of them is significant.
    """
    by_centre = dict[int, Array]()
    powers = list[int]()
    aligned = list[int]()
    found = list[Effect]()
    for centre in centres:
        by_centre[centre] = contrasts(seconds, centre)
        if is_power_of_two(centre):
            powers.append(centre)
        if centre % ALIGNED == 0:
            aligned.append(centre)
        name = f"{centre} ({kind(centre)})"
        found.append(estimate(name, [centre], by_centre[centre], level))
    groups = {
        tuple(aligned): f"multiples of {ALIGNED} together",
        tuple(powers): "powers of two together",
    }
    # By its members: where both groups are the same, the second name stands.
    for members, name in reversed(groups.items()):
        if len(members) > 1:
            # A mean a round: the triplets of a round share what disturbed it.
            together = np.mean(list(map(by_centre.__getitem__, members)), axis=0)
            found.append(estimate(name, members, together, level))
    corrected = holm([effect.p for effect in found])
    with_correction = list[Effect]()
    for effect, p in zip(found, corrected, strict=True):
        with_correction.append(replace(effect, corrected=p))
    return tuple(with_correction)


def holm(p: Sequence[float]) -> list[float]:
    """Give p-values corrected for their number, in their order; empty for none.

    Holm 1979, Scand. J. Statist. 6, 65-70: the k-th smallest of m times m - k + 1, at most 1, and
    none below a smaller one's. It holds whatever the dependence between the tests.
    """
    order = sorted(range(len(p)), key=lambda i: p[i])
    corrected = [0.0] * len(p)
    least = 0.0
    # From the smallest p on, so that none is below one that was smaller before the correction.
    for rank, i in enumerate(order):
        least = max(least, min(1.0, (len(p) - rank) * p[i]))
        corrected[i] = least
    return corrected


@dataclass(frozen=True)
class Difference:
    """A mean of paired differences, None for none; interval and p are None for fewer than two."""

    pairs: int
    mean: float | None
    low: float | None
    high: float | None
    p: float | None  # of the paired t-test against 0


NO_PAIRS = Difference(pairs=0, mean=None, low=None, high=None, p=None)


def compare_pairs(
    before: Mapping[int, float | None], after: Mapping[int, float | None], level: float
) -> Difference:
    """Compare values by seed, paired, by Student's t; a seed counts where both have a value."""
    pairs = list[tuple[float, float]]()
    for seed, value in after.items():
        value_before = before.get(seed)
        if value is not None and value_before is not None:
            pairs.append((value, value_before))
    if not pairs:
        return NO_PAIRS
    values, values_before = np.array(pairs, dtype=np.float64).T
    differences = values - values_before
    mean = float(np.mean(differences))
    if len(pairs) < 2:
        return Difference(len(pairs), mean, low=None, high=None, p=None)
    if np.ptp(differences) == 0.0:
        # Without any spread Student's t is not defined, and there is no doubt.
        p = 1.0
        if mean:
            p = 0.0
        return Difference(pairs=len(pairs), mean=mean, low=mean, high=mean, p=p)
    test = stats.ttest_rel(values, values_before)
    interval = test.confidence_interval(level)
    low = float(interval.low)
    high = float(interval.high)
    return Difference(pairs=len(pairs), mean=mean, low=low, high=high, p=float(test.pvalue))
