"""Triplets and their contrasts, the tests over rounds and over pairs, and Holm's correction."""

import math

import numpy as np
import pytest
from scipy import stats

from bstune.core.errors import HardwareError
from bstune.hardware.timing import visit_order
from bstune.sweeps.statistics import (
    Difference,
    choose_batch_sizes,
    compare_pairs,
    contrasts,
    estimate_effect,
    holm_corrected,
    kind_of_size,
    triplet_effects,
)

OVERHEAD, PER_EXAMPLE = 9e-3, 4.4e-4
NEAR = (100, 119, 120, 121, 127, 128, 129)


@pytest.mark.parametrize(
    ("ceiling", "power", "sizes", "centres", "left_out"),
    [
        (1163, 1024, (*NEAR, 156, 1023, 1024, 1025, 1163), (120, 128, 1024), ()),
        # near a power of two, or at one: nothing twice
        (1025, 1024, (*NEAR, 156, 1023, 1024, 1025), (120, 128, 1024), ()),
        (1024, 512, (*NEAR, 156, 511, 512, 513, 1024), (120, 128, 512), ()),
        # the power of two below it is one that is measured anyway
        (129, 128, NEAR, (120, 128), (156,)),
        # what does not fit
        (120, 64, (63, 64, 65, 100, 120), (64,), (119, 121, 127, 128, 129, 156)),
        (3, 2, (1, 2, 3), (2,), (100, 119, 120, 121, 127, 128, 129, 156)),
    ],
)
def test_batch_sizes_around_a_ceiling(ceiling, power, sizes, centres, left_out):
    choice = choose_batch_sizes([100, 156], [128, 120], ceiling)
    assert (choice.power, choice.sizes, choice.centres, choice.left_out) == (
        power,
        sizes,
        centres,
        left_out,
    )


def test_kinds():
    kinds = {1: "power of two", 8: "power of two", 120: "multiple of 8", 12: "", 0: "multiple of 8"}
    assert {size: kind_of_size(size) for size in kinds} == kinds


@pytest.mark.parametrize("centre", [8, 120, 1024])
@pytest.mark.parametrize("overhead", [0.0, OVERHEAD])
def test_a_line_has_no_contrast_but_its_curvature(centre, overhead):
    seconds = {size: [overhead + PER_EXAMPLE * size] for size in (centre - 1, centre, centre + 1)}
    slope = PER_EXAMPLE / (overhead + PER_EXAMPLE * centre)
    (contrast,) = contrasts(seconds, centre)
    # ln t - (ln(t - d) + ln(t + d))/2 with d/t = slope.
    assert contrast == pytest.approx(-math.log(1 - slope**2) / 2, abs=1e-12)
    # The slope is 1/centre at most, without an overhead.
    assert 0 < contrast <= 0.51 / centre**2


def test_a_factor_common_to_a_round_drops_out():
    seconds = {127: [1.0, 10.0], 128: [1.2, 12.0], 129: [1.1, 11.0]}
    first, second = contrasts(seconds, 128)
    assert first == pytest.approx(second) == pytest.approx(math.log(1.2) - math.log(1.1) / 2)
    for bad in (0.0, math.nan, math.inf):
        with pytest.raises(
            HardwareError, match=r"positive seconds.*around batch size 2: the clock is too coarse"
        ):
            contrasts({1: [1.0], 2: [bad], 3: [1.0]}, 2)


def rounds_of(rng, sizes, rounds, planted=(), drift=0.0):
    """Return tau by batch size: a line, times what is planted, noise of 1%, and a drift over shuffled visits."""
    seconds = {size: [] for size in sizes}
    order = visit_order(sizes, rounds, int(rng.integers(2**31)))
    wander = np.cumsum(rng.normal(0.0, drift, len(order))) + np.linspace(
        0.0, 10 * drift, len(order)
    )
    for size, slower in zip(order, wander, strict=True):
        factor = dict(planted).get(size, 1.0) * math.exp(slower + rng.normal(0.0, 0.01))
        seconds[size].append((OVERHEAD + PER_EXAMPLE * size) * factor)
    return seconds


SIZES, CENTRES = (119, 120, 121, 127, 128, 129, 511, 512, 513), (120, 128, 512)


def test_planted_effects_are_found():
    seconds = rounds_of(np.random.default_rng(1), SIZES, 20, planted={128: 1.05, 512: 0.9})
    found = {effect.centres: effect for effect in triplet_effects(seconds, CENTRES, 0.95)}
    assert list(found) == [(120,), (128,), (512,), (128, 512), (120, 128, 512)]
    planted = {(120,): 0.0, (128,): 0.05, (512,): -0.1, (128, 512): math.sqrt(1.05 * 0.9) - 1}
    for centres, share in planted.items():
        effect = found[centres]
        assert (effect.rounds, effect.mean) == (20, pytest.approx(share, abs=0.01))
        assert effect.low - 0.005 < share < effect.high + 0.005
        assert (effect.corrected < 0.001) == (share != 0.0)


