"""Studies as the command runs them: cut short and continued, with trials that are stopped, continued and confirmed."""

import json
import math
from itertools import product
from pathlib import Path

import optuna
import pytest
import yaml
from rich.console import Console

from bstune.core.records import Target, TrialResult, TrialSpec
from bstune.study import run as jobs
from bstune.study.prepare import compose_checked, prepare
from bstune.study.run import MOST_STATES, Progress, worth_continuing
from bstune.study.storage import SPEC

SIZES, LRS = (8, 32, 128, 512), (0.01, 0.04, 0.16, 0.64)
REPLAY = ("+workload=replay", "workload.table=t.jsonl", "workload.target.value=0.14", "mlflow.enabled=false")
STEPS = "search.objective=steps"  # its costs are counted in examples: no clock decides anything
DIGITS = ("+workload=digits", "mlflow.enabled=false", "search.batch_size.low=32", "search.batch_size.high=512")
EASY = ("workload.target.value=1.0", "budget.steps=60", "budget.examples=6000")
# The length of the warm-up is the budget's: a schedule with a horizon.
HORIZON = ("workload.module.schedule.warmup_examples=${trial.total_steps}",)
SLOTS = 24


def steps_to_target(size, lr):
    """A frontier with its critical batch size at 64, and an optimum of the learning rate that grows as its root."""
    return round(200 * (1 + 64 / size) * (1 + math.log2(lr / (0.16 * (size / 128) ** 0.5)) ** 2))


def row(size, lr, seed, reaches=True):
    hit = steps_to_target(size, lr) + 5 * seed
    steps = sorted({max(1, round(hit * 1.1**-i)) for i in range(31)})
    metric = [0.13 + 0.5 * (1 - step / hit) ** 2 + (0.02 if step < hit or not reaches else 0.0) for step in steps]
    cell = {"batch_size": size, "lr": lr, "seed": seed, "seconds_per_step": 0.01 + 0.0001 * size}
    return cell | {"steps": steps, "metric": metric}


@pytest.fixture
def table(tmp_path):
    rows = [row(size, lr, seed) for size, lr, seed in product(SIZES, LRS, (0, 1))]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(line) + "\n" for line in rows))


def trials_of(study: Path) -> list[TrialResult]:
    return [TrialResult.from_json(line) for line in (study / "trials.jsonl").read_text().splitlines()]


def asked_by_slot(study: Path) -> dict[int, tuple]:
    """Return what came of each slot, whatever the numbers of its trials were: those that were cut short count too."""
    trials = trials_of(study)
    trial_indices = {trial.number: trial.trial_index for trial in trials}
    return {
        t.trial_index: (
            t.batch_size,
            t.lr,
            t.seed,
            trial_indices.get(t.resumed_from),
            trial_indices.get(t.replicate_of),
            t.status,
            t.steps,
            t.history,
        )
        for t in trials
        if t.status != "failed"
    }


def cut_short(monkeypatch, at, killed):
    """End the process at its ``at``-th trial, from 0: killed, which leaves the trial running, or interrupted."""
    run, calls = jobs.run_trial_of, []

    def ended(*arguments):
        calls.append(arguments)
        if len(calls) <= at:
            return run(*arguments)
        if killed:
            raise SystemExit(1)
        return run(*arguments[:-1], interrupt)

    def interrupt(spec: TrialSpec) -> TrialResult:
        raise SystemExit(1)  # what Lightning makes of Ctrl-C

    monkeypatch.setattr(jobs, "run_trial_of", ended)


