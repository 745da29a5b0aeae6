"""What a module holds, by its source."""

import sys

import pytest

from bstune.config import compose
from bstune.core.errors import ConfigError
from bstune.system.shipped import workload_names
from bstune.system.sources import missing_target, written_arguments

SOURCE = '''
from other import Imported

class Net(Base):
    """Has an __init__."""

    size = 3

    def forward(self, x):
        return x

    def __init__(self, width: int, *, lr=0.1, **others):
        raise RuntimeError("never called")

class Plain(Base):
    pass

def build(depth, max_lr=None):
    raise RuntimeError("never called")

if DEFAULT := 3:
    try:
        import far.away as renamed
    except ImportError:
        Optional = None

raise RuntimeError("never imported")
'''


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package whose modules must not be imported."""
    folder = tmp_path / "pkg_here"
    folder.mkdir()
    (folder / "__init__.py").write_text("class Top:\n    def __init__(self, base_lr): ...\n")
    (folder / "models.py").write_text(SOURCE)
    (folder / "broken.py").write_text("class Net(:\n")
    (folder / "empty.py").write_text("")
    (folder / "making.py").write_text("size = 3\nglobals()['Net'] = dict\n")
    (folder / "deep").mkdir()
    (folder / "deep" / "leaf.py").write_text("class Leaf: ...\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    assert "pkg_here" not in sys.modules


@pytest.mark.parametrize(
    ("path", "names"),
    [
        ("pkg_here.models.Net", ("self", "width", "lr")),
        ("pkg_here.models.build", ("depth", "max_lr")),
        ("pkg_here.models.Plain", ()),
        ("pkg_here.models.Imported", ()),
        ("pkg_here.models.Nothing", ()),
        ("pkg_here.Top", ("self", "base_lr")),
        ("pkg_here.broken.Net", ()),
        ("nowhere.Net", ()),
        ("Net", ()),
        ("", ()),
    ],
)
def test_arguments_are_those_of_the_source(path, names, package):
    assert written_arguments(path) == names


@pytest.mark.parametrize(
    "path",
    [
        "pkg_here.models.Net",
        "pkg_here.models.Net.made_by",
        "pkg_here.models.build",
        "pkg_here.models.Imported",
        "pkg_here.models.renamed",
        "pkg_here.models.DEFAULT",
        "pkg_here.models.Optional",
        "pkg_here.Top",
        "pkg_here.deep.leaf.Leaf",
        # Its source does not tell: it is told where it is imported.
        "pkg_here.broken.Net",
        "pkg_here.empty.Net",
        "pkg_here.making.Net",
        "pkg_here.deep.other.Leaf",
        "torch.optim.SGD",
        "torch.nn.Linear",
        "torch.nowhere.Linear",
        "builtins.dict",
        "math.sqrt",
        "bstune.workloads.classifier.Classifier",
        "Net",
        "",
    ],
)
def test_what_may_be_there_is_not_missing(path, package):
    assert missing_target(path) is None


@pytest.mark.parametrize(
    ("path", "what"),
    [
        ("pkg_there.models.Net", "there is no module pkg_there, for pkg_there.models.Net: run"),
        ("pkg_here.models.Nett", "pkg_here.models has no Nett, for pkg_here.models.Nett"),
        ("pkg_here.model.Net", "pkg_here has no model, for pkg_here.model.Net"),
        ("pkg_here.deep.leaf.Leav", "pkg_here.deep.leaf has no Leav, for"),
        # A name of a method is none of the module's.
        ("pkg_here.models.forward", "pkg_here.models has no forward, for"),
    ],
)
def test_what_is_missing_is_named(path, what, package):
    assert missing_target(path).startswith(what)


@pytest.mark.parametrize(
    ("option", "what"),
    [
        (
            "workload.module._target_=nowhere.Net",
            "workload.module cannot be built: there is no mod",
        ),
        ("workload.data.load._target_=nowhere.load", "workload.data cannot be built: there is no "),
        ("workload.module.model._target_=nowhere.mlp", "workload.module cannot be built: there is"),
    ],
)
def test_a_workloads_missing_classes_are_refused(option, what):
    compose(["workload=digits"]).trained_recipe.check_targets()
    with pytest.raises(ConfigError, match=what):
        compose(["workload=digits", option]).trained_recipe.check_targets()


def test_all_classes_of_the_workloads_that_ship_are_there():
    # The workload of recorded runs trains nothing.
    for name in set(workload_names()) - {"replay"}:
        compose([f"workload={name}"]).trained_recipe.check_targets()
