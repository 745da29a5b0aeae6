import doctest

import pytest
from refusals import cases, refused

import bstune
from bstune.core import rules
from bstune.core.rules import RULES, allowed_rules, lr_of

BASELINE = (64, 0.1)


def test_the_docstring_s_examples_run():
    assert doctest.testmod(rules) == (0, doctest.testmod(rules).attempted)
    assert doctest.testmod(rules).attempted == 3


# McCandlish's, with B_noise 128: lr_max = 0.1 (1 + 2) = 0.3, of which 2/3. Surge: at twice and half
# the noise scale the rates are equal.
BY_HAND = {"none": 0.1, "sqrt": 0.2, "linear": 0.4, "saturating": 0.2, "surge": 0.1}


@pytest.mark.parametrize("rule", RULES)
def test_rates_by_hand(rule):
    found = bstune.lr_of(rule, 256, BASELINE, noise_scale=128)
    assert found == pytest.approx(BY_HAND[rule])


@cases("""
rule | batch_size | baseline | noise_scale
square root | 256 | [64, 0.1] | null
saturating | 256 | [64, 0.1] | null
surge | 256 | [64, 0.1] | 0.0
sqrt | 0 | [64, 0.1] | null
sqrt | 256 | [-64, 0.1] | null
sqrt | 256 | 64 | null
[sqrt] | 256 | [64, 0.1] | null
sqrt | [256] | [64, 0.1] | null
""")
def test_what_gives_no_rate_is_refused(rule, batch_size, baseline, noise_scale):
    with refused():
        lr_of(rule, batch_size, baseline, noise_scale)


# An interval of the exponent over batch sizes 16 to 256. With the noise scale 64 in the middle
# saturating grows fourfold, as the square root, and surge comes back to where it was.
@cases("""
interval | noise_scale | allowed
[-0.1, 0.1] | null | none
[0.4, 0.6] | null | sqrt
[0.6, 0.9] | 64 | null
[0.4, 0.6] | 64 | sqrt saturating
[-0.1, 0.1] | 64 | none surge
""")
def test_the_rules_that_an_interval_allows(interval, noise_scale, allowed):
    found = allowed_rules(*interval, (16, 256), 64, noise_scale)
    assert found == tuple((allowed or "").split())