@pytest.mark.slow
@pytest.mark.parametrize("killed", [True, False], ids=["killed", "interrupted"])
@pytest.mark.parametrize(("sampler", "objective"), [("frontier", "steps"), ("frontier", "both"), ("tpe", "steps")])
def test_a_study_cut_short_and_continued_asks_the_same_trials(
    bstune, tmp_path, monkeypatch, table, sampler, objective, killed
):
    arguments = (*REPLAY, f"search.objective={objective}", f"sampler={sampler}", f"search.trials={SLOTS}")
    assert bstune(*arguments, "study=whole")[0] == 0
    whole = asked_by_slot(tmp_path / "outputs" / "whole")
    order = list(whole)
    assert len([trial_index for trial_index in order if trial_index < SLOTS]) == SLOTS
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
    assert asked_by_slot(tmp_path / "outputs" / "pieces") == whole
    failed = [trial for trial in trials_of(tmp_path / "outputs" / "pieces") if trial.status == "failed"]
    assert [trial.trial_index for trial in failed] == [order[at] for at in sorted({0, continued, fresh + 1})]
    assert [(t.batch_size, t.lr, t.seed) for t in failed] == [whole[t.trial_index][:3] for t in failed]


@pytest.mark.slow
@pytest.mark.parametrize("sampler", ["frontier", "tpe"])
def test_training_that_was_cut_short_goes_on_as_if_it_had_not_been(bstune, tmp_path, monkeypatch, sampler):
    arguments = (*DIGITS, *EASY, STEPS, f"sampler={sampler}", "search.trials=12", "search.confirmations=1")
    arguments += ("protocol.noise_scale_every=2",)
    assert bstune(*arguments, "study=whole")[0] == 0
    whole = asked_by_slot(tmp_path / "outputs" / "whole")
    continued = next((i for i, trial_index in enumerate(whole) if whole[trial_index][3] is not None), 5)
    assert sampler == "tpe" or whole[list(whole)[continued]][3] is not None
    with monkeypatch.context() as patch:
        cut_short(patch, continued, killed=False)
        assert bstune(*arguments, "study=pieces")[0] == 130
    assert bstune(*arguments, "study=pieces")[0] == 0
    assert asked_by_slot(tmp_path / "outputs" / "pieces") == whole


@pytest.mark.slow
def test_measuring_the_noise_scale_changes_no_trial_and_is_reported(bstune, tmp_path):
    """A general sampler asks the same whatever was measured."""
    arguments = (*DIGITS, *EASY, STEPS, "sampler=tpe", "search.trials=10", "search.confirmations=1")
    assert bstune(*arguments, "study=without", "protocol.noise_scale_every=null")[0] == 0
    status, out, _ = bstune(*arguments, "study=with", "protocol.noise_scale_every=2")
    assert status == 0
    outputs = tmp_path / "outputs"
    assert asked_by_slot(outputs / "with") == asked_by_slot(outputs / "without")
    assert all(trial.noise_scale for trial in trials_of(outputs / "with") if trial.steps > 1)
    assert not any(trial.noise_scale for trial in trials_of(outputs / "without"))
    row = json.loads((outputs / "with" / "curve.json").read_text())["noise_scale"]
    assert row["trials"] >= 4
    assert f"{row['steps']} steps of {row['trials']} trials" in " ".join(out.split())
    assert json.loads((outputs / "without" / "curve.json").read_text())["noise_scale"] is None


@pytest.mark.slow
def test_a_continued_trial_is_its_parent_gone_further(bstune, tmp_path):
    assert bstune(*DIGITS, *EASY, STEPS, "search.trials=16", "search.confirmations=0")[0] == 0
    study = tmp_path / "outputs" / "digits"
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
def test_the_command_of_the_winner_takes_it_to_the_target_in_as_many_steps(bstune, tmp_path):
    """Also where its last evaluation was at its limit, or its parent's was."""
    assert bstune(*DIGITS, *EASY, STEPS, "search.trials=16", "search.confirmations=0")[0] == 0
    study = tmp_path / "outputs" / "digits"
    best = yaml.safe_load((study / "best.yaml").read_text())["best_by_steps"]
    winner = trials_of(study)[best["number"]]
    assert bstune(*best["command"].split()[3:])[0] == 0
    (record,) = study.glob("trial-B*/trial.json")
    again = TrialResult.from_json(record.read_text())
    assert (again.status, again.steps, again.history[-1]) == ("reached", winner.steps, winner.history[-1])
    assert set(again.history) <= set(winner.history)


