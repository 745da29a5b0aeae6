"""A small regression, its trials, and ``Trainer.fit`` of the same batches to compare them with."""

import math
from functools import partial
from importlib import import_module
from itertools import islice

import torch
from lightning.pytorch import LightningModule, seed_everything
from toolbox import make_protocol, make_spec
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from bstune.core.evaluation_schedule import EvaluationSchedule
from bstune.core.records import Target
from bstune.trial.batches.loader import endless, rebatch
from bstune.trial.lightning.packages import package_of
from bstune.trial.loop import Workload, run_trial
from bstune.trial.parts.checkpoint import Stopped

# Six batches an epoch, so that two examples go over into the next one.
EXAMPLES, BATCH_SIZE, STEPS = (50, 8, 40)
X = torch.linspace(-2, 2, EXAMPLES).view(-1, 1)
DATA = TensorDataset(X, torch.sin(X))
HELD_OUT = DataLoader(TensorDataset(X[::5] + 0.1, torch.sin(X[::5] + 0.1)), batch_size=4)
SELDOM = EvaluationSchedule(ratio=2.0, share=0.05, cost=0.5, near=1.5)


class Sine:
    """Learns a sine, as a LightningModule of either package; subclasses change how."""

    def __init__(self, lr=0.05):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))

    def loss(self, batch):
        x, y = batch
        return F.mse_loss(self.net(x), y)

    def training_step(self, batch, batch_idx):
        return self.loss(batch)

    def validation_step(self, batch, batch_idx):
        self.log("val/error", self.loss(batch), batch_size=1)

    def optimizer(self):
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr, momentum=0.9)

    def configure_optimizers(self):
        return self.optimizer()


class Regression(Sine, LightningModule):
    """Of lightning.pytorch."""


def batches_of(spec, micro_batch_size=None, collate=None):
    loader = DataLoader(DATA, shuffle=True, collate_fn=collate)
    return rebatch(loader, spec.batch_size, micro_batch_size, spec.seed)


def protocol_of(**changes):
    values = {
        "target": Target("val/error", 0.0, "min"),
        "evaluation_schedule": SELDOM,
        "divergence": 1e9,
    }
    return make_protocol(**{"steps": STEPS, **values, **changes})


def built(kind, modules):
    def build(spec):
        modules.append(kind())
        return modules[-1]

    return build


def run(kind, spec=None, protocol=None, batches=batches_of, collate=None, data=None, **options):
    """Run a trial; return its record and its module."""
    modules = []
    protocol = protocol or protocol_of()
    held_out = DataLoader(HELD_OUT.dataset, batch_size=4, collate_fn=collate)
    train = partial(batches, micro_batch_size=protocol.micro_batch_size, collate=collate)
    workload = Workload(
        built(kind, modules), train, held_out, len(HELD_OUT.dataset), data_module=data
    )
    return run_trial(workload, spec or make_spec(BATCH_SIZE, seed=3), protocol, **options), modules[
        -1
    ]


def stop_and_continue(kind, protocol, at, state):
    """Stop a trial after ``at`` steps and go on with it from its state; return the second one's record and module."""
    stopped, _ = run(kind, make_spec(BATCH_SIZE, seed=3, max_steps=at), protocol, state_file=state)
    spec = make_spec(BATCH_SIZE, seed=3, number=4, resumed_from=3)
    return run(kind, spec, protocol, resume=Stopped(stopped, state))


class Epochs:
    """The batches of a trial, given to a plain Trainer: the same endless stream, cut where the trial cuts it."""

    def __init__(self, batches, length):
        self.stream = endless(batches)
        self.length = length

    def __len__(self):
        return self.length

    def __iter__(self):
        return islice(self.stream, self.length)


def fit(kind, micro_batch_size=None, collate=None, **options):
    """Train as anyone would: ``Trainer.fit`` with the trial's batches."""
    seed_everything(3, verbose=False)
    module = kind()
    batches = batches_of(make_spec(BATCH_SIZE, seed=3), micro_batch_size, collate)
    steps = {"max_steps": STEPS} if module.automatic_optimization else {}
    quiet = dict.fromkeys(
        ("enable_progress_bar", "enable_model_summary", "enable_checkpointing", "logger"), False
    )
    trainer = import_module(package_of(module)).Trainer(
        accelerator="cpu", max_epochs=math.ceil(STEPS / 6), **quiet, **steps, **options
    )
    held_out = DataLoader(HELD_OUT.dataset, batch_size=4, collate_fn=collate)
    trainer.fit(module, Epochs(batches, len(batches)), held_out)
    return module
