"""Schedules that end with the trial: the law of the metric over horizons, the horizon chosen, and whole searches."""

import math
from dataclasses import replace

import numpy as np
import pytest
from builders import options_and_recipe
from learners import factors
from scipy.special import ndtr
from synthetic import Law
from toolbox import make_result, make_spec

from bstune.core.records import Target
from bstune.search.acquisition import suggest
from bstune.search.candidates import Candidates, Domain
from bstune.search.curve_decision import choose_for_curve
from bstune.search.frontier_law import NOISE, draw_prior, log_steps, make_prior
from bstune.search.horizon import (
    EXCESS_RESOLUTION,
    HORIZON_NORMAL,
    LOG_HORIZONS,
    OUTLIERS,
    RELIABLE,
    Ends,
    early_variance,
    least_cost,
    log_chance_at_end,
    log_jacobian,
    log_met,
    log_shortest,
    misfit,
)
from bstune.search.likelihood import log_likelihood, log_steps_seen
from bstune.search.observations import likelihood_data
from bstune.search.posterior import infer
from bstune.search.predictions import (
    POINT_MISFIT,
    chance_of_reaching,
    fresh_horizons,
    fresh_steps,
    predict_objectives,
)
from bstune.search.sampler import default_policy
from bstune.trial.workload import build_module

LOW = 8
HIGH = 4096
BUDGET = 20_000.0
# A trial needs S*(B) steps at the best rate, and more at others.
LAW = Law(s_min=300.0, b_crit=400.0, lr=0.1, batch_size=128.0)
ERROR = Target("error", 0.1, "min")
POLICY = replace(default_policy(), particles=96, moves=2, candidates=80, curve_share=0.0)


def prior(horizon=True, others=0):
    study = {
        "low": LOW,
        "high": HIGH,
        "rule": lambda x: np.log2(0.1) + 0.5 * (x - 7.0),
        "others": others,
    }
    made = {
        "log_budget": math.log(BUDGET),
        "sigma": 1.0,
        "exponent_sigma": 0.3,
        "noise_scale": None,
    }
    return make_prior(**study, **made, horizon=horizon)


def trial(number, size, lr, horizon, power=0.5, share=1.0, shortest=None):
    """A trial of this horizon: the metric is 0.1 (S/h)^power at its end."""
    # It reaches the target at S^(1 - share) h^share: at its end for a share of 1.
    shortest = shortest or LAW.steps(size, lr)
    steps = horizon if horizon < shortest else round(shortest ** (1 - share) * horizon**share)
    # A metric above or below 0.1 tells how far its horizon is from S.
    value = 0.1 * (shortest / horizon) ** power if steps == horizon else 0.1
    return make_result(
        number=number, batch_size=size, lr=lr, status="reached" if horizon >= shortest else "stopped", steps=steps,
        steps_low=steps, horizon=horizon, history=((steps, value),), seconds_per_step=LAW.tau(size), trial_index=number,
        train_seconds=steps * LAW.tau(size),
    )  # fmt: skip


def trials_at(horizons, power=0.5, **changes):
    """A trial of each horizon, at one point."""
    trials = []
    for number, horizon in enumerate(horizons):
        trials.append(trial(number, 128, 0.1, horizon, power, **changes))
    return trials


def inferred(trials, seed=0, particles=96, **changes):
    settings = {
        "prior": prior(),
        "target": ERROR,
        "ideal": 0.0,
        "step_time": LAW.tau,
        "in_examples": False,
    }
    settings |= {"particles": particles, "moves": POLICY.moves, "rng": np.random.default_rng(seed)}
    return infer(trials, {}, **(settings | changes))


