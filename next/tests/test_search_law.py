import math
from dataclasses import replace

import numpy as np
import pytest
from refusals import cases
from search_records import SPACE

from bstune.core.rules import lr_of
from bstune.search import law as laws
from bstune.search.law import make_law

LAW = make_law(SPACE, 4000, misfit=False)
MISFIT = make_law(SPACE, 4000, misfit=True)
# Level 5, B_crit 32 (half of the middle, 64), a shift of 1 octave, an exponent 0.1 over the rule's,
# a slope of 0.5 below and 2 octaves above.
THETA = np.array([[5.0, math.log(0.5), 1.0, 0.1, math.log(0.5), math.log(2.0), math.log(0.2)]])


def log2(*values):
    return np.log2(values)


def test_the_curve_is_mccandlish_s():
    sizes = np.array([8.0, 64.0, 300.0])
    s_min = math.exp(5.0) / 1.5
    expected = s_min * (1.0 + 32.0 / sizes)
    np.testing.assert_allclose(np.exp(LAW.curve(THETA, np.log2(sizes)))[0], expected)


def test_the_best_rate_is_the_rule_shifted_and_bent():
    # The rule is 0.05 at 64 and grows as the square root.
    rates = 2.0 ** LAW.best_rate(THETA, log2(64.0, 256.0))[0]
    np.testing.assert_allclose(rates, [0.1, 0.1 * 4**0.6])


# On the hyperbola 0.5 1.2 (sqrt(2) - 1), far below a line of slope 0.5 an octave; log steps are at
# most 50, the level is 5.
@cases("""
octaves | penalty
2.0 | 0.5
4.0 | 2.0
-1.2 | 0.2485281
-60.0 | 29.4060
60.0 | 45.0
""")
def test_penalties_off_the_best_rate(octaves, penalty):
    x = log2(64.0)
    z = LAW.best_rate(THETA, x)[0] + octaves
    got = LAW.log_steps(THETA, x, z) - LAW.curve(THETA, x)
    assert got[0, 0] == pytest.approx(penalty, rel=1e-6)
    assert (LAW.penalty_above(THETA, x, z)[0, 0] > 0.0) == (octaves > 0.0)


def test_the_misfit_is_linear_between_its_knots():
    assert len(MISFIT.knots) == 5
    at_knots = [0.0, 1.0, -1.0, 0.0, 2.0]
    theta = np.array([[*THETA[0], math.log(0.1), *at_knots]])
    halfway = 0.5 * (MISFIT.knots[1] + MISFIT.knots[2])
    x = np.array([*MISFIT.knots, halfway])
    misfit = MISFIT.curve(theta, x) - LAW.curve(THETA, x)
    np.testing.assert_allclose(misfit[0], [0.0, 0.1, -0.1, 0.0, 0.2, 0.0], atol=1e-12)


def test_a_rule_turns_at_each_draw_s_b_crit():
    law = make_law(replace(SPACE, rule="saturating"), 4000, misfit=False)
    theta = np.repeat(THETA, 3, axis=0)
    # B_crit 32, 64 and 1024; a shift of one octave, and 0.1 of an octave an octave from 64 on.
    theta[:, laws.B_CRIT] = np.log([0.5, 1.0, 16.0])
    sizes = np.array([8.0, 64.0, 500.0])
    expected = [
        [lr_of("saturating", size, (64, 0.05), turn) * 2.0 * (size / 64) ** 0.1 for size in sizes]
        for turn in (32.0, 64.0, 1024.0)
    ]
    np.testing.assert_allclose(2.0 ** law.best_rate(theta, np.log2(sizes)), expected)
