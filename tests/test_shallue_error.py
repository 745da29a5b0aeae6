"""The sweep shallue_error: what a made law of the error gives, and what it keeps."""

import math

import numpy as np
import pytest
from rich.console import Console
from scipy import stats
from toolbox import entries, make_result
from unit_logs import StoppedError, stopping_after, units_in

from bstune.core.errors import ConfigError, StudyError
from bstune.sweeps.harness import check_sweep, compose_sweep
from bstune.sweeps.shallue_error import TrainingBudget, best_within, difference, row, sentence
from bstune.sweeps.unit_log import UnfinishedError

# Of a sweep: a change elsewhere seldom breaks it, and CI runs it.
pytestmark = pytest.mark.slow

FEW = (
    "sweep.experiment.batch_sizes=[16,128]",
    "sweep.experiment.lrs=[0.2,0.4]",
    "sweep.experiment.seeds=[0,1,2,3]",
)
BUDGETS = (
    "sweep.experiment.steps=50",
    "sweep.experiment.examples=2000",
    "sweep.experiment.level=0.95",
)


def law(workload, spec, protocol):
    """Return a trial whose error falls by steps and is least at a learning rate of 0.4, but for the seed's own part."""
    end = max(protocol.budget.steps, math.ceil(protocol.budget.examples / spec.batch_size))
    history = [
        (step, 1.0 / step + abs(spec.lr - 0.4) + 1e-3 * spec.seed) for step in range(5, end + 1, 5)
    ]
    return make_result(
        batch_size=spec.batch_size, lr=spec.lr, seed=spec.seed, status="stopped", history=history
    )


def run(folder, *options, trainer=law):
    arguments = (
        "workload=digits",
        "device=cpu",
        f"sweep.output={folder}",
        *FEW,
        *BUDGETS,
        *options,
    )
    checked = check_sweep("shallue_error", compose_sweep("shallue_error", arguments))
    return checked.find(Console(quiet=True), trainer=trainer)


def test_each_budget_counts_what_it_allows_on_fresh_seeds_and_runs_are_kept(tmp_path):
    asked = []

    def counting(workload, spec, protocol):
        asked.append((spec.batch_size, spec.lr, spec.seed))
        return law(workload, spec, protocol)

    found = run(tmp_path, trainer=counting)
    # Each rate runs on the first seed, the best one on the others.
    assert len(asked) == len(set(asked)) == 4 + 2 * 3
    # Seeds 1 to 3 add 2e-3 on average.
    means = {(one["budget"], one["batch_size"]): one["mean"] - 2e-3 for one in found.rows}
    expected = {
        ("2,000 examples", 16): 1 / 125,
        # 2,000 examples are 16 steps, of which the one at 15 is evaluated.
        ("2,000 examples", 128): 1 / 15,
        ("50 steps", 16): 1 / 50,
        ("50 steps", 128): 1 / 50,
        ("both", 16): 1 / 125,
        ("both", 128): 1 / 50,
    }
    assert means == pytest.approx(
        {(name.replace(",", ""), size): value for (name, size), value in expected.items()}
    )
    assert {one["lr"] for one in found.rows} == {0.4}
    assert all(
        # The standard deviation of the three seeds is 1e-3.
        one["high"] - one["mean"] == pytest.approx(stats.t.ppf(0.975, 2) * 1e-3 / 3**0.5)
        for one in found.rows
    )
    # Nothing is trained twice, and runs under other settings are no part of it.
    assert run(tmp_path, trainer=None).rows == found.rows
    with pytest.raises(StudyError, match=r"loss\.label_smoothing: was 0\.0, now 0\.1"):
        run(tmp_path, "workload.module.loss.label_smoothing=0.1", trainer=None)
    with pytest.raises(StudyError, match=r"sweep\.experiment\.steps: was 50, now 60"):
        run(tmp_path, "sweep.experiment.steps=60", trainer=None)
    # A larger grid takes over what there is.
    asked.clear()
    run(tmp_path, "sweep.experiment.lrs=[0.2,0.4,0.8]", trainer=counting)
    assert asked == [(16, 0.8, 0), (128, 0.8, 0)]


