"""The grid: its batch sizes, its rates, where it is extended, and when it is complete."""

import math
from dataclasses import replace

import pytest
from search_records import BUDGET, QUESTION, SPACE, Workload, record, spec, step_time

from bstune.core.space import Space
from bstune.search.grid import grid_sizes, measured, propose_of_grid, usual_trials


@pytest.mark.parametrize(
    ("low", "high", "multiple", "records", "sizes"),
    [
        (8, 128, 1, [], [8, 16, 32, 64, 128]),
        # Ends between two powers.
        (5, 90, 1, [], [5, 8, 16, 32, 64]),
        (48, 48, 1, [], [48]),
        (24, 96, 24, [], [24, 48, 96]),
        (8, 128, 1, [record(0), record(1, "out of memory", batch_size=128)], [8, 16, 32, 64]),
        (8, 128, 1, [record(0), record(1, "refused", batch_size=16)], [32, 64, 128]),
    ],
)
def test_batch_sizes_are_powers_of_two(low, high, multiple, records, sizes):
    space = replace(SPACE, low=low, high=high, multiple=multiple)
    assert grid_sizes(space, records) == sizes


def grid(workload, space, count):
    """The first records of a grid."""
    records = []
    for number in range(count):
        proposal = propose_of_grid(QUESTION, space, step_time, records)
        records.append(workload.train(number, proposal, records))
    return records


def octaves(records, space, batch_size):
    """The octaves from the rule that a batch size was tried at, in their order."""
    rule = space.rule_lr(batch_size)
    of_size = [one for one in records if one.batch_size == batch_size]
    return [round(math.log2(one.lr / rule), 1) for one in of_size]


@pytest.mark.parametrize(
    ("best", "tried"),
    [
        (0, [0, 1, -1, 2, -2]),
        (2, [0, 1, -1, 2, -2, 3]),
        (4, [0, 1, -1, 2, -2, 3, 4, 5]),
        (-3, [0, 1, -1, 2, -2, -3, -4]),
    ],
)
def test_a_grid_is_extended_until_its_best_rate_lies_inside(best, tried):
    space = Space(16, 64, 0.0001, 10.0, "sqrt", (64, 0.1))
    workload = Workload(lr=0.1 * 2.0**best)
    records = grid(workload, space, 3 * len(tried) + 6)
    for size, one in zip((16, 32, 64), measured(records), strict=True):
        # Then it is refined there, each batch size as often.
        assert octaves(records, space, size) == [*tried, best + 0.5, best - 0.5]
        assert one.batch_size == size
        assert one.lr == pytest.approx(space.rule_lr(size) * 2.0**best, rel=0.01)
        assert one.steps == pytest.approx(workload.steps(size, one.lr), rel=0.05)
    # All batch sizes in turns.
    assert [one.batch_size for one in records[:6]] == [16, 32, 64] * 2


def test_a_grid_ends_where_the_range_does():
    space = Space(64, 64, 0.05, 0.3, "sqrt", (64, 0.1))
    rates = [one.lr for one in grid(Workload(lr=9.0), space, 8)]
    assert rates[:4] == [0.1, 0.2, 0.05, 0.3]
    assert max(rates) == 0.3
    assert len(set(rates)) == 8


def test_a_rate_that_diverges_is_left_for_a_lower_one():
    space = Space(64, 64, 0.0001, 10.0, "sqrt", (64, 0.1))
    rates = (0.1, 0.2, 0.05, 0.4, 0.025)
    diverged = [record(place, "diverged", lr=lr) for place, lr in enumerate(rates)]
    assert propose_of_grid(QUESTION, space, step_time, diverged).lr == pytest.approx(0.0125)


def test_a_trial_ends_at_little_more_than_the_fewest_steps_of_its_batch_size():
    space = replace(SPACE, low=64, high=128)
    records = [record(0, steps=305, steps_low=304), record(1, batch_size=128, status="missed")]
    first = propose_of_grid(QUESTION, space, step_time, records)
    assert (first.batch_size, first.max_steps) == (64, 366)
    second = propose_of_grid(QUESTION, space, step_time, records, [spec(2, batch_size=64)])
    assert (second.batch_size, second.max_steps) == (128, BUDGET)


def test_what_runs_elsewhere_is_not_proposed_as_well():
    space = Space(64, 64, 0.0001, 10.0, "sqrt", (64, 0.1))
    running = []
    for number in range(7):
        proposal = propose_of_grid(QUESTION, space, step_time, [], running)
        running.append(spec(number, batch_size=64, lr=proposal.lr))
    assert len({one.lr for one in running}) == 7 == usual_trials(space)
