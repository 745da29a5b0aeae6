import math
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from toolbox import make_result

from bstune.core.curve import (
    LAWS,
    CurveError,
    FrontierPoint,
    fit_curve,
    frontier_points,
    log_slope,
)

S_MIN, B_CRIT = 100.0, 1000.0
NINE = B_CRIT * 2.0 ** np.arange(-5, 4)  # B_crit/32 to 8 B_crit
# steps of the 85M-parameter language model in the runs released with Zhang et al. 2024, arXiv 2410.21676
ZHANG = {
    64: 46000,
    128: 23000,
    256: 13282,
    512: 7000,
    1024: 3840,
    2048: 2500,
    4096: 1800,
    8192: 1600,
    16384: 1600,
}


def point(batch_size, steps, stopped=False):
    return FrontierPoint(float(batch_size), float(steps), stopped=stopped, steps_low=None)


def true_points(batch_sizes, s_min=S_MIN, b_crit=B_CRIT, b_opt=0.0):
    return [point(B, s_min * (1.0 + b_crit / B + (b_opt / B) ** 2)) for B in batch_sizes]


def noisy_points(rng, batch_sizes, noise, b_opt=0.0):
    points = []
    # Log-normal noise.
    for exact in true_points(batch_sizes, b_opt=b_opt):
        factor = math.exp(noise * rng.standard_normal())
        points.append(replace(exact, steps=exact.steps * factor))
    return points


def is_within(value, low, high):
    """Say whether an interval, whose end is None where it is open, holds a value."""
    return (low or 0) <= value <= (high or math.inf)


def trial(number, batch_size, steps, status="reached", low=None):
    low = steps - 1 if low is None else low
    return make_result(
        number=number, batch_size=batch_size, steps=steps, status=status, steps_low=low
    )


FRONTIER = {
    "nothing": ([], []),
    "the least S x B of a half octave, at its own B": (
        # 64 to 90 are one half octave, which the least S x B = 5600 stands for.
        [trial(0, 64, 100), trial(1, 80, 70), trial(2, 90, 90)],
        [(80, 70, False, 69)],
    ),
    "91 begins the next half octave, 128 the one after": (
        # 64 sqrt(2) = 90.5.
        [trial(0, 128, 40), trial(1, 90, 50), trial(2, 91, 50), trial(3, 127, 49)],
        [(90, 50, False, 49), (91, 50, False, 49), (128, 40, False, 39)],
    ),
    "equal S x B: the smaller batch size": (
        [trial(0, 80, 4), trial(1, 64, 5)],
        [(64, 5, False, 4)],
    ),
    "equal S x B and B: the lower number": (
        [trial(4, 64, 5, low=3), trial(2, 64, 5, low=1)],
        [(64, 5, False, 1)],
    ),
    "a bound beside a reached trial is dropped": (
        [trial(0, 64, 5), trial(1, 64, 9, "stopped")],
        [(64, 5, False, 4)],
    ),
    "the largest bound on S x B, from its last evaluation": (
        # Bounds on S x B are 64 x 10, 70 x 40 and 64 x 30.
        [
            trial(0, 64, 900, "stopped", 10),
            trial(1, 70, 40, "stopped", 40),
            trial(2, 64, 30, "stopped", 30),
        ],
        [(70, 40, True, 40)],
    ),
    "a trial never evaluated bounds nothing": ([trial(0, 64, 900, "stopped", 0)], []),
    "diverged, oom and failed say nothing": (
        [
            trial(0, 64, 900, "diverged"),
            trial(1, 128, 900, "out of memory"),
            trial(2, 256, 900, "failed"),
            trial(3, 1, 7),
        ],
        [(1, 7, False, 6)],
    ),
}


@pytest.mark.parametrize(("trials", "expected"), FRONTIER.values(), ids=FRONTIER.keys())
def test_frontier_points(trials, expected):
    # Neither the order nor the kind of the iterable matters.
    for order in (trials, trials[::-1]):
        found = frontier_points(iter(order))
        assert [(p.batch_size, p.steps, p.stopped, p.steps_low) for p in found] == expected


