import math
from functools import partial

import pytest

from bstune.core import scaling
from bstune.core.errors import ConfigError

B0, LR0, NOISE = 64.0, 0.2, 500.0
REFERENCE = {"reference_batch_size": B0, "reference_lr": LR0}
RULES = {rule.__name__: partial(rule, **REFERENCE) for rule in (scaling.none, scaling.sqrt, scaling.linear)}
RULES |= {rule.__name__: partial(rule, **REFERENCE, noise_scale=NOISE) for rule in (scaling.saturating, scaling.surge)}
HILL = math.sqrt(500 / 64) + math.sqrt(64 / 500)


@pytest.mark.parametrize(
    ("name", "batch_size", "lr"),
    [
        *((name, B0, LR0) for name in RULES),
        ("none", 4096, 0.2),
        ("sqrt", 16, 0.1),
        ("linear", 256, 0.8),
        # lr_max = 0.2 (1 + 500/64) = 1.7625
        ("saturating", 500, 1.7625 / 2),
        ("saturating", 125, 1.7625 / 5),
        # lr_max = 0.2 x 0.5 (sqrt(500/64) + sqrt(64/500))
        ("surge", 500, 0.1 * HILL),
        ("surge", 125, 0.1 * HILL / (0.5 * (2 + 0.5))),
        ("surge", 2000, 0.1 * HILL / (0.5 * (2 + 0.5))),  # symmetric in log B
    ],
)
def test_closed_forms(name, batch_size, lr):
    assert RULES[name](batch_size) == pytest.approx(lr, rel=1e-12)


@pytest.mark.parametrize(
    ("name", "slopes"),
    [
        ("none", (0.0, 0.0, 0.0)),
        ("sqrt", (0.5, 0.5, 0.5)),
        ("linear", (1.0, 1.0, 1.0)),
        ("saturating", (1.0, 0.5, 0.0)),
        ("surge", (0.5, 0.0, -0.5)),
    ],
)
def test_slopes_of_log_lr_far_below_at_and_far_above_the_noise_scale(name, slopes):
    rule, step = RULES[name], 1e-5
    for batch_size, slope in zip((NOISE / 1e6, NOISE, NOISE * 1e6), slopes, strict=True):
        found = math.log(rule(batch_size * math.exp(step)) / rule(batch_size * math.exp(-step))) / (2 * step)
        assert found == pytest.approx(slope, abs=1e-5)


@pytest.mark.parametrize("rule", [scaling.saturating, scaling.surge])
def test_a_missing_noise_scale_says_what_to_do(rule):
    with pytest.raises(ConfigError, match=f"rule {rule.__name__} needs a noise scale: .* scaling.noise_scale=N, or"):
        rule(8, B0, LR0, None)
