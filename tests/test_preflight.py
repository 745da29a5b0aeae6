"""What a few steps find before anything long: each mistake ends in its line, and no good project is refused."""

import copy
import random
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from learners import Stream
from lightning import LightningDataModule
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.utilities import CombinedLoader
from toolbox import make_protocol, make_result, make_spec
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    SequentialSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from bstune.config import compose, with_settings
from bstune.core import scaling
from bstune.core.errors import ConfigError
from bstune.core.records import Target, TrialSpec
from bstune.core.search_space import Space
from bstune.core.step_time import StepTime
from bstune.study.early_checks import check_takes_rate
from bstune.system.watchdog import Wait
from bstune.trial.batches.loader import rebatch
from bstune.trial.checks import recorder, short_runs
from bstune.trial.checks.loaders import check_loaders
from bstune.trial.checks.monitors import monitors_of
from bstune.trial.checks.preflight import preflight
from bstune.trial.checks.short_trial import ShortTrial
from bstune.trial.checks.start import check_hooks
from bstune.trial.loop import Workload
from bstune.trial.own_project.override_rate import override_rate

# 64 examples of one number each, in three classes.
DATA = TensorDataset(torch.arange(64.0).view(64, 1).sin(), torch.arange(64) % 3)
# Rates within three octaves of the rule's: the lowest at a batch size of 8 is 0.1/8 = 0.0125.
SPACE = Space(8, 64, 1, 1.0, partial(scaling.linear, reference_batch_size=8, reference_lr=0.1))


class Lit(LightningModule):
    """A module as its author would write it, without a fault."""

    def __init__(self, spec):
        super().__init__()
        self.spec = spec
        self.lr = spec.lr
        self.net = nn.Sequential(nn.Linear(1, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))

    def loss(self, batch):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch), batch_size=len(batch[0]))
        self.log("val_acc", 0.5, batch_size=len(batch[0]))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def fly(
    kind,
    space=SPACE,
    *,
    target=("val_loss", 0.01),
    trial=None,
    continues=True,
    survey=False,
    every=32,
    validation=None,
    examples=64,
    steps=100,
    train=None,
    override="",
    callbacks=(),
    is_open=False,
    micro=None,
):
    train = train or DataLoader(DATA, shuffle=True)
    workload = Workload(
        kind,
        lambda spec: rebatch(train, spec.batch_size, None, spec.seed),
        validation or DataLoader(DATA, batch_size=16),
        examples,
        train_examples=len(DATA),
        overrides_lr=bool(override),
        override=override,
    )
    protocol = make_protocol(steps, target=Target(*target, "min"), noise_scale_every=every)
    if is_open:
        protocol = replace(protocol, target=protocol.target.never_met)
    protocol = replace(
        protocol,
        micro_batch_size=micro,
        trainer={**protocol.trainer, "callbacks": list(callbacks)},
    )
    return preflight(workload, protocol, space, trial, continues=continues, survey=survey)


# An optimizer whose rate does not follow the trial's


class Fixed(Lit):
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


class FixedMaximum(Lit):
    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        # The schedule sets its own rates between 0.1 and a fraction of that.
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=0.1, total_steps=100, cycle_momentum=False
        )
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Overwritten(Lit):
    def on_train_batch_start(self, batch, batch_idx):
        for group in self.optimizers().param_groups:
            group["lr"] = 0.01


# It applies a rate of its own without its optimizer's step.
class ByHand(Lit):
    def __init__(self, spec):
        super().__init__(spec)
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        self.manual_backward(self.loss(batch))
        with torch.no_grad():
            for weight in self.parameters():
                weight -= 0.01 * weight.grad
                weight.grad = None


class NoOptimizer(Lit):
    def configure_optimizers(self):
        return None


# The lowest and the middle rate of the smallest batch size.
IGNORED = r"trial.lr has no effect: at 0.0125 and at 0.1 the first 3 steps of {} are the same"
RATES = r", with these rates of its optimizers at both: SGD {}\. Let configure_optimizers"


@pytest.mark.filterwarnings("ignore:.LightningModule.configure_optimizers. returned .None.")
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Fixed, RATES.format("0.05")),
        # Of a schedule the rate at that step is told.
        (FixedMaximum, RATES.format("0.00[0-9]+")),
        (Overwritten, RATES.format("0.01")),
        (ByHand, ", though the rates of its optimizers are not: train the weights by"),
        (
            NoOptimizer,
            ", as it has no optimizer with a learning rate: return one from configure_optimizers",
        ),
    ],
)
def test_a_rate_that_is_not_the_trials_is_refused(kind, message):
    with pytest.raises(ConfigError, match=f"^{IGNORED.format(kind.__name__)}{message}"):
        fly(kind)


