"""Studies as the command runs them: cut short and continued, with trials that are stopped, continued and replicated."""

import json
import math
import re
import shlex
import subprocess
import sys
import time
from collections import defaultdict
from contextlib import nullcontext
from dataclasses import replace
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import optuna
import pytest
import yaml
from builders import options_of, prepared_study
from rich.console import Console
from toolbox import end_as_lightning, make_result, table_rows, trials_of, write_rows

from bstune.core.records import Target, TrialResult
from bstune.search.monte_carlo import sample_posterior
from bstune.study import report
from bstune.study.analysis.model import REPORT_PARTICLES
from bstune.study.run import run_single, worker_command
from bstune.study.storage.trials import spec_of
from bstune.system import watchdog
from bstune.system.files import Output
from bstune.trial.processes.workers import InProcess

REPLAY = (
    "workload=replay",
    "workload.table=t.jsonl",
    "workload.target.value=0.14",
    "mlflow.enabled=false",
    "workload.name=replay",
)
STEPS = "search.objective=steps"  # its costs are counted in examples: no clock decides anything
DIGITS = (
    "workload=digits",
    "mlflow.enabled=false",
    "search.batch_size.low=32",
    "search.batch_size.high=512",
)
DIGITS += ("search.workers=0",)  # the tests look into the process that trains
EASY = ("workload.target.value=1.0", "budget.steps=60", "budget.examples=6000")
LIGHT = ("early_checks", "storage.opening", "study", "tune", "verbs.record", "verbs.retarget")
# The length of the warm-up is the budget's: a schedule with a horizon.
HORIZON = ("workload.module.schedule.warmup_examples=${trial.total_steps}",)


@pytest.fixture
def outputs(tmp_path):
    """Return the folder of the studies; the table is beside it."""
    write_rows(tmp_path / "t.jsonl", table_rows())
    return tmp_path / "outputs"


@pytest.mark.parametrize(
    ("arguments", "command"),
    [
        (["workload=mine"], "bstune worker storage=sqlite:///a.db study=s"),
        (["storage=${oc.env:STUDIES}"], "bstune worker 'storage=${oc.env:STUDIES}' study=s"),
        # No command line composes Python objects.
        ([], None),
    ],
)
def test_the_command_that_joins_a_study_is_whole_or_not_there(arguments, command):
    options = SimpleNamespace(storage="sqlite:///a.db", study="s")
    assert worker_command(options, arguments) == command


def asked_by_index(study: Path) -> dict[int, tuple]:
    """Return what came of each trial index: numbers count trials that were cut short, too."""
    trials = trials_of(study)
    indices = {trial.number: trial.trial_index for trial in trials}
    asked = {}
    for trial in trials:
        if trial.status != "failed":
            asked[trial.trial_index] = (
                *(trial.batch_size, trial.lr, trial.seed),
                *(indices.get(trial.resumed_from), indices.get(trial.replicate_of)),
                *(trial.status, trial.steps, trial.history),
            )
    return asked


def first_with(asked: dict[int, tuple], place: int) -> int | None:
    """Return the position of the first trial that has an entry there; None if there is none."""
    for position, values in enumerate(asked.values()):
        if values[place] is not None:
            return position
    return None


def end_at(monkeypatch, at, killed):
    """End the process at its ``at``-th trial, from 0: killed, which leaves the trial running, or interrupted."""
    wait, calls = InProcess.wait, []

    def counted(runner):
        calls.append(runner)
        # Before the trial is waited for.
        if len(calls) > at:
            end_as_lightning()
        return wait(runner)

    monkeypatch.setattr(InProcess, "wait", counted)
    # A killed process cannot say that its trial was cut short.
    if killed:
        monkeypatch.setattr("bstune.study.search.cut_short", lambda *_: nullcontext())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "killed"),
    [
        ((*REPLAY, STEPS), True),
        pytest.param((*REPLAY, "search.objective=both"), False, marks=pytest.mark.soak),
        pytest.param((*REPLAY, STEPS, "sampler=tpe"), True, marks=pytest.mark.soak),
        pytest.param((*REPLAY, STEPS, "sampler=tpe"), False, marks=pytest.mark.soak),
        pytest.param(
            # A study with real training, whose continuations load what was trained.
            (
                *DIGITS,
                *EASY,
                STEPS,
                "workload.target.value=0.5",
                "search.trials=12",
                "search.replicates=2",
                "protocol.noise_scale_every=2",
            ),
            False,
            marks=pytest.mark.soak,
        ),
    ],
    ids=["frontier-killed", "both", "tpe-killed", "tpe", "real training"],
)
def test_a_study_cut_short_and_continued_asks_the_same_trials(
    bstune, outputs, monkeypatch, arguments, killed
):
    arguments = ("search.trials=8", *arguments) if arguments[0] == REPLAY[0] else arguments
    assert bstune(*arguments, "study=whole")[0] == 0
    whole = asked_by_index(outputs / "whole")
    order = list(whole)
    continued = first_with(whole, 3)
    assert "sampler=tpe" in arguments or continued is not None, (
        "no trial was continued: the test proves little"
    )
    # There is one, as some trial reached the target.
    replicate = first_with(whole, 4)
    # In the first trial, in one that continues another one, and in the second replicate.
    cuts = sorted({0, continued or 7, replicate + 1})
    done = 0
    for at in cuts:
        with monkeypatch.context() as patch:
            end_at(patch, at - done, killed)
            status, _, err = bstune(*arguments, "study=pieces")
        assert (status, "the same command continues the study" in err) == (130, True)
        # What was run before does not count again.
        done = at
    assert bstune(*arguments, "study=pieces")[0] == 0
    assert asked_by_index(outputs / "pieces") == whole
    failed = [trial for trial in trials_of(outputs / "pieces") if trial.status == "failed"]
    assert [trial.trial_index for trial in failed] == [order[at] for at in cuts]
    for trial in failed:
        assert (trial.batch_size, trial.lr, trial.seed) == whole[trial.trial_index][:3]


