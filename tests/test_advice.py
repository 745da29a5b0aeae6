"""Warnings of the curve, the octaves of a range, and what narrows B_crit."""

from dataclasses import replace

import pytest
from refusals import cases
from results import BEST, confirmed, critical, curve
from search_records import QUESTION, SPACE, record

from bstune.core.question import Question
from bstune.core.records import Budget
from bstune.study import advice
from bstune.study.advice import off_law, searched_range, warnings_of, what_narrows_b_crit
from bstune.study.plan import Plan
from bstune.study.result import Searched

# Batch sizes 8 to 512; S*(B) = 26 (1 + 130/B) and B_crit 130.
PLAN = Plan(QUESTION, SPACE, baseline=None, trials=32, seeds=3, seed=0)
CURVE_PLAN = replace(PLAN, question=Question(QUESTION.target, QUESTION.budget, "curve"))
LAW = critical(130.0, 85.0, 212.0)
ALL = Searched(low=8, high=512, octaves=6, reached=6, unreached=())


def missing(*sizes):
    return ALL.model_copy(update={"unreached": sizes, "reached": 6 - len(sizes)})


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


@pytest.mark.parametrize("factor, expected", [(1.25, []), (1 / 1.35, ["far from the law"])])
def test_a_curve_far_from_its_law_at_b_crit_is_warned_of(factor, expected):
    assert off_law(LAW, bent(factor)) == pytest.approx(max(factor, 1 / factor))
    assert kinds(points=bent(factor)) == expected
    # An open end is warning enough.
    assert kinds(found=critical(None, 90.0, None), points=bent(factor)) == []


@cases("""
unreached | expected
# Far from B_crit, where nobody asked.
[11, 23] | []
[91, 184] | []
[93] | [octave without a trial]
[183] | [octave without a trial]
""")
def test_an_octave_without_a_trial_matters_where_b_crit_lies_in_it(unreached, expected):
    assert kinds(searched=missing(*unreached)) == expected


@pytest.mark.parametrize("runs, of_baseline, seeds", [(1, 0, 3), (3, 0, 6), (3, 1, 3), (3, 3, 6)])
def test_new_seeds_that_were_not_run_are_asked_for(runs, of_baseline, seeds):
    other = confirmed(118, 1.18, (52, 55, 61)[:runs], 0.0331)
    baseline = confirmed(64, 1.0, (92, 95, 91)[:of_baseline], 0.0331) if of_baseline else None
    assert advice.what_is_missing(PLAN, None, other, baseline, [record()])[1] == {"seeds": seeds}


@cases("""
objective | expected
time | [step times]
steps | []
""")
def test_step_times_matter_for_time_alone(objective, expected):
    best = BEST.model_copy(update={"step_seconds_error": 0.2})
    question = replace(QUESTION, objective=objective)
    assert kinds(replace(PLAN, question=question), best=best) == expected


@cases("""
repeats | expected
9 | [evaluations]
0 | [evaluations]
2 | []
""")
def test_evaluations_of_the_new_seeds_that_decide_are_warned_of(repeats, expected):
    """Those of the best, trial 9, and of the baseline; not those of one that was given up."""
    records = [record(0, role="baseline"), *(record(number) for number in range(1, 10))]
    fields = {"role": "new seed", "repeats": repeats, "steps_low": 0}
    records += [record(number, **fields) for number in range(10, 13)]
    assert kinds(best=BEST, records=records) == expected


@cases("""
ends | unreached | largest | expected
# B_crit's interval, the octaves to add, the largest size that reached -> options to narrow it.
[130, 100, 201] | [] | 512 | {trials: 64}
[130, 100, 199] | [23] | 512 | null
[null, 300, null] | [] | 512 | {batch_size.low: 8, batch_size.high: 2048, study: s-2}
[null, null, null] | [] | 512 | {batch_size.low: 2, batch_size.high: 2048, study: s-2}
# An open end within the range.
[null, 300, null] | [] | 100 | {trials: 64}
""")
def test_what_narrows_b_crit(ends, unreached, largest, expected):
    found = critical(*ends).model_copy(update={"largest": largest})
    got = what_narrows_b_crit(CURVE_PLAN, "s", found, missing(*unreached), [record()])
    assert (got and got[1]) == expected


@cases("""
changes | sizes | expected
# Octaves, how many have a trial that reached, the middles to add.
{} | [8, 16, 40, 64, 128, 512] | [6, 6, []]
{multiple: 8} | [64] | [6, 1, [8, 24, 48, 184, 360]]
{low: 64, high: 64} | [64] | [1, 1, []]
""")
def test_octaves_of_a_range(changes, sizes, expected):
    records = [record(number, batch_size=size) for number, size in enumerate(sizes)]
    found = searched_range(replace(SPACE, **changes), records)
    assert [found.octaves, found.reached, list(found.unreached)] == expected


@cases("""
trend | budget | options
still falling | {seconds: 30, steps: 1} | {budget.seconds: 120.0, study: s-2}
still falling | {steps: 100} | {budget.steps: 400, study: s-2}
# Below the lowest rate that diverged, 0.0256; the baseline's may stay.
diverged | {steps: 100} | {lr.high: 0.023, study: s-2}
""")
def test_what_may_help_where_nothing_reached(trend, budget, options):
    diverged = [record(number, lr=lr, status="diverged") for number, lr in enumerate((0.1, 0.0256))]
    question = replace(QUESTION, budget=Budget(**budget))
    assert advice.remedy(replace(PLAN, question=question), "s", trend, diverged) == options
