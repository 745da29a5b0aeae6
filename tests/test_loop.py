import math
import os
import signal
import sys
from dataclasses import replace
from functools import partial

import learners
import pytest
import torch
from learners import (
    SCHEDULE,
    Counting,
    count,
    gradient_scaler,
    learner,
    learning_protocol,
    momentum,
    same_weights,
    tensors,
    train,
)
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.profilers import SimpleProfiler
from toolbox import (
    EVERY_STEP,
    TRAINER,
    FakeTime,
    entries,
    evaluated_steps,
    make_protocol,
    make_spec,
    measured_steps,
)
from torch import nn

from bstune.core.clock import TrialClock
from bstune.core.errors import ConfigError
from bstune.core.evaluation_schedule import is_near, next_evaluation
from bstune.core.records import Target, TrialResult
from bstune.trial import loop
from bstune.trial.devices.device import device_name
from bstune.trial.loop import make_trainer
from bstune.trial.processes.workers import InProcess
from bstune.workloads.averaging import RunningWeightAverage
from bstune.workloads.classifier import Classifier


def from_step(step, value=0.05):
    """A metric that is 0.9 before ``step`` and ``value`` from it on."""
    return lambda applied: value if applied >= step else 0.9


never = from_step(math.inf)


# As many skipped steps in a row end a trial: the loss has no finite gradient any more.
FIFTY = "the gradients overflowed in 50 steps in a row"


# How a trial ends


@pytest.mark.parametrize(
    ("metric", "ending", "message"),
    [
        # The weight counts the applied steps, and the metric is a function of it.
        (from_step(7), ("reached", 7, 6), None),
        (never, ("stopped", 20, 20), None),
        # From 0.9 at the start to 0.1 are 0.8: diverged lies above 0.1 + 2 x 0.8.
        (from_step(3, 1.71), ("diverged", 3, 3), "val/error is 1.71 at step 3, far past its start"),
        (from_step(3, 1.69), ("stopped", 20, 20), None),
        (from_step(3, math.nan), ("diverged", 3, 3), "val/error is not finite at step 3"),
        (from_step(3, math.inf), ("diverged", 3, 3), "val/error is not finite at step 3"),
        (from_step(3, -math.inf), ("diverged", 3, 3), "val/error is not finite at step 3"),
    ],
)
def test_a_trial_ends_by_its_metric(metric, ending, message):
    result = count(Counting(metric), make_spec(delta=0.5))
    assert (result.status, result.steps, result.steps_low) == ending
    assert (result.message, result.examples) == (message, 4 * result.steps)
    expected = []
    for step in range(1, result.steps + 1):
        value = metric(step)
        # JSON has no NaN and no infinity, so a record has None in their place.
        expected.append((step, value if math.isfinite(value) else None))
    assert result.history == tuple(expected)
    identity = (
        result.number,
        result.trial_index,
        result.batch_size,
        result.lr,
        result.delta,
        result.seed,
    )
    # What make_spec states, carried over to the record.
    assert identity == (3, 2, 4, 0.1, 0.5, 0)
    assert set(result.versions) == {"bstune", "torch", "lightning"}
    assert TrialResult.from_json(result.to_json()) == result


@pytest.mark.parametrize(
    ("batch_size", "steps", "examples", "last"),
    [
        (4, 6, 1, 6),
        # Both parts of the budget have to be spent.
        (4, 6, 25, 7),
        # A batch is whole, even at the budget's end.
        (7, 1, 50, 8),
    ],
)
def test_budget_ends_once_steps_and_examples_are_both_spent(batch_size, steps, examples, last):
    protocol = make_protocol(steps, examples, evaluation_schedule=SCHEDULE)
    result = count(Counting(never), make_spec(batch_size), protocol)
    assert (result.status, result.steps, result.steps_low) == ("stopped", last, last)
    # The last step is always evaluated.
    assert result.history[-1] == (last, 0.9)
    assert result.message is None
    # The target may still be met by the very last step.
    assert count(Counting(from_step(last)), make_spec(batch_size), protocol).status == "reached"


@pytest.mark.parametrize(("metric", "status", "low"), [(0.9, "stopped", 6), (0.05, "reached", 0)])
def test_a_module_that_stops_early_is_evaluated_then(metric, status, low):
    module = Counting(from_step(1, metric))

    # As EarlyStopping does, in the midst of an epoch.
    def stop_after_six_batches(optimizer):
        # Batches count from 0: this is the sixth.
        module.trainer.should_stop = module.trainer.fit_loop.batch_idx >= 5

    module.on_before_zero_grad = stop_after_six_batches
    # By itself it would evaluate at step 10.
    result = count(module, protocol=make_protocol(evaluation_schedule=SCHEDULE))
    assert (result.status, result.steps, result.steps_low) == (status, 6, low)
    assert result.history == ((6, metric),)


