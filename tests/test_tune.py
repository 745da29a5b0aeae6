"""bstune.tune on scikit-learn's digits: what it takes, what it refuses, and what it leaves as it was."""

import logging
import os
import random
import re
import signal
import subprocess
import sys
import threading
import warnings
from contextlib import chdir
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import optuna
import pytest
import torch
from builders import result_of
from hydra import initialize
from hydra.core.global_hydra import GlobalHydra
from hydra.version import getbase
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder
from lightning.pytorch.loggers import CSVLogger
from rich.console import Console
from sklearn.datasets import load_digits
from toolbox import leave_blank, make_result, statuses
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

import bstune
from bstune.core.errors import ConfigError, StudyError
from bstune.report.study_folder import read_study
from bstune.study.prepare import compose_joined, prepare
from bstune.study.report import Findings
from bstune.study.result import TRIAL_COLUMNS
from bstune.study.showing.progress import Progress
from bstune.study.storage.opening import find_study

# For the winner's training: nothing of Lightning's is printed or written.
QUIET = {
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": False,
}
SLOW = pytest.mark.slow
# No fresh seeds, no devices beside one, and a sampler that needs no posterior.
QUICK = ["search.replicates=0", "hardware.scale_out.devices=[1]", "sampler=random"]


def digits():
    images, labels = load_digits(return_X_y=True)
    images = torch.tensor(images / 16).float()
    labels = torch.tensor(labels)
    # 1,797 images in all: 1,200 to train on and 300 to validate on.
    return TensorDataset(images[:1200], labels[:1200]), TensorDataset(
        images[1200:1500], labels[1200:1500]
    )


class Learner:
    """What a module is of, whichever package's."""

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


class Net(Learner, LightningModule):
    pass


class OtherName(Net):
    def __init__(self, learning_rate, batch_size, hidden):
        super().__init__(learning_rate, hidden)
        assert batch_size >= 16


class TakesTrial(Net):
    def __init__(self, trial):
        super().__init__(trial.lr)
        self.save_hyperparameters("trial")


class Digits(LightningDataModule):
    def setup(self, stage):
        self.train, self.val = digits()

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=32, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val, batch_size=300)


class Unread(Digits):
    def setup(self, stage):
        raise AssertionError("the data are read")


# It is made where it is asked for: most machines lack the other package.
def of_the_other_package(trial):
    lightning = pytest.importorskip("pytorch_lightning")
    return type("Other", (Learner, lightning.LightningModule), {})(trial.lr)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(digits()[0])


def loaders(batch_size=32):
    train, val = digits()
    return DataLoader(train, batch_size=batch_size, shuffle=True), DataLoader(val, batch_size=300)


def run_tune(module=Net, data=None, **options):
    """Tune with what the tests have in common, in this process and without survey and MLflow."""
    own = {
        # Loss at 1.5 is soon reached: ten classes begin at log 10 = 2.3.
        "target": bstune.Target("val_loss", 1.5, "min"),
        "batch_sizes": (16, 64),
        "reference": (32, 0.5),
        "budget": bstune.Budget(examples=4000),
        "trials": 4,
        "workers": 0,
        "survey": False,
        "mlflow": False,
        "options": QUICK,
    }
    return bstune.tune(module, loaders() if data is None else data, **(own | options))


