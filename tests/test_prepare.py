"""What a study is prepared from: a backend that trains, one of a user's own, the rehearsal, device and precision."""

import json
import logging
import os
import re
import sys
from contextlib import chdir
from dataclasses import replace
from types import MappingProxyType, SimpleNamespace

import pytest
import torch
from builders import options_and_recipe, options_of, prepared_study
from rich.console import Console
from toolbox import entries, made_table, make_result, make_survey, trials_of

from bstune.core.errors import ConfigError
from bstune.core.records import Budget, TrialSpec
from bstune.hardware import survey as hardware_survey
from bstune.hardware import survey_cache
from bstune.hardware.threads import threads_of_torch
from bstune.options import flat_settings
from bstune.report.block import INDENT
from bstune.study import prepare as preparing
from bstune.study import report
from bstune.study.analysis import analyse
from bstune.study.planning.survey_time import survey_seconds
from bstune.study.prepare import compose_checked, prepare
from bstune.study.prepare_training import noting_lines
from bstune.study.run import arguments_to_join, run_study
from bstune.study.training import open_service
from bstune.system.files import Output, is_own
from bstune.system.watchdog import Wait, Watch
from bstune.tracking import runs
from bstune.trial.backend import TrialBackend
from bstune.trial.workload import resolve, resolve_precision

DIGITS = (
    "workload=digits",
    "mlflow.enabled=false",
    "hardware.enabled=false",
    "budget.steps=40",
    "budget.examples=1",
)
SPEC = TrialSpec(0, 0, 64, 0.4, 0.0, 7)


@pytest.fixture
def output(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    output = Output(tmp_path / "study")
    output.checkpoints.mkdir(parents=True)
    return output


def test_the_wait_for_the_process_that_trains_is_named_by_its_last_line():
    now = [0.0]
    lines = list[str]()
    watch = Watch(lines.append, None, lambda message: None, silence=10.0, now=lambda: now[0])
    wait = Wait("the process that trains to start", watch)
    watch.begin(wait)
    say = noting_lines(watch.say, wait)

    def wait_for(seconds):
        for _ in range(seconds):
            now[0] += 1.0
            watch.look()

    wait_for(10)
    say("reading the data of x")
    # What that process itself waits for is no progress.
    say("waiting for X.setup(), 10 s")
    wait_for(10)
    assert "to start" in lines[0]
    # The seconds are those since that line.
    assert "reading the data of x" in lines[-1]
    assert lines[-1].endswith(", 10 s")


@pytest.fixture(scope="module")
def backend(tmp_path_factory):
    """Give what trains the digits in this process, in whichever folder it is asked to."""
    with chdir(tmp_path_factory.mktemp("prepared")):
        return prepared_study(*DIGITS, "search.workers=0").training.service.backend


@pytest.fixture
def train(backend):
    return backend.run


@pytest.mark.slow
def test_stopped_and_continued_is_the_same_training(backend, output):
    train = backend.run
    whole = train(SPEC, output, None)
    assert list(output.states.glob("*")) == []
    assert not backend.resumable(0, output)
    first = train(replace(SPEC, max_steps=11), output, None)
    assert backend.resumable(0, output)
    second = train(
        replace(SPEC, number=1, trial_index=1, max_steps=25, resumed_from=0), output, first
    )
    third = train(
        replace(SPEC, number=2, trial_index=2, max_steps=40, resumed_from=1), output, second
    )
    assert (third.number, third.trial_index, third.resumed_from, third.steps) == (2, 2, 1, 40)
    # Where a part ends it is evaluated as well.
    assert set(third.history) >= set(whole.history)
    assert third.history[-1] == whole.history[-1]
    assert entries(output.states) == ["trial-0.ckpt", "trial-1.ckpt", "trial-2.ckpt"]


def damaged(content):
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 0xFF]) + content[middle + 1 :]


@pytest.mark.parametrize(
    "spoil", [None, damaged, lambda content: b""], ids=["deleted", "damaged", "emptied"]
)
def test_a_parent_whose_state_is_no_use_is_trained_again_from_the_start(
    backend, output, caplog, spoil
):
    train = backend.run
    first = train(replace(SPEC, max_steps=11), output, None)
    state = output.state(0)
    state.unlink() if spoil is None else state.write_bytes(spoil(state.read_bytes()))
    with caplog.at_level(logging.WARNING, "bstune"):
        result = train(replace(SPEC, number=1, max_steps=25, resumed_from=0), output, first)
    (warning,) = [
        record.getMessage() for record in caplog.records if record.name == "bstune.trial.workload"
    ]
    assert warning.startswith("the state of trial 0 at ")
    assert warning.endswith("; it starts afresh")
    assert (result.number, result.resumed_from, result.status, result.steps) == (
        1,
        None,
        "stopped",
        25,
    )
    # The damaged one would be tried again and again; an emptied one might be anybody's.
    emptied = os.path.lexists(state)
    assert emptied == (spoil is not None and spoil is not damaged)
    assert entries(output.states) == ["trial-0.ckpt"] * emptied + ["trial-1.ckpt"]
    assert not backend.resumable(0, output)
    assert result.history == train(replace(SPEC, number=5, max_steps=25), output, None).history


