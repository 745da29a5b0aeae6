"""The command line from end to end, in this process: bad input, and whole small studies on the embedded data."""

import json
import re
import shlex
import sys
from functools import partial
from importlib.metadata import version
from itertools import chain
from pathlib import Path

import pytest
import torch
import yaml
from builders import run_command
from omegaconf import OmegaConf
from toolbox import contents, entries, numbers, trials_of

from bstune import conf
from bstune.__main__ import VERBS, main
from bstune.result import StudyResult
from bstune.study.searching.trial_files import worth_continuing

WORKLOADS = sorted(path.stem for path in (Path(conf.__file__).parent / "workload").glob("*.yaml"))
LISTED = f"workloads: {', '.join(WORKLOADS)}"


def numbered(folder):
    """The numbers of the trials that have a file in the folder."""
    return {int(path.stem.removeprefix("trial-")) for path in folder.iterdir()}


QUICK = (
    "workload=digits",
    "search.trials=4",
    "search.batch_size.low=32",
    "search.batch_size.high=512",
)
# An easy target and a small budget: milliseconds a trial. Of sixteen of bstune's own short ones
# some reach it.
EASY = (*QUICK, "workload.target.value=1.0", "budget.steps=60", "budget.examples=6000")
OFFLINE = "mlflow.enabled=false"
MEASURED = "protocol.noise_scale_every=2"
# Its objective counts examples: what it does depends on no clock.
STUDY = (*EASY, "search.trials=9", "search.objective=steps", "study=small", "seed=8", MEASURED)

# A convolution with normalisation in groups in place of the digits' perceptron.
GHOSTS = (
    "workload=digits",
    "~workload.module.model",
    (
        "+workload.module.model={_target_: torch.nn.Sequential, _args_: ["
        "{_target_: torch.nn.Conv2d, in_channels: 1, out_channels: 4, kernel_size: 3}, "
        "{_target_: bstune.workloads.layers.BatchNorm, channels: 4, ghost_size: 32}, "
        "{_target_: torch.nn.Flatten}, {_target_: torch.nn.Linear, in_features: 144, out_features: "
        "10}]}"
    ),
)
GHOST_ADVICE = (
    "lower workload.module.model.norm.ghost_size, or raise the batch size "
    "(search.batch_size.low of a study"
)


