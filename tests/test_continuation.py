"""Where a trial that goes on is not the one that was never stopped, it starts afresh, and a line names what it lost."""

import random
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import lightning
import numpy as np
import pytest
import torch
from builders import loaded, prepared_study
from learners import learner, stream, validation
from lightning.pytorch import Callback, seed_everything
from test_checkpoint import CASES, protocol_of
from test_preflight import DATA, SPACE, Lit, fly
from toolbox import trials_of
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset
from torchmetrics import MaxMetric

from bstune.core.records import TrialSpec
from bstune.trial.checks import short_runs
from bstune.trial.checks.attributes import Attribute
from bstune.trial.checks.continuation import LEARNING_RATES, WEIGHTS, Course, LostState, lost_state
from bstune.trial.checks.preflight import preflight
from bstune.trial.loop import Workload

PROJECTS = Path(__file__).parent / "projects"

# Modules that keep what their checkpoint does not hold


# Each of these loses something when it is loaded, and another kind of it.
class Counts(Lit):
    """Its loss depends on a number of its own."""

    steps = 0

    def training_step(self, batch, batch_idx):
        self.steps += 1
        return super().training_step(batch, batch_idx) / self.steps


class CountsInAnObject(Lit):
    def __init__(self, spec):
        super().__init__(spec)
        self.progress = {"phases": [SimpleNamespace(steps=0)]}

    def training_step(self, batch, batch_idx):
        self.progress["phases"][0].steps += 1
        return super().training_step(batch, batch_idx) / self.progress["phases"][0].steps


class CountsInALayer(Lit):
    """The counter is a buffer that its layer leaves out of its state."""

    def __init__(self, spec):
        super().__init__(spec)
        self.net[0].register_buffer("steps", torch.zeros(()), persistent=False)

    def training_step(self, batch, batch_idx):
        self.net[0].steps += 1
        return super().training_step(batch, batch_idx) / self.net[0].steps


class OwnNoise(Lit):
    """Its noise is from a generator of its own."""

    def __init__(self, spec):
        super().__init__(spec)
        self.noise = torch.Generator().manual_seed(7)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return super().training_step((x + torch.randn(x.shape, generator=self.noise), y), batch_idx)


class OwnNumpyNoise(Lit):
    def __init__(self, spec):
        super().__init__(spec)
        self.noise = np.random.default_rng(7)

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * self.noise.random()


class PlainTensor(Lit):
    """Its loss is divided by a running mean that is a plain attribute."""

    def __init__(self, spec):
        super().__init__(spec)
        self.mean = [torch.ones(())]

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.mean[0] = 0.5 * self.mean[0] + 0.5 * loss.detach()
        return loss / self.mean[0]


class OwnSchedule(Lit):
    """A warm-up that the module steps, beside the optimizer that it returns."""

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        self.warmup = LambdaLR(optimizer, lambda step: (step + 1) / 100)
        return optimizer

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        optimizer.step(closure=optimizer_closure)
        self.warmup.step()


class OwnScheduleAfterBatches(OwnSchedule):
    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        optimizer.step(closure=optimizer_closure)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.warmup.step()


class PlainAverage(Lit):
    """It is evaluated by an average of its weights that is no layer of it."""

    def on_fit_start(self):
        self.average = {"net": deepcopy(self.net)}

    def on_train_batch_end(self, outputs, batch, batch_idx):
        for slow, fast in zip(self.average["net"].parameters(), self.net.parameters(), strict=True):
            slow.data.lerp_(fast.data, 0.5)

    def validation_step(self, batch, batch_idx):
        loss = nn.functional.cross_entropy(self.average["net"](batch[0]), batch[1])
        self.log("val_loss", loss, batch_size=len(batch[0]))


class Decays(Callback):
    steps = 0

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.steps += 1
        for group in trainer.optimizers[0].param_groups:
            group["lr"] = pl_module.lr / self.steps


class DecaysFromItsState(Decays):
    """Its state is in the checkpoint, and is not applied."""

    def state_dict(self):
        return {"steps": self.steps}


class DecaysWithASchedule(Lit):
    """It returns a schedule, beside which the call-back's state is lost."""

    def configure_callbacks(self):
        return DecaysFromItsState()

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        return [optimizer], [LambdaLR(optimizer, lambda step: 1.0)]


class DecaysInACallback(Lit):
    def configure_callbacks(self):
        return Decays()


def look_at(kind, **options):
    """Try a few steps of a module that keeps what it is given of its trial: the rate and the batch size."""
    values = ("lr", "batch_size")

    def build(spec):
        return kind(SimpleNamespace(**{name: getattr(spec, name) for name in values}))

    return fly(build, **options)