# Rates that are set in the optimizer


def overriding(kind):
    def build(spec):
        module = kind(spec)
        configure = module.configure_optimizers

        # As a workload does whose rates are overridden.
        def configured():
            built = configure()
            override_rate(built, module, spec.lr)
            return built

        module.configure_optimizers = configured
        return module

    return build


class FixedGroups(Lit):
    """A hook sets the rate of one of its groups."""

    sets = False

    def configure_optimizers(self):
        head = {"params": self.net[2].parameters(), "lr": 0.2}
        return torch.optim.SGD([{"params": self.net[0].parameters(), "lr": 0.001}, head])

    def on_train_batch_start(self, batch, batch_idx):
        if self.sets:
            self.optimizers().param_groups[0]["lr"] = 0.001


class SetsOneGroup(FixedGroups):
    sets = True


class Floor(torch.optim.lr_scheduler.LRScheduler):
    # A floor does not move with the rate: the schedule is no multiple of it.
    floor = 0.02

    def get_lr(self):
        return [max(self.floor, rate * 0.9**self.last_epoch) for rate in self.base_lrs]


class FixedFloor(Fixed):
    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        return [optimizer], [{"scheduler": Floor(optimizer), "interval": "step"}]


# Nothing of a foreign schedule says how to scale it.
class ForeignSchedule(Fixed):
    class Steps:
        def __init__(self, optimizer):
            self.optimizer = optimizer

        def step(self):
            pass

        def state_dict(self):
            return {}

        def load_state_dict(self, state):
            pass

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        schedule = ForeignSchedule.Steps(optimizer)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    def lr_scheduler_step(self, scheduler, metric):
        scheduler.step()


# The rates of each stay in proportion.
@pytest.mark.parametrize("kind", [Fixed, FixedMaximum, FixedGroups, Lit])
def test_a_rate_that_is_set_in_the_optimizer_is_the_trials(kind):
    findings = fly(overriding(kind), override="override_lr=True")
    # A checkpoint does not undo it.
    assert findings.continues


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Overwritten, "override_lr=True sets the rate in the optimizer, and a hook"),
        (SetsOneGroup, "override_lr=True moves .* after 3 steps those of SetsOneGroup .* a hook"),
        (
            FixedFloor,
            r"override_lr=True moves .* Floor of FixedFloor \(test_preflight.py:\d+\) has",
        ),
        (ForeignSchedule, "override_lr=True sets .* and ForeignSchedule .* has Steps"),
    ],
)
def test_a_rate_that_does_not_keep_its_proportion_is_refused(kind, message):
    with pytest.raises(ConfigError, match=message):
        fly(overriding(kind), override="override_lr=True")


# Good projects, which are not refused


class Warm(Lit):
    """The rate of the first steps is 0 at every trial's rate, and tiny afterwards."""

    steps = 1000

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: min(1.0, step / self.steps)
        )
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Glacial(Warm):
    # No weight moves in float32.
    steps = 10**12


class WarmByEpoch(Lit):
    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        return [optimizer], [
            # By epochs: the whole first epoch has a rate of 0.
            torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: min(1.0, epoch / 5))
        ]


class WarmByHand(Lit):
    """Sets rates of zero at first, of which no schedule has noted where they will end."""

    def on_train_batch_start(self, batch, batch_idx):
        for group in self.optimizers().param_groups:
            # For 50 steps nothing tells whose rate it will be.
            group["lr"] = self.lr if self.global_step > 50 else 0.0


class WarmAndNormed(WarmByHand):
    """Its weights move without the optimizer."""

    def on_train_batch_end(self, outputs, batch, batch_idx):
        # So other weights alone do not show that the rate has an effect.
        self.net[0].weight.data.div_(self.net[0].weight.norm())


class Adam(Lit):
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


class Scaled(Lit):
    def configure_optimizers(self):
        # The rate depends on the batch size, too.
        return torch.optim.SGD(self.parameters(), lr=self.lr * self.spec.batch_size / 256)


class Groups(Lit):
    """Only the head's rate is the trial's."""

    def configure_optimizers(self):
        head = {"params": self.net[2].parameters(), "lr": self.lr}
        return torch.optim.SGD([{"params": self.net[0].parameters(), "lr": 1e-3}, head])


