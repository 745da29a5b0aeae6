"""Compiled trials. Most run a backend of torch's that makes no machine code, which takes no compiler and no time."""

import functools
import shutil

import pytest
import torch
from lightning.pytorch import LightningModule
from toolbox import make_protocol, make_spec
from torch import nn
from torch._dynamo.utils import counters

from bstune.config import compose
from bstune.core.clock import Phase, TrialClock
from bstune.core.errors import ConfigError
from bstune.core.records import COMPILE_MODES, Budget, EvaluationSchedule, Target
from bstune.trial import backend
from bstune.trial.batches import EvalBatches, Normalisation, TrainBatches
from bstune.trial.compile import called_modules, compiled_graphs, warn_once
from bstune.trial.loop import Workload, run_trial
from bstune.workloads.classifier import Classifier

GENERATOR = torch.Generator().manual_seed(0)
IMAGES = torch.randint(256, (96, 1, 4, 4), generator=GENERATOR).to(torch.uint8)
LABELS = torch.randint(3, (96,), generator=GENERATOR)
NORMALISE = Normalisation(torch.full((1, 1, 1, 1), 1 / 64), torch.full((1, 1, 1, 1), -2.0))
COMPILE = torch.compile
OFTEN = EvaluationSchedule(ratio=1.05, share=0.5, cost=0.1, near=1.5)


def protocol(**changes):
    own = {"target": Target("val/error", -1.0, "min"), "evaluation_schedule": OFTEN, "divergence": 9.0}
    return make_protocol(12, **(own | {"compile": "default"} | changes))


def network():
    """Return what has buffers, random numbers and several layers."""
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Dropout(0.2), nn.Linear(16, 3)
    )


def classifier(own, model=network):
    return Classifier(model(), nn.CrossEntropyLoss(), functools.partial(torch.optim.SGD, momentum=0.9), own.lr)


def train(rules=None, build=classifier, batch_size=16, clock=None):
    """Run a trial and return its record and its module."""
    rules = rules or protocol()
    modules = []

    def kept(own):
        modules.append(build(own))
        return modules[-1]

    def stream(own):
        options = {"micro_batch_size": rules.micro_batch_size, "seed": own.seed, "normalise": NORMALISE}
        return TrainBatches(IMAGES, LABELS, batch_size=own.batch_size, **options)

    validation = EvalBatches(IMAGES[:40], LABELS[:40], batch_size=16, normalise=NORMALISE)
    spec = make_spec(batch_size, 0.05, 3)
    result = run_trial(Workload(kept, stream, validation, 40), spec, rules, clock=clock)
    assert all(part._compiled_call_impl is None for part in modules[-1].modules())  # it is left as it was
    return result, modules[-1]


def check_same(result, module, plain, reference):
    names = ("history", "status", "steps", "noise_scale")
    assert [getattr(result, name) for name in names] == [getattr(plain, name) for name in names]
    assert list(module.state_dict()) == list(reference.state_dict())
    for name, value in reference.state_dict().items():
        assert torch.equal(module.state_dict()[name], value), name


@pytest.fixture
def graphs(monkeypatch):
    """Compile with a backend that runs what was traced as it is; return its graphs, by whether they were training's."""
    traced = []

    def backend(graph, inputs):
        traced.append(torch.is_grad_enabled())
        return graph.forward

    monkeypatch.setattr(torch, "compile", functools.partial(COMPILE, backend=backend))
    return traced


@pytest.fixture
def warned(caplog):
    warn_once.cache_clear()
    return lambda: [record.getMessage() for record in caplog.records if record.name == "bstune.trial.compile"]


class Phases(TrialClock):
    """A clock that notes each phase as it begins."""

    phase = Phase.STARTUP

    def enter(self, phase):
        self.phase = phase
        return super().enter(phase)


def test_torch_knows_every_mode():
    assert set(COMPILE_MODES) <= torch._inductor.list_mode_options().keys()


@pytest.mark.parametrize(
    ("mode", "device", "micro"),
    [("default", "cuda", 8), ("reduce-overhead", "cuda", "null"), ("reduce-overhead", "cpu", 8)],
)
def test_graphs_that_overwrite_gradients_are_not_accumulated(mode, device, micro):
    config = compose(["workload=digits", f"compile={mode}", f"protocol.micro_batch_size={micro}"])
    config.device = device
    assert backend.make_protocol(config).micro_batch_size == config.protocol.micro_batch_size
    config.device, config.compile, config.protocol.micro_batch_size = "cuda", "reduce-overhead", 8
    with pytest.raises(ConfigError, match="compile=reduce-overhead replays CUDA graphs, which overwrite the gradients"):
        backend.make_protocol(config)


@pytest.mark.parametrize(("batch_size", "micro"), [(16, None), (20, 8)])
def test_the_training_is_that_of_the_same_code_and_compiled_outside_of_the_clock(
    graphs, monkeypatch, warned, batch_size, micro
):
    """To the bit: weights, buffers, dropout's random numbers, history, the noise scale."""
    rules = {"noise_scale_every": 4, "micro_batch_size": micro}
    plain, reference = train(protocol(compile=None, **rules), batch_size=batch_size)
    assert graphs == []
    before = compiled_graphs()
    clock, phases = Phases(), []
    backend = torch.compile.keywords["backend"]

    def noting(graph, inputs):
        phases.append(clock.phase)
        return backend(graph, inputs)

    monkeypatch.setattr(torch, "compile", functools.partial(COMPILE, backend=noting))
    result, module = train(protocol(**rules), batch_size=batch_size, clock=clock)
    # One for each size in training and two for the evaluation, whole and last; none for the noise scale's parts.
    assert compiled_graphs() - before == len(graphs) == 3 + (micro is not None)
    assert sum(graphs) == 1 + (micro is not None)
    assert set(phases) == {Phase.STARTUP}
    assert (result.steps, result.message, len(result.noise_scale)) == (12, None, 3)
    check_same(result, module, plain, reference)
    assert warned() == []


