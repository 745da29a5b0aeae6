"""The study in Optuna's storage: asked, cut short, continued, refused; samplers as a config builds them."""

import contextlib
import sqlite3
import threading
from dataclasses import replace
from functools import cache, partial
from types import SimpleNamespace

import optuna
import pytest
from builders import options_of
from optuna.samplers import RandomSampler
from optuna.visualization import plot_optimization_history
from sqlalchemy.exc import ProgrammingError
from toolbox import FakeTime, make_result

from bstune.core import scaling
from bstune.core.errors import ConfigError, StudyError
from bstune.core.records import CUT_SHORT, Target, TrialResult
from bstune.core.search_space import Space
from bstune.options import StudyOptions, with_option
from bstune.search.acquisition import MIN_STEPS
from bstune.search.sampler import RECORD, FrontierSampler
from bstune.study.planning.plan import SearchBudget
from bstune.study.planning.replicates import Winner
from bstune.study.prepare import compose_joined
from bstune.study.storage import patience
from bstune.study.storage.asking import Ranking, ask, ask_continuation, ask_replicate, distributions
from bstune.study.storage.attributes import FORMAT, FROZEN_SETTINGS, STUDY_ID
from bstune.study.storage.connection import check_storage
from bstune.study.storage.dense_steps import dense_search_steps
from bstune.study.storage.lease import Leases
from bstune.study.storage.opening import find_study, open_study
from bstune.study.storage.samplers import build_sampler
from bstune.study.storage.telling import cut_short, finish_abandoned, store_unstored, tell
from bstune.study.storage.trials import results, running_specs, trial_index_of
from bstune.study.storage.turns import (
    ended_below_limit,
    free_indices,
    points_given_up,
    turn_at,
)
from bstune.system.files import Output
from bstune.trial.backend import stops_trials

TARGET = Target("val/error", 0.1, "min")
# The rule gives 0.1 at a batch size of 64.
SPACE = Space(8, 1024, 1, 1.0, partial(scaling.sqrt, reference_batch_size=64, reference_lr=0.1))
BUDGET = SearchBudget("steps", 10, None, None, 0.5, 3)
SETTINGS = {"workload.name": "toy", "search.objective": "steps", "seed": 3}
SAMPLERS = {
    # Few random trials at the start, so that the model of each sampler has its say.
    "tpe": {"_target_": "optuna.samplers.TPESampler", "n_startup_trials": 4},
    "gp": {"_target_": "optuna.samplers.GPSampler", "n_startup_trials": 4},
    "qmc": {"_target_": "optuna.samplers.QMCSampler", "qmc_type": "sobol", "scramble": True},
    "random": {"_target_": "optuna.samplers.RandomSampler"},
    "frontier": {"_target_": "bstune.search.sampler.FrontierSampler"},
}
# What bstune's own sampler is given by a search.
OWN = {
    "objective": "steps",
    "rule": SPACE.rule,
    "budget": lambda batch_size: 400.0,
    "target": TARGET,
    "resumable": lambda number: True,
    "snap": SPACE.snap,
    "search_space": distributions(SPACE),
}


def url(tmp_path, name="study"):
    return f"sqlite:///{tmp_path}/{name}.db"


@pytest.fixture(autouse=True)
def _quiet():
    optuna.logging.set_verbosity(optuna.logging.WARNING)


@pytest.fixture
def opened(tmp_path):
    """Open the study in a folder of its own, as its first process or as a later one does."""

    def open_(name="study", objective="steps", settings=SETTINGS, output=tmp_path):
        return open_study("toy", url(tmp_path, name), objective, settings, output)

    return open_


@pytest.fixture
def study(opened):
    return opened()


def train(spec):
    """B_crit = 100 and a penalty for delta off 0.5; far above it a trial diverges, far below it is stopped."""
    status = "diverged" if spec.delta > 2.5 else "stopped" if spec.delta < -2.0 else "reached"
    # Each octave away from a delta of 0.5 doubles the steps, up to 2^9.
    steps = round(50 * (1 + 100 / spec.batch_size) * 2 ** min(abs(spec.delta - 0.5), 9))
    # Longer than its limit: it is stopped there.
    if spec.max_steps is not None and steps > spec.max_steps:
        status, steps = "stopped", spec.max_steps
    return make_result(
        **spec.trial_fields(),
        status=status,
        steps=steps,
        seconds_per_step=1e-3 + 1e-5 * spec.batch_size,
        history=((steps, 0.09 if status == "reached" else 0.3),),
    )


def run(study, asked, train=train):
    """Run a trial that was asked for, as a study's search does."""
    with cut_short(study, "steps", ""):
        result = train(asked[1])
        tell(study, asked, result, "steps")
        return result


@cache
def digits_options() -> StudyOptions:
    return options_of("workload=digits")


def options_with(sampler):
    return with_option(digits_options(), "sampler", sampler)


RANKED = Ranking(TARGET)  # as Search gives it to all samplers but bstune's own


def built(name="tpe", trial_index=0):
    return build_sampler(options_with(SAMPLERS[name]), BUDGET, trial_index, OWN)


