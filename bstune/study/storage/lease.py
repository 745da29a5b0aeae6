"""Who works on a study: every process leaves a lease in its storage and renews it while it lives.

A lease is an attribute of the study. The clocks of machines differ, so none is compared: a lease
has run out when an observer has seen no new beat of it for ``seconds`` by the observer's own clock.
One of a process on this machine runs out with the process. Leases say who is there; that no trial
runs twice is up to :func:`bstune.study.storage.asking`.
"""

import json
import logging
import os
import platform
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

import optuna
from pydantic import TypeAdapter, ValidationError

from bstune.core.errors import StudyError
from bstune.study.storage.patience import STORAGE_ERRORS, StorageGoneError, patient, reason_of
from bstune.system.inputs import one_line
from bstune.system.user import process_name

logger = logging.getLogger(__name__)
# An owner reports; workers only train.
Role = Literal["owner", "worker"]
# The attributes' keys begin so, before the leases' ids.
PREFIX = "bstune:lease:"
# Signs of life in the time after which a lease runs out. It survives a storage that is away for
# most of that time.
BEATS = 6


@dataclass(frozen=True)
class Lease:
    """A process that works on a study, as the storage knows it."""

    id: str
    role: Role
    name: str
    """For people: user, machine and process."""
    machine: str
    """The boot and the process namespace in which ``pid`` means something."""
    pid: int
    started: str
    """When the process began, as another one may get its number; see :func:`process_started`."""
    beat: int = 0
    """Counts up while the process lives."""
    ended: bool = False
    """Whether the process has ended its lease, or another one has found it dead."""


LEASE = TypeAdapter(Lease)


def this_machine() -> str:
    """Name the boot and the process namespace of this process.

    Two processes that share them can see each other by process number.
    """
    boot = Path("/proc/sys/kernel/random/boot_id")
    # Other systems than Linux have no such file.
    if not boot.exists():
        return platform.node()
    return f"{boot.read_text().strip()}/{os.stat('/proc/self/ns/pid').st_ino}"


def process_started(pid: int) -> str | None:
    """Say when a process of this machine started, in clock ticks since the boot.

    It is None if there is no such process; an empty text where there is one and its start is not
    known.
    """
    try:
        # Where there is no /proc, signal 0 asks whether the process is there, and does nothing
        # else.
        if not Path("/proc").exists():
            os.kill(pid, 0)
            return ""
        after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2]
    except (ProcessLookupError, FileNotFoundError):
        return None
    except PermissionError:
        # The process is another user's.
        return ""
    state, *fields = after_name.split()
    # A zombie has ended.
    if state in "ZX":
        return None
    # proc(5): the start is field 22 of the file. The state is field 3, so that the start is the
    # 19th after it.
    return fields[18]


