"""A study without a winner: its best point so far, what that is predicted to take, and the baseline beside it."""

import numpy as np
import pytest
from builders import make_baseline, result_of
from test_acquisition import inferred
from toolbox import make_trial

from bstune.core.records import CUT_SHORT, Budget, Target
from bstune.report.answer import answer
from bstune.report.lines.unreached import cause_of
from bstune.study.analysis.unreached import best_so_far, failures_of

TARGET = Target("val/error", 0.1, "min")
ACCURACY = Target("val/accuracy", 0.9, "max")


def falling(number, steps_to_target, last_step, tau=0.01, batch_size=64, **changes):
    """A stopped trial whose error falls as the square root of its steps, to 0.1 at ``steps_to_target``."""
    steps = np.unique(np.geomspace(10, last_step, 12).astype(int))
    history = tuple((int(step), 0.1 * (steps_to_target / step) ** 0.5) for step in steps)
    settings = {"status": "stopped", "steps": last_step, "steps_low": last_step}
    return make_trial(number, batch_size, tau=tau, history=history, **(settings | changes))


def so_far(trials, baseline=None, target=TARGET, last_step=100_000):
    posterior = inferred(trials, target=target, ideal=0.0 if target.mode == "min" else 1.0)
    return best_so_far(trials, target, baseline, posterior, lambda batch_size: last_step)


def test_the_closest_is_named_with_what_it_came_to_and_is_predicted_to_take():
    near = falling(0, 2000, 1620)
    far = falling(1, 9000, 500, batch_size=16)
    row = so_far([near, far])
    assert (row.number, row.batch_size, row.seed) == (0, 64, 1000)
    # 0.1 sqrt(2,000/1,620) = 0.111.
    assert (row.value, row.steps, row.seconds) == (pytest.approx(0.1 / 0.9), 1620, 16.2)
    # The error of a square root's law meets the target at 2,000 steps; histories seen so far slow
    # down.
    assert 1620 < row.predicted_steps < 3240
    assert (row.more_than, row.beyond_budget) == (None, False)
    assert row.predicted_seconds == pytest.approx(0.01 * row.predicted_steps)
    assert row.compared is None


@pytest.mark.parametrize(
    ("last_step", "more_than", "beyond_budget"),
    # The target is at 5,000 steps, of which 500 ran.
    [(100_000, 1000, False), (1200, 1200, True), (700, 700, True)],
)
def test_far_beyond_what_ran_a_bound_is_told_and_no_number_of_steps(
    last_step, more_than, beyond_budget
):
    trial = falling(0, 5000, 500)
    row = so_far([trial], last_step=last_step)
    assert (row.predicted_steps, row.predicted_seconds) == (None, None)
    assert (row.more_than, row.beyond_budget) == (more_than, beyond_budget)
    # More trials of the same budget would not get there.
    result = result_of([trial], TARGET, Budget(1, 64 * last_step), so_far=row)
    change = cause_of(result).change
    assert (f"budget.examples={4 * 64 * last_step}" in change) == beyond_budget
    assert ("search.trials" in change) == (not beyond_budget)
    assert result.best_by("steps").steps is None


@pytest.mark.parametrize(
    "trial",
    [
        make_trial(0, status="stopped", steps=400, history=((400, 0.5),)),
        # Flat over all of its last half.
        make_trial(
            0,
            status="stopped",
            steps=800,
            history=tuple((step, 0.5) for step in range(100, 801, 100)),
        ),
        make_trial(0, status="diverged", steps=20, history=((10, 0.5), (20, None))),
    ],
    ids=["one evaluation", "flat", "diverged"],
)
def test_nothing_is_predicted_of_a_history_that_does_not_tell(trial):
    row = so_far([trial])
    assert (row.value, row.predicted_steps, row.predicted_seconds) == (0.5, None, None)


def test_the_baseline_stands_beside_it_at_equal_seconds():
    baseline = make_trial(
        0, 32, tau=0.02, status="stopped", steps=100, history=((50, 0.6), (100, 0.5))
    )
    best = make_trial(
        1,
        tau=0.01,
        status="stopped",
        steps=400,
        history=((100, 0.55), (150, 0.3), (200, 0.35), (400, 0.2)),
    )
    # The baseline ends after 2 s, when the other stands at its step 200, past its best.
    expected = {"seconds": 2.0, "value": 0.3, "baseline_value": 0.5}
    assert so_far([baseline, best], baseline).compared.model_dump() == expected


@pytest.mark.parametrize(
    "changes",
    [
        {"tau": None},
        # This is the same point again.
        {"batch_size": 64},
        {"history": ((100, None),)},
        # This one was first looked at too late.
        {"tau": 1.0, "history": ((100, 0.5),)},
        {"history": ((50, 0.7), (100, 55.0)), "status": "diverged"},
    ],
)
def test_nothing_is_compared_without_both_values(changes):
    best = make_trial(1, status="stopped", steps=400, history=((100, 0.4), (400, 0.2)))
    settings = {"batch_size": 32, "tau": 0.01, "status": "stopped", "history": ((100, 0.5),)}
    baseline = make_trial(0, steps=100, **(settings | changes))
    assert so_far([baseline, best], baseline).compared is None


def test_a_metric_that_rises_has_its_largest_value():
    trial = make_trial(0, status="stopped", steps=100, history=((50, 0.7), (100, 0.6)))
    row = so_far([trial], target=ACCURACY)
    assert (row.value, row.steps) == (0.7, 50)


def test_there_is_none_where_a_trial_reached_the_target_or_has_no_metric():
    assert so_far([make_trial(0)]) is None
    assert so_far([make_trial(0, status="out of memory", history=())]) is None


