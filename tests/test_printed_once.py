import io
import logging
import sys
import warnings
from contextlib import contextmanager, redirect_stderr, redirect_stdout

import pytest

from bstune.trial.processes.printed_once import own_lines, printed_once
from bstune.trial.processes.trials_log import TrialsLog


@contextmanager
def streams():
    """Give what stands for the standard output and the standard error; pytest's own change with a test's phases."""
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        yield out, err


def log_in(folder):
    return TrialsLog(folder / "trials.log")


def test_a_kind_of_line_is_printed_once_on_its_own_stream(tmp_path):
    with streams() as (out, err), printed_once(log_in(tmp_path)):
        for number in range(3):
            print(f"built model {number}")
            print("careful", file=sys.stderr)
    assert out.getvalue().startswith("built model 0\n")
    assert out.getvalue().count("built model") == 1
    assert err.getvalue() == "careful\n"
    # Three times two lines.
    assert len((tmp_path / "trials.log").read_text().splitlines()) == 6


def test_warnings_and_logged_lines_are_printed_once(tmp_path):
    with streams() as (_, err), printed_once(log_in(tmp_path)), warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = lambda message, *_: sys.stderr.write(f"{message}\n")
        for _ in range(3):
            warnings.warn("old option", stacklevel=1)
            handler = logging.StreamHandler(sys.stderr)
            handler.handle(logging.makeLogRecord({"msg": "logged"}))
    assert err.getvalue().splitlines().count("old option") == 1
    assert err.getvalue().splitlines().count("logged") == 1


def test_own_lines_stand_whatever_stood_before(tmp_path):
    with streams() as (out, _), printed_once(log_in(tmp_path)):
        say = own_lines(print)
        for number in range(3):
            say(f"waiting, {number} s")
            print("the user's")
            say("trying")
    lines = [line for line in out.getvalue().splitlines() if "trials.log" not in line]
    assert lines == [
        "waiting, 0 s",
        "the user's",
        "trying",
        "waiting, 1 s",
        "trying",
        "waiting, 2 s",
        "trying",
    ]


def test_a_progress_bar_is_its_last_line_and_what_has_no_end_is_printed(tmp_path):
    with streams() as (out, _), printed_once(log_in(tmp_path)):
        sys.stdout.write("\r 10%")
        sys.stdout.write("\r100%\n")
        sys.stdout.write("done")
    assert out.getvalue() == "100%\ndone\n"


def test_the_streams_come_back_and_a_kept_one_goes_on(tmp_path):
    kept = []

    def fail():
        with printed_once(log_in(tmp_path)):
            kept.append(sys.stdout)
            raise ValueError("no")

    with streams() as (out, err):
        with pytest.raises(ValueError, match="no"):
            fail()
        assert (sys.stdout, sys.stderr) == (out, err)
    # Whoever has kept the stream, as a logging handler does, writes past the log from then on.
    for _ in range(2):
        kept[0].write("again\n")
    assert out.getvalue() == "again\nagain\n"


def test_a_folder_that_is_not_there_is_not_made_nor_named(tmp_path):
    with streams() as (out, _), printed_once(TrialsLog(tmp_path / "outputs" / "trials.log")):
        for _ in range(3):
            print("a line")
    assert out.getvalue() == "a line\n"
    assert not (tmp_path / "outputs").exists()
