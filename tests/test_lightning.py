"""Trials by Lightning: they train as a plain Trainer does, and end as the target says."""

import math
import re
from pathlib import Path

import pytest
import small
import torch
from lightning.pytorch import Callback, Trainer, callbacks
from lightning.pytorch.plugins import MixedPrecision
from refusals import cases
from search_records import spec
from small import EXAMPLES, QUIET, Batches, Data, Model, examples, scheduled, trained
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset

from bstune.core.errors import InputError
from bstune.core.evaluation_schedule import next_evaluation
from bstune.core.records import Target
from bstune.trial.batches import rebatch, seed_everything
from bstune.trial.trial import Trial

NEVER = Target("val/loss", 0.0, "min")
# Ten steps of 20 an epoch.
TRAIN = TensorDataset(*(tensor[:200] for tensor in examples(0).tensors))
ROWS = TensorDataset(*(tensor[:190] for tensor in TRAIN.tensors))


def loader(batch_size=8, dataset=TRAIN):
    return DataLoader(dataset, batch_size, shuffle=batch_size < 50)


class Smooth(Model):
    """It keeps the sizes that it validates on, and the lengths that its Trainer tells."""

    def __init__(self, trial):
        super().__init__(trial.lr)
        self.validated = []

    def validation_step(self, batch, batch_idx):
        self.validated.append(len(batch[0]))
        super().validation_step(batch, batch_idx)

    def configure_optimizers(self):
        trainer = self.trainer
        self.lengths = trainer.max_steps, trainer.max_epochs, trainer.estimated_stepping_batches
        return super().configure_optimizers()


class Module(Smooth):
    """Its layers see a batch as a whole, and take random numbers, as evaluations do."""

    def __init__(self, trial):
        super().__init__(trial)
        layers = nn.Linear(10, 16), nn.BatchNorm1d(16), nn.Dropout(), nn.Linear(16, 1)
        self.linear = nn.Sequential(*layers)

    def validation_step(self, batch, batch_idx):
        torch.rand(3)
        super().validation_step(batch, batch_idx)


class Logging(Module):
    def on_train_start(self):
        self.logger.experiment.add_text("about", "anything")


class Unstable(Module):
    def validation_step(self, batch, batch_idx):
        self.log("val/loss", torch.tensor(math.nan))


def of_other_package(trial):
    """The model of small.py, of the package ``pytorch_lightning``."""
    source = Path(small.__file__).read_text().replace("lightning.pytorch", "pytorch_lightning")
    names = {"__name__": "other"}
    exec(source, names)  # noqa: S102
    return names["Model"](trial.lr)


def run(trial, build=Module, data=lambda trial: (loader(), loader(50)), **options):
    """Train a trial; its record and its module."""
    return trained(build, data, trial, **options)


def trial_of(target=NEVER, total_steps=60, **changes):
    """A trial of batch size 20 and lr 0.05; of 60 steps, unless changed."""
    places = {name: changes.pop(name) for name in ("save_to", "until") if name in changes}
    plain = {"batch_size": 20, "lr": 0.05, "seed": 1, "max_steps": 60}
    return Trial(spec(**plain | changes), target, total_steps=total_steps, **places)


def test_a_trial_trains_as_a_plain_trainer_does():
    trial = trial_of(total_steps=120, max_steps=90)
    record, module = run(trial)
    assert [step for step, _ in record.history] == [40, 80, 90]
    seed_everything(1)
    plain = Module(trial)
    trainer = Trainer(max_steps=90, max_epochs=12, accelerator="cpu", limit_val_batches=0, **QUIET)
    trainer.fit(plain, rebatch(loader(), 20, seed=1), loader(50))
    for name, tensor in plain.state_dict().items():
        assert torch.equal(tensor, module.state_dict()[name])


@cases("""
first | limit | examples
5 | 0 | 200
null | 1 | 50
null | 0.5 | 100
""")
def test_evaluations_come_where_the_rule_says(first, limit, examples):
    trial = trial_of(total_steps=200, max_steps=200, first_evaluation=first)
    record, _ = run(trial, trainer=lambda trial: {"limit_val_batches": limit})
    for number, (step, _) in enumerate(record.history):
        due = next_evaluation(record.history[:number], NEVER, 20, examples, first=first)
        assert step == min(200, due)
    assert record.steps == 200
    assert record.train_seconds >= 200 * record.seconds_per_step / 3 > 0.0


# The module, the target's goal, the last step, when its time is over -> status, steps.
@cases("""
build | goal | max_steps | until | status | steps
Module | 0.6 | 60 | null | reached | 40
Module | 0.0 | 60 | null | missed | 60
Module | 0.0 | 30 | null | pruned | 30
Module | 0.0 | 60 | 0.0 | pruned | 1
Unstable | 0.0 | 60 | null | diverged | 40
of_other_package | 0.0 | 30 | null | pruned | 30
Logging | 0.0 | 30 | null | pruned | 30
""")
def test_a_fit_ends_with_its_trial(build, goal, max_steps, until, status, steps, tmp_path):
    save_to = tmp_path / "saved" / "0.ckpt"
    target = Target("val/loss", goal, "min")
    trial = trial_of(target, max_steps=max_steps, save_to=save_to, until=until)
    progress = []
    trial.on_progress = lambda: progress.append(trial.steps)
    record, module = run(trial, globals()[build])
    assert (record.status, record.steps) == (status, steps), record.message
    assert save_to.exists() == (status == "pruned")
    assert len(progress) >= record.steps
    assert getattr(module, "lengths", (60, 6, 60)) == (60, 6, 60)


