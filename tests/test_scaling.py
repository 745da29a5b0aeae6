import math
from pathlib import Path

import pytest

from bstune.core import scaling
from bstune.core.errors import ConfigError

# The limit of the saturating rule, at unlimited batch size.
LIMIT = 0.2 * (1 + 500 / 64)
# The peak of the surge, at the noise scale.
PEAK = 0.1 * (math.sqrt(500 / 64) + math.sqrt(64 / 500))


@pytest.mark.parametrize(
    ("rule", "noise_scale", "lrs"),
    [
        ("none", {}, {64: 0.2, 4096: 0.2}),
        ("sqrt", {}, {64: 0.2, 16: 0.1, 6400: 2.0}),
        ("linear", {}, {64: 0.2, 256: 0.8}),
        (
            "saturating",
            {"noise_scale": 500},
            # LIMIT/(1 + 500/B).
            {64: 0.2, 500: LIMIT / 2, 125: LIMIT / 5, 5e18: LIMIT},
        ),
        (
            "surge",
            {"noise_scale": 500},
            # 2 PEAK/(sqrt(500/B) + sqrt(B/500)).
            {64: 0.2, 500: PEAK, 125: PEAK / 1.25, 2000: PEAK / 1.25, 5e18: PEAK * 2e-8},
        ),
    ],
)
def test_closed_forms(rule, noise_scale, lrs):
    found = [
        getattr(scaling, rule)(B, reference_batch_size=64, reference_lr=0.2, **noise_scale)
        for B in lrs
    ]
    assert found == pytest.approx(list(lrs.values()), rel=1e-12)


@pytest.mark.parametrize("rule", [scaling.saturating, scaling.surge])
def test_a_missing_noise_scale_says_what_to_do(rule):
    with pytest.raises(
        ConfigError, match=f"rule {rule.__name__} needs a noise scale: .* scaling.noise_scale=N, or"
    ):
        rule(8, 64, 0.2, None)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("cubic", 8, 64, 0.2),
            f"must be one of {', '.join(scaling.RULES)}, but got 'cubic'",
        ),
        (("sqrt", 0, 64, 0.2), "the batch size must be a positive number, but got 0"),
    ],
)
def test_a_rule_by_its_name(arguments, message):
    with pytest.raises(ConfigError, match=message):
        scaling.lr_of(*arguments)
    assert scaling.lr_of("sqrt", 256, 64, 0.2) == 0.4


@pytest.mark.parametrize(
    ("rule", "values", "lr"),
    [
        ("none", (64, 0.2, None), 0.2),
        ("sqrt", (64, 0.2, None), 0.4),
        ("saturating", (64, 0.2, 500), 0.2 * (1 + 500 / 64) / (1 + 500 / 256)),
    ],
)
def test_a_rate_by_a_rules_name(rule, values, lr):
    assert scaling.lr_of(rule, 256, *values) == pytest.approx(lr, rel=1e-12)


@pytest.mark.parametrize(
    "values", [(0, 0.2, None), (64, float("nan"), None), (64, -1.0, None), (64, 0.2, 0.0)]
)
def test_a_rule_of_bad_numbers_is_refused(values):
    with pytest.raises(ConfigError, match="must be a positive number, but got"):
        scaling.lr_of("sqrt", 256, *values)


def test_each_rule_has_a_config_that_is_described():
    conf = Path(__file__).parents[1] / "conf"
    assert {path.stem for path in (conf / "scaling").glob("*.yaml")} == scaling.RULES.keys()
    described = (conf / "README.md").read_text(encoding="utf-8")
    for name in scaling.RULES:
        assert f"`{name}`" in described
