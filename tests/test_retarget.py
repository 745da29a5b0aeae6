"""Another question to the trials of a study: cut histories, refusals, and reports of a folder."""

import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import search_records
from refusals import as_yaml, cases, refused, text_cases
from results import result as drawn_result
from search_records import history

from bstune.config import options_from_python
from bstune.core.question import Question
from bstune.core.records import Budget, Target
from bstune.options import differing, with_question
from bstune.report.figure import curve_figure
from bstune.study.commands import stored_commands
from bstune.study.plan import Plan
from bstune.study.retarget import critical_over_targets, records_ended_by, retargeted
from bstune.trial.table import find_table, train
from bstune.trial.trial import Trial, run_trial

OWN = Question(Target("val/loss", 0.1, "min"), Budget(steps=200))
HISTORY = history("10 0.8, 40 0.3, 80 0.15, 100 0.09")
MISSED = history("10 0.8, 40 0.3, 200 0.15")


def to(goal):
    return replace(OWN, target=replace(OWN.target, goal=goal))


def within(steps):
    return Question(Target("val/loss", None, "min"), Budget(steps=steps), "metric")


def record(number=0, status="reached", history=HISTORY, **fields):
    steps = history[-1][0] if history else 0
    low = history[-2][0] if status == "reached" else steps
    fields |= {"steps": steps, "steps_low": low, "history": history, "train_seconds": 1.0}
    return search_records.record(number, status, other_seconds=2.0, **fields)


RUNS = {"hit": HISTORY, "miss": MISSED, "nan": history("10 0.2, 20 -"), "none": ()}


# How a run ended, a goal or a budget -> how it ends there, its steps and the last miss.
@cases("""
status | run | asked | ends | steps | low
# A harder one: it was stopped before.
reached | hit | 0.05 | pruned | 100 | 80
missed | miss | 0.2 | reached | 200 | 40
diverged | nan | 0.3 | reached | 10 | 0
failed | none | 0.3 | failed | 0 | 0
# Smaller budgets: the metric is interpolated over log steps.
finished | miss | 40 | finished | 40 | 40
reached | hit | 150 | pruned | 100 | 80
missed | miss | 5 | pruned | 0 | 200
""")
def test_a_run_ends_where_the_question_ends_it(status, run, asked, ends, steps, low):
    question = to(asked) if asked < 1 else within(asked)
    ran = RUNS[run]
    (again,) = records_ended_by(question, [record(status=status, history=ran)])
    assert (again.status, again.steps, again.steps_low) == (ends, steps, low)
    share = steps / ran[-1][0] if ran else 0.0
    assert (again.train_seconds, again.other_seconds) == pytest.approx((share, 2 * share))


def test_what_resumes_a_run_that_met_the_target_was_never_asked():
    chain = [
        record(0, "pruned", HISTORY[:2]),
        record(1, resumed_from=0),
        record(2, repeats=1, role="new seed", place="seed/1/0"),
    ]

    def asked(goal):
        return [(one.number, one.steps, one.repeats) for one in records_ended_by(to(goal), chain)]

    assert asked(0.3) == [(0, 40, None), (2, 40, 0)]
    assert asked(0.2) == [(0, 40, None), (1, 80, None), (2, 80, 1)]
    # Of its own steps, 40 to 100.
    assert records_ended_by(to(0.2), chain)[1].train_seconds == pytest.approx(40 / 60)
    assert records_ended_by(OWN, chain) == chain
    # Its steps lie beyond a budget.
    assert records_ended_by(within(5), chain)[1].train_seconds == 0.0


def test_a_recorded_run_ends_as_one_that_was_run_for_the_target():
    table = find_table("mnist_mlp")
    easier = replace(table.target, goal=0.06)
    for batch_size, lr in list(table.cells)[::20]:
        spec = search_records.spec(batch_size=int(batch_size), lr=lr, max_steps=10**6)
        hard, run = (
            run_trial(partial(train, table), Trial(spec, target, total_steps=10**6))
            for target in (table.target, easier)
        )
        (again,) = records_ended_by(Question(easier, Budget(steps=10**6)), [hard])
        assert (again.status, again.history) == (run.status, run.history)
        assert (again.steps, again.steps_low) == (run.steps, run.steps_low)
    # The metric at a budget's end lies half of the way from 10 to 40 in log steps.
    (again,) = records_ended_by(within(20), [record(status="missed", history=MISSED)])
    assert again.history == ((10, 0.8), (20, pytest.approx(0.55)))


WHOLE = record(status="finished", history=MISSED)
OWNS = {
    "target": (OWN, [record(), record(1, "missed", MISSED)]),
    "schedules": (replace(OWN, schedule_ends=True), [record()]),
    "budget": (within(200), [WHOLE]),
}


