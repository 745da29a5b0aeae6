"""The normal quantile is that of the share that an interval holds."""

import pytest
from scipy.stats import norm

from bstune.core.interval import INTERVAL_LEVEL, INTERVAL_QUANTILE


def test_the_quantile_is_that_of_the_level():
    assert norm.cdf(INTERVAL_QUANTILE) - norm.cdf(-INTERVAL_QUANTILE) == pytest.approx(
        INTERVAL_LEVEL, abs=1e-4
    )