@pytest.mark.parametrize(
    ("metric", "overflows", "options", "ending", "message"),
    [
        # The scale grows after every step, after three or never; that must not pass for a skipped
        # step.
        (from_step(7), (), {"growth": 1}, ("reached", 7, 6), None),
        (from_step(7), (0,), {}, ("reached", 7, 6), None),
        (from_step(7), (2, 3, 8), {"growth": 1}, ("reached", 7, 6), None),
        (from_step(7), (5, 6, 7, 9), {"growth": 3}, ("reached", 7, 6), None),
        (from_step(7), (5, 6, 7, 9), {}, ("reached", 7, 6), None),
        # Of pairs of micro-batches, 0 and 1 and 4 and 5 overflow.
        (from_step(7), (1, 4), {"micro_batch_size": 2}, ("reached", 7, 6), None),
        # Twice 49 in a row: one short of the limit.
        (from_step(9), {*range(3, 52), *range(53, 102)}, {}, ("reached", 9, 8), None),
        # Nothing was ever applied.
        (never, range(200), {}, ("diverged", 0, 0), FIFTY),
        # Five steps were applied, then none.
        (never, range(5, 200), {}, ("diverged", 5, 5), FIFTY),
        (never, range(5, 200), {"evaluation_schedule": SCHEDULE}, ("diverged", 5, 5), FIFTY),
        # The first evaluation after step 5 ends the trial.
        (from_step(5), range(5, 200), {"evaluation_schedule": SCHEDULE}, ("reached", 5, 0), None),
    ],
)
def test_a_step_that_the_gradient_scaler_skips_does_not_count(
    metric, overflows, options, ending, message
):
    module = Counting(metric)
    options = dict(options)
    factors = []

    def backward(gradient):
        factors.append(math.inf if len(factors) in overflows else 1.0)
        return gradient * factors[-1]

    module.weight.register_hook(backward)
    scaler = gradient_scaler(growth_interval=options.pop("growth", 2000))
    protocol = make_protocol(200, trainer=scaler, **options)
    result = count(module, protocol=protocol)
    assert (result.status, result.steps, result.steps_low) == ending
    assert (result.message, result.examples) == (message, 4 * result.steps)
    assert module.weight.item() == pytest.approx(result.steps)
    assert result.history[-1] == (result.steps, metric(result.steps))
    if "evaluation_schedule" not in options:
        assert set(evaluated_steps(result)) == set(range(min(1, result.steps), result.steps + 1))
    if message:
        # The fifty that overflowed were computed, and applied nothing.
        assert len(factors) == result.steps + 50


class TwoOptimizers(Counting):
    """Two weights with an optimizer each, both stepped in every training step."""

    def __init__(self, metric, returns=None):
        super().__init__(metric)
        self.automatic_optimization = False
        self.other = nn.Parameter(torch.zeros(()))
        self.returns = returns

    def training_step(self, batch, batch_idx):
        for parameter, optimizer in zip((self.weight, self.other), self.optimizers(), strict=True):
            optimizer.zero_grad()
            # The loss is minus the weight, so that a step of rate 1 adds 1.
            self.manual_backward(-parameter)
            optimizer.step()
        return self.returns

    def configure_optimizers(self):
        # One step by two optimizers.
        return [torch.optim.SGD([self.weight], lr=1.0), torch.optim.SGD([self.other], lr=1.0)]


# What training_step returns under manual optimization is the author's affair.
@pytest.mark.parametrize(
    "returns", [None, torch.tensor(1.0), torch.ones(2), {"loss": torch.tensor(1.0)}, {"other": 1}]
)
def test_steps_do_not_depend_on_the_number_of_optimizers(returns, warned):
    module = TwoOptimizers(from_step(7), returns)
    result = count(module, protocol=make_protocol(noise_scale_every=1))
    assert (result.status, result.steps, result.steps_low) == ("reached", 7, 6)
    assert (module.weight, module.other) == (7, 7)
    # Such modules are not measured.
    assert (result.noise_scale, warned()) == ((), [])


def test_diverged_by_a_loss_that_is_not_finite():
    # The fifth batch: its step is applied, and the weight lost.
    module = Counting(never, gradient=lambda batch: math.nan if batch == 4 else 1.0)
    result = count(module)
    assert (result.status, result.steps, result.steps_low) == ("diverged", 5, 5)
    assert result.message == "the training loss is nan at step 5"
    result = count(TwoOptimizers(never, {"loss": torch.tensor(math.nan)}))
    assert (result.status, result.message) == ("diverged", "the training loss is nan at step 1")


