"""A CSV file of points is read, and what cannot be used is refused with its line."""

import pytest

from bstune.core.curve import CurveError, fit_curve
from bstune.core.points_file import parse_points

# steps of the 85M-parameter language model in the runs released with Zhang et al. 2024, arXiv
# 2410.21676
ROWS = "64,46000\n128,23000\n256,13282\n512,7000\n1024,3840\n2048,2500\n4096,1800\n8192,1600\n16384,1600\n"
GOOD_FILES = {
    "plain": ("batch_size,steps\n" + ROWS, 9, 0),
    "byte-order mark, other columns, blank lines": (
        "\ufeff note , steps,batch_size\n\nx,9,1\n\nx,5,2\nx,4,9\n",
        3,
        0,
    ),
    "stopped": ("batch_size,steps,stopped\n1,9,TRUE\n2,9,0\n4,7,false\n9,6,0\n", 4, 1),
    "floats, quotes, carriage returns": (
        'batch_size,steps\r\n"16",1e3\r\n64,3.5e2\r\n256.5,2e2\r\n',
        3,
        0,
    ),
}


@pytest.mark.parametrize(("text", "points", "stopped"), GOOD_FILES.values(), ids=GOOD_FILES.keys())
def test_points_are_read_from_a_file(text, points, stopped):
    found = parse_points(text, "points.csv")
    assert (len(found), sum(p.stopped for p in found)) == (points, stopped)
    assert fit_curve(found).critical_batch_size > 0


HEAD = "batch_size,steps\n"
BAD_FILES = {
    "empty": ("", "line 1: needs the columns batch_size and steps"),
    "missing column": ("batch,steps\n1,2\n", "got 'batch,steps'"),
    "no header": (ROWS, "got '64,46000'"),
    "repeated column": (
        "batch_size,steps,steps\n1,2,3\n",
        "each once, but got 'batch_size,steps,steps'",
    ),
    "not a number": (
        HEAD + ROWS + "many,2\n",
        "line 11: batch_size must be a positive, finite number",
    ),
    "missing value": (HEAD + "1,\n" + ROWS, "line 2: steps must be .* but got ''"),
    "NaN": (HEAD + ROWS + "1,nan\n", "line 11: steps must be .* but got 'nan'"),
    "too short a line": (HEAD + "1\n" + ROWS, "line 2: needs 2 values"),
    "too long a line": (HEAD + "1,2,3\n" + ROWS, "line 2: needs 2 values"),
    "unknown flag": (
        "batch_size,steps,stopped\n1,2,maybe\n",
        "line 2: stopped must be .* but got 'maybe'",
    ),
    "open quote": (HEAD + '1,"2\n' + ROWS, "not a CSV file"),
}


@pytest.mark.parametrize(("content", "message"), BAD_FILES.values(), ids=BAD_FILES.keys())
def test_files_that_cannot_be_read_are_refused(content, message):
    with pytest.raises(CurveError, match=message):
        parse_points(content, "points.csv")
