import pytest

from bstune.core.errors import HardwareError
from bstune.hardware.roofline import DeviceLimits, LayerCost, Line, StepCost, misaligned

LIMITS = DeviceLimits("device", "fp16", 100.0, 10.0, misaligned_flops_per_second=50.0)
NOTHING = Line(0.0, 0.0)


def layer(flops=NOTHING, moved=NOTHING, **changes):
    return LayerCost("l", "Linear", 1, flops, moved, NOTHING, NOTHING, **changes)


def step(*layers):
    return StepCost(layers, (), ())


@pytest.mark.parametrize(
    ("dimensions", "rows", "batch", "multiple", "expected"),
    [
        ((("in_features", 16), ("out_features", 8)), 1, 8, 8, []),
        ((("in_features", 16), ("out_features", 10)), 1, 8, 8, [("out_features", 10, 16)]),
        ((("in_features", 15), ("out_features", 10)), 1, 8, 4, [("in_features", 15, 16), ("out_features", 10, 12)]),
        ((("in_channels", 3), ("out_channels", 64)), None, 7, 8, [("in_channels", 3, 8)]),
        ((("in_features", 8), ("out_features", 8)), 1, 9, 8, [("batch", 9, 16)]),
        ((("in_features", 8), ("out_features", 8)), 4, 9, 8, [("batch", 9, 10)]),
        ((("in_features", 8), ("out_features", 8)), 8, 9, 8, []),
        ((("in_features", 8), ("out_features", 24)), 16, 16, 16, [("in_features", 8, 16), ("out_features", 24, 32)]),
        ((), None, 9, 8, []),
        ((("in_features", 15), ("out_features", 10)), 1, 9, None, []),
    ],
)
def test_alignment(dimensions, rows, batch, multiple, expected):
    one = layer(Line(0, 100), Line(0, 1), dimensions=dimensions, rows_per_example=rows)
    found = misaligned(step(one), LIMITS, multiple, batch)
    assert [(row.dimension, row.size, row.padded) for row in found] == expected


def test_gain_of_padding_is_predicted_from_the_measured_ceilings():
    one = LayerCost("l", "Linear", 1, Line(0, 120), Line(0, 1), Line(0, 1), NOTHING, (("in_features", 6),), 1)
    feature, batch = misaligned(step(one), LIMITS, 8, 12)
    assert feature.predicted_gain == pytest.approx((120 / 50) / (120 * 8 / 6 / 100))
    assert (batch.padded, batch.predicted_gain) == (16, pytest.approx(2.0))
    slow = LayerCost("l", "Linear", 1, Line(0, 1), Line(0, 1), Line(0, 3), NOTHING, (("in_features", 6),), 8)
    (feature,) = misaligned(step(slow), LIMITS, 8, 12)
    assert feature.predicted_gain == pytest.approx(4 / (8 / 6 + 3))  # memory-bound: padding only moves more
    unknown = DeviceLimits("device", "fp16", 100.0, 10.0)
    assert misaligned(step(one), unknown, 8, 12)[0].predicted_gain is None


def test_a_batch_size_below_one():
    with pytest.raises(HardwareError, match="a batch size is at least 1"):
        misaligned(step(layer()), LIMITS, 8, 0)
