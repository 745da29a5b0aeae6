"""One signal raises, a second one kills, and the handlers from before come back."""

import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from contextlib import suppress

import pytest

from bstune.core.errors import Interrupted
from bstune.system.interruption import interruptible

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
