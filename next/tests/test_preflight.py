"""What projects tell of themselves, and what is seen before a study begins: a module each."""

import math
from pathlib import Path

import pytest
import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping
from small import QUIET, Batches, Data, Model, examples
from torch.optim import lr_scheduler
from torch.utils.data import BatchSampler, DataLoader

from bstune.config import options_from_python
from bstune.core.errors import InputError
from bstune.core.records import Budget, Target
from bstune.recipe.hydra import recipe_of
from bstune.recipe.project import recipe_of_project
from bstune.recipe.recipe import settings_of
from bstune.study.prepare import prepared
from bstune.trial.look_up import look, look_up
from bstune.trial.preflight import FIRST_PILOT, pilot, preflight, schedules_of
from bstune.trial.worker import InProcess

OPTIONS = options_from_python(workload="own", device="cpu", threads=1)
LOSS = Target("val/loss", None, "min")
# Ten epochs of 16 batches of 16.
BUDGET = Budget(steps=80, examples=2560)


def recipe(module=Model, trainer=None, data=None, **options):
    changed = OPTIONS.model_copy(update=options)
    return recipe_of_project(module, data or Data(), changed, trainer)


class Saved(LightningDataModule):
    def __init__(self, batch_size=24):
        super().__init__()
        self.save_hyperparameters()

    def train_dataloader(self):
        return Data().train_dataloader()

    def val_dataloader(self):
        return Data().val_dataloader()


class InEights(BatchSampler):
    def __iter__(self):
        if self.batch_size % 8:
            raise ValueError(self.batch_size)
        return super().__iter__()


class Eights(Data):
    def train_dataloader(self):
        loader = super().train_dataloader()
        sampler = InEights(loader.sampler, 16, drop_last=False)
        return DataLoader(loader.dataset, batch_sampler=sampler)


class NoDefault(Model):
    def __init__(self, lr):
        super().__init__(lr)


class OneSize(Model):
    """It takes batches of one size, in training and validation."""

    def __init__(self, batch_size, lr=0.1):
        super().__init__(lr)
        self.batch_size = batch_size

    def loss(self, batch):
        assert len(batch[0]) == self.batch_size
        return super().loss(batch)


def streams(batch_size=24):
    return [DataLoader(Batches(examples(0), size), batch_size=None) for size in (batch_size, 16)]


class OfDict(Data):
    def train_dataloader(self):
        one = super().train_dataloader()
        return {"one": one, "two": DataLoader(one.dataset, batch_size=32)}


class FromDict(Model):
    def training_step(self, batch, batch_idx):
        return self.loss(batch["one"]) + self.loss(batch["two"])


class Literal(Model):
    def __init__(self, learning_rate=None):
        super().__init__(0.03)
        del self.lr

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.03)


class Unvalidated(Model):
    validation_step = LightningModule.validation_step


class Scores(Model):
    def validation_step(self, batch, batch_idx):
        self.log_dict({"val/loss": self.loss(batch), "score": -self.loss(batch)})


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((), {"batch_size": 16, "lr": 0.1, "examples": 256, "rule": "linear", "mode": "min"}),
        ((Model, {"accumulate_grad_batches": 4}), {"batch_size": 64}),
        ((Model, None, Eights), {"batch_size": 16}),
        ((Model, None, Saved), {"batch_size": 24}),
        ((NoDefault,), {"batch_size": 16, "lr": None}),
        ((lambda trial: Model(trial.lr),), {"batch_size": 16, "lr": 0.1}),
        ((Literal,), {"lr": 0.03, "rule": "sqrt"}),
        ((Model, None, streams), {"batch_size": 24, "examples": None}),
        ((Model, None, lambda batch_size: streams(batch_size)), {"batch_size": None}),
        ((FromDict, None, OfDict), {"batch_size": 16, "examples": 256}),
        ((Scores,), {"metrics": ("score", "val/loss"), "metric": "val/loss"}),
        (
            (Scores, {"callbacks": [EarlyStopping("score", mode="max")]}),
            {"metric": "score", "mode": "max"},
        ),
    ],
)
def test_look_up(arguments, expected):
    found = look_up(recipe(*arguments))
    assert {name: getattr(found, name) for name in expected} == expected


@pytest.mark.parametrize(
    "arguments",
    [
        {"max_epochs": 5},
        {"max_epochs": 5, "max_steps": 70, "min_epochs": 9},
        {"max_epochs": 5, "limit_train_batches": 0.7},
        {"max_epochs": 5, "limit_train_batches": 10, "accumulate_grad_batches": 4},
        {"max_epochs": 5, "overfit_batches": 3},
    ],
)
@pytest.mark.filterwarnings("ignore:You requested to overfit")
def test_a_trial_is_as_long_as_the_users_own_training(arguments):
    plain = Trainer(**QUIET, **arguments)
    module = scheduled(one_cycle)
    plain.fit(module(), Data())
    of_project = recipe(module, arguments)
    found = look_up(of_project)
    steps = found.length(found.batch_size)
    of_trial = look(of_project, settings_of(found.batch_size, 0.1, steps)).trainer
    schedule = of_trial.lr_scheduler_configs[0].scheduler
    assert (steps, schedule.total_steps) == 2 * (plain.global_step,)


