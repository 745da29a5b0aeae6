"""Generators from a seed, and the state of those that everyone shares."""

import random

import numpy as np
import torch

from bstune.trial.devices.randomness import random_state, seeded_generators, set_random_state


def test_seeded_generators_differ_from_each_other_and_from_the_next_seed():
    numbers = [
        torch.rand(1, generator=generator).item()
        for seed in (0, 1)
        for generator in seeded_generators(seed, "cpu", 2)
    ]
    assert len(set(numbers)) == 4
    assert [
        torch.rand(1, generator=generator).item() for generator in seeded_generators(0, "cpu", 2)
    ] == numbers[:2]


def test_the_shared_generators_go_on_where_their_state_was_taken():
    def drawn():
        return random.random(), np.random.randn(), torch.rand(()).item()

    # The call leaves a second number for the next one.
    np.random.randn()
    state = random_state()
    expected = [drawn() for _ in range(3)]
    set_random_state(state)
    assert [drawn() for _ in range(3)] == expected
