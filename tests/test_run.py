"""Studies as the command runs them: cut short and continued, with trials that are stopped, continued and replicated."""

import json
import math
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import optuna
import pytest
import yaml
from rich.console import Console
from toolbox import entries, steps_to_target, table_rows, trials_of, write_rows

from bstune.core.records import Target, TrialResult, TrialSpec
from bstune.study import run as jobs
from bstune.study.prepare import compose_checked, prepare
from bstune.study.run import MAX_STATES, Progress, worth_continuing
from bstune.study.storage import SPEC

REPLAY = ("workload=replay", "workload.table=t.jsonl", "workload.target.value=0.14", "mlflow.enabled=false")
STEPS = "search.objective=steps"  # its costs are counted in examples: no clock decides anything
DIGITS = ("workload=digits", "mlflow.enabled=false", "search.batch_size.low=32", "search.batch_size.high=512")
EASY = ("workload.target.value=1.0", "budget.steps=60", "budget.examples=6000")
# The length of the warm-up is the budget's: a schedule with a horizon.
HORIZON = ("workload.module.schedule.warmup_examples=${trial.total_steps}",)
NO_REPLICATES = "search.replicates=0"
TRIALS = 24


@pytest.fixture
def table(tmp_path):
    return write_rows(tmp_path / "t.jsonl", table_rows())


@pytest.fixture
def outputs(tmp_path):
    return tmp_path / "outputs"


def asked_by_index(study: Path) -> dict[int, tuple]:
    """Return what came of each trial index: numbers count trials that were cut short, too."""
    trials = trials_of(study)
    indices = {trial.number: trial.trial_index for trial in trials}
    return {
        t.trial_index: (
            *(t.batch_size, t.lr, t.seed),
            *(indices.get(t.resumed_from), indices.get(t.replicate_of)),
            *(t.status, t.steps, t.history),
        )
        for t in trials
        if t.status != "failed"
    }


def cut_short(monkeypatch, at, killed):
    """End the process at its ``at``-th trial, from 0: killed, which leaves the trial running, or interrupted."""
    run, calls = jobs._Search.run, []

    def ended(search, asked, done):
        calls.append(asked)
        if len(calls) > at:
            if killed:
                raise SystemExit(1)
            search._prepared.backend.run = interrupt
        run(search, asked, done)

    def interrupt(*arguments):
        raise SystemExit(1)  # what Lightning makes of Ctrl-C

    monkeypatch.setattr(jobs._Search, "run", ended)


@pytest.mark.slow
@pytest.mark.parametrize("killed", [True, False], ids=["killed", "interrupted"])
@pytest.mark.parametrize(("sampler", "objective"), [("frontier", "steps"), ("frontier", "both"), ("tpe", "steps")])
def test_a_study_cut_short_and_continued_asks_the_same_trials(
    bstune, outputs, monkeypatch, table, sampler, objective, killed
):
    arguments = (*REPLAY, f"search.objective={objective}", f"sampler={sampler}", f"search.trials={TRIALS}")
    assert bstune(*arguments, "study=whole")[0] == 0
    whole = asked_by_index(outputs / "whole")
    order = list(whole)
    assert len([trial_index for trial_index in order if trial_index < TRIALS]) == TRIALS
    continued = next((i for i, trial_index in enumerate(order) if whole[trial_index][3] is not None), 7)
    assert sampler == "tpe" or whole[order[continued]][3] is not None, "no trial was continued: the test says little"
    fresh = next(
        i for i, trial_index in enumerate(order) if whole[trial_index][4] is not None
    )  # there is one: some trial reached it
    done = 0
    # Cut short in the first trial, in one that continues another one, and in the second that confirms one.
    for at in sorted({0, continued, fresh + 1}):
        with monkeypatch.context() as patch:
            cut_short(patch, at - done, killed)
            assert bstune(*arguments, "study=pieces")[0] == 130
        done = at
    assert bstune(*arguments, "study=pieces")[0] == 0
    assert asked_by_index(outputs / "pieces") == whole
    failed = [trial for trial in trials_of(outputs / "pieces") if trial.status == "failed"]
    assert [trial.trial_index for trial in failed] == [order[at] for at in sorted({0, continued, fresh + 1})]
    assert [(t.batch_size, t.lr, t.seed) for t in failed] == [whole[t.trial_index][:3] for t in failed]


