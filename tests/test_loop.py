import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.profilers import SimpleProfiler
from toolbox import EVERY_STEP, TRAINER, FakeTime, make_protocol, make_spec
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from bstune.config import compose
from bstune.core.clock import TrialClock
from bstune.core.errors import ConfigError
from bstune.core.records import EvaluationSchedule, Target, TrialResult, is_near, next_evaluation
from bstune.trial import loop as trial
from bstune.trial.batches import EvalBatches, Normalisation, TrainBatches
from bstune.trial.compile import warn_once
from bstune.trial.device import device_name
from bstune.trial.loop import Workload, make_trainer, run_trial
from bstune.trial.workload import build_module
from bstune.workloads.averaging import RunningWeightAverage
from bstune.workloads.classifier import Classifier

CADENCE = EvaluationSchedule(ratio=1.05, share=0.25, cost=0.5, near=1.5)
spec = partial(make_spec, delta=0.5)
protocol = make_protocol


class Counting(LightningModule):
    """One weight that grows by 1 with each applied optimizer step; the metric is a function of it.

    ``gradient`` gives the factor of the gradient at a training batch (from 0); the weight is what the optimizer made.
    """

    def __init__(self, metric, gradient=lambda batch: 1.0, name="val/error"):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        self.metric, self.gradient, self.metric_name = metric, gradient, name

    def training_step(self, batch, batch_idx):
        return -self.weight * self.gradient(batch_idx)

    def validation_step(self, batch, batch_idx):
        self.log(self.metric_name, self.metric(round(self.weight.item())), batch_size=1)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)


def falls_to_target_at(step):
    """Return a metric that is 0.9 before ``step`` and 0.05 from it on."""
    return lambda applied: 0.05 if applied >= step else 0.9


def blanks(own):
    """Return an endless stream of batches that nobody looks at."""
    while True:
        yield torch.zeros(own.batch_size)


def run(module, own=None, rules=None, train=blanks, validation=None, validation_examples=10, **options):
    """Train ``module`` (or what it builds) and return the result."""
    build = module if callable(module) and not isinstance(module, LightningModule) else lambda _: module
    options.setdefault("clock", TrialClock(FakeTime()))
    validation = DataLoader(torch.zeros(1)) if validation is None else validation
    workload = Workload(build, train, validation, validation_examples, data_module=options.pop("data_module", None))
    return run_trial(workload, own or spec(), rules or protocol(), **options)


# A small problem that is really learnt: 60 images of 5 pixels in 3 classes, 40 more to evaluate.
def _digits(n, seed):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(3, (n,), generator=generator)
    noise = torch.randint(-50, 51, (n, 1, 1, 5), generator=generator)
    images = (100 + 60 * F.one_hot(labels, 5).view(n, 1, 1, 5) + noise).clamp(0, 255)
    return images.to(torch.uint8), labels


IMAGES, LABELS = _digits(60, 0)
VALIDATION_IMAGES, VALIDATION_LABELS = _digits(40, 1)
NORMALISE = Normalisation(torch.full((1, 1, 1, 1), 1 / 50), torch.full((1, 1, 1, 1), -2.0))


def stream(micro_batch_size=None):
    return lambda own: TrainBatches(
        IMAGES,
        LABELS,
        batch_size=own.batch_size,
        micro_batch_size=micro_batch_size,
        seed=own.seed,
        normalise=NORMALISE,
    )


def validation_data():
    return EvalBatches(VALIDATION_IMAGES, VALIDATION_LABELS, batch_size=16, normalise=NORMALISE)


