"""bstune's own sampler among the searches of the bench."""

import math
from itertools import product

import optuna
import pytest
from optuna.trial import TrialState
from synthetic import Law, Metric, synthetic_table

from bstune.core.curve import frontier_points
from bstune.core.records import Target, TrialResult
from bstune.sweeps.baselines import Entry, FittedSearch, OwnSearch, own_searches, rule_of
from bstune.sweeps.contest import Played, critical, fastest, make_task, play
from bstune.sweeps.search_benchmark import QUICK, chosen
from bstune.sweeps.search_benchmark_report import leader, standing
from bstune.trial.replay import Run, Table

TARGET = Target("error", 0.1, "min")
LAW = Law(noise=0.1)
TABLE = synthetic_table(LAW, metric=Metric(noise=0.05))
TIME, CURVE = (make_task("t", TABLE, TARGET, objective) for objective in ("time", "curve"))
ENTRIES = {entry.key: entry for entry in own_searches()}


@pytest.fixture(autouse=True)
def _quiet():
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    yield
    optuna.logging.set_verbosity(before)


class Kept(OwnSearch):
    """Keeps what it asked for and what came of it."""

    def propose(self, finished):
        spec = super().propose(finished)
        self.specs = [*getattr(self, "specs", []), spec]
        self.finished = list(finished)
        return spec


@pytest.fixture(scope="module")
def kept():
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    search = Kept(TIME.problem, 3)
    return search, play(search, TIME, (20.0,))


def test_a_continued_trial_is_its_parent_with_the_samplers_limit(kept):
    search, played = kept
    continued = [spec for spec in search.specs if spec.resumed_from is not None]
    assert played.trials > len(continued) > 3
    for spec in continued:
        resumed_from = search.specs[spec.resumed_from]
        assert (spec.batch_size, spec.lr, spec.seed) == (resumed_from.batch_size, resumed_from.lr, resumed_from.seed)
        assert spec.max_steps > resumed_from.max_steps
    for spec in search.specs:
        assert (spec.max_steps, spec.resumed_from) == (
            search.sampler.max_steps(spec.number),
            search.sampler.resumed_from(spec.number),
        )
        assert TIME.problem.lr_low <= spec.lr <= TIME.problem.lr_high
    fresh = [spec.seed for spec in search.specs if spec.resumed_from is None]
    assert len(set(fresh)) == len(fresh)


def test_trials_are_told_with_their_records(kept):
    search, _ = kept
    trials = search.study.trials
    assert trials[-1].state == TrialState.RUNNING
    for trial, result in zip(trials, search.finished, strict=False):
        assert TrialResult.from_json(trial.user_attrs["bstune:record"]) == result
        assert trial.user_attrs.get("bstune:parent") == result.resumed_from
        if result.reached:
            assert (trial.state, trial.value) == (TrialState.COMPLETE, math.log(result.time_to_target))
        else:
            assert trial.state == TrialState.PRUNED
    assert {trial.state for trial in trials[:-1]} == {TrialState.COMPLETE, TrialState.PRUNED}


def test_it_finds_the_best_and_would_use_what_its_posterior_likes(kept, monkeypatch):
    search, played = kept
    assert played.path[-1][1] < 1.5
    first = next(trial for trial in search.finished if trial.reached)
    other = max((trial for trial in search.finished if trial.reached), key=lambda trial: trial.time_to_target)
    assert fastest(search.finished).number not in (first.number, other.number)
    monkeypatch.setattr(search.sampler, "recommended", lambda study: other.number)
    before = search.incumbent([])
    assert search.incumbent(search.finished[: first.number]) == before  # nothing was reached at last: it stays
    assert search.incumbent(search.finished[: other.number + 1]) == other
    monkeypatch.setattr(search.sampler, "recommended", lambda study: None)
    assert search.incumbent(search.finished[: other.number + 1]) is None


def test_the_same_seed_asks_the_same(kept):
    assert play(OwnSearch(TIME.problem, 3), TIME, (20.0,)) == kept[1]
    assert play(OwnSearch(TIME.problem, 4), TIME, (5.0,)).path != kept[1].path


@pytest.mark.slow
@pytest.mark.parametrize("factor", [0.01, 10.0])
def test_the_budget_is_a_scale_and_no_limit(factor):
    task = make_task("t", TABLE, TARGET, "time", budget_factor=factor)
    search = Kept(task.problem, 0)
    played = play(search, task, (30.0,))
    assert played.path != ()
    outlived = any(trial.steps > task.problem.budget.last_step(trial.batch_size) for trial in search.finished)
    assert outlived == (factor < 1)