def fails_in(stage, fail):
    """A module that fails in training or evaluation once three steps are applied."""
    if stage == "training":
        return Counting(never, lambda batch: fail() if batch == 3 else 1.0)
    return Counting(lambda applied: fail() if applied == 3 else 0.9)


def out_of_memory(spec=None):
    # The second line is of the GPU's memory, which no record needs.
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.\nGPU 0 has ...")


@pytest.mark.parametrize(
    ("stage", "fail", "text"),
    [
        ("training", out_of_memory, "CUDA out of memory. Tried to allocate 20.00 GiB."),
        pytest.param(
            *("training", lambda: torch.empty(2**60, dtype=torch.uint8), "DefaultCPUAllocator"),
            marks=pytest.mark.slow,
        ),
        ("evaluation", lambda: bytearray(2**60), "MemoryError"),
    ],
)
def test_oom(stage, fail, text):
    result = count(fails_in(stage, fail), protocol=make_protocol(noise_scale_every=1))
    assert result.status == "out of memory"
    assert text in result.message
    assert "\n" not in result.message
    # At the evaluation of step 3 the last one that missed was that of step 2.
    assert (result.steps, result.steps_low) == ((3, 3) if stage == "training" else (3, 2))
    assert TrialResult.from_json(result.to_json()) == result


# Already the constructor may ask for too much.
def test_oom_before_the_first_step():
    result, _ = train(build=out_of_memory)
    assert (result.status, result.steps, result.history, result.seconds_per_step) == (
        "out of memory",
        0,
        (),
        None,
    )


def refuses_nan(module, weight=math.nan):
    """Lose the weights, or the loss, and fail as a distribution that gets them does."""
    with torch.no_grad():
        module.weight.fill_(weight)
    # The text of torch.distributions, which checks its arguments.
    raise ValueError("Expected parameter loc to satisfy the constraint Real()\nbut found nan")


@pytest.mark.parametrize(
    ("stage", "message"),
    [
        (
            "training",
            (
                "Expected parameter loc to satisfy the constraint Real() at step 3: weight is not "
                "finite"
            ),
        ),
        (
            "evaluation",
            (
                "Expected parameter loc to satisfy the constraint Real() at step 3: weight is not "
                "finite"
            ),
        ),
        (
            "loss",
            (
                "Expected parameter loc to satisfy the constraint Real() at step 3: the training "
                "loss is inf"
            ),
        ),
    ],
)
def test_an_error_after_loss_or_weights_are_lost_is_divergence(stage, message):
    if stage == "loss":
        module = fails_in("evaluation", lambda: refuses_nan(module, 1.0))
        # The loss of the third batch is infinite, and the weights are not.
        module.training_step = lambda batch, batch_idx: (
            -module.weight + (math.inf if batch_idx == 2 else 0.0)
        )
    else:
        module = fails_in(stage, lambda: refuses_nan(module))
    result = count(module)
    assert (result.status, result.steps, result.message) == ("diverged", 3, message)
    assert TrialResult.from_json(result.to_json()) == result


def no_more():
    return next(iter(()))


def no_such_layer():
    raise LookupError("no such layer")


# The step is applied, and then it fails.
class Raises(torch.optim.SGD):
    def step(self, closure=None):
        super().step(closure)
        if self.param_groups[0]["params"][0] >= 3:
            no_such_layer()


def with_optimizer(optimizer, schedule=None):
    module = Counting(never)
    made = optimizer(module.parameters(), lr=1.0)
    schedules = [] if schedule is None else [{"scheduler": schedule(made), "interval": "step"}]
    module.configure_optimizers = lambda: ([made], schedules)
    return module


def with_hook(name, fail=no_such_layer):
    module = Counting(never)
    setattr(module, name, lambda *arguments, **options: fail())
    return module


def raises_at(step):
    return partial(
        torch.optim.lr_scheduler.LambdaLR,
        lr_lambda=lambda at: no_such_layer() if at == step else 1.0,
    )


