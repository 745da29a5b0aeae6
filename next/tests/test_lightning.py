"""Trials by Lightning: they train as a plain Trainer does, and end as the target says."""

import math
import re

import pytest
import pytorch_lightning
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    EarlyStopping,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ModelCheckpoint,
    Timer,
)
from lightning.pytorch.plugins import MixedPrecision
from search_records import spec
from small import QUIET, Batches, trained
from torch.nn.functional import cross_entropy
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset

from bstune.core.errors import InputError
from bstune.core.evaluation_schedule import next_evaluation
from bstune.core.records import Target
from bstune.trial.batches import rebatch, seed_everything
from bstune.trial.lightning import StopAtTarget
from bstune.trial.trial import Trial

X = torch.randn(200, 10, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0).long()
TRAIN = TensorDataset(X, Y)
NEVER = Target("val/loss", 0.0, "min")


def train_loader():
    return DataLoader(TRAIN, 8, shuffle=True)


def validation_loader():
    return DataLoader(TRAIN, 50)


class Steps:
    """A module of either Lightning package."""

    def __init__(self, trial):
        super().__init__()
        self.lr = trial.lr
        self.net = torch.nn.Sequential(
            torch.nn.Linear(10, 16),
            torch.nn.BatchNorm1d(16),
            torch.nn.Dropout(),
            torch.nn.Linear(16, 2),
        )
        self.validated = []
        self.seen = {}

    def loss(self, batch):
        return cross_entropy(self.net(batch[0]), batch[1])

    def training_step(self, batch, batch_idx):
        return self.loss(batch)

    def validation_step(self, batch, batch_idx):
        torch.rand(3)
        self.validated.append(len(batch[0]))
        self.log("val/loss", self.loss(batch))

    def configure_optimizers(self):
        trainer = self.trainer
        lengths = trainer.max_steps, trainer.max_epochs, trainer.estimated_stepping_batches
        self.seen["lengths"] = lengths
        return torch.optim.SGD(self.parameters(), self.lr, momentum=0.9)


class Module(Steps, LightningModule):
    pass


class OtherPackagesModule(Steps, pytorch_lightning.LightningModule):
    pass


class Logging(Module):
    def on_train_start(self):
        self.logger.experiment.add_text("about", "anything")


class Unstable(Module):
    def validation_step(self, batch, batch_idx):
        self.log("val/loss", torch.tensor(math.nan))


class Data(LightningDataModule):
    """Its hook on batches, and its own batch size, stay in use."""

    def setup(self, stage):
        self.data = TRAIN
        self.calls = []

    def train_dataloader(self):
        self.calls.append("train")
        return DataLoader(self.data, 8, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.data, 64)

    def on_after_batch_transfer(self, batch, dataloader_idx):
        self.calls.append(len(batch[0]))
        return batch


def trial_of(target=NEVER, total_steps=60, **changes):
    """A trial of batch size 20 and lr 0.05; of 60 steps, unless changed."""
    places = {name: changes.pop(name) for name in ("save_to", "until") if name in changes}
    plain = {"batch_size": 20, "lr": 0.05, "seed": 1, "max_steps": 60}
    return Trial(spec(**plain | changes), target, total_steps=total_steps, **places)


def loaders(trial):
    return train_loader(), validation_loader()


def run(trial, build=Module, data=loaders, **options):
    """Train a trial; its record and its module."""
    return trained(build, data, trial, **options)


def test_a_trial_trains_as_a_plain_trainer_does():
    trial = trial_of(total_steps=120, max_steps=90)
    record, module = run(trial)
    assert [step for step, _ in record.history] == [40, 80, 90]
    seed_everything(1)
    plain = Module(trial)
    loader = rebatch(train_loader(), 20, seed=1)
    Trainer(
        accelerator="cpu",
        max_steps=90,
        max_epochs=12,
        limit_val_batches=0,
        **QUIET,
    ).fit(plain, loader, validation_loader())
    for name, tensor in plain.state_dict().items():
        assert torch.equal(tensor, module.state_dict()[name])


@pytest.mark.parametrize(
    ("first", "limit", "examples"), [(5, 0, 200), (None, 1, 50), (None, 0.5, 100)]
)
def test_evaluations_come_where_the_rule_says(first, limit, examples):
    trial = trial_of(total_steps=400, max_steps=400, first_evaluation=first)
    arguments = {"limit_val_batches": limit}
    record, _ = run(trial, trainer=lambda trial: arguments)
    expected = []
    while not expected or expected[-1][0] < 400:
        due = min(400, next_evaluation(expected, NEVER, 20, examples, first=first))
        expected.append((due, dict(record.history)[due]))
    assert record.history == tuple(expected)
    assert record.seconds_per_step > 0.0
    assert record.train_seconds >= 400 * record.seconds_per_step / 3


