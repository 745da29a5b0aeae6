import math
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from optuna.distributions import FloatDistribution, IntDistribution
from toolbox import make_result, make_trial, numbers

from bstune.search.frontier_law import NOISE
from bstune.search.predictions import fresh_steps
from bstune.search.sampler import FrontierSampler
from bstune.study.planning.replicates import (
    Winner,
    candidates,
    find_best,
    next_beyond_limit,
    next_replicate,
    run_to_train,
    seed_changes_nothing,
    selection_luck,
    stand_in_for,
    summary_of_runs,
    winners,
)

# Nothing is predicted: each trial's own run counts.
SINGLE_RUNS = {}


def trial(number, steps=100, batch_size=64, lr=0.1, **changes):
    return make_trial(number, batch_size, lr, steps=steps, **changes)


def again(candidate, *steps, number=None, **changes):
    """Runs of the candidate on fresh seeds: numbers 10, 11, ... of number 0's; 20, 21, ... of number 1's."""
    first = 10 * (candidate.number + 1) if number is None else number
    same = {"replicate_of": candidate.number, **changes}
    runs = []
    for new_number, run_steps in enumerate(steps, first):
        seed = 9000 + new_number
        runs.append(replace(candidate, number=new_number, seed=seed, steps=run_steps, **same))
    return runs


def again_once(candidate, steps, number, **changes):
    """One run of the candidate on a fresh seed."""
    (run,) = again(candidate, steps, number=number, **changes)
    return run


def asked(trials, objective="time", seeds=3, max_candidates=3, predicted=SINGLE_RUNS):
    due = next_replicate(trials, predicted, objective, seeds, max_candidates)
    return None if due is None else (due[0].trial.number, due[1])


def best(trials, merit="time", seeds=3, predicted=SINGLE_RUNS):
    found = find_best(trials, predicted, merit, merit, seeds, 3)
    return found and found.trial


# It is the fastest by time, and the other one by steps.
FAST = trial(0, 100)
FEW = trial(1, 50, 1024, tau=0.1)


@pytest.mark.parametrize(
    ("trials", "options", "expected"),
    [
        ([], {}, None),
        ([trial(0, status="stopped"), trial(1, status="diverged")], {}, None),
        # A trial without a step time has no time to target.
        ([trial(0, tau=None)], {}, None),
        ([trial(0, tau=None)], {"objective": "steps"}, (0, 0)),
        ([trial(0)], {"seeds": 0}, None),
        ([trial(0)], {"max_candidates": 0}, None),
        *(
            ([FAST, FEW, trial(2, 20, status="stopped")], {"objective": objective}, (first, 0))
            # 50 steps of 0.1 s take 5 s, 100 of 0.01 s take 1 s.
            for objective, first in (("time", 0), ("curve", 0), ("both", 0), ("steps", 1))
        ),
        # A run of a trial that is not there is passed over.
        (
            [FAST, *again(trial(7, 50), 10)],
            {},
            (0, 0),
        ),
    ],
)
def test_the_first_candidate_has_the_least_merit(trials, options, expected):
    assert asked(trials, **options) == expected


@pytest.mark.parametrize(
    ("statuses", "due"),
    [
        ([], 0),
        (["reached"], 1),
        # A run that failed is asked again.
        (["reached", "failed"], 1),
        (["failed", "failed"], 0),
        (["reached", "stopped"], 2),
        (["diverged", "out of memory", "stopped"], None),
        (["reached", "failed", "reached", "failed", "reached"], None),
    ],
)
def test_replicates_follow_each_other_until_all_are_finished(statuses, due):
    runs = []
    for number, status in enumerate(statuses, 1):
        runs.append(again_once(FAST, 100, number, status=status))
    assert asked([FAST, *runs]) == (None if due is None else (0, due))


def test_a_fresh_run_that_was_continued_is_one_replicate():
    parts = [
        *again(FAST, 50, number=1, status="stopped"),
        *again(FAST, 110, number=2, resumed_from=1),
    ]
    assert asked([FAST, *parts]) == (0, 1)
    (run,) = find_best([FAST, *parts], {}, "time", "time", 3, 3).runs
    assert run.number == 2


