"""The commit of the working directory, and that none is no error."""

import shutil
import subprocess

import pytest

from bstune.system.git import git_commit


def run_git(*arguments):
    identity = ("-c", "user.name=a", "-c", "user.email=a@b.c")
    done = subprocess.run(
        ("git", *identity, *arguments), capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Return a working directory that is in no repository, whatever is above the tests' folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    return tmp_path


@pytest.mark.skipif(shutil.which("git") is None, reason="there is no git")
def test_it_is_that_of_the_working_directory(folder):
    assert git_commit() is None
    run_git("init", "--quiet")
    # A repository without a commit.
    assert git_commit() is None
    run_git("commit", "--quiet", "--allow-empty", "--message", "first")
    assert git_commit() == run_git("log", "-1", "--format=%H")


@pytest.mark.usefixtures("folder")
def test_without_git_there_is_none(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert git_commit() is None
