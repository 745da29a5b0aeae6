"""Within a segment of training nothing waits for the device: no value of a tensor is read on the host."""

from functools import partial
from itertools import product

import pytest
import torch
from builders import options_and_recipe
from toolbox import make_spec

from bstune.core.clock import Phase, TrialClock
from bstune.options import with_option
from bstune.trial.backend import make_protocol
from bstune.trial.batches.image_batches import EvalBatches, Normalisation, TrainBatches
from bstune.trial.loop import Workload, run_trial
from bstune.trial.workload import build_module
from bstune.workloads.images import random_crop_flip

READS = (
    "item",
    "tolist",
    "__bool__",
    "__float__",
    "__int__",
    "__index__",
    "cpu",
    "numpy",
    "__array__",
    "nonzero",
)
# resnet_cifar: schedule with a horizon, batch norm, augmentation. digits: warm-up, an average of
# the weights.
WORKLOADS = {
    "digits": ("workload=digits",),
    "resnet_cifar": (
        "workload=resnet_cifar",
        "workload.module.model.width=2",
        "workload.precision=32-true",
    ),
}
PRECISIONS = ("32-true", "bf16-mixed", "bf16-true")
SHAPES = {"digits": (1, 8, 8), "resnet_cifar": (3, 32, 32)}


class Watching(TrialClock):
    """A clock that says when the training runs."""

    def __init__(self, begin, end):
        super().__init__()
        self._begin = begin
        self._end = end

    def enter(self, phase):
        self._end()
        elapsed = super().enter(phase)
        if phase is Phase.TRAINING:
            self._begin()
        return elapsed


def train(workload, clock, device="cpu", module_of=lambda module: module, overrides=()):
    """Run 8 steps of a workload on random images, with evaluations and measured noise scales in between."""
    options, recipe = options_and_recipe(
        *WORKLOADS[workload],
        "budget.steps=8",
        "protocol.evaluation_share=1",
        "budget.examples=1",
        *overrides,
    )
    options = with_option(options, "device", device)
    protocol = make_protocol(options, recipe)
    protocol = protocol.for_steps_only()
    generator = torch.Generator().manual_seed(0)
    images = (
        torch.randint(256, (256, *SHAPES[workload]), generator=generator).to(torch.uint8).to(device)
    )
    labels = torch.randint(10, (256,), generator=generator).to(device)
    normalise = Normalisation(
        *(torch.full((1, 1, 1, 1), value, device=device) for value in (1 / 64, -2.0))
    )
    augment = partial(random_crop_flip, padding=4) if workload == "resnet_cifar" else None

    def stream(own):
        sizes = {"batch_size": own.batch_size, "micro_batch_size": protocol.micro_batch_size}
        return TrainBatches(
            images, labels, **sizes, seed=own.seed, normalise=normalise, augment=augment
        )

    validation = EvalBatches(images[:64], labels[:64], batch_size=32, normalise=normalise)

    def build(own):
        return module_of(build_module(options, recipe, own))

    workload = Workload(build, stream, validation, 64)
    return run_trial(workload, make_spec(16, 0.01), protocol, clock=clock)


@pytest.fixture
def reads(monkeypatch):
    """A function that makes every read of a tensor's value raise, and one that lets it be."""
    on = []

    def guarded(name):
        read = getattr(torch.Tensor, name)

        def call(*arguments, **options):
            if on:
                raise AssertionError(f"Tensor.{name} within a segment of training")
            return read(*arguments, **options)

        return call

    for name in READS:
        monkeypatch.setattr(torch.Tensor, name, guarded(name))
    return partial(on.append, True), on.clear


@pytest.mark.parametrize(
    ("workload", "precision", "micro"),
    [
        ("digits", "32-true", "null"),
        ("digits", "bf16-true", "12"),
        ("resnet_cifar", "bf16-mixed", "null"),
        *(
            pytest.param("resnet_cifar", *rest, marks=pytest.mark.soak)
            for rest in product(PRECISIONS, ("null", "12"))
        ),
    ],
)
def test_no_value_is_read_on_the_host(reads, workload, precision, micro):
    # Norms that are read in the training's own backward passes end in one read a measurement, so
    # they are left out.
    noise = "2" if micro == "null" else "null"
    options = (f"protocol.micro_batch_size={micro}", f"protocol.noise_scale_every={noise}")
    result = train(workload, Watching(*reads), overrides=(f"precision={precision}", *options))
    assert (result.status, result.steps) == ("stopped", 8)
    # Evaluations may read, and some lay within.
    assert len(result.history) > 1
    assert bool(result.noise_scale) == (micro == "null")


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("read", [lambda loss: loss.item(), bool, lambda loss: loss.cpu()])
def test_a_read_would_be_found(reads, read):
    def with_reader(module):
        module.on_train_batch_end = lambda outputs, batch, batch_idx: read(outputs["loss"])
        return module

    with pytest.raises(AssertionError, match=r"Tensor\.\w+ within a segment of training"):
        train("digits", Watching(*reads), module_of=with_reader)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("workload", WORKLOADS)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_nothing_waits_for_a_cuda_device(workload, precision):
    # Under "error" torch itself refuses what would wait.
    mode = torch.cuda.set_sync_debug_mode
    clock = Watching(partial(mode, "error"), partial(mode, "default"))
    clock._synchronize = torch.cuda.synchronize
    try:
        result = train(workload, clock, "cuda", overrides=(f"precision={precision}",))
    finally:
        mode("default")
    assert (result.status, result.steps) == ("stopped", 8)
