"""MLflow: one experiment, a parent run a study, a child run a trial; the only module that imports mlflow.

Runs are written by explicit run id: the importing program's active run and tracking URI are neither read nor changed.
What was sent is never noted locally but found by searching the server's runs for the study's id, so the next run of a
command sends what is missing. A child counts as sent once its run has ended; one whose sender died before that is
deleted and sent again. One process at a time may send a study's runs: the caller holds the study's lock.

MLflow being down or slow never stops a study. Left alone its client retries for minutes (seven retries of 120 s over
HTTP, 100 s for a database that does not open, 20 s for a locked one), so every exchange runs in a thread that is waited
for a stated number of seconds; the first failure is logged as one line and ends sending for this process.

Importing mlflow takes 1.0 s whichever of its modules is asked for (mlflow 3.17.2, Python 3.11, two CPU cores, files
cached, median of 8, wall clock): import this module late.

A job's study as MLflow is told of it.
"""

import getpass
import hashlib
import json
import logging
import math
import os
import posixpath
import re
import shlex
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlsplit, urlunsplit

import optuna
from alembic.util import CommandError
from filelock import FileLock
from mlflow import MlflowClient
from mlflow.entities import Metric, Param, Run, RunTag
from mlflow.exceptions import MlflowException
from mlflow.store.db.db_types import DATABASE_ENGINES
from mlflow.tracking.registry import UnsupportedModelRegistryStoreURIException
from mlflow.utils.logging_utils import suppress_logs_in_thread
from omegaconf import DictConfig, OmegaConf
from sqlalchemy.engine import make_url
from sqlalchemy.exc import SQLAlchemyError

from bstune.config import flatten, plain
from bstune.core.console import redact
from bstune.core.errors import ConfigError
from bstune.core.noise_scale import moving_estimate
from bstune.core.records import TrialResult
from bstune.study.prepare import PreparedStudy
from bstune.study.storage import STUDY_ID, results

if TYPE_CHECKING:
    pass

Curves = Mapping[str, Sequence[tuple[int, float | None]]]
Values = Iterable[tuple[str, int, float | None]]
STUDY_TAG, KIND, TRIAL = "bstune.study_id", "bstune.kind", "bstune.trial"
CURVE_TRIALS, BEGUN = "bstune.curve_trials", "begun"
SUPERSEDED, PARENT = "bstune.superseded", "mlflow.parentRunId"
# mlflow.utils.validation: names of 250 characters, parameters of 6000; tags of 5000 before mlflow 3 and 8000 since.
_KEY_LENGTH, _PARAM_LENGTH, _TAG_LENGTH = 250, 6000, 5000
_TRIAL_PARAMS = ("batch_size", "lr", "delta", "seed", "trial_index", "resumed_from", "replicate_of")
_TRIAL_SECONDS = ("train_seconds", "eval_seconds", "startup_seconds", "wall_seconds", "seconds_per_step")
_TRIAL_METRICS = ("steps", "steps_low", "examples", "time_to_target", *_TRIAL_SECONDS)
# Of a server that is down, a locked or newer database, a full disk, a missing driver; those of requests are OSErrors.
_FAILURES = (MlflowException, SQLAlchemyError, CommandError, OSError, ImportError, json.JSONDecodeError)
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StudyTags:
    """What identifies and describes a study in MLflow.

    Args:
        study_id: a uuid that the caller stores with the study; every run of the study carries it.
        name: the study's name, and that of its parent run.
        workload: the workload's name.
        metric: the target's metric, under which a trial's history is sent.
        params: the composed config, flat; a value past MLflow's 6000 characters is cut, with a mark at its end.
        versions: versions of the packages that the results depend on.
        device: name of the device.
        commit: git commit of the code; None if unknown.
    """

    study_id: str
    name: str
    workload: str
    metric: str
    params: Mapping[str, object]
    versions: Mapping[str, str]
    device: str
    commit: str | None


