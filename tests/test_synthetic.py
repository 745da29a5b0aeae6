import math

import pytest
from synthetic import Law, synthetic_table

from bstune.core.curve import fit_curve, frontier_points
from bstune.core.records import Target, TrialSpec
from bstune.trial.replay import replay

TARGET = Target("error", 0.1, "min")


def spec(batch_size: int, lr: float, seed: int = 0) -> TrialSpec:
    return TrialSpec(0, 0, batch_size, lr, None, seed)


@pytest.mark.parametrize(
    ("batch_size", "octaves", "expected"),
    [
        (128, 0, 200 * (1 + 400 / 128)),
        (32, 0, 200 * (1 + 400 / 32)),
        (128, -2, 825 * math.exp(0.12 * 4)),
        (128, 1, 825 * math.exp(0.5)),
        (128, 3, None),
    ],
)
def test_steps_are_the_frontier_times_the_penalty(batch_size: int, octaves: float, expected: float | None) -> None:
    law = Law()
    lr = 0.1 * math.sqrt(batch_size / 128) * 2**octaves
    assert law.steps(batch_size, lr) == pytest.approx(expected)
    result = replay(synthetic_table(law, (32, 128), (lr,)), spec(batch_size, lr), TARGET, 10**9)
    if expected is None:
        assert result.status == "diverged"
        assert result.steps < 0.11 * law.frontier(batch_size)
    else:
        assert result.reached
        assert result.steps == round(expected)
        assert result.train_seconds == pytest.approx(round(expected) * (1e-3 + 5e-6 * batch_size))


@pytest.mark.parametrize("exponent", [-0.3, 0.0, 0.5, 1.0])
def test_the_best_cell_is_where_the_law_says(exponent: float) -> None:
    law = Law(exponent=exponent, lr=0.125, batch_size=256, b_crit=512, overhead=1e-3, per_example=7.8125e-6)
    table = synthetic_table(law, lrs=tuple(2.0**k for k in range(-8, 1)))
    assert law.b_crit * law.overhead / law.per_example == 256**2  # the fastest batch size, squared
    best = table.best(TARGET)
    assert best is not None
    assert best[:2] == (256, 0.125)
    assert best[2] == pytest.approx(600 * 3e-3)


def test_b_crit_comes_back_from_the_frontier() -> None:
    law = Law(b_crit=300)
    table = synthetic_table(law, lrs=tuple(law.best_lr(2**k) for k in range(3, 13)))
    results = [replay(table, spec(*cell), TARGET, 10**9) for cell in table.cells]
    fit = fit_curve(frontier_points(results))
    assert fit.b_crit == pytest.approx(300, rel=0.01)
    assert fit.s_min == pytest.approx(200, rel=0.01)


def test_a_run_too_far_off_is_censored_at_its_longest() -> None:
    law = Law(left=0.12)
    lr = 0.1 * 2**-6  # exp(0.12 x 36) is 75 times the frontier
    result = replay(synthetic_table(law, (64, 128), (lr,), longest=4.0), spec(128, lr), TARGET, 10**9)
    assert result.status == "censored"
    assert result.steps == result.steps_low == 4 * 825
