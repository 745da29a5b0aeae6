"""Where ``pytorch_lightning`` alone is installed: what bstune needs and imports then, and a study there."""

import ast
import json
import runpy
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import bstune
from bstune.system import lightning_package
from bstune.system.lightning_package import installed_lightning

PACKAGE = Path(bstune.__file__).parent
SETUP = Path(__file__).parents[1] / "setup.py"
# Whichever process imports it finds no package of this name, nor any part of it.
HIDE = """
import sys

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "lightning":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Hidden())
"""
STUDY = """
import json
import sys

import pytorch_lightning
import torch
from torch.utils.data import DataLoader, TensorDataset

import bstune


class Line(pytorch_lightning.LightningModule):
    def __init__(self, lr=0.05):
        super().__init__()
        self.lr, self.layer = lr, torch.nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        inputs, outputs = batch
        return ((self.layer(inputs) - outputs) ** 2).mean()

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)


if __name__ == "__main__":
    torch.manual_seed(0)
    inputs = torch.randn(256, 4)
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    result = bstune.tune(
        Line,
        (DataLoader(data, batch_size=16), DataLoader(data, batch_size=256)),
        target="val/loss<=0.05",
        batch_sizes=(8, 64),
        budget=bstune.Budget(steps=200),
        trials=2,
        workers=0,
        survey=False,
        mlflow=False,
        options=["search.objective=steps", "search.replicates=0"],
    )
    loaded = sorted(name for name in sys.modules if name.partition(".")[0] == "lightning")
    print(json.dumps({"reached": result.summary.statuses["reached"], "loaded": loaded}))
"""


def missing(*names):
    """A function that imports a stand-in for a module, and fails for these alone."""

    def imported(name):
        if name.partition(".")[0] in names:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name.partition(".")[0])
        return ModuleType(name)

    return imported


@pytest.mark.parametrize(
    ("absent", "found"),
    [
        ((), "lightning.pytorch"),
        (("pytorch_lightning",), "lightning.pytorch"),
        (("lightning",), "pytorch_lightning"),
    ],
)
def test_lightning_comes_first(absent, found, monkeypatch):
    monkeypatch.setattr(lightning_package, "import_module", missing(*absent))
    # Past the cache.
    assert installed_lightning.__wrapped__() == found


@pytest.mark.parametrize("absent", [("lightning", "pytorch_lightning"), ("torch",)])
def test_what_is_missing_is_named(absent, monkeypatch):
    def imported(name):
        if absent == ("torch",):
            raise ModuleNotFoundError("No module named 'torch'", name="torch")
        return missing(*absent)(name)

    monkeypatch.setattr(lightning_package, "import_module", imported)
    with pytest.raises(ModuleNotFoundError) as error:
        installed_lightning.__wrapped__()
    assert error.value.name == absent[-1]


def imported_when_it_runs(text):
    """The top packages that a module imports, but for those of type checkers alone."""
    tree = ast.parse(text)
    skipped = set[ast.AST]()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            skipped |= {*ast.walk(node)}
    found = set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import) and node not in skipped:
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node not in skipped:
            found.add((node.module or "").partition(".")[0])
    return found


def test_one_module_alone_names_the_package_that_it_imports():
    packages = {"lightning", "pytorch_lightning", "lightning_fabric"}
    # First that the reader of modules reads them well.
    text = "if TYPE_CHECKING:\n    import lightning\ndef f():\n    import lightning_fabric.x\n"
    assert imported_when_it_runs(text) & packages == {"lightning_fabric"}
    found = set[str]()
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text()
        # To parse a file takes most of the time.
        if "lightning" in text and imported_when_it_runs(text) & packages:
            found.add(str(path.relative_to(PACKAGE)))
    assert found == {"trial/lightning/installed.py"}


@pytest.mark.parametrize(
    ("chosen", "needed"),
    [(None, "lightning"), ("", "lightning"), ("pytorch-lightning", "pytorch-lightning")],
)
def test_what_is_installed_with_it(chosen, needed, monkeypatch):
    given = {}
    setuptools = ModuleType("setuptools")
    setuptools.setup = given.update
    monkeypatch.setitem(sys.modules, "setuptools", setuptools)
    monkeypatch.delenv("BSTUNE_LIGHTNING", raising=False)
    if chosen is not None:
        monkeypatch.setenv("BSTUNE_LIGHTNING", chosen)
    runpy.run_path(str(SETUP))
    lightnings = [one for one in given["install_requires"] if "lightning" in one]
    assert lightnings == [f"{needed}>=2.6,<3"]
    monkeypatch.setenv("BSTUNE_LIGHTNING", "torch")
    with pytest.raises(SystemExit, match="lightning or pytorch-lightning, but got torch"):
        runpy.run_path(str(SETUP))


@pytest.mark.slow
def test_a_module_is_tuned_where_pytorch_lightning_is_alone(tmp_path, monkeypatch):
    # Python imports this by itself.
    (tmp_path / "sitecustomize.py").write_text(HIDE)
    (tmp_path / "study.py").write_text(STUDY)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    command = [sys.executable, "study.py"]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout.splitlines()[-1])
    assert found["reached"] > 0
    assert found["loaded"] == []
