"""The choice of torch's number of threads."""

import pytest
import torch
from builders import options_of

from bstune.hardware import threads
from bstune.hardware.threads import ThreadChoice, choose_threads, counts_to_try, threads_text


def timed(seconds):
    """Choose by seconds of a step for each number of threads, whatever the batch size."""
    calls = []

    def time_step(batch_size):
        calls.append((torch.get_num_threads(), batch_size))
        return seconds[torch.get_num_threads()] * batch_size

    return choose_threads(time_step, sorted(seconds), (8, 64)), calls


@pytest.mark.parametrize(
    ("seconds", "best"),
    [
        ({1: 1.0, 2: 4.5}, 1),
        ({1: 2.0, 2: 1.1}, 2),
        # Of equals it is the fewest, and of nearly equals.
        ({1: 1.0, 2: 1.0}, 1),
        ({1: 1.1, 2: 1.0}, 1),
        ({1: 1.2, 2: 1.0}, 2),
    ],
)
def test_the_fastest_number_is_chosen_and_torch_has_its_own_again(seconds, best):
    before = torch.get_num_threads()
    choice, calls = timed(seconds)
    assert choice.threads == best
    assert torch.get_num_threads() == before
    # In turns: a machine that is busy for a while slows all of them.
    assert [count for count, _ in calls[:4]] == [1, 2, 1, 2]
    # Two numbers of threads at two batch sizes.
    assert len(choice.timings) == 4


@pytest.mark.parametrize(
    ("turns", "best", "visits"),
    [
        # Each further number must be worth its threads.
        ([{1: 1.0, 2: 0.8, 4: 0.75}] * 3, 2, 9),
        ([{1: 1.0, 2: 0.95, 4: 0.5}] * 3, 4, 7),
        ([{1: 8.0, 2: 4.1, 4: 2.2}] * 3, 4, 9),
        # Not in the first turn: there is no second one.
        ([{1: 1.0, 2: 1.1}], 1, 2),
        # On a busy machine two threads had luck twice.
        ([{1: 2.0, 2: 1.0}, {1: 2.0, 2: 1.0}, {1: 2.0, 2: 9.0}], 1, 6),
    ],
)
def test_more_threads_are_faster_in_every_turn(turns, best, visits):
    counts = sorted(turns[0])
    left = {count: [turn[count] for turn in turns] for count in counts}
    called = []

    def time_step(batch_size):
        called.append(torch.get_num_threads())
        return left[torch.get_num_threads()].pop(0)

    assert choose_threads(time_step, counts, (8,)).threads == best
    assert len(called) == visits


def test_the_seconds_that_are_kept_are_the_medians():
    left = {1: [2.0, 5.0, 3.0], 2: [1.0, 1.5, 1.2]}
    choice = choose_threads(lambda batch_size: left[torch.get_num_threads()].pop(0), (1, 2), (8,))
    assert [timing.seconds for timing in choice.timings] == [3.0, 1.2]


def test_one_number_is_not_timed():
    # There is nothing to choose.
    choice = choose_threads(lambda batch_size: pytest.fail("timed"), (3,), (8,))
    assert choice == ThreadChoice(3)
    assert threads_text(choice) is None


def test_what_others_take_is_said():
    choice, _ = timed({1: 1.0, 2: 4.5})
    assert "4.5" in threads_text(choice)
    # More threads are faster, and not by enough.
    choice, _ = timed({1: 1.1, 2: 1.0})
    assert "0.91" in threads_text(choice)
    assert "not 15% faster" in threads_text(choice)


@pytest.mark.parametrize(
    ("option", "environment", "counts"),
    [
        ("auto", {}, (1, 2, 4)),
        ("1", {}, (1,)),
        # Who sets the variable has chosen, but for a number that is given as an option.
        ("auto", {"OMP_NUM_THREADS": "4"}, (4,)),
        ("1", {"OMP_NUM_THREADS": "4"}, (1,)),
    ],
)
def test_the_numbers_to_choose_from(option, environment, counts, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(threads.torch, "get_num_threads", lambda: 4)
    options = options_of("+workload=digits", f"threads={option}", "device=cpu")
    assert counts_to_try(options) == counts


def test_threads_of_a_gpu_are_left_alone():
    assert counts_to_try(options_of("+workload=digits", "device=cuda")) == ()
