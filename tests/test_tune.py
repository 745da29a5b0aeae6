"""bstune.tune on scikit-learn's digits: what it takes, what it refuses, and what it leaves as it was."""

from functools import partial

import pytest
import torch
from lightning.pytorch import LightningDataModule, LightningModule
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

import bstune
from bstune.core.errors import ConfigError
from bstune.study.prepare import prepare
from bstune.study.report import Findings

QUICK = ["search.replicates=0", "hardware.scale_out.devices=[1]"]


def digits():
    images, labels = load_digits(return_X_y=True)
    images, labels = torch.tensor(images / 16).float(), torch.tensor(labels)
    return TensorDataset(images[:1200], labels[:1200]), TensorDataset(images[1200:1500], labels[1200:1500])


class Net(LightningModule):
    def __init__(self, lr, hidden=16):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, 10))
        self.accuracy = MulticlassAccuracy(10, average="micro")

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        logits = self.net(batch[0])
        self.accuracy(logits, batch[1])
        self.log("val_accuracy", self.accuracy)
        self.log("val_loss", F.cross_entropy(logits, batch[1]))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr)


class OtherName(Net):
    def __init__(self, learning_rate, batch_size, hidden):
        super().__init__(learning_rate, hidden)
        assert batch_size >= 16


class Digits(LightningDataModule):
    def setup(self, stage):
        self.train, self.val = digits()

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=32, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val, batch_size=300)


def loaders(batch_size=32):
    train, val = digits()
    return DataLoader(train, batch_size=batch_size, shuffle=True), DataLoader(val, batch_size=300)


@pytest.fixture
def tune(tmp_path, monkeypatch):
    """Return tune() with what the tests have in common, in a folder of its own and in this process."""
    monkeypatch.chdir(tmp_path)

    def run(module=Net, data=None, **options):
        own = {
            "target": bstune.Target("val_loss", 1.0, "min"),
            "batch_sizes": (16, 64),
            "reference": (32, 0.5),
            "budget": bstune.Budget(examples=6000),
            "trials": 4,
            "workers": 0,
            "survey": False,
            "mlflow": False,
            "options": QUICK,
        }
        return bstune.tune(module, loaders() if data is None else data, **(own | options))

    return run


def built(trial):
    assert 16 <= trial.batch_size <= 64
    return Net(lr=trial.lr, hidden=trial.hidden if "hidden" in repr(trial) else 16)


ONE = Net(0.1)
FORMS = {
    "class": {},
    "class, other name": {"module": OtherName, "tunable": {"hidden": (8, 32)}},
    "partial of a class": {"module": partial(Net, hidden=8)},
    "lambda": {"module": lambda trial: Net(lr=trial.lr)},
    "function": {"module": built, "tunable": {"hidden": {"low": 8, "high": 32, "log": True, "integer": True}}},
    "data module": {"data": Digits()},
    "mapping": {"data": dict(zip(("train", "val"), loaders(), strict=True))},
    "three loaders": {"data": (*loaders(), loaders()[1])},
    "function of a batch size": {"data": loaders},
    "function that returns a data module": {"data": lambda batch_size: Digits()},
    "torchmetrics": {"target": bstune.Target("val_accuracy", 0.8, "max")},
    "trainer": {"trainer": {"gradient_clip_val": 1.0}},
    "budget in steps": {"budget": bstune.Budget(steps=100)},
    "options": {"objective": "curve", "precision": "bf16-mixed", "options": [*QUICK, "scaling=linear"]},
}


@pytest.fixture
def prepared(monkeypatch):
    """Let tune() prepare its study, preflight included, and run none of its trials."""

    def run(config, arguments, console):
        return Findings(prepare(config), [], {}, None)

    monkeypatch.setattr("bstune.study.tune.run", run)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.usefixtures("prepared")
def test_what_it_takes(tune, form):
    found = tune(**FORMS[form]).findings.prepared
    assert (found.space.low, found.space.high) == (16, 64)
    assert found.backend.train_examples == 1200


BAD = [
    ({"module": Net(0.1)}, "module must be a class, or a function .* but got an instance of Net"),
    ({"module": 3}, "but got an instance of int"),
    ({"module": dict}, "module must be a class of LightningModules, but got dict"),
    ({"module": lambda: Net(0.1)}, r"module must be a function of a trial alone, but got <lambda>\(\)"),
    ({"module": lambda trial: 3}, "module must return a LightningModule, but returned int"),
    ({"module": lambda trial: ONE}, "module returned the same Net as before"),
    ({"module": LightningModule}, "LightningModule needs one argument lr or learning_rate, but its arguments are"),
    ({"module": OtherName}, r"OtherName needs hidden besides what a trial has: give module=lambda trial: OtherName"),
    ({"module": Net, "tunable": {"depth": (1, 2)}}, "Net has no argument depth, which is to be searched"),
    ({"tunable": {"hidden": (1, 2, 3)}}, r"tunable\['hidden'\] must be \(low, high\) or a dict of high, integer"),
    ({"tunable": {"hidden": {"low": 1}}}, r"tunable\['hidden'\] must be"),
    ({"tunable": {"hidden": (32, 8)}}, "low must be less than high, but got low=32 and high=8"),
    ({"data": Digits}, r"data must be an instance, but got the class Digits: give data=Digits\(...\)"),
    ({"data": loaders()[0]}, r"data needs loaders to train and to validate on, but got one: give data=\(train, val\)"),
    ({"data": loaders()[:1]}, r"data must be \(train, val\) or \(train, val, test\), but got 1 of them"),
    ({"data": {"train": loaders()[0], "valid": loaders()[1]}}, "data must have train, val .* but got train, valid"),
    ({"data": "digits"}, "data must be a LightningDataModule, DataLoaders .* but got str"),
    ({"data": lambda: loaders()}, r"data must be a function of a batch size alone, but got <lambda>\(\)"),
    ({"target": ("val_loss", 0.1)}, r"target must be a bstune.Target, but got \('val_loss', 0.1\)"),
    (
        {"target": bstune.Target("loss", 1.0, "min")},
        "the target's metric 'loss' is logged nowhere; in validation the module logs",
    ),
    ({"budget": 2000}, "budget must be a bstune.Budget, but got 2000"),
    ({"batch_sizes": 64}, r"batch_sizes must be two numbers \(smallest, largest\), but got 64"),
    ({"batch_sizes": (64, 16)}, "workload.batch_size: low must be at most high, but got low=64 and high=16"),
    ({"batch_sizes": (16, 5000)}, "batch size 5000 is larger than the training data"),
    ({"reference": (32, "0.1")}, r"reference must be two numbers \(batch size, learning rate\), but got \(32, '0.1'\)"),
    ({"objective": "speed"}, "search.objective must be"),
    ({"trials": 0}, "search.trials must be at least 1, but got 0"),
    ({"options": "search.trials=3"}, "options must be a list such as"),
    ({"options": ["search.trial=3"]}, "unknown option search.trial: did you mean search.trials?"),
    ({"trainer": {"max_steps": 3}}, "trainer: max_steps is bstune's own"),
    ({"trainer": {"gradient_clip": 3}}, "trainer: .*gradient_clip"),
    ({"trainer": [3]}, "trainer must be a dict of the Trainer's arguments, but got list"),
]


@pytest.mark.parametrize(("options", "line"), BAD)
def test_what_it_refuses(tune, tmp_path, options, line):
    with pytest.raises(ConfigError, match=line):
        tune(**options)
    assert not list(tmp_path.iterdir())