def test_a_model_that_the_step_calls_itself_is_compiled(graphs):
    class Direct(Classifier):
        def training_step(self, batch, batch_idx):
            return self.loss(self.model(batch[0]), batch[1])

    result, _ = train(build=lambda own: Direct(network(), nn.CrossEntropyLoss(), torch.optim.SGD, own.lr))
    assert len(graphs) == 3  # training calls the model, the evaluation the whole module
    assert (result.steps, result.message) == (12, None)


class Headless(LightningModule):
    """Uses its weight without calling any module."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(16, 3))

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(batch[0].flatten(1) @ self.weight, batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("val/error", self.training_step(batch, batch_idx))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Manual(Headless):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False


@pytest.mark.parametrize(
    ("module", "text"),
    [
        (Headless, "compile=default does not apply to Headless: its training_step calls no module with parameters"),
        (Manual, "compile=default warms a step up before the clock runs, but Manual steps its optimizers itself"),
    ],
)
def test_a_module_that_it_does_not_apply_to(module, text, graphs):
    with pytest.raises(ConfigError, match=text):
        train(build=lambda own: module())
    assert graphs == []


def test_where_torch_can_take_nothing_the_training_is_eager_and_says_so(warned):
    class Untraceable(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = network()

        @torch.compiler.disable
        def forward(self, images):
            return self.inner(images)

    build = functools.partial(classifier, model=Untraceable)
    plain, reference = train(protocol(compile=None), build)
    result, module = train(build=build)
    reason = "torch found nothing in the module that it can compile"
    assert result.message == f"trained eagerly, as compile=default failed: {reason}"
    assert warned()[0].endswith(f": {reason}")
    check_same(result, module, plain, reference)


@pytest.mark.parametrize("stage", ["training", "validation"])
def test_a_compiler_that_fails_leaves_the_training_eager_with_one_warning(monkeypatch, warned, stage):
    def broken(graph, inputs):
        if torch.is_grad_enabled() == (stage == "training"):
            raise FileNotFoundError("no compiler at /nowhere\nand a long list")
        return graph.forward

    monkeypatch.setattr(torch, "compile", functools.partial(COMPILE, backend=broken))
    plain, reference = train(protocol(compile=None, noise_scale_every=4))
    for _ in range(2):
        result, module = train(protocol(noise_scale_every=4))
        check_same(result, module, plain, reference)
        reason = "FileNotFoundError: no compiler at /nowhere"
        assert result.message == f"trained eagerly, as compile=default failed: {reason}"
    assert warned() == [f"compile=default fails, so the training is eager (compile=null leaves it out): {reason}"]


def test_a_compiler_that_runs_out_of_memory_ends_the_trial_as_a_step_would(monkeypatch):
    def full(graph, inputs):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    monkeypatch.setattr(torch, "compile", functools.partial(COMPILE, backend=full))
    result, _ = train()
    assert result.status == "oom"
    assert "CUDA out of memory" in result.message


def test_a_module_that_is_compiled_anew_in_its_training_is_told_of(graphs, warned):
    class Changing(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.calls = network(), 0

        def forward(self, images):
            self.calls += 1
            return self.inner(images) * (1.0 if self.calls < 30 else 2.0)

    result, _ = train(protocol(budget=Budget(40, 1)), functools.partial(classifier, model=Changing))
    assert result.steps == 40
    assert len(warned()) == 1
    assert "more times in the course of its training or evaluation" in warned()[0]


def test_called_modules_are_the_outermost_with_parameters():
    outer = nn.ModuleDict({"a": nn.Sequential(nn.Linear(2, 2)), "b": nn.Linear(2, 2), "relu": nn.ReLU()})

    def calls():
        return outer["relu"](outer["b"](outer["a"](outer["a"](torch.zeros(1, 2)))))

    assert called_modules(outer, calls) == [outer["a"], outer["b"]]
    with pytest.raises(RuntimeError):
        called_modules(outer, lambda: outer["b"](torch.zeros(1, 3)))
    assert not any(part._forward_pre_hooks or part._forward_hooks for part in outer.modules())


# With Inductor, which makes machine code.


@pytest.fixture
def cold(monkeypatch, tmp_path):
    """Give Inductor an empty cache of its own."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    torch.compiler.reset()
    counters.clear()


def linear():
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 3))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler")
@pytest.mark.usefixtures("cold")
def test_the_next_trial_takes_the_code_from_the_disk(warned):
    build = functools.partial(classifier, model=linear)
    plain, _ = train(protocol(compile=None), build)
    first, _ = train(build=build)
    assert counters["inductor"]["fxgraph_cache_miss"] > 0
    made = counters["inductor"]["fxgraph_cache_miss"]
    second, _ = train(build=build)
    assert counters["inductor"]["fxgraph_cache_miss"] == made
    assert counters["inductor"]["fxgraph_cache_hit"] == made
    assert first.history == second.history
    assert [value for _, value in first.history] == pytest.approx([value for _, value in plain.history], abs=0.05)
    assert warned() == []


@pytest.mark.usefixtures("cold")
def test_without_a_compiler_the_training_is_eager(monkeypatch):
    monkeypatch.setattr(torch._inductor.config.cpp, "cxx", (None, "/nowhere/g++"))
    result, _ = train(build=functools.partial(classifier, model=linear))
    assert result.steps == 12
    assert result.message.startswith("trained eagerly, as compile=default failed: InvalidCxxCompiler")
