"""The pieces that stand alone: the examples of bstune/README.md run as they stand there."""

import re
from pathlib import Path

import pytest
from test_readme import MyData as Data
from test_readme import MyModule as Module
from torch.utils.data import DataLoader

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


def example(name):
    """The one example that mentions a name, and what it is run with."""
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


# Lightning gives advice to whoever trains a toy.
@pytest.mark.filterwarnings("ignore")
def test_target_stopping_in_a_study_of_ones_own(in_folder):
    block, names = example("FrontierSampler")
    exec(block, names)  # noqa: S102
    assert names["study"].best_value < 1.0
    assert {trial.state.name for trial in names["study"].trials} <= {"COMPLETE", "PRUNED"}


# Memory is probed in processes of their own.
@pytest.mark.slow
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
