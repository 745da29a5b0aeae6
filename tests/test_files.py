"""Files are whole or not there, links are not followed, and folders keep their study."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from refusals import cases, refused
from results import STATES, records, result

from bstune.core.errors import InputError, StudyError
from bstune.study.folder import MOST_RECORDS, read_records, read_result
from bstune.system import files
from bstune.system.files import JSON_LIMIT_BYTES, StudyFolder, claim_folder

URL = "postgresql://me:pw@host/db"


def test_a_whole_file_replaces_the_one_before(tmp_path):
    path = tmp_path / "checkpoints" / "a.ckpt"
    files.write_text(path, "old")
    # A reader that has the old file open reads it to its end.
    with path.open() as reader:
        with files.whole_file(path) as file:
            file.write("\ufeffné".encode())
            assert path.read_text() == "old"
        assert reader.read() == "old"
    # A body that fails leaves what was there.
    with pytest.raises(TypeError), files.whole_file(path) as file:
        file.writelines([b"half", None])
    assert files.read_text(path) == "né"
    assert os.listdir(path.parent) == ["a.ckpt"]
    # A date is a text.
    files.write_text(path, "a: &x {c: yes, d: 2001-99-99}\nb: *x")
    assert files.read_yaml(path) == {key: {"c": True, "d": "2001-99-99"} for key in "ab"}


# What stands in a file's place.
MAKE = {
    "link": lambda path, other: path.symlink_to(other),
    "folder": lambda path, other: path.mkdir(),
    "pipe": lambda path, other: os.mkfifo(path),
}


@cases("""
write | kind
write_text | link
write_text | folder
append_line | link
# A rename replaces a pipe, which holds nothing; appending to one would wait for its other end.
append_line | pipe
""")
def test_what_is_no_file_is_not_written(tmp_path, write, kind):
    path, other = tmp_path / "a", tmp_path / "other"
    other.write_text("mine")
    MAKE[kind](path, other)
    with refused(str(path), StudyError):
        getattr(files, write)(path, "text")
    assert other.read_text() == "mine"
    assert sorted(os.listdir(tmp_path)) == ["a", "other"]


def test_a_user_without_a_name_has_a_home(monkeypatch):
    def unknown(uid):
        raise KeyError(uid)

    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("pwd.getpwuid", unknown)
    files.ensure_home()
    assert os.access(os.path.expanduser("~"), os.W_OK)


def test_a_name_that_is_too_long_is_not_written(tmp_path):
    for write in (files.write_text, files.append_line):
        with refused("xxx", StudyError):
            write(tmp_path / ("x" * 300), "text")


@pytest.mark.parametrize("there", [None, [], [".study.json.1a2b.partial"]])
def test_a_free_folder_is_claimed_and_kept(tmp_path, there):
    folder = StudyFolder(tmp_path / "runs" / "digits")
    if there is not None:
        folder.root.mkdir(parents=True)
    for name in there or ():
        (folder.root / name).touch()
    claim_folder(folder, "digits", URL)
    files.write_text(folder.result, "{}")
    claim_folder(folder, "digits", URL.replace("pw", "new"))
    owner = json.loads(folder.owner.read_text())
    assert (owner["study"], owner["storage"]) == ("digits", "postgresql://me:***@host/db")


@pytest.mark.parametrize("name", ["trials.log", "checkpoints", "best/last.ckpt"])
def test_a_link_that_leads_out_of_a_folder_is_refused(tmp_path, name):
    folder = StudyFolder(tmp_path / "out")
    claim_folder(folder, "digits", URL)
    path = folder.root / name
    path.parent.mkdir(exist_ok=True)
    path.symlink_to(folder.owner)
    claim_folder(folder, "digits", URL)
    path.unlink()
    path.symlink_to(tmp_path / "missing")
    with refused(str(path), StudyError):
        claim_folder(folder, "digits", URL)


OWNER = '{"schema_number": %d, "study": "%s", "storage": "sqlite:///a.db"}'


@pytest.mark.parametrize(
    "name, text",
    [
        ("notes.txt", "mine"),
        ("study.json", OWNER % (1, "mnist")),
        ("study.json", OWNER % (2, "digits")),
        ("study.json", "no JSON"),
    ],
)
def test_a_foreign_folder_is_refused_and_left(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    for root in (tmp_path, tmp_path / name):
        with refused("output=", StudyError):
            claim_folder(StudyFolder(root), "digits", "sqlite:///a.db")
    assert os.listdir(tmp_path) == [name]
    assert (tmp_path / name).read_text() == text


# Ten levels of ten aliases stand for 10^10 values; merged keys would be copied as often.
ALIASES = "a0: &a0 [1]\n" + "".join(f"a{i + 1}: &a{i + 1} [{f'*a{i},' * 10}]\n" for i in range(10))
MERGES = "a0: &a0 {x: 1}\n" + "".join(
    f"a{i + 1}: &a{i + 1} {{<<: [{f'*a{i},' * 10}]}}\n" for i in range(10)
)


@pytest.mark.parametrize(
    "read, data",
    [
        (files.read_text, "x" * 3001),
        (files.read_text, "\udcff"),
        (files.read_json, "[" * 3000),
        (files.read_yaml, "a: 1" + 200 * ":1"),
        (files.read_yaml, "a: !!int x"),
        (files.read_yaml, "a: !!set {b}"),
        (files.read_yaml, "!!python/object/apply:os.getcwd []"),
        (files.read_yaml, "[" * 3000),
        (files.read_yaml, f"&a [{'1,' * 1000} *a]"),
        (files.read_yaml, ALIASES),
        (files.read_yaml, MERGES),
    ],
)
def test_what_cannot_be_read_is_refused_in_a_line(tmp_path, read, data):
    path = tmp_path / "a"
    path.write_text(data, errors="surrogateescape")
    with refused(str(path)):
        read(path, 3000)


@pytest.mark.parametrize("kind", MAKE)
def test_what_is_no_file_is_not_read(tmp_path, kind):
    MAKE[kind](tmp_path / "a", tmp_path / "missing")
    with pytest.raises(InputError):
        files.read_text(tmp_path / "a")


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
