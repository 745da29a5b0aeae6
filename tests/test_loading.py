"""A call of Python's is not silent while it loads, nor a study before its first trial."""

import sys

import pytest

import bstune
from bstune.study import prepare, run
from bstune.study.study import Study
from bstune.system import watchdog
from bstune.system.loading import LIBRARIES, LOADING, loading, what_loads

# A loop's study of one trial, which evaluates whatever its last step is.
ONE_TRIAL = {
    "target": "val_loss<=0.5",
    "batch_sizes": (16, 64),
    "reference": (32, 0.2),
    "budget": bstune.Budget(steps=10),
    "objective": "steps",
    "trials": 1,
    "mlflow": False,
    "options": ["search.replicates=0"],
}


def waited_for():
    """Names of what the open watches wait for, the innermost watch's last."""
    return [wait.what for watch in watchdog._watches for wait in watch._waits[1:]]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("has_torch", [True, False])
def test_a_line_comes_at_once_where_torch_is_to_be_loaded(capsys, monkeypatch, training, has_torch):
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    if has_torch:
        monkeypatch.setitem(sys.modules, "torch", None)
    with loading(training=training):
        lines = capsys.readouterr().out.splitlines()
        assert waited_for() == [what_loads(training)]
    assert lines == ([LOADING] if training and not has_torch else [])
    assert capsys.readouterr().out == ""
    assert waited_for() == []


@pytest.mark.parametrize(
    ("loaded", "text"),
    [
        ((), "PyTorch and Lightning"),
        (("torch",), "Lightning"),
        # A second call loads nothing more.
        (("torch", "lightning"), "the arguments of the study"),
    ],
)
def test_two_waits_have_two_names(monkeypatch, loaded, text):
    for module in LIBRARIES:
        monkeypatch.delitem(sys.modules, module, raising=False)
    for module in loaded:
        monkeypatch.setitem(sys.modules, module, None)
    assert what_loads(training=True) == text
    # The import of bstune.Study comes before its call.
    assert what_loads(training=False) != text


def test_a_public_name_is_imported_under_a_watch_once(tmp_path, monkeypatch, capsys):
    (tmp_path / "slow_to_import.py").write_text(
        "from test_loading import waited_for\nname = waited_for()\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(bstune._MODULES, "name", "slow_to_import")
    monkeypatch.delitem(sys.modules, "slow_to_import", raising=False)
    assert bstune.name == ["the modules of bstune"]
    # Nothing is waited for where it is there, and no import prints that torch is loaded.
    monkeypatch.setattr("bstune.system.loading.loading", None)
    assert bstune.name == ["the modules of bstune"]
    assert capsys.readouterr().out == ""


def test_whatever_comes_before_the_first_trial_is_watched(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    found = {}

    def noting(module, name):
        function = getattr(module, name)

        def noted(*arguments, **options):
            found[name] = waited_for()
            # The thread that looks prints by it.
            if watchdog._watches:
                watchdog._watches[-1].say(f"in {name}")
            return function(*arguments, **options)

        monkeypatch.setattr(module, name, noted)

    noting(prepare, "search_budget")
    noting(prepare, "check_storage")
    noting(run, "open_study")
    noting(run, "plan_text")
    noting(run, "_opened_tracking")
    for trial in Study(**ONE_TRIAL):
        # The loop's own body is not watched.
        found["body"] = waited_for()
        trial.report(trial.max_steps, 0.4)
        trial.finish()
    assert found == {
        "search_budget": ["the study's preparation"],
        "check_storage": ["the study's preparation", "the storage"],
        "open_study": ["the storage"],
        "plan_text": ["the study's files"],
        "_opened_tracking": [run.OPENING_MLFLOW],
        "body": [],
    }
    printed = capsys.readouterr().out
    assert [name for name in found if f"in {name}" in printed] == [*found][:-1]