def breaks(spec, micro_batch_size=None):
    for _ in range(3):
        yield torch.zeros(4)
    no_such_layer()


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (
            fails_in("training", lambda: torch.stack([])),
            "RuntimeError: stack expects a non-empty TensorList",
        ),
        # A StopIteration would end Lightning's loop as if the data had.
        (fails_in("training", no_more), "RuntimeError: StopIteration in training_step"),
        (fails_in("evaluation", no_more), "RuntimeError: StopIteration in validation_step"),
        (
            # Raised in this hook it does: Lightning takes it for the end of the data.
            with_hook("on_train_batch_start", no_more),
            "RuntimeError: the training ended by itself at step 0",
        ),
        (
            # A module must not end the study's process.
            fails_in("training", lambda: sys.exit("enough")),
            "RuntimeError: sys.exit('enough') was called",
        ),
        (with_hook("configure_optimizers"), "LookupError: no such layer"),
        (with_hook("configure_callbacks"), "LookupError: no such layer"),
        (with_hook("configure_gradient_clipping"), "LookupError: no such layer"),
        (with_optimizer(Raises), "LookupError: no such layer"),
        (with_optimizer(torch.optim.SGD, raises_at(3)), "LookupError: no such layer"),
        (breaks, "LookupError: no such layer"),
    ],
)
def test_any_other_error_is_a_failure_with_the_frames_of_the_users_files(module, message):
    batches = {"batches": module} if module is breaks else {}
    # As a study runs it: an error of the user's becomes a record, and its frames are kept.
    with InProcess(
        lambda spec, output, parent: count(Counting(never) if batches else module, spec, **batches)
    ) as runner:
        runner.start(make_spec(), None, None)
        finished = runner.wait()
    assert finished.result().status == "failed"
    assert finished.result().message.startswith(message)
    assert f"  {__file__}:" in finished.frames
    assert "site-packages" not in finished.frames


@pytest.mark.usefixtures("interruptible")
def test_an_interruption_is_no_error_of_the_users():
    # Lightning ends so.
    with pytest.raises(SystemExit):
        count(fails_in("training", lambda: signal.raise_signal(signal.SIGINT)))


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("stage", ["training", "evaluation"])
def test_a_copy_of_the_process_does_not_train_on(stage, monkeypatch):
    """The copy finds that its process is another one."""
    ended = []
    monkeypatch.setattr(os, "_exit", ended.append)
    # After a fork the process has another number.
    module = fails_in(stage, lambda: monkeypatch.setattr(os, "getpid", lambda: -1) or 1.0)
    count(module, protocol=make_protocol(4))
    assert ended[0] == 0


@pytest.mark.parametrize(
    ("value", "mode"), [(0.1, "min"), (0.05, "min"), (0.1, "max"), (0.3, "max")]
)
def test_a_target_that_is_met_before_training_is_a_mistake(value, mode):
    module = Counting(lambda applied: value)
    with pytest.raises(ConfigError) as error:
        count(module, protocol=make_protocol(target=Target("val/error", 0.1, mode)), evaluated=2)
    sign = {"min": "<=", "max": ">="}[mode]
    assert str(error.value) == (
        f"the target val/error {sign} 0.1 is met before training (val/error starts at {value:g}): "
        "give workload.target.mode the other direction, or a harder value"
    )
    assert module.weight == 0


@pytest.mark.parametrize(
    ("later", "limits", "status"),
    [
        # 0.9 on nine batches and 0.0 on the first are 0.81, so that 0.1 + 2 x 0.71 is far past it.
        (1.51, {}, "stopped"),
        (1.53, {}, "diverged"),
        # Trials whose steps are only timed evaluate one batch.
        (0.9, {"limit_val_batches": 1}, "stopped"),
    ],
)
def test_the_start_is_measured_on_all_validation_data(later, limits, status):
    """Before training, the module is right on the first batch alone, as where a class fills it."""
    module = Counting(None)

    def validation_step(batch, batch_idx):
        # Before training the weight is 0.
        value = later if module.weight else 0.9 if batch_idx else 0.0
        module.log("val/error", value, batch_size=1)

    module.validation_step = validation_step
    assert (
        count(module, protocol=make_protocol(5, trainer={**TRAINER, **limits}), evaluated=10).status
        == status
    )


def test_an_evaluation_that_does_not_log_the_metric_tells_nothing():
    module = Counting(from_step(8))
    logs = module.validation_step
    module.validation_step = lambda batch, batch_idx: (
        logs(batch, batch_idx) if module.weight % 3 == 1 else None
    )
    result = count(module)
    # After 7 steps it missed, and at 8 it met the target unseen: the next evaluation to log is at
    # 10.
    assert (result.status, result.steps, result.steps_low) == ("reached", 10, 7)
    # At weights 1, 4, 7, 10, where the remainder by 3 is 1.
    assert evaluated_steps(result) == [1, 4, 7, 10]
    module = Counting(never)
    logs = module.validation_step
    module.validation_step = lambda batch, batch_idx: (
        logs(batch, batch_idx) if module.weight % 3 == 1 else None
    )
    result = count(module, protocol=make_protocol(5))
    # The last evaluation that logs is at step 4, which is the bound; the fifth step was run all the
    # same.
    assert (result.status, result.steps, result.steps_low) == ("stopped", 5, 4)
    module = Counting(never, gradient=lambda batch: math.nan if batch == 4 else 1.0)
    logs = module.validation_step
    module.validation_step = lambda batch, batch_idx: (
        logs(batch, batch_idx) if module.weight == 1 else None
    )
    result = count(module)
    # Of a loss that is lost a trial hears without an evaluation.
    assert (result.status, result.message) == ("diverged", "the training loss is nan at step 5")