@dataclass(frozen=True)
class Limits:
    """How long MLflow may take before sending ends for this process.

    Args:
        request_seconds: to connect, and again to answer, for one HTTP request; whole seconds, at least 1.
        retries: of one HTTP request, without a pause.
        trial_seconds: to send one trial.
        study_seconds: to open the study, and to finish it; a new database takes seconds (6 s on a slow machine).
    """

    request_seconds: int
    retries: int
    trial_seconds: float
    study_seconds: float


@dataclass(frozen=True)
class _Place:
    """Where a study's runs are: ``curve_trials`` is how many trials the parent's curve is of, None without a curve."""

    client: MlflowClient
    experiment_id: str
    parent_id: str
    curve_trials: int | None
    sent: frozenset[int]


def tracking_uri() -> str:
    """Return ``MLFLOW_TRACKING_URI``, or else a database ``mlflow.db`` in the working directory.

    The path of an SQLite database is made absolute, so that the URI means the same in every directory.
    """
    uri = os.environ.get("MLFLOW_TRACKING_URI") or "sqlite:///mlflow.db"
    path = uri.removeprefix("sqlite:///")
    if path in (uri, "", ":memory:") or "?" in path:
        return uri
    # Not mlflow's own conversion: it writes a space as %20, which SQLAlchemy 2.0 takes for a part of the name.
    return f"sqlite:///{Path(path).absolute().as_posix()}"


def check_uri(uri: str) -> None:
    """Check that MLflow has a store for this kind of URI, without connecting to a server or a database.

    Raises:
        ConfigError: if it has none, so that no run could send anything.
    """
    scheme = urlsplit(uri).scheme.partition("+")[0]
    if scheme in ("http", "https", *DATABASE_ENGINES):
        return
    try:
        MlflowClient(uri)
    except UnsupportedModelRegistryStoreURIException as error:
        raise _unknown_kind(uri) from error
    except _FAILURES:
        return  # known, but not there now: sending says so once, and the study goes on


def _unknown_kind(uri: str) -> ConfigError:
    accepted = "the http address of an MLflow server or a database such as sqlite:///mlflow.db"
    return ConfigError(f"MLFLOW_TRACKING_URI or mlflow.uri must be {accepted}, but got {uri!r}")


def ui_command(uri: str) -> str:
    """Return the shell command that opens the MLflow UI on ``uri``, or the address itself where a server runs.

    A password in ``uri`` is not shown: an address goes without it, a database is named as ``$MLFLOW_TRACKING_URI``.
    """
    if uri.startswith(("http://", "https://")):
        return _without_password(uri)
    shown = '"$MLFLOW_TRACKING_URI"' if _without_password(uri) != uri else shlex.quote(uri)
    return f"{shlex.quote(sys.executable)} -m mlflow ui --backend-store-uri {shown}"


def open_tracking(uri: str, experiment: str, study: StudyTags, limits: Limits) -> "Tracking":
    """Find or create the experiment and the study's parent run, and what of the study was sent before.

    What a process that died left behind is put right: runs half sent are deleted, children go to the current parent.
    An SQLite database is created where it is missing, its artifacts in ``mlruns/`` beside it.

    Args:
        uri: of the server or database, from :func:`tracking_uri`.
        experiment: its name; one for all workloads.
        study: what identifies and describes it.
        limits: how long MLflow may take; past it, that is logged and the returned tracking sends nothing.

    Raises:
        ConfigError: if MLflow knows no such kind of URI, so that no later run could send anything either.
    """
    tracking = Tracking(uri, study, limits)
    tracking._exchange("open the study", partial(_find, uri, experiment, study), limits.study_seconds)
    return tracking


