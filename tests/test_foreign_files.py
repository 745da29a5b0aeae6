"""Through the command: files behind links, a user's own files and databases, and places that cannot be written."""

import os
import shutil
import sqlite3
from contextlib import closing
from itertools import product

import pytest
import yaml
from builders import copy_of_study, moved_study
from toolbox import entries, made_table, tree, trials_of

from bstune.study.verbs import retarget

REPLAY = (
    "workload=replay",
    "workload.table=t.jsonl",
    "workload.target.value=0.14",
    "search.objective=steps",
    "search.replicates=0",
    "sampler=random",
    "study=s",
    "output=study",
)
UNTRACKED = "mlflow.enabled=false"
WRITTEN = (
    "best.yaml",
    "config.yaml",
    "curve.json",
    "curve.png",
    "curve.svg",
    "report.html",
    "study.json",
    "trials.jsonl",
)
TABLES = {
    "a user's own": "CREATE TABLE patients (id INTEGER PRIMARY KEY); INSERT INTO patients "
    "VALUES (1)",
    "of the same name": "CREATE TABLE studies (name TEXT); CREATE TABLE runs (name TEXT)",
    "Alembic's": "CREATE TABLE alembic_version (version_num TEXT); CREATE TABLE users (id INTEGER)",
    "a view": "CREATE VIEW shown AS SELECT 1",
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Run a study of four trials, once; return where it lies."""
    return moved_study(tmp_path_factory, *REPLAY, UNTRACKED, "search.trials=4")


@pytest.fixture
def study(made, bstune, tmp_path):
    """The folder of the study of four trials, which the same command continues here."""
    return copy_of_study(made, tmp_path, "study")


@pytest.fixture
def table(tmp_path):
    return made_table(tmp_path)


def run_script(path, script):
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.executescript(script)


def victims(folder, names):
    """Make a file of the user's for each name, and a link to it in the folder, in place of what is there."""
    outside = folder.parent / "victims"
    outside.mkdir()
    for name in names:
        (outside / name).write_text(f"the user's {name}")
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(outside / name)
    return outside


# A file is written under the second name, then renamed: test_files.py has its links too.
@pytest.mark.parametrize("end", ["", pytest.param(".partial", marks=pytest.mark.slow)])
def test_a_study_writes_nothing_through_links_in_its_folder(bstune, study, tmp_path, end):
    folder = study
    names = [name + end for name in WRITTEN if name + end != "study.json"]
    outside = victims(folder, names)
    before = tree(outside)
    status, _, err = bstune(*REPLAY, UNTRACKED, "search.trials=5")
    assert (status, err) == (0, "")
    assert tree(outside) == before
    for name in WRITTEN:
        assert not (folder / name).is_symlink()
        assert "the user's" not in (folder / name).read_text(errors="replace")
    if end:
        # They are the user's.
        for name in names:
            assert (folder / name).is_symlink()


def test_a_report_a_comparison_and_a_table_write_nothing_through_links(bstune, study, tmp_path):
    folder = study
    names = ["report-0.2.html", "comparison.html", "comparison.png", "grid.jsonl", "grid.settings"]
    outside = victims(folder, [*names, *(f"{name}.partial" for name in names)])
    shutil.copytree(folder, tmp_path / "other", symlinks=True)
    before = tree(outside)
    retarget.main(["study", "target=0.2"])
    assert bstune("compare", "study", "other", "--output", "study")[0] == 0
    (folder / "grid.jsonl").unlink()
    assert bstune("record", "study/grid.jsonl", "--trials", "study/trials.jsonl")[0] == 0
    assert tree(outside) == before
    for name in names[:4]:
        assert not (folder / name).is_symlink()


@pytest.mark.parametrize("link", ["checkpoints", "states", "unstored.jsonl"])
def test_a_link_inside_a_studys_folder_is_refused_in_one_line(bstune, study, tmp_path, link):
    folder = study
    elsewhere = tmp_path / "elsewhere"
    shutil.rmtree(folder / "checkpoints")
    elsewhere.mkdir()
    (elsewhere / "trial-1.ckpt").write_text("the user's")
    (folder / link).symlink_to(elsewhere / "trial-1.ckpt" if "." in link else elsewhere)
    before = tree(tmp_path)
    status, out, err = bstune(*REPLAY, UNTRACKED, "search.trials=5")
    assert (status, out) == (2, "")
    assert err.startswith(f"error: {folder / link} is a link")
    assert err.count("\n") == 1
    assert tree(tmp_path) == before


@pytest.mark.slow
def test_a_users_own_files_in_a_studys_folder_stay(bstune, study, tmp_path):
    folder = study
    (folder / "states").mkdir()
    theirs = []
    for place, number, end in product(("checkpoints", "states"), (0, 1, 4), ("", ".partial")):
        theirs.append(f"{place}/trial-{number}.ckpt{end}")
    for name in (*theirs, "notes.txt", "curve.json.partial"):
        (folder / name).write_text("the user's")
    assert bstune(*REPLAY, UNTRACKED, "search.trials=5")[0] == 0
    for name in theirs:
        assert (folder / name).read_text() == "the user's"
    # bstune's winner is not what the user put where its weights would be.
    winners = yaml.safe_load((folder / "best.yaml").read_text())
    for winner in winners.values():
        assert winner is None or winner["checkpoint"] is None
    (folder / "unstored.jsonl").write_text("the user's\n")
    before = tree(folder)
    status, out, err = bstune(*REPLAY, UNTRACKED, "search.trials=6")
    assert (status, out) == (2, "")
    assert "unstored.jsonl holds other lines than the records of trials" in err
    assert tree(folder) == before


@pytest.mark.slow
def test_the_output_folder_itself_may_be_a_link(bstune, study, tmp_path):
    study.rename(tmp_path / "disk")
    study.symlink_to(tmp_path / "disk")
    assert bstune(*REPLAY, UNTRACKED, "search.trials=5")[0] == 0
    assert study.is_symlink()
    assert len(trials_of(tmp_path / "disk")) == 5


# Databases


@pytest.mark.parametrize("script", TABLES.values(), ids=TABLES)
@pytest.mark.parametrize("name", ["bstune.db", "mlflow.db"])
def test_another_programs_database_gets_no_tables(bstune, table, tmp_path, name, script):
    run_script(tmp_path / name, script)
    before = tree(tmp_path)
    status, out, err = bstune(*REPLAY, "search.trials=2")
    assert (status, out) == (2, "")
    assert f"{name} is another program's" in err
    assert err.count("\n") == 1
    assert tree(tmp_path) == before


@pytest.mark.parametrize("name", ["bstune.db", "mlflow.db"])
@pytest.mark.parametrize("there", ["folder", "fifo", "link to nothing", "link to a folder"])
def test_what_is_no_file_is_refused_as_a_database(bstune, table, tmp_path, name, there):
    path = tmp_path / name
    if there == "folder":
        path.mkdir()
    elif there == "fifo":
        os.mkfifo(path)
    else:
        path.symlink_to(tmp_path if there == "link to a folder" else tmp_path / "nothing")
    before = entries(tmp_path)
    status, out, err = bstune(*REPLAY, "search.trials=2")
    assert (status, out) == (2, "")
    assert str(name) in err
    assert err.count("\n") == 1
    assert entries(tmp_path) == before


@pytest.mark.slow
def test_databases_of_optuna_and_empty_files_are_taken_with_what_else_is_in_them(
    bstune, table, tmp_path
):
    # A file of no bytes is an empty database to SQLite.
    (tmp_path / "bstune.db").touch()
    assert bstune(*REPLAY, UNTRACKED, "search.trials=2")[0] == 0
    run_script(tmp_path / "bstune.db", TABLES["a user's own"])
    (tmp_path / "moved.db").symlink_to(tmp_path / "bstune.db")
    again = (*REPLAY, UNTRACKED, "search.trials=3", "storage=sqlite:///moved.db")
    assert bstune(*again, "study=t", "output=t")[0] == 0


# Places


@pytest.mark.parametrize(
    "option",
    ["output=/proc/x", "output=/sys/x/y", "storage=sqlite:////proc/x.db", "output=/dev/null/x"],
)
def test_places_that_cannot_be_written_are_refused_with_nothing_made(
    bstune, table, tmp_path, option
):
    status, out, err = bstune(*REPLAY, "search.trials=2", option)
    assert (status, out) == (2, "")
    assert err.startswith(f"error: {option}")
    assert err.count("\n") == 1
    assert entries(tmp_path) == ["t.jsonl"]


@pytest.mark.parametrize(
    "arguments",
    [
        ("compare", "study", "other", "--output", "/proc/x"),
        ("record", "/proc/x", "--trials", "study/trials.jsonl"),
        ("record", "/dev/null", "--trials", "study/trials.jsonl"),
        ("record", "link", "--trials", "study/trials.jsonl"),
    ],
)
def test_verbs_refuse_places_that_cannot_be_written(bstune, study, tmp_path, arguments):
    shutil.copytree(study, tmp_path / "other")
    (tmp_path / "link").symlink_to(tmp_path / "nothing")
    before = tree(tmp_path)
    status, out, err = bstune(*arguments)
    assert (status, out) == (2, "")
    assert err.count("\n") == 1
    assert tree(tmp_path) == before
