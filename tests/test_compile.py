"""Compiled trials. Most run a backend of torch's that makes no machine code, which takes no compiler and no time."""

import shutil
from functools import partial
from typing import get_args

import learners
import pytest
import torch
from builders import options_and_recipe
from learners import learner, momentum, same_weights
from lightning.pytorch import LightningModule
from toolbox import make_spec, metric_values
from torch import nn
from torch._dynamo.utils import counters

from bstune.core.clock import Phase, TrialClock
from bstune.core.errors import ConfigError
from bstune.core.records import CompileMode, Target
from bstune.options import with_option
from bstune.trial import backend
from bstune.trial.fast.compile import PASSES, called_modules, compiled_graphs
from bstune.workloads.classifier import Classifier

COMPILE = torch.compile
# It has buffers, random numbers and several layers.
network = partial(
    learner, optimizer=momentum, layers=(partial(nn.BatchNorm1d, 16), partial(nn.Dropout, 0.2))
)


def train(build=network, steps=12, batch_size=16, clock=None, **rules):
    """Run a trial, compiled unless the rules say otherwise, and return its record and its module."""
    rules = {
        "target": Target("val/error", -1.0, "min"),
        "divergence": 9.0,
        "compile": "default",
    } | rules
    options = {} if clock is None else {"clock": clock}
    protocol = learners.learning_protocol(steps, **rules)
    result, module = learners.train(make_spec(batch_size, 0.05, 3), protocol, build, **options)
    # The module is left as it was.
    for part in module.modules():
        assert part._compiled_call_impl is None
    return result, module


def check_same(trained, reference):
    """Compare records and weights, bit for bit."""
    (result, module) = trained
    (plain, other) = reference
    assert (result.history, result.status) == (plain.history, plain.status)
    assert (result.steps, result.noise_scale) == (plain.steps, plain.noise_scale)
    assert list(module.state_dict()) == list(other.state_dict())
    assert same_weights(module, other)


def compile_with(monkeypatch, run):
    """Have torch compile with a backend that calls ``run`` and then runs what was traced as it is."""

    def backend(graph, inputs):
        run()
        return graph.forward

    monkeypatch.setattr(torch, "compile", partial(COMPILE, backend=backend))


@pytest.fixture
def graphs(monkeypatch):
    """A list that gets, of each graph that is compiled, whether it is training's."""
    traced = []
    compile_with(monkeypatch, lambda: traced.append(torch.is_grad_enabled()))
    return traced


class Phases(TrialClock):
    """A clock that knows its phase."""

    phase = Phase.STARTUP

    def enter(self, phase):
        self.phase = phase
        return super().enter(phase)


def test_torch_knows_every_mode():
    assert set(get_args(CompileMode)) <= torch._inductor.list_mode_options().keys()


@pytest.mark.parametrize(
    ("mode", "device", "micro"),
    [("default", "cuda", 8), ("reduce-overhead", "cuda", "null"), ("reduce-overhead", "cpu", 8)],
)
def test_graphs_that_overwrite_gradients_are_not_accumulated(mode, device, micro):
    options, recipe = options_and_recipe(
        "workload=digits", f"compile={mode}", f"protocol.micro_batch_size={micro}"
    )
    options = with_option(options, "device", device)
    protocol = backend.make_protocol(options, recipe)
    assert protocol.micro_batch_size == options.protocol.micro_batch_size
    options = with_option(options, "device", "cuda")
    options = with_option(options, "compile", "reduce-overhead")
    accumulated = with_option(options, "protocol.micro_batch_size", 8)
    with pytest.raises(
        ConfigError,
        match="compile=reduce-overhead replays CUDA graphs, which overwrite the gradients",
    ):
        backend.make_protocol(accumulated, recipe)
    whole = with_option(options, "protocol.micro_batch_size", None)
    graph = with_option(whole, "protocol.fast", "graph")
    # Its code captures graphs itself.
    assert backend.make_protocol(graph, recipe).fast == "auto"


