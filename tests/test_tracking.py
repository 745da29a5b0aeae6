import base64
import contextlib
import io
import json
import logging
import math
import os
import re
import shutil
import signal
import socket
import sqlite3
import threading
import time
import zlib
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import mlflow
import pytest
from builders import (
    changed,
    hand_critical,
    make_confirmed,
    make_curve,
    mlflow_options,
    options_of,
    result_of,
)
from mlflow import MlflowClient
from mlflow.entities import Run, ViewType
from toolbox import FakeTime, column, end_of_fork, entries, make_result, make_trial, start_fork

from bstune.core.noise_scale import moving_estimate
from bstune.core.records import Target, TrialResult
from bstune.options import (
    DataOptions,
    SearchOptions,
    StudyOptions,
    WorkloadOptions,
    with_option,
)
from bstune.report.rows import curve_point
from bstune.result import Gain, StudyResult
from bstune.system.files import Output
from bstune.system.terminal import filtered
from bstune.tracking.colours import PALETTE
from bstune.tracking.content import study_note, trial_name
from bstune.tracking.database import make_database
from bstune.tracking.exchange import Exchanges
from bstune.tracking.runs import Tracking
from bstune.tracking.saved_view import TAG as VIEW
from bstune.tracking.saved_view import runs_page

EXPERIMENTS = {"study": "bstune", "trial": "bstune-trials"}
# The target of 0.1 was missed at step 95 and met at 100, so that steps_low is 95.
HISTORY = [(50, 0.3), (95, 0.11), (100, 0.09)]
# No retries, and a request that gives up before the limit of a trial: failures show at once.
LIMITS = {"request_seconds": 5, "retries": 0, "seconds": 60.0, "study_seconds": 120.0}
MLFLOW = mlflow_options(None)
STUDY = "0b54d07e-3f0e-4f7d-9a71-1b8d6f3a2c11"
OPTIONS = StudyOptions.model_construct(
    study="digits-first",
    workload=WorkloadOptions.model_construct(name="digits"),
    # These are not logged.
    data=DataOptions(root="/data"),
    storage="sqlite://",
    debug=False,
)


def trial(number: int, **changes: object) -> TrialResult:
    # The batch size doubles with the number: 32, 64, 128.
    return make_result(
        **{"number": number, "trial_index": number, "batch_size": 32 * 2**number, **changes}
    )


@pytest.fixture(autouse=True)
def _no_thread_left():
    yield
    _join_senders()


def _join_senders() -> None:
    for thread in threading.enumerate():
        if thread.name == "bstune-mlflow":
            thread.join()