def test_a_call_back_that_accumulates_batches_is_refused():
    protocol = make_protocol(
        trainer={**TRAINER, "callbacks": [GradientAccumulationScheduler({0: 4})]}
    )
    with pytest.raises(
        ConfigError, match="GradientAccumulationScheduler makes steps of several batches"
    ):
        count(Counting(never), protocol=protocol)


def test_a_metric_that_is_not_logged_is_named_with_those_that_are():
    module = Counting(never, name="val/acc")
    module.on_validation_epoch_end = lambda: module.log("val/loss", 1.0)
    with pytest.raises(ConfigError) as error:
        count(module)
    assert str(error.value) == (
        "the target's metric is 'val/error', but the module logs val/acc, val/loss in validation: "
        "set workload.target.metric to one of them, or log it"
    )
    module = Counting(never)
    module.validation_step = lambda batch, batch_idx: None
    with pytest.raises(ConfigError, match="but the module logs nothing in validation"):
        count(module)


@pytest.mark.parametrize(
    ("correct", "target", "start", "status"),
    [
        # Read as a double, 0.1 in float32 would miss.
        (
            500,
            # 500 of 5,000 are wrong. In float32 their share is 0.1 + 1.5e-9.
            Target("val/error", 0.1, "min"),
            1.0,
            "reached",
        ),
        (501, Target("val/error", 0.1, "min"), 1.0, "stopped"),
        (4500, Target("val/error", 0.9, "max"), 0.1, "reached"),
        (4499, Target("val/error", 0.9, "max"), 0.1, "stopped"),
    ],
)
def test_a_tenth_in_float32_is_a_tenth(correct, target, start, status):
    value = torch.tensor(correct, dtype=torch.float32) / 5000
    module = Counting(lambda applied: value if applied else start)
    assert count(module, protocol=make_protocol(1, target=target)).status == status


# Micro-batches


class WithoutBatchIndex(Classifier):
    # Lightning allows a training_step without the index.
    def training_step(self, batch):
        return {"loss": super().training_step(batch, 0), "size": len(batch[1])}


# of 10: 4+4+2, 5+5, 3+3+3+1, 9+1
@pytest.mark.parametrize(
    ("micro", "kind"),
    [(4, Classifier), (5, WithoutBatchIndex), (3, WithoutBatchIndex), (9, Classifier)],
)
def test_micro_batches_are_the_large_batch(micro, kind, monkeypatch):
    def weights(micro_batch_size):
        protocol = learning_protocol(9, micro_batch_size=micro_batch_size)
        result, module = train(
            make_spec(10, lr=0.05), protocol, partial(learner, kind=kind, optimizer=momentum)
        )
        assert (result.steps, result.examples) == (9, 90)
        return tensors(module)

    # Sums in another order differ in float32's last digits.
    large = weights(None)
    torch.testing.assert_close(weights(micro), large, rtol=1e-5, atol=1e-6)
    # Lightning's own accumulation would be wrong for a smaller last group.
    monkeypatch.setattr(loop, "weight_micro_batches", lambda *arguments: None)
    same = True
    for of_micro, of_large in zip(weights(micro), large, strict=True):
        same &= torch.allclose(of_micro, of_large, rtol=1e-4, atol=1e-5)
    # Only where the last group is as large as the others does Lightning's mean of means do.
    assert same == (10 % micro == 0)


@pytest.mark.filterwarnings("ignore:.training_step. returned .None.")
def test_a_micro_batch_without_a_loss_adds_nothing():
    """As Lightning has it: training_step may return None."""
    module = Counting(never)
    # The middle one of three groups has no loss.
    module.training_step = lambda batch, batch_idx: None if batch_idx % 3 == 1 else -module.weight
    result = count(module, make_spec(10), make_protocol(2, micro_batch_size=4))
    assert result.steps == 2
    # Two of three groups are left: 4 and 2 of 10 examples.
    assert module.weight.item() == pytest.approx(2 * 0.6)