def test_what_ended_before_its_limit_is_not_continued():
    """Only one learning rate reaches the target; the records of the others end early."""
    steps = tuple(range(5, 101, 5))
    falls, stays = (tuple(0.9 - (0.9 - end) * step / 100 for step in steps) for end in (0.05, 0.15))
    runs = [Run(size, 0.5, 0, steps, falls, 0.01, diverged=False) for size in (8, 16, 32)]
    for size, lr in product((8, 16, 32), (0.01, 0.03, 0.1, 0.25)):
        runs.append(Run(size, lr, 0, steps[:8], stays[:8], 0.01, diverged=False))
    task = make_task("t", Table(tuple(runs)), TARGET, "time")
    search = Kept(task.problem, 0)
    played = play(search, task, (20.0,), most_trials=150)
    ended = [trial.number for trial in search.finished if trial.status == "censored" and trial.steps == 40]
    assert ended
    assert not {spec.resumed_from for spec in search.specs} & set(ended)
    assert played.complete


@pytest.mark.slow
def test_b_crit_is_the_posteriors_median_or_that_of_the_fit():
    search = OwnSearch(CURVE.problem, 0)
    assert search.b_crit([]) is None
    played = play(search, CURVE, (2.0,))
    assert played.b_crit[0] * CURVE.b_crit == pytest.approx(LAW.b_crit, rel=0.3)
    low, middle, high = search.b_crit_quantiles((0.05, 0.5, 0.95))
    assert low < middle < high

    class Fitted(FittedSearch):
        def b_crit(self, finished):
            self.found = super().b_crit(finished), critical(frontier_points(finished))
            return self.found[0]

    fitted = Fitted(CURVE.problem, 0)
    play(fitted, CURVE, (1.0,))
    assert fitted.found[0] == fitted.found[1] is not None


def test_the_rules_pass_through_the_reference():
    problem = TIME.problem
    size, lr = problem.reference_batch_size, problem.reference_lr
    for axis, exponent in (("none", 0.0), ("sqrt", 0.5), ("linear", 1.0)):
        rule = rule_of(problem, axis)
        assert (rule(size), rule(4 * size)) == pytest.approx((lr, lr * 4**exponent))


def test_another_rule_is_another_prior_mean(monkeypatch):
    seen = []
    make = OwnSearch.__init__.__globals__["FrontierSampler"]
    monkeypatch.setitem(
        OwnSearch.__init__.__globals__, "FrontierSampler", lambda **known: seen.append(known["rule"]) or make(**known)
    )
    for key in ("bstune", "bstune/none", "bstune/linear"):
        ENTRIES[key].make(TIME.problem, 0)
    size = 4 * TIME.problem.reference_batch_size
    assert [rule(size) / TIME.problem.reference_lr for rule in seen] == pytest.approx([2.0, 1.0, 4.0])


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["bstune"], ["bstune"]),
        (["bstune/none", "bstune"], ["bstune/none", "bstune"]),
        (["tpe/sqrt"], ["tpe/sqrt/pruned", "tpe/sqrt/bound"]),
        (["qmc"], ["qmc/lr", "qmc/sqrt", "qmc/linear", "qmc/saturating", "qmc/surge"]),
    ],
)
def test_bstune_alone_is_the_one_with_its_usual_rule(names, expected):
    assert [entry.key for entry in chosen(names, quick=False)] == expected


def test_it_takes_part_by_default():
    assert [entry.key for entry in chosen([], quick=False)][:3] == ["bstune", "bstune/none", "bstune/linear"]
    assert {entry.group for entry in chosen([], quick=True)} == set(QUICK)


def test_the_line_below_the_table_takes_the_usual_rule_not_the_best():
    tpe = Entry("tpe", "lr", "bound", lambda problem, seed: None)
    found = [
        standing(TIME, entry, [Played(((spent, 1.0),), (), 9, 60.0, True)])
        for entry, spent in ((ENTRIES["bstune"], 6.0), (ENTRIES["bstune/linear"], 5.0), (tpe, 30.0))
    ]
    assert leader(TIME, found).endswith("tpe/lr after 30.0, bstune after 6.0: 5.0 times as much")
    assert "bstune/linear after 5.0" in leader(TIME, found[1:])
