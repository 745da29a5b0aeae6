import math
from dataclasses import replace

import numpy as np
import pytest
from builders import changed
from toolbox import make_result

from bstune.core.records import Target
from bstune.core.step_time import StepTime, StepTimes
from bstune.report.words import critical_text
from bstune.result import CriticalAtTarget
from bstune.search.curve_decision import most_telling
from bstune.search.frontier_law import B_CRIT, B_OPT, LEVEL, draw_prior, make_prior
from bstune.search.observations import Observation, likelihood_data
from bstune.search.posterior import Posterior
from bstune.study.analysis.critical import (
    critical_batch,
    easier_targets,
    ended_where_met,
    growth_over_target,
    no_easier_target,
    over_targets,
)

# Their geometric middle is 128.
LOW, HIGH = 8, 2048
MIDDLE = math.log(128.0)
TARGET = Target("val/error", 0.1, "min")


def posterior_of(
    b_crit,
    b_opt=None,
    s_min=100.0,
    sizes=(8, 32, 128, 512, 2048),
    status="reached",
    spread=0.1,
    low=LOW,
    horizon=False,
):
    """A posterior whose draws follow the law with these medians, and trials at these batch sizes."""
    settings = {
        "log_budget": 7.0,
        "sigma": 1.0,
        "exponent_sigma": 0.3,
        "noise_scale": None,
        "others": 0,
        "horizon": horizon,
    }
    prior = make_prior(low=low, high=HIGH, rule=lambda x: 0.5 * x - 6.0, **settings)
    theta = draw_prior(prior, 200, np.random.default_rng(0))
    # No discrepancy: the law holds as it is.
    theta[:, -prior.knots.size :] = 0.0
    # B_crit is uniform in logs around its median.
    theta[:, B_CRIT] = math.log(b_crit) - MIDDLE + np.linspace(-spread, spread, 200)
    if b_opt is not None:
        theta[:, B_OPT] = math.log(b_opt) - MIDDLE + np.linspace(-spread, spread, 200)[::-1]
    # The level is log S at the middle: S_min (1 + B_crit/B + (B_opt/B)^2).
    theta[:, LEVEL] = math.log(s_min) + np.log(
        1.0 + np.exp(theta[:, B_CRIT]) + np.exp(2.0 * theta[:, B_OPT])
    )
    seen = []
    for number, size in enumerate(sizes):
        x = math.log2(size)
        seen.append(Observation(number, status, 100, 99, 0.01, x, -4.0, (), None, 0.0, stuck=False))
    seen = tuple(seen)
    tau = StepTimes(StepTime(1e-3, 0.0))
    return Posterior(seen, likelihood_data(seen, prior), theta, tau, 1.0, prior, math.inf)


def test_the_law_gives_its_own_numbers():
    found = critical_batch(posterior_of(200.0))
    assert (found.smallest, found.largest, found.level) == (8, 2048, pytest.approx(0.9))
    assert (found.value, found.s_min, found.e_min) == pytest.approx(
        (200.0, 100.0, 20_000.0), rel=0.02
    )
    # 90% of a uniform distribution of +-0.1.
    ends = 200.0 * math.exp(-0.09), 200.0 * math.exp(0.09)
    assert (found.low, found.high) == pytest.approx(ends, rel=0.02)
    assert (found.perfect_scaling_below, found.maximal_data_parallelism_above) == pytest.approx(
        (found.value / 9, found.value * 9)
    )
    assert found.b_opt is None
    # The interval is narrow: no further trial would tell.
    assert found.next_trials == ()


@pytest.mark.parametrize(
    ("sizes", "spread", "known"),
    [
        # The interval is 183 to 219.
        ((8, 2048), 0.1, (True, True, True)),
        # An end is known up to an octave beyond the largest batch size that reached the target.
        (
            (8, 110),
            0.1,
            (True, True, True),
        ),
        # 2 x 95 = 190 lies below the value of 200.
        ((8, 95), 0.1, (True, False, False)),
        # This end lies further than an octave above them.
        ((8, 64), 0.1, (True, False, False)),
        # 450 is half of 900, and all of the interval lies below.
        ((900, 2048), 0.1, (False, False, True)),
        ((410, 2048), 0.1, (False, False, True)),
        # One batch size says nothing of the others.
        ((200, 200), 0.1, (False, False, False)),
        # The middle of an interval without an end is the prior's guess.
        (
            (200, 200),
            2.0,
            (False, False, False),
        ),
    ],
)
def test_what_lies_beyond_the_batch_sizes_that_reached_the_target_is_open(sizes, spread, known):
    found = critical_batch(posterior_of(200.0, sizes=sizes, spread=spread))
    ends = (found.low, found.value, found.high)
    assert tuple(end is not None for end in ends) == known
    for end in ends:
        assert end is None or min(sizes) / 2 <= end <= max(sizes) * 2
    assert (found.s_min is None, found.e_min is None) == (not known[2], not known[0])
    assert (found.perfect_scaling_below is None) == (not known[1])
    assert bool(found.next_trials) == (known != (True, True, True))