def test_micro_batches_are_refused_where_lightning_does_not_accumulate():
    protocol = make_protocol(micro_batch_size=4)
    with pytest.raises(ConfigError, match=r"manual optimization.*protocol.micro_batch_size=null"):
        count(TwoOptimizers(never), make_spec(10), protocol)
    # A batch that is one micro-batch needs no accumulation.
    assert count(TwoOptimizers(never), make_spec(4), protocol).status == "stopped"


# Repetition


def test_the_same_seed_gives_the_same_trial_bit_for_bit():
    first, module = train(make_spec(7, seed=5))
    # What was drawn before must not matter.
    torch.rand(3)
    again, rerun = train(make_spec(7, seed=5))
    assert again == first
    assert same_weights(module, rerun)
    other, rerun = train(make_spec(7, seed=6))
    assert other.history != first.history
    for tensor, other in zip(tensors(module), tensors(rerun), strict=True):
        assert not torch.equal(tensor, other)


# The evaluation schedule


@pytest.mark.parametrize(
    # One example a step, groups of four, and all 60 images in a batch.
    ("batch_size", "lr", "micro"),
    [(1, 0.03, None), (16, 0.2, 4), (60, 0.5, None)],
)
def test_evaluations_follow_the_rule(batch_size, lr, micro):
    target = Target("val/loss", 0.3, "min")
    protocol = replace(learning_protocol(30, examples=600), target=target, micro_batch_size=micro)
    result, _ = train(make_spec(batch_size, lr), protocol)
    assert len(result.history) > 2
    step = 0
    past = []
    near = False
    schedule = protocol.evaluation_schedule
    for actual, value in result.history:
        near = near or is_near(past, target.gap, schedule.near)
        # 20 are the validation images.
        due = next_evaluation(step, batch_size, 20, len(past), near, schedule)
        assert actual == min(due, protocol.budget.last_step(batch_size))
        past.append((actual, value))
        step = actual
    missed = [at for at, value in result.history if not target.reached(value)]
    assert result.steps_low == (missed[-1] if missed else 0)
    assert result.steps == result.history[-1][0]
    if result.reached:
        assert len(missed) == len(result.history) - 1
        assert result.steps_low < result.steps


def test_the_target_is_not_met_before_the_interval():
    """Evaluated at every step, the same trial misses at the interval's low end and has hit by its high end."""
    protocol = learning_protocol(200, target=Target("val/error", 0.1, "min"))
    sparse, _ = train(make_spec(5, 0.1), protocol)
    dense, _ = train(make_spec(5, 0.1), replace(protocol, evaluation_schedule=EVERY_STEP))
    assert sparse.reached
    assert dense.reached
    # Else the interval would be the step itself, and nothing shown.
    assert sparse.steps - sparse.steps_low > 1
    densely = dict(dense.history)
    for step, value in sparse.history:
        # The two are one training: evaluating more often changes none of it.
        if step <= dense.steps:
            assert densely[step] == value
    assert dense.steps <= sparse.steps


# The clock


def timed(fake, seconds=lambda batch: 1.0):
    """A module that takes 100 s to start, 10 s an evaluation, and ``seconds(n)`` for training batch n."""

    module = Counting(
        lambda applied: fake.sleep(10.0) or 0.9, lambda batch: fake.sleep(seconds(batch)) or 1.0
    )
    module.on_fit_start = lambda: fake.sleep(100.0)
    return module


def test_training_start_up_and_evaluation_are_counted_apart():
    fake = FakeTime()

    def batches(spec, micro_batch_size):
        for batch in learners.blanks(spec):
            fake.sleep(0.25)
            yield batch

    after_step = Callback()
    # This is training, too.
    after_step.on_train_batch_end = lambda *args: fake.sleep(0.5)
    # The module takes 1 s, its batch 0.25 s, and the call-back 0.5 s: 1.75 s a step.
    module = timed(fake)
    module.configure_callbacks = lambda: [after_step]
    # With 10 examples at a cost of 0.5 and B = 4, half a quarter of training allows one evaluation
    # in ten steps.
    protocol = make_protocol(35, evaluation_schedule=SCHEDULE)
    result = count(module, protocol=protocol, batches=batches, clock=TrialClock(fake))
    assert evaluated_steps(result) == [10, 20, 30, 35]
    assert result.train_seconds == 35 * 1.75
    # One of the evaluations is at the start.
    assert result.eval_seconds == 10.0 + 4 * 10.0
    # The first batch counts as start-up.
    assert result.startup_seconds == 100.25
    assert result.wall_seconds == fake.now == 100.25 + 50.0 + 35 * 1.75
    assert result.seconds_per_step == 1.75
    assert result.time_to_target is None