def learner(own, optimizer=torch.optim.SGD, **options):
    model = nn.Sequential(nn.Flatten(), nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
    return Classifier(model, nn.CrossEntropyLoss(), optimizer, own.lr, **options)


def learn(own=None, rules=None, build=learner, micro_batch_size=None, **options):
    """Train on the small problem; return the result and the module."""
    modules = []

    def kept(own):
        modules.append(build(own))
        return modules[-1]

    rules = replace(rules or protocol(evaluation_schedule=CADENCE), micro_batch_size=micro_batch_size)
    result = run(kept, own, rules, stream(micro_batch_size), validation_data(), 40, **options)
    return result, modules[0]


def weights(module):
    return [parameter.detach().clone() for parameter in module.parameters()]


# Statuses


def test_reached():
    result = run(Counting(falls_to_target_at(7)))
    assert (result.status, result.steps, result.steps_low, result.examples) == ("reached", 7, 6, 28)
    assert result.history[-2:] == ((6, 0.9), (7, 0.05))
    assert (result.number, result.trial_index, result.batch_size, result.lr, result.delta, result.seed) == (
        (3, 2, 4, 0.1, 0.5, 0)
    )
    assert result.message is None
    assert set(result.versions) == {"bstune", "torch", "lightning"}
    assert TrialResult.from_json(result.to_json()) == result


def test_reached_where_the_metric_has_to_rise():
    module = Counting(lambda applied: 0.1 * applied, name="val/accuracy")
    result = run(module, rules=protocol(target=Target("val/accuracy", 0.45, "max")))
    assert (result.status, result.steps, result.steps_low) == ("reached", 5, 4)


@pytest.mark.parametrize(
    ("batch_size", "steps", "examples", "last"),
    [
        (4, 6, 1, 6),
        (4, 6, 25, 7),  # both have to be spent
        (7, 1, 50, 8),  # a batch is whole
    ],
)
def test_budget_ends_once_steps_and_examples_are_both_spent(batch_size, steps, examples, last):
    result = run(
        Counting(lambda applied: 0.9), spec(batch_size), protocol(steps, examples, evaluation_schedule=CADENCE)
    )
    assert (result.status, result.steps, result.steps_low) == ("censored", last, last)
    assert result.examples == last * batch_size
    assert result.history[-1] == (last, 0.9)  # the last step is always evaluated
    assert result.message is None


def test_a_target_met_at_the_last_step_is_reached():
    assert run(Counting(falls_to_target_at(20))).status == "reached"
    assert run(Counting(falls_to_target_at(21))).status == "censored"


class StopsItself(Counting):
    """Asks the Trainer to stop after the sixth batch."""

    def on_before_zero_grad(self, optimizer):
        self.trainer.should_stop = self.trainer.fit_loop.batch_idx >= 5


@pytest.mark.parametrize(("metric", "status", "low"), [(0.9, "censored", 6), (0.05, "reached", 0)])
def test_a_module_that_stops_early_is_evaluated_then(metric, status, low):
    rules = protocol(20, evaluation_schedule=CADENCE)  # the first evaluation would be at step 10
    result = run(StopsItself(lambda applied: metric if applied else 0.9), rules=rules)
    assert (result.status, result.steps, result.steps_low) == (status, 6, low)
    assert result.history == ((6, metric),)


def test_diverged_by_a_loss_that_is_not_finite():
    module = Counting(None, gradient=lambda batch: math.nan if batch == 4 else 1.0)
    module.validation_step = lambda batch, batch_idx: module.log("val/error", 0.9, batch_size=1)
    result = run(module)
    assert (result.status, result.steps, result.steps_low) == ("diverged", 5, 5)
    assert result.message == "the training loss is nan at step 5"


@pytest.mark.parametrize(
    ("metric", "status", "message"),
    [
        # From 0.9 at the start to 0.1 are 0.8: diverged lies above 0.1 + 2 x 0.8.
        (lambda applied: 0.9 if applied < 3 else 1.71, "diverged", "val/error is 1.71 at step 3, far past its start"),
        (lambda applied: 0.9 if applied < 3 else 1.69, "censored", None),
        (lambda applied: 0.9 if applied < 3 else math.nan, "diverged", "val/error is not finite at step 3"),
        (lambda applied: 0.9 if applied < 3 else math.inf, "diverged", "val/error is not finite at step 3"),
        (lambda applied: 0.9 if applied < 3 else -math.inf, "diverged", "val/error is not finite at step 3"),
    ],
)
def test_diverged_by_the_metric(metric, status, message):
    result = run(Counting(metric))
    assert (result.status, result.message) == (status, message)
    if status == "diverged":
        assert (result.steps, result.steps_low) == (3, 3)
        assert [step for step, _ in result.history] == [1, 2, 3]
    if message and "finite" in message:
        assert result.history[-1] == (3, None)


class OutOfMemory(Counting):
    """Runs out of memory in ``stage`` at the fourth batch."""

    def __init__(self, stage, fail):
        super().__init__(lambda applied: 0.9)
        self.stage, self.fail, self.evaluations = stage, fail, 0

    def training_step(self, batch, batch_idx):
        if self.stage == "training" and batch_idx == 3:
            self.fail()
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        self.evaluations += 1
        if self.stage == "evaluation" and self.evaluations == 4:
            self.fail()
        super().validation_step(batch, batch_idx)


def accelerator_out_of_memory():
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.\nGPU 0 has ...")


def host_out_of_memory():
    torch.empty(2**60, dtype=torch.uint8)  # torch's own message


def python_out_of_memory():
    raise MemoryError


@pytest.mark.parametrize(
    ("stage", "fail", "text"),
    [
        ("training", accelerator_out_of_memory, "CUDA out of memory. Tried to allocate 20.00 GiB."),
        ("training", host_out_of_memory, "DefaultCPUAllocator"),
        ("evaluation", python_out_of_memory, "MemoryError"),
    ],
)
def test_oom(stage, fail, text):
    result = run(OutOfMemory(stage, fail))
    assert result.status == "oom"
    assert text in result.message
    assert "\n" not in result.message
    assert (result.steps, result.steps_low) == ((3, 3) if stage == "training" else (3, 2))
    assert TrialResult.from_json(result.to_json()) == result


def test_other_errors_are_raised():
    def fail():
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        run(OutOfMemory("training", fail))


def test_oom_before_the_first_step():
    result = run(lambda own: accelerator_out_of_memory())
    assert (result.status, result.steps, result.history, result.seconds_per_step) == ("oom", 0, (), None)


@pytest.mark.parametrize(("value", "mode"), [(0.1, "min"), (0.05, "min"), (0.1, "max"), (0.3, "max")])
def test_a_target_that_is_met_before_training_is_a_mistake(value, mode):
    module = Counting(lambda applied: value)
    with pytest.raises(ConfigError) as error:
        run(module, rules=protocol(target=Target("val/error", 0.1, mode)))
    sign = {"min": "<=", "max": ">="}[mode]
    assert str(error.value) == (
        f"the target val/error {sign} 0.1 is met before training (val/error starts at {value:g}): "
        "check workload.target.mode and workload.target.value"
    )
    assert module.weight == 0


def test_the_start_is_measured_on_all_validation_data():
    """Here 0.9 on nine batches and 0.0 on the first: 0.81, so that 0.1 + 2 x 0.71 is far past it."""
    batches = DataLoader(torch.zeros(10))
    for value, status in ((1.51, "censored"), (1.53, "diverged")):
        module = ByClass(None)
        module.later = value
        result = run(module, rules=protocol(5), validation=batches)
        assert result.status == status
    everywhere = Counting(lambda applied: 0.05)
    with pytest.raises(ConfigError, match="is met before training"):
        run(everywhere, rules=protocol(5), validation=batches)


class ByClass(Counting):
    """Evaluates ten batches; before training it is right on the first one alone, as where a class fills it."""

    later = 0.9

    def validation_step(self, batch, batch_idx):
        value = self.later if self.weight else 0.9 if batch_idx else 0.0
        self.log("val/error", value, batch_size=1)


def test_the_first_batch_alone_says_nothing_of_the_start():
    batches = DataLoader(torch.zeros(10))
    result = run(ByClass(None), rules=protocol(5), validation=batches)
    assert (result.status, result.steps) == ("censored", 5)
    few = protocol(5, trainer={**TRAINER, "limit_val_batches": 1})  # as where steps are only timed
    assert run(ByClass(None), rules=few, validation=batches).status == "censored"


def test_a_metric_that_is_not_logged_is_named_with_those_that_are():
    module = Counting(lambda applied: 0.9, name="val/acc")
    module.on_validation_epoch_end = lambda: module.log("val/loss", 1.0)
    with pytest.raises(ConfigError) as error:
        run(module)
    assert str(error.value) == (
        "the target's metric is 'val/error', but the module logs val/acc, val/loss in validation: "
        "set workload.target.metric to one of them, or log it"
    )
    module = Counting(lambda applied: 0.9)
    module.validation_step = lambda batch, batch_idx: None
    with pytest.raises(ConfigError, match="but the module logs nothing in validation"):
        run(module)


@pytest.mark.parametrize(
    ("count", "target", "start", "status"),
    [
        (500, Target("val/error", 0.1, "min"), 1.0, "reached"),  # read as a double, 0.1 in float32 would miss
        (501, Target("val/error", 0.1, "min"), 1.0, "censored"),
        (4500, Target("val/error", 0.9, "max"), 0.1, "reached"),
        (4499, Target("val/error", 0.9, "max"), 0.1, "censored"),
    ],
)
def test_a_tenth_in_float32_is_a_tenth(count, target, start, status):
    value = torch.tensor(count, dtype=torch.float32) / 5000
    result = run(Counting(lambda applied: value if applied else start), rules=protocol(1, target=target))
    assert result.status == status


# Steps


class TwoOptimizers(Counting):
    """Two weights with an optimizer each, both stepped in every training step."""

    def __init__(self, metric, returns):
        super().__init__(metric)
        self.automatic_optimization = False
        self.other = nn.Parameter(torch.zeros(()))
        self.returns = returns

    def training_step(self, batch, batch_idx):
        for parameter, optimizer in zip((self.weight, self.other), self.optimizers(), strict=True):
            optimizer.zero_grad()
            self.manual_backward(-parameter)
            optimizer.step()
        return self.returns

    def configure_optimizers(self):
        return [torch.optim.SGD([parameter], lr=1.0) for parameter in (self.weight, self.other)]


class GlobalStep(Callback):
    """Notes what Lightning takes for the number of steps."""

    def on_train_end(self, trainer, pl_module):
        self.value = trainer.global_step


@pytest.mark.parametrize("returns", [None, torch.tensor(1.0), {"loss": torch.tensor(1.0)}, {"other": 1}])
def test_steps_do_not_depend_on_the_number_of_optimizers(returns):
    seen = GlobalStep()
    module = TwoOptimizers(falls_to_target_at(7), returns)
    module.configure_callbacks = lambda: [seen]
    result = run(module)
    assert (result.status, result.steps, result.steps_low) == ("reached", 7, 6)
    assert seen.value == 14  # Lightning counts each optimizer
    assert (module.weight, module.other) == (7, 7)


def test_a_manual_loss_that_is_not_finite_is_seen():
    result = run(TwoOptimizers(lambda applied: 0.9, {"loss": torch.tensor(math.nan)}))
    assert (result.status, result.message) == ("diverged", "the training loss is nan at step 1")


def scaled(steps=20, **options):
    """Return rules under a gradient scaler on the CPU."""
    scaler = torch.amp.GradScaler("cpu", **options)
    return protocol(steps, trainer={**TRAINER, "plugins": [MixedPrecision("16-mixed", "cpu", scaler=scaler)]})


@pytest.mark.parametrize("growth_interval", [1, 3, 2000])  # growth must not pass for a skipped step
@pytest.mark.parametrize("overflows", [(), (0,), (2, 3, 8), (5, 6, 7, 9)])
def test_a_step_that_the_scaler_skips_does_not_count(overflows, growth_interval):
    module = Counting(falls_to_target_at(7), lambda batch: math.inf if batch in overflows else 1.0)
    seen = GlobalStep()
    module.configure_callbacks = lambda: [seen]
    result = run(module, rules=scaled(growth_interval=growth_interval))
    assert (result.status, result.steps, result.steps_low, result.examples) == ("reached", 7, 6, 28)
    assert module.weight == 7
    assert [step for step, _ in result.history] == list(range(1, 8))
    assert seen.value == 7 + sum(batch < seen.value for batch in overflows)  # Lightning counts skipped steps too


def test_an_overflow_in_one_micro_batch_skips_the_step_once():
    module = Counting(falls_to_target_at(7), lambda batch: math.inf if batch in (1, 6) else 1.0)
    rules = replace(scaled(), micro_batch_size=4)
    result = run(module, spec(10), rules)  # groups of three: batches 0 to 2 and 6 to 8 overflow
    assert (result.status, result.steps) == ("reached", 7)
    assert module.weight.item() == pytest.approx(7)


@pytest.mark.parametrize("evaluation_schedule", [EVERY_STEP, CADENCE])
@pytest.mark.parametrize("applied", [0, 5])
def test_fifty_skipped_steps_in_a_row_are_a_divergence(applied, evaluation_schedule):
    module = Counting(lambda applied: 0.9, lambda batch: math.inf if batch >= applied else 1.0)
    batches = []
    module.on_train_batch_start = lambda batch, batch_idx: batches.append(batch_idx)
    result = run(module, rules=replace(scaled(200), evaluation_schedule=evaluation_schedule))
    assert (result.status, result.steps, result.steps_low) == ("diverged", applied, applied)
    assert result.history[-1] == (applied, 0.9)
    assert result.message
    assert len(batches) == applied + 50


def test_a_target_met_before_the_skipped_steps_is_reached():
    """The evaluation that ends the trial is the first one after step 5."""
    module = Counting(falls_to_target_at(5))
    module.configure_optimizers = lambda: Overflowing(module, after=5)
    result = run(module, rules=replace(scaled(200), evaluation_schedule=CADENCE))
    assert (result.status, result.steps, result.steps_low, result.message) == ("reached", 5, 0, None)


class Overflowing(torch.optim.SGD):
    """Leaves gradients that overflow, although the loss stays finite, once ``after`` steps are applied."""

    def __init__(self, module, after):
        super().__init__(module.parameters(), lr=1.0)
        module.weight.register_hook(lambda gradient: gradient * (math.inf if module.weight >= after else 1.0))


def test_fortynine_skipped_steps_in_a_row_are_not():
    module = Counting(falls_to_target_at(9), lambda batch: math.inf if 3 <= batch < 52 or 53 <= batch < 102 else 1.0)
    assert run(module, rules=scaled(200)).status == "reached"


# Batches and micro-batches


def adam(parameters, lr):
    return torch.optim.Adam(parameters, lr=lr)


def momentum(parameters, lr):
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9, nesterov=True)