@pytest.mark.parametrize(
    ("batch_sizes", "s_min", "b_crit"),
    [
        (NINE, 3e5, 2e4),
        ([16, 64, 256], 50, 64),
        ([8, 64, 8, 64], 50, 20),
        (np.geomspace(1, 1e5, 40), 1234.5, 321),
    ],
)
def test_noiseless_points_return_the_parameters(batch_sizes, s_min, b_crit):
    points = true_points(batch_sizes, s_min, b_crit)
    fit = fit_curve(points)
    assert fit.s_min == pytest.approx(s_min, rel=2e-3)
    assert fit.critical_batch_size == pytest.approx(b_crit, rel=2e-3)
    assert fit.e_min == pytest.approx(s_min * b_crit, rel=2e-3)
    assert fit.critical_batch_size_low < b_crit < fit.critical_batch_size_high
    # By the slope -B_crit/(B + B_crit) of the regimes.
    assert fit.perfect_scaling_below == pytest.approx(fit.critical_batch_size / 9)
    assert fit.maximal_data_parallelism_above == pytest.approx(fit.critical_batch_size * 9)
    assert (fit.law, fit.b_opt, fit.b_opt_low, fit.b_opt_high) == ("two-terms", None, None, None)
    assert fit.note == {3: f"{NOT_TESTED}; {ASSUMED}", 4: NOT_TESTED}.get(len(batch_sizes))
    assert fit.points == tuple(points)


@pytest.mark.parametrize(("b_crit", "b_opt"), [(1000, 200), (300, 600), (4000, 200)])
def test_noiseless_points_with_a_small_batch_term_return_the_parameters(b_crit, b_opt):
    points = true_points(2.0 ** np.arange(4, 15), 50, b_crit, b_opt)
    fit = fit_curve(points)
    assert (fit.law, fit.note) == ("three-terms", None)
    assert (fit.s_min, fit.critical_batch_size, fit.b_opt) == pytest.approx(
        (50, b_crit, b_opt), rel=2e-3
    )
    assert fit.critical_batch_size_low < b_crit < fit.critical_batch_size_high
    assert fit.b_opt_low < b_opt < fit.b_opt_high
    # E(B) = S_min (B + B_crit + B_opt^2/B) is least at B_opt.
    assert fit.e_min == pytest.approx(50 * (b_crit + 2 * b_opt), rel=1e-3)
    assert fit.e_min <= min(p.batch_size * p.steps for p in points) * 1.001
    for edge, slope in (
        (fit.perfect_scaling_below, -0.9),
        (fit.maximal_data_parallelism_above, -0.1),
    ):
        # The slope of log S over log B is -(b + 2 c)/(1 + b + c), with b = B_crit/B and c =
        # (B_opt/B)^2.
        first, second = (b_crit / edge, (b_opt / edge) ** 2)
        assert -(first + 2 * second) / (1 + first + second) == pytest.approx(slope, rel=1e-2)


@pytest.mark.slow
def test_two_terms_raise_no_false_alarm_and_three_are_found():
    rng = np.random.default_rng(3)
    b_crit_held = 0
    # Six of each kind, with a noise of 10%.
    b_opt_held = 0
    for _ in range(6):
        assert fit_curve(noisy_points(rng, NINE, 0.1)).law == "two-terms"
        # E(B_crit/32) is 2.8 E_min.
        fit = fit_curve(noisy_points(rng, NINE, 0.1, b_opt=340.0))
        assert fit.law == "three-terms"
        assert fit.b_opt_low is not None
        b_crit_held += is_within(B_CRIT, fit.critical_batch_size_low, fit.critical_batch_size_high)
        b_opt_held += is_within(340.0, fit.b_opt_low, fit.b_opt_high)
    # Intervals of 90% may miss one of six.
    assert b_crit_held >= 5
    assert b_opt_held >= 5