@pytest.mark.slow
@pytest.mark.parametrize("sampler", ["frontier", "tpe"])
def test_training_that_was_cut_short_goes_on_as_if_it_had_not_been(bstune, outputs, monkeypatch, sampler):
    arguments = (*DIGITS, *EASY, STEPS, f"sampler={sampler}", "search.trials=12", "search.replicates=1")
    arguments += ("protocol.noise_scale_every=2",)
    assert bstune(*arguments, "study=whole")[0] == 0
    whole = asked_by_index(outputs / "whole")
    continued = next((i for i, trial_index in enumerate(whole) if whole[trial_index][3] is not None), 5)
    assert sampler == "tpe" or whole[list(whole)[continued]][3] is not None
    with monkeypatch.context() as patch:
        cut_short(patch, continued, killed=False)
        assert bstune(*arguments, "study=pieces")[0] == 130
    assert bstune(*arguments, "study=pieces")[0] == 0
    assert asked_by_index(outputs / "pieces") == whole


@pytest.mark.slow
def test_measuring_the_noise_scale_changes_no_trial_and_is_reported(bstune, outputs):
    """A general sampler asks the same whatever was measured."""
    arguments = (*DIGITS, *EASY, STEPS, "sampler=tpe", "search.trials=10", "search.replicates=1")
    assert bstune(*arguments, "study=without", "protocol.noise_scale_every=null")[0] == 0
    status, out, _ = bstune(*arguments, "study=with", "protocol.noise_scale_every=2")
    assert status == 0
    assert asked_by_index(outputs / "with") == asked_by_index(outputs / "without")
    assert all(trial.noise_scale for trial in trials_of(outputs / "with") if trial.steps > 1)
    assert not any(trial.noise_scale for trial in trials_of(outputs / "without"))
    row = json.loads((outputs / "with" / "curve.json").read_text())["noise_scale"]
    assert row["trials"] >= 4
    assert f"{row['steps']} steps of {row['trials']} trials" in " ".join(out.split())
    assert json.loads((outputs / "without" / "curve.json").read_text())["noise_scale"] is None


@pytest.mark.slow
def test_a_continued_trial_is_its_parent_gone_further(bstune, outputs):
    assert bstune(*DIGITS, *EASY, STEPS, "search.trials=16", "search.replicates=0")[0] == 0
    study = outputs / "digits"
    trials = {trial.number: trial for trial in trials_of(study)}
    continued = [trial for trial in trials.values() if trial.resumed_from is not None]
    assert continued
    for trial in continued:
        parent = trials[trial.resumed_from]
        assert (trial.batch_size, trial.lr, trial.seed) == (parent.batch_size, parent.lr, parent.seed)
        assert trial.steps > parent.steps
        assert trial.history[: len(parent.history)] == parent.history
    parents = {trial.resumed_from for trial in continued}
    stopped = {trial.number for trial in trials.values() if trial.status == "censored"} - parents
    states = {int(path.stem.removeprefix("trial-")) for path in (study / "states").iterdir()}
    assert states <= stopped, "the states of the trials that were continued, or reached the target, are deleted"
    assert states == worth_continuing(list(trials.values()), "steps")


@pytest.mark.slow
def test_the_command_of_the_winner_takes_it_to_the_target_in_as_many_steps(bstune, outputs):
    """Also where its last evaluation was at its limit, or its parent's was."""
    assert bstune(*DIGITS, *EASY, STEPS, "search.trials=16", "search.replicates=0")[0] == 0
    study = outputs / "digits"
    best = yaml.safe_load((study / "best.yaml").read_text())["best_by_steps"]
    winner = trials_of(study)[best["number"]]
    assert bstune(*best["command"].split()[3:])[0] == 0
    (record,) = study.glob("trial-B*/trial.json")
    again = TrialResult.from_json(record.read_text())
    assert (again.status, again.steps, again.history[-1]) == ("reached", winner.steps, winner.history[-1])
    assert set(again.history) <= set(winner.history)