@pytest.mark.parametrize("warmup_steps", [3, 4])
def test_warm_up_lasts_its_steps_where_evaluations_cut_it_short(warmup_steps):
    fake = FakeTime()
    # The first three steps are slow, as those of a compilation are.
    module = timed(fake, lambda batch: 51.0 if batch < 3 else 1.0)
    # It is evaluated after every step.
    protocol = make_protocol(5, warmup_steps=warmup_steps)
    result = count(module, protocol=protocol, clock=TrialClock(fake))
    assert len(result.history) == 5
    assert result.seconds_per_step == 1.0


@pytest.mark.slow
def test_a_trial_that_fails_keeps_the_time_it_took():
    fake = FakeTime()
    module = timed(fake, lambda batch: 1.0 if batch < 5 else out_of_memory())
    result = count(module, clock=TrialClock(fake))
    # Five steps were done, after one evaluation at the start and five more.
    assert (result.status, result.train_seconds, result.eval_seconds) == (
        "out of memory",
        5.0,
        60.0,
    )


# The noise scale


def measured(every, batch_size=8, micro_batch_size=None, check=lambda size: None):
    """Record and module of a trial that measures the noise scale; ``check`` may refuse a batch by its size."""
    fake = FakeTime()

    class Timed(Classifier):
        """Takes 1 s for each example of a training step, and 10 s for an evaluation."""

        def training_step(self, batch, batch_idx):
            fake.sleep(len(batch[1]))
            check(len(batch[1]))
            return super().training_step(batch, batch_idx)

        def on_validation_start(self):
            fake.sleep(10.0)

    # Nothing counts as diverged, so that each trial runs its 30 steps.
    protocol = learning_protocol(
        30, noise_scale_every=every, micro_batch_size=micro_batch_size, divergence=1e9
    )
    return train(
        make_spec(batch_size), protocol, partial(learner, kind=Timed), clock=TrialClock(fake)
    )


def test_the_noise_scale_is_measured_every_few_steps_and_is_no_training_time():
    plain, reference = measured(None)
    result, module = measured(4)
    assert plain.noise_scale == ()
    # 30 steps have seven multiples of 4.
    assert measured_steps(result.noise_scale) == [4, 8, 12, 16, 20, 24, 28]
    for _, _, trace in result.noise_scale:
        assert trace > 0
    assert TrialResult.from_json(result.to_json()) == result
    assert result.history == plain.history
    assert same_weights(module, reference)
    # 30 steps of 8 examples at 1 s each.
    assert result.train_seconds == plain.train_seconds == 30 * 8.0
    assert result.seconds_per_step == plain.seconds_per_step == 8.0
    # A measurement takes two halves of 8 examples.
    assert result.eval_seconds == plain.eval_seconds + 7 * 8.0
    assert (result.startup_seconds, result.wall_seconds) == (
        plain.startup_seconds,
        plain.wall_seconds + 56.0,
    )


def test_a_batch_that_is_too_small_to_split_is_not_measured(warned):
    # Half of a batch below 4 is a single example, or none.
    for batch_size in (1, 2, 3):
        result, _ = measured(1, batch_size)
        assert (result.status, result.noise_scale) == ("stopped", ())
    assert warned() == []
    assert measured(1, 4)[0].noise_scale != ()
    # Nothing has to be split.
    assert measured(1, 3, micro_batch_size=2)[0].noise_scale != ()


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("shape '[8]' is invalid"),
        MemoryError(),
    ],
)
def test_a_trial_does_not_fail_with_its_measurement(error, warned):
    def refuse_parts(size):
        # A measurement is the only thing that trains on less than the batch of 8.
        if size < 8:
            raise error

    plain, reference = measured(None)
    result, module = measured(4, check=refuse_parts)
    assert (result.status, result.history, result.noise_scale) == (plain.status, plain.history, ())
    assert same_weights(module, reference)
    assert (result.train_seconds, result.seconds_per_step) == (
        plain.train_seconds,
        plain.seconds_per_step,
    )
    # It takes one try of half a batch.
    assert result.eval_seconds == plain.eval_seconds + 4.0
    text = ": ".join(filter(None, (type(error).__name__, str(error)))) + " (test_loop.py:"
    # The step takes a whole batch, so that its code is not blamed for a part.
    if str(error).startswith("shape"):
        text = "batches cannot be split into parts by their first dimension (a part alone: Runtime"
    warning = f"the noise scale is not measured: {text}"
    assert warned() == [result.message]
    assert result.message.startswith(warning)
    measured(4, check=refuse_parts)
    # The warning comes once, not once a trial.
    assert len(warned()) == 1


