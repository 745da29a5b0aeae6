"""What a step changes on the device is put back to the bit, and a replay that changed it otherwise is named."""

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn

from bstune.trial.fast.device_state import DeviceState, first_difference


class Network(LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
        self.generator = torch.Generator().manual_seed(1)

    def step(self, optimizer):
        optimizer.zero_grad()
        noise = torch.rand(8, 3, generator=self.generator)
        self.layers(noise).square().sum().backward()
        optimizer.step()


def test_a_step_is_taken_back_with_its_random_numbers():
    torch.manual_seed(0)
    module = Network()
    optimizer = torch.optim.Adam(module.parameters(), lr=0.1)
    module.step(optimizer)
    state = DeviceState(module, optimizer)
    # The device's own, which Dropout draws from, and the module's.
    assert len(state.generators) == 2
    assert "exp_avg of the optimizer's parameter 0" in state.names
    before = state.copy()
    module.step(optimizer)
    after = state.copy()
    state.restore(before)
    module.step(optimizer)
    assert all(map(torch.equal, state.copy().tensors, after.tensors))
    assert not all(map(torch.equal, before.tensors, after.tensors))


@pytest.mark.parametrize(
    ("by_replay", "differs"),
    [
        (1.0, False),
        # 5% of the step's change, and then 1e-6 of the value itself.
        (1.0 + 0.049, False),
        (1.0 + 0.051, True),
        (float("nan"), True),
    ],
)
def test_a_replay_may_round_otherwise_and_no_more(by_replay, differs):
    arguments = ([torch.tensor(value)] for value in (by_replay, 1.0, 0.0))
    assert first_difference(["weight"], *arguments) == ("weight" if differs else None)


def test_counts_are_equal_and_a_step_that_has_diverged_is_not_compared():
    count = [torch.tensor(2)], [torch.tensor(3)], [torch.tensor(2)]
    assert first_difference(["step"], *count) == "step"
    diverged = [torch.tensor(1.0)], [torch.tensor(float("inf"))], [torch.tensor(0.0)]
    assert first_difference(["weight"], *diverged) is None
