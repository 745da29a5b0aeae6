"""Where a schedule of a fixed length ends: stepped ahead on a copy, that changes nothing of the training."""

import warnings
from types import SimpleNamespace

import pytest
import torch
from learners import learner, train
from lightning.pytorch import Callback
from test_preflight import Lit, fly
from toolbox import FakeTime, column, make_protocol, make_spec
from torch.optim import lr_scheduler

from bstune.core.errors import ConfigError
from bstune.trial.checks.schedule_end import (
    MAX_STEPS_AHEAD,
    ScheduleCopy,
    copies_of_schedules,
    end_of_schedule,
)
from bstune.workloads.classifier import Classifier


def make_copy(kind, every=1, done=4, lr=0.1, **options):
    """Give a schedule that has been stepped some times, as a copy."""
    optimizer = torch.optim.SGD([torch.zeros(())], lr=lr, momentum=0.9)
    schedule = kind(optimizer, **options)
    with warnings.catch_warnings(action="ignore"):
        for _ in range(done // every):
            schedule.step()
    return ScheduleCopy(kind.__name__, schedule, every, done)


def end_at(ahead, last_step):
    end = end_of_schedule(ahead, last_step, now=FakeTime())
    return None if end is None else (end.step, end.error is not None)


def one_cycle(steps, **options):
    return make_copy(lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=steps, **options)


def table(factors):
    """Give a schedule that reads a list, which ends."""
    return make_copy(lr_scheduler.LambdaLR, lr_lambda=factors.__getitem__)


LINEAR = {"start_factor": 1.0, "end_factor": 0.0}


@pytest.mark.parametrize(
    ("ahead", "last_step", "end"),
    [
        # It raises in the first step past its end.
        (one_cycle(50), 51, (50, True)),
        (one_cycle(50), 1000, (50, True)),
        (one_cycle(50), 50, None),
        (one_cycle(50), 20, None),
        # 50 steps of the schedule are 150 of the training.
        (one_cycle(50, every=3, done=6), 153, (150, True)),
        (one_cycle(50, every=3, done=6), 152, None),
        (table([1.0] * 10), 100, (9, True)),
        # Its rate stays at 0.
        (make_copy(lr_scheduler.LinearLR, total_iters=30, **LINEAR), 100, (30, False)),
        (make_copy(lr_scheduler.LinearLR, total_iters=95, **LINEAR), 101, (95, False)),
        # Its last steps alone are at 0.
        (make_copy(lr_scheduler.LinearLR, total_iters=95, **LINEAR), 100, None),
        (make_copy(lr_scheduler.LinearLR, total_iters=30, **LINEAR), 30, None),
        (make_copy(lr_scheduler.PolynomialLR, total_iters=30), 100, (30, False)),
        # It stays at another rate, or comes back.
        (make_copy(lr_scheduler.LinearLR, total_iters=30), 100, None),
        (
            make_copy(lr_scheduler.LinearLR, total_iters=30, start_factor=1.0, end_factor=0.1),
            90,
            None,
        ),
        (make_copy(lr_scheduler.MultiStepLR, milestones=[20, 30]), 100, None),
        (make_copy(lr_scheduler.CosineAnnealingLR, T_max=30), 100, None),
        (make_copy(lr_scheduler.LambdaLR, lr_lambda=lambda step: step / 10**12), 100, None),
        (make_copy(lr_scheduler.LambdaLR, lr_lambda=lambda step: 0.0), 100, None),
    ],
)
def test_a_schedule_ends_where_it_raises_or_stays_at_nothing(ahead, last_step, end):
    assert end_at(ahead, last_step) == end


def test_it_is_looked_at_for_so_many_steps_and_seconds():
    late = MAX_STEPS_AHEAD + 100
    assert end_at(one_cycle(late), 2 * late) is None
    assert end_at(one_cycle(late - 200), 2 * late) == (late - 200, True)

    clock = FakeTime()

    def slow(step):
        clock.now += 0.01
        return 1.0 if step < 500 else [][step]

    # Its 500 steps take 5 s.
    ahead = make_copy(lr_scheduler.LambdaLR, lr_lambda=slow)
    assert end_of_schedule(ahead, 1000, now=clock) is None
    ahead = make_copy(lr_scheduler.LambdaLR, lr_lambda=slow)
    assert end_at(ahead, 1000) == (499, True)


# What is copied


class Scheduled(Classifier):
    """Its schedule is a method of its own."""

    def rate(self, step):
        return 1.0 / (1 + step)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr)
        self.second = lr_scheduler.ExponentialLR(optimizer, 0.99)
        self.never = [lr_scheduler.ExponentialLR(optimizer, 0.99)]
        schedule = lr_scheduler.LambdaLR(optimizer, self.rate)
        return [optimizer], [{"scheduler": schedule, "interval": "step", "frequency": 2}]

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.second.step()