class WithoutBatchIndex(Classifier):
    def training_step(self, batch):
        return super().training_step(batch, 0)


class ReturnsMapping(Classifier):
    def training_step(self, batch, batch_idx):
        return {"loss": super().training_step(batch, batch_idx), "size": len(batch[1])}


@pytest.mark.parametrize(
    ("micro", "optimizer", "kind"),  # of 10: 4+4+2, 5+5, 3+3+3+1, 9+1
    [(4, momentum, Classifier), (5, adam, WithoutBatchIndex), (3, adam, ReturnsMapping), (9, momentum, Classifier)],
)
def test_micro_batches_are_the_large_batch(micro, optimizer, kind):
    def build(own):
        model = nn.Sequential(nn.Flatten(), nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
        return kind(model, nn.CrossEntropyLoss(), optimizer, own.lr)

    rules = protocol(9, evaluation_schedule=CADENCE)
    large, module = learn(spec(10, lr=0.05), rules, build)
    small, accumulated = learn(spec(10, lr=0.05), rules, build, micro_batch_size=micro)
    assert small.steps == large.steps == 9
    assert small.examples == large.examples == 90
    torch.testing.assert_close(weights(accumulated), weights(module), rtol=1e-5, atol=1e-6)


def test_lightnings_own_accumulation_would_be_wrong_for_a_smaller_last_group(monkeypatch):
    rules = protocol(9, evaluation_schedule=CADENCE)
    _, module = learn(spec(10), rules)
    monkeypatch.setattr(trial, "weight_micro_batches", lambda module, sizes: None)
    _, equal = learn(spec(10), rules, micro_batch_size=5)
    torch.testing.assert_close(weights(equal), weights(module), rtol=1e-5, atol=1e-6)
    _, unequal = learn(spec(10), rules, micro_batch_size=4)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(weights(unequal), weights(module), rtol=1e-2, atol=1e-3)


@pytest.mark.filterwarnings("ignore:.training_step. returned .None.")
def test_a_micro_batch_without_a_loss_adds_nothing():
    """As Lightning has it: training_step may return None."""
    module = Counting(lambda applied: 0.9)
    module.training_step = lambda batch, batch_idx: None if batch_idx % 3 == 1 else -module.weight
    result = run(module, spec(10), protocol(2, micro_batch_size=4))
    assert result.steps == 2
    assert module.weight.item() == pytest.approx(2 * 0.6)  # two of three groups: 4 and 2 of 10 examples


def test_micro_batches_are_refused_where_lightning_does_not_accumulate():
    with pytest.raises(ConfigError, match=r"manual optimization.*protocol.micro_batch_size=null"):
        run(TwoOptimizers(lambda applied: 0.9, None), spec(10), protocol(micro_batch_size=4))
    assert run(TwoOptimizers(lambda applied: 0.9, None), spec(4), protocol(micro_batch_size=4)).status == "censored"


# Repetition


def test_the_same_seed_gives_the_same_trial_bit_for_bit():
    rules = protocol(60, evaluation_schedule=CADENCE, target=Target("val/error", 0.0, "min"))
    first, module = learn(spec(7, seed=5), rules)
    torch.rand(3)  # what was drawn before does not matter
    again, rerun = learn(spec(7, seed=5), rules)
    assert again == first
    assert all(torch.equal(a, b) for a, b in zip(weights(module), weights(rerun), strict=True))
    other, rerun = learn(spec(7, seed=6), rules)
    assert other.history != first.history
    assert not any(torch.equal(a, b) for a, b in zip(weights(module), weights(rerun), strict=True))


# Cadence


def check_cadence(result, rules, validation_examples):
    step, past, near = 0, [], False
    for actual, value in result.history:
        near = near or is_near(past, rules.target, rules.evaluation_schedule.near)
        due = next_evaluation(step, result.batch_size, validation_examples, len(past), near, rules.evaluation_schedule)
        assert actual == min(due, rules.budget.last_step(result.batch_size))
        past.append((actual, value))
        step = actual
    missed = [at for at, value in result.history if not rules.target.reached(value)]
    assert result.steps_low == (missed[-1] if missed else 0)
    assert result.steps == result.history[-1][0]
    if result.reached:
        assert len(missed) == len(result.history) - 1
        assert result.steps_low < result.steps


@pytest.mark.parametrize(("batch_size", "lr", "micro"), [(1, 0.03, None), (16, 0.2, 4), (60, 0.5, None)])
def test_evaluations_follow_the_rule(batch_size, lr, micro):
    rules = protocol(30, 600, evaluation_schedule=CADENCE, target=Target("val/loss", 0.3, "min"))
    result, _ = learn(spec(batch_size, lr), rules, micro_batch_size=micro)
    assert len(result.history) > 2
    check_cadence(result, rules, 40)


def test_a_trial_that_was_near_once_stays_near():
    """With V = 10 and B = 4, k evaluations take 10 k steps far from the target and 5 k near it."""
    result = run(
        Counting(lambda applied: 0.2 if applied == 20 else 0.9), rules=protocol(40, evaluation_schedule=CADENCE)
    )
    assert [step for step, _ in result.history] == [10, 20, 21, 22, 25, 30, 35, 40]
    far = run(Counting(lambda applied: 0.9), rules=protocol(40, evaluation_schedule=CADENCE))
    assert [step for step, _ in far.history] == [10, 20, 30, 40]


def test_the_target_is_not_met_before_the_interval():
    """Evaluated at every step, the same trial misses at the interval's low end and has hit by its high end."""
    rules = protocol(200, evaluation_schedule=CADENCE, target=Target("val/error", 0.1, "min"))
    sparse, _ = learn(spec(5, 0.1), rules)
    dense, _ = learn(spec(5, 0.1), replace(rules, evaluation_schedule=EVERY_STEP))
    assert sparse.reached
    assert dense.reached
    assert sparse.steps - sparse.steps_low > 1
    assert dict(dense.history).items() >= {pair for pair in sparse.history if pair[0] <= dense.steps}
    assert dense.steps <= sparse.steps


def test_the_history_does_not_depend_on_the_clock():
    def ticking(speed):
        ticks = iter(range(10**6))
        return TrialClock(lambda: next(ticks) * speed)

    rules = protocol(100, evaluation_schedule=CADENCE)
    fast, _ = learn(spec(5), rules, clock=ticking(0.001))
    slow, _ = learn(spec(5), rules, clock=ticking(1000.0))
    assert fast.history == slow.history
    assert slow.wall_seconds == pytest.approx(1e6 * fast.wall_seconds)


# The clock


class Timed(Counting):
    """Takes known times: 100 s to start, 1 s a training step, 10 s an evaluation."""

    def __init__(self, metric, fake):
        super().__init__(metric)
        self.fake = fake

    def configure_optimizers(self):
        self.fake.sleep(100.0)
        return super().configure_optimizers()

    def training_step(self, batch, batch_idx):
        self.fake.sleep(1.0)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        self.fake.sleep(10.0)
        super().validation_step(batch, batch_idx)


def test_training_start_up_and_evaluation_are_counted_apart():
    fake = FakeTime()

    def train(own):
        for batch in blanks(own):
            fake.sleep(0.25)
            yield batch

    # With 10 examples at a cost of 0.5 and B = 4, half a quarter of training allows one evaluation in ten steps.
    result = run(
        Timed(lambda applied: 0.9, fake),
        rules=protocol(35, evaluation_schedule=CADENCE),
        train=train,
        clock=TrialClock(fake),
    )
    assert [step for step, _ in result.history] == [10, 20, 30, 35]
    assert result.train_seconds == 35 * 1.25
    assert result.eval_seconds == 10.0 + 4 * 10.0  # one of them at the start
    assert result.startup_seconds == 100.25  # with the first batch
    assert result.wall_seconds == fake.now == 100.25 + 50.0 + 35 * 1.25
    assert result.seconds_per_step == 1.25
    assert result.time_to_target is None


@pytest.mark.parametrize("warmup_steps", [3, 4])
def test_warm_up_lasts_its_steps_where_evaluations_cut_it_short(warmup_steps):
    fake = FakeTime()

    class SlowStart(Timed):
        def training_step(self, batch, batch_idx):
            fake.sleep(50.0 if batch_idx < 3 else 0.0)
            return super().training_step(batch, batch_idx)

    rules = protocol(5, warmup_steps=warmup_steps)  # evaluated after every step
    result = run(SlowStart(lambda applied: 0.9, fake), rules=rules, clock=TrialClock(fake))
    assert len(result.history) == 5
    assert result.seconds_per_step == 1.0


def test_seconds_per_step_are_the_median_of_segments():
    fake = FakeTime()

    class Hiccup(Timed):
        def training_step(self, batch, batch_idx):
            fake.sleep(1000.0 if batch_idx == 14 else 0.0)  # in one segment of four
            return super().training_step(batch, batch_idx)

    result = run(
        Hiccup(falls_to_target_at(30), fake),
        rules=protocol(evaluation_schedule=CADENCE, steps=50),
        clock=TrialClock(fake),
    )
    assert result.seconds_per_step == 1.0
    assert result.time_to_target == result.steps * 1.0
    assert result.train_seconds == result.steps + 1000.0


def test_what_a_call_back_does_after_a_step_is_training():
    fake = FakeTime()

    class Slow(Callback):
        def on_train_batch_end(self, *args):
            fake.sleep(0.5)

    module = Timed(lambda applied: 0.9, fake)
    module.configure_callbacks = lambda: [Slow()]
    result = run(module, rules=protocol(8), clock=TrialClock(fake))
    assert len(result.history) == 8  # an evaluation after every step
    assert result.train_seconds == 8 * 1.5
    assert result.eval_seconds == 9 * 10.0
    assert result.seconds_per_step == 1.5


def test_a_trial_that_fails_keeps_the_time_it_took():
    fake = FakeTime()

    class Fails(Timed):
        def training_step(self, batch, batch_idx):
            if batch_idx == 5:
                accelerator_out_of_memory()
            return super().training_step(batch, batch_idx)

    result = run(Fails(lambda applied: 0.9, fake), clock=TrialClock(fake))
    assert (result.status, result.train_seconds, result.eval_seconds) == ("oom", 5.0, 60.0)


# The noise scale


class TimedLearner(Classifier):
    """Takes 1 s for each example of a training step, 10 s for an evaluated batch, and fails where it is told to."""

    def __init__(self, own, fake, fails=lambda size: None):
        super().__init__(nn.Sequential(nn.Flatten(), nn.Linear(5, 3)), nn.CrossEntropyLoss(), torch.optim.SGD, own.lr)
        self.fake, self.fails = fake, fails

    def training_step(self, batch, batch_idx):
        self.fake.sleep(len(batch[1]))
        self.fails(len(batch[1]))
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        self.fake.sleep(10.0)
        super().validation_step(batch, batch_idx)


NOTHING_REACHED = Target("val/loss", 0.0, "min")


def measured(every, own=None, micro_batch_size=None, fails=lambda size: None, steps=30, warmup_steps=3):
    """Return the record of a timed trial that measures the noise scale, and the seconds that it took."""
    fake = FakeTime()
    rules = protocol(
        steps,
        evaluation_schedule=CADENCE,
        target=NOTHING_REACHED,
        noise_scale_every=every,
        warmup_steps=warmup_steps,
        divergence=1e9,
    )
    result, module = learn(
        own or spec(8),
        rules,
        lambda own: TimedLearner(own, fake, fails),
        micro_batch_size,
        clock=TrialClock(fake),
    )
    return result, module


@pytest.fixture
def warned(caplog):
    """Return what bstune's trials warned of; what was warned of before is warned of again."""
    warn_once.cache_clear()
    return lambda: [record.getMessage() for record in caplog.records if record.name == "bstune.trial.compile"]


def test_the_noise_scale_is_measured_every_few_steps_and_is_no_training_time():
    plain, reference = measured(None)
    result, module = measured(4)
    assert plain.noise_scale == ()
    assert [step for step, _, _ in result.noise_scale] == [4, 8, 12, 16, 20, 24, 28]
    assert all(trace > 0 for _, _, trace in result.noise_scale)
    assert TrialResult.from_json(result.to_json()) == result
    assert result.history == plain.history
    assert all(torch.equal(a, b) for a, b in zip(weights(module), weights(reference), strict=True))
    assert result.train_seconds == plain.train_seconds == 30 * 8.0
    assert result.seconds_per_step == plain.seconds_per_step == 8.0
    assert result.eval_seconds == plain.eval_seconds + 7 * 8.0  # two halves of 8 examples
    assert (result.startup_seconds, result.wall_seconds) == (plain.startup_seconds, plain.wall_seconds + 56.0)


@pytest.mark.parametrize(("every", "warmup_steps"), [(1, 1), (2, 3), (2, 4), (3, 11)])
def test_measuring_changes_no_segment(monkeypatch, every, warmup_steps):
    """Nor the warm-up's, wherever a measurement falls."""
    segments = []
    monkeypatch.setattr(trial, "seconds_per_step", lambda found, warmup: segments.append(found))
    measured(None, warmup_steps=warmup_steps)
    measured(every, warmup_steps=warmup_steps)
    assert len(segments[0]) > 2
    assert segments[1] == segments[0]


def test_norms_of_micro_batches_are_read_in_the_training_itself():
    plain, reference = measured(None, micro_batch_size=3)
    result, module = measured(4, micro_batch_size=3)  # 8 examples: 3, 3 and 2
    assert [step for step, _, _ in result.noise_scale] == [4, 8, 12, 16, 20, 24, 28]
    assert result.history == plain.history
    assert all(torch.equal(a, b) for a, b in zip(weights(module), weights(reference), strict=True))
    assert (result.train_seconds, result.eval_seconds) == (plain.train_seconds, plain.eval_seconds)
    halves, _ = measured(4)
    for (_, gradient, trace), (_, half, split) in zip(result.noise_scale, halves.noise_scale, strict=True):
        assert gradient + trace / 8 == pytest.approx(half + split / 8, rel=1e-4)  # |g_big|^2: the same batches
        assert trace != pytest.approx(split, rel=1e-2)  # in other parts


@pytest.mark.parametrize("batch_size", [1, 2, 3])
def test_a_batch_that_is_too_small_to_split_is_not_measured(batch_size, warned):
    result, _ = measured(1, spec(batch_size))
    assert (result.status, result.noise_scale) == ("censored", ())
    assert warned() == []
    assert measured(1, spec(4))[0].noise_scale != ()
    assert measured(1, spec(3), micro_batch_size=2)[0].noise_scale != ()  # nothing is split


def test_modules_that_step_their_optimizers_are_not_measured(warned):
    result = run(TwoOptimizers(falls_to_target_at(7), None), rules=protocol(noise_scale_every=1))
    assert (result.status, result.noise_scale) == ("reached", ())
    assert warned() == []


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("shape '[8]' is invalid"),
        MemoryError(),
    ],
)
def test_a_trial_does_not_fail_with_its_measurement(error, warned):
    def refuses_parts(size):
        if size < 8:
            raise error

    plain, reference = measured(None)
    result, module = measured(4, fails=refuses_parts)
    assert (result.status, result.history, result.noise_scale) == (plain.status, plain.history, ())
    assert all(torch.equal(a, b) for a, b in zip(weights(module), weights(reference), strict=True))
    assert (result.train_seconds, result.seconds_per_step) == (plain.train_seconds, plain.seconds_per_step)
    assert result.eval_seconds == plain.eval_seconds + 4.0  # one try: half a batch
    text = str(error) or "MemoryError"
    said = [f"the noise scale is not measured (protocol.noise_scale_every=null leaves it out): {text}"]
    assert warned() == said
    measured(4, fails=refuses_parts)
    assert warned() == said  # once, not once a trial


