"""The pieces that stand alone: the examples in their docstrings run as they stand there."""

import doctest
import inspect
import re
from pathlib import Path

import pytest
from test_readme import MyData as Data
from test_readme import MyModule as Module
from torch.utils.data import DataLoader

import bstune
from bstune.core import curve, scaling
from bstune.trial import stop_at_target

TOP = Path(__file__).parents[1]


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


def example_in(thing):
    """The code of the examples in a docstring, as one text."""
    examples = doctest.DocTestParser().get_examples(inspect.getdoc(thing))
    return "".join(one.source for one in examples)


def run_example(thing):
    """Run the example of a docstring, with less time to measure, on a project's module and data; return its names."""
    names = {"bstune": bstune, "MyModule": Module, "MyData": SizedData}
    code = example_in(thing).replace("hardware.seconds=5", "hardware.seconds=0.5")
    exec(code, names)  # noqa: S102
    return names


@pytest.fixture
def in_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BSTUNE_CACHE", str(tmp_path))


# Lightning gives advice to whoever trains a toy.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_target_stopping_in_a_study_of_ones_own(in_folder):
    names = run_example(stop_at_target)
    assert names["study"].best_value < 1.0
    assert {trial.state.name for trial in names["study"].trials} <= {"COMPLETE", "PRUNED"}


# Memory is probed in processes of their own.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_survey_of_a_module_and_data(in_folder):
    found = run_example(bstune.survey)["found"]
    assert found.ceiling.batch_size == 512
    assert 0.0 < found.step_time(64.0) < 1.0


@pytest.mark.parametrize(("module", "examples"), [(scaling, 2), (curve, 3)])
def test_rules_and_the_fit(module, examples):
    found = doctest.testmod(module)
    assert (found.failed, found.attempted) == (0, examples)