# With micro-batches of two sizes everything of the whole batch happens, too.
@pytest.mark.parametrize(
    ("batch_size", "micro"),
    [
        pytest.param(16, None, marks=pytest.mark.soak),
        pytest.param(20, 8, marks=pytest.mark.slow),
    ],
)
def test_the_training_is_that_of_the_same_code_and_compiled_outside_of_the_clock(
    monkeypatch, warned, batch_size, micro
):
    """To the bit: weights, buffers, dropout's random numbers, history, the noise scale."""
    rules = {"batch_size": batch_size, "noise_scale_every": 4, "micro_batch_size": micro}
    clock = Phases()
    traced = []
    compile_with(monkeypatch, lambda: traced.append((torch.is_grad_enabled(), clock.phase)))
    plain = train(compile=None, **rules)
    assert traced == []
    before = compiled_graphs()
    trained = train(clock=clock, **rules)
    # One for all sizes in training and one for those in evaluation, whole and last; none for the
    # noise scale's parts.
    assert compiled_graphs() - before == len(traced) == 2
    training, phases = zip(*traced, strict=True)
    assert sum(training) == 1
    assert set(phases) == {Phase.STARTUP}
    result, _ = trained
    assert (result.steps, result.message, len(result.noise_scale)) == (12, None, 3)
    check_same(trained, plain)
    assert warned() == []


class Direct(Classifier):
    def training_step(self, batch, batch_idx):
        return self.loss(self.model(batch[0]), batch[1])


class Logging(Classifier):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("train/loss", loss)
        return loss


class Numbering(Classifier):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * (1.0 + batch_idx / 100)


class Scaling(Classifier):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * (1.0 + batch_idx)


class Seldom(Classifier):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        # The first six batches do not show that their number counts.
        return 2.0 * loss if batch_idx % 7 == 6 else loss


class Counting(Classifier):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * (1.0 + self.global_step / 100)


@pytest.mark.parametrize(
    ("kind", "whole"),
    [
        (Classifier, True),
        pytest.param(Seldom, False, marks=pytest.mark.slow),
        # Each is compiled whole or in parts for another reason in the same step.
        pytest.param(Direct, True, marks=pytest.mark.slow),
        *(
            pytest.param(kind, False, marks=pytest.mark.slow)
            for kind in (Logging, Counting, Numbering, Scaling)
        ),
    ],
)
def test_a_step_is_compiled_whole_unless_it_goes_by_its_number(monkeypatch, warned, kind, whole):
    traced = []

    def backend(graph, inputs):
        if torch.is_grad_enabled():
            traced.append([node.target for node in graph.graph.nodes])
        return graph.forward

    monkeypatch.setattr(torch, "compile", partial(COMPILE, backend=backend))
    trained = train(partial(network, kind=kind))
    assert (nn.functional.cross_entropy in traced[-1]) == whole
    # What goes by the number of its batch is found by compiling it anew for each, in the passes.
    assert len(traced) == (1 + PASSES if kind in (Numbering, Scaling, Seldom) else 1)
    assert warned() == []
    monkeypatch.undo()
    check_same(trained, train(partial(network, kind=kind), compile=None))


class Headless(LightningModule):
    """Uses its weight without calling any module."""

    def __init__(self, spec):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(9, 3))

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(batch[0].flatten(1) @ self.weight, batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("val/error", self.training_step(batch, batch_idx))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Manual(Headless):
    automatic_optimization = False


@pytest.mark.parametrize(
    ("module", "text"),
    [
        (
            Headless,
            (
                "compile=default does not apply to Headless: its training_step calls no module with "
                "parameters"
            ),
        ),
        (
            Manual,
            (
                "compile=default warms a step up before the clock runs, but Manual steps its "
                "optimizers itself"
            ),
        ),
    ],
)
def test_a_module_that_it_does_not_apply_to(module, text, graphs):
    with pytest.raises(ConfigError, match=text):
        train(module)
    assert graphs == []


class Untraceable(Classifier):
    forward = torch.compiler.disable(Classifier.forward)


# How a training goes on eagerly is seen below, where the compiler fails.
@pytest.mark.slow
def test_where_torch_can_take_nothing_the_training_is_eager_and_says_so(warned):
    build = partial(network, kind=Untraceable)
    trained = train(build)
    reason = "torch found nothing in the module that it can compile"
    assert trained[0].message == f"trained eagerly, as compile=default failed: {reason}"
    assert warned()[0].endswith(f": {reason}")
    check_same(trained, train(build, compile=None))


@pytest.mark.slow
def test_where_a_compiler_fails_with_any_number_of_examples_it_is_fixed(monkeypatch, warned):
    free = []

    def backend(graph, inputs):
        # A graph takes it as an argument.
        free.append(any(isinstance(one, torch.SymInt | int) for one in inputs))
        if torch.is_grad_enabled() and free[-1]:
            raise RuntimeError("no kernel for such a number")
        return graph.forward

    monkeypatch.setattr(torch, "compile", partial(COMPILE, backend=backend))
    trained = train()
    assert trained[0].message is None
    assert warned() == []
    # The evaluation, training and training anew; then anew the evaluation's two sizes.
    assert free == [True, True, False, False, False]
    monkeypatch.undo()
    check_same(trained, train(compile=None))


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["training", "validation"])
def test_a_compiler_that_fails_leaves_the_training_eager_with_one_warning(
    monkeypatch, warned, stage
):
    def fail():
        if torch.is_grad_enabled() == (stage == "training"):
            raise FileNotFoundError("no compiler at /nowhere\nand a long list")

    compile_with(monkeypatch, fail)
    plain = train(compile=None, noise_scale_every=4)
    reason = "FileNotFoundError: no compiler at /nowhere"
    for _ in range(2):
        trained = train(noise_scale_every=4)
        check_same(trained, plain)
        assert trained[0].message == f"trained eagerly, as compile=default failed: {reason}"
    assert warned() == [
        f"compile=default fails, so the training is eager (compile=null leaves it out): {reason}"
    ]


