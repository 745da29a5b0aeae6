import multiprocessing
from pathlib import Path

import pytest

from bstune.core.errors import StudyError
from bstune.core.files import Output, check_writable, locked, write_text


def test_a_file_is_whole_or_not_there(tmp_path, monkeypatch):
    path = tmp_path / "curve.json"
    write_text(path, "one")

    def fail(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="no space"):
        write_text(path, "two")
    assert path.read_text() == "one"


def test_the_folder_stays_once_it_holds_something(tmp_path):
    output = Output(tmp_path / "outputs" / "study")
    with locked(output):
        write_text(output.trials, "")
    assert output.trials.exists()


def test_a_body_that_fails_at_once_leaves_nothing(tmp_path):
    with pytest.raises(StudyError, match="refused"), locked(Output(tmp_path / "outputs" / "study")):
        raise StudyError("refused")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_was_there_stays(tmp_path):
    (tmp_path / "outputs").mkdir()
    with pytest.raises(StudyError), locked(Output(tmp_path / "outputs" / "study")):
        raise StudyError("refused")
    assert list(tmp_path.iterdir()) == [tmp_path / "outputs"]


def _try_lock(root: Path, queue: "multiprocessing.Queue[str]") -> None:
    try:
        with locked(Output(root)):
            queue.put("locked")
    except StudyError as error:
        queue.put(str(error))


def test_one_process_a_study(tmp_path):
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    with locked(Output(tmp_path / "study")):
        other = context.Process(target=_try_lock, args=(tmp_path / "study", queue))
        other.start()
        message = queue.get(timeout=120)
        other.join()
    assert message.startswith("another process runs this study")


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("file/below", "file is not a folder: choose another place"),
        ("missing/below", None),
    ],
)
def test_places_are_checked_without_writing(tmp_path, path, message):
    (tmp_path / "file").touch()
    if message is None:
        check_writable(tmp_path / path, "output")
    else:
        with pytest.raises(StudyError, match=message):
            check_writable(tmp_path / path, "output")
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_checkpoints_of_others_are_deleted(tmp_path):
    output = Output(tmp_path)
    output.checkpoints.mkdir()
    for number in range(4):
        output.checkpoint(number).touch()
    output.keep_checkpoints({1, 3})
    assert sorted(path.name for path in output.checkpoints.iterdir()) == ["trial-1.ckpt", "trial-3.ckpt"]


def test_states_of_others_are_deleted_and_what_was_half_written(tmp_path):
    output = Output(tmp_path)
    output.keep_states({0})  # there may be none
    output.states.mkdir()
    for number in range(4):
        output.state(number).touch()
    (output.states / "trial-4.ckpt.partial").touch()
    output.keep_states({1, 3, 7})
    assert sorted(path.name for path in output.states.iterdir()) == ["trial-1.ckpt", "trial-3.ckpt"]


def test_what_running_trials_write_is_left_alone(tmp_path):
    output = Output(tmp_path)
    theirs = {"trial-3.partial", "trial-3.ckpt", "trial-3.ckpt.partial"}
    for folder, keep in ((output.checkpoints, output.keep_checkpoints), (output.states, output.keep_states)):
        folder.mkdir()
        for name in ("trial-1.ckpt", "trial-2.ckpt", "trial-31.ckpt", "trial-31.partial", *theirs):
            (folder / name).touch()
        keep({1}, {3})
        assert {path.name for path in folder.iterdir()} == {"trial-1.ckpt", *theirs}
