"""Log a study to MLflow at its end: a run with its curve, and a nested run for each trial.

MLflow can be down or slow: requests and the whole are limited, and a failure is one line of text.
Metrics cannot be taken back, so a study that was continued gets a new run in the old one's place;
its trials' runs move there and only those that are missing are added.
"""

import hashlib
import json
import logging
import os
import re
import shlex
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, TypeVar

from bstune.core.errors import StudyError
from bstune.core.records import Record
from bstune.report.answer import render
from bstune.study.result import StudyResult
from bstune.system.files import StudyFolder, read_yaml, refuse_link
from bstune.system.secrets import hide, hide_in_error
from bstune.tracking import view

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import DatasetInput, Metric, Param, Run

T = TypeVar("T")
# Seconds after which no further trial is sent; a request may take up to 5 s (20 s in a locked
# SQLite database, by mlflow's own setting).
SECONDS = 30.0
# mlflow's own limits are 120 s a request and 7 retries. Those that a user has set stay.
LIMITS = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "5",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "PGCONNECT_TIMEOUT": "5",
}
SQLITE = "sqlite:///"
# Where ``mlflow ui`` serves.
UI = "http://127.0.0.1:5000"

STUDY_TAG = "bstune.study_id"
RESULT_TAG = "bstune.result"
TRIAL_TAG = "bstune.trial"
PARENT_TAG = "mlflow.parentRunId"
# The runs of studies, as MLflow searches for them.
STUDIES = f"tags.`{RESULT_TAG}` != ''"
# mlflow's own limits of a request are 1,000 metrics, and 1,000 values in all.
MOST_METRICS = 900


def log_study(
    result: StudyResult,
    records: Sequence[Record],
    folder: StudyFolder,
    *,
    uri: str,
    experiment: str,
) -> str:
    """Log a study that has ended; again for one that was continued.

    Args:
        result: what it found.
        records: of all its trials.
        folder: its folder, whose curve.json, report.html, curve.png, best.yaml and config.yaml are
            logged.
        uri: of MLflow's server or database, such as ``sqlite:///outputs/mlflow.db``.
        experiment: MLflow's name for the studies that are compared.

    Returns:
        Where to look, or the warning that says why MLflow has not all. It raises nothing for a
        server or a database that is down, slow or of another kind.
    """

    def send(client: "MlflowClient") -> str:
        experiment_id = _experiment_id(client, result, uri, experiment)
        _log_missing(client, experiment_id, result, records, folder)
        return _where_to_look(uri, view.address(experiment_id))

    return _send_or_warn(uri, send)


def log_weights(
    result: StudyResult,
    records: Sequence[Record],
    folder: StudyFolder,
    checkpoint: Path,
    *,
    uri: str,
    experiment: str,
) -> str | None:
    """Log a checkpoint of the trained best as a model of the study's run.

    Args:
        result, records, folder, uri, experiment: as of :func:`log_study`, which comes before.
        checkpoint: Lightning's.

    Returns:
        The warning that says why MLflow does not have it.
    """

    def send(client: "MlflowClient") -> None:
        from mlflow.exceptions import MlflowException

        experiment_id = _experiment_id(client, result, uri, experiment)
        study_id = _study_id(result, records, folder)
        query = f"{STUDIES} and tags.`{STUDY_TAG}` = '{study_id}'"
        runs = client.search_runs([experiment_id], query, max_results=1)
        # It was down when the study ended.
        if not runs:
            raise MlflowException(f"it has no run of study {result.study}")
        run = runs[0]
        best = result.best
        params = {} if best is None else {"batch_size": str(best.batch_size), "lr": str(best.lr)}
        # mlflow before 3.0 has no models of a run.
        if not hasattr(client, "create_logged_model"):
            client.log_artifact(run.info.run_id, str(checkpoint))
            return
        model = client.create_logged_model(
            experiment_id, result.study, run.info.run_id, params=params, model_type="checkpoint"
        )
        client.log_model_artifact(model.model_id, str(checkpoint))
        client.finalize_logged_model(model.model_id, "READY")

    return _send_or_warn(uri, send)


