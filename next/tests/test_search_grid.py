"""The grid: its batch sizes, its rates, where it is extended, and where its trials end."""

import math
from dataclasses import replace

import pytest
from search_records import QUESTION, SPACE, Workload, record, step_time

from bstune.core.space import Space
from bstune.search.grid import best_of_grid, grid_sizes, propose_of_grid

SMALL = Space(16, 64, 0.0001, 10.0, "sqrt", (64, 0.1))


@pytest.mark.parametrize(
    ("low", "high", "multiple", "records", "sizes"),
    [
        # Ends between two powers.
        (5, 128, 1, [], [5, 8, 16, 32, 64, 128]),
        (48, 48, 1, [], [48]),
        (32, 128, 1, [record(0), record(1, "out of memory", batch_size=128)], [32, 64]),
        (8, 128, 1, [record(0), record(1, "refused", batch_size=16)], [32, 64, 128]),
    ],
)
def test_batch_sizes_are_powers_of_two(low, high, multiple, records, sizes):
    space = replace(SPACE, low=low, high=high, multiple=multiple)
    assert grid_sizes(space, records) == sizes


def grid(workload, space, count):
    """The first records of a grid, and the octaves from the rule, of each batch size."""
    records, octaves = [], {}
    for number in range(count):
        proposal = propose_of_grid(QUESTION, space, step_time, records)
        size, lr = proposal.batch_size, proposal.lr
        octaves.setdefault(size, []).append(round(math.log2(lr / space.rule_lr(size)), 1))
        records.append(workload.train(number, proposal, records))
    return records, octaves


@pytest.mark.parametrize(
    ("best", "tried"),
    [
        (4, [0, 1, -1, 2, -2, 3, 4, 5]),
        (-3, [0, 1, -1, 2, -2, -3, -4]),
    ],
)
def test_a_grid_is_extended_until_its_best_rate_lies_inside(best, tried):
    workload = Workload(lr=0.1 * 2.0**best)
    records, octaves = grid(workload, SMALL, 3 * len(tried) + 6)
    # Then it is refined, each batch size as often.
    expected = [*tried, best + 0.5, best - 0.5]
    assert octaves == {16: expected, 32: expected, 64: expected}
    for size, one in zip((16, 32, 64), best_of_grid(SMALL, records), strict=True):
        assert one.batch_size == size
        assert one.lr == pytest.approx(SMALL.rule_lr(size) * 2.0**best, rel=0.01)
        assert one.steps_to_target == pytest.approx(workload.steps(size, one.lr), rel=0.05)