class Tracking:
    """A study's runs in MLflow; made by :func:`open_tracking`. Its methods never raise because of MLflow."""

    def __init__(self, uri: str, study: StudyTags, limits: Limits) -> None:
        self._uri, self._study, self._limits = uri, study, limits
        self._place: _Place | None = None

    @property
    def sent(self) -> frozenset[int]:
        """Numbers of the trials that MLflow holds whole; empty after a failure."""
        return self._place.sent if self._place else frozenset()

    @property
    def url(self) -> str | None:
        """Address of the study's page, at the server or where :func:`ui_command` serves it; None after a failure."""
        if self._place is None:
            return None
        served = self._uri.startswith(("http://", "https://"))
        base = _without_password(self._uri).rstrip("/") if served else "http://127.0.0.1:5000"
        return f"{base}/#/experiments/{self._place.experiment_id}/runs/{self._place.parent_id}"

    def send_trial(self, result: TrialResult, ended: float | None = None) -> None:
        """Send one trial whole: parameters, metrics, learning curve, status.

        A trial that MLflow holds already is left alone. Values that are None or not finite are left out, and so are
        steps, time and examples to target unless the target was reached: a censored trial has none.

        Args:
            result: the trial.
            ended: when it ended, in seconds since the epoch; None means now.
        """
        place = self._place
        if place is None or result.number in place.sent:
            return
        end = time.time() if ended is None else ended
        work = partial(_write_trial, place, self._study, result, end)
        self._exchange(f"send trial {result.number}", work, self._limits.trial_seconds)

    def finish_study(self, curves: Curves, scalars: Mapping[str, float | None], artifacts: Sequence[Path]) -> None:
        """Send the curve of a completed study to the parent run, and end that run.

        Does nothing if the parent holds a curve of as many trials. If it holds one of fewer, a new parent is written
        and takes over the children, and the old one is tagged ``bstune.superseded``: metrics are append-only, so a
        step that is logged twice would be two points.

        Args:
            curves: name -> (batch size, value) pairs, sent as ``curve/NAME`` with step = batch size and, where the
                value is positive, as ``curve_log2/NAME``: log2(value) at step round(100 log2 B). Of two values at
                one step the lower is sent; values that are None or not finite are left out.
            scalars: name -> value, None if unknown.
            artifacts: files to keep with the run.
        """
        place = self._place
        if place is None or place.curve_trials == len(place.sent):
            return
        values = [*_curve_values(curves), *((name, 0, value) for name, value in scalars.items())]
        work = partial(_write_study, place, self._study, values, artifacts)
        self._exchange("send the curve", work, self._limits.study_seconds)

    def _exchange(self, what: str, work: Callable[[], _Place], seconds: float) -> None:
        """Run ``work`` in a thread and wait ``seconds`` for it; after a failure log one line and end sending."""
        outcome: Future[_Place] = Future()

        def run() -> None:
            with _quiet():
                try:
                    outcome.set_result(work())
                except _FAILURES as error:
                    outcome.set_exception(error)

        # A daemon: one that hangs must not keep the process from ending.
        thread = threading.Thread(target=run, name="bstune-mlflow", daemon=True)
        with _short_requests(self._limits):
            thread.start()
            thread.join(seconds)
        if thread.is_alive():
            reason = f"no answer within {seconds:g} s"
        elif not outcome.done():
            reason = "unexpected error, its traceback was printed"
        elif isinstance(error := outcome.exception(), UnsupportedModelRegistryStoreURIException):
            raise _unknown_kind(self._uri) from error
        elif error is not None:
            described = f"{type(error).__name__}: {error}".replace(self._uri, _without_password(self._uri))
            reason = described.splitlines()[0]
        else:
            self._place = outcome.result()
            return
        self._place = None
        _log.warning("MLflow: could not %s (%s). The next run of the same command sends what is missing.", what, reason)


def _without_password(uri: str) -> str:
    """Return ``uri`` without user name and password."""
    parts = urlsplit(uri)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2])) if "@" in parts.netloc else uri