def asked(study, trial_index, name="tpe", stops=True):
    ranking = None if name == "frontier" else RANKED
    sampler = built(name, trial_index)
    turn = turn_at(study, trial_index)
    return ask(study, turn, BUDGET, SPACE, sampler, stops, ranking=ranking)


def asked_with(
    study, trial_index, max_steps, resumed_from=None, batch_size=64, stops=True, budget=None, **own
):
    """Ask for a trial of a sampler that proposes one point, limit and stopped trial."""

    class Fixed(FrontierSampler):
        def sample_relative(self, study, trial, search_space):
            self._max_steps[trial.number] = max_steps
            if resumed_from is not None:
                self._resumed_from[trial.number] = resumed_from
            return {"batch_size": batch_size, "delta": delta} if search_space else {}

    delta = own.pop("delta", 1.0)
    return ask(
        study, turn_at(study, trial_index), budget or BUDGET, SPACE, Fixed(**OWN, **own), stops
    )


def go_on(study, name, until=10):
    """Run trials up to that index; return what was asked, with the index of the trial that it continues."""
    specs = []
    while free := free_indices(study, until):
        trial_index = free[0]
        now = asked(study, trial_index, name)
        run(study, now)
        spec = now[1]
        # A continuation has the parent's number in its own study; its index is comparable between
        # two.
        earlier = (
            None
            if spec.resumed_from is None
            else trial_index_of(study.get_trials()[spec.resumed_from])
        )
        specs.append((trial_index, spec.batch_size, spec.delta, spec.seed, spec.max_steps, earlier))
    return specs


@pytest.mark.parametrize(
    "name",
    [
        # One of Optuna's, which bstune seeds, and its own.
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("tpe", "frontier")),
        *(pytest.param(name, marks=pytest.mark.soak) for name in ("gp", "qmc", "random")),
    ],
)
def test_a_study_killed_and_continued_asks_the_same_trials(opened, name):
    whole = go_on(opened("whole"), name)
    # Only the first ones: a GP, which does not see stopped trials, may come back to one of them.
    points = []
    for _, batch_size, delta, _, _, resumed_from in whole[:4]:
        if resumed_from is None:
            points.append((batch_size, delta))
    assert len(set(points)) == len(points) > 1, "a sampler that is seeded anew repeats itself"
    # bstune's own has continued trials by then, which have put indices off.
    for killed_at in (1, 6, 8) if name == "frontier" else (6,):
        study = opened(f"killed at {killed_at}")
        found = go_on(study, name, until=killed_at)
        # SIGKILL: the trial stays RUNNING; continued ones have put its index off.
        asked(study, len(found), name)
        study = opened(f"killed at {killed_at}")
        finish_abandoned(study, "steps", lambda worker: True)
        found += go_on(study, name)
        assert found == whole


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_an_error_fails_the_trials_that_run_and_each_index_is_asked_again(study, error, caplog):
    _, first = asked(study, 0)
    _, second = asked(study, 1)
    with pytest.raises(error), cut_short(study, "steps", ""):
        raise error
    # One line for each of the two trials that ran.
    assert ["was cut short" in message for message in caplog.messages] == [True, True]
    assert free_indices(study, 10)[0] == 0
    # By another sampler, and yet it is asked as it was: the point is stored with the index.
    run(study, asked(study, 0, "random"))
    expected = [(0, 0, "failed", first), (1, 1, "failed", second), (2, 0, "reached", first)]
    for record, (number, index, status, spec) in zip(results(study), expected, strict=True):
        assert (record.number, record.trial_index, record.status) == (number, index, status)
        assert (record.batch_size, record.lr) == (spec.batch_size, spec.lr)
        assert (record.delta, record.seed) == (spec.delta, spec.seed)


def test_a_trial_whose_record_was_stored_is_not_lost(study):
    trial_id, spec = asked(study, 0)
    result = train(spec)
    # SIGKILL between this and what tell stores after it
    study._storage.set_trial_user_attr(trial_id, RECORD, result.to_json())
    finish_abandoned(study, "steps", lambda worker: True)
    assert results(study) == [result]
    assert free_indices(study, 10)[0] == 1
    assert study.best_value == result.steps


