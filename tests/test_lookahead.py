import copy
import math
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.nn import functional as F

from bstune.core.errors import ConfigError
from bstune.core.records import Budget, EvaluationSchedule, Target, TrialProtocol, TrialSpec
from bstune.trial.batches import EvalBatches, Normalisation, TrainBatches
from bstune.trial.loop import Workload, run_trial
from bstune.workloads.averaging import ExponentialMovingAverage, Lookahead
from bstune.workloads.classifier import Classifier

STEPS, LR = 23, 0.1


def data(n, seed):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(3, (n,), generator=generator)
    noise = torch.randint(-90, 91, (n, 1, 3, 3), generator=generator)
    return (100 + 70 * F.one_hot(labels, 9).view(n, 1, 3, 3) + noise).clamp(0, 255).to(torch.uint8), labels


NORMALISE = Normalisation(torch.full((1, 1, 1, 1), 1 / 50), torch.full((1, 1, 1, 1), -2.0))


def stream(own, micro_batch_size=None):
    return TrainBatches(
        *data(50, 0), batch_size=8, micro_batch_size=micro_batch_size, seed=own.seed, normalise=NORMALISE
    )


def network():
    return nn.Sequential(nn.Conv2d(1, 4, 2), nn.BatchNorm2d(4), nn.Flatten(), nn.ReLU(), nn.Linear(16, 3))


def sgd(parameters, lr):
    return torch.optim.SGD(parameters, lr=lr, momentum=0.8, nesterov=True)


def by_hand(model, every, decay, power, own):
    """Train a copy in a plain loop with cifar10-airbench's rule, on dictionaries of weights."""
    model = copy.deepcopy(model)
    optimizer = sgd(model.parameters(), LR)
    slow = {name: value.clone() for name, value in model.state_dict().items()}

    def update(d):
        for name, fast in model.state_dict().items():
            if fast.is_floating_point():
                slow[name] = slow[name] + (1 - d) * (fast - slow[name])
                fast.copy_(slow[name])

    for t, (x, y) in zip(range(1, STEPS + 1), stream(own), strict=False):
        model.train()
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        if t % every == 0:
            update(decay * (t / STEPS) ** power)
        if t == STEPS:
            update(1.0)
    return model


def trial(callbacks, model, micro_batch_size=None, average=None):
    own = TrialSpec(number=1, trial_index=2, batch_size=8, lr=LR, delta=None, seed=4)
    rules = TrialProtocol(
        target=Target("val/loss", 0.0, "min"),
        budget=Budget(STEPS, 1),
        evaluation_schedule=EvaluationSchedule(ratio=1.05, share=0.25, cost=0.5, near=1.5),
        micro_batch_size=micro_batch_size,
        warmup_steps=2,
        divergence=9.0,
        noise_scale_every=None,
        compile=None,
        trainer={"accelerator": "cpu", "devices": 1},
    )
    module = Classifier(copy.deepcopy(model), nn.CrossEntropyLoss(), sgd, LR, average=average, callbacks=callbacks)
    evaluated = EvalBatches(*data(20, 1), batch_size=8, normalise=NORMALISE)
    batches = partial(stream, micro_batch_size=micro_batch_size)
    record = run_trial(Workload(lambda own: module, batches, evaluated, 20), own, rules)
    assert (record.status, record.steps) == ("censored", STEPS)
    return own, module.model


@pytest.mark.parametrize(
    ("every", "decay", "power"), [(5, 0.95**5, 3), (1, 0.5, 1), (4, 0.9, 0), (STEPS, 0.3, 2), (100, 0.5, 1)]
)
def test_a_trial_with_it_is_the_plain_loop_of_the_source(every, decay, power):
    torch.manual_seed(0)
    model = network()
    own, trained = trial([Lookahead(STEPS, every, decay, power)], model)
    expected = by_hand(model, every, decay, power, own).state_dict()
    for name, value in trained.state_dict().items():
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-5)
    _, plain = trial([], model)
    assert not torch.allclose(plain[0].weight, trained[0].weight, rtol=1e-3)
    assert not torch.allclose(plain[1].running_mean, trained[1].running_mean, rtol=1e-3)
    assert trained[1].num_batches_tracked == STEPS


