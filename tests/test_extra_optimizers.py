"""Optimizers of other libraries, and one that keeps an average by itself: what is trained at, and what is evaluated."""

import sys
from types import ModuleType

import pytest
import torch
from builders import options_and_recipe
from lightning.pytorch import Trainer
from toolbox import make_spec
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from bstune.core.errors import ConfigError
from bstune.trial.workload import build_module
from bstune.workloads.averaging import OptimizersAverage
from bstune.workloads.classifier import Classifier

LIBRARIES = {"soap": "pytorch_optimizer", "schedule_free_adamw": "schedulefree"}
SCHEDULES = {"schedule_free_adamw": "schedule_free", "soap": "constant"}


class MeanOfSteps(torch.optim.SGD):
    """SGD that gives the mean of its weights after each step, and trains at the last ones."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, lr=lr)
        self.visited = []
        self.is_training = False

    @property
    def weight(self):
        return self.param_groups[0]["params"][0]

    @torch.no_grad()
    def train(self):
        if not self.is_training and self.visited:
            self.weight.copy_(self.visited[-1])
        self.is_training = True

    @torch.no_grad()
    def eval(self):
        if self.is_training and self.visited:
            self.weight.copy_(torch.stack(self.visited).mean(dim=0))
        self.is_training = False

    def step(self, closure=None):
        assert self.is_training
        loss = super().step(closure)
        self.visited.append(self.weight.detach().clone())
        return loss


def classifier(optimizer, average):
    return Classifier(
        nn.Sequential(nn.Flatten(), nn.Linear(4, 3, bias=False)),
        nn.CrossEntropyLoss(),
        optimizer,
        lr=0.5,
        average=average,
    )


class Watched(OptimizersAverage):
    """Notes the weights at each evaluation."""

    def __init__(self):
        self.evaluated = []

    def on_validation_epoch_start(self, trainer, pl_module):
        super().on_validation_epoch_start(trainer, pl_module)
        self.evaluated.append(next(pl_module.parameters()).detach().clone())


def test_the_optimizers_average_is_evaluated_and_left(tmp_path):
    torch.manual_seed(0)
    average = Watched()
    module = classifier(MeanOfSteps, average)
    batches = DataLoader(TensorDataset(torch.randn(12, 4), torch.arange(12) % 3), batch_size=4)
    trainer = Trainer(
        max_epochs=2,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        default_root_dir=tmp_path,
    )
    trainer.fit(module, batches, batches)
    visited = trainer.optimizers[0].visited
    # Two epochs of three batches.
    assert len(visited) == 6
    means = [torch.stack(visited[:3]).mean(dim=0), torch.stack(visited).mean(dim=0)]
    torch.testing.assert_close(average.evaluated, means)
    left = next(module.parameters())
    torch.testing.assert_close(left.detach(), means[1])
    # By itself, without a training.
    trainer.validate(module, batches, verbose=False)
    torch.testing.assert_close(left.detach(), means[1])


@pytest.mark.parametrize(
    ("optimizer", "average", "advice"),
    [
        (MeanOfSteps, None, "set schedule=schedule_free"),
        (torch.optim.SGD, OptimizersAverage(), "but SGD keeps none: set algorithm=schedule_free"),
    ],
)
def test_an_average_without_its_optimizer_is_refused(optimizer, average, advice):
    with pytest.raises(ConfigError, match=advice):
        classifier(optimizer, average).configure_optimizers()


def module_of(algorithm):
    return build_module(
        *options_and_recipe(
            "workload=digits", f"algorithm={algorithm}", f"schedule={SCHEDULES[algorithm]}"
        ),
        make_spec(lr=0.01),
    )


@pytest.mark.parametrize("algorithm", LIBRARIES)
def test_a_missing_library_is_named_with_its_extra(algorithm, monkeypatch):
    library = LIBRARIES[algorithm]
    # As Python has it for a module that cannot be imported.
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ConfigError, match=rf"{library}, .*pip install 'bstune\[optimizers\]'"):
        module_of(algorithm).configure_optimizers()


@pytest.mark.parametrize("algorithm", LIBRARIES)
def test_a_librarys_optimizer_gets_the_options_of_the_config(algorithm, monkeypatch):
    class Made(MeanOfSteps if algorithm == "schedule_free_adamw" else torch.optim.SGD):
        def __init__(self, parameters, lr, **options):
            super().__init__(parameters, lr=lr)
            self.options = options

    library = ModuleType(LIBRARIES[algorithm])
    library.AdamWScheduleFree = library.SOAP = Made
    monkeypatch.setitem(sys.modules, LIBRARIES[algorithm], library)
    made = module_of(algorithm).configure_optimizers()["optimizer"]
    assert type(made) is Made
    assert made.options["weight_decay"] == 0.0
    assert len(made.options["betas"]) == 2


@pytest.mark.parametrize("algorithm", LIBRARIES)
def test_each_trains(algorithm):
    pytest.importorskip(LIBRARIES[algorithm], reason="needs pip install 'bstune[optimizers]'")
    torch.manual_seed(0)
    module = module_of(algorithm)
    optimizer = module.configure_optimizers()["optimizer"]
    images = torch.randn(64, 1, 8, 8)
    labels = (images.flatten(1).sum(dim=1) > 0).long()
    losses = list[float]()
    # It refuses to step before it was told that training begins.
    if algorithm == "schedule_free_adamw":
        optimizer.train()
    for _ in range(60):
        optimizer.zero_grad()
        loss = module.training_step((images, labels), 0)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.3 * losses[0]