@pytest.fixture
def tune(tmp_path, monkeypatch):
    """A function that tunes in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    return run_tune


# A subclass of Lightning's own must be known, too.
class OwnFinder(BatchSizeFinder):
    pass


# A trial has hidden only where it is searched.
def built(trial):
    assert 16 <= trial.batch_size <= 64
    return Net(lr=trial.lr, hidden=trial.hidden if "hidden" in repr(trial) else 16)


# Built once: what returns it would train all trials on the same weights.
ONE = Net(0.1)


def sharing(trial):
    module = Net(trial.lr)
    module.net = ONE.net
    return module


FORMS = {
    "class": {},
    # What np.asarray and pandas hand out is taken as Python's own numbers are.
    "numbers of numpy": {
        "batch_sizes": np.array([16, 64]).tolist(),
        "reference": (np.int64(32), np.float32(0.5)),
    },
    "class, other name": {"module": OtherName, "tunable": {"hidden": (8, 32)}},
    # Arguments that are given beforehand are not searched.
    "partial of a class": {"module": partial(Net, hidden=8)},
    "lambda": {"module": lambda trial: Net(lr=trial.lr)},
    # Its module keeps the trial as a hyper-parameter, which has to be saved in checkpoints.
    "the trial itself": {"module": lambda trial: TakesTrial(trial)},
    "function": {
        "module": built,
        "tunable": {"hidden": {"low": 8, "high": 32, "log": True, "integer": True}},
    },
    "data module": {"data": Digits()},
    "mapping": {"data": dict(zip(("train", "val"), loaders(), strict=True))},
    # The third one is to test on.
    "three loaders": {"data": (*loaders(), loaders()[1])},
    "function of a batch size": {"data": loaders},
    "function that returns a data module": {"data": lambda batch_size: Digits()},
    # Both packages of Lightning may be installed, with classes of the same names.
    "pytorch_lightning": {"module": of_the_other_package},
    "torchmetrics": {"target": bstune.Target("val_accuracy", 0.8, "max")},
    "trainer": {"trainer": {"gradient_clip_val": 1.0}},
    "budget in steps": {"budget": bstune.Budget(steps=100)},
    "options": {
        "objective": "curve",
        "precision": "bf16-mixed",
        "options": [*QUICK, "scaling=linear"],
    },
}


def batches_of(batch_size):
    train = digits()[0]
    # The last, smaller batch is left out, as each batch has exactly its size.
    for start in range(0, 1200 - batch_size, batch_size):
        yield train[start : start + batch_size]


class DigitsAt(Digits):
    """A data module of a batch size, of a stream."""

    def __init__(self, batch_size):
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self):
        return DataLoader(Stream(), self.batch_size)


# It gets a batch of each loader, by the loader's name.
class OfSeveral(Net):
    def training_step(self, batch, batch_idx):
        return sum(super(OfSeveral, self).training_step(one, batch_idx) for one in batch.values())


TAKEN = {
    "stream": {"data": lambda batch_size: (DataLoader(Stream(), batch_size), loaders()[1])},
    "generator": {"data": lambda batch_size: (batches_of(batch_size), loaders()[1])},
    "data module": {"data": lambda batch_size: DigitsAt(batch_size)},
    "several": {
        "module": OfSeveral,
        "data": lambda batch_size: (
            {"a": loaders(batch_size)[0], "b": DataLoader(Stream(), batch_size)},
            loaders()[1],
        ),
    },
    "several with a length": {
        "module": OfSeveral,
        "data": lambda batch_size: (
            {"a": loaders(batch_size)[0], "b": loaders(batch_size)[0]},
            loaders()[1],
        ),
    },
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "form",
    [
        "stream",
        # The first two are taken as the stream is, the others a batch of each loader at a time.
        *(
            pytest.param(form, marks=SLOW)
            for form in ("generator", "data module", "several", "several with a length")
        ),
    ],
)
def test_what_a_function_of_the_batch_size_gives_is_taken_as_it_comes(tune, form, capsys):
    result = tune(
        **TAKEN[form],
        objective="steps",
        trials=3,
        options=["search.replicates=0", "hardware.scale_out.devices=[1]"],
    )
    assert "failed" not in statuses(result.records)
    assert result.best.lr > 0.0
    printed = capsys.readouterr().out
    assert "assumed: batches are those that the data made for each" in printed
    # Several loaders have epochs where each of them has a length.
    assert ("without epochs" in printed) is (form != "several with a length")
    # A stopped trial goes on as the one that was not stopped.
    assert "cannot be continued" not in printed
    # Data that a function gives have no stated size.
    assert result.summary.size is None
    # The winner is trained as its trial was.
    _, trainer = result.train()
    assert trainer.global_step == result.records[result.best.number].steps


@pytest.mark.parametrize("form", ["stream", "several"])
def test_elsewhere_such_data_are_refused(tune, form):
    # Given as they are, they cannot begin anew for each batch size.
    data = TAKEN[form]["data"](32)
    with pytest.raises(
        ConfigError, match=r"cannot be read .*data=lambda batch_size: .*\(train, val\)"
    ):
        tune(data=data)


class Literal(Net):
    """Its rate stands in configure_optimizers."""

    def __init__(self):
        super().__init__(lr=None)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.5, momentum=0.5)
        # The rate rises from 0.1 to 0.5 in one step: an override scales all of it.
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, 0.2 + step))
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_rate_that_stands_in_the_module_is_overridden(tune, capsys):
    result = tune(
        Literal,
        reference=None,
        override_lr=True,
        trials=5,
        options=["search.replicates=0", "hardware.scale_out.devices=[1]"],
    )
    first, *others = result.records
    # The reference is the module's own configuration.
    assert (first.batch_size, first.lr) == (32, 0.5)
    # The search has moved the rate.
    assert len({trial.lr for trial in others} - {0.5}) > 1
    assert result.summary.overrides_lr
    _, trainer = result.train()
    # The optimizer has the winner's rate, not the 0.5 that stands in the module.
    (group,) = trainer.optimizers[0].param_groups
    assert group["lr"] == pytest.approx(result.best.lr)
    printed = capsys.readouterr().out
    assert "reference=(32, 0.5)" in printed
    assert "in configure_optimizers" in printed


def test_a_rate_that_stands_in_the_module_is_refused_with_what_overrides_it(tune):
    with pytest.raises(
        ConfigError, match=r"Literal \(test_tune.py:\d+\) needs .* override_lr=True"
    ):
        tune(Literal)
    # A function may ignore the trial's rate, which shows as an override without effect.
    with pytest.raises(ConfigError, match=r"no effect: .* or give override_lr=True"):
        tune(lambda trial: Literal())


class FindsItsRate(Net):
    def configure_callbacks(self):
        return [LearningRateFinder()]


@pytest.mark.parametrize("target", [bstune.Target("val_loss", 1.5, "min"), None])
def test_a_finder_of_the_module_itself_is_refused(tune, target):
    with pytest.raises(
        ConfigError, match="LearningRateFinder sets the learning rate, which bstune"
    ):
        tune(FindsItsRate, target=target)


@pytest.fixture
def prepared(monkeypatch):
    """Let tune() prepare its study, preflight included, and run none of its trials: all that it prepares."""
    studies = []

    def run(options, recipe, arguments, console, elapsed):
        studies.append(prepare(options, recipe))
        return Findings(studies[-1], [], result_of([]))

    monkeypatch.setattr("bstune.study.study.run_options", run)
    yield studies
    for study in studies:
        study.close()


# Each is taken by the way of another one.
VARIANTS = ("numbers of numpy", "lambda", "mapping", "function that returns a data module")
VARIANTS += ("trainer", "budget in steps")


@pytest.mark.parametrize(
    "form", [pytest.param(form, marks=SLOW) if form in VARIANTS else form for form in FORMS]
)
def test_what_it_takes(tune, form, prepared):
    tune(**FORMS[form])
    (found,) = prepared
    assert (found.space.low, found.space.high) == (16, 64)
    assert found.backend.train_examples == 1200


# What a user may give by mistake, and the line that says what to write.
BAD = [
    ({"module": Net(0.1)}, "module must be a class, or a function .* but got an instance of Net"),
    ({"module": 3}, "but got an instance of int"),
    ({"module": dict}, "module must be a class of LightningModules, but got dict"),
    (
        {"module": lambda: Net(0.1)},
        r"module must be a function of a trial alone, but got <lambda>\(\)",
    ),
    ({"module": lambda trial: 3}, "module must return a LightningModule, but returned int"),
    ({"module": lambda trial: ONE}, "module returned the same Net as before"),
    ({"module": sharing}, "module returned net.0.weight with the weights of another trial"),
    (
        {"module": LightningModule},
        (
            r"LightningModule \(module.py:\d+\) needs one argument lr or learning_rate, but its "
            r"arguments are"
        ),
    ),
    (
        {"module": OtherName},
        r"OtherName needs hidden besides what a trial has: give module=lambda trial: OtherName",
    ),
    (
        {"module": Net, "tunable": {"depth": (1, 2)}},
        "Net has no argument depth, which is to be searched",
    ),
    (
        # A tuple is a range, not a list of choices.
        {"tunable": {"hidden": (1, 2, 3)}},
        r"tunable\['hidden'\] must be \(low, high\) or a dict of complement, high",
    ),
    ({"tunable": {"hidden": {"low": 1}}}, r"tunable\['hidden'\] must be"),
    ({"tunable": {"hidden": (32, 8)}}, "low must be less than high, but got low=32 and high=8"),
    (
        # A class says nothing of its arguments.
        {"data": Digits},
        r"data must be an instance, but got the class Digits: give data=Digits\(...\)",
    ),
    (
        {"data": loaders()[0]},
        r"data needs loaders to train and to validate on, but got one: give data=\(train, val\)",
    ),
    (
        {"data": loaders()[:1]},
        r"data must be \(train, val\) or \(train, val, test\), but got 1 of them",
    ),
    (
        {"data": {"train": loaders()[0], "valid": loaders()[1]}},
        "data must have train, val .* but got train, valid",
    ),
    ({"data": "digits"}, "data must be a LightningDataModule, DataLoaders .* but got str"),
    (
        {"data": (DataLoader(Stream()), loaders()[1])},
        "Stream, is iterable and decides itself what comes next",
    ),
    # A stream decides itself what comes next; only a function of the batch size may give one.
    (
        {"data": lambda: loaders()},
        r"data must be a function of a batch size alone, but got <lambda>\(\)",
    ),
    (
        {"target": ("val_loss", 0.1)},
        r'bstune.Target or a text such as "val_loss<=0.1", but got \(\'val_loss\', 0.1\)',
    ),
    (
        {"target": bstune.Target("loss", 1.0, "min")},
        "the target's metric 'loss' is logged nowhere; in validation the module logs",
    ),
    ({"budget": 2000}, "budget must be a bstune.Budget, but got 2000"),
    # A default budget is one step.
    ({"budget": bstune.Budget()}, "budget ends a trial after one step"),
    ({"batch_sizes": 64}, r"batch_sizes must be two numbers \(smallest, largest\), but got 64"),
    (
        {"batch_sizes": (64, 16)},
        "^batch_sizes: low must be at most high, but got low=64 and high=16$",
    ),
    # 1,200 examples make no batch of 5,000.
    ({"batch_sizes": (16, 5000)}, "batch size 5000 is larger than the training data"),
    (
        {"reference": (32, "0.1")},
        r"reference must be two numbers \(batch size, learning rate\), but got \(32, '0.1'\)",
    ),
    (
        {"reference": (0, 0.1)},
        r"^reference must be a batch size of at least 1 and .* over 0, but got \(0, 0.1\)$",
    ),
    ({"reference": (32, 0), "target": None}, r"over 0, but got \(32, 0\)$"),
    ({"objective": "speed"}, "^objective must be"),
    ({"trials": 0}, "^trials must be at least 1, but got 0$"),
    ({"traget": "val_loss"}, "^unknown argument traget: did you mean target\\?$"),
    ({"options": "search.trials=3"}, "options must be a list such as"),
    ({"options": ["search.trial=3"]}, "unknown option search.trial: did you mean trials?"),
    ({"trainer": {"max_steps": 3}}, "trainer: max_steps is bstune's own"),
    # All of them are named at once, before the data are read.
    (
        {
            "trainer": {
                "accelerator": "cpu",
                "devices": 1,
                "strategy": "ddp",
                "precision": "16-mixed",
                "val_check_interval": 9,
            },
            "data": Unread(),
            "target": None,
        },
        (
            "^trainer: accelerator is bstune's own: the device is set by device=cpu, cuda or "
            "cuda:N; devices and strategy are bstune's own: devices=N trains with DDP on so many; "
            "precision is bstune's own: it is set by precision$"
        ),
    ),
    ({"trainer": {"gradient_clip": 3}}, "trainer.gradient_clip"),
    (
        {"trainer": {"callbacks": [LearningRateFinder()]}},
        "the call-back LearningRateFinder sets the learning rate, which bstune sets: leave it out",
    ),
    (
        # A subclass of Lightning's own finder, given alone and not in a list.
        {"trainer": {"callbacks": OwnFinder()}, "target": None},
        "the call-back OwnFinder sets the batch size, which bstune sets: leave it out",
    ),
    ({"trainer": [3]}, "trainer must be a dict of the Trainer's arguments, but got list"),
]


@pytest.mark.parametrize(("options", "line"), BAD)
def test_what_it_refuses(tune, tmp_path, options, line):
    with pytest.raises(ConfigError, match=line):
        tune(**options)
    # Bad input leaves nothing behind.
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def studied(tmp_path_factory):
    """The results of one study, and the folder it ran in."""
    folder = tmp_path_factory.mktemp("studied")
    with chdir(folder), pytest.MonkeyPatch.context() as patch:
        leave_blank(patch)
        return run_tune(trials=6, name="studied"), folder


def test_the_result_has_the_answer(studied):
    result, folder = studied
    best = result.best
    assert result.folder == folder / "outputs" / "studied"
    assert 16 <= best.batch_size <= 64
    assert best.steps is not None
    assert list(result.curve) == ["batch_size", "steps", "low", "high"]
    assert len(result.curve) > 1
    assert (result.curve.low <= result.curve.steps).all()
    rows = result.trials
    assert len(rows) == 6
    winner = rows[rows.number == best.number].iloc[0]
    assert (winner.batch_size, winner.lr, winner.status) == (best.batch_size, best.lr, "reached")
    assert winner.value <= 1.5
    assert list(rows) == list(TRIAL_COLUMNS)
    everything = result.trials_table(columns="all")
    assert {"seed", "device", "history", "horizon", *TRIAL_COLUMNS} <= set(everything)
    assert everything[list(rows)].equals(rows)
    with pytest.raises(ConfigError, match="but got 'every'"):
        result.trials_table(columns="every")
    critical = result.critical_batch_size
    # An end may be open.
    assert critical.low is None or critical.high is None or critical.low < critical.high


@pytest.mark.slow
def test_an_integer_stays_one_in_replicates_reports_and_the_winners_training(tune):
    """torch takes no width of 16.0."""
    widths = []

    def module(trial):
        widths.append(trial.hidden)
        return Net(lr=trial.lr, hidden=trial.hidden)

    result = tune(
        module,
        tunable={"hidden": {"low": 8, "high": 32, "integer": True}},
        target=bstune.Target("val_loss", 2.0, "min"),
        trials=6,
        options=["search.replicates=2"],
    )
    assert result.trials.replicate_of.notna().any()
    # What is searched stands beside the rate.
    assert list(result.trials)[2:5] == ["lr", "hidden", "status"]
    assert "failed" not in set(result.trials.status)
    result.train(**QUIET)
    # As the study's file has them, after JSON.
    points = read_study(result.folder).result.points
    found = [point.hyperparameters["hidden"] for point in points]
    assert widths
    for width in (*widths, *found):
        assert type(width) is int


@pytest.mark.slow
@pytest.mark.usefixtures("whole_pages")  # as the study's own, of a fixture of the module
def test_the_result_is_drawn_and_written(studied, tmp_path):
    result, _ = studied
    figure = result.plot()
    assert len(figure.axes) >= 2
    assert figure._repr_png_().startswith(b"\x89PNG")
    assert result._repr_html_().count("<tr>") >= 2
    both = bstune.compare(result, str(result.folder))
    assert len(both.studies) == 1
    path = result.report(tmp_path / "elsewhere.html")
    assert path.read_text() == (result.folder / "report.html").read_text()
    assert repr(result).startswith(
        f"Result(Net: use B = {result.best.batch_size}; critical batch size "
    )


def test_the_winner_trains_again_to_the_same_weights(studied, capsys):
    result, _ = studied
    module, trainer = result.train(**QUIET)
    assert "it meets the target, val_loss <= 1.5" in capsys.readouterr().out
    # They are the weights that the trial itself ended with.
    kept = torch.load(result.folder / "checkpoints" / f"trial-{result.best.number}.ckpt")[
        "state_dict"
    ]
    for name, value in module.state_dict().items():
        assert torch.equal(kept[name], value)
    # The target was reached, as in the trial.
    assert trainer.callback_metrics["val_loss"] <= 1.5


def test_the_same_call_continues_the_study(tune, capsys):
    first = tune(trials=1).trials
    second = tune(trials=2).trials
    # The first trial is not run again.
    assert second[["number", "lr", "steps"]].iloc[:1].equals(first[["number", "lr", "steps"]])
    assert len(second) == 2
    assert "continues after 1 configuration;" in capsys.readouterr().out


@pytest.mark.slow
def test_another_call_of_the_same_name_is_refused(tune):
    tune(trials=1)
    # A study keeps its name only with the same settings.
    with pytest.raises(
        StudyError,
        match=r"workload.given_trainer.gradient_clip_val: was None, now 1.0(.|\n)*name=NAME",
    ):
        tune(trials=1, trainer={"gradient_clip_val": 1.0})


def test_no_trial_reached_the_target(tune, capsys):
    # Two steps reach nothing.
    result = tune(trials=1, budget=bstune.Budget(steps=2))
    assert result.curve.empty
    assert result.critical_batch_size.value is None
    best = result.best
    (trial,) = result.records
    # The best point so far is the one trial's.
    assert (best.reached, best.number, best.batch_size) == (False, 0, trial.batch_size)
    capsys.readouterr()
    _, trainer = result.train(logger=False)
    assert trainer.global_step == 2
    assert "after 2 steps: it misses the target" in capsys.readouterr().out


@pytest.mark.slow
def test_a_loaded_result_trains_with_the_studys_arguments_of_the_trainer(tune):
    stored = {"gradient_clip_val": 2.5, "logger": False}
    result = tune(trials=1, budget=bstune.Budget(steps=2), trainer=stored)
    loaded = bstune.load(result.folder)
    _, trainer = loaded.train(module=Net, data=loaders(), **QUIET)
    assert trainer.gradient_clip_val == 2.5
    # Those of the call come before the study's.
    _, trainer = loaded.train(module=Net, data=loaders(), **QUIET, gradient_clip_val=0.5)
    assert trainer.gradient_clip_val == 0.5


@pytest.mark.slow
def test_no_trial_has_a_value_of_the_metric(tune):
    result = tune(trials=1, budget=bstune.Budget(steps=2))
    # As of a trial whose metric was never finite.
    without = result.summary.model_copy(update={"so_far": None})
    result = replace(result, summary=without)
    with pytest.raises(StudyError, match=r"val_loss <= 1\.5 was not reached in 1 trial"):
        _ = result.best
    with pytest.raises(StudyError, match=r"val_loss <= 1\.5 was not reached in 1 trial"):
        result.train()


class Mine(Exception):
    pass


def fails_when_built(trial):
    raise Mine("built")


class FailsLater(Net):
    """Trains for ``steps`` steps, and raises an error."""

    def __init__(self, lr, steps):
        super().__init__(lr)
        self.steps = steps

    def training_step(self, batch, batch_idx):
        if self.global_step >= self.steps:
            raise Mine("trained")
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(
    ("module", "message", "note"),
    [
        (fails_when_built, "built", None),
        (
            lambda trial: FailsLater(trial.lr, 0),
            "trained",
            r"the workload cannot be trained: .*test_tune.py:\d+ in ",
        ),
        (
            lambda trial: FailsLater(trial.lr, 5),
            "trained",
            r"the first \d+ trials all failed, .*test_tune.py:\d+ in ",
        ),
    ],
)
def test_the_users_own_errors_are_raised(tune, module, message, note):
    with pytest.raises(Mine, match=message) as caught:
        tune(module)
    notes = getattr(caught.value, "__notes__", [])
    assert len(notes) == (note is not None)
    assert note is None or re.search(note, notes[0], re.DOTALL)


class Interrupts(Net):
    def training_step(self, batch, batch_idx):
        raise KeyboardInterrupt


@pytest.mark.usefixtures("interruptible")
def test_an_interruption_is_one_and_so_is_the_next(tune):
    with pytest.raises(KeyboardInterrupt):
        tune(Interrupts)
    # After an interruption Python's own handler is back, so that the next one ends the program.
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_trial_names_what_it_has(tune):
    # A trial has what is searched, besides what each trial has.
    with pytest.raises(
        AttributeError, match="a trial has batch_size, lr, seed, total_steps, hidden, but not width"
    ):
        tune(lambda trial: Net(trial.lr, trial.width), tunable={"hidden": (8, 16)})


# A module that asks how long it trains has a schedule with an end.
@pytest.mark.slow
def test_a_module_that_asks_for_the_steps_has_a_horizon(tune):
    def module(trial):
        assert trial.total_steps >= 1
        return Net(trial.lr)

    assert tune(module, trials=2).trials_table(columns="all").horizon.notna().all()


WATCHED = {"val_check_interval": 5, "check_val_every_n_epoch": None, "enable_progress_bar": False}
LEFT = "left to bstune: trainer.val_check_interval, trainer.check_val_every_n_epoch, trainer.enable_progress_bar"


@pytest.mark.parametrize(
    ("trainer", "stated", "lines"),
    [
        # The project's own length becomes its budget.
        (WATCHED | {"max_steps": 30, "accumulate_grad_batches": 2}, None, [LEFT]),
        # Lightning's own defaults say nothing.
        ({"accelerator": "auto", "devices": "auto", "precision": None, "max_epochs": None}, {}, []),
        ({"min_epochs": 3, "gradient_clip_val": 1.0}, {}, ["left to bstune: trainer.min_epochs"]),
    ],
)
def test_arguments_of_the_trainer_that_bstune_replaces_are_one_line_of_the_plan(
    tune, capsys, trainer, stated, lines
):
    if stated is None:
        stated = {"reference": None, "budget": None, "override_lr": True}
    tune(trials=1, trainer=trainer, data=Digits(), **stated)
    printed = " ".join(capsys.readouterr().out.split())
    assert printed.count("left to bstune") == len(lines)
    for line in lines:
        assert line in printed


class Counts(Callback):
    def __init__(self):
        self.batches = 0

    def on_train_batch_end(self, *_):
        self.batches += 1


@pytest.mark.slow
def test_call_backs_and_loggers_are_copied(tune, tmp_path):
    callback = Counts()
    logger = CSVLogger(tmp_path / "logs", name="mine")
    # Something has to be logged, so that the logger of the trial makes its file.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Net, "training_step", logged(Net.training_step))
        tune(trials=1, trainer={"callbacks": [callback], "logger": logger})
    # The trial counted in a copy of the call-back.
    assert callback.batches == 0
    # Lightning's logger opens its file at the first use.
    assert logger._experiment is None
    assert list((tmp_path / "logs" / "mine").glob("*/metrics.csv"))


def logged(step):
    def training_step(self, batch, batch_idx):
        loss = step(self, batch, batch_idx)
        self.log("train_loss", loss, on_step=True)
        return loss

    return training_step


# What Lightning, Optuna, Hydra and a careless module may change.
def process_state():
    """The state of this process that a study might change."""
    # The root logger is in no dictionary of loggers.
    loggers = {"root": logging.root} | logging.root.manager.loggerDict
    return {
        "random": (
            random.getstate(),
            np.random.get_state()[1].tolist(),
            torch.get_rng_state().tolist(),
        ),
        "threads": torch.get_num_threads(),
        "flags": (
            torch.are_deterministic_algorithms_enabled(),
            torch.get_float32_matmul_precision(),
        ),
        "cudnn": (torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic),
        "dtype": torch.get_default_dtype(),
        "folder": Path.cwd(),
        "environment": dict(os.environ),
        "loggers": {
            name: (one.level, one.propagate, one.disabled, list(one.handlers), list(one.filters))
            for name, one in loggers.items()
            if isinstance(one, logging.Logger)
        },
        "warnings": list(warnings.filters),
    }


class Careless(Net):
    """Changes whatever a module can change of its process."""

    def on_fit_start(self):
        os.chdir("/")
        os.environ["CARELESS"] = "1"
        torch.set_num_threads(1 + torch.get_num_threads())
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.set_float32_matmul_precision("medium")
        logging.getLogger("lightning.pytorch").setLevel(logging.CRITICAL)
        warnings.simplefilter("ignore")


@pytest.mark.slow
def test_all_is_left_as_it_was(tune):
    # Importing lightning and optuna sets these; a study must leave the user's levels.
    logging.getLogger("lightning.pytorch").setLevel(logging.INFO)
    optuna.logging.set_verbosity(optuna.logging.INFO)
    data = Digits()
    plain = loaders()
    data_before = dict(vars(data))
    plain_before = [dict(vars(loader)) for loader in plain]
    before = process_state()
    tune(Careless, data, trials=1, name="a")
    # A study that ends in an error leaves as little behind as one that ends well.
    with pytest.raises(Mine):
        tune(lambda trial: FailsLater(trial.lr, 0), plain, name="b")
    after = process_state()
    for name in before["loggers"]:
        assert after["loggers"][name] == before["loggers"][name], name
    for name in before.keys() - {"loggers"}:
        assert after[name] == before[name], name
    assert vars(data) == data_before
    assert [dict(vars(loader)) for loader in plain] == plain_before


@pytest.mark.slow
def test_the_users_own_hydra_is_left_alone(tune):
    with initialize(version_base="1.2", config_path=None):
        theirs = GlobalHydra.instance().hydra
        # Hydra keeps one instance a process, which a notebook may use itself.
        tune(trials=1)
        assert GlobalHydra.instance().hydra is theirs
        assert str(getbase()) == "1.2"


class Locked(Digits):
    def __init__(self):
        super().__init__()
        # A lock cannot be pickled.
        self.lock = threading.Lock()


@pytest.mark.slow
@pytest.mark.usefixtures("prepared")
def test_what_cannot_be_pickled_trains_in_this_process(tune, capsys):
    options = tune(data=Locked(), workers=None, survey=None).options
    assert (options.search.workers, options.hardware.enabled) == (0, False)
    assert (
        "module and data cannot be sent to another process (TypeError: cannot pickle "
        "'_thread.lock' object)" in capsys.readouterr().out
    )
    # Each of these needs another process, and is refused where it was asked for.
    with pytest.raises(
        ConfigError, match=r"workers=1: module and data cannot be sent .* leave workers out"
    ):
        tune(data=Locked(), workers=1)
    with pytest.raises(ConfigError, match="devices=2: module and data cannot be sent"):
        tune(data=Locked(), device="cpu", options=[*QUICK, "devices=2"])
    with pytest.raises(ConfigError, match="survey=True: module and data cannot be sent"):
        tune(data=Locked(), survey=True)


@pytest.mark.slow
def test_a_function_of_the_batch_size_is_called_with_it(tune):
    asked = set()

    def data(batch_size):
        asked.add(batch_size)
        return loaders(batch_size)

    rows = tune(data=data, trials=2).trials
    # The reference, both ends of the range, and each trial's.
    assert asked == {32, 16, 64, *rows.batch_size}


@pytest.mark.slow
def test_no_command_joins_a_study_of_python_objects(tune):
    options = tune(trials=1, name="alone").options
    with pytest.raises(
        ConfigError, match="the study 'alone' was begun in Python or by a sweep of Hydra, and no"
    ):
        # The command would have to build what only the script has.
        compose_joined(find_study("alone", options.storage), [])


def test_a_notebook_shows_one_display_that_is_updated(monkeypatch):
    shown = []

    def display(data, raw, display_id):
        assert raw
        # The first display has no trial, and so no table.
        assert "<table" not in data["text/html"]
        shown.append(data["text/plain"].split(":")[0])
        return SimpleNamespace(
            # IPython updates a display in place.
            update=lambda data, raw: shown.append(
                data["text/plain"].split(";")[-1] + " in a table" * ("<table" in data["text/html"])
            )
        )

    monkeypatch.setitem(sys.modules, "IPython", ModuleType("IPython"))
    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(display=display))
    target = bstune.Target("val_loss", 1.0, "min")
    progress = Progress(9, target, lambda batch_size: 1000, Console(force_jupyter=True))
    for trials in range(3):
        # It is shown again after each trial, with all of them so far.
        progress.show([make_result(number=number) for number in range(trials)])
    assert shown == [
        "no trial yet",
        " trial 0: B 32, lr 0.1, reached at val_loss 0.09 in a table",
        " trial 1: B 32, lr 0.1, reached at val_loss 0.09 in a table",
    ]


# A class that stands in __main__, as in a script or a notebook, is sent by its code.
SCRIPT = """
import json, sys
sys.path.insert(0, {tests!r})
import bstune, torch
from lightning.pytorch import LightningModule
from projects.own_loop.digits import TRAIN, VAL, make_model
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

