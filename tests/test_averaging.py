import copy
import math
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from learners import Operators, learning_protocol, momentum, stream, train
from lightning.pytorch import LightningModule
from toolbox import make_spec
from torch import nn
from torch.nn import functional as F

from bstune.core.errors import ConfigError
from bstune.workloads import averaging
from bstune.workloads.averaging import (
    SNAPSHOTS,
    ExponentialMovingAverage,
    Lookahead,
    RunningWeightAverage,
)
from bstune.workloads.classifier import Classifier


class Weights(LightningModule):
    """Weights of two types and a buffer, set anew at each step."""

    def __init__(self):
        super().__init__()
        self.narrow = nn.Parameter(torch.zeros(3))
        self.wide = nn.Parameter(torch.zeros(2, dtype=torch.float64))
        self.register_buffer("statistic", torch.zeros(2))
        self.register_buffer("count", torch.tensor(0))

    def set(self, values):
        with torch.no_grad():
            self.narrow.copy_(values[:3])
            self.wide.copy_(values[3:5])
            self.statistic.copy_(values[5:])
            self.count.add_(1)

    def get(self):
        return torch.cat(
            [self.narrow.detach().double(), self.wide.detach(), self.statistic.double()]
        )


def started(callback):
    """A module that a call-back is set up with."""
    module = Weights()
    callback.setup(None, module, "fit")
    return module


def end_step(callback, module, step):
    callback.on_train_batch_end(SimpleNamespace(global_step=step), module, None, None, step - 1)


def follow(callback, steps):
    """Set random weights at each step; return all of them, and the average and the updates so far after each."""
    module = started(callback)
    values = torch.randn(steps, 7, generator=torch.Generator().manual_seed(0)).float().double()
    averages = []
    updates = []
    for step in range(1, steps + 1):
        module.set(values[step - 1])
        end_step(callback, module, step)
        averages.append(callback._average_model.module.get())
        updates.append(int(callback._average_model.n_averaged))
    # Whole numbers are copied, not averaged.
    assert callback._average_model.module.count.dtype == torch.int64
    assert int(callback._average_model.module.count) >= 1
    return values, averages, updates


@pytest.mark.parametrize(
    ("fraction", "tolerance"), [(1.0, 1e-12), (0.5, 0.003), (0.1, 0.03), (0.05, 0.1)]
)
def test_updated_every_step_weights_count_by_a_power_law(fraction, tolerance, monkeypatch):
    monkeypatch.setattr(averaging, "SNAPSHOTS", 10**9)
    steps = 200
    values, averages, updates = follow(RunningWeightAverage(fraction), steps)
    assert updates == list(range(1, steps + 1))
    for t in (1, 2, 7, 60, steps):
        s = torch.arange(1, t + 1, dtype=torch.float64)
        # The first s steps weigh (s/t)^(1/fraction).
        weights = (s / t) ** (1 / fraction) - ((s - 1) / t) ** (1 / fraction)
        torch.testing.assert_close(averages[t - 1], weights @ values[:t], rtol=1e-5, atol=1e-6)
    stated = s ** (1 / fraction - 1)
    assert (weights - stated / stated.sum()).abs().sum() / 2 < tolerance


@pytest.mark.parametrize("fraction", [0.1, 0.3, 1.0])
def test_with_snapshots_each_stands_for_the_steps_since_the_one_before(fraction):
    # The next snapshot lies fraction/16 of the last one's step further, and at least one step.
    steps = 700
    taken = [1]
    while (due := max(taken[-1] + 1, math.ceil(taken[-1] * (1 + fraction / 16)))) <= steps:
        taken.append(due)
    values, averages, updates = follow(RunningWeightAverage(fraction), steps)
    assert updates == np.searchsorted(taken, range(1, steps + 1), side="right").tolist()
    # While the window is short, every step is taken.
    short = math.floor(SNAPSHOTS / fraction)
    assert updates[:short] == list(range(1, short + 1))
    for t in (10, 163, 400, steps):
        so_far = [s for s in taken if s <= t]
        edges = torch.tensor([0, *so_far], dtype=torch.float64) / so_far[-1]
        weights = (edges ** (1 / fraction)).diff()
        torch.testing.assert_close(
            averages[t - 1], weights @ values[torch.tensor(so_far) - 1], rtol=1e-5, atol=1e-6
        )
    # The mean age.
    assert float(weights @ (1 - edges[1:])) == pytest.approx(fraction / (1 + fraction), rel=0.1)


