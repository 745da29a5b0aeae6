import math
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn

from bstune.core.errors import ConfigError
from bstune.workloads import averaging
from bstune.workloads.averaging import SNAPSHOTS, ExponentialMovingAverage, RunningWeightAverage


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
        return torch.cat([self.narrow.detach().double(), self.wide.detach(), self.statistic.double()])


def follow(callback, steps):
    """Set random weights at each step; return all of them, and the average and the updates so far after each."""
    module = Weights()
    callback.setup(None, module, "fit")
    values = torch.randn(steps, 7, generator=torch.Generator().manual_seed(0)).float().double()
    averages, updates = [], []
    for step in range(1, steps + 1):
        module.set(values[step - 1])
        callback.on_train_batch_end(SimpleNamespace(global_step=step), module, None, None, step - 1)
        averages.append(callback._average_model.module.get())
        updates.append(int(callback._average_model.n_averaged))
    return values, averages, updates


def snapshots(fraction, steps):
    """Return the stated steps: the next one lies fraction/16 of the last one further, and at least one step."""
    taken = [1]
    while True:
        due = max(taken[-1] + 1, math.ceil(taken[-1] * (1 + fraction / 16)))
        if due > steps:
            return taken
        taken.append(due)


@pytest.mark.parametrize("fraction", [0.05, 0.1, 0.5, 1.0])
def test_updated_every_step_it_weights_step_s_by_its_share_of_a_power_law(fraction, monkeypatch):
    monkeypatch.setattr(averaging, "SNAPSHOTS", 10**9)
    values, averages, updates = follow(RunningWeightAverage(fraction), 60)
    assert updates == list(range(1, 61))
    power = 1 / fraction
    for t in (1, 2, 7, 60):
        s = torch.arange(1, t + 1, dtype=torch.float64)
        weights = (s / t) ** power - ((s - 1) / t) ** power  # so that the first s steps weigh (s/t)^(1/fraction)
        torch.testing.assert_close(averages[t - 1], weights @ values[:t], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("fraction", [0.1, 0.5, 1.0])
def test_while_a_window_is_short_every_step_is_taken_without_a_patch(fraction):
    steps = math.floor(SNAPSHOTS / fraction)
    _, _, updates = follow(RunningWeightAverage(fraction), steps)
    assert updates == list(range(1, steps + 1))


@pytest.mark.parametrize(("fraction", "tolerance"), [(1.0, 1e-12), (0.5, 0.003), (0.1, 0.03)])
def test_the_weights_are_in_proportion_to_the_stated_power_of_s(fraction, tolerance, monkeypatch):
    """The weights that the callback gives, read off from unit impulses, against s^(1/fraction - 1)."""
    monkeypatch.setattr(averaging, "SNAPSHOTS", 10**9)
    steps = 200
    decays = [0.0] + [(t / (t + 1)) ** (1 / fraction) for t in range(1, steps)]
    given = torch.tensor(
        [(1 - decays[s]) * math.prod(decays[s + 1 :]) for s in range(steps)],
        dtype=torch.float64,
    )
    stated = torch.arange(1, steps + 1, dtype=torch.float64) ** (1 / fraction - 1)
    stated /= stated.sum()
    assert given.sum() == pytest.approx(1.0)
    assert (given - stated).abs().sum() / 2 < tolerance
    values, averages, _ = follow(RunningWeightAverage(fraction), steps)
    torch.testing.assert_close(averages[-1], given @ values, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("fraction", [0.1, 0.3, 1.0])
def test_with_snapshots_each_stands_for_the_steps_since_the_one_before(fraction):
    steps = 700
    values, averages, updates = follow(RunningWeightAverage(fraction), steps)
    taken = snapshots(fraction, steps)
    assert len(taken) < steps
    for t in (10, 163, 400, steps):
        known = [s for s in taken if s <= t]
        assert updates[t - 1] == len(known)
        edges = torch.tensor([0, *known], dtype=torch.float64) / known[-1]
        weights = (edges ** (1 / fraction)).diff()
        expected = weights @ values[torch.tensor(known) - 1]
        torch.testing.assert_close(averages[t - 1], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("fraction", [0.1, 0.5])
def test_the_number_of_updates_grows_like_the_logarithm_of_the_steps(fraction):
    callback = RunningWeightAverage(fraction)
    counts, updates = {}, 0
    for step in range(1, 32_001):
        if callback.should_update(step_idx=step - 1):
            updates += 1
            callback._latest_update_step = step
        counts[step] = updates
    per_doubling = math.log(2) / math.log(1 + fraction / SNAPSHOTS)
    for step in (4000, 8000, 16_000):
        assert counts[2 * step] - counts[step] == pytest.approx(per_doubling, rel=0.1)


@pytest.mark.parametrize("fraction", [0.1, 0.5])
def test_the_mean_age_is_the_stated_share_of_the_steps(fraction):
    taken = snapshots(fraction, 5000)
    edges = torch.tensor([0, *taken], dtype=torch.float64) / taken[-1]
    mean_age = float((edges ** (1 / fraction)).diff() @ (1 - edges[1:]))
    assert mean_age == pytest.approx(fraction / (1 + fraction), rel=0.1)


def test_the_end_of_an_epoch_is_no_update():
    assert not RunningWeightAverage(0.1).should_update(epoch_idx=0)


def test_it_goes_on_with_its_next_update():
    """Lightning saves the average itself; the steps of the updates are the call-back's own."""

    def updates(callback, steps):
        callback.setup(None, module, "fit")
        found = []
        for step in steps:
            before = callback._latest_update_step
            callback.on_train_batch_end(SimpleNamespace(global_step=step), module, None, None, step - 1)
            found += [step] * (callback._latest_update_step != before)
        return found

    module = Weights()
    whole, first, second = (RunningWeightAverage(1.0) for _ in range(3))
    expected = updates(whole, range(1, 201))
    assert 150 not in expected  # the next one depends on the last
    taken = updates(first, range(1, 151))
    second.load_state_dict(first.state_dict())
    assert taken + updates(second, range(151, 201)) == expected


def test_whole_numbers_keep_their_type():
    callback, module = RunningWeightAverage(1.0), Weights()
    callback.setup(None, module, "fit")
    for step in (1, 2, 3):
        module.set(torch.zeros(7))
        callback.on_train_batch_end(SimpleNamespace(global_step=step), module, None, None, step - 1)
    average = callback._average_model.module
    assert average.count.dtype == torch.int64
    assert 1 <= average.count <= 3


@pytest.mark.parametrize("fraction", [0.0, -0.1, 1.01, math.nan])
def test_refuses_a_fraction_out_of_range(fraction):
    with pytest.raises(ConfigError) as error:
        RunningWeightAverage(fraction)
    assert str(error.value) == f"the fraction of steps that is averaged must lie in (0, 1], but got {fraction}"


# Exponential moving averages


@pytest.mark.parametrize(("decay", "every"), [(0.99, 5), (0.9, 1), (0.5, 3), (0.0, 4)])
def test_a_moving_average_weighs_its_updates_by_powers_of_the_decay(decay, every):
    values, averages, updates = follow(ExponentialMovingAverage(decay, every), 23)
    for t in range(1, 24):
        taken = list(range(1, t + 1, every))
        assert updates[t - 1] == len(taken)
        rho = decay**every
        weights = [(1 - rho if number else 1.0) * rho ** (len(taken) - 1 - number) for number in range(len(taken))]
        expected = torch.tensor(weights, dtype=torch.float64) @ values[torch.tensor(taken) - 1]
        torch.testing.assert_close(averages[t - 1], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("decay", "every", "text"),
    [
        (1.0, 5, "the decay of a moving average must lie in [0, 1), but got 1.0"),
        (-0.1, 5, "the decay of a moving average must lie in [0, 1), but got -0.1"),
        (math.nan, 5, "the decay of a moving average must lie in [0, 1), but got nan"),
        (0.9, 0, "the steps between updates of an average must be a positive integer, but got 0"),
        (0.9, 2.0, "the steps between updates of an average must be a positive integer, but got 2.0"),
        (0.9, True, "the steps between updates of an average must be a positive integer, but got True"),
    ],
)
def test_refuses_a_moving_average(decay, every, text):
    with pytest.raises(ConfigError) as error:
        ExponentialMovingAverage(decay, every)
    assert str(error.value) == text


# Both


BOTH = [lambda: RunningWeightAverage(0.5), lambda: ExponentialMovingAverage(0.9, 1)]


@pytest.mark.parametrize("make", BOTH)
def test_nothing_waits_for_the_device(make):
    """Tensors of the device meta have no values: whatever would read one on the host is an error there."""
    callback, module = make(), Weights()
    callback.setup(None, module, "fit")
    module.to("meta")  # Lightning moves a module only after the call-backs' set-up
    callback.on_fit_start(None, module)
    assert {tensor.device.type for tensor in callback._average_model.module.state_dict().values()} == {"meta"}
    for step in (1, 2, 3):
        callback.on_train_batch_end(SimpleNamespace(global_step=step), module, None, None, step - 1)
    callback.on_validation_epoch_start(None, module)
    callback.on_validation_epoch_end(None, module)
    counter = callback._average_model.n_averaged
    assert (counter.device.type, int(counter)) == ("cpu", 3)


def test_torchs_own_update_would_wait():
    average = torch.optim.swa_utils.AveragedModel(Weights(), device="meta")
    with pytest.raises((RuntimeError, NotImplementedError)):
        average.update_parameters(Weights().to("meta"))


@pytest.mark.parametrize("make", BOTH)
def test_a_module_that_is_on_its_device_already_has_its_count_on_the_host(make):
    callback = make()
    callback.setup(None, Weights().to("meta"), "fit")
    assert callback._average_model.n_averaged.device.type == "cpu"


@pytest.mark.parametrize("make", BOTH)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_an_average_of_half_precision_weights_is_kept_in_float32(make, dtype):
    """Steps of 2^-12 are lost on a bfloat16 of 1."""
    callback, module = make(), Weights()
    callback.setup(None, module, "fit")
    reference, whole = make(), Weights()
    reference.setup(None, whole, "fit")
    module.to(dtype)
    for step in range(1, 40):
        value = torch.full((7,), 1.0 + 2.0**-7 * (step % 2)).to(dtype)
        module.set(value)
        whole.set(value)
        for callback_, module_ in ((callback, module), (reference, whole)):
            callback_.on_train_batch_end(SimpleNamespace(global_step=step), module_, None, None, step - 1)
        if step % 7 == 0:  # evaluating it rounds a copy
            callback.on_validation_epoch_start(None, module)
            assert module.narrow.dtype == dtype
            assert torch.equal(module.narrow, callback._average_model.module.narrow.to(dtype))
            callback.on_validation_epoch_end(None, module)
            assert torch.equal(module.narrow, value[:3])
    averages = [made._average_model.module.narrow for made in (callback, reference)]
    assert averages[0].dtype == torch.float32
    assert torch.equal(*averages)
    assert 1.0 < averages[0][0] < 1.0 + 2.0**-7
    assert not torch.equal(averages[0], averages[0].to(dtype).float())
