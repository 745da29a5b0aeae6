"""The wall time that a search may take, what trials cost of it, and what is kept for the end."""

import math
from dataclasses import replace

import optuna
import pytest
from toolbox import make_result

from bstune.core.clock import process_seconds, stopwatch
from bstune.core.records import TrialSpec
from bstune.search.acquisition import MIN_STEPS
from bstune.study.planning.plan import SearchBudget
from bstune.study.planning.wall import (
    BEGAN,
    REPORT_DECISIONS,
    REPORT_SECONDS,
    TAKEN,
    TimeTaken,
    TrialCost,
    WallTime,
    fit_cost,
)

STOPPED = make_result(number=0, status="stopped", steps=50, wall_seconds=2.0)
REACHED = make_result(number=1, resumed_from=0, steps=100, wall_seconds=3.0)
AGAIN = make_result(number=5, replicate_of=1, steps=100, wall_seconds=3.0)
THIRD = make_result(number=2, steps=400, wall_seconds=5.5)
CONTINUED_AGAIN = replace(AGAIN, number=6, resumed_from=5)
SAME_POINT = replace(REACHED, number=4, resumed_from=None, steps=150)
# At another batch size than the winner.
BASELINE = make_result(number=3, batch_size=2 * REACHED.batch_size, steps=200, wall_seconds=5.5)

BUDGET = SearchBudget("time", 20, None, 100.0, 0.5, 0, replicates=3)


def step_time(batch_size):
    return 0.01


COST = TrialCost(fixed=1.0, slope=2.0, tau=step_time)


def wall(elapsed, limit=100.0, replicates=3, objective="time", most_start=math.inf, **changes):
    budget = replace(BUDGET, wall_seconds=limit, replicates=replicates, objective=objective)
    budget = replace(budget, most_start=most_start)
    study = changes.pop("study", None) or optuna.create_study()
    clock = elapsed if callable(elapsed) else lambda: elapsed
    return WallTime(study, budget, clock, **{"owner": True, "now": lambda: 1000.0, **changes})


def spec(resumed_from=None):
    return TrialSpec(9, 9, 32, 0.1, 0.0, 1, resumed_from=resumed_from)


@pytest.mark.parametrize(
    ("done", "changes", "baseline", "seconds"),
    [
        # Nothing has reached the target: a share for the most promising trial.
        ([STOPPED], {}, None, 40.0),
        # A replicate of the winner's 100 steps costs 1 + 2 x 100 x 0.01 s.
        ([STOPPED, REACHED, THIRD], {}, None, 3 * 3.0),
        # Runs that have ended are not kept for again.
        ([STOPPED, REACHED, THIRD, AGAIN], {}, None, 2 * 3.0),
        ([STOPPED, REACHED, THIRD, AGAIN, AGAIN, AGAIN, AGAIN], {}, None, 0.0),
        # One that failed is none, one in two parts is one, and those of a trial at the same point
        # are the winner's.
        ([STOPPED, REACHED, THIRD, replace(AGAIN, status="failed")], {}, None, 3 * 3.0),
        ([STOPPED, REACHED, THIRD, AGAIN, CONTINUED_AGAIN], {}, None, 2 * 3.0),
        ([STOPPED, REACHED, SAME_POINT, replace(AGAIN, replicate_of=4)], {}, None, 2 * 3.0),
        # The baseline's first seed has run: two of 5 s are left, which a tenth of the limit bounds.
        ([REACHED, BASELINE, replace(AGAIN, replicate_of=3)], {}, BASELINE, 3 * 3.0 + 10.0),
        ([REACHED, BASELINE, replace(AGAIN, replicate_of=3)], {"limit": 40.0}, BASELINE, 13.0),
        ([STOPPED, REACHED, THIRD], {"replicates": 0}, None, 0.0),
        ([STOPPED, REACHED], {"objective": "both"}, None, 3 * 6.0),
        # A run of the baseline's 200 steps costs 5 s, and two more are a tenth of the limit.
        ([STOPPED, REACHED, BASELINE], {}, BASELINE, 3 * 3.0 + 5.0 + 10.0),
        ([STOPPED, REACHED, BASELINE], {"limit": 40.0}, BASELINE, 3 * 3.0 + 5.0 + 4.0),
        ([STOPPED, REACHED, BASELINE], {"replicates": 0}, BASELINE, 0.0),
        # While the baseline itself is the best: a run of it, and one of a winner to come.
        ([STOPPED, BASELINE, THIRD], {}, BASELINE, 2 * 5.0),
        ([STOPPED, BASELINE, THIRD], {"replicates": 0}, BASELINE, 0.0),
        ([STOPPED, REACHED], {"limit": None}, None, 0.0),
    ],
)
def test_what_is_kept_for_the_end(done, changes, baseline, seconds):
    assert wall(0.0, **changes).reserve(done, COST, baseline) == pytest.approx(seconds)


