"""The protocol of Shallue et al. 2018 as a sampler."""

import math
import re
from collections import defaultdict
from dataclasses import replace

import numpy as np
import optuna
import pytest
from builders import prepared_study
from optuna.distributions import FloatDistribution, IntDistribution
from test_storage import BUDGET, SPACE, options_with, url

from bstune.core.errors import ConfigError
from bstune.core.search_space import Tunable, van_der_corput
from bstune.search.each_batch_size import EachBatchSize, batch_sizes
from bstune.study.planning.plan_text import plan_text
from bstune.study.storage.asking import ask, distributions
from bstune.study.storage.opening import open_study
from bstune.study.storage.samplers import build_sampler
from bstune.study.storage.turns import turn_at

NODE = {"_target_": "bstune.search.each_batch_size.EachBatchSize", "ratio": 2.0}
MOMENTUM = Tunable("momentum", "", 0.1, 0.99, log=True, integer=False, complement=True)
TUNED = replace(SPACE, tunables=(MOMENTUM,))
SEARCHED = distributions(TUNED)


@pytest.mark.parametrize(
    ("low", "high", "ratio", "sizes"),
    [
        (8, 64, 2.0, [8, 16, 32, 64]),
        # Both ends are there, and each size is at most twice the one before.
        (8, 65, 2.0, [8, 14, 23, 38, 65]),
        (8, 8, 2.0, [8]),
        (1, 3, 1.01, [1, 2, 3]),
    ],
)
def test_batch_sizes(low, high, ratio, sizes):
    assert batch_sizes(low, high, ratio, round) == sizes


@pytest.mark.parametrize(
    ("base", "terms"), [(2, [0, 1 / 2, 1 / 4, 3 / 4]), (3, [0, 1 / 3, 2 / 3, 1 / 9, 4 / 9])]
)
def test_low_discrepancy(base, terms):
    assert [van_der_corput(i, base) for i in range(len(terms))] == pytest.approx(terms)


def asked(index, attempt=0):
    own = {"trial_index": index, "attempt": attempt, "study_seed": BUDGET.seed}
    return EachBatchSize(ratio=2.0, search_space=SEARCHED, snap=TUNED.snap, **own).sample_relative(
        None, None, SEARCHED
    )


def test_every_batch_size_has_as_many_points_well_spread():
    points = defaultdict(list)
    for index in range(32):
        point = asked(index)
        points[point["batch_size"]].append((point["delta"], math.log10(point["momentum"])))
    assert sorted(points) == [8, 16, 32, 64, 128, 256, 512, 1024]
    for some in points.values():
        deltas, logs = np.array(some).T
        assert len(some) == 4
        # Of the four quarters of the range at least three have a point.
        assert len(set(np.floor((deltas + 3.0) / 1.5))) >= 3
        # What is searched is 1 - momentum, from 0.01 to 0.9.
        assert -2 <= logs.min() < logs.max() <= math.log10(0.9)
    # Each batch size has a shift of its own.
    assert len({some[0] for some in points.values()}) == 8
    assert asked(5)["batch_size"] == asked(5, 1)["batch_size"]
    # A point that failed is not tried again.
    assert abs(asked(5)["delta"] - asked(5, 1)["delta"]) > 1e-9


def test_a_study_asks_them_by_their_index(tmp_path):
    """In any order; none is stratified, and the momentum stands in the record, not what is searched in its place."""
    study = open_study("toy", url(tmp_path), "steps", {}, tmp_path)
    for index in (9, 3):
        context = {"search_space": SEARCHED, "snap": TUNED.snap}
        sampler = build_sampler(options_with(NODE), BUDGET, index, context)
        spec = ask(study, turn_at(study, index, "me"), BUDGET, TUNED, sampler, stops=True)[1]
        point = asked(index)
        assert (spec.batch_size, spec.delta) == (point["batch_size"], pytest.approx(point["delta"]))
        assert spec.hyperparameters == {"momentum": 1.0 - point["momentum"]}


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (
            {"ratio": 1.0},
            "sampler.ratio is of neighbouring batch sizes and must be over 1, but got 1.0",
        ),
        (
            {"ratio": 2.0, "search_space": {str(i): FloatDistribution(0, 1) for i in range(12)}},
            "takes at most 9 names in search.tune, but got 10",
        ),
    ],
)
def test_refuses(options, line):
    with pytest.raises(ConfigError, match=re.escape(line)):
        EachBatchSize(**options)


def test_whole_numbers_have_equal_shares():
    space = {"batch_size": IntDistribution(8, 8), "depth": IntDistribution(1, 3)}
    depths = []
    for trial_index in range(300):
        sampler = EachBatchSize(ratio=2.0, search_space=space, trial_index=trial_index)
        depths.append(sampler.sample_relative(None, None, space)["depth"])
    for depth in (1, 2, 3):
        assert depths.count(depth) == pytest.approx(100, abs=3)


def test_in_a_study_of_ones_own_it_has_no_place_for_other_parameters():
    study = optuna.create_study(sampler=EachBatchSize(ratio=2.0))
    with pytest.raises(ConfigError, match="has no parameter dropout"):
        study.ask().suggest_float("dropout", 0, 1)


@pytest.mark.parametrize(
    ("trials", "words"),
    [
        (6, "6 configurations, at each of 3 batch sizes in turn; each ends"),
        (
            7,
            "7 configurations, at each of 3 batch sizes in turn, one more at the 1 smallest; each ends",
        ),
        (
            2,
            (
                "2 configurations, at the 2 smallest of 3 batch sizes alone: choose search.trials as a "
                "multiple of 3; each ends"
            ),
        ),
    ],
)
def test_the_plan_says_how_many_batch_sizes_there_are(trials, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    prepared = prepared_study(
        *(
            "workload=replay",
            "workload.table=fashion_mlp",
            "sampler=each_batch_size",
            f"search.trials={trials}",
        ),
        *(
            "search.batch_size.low=16",
            "search.batch_size.high=64",
            "search.replicates=0",
            "mlflow.enabled=false",
        ),
    )
    prepared.close()
    assert words in plan_text(prepared, [])
