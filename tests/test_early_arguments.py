"""Changed arguments of a call of Python's are refused before PyTorch is imported."""

import subprocess
import sys
from contextlib import chdir

import pytest
from lightning.pytorch import LightningModule

import bstune
from bstune.core.errors import StudyError
from bstune.core.records import Budget, Target
from bstune.study.early_arguments import StatedArguments, check_arguments
from bstune.study.storage.opening import change_objective, find_study

STORAGE = "sqlite:///study.db"
LOOP = {
    "target": "loss<=2.4",
    "batch_sizes": (8, 1024),
    "reference": (64, 0.1),
    "budget": Budget(steps=40, examples=20_000),
    "name": "own",
    "storage": STORAGE,
    "mlflow": False,
    "options": ["search.replicates=1"],
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Begin two studies of a loop, and leave each in its first trial; give where they lie."""
    folder = tmp_path_factory.mktemp("begun")
    with chdir(folder):
        for name in ("own", "Small"):
            study = bstune.Study(**{**LOOP, "name": name}, tunable={"momentum": (0.0, 0.9)})
            trials = iter(study)
            next(trials)
            trials.close()
    return folder


@pytest.fixture
def begun(made, monkeypatch):
    """Go where the studies lie; nothing is written there."""
    monkeypatch.chdir(made)


def stated(module=None, options=("search.replicates=1",), **changes):
    chosen = {"study": "own", "storage": STORAGE, **changes.pop("chosen", {})}
    values = {name: LOOP[name] for name in ("target", "batch_sizes", "reference")}
    return StatedArguments(module, **{**values, **changes}, options=options, chosen=chosen)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"target": None, "batch_sizes": None, "reference": None},
        {"target": Target("loss", 2.4, "min")},
        # Limits of the search may change.
        {"chosen": {"search.trials": 99, "search.wall_seconds": 9.0}},
        # Another study.
        {"target": "loss<=2.5", "chosen": {"study": "another"}},
        {"target": "loss<=2.5", "chosen": {"storage": "sqlite:///none.db"}},
        # What cannot be used is refused later, by what knows how to mend it.
        {"target": "loss", "batch_sizes": "many"},
        {"target": "loss<=many", "reference": (64,)},
        {"batch_sizes": (0, -1)},
        {"options": ("no.such=option",)},
    ],
)
def test_what_a_study_would_take_is_not_refused_early(begun, changes):
    if changes.get("target") == "loss":
        changes = {**changes, "target": "quality"}
    check_arguments(stated(**changes))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"target": "loss<=2.5"}, "was 2.4, now 2.5"),
        ({"target": "loss"}, "was 2.4, now 'auto'"),
        ({"batch_sizes": (8, 512)}, "was 1024, now 512"),
        ({"reference": (64, 0.2)}, "was 0.1, now 0.2"),
        ({"options": ("protocol.divergence=9",)}, "now 9"),
        ({"chosen": {"search.objective": "steps"}}, "was 'time', now 'steps'"),
        ({"options": ("search.objective=steps",)}, "was 'time', now 'steps'"),
        ({"chosen": {"seed": 7}}, "now 7"),
    ],
)
def test_a_change_is_refused_early_by_the_argument_that_made_it(begun, changes, named):
    with pytest.raises(StudyError, match=named):
        check_arguments(stated(**changes))


def test_an_objective_that_is_not_stated_may_be_settled_later(begun):
    """A sweep that begins with time goes on with steps where its jobs return no seconds."""
    study = find_study("own", STORAGE)
    change_objective(study, "steps")
    try:
        check_arguments(stated())
        with pytest.raises(StudyError, match="was 'steps', now 'time'"):
            check_arguments(stated(chosen={"search.objective": "time"}))
    finally:
        change_objective(study, "time")


def test_a_function_without_a_name_names_no_study_yet(begun):
    nameless = stated(module=lambda trial: None, target="loss<=2.5")
    nameless.chosen.pop("study")
    check_arguments(nameless)


class Small(LightningModule):
    pass


def test_a_modules_class_names_its_study(begun):
    changed = stated(module=Small, target="loss<=2.5")
    changed.chosen.pop("study")
    with pytest.raises(StudyError, match="'Small' began with other settings"):
        check_arguments(changed)


SCRIPT = """
import sys
import bstune
try:
    bstune.Study(
        target="loss<=2.5",
        batch_sizes=(8, 1024),
        reference=(64, 0.1),
        budget=bstune.Budget(steps=40, examples=20_000),
        name="own",
        storage="sqlite:///study.db",
    )
except Exception as error:
    print(type(error).__name__, "torch" in sys.modules, "lightning" in sys.modules)
"""


def test_torch_is_not_imported_to_refuse_a_change(begun):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["StudyError", "False", "False"]
