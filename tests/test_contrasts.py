"""Contrasts of triplets: closed forms, planted effects, and how often noise alone is taken for one."""

import math

import numpy as np
import pytest
from scipy import stats

from bstune.core.errors import ConfigError, HardwareError
from bstune.hardware.timing import visits
from bstune.sweeps.statistics import choose_batch_sizes, contrasts, effects, estimate, holm, is_power_of_two, kind

OVERHEAD, PER_EXAMPLE = 9e-3, 4.4e-4


def line(size: float) -> float:
    return OVERHEAD + PER_EXAMPLE * size


# Which batch sizes


@pytest.mark.parametrize(
    ("ceiling", "power", "sizes", "centres", "left_out"),
    [
        (1163, 1024, (100, 119, 120, 121, 127, 128, 129, 156, 1023, 1024, 1025, 1163), (120, 128, 1024), ()),
        (628, 512, (100, 119, 120, 121, 127, 128, 129, 156, 511, 512, 513, 628), (120, 128, 512), ()),
        # near a power of two, or at one: nothing twice
        (1026, 1024, (100, 119, 120, 121, 127, 128, 129, 156, 1023, 1024, 1025, 1026), (120, 128, 1024), ()),
        (1025, 1024, (100, 119, 120, 121, 127, 128, 129, 156, 1023, 1024, 1025), (120, 128, 1024), ()),
        (1024, 512, (100, 119, 120, 121, 127, 128, 129, 156, 511, 512, 513, 1024), (120, 128, 512), ()),
        (1023, 512, (100, 119, 120, 121, 127, 128, 129, 156, 511, 512, 513, 1023), (120, 128, 512), ()),
        # the power of two below it is one that is measured anyway
        (200, 128, (100, 119, 120, 121, 127, 128, 129, 156, 200), (120, 128), ()),
        (129, 128, (100, 119, 120, 121, 127, 128, 129), (120, 128), (156,)),
        # what does not fit
        (128, 64, (63, 64, 65, 100, 119, 120, 121, 128), (64, 120), (127, 129, 156)),
        (120, 64, (63, 64, 65, 100, 120), (64,), (119, 121, 127, 128, 129, 156)),
        (64, 32, (31, 32, 33, 64), (32,), (100, 119, 120, 121, 127, 128, 129, 156)),
        (3, 2, (1, 2, 3), (2,), (100, 119, 120, 121, 127, 128, 129, 156)),
    ],
)
def test_batch_sizes_around_a_ceiling(ceiling, power, sizes, centres, left_out):
    choice = choose_batch_sizes([100, 156], [128, 120], ceiling)
    assert (choice.power, choice.sizes, choice.centres, choice.left_out) == (power, sizes, centres, left_out)
    assert choice.ceiling == ceiling


@pytest.mark.parametrize(
    ("alone", "centres", "ceiling", "error", "text"),
    [
        ([0, 9], [8], 99, ConfigError, r"batch_sizes must be positive, but got \[0, 9\]"),
        ([9], [8, 12, 1], 99, ConfigError, r"powers of two or multiples of 8, and at least 2, but got \[1, 12\]"),
        ([9], [8], 2, HardwareError, "the ceiling is 2: below it there is no power of two with two neighbours"),
    ],
)
def test_refuses_what_answers_nothing(alone, centres, ceiling, error, text):
    with pytest.raises(error, match=text):
        choose_batch_sizes(alone, centres, ceiling)


@pytest.mark.parametrize(
    ("size", "power", "name"),
    [
        (1, True, "power of two"),
        (8, True, "power of two"),
        (120, False, "multiple of 8"),
        (12, False, ""),
        (0, False, "multiple of 8"),
    ],
)
def test_kinds(size, power, name):
    assert (is_power_of_two(size), kind(size)) == (power, name)


# Contrasts


@pytest.mark.parametrize("centre", [8, 120, 128, 1024])
@pytest.mark.parametrize("overhead", [0.0, OVERHEAD])
def test_a_line_has_none_but_its_curvature(centre, overhead):
    seconds = {size: [overhead + PER_EXAMPLE * size] for size in (centre - 1, centre, centre + 1)}
    slope = PER_EXAMPLE / (overhead + PER_EXAMPLE * centre)
    (found,) = contrasts(seconds, centre)
    assert found == pytest.approx(-math.log(1 - slope**2) / 2, abs=1e-12)
    assert 0 < found <= 0.51 / centre**2


def test_a_factor_common_to_a_round_drops_out():
    seconds = {127: [1.0, 10.0], 128: [1.2, 12.0], 129: [1.1, 11.0]}
    first, second = contrasts(seconds, 128)
    assert first == pytest.approx(second) == pytest.approx(math.log(1.2) - math.log(1.1) / 2)


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
def test_seconds_that_are_none_are_refused(bad):
    with pytest.raises(HardwareError, match=r"positive seconds.*around batch size 2: the clock is too coarse"):
        contrasts({1: [1.0], 2: [bad], 3: [1.0]}, 2)


# Effects