def test_with_no_more_than_the_last_step_the_weights_are_the_untrained_ones():
    torch.manual_seed(0)
    model = network()
    _, trained = trial([Lookahead(STEPS, every=100, decay=0.5, power=1.0)], model)
    assert torch.equal(trained[0].weight, model[0].weight)
    assert torch.equal(trained[1].running_var, model[1].running_var)


def test_micro_batches_are_one_step():
    """Without batch normalisation, whose statistics are those of micro-batches, they change nothing."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(9, 16), nn.Tanh(), nn.Linear(16, 3))
    (_, whole), (_, parts) = (trial([Lookahead(STEPS, 5, 0.9, 1)], model, size) for size in (None, 3))
    torch.testing.assert_close(whole[1].weight, parts[1].weight)


def test_an_average_is_taken_of_the_weights_that_it_leaves():
    torch.manual_seed(0)
    model = network()
    _, alone = trial([Lookahead(STEPS, 2, 0.9, 0.0)], model)
    _, averaged = trial([Lookahead(STEPS, 2, 0.9, 0.0)], model, average=ExponentialMovingAverage(0.0, 1))
    assert torch.equal(alone[0].weight, averaged[0].weight)


class Weights(LightningModule):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))
        self.register_buffer("count", torch.tensor(0))


def test_nothing_waits_for_the_device():
    """Tensors of the device meta have no values: whatever would read one on the host is an error there."""
    callback, module = Lookahead(10, 2, 0.5, 1.0), Weights()
    callback.setup(None, module, "fit")
    module.to("meta")
    callback.on_fit_start(None, module)
    for step in range(1, 11):
        callback.on_train_batch_end(SimpleNamespace(global_step=step), module, None, None, step - 1)
    assert [slow.device.type for slow in callback._slow] == ["meta"]


def test_it_keeps_the_weights_type_and_place():
    callback, module = Lookahead(10, 1, 0.5, 0.0), Weights()
    module.half()
    callback.setup(None, module, "fit")
    callback.on_fit_start(None, module)
    place = module.weight.data_ptr()
    module.weight.data.fill_(1.0)
    callback.on_train_batch_end(SimpleNamespace(global_step=1), module, None, None, 0)
    assert module.weight.data_ptr() == place
    assert callback._slow[0].dtype == module.weight.dtype == torch.float16
    assert module.weight.tolist() == [0.5] * 3


def test_past_its_steps_it_does_not_extrapolate():
    callback, module = Lookahead(10, 1, 1.0, 1.0), Weights()
    callback.setup(None, module, "fit")
    callback.on_fit_start(None, module)
    module.weight.data.fill_(1.0)
    callback.on_train_batch_end(SimpleNamespace(global_step=40), module, None, None, 39)
    assert module.weight.tolist() == [0.0] * 3


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((0, 5, 0.5, 3), "lookahead needs at least one step, but got 0"),
        ((9, 0, 0.5, 3), "the steps between updates of lookahead must be a positive integer, but got 0"),
        ((9, 1.5, 0.5, 3), "the steps between updates of lookahead must be a positive integer, but got 1.5"),
        ((9, 5, 1.1, 3), "the decay of lookahead must lie in [0, 1], but got 1.1"),
        ((9, 5, math.nan, 3), "the decay of lookahead must lie in [0, 1], but got nan"),
        ((9, 5, 0.5, -1), "the power of lookahead must be at least 0, but got -1"),
    ],
)
def test_refuses(arguments, text):
    with pytest.raises(ConfigError) as error:
        Lookahead(*arguments)
    assert str(error.value) == text
