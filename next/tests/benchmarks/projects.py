"""Six projects as strangers write them, and plain Trainer runs of them; without bstune.

``PROJECT_DATA`` is a folder with ``fashion-mnist/`` (the two training files, gzipped IDX),
``tinyshakespeare.txt`` and ``airfoil_self_noise.dat``, as published; the others need no files.
"""

import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

from lightning.pytorch import (
    Callback,
    LightningDataModule,
    LightningModule,
    Trainer,
    seed_everything,
)
from torch.utils.data import DataLoader

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


class UntilTarget(Callback):
    """Ends a fit at the first evaluation that meets the target; ``step`` is its step, or None."""

    def __init__(self, target):
        self.metric, sign, goal = target.split()
        self.goal = float(goal)
        self.is_least = sign == "<="
        self.step = None

    def reached(self, trainer):
        value = float(trainer.callback_metrics[self.metric])
        return value <= self.goal if self.is_least else value >= self.goal

    def on_validation_end(self, trainer, module):
        if self.reached(trainer):
            self.step = trainer.global_step
            trainer.should_stop = True


def plain_trainer(**arguments):
    """A Trainer that prints and writes nothing."""
    return Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, num_sanity_val_steps=0, **arguments,
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


Build = Callable[[], tuple[LightningModule, LightningDataModule]]


def steps_to_target(build, target, most, seed, evaluate_every, **arguments):
    """Steps of a plain run to the target; None where it does not reach it.

    It was reached at one of the steps since the evaluation before: the middle counts.
    """
    seed_everything(seed, verbose=False)
    module, data = build()
    until = UntilTarget(target)
    evaluated = {"val_check_interval": evaluate_every, "check_val_every_n_epoch": None}
    plain_trainer(max_steps=most, callbacks=[until], **evaluated, **arguments).fit(module, data)
    return None if until.step is None else until.step - (evaluate_every - 1) / 2


def step_seconds(build, now=time.perf_counter, **arguments):
    """Seconds of a step of a plain fit without evaluations: the median over blocks."""
    times = []

    class Stamp(Callback):
        def on_train_batch_end(self, trainer, *arguments):
            if trainer.global_step % BLOCK == 0:
                times.append(now())

    seed_everything(0, verbose=False)
    module, data = build()
    never = {"val_check_interval": 10**9, "check_val_every_n_epoch": None}
    steps = BLOCK + TIMED_STEPS
    plain_trainer(max_steps=steps, callbacks=[Stamp()], **never, **arguments).fit(module, data)
    return statistics.median(later - earlier for earlier, later in pairwise(times)) / BLOCK


@contextmanager
def busy(count):
    """Keep so many processes computing meanwhile."""
    spin = [sys.executable, "-c", "while True: pass"]
    processes = [subprocess.Popen(spin) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()
