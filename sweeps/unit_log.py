"""Keeps what a long sweep has measured, so that the same command goes on where it was stopped.

A sweep measures one unit after another: a trial, a round of timings, a study, a search, a cell of a
table. Each has a name, such as ``start/0``, the rung ``start`` on seed 0::

    log.begin(device="cpu (1 thread)", may_change=("seeds",))
    plan = UnitPlan(names=("start/0", "start/1"), only=(), noun="trial", read=float)
    accuracies = log.measure(plan, train)
    log.check_finished(plan.names, accuracies)

A unit's line is appended to the sweep's ``runs.jsonl`` as it ends, and is read in place of
measuring it again. Above the units stands a header with what they depend on: the sweep, its
options, the device, the versions of the packages and the commit. Other options or another device
are refused, as one result cannot be made of both; other versions or another commit get a header of
their own.
"""

import json
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import TypeAdapter
from rich.console import Console

from bstune.core.errors import ConfigError, InputError, StudyError
from bstune.core.records import TrialResult, dump_json
from bstune.system.console import format_seconds
from bstune.system.files import append_text, write_text
from bstune.system.inputs import parse_json, read_text

# The format of the file. Units in a file of another format are measured again.
UNITS_FORMAT = 1
# Seconds between two lines of progress, for units too short for a line of their own.
LINE_EVERY_SECONDS = 10.0
# Up to so many units are listed by name; of more, only the beginnings of their names.
MOST_LISTED_UNITS = 40
# The beginning of the settings' keys that are an experiment's parameters, and the name of the
# parameter that chooses units.
PARAMETER_PREFIX = "sweep.experiment."
ONLY = "only"

Value = TypeVar("Value")


class UnfinishedError(Exception):
    """The chosen units are measured, and the result needs others; the message says how many."""


@dataclass(frozen=True)
class UnitHeader:
    """A line of the file: all that the units below it depend on."""

    format: int
    sweep: str
    # The settings, by dotted key, as JSON has them.
    settings: Mapping[str, object]
    # None where each unit has a device of its own, as a study does, or none at all.
    device: str | None
    # The versions, by package.
    versions: Mapping[str, str]
    commit: str | None


@dataclass(frozen=True)
class UnitRecord:
    """A line of the file: one unit that has ended."""

    # The unit's name.
    unit: str
    # What it depends on besides the header, such as the digest of a table; None: nothing.
    inputs: object
    # Seconds from the end of the unit before, or from the beginning, to this one's end.
    seconds: float
    # What was measured, as JSON has it.
    value: object


@dataclass(frozen=True)
class UnitFile:
    """The contents of a file of units."""

    headers: tuple[UnitHeader, ...] = ()
    # The records, by name; of two records of a unit the later one counts.
    records: Mapping[str, UnitRecord] = field(default_factory=dict)
    # All whole lines of the file.
    text: str = ""
    # Whether a line without its end, which a killed process left, stands below them.
    is_torn: bool = False
    # Whether the file has lines of another format; then nothing of it is read.
    is_foreign: bool = False


@dataclass(frozen=True)
class UnitPlan(Generic[Value]):
    """Units to measure.

    Args:
        names: of the units, in the order in which they are measured.
        only: the units that are chosen, by their names or by what stands before a slash in them;
            empty: all.
        noun: the word for a unit in messages, such as ``trial``.
        read: makes a unit's value of JSON's; AttributeError, LookupError, TypeError or ValueError
            for another form.
        choices: all names that may be chosen; empty: the plan's own. A sweep with several plans
            gives the names of all.
        inputs: what each unit depends on besides the header, by its name. A record with other
            inputs does not count.
        work: how long each unit takes relative to others, by its name; empty: all take as long;
            None: not known, so that no time to go is told.
        shown: writes a unit's value for a line of its own; None: units are too short for lines.
    """

    names: Sequence[str]
    only: Sequence[str]
    noun: str
    read: Callable[[Any], Value]
    choices: Sequence[str] = ()
    inputs: Mapping[str, object] = field(default_factory=dict)
    work: Mapping[str, float] | None = field(default_factory=dict)
    shown: Callable[[Value], str] | None = None