def test_the_law_in_closed_form():
    # The logs of scale, power, share and waste: 2 x 0.25^0.5 = 1.
    law = np.log([[2.0, 0.5, 0.5, 0.4]])
    ends = Ends(np.array([0.25, -0.25, 0.0, 0.0]), np.array([0.0, 0.0, -0.4, 0.0]))
    assert log_shortest(law, ends).tolist() == [
        # 0.4 tanh(0.4/0.4) - 0.5 x 0.4 for a run that ended 0.4 before its horizon.
        pytest.approx([1.0, -1.0, 0.4 * math.tanh(1.0) - 0.2, 0.0])
    ]
    # A quarter of either term, and nothing of a trial that ran to its end.
    spread = early_variance(law, ends) ** 0.5
    assert spread[0] == pytest.approx([0.0, 0.0, 0.25 * math.hypot(0.4 * math.tanh(1.0), 0.2), 0.0])
    spreads = misfit(Ends(np.array([0.0, 0.1, 1.0]), np.zeros(3)))
    # No trial is read more exactly than this.
    assert spreads[0] == 0.03
    assert (np.diff(spreads) > 0.0).all()


def test_where_within_a_horizon_the_target_is_met_may_be_anything_before_the_first_trial():
    """It is met at S^(1 - m) h^m; m is nearly uniform."""
    share = np.exp(
        draw_prior(prior(), 4000, np.random.default_rng(0))[:, prior().horizon_law][:, 2]
    )
    levels = np.linspace(0.1, 0.9, 9)
    # A uniform share has its quantiles at the levels themselves.
    assert np.quantile(share / (1.0 + share), levels) == pytest.approx(levels, abs=0.04)


@pytest.mark.parametrize("datum", [-0.8, -0.05, 0.02, 0.3, 1.5])
def test_the_derivative_over_an_excess_is_that_of_finite_differences(datum):
    law = draw_prior(prior(), 50, np.random.default_rng(0))[:, prior().horizon_law]
    shift = 1e-6

    def log_s(excess):
        return log_shortest(law, Ends(np.array([excess]), np.zeros(1)))[:, 0]

    slope = (log_s(datum + shift) - log_s(datum - shift)) / (2.0 * shift)
    found = log_jacobian(law, Ends(np.array([datum]), np.zeros(1)))[:, 0]
    assert found == pytest.approx(np.log(slope), abs=1e-6)


@pytest.mark.parametrize("early", [-0.001, -0.1, -0.7, -3.0])
def test_the_derivative_over_the_step_that_met_the_target_is_that_of_finite_differences(early):
    """The horizon stays as it was chosen: a later step is a shorter rest of it."""
    # A thousand steps, of which the law sees differences of logs alone.
    law = draw_prior(prior(), 50, np.random.default_rng(0))[:, prior().horizon_law]
    horizon = math.log(1000.0)
    shift = 1e-6

    def log_s(log_step):
        over = log_shortest(law, Ends(np.zeros(1), np.array([log_step - horizon])))[:, 0]
        return log_step + over

    met = horizon + early
    slope = (log_s(met + shift) - log_s(met - shift)) / (2.0 * shift)
    found = log_jacobian(law, Ends(np.zeros(1), np.array([early])))[:, 0]
    assert found == pytest.approx(np.log(slope), abs=1e-5)


def test_the_derivative_is_finite_at_the_target_and_nought_without_a_datum():
    law = np.log([[2.0, 0.5, 0.5, 0.4], [2.0, 1.5, 0.5, 0.4]])
    # Within the resolution of the metric the derivative is held.
    near = [EXCESS_RESOLUTION, 1e-9, -1e-9]
    found = log_jacobian(law, Ends(np.array([*near, 0.0]), np.zeros(4)))
    assert found[:, 1].tolist() == found[:, 0].tolist() == found[:, 2].tolist()
    # d/de 2 e^p = 2 p e^(p - 1), with a power of 0.5 and of 1.5.
    assert found[:, 0] == pytest.approx(
        [
            math.log(2.0 * 0.5 * EXCESS_RESOLUTION**-0.5),
            math.log(2.0 * 1.5 * EXCESS_RESOLUTION**0.5),
        ]
    )
    assert found[:, 3].tolist() == [0.0, 0.0]