def refused(bstune, folder, message, *arguments):
    """Run a command that must end in a plain line, with nothing new in the folder; give it."""
    # Whatever ends before a study begins has to leave the folder as it was.
    before = entries(folder)
    status, out, err = bstune(*arguments)
    assert status == 2
    assert err.startswith("error: ")
    assert message in err
    assert "Traceback" not in out + err
    assert entries(folder) == before
    return err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", f"no workload was given\n{LISTED}"),
        ("survey", "no workload was given"),
        ("--cfg job +workload=nope", f"there is no workload 'nope'\n{LISTED}"),
        ("+workload=nope", f"there is no workload 'nope'\n{LISTED}"),
        (
            "workload=digits sampler=nope",
            "Could not find 'sampler/nope'\nAvailable options in 'sampler':\neach_batch_size",
        ),
        ("workload=digits search.trials=[1", "no viable alternative at input '[1'"),
        ("workload=digits nonsense", "unknown word nonsense\noptions are written NAME=VALUE"),
        (
            "workload=digits --trials 9",
            "unknown option --trials: did you mean search.trials=VALUE?",
        ),
        ("workload=digits lr", "unknown word lr: did you mean scaling.lr=VALUE or trial.lr=VALUE?"),
        (
            "--config-dir . survey workload=digits",
            "survey: a verb stands before all else, as in bstune survey ...",
        ),
        ("digit", "unknown word digit: did you mean +workload=digits?"),
        ("sruvey workload=digits", "unknown word sruvey: did you mean bstune survey?"),
        (
            "workload=digits batch_size=9",
            "unknown option batch_size: did you mean scaling.batch_size or trial.batch_",
        ),
        (
            "workload=digits seed=-1 nope=1",
            "unknown option nope; bstune --cfg job +workload=NAME lists the options\nseed ",
        ),
        ("workload=digits --config-dir nowhere", "--config-dir nowhere is not a folder"),
        (
            "workload=digits search.batch_size.high=5000",
            "(1200 examples): set search.batch_size.high to at most 1200",
        ),
        (
            "workload=digits trial.batch_size=5000 trial.lr=0.1",
            "(1200 examples): set trial.batch_size to at most 1200",
        ),
        (
            "workload=digits workload.target.mode=max",
            "the target val/loss >= 0.1 is met before training",
        ),
        (
            "workload=digits workload.target.metric=val/nope",
            "in validation the module logs val/error, val/loss: make",
        ),
        (
            "workload=digits precision=16-true device=cpu",
            "precision=16-true needs a CUDA device, but this is",
        ),
        ("workload=digits device=tpu", "device must be auto, cpu, cuda or cuda:N, but got 'tpu'"),
        ("workload=digits device=cuda:99", "CUDA devices: use auto or cpu"),
        (
            "workload=digits threads=1024 device=cpu",
            "threads=1024, but this machine has",
        ),
        ("workload=digits threads=1025", "threads: must be auto or 1 to 1024, but got 1025"),
        ("workload=digits output=/dev/null/x", "/dev/null is not a folder"),
        ("workload=digits storage=nonsense", "storage=nonsense is no database URL"),
        (
            "workload=digits storage=oracle9://me@h/n",
            "storage=oracle9://me@h/n: studies are kept in SQLite, PostgreSQL or",
        ),
        ("workload=digits mlflow.uri=foo://x", "such as sqlite:///mlflow.db, but got 'foo://x'"),
        (
            # What is imported by name is looked for before anything is trained.
            "workload=digits workload.module._target_=no.Such",
            "cannot be built: there is no module no, for no.Such: run",
        ),
        ("workload=digits +workload.module.nope=3", "unexpected keyword argument 'nope'"),
        (
            "workload=digits +workload.module.channels_last=true",
            "channels_last is for convolutions, but",
        ),
        ("workload=digits workload.data.validation=5000", "leave nothing to train on"),
        (
            "workload=digits algorithm=nesterov algorithm.optimizer.momentum=1.5",
            "the momentum of SGD must be less than 1",
        ),
        (
            "workload=digits sampler._target_=no.Such",
            "sampler cannot be built: there is no module no, for no.Such",
        ),
        (
            "workload=digits +trainer.max_steps=7",
            "trainer.max_steps is bstune's own: how long a trial is, is set by",
        ),
        (
            "workload=digits +trainer.max_steps=7 +workload.trainer.max_epochs=2 +trainer.devices=2",
            (
                "trainer.max_steps and workload.trainer.max_epochs are bstune's own: how long a "
                "trial is, is set by budget.steps and budget.examples; trainer.devices is bstune's "
                "own: devices=N"
            ),
        ),
        (
            "workload=digits +workload.trainer.precision=16",
            "workload.trainer.precision is bstune's own: it is set by",
        ),
        (
            (
                "workload=digits "
                "+trainer.callbacks.finder._target_=lightning.pytorch.callbacks.LearningRateFinder"
            ),
            "trainer: the call-back LearningRateFinder sets the learning rate, which bstune sets",
        ),
        (
            "workload=digits +workload.trainer.nope=3",
            "trainer.nope is no argument of Trainer; arguments: accelerator, ",
        ),
        (
            "workload=digits +trainer.nope=3",
            "trainer.nope is no argument of Trainer; arguments: accelerator, ",
        ),
        (
            "workload=digits search.tune=[momentum] workload.tunable.momentum.low=-1",
            "the module does not take workload",
        ),
        (
            (
                "workload=digits search.tune=[h] '+workload.tunable.h={key: budget.examples, low: "
                "1000, high: 9000}'"
            ),
            "no schedule of digits ends with its budget",
        ),
        (
            "survey workload=replay workload.table=fashion_mlp",
            "recorded runs have no hardware to survey: name a",
        ),
        ("survey workload=replay", "recorded runs have no hardware to survey: name a"),
        ("fit nowhere.csv", "nowhere.csv cannot be read"),
        # Reading a device would never end.
        ("fit /dev/zero", "/dev/zero is a device"),
        ("lightning /dev/zero --target val_loss=1", "/dev/zero is a device"),
        ("branch /dev/zero --batch-size 8 --examples 64 workload=digits", "is a device"),
        ("workload=digits +trainer.callbacks=3", "trainer.callbacks must be"),
        ("workload=digits hydra.run.dir=/proc/x", "Hydra cannot run with these options"),
        ("sweep nope", "there is no sweep 'nope'"),
    ],
)
def test_bad_input_ends_in_plain_lines_and_writes_nothing(bstune, tmp_path, arguments, message):
    given = shlex.split(arguments)
    if given[:1] == ["workload=digits"]:
        # A process for its training would take a second.
        given.append("search.workers=0")
    refused(bstune, tmp_path, message, *given)


