"""What the processes of a trial on several devices import: small workloads, some of which fail on one of them alone."""

import os
import threading
from dataclasses import replace
from functools import partial

import learners
import torch
from learners import learning_protocol, validation
from lightning.pytorch import LightningModule
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from bstune.core.records import Target
from bstune.system.console import quieten
from bstune.trial.batches.loader import rebatch
from bstune.trial.devices import distributed
from bstune.trial.loop import Workload, run_trial
from bstune.trial.parts.checkpoint import Stopped
from bstune.workloads.classifier import Classifier


class Noisy(Dataset):
    """Points of three classes; each is drawn anew from the generator of torch if it is ``noisy``."""

    def __init__(self, n, seed, noisy=False):
        generator = torch.Generator().manual_seed(seed)
        self.y = torch.randint(3, (n,), generator=generator)
        self.x = F.one_hot(self.y, 3) + 0.5 * torch.randn(n, 3, generator=generator)
        self.noisy = noisy

    def __len__(self):
        return len(self.y)

    def __getitem__(self, index):
        return {
            "x": self.x[index] + (0.1 * torch.randn(3) if self.noisy else 0.0),
            "y": self.y[index],
        }


class Foreign(LightningModule):
    """A module as its author would write it, which knows nothing of several devices."""

    def __init__(self, spec, fault=None):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 3))
        self.lr = spec.lr
        self.fault = fault
        # DDP waits for the gradient of every parameter.
        if fault == "unused":
            self.unused = nn.Linear(3, 3)
        self.automatic_optimization = fault != "manual"

    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self.net(batch["x"]), batch["y"])
        return fault_in_training(self, self.fault, loss)

    def validation_step(self, batch, batch_idx):
        loss = F.cross_entropy(self.net(batch["x"]), batch["y"])
        self.log(
            "val/loss", fault_in_validation(self, self.fault, loss), batch_size=len(batch["y"])
        )

    def on_train_epoch_end(self):
        if self.fault == "epoch" and second():
            self.trainer.should_stop = True

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), self.lr)


def second():
    return distributed.place() is not None and distributed.place().rank == 1


def fault_in_training(module, fault, loss):
    """Do on the second process alone, at the third step, what the fault says; return the loss."""
    # By then both have taken steps together.
    if not second() or module.trainer.global_step < 2:
        return loss
    match fault:
        case "memory":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        case "error":
            raise LookupError("no such thing")
        case "death":
            # Without any clean-up, as when the system kills it.
            os._exit(7)
        case "hang":
            threading.Event().wait()
        case "loss":
            return loss + torch.tensor(float("nan"))
        case "stop":
            module.trainer.should_stop = True
    return loss


def fault_in_validation(module, fault, loss):
    """The metric as the fault says that one process sees it, once it has trained."""
    steps = module.trainer.global_step
    match fault:
        case "metric" if second() and steps >= 5:
            return loss * float("nan")
        case "reached by the second" if second() and steps >= 5:
            return loss * 0.0
        case "reached by the first" if not second() and steps >= 5:
            return loss * 0.0
    return loss


# To train on, and held out.
FOREIGN = (Noisy(60, 0), Noisy(20, 1))


def workload(kind, spec, micro_batch_size):
    """A shipped module on batches of images, or a foreign one on a DataLoader."""
    if kind in ("shipped", "whole batches"):
        batches = partial(learners.stream, micro_batch_size=micro_batch_size)
        if kind == "whole batches":
            # An iterator alone does not tell how to share its batches.
            batches = lambda spec: iter(learners.stream(spec))  # noqa: E731
        return Workload(learners.learner, batches, validation(), 20)
    loader = DataLoader(Noisy(60, 0, kind == "noisy"), batch_size=4, shuffle=True)
    return Workload(
        build_module=partial(Foreign, fault=kind),
        train_batches=lambda spec: rebatch(loader, spec.batch_size, micro_batch_size, spec.seed),
        validation_batches=DataLoader(FOREIGN[1], batch_size=8),
        validation_examples=20,
    )


def open_train(kind, micro_batch_size=None, devices=2, lowest=-1.0):
    """A function that trains a trial of a workload, and writes its state to the output folder.

    Of several kinds each trial has the one at its number.
    """
    quieten()
    # A spec's max_steps end the trial long before.
    protocol = learning_protocol(1000, micro_batch_size=micro_batch_size, devices=devices)
    protocol = replace(protocol, target=Target("val/loss", lowest, "min"))

    def train(spec, output, parent):
        resume = None if parent is None else Stopped(parent, output.root / f"{parent.number}.state")
        own = kind if isinstance(kind, str) else kind[spec.number]
        state, reached = (output.root / f"{spec.number}.{name}" for name in ("state", "ckpt"))
        return run_trial(
            workload(own, spec, micro_batch_size),
            spec,
            protocol,
            reached,
            state_file=state,
            resume=resume,
        )

    return train


class Limited(Classifier):
    """A classifier that takes no more than 17 examples at once."""

    def training_step(self, batch, batch_idx):
        if len(batch[1]) > 17:
            raise LookupError("no more than 17")
        return super().training_step(batch, batch_idx)