def _send_or_warn(uri: str, send: "Callable[[MlflowClient], T]") -> T | str:
    """What sends to MLflow gives; a warning where that failed as servers and databases do."""
    with _limited_requests():
        # mlflow takes 3 s to import.
        from alembic.util import CommandError
        from mlflow import MlflowClient
        from mlflow.exceptions import MlflowException
        from mlflow.utils.logging_utils import MLFLOW_LOGGING_STREAM
        from sqlalchemy.exc import SQLAlchemyError

        was_enabled, disabled = MLFLOW_LOGGING_STREAM.enabled, logging.root.manager.disable
        MLFLOW_LOGGING_STREAM.enabled = False
        # MLflow before 3.7 lets alembic tell each table.
        logging.disable(logging.INFO)
        try:
            with _whole_database(uri) as place:
                _try_database(place)
                return send(MlflowClient(place))
        # What drivers and servers raise; requests' errors are OSErrors, and those of a port that is
        # no number and of an answer that is no JSON are ValueErrors.
        except (
            CommandError,
            ImportError,
            MlflowException,
            OSError,
            SQLAlchemyError,
            StudyError,
            ValueError,
        ) as error:
            shown = hide(uri)
            reason = hide_in_error(str(error).partition("\n")[0].replace(uri, shown))
            return (
                f"the same command logs to MLflow what is missing there: {shown} "
                f"failed ({type(error).__name__}: {reason})"
            )
        finally:
            MLFLOW_LOGGING_STREAM.enabled = was_enabled
            logging.disable(disabled)


@contextmanager
def _limited_requests() -> Iterator[None]:
    """Limit mlflow's requests, by the environment variables that it reads at each of them."""
    ours = {name: value for name, value in LIMITS.items() if name not in os.environ}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name in ours:
            os.environ.pop(name, None)


@contextmanager
def _whole_database(uri: str) -> Iterator[str]:
    """Give the URI to log to: a missing SQLite database is in its place once the body has ended.

    mlflow takes none whose migrations were interrupted. Meanwhile it waits for no disk, as it has
    nothing to lose yet: mlflow's 67 migrations took 8.4 s with syncs and 3.2 s without them, 60
    runs 3.1 s and 0.6 s (mlflow 3.17, a busy disk, once each).
    """
    from sqlalchemy import event
    from sqlalchemy.engine import Engine

    path = _sqlite_path(uri)
    if path is not None:
        refuse_link(Path(uri.removeprefix(SQLITE)))
    if path is None or path.exists():
        yield uri
        return

    def stop_syncing(connection: object, record: object) -> None:
        """Let the new database wait for no disk; other threads may open others meanwhile."""
        if isinstance(connection, sqlite3.Connection):
            (_, _, file) = connection.execute("PRAGMA database_list").fetchone()
            if file == str(partial):
                connection.execute("PRAGMA synchronous=OFF")

    path.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=path.parent, prefix=".mlflow-") as folder:
        partial = Path(folder) / path.name
        late = None
        event.listen(Engine, "connect", stop_syncing)
        try:
            yield f"{SQLITE}{partial}"
        # The next command adds what is missing.
        except TimeoutError as error:
            late = error
        finally:
            event.remove(Engine, "connect", stop_syncing)
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        # It raises where another process has made it meanwhile.
        path.hardlink_to(partial)
        if late is not None:
            raise late


def _try_database(uri: str) -> None:
    """Connect to a database once; mlflow itself would try 10 times, in 100 s."""
    import sqlalchemy
    from mlflow.store.db.db_types import DATABASE_ENGINES

    if re.split("[:+]", uri)[0] not in DATABASE_ENGINES:
        return
    engine = sqlalchemy.create_engine(uri)
    sqlalchemy.inspect(engine).get_table_names()
    engine.dispose()


def _sqlite_path(uri: str) -> Path | None:
    """Give the file of a SQLite database; None for another URI."""
    return Path(uri.removeprefix(SQLITE)).resolve() if uri.startswith(SQLITE) else None


def _experiment_id(client: "MlflowClient", result: StudyResult, uri: str, name: str) -> str:
    """Find the experiment, or make it with the view of its studies' curves."""
    found = client.get_experiment_by_name(name)
    if found is None:
        # mlflow would put files of a SQLite database below the working directory.
        path = _sqlite_path(uri)
        location = None if path is None else (path.parent / "mlruns").as_uri()
        found = client.get_experiment(client.create_experiment(name, location))
    experiment_id = str(found.experiment_id)
    if view.NAME not in found.tags:
        address = view.address(experiment_id)
        tags = {
            view.NAME: view.tag(STUDIES, _answer_values(result), _milliseconds()),
            # All pages of the experiment show it, as Markdown.
            "mlflow.note.content": f"[The studies' curves over batch size]({address})",
            # Its pages open among the runs, where this MLflow reads it.
            "mlflow.experimentKind": "custom_model_development",
        }
        for key, value in tags.items():
            client.set_experiment_tag(experiment_id, key, value)
    return experiment_id