# What is told apart of attributes is tested below, without a training.
@pytest.mark.parametrize(
    ("kind", "named"),
    # What the line names: the attribute, by its path, and its type.
    [
        (Counts, "steps (int)"),
        pytest.param(CountsInAnObject, "progress (dict)", marks=pytest.mark.slow),
        (CountsInALayer, "net.0.steps (Tensor)"),
        (OwnNoise, "noise (Generator)"),
        pytest.param(OwnNumpyNoise, "noise (Generator)", marks=pytest.mark.slow),
        (PlainTensor, "mean (list)"),
        (OwnSchedule, "warmup (LambdaLR)"),
        pytest.param(OwnScheduleAfterBatches, "warmup (LambdaLR)", marks=pytest.mark.slow),
        pytest.param(PlainAverage, "average (dict)", marks=pytest.mark.slow),
        (DecaysInACallback, "Decays.steps (int)"),
    ],
)
def test_what_a_checkpoint_does_not_hold_is_named_and_no_trial_is_continued(kind, named):
    found = look_at(kind)
    assert not found.continues
    (note,) = found.notes
    # A single line, whatever the loss has changed.
    assert f"the checkpoint does not hold {named};" in note


def test_a_call_backs_state_is_in_the_checkpoint_and_may_still_not_be_restored():
    found = look_at(DecaysWithASchedule)
    assert not found.continues
    (note,) = found.notes
    assert "holds the state of DecaysFromItsState" in note
    assert "not restore DecaysFromItsState.steps (int); " in note
    assert "does not hold" not in note


@pytest.mark.parametrize("has_schedule", [False, True])
def test_a_schedule_is_advised_only_where_none_is_returned(has_schedule):
    lost = LostState(2, (WEIGHTS,), {"steps": Attribute("int", 2, "")}, has_schedule)
    assert ("return a schedule" in lost.text("Net")) == (not has_schedule)


def test_where_no_trial_goes_on_nothing_is_said_of_it():
    assert look_at(Counts, continues=False).notes == ()


# Modules that go on as if they had not been stopped


class SavesItsCount(Counts):
    def on_save_checkpoint(self, checkpoint):
        # The cure that a line advises.
        checkpoint["steps"] = self.steps

    def on_load_checkpoint(self, checkpoint):
        self.steps = checkpoint["steps"]


class CountsInABuffer(Lit):
    def __init__(self, spec):
        super().__init__(spec)
        self.register_buffer("steps", torch.zeros(()))

    def training_step(self, batch, batch_idx):
        self.steps += 1
        return super().training_step(batch, batch_idx) / self.steps


class GlobalNoise(Lit):
    """Draws from the generators that a checkpoint of bstune's has."""

    def training_step(self, batch, batch_idx):
        noise = torch.rand(()) + np.random.rand() + random.random()
        return super().training_step(batch, batch_idx) * noise


class CountsInVain(Lit):
    """Keeps numbers on which nothing depends."""

    def __init__(self, spec):
        # They differ after a stop, and nothing depends on them.
        super().__init__(spec)
        self.losses = []

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.losses.append(loss.item())
        return loss


class LogsItsBest(Lit):
    def __init__(self, spec):
        super().__init__(spec)
        self.best = MaxMetric()

    def validation_step(self, batch, batch_idx):
        super().validation_step(batch, batch_idx)
        self.best(self.loss(batch))

    def on_validation_epoch_end(self):
        self.log("val_best", self.best.compute())


class StartsFromTheData(Lit):
    """Sets a weight as it begins to train."""

    def on_fit_start(self):
        self.net[2].bias.data.fill_(0.5)

    def on_train_start(self):
        self.net[0].bias.data.fill_(0.25)


class Chance(OwnNoise):
    """No two runs of it are the same."""

    def __init__(self, spec):
        super().__init__(spec)
        # Its seed is the machine's own chance: no comparison is possible.
        self.noise = torch.Generator()
        self.noise.seed()


@pytest.mark.parametrize(
    "kind",
    [
        *(SavesItsCount, GlobalNoise, LogsItsBest, Chance),
        *(
            pytest.param(kind, marks=pytest.mark.slow)
            for kind in (CountsInABuffer, CountsInVain, StartsFromTheData)
        ),
    ],
)
def test_what_goes_on_alike_is_continued(kind):
    found = look_at(kind)
    assert (found.continues, found.notes) == (True, ())


@pytest.mark.parametrize("case", CASES)
def test_what_is_the_uninterrupted_trial_bit_for_bit_is_continued(case):
    """Averages, schedules, scalers and data of all kinds, each of which has a test of its own trials."""
    options = {"build": learner, "batches": stream, "evaluated": validation, "data": None}
    options |= CASES[case]
    protocol = protocol_of(case)
    workload = Workload(
        options["build"],
        partial(options["batches"], micro_batch_size=protocol.micro_batch_size),
        options["evaluated"](),
        20,
        data_module=options["data"],
    )
    # Within the 60 examples of this problem.
    space = replace(SPACE, high=32)
    found = preflight(workload, protocol, space, None, continues=True, survey=False)
    assert (found.continues, found.notes) == (True, ())