@pytest.mark.parametrize(
    ("other", "fresh", "another"),
    [
        # the first one's own 100 steps are not in: 120 on fresh seeds against the other's own 110
        # or 130
        (trial(1, 110, 256), (120, 120, 120), True),
        (trial(1, 130, 256), (120, 120, 120), False),
        # The same time is not below.
        (trial(1, 120, 256), (120, 120, 120), False),
        # the geometric mean of 100, 100 and 160 is 117, the arithmetic mean 120
        (trial(1, 118, 256), (100, 100, 160), False),
        (trial(1, 116, 256), (100, 100, 160), True),
        # a neighbour is the same point; 73 is 0.19 octaves from 64, 74 is 0.21
        (trial(1, 101, lr=0.1 * 2**0.19), (150, 150, 150), False),
        (trial(1, 101, lr=0.1 * 2**0.21), (150, 150, 150), True),
        (trial(1, 101, lr=0.1 * 2**-0.21), (150, 150, 150), True),
        (trial(1, 101, 73), (150, 150, 150), False),
        (trial(1, 101, 74), (150, 150, 150), True),
        (trial(1, 101, 73, 0.1 * 2**0.19), (150, 150, 150), False),
        # a point is not confirmed anew for a better neighbour
        (trial(1, 98, lr=0.1 * 2**0.1), (105, 105, 105), False),
    ],
)
def test_another_point_that_claims_less_is_the_next_candidate(other, fresh, another):
    trials = [FAST, other, *again(FAST, *fresh)]
    assert asked(trials) == ((1, 0) if another else None)
    assert best(trials) == (other if another else FAST)
    # With two of three fresh runs the third one comes first.
    assert asked(trials[:-2]) == (0, 1)


def test_no_more_than_so_many_candidates():
    # Each an octave from the next, so that none is a neighbour.
    trials = [trial(i, 100 + i, 64 * 2**i) for i in range(4)]
    order = []
    while (due := next_replicate(trials, {}, "time", 2, 3)) is not None:
        candidate = due[0].trial
        order.append((candidate.number, due[1]))
        trials += again(candidate, 300 + candidate.number, number=9 + len(order))
        # Before a candidate has all of its runs nothing is left out.
        assert next_beyond_limit(trials[:-1], {}, "time", 2, 3) is None
    assert order == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]
    # All three took over 300 steps: the least of them wins.
    assert best(trials, seeds=2).number == 0
    assert next_beyond_limit(trials, {}, "time", 2, 3).trial.number == 3
    assert (
        next_beyond_limit(trials, {}, "time", 2, 4)
        is next_beyond_limit(trials, {}, "time", 0, 3)
        is None
    )


def test_a_later_candidate_has_to_beat_the_best_confirmed_one():
    a = trial(0, 100)
    b = trial(1, 110, 256)
    c = trial(2, 130, 1024)
    trials = [a, b, c, *again(a, 150, 150, 150), *again(b, 120, 120, 120)]
    # 130 is below the first one's 150, but not below the other's 120.
    assert asked(trials) is None
    assert best(trials) == b


def test_neighbours_on_both_sides_of_a_confirmed_point_are_no_candidates_of_their_own():
    # 0.15 octaves on either side of FAST: 0.3 from each other, and neighbours of one point.
    above = trial(5, 97, lr=0.1 * 2**0.15)
    below = trial(6, 98, lr=0.1 * 2**-0.15)
    trials = [FAST, *again(FAST, 120, 120, 120), above, below, trial(7, 99, 512)]
    assert asked(trials, max_candidates=2) == (7, 0)


def test_a_search_that_went_on_and_found_better_is_confirmed_again():
    better = trial(19, 60, 512)
    trials = [FAST, *again(FAST, 105, 105, 105), better]
    fresh = again(better, 65, 65, 65)
    assert asked(trials, max_candidates=1) == (19, 0), "the candidates from before do not count"
    assert asked([*trials, trial(18, 62, 2048), *fresh[:1]], max_candidates=1) == (19, 1)
    assert asked(trials + fresh, max_candidates=1) is None
    assert best(trials + fresh) == better


