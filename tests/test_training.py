"""What needs a study's data and modules, in a process of its own: what the user's code does there ends that process."""

import multiprocessing
import os
import signal
from pathlib import Path

import pytest
import torch
from lightning.pytorch import LightningModule
from toolbox import make_spec
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import bstune
from bstune.core.errors import ConfigError, UserCodeError
from bstune.study.given import GivenObjects
from bstune.study.study import compose_objects
from bstune.study.training import TrainingHere, TrainingProcess, TriedBackend
from bstune.system.files import Output
from bstune.trial.processes.trials_log import TrialsLog
from bstune.trial.workload import checked_protocol, resolve


class Line(LightningModule):
    """Learns a line; ``act`` is called in each training step."""

    def __init__(self, lr, act):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(3))
        self.lr = lr
        self.act = act

    def training_step(self, batch, batch_idx):
        self.act()
        x, y = batch
        return F.mse_loss(x @ self.weight, y)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("loss", F.mse_loss(x @ self.weight, y))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def loaders():
    x = torch.randn(120, 3, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(x, x @ torch.tensor([1.0, -2.0, 3.0]))
    return DataLoader(data, batch_size=8), DataLoader(data, batch_size=60)


@pytest.fixture
def folder(tmp_path):
    """The study's folder, in which trials leave their checkpoints."""
    output = Output(tmp_path)
    output.checkpoints.mkdir()
    return output


def study(act, *options):
    """The resolved options and the recipe of a study whose training steps act."""
    given = GivenObjects(
        target=bstune.Target("loss", 0.01, "min"),
        batch_sizes=(4, 32),
        reference=(8, 0.1),
        budget=bstune.Budget(examples=800),
        module=lambda trial: Line(trial.lr, act),
        data=loaders(),
    )
    return resolve(*compose_objects(given, ["device=cpu", *options], {}))


@pytest.fixture
def open_training(tmp_path):
    """A function that opens the process that trains a study; no process is left at the end."""
    before = set(multiprocessing.active_children())
    opened = []

    def open_process(act, *options):
        training = TrainingProcess(*study(act, *options), TrialsLog(tmp_path / "trials.log"))
        opened.append(training)
        return training

    yield open_process
    for training in opened:
        training.close()
    assert set(multiprocessing.active_children()) == before


def nothing():
    """Let a training step be."""


def look(training, lines=None):
    say = (lambda line: None) if lines is None else lines.append
    return training.try_steps(None, continues=True, surveyed=False, say=say)


def fail():
    raise ZeroDivisionError("mine")


def be_killed():
    os.kill(os.getpid(), signal.SIGKILL)


# What else may end it, or never does, is looked at through the command in test_watchdog.py and test_failures.py.
def test_what_ends_the_process_is_an_error_of_the_command(open_training):
    said = "ended by the system, as it does when memory runs out"
    with pytest.raises(UserCodeError, match=said):
        look(open_training(be_killed))


def test_the_users_own_error_stands_behind_the_one_that_is_raised(open_training):
    with pytest.raises(UserCodeError, match="ZeroDivisionError: mine") as raised:
        look(open_training(fail))
    assert isinstance(raised.value.__cause__, ZeroDivisionError)


def test_what_is_refused_in_the_process_is_refused_here(open_training):
    # One more than the loaders have.
    training = open_training(nothing, "search.batch_size.high=121")
    with pytest.raises(ConfigError, match=r"larger than the training data \(120 examples\)"):
        look(training)


def test_an_own_batch_size_that_is_too_large_is_told_before_the_range_around_it(open_training):
    sizes = ("scaling.batch_size=400", "search.batch_size.high=200")
    lines = []
    with pytest.raises(ConfigError, match="batch size 200 is larger"):
        look(open_training(nothing, *sizes), lines)
    assert [line for line in lines if "your own batch size, 400, is larger" in line]


# One example more than the loaders have.
OWN_SIZE = "scaling.batch_size=121"


def test_a_reference_of_more_examples_than_the_data_is_said_before_any_step(open_training):
    # A step would fail.
    with pytest.raises(ConfigError, match=r"\b121\b.*\b120 examples"):
        look(open_training(fail, OWN_SIZE, "workload.target.value=auto"))
    said = []
    look(open_training(nothing, OWN_SIZE), said)
    first_steps = next(place for place, line in enumerate(said) if "steps" in line)
    assert any("120 examples" in line for line in said[:first_steps])
    said.clear()
    look(open_training(nothing, OWN_SIZE, "search.baseline=false"), said)
    assert not any("120 examples" in line for line in said)


def test_the_process_of_the_first_steps_trains_the_first_trial(open_training, folder, tmp_path):
    pids = tmp_path / "pids"

    def note():
        with pids.open("a") as file:
            file.write(f"{os.getpid()}\n")

    training = open_training(note)
    lines = []
    tried = look(training, lines)
    with training.runner(1) as runner:
        runner.start(make_spec(8, number=0), folder, None)
        record = runner.wait().result()
    assert record.status == "reached"
    assert set(pids.read_text().split()) == {str(training._kept[0].process.pid)}
    assert str(os.getpid()) not in pids.read_text()
    assert (tried.train_examples, tried.stops, tried.has_test) == (120, True, False)
    assert lines[0] == "reading the data of Line"


def test_several_processes_take_the_place_of_the_first(open_training, folder):
    training = open_training(nothing)
    look(training)
    with training.runner(2, threads=1) as runner:
        for number in range(2):
            runner.start(make_spec(8, number=number), folder, None)
        records = [runner.wait().result() for _ in range(2)]
    assert [record.status for record in records] == ["reached", "reached"]
    assert training._kept == []


def test_a_process_that_failed_is_not_kept(open_training, folder, tmp_path):
    flag = tmp_path / "fail"

    def fail_later():
        if flag.exists():
            raise ZeroDivisionError("mine")

    training = open_training(fail_later)
    look(training)
    # The first steps went well; the trial will not.
    flag.touch()
    with training.runner(1) as runner:
        runner.start(make_spec(8, number=0), folder, None)
        assert runner.wait().result().status == "failed"
    assert training._kept == []


def test_the_same_is_found_in_this_process(open_training, folder, tmp_path):
    options, recipe = study(nothing)
    log = TrialsLog(Path(tmp_path / "here.log"))
    here = TrainingHere(options, recipe, checked_protocol(options, recipe), log)
    found = look(here)
    elsewhere = look(open_training(nothing))
    assert found.device_kind == elsewhere.device_kind
    assert found.frozen_settings == elsewhere.frozen_settings
    # The smallest batch size of the study.
    assert found.findings.smallest == elsewhere.findings.smallest == 4
    record = TriedBackend(found, here).run(make_spec(8, number=0), folder, None)
    with pytest.raises(UserCodeError, match="ZeroDivisionError: mine"):
        look(TrainingHere(*study(fail), checked_protocol(options, recipe), log))
    assert record.status == "reached"
