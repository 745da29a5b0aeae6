"""The pieces that stand alone: the examples of bstune/README.md run as they stand there, and OptunaHub's package."""

import importlib.util
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import optuna
import pytest
import yaml
from test_readme import MyData as Data
from test_readme import MyModule as Module
from torch.utils.data import DataLoader

TOP = Path(__file__).parents[1]
REGISTRY = TOP / "bstune" / "search" / "optunahub"
PACKAGE = REGISTRY / "samplers" / "frontier"


def python_blocks(path, heading):
    section = path.read_text(encoding="utf-8").split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return re.findall(r"^```python\n(.*?)^```", section, flags=re.MULTILINE | re.DOTALL)


class SizedData(Data):
    """The data of the top README's test, in batches of a size."""

    def __init__(self, batch_size):
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self):
        return DataLoader(self.points, batch_size=self.batch_size, shuffle=True)


def example(name):
    """Return the one example that mentions a name, and what it is run with."""
    (block,) = [
        block
        for block in python_blocks(TOP / "bstune" / "README.md", "Pieces that stand alone")
        if name in block
    ]
    return block, {"MyModule": Module, "MyData": SizedData}


@pytest.fixture
def in_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BSTUNE_CACHE", str(tmp_path))


@pytest.mark.filterwarnings("ignore")  # Lightning's advice to whoever trains a toy
def test_target_stopping_in_a_study_of_ones_own(in_folder):
    block, names = example("FrontierSampler")
    exec(block, names)  # noqa: S102
    assert names["study"].best_value < 1.0
    assert {trial.state.name for trial in names["study"].trials} <= {"COMPLETE", "PRUNED"}


@pytest.mark.slow  # memory is probed in processes of their own
@pytest.mark.filterwarnings("ignore")
def test_survey_of_a_module_and_data(in_folder):
    block, names = example("bstune.survey")
    exec(block, names)  # noqa: S102
    found = names["found"]
    assert found.ceiling.batch_size == 512
    assert 0.0 < found.step_time(64.0) < 1.0


def test_scaling_rules(capsys):
    block, names = example("lr_of")
    exec(block, names)  # noqa: S102
    assert [float(one) for one in capsys.readouterr().out.split()] == pytest.approx(
        [0.1 * 8**0.5, 0.1 * (1 + 200 / 64) / (1 + 200 / 512)]
    )


def load(package):
    """Load a package as optunahub's ``load_local_module`` does, under the name of the registry's module."""
    folder = REGISTRY / package
    name = "optunahub_registry.package." + package.replace("/", ".")
    spec = importlib.util.spec_from_file_location(
        name, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def optunahub(monkeypatch):
    """Stand in for optunahub, which would fetch the package from its registry."""
    monkeypatch.setitem(sys.modules, "optunahub", SimpleNamespace(load_module=load))


def test_the_package_for_optunahub_has_their_layout():
    assert {file.name for file in PACKAGE.iterdir()} >= {
        "README.md",
        "LICENSE",
        "__init__.py",
        "example.py",
    }
    assert (PACKAGE / "LICENSE").read_text() == (TOP / "LICENSE").read_text()
    _, front, page = (PACKAGE / "README.md").read_text(encoding="utf-8").split("---\n", 2)
    metadata = yaml.safe_load(front)
    assert metadata.keys() == {
        "author",
        "title",
        "description",
        "tags",
        "optuna_versions",
        "license",
    }
    assert "sampler" in metadata["tags"]
    assert optuna.__version__ in metadata["optuna_versions"]
    assert re.findall("^## (.*)$", page, flags=re.MULTILINE) == [
        "Abstract", "Class or Function Names", "Installation", "Example", "Others"
    ]  # fmt: skip


def test_the_package_for_optunahub_runs(optunahub, capsys):
    (block,) = python_blocks(PACKAGE / "README.md", "Example")
    exec(block, {})  # noqa: S102
    names = {}
    exec((PACKAGE / "example.py").read_text(encoding="utf-8"), names)  # noqa: S102
    best = names["study"].best_trial
    assert 32 <= best.params["batch_size"] <= 512, "the made law's is 113"
    assert any(trial.state.name == "PRUNED" for trial in names["study"].trials)