@pytest.mark.parametrize(
    ("objective", "status", "state", "values"),
    [
        # Of 100 steps of 32 examples, 20 ms each.
        ("time", "reached", "COMPLETE", [2.0]),
        ("steps", "reached", "COMPLETE", [100.0]),
        ("both", "reached", "COMPLETE", [100.0, 2.0]),
        # 32 examples a step.
        ("curve", "reached", "COMPLETE", [3200.0]),
        # What was stopped has no value: Optuna would rank it by one.
        ("both", "stopped", "PRUNED", None),
        ("steps", "stopped", "PRUNED", None),
        ("steps", "diverged", "PRUNED", None),
        ("steps", "out of memory", "PRUNED", None),
        # Only what went wrong is a failure to Optuna; it leaves the index free.
        ("steps", "failed", "FAIL", None),
    ],
)
def test_what_optuna_stores(opened, objective, status, state, values):
    study = opened(objective=objective)
    history = () if status == "out of memory" else ((90, 0.4), (100, 0.25))
    result = make_result(status=status, steps=100, seconds_per_step=0.02, history=history)
    now = asked(study, 0)
    tell(study, now, result, objective)
    trial = study.get_trials()[0]
    assert trial.state.name == state
    assert TrialResult.from_json(trial.user_attrs[RECORD]) == result
    assert trial.values == values, "a stopped trial has none"
    # Names with a colon are for the study alone.
    shown = {name: value for name, value in trial.user_attrs.items() if ":" not in name}
    reached = {"steps": 100, "seconds": 2.0} if status == "reached" else {"stopped at step": 100}
    assert shown == {"lr": now[1].lr, "outcome": {"status": status} | reached}
    names = {
        "time": ["seconds to target"],
        "steps": ["steps to target"],
        "both": ["steps to target", "seconds to target"],
        "curve": ["examples to target"],
    }
    assert study.metric_names == names[objective]


def test_optunas_own_tools_show_no_value_of_a_stopped_trial(opened):
    study = opened(objective="steps")
    for index, status in enumerate(("reached", "stopped", "diverged", "failed", "reached")):
        result = make_result(status=status, steps=100 + index, history=((90, 0.4), (100, 0.25)))
        tell(study, asked(study, index), result, "steps")
    frame = study.trials_dataframe()
    # The first and the last one, of 100 and of 104 steps.
    assert frame["value_steps to target"].dropna().tolist() == [100.0, 104.0]
    outcomes = frame["user_attrs_outcome"].tolist()
    shown = [(one["status"], one.get("steps"), one.get("stopped at step")) for one in outcomes]
    assert shown == [
        ("reached", 100, None),
        ("stopped", None, 101),
        ("diverged", None, 102),
        ("failed", None, 103),
        ("reached", 104, None),
    ]
    # Plots and pruners would show a gap to the target as if it were the objective.
    assert not any(trial.intermediate_values for trial in study.get_trials())
    history = plot_optimization_history(study)
    assert list(history.data[0].y) == [100.0, 104.0]


def test_a_sampler_that_ranks_stopped_trials_sees_their_gap_to_the_target(study):
    """Optuna's TPE takes the value at the last step reported; nothing of it is stored."""
    ends = {"reached": 0.05, "stopped": 0.25, "diverged": 0.4, "failed": 0.3, "out of memory": None}
    for index, (status, value) in enumerate(ends.items()):
        history = () if value is None else ((90, 0.5), (100, value))
        result = make_result(status=status, steps=100, history=history)
        tell(study, asked(study, index), result, "steps")
    seen = []

    class Looks(RandomSampler):
        def sample_independent(self, study, trial, param_name, param_distribution):
            seen[:] = study.get_trials(deepcopy=False)
            return super().sample_independent(study, trial, param_name, param_distribution)

    ask(study, turn_at(study, 9), BUDGET, SPACE, Looks(), stops=False, ranking=RANKED)
    gaps = [trial.intermediate_values for trial in seen]
    # 0.25 and 0.4 lie 0.15 and 0.3 above the target. The last one is the trial that is asked.
    assert gaps == [{}, {1: pytest.approx(0.15)}, {1: pytest.approx(0.3)}, {}, {}, {}]
    assert not any(trial.intermediate_values for trial in study.get_trials())


def test_what_a_sampler_stores_of_a_trial_is_stored_with_it(study):
    """As GPSampler does, and CmaEsSampler; it sees the trial among those that run."""
    running = []

    class Notes(RandomSampler):
        def before_trial(self, study, trial):
            study._storage.set_trial_system_attr(trial._trial_id, "note", trial.number)
            running.extend(study.get_trials(states=(optuna.trial.TrialState.RUNNING,)))

    asked(study, 0)
    _, spec = ask(study, turn_at(study, 1), BUDGET, SPACE, Notes(), stops=False)
    assert [trial.number for trial in running] == [0, 1]
    stored = study.get_trials()[1]
    assert stored.system_attrs == {"note": 1}
    assert stored.distributions == distributions(SPACE)
    assert stored.params["batch_size"] == spec.batch_size


def test_a_trial_that_continues_another_has_its_point_and_its_seed(study):
    stopped = asked_with(study, 0, 20)
    run(study, stopped)
    second = asked_with(study, 1, 50, resumed_from=0)
    assert (second[1].max_steps, second[1].resumed_from, second[1].trial_index) == (50, 0, 1)
    # But for its number, index and limit it is the first one's.
    assert (
        replace(second[1], number=0, trial_index=0, max_steps=20, resumed_from=None) == stopped[1]
    )
    # The seed of index 0, at which the trial began.
    assert second[1].seed == BUDGET.trial_seed(0)
    run(study, second)
    _, third = asked_with(study, 2, 90, resumed_from=1)
    assert (third.resumed_from, third.seed, third.lr) == (1, stopped[1].seed, stopped[1].lr)