def test_both_confirms_by_time_first_then_by_steps():
    trials = [FAST, FEW, *again(FAST, 105, 105)]
    # By steps FEW is ahead, and has not run again yet.
    assert (
        asked(trials, "both", seeds=2) == asked(trials, "both", seeds=2, max_candidates=1) == (1, 0)
    )
    assert asked(trials, "time", seeds=2) is None
    trials += again(FEW, 55, 55)
    assert asked(trials, "both", seeds=2) is None
    assert asked(trials, "both", seeds=2, max_candidates=1) is None
    found = winners(trials, {}, "both", 2, 1)
    assert found["time"].trial == FAST
    assert found["steps"].trial == FEW


@pytest.mark.parametrize(
    ("others", "status", "steps", "rival", "other_wins"),
    [
        (100, "reached", 130, 120, False),
        # A stopped run is a bound, of 200: the mean of 100, 100 and 200 is 126.
        (100, "stopped", 200, 120, True),
        # The steps of a diverged run bound nothing: it counts as 4 x 100.
        (100, "diverged", 5, 120, True),
        (100, "out of memory", 0, 120, True),
        # Nor do these steps: the schedule has ended.
        (100, "stopped over its horizon", 100, 120, True),
        # A run stopped early counts as the candidate's own 100: the mean is 116.
        (
            125,
            "stopped",
            20,
            112,
            True,
        ),
    ],
)
@pytest.mark.parametrize("objective", ["time", "steps"])
def test_what_a_run_short_of_the_target_counts_as(
    objective, others, status, steps, rival, other_wins
):
    other = trial(1, 102, 256)
    # A run whose steps were not timed takes the candidate's time.
    tau = 0.01 if status == "reached" else None
    horizon = steps if status.endswith("horizon") else None
    short = again(
        FAST,
        steps,
        number=4,
        status=status.removesuffix(" horizon"),
        seconds_per_step=tau,
        horizon=horizon,
    )
    trials = [FAST, other, *again(FAST, others, others), *short, *again(other, rival, rival, rival)]
    assert best(trials, objective) == (other if other_wins else FAST)


@pytest.mark.parametrize(
    # The spread is median, lowest and highest; what missed the target takes longest.
    ("steps", "spread"),
    [
        ((100, 120, 110), (110, 100, 120)),
        ((100, 120), (110, 100, 120)),
        ((100, None, 110), (110, 100, None)),
        ((100, None), (None, 100, None)),
        ((None, None), (None, None, None)),
        # Of four runs the median lies between 120 and 130: the stopped run took longest.
        ((100, 120, 130, None), (125, 100, None)),
    ],
)
def test_spread_over_fresh_runs(steps, spread):
    runs = []
    for number, hit in enumerate(steps, 1):
        if hit is None:
            run = again_once(FAST, 500, number, steps_low=500, status="stopped")
        else:
            run = again_once(FAST, hit, number, steps_low=hit - 1, status="reached")
        runs.append(run)
    row = summary_of_runs(runs)
    in_steps = [row.steps_median, *row.interval_by("steps")]
    in_seconds = [row.time_median, *row.interval_by("time")]
    for expected, found, seconds in zip(spread, in_steps, in_seconds, strict=True):
        if expected is None:
            assert (found, seconds) == (None, None)
        else:
            assert (found, seconds) == pytest.approx((expected, 0.01 * expected))
    assert (row.runs, row.reached) == (len(steps), len(steps) - steps.count(None))
    assert row.seeds == tuple(range(9001, 9001 + len(steps)))


