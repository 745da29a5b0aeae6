"""Captured steps, on a CPU: the operators of a step are recorded and repeated in a CUDA graph's place."""

import itertools
import random
import subprocess
import sys
from collections import deque
from dataclasses import replace
from functools import partial
from pathlib import Path

import graphs
import learners
import pytest
import torch
from builders import loaded, options_of
from fits import protocol_of, run
from learners import learner, momentum, same_weights
from test_lean_loop import LEAN
from toolbox import column, evaluated_steps, json_rows, make_spec, metric_values
from torch import nn

from bstune.hydra_recipe import instantiate
from bstune.options import option_at
from bstune.trial.devices.errors import WARNED
from bstune.trial.fast import graph
from bstune.trial.fast.graph import CapturedSteps
from bstune.trial.loop import run_trial
from bstune.trial.parts.checkpoint import Stopped
from bstune.workloads.classifier import Classifier
from bstune.workloads.optim import Muon
from bstune.workloads.schedules import linear_decay


@pytest.fixture(autouse=True)
def recorded(monkeypatch):
    """Let steps on a CPU be captured; return the list of the captures."""
    captures = []

    def record(step, generators):
        captures.append(graphs.record(step, generators))
        return captures[-1]

    monkeypatch.setattr(graph, "DEVICES", ("cpu",))
    monkeypatch.setattr(graph, "record", record)
    # Warnings come once a process, and each test counts its own.
    WARNED.clear()
    return captures


def fused(kind, **options):
    """An optimizer as captured steps have it, for an eager reference that is the same to the bit."""
    return partial(kind, fused=True, **options)


def of_algorithm(name):
    """An optimizer of conf/algorithm/, whose config is composed where one is made."""

    def make(parameters, lr):
        options = options_of("workload=digits", f"algorithm={name}")
        return instantiate(option_at(options, "workload.module.optimizer"), name)(parameters, lr)

    return make


# Matrices are orthogonalised, vectors are not.
def muon(parameters, lr):
    parameters = list(parameters)
    matrices = [parameter for parameter in parameters if parameter.dim() > 1]
    vectors = [parameter for parameter in parameters if parameter.dim() == 1]
    groups = [
        {"params": matrices, "orthogonalise": True},
        {"params": vectors, "lr": lr / 2},
    ]
    return Muon(
        groups, lr, momentum=0.9, nesterov=True, steps=3, normalise_weights=False, weight_decay=0.01
    )


# Batch norm has statistics, and dropout draws numbers: a replay must do both.
network = partial(learner, layers=(partial(nn.BatchNorm1d, 16), partial(nn.Dropout, 0.2)))


def train(build, steps=12, captured=True, change=lambda module, step: None, **options):
    """Train by hand, with or without captured steps; return the module, the losses and the captured steps."""
    # The same start for both ways, to the number that the module itself may draw.
    torch.manual_seed(7)
    random.seed(7)
    module = build(make_spec(16, 0.05), **options)
    module.train()
    configured = module.configure_optimizers()
    if isinstance(configured, dict):
        optimizer = configured["optimizer"]
        schedule = configured["lr_scheduler"]["scheduler"]
    else:
        optimizer = configured
        schedule = None

    def eager(batch, index):
        optimizer.zero_grad()
        loss = module.training_step(batch, index)
        loss.backward()
        optimizer.step()
        return {"loss": loss.detach().clone()}

    take = CapturedSteps(module, optimizer, eager) if captured else eager
    losses = []
    for index, batch in enumerate(itertools.islice(learners.stream(make_spec(16)), steps)):
        # What changes between steps must reach a captured step.
        change(module, index)
        losses.append(take(batch, index)["loss"].item())
        if schedule is not None:
            schedule.step()
    return module, losses, take


# Fused optimizers compute on the device as captured ones do, so that they agree to the bit.
@pytest.mark.parametrize(
    ("options", "exact"),
    [
        ({"optimizer": fused(torch.optim.SGD, momentum=0.9, nesterov=True)}, True),
        ({"optimizer": fused(torch.optim.Adam)}, True),
        (
            {
                "optimizer": fused(torch.optim.AdamW),
                "schedule": partial(linear_decay, total_steps=12, end=0.1),
            },
            False,
        ),
        (
            {"optimizer": momentum, "schedule": partial(linear_decay, total_steps=12, end=0.0)},
            False,
        ),
        ({"optimizer": muon, "schedule": partial(linear_decay, total_steps=12, end=0.0)}, False),
        (
            {
                "optimizer": of_algorithm("muon"),
                "schedule": partial(linear_decay, total_steps=12, end=0.0),
            },
            False,
        ),
        ({"optimizer": of_algorithm("adamw")}, False),
    ],
)
def test_replays_are_the_steps(options, exact, recorded):
    """With batch norm, dropout's random numbers and rates that change, in float32 and so not always to the bit."""
    module, losses, take = train(network, **options)
    plain, expected, _ = train(network, captured=False, **options)
    # One capture serves all steps.
    assert (take.reason, len(recorded)) == (None, 1)
    assert losses == pytest.approx(expected, rel=1e-5)
    if exact:
        assert losses == expected
        assert same_weights(module, plain)