@pytest.mark.slow
def test_the_law_may_be_chosen_and_what_is_doubtful_is_said():
    points = true_points(NINE, b_opt=200.0)
    assert fit_curve(points, law="three-terms") == fit_curve(points)
    # Where small batches waste nothing the third term is found to be small.
    unneeded = fit_curve(true_points(NINE), law="three-terms")
    assert (unneeded.law, unneeded.b_opt, unneeded.b_opt_low) == ("three-terms", None, None)
    assert 0 < unneeded.b_opt_high < 100
    assert unneeded.critical_batch_size == pytest.approx(B_CRIT, rel=0.02)
    rng = np.random.default_rng(0)
    # A term that is hardly more than the noise of 20%: some of eight curves leave the question
    # open.
    doubtful = [noisy_points(rng, NINE, 0.2, b_opt=140.0) for _ in range(8)]
    for noisy in doubtful:
        fit = fit_curve(noisy)
        two = fit_curve(noisy, law="two-terms")
        three = fit_curve(noisy, law="three-terms")
        if fit.note is not None and "may waste" in fit.note:
            assert fit.critical_batch_size == two.critical_batch_size
            assert fit.critical_batch_size_low == min(
                two.critical_batch_size_low, three.critical_batch_size_low
            )
            assert fit.critical_batch_size_high == max(
                two.critical_batch_size_high, three.critical_batch_size_high
            )
            return
    raise AssertionError("no curve was doubtful")


def test_b_opt_is_open_above_where_b_crit_is():
    # E = 1e6 (1 + 64/B) falls for ever.
    points = [point(B, 1e6 / B * (1 + 64 / B)) for B in 2.0 ** np.arange(3, 10)]  # S_min is 0
    fit = fit_curve(points)
    assert (fit.law, fit.s_min, fit.critical_batch_size, fit.b_opt, fit.b_opt_high) == (
        "three-terms",
        None,
        None,
        None,
        None,
    )
    assert fit.b_opt_low > 128
    assert fit.e_min == pytest.approx(1e6, rel=0.01)
    assert "no upper end: run batch sizes above 512" in fit.note


def test_published_points_of_an_85m_language_model_whose_scale_scales_the_fit():
    # 32 was stopped at 60,000 steps: a bound.
    points = [point(B, S) for B, S in ZHANG.items()] + [point(32, 60000, True)]
    fit = fit_curve(points)
    assert 2000 < fit.critical_batch_size < 2500
    assert 1700 < fit.critical_batch_size_low < 2000
    assert 2500 < fit.critical_batch_size_high < 2800
    wider = fit_curve(points, 0.99)
    assert (
        wider.critical_batch_size_low
        < fit.critical_batch_size_low
        < fit.critical_batch_size_high
        < wider.critical_batch_size_high
    )
    # In other units of batch size and steps only the units of the answer change.
    scaled = fit_curve(
        [replace(p, batch_size=p.batch_size * 37.0, steps=p.steps * 0.01) for p in points]
    )
    for name, factor in {
        "critical_batch_size": 37,
        "critical_batch_size_low": 37,
        "critical_batch_size_high": 37,
        "s_min": 0.01,
        "e_min": 0.37,
    }.items():
        assert getattr(scaled, name) == pytest.approx(getattr(fit, name) * factor, rel=1e-6), name
    assert scaled.noise == pytest.approx(fit.noise, rel=1e-6)