@pytest.mark.parametrize(
    ("changes", "low", "high"),
    [
        # The grid alone: the target was met in (89, 110].
        ({}, 90.0, 120.0),
        # A median of three whose standard error, 1.2533 x 0.3/sqrt(3), is wider than they are.
        ({"scatter": 0.3}, 110 * math.exp(-0.357), 110 * math.exp(0.357)),
        # 20% of error in the seconds of a step.
        (
            # 1.645 x 0.2 = 0.329, added in squares to what the grid leaves open.
            {"time_error": 0.2},
            110 * math.exp(-math.hypot(math.log(110 / 90), 0.329)),
            110 * math.exp(math.hypot(math.log(120 / 110), 0.329)),
        ),
    ],
)
def test_the_interval_over_seeds_holds_the_grid_the_scatter_and_the_error_of_time(
    changes, low, high
):
    runs = [
        again_once(FAST, 120, 1, steps_low=99),
        again_once(FAST, 110, 2, steps_low=90),
        again_once(FAST, 110, 3, steps_low=89),
    ]
    row = summary_of_runs(runs, **changes)
    assert row.time_low == pytest.approx(0.01 * low, rel=2e-3)
    assert row.time_high == pytest.approx(0.01 * high, rel=2e-3)
    if "time_error" in changes:
        assert (row.steps_low, row.steps_high) == (pytest.approx(90), pytest.approx(120))


CURVE = ((10, 0.9), (20, 0.5), (30, 0.09))
OTHER_CURVE = ((10, 0.9), (20, 0.5), (30, 0.0901))


@pytest.mark.parametrize(
    ("first", "others", "changes", "is_unused"),
    [
        (CURVE, [CURVE, CURVE, CURVE], {}, True),
        # The schedule of the fresh seeds may be another one than the trial's.
        (OTHER_CURVE, [CURVE, CURVE], {}, True),
        # A single fresh seed has only the trial beside it.
        (CURVE, [CURVE], {}, True),
        (OTHER_CURVE, [CURVE], {}, False),
        (CURVE, [CURVE, CURVE, OTHER_CURVE], {}, False),
        (CURVE, [], {}, False),
        # Three evaluations have a step in common.
        (CURVE, [CURVE, ((5, 1.0), *CURVE)], {}, True),
        (CURVE, [CURVE, CURVE[:2]], {}, False),
        # A loss that is not finite differs from any other.
        (CURVE, [CURVE, (*CURVE[:2], (30, None))], {}, False),
        # A metric that does not move tells no seed apart.
        (CURVE, [((10, 0.0), (20, 0.0), (30, 0.0))] * 2, {}, False),
        # One recorded run stands for several seeds.
        (CURVE, [CURVE, CURVE], {"device": "replay"}, False),
    ],
)
def test_fresh_seeds_that_change_nothing_are_found(first, others, changes, is_unused):
    point = trial(0, history=first, **changes)
    runs = []
    for number, history in enumerate(others, 10):
        runs.append(again_once(point, 30, number, history=history))
    # Another point's runs, which have a single evaluation, say nothing.
    beside = trial(1, history=CURVE[:1], **changes)
    runs += again(beside, 10, 10)
    assert seed_changes_nothing([point, beside, *runs]) == is_unused
    # Where they differ, the seed is used.
    differs = again_once(beside, 10, 30, history=((10, 0.8),))
    assert not seed_changes_nothing([point, beside, *runs, differs])


def test_a_run_that_met_the_target_at_its_first_evaluation_is_counted():
    runs = [
        again_once(FAST, 36, 0, steps_low=0),
        again_once(FAST, 36, 1, steps_low=0),
        again_once(FAST, 36, 2, steps_low=30),
    ]
    row = summary_of_runs(runs)
    assert row.untold == 2
    # The lowest end of a run that was met at its first look: one step.
    assert row.steps_low == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("seen", "histories", "due"),
    [
        # Once may be luck; the posterior predicts 130 of either trial there.
        ((90,), (1,), None),
        ((90, 95), (1, 2), 1),
        # Not better than the best point's fresh seeds.
        ((112, 115), (1, 2), None),
        # Two trials of one history are one recorded run.
        ((90, 90), (1, 1), None),
    ],
)
def test_a_point_that_was_twice_seen_better_runs_on_fresh_seeds(seen, histories, due):
    confirmed_runs = again(FAST, 110, 111, 109)
    there = []
    # So many that what is asked is the next candidate.
    predicted = {FAST.number: 110.0}
    for number, (steps, history) in enumerate(zip(seen, histories, strict=True), 1):
        there.append(trial(number, steps, 256, history=((steps, float(history)),)))
        predicted[number] = 130.0
    found = asked([FAST, *there, *confirmed_runs], predicted=predicted)
    assert (None if found is None else found[0]) == due


