"""Whose a folder is, through the command: what lies in another's stays as it is."""

import optuna
import pytest
from toolbox import entries, made_table, tree

REPLAY = (
    "workload=replay",
    "workload.table=t.jsonl",
    "workload.target.value=0.14",
    "search.objective=steps",
)
# By itself the workload's name would be the table's.
REPLAY += ("workload.name=replay",)
REPLAY += ("search.trials=2", "search.replicates=0", "mlflow.enabled=false")
DIGITS = ("workload=digits", "hardware.seconds=1", "mlflow.enabled=false")
SINGLE = ("trial.batch_size=32", "trial.lr=0.16")
THEIRS = (
    "checkpoints/trial-best.pt",
    "checkpoints/trial-7.ckpt",
    "states/trial-notes.txt",
    "config.yaml",
    "best.yaml",
)


@pytest.fixture
def table(tmp_path):
    return made_table(tmp_path)


@pytest.mark.parametrize("output", [".", "theirs"])
@pytest.mark.parametrize(
    "arguments", [REPLAY, (*REPLAY, *SINGLE), ("survey", *DIGITS)], ids=["study", "trial", "survey"]
)
def test_a_foreign_folder_is_refused_and_stays_as_it_is(bstune, table, tmp_path, arguments, output):
    folder = tmp_path / output
    # Each of these names looks like one of a study's own.
    for name in THEIRS:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("theirs")
    before = tree(tmp_path)
    status, out, err = bstune(*arguments, f"output={output}")
    assert (status, out) == (2, "")
    assert (
        f"{output} is not empty and no study's: choose another with output=DIR".removeprefix(".")
        in err
    )
    assert tree(tmp_path) == before


@pytest.mark.slow
def test_the_output_of_another_study_is_refused(bstune, table, tmp_path):
    assert bstune(*REPLAY, "study=a", "output=o")[0] == 0
    before = tree(tmp_path)
    for second in (("study=b",), ("study=b", *SINGLE)):
        status, out, err = bstune(*REPLAY, "output=o", *second)
        assert (status, out) == (2, "")
        assert "is of the study 'a' in sqlite:///" in err
        assert tree(tmp_path) == before
    assert optuna.get_all_study_names(f"sqlite:///{tmp_path}/bstune.db") == ["a"]


@pytest.mark.slow
def test_a_new_database_with_an_old_output_is_refused(bstune, table, tmp_path):
    assert bstune(*REPLAY)[0] == 0
    before = tree(tmp_path / "outputs")
    # The folder's study is lost, and the new one has its name.
    (tmp_path / "bstune.db").unlink()
    # A refusal leaves nothing behind that would let the next one pass.
    for _ in range(2):
        status, _, err = bstune(*REPLAY)
        assert (
            status,
            "is of the study 'replay' in sqlite:///" in err,
            "earlier one of this name" in err,
        ) == (2, 1, 1)
        assert tree(tmp_path / "outputs") == before


@pytest.mark.slow
def test_trials_by_themselves_and_their_study_share_its_folder(bstune, table, tmp_path):
    other = ("trial.batch_size=128", "trial.lr=0.16")
    # Before the study and after it, in any order.
    for arguments in (SINGLE, other, (), SINGLE, ()):
        assert bstune(*REPLAY, *arguments)[0] == 0
    folders = [name for name in entries(tmp_path / "outputs/replay") if name.startswith("trial-")]
    assert folders == ["trial-B128-lr0.16-seed0", "trial-B32-lr0.16-seed0"]


@pytest.mark.slow
def test_home_directories_and_names_with_slashes(bstune, table, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    status, _, err = bstune(*REPLAY, "study=a/b", "output=~/${study}", "storage=sqlite:///~/a.db")
    assert (status, err) == (0, "")
    assert entries(tmp_path) == ["home", "t.jsonl"]
    assert entries(tmp_path / "home") == ["a", "a.db"]
    assert "trials.jsonl" in entries(tmp_path / "home/a/b")
    status, _, err = bstune("worker", "study=none", "storage=sqlite:///~/a.db")
    assert (status, "has no study 'none', but a/b" in err) == (2, True)
    assert bstune("worker", "study=none", "storage=~nobody-here/a.db")[2] == (
        "error: storage: there is no home directory ~nobody-here, but got '~nobody-here/a.db'\n"
    )