def test_batches_smaller_than_what_the_model_takes_are_refused_unless_no_trial_has_one(
    bstune, tmp_path
):
    message = f"ghost size 32 is over the batch size 8: {GHOST_ADVICE}"
    for arguments in (
        ["trial.batch_size=8", "trial.lr=0.1"],
        ["search.batch_size.low=8", "hardware.seconds=1"],
    ):
        refused(bstune, tmp_path, message, *GHOSTS, *arguments, "search.workers=0")
    own = ("trial.batch_size=64", "trial.lr=0.01", "budget.steps=3", "budget.examples=1")
    own += (OFFLINE, "search.workers=0")
    status, out, err = bstune(*GHOSTS, "search.batch_size.low=8", *own)
    assert (status, err) == (0, "")
    # A single trial says what it came to beside its target.
    assert "after 3 steps: it misses the target" in " ".join(out.split())


def test_a_debug_flag_shows_the_traceback(bstune):
    status, _, err = bstune("workload=digits", "search.trials=abc", "debug=true")
    # A developer wants the place, a user the line.
    assert status == 2
    assert err.startswith("Traceback")
    assert "ConfigError: search.trials" in err


# One study, which several tests read


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """The folder in which a study of digits ran, and what it printed."""
    root = tmp_path_factory.mktemp("study")
    return root, run_command(root, *STUDY)


def test_a_study_from_end_to_end(study):
    root, out = study
    assert "study small: val/loss <= 1, objective steps" in out
    assert "9 configurations; each ends at the target or once it cannot matter" in out
    # Colours are for terminals.
    assert "\x1b[" not in out, "no terminal, no escape sequences"
    assert entries(root) == ["bstune.db", "mlflow.db", "mlruns", "outputs"]
    folder = root / "outputs" / "small"
    assert {"trials.jsonl", "curve.json", "curve.png", "config.yaml", "best.yaml"} <= set(
        entries(folder)
    )
    trials = trials_of(folder)
    assert numbers(trials) == list(range(len(trials)))
    searched = [trial for trial in trials if trial.replicate_of is None]
    for index, trial in enumerate(searched):
        assert trial.trial_index == index
    # Configurations: what continues a trial is none.
    assert [trial.resumed_from for trial in searched].count(None) == 9
    curve = json.loads((folder / "curve.json").read_text())
    best = yaml.safe_load((folder / "best.yaml").read_text())
    for name, key in (("best_by_time", "time_to_target"), ("best_by_steps", "steps")):
        winner = searched[curve[name]["number"]]
        # Without a survey a step's seconds are those of all trials, not of one.
        seconds = winner.steps * curve[name]["seconds_per_step"]
        expected = winner.steps if key == "steps" else seconds
        assert curve[name]["single_run"][key] == pytest.approx(expected)
        assert best[name]["number"] == winner.number
        assert Path(best[name]["checkpoint"]).exists()
    replicated = [trial.replicate_of for trial in trials]
    # The winner by steps ran on three fresh seeds.
    assert replicated.count(best["best_by_steps"]["number"]) >= 3
    continued = [trial for trial in trials if trial.resumed_from is not None]
    assert continued
    for trial in continued:
        earlier = trials[trial.resumed_from]
        assert (trial.batch_size, trial.lr, trial.seed) == (
            earlier.batch_size,
            earlier.lr,
            earlier.seed,
        )
        assert trial.steps > earlier.steps
        assert trial.history[: len(earlier.history)] == earlier.history
    # What may still be continued has its state, and nothing else has.
    assert numbered(folder / "states") == worth_continuing(trials, "steps")
    kept = numbered(folder / "checkpoints")
    for winner in best.values():
        assert winner["number"] in kept
    for number in kept:
        assert trials[number].reached
    assert 0.0 < curve["test"]["best_by_time"]["test/error"] < 0.5
    assert curve["noise_scale"]["steps"] > 0
    assert yaml.safe_load((folder / "config.yaml").read_text())["seed"] == 8