def test_what_continues_a_trial_is_no_further_point(study):
    """A search of two points goes on past as many indices as are continued, at most three a point, and is done then."""
    last = run(study, asked_with(study, 0, 20)).number
    for trial_index in range(1, 7):
        assert free_indices(study, 2) == [trial_index]
        asked_with(study, trial_index, 20 + trial_index, resumed_from=last)
        finish_abandoned(study, "steps", lambda worker: True)
        assert free_indices(study, 2)[0] == trial_index, "cut short, it is asked again"
        last = run(
            study, asked_with(study, trial_index, 20 + trial_index, resumed_from=last)
        ).number
    # Six continuations do not count: three for each of the two points.
    assert free_indices(study, 2) == [7]
    run(study, asked_with(study, 7, 90, resumed_from=last))
    assert (free_indices(study, 2), free_indices(study, 3)) == ([], [8, 9])


def test_a_point_that_runs_again_from_its_first_step_takes_no_other_points_place(study):
    stopped = run(study, asked_with(study, 0, 20))
    run(study, asked_with(study, 1, 21))
    assert free_indices(study, 2) == []
    again = ask_continuation(study, stopped, 40, SPACE, afresh=True)
    # While it runs, and after it was cut short and has run.
    assert (again[1].trial_index, free_indices(study, 3)) == (2, [3])
    finish_abandoned(study, "steps", lambda worker: True)
    assert free_indices(study, 2) == [2]
    _, spec = now = asked_with(study, 2, 999)
    assert (spec.seed, spec.max_steps, spec.resumed_from) == (stopped.seed, 40, None)
    run(study, now)
    assert (free_indices(study, 2), free_indices(study, 3)) == ([], [3])


def test_a_trial_that_was_cut_short_is_asked_again_as_it_was(study):
    """Its limit and the trial that it continues too, which the sampler is not asked for again."""
    run(study, asked_with(study, 0, 20))
    _, spec = asked_with(study, 1, 50, resumed_from=0)
    # It is abandoned twice.
    for number in (2, 3):
        finish_abandoned(study, "steps", lambda worker: True)
        # The sampler would have suggested another point and another limit.
        assert asked_with(study, 1, 999, batch_size=8, delta=-1.0)[1] == replace(
            spec, number=number
        )
    assert [result.resumed_from for result in results(study)] == [None, 0, 0]


@pytest.mark.parametrize(
    ("messages", "batch_sizes", "given_up"),
    [
        (["bad"], [16, 16], 0),
        (["bad", "bad"], [16, 16, 64], 1),
        # As a loop of the user's tells of Ctrl-C.
        ([CUT_SHORT, CUT_SHORT, CUT_SHORT], [16, 16, 16, 16], 0),
        ([CUT_SHORT, "bad"], [16, 16, 16], 0),
        (["bad", CUT_SHORT], [16, 16, 16], 0),
        (["bad", CUT_SHORT, "bad"], [16, 16, 16, 128], 1),
        # Here the second point was cut short.
        (["bad", "bad", CUT_SHORT], [16, 16, 64, 64], 1),
    ],
)
def test_a_point_is_given_up_for_failures_of_its_own_alone(study, messages, batch_sizes, given_up):
    def failing(spec):
        return TrialResult.unmeasured(spec, "failed", message=messages[spec.number])

    found = []
    # The sampler would suggest another point each time.
    for number, suggested in enumerate((16, 32, 64, 128)[: len(batch_sizes)]):
        now = asked_with(study, 0, 20, batch_size=suggested)
        found.append(now[1].batch_size)
        if number < len(messages):
            run(study, now, failing)
    assert found == batch_sizes
    assert points_given_up(turn_at(study, 0)) == given_up


def test_two_processes_may_end_the_same_abandoned_trial_at_once(study, monkeypatch):
    storage, end = study._storage, study._storage.set_trial_state_values
    _, spec = asked_with(study, 0, 20)

    def after_another(*arguments, **named):
        end(*arguments, **named)
        return end(*arguments, **named)

    # Another process has ended it just before this one does.
    monkeypatch.setattr(storage, "set_trial_state_values", after_another)
    finish_abandoned(study, "steps", lambda worker: True)
    assert [result.number for result in results(study)] == [spec.number]


def test_a_limit_is_for_trials_that_can_be_stopped_and_their_sampler_chooses_every_batch_size(
    study,
):
    # Each batch size would be one of its stratum, if the sampler did not choose.
    some = replace(BUDGET, stratified=1.0)
    _, limited = asked_with(study, 0, 30, batch_size=77, budget=some)
    _, unlimited = asked_with(study, 1, 30, batch_size=77, budget=some, stops=False)
    _, other = ask(study, turn_at(study, 2), some, SPACE, RandomSampler(), stops=True)
    _, horizon = asked_with(study, 3, 30, batch_size=77, budget=some, stops=False, horizon=True)
    # The own sampler chooses every batch size itself.
    assert (limited.max_steps, limited.batch_size) == (30, 77)
    assert (unlimited.max_steps, unlimited.batch_size) == (None, 77)
    # A sampler of Optuna's sets no limit, and keeps to the stratum.
    assert (other.max_steps, other.batch_size) == (None, some.stratum(2, SPACE))
    # A horizon is a length to train for, not a limit: it needs no stopping.
    assert horizon.max_steps == 30