@pytest.mark.slow
def test_one_bad_point_moves_the_fit_little_and_bounds_only_where_they_say_something():
    points = true_points(NINE)
    # The ends of the nine points, one beside an end, and the middle.
    for i, factor in product((0, 1, 4, 8), (3.0, 1 / 3.0)):
        bad = list(points)
        bad[i] = replace(points[i], steps=points[i].steps * factor)
        assert fit_curve(bad).critical_batch_size == pytest.approx(B_CRIT, rel=0.02), (i, factor)
    # Bounds far below the curve say nothing.
    low_bounds = fit_curve([*points, point(5.0, 10.0, True), point(1e5, 1.0, True)])
    assert low_bounds.critical_batch_size == pytest.approx(
        fit_curve(points).critical_batch_size, rel=1e-3
    )
    # Up to B_crit/2.
    small = true_points(NINE[:5])
    # At 16 B_crit S is 1.06 S_min: that 0.9 S_min was not enough narrows the upper end.
    bounded = fit_curve([*small, point(16 * B_CRIT, 0.9 * S_MIN, True)])
    assert bounded.critical_batch_size_high < 0.8 * fit_curve(small).critical_batch_size_high
    assert bounded.critical_batch_size_low == pytest.approx(
        fit_curve(small).critical_batch_size_low, rel=0.1
    )


OPEN_BELOW = "no point near or below B_crit, so it has no lower end: run batch sizes below 1024"
OPEN_ABOVE = "no point near or above B_crit, so it has no upper end: run batch sizes above 32"
OPEN = "the points scatter by a factor of 2.6: repeat them; the points do not bracket B_crit: run batch sizes below 100"
OPEN += " and above 130, or more trials"
UNDETERMINED = {
    "perfect scaling": (
        # S x B is the same everywhere.
        {B: 32000 / B for B in (1, 2, 4, 8, 16, 32)},
        {"e_min": 32000},
        (32, None),
        OPEN_ABOVE,
    ),
    "maximal data parallelism": (
        # S is the same everywhere.
        {1024: 500, 2048: 500, 4096: 500, 8192: 500},
        {"s_min": 500},
        (None, 1024),
        OPEN_BELOW,
    ),
    # The batch sizes are nearly equal, and the steps are not.
    "noise alone": ({100: 500, 110: 2000, 120: 100, 130: 900}, {}, (None, None), OPEN),
}


@pytest.mark.parametrize(
    ("steps", "found", "ends", "note"), UNDETERMINED.values(), ids=UNDETERMINED.keys()
)
def test_what_the_points_do_not_determine_is_left_open(steps, found, ends, note):
    fit = fit_curve([point(B, S) for B, S in steps.items()])
    assert (fit.critical_batch_size, fit.perfect_scaling_below, fit.note) == (None, None, note)
    for name in ("s_min", "e_min"):
        expected = pytest.approx(found[name], rel=1e-2) if name in found else None
        assert getattr(fit, name) == expected
    assert (
        fit.critical_batch_size_low is None
        if ends[0] is None
        else fit.critical_batch_size_low > ends[0]
    )
    assert (
        fit.critical_batch_size_high is None
        if ends[1] is None
        else fit.critical_batch_size_high < ends[1]
    )


def test_a_bend_within_the_noise_leaves_b_crit_open():
    # S is 3.2% above perfect scaling at a batch size of 32.
    points = [point(B, 32000 / B * (1 + B / 1000)) for B in (1, 2, 4, 8, 16, 32)]
    fit = fit_curve(points)
    assert fit.critical_batch_size is None
    assert fit.e_min == pytest.approx(
        math.exp(np.mean([math.log(p.steps * p.batch_size) for p in points])), rel=1e-3
    )


def test_log_slope_is_least_squares_over_reached_points():
    points = [point(B, S) for B, S in ZHANG.items()]
    # The slope of a straight line by NumPy.
    expected = np.polyfit(np.log(list(ZHANG)), np.log(list(ZHANG.values())), 1)[0]
    assert log_slope(points) == pytest.approx(expected, rel=1e-12)
    assert log_slope([*points, point(9, 9, True)]) == log_slope(points)
    # 8 times the batch with an eighth of the steps.
    assert log_slope([point(1, 80), point(8, 10)]) == pytest.approx(-1.0)
    for few in ([], points[:1], [points[0], points[0]], [points[0], point(9, 9, True)]):
        with pytest.raises(CurveError, match="two or more batch sizes"):
            log_slope(few)