def test_the_derivative_stands_in_the_likelihood_once_a_trial_and_weighed_like_it():
    """A bound and a trial that diverged have none; a record that is repeated counts once."""
    trials = [
        trial(0, 64, 0.1, 500),
        # It reached half way, in logs, between S and its horizon.
        trial(1, 64, 0.1, 20_000, share=0.5),
        replace(trial(2, 64, 0.1, 500), history=()),
        make_result(number=3, batch_size=64, lr=9.0, status="diverged", steps=5, history=()),
    ]
    theta = draw_prior(prior(), 20, np.random.default_rng(0))
    data = inferred(trials).data
    assert (data.bound | data.diverged).tolist() == [False, False, True, True]
    laws = prior().horizon_law
    jacobian = log_jacobian(theta[:, laws], data.ends)[:, :2]
    # Of the same log S, as data that no law of horizons has made: the rest of the likelihood.
    over = log_shortest(theta[:, laws], data.ends)
    # As they are, and with weights as of repeated records.
    for weight in (None, np.array([0.5, 0.25, 1.0, 1.0])):
        expected = []
        for i, row in enumerate(theta):
            spread = np.sqrt(data.spread**2 + early_variance(row[None, laws], data.ends)[0])
            plain = replace(data, y=data.y + over[i], spread=spread, ends=None, weight=weight)
            weighed = jacobian[i] if weight is None else jacobian[i] * weight[:2]
            expected.append(log_likelihood(row[None], plain, prior())[0] + weighed.sum())
        found = log_likelihood(theta, replace(data, weight=weight), prior())
        assert found == pytest.approx(np.array(expected), rel=1e-9)


@pytest.mark.parametrize("power", [0.4, 1.0])
def test_a_law_that_maps_all_data_to_one_log_s_is_not_preferred(power):
    """Twelve trials of one S at many horizons: S lies in the interval, and scale is not driven to nought."""
    # A factor of 16 around 1,000.
    horizons = np.geomspace(250, 4000, 12).round().astype(int).tolist()
    seen = trials_at(horizons, power, shortest=1000.0)
    posterior = inferred(seen, particles=400)
    at = posterior.prior.points_at(np.array([7.0]), np.array([math.log2(0.1)]))
    low, high = np.quantile(log_steps(posterior.theta, at, posterior.prior)[:, 0], (0.05, 0.95))
    assert low < math.log(1000.0) < high


@pytest.mark.parametrize("share", [1e-3, 0.5, 4.0])
@pytest.mark.parametrize("waste", [1e-3, 0.3, 0.7])
def test_when_runs_meet_the_target_is_what_their_ends_say_of_the_shortest_horizon(share, waste):
    law = np.log([[2.0, 0.8, share, waste]])
    met = log_met(law)
    # Run at any horizon, the law leads back from where it was met to the shortest one.
    over = log_shortest(law, Ends(np.zeros(LOG_HORIZONS.size), met - LOG_HORIZONS))[0]
    assert over == pytest.approx(-met, abs=0.01)
    assert met[0] == pytest.approx(0.0, abs=0.01)
    # It is as if the rate had never fallen.
    assert share > 0.1 or met[-1] == pytest.approx(-waste, abs=0.02)


def met_of(share, waste=1e-6):
    return log_met(np.log([[2.0, 0.8, share, waste]]))


