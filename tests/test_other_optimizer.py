"""The options algorithm and schedule: weights by closed forms, on a gradient that is always 1."""

import math

import pytest
import torch
from lightning.pytorch import LightningModule
from refusals import refused
from small import scheduled
from torch.optim.lr_scheduler import LambdaLR, SequentialLR
from torch.utils.data import DataLoader

from bstune.config import CONF, compose, options_from_python
from bstune.recipe.project import recipe_of_project
from bstune.recipe.recipe import settings_of
from bstune.trial.lightning import fit
from bstune.trial.look_up import look_up

LR = 0.1
STEPS = 20
LOADER = DataLoader(torch.zeros(60, 1), batch_size=3)


class Slope(LightningModule):
    """Its loss is the sum of two weights; the second one's rate is a tenth of the first one's."""

    def __init__(self, lr=LR):
        super().__init__()
        self.lr = lr
        self.weights = torch.nn.ParameterList([torch.zeros(1), torch.zeros(1)])

    def training_step(self, batch, batch_idx):
        return sum(self.weights).sum()

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", sum(self.weights).sum())

    def configure_optimizers(self):
        first, second = self.weights
        groups = [{"params": [first]}, {"params": [second], "lr": self.lr / 10}]
        return torch.optim.SGD(groups, self.lr)


def halved(trainer, optimizer):
    parts = [LambdaLR(optimizer, lambda step: 0.5**step) for _ in range(2)]
    return SequentialLR(optimizer, parts, milestones=[STEPS // 2])


Halves = scheduled(halved, base=Slope)


class TwoOptimizers(Slope):
    automatic_optimization = False

    def configure_optimizers(self):
        return [torch.optim.SGD([weight], self.lr) for weight in self.weights]


def halves(step):
    return 0.5 ** (step % (STEPS // 2))


def linear(step):
    return 1.0 - step / STEPS


def warmed_cosine(step):
    if step < 4:
        return (step + 1) / 4
    return 0.5 * (1.0 + math.cos(math.pi * (step - 4) / (STEPS - 4)))


COSINE = {
    "_target_": "bstune.workloads.schedules.warmup_then_cosine",
    "total_steps": "${trial.total_steps}",
    "warmup": 0.2,
}
# Module, algorithm, schedule -> the factor of the rate, and the algorithm's step for a gradient 1.
CASES = {
    "its schedule is kept": (Halves, "adam", None, halves, lambda step: 1.0),
    "its optimizer is kept": (Halves, None, "linear", linear, lambda step: 1.0),
    "both": (Halves, "heavy_ball", "linear", linear, None),
    "a node": (
        Halves,
        {"_target_": "torch.optim.SGD", "momentum": 0.9},
        COSINE,
        warmed_cosine,
        None,
    ),
}


def moved(factor, step_of):
    """The distance of a weight after ``STEPS`` steps of the rate ``LR``."""
    velocity, distance = 0.0, 0.0
    for step in range(STEPS):
        velocity = 0.9 * velocity + 1.0 if step_of is None else step_of(step)
        distance += LR * factor(step) * velocity
    return distance


def of(module, **given):
    options = options_from_python(**given, device="cpu", threads=1)
    return recipe_of_project(module, (LOADER, LOADER), options)


@pytest.mark.parametrize("case", CASES)
def test_weights_move_as_the_formula_says(case):
    module, algorithm, schedule, factor, step_of = CASES[case]
    recipe = of(module, algorithm=algorithm, schedule=schedule)
    trainer = fit(recipe, settings_of(3, LR, STEPS), [])
    first, second = (weight.item() for weight in trainer.lightning_module.weights)
    assert first == pytest.approx(-moved(factor, step_of), rel=1e-4)
    assert second == pytest.approx(first / 10, rel=1e-4)


def test_the_rule_follows_the_optimizer_and_the_rate_stays():
    found = look_up(of(Slope, algorithm="adamw"))
    assert (found.rule, found.lr) == ("sqrt", LR)
    for given in ({"algorithm": "sgd"}, {"schedule": "constant"}):
        with refused("TwoOptimizers, 2, leave"):
            look_up(of(TwoOptimizers, **given))


def test_an_algorithms_arguments_are_tuned():
    given = ["algorithm=heavy_ball", "tune=[momentum,label_smoothing]", "device=cpu"]
    recipe = compose(["+workload=digits", *given]).recipe
    assert recipe.own_values() == {"momentum": 0.9, "label_smoothing": 0.0}
    trial = settings_of(8, LR, STEPS, values={"momentum": 0.3, "label_smoothing": 0.1})
    optimizer = recipe.algorithm(trial)([{"params": [torch.zeros(1)], "lr": LR}])
    assert optimizer.param_groups[0]["momentum"] == 0.3
    # The workload's own optimizer and its momentum are not in use.
    assert recipe.module(trial).loss.label_smoothing == 0.1


@pytest.mark.parametrize("group", ["algorithm", "schedule"])
def test_all_that_ship_are_built(group):
    files = list(CONF.glob(f"{group}/*.yaml"))
    assert len(files) >= 5
    optimizer = torch.optim.SGD([torch.zeros(1)], LR)
    for file in files:
        made = getattr(of(Slope, **{group: file.stem}), group)(settings_of(8, LR, STEPS))
        assert made(optimizer.param_groups if group == "algorithm" else optimizer)