NOT_TESTED = (
    "whether small batches waste examples is not known: that takes 4 points at 3 batch sizes"
)
ASSUMED = "3 points hardly show their noise: the intervals assume 11%"
WASTE = "small batches waste examples, so "
CONTRADICTIONS = {
    "a U-shape in E of two terms": (
        # By two terms E rises with the batch size; here it falls first.
        true_points(NINE, b_opt=200.0),
        ("two-terms",),
        f"{WASTE}by two terms B_crit is not known: let the law be auto",
    ),
    "a U-shape that three points cannot show": (
        # E is 256,000, 64,000 and 25,600.
        [point(16, 16000), point(64, 1000), point(256, 100)],
        ("auto", "two-terms"),
        f"{WASTE}B_crit is not known: that takes 4 points at 3 batch sizes",
    ),
    "steps that rise": (
        [point(B, 100 * B**0.2) for B in (16, 32, 64, 128, 256)],
        LAWS,
        "steps rise with the batch size, so B_crit is not known: tune the learning rate at each batch size",
    ),
}


@pytest.mark.parametrize(
    ("points", "laws", "note"), CONTRADICTIONS.values(), ids=CONTRADICTIONS.keys()
)
def test_points_that_contradict_the_law_have_no_b_crit(points, laws, note):
    for law in laws:
        fit = fit_curve(points, law=law)
        assert fit.note == note
        for name, value in vars(fit).items():
            if "b_" in name or name in ("s_min", "e_min"):
                assert value is None, name


def test_fewest_examples_are_open_where_b_opt_alone_would_decide_them():
    # S = S_min (B_opt/B)^2: only S_min B_opt^2 is known.
    fit = fit_curve([point(B, 1e7 / B**2) for B in (8, 16, 32, 64, 128)])
    assert (fit.law, fit.critical_batch_size_low, fit.b_opt_high, fit.e_min) == (
        "three-terms",
        None,
        None,
        None,
    )


TOO_FEW = "at least 3 points that reached the target"
BAD_POINTS = {
    "none": ([], TOO_FEW),
    "one batch size": (
        # What is known instead is said.
        [point(64, 120), point(64, 150), point(64, 130)],
        "got 3 at 1: known is 120 to 150 steps to target at batch size 64; run more batch sizes",
    ),
    "two and bounds": (
        [point(1, 90), point(9, 20), point(4, 2, True), point(5, 2, True)],
        "got 2 at 2: known is 20 to 90 steps to target at batch size 1 to 9 and more than 2 steps .* 4 to 5;",
    ),
    "NaN": (
        [*true_points(NINE), point(64, math.nan)],
        "steps must be a positive, finite number .* but got nan",
    ),
    "infinite": ([*true_points(NINE), point(math.inf, 5)], "batch_size must be .* but got inf"),
    "zero": ([*true_points(NINE), point(64, 0, True)], "steps must be .* but got 0.0"),
    "too many": (true_points(np.linspace(1, 100, 1001)), "at most 1000 points, but got 1001"),
}


@pytest.mark.parametrize(("points", "message"), BAD_POINTS.values(), ids=BAD_POINTS.keys())
def test_points_that_cannot_be_fitted(points, message):
    with pytest.raises(CurveError, match=message):
        fit_curve(points)


def test_three_terms_need_four_points_and_a_law_must_be_one_of_them():
    with pytest.raises(
        CurveError,
        match=r"at least 4 points .*, at 3 batch sizes, but got 3 at 3: run more, or fit two",
    ):
        fit_curve(true_points([1, 9, 99]), law="three-terms")
    with pytest.raises(CurveError, match="one of auto, two-terms, three-terms, but got cubic"):
        fit_curve(true_points(NINE), law="cubic")


