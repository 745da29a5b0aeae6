import errno
import json
import os
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from toolbox import FakeTime, entries

from bstune.core.errors import StudyError
from bstune.report.drawing import save_figure
from bstune.system.files import (
    Identity,
    Output,
    append_text,
    check_owner,
    check_writable,
    full_disk,
    keep_trials,
    make_inside,
    may_take,
    own_mark,
    owned,
    partial_of,
    remove_partials,
    whole_file,
    write_text,
)

MINE = Identity("s", "sqlite:///a.db", "1")


def test_a_file_is_whole_or_not_there(tmp_path, monkeypatch):
    path = tmp_path / "curve.json"
    write_text(path, "one")

    def fail(*_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(
        StudyError, match=r"curve\.json cannot be written: Permission denied; what has finished"
    ):
        write_text(path, "two")
    assert path.read_text() == "one"
    assert entries(tmp_path) == ["curve.json"]


@pytest.mark.parametrize("back_after", [3, None])
def test_a_folder_that_is_away_is_waited_for_a_stated_time(tmp_path, back_after):
    path = tmp_path / "away" / "curve.json"
    clock = FakeTime()

    def sleep(seconds: float) -> None:
        clock.sleep(seconds)
        if clock.now == back_after:
            path.parent.mkdir()

    if back_after is None:
        message = (
            r"curve\.json cannot be written: No such file or directory; tried 11 times in 10 s; "
            r"what has finished"
        )
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
        # A survey's file is from before the study began.
        (replace(MINE, id=None), True, ""),
        (
            replace(MINE, id="2"),
            False,
            "is of the study 's' in sqlite:///a.db, but of an earlier one of this name",
        ),
        # This is another way to the same storage.
        (replace(MINE, storage="grpc://host:13000"), True, ""),
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


def test_places_are_checked_and_left_as_they_are(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "fifo")
    before = entries(tmp_path)
    check_writable(tmp_path / "missing/below", "output")
    for place, message in (
        ("file/below", "file is not a folder: choose another place"),
        ("folder", "folder is there and no regular file: choose another place"),
        ("fifo", "fifo is there and no regular file: choose another place"),
        ("/dev/null", "/dev/null is there and no regular file: choose another place"),
        # Where os.access allows root to write, and nothing can be made:
        ("/proc/x", "folder /proc is not writable"),
        ("/proc/x/y/trials.jsonl", "folder /proc is not writable"),
        ("/sys/x", "folder /sys is not writable"),
    ):
        with pytest.raises(StudyError, match=message):
            check_writable(tmp_path / place, "output")
    assert entries(tmp_path) == before


# Files of others


def study_folder(path: Path, **changes: object) -> Output:
    output = Output(path)
    for folder in (output.checkpoints, output.states):
        folder.mkdir(parents=True, exist_ok=True)
    output.identity.write_text(json.dumps(asdict(replace(MINE, **changes))))
    return output


def leave(path: Path) -> None:
    """Write weights or a state as the trial does that the name says."""
    path.write_bytes(b"weights" + own_mark(path))


def test_only_what_the_studys_own_trials_wrote_is_deleted(tmp_path):
    # There may be no folder.
    keep_trials(tmp_path / "missing", {0}, set)
    folder = study_folder(tmp_path / "study").checkpoints
    other = study_folder(tmp_path / "other", id="2").checkpoints
    for number in (1, 2, 3, 8, 31):
        leave(folder / f"trial-{number}.ckpt")
    leave(other / "trial-4.ckpt")
    leftover = partial_of(folder / "trial-9.ckpt")
    theirs = {
        "trial-best.pt": b"theirs",
        "trial-3.ckpt.old": (folder / "trial-3.ckpt").read_bytes(),
        # This file is another study's.
        "trial-4.ckpt": (other / "trial-4.ckpt").read_bytes(),
        "trial-5.ckpt": b"theirs",
        # This file is a copy under another name.
        "trial-6.ckpt": (folder / "trial-2.ckpt").read_bytes(),
        "trial-7.ckpt": b"",
        "trial-9.ckpt.partial": b"theirs",
        # The checksum of this file is another one.
        leftover.name.replace("trial-9", "trial-5"): b"theirs",
    }
    for name, content in theirs.items():
        (folder / name).write_bytes(content)
    (folder / "trial-10.ckpt").symlink_to(folder / "trial-1.ckpt")
    leftover.write_bytes(b"half of it")
    # 8 is none of those that may go, and 1 and 7 are kept.
    keep_trials(folder, {*range(11), 31} - {8}, lambda: {1, 7})
    assert entries(folder) == sorted([*theirs, "trial-1.ckpt", "trial-10.ckpt", "trial-8.ckpt"])
    assert {name: (folder / name).read_bytes() for name in theirs} == theirs

    # Nor is anything deleted behind a link, whoever wrote it.
    behind = Output(tmp_path / "third").checkpoints
    behind.parent.mkdir()
    behind.symlink_to(folder)
    keep_trials(behind, {8}, set)
    assert (folder / "trial-8.ckpt").exists()


def test_weights_and_states_take_no_name_of_another_file(tmp_path, caplog):
    path = study_folder(tmp_path).checkpoint(1)
    assert may_take(path)
    leave(path)
    # It is the same trial, run once more.
    assert may_take(path)
    assert caplog.messages == []
    for make in (
        lambda: path.write_bytes(b"theirs"),
        lambda: path.symlink_to(tmp_path / "nowhere"),
        path.mkdir,
        lambda: os.mkfifo(path),
    ):
        path.unlink(missing_ok=True) if not path.is_dir() else path.rmdir()
        make()
        assert not may_take(path)
        assert f"{path} is not this study's and stays as it is" in caplog.messages[-1]


def victim_of(path: Path) -> Path:
    """Let a link at the path lead to a file of the user's."""
    victim = path.parent.parent / f"victim-{path.name}"
    victim.write_text("theirs")
    path.symlink_to(victim)
    return victim


@pytest.mark.parametrize("name", ["curve.json", "curve.json.partial"])
@pytest.mark.parametrize("way", ["text", "bytes", "figure"])
def test_no_file_is_written_through_a_link(tmp_path, way, name):
    folder = tmp_path / "study"
    folder.mkdir()
    path = folder / "curve.json"
    victim = victim_of(folder / name)
    if way == "text":
        write_text(path, "mine")
    elif way == "bytes":
        with whole_file(path) as file:
            file.write(b"mine")
    else:
        save_figure(lambda figure: None, (1.0, 1.0), path)
    assert victim.read_text() == "theirs"
    assert path.is_file()
    assert not path.is_symlink()
    assert path.read_bytes() != b"theirs"
    assert entries(folder) == sorted({"curve.json", name})


@pytest.mark.parametrize("there", ["link", "fifo", "folder"])
def test_nothing_is_appended_but_to_a_regular_file(tmp_path, there):
    folder = tmp_path / "study"
    folder.mkdir()
    append_text(folder / "plain", "a\n")
    append_text(folder / "plain", "b\n")
    assert (folder / "plain").read_text() == "a\nb\n"
    path = folder / "unstored.jsonl"
    victim = victim_of(path) if there == "link" else None
    if there == "fifo":
        os.mkfifo(path)
    elif there == "folder":
        path.mkdir()
    with pytest.raises(StudyError, match=r"unstored\.jsonl cannot be written"):
        append_text(path, "c\n")
    assert victim is None or victim.read_text() == "theirs"


def test_what_killed_processes_left_is_removed_and_nothing_like_it(tmp_path):
    leftovers = [partial_of(tmp_path / name) for name in ("curve.json", "curve.png", "x" * 200)]
    # Each differs a little from what bstune calls such a file.
    theirs = [
        "curve.json.partial",
        ".curve.json.partial",
        f".curve.json.{'0' * 32}.partial",
        leftovers[0].name.upper(),
        leftovers[0].name[1:],
    ]
    for path in (*leftovers, *(tmp_path / name for name in theirs)):
        path.touch()
    partial_of(tmp_path / "link").symlink_to(tmp_path / "curve.json.partial")
    assert check_owner(Output(tmp_path / "missing"), MINE) is None
    remove_partials(tmp_path, {"curve.png"})
    assert not leftovers[1].exists()
    assert leftovers[0].exists()
    remove_partials(tmp_path)
    assert [name for name in entries(tmp_path) if not name.startswith(".link")] == sorted(theirs)


def test_a_folder_with_nothing_but_what_a_killed_process_left_is_empty(tmp_path):
    output = Output(tmp_path)
    partial_of(output.identity).touch()
    with owned(output, MINE):
        write_text(output.trials, "")
    (tmp_path / "curve.json.partial").touch()
    output.identity.unlink()
    with pytest.raises(StudyError, match="is not empty and no study's"):
        check_owner(output, MINE)


@pytest.mark.parametrize("name", ["checkpoints", "states", "unstored.jsonl"])
@pytest.mark.parametrize("target", ["elsewhere", "file", "nowhere"])
def test_links_inside_a_studys_folder_are_refused_and_the_folder_itself_may_be_one(
    tmp_path, name, target
):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "file").touch()
    study_folder(tmp_path / "disk")
    link = Output(tmp_path / "study")
    link.root.symlink_to(tmp_path / "disk")
    assert check_owner(link, MINE) == MINE
    place = link.root / name
    if place.exists():
        place.rmdir()
    place.symlink_to(tmp_path / target)
    with pytest.raises(StudyError, match=f"{place} is a link, and nothing in a study's folder"):
        check_owner(link, MINE)
    with pytest.raises(StudyError, match=f"{place} is a link"):
        make_inside(place)


def test_a_full_disk_is_found_among_causes_that_may_form_a_ring():
    full = OSError(errno.ENOSPC, "No space left on device", "x")
    cause = ValueError("a")
    other = KeyError("b")
    cause.__cause__ = other
    other.__cause__ = cause
    assert full_disk(cause) is None
    cause.__cause__ = full
    assert "x cannot be written: No space left on device" in str(full_disk(other))