class Leases:
    """The lease of this process on a study, and those of others as it sees them."""

    def __init__(
        self,
        study: optuna.Study,
        role: Role,
        seconds: float,
        clock: Callable[[], float] = time.monotonic,
        join: str | None = None,
    ) -> None:
        """Prepare a lease of this process; :meth:`acquired` takes it.

        Args:
            study: in its storage.
            role: of this process.
            seconds: after which a lease without a new beat has run out.
            clock: gives seconds.
            join: the command by which a worker joins the study; None: none can.
        """
        self._study = study
        self._join = join
        self._seconds = seconds
        self._clock = clock
        # The last new beat of each other lease, and when it was seen, by the lease's id.
        self._seen: dict[str, tuple[int, float]] = {}
        # Whether another process took this one for dead.
        self.lost = False
        pid = os.getpid()
        started = process_started(pid) or ""
        self.own = Lease(
            id=uuid.uuid4().hex,
            role=role,
            name=process_name(),
            machine=this_machine(),
            pid=pid,
            started=started,
        )

    @patient
    def _read(self) -> dict[str, Lease]:
        """Read all leases of the study, by their ids."""
        leases = {}
        for key, value in self._study.user_attrs.items():
            if not key.startswith(PREFIX):
                continue
            try:
                leases[key.removeprefix(PREFIX)] = LEASE.validate_json(value)
            # A value that is no text raises a TypeError.
            except (ValidationError, TypeError) as error:
                raise StudyError(
                    f"the study {self._study.study_name!r} has an attribute {one_line(key)} that "
                    "is no lease: begin another one with study=NAME"
                ) from error
        return leases

    @patient
    def _write(self, lease: Lease) -> None:
        """Store a lease in place of its former state."""
        self._study.set_user_attr(PREFIX + lease.id, json.dumps(asdict(lease)))

    def _is_alive(self, lease: Lease) -> bool:
        """Whether the process of another lease, one that has not been ended, is there.

        On this machine the process itself is looked for; elsewhere new beats are the sign.
        """
        if lease.machine == self.own.machine:
            return process_started(lease.pid) == lease.started
        # A lease that is seen for the first time has all its seconds from now on.
        beat, seen = self._seen.setdefault(lease.id, (lease.beat, self._clock()))
        if beat != lease.beat:
            self._seen[lease.id] = lease.beat, self._clock()
            return True
        return self._clock() - seen < self._seconds

    def others(self) -> list[Lease]:
        """List the leases of the other processes that work on the study.

        A lease whose process is gone is stored as ended.
        """
        living = []
        for lease in self._read().values():
            if lease.id == self.own.id or lease.ended:
                continue
            if self._is_alive(lease):
                living.append(lease)
            else:
                # A process that was only suspended sees that when it goes on, and stops.
                self._write(replace(lease, ended=True))
        return living

    def _other_owners(self) -> list[Lease]:
        """List the leases of the other processes that own the study."""
        return [lease for lease in self.others() if lease.role == "owner"]

    def living(self) -> set[str]:
        """Collect the ids of all living leases of the study, this process's included."""
        return {self.own.id, *(lease.id for lease in self.others())}

    def beat(self) -> None:
        """Renew this process's lease.

        Where another process has ended it, ``lost`` is set instead.
        """
        stored = self._read().get(self.own.id)
        if stored is not None and stored.ended:
            self.lost = True
            return
        self.own = replace(self.own, beat=self.own.beat + 1)
        self._write(self.own)

    def check(self) -> None:
        """Raise StudyError if another process has ended this one's lease.

        It does so if this process was stopped for so long that it seemed dead.
        """
        if self.lost:
            raise StudyError(
                f"this process gave no sign for {self._seconds:g} s (search.lease_seconds), so "
                "others took over its trials: the finished ones are stored, and the same command "
                "continues"
            )

    def _wait_alone(self, log: Callable[[str], None], sleep: Callable[[float], None]) -> None:
        """Wait until no other owner's lease is left.

        Raises:
            StudyError: where another owner is there; it names it.
        """
        first_beats = {lease.id: lease.beat for lease in self._other_owners()}
        announced = False
        while owners := self._other_owners():
            for owner in owners:
                # An owner on this machine is known to live; elsewhere a new beat is the sign.
                is_here = owner.machine == self.own.machine
                if is_here or first_beats.get(owner.id) != owner.beat:
                    raise StudyError(self._refusal(owner))
            if not announced:
                log(
                    f"waiting up to {self._seconds:g} s for a sign of {owners[0].name}, "
                    "which began this study"
                )
                announced = True
            # Twice as often as an owner beats, so that no beat is seen late.
            sleep(self._seconds / BEATS / 2)

    def _refusal(self, owner: Lease) -> str:
        """Name the process that owns the study, and what else can be done."""
        ways = ["wait for it", "begin another one with study=NAME"]
        if self._join is not None:
            ways.insert(1, f"join it with {self._join}")
        listed = f"{', '.join(ways[:-1])}, or {ways[-1]}"
        return f"the study {self._study.study_name!r} is run by {owner.name}: {listed}"

    @contextmanager
    def acquired(
        self,
        log: Callable[[str], None] = lambda line: None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> Iterator[None]:
        """Hold the lease while the body runs, and renew it in a thread.

        Errors of the storage in the body become a StudyError.

        Args:
            log: takes a line where another owner's sign of life is waited for.
            sleep: waits so many seconds.

        Raises:
            StudyError: where this process is to own the study and another owner is there.
        """
        if self.own.role == "owner":
            self._wait_alone(log, sleep)
        self._write(self.own)
        stop = threading.Event()
        thread = threading.Thread(
            target=self._renew, args=(stop,), name="bstune-lease", daemon=True
        )
        is_gone = False
        try:
            if self.own.role == "owner":
                self._give_way()
            thread.start()
            yield
        except StorageGoneError:
            is_gone = True
            raise
        except STORAGE_ERRORS as error:
            raise StudyError(f"the storage does not answer: {reason_of(error)}") from error
        finally:
            stop.set()
            if not is_gone:
                is_gone = not self._end(thread)
            if is_gone:
                logger.warning(
                    "the storage is gone: the lease of %s runs out by itself", self.own.name
                )

    def _give_way(self) -> None:
        """Raise a StudyError where another owner came in the same moment and has a smaller id.

        Both have stored their leases by now, so that they see each other, and one stays.
        """
        rivals = [lease for lease in self._other_owners() if lease.id < self.own.id]
        if rivals:
            raise StudyError(self._refusal(rivals[0]))

    def _end(self, thread: threading.Thread) -> bool:
        """Store the lease as ended, once ``thread`` renews it no more; False if that fails."""
        # A thread that was never started has no ident, and cannot be joined.
        if thread.ident is not None:
            thread.join()
        try:
            self._write(replace(self.own, ended=True))
        except StudyError:
            return False
        return True

    def _renew(self, stop: threading.Event) -> None:
        """Renew the lease until ``stop`` is set or the lease is lost.

        It is renewed ``BEATS`` times in the seconds after which it would run out.
        """
        while not stop.wait(self._seconds / BEATS) and not self.lost:
            try:
                self.beat()
            except StudyError as error:
                # The next beat may find the storage again. If none does, the study itself says so.
                logger.debug("no beat: %s", error)