def test_trials_that_ended_ahead_of_their_limit_go_no_further(study):
    ends = ("stopped", 20), ("stopped", 19), ("reached", 19), ("diverged", 19)
    for trial_index, (status, steps) in enumerate(ends):
        record = make_result(status=status, steps=steps)
        run(study, asked_with(study, trial_index, 20), lambda _, record=record: record)
    # It had no limit.
    run(study, asked(study, 4, "random"), lambda _: make_result(status="stopped", steps=19))
    # Trial 0 ended at its limit of 20, and 2 and 3 for another reason.
    assert ended_below_limit(study) == {1}


@pytest.mark.parametrize(
    ("stops", "steps", "max_steps"),
    # Twice the steps that it took, and no fewer than MIN_STEPS. None where nothing can stop a
    # trial.
    [(True, 100, 200), (True, 4, MIN_STEPS), (False, 100, None)],
)
def test_a_candidate_is_asked_for_again_on_a_fresh_seed(study, stops, steps, max_steps):
    result = run(study, asked(study, 0), lambda spec: replace(train(spec), steps=steps))
    specs = []
    # The first one is cut short, and asked again.
    for replicate in (0, 0, 1):
        _, spec = ask_replicate(
            study, Winner(result, float(steps)), replicate, BUDGET, SPACE, stops
        )
        specs.append(spec)
        finish_abandoned(study, "steps", lambda worker: True)
    assert len(specs) == 3
    for spec in specs:
        assert (spec.batch_size, spec.lr, spec.delta) == (
            result.batch_size,
            result.lr,
            result.delta,
        )
        assert (spec.replicate_of, spec.resumed_from, spec.max_steps) == (0, None, max_steps)
    assert specs[1] == replace(specs[0], number=2)
    # Three seeds: the trial's and those of two replicates.
    assert len({result.seed, specs[1].seed, specs[2].seed}) == 3
    assert [result.replicate_of for result in results(study)] == [None, 0, 0, 0]
    assert free_indices(study, 10)[0] == 1, "a replicate is none of the search"


def test_a_run_on_another_points_seed_keeps_its_own_index_but_for_the_baseline(study):
    result = run(study, asked(study, 4), train)
    winner = Winner(result, 100.0)
    other = replace(result, seed=77)
    _, spec = ask_replicate(study, winner, 0, BUDGET, SPACE, True, seed_of=other)
    assert (spec.trial_index, spec.seed) == (BUDGET.replicate_index(4, 0), 77)
    # Its first run may have gone on at another index.
    _, spec = ask_replicate(study, winner, 1, BUDGET, SPACE, True, seed_of=other, is_baseline=True)
    assert (spec.trial_index, spec.seed) == (BUDGET.replicate_index(0, 1), 77)


@pytest.mark.parametrize(
    ("own", "named", "before", "expected"),
    # The runs so far decide, then what is named, then the trial's own.
    [(130, None, None, 130), (130, 150, None, 150), (130, 150, 140, 140), (None, 150, None, None)],
)
def test_a_replicate_has_the_horizon_of_those_before_or_the_one_that_is_named(
    study, own, named, before, expected
):
    """One that was left at the budget stays there."""
    chosen = asked_with(study, 0, own, stops=False, horizon=True)
    original = run(study, chosen, lambda spec: replace(train(spec), steps=100))
    runs = () if before is None else (replace(original, horizon=before),)
    winner = Winner(original, 100.0, runs)
    _, spec = ask_replicate(study, winner, len(runs), BUDGET, SPACE, False, horizon=named)
    assert spec.max_steps == expected


def test_the_spec_holds_the_batch_size_and_rate_that_are_used(study):
    # Multiples of 64 up to 1,000, whose end is no multiple.
    snapped = Space(8, 1000, 64, 1.0, SPACE.rule)
    for trial_index in range(4):
        _, spec = ask(
            study,
            turn_at(study, trial_index),
            BUDGET,
            snapped,
            built("random", trial_index),
            stops=True,
        )
        assert spec.batch_size % 64 == 0 or spec.batch_size == 1000
        assert spec.lr == pytest.approx(snapped.rule(spec.batch_size) * 2**spec.delta)


def test_a_study_has_one_folder(opened, tmp_path):
    """A second process with another output= would fail the trials that the first one runs."""
    (tmp_path / "one").mkdir()
    # A folder may be moved as a whole; two may not exist.
    opened(output=tmp_path / "one")
    with pytest.raises(StudyError, match=r"writes to .*one: continue it with output="):
        opened(output=tmp_path / "two")
    (tmp_path / "one").rename(tmp_path / "moved")
    opened(output=tmp_path / "moved")
    opened(output=tmp_path / "moved")