class Noisy(Dataset):
    # A worker is started for each epoch: each trial here ends within its first one.
    def __len__(self):
        return 20 * len(DATA)

    def __getitem__(self, index):
        x, y = DATA[index % len(DATA)]
        return x + torch.rand(1), y


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*(num_workers|fork).*")
@pytest.mark.parametrize(("kind", "continues"), [(Lit, True), (OwnSchedule, False)])
def test_batches_that_workers_change_at_random_do_not_count(kind, continues):
    """What they draw differs after a stop, whatever the module does; its rates show a schedule all the same."""
    train = DataLoader(Noisy(), shuffle=True, num_workers=1)
    assert look_at(kind, train=train).continues == continues


def test_equal_courses_are_compared_once_and_others_twice(monkeypatch):
    """Stopped, gone on and not stopped; the last two again where they differ."""
    asked = []

    def run_trial(workload, spec, protocol, **options):
        asked.append((spec.seed, spec.max_steps, spec.resumed_from))
        return whole_trial(workload, spec, protocol, **options)

    whole_trial = short_runs.run_trial
    monkeypatch.setattr(short_runs, "run_trial", run_trial)
    # Two rates, another seed, and the trial that is stopped after three steps.
    before = [(0, None, None), (0, None, None), (1, None, None), (0, 3, None)]
    look_at(Lit)
    assert asked == [*before, (0, 5, 0), (0, 5, None)]
    asked.clear()
    look_at(Counts)
    # Where they differ both are run once more: chance would differ again.
    assert asked == [*before, (0, 5, 0), (0, 5, None), (0, 5, None), (0, 5, 0)]
    # The comparison goes one step past the stop where the budget does not allow for two.
    asked.clear()
    look_at(Lit, steps=3)
    assert asked[-2:] == [(0, 4, 0), (0, 4, None)]


# Courses


def course(*, weight=1.0, rate=0.1, loss=2.0, batch="a", exact=True, start=0.0, **attributes):
    kept = {name: Attribute("int", 2, str(value)) for name, value in attributes.items()}
    return Course(
        steps=2,
        attributes=kept,
        batches=(batch,),
        rates=(rate,),
        start={"w": torch.tensor([start])},
        weights={"w": torch.tensor([weight])},
        metrics={"val_loss": loss},
        exact=exact,
    )


def compared(straight, resumed, straight_again=None, resumed_again=None):
    again = straight_again or straight, resumed_again or resumed
    return lost_state(straight, resumed, lambda: again)


NAN = float("nan")


@pytest.mark.parametrize(
    ("straight", "resumed", "effects"),
    [
        (course(), course(), ()),
        # On a CPU equal trainings are equal to the bit, so that any difference counts.
        (course(), course(weight=1.0 + 1e-7), (WEIGHTS,)),
        (course(), course(rate=0.1 + 1e-9), (LEARNING_RATES,)),
        (course(), course(loss=2.0 + 1e-9), ("val_loss",)),
        (course(), course(weight=0.5, rate=0.2, loss=1.0), (LEARNING_RATES, WEIGHTS, "val_loss")),
        # A loss that is lost in both is no difference.
        (course(weight=NAN, loss=NAN), course(weight=NAN, loss=NAN), ()),
        (course(), course(weight=NAN), (WEIGHTS,)),
        # On other batches rates alone are compared.
        (course(), course(weight=0.5, loss=1.0, batch="b"), ()),
        (course(), course(rate=0.2, batch="b"), (LEARNING_RATES,)),
        # On an accelerator weights that moved by 1 may differ by 0.01.
        (course(exact=False), course(weight=1.005, loss=2.01, exact=False), ()),
        (
            course(exact=False),
            course(weight=1.05, loss=2.1, exact=False),
            (WEIGHTS, "val_loss"),
        ),
        (
            # The weights have moved by 0.1 alone, of which 0.005 is too much.
            course(exact=False, start=0.9),
            course(weight=1.005, exact=False, start=0.9),
            (WEIGHTS,),
        ),
    ],
)
def test_what_differs_is_an_effect(straight, resumed, effects):
    lost = compared(straight, resumed)
    assert (() if lost is None else lost.effects) == effects


