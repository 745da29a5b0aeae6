"""The ruler of a fixed budget: scales of a metric, running bests, heights read back as shares."""

import math

import numpy as np
import pytest

from bstune.search.ruler import Scale, choose_scale, make_ruler, running_best

# The last step of a budget.
LAST = 10_000
# 47 shares from 1% to all of the budget, each 100^(1/46) = 1.105 times the one before.
SHARES = np.exp(np.linspace(math.log(0.01), 0.0, 47))
ERROR = Scale("min", 0.0)


def history(metric, last_step=LAST, until=1.0):
    """Evaluations of a metric over the share of the budget, the last at its end."""
    seen = {}
    for share in SHARES:
        # Early shares of few steps fall on one step: the last of them counts.
        step = max(1, round(share * last_step))
        if step <= until * last_step + 0.5:
            seen[step] = float(metric(share))
    return tuple(seen.items())


def power(factor, exponent=0.3):
    """A metric that takes ``factor`` times the steps of s^-exponent."""
    # The metric at a share s is that of s/factor on the ruler.
    return lambda share: (share / factor) ** -exponent


def ruler_of(metric, least_slope=0.5):
    return make_ruler([running_best(history(metric), LAST, ERROR)], least_slope)


def test_the_ruler_reads_its_own_heights_back_within_and_beyond_both_ends():
    ruler = ruler_of(power(1.0))
    # Two lie before the first evaluation or past the last.
    at = np.log([0.002, 0.01, 0.07, 0.5, 1.0, 1.8])
    assert ruler.log_share(ruler.height(at)) == pytest.approx(at, abs=1e-9)
    # The slope of s^-0.3 in logs, at its end and at its start.
    assert ruler.slope == pytest.approx(0.3, abs=1e-4)
    assert ruler.first_slope == pytest.approx(0.3, abs=1e-3)


def test_a_curve_that_is_flat_at_its_end_has_a_share_of_its_slope_over_the_last_tenfold():
    # Nothing happens after 0.4 of the budget.
    def flat(share):
        return min(share, 0.4) ** -0.3

    # Over the last tenfold: from a tenth of the budget to its end.
    whole = running_best(history(flat), LAST, ERROR).slope(0.1)
    assert ruler_of(flat).slope == pytest.approx(0.5 * whole)
    assert ruler_of(flat, least_slope=0.25).slope == pytest.approx(0.25 * whole)


def test_two_evaluations_in_the_last_third_give_a_slope():
    steps = (500, 2000, 5000, LAST)
    seen = tuple((step, power(1.0)(step / LAST)) for step in steps)
    # Only 5000 and 10,000 lie past a third of the budget.
    ruler = make_ruler([running_best(seen, LAST, ERROR)], 0.0)
    assert ruler.slope == pytest.approx(0.3, abs=0.01)


def test_noise_counts_by_its_running_best():
    up_and_down = ((100, 0.5), (200, 0.3), (300, 0.9), (400, None), (500, 0.25))
    curve = running_best(up_and_down, 1000, ERROR)
    # The best so far: 0.9 at step 300 is none, and step 400 has no value.
    assert np.exp(curve.heights) == pytest.approx([0.5, 0.3, 0.3, 0.25])
    assert np.exp(curve.log_shares) == pytest.approx([0.1, 0.2, 0.3, 0.5])
    # An evaluation past the budget does not count.
    assert running_best(((100, None), (2000, 0.1)), 1000, ERROR) is None


@pytest.mark.parametrize(
    ("mode", "ideal", "values", "expected"),
    [
        # A metric that falls and is positive has 0 as its best.
        ("min", None, (0.5, 0.2), 0.0),
        # A log-likelihood's sign may be either, so there is no best value.
        ("min", None, (0.5, -0.2), None),
        # An accuracy's best is known only where it is given.
        ("max", None, (0.5, 0.7), None),
        ("max", 1.0, (0.5, 0.7), 1.0),
        ("min", -2.0, (0.5, 0.7), -2.0),
    ],
)
def test_the_ideal_value_is_what_is_given_or_zero_of_what_is_positive_and_falls(
    mode, ideal, values, expected
):
    assert choose_scale([tuple(enumerate(values, start=1))], mode, ideal).ideal == expected


@pytest.mark.parametrize(
    "scale", [ERROR, Scale("max", 1.0), Scale("min", None), Scale("max", None)]
)
def test_a_height_gives_its_metric_back(scale):
    metrics = np.array([0.2, 0.5, 0.9])
    assert scale.metric(scale.height(metrics)) == pytest.approx(metrics)
    # A height falls while training goes on: it rises with a metric that is minimized.
    assert (np.diff(scale.height(metrics)) > 0).all() == (scale.mode == "min")


def test_an_error_of_exactly_zero_has_a_height():
    scale = choose_scale([((1, 0.1), (2, 0.02), (3, 0.0))], "min", 0.0)
    # Half of the least distance from zero that was seen: 0.02.
    assert scale.height(np.array([0.0]))[0] == pytest.approx(math.log(0.01))
