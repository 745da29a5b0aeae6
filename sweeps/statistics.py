"""Tests of measurements: triplets of batch sizes over rounds, and pairs of values by seed.

Is one batch size off the line through its neighbours? A round times each batch size once. In a
round the contrast of a triplet P - 1, P, P + 1 is c = log tau(P) - (log tau(P - 1) + log tau(P +
1)) / 2, with tau the seconds per step. For tau = alpha + beta B it is -log(1 - x^2)/2 with x =
beta/(alpha + beta P) <= 1/P: under 4e-5 from P = 120 on. A disturbance of a whole round, such as a
machine that is slower for a while, drops out too. So a mean over rounds that is not 0 is the batch
size's own.

Two assumptions: rounds are independent, and a disturbance of a visit does not depend on its batch
size. Hence the shuffled order.
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
    # The middles P of the triplets P - 1, P, P + 1 that lie below the ceiling or end at it.
    centres: tuple[int, ...]
    # The largest batch size that fits.
    ceiling: int
    # The largest power of two below the ceiling.
    power: int
    # Batch sizes that were asked for, but are over the ceiling.
    left_out: tuple[int, ...]


@dataclass(frozen=True)
class Effect:
    """The mean of contrasts over rounds, as a share: 0.01 is a step that takes 1% longer."""

    name: str
    # The centres of the triplets that it rests on.
    centres: tuple[int, ...]
    rounds: int
    # exp(mean contrast) - 1.
    mean: float
    # The ends of its interval, by Student's t, not corrected for the number of effects.
    low: float
    high: float
    # The p-value of the one-sample t-test against 0.
    p: float
    # p after Holm's correction; p itself where there was none.
    corrected: float


def is_power_of_two(number: int) -> bool:
    """Tell whether a positive number is 1, 2, 4, 8, ..."""
    return number > 0 and number & (number - 1) == 0


def choose_batch_sizes(alone: Iterable[int], centres: Iterable[int], ceiling: int) -> Choice:
    """Choose the batch sizes to measure, up to ``ceiling``, the largest that fits into memory.

    They are those in ``alone``, a triplet P - 1, P, P + 1 around each P of ``centres``, one more
    triplet around the largest power of two below the ceiling, and the ceiling itself.
    """
    alone = set(alone)
    centres = set(centres)
    if min(alone, default=1) < 1:
        raise ConfigError(f"sweep.experiment.batch_sizes must be positive, but got {sorted(alone)}")
    unusable = [centre for centre in sorted(centres) if centre < 2 or not kind_of_size(centre)]
    if unusable:
        raise ConfigError(
            f"sweep.experiment.centres must be powers of two or multiples of {ALIGNED}, and at "
            f"least 2, but got {unusable}"
        )
    if ceiling < 3:
        raise HardwareError(
            f"the ceiling is {ceiling}: below it there is no power of two with two neighbours; "
            "give the training more memory, or a smaller model"
        )
    # The largest power of two below the ceiling, not the ceiling itself: a centre has an upper
    # neighbour, which must fit, too.
    power = 1 << ((ceiling - 1).bit_length() - 1)
    # The upper neighbour of a centre below the ceiling is the ceiling at most.
    fitting = {centre for centre in centres if centre < ceiling} | {power}
    asked_sizes = alone | triplets(centres | {power}) | {ceiling}
    sizes = {size for size in alone if size <= ceiling} | triplets(fitting) | {ceiling}
    return Choice(
        sizes=tuple(sorted(sizes)),
        centres=tuple(sorted(fitting)),
        ceiling=ceiling,
        power=power,
        left_out=tuple(sorted(asked_sizes - sizes)),
    )


def triplets(centres: Iterable[int]) -> set[int]:
    """Give the batch sizes of the triplets around ``centres``: P - 1, P and P + 1 of each P."""
    sizes = set[int]()
    for centre in centres:
        sizes.update(_triplet(centre))
    return sizes


def _triplet(centre: int) -> tuple[int, int, int]:
    """Give a batch size between its two neighbours."""
    return centre - 1, centre, centre + 1


def kind_of_size(size: int) -> str:
    """Give ``power of two``, else ``multiple of 8``, else an empty text."""
    if is_power_of_two(size):
        return "power of two"
    if size % ALIGNED == 0:
        return f"multiple of {ALIGNED}"
    return ""


def contrasts(seconds: Mapping[int, Sequence[float]], centre: int) -> Array:
    """Give the contrast of a triplet in every round, (rounds,), from the seconds by batch size.

    The triplet is a batch size ``centre`` with its two neighbours. Its contrast is the log of the
    centre's seconds over the geometric mean of the neighbours'.
    """
    # (3, rounds): a row for each of the three batch sizes.
    of_triplet = np.array(list(map(seconds.__getitem__, _triplet(centre))), dtype=np.float64)
    if not np.all(np.isfinite(of_triplet) & (of_triplet > 0.0)):
        raise HardwareError(
            f"a contrast needs positive seconds, but got {of_triplet.ravel().tolist()} around "
            f"batch size {centre}: the clock is too coarse for such steps"
        )
    below, at_centre, above = np.log(of_triplet)
    return np.asarray(at_centre - (below + above) / 2.0)


def speed_gain(
    seconds: Mapping[int, Sequence[float]], from_size: int, to_size: int, level: float
) -> Effect:
    """Estimate the ratio of examples per second at ``to_size`` and ``from_size``, less 1.

    ``seconds`` has the seconds of a step in every round, by batch size; ``level`` is the nominal
    coverage of the effect's interval.
    """
    # They are paired by round: a disturbance of a whole round drops out.
    log_speed_to = np.log(to_size / np.array(seconds[to_size], dtype=np.float64))
    log_speed_from = np.log(from_size / np.array(seconds[from_size], dtype=np.float64))
    log_ratios = np.asarray(log_speed_to - log_speed_from)
    return estimate_effect(f"{to_size} over {from_size}", (to_size, from_size), log_ratios, level)


def off_the_line(
    seconds: Mapping[int, Sequence[float]], low: int, middle: int, high: int, level: float
) -> Effect:
    """Estimate the ratio of tau at ``middle`` and tau on the line through the two others, less 1.

    ``seconds`` has tau, the seconds of a step, in every round, by batch size; ``level`` is the
    nominal coverage of the effect's interval.
    """
    low_seconds = np.array(seconds[low], dtype=np.float64)
    middle_seconds = np.array(seconds[middle], dtype=np.float64)
    high_seconds = np.array(seconds[high], dtype=np.float64)
    line = low_seconds + (high_seconds - low_seconds) * (middle - low) / (high - low)
    log_ratios = np.asarray(np.log(middle_seconds / line))
    return estimate_effect(f"{middle} between {low} and {high}", (middle,), log_ratios, level)


def estimate_effect(name: str, centres: Sequence[int], log_ratios: Array, level: float) -> Effect:
    """Give the mean, the interval and the test of an effect.

    Args:
        name: of the effect.
        centres: the batch sizes that it is about.
        log_ratios: the log of a ratio for each round, of two rounds or more.
        level: the nominal coverage of the interval, between 0 and 1.

    Returns:
        The effect, whose p is not corrected: :func:`holm_corrected` corrects those of several
        effects.
    """
    # Student's t divides by the scatter.
    if np.ptp(log_ratios) == 0.0:
        raise HardwareError(
            f"{name}: all {len(log_ratios)} rounds took the same time to the last digit: the clock "
            "is too coarse"
        )
    test = stats.ttest_1samp(log_ratios, 0.0)
    interval = test.confidence_interval(level)
    p = float(test.pvalue)
    # An effect has a ratio less 1 in place of its logarithm.
    return Effect(
        name=name,
        centres=tuple(centres),
        rounds=len(log_ratios),
        mean=math.expm1(float(log_ratios.mean())),
        low=math.expm1(float(interval.low)),
        high=math.expm1(float(interval.high)),
        p=p,
        corrected=p,
    )


def triplet_effects(
    seconds: Mapping[int, Sequence[float]], centres: Sequence[int], level: float
) -> tuple[Effect, ...]:
    """Test the effects of each triplet, of all powers of two and of all multiples of 8 together.

    A triplet is one of ``centres`` and its two neighbours. Together means the mean contrast of each
    round, so n stays the number of rounds: triplets of one round are not independent. A group of
    one triplet, or of the same triplets as another group, is left out. The p-values are corrected
    for the number of all effects, since the finding names each significant one.
    """
    by_centre = dict[int, Array]()
    powers = list[int]()
    aligned = list[int]()
    tested = list[Effect]()
    for centre in centres:
        by_centre[centre] = contrasts(seconds, centre)
        if is_power_of_two(centre):
            powers.append(centre)
        if centre % ALIGNED == 0:
            aligned.append(centre)
        name = f"{centre} ({kind_of_size(centre)})"
        tested.append(estimate_effect(name, [centre], by_centre[centre], level))
    groups = [("powers of two together", powers)]
    if aligned != powers:
        groups.append((f"multiples of {ALIGNED} together", aligned))
    for name, members in groups:
        if len(members) > 1:
            # A round gives one mean: its triplets share the disturbances of the round.
            together = np.mean(list(map(by_centre.__getitem__, members)), axis=0)
            tested.append(estimate_effect(name, members, together, level))
    corrected = holm_corrected([effect.p for effect in tested])
    with_correction = list[Effect]()
    for effect, p in zip(tested, corrected, strict=True):
        with_correction.append(replace(effect, corrected=p))
    return tuple(with_correction)


def holm_corrected(p: Sequence[float]) -> list[float]:
    """Give p-values corrected for their number, in the order of ``p``.

    Holm 1979, Scand. J. Statist. 6, 65-70: of m p-values the k-th smallest becomes m - k + 1 times
    itself, at most 1, and at least the corrected value of the one before. It holds whatever the
    dependence between the tests.
    """
    order = sorted(range(len(p)), key=lambda i: p[i])
    corrected = [0.0] * len(p)
    least = 0.0
    # They are corrected from the smallest one on, so that none ends below one that was smaller
    # before.
    for rank, i in enumerate(order):
        least = max(least, min(1.0, (len(p) - rank) * p[i]))
        corrected[i] = least
    return corrected


@dataclass(frozen=True)
class Difference:
    """The mean of paired differences, with its interval.

    The mean is None without pairs. The interval and p are None for fewer than two.
    """

    pairs: int
    mean: float | None
    low: float | None
    high: float | None
    # The p-value of the paired t-test against 0.
    p: float | None


NO_PAIRS = Difference(pairs=0, mean=None, low=None, high=None, p=None)


def compare_pairs(
    before: Mapping[int, float | None], after: Mapping[int, float | None], level: float
) -> Difference:
    """Give the mean difference of values after and before, paired by seed, with Student's interval.

    A seed counts if it has both values. ``level`` is the nominal coverage of the interval.
    """
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
        return Difference(pairs=len(pairs), mean=mean, low=None, high=None, p=None)
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