class Hparams(Lit):
    def __init__(self, spec):
        super().__init__(spec)
        self.save_hyperparameters({"learning_rate": spec.lr})

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.hparams.learning_rate)


class Stochastic(Lit):
    def loss(self, batch):
        return nn.functional.cross_entropy(
            # Its losses differ by chance, though the rate has an effect.
            nn.functional.dropout(self.net(batch[0]), 0.5, self.training),
            batch[1],
        )


class Still(Lit):
    """Its gradients are zero at first."""

    # The weights stay as they are whatever the rate is.
    def training_step(self, batch, batch_idx):
        return self.loss(batch) * 0.0


class Alternating(Lit):
    """Two optimizers under manual optimization."""

    def __init__(self, spec):
        super().__init__(spec)
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        for place, optimizer in enumerate(self.optimizers()):
            # The second optimizer steps in every other batch.
            if batch_idx % (place + 1) == 0:
                optimizer.zero_grad()
                self.manual_backward(self.loss(batch))
                optimizer.step()

    def configure_optimizers(self):
        first = torch.optim.SGD(self.net[0].parameters(), lr=self.lr)
        return [first, torch.optim.SGD(self.net[2].parameters(), lr=self.lr)]


class Counts(Callback):
    def on_validation_epoch_end(self, trainer, pl_module):
        # The metric may come from a call-back.
        pl_module.log("val_loss", 1.0)


class LogsFromCallback(Lit):
    def validation_step(self, batch, batch_idx):
        pass

    def configure_callbacks(self):
        return Counts()


class ValidatesTwice(Lit):
    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.log("val_loss", self.loss(batch), batch_size=len(batch[0]))


class QuietInSanityCheck(Lit):
    def validation_step(self, batch, batch_idx):
        # Lightning's own check before training is not to be mistaken for an evaluation.
        if not self.trainer.sanity_checking:
            super().validation_step(batch, batch_idx)


class PreparesInFit(Lit):
    """Needs hooks of the training before it can be evaluated."""

    def on_fit_start(self):
        self.scale = torch.ones(())

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch) * self.scale, batch_size=len(batch[0]))


class KeepsState(Lit):
    def on_save_checkpoint(self, checkpoint):
        checkpoint["mine"] = [1, 2]

    def on_load_checkpoint(self, checkpoint):
        assert checkpoint["mine"] == [1, 2]


GOOD = (
    *(Lit, Warm, WarmByEpoch, WarmAndNormed, Groups, Stochastic, Still),
    *(Alternating, LogsFromCallback, PreparesInFit, KeepsState),
)
# Each is near to one of those.
GOOD_TOO = (Glacial, WarmByHand, Adam, Scaled, Hparams, QuietInSanityCheck)


@pytest.mark.parametrize(
    "kind", [*GOOD, *(pytest.param(kind, marks=pytest.mark.soak) for kind in GOOD_TOO)]
)
def test_a_good_project_is_not_refused(kind):
    found = fly(kind)
    assert found.smallest == 8
    module = kind(SimpleNamespace(lr=0.1, batch_size=8))
    assert found.parameters == sum(p.numel() for p in module.parameters())
    # A good project is told nothing, but for what manual optimization means.
    assert not found.notes or kind is Alternating


def test_several_validation_loaders_have_a_metric_each():
    validation = [DataLoader(DATA, batch_size=16), DataLoader(DATA, batch_size=32)]
    # Lightning adds the loader's number to the name.
    fly(ValidatesTwice, target=("val_loss/dataloader_idx_1", 0.01), validation=validation)
    with pytest.raises(
        ConfigError, match="logs val_loss/dataloader_idx_0, val_loss/dataloader_idx_1: make one"
    ):
        fly(ValidatesTwice, validation=validation)


def test_one_trial_by_itself_is_tried_at_its_own_batch_size():
    # Of one trial the space is not asked: 5 lies below its 8.
    assert fly(Lit, trial=TrialSpec(0, 0, 5, 0.1, None, 0), continues=False).smallest == 5


def with_callbacks(*callbacks):
    class Monitored(Lit):
        def configure_callbacks(self):
            return copy.deepcopy(list(callbacks))

    return Monitored


STOPPING = EarlyStopping("val_loss", patience=1)
SAVING = ModelCheckpoint(monitor="val_loss")
ENDS_NONE = "EarlyStopping ends no trial: bstune does, at the target or at the trial's last step"
ENDS = (
    "EarlyStopping ends trials that no target ends, and counts the ends of epochs there, not those of "
    "val_check_interval"
)


