"""The study in Optuna's storage: asked, cut short, continued, refused; samplers as a config builds them."""

import socket
import sqlite3
from dataclasses import replace
from functools import partial

import optuna
import pytest
from omegaconf import OmegaConf
from optuna.samplers import RandomSampler
from toolbox import entries, make_result

from bstune.core import scaling
from bstune.core.errors import ConfigError, StudyError
from bstune.core.records import Target, TrialResult
from bstune.core.search_space import Space
from bstune.search.sampler import FrontierSampler
from bstune.study.plan import SearchBudget
from bstune.study.storage import (
    FORMAT,
    FROZEN_SETTINGS,
    RECORD,
    TRIAL_INDEX,
    ask,
    ask_replicate,
    build_sampler,
    check_storage,
    cut_short,
    distributions,
    ended_below_limit,
    fail_one,
    finish_abandoned,
    next_trial_index,
    open_study,
    results,
    running,
    tell,
)
from bstune.trial.backend import stops_trials

TARGET = Target("val/error", 0.1, "min")
SPACE = Space(8, 1024, 1, 1.0, partial(scaling.sqrt, reference_batch_size=64, reference_lr=0.1))
SETTINGS = {"workload.name": "toy", "search.objective": "steps", "seed": 3}
SAMPLERS = {
    "tpe": {"_target_": "optuna.samplers.TPESampler", "n_startup_trials": 4},
    "gp": {"_target_": "optuna.samplers.GPSampler", "n_startup_trials": 4},
    "qmc": {"_target_": "optuna.samplers.QMCSampler", "qmc_type": "sobol", "scramble": True},
    "random": {"_target_": "optuna.samplers.RandomSampler"},
    "frontier": {"_target_": "bstune.search.sampler.FrontierSampler"},
}
OWN = {
    "objective": "steps",
    "rule": SPACE.rule,
    "budget": lambda batch_size: 400.0,
    "target": TARGET,
    "resumable": lambda number: True,
    "snap": SPACE.snap,
    "search_space": distributions(SPACE),
}

VALUES = {
    "time": [2.0],
    "steps": [100.0],
    "both": [100.0, 2.0],
    "curve": [3200.0],
}  # of 100 steps of 32 examples, 20 ms


@pytest.fixture(autouse=True)
def _quiet():
    optuna.logging.set_verbosity(optuna.logging.WARNING)


@pytest.fixture
def study(tmp_path):
    return open_study("toy", url(tmp_path), "steps", SETTINGS, tmp_path)


def budget(stratified=0.5):
    return SearchBudget("steps", 10, None, None, stratified, 3)


def train(spec):
    """B_crit = 100 and a penalty for delta off 0.5; far above it a trial diverges, far below it is censored."""
    status = "diverged" if spec.delta > 2.5 else "censored" if spec.delta < -2.0 else "reached"
    steps = round(50 * (1 + 100 / spec.batch_size) * 2 ** min(abs(spec.delta - 0.5), 9))
    if spec.max_steps is not None and steps > spec.max_steps:
        status, steps = "censored", spec.max_steps
    return make_result(
        **spec.trial_fields(),
        status=status,
        steps=steps,
        seconds_per_step=1e-3 + 1e-5 * spec.batch_size,
        history=((steps, 0.09 if status == "reached" else 0.3),),
    )


def run(study, asked, train=train):
    """Run a trial that was asked for, as a study's search does."""
    trial, spec = asked
    with cut_short(study, "steps"):
        result = train(spec)
        tell(study, trial, result, "steps", TARGET)
        return result


def built(name="tpe", trial_index=0):
    return build_sampler(OmegaConf.create(SAMPLERS[name]), budget(), trial_index, OWN)


def asked(study, trial_index, name="tpe", stops=True):
    return ask(study, trial_index, budget(), SPACE, built(name, trial_index), stops)


class Fixed(FrontierSampler):
    """Proposes one point, limit and parent."""

    def __init__(self, max_steps=None, resumed_from=None, batch_size=64, delta=1.0):
        super().__init__(**OWN)
        self.given = max_steps, resumed_from, batch_size, delta

    def sample_relative(self, study, trial, search_space):
        if not search_space:
            return {}
        max_steps, resumed_from, batch_size, delta = self.given
        self._max_steps[trial.number] = max_steps
        if resumed_from is not None:
            self._resumed_from[trial.number] = resumed_from
        return {"batch_size": batch_size, "delta": delta}


def url(tmp_path, name="study"):
    return f"sqlite:///{tmp_path}/{name}.db"


