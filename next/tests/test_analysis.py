"""From records written by hand to the typed result: each state of the question of time."""

import dataclasses
import math

import pytest

from bstune.core.question import Question
from bstune.core.records import Budget, Record, Target
from bstune.core.space import Configuration, Space
from bstune.study.advice import followed
from bstune.study.analysis import Study, analyse, is_near_trials
from bstune.study.deadline import Deadline
from bstune.study.field import NORMAL_95
from bstune.study.plan import Plan
from bstune.study.result import ResultWarning

TARGET = Target("val/loss", 0.1, "min")


def study(**changes):
    fixed = {
        "question": Question(TARGET, Budget(steps=1000)),
        "space": Space(8, 1024, 1e-3, 100.0, "sqrt", (64, 0.4)),
        "baseline": Configuration(batch_size=64, lr=0.4),
        "trials": 4,
        "seeds": 3,
        "seed": 0,
        "step_time": lambda batch_size: 1e-3,
    }
    plan = Plan(**(fixed | changes))
    return Study(plan, "digits", "digits", "cpu", 1, command=str, train="{} at {}".format)


def law(batch_size, lr=None):
    """S(B) at the best rate: 40 (1 + 100/B)."""
    return round(40 * (1 + 100 / batch_size))


def record(number, place, batch_size, lr, steps, status="reached", **changes):
    role = {"baseline": "baseline", "search": "search", "seed": "new seed"}[place.split("/")[0]]
    value = 0.09 if status == "reached" else 0.3
    fields = {
        "number": number,
        "place": place,
        "role": role,
        "batch_size": batch_size,
        "lr": lr,
        "seed": number,
        "max_steps": 1000,
        "status": status,
        "steps": steps,
        "steps_low": steps - 1,
        "seconds_per_step": 1e-3,
        "train_seconds": 1e-3 * steps,
        "history": ((max(steps // 4, 1), 1.0), (steps, value)),
    }
    return Record(**(fields | changes))


SIZES = (16, 32, 128, 256, 512)


def searched():
    """The baseline at a poor rate, and the search at the best ones."""
    records = [record(0, "baseline", 64, 0.4, 300)]
    for place, size in enumerate(SIZES):
        records.append(record(place + 1, f"search/{place}", size, 0.1 * math.sqrt(size), law(size)))
    return records


def seed_run(records, number, index, steps, status="reached"):
    """Add a run on a new seed of trial ``number``."""
    of = records[number]
    place = f"seed/{number}/{index}"
    fields = {"repeats": number, "seed": 100 + index}
    records.append(record(len(records), place, of.batch_size, of.lr, steps, status, **fields))


def with_seeds(best_steps, baseline_steps, status="reached", baseline_status="reached"):
    """New seeds of the search's best, batch size 512, and of the baseline."""
    records = searched()
    for index, steps in enumerate(best_steps):
        seed_run(records, 5, index, steps, status)
    for index, steps in enumerate(baseline_steps):
        seed_run(records, 0, index, steps, baseline_status)
    return records


BEST = (48, 50, 47)
# The best is 6.25 times as fast.
SWITCH = with_seeds(BEST, (300, 310, 290))
BY_STEPS = Question(TARGET, Budget(steps=1000), "steps")


def test_switch():
    result = analyse(study(), SWITCH)
    assert result.verdict == "switch"
    assert (result.best.batch_size, result.baseline.batch_size) == (512, 64)
    assert result.speedup.value == pytest.approx(300 / 48)
    assert result.speedup.low < 300 / 48 < result.speedup.high
    assert result.best.seconds == pytest.approx(0.048)
    assert (result.configurations, result.trials) == (5, 12)
    low, high = result.near_optimal
    assert low <= 512 <= high
    assert result.train_command == f"512 at {result.best.lr}"
    assert result.other is None
    assert result.next is None
    # S(B) = 40 (1 + 100/B).
    assert result.critical.interval.low < 100 < result.critical.interval.high
    assert result.lr_exponent.low < 0.5 < result.lr_exponent.high
    assert "sqrt" in result.allowed_rules
    assert "none" not in result.allowed_rules
    # Nothing else takes fewer steps or seconds.
    assert result.fewest_steps is result.faster is None
    # (reached + 1/2)/(n + 1). The baseline's first run counts, the search's do not: its winner was
    # chosen because it had reached the target.
    assert result.best.predicted_share == pytest.approx(3.5 / 4, abs=0.02)
    assert result.baseline.predicted_share == pytest.approx(4.5 / 5, abs=0.02)
    assert type(result).model_validate_json(result.model_dump_json()) == result


NOTHING_REACHED = [record(0, "baseline", 64, 0.4, 1000, "missed")]


@pytest.mark.parametrize("records", [SWITCH, NOTHING_REACHED], ids=["reached", "not reached"])
def test_what_a_preflight_found_is_the_first_warning(records):
    found = ResultWarning(kind="schedule", fix="return it", state="it moves 10 times")
    result = analyse(dataclasses.replace(study(), warnings=(found,)), records)
    assert result.warnings[0] == found


def test_nothing_is_said_of_sizes_that_do_not_fit():
    short = record(99, "search/9", 700, 2.0, 9, "out of memory")
    result = analyse(study(), [*SWITCH, short])
    assert max(point.batch_size for point in result.curve) == 512
    assert (result.near_optimal[1], result.searched.high) == (512, 512)


def test_keep():
    result = analyse(study(), with_seeds((300, 299, 301), (300, 301, 299)))
    assert result.verdict == "keep"
    assert (result.best.batch_size, result.other.batch_size) == (64, 512)
    assert result.speedup.high < 1.25
    assert result.train_command is None


def test_not_yet_names_the_seeds_that_settle_it():
    result = analyse(study(), with_seeds((200, 300, 400), (250, 320, 420)))
    assert result.verdict == "not yet"
    assert result.speedup.low < 1 < 1.25 < result.speedup.high
    assert result.next.startswith(("{'seeds'", "{'trials'"))
    assert result.train_command is None


def test_use_where_there_is_no_baseline():
    records = [one for one in with_seeds(BEST, ()) if one.role != "baseline"]
    result = analyse(study(baseline=None), records)
    assert (result.verdict, result.best.batch_size, result.speedup) == ("use", 512, None)
    assert result.train_command is not None


def test_a_best_that_misses_on_new_seeds_is_not_told_to_be_used():
    records = with_seeds((900, 900, 48), (300, 310, 290), status="missed")
    result = analyse(study(), records)
    assert (result.verdict, result.speedup, result.train_command) == ("not yet", None, None)
    # The next best is up for new seeds.
    assert (result.best.batch_size, result.best.runs) == (256, 0)
    # Where there is no other, what is known to reach is the best so far.
    result = analyse(study(), [one for one in records if not 1 <= one.number <= 4])
    assert (result.verdict, result.speedup, result.train_command) == ("not yet", None, None)
    assert result.best == result.baseline


def test_what_is_compared_ran_on_the_same_seeds():
    result = analyse(study(), with_seeds((50, 48, 47), (300,)))
    assert (result.best.seeds, result.baseline.seeds) == ((100,), (100,))
    assert result.speedup.value == pytest.approx(300 / 50)


def of_baseline(*runs):
    """New seeds of the search's best, 68 steps each, and of the baseline: (status, steps)."""
    records = with_seeds((68, 68, 68), ())
    for index, (status, steps) in enumerate(runs):
        seed_run(records, 0, index, steps, status)
    return records


@pytest.mark.parametrize(
    ("runs", "steps", "reached", "limit"),
    [
        # Two of three were stopped: the one that reached does not stand for them.
        ([("reached", 186), ("pruned", 434), ("pruned", 434)], 434, 1, "stopped"),
        ([("pruned", 434)] * 3, 434, 0, "stopped"),
        ([("missed", 1000)] * 3, 1000, 0, "budget"),
        # One that diverges would not have reached it in all that it was allowed.
        ([("reached", 186), ("pruned", 434), ("diverged", 3)], 434, 1, "stopped"),
        ([("diverged", 3)] * 3, 1000, 0, "failed"),
        ([("out of memory", 3)] * 3, 1000, 0, "failed"),
    ],
)
def test_runs_that_did_not_reach_count_in_the_speedup(runs, steps, reached, limit):
    result = analyse(study(), of_baseline(*runs))
    assert result.verdict == "switch"
    assert (result.baseline.steps, result.baseline.reached) == (steps, reached)
    assert result.baseline_limit == limit
    assert result.speedup.low < result.speedup.value == pytest.approx(steps / 68)
    assert (result.speedup.at_least, result.speedup.high) == (True, None)
    assert result.baseline.steps_high is result.baseline.seconds_high is None


def test_steps_lie_in_the_middle_between_evaluations():
    """46 stated for 28 true, where evaluations lie 20 steps apart."""
    records = with_seeds((46, 46, 46), (300, 310, 290))
    apart = [one.model_copy(update={"steps_low": one.steps - 20}) for one in records]
    near, far = analyse(study(), records), analyse(study(), apart)
    assert (near.best.steps, far.best.steps) == (46, 36.5)
    assert far.best.runs_steps == (36.5,) * 3
    assert far.best.steps_low <= 28 < near.best.steps_low
    assert far.speedup.value == pytest.approx(290.5 / 36.5)
    # A step of 1 ms that was trained is 5% and 3% uncertain beside what steps leave open.
    of_steps = math.log(far.best.steps_high / far.best.steps)
    trained = analyse(study(step_time=None), apart).best
    of_seconds = math.log(trained.seconds_high / trained.seconds)
    error = math.hypot(trained.step_seconds_error, 0.05, 0.03)
    assert of_seconds == pytest.approx(math.hypot(of_steps, NORMAL_95 * error), rel=1e-2)
    assert far.best.seconds_high / far.best.seconds == pytest.approx(math.exp(of_steps))
    assert far.speedup.high / far.speedup.low > near.speedup.high / near.speedup.low


@pytest.mark.parametrize(
    ("allowed", "budget", "share"),
    [
        (1000, 1000, 3.5 / 4),
        # Less than twice the steps that are predicted tells where that is the whole budget.
        (70, 70, 3.5 / 4),
        (70, 4000, 0.5),
    ],
)
def test_which_new_seeds_tell_the_share(allowed, budget, share):
    records = []
    for one in SWITCH:
        steps = allowed if one.role == "new seed" else 1000
        records.append(one.model_copy(update={"max_steps": steps}))
    result = analyse(study(question=Question(TARGET, Budget(steps=budget))), records)
    assert result.best.predicted_share == pytest.approx(share, abs=0.02)


@pytest.mark.parametrize(
    ("batch_size", "lr", "is_near"),
    [
        # Trials that reached have 0.4 and 1.6 at batch size 64, whose rule's rate is 0.4.
        (64, 0.21, True),
        (64, 0.19, False),
        # The rule's rate is 0.8 there.
        (256, 6.2, True),
        (256, 6.6, False),
    ],
)
def test_rates_that_a_trial_speaks_for(batch_size, lr, is_near):
    records = [record(0, "baseline", 64, 0.4, 300), record(1, "search/0", 64, 1.6, 90)]
    records.append(record(2, "search/1", 64, 50.0, 90, "pruned"))
    assert is_near_trials(study().plan.space, batch_size, lr, records) == is_near


def test_one_batch_size_shows_no_rule():
    records = [record(0, "baseline", 64, 0.4, 200)]
    for number, lr in enumerate((0.5, 1.0, 2.0), start=1):
        records.append(record(number, f"search/{number - 1}", 64, lr, 100 + 10 * number))
    only = study(space=Space(64, 64, 1e-3, 100.0, "sqrt", (64, 0.4)))
    result = analyse(only, records)
    assert result.lr_exponent is None
    assert result.allowed_rules == ()
    assert result.critical.interval.value is None


def off_the_best_rate():
    """Trials four times below and above the best rates, so that these are known."""
    records = []
    for number, size in enumerate((32, 128, 256), start=20):
        for factor, number_of in ((0.25, number), (4.0, number + 10)):
            place = f"search/{number_of}"
            lr = 0.1 * math.sqrt(size) * factor
            records.append(record(number_of, place, size, lr, round(2.2 * law(size))))
    return records


@pytest.mark.parametrize(
    ("best_steps", "verdict"),
    [((48, 50, 47), "switch"), ((30, 90, 600), "not yet")],
)
def test_the_rate_alone_gains_less_than_the_best(best_steps, verdict):
    records = with_seeds(best_steps, (200, 210, 190)) + off_the_best_rate()
    result = analyse(study(trials=12), records)
    alone = result.lr_alone
    assert result.verdict == verdict
    # The baseline takes 200 steps, and the best rate at its batch size law(64) = 102.
    assert alone.speedup == pytest.approx(200 / 102, rel=0.25)
    assert 1 < alone.speedup < result.speedup.value


def test_a_rate_alone_that_would_gain_more_than_the_best_is_left_out():
    of_best = {}
    for steps in (129, 180):
        records = with_seeds((steps,) * 3, (200,) * 3) + off_the_best_rate()
        of_best[steps] = analyse(study(trials=12), records)
    capped = of_best[129]
    assert capped.lr_alone.speedup < capped.speedup.value
    assert of_best[180].lr_alone is None


def test_fewest_steps_beside_the_fastest():
    """A step of batch size 512 takes five times that of 64: a smaller one is faster."""
    slow = study(step_time=lambda batch_size: 1e-3 * (1 + batch_size / 32))
    result = analyse(slow, searched())
    fewest = result.fewest_steps
    assert fewest.batch_size > result.best.batch_size
    # The smallest size that takes at most 1.1 times the least, up to the largest that reached.
    steps = {point.batch_size: point.steps for point in result.curve if point.batch_size <= 512}
    least = min(steps.values())
    assert least < fewest.steps <= 1.1 * least
    assert all(steps[size] > 1.1 * least for size in steps if size < fewest.batch_size)
    assert fewest.steps_low < law(fewest.batch_size) < fewest.steps_high


def test_errors_of_step_times_count_in_time_alone():
    # Step times are off by a fifth, this way or that.
    off = [
        one.model_copy(update={"seconds_per_step": 1e-3 * 1.2 ** (-1) ** one.number})
        for one in SWITCH
    ]
    widths = {}
    for question in (study().plan.question, BY_STEPS):
        plan = study(question=question, step_time=None)
        speedups = [analyse(plan, records).speedup for records in (SWITCH, off)]
        widths[question.objective] = [math.log(one.high / one.low) for one in speedups]
    assert widths["time"][1] > 1.05 * widths["time"][0]
    assert widths["steps"][1] == pytest.approx(widths["steps"][0], rel=1e-6)


def test_before_new_seeds_a_time_limit_asks_for_time():
    result = analyse(study(deadline=Deadline(0.0, 60.0)), searched())
    assert (result.verdict, result.speedup) == ("not yet", None)
    assert (result.best.batch_size, result.best.runs) == (512, 0)
    assert result.next == "{'wall_seconds': 120}"


@pytest.mark.parametrize(
    ("deadline", "now", "baseline_steps", "follows"),
    [
        (Deadline(0.0, 60.0), 50.0, (55, 60, 50), True),
        (Deadline(0.0, 60.0), 61.0, (55, 60, 50), False),
        (Deadline(0.0, 60.0), 50.0, (300, 310, 290), False),
        (None, 50.0, (55, 60, 50), False),
    ],
)
def test_a_time_limit_is_used_up_before_an_answer_is_left_open(
    deadline, now, baseline_steps, follows
):
    open_one = study(deadline=deadline)
    result = analyse(open_one, with_seeds(BEST, baseline_steps))
    more = followed(open_one.plan, result, now)
    assert (more is not None) == follows
    if follows:
        assert more.seeds == result.next_options["seeds"] > 3


@pytest.mark.parametrize(
    ("others", "limit"),
    # The start took 6 s and so will the answer, the baseline 50 s: a second trial as long.
    [([], math.ceil(6 + 2 * 50 + 1.3 * 6)), ([1], 80)],
)
def test_a_time_limit_that_left_trials_out_asks_for_time(others, limit):
    stopped = {"status": "pruned", "train_seconds": 50.0}
    records = [record(0, "baseline", 64, 0.4, 100, **stopped)]
    records += [record(number, "search/0", 32, 0.4, 100, **stopped) for number in others]
    result = analyse(study(deadline=Deadline(0.0, 40.0, start=6.0)), records)
    assert (result.verdict, result.next) == ("not yet", f"{{'wall_seconds': {limit}}}")
    assert (result.missing is None) == bool(others)


def missed(number, place, values, status="missed"):
    history = tuple(zip((100, 250, 500, 1000), values, strict=True))
    return record(number, place, 64, 0.4, 1000, status, history=history)


@pytest.mark.parametrize(
    ("values", "status", "trend"),
    [
        ((0.9, 0.3, 0.3, 0.3), "missed", "flat"),
        ((0.9, 0.5, 0.5, math.nan), "diverged", "diverged"),
    ],
)
def test_nothing_reached(values, status, trend):
    records = [missed(0, "baseline", values, status), missed(1, "search/0", values, status)]
    result = analyse(study(), records)
    assert (result.verdict, result.reached, result.best.runs) == ("not yet", False, 0)
    assert result.closest.trend == trend
    assert result.closest.value == min(value for value in values if not math.isnan(value))
    assert result.easier_goal >= result.closest.value
    assert result.curve == ()
    assert result.critical is None


LARGER = {"budget.steps": 4000, "study": "digits-2"}


@pytest.mark.parametrize(
    ("values", "steps", "trend", "options"),
    [
        # Of a budget of 1,000 steps one trial ran half; none did.
        ((0.9, 0.7, 0.5), (500, 200, 200), "still falling", LARGER),
        ((0.9, 0.7, 0.5), (499, 200, 200), "stopped early", {"trials": 8}),
        ((0.9, 0.5, 0.5), (500, 200, 200), "flat", None),
        # The one that came near its budget did something else.
        ((0.9, 0.7, 0.5), (1000, 200, 200), "stopped early", {"trials": 8}),
    ],
)
def test_a_larger_budget_is_for_trials_that_came_near_it(values, steps, trend, options):
    records = []
    for number, count in enumerate(steps):
        at = (count // 4, count // 2, count)
        history = tuple(zip(at, (0.9, 0.5, 0.5) if count == 1000 else values, strict=True))
        place = f"search/{number}"
        records.append(record(number, place, 64, 0.4, count, "pruned", history=history))
    result = analyse(study(), records)
    assert result.closest.trend == trend
    assert result.next == (None if options is None else str(options))


@pytest.mark.parametrize(("low", "is_asked"), [(0.1, True), (0.4, False)])
def test_lower_rates_are_asked_for_where_there_are_some(low, is_asked):
    records = [missed(0, "search/0", (0.9, 0.5, 0.5, math.nan), "diverged")]
    space = Space(8, 1024, low, 100.0, "sqrt", (64, 0.4))
    result = analyse(study(space=space, baseline=None), records)
    assert (result.next is not None) == is_asked


def test_trials_without_any_metric_are_not_yet():
    """All diverged before their first evaluation, or there was no time for one."""
    values = {"history": ((1, math.nan),), "message": "val/loss is nan"}
    diverged = record(0, "baseline", 64, 0.4, 1, "diverged", **values)
    for records in ([diverged], []):
        result = analyse(study(), records)
        assert (result.verdict, result.closest) == ("not yet", None)
        assert result.missing


def test_the_curve_has_no_verdict_and_no_best():
    """B_crit 100, by trials of one octave each but the first and the last two of seven."""
    plan = study(question=Question(TARGET, Budget(steps=1000), "curve"), trials=5)
    result = analyse(plan, SWITCH)
    assert (result.verdict, result.best, result.baseline, result.train_command) == (None,) * 4
    assert result.reached
    assert result.critical.interval.low < 100 < result.critical.interval.high
    assert result.critical.linear_below == pytest.approx(result.critical.interval.value / 9)
    searched = result.searched
    assert (searched.low, searched.high) == (8, 1024)
    # 8 to 16 and 512 to 1,024 but 512 itself, which belongs to the last octave; 64 is the baseline.
    assert (searched.octaves, searched.reached, searched.to_add) == (7, 6, (11,))
    assert result.next == "{'trials': 10}"
    nothing = analyse(plan, [missed(0, "baseline", (0.9, 0.7, 0.5, 0.3))])
    assert (nothing.verdict, nothing.searched) == ("not yet", None)


# Steps fall over all sizes; a step takes as long as its batch.
QUICK_SMALL_SIZE = study(question=BY_STEPS, step_time=lambda batch_size: 1e-5 * batch_size)


def test_the_fewest_steps_are_not_the_least_seconds():
    """In seconds the baseline would be the faster: its step takes an eighth."""
    result = analyse(QUICK_SMALL_SIZE, SWITCH)
    assert (result.verdict, result.best.batch_size) == ("switch", 512)
    assert result.speedup.value == pytest.approx(300 / 48)
    assert result.best.seconds == pytest.approx(48 * 512e-5)
    # S(B) B is least at the smallest size: 290 steps at 16 for 48 at 512.
    assert result.faster.batch_size == 16
    assert result.faster.seconds == pytest.approx(290 * 16e-5, rel=0.1)
    assert result.faster.speedup == pytest.approx(48 * 512 / (290 * 16), rel=0.15)


@pytest.mark.parametrize(
    ("smallest", "of_trial", "of_seeds", "is_told"),
    [
        # A step's time grows as B. The fastest is the baseline; another one, slower than its new
        # seeds are; another one, faster than these.
        (64, 95, (125, 127, 124), False),
        (16, 300, (60, 62, 59), False),
        (16, 300, (110, 112, 109), True),
    ],
)
def test_a_baseline_that_is_faster_is_not_predicted_but_measured(
    smallest, of_trial, of_seeds, is_told
):
    records = [one for one in with_seeds(BEST, of_seeds) if one.batch_size >= smallest]
    baseline = records[0].model_copy(update={"steps": of_trial, "steps_low": of_trial - 1})
    result = analyse(QUICK_SMALL_SIZE, [baseline, *records[1:]])
    assert result.best.batch_size == 512
    assert (result.faster is not None) == is_told


def test_of_sizes_that_tie_in_steps_the_smallest_is_the_best():
    records = searched()
    records.append(record(6, "search/5", 480, 2.2, 49))
    for index in range(3):
        seed_run(records, 6, index, 49)
        seed_run(records, 5, index, 48)
    assert analyse(study(question=BY_STEPS, baseline=None), records).best.batch_size == 480
    assert analyse(study(baseline=None), records).best.batch_size == 512


def test_where_schedules_end_their_length_and_the_predicted_share_are_told():
    question = Question(TARGET, Budget(steps=1000), schedule_ends=True)
    ends = dataclasses.replace(study(question=question), train="{} at {} in {}".format)
    shares = {}
    for length in (48, 200):
        records = []
        for record in SWITCH:
            of_baseline = record.role == "baseline" or record.repeats == 0
            steps = 1000 if of_baseline else max(length, record.steps)
            records.append(record.model_copy(update={"schedule_steps": steps}))
        result = analyse(ends, records)
        assert (result.verdict, result.best.schedule_steps) == ("switch", length)
        assert result.baseline.schedule_steps == 1000
        assert result.train_command.endswith(f" in {length}")
        shares[length] = result.best.predicted_share
    # Three of three reached it both times, but the first ones at their very end.
    assert 0.5 < shares[48] < shares[200] < 1.0


def test_what_a_budget_of_seconds_trains_is_told_in_steps():
    tau = study().plan.step_time
    question = Question(TARGET, Budget(steps=1, seconds=0.5), budget_step_time=tau)
    told = dataclasses.replace(study(question=question), train="{} at {} in {}".format)
    result = analyse(told, SWITCH)
    assert result.best.train_steps == 500
    assert result.train_command.endswith(" in 500")