@pytest.mark.slow
@pytest.mark.parametrize("sampler", ["frontier", "tpe"])
def test_a_schedule_with_a_horizon_is_never_stopped_early(bstune, tmp_path, sampler, outputs):
    arguments = (*DIGITS, *EASY, *HORIZON, STEPS, f"sampler={sampler}", "search.trials=6", "search.replicates=2")
    status, out, _ = bstune(*arguments)
    assert status == 0
    assert "each ends at the target or after 60 steps and 6000 examples" in " ".join(out.split())
    study = optuna.load_study(study_name="digits", storage=f"sqlite:///{tmp_path}/bstune.db")
    specs = [TrialSpec(**json.loads(trial.user_attrs[SPEC])) for trial in study.get_trials()]
    assert sum(spec.replicate_of is not None for spec in specs) >= 2
    assert {(spec.max_steps, spec.resumed_from) for spec in specs} == {(None, None)}
    assert not (outputs / "digits" / "states").exists()
    for trial in trials_of(outputs / "digits"):
        assert trial.status != "censored" or trial.steps == max(60, math.ceil(6000 / trial.batch_size))


@pytest.mark.slow
def test_winners_are_confirmed_on_fresh_seeds_beside_the_search(bstune, outputs, table):
    assert bstune(*REPLAY, "search.seconds=100", "search.candidates=1")[0] == 0
    trials = trials_of(outputs / "replay")
    searched = [trial for trial in trials if trial.replicate_of is None]
    fresh = [trial for trial in trials if trial.replicate_of is not None]
    assert sum(trial.train_seconds for trial in searched) >= 100
    assert sum(trial.train_seconds for trial in searched[:-1]) < 100, "the fresh runs were counted"
    assert [trial.trial_index for trial in searched] == list(range(len(searched)))
    assert len(fresh) == 3
    assert trials[-3:] == fresh, "they come after the search"
    (winner,) = {trial.replicate_of for trial in fresh}
    for trial in fresh:
        assert (trial.batch_size, trial.lr) == (trials[winner].batch_size, trials[winner].lr)
        assert trial.resumed_from is None
        assert trial.steps <= 2 * trials[winner].steps
    seeds = [trial.seed for trial in trials if trial.resumed_from is None]
    assert len(set(seeds)) == len(seeds)
    assert len({trial.trial_index for trial in trials}) == len(trials)


def test_a_line_a_trial_in_the_order_in_which_they_end(make_result, capsys):
    target = Target("val/error", 0.1, "min")
    trials = [make_result(number=number, trial_index=number) for number in range(5)]
    with Progress(5, target, Console(width=200)) as progress:
        for done in ((0,), (0, 2), (0, 2), (0, 1, 2, 4), (0, 1, 2, 3, 4)):  # the first was done before
            progress.show([trials[number] for number in done])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines] == [f"trial {number + 1}/5" for number in (2, 1, 4, 3)]


@pytest.mark.slow
def test_nothing_more_is_done_once_all_is_done_and_confirmations_can_be_added(bstune, outputs, table):
    arguments = (*REPLAY, STEPS, "sampler=tpe", "search.precision=null", "search.trials=12", "search.candidates=1")
    study = outputs / "replay"
    assert bstune(*arguments, "search.replicates=0")[0] == 0
    none = trials_of(study)
    assert len(none) == 12
    assert not any(trial.replicate_of is not None for trial in none)
    assert bstune(*arguments, "search.replicates=2")[0] == 0
    two = trials_of(study)
    assert two[:12] == none
    assert len(two) == 14
    assert bstune(*arguments, "search.replicates=4")[0] == 0
    four = trials_of(study)
    assert four[:14] == two
    assert len({(trial.trial_index, trial.seed) for trial in four[12:]}) == 4
    assert bstune(*arguments, "search.replicates=4")[0] == 0
    assert trials_of(study) == four