@contextmanager
def _short_requests(limits: Limits) -> Iterator[None]:
    """Give MLflow's HTTP client short limits while the context is open: it reads the environment at each request."""
    values = {
        "MLFLOW_HTTP_REQUEST_TIMEOUT": str(limits.request_seconds),
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": str(limits.retries),
        "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "0",
        "MLFLOW_HTTP_REQUEST_BACKOFF_JITTER": "0",
        "MLFLOW_HTTP_RESPECT_RETRY_AFTER_HEADER": "false",  # an overloaded server may ask for minutes
        "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    }
    before = {name: os.environ.pop(name) for name in values if name in os.environ}
    os.environ.update(values)
    try:
        yield
    finally:
        for name in values:
            del os.environ[name]
        os.environ.update(before)


@contextmanager
def _quiet() -> Iterator[None]:
    """Drop what mlflow, alembic and urllib3 log in this thread: migrations, retries, tracebacks of what is caught."""
    here, logger = threading.get_ident(), logging.getLogger("urllib3.connectionpool")

    def elsewhere(record: logging.LogRecord) -> bool:
        return record.thread != here

    logger.addFilter(elsewhere)
    try:
        with suppress_logs_in_thread():
            yield
    finally:
        logger.removeFilter(elsewhere)


def _find(uri: str, experiment: str, study: StudyTags) -> _Place:
    """Find or create the experiment and the current parent, and put right what a process that died left."""
    # Two first runs at once would migrate the same new database at once.
    digest = hashlib.sha256(f"{getpass.getuser()} {uri}".encode()).hexdigest()[:16]
    with FileLock(Path(tempfile.gettempdir(), f"bstune-{digest}.lock")):
        client = MlflowClient(uri)
        experiment_id = _experiment(client, uri, experiment)

    runs = _runs(client, experiment_id, study)
    parents = [run for run in runs if run.data.tags[KIND] == "study" and SUPERSEDED not in run.data.tags]
    halves = [run for run in parents if run.data.tags.get(CURVE_TRIALS) == BEGUN]
    whole = [run for run in parents if run.data.tags.get(CURVE_TRIALS) != BEGUN]
    current = max(whole, key=lambda run: (CURVE_TRIALS in run.data.tags, run.info.start_time), default=None)
    parent_id = current.info.run_id if current else _create_parent(client, experiment_id, study, {})
    known, tags = (current.data.params, current.data.tags) if current else ({}, {})
    client.log_batch(parent_id, params=[param for param in _study_params(study) if param.key not in known])

    sent: set[int] = set()
    for child in (run for run in runs if run.data.tags[KIND] == "trial"):
        number = int(child.data.tags[TRIAL])
        if child.info.status in ("FINISHED", "FAILED") and number not in sent:
            sent.add(number)
        else:
            client.delete_run(child.info.run_id)
    _adopt(client, experiment_id, study, parent_id)
    for run in halves:
        client.delete_run(run.info.run_id)
    curve_trials = int(tags[CURVE_TRIALS]) if CURVE_TRIALS in tags else None
    return _Place(client, experiment_id, parent_id, curve_trials, frozenset(sent))


def _experiment(client: MlflowClient, uri: str, name: str) -> str:
    """Return the id of the experiment, created where it is missing."""
    if (found := client.get_experiment_by_name(name)) is not None:
        return str(found.experiment_id)
    # Left to MLflow, the artifacts of a database would lie below whatever the working directory is.
    database = make_url(uri).database if uri.startswith("sqlite:///") else None
    location = str(Path(database).absolute().parent / "mlruns" / quote(name, safe=" ")) if database else None
    return str(client.create_experiment(name, artifact_location=location))


def _runs(client: MlflowClient, experiment_id: str, study: StudyTags) -> list[Run]:
    """Return the study's runs that were not deleted, the oldest first."""
    search = partial(client.search_runs, [experiment_id], f"tags.`{STUDY_TAG}` = '{study.study_id}'")
    page = search(order_by=["start_time"])
    runs = list(page)
    while page.token:
        page = search(order_by=["start_time"], page_token=page.token)
        runs += page
    return runs


def _create_parent(client: MlflowClient, experiment_id: str, study: StudyTags, tags: Mapping[str, str]) -> str:
    described = _common_tags(study, "study", study.device, study.versions) | {"bstune.metric": study.metric, **tags}
    described |= {"mlflow.source.git.commit": study.commit} if study.commit else {}
    return str(client.create_run(experiment_id, tags=described, run_name=study.name).info.run_id)


def _adopt(client: MlflowClient, experiment_id: str, study: StudyTags, parent_id: str) -> None:
    """Make ``parent_id`` the parent of all the study's children, and tag its other whole parents as superseded."""
    superseded = [RunTag(SUPERSEDED, "true"), RunTag(f"{SUPERSEDED}_by", parent_id)]
    for run in _runs(client, experiment_id, study):
        tags, run_id = run.data.tags, run.info.run_id
        if tags[KIND] == "trial":
            if tags[PARENT] != parent_id:
                client.set_tag(run_id, PARENT, parent_id)
        elif run_id != parent_id and SUPERSEDED not in tags and tags.get(CURVE_TRIALS) != BEGUN:
            client.log_batch(run_id, tags=superseded)


def _write_trial(place: _Place, study: StudyTags, result: TrialResult, ended: float) -> _Place:
    end = round(1000 * ended)
    tags = _common_tags(study, "trial", result.device, result.versions)
    tags |= {TRIAL: str(result.number), PARENT: place.parent_id, "bstune.status": result.status}
    tags |= {"bstune.message": _cut(result.message, _TAG_LENGTH)} if result.message else {}
    name = f"trial {result.number}: B {result.batch_size}, lr {result.lr:.3g}"
    start = end - round(1000 * result.wall_seconds)
    run_id = place.client.create_run(place.experiment_id, start, tags, name).info.run_id
    values: list[tuple[str, int, float | None]] = [(name, 0, getattr(result, name)) for name in _TRIAL_METRICS]
    if result.reached:
        values += [("steps_to_target", 0, result.steps), ("examples_to_target", 0, result.examples)]
    values += [(study.metric, step, value) for step, value in result.history]
    values += _noise_scale_values(result)
    params = [Param(name, str(value)) for name in _TRIAL_PARAMS if (value := getattr(result, name)) is not None]
    params += [Param(name, str(value)) for name, value in result.hyperparameters.items()]
    # The client itself splits what is past the limits of one request: 1000 metrics, 100 parameters.
    place.client.log_batch(run_id, _metrics(values, end), params)
    # Last, because a run that has ended counts as sent.
    place.client.set_terminated(run_id, "FAILED" if result.status == "failed" else "FINISHED", end)
    return replace(place, sent=place.sent | {result.number})


def _noise_scale_values(result: TrialResult) -> Iterator[tuple[str, int, float | None]]:
    """Yield (name, step, value) of the moving estimate after each measured step; None where it is undetermined."""
    for end, (step, _, _) in enumerate(result.noise_scale, start=1):
        estimate = moving_estimate(result.noise_scale[:end])
        yield "noise_scale", step, estimate.noise_scale
        yield "noise_scale_low", step, estimate.low
        yield "noise_scale_high", step, estimate.high


def _write_study(place: _Place, study: StudyTags, values: Values, artifacts: Sequence[Path]) -> _Place:
    client, parent_id, trials = place.client, place.parent_id, len(place.sent)
    # The mark comes before the first point: a parent half written is never written to again.
    if place.curve_trials is None:
        client.set_tag(parent_id, CURVE_TRIALS, BEGUN)
    else:
        parent_id = _create_parent(client, place.experiment_id, study, {CURVE_TRIALS: BEGUN})
        client.log_batch(parent_id, params=_study_params(study))
    client.log_batch(parent_id, metrics=_metrics(values, round(1000 * time.time())))
    for path in artifacts:
        client.log_artifact(parent_id, str(path))
    client.set_terminated(parent_id, "FINISHED")
    client.set_tag(parent_id, CURVE_TRIALS, str(trials))
    _adopt(client, place.experiment_id, study, parent_id)
    return replace(place, parent_id=parent_id, curve_trials=trials)


def _common_tags(study: StudyTags, kind: str, device: str, versions: Mapping[str, str]) -> dict[str, str]:
    tags = {STUDY_TAG: study.study_id, KIND: kind, "bstune.study": study.name, "bstune.workload": study.workload}
    tags |= {"bstune.device": device, "mlflow.source.name": "bstune"}
    return tags | {_key(f"bstune.version.{package}"): version for package, version in versions.items()}


def _study_params(study: StudyTags) -> list[Param]:
    """Return the config and, below ``run.``, what the study ran on; a None in the config is ``null`` as in YAML."""
    ran_on = {"run.device": study.device, "run.git_commit": study.commit}
    ran_on |= {f"run.versions.{package}": version for package, version in study.versions.items()}
    values = {_key(k): v for k, v in [*study.params.items(), *ran_on.items()]}
    return [Param(k, "null" if v is None else _cut(str(v), _PARAM_LENGTH)) for k, v in values.items()]


def _curve_values(curves: Curves) -> Iterator[tuple[str, int, float]]:
    """Yield (name, step, value) of both groups: ``curve/`` by batch size, ``curve_log2/`` by round(100 log2 B)."""
    for name, points in curves.items():
        linear: dict[int, float] = {}
        log2: dict[int, float] = {}
        for batch_size, value in points:
            if value is None or not math.isfinite(value):
                continue
            linear[batch_size] = min(value, linear.get(batch_size, value))
            if value > 0:
                step = round(100 * math.log2(batch_size))
                log2[step] = min(math.log2(value), log2.get(step, math.inf))
        yield from ((f"curve/{name}", step, value) for step, value in sorted(linear.items()))
        yield from ((f"curve_log2/{name}", step, value) for step, value in sorted(log2.items()))


def _metrics(values: Values, milliseconds: int) -> list[Metric]:
    """Return MLflow's metrics of (name, step, value); a value that is None or not finite is left out."""
    finite = [(name, step, value) for name, step, value in values if value is not None and math.isfinite(value)]
    return [Metric(_key(name), float(value), milliseconds, step) for name, step, value in finite]


def _key(name: str) -> str:
    """Return ``name`` as MLflow allows it: letters, digits and ``_-. /`` in a path that is already normal."""
    return posixpath.normpath(re.sub(r"[^/\w.\- ]", "_", name)).lstrip("./")[:_KEY_LENGTH] or "_"


def _cut(text: str, length: int) -> str:
    mark = " ... (cut)"
    return text if len(text) <= length else text[: length - len(mark)] + mark


def open_job_tracking(prepared: PreparedStudy, study: optuna.Study) -> "Tracking | None":
    """Open MLflow and send the trials that it lacks."""
    config = prepared.config
    if not config.mlflow.enabled:
        return None

    tags = StudyTags(
        study_id=study.user_attrs[STUDY_ID],
        name=config.study,
        workload=config.workload.name,
        metric=prepared.protocol.target.metric,
        params=logged_config(config),
        versions=prepared.backend.versions,
        device=prepared.backend.device,
        commit=_git_commit(),
    )
    limits = Limits(
        request_seconds=config.mlflow.request_seconds,
        retries=config.mlflow.retries,
        trial_seconds=config.mlflow.seconds,
        study_seconds=config.mlflow.study_seconds,
    )
    tracking = open_tracking(mlflow_uri(config), config.mlflow.experiment, tags, limits)
    for result in results(study):
        tracking.send_trial(result)
    return tracking


def mlflow_uri(config: DictConfig) -> str:
    """Return where MLflow keeps what it is told: as the config says, or the environment."""
    return config.mlflow.uri or tracking_uri()


def _git_commit() -> str | None:
    """Return the commit of the working directory's repository; None where there is none, or no git."""
    command = ["git", "rev-parse", "HEAD"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip()


def logged_config(config: DictConfig) -> dict[str, Any]:
    """Return the composed config, flat, without passwords; the module's own references to the trial stay as such."""
    values = plain(config)
    if "module" in config.workload:
        values["workload"]["module"] = OmegaConf.to_container(config.workload.module, resolve=False)
    for name in ("trial", "mlflow", "storage", "debug"):
        values.pop(name)
    return {name: redact(str(value)) for name, value in flatten(values).items()}
