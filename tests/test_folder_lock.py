"""A folder's lock: one process at a time, whichever way the one before has ended."""

import os
import shutil
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from bstune.core.errors import StudyError
from bstune.sweeps.harness import main
from bstune.system import folder_lock
from bstune.system.folder_lock import LOCK_NAME, held_alone

HOLD = """
import sys
from pathlib import Path
from bstune.system.folder_lock import held_alone
with held_alone(Path(sys.argv[1]), "sweep.output"):
    print("held", flush=True)
    sys.stdin.read()
"""


@contextmanager
def held_by_another(folder):
    """Another process that holds the folder until it is killed, or its standard input is closed."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout.readline() == "held\n"
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("ends_by", ["kill", "itself"])
def test_a_folder_is_held_until_its_process_ends(tmp_path, ends_by):
    folder = tmp_path / "a" / "b"
    with held_by_another(folder) as process:
        with (
            pytest.raises(StudyError, match=rf"\(process {process.pid}\).*sweep.output=DIR"),
            held_alone(folder, "sweep.output"),
        ):
            pass
        if ends_by == "kill":
            process.kill()
        else:
            process.stdin.close()
        process.wait()
    # A process that is killed leaves its file, which locks nobody out.
    assert (folder / LOCK_NAME).exists() == (ends_by == "kill")
    with held_alone(folder, "sweep.output"):
        assert f"process {os.getpid()})" in (folder / LOCK_NAME).read_text()
    assert not (folder / LOCK_NAME).exists()


def test_what_was_made_for_the_lock_is_gone_and_what_else_is_there_stays(tmp_path):
    with held_alone(tmp_path / "a" / "b", "sweep.output"):
        pass
    # The folders were made for it, too.
    assert list(tmp_path.iterdir()) == []
    with held_alone(tmp_path / "a" / "b", "sweep.output"):
        (tmp_path / "a" / "kept").touch()
    assert [path.name for path in tmp_path.rglob("*")] == ["a", "kept"]


def test_a_folder_that_cannot_be_made_is_a_line(tmp_path):
    (tmp_path / "file").touch()
    with (
        pytest.raises(StudyError, match="cannot be written"),
        held_alone(tmp_path / "file" / "a", "sweep.output"),
    ):
        pass


@pytest.mark.parametrize("taken", ["b", "a"])
def test_a_folder_that_its_holder_takes_away_meanwhile_is_made_again(tmp_path, monkeypatch, taken):
    locked = folder_lock._locked
    taken_away = []

    def after_it_is_gone(path, *arguments):
        if len(taken_away) < 2:
            taken_away.append(path)
            shutil.rmtree(tmp_path / "a" / "b" if taken == "b" else tmp_path / "a")
        return locked(path, *arguments)

    monkeypatch.setattr(folder_lock, "_locked", after_it_is_gone)
    with held_alone(tmp_path / "a" / "b", "sweep.output"):
        assert (tmp_path / "a" / "b" / LOCK_NAME).exists()
    assert len(taken_away) == 2
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_always_taken_away_is_a_line(tmp_path, monkeypatch):
    monkeypatch.setattr(Path, "mkdir", lambda path, **options: None)
    with (
        pytest.raises(StudyError, match="cannot be written: No such file"),
        held_alone(tmp_path / "a", "sweep.output"),
    ):
        pass


def test_a_second_sweep_in_a_folder_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with (
        held_by_another(tmp_path / "out") as process,
        pytest.raises(StudyError, match=f"process {process.pid}") as refused,
    ):
        main(["vectorization", "sweep.output=out"])
    assert refused.value.exit_status == 2
    assert [path.name for path in (tmp_path / "out").iterdir()] == [LOCK_NAME]
