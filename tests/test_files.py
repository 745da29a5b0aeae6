from pathlib import Path

import pytest
from toolbox import entries

from bstune.core.errors import StudyError
from bstune.core.files import Output, check_writable, keep_trials, locked, write_text


def test_a_file_is_whole_or_not_there(tmp_path, monkeypatch):
    path = tmp_path / "curve.json"
    write_text(path, "one")

    def fail(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="no space"):
        write_text(path, "two")
    assert path.read_text() == "one"


def test_a_body_that_fails_at_once_leaves_what_was_there(tmp_path):
    (tmp_path / "there").mkdir()
    for folder in ("there/study", "new/study"):
        with pytest.raises(StudyError, match="refused"), locked(Output(tmp_path / folder)):
            raise StudyError("refused")
    assert list(tmp_path.rglob("*")) == [tmp_path / "there"]


def test_one_lock_a_study(tmp_path):
    output = Output(tmp_path / "study")
    again = pytest.raises(StudyError, match="another process runs this study")
    with locked(output), again, locked(Output(tmp_path / "study")):
        pass
    with locked(output):
        write_text(output.trials, "")
    assert output.trials.exists()


def test_places_are_checked_without_writing(tmp_path):
    (tmp_path / "file").touch()
    check_writable(tmp_path / "missing/below", "output")
    with pytest.raises(StudyError, match="file is not a folder: choose another place"):
        check_writable(tmp_path / "file/below", "output")
    assert entries(tmp_path) == ["file"]


def test_files_of_other_trials_are_deleted_but_what_running_ones_write(tmp_path):
    keep_trials(tmp_path / "missing", {0})  # there may be none
    theirs = ["trial-3.ckpt", "trial-3.ckpt.partial", "trial-3.partial"]
    for name in ("trial-1.ckpt", "trial-2.ckpt", "trial-4.ckpt.partial", "trial-31.ckpt", *theirs):
        (tmp_path / name).touch()
    keep_trials(tmp_path, {1, 7}, {3})
    assert entries(tmp_path) == ["trial-1.ckpt", *theirs]
    assert Output(tmp_path).checkpoint(1).name == Output(tmp_path).state(1).name == "trial-1.ckpt"