# The target's goal, the module, max_steps, total_steps, options -> status.
ENDS = {
    "reached": (0.6, Module, 400, 400, {}, "reached"),
    "missed": (0.0, Module, 60, 60, {}, "missed"),
    "pruned": (0.0, Module, 30, 60, {}, "pruned"),
    "its time is over": (0.0, Module, 60, 60, {"until": 0.0}, "pruned"),
    "diverged": (0.0, Unstable, 60, 60, {}, "diverged"),
    "the other package": (0.0, OtherPackagesModule, 30, 60, {}, "pruned"),
    "a logger in use": (0.0, Logging, 30, 60, {}, "pruned"),
}


@pytest.mark.parametrize("case", ENDS)
def test_a_fit_ends_with_its_trial(case, tmp_path):
    goal, build, max_steps, total_steps, options, status = ENDS[case]
    save_to = tmp_path / "saved" / "0.ckpt"
    target = Target("val/loss", goal, "min")
    trial = trial_of(target, total_steps, max_steps=max_steps, save_to=save_to, **options)
    progress = []
    trial.on_progress = lambda: progress.append(trial.steps)
    record, module = run(trial, build)
    assert record.status == status, record.message
    expected = {"missed": 60, "pruned": 1 if options else 30}
    assert record.steps == expected.get(status, record.steps)
    assert save_to.exists() == (status == "pruned")
    assert len(progress) >= record.steps
    assert module.seen["lengths"] == (total_steps, total_steps / 10, total_steps)


def test_a_data_module_keeps_its_hooks_and_its_validation():
    data = Data()
    record, module = run(trial_of(max_steps=20), data=lambda trial: data)
    assert record.steps == 20
    assert data.calls.count("train") == 1
    assert data.calls.count(20) == 20
    assert set(module.validated) == {64, 200 - 3 * 64}


@pytest.mark.parametrize(("batch", "status"), [(0, "refused"), (3, "failed")])
def test_a_size_is_refused_only_before_the_first_step(batch, status):
    class Raises(Module):
        def training_step(self, batch_of_data, batch_idx):
            if batch_idx == batch:
                raise ValueError("a multiple of 8")
            return super().training_step(batch_of_data, batch_idx)

    record, _ = run(trial_of(), build=Raises)
    assert record.status == status
    assert re.search(r"a multiple of 8 \(test_lightning\.py:\d+\)", record.message)


def test_a_module_that_further_values_do_not_build_blames_no_size():
    def build(trial):
        raise ValueError("heads must divide 16")

    assert run(trial_of(values={"heads": 3}), build)[0].status == "failed"


class Seen(Callback):
    def __init__(self):
        self.batches = 0

    def on_train_batch_end(self, *arguments):
        self.batches += 1


def test_the_users_arguments_stay_but_for_what_stops_prints_and_writes(tmp_path):
    seen = Seen()
    arguments = {
        "callbacks": [
            seen,
            EarlyStopping("val/loss", patience=0, min_delta=9.0, check_on_train_epoch_end=False),
            ModelCheckpoint(tmp_path / "best"),
            Timer("00:00:00:00"),
            LearningRateFinder(),
            BatchSizeFinder(),
            GradientAccumulationScheduler({2: 4}),
        ],
        "gradient_clip_val": 0.5,
        "max_epochs": 1,
        "min_epochs": 99,
        "fast_dev_run": True,
        "barebones": True,
        "accumulate_grad_batches": 4,
        "default_root_dir": tmp_path,
    }
    record, module = run(trial_of(max_steps=50), trainer=lambda trial: arguments)
    assert (record.steps, seen.batches, module.lr) == (50, 50, 0.05)
    assert module.trainer.gradient_clip_val == 0.5
    assert list(tmp_path.iterdir()) == []


class Smooth(Module):
    """Without layers that see a batch as a whole, or random numbers."""

    def __init__(self, trial):
        super().__init__(trial)
        self.net = torch.nn.Linear(10, 2)


def test_micro_batches_give_the_gradient_of_the_whole_batch():
    def run_with(**options):
        seen = Seen()
        record, module = run(
            trial_of(),
            Smooth,
            trainer=lambda trial: {"callbacks": [seen]},
            **options,
        )
        return record, module.net.weight, seen.batches

    whole, weights, _ = run_with()
    record, accumulated, batches = run_with(micro_batch_size=8)
    assert (record.steps, batches) == (60, 60 * 3)
    assert [step for step, _ in record.history] == [step for step, _ in whole.history]
    torch.testing.assert_close(accumulated, weights, rtol=1e-5, atol=1e-6)