# Call-backs of the Trainer, and those of the module, are named in one line.
@pytest.mark.parametrize(
    ("of_trainer", "of_module", "is_open", "note"),
    [
        (
            [STOPPING, SAVING],
            [],
            False,
            f"{ENDS_NONE}; the files of ModelCheckpoint go with their trial",
        ),
        (
            [],
            [STOPPING, SAVING],
            False,
            f"{ENDS_NONE}; the files of ModelCheckpoint go with their trial",
        ),
        ([STOPPING], [SAVING], True, f"{ENDS}; the files of ModelCheckpoint go with their trial"),
        ([STOPPING], [EarlyStopping("val_loss", mode="max")], True, ENDS),
        (
            [ModelCheckpoint("mine")],
            [],
            False,
            f"ModelCheckpoint saves all trials to {Path('mine').absolute()}",
        ),
        ([LearningRateMonitor()], [], False, None),
    ],
)
def test_the_plan_says_how_call_backs_that_stop_or_save_act(of_trainer, of_module, is_open, note):
    found = fly(with_callbacks(*of_module), callbacks=of_trainer, is_open=is_open)
    assert found.notes == (() if note is None else (note,))


def test_without_epochs_a_patience_counts_evaluations():
    note = monitors_of([STOPPING]).note(target_is_open=True, has_epochs=False)
    assert "counts bstune's evaluations there" in note


class Contrastive(Lit):
    """Each example is to be told from all others of its batch."""

    def loss(self, batch):
        features = nn.functional.normalize(self.net(batch[0]))
        return nn.functional.cross_entropy(features @ features.T, torch.arange(len(features)))


class Summed(Lit):
    def loss(self, batch):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1], reduction="sum")


class ContrastiveMapping(Contrastive):
    """The loss is in a mapping, and the step takes a batch alone."""

    def training_step(self, batch):
        return {"loss": self.loss(batch)}


class Denoising(Lit):
    """The loss of a batch is another one for each draw of the noise."""

    def loss(self, batch):
        return nn.functional.mse_loss(self.net(batch[0]), torch.randn(len(batch[0]), 3))


class Weighted(Lit):
    """A mean with weights: a part of a batch may have others than the whole."""

    def loss(self, batch):
        weight = torch.tensor([1.0, 10.0, 100.0])
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1], weight)


class Dropping(Lit):
    """Dropout and batch statistics differ from part to part, and are no part of the loss."""

    def __init__(self, spec):
        super().__init__(spec)
        self.net = nn.Sequential(self.net[0], nn.Dropout(0.9), *self.net[1:])


class Annealed(Lit):
    """A weight of the loss rises with the steps that the module counts."""

    def __init__(self, spec):
        super().__init__(spec)
        self.register_buffer("steps", torch.zeros(()))

    def training_step(self, batch, batch_idx):
        self.steps += 1
        return self.loss(batch) * (1.0 + 0.1 * self.steps)


class OfOneSize(Contrastive):
    def training_step(self, batch, batch_idx):
        assert len(batch[0]) == self.spec.batch_size
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Lit, []),
        (Contrastive, ["depends on the batch's size", "of 8 examples it is"]),
        (ContrastiveMapping, ["depends on the batch's size"]),
        (Weighted, []),
        (Denoising, []),
        # A sum may be one over the trial's batch size, and so a mean.
        (Summed, []),
        (Dropping, []),
        (Annealed, []),
        # It takes no doubled batch.
        (OfOneSize, []),
    ],
)
def test_a_loss_that_depends_on_the_number_of_examples_is_told(kind, words):
    notes = fly(kind).notes
    assert len(notes) == bool(words)
    for word in words:
        assert word in notes[0]


def test_manual_optimization_is_trained_as_it_is():
    text = (
        "Alternating steps its optimizers itself (manual optimization): trained as it is, one "
        "step of a trial a batch "
        "(in 4 batches its optimizers took 4 and 2 steps)"
    )
    assert fly(Alternating).notes == (text + ", without noise scale",)
    assert fly(Alternating, every=None).notes == (text,)


def test_micro_batches_are_refused_to_manual_optimization_before_any_survey():
    """The short trials' batches are a micro-batch each: only larger ones would be accumulated."""
    with pytest.raises(ConfigError, match="Alternating steps its optimizers itself"):
        fly(Alternating, micro=32, survey=True)
    # Micro-batches that no batch exceeds ask nothing of it, and other modules accumulate.
    fly(Alternating, micro=64)
    fly(Lit, micro=32)