def _log_missing(
    client: "MlflowClient",
    experiment_id: str,
    result: StudyResult,
    records: Sequence[Record],
    folder: StudyFolder,
) -> None:
    """Log what is missing of a study."""
    until = time.monotonic() + SECONDS
    study_id = _study_id(result, records, folder)
    digest = _digest(result.model_dump_json())
    found = client.search_runs(
        [experiment_id], f"tags.`{STUDY_TAG}` = '{study_id}'", max_results=50_000
    )
    old = [run for run in found if TRIAL_TAG not in run.data.tags]
    # A run that has not ended is of a process that was killed.
    logged = {int(run.data.tags[TRIAL_TAG]): run for run in found if _is_whole_trial(run)}
    for run in old:
        if run.data.tags.get(RESULT_TAG) == digest and run.info.status == "FINISHED":
            return
    tags = {
        STUDY_TAG: study_id,
        RESULT_TAG: digest,
        "bstune.version": result.bstune,
        "mlflow.note.content": f"```\n{render(result)}\n```",
    }
    if result.verdict is not None:
        tags["bstune.verdict"] = result.verdict
    parent = client.create_run(experiment_id, tags=tags, run_name=result.study)
    run_id = str(parent.info.run_id)
    _send_values(client, run_id, _study_metrics(result), _study_params(result))
    if folder.config.is_file():
        client.log_inputs(run_id, [_dataset(result, folder)])
    for path in (folder.result, folder.page, folder.figure, folder.best, folder.config):
        if path.is_file():
            client.log_artifact(run_id, str(path))
    for record in records:
        if time.monotonic() > until:
            raise TimeoutError(f"not all trials were sent within {SECONDS:.0f} s")
        if record.number in logged:
            client.set_tag(logged[record.number].info.run_id, PARENT_TAG, run_id)
        else:
            _log_trial(client, experiment_id, result, record, study_id, run_id)
    whole = {run.info.run_id for run in logged.values()}
    for run in found:
        if run.info.run_id not in whole:
            client.delete_run(run.info.run_id)
    # Last, as whoever finds a run that has ended does nothing more.
    client.set_terminated(run_id)


def _dataset(result: StudyResult, folder: StudyFolder) -> "DatasetInput":
    """What the study trains on, as its config names it."""
    from mlflow.entities import Dataset, DatasetInput

    config = read_yaml(folder.config)
    data = config.get("data") or config.get("table") or result.workload
    name = data.get("_target_", result.workload) if isinstance(data, dict) else data
    source = json.dumps(data, default=str)
    dataset = Dataset(
        name=str(name).rpartition(".")[2],
        digest=_digest(source),
        source_type="bstune",
        source=source,
        profile=json.dumps({"num_rows": result.examples}),
    )
    return DatasetInput(dataset, [])


def _study_id(result: StudyResult, records: Sequence[Record], folder: StudyFolder) -> str:
    """Tell a study from others, also from those in equal folders of other machines.

    The first record has that study's own seconds, and stays as the study is continued.
    """
    first = records[0].model_dump_json() if records else ""
    return _digest(f"{folder.root.resolve()} {result.study} {first}")


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _is_whole_trial(run: "Run") -> bool:
    return TRIAL_TAG in run.data.tags and run.info.status in ("FINISHED", "FAILED")


def _log_trial(
    client: "MlflowClient",
    experiment_id: str,
    result: StudyResult,
    record: Record,
    study_id: str,
    parent_id: str,
) -> None:
    """Log a trial in a nested run, which ends last: one that has ended is whole."""
    now = _milliseconds()
    took = round(1000 * (record.train_seconds + record.other_seconds))
    tags = {
        STUDY_TAG: study_id,
        TRIAL_TAG: str(record.number),
        PARENT_TAG: parent_id,
        "bstune.role": record.role,
        "status": record.status,
    }
    if record.message:
        tags["mlflow.note.content"] = record.message
    run = client.create_run(
        experiment_id, now - took, tags=tags, run_name=f"{result.study} {record.number}"
    )
    params = {
        "batch_size": record.batch_size,
        "lr": record.lr,
        **record.values,
        "seed": record.seed,
        "role": record.role,
        "resumed_from": record.resumed_from,
    }
    last = {
        "steps": record.steps,
        "train_seconds": record.train_seconds,
        "seconds_per_step": record.seconds_per_step,
    }
    metrics = _metrics(last, now)
    each = record.seconds_per_step or 0.0
    for step, value in record.finite_history:
        # Over steps, and over what a step of MLflow's may also stand for.
        name = result.target.metric
        metrics += _metrics({name: value}, now, step)
        metrics += _metrics({f"over_examples/{name}": value}, now, step * record.batch_size)
        if each:
            over_time = {f"over_milliseconds/{name}": value}
            metrics += _metrics(over_time, now, round(1000 * each * step))
    run_id = run.info.run_id
    _send_values(client, run_id, metrics, _params(params))
    status = "FINISHED" if record.has_trained else "FAILED"
    client.set_terminated(run_id, status, now)


