"""A trial under bstune's Trainer is what ``Trainer.fit`` makes of the same batches, bit for bit on a CPU."""

import math
import os
import threading
import warnings
from dataclasses import replace
from functools import partial
from typing import ClassVar

import pytest
import torch
from builders import options_of
from fits import (
    BATCH_SIZE,
    HELD_OUT,
    STEPS,
    Regression,
    batches_of,
    fit,
    protocol_of,
    run,
    stop_and_continue,
)
from learners import gradient_scaler, same_weights
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from toolbox import TRAINER, entries, evaluated_steps, make_spec, measured_steps
from torch import nn
from torch.nn import functional as F
from torch.optim import lr_scheduler
from torchmetrics import MeanSquaredError, MinMetric

from bstune.core.errors import ConfigError
from bstune.core.evaluation_schedule import EvaluationSchedule
from bstune.core.records import Budget, Target
from bstune.hardware.timing import time_bare
from bstune.trial.checks.start import depends_on_length
from bstune.trial.loop import Workload
from bstune.trial.parts.checkpoint import Stopped
from bstune.trial.workload import evaluate, sizes_that_show_schedules


class OneCycle(Regression):
    def configure_optimizers(self):
        optimizer = self.optimizer()
        cycle = lr_scheduler.OneCycleLR(
            # A module that asks how long it trains, and one that asks for how many epochs.
            optimizer,
            0.2,
            total_steps=self.trainer.estimated_stepping_batches,
        )
        return [optimizer], [{"scheduler": cycle, "interval": "step"}]


class EpochCosine(Regression):
    def configure_optimizers(self):
        optimizer = self.optimizer()
        return [optimizer], [
            lr_scheduler.CosineAnnealingLR(optimizer, T_max=self.trainer.max_epochs)
        ]


class Plateau(Regression):
    monitor = "val/error"

    def configure_optimizers(self):
        optimizer = self.optimizer()
        plateau = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.2)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": plateau, "monitor": self.monitor},
        }


# What is monitored exists only at an epoch's end.
class TrainPlateau(Plateau):
    """Looks at the mean of an epoch's training losses."""

    monitor = "train/loss"

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("train/loss", loss, on_step=False, on_epoch=True)
        return loss


class SteppedByHand(Regression):
    """Steps its schedule itself, at each epoch's end, by what validation has logged."""

    def configure_optimizers(self):
        optimizer = self.optimizer()
        self.schedule = lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
        return optimizer

    def on_train_epoch_end(self):
        if self.trainer.callback_metrics["val/error"] < 1.0:
            self.schedule.step()