@pytest.mark.parametrize("end", ["", ".partial"])
@pytest.mark.parametrize("kind", ["file", "link"])
def test_a_trial_leaves_the_users_files_as_they_are(
    backend, output, tmp_path, caplog, monkeypatch, kind, end
):
    output.states.mkdir()
    theirs = [
        output.states / f"trial-0.ckpt{end}",
        output.checkpoints / f"trial-1.ckpt{end}",
    ]
    for path in theirs:
        outside = tmp_path / f"{path.parent.name}.txt"
        outside.write_text("the user's")
        path.symlink_to(outside) if kind == "link" else path.write_text("the user's")
    stopped = backend.run(replace(SPEC, max_steps=11), output, None)
    # A target that is met, so that a checkpoint is due.
    easy = replace(backend.protocol, target=replace(backend.protocol.target, value=0.9))
    monkeypatch.setattr(backend, "protocol", easy)
    reached = backend.run(replace(SPEC, number=1), output, None)
    assert (stopped.status, reached.status) == ("stopped", "reached")
    for path in theirs:
        assert path.read_text() == "the user's"
    assert backend.resumable(0, output) == bool(end)
    assert is_own(output.checkpoint(1)) == bool(end)
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    said = [f"{path} is not this study's" for path in theirs if not end]
    assert [line.partition(" and stays")[0] for line in warnings] == said
    # What is continued from it starts afresh, and the user's file still stays.
    again = replace(SPEC, number=2, max_steps=12, resumed_from=0)
    monkeypatch.undo()
    assert backend.run(again, output, stopped).resumed_from == (0 if end else None)
    for path in theirs:
        assert path.read_text() == "the user's"
    for name in entries(output.states) + entries(output.checkpoints):
        assert not name.startswith(".")


@pytest.mark.parametrize(
    ("precision", "device", "has_bfloat16", "found"),
    [
        # auto is bfloat16 where a CUDA device has it, and full precision elsewhere.
        ("auto", "cpu", True, "32-true"),
        ("auto", "cuda", True, "bf16-mixed"),
        ("auto", "cuda", False, "32-true"),
        ("bf16-true", "cpu", False, "bf16-true"),
        ("bf16-true", "cuda:1", True, "bf16-true"),
        ("16-mixed", "cuda", False, "16-mixed"),
        (
            "bf16-true",
            "cuda",
            False,
            "precision=bf16-true: GTX has no bfloat16: use 16-true or 32-true",
        ),
        (
            "bf16-mixed",
            "cuda",
            False,
            "precision=bf16-mixed: GTX has no bfloat16: use 16-mixed or 32-true",
        ),
        (
            "16-true",
            "cpu",
            True,
            "precision=16-true needs a CUDA device, but this is cpu: use bf16-true or 32-true",
        ),
    ],
)
def test_a_precision_that_the_device_does_not_have_is_refused(
    monkeypatch, precision, device, has_bfloat16, found
):
    monkeypatch.setattr(
        # Capability 8.0 is the first with bfloat16; 7.5 has none.
        torch.cuda,
        "get_device_capability",
        lambda asked: (8, 0) if has_bfloat16 else (7, 5),
    )
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda asked: "GTX")
    if " " in found:
        with pytest.raises(ConfigError, match=found):
            resolve_precision(precision, device)
    else:
        assert resolve_precision(precision, device) == found


def test_a_fused_optimizer_is_refused_where_a_scaler_skips_steps(monkeypatch):
    monkeypatch.setattr("bstune.trial.workload.resolve_device", lambda name, option: "cuda")
    own = ("+workload=resnet_cifar", "precision=16-mixed")
    options, _ = resolve(*options_and_recipe(*own, "workload.module.optimizer.fused=false"))
    assert options.precision == "16-mixed"
    with pytest.raises(ConfigError, match=r"set workload\.module\.optimizer\.fused=false"):
        resolve(*options_and_recipe(*own, "workload.module.optimizer.fused=true"))


