import math
from dataclasses import replace

import pytest
from toolbox import make_trial

from bstune.study.replicates import Confirmed, candidates, confirmed, confirmed_row, next_replicate


def trial(number, steps=100, batch_size=64, lr=0.1, **changes):
    return make_trial(number, batch_size, lr, steps=steps, **changes)


def again(candidate, number, steps, **changes):
    """A run of the candidate on a fresh seed."""
    return replace(candidate, number=number, seed=9000 + number, steps=steps, replicate_of=candidate.number, **changes)


def asked(trials, objective="time", seeds=3, max_candidates=3):
    due = next_replicate(trials, objective, seeds, max_candidates)
    return None if due is None else (due[0].number, due[1])


def test_nothing_is_confirmed_where_nothing_was_reached():
    assert asked([]) is None
    assert asked([trial(0, status="censored"), trial(1, status="diverged")]) is None
    assert asked([trial(0, tau=None)]) is None  # has no time
    assert asked([trial(0, tau=None)], "steps") == (0, 0)
    assert asked([trial(0)], seeds=0) is None
    assert asked([trial(0)], max_candidates=0) is None
    assert confirmed([], "time") is None


@pytest.mark.parametrize(("objective", "first"), [("time", 0), ("curve", 0), ("both", 0), ("steps", 1)])
def test_the_first_candidate_has_the_least_merit(objective, first):
    trials = [trial(0, 100), trial(1, 50, 1024, tau=0.1), trial(2, 20, status="censored")]
    assert asked(trials, objective) == (first, 0)


@pytest.mark.parametrize(
    ("statuses", "due"),
    [
        ([], 0),
        (["reached"], 1),
        (["reached", "failed"], 1),  # asked again
        (["failed", "failed"], 0),
        (["reached", "censored"], 2),
        (["diverged", "oom", "censored"], None),
        (["reached", "failed", "reached", "failed", "reached"], None),
    ],
)
def test_replicates_follow_each_other_until_all_are_finished(statuses, due):
    winner = trial(0)
    runs = [again(winner, 1 + i, 100, status=status) for i, status in enumerate(statuses)]
    assert asked([winner, *runs]) == (None if due is None else (0, due))


def test_a_fresh_run_that_was_continued_is_one_replicate():
    winner = trial(0)
    parts = [again(winner, 1, 50, status="censored"), again(winner, 2, 110, resumed_from=1)]
    assert asked([winner, *parts]) == (0, 1)
    assert [run.number for run in confirmed([winner, *parts], "time").runs] == [2]


@pytest.mark.parametrize(
    ("steps", "fresh", "then"),
    [
        # the first one's own 100 steps are not in: 120 on fresh seeds against the other's own 110 or 130
        (110, (120, 120, 120), (1, 0)),
        (130, (120, 120, 120), None),
        (120, (120, 120, 120), None),  # not below
        # the geometric mean of 100, 100 and 160 is 117, the arithmetic mean 120
        (118, (100, 100, 160), None),
        (116, (100, 100, 160), (1, 0)),
    ],
)
def test_another_point_that_claims_less_is_the_next_candidate(steps, fresh, then):
    first, second = trial(0, 100), trial(1, steps, 256)
    runs = [again(first, 2 + i, n) for i, n in enumerate(fresh)]
    assert asked([first, second, *runs]) == then


@pytest.mark.parametrize(
    ("batch_size", "octaves", "another"),
    [(64, 0.19, False), (64, 0.21, True), (64, -0.21, True), (73, 0.0, False), (74, 0.0, True), (73, 0.19, False)],
)  # 73 is 0.19 octaves from 64, 74 is 0.21
def test_a_neighbour_is_the_same_point(batch_size, octaves, another):
    first, second = trial(0, 100), trial(1, 101, batch_size, 0.1 * 2**octaves)
    runs = [again(first, 2 + i, 150) for i in range(3)]
    assert asked([first, second, *runs]) == ((1, 0) if another else None)


def test_no_more_than_so_many_candidates():
    trials = [trial(i, 100 + i, 64 * 2**i) for i in range(4)]
    order = []
    while (due := next_replicate(trials, "time", 2, 3)) is not None:
        order.append((due[0].number, due[1]))
        trials.append(again(due[0], 9 + len(order), 300 + due[0].number))
    assert order == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]
    assert confirmed(trials, "time").winner.number == 0


def test_a_later_candidate_has_to_beat_the_best_confirmed_one():
    a, b, c = trial(0, 100), trial(1, 110, 256), trial(2, 130, 1024)
    runs = [*(again(a, 10 + i, 150) for i in range(3)), *(again(b, 20 + i, 120) for i in range(3))]
    assert asked([a, b, c, *runs]) is None  # 130 is below a's 150, but not below b's 120
    assert confirmed([a, b, c, *runs], "time").winner == b


def test_a_point_is_not_confirmed_anew_for_a_better_neighbour():
    old, better = trial(0, 100), trial(5, 98, lr=0.1 * 2**0.1)
    runs = [again(old, 1 + i, 105) for i in range(3)]
    assert asked([old, runs[0], better]) == (0, 1)
    assert asked([old, *runs, better]) is None
    assert confirmed([old, *runs, better], "time").winner == old


