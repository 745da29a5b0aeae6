"""A process to which functions are sent: whatever it does, an outcome comes back."""

import importlib
import itertools
import os
import re
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import pytest
from refusals import refused
from test_files import MAKE

import bstune
from bstune.core.errors import InputError, StudyError
from bstune.trial.by_value import users_modules
from bstune.trial.worker import (
    TELL_WHERE,
    Failure,
    Returned,
    Worker,
    call,
    tell_progress,
    tell_where_on_signal,
)

pytestmark = pytest.mark.usefixtures("without_torch")
OWN_PATH = {**os.environ, "PYTHONPATH": str(Path(bstune.__file__).parents[1])}
# Seconds that a test waits before it fails.
PATIENCE = 60.0


@pytest.fixture
def without_torch(monkeypatch):
    """A worker imports what this process has, but what the small project needs takes seconds."""
    monkeypatch.delitem(sys.modules, "small", raising=False)


@pytest.fixture(scope="module")
def worker(tmp_path_factory):
    with Worker(tmp_path_factory.mktemp("worker") / "log.txt", preload=()) as worker:
        yield worker


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_a_log_is_a_file(tmp_path, kind):
    (tmp_path / "other").touch()
    MAKE[kind](tmp_path / "log", tmp_path / "other")
    with refused("log", StudyError):
        Worker(tmp_path / "log").start()
    assert not (tmp_path / "other").read_text()


outcome_of = partial(call, limit=PATIENCE)


def raises():
    raise ValueError("no")


def crashes():
    print("layer 3")
    os.kill(os.getpid(), signal.SIGSEGV)


def aborts():
    # As C++ does where nothing catches an exception.
    message = b"terminate called after throwing 'std::runtime_error'\n  what():  no such device\n"
    os.write(2, message)
    os.abort()


def leaves():
    print("a line long before\n\nthe database is locked\nx://me:pw@host is left", flush=True)
    os._exit(7)


# A function, its arguments, and each reason in whole: what an earlier process wrote is not told.
FAILURES = {
    "an exception": ((raises,), r"ValueError: no \(test_worker.py:\d+\)"),
    "sys.exit": ((sys.exit, 3), "SystemExit: 3.*"),
    "a crash": ((crashes,), r"its process was ended by SIGSEGV: layer 3 \(test_worker.py:\d+\)"),
    "an abort": (
        (aborts,),
        "its process was ended by SIGABRT: terminate called after throwing 'std::runtime_error'; "
        r"what\(\):  no such device \(test_worker.py:\d+\)",
    ),
    "an exit": (
        (leaves,),
        r"its process ended with status 7: the .* locked; x://me:\*\*\*@host is left",
    ),
    "a kill": ((signal.raise_signal, signal.SIGKILL), "its process was ended by SIGKILL"),
    "an answer that cannot be sent": ((threading.Lock,), "TypeError: .*lock.*"),
}


@pytest.mark.parametrize("case", FAILURES)
def test_a_failure_is_an_outcome_and_the_next_function_is_called(worker, case):
    called, reason = FAILURES[case]
    failure = outcome_of(worker, *called)
    assert isinstance(failure, Failure)
    assert re.fullmatch(reason, failure.reason)
    assert failure.refusal is None
    assert outcome_of(worker, pow, 2, 10) == Returned(1024)


def about_itself():
    return os.getpid(), os.getcwd(), sys.path, sys.argv


def refuses():
    raise InputError("give another metric")


def test_it_is_one_process_of_its_own_with_the_same_paths_and_arguments(worker):
    pid, *paths = outcome_of(worker, about_itself).value
    assert (pid != os.getpid(), tuple(paths)) == (True, about_itself()[1:])
    # A refusal is no failure of the process.
    refusal = outcome_of(worker, refuses).refusal
    assert (type(refusal), str(refusal)) == (InputError, "give another metric")
    assert outcome_of(worker, os.getpid).value == pid


def test_a_process_that_died_between_two_functions_is_no_outcome(worker):
    pid = outcome_of(worker, os.getpid).value
    os.kill(pid, signal.SIGKILL)
    assert is_gone(pid)
    time.sleep(0.2)  # the template tells of it
    assert outcome_of(worker, pow, 2, 3) == Returned(8)


def hangs():
    time.sleep(1000)


def hangs_after_a_fit():
    time.sleep(as_lightning_ends_a_fit())


