"""The plan as a pure function: what comes next for records written by hand."""

import math

import numpy as np
import pytest
import search_records

from bstune.core.errors import InputError, UserCodeError
from bstune.core.question import Question
from bstune.core.records import Budget, Record, Spec, Target
from bstune.core.space import Configuration, Space
from bstune.study.deadline import Deadline
from bstune.study.field import field_of
from bstune.study.next_step import fatal_error, next_step
from bstune.study.plan import Ask, Done, Plan, Wait, trial_seed

TARGET = Target("val/loss", 0.1, "min")
BASELINE = Configuration(batch_size=64, lr=0.4)


LIMITED = {"deadline": Deadline(0.0, 100.0)}


def plan(**changes):
    fixed = {
        "question": Question(TARGET, Budget(steps=400, examples=60_000)),
        "space": Space(4, 1200, 1e-3, 100.0, "sqrt", (64, 0.4)),
        "baseline": BASELINE,
        "trials": 2,
        "seeds": 2,
        "seed": 0,
        "step_time": lambda batch_size: 1e-3 * (1 + batch_size / 64),
    }
    return Plan(**(fixed | changes))


def following(records, now=0.0, running=(), **changes):
    return next_step(plan(**changes), records, running, now)


def record(number, place, status="reached", steps=100, batch_size=64, lr=0.4, **changes):
    fields = {
        "place": place,
        "batch_size": batch_size,
        "lr": lr,
        "max_steps": 938,
        "steps": steps,
        "steps_low": 0,
        "seconds_per_step": 2e-3,
        "history": ((steps, 0.09 if status == "reached" else 0.5),),
    }
    return search_records.record(number, status, **(fields | changes))


def of_baseline(**changes):
    return record(0, "baseline", **({"steps": 200} | changes))


def searched(number, place, **changes):
    return record(number, place, **({"batch_size": 120, "lr": 1.0, "steps": 60} | changes))


def ran(number, ask):
    """What was asked reached the target, the baseline in 200 steps and another in 60."""
    steps = 200 if ask.batch_size == 64 else 60
    fields = ask.model_dump(exclude={"until"})
    return Record(number=number, **fields, status="reached", steps=steps, seconds_per_step=2e-3)


SEARCHED = [of_baseline(), searched(1, "search/0"), searched(2, "search/1", status="missed")]


def test_the_baseline_comes_first_then_the_first_free_place_of_the_search():
    ask = following([])
    assert (ask.role, ask.place, ask.batch_size, ask.lr) == ("baseline", "baseline", 64, 0.4)
    assert (ask.max_steps, ask.seed) == (math.ceil(60_000 / 64), trial_seed(0, "baseline"))
    assert ask.first_evaluation == 46  # a twentieth of its budget
    # A fifth of the time that is left.
    assert following([], 5.0, **LIMITED).until == 25.0
    assert following([], baseline=None).place == "search/0"
    ask = following([of_baseline(), searched(2, "search/1")], trials=9)
    assert (ask.place, ask.role, ask.seed) == ("search/0", "search", trial_seed(0, "search/0"))
    running = [Spec(**searched(2, "search/1").model_dump(include=set(Spec.model_fields)))]
    assert following(SEARCHED[:2], running=running) == Wait()


@pytest.mark.parametrize("status", ["out of memory", "refused"])
def test_sizes_that_do_not_fit_are_no_configurations(status):
    records = [of_baseline(), searched(1, "search/0"), searched(2, "search/1", status=status)]
    assert following(records).place == "search/2"


def test_new_seeds_are_the_best_first_then_the_baseline_on_the_same_ones():
    records = list(SEARCHED)
    places = []
    while isinstance(ask := following(records), Ask):
        places.append((ask.place, ask.batch_size, ask.seed))
        records.append(ran(len(records), ask))
    seeds = [trial_seed(0, "seed/0"), trial_seed(0, "seed/1")]
    assert places == [
        ("seed/1/0", 120, seeds[0]),
        ("seed/1/1", 120, seeds[1]),
        ("seed/0/0", 64, seeds[0]),
        ("seed/0/1", 64, seeds[1]),
    ]
    assert following(records) == Done()


MISSED = [of_baseline(), *(searched(n, f"search/{n - 1}", status="missed") for n in (1, 2))]


@pytest.mark.parametrize(
    "records, changes",
    [
        (SEARCHED, {"seeds": 0}),
        # Nothing but the baseline reached the target.
        (MISSED, {}),
        (SEARCHED, {"question": Question(TARGET, Budget(steps=2000), "curve")}),
    ],
)
def test_nothing_to_confirm_is_the_end(records, changes):
    assert following(records, **changes) == Done()