def test_steps_that_a_scaler_skips_are_none():
    """A schedule that ends with the trial stays at its place, else OneCycleLR would raise."""

    class OneCycle(Smooth):
        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=61)
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    def arguments(trial):
        plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", 2.0**30))
        return {"plugins": [plugin], "callbacks": [seen]}

    seen = Seen()
    record, module = run(trial_of(), OneCycle, trainer=arguments, precision=None)
    assert (record.status, record.steps) == ("missed", 60)
    assert seen.batches > 60
    assert module.lr_schedulers().last_epoch == 60


# Options of the recipe, the metric, and what the error names.
ERRORS = {
    "the metric is not logged": ({}, "val/error", "val/loss"),
    "no validation": ({"data": lambda trial: (train_loader(), None)}, "val/loss", "validation"),
    "no loader": ({"data": lambda trial: (range(9), None)}, "val/loss", "lambda batch_size"),
    "float16 on a CPU": ({"precision": "16-mixed"}, "val/loss", "bf16-mixed"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors_say_what_to_do(case):
    options, metric, words = ERRORS[case]
    with pytest.raises(InputError, match=words):
        run(trial_of(Target(metric, 0.0, "min")), **options)


STREAMED = TensorDataset(X[:190], Y[:190])
KINDS = {
    "length": lambda size: (train_loader(), validation_loader()),
    "stream": lambda size: (
        DataLoader(Batches(STREAMED, size), None),
        validation_loader(),
    ),
    "stream to validate on": lambda size: (train_loader(), DataLoader(Batches(STREAMED, 50), None)),
    "several": lambda size: (
        {"a": train_loader(), "b": train_loader(), "c": train_loader()},
        2 * [validation_loader()],
    ),
}


class OfEachKind(Smooth):
    calls = 0

    def training_step(self, batch, batch_idx):
        self.calls += 1
        return self.loss(batch if len(batch) == 2 else batch["a"])

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.log("val/loss", self.loss(batch), add_dataloader_idx=dataloader_idx > 0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_is_a_batch_of_whatever_kind(kind):
    record, module = run(
        trial_of(),
        OfEachKind,
        lambda trial: KINDS[kind](trial.batch_size),
        data_follows=True,
        trainer=lambda trial: {"max_epochs": 3},
    )
    assert module.seen["lengths"][1:] == (3 if kind == "stream" else 6, 60)
    assert (record.status, record.steps, module.calls) == ("missed", 60, 60)
    examples = {"several": 400, "stream to validate on": 190}.get(kind, 200)
    assert record.history[0][0] == min(60, next_evaluation([], NEVER, 20, examples))


def in_turn(optimizer):
    parts = lr_scheduler.ConstantLR(optimizer, 0.5, 9), lr_scheduler.ExponentialLR(optimizer, 0.9)
    return lr_scheduler.SequentialLR(optimizer, list(parts), [9])


@pytest.mark.parametrize(
    "schedule",
    [
        in_turn,
        lambda optimizer: lr_scheduler.OneCycleLR(optimizer, [0.2, 0.02], 60),
        lambda optimizer: lr_scheduler.CyclicLR(optimizer, [0.05, 0.005], [0.2, 0.02], 9),
    ],
)
def test_a_rate_that_is_put_into_the_groups_is_as_one_that_was_written_there(schedule):
    """The groups' ratio to the first one stays; a factor of two is exact."""

    class Literal(Smooth):
        def configure_optimizers(self):
            groups = [{"params": [self.net.weight]}, {"params": [self.net.bias], "lr": 0.005}]
            optimizer = torch.optim.SGD(groups, 0.05, momentum=0.9)
            own = schedule(optimizer)
            return [optimizer], [{"scheduler": own, "interval": "step"}]

    seen = {}
    highest = 0.2 if "OneCycle" in str(schedule.__code__.co_names) else 0.05
    for factor in (1.0, 2.0):
        trial = trial_of(lr=factor * highest)
        _, module = run(trial, Literal, override_lr=True)
        groups = module.optimizers().param_groups
        seen[factor] = [group["lr"] for group in groups], module.lr_schedulers().get_last_lr()
    rates, last = seen[1.0]
    doubled = [2.0 * rate for rate in rates]
    assert rates == last == pytest.approx([rates[0], rates[0] / 10])
    assert seen[2.0] == (doubled, doubled)


def test_manual_optimization_does_not_accumulate():
    class Manual(Smooth):
        automatic_optimization = False

    with pytest.raises(InputError, match="Manual"):
        run(trial_of(), Manual, micro_batch_size=8)


def test_the_call_back_serves_a_trainer_of_ones_own():
    trial = trial_of(max_steps=7)
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=99,
        accumulate_grad_batches=2,
        callbacks=[StopAtTarget(trial)],
        **QUIET,
        num_sanity_val_steps=2,
    )
    trainer.fit(Module(trial), DataLoader(TRAIN, 10, shuffle=True), validation_loader())
    record = trial.record()
    assert (record.status, record.steps, trainer.global_step) == ("pruned", 7, 7)