def _send_values(
    client: "MlflowClient", run_id: str, metrics: "Sequence[Metric]", params: "list[Param]"
) -> None:
    """Send a run's values, in parts where they are many."""
    client.log_batch(run_id, params=params)
    for begin in range(0, len(metrics), MOST_METRICS):
        client.log_batch(run_id, metrics[begin : begin + MOST_METRICS])


def _study_params(result: StudyResult) -> "list[Param]":
    params: dict[str, object] = {
        "workload": result.workload,
        "target": result.target,
        "objective": result.objective,
        "device": result.device,
        "parameters": result.parameters,
        "examples": result.examples,
    }
    if result.baseline is not None:
        params["baseline.batch_size"] = result.baseline.batch_size
        params["baseline.lr"] = result.baseline.lr
    for name, configuration in (("baseline", result.baseline), ("best", result.best)):
        if configuration is not None:
            # Metrics would be charts, of other names in each study.
            for key, value in configuration.values.items():
                params[f"{name}.values.{key}"] = value
    return _params(params)


def _answer_values(result: StudyResult) -> dict[str, float | None]:
    """The answer's values by their metrics, which are the same for all studies."""
    critical = result.critical
    ends = ("value", "low", "high")
    parts: list[tuple[str, object, Sequence[str]]] = [
        ("best", result.best, ("batch_size", "lr", "steps", "seconds", "metric")),
        ("baseline", result.baseline, ("metric",)),
        ("speedup", result.speedup, ends),
        ("improvement", result.improvement, ends),
        ("critical_batch_size", critical, ("s_min",)),
        ("critical_batch_size", critical and critical.interval, ends),
        ("noise_scale", result.noise_scale, ends),
        ("lr_exponent", result.lr_exponent, ends),
    ]
    values = {}
    for name, part, fields in parts:
        for field in fields:
            values[f"{name}/{field}"] = None if part is None else getattr(part, field)
    return values


def _study_metrics(result: StudyResult) -> "list[Metric]":
    """Give the answer's values, and the curve, whose batch sizes stand in the place of steps."""
    now = _milliseconds()
    metrics = _metrics(_answer_values(result), now)
    for point in result.curve:
        at_size = {
            "batch_size_curve/steps": point.steps,
            "batch_size_curve/seconds": point.steps * point.step_seconds,
            "batch_size_curve/lr": point.lr,
        }
        metrics += _metrics(at_size, now, round(point.batch_size))
    return metrics


def _metrics(
    values: Mapping[str, float | None], milliseconds: int, step: int = 0
) -> "list[Metric]":
    """Metrics of one step; a value that is None is none."""
    from mlflow.entities import Metric

    metrics = []
    for name, value in values.items():
        if value is not None:
            # What mlflow does not allow in a name.
            key = re.sub(r"[^\w\-.:/ ]", "_", name)
            metrics.append(Metric(key, float(value), milliseconds, step))
    return metrics


def _params(values: Mapping[str, object]) -> "list[Param]":
    from mlflow.entities import Param

    return [Param(name, str(value)) for name, value in values.items() if value is not None]


def _milliseconds() -> int:
    return round(1000 * time.time())


def _where_to_look(uri: str, address: str) -> str:
    """Write where the view that has the curves of all studies is, and what serves a database."""
    shown = hide(uri)
    if uri.startswith(("http://", "https://")):
        return f"{shown.rstrip('/')}/{address}"
    # By itself it starts 11 processes, which takes a minute on two cores.
    command = (
        f"MLFLOW_SERVER_ENABLE_JOB_EXECUTION=false mlflow ui --workers 1 "
        f"--backend-store-uri {shlex.quote(shown)}"
    )
    return f"{command}\n  then open {UI}/{address}"