def test_a_study_of_another_version_or_of_somebody_else_is_refused(opened, tmp_path):
    study = optuna.create_study(study_name="toy", storage=url(tmp_path))
    # What each attribute makes of the study: somebody's, an earlier version's, a later one's.
    for attribute, value, message in (
        ("theirs", "", "that is not bstune's: choose another name with study=NAME"),
        (
            FROZEN_SETTINGS,
            "{}",
            r"begun by another version of bstune \(format 1; this one reads 4\)",
        ),
        (FORMAT, 99, r"begun by another version of bstune \(format 99"),
    ):
        study.set_user_attr(attribute, value)
        with pytest.raises(StudyError, match=message):
            opened()


@pytest.mark.parametrize("name", SAMPLERS)
def test_samplers_are_built_from_the_config(name):
    assert type(built(name, 4)).__name__ == SAMPLERS[name]["_target_"].rpartition(".")[2]
    assert stops_trials(options_with(SAMPLERS[name])) == (name == "frontier")


@pytest.mark.parametrize(
    ("sampler", "message"),
    [
        ({"_target_": "nowhere.Sampler"}, "sampler cannot be built: there is no module nowhere"),
        ({"_target_": "builtins.dict"}, "sampler must name an optuna.samplers.BaseSampler"),
        (SAMPLERS["frontier"] | {"nonsense": 1}, "unexpected keyword argument 'nonsense'"),
        (SAMPLERS["frontier"] | {"sigma": -1.0}, "sigma must be a positive number, but got -1.0"),
    ],
)
def test_other_samplers_are_refused(sampler, message):
    with pytest.raises(ConfigError, match=message):
        build_sampler(options_with(sampler), BUDGET, 0)


@pytest.mark.parametrize("name", ["tpe", "qmc", "frontier"])
def test_trials_that_run_keep_their_trials_and_end_one_by_one(study, name):
    first = asked(study, 0, name)
    second = asked(study, 1, name)
    assert free_indices(study, 10)[0] == 2
    assert [spec.trial_index for spec in running_specs(study)] == [0, 1]
    run(
        study,
        first,
        lambda spec: TrialResult.unmeasured(
            spec, "failed", message="its process ended with status 9"
        ),
    )
    assert running_specs(study) == [second[1]], "the other one goes on"
    again = asked(study, 0, name)[1]
    assert again == replace(first[1], number=2)
    run(study, second)
    assert running_specs(study) == [again]
    other = turn_at(study, 0, "of another process")
    lost = ask(study, other, BUDGET, SPACE, RandomSampler(), stops=True)
    assert lost is None, "another process has begun one at this index"
    assert running_specs(study, "of another process") == []
    assert results(study)[-1].trial_index == 1, "what was stored in vain is no trial"
    # Of four points two are left, of two none.
    assert (free_indices(study, 4), free_indices(study, 2)) == ([2, 3], [])


@pytest.mark.parametrize(
    ("steps_low", "batch_size", "looks"),
    [
        # From a tenth of the nearest trial's 100 steps on.
        (0, 64, (10, 100)),
        # A quarter of the steps are as many examples.
        (0, 256, (2, 100)),
        # A quarter of the batch may need four times the steps.
        (0, 16, (10, 400)),
        # When that one met the target is known.
        (90, 64, None),
    ],
)
def test_trials_are_looked_at_early_where_another_met_the_target_at_its_first_look(
    study, steps_low, batch_size, looks
):
    def reaches(spec):
        fields = {**spec.trial_fields(), "batch_size": 64}
        # Evaluated for the first time at step 100, or after a miss at 90.
        return make_result(**fields, steps=100, steps_low=steps_low, history=((100, 0.1),))

    run(study, asked(study, 0, "random"), reaches)
    assert dense_search_steps(study.trials, batch_size) == looks
    assert (asked(study, 1, "random")[1].dense_steps is None) == (looks is None)


@pytest.mark.slow
def test_two_trials_that_run_do_not_go_on_from_the_same_one(study):
    now, parents = [], []
    for trial_index in range(24):
        now.append(asked(study, trial_index, "frontier"))
        parents.append(now[-1][1].resumed_from)
        # Three at a time, as three workers have.
        if len(now) == 3:
            run(study, now.pop(0))
    parents = [number for number in parents if number is not None]
    assert parents, "none went on: the test says little"
    assert len(set(parents)) == len(parents)


# Storages that fail meanwhile


@pytest.fixture
def _impatient(monkeypatch):
    """Wait for seconds in place of minutes."""
    # Seconds of patience, so that a test waits for no minutes.
    monkeypatch.setattr(patience, "RETRY_SECONDS", 20.0)
    monkeypatch.setattr(patience, "WAIT_SECONDS", (0.05,))


@contextlib.contextmanager
def mended(server, how, seconds=0.2):
    """Let a server fail, and answer again after so many seconds."""
    # Well within the 20 s of patience.
    mends = threading.Timer(seconds, ended(server, how))
    mends.start()
    yield
    # It answers before its start has ended.
    mends.join()