def test_what_does_not_repeat_itself_tells_nothing():
    one = course()
    other = course(weight=0.5, loss=1.0)
    # What the same run comes to twice differs as much.
    assert compared(one, other, straight_again=course(weight=0.9)) is None
    assert compared(one, other, resumed_again=course(weight=0.6, loss=1.0)) is None
    # A metric that is chance, as seconds are, does not hide the rest.
    lost = compared(one, other, straight_again=course(loss=9.0))
    assert lost is not None
    assert lost.effects == (WEIGHTS,)
    assert compared(course(), course(loss=1.0), straight_again=course(loss=9.0)) is None


def test_attributes_that_differ_and_repeat_themselves_are_lost():
    straight = course(same=1, steps=3, began=1, missing=4)
    resumed = course(weight=0.5, same=1, steps=0, began=2)
    again = course(same=1, steps=3, began=7, missing=4)
    lost = compared(straight, resumed, straight_again=again)
    assert lost is not None
    # began differs from run to run, and same does not differ at all.
    assert lost.attributes.keys() == {"steps", "missing"}


def test_the_likeliest_attributes_are_named_first():
    attributes = {
        "cache": Attribute("Tensor", 3, ""),
        "steps": Attribute("int", 2, ""),
        "noise": Attribute("Generator", 1, ""),
        "b": Attribute("int", 2, ""),
        "warmup": Attribute("LambdaLR", 0, ""),
    }
    text = LostState(2, (LEARNING_RATES, WEIGHTS, "val_loss"), attributes).text("Net")
    # Schedules and generators first, then numbers, then caches.
    assert "other learning rates, weights and val_loss than" in text
    assert "does not hold warmup (LambdaLR), noise (Generator), b (int), 2 more; save" in text


# Studies of projects


@pytest.fixture
def _projects(monkeypatch):
    monkeypatch.syspath_prepend(str(PROJECTS))


def arguments_of(name, folder=PROJECTS):
    return "--config-dir", str(folder / "conf"), f"workload={name}", "device=cpu"


STUDY = ("search.objective=steps", "search.replicates=1", "search.workers=0")
STUDY += ("mlflow.enabled=false", "hardware.enabled=false")


def plain_loss(workload, spec, steps, folder):
    """Train by a plain Trainer on a trial's batches; return the validation loss."""
    # As Lightning's own users seed a run.
    seed_everything(spec.seed)
    module = workload.build_module(spec)
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_steps=steps,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    trainer.fit(module, workload.train_batches(spec))
    trainer = lightning.Trainer(accelerator="cpu", logger=False, enable_progress_bar=False)
    (metrics,) = trainer.validate(module, workload.validation_batches, verbose=False)
    return metrics["val_loss"]


@pytest.mark.slow
@pytest.mark.usefixtures("_projects")
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_trials_that_start_afresh_are_those_of_a_plain_trainer(bstune, tmp_path):
    status, out, err = bstune(*arguments_of("own_warmup"), *STUDY, "search.trials=8")
    assert status == 0, err
    assert "it starts afresh: 2 steps after its checkpoint Net has other learning rates" in out
    assert "warmup (LambdaLR)" in out
    assert "may be continued" not in out
    trials = trials_of(*(tmp_path / "outputs").iterdir())
    stopped = [trial for trial in trials if trial.status == "stopped"]
    assert stopped
    assert {trial.resumed_from for trial in trials} == {None}
    workload, _ = loaded(*arguments_of("own_warmup"))
    for trial in trials[:2]:
        spec = replace(TrialSpec(0, 0, trial.batch_size, trial.lr, None, trial.seed))
        loss = plain_loss(workload, spec, trial.steps, tmp_path)
        # A float32 as its shortest decimal, as records have it.
        assert trial.history[-1] == (trial.steps, float(str(np.float32(loss))))


@pytest.mark.slow
@pytest.mark.usefixtures("_projects")
def test_a_project_with_a_schedule_of_a_fixed_length_is_refused(bstune, tmp_path):
    arguments = arguments_of("fixed_schedule", PROJECTS / "fixed_schedule")
    status, _, err = bstune(*arguments, *STUDY)
    assert status == 2
    (line,) = err.splitlines()
    assert "OneCycleLR of Net ends after 500 steps with an error, and a trial at batch" in line
    # 20,000 examples in batches of 16.
    assert "size 16 may take 1,250" in line
    assert list(tmp_path.glob("outputs/*/trials.jsonl")) == []
    # Trials that end before it are trained.
    notes = prepared_study(*arguments, *STUDY, "budget.examples=8000").notes
    assert not [note for note in notes if "OneCycleLR" in note]


@pytest.mark.usefixtures("_projects")
def test_a_project_that_seeds_itself_is_named():
    notes = prepared_study(*arguments_of("own_seed"), *STUDY).notes
    (note,) = [note for note in notes if "seeds" in note]
    assert note.startswith("fresh seeds are not fresh: Net seeds torch itself (")
    assert "after on_fit_start" in note