@pytest.mark.slow
def test_the_search_ends_once_the_critical_batch_size_is_known_well_enough(bstune, outputs, table):
    arguments = (*REPLAY, "sampler=tpe", "search.precision=1000", "search.trials=40")
    status, out, _ = bstune(*arguments)
    assert status == 0
    sentence = out[out.index("stopped: B_crit lies between ") :].splitlines()[0]
    assert sentence.endswith(", within search.precision=1000")
    study = outputs / "replay"
    assert json.loads((study / "curve.json").read_text())["stop_reason"] == sentence
    first = trials_of(study)
    assert sum(trial.replicate_of is None for trial in first) == 8, "the first look after six trials that reached it"
    assert sum(trial.replicate_of is not None for trial in first) >= 3
    assert bstune(*arguments)[0] == 0
    assert trials_of(study) == first, "the same command goes on searching: the fresh runs were taken for its trials"


@pytest.mark.slow
def test_the_objective_curve_from_end_to_end(bstune, tmp_path, table, outputs):
    status, out, _ = bstune(*REPLAY, "search.objective=curve", "search.seconds=150", "search.precision=null")
    assert status == 0
    assert "objective curve" in out
    curve = json.loads((outputs / "replay" / "curve.json").read_text())
    assert 16 < curve["fit"]["b_crit"] < 256
    study = optuna.load_study(study_name="replay", storage=f"sqlite:///{tmp_path}/bstune.db")
    records = {trial.number: trial for trial in trials_of(outputs / "replay")}
    reached = [trial for trial in study.get_trials() if trial.state.name == "COMPLETE"]
    assert reached
    assert all(trial.values == [float(records[trial.number].examples)] for trial in reached)


@pytest.mark.slow
def test_a_record_that_ended_is_not_continued(bstune, tmp_path, outputs):
    """Half of the table never reaches the target: its trials end with their records, which go no further."""
    write_rows(tmp_path / "t.jsonl", table_rows(missed=lambda lr: lr >= 0.1))
    assert bstune(*REPLAY, "search.trials=24", "search.replicates=0", "search.precision=null")[0] == 0
    trials = trials_of(outputs / "replay")
    study = optuna.load_study(study_name="replay", storage=f"sqlite:///{tmp_path}/bstune.db")
    limits = [json.loads(trial.user_attrs[SPEC])["max_steps"] for trial in study.get_trials()]
    ended = {t.number for t, limit in zip(trials, limits, strict=True) if t.status == "censored" and t.steps < limit}
    assert ended, "no record ended ahead of its trial's limit: the test says nothing"
    assert not ended & {trial.resumed_from for trial in trials}
    assert all(trial.train_seconds > 0 for trial in trials)


# Trials as (number, status, steps, seconds a step, parent, confirms); 1 s is the time to target of number 0.
BEST = (0, "reached", 100, 0.01, None, None)


@pytest.mark.parametrize(
    ("trials", "kept"),
    [
        ([], set()),
        ([(0, "censored", 10, 0.01, None, None)], {0}),
        ([(0, "censored", 10, None, None, None)], {0}),
        ([(0, "diverged", 9, 0.01, None, None), (1, "oom", 9, 0.01, None, None)], set()),
        ([BEST, (1, "censored", 119, 0.01, None, None), (2, "censored", 121, 0.01, None, None)], {1, 2}),
        ([(0, "censored", 10, 0.01, None, None), (1, "censored", 20, 0.01, 0, None)], {1}),
        ([(0, "censored", 10, 0.01, None, None), (1, "reached", 20, 0.01, 0, None)], set()),
        ([(0, "censored", 10, 0.01, None, None), (1, "failed", 0, None, 0, None)], {0}),  # is asked again
        ([BEST, (1, "censored", 20, 0.01, None, 0)], set()),
        ([BEST, (1, "reached", 10, 0.01, None, 0), (2, "censored", 50, 0.01, None, None)], {2}),
    ],
)
def test_the_states_that_are_kept(make_result, trials, kept):
    names = ("number", "status", "steps", "seconds_per_step", "resumed_from", "replicate_of")
    done = [make_result(**dict(zip(names, values, strict=True))) for values in trials]
    assert worth_continuing(done, "time") == kept