@pytest.mark.parametrize(("decay", "every"), [(0.99, 5), (0.9, 1), (0.5, 3), (0.0, 4)])
def test_a_moving_average_weighs_its_updates_by_powers_of_the_decay(decay, every):
    values, averages, updates = follow(ExponentialMovingAverage(decay, every), 23)
    for t in range(1, 24):
        taken = list(range(1, t + 1, every))
        assert updates[t - 1] == len(taken)
        rho = decay**every
        weights = []
        for number in range(len(taken)):
            share = 1 - rho if number else 1.0
            weights.append(share * rho ** (len(taken) - 1 - number))
        expected = torch.tensor(weights, dtype=torch.float64) @ values[torch.tensor(taken) - 1]
        torch.testing.assert_close(averages[t - 1], expected, rtol=1e-5, atol=1e-6)


BOTH = [lambda: RunningWeightAverage(0.5), lambda: ExponentialMovingAverage(0.9, 1)]


@pytest.mark.parametrize("make", BOTH)
def test_an_update_takes_an_operator_for_all_that_is_averaged_and_one_for_all_that_is_copied(make):
    own = make()
    module = started(own)
    for step in (1, 2, 3):
        with Operators() as operators:
            end_step(own, module, step)
        changing = [name for name in operators.names if "copy" in name or "lerp" in name]
        # The first update is a copy.
        assert changing == ["_foreach_copy_", "_foreach_lerp_"][:step]


def on_meta(callback, steps):
    """Take steps with a module on the device meta, where to read a value on the host is an error; return the module."""
    # Lightning moves a module only after the call-backs' set-up.
    module = started(callback).to("meta")
    callback.on_fit_start(None, module)
    for step in range(1, steps + 1):
        end_step(callback, module, step)
    return module


@pytest.mark.parametrize("make", BOTH)
def test_an_average_never_waits_for_the_device(make):
    callback = make()
    module = on_meta(callback, 3)
    for tensor in callback._average_model.module.state_dict().values():
        assert tensor.device.type == "meta"
    callback.on_validation_epoch_start(None, module)
    callback.on_validation_epoch_end(None, module)
    counter = callback._average_model.n_averaged
    assert (counter.device.type, int(counter)) == ("cpu", 3)
    # The update of torch's own average waits for the device, and so fails here.
    with pytest.raises((RuntimeError, NotImplementedError)):
        torch.optim.swa_utils.AveragedModel(Weights(), device="meta").update_parameters(module)
    lookahead = Lookahead(10, 2, 0.5, 1.0)
    on_meta(lookahead, 10)
    for slow in lookahead._slow:
        assert slow.device.type == "meta"


@pytest.mark.parametrize("make", BOTH)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_an_average_of_half_precision_weights_is_kept_in_float32(make, dtype):
    """Steps of 2^-12 are lost on a bfloat16 of 1."""
    callback = make()
    reference = make()
    module = started(callback).to(dtype)
    whole = started(reference)
    for step in range(1, 40):
        # 2^-7 is the last place of a bfloat16 at 1.
        value = torch.full((7,), 1.0 + 2.0**-7 * (step % 2)).to(dtype)
        for each, its_module in ((callback, module), (reference, whole)):
            its_module.set(value)
            end_step(each, its_module, step)
        # An evaluation rounds a copy of the average.
        if step % 7 == 0:
            callback.on_validation_epoch_start(None, module)
            assert module.narrow.dtype == dtype
            assert torch.equal(module.narrow, callback._average_model.module.narrow.to(dtype))
            callback.on_validation_epoch_end(None, module)
            assert torch.equal(module.narrow, value[:3])
    average = callback._average_model.module.narrow
    expected = reference._average_model.module.narrow
    assert average.dtype == torch.float32
    assert torch.equal(average, expected)
    assert 1.0 < average[0] < 1.0 + 2.0**-7
    assert not torch.equal(average, average.to(dtype).float())


# Lookahead

STEPS = 23
SPEC = make_spec(batch_size=8, seed=4)


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 2), nn.BatchNorm2d(4), nn.Flatten(), nn.ReLU(), nn.Linear(16, 3)
    )


def by_hand(model, every, decay, power):
    """Train a copy in a plain loop with cifar10-airbench's rule, on dictionaries of weights."""
    model = copy.deepcopy(model)
    optimizer = momentum(model.parameters(), lr=SPEC.lr)
    slow = {name: value.clone() for name, value in model.state_dict().items()}
    for step, (x, y) in zip(range(1, STEPS + 1), stream(SPEC), strict=False):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        decays = []
        if step % every == 0:
            decays.append(decay * (step / STEPS) ** power)
        # At the end a decay of 1 puts the slow weights in place.
        if step == STEPS:
            decays.append(1.0)
        for own_decay in decays:
            for name, fast in model.state_dict().items():
                if fast.is_floating_point():
                    slow[name] = slow[name] + (1 - own_decay) * (fast - slow[name])
                    fast.copy_(slow[name])
    return model