def test_the_answer_says_it():
    best = falling(0, 2000, 1620)
    baseline = falling(1, 9000, 500, batch_size=16)
    row = so_far([best, baseline], baseline)
    own = make_baseline(status="stopped")
    summary = result_of([best, baseline], baseline=own, so_far=row)
    lines = dict(answer(summary).lines)
    assert "0.2" in lines["GAIN"][0]
    assert f"{row.compared.baseline_value:.3f}" in lines["GAIN"][0]
    assert f"{round(row.predicted_steps)} steps" in lines["USE"][1]


@pytest.mark.parametrize(
    ("statuses_and_messages", "expected"),
    [
        ([("reached", "no noise scale")], None),
        # An interruption of the study is no error of its trial.
        ([("failed", CUT_SHORT)], None),
        ([("failed", "A"), ("failed", CUT_SHORT), ("stopped", "no noise scale")], (1, "A")),
        ([("failed", "A"), ("diverged", "not finite"), ("failed", "B")], (2, "B")),
    ],
)
def test_trials_that_failed_by_themselves_are_counted_with_the_last_error(
    statuses_and_messages, expected
):
    trials = []
    for number, (status, message) in enumerate(statuses_and_messages):
        trials.append(make_trial(number, status=status, message=message))
    found = failures_of(trials)
    assert (found and (found.trials, found.message)) == expected


@pytest.mark.parametrize(
    ("steps", "horizon", "budget", "is_cut", "examples"),
    [
        # 225 steps of 64 examples of a schedule of 900.
        (225, 900, Budget(1, 900 * 64), True, 14400),
        # That is less than a quarter of the user's own run, in examples or in steps of 256.
        (224, 900, Budget(1, 900 * 64), True, None),
        (899, 950, Budget(900, 1), True, None),
        (900, 950, Budget(900, 1), True, 57600),
        # These came to their schedule's end, or have none.
        (200, 200, Budget(1, 900 * 64), False, None),
        (200, None, Budget(1, 900 * 64), False, None),
    ],
)
def test_a_cut_schedule_asks_for_a_budget_that_ends_in_time(
    steps, horizon, budget, is_cut, examples
):
    history = ((100, 0.6), (200, 0.5))
    trial = make_trial(0, status="stopped", steps=steps, history=history, horizon=horizon)
    result = result_of([trial], TARGET, budget)
    assert result.reference.batch_size == 256
    assert result.unreached.cut_schedules == is_cut
    change = cause_of(result).change
    if is_cut:
        assert (f"budget.examples={examples}" in change) == (examples is not None)
        assert ("search.wall_seconds" in change) == (examples is None)


F1 = Target("val/f1", 70.0, "max")
# A fraction that rises, with one dip at its end.
RISING = (
    (19, 0.0),
    (92, 0.06),
    (161, 0.295),
    (169, 0.376),
    (188, 0.534),
    (207, 0.598),
    (216, 0.581),
)
# It has come to rest, but for noise.
RESTING = ((20, 0.0), (40, 0.5), (60, 0.59), (80, 0.60), (100, 0.59), (120, 0.6), (140, 0.602))


def unreached(history, target):
    trial = make_trial(0, status="stopped", steps=history[-1][0], history=history)
    return result_of([trial], target, Budget(400, 1)).unreached


@pytest.mark.parametrize(
    ("history", "target", "improving"),
    [
        (RISING, F1, 1),
        (RISING, Target("val/f1", 0.7, "max"), 1),
        (RESTING, F1, 0),
        # It never learned: its last value is its best by chance.
        (((10, 0.1), (20, 0.11), (30, 0.09), (40, 0.1), (50, 0.112)), F1, 0),
        # A loss of a far target, too.
        (tuple((10 * n, 5.0 / n) for n in range(1, 9)), Target("loss", -100.0, "min"), 1),
    ],
)
def test_a_far_target_does_not_make_what_improves_look_at_rest(history, target, improving):
    assert unreached(history, target).improving == improving


@pytest.mark.parametrize(
    ("history", "target"),
    [
        (RESTING, F1),
        (RESTING, Target("val/f1", 0.7, "max")),
        (((10, 5.0), (50, 0.2004), (100, 0.2002)), Target("loss", -100.0, "min")),
        (((10, 0.99601), (50, 0.99612), (100, 0.99613)), Target("val/acc", 0.999, "max")),
    ],
)
def test_an_easier_target_lies_between_the_first_value_and_the_closest(history, target):
    found = unreached(history, target)
    first = history[0][1]
    gap = target.gap(found.easier)
    assert target.gap(found.closest.value) <= gap < target.gap(first)


def test_no_easier_target_is_proposed_of_a_trial_that_came_no_closer():
    assert unreached(((10, 0.5), (50, 0.6), (100, 0.7)), TARGET).easier is None


@pytest.mark.parametrize(
    ("history", "target", "meant"),
    [
        (RISING, F1, 0.7),
        (RESTING, F1, 0.7),
        (RISING, Target("val/f1", 0.7, "max"), None),
        # In percent, and one that began beyond the fraction.
        (((10, 3.0), (100, 40.0)), F1, None),
        (((10, 0.8), (100, 0.9)), F1, None),
        # A name that tells no share.
        (RISING, Target("val/return", 70.0, "max"), None),
    ],
)
def test_a_target_in_percent_of_a_fraction_is_proposed_as_a_fraction(history, target, meant):
    trial = make_trial(0, status="stopped", steps=history[-1][0], history=history)
    result = result_of([trial], target, Budget(400, 1))
    assert result.unreached.as_fraction == meant
    change = cause_of(result).change
    assert ("workload.target.value=0.7)" in change) == (meant is not None)
    assert change.count("workload.target.value=") <= 1