def go_on(study, name, trials=10, until=None):
    """Run trials to the last one, or to ``until`` of them; return what was asked, with the index resumed from."""
    specs = []
    while (trial_index := next_trial_index(study, trials)) is not None and trial_index != until:
        trial, spec = asked(study, trial_index, name)
        run(study, (trial, spec))
        earlier = None if spec.resumed_from is None else study.get_trials()[spec.resumed_from].user_attrs[TRIAL_INDEX]
        specs.append((trial_index, spec.batch_size, spec.delta, spec.seed, spec.max_steps, earlier))
    return specs


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.parametrize("killed_at", [1, 6, 8])
def test_a_study_killed_and_continued_asks_the_same_trials(tmp_path, name, killed_at):
    whole = open_study("toy", url(tmp_path, "whole"), "steps", SETTINGS, tmp_path)
    expected = go_on(whole, name)

    study = open_study("toy", url(tmp_path, "killed"), "steps", SETTINGS, tmp_path)
    found = go_on(study, name, until=killed_at)
    asked(study, killed_at, name)  # SIGKILL: the trial stays RUNNING

    study = open_study("toy", url(tmp_path, "killed"), "steps", SETTINGS, tmp_path)
    finish_abandoned(study, "steps")
    found += go_on(study, name)
    assert found == expected
    # Only the first ones: a GP, which does not see censored trials, may come back to one of them.
    points = [(batch_size, delta) for _, batch_size, delta, _, _, resumed_from in found[:4] if resumed_from is None]
    assert len(set(points)) == len(points) > 1, "a sampler that is seeded anew repeats itself"


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_an_error_fails_the_trial_and_its_index_is_asked_again(study, error):
    first = asked(study, 0)

    def fail(spec):
        raise error

    with pytest.raises(error):
        run(study, first, fail)
    assert [t.state.name for t in study.get_trials()] == ["FAIL"]
    assert next_trial_index(study, 10) == 0
    run(study, asked(study, 0, "random"))
    records = results(study)
    assert [(r.number, r.trial_index, r.status) for r in records] == [(0, 0, "failed"), (1, 0, "reached")]
    point = first[1].batch_size, first[1].lr, first[1].delta, first[1].seed
    assert [(r.batch_size, r.lr, r.delta, r.seed) for r in records] == [point, point]


def test_a_trial_whose_record_was_stored_is_not_lost(study):
    trial, spec = asked(study, 0)
    result = train(spec)
    trial.set_user_attr(RECORD, result.to_json())  # SIGKILL between this and tell
    finish_abandoned(study, "steps")
    assert results(study) == [result]
    assert next_trial_index(study, 10) == 1
    assert study.best_value == result.steps


@pytest.mark.parametrize(
    ("objective", "status", "state", "values"),
    [
        *((objective, "reached", "COMPLETE", values) for objective, values in VALUES.items()),
        ("both", "censored", "PRUNED", None),  # Optuna reports no values to two objectives
        *(("steps", status, "PRUNED", None) for status in ("censored", "diverged", "oom")),
        ("steps", "failed", "FAIL", None),
    ],
)
def test_what_optuna_stores(tmp_path, objective, status, state, values):
    study = open_study("toy", url(tmp_path), objective, SETTINGS, tmp_path)
    history = () if status == "oom" else ((90, 0.4), (100, 0.25))
    result = make_result(status=status, steps=100, seconds_per_step=0.02, history=history)
    tell(study, asked(study, 0)[0], result, objective, TARGET)
    trial = study.get_trials()[0]
    assert trial.state.name == state
    assert TrialResult.from_json(trial.user_attrs[RECORD]) == result
    assert values is None or trial.values == values
    gap = {} if status in ("reached", "oom") or objective == "both" else {1: pytest.approx(0.15)}
    assert trial.intermediate_values == gap


def stopped(study):
    """Run a trial that is stopped early, and return its spec."""
    trial, spec = ask(study, 0, budget(), SPACE, Fixed(20), stops=True)
    run(study, (trial, spec))
    return spec


def test_a_trial_that_continues_another_has_its_point_and_its_seed(study):
    first = stopped(study)
    second = ask(study, 1, budget(), SPACE, Fixed(50, resumed_from=0), stops=True)
    assert (second[1].max_steps, second[1].resumed_from, second[1].trial_index) == (50, 0, 1)
    assert replace(second[1], number=0, trial_index=0, max_steps=20, resumed_from=None) == first
    assert second[1].seed == budget().trial_seed(0)
    run(study, second)
    _, third = ask(study, 2, budget(), SPACE, Fixed(90, resumed_from=1), stops=True)
    assert (third.resumed_from, third.seed, third.lr) == (1, first.seed, first.lr)


def test_a_trial_that_was_cut_short_is_asked_again_as_it_was(study):
    """Its limit and its parent too, which the sampler is not asked for again."""
    stopped(study)
    _, spec = ask(study, 1, budget(), SPACE, Fixed(50, resumed_from=0), stops=True)
    for number in (2, 3):  # and again
        finish_abandoned(study, "steps")
        _, again = ask(study, 1, budget(), SPACE, Fixed(999, batch_size=8, delta=-1.0), stops=True)
        assert again == replace(spec, number=number)
    assert [result.resumed_from for result in results(study)] == [None, 0, 0]


