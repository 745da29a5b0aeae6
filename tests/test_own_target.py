"""A target that the user's own configuration sets: what a run comes to, and studies whose first trial says it."""

import json
from dataclasses import replace

import numpy as np
import optuna
import pytest
import yaml
from builders import copy_of_study, moved_study
from toolbox import (
    make_result,
    metric_values,
    statuses,
    table_rows,
    trials_of,
    write_rows,
)

from bstune.core.errors import StudyError
from bstune.core.records import NO_NOISE_SCALE, Target
from bstune.study import search
from bstune.study.analysis.critical import ended_where_met
from bstune.study.own_target import OwnRun, goal_of, own_result
from bstune.study.planning.wall import TAKEN

TARGET = Target("val/loss", 0.0, "min").never_met
REPLAY = ("workload=replay", "workload.table=t.jsonl", "workload.name=replay", "study=own")
REPLAY += ("mlflow.enabled=false", "scaling.batch_size=32", "search.trials=6")
AUTO = (*REPLAY, "target=auto")


def falling(slope=-0.1, end=0.3, last_step=1000, noise=0.0, seed=0):
    """A history whose metric is ``end + slope log(step/last_step)``, and noise."""
    rng = np.random.default_rng(seed)
    steps = sorted({max(1, round(last_step * 1.05**-i)) for i in range(80)})
    values = [end + slope * np.log(step / last_step) + noise * rng.normal() for step in steps]
    return [(step, float(value)) for step, value in zip(steps, values, strict=True)]


def test_a_line_in_log_steps_comes_to_its_end_without_scatter():
    found = own_result(falling(slope=-0.1), "min")
    assert found.value == pytest.approx(0.3, abs=1e-12)
    assert found.scatter == pytest.approx(0.0, abs=1e-12)
    # What a seed that takes e^0.25 times the steps comes to.
    assert found.goal == pytest.approx(0.3 + 0.1 * 0.25, abs=1e-3)
    # The target is no harder than what the run came to.
    assert found.goal >= 0.3


@pytest.mark.parametrize(
    ("slope", "ideal", "easier"),
    [
        # A schedule that ends with the trial, flat at its end: a twentieth of the way from the
        # ideal value.
        (0.0, None, 0.05 * 0.3),
        (0.0, 0.1, 0.05 * 0.2),
        # It still falls: what the slope gains is more.
        (-0.1, None, 0.1 * 0.25),
    ],
)
def test_seeds_of_a_schedule_that_ends_with_the_trial_differ_where_it_is_flat(slope, ideal, easier):
    found = own_result(falling(slope=slope), "min", anneals=True, ideal=ideal)
    assert found.goal == pytest.approx(0.3 + easier, abs=1e-3)
    assert own_result(falling(slope=0.0), "min").goal == pytest.approx(0.3, abs=1e-3)


def test_a_metric_that_rises_has_an_ideal_value_where_its_bounds_say_so():
    history = tuple((step, 0.8) for step in range(10, 100, 10))
    record = make_result(status="stopped", history=history, horizon=90)
    target = Target("val/accuracy", 0.0, "max")
    assert goal_of(record, target) == pytest.approx(0.8)
    # A twentieth of the 0.2 to the ideal value, 1.
    assert goal_of(record, target, (0.0, 1.0)) == pytest.approx(0.79)
    assert goal_of(replace(record, horizon=None), target, (0.0, 1.0)) == pytest.approx(0.8)


def test_a_metric_that_gets_worse_at_its_end_is_eased_by_its_scatter_alone():
    assert own_result(falling(slope=0.1), "min").goal == pytest.approx(0.3, abs=1e-3)


def test_the_scatter_of_the_last_evaluations_makes_the_goal_easier():
    # 15 evaluations lie in the last half of the steps, by a factor of 1.05 each.
    values = []
    scatters = []
    for seed in range(200):
        found = own_result(falling(slope=-0.001, noise=0.02, seed=seed), "min")
        values.append(found.value)
        scatters.append(found.scatter)
        assert found.goal >= found.value + found.scatter - 1e-12
        assert found.goal == pytest.approx(found.value + found.scatter, abs=1e-3)
    assert np.mean(values) == pytest.approx(0.3, abs=0.003)
    assert np.sqrt(np.mean(np.square(scatters))) == pytest.approx(0.02, rel=0.05)