def test_data_and_module_alone_in_yaml():
    parts = {"device": "cpu", "trainer": None}
    parts |= {"data": {"_target_": "small.Data"}, "module": {"_target_": "small.Model"}}
    of_yaml = recipe_of(parts, OPTIONS)
    found = look_up(of_yaml)
    assert (found.batch_size, found.lr) == (16, 0.1)
    checks = preflight(of_yaml, (1, 16, 64), 0.1, None, LOSS)
    assert (checks.batch_size, checks.resumes, checks.seeds_differ) == (1, True, True)
    assert (checks.schedules, checks.lines) == ((), ())
    with pytest.raises(InputError, match=r"trainer.precision=16-mixed .* precision"):
        look_up(recipe_of(parts | {"trainer": {"precision": "16-mixed"}}, OPTIONS))
    # The schedule's length is of the smallest size, too.
    of_eights = recipe(scheduled(fixed(lr_scheduler.StepLR, 100)), data=Eights())
    checks = preflight(of_eights, (2, 16, 64), 0.1, None, LOSS)
    assert (checks.batch_size, checks.resumes) == (16, True)
    parts["module"] = {"_target_": "torch.nn.Linear", "in_features": 2, "out_features": 2}
    with pytest.raises(InputError, match="lr or learning_rate"):
        look_up(recipe_of(parts, OPTIONS))


def scheduled(make, interval="step"):
    """A module whose schedule ``make`` makes of the Trainer and an optimizer."""

    class Scheduled(Model):
        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=self.lr)
            schedule = make(self.trainer, optimizer)
            return [optimizer], [{"scheduler": schedule, "interval": interval}]

    return Scheduled


def one_cycle(trainer, optimizer):
    highest = optimizer.param_groups[0]["lr"]
    return lr_scheduler.OneCycleLR(optimizer, highest, trainer.estimated_stepping_batches)


def cosine(trainer, optimizer):
    return lr_scheduler.CosineAnnealingLR(optimizer, trainer.max_epochs)


def one_cycle_of_160(trainer, optimizer):
    return lr_scheduler.OneCycleLR(optimizer, optimizer.param_groups[0]["lr"], 160)


def fixed(kind, *arguments):
    return lambda trainer, optimizer: kind(optimizer, *arguments)


@pytest.mark.parametrize(
    ("make", "interval", "moves", "rate", "follows", "is_unmoved"),
    [
        (one_cycle, "step", 160, 1.0, True, False),
        # 0.04 + 0.96 (1 - cos(10 pi/47))/2: ten of the 47 moves from a 25th to all of its rate.
        (one_cycle, "epoch", 10, 0.1433, True, True),
        (cosine, "epoch", 10, 1.0, True, False),
        (fixed(lr_scheduler.StepLR, 3), "epoch", 10, 1.0, False, False),
    ],
)
def test_schedules_move_as_lightning_moves_them(make, interval, moves, rate, follows, is_unmoved):
    (schedule,) = schedules_of(recipe(scheduled(make, interval)), 16, 0.1, BUDGET)
    assert (schedule.steps, schedule.moves, schedule.interval) == (160, moves, interval)
    assert schedule.rate == pytest.approx(rate, rel=1e-3)
    assert (schedule.follows, schedule.is_unmoved) == (follows, is_unmoved)


def test_what_a_project_tells_where_options_change_it():
    literal = look_up(recipe(lambda: Literal(9.0), override_lr=True))
    assert (literal.lr, literal.rule) == (0.03, "sqrt")
    # The data's own batch size is what the network needs.
    data = DataLoader(examples(0), 32), DataLoader(examples(1), 64)
    of_size = recipe(OneSize, data=data, validation_batch_size="trial")
    assert look_up(of_size).batch_size == 32


@pytest.mark.parametrize(
    ("module", "data"), [(Unvalidated, Data()), (Model, (Data().train_dataloader(), None))]
)
def test_without_validation_a_project_needs_both(module, data):
    with pytest.raises(InputError, match=rf"{module.__name__} .*validation_step.*val_dataloader"):
        look_up(recipe(module, data=data))


@pytest.mark.parametrize(("epochs", "limit", "length"), [(5, 1.0, None), (5, 9, 45)])
def test_the_length_of_a_stream(epochs, limit, length):
    arguments = {"max_epochs": epochs, "limit_train_batches": limit}
    assert look_up(recipe(Model, arguments, streams)).length(24) == length


class SeedsItself(Model):
    def __init__(self, lr=0.1):
        torch.manual_seed(1)
        super().__init__(lr)


class HiddenState(Model):
    steps = 0

    def training_step(self, batch, batch_idx):
        self.steps += 1
        return self.loss(batch) / self.steps


class HiddenByEpoch(Model):
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr)
        self.hidden = lr_scheduler.MultiStepLR(optimizer, [5, 8])
        return optimizer

    def on_train_epoch_end(self):
        self.hidden.step()


class SavesAnObject(Model):
    def on_save_checkpoint(self, checkpoint):
        checkpoint["own"] = Path()