@cases("""
own | asked | words
target | 0.05 | 0.09
target | 0.9 | 0.9, harder
schedules | 0.2 | schedules
# The best trial met its target, and was stopped there.
target | 150 | 66%
budget | 400 | 50%
budget | 5 | larger
""")
def test_what_the_trials_do_not_tell_is_one_line(own, asked, words):
    question, records = OWNS[own]
    with refused(str(words)):
        retargeted(question, to(asked) if asked < 1 else within(asked), records)


def test_trials_whose_schedule_follows_their_length_tell_of_no_other_budget():
    assert retargeted(within(200), to(0.2), [WHOLE], schedule_follows=True)[0].steps == 200
    with refused("200 steps"):
        retargeted(within(200), within(50), [WHOLE], schedule_follows=True)


GIVEN = {"target": "val/loss <= 0.1", "batch_size": (8, 64), "baseline": (16, 0.1), "budget": 200}
BY_METRIC = "objective: metric, target: min val/loss, wall_seconds: 300, budget: {seconds: 60}"


@text_cases(f"""
changes | asked | differs
- | target: 0.2 | target: val/loss <= 0.2
- | budget: {{steps: 50}} | objective: metric, target: min val/loss, budget.steps: 50
{BY_METRIC} | target: 0.2 | objective: time, target: val/loss <= 0.2
{BY_METRIC} | budget: {{steps: 9}} | budget.steps: 9, budget.seconds: null
""")
def test_options_of_another_question(changes, asked, differs):
    own = options_from_python(workload="w", **GIVEN | as_yaml(changes))
    assert differing(own, with_question(own, as_yaml(asked))) == as_yaml(differs)


@text_cases("""
asked | words
target: val/loss >= 0.2 | min val/loss
target: .nan | nan
target: 0.2, budget: {seconds: 30} | metric
budget: {seconds: -1} | budget.seconds
trials: 3 | trials
""")
def test_what_cannot_be_asked_is_one_line(asked, words):
    with refused(words):
        with_question(options_from_python(workload="w", **GIVEN), as_yaml(asked))


@text_cases("""
way | command | again | best
command | python -m bstune +workload=w trials=8 | python -m bstune +workload=w trials=8 \
'target=a <= 0.2' study=s-2 | python -m bstune +workload=w 'target=a <= 0.2' \
trial.batch_size=64 trial.lr=0.5
tune | bstune.tune(..., name='s') | bstune.tune(..., name='s-2', target='a <= 0.2') | result.train()
loop | bstune.Study(..., name='s') | bstune.Study(..., name='s-2', target='a <= 0.2') | batch \
size 64 and lr 0.5 in your own loop
application | python train.py -m | python train.py -m 'hydra.sweeper.target="a <= 0.2"' \
hydra.sweeper.study=s-2 | batch size 64 and lr 0.5 in your application
""")
def test_a_stored_study_is_asked_again_the_way_it_was_begun(way, command, again, best):
    own = options_from_python(study="s", target="a <= 0.1", baseline=(64, 0.1), budget=9)
    asked = stored_commands(way, command, own, with_question(own, {"target": 0.2}))
    assert (asked.study({}), asked.train(64, 0.5, None)) == (again, best)
    # Without another question it stays the same study.
    assert stored_commands(way, command, own, own).study({}) == command


def test_b_crit_over_easier_targets():
    """S(B) = 10/goal (1 + 16/goal/B): it grows as the target gets harder."""
    records = []
    for number in range(21):
        size, octaves = 8 * 2 ** (number % 7), number // 7 - 1
        goals = np.geomspace(1.0, 0.1, 60).tolist()
        off = math.exp(0.3 * octaves**2)
        steps = {round(off * 10 / goal * (1 + 16 / goal / size)): goal for goal in goals}
        rate = {"batch_size": size, "lr": 0.1 * (size / 64) ** 0.5 * 2**octaves}
        records.append(record(number, history=tuple(steps.items()), **rate))
    plan = Plan(OWN, search_records.SPACE, None, 21, 3, 0, step_time=lambda size: 1e-3)
    found = critical_over_targets(plan, records)
    goals = [one.goal for one in found]
    assert goals == sorted(goals, reverse=True)
    assert len(goals) == 5
    for one in found:
        assert one.interval.low < 16 / one.goal < one.interval.high
    assert found[0].interval.high < 16 / 0.1
    ends = replace(plan, question=replace(OWN, schedule_ends=True))
    assert critical_over_targets(ends, records) == ()
    assert len(curve_figure(drawn_result(over_targets=found), []).axes) == 4
