"""A study in Optuna's storage: its records as ordinary trials, claimed and told without loss.

A trial is claimed in one transaction that stores its parameters and its spec. Its record is stored
before the trial ends: a process that is killed in between loses nothing, as whoever reads the
record next ends the trial. Of two processes that claim one place of the plan, the smaller trial
number keeps it.
"""

import json
import math
import os
import socket
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, Thread
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, FloatDistribution, IntDistribution
from optuna.exceptions import ExperimentalWarning, StorageInternalError
from optuna.storages import BaseStorage, RDBStorage
from optuna.trial import FrozenTrial, TrialState, create_trial
from pydantic import ValidationError
from sqlalchemy import create_engine, event, inspect
from sqlalchemy.exc import ArgumentError, IntegrityError, OperationalError, SQLAlchemyError

from bstune.core.errors import InputError, StudyError, UserCodeError
from bstune.core.question import Question
from bstune.core.records import Record, Spec
from bstune.core.space import Space, Tunable
from bstune.search.sampler import ranges_of
from bstune.study.plan import Ask
from bstune.system.files import StudyFolder, discard_folder, refuse_link
from bstune.system.secrets import hide, hide_in_error

SPEC = "spec"
RECORD = "record"
PROCESS = "process"
SETTINGS = "settings"
SHARED = "shared"
ANSWER = "answer"
# What optuna-dashboard shows as a study's note, of at most so many characters.
NOTE = {"version": "dashboard:note_ver", "text": "dashboard:note_str:0"}
NOTE_CHARACTERS = 2045
# Of what bstune keeps in a study; another's is refused.
SCHEMA = 1
# Seconds between a process's signs of life; a trial without one for twice as long is stale.
HEARTBEAT = 30
# Seconds between tries to open a database, and to connect to one that was open: a server restarts.
RETRIES = (0.2, 0.5, 1.0)
PATIENCE = (*RETRIES, 2.0, 4.0)
# Optuna's gRPC proxy in front of a database has no heartbeats; its trials have this attribute.
PROXY = "grpc://"
BY_PROXY = "by_proxy"
PROXY_SECONDS = 5.0
# The most studies that are named where another was asked for.
NAMED_STUDIES = 5
# The most evaluations of a trial that Optuna shows; the record has all.
SHOWN_EVALUATIONS = 16

_STATES = {
    "reached": TrialState.COMPLETE,
    "finished": TrialState.COMPLETE,
    "missed": TrialState.PRUNED,
    "pruned": TrialState.PRUNED,
    "diverged": TrialState.PRUNED,
    "out of memory": TrialState.FAIL,
    "refused": TrialState.FAIL,
    "failed": TrialState.FAIL,
}