# Number 2 has taken too long to win, number 3 too many steps; number 1 is the oldest of those that may.
@pytest.mark.parametrize(
    ("objective", "dropped"), [("time", {2}), ("steps", {3}), ("both", {1}), ("curve", {1})], ids=str
)
def test_where_there_are_many_those_that_cannot_win_go_first(make_result, objective, dropped):
    rows = [(number, "censored", 10, 0.01, None, None) for number in range(MAX_STATES + 2)]
    rows[0], rows[2:4] = BEST, [(2, "censored", 10, 1.0, None, None), (3, "censored", 200, 0.001, None, None)]
    names = ("number", "status", "steps", "seconds_per_step", "resumed_from", "replicate_of")
    done = [make_result(**dict(zip(names, values, strict=True))) for values in rows]
    assert worth_continuing(done, objective) == set(range(1, MAX_STATES + 2)) - dropped


@pytest.mark.parametrize(
    ("overrides", "bound"),
    [
        (("scaling.lr_octaves=4",), 4.0),
        ((), 10.0),
        (("sampler=tpe",), 3.0),
        (("sampler=tpe", "scaling.lr_octaves_sigma=2"), 6.0),
    ],
)
def test_how_far_from_the_rule_each_sampler_searches(tmp_path, monkeypatch, table, overrides, bound):
    monkeypatch.chdir(tmp_path)
    assert prepare(compose_checked([*REPLAY, *overrides])).space.delta_bound == bound


def test_a_study_from_end_to_end(bstune, outputs, table):
    arguments = ("sampler=random", "search.replicates=0", "search.precision=null")
    status, out, err = bstune(*REPLAY, "study=small", "seed=3", "search.trials=30", *arguments)
    assert (status, err) == (0, "")
    assert "study small: val/error <= 0.14, objective time, on recorded runs (t)" in out
    assert "batch sizes 8 to 512, learning rates within a factor of 8 of rule sqrt through B = 64, lr = 0.08" in out
    assert "answered from 32 recorded runs at 4 batch sizes and 4 learning rates" in out
    folder = outputs / "small"
    assert {"trials.jsonl", "curve.json", "curve.png", "config.yaml", "best.yaml"} <= set(entries(folder))

    trials = trials_of(folder)
    assert [trial.number for trial in trials] == list(range(30))
    assert {trial.status for trial in trials} == {"reached"}
    for trial in trials:
        assert 8 <= trial.batch_size <= 512
        assert 0.01 <= trial.lr <= 0.64
        rule = 0.08 * (trial.batch_size / 64) ** 0.5
        assert trial.delta == pytest.approx(math.log2(trial.lr / rule))  # of the rate that was used
        assert trial.train_seconds == trial.wall_seconds == pytest.approx(trial.steps * trial.seconds_per_step)
    assert any(trial.lr in (0.01, 0.64) for trial in trials), "none was clipped: the study cannot show it"

    curve = json.loads((folder / "curve.json").read_text())
    assert 16 < curve["fit"]["b_crit"] < 256
    assert curve["test"] == {}
    best = yaml.safe_load((folder / "best.yaml").read_text())["best_by_time"]
    assert best["checkpoint"] is None
    status, out, _ = bstune(*shlex.split(best["command"])[3:])
    assert status == 0
    (record,) = folder.glob("trial-B*/trial.json")
    again = TrialResult.from_json(record.read_text())
    winner = trials[best["number"]]
    assert replace(again, number=winner.number, trial_index=winner.trial_index, delta=winner.delta) == winner


