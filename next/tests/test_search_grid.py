"""The grid: its batch sizes, its rates, where it is extended, and where its trials end."""

import math
from dataclasses import replace

import pytest
from refusals import cases
from search_records import QUESTION, SPACE, Workload, record, step_time

from bstune.core.space import Space
from bstune.search.grid import best_of_grid, grid_sizes, propose_of_grid

SMALL = Space(16, 64, 0.0001, 10.0, "sqrt", (64, 0.1))


@cases("""
low | high | status | size | sizes
# Ends between two powers.
5 | 128 | null | null | [5, 8, 16, 32, 64, 128]
48 | 48 | null | null | [48]
32 | 128 | out of memory | 128 | [32, 64]
8 | 128 | refused | 16 | [32, 64, 128]
""")
def test_batch_sizes_are_powers_of_two(low, high, status, size, sizes):
    records = [record(0), record(1, status, batch_size=size)] if status else []
    assert grid_sizes(replace(SPACE, low=low, high=high), records) == sizes


TRIED = [[4, [0, 1, -1, 2, -2, 3, 4, 5]], [-3, [0, 1, -1, 2, -2, -3, -4]]]


@pytest.mark.parametrize("best, tried", TRIED)
def test_a_grid_is_extended_until_its_best_rate_lies_inside(best, tried):
    workload, records = Workload(lr=0.1 * 2.0**best), []
    octaves = {16: [], 32: [], 64: []}
    for number in range(3 * len(tried) + 6):
        proposal = propose_of_grid(QUESTION, SMALL, step_time, records)
        size = proposal.batch_size
        octaves[size].append(round(math.log2(proposal.lr / SMALL.rule_lr(size)), 1))
        records.append(workload.train(number, proposal, records))
    # Then it is refined, each batch size as often.
    assert list(octaves.values()) == 3 * [[*tried, best + 0.5, best - 0.5]]
    for size, one in zip(octaves, best_of_grid(SMALL, records), strict=True):
        assert one.batch_size == size
        assert one.lr == pytest.approx(SMALL.rule_lr(size) * 2.0**best, rel=0.01)
        assert one.steps_to_target == pytest.approx(workload.steps(size, one.lr), rel=0.05)
