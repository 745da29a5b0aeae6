"""Six projects as strangers write them, and plain Trainer runs of them.

``PROJECT_DATA`` is a folder with ``fashion-mnist/`` (the two training files, gzipped IDX),
``tinyshakespeare.txt`` and ``airfoil_self_noise.dat``, as published; the others need no files.
"""

import math
import statistics
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, Trainer, seed_everything
from torch.utils.data import DataLoader

from bstune.core.evaluation_schedule import next_evaluation
from bstune.core.records import Target

sys.path.insert(0, str(Path(__file__).parents[1] / "projects"))

# Steps whose time counts, after the first ones: the median over blocks of steps.
TIMED_STEPS = 200
BLOCK = 20
# Rates lie within this factor of the baseline's.
LR_FACTOR = 30.0


@dataclass(frozen=True)
class Project:
    """A project with its question.

    Args:
        file, module, data: of tests/projects.
        target: of a logged metric.
        baseline: batch size and rate.
        batch_size: smallest and largest.
        examples: of the budget of a trial, beside 400 steps.
        trainer: arguments of its Trainer.
        rate: the module's argument that is the learning rate.
    """

    file: str
    module: str
    data: str
    target: str
    baseline: tuple[int, float]
    batch_size: tuple[int, int]
    examples: int
    trainer: Mapping[str, Any] = field(default_factory=dict)
    steps: int = 400
    evaluate_every: int = 2
    """Steps between two evaluations of a plain run."""
    rate: str = "lr"

    @property
    def lr(self):
        """Smallest and largest rate."""
        return self.baseline[1] / LR_FACTOR, self.baseline[1] * LR_FACTOR

    @property
    def classes(self):
        """Of the module and of the data."""
        file = import_module(self.file)
        return getattr(file, self.module), getattr(file, self.data)

    def last_step(self, batch_size):
        """Of a trial that does not reach the target."""
        return max(self.steps, -(-self.examples // batch_size))

    def build(self, batch_size, lr):
        """Module and data of a plain run."""
        module, data = self.classes
        return module(**{self.rate: lr}), rebatched(data(), batch_size)


PROJECTS = {
    "tutorial": Project(
        "tutorial", "Classifier", "Digits", "val_loss <= 0.2", (64, 0.1), (8, 512), 200_000
    ),
    "lazy_layers": Project(
        "lazy_layers", "ConvNet", "DigitsData", "val_loss <= 0.2", (32, 0.01), (8, 256), 60_000
    ),
    "own_collate": Project(
        "own_collate", "DictModel", "DictData", "valid/loss <= 0.3", (16, 0.001), (2, 64), 20_000
    ),
    "fashion_cnn": Project(
        "fashion_cnn", "LitCNN", "FashionDataModule", "val/acc >= 0.8", (64, 0.01), (8, 512), 60_000
    ),
    "char_lstm": Project(
        "char_lstm", "CharLSTM", "CharData", "val_loss <= 2.3", (32, 0.001), (4, 256), 40_000,
        trainer={"gradient_clip_val": 1.0}, evaluate_every=8, rate="learning_rate",
    ),
    "airfoil_mlp": Project(
        "airfoil_mlp", "Regressor", "AirfoilDataModule", "val_mse <= 0.2", (32, 0.001), (4, 512),
        100_000, evaluate_every=4,
    ),
}  # fmt: skip


def plain_trainer(project, steps, every, callback):
    """A project's Trainer, evaluated so often, that prints and writes nothing."""
    return Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, num_sanity_val_steps=0, max_steps=steps, callbacks=[callback],
        val_check_interval=every, check_val_every_n_epoch=None, **project.trainer,
    )  # fmt: skip


def rebatched(data, batch_size):
    """The project's own data, its training loader at another batch size, drop_last as S(B) asks."""
    loader = data.train_dataloader

    def train_dataloader():
        own = loader()
        return DataLoader(
            own.dataset,
            batch_size=batch_size,
            shuffle=True,
            drop_last=True,
            collate_fn=own.collate_fn,
        )

    data.train_dataloader = train_dataloader  # type: ignore[method-assign]
    return data


class UntilTarget(Callback):
    """Ends a plain fit once an evaluation of bstune's schedule has met the target.

    The fit is evaluated more often than that. Where the metric dips under the target and rises
    again, the two readings differ.

    Args:
        schedule: what tells bstune's next evaluation, of the history so far.
        target: to reach.
        every: steps between two evaluations of the fit.

    Attributes:
        steps: to the target as bstune would have recorded them; infinite where it is missed.
        first_steps: to the target by all evaluations.
    """

    def __init__(self, schedule, target, every):
        self.schedule, self.target, self.every = schedule, target, every
        self.history = []
        self.steps = self.first_steps = math.inf

    def on_validation_end(self, trainer, module):
        step = trainer.global_step
        value = float(trainer.callback_metrics[self.target.metric])
        reached = self.target.reached(value)
        if reached:
            # The target was reached at one of the steps since the last evaluation.
            self.first_steps = min(self.first_steps, step - (self.every - 1) / 2)
        if step < self.schedule(self.history):
            return
        missed = max([0, *(earlier for earlier, _ in self.history)])
        self.history.append((step, value))
        if reached:
            self.steps = max((missed + 1 + step) / 2, 1.0)
            trainer.should_stop = True


def plain_run(project, pair, seed, every, first=None):
    """Train a batch size and rate for at most the project's budget.

    It is evaluated each ``every`` steps, and read as bstune would that evaluates by ``first``.
    """
    seed_everything(seed, verbose=False)
    module, data = project.build(*pair)
    data.setup("fit")
    target = Target.parse(project.target)
    of_schedule = {
        "target": target,
        "batch_size": pair[0],
        "examples": len(data.val_dataloader().dataset),
        "first": first,
    }
    until = UntilTarget(partial(next_evaluation, **of_schedule), target, every)
    trainer = plain_trainer(project, project.last_step(pair[0]), every, until)
    trainer.fit(module, datamodule=data)
    return until


def step_seconds(project, pair, now=time.perf_counter):
    """Seconds of a step of a plain fit without evaluations: the median over blocks."""
    times = []

    class Stamp(Callback):
        def on_train_batch_end(self, trainer, *arguments):
            if trainer.global_step % BLOCK == 0:
                times.append(now())

    seed_everything(0, verbose=False)
    module, data = project.build(*pair)
    steps, never = BLOCK + TIMED_STEPS, 10**9
    plain_trainer(project, steps, never, Stamp()).fit(module, data)
    return statistics.median(later - earlier for earlier, later in pairwise(times)) / BLOCK