class Sparse(Classifier):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        # An embedding's gradient has only the rows that were looked up.
        self.table = nn.Embedding(60, 1, sparse=True)

    def training_step(self, batch, batch_idx):
        return (
            super().training_step(batch, batch_idx) + self.table(torch.arange(len(batch[1]))).mean()
        )


@pytest.mark.parametrize("micro", [None, 3])
def test_a_trial_goes_on_where_its_gradients_cannot_be_measured(micro, warned):
    protocol = learning_protocol(12, micro_batch_size=micro)
    build = partial(learner, kind=Sparse)
    plain, reference = train(make_spec(8), protocol, build)
    result, module = train(make_spec(8), replace(protocol, noise_scale_every=3), build)
    assert (result.status, result.steps, result.history) == ("stopped", 12, plain.history)
    assert result.noise_scale == ()
    assert same_weights(module, reference)
    # Nothing of the measurement is left behind.
    for parameter in module.parameters():
        assert not parameter._backward_hooks
    (warning,) = warned()
    assert "the gradient of table.weight is sparse" in warning


# Checkpoints


def test_the_checkpoint_holds_the_weights_that_reached_the_target(tmp_path):
    build = partial(learner, average=partial(RunningWeightAverage, 0.5))
    path = tmp_path / "3.ckpt"
    protocol = learning_protocol(300, target=Target("val/loss", 0.65, "min"))
    result, _ = train(make_spec(4, 0.05), protocol, build, checkpoint=path)
    assert result.reached
    assert entries(tmp_path) == ["3.ckpt"]

    # Weights of another seed, so that only those that are loaded can give the loss.
    fresh = build(make_spec(4, 0.05, seed=99))
    fresh.load_state_dict(torch.load(path, weights_only=True)["state_dict"])
    make_trainer(TRAINER).validate(fresh, learners.validation(), verbose=False)
    assert fresh.trainer.callback_metrics["val/loss"].item() == pytest.approx(
        result.history[-1][1], rel=1e-6
    )


def test_it_is_the_average_that_is_evaluated_and_kept(tmp_path):
    """Without averaging, the weight after s steps is s; the average of 1 to s is (s + 1)/2."""
    module = Counting(never)
    values = []
    # A fraction of 1: the average of all weights so far.
    module.configure_callbacks = lambda: [RunningWeightAverage(1.0)]

    def validation_step(batch, batch_idx):
        values.append(module.weight.item())
        module.log("val/error", 0.05 if values[-1] >= 5 else 0.9, batch_size=1)

    module.validation_step = validation_step
    path = tmp_path / "3.ckpt"
    result = count(module, checkpoint=path)
    # 0 before training, then (s + 1)/2.
    assert values == pytest.approx([0.0, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5, 5.0])
    assert (result.status, result.steps) == ("reached", 9)
    assert torch.load(path, weights_only=True)["state_dict"]["weight"].item() == pytest.approx(5.0)


# Precision and device


def test_nothing_is_profiled_unless_it_is_asked_for():
    # The profiler that does nothing is one object for all names.
    nothing = make_trainer(TRAINER).profiler
    assert nothing.profile("run_training_batch") is nothing.profile("another")
    asked = make_trainer({**TRAINER, "profiler": SimpleProfiler()}).profiler
    with asked.profile("run_training_batch"):
        pass
    assert len(asked.recorded_durations["run_training_batch"]) == 1


def test_weights_in_bfloat16_are_learnt_averaged_and_evaluated():
    types = set()

    def build(spec):
        module = learner(spec, average=partial(RunningWeightAverage, 0.5))
        # What goes in, what comes out, and the weights of a layer.
        module.model.register_forward_hook(
            lambda model, inputs, logits: types.update(
                {inputs[0].dtype, logits.dtype, model[1].weight.dtype}
            )
        )
        return module

    trainer = {**TRAINER, "precision": "bf16-true"}
    target = Target("val/error", 0.15, "min")
    protocol = learning_protocol(300, target=target, noise_scale_every=8, trainer=trainer)
    result, module = train(make_spec(10, 0.05), protocol, build)
    assert result.reached
    assert types == {torch.bfloat16}
    for parameter in module.parameters():
        assert parameter.dtype == torch.bfloat16
    assert len(result.noise_scale) == result.steps // 8 > 0
    for _, squared, trace in result.noise_scale:
        assert math.isfinite(squared)
        assert trace > 0


@pytest.mark.parametrize(("threads", "name"), [(1, "cpu (1 thread)"), (8, "cpu (8 threads)")])
def test_device_name(threads, name, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    assert device_name({"accelerator": "cpu"}) == name