def test_a_trial_that_was_not_asked_to_the_end_is_asked_anew(study):
    """A kill between its parameters and its spec would lose its limit and its parent."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bstune.study.storage._stored", lambda trial, spec: None)
        ask(study, 0, budget(), SPACE, Fixed(30), stops=True)
    finish_abandoned(study, "steps")
    assert results(study) == []
    _, spec = ask(study, 0, budget(), SPACE, Fixed(30), stops=True)
    assert (spec.number, spec.max_steps, spec.batch_size) == (1, 30, 64)


def test_a_limit_is_for_trials_that_can_be_stopped_and_their_sampler_chooses_every_batch_size(study):
    some = budget(stratified=1.0)
    bound = [(Fixed(30, batch_size=77), True), (Fixed(30, batch_size=77), False), (RandomSampler(), True)]
    specs = [ask(study, i, some, SPACE, sampler, stops)[1] for i, (sampler, stops) in enumerate(bound)]
    assert [spec.max_steps for spec in specs] == [30, None, None]
    assert [spec.batch_size for spec in specs] == [77, 77, some.stratum(2, SPACE)]


def test_trials_that_ended_ahead_of_their_limit_go_no_further(study):
    ends = ("censored", 20), ("censored", 19), ("reached", 19), ("diverged", 19)
    for trial_index, (status, steps) in enumerate(ends):
        record = make_result(status=status, steps=steps)
        run(study, ask(study, trial_index, budget(), SPACE, Fixed(20), stops=True), lambda _, record=record: record)
    run(study, asked(study, 4, "random"), lambda _: make_result(status="censored", steps=19))  # it had no limit
    assert ended_below_limit(study) == {1}


@pytest.mark.parametrize(("stops", "max_steps"), [(True, 200), (False, None)])
def test_a_candidate_is_asked_for_again_on_a_fresh_seed(study, stops, max_steps):
    result = run(study, asked(study, 0), lambda spec: replace(train(spec), steps=100))
    specs = []
    for replicate in (0, 0, 1):  # the first one is cut short
        _, spec = ask_replicate(study, result, replicate, budget(), SPACE, stops)
        specs.append(spec)
        finish_abandoned(study, "steps")
    assert {(s.batch_size, s.lr, s.delta) for s in specs} == {(result.batch_size, result.lr, result.delta)}
    assert {(s.replicate_of, s.resumed_from, s.max_steps) for s in specs} == {(0, None, max_steps)}
    assert specs[1] == replace(specs[0], number=2)
    assert len({result.seed, specs[1].seed, specs[2].seed}) == 3
    assert [r.replicate_of for r in results(study)] == [None, 0, 0, 0]
    assert next_trial_index(study, 10) == 1, "a replicate is none of the search"


def test_the_spec_holds_the_batch_size_and_rate_that_are_used(study):
    snapped = Space(8, 1000, 64, 1.0, SPACE.rule)
    for trial_index in range(8):
        _, spec = ask(study, trial_index, budget(), snapped, built("random", trial_index), stops=True)
        assert spec.batch_size % 64 == 0 or spec.batch_size == 1000
        assert spec.lr == pytest.approx(snapped.rule(spec.batch_size) * 2**spec.delta)


def test_changed_settings_are_refused_with_the_difference(tmp_path):
    open_study("toy", url(tmp_path), "steps", SETTINGS, tmp_path)
    open_study("toy", url(tmp_path), "steps", dict(reversed(SETTINGS.items())), tmp_path)
    with pytest.raises(StudyError) as caught:
        open_study("toy", url(tmp_path), "steps", {**SETTINGS, "seed": 4, "precision": "bf16-mixed"}, tmp_path)
    assert "seed: was 3, now 4" in str(caught.value)
    assert "precision: was None, now 'bf16-mixed'" in str(caught.value)
    assert "workload.name" not in str(caught.value)


def test_a_study_has_one_folder(tmp_path):
    """A second process with another output= would fail the trials that the first one runs."""
    (tmp_path / "one").mkdir()
    open_study("toy", url(tmp_path), "steps", SETTINGS, tmp_path / "one")
    with pytest.raises(StudyError, match=r"writes to .*one: continue it with output="):
        open_study("toy", url(tmp_path), "steps", SETTINGS, tmp_path / "two")
    (tmp_path / "one").rename(tmp_path / "moved")
    open_study("toy", url(tmp_path), "steps", SETTINGS, tmp_path / "moved")
    open_study("toy", url(tmp_path), "steps", SETTINGS, tmp_path / "moved")


def test_a_study_of_another_version_or_of_somebody_else_is_refused(tmp_path):
    study = optuna.create_study(study_name="toy", storage=url(tmp_path))
    for attribute, value, message in (
        (None, None, "that is not bstune's: choose another name with study=NAME"),
        (FROZEN_SETTINGS, "{}", r"begun by another version of bstune \(format 1; this one reads 2\)"),
        (FORMAT, 99, r"begun by another version of bstune \(format 99"),
    ):
        if attribute is not None:
            study.set_user_attr(attribute, value)
        with pytest.raises(StudyError, match=message):
            open_study("toy", url(tmp_path), "steps", SETTINGS, tmp_path)


@pytest.mark.parametrize(
    ("storage", "message"),
    [
        ("nonsense", "storage=nonsense is no database URL"),
        ("sqlite:////nowhere/at/all.db", "the folder /nowhere/at does not exist"),
        ("oracle9://host/name", "the storage does not answer: storage=oracle9://host/name"),
        ("sqlite:///{tmp}/notes.txt", "file is not a database"),
    ],
)
def test_storages_that_cannot_be_are_refused(tmp_path, storage, message):
    (tmp_path / "notes.txt").write_text("no database at all, " * 100)
    with pytest.raises(StudyError, match=message):
        check_storage(storage.format(tmp=tmp_path))
    check_storage(url(tmp_path))
    assert entries(tmp_path) == ["notes.txt"], "checking writes nothing"


def test_a_locked_storage_is_reported(tmp_path):
    """Another process that holds an exclusive lock is a storage that does not answer."""
    open_study("toy", url(tmp_path), "steps", SETTINGS, tmp_path)
    holder = sqlite3.connect(tmp_path / "study.db")
    holder.execute("BEGIN EXCLUSIVE")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bstune.study.storage.CONNECT_SECONDS", 0.2)
        with pytest.raises(StudyError, match="database is locked"):
            check_storage(url(tmp_path))
    holder.close()


@pytest.mark.parametrize("name", SAMPLERS)
def test_samplers_are_built_from_the_config(name):
    assert type(built(name, 4)).__name__ == SAMPLERS[name]["_target_"].rpartition(".")[2]
    assert stops_trials(OmegaConf.create(SAMPLERS[name])) == (name == "frontier")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"_target_": "nowhere.Sampler"}, "sampler cannot be built: Error locating target 'nowhere.Sampler'"),
        ({"_target_": "builtins.dict"}, "sampler must name an optuna.samplers.BaseSampler"),
        (SAMPLERS["frontier"] | {"nonsense": 1}, "unexpected keyword argument 'nonsense'"),
        (SAMPLERS["frontier"] | {"sigma": -1.0}, "sigma must be a positive number, but got -1.0"),
    ],
)
def test_other_samplers_are_refused(config, message):
    with pytest.raises(ConfigError, match=message):
        build_sampler(OmegaConf.create(config), budget(), 0)


def test_a_server_that_never_answers_ends_within_the_time_out(tmp_path):
    pytest.importorskip("pymysql", reason="needs a MySQL driver")
    with socket.create_server(("127.0.0.1", 0)) as server, pytest.MonkeyPatch.context() as patch:
        patch.setattr("bstune.study.storage.CONNECT_SECONDS", 0.5)
        with pytest.raises(StudyError, match=r"the storage does not answer: .*no answer within 1.0 s"):
            check_storage(f"mysql+pymysql://u@127.0.0.1:{server.getsockname()[1]}/name")


@pytest.mark.parametrize("name", ["tpe", "qmc", "frontier"])
def test_trials_that_run_keep_their_trials_and_end_one_by_one(study, name, caplog):
    first, second = (asked(study, trial_index, name) for trial_index in (0, 1))
    assert next_trial_index(study, 10) == 2
    assert [spec.trial_index for spec in running(study)] == [0, 1]
    assert first[1].seed != second[1].seed
    fail_one(study, first[1], "ended with status 9")
    assert "trial 0" in caplog.text
    assert "its process ended with status 9; it is asked again" in caplog.text
    assert running(study) == [second[1]], "the other one goes on"
    assert next_trial_index(study, 10) == 0
    again = asked(study, 0, name)[1]
    assert (again.batch_size, again.lr, again.seed) == (first[1].batch_size, first[1].lr, first[1].seed)
    run(study, second)
    assert running(study) == [again]
    assert next_trial_index(study, 10) == 2
    assert next_trial_index(study, 2) is None


def test_two_trials_that_run_do_not_go_on_from_the_same_one(study):
    now, parents = [], []
    for trial_index in range(24):
        now.append(asked(study, trial_index, "frontier"))
        parents += [spec.resumed_from for _, spec in now[-1:] if spec.resumed_from is not None]
        if len(now) == 3:
            run(study, now.pop(0))
    assert parents, "none went on: the test says little"
    assert len(set(parents)) == len(parents)