def test_a_sweep_that_is_stopped_goes_on(tmp_path):
    """Of four runs that choose and six that are reported it is stopped in either."""
    whole = run(tmp_path / "whole")
    folder = tmp_path / "stopped"
    for count in (3, 4):
        with pytest.raises(StoppedError):
            run(folder, trainer=stopping_after(count, law))
    finding = run(folder, trainer=stopping_after(3, law))
    assert (finding.sentence, finding.rows) == (whole.sentence, whole.rows)
    assert units_in(folder / "runs.jsonl") == units_in(tmp_path / "whole" / "runs.jsonl")
    assert len(set(units_in(folder / "runs.jsonl"))) == 10


def test_a_choice_of_a_batch_size_trains_it_to_its_end(tmp_path):
    """Its best rate is chosen and reported though the other batch size has not begun."""
    with pytest.raises(UnfinishedError, match="5 of 7 units"):
        run(tmp_path, "sweep.experiment.only=[128]")
    assert units_in(tmp_path / "runs.jsonl") == [
        "128/0.2/0",
        "128/0.4/0",
        *(f"128/0.4/{seed}" for seed in (1, 2, 3)),
    ]
    with pytest.raises(ConfigError, match=r"names 64, .*units: 16/0\.2/0; "):
        run(tmp_path, "sweep.experiment.only=[64]")
    assert len(run(tmp_path, trainer=stopping_after(5, law)).rows) == 6


@pytest.mark.parametrize(
    ("option", "text"),
    [
        (
            "sweep.experiment.batch_sizes=[16]",
            r"two batch sizes or more, from 1 to 1200, but got \[16\]",
        ),
        ("sweep.experiment.batch_sizes=[16,1201]", r"from 1 to 1200, but got \[16, 1201\]"),
        ("sweep.experiment.lrs=[]", r"learning rates over 0, but got \[\]"),
        ("sweep.experiment.lrs=[0.1,-1]", "learning rates over 0"),
        (
            "sweep.experiment.seeds=[0,1]",
            r"three different seeds or more, from 0, but got \[0, 1\]",
        ),
        ("sweep.experiment.seeds=[0,1,1]", "three different seeds"),
    ],
)
def test_what_cannot_be_compared_is_refused(option, text, tmp_path):
    with pytest.raises(ConfigError, match=text):
        run(tmp_path, option)
    assert entries(tmp_path) == []


@pytest.mark.parametrize(
    ("sign", "steps", "examples", "expected"),
    [
        (1.0, None, None, 0.1),
        (1.0, 20, None, 0.3),
        # 80 examples are ten steps of 8.
        (1.0, None, 80, 0.5),
        (1.0, 9, None, math.inf),
        (-1.0, 20, None, 0.5),
    ],
)
def test_the_best_within_a_budget(sign, steps, examples, expected):
    budget = TrainingBudget("b", steps, examples)
    assert best_within([(10, 0.5), (20, 0.3), (30, 0.4), (40, 0.1)], 8, sign, budget) == expected


LOW, HIGH = (0.10, 0.11, 0.12), (0.20, 0.21, 0.22)


@pytest.mark.parametrize(
    ("small", "large", "mode", "text"),
    [
        (
            LOW,
            HIGH,
            "min",
            "within 9 steps, larger is worse (0.21 at B = 64, 0.11 at B = 8; difference",
        ),
        (LOW, HIGH, "max", "larger is better"),
        (HIGH, LOW, "min", "larger is better"),
        (LOW, (0.09, 0.11, 0.13), "min", "no difference is shown"),
        ((0.1,) * 3, (0.1,) * 3, "min", "no difference is shown"),
        (LOW, (0.1, math.inf, 0.1), "min", "too few batch sizes have a value"),
    ],
)
def test_the_sentence_says_whether_the_largest_is_worse(small, large, mode, text):
    rows = [row("9 steps", size, 0.1, values, 0.95) for size, values in ((8, small), (64, large))]
    assert text in sentence(rows, "val/error", mode, 0.95)


def test_the_difference_is_welchs():
    one, other = np.random.default_rng(0).normal(size=(2, 5)) + np.array([[1.0], [0.0]])
    spread = one.var(ddof=1) / 5, other.var(ddof=1) / 5
    freedom = sum(spread) ** 2 / (spread[0] ** 2 / 4 + spread[1] ** 2 / 4)
    half = stats.t.ppf(0.975, freedom) * math.sqrt(sum(spread))
    middle = one.mean() - other.mean()
    assert difference(one, other, 0.95) == pytest.approx((middle - half, middle + half))
