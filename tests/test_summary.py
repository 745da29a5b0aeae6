import json
from dataclasses import replace

import pytest
from builders import CONFIRMED, LUCKY, STEADY, fresh, hand_critical, result_of
from recorded.fashion_cnn import recorded
from toolbox import best_of, make_trial

from bstune.core.records import CUT_SHORT, Budget, Target
from bstune.result import SingleRun, StudyResult
from bstune.study.analysis.summary import noise_scale

TARGET = Target("val/error", 0.1, "min")


def test_summary_on_points_of_the_curve_itself():
    sizes = (8, 16, 32, 128, 512, 2048, 8192)
    trials = []
    for number, size in enumerate(sizes):
        # S = 100 (1 + 300/B), and an evaluation 5% before.
        shape = 1 + 300.0 / size
        tau = 0.004 + size / 4e4
        steps = round(100 * shape)
        steps_low = round(95 * shape)
        trials.append(make_trial(number, size, steps=steps, steps_low=steps_low, tau=tau))
    critical = hand_critical(300.0, 250.0, 350.0, 8, 8192)
    summary = result_of(reversed(trials), critical=critical)
    assert (summary.target, summary.unreached, summary.trials) == (
        "val/error <= 0.1",
        None,
        7,
    )
    assert summary.statuses == {
        "reached": 7,
        "stopped": 0,
        "diverged": 0,
        "out of memory": 0,
        "failed": 0,
    }
    assert [point.batch_size for point in summary.points] == list(sizes)
    point = summary.points[3]
    # S(128) = 334.4, of which 95% are 317.7.
    assert (point.number, point.steps_low, point.steps) == (3, 318, 334)
    assert (point.time_low, point.time_to_target) == pytest.approx((318 * 0.0072, 334 * 0.0072))
    assert point.examples == 334 * 128
    names = ["perfect scaling", "diminishing returns", "maximal data parallelism"]
    assert [row.name for row in summary.regimes] == names
    # At B_crit/9 and 9 B_crit one of the two terms is a tenth of S.
    bounds = (summary.regimes[1].start, summary.regimes[1].end)
    assert bounds == pytest.approx((300.0 / 9, 300.0 * 9))
    assert summary.best_by_time.number == min(range(7), key=lambda i: trials[i].time_to_target)
    fields = (
        "number",
        "seed",
        "batch_size",
        "lr",
        "hyperparameters",
        "horizon",
        "steps",
        "seconds_per_step",
    )
    fields += ("time_to_target",)
    row = {name: getattr(trials[6], name) for name in fields}
    single = {"steps": row["steps"], "time_to_target": row["time_to_target"]}
    rest = {"confirmed": None, "single_run": single, "reaching": None}
    assert summary.best_by_steps.model_dump() == row | rest
    assert (summary.lr_exponent, summary.stop_reason, summary.continued) == (None, None, 0)
    assert json.loads(summary.to_json())["points"][0]["batch_size"] == 8
    assert StudyResult.model_validate_json(summary.to_json()) == summary


CLOSE = make_trial(0, 64, status="stopped", history=((10, 0.5), (400, 0.2)))
NOISY = make_trial(1, 256, 0.4, status="stopped", history=((10, 0.6), (300, 0.1324), (400, None)))
FLAT = make_trial(2, 64, status="stopped", steps=800, history=((10, 0.5), (400, 0.201), (800, 0.2)))
DIVERGED = make_trial(
    3, 64, 0.7, status="diverged", history=((10, 0.5), (20, None)), message="the loss is not finite"
)
UPWARDS = Target("val/accuracy", 0.9, "max")


