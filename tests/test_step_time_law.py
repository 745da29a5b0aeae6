"""tau(B) with its error, on timings whose law is known."""

import math

import numpy as np
import pytest
from builders import SizeTiming

from bstune.core.step_time import StepTime
from bstune.core.step_time_law import (
    BUSY_FACTOR,
    QUIET_FACTOR,
    fit_step_time_law,
    law_of_trials,
)
from bstune.core.step_timings import MEDIAN_ERROR, UNSEEN_SCATTER, OwnSteps

LINE = StepTime(2e-3, 3e-5)
SIZES = (8, 16, 32, 64, 128, 256, 512)


def timing(size, seconds, spread=0.01, visits=4):
    """A timing whose quartiles lie so far, relatively, from its median."""
    return SizeTiming(size, seconds, seconds / (1 + spread), seconds * (1 + spread), visits)


def drawn_law(scatter, seed, visits=4, of_trainer=False):
    """Fit the law to visits that scatter about the line."""
    rng = np.random.default_rng(seed)
    timings = []
    for size in SIZES:
        seconds = LINE(size) * np.exp(rng.normal(0.0, scatter, visits))
        low, middle, high = np.quantile(seconds, (0.25, 0.5, 0.75))
        timings.append(SizeTiming(size, middle, low, high, visits))
    return fit_step_time_law(timings, of_trainer=of_trainer)


def own(pairs, of_trainer=False, may_join=True):
    return [OwnSteps(size, seconds, of_trainer, may_join) for size, seconds in pairs]


def test_quiet_timings_are_tau():
    law = fit_step_time_law([timing(size, LINE(size) * 1.1) for size in SIZES])
    for size in SIZES:
        assert law(size) == pytest.approx(1.1 * LINE(size), rel=0.01)
    assert law.relative_error(64) < 0.03


@pytest.mark.parametrize("scatter", [0.02, 0.3, 0.8])
def test_noise_is_smoothed_and_its_error_is_known(scatter):
    """Over 100 surveys log tau lies within 1.645 of its standard deviation in about 90%."""
    hits = []
    dips = []
    for seed in range(100):
        law = drawn_law(scatter, seed)
        for i, size in enumerate(SIZES):
            deviation = math.sqrt(law.log_covariance[i][i])
            hits.append(abs(math.log(law(size) / LINE(size))) < 1.645 * deviation)
        dips.append(min(np.diff(law.seconds)))
    assert min(dips) >= 0.0
    assert 0.82 < np.mean(hits) < 0.97


@pytest.mark.parametrize("ends", [(2, 6256), (8, 32, 4096), (10, 1000)])
def test_a_step_between_two_distant_timings_takes_what_the_line_says(ends):
    # A survey whose time ran out has timed the two ends alone.
    law = fit_step_time_law([timing(size, LINE(size)) for size in ends])
    for batch_size in np.geomspace(ends[0], ends[-1], 23):
        assert law(batch_size) == pytest.approx(LINE(batch_size), rel=0.04)
    # The line through two timings is known, what departs from it is not: the error is the widest
    # between them.
    middle = math.sqrt(ends[-2] * ends[-1])
    assert law.relative_error(middle) > law.relative_error(ends[-1])


def test_a_confirmed_fall_stays_where_it_was_timed_when_a_gap_is_filled():
    seconds = ((8, 0.9), (64, 1.0), (129, 2.2), (136, 1.6), (2048, 9.0))
    law = fit_step_time_law([timing(size, tau, 0.005) for size, tau in seconds])
    assert [law.sizes[place] for place in law.falls] == [136]
    assert law(129) > 1.3 * law(136)


def test_a_fall_counts_only_where_repeated_timings_confirm_it():
    def law(spread, visits):
        seconds = ((64, 1.0), (129, 2.2), (136, 1.6), (256, 2.5))
        return fit_step_time_law([timing(size, tau, spread, visits) for size, tau in seconds])

    confirmed = law(0.005, 4)
    assert confirmed.falls == (2,)
    assert confirmed(129) > 1.3 * confirmed(136)
    for unsure in (law(0.4, 4), law(0.005, 1)):
        assert unsure.falls == ()
        assert unsure(129) <= unsure(136)