def test_candidates_are_the_best_single_runs_and_all_that_ran_again():
    trials = []
    steep = []
    for number in range(12):
        size = 64 * 2**number
        # Seconds double from size to size.
        tau = 0.01 * 2**number
        trials.append(trial(number, 100 + number, size, tau=tau))
        steep.append(trial(number, 200 - number, size, tau=tau))
    cases = [
        ([], []),
        (trials, [*range(8)]),
        (trials + again(trials[9], 100), [*range(8), 9]),
        # By steps the order is the other way round: eight by each merit.
        (steep, [*range(12)]),
    ]
    for some, expected in cases:
        assert sorted(numbers(candidates(some))) == expected


def test_the_order_of_the_trials_does_not_matter():
    other = trial(1, 110, 256)
    trials = [FAST, other, *again(FAST, 120, 121, 122), *again(other, 90)]
    assert asked(trials) == asked(trials[::-1]) == (1, 1)
    found = find_best(trials, {1: 130.0}, "time", "time", 3, 3)
    assert found.trial == FAST, (
        "one fast replicate is no more than the prediction that it is part of"
    )
    assert found == find_best(trials[::-1], {1: 130.0}, "time", "time", 3, 3)
    # Of 120, 121 and 122 steps.
    assert math.isclose(summary_of_runs(found.runs).time_median, 1.21)


@pytest.mark.parametrize(
    ("fresh", "wins"),
    [
        ([(50, "reached"), (90, "reached"), (90, "stopped")], True),
        # It reached the target once in three runs.
        ([(50, "reached"), (90, "stopped"), (90, "stopped")], False),
        ([(50, "reached"), (90, "diverged"), (90, "stopped")], False),
    ],
)
def test_what_misses_the_target_more_often_than_not_does_not_win_over_what_reaches_it(fresh, wins):
    unsure = trial(0, 50)
    sure = trial(1, 300, 256)
    runs = []
    for number, (steps, status) in enumerate(fresh, 10):
        runs.append(again_once(unsure, steps, number, status=status))
    trials = [unsure, sure, *runs]
    assert asked(trials) == (None if wins else (1, 0))
    trials += again(sure, 310, 320, 330)
    assert best(trials) == (unsure if wins else sure)
    alone = find_best([unsure, *runs], {}, "time", "time", 3, 3)
    assert (alone.trial, summary_of_runs(alone.runs).reached) == (unsure, 2 if wins else 1), (
        "and alone says so"
    )


LAW = tuple(product((32, 64, 128, 256, 512), (0.25, 0.7)))


def steps_of(batch_size, lr):
    """The steps of a law whose best learning rate is 0.5, at no more than two octaves from it."""
    return round(100 * (1 + 128 / batch_size) * math.exp(0.15 * math.log2(lr / 0.5) ** 2))


def predicted(trials):
    """The posterior's noise from seed to seed, and what it predicts of fresh seeds."""
    space = {
        "batch_size": IntDistribution(8, 1024, log=True),
        "lr": FloatDistribution(0.01, 10.0, log=True),
    }
    posterior = FrontierSampler(search_space=space).posterior(
        trials, moves=10, rng=np.random.default_rng(0)
    )
    return float(np.exp(posterior.theta[:, NOISE]).mean()), fresh_steps(posterior)