@pytest.mark.parametrize("reserve", [0.0, 40.0])
@pytest.mark.parametrize(("before", "is_spent"), [(0.1, False), (-0.1, True)])
def test_a_search_ends_while_there_is_time_for_what_follows(reserve, before, is_spent):
    # Their mean is 2.5 s.
    done = [STOPPED, REACHED]
    elapsed = 100.0 - REPORT_SECONDS - reserve - 2.5 - before
    assert wall(elapsed).is_spent(done, COST, reserve) == is_spent
    assert not wall(1e9, limit=None).is_spent(done, COST, reserve)


@pytest.mark.parametrize(
    ("done", "left", "kept"),
    [
        # A second configuration may take twice the 3 s of the first one before any are kept.
        ([REACHED], 40.0, 30.0),
        ([REACHED], 20.0, 14.0),
        ([REACHED], 5.0, 0.0),
        # A trial that failed, a continuation, and a fresh seed are no second configuration.
        ([REACHED, make_result(number=2, status="failed")], 5.0, 0.0),
        ([REACHED, make_result(number=2, replicate_of=1)], 5.0, 0.0),
        ([REACHED, THIRD], 5.0, 30.0),
    ],
)
def test_a_second_configuration_comes_before_fresh_seeds_of_the_first(done, left, kept):
    first = [replace(trial, resumed_from=None) for trial in done]
    one = wall(100.0 - REPORT_SECONDS - left)
    reserve = one.reserve_beside_second(first, COST, 30.0)
    assert reserve == pytest.approx(kept)
    # With time for it, the search goes on.
    if len(first) < 2:
        assert not one.is_spent(first, COST, reserve)
    assert wall(0.0, limit=None).reserve_beside_second(first, COST, 0.0) == 0.0


@pytest.mark.parametrize(
    ("elapsed", "is_baseline", "seconds"),
    [
        (20.0, False, 80.0 - REPORT_SECONDS),
        # It is twice an eighth of the limit.
        (20.0, True, 25.0),
        (90.0, True, 10.0 - REPORT_SECONDS),
        (200.0, False, 0.0),
    ],
)
def test_a_trial_ends_where_the_report_has_to_begin(elapsed, is_baseline, seconds):
    assert wall(elapsed).trial_limit(is_baseline) == pytest.approx(seconds)
    assert wall(elapsed, limit=None).trial_limit(is_baseline) == math.inf


@pytest.mark.parametrize(("advised", "is_told"), [(None, False), (250, True)])
def test_the_end_of_a_search_tells_what_two_trials_need(advised, is_told):
    sentence = wall(30.0, limit=10.0).search_end([STOPPED], 0.0, advised).sentence
    assert ("search.wall_seconds=250" in sentence) == is_told


def test_a_reserve_is_that_of_another_limit():
    one = wall(0.0)
    assert one.within(50.0).reserve([STOPPED], COST) == pytest.approx(20.0)
    assert one.reserve([STOPPED], COST) == pytest.approx(40.0)


@pytest.mark.parametrize(
    ("left", "resumed_from", "steps"),
    [
        # The steps are (20 - 1) / (2 x 0.01).
        (20.0, None, 950),
        (20.0, 0, 50 + 950),
        # They are fewer than MIN_STEPS.
        (1.0 + 0.02 * MIN_STEPS - 0.01, None, None),
        (1.0 + 0.02 * MIN_STEPS + 0.01, None, MIN_STEPS),
        # They are less than 1.3 times the 50 of the one before.
        (1.0 + 0.02 * 14, 0, None),
        (1.0 + 0.02 * 16, 0, 66),
    ],
)
def test_no_trial_begins_that_would_be_too_short(left, resumed_from, steps):
    one = wall(100.0 - REPORT_SECONDS - 7.0 - left)
    found = one.max_steps([STOPPED], spec(resumed_from), COST, reserve=7.0)
    assert found == (None if steps is None else pytest.approx(steps, abs=1))