def test_mlflow_holds_the_study(study):
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{study[0]}/mlflow.db")
    study_id = client.get_experiment_by_name("bstune").experiment_id
    trials_id = client.get_experiment_by_name("bstune-trials").experiment_id
    (parent,) = client.search_runs([study_id])
    children = client.search_runs([trials_id])
    trials = trials_of(study[0] / "outputs" / "small")
    sent = []
    for run in children:
        assert run.data.tags["mlflow.parentRunId"] == parent.info.run_id
        sent.append(list(map(int, run.data.tags["bstune.trials"].split())))
    # One run a chain of continued trials.
    assert sorted(chain.from_iterable(sent)) == numbers(trials)
    assert len(sent) == [trial.resumed_from for trial in trials].count(None)
    assert parent.data.metrics["best/batch_size"] > 0
    assert client.get_metric_history(parent.info.run_id, "curve/steps_to_target")
    assert f"#/experiments/{study_id}/runs?" in study[1]
    for run, chained in zip(children, sent, strict=True):
        history = client.get_metric_history(run.info.run_id, "val/loss")
        points = tuple((metric.step, metric.value) for metric in history)
        assert points == trials[chained[-1]].history


def test_the_winners_checkpoint_is_an_artifact_in_mlflow(study):
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{study[0]}/mlflow.db")
    (parent,) = client.search_runs([client.get_experiment_by_name("bstune").experiment_id])
    folder = study[0] / "outputs" / "small"
    best = yaml.safe_load((folder / "best.yaml").read_text())["best_by_steps"]
    name = parent.data.tags["bstune.checkpoint"]
    assert name == Path(best["checkpoint"]).name
    sent = Path(parent.info.artifact_uri.removeprefix("file://")) / name
    assert sent.read_bytes() == Path(best["checkpoint"]).read_bytes()
    assert (sent.parent / "best.yaml").exists()


def test_the_command_in_best_yaml_trains_the_winner_again(study, bstune, tmp_path):
    """It gives the same values, bit for bit, but for those at earlier limits."""
    folder = study[0] / "outputs" / "small"
    best = yaml.safe_load((folder / "best.yaml").read_text())["best_by_steps"]
    assert bstune(*shlex.split(best["command"])[3:])[0] == 0
    (record,) = tmp_path.glob("outputs/small/trial-B*/trial.json")
    again = json.loads(record.read_text())
    winner = json.loads(trials_of(folder)[best["number"]].to_json())
    assert (again["steps"], again["seed"]) == (winner["steps"], winner["seed"])
    assert again["history"][-1] == winner["history"][-1]
    # It was not stopped on the way, so evaluations at earlier limits are missing.
    for evaluation in again["history"]:
        assert evaluation in winner["history"]


@pytest.mark.slow
def test_another_folder_and_changed_settings_are_refused(study, bstune, monkeypatch, tmp_path):
    monkeypatch.chdir(study[0])
    before = contents(study[0])
    refused(
        bstune, study[0], "continue it with output=", *STUDY, f"output={tmp_path / 'elsewhere'}"
    )
    changes = {
        "seed=1": "seed: was 8, now 1",
        "workload.target.value=0.5": "workload.target.value: was 1.0, now 0.5",
        "search.objective=time": "search.objective: was 'steps', now 'time'",
        "search.batch_size.high=256": "search.batch_size.high: was 512, now 256",
        "scaling=linear": "scaling.rule._target_: was 'bstune.core.scaling.sqrt', now "
        "'bstune.core.scaling.linear'",
        "precision=bf16-mixed": "precision: was '32-true', now 'bf16-mixed'",
        "compile=default": "compile: was None, now 'default'",
        "workload.module.model.hidden=[64]": "workload.module.model.hidden: was [128], now [64]",
    }
    # All at once, as a command takes seconds, and without machine code of what is refused.
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    given = (*STUDY, *changes, "search.workers=0")
    err = refused(bstune, study[0], changes["seed=1"], *given)
    for line in changes.values():
        assert line in err
    assert before.items() <= contents(study[0]).items()


# What is no study


