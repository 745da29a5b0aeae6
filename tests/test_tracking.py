import contextlib
import io
import logging
import math
import os
import random
import shlex
import shutil
import socket
import sqlite3
import sys
import threading
from dataclasses import replace

import pytest
from mlflow import MlflowClient
from mlflow.entities import ViewType

from bstune.core.errors import ConfigError
from bstune.core.noise_scale import moving_estimate
from bstune.core.records import TrialResult
from bstune.study.tracking import Limits, StudyTags, Tracking, open_tracking, tracking_uri, ui_command

PYTHON = shlex.quote(sys.executable)
EXPERIMENT = "bstune"
LIMITS = Limits(request_seconds=5, retries=0, trial_seconds=60.0, study_seconds=120.0)
STUDY = StudyTags(
    study_id="0b54d07e-3f0e-4f7d-9a71-1b8d6f3a2c11",
    name="digits-first",
    workload="digits",
    metric="val/error",
    params={"workload.lr": 0.1, "search.budget": None, "data": "digits"},
    versions={"torch": "2.13.0"},
    device="cpu",
    commit="0123abc",
)
ENDED = 1_700_000_000.0


def trial(number: int, **changes: object) -> TrialResult:
    result = TrialResult(
        number=number,
        trial_index=number,
        batch_size=32 * 2**number,
        lr=0.1,
        delta=0.5,
        seed=7,
        status="reached",
        steps=100,
        steps_low=90,
        examples=3200 * 2**number,
        train_seconds=2.5,
        eval_seconds=0.5,
        startup_seconds=0.25,
        wall_seconds=4.0,
        seconds_per_step=0.02,
        device="cpu",
        versions={"torch": "2.13.0"},
        history=((0, 0.9), (50, 0.4), (100, 0.1)),
    )
    return replace(result, **changes)


@pytest.fixture(scope="session", autouse=True)
def _no_telemetry():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
        yield


@pytest.fixture(autouse=True)
def _no_thread_left():
    yield
    for thread in threading.enumerate():
        if thread.name == "bstune-mlflow":
            thread.join()


@pytest.fixture(scope="session")
def created(tmp_path_factory):
    """A database created by open_tracking, once since its migrations take seconds, and all that this printed."""
    path = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    printed = io.StringIO()
    with contextlib.redirect_stderr(printed), contextlib.redirect_stdout(printed):
        tracking = open_tracking(f"sqlite:///{path}", EXPERIMENT, STUDY, LIMITS)
    return path, printed.getvalue(), tracking.url, [entry.name for entry in path.parent.iterdir()]


@pytest.fixture
def uri(created, tmp_path):
    path = tmp_path / "mlflow.db"
    shutil.copy(created[0], path)
    return f"sqlite:///{path}"


def opened(uri: str, study: StudyTags = STUDY, limits: Limits = LIMITS) -> Tracking:
    return open_tracking(uri, EXPERIMENT, study, limits)


def runs(uri: str, kind: str, study: StudyTags = STUDY, view: int = ViewType.ACTIVE_ONLY) -> list:
    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name(EXPERIMENT)
    where = f"tags.`bstune.study_id` = '{study.study_id}' and tags.`bstune.kind` = '{kind}'"
    return sorted(
        client.search_runs([experiment.experiment_id], where, run_view_type=view),
        key=lambda run: (int(run.data.tags.get("bstune.trial", 0)), run.info.start_time),
    )


def points(uri: str, run_id: str, key: str) -> list[tuple[int, float]]:
    return [(metric.step, metric.value) for metric in MlflowClient(uri).get_metric_history(run_id, key)]


def parent_of(uri: str):
    (parent,) = [run for run in runs(uri, "study") if "bstune.superseded" not in run.data.tags]
    return parent


def warnings_of(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "bstune.study.tracking"]