def test_neighbours_on_both_sides_of_a_confirmed_point_are_no_candidates_of_their_own():
    old, elsewhere = trial(0, 100), trial(7, 99, 512)
    above, below = trial(5, 97, lr=0.1 * 2**0.15), trial(6, 98, lr=0.1 * 2**-0.15)
    runs = [again(old, 1 + i, 120) for i in range(3)]
    assert asked([old, *runs, above, below, elsewhere], max_candidates=2) == (7, 0)


def test_a_search_that_went_on_and_found_better_is_confirmed_again():
    old, better = trial(0, 100), trial(9, 60, 512)
    runs = [again(old, 1 + i, 105) for i in range(3)]
    assert asked([old, *runs, better], max_candidates=1) == (9, 0)
    assert confirmed([old, *runs, better], "time") is None  # what was confirmed is no longer the best
    fresh = [again(better, 10 + i, 65) for i in range(3)]
    assert asked([old, *runs, better, *fresh], max_candidates=1) is None
    assert confirmed([old, *runs, better, *fresh], "time") == Confirmed(better, tuple(fresh))


def test_both_confirms_by_time_first_then_by_steps():
    fast, few = trial(0, 100), trial(1, 50, 1024, tau=0.1)
    trials = [fast, few, *(again(fast, 10 + i, 105) for i in range(2))]
    assert asked(trials, "both", seeds=2) == (1, 0)
    assert asked(trials, "time", seeds=2) is None
    trials += [again(few, 20 + i, 55) for i in range(2)]
    assert asked(trials, "both", seeds=2) is None
    assert confirmed(trials, "time").winner == fast
    assert confirmed(trials, "steps").winner == few


@pytest.mark.parametrize(
    ("others", "status", "steps", "rival", "other_wins"),
    [
        (100, "reached", 130, 120, False),
        (100, "censored", 200, 120, True),  # a bound, of 200: the mean of 100, 100 and 200 is 126
        (100, "diverged", 5, 120, True),  # its steps bound nothing: 4 x 100
        (100, "oom", 0, 120, True),
        (125, "censored", 20, 112, True),  # stopped early it counts as the candidate's own 100: the mean is 116
    ],
)
@pytest.mark.parametrize("objective", ["time", "steps"])
def test_what_a_run_short_of_the_target_counts_as(objective, others, status, steps, rival, other_wins):
    first, second = trial(0, 100), trial(1, 102, 256)
    # A run whose steps were not timed takes the candidate's time.
    short = again(first, 4, steps, status=status, seconds_per_step=0.01 if status == "reached" else None)
    runs = [again(first, 2, others), again(first, 3, others), short, *(again(second, 5 + i, rival) for i in range(3))]
    assert confirmed([first, second, *runs], objective).winner == (second if other_wins else first)


def test_runs_of_a_trial_that_is_not_there_are_passed_over():
    winner, gone = trial(0, 100), trial(7, 50)
    assert asked([winner, again(gone, 8, 10)]) == (0, 0)
    assert confirmed([winner, again(gone, 8, 10)], "time") is None


@pytest.mark.parametrize(
    ("steps", "spread"),  # median, lowest, highest; what did not reach the target takes longest
    [
        ((100, 120, 110), (110, 100, 120)),
        ((100, 120), (110, 100, 120)),
        ((100, None, 110), (110, 100, None)),
        ((100, None), (None, 100, None)),
        ((None, None), (None, None, None)),
        ((100, 120, 130, None), (125, 100, None)),
    ],
)
def test_spread_over_fresh_runs(steps, spread):
    winner = trial(0)
    runs = [again(winner, 1 + i, n or 500, status="reached" if n else "censored") for i, n in enumerate(steps)]
    row = confirmed_row(Confirmed(winner, tuple(runs)))
    names = ("median", "low", "high")
    assert [row[f"steps_{name}"] for name in names] == list(spread)
    assert [row[f"time_{name}"] for name in names] == [None if n is None else pytest.approx(0.01 * n) for n in spread]
    assert (row["runs"], row["reached"]) == (len(steps), len(steps) - steps.count(None))
    assert row["seeds"] == [9001 + i for i in range(len(steps))]


def test_candidates_are_the_best_points_and_all_that_have_fresh_runs():
    trials = [trial(i, 100 + i, 64 * 2**i, tau=0.01 * 2**i) for i in range(5)]
    assert [t.number for t in candidates(trials, "time", 2)] == [0, 1]
    assert [t.number for t in candidates([*trials, again(trials[4], 9, 100)], "time", 2)] == [0, 1, 4]
    trials.append(trial(5, 99, 4096, tau=1.0))
    assert [t.number for t in candidates(trials, "both", 1)] == [0, 5]
    assert [t.number for t in candidates(trials, "time", 0)] == [0]
    assert candidates([], "time", 2) == []


def test_the_order_of_the_trials_does_not_matter():
    first, second = trial(0, 100), trial(1, 110, 256)
    trials = [first, second, *(again(first, 2 + i, 120 + i) for i in range(3)), again(second, 5, 90)]
    assert asked(trials) == asked(trials[::-1]) == (1, 1)
    assert confirmed(trials, "time").winner == first, "only candidates with the most fresh runs compete"
    assert confirmed(trials, "time") == confirmed(trials[::-1], "time")
    assert math.isclose(confirmed_row(confirmed(trials, "time"))["time_median"], 1.21)
