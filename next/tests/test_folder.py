import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from refusals import refused
from results import STATES, records, result

from bstune.core.errors import InputError
from bstune.study.folder import MOST_RECORDS, read_records, read_result
from bstune.system.files import JSON_LIMIT_BYTES

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("state", STATES)
def test_a_result_is_read_as_it_was_written(state, tmp_path):
    (tmp_path / "curve.json").write_text(STATES[state].model_dump_json())
    assert read_result(tmp_path) == STATES[state]


def dumped(**changes):
    return json.dumps({**result().model_dump(mode="json"), **changes})


@pytest.mark.parametrize(
    "text, told",
    [
        (None, "curve.json"),
        ('{"schema_number": 1', "JSON"),
        ("[1]", "mapping"),
        (dumped(schema_number=2), "schema number 1, but has 2"),
        (dumped(verdict="maybe"), "verdict"),
        (dumped(best={"lr": 1}), "best.batch_size"),
        (dumped(parameters=math.inf), "parameters"),
        (dumped(spent={"training": math.inf, "other": 0}), "spent.training"),
        (" " * (JSON_LIMIT_BYTES + 1), f"{JSON_LIMIT_BYTES:,}"),
    ],
)
def test_a_broken_result_is_refused_in_one_line(text, told, tmp_path):
    if text is not None:
        (tmp_path / "curve.json").write_text(text)
    with refused(told):
        read_result(tmp_path)


def test_a_broken_record_is_refused_with_its_line(tmp_path):
    good = records()[0].model_dump_json()
    (tmp_path / "trials.jsonl").write_text(f'{good}\n{{"number": 1}}\n')
    with pytest.raises(InputError, match=r"trials\.jsonl, line 2, is no trial: "):
        read_records(tmp_path)


def test_more_records_than_an_answer_can_be_computed_from_are_refused(tmp_path):
    (tmp_path / "trials.jsonl").write_text("1\n" * (MOST_RECORDS + 1))
    with refused(f"{MOST_RECORDS:,}"):
        read_records(tmp_path)


def test_a_reader_that_closes_its_pipe_is_no_failure():
    """``bstune ... | head -1``."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "bstune", "--version"]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")
