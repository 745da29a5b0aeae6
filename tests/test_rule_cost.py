"""What a learning-rate rule costs, on tables whose steps are known."""

import math

import pytest

from bstune.core.errors import ConfigError, TableError
from bstune.core.records import Target
from bstune.sweeps.rule_cost import RuleCost, run, sentence, steps_at, table_costs
from bstune.trial.recorded_run import Run
from bstune.trial.replay import Table

TARGET = Target("val/error", 0.1, "min")
# 0.01 to 2.56, an octave apart.
RATES = tuple(0.01 * 2.0**k for k in range(9))


def recorded(batch_size, lr, steps, seed=0):
    """Build a run that meets the target after so many steps; None: never."""
    if steps is None:
        # Its last value is 0.5, and the target 0.1.
        return Run(batch_size, lr, seed, (1, 999), (1.0, 0.5), 0.001, diverged=False)
    return Run(batch_size, lr, seed, (1, steps), (1.0, 0.1), 0.001, diverged=False)


def table_of(best_exponent):
    """Build a table whose best rate grows as B^exponent from 0.04 at B = 16.

    Off it, steps double for each octave below, and the target is missed over an octave above.
    """
    runs = list[Run]()
    for k, batch_size in enumerate((16, 64, 256)):
        best = 0.04 * 4.0 ** (best_exponent * k)
        for lr in RATES:
            octaves = math.log2(lr / best)
            # 1.01, as a logarithm of 2 may be a little more than 1.
            steps = None if octaves > 1.01 else round(100 * 2.0 ** abs(octaves))
            runs.append(recorded(batch_size, lr, steps))
    return Table(tuple(runs))


@pytest.mark.parametrize(
    ("best_exponent", "expected"),
    [
        # Four and sixteen times the batch size are one and two octaves for each half of the exponent.
        (0.5, {"linear": [1.0, 2.0, None], "sqrt": [1.0, 1.0, 1.0], "none": [1.0, 2.0, 4.0]}),
        (0.0, {"linear": [1.0, None, None], "sqrt": [1.0, 2.0, None], "none": [1.0, 1.0, 1.0]}),
    ],
)
def test_a_rule_costs_what_its_distance_from_the_best_rate_costs(best_exponent, expected):
    costs = table_costs("made", table_of(best_exponent), TARGET, list(expected), 16)
    for rule, ratios in expected.items():
        assert [cost.ratio for cost in costs if cost.rule == rule] == [
            None if ratio is None else pytest.approx(ratio) for ratio in ratios
        ]


@pytest.mark.parametrize(
    ("lr", "expected"),
    [
        (0.1, ("reached", 100.0)),
        # The geometric middle of 100 and 400.
        (0.2, ("reached", pytest.approx(200.0))),
        (0.4, ("reached", 400.0)),
        # Between a rate that met the target and one that did not.
        (0.5, ("missed", None)),
        (1.6, ("missed", None)),
        (1.7, ("not recorded", None)),
        (0.09, ("not recorded", None)),
    ],
)
def test_steps_between_recorded_rates(lr, expected):
    assert steps_at({0.1: 100.0, 0.4: 400.0, 1.6: math.inf}, lr) == expected


def test_a_cell_of_which_half_the_seeds_miss_is_missed():
    table = Table((recorded(16, 0.1, 50), recorded(16, 0.1, None, seed=1), recorded(16, 0.2, 80)))
    # 0.1 would be faster by the one seed that met the target.
    (cost,) = table_costs("made", table, TARGET, ["none"], 16)
    assert (cost.best_lr, cost.ratio) == (0.2, 1.0)


def test_the_sentence_counts_from_eight_times_on():
    def cost(batch_size, outcome, ratio):
        return RuleCost("made", batch_size, 16, "linear", 0.1, 0.1, outcome, ratio)

    # 64 is four times 16, and does not count; of the other three, one was missed.
    costs = [
        cost(64, "missed", None),
        cost(128, "reached", 1.5),
        cost(256, "reached", 2.5),
        cost(512, "missed", None),
        cost(1024, "not recorded", None),
    ]
    text = sentence(costs, ["linear", "sqrt"])
    assert "linear takes 2.5 times the steps (median) and misses the target at 1 of 3" in text
    assert "sqrt has no recorded point" in text


def test_the_shipped_tables_show_that_no_rule_holds():
    found = run(tables=[], target=None, rules=["linear", "sqrt", "none"], tuned_at=32.0)
    assert len({row["table"] for row in found.rows}) == 5
    far = [one for one in found.details["numbers"] if one["batch_size"] >= 8 * one["tuned_at"]]
    missed = {one["rule"] for one in far if one["outcome"] == "missed"}
    assert missed == {"linear", "sqrt", "none"}


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"rules": ["surge"]}, ConfigError, "none, sqrt, linear"),
        ({"rules": []}, ConfigError, "different ones"),
        ({"tuned_at": 0.0}, ConfigError, "positive"),
        ({"target": 1e-9, "tables": ["mnist_mlp"]}, TableError, "mnist_mlp"),
        ({"tables": ["gone"]}, TableError, "no table gone"),
    ],
)
def test_bad_input_is_named(changes, error, message):
    arguments = {"tables": [], "target": None, "rules": ["sqrt"], "tuned_at": 32.0, **changes}
    with pytest.raises(error, match=message):
        run(**arguments)