def test_a_metric_that_is_to_rise_is_the_mirror_of_one_that_is_to_fall():
    history = falling(noise=0.01)
    down = own_result(history, "min")
    up = own_result([(step, -value) for step, value in history], "max")
    assert (up.value, up.goal) == pytest.approx((-down.value, -down.goal))


@pytest.mark.parametrize("mode", ["min", "max"])
@pytest.mark.parametrize("seed", range(20))
def test_the_run_itself_has_met_its_goal(mode, seed):
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, 30))
    values = rng.normal(0.0, 10.0 ** rng.integers(-6, 6), count)
    steps = range(10, 10 * count + 1, 10)
    history = list(zip(steps, values.tolist(), strict=True))
    goal = own_result(history, mode).goal
    trial = make_result(status="stopped", history=tuple(history))
    assert ended_where_met(trial, Target("m", goal, mode)).reached


@pytest.mark.parametrize(
    ("history", "goal"),
    [
        ([(0, 5.0), (10, None), (20, 0.4), (40, 0.3)], 0.3),
        ([(10, 0.0), (20, 0.0), (30, 0.0)], 0.0),
        ([(10, 0.12345678)], 0.1235),
    ],
)
def test_few_evaluations_and_round_numbers(history, goal):
    assert own_result(history, "min").goal == pytest.approx(goal)


def test_a_run_that_came_to_nothing_sets_no_target():
    assert own_result([(0, 1.0), (10, None)], "min") is None
    stopped = make_result(status="stopped", history=((10, None),))
    with pytest.raises(StudyError, match="was not evaluated"):
        goal_of(stopped, TARGET)
    with pytest.raises(StudyError, match="ended as diverged: too far"):
        goal_of(replace(stopped, status="diverged", message="too far"), TARGET)
    # What a run went on without did not end it.
    with pytest.raises(StudyError, match="ended as diverged; give"):
        goal_of(replace(stopped, status="diverged", message=f"{NO_NOISE_SCALE}: x"), TARGET)


ACCURACY = Target("val_acc", 0.0, "max").never_met


@pytest.mark.parametrize(
    ("history", "start", "is_met"),
    [
        # One step, which made the untrained encoder worse.
        ([(1, 0.6625)], 0.683, True),
        ([(10, 0.66), (20, 0.683)], 0.683, True),
        ([(10, 0.70), (20, 0.74)], 0.683, False),
        # A loop that does not report step 0.
        ([(1, 0.6625)], None, False),
    ],
)
def test_what_untrained_weights_meet_is_no_target(history, start, is_met):
    if start is not None:
        history = [(0, start), *history]
    record = make_result(status="stopped", steps=history[-1][0], history=tuple(history))
    if is_met:
        with pytest.raises(StudyError, match=r"starts at 0\.683"):
            goal_of(record, ACCURACY)
    else:
        assert goal_of(record, ACCURACY) == history[-1][1]


def test_the_metric_before_training_changes_no_target():
    history = falling(noise=0.01)
    record = make_result(status="stopped", history=tuple(history))
    started = replace(record, history=((0, 2.0), *history))
    assert goal_of(started, TARGET) == goal_of(record, TARGET)


@pytest.mark.parametrize(
    ("steps", "planned", "limit", "message", "is_refused"),
    [
        (1, 617, 120.0, None, True),
        (9, 10, 120.0, None, True),
        (10, 617, 120.0, None, False),
        # The whole budget, no limit of wall time, and a run that something else has ended.
        (1, 1, 120.0, None, False),
        (1, 617, None, None, False),
        (1, 617, 120.0, "EarlyStopping", False),
    ],
)
def test_a_run_that_the_wall_time_cut_to_next_to_nothing_sets_no_target(
    steps, planned, limit, message, is_refused
):
    record = make_result(status="stopped", steps=steps, history=((steps, 0.7),), message=message)
    run = OwnRun(planned, limit, advised_seconds=300)
    if is_refused:
        with pytest.raises(StudyError, match=r"wall_seconds=120 .* give search.wall_seconds=300"):
            goal_of(record, ACCURACY, run=run)
    else:
        assert goal_of(record, ACCURACY, run=run) == 0.7


