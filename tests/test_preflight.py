"""What projects tell of themselves, and what is seen before a study begins: a module each."""

import json
import math
from pathlib import Path

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping
from refusals import cases, refused
from small import EXAMPLES, QUIET, Batches, Data, Model, examples, scheduled
from torch.optim import lr_scheduler
from torch.utils.data import BatchSampler, DataLoader

from bstune.config import options_from_python
from bstune.core.errors import InputError
from bstune.core.records import Budget, Target
from bstune.recipe.hydra import recipe_of
from bstune.recipe.project import recipe_of_project
from bstune.recipe.recipe import settings_of
from bstune.study.prepare import prepare_project
from bstune.trial.look_up import look, look_up
from bstune.trial.preflight import FIRST_PILOT, pilot, preflight, schedules_of
from bstune.trial.worker import InProcess

OPTIONS = options_from_python(workload="own", device="cpu", threads=1)
LOSS = Target("val/loss", None, "min")
# Ten epochs of 16 batches of 16.
BUDGET = Budget(steps=80, examples=2560)


def of_name(name):
    """A module or data below."""
    return globals()[name]


def recipe(module=Model, trainer=None, data=None, **options):
    changed = OPTIONS.model_copy(update=options)
    return recipe_of_project(module, data or Data(), changed, trainer)


class Saved(Data):
    def __init__(self, batch_size=24):
        super().__init__()
        self.save_hyperparameters()


class InEights(BatchSampler):
    def __iter__(self):
        if self.batch_size % 8:
            raise ValueError(self.batch_size)
        return super().__iter__()


class Eights(Data):
    def train_dataloader(self):
        sampler = InEights(range(EXAMPLES), 16, drop_last=False)
        return DataLoader(examples(0), batch_sampler=sampler)


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


def of_rate(trial):
    return Model(trial.lr)


def of_size(batch_size):
    return streams(batch_size)


STOPS = {"callbacks": [EarlyStopping("score", mode="max")]}


@cases("""
module | trainer | data | expected
Model | null | Data | {batch_size: 16, lr: 0.1, examples: 256, rule: linear, mode: min}
Model | {accumulate_grad_batches: 4} | Data | {batch_size: 64}
Model | null | Eights | {batch_size: 16}
Model | null | Saved | {batch_size: 24}
NoDefault | null | Data | {batch_size: 16, lr: null}
of_rate | null | Data | {batch_size: 16, lr: 0.1}
Literal | null | Data | {lr: 0.03, rule: sqrt}
Model | null | streams | {batch_size: 24, examples: null}
Model | null | of_size | {batch_size: null}
FromDict | null | OfDict | {batch_size: 16, examples: 256}
Scores | null | Data | {metrics: [score, val/loss], metric: val/loss}
Scores | STOPS | Data | {metric: score, mode: max}
""")
def test_look_up(module, trainer, data, expected):
    given = STOPS if trainer == "STOPS" else trainer
    found = look_up(recipe(of_name(module), given, of_name(data)))
    told = json.loads(found.model_dump_json())
    assert {name: told[name] for name in expected} == expected


@cases("""
arguments
{max_epochs: 5}
{max_epochs: 5, max_steps: 70, min_epochs: 9}
{max_epochs: 5, limit_train_batches: 0.7}
{max_epochs: 5, limit_train_batches: 10, accumulate_grad_batches: 4}
{max_epochs: 5, overfit_batches: 3}
""")
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


@pytest.mark.parametrize("limit, length", [(1.0, None), (9, 45)])
def test_the_length_of_a_stream(limit, length):
    arguments = {"max_epochs": 5, "limit_train_batches": limit}
    assert look_up(recipe(Model, arguments, streams)).length(24) == length


def test_data_and_module_alone_in_yaml():
    parts = {"device": "cpu", "trainer": None}
    parts |= {"data": {"_target_": "small.Data"}, "module": {"_target_": "small.Model"}}
    found = look_up(recipe_of(parts, OPTIONS))
    assert (found.batch_size, found.lr) == (16, 0.1)
    for changes, words in (
        ({"trainer": {"precision": "16-mixed"}}, r"trainer.precision=16-mixed .* precision"),
        ({"module": {"_target_": "torch.nn.Identity"}}, "lr or learning_rate"),
    ):
        with pytest.raises(InputError, match=words):
            look_up(recipe_of(parts | changes, OPTIONS))


def one_cycle_of(optimizer, steps):
    return lr_scheduler.OneCycleLR(optimizer, optimizer.param_groups[0]["lr"], steps)


def one_cycle(trainer, optimizer):
    return one_cycle_of(optimizer, trainer.estimated_stepping_batches)


def cosine(trainer, optimizer):
    return lr_scheduler.CosineAnnealingLR(optimizer, trainer.max_epochs)


def fixed(kind, *arguments):
    return lambda trainer, optimizer: kind(optimizer, *arguments)


@pytest.mark.parametrize(
    "make, interval, expected",
    [
        # Moves, the share of the highest rate, whether it follows the length, and is unmoved.
        (one_cycle, "step", (160, 1.0, True, False)),
        # 0.04 + 0.96 (1 - cos(10 pi/47))/2: ten of the 47 moves from a 25th to all of its rate.
        (one_cycle, "epoch", (10, 0.1433, True, True)),
        (cosine, "epoch", (10, 1.0, True, False)),
        (fixed(lr_scheduler.StepLR, 3), "epoch", (10, 1.0, False, False)),
    ],
)
def test_schedules_move_as_lightning_moves_them(make, interval, expected):
    (found,) = schedules_of(recipe(scheduled(make, interval)), 16, 0.1, BUDGET)
    assert (found.steps, found.interval) == (160, interval)
    told = found.moves, found.rate, found.follows, found.is_unmoved
    assert told == pytest.approx(expected, rel=1e-3)


