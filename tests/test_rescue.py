"""When a search that reached no target lets its most promising trial go on."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from toolbox import make_result

from bstune.study.planning.plan import SearchBudget
from bstune.study.searching.rescue import MAX_RESCUED, needs_rescue

LAST_STEP = 100
BUDGET = SearchBudget("time", 20, None, None, 0.5, 0)


def stopped(number, steps, **changes):
    return make_result(number=number, status="stopped", steps=steps, **changes)


TO_THE_END = [stopped(number, LAST_STEP) for number in range(MAX_RESCUED)]
ON_THE_WAY = stopped(MAX_RESCUED, LAST_STEP - 1)


@pytest.mark.parametrize(
    ("trials", "changes", "is_needed"),
    [
        ([ON_THE_WAY], {}, True),
        ([ON_THE_WAY], {"objective": "loss"}, False),
        ([ON_THE_WAY, make_result(number=9)], {}, False),
        # Where points alone are counted, so many to the end are enough.
        ([*TO_THE_END[1:], ON_THE_WAY], {}, True),
        ([*TO_THE_END, ON_THE_WAY], {}, False),
        # Seconds end it by themselves.
        ([*TO_THE_END, ON_THE_WAY], {"seconds": 60.0}, True),
        ([*TO_THE_END, ON_THE_WAY], {"wall_seconds": 60.0}, True),
        # What diverged at the end of its budget was no try, and a replicate is of a winner.
        ([*TO_THE_END[1:], make_result(number=9, status="diverged", steps=LAST_STEP)], {}, True),
        ([*TO_THE_END[1:], stopped(9, LAST_STEP, replicate_of=0)], {}, True),
    ],
)
def test_one_more_try_is_made_while_the_means_allow_it(trials, changes, is_needed):
    protocol = SimpleNamespace(last_step=lambda batch_size: LAST_STEP)
    prepared = SimpleNamespace(budget=replace(BUDGET, **changes), protocol=protocol)
    assert needs_rescue(prepared, trials) == is_needed