@pytest.fixture
def table(tmp_path):
    """Write a table whose runs go to half again their steps to 0.14."""
    rows = table_rows()
    write_rows(tmp_path / "t.jsonl", rows)
    return rows


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Run a study of six trials whose first one sets the target, once; give where it lies."""
    return moved_study(tmp_path_factory, *AUTO)


@pytest.fixture
def study(made, bstune, tmp_path):
    """Give the folder of that study, which the same command continues here."""
    return copy_of_study(made, tmp_path, "outputs/own")


def own_goal(folder):
    return yaml.safe_load((folder / "config.yaml").read_text())["workload"]["target"]["value"]


@pytest.mark.slow
def test_the_first_trial_sets_the_target_and_the_others_are_to_reach_it(study):
    goal = own_goal(study)
    first, *others = trials_of(study)
    assert (first.batch_size, first.status) == (32, "reached")
    assert goal == own_result(first.history, "min").goal
    assert "reached" in statuses(others)
    for trial in others:
        met = np.array(metric_values(trial)) <= goal
        assert met.any() == trial.reached
        # A trial ends at the first evaluation that meets the goal.
        assert not met[:-1].any()
    told = json.loads((study / "curve.json").read_text())
    assert told["target_value"] == goal
    assert f"target={goal!r}" in told["train"]
    assert "target=auto" not in told["train"]
    # The command that gives the study again leaves the target open.
    assert "target=auto" in " ".join(told["arguments"]) or "value=auto" in " ".join(
        told["arguments"]
    )


@pytest.mark.slow
def test_a_study_goes_on_with_the_target_that_it_has(bstune, study):
    goal = own_goal(study)
    before = trials_of(study)
    status, _, err = bstune(*AUTO, "search.trials=8")
    assert (status, err) == (0, "")
    after = trials_of(study)
    assert own_goal(study) == goal
    assert after[: len(before)] == before
    assert len(after) > len(before)
    status, _, err = bstune(*REPLAY, "target=0.14")
    assert status == 2
    assert "workload.target.value: was 'auto', now 0.14" in err


def test_a_kill_between_the_goal_and_the_record_loses_nothing(
    made, bstune, tmp_path, table, monkeypatch
):
    folder = made / "outputs" / "own"
    whole = trials_of(folder)

    def killed(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(search, "tell", killed)
        status, _, _ = bstune(*AUTO)
        assert status != 0
    status, _, err = bstune(*AUTO, "search.trials=1", "search.replicates=0")
    assert (status, err) == (0, "")
    again = [trial for trial in trials_of(tmp_path / "outputs" / "own") if trial.status != "failed"]

    def outcomes(trials):
        return [(trial.batch_size, trial.status, trial.steps) for trial in trials]

    assert outcomes(again)[0] == outcomes(whole)[0]
    assert own_goal(tmp_path / "outputs" / "own") == own_goal(folder)


@pytest.mark.parametrize(
    ("options", "because"),
    [
        (("search.baseline=false",), "search.baseline=false leaves it out"),
        (("trial.batch_size=32", "trial.lr=0.04"), "a single trial has none beside it"),
        (("target=soon",), "must be a number of at most 1e+15 in size, or auto, but got 'soon'"),
        (("target=true",), "must be a number of at most 1e+15 in size, or auto, but got True"),
    ],
)
def test_where_no_run_of_the_users_sets_a_target(bstune, tmp_path, table, options, because):
    status, _, err = bstune(*AUTO, *options)
    assert status == 2
    assert because in err
    assert not (tmp_path / "outputs").exists()


@pytest.mark.slow
def test_a_worker_joins_once_the_target_is_known(bstune, tmp_path, table, monkeypatch):
    def killed(*arguments, **options):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(search.Search, "paused_baseline", killed)
        bstune(*AUTO)
    join = ("worker", "storage=sqlite:///bstune.db", "study=own")
    status, _, err = bstune(*join)
    assert status == 2
    assert "join it afterwards" in err
    bstune(*AUTO, "search.trials=1", "search.replicates=0")
    status, _, err = bstune(*join)
    assert (status, err) == (0, "")


def test_what_was_cut_short_before_there_is_a_target_has_taken_its_time(
    bstune, tmp_path, table, monkeypatch
):
    def killed(*arguments, **options):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(search, "tell", killed)
        bstune(*AUTO, "search.wall_seconds=600")
    stored = optuna.load_study(study_name="own", storage="sqlite:///bstune.db")
    assert stored.user_attrs[TAKEN] > 0.0
    assert statuses(trials_of(tmp_path / "outputs" / "own")) == ["failed"]