class Here(LightningModule):
    def __init__(self, lr):
        super().__init__()
        self.lr, self.net = lr, make_model()

    def training_step(self, batch, batch_idx):
        return cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)

result = bstune.tune(
    lambda trial: Here(lr=trial.lr),
    (DataLoader(TensorDataset(*TRAIN), 32), DataLoader(TensorDataset(*VAL), 300)),
    target=bstune.Target("val_loss", 1.0, mode="min"),
    batch_sizes=(16, 64), reference=(32, 0.5), budget=bstune.Budget(examples=6000), trials=2, mlflow=False,
    options={options},
)
print("STATUSES", *result.trials.status)
surveyed = result.folder / "hardware.json"
if surveyed.exists():
    print("SURVEYED", json.loads(surveyed.read_text())["ceiling"]["at"]["batch_size"])
"""
SURVEYED = ["hardware.seconds=1", "hardware.step_time.rungs=2", "hardware.ceilings.seconds=0.05"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "options"),
    [
        # test_pieces.py surveys a module and data in processes.
        ("a script", ["hardware.enabled=false"]),
        pytest.param("a script", SURVEYED, marks=pytest.mark.soak),
        pytest.param("typed in", SURVEYED, marks=pytest.mark.soak),
    ],
)
def test_trials_train_in_processes_of_their_own(tmp_path, how, options):
    text = SCRIPT.format(tests=str(Path(__file__).parent), options=[*QUICK, *options])
    # In a notebook, as here, there is no file.
    command = [sys.executable, "-"]
    if how != "typed in":
        (tmp_path / "script.py").write_text(text)
        command = [sys.executable, "script.py"]
    ended = subprocess.run(
        command, input=text, cwd=tmp_path, capture_output=True, text=True, timeout=280
    )
    assert ended.returncode == 0, ended.stderr
    lines = {}
    for line in ended.stdout.splitlines():
        if line.startswith(("STATUSES", "SURVEYED")):
            name, said = line.split(" ", 1)
            lines[name] = said
    assert len(lines["STATUSES"].split()) == 2
    # A trial whose process lacked the class would have failed.
    assert "failed" not in lines["STATUSES"]
    # The largest batch size fits, so it is the ceiling.
    assert lines.get("SURVEYED") == ("64" if options == SURVEYED else None)