@pytest.mark.slow
@pytest.mark.parametrize("sampler", ["frontier", "tpe"])
def test_a_schedule_with_a_horizon_is_never_continued(bstune, tmp_path, sampler, outputs):
    arguments = (
        *DIGITS,
        *EASY,
        *HORIZON,
        STEPS,
        f"sampler={sampler}",
        "search.trials=6",
        "search.replicates=2",
    )
    status, out, _ = bstune(*arguments)
    assert status == 0
    chosen, out = sampler == "frontier", " ".join(out.split())
    # Only bstune's own sampler chooses horizons.
    ends = (
        "or with its schedule, at a horizon that the search chooses, at most"
        if chosen
        else "or after"
    )
    assert f"each ends at the target {ends} 60 steps and 6000 examples" in out
    notes = " ".join(json.loads((outputs / "digits" / "curve.json").read_text())["notes"])
    assert ("the shortest horizon that reaches the target" in notes) == chosen
    assert ("where this schedule stops working" in notes) != chosen
    study = optuna.load_study(study_name="digits", storage=f"sqlite:///{tmp_path}/bstune.db")
    specs = [spec_of(trial) for trial in study.get_trials()]
    assert {spec.resumed_from for spec in specs} == {None}
    assert not (outputs / "digits" / "states").exists()
    trials = trials_of(outputs / "digits")
    # Of each winner the horizons of its replicates.
    replicates = 0
    horizons_again = defaultdict(set)
    for spec, trial in zip(specs, trials, strict=True):
        if spec.replicate_of is not None:
            replicates += 1
            horizons_again[spec.replicate_of].add(trial.horizon)
        # The budget: 60 steps or 6,000 examples, whichever is more.
        longest = max(60, math.ceil(6000 / trial.batch_size))
        assert trial.horizon == (spec.max_steps or longest) <= longest
        assert trial.steps == trial.horizon or trial.status != "stopped"
        assert chosen or spec.max_steps is None
        assert (
            chosen
            or spec.replicate_of is None
            or trial.horizon == trials[spec.replicate_of].horizon
        )
    assert replicates >= 2
    # All replicates of a winner have one horizon.
    assert set(map(len, horizons_again.values())) == {1}
    # Horizons of several lengths in examples, so that it was chosen.
    assert len({trial.horizon * trial.batch_size for trial in trials}) > 3 or not chosen
    # A horizon ends with the budget, so a sampler that does not choose cannot go on with another.
    status, _, err = bstune(*arguments, "search.trials=7", "budget.examples=7000")
    assert status == (0 if chosen else 2)
    assert ("budget.examples: was 6000, now 7000" in err) != chosen


@pytest.mark.slow
def test_nothing_more_is_done_once_all_is_done_and_replicates_can_be_added(bstune, outputs):
    arguments = (
        *REPLAY,
        STEPS,
        "sampler=tpe",
        "search.precision=null",
        "search.trials=5",
        "search.candidates=1",
        "search.baseline=false",
    )
    before = []
    # No replicate, then three more, and then none that is missing.
    for replicates in (0, 3, 3):
        assert bstune(*arguments, f"search.replicates={replicates}")[0] == 0
        trials = trials_of(outputs / "replay")
        assert trials[: len(before)] == before
        assert [trial.replicate_of is None for trial in trials] == [True] * 5 + [False] * replicates
        before = trials
    # Five trials of the search and three replicates, each with a seed and an index of its own.
    assert len({(trial.trial_index, trial.seed) for trial in before}) == 8


