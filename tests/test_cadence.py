"""When evaluations are due: by examples and past values, in a table of what a trial has seen."""

import pytest
from made_parts import make_stopped
from toolbox import make_protocol, make_spec

from bstune.core.evaluation_schedule import EvaluationSchedule
from bstune.core.records import Target
from bstune.trial.parts.cadence import Cadence

# With 10 examples to evaluate at a cost of 0.5 and steps of 4 examples, k evaluations have to have
# 10 k steps before them far from the target, where half of a quarter is spent, and 5 k steps near
# it.
SCHEDULE = EvaluationSchedule(ratio=1.05, share=0.25, cost=0.5, near=1.5)
PROTOCOL = make_protocol(evaluation_schedule=SCHEDULE, target=Target("val/error", 0.1, "min"))


def cadence_of(dense_steps=None, batch_size=4):
    return Cadence(make_spec(batch_size, dense_steps=dense_steps), PROTOCOL, validation_examples=10)


@pytest.mark.parametrize(("batch_size", "due"), [(4, 10), (8, 5), (100, 1)])
def test_the_first_evaluation_waits_for_its_cost_in_examples(batch_size, due):
    assert cadence_of(batch_size=batch_size).due_step == due


@pytest.mark.parametrize(
    ("evaluations", "due", "forced", "near"),
    [
        ([(10, 0.9)], 20, (), False),
        ([(10, 0.9), (20, 0.9)], 30, (), False),
        # One that was not due changes nothing.
        ([(7, 0.9)], 10, (7,), False),
        ([(7, 0.9), (10, 0.9)], 20, (7,), False),
        # From 0.5 to 0.2 in a doubling, the target is met before another one and a half times the
        # steps.
        ([(10, 0.5), (20, 0.2)], 21, (), True),
        # A trial that has been near stays near.
        ([(10, 0.5), (20, 0.2), (21, 0.9)], 22, (), True),
        # What looks near at an evaluation that was not due does not count.
        ([(10, 0.9), (15, 0.2)], 20, (15,), False),
        # A value that is not finite tells nothing.
        ([(10, 0.5), (20, None)], 30, (), False),
    ],
)
def test_evaluations_that_were_due_say_when_the_next_one_is(evaluations, due, forced, near):
    cadence = cadence_of()
    history = []
    for step, value in evaluations:
        history.append((step, value))
        cadence.take_in(step, history)
    assert (cadence.due_step, cadence.forced, cadence.near) == (due, forced, near)


def test_the_ratio_rules_where_evaluations_are_cheap():
    # A step trains on a thousand times what an evaluation looks at.
    cadence = cadence_of(batch_size=10_000)
    # 200 x 1.05 = 210.
    cadence.take_in(200, [(200, 0.9)])
    assert cadence.due_step == 210


@pytest.mark.parametrize(("step", "due"), [(9, 10), (10, 11), (12, 13)])
def test_an_evaluation_without_a_value_costs_nothing_and_is_not_forced(step, due):
    cadence = cadence_of()
    cadence.schedule_next(step, [])
    assert (cadence.due_step, cadence.forced) == (due, ())


def test_nothing_more_is_due_where_something_else_stops_the_trial():
    cadence = cadence_of()
    cadence.take_in(10, [(10, 0.9)], stops=True)
    cadence.schedule_next(11, [(10, 0.9)], stops=True)
    assert cadence.due_step == 10
    cadence.take_in(10, [(10, 0.9)])
    assert cadence.due_step == 20


def test_it_looks_more_closely_between_the_dense_steps():
    # Evaluations may cost as many examples as are trained on: 10 x 0.5 are 1.25 steps of 4.
    cadence = cadence_of(dense_steps=(10, 40))
    history = []
    looked_at = []
    while cadence.due_step < 60:
        looked_at.append(cadence.due_step)
        history.append((cadence.due_step, 0.9))
        cadence.take_in(cadence.due_step, history)
    inside = [step for step in looked_at if 10 < step < 40]
    assert len(inside) > 10
    assert [step for step in looked_at if step > 40] == []


@pytest.mark.parametrize(
    ("stopped", "history", "due", "forced"),
    [
        # Stopped before an evaluation was due: the one at its end was forced.
        (make_stopped(23, due_step=30), [(10, 0.9), (20, 0.9), (23, 0.9)], 30, (23,)),
        # Stopped where one was due: that one counts.
        (make_stopped(30, due_step=30), [(10, 0.9), (20, 0.9), (30, 0.9)], 40, ()),
        # Of three the one that was forced does not count.
        (make_stopped(30, due_step=30, forced=(23,)), [(10, 0.9), (23, 0.9), (30, 0.9)], 31, (23,)),
        # What was near stays near.
        (make_stopped(30, due_step=30, near=True), [(10, 0.9), (20, 0.9), (30, 0.9)], 31, ()),
    ],
)
def test_a_trial_that_goes_on_takes_up_its_cadence(stopped, history, due, forced):
    cadence = cadence_of()
    cadence.go_on(stopped, history)
    assert (cadence.due_step, cadence.forced) == (due, forced)