def test_a_resumption_is_no_configuration_and_keeps_the_seed():
    """A pruned trial that was about to reach a target which the baseline missed."""
    history = tuple((step, 6.5 / step) for step in range(10, 61, 10))
    pruned = searched(1, "search/0", status="pruned", seed=77, max_steps=60, history=history)
    resumed = searched(2, "search/1", seed=77, resumed_from=1, max_steps=900)
    assert following([of_baseline(), pruned, resumed]).place == "search/2"
    records = [of_baseline(status="missed", steps=938), pruned]
    asks = [following(records, trials=40, seed=seed) for seed in range(9)]
    resumptions = [ask for ask in asks if ask.resumed_from is not None]
    assert {(ask.batch_size, ask.lr, ask.seed) for ask in resumptions} == {(120, 1.0, 77)}
    for seed in range(9):
        nothing_saved = following(records, trials=40, seed=seed, resumable=lambda number: False)
        assert nothing_saved.resumed_from is None


@pytest.mark.parametrize(
    "now, between, place",
    [
        # 2 new seeds of 3 s and of the baseline's 6 s, half as long again: 27 s are left for them.
        (72.0, 0.0, "search/2"),
        (74.0, 0.0, "seed/1/0"),
        (98.0, 0.0, None),
        # Each of the 4 runs is chosen in 1 s: 6 s more.
        (68.0, 1.0, "seed/1/0"),
    ],
)
def test_a_time_limit_ends_the_search_then_the_new_seeds(now, between, place):
    limited = LIMITED | {"trials": 9}
    records = [
        of_baseline(train_seconds=6.0),
        searched(1, "search/0", other_seconds=3.0),
        searched(2, "search/1", status="pruned", other_seconds=now - 3.0 * between - 9.0),
    ]
    step = following(records, now, **limited)
    assert (step.place if isinstance(step, Ask) else None) == place


def test_a_search_without_another_configuration_that_reached_goes_on_to_the_end():
    limited = LIMITED | {"trials": 9}
    records = [of_baseline(), searched(1, "search/0", status="pruned", max_steps=60)]
    assert following(records, 99.0, **limited).role == "search"
    assert following(records, 101.0, **limited) == Done()


def test_under_a_time_limit_each_new_seed_of_the_best_is_followed_by_the_baseline():
    records = list(SEARCHED)
    for place in ("seed/1/0", "seed/0/0", "seed/1/1", "seed/0/1"):
        ask = following(records, 90.0, **LIMITED)
        assert (ask.place, ask.until) == (place, 100.0)
        records.append(ran(len(records), ask))
    assert following(records, 90.0, **LIMITED) == Done()


def test_a_new_seed_of_the_baseline_needs_its_own_time():
    best = searched(1, "search/0", train_seconds=20.0)
    records = [of_baseline(train_seconds=1.0), best, SEARCHED[2]]
    assert following(records, 90.0, **LIMITED) == Done()
    records.append(searched(3, "seed/1/0", repeats=1, train_seconds=20.0))
    assert following(records, 90.0, **LIMITED).place == "seed/0/0"
    assert following(records, 99.5, **LIMITED) == Done()


def test_the_first_configurations_lie_near_the_baseline():
    near = [(64, 1.2), (64, 0.133), (192, 0.4 * 3**0.5), (21, 0.4 * (21 / 64) ** 0.5)]
    records = [of_baseline(steps_low=199)]
    for number in range(1, 5):
        ask = following(records, trials=9)
        assert (ask.batch_size, ask.lr) == pytest.approx(near[number - 1], rel=1e-2)
        assert 1 < ask.max_steps < 200 * max(1, 64 / ask.batch_size)
        ran = {"batch_size": ask.batch_size, "lr": ask.lr}
        records.append(searched(number, ask.place, status="pruned", steps=ask.max_steps, **ran))
    # Where three times the rate reached the target it is kept for the other sizes.
    better = searched(1, "search/0", batch_size=64, lr=1.2, steps_low=59)
    ask = following([records[0], better], trials=9)
    assert (ask.batch_size, ask.lr) == pytest.approx((192, 1.2 * 3**0.5), rel=1e-2)


@pytest.mark.parametrize(
    "objective, limit",
    # 4 times the best's 60 steps, or 4 times their 2.875 ms each in steps of 2 ms.
    [("steps", 240), ("time", math.ceil(240 * (1 + 120 / 64) / 2))],
)
def test_under_a_time_limit_the_baseline_runs_to_four_times_the_best(objective, limit):
    question = Question(TARGET, Budget(steps=400, examples=60_000), objective)
    seeds = [searched(3 + index, f"seed/1/{index}", repeats=1, steps_low=59) for index in range(2)]
    ask = following([*SEARCHED, *seeds], 70.0, question=question, **LIMITED)
    assert (ask.place, ask.max_steps) == ("seed/0/0", limit)


def of_new_seeds(*statuses):
    """A lucky configuration, which misses, and a robust one that takes a tenth longer."""
    found = [of_baseline(steps_low=199)]
    found.append(searched(1, "search/0", steps_low=59, max_steps=200))
    found.append(searched(2, "search/1", steps=63, steps_low=62, lr=0.25, max_steps=200))
    for number, status in enumerate(statuses, start=3):
        place = f"seed/1/{number - 3}"
        found.append(searched(number, place, status=status, steps=240, repeats=1))
    return found


def test_a_robust_configuration_takes_over_from_one_that_misses():
    assert following(of_new_seeds()).place == "seed/1/0"
    assert following(of_new_seeds("pruned")).place == "seed/2/0"