def test_a_lucky_run_among_slow_ones_is_not_the_first_candidate_and_replicates_are_trials_like_any_other():
    def seen(trials):
        return [replace(one, steps_low=one.steps - 2) for one in trials]

    trials = [trial(i, steps_of(*point), *point) for i, point in enumerate(LAW)]
    slow = LAW.index((64, 0.25))
    trials[slow] = lucky = trial(slow, 120, *LAW[slow])
    assert asked(trials, "steps") == (slow, 0), "by single runs"
    _, steps = predicted(seen(trials))
    # (512, 0.7) is the law's own best point.
    assert asked(trials, "steps", predicted=steps) == (LAW.index((512, 0.7)), 0)
    assert 1.4 * lucky.steps < steps[slow] < 0.97 * steps_of(*LAW[slow]), (
        "between its own and what is around"
    )
    slower = [*trials, *again(lucky, 440, 445, 450, number=20)]
    loose = [*trials, *again(lucky, 220, 445, 900, number=20)]
    (less, after) = predicted(seen(slower))
    (more, _) = predicted(seen(loose))
    assert after[slow] == after[20], "one place"
    # Three slow fresh runs move the prediction up, and not all the way to them.
    assert 1.1 * steps[slow] < after[slow] < 445
    # What fresh seeds scatter by is the noise that is learnt.
    assert less < more
    assert predicted(seen(slower)) == (less, after), "a function of the trials"


def test_the_horizon_of_a_winner_is_that_of_its_fresh_runs_else_the_predicted_one():
    lucky = trial(0, horizon=20)
    run = trial(1, horizon=40, replicate_of=0)
    assert Winner(lucky, 20.0, (run,), predicted_horizon=30).horizon == 40
    assert Winner(lucky, 20.0, predicted_horizon=30).horizon == 30
    assert Winner(lucky, 20.0).horizon == 20


@pytest.mark.parametrize(
    ("own", "fresh", "reached", "advised"),
    [
        # One miss in one run, and two in three, are most of them.
        (625, 127, [False], 625),
        (625, 127, [True, False, False], 625),
        (625, 127, [True, True, False], 127),
        # The predicted horizon is advised.
        (625, 127, [], 127),
        # A shorter one of its own is no better advice.
        (100, 127, [False], 127),
        # This schedule does not end with the trial.
        (None, None, [False], None),
    ],
)
def test_a_horizon_that_most_fresh_runs_missed_the_target_with_is_not_advised(
    own, fresh, reached, advised
):
    runs = []
    for number, met in enumerate(reached, 1):
        status = "reached" if met else "stopped"
        runs.append(trial(number, horizon=fresh, replicate_of=0, status=status))
    runs = tuple(runs)
    winner = Winner(trial(0, horizon=own), 100.0, runs, predicted_horizon=fresh)
    assert winner.advised_horizon == advised


def test_others_are_another_point():
    """The better one's neighbour is replicated by itself: fresh runs of other hyperparameters count for no other."""
    best = make_result(number=0, trial_index=0, steps=100, hyperparameters={"momentum": 0.9})
    near = make_result(number=1, trial_index=1, steps=101, hyperparameters={"momentum": 0.1})
    fresh = make_result(
        number=2, trial_index=9, steps=150, replicate_of=0, hyperparameters={"momentum": 0.9}
    )
    assert next_replicate([best, near, fresh], {}, "steps", 1, 2)[0].trial.number == 1


def confirmed_at(number, steps, runs=3):
    """A point all of whose runs on fresh seeds took so many steps."""
    point = trial(number, steps, batch_size=64 * 2**number)
    return Winner(point, float(steps), tuple(again(point, *[steps] * runs)))


@pytest.mark.parametrize(
    ("rivals", "runs", "luck"),
    [
        # The lesser of two means of equal expectation lies e/sqrt(pi) below it, with e the standard
        # error of each: 0.3/sqrt(3).
        ((100,), 3, 0.3 / math.sqrt(3) / math.sqrt(math.pi)),
        # Of four it is 1.0294 e (the expected least of four normal values, Harter 1961).
        ((100, 100, 100), 3, 1.0294 * 0.3 / math.sqrt(3)),
        # More runs leave less to chance.
        ((100,), 12, 0.3 / math.sqrt(12) / math.sqrt(math.pi)),
        # What is four times as slow is not passed by luck.
        ((400,), 3, 0.0),
        ((), 3, 0.0),
    ],
)
def test_the_luck_of_a_winner_is_what_the_least_of_several_means_has(rivals, runs, luck):
    points = [confirmed_at(number, steps, runs) for number, steps in enumerate((100, *rivals))]
    found = selection_luck(points[0], points, "steps", 0.3)
    assert found == pytest.approx(luck, rel=0.06, abs=1e-9)


