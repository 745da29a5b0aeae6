"""What a step asks of its surroundings: each way to use a batch's number is noted, and handing it on is none."""

import math
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import LightningModule

from bstune.trial.fast.watch import WatchedNumber, watching_uses

USES = {
    "compared": lambda n: n == 3,
    "ordered": lambda n: n < 3,
    "asked whether it is 0": lambda n: not n,
    "added": lambda n: 1 + n,
    "taken from": lambda n: 1 - n,
    "multiplied": lambda n: 2 * n,
    "divided": lambda n: 1.0 / (n + 1),
    "now and then": lambda n: n % 50 == 0,
    "raised": lambda n: 2**n,
    "its lowest bit": lambda n: n & 1,
    "shifted": lambda n: 1 << n,
    "negative": lambda n: -n,
    "rounded": lambda n: round(n, -1),
    "floor": math.floor,
    "a key": lambda n: {0: 1.0}.get(n),
    "printed": lambda n: f"{n}",
    "as a float": float,
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_a_use_of_the_number_is_noted_and_gives_what_it_gives_with_any(use):
    asked = []
    # A plain 7 is what all gives the same with.
    assert use(WatchedNumber(7, asked)) == use(7)
    assert set(asked) == {"batch_idx"}


@pytest.mark.parametrize(
    "use", [lambda n: 0.5 * n, lambda n: range(9)[n], lambda n: torch.ones(2) * n]
)
def test_what_is_read_past_the_operators_is_left_to_the_comparison_of_a_replay(use):
    """C code takes the value of any int: that a captured step is another at the next number shows in its result."""
    asked = []
    use(WatchedNumber(7, asked))
    assert asked == []


def test_a_number_that_is_handed_on_is_not_used():
    asked = []
    number = WatchedNumber(7, asked)

    def shared_step(batch, batch_idx, stage="train"):
        # Handing it on may ask what it is.
        assert isinstance(batch_idx, int)
        return batch.mean()

    assert shared_step(torch.ones(2), batch_idx=number) == 1.0
    assert asked == []


class Part(LightningModule):
    def __init__(self):
        super().__init__()
        self.logged = []

    def log(self, *arguments, **options):
        self.logged.append(arguments)


@pytest.fixture
def module():
    whole = Part()
    whole.inner = Part()
    for part in (whole, whole.inner):
        part._trainer = SimpleNamespace(global_step=5)
    return whole


@pytest.mark.parametrize("place", ["itself", "inside"])
def test_what_is_asked_of_the_trainer_is_noted_and_what_is_logged(module, place):
    part = module if place == "itself" else module.inner
    asked = []
    with watching_uses(module, asked):
        assert part.trainer.global_step == 5
        part.log("loss", 1.0)
    assert asked == ["trainer.global_step", "self.log"]
    assert part.logged == [("loss", 1.0)]


def test_afterwards_all_is_as_it_was_even_where_one_watches_within_another(module):
    # One that hides the class's own is put back too.
    module.log = own_log = lambda *arguments: None
    before = [dict(vars(part)) for part in (module, module.inner)]
    outer = []
    inner = []
    with watching_uses(module, outer), watching_uses(module, inner):
        assert module.trainer.global_step == 5
    assert outer == inner == ["trainer.global_step"]
    assert module.log is own_log
    assert [dict(vars(part)) for part in (module, module.inner)] == before