@pytest.mark.parametrize(
    ("trials", "target", "expected"),
    [
        ([], TARGET, None),
        ([make_trial()], TARGET, None),
        (
            [make_trial(status="out of memory", history=())],
            TARGET,
            {"closest": None, "easier": None, "stopped": 0},
        ),
        (
            [CLOSE, NOISY],
            TARGET,
            {
                "closest": {
                    "value": 0.1324,
                    "steps": 300,
                    "number": 1,
                    "batch_size": 256,
                    "lr": 0.4,
                },
                # The gap that is left and 5% of it, 0.13402, in as few digits as tell it from 0.1324.
                "easier": 0.134,
                "stopped": 2,
                "improving": 2,
                "improving_at_budget": 2,
            },
        ),
        # The metric fell, though it is to rise: it came no closer to any target.
        ([CLOSE], UPWARDS, {"easier": None, "improving": 0}),
        (
            [CLOSE, FLAT],
            TARGET,
            {"stopped": 2, "improving": 1, "improving_at_budget": 1, "budget_steps": 300},
        ),
        # It ended before the budget of 300 steps.
        ([replace(CLOSE, steps=299)], TARGET, {"improving": 1, "improving_at_budget": 0}),
        # One evaluation shows no change, nor does one beside a value that is not finite.
        (
            [
                replace(CLOSE, history=((400, 0.2),)),
                replace(FLAT, history=((10, None), (800, 0.5))),
                replace(NOISY, history=(), steps=299),
            ],
            TARGET,
            {"stopped": 3, "improving": 0, "untold": 3, "untold_at_budget": 2},
        ),
        ([CLOSE, FLAT], TARGET, {"untold": 0, "untold_at_budget": 0}),
        # Of two schedules of 900 steps one was cut.
        (
            [replace(CLOSE, horizon=900), replace(FLAT, steps=900, horizon=900)],
            TARGET,
            {"stopped": 2, "cut_schedules": 1, "cut_examples": 64 * 400},
        ),
        # A call-back ended one before its schedule did, and the other took too few steps to advise.
        (
            [
                replace(CLOSE, horizon=900, message="stopped by EarlyStopping"),
                replace(FLAT, steps=9, horizon=900),
            ],
            TARGET,
            {"stopped": 2, "cut_schedules": 1, "cut_examples": 0},
        ),
        (
            [DIVERGED],
            TARGET,
            {"smallest_diverged_lr": 0.7, "stopped": 0},
        ),
    ],
)
def test_why_no_trial_reached_the_target(trials, target, expected):
    summary = result_of(trials, target, Budget(300, 1))
    reached = any(trial.reached for trial in trials)
    if not reached:
        assert summary.best_by_time is None
        assert summary.best_by_steps is None
        assert summary.regimes == ()
    found = summary.unreached
    if expected is None:
        assert found is None
    else:
        values = found.model_dump()
        assert values | expected == values
    assert StudyResult.model_validate_json(summary.to_json()) == summary


@pytest.mark.parametrize(
    ("histories", "value"),
    [
        ([((10, 0.5), (20, 0.5)), ((5, 0.5),)], 0.5),
        # What is not finite is no value.
        ([((10, 0.5), (20, 0.5)), ((5, 0.5), (10, None))], 0.5),
        ([((10, 0.5), (20, 0.5)), ((5, 0.5001),)], None),
        # So few may be equal by chance.
        ([((10, 0.5),), ((5, 0.5),)], None),
        ([()], None),
    ],
)
def test_a_metric_that_never_changes_is_found(histories, value):
    trials = []
    for number, history in enumerate(histories):
        trials.append(make_trial(number, status="stopped", history=history))
    assert result_of(trials).only_value == value


def test_censored_point_has_a_lower_end_only():
    trials = [
        make_trial(0, 64, status="stopped", steps_low=200),
        make_trial(1, 64, status="stopped", steps_low=390),
    ]
    (point,) = result_of(trials).points
    assert (point.number, point.stopped) == (1, True)
    assert (point.steps_low, point.time_low) == (390, pytest.approx(3.9))
    assert (point.steps, point.time_to_target, point.examples) == (None, None, None)


@pytest.mark.parametrize(
    ("trials", "expected"),
    [
        # the same time: fewer steps; the same steps: less time; all the same: the lower number
        ([make_trial(0, steps=400, tau=0.01), make_trial(1, steps=200, tau=0.02)], [1, 1]),
        ([make_trial(0, steps=200, tau=0.02), make_trial(1, steps=200, tau=0.01)], [1, 1]),
        ([make_trial(5), make_trial(3)], [3, 3]),
        # without a measured step time a trial can be best by steps alone
        ([make_trial(0, steps=100, tau=None), make_trial(1, steps=200)], [1, 0]),
        ([make_trial(0, steps=100, tau=None)], [None, 0]),
        # This is the best point on fresh seeds, not the best fresh run.
        (
            CONFIRMED,
            [1, 2],
        ),
        # A fresh run never wins itself.
        ([LUCKY, STEADY, fresh(3, 50)], [0, 0]),
        # Nor does it win beside a better point without any.
        (
            [LUCKY, fresh(3, 50), make_trial(4, 256, 0.4, steps=390)],
            [4, 4],
        ),
    ],
)
def test_winners(trials, expected):
    summary = result_of(trials)
    found = (summary.best_by_time, summary.best_by_steps)
    assert [one and one.number for one in found] == expected