def trial(callbacks, model, micro_batch_size=None, average=None):
    options = {"average": average, "callbacks": callbacks}
    module = Classifier(copy.deepcopy(model), nn.CrossEntropyLoss(), momentum, SPEC.lr, **options)
    protocol = learning_protocol(STEPS, micro_batch_size=micro_batch_size)
    record, _ = train(SPEC, protocol, lambda spec: module)
    assert (record.status, record.steps) == ("stopped", STEPS)
    return module.model


@pytest.mark.parametrize(
    ("every", "decay", "power"),
    # The source's own rule is the first.
    [(5, 0.95**5, 3), (1, 0.5, 1), (4, 0.9, 0), (STEPS, 0.3, 2), (100, 0.5, 1)],
)
def test_a_trial_with_lookahead_is_the_plain_loop_of_the_source(every, decay, power):
    model = network()
    trained = trial([Lookahead(STEPS, every, decay, power)], model)
    expected = by_hand(model, every, decay, power).state_dict()
    torch.testing.assert_close(trained.state_dict(), expected, rtol=1e-4, atol=1e-5)
    plain = trial([], model)
    assert not torch.allclose(plain[0].weight, trained[0].weight, rtol=1e-3)
    assert not torch.allclose(plain[1].running_mean, trained[1].running_mean, rtol=1e-3)
    assert trained[1].num_batches_tracked == STEPS
    # The last step alone would take all others out again.
    if every > STEPS:
        assert torch.equal(trained[0].weight, model[0].weight)


@pytest.mark.parametrize(("decay", "step", "expected"), [(0.5, 1, 0.5), (1.0, 40, 0.0)])
def test_lookahead_keeps_type_and_place_and_does_not_extrapolate(decay, step, expected):
    callback = Lookahead(10, 1, decay, 0.0)
    module = started(callback).half()
    callback.on_fit_start(None, module)
    place = module.narrow.data_ptr()
    module.narrow.data.fill_(1.0)
    # Step 40 is past the ten steps.
    end_step(callback, module, step)
    assert module.narrow.data_ptr() == place
    assert callback._slow[0].dtype == module.narrow.dtype == torch.float16
    assert module.narrow.tolist() == [expected] * 3


def test_lookahead_counts_steps_and_an_average_is_taken_of_the_weights_that_it_leaves():
    """Without batch normalisation, whose statistics are those of micro-batches, these change nothing."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(9, 16), nn.Tanh(), nn.Linear(16, 3))
    whole = trial([Lookahead(STEPS, 5, 0.9, 1)], model, None)
    parts = trial([Lookahead(STEPS, 5, 0.9, 1)], model, 3)
    torch.testing.assert_close(whole[1].weight, parts[1].weight)
    averaged = trial([Lookahead(STEPS, 5, 0.9, 1)], model, average=ExponentialMovingAverage(0.0, 1))
    assert torch.equal(whole[1].weight, averaged[1].weight)


FRACTION = "the fraction of steps that is averaged must lie in (0, 1], but got"


@pytest.mark.parametrize(
    ("make", "arguments", "text"),
    [
        (RunningWeightAverage, (0.0,), f"{FRACTION} 0.0"),
        (RunningWeightAverage, (1.01,), f"{FRACTION} 1.01"),
        (RunningWeightAverage, (math.nan,), f"{FRACTION} nan"),
        (
            ExponentialMovingAverage,
            (1.0, 5),
            "the decay of a moving average must lie in [0, 1), but got 1.0",
        ),
        (
            ExponentialMovingAverage,
            (0.9, 2.0),
            "between updates of an average must be a positive integer, but got 2.0",
        ),
        (Lookahead, (0, 5, 0.5, 3), "lookahead needs at least one step, but got 0"),
        (
            Lookahead,
            (9, 0, 0.5, 3),
            "the steps between updates of lookahead must be a positive integer, but got 0",
        ),
        (Lookahead, (9, 5, 1.1, 3), "the decay of lookahead must lie in [0, 1], but got 1.1"),
        (Lookahead, (9, 5, 0.5, -1), "the power of lookahead must be at least 0, but got -1"),
    ],
)
def test_refuses(make, arguments, text):
    with pytest.raises(ConfigError, match=re.escape(text)):
        make(*arguments)