def test_batch_normalisation_of_one_example_is_left_to_the_survey():
    space = Space(1, 64, 1, 1.0, SPACE.rule)
    # A batch of 1 is left out, and the next size tried is four times as large.
    assert fly(Lit, space, survey=True).smallest == 4
    # Without a survey the error of a batch of 1 is the user's to see.
    with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
        fly(Lit, space)


# What is missing


class NoValidation(Lit):
    validation_step = LightningModule.validation_step


class NoTraining(Lit):
    training_step = LightningModule.training_step


class LogsNothing(Lit):
    def validation_step(self, batch, batch_idx):
        pass


class LogsInSanityCheck(Lit):
    def validation_step(self, batch, batch_idx):
        self.log("val_sanity" if self.trainer.sanity_checking else "val_acc", 0.5, batch_size=1)


class SavesWhatItCannotLoad(KeepsState):
    def on_load_checkpoint(self, checkpoint):
        raise KeyError("ema")


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (
            NoValidation,
            (
                r"NoValidation \(test_preflight.py:\d+\) has no validation_step: (.|\n)*"
                r"def validation_step\(self, batch, batch_idx\):\n.*\n +self.log\('val_loss', "
            ),
        ),
        (
            NoTraining,
            r"NoTraining \(test_preflight.py:\d+\) has no training_step: return the loss there",
        ),
    ],
)
def test_a_hook_that_is_missing_is_named(kind, message):
    # The module that has both passes.
    check_hooks(Lit(SimpleNamespace(lr=0.1)))
    with pytest.raises(ConfigError, match=message):
        check_hooks(kind(SimpleNamespace(lr=0.1)))


@pytest.mark.parametrize(
    ("kind", "target", "message"),
    [
        # A misspelt name, and the name of another stage.
        (
            Lit,
            "val_los",
            (
                "'val_los' is logged nowhere; in validation the module logs val_acc, val_loss: make "
                "one"
            ),
        ),
        (
            Lit,
            "train_loss",
            (
                "'train_loss' is logged in training alone; in validation the module logs val_acc, "
                "val_loss"
            ),
        ),
        (
            LogsNothing,
            "val_loss",
            (
                r"'val_loss' is logged nowhere, and nothing in validation_step "
                r"\(test_preflight.py:\d+\): (.|\n)*"
                r"self.log\('val_loss', "
            ),
        ),
        # Lightning's own check logs it, but no evaluation of a trial does.
        (
            LogsInSanityCheck,
            "val_sanity",
            "'val_sanity' is logged nowhere; in validation the module logs val_acc: make one",
        ),
        (
            SavesWhatItCannotLoad,
            "val_loss",
            (
                r"a stopped trial of SavesWhatItCannotLoad cannot be continued from its checkpoint: "
                r"KeyError: 'ema' "
                r"\(test_preflight.py:\d+\); let it load what it saves, make in __init__ what .*, "
                r"or set sampler=tpe"
            ),
        ),
    ],
)
def test_a_metric_or_a_state_that_is_missing_is_named(kind, target, message):
    with pytest.raises(ConfigError, match=message):
        fly(kind, target=(target, 0.01))


def test_a_checkpoint_is_not_tried_where_no_trial_is_continued():
    # The same module as above, whose state cannot be loaded.
    fly(SavesWhatItCannotLoad, continues=False)


class Unreadable(Lit):
    def on_save_checkpoint(self, checkpoint):
        # An object needs pickle, which a checkpoint is not loaded by.
        checkpoint["mine"] = SimpleNamespace()


def test_a_checkpoint_that_is_no_plain_data_is_a_note():
    (note,) = fly(Unreadable).notes
    assert note.startswith(
        "a stopped trial cannot be continued, it starts afresh: it holds more than plain data"
    )


# Modules that seed generators themselves


def seeding(hook, seed):
    """Give a module that calls ``seed`` in one of its hooks."""

    class Seeds(Stochastic):
        pass

    # The hook does what it did before, and then seeds.
    def call(self, *arguments, **options):
        getattr(Stochastic, hook)(self, *arguments, **options)
        seed()

    setattr(Seeds, hook, call)
    return Seeds


def seed_all():
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


def seed_torch():
    torch.manual_seed(0)