@pytest.mark.parametrize(
    ("spread", "above"), [(0.03, True), (0.1, True), (0.3, True), (1.0, False), (3.0, False)]
)
def test_the_horizon_of_least_cost_until_a_run_reaches_the_target(spread, above):
    """Where all is gained at the end the cost is h/P(S <= h): a run that misses is run again."""
    grid = np.linspace(-12.0, 2.0, 28_001)
    # The cost of a run over the chance that it reaches, and what outliers cost.
    cost = np.exp(grid) / (ndtr(grid / spread) + 1e-300) + np.exp(grid) * OUTLIERS / (
        1.0 - OUTLIERS
    )
    least, steps = least_cost(met_of(1e9), spread, math.inf)
    assert least == pytest.approx(grid[cost.argmin()], abs=0.03 * max(spread, 1.0))
    assert (least > 0.0) == above
    assert spread > 0.3 or steps == pytest.approx(cost.min(), rel=0.05)
    # The less the end matters, the longer; the longer still the more a schedule's end wastes.
    longer = []
    for law in ((1e9,), (4.0,), (1.0,), (0.01,), (0.01, 0.7)):
        longer.append(least_cost(met_of(*law), spread, math.inf)[0])
    # The laws are in the order in which less and less is gained at the end.
    assert longer == sorted(longer)
    assert longer[-1] <= 4.0 * spread
    assert not above or least < longer[2] < longer[-1]


def test_a_horizon_of_least_cost_within_limits():
    met = met_of(1.0)
    free, _ = least_cost(met, 0.2, math.inf)
    assert least_cost(met, 0.2, 0.5 * free)[0] == 0.5 * free
    assert least_cost(met, 0.2, math.inf, log_latest=0.25 * free)[0] == pytest.approx(
        0.5 * free, abs=0.01
    )
    assert least_cost(met, 0.2, -3.0)[0] == -3.0
    assert least_cost(met, 0.2, math.inf, log_latest=-9.0) == (-9.0, math.inf)
    # Many short runs are cheaper, but no winner is named by that.
    assert least_cost(met, 2.0, math.inf)[0] < 0.0
    assert least_cost(met, 2.0, math.inf, shortest=RELIABLE)[0] == 2.0 * RELIABLE
    assert least_cost(met, 2.0, 1.0, shortest=RELIABLE)[0] == 1.0


@pytest.mark.parametrize("share", [0.05, 0.5, 4.0, 50.0])
@pytest.mark.parametrize("waste", [0.01, 0.3])
def test_the_chance_that_a_run_met_the_target_no_earlier_than_at_its_end(share, waste):
    """It is about a half where its last look that missed is as far back as the law has it meet the target."""
    law = np.log([[2.0, 1.0, share, waste]])
    beyond = 0.5
    # How far before the horizon's end the law has it meet the target.
    early = beyond - float(np.interp(beyond, LOG_HORIZONS, log_met(law)))
    looks = np.linspace(0.0, 2.0, 4001)
    ends = Ends(np.full(looks.size, -beyond / 2.0), np.zeros(looks.size), looks)
    chance = (np.exp(log_chance_at_end(law, ends)[0]) - OUTLIERS) / (1.0 - OUTLIERS)
    assert (np.diff(chance) >= 0.0).all()
    half = looks[np.abs(chance - 0.5).argmin()]
    assert -1e-3 < half - early < 0.6 * waste + 1e-3
    unknown = Ends(np.array([-0.25, 0.25]), np.zeros(2), np.full(2, np.inf))
    assert log_chance_at_end(law, unknown).tolist() == [[0.0, 0.0]]
    assert log_chance_at_end(law, replace(unknown, log_over_last_miss=None)).tolist() == [
        [0.0, 0.0]
    ]


def test_how_much_is_gained_at_the_end_is_learnt_from_runs_that_met_the_target_there():
    """All is gained there, or all horizons meet it at one step: shares m of 1 and of 0."""
    shares = []
    for share in (1.0, 0.0):
        horizons = (700, 850, 1050, 1200, 1400, 1700)
        trials = trials_at(horizons, share=share, shortest=1000.0)
        posterior = inferred(trials, particles=400)
        drawn = np.exp(posterior.theta[:, posterior.prior.horizon_law][:, 2])
        shares.append(np.quantile(drawn / (1.0 + drawn), (0.1, 0.9)))
    # Nine draws in ten lie above 0.6, or below it.
    assert shares[0][0] > 0.6
    assert shares[1][1] < 0.6