@pytest.mark.slow
def test_the_search_ends_once_the_critical_batch_size_is_known_well_enough(bstune, outputs):
    # Upper over lower end of the interval: 1,000 is soon reached.
    arguments = (*REPLAY, "sampler=tpe", "search.precision=1000", "search.trials=40")
    assert bstune(*arguments)[0] == 0
    study = outputs / "replay"
    sentence = json.loads((study / "curve.json").read_text())["stop_reason"]
    assert sentence.startswith("stopped: B_crit lies between ")
    assert sentence.endswith(", within search.precision=1000")
    first = trials_of(study)
    winners = [trial.replicate_of for trial in first]
    assert winners.count(None) == 8, "the first look after six trials that reached it"
    assert len(winners) - 8 >= 3
    assert bstune(*arguments)[0] == 0
    assert trials_of(study) == first, (
        "the same command goes on searching: the replicates were taken for its trials"
    )


@pytest.mark.slow
def test_a_record_that_ended_is_not_continued(bstune, tmp_path, outputs):
    """Half of the table never reaches the target: its trials end with their records, which go no further."""
    # Rates of 0.1 and more never reach.
    write_rows(tmp_path / "t.jsonl", table_rows(missed=lambda lr: lr >= 0.1))
    assert (
        bstune(*REPLAY, "search.trials=14", "search.replicates=0", "search.precision=null")[0] == 0
    )
    trials = trials_of(outputs / "replay")
    study = optuna.load_study(study_name="replay", storage=f"sqlite:///{tmp_path}/bstune.db")
    short = set()
    resumed = set()
    for trial, stored in zip(trials, study.get_trials(), strict=True):
        # It was to run further than its record does.
        if trial.status == "stopped" and trial.steps < spec_of(stored).max_steps:
            short.add(trial.number)
        resumed.add(trial.resumed_from)
        assert trial.train_seconds > 0
    assert short, "no record ended ahead of its trial's limit: the test proves nothing"
    assert not short & resumed


@pytest.mark.parametrize(
    ("overrides", "bound"),
    [
        ((), 10.0),
        (("scaling.lr_octaves=4",), 4.0),
        # Three times sigma.
        (("sampler=tpe", "scaling.lr_octaves_sigma=2"), 6.0),
    ],
)
def test_how_far_from_the_rule_each_sampler_searches(outputs, monkeypatch, overrides, bound):
    monkeypatch.chdir(outputs.parent)
    assert prepared_study(*REPLAY, *overrides).space.delta_bound == bound


def test_a_study_from_end_to_end(bstune, outputs):
    arguments = ("sampler=random", "search.replicates=0", "search.precision=null")
    status, out, err = bstune(*REPLAY, "study=small", "seed=3", "search.trials=12", *arguments)
    assert (status, err) == (0, "")
    assert "study small: val/error <= 0.14, objective time, on recorded runs (t)" in out
    assert (
        "batch sizes 8 to 512, learning rates within a factor of 8 of rule sqrt through B = 64, lr = 0.08"
        in out
    )
    assert "answered from 32 recorded runs at 4 batch sizes and 4 learning rates" in out
    folder = outputs / "small"
    trials = trials_of(folder)
    assert [trial.status for trial in trials] == ["reached"] * 12
    curve = json.loads((folder / "curve.json").read_text())
    assert 16 < curve["critical_batch_size"]["value"] < 256
    assert curve["test"] == {}
    best = yaml.safe_load((folder / "best.yaml").read_text())["best_by_time"]
    assert best["checkpoint"] is None
    assert bstune(*shlex.split(best["command"])[3:])[0] == 0
    (record,) = folder.glob("trial-B*/trial.json")
    # The command of best.yaml trains the winner again: all but its place in the study.
    again, winner = TrialResult.from_json(record.read_text()), trials[best["number"]]
    assert again.delta is None
    assert (
        replace(again, number=winner.number, trial_index=winner.trial_index, delta=winner.delta)
        == winner
    )


@pytest.mark.parametrize(
    ("part", "name"), [("draw_curve", "the figures"), ("write_page", "the page")]
)
def test_what_keeps_a_study_busy_after_its_answer_is_said(part, name, bstune, outputs, monkeypatch):
    monkeypatch.setattr(report, "SILENCE_AFTER_ANSWER", 0.1)
    monkeypatch.setattr(watchdog, "THREAD_LOOK_SECONDS", 0.02)
    monkeypatch.setattr(report, part, lambda *arguments: time.sleep(0.5))
    arguments = ("sampler=random", "search.replicates=0", "search.trials=3")
    status, out, _ = bstune(*REPLAY, *arguments)
    assert status == 0
    after = out[out.index("\nUSE ") :]
    said = [f"waiting for {name}, ", f"{name}: took ", "page "]
    assert re.search(".*".join(f"\n{line}" for line in said), after, flags=re.DOTALL)


