"""MLflow: one experiment, a parent run a study, a child run a trial; the only module that imports mlflow.

What was sent is found by searching the server for the study's id, so the next run of a command sends what is missing.
A child counts as sent once its run has ended; one whose sender died before that is deleted and sent again. Metrics are
append-only, so the results of a continued study go to a new parent, and the old one is deleted. One process at a time
may send a study's runs: the caller holds the study's lock.

MLflow being down or slow never stops a study. Left alone its client retries for minutes, so every exchange runs in a
thread that is waited for ``mlflow.study_seconds`` in all, over the whole run; the first failure is logged as one line
and ends sending. A request that is answered late is sent again, and may have been done twice: what was written twice,
or not to its end, is deleted when the study is opened and when it is finished.

Import this module late: mlflow takes 1.0 s (3.17.2, Python 3.11, two CPU cores, files cached, median of 8).
"""

import json
import logging
import math
import os
import posixpath
import re
import shlex
import sqlite3
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing, contextmanager, suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import optuna
from alembic.script import ScriptDirectory
from alembic.util import CommandError
from filelock import FileLock
from mlflow import MlflowClient
from mlflow.entities import Metric, Param, Run
from mlflow.exceptions import MlflowException
from mlflow.store.db import utils as mlflow_database
from mlflow.store.db.base_sql_model import Base
from mlflow.store.db.db_types import DATABASE_ENGINES
from mlflow.store.tracking import SEARCH_MAX_RESULTS_THRESHOLD
from mlflow.tracking.registry import UnsupportedModelRegistryStoreURIException
from mlflow.utils.logging_utils import suppress_logs_in_thread
from omegaconf import DictConfig, OmegaConf
from sqlalchemy.engine import make_url
from sqlalchemy.exc import SQLAlchemyError

from bstune.config import flatten, to_dict
from bstune.core.errors import ConfigError
from bstune.core.noise_scale import moving_estimate
from bstune.core.records import TrialResult
from bstune.core.secrets import redact, redact_patterns, redact_values
from bstune.study.prepare import PreparedStudy
from bstune.study.storage import STUDY_ID, results

Curves = Mapping[str, Sequence[tuple[int, float | None]]]
Values = Iterable[tuple[str, int, float | None]]
STUDY_TAG, KIND, TRIAL, PARENT = "bstune.study_id", "bstune.kind", "bstune.trial", "mlflow.parentRunId"
RESULTS_BEGUN = "bstune.results_begun"  # on a parent: some of its results may be there, or still come
RESULT_TRIALS = "bstune.result_trials"  # how many trials the results in a parent are of; set once they are all there
# mlflow.utils.validation: names of 250 characters, parameters of 6000; tags of 5000 before mlflow 3 and 8000 since.
_KEY_LENGTH, _PARAM_LENGTH, _TAG_LENGTH = 250, 6000, 5000
_TRIAL_PARAMS = ("batch_size", "lr", "delta", "seed", "trial_index", "resumed_from", "replicate_of")
_TRIAL_SECONDS = ("train_seconds", "eval_seconds", "startup_seconds", "wall_seconds", "seconds_per_step")
_TRIAL_METRICS = ("steps", "steps_low", "examples", "time_to_target", *_TRIAL_SECONDS)
# Of a server that is down, a locked or newer database, a full disk, a missing driver; those of requests are OSErrors.
_FAILURES = (MlflowException, SQLAlchemyError, CommandError, OSError, ImportError, json.JSONDecodeError)
_CONTENTS = ("runs", "registered_models", "trace_info")  # tables that hold what is not to be lost, but for experiments
_JOURNALS = ("-journal", "-wal", "-shm")
_LOOK_SECONDS = 1.0  # between two looks at a database that another program may be making
_THREAD = "bstune-mlflow"
_log = logging.getLogger(__name__)
# What mlflow's HTTP client says of its retries; mlflow's own loggers are silenced as the thread runs.
logging.getLogger("urllib3.connectionpool").addFilter(lambda record: record.threadName != _THREAD)


def open_tracking(prepared: PreparedStudy, study: optuna.Study) -> "Tracking":
    """Open MLflow and send the trials that it lacks."""
    tracking = Tracking(prepared, study.user_attrs[STUDY_ID])
    for result in results(study):
        tracking.send_trial(result)
    return tracking