def seed_aside():
    """As a module does whose first weights are always the same."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        torch.rand(1)


@pytest.mark.parametrize(
    ("hook", "seed", "named", "where"),
    [
        # Each hook that runs before a first step may seed what comes after it.
        ("__init__", seed_torch, "torch", "after __init__"),
        # Hooks before on_fit_start are looked at together with it.
        *(
            pytest.param(hook, seed_torch, "torch", "after on_fit_start", marks=pytest.mark.slow)
            for hook in ("setup", "configure_model")
        ),
        ("on_fit_start", seed_torch, "torch", "after on_fit_start"),
        ("on_train_start", seed_torch, "torch", "after on_train_start"),
        # The hooks after the first look are seen by what the first step draws.
        ("on_train_epoch_start", seed_torch, "torch", "at the first step"),
        ("__init__", seed_all, "python, numpy and torch", "after __init__"),
        ("on_fit_start", lambda: np.random.seed(0), "numpy", "after on_fit_start"),
        ("on_fit_start", lambda: random.seed(0), "python", "after on_fit_start"),
    ],
)
def test_a_module_that_seeds_itself_is_named(hook, seed, named, where):
    (note,) = fly(seeding(hook, seed), continues=False).notes
    assert note.startswith(f"fresh seeds are not fresh: Seeds seeds {named} itself (")
    assert where in note


class SameStart(Lit):
    """Its first weights are the same whatever the seed, and its generators are not."""

    def __init__(self, spec):
        super().__init__(spec)
        for weight in self.parameters():
            nn.init.constant_(weight, 0.1)


class SeedsByTrial(Lit):
    def on_fit_start(self):
        torch.manual_seed(1000 + self.spec.seed)


# They are equal at the start, or differ by the trial's seed: neither makes two seeds one.
@pytest.mark.parametrize(
    "kind", [SameStart, SeedsByTrial, seeding("__init__", seed_aside), seeding("setup", seed_aside)]
)
def test_other_weights_are_not_what_makes_a_seed_fresh(kind):
    assert fly(kind).notes == ()


def test_the_seeds_of_a_trial_by_itself_are_its_own_affair():
    spec = TrialSpec(0, 0, 8, 0.1, None, 0)
    assert fly(seeding("__init__", seed_torch), trial=spec, continues=False).notes == ()


def test_a_target_that_untrained_weights_meet_is_refused():
    with pytest.raises(ConfigError, match="the target val_loss <= 90 is met before training"):
        # The loss of untrained weights for three classes is about log 3 = 1.1.
        fly(Lit, target=("val_loss", 90.0))


# A configuration in which nothing takes the trial's rate


@pytest.mark.parametrize(
    ("module", "message"),
    [
        # The argument by its usual name.
        ({"lr": 0.1}, r"set workload.module.lr='\$\{trial.lr\}'"),
        (
            {"_target_": f"{__name__}.Fixed"},
            r"pass \$\{trial.lr\} in workload.module to whatever of \S+Fixed takes",
        ),
        ({"_target_": "no.such"}, "whatever of no.such takes"),
        # A number that stands in the config, however deep, before an argument of the class.
        (
            {"_target_": "torch.optim.lr_scheduler.OneCycleLR", "optimizer": {"lr": 0.001}},
            r"set workload.module.optimizer.lr='\$\{trial.lr\}'",
        ),
        # Of arguments in LightningCLI's form the one that is a rate.
        (
            {"class_path": "torch.optim.lr_scheduler.OneCycleLR", "init_args": {}},
            r"set workload.module.init_args.max_lr='\$\{trial.lr\}'",
        ),
    ],
)
def test_a_config_that_does_not_use_the_rate_is_refused(module, message):
    composed = compose(["workload=digits", "device=cpu"])
    # digits itself passes the check.
    check_takes_rate(composed.options, composed.trained_recipe)
    settings = {"workload.module": module}
    if "lr" in module:
        settings = {"workload.module.lr": module["lr"]}
    changed = with_settings(composed, settings).trained_recipe
    with pytest.raises(ConfigError, match="nothing in the workload takes .*" + message):
        check_takes_rate(composed.options, changed)


# Data that cannot be read in other batches


class Data(LightningDataModule):
    """Returns the given loaders."""

    def __init__(self, train=None, validation=None):
        super().__init__()
        plain = DataLoader(DATA, batch_size=7, shuffle=True)
        self.train = plain if train is None else train
        self.validation = plain if validation is None else validation

    def train_dataloader(self):
        return self.train

    def val_dataloader(self):
        return self.validation


class Nothing(Data):
    def val_dataloader(self):
        return None


class OwnBatches(Data):
    # It hands out batches of its own.
    train_batches = None


class NoValidationData(LightningDataModule):
    train_dataloader = Data.train_dataloader


class Own(DataLoader):
    def __iter__(self):
        return super().__iter__()


class Buckets(BatchSampler):
    pass


PLAIN = DataLoader(DATA)
STREAM = DataLoader(Stream())
WEIGHTED = Data(DataLoader(DATA, sampler=WeightedRandomSampler([1.0] * 64, 64)))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        # What each returns, and what to give in its place.
        (
            Data(STREAM),
            (
                r"train_dataloader\(\) cannot .*: its data set, Stream, is iterable .*; let "
                r"the data .*data=lambda batch_size"
            ),
        ),
        (
            Data([PLAIN, PLAIN]),
            (
                r"train_dataloader\(\) cannot .*: it returns 2 loaders in a list, not one "
                r".*data=lambda batch_size"
            ),
        ),
        (
            Data({"a": PLAIN}),
            (
                r"train_dataloader\(\) cannot .*: it returns 1 loader in a dict, .*ConcatDataset or "
                r"StackDataset"
            ),
        ),
        (
            Data(iter("ab")),
            r"train_dataloader\(\) cannot .*: it returns a str\w*iterator, not a torch DataLoader",
        ),
        # It may return batches that were made for another size.
        (
            Data(Own(DATA)),
            r"train_dataloader\(\) cannot .*: Own has an __iter__ of its own; .*train_batches\(",
        ),
        # Which batches it makes is its own affair, and nobody can say what another size would be.
        (
            Data(DataLoader(DATA, batch_sampler=Buckets(SequentialSampler(DATA), 4, False))),
            "its batch_sampler, Buckets, makes",
        ),
        (Data(DataLoader(DATA, sampler=range(64))), "its sampler, range, is not one of torch's"),
        (
            Data(CombinedLoader([PLAIN, PLAIN])),
            r"train_dataloader\(\) cannot .*: it returns 2 loaders in a CombinedLoader",
        ),
        (
            # A validation without an end is none.
            Data(validation=[PLAIN, STREAM]),
            r"val_dataloader\(\) returns a DataLoader without a length",
        ),
        (NoValidationData(), r"\(test_preflight.py:\d+\) has no val_dataloader: define it"),
        (Data(validation=[]), r"val_dataloader\(\) \(test_preflight.py:\d+\) returns no loader"),
        (Nothing(), r"val_dataloader\(\) \(test_preflight.py:\d+\) returns no loader"),
    ],
)
def test_loaders_that_do_not_do_are_named(data, message):
    with pytest.raises(ConfigError, match=f"^{type(data).__name__}.*{message}"):
        check_loaders(data)


@pytest.mark.parametrize("train", [STREAM, [PLAIN, PLAIN], iter("ab"), Own(DATA)])
def test_what_a_function_of_the_batch_size_gives_is_taken_as_it_is(train):
    # Given for a batch size, they are taken as they come.
    check_loaders(Data(train), is_given=True)
    with pytest.raises(ConfigError, match="without a length"):
        check_loaders(Data(train, [STREAM]), is_given=True)


@pytest.mark.parametrize(
    "data",
    [
        Data(),
        # To validate on, several loaders and streams with an end will do.
        Data(validation={"a": PLAIN, "b": PLAIN}),
        Data(validation=STREAM),
        OwnBatches([PLAIN]),
        WEIGHTED,
    ],
)
def test_loaders_that_do_are_not_refused(data):
    check_loaders(data)


# What the short trials cost


@pytest.fixture
def timed(monkeypatch):
    """A function that times a made-up machine, and what was asked of it."""

    def run(tau, low=8, high=512, multiple=1):
        asked = []

        def run_trial(workload, spec, protocol, **options):
            asked.append((spec, protocol))
            return make_result()

        monkeypatch.setattr(short_runs, "run_trial", run_trial)
        # The seconds of a step are the machine's; here they are a function of the batch size.
        seconds = property(lambda trial: tau(trial.spec.batch_size))
        monkeypatch.setattr(ShortTrial, "seconds", seconds)
        rule = partial(scaling.linear, reference_batch_size=64, reference_lr=0.1)
        return fly(Lit, Space(low, high, multiple, 1.0, rule)).step_time, asked

    return run


@pytest.mark.parametrize(
    ("at_8", "at_32", "expected"),
    [
        # These lie on a straight line.
        (0.018, 0.042, (0.01, 0.001)),
        (0.3, 0.3, (0.3, 0.0)),
        # Noise makes neither part negative.
        (0.5, 0.4, (0.5, 0.0)),
        # A line through both has 0.2 s an example, and -1.5 s a step before them.
        (0.1, 4.9, (0.0, 0.2)),
    ],
)
def test_two_batch_sizes_give_a_step_time(timed, at_8, at_32, expected):
    step_time, _ = timed({8: at_8, 32: at_32}.__getitem__)
    assert step_time == StepTime(*(pytest.approx(part, abs=1e-12) for part in expected))


@pytest.mark.parametrize(
    ("sizes", "tried"),
    [
        # A pair to time, four times apart; then two more at the smallest size.
        ({}, [8, 32, 8, 8]),
        # No size is past the largest.
        ({"high": 20}, [8, 20, 8, 8]),
        # Multiples of 8 at or above 3 and 4 x 3.
        ({"low": 3, "multiple": 8}, [8, 16, 8, 8]),
        # With a single size there is nothing to compare it with.
        ({"low": 64, "high": 64}, [64, 64, 64]),
    ],
)
def test_short_trials_are_few_and_at_low_rates(timed, sizes, tried):
    step_time, asked = timed(lambda batch_size: 0.01 * batch_size, **sizes)
    assert [spec.batch_size for spec, _ in asked] == tried
    # 0.01 s an example and no more.
    assert step_time == StepTime(pytest.approx(0.0), pytest.approx(0.01))
    for spec, _ in asked[:-1]:
        # That is the lowest rate searched, three octaves down.
        assert spec.lr == pytest.approx(0.1 * spec.batch_size / 64 / 8)
    # The last one is at the rule's own rate.
    assert asked[-1][0].lr == pytest.approx(0.1 * tried[0] / 64)
    of_first, *of_others = [protocol for _, protocol in asked]
    # The first one measures the untrained weights on all of the data.
    assert of_first.trainer.get("limit_val_batches") is None
    assert of_first.noise_scale_every is None
    for protocol in of_others:
        assert protocol.trainer["limit_val_batches"] == 4
        assert protocol.noise_scale_every is None


# Where a step is fast, its time an example shows only at a far larger batch.
@pytest.mark.parametrize(("seconds", "largest"), [(0.001, 256), (0.015, 256), (0.02, 32)])
def test_fast_steps_are_timed_at_batch_sizes_farther_apart(timed, seconds, largest):
    _, asked = timed(lambda batch_size: seconds)
    assert [spec.batch_size for spec, _ in asked] == [8, largest, 8, 8]


def test_a_step_takes_the_least_of_the_seconds_between_two_ends():
    watching = recorder.Recorder(
        make_spec(), "val/error", recorder.SHORT_PLAN, Wait(""), exact=True
    )
    assert watching.seen(make_result()).seconds == 0.0
    # Steps of 0.5, 0.2 and 0.9 s: what slows one down is none of its work.
    watching.clock.ends += [10.0, 10.5, 10.7, 11.6]
    assert watching.seen(make_result()).seconds == pytest.approx(0.2)


class Slow(Lit):
    """Takes a second a step, by a clock that nobody waits for."""

    seconds = 0.0

    def training_step(self, batch, batch_idx):
        # More than PATIENCE_SECONDS after two steps.
        Slow.seconds += 1.5
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(("kind", "steps"), [(Lit, [4, 4, 1, 3, 5, 5]), (Slow, [2, 2, 1, 2, 3, 3])])
def test_a_trial_whose_steps_take_seconds_ends_after_its_second_one(monkeypatch, kind, steps):
    ended = []

    def run_trial(*arguments, **options):
        result = whole_trial(*arguments, **options)
        ended.append(result.steps)
        return result

    whole_trial = short_runs.run_trial
    monkeypatch.setattr(short_runs, "run_trial", run_trial)
    monkeypatch.setitem(recorder.StepClock.__init__.__kwdefaults__, "now", lambda: Slow.seconds)
    assert fly(kind).notes == ()
    assert ended == steps


def test_untrained_weights_are_judged_by_all_of_the_data_where_a_part_meets_the_target():
    """The first and every other small batch have another metric than the rest."""
    seen = []

    class Uneven(Lit):
        def validation_step(self, batch, batch_idx):
            seen.append(len(batch[0]))
            is_part = self.trainer.num_val_batches[0] < 3
            self.log("val_loss", 0.0 if is_part else 1.0, batch_size=len(batch[0]))

    # 640 examples are ten batches, of which a short trial reads a few.
    data = TensorDataset(torch.rand(640, 1), torch.randint(3, (640,)))
    fly(Uneven, validation=DataLoader(data, batch_size=64), examples=640)
    # After the part has met it, one evaluation reads all ten.
    assert 640 in [sum(seen[i : i + 10]) for i in range(len(seen))]