class StudyStorage:
    """One study in a storage; :meth:`begin` comes before the first claim.

    Args:
        url: of the database, such as ``sqlite:///outputs/bstune.db``.
        name: of the study, which is made where it is missing.

    Raises:
        InputError: it is no database's URL.
        StudyError: the database cannot be opened.
    """

    def __init__(self, url: str, name: str) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._name = name
        self._new_file: Path | None = None
        self._study: optuna.Study | None = None
        self._open(url, name)
        self._distributions: dict[str, IntDistribution | FloatDistribution] = {}
        self._process = _this_process()
        self._alive: set[int] = set()
        self.keeps_step_times = True
        """Whether the step times of this process's trials are those of the study's machine."""

    def begin(self, space: Space, question: Question, settings: Mapping[str, object]) -> None:
        """Begin the study or go on with it, and end what killed processes left.

        Args:
            space: whose ranges are the parameters' distributions.
            question: which says what the trials' value is.
            settings: what must not change while a study goes on, as JSON.

        Raises:
            StudyError: the study was begun with other settings.
        """
        self.check(settings)
        self._question = question
        maximizes = question.seeks_metric and question.target.mode == "max"
        try:
            self._study = optuna.create_study(
                study_name=self._name,
                storage=self._storage,
                direction="maximize" if maximizes else "minimize",
                load_if_exists=True,
            )
        except LookupError as error:
            raise self._foreign() from error
        if SETTINGS not in self.study.user_attrs:
            with _without_experimental_warnings():
                self.study.set_metric_names([question.value_name])
            self.study.set_user_attr(SETTINGS, {"schema": SCHEMA, **_kept(settings)})
        of_values = {tunable.name: _optuna_range(tunable) for tunable in space.tunables}
        self._distributions = ranges_of(space) | of_values
        self.settle()

    def setting(self, name: str) -> Any:
        """A setting that the study was begun with; None while there is none."""
        return self._settings().get(name)

    def share(self, what: Mapping[str, object]) -> None:
        """Keep what others who join the study need beside its settings, as JSON."""
        self.study.set_user_attr(SHARED, what)

    @property
    def shared(self) -> dict[str, Any]:
        """What :meth:`share` has kept; StudyError where no such study has begun."""
        found: dict[str, Any] = {}
        if self._study is not None:
            found = self._study.user_attrs.get(SHARED, found)
        if not found:
            there = optuna.get_all_study_names(self._storage)
            names = ", ".join(there[:NAMED_STUDIES]) or "none"
            raise StudyError(f"no study {self._name} has begun: the storage has {names}")
        return found

    def show_answer(self, answer: Mapping[str, object], text: str) -> None:
        """Show the answer where Optuna shows a study: as its attribute, and as a note.

        Args:
            answer: in short, as JSON.
            text: as it is printed.
        """
        self.study.set_user_attr(ANSWER, answer)
        note = (
            f"```\n{text}\n```\nOptuna's best trial is a single run, perhaps a lucky one: the "
            f"answer stands on new seeds."
        )
        study_id = self.study._study_id
        version = self._storage.get_study_system_attrs(study_id).get(NOTE["version"], 0)
        if isinstance(version, int):
            self._storage.set_study_system_attr(study_id, NOTE["version"], version + 1)
        self._storage.set_study_system_attr(study_id, NOTE["text"], note[:NOTE_CHARACTERS])

    def _open(self, url: str, name: str) -> None:
        """Open the database, and the study if it is there; errors as of the class."""
        try:
            with database_errors(url, "cannot be opened"):
                if url.startswith("sqlite:///"):
                    path = Path(url.removeprefix("sqlite:///"))
                    refuse_link(path)
                    path.parent.mkdir(parents=True, exist_ok=True)
                    self._new_file = None if path.exists() else path
                self._storage = _open_database(url)
                self._is_new = name not in optuna.get_all_study_names(self._storage)
                if not self._is_new:
                    self._load()
        except (ArgumentError, ImportError, ValueError) as error:
            reason = str(error).partition("\n")[0]
            got = hide_in_error(f"{hide(url)}: {reason}")
            raise InputError(
                f"storage must be the URL of a database, such as sqlite:///study.db, but got {got}"
            ) from error
        # The last two are of a database of another version of Optuna.
        except (OSError, LookupError, RuntimeError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise StudyError(f"storage={hide(url)} cannot be opened: {reason}") from error

    def _load(self) -> None:
        """Load a study of this version of bstune, or an empty one, as a killed process left it."""
        try:
            self._study = study = optuna.load_study(study_name=self._name, storage=self._storage)
            settings = self._settings()
            is_empty = not study.user_attrs and not study.get_trials(deepcopy=False)
            for trial in self._trials():
                _spec_of(trial)
                _record_of(trial)
        except (ValidationError, TypeError) as error:
            raise self._foreign() from error
        if settings.get("schema") == SCHEMA or is_empty:
            return
        whose = "another program"
        if "schema" in settings:
            whose = f"a bstune of schema {settings['schema']}, where this one has {SCHEMA}"
        raise StudyError(f"the study {self._name} was made by {whose}: give study=NAME for another")

    def _foreign(self) -> StudyError:
        return StudyError(
            f"the study {self._name} has what bstune did not write: give study=NAME for another"
        )

    @property
    def study(self) -> optuna.Study:
        """Optuna's study, once it was begun."""
        assert self._study is not None  # noqa: S101 (begin makes it)
        return self._study

    def _settings(self) -> dict[str, Any]:
        """The settings that the study was begun with; none while it was not."""
        found = {} if self._study is None else self._study.user_attrs.get(SETTINGS)
        # Another program may keep anything there.
        return found if isinstance(found, dict) else {}

    def check(self, settings: Mapping[str, object]) -> None:
        """See that a study that was begun has these settings; StudyError names one that differs."""
        stored = self._settings()
        if not stored:
            return
        ours = dict(_by_dotted_name(_kept(settings)))
        theirs = dict(_by_dotted_name({name: stored.get(name) for name in settings}))
        for key in sorted({*ours, *theirs}):
            own, begun = (one.get(key, "nothing") for one in (ours, theirs))
            if own != begun:
                raise StudyError(
                    f"the study {self._name!r} was begun with {key}={_shortened(begun)}, but got "
                    f"{_shortened(own)}: give {key} as it was, or study=NAME for another study"
                )

    def discard(self) -> bool:
        """Remove what this object made, if no trial was stored or runs; whether there is none."""
        if self.records() or self.running():
            return False
        if self._is_new and self._study is not None:
            optuna.delete_study(study_name=self._name, storage=self._storage)
        file, database = self._new_file, self._storage
        if file and isinstance(database, RDBStorage) and not database.get_all_studies():
            database.engine.dispose()
            file.unlink(missing_ok=True)
        return True

    def records(self) -> list[Record]:
        """The records of all finished trials, in order of their numbers."""
        found = [_record_of(trial) for trial in self._trials()]
        return [record for record in found if record is not None]

    def running(self) -> list[Spec]:
        """The trials that run somewhere and have no record yet."""
        return [_spec_of(trial) for trial in self._trials() if _is_running(trial)]

    def claim(self, ask: Ask) -> Spec | None:
        """Store a trial and give it its number; None if another process has its place."""
        # While it was decided, mostly.
        if any(_holds_place(trial, ask.place) for trial in self._trials()):
            return None
        values = {"batch_size": ask.batch_size, "lr": ask.lr, **ask.values}
        # The baseline's may lie outside of their ranges: then the spec alone has them.
        distributions: dict[str, BaseDistribution] = {}
        for name, distribution in self._distributions.items():
            if distribution.low <= values[name] <= distribution.high:
                distributions[name] = distribution
        # What has its default is left out: each trial's attributes are small.
        of_spec: dict[str, Any] = {"exclude": {"until"}, "exclude_defaults": True}
        template = create_trial(
            state=TrialState.RUNNING,
            params={name: values[name] for name in distributions},
            distributions=distributions,
            user_attrs={SPEC: ask.model_dump_json(**of_spec), PROCESS: self._process},
        )
        if not isinstance(self._storage, RDBStorage):
            template.set_user_attr(BY_PROXY, True)
        trial_id = self._storage.create_new_trial(self.study._study_id, template)
        self._record_heartbeat(trial_id)
        self._alive.add(trial_id)
        number = self._storage.get_trial_number_from_id(trial_id)
        for trial in self._trials():
            if trial.number < number and _holds_place(trial, ask.place):
                self._alive.remove(trial_id)
                self._fail(trial_id)
                return None
        return _numbered(ask, number)

    def finish(self, record: Record) -> bool:
        """Store a record, then show its evaluations to Optuna and end the trial.

        False: another process took this one for dead, and has its place now.
        """
        if not self.keeps_step_times:
            record = record.model_copy(update={"seconds_per_step": None})
        trial = self._trial_numbered(record.number)
        self._alive.discard(trial._trial_id)
        text = record.model_dump_json(exclude_defaults=True)
        try:
            self._storage.set_trial_user_attr(trial._trial_id, RECORD, text)
        # Its UpdateFinishedTrialError, which Optuna 4.0 does not name.
        except RuntimeError:
            return False
        self._end_as_recorded(trial, record)
        return True

    def abandon(self, spec: Spec) -> None:
        """End a trial without a record: its place is asked again."""
        trial = self._trial_numbered(spec.number)
        self._alive.discard(trial._trial_id)
        if trial.state == TrialState.RUNNING:
            self._fail(trial._trial_id)

    def _fail(self, trial_id: int) -> None:
        """End a trial as failed, unless another process has ended it just before."""
        # Its UpdateFinishedTrialError, which Optuna 4.0 does not name.
        with suppress(RuntimeError):
            self._storage.set_trial_state_values(trial_id, TrialState.FAIL)

    @contextmanager
    def heartbeats(self, apart: float = HEARTBEAT / 2) -> Iterator[None]:
        """Show that this process lives while the body runs, however long it trains.

        Args:
            apart: seconds between two signs.
        """
        over = Event()

        def beat() -> None:
            """Show it for each trial that runs here, until the body is over."""
            while not over.wait(apart):
                for trial_id in self._alive.copy():
                    # The next one may come through.
                    with suppress(SQLAlchemyError, StorageInternalError):
                        self._record_heartbeat(trial_id)

        thread = Thread(target=beat, daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def _record_heartbeat(self, trial_id: int) -> None:
        """Show that a trial lives; a proxy has no way to."""
        if isinstance(self._storage, RDBStorage):
            self._storage.record_heartbeat(trial_id)

    def settle(self, by_proxy: bool = False) -> None:
        """End what killed processes left: recorded trials as recorded, others as failed.

        Args:
            by_proxy: those of other hosts over a proxy, too, of which nobody knows whether they
                live; a proxy leaves them to who is at the database.
        """
        is_at_database = isinstance(self._storage, RDBStorage)
        for trial in self._trials():
            if trial.state != TrialState.RUNNING:
                continue
            record = _record_of(trial)
            ends_unknown = by_proxy and is_at_database and BY_PROXY in trial.user_attrs
            if record is not None:
                self._end_as_recorded(trial, record)
            elif _is_dead(trial.user_attrs.get(PROCESS, ""), ends_unknown):
                self._fail(trial._trial_id)
        with _without_experimental_warnings():
            optuna.storages.fail_stale_trials(self.study)

    def _end_as_recorded(self, trial: FrozenTrial, record: Record) -> None:
        """End a trial as its record says; another process may have ended it just before."""
        state, values = _STATES[record.status], None
        if state == TrialState.COMPLETE:
            values = self._shown_value(record)
            # On another kind of machine it has no seconds to compare.
            state = TrialState.COMPLETE if values else TrialState.PRUNED
        trial_id = trial._trial_id
        try:
            for step, value in _thinned(record.finite_history):
                self._storage.set_trial_intermediate_value(trial_id, step, value)
            for name in ("status", "steps", "seconds_per_step", "resumed_from"):
                shown = getattr(record, name)
                if shown is not None:
                    self._storage.set_trial_user_attr(trial_id, name, shown)
            self._storage.set_trial_state_values(trial_id, state, values)
        # Its UpdateFinishedTrialError, which Optuna 4.0 does not name.
        except RuntimeError:
            return

    def _shown_value(self, record: Record) -> list[float] | None:
        """The one value of a trial that reached, in a list, as Optuna takes values.

        It is in seconds or steps, or the best metric, as the question counts. None: it would be in
        seconds, of which the trial has none.
        """
        question, seconds = self._question, record.seconds_per_step
        if question.seeks_metric:
            return [question.target.best(record.finite_values)]
        if seconds is None and not question.counts_steps:
            return None
        return [question.value(record.steps, record.batch_size, lambda _: seconds or math.nan)]

    def _trials(self) -> list[FrozenTrial]:
        """The study's trials that bstune asked."""
        trials = [] if self._study is None else self._study.get_trials(deepcopy=False)
        return [trial for trial in trials if SPEC in trial.user_attrs]

    def _trial_numbered(self, number: int) -> FrozenTrial:
        return self.study.get_trials(deepcopy=False)[number]


@contextmanager
def open_study(url: str, name: str, folder: StudyFolder) -> Iterator[StudyStorage]:
    """Open a study; where its body ends before a trial is stored, nothing is left of it.

    It ends so by a refusal, or where a loop of one's own is left.

    Args:
        url, name: as in :class:`StudyStorage`.
        folder: of the study.
    """
    storage = None
    try:
        storage = StudyStorage(url, name)
        with storage.heartbeats():
            yield storage
    except (InputError, StudyError, UserCodeError, GeneratorExit):
        if storage is None or storage.discard():
            discard_folder(folder)
        raise


@contextmanager
def database_errors(url: str, what: str) -> Iterator[None]:
    """Turn what a database raises in the body into one line, ``storage=URL what: reason``.

    Raises:
        StudyError: for such an error; that the URL itself is none is left to the caller.
    """
    try:
        yield
    except ArgumentError:
        raise
    except _storage_errors() as error:
        # One of gRPC's tells it in its details.
        tell = getattr(error, "details", error.__str__)
        cause = getattr(error.__cause__, "orig", error.__cause__)
        reason = str(cause or tell()).partition("\n")[0]
        raise StudyError(f"storage={hide(url)} {what}: {hide_in_error(reason)}") from error


def _storage_errors() -> tuple[type[Exception], ...]:
    """What Optuna's storages raise; of gRPC only where it was imported."""
    grpc = sys.modules.get("grpc")
    of_proxy = () if grpc is None else (grpc.RpcError,)
    return SQLAlchemyError, StorageInternalError, *of_proxy


def _open_database(url: str) -> BaseStorage:
    """Open a database, and make its tables; another process may make them at the same time."""
    if url.startswith(PROXY):
        # Optuna 4.0 has none.
        from optuna.storages import GrpcStorageProxy

        host, _, port = url.removeprefix(PROXY).rpartition("@")[2].partition(":")
        with _without_experimental_warnings():
            proxy = GrpcStorageProxy(host=host, port=int(port))
        proxy.wait_server_ready(PROXY_SECONDS)
        return proxy
    with _without_experimental_warnings():
        for wait in (*RETRIES, None):
            try:
                _refuse_others_tables(url)
                # A connection that a restart has cut is noticed before it is used.
                options = {"pool_pre_ping": True}
                storage = RDBStorage(url, options, heartbeat_interval=HEARTBEAT)
                break
            except (IntegrityError, OperationalError, StorageInternalError):
                if wait is None:
                    raise
                time.sleep(wait)
    event.listen(storage.engine, "do_connect", _connect_patiently)
    return storage


def _refuse_others_tables(url: str) -> None:
    """StudyError for a database whose tables another program migrates: Optuna would add its own."""
    engine = create_engine(url)
    tables = inspect(engine).get_table_names()
    engine.dispose()
    if "alembic_version" in tables and "version_info" not in tables:
        raise StudyError(
            f"storage={url} is the database of another program, such as MLflow: give "
            f"another one, such as sqlite:///study.db"
        )


def _connect_patiently(dialect: Any, record: Any, args: Any, keywords: Any) -> Any:
    """Connect to a database that was open before, which may be restarting."""
    for wait in PATIENCE:
        try:
            return dialect.connect(*args, **keywords)
        except dialect.dbapi.OperationalError:
            time.sleep(wait)
    return dialect.connect(*args, **keywords)


@contextmanager
def _without_experimental_warnings() -> Iterator[None]:
    """Let Optuna not warn of what it calls experimental."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)
        yield


def _optuna_range(tunable: Tunable) -> IntDistribution | FloatDistribution:
    """The range of a further value as Optuna's parameter; it has no scale of 1 - x."""
    is_log = tunable.scale == "log"
    if tunable.is_whole:
        return IntDistribution(int(tunable.low), int(tunable.high), log=is_log)
    return FloatDistribution(tunable.low, tunable.high, log=is_log)


def _spec_of(trial: FrozenTrial) -> Spec:
    return _numbered(Ask.model_validate_json(trial.user_attrs[SPEC]), trial.number)


def _numbered(ask: Ask, number: int) -> Spec:
    return Spec(number=number, **ask.model_dump(exclude={"until"}))


def _record_of(trial: FrozenTrial) -> Record | None:
    """The record of a trial that has one.

    What a killed process had sent to a slow server may come through once another process has failed
    the trial and asked its place again: that is no record.
    """
    if RECORD not in trial.user_attrs:
        return None
    record = Record.model_validate_json(trial.user_attrs[RECORD])
    was_ended = trial.state == TrialState.FAIL
    return None if was_ended and _STATES[record.status] != TrialState.FAIL else record


def _is_running(trial: FrozenTrial) -> bool:
    return trial.state == TrialState.RUNNING and RECORD not in trial.user_attrs


def _holds_place(trial: FrozenTrial, place: str) -> bool:
    """Whether a trial has a place of the plan: it runs there, or has left a record there.

    One that failed leaves its place free for another try.
    """
    if trial.state == TrialState.FAIL or _spec_of(trial).place != place:
        return False
    return _is_running(trial) or RECORD in trial.user_attrs


def _thinned(history: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """At most ``SHOWN_EVALUATIONS`` of a history, the first and the last among them."""
    count = len(history)
    if count <= SHOWN_EVALUATIONS:
        return list(history)
    apart = (count - 1) / (SHOWN_EVALUATIONS - 1)
    return [history[round(place * apart)] for place in range(SHOWN_EVALUATIONS)]


def _this_process() -> str:
    """Name this process, as ``host:pid:start``, which no later one on this host shares."""
    return f"{socket.gethostname()}:{os.getpid()}:{_start_of(os.getpid())}"


def _start_of(pid: int) -> str:
    """When a process began, in clock ticks (proc(5), field 22); empty once it has ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    return text.rpartition(")")[2].split()[19]


def _is_dead(process: str, elsewhere: bool) -> bool:
    """Whether a process of this host has ended; ``elsewhere`` for one of another host."""
    host, _, rest = process.rpartition(":")[0].rpartition(":")
    if host != socket.gethostname():
        return elsewhere
    return _start_of(int(rest)) != process.rpartition(":")[2]


def _kept(settings: Mapping[str, object]) -> dict[str, Any]:
    """Settings as they come back from the database, without secrets."""
    kept: dict[str, Any] = json.loads(json.dumps(hide(settings)))
    return kept


def _by_dotted_name(settings: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the dotted name of each setting, however deep it lies, and its value."""
    for name, value in settings.items():
        if isinstance(value, dict):
            for key, inner in _by_dotted_name(value):
                yield f"{name}.{key}", inner
        else:
            yield name, value


def _shortened(value: object) -> str:
    """A setting as a message shows it."""
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 80 else text[:77] + "..."