@pytest.mark.parametrize(
    ("status", "steps_low", "horizon", "late"),
    [
        # It missed at 80 of 100.
        ("reached", 80, 100, math.log(100 / 80)),
        # Nothing was looked at before.
        ("reached", 0, 100, math.inf),
        # It met the target before its end.
        ("reached", 80, 120, math.inf),
        ("stopped", 100, 100, math.inf),
    ],
)
def test_the_last_look_of_a_run_that_met_the_target_at_its_end(status, steps_low, horizon, late):
    value = 0.08 if status == "reached" else 0.2
    one = make_result(
        batch_size=64, status=status, steps=100, steps_low=steps_low, history=((100, value),), horizon=horizon
    )  # fmt: skip
    assert inferred([one]).data.ends.log_over_last_miss.tolist() == [pytest.approx(late)]


@pytest.mark.parametrize(
    ("status", "steps", "history", "excess", "early", "bound"),
    [
        # 0.2 is twice the target.
        ("stopped", 100, ((50, 0.5), (100, 0.2)), math.log(2.0), 0.0, False),
        # The nearest that it came to the target counts.
        (
            "stopped",
            100,
            ((50, 0.2), (100, 0.5)),
            math.log(2.0),
            0.0,
            False,
        ),
        # It missed by the metric's rounding.
        ("stopped", 100, ((100, 0.1),), 0.003, 0.0, False),
        # Without a metric it is a bound.
        ("stopped", 100, (), 0.0, 0.0, True),
        # 0.08 over the target of 0.1.
        ("reached", 100, ((100, 0.08),), math.log(0.8), 0.0, False),
        # It met the target at 80 of 100 steps, which leaves no excess to read.
        ("reached", 80, ((80, 0.05),), 0.0, math.log(0.8), False),
        ("diverged", 100, ((100, 0.9),), 0.0, 0.0, False),
    ],
)
def test_how_a_trial_ends_its_horizon(status, steps, history, excess, early, bound):
    one = make_result(
        batch_size=64, status=status, steps=steps, steps_low=0, history=history, horizon=100
    )
    data = inferred([one]).data
    assert (data.ends.log_excess[0], data.ends.log_share_run[0]) == (
        pytest.approx(excess),
        pytest.approx(early),
    )
    assert (bool(data.bound[0]), data.y[0]) == (bound, math.log(steps))
    # It needs more than the horizon at which it missed.
    assert data.log_steps_missed[0] == (
        math.log(100) if status == "stopped" and not bound else -math.inf
    )


def test_without_a_horizon_nothing_of_it_is_there():
    plain = inferred([trial(0, 64, 0.1, 9_000)], prior=prior(horizon=False))
    assert plain.data.ends is None
    assert plain.observations[0].horizon is None
    # The law's parameters have no column.
    assert plain.theta.shape[1] == inferred([]).theta.shape[1] - len(HORIZON_NORMAL)
    assert prior(others=2).others == prior(horizon=False, others=2).others == 2


def test_the_law_is_learnt_from_trials_of_several_horizons():
    """Two laws, eight trials at one point each: what they say of a metric that is 30% or 100% off its target."""
    for power in (0.25, 1.0):
        horizons = np.geomspace(150, 1800, 8).round().astype(int).tolist()
        seen = trials_at(horizons, power, shortest=1100.0)
        posterior = inferred(seen, particles=400)
        law = posterior.theta[:, posterior.prior.horizon_law]
        # By the power law the excess is power x log(S/h).
        excess = power * np.log([1.3, 2.0, 4.0])
        found = np.median(log_shortest(law, Ends(excess, np.zeros(3))), axis=0)
        assert found == pytest.approx(np.log([1.3, 2.0, 4.0]), rel=0.3)