def test_what_is_wrong_with_the_training_is_still_the_trials_end():
    result = run(OutOfMemory("training", accelerator_out_of_memory), rules=protocol(noise_scale_every=1))
    assert (result.status, result.steps) == ("oom", 3)


class Sparse(Classifier):
    def __init__(self, own):
        model = nn.Sequential(nn.Flatten(), nn.Linear(5, 3))
        super().__init__(model, nn.CrossEntropyLoss(), torch.optim.SGD, own.lr)
        self.table = nn.Embedding(60, 1, sparse=True)

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) + self.table(torch.arange(len(batch[1]))).mean()


class Odd(Classifier):
    """What it makes of its batches is fine, but they cannot be counted."""

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return (*batch, 7) if self.trainer.training else batch

    def training_step(self, batch, batch_idx):
        return super().training_step(batch[:2], batch_idx)


def odd(own):
    return Odd(nn.Sequential(nn.Flatten(), nn.Linear(5, 3)), nn.CrossEntropyLoss(), torch.optim.SGD, own.lr)


@pytest.mark.parametrize("micro", [None, 3])
@pytest.mark.parametrize(("build", "reason"), [(Sparse, "the gradient of table.weight is sparse"), (odd, "holds int")])
def test_a_trial_goes_on_where_its_gradients_or_batches_cannot_be_measured(build, reason, micro, warned):
    rules = protocol(12, evaluation_schedule=CADENCE, target=NOTHING_REACHED)
    plain, reference = learn(spec(8), rules, build, micro)
    result, module = learn(spec(8), replace(rules, noise_scale_every=3), build, micro)
    assert (result.status, result.steps, result.history) == ("censored", 12, plain.history)
    assert result.noise_scale == ()
    assert all(torch.equal(a, b) for a, b in zip(weights(module), weights(reference), strict=True))
    assert not any(parameter._backward_hooks for parameter in module.parameters())
    (said,) = warned()
    assert reason in said