def ended(server, how):
    """Let a server fail; return what mends it."""
    if how == "restarted":
        server.stop()
        return server.start
    if how == "crashed":
        server.stop("immediate")
        return server.start
    if how == "frozen":
        server.freeze()
        return server.thaw
    server.end_connections()
    return lambda: None


@pytest.mark.soak
@pytest.mark.usefixtures("_impatient")
def test_a_server_that_fails_for_a_while_loses_and_doubles_nothing(
    database_server, tmp_path, caplog
):
    study = open_study("toy", database_server.url(), "steps", SETTINGS, tmp_path)
    # In each way the server fails once as a trial is asked, and once as it is told.
    for trial_index, how in enumerate(("restarted", "crashed", "frozen", "ended")):
        with mended(database_server, how, 1.5):
            now = asked(study, trial_index, "random")
        with mended(database_server, how, 1.5):
            run(study, now)
    assert [result.trial_index for result in results(study)] == [0, 1, 2, 3]
    assert {message.split(":")[0] for message in caplog.messages} == {"the storage does not answer"}
    assert running_specs(study) == []


@pytest.mark.usefixtures("_impatient")
@pytest.mark.parametrize(
    ("code", "tries"),
    [
        # Another process made the table, or the type of one of its columns: the next look finds it.
        ("42P07", 2),
        ("42710", 2),
        # No such table: no waiting ends that.
        ("42P01", 1),
    ],
)
def test_a_table_that_another_process_made_meanwhile_is_looked_for_again(code, tries):
    asked = []

    def makes():
        asked.append(None)
        if len(asked) == 1:
            raise ProgrammingError("CREATE TABLE studies", {}, DriversError(code))

    # A missing table ends the study at once.
    with contextlib.suppress(patience.StorageGoneError):
        patience.patient(makes)()
    assert len(asked) == tries


class DriversError(Exception):
    def __init__(self, code):
        super().__init__(code)
        self.pgcode = code


@pytest.mark.slow
@pytest.mark.usefixtures("_impatient")
def test_a_process_that_starts_while_the_server_does_waits_as_one_that_runs(
    database_server, tmp_path, caplog
):
    address = database_server.url()
    with mended(database_server, "restarted"):
        check_storage(address)
    with mended(database_server, "restarted"):
        owned = open_study("toy", address, "steps", SETTINGS, tmp_path)
    with mended(database_server, "crashed"):
        joined = find_study("toy", address)
    with mended(database_server, "restarted"):
        lease = Leases(owned, "owner", 4.0)
        with lease.acquired():
            assert lease.others() == []
    assert joined.user_attrs[STUDY_ID] == owned.user_attrs[STUDY_ID]
    # At least one line for each of the four.
    assert len(caplog.messages) >= 4
    assert {message.split(":")[0] for message in caplog.messages} == {"the storage does not answer"}


@pytest.mark.slow
def test_calls_that_a_server_is_killed_under_are_repeated(database_server, tmp_path, monkeypatch):
    """Its connections end at moments of all kinds: between transactions, and within them."""
    # No pause between tries, so that most calls meet a server that ends connections.
    monkeypatch.setattr(patience, "WAIT_SECONDS", (0.0,))
    study = open_study("toy", database_server.url(), "steps", SETTINGS, tmp_path)
    over = threading.Event()

    def kill():
        # So many, as on a busy machine no call would end between two of them.
        for _ in range(20):
            if over.wait(0.05):
                return
            database_server.end_connections()

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        for trial_index in range(4):
            run(study, asked(study, trial_index, "random"))
    finally:
        over.set()
        killer.join()
    done = []
    # A call that was cut after it was done leaves a failed trial, and the index is asked again.
    for result in results(study):
        if result.status != "failed":
            done.append(result.trial_index)
    assert done == [*range(4)]
    assert running_specs(study) == []


@pytest.mark.slow
def test_a_server_takes_a_long_record(database_server, tmp_path):
    """As of a trial of 100,000 steps: 150 KB."""
    study = open_study("toy", database_server.url(), "steps", SETTINGS, tmp_path)
    now = asked(study, 0, "random")
    result = replace(
        train(now[1]),
        # 3,125 measurements of about 50 characters: longer than MySQL's TEXT of 64 KiB.
        noise_scale=tuple((step, step / 7, step / 3) for step in range(0, 100_000, 32)),
    )
    tell(study, now, result, "steps")
    assert results(open_study("toy", database_server.url(), "steps", SETTINGS, tmp_path)) == [
        result
    ]


def test_a_database_that_is_locked_is_waited_for(study, tmp_path, monkeypatch):
    monkeypatch.setattr(patience, "WAIT_SECONDS", (0.0,))
    # SQLite itself waits for so long; beyond that bstune asks again.
    monkeypatch.setattr("bstune.study.storage.connection.ANSWER_SECONDS", 0.05)
    again = open_study("toy", url(tmp_path), "steps", SETTINGS, tmp_path)
    with contextlib.closing(
        sqlite3.connect(tmp_path / "study.db", check_same_thread=False)
    ) as other_process:
        other_process.execute("BEGIN EXCLUSIVE")
        threading.Timer(0.5, other_process.rollback).start()
        run(again, asked(again, 0, "random"))
    assert len(results(again)) == 1