def test_a_horizon_that_was_met_by_luck_is_predicted_to_cost_more():
    around = trials_at((900, 950, 1050, 1100, 1200), shortest=1000.0)
    lucky = replace(
        trial(5, 128, 0.1, 1000), status="reached", steps=820, horizon=820, history=((820, 0.1),)
    )
    costs = {}
    for cost, one in predict_objectives(inferred([*around, lucky]), "steps"):
        costs[one.number] = cost
        assert 1000.0 < cost < 1400.0
    # Those that reached.
    assert costs.keys() == {2, 3, 4, 5}


@pytest.mark.parametrize(
    ("met", "least", "most", "budget"),
    [
        # All is gained at the end: S and a slack. Nothing is: a long horizon misses less often, and
        # is free.
        (None, 1000, 1350, BUDGET),
        (550, 1350, 20_000, BUDGET),
        # The budget is the longest horizon.
        (550, 1200, 1200, 1200.0),
    ],
)
def test_a_point_is_run_again_at_the_horizon_of_least_cost(met, least, most, budget):
    horizons = (700, 800, 900, 1100, 1200, 1300, 2400, 4000)
    trials = []
    for one in trials_at(horizons, shortest=1000.0):
        if met is not None and one.reached:
            one = replace(one, steps=met, history=((met, 0.1),))
        trials.append(one)
    posterior = inferred(trials, particles=400, budget=lambda size: budget)
    named = fresh_horizons(posterior)
    assert named.keys() == fresh_steps(posterior).keys() == {3, 4, 5, 6, 7}
    for horizon in named.values():
        assert least <= horizon <= most
    assert fresh_horizons(inferred(trials, prior=prior(horizon=False))) == {}


def test_the_chance_of_reaching_is_the_share_of_seeds_whose_steps_lie_below_the_horizon():
    """S of seeds scatters by 20% about 1,000 steps: it lies below 1,000 in half of them."""
    rng = np.random.default_rng(0)
    trials = []
    for number, horizon in enumerate(np.geomspace(600.0, 1800.0, 24)):
        shortest = 1000.0 * math.exp(rng.normal(0.0, 0.2))
        trials.append(trial(number, 128, 0.1, round(horizon), shortest=shortest))
    posterior = inferred(trials, particles=400)
    number = max(fresh_steps(posterior))
    chances = [chance_of_reaching(posterior, number, horizon) for horizon in (600, 1000, 1800)]
    # S scatters by 0.2 in logs: log(0.6)/0.2 and log(1.8)/0.2 are -2.6 and 2.9 deviations.
    assert chances[0] < 0.15
    assert chances[1] == pytest.approx(0.5, abs=0.2)
    assert 0.85 < chances[2] <= 1.0 - OUTLIERS


@pytest.mark.parametrize("spread", [0.03, 0.5])
def test_a_run_draws_its_place_by_how_well_it_says_what_its_shortest_horizon_is(spread):
    """In one draw: the model's log S, and of the run's distance from it the share that precisions leave."""
    around = trials_at((900, 1100), shortest=1000.0)
    lucky = replace(trial(2, 64, 0.1, 500, shortest=500.0), history=((500, 0.1),))
    posterior = inferred([*around, lucky])
    data = posterior.data
    theta = posterior.theta[:1]
    posterior = replace(
        posterior, theta=theta, data=replace(data, spread=np.array([0.03, 0.03, spread]))
    )
    # What the model says of this point without its run.
    expected = log_steps(theta, data.points, posterior.prior)[0, 2]
    gap = log_steps_seen(theta, data, posterior.prior)[0, 2] - expected
    noise = math.exp(2.0 * theta[0, NOISE])
    # Of the distance the place has its share: its own variance over all.
    drawn = POINT_MISFIT**2 / (POINT_MISFIT**2 + noise + spread**2)
    middle = math.exp(expected + drawn * gap)
    assert chance_of_reaching(posterior, 2, middle) == pytest.approx(0.5 * (1.0 - OUTLIERS))
    # One deviation of a fresh seed above it: the noise, and what is left of what the model misses
    # at the place.
    deviation = math.sqrt(noise + (1.0 - drawn) * POINT_MISFIT**2)
    chance = chance_of_reaching(posterior, 2, middle * math.exp(deviation))
    # The normal distribution at one deviation.
    assert chance == pytest.approx(ndtr(1.0) * (1.0 - OUTLIERS))