# Checkpoints


@pytest.mark.parametrize("average", [None, 0.5])
def test_the_checkpoint_holds_the_weights_that_reached_the_target(average, tmp_path):
    def build(own):
        return learner(own, average=None if average is None else RunningWeightAverage(average))

    path = tmp_path / "3.ckpt"
    rules = protocol(300, evaluation_schedule=CADENCE, target=Target("val/loss", 0.65, "min"))
    result, _ = learn(spec(4, 0.2), rules, build, checkpoint=path)
    assert result.reached
    assert [file.name for file in tmp_path.iterdir()] == ["3.ckpt"]

    fresh = build(spec(4, 0.2, seed=99))
    fresh.load_state_dict(torch.load(path, weights_only=True)["state_dict"])
    make_trainer(TRAINER).validate(fresh, validation_data(), verbose=False)
    assert fresh.trainer.callback_metrics["val/loss"].item() == pytest.approx(result.history[-1][1], rel=1e-6)


def test_it_is_the_average_that_is_evaluated_and_kept(tmp_path):
    """Without averaging, the weight after s steps is s; the average of 1 to s is (s + 1)/2."""
    module = Counting(lambda applied: 0.9)
    module.configure_callbacks = lambda: [RunningWeightAverage(1.0)]
    values = []

    def validation_step(batch, batch_idx):
        values.append(module.weight.item())
        module.log("val/error", 0.05 if values[-1] >= 5 else 0.9, batch_size=1)

    module.validation_step = validation_step
    path = tmp_path / "own.ckpt"
    result = run(module, checkpoint=path)
    assert values == pytest.approx([0.0, *[(s + 1) / 2 for s in range(1, 10)]])
    assert (result.status, result.steps) == ("reached", 9)
    assert torch.load(path, weights_only=True)["state_dict"]["weight"].item() == pytest.approx(5.0)