@pytest.mark.parametrize(
    ("b_crit", "sizes", "options"),
    [
        # 9,000 lies beyond the largest batch size, 2,048.
        (9000.0, (8, 2048), "a larger search.batch_size.high"),
        # Larger batch sizes are left to run.
        (9000.0, (8, 512), None),
        (2.0, (8, 2048), "a smaller search.batch_size.low"),
        (2.0, (32, 2048), None),
    ],
)
def test_an_interval_beyond_the_search_asks_for_other_batch_sizes_and_no_trials(
    b_crit, sizes, options
):
    found = critical_batch(posterior_of(b_crit, sizes=sizes))
    note = f": {options}, with another study=NAME, would show more"
    assert found.note is None if options is None else found.note.endswith(note)
    assert found.is_beyond_search == (options is not None)
    assert bool(found.next_trials) == (options is None)
    assert found.value is None


@pytest.mark.parametrize(
    ("sizes", "above", "known"),
    [
        # The prior's upper end, 2400, is near a batch size that reached the target.
        (
            (2048, 2048),
            0.0,
            (False, False, False),
        ),
        # The prior's lower end is 7.
        ((8, 8), 0.0, (False, False, False)),
        ((8, 2048), 0.0, (False, False, False)),
        ((8, 2048), 64.0, (True, True, False)),
    ],
)
def test_an_end_that_the_prior_sets_is_open(sizes, above, known):
    posterior = posterior_of(200.0, sizes=sizes)
    theta = draw_prior(posterior.prior, 1000, np.random.default_rng(1))
    found = critical_batch(
        replace(posterior, theta=theta[np.exp(theta[:, B_CRIT] + MIDDLE) > above])
    )
    assert tuple(end is not None for end in (found.low, found.value, found.high)) == known
    assert (found.s_min is None, found.e_min is None) == (not known[2], not known[0])
    # Among draws of the prior above 64, the 5% quantile is about 70.
    assert critical_text(found).endswith("(90%: above 70)" if known[0] else "open at both ends)")


def test_nothing_reached_gives_nothing():
    assert critical_batch(posterior_of(200.0, status="stopped")) is None


def test_a_small_batch_term_is_reported_where_the_trials_ask_for_it():
    found = critical_batch(posterior_of(200.0, 40.0))
    assert (found.b_opt, found.b_opt_low, found.b_opt_high) == pytest.approx(
        (40.0, 40.0 * math.exp(-0.09), 40.0 * math.exp(0.09)), rel=0.02
    )
    # It is the value of its own law, without the small-batch term.
    assert found.value == pytest.approx(200.0, rel=0.02)
    # E_min = S_min (B_crit + 2 B_opt).
    assert found.e_min == pytest.approx(100.0 * (200.0 + 2.0 * 40.0), rel=0.03)
    assert found.maximal_data_parallelism_above > 9 * found.value
    ends = (
        # Beyond an octave above 32: B_opt's interval is 55 to 66, and 73 to 88.
        critical_batch(posterior_of(200.0, 60.0, sizes=(8, 32))),
        critical_batch(posterior_of(200.0, 80.0, sizes=(8, 32))),
    )
    wide, beyond = ends
    assert (wide.b_opt_low is None, wide.b_opt_high is None) == (False, True)
    assert (beyond.b_opt_low is None, beyond.b_opt_high is None) == (True, True)
    # A term below the smallest batch size changes nothing.
    assert critical_batch(posterior_of(200.0, 5.0)).b_opt is None


def test_the_trials_that_would_narrow_it_are_on_both_sides_at_the_best_rate():
    posterior = posterior_of(200.0, spread=2.0)
    found = critical_batch(posterior).next_trials
    sizes = [trial.batch_size for trial in found]
    assert sizes == sorted(set(sizes))
    assert len(sizes) == 3
    # On both sides of the geometric middle, 128.
    assert sizes[0] <= 64 < 128 < sizes[-1]
    for trial in found:
        assert trial.seconds == pytest.approx(1e-3 * trial.steps)
    assert critical_batch(posterior, in_seconds=False).next_trials[0].seconds is None