# Each case below has one thing that a replay could not repeat.
class Numbering(Classifier):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * (1.0 if batch_idx % 5 else 2.0)


class Counting(Classifier):
    calls = 0

    def training_step(self, batch, batch_idx):
        self.calls += 1
        return super().training_step(batch, batch_idx)


class Keeping(Classifier):
    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.losses = []
        self.latest = deque(maxlen=2)

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.losses.append(loss.detach())
        return loss


class Replacing(Classifier):
    mean = torch.zeros(())

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        # The mean is another tensor after each step, which no graph can know.
        self.mean = 0.9 * self.mean + 0.1 * loss.detach()
        return loss


class Drawing(Classifier):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * (1.0 + random.random())


class Reading(Classifier):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        # Reading a value waits for the device.
        return loss if loss.item() > 0 else 2 * loss


class Plain(torch.optim.Optimizer):
    """An optimizer of the user's own, with its rate on the host."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(parameter.grad, alpha=group["lr"])


# A hook is Python, which a graph does not call.
def listened(parameters, lr):
    optimizer = torch.optim.SGD(parameters, lr, fused=True)
    optimizer.register_step_post_hook(lambda *arguments: None)
    return optimizer


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"optimizer": listened}, "the steps of SGD have hooks, which a graph does not call"),
        ({"kind": Numbering}, "training_step uses batch_idx, which differs from step to step"),
        ({"kind": Counting}, "training_step changes calls on the host"),
        ({"kind": Keeping}, "training_step changes losses on the host"),
        ({"kind": Replacing}, "training_step changes mean on the host"),
        ({"kind": Drawing}, "training_step draws random numbers on the host"),
        (
            {"kind": Reading},
            # A capture cannot wait for the device.
            "RuntimeError in its capture: CUDA error: operation not permitted when stream is captu",
        ),
        ({"optimizer": Plain}, "the steps of Plain are neither fused nor capturable"),
    ],
)
# Each of these would be replayed wrongly: it must be taken eagerly, with a line that says why.
def test_what_differs_from_step_to_step_is_not_captured(options, reason, warned):
    if "optimizer" not in options:
        options = options | {"optimizer": fused(torch.optim.SGD, momentum=0.9)}
    module, losses, take = train(network, **options)
    plain, expected, _ = train(network, captured=False, **options)
    assert take.reason.startswith(reason)
    assert losses == expected
    assert same_weights(module, plain)
    assert len(warned()) == 1


def freeze(module, step):
    # A frozen parameter changes the step once.
    if step == 6:
        next(module.parameters()).requires_grad_(False)


def cycle(module, step):
    # A momentum that changes at each step would be captured each time.
    module.trained.param_groups[0]["momentum"] = 0.9 - 0.01 * step


class Exposing(Classifier):
    def configure_optimizers(self):
        self.trained = super().configure_optimizers()
        return self.trained


@pytest.mark.parametrize(
    ("change", "steps", "captures", "reason"),
    [
        # It is frozen once, so there are two captures.
        (freeze, 12, 2, None),
        # What would be captured at every step is given up.
        (cycle, 12, 0, "the module, the optimizer's options, tensors' places or shapes change"),
    ],
)
def test_a_step_that_changes_is_captured_anew_a_few_times(
    change, steps, captures, reason, recorded
):
    options = {
        "optimizer": fused(torch.optim.SGD, momentum=0.9),
        "kind": Exposing,
        "change": change,
    }
    module, losses, take = train(network, steps, **options)
    plain, expected, _ = train(network, steps, captured=False, **options)
    assert len(recorded) == captures
    assert (take.reason or "").startswith(reason or "")
    assert (take.reason is None) == (reason is None)
    assert losses == expected
    assert same_weights(module, plain)


def fail(step, generators, error):
    try:
        raise error
    finally:
        # CUDA's own error follows what failed, and says nothing of it.
        raise RuntimeError("CUDA error: operation failed due to a previous error during capture")


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (
            partial(fail, error=ValueError("no kernel\nand more")),
            "ValueError in its capture: no kernel",
        ),
        (
            # This graph is captured well and does nothing when it is replayed.
            lambda step, generators: graphs.record(step, generators) and (lambda: None),
            "a replayed step differs from",
        ),
    ],
)
def test_where_a_capture_fails_the_training_is_eager(record, reason, monkeypatch):
    monkeypatch.setattr(graph, "record", record)
    options = {"optimizer": fused(torch.optim.SGD, momentum=0.9)}
    module, losses, take = train(network, **options)
    plain, expected, _ = train(network, captured=False, **options)
    assert take.reason.startswith(reason)
    assert losses == expected
    assert same_weights(module, plain)


# Whole trials


AIRBENCH = ("workload.module.model.widths=[8,8,8]", "workload.module.model.whitening.images=64")
MODES = ("graph", "off")
LOOPS = {
    # The second epoch's step uses batch_idx.
    "batch alone": "lean, not graph: a replayed step differs from the step itself in "
    "net.0.weight",  # by batch_idx
    "closure called twice": "lean, not graph: the steps of Twice have hooks, which a graph does "
    "not call",
    "dictionaries": "lean, not graph: a batch holds more than tensors (int)",
}
# Those of the quick and the slow tests; the others are soaked.
FEW = ("mnist_cnn", "airbench_cifar")
SMALL = {
    "fashion_mlp": ("[1,28,28]", "+workload.module.optimizer.fused=true"),
    "mnist_cnn": ("[1,28,28]", "+workload.module.optimizer.fused=true"),
    "resnet_cifar": ("[3,32,32]", "workload.module.model.width=4"),
    "resnet_cifar_fast": (
        "[3,32,32]",
        "workload.module.model.width=4",
        "workload.module.model.whitening.images=64",
    ),
    "airbench_cifar": (
        "[3,32,32]",
        "workload.module.model.widths=[8,8,8]",
        "workload.module.model.whitening.images=64",
    ),
    "airbench_muon": (
        "[3,32,32]",
        "workload.module.model.widths=[8,8,8]",
        "workload.module.model.whitening.images=64",
    ),
    "speedrun_cifar": (
        "[3,32,32]",
        "workload.module.model.widths=[8,8,8]",
        "workload.module.model.whitening.images=64",
    ),
}


def trial(workload, fast, *overrides):
    """Run twelve steps of a workload on random images; return the record and the module."""
    shape, *small = SMALL[workload]
    images = (
        "workload.data.load._target_=graphs.random_images",
        f"+workload.data.load.shape={shape}",
    )
    options = (
        "budget.steps=12",
        "budget.examples=1",
        "protocol.evaluation_share=1",
        "protocol.noise_scale_every=5",
    )
    validation = (
        () if "cifar" in workload or "airbench" in workload else ("workload.data.validation=32",)
    )
    own = (
        f"workload={workload}",
        f"protocol.fast={fast}",
        "device=cpu",
        "workload.target.metric=val/loss",
    )
    built, protocol = loaded(*own, *images, *options, *validation, *small, *overrides)
    # A metric far past its start must not end so short a trial.
    protocol = replace(protocol.for_steps_only(), divergence=1e9)
    modules = []

    def build(spec):
        modules.append(built.build_module(spec))
        return modules[-1]

    result = run_trial(replace(built, build_module=build), make_spec(32, 0.02, 5), protocol)
    return result, modules[-1]


@pytest.mark.parametrize(
    "workload",
    [
        "mnist_cnn",
        pytest.param("airbench_cifar", marks=pytest.mark.slow),
        *(pytest.param(name, marks=pytest.mark.soak) for name in SMALL if name not in FEW),
    ],
)
def test_a_trial_is_that_of_eager_steps_to_the_bit(workload, recorded):
    """History, noise scale and weights, with evaluations, averages and Lookahead between replays."""
    result, module = trial(workload, "graph")
    assert result.training_loop == "graph"
    assert recorded
    plain, other = trial(workload, "off")
    assert (result.history, result.noise_scale) == (plain.history, plain.noise_scale)
    # Something must have been compared.
    assert len(result.history) > 1
    assert len(result.noise_scale) == 2
    assert same_weights(module, other)


class Asking(Classifier):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * (1.0 + self.global_step)


class Logging(Classifier):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("train/loss", loss)
        return loss


class Clipping(Classifier):
    def on_before_optimizer_step(self, optimizer):
        nn.utils.clip_grad_norm_(self.parameters(), 1.0)


class Epochs(Classifier):
    """Changes its loss between steps, now and then."""

    share = 1.0

    def on_validation_start(self):
        self.share *= 0.5

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * self.share


@pytest.mark.parametrize(
    ("kind", "loop"),
    [
        (Classifier, "graph"),
        (Epochs, "graph"),
        (
            Asking,
            (
                "lean, not graph: training_step uses trainer.global_step, which differs from step "
                "to step"
            ),
        ),
        (Logging, "lean, not graph: training_step uses self.log, which differs from step to step"),
        (Clipping, "Lightning's: Clipping has on_before_optimizer_step"),
    ],
)
def test_the_record_says_what_took_the_steps(kind, loop):
    build = partial(network, kind=kind, optimizer=fused(torch.optim.SGD, momentum=0.9))
    protocol = learners.learning_protocol
    record, module = learners.train(make_spec(16), protocol(20, fast="graph"), build)
    reference, other = learners.train(make_spec(16), protocol(20, fast="off"), build)
    assert record.training_loop == loop
    assert record.history == reference.history
    assert same_weights(module, other)


@pytest.mark.filterwarnings("ignore::UserWarning")
# Logging and watching are called in each step, which no graph can repeat.
@pytest.mark.parametrize("case", [name for name in LEAN if name not in ("logging", "watching")])
def test_a_trial_of_any_module_is_what_it_is_under_lightnings_loop(case):
    kind, changes, options = LEAN[case]
    trained = []
    for mode in MODES:
        protocol = protocol_of(**{"steps": 20, **changes, "fast": mode})
        trained.append(run(kind, protocol=protocol, **options))
    (record, module), (reference, other) = trained
    assert record.training_loop == LOOPS.get(case, "graph")
    assert evaluated_steps(record) == evaluated_steps(reference)
    # Fused steps of weights in half precision are computed in float32.
    close = {"rel": 0.02, "abs": 0.01} if case == "bf16-true" else {"rel": 1e-5, "abs": 1e-6}
    assert metric_values(record) == pytest.approx(metric_values(reference), **close)
    for weight, expected in zip(learners.tensors(module), learners.tensors(other), strict=True):
        assert weight.flatten().tolist() == pytest.approx(expected.flatten().tolist(), **close)


def test_a_capture_that_runs_out_of_memory_ends_the_trial_as_a_step_would(monkeypatch):
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
    monkeypatch.setattr(graph, "record", partial(fail, error=error))
    result, _ = learners.train(make_spec(16), learners.learning_protocol(20, fast="graph"))
    assert (result.status, result.message) == (
        "out of memory",
        "CUDA out of memory. Tried to allocate 2 GiB",
    )


ALL = ("digits", "fashion_cnn", "cifar_mlp", *SMALL)


@pytest.mark.parametrize(
    ("workloads", "precision"),
    [
        (ALL, "bf16-mixed"),
        (("resnet_cifar", "airbench_muon"), "32-true"),
        (("resnet_cifar", "airbench_muon"), "bf16-true"),
    ],
)
@pytest.mark.soak
def test_a_captured_step_asks_nothing_of_the_host_and_is_the_same_each_time(workloads, precision):
    """On fake CUDA tensors, which choose the operators that CUDA has."""
    command = [
        sys.executable,
        Path(__file__).parent / "fake_cuda/captured.py",
        *workloads,
        "--precision",
        precision,
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    if "nothing runs on fake CUDA tensors here" in done.stderr:
        pytest.skip(done.stderr)
    assert done.returncode == 0, done.stderr
    lines = json_rows(done.stdout)
    assert column(lines, "workload") == list(workloads)
    for line in lines:
        assert (line["reason"], line["asked"], line["changes"], line["replayed"]) == (
            # Nine steps are replayed.
            None,
            [],
            {},
            9,
        ), line


@pytest.mark.parametrize("optimizer", [torch.optim.Adam, momentum])
def test_a_trial_that_is_continued_is_the_one_that_was_never_stopped(optimizer, tmp_path):
    build = partial(network, optimizer=optimizer)
    protocol = learners.learning_protocol(24, fast="graph")
    stopped, _ = learners.train(
        make_spec(16, max_steps=12), protocol, build, state_file=tmp_path / "state"
    )
    resume = Stopped(stopped, tmp_path / "state")
    spec = make_spec(16, max_steps=24, resumed_from=stopped.number)
    record, module = learners.train(spec, protocol, build, resume=resume)
    whole, other = learners.train(make_spec(16, max_steps=24), protocol, build)
    for part in (stopped, record, whole):
        assert part.training_loop == "graph"
    # It was evaluated where it was stopped, too.
    assert set(whole.history) <= set(record.history)
    assert same_weights(module, other)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("workload", SMALL)
def test_a_cuda_graph_trains_as_eager_steps(monkeypatch, workload, precision):
    """With real graphs: the noise scale is measured in between, and the losses are those of eager steps."""
    # The real capture in place of the recorded one.
    monkeypatch.undo()
    options = ("device=cuda", f"precision={precision}", "budget.steps=24")
    result, _ = trial(workload, "graph", *options)
    plain, _ = trial(workload, "auto", *options)
    assert result.training_loop == "graph"
    # float32's sums in another order, and bfloat16's three digits.
    close = {"rel": 1e-3 if precision == "32-true" else 0.05}
    assert metric_values(result) == pytest.approx(metric_values(plain), **close)
