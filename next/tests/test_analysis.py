"""From records written by hand to the typed result: each state of the question of time."""

import dataclasses
import math

import pytest

from bstune.core.question import Question
from bstune.core.records import Budget, Record, Target
from bstune.core.space import Configuration, Space
from bstune.study.analysis import Study, analyse
from bstune.study.plan import Deadline, Plan

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
        "steps_low": int(0.97 * steps),
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


def with_seeds(best_steps, baseline_steps, status="reached", baseline_status="reached"):
    """New seeds of the search's best, batch size 512, and of the baseline."""
    records = searched()
    for number, (size, lr, steps, its_status) in {
        5: (512, 0.1 * math.sqrt(512), best_steps, status),
        0: (64, 0.4, baseline_steps, baseline_status),
    }.items():
        for index, count in enumerate(steps):
            records.append(
                record(
                    len(records),
                    f"seed/{number}/{index}",
                    size,
                    lr,
                    count,
                    its_status,
                    repeats=number,
                )
            )
    return records


def test_switch():
    result = analyse(study(), with_seeds((48, 50, 47), (300, 310, 290)))
    assert result.verdict == "switch"
    assert (result.best.batch_size, result.baseline.batch_size) == (512, 64)
    assert result.speedup.value == pytest.approx(300 / 48)
    assert result.speedup.low < 300 / 48 < result.speedup.high
    assert result.best.seconds == pytest.approx(0.048)
    assert (result.configurations, result.trials) == (5, 12)
    low, high = result.near_optimal
    assert low <= 512 <= high
    assert result.train == f"512 at {result.best.lr}"
    assert result.other is None
    assert result.next is None
    # S(B) = 40 (1 + 100/B).
    assert result.critical.interval.low < 100 < result.critical.interval.high
    assert result.lr_exponent.low < 0.5 < result.lr_exponent.high


def test_keep():
    result = analyse(study(), with_seeds((300, 299, 301), (300, 301, 299)))
    assert result.verdict == "keep"
    assert (result.best.batch_size, result.other.batch_size) == (64, 512)
    assert result.speedup.high < 1.25
    assert result.train is None


def test_not_yet_names_the_seeds_that_settle_it():
    result = analyse(study(), with_seeds((200, 300, 400), (250, 320, 420)))
    assert result.verdict == "not yet"
    assert result.speedup.low < 1 < 1.25 < result.speedup.high
    assert result.next.startswith(("{'seeds'", "{'trials'"))
    assert result.train is None


def test_use_where_there_is_no_baseline():
    records = [one for one in with_seeds((48, 50, 47), ()) if one.role != "baseline"]
    result = analyse(study(baseline=None), records)
    assert (result.verdict, result.best.batch_size, result.speedup) == ("use", 512, None)
    assert result.train is not None


@pytest.mark.parametrize(("status", "limit"), [("missed", "budget"), ("pruned", "stopped")])
def test_a_baseline_that_did_not_reach_the_target(status, limit):
    result = analyse(study(), with_seeds((48, 50, 47), (900, 900, 900), baseline_status=status))
    assert result.verdict == "switch"
    assert result.speedup.at_least
    assert result.speedup.value == pytest.approx(900 / 48)
    assert result.speedup.high is None
    assert (result.baseline.reached, result.baseline.runs, result.baseline_limit) == (0, 3, limit)


def test_a_best_that_misses_on_new_seeds_is_not_told_to_be_used():
    result = analyse(study(), with_seeds((900, 900, 48), (300, 310, 290), status="missed"))
    assert result.verdict != "switch"
    assert result.train is None


def test_where_both_miss_on_new_seeds_nothing_is_compared():
    result = analyse(study(), with_seeds((900,) * 3, (900,) * 3, "missed", "missed"))
    assert (result.verdict, result.speedup) == ("not yet", None)
    assert result.best.reached == result.baseline.reached == 0


@pytest.mark.parametrize("status", ["diverged", "failed", "out of memory"])
def test_a_run_that_would_never_have_reached_counts_as_all_that_it_was_allowed(status):
    result = analyse(study(), with_seeds((48, 50, 47), (3, 3, 3), baseline_status=status))
    assert result.baseline.runs_steps == (1000, 1000, 1000)
    assert result.speedup.value == pytest.approx(1000 / 48)


def test_what_is_compared_ran_on_the_same_seeds():
    records = with_seeds((48, 50, 47), (300,))
    by_number = {one.number: one for one in records}
    shared = next(one for one in records if one.repeats == 0)
    first = next(one for one in records if one.repeats == 5)
    records[records.index(first)] = by_number[first.number].model_copy(update={"seed": shared.seed})
    result = analyse(study(), records)
    assert (result.best.runs, result.baseline.runs) == (1, 1)
    assert result.speedup.value == pytest.approx(300 / 48)


def test_before_new_seeds():
    result = analyse(study(), searched())
    assert (result.verdict, result.speedup) == ("not yet", None)
    assert (result.best.batch_size, result.best.runs) == (512, 0)
    assert result.next is not None


def test_a_time_limit_without_new_seeds_asks_for_time():
    result = analyse(study(deadline=Deadline(0.0, 60.0)), searched())
    assert result.next == "{'wall_seconds': 120}"


def missed(number, place, values, status="missed"):
    history = tuple(zip((100, 250, 500, 1000), values, strict=True))
    return record(number, place, 64, 0.4, 1000, status, history=history)


@pytest.mark.parametrize(
    ("values", "status", "trend"),
    [
        ((0.9, 0.7, 0.5, 0.3), "missed", "still falling"),
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


def test_the_result_comes_back_from_json():
    result = analyse(study(), with_seeds((48, 50, 47), (300, 310, 290)))
    assert type(result).model_validate_json(result.model_dump_json()) == result


def test_all_trials_at_one_end_leave_b_crit_open():
    """Steps fall as 1/B over all sizes: no trial bounds B_crit above."""
    records = []
    for place, size in enumerate((8, 16, 32, 64)):
        records.append(record(place, f"search/{place}", size, 0.1 * math.sqrt(size), 8000 // size))
    result = analyse(study(baseline=None), records)
    assert result.critical.interval.high is None
    assert result.critical.interval.value is None
    assert result.critical.largest == 64


def test_where_schedules_end_their_length_and_the_predicted_share_are_told():
    ends = study()
    question = dataclasses.replace(ends.plan.question, schedule_ends=True)
    plan = dataclasses.replace(ends.plan, question=question)
    ends = dataclasses.replace(ends, plan=plan, train="{} at {} in {}".format)
    records = []
    for record in with_seeds((48, 50, 47), (300, 310, 290)):
        length = 1000 if record.role == "baseline" or record.repeats == 0 else 60
        changes = {"schedule_steps": max(length, record.steps), "max_steps": 1000}
        records.append(record.model_copy(update=changes))
    result = analyse(ends, records)
    assert (result.verdict, result.best.schedule_steps) == ("switch", 60)
    assert result.baseline.schedule_steps == 1000
    # Steps to the target scatter by a tenth at most, and all three runs reached it.
    assert 0.7 < result.best.predicted_share < 1.0
    assert result.train.endswith(" in 60")
    assert analyse(study(), with_seeds((48,), (300,))).best.predicted_share is None