@pytest.mark.slow
def test_a_replayed_study_imports_no_training_library(outputs, table):
    code = """
import json, sys
from bstune.__main__ import main
status = main()
print(json.dumps([status, [name for name in ("torch", "lightning", "mlflow") if name in sys.modules]]))
"""
    command = [sys.executable, "-c", code, *REPLAY, "search.trials=12", "search.replicates=0"]
    ended = subprocess.run(command, cwd=outputs.parent, capture_output=True, text=True, check=True)
    assert json.loads(ended.stdout.splitlines()[-1]) == [0, []]
    assert len(trials_of(outputs / "replay")) == 12


@pytest.mark.slow
@pytest.mark.parametrize(
    ("limit", "words"),
    [
        ("search.seconds=20", "search.seconds=20 of training are"),
        ("search.wall_seconds=20", "search.wall_seconds=20 are"),
    ],
)
def test_simulated_seconds_end_a_study(bstune, outputs, table, limit, words):
    status, out, _ = bstune(*REPLAY, limit, "search.replicates=0")
    assert status == 0
    assert f"stopped: {words} spent" in out
    seconds = [trial.train_seconds for trial in trials_of(outputs / "replay")]
    assert sum(seconds) >= 20 > sum(seconds[:-1])


@pytest.mark.slow
def test_a_study_continues_and_knows_its_table_by_content(bstune, outputs, table):
    assert bstune(*REPLAY, "search.trials=3")[0] == 0
    first = (outputs / "replay" / "trials.jsonl").read_text()
    moved = table.rename(table.with_name("moved.jsonl"))
    status, out, _ = bstune(*REPLAY, "workload.table=moved.jsonl", "search.trials=5")
    assert status == 0
    assert "continues after 3 trials" in out
    assert (outputs / "replay" / "trials.jsonl").read_text().startswith(first)

    write_rows(moved, table_rows(seeds=(0, 1, 2)))
    status, _, err = bstune(*REPLAY, "workload.table=moved.jsonl", "search.trials=7")
    assert status == 2
    assert "workload.table: was 'sha256 " in err


def test_a_trial_by_itself(bstune, tmp_path, table):
    status, out, err = bstune(*REPLAY, "trial.batch_size=128", "trial.lr=0.16")
    assert (status, err) == (0, "")
    assert "reached at step 3" in out
    (record,) = tmp_path.glob("outputs/replay/trial-B*/trial.json")
    result = TrialResult.from_json(record.read_text())
    assert result.steps in (steps_to_target(128, 0.16), steps_to_target(128, 0.16) + 5)
    assert result.delta is None
    assert entries(tmp_path) == ["outputs", "t.jsonl"]


@pytest.mark.slow
def test_mlflow_holds_a_replayed_study(bstune, tmp_path, table):
    from mlflow import MlflowClient

    assert bstune(*REPLAY[:-1], "search.trials=3", "search.replicates=0")[0] == 0
    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    runs = client.search_runs([client.get_experiment_by_name("bstune").experiment_id])
    assert len(runs) == 4
    parent = next(run for run in runs if "mlflow.parentRunId" not in run.data.tags)
    assert parent.data.params["workload.table"] == "t.jsonl"


def test_a_study_that_reaches_nothing_says_what_to_change(bstune, table):
    status, out, _ = bstune(*REPLAY, "sampler=tpe", "search.trials=3", "budget.steps=1", "budget.examples=1")
    assert status == 0
    text = " ".join(out.split())
    assert "val/error <= 0.14 was never reached in 3 trials" in text
    assert "try a larger budget (budget.steps, budget.examples), an easier target" in text


def test_a_metric_that_rises_is_replayed_with_mode_max(bstune, tmp_path):
    write_rows(tmp_path / "t.jsonl", [row | {"metric": [1 - v for v in row["metric"]]} for row in table_rows()])
    rises = ("workload.target.metric=accuracy", "workload.target.mode=max", "workload.target.value=0.86")
    status, out, _ = bstune(*REPLAY, *rises, "sampler=tpe", "search.trials=3", "search.replicates=0")
    assert status == 0
    assert "target accuracy >= 0.86: reached by 3 of 3 trials" in " ".join(out.split())