def break_method(monkeypatch, method: str, calls_before: int = 0, error: Exception | None = None) -> None:
    """Let a method of the client fail from its (calls_before + 1)th call on."""
    whole = getattr(MlflowClient, method)
    made = []

    def broken(*args: object, **kwargs: object) -> object:
        made.append(args)
        if len(made) > calls_before:
            raise error or OSError("the line was cut")
        return whole(*args, **kwargs)

    monkeypatch.setattr(MlflowClient, method, broken)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, "sqlite:///{here}/mlflow.db"),
        ("", "sqlite:///{here}/mlflow.db"),
        ("sqlite:///runs/a.db", "sqlite:///{here}/runs/a.db"),
        ("sqlite:////srv/a.db", "sqlite:////srv/a.db"),
        ("http://localhost:5000", "http://localhost:5000"),
        ("postgresql://host/db", "postgresql://host/db"),
    ],
)
def test_tracking_uri(given, expected, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if given is None:
        monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    else:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", given)
    assert tracking_uri() == expected.format(here=tmp_path)


@pytest.mark.parametrize(
    ("uri", "expected"),
    [
        ("sqlite:////srv/mlflow.db", f"{PYTHON} -m mlflow ui --backend-store-uri sqlite:////srv/mlflow.db"),
        ("sqlite:////my runs/mlflow.db", f"{PYTHON} -m mlflow ui --backend-store-uri 'sqlite:////my runs/mlflow.db'"),
        ("postgresql://me:secret@host/db", f'{PYTHON} -m mlflow ui --backend-store-uri "$MLFLOW_TRACKING_URI"'),
        ("http://localhost:5000", "http://localhost:5000"),
        ("https://me:secret@host/mlflow", "https://host/mlflow"),
    ],
)
def test_ui_command(uri, expected):
    assert ui_command(uri) == expected


def test_creating_the_database_prints_nothing_and_leaves_only_the_database(created):
    path, printed, url, files = created
    assert printed == ""
    assert files == ["mlflow.db"]
    parent = parent_of(f"sqlite:///{path}").info
    assert url == f"http://127.0.0.1:5000/#/experiments/{parent.experiment_id}/runs/{parent.run_id}"


def test_artifacts_are_kept_beside_the_database(created):
    client = MlflowClient(f"sqlite:///{created[0]}")
    assert client.get_experiment_by_name(EXPERIMENT).artifact_location == str(created[0].parent / "mlruns" / "bstune")


def test_parent_holds_config_versions_device_and_commit(uri):
    opened(uri)
    parent = parent_of(uri)
    assert parent.info.run_name == "digits-first"
    assert parent.data.params == {
        "workload.lr": "0.1",
        "search.budget": "null",
        "data": "digits",
        "run.device": "cpu",
        "run.git_commit": "0123abc",
        "run.versions.torch": "2.13.0",
    }
    expected = {
        "bstune.study_id": STUDY.study_id,
        "bstune.workload": "digits",
        "bstune.metric": "val/error",
        "mlflow.source.git.commit": "0123abc",
    }
    assert expected.items() <= parent.data.tags.items()


def test_params_keep_to_the_limits_of_mlflow(uri):
    many = {f"many.{i}": i for i in range(250)}
    study = replace(STUDY, study_id="long", params={**many, "long": "x" * 7000, "list[0]": 1, "/a//b": 2, "k" * 300: 3})
    opened(uri, study)
    params = runs(uri, "study", study)[0].data.params
    assert {key: params[key] for key in many} == {key: str(value) for key, value in many.items()}
    assert len(params["long"]) == 6000
    assert params["long"].endswith("x ... (cut)")
    assert (params["list_0_"], params["a/b"], params["k" * 250]) == ("1", "2", "3")


def test_trial_is_readable_back(uri):
    opened(uri).send_trial(trial(3), ended=ENDED)
    (child,) = runs(uri, "trial")
    assert child.data.params == {"batch_size": "256", "lr": "0.1", "delta": "0.5", "seed": "7", "trial_index": "3"}
    assert child.data.metrics == {
        "steps": 100,
        "steps_low": 90,
        "examples": 25600,
        "train_seconds": 2.5,
        "eval_seconds": 0.5,
        "startup_seconds": 0.25,
        "wall_seconds": 4.0,
        "seconds_per_step": 0.02,
        "steps_to_target": 100,
        "time_to_target": 2.0,
        "examples_to_target": 25600,
        "val/error": 0.1,
    }
    assert points(uri, child.info.run_id, "val/error") == [(0, 0.9), (50, 0.4), (100, 0.1)]
    assert (child.info.start_time, child.info.end_time) == (1_699_999_996_000, 1_700_000_000_000)
    assert child.data.tags["mlflow.parentRunId"] == parent_of(uri).info.run_id
    assert child.data.tags["bstune.trial"] == "3"
    assert child.data.tags["bstune.version.torch"] == "2.13.0"


def test_the_noise_scale_is_sent_over_steps_as_a_moving_estimate(uri):
    rng = random.Random(0)
    measured = tuple((32 * i, rng.uniform(0.9, 1.1), rng.uniform(90.0, 110.0) * (1 + i // 70)) for i in range(1, 81))
    opened(uri).send_trial(trial(0, noise_scale=measured))
    (child,) = runs(uri, "trial")
    found = {end: dict(points(uri, child.info.run_id, f"noise_scale{end}")) for end in ("", "_low", "_high")}
    steps = [step for step, _, _ in measured]
    assert [sorted(values) for values in found.values()] == [steps[3:]] * 3  # the first three are undetermined
    for end, step in enumerate(steps[3:], start=4):
        estimate = moving_estimate(measured[:end])
        assert found[""][step] == pytest.approx(estimate.noise_scale)
        assert (found["_low"][step], found["_high"][step]) == (
            pytest.approx(estimate.low),
            pytest.approx(estimate.high),
        )
    assert found[""][steps[-1]] > 1.05 * found[""][steps[60]]  # it moves


def test_what_is_open_in_the_noise_scale_is_left_out(uri):
    measured = tuple((step, (-1.0) ** step, 100.0) for step in range(1, 9))
    opened(uri).send_trial(trial(0, noise_scale=measured))
    (child,) = runs(uri, "trial")
    assert not {"noise_scale", "noise_scale_high"} & set(child.data.metrics)
    assert child.data.metrics["noise_scale_low"] > 0


def test_what_a_trial_continues_or_confirms_is_among_its_parameters(uri):
    tracking = opened(uri)
    for result in (trial(0), trial(1, resumed_from=0), trial(2, replicate_of=1)):
        tracking.send_trial(result)
    relations = [
        {k: v for k, v in run.data.params.items() if k in ("resumed_from", "replicate_of")} for run in runs(uri, "trial")
    ]
    assert relations == [{}, {"resumed_from": "0"}, {"replicate_of": "1"}]


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        ("reached", "FINISHED"),
        ("censored", "FINISHED"),
        ("diverged", "FINISHED"),
        ("oom", "FINISHED"),
        ("failed", "FAILED"),
    ],
)
def test_status(uri, status, expected):
    opened(uri).send_trial(trial(0, status=status, message="m" * 9000 if status == "failed" else None))
    (child,) = runs(uri, "trial")
    assert (child.info.status, child.data.tags["bstune.status"]) == (expected, status)
    assert ("steps_to_target" in child.data.metrics) == (status == "reached")
    assert ("time_to_target" in child.data.metrics) == (status == "reached")
    assert len(child.data.tags.get("bstune.message", "")) == (5000 if status == "failed" else 0)


def test_what_does_not_exist_is_left_out(uri):
    history = ((0, 0.9), (10, None), (20, math.nan), (30, math.inf), (40, 0.5))
    result = trial(0, delta=None, seconds_per_step=None, status="diverged", train_seconds=math.nan, history=history)
    opened(uri).send_trial(result)
    (child,) = runs(uri, "trial")
    assert "delta" not in child.data.params
    assert not {"seconds_per_step", "train_seconds"} & set(child.data.metrics)
    assert points(uri, child.info.run_id, "val/error") == [(0, 0.9), (40, 0.5)]


def test_history_longer_than_one_request(uri):
    history = tuple((step, 1 / (step + 1)) for step in range(2500))
    opened(uri).send_trial(trial(0, history=history))
    (child,) = runs(uri, "trial")
    assert points(uri, child.info.run_id, "val/error") == list(history)


def test_next_run_sends_what_is_missing(uri):
    first = opened(uri)
    first.send_trial(trial(0))
    first.send_trial(trial(0))
    second = opened(uri)
    assert second.sent == {0}
    for number in (0, 1, 2):
        second.send_trial(trial(number))
    assert second.sent == {0, 1, 2}
    assert [run.data.tags["bstune.trial"] for run in runs(uri, "trial", view=ViewType.ALL)] == ["0", "1", "2"]
    assert len(runs(uri, "study", view=ViewType.ALL)) == 1


def test_studies_do_not_mix(uri):
    other = replace(STUDY, study_id="6a3b", name="other")
    opened(uri).send_trial(trial(0))
    tracking = opened(uri, other)
    assert tracking.sent == frozenset()
    tracking.send_trial(trial(0))
    assert [len(runs(uri, "trial", study)) for study in (STUDY, other)] == [1, 1]


@pytest.mark.parametrize("method", ["create_run", "log_batch", "set_terminated"])
def test_trial_half_sent_is_sent_again_once(uri, method, monkeypatch, caplog):
    tracking = opened(uri)
    with monkeypatch.context() as patch:
        break_method(patch, method)
        tracking.send_trial(trial(0))
        tracking.send_trial(trial(1))
    tracking.send_trial(trial(2))
    assert warnings_of(caplog) == [
        "MLflow: could not send trial 0 (OSError: the line was cut). "
        "The next run of the same command sends what is missing."
    ]
    assert tracking.sent == frozenset()
    assert tracking.url is None
    again = opened(uri)
    assert again.sent == frozenset()
    again.send_trial(trial(0))
    (child,) = runs(uri, "trial")
    assert child.info.status == "FINISHED"
    assert points(uri, child.info.run_id, "val/error") == [(0, 0.9), (50, 0.4), (100, 0.1)]


def test_parent_half_described_is_completed(uri, monkeypatch):
    study = replace(STUDY, study_id="half")
    with monkeypatch.context() as patch:
        break_method(patch, "log_batch")
        opened(uri, study)
    assert runs(uri, "study", study)[0].data.params == {}
    opened(uri, study)
    (parent,) = runs(uri, "study", study)
    assert parent.data.params["data"] == "digits"


CURVES = {
    "steps_to_target": [(32, 1000.0), (64, 512.0), (64, 600.0), (100, None), (128, math.nan)],
    "time_to_target": [(32, 0.0), (33, 0.25)],
}


def finish(tracking: Tracking, artifacts=()) -> None:
    tracking.finish_study(CURVES, {"b_crit": 181.5, "s_min": None}, artifacts)


def test_curve_has_batch_size_as_its_step(uri, tmp_path):
    figure = tmp_path / "curve.json"
    figure.write_text("{}")
    tracking = opened(uri)
    tracking.send_trial(trial(0))
    finish(tracking, [figure])
    parent = parent_of(uri)
    run_id = parent.info.run_id
    assert points(uri, run_id, "curve/steps_to_target") == [(32, 1000.0), (64, 512.0)]
    assert points(uri, run_id, "curve_log2/steps_to_target") == [(500, math.log2(1000)), (600, 9.0)]
    assert points(uri, run_id, "curve/time_to_target") == [(32, 0.0), (33, 0.25)]
    assert points(uri, run_id, "curve_log2/time_to_target") == [(504, -2.0)]
    assert parent.data.metrics["b_crit"] == 181.5
    assert "s_min" not in parent.data.metrics
    assert parent.info.status == "FINISHED"
    assert [file.path for file in MlflowClient(uri).list_artifacts(run_id)] == ["curve.json"]


def test_perfect_scaling_is_a_straight_line_of_slope_minus_one(uri):
    tracking = opened(uri)
    tracking.finish_study({"steps_to_target_fit": [(2**k, 2.0 ** (20 - k)) for k in range(10)]}, {}, [])
    line = points(uri, parent_of(uri).info.run_id, "curve_log2/steps_to_target_fit")
    assert line == [(100 * k, 20.0 - k) for k in range(10)]


def test_finishing_again_without_a_new_trial_does_nothing(uri):
    tracking = opened(uri)
    tracking.send_trial(trial(0))
    finish(tracking)
    finish(tracking)
    finish(opened(uri))
    assert len(runs(uri, "study", view=ViewType.ALL)) == 1
    assert len(points(uri, parent_of(uri).info.run_id, "curve/steps_to_target")) == 2


def test_continued_study_supersedes_its_parent(uri):
    tracking = opened(uri)
    tracking.send_trial(trial(0))
    finish(tracking)
    old = parent_of(uri).info.run_id
    tracking = opened(uri)
    tracking.send_trial(trial(1))
    finish(tracking)
    new = parent_of(uri)
    tags = MlflowClient(uri).get_run(old).data.tags
    assert (tags["bstune.superseded"], tags["bstune.superseded_by"]) == ("true", new.info.run_id)
    assert new.data.params["data"] == "digits"
    assert new.data.tags["bstune.curve_trials"] == "2"
    assert {run.data.tags["mlflow.parentRunId"] for run in runs(uri, "trial")} == {new.info.run_id}
    for run_id in (old, new.info.run_id):
        assert len(points(uri, run_id, "curve/steps_to_target")) == 2
    finish(opened(uri))
    assert len(runs(uri, "study", view=ViewType.ALL)) == 2


@pytest.mark.slow
@pytest.mark.parametrize("continued", [False, True], ids=["first", "continued"])
@pytest.mark.parametrize(
    ("method", "calls_before"),
    [("log_batch", 0), ("log_batch", 1), ("log_artifact", 0), ("set_terminated", 0), ("set_tag", 1)],
)
def test_curve_half_sent_is_sent_again_once(uri, continued, method, calls_before, tmp_path, monkeypatch):
    figure = tmp_path / "curve.json"
    figure.write_text("{}")
    tracking = opened(uri)
    tracking.send_trial(trial(0))
    if continued:
        finish(tracking)
        tracking.send_trial(trial(1))
    with monkeypatch.context() as patch:
        break_method(patch, method, calls_before)
        finish(tracking, [figure])
    finish(opened(uri), [figure])
    parent = parent_of(uri)
    assert len(points(uri, parent.info.run_id, "curve/steps_to_target")) == 2
    assert parent.data.tags["bstune.curve_trials"] == ("2" if continued else "1")
    assert {run.data.tags["mlflow.parentRunId"] for run in runs(uri, "trial")} == {parent.info.run_id}
    assert len(runs(uri, "study")) == (2 if continued else 1)


@pytest.fixture
def silent_server():
    """A server that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture
def refusing_server():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    return f"http://me:secret@127.0.0.1:{port}"


def test_server_that_never_answers_ends_sending_at_the_limit_of_a_request(silent_server, caplog):
    limits = replace(LIMITS, request_seconds=1, study_seconds=600.0)
    assert opened(silent_server, limits=limits).url is None
    (warning,) = warnings_of(caplog)
    assert "could not open the study (MlflowException:" in warning
    assert "timeout" in warning


def test_server_that_never_answers_ends_sending_at_the_limit_of_a_study(silent_server, caplog):
    limits = replace(LIMITS, request_seconds=3, study_seconds=0.05)
    tracking = opened(silent_server, limits=limits)
    tracking.send_trial(trial(0))
    finish(tracking)
    assert ["no answer within 0.05 s" in warning for warning in warnings_of(caplog)] == [True]


def test_server_that_is_down_ends_sending_with_one_line(refusing_server, caplog, capfd):
    tracking = opened(refusing_server, limits=replace(LIMITS, retries=1))
    tracking.send_trial(trial(0))
    finish(tracking)
    (warning,) = warnings_of(caplog)
    assert "could not open the study (MlflowException:" in warning
    assert "secret" not in warning
    assert [record.name for record in caplog.records] == ["bstune.study.tracking"]
    assert capfd.readouterr() == ("", "")


def test_locked_database_ends_sending_at_the_limit_of_a_trial(uri, caplog, capfd):
    tracking = opened(uri, limits=replace(LIMITS, trial_seconds=0.05))
    with contextlib.closing(sqlite3.connect(uri.removeprefix("sqlite:///"), isolation_level=None)) as lock:
        lock.execute("BEGIN EXCLUSIVE")
        tracking.send_trial(trial(0))
        tracking.send_trial(trial(1))
    assert ["no answer within 0.05 s" in warning for warning in warnings_of(caplog)] == [True]
    assert capfd.readouterr() == ("", "")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_unforeseen_error_ends_sending_too(uri, caplog, monkeypatch):
    tracking = opened(uri)
    break_method(monkeypatch, "create_run", error=ZeroDivisionError())
    tracking.send_trial(trial(0))
    assert ["unexpected error" in warning for warning in warnings_of(caplog)] == [True]


def test_unknown_kind_of_uri():
    with pytest.raises(
        ConfigError, match=r"MLFLOW_TRACKING_URI or mlflow.uri must be the http address .* but got 'ftp://host'"
    ):
        opened("ftp://host")


def test_environment_and_loggers_of_the_program_are_left_as_they_were(uri, monkeypatch):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "77")
    monkeypatch.delenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", raising=False)
    before = dict(os.environ)
    filters = list(logging.getLogger("urllib3.connectionpool").filters)
    inside = []
    whole = MlflowClient.create_run

    def watched(*args: object, **kwargs: object) -> object:
        inside.append((os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"], os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"]))
        return whole(*args, **kwargs)

    monkeypatch.setattr(MlflowClient, "create_run", watched)
    tracking = opened(uri)
    tracking.send_trial(trial(0))
    assert inside == [("5", "0")]
    assert dict(os.environ) == before
    assert logging.getLogger("urllib3.connectionpool").filters == filters