def tracking_uri(settings: DictConfig) -> str:
    """Return the URI in the config, or ``MLFLOW_TRACKING_URI``, or of ``mlflow.db``; SQLite paths are made absolute."""
    uri: str = settings.uri or os.environ.get("MLFLOW_TRACKING_URI") or "sqlite:///mlflow.db"
    path = uri.removeprefix("sqlite:///")
    if path in (uri, "", ":memory:") or "?" in path:
        return uri
    # Not mlflow's own conversion: it writes a space as %20, which SQLAlchemy 2.0 takes for a part of the name.
    return f"sqlite:///{Path(path).absolute().as_posix()}"


def check_uri(uri: str) -> None:
    """Check that MLflow has a store for this kind of URI, without connecting; ConfigError if it has none."""
    if urlsplit(uri).scheme.partition("+")[0] in ("http", "https", *DATABASE_ENGINES):
        return
    try:
        MlflowClient(uri)
    except UnsupportedModelRegistryStoreURIException as error:
        accepted = "the http address of an MLflow server or a database such as sqlite:///mlflow.db"
        raise ConfigError(f"MLFLOW_TRACKING_URI or mlflow.uri must be {accepted}, but got {uri!r}") from error
    except _FAILURES:
        return  # known, but not there now: sending says so once, and the study goes on


def ui_command(uri: str) -> str:
    """Return the command that opens the MLflow UI on ``uri``, or a server's address; neither shows a password."""
    if uri.startswith(("http://", "https://")):
        return re.sub("//[^/]*@", "//", redact_patterns(uri))
    shown = shlex.quote(uri) if redact_patterns(uri) == uri else '"$MLFLOW_TRACKING_URI"'
    return f"{shlex.quote(sys.executable)} -m mlflow ui --backend-store-uri {shown}"