def test_what_fresh_seeds_gave_is_reported_of_a_winner_and_else_what_is_predicted():
    best = best_of(CONFIRMED)
    best["steps"] = replace(best["steps"], steps=96.4)
    summary = result_of(CONFIRMED, best=best)
    winner = summary.best_by_time
    single = summary.best_by_steps
    row = winner.confirmed
    assert (row.seeds, row.reached, row.runs) == ((1006, 1007, 1008), 3, 3)
    assert (winner.steps, row.steps_median, row.steps_low, row.steps_high) == (
        430,
        430,
        391.0,
        pytest.approx(450),
    )
    times = [winner.time_to_target, row.time_median, *row.interval_by("time")]
    assert times == pytest.approx([4.3, 4.3, 3.91, 4.5])
    assert winner.single_run == SingleRun(steps=420, time_to_target=4.2)
    # a point of its own, that no fresh run stood at
    assert (single.confirmed, single.steps, single.single_run.steps) == (None, 96.4, 90)
    assert single.time_to_target == pytest.approx(9.64)
    assert StudyResult.model_validate_json(summary.to_json()) == summary


def stopped(number, resumed_from=None, **changes):
    return make_trial(number, resumed_from=resumed_from, **{"status": "stopped", **changes})


def cut_short(number, resumed_from=None):
    return stopped(number, resumed_from, status="failed", message=CUT_SHORT)


@pytest.mark.parametrize(
    ("trials", "statuses", "continued"),
    [
        ([make_trial(0), make_trial(1)], {"reached": 2}, 0),
        ([stopped(0), make_trial(1, resumed_from=0)], {"reached": 1}, 1),
        (
            [stopped(0), stopped(1), stopped(2, 0), make_trial(3, resumed_from=2)],
            {"reached": 1, "stopped": 1},
            2,
        ),
        ([stopped(0), stopped(1, 0)], {"stopped": 1}, 1),
        # a continuation that failed leaves the stopped trial as it was, and is asked again
        ([stopped(0), stopped(1, 0, status="failed")], {"stopped": 1, "failed": 1}, 0),
        (
            [stopped(0), stopped(1, 0, status="failed"), make_trial(2, resumed_from=0)],
            {"reached": 1, "failed": 1},
            1,
        ),
        # What was cut short with its process did not fail: it is asked again.
        ([make_trial(0), cut_short(1), make_trial(2)], {"reached": 2}, 0),
        ([stopped(0), cut_short(1, 0), make_trial(2, resumed_from=0)], {"reached": 1}, 1),
        ([stopped(0), cut_short(1, 0)], {"stopped": 1}, 0),
    ],
)
def test_a_trial_that_was_continued_counts_once(trials, statuses, continued):
    summary = result_of(trials)
    expected = dict.fromkeys(summary.statuses, 0) | statuses
    assert summary.statuses == expected
    assert (summary.trials, summary.continued) == (sum(statuses.values()), continued)
    assert summary.spend.trials == summary.trials
    seconds = 0.0
    for trial in trials:
        seconds += trial.train_seconds + trial.eval_seconds + trial.startup_seconds
    assert summary.spend.seconds == pytest.approx(seconds)


def test_the_numbers_of_a_recorded_study_follow_from_its_trials():
    trials, _, summary = recorded()
    assert summary.statuses["reached"] == len(trials) == 13
    critical = summary.critical_batch_size
    # Of other draws, on another machine.
    assert critical.value == pytest.approx(340, rel=0.15)
    assert 45 < critical.low < 80
    assert [summary.best_by_time.batch_size, summary.best_by_steps.batch_size] == [60, 807]


def measured(estimates, number=0):
    """A trial that measured these pairs of |G|^2 and tr Sigma."""
    rows = tuple((step, *pair) for step, pair in enumerate(estimates, start=1))
    return make_trial(number, noise_scale=rows)


def test_the_noise_scale_of_the_trials():
    trials = [measured([(1.0, 100.0)] * 4, number) for number in range(4)]
    found = noise_scale(trials)
    assert (found.noise_scale, found.low, found.high) == pytest.approx((100.0, 100.0, 100.0))
    assert (found.level, found.trials, found.steps, found.undetermined) == (0.9, 4, 16, None)
    assert noise_scale([make_trial()]) is None


@pytest.mark.parametrize(
    ("trials", "reason"),
    [
        ([measured([(1.0, 100.0)] * 4)], "4 trials that reach the target are needed"),
        (
            [measured([(sign, 100.0)] * 4, i) for i, sign in enumerate((1.0, -1.0) * 4)],
            "|G|^2 does not differ from 0",
        ),
    ],
)
def test_why_there_is_no_noise_scale(trials, reason):
    found = noise_scale(trials)
    assert (found.noise_scale, found.high, found.undetermined) == (None, None, reason)