def _print_plain(console: Console, line: str) -> None:
    """Print a line without markup: names of units and files may have brackets in them."""
    console.print(line, soft_wrap=True, markup=False, highlight=False)


class UnitLog:
    """Keeps in a file which units of a sweep, such as its trials, have ended, with their values.

    Args:
        path: the file; None: nothing is kept.
        sweep: the name of the sweep.
        settings: all options of the sweep, by dotted key.
        versions: of the packages that results depend on.
        commit: of the working directory; None where it is in no repository.
        console: for progress.
        now: the clock, in seconds; tests replace it.
    """

    def __init__(
        self,
        path: Path | None,
        sweep: str,
        settings: Mapping[str, object],
        versions: Mapping[str, str],
        commit: str | None,
        console: Console,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path = path
        self._sweep = sweep
        self._settings = settings
        self._versions = versions
        self._commit = commit
        self._console = console
        self._now = now
        self._file = UnitFile()
        # The records of the file, and those that this command has added.
        self._records = dict[str, UnitRecord]()
        # ``begin`` makes it anew, with the sweep's device.
        self._header = self._header_of(device=None, may_change=())
        # Whether a header stands in the file under which records may be appended.
        self._has_header = False

    def begin(self, device: str | None, may_change: Collection[str]) -> None:
        """Read the file, and check that its units are of this sweep; nothing is written.

        Args:
            device: that all units are measured on; None: they have no common one.
            may_change: the experiment's parameters, by dotted key, that may differ between the
                commands of a sweep: they choose units, or no unit depends on them.

        Raises:
            StudyError: for a file of other options, another device or another sweep.
        """
        self._header = self._header_of(device, may_change)
        if self._path is None:
            return
        self._add_file(read_units(self._path))
        for header in self._file.headers:
            self._check_same(header)
        # A header says what the records below it depend on. New ones may follow the last header if
        # that is this command's. Else a header of its own comes first.
        if self._file.headers:
            self._has_header = self._file.headers[-1] == self._header

    def _add_file(self, file: UnitFile) -> None:
        """Keep what was read from the file, and add its records to those at hand."""
        self._file = file
        self._records |= file.records

    def _header_of(self, device: str | None, may_change: Collection[str]) -> UnitHeader:
        """Make this command's header: what its records of units depend on.

        The sweep's parameters named in ``may_change`` are left out, as no record depends on them.
        """
        settings = dict[str, object]()
        left_out = [f"{PARAMETER_PREFIX}{name}" for name in (ONLY, *may_change)]
        for key, value in self._settings.items():
            if not any(key == name or key.startswith(f"{name}.") for name in left_out):
                settings[key] = value
        header = UnitHeader(
            format=UNITS_FORMAT,
            sweep=self._sweep,
            settings=settings,
            device=device,
            versions=self._versions,
            commit=self._commit,
        )
        # It is compared with headers that were read from JSON.
        return UnitHeader(**as_json(asdict(header)))

    def _check_same(self, header: UnitHeader) -> None:
        """Refuse a file with a header of another sweep, other settings or another device."""
        # It imports Optuna, which the list of the sweeps need not wait for.
        from bstune.study.storage.opening import changed_settings

        elsewhere = "choose another folder with sweep.output=DIR"
        if header.sweep != self._sweep:
            raise StudyError(f"{self._path} is of the sweep {header.sweep}: {elsewhere}")
        settings_before = {**header.settings, "device": header.device}
        settings_now = {**self._header.settings, "device": self._header.device}
        if settings_before != settings_now:
            changed = changed_settings(settings_before, settings_now)
            raise StudyError(
                f"what is in {self._path} was measured with other options:\n{changed}\n"
                f"continue with those, or {elsewhere}"
            )

    def measure(self, plan: UnitPlan[Value], measure: Callable[[str], object]) -> dict[str, Value]:
        """Measure the chosen units that have no valid record, one after another.

        Args:
            plan: the units.
            measure: measures a unit, by its name; it gives plain values, which become JSON.

        Returns:
            The values of the units, by name in the plan's order. Units that are not chosen and have
            not been measured are missing.

        Raises:
            ConfigError: if a name in ``only`` is that of no unit.
        """

        def in_turn(names: Sequence[str]) -> Iterator[tuple[str, object]]:
            for name in names:
                yield name, measure(name)

        return self.measure_as_they_end(plan, in_turn)

    def measure_as_they_end(
        self,
        plan: UnitPlan[Value],
        measure_all: Callable[[Sequence[str]], Iterable[tuple[str, object]]],
    ) -> dict[str, Value]:
        """Measure units as :meth:`measure` does, but all of them in one call of ``measure_all``.

        It takes the names of the missing units, and yields a name and a value as each unit ends, in
        any order, as they come from several processes.
        """
        # A plan of only some of the sweep's units has the names of all as choices.
        check_only(plan.only, plan.choices or plan.names)
        values = self.recorded(plan)
        missing = list[str]()
        for name in plan.names:
            if name not in values and is_chosen(name, plan.only):
                missing.append(name)
        if missing:
            self._make_writable()
            values |= self._measured(plan, missing, values, measure_all)
        in_order = dict[str, Value]()
        for name in plan.names:
            if name in values:
                in_order[name] = values[name]
        return in_order

    def _measured(
        self,
        plan: UnitPlan[Value],
        missing: Sequence[str],
        recorded: Iterable[str],
        measure_all: Callable[[Sequence[str]], Iterable[tuple[str, object]]],
    ) -> dict[str, Value]:
        """Measure the units in ``missing``, keep each as it ends, and give their values by name.

        ``recorded`` are the names of the plan's other units, which have ended before.
        """
        values = dict[str, Value]()
        seconds = {name: self._records[name].seconds for name in recorded}
        progress = UnitProgress(plan, seconds, missing, self._console)
        progress.say_start()
        began = self._now()
        last_line = began
        for name, measured in measure_all(missing):
            ended = self._now()
            # It is read back, so that a value is the same whether it was measured or recorded.
            value = as_json(measured)
            inputs = as_json(plan.inputs.get(name))
            self._append(UnitRecord(unit=name, inputs=inputs, seconds=ended - began, value=value))
            values[name] = plan.read(value)
            progress.note(name, ended - began)
            if progress.deserves_line(ended - last_line):
                progress.say(name, values[name])
                last_line = ended
            began = ended
        return values

    def recorded(self, plan: UnitPlan[Value]) -> dict[str, Value]:
        """Give the values of a plan's units that are kept, by name.

        A record with other inputs, or one that cannot be read, is left out.
        """
        values = dict[str, Value]()
        for name in plan.names:
            record = self._records.get(name)
            if record is None or record.inputs != as_json(plan.inputs.get(name)):
                continue
            try:
                values[name] = plan.read(record.value)
            except (AttributeError, LookupError, TypeError, ValueError):
                _print_plain(
                    self._console,
                    f"{self._path}: the record of {name} cannot be read; it is measured again",
                )
        return values

    def _make_writable(self) -> None:
        """Make the file ready for more lines, and print what becomes of its old ones.

        A file of another format is moved aside, and a torn last line is dropped.
        """
        if self._path is None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if self._file.is_foreign:
            aside = _free_name(self._path)
            self._path.rename(aside)
            _print_plain(
                self._console,
                f"{self._path} holds records of another format: it is {aside.name} now, and "
                "everything is measured again",
            )
        elif self._file.is_torn:
            write_text(self._path, self._file.text)
            _print_plain(
                self._console, f"the last line of {self._path} was cut short and is dropped"
            )
        # A file of other settings or another device was refused. So a header that is not this
        # command's is of other versions, or another commit.
        if self._file.headers and not self._has_header:
            _print_plain(
                self._console, f"{self._path} goes on with other versions, or at another commit"
            )
        # The file is mended now, and that is said once.
        self._file = replace(self._file, is_foreign=False, is_torn=False)

    def _append(self, record: UnitRecord) -> None:
        """Keep a record, and write it to the file below a header, which says what it depends on."""
        self._records[record.unit] = record
        if self._path is None:
            return
        lines = dump_json(asdict(record)) + "\n"
        # The header comes with the first record: a command that is interrupted before leaves
        # nothing.
        if not self._has_header:
            lines = dump_json(asdict(self._header)) + "\n" + lines
        append_text(self._path, lines)
        self._has_header = True

    def drop(self, is_dropped: Callable[[UnitRecord], bool]) -> None:
        """Take the records for which ``is_dropped`` holds out of the file, to be measured again."""
        dropped = {name for name, record in self._records.items() if is_dropped(record)}
        if self._path is None or not dropped:
            return
        lines = list[str]()
        for line in self._file.text.splitlines():
            values = json.loads(line)
            # A header, which is of no unit, stays.
            if values.get("unit") not in dropped:
                lines.append(f"{line}\n")
        write_text(self._path, "".join(lines))
        for name in dropped:
            del self._records[name]
        # The text of the file is another one now.
        self._add_file(read_units(self._path))

    def check_finished(self, names: Collection[str], measured: Collection[str]) -> None:
        """Raise UnfinishedError unless all units ``names`` are among the ``measured`` ones."""
        measured_count = len(set(names) & set(measured))
        if measured_count == len(names):
            return
        where = ""
        if self._path is not None:
            where = f" in {self._path}"
        raise UnfinishedError(
            f"{measured_count} of {len(names)} units are measured{where}. The result needs all of "
            f"them: the same command without {PARAMETER_PREFIX}{ONLY} goes on."
        )


class UnitProgress(Generic[Value]):
    """How many of a plan's units, such as trials, have ended, and how long the others may take.

    That is predicted from the seconds of the units that have ended, those of earlier commands among
    them, in proportion to the plan's ``work``.

    Args:
        plan: of all units.
        seconds: of the units that have ended, by name.
        missing: the names of the others.
        console: for lines.
    """

    def __init__(
        self,
        plan: UnitPlan[Value],
        seconds: Mapping[str, float],
        missing: Sequence[str],
        console: Console,
    ) -> None:
        self._plan = plan
        self._seconds = dict(seconds)
        # The units that have not ended, in order.
        self._left = list(missing)
        self._total = len(seconds) + len(missing)
        self._console = console
        # Whether a line on an ended unit has been printed.
        self._said_any = False

    def note(self, name: str, seconds: float) -> None:
        """Note that a unit has ended, which took ``seconds``."""
        self._seconds[name] = seconds
        self._left.remove(name)

    def seconds_to_go(self) -> float | None:
        """Predict the seconds until the last unit ends.

        The time of a unit is taken to be in proportion to its work, as the plan states it. None
        before any has ended, and where the plan states no work.
        """
        work = self._plan.work
        if work is None or not self._seconds:
            return None
        work_done = sum(work.get(name, 1.0) for name in self._seconds)
        work_left = sum(work.get(name, 1.0) for name in self._left)
        return sum(self._seconds.values()) / work_done * work_left

    def deserves_line(self, seconds_since_last: float) -> bool:
        """Tell whether the unit that has just ended gets a line of progress."""
        is_first_or_last = not self._said_any or not self._left
        # A plan that can write a unit's value in words wants each unit to be told.
        is_told_always = self._plan.shown is not None
        is_due = seconds_since_last >= LINE_EVERY_SECONDS
        return is_told_always or is_first_or_last or is_due

    def say_start(self) -> None:
        """Print how many units are to be measured, and how long that may take."""
        line = f"{len(self._left)} of {self._total} units to measure"
        _print_plain(self._console, "; ".join([line, *self._to_go()]))

    def say(self, name: str, value: Value) -> None:
        """Print that a unit has ended, with its value."""
        parts = [f"{self._plan.noun} {len(self._seconds)} of {self._total}, {name}"]
        if self._plan.shown is not None:
            parts[0] += f": {self._plan.shown(value)}"
        parts += self._to_go()
        _print_plain(self._console, "; ".join(parts))
        self._said_any = True

    def _to_go(self) -> list[str]:
        """Write the predicted time of the units that are left; empty where it is not known."""
        seconds = self.seconds_to_go()
        if seconds is None or not self._left:
            return []
        return [f"about {format_seconds(seconds)} to go"]


def read_units(path: Path) -> UnitFile:
    """Read a file of units, which a sweep measures one by one; a missing file has none.

    Records of units follow a header, which says what they depend on. InputError for a file that is
    no text.
    """
    if not path.exists():
        return UnitFile()
    text = read_text(path, "the file of units")
    # A line is written at once: only the last one can lack its end, where a process was killed.
    whole = text[: text.rfind("\n") + 1]
    headers = list[UnitHeader]()
    records = dict[str, UnitRecord]()
    try:
        for line in whole.splitlines():
            values = parse_json(line, "it")
            if isinstance(values, dict) and "format" in values:
                headers.append(_READ_HEADER.validate_python(values))
            else:
                record = _READ_RECORD.validate_python(values)
                records[record.unit] = record
    # pydantic's error for a value of another form is a ValueError.
    except (InputError, ValueError):
        return UnitFile(is_foreign=True)
    formats = {header.format for header in headers}
    # Records without a header say nothing of what they depend on.
    if not formats <= {UNITS_FORMAT} or (records and not headers):
        return UnitFile(is_foreign=True)
    return UnitFile(tuple(headers), records, whole, is_torn=whole != text)


_READ_HEADER = TypeAdapter(UnitHeader)
_READ_RECORD = TypeAdapter(UnitRecord)


def read_trial(value: object) -> TrialResult:
    """Make a trial's record of JSON's values; RecordError, a ValueError, for other values."""
    return TrialResult.from_json(dump_json(value))


def as_json(value: object) -> Any:
    """Write a value as JSON, and give it as it is read back."""
    return json.loads(dump_json(value))


def is_chosen(name: str, only: Sequence[str]) -> bool:
    """Tell whether a unit is chosen by ``only``, which is empty for all units.

    A unit is chosen by its name, and by any part of it that ends before a slash.
    """
    if not only:
        return True
    return any(name == choice or name.startswith(f"{choice}/") for choice in only)


def check_only(only: Sequence[str], names: Sequence[str]) -> None:
    """Refuse a choice in ``only`` that matches none of ``names``; the ConfigError lists these."""
    unknown = list[str]()
    for choice in only:
        if not any(is_chosen(name, [choice]) for name in names):
            unknown.append(choice)
    if not unknown:
        return
    listed = list(names)
    # Nobody reads a list of thousands; the parts before the last slash can be chosen, too.
    if len(listed) > MOST_LISTED_UNITS:
        listed = list(dict.fromkeys(name.rpartition("/")[0] or name for name in names))
    raise ConfigError(
        f"{PARAMETER_PREFIX}{ONLY} names {'; '.join(unknown)}, which is no unit of this sweep; "
        f"units: {'; '.join(listed)}"
    )


def _free_name(path: Path) -> Path:
    """Give a free path beside a file, to move it to."""
    number = 1
    while True:
        aside = path.with_name(f"{path.stem}.other-{number}{path.suffix}")
        if not aside.exists():
            return aside
        number += 1
