"""The processes that train: what the user's code finds there, and what is left once they are killed."""

import importlib
import multiprocessing
import subprocess
import sys

import pytest
from toolbox import still_running

from bstune.core.errors import UserCodeError
from bstune.trial.processes.process import Process

# What it is asked for keeps its loader's workers, as a trainer does within an epoch.
READER = """
import multiprocessing, os, threading
from torch.utils.data import DataLoader, Dataset


class ProcessIds(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        # A worker that waits does not see by itself that its parent has ended.
        if index >= 2:
            threading.Event().wait()
        return os.getpid()


class Reader:
    def read(self, context=None, *, say, end):
        loader = DataLoader(ProcessIds(), 1, num_workers=2, multiprocessing_context=context)
        self.batches = iter(loader)
        workers = [int(next(self.batches)) for _ in range(2)]
        return multiprocessing.get_start_method(), [os.getpid(), *workers]

    def start_method(self, say, end):
        return multiprocessing.get_start_method(allow_none=True)

    def read_and_die(self, say, end):
        _, processes = self.read(say=say, end=end)
        say(" ".join(map(str, processes)))
        os.kill(os.getpid(), 9)
"""

KILLED = """
import os, sys
import reader
from bstune.trial.processes.process import Process

if __name__ == "__main__":
    _, processes = Process(reader.Reader, None).call("read", *sys.argv[1:], say=print)
    print(*processes, flush=True)
    os.kill(os.getpid(), 9)
"""


@pytest.fixture
def reader(tmp_path, monkeypatch):
    """The module of the reader, which the processes import as well."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "reader.py").write_text(READER)
    yield importlib.import_module("reader")
    del sys.modules["reader"]


@pytest.fixture
def start_method():
    """A function that sets this process's start method, as a user's script does."""
    before = multiprocessing.get_start_method(allow_none=True)

    def set_method(method):
        multiprocessing.set_start_method(method, force=True)

    yield set_method
    set_method(before)


@pytest.mark.parametrize("method", [None, "fork", "spawn", "forkserver"])
def test_the_users_code_finds_the_start_method_of_its_own_process(reader, start_method, method):
    start_method(method)
    process = Process(reader.Reader, None)
    found = process.call("start_method", say=print)
    process.close()
    process.end()
    assert found == method
    # It is also left to the user, who may set it later.
    assert multiprocessing.get_start_method(allow_none=True) == method


@pytest.mark.parametrize(
    "context",
    [
        None,
        # Their workers import torch, each or in a server.
        pytest.param("spawn", marks=pytest.mark.soak),
        pytest.param("forkserver", marks=pytest.mark.soak),
    ],
)
def test_a_loaders_workers_are_killed_with_their_process(reader, start_method, context):
    start_method(None)
    process = Process(reader.Reader, None)
    method, processes = process.call("read", context, say=print)
    # Python's own: fork on Linux below Python 3.14.
    assert method == multiprocessing.get_context().get_start_method()
    assert processes[0] == process.process.pid
    assert len(set(processes)) == 3
    process.kill()
    assert still_running(processes) == []
    process.end()


def test_a_loaders_workers_end_with_a_process_that_is_killed_by_the_system(reader):
    process = Process(reader.Reader, None)
    said = []
    with pytest.raises(UserCodeError):
        process.call("read_and_die", say=said.append)
    assert still_running(map(int, said[0].split())) == []
    process.end()


@pytest.mark.slow
# The second one's semaphores are left behind, too.
@pytest.mark.parametrize("context", [(), pytest.param(("forkserver",), marks=pytest.mark.soak)])
def test_a_loaders_workers_end_with_a_command_that_is_killed(reader, tmp_path, context):
    script = tmp_path / "script.py"
    script.write_text(KILLED)
    command = [sys.executable, str(script), *context]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (-9, "")
    assert still_running(map(int, done.stdout.split())) == []
