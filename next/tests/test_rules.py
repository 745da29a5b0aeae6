import doctest

import pytest
from refusals import cases, refused

import bstune
from bstune.core import rules
from bstune.core.rules import allowed_rules, lr_of

BASELINE = (64, 0.1)


def test_the_docstring_s_examples_run():
    assert doctest.testmod(rules) == (0, doctest.testmod(rules).attempted)
    assert doctest.testmod(rules).attempted == 3


# McCandlish's, with B_noise 128: lr_max = 0.1 (1 + 2) = 0.3, of which 2/3. Surge: at twice and half
# the noise scale the rates are equal.
RATES = {"none": 0.1, "sqrt": 0.2, "linear": 0.4, "saturating": 0.2, "surge": 0.1}


@pytest.mark.parametrize("rule", RATES)
def test_rates_by_hand(rule):
    found = bstune.lr_of(rule, 256, BASELINE, noise_scale=128)
    assert found == pytest.approx(RATES[rule])


@cases("""
rule | batch_size | baseline | noise_scale
square root | 256 | [64, 0.1] | null
saturating | 256 | [64, 0.1] | null
surge | 256 | [64, 0.1] | 0.0
sqrt | 0 | [64, 0.1] | null
sqrt | 256 | [-64, 0.1] | null
sqrt | 256 | 64 | null
sqrt | [256] | [64, 0.1] | null
""")
def test_what_gives_no_rate_is_refused(rule, batch_size, baseline, noise_scale):
    with refused():
        lr_of(rule, batch_size, baseline, noise_scale)


# An interval of the exponent, a range of batch sizes and what turns the rules.
@cases("""
interval | more | allowed
[-0.1, 0.2] | [] | none
[0.2, 0.7] | [] | sqrt
[0.6, 0.9] | [[64, 64], 64] | null
# From 16 to 256 with 64 in the middle saturating grows fourfold, as the square root, and surge
# comes back to where it was.
[0.4, 0.6] | [[16, 256], 64] | sqrt saturating
[-0.1, 0.1] | [[16, 256], 64] | none surge
""")
def test_the_rules_that_an_interval_allows(interval, more, allowed):
    assert allowed_rules(*interval, *more) == tuple((allowed or "").split())