@pytest.mark.parametrize(("count", "least", "most"), [(1, 1.0, 3.0), (4, 1.3, 4.0), (11, 1.2, 2.2)])
def test_the_horizon_of_the_users_own_pair_whose_run_met_the_target_early(count, least, most):
    """With the budget as its horizon; every run of any longer horizon meets the target after 0.7 of S."""
    waste = 0.4

    def annealed(number, size, lr, horizon):
        shortest = LAW.steps(size, lr)
        one = trial(number, size, lr, horizon, share=0.0)
        if not one.reached:
            return one
        # Steps at which the run may meet the target, between S e^-waste and S.
        steps = np.exp(np.linspace(math.log(shortest) - waste, math.log(shortest), 2001))
        over = waste * np.tanh(np.log(horizon / steps) / waste)
        met = round(float(steps[np.abs(np.log(shortest / steps) - over).argmin()]))
        return replace(one, steps=met, steps_low=met, history=((met, 0.1),))

    trials = [annealed(0, 128, 0.1, round(BUDGET))]
    # Ten more trials at horizons below and above S.
    factors = (0.5, 0.7, 0.8, 0.6, 1.3, 0.9, 1.2, 0.75, 1.5, 0.85)
    for number, factor in enumerate(factors, 1):
        size = (32, 64, 128, 256, 512)[(number - 1) % 5]
        lr = 0.1 * math.sqrt(size / 128) * (1.0, 0.7)[(number - 1) % 2]
        trials.append(annealed(number, size, lr, round(factor * LAW.steps(size, lr))))
    posterior = inferred(trials[:count], particles=400, budget=lambda size: BUDGET)
    assert least < fresh_horizons(posterior)[0] / LAW.steps(128, 0.1) < most


def decided(trials, seed, budget=BUDGET, **changes):
    posterior = inferred(trials, seed)
    settings = {
        "objective": "time",
        "budget": lambda size: budget,
        "policy": POLICY,
        "resumable": None,
    }
    place = Domain(LOW, HIGH, round, lambda x: (np.full(x.shape, -10.0), np.full(x.shape, 0.0)), 0)
    return posterior, suggest(
        posterior, (), domain=place, rng=np.random.default_rng(seed), **(settings | changes)
    )


@pytest.mark.parametrize("objective", ["time", "steps", "curve"])
def test_a_search_chooses_short_horizons_first_and_none_past_the_budget(objective):
    trials = []
    longest = []
    for number in range(16):
        posterior, chosen = decided(trials, number, budget=900.0, objective=objective)
        # A trial of a horizon is never continued.
        assert chosen.resumed_from is None
        assert 1 <= chosen.max_steps <= 900
        if not any(one.reached for one in trials):
            seconds = LAW.tau(2**chosen.x)
            # Ten steps, or a share of the budget, before anything was spent.
            least = max(POLICY.initial_fraction * 900.0, 10.0) * seconds
            assert (
                chosen.max_steps * seconds
                <= max(POLICY.max_horizon_growth * posterior.spent, least) + seconds
            )
        trials.append(trial(number, round(2**chosen.x), 2**chosen.z, chosen.max_steps))
        longest.append(chosen.max_steps)
    # It begins short.
    assert longest[0] < 30
    assert max(longest) > 10 * longest[0]


