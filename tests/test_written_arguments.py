"""The arguments of a class or function by its source."""

import sys

import pytest

from bstune.system.written_arguments import written_arguments

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

raise RuntimeError("never imported")
'''


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
def test_arguments_are_those_of_the_source(path, names, tmp_path, monkeypatch):
    package = tmp_path / "pkg_here"
    package.mkdir()
    (package / "__init__.py").write_text("class Top:\n    def __init__(self, base_lr): ...\n")
    (package / "models.py").write_text(SOURCE)
    (package / "broken.py").write_text("class Net(:\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert written_arguments(path) == names
    assert "pkg_here" not in sys.modules