def rounds_of(rng, sizes, rounds, noise=0.01, planted=None, drift=0.0):
    """Return tau by batch size: a line, times what is planted, noise, and a drift over shuffled visits."""
    seconds = {size: [] for size in sizes}
    order = visits(sizes, rounds, int(rng.integers(2**31)))
    wander = np.cumsum(rng.normal(0.0, drift, len(order))) + np.linspace(0.0, 10 * drift, len(order))
    for size, slower in zip(order, wander, strict=True):
        factor = (planted or {}).get(size, 1.0)
        seconds[size].append(line(size) * factor * math.exp(slower + rng.normal(0.0, noise)))
    return seconds


SIZES, CENTRES = (119, 120, 121, 127, 128, 129, 511, 512, 513), (120, 128, 512)


def test_what_is_planted_is_found():
    seconds = rounds_of(np.random.default_rng(1), SIZES, 20, planted={128: 1.05, 512: 0.9})
    found = {effect.centres: effect for effect in effects(seconds, CENTRES, 0.95)}
    assert list(found) == [(120,), (128,), (512,), (128, 512), (120, 128, 512)]
    planted = {(120,): 0.0, (128,): 0.05, (512,): -0.1, (128, 512): math.sqrt(1.05 * 0.9) - 1}
    for centres, share in planted.items():
        effect = found[centres]
        assert effect.rounds == 20
        assert effect.mean == pytest.approx(share, abs=0.01)
        assert effect.low < effect.mean < effect.high
        assert effect.low - 0.005 < share < effect.high + 0.005
    assert found[(120,)].corrected > 0.001 > found[(128,)].corrected
    assert all(found[centres].corrected < 0.001 for centres in ((128,), (512,), (128, 512)))


def test_interval_and_p_are_students():
    values = np.array([0.01, -0.02, 0.03, 0.05])
    found = estimate("x", [8], values, 0.9)
    half = stats.t.ppf(0.95, 3) * values.std(ddof=1) / 2
    assert (found.mean, found.low, found.high) == pytest.approx(
        [math.expm1(value) for value in (values.mean(), values.mean() - half, values.mean() + half)]
    )
    assert found.p == pytest.approx(2 * stats.t.sf(values.mean() / (values.std(ddof=1) / 2), 3))
    assert found.corrected == found.p


@pytest.mark.parametrize(
    ("centres", "groups"),
    [
        ((120, 128), [(120,), (128,), (120, 128)]),  # of one power of two there is no group
        ((128, 512), [(128,), (512,), (128, 512)]),  # the same triplets are asked once, as powers of two
        ((4, 120, 128), [(4,), (120,), (128,), (4, 128), (120, 128)]),
        ((2,), [(2,)]),
    ],
)
def test_groups(centres, groups):
    sizes = sorted({size + step for size in centres for step in (-1, 0, 1)})
    found = effects(rounds_of(np.random.default_rng(0), sizes, 5), centres, 0.95)
    assert [effect.centres for effect in found] == groups
    assert found[-1].name == {
        (120, 128): "multiples of 8 together",
        (128, 512): "powers of two together",
    }.get(groups[-1], "2 (power of two)")
    assert [effect.corrected for effect in found] == holm([effect.p for effect in found])


def test_noise_alone_is_taken_for_an_effect_as_often_as_stated():
    """With a machine that drifts by far more than the noise of a visit."""
    rng, studies = np.random.default_rng(0), 400
    single, any_corrected = np.zeros(5), 0
    for _ in range(studies):
        found = effects(rounds_of(rng, SIZES, 8, drift=0.005), CENTRES, 0.95)
        single += [effect.p < 0.05 for effect in found]
        any_corrected += any(effect.corrected < 0.05 for effect in found)
    # a binomial's 99.9% interval around 0.05; of any at all, with Holm: at most
    low, high = stats.binom.interval(0.999, studies, 0.05)
    assert np.all((low <= single) & (single <= high)), single
    assert any_corrected <= high


@pytest.mark.parametrize(
    ("values", "level", "error", "text"),
    [
        ([0.1], 0.95, ConfigError, "a test over rounds needs 2 of them, but got 1: raise repeats"),
        ([0.1, 0.2], 1.0, ConfigError, "level must lie between 0 and 1, but got 1.0"),
        ([0.1, 0.1], 0.95, HardwareError, "it: all 2 rounds took the same time to the last digit"),
    ],
)
def test_what_cannot_be_tested_is_refused(values, level, error, text):
    with pytest.raises(error, match=text):
        estimate("it", [8], np.array(values), level)


@pytest.mark.parametrize(
    ("p", "corrected"),
    [
        ([], []),
        ([0.04], [0.04]),
        ([0.01, 0.02, 0.03], [0.03, 0.04, 0.04]),  # 0.03 alone would be less than the one before it
        ([0.03, 0.01, 0.02], [0.04, 0.03, 0.04]),
        ([0.5, 0.6, 0.001], [1.0, 1.0, 0.003]),
        ([0.012, 0.2, 0.0014, 0.04], [0.036, 0.2, 0.0056, 0.08]),
    ],
)
def test_holm(p, corrected):
    assert holm(p) == pytest.approx(corrected)