def test_draws_scatter_as_the_error_says():
    law = drawn_law(0.3, 0)
    draws = law.draws(4000, np.random.default_rng(0))
    ratios = draws.over_law(np.array(SIZES, dtype=float))
    assert ratios.shape == (4000, len(SIZES))
    # Drawn values are made to rise, so that they scatter less.
    expected = [law.relative_error(size) for size in SIZES]
    assert np.std(np.log(ratios), axis=0) == pytest.approx(expected, rel=0.5)
    assert np.median(ratios, axis=0) == pytest.approx(1.0, abs=0.15)


@pytest.mark.parametrize("waited", [0.0, 0.5])
def test_a_busy_machine_leaves_all_seconds_less_sure(waited):
    law = fit_step_time_law([timing(size, LINE(size)) for size in SIZES], waited)
    assert law.factor_error == pytest.approx(QUIET_FACTOR + BUSY_FACTOR * waited)
    assert law.relative_error(64) > law.factor_error


def test_one_tau_of_trials_in_which_some_ran_beside_others():
    """Every third trial took four times as long."""
    rng = np.random.default_rng(0)
    sizes = np.exp2(rng.uniform(3.0, 9.0, 60)).round().astype(int).tolist()
    measured = [(size, LINE(size) * (4.0 if i % 3 == 0 else 1.0)) for i, size in enumerate(sizes)]
    law = law_of_trials(measured)
    for size in (16, 64, 256):
        assert law(size) == pytest.approx(LINE(size), rel=0.4)
    assert law_of_trials(measured[:1]) is None
    assert law_of_trials([(64, 1.0), (64, 2.0)]) is None


def test_the_error_of_a_ratio_has_no_common_factor():
    law = drawn_law(0.3, 0)
    draws = law.draws(4000, np.random.default_rng(1)).over_law(np.array([16.0, 100.0, 256.0]))
    logs = np.log(draws)
    assert law.ratio_error(16, 256) == pytest.approx(np.std(logs[:, 2] - logs[:, 0]), rel=0.5)
    assert law.ratio_error(100, 100) == 0.0


@pytest.mark.parametrize(
    ("count", "same_loop", "shift", "spread", "expected"),
    [
        # There are too few steps.
        (9, True, 0.5, 0.5, QUIET_FACTOR),
        (2000, True, 0.0, 0.3, 0.3),
        # All minutes were slower than the survey's.
        (2000, True, 0.5, 0.001, 0.5 / 1.645),
        # These are another loop's steps: the shift says nothing.
        (2000, False, 0.5, 0.3, 0.3),
    ],
)
def test_trials_see_how_the_machines_speed_changes(count, same_loop, shift, spread, expected):
    law = drawn_law(0.02, 0, of_trainer=not same_loop)
    rng = np.random.default_rng(1)
    sizes = rng.integers(8, 512, count)
    off = np.exp(shift + rng.normal(0.0, spread, count))
    measured = [(size, law(size) * by) for size, by in zip(sizes, off, strict=True)]
    seen = law.widened_by_trials(own(measured))
    assert seen.factor_error == pytest.approx(expected, rel=0.1)
    assert (seen.seconds, seen.ratio_error(8, 64)) == (law.seconds, law.ratio_error(8, 64))


# Milliseconds of a step of airbench_cifar on an H200: a survey of 14 s had time for two visits, of
# three steps each; the trials' own, of 10 to 625 steps.
FEW_VISITS = ((64, 4.38), (8192, 29.03))
OWN_STEPS = ((1024, 3.99), (448, 2.19), (2344, 8.92), (328, 1.73), (936, 3.76), (608, 2.69))


def few_visits(of_trainer=False, scale=1.0):
    timings = [timing(size, 1e-3 * tau * scale, 0.0, 1) for size, tau in FEW_VISITS]
    return fit_step_time_law(timings, of_trainer=of_trainer)