class TwoOptimizers(Regression):
    """Manual optimization of either layer with an optimizer of its own, one of them with a schedule by epochs."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()
        # By hand, as manual optimization asks for.
        if self.trainer.is_last_batch:
            self.lr_schedulers().step()

    def configure_optimizers(self):
        first = torch.optim.Adam(self.net[0].parameters(), lr=0.02)
        second = torch.optim.Adam(self.net[2].parameters(), lr=0.02)
        return [first, second], [
            lr_scheduler.CosineAnnealingLR(first, T_max=self.trainer.max_epochs)
        ]


class Dicts(Regression):
    def loss(self, batch):
        return F.mse_loss(self.net(batch["x"]), batch["nested"][0])


def as_dict(examples):
    inputs, targets = zip(*examples, strict=True)
    x = torch.stack(inputs)
    y = torch.stack(targets)
    return {"x": x, "nested": [y], "size": len(examples)}


def rates_of(module):
    """The learning rate of each group of parameters of each optimizer."""
    rates = []
    for optimizer in module.trainer.optimizers:
        rates += [group["lr"] for group in optimizer.param_groups]
    return rates


CASES = {
    "constant": (Regression, {}, {}),
    "one cycle": (OneCycle, {}, {}),
    "one cycle, micro-batches": (OneCycle, {"micro_batch_size": 4}, {"accumulate_grad_batches": 2}),
    "cosine by epochs": (EpochCosine, {}, {}),
    "plateau": (Plateau, {}, {}),
    "plateau of the training loss": (TrainPlateau, {}, {}),
    "stepped by hand": (SteppedByHand, {}, {}),
    "clipping": (
        OneCycle,
        {"trainer": {**TRAINER, "gradient_clip_val": 0.1}},
        {"gradient_clip_val": 0.1},
    ),
    # With two optimizers a Trainer counts epochs.
    "two optimizers": (TwoOptimizers, {"steps": 42}, {}),
    "dictionaries": (Dicts, {}, {}),
}


@pytest.mark.parametrize("case", CASES)
def test_a_trial_is_what_fit_makes_of_the_same_batches(case):
    kind, protocol, options = CASES[case]
    collate = as_dict if case == "dictionaries" else None
    record, module = run(kind, protocol=protocol_of(**protocol), collate=collate)
    assert (record.status, record.steps, record.message) == (
        "stopped",
        protocol.get("steps", STEPS),
        None,
    )
    reference = fit(kind, protocol.get("micro_batch_size"), collate, **options)
    assert same_weights(module, reference)
    assert rates_of(module) == rates_of(reference)
    # Something was learnt.
    assert not same_weights(module, kind())


class Asks(Regression):
    """Notes what its Trainer says."""

    def __init__(self):
        super().__init__()
        self.seen = {}
        self.epochs = []

    def configure_optimizers(self):
        trainer = self.trainer
        # What modules ask their Trainer for in configure_optimizers.
        names = (
            "estimated_stepping_batches",
            "num_training_batches",
            "max_steps",
            "max_epochs",
            "datamodule",
        )
        self.seen = {name: getattr(trainer, name) for name in names}
        self.seen["length"] = len(trainer.train_dataloader)
        return self.optimizer()

    def on_train_epoch_start(self):
        self.epochs.append((self.current_epoch, self.global_step))

    def training_step(self, batch, batch_idx):
        self.logger.experiment.add_scalar("x", 1.0, self.global_step)
        self.logger.experiment.config.update({"a": 1})
        assert "best" not in self.logger.experiment.summary
        assert not list(self.logger.experiment.runs)
        self.logger.log_metrics({"x": 1.0})
        assert self.trainer.log_dir is not None
        return self.loss(batch)


@pytest.mark.parametrize(("micro", "parts"), [(None, 1), (3, 3)])
@pytest.mark.parametrize("limit", [None, 10])
def test_a_module_that_asks_its_trainer_gets_the_truth(micro, parts, limit):
    data = LightningDataModule()
    # The project's own batch size, which the trial's replaces in a copy.
    data.batch_size = 64
    data.save_hyperparameters({"batch_size": 64})
    _, module = run(
        Asks, make_spec(BATCH_SIZE, max_steps=limit), protocol_of(micro_batch_size=micro), data=data
    )
    served = module.seen.pop("datamodule")
    assert type(served) is LightningDataModule
    assert (served.batch_size, served.hparams.batch_size) == (micro or BATCH_SIZE,) * 2
    assert (data.batch_size, data.hparams.batch_size) == (64, 64)
    assert module.seen == {
        # It is that of the budget, also of a trial that the search stops early.
        "estimated_stepping_batches": STEPS,
        "num_training_batches": 6 * parts,
        "max_steps": STEPS,
        # Seven epochs of six batches are the least that hold the budget's steps.
        "max_epochs": 7,
        "length": 6 * parts,
    }
    epochs = range(math.ceil((limit or STEPS) / 6))
    assert module.epochs == [(epoch, 6 * epoch) for epoch in epochs]


def test_a_schedule_that_is_as_long_as_the_trial_ends_with_its_horizon():
    _, module = run(OneCycle, make_spec(BATCH_SIZE, max_steps=20), horizon=20)
    assert module.trainer.estimated_stepping_batches == 20
    # One cycle ends near 0 with its last step, and is near its height of 0.2 in the middle.
    assert module.trainer.optimizers[0].param_groups[0]["lr"] < 0.01
    _, module = run(OneCycle, make_spec(BATCH_SIZE, max_steps=20))
    assert module.trainer.optimizers[0].param_groups[0]["lr"] > 0.1


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (Regression, False),
        (OneCycle, True),
        (EpochCosine, True),
        (Plateau, False),
        (TwoOptimizers, True),
    ],
)
def test_a_schedule_with_a_horizon_is_noticed_by_what_it_does(kind, expected):
    workload = Workload(lambda spec: kind(), batches_of, HELD_OUT, 10)
    assert depends_on_length(workload, [make_spec(BATCH_SIZE)], protocol_of()) == expected


class LongWarmUp(Regression):
    """Has a warm-up of a fixed length, then a cosine to the Trainer's last step."""

    WARM_UP = 30

    def configure_optimizers(self):
        optimizer = self.optimizer()
        warm_up = lr_scheduler.LinearLR(optimizer, 0.01, total_iters=self.WARM_UP)
        rest = max(1, self.trainer.max_steps - self.WARM_UP)
        cosine = lr_scheduler.CosineAnnealingLR(optimizer, rest)
        parts = [warm_up, cosine]
        schedule = lr_scheduler.SequentialLR(optimizer, parts, milestones=[self.WARM_UP])
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


