"""The code blocks of README.md run as they stand there."""

import functools
import json
import re
import shlex
import sys
from pathlib import Path

import pytest
import torch
import yaml
from lightning.pytorch import LightningDataModule, LightningModule
from torch.utils.data import DataLoader, TensorDataset

import bstune

TOP = Path(__file__).parents[1]
README = (TOP / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)


class MyModule(LightningModule):
    """A project's own module: what the README's YAML names."""

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = torch.nn.Linear(3, 2)

    def training_step(self, batch, batch_idx):
        return torch.nn.functional.cross_entropy(self.layer(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        loss = torch.nn.functional.cross_entropy(self.layer(batch[0]), batch[1])
        self.log("val/loss", loss)
        self.log("val/accuracy", (self.layer(batch[0]).argmax(1) == batch[1]).float().mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr)


class MyData(LightningDataModule):
    """1,200 points on either side of a line; its hook adds a column that the module needs."""

    def setup(self, stage=None):
        points = torch.randn(1200, 2, generator=torch.Generator().manual_seed(0))
        self.points = TensorDataset(points, (points.sum(1) > 0).long())

    def train_dataloader(self):
        return DataLoader(self.points, batch_size=32, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.points, batch_size=400)

    def on_after_batch_transfer(self, batch, dataloader_idx):
        points, labels = batch
        return torch.cat([points, torch.ones(len(points), 1)], dim=1), labels


@pytest.mark.filterwarnings("ignore")  # Lightning's advice to whoever trains a toy
def test_python(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    quick = {
        # An eighth of them is the first trial, whose end is the target.
        "seconds": 8.0,
        "trials": 3,
        "workers": 0,
        "survey": False,
        "mlflow": False,
        "options": ["search.replicates=0"],
    }
    monkeypatch.setattr(bstune, "tune", functools.partial(bstune.tune, **quick))
    for block in blocks("python"):
        names = {
            "module": MyModule(0.1),
            "data": MyData(),
            "MyModule": MyModule,
            "MyData": MyData,
        }
        exec(block, names)  # noqa: S102
    assert (tmp_path / "report.html").exists()


def test_a_projects_own_workload(tmp_path, monkeypatch, bstune):
    (workload,) = blocks("yaml")
    path = tmp_path / re.match(r"# (\S+)\n", workload)[1]
    path.parent.mkdir(parents=True)
    path.write_text(workload)
    monkeypatch.setitem(sys.modules, "my_project", sys.modules[__name__])
    (command,) = [block for block in blocks("sh") if "my_configs" in block]
    _, _, _, *arguments = shlex.split(command)
    options = (
        "search.trials=4",
        "search.replicates=0",
        "search.objective=steps",
        "mlflow.enabled=false",
    )
    options += ("search.workers=0",)  # another process would not find the module
    status, out, err = bstune(*arguments, *options)
    assert (status, err) == (0, "")
    assert "val/accuracy >= 0.9" in out
    winner = yaml.safe_load((tmp_path / "outputs/mine/best.yaml").read_text())["best_by_steps"]
    status, _, err = bstune(*shlex.split(winner["command"])[3:])
    assert (status, err) == (0, "")
    (record,) = tmp_path.glob("outputs/mine/trial-B*/trial.json")
    assert json.loads(record.read_text())["steps"] == winner["single_run"]["steps"]


def test_it_is_short_and_begins_with_its_two_commands():
    assert README.count("\n") < 200
    first, second = blocks("sh")[:2]
    assert "-m bstune +workload=digits" in first
    assert "-m pytest" in second


PAGES = [
    *[TOP / "README.md", TOP / "tests/benchmarks/README.md"],
    *TOP.glob("*/README.md"),
    *TOP.glob("bstune/*/README.md"),
]


def anchors(page):
    """Give the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    letters = [re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings]
    return {heading.replace(" ", "-") for heading in letters}


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_links_lead_to_files_and_headings(page):
    links = re.findall(r"\]\(([^):]+)\)", page.read_text(encoding="utf-8"))
    for link in links:
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target), link