class Tracking:
    """A study's runs in MLflow. Nothing here raises because of MLflow: after a failure, nothing more is sent."""

    _client: MlflowClient
    _experiment_id: str
    _parent: Run

    def __init__(self, prepared: PreparedStudy, study_id: str) -> None:
        """Find what was sent before of the study with this uuid."""
        config, self._backend, self._metric = prepared.config, prepared.backend, prepared.protocol.target.metric
        self._settings, self._name, self._commit = config.mlflow, config.study, _git_commit()
        self._tags = {STUDY_TAG: study_id, "bstune.study": config.study, "bstune.workload": config.workload.name}
        versions = {f"run.versions.{package}": version for package, version in self._backend.versions.items()}
        ran_on = {"run.device": self._backend.device, "run.git_commit": self._commit or "null", **versions}
        self._params = {_key(k): _cut(v, _PARAM_LENGTH) for k, v in {**logged_config(config), **ran_on}.items()}
        self._failed, self._clock, self._left = False, time.monotonic, config.mlflow.study_seconds
        self._children: dict[int, str] = {}  # ids of the runs of the trials that MLflow has whole
        self._exchange("open the study", partial(self._find, tracking_uri(config.mlflow)))

    @property
    def sent(self) -> set[int]:
        """Numbers of the trials that MLflow has whole."""
        return set(self._children)

    def send_trial(self, result: TrialResult) -> None:
        """Send one trial whole, unless MLflow has it; what a trial short of the target lacks is left out."""
        if not self._failed and result.number not in self._children:
            work = partial(self._write_trial, result, round(1000 * time.time()))
            self._exchange(f"send trial {result.number}", work, self._settings.seconds)

    def finish_study(self, curves: Curves, scalars: Mapping[str, float | None], artifacts: Sequence[Path]) -> None:
        """Send a completed study's results to its parent run, and end that run; nothing if it has as many trials'."""
        if self._failed or self._parent.data.tags.get(RESULT_TRIALS) == str(len(self.sent)):
            return
        values = [*_curve_values(curves), *((name, 0, value) for name, value in scalars.items())]
        self._exchange("send the curve", partial(self._write_results, values, artifacts))

    def _exchange(self, what: str, work: Callable[[], None], seconds: float = math.inf) -> None:
        """Run ``work`` in a thread and wait ``seconds`` for it; after a failure log one line and end sending.

        All that a run waits is ``mlflow.study_seconds``.
        """
        outcome: Future[None] = Future()

        def run() -> None:
            with suppress_logs_in_thread():
                try:
                    work()
                    outcome.set_result(None)
                except Exception as error:  # noqa: BLE001 (the thread's end would print its passwords)
                    outcome.set_exception(error)

        # A daemon: one that hangs must not keep the process from ending.
        thread = threading.Thread(target=run, name=_THREAD, daemon=True)
        allowed, start = min(seconds, self._left), self._clock()
        total = f"what was left of mlflow.study_seconds={self._settings.study_seconds:g}"
        limit = f"mlflow.seconds={seconds:g}" if seconds < self._left else total
        with _short_requests(self._settings):
            if allowed > 0:
                thread.start()
                thread.join(allowed)
        self._left -= self._clock() - start
        trace = ""
        if allowed <= 0 or thread.is_alive():
            reason = f"no answer within {max(0.0, allowed):.3g} s, {limit}"
        elif (error := outcome.exception()) is not None:
            reason = redact(f"{type(error).__name__}: {error}").splitlines()[0]
            if not isinstance(error, _FAILURES):
                trace = "\n" + redact("".join(traceback.format_exception(error)))
        else:
            return
        self._failed = True
        then = "The next run of the same command sends what is missing, if MLflow answers by then."
        _log.warning("MLflow: could not %s (%s). %s%s", what, reason, then, trace)

    def _find(self, uri: str) -> None:
        """Find or create the experiment and the parent, and repair what a process that died left behind."""
        if (path := _database_path(uri)) is not None:
            make_database(path)
        self._client = MlflowClient(uri)
        self._experiment_id = _experiment(self._client, uri, self._settings.experiment)
        # The newest with all its results: a newer one with half of them is what a process that died left.
        parents = self._runs("study")
        parent = max(parents, key=lambda run: (RESULT_TRIALS in run.data.tags, run.info.start_time), default=None)
        self._parent = parent or self._create_parent()
        self._client.log_batch(self._parent.info.run_id, params=self._missing_params(self._parent))
        for child in self._runs("trial"):
            if child.info.status in ("FINISHED", "FAILED"):
                self._children.setdefault(int(child.data.tags[TRIAL]), child.info.run_id)
        self._delete_strays()
        self._make_only_parent(self._parent.info.run_id)

    def _runs(self, kind: str) -> list[Run]:
        """Return the study's runs of a kind that were not deleted, the oldest first, 50,000 at most."""
        where = f"tags.`{STUDY_TAG}` = '{self._tags[STUDY_TAG]}' and tags.`{KIND}` = '{kind}'"
        limit, order = SEARCH_MAX_RESULTS_THRESHOLD, ["start_time"]
        return list(self._client.search_runs([self._experiment_id], where, max_results=limit, order_by=order))

    def _create_parent(self) -> Run:
        tags = self._run_tags("study", self._backend.device, self._backend.versions) | {"bstune.metric": self._metric}
        tags |= {"mlflow.source.git.commit": self._commit} if self._commit else {}
        return self._client.create_run(self._experiment_id, tags=tags, run_name=self._name)

    def _make_only_parent(self, parent_id: str) -> None:
        """Move all the study's children to this parent, then delete its other parents."""
        for child in self._runs("trial"):
            if child.data.tags[PARENT] != parent_id:
                self._client.set_tag(child.info.run_id, PARENT, parent_id)
        for run in self._runs("study"):
            if run.info.run_id != parent_id:
                self._client.delete_run(run.info.run_id)

    def _delete_strays(self) -> None:
        """Delete the trials' runs that a process that died, or a repeated request, left beside those that are whole."""
        whole = set(self._children.values())
        for child in self._runs("trial"):
            if child.info.run_id not in whole:
                self._client.delete_run(child.info.run_id)

    def _write_trial(self, result: TrialResult, end: int) -> None:
        tags = self._run_tags("trial", result.device, result.versions)
        tags |= {TRIAL: str(result.number), PARENT: self._parent.info.run_id, "bstune.status": result.status}
        tags |= {"bstune.message": _cut(redact(result.message), _TAG_LENGTH)} if result.message else {}
        name = f"trial {result.number}: B {result.batch_size}, lr {result.lr:.3g}"
        start = end - round(1000 * result.wall_seconds)
        run_id = self._client.create_run(self._experiment_id, start, tags, name).info.run_id
        values: list[tuple[str, int, float | None]] = [(name, 0, getattr(result, name)) for name in _TRIAL_METRICS]
        if result.reached:
            values += [("steps_to_target", 0, result.steps), ("examples_to_target", 0, result.examples)]
        values += [(self._metric, step, value) for step, value in result.history]
        for last, (step, _, _) in enumerate(result.noise_scale, start=1):
            estimate = moving_estimate(result.noise_scale[:last])
            estimated = {"": estimate.noise_scale, "_low": estimate.low, "_high": estimate.high}
            values += [(f"noise_scale{name}", step, value) for name, value in estimated.items()]
        params = [Param(name, str(value)) for name in _TRIAL_PARAMS if (value := getattr(result, name)) is not None]
        params += [Param(_key(name), str(value)) for name, value in result.hyperparameters.items()]
        # The client itself splits what is past the limits of one request: 1000 metrics, 100 parameters.
        self._client.log_batch(run_id, _metrics(values, end), params)
        # Last, because a run that has ended counts as sent.
        self._client.set_terminated(run_id, "FAILED" if result.status == "failed" else "FINISHED", end)
        self._children[result.number] = run_id

    def _write_results(self, values: Values, artifacts: Sequence[Path]) -> None:
        client = self._client
        # Results of fewer trials, or half sent, perhaps still on their way.
        again = bool(self._parent.data.metrics) or RESULTS_BEGUN in self._parent.data.tags
        parent = self._create_parent() if again else self._parent
        run_id = parent.info.run_id
        client.set_tag(run_id, RESULTS_BEGUN, "true")
        client.log_batch(run_id, _metrics(values, round(1000 * time.time())), self._missing_params(parent))
        for path in artifacts:
            client.log_artifact(run_id, str(path))
        client.set_terminated(run_id, "FINISHED")
        client.set_tag(run_id, RESULT_TRIALS, str(len(self.sent)))  # from here on it is the parent that stays
        self._delete_strays()
        self._make_only_parent(run_id)
        self._parent = client.get_run(run_id)

    def _run_tags(self, kind: str, device: str, versions: Mapping[str, str]) -> dict[str, str]:
        tags = self._tags | {KIND: kind, "bstune.device": device, "mlflow.source.name": "bstune"}
        return tags | {_key(f"bstune.version.{package}"): version for package, version in versions.items()}

    def _missing_params(self, parent: Run) -> list[Param]:
        """Return the config and, below ``run.``, what the study ran on, as far as the parent lacks it."""
        return [Param(name, value) for name, value in self._params.items() if name not in parent.data.params]