@pytest.mark.slow
def test_what_did_not_run_again_is_said_and_the_posterior_of_a_finished_study_is_sampled_once(
    bstune, outputs, monkeypatch
):
    def nothing_confirmed(posterior):
        # Predicted at one step each, every candidate remains worth a run.
        return {one.number: 1.0 for one in posterior.observations}

    for module in ("search", "analysis.analyse"):
        monkeypatch.setattr(f"bstune.study.{module}.fresh_steps", nothing_confirmed)
    arguments = (*REPLAY, STEPS, "sampler=random", "search.trials=6", "search.replicates=1")
    for candidates in (1, 8):
        assert bstune(*arguments, f"search.candidates={candidates}")[0] == 0
        curve, sampled = (outputs / "replay" / "curve.json").read_text(), []

        def count(data, prior, rng, particles, *further, sampled=sampled):
            sampled.append(particles)
            return sample_posterior(data, prior, rng, particles, *further)

        with monkeypatch.context() as patch:
            patch.setattr("bstune.search.posterior.sample_posterior", count)
            status, out, _ = bstune(*arguments, f"search.candidates={candidates}")
        # What is reported of a finished study is sampled anew, once.
        assert (status, sampled.count(REPORT_PARTICLES)) == (0, 1)
        assert (outputs / "replay" / "curve.json").read_text() == curve
        line = json.loads(curve)["not_run_again"]
        assert (
            (line is not None)
            == ("search.candidates=2 does it" in " ".join(out.split()))
            == (candidates == 1)
        )


@pytest.mark.slow
def test_a_replayed_study_imports_no_training_library(outputs):
    # Then the modules of what looks at recorded runs, of what is checked before a study, and the list of the sweeps.
    modules = [f"bstune.study.{name}" for name in LIGHT]
    code = (
        "import sys; from bstune.__main__ import main; main(); "
        f"import bstune.workloads.datasets, {', '.join(modules)}; "
        "from bstune.sweeps import harness; harness.main([]); "
        "print({'torch', 'lightning', 'mlflow'} & {*sys.modules})"
    )
    command = [sys.executable, "-c", code, *REPLAY, "search.trials=1", "search.replicates=0"]
    ended = subprocess.run(command, cwd=outputs.parent, capture_output=True, text=True, check=True)
    # A replay trains nothing, so neither has to be loaded.
    assert ended.stdout.splitlines()[-1] == "set()"
    assert sum(trial.resumed_from is None for trial in trials_of(outputs / "replay")) == 1


@pytest.mark.slow
def test_a_study_continues_and_knows_its_table_by_content(bstune, outputs):
    table = outputs.with_name("t.jsonl")
    assert bstune(*REPLAY, "search.trials=3")[0] == 0
    first = (outputs / "replay" / "trials.jsonl").read_text()
    # A table is known by its content, wherever it lies.
    moved = table.rename(table.with_name("moved.jsonl"))
    # A budget may grow.
    more = ("search.trials=5", "budget.examples=100_000")
    status, out, _ = bstune(*REPLAY, "workload.table=moved.jsonl", *more)
    assert status == 0
    assert "continues after 3 configurations" in out
    assert (outputs / "replay" / "trials.jsonl").read_text().startswith(first)

    # A third seed in it.
    write_rows(moved, table_rows(seeds=(0, 1, 2)))
    status, _, err = bstune(*REPLAY, "workload.table=moved.jsonl", "search.trials=7")
    assert status == 2
    assert "workload.table: was 'sha256 " in err


def test_a_single_trial_whose_test_fails_has_ended_well_and_names_its_weights(
    tmp_path, monkeypatch
):
    def fails(spec, folder):
        raise ValueError("no test data")

    trial = make_result(number=0)
    runner = SimpleNamespace(
        start=lambda *given, resumed_from: None,
        wait=lambda: SimpleNamespace(result=lambda: trial, frames=""),
    )
    prepared = SimpleNamespace(
        options=options_of("workload=digits"),
        files=Output(tmp_path),
        open_runner=lambda count: nullcontext(runner),
        backend=SimpleNamespace(test=fails),
        protocol=SimpleNamespace(target=Target("val/error", 0.1, "min")),
        last_step=lambda batch_size: 1000,
    )
    monkeypatch.setattr("bstune.study.run.is_own", lambda path: True)
    console = Console(file=StringIO(), width=100)
    assert run_single(prepared, trial.again(), console) == trial
    lines = console.file.getvalue().splitlines()
    weights = prepared.files.single_trial(trial.batch_size, trial.lr, trial.seed).checkpoint(0)
    assert f"weights {weights}" in lines
    assert sum(line.startswith("NOTE no test metrics") for line in lines) == 1