@pytest.mark.slow
@pytest.mark.parametrize("sampler", ["frontier", "tpe"])
def test_a_schedule_with_a_horizon_is_never_stopped_early(bstune, tmp_path, sampler):
    arguments = (*DIGITS, *EASY, *HORIZON, STEPS, f"sampler={sampler}", "search.trials=6", "search.confirmations=2")
    status, out, _ = bstune(*arguments)
    assert status == 0
    assert "each ends at the target or after 60 steps and 6000 examples" in " ".join(out.split())
    study = optuna.load_study(study_name="digits", storage=f"sqlite:///{tmp_path}/bstune.db")
    specs = [TrialSpec(**json.loads(trial.user_attrs[SPEC])) for trial in study.get_trials()]
    assert sum(spec.replicate_of is not None for spec in specs) >= 2
    assert {(spec.max_steps, spec.resumed_from) for spec in specs} == {(None, None)}
    assert not (tmp_path / "outputs" / "digits" / "states").exists()
    for trial in trials_of(tmp_path / "outputs" / "digits"):
        assert trial.status != "censored" or trial.steps == max(60, math.ceil(6000 / trial.batch_size))


@pytest.mark.slow
def test_winners_are_confirmed_on_fresh_seeds_beside_the_search(bstune, tmp_path, table):
    assert bstune(*REPLAY, "search.seconds=100", "search.finalists=1")[0] == 0
    trials = trials_of(tmp_path / "outputs" / "replay")
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
def test_nothing_more_is_done_once_all_is_done_and_confirmations_can_be_added(bstune, tmp_path, table):
    arguments = (*REPLAY, STEPS, "sampler=tpe", "search.precision=null", "search.trials=12", "search.finalists=1")
    study = tmp_path / "outputs" / "replay"
    assert bstune(*arguments, "search.confirmations=0")[0] == 0
    none = trials_of(study)
    assert len(none) == 12
    assert not any(trial.replicate_of is not None for trial in none)
    assert bstune(*arguments, "search.confirmations=2")[0] == 0
    two = trials_of(study)
    assert two[:12] == none
    assert len(two) == 14
    assert bstune(*arguments, "search.confirmations=4")[0] == 0
    four = trials_of(study)
    assert four[:14] == two
    assert len({(trial.trial_index, trial.seed) for trial in four[12:]}) == 4
    assert bstune(*arguments, "search.confirmations=4")[0] == 0
    assert trials_of(study) == four


@pytest.mark.slow
def test_the_search_ends_once_the_critical_batch_size_is_known_well_enough(bstune, tmp_path, table):
    arguments = (*REPLAY, "sampler=tpe", "search.precision=1000", "search.trials=40")
    status, out, _ = bstune(*arguments)
    assert status == 0
    sentence = out[out.index("stopped: B_crit lies between ") :].splitlines()[0]
    assert sentence.endswith(", within search.precision=1000")
    study = tmp_path / "outputs" / "replay"
    assert json.loads((study / "curve.json").read_text())["ended"] == sentence
    first = trials_of(study)
    assert sum(trial.replicate_of is None for trial in first) == 8, "the first look after six trials that reached it"
    assert sum(trial.replicate_of is not None for trial in first) >= 3
    assert bstune(*arguments)[0] == 0
    assert trials_of(study) == first, "the same command goes on searching: the fresh runs were taken for its trials"


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["null", "1.0000001"])
def test_the_search_goes_on_while_it_is_not(bstune, tmp_path, table, precision):
    status, out, _ = bstune(*REPLAY, "sampler=tpe", f"search.precision={precision}", "search.trials=12")
    assert status == 0
    assert "the plan is done: search.trials=12" in out


