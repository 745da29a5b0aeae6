"""search.objective=loss: which runs are due, what the answer says, and whole studies on recorded runs."""

import json
import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import optuna
import pytest
from builders import (
    changed,
    copy_of_study,
    hand_at_budget,
    hand_budget_point,
    moved_study,
    result_of,
)
from toolbox import made_table, make_result, metric_values, trials_of

import bstune
from bstune.core import scaling
from bstune.core.errors import ConfigError, StudyError
from bstune.core.records import OUT_OF_TIME, Target
from bstune.core.search_space import Space
from bstune.core.step_time_law import law_of_trials
from bstune.report.answer import answer
from bstune.report.budget_rows import budget_rows
from bstune.report.compared_study import compared_study
from bstune.report.lines import at_budget as lines
from bstune.report.study_folder import read_study
from bstune.result import (
    AsGoodAtBudget,
    BestSizeAtShare,
    BestSizeLater,
    GainAtBudget,
    SameAtBudget,
    SearchPlan,
    SizeGrowthOverBudget,
)
from bstune.search.budget_findings import AsGoodSizes, MetricAtSize
from bstune.study.analysis.at_budget import _as_good, _mean_and_half_width, error_of_count
from bstune.study.at_budget import (
    best_full,
    due_run,
    held_to_end,
    is_full,
    known_best,
    runs_to_come,
)
from bstune.study.planning import trial_budget
from bstune.study.planning.baseline import BaselineRuns
from bstune.study.planning.plan import FIRST_REPLICATE
from bstune.study.storage.attributes import BUDGET_TIMES
from bstune.study.verbs.retarget import main as report

# A replayed table: 2 s of training take no time.
LOSS = ("workload=replay", "workload.table=t.jsonl", "workload.name=replay", "study=loss")
LOSS += ("mlflow.enabled=false", "scaling.batch_size=32", "search.objective=loss")
SECONDS = (*LOSS, "budget.seconds=2")
# Between the batch sizes whose seconds are stored, tau is off by at most 1%.
TAU_ERROR = 1.01


def searched_trials(study):
    """The number of trials that the search asked for, without those on fresh seeds."""
    return [trial.replicate_of for trial in trials_of(study)].count(None)


