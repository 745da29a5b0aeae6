import base64
import io
import json
import os
import socket
import time
import zlib
from contextlib import redirect_stderr, redirect_stdout

import pytest
from mlflow import MlflowClient
from results import BEST, records, result

from bstune.report.page import page
from bstune.system.files import StudyFolder, write_text
from bstune.tracking import view
from bstune.tracking.mlflow import log_study, log_weights

# A further value may have the name of one of the answer's.
STUDY = result(best=BEST.model_copy(update={"values": {"steps": 7}}))
RECORDS = records()


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The folder of a database that logging has made, and what was printed meanwhile."""
    outputs = tmp_path_factory.mktemp("outputs")
    printed = io.StringIO()
    with redirect_stdout(printed), redirect_stderr(printed):
        log(outputs / "first", "first", trials=RECORDS[:1])
    return outputs, printed.getvalue()


@pytest.fixture
def outputs(made):
    return made[0]


@pytest.fixture(scope="module")
def logged(made):
    """A study's folder, and what logging it returned."""
    folder = made[0] / "digits"
    files = StudyFolder(folder)
    write_text(files.result, STUDY.model_dump_json())
    write_text(files.page, page(STUDY, RECORDS, ""))
    write_text(files.config, "data: {_target_: my.digits.Digits}\n")
    return folder, log(folder, "digits")


def log(folder, experiment, study=STUDY, trials=RECORDS):
    uri = uri_of(folder)
    return log_study(study, trials, StudyFolder(folder), uri=uri, experiment=experiment)


def uri_of(folder):
    return f"sqlite:///{folder.parent / 'mlflow.db'}"


def runs_of(folder, name):
    """The studies' runs and the trials' runs of an experiment, in order of their numbers."""
    client = MlflowClient(uri_of(folder))
    experiment = client.get_experiment_by_name(name)
    runs = client.search_runs([experiment.experiment_id], max_results=1000)
    trials = [run for run in runs if "bstune.trial" in run.data.tags]
    trials.sort(key=lambda run: int(run.data.tags["bstune.trial"]))
    return [run for run in runs if "bstune.trial" not in run.data.tags], trials


def test_the_study_has_a_run_with_its_answer(logged, made):
    folder, address = logged
    assert made[1] == ""  # nothing is printed
    (study,), trials = runs_of(folder, "digits")
    assert address.endswith(view.address(study.info.experiment_id))
    assert uri_of(folder) in address
    assert (study.info.status, study.data.tags["bstune.verdict"]) == ("FINISHED", "switch")
    assert study.data.params["baseline.batch_size"] == "64"
    metrics = study.data.metrics
    assert (metrics["best/batch_size"], metrics["speedup/low"]) == (118, 2.31)
    assert (metrics["best/steps"], study.data.params["best.values.steps"]) == (BEST.steps, "7")
    assert [one.dataset.name for one in study.inputs.dataset_inputs] == ["Digits"]
    assert len(trials) == len(RECORDS)
    client = MlflowClient(uri_of(folder))
    # The step is the batch size.
    history = client.get_metric_history(study.info.run_id, "batch_size_curve/lr")
    logged_points = [(metric.step, metric.value) for metric in history]
    assert logged_points == [(round(point.batch_size), point.lr) for point in STUDY.curve]
    # This folder has no curve.png and no best.yaml; files lie beside the database.
    names = {file.path for file in client.list_artifacts(study.info.run_id)}
    assert names == {"config.yaml", "curve.json", "report.html"}
    assert study.info.artifact_uri.startswith(folder.parent.as_uri())


def test_each_trial_has_a_nested_run(logged):
    folder, _ = logged
    (study,), trials = runs_of(folder, "digits")
    for run, record in zip(trials, RECORDS, strict=True):
        assert run.data.tags["mlflow.parentRunId"] == study.info.run_id
        assert run.data.tags["status"] == record.status
        assert run.data.metrics["steps"] == record.steps
        has_failed = record.status in ("diverged", "failed")
        assert run.info.status == ("FAILED" if has_failed else "FINISHED")
    record, run_id = RECORDS[5], trials[5].info.run_id
    each = 1000 * record.seconds_per_step
    axes = {"": 1, "over_examples/": record.batch_size, "over_milliseconds/": each}
    for axis, factor in axes.items():
        history = MlflowClient(uri_of(folder)).get_metric_history(run_id, f"{axis}val/loss")
        expected = [(round(factor * step), value) for step, value in record.finite_history]
        assert [(metric.step, metric.value) for metric in history] == expected


def test_the_experiment_has_a_view_of_the_curves_of_studies(logged):
    folder, _ = logged
    client = MlflowClient(uri_of(folder))
    experiment = client.get_experiment_by_name("digits")
    packed = json.loads(experiment.tags[view.NAME])["state"].removeprefix("deflate;")
    state = json.loads(zlib.decompress(base64.b64decode(packed)))
    charts = state["compareRunCharts"]
    keys = {one["metricKey"] for one in charts if one["type"] == "LINE"}
    (study,), _ = runs_of(folder, "digits")
    # MLflow adds a chart of each metric that it has none of.
    assert keys <= set(study.data.metrics) <= {one.get("dataAccessKey") for one in charts} | keys
    (found,) = client.search_runs([experiment.experiment_id], state["searchFilter"])
    assert found.info.run_id == study.info.run_id
    assert view.address(experiment.experiment_id) in experiment.tags["mlflow.note.content"]