@pytest.mark.parametrize("steps", [OWN_STEPS, OWN_STEPS[:1]])
def test_trials_steps_join_a_survey_of_few_visits(steps):
    surveyed = few_visits()
    assert surveyed(1024) > 1.6 * 4.0e-3
    measured = [(size, 1e-3 * tau) for size, tau in steps]
    joined = surveyed.joined_with(own(measured))
    # One trial's steps are no surer than its minutes.
    assert joined(1024) == pytest.approx(4.0e-3, rel=0.15 if len(steps) > 1 else 0.5)
    for size, tau in measured:
        assert abs(math.log(joined(size) / tau)) < 2.5 * joined.relative_error(size)
    assert joined.relative_error(1024) < surveyed.relative_error(1024)
    assert surveyed.joined_with([]) is surveyed
    assert surveyed.joined_with(own(measured, may_join=False)) is surveyed
    assert surveyed.without_trials().joined_with(own(measured))(1024) == surveyed(1024)


@pytest.mark.parametrize(
    ("ends", "sizes"), [((64, 74), (66, 70)), ((64, 88), (75,)), ((8, 10), (9,)), ((8, 9), (8, 9))]
)
def test_trials_may_lie_near_to_timings_and_to_each_other(ends, sizes):
    surveyed = fit_step_time_law([timing(size, 3.0 * LINE(size), 0.0, 1) for size in ends])
    joined = surveyed.joined_with(own([(size, LINE(size)) for size in sizes] * 8))
    for size in ends:
        assert joined(size) == pytest.approx(LINE(size), rel=0.3)
    assert joined.sizes[0] == ends[0]
    assert joined.sizes[-1] == ends[-1]


def test_a_visit_alone_tells_no_scatter():
    assert few_visits().errors == pytest.approx(2 * [MEDIAN_ERROR * UNSEEN_SCATTER])


def test_a_survey_of_many_visits_takes_no_trials_steps():
    law = drawn_law(0.02, 0)
    assert law.joined_with(own([(64, 1.0)])) is law


def test_one_trial_of_a_busy_minute_does_not_bend_the_law_of_others():
    """It ran alone at its batch size, three times as long a step; the others are quiet to 2%."""
    surveyed = fit_step_time_law([timing(size, LINE(size), 0.0, 1) for size in (8, 2048)])
    rng = np.random.default_rng(0)
    sizes = (16, 20, 32, 40, 64, 80, 128, 160, 256, 320, 400, 512)
    quiet = [(size, LINE(size) * math.exp(rng.normal(0.0, 0.02))) for size in sizes]
    joined = surveyed.joined_with(own([*quiet, (1200, 3.0 * LINE(1200))]))
    for size in (64, 256):
        assert joined(size) == pytest.approx(LINE(size), rel=0.2)
    assert joined(512) == pytest.approx(LINE(512), rel=0.35)
    assert abs(math.log(joined(1200) / LINE(1200))) < 2.0 * joined.relative_error(1200)


@pytest.mark.parametrize("count", [6, 60])
@pytest.mark.parametrize(("milliseconds", "most_moved"), [(1.0, 0.4), (100.0, 0.1)])
def test_another_loop_may_be_off_alike_in_all_trials(count, milliseconds, most_moved):
    """Trials take 0.4 ms less than the loop whose steps were timed, however many there are."""
    seconds = 1e-3 * milliseconds
    sizes = np.geomspace(8, 2048, count).round().astype(int).tolist()
    surveyed = fit_step_time_law(
        [timing(size, seconds, 0.02, 2) for size in (8, 2048)], of_trainer=True
    )
    measured = [(size, seconds - 4e-4) for size in sizes]
    moved = 1.0 - surveyed.joined_with(own(measured))(128) / seconds
    assert -0.01 <= moved <= most_moved * 4e-4 / 1e-3
    same = surveyed.joined_with(own(measured, of_trainer=True))(128) / seconds
    assert same <= 1.0 - moved + 0.01
