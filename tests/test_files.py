import errno
import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from toolbox import FakeTime, entries

from bstune.core.errors import StudyError
from bstune.system.files import (
    Identity,
    Output,
    check_writable,
    full_disk,
    keep_trials,
    owned,
    write_text,
)

MINE = Identity("s", "sqlite:///a.db", "1")


def test_a_file_is_whole_or_not_there(tmp_path, monkeypatch):
    path = tmp_path / "curve.json"
    write_text(path, "one")

    def fail(*_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(
        StudyError, match=r"curve\.json cannot be written: Permission denied; what has finished"
    ):
        write_text(path, "two")
    assert path.read_text() == "one"


@pytest.mark.parametrize("back_after", [3, None])
def test_a_folder_that_is_away_is_waited_for_a_stated_time(tmp_path, back_after):
    path, clock = tmp_path / "away" / "curve.json", FakeTime()

    def sleep(seconds: float) -> None:
        clock.sleep(seconds)
        if clock.now == back_after:
            path.parent.mkdir()

    if back_after is None:
        message = r"curve\.json cannot be written: No such file or directory; tried 11 times in 10 s; what has finished"
        with pytest.raises(StudyError, match=message):
            write_text(path, "one", sleep)
        assert clock.now == 10
    else:
        write_text(path, "one", sleep)
        assert path.read_text() == "one"


def test_a_body_that_fails_at_once_leaves_what_was_there(tmp_path):
    (tmp_path / "there").mkdir()
    for folder in ("there/study", "new/study"):
        with pytest.raises(StudyError, match="refused"), owned(Output(tmp_path / folder), MINE):
            raise StudyError("refused")
    assert list(tmp_path.rglob("*")) == [tmp_path / "there"]


@pytest.mark.parametrize(
    ("content", "mine", "message"),
    [
        (None, True, ""),
        ("another file", False, "is not empty and no study's"),
        ("{", False, "is not empty and no study's"),
        (MINE, True, ""),
        (replace(MINE, id=None), True, ""),  # a survey's, before the study began
        (
            replace(MINE, id="2"),
            False,
            "is of the study 's' in sqlite:///a.db, but of an earlier one of this name",
        ),
        (replace(MINE, storage="grpc://host:13000"), True, ""),  # another way to the same storage
        (
            replace(MINE, study="other", id="2"),
            False,
            "is of the study 'other' in sqlite:///a.db: choose another",
        ),
        (
            replace(MINE, storage="sqlite:///b.db", id=None),
            False,
            "is of the study 's' in sqlite:///b.db: choose another",
        ),
    ],
)
def test_a_folder_is_this_studys_or_refused_and_left_as_it_is(tmp_path, content, mine, message):
    output = Output(tmp_path / "study")
    output.root.mkdir()
    if content is not None:
        file = output.root / "notes.txt" if content == "another file" else output.identity
        file.write_text(content if isinstance(content, str) else json.dumps(asdict(content)))
    before = {path.name: path.read_text() for path in output.root.iterdir()}
    if mine:
        with owned(output, MINE):
            write_text(output.trials, "")
        assert entries(output.root) == ["study.json", "trials.jsonl"]
        kept = content if isinstance(content, Identity) and content.id is not None else MINE
        assert json.loads(output.identity.read_text()) == asdict(kept)
    else:
        with (
            pytest.raises(StudyError, match=f"output={output.root} {message}"),
            owned(output, MINE),
        ):
            pytest.fail("not ours")
        assert {path.name: path.read_text() for path in output.root.iterdir()} == before


def test_identities_show_no_password_and_mean_the_same_database_from_any_folder(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    assert Identity.of("s", "sqlite:///a.db").storage == f"sqlite:///{tmp_path}/a.db"
    assert (
        Identity.of("s", "postgresql://me:secret@host/db").storage == "postgresql://me:***@host/db"
    )


def test_places_are_checked_without_writing(tmp_path):
    (tmp_path / "file").touch()
    check_writable(tmp_path / "missing/below", "output")
    with pytest.raises(StudyError, match="file is not a folder: choose another place"):
        check_writable(tmp_path / "file/below", "output")
    assert entries(tmp_path) == ["file"]


def test_only_files_of_the_studys_own_trials_are_deleted(tmp_path):
    keep_trials(tmp_path / "missing", {0}, set)  # there may be none
    theirs = [
        "trial-best.pt",
        "trial-notes.txt",
        "trial-8.ckpt",
        "trial-3.partial",
        "trial-3.ckpt.old",
        "my-trial-3.ckpt",
    ]
    for name in (
        "trial-1.ckpt",
        "trial-2.ckpt",
        "trial-3.ckpt",
        "trial-4.ckpt.partial",
        "trial-31.ckpt",
        *theirs,
    ):
        (tmp_path / name).touch()
    keep_trials(tmp_path, {1, 2, 3, 4, 31}, lambda: {1, 7})
    assert entries(tmp_path) == sorted(["trial-1.ckpt", *theirs])
    assert Output(tmp_path).checkpoint(1).name == Output(tmp_path).state(1).name == "trial-1.ckpt"


def test_a_full_disk_is_found_among_causes_that_may_form_a_ring():
    full, cause, other = (
        OSError(errno.ENOSPC, "No space left on device", "x"),
        ValueError("a"),
        KeyError("b"),
    )
    cause.__cause__, other.__cause__ = other, cause
    assert full_disk(cause) is None
    cause.__cause__ = full
    assert "x cannot be written: No space left on device" in str(full_disk(other))
