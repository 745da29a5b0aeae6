"""Warnings of the curve, the octaves of a range, and what narrows B_crit."""

from dataclasses import replace

import pytest
from results import confirmed, critical, curve
from search_records import QUESTION, SPACE, record

from bstune.core.question import Question
from bstune.core.space import Space
from bstune.study import advice
from bstune.study.advice import for_curve, off_law, searched_range, warnings_of
from bstune.study.plan import Plan
from bstune.study.result import Searched

# Batch sizes 8 to 512; S*(B) = 26 (1 + 130/B) and B_crit 130.
PLAN = Plan(QUESTION, SPACE, baseline=None, trials=32, seeds=3, seed=0)
CURVE_PLAN = replace(PLAN, question=Question(QUESTION.target, QUESTION.budget, "curve"))
LAW = critical(130.0, 85.0, 212.0)
ALL = Searched(low=8, high=512, octaves=6, reached=6, to_add=())


def missing(*sizes):
    return ALL.model_copy(update={"to_add": sizes, "reached": 6 - len(sizes)})


def kinds(plan=PLAN, best=None, found=LAW, points=None, searched=ALL, records=None):
    warnings = warnings_of(plan, best, found, points or curve(), searched, records or [record()])
    return [warning.kind for warning in warnings]


def bent(factor):
    """The curve, lower by a factor around B_crit."""
    return tuple(
        point.model_copy(update={"steps": point.steps / factor})
        if 100 < point.batch_size < 200
        else point
        for point in curve()
    )


@pytest.mark.parametrize(
    ("factor", "expected"),
    [(1.25, []), (1 / 1.35, ["far from the law"])],
)
def test_a_curve_far_from_its_law_at_b_crit_is_warned_of(factor, expected):
    assert off_law(LAW, bent(factor)) == pytest.approx(max(factor, 1 / factor))
    assert kinds(points=bent(factor)) == expected
    # An open end is warning enough.
    assert kinds(found=critical(None, 90.0, None), points=bent(factor)) == []


@pytest.mark.parametrize(
    ("to_add", "expected"),
    [
        ((11, 23), []),  # far from B_crit, where nobody asked
        ((91, 184), []),
        ((93,), ["octave without a trial"]),
        ((183,), ["octave without a trial"]),
    ],
)
def test_an_octave_without_a_trial_matters_where_b_crit_lies_in_it(to_add, expected):
    assert kinds(searched=missing(*to_add)) == expected


@pytest.mark.parametrize(("runs", "seeds"), [(1, 3), (3, 6)])
def test_new_seeds_that_were_not_run_are_asked_for(runs, seeds):
    other = confirmed(118, 1.18, (52, 55, 61), 0.0331)
    other = other.model_copy(update={"seeds": other.seeds[:runs]})
    assert advice.missing(PLAN, None, other, None, [record()])[1] == {"seeds": seeds}


def test_step_times_matter_for_time_alone():
    best = confirmed(118, 1.18, (52, 55, 61), 0.0331)
    best = best.model_copy(update={"step_seconds_error": 0.2})
    assert kinds(best=best) == ["step times"]
    of_steps = replace(PLAN, question=Question(QUESTION.target, QUESTION.budget, "steps"))
    assert kinds(of_steps, best=best) == []


@pytest.mark.parametrize(
    ("repeats", "expected"), [(11, ["evaluations"]), (0, ["evaluations"]), (2, [])]
)
def test_evaluations_of_the_new_seeds_that_decide_are_warned_of(repeats, expected):
    """Those of the best, trial 11, and of the baseline; not those of one that was given up."""
    records = [record(0, role="baseline"), *(record(number) for number in range(1, 12))]
    for number in range(12, 15):
        records.append(record(number, role="new seed", repeats=repeats, steps_low=0))
    best = confirmed(118, 1.18, (52, 55, 61), 0.0331, number=11)
    assert kinds(best=best, records=records) == expected


# Space, batch sizes of trials that reached -> octaves, how many have one, the middles to add.
RANGES = [
    (SPACE, (8, 16, 40, 64, 128, 512), (6, 6, ())),
    (replace(SPACE, low=8, high=512, multiple=8), (64,), (6, 1, (8, 24, 48, 184, 360))),
    (replace(SPACE, low=64, high=64), (64,), (1, 1, ())),
]


@pytest.mark.parametrize(("space", "sizes", "expected"), RANGES)
def test_octaves_of_a_range(space: Space, sizes, expected):
    records = [record(number, batch_size=size) for number, size in enumerate(sizes)]
    records.append(record(9, "pruned", batch_size=space.low))
    found = searched_range(space, records)
    assert (found.octaves, found.reached, found.to_add) == expected
    assert (found.low, found.high) == (space.low, space.high)


# B_crit's interval, the octaves to add -> the options that narrow it.
NARROWING = [
    ((130.0, 100.0, 201.0), (), {"trials": 64}),
    ((130.0, 100.0, 199.0), (23,), None),
    ((None, 300.0, None), (), {"batch_size.low": 8, "batch_size.high": 2048, "study": "s-2"}),
    ((None, None, None), (), {"batch_size.low": 2, "batch_size.high": 2048, "study": "s-2"}),
]


@pytest.mark.parametrize(("ends", "to_add", "expected"), NARROWING)
def test_what_narrows_b_crit(ends, to_add, expected):
    got = for_curve(CURVE_PLAN, "s", critical(*ends), missing(*to_add), [record()])
    assert (None if got is None else got[1]) == expected


def test_an_open_end_within_the_range_or_beyond_what_fits_asks_for_trials():
    beyond = critical(None, 300.0, None)
    within = beyond.model_copy(update={"largest": 100})
    unfit = record(1, "out of memory", batch_size=512)
    for found, records in ((within, [record()]), (beyond, [record(), unfit])):
        assert for_curve(CURVE_PLAN, "s", found, ALL, records)[1] == {"trials": 64}
