"""What comes next for records written by hand, and the shares of a time limit."""

import math
from dataclasses import replace

import numpy as np
import pytest
import search_records
from refusals import as_yaml, cases

from bstune.config import options_from_python
from bstune.core.question import Question
from bstune.core.records import Budget, Record, Spec, Target
from bstune.core.space import Configuration, Space
from bstune.study.deadline import Deadline, least_limit, pilot_seconds
from bstune.study.field import field_of
from bstune.study.machine import RECORDED
from bstune.study.make_plan import plan_text
from bstune.study.next_step import fatal_error, next_step
from bstune.study.plan import Ask, Done, Plan, Wait, trial_seed
from bstune.study.progress import Progress
from bstune.system.ticker import Ticker

TARGET = Target("val/loss", 0.1, "min")
QUESTION = Question(TARGET, Budget(steps=400, examples=60_000))
OF_CURVE = {"question": Question(TARGET, Budget(steps=4000), "curve")}
LIMITED = {"deadline": Deadline(0.0, 100.0)}


def plan(**changes):
    fixed = {
        "question": QUESTION,
        "space": Space(4, 1200, 1e-3, 100.0, "sqrt", (64, 0.4)),
        "baseline": Configuration(batch_size=64, lr=0.4),
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


def trials(text):
    """Trials, a line each: place, batch size, rate, status, steps, and further fields."""
    found = []
    for number, line in enumerate(text.strip().splitlines()):
        (place, size, lr, status, steps), more = line.split()[:5], line.split()[5:]
        fields = as_yaml(" ".join(more))
        found.append(record(number, place, status, int(steps), int(size), float(lr), **fields))
    return found


BASELINE_TRIAL = "baseline 64 0.4 reached 200\n"


def ran(number, ask):
    """What was asked reached the target, the baseline in 200 steps and another in 60."""
    steps = 200 if ask.batch_size == 64 else 60
    fields = ask.model_dump(exclude={"until"})
    return Record(number=number, **fields, status="reached", steps=steps, seconds_per_step=2e-3)


ONE = BASELINE_TRIAL + "search/0 120 1.0 reached 60"
SEARCHED = trials(f"""{ONE}
search/1 120 1.0 missed 60""")


def test_the_baseline_comes_first_then_the_first_free_place_of_the_search():
    ask = following([])
    assert (ask.role, ask.place, ask.batch_size, ask.lr) == ("baseline", "baseline", 64, 0.4)
    assert (ask.max_steps, ask.seed) == (math.ceil(60_000 / 64), trial_seed(0, "baseline"))
    assert ask.first_evaluation == 46  # a twentieth of its budget
    # A fifth of the time that is left.
    assert following([], 5.0, **LIMITED).until == 25.0
    # The best metric of a budget is known at its end.
    of_metric = Question(replace(TARGET, goal=None), QUESTION.budget, "metric")
    assert following([], 5.0, question=of_metric, **LIMITED).until == plan(**LIMITED).end
    assert following([], baseline=None).place == "search/0"
    ask = following(trials(BASELINE_TRIAL + "search/1 120 1.0 reached 60"), trials=9)
    assert (ask.place, ask.role, ask.seed) == ("search/0", "search", trial_seed(0, "search/0"))
    running = [Spec(**SEARCHED[2].model_dump(include=set(Spec.model_fields)))]
    assert following(SEARCHED[:2], running=running) == Wait()


@cases("""
status | steps | more
out of memory | 0 | {}
refused | 0 | {}
reached | 60 | {resumed_from: 1}
""")
def test_what_is_no_configuration(status, steps, more):
    second = record(2, "search/1", status, steps, 120, 1.0, **more)
    assert following([*trials(ONE), second]).place == "search/2"


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


MISSED = trials(f"""{BASELINE_TRIAL}search/0 120 1.0 missed 60
search/1 120 1.0 missed 60""")


def test_nothing_to_confirm_is_the_end():
    # In the second nothing but the baseline reached the target.
    for records, changes in ((SEARCHED, {"seeds": 0}), (MISSED, {}), (SEARCHED, OF_CURVE)):
        assert following(records, **changes) == Done()


def test_a_resumption_keeps_the_seed():
    """A pruned trial that was about to reach a target which the baseline missed."""
    history = tuple((step, 6.5 / step) for step in range(10, 61, 10))
    records = trials("""baseline 64 0.4 missed 938
search/0 120 1.0 pruned 60 seed: 77""")
    records[1] = records[1].model_copy(update={"history": history})
    asks = [following(records, trials=40, seed=seed) for seed in range(9)]
    resumptions = [ask for ask in asks if ask.resumed_from is not None]
    assert {(ask.batch_size, ask.lr, ask.seed) for ask in resumptions} == {(120, 1.0, 77)}
    for seed in range(9):
        nothing_saved = following(records, trials=40, seed=seed, resumable=lambda number: False)
        assert nothing_saved.resumed_from is None


@cases("""
now | between | place
# 2 new seeds of 3 s and of the baseline's 6 s, half as long again: 27 s are left for them.
72 | 0 | search/2
74 | 0 | seed/1/0
98 | 0 | null
# Each of the 4 runs is chosen in 1 s: 6 s more.
68 | 1 | seed/1/0
""")
def test_a_time_limit_ends_the_search_then_the_new_seeds(now, between, place):
    records = trials(f"""baseline 64 0.4 reached 200 train_seconds: 6.0
search/0 120 1.0 reached 60 other_seconds: 3.0
search/1 120 1.0 pruned 60 other_seconds: {now - 3.0 * between - 9.0}""")
    step = following(records, now, **LIMITED, trials=9)
    assert (step.place if isinstance(step, Ask) else None) == place


def test_a_search_without_another_configuration_that_reached_goes_on_to_the_end():
    records = trials(BASELINE_TRIAL + "search/0 120 1.0 pruned 60 max_steps: 60")
    assert following(records, 99.0, **LIMITED, trials=9).role == "search"
    assert following(records, 101.0, **LIMITED, trials=9) == Done()


def test_under_a_time_limit_each_new_seed_of_the_best_is_followed_by_the_baseline():
    records = list(SEARCHED)
    for place in ("seed/1/0", "seed/0/0", "seed/1/1", "seed/0/1"):
        ask = following(records, 90.0, **LIMITED)
        assert (ask.place, ask.until) == (place, 100.0)
        records.append(ran(len(records), ask))
    assert following(records, 90.0, **LIMITED) == Done()


def test_a_new_seed_of_the_baseline_needs_its_own_time():
    slow = trials("""baseline 64 0.4 reached 200 train_seconds: 1.0
search/0 120 1.0 reached 60 train_seconds: 20.0
search/1 120 1.0 missed 60
seed/1/0 120 1.0 reached 60 train_seconds: 20.0, repeats: 1""")
    assert following(slow[:3], 90.0, **LIMITED) == Done()
    assert following(slow, 90.0, **LIMITED).place == "seed/0/0"
    assert following(slow, 99.5, **LIMITED) == Done()


def test_the_first_configurations_lie_near_the_baseline():
    near = [(64, 1.2), (64, 0.133), (192, 0.4 * 3**0.5), (21, 0.4 * (21 / 64) ** 0.5)]
    text = "baseline 64 0.4 reached 200 steps_low: 199"
    for number, pair in enumerate(near):
        ask = following(trials(text), trials=9)
        assert (ask.batch_size, ask.lr) == pytest.approx(pair, rel=1e-2)
        assert 1 < ask.max_steps < 200 * max(1, 64 / ask.batch_size)
        text += f"\nsearch/{number} {ask.batch_size} {ask.lr} pruned {ask.max_steps}"
    # Where three times the rate reached the target it is kept for the other sizes.
    better = trials("""baseline 64 0.4 reached 200 steps_low: 199
search/0 64 1.2 reached 60 steps_low: 59""")
    ask = following(better, trials=9)
    assert (ask.batch_size, ask.lr) == pytest.approx((192, 1.2 * 3**0.5), rel=1e-2)


@pytest.mark.parametrize(
    "objective, limit",
    # 4 times the best's 60 steps, or 4 times their 2.875 ms each in steps of 2 ms.
    [("steps", 240), ("time", math.ceil(240 * (1 + 120 / 64) / 2))],
)
def test_under_a_time_limit_the_baseline_runs_to_four_times_the_best(objective, limit):
    question = replace(QUESTION, objective=objective)
    records = trials(f"""{ONE}
search/1 120 1.0 missed 60
seed/1/0 120 1.0 reached 60 steps_low: 59, repeats: 1
seed/1/1 120 1.0 reached 60 steps_low: 59, repeats: 1""")
    ask = following(records, 70.0, question=question, **LIMITED)
    assert (ask.place, ask.max_steps) == ("seed/0/0", limit)


LUCKY = """baseline 64 0.4 reached 200 steps_low: 199
search/0 120 1.0 reached 60 steps_low: 59, max_steps: 200
search/1 120 0.25 reached 63 steps_low: 62, max_steps: 200"""


def test_a_robust_configuration_takes_over_from_one_that_misses():
    """A lucky configuration, which misses, and a robust one that takes a tenth longer."""
    missed = "".join(f"\nseed/1/{n} 120 1.0 pruned 240 repeats: 1" for n in range(6))
    assert following(trials(LUCKY)).place == "seed/1/0"
    assert following(trials(LUCKY + missed[: len(missed) // 6])).place == "seed/2/0"
    # Of two seeds three times as many runs are enough; then the baseline follows.
    assert following(trials(LUCKY + missed)).place == "seed/0/0"
    # New seeds from before the search went on leave room for others.
    later = trials(f"{LUCKY}{missed}\nsearch/2 120 1.0 missed 60")
    assert following(later).place == "seed/2/0"


@pytest.mark.parametrize("count, octaves, is_done", [(9, 0, False), (24, 1, True)])
def test_the_curve_ends_where_its_answer_asks_for_nothing_more(count, octaves, is_done):
    """By the draws of a decision 9 trials at one rate would do; by the answer's they do not."""
    noise = np.random.default_rng(10)
    records = []
    for place, size in enumerate(np.geomspace(8, 1024, count).round().astype(int).tolist()):
        steps = round(26 * (1 + 100 / size) * math.exp(0.03 * noise.standard_normal()))
        lr = 0.05 * math.sqrt(size) * 2.0 ** (octaves * (place % 3 - 1))
        number, low = f"search/{place}", {"steps_low": steps - 1}
        records.append(record(place, number, "reached", steps, size, lr, **low))
    step = following(records, **OF_CURVE, baseline=None, trials=100, seed=10)
    assert (step == Done()) == is_done


# What came of trials in a row, each with its batch size.
STATUS = {"t": "reached", "f": "failed", "r": "refused", "m": "out of memory"}


@cases("""
trials | error
f8 f16 | null
f8 f16 f32 | UserCodeError
# Something has trained at 8: only failures there, in a row, count.
t8 f16 f32 f64 | null
t8 f8 f8 f8 | UserCodeError
t8 f8 f8 t8 f8 | null
r4 r16 f32 | UserCodeError
t8 r9 r10 r11 | null
# Memory is bisected down to the smallest size.
m32 m16 m8 | null
m4 | InputError
m4 t8 | null
""")
def test_failures_that_end_a_study(trials, error):
    records = []
    for number, trial in enumerate(trials.split()):
        status, size = STATUS[trial[0]], int(trial[1:])
        ran = {"message": f"error {number}", "history": ()}
        steps = 9 * (status == "reached")
        records.append(record(number, f"search/{number}", status, steps, size, **ran))
    found = fatal_error(plan().space, records)
    assert (found and type(found).__name__) == error
    assert error is None or str(found) == f"error {number}"
    # Those of an earlier call do not count.
    assert fatal_error(plan().space, records, since=len(records)) is None


@pytest.mark.parametrize("deviation, best", [(0.01, 1), (0.5, 2)])
def test_sizes_whose_step_times_are_not_told_apart_are_compared_by_steps(deviation, best):
    """120 takes 70 steps, 150 takes 62, each of which seems to take 1.25 times as long."""
    timings = ((64, 1.7e-3, deviation), (120, 2e-3, deviation), (150, 2.5e-3, deviation))
    untimed = trials("""baseline 64 0.4 reached 400 seconds_per_step: null
search/0 120 1.0 reached 70 seconds_per_step: null
search/1 150 1.0 reached 62 seconds_per_step: null""")
    field = field_of(plan(step_time=None, timings=timings), untimed)
    assert min(field.candidates, key=lambda one: one.log_value).number == best


def test_schedules_that_end_with_their_trials():
    ends = {"question": replace(QUESTION, schedule_ends=True), "trials": 1}
    asked = following([], **ends)
    assert asked.max_steps == asked.schedule_steps == 938
    records = trials("""baseline 64 0.4 reached 200 schedule_steps: 938
search/0 120 1.0 reached 80 steps_low: 78, max_steps: 400, schedule_steps: 400
seed/1/0 120 1.0 reached 80 steps_low: 78, schedule_steps: 300, repeats: 1""")
    asked = following(records[:1], **ends)
    assert asked.role == "search"
    assert asked.schedule_steps == asked.max_steps <= 60_000 / asked.batch_size + 1
    asked = following(records[:2], **ends)
    # 400 steps are far more than it took: 9 of 10 seeds reach the target in them, too.
    assert (asked.place, asked.max_steps, asked.schedule_steps) == ("seed/1/0", 400, 400)
    # Further seeds keep the length of the first one, whatever that was.
    asked = following(records, **ends)
    assert (asked.place, asked.schedule_steps) == ("seed/1/1", 300)
    # A deadline stops the baseline in its schedule: at four times the best's time.
    asked = following(records, 90.0, **ends, **LIMITED)
    assert (asked.place, asked.schedule_steps) == ("seed/0/0", 938)
    assert asked.max_steps == math.ceil(4 * 79.5 * (1 + 120 / 64) / 2)


@cases("""
step_time | deadline | words
null | null | null
2 | null | null
5 | null | 78 min
5 | 6000 | null
5 | 3000 | 78 min
""")
def test_a_trial_that_takes_long_is_told(step_time, deadline, words):
    """The baseline's budget is 938 steps."""
    question = replace(QUESTION, budget_step_time=step_time and (lambda batch_size: step_time))
    made = plan(question=question, deadline=deadline and Deadline(0.0, deadline))
    options = options_from_python(target="val/loss <= 0.1", budget=400)
    _, *told = plan_text("a", options, made, RECORDED).splitlines()
    assert [words in line for line in told] == ([True] if words else [])


# 100 s from second 10 on; the start took 4, and the answer is expected to take 5.2.
LIMIT = Deadline(began=10.0, seconds=100.0, start=4.0)


def test_the_shares_of_what_the_start_leaves():
    assert (LIMIT.end, LIMIT.shared) == pytest.approx((104.8, 90.8))
    assert LIMIT.preparation_seconds == pytest.approx(9.08)
    assert LIMIT.baseline_seconds == pytest.approx(18.16)
    assert LIMIT.preflight_until == pytest.approx(32.16)


@cases("""
preparation | baseline | confirmation | end
# Half as long again as expected, a tenth at least; others have half.
0.0 | 1.0 | 10.0 | 89.8
0.0 | 1.0 | 0.1 | 95.72
0.0 | 1.0 | 90.0 | 60.4
9.08 | 99.0 | 90.0 | 86.64
""")
def test_the_search_leaves_time_for_new_seeds(preparation, baseline, confirmation, end):
    limit = replace(LIMIT, preparation=preparation)
    assert limit.search_end(baseline, confirmation) == pytest.approx(end)


@pytest.mark.parametrize("now, until", [(16.0, 41.0), (90.0, 90.0 + 90.8 / 30), (104.0, 104.8)])
def test_a_trial_has_a_third_of_what_is_left(now, until):
    assert LIMIT.trial_until(now, search_end=91.0) == pytest.approx(until)


def test_a_start_that_takes_the_limit_leaves_nothing():
    assert Deadline(0.0, 10.0, start=12.0).shared == 0.0
    assert Deadline(0.0, 1000.0, start=60.0).end == 985.0
    assert (pilot_seconds(None), pilot_seconds(30.0)) == pytest.approx((10.0, 2.0))
    # 10 s late with the 3.2 s that MLflow takes.
    assert LIMIT.allows_mlflow(116.0)
    assert not LIMIT.allows_mlflow(117.0)


@cases("""
start | trials | limit
3.0 | [] | 20.0
12.0 | [40, 40] | 107.0
""")
def test_the_least_limit(start, trials, limit):
    assert least_limit(start, trials) == pytest.approx(limit)


def test_what_goes_on_is_the_running_trial():
    lines = []
    ticker = Ticker(lines.append)
    progress = Progress(ticker, plan(), SEARCHED[:2], lines.append)
    progress.trial_begins(SEARCHED[1], lambda: "step 30 of 60, val/loss 0.21")
    assert "step 30 of 60, val/loss 0.21" in ticker.doing()
    assert ticker.doing().startswith("1 of ")
    progress.finished(SEARCHED[1])
    assert "step 30" not in ticker.doing()
    # The heads of the columns, and the trial.
    assert len(lines) == 2