def opened(
    uri: str, study: str = STUDY, options: StudyOptions = OPTIONS, **limits: float
) -> Tracking:
    settings = MLFLOW.model_copy(update={"uri": uri, **LIMITS, **limits})
    versions = {"torch": "2.13.0"}
    prepared = SimpleNamespace(
        options=with_option(options, "mlflow", settings),
        protocol=SimpleNamespace(target=Target("val/error", 0.1, "min")),
        backend=SimpleNamespace(
            objective_is_open=False,
            device="cpu",
            versions=versions,
            frozen_settings={},
            train_examples=1000,
        ),
        # This folder has no checkpoint.
        files=Output(Path("outputs")),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bstune.tracking.runs.git_commit", lambda: "0123abc")
        return Tracking(prepared, study)


@pytest.fixture(scope="session")
def created(tmp_path_factory):
    """A database that a study created, once since its migrations take seconds, and all that this printed."""
    path = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    printed = io.StringIO()
    with contextlib.redirect_stderr(printed), contextlib.redirect_stdout(printed):
        opened(f"sqlite:///{path}")
    return path, printed.getvalue(), entries(path.parent)


@pytest.fixture
def uri(created, tmp_path):
    path = tmp_path / "mlflow.db"
    shutil.copy(created[0], path)
    return f"sqlite:///{path}"


def runs(uri: str, kind: str, study: str = STUDY, view: int = ViewType.ACTIVE_ONLY) -> list:
    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name(EXPERIMENTS[kind])
    where = f"tags.`bstune.study_id` = '{study}' and tags.`bstune.kind` = '{kind}'"
    return sorted(
        client.search_runs([experiment.experiment_id], where, run_view_type=view),
        key=lambda run: (
            [*map(int, run.data.tags.get("bstune.trials", "0").split())],
            run.info.start_time,
        ),
    )


def points(uri: str, run: Run, key: str) -> list[tuple[int, float]]:
    measured = MlflowClient(uri).get_metric_history(run.info.run_id, key)
    return [(metric.step, metric.value) for metric in measured]


def tags_of(found: list[Run], name: str) -> list[str]:
    return [run.data.tags[name] for run in found]


def ends_of(found: list[Run]) -> list[str]:
    """How each run ended, in MLflow's words."""
    return [run.info.status for run in found]


def parent_of(uri: str, study: str = STUDY) -> Run:
    (parent,) = runs(uri, "study", study)
    return parent


def break_method(
    monkeypatch, method: str, calls_before: int = 0, error: Exception | None = None
) -> None:
    """Let a method of the client fail from its (calls_before + 1)th call on."""
    whole = getattr(MlflowClient, method)
    made = []

    def broken(*args: object, **kwargs: object) -> object:
        made.append(args)
        if len(made) > calls_before:
            raise error or OSError("the line was cut")
        return whole(*args, **kwargs)

    monkeypatch.setattr(MlflowClient, method, broken)


@pytest.mark.slow
def test_creating_the_database_prints_nothing_and_leaves_only_the_database(created):
    path, printed, files = created
    assert (printed, files) == ("", ["mlflow.db"])
    for name in EXPERIMENTS.values():
        experiment = MlflowClient(f"sqlite:///{path}").get_experiment_by_name(name)
        assert experiment.artifact_location == str(path.parent / "mlruns" / name)
        assert experiment.tags["mlflow.experimentKind"] == "custom_model_development"


@pytest.fixture
def quick_tables(created, tmp_path, monkeypatch):
    """Copy MLflow's tables rather than make them, which takes seconds."""

    def copy(engine: object) -> None:
        shutil.copy(created[0], engine.url.database)

    monkeypatch.setattr("bstune.tracking.database.mlflow_database._initialize_tables", copy)


def test_a_database_that_is_there_stays(tmp_path):
    path = tmp_path / "mlflow.db"
    path.write_text("of somebody")
    make_database(path)
    assert path.read_text() == "of somebody"
    assert entries(tmp_path) == ["mlflow.db"]


def test_a_database_is_there_once_it_is_whole(tmp_path, monkeypatch, quick_tables):
    path = tmp_path / "mlflow.db"
    with monkeypatch.context() as patch:

        def end(engine: object) -> None:
            Path(engine.url.database).write_text("half of it")
            raise KeyboardInterrupt

        patch.setattr("bstune.tracking.database.mlflow_database._initialize_tables", end)
        with pytest.raises(KeyboardInterrupt):
            make_database(path)
    # The name stays free as long as the content is half of a database.
    assert not path.exists()
    # A journal without its database would be taken for the new one's, so it gets another name.
    (tmp_path / "mlflow.db-journal").write_text("of one that was moved away")
    make_database(path)
    assert entries(tmp_path) == ["mlflow.db", "mlflow.db-journal.aside-1"]
    assert opened(f"sqlite:///{path}").sent == set()


def test_the_tables_are_made_without_waits_for_the_disk(tmp_path, created, monkeypatch):
    pragmas = []

    def note(engine: object) -> None:
        with engine.connect() as connection:
            for name in ("synchronous", "journal_mode"):
                pragmas.append(connection.exec_driver_sql(f"PRAGMA {name}").scalar())
        shutil.copy(created[0], engine.url.database)

    monkeypatch.setattr("bstune.tracking.database.mlflow_database._initialize_tables", note)
    path = tmp_path / "new" / "mlflow.db"
    make_database(path)
    assert pragmas == [0, "memory"]
    # The database itself is used with SQLite's own care.
    with contextlib.closing(sqlite3.connect(path)) as database:
        assert database.execute("PRAGMA synchronous").fetchone() == (2,)
        assert database.execute("PRAGMA journal_mode").fetchone() == ("delete",)


@pytest.mark.slow
def test_a_process_that_is_killed_as_it_makes_the_database_breaks_nothing(tmp_path):
    # In bytes of the partial database: as soon as it begins, and further on in its migrations.
    for size in (1, 400_000):
        process = start_fork(lambda: make_database(tmp_path / "mlflow.db"))
        while os.waitpid(process, os.WNOHANG) == (0, 0):
            partial = next(tmp_path.glob(".mlflow.db.*.partial"), None)
            if partial is not None and partial.stat().st_size >= size:
                break
            time.sleep(0.002)
        os.kill(process, signal.SIGKILL)
        assert end_of_fork(process) == -signal.SIGKILL
        assert not (tmp_path / "mlflow.db").exists()
    opened(f"sqlite:///{tmp_path}/mlflow.db").send_trial(trial(0))
    assert entries(tmp_path) == ["mlflow.db"]


def test_an_experiment_that_another_process_makes_meanwhile_is_taken(uri, monkeypatch):
    opened(uri)
    whole = MlflowClient.get_experiment_by_name
    looks = []

    def late(client: MlflowClient, name: str) -> object:
        looks.append(name)
        # The first look finds none, as where both processes look before either makes it.
        return whole(client, name) if looks.count(name) > 1 else None

    monkeypatch.setattr(MlflowClient, "get_experiment_by_name", late)
    opened(uri, "other").send_trial(trial(0))
    assert len(runs(uri, "trial", "other")) == 1


def test_the_run_of_a_study_says_what_it_is(uri):
    parent = parent_of(uri)
    assert parent.info.run_name == "digits-first · cpu · val/error<=0.1"
    ran = {"target": "val/error <= 0.1", "device": "cpu", "git_commit": "0123abc"}
    assert parent.data.params == {"study": "digits-first", "workload": "digits", **ran}
    expected = {"bstune.study_id": STUDY, "bstune.workload": "digits", "bstune.metric": "val/error"}
    expected |= {"mlflow.source.git.commit": "0123abc", "bstune.version.torch": "2.13.0"}
    assert expected.items() <= parent.data.tags.items()
    (used,) = parent.inputs.dataset_inputs
    assert (used.dataset.name, json.loads(used.dataset.profile)["train_examples"]) == (
        "digits",
        1000,
    )


def test_parameters_are_a_composed_studys_main_ones_without_its_secrets(uri):
    options = options_of("workload=digits", "+workload.data.token=s3cret-word", "device=cpu")
    opened(uri, "composed", options)
    parent = parent_of(uri, "composed")
    params = parent.data.params
    (used,) = parent.inputs.dataset_inputs
    # The main options alone: a study has far more.
    assert 14 <= len(params) <= 18
    main = {
        "workload": "digits",
        "objective": "time",
        "scaling": "sqrt",
        "sampler": "FrontierSampler",
        "trials": "64",
    }
    assert main.items() <= params.items()
    # A workload's arguments reach a data set's source, which may hold secrets.
    assert "load_digits" in used.dataset.source
    assert "s3cret" not in f"{params} {used.dataset.source}"


def test_names_keep_to_the_limits_of_mlflow(uri):
    options = with_option(OPTIONS, "study", "x" * 7000)
    opened(uri, "long", with_option(options, "workload.name", "ü <b>/:"))
    parent = parent_of(uri, "long")
    # MLflow takes 250 characters of a name, and 6,000 of a parameter.
    assert len(parent.info.run_name) == 250
    assert parent.data.params["workload"] == "ü <b>/:"
    assert len(parent.data.params["study"]) == 6000


def test_trial_is_readable_back(uri, monkeypatch):
    tracking = opened(uri)
    with monkeypatch.context() as patch:
        # The end of a trial is the moment at which it is sent.
        patch.setattr("bstune.tracking.runs.time.time", lambda: 1_700_000_000.0)
        tracking.send_trial(trial(3, hyperparameters={"momentum": 0.9}, wall_seconds=4.0))
    (child,) = runs(uri, "trial")
    params = {
        "batch_size": "256",
        "lr": "0.1",
        "delta": "0.0",
        "seed": "1",
        "trial_index": "3",
        "momentum": "0.9",
    }
    assert child.data.params == params
    metrics = {
        "steps": 100,
        "steps_low": 95,
        # make_result keeps the examples of 100 steps of 32, whatever batch size a test states.
        "examples": 3200,
        "seconds_per_step": 0.01,
        "val/error": 0.09,
    }
    metrics |= {
        "train_seconds": 1.0,
        "eval_seconds": 0.1,
        "startup_seconds": 0.2,
        "wall_seconds": 4.0,
    }
    # 100 steps of 0.01 s each.
    metrics |= {"steps_to_target": 100, "time_to_target": 1.0, "examples_to_target": 3200}
    assert child.data.metrics == metrics
    assert points(uri, child, "val/error") == HISTORY
    # It began its wall_seconds before it ended: 4 s, in milliseconds.
    assert (child.info.start_time, child.info.end_time) == (1_699_999_996_000, 1_700_000_000_000)
    tags = {
        "mlflow.parentRunId": parent_of(uri).info.run_id,
        "bstune.trials": "3",
        "bstune.version.torch": "2.13.0",
    }
    assert tags.items() <= child.data.tags.items()


def test_the_noise_scale_is_sent_over_steps_as_a_moving_estimate(uri):
    measured = []
    for i in range(1, 81):
        # The trace doubles at the 70th measurement: the estimate has to move.
        measured.append((32 * i, 1.0 + 0.1 * (-1) ** i, 100.0 * (1 + i // 70)))
    measured = tuple(measured)
    opened(uri).send_trial(trial(0, noise_scale=measured))
    (child,) = runs(uri, "trial")
    for end in ("", "_low", "_high"):
        name = end[1:] or "noise_scale"
        sent = []
        for so_far, (step, _, _) in enumerate(measured, 1):
            value = getattr(moving_estimate(measured[:so_far]), name)
            if value is not None:
                sent.append((step, pytest.approx(value)))
        # It is undetermined at first.
        assert 3 < len(sent) < 80
        assert points(uri, child, f"noise_scale{end}") == sent


def test_status_and_relations_of_trials(uri):
    tracking = opened(uri)
    changes = (
        {"status": "failed", "message": "m" * 9000},
        {"status": "stopped"},
        {"replicate_of": 2},
    )
    for number, change in enumerate(changes):
        tracking.send_trial(trial(number, **change))
    children = runs(uri, "trial")
    assert [run.data.params.get("replicate_of") for run in children] == [None, None, "2"]
    assert ends_of(children) == ["FAILED", "FINISHED", "FINISHED"]
    assert tags_of(children, "bstune.status") == ["failed", "stopped", "reached"]
    # MLflow takes 5,000 characters of a tag.
    assert [len(run.data.tags.get("bstune.message", "")) for run in children] == [5000, 0, 0]
    # A stopped trial has only a bound, and what failed has nothing.
    for name in ("steps_to_target", "time_to_target"):
        assert [name in run.data.metrics for run in children] == [False, False, True]


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({}, "B 32 · lr 0.1 · reached 100 steps"),
        ({"status": "stopped", "steps": 12345}, "B 32 · lr 0.1 · stopped at 12,345 steps"),
        ({"status": "diverged"}, "B 32 · lr 0.1 · diverged at 100 steps"),
        ({"status": "out of memory"}, "B 32 · lr 0.1 · out of memory"),
        ({"status": "failed"}, "B 32 · lr 0.1 · failed"),
        ({"replicate_of": 0}, "B 32 · lr 0.1 · fresh seed · reached 100 steps"),
    ],
)
def test_names_of_trials(changes, name):
    assert trial_name(trial(0, **changes)) == name


# These are the parts of a trial that is stopped twice and continued.
PARTS = [
    {
        "status": "stopped",
        "steps": 50,
        "steps_low": 50,
        "history": HISTORY[:1],
        "wall_seconds": 2.0,
    },
    {
        "status": "stopped",
        "steps": 95,
        "steps_low": 95,
        "history": HISTORY[:2],
        "wall_seconds": 3.0,
    },
    {"wall_seconds": 4.0},
]


def parts() -> list[TrialResult]:
    # Each part continues the one before it.
    chain = [None, 0, 1]
    return [trial(n, batch_size=32, resumed_from=chain[n], **part) for n, part in enumerate(PARTS)]


def test_a_continued_trial_goes_on_in_one_run(uri):
    tracking = opened(uri)
    for part in parts():
        tracking.send_trial(part)
    assert tracking.sent == {0, 1, 2}
    (run,) = runs(uri, "trial")
    assert (run.info.run_name, run.data.tags["bstune.trials"]) == (
        "B 32 · lr 0.1 · reached 100 steps",
        "0 1 2",
    )
    assert points(uri, run, "val/error") == HISTORY
    assert (
        run.data.metrics.items()
        >= {"steps": 100, "wall_seconds": 9.0, "time_to_target": 1.0}.items()
    )
    # Wall seconds of the parts: 2 + 3 + 4.
    # The run began when the first part did.
    assert run.info.end_time - run.info.start_time == 9000
    assert run.data.tags["bstune.status"] == "reached"
    assert opened(uri).sent == {0, 1, 2}


def test_a_continuation_that_failed_has_a_run_of_its_own(uri):
    # Part 1 failed, so part 2 continues part 0.
    first, again, last = parts()
    tracking = opened(uri)
    for one in (first, replace(again, status="failed"), replace(last, resumed_from=0)):
        tracking.send_trial(one)
    found = runs(uri, "trial")
    assert tags_of(found, "bstune.trials") == ["0 2", "1"]
    assert ends_of(found) == ["FINISHED", "FAILED"]


@pytest.mark.parametrize("method", ["log_batch", "set_terminated", "set_tag"])
def test_a_continuation_half_sent_is_sent_again_and_stands_once(uri, method, monkeypatch, caplog):
    tracking = opened(uri)
    tracking.send_trial(parts()[0])
    with monkeypatch.context() as patch:
        break_method(patch, method)
        tracking.send_trial(parts()[1])
    assert "could not send trial 1 (OSError: the line was cut)" in caplog.text
    again = opened(uri)
    assert again.sent == {0}
    # The next run sends the first part again, too, which must change nothing.
    for part in parts():
        again.send_trial(part)
    (run,) = runs(uri, "trial")
    assert points(uri, run, "val/error") == HISTORY
    # One value a part, at MLflow's step 0: a run's metric is its last value.
    assert sorted(points(uri, run, "steps")) == [(0, 50.0), (0, 95.0), (0, 100.0)]
    assert run.data.metrics["steps"] == 100.0


# A diverged trial's record has such values; MLflow would refuse the whole request.
def test_what_does_not_exist_is_left_out_of_a_history_longer_than_one_request(uri):
    # A request holds 1,000 metrics.
    history = [(step, 1 / (step + 1)) for step in range(2500)]
    unknown = ((2500, None), (2501, math.nan), (2502, math.inf))
    missing = {"delta": None, "seconds_per_step": None, "train_seconds": math.nan}
    opened(uri).send_trial(trial(0, status="diverged", history=(*history, *unknown), **missing))
    (child,) = runs(uri, "trial")
    assert not missing.keys() & {*child.data.params, *child.data.metrics}
    assert points(uri, child, "val/error") == history


def test_next_run_sends_what_is_missing(uri):
    first = opened(uri)
    first.send_trial(trial(0))
    # Sent twice, a trial stands once.
    first.send_trial(trial(0))
    second = opened(uri)
    assert second.sent == {0}
    # The next run offers every trial, and sends the two that are missing.
    for number in (0, 1, 2):
        second.send_trial(trial(number))
    assert second.sent == {0, 1, 2}
    sent = runs(uri, "trial", view=ViewType.ALL)
    # What was deleted would be seen here, too.
    assert tags_of(sent, "bstune.trials") == ["0", "1", "2"]
    assert len(runs(uri, "study", view=ViewType.ALL)) == 1
    # Studies do not mix.
    other = opened(uri, "other")
    assert other.sent == set()
    other.send_trial(trial(0))
    assert len(runs(uri, "trial", STUDY)) == 3
    assert len(runs(uri, "trial", "other")) == 1


@pytest.mark.parametrize("method", ["create_run", "log_batch", "set_terminated"])
def test_trial_half_sent_is_sent_again_once(uri, method, monkeypatch, caplog):
    tracking = opened(uri)
    # After the first failure nothing more is sent by this run, so that trials 1 and 2 stay away.
    with monkeypatch.context() as patch:
        break_method(patch, method)
        tracking.send_trial(trial(0))
        tracking.send_trial(trial(1))
    # The line is whole again, and yet this run sends nothing: it has given up.
    tracking.send_trial(trial(2))
    assert caplog.messages == [
        (
            "MLflow: could not send trial 0 (OSError: the line was cut). "
            "The next run of the same command sends what is missing, if MLflow answers by then."
        )
    ]
    again = opened(uri)
    # A run that was cut short counts as nothing.
    assert again.sent == set()
    again.send_trial(trial(0))
    (child,) = runs(uri, "trial")
    assert child.info.status == "FINISHED"
    assert points(uri, child, "val/error") == HISTORY


def test_a_request_that_was_repeated_leaves_nothing_twice(uri, monkeypatch):
    """The client repeats what is answered late, and the server has done it twice."""
    tracking = opened(uri)
    whole = MlflowClient.create_run
    monkeypatch.setattr(
        MlflowClient, "create_run", lambda *a, **k: (whole(*a, **k), whole(*a, **k))[1]
    )
    tracking.send_trial(trial(0))
    # Both are there for now, and one of them will never end.
    assert len(runs(uri, "trial")) == 2
    finish(tracking)
    assert ends_of(runs(uri, "trial")) == ["FINISHED"]


# Two of three fresh seeds reached the target, so the interval has no upper end.
FRESH = make_confirmed(2, time_low=0.9, time_high=None, steps_low=90.0, steps_high=None)
POINTS = (
    make_trial(0, 32, steps=1000, tau=0.002),
    # The fewest steps at 64 come from a trial whose step was never timed.
    make_trial(1, 64, steps=512, tau=None),
    make_trial(2, 64, steps=600, tau=0.005),
    make_trial(3, 128, status="stopped"),
)
GAIN = Gain(
    ratio=2.4,
    low=1.7,
    # Metrics are shown with six digits, which makes 3.4 of it.
    high=3.39999999,
    level=0.9,
    merit="time",
    seeds=3,
    baseline_seeds=3,
    winner_seeds=3,
    at_least=False,
)
WON = result_of([make_trial(0, 32, 0.1, steps=100)])
SUMMARY = changed(
    WON,
    best_by_time=changed(WON.best_by_time, confirmed=FRESH),
    critical_batch_size=hand_critical(181.5, 90.0, None),
    gain=GAIN,
    test={"best_by_time": {"test/error": 0.1, "other": 2.0}},
    points=tuple(map(curve_point, POINTS)),
    # The curve's batch size 64.4 lies between integers: a metric's step has to be one.
    curve=make_curve((32.0, 64.4), (990.0, 600.0), seconds_per_step=(0.5, 0.7)),
)
UNREACHED = result_of([])


def finish(tracking: Tracking, summary: StudyResult = SUMMARY) -> None:
    with pytest.MonkeyPatch.context() as patch:
        # The block of text is another test's; this one holds what Markdown would take for its own.
        patch.setattr("bstune.tracking.runs.answer", lambda summary: None)
        patch.setattr(
            "bstune.tracking.runs.console_rows",
            lambda answer: ["USE  batch size 32 ```", "", "<b>"],
        )
        tracking.finish_study(summary, [Path(__file__)])


def test_results_are_metrics_of_the_study(uri):
    tracking = opened(uri)
    tracking.send_trial(trial(0))
    finish(tracking)
    parent = parent_of(uri)
    # At 64 the fewest steps are trial 1's, but only trial 2's were timed: 600 x 0.005 s.
    assert points(uri, parent, "curve/steps_to_target") == [(32, 1000.0), (64, 512.0)]
    assert points(uri, parent, "curve/time_to_target") == [(32, 2.0), (64, 3.0)]
    # The fit's seconds are 990 x 0.5 and 600 x 0.7, its examples 32 x 990 and 64 x 600.
    assert points(uri, parent, "curve/steps_to_target_fit") == [(32, 990.0), (64, 600.0)]
    assert points(uri, parent, "curve/time_to_target_fit") == [(32, 495.0), (64, 420.0)]
    assert points(uri, parent, "curve/examples_to_target_fit") == [(32, 31680.0), (64, 38400.0)]
    others = dict(parent.data.metrics)
    for name in parent.data.metrics:
        if name.startswith("curve/"):
            del others[name]
    assert others == {
        "gain/ratio": 2.4,
        "gain/low": 1.7,
        "gain/high": 3.4,
        "critical_batch_size/value": 181.5,
        "critical_batch_size/low": 90.0,
        "best/batch_size": 32,
        "best/lr": 0.1,
        "best/steps": 100,
        "best/seconds": 1.0,
        "best/seconds_low": 0.9,
        "best/reached_of_n": 0.666667,
        "test/error": 0.1,
        "test/other": 2.0,
    }
    assert parent.info.status == "FINISHED"
    (file,) = MlflowClient(uri).list_artifacts(parent.info.run_id)
    assert file.path == "test_tracking.py"


def test_a_gain_that_is_the_least_it_can_be_has_no_interval(uri):
    tracking = opened(uri)
    least = changed(GAIN, low=None, high=None, seeds=0, at_least=True)
    finish(tracking, changed(SUMMARY, gain=least))
    metrics = parent_of(uri).data.metrics
    assert {name for name in metrics if name.startswith("gain/")} == {"gain/ratio"}


def test_a_study_that_never_reached_the_target_has_no_metrics(uri):
    tracking = opened(uri)
    tracking.send_trial(trial(0, status="stopped"))
    finish(tracking, UNREACHED)
    parent = parent_of(uri)
    assert (parent.data.metrics, parent.info.status) == ({}, "FINISHED")


def test_the_note_is_the_answer_as_text_with_the_figure_and_a_link_to_the_trials(uri):
    tracking = opened(uri)
    finish(tracking)
    written = parent_of(uri).data.tags["mlflow.note.content"]
    # Four backticks, as the text has three of its own.
    assert written.startswith("````text\nUSE  batch size 32 ```\n\n<b>\n````\n\n[")
    assert linked(written) == [
        f"{runs_page('2')}&searchFilter=tags.%60bstune.study_id%60%20%3D%20%27{STUDY}%27",
        tracking.opening_lines[-1].removeprefix("http://127.0.0.1:5000/"),
    ]
    # What is too long is cut in the answer, so that figure and links always stay.
    shown = study_note("n" * 9000, "abc", "a b.png", "#/x", "#/y")
    assert len(shown) <= 5000
    assert linked(shown) == ["get-artifact?path=a+b.png&run_uuid=abc", "#/x", "#/y"]


def linked(markdown: str) -> list[str]:
    return re.findall(r"\]\(([^)]*)\)", markdown)


def test_an_experiment_links_to_its_pages_of_runs_unless_someone_described_it(uri):
    client = MlflowClient(uri)
    studies = client.get_experiment_by_name(EXPERIMENTS["study"])
    trials = client.get_experiment_by_name(EXPERIMENTS["trial"])
    written = studies.tags["mlflow.note.content"]
    assert trials.tags["mlflow.note.content"] == written
    pages = linked(written)
    begin = [runs_page(studies.experiment_id)] * 2 + [runs_page(trials.experiment_id)]
    assert [page.partition("&")[0] for page in pages] == begin
    client.set_experiment_tag(studies.experiment_id, "mlflow.note.content", "somebody's own")
    opened(uri)
    kept = client.get_experiment(studies.experiment_id).tags
    assert kept["mlflow.note.content"] == "somebody's own"


def view_state(uri: str, kind: str) -> dict[str, object]:
    tags = MlflowClient(uri).get_experiment_by_name(EXPERIMENTS[kind]).tags
    packed = json.loads(tags[VIEW])["state"].removeprefix("deflate;")
    return json.loads(zlib.decompress(base64.b64decode(packed)))


@pytest.mark.parametrize("kind", EXPERIMENTS)
def test_the_columns_of_a_saved_view_are_what_runs_have(uri, kind):
    tracking = opened(uri)
    tracking.send_trial(trial(0))
    finish(tracking)
    state = view_state(uri, kind)
    assert state["searchFilter"] == f"tags.`bstune.kind` = '{kind}'"
    (run,) = runs(uri, kind)
    fields = {"metrics": run.data.metrics, "params": run.data.params, "tags": run.data.tags}
    missing = set()
    # A column is written as metrics.`name`.
    for shown in state["selectedColumns"]:
        field, name = shown.split("`")[:2]
        of_run = fields.get(field.rstrip("."))
        if of_run is not None and name not in of_run:
            missing.add(name)
    # The interval is open at these ends, in this study.
    assert (
        missing
        == {
            "study": {"critical_batch_size/high", "best/seconds_high"},
            "trial": set(),
        }[kind]
    )


def test_the_saved_view_is_of_no_later_version_than_it_was_tried_with(uri):
    """A later one: look at the address that a study prints, then at tests/test_browser.py."""
    # The format is MLflow's own and nowhere documented, so a new version has to be looked at.
    assert [*map(int, mlflow.__version__.split(".")[:3])] <= [3, 17, 2]
    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name("bstune")
    assert isinstance(json.loads(experiment.tags[VIEW])["createdAt"], int)
    # What MLflow's own dialogue refuses to save.
    assert len(experiment.tags[VIEW]) < 20_000
    state = view_state(uri, "study")
    charts = state["compareRunCharts"]
    # Both axes are logarithmic, so that a power law is a straight line.
    for chart in charts:
        if chart["type"] == "LINE":
            assert (chart["xAxisScaleType"], chart["scaleType"]) == ("log", "log")
    assert "LINE" in column(charts, "type")
    sections = column(state["compareRunSections"], "uuid")
    # MLflow shows no chart whose section is missing.
    assert set(column(charts, "metricSectionId")) == set(sections)
    assert len(set(column(charts, "uuid"))) == len(charts)
    client.set_experiment_tag(experiment.experiment_id, VIEW, "somebody's own")
    opened(uri)
    assert client.get_experiment_by_name("bstune").tags[VIEW] == "somebody's own"


def test_the_saved_view_shows_the_winner_first_and_has_a_chart_or_none_for_each_metric(uri):
    tracking = opened(uri)
    finish(tracking)
    state = view_state(uri, "study")
    winner = ["best/batch_size", "best/lr", "best/seconds", "gain/ratio", "gain/low", "gain/high"]
    winner += [
        "critical_batch_size/value",
        "critical_batch_size/low",
        "critical_batch_size/high",
    ]
    assert state["selectedColumns"][:9] == [f"metrics.`{name}`" for name in winner]
    # MLflow adds a chart of its own for a metric that is no chart's key.
    charted = column(state["compareRunCharts"], "metricKey")
    for name in parent_of(uri).data.metrics:
        assert name in charted or name.startswith("test/")


def colour_of(uri: str, study: str) -> str:
    return parent_of(uri, study).data.tags["mlflow.runColor"]


@pytest.mark.slow
def test_each_study_has_a_colour_of_its_own_which_a_user_may_change(uri, monkeypatch):
    few = PALETTE[:4]
    monkeypatch.setattr("bstune.tracking.colours.PALETTE", few)
    names = [f"study-{i}" for i in range(len(few) - 1)]
    for name in names:
        opened(uri, name)
    given = [colour_of(uri, STUDY)]
    given += [colour_of(uri, name) for name in names]
    assert given == list(few)
    MlflowClient(uri).set_tag(parent_of(uri, names[0]).info.run_id, "mlflow.runColor", "#123456")
    again = opened(uri, names[0])
    again.send_trial(trial(0))
    finish(again)
    again.send_trial(trial(1))
    finish(opened(uri, names[0]))
    assert colour_of(uri, names[0]) == "#123456"
    # Its first colour is free again; after that they repeat, the one that was given first first.
    opened(uri, "free")
    opened(uri, "repeats")
    assert colour_of(uri, "free") == few[1]
    assert colour_of(uri, "repeats") == few[0]


def test_studies_that_begin_at_one_moment_part_their_colours_when_they_end(uri, monkeypatch):
    # Neither sees the other when it chooses, so both begin with the first colour.
    with monkeypatch.context() as patch:
        patch.setattr(Tracking, "_other_studies", lambda _: [])
        trackings = (opened(uri, "first"), opened(uri, "second"))
    for tracking in trackings:
        finish(tracking)
    colours = {colour_of(uri, STUDY), colour_of(uri, "first"), colour_of(uri, "second")}
    assert len(colours) == 3


def test_the_results_of_a_continued_study_are_written_anew(uri):
    tracking = opened(uri)
    tracking.send_trial(trial(0))
    finish(tracking)
    # Nothing is new: nothing is sent.
    finish(tracking)
    old = parent_of(uri)
    assert len(points(uri, old, "curve/steps_to_target")) == 2
    # A larger limit of trials is what continues a study, and is a new parameter.
    two_trials = with_option(OPTIONS, "search", SearchOptions.model_construct(trials=2))
    tracking = opened(uri, options=two_trials)
    tracking.send_trial(trial(1))
    finish(tracking)
    new = parent_of(uri)
    assert new.info.run_id != old.info.run_id
    assert new.data.params == {**old.data.params, "trials": "2"}
    assert new.data.tags["bstune.result_trials"] == "2"
    parents = tags_of(runs(uri, "trial"), "mlflow.parentRunId")
    assert parents == [new.info.run_id] * 2
    assert len(points(uri, new, "curve/steps_to_target")) == 2
    # With as many trials as before nothing is written anew.
    finish(opened(uri))
    assert parent_of(uri).info.run_id == new.info.run_id


# Where sending the results of a continued study may be cut: the client's method, and its call.
# Only the first two are run always.
CUTS = [
    ("log_artifact", 0),
    ("set_tag", 3),
    # At this one not all children have moved. A slow server cuts, below, at every request.
    ("set_tag", 1),
    ("set_terminated", 0),
    ("create_run", 0),
]


@pytest.mark.parametrize(
    ("method", "calls_before"),
    [*CUTS[:2], *(pytest.param(*cut, marks=pytest.mark.slow) for cut in CUTS[2:])],
)
def test_results_half_sent_are_sent_again_whole(uri, method, calls_before, monkeypatch):
    tracking = opened(uri)
    tracking.send_trial(trial(0))
    finish(tracking)
    tracking.send_trial(trial(1))
    with monkeypatch.context() as patch:
        break_method(patch, method, calls_before)
        finish(tracking)
    finish(opened(uri))
    parent = parent_of(uri)
    assert len(points(uri, parent, "curve/steps_to_target")) == 2
    assert parent.data.tags["bstune.result_trials"] == "2"
    parents = tags_of(runs(uri, "trial"), "mlflow.parentRunId")
    assert set(parents) == {parent.info.run_id}


@pytest.mark.parametrize(
    ("listens", "limits", "reason"),
    [
        # The server takes the connection and never answers: one request gives up, after a second.
        pytest.param(
            *(True, {"request_seconds": 1, "study_seconds": 600.0}, "timeout"),
            marks=pytest.mark.soak,
        ),
        # The limit of all waits of a run ends it before the request's own.
        (True, {"request_seconds": 3, "study_seconds": 0.05}, "no answer within 0.05 s"),
        # Nothing listens any more, so the connection is refused.
        (False, {"retries": 1}, "MlflowException: "),
    ],
)
def test_server_that_is_silent_or_down_ends_sending_with_one_line(
    listens, limits, reason, caplog, capfd
):
    with socket.create_server(("127.0.0.1", 0)) as server:
        uri = f"http://me:secret@127.0.0.1:{server.getsockname()[1]}"
        if not listens:
            server.close()
        with filtered():
            tracking = opened(uri, **limits)
            tracking.send_trial(trial(0))
            finish(tracking)
    (warning,) = caplog.messages
    assert warning.startswith("MLflow: could not open the study (")
    assert reason in warning
    assert "secret" not in warning
    assert capfd.readouterr() == ("", "")


def test_locked_database_ends_sending_at_the_limit_of_a_trial(uri, caplog, capfd):
    tracking = opened(uri, seconds=0.05)
    with contextlib.closing(
        sqlite3.connect(uri.removeprefix("sqlite:///"), isolation_level=None)
    ) as lock:
        # Another process holds the database for longer than a trial's limit.
        lock.execute("BEGIN EXCLUSIVE")
        tracking.send_trial(trial(0))
        tracking.send_trial(trial(1))
    # The first trial's failure ends sending, so the second one adds no line.
    (message,) = caplog.messages
    assert "no answer within 0.05 s" in message
    assert capfd.readouterr() == ("", "")


def test_all_waits_of_a_run_take_the_seconds_of_the_study_at_most(uri, monkeypatch, caplog):
    tracking = opened(uri, study_seconds=60.0)
    # Of 60 seconds two trials take 50. The third takes all that is left, and the fourth has 0.
    time = FakeTime()
    tracking._exchanges = Exchanges(tracking._settings, time)
    whole = MlflowClient.create_run

    def slow(*args: object, **kwargs: object) -> object:
        time.sleep(25.0)
        return whole(*args, **kwargs)

    monkeypatch.setattr(MlflowClient, "create_run", slow)
    for number in range(5):
        tracking.send_trial(trial(number))
    assert len(tracking.sent) == 3
    (warning,) = caplog.messages
    assert (
        "could not send trial 3 (no answer within 0 s, what was left of mlflow.study_seconds=60)"
        in warning
    )
    # The results are not tried any more, and add no warning.
    finish(tracking)
    assert len(caplog.messages) == 1


def small_study(uri: str, **limits: float) -> None:
    """What the command does: open the study, send its trials, then its results."""
    tracking = opened(uri, "slow", **limits)
    for number in range(2):
        tracking.send_trial(trial(number))
    finish(tracking)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("late", "every"),
    [
        *(pytest.param(one, 1, marks=pytest.mark.soak) for one in ("never", "at the end")),
        pytest.param("after the next run", 1, marks=pytest.mark.soak),
        ("after the next run", 5),
    ],
)
def test_what_a_slow_server_missed_is_sent_by_the_next_run(uri, late, every, monkeypatch, caplog):
    """Whichever request (each ``every``-th) it is slow at, and whether it answers it later or not at all."""
    # By their names: all of the client's methods that send a request.
    requesting = ("get_", "create_", "set_", "log_", "search_", "del")
    methods = [name for name in vars(MlflowClient) if name.startswith(requesting)]
    # Each round is slow at a later request, until a study has fewer requests than that.
    for slow_at in count(1, every):
        requests = []
        hangs = threading.Event()
        go_on = threading.Event()

        class Thread(threading.Thread):
            """One that nobody waits for once its request hangs."""

            def join(self, timeout: float | None = None, hangs: threading.Event = hangs) -> None:
                while self.is_alive() and not (timeout and hangs.is_set()):
                    super().join(0.005)

        def counted(method, whole, now=(requests, hangs, go_on), slow_at=slow_at):
            requests, hangs, go_on = now

            def request(*args: object, **kwargs: object) -> object:
                if threading.current_thread().name != "bstune-mlflow":
                    return whole(*args, **kwargs)
                requests.append(method)
                if len(requests) == slow_at:
                    hangs.set()
                    go_on.wait()
                    if late == "never":
                        raise OSError("the process has ended")
                done = whole(*args, **kwargs)
                if len(requests) == slow_at and late == "after the next run":
                    # Only the server went on, with this one request.
                    raise OSError("the process has ended")
                return done

            return request

        target = uri.replace("mlflow.db", f"{slow_at}.db")
        shutil.copy(uri.removeprefix("sqlite:///"), target.removeprefix("sqlite:///"))
        with monkeypatch.context() as patch:
            for method in methods:
                patch.setattr(MlflowClient, method, counted(method, getattr(MlflowClient, method)))
            patch.setattr("bstune.tracking.exchange.threading.Thread", Thread)
            small_study(target)
        if not hangs.is_set():
            break
        if late != "after the next run":
            go_on.set()
            _join_senders()
        # The next run, while the slow request may still be under way.
        small_study(target)
        go_on.set()
        _join_senders()
        if late == "after the next run":
            small_study(target)
        parent = parent_of(target, "slow")
        children = runs(target, "trial", "slow")
        assert tags_of(children, "bstune.trials") == ["0", "1"]
        assert ends_of(children) == ["FINISHED"] * 2
        for child in children:
            assert child.data.tags["mlflow.parentRunId"] == parent.info.run_id
            assert points(target, child, "val/error") == HISTORY
        assert (parent.data.tags["bstune.result_trials"], parent.info.status) == ("2", "FINISHED")
        assert len(points(target, parent, "curve/steps_to_target")) == 2
    # Fewer requests would mean that the methods above are not those that are used any more.
    assert slow_at > 15
    # One warning for each request that it was slow at.
    assert len(caplog.messages) == (slow_at - 1) // every


def test_unforeseen_error_ends_sending_too(uri, caplog, monkeypatch):
    tracking = opened(uri)
    break_method(monkeypatch, "create_run", error=ZeroDivisionError())
    tracking.send_trial(trial(0))
    (warning,) = caplog.messages
    assert "could not send trial 0 (ZeroDivisionError: )" in warning
    assert "Traceback" in warning


def test_environment_and_loggers_of_the_program_are_left_as_they_were(uri, monkeypatch, caplog):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "77")
    # The limits are set in the environment for the time of a request alone.
    before = dict(os.environ)
    inside = []
    names = ("MLFLOW_HTTP_REQUEST_TIMEOUT", "MLFLOW_HTTP_REQUEST_MAX_RETRIES")
    monkeypatch.setattr(
        MlflowClient,
        "log_batch",
        lambda *_, **__: inside.append([os.environ[name] for name in names]),
    )
    opened(uri).send_trial(trial(0))
    # The study's description and the trial's metrics are two requests.
    assert inside == [["5", "0"]] * 2
    assert dict(os.environ) == before
    # MLflow's retries are silenced in its own thread alone.
    logging.getLogger("urllib3.connectionpool").warning("the program's own")
    assert caplog.messages == ["the program's own"]