def test_the_help_is_short_and_its_examples_compose(bstune):
    status, out, err = bstune("--help")
    assert (status, err) == (0, "")
    lines = out.splitlines()
    # A help that fits on a screen.
    assert len(lines) <= 30
    assert max(map(len, lines)) <= 120
    assert set(VERBS) - {"tune"} <= set(lines[1].split())
    for name in WORKLOADS:
        assert name in out.split("Workloads: ")[1]
    # From the examples on.
    options = []
    for word in " ".join(lines[11:]).split():
        if re.fullmatch(r"[a-z_.]+=[\w.-]+;?", word):
            options.append(word.rstrip(";"))
    assert len(options) > 10
    # As an example in the help may be copied.
    OmegaConf.create(bstune("--cfg", "job", "+workload=digits", *options)[1])


@pytest.mark.parametrize(
    "verb",
    [
        *((), ("survey",), ("fit",), ("report",), ("compare",), ("extrapolate",)),
        # test_harness.py has that of a sweep.
        ("record",),
    ],
)
def test_every_verb_explains_itself(bstune, verb):
    status, out, err = bstune(*verb, "--help")
    assert (status or 0, err) == (0, "")
    assert "workload=NAME" in out or "usage: " in out or "run one with" in out


def test_the_version_is_bstunes_own(bstune):
    assert bstune("--version")[:2] == (0, f"bstune {version('bstune')}\n")


# Nothing but JSON, as a program reads it.
def test_json_has_standard_output_for_itself(bstune, tmp_path, capfd, monkeypatch):
    replayed = ("workload=replay", "workload.table=cifar_mlp", OFFLINE)
    few = ("search.trials=2", "search.replicates=0")
    status, out, _ = bstune(*replayed, *few, "study=s", "target=0.6", "--json")
    assert status == 0
    result = StudyResult.model_validate_json(out)
    assert result.target_value == 0.6
    assert result == StudyResult.model_validate_json(
        (tmp_path / "outputs" / "s" / "curve.json").read_text()
    )
    monkeypatch.setattr(sys, "argv", ["bstune", "report", "outputs/s", "target=0.62", "--json"])
    assert main() == 0
    printed = capfd.readouterr()
    assert StudyResult.model_validate_json(printed.out).target_value == 0.62


def test_json_of_what_has_none_is_refused(bstune):
    status, out, err = bstune("record", "table.jsonl", "--json")
    assert (status, out) == (2, "")
    assert "--json is of" in err


@pytest.mark.slow
def test_hydras_own_options(bstune, tmp_path):
    status, out, _ = bstune("--cfg", "job", "+workload=digits", "seed=3")
    assert status == 0
    assert OmegaConf.create(out).seed == 3
    replayed = (
        "workload=replay",
        "workload.table=cifar_mlp",
        "sampler=random",
        "search.trials=1",
        "search.replicates=0",
        OFFLINE,
    )
    status, out, err = bstune(
        "--multirun", *replayed, "search.objective=steps", "seed=0,1", "study=s${seed}"
    )
    assert (status, err) == (0, "")
    assert entries(tmp_path / "outputs") == ["s0", "s1"]
    status, _, err = bstune("--multirun", "workload=digits", "seed=-1,-2")
    assert status == 2
    assert "error: seed must be at least 0, but got -1" in err


def test_fit_prints_the_curve_of_a_file(bstune, tmp_path):
    # S = 100 (1 + 64/B), rounded to whole steps.
    points = [f"{size},{100 * (1 + 64 / size):.0f}" for size in (8, 16, 32, 64, 128, 256, 512)]
    (tmp_path / "points.csv").write_text("\n".join(["batch_size,steps", *points]))
    status, out, err = bstune("fit", "points.csv", "--json")
    assert status == 0
    assert json.loads(out)["critical_batch_size"] == pytest.approx(64, rel=0.1)
    assert json.loads(out)["law"] == "two-terms"
    status, out, err = bstune("fit", "points.csv", "--law", "three-terms")
    assert (status, err) == (0, "")
    assert "three-terms" in out
    (tmp_path / "points.csv").write_text("batch_size,steps\n64,100\n64,120\n64,110\n")
    status, out, err = bstune("fit", "points.csv")
    assert (status, out) == (2, "")
    assert "known is 100 to 120 steps to target at batch size 64;" in err


def test_a_working_directory_that_is_gone_is_a_line(bstune, tmp_path, monkeypatch):
    gone = tmp_path / "gone"
    # The folder is removed while the process stands in it.
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    status, out, err = bstune("fit", "points.csv")
    assert (status, out, len(err.splitlines())) == (2, "", 1)