def test_what_a_project_tells_where_options_change_it():
    literal = look_up(recipe(lambda: Literal(9.0), override_lr=True))
    assert (literal.lr, literal.rule) == (0.03, "sqrt")
    # The data's own batch size is what the network needs.
    data = DataLoader(examples(0), 32), DataLoader(examples(1), 64)
    assert look_up(recipe(OneSize, data=data, validation_batch_size="trial")).batch_size == 32


@pytest.mark.parametrize(
    "module, data", [(Unvalidated, Data()), (Model, (Data().train_dataloader(), None))]
)
def test_without_validation_a_project_needs_both(module, data):
    with pytest.raises(InputError, match=rf"{module.__name__} .*validation_step.*val_dataloader"):
        look_up(recipe(module, data=data))


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


class LogsTraining(Model):
    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss


class NoRate(Model):
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


class NoOptimizer(Model):
    def configure_optimizers(self):
        return None


class Overwritten(NoRate):
    def on_train_batch_start(self, batch, batch_idx):
        self.optimizers().param_groups[0]["lr"] = 0.05


class RateByHook(NoRate):
    def on_train_batch_start(self, batch, batch_idx):
        self.optimizers().param_groups[0]["lr"] = self.lr


class Manual(Model):
    automatic_optimization = False


class Sum(Model):
    def training_step(self, batch, batch_idx):
        return len(batch[0]) * self.loss(batch)


ReadsTraining = scheduled(fixed(lr_scheduler.ReduceLROnPlateau), "epoch", "loss", LogsTraining)
Steps = scheduled(fixed(lr_scheduler.StepLR, 100))
Restarts = scheduled(fixed(lr_scheduler.CosineAnnealingWarmRestarts, 20))
CycleOfEpochs = scheduled(one_cycle, "epoch")
# It raises past its end: a trial of batch size 1 has 2560 steps.
CycleOf160 = scheduled(lambda trainer, optimizer: one_cycle_of(optimizer, 160))
# It comes to zero: a trial of batch size 64 has 20 epochs.
CosineOf10 = scheduled(fixed(lr_scheduler.CosineAnnealingLR, 10), "epoch")


@cases("""
module | data | options | resumes | lines
Model | Data | {} | true | 0
SeedsItself | Data | {} | true | 1
HiddenState | Data | {} | false | 1
HiddenByEpoch | Data | {} | false | 1
SavesAnObject | Data | {} | false | 1
ReadsTraining | Data | {} | false | 1
RateByHook | Data | {} | true | 0
Sum | Data | {} | true | 1
# The schedule's length is of the smallest size, too.
Steps | Eights | {} | true | 0
CycleOfEpochs | Data | {} | true | 1
Restarts | Data | {} | true | 0
OneSize | Data | {validation_batch_size: trial} | true | 0
NoRate | Data | {override_lr: true} | true | 0
Model | streams | {} | true | 0
""")
def test_preflight(module, data, options, resumes, lines):
    of_project = recipe(of_name(module), data=of_name(data), **options)
    checks = preflight(of_project, (1, 16, 64), 0.1, BUDGET, LOSS)
    assert checks.is_sum == (module == "Sum")
    assert (checks.resumes, len(checks.lines)) == (resumes, lines)


def test_the_rule_of_a_sum():
    of_study = {"target": "val/loss <= 0.1", "baseline": (16, 0.005), "budget": 9}
    options = options_from_python(workload="own", **of_study)
    options, _, _ = prepare_project(InProcess(), recipe(Sum), options, repr, None)
    assert options.scaling == "none"


def test_without_time_trials_are_not_resumed():
    checks = preflight(recipe(), (1, 16, 64), 0.1, BUDGET, LOSS, until=0.0)
    assert (checks.resumes, len(checks.lines)) == (False, 1)


@cases("""
module | target | words
Overwritten | min val/loss | Overwritten, lr=0.2
Manual | min val/loss | Manual, noise_scale
NoRate | min val/loss | rate, NoRate, 0.05
NoOptimizer | min val/loss | rate, NoOptimizer
Scores | val_loss <= 0.1 | val_loss, score, val/loss
Model | val/loss <= 50 | untrained, val/loss <= 50
CycleOf160 | min val/loss | OneCycleLR, total_steps=self.trainer.estimated_stepping_batches
CosineOf10 | min val/loss | CosineAnnealingLR, epoch 10, 64, T_max=self.trainer.max_epochs
""")
def test_preflight_refuses(module, target, words):
    options = {"override_lr": module == "Overwritten", "noise_scale": module == "Manual"}
    of_project = recipe(of_name(module), **options)
    with refused(words):
        preflight(of_project, (1, 16, 64), 0.1, BUDGET, Target.parse(target))


# It fails at the largest size, or in its own last batch.
@pytest.mark.parametrize("sizes", [(16, 16, 64), (2, 24, 64)])
def test_a_network_of_one_size_needs_an_option(sizes):
    data = DataLoader(examples(0), sizes[1]), DataLoader(examples(1), sizes[1])
    with refused("validation_batch_size=trial"):
        preflight(recipe(OneSize, data=data), sizes, 0.1, BUDGET, LOSS)


# It goes on while its time is not over.
PILOTS = [(100, 1e3, 100, 100), (None, 1e-9, 1, 1), (None, 1.0, FIRST_PILOT + 1, math.inf)]


@pytest.mark.parametrize("length, seconds, least, most", PILOTS)
def test_pilot(length, seconds, least, most):
    record = pilot(recipe(), 16, 0.1, seconds, LOSS, length)
    assert least <= record.steps <= most
    assert record.finite_history
