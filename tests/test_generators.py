"""Random numbers that an evaluation draws are none of the training's."""

import random

import numpy as np
import pytest
import torch

from bstune.trial.devices.randomness import random_state
from bstune.trial.parts.generators import Generators


def draw():
    """Draw from each generator of the host."""
    return random.random(), float(np.random.rand()), torch.rand(()).item()


def test_what_is_drawn_in_between_changes_nothing():
    generators = Generators()
    generators.keep()
    first = draw()
    draw()
    generators.restore()
    assert draw() == first


def test_they_are_restored_once():
    generators = Generators()
    generators.keep()
    first = draw()
    generators.restore()
    draw()
    generators.restore()
    assert draw() != first


def test_without_any_they_are_left_alone():
    torch.manual_seed(1)
    expected = torch.rand(())
    torch.manual_seed(1)
    Generators().restore()
    assert torch.equal(torch.rand(()), expected)


@pytest.mark.parametrize("given", [True, False])
def test_a_stopped_trials_are_those_that_were_kept(given):
    state = random_state() if given else Generators().keep()
    first = draw()
    draw()
    Generators(state).restore()
    assert draw() == first