def test_what_is_done_between_trials_takes_time_too():
    """Each decision takes 0.4 s; a replicate and the report begin with a finer look at the posterior."""
    times = iter([0.0, 7.0, 7.4, 14.0, 14.4, 20.0])
    one = WallTime(
        optuna.create_study(), BUDGET, lambda: next(times), owner=True, now=lambda: 1000.0
    )
    for _ in range(3):
        with one.trial():
            pass
    assert one.decision_seconds == pytest.approx(0.4)
    assert one.replicate_seconds(100, 32, COST) == pytest.approx(REPORT_DECISIONS * 0.4 + 3.0)
    times = iter([70.0])
    assert one.seconds_left == pytest.approx(100.0 - REPORT_SECONDS - REPORT_DECISIONS * 0.4 - 70.0)
    times = iter([70.0, 70.3])
    with one.fine_look():
        pass
    assert one.replicate_seconds(100, 32, COST) == pytest.approx(0.3 + 3.0), "as measured"


@pytest.mark.parametrize(("fixed", "slope"), [(0.3, 1.5), (0.0, 1.0), (5.0, 1.2)])
def test_the_cost_of_trials_is_found(fixed, slope):
    """Trials of many lengths; one that continues another costs its own steps alone."""
    steps = [20, 100, 900, 4000]
    done = [
        make_result(number=i, steps=n, wall_seconds=fixed + slope * n * 0.01)
        for i, n in enumerate(steps)
    ]
    done.append(
        make_result(number=9, resumed_from=1, steps=700, wall_seconds=fixed + slope * 600 * 0.01)
    )
    found = fit_cost(done, step_time, share=slope - 1.0)
    assert found.fixed == pytest.approx(fixed, abs=0.02)
    assert found.slope == pytest.approx(slope, rel=0.02)
    assert found.steps(found.seconds(1000, 32), 32) == pytest.approx(1000, abs=1)


def test_before_the_first_trial_the_share_of_evaluation_is_known():
    assert fit_cost([], step_time, share=0.25) == TrialCost(0.0, 1.25, step_time)


def test_a_study_that_is_continued_has_what_is_left():
    study = optuna.create_study()
    first = wall(60.0, study=study)
    # 60 s before 1,000.
    assert study.user_attrs[BEGAN] == 940.0
    first.begin_trial()
    first.keep()
    assert study.user_attrs[TAKEN] == 60.0
    assert wall(10.0, study=study).seconds_left == 100.0 - 60.0 - 10.0 - REPORT_SECONDS
    joined = wall(3.0, study=study, owner=False, now=lambda: 950.0)
    assert joined.seconds_left == 100.0 - (950.0 - 930.0) - REPORT_SECONDS, (
        "it counts by the owner's start"
    )


@pytest.mark.parametrize(
    ("start", "left"),
    [
        # The start counts in full up to half of the limit.
        (30.0, 70.0),
        (50.0, 50.0),
        (400.0, 50.0),
    ],
)
def test_a_start_takes_half_of_a_limit_that_nobody_has_stated_at_most(start, left):
    study = optuna.create_study()
    now = [start]
    first = wall(lambda: now[0], study=study, most_start=50.0)
    assert first.seconds_left == left - REPORT_SECONDS
    assert study.user_attrs[BEGAN] == 1000.0 - (100.0 - left)
    # The search itself counts in full.
    first.begin_trial()
    now[0] += 20.0
    assert first.seconds_left == left - 20.0 - REPORT_SECONDS
    first.keep()
    # A study whose search has had its seconds gets no more of them by another start.
    second = wall(300.0, study=study, most_start=50.0)
    assert second.seconds_left == 50.0 - 20.0 - REPORT_SECONDS
    # A limit that is stated later counts the starts in full.
    assert study.user_attrs[TAKEN] == start + 20.0
    assert wall(10.0, study=study).seconds_left == 70.0 - start - REPORT_SECONDS