def locked(folder):
    connection = sqlite3.connect(folder / "study.db")
    connection.execute("BEGIN EXCLUSIVE")
    return connection


def removed(folder):
    (folder / "study.db").unlink()


# As a synchronisation of folders does: the same content, another file.
def replaced(folder):
    (folder / "study.db").rename(folder / "other.db")
    (folder / "study.db").write_bytes((folder / "other.db").read_bytes())


def without_tables(folder):
    with contextlib.closing(sqlite3.connect(folder / "study.db")) as connection:
        connection.execute("DROP TABLE trial_user_attributes")


@pytest.mark.parametrize(
    ("fault", "reason", "seconds"),
    [
        # Another process may end its lock, and no file comes back by waiting.
        (locked, "database is locked", 120),
        (removed, "No such file or directory", 0),
        (replaced, "was replaced by another file", 0),
        (without_tables, "no such table", 120),
    ],
)
def test_a_storage_that_fails_for_good_ends_the_study_once_the_stated_time_is_over(
    tmp_path, monkeypatch, fault, reason, seconds
):
    clock = FakeTime()
    fake = SimpleNamespace(monotonic=clock, sleep=clock.sleep)
    monkeypatch.setattr(patience, "time", fake)
    monkeypatch.setattr("bstune.study.storage.connection.ANSWER_SECONDS", 0.01)
    study = open_study("toy", url(tmp_path), "steps", SETTINGS, tmp_path)
    now = asked(study, 0, "random")
    kept = fault(tmp_path)
    # A last try may begin just before the 120 s are over.
    waited = r".*; tried for 12\d s \(RETRY_SECONDS of .* is 120\)" if seconds else ""
    message = f"the storage does not answer: .*{reason}{waited}"
    with (
        pytest.raises(StudyError, match=message),
        cut_short(study, "steps", ""),
    ):
        run(study, now)
    assert seconds <= clock.now < seconds + 10, "what ends the study does not wait again"
    # The lock lives as long as its connection.
    del kept


def test_a_study_that_is_deleted_ends_in_a_line(study, tmp_path):
    # By another program, as Optuna's dashboard.
    optuna.delete_study(study_name="toy", storage=url(tmp_path))
    with pytest.raises(StudyError, match=r"was deleted from its storage while it ran"):
        asked(study, 0, "random")


def test_a_trial_that_the_storage_made_without_answering_is_dropped(study, monkeypatch):
    backend, answers = study._storage._backend, []

    # The trial is made, and its number never arrives.
    def unanswered(*arguments):
        answers.append(create(*arguments))
        if len(answers) == 1:
            raise optuna.exceptions.StorageInternalError("the connection is gone")
        return answers[-1]

    create = backend._create_new_trial
    monkeypatch.setattr(patience, "WAIT_SECONDS", (0.0,))
    monkeypatch.setattr(backend, "_create_new_trial", unanswered)
    _, spec = asked(study, 0, "random")
    # Number 0 is the one that nobody knows of.
    assert (spec.number, len(answers)) == (1, 2)
    assert [trial.state.name for trial in study.get_trials()] == ["FAIL", "RUNNING"]
    assert results(study) == []


def test_a_trial_that_finishes_while_the_storage_is_away_is_kept(opened, tmp_path, monkeypatch):
    """As by Search, which keeps its record in the output folder."""
    study = opened()
    (_, spec), files = asked(study, 0, "random"), Output(tmp_path)
    files.unstored.write_text(train(spec).to_json() + "\n")
    study = opened()
    store_unstored(study, files)
    finish_abandoned(study, "steps", lambda worker: True)
    assert results(study) == [train(spec)]
    assert not files.unstored.exists()
    # What has been stored is not stored again.
    store_unstored(study, files)


def test_a_record_that_was_cut_short_while_the_storage_is_away_does_not_block_the_study(
    opened, tmp_path, caplog
):
    study, files = opened(), Output(tmp_path)
    _, first = asked(study, 0, "random")
    _, second = asked(study, 1, "random")
    # The second line ends in the midst of its record.
    files.unstored.write_text(train(first).to_json() + "\n" + train(second).to_json()[:100])
    store_unstored(study, files)
    finish_abandoned(study, "steps", lambda worker: True)
    kept, lost = results(study)
    assert (kept, lost.status) == (train(first), "failed")
    assert "has a record that was cut short" in caplog.text


@pytest.mark.slow
def test_a_worker_joins_with_the_arguments_of_the_latest_command(bstune, tmp_path):
    # The second command of the study allows a trial more.
    for trials in (1, 2):
        command = (
            "workload=replay",
            "workload.table=fashion_mlp",
            f"search.trials={trials}",
            "mlflow.enabled=false",
        )
        assert bstune(*command, "search.replicates=0")[0] == 0
    study = find_study("replay-fashion_mlp", f"sqlite:///{tmp_path}/bstune.db")
    assert compose_joined(study, []).options.search.trials == 2