def as_lightning_ends_a_fit():
    signal.signal(TELL_WHERE, signal.SIG_DFL)
    tell_where_on_signal()
    return 1000


@pytest.mark.parametrize("function", [hangs, hangs_after_a_fit])
def test_what_hangs_is_killed_and_told_with_its_place(worker, function):
    pid = outcome_of(worker, os.getpid).value
    worker.submit(function)
    assert worker.poll(0.5) is None
    worker.kill(0.5)
    line = function.__code__.co_firstlineno + 1
    assert worker.poll(1.0).reason.endswith(f"(test_worker.py:{line})")
    assert is_gone(pid)
    assert outcome_of(worker, pow, 2, 3) == Returned(8)


def works(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        tell_progress(lambda: "step 3")
        time.sleep(0.01)


def test_progress_ends_silence_and_is_told(worker):
    silences = []
    worker.submit(works, 1.0)
    while worker.poll(0.1) is None:
        silences.append(worker.silent_seconds)
    assert any(later < earlier for earlier, later in itertools.pairwise(silences))
    assert worker.told == "step 3"
    tell_progress()  # does nothing here


def test_what_is_printed_is_in_the_log_and_a_failed_import_is_an_outcome(tmp_path):
    log = tmp_path / "log.txt"
    with Worker(log, preload=("json",)) as worker:
        outcome_of(worker, print, "a line")
    with Worker(log, preload=("no_such_module",)) as worker:
        assert "status 1" in outcome_of(worker, pow, 2, 3).reason
    for line in ("a line", "no_such_module"):
        assert line in log.read_text()


SCRIPT = """
import multiprocessing, sys
from pathlib import Path
import first
from second import double
from bstune.trial.worker import Worker

class Batch:
    def __init__(self, value):
        self.value = value

def collate(value):
    return Batch(double(value))

def put(queue, function, value):
    queue.put(function(value))

def load(value):
    queue = multiprocessing.Queue()
    process = multiprocessing.Process(target=put, args=(queue, collate, value))
    process.start()
    batch = queue.get(timeout=20)
    process.join()
    return multiprocessing.get_start_method(), type(batch) is Batch, batch.value

if __name__ == "__main__":
    multiprocessing.set_start_method(sys.argv[1])
    with Worker(Path("log.txt"), preload=()) as worker:
        worker.submit(load, 21)
        print(worker.poll(60.0))
"""


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_what_main_defines_is_sent_to_a_loaders_process_and_back(tmp_path, method):
    (tmp_path / "train.py").write_text(SCRIPT)
    # Whoever imports the second one first fails.
    (tmp_path / "first.py").write_text("ONE = 1\nfrom second import double\n")
    (tmp_path / "second.py").write_text("from first import ONE\ndef double(x): return 2 * x\n")
    answer = subprocess.run(
        [sys.executable, "train.py", method], cwd=tmp_path, env=OWN_PATH, capture_output=True
    )
    assert answer.stdout.decode().strip() == f"Returned(value=({method!r}, True, 42))"


def test_a_module_that_runs_the_study_as_it_is_imported_is_not_imported_in_the_worker(
    tmp_path, monkeypatch
):
    text = "from bstune.trial.by_value import users_modules\nnames = users_modules()"
    (tmp_path / "runs_it.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    assert "runs_it" not in importlib.import_module("runs_it").names
    assert "runs_it" in users_modules()


OWNER = """
import os, sys, time
from pathlib import Path
from bstune.trial.worker import Worker

def helper():
    return os.getpid(), os.getppid()

worker = Worker(Path(sys.argv[1]), preload=())
worker.submit(helper)
print(*worker.poll(60.0).value, flush=True)
worker.submit(time.sleep, 1000)
time.sleep(1000)
"""


def is_gone(pid):
    """Whether a process ends within seconds; one that nobody has waited for yet has ended."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        try:
            with open(f"/proc/{pid}/stat") as stat:
                if stat.read().rpartition(")")[2].split()[0] == "Z":
                    return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.01)
    return False


def test_both_processes_end_with_the_one_that_started_them(tmp_path):
    script = tmp_path / "owner.py"
    script.write_text(OWNER)
    command = [sys.executable, script, tmp_path / "log.txt"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=OWN_PATH) as owner:
        pids = [int(pid) for pid in owner.stdout.readline().split()]
        assert len(pids) == 2
        owner.kill()
    assert all(is_gone(pid) for pid in pids)