def test_the_shortest_start_is_stored_without_its_survey():
    study = optuna.create_study()
    # Each starts in so many seconds, of which the survey takes some.
    for seconds, surveyed in [(60.0, 20.0), (70.0, 0.0), (30.0, 5.0)]:
        one = wall(seconds, study=study, surveyed=surveyed)
        one.begin_trial()
        one.keep()
    assert TimeTaken.of(study) == TimeTaken(160.0, 0.0, shortest_start=25.0)
    # A start without a trial is none.
    wall(1.0, study=study).keep()
    assert TimeTaken.of(study).shortest_start == 25.0


def test_what_is_kept_is_a_share_of_what_the_search_has():
    assert wall(400.0, most_start=50.0).reserve([STOPPED], COST) == 0.4 * 50.0
    assert wall(20.0, most_start=50.0).reserve([STOPPED], COST) == 0.4 * 80.0
    assert wall(20.0).reserve([STOPPED], COST) == 0.4 * 100.0


def test_a_look_takes_its_seconds_in_a_start_that_no_longer_counts():
    now = [400.0]
    one = wall(lambda: now[0], most_start=50.0)
    with one.fine_look():
        now[0] += 3.0
    assert one.fine_decision_seconds == 3.0


def test_of_a_limit_that_is_stated_next_shares_of_all_are_kept():
    one = wall(400.0, most_start=50.0)
    assert one.within(300.0).reserve([STOPPED], COST) == 0.4 * 300.0
    assert one.reserve([STOPPED], COST) == 0.4 * 50.0


def test_the_others_count_by_what_the_owners_start_counts_for():
    study = optuna.create_study()
    now = [40.0]
    owner = wall(lambda: now[0], study=study, most_start=50.0, now=lambda: 1000.0 + now[0])
    now[0] = 90.0
    owner.begin_trial()
    joined = wall(3.0, study=study, owner=False, most_start=50.0, now=lambda: 1100.0)
    assert joined.seconds_left == 100.0 - 50.0 - 10.0 - REPORT_SECONDS


def test_a_command_without_a_limit_counts_for_a_later_one_that_has_one():
    study = optuna.create_study()
    first = wall(60.0, study=study, limit=None)
    first.begin_trial()
    first.keep()
    assert wall(10.0, study=study).seconds_left == 100.0 - 70.0 - REPORT_SECONDS


def test_a_command_that_began_no_trial_is_not_charged():
    """Its reserve would be kept in vain, so nothing of it is charged either."""
    study = optuna.create_study()
    first = wall(60.0, study=study)
    first.keep()
    assert TAKEN not in study.user_attrs
    assert first.charged(reserve=9.0, runs_follow=False) == 0.0
    # Fresh seeds that follow will be charged, and the start with them.
    assert first.charged(reserve=9.0, runs_follow=True) > 9.0
    second = wall(50.0, study=study)
    second.begin_trial()
    assert second.charged(reserve=9.0, runs_follow=False) == 50.0 + 9.0 + REPORT_SECONDS
    second.keep()
    third = wall(30.0, study=study)
    third.keep()
    assert study.user_attrs[TAKEN] == 50.0
    assert third.charged(reserve=9.0, runs_follow=False) == 50.0


def test_the_start_ends_with_the_first_trial():
    times = iter([5.0, 7.0, 20.0])
    one = WallTime(optuna.create_study(), BUDGET, lambda: next(times), owner=False, now=lambda: 0.0)
    assert one.start_seconds == 5.0, "up to now"
    one.begin_trial()
    one.begin_trial()
    assert one.start_seconds == 7.0


def test_what_follows_a_pause_is_no_decision():
    times = iter([1.0, 9.0, 10.0])
    one = WallTime(
        optuna.create_study(), BUDGET, lambda: next(times), owner=False, now=lambda: next(times)
    )
    with one.trial():
        pass
    one.pause()
    with one.trial():
        pass
    assert one.decision_seconds == 0.0


def test_a_command_is_as_old_as_its_process():
    age = process_seconds()
    watch = stopwatch()
    assert 0.0 < age < 1e5
    assert process_seconds() - age <= watch() + 1.0, "clock ticks are coarse"
    ticks = iter([3.0, 7.5])
    assert stopwatch(lambda: next(ticks))() == 4.5
