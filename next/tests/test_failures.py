"""An error's line names the user's own file and line."""

import json
import runpy

import pytest

from bstune.core.records import Target
from bstune.system.failures import last_lines, one_line, where, where_in_traceback

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