# Of 50 and of 20 steps: the shorter trial ends within the warm-up.
@pytest.mark.parametrize(
    ("batch_sizes", "expected"), [((20,), False), ((8,), True), ((20, 8), True), ((8, 20), True)]
)
def test_what_follows_a_warm_up_is_seen_in_the_longest_trials(batch_sizes, expected):
    workload = Workload(lambda spec: LongWarmUp(), batches_of, HELD_OUT, 10)
    protocol = replace(protocol_of(), budget=Budget(steps=5, examples=400))
    specs = [make_spec(size) for size in batch_sizes]
    assert depends_on_length(workload, specs, protocol) == expected


@pytest.mark.parametrize(
    ("own", "low", "high", "alone", "expected"),
    [
        (50, 10, 400, None, [400, 50]),
        # Of 8 and of 16 steps: the smallest size has 200.
        (500, 20, 400, None, [400, 20]),
        (250, 20, 400, None, [400, 250, 20]),
        # No batch is larger than the data.
        (5000, 500, 2000, None, [1000, 500]),
        (50, 10, 400, 64, [64]),
    ],
)
def test_schedules_are_looked_at_where_trials_have_steps_enough(own, low, high, alone, expected):
    options = options_of(
        "workload=digits",
        f"scaling.batch_size={own}",
        f"search.batch_size.low={low}",
        f"search.batch_size.high={high}",
        *([] if alone is None else [f"trial.batch_size={alone}", "trial.lr=0.1"]),
    )
    found = sizes_that_show_schedules(options, 1000, lambda batch_size: 4000 // batch_size)
    assert found == expected


class Skips(Regression):
    """Leaves out the second half of each epoch."""

    def on_train_batch_start(self, batch, batch_idx):
        # The fourth of six batches: -1 ends an epoch.
        return -1 if batch_idx == 3 else None


class SkipsAll(Regression):
    def on_train_batch_start(self, batch, batch_idx):
        return -1


def test_a_trial_goes_on_to_its_last_step_however_short_the_module_makes_its_epochs():
    record, _ = run(Skips)
    assert (record.status, record.steps, record.steps_low, record.message) == (
        "stopped",
        STEPS,
        STEPS,
        None,
    )
    with pytest.raises(RuntimeError, match="the training ended by itself at step 0"):
        run(SkipsAll)


def test_a_module_without_what_lightning_needs_is_refused_in_a_line():
    class NoStep(Regression):
        training_step = LightningModule.training_step

    workload = Workload(lambda spec: NoStep(), batches_of, HELD_OUT, 10)
    with pytest.raises(
        ConfigError, match=r"NoStep \(.*\) has no training_step: return the loss there"
    ):
        depends_on_length(workload, [make_spec(BATCH_SIZE)], protocol_of())


# Stopped and continued


class MetricPlateau(TrainPlateau):
    """Looks at a metric object, and at the largest loss of the epoch."""

    monitor = "train/error"

    def __init__(self):
        super().__init__()
        self.error = MeanSquaredError()
        self.lowest = MinMetric()

    # It comes after what the sanity check has left.
    def on_train_start(self):
        self.error.reset()
        self.lowest.reset()

    def on_validation_epoch_end(self):
        if not self.trainer.sanity_checking:
            # The least distance to step 12 so far: 0 from there on.
            self.lowest(abs(self.global_step - 12.0))
            self.log("val/lowest", self.lowest.compute())

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.error(self.net(batch[0]), batch[1])
        self.log("train/error", self.error, on_step=False, on_epoch=True)
        self.log("train/largest", loss, on_step=True, on_epoch=True, reduce_fx="max")
        return loss

    def on_train_epoch_end(self):
        for group in self.optimizers().param_groups:
            group["lr"] *= 1.0 + 0.1 * self.trainer.callback_metrics["train/largest_epoch"].item()


# Epochs have six batches.
LIMITS = (1, 6, 9, 12, 29, 39)
EVERY_FEW = EvaluationSchedule(ratio=1.0001, share=0.5, cost=2.0, near=1.01)


@pytest.mark.parametrize(
    ("kind", "micro"),
    [
        (MetricPlateau, None),
        (TwoOptimizers, None),
        (TrainPlateau, 3),
        # Schedules by steps, by a metric and by hand are among those above.
        *(
            pytest.param(kind, None, marks=pytest.mark.slow)
            for kind in (OneCycle, EpochCosine, Plateau, TrainPlateau, SteppedByHand)
        ),
    ],
)
def test_a_trial_that_goes_on_is_the_uninterrupted_one_through_epochs(kind, micro, tmp_path):
    protocol = protocol_of(micro_batch_size=micro, evaluation_schedule=EVERY_FEW)
    whole, reference = run(kind, protocol=protocol)
    stopped = None
    for number, limit in enumerate([*LIMITS, None]):
        spec = make_spec(
            BATCH_SIZE,
            seed=3,
            number=number,
            max_steps=limit,
            resumed_from=number - 1 if number else None,
        )
        state = tmp_path / f"{number}.state"
        record, module = run(kind, spec, protocol, state_file=state, resume=stopped)
        stopped = Stopped(record, state)
    assert same_weights(module, reference)
    assert (record.steps, record.status) == (whole.steps, whole.status) == (STEPS, "stopped")
    due = dict(whole.history)
    assert [pair for pair in record.history if pair[0] in due] == list(whole.history)
    assert set(evaluated_steps(record)) == due.keys() | set(LIMITS)
    if kind is MetricPlateau:
        # The metric is that of the evaluation at step 12.
        assert module.lowest.compute() == reference.lowest.compute() == 0.0
    assert rates_of(module) == rates_of(reference)


# The user's call-backs and loggers


class Notes(CSVLogger):
    """Keeps what it is told; each trial's is a copy of the user's."""

    told: ClassVar[list] = []

    def log_metrics(self, metrics, step=None):
        self.told.append((self, metrics))

    def log_hyperparams(self, params):
        assert params == {"number": 3, "batch_size": BATCH_SIZE, "lr": 0.1, "seed": 3}


def with_callbacks(*callbacks, **options):
    return protocol_of(trainer={**TRAINER, "callbacks": list(callbacks), **options})


def without_target(*callbacks):
    """A trial's protocol in which the budget alone ends it, as that of the run that sets the target."""
    protocol = with_callbacks(*callbacks)
    return replace(protocol, target=protocol.target.never_met)


class StopsItself(Regression):
    def configure_callbacks(self):
        return [EarlyStopping("val/error", patience=1, min_delta=1.0)]


# Its patience counts epochs: those of a large batch size have few steps, of which no trial may die.
@pytest.mark.parametrize(
    ("build", "callbacks"),
    [
        (Regression, [EarlyStopping("val/error", patience=1, min_delta=1.0)]),
        (
            Regression,
            [EarlyStopping("val/error", patience=1, min_delta=1.0, check_on_train_epoch_end=False)],
        ),
        (StopsItself, []),
    ],
)
def test_early_stopping_ends_no_trial_that_a_target_ends(build, callbacks):
    alone, reference = run(Regression)
    record, module = run(build, protocol=with_callbacks(*callbacks))
    assert (record.status, record.steps, record.message) == ("stopped", alone.steps, None)
    assert record.history == alone.history
    assert same_weights(module, reference)
    # Without a target it does.
    ended, _ = run(build, protocol=without_target(*callbacks))
    assert (ended.status, ended.steps < alone.steps) == ("stopped", True)
    assert "did not improve" in ended.message


def test_early_stopping_ends_the_trial_as_censored_and_starts_afresh_in_the_next_one():
    stopping = EarlyStopping("val/error", patience=1, min_delta=1.0)
    records = []
    for _ in range(2):
        record, _ = run(Regression, protocol=without_target(stopping))
        # The first epoch's value is the best, and the second is no better by 1.0.
        assert (record.status, record.steps) == ("stopped", 12)
        records.append(record)
    # The call-back looks at each epoch's end, and so it is evaluated there.
    assert evaluated_steps(records[0])[-1] == 12
    assert records[0].message == (
        "the training was stopped at step 12: Monitored metric val/error did not improve in the "
        "last 1 records. Best "
        f"score: {records[0].history[-2][1]:.3f}. Signaling Trainer to stop."
    )
    # The user's own call-back counts nothing.
    assert (stopping.wait_count, stopping.stopped_epoch) == (0, 0)


def test_early_stopping_goes_on_counting_where_a_trial_was_stopped(tmp_path):
    protocol = without_target(EarlyStopping("val/error", patience=2, min_delta=1.0))
    whole, reference = run(Regression, protocol=protocol)
    record, module = stop_and_continue(Regression, protocol, 12, tmp_path / "3.state")
    assert (record.steps, record.message, record.history) == (
        whole.steps,
        whole.message,
        whole.history,
    )
    assert same_weights(module, reference)


@pytest.mark.parametrize("given", [True, False])
def test_checkpoints_are_written_where_their_call_back_says_or_into_a_folder_for_the_trial(
    given, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    written = []

    class Saves(ModelCheckpoint):
        def on_train_end(self, trainer, pl_module):
            written.append(torch.load(self.best_model_path, weights_only=False))

    saves = Saves(
        dirpath=str(tmp_path / "mine") if given else None, monitor="val/error", filename="best"
    )
    run(Regression, protocol=with_callbacks(saves))
    # Lightning's own checkpoint, whole.
    (checkpoint,) = written
    assert checkpoint["hyper_parameters"] == {"lr": 0.05}
    assert entries(tmp_path) == (["mine"] if given else [])
    assert saves.best_model_path == ""


@pytest.mark.parametrize(
    ("own_folder", "mode", "knows_all"),
    [
        (True, "min", True),
        (True, "max", True),
        # The files of the first part are gone. The last evaluations are the best ones, or the worst.
        (False, "min", True),
        (False, "max", False),
    ],
)
def test_a_trial_that_goes_on_knows_the_scores_whose_files_are_left(
    own_folder, mode, knows_all, tmp_path
):
    found = []

    class Scores(ModelCheckpoint):
        def on_train_end(self, trainer, pl_module):
            paths = {*self.best_k_models, self.best_model_path, self.kth_best_model_path}
            assert all(map(os.path.exists, {*paths, self.last_model_path}))
            assert self.best_model_score == self.best_k_models[self.best_model_path]
            assert self.kth_value == self.best_k_models[self.kth_best_model_path]
            found.append(sorted(map(float, self.best_k_models.values())))

    def protocol_in(name):
        folder = str(tmp_path / name) if own_folder else None
        kept = {"save_top_k": 2, "save_last": True}
        return with_callbacks(Scores(folder, monitor="val/error", mode=mode, **kept))

    run(Regression, protocol=protocol_in("whole"))
    with warnings.catch_warnings():
        # Lightning says it of the user's own folder.
        warnings.filterwarnings("ignore", "Checkpoint directory .* exists and is not empty")
        # Each trial without a folder of its own has another one.
        warnings.filterwarnings("error", "The dirpath has changed")
        stop_and_continue(Regression, protocol_in("parts"), 12, tmp_path / "3.state")
    whole, _, going_on = found
    assert len(whole) == len(going_on) == 2
    assert (going_on == whole) == knows_all


def test_each_trial_logs_to_a_copy_of_the_logger(tmp_path):
    logger = Notes(tmp_path)
    protocol = with_callbacks(LearningRateMonitor(), logger=logger)
    for _ in range(2):
        run(TrainPlateau, protocol=protocol)
    assert len({id(own) for own, _ in Notes.told}) == 2
    # What a module and a monitor log reaches the logger as under Lightning.
    logged = set().union(*(metrics for _, metrics in Notes.told))
    assert logged >= {"lr-SGD", "val/error", "train/loss"}
    for own, _ in Notes.told:
        assert own is not logger


def test_a_plug_in_is_each_trials_own():
    """The scale of a gradient scaler is a state."""
    protocol = protocol_of(trainer=gradient_scaler(growth_interval=1, init_scale=2.0))
    first, module = run(Regression, protocol=protocol)
    again, other = run(Regression, protocol=protocol)
    assert first.history == again.history
    assert (
        module.trainer.precision_plugin.scaler.get_scale()
        == other.trainer.precision_plugin.scaler.get_scale()
        > 2.0
    )
    assert protocol.trainer["plugins"][0].scaler.get_scale() == 2.0


def test_what_cannot_be_copied_is_named():
    stopping = EarlyStopping("val/error")
    # A lock cannot be copied.
    stopping.lock = threading.Lock()
    with pytest.raises(
        ConfigError, match="each trial takes a copy of EarlyStopping, which cannot be copied"
    ):
        run(Regression, protocol=with_callbacks(stopping))


# Layers that are built late, and what checkpoints hold


class Unit:
    """A class of the user's own, which no file of plain data holds."""


class Late(Regression):
    """Builds one layer in ``setup``, one in ``configure_model``, and adds to its checkpoints."""

    def __init__(self, unit=None):
        super().__init__()
        self.unit = unit or Unit()
        self.save_hyperparameters()
        del self.net
        self.batches = 0

    def setup(self, stage):
        self.first = nn.Linear(1, 8)

    def configure_model(self):
        if not hasattr(self, "second"):
            self.second = nn.Linear(8, 1)

    def net(self, x):
        return self.second(torch.tanh(self.first(x)))

    def training_step(self, batch, batch_idx):
        self.batches += 1
        self.log("rate", self.trainer.optimizers[0].param_groups[0]["lr"])
        # The loss depends on a count that only the checkpoint keeps.
        return self.loss(batch) * self.batches**-0.5

    def test_step(self, batch, batch_idx):
        self.log("test/error", self.loss(batch), batch_size=1)
        self.log("test/batches", float(self.batches), batch_size=1)

    def on_save_checkpoint(self, checkpoint):
        assert isinstance(checkpoint["hyper_parameters"]["unit"], Unit)
        checkpoint["batches"] = {"number": self.batches}

    def on_load_checkpoint(self, checkpoint):
        assert isinstance(checkpoint["hyper_parameters"]["unit"], Unit)
        self.batches = checkpoint["batches"]["number"]


def test_a_module_that_is_built_late_goes_on_and_is_measured_and_tested(tmp_path):
    kind = partial(Late, Unit())
    protocol = protocol_of(noise_scale_every=8)
    whole, reference = run(kind, protocol=protocol)
    record, module = stop_and_continue(kind, protocol, 20, tmp_path / "3.state")
    assert same_weights(module, reference)
    steps = measured_steps(record.noise_scale)
    assert steps == measured_steps(whole.noise_scale) == [8, 16, 24, 32, 40]
    assert record.noise_scale == whole.noise_scale

    reached = replace(protocol, target=Target("val/error", whole.history[-1][1], "min"))
    record, module = run(kind, protocol=reached, checkpoint=tmp_path / "3.ckpt")
    assert record.reached
    workload = Workload(lambda spec: kind(), batches_of, HELD_OUT, 10)
    trainer = evaluate(workload, kind(), protocol, tmp_path / "3.ckpt", test=HELD_OUT)
    assert trainer.callback_metrics["test/batches"] == record.steps
    assert len(time_bare(workload, protocol, BATCH_SIZE, 0.05, 3, torch.device("cpu"))) == 3
    assert trainer.callback_metrics["test/error"].item() == pytest.approx(
        record.history[-1][1], rel=1e-5
    )


class Keeps(Regression):
    def on_save_checkpoint(self, checkpoint):
        # An object of a class of the user's.
        checkpoint["unit"] = Unit()


def test_a_checkpoint_with_more_than_plain_data_says_so(tmp_path):
    protocol = protocol_of(target=Target("val/error", 0.4, "min"))
    record, _ = run(Keeps, protocol=protocol, checkpoint=tmp_path / "3.ckpt")
    assert record.reached
    workload = Workload(lambda spec: Keeps(), batches_of, HELD_OUT, 10)
    text = (
        "3.ckpt cannot be loaded: it holds more than plain data.*Unit.*let on_save_checkpoint "
        "add numbers"
    )
    with pytest.raises(ConfigError, match=text):
        evaluate(workload, Keeps(), protocol, tmp_path / "3.ckpt", val=HELD_OUT)