def test_a_worker_on_cuda_says_of_which_device_it_takes_a_share(monkeypatch):
    """Torch refuses a device without its number there."""
    asked = []
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=1000)
    )
    monkeypatch.setattr(
        torch.cuda, "set_per_process_memory_fraction", lambda *given: asked.append(given)
    )
    open_service(*resolve(*options_and_recipe(*DIGITS)), None, 250)
    assert asked == [(0.25, torch.device("cuda", 0))]


@pytest.mark.parametrize(
    ("stored", "options", "threads", "are_open"),
    [
        # A new study; one that trains on CUDA has no number either.
        ({}, (), "auto", True),
        ({"threads": None}, (), "auto", True),
        # A number that a timing or the user chose stays.
        ({"threads": 3}, (), 3, False),
        # A number that nobody chose gives way to a survey of this run, and stays without one.
        ({"threads": 3, "threads_are_open": True}, (), "auto", True),
        ({"threads": 3, "threads_are_open": True}, ("hardware.enabled=false",), 3, True),
        ({"threads": 3, "threads_are_open": True}, ("search.wall_seconds=90",), 3, True),
        ({"threads": 3, "threads_are_open": True}, ("threads=1",), 1, False),
        # A single trial is none of the study's.
        ({"threads": 3}, ("trial.batch_size=32", "trial.lr=0.1"), "auto", False),
    ],
)
def test_threads_are_left_open_until_a_timing_chooses_them(
    monkeypatch, stored, options, threads, are_open
):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(preparing, "stored_settings", lambda name, url: stored)
    found = preparing._with_stored_threads(options_of("workload=digits", *options))
    assert (found[0].threads, found[1]) == (threads, are_open)


@pytest.mark.parametrize(("option", "kept"), [("auto", "auto"), ("1", 1)])
def test_the_storages_number_of_threads_trains_and_is_not_taken_for_the_users(
    monkeypatch, output, option, kept
):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(preparing, "stored_settings", lambda name, url: {"threads": 1})
    with threads_of_torch(2):
        prepared = prepared_study(*DIGITS, "device=cpu", "search.workers=0", f"threads={option}")
        prepared.training.close()
    assert prepared.frozen_settings["threads"] == 1
    assert prepared.options.threads == kept


def test_the_environments_number_of_threads_is_the_users(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    monkeypatch.setattr(preparing, "stored_settings", lambda name, url: {})
    assert preparing._with_stored_threads(options_of("workload=digits"))[1] is False


@pytest.mark.parametrize(
    ("were_open", "survey", "threads", "are_open"),
    [
        (True, None, 2, True),
        (True, make_survey(), 1, False),
        # On CUDA there are none to choose.
        (True, None, None, False),
        (False, None, 2, False),
    ],
)
def test_a_survey_closes_the_choice_of_threads(were_open, survey, threads, are_open):
    backend = OwnBackend()
    backend.frozen_settings = {"threads": threads}
    runs = SimpleNamespace(backend=backend, survey=survey)
    frozen = preparing._frozen_settings(options_of("workload=digits"), runs, were_open)
    assert frozen["threads"] == threads
    assert frozen.get("threads_are_open", False) == are_open


OWN = ("workload=replay", "workload.name=replay")


class OwnBackend(TrialBackend):
    """Runs trials somewhere else: each reaches the target, the larger its batch the sooner."""

    device = "cluster"
    description = "a cluster"
    frozen_settings = MappingProxyType({"cluster": "A"})
    stops = False
    notes = ("trials run on a cluster",)

    def step_time(self, batch_size):
        return 0.01 + 1e-4 * batch_size

    def run(self, spec, folder, resumed_from):
        assert (spec.max_steps, resumed_from) == (None, None), "its trials cannot be stopped"
        # S = 200 (1 + 64/B).
        steps = round(200 * (1 + 64 / spec.batch_size))
        return make_result(
            **spec.trial_fields(), steps=steps, steps_low=steps - 1, history=((steps, 0.1),),
            seconds_per_step=self.step_time(spec.batch_size),
        )  # fmt: skip

    def test(self, spec, folder):
        return {"test/error": 0.2}


@pytest.mark.parametrize("sampler", ["frontier", pytest.param("tpe", marks=pytest.mark.slow)])
def test_a_study_runs_on_a_backend_of_ones_own(tmp_path, monkeypatch, sampler):
    monkeypatch.chdir(tmp_path)
    made_table(tmp_path)
    options = (
        "workload.table=t.jsonl",
        "workload.target.value=0.14",
        "mlflow.enabled=false",
        "search.replicates=1",
    )
    own = (*OWN, *options, f"sampler={sampler}", "search.trials=3")
    prepared = prepared_study(*own, backend=OwnBackend())
    assert prepared.frozen_settings == {**flat_settings(prepared.options), "cluster": "A"}
    console = Console(record=True, width=200)
    done = run_study(prepared, [], console).trials
    assert done == trials_of(tmp_path / "outputs" / "replay")
    assert [trial.trial_index for trial in done[:3]] == [0, 1, 2]
    assert done[3].replicate_of is not None
    text = console.export_text()
    assert "on a cluster" in text
    assert "trials run on a cluster" in text
    curve = json.loads((tmp_path / "outputs" / "replay" / "curve.json").read_text())
    assert "test/error" in next(iter(curve["test"].values()))


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (
            "workload.target.metric=nope",
            "the target's metric 'nope' is logged nowhere; in validation the module logs val/",
        ),
        ("workload.module.lr=0.1", "nothing in the workload takes ${trial.lr}"),
        ("workload.target.value=9", "the target val/loss <= 9 is met before training"),
    ],
)
def test_what_cannot_be_tuned_is_refused_before_the_survey(
    bstune, tmp_path, monkeypatch, option, message
):
    monkeypatch.setattr(survey_cache, "cached", None)
    status, _, err = bstune(
        *DIGITS, "device=cpu", "hardware.enabled=true", "search.workers=0", option
    )
    assert status == 2
    assert err.startswith(f"error: {message}")
    assert "\n" not in err.strip()
    assert entries(tmp_path) == []


