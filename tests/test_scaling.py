import math
from functools import partial

import pytest

from bstune.core import scaling
from bstune.core.errors import ConfigError

B0, LR0, NOISE = 64.0, 0.2, 500.0
PLAIN = [scaling.none, scaling.sqrt, scaling.linear]
NOISY = [scaling.saturating, scaling.surge]
RULES = {rule.__name__: partial(rule, reference_batch_size=B0, reference_lr=LR0) for rule in PLAIN} | {
    rule.__name__: partial(rule, reference_batch_size=B0, reference_lr=LR0, noise_scale=NOISE) for rule in NOISY
}


def slope(rule, batch_size):
    """Return d log lr / d log B."""
    step = 1e-5
    return math.log(rule(batch_size * math.exp(step)) / rule(batch_size * math.exp(-step))) / (2 * step)


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("noise", [1.0, 64.0, 1e6])
def test_every_rule_passes_through_its_reference(name, noise):
    rule = RULES[name]
    if name in ("saturating", "surge"):
        rule = partial(rule, noise_scale=noise)
    assert rule(B0) == pytest.approx(LR0, rel=1e-12)


@pytest.mark.parametrize(
    ("name", "batch_size", "lr"),
    [
        ("none", 1, 0.2),
        ("none", 4096, 0.2),
        ("sqrt", 16, 0.1),
        ("sqrt", 256, 0.4),
        ("linear", 16, 0.05),
        ("linear", 256, 0.8),
        # lr_max = 0.2 (1 + 500/64) = 1.7625
        ("saturating", 500, 1.7625 / 2),
        ("saturating", 125, 1.7625 / 5),
        # lr_max = 0.2 x 0.5 (sqrt(500/64) + sqrt(64/500))
        ("surge", 500, 0.1 * (math.sqrt(500 / 64) + math.sqrt(64 / 500))),
        ("surge", 125, 0.1 * (math.sqrt(500 / 64) + math.sqrt(64 / 500)) / (0.5 * (2 + 0.5))),
    ],
)
def test_closed_forms(name, batch_size, lr):
    assert RULES[name](batch_size) == pytest.approx(lr, rel=1e-12)


@pytest.mark.parametrize(
    ("name", "batch_size", "expected"),
    [
        ("none", 300, 0.0),
        ("sqrt", 300, 0.5),
        ("linear", 300, 1.0),
        ("saturating", NOISE / 1e6, 1.0),
        ("saturating", NOISE, 0.5),
        ("saturating", NOISE * 1e6, 0.0),
        ("surge", NOISE / 1e6, 0.5),
        ("surge", NOISE, 0.0),
        ("surge", NOISE * 1e6, -0.5),
    ],
)
def test_slopes_of_log_lr_over_log_batch_size(name, batch_size, expected):
    assert slope(RULES[name], batch_size) == pytest.approx(expected, abs=1e-5)


def test_surge_peaks_at_the_noise_scale_and_is_symmetric_in_log_batch_size():
    surge = RULES["surge"]
    for factor in (1.1, 2, 100):
        assert surge(NOISE * factor) == pytest.approx(surge(NOISE / factor), rel=1e-12)
        assert surge(NOISE * factor) < surge(NOISE)


@pytest.mark.parametrize("rule", NOISY)
def test_a_missing_noise_scale_says_what_to_do(rule):
    with pytest.raises(ConfigError) as error:
        rule(8, B0, LR0, None)
    assert str(error.value) == (
        f"the scaling rule {rule.__name__} needs a noise scale: give one in examples with scaling.noise_scale=N, "
        "or choose scaling=sqrt, scaling=linear or scaling=none"
    )