def run(number, steps=100, value=0.3, **changes):
    """A trial that ended at its budget, after 100 steps."""
    # Half of it and all of it are evaluated.
    values = {"trial_index": number, "status": "stopped", "steps": steps, "steps_low": steps}
    history = ((steps // 2, value + 0.1), (steps, value))
    return make_result(number=number, history=history, **{**values, **changes})


def again(number, of, seed, replicate=0, value=0.3):
    """A run of a trial on a fresh seed."""
    # A replicate's index lies beyond those of the search.
    index = FIRST_REPLICATE * (1 + replicate) + of
    return run(number, replicate_of=of, seed=seed, trial_index=index, value=value)


@pytest.mark.parametrize(
    ("trial", "full"),
    [
        (run(0), True),
        # A run may go a step past its budget, and is full.
        (run(0, steps=101), True),
        (run(0, steps=99), False),
        (run(0, status="diverged"), False),
        (run(0, status="failed"), False),
        (replace(run(0), history=((100, None),)), False),
    ],
)
def test_a_full_trial_ran_to_its_budget_and_has_a_metric(trial, full):
    assert is_full(trial, lambda batch_size: 100) is full


@pytest.mark.parametrize(("mode", "best"), [("min", 1), ("max", 0)])
def test_the_best_full_trial_is_one_of_the_searchs_own(mode, best):
    # 0 and 1 are full; 2 is ahead, but stopped at half; 3 and 4 are fresh seeds of 1.
    trials = [run(0, value=0.4), run(1, value=0.3), run(2, steps=50, value=0.1), again(3, 1, 70)]
    trials.append(replace(again(4, 1, 71), history=((100, 0.2),)))
    target = Target("val/loss", 0.0, mode)
    assert best_full(trials, lambda batch_size: 100, target).number == best
    assert best_full(trials[2:], lambda batch_size: 100, target) is None


BASELINE = BaselineRuns(run(0, batch_size=64, lr=0.1))
# Another batch size and rate than the baseline's.
BEST = run(1, batch_size=16, lr=0.01)
LATER = run(9, batch_size=128, lr=0.05)


@pytest.mark.parametrize(
    ("trials", "runs", "due"),
    [
        # The trial, which of its replicates, and the seed that it shares.
        ([BEST], BASELINE, (1, 0, None)),
        ([BEST, again(2, 1, 70)], BASELINE, (1, 1, None)),
        # All of the winner's have run: the baseline runs on their seeds.
        ([BEST, again(2, 1, 70), again(3, 1, 71)], BASELINE, (0, 0, 70)),
        (
            [BEST, again(2, 1, 70), again(3, 1, 71)],
            replace(BASELINE, again=(again(4, 0, 70),)),
            (0, 1, 71),
        ),
        (
            [BEST, again(2, 1, 70), again(3, 1, 71)],
            replace(BASELINE, again=(again(4, 0, 70), again(5, 0, 71))),
            None,
        ),
        # Where the winner is the baseline's own point, it has run already.
        ([BEST, again(2, 1, 70), again(3, 1, 71)], BaselineRuns(BEST), None),
        (
            # A baseline that diverged has nothing to compare.
            [BEST, again(2, 1, 70), again(3, 1, 71)],
            BaselineRuns(run(0, batch_size=64, lr=0.1, status="diverged")),
            None,
        ),
        # No baseline: the winner's runs are all.
        ([BEST, again(2, 1, 70), again(3, 1, 71)], None, None),
    ],
)
def test_which_run_on_a_fresh_seed_is_due(trials, runs, due):
    # Two fresh seeds of the winner, and at most three points that may have some.
    found = due_run(trials, BEST, runs, replicates=2, candidates=3)
    told = None
    if found is not None:
        seed = None if found.seed_of is None else found.seed_of.seed
        told = (found.trial.number, found.replicate, seed)
    assert told == due


@pytest.mark.parametrize(
    ("again_of", "winner", "baseline", "counts"),
    [
        # Before there is a winner, nothing is to come.
        ([], None, BASELINE, []),
        # Three of the winner's and three of the baseline's.
        ([], BEST, BASELINE, [3, 3]),
        # Of the three that each is to have two have run.
        ([again(2, 1, 70), again(3, 1, 71, 1)], BEST, BASELINE, [1, 3]),
        ([again(2, 1, 70, 0), again(3, 1, 71, 1), again(4, 1, 72, 2)], BEST, BASELINE, [0, 3]),
        (
            [again(2 + i, 1, 70 + i, i) for i in range(3)] + [again(5, 0, 70)],
            BEST,
            BASELINE,
            [0, 2],
        ),
        # Those of an earlier winner do not count: the study has gone on to another one.
        ([LATER, *(again(2 + i, 1, 70 + i, i) for i in range(3))], LATER, BASELINE, [3, 3]),
        # Only the winner's: there is no baseline, or it is the winner itself.
        ([], BEST, None, [3]),
        ([], BASELINE.first, BASELINE, [3]),
        ([again(5, 0, 70)], BASELINE.first, BASELINE, [2]),
        ([], BEST, BaselineRuns(replace(BASELINE.first, status="diverged")), [3]),
    ],
)
def test_which_runs_on_fresh_seeds_are_to_come(again_of, winner, baseline, counts):
    trials = [BASELINE.first, BEST, *again_of]
    # An eighth of a second an example.
    found = runs_to_come(trials, winner, baseline, 3, lambda batch_size: batch_size / 8)
    assert [runs.count for runs in found] == counts
    sizes = [BEST.batch_size, BASELINE.first.batch_size]
    if winner is BEST:
        for runs, size in zip(found, sizes, strict=False):
            assert runs.seconds == size / 8


def test_a_run_on_a_fresh_seed_stands_for_its_point():
    trials = [BEST, again(2, 1, 70)]
    # The run with the better luck is not the point.
    assert due_run(trials, trials[1], None, 2, 3).trial.number == 1


def test_the_baseline_may_be_the_winner_itself():
    own = BASELINE.first
    runs = [again(5, 0, 70), again(6, 0, 71, replicate=1)]
    told = replace(BASELINE, again=tuple(runs))
    # The winner's runs are the baseline's, too: none is run twice.
    assert due_run([own], own, BASELINE, 2, 3).replicate == 0
    assert due_run([own, runs[0]], own, replace(BASELINE, again=(runs[0],)), 2, 3).replicate == 1
    assert due_run([own, *runs], own, told, 2, 3) is None


def test_no_more_points_than_candidates_run_again():
    others = [run(10, batch_size=1), run(11, batch_size=2), run(12, batch_size=4)]
    # Three points have a fresh seed already, and the winner would be the fourth.
    begun = [again(20, 10, 80), again(21, 11, 81), again(22, 12, 82)]
    assert due_run([BEST, *others, *begun], BEST, None, 2, candidates=4) is not None
    assert due_run([BEST, *others, *begun], BEST, None, 2, candidates=3) is None
    assert due_run([BEST], BEST, None, 0, candidates=3) is None
    # Those that the wall time ended are asked again, and have begun nothing.
    cut = [replace(one, status="failed", message=OUT_OF_TIME) for one in begun]
    assert due_run([*others, *cut, BEST], BEST, None, 2, 3).trial is BEST


def test_the_interval_of_a_mean_is_students():
    # t of 95% at 2 degrees of freedom is 2.919986; the standard error of 1, 2, 3 is 1/sqrt(3).
    mean, half = _mean_and_half_width([1.0, 2.0, 3.0])
    # 2.919986 x 1/sqrt(3).
    assert (mean, half) == pytest.approx((2.0, 2.919986 / 3**0.5), rel=1e-6)
    assert _mean_and_half_width([5.0]) == (5.0, 0.0)


# The best on the way, not the last.
@pytest.mark.parametrize(("mode", "best"), [("min", 0.3), ("max", 0.4)])
def test_the_best_value_counts(mode, best):
    assert run(0).best_value(mode) == pytest.approx(best)
    assert replace(run(0), history=((0, 1.0), (5, None))).best_value(mode) is None


def told(found, **changes):
    trials = [run(number, batch_size=64 + 32 * number) for number in range(6)]
    return result_of(trials, objective="loss", at_budget=found, **changes)


# No fresh seed in common, so there is no interval.
UNPAIRED = GainAtBudget(difference=0.1, low=None, high=None, level=0.9, seeds=0, share=0.5)


WITH_SECONDS = changed(hand_budget_point(128, 0.28), seconds=37.0)


@pytest.mark.parametrize(
    ("changes", "texts"),
    [
        # 0.42 is the mean of the baseline's three fresh seeds, 0.3 that of the winner's.
        ({}, ("0.12 lower than your batch size 64", "has that 0.42 after 41% of the budget")),
        ({"gain": None}, ("none: your batch size 64",)),
        ({"baseline": None, "gain": None}, ("no run of your own configuration",)),
        (
            {
                "gain": GainAtBudget(
                    # The interval holds 0.
                    difference=0.02,
                    low=-0.1,
                    high=0.14,
                    level=0.9,
                    seeds=3,
                    share=0.9,
                )
            },
            ("not shown to be better", "keep what you have"),
        ),
        (
            {"gain": UNPAIRED, "baseline": hand_budget_point(64, 0.4)},
            ("yours predicted from its single search trial, USE on 3 fresh seeds",),
        ),
        ({"gain": changed(UNPAIRED, seeds=1)}, ("on 1 fresh seed of both",)),
        (
            {"baseline": changed(hand_budget_point(64, 0.4), hyperparameters={"dim": 32})},
            ("than your batch size 64, learning rate 0.1, dim 32, which comes to",),
        ),
        # One seed differs from another by 0.01: a smaller gain may be luck.
        ({"gain": changed(UNPAIRED, difference=0.009)}, ("not shown to be better", "keep what")),
        (
            {"winner": WITH_SECONDS, "baseline": changed(WITH_SECONDS, seconds=8.0)},
            ("takes 4.6 times as long as yours",),
        ),
    ],
)
def test_the_gain_is_said_where_it_is_shown(changes, texts):
    said = " ".join(filter(None, lines.gain(told(hand_at_budget(**changes)))))
    for text in texts:
        assert text in said


@pytest.mark.parametrize(
    ("replicates", "advice"), [(3, "a larger search.wall_seconds"), (0, "search.replicates=3")]
)
def test_what_had_no_fresh_seeds_is_cautioned(replicates, advice):
    once = hand_at_budget(
        # Each ran once, in the search.
        winner=hand_budget_point(128, 0.28),
        baseline=hand_budget_point(64, 0.4),
        gain=UNPAIRED,
    )
    search = SearchPlan(trials=8, replicates=replicates, limit=None)
    found = list(lines.cautions(told(once, search=search, stop_reason="the plan is done")))
    assert advice in found[0]
    # Without fresh seeds by choice there is one thing to say.
    assert len(found) == (2 if replicates else 1)
    assert not list(lines.cautions(told(hand_at_budget(), search=search)))


def test_the_metric_to_expect_is_that_of_fresh_seeds_then_the_predicted_one():
    # (0.4 + 0.5)/2.
    assert hand_budget_point(64, 0.3, (0.4, 0.5)).expected == pytest.approx(0.45)
    # 0.01 above its own value: what builders state as predicted.
    assert hand_budget_point(64, 0.3).expected == pytest.approx(0.31)


@pytest.mark.parametrize(
    ("differs_at", "budget", "text"),
    [
        # No share of the budget told them apart.
        (None, {}, "nor do these runs say which"),
        # A quarter of the 60 s of hand_at_budget.
        (0.25, {}, "budget.seconds=15 is the smallest"),
        # A quarter of 1001 examples and of 50 steps, rounded up.
        (0.25, {"seconds": None, "examples": 1001}, "budget.examples=251 is the smallest"),
        (0.25, {"seconds": None, "steps": 50}, "budget.steps=13 is the smallest"),
    ],
)
def test_a_budget_that_tells_no_trial_from_another_is_said(differs_at, budget, text):
    same = SameAtBudget(value=0.1, differs_at=differs_at)
    cautions = list(lines.cautions(told(hand_at_budget(same=same, **budget))))
    assert len(cautions) == 1
    assert text in cautions[0]
    assert list(lines.cautions(told(hand_at_budget(**budget)))) == []
    # A metric that never changes says more than that no trial differs from another.
    (caution,) = lines.cautions(changed(told(hand_at_budget(same=same, **budget)), only_value=0.1))
    assert "nothing trains" in caution


def hand_size_growth(batch_size=64.0, low=32.0, high=128.0, later_low=60.0):
    """B grows as the root: a factor of 2 for 4 times the budget."""
    sizes = (
        BestSizeAtShare(share=1.0, batch_size=batch_size, low=low, high=high, is_at_end=False),
        BestSizeAtShare(share=0.25, batch_size=32.0, low=16.0, high=64.0, is_at_end=False),
    )
    later = BestSizeLater(times=4.0, batch_size=128.4, low=later_low, high=300.0)
    return SizeGrowthOverBudget(
        exponent=0.5, low=-0.1, high=0.9, level=0.9, best_sizes=sizes, later=later
    )


@pytest.mark.parametrize(
    ("changes", "configurations", "texts", "foretold"),
    # 32 to 256 were searched, and USE has 128.
    [
        ({}, 20, 1, True),
        # As wide as what was searched.
        ({"later_low": 30.0}, 20, 1, False),
        # Nearly any batch size may be the best.
        ({"low": 33.0, "high": 250.0}, 20, 1, False),
        ({}, 2, 1, False),
        # USE lies elsewhere, which has a line of its own.
        ({"batch_size": 40.0}, 20, 2, True),
    ],
)
def test_the_growth_of_the_best_batch_size_is_told_where_it_is_known(
    changes, configurations, texts, foretold
):
    found = hand_at_budget(growth=hand_size_growth(**changes))
    told_lines = list(lines.growth(told(found, configurations=configurations)))
    assert len(told_lines) == texts
    assert ("B ~ budget^" in told_lines[0]) == (configurations > 2 and "high" not in changes)
    assert ("foretold" in told_lines[0]) == foretold
    assert ("USE's 128" in told_lines[-1]) == (texts == 2)


@pytest.mark.parametrize(
    ("whole", "text"),
    [
        (32.0, "is 32, an end of those that were searched, at each part of the budget"),
        (256.0, "an end of those that were searched at each part of the budget: 32 at 0.25, 256"),
    ],
)
def test_best_batch_sizes_at_the_ends_of_the_range_tell_no_growth(whole, text):
    growth = hand_size_growth(batch_size=whole)
    at_ends = tuple(changed(best, is_at_end=True) for best in growth.best_sizes)
    found = hand_at_budget(growth=changed(growth, best_sizes=at_ends))
    (line,) = lines.growth(told(found))
    assert text in line


def test_the_best_batch_size_of_a_longer_budget_is_foretold():
    (text,) = lines.growth(told(hand_at_budget(growth=hand_size_growth())))
    # The exponent's interval holds 0.
    assert "is 32 at 0.25, 64 at 1 of the budget: B ~ budget^0.50" in text
    assert "not told apart from no growth" in text
    assert "at 4 times the budget 128 is foretold (90%: 60 to 300)" in text


def test_an_answer_of_the_budget_has_lines_of_its_own():
    labels = [label for label, _ in answer(told(hand_at_budget())).lines]
    assert labels == ["USE", "GAIN", "AS GOOD", "LEFT"]
    nothing = answer(result_of([run(0)], objective="loss", at_budget=None))
    assert dict(nothing.lines)["USE"] == (
        "nothing yet: no trial has run to its budget's end with a metric",
    )


def test_the_picture_shows_trials_that_ran_to_the_end_of_the_budget():
    found = hand_at_budget(seconds=None, steps=100)
    # One ran to the end, one was stopped at step 40, one diverged.
    trials = [run(0, batch_size=64), run(1, steps=40, batch_size=32), run(2, status="diverged")]
    rows = budget_rows(trials, told(found))
    (dot,) = rows.dots
    assert dot.batch_size == 64
    assert rows.use.value == pytest.approx(0.3)
    low, high = rows.shown
    assert low < 0.3 < high
    assert budget_rows(trials, told(None)) is None


@pytest.fixture
def table(tmp_path):
    made_table(tmp_path)


# Few enough to run in seconds, and enough for a posterior.
TRIALS = 12


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Run a study within 2 s, once; give where it lies."""
    return moved_study(tmp_path_factory, *SECONDS, f"search.trials={TRIALS}", drawn=True)


@pytest.fixture
def study(made, bstune, tmp_path):
    """Give the folder of that study, which the same command continues here."""
    return copy_of_study(made, tmp_path, "outputs/loss")


def test_a_study_finds_the_best_metric_within_a_budget(study):
    folder = study
    trials = trials_of(folder)
    found = json.loads((folder / "curve.json").read_text())
    at_budget = found["at_budget"]
    first = trials[0]
    # tau(B) = 0.01 + 0.0001 B seconds: trial 0, of B = 32, ends after 2 s.
    assert (first.batch_size, first.steps) == (32, int(2 / 0.0132))
    values = []
    for trial in trials:
        seconds = trial.steps * trial.seconds_per_step
        assert seconds <= 2.0 * TAU_ERROR
        # Trials that were stopped on the way have less.
        if seconds > 1.9:
            values += metric_values(trial)
    assert at_budget["winner"]["value"] <= min(values) + 0.01
    assert at_budget["winner"]["value"] <= at_budget["baseline"]["value"]
    good = at_budget["as_good"]
    assert good["low"] <= at_budget["winner"]["batch_size"] <= good["high"]
    # The objective loss has no target.
    assert found["target_value"] is None
    assert found["use"] is None
    assert found["confirmed"]
    assert found["statuses"]["reached"] == 0
    for name in ("curve.png", "curve.svg", "report.html"):
        assert (folder / name).stat().st_size > 0
    stored = optuna.load_study(study_name="loss", storage="sqlite:///bstune.db")
    assert stored.trials[0].value == first.best_value("min")
    ended = []
    by_number = {trial.number: trial for trial in trials}
    for trial in stored.trials:
        if trial.value is not None:
            ended.append(trial.value)
            assert trial.value == by_number[trial.number].best_value("min")
    assert stored.best_value == min(ended)
    # The trials waited for a decision on their way.
    assert {trial.resumed_from for trial in trials} != {None}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("least_gain", "ended"),
    # Scatters of a seed: of so many none is ever left, and a millionth always is.
    [("1000", True), ("1e-6", False), ("null", False)],
)
def test_what_is_left_to_gain_ends_the_search(bstune, study, least_gain, ended):
    searched = searched_trials(study)
    more = f"search.trials={TRIALS + 1}"
    status, out, err = bstune(*SECONDS, more, f"search.least_gain={least_gain}")
    assert (status, err) == (0, "")
    found = json.loads((study / "curve.json").read_text())
    assert (found["search"]["limit"] == "search.least_gain") is ended
    after = searched_trials(study)
    assert (after == searched) is ended
    assert ("that ended the search" in out) is ended
    at_budget = found["at_budget"]
    # The bound is an expectation over the same draws, but for rounding.
    assert 0.0 <= at_budget["gain_left"] <= at_budget["gain_left_at_most"] * (1.0 + 1e-9)
    assert at_budget["seed_scatter"] > 0.0


@pytest.mark.slow
def test_a_study_goes_on_and_its_budget_is_its_question(bstune, study):
    before = trials_of(study)
    status, _, err = bstune(*SECONDS, f"search.trials={TRIALS + 2}")
    assert (status, err) == (0, "")
    after = trials_of(study)
    # What has run stays.
    assert after[: len(before)] == before
    assert len(after) > len(before)
    status, _, err = bstune(*LOSS, "budget.seconds=3")
    assert status == 2
    assert "budget.seconds: was 2.0, now 3.0" in err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("budget", "steps"),
    [
        # 3200 examples of batches of 32.
        (("budget.examples=3200",), 100),
        (("budget.steps=70", "budget.examples=1"), 70),
        # 1.32 s of 0.0132 s a step; seconds go before examples.
        (("budget.seconds=1.32", "budget.examples=3200"), 100),
    ],
)
def test_one_of_three_budgets_counts(bstune, tmp_path, table, budget, steps):
    status, _, err = bstune(*LOSS, *budget, "search.trials=1", "search.replicates=0")
    assert (status, err) == (0, "")
    assert trials_of(tmp_path / "outputs" / "loss")[0].steps == steps


def test_the_same_runs_answer_for_a_shorter_budget(study, capfd):
    found = json.loads(report(["outputs/loss", "budget.seconds=1"]))["at_budget"]
    assert found["seconds"] == 1.0
    # At the smallest batch size, 8, a step takes 0.0108 s.
    assert found["winner"]["steps"] <= 1.0 / 0.0108
    assert "within 1.00 s of training" in capfd.readouterr().out
    assert (study / "report-1s.html").exists()
    own = json.loads(report(["outputs/loss"]))["at_budget"]
    assert own == json.loads((study / "curve.json").read_text())["at_budget"]


@pytest.mark.parametrize(
    ("asked", "problem"),
    [
        # More than was run cannot be read from it.
        ("budget.seconds=3", "has a budget of 2 s, which tells nothing of 3 s"),
        ("budget.seconds=-1", "must be a positive number"),
        ("budget.seconds=nan", "must be a positive number"),
        ("target=0.2", "which has no target"),
    ],
)
@pytest.mark.usefixtures("study")
def test_what_the_runs_of_a_budget_do_not_tell(asked, problem):
    with pytest.raises((ConfigError, StudyError), match=problem):
        report(["outputs/loss", asked])


@pytest.mark.slow
def test_a_shorter_budget_is_of_a_study_for_the_loss(bstune, table):
    bstune(*LOSS, "search.objective=time", "target=0.14", "search.trials=1", "search.replicates=0")
    with pytest.raises(StudyError, match=r"is of search\.objective=loss"):
        report(["outputs/loss", "budget.seconds=1"])


@pytest.mark.slow
@pytest.mark.usefixtures("study")
def test_studies_of_a_budget_are_compared(bstune):
    bstune(*LOSS, "budget.seconds=1", "search.trials=4", "study=shorter")
    for name, seconds in (("loss", "2.00 s"), ("shorter", "1.00 s")):
        study = compared_study(read_study(Path("outputs", name)).result, name)
        assert study.use.text.endswith(f"after {seconds}")
        assert study.gain_text != "not known"


@pytest.mark.slow
@pytest.mark.parametrize("sampler", ["tpe", "random"])
def test_optunas_samplers_run_each_trial_to_its_budget(bstune, tmp_path, table, sampler):
    few = ("search.trials=4", "search.replicates=0")
    status, _, err = bstune(*SECONDS, f"sampler={sampler}", *few)
    assert (status, err) == (0, "")
    for trial in trials_of(tmp_path / "outputs" / "loss"):
        if trial.status == "stopped":
            seconds = trial.steps * trial.seconds_per_step
            # A whole step is left out.
            assert 2.0 / TAU_ERROR - trial.seconds_per_step <= seconds <= 2.0 * TAU_ERROR


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ((*SECONDS, "target=0.2"), "leave one of them out"),
        (
            (*SECONDS, "search.objective=time", "target=0.14"),
            "budget.seconds=2 is of search.objective=loss",
        ),
        # Ten steps at the smallest batch size, 8.
        ((*LOSS, "budget.seconds=0.01"), "give budget.seconds=0.109 at least"),
        ((*LOSS, "budget.examples=40"), "give budget.examples=80 at least"),
        ((*LOSS, "budget.examples=1", "budget.steps=3"), "give budget.steps=10 at least"),
        ((*LOSS, "budget.seconds=0"), "budget.seconds must be greater than 0"),
    ],
)
def test_budgets_that_tell_nothing_are_refused(bstune, tmp_path, table, options, problem):
    status, _, err = bstune(*options)
    assert status == 2
    assert problem in err
    assert not (tmp_path / "outputs").exists()


def test_a_target_and_a_budget_do_not_go_together_in_python():
    with pytest.raises(ConfigError, match="leave one of them out"):
        bstune.Study(objective="loss", target="val_loss<=0.1")


@pytest.mark.parametrize(
    ("ranked", "replicates", "best"),
    [
        # Nothing has run again: what is predicted counts.
        ([BEST, run(2, batch_size=128)], 2, 1),
        # One has all of its fresh seeds, the best predicted none.
        ([run(2, batch_size=128), BEST], 2, 1),
        ([run(2, batch_size=128), BEST], 0, 2),
        ([run(2, batch_size=128), BEST], 3, 2),
    ],
)
def test_what_ran_on_its_fresh_seeds_is_used(ranked, replicates, best):
    # Two fresh seeds of BEST, trial 1.
    trials = [*ranked]
    if ranked[0].number == 2:
        trials += [again(5, 1, 70), again(6, 1, 71, replicate=1)]
    assert known_best(trials, ranked, replicates).number == best


def test_a_trial_that_ended_by_itself_stands_at_what_it_had():
    record = held_to_end(run(0, steps=40, value=0.3), 100)
    assert (record.steps, record.steps_low, record.examples) == (100, 100, 100 * record.batch_size)
    assert record.history[-1] == (100, 0.3)
    assert is_full(record, lambda batch_size: 100)
    assert held_to_end(replace(run(0, steps=40), history=()), 100).steps == 40


# Counted as the law has it, at twice its seconds at both batch sizes, and at one of them.
@pytest.mark.parametrize(
    ("times", "off"), [((1.0, 1.0), 0.0), ((2.0, 2.0), 0.0), ((2.0, 1.0), 2.0)]
)
def test_the_count_of_a_budgets_steps_is_unsure_by_what_timings_and_trials_tell(times, off):
    law = law_of_trials([(16, 0.1), (16, 0.11), (256, 0.4), (256, 0.44)])
    counted = {16: times[0] * law(16), 256: times[1] * law(256)}
    distance = math.log(off) if off else 0.0
    expected = math.hypot(law.ratio_error(16, 256), distance)
    assert error_of_count(counted.__getitem__, law, 16, 256) == pytest.approx(expected)
    # Two runs of one batch size have the same steps.
    assert error_of_count(counted.__getitem__, law, 16, 16) == 0.0


@pytest.mark.parametrize(("error", "cautions"), [(None, 0), (0.05, 0), (0.3, 1)])
def test_a_count_of_steps_that_is_not_well_known_is_cautioned(error, cautions):
    result = told(hand_at_budget(count_error=error))
    assert len(list(lines.cautions(result))) == cautions


@pytest.mark.slow
def test_seconds_of_a_step_stay_those_with_which_a_study_began(bstune, tmp_path, table):
    # Each of its trials runs to the end of its budget.
    whole = (*SECONDS, "sampler=random", "search.replicates=0")
    bstune(*whole, "search.trials=2")
    folder = tmp_path / "outputs" / "loss"
    first = trials_of(folder)
    # As if it had begun on a machine that is twice as slow.
    study = optuna.load_study(study_name="loss", storage="sqlite:///bstune.db")
    times = study.user_attrs[BUDGET_TIMES]
    sizes = [size for size, _ in times]
    assert sizes == sorted(set(sizes))
    doubled = [[size, 2.0 * seconds] for size, seconds in times]
    study.set_user_attr(BUDGET_TIMES, doubled)
    status, _, err = bstune(*whole, "search.trials=4")
    # The budget of 2 s lasts half as many steps, as each is said to take twice as long.
    assert (status, err) == (0, "")
    later = trials_of(folder)[len(first) :]
    assert len(later) == 2
    for trial in later:
        assert trial.steps * trial.seconds_per_step <= 1.0 * TAU_ERROR


@pytest.mark.slow
def test_a_budget_of_seconds_needs_a_survey_and_time(bstune, tmp_path, monkeypatch):
    trained = ("workload=digits", "search.objective=loss", "mlflow.enabled=false")
    trained += ("search.workers=0",)
    status, _, err = bstune(*trained, "budget.seconds=1")
    assert (status, "let hardware.enabled=true" in err) == (2, True)
    # Three trials of 10 s need 30 s.
    status, _, err = bstune(*trained, "budget.seconds=10", "search.wall_seconds=20")
    assert (status, "is no time for 3 trials of budget.seconds=10" in err) == (2, True)
    assert not (tmp_path / "outputs").exists()


@pytest.mark.parametrize(
    ("budget", "steps"),
    [
        # tau(32) = 0.0132 s.
        (("budget.seconds=2",), int(2 / 0.0132)),
        (("budget.examples=3200", "budget.steps=400"), 100),
        (("budget.examples=1", "budget.steps=70"), 70),
    ],
)
def test_a_single_trial_has_the_budget_of_a_studys(bstune, tmp_path, table, budget, steps):
    point = ("trial.batch_size=32", "trial.lr=0.02")
    status, _, err = bstune(*LOSS, *point, *budget)
    assert (status, err) == (0, "")
    record = next((tmp_path / "outputs" / "loss").glob("**/trial.json"))
    assert json.loads(record.read_text())["steps"] == steps


def test_a_single_trial_counts_seconds_by_those_of_its_study(bstune, tmp_path, monkeypatch):
    point = ("trial.batch_size=64", "trial.lr=0.5")
    trained = ("workload=digits", "search.objective=loss", "mlflow.enabled=false", *point)
    status, _, err = bstune(*trained, "budget.seconds=1")
    assert (status, "study=digits has measured" in err) == (2, True)
    assert not (tmp_path / "outputs").exists()
    times = ((32, 0.01), (128, 0.04))
    monkeypatch.setattr(trial_budget, "stored_budget_times", lambda name, url: times)
    # Between them tau grows as B: 0.02 s at 64.
    status, _, err = bstune(*trained, "budget.seconds=1")
    assert (status, err) == (0, "")
    record = next((tmp_path / "outputs" / "digits").glob("**/trial.json"))
    # 1 s of 0.02 s a step.
    assert json.loads(record.read_text())["steps"] == 50


@pytest.mark.slow
def test_a_yaml_workload_needs_no_targets_value(bstune, tmp_path):
    options = ("budget.examples=640", "search.trials=1", "search.replicates=0", "search.workers=0")
    arguments = ("workload=digits", "search.objective=loss", "mlflow.enabled=false")
    status, _, err = bstune(*arguments, "~workload.target.value", *options)
    assert (status, err) == (0, "")
    # 640 examples of digits' 64.
    assert trials_of(tmp_path / "outputs" / "digits")[0].steps == 10


@pytest.mark.slow
def test_a_schedule_that_ends_with_the_trial_tells_nothing_of_shorter_budgets(bstune, tmp_path):
    options = ("budget.examples=60000", "search.trials=3", "search.replicates=2")
    arguments = ("workload=replay", "workload.table=mnist_mlp_linear", "search.objective=loss")
    status, _, err = bstune(*arguments, *options, "mlflow.enabled=false", "study=linear")
    assert (status, err) == (0, "")
    folder = tmp_path / "outputs" / "linear"
    found = json.loads((folder / "curve.json").read_text())["at_budget"]
    assert found["growth"] is None
    assert found["gain"] is None or found["gain"]["share"] is None
    for trial in trials_of(folder):
        # A schedule's horizon is the trial's own last step, rounded up.
        assert trial.horizon == trial.steps == -(-60000 // trial.batch_size)
    with pytest.raises(StudyError, match="schedules end with the trial"):
        report([str(folder), "budget.seconds=1"])


# As many digits as the scatter of a seed makes sense of.
@pytest.mark.parametrize(
    ("value", "scatter", "expected"),
    [
        (1.591294, 0.0047, "1.591"),
        (1.591294, 0.3, "1.59"),
        (0.301234, 0.01, "0.301"),
        (0.301234, 0.0, "0.301"),
        (0.0, 0.01, "0"),
        # No more than six digits, whatever the scatter.
        (1234.5678, 1e-9, "1234.57"),
    ],
)
def test_a_metric_is_written_down_to_where_seeds_differ(value, scatter, expected):
    found = hand_at_budget(seed_scatter=scatter)
    assert lines.metric_words(value, found) == expected


@pytest.mark.parametrize(
    ("full", "high"),
    [
        # The user's own trial at 256 has another rate: it says nothing of the best one's there.
        ([(68, 3.0), (80, 2.5), (256, 0.0)], 152),
        # One that has about the rate speaks for an octave around it.
        ([(68, 3.0), (256, 2.5)], 431),
        # Nothing beside the winner ran to the budget's end.
        ([(68, 3.0)], 128),
    ],
)
def test_what_is_as_good_at_the_budget_was_run_to_its_end_nearby(full, high):
    """The trials' rates are in octaves over the rule's, as the best one of all sizes is, by 3."""
    space = Space(64, 4096, 1, 1.0, partial(scaling.sqrt, reference_batch_size=256, reference_lr=1))
    curve = []
    for quarter in range(25):
        size = round(64 * 2 ** (quarter / 4))
        lr = 8.0 * math.sqrt(size / 256)
        curve.append(MetricAtSize(size, 0.3, 0.2, 0.4, lr, lr / 2, lr * 2))
    findings = SimpleNamespace(as_good=AsGoodSizes(64, 431, True, False), curve=curve)
    trials = []
    for number, (size, delta) in enumerate(full):
        lr = 2.0**delta * math.sqrt(size / 256)
        trials.append(run(number, batch_size=size, lr=lr))
    found = _as_good(findings, trials[0], trials, space)
    assert (found.low, found.high) == (64, high)
    assert found.is_low_open
    assert found.is_high_open == (high < 431)


@pytest.mark.parametrize(
    ("is_low_open", "expected"),
    [
        (False, "no other batch size than about 8"),
        (True, "no other batch size than about 8; smaller ones are not known"),
    ],
)
def test_one_batch_size_that_is_as_good_may_be_an_end(is_low_open, expected):
    sizes = AsGoodAtBudget(
        low=8, high=8, lr_low=0.1, lr_high=0.1, is_low_open=is_low_open, is_high_open=False
    )
    found = told(hand_at_budget(as_good=sizes))
    assert list(lines.as_good(found)) == [expected]
