"""What trials are tested with: a small problem that is really learnt, and a module whose metric is a function."""

from functools import partial

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import MixedPrecision
from toolbox import TRAINER, FakeTime, make_protocol, make_spec
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, IterableDataset

from bstune.core.clock import TrialClock
from bstune.core.evaluation_schedule import EvaluationSchedule
from bstune.core.records import Target
from bstune.trial.batches.image_batches import EvalBatches, Normalisation, TrainBatches
from bstune.trial.loop import Workload, run_trial
from bstune.workloads.classifier import Classifier

# What workloads have by default.
SCHEDULE = EvaluationSchedule(ratio=1.05, share=0.25, cost=0.5, near=1.5)
momentum = partial(torch.optim.SGD, momentum=0.9, nesterov=True)


class Operators(TorchDispatchMode):
    """Notes the names of the operators that are called, those that only look at memory in another way left out."""

    VIEWS = (
        "view",
        "slice",
        "select",
        "split",
        "unbind",
        "unsqueeze",
        "expand",
        "permute",
        "detach",
        "alias",
    )
    EMPTY = ("empty", "new_empty", "_unsafe_view")

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.removeprefix("aten::")
        if not name.startswith(self.VIEWS + self.EMPTY):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


class Stream(IterableDataset):
    """Data without a length."""

    def __iter__(self):
        return iter(range(3))


def make_images(n, seed):
    """Images of 3x3 pixels in three classes, each with a brighter pixel, and their labels."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(3, (n,), generator=generator)
    noise = torch.randint(-50, 51, (n, 1, 3, 3), generator=generator)
    # 170 among 100, each 50 up or down: learnt, and not at once.
    images = (100 + 70 * F.one_hot(labels, 9).view(n, 1, 3, 3) + noise).clamp(0, 255)
    return images.to(torch.uint8), labels


IMAGES, LABELS = make_images(60, 0)
VALIDATION = make_images(20, 1)
# (100 - 100)/50 = 0.
NORMALISE = Normalisation(torch.full((1, 1, 1, 1), 1 / 50), torch.full((1, 1, 1, 1), -2.0))


def stream(spec, micro_batch_size=None, **options):
    sizes = {"batch_size": spec.batch_size, "micro_batch_size": micro_batch_size}
    return TrainBatches(IMAGES, LABELS, **sizes, seed=spec.seed, normalise=NORMALISE, **options)


def validation():
    return EvalBatches(*VALIDATION, batch_size=8, normalise=NORMALISE)


def learner(
    spec,
    kind=Classifier,
    optimizer=torch.optim.SGD,
    layers=(),
    schedule=None,
    average=None,
    callbacks=(),
    **options,
):
    """A classifier of the images; layers, average and call-backs are made anew for each."""
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(9, 16), nn.Tanh(), *(layer() for layer in layers), nn.Linear(16, 3)
    )
    if callbacks:
        options["callbacks"] = [callback() for callback in callbacks]
    average = None if average is None else average()
    return kind(model, nn.CrossEntropyLoss(), optimizer, spec.lr, schedule, average, **options)


def learning_protocol(steps=60, **changes):
    """A protocol that evaluates now and then, with a target that is never met."""
    values = {
        "target": Target("val/loss", 0.0, "min"),
        "evaluation_schedule": SCHEDULE,
        "divergence": 5.0,
    }
    return make_protocol(steps, **(values | changes))


def train(
    spec=None,
    protocol=None,
    build=learner,
    batches=stream,
    evaluated=validation,
    examples=20,
    data=None,
    **options,
):
    """Run a trial in no time; return its record and the module that it trained."""
    # run_trial gives a record, and tests look at the module.
    module = None

    def kept(spec):
        nonlocal module
        module = build(spec)
        return module

    protocol = protocol or learning_protocol()
    batches = partial(batches, micro_batch_size=protocol.micro_batch_size)
    options.setdefault("clock", TrialClock(FakeTime()))
    workload = Workload(kept, batches, evaluated(), examples, data_module=data)
    return run_trial(workload, spec or make_spec(), protocol, **options), module


class Counting(LightningModule):
    """One weight that grows by 1 with each applied optimizer step; the metric is a function of it.

    ``gradient`` gives the factor of the gradient at a training batch (from 0); the weight is what the optimizer made.
    """

    def __init__(self, metric, gradient=lambda batch: 1.0, name="val/error"):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        self.metric = metric
        self.gradient = gradient
        self.metric_name = name

    def training_step(self, batch, batch_idx):
        # SGD at a rate of 1 adds the factor to the weight.
        return -self.weight * self.gradient(batch_idx)

    def validation_step(self, batch, batch_idx):
        # Rounded, as sums of single precision are.
        self.log(self.metric_name, self.metric(round(self.weight.item(), 3)), batch_size=1)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)


def blanks(spec, micro_batch_size=None):
    """An endless stream of batches that nobody looks at."""
    while True:
        yield torch.zeros(spec.batch_size)


def count(module, spec=None, protocol=None, batches=blanks, evaluated=1, **options):
    """Train a module that looks at no batch; return the record."""
    protocol = protocol or make_protocol()
    loader = DataLoader(torch.zeros(evaluated))
    return train(
        spec, protocol, lambda spec: module, batches, lambda: loader, examples=10, **options
    )[0]


def tensors(module):
    return [tensor.detach() for tensor in module.state_dict().values()]


def same_weights(module, other):
    return all(torch.equal(a, b) for a, b in zip(tensors(module), tensors(other), strict=True))


def gradient_scaler(**options):
    """The options of one Trainer with a gradient scaler on the CPU: it has a state of its own."""
    scaler = torch.amp.GradScaler("cpu", **options)
    return {**TRAINER, "plugins": [MixedPrecision("16-mixed", "cpu", scaler=scaler)]}


def factors(schedule, steps):
    """Each step's factor of the learning rate of each group of parameters."""
    used = []
    for _ in range(steps):
        used.append(
            [
                rate / full
                for rate, full in zip(schedule.get_last_lr(), schedule.base_lrs, strict=True)
            ]
        )
        schedule.optimizer.step()
        schedule.step()
    return used