class NoRate(Model):
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


class Overwritten(NoRate):
    def on_train_batch_start(self, batch, batch_idx):
        self.optimizers().param_groups[0]["lr"] = 0.05


class RateByHook(NoRate):
    def on_train_batch_start(self, batch, batch_idx):
        self.optimizers().param_groups[0]["lr"] = self.lr


class Sum(Model):
    def training_step(self, batch, batch_idx):
        return len(batch[0]) * self.loss(batch)


class NeedsTwo(Model):
    def training_step(self, batch, batch_idx):
        if len(batch[0]) < 2:
            raise ValueError
        return self.loss(batch)


@pytest.mark.parametrize(
    ("module", "batch_size", "resumes", "seeds_differ", "lines"),
    [
        (SeedsItself, 1, True, False, 1),
        (HiddenState, 1, False, True, 1),
        (HiddenByEpoch, 1, False, True, 1),
        (SavesAnObject, 1, False, True, 1),
        (RateByHook, 1, True, True, 0),
        (NeedsTwo, 16, True, True, 0),
        (Sum, 1, True, True, 1),
        (scheduled(one_cycle, "epoch"), 1, True, True, 1),
        (scheduled(fixed(lr_scheduler.CosineAnnealingWarmRestarts, 20)), 1, True, True, 0),
    ],
)
def test_preflight(module, batch_size, resumes, seeds_differ, lines):
    checks = preflight(recipe(module), (1, 16, 64), 0.1, BUDGET, LOSS)
    assert checks.is_sum == (module is Sum)
    assert (checks.batch_size, checks.resumes) == (batch_size, resumes)
    assert (checks.seeds_differ, len(checks.lines)) == (seeds_differ, lines)


@pytest.mark.parametrize(
    ("module", "data", "options"),
    [
        (OneSize, Data(), {"validation_batch_size": "trial"}),
        (lambda: NoRate(), Data(), {"override_lr": True}),
        (Model, streams, {}),
    ],
)
def test_projects_of_every_kind_resume(module, data, options):
    checks = preflight(recipe(module, data=data, **options), (2, 16, 64), 0.1, BUDGET, LOSS)
    assert (checks.batch_size, checks.resumes, checks.lines) == (2, True, ())


@pytest.mark.parametrize("sizes", [(16, 16, 64), (2, 24, 64)])
def test_a_network_of_one_size_needs_an_option(sizes):
    """It fails at the largest size, or in its own last batch."""
    data = DataLoader(examples(0), sizes[1]), DataLoader(examples(1), sizes[1])
    target = Target("val/loss", 0.0, "min")
    with pytest.raises(InputError, match="validation_batch_size=trial"):
        preflight(recipe(OneSize, data=data), sizes, 0.1, BUDGET, target)


def test_the_rule_of_a_sum():
    of_study = {"target": "val/loss <= 0.1", "baseline": (16, 0.005), "budget": 9}
    options = options_from_python(workload="own", **of_study)
    options, _, _ = prepared(InProcess(), recipe(Sum), options, repr, None)
    assert options.scaling == "none"


def test_without_time_trials_are_not_resumed():
    checks = preflight(recipe(), (1, 16, 64), 0.1, BUDGET, LOSS, until=0.0)
    assert (checks.resumes, len(checks.lines)) == (False, 1)


@pytest.mark.parametrize(
    ("module", "target", "named"),
    [
        (Overwritten, LOSS, ["Overwritten", "lr=0.2"]),
        (NoRate, LOSS, ["rate", "NoRate", "0.05"]),
        (Scores, Target("val_loss", 0.1, "min"), ["val_loss", "score, val/loss"]),
        (Model, Target("val/loss", 50.0, "min"), ["untrained", "val/loss <= 50"]),
        # It raises past its end: a trial of batch size 1 has 2560 steps.
        (
            scheduled(one_cycle_of_160),
            LOSS,
            ["OneCycleLR", "total_steps=self.trainer.estimated_stepping_batches"],
        ),
        # It comes to zero: a trial of batch size 64 has 20 epochs.
        (
            scheduled(fixed(lr_scheduler.CosineAnnealingLR, 10), "epoch"),
            LOSS,
            ["CosineAnnealingLR", "epoch 10", "64", "T_max=self.trainer.max_epochs"],
        ),
    ],
)
def test_preflight_refuses(module, target, named):
    options = {"override_lr": module is Overwritten}
    with pytest.raises(InputError) as error:
        preflight(recipe(module, **options), (1, 16, 64), 0.1, BUDGET, target)
    assert "\n" not in str(error.value)
    assert all(word in str(error.value) for word in named)


@pytest.mark.parametrize(
    ("length", "seconds", "least", "most"),
    [
        (100, 1e3, 100, 100),
        (None, 1e-9, 1, 1),
        # It goes on while its time is not over.
        (None, 2.0, FIRST_PILOT + 1, math.inf),
    ],
)
def test_pilot(length, seconds, least, most):
    record = pilot(recipe(), 16, 0.1, seconds, LOSS, length)
    assert least <= record.steps <= most
    assert record.finite_history