class Hooked(Data):
    """Its hook on batches, and its own batch size, stay in use."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def on_after_batch_transfer(self, batch, dataloader_idx):
        self.calls.append(len(batch[0]))
        return batch


def test_a_data_module_keeps_its_hooks_and_its_validation():
    data = Hooked()
    record, module = run(trial_of(max_steps=20), data=lambda trial: data)
    assert (record.steps, data.calls.count(20)) == (20, 20)
    assert set(module.validated) == {EXAMPLES}


@pytest.mark.parametrize("batch, status", [(0, "refused"), (3, "failed")])
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
    others = [
        callbacks.EarlyStopping("val/loss", 9.0, 0, check_on_train_epoch_end=False),
        callbacks.Timer("00:00:00:00"),
        callbacks.LearningRateFinder(),
        callbacks.BatchSizeFinder(),
        callbacks.ModelCheckpoint(tmp_path / "best"),
        callbacks.GradientAccumulationScheduler({2: 4}),
    ]
    arguments = {"callbacks": [seen, *others], "gradient_clip_val": 0.5}
    arguments |= {"max_epochs": 1, "min_epochs": 99, "fast_dev_run": True, "barebones": True}
    arguments |= {"accumulate_grad_batches": 4, "default_root_dir": tmp_path}
    record, module = run(trial_of(max_steps=50), trainer=lambda trial: arguments)
    assert (record.steps, seen.batches, module.lr) == (50, 50, 0.05)
    assert module.trainer.gradient_clip_val == 0.5
    assert list(tmp_path.iterdir()) == []


def test_micro_batches_give_the_gradient_of_the_whole_batch():
    seen = Seen()
    whole, plain = run(trial_of(), Smooth)
    own = {"micro_batch_size": 8, "trainer": lambda trial: {"callbacks": [seen]}}
    record, module = run(trial_of(), Smooth, **own)
    assert (record.steps, seen.batches) == (60, 60 * 3)
    assert [step for step, _ in record.history] == [step for step, _ in whole.history]
    torch.testing.assert_close(module.linear.weight, plain.linear.weight, rtol=1e-5, atol=1e-6)


def test_steps_that_a_scaler_skips_are_none():
    """A schedule that ends with the trial stays at its place, else OneCycleLR would raise."""

    def one_cycle(trainer, optimizer):
        return lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=61)

    def arguments(trial):
        plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", 2.0**30))
        return {"plugins": [plugin], "callbacks": [seen]}

    seen = Seen()
    build = scheduled(one_cycle, base=Smooth)
    record, module = run(trial_of(), build, trainer=arguments, precision=None)
    assert (record.status, record.steps) == ("missed", 60)
    assert seen.batches > 60
    assert module.lr_schedulers().last_epoch == 60


# Options of the recipe, the metric, and what the error names.
ERRORS = {
    "the metric is not logged": ({}, "val/error", "val/loss"),
    "no validation": ({"data": lambda trial: (loader(), None)}, "val/loss", "validation"),
    "no loader": ({"data": lambda trial: (range(9), None)}, "val/loss", "lambda batch_size"),
    "float16 on a CPU": ({"precision": "16-mixed"}, "val/loss", "bf16-mixed"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors_say_what_to_do(case):
    options, metric, words = ERRORS[case]
    with pytest.raises(InputError, match=words):
        run(trial_of(Target(metric, 0.0, "min")), **options)


KINDS = {
    "length": lambda size: (loader(), loader(50)),
    "stream": lambda size: (DataLoader(Batches(ROWS, size), None), loader(50)),
    "stream to validate on": lambda size: (loader(), DataLoader(Batches(ROWS, 50), None)),
    "several": lambda size: (dict.fromkeys("abc", loader()), 2 * [loader(50)]),
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
    assert module.lengths[1:] == (3 if kind == "stream" else 6, 60)
    assert (record.status, record.steps, module.calls) == ("missed", 60, 60)
    examples = {"several": 400, "stream to validate on": 190}.get(kind, 200)
    assert record.history[0][0] == min(60, next_evaluation([], NEVER, 20, examples))


def in_turn(optimizer):
    parts = lr_scheduler.ConstantLR(optimizer, 0.5, 9), lr_scheduler.ExponentialLR(optimizer, 0.9)
    return lr_scheduler.SequentialLR(optimizer, list(parts), [9])


@pytest.mark.parametrize(
    "highest, schedule",
    [
        (0.05, in_turn),
        (0.2, lambda optimizer: lr_scheduler.OneCycleLR(optimizer, [0.2, 0.02], 60)),
        (0.05, lambda optimizer: lr_scheduler.CyclicLR(optimizer, [0.05, 0.005], [0.2, 0.02], 9)),
    ],
)
def test_a_rate_that_is_put_into_the_groups_is_as_one_that_was_written_there(highest, schedule):
    """The groups' ratio to the first one stays; a factor of two is exact."""

    class Literal(Smooth):
        def configure_optimizers(self):
            weight, bias = self.linear.parameters()
            groups = [{"params": [weight]}, {"params": [bias], "lr": 0.005}]
            return torch.optim.SGD(groups, 0.05, momentum=0.9)

    build = scheduled(lambda trainer, optimizer: schedule(optimizer), base=Literal)
    seen = []
    for lr in (highest, 2.0 * highest):
        _, module = run(trial_of(lr=lr), build, override_lr=True)
        rates = [group["lr"] for group in module.optimizers().param_groups]
        assert rates == module.lr_schedulers().get_last_lr()
        seen.append(rates)
    (first, second), doubled = seen
    assert second == pytest.approx(first / 10)
    assert doubled == [2.0 * first, 2.0 * second]


def test_manual_optimization_does_not_accumulate():
    class Manual(Smooth):
        automatic_optimization = False

    with pytest.raises(InputError, match="Manual"):
        run(trial_of(), Manual, micro_batch_size=8)
