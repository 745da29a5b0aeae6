"""A study's parameters in the axes of the model, and back."""

import math

import numpy as np
import pytest
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

from bstune.core.errors import ConfigError
from bstune.search.acquisition import Suggestion
from bstune.search.coordinates import Coordinates

SPACE = {
    "batch_size": IntDistribution(8, 4096, log=True),
    "lr": FloatDistribution(1e-3, 2.0, log=True),
}


def sqrt_rule(batch_size):
    return 0.1 * math.sqrt(batch_size / 128.0)


def test_a_delta_that_is_no_float_is_refused():
    space = {"batch_size": SPACE["batch_size"], "delta": IntDistribution(-2, 2)}
    with pytest.raises(ConfigError, match="delta must be a float parameter, but got"):
        Coordinates(space, sqrt_rule, round, None)


# One of each kind: a choice, a constant, a grid and a logarithm.
def coordinates_of(**changes):
    space = {**SPACE, "kind": CategoricalDistribution(["a", "b"]), "one": IntDistribution(3, 3)}
    space["depth"] = IntDistribution(2, 10, step=4)
    space["decay"] = FloatDistribution(1e-4, 1e-2, log=True)
    arguments = {"rule": None, "snap": round, "lr_range": None}
    return Coordinates(space, **(arguments | changes))


def test_parameters_as_the_model_sees_them():
    coordinates = coordinates_of()
    params = {"batch_size": 256, "lr": 0.125, "kind": "b", "one": 3, "depth": 6, "decay": 1e-3}
    # 2^8 and 2^-3.
    assert coordinates.point(params) == (8.0, -3.0)
    assert coordinates.columns == 4
    # The values are those of decay, depth and kind.
    assert coordinates.others(params) == pytest.approx((0.5, 0.5, 0.0, 1.0))
    assert coordinates.complete(params)
    assert not coordinates.complete({"batch_size": 256, "lr": 0.125})
    # 0.45 lies nearest to 6 on the grid; of the kinds the larger value counts.
    back = coordinates.parameters(Suggestion(8.0, -3.0, (0.5, 0.45, 0.2, 0.7), 1, None))
    del params["one"]
    assert back == pytest.approx(params)


def test_batch_sizes_are_snapped_and_learning_rates_stay_within_what_can_be_had():
    coordinates = coordinates_of(snap=lambda size: 8 * round(size / 8))
    # 21 is nearest to 24 in steps of 8, and nothing is larger than 4096.
    assert (coordinates.domain().snap(21.0), coordinates.domain().snap(1e9)) == (24, 4096)
    assert (
        coordinates.parameters(Suggestion(math.log2(21), -3.0, (0.5,) * 4, 1, None))["batch_size"]
        == 24
    )
    assert coordinates.point({"batch_size": 21, "lr": 0.5}) == (math.log2(24), -1.0)
    x = np.array([3.0, 5.1, 12.0])
    low, high = coordinates_of(lr_range=(0.01, 0.5)).domain().log_rate_bounds(x)
    np.testing.assert_allclose([2.0**low, 2.0**high], [[0.01] * 3, [0.5] * 3])
    offsets = {"batch_size": SPACE["batch_size"], "delta": FloatDistribution(-2.0, 2.0)}
    # Two octaves on either side of the rule, within the range that can be had.
    low, high = Coordinates(offsets, sqrt_rule, round, (0.01, 0.5)).domain().log_rate_bounds(x)
    rule = np.array([sqrt_rule(2.0**one) for one in x])
    np.testing.assert_allclose([2.0**low, 2.0**high], np.clip([rule / 4, rule * 4], 0.01, 0.5))