def test_new_seeds_from_before_the_search_went_on_leave_room_for_others():
    """Of two seeds three times as many runs are enough; then the baseline follows."""
    found = of_new_seeds(*["pruned"] * 6)
    assert following(found).place == "seed/0/0"
    found.append(searched(9, "search/2", status="missed"))
    assert following(found).place == "seed/2/0"


@pytest.mark.parametrize("count, octaves, is_done", [(9, 0, False), (24, 1, True)])
def test_the_curve_ends_where_its_answer_asks_for_nothing_more(count, octaves, is_done):
    """By the draws of a decision 9 trials at one rate would do; by the answer's they do not."""
    curve = {"question": Question(TARGET, Budget(steps=4000), "curve"), "baseline": None}
    noise = np.random.default_rng(10)
    records = []
    for place, size in enumerate(np.geomspace(8, 1024, count).round().astype(int).tolist()):
        steps = round(26 * (1 + 100 / size) * math.exp(0.03 * noise.standard_normal()))
        lr = 0.05 * math.sqrt(size) * 2.0 ** (octaves * (place % 3 - 1))
        ran = {"batch_size": size, "lr": lr, "steps": steps, "steps_low": steps - 1}
        records.append(searched(place, f"search/{place}", **ran))
    assert (following(records, **curve, trials=100, seed=10) == Done()) == is_done


# What came of trials in a row, each with its batch size.
STATUS = {"t": "reached", "f": "failed", "r": "refused", "m": "out of memory"}


@pytest.mark.parametrize(
    "trials, error",
    [
        ("f8 f16", None),
        ("f8 f16 f32", UserCodeError),
        # Something has trained at 8: only failures there, in a row, count.
        ("t8 f16 f32 f64", None),
        ("t8 f8 f8 f8", UserCodeError),
        ("t8 f8 f8 t8 f8", None),
        ("r4 r16 f32", UserCodeError),
        ("t8 r9 r10 r11", None),
        # Memory is bisected down to the smallest size.
        ("m32 m16 m8", None),
        ("m4", InputError),
        ("m4 t8", None),
    ],
)
def test_failures_that_end_a_study(trials, error):
    records = []
    for number, trial in enumerate(trials.split()):
        status = STATUS[trial[0]]
        ran = {"steps": 9 * (status == "reached"), "message": f"error {number}", "history": ()}
        place = f"search/{number}"
        records.append(record(number, place, status, batch_size=int(trial[1:]), **ran))
    found = fatal_error(plan().space, records)
    assert found is None if error is None else type(found) is error
    assert error is None or str(found) == f"error {number}"
    # Those of an earlier call do not count.
    assert fatal_error(plan().space, records, since=len(records)) is None


@pytest.mark.parametrize("deviation, best", [(0.01, 1), (0.5, 2)])
def test_sizes_whose_step_times_are_not_told_apart_are_compared_by_steps(deviation, best):
    """120 takes 70 steps, 150 takes 62, each of which seems to take 1.25 times as long."""
    timings = ((64, 1.7e-3, deviation), (120, 2e-3, deviation), (150, 2.5e-3, deviation))
    ran = [
        of_baseline(steps=400),
        searched(1, "search/0", steps=70),
        searched(2, "search/1", steps=62, batch_size=150),
    ]
    untimed = [one.model_copy(update={"seconds_per_step": None}) for one in ran]
    field = field_of(plan(step_time=None, timings=timings), untimed)
    assert min(field.candidates, key=lambda one: one.log_value).number == best


ENDS = {"question": Question(TARGET, Budget(steps=400, examples=60_000), schedule_ends=True)}


def test_schedules_that_end_with_their_trials():
    ends = ENDS | {"trials": 1}
    asked = following([], **ends)
    assert asked.max_steps == asked.schedule_steps == 938
    baseline = of_baseline(schedule_steps=938)
    asked = following([baseline], **ends)
    assert asked.role == "search"
    assert asked.schedule_steps == asked.max_steps <= 60_000 / asked.batch_size + 1
    trial = searched(1, "search/0", steps=80, steps_low=78, max_steps=400, schedule_steps=400)
    asked = following([baseline, trial], **ends)
    # 400 steps are far more than it took: 9 of 10 seeds reach the target in them, too.
    assert (asked.place, asked.max_steps, asked.schedule_steps) == ("seed/1/0", 400, 400)
    # Further seeds keep the length of the first one, whatever that was.
    first = searched(2, "seed/1/0", steps=80, steps_low=78, schedule_steps=300, repeats=1)
    asked = following([baseline, trial, first], **ends)
    assert (asked.place, asked.schedule_steps) == ("seed/1/1", 300)
    # A deadline stops the baseline in its schedule: at four times 79 steps of 2.875 ms, in its own.
    asked = following([baseline, trial, first], 90.0, **ends, **LIMITED)
    assert (asked.place, asked.schedule_steps) == ("seed/0/0", 938)
    assert asked.max_steps == math.ceil(4 * 79.5 * (1 + 120 / 64) / 2)
