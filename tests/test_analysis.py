"""From records written by hand to the typed result: each state of the question of time."""

import dataclasses
import math
from pathlib import Path

import pytest
import search_records
from refusals import cases

from bstune.core.question import Question
from bstune.core.records import Budget, Target
from bstune.core.space import Configuration, Space
from bstune.study.advice import plan_with_more_seeds
from bstune.study.analysis import StudyFacts, analyse, is_near_trials
from bstune.study.commands import Commands
from bstune.study.deadline import Deadline
from bstune.study.machine import RECORDED
from bstune.study.plan import Plan
from bstune.study.prepare import OfProject
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
    commands = Commands("command", str, "{} at {}".format)
    return StudyFacts(plan, "digits", "digits", RECORDED, OfProject(), commands, Path())


def law(batch_size):
    """S(B) at the best rate: 40 (1 + 100/B)."""
    return round(40 * (1 + 100 / batch_size))


def record(number, place, batch_size, lr, steps, status="reached", **changes):
    value = 0.09 if status == "reached" else 0.3
    fields = {
        "place": place,
        "batch_size": batch_size,
        "lr": lr,
        "max_steps": 1000,
        "steps": steps,
        "steps_low": steps - 1,
        "seconds_per_step": 1e-3,
        "train_seconds": 1e-3 * steps,
        "history": ((max(steps // 4, 1), 1.0), (steps, value)),
    }
    return search_records.record(number, status, **(fields | changes))


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


def with_seeds(best_steps, baseline_steps, status="reached"):
    """New seeds of the search's best, batch size 512, and of the baseline."""
    records = searched()
    for index, steps in enumerate(best_steps):
        seed_run(records, 5, index, steps, status)
    for index, steps in enumerate(baseline_steps):
        seed_run(records, 0, index, steps)
    return records


BEST = (48, 50, 47)
# The best is 6.25 times as fast.
SWITCH = with_seeds(BEST, (300, 310, 290))
WARNING = ResultWarning(kind="schedule", fix="return it", state="it moves 10 times")
TOLD = OfProject(warnings=[WARNING])


def test_switch():
    short = record(99, "search/9", 700, 2.0, 9, "out of memory")
    result = analyse(dataclasses.replace(study(), project=TOLD), [*SWITCH, short])
    pair = result.best.batch_size, result.baseline.batch_size
    assert (result.verdict, *pair) == ("switch", 512, 64)
    assert result.speedup.low < result.speedup.value == pytest.approx(300 / 48)
    assert result.best.seconds == pytest.approx(0.048)
    assert (result.configurations, result.trials) == (5, 13)
    # Nothing is said of sizes that do not fit.
    sizes = result.near_optimal[1], result.searched.high, result.curve[-1].batch_size
    assert sizes == (512, 512, 512)
    assert result.warnings[0] == WARNING
    assert result.train_command == f"512 at {result.best.lr}"
    assert result.other is result.next is result.fewest_steps is result.faster is None
    # S(B) = 40 (1 + 100/B).
    assert result.critical.interval.low < 100 < result.critical.interval.high
    assert result.lr_exponent.low < 0.5 < result.lr_exponent.high
    assert "sqrt" in result.allowed_rules
    assert "none" not in result.allowed_rules
    # (reached + 1/2)/(n + 1). The baseline's first run counts, the search's do not: its winner was
    # chosen because it had reached the target.
    shares = result.best.predicted_share, result.baseline.predicted_share
    assert shares == pytest.approx((3.5 / 4, 4.5 / 5), abs=0.02)
    assert type(result).model_validate_json(result.model_dump_json()) == result


def test_runs_on_common_seeds_are_compared():
    result = analyse(study(), with_seeds(BEST, (300, 310, 290, 900)))
    assert (result.best.runs, result.baseline.runs) == (3, 3)
    assert result.speedup.value == pytest.approx(300 / 48)


@cases("""
best_steps | baseline_steps | verdict | best | other
[300, 299, 301] | [300, 301, 299] | keep | 64 | 512
[200, 300, 400] | [250, 320, 420] | not yet | 512 | null
""")
def test_what_new_seeds_do_not_settle(best_steps, baseline_steps, verdict, best, other):
    result = analyse(study(), with_seeds(best_steps, baseline_steps))
    assert (result.verdict, result.best.batch_size, result.train_command) == (verdict, best, None)
    assert (result.other and result.other.batch_size) == other
    assert (result.next is None) == (verdict == "keep")


def test_a_best_that_misses_on_new_seeds_is_not_told_to_be_used():
    records = with_seeds((900, 900, 48), (300, 310, 290), status="missed")
    result = analyse(study(), records)
    assert (result.verdict, result.speedup, result.train_command) == ("not yet", None, None)
    # The next best is up for new seeds.
    assert (result.best.batch_size, result.best.runs) == (256, 0)
    # Where there is no other, what is known to reach is the best so far.
    result = analyse(study(), [one for one in records if not 1 <= one.number <= 4])
    assert (result.verdict, result.best) == ("not yet", result.baseline)


def test_what_is_compared_ran_on_the_same_seeds():
    result = analyse(study(), with_seeds((50, 48, 47), (300,)))
    assert (result.best.seeds, result.baseline.seeds) == ((100,), (100,))
    assert result.speedup.value == pytest.approx(300 / 50)


@cases("""
runs | steps | reached | limit
# Two of three were stopped: the one that reached does not stand for them.
[[reached, 186], [pruned, 434], [pruned, 434]] | 434 | 1 | stopped
[[missed, 1000], [missed, 1000], [missed, 1000]] | 1000 | 0 | budget
# One that diverges would not have reached it in all that it was allowed.
[[diverged, 3], [diverged, 3], [diverged, 3]] | 1000 | 0 | failed
""")
def test_runs_that_did_not_reach_count_in_the_speedup(runs, steps, reached, limit):
    records = with_seeds((68, 68, 68), ())
    for index, (status, ran) in enumerate(runs):
        seed_run(records, 0, index, ran, status)
    result = analyse(study(), records)
    assert result.verdict == "switch"
    assert (result.baseline.steps, result.baseline.reached) == (steps, reached)
    assert result.baseline_limit == limit
    assert result.speedup.low < result.speedup.value == pytest.approx(steps / 68)
    assert (result.speedup.at_least, result.speedup.high) == (True, None)
    assert result.baseline.steps_high is result.baseline.seconds_high is None


def test_steps_lie_in_the_middle_between_evaluations():
    records = with_seeds((46, 46, 46), (300, 310, 290))
    apart = [one.model_copy(update={"steps_low": one.steps - 20}) for one in records]
    found = analyse(study(), apart)
    assert (found.best.steps, found.best.runs_steps) == (36.5, (36.5,) * 3)
    # The error of an evaluation is the interval's.
    assert found.best.steps_low <= 28
    assert found.speedup.value == pytest.approx(290.5 / 36.5)


def test_rates_that_a_trial_speaks_for():
    """Those that reached have 0.4 and 1.6 at batch size 64, which by the rule are 0.8 and 3.2."""
    records = [record(0, "baseline", 64, 0.4, 300), record(1, "search/0", 64, 1.6, 90)]
    space = study().plan.space
    near = [is_near_trials(space, 256, lr, records) for lr in (0.39, 0.41, 6.3, 6.5)]
    assert near == [False, True, True, False]


# It gains no more than the best; nothing is said where it is predicted to.
@pytest.mark.parametrize("best, is_told", [(48, True), (129, True), (180, False)])
def test_the_rate_alone_gains_less_than_the_best(best, is_told):
    """The best rate at the baseline's batch size takes law(64) steps, 102, for 200."""
    records = with_seeds((best,) * 3, (200,) * 3)
    # Trials four times below and above the best rates, so that these are known.
    for number, size in enumerate((32, 128, 256) * 2, start=20):
        lr = 0.1 * math.sqrt(size) * (0.25 if number < 23 else 4.0)
        records.append(record(number, f"search/{number}", size, lr, round(2.2 * law(size))))
    result = analyse(study(trials=12), records)
    assert (result.lr_alone is not None) == is_told
    if is_told:
        assert 1 < result.lr_alone.speedup < result.speedup.value
        assert best != 48 or result.lr_alone.speedup == pytest.approx(200 / 102, rel=0.25)


def test_fewest_steps_beside_the_fastest():
    """A step of batch size 512 takes five times that of 64: a smaller one is faster."""
    result = analyse(study(step_time=lambda size: 1e-3 * (1 + size / 32)), searched())
    assert result.fewest_steps.batch_size > result.best.batch_size
    # The smallest size that takes at most 1.1 times the least, up to the largest that reached.
    steps = {point.batch_size: point.steps for point in result.curve if point.batch_size <= 512}
    near = [size for size in steps if steps[size] <= 1.1 * min(steps.values())]
    assert result.fewest_steps.batch_size == round(min(near))


@cases("""
seconds | now | follows
60.0 | 50.0 | true
60.0 | 61.0 | false
null | 50.0 | false
""")
def test_a_time_limit_is_used_up_before_an_answer_is_left_open(seconds, now, follows):
    open_one = study(deadline=Deadline(0.0, seconds) if seconds else None)
    result = analyse(open_one, with_seeds(BEST, (55, 60, 50)))
    more = plan_with_more_seeds(open_one.plan, result, now)
    assert (more and more.seeds) == (result.next_options["seeds"] if follows else None)


def test_a_time_limit_that_left_trials_out_asks_for_time():
    baseline = record(0, "baseline", 64, 0.4, 100, "pruned", train_seconds=50.0)
    result = analyse(study(deadline=Deadline(0.0, 40.0, start=6.0)), [baseline])
    # The start took 6 s and so will the answer, the baseline 50 s: a second trial as long.
    limit = math.ceil(6 + 2 * 50 + 1.3 * 6)
    assert (result.verdict, result.next) == ("not yet", f"{{'wall_seconds': {limit}}}")
    assert result.missing


def missed(text, status="missed"):
    """A trial that did not reach the target, with these evaluations."""
    ran = search_records.history(text)
    return record(0, "baseline", 64, 0.4, ran[-1][0], status, history=ran)


# Lower rates are asked for where there are some.
@pytest.mark.parametrize("low, is_asked", [(0.1, True), (0.4, False)])
def test_nothing_reached(low, is_asked):
    space = Space(8, 1024, low, 100.0, "sqrt", (64, 0.4))
    plan = dataclasses.replace(study(space=space, baseline=None), project=TOLD)
    result = analyse(plan, [missed("100 0.9, 250 0.5, 500 0.6, 1000 nan", "diverged")])
    assert (result.verdict, result.reached, result.best.runs) == ("not yet", False, 0)
    assert (result.closest.trend, result.closest.value) == ("diverged", 0.5)
    assert result.easier_goal >= 0.5
    assert (result.curve, result.critical, result.warnings) == ((), None, (WARNING,))
    assert (result.next is not None) == is_asked


@cases("""
values | longest | trend | options
# Of a budget of 1,000 steps one trial ran half; none did.
[0.9, 0.7, 0.5] | 500 | still falling | {budget.steps: 4000, study: digits-2}
[0.9, 0.7, 0.5] | 499 | stopped early | {trials: 8}
[0.9, 0.5, 0.5] | 500 | flat | {}
""")
def test_a_larger_budget_is_for_trials_that_came_near_it(values, longest, trend, options):
    records = []
    for number, count in enumerate((longest, 200, 200)):
        history = tuple(zip((count // 4, count // 2, count), values, strict=True))
        place = f"search/{number}"
        records.append(record(number, place, 64, 0.4, count, "pruned", history=history))
    result = analyse(study(), records)
    assert (result.closest.trend, result.next_options or {}) == (trend, options)


def test_trials_without_any_metric_are_not_yet():
    """All diverged before their first evaluation, or there was no time for one."""
    diverged = record(0, "baseline", 64, 0.4, 1, "diverged", history=(), message="val/loss is nan")
    for records in ([diverged], []):
        result = analyse(study(), records)
        assert (result.verdict, result.closest) == ("not yet", None)
        assert result.missing


def test_the_curve_has_no_verdict_and_no_best():
    """B_crit 100, by trials of one octave each but the first and the last two of seven."""
    plan = study(question=Question(TARGET, Budget(steps=1000), "curve"), trials=5)
    result = analyse(plan, SWITCH)
    assert (result.verdict, result.best, result.baseline, result.train_command) == (None,) * 4
    assert result.critical.interval.low < 100 < result.critical.interval.high
    # 8 to 16 and 512 to 1,024 but 512 itself, which belongs to the last octave; 64 is the baseline.
    searched = result.searched
    assert (searched.octaves, searched.reached, searched.unreached) == (7, 6, (11,))
    assert result.next == "{'trials': 10}"
    nothing = analyse(plan, [missed("100 0.9, 1000 0.3")])
    assert (nothing.verdict, nothing.searched) == ("not yet", None)


# Steps fall over all sizes; a step takes as long as its batch.
QUICK_SMALL_SIZE = study(
    question=Question(TARGET, Budget(steps=1000), "steps"), step_time=lambda size: 1e-5 * size
)


def test_the_fewest_steps_are_not_the_least_seconds():
    """In seconds the baseline would be the faster: its step takes an eighth."""
    result = analyse(QUICK_SMALL_SIZE, SWITCH)
    assert (result.verdict, result.best.batch_size) == ("switch", 512)
    assert result.speedup.value == pytest.approx(300 / 48)
    # S(B) B is least at the smallest size: 290 steps at 16 for 48 at 512.
    assert result.faster.batch_size == 16
    assert result.faster.speedup == pytest.approx(48 * 512 / (290 * 16), rel=0.15)
    # Another one is predicted to be faster, but slower than the baseline's new seeds are.
    result = analyse(QUICK_SMALL_SIZE, with_seeds(BEST, (60, 62, 59)))
    assert (result.best.batch_size, result.faster) == (512, None)


@pytest.mark.parametrize("objective, batch_size", [("steps", 480), ("time", 512)])
def test_without_a_baseline_the_best_is_used_of_sizes_that_tie_in_steps_the_smallest(
    objective, batch_size
):
    records = [one for one in with_seeds(BEST, ()) if one.role != "baseline"]
    records.append(record(9, "search/5", 480, 2.2, 49))
    for index in range(3):
        run = record(10 + index, f"seed/9/{index}", 480, 2.2, 49)
        records.append(run.model_copy(update={"repeats": 9, "seed": 100 + index}))
    question = Question(TARGET, Budget(steps=1000), objective)
    result = analyse(study(question=question, baseline=None), records)
    assert (result.verdict, result.speedup) == ("use", None)
    assert result.best.batch_size == batch_size
    assert result.train_command == f"{batch_size} at {result.best.lr}"


def test_where_schedules_end_their_length_and_the_predicted_share_are_told():
    question = Question(TARGET, Budget(steps=1000), schedule_ends=True)
    commands = Commands("command", str, "{} at {} in {}".format)
    ends = dataclasses.replace(study(question=question), commands=commands)
    records = []
    for one in SWITCH:
        of_baseline = one.role == "baseline" or one.repeats == 0
        steps = 1000 if of_baseline else max(200, one.steps)
        records.append(one.model_copy(update={"schedule_steps": steps}))
    result = analyse(ends, records)
    assert (result.best.schedule_steps, result.baseline.schedule_steps) == (200, 1000)
    assert result.train_command.endswith(" in 200")
    # Three of three reached it, long before its end.
    assert result.best.predicted_share > 0.9
    # What a budget of seconds trains is told in steps.
    seconds = Budget(steps=1, seconds=0.5)
    question = Question(TARGET, seconds, budget_step_time=study().plan.step_time)
    told = dataclasses.replace(ends, plan=study(question=question).plan)
    assert analyse(told, SWITCH).train_command.endswith(" in 500")