class Scheduled(OwnBackend):
    """Its schedule ends with the trial; a step takes 0.1 s at any batch size."""

    horizon = True

    def step_time(self, batch_size):
        return 0.1


@pytest.mark.parametrize(
    ("options", "backend", "budget"),
    [
        # The reference is 64: an epoch takes 20 s, and 200 s are left.
        ((), Scheduled, Budget(examples=2 * 12_800)),
        # A schedule that does not end with its trial is not cut.
        ((), OwnBackend, Budget(examples=1_280_000)),
        # The user's own budget, and a study without a limit of time.
        (("budget.examples=128000",), Scheduled, Budget(examples=128_000)),
        (("search.wall_seconds=null",), Scheduled, Budget(examples=1_280_000)),
        (("workload.budget.assumed_epoch=null",), Scheduled, Budget(examples=1_280_000)),
        # This sampler leaves the horizons alone: the budget is part of the workload.
        (("sampler=random",), Scheduled, Budget(examples=1_280_000)),
    ],
)
def test_an_assumed_budget_of_a_schedule_ends_in_time(
    tmp_path, monkeypatch, options, backend, budget
):
    monkeypatch.chdir(tmp_path)
    made_table(tmp_path)
    assumed = (
        "workload.table=t.jsonl",
        "workload.target.value=0.14",
        "workload.reference.batch_size=64",
        "workload.budget.steps=1",
        "workload.budget.examples=1280000",
        "+workload.budget.assumed_epoch=12800",
        "search.wall_seconds=250",
        "mlflow.enabled=false",
    )
    composed = compose_checked((*OWN, *assumed, *options))
    prepared = prepare(composed.options, None, backend=backend(), elapsed=lambda: 50.0)
    assert prepared.protocol.budget == budget
    assert prepared.options.budget.budget == budget
    # The reference's schedule is as long, and those of machines that join.
    assert prepared.last_step(64) == budget.examples / 64
    joined = arguments_to_join(prepared.options, ("workload=mine", "device=cpu"))
    is_shortened = budget.examples == 2 * 12_800
    # The user's own budget stands among the study's arguments.
    if is_shortened or not options:
        assert joined[1:] == ["budget.steps=1", f"budget.examples={budget.examples}"] * is_shortened
    assert "device=cpu" not in joined
    is_said = any(note.startswith("assumed: ") for note in prepared.notes)
    assert is_said == (budget.examples == 2 * 12_800)


@pytest.mark.parametrize(
    ("batch_size", "is_said"), [(64, False), (32, False), (16, True), (8192, True)]
)
def test_a_reference_outside_the_range_is_said(tmp_path, monkeypatch, batch_size, is_said):
    monkeypatch.chdir(tmp_path)
    made_table(tmp_path)
    options = (
        "workload.table=t.jsonl",
        "workload.target.value=0.14",
        "mlflow.enabled=false",
        "search.batch_size.low=32",
        "search.batch_size.high=1024",
        f"scaling.batch_size={batch_size}",
    )
    prepared = prepared_study(*OWN, *options, backend=OwnBackend())
    assert prepared.baseline.batch_size == batch_size
    said = [note for note in prepared.notes if f"your own batch size, {batch_size}, lies" in note]
    assert len(said) == is_said