@contextmanager
def _short_requests(settings: DictConfig) -> Iterator[None]:
    """Give MLflow's HTTP client short limits while the context is open: it reads the environment at each request."""
    values = {
        "MLFLOW_HTTP_REQUEST_TIMEOUT": str(settings.request_seconds),
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": str(settings.retries),
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


def _experiment(client: MlflowClient, uri: str, name: str) -> str:
    """Return the id of the experiment, created where it is missing."""
    if (found := client.get_experiment_by_name(name)) is not None:
        return str(found.experiment_id)
    # Left to MLflow, the artifacts of a database would lie below whatever the working directory is.
    path = _database_path(uri)
    location = None if path is None else str(path.parent / "mlruns" / quote(name, safe=" "))
    try:
        return str(client.create_experiment(name, artifact_location=location))
    except MlflowException:  # another process has just made it, or this one, if the request was repeated
        if (found := client.get_experiment_by_name(name)) is None:
            raise
        return str(found.experiment_id)


def _database_path(uri: str) -> Path | None:
    """Return the path of a SQLite database; None for a server, or a database in memory."""
    database = make_url(uri).database if uri.startswith("sqlite:///") and "?" not in uri else None
    return Path(database).absolute() if database and database != ":memory:" else None


def make_database(path: Path) -> None:
    """Make MLflow's SQLite database under another name, then rename it; nothing if it is there.

    One that was not made to its end would break every later study: it is moved aside, if nothing is in it.
    """
    if path.exists() and not _half_made(path):
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    lock, partial = (path.with_name(path.name + end) for end in (".lock", ".partial"))
    with FileLock(lock):
        broken = path.exists() and _half_made(path) and not _being_made(path)
        if broken or not path.exists():
            for end in ("", *_JOURNALS):  # of a process that was killed as it made it
                partial.with_name(partial.name + end).unlink(missing_ok=True)
            engine = mlflow_database.create_sqlalchemy_engine_with_retry(f"sqlite:///{partial}")  # type: ignore[no-untyped-call]
            mlflow_database._initialize_tables(engine)  # type: ignore[no-untyped-call]
            engine.dispose()
            aside = next(one for i in count(1) if not (one := path.with_name(f"{path.name}.incomplete-{i}")).exists())
            _rename(path, aside)  # a journal by itself, too: it would be taken for the new database's
            partial.rename(path)
            if broken:
                what = "was not made to its end and holds no runs: it is now"
                _log.warning("MLflow: the database %s %s %s, and a new one was made", path, what, aside.name)
        lock.unlink(missing_ok=True)  # who waits for it finds the database and makes none


def _rename(path: Path, name: Path) -> None:
    """Rename what there is of a SQLite database and its journals."""
    for end in (*_JOURNALS, ""):
        with suppress(FileNotFoundError):
            path.with_name(path.name + end).rename(name.with_name(name.name + end))


def _being_made(path: Path) -> bool:
    """Return whether another program, as ``mlflow ui``, changes the file."""
    before = path.stat()
    time.sleep(_LOOK_SECONDS)
    after = path.stat()
    return (before.st_mtime_ns, before.st_size) != (after.st_mtime_ns, after.st_size)


def _half_made(path: Path) -> bool:
    """Return whether a SQLite file is what MLflow leaves if it is ended as it makes its tables, with nothing in it."""
    try:
        with closing(sqlite3.connect(f"{path.as_uri()}?mode=rw", uri=True, timeout=_LOOK_SECONDS)) as connection:

            def rows(what: str) -> list[Any]:
                return [row[0] for row in connection.execute(f"SELECT {what}")]

            tables = set(rows("name FROM sqlite_master WHERE type = 'table'"))
            versions = rows("version_num FROM alembic_version") if "alembic_version" in tables else []
            config = mlflow_database._get_alembic_config("")  # type: ignore[no-untyped-call]
            scripts = ScriptDirectory.from_config(config)
            if versions:
                known = {script.revision for script in scripts.walk_revisions()}
                own = not {*versions} & {*scripts.get_heads()} and {*versions} <= known
            else:
                own = tables <= {*Base.metadata.tables, "alembic_version"}
            contents = [f"1 FROM {table}" for table in _CONTENTS if table in tables]
            contents += ["1 FROM experiments WHERE experiment_id != 0"] if "experiments" in tables else []
            return own and not any(rows(what + " LIMIT 1") for what in contents)
    except sqlite3.Error:  # locked, or no database: MLflow says what is wrong with it
        return False


def _curve_values(curves: Curves) -> Iterator[tuple[str, int, float]]:
    """Yield (name, step, value): ``curve/`` at the batch size, ``curve_log2/``, log2(value), at round(100 log2 B)."""
    for name, points in curves.items():
        finite = [(size, value) for size, value in points if value is not None and math.isfinite(value)]
        finite.sort(key=lambda point: -point[1])
        linear = dict(finite)  # by falling value: of a step's, the lowest stays
        log2 = {round(100 * math.log2(size)): math.log2(value) for size, value in finite if value > 0}
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


def _git_commit() -> str | None:
    """Return the commit of the working directory's repository; None where there is none, or no git."""
    try:
        command = ["git", "rev-parse", "HEAD"]  # the git of whoever runs the study
        return subprocess.check_output(command, stderr=subprocess.DEVNULL, text=True, timeout=5).strip()  # noqa: S603
    except (OSError, subprocess.SubprocessError):
        return None


def logged_config(config: DictConfig) -> dict[str, str]:
    """Return the composed config, flat, without passwords; the module's own references to the trial stay as such."""
    values = to_dict(config)
    if "module" in config.workload:
        values["workload"]["module"] = OmegaConf.to_container(config.workload.module, resolve=False)
    for name in ("trial", "mlflow", "storage", "debug"):
        values.pop(name)
    return {name: str(value) for name, value in flatten(redact_values(values)).items()}
