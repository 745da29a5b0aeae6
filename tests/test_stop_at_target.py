"""The call-back that ends anyone's fit at the target, beside bstune's own trials and a count by hand."""

from dataclasses import replace

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader, TensorDataset

from bstune import StopAtTarget, Target
from bstune.core.errors import ConfigError

QUIET = dict.fromkeys(
    ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
)
# The metric of one evaluation after the other.
VALUES = (0.9, 0.8, float("nan"), 0.5, 0.4, 0.3)
TARGET = Target("val_loss", 0.5, mode="min")


def make_module(base):
    class Counts(base):
        """One weight; each evaluation logs the next of VALUES."""

        def __init__(self, optimizers=1):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(1))
            self.count = optimizers
            self.evaluations = 0
            self.seen = 0
            self.automatic_optimization = optimizers == 1

        def training_step(self, batch, batch_idx):
            self.seen += 1
            loss = (self.weight * batch[0]).square().mean()
            if not self.automatic_optimization:
                for optimizer in self.optimizers():
                    optimizer.zero_grad()
                    self.manual_backward(loss, retain_graph=True)
                    optimizer.step()
            return loss

        def validation_step(self, batch, batch_idx):
            self.log("val_loss", VALUES[min(self.evaluations, len(VALUES) - 1)])

        def on_validation_epoch_end(self):
            self.evaluations += 0 if self.trainer.sanity_checking else 1

        def configure_optimizers(self):
            several = [torch.optim.SGD(self.parameters(), lr=1e-3) for _ in range(self.count)]
            return several if self.count > 1 else several[0]

    return Counts


def fit(stop, base=LightningModule, make=Trainer, optimizers=1, **options):
    module = make_module(base)(optimizers)
    loader = DataLoader(TensorDataset(torch.ones(60, 1)), batch_size=1)
    trainer = make(
        **QUIET, accelerator="cpu", max_epochs=1, val_check_interval=6, callbacks=[stop], **options
    )
    trainer.fit(module, loader, DataLoader(TensorDataset(torch.ones(2, 1))), weights_only=True)
    return trainer, module


# Lightning gives advice to whoever trains a toy.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({}, (18, 24)),
        ({"accumulate_grad_batches": 3}, (6, 8)),
        # The global step of a Trainer counts two optimizers twice.
        ({"optimizers": 2}, (18, 24)),
        # The fit goes on until then.
        ({"min_steps": 33}, (18, 24)),
    ],
)
def test_the_fit_ends_at_the_first_evaluation_that_meets_the_target(options, steps):
    stop = StopAtTarget(TARGET)
    _, module = fit(stop, **options)
    assert (stop.reached, stop.steps_low, stop.steps) == (True, *steps)
    assert module.seen == (60 if "min_steps" in options else 24)
    values = [
        (index * steps[1] // 4, value) for index, value in enumerate((0.9, 0.8, None, 0.5), start=1)
    ]
    assert [(step, value and round(value, 6)) for step, value in stop.history] == values


def test_it_works_under_the_other_package_too():
    other = pytest.importorskip("pytorch_lightning")
    stop = StopAtTarget(TARGET)
    fit(stop, base=other.LightningModule, make=other.Trainer)
    assert (stop.steps_low, stop.steps) == (18, 24)


def test_a_target_that_is_missed_has_no_time():
    stop = StopAtTarget(replace(TARGET, value=0.1))
    fit(stop, max_steps=14)
    # It is evaluated every six steps, the last time at 12.
    assert (stop.reached, stop.steps, stop.steps_low, stop.time_to_target) == (False, 14, 12, None)


def test_the_clock_stands_still_in_evaluations():
    """A clock that goes on by a second at each reading is read at the edges of the four stretches of training."""
    times = iter(range(1000))
    stop = StopAtTarget(TARGET, warmup_steps=6, now=lambda: float(next(times)))
    fit(stop)
    assert stop.train_seconds == 4.0
    # Three stretches of six steps follow the warm-up, a second each.
    assert stop.seconds_per_step == pytest.approx(1.0 / 6)
    assert stop.time_to_target == pytest.approx(24 / 6)


def test_a_step_that_the_gradient_scaler_skips_is_none():
    class Scaler:
        # It is evaluated at the start, and after each batch: the first two are skipped.
        scales = iter([8.0, 4.0, 2.0, *[2.0] * 90])

        def get_scale(self):
            return next(self.scales)

    class Plugged(StopAtTarget):
        def on_train_start(self, trainer, pl_module):
            trainer.precision_plugin.scaler = Scaler()
            super().on_train_start(trainer, pl_module)

    stop = Plugged(TARGET)
    fit(stop)
    # Two batches of 18, and of 24, are no steps.
    assert (stop.steps_low, stop.steps) == (16, 22)


def test_it_counts_on_from_a_checkpoint_and_anew_in_another_fit(tmp_path):
    stop = StopAtTarget(replace(TARGET, value=0.1))
    trainer, _ = fit(stop, max_steps=14)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    saved = torch.load(tmp_path / "last.ckpt", weights_only=True)["callbacks"]
    again = StopAtTarget(TARGET)
    again.load_state_dict(next(iter(saved.values())))
    assert (again.steps, again.steps_low, len(again.history)) == (14, 12, 2)
    fit(again)
    assert (again.steps_low, again.steps) == (18, 24)


def test_a_metric_that_is_not_logged_is_named():
    with pytest.raises(
        ConfigError, match="the target's metric is 'loss', but the module logs val_loss"
    ):
        fit(StopAtTarget(Target("loss", 0.5, mode="min")))
