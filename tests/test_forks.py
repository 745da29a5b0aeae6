"""A copy of the process that trains ends; the process itself goes on."""

import os

import pytest

from bstune.trial.parts.forks import OneProcess


def test_the_process_itself_goes_on(monkeypatch):
    ended = []
    monkeypatch.setattr(os, "_exit", ended.append)
    OneProcess().exit_if_forked()
    assert ended == []


def test_another_process_ends(monkeypatch):
    ended = []
    one = OneProcess()
    monkeypatch.setattr(os, "_exit", ended.append)
    # As in a fork, which has inherited the object.
    monkeypatch.setattr(os, "getpid", lambda: -1)
    one.exit_if_forked()
    assert ended == [0]


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_real_copy_ends_without_an_error():
    one = OneProcess()
    child = os.fork()
    if child == 0:
        one.exit_if_forked()
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
