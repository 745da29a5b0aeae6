import math

import pytest
from synthetic import Law, synthetic_table
from toolbox import make_spec

from bstune.core.curve import fit_curve, frontier_points
from bstune.core.records import Target
from bstune.trial.replay import replay

TARGET = Target("error", 0.1, "min")


def answer(table, batch_size, lr):
    return replay(table, make_spec(batch_size, lr), TARGET, 10**9)


@pytest.mark.parametrize(
    ("octaves", "status", "expected"),
    [
        (-2, "reached", 825 * math.exp(0.12 * 4)),  # 825 = 200 (1 + 400/128)
        (1, "reached", 825 * math.exp(0.5)),
        (3, "diverged", 82),
        (-6, "censored", 8 * 825),  # exp(0.12 x 36) is 75 times the frontier, past the longest run
    ],
)
def test_steps_are_the_frontier_times_the_penalty(octaves, status, expected):
    lr = 0.1 * 2**octaves
    result = answer(synthetic_table(Law(), (32, 128), (lr,)), 128, lr)
    assert (result.status, result.steps) == (status, round(expected))
    assert result.train_seconds == pytest.approx(round(expected) * (1e-3 + 5e-6 * 128))


def test_the_best_cell_and_b_crit_come_back():
    law = Law(exponent=1.0, lr=0.125, batch_size=256, b_crit=512, overhead=1e-3, per_example=7.8125e-6)
    table = synthetic_table(law, lrs=tuple(law.best_lr(2**k) for k in range(3, 13)))
    assert law.b_crit * law.overhead / law.per_example == 256**2  # the fastest batch size, squared
    assert table.best(TARGET) == (256, 0.125, pytest.approx(600 * 3e-3))
    fit = fit_curve(frontier_points([answer(table, *cell[:2]) for cell in table.cells]))
    assert (fit.b_crit, fit.s_min) == (pytest.approx(512, rel=0.01), pytest.approx(200, rel=0.01))