def test_level_must_be_a_probability():
    for level in (0.0, 90, math.nan):
        with pytest.raises(CurveError, match=f"between 0 and 1, such as 0.9, but got {level}"):
            fit_curve(true_points(NINE), level)


CURVES = 40
# In CI, where they take 0.2 s each.
FEWER_CURVES = 20
# batch sizes over B_crit, how many points become bounds below their S, the factor on one bad point, and whether the
# intervals are finite or open on one side, where that is certain
CASES = {
    "around B_crit": (2.0 ** np.arange(-5, 4), 0, 1.0, "finite"),
    "up to B_crit/2": (2.0 ** np.arange(-6, 0), 0, 1.0, None),
    "below B_crit/30": (2.0 ** np.arange(-5, 1) / 31, 0, 1.0, "open above"),
    "two stopped": (2.0 ** np.arange(-5, 4), 2, 1.0, "finite"),
    "one point 3 times too high": (2.0 ** np.arange(-5, 4), 0, 3.0, "finite"),
    "one point 3 times too low": (2.0 ** np.arange(-5, 4), 0, 1 / 3.0, None),
    "above 50 B_crit": (50 * 2.0 ** np.arange(6), 0, 1.0, "open below"),
    "four points": (4.0 ** np.arange(-2, 2), 0, 1.0, None),
}
BY_HAND = {
    "four points",
    "around B_crit",
    "up to B_crit/2",
    "above 50 B_crit",
    "below B_crit/30",
    "one point 3 times too high",
    "one point 3 times too low",
}


def coverage_cases():
    """Return the cases as pytest's parameters; those of BY_HAND run in the soak alone."""
    params = []
    for name, case in CASES.items():
        marks = pytest.mark.slow
        curves = FEWER_CURVES
        if name in BY_HAND:
            marks = pytest.mark.soak
            curves = CURVES
        params.append(pytest.param(*case, curves, marks=marks, id=name))
    return params


@pytest.mark.parametrize(("ratios", "bounds", "factor", "ends", "curves"), coverage_cases())
def test_the_interval_covers_b_crit_as_often_as_it_says(ratios, bounds, factor, ends, curves):
    rng, batch_sizes, n = np.random.default_rng(20250101), B_CRIT * ratios, len(ratios)
    intervals = []
    for _ in range(curves):
        # A scatter of 10%, and one point that is far off.
        steps = S_MIN * (1 + B_CRIT / batch_sizes) * np.exp(0.1 * rng.standard_normal(n))
        steps[rng.integers(n)] *= factor
        stopped = rng.choice(n, bounds, replace=False)
        # Where it was stopped lies between 0.3 and 1 of what it needed.
        steps[stopped] *= rng.uniform(0.3, 1.0, bounds)
        is_stopped = np.isin(np.arange(n), stopped).tolist()
        fit = fit_curve(list(map(point, batch_sizes, steps, is_stopped)))
        intervals.append(
            (fit.critical_batch_size_low or 0.0, fit.critical_batch_size_high or math.inf)
        )
    low, high = np.array(intervals).T
    covered = (low <= B_CRIT) & (high >= B_CRIT)
    finite = (low > 0) & np.isfinite(high)
    # Of 40 intervals of 90% 36 hold the truth, with a deviation of 1.9: 32 are two below. Of 20
    # they are 18 and 1.3: 15.
    assert covered.sum() >= math.floor(0.9 * curves - 2.0 * math.sqrt(0.09 * curves))
    # with four points the prior of sigma carries the interval, which errs to the wide side: only the lower bound holds
    if n >= 6 and finite.sum() >= curves // 2:
        assert covered[finite].mean() <= 0.97
    # Most of them, as noise may close one.
    assert ends != "open above" or np.isinf(high).mean() >= 0.90
    assert ends != "open below" or (low == 0.0).mean() >= 0.90
    if ends == "finite":
        assert np.all(finite)
        assert np.median(high / low) < 2.0