def test_a_compiler_that_runs_out_of_memory_ends_the_trial_as_a_step_would(monkeypatch):
    def fail():
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    compile_with(monkeypatch, fail)
    result, _ = train()
    assert result.status == "out of memory"
    assert "CUDA out of memory" in result.message


class Changing(nn.Tanh):
    calls = 0

    def forward(self, features):
        self.calls += 1
        # In the midst of the training, after its compilation.
        return super().forward(features) * (1.0 if self.calls < 30 else 2.0)


@pytest.mark.slow
@pytest.mark.usefixtures("graphs")
def test_a_module_that_is_compiled_anew_in_its_training_is_told_of(warned):
    result, _ = train(partial(network, layers=(Changing,)), steps=40)
    assert result.steps == 40
    assert len(warned()) == 1
    assert "more times in the course of its training or evaluation" in warned()[0]


def test_called_modules_are_the_outermost_with_parameters():
    outer = nn.ModuleDict(
        {"a": nn.Sequential(nn.Linear(2, 2)), "b": nn.Linear(2, 2), "relu": nn.ReLU()}
    )

    def calls():
        return outer["relu"](outer["b"](outer["a"](outer["a"](torch.zeros(1, 2)))))

    assert called_modules(outer, calls) == [outer["a"], outer["b"]]
    with pytest.raises(RuntimeError):
        called_modules(outer, lambda: outer["b"](torch.zeros(1, 3)))
    for part in outer.modules():
        assert not part._forward_pre_hooks
        assert not part._forward_hooks


# With Inductor, which makes machine code.


@pytest.fixture
def cold(monkeypatch, tmp_path):
    """Give Inductor an empty cache of its own."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    torch.compiler.reset()
    counters.clear()


@pytest.mark.soak
@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler")
@pytest.mark.usefixtures("cold")
def test_the_next_trial_takes_the_code_from_the_disk(warned):
    plain, _ = train(learner, compile=None)
    first, _ = train(learner)
    made = counters["inductor"]["fxgraph_cache_miss"]
    assert made > 0
    second, _ = train(learner)
    train(learner, batch_size=24)
    assert counters["inductor"]["fxgraph_cache_miss"] == made
    # Of two further trials, one at another batch size.
    assert counters["inductor"]["fxgraph_cache_hit"] == 2 * made
    assert first.history == second.history
    # Inductor's code rounds otherwise.
    assert metric_values(first) == pytest.approx(metric_values(plain), abs=0.05)
    assert warned() == []


# How a training goes on eagerly is seen above, where the compiler fails.
@pytest.mark.slow
@pytest.mark.usefixtures("cold")
def test_without_a_compiler_the_training_is_eager():
    with torch._inductor.config.patch({"cpp.cxx": (None, "/nowhere/g++")}):
        result, _ = train(learner)
    assert result.steps == 12
    assert result.message.startswith(
        "trained eagerly, as compile=default failed: InvalidCxxCompiler"
    )