def test_the_trained_best_is_a_model_of_the_study(logged, tmp_path):
    folder, _ = logged
    checkpoint = tmp_path / "best.ckpt"
    checkpoint.write_bytes(b"weights")
    # A study that MLflow does not have is a warning, as what was trained is not lost.
    for root, is_known in ((folder, True), (tmp_path, False)):
        place = {"uri": uri_of(folder), "experiment": "digits"}
        warning = log_weights(STUDY, RECORDS, StudyFolder(root), checkpoint, **place)
        assert (warning is None) == is_known
    (study,), _ = runs_of(folder, "digits")
    (model,) = MlflowClient(uri_of(folder)).search_logged_models([study.info.experiment_id])
    assert (model.source_run_id, model.params["batch_size"]) == (study.info.run_id, "118")


def test_a_continued_study_has_one_run_and_no_trial_twice(outputs):
    folder = outputs / "continued"
    log(folder, "continued", trials=RECORDS[:4])
    longer = result(trials=90, curve=STUDY.curve[::2])
    address = log(folder, "continued", longer, RECORDS[:6])
    assert log(folder, "continued", longer, RECORDS[:6]) == address
    log(outputs / "another study", "continued", trials=RECORDS[6:8])
    studies, trials = runs_of(folder, "continued")
    assert len(studies) == 2
    assert [int(run.data.tags["bstune.trial"]) for run in trials] == list(range(8))
    (parent,) = {run.data.tags["mlflow.parentRunId"] for run in trials[:6]}
    client = MlflowClient(uri_of(folder))
    history = client.get_metric_history(parent, "batch_size_curve/steps")
    assert len(history) == len(longer.curve)


def test_runs_of_a_killed_process_are_replaced(outputs):
    folder = outputs / "killed"
    log(folder, "killed", trials=RECORDS[:2])
    (study,), (trial, _) = runs_of(folder, "killed")
    for run in (trial, study):
        MlflowClient(uri_of(folder)).update_run(run.info.run_id, status="RUNNING")
    log(folder, "killed", trials=RECORDS[:2])
    studies, trials = runs_of(folder, "killed")
    assert [run.info.status for run in (*studies, *trials)] == ["FINISHED"] * 3
    assert trial.info.run_id not in [run.info.run_id for run in trials]


def test_a_study_whose_earlier_run_could_not_be_deleted_has_one_run_later(outputs, monkeypatch):
    folder = outputs / "late"
    log(folder, "late", trials=RECORDS[:1])

    def fails(*_):
        raise OSError("killed")

    longer = result(trials=90)
    with monkeypatch.context() as patched:
        patched.setattr(MlflowClient, "delete_run", fails)
        assert "killed" in log(folder, "late", longer, RECORDS[:1])
    log(folder, "late", longer, RECORDS[:1])
    (study,), _ = runs_of(folder, "late")
    assert study.info.status == "FINISHED"


def test_a_database_is_made_whole_or_not_at_all(tmp_path):
    folder = StudyFolder(tmp_path / "out")
    uri = uri_of(folder.root)
    log_study(STUDY, RECORDS[:1], folder, uri=uri, experiment="")
    assert not list(tmp_path.iterdir())


def test_what_is_no_database_is_one_warning(tmp_path):
    (tmp_path / "link.db").symlink_to(tmp_path / "other.db")
    for uri in ("postgresql://me:s3cret@host:port/db", f"sqlite:///{tmp_path}/link.db"):
        warning = log_study(STUDY, RECORDS[:1], StudyFolder(tmp_path), uri=uri, experiment="none")
        assert isinstance(warning, str)
        assert "s3cret" not in warning
    assert not (tmp_path / "other.db").exists()


@pytest.mark.parametrize("is_silent", [True, False])
def test_mlflow_that_is_down_is_one_warning_within_seconds(is_silent, tmp_path, capfd, monkeypatch):
    # The user's own limit stays: here 1 s for 5 s.
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    began = time.monotonic()
    with socket.create_server(("127.0.0.1", 0)) as server:
        uri = f"http://me:s3cret@127.0.0.1:{server.getsockname()[1]}"
        if not is_silent:
            server.close()
        warning = log_study(STUDY, RECORDS[:2], StudyFolder(tmp_path), uri=uri, experiment="down")
    assert time.monotonic() - began < 10
    assert "\n" not in warning
    assert "s3cret" not in warning
    assert capfd.readouterr() == ("", "")
    assert os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"] == "1"
    assert "MLFLOW_HTTP_REQUEST_MAX_RETRIES" not in os.environ