@pytest.mark.parametrize(
    ("low", "too_large", "largest"), [(8, 64, 54), (8, 8, None), (8, 4, None), (3, 4, 3)]
)
def test_no_trial_is_named_that_does_not_fit(low, too_large, largest):
    no_room = replace(posterior_of(200.0, spread=2.0, low=low), too_large=math.log2(too_large))
    sizes = [round(2.0**x) for x, _, _ in most_telling(no_room, 3)]
    assert max(sizes, default=None) == largest


# Evaluations with a gap, and one that got worse again.
HISTORY = ((10, 0.5), (20, 0.3), (30, None), (40, 0.19), (50, 0.21), (60, 0.1))


@pytest.mark.parametrize(
    ("value", "steps", "steps_low", "status"),
    [
        (0.5, 10, 0, "reached"),
        # 0.25 was first met at step 40: 0.3 at 20 missed it, and 30 has no value.
        (0.25, 40, 30, "reached"),
        (0.2, 40, 30, "reached"),
        (0.1, 60, 50, "reached"),
        # The record stays as it stood.
        (0.05, 77, 70, "stopped"),
    ],
)
def test_a_record_at_an_easier_target(value, steps, steps_low, status):
    trial = make_result(batch_size=32, status="stopped", steps=77, steps_low=70, history=HISTORY)
    found = ended_where_met(trial, replace(TARGET, value=value))
    assert (found.steps, found.steps_low, found.status) == (steps, steps_low, status)
    assert status == "stopped" or found.examples == 32 * steps


def falling(number, batch_size, last):
    history = tuple((step, 0.1 * last / step) for step in range(5, last + 1, 5))
    return make_result(
        number=number, batch_size=batch_size, status="reached", steps=last, history=history
    )


def test_b_crit_over_targets_that_enough_trials_passed():
    # Sizes from 16 to 2048, whose examples are the same.
    done = [falling(i, 16 * 2**i, round(4000 / 2**i)) for i in range(8)]
    # Of the 20 that all of them passed, five with both ends.
    ladder = 0.1 * 1.06 ** np.array([1, 6, 11, 15, 20])
    values = [target.value for target in easier_targets(done, TARGET, 0.0)]
    assert values == pytest.approx(ladder)
    # Seven trials are too few, and nine of one batch size too near.
    assert easier_targets(done[:7], TARGET, 0.0) == easier_targets(done[:1] * 9, TARGET, 0.0) == []
    assert easier_targets(done, TARGET, None) == []
    assert "set workload.target.bounds" in no_easier_target(TARGET, None)
    assert "by 8 closely evaluated trials over 8 times the batch size" in no_easier_target(
        TARGET, 0.0
    )
    assert "has a schedule for the harder one" in no_easier_target(TARGET, 0.0, horizon=True)
    coarse = []
    parts = []
    for trial in done:
        first_and_last = (trial.history[0], trial.history[-1])
        coarse.append(replace(trial, history=first_and_last))
        parts.append(replace(trial, number=trial.number + 8, resumed_from=trial.number))
    assert easier_targets(coarse, TARGET, 0.0) == []
    # Eight parts of four trials are four trials.
    assert easier_targets([*done[:4], *parts[:4]], TARGET, 0.0) == []
    done += parts
    asked = []

    def infer(trials, target):
        asked.append([trial.steps for trial in trials])
        # B_crit falls as the target gets harder.
        return posterior_of(1000.0 * target.value, spread=0.3)

    rows = over_targets(done, TARGET, 0.0, infer)
    for row in rows:
        assert row.value == pytest.approx(1000.0 * row.target, rel=0.03)
        assert row.passed == 8
    assert rows
    # The later a target is passed, the harder it is.
    for of_easiest, of_hardest in zip(asked[0], asked[-1], strict=True):
        assert of_easiest > of_hardest


def rows_of(b_crit, width=1.2, values=(2.0, 2.2, 2.4, 2.6)):
    """B_crit at targets, each with an interval of a factor."""
    rows = []
    for target in values:
        middle = b_crit(target)
        row = CriticalAtTarget(
            target=target, passed=9, value=middle, low=middle / width, high=middle * width
        )
        rows.append(row)
    return rows


@pytest.mark.parametrize("ideal", [0.0, 1.0])
@pytest.mark.parametrize("exponent", [-4.76, 0.0, 2.0])
def test_the_exponent_of_a_power_of_the_distance_and_its_sign(ideal, exponent):
    found = growth_over_target(
        rows_of(lambda target: 30.0 * abs(target - ideal) ** exponent, values=(2.0, 2.5, 3.0, 4.0)),
        ideal,
    )
    assert found.exponent == pytest.approx(exponent, abs=1e-6)
    assert (found.start, found.end, found.ideal) == (4.0, 2.0, ideal)
    assert found.low < exponent < found.high
    # Exponents well beyond the interval's width of about one.
    assert (found.low > 0, found.high < 0) == (exponent > 1, exponent < -1)
    # The line through four points: sigma of a point over the root of the sum of squares of what is
    # centred.
    x = np.log(np.abs(np.array([2.0, 2.5, 3.0, 4.0]) - ideal))
    half = math.log(1.2) / np.sqrt(((x - x.mean()) ** 2).sum())
    assert found.high - exponent == pytest.approx(half, rel=1e-6)


