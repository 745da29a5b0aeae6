"""An error's line names the user's own file and line; one signal raises, a second one kills."""

import json
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
import weakref
from contextlib import suppress

import pytest

from bstune.core.errors import Interrupted
from bstune.core.records import Target
from bstune.system.failures import last_lines, one_line, where, where_in_traceback
from bstune.system.interruption import interruptible

# Each piece of user's code raises; the line where it does so, as a user would be told.
CODE = [
    ("x = 1\nraise ValueError('a\\nb')", "ValueError: a (model.py:2)"),
    ("import json\njson.loads('')", "(model.py:2)"),
    ("from bstune.core.records import Target\nTarget.parse('')", "(model.py:2)"),
    (
        "try:\n    {}['lr']\nexcept KeyError as error:\n    raise TypeError('x') from error",
        "TypeError: x (model.py:4)",
    ),
    ("assert False", "AssertionError (model.py:1)"),
    ("x = 1\nx = = 2", "(model.py:2)"),
    ("raise OSError('no x://me:pw@host')", "OSError: no x://me:***@host (model.py:1)"),
]


def raised_by(function, *arguments):
    """Call a function that raises: its error, without the frame of this file."""
    with pytest.raises(Exception) as caught:  # noqa: PT011
        function(*arguments)
    return caught.value.with_traceback(caught.value.__traceback__.tb_next)


def error_of(code, path):
    path.write_text(code)
    return raised_by(runpy.run_path, str(path))


@pytest.mark.parametrize("code, end_of_line", CODE)
def test_errors_of_users_code(tmp_path, code, end_of_line):
    assert one_line(error_of(code, tmp_path / "model.py")).endswith(end_of_line)


def test_a_cause_in_users_code_beneath_an_error_of_a_package(tmp_path):
    cause = error_of("raise KeyError('lr')", tmp_path / "model.py")
    outer = RuntimeError("Error in call to target")
    outer.__cause__ = cause
    assert where(outer) == "model.py:1"


def test_without_a_frame_of_the_users_it_is_the_last_one():
    assert where(raised_by(json.loads, "")).startswith("decoder.py:")
    assert where(raised_by(Target.parse, "")).startswith("records.py:")


def test_a_traceback_of_another_process():
    text = """Traceback (most recent call last):
  File "/home/me/data set.py", line 7, in __getitem__
    return self.items[index]
  File "/env/lib/python3.11/site-packages/torch/utils.py", line 3, in wrapper
    raise error
  File "<string>", line 1, in <module>
IndexError: list index out of range"""
    assert where_in_traceback(text) == "data set.py:7"
    assert where_in_traceback("no traceback") == ""
    in_loader = IndexError(f"Caught IndexError in DataLoader worker process 0.\nOriginal {text}")
    assert one_line(in_loader) == "IndexError: list index out of range (data set.py:7)"


def test_a_long_message_is_cut():
    assert len(one_line(ValueError("x" * 10_000))) < 250


def test_the_last_lines_of_a_process_that_died():
    # Python's faulthandler names the innermost frame first.
    dump = """Fatal Python error: Aborted

Current thread 0x1 (most recent call first):
  File "/env/lib/python3.11/site-packages/torch/nn.py", line 2 in forward
  File "/home/me/model.py", line 3 in forward
  File "/home/me/train.py", line 4 in <module>
"""
    assert last_lines("a\n\n b\nc\n" + dump) == "b; c (model.py:3)"
    assert last_lines(dump) == "(model.py:3)"
    assert last_lines("") == ""
    assert last_lines("x" * 1000 + " end").endswith("x end")
    assert len(last_lines("x" * 1000)) < 250


SIGNALS = (signal.SIGINT, signal.SIGTERM)
TWO_SIGNALS = """
import signal
from bstune.core.errors import Interrupted
from bstune.system.interruption import interruptible
with interruptible():
    try:
        signal.raise_signal(signal.SIGINT)
    except Interrupted:
        print("raised", flush=True)
    signal.raise_signal(signal.SIGINT)
print("survived")
"""


def wait_long():
    with interruptible():
        threading.Event().wait(30)


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_ends_a_wait_and_handlers_come_back(number):
    before = [signal.getsignal(each) for each in SIGNALS]
    sender = threading.Timer(0.1, os.kill, (os.getpid(), number))
    sender.start()
    with pytest.raises(Interrupted):
        wait_long()
    assert [signal.getsignal(each) for each in SIGNALS] == before


def import_compiled():
    try:
        signal.raise_signal(signal.SIGINT)
    except Interrupted as error:
        raise ImportError("initialization failed") from error


def log_anyway():
    with suppress(BaseException):
        signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("hide", [import_compiled, log_anyway])
def test_what_catches_a_signal_does_not_hide_it(hide):
    with pytest.raises(Interrupted), interruptible():
        hide()


def go_on(went_on):
    with suppress(Exception):
        signal.raise_signal(signal.SIGINT)
    went_on.append(True)


def test_what_takes_exceptions_for_its_own_does_not_go_on():
    went_on = []
    with pytest.raises(Interrupted), interruptible():
        go_on(went_on)
    assert not went_on


def drop():
    """In a weak reference's call-back Python drops what is raised."""
    kept = threading.Event()
    reference = weakref.ref(kept, lambda _: signal.raise_signal(signal.SIGINT))
    del kept
    threading.Event().wait(30)
    return reference


def test_an_interruption_that_python_drops_comes_again():
    began = time.monotonic()
    with pytest.raises(Interrupted), interruptible():
        drop()
    assert time.monotonic() - began < 10


def test_a_second_signal_kills():
    done = subprocess.run([sys.executable, "-c", TWO_SIGNALS], capture_output=True, text=True)
    assert done.returncode == -signal.SIGINT
    assert done.stdout == "raised\n"


def test_another_thread_changes_nothing():
    seen = []

    def work():
        with interruptible():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [signal.getsignal(signal.SIGINT)]