class Copies(Callback):
    def on_train_end(self, trainer, pl_module):
        before = column(trainer.optimizers[0].param_groups, "lr")
        self.copies = copies_of_schedules(trainer, pl_module, trainer.global_step)
        for one in self.copies:
            one.schedule.step()
        after = column(trainer.optimizers[0].param_groups, "lr")
        self.unchanged = before == after
        weights = [one.schedule.optimizer.param_groups[0]["params"] for one in self.copies]
        self.weights = sum(len(one) for one in weights)


def test_schedules_are_copied_without_their_weights_and_step_nothing_else():
    """Those that Lightning steps, and one that the module does; the one that is never stepped is left out."""
    copies = Copies()

    def build(spec):
        return learner(spec, kind=Scheduled, callbacks=[lambda: copies])

    train(make_spec(8), make_protocol(6), build)
    assert [(one.name, one.every, one.done) for one in copies.copies] == [
        ("LambdaLR", 2, 6),
        ("ExponentialLR", 1, 6),
    ]
    assert copies.unchanged
    assert copies.weights == 0


class NotToBeCopied(lr_scheduler.LambdaLR):
    def __deepcopy__(self, memo):
        raise TypeError("not to be copied")


# In the preflight

ON_EPOCHS = pytest.mark.filterwarnings("ignore:.*scheduler is using 'interval'.*")


def scheduled(kind, own=False, interval="step", **options):
    """Give a module with a schedule that Lightning steps, or that it steps by its ``own``."""

    class Net(Lit):
        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            schedule = kind(optimizer, **options)
            if not own:
                return [optimizer], [{"scheduler": schedule, "interval": interval}]
            self.own = schedule
            return optimizer

        def on_train_batch_end(self, outputs, batch, batch_idx):
            if own:
                self.own.step()

    return lambda spec: Net(SimpleNamespace(lr=spec.lr, batch_size=spec.batch_size))


def cycle(optimizer, steps):
    rate = optimizer.param_groups[0]["lr"]
    return lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps, cycle_momentum=False)


@ON_EPOCHS
@pytest.mark.parametrize(
    ("options", "step"),
    [
        ({"kind": cycle, "steps": 60}, 60),
        ({"kind": cycle, "steps": 60, "own": True}, 60),
        # Epochs of 8 batches of 8 of the 64 examples.
        ({"kind": cycle, "steps": 6, "interval": "epoch"}, 48),
    ],
)
def test_a_schedule_that_raises_within_the_budget_is_refused(options, step):
    with pytest.raises(ConfigError) as error:
        fly(scheduled(**options), continues=False)
    text = str(error.value)
    assert text.startswith(f"OneCycleLR of Net ends after {step} steps with an error, and a trial")
    assert "at batch size 8 may take 100 (ValueError: Tried to step" in text
    assert "trial.total_steps" in text


@ON_EPOCHS
@pytest.mark.parametrize(
    ("options", "noted"),
    [
        ({"kind": cycle, "steps": 100}, False),
        ({"kind": cycle, "steps": 100, "own": True}, False),
        ({"kind": cycle, "steps": 13, "interval": "epoch"}, False),
        ({"kind": NotToBeCopied, "lr_lambda": [1.0] * 9 + [0.0]}, False),
        ({"kind": lr_scheduler.PolynomialLR, "total_iters": 60}, True),
        ({"kind": lr_scheduler.PolynomialLR, "total_iters": 100}, False),
    ],
)
def test_a_schedule_that_stays_at_nothing_is_a_note_and_others_are_none(options, noted):
    if options["kind"] is NotToBeCopied:
        options = {**options, "lr_lambda": options["lr_lambda"].__getitem__}
    notes = fly(scheduled(**options), continues=False).notes
    assert len(notes) == noted
    if noted:
        assert notes[0].startswith("PolynomialLR of Net is at 0 after 60 steps, and a trial at")