@pytest.mark.parametrize(
    "module",
    [
        lambda: Counting(lambda applied: 0.9),
        lambda: Counting(lambda applied: 0.9 if applied < 3 else math.nan),
        lambda: OutOfMemory("training", accelerator_out_of_memory),
    ],
)
def test_no_file_is_left_where_the_target_was_not_reached(module, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = run(module(), checkpoint=tmp_path / "3.ckpt")
    assert result.status != "reached"
    assert list(tmp_path.iterdir()) == []


# Schedules, precision, device


def test_a_schedule_with_a_horizon_gets_its_own_trials_steps():
    overrides = [
        "workload=digits",
        "budget={steps: 6, examples: 240}",
        "workload.module.model={_target_: bstune.workloads.models.mlp, inputs: 5, hidden: [], classes: 3}",
        "~workload.module.schedule",
        "+workload.module.schedule={_target_: bstune.workloads.schedules.piecewise_linear, _partial_: true,"
        " total_steps: '${trial.total_steps}', knots: [0.0, 0.5, 1.0], factors: [0.0, 1.0, 0.0]}",
    ]
    config = compose(overrides)
    rates = {}

    def build(own):
        module = build_module(config, own)
        used = rates.setdefault(own.batch_size, [])
        step = module.training_step

        def noting(batch, batch_idx):
            used.append(module.optimizers().param_groups[0]["lr"])
            return step(batch, batch_idx)

        module.training_step = noting
        return module

    rules = protocol(6, 240, target=Target("val/error", -1.0, "min"))
    for batch_size, total in ((60, 6), (20, 12)):
        result, _ = learn(spec(batch_size, 0.8), rules, build)
        assert (result.status, result.steps) == ("censored", total)
        triangle = [0.8 * min(2 * (t + 1) / total, 2 - 2 * (t + 1) / total) for t in range(total)]
        assert rates[batch_size] == pytest.approx(triangle)


def test_nothing_is_profiled_unless_it_is_asked_for():
    nothing = make_trainer(TRAINER).profiler
    assert nothing.profile("run_training_batch") is nothing.profile("another")
    asked = make_trainer({**TRAINER, "profiler": SimpleProfiler()}).profiler
    with asked.profile("run_training_batch"):
        pass
    assert len(asked.recorded_durations["run_training_batch"]) == 1


@pytest.mark.parametrize("average", [None, 0.5])
def test_weights_in_bfloat16_are_learnt_and_evaluated(average):
    types = set()

    def build(own):
        module = learner(own, average=None if average is None else RunningWeightAverage(average))
        module.model.register_forward_hook(
            lambda model, inputs, logits: types.update({inputs[0].dtype, logits.dtype, model[1].weight.dtype})
        )
        return module

    rules = protocol(
        300,
        evaluation_schedule=CADENCE,
        noise_scale_every=8,
        trainer={**TRAINER, "precision": "bf16-true"},
        micro_batch_size=None,
    )
    result, module = learn(spec(10, 0.2), replace(rules, target=Target("val/error", 0.15, "min")), build)
    assert result.reached
    assert types == {torch.bfloat16}
    assert {parameter.dtype for parameter in module.parameters()} == {torch.bfloat16}
    assert len(result.noise_scale) == result.steps // 8
    assert all(math.isfinite(squared) and trace > 0 for _, squared, trace in result.noise_scale)


@pytest.mark.parametrize(("threads", "name"), [(1, "cpu (1 thread)"), (8, "cpu (8 threads)")])
def test_device_name(threads, name, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    assert device_name({"accelerator": "cpu"}) == name