def test_a_wide_interval_weighs_little_and_scatter_widens_what_is_said():
    def law(target):
        return 300.0 * target**-4.0

    rows = rows_of(law)
    # An interval of a factor of 100 on either side.
    off = CriticalAtTarget(target=2.8, passed=9, value=900.0, low=9.0, high=90_000.0)
    assert growth_over_target([*rows, off], 0.0).exponent == pytest.approx(-4.0, abs=0.1)
    scattered = rows_of(law, 1.01)
    narrow = growth_over_target(scattered, 0.0)
    scattered[1] = changed(scattered[1], value=1.5 * scattered[1].value)
    found = growth_over_target(scattered, 0.0)
    # One point of four lies half as high again as the law.
    assert found.high - found.low > 5 * (narrow.high - narrow.low)


def test_fewer_than_three_targets_with_both_ends_tell_no_growth():
    rows = rows_of(lambda target: 30.0)
    for k, name in enumerate(("value", "low", "high")):
        rows[k] = changed(rows[k], **{name: None})
        # One row may lack an end: three are left.
        assert (growth_over_target(rows, 0.0) is None) == (k > 0)
    assert growth_over_target([rows[3]] * 5, 0.0) is None
    assert growth_over_target([], 0.0) is None


def with_term_in_some(sizes, with_term, horizon):
    """A posterior a share of whose draws has a small-batch term, and half of B_crit."""
    posterior = posterior_of(150.0, sizes=sizes, horizon=horizon)
    theta = posterior.theta.copy()
    theta[:, B_OPT] = -20.0
    count = round(with_term * len(theta))
    theta[:count, B_OPT] = math.log(40.0) - MIDDLE
    # With half of B_crit the draws disagree on its value, too.
    theta[:count, B_CRIT] -= math.log(2.0)
    return replace(posterior, theta=theta)


@pytest.mark.parametrize(
    ("sizes", "with_term", "reason"),
    [
        ((8, 32, 128, 512, 2048), 0.0, None),
        # 330/32 = 10.3, and 300/32 = 9.4: a span of ten is asked for.
        ((32, 100, 330), 0.0, None),
        ((32, 100, 300), 0.0, "span a factor of 9: under a schedule that ends with the trial it"),
        # Of three draws in ten: neither with nor without the term is sure.
        ((8, 32, 128, 512, 2048), 0.3, "whether small batch sizes waste examples, and B_crit is 2"),
        ((8, 32, 128, 512, 2048), 0.97, None),
    ],
)
def test_under_a_horizon_neighbours_and_an_untold_term_determine_no_b_crit(
    sizes, with_term, reason
):
    found = critical_batch(with_term_in_some(sizes, with_term, horizon=True))
    undetermined = reason is not None
    assert (found.value is None, found.low is None, found.high is None) == (undetermined,) * 3
    assert (found.perfect_scaling_below is None, found.s_min is None) == (undetermined,) * 2
    assert not undetermined or reason in found.note
    assert bool(found.next_trials) == undetermined
    # Without a horizon the posterior is believed.
    assert critical_batch(with_term_in_some(sizes, with_term, horizon=False)).value is not None


@pytest.mark.parametrize("horizon", [False, True])
@pytest.mark.parametrize(
    ("steps", "reason"),
    [
        ((1000, 500), None),
        # The two lie within the scatter.
        ((1000, 1050), None),
        ((1000, 1600), "B = 512 takes more steps than B = 32"),
        # 16 times the batch needs at least 1000/16 = 62 steps: 61 are within the scatter.
        ((1000, 61), None),
        ((1000, 40), "B = 512 takes fewer examples than B = 32"),
    ],
)
def test_two_batch_sizes_that_contradict_the_law_have_no_b_crit(steps, reason, horizon):
    posterior = posterior_of(200.0, sizes=(32, 512), horizon=horizon)
    seen = [replace(one, steps=own) for one, own in zip(posterior.observations, steps, strict=True)]
    found = critical_batch(replace(posterior, observations=tuple(seen)))
    assert (found.value is None) == (reason is not None)
    assert reason is None or reason in found.note
    # A third size decides between the law and what it misses.
    third = (*seen, replace(seen[0], x=6.0, number=2))
    assert critical_batch(replace(posterior, observations=third)).value is not None