@pytest.mark.slow
def test_the_objective_curve_from_end_to_end(bstune, tmp_path, table):
    status, out, _ = bstune(*REPLAY, "search.objective=curve", "search.seconds=150", "search.precision=null")
    assert status == 0
    assert "objective curve" in out
    curve = json.loads((tmp_path / "outputs" / "replay" / "curve.json").read_text())
    assert 16 < curve["fit"]["b_crit"] < 256
    study = optuna.load_study(study_name="replay", storage=f"sqlite:///{tmp_path}/bstune.db")
    records = {trial.number: trial for trial in trials_of(tmp_path / "outputs" / "replay")}
    reached = [trial for trial in study.get_trials() if trial.state.name == "COMPLETE"]
    assert reached
    assert all(trial.values == [float(records[trial.number].examples)] for trial in reached)


@pytest.mark.slow
def test_a_record_that_ended_is_not_continued(bstune, tmp_path):
    """Half of the table never reaches the target: its trials end with their records, which go no further."""
    rows = [row(size, lr, seed, lr < 0.1) for size, lr, seed in product(SIZES, LRS, (0, 1))]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(line) + "\n" for line in rows))
    assert bstune(*REPLAY, "search.trials=24", "search.confirmations=0", "search.precision=null")[0] == 0
    trials = trials_of(tmp_path / "outputs" / "replay")
    study = optuna.load_study(study_name="replay", storage=f"sqlite:///{tmp_path}/bstune.db")
    limits = [json.loads(trial.user_attrs[SPEC])["max_steps"] for trial in study.get_trials()]
    ended = {t.number for t, limit in zip(trials, limits, strict=True) if t.status == "censored" and t.steps < limit}
    assert ended, "no record ended ahead of its trial's limit: the test says nothing"
    assert not ended & {trial.resumed_from for trial in trials}
    assert all(trial.train_seconds > 0 for trial in trials)


NAN_OPTIONS = [f"{name}=nan" for name in ("search.precision", "scaling.octaves", "scaling.exponent_sigma")]


@pytest.mark.parametrize(
    "option",
    [
        *NAN_OPTIONS,
        "search.precision=1",
        "search.confirmations=-1",
        "search.finalists=0",
        "scaling.octaves=0",
        "scaling.octaves=2000",
        "scaling.exponent_sigma=0",
        "scaling.level_sigma=-1",
        "scaling.noise_scale=-3",
        "sampler.sigma=0",
        "sampler.policy.particles=0",
        "sampler.policy.stop_factor=0.9",
        "sampler.policy.random_fraction=2",
        "sampler.policy.initial_fraction=-1",
        "+sampler.policy.nope=3",
        "search.confirmations=many",
        "search.precision=sharp",
    ],
)
def test_values_that_cannot_be_are_refused(bstune, tmp_path, table, option):
    status, out, err = bstune(*REPLAY, option)
    assert status == 2
    assert err.startswith("error: ")
    assert option.partition("=")[0].lstrip("+").rpartition(".")[2] in err
    assert "Traceback" not in out + err
    assert [path.name for path in tmp_path.iterdir()] == ["t.jsonl"]


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
    rows = [(number, "censored", 10, 0.01, None, None) for number in range(MOST_STATES + 2)]
    rows[0], rows[2:4] = BEST, [(2, "censored", 10, 1.0, None, None), (3, "censored", 200, 0.001, None, None)]
    names = ("number", "status", "steps", "seconds_per_step", "resumed_from", "replicate_of")
    done = [make_result(**dict(zip(names, values, strict=True))) for values in rows]
    assert worth_continuing(done, objective) == set(range(1, MOST_STATES + 2)) - dropped


def test_the_newest_states_are_kept_where_there_are_many(make_result):
    done = [make_result(number=number, status="censored", steps=10) for number in range(MOST_STATES + 5)]
    assert worth_continuing(done, "time") == set(range(5, MOST_STATES + 5))


@pytest.mark.parametrize(
    ("overrides", "bound"),
    [(("scaling.octaves=4",), 4.0), ((), 10.0), (("sampler=tpe",), 3.0), (("sampler=tpe", "scaling.sigma=2"), 6.0)],
)
def test_how_far_from_the_rule_each_sampler_searches(tmp_path, monkeypatch, table, overrides, bound):
    monkeypatch.chdir(tmp_path)
    assert prepare(compose_checked([*REPLAY, *overrides])).space.delta_bound == bound