@pytest.mark.parametrize(
    ("centres", "groups", "last"),
    [
        # Of one power of two there is no group.
        ((120, 128), [(120,), (128,), (120, 128)], "multiples of 8 together"),
        # The same triplets are tested once.
        ((128, 512), [(128,), (512,), (128, 512)], "powers of two together"),
        ((4, 120, 128), [(4,), (120,), (128,), (4, 128), (120, 128)], "multiples of 8 together"),
        ((2,), [(2,)], "2 (power of two)"),
    ],
)
def test_groups(centres, groups, last):
    sizes = sorted({size + step for size in centres for step in (-1, 0, 1)})
    found = triplet_effects(rounds_of(np.random.default_rng(0), sizes, 5), centres, 0.95)
    assert ([effect.centres for effect in found], found[-1].name) == (groups, last)
    assert [effect.corrected for effect in found] == holm_corrected([effect.p for effect in found])


@pytest.mark.slow
def test_noise_alone_is_taken_for_an_effect_as_often_as_stated():
    """With a machine that drifts by far more than the noise of a visit."""
    rng, studies = np.random.default_rng(0), 400
    single, any_corrected = np.zeros(5), 0
    for _ in range(studies):
        found = triplet_effects(rounds_of(rng, SIZES, 8, drift=0.005), CENTRES, 0.95)
        single += [effect.p < 0.05 for effect in found]
        any_corrected += any(effect.corrected < 0.05 for effect in found)
    # a binomial's 99.9% interval around 0.05; of any at all, with Holm: at most
    low, high = stats.binom.interval(0.999, studies, 0.05)
    assert np.all((low <= single) & (single <= high)), single
    assert any_corrected <= high


def test_interval_and_p_are_students():
    values = np.array([0.01, -0.02, 0.03, 0.05])
    effect = estimate_effect("x", [8], values, 0.9)
    standard_error = values.std(ddof=1) / 2
    reach = stats.t.ppf(0.95, 3) * standard_error
    middle = values.mean()
    expected = np.expm1([middle, middle - reach, middle + reach])
    assert (effect.mean, effect.low, effect.high) == pytest.approx(tuple(expected))
    assert effect.p == effect.corrected
    assert effect.p == pytest.approx(2 * stats.t.sf(middle / standard_error, 3))
    with pytest.raises(
        HardwareError, match="it: all 2 rounds took the same time to the last digit"
    ):
        estimate_effect("it", [8], np.array([0.1, 0.1]), 0.95)


def test_holm():
    for p, corrected in (
        ([], []),
        ([0.03, 0.01, 0.02], [0.04, 0.03, 0.04]),  # 0.03 alone would be less than the one before it
        ([0.5, 0.6, 0.001], [1.0, 1.0, 0.003]),
        ([0.012, 0.2, 0.0014, 0.04], [0.036, 0.2, 0.0056, 0.08]),
    ):
        assert holm_corrected(p) == pytest.approx(corrected)


def test_differences_are_students_over_pairs():
    rng = np.random.default_rng(0)
    a, b = rng.uniform(0.6, 0.8, 6), rng.uniform(0.6, 0.8, 6)
    # By seed, whatever the order.
    backwards = dict(reversed(list(enumerate(b))))
    difference = compare_pairs(dict(enumerate(a)), backwards, 0.95)
    mean = (b - a).mean()
    error = (b - a).std(ddof=1) / math.sqrt(6)
    reach = stats.t.ppf(0.975, 5) * error
    assert (difference.pairs, difference.mean) == (6, pytest.approx(mean))
    assert (difference.low, difference.high) == pytest.approx((mean - reach, mean + reach))
    assert difference.p == pytest.approx(2 * stats.t.sf(abs(mean) / error, 5))


def test_differences_of_few_or_equal_pairs():
    assert compare_pairs({}, {}, 0.95) == Difference(0, None, None, None, None)
    assert compare_pairs({0: 0.5}, {0: 0.75}, 0.95) == Difference(1, 0.25, None, None, None)
    same = {0: 0.25, 1: 0.375, 2: 0.5}
    assert compare_pairs(same, same, 0.95) == Difference(3, 0.0, 0.0, 0.0, 1.0)
    assert compare_pairs(same, {0: 0.375, 1: 0.5, 2: 0.625}, 0.95) == Difference(
        3, 0.125, 0.125, 0.125, 0.0
    )
    lost = {**same, 1: None}
    assert compare_pairs(same, lost, 0.95).pairs == compare_pairs(lost, same, 0.95).pairs == 2