# A law that falls nearly at once, or through all of a schedule, is an end of the same range.
@pytest.mark.parametrize(
    "share",
    [0.6, *(pytest.param(share, marks=pytest.mark.slow) for share in (0.2, 1.0))],
)
def test_a_search_comes_to_the_shortest_horizon(share):
    """Of a law of the metric that it does not know: the budget is 10 times what the fastest point needs."""
    sizes = 2.0 ** np.arange(3.0, 12.0, 0.1)
    least = np.min(LAW.frontier(sizes) * LAW.tau(sizes))
    trials = []
    for number in range(24):
        _, chosen = decided(trials, number)
        size = round(2**chosen.x)
        lr = 2**chosen.z
        diverged = make_result(
            number=number, batch_size=size, lr=lr, status="diverged", steps=5, history=()
        )
        follows = LAW.steps(size, lr) is not None
        trials.append(
            trial(number, size, lr, chosen.max_steps, 0.35, share) if follows else diverged
        )
    reached = [one for one in trials if one.reached]
    best = min(reached, key=lambda one: one.time_to_target)
    # A fifth above the least time, and horizons that are not much longer than needed.
    assert best.time_to_target < 1.2 * least
    assert best.horizon < 1.4 * LAW.steps(best.batch_size, best.lr)


@pytest.mark.parametrize(
    "name",
    [
        "digits schedule=linear",
        pytest.param("resnet_cifar", marks=pytest.mark.slow),
        pytest.param("airbench_cifar", marks=pytest.mark.slow),
        pytest.param("airbench_muon", marks=pytest.mark.slow),
        pytest.param("speedrun_cifar", marks=pytest.mark.slow),
    ],
)
def test_a_schedule_ends_with_the_trials_own_steps(name):
    """Whatever the budget: as if it had been these steps."""

    def used(max_steps, budget):
        own = ("device=cpu", f"budget.steps={budget}", "budget.examples=1")
        options, recipe = options_and_recipe(*f"+workload={name}".split(), *own)
        assert recipe.takes("total_steps")
        module = build_module(options, recipe, replace(make_spec(100, 0.1), max_steps=max_steps))
        # Factors of the rate in 21 steps, the last one after the end.
        return factors(module.configure_optimizers()["lr_scheduler"]["scheduler"], 21)

    # The limit is the horizon where there is one, whatever the budget.
    assert used(20, 50) == used(None, 20) == used(20, 10)
    assert used(20, 50) != used(None, 50)


def test_no_trial_at_all_and_none_with_a_metric():
    assert likelihood_data([], prior()).ends.log_excess.shape == (0,)
    bounds = [replace(trial(i, 64, 0.1, 100), history=()) for i in range(3)]
    assert np.isfinite(inferred(bounds).theta).all()


@pytest.mark.parametrize(("missed", "runs_one"), [(0, True), (1, False)])
def test_the_curve_spends_a_whole_budget_in_vain_once_in_thirty_runs(missed, runs_one):
    """Large batch sizes tell most of B_crit, and their median of S is over the budget."""
    trials = []
    # Trials whose horizons are 5% longer than they need.
    for number, size in enumerate((8, 16, 32, 64, 128, 256) * 5):
        longest_of_size = round(1.05 * LAW.frontier(size))
        trials.append(trial(number, size, LAW.best_lr(size), longest_of_size))
    del trials[len(trials) - missed :]
    # One miss among thirty has used up what may be spent in vain.
    for number in range(90, 90 + missed):
        trials.append(replace(trial(number, 8, 0.02, 900), steps=900))
    posterior = inferred(trials, particles=800)
    assert len(posterior.observations) == 30

    def longest(size):
        # Above these sizes the budget is half of what is needed; elsewhere a run fits.
        return 900.0 if size < 16 else LAW.frontier(size) * (0.5 if size > 500 else 2.0)

    x = np.log2(np.array([32.0, 64.0, 3000.0, 4000.0]))
    z = np.log2(np.array([LAW.best_lr(2.0**log_size) for log_size in x]))
    options = Candidates((), x, z, np.zeros((4, 0)), np.zeros(4))
    chosen, _ = choose_for_curve(posterior, options, (), 0.0, longest)
    assert (chosen >= 2) == runs_one
    beyond = Candidates((), x[2:], z[2:], np.zeros((2, 0)), np.zeros(2))
    assert choose_for_curve(posterior, beyond, (), 0.0, longest)[0] in (0, 1)