def test_a_winner_that_did_not_run_again_has_no_luck_in_its_runs():
    predicted = Winner(trial(0, 100), 100.0)
    assert selection_luck(predicted, [confirmed_at(1, 100)], "steps", 0.3) == 0.0


# Three points. The second one is predicted to take the fewest steps.
YOURS = trial(0, 100)
CLAIMS = trial(1, 90, 256)
THIRD = trial(2, 400, 1024)
CLOSE = {0: 100.0, 1: 95.0}
FAR = {0: 100.0, 1: 50.0}


@pytest.mark.parametrize(
    ("yours", "claims", "predicted", "named", "may_be_better"),
    [
        # It did not run again: what was measured is as good, or it is not.
        ((100, 100, 100), (), CLOSE, 0, True),
        ((100, 100, 100), (), FAR, 1, False),
        ((100, 100), (), CLOSE, 1, False),
        # Its own run is no better, whatever is predicted of further ones.
        ((100, 100, 100), (120,), CLOSE, 0, False),
        ((100, 100, 100), (120,), FAR, 0, False),
        # Its own run is better than all of the other's.
        ((100, 100, 100), (93,), CLOSE, 0, True),
        ((100, 100, 100), (50,), FAR, 1, False),
        # Both lack runs: the one that was seen to be faster, if it ran as often.
        ((100,), (120,), CLOSE, 0, False),
        ((100,), (98,), CLOSE, 1, False),
        ((100,), (120, 120), CLOSE, 1, False),
        # With all its runs it is ranked by these.
        ((90, 90), (100, 100, 100), CLOSE, 1, False),
    ],
)
def test_a_winner_that_lacks_fresh_seeds_is_not_named_before_what_was_seen_to_be_as_fast(
    yours, claims, predicted, named, may_be_better
):
    trials = [YOURS, CLAIMS, THIRD, *again(YOURS, *yours), *again(CLAIMS, *claims)]
    runs = tuple(one for one in trials if one.replicate_of == 1)
    claimed = Winner(CLAIMS, predicted[1], runs)
    found = stand_in_for(claimed, trials, predicted, "steps", 3)
    assert (0 if found else 1) == named
    if found is not None:
        assert (found.winner.trial, len(found.winner.runs)) == (YOURS, len(yours))
        assert found.passed_over == (claimed if may_be_better else None)


def test_a_point_that_mostly_misses_the_target_stands_in_for_none():
    trials = [YOURS, CLAIMS, *again(YOURS, 100, 100, 100, status="stopped")]
    assert stand_in_for(Winner(CLAIMS, 95.0), trials, CLOSE, "steps", 3) is None


@pytest.mark.parametrize(
    ("horizon_of_trial", "horizon", "runs", "seed"),
    [
        # (seed, horizon, whether it reached the target) of each run on a fresh seed.
        (617, 287, [(7, 287, False), (8, 287, True), (9, 287, True)], 8),
        (617, 287, [(7, 617, True), (9, 287, True)], 9),
        # The trial had that schedule itself, or no seed has reached the target with it.
        (287, 287, [(8, 287, True)], 1),
        (617, 287, [(7, 287, False)], 1),
        (617, 287, [], 1),
        # No schedule ends with the trial.
        (None, None, [(8, None, True)], 1),
    ],
)
def test_a_seed_is_trained_that_reached_the_target_with_the_schedule(
    horizon_of_trial, horizon, runs, seed
):
    trial = make_result(seed=1, horizon=horizon_of_trial)
    fresh = []
    for number, (fresh_seed, of_run, reached) in enumerate(runs, start=1):
        status = "reached" if reached else "stopped"
        run = make_result(
            number=number, seed=fresh_seed, horizon=of_run, status=status, replicate_of=0
        )
        fresh.append(run)
    assert run_to_train(trial, fresh, horizon).seed == seed