class Untestable(OwnBackend):
    def test(self, spec, folder):
        raise FileNotFoundError("no test set")


def test_what_is_optional_never_ends_a_study(tmp_path, monkeypatch):
    """Whatever raises becomes a line; the study's own files are there."""
    monkeypatch.chdir(tmp_path)
    made_table(tmp_path)

    def fail(*arguments, **options):
        raise LookupError("no such thing")

    monkeypatch.setattr(report, "draw_curve", fail)
    monkeypatch.setattr(analyse, "over_targets", fail)
    monkeypatch.setattr(runs, "Tracking", fail)
    options = (
        "workload.table=t.jsonl",
        "workload.target.value=0.14",
        "search.replicates=0",
        "search.trials=3",
    )
    console = Console(record=True, width=200)
    run_study(prepared_study(*OWN, *options, backend=Untestable()), [], console)
    # Which trials they were depends on the search.
    lines = re.sub(r"of trials? \d+( and \d+)?", "of trial N", console.export_text()).splitlines()
    for line in (
        "no test metrics of trial N: FileNotFoundError: no test set (test_prepare.py:",
        "no figure of the curve: LookupError: no such thing (test_prepare.py:",
        "no critical batch size at easier targets: LookupError: no such thing (test_prepare.py:",
        "MLflow: LookupError: no such thing (test_prepare.py:",
    ):
        assert any(one[INDENT:].startswith(line) for one in lines), (line, lines)
    files = entries(tmp_path / "outputs" / "replay")
    assert {"best.yaml", "curve.json", "trials.jsonl"} <= set(files)
    for name in files:
        assert not name.endswith(".png")


def test_what_the_first_steps_refuse_does_not_wait_for_mlflow(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    imported = []
    monkeypatch.setattr(preparing, "_with_imported_tracking", lambda *given: imported.append(given))

    def refuse(*arguments):
        raise ConfigError("the metric is logged nowhere")

    monkeypatch.setattr(preparing, "prepare_training", refuse)
    with pytest.raises(ConfigError, match="logged nowhere"):
        prepared_study("workload=digits", "hardware.enabled=false")
    assert imported == []


# An address of the last kind is told by mlflow alone.
@pytest.mark.parametrize("uri", ["null", "http://localhost:5000", "file:///x"])
def test_an_mlflow_that_cannot_be_imported_is_a_note(uri, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made_table(tmp_path)
    # Python refuses to import a module that stands for None.
    monkeypatch.setitem(sys.modules, "mlflow", None)
    monkeypatch.delitem(sys.modules, preparing.TRACKING, raising=False)
    options = ("workload.table=t.jsonl", "workload.target.value=0.14", f"mlflow.uri={uri}")
    prepared = prepared_study(*OWN, *options, backend=OwnBackend())
    assert not prepared.options.mlflow.enabled
    assert prepared.notes[0].startswith(
        "not logged in MLflow, which cannot be imported: ModuleNotFoundError: "
    )


@pytest.mark.parametrize(
    ("wall_seconds", "start", "seconds"),
    [
        # quick=true: its start counts for half of it at most.
        (None, 500.0, [6.0]),
        (1000, 0.0, [90.0]),
        # It is a tenth of what the start has left.
        (400, 100.0, [30.0]),
        # The start has left too little for one.
        (149, 100.0, []),
    ],
)
def test_the_survey_leaves_most_of_the_wall_time_to_the_search(
    monkeypatch, tmp_path, wall_seconds, start, seconds
):
    # The README's first command leaves a database in the folder it runs in.
    monkeypatch.chdir(tmp_path)
    asked = []

    def surveyed(options, *rest):
        asked.append(options.hardware.seconds)
        return make_survey([(32, 1e-3), (512, 2e-3)], high=512)

    monkeypatch.setattr(hardware_survey, "measure_with", surveyed)
    monkeypatch.setattr(
        survey_cache, "cached", lambda options, key, how, measured, log: (measured(), True)
    )
    monkeypatch.setattr(survey_cache, "kept", lambda options, key, how: None)
    prepared = prepared_study(
        "workload=digits",
        "device=cpu",
        "search.workers=0",
        f"search.wall_seconds={wall_seconds or 'null'}",
        f"quick={wall_seconds is None}",
        elapsed=lambda: start,
    )
    prepared.close()
    assert prepared.options.hardware.seconds == 90
    assert asked == seconds
    # What is advised for a later start counts the same survey.
    if wall_seconds is not None:
        left = wall_seconds - start
        assert survey_seconds(prepared.options, wall_seconds, left) == sum(seconds)
