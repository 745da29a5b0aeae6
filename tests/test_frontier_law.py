import math
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from optuna.distributions import FloatDistribution, IntDistribution
from scipy import integrate, stats
from toolbox import make_result

from bstune.search import frontier_law, likelihood, monte_carlo, noise_scale_prior
from bstune.search.frontier_law import B_CRIT, B_OPT, LEVEL, OTHER, SHIFT, SHIFT_FREEDOM
from bstune.search.likelihood import TRIAL_OUTLIER_SHARE, LikelihoodData
from bstune.search.sampler import FrontierSampler

LOW = 8
HIGH = 8192
# The log2 of the geometric middle.
MIDDLE = 8.0


# log2 of the rate over log2 of the batch size: a square root.
def sqrt_rule(x):
    return -4.0 + 0.5 * x


def make(others=0, noise_scale=None, spread=0.0):
    study = {
        "low": LOW,
        "high": HIGH,
        "rule": sqrt_rule,
        "log_budget": math.log(4000.0),
        "others": others,
    }
    measured = {"noise_scale": noise_scale, "noise_scale_spread": spread}
    return frontier_law.make_prior(**study, **measured, sigma=1.0, exponent_sigma=0.3)


def at(prior, **values):
    """One set of parameters, (1, p): the prior's mean but for those named."""
    theta = prior.mean.copy()
    for name, value in values.items():
        theta[getattr(frontier_law, name.upper())] = value
    return theta[None]


def observed(*trials):
    """Trials of (log2 B, log2 lr, log S, its spread, status, maybe log of the least S) for the likelihood."""
    x, z, y, spread = np.array([trial[:4] for trial in trials], dtype=float).reshape(-1, 4).T
    status = np.array([trial[4] for trial in trials], dtype=str)
    least = np.array([trial[5] if len(trial) > 5 else -np.inf for trial in trials])
    return LikelihoodData(
        make().points_at(x, z), y, spread, least, status == "bound", status == "diverged"
    )


NOTHING = observed()


@pytest.mark.parametrize(("b_crit", "b_opt"), [(16.0, 1e-9), (1e5, 1e-9), (300.0, 40.0)])
def test_the_frontier_is_that_of_mccandlish_with_a_small_batch_term(b_crit, b_opt):
    prior = make()
    x = np.linspace(3.0, 13.0, 11)

    def law(size):
        return 1.0 + b_crit / size + (b_opt / size) ** 2

    # Parameters are relative to the middle of the batch sizes.
    theta = at(
        prior, level=5.0, b_crit=math.log(b_crit / 2**MIDDLE), b_opt=math.log(b_opt / 2**MIDDLE)
    )
    steps = np.exp(frontier_law.frontier(theta, prior.points_at(x), prior)[0])
    np.testing.assert_allclose(steps, math.exp(5.0) * law(2**x) / law(2**MIDDLE), rtol=1e-9)
    term = frontier_law.log_small_batch_term(theta, prior.points_at(x), prior)[0]
    np.testing.assert_allclose(np.exp(term), law(2**x) / (1.0 + b_crit / 2**x), rtol=1e-9)
    # At this batch size the examples are fewest.
    if b_opt > 1.0:
        sizes = np.geomspace(10.0, 1000.0, 2000)
        examples = sizes * np.exp(
            frontier_law.frontier(theta, prior.points_at(np.log2(sizes)), prior)[0]
        )
        assert sizes[examples.argmin()] == pytest.approx(b_opt, rel=0.01)


def test_the_discrepancy_is_linear_between_its_knots():
    prior = make()
    theta = at(prior, roughness=math.log(0.2))
    count = prior.knots.size
    theta[0, -count:] = np.arange(count) ** 2
    # Beyond its ends the discrepancy stays as it is there.
    x = np.array([-5.0, *prior.knots, 0.5 * (prior.knots[2] + prior.knots[3]), 40.0])
    expected = 0.2 * np.array([0.0, *np.arange(count) ** 2, 0.5 * (4 + 9), (count - 1) ** 2])
    found = frontier_law.frontier(theta, prior.points_at(x), prior) - frontier_law.frontier(
        at(prior), prior.points_at(x), prior
    )
    np.testing.assert_allclose(found[0], expected, atol=1e-12)
    # Knots about one and a half octaves apart.
    assert np.diff(prior.knots) == pytest.approx(1.5, abs=0.15)


def test_the_penalty_may_be_steeper_at_large_batch_sizes():
    prior = make()
    points = prior.points_at(np.array([MIDDLE - 2.0, MIDDLE, MIDDLE + 3.0]))
    plain = frontier_law.off_optimum(at(prior, tilt=0.0), points, prior)[0]
    tilted = frontier_law.off_optimum(at(prior, tilt=0.2), points, prior)[0]
    np.testing.assert_allclose(tilted, plain * np.exp(0.2 * np.array([-2.0, 0.0, 3.0])))


def test_the_cost_of_being_off_the_optimum():
    theta = at(make(), low_slope=math.log(0.4), low_width=math.log(4.0), high_width=math.log(2.0))
    octaves = np.array([[0.0, 2.0, 4.0, -3.0, -1e6]])
    # A parabola above, 1/2 at one width; below a hyperbola of width 4, here of sides 3, 4, 5, and
    # its asymptote.
    expected = [0.0, 0.5, 2.0, 0.4 * (5.0 - 4.0), 0.4 * (1e6 - 4.0)]
    np.testing.assert_allclose(
        frontier_law.penalty(theta, octaves)[0], expected, rtol=1e-5, atol=1e-12
    )


def test_the_optimum_follows_the_rule_and_bends_at_b_crit():
    prior = make()
    # B_crit is 2^8 x 2^2 = 2^10.
    theta = at(prior, shift=0.7, exponent=0.2, bend=-0.4, b_crit=math.log(2.0**2))
    x = np.array([MIDDLE, -20.0, -21.0, 40.0, 41.0])
    best = frontier_law.optimum(theta, prior.points_at(x), prior)[0]
    assert best[0] == pytest.approx(sqrt_rule(np.array(MIDDLE)) + 0.7)
    # This is far below B_crit.
    assert best[1] - best[2] == pytest.approx(0.5 + 0.2)
    # This is far above B_crit.
    assert best[4] - best[3] == pytest.approx(0.5 + 0.2 - 0.4)
    # The two lines meet at B_crit, 10 octaves.
    below = best[1] + 0.7 * (10.0 - x[1])
    above = best[3] + 0.3 * (10.0 - x[3])
    assert below == pytest.approx(above, abs=1e-6)


def test_other_hyper_parameters_cost_a_parabola_and_shift_the_learning_rate():
    prior = make(others=2)
    theta = at(prior)
    # Of each: its best value, log curvature and shift of the rate.
    theta[0, OTHER : OTHER + 6] = [0.2, math.log(3.0), 1.5, 0.9, math.log(0.5), -2.0]
    points = prior.points_at(np.array([5.0]), np.array([-1.0]), np.array([[0.7, 0.4]]))
    d = -1.0 - frontier_law.optimum(theta, points, prior)[0, 0] - 1.5 * 0.2 + 2.0 * -0.1
    assert frontier_law.off_optimum(theta, points, prior)[0, 0] == pytest.approx(d)
    expected = (
        frontier_law.frontier(theta, points, prior)
        + frontier_law.penalty(theta, np.array([[d]]))
        + 3.0 * 0.5**2
        + 0.5 * 0.5**2
    )
    assert frontier_law.log_steps(theta, points, prior)[0, 0] == pytest.approx(expected[0, 0])


def test_the_prior_is_centred_on_the_budget_the_rule_and_the_noise_scale():
    plain = make()
    measured = make(noise_scale=1000.0, spread=1.5)
    assert plain.log_mid == MIDDLE
    assert plain.mean[SHIFT] == plain.mean[frontier_law.EXPONENT] == 0.0
    assert 2**MIDDLE * math.exp(measured.mean[B_CRIT]) == pytest.approx(1000.0)
    assert 2**MIDDLE * math.exp(plain.mean[B_CRIT]) == pytest.approx(2**MIDDLE)
    # A measured noise scale narrows B_crit's prior to a factor of 4.
    assert make(noise_scale=1000.0).spread[B_CRIT] == math.log(4.0) < plain.spread[B_CRIT]
    assert measured.spread[B_CRIT] == pytest.approx(math.hypot(math.log(4.0), 1.5))
    # The budget is more than enough.
    assert math.exp(plain.mean[LEVEL]) < 4000.0
    # Three parameters for each.
    assert make(others=3).mean.size == make().mean.size + 9
    assert make(others=3).others == 3
    small_batch = stats.norm(plain.mean[B_OPT], plain.spread[B_OPT])
    # The prior says that there is most likely no such term, and does not rule it out.
    assert small_batch.sf(math.log(LOW / 2**MIDDLE)) == pytest.approx(0.115, abs=0.005)
    assert small_batch.sf(math.log(4.0 * LOW / 2**MIDDLE)) > 0.03


def test_the_prior_density_is_normal_and_students():
    prior = make(others=1)
    theta = frontier_law.draw_prior(prior, 50, np.random.default_rng(0))
    scaled = (theta - prior.mean) / prior.spread
    expected = stats.norm.logpdf(np.delete(scaled, SHIFT, axis=1)).sum(axis=1)
    expected += stats.t.logpdf(scaled[:, SHIFT], SHIFT_FREEDOM)
    found = frontier_law.log_prior(theta, prior)
    # Up to the constant of the densities.
    np.testing.assert_allclose(found - found[0], expected - expected[0], rtol=1e-9, atol=1e-9)
    # Its draws have that distribution, and they are the posterior's without observations.
    drawn = monte_carlo.sample_posterior(NOTHING, make(), np.random.default_rng(1), 4000, 3)
    np.testing.assert_array_equal(
        drawn, frontier_law.draw_prior(make(), 4000, np.random.default_rng(1))
    )
    scaled = (drawn - make().mean) / make().spread
    for place in range(scaled.shape[1]):
        law = stats.t(SHIFT_FREEDOM) if place == SHIFT else stats.norm()
        # Of so many tests one in a thousand may fail by chance.
        assert stats.kstest(scaled[:, place], law.cdf).pvalue > 1e-3


def test_the_likelihood_is_the_sum_over_trials():
    prior = make()
    theta = frontier_law.draw_prior(prior, 6, np.random.default_rng(2))
    reached = [
        (6.0, -1.0, 7.0, 0.0, "reached"),
        (9.0, 0.0, 6.0, 0.0, "reached"),
        (4.0, -2.0, 9.0, 0.5, "reached"),
    ]
    # It is known to take more than e^7.2 steps.
    estimated = (7.0, -1.0, 7.5, 0.4, "reached", 7.2)
    trials = observed(
        *reached, estimated, (8.0, -6.0, 8.0, 0.05, "bound"), (5.0, 1.0, 0.0, 0.0, "diverged")
    )
    expected = np.zeros(6)
    for i, row in enumerate(theta):
        noise = math.exp(row[frontier_law.NOISE])
        *means, bounded, _ = frontier_law.log_steps(row[None], trials.points, prior)[0]
        for mean, (_, _, y, spread, _, *least) in zip(means, [*reached, estimated], strict=True):
            sigma = math.hypot(noise, spread)
            core = stats.norm.pdf(y, mean, sigma)
            # Here log S is near the model's and the estimate, and above the least.
            if least:
                density = lambda s: stats.norm.pdf(s, mean, noise) * stats.norm.pdf(y, s, spread)  # noqa: B023, E731
                core = integrate.quad(density, least[0], 20.0, points=[mean, y], epsabs=1e-13)[0]
            # A mixture with a wide normal, so that one outlier cannot decide.
            wide = stats.norm.pdf(y, mean, math.hypot(sigma, likelihood.TRIAL_OUTLIER_SPREAD))
            mixture = (1.0 - TRIAL_OUTLIER_SHARE) * core + TRIAL_OUTLIER_SHARE * wide
            expected[i] += math.log(mixture) + 0.5 * math.log(2.0 * math.pi)
        # A bound says that log S lies above.
        above = stats.norm.sf(8.0, bounded, math.hypot(noise, 0.05))
        expected[i] += math.log(above + TRIAL_OUTLIER_SHARE / 4.0)
        high = max(
            1.0 - frontier_law.optimum(row[None], prior.points_at(np.array([5.0])), prior)[0, 0],
            0.0,
        ) * math.exp(row[frontier_law.TILT] * (5.0 - MIDDLE))
        over = (
            frontier_law.penalty(row[None], np.array([[high]]))[0, 0] - likelihood.DIVERGED_PENALTY
        )
        expected[i] += math.log(
            stats.norm.cdf(over / likelihood.DIVERGED_SPREAD) + TRIAL_OUTLIER_SHARE / 4.0
        )
    found = likelihood.log_likelihood(theta, trials, prior)
    np.testing.assert_allclose(found, expected, rtol=1e-7)
    assert not likelihood.log_likelihood(theta, NOTHING, prior).any()


def test_level_and_shift_against_quadrature():
    prior = make()
    # The prior is a point, but for these two parameters.
    prior.spread[:] = 1e-5
    prior.mean[LEVEL] = 7.0
    prior.spread[[LEVEL, SHIFT]] = 1.0
    seen = observed(
        (MIDDLE, -1.5, 7.4, 0.0, "reached"),
        (MIDDLE, 0.5, 7.1, 0.0, "reached"),
        # This one is an outlier.
        (MIDDLE, 0.5, 9.9, 0.0, "reached"),
        (MIDDLE, 1.5, 8.0, 0.4, "reached"),
        (MIDDLE, -4.0, 7.6, 0.1, "bound"),
        (MIDDLE, 3.0, 0.0, 0.0, "diverged"),
    )
    # Two parameters on a grid: the integral by sums.
    level, shift = np.meshgrid(
        np.linspace(5.0, 9.0, 200), np.linspace(-5.0, 5.0, 400), indexing="ij"
    )
    theta = np.repeat(prior.mean[None], level.size, axis=0)
    theta[:, LEVEL] = level.ravel()
    theta[:, SHIFT] = shift.ravel()
    density = likelihood.log_likelihood(theta, seen, prior)
    density += stats.norm.logpdf(theta[:, LEVEL], 7.0, 1.0) + stats.t.logpdf(
        theta[:, SHIFT], SHIFT_FREEDOM
    )
    weight = np.exp(density - density.max())
    weight /= weight.sum()
    drawn = monte_carlo.sample_posterior(seen, prior, np.random.default_rng(5), 2000, 5)
    for place in (LEVEL, SHIFT):
        mean = weight @ theta[:, place]
        deviation = math.sqrt(weight @ (theta[:, place] - mean) ** 2)
        assert drawn[:, place].mean() == pytest.approx(mean, abs=0.15 * deviation)
        assert drawn[:, place].std() == pytest.approx(deviation, rel=0.15)
    both = weight @ (theta[:, LEVEL] * theta[:, SHIFT]) - (weight @ theta[:, LEVEL]) * (
        weight @ theta[:, SHIFT]
    )
    assert np.cov(drawn[:, LEVEL], drawn[:, SHIFT])[0, 1] == pytest.approx(both, abs=0.03)


def simulated(theta, prior, rng, trials):
    """Trials that the model itself would have made: normal noise and censoring at a limit."""
    x = rng.uniform(3.0, 13.0, trials)
    other = rng.random((trials, 1))
    z = sqrt_rule(x) + rng.uniform(-2.5, 2.5, trials)
    points = prior.points_at(x, z, other)
    mean = frontier_law.log_steps(theta[None], points, prior)[0]
    y = mean + math.exp(theta[frontier_law.NOISE]) * rng.standard_normal(trials)
    # Limits are at, or up to 20 times above, the level.
    limit = theta[LEVEL] + rng.uniform(0.0, 3.0, trials)
    least = np.full(trials, -np.inf)
    nothing = np.zeros(trials)
    return LikelihoodData(
        points, np.minimum(y, limit), nothing, least, y > limit, np.full(trials, False)
    )


@pytest.mark.slow
def test_truths_drawn_from_the_prior_are_covered():
    prior = make(others=1)
    inside = []
    for study in range(16):
        rng = np.random.default_rng(100 + study)
        truth = frontier_law.draw_prior(prior, 1, rng)[0]
        drawn = monte_carlo.sample_posterior(simulated(truth, prior, rng, 12), prior, rng, 400, 12)
        low, high = np.quantile(drawn, [0.1, 0.9], axis=0)
        inside.append((low < truth) & (truth < high))
    covered = np.array(inside)
    # 192 in all, correlated within a study: 80% give or take about 5.5. Moved too little, the draws
    # are too narrow. Of the 64 of four parameters 80% are 51, give or take 3.2.
    assert 0.69 < covered.mean() < 0.94
    assert covered[:, [LEVEL, B_CRIT, SHIFT, OTHER]].mean() > 0.6


def test_contradictions_and_far_away_observations_give_finite_draws():
    prior = make()
    # Rates and steps that no law explains together.
    seen = observed(
        (3.0, 20.0, 60.0, 0.0, "reached"),
        (13.0, -40.0, 0.0, 0.0, "reached"),
        (8.0, 0.0, 3.0, 0.0, "reached"),
        (8.0, 0.0, 40.0, 0.05, "bound"),
        (8.0, -30.0, 0.0, 0.0, "diverged"),
    )
    drawn = monte_carlo.sample_posterior(seen, prior, np.random.default_rng(13), 96, 2)
    assert np.isfinite(drawn).all()


def steps_of(noise_scale, trace=10.0, count=4):
    """Measurements whose means are ``trace`` and ``trace / noise_scale``, none of them the mean."""
    gradient = trace / noise_scale
    measurements = []
    # Their offsets cancel: the means are the gradient and the trace.
    for number, away in enumerate(np.linspace(-1, 1, count).tolist(), 1):
        measurements.append((32 * number, gradient * (1 + 3 * away), trace * (1 + 0.5 * away)))
    return tuple(measurements)


def trials(noise_scales, **changes):
    """Trials, each with its own noise scale and, in turn, gradients 100 times as large."""
    found = []
    for number, scale in enumerate(noise_scales):
        measured = {"noise_scale": steps_of(scale, 10.0 * 100.0 ** (number % 2))}
        found.append(make_result(number=number, **measured | changes))
    return found


def b_crit(found, noise_scale=None):
    """B_crit of the sampler's prior and the standard deviation of its logarithm."""
    space = {
        "batch_size": IntDistribution(LOW, HIGH, log=True),
        "lr": FloatDistribution(1e-3, 1.0, log=True),
    }
    sampler = FrontierSampler(seed=0, search_space=space, noise_scale=noise_scale)
    prior = sampler.posterior(found, particles=10, moves=1).prior
    return 2**MIDDLE * math.exp(prior.mean[B_CRIT]), prior.spread[B_CRIT]


def test_a_trial_is_a_block_in_units_of_its_trace():
    scales = [100.0, 150.0, 200.0, 400.0, 90.0]
    inverse = 1.0 / np.array(scales)
    # Student's interval of the mean of 1/B_simple.
    half = stats.t.ppf(0.95, len(scales) - 1) * inverse.std(ddof=1) / math.sqrt(len(scales))
    estimate, steps = noise_scale_prior.measured_noise_scale(trials(scales))
    expected = 1.0 / (inverse.mean() + np.array([half, 0.0, -half]))
    assert [estimate.low, estimate.noise_scale, estimate.high] == pytest.approx(expected.tolist())
    assert (estimate.measurements, steps) == (5, 20)
    # These are more than there are blocks.
    many = trials([100.0 + 7.0 * n for n in range(40)])
    assert noise_scale_prior.measured_noise_scale(
        many[::-1]
    ) == noise_scale_prior.measured_noise_scale(many)


def test_trials_that_did_not_measure_the_whole_way_do_not_count():
    found = trials([100.0, 120.0, 140.0, 160.0])
    others = trials([1.0, 2.0], status="stopped")
    # There is nothing, one step, or no gradient at all.
    for measured in (
        (),
        # A single step has no scatter of its own.
        steps_of(9.0)[:1],
        ((32, 0.0, 0.0), (64, 0.0, 0.0)),
    ):
        others += trials([1.0, 2.0], noise_scale=measured)
    assert noise_scale_prior.measured_noise_scale(others) is None
    assert noise_scale_prior.noise_scale_prior(others) == (None, 0.0)
    assert noise_scale_prior.measured_noise_scale(
        [*found, *others]
    ) == noise_scale_prior.measured_noise_scale(found)


# These gradients are lost in the noise.
LOST = [100.0, -100.0, 100.0, -90.0, 80.0, -120.0]


def test_a_measured_noise_scale_is_the_middle_of_a_wide_prior_and_a_given_one_comes_first():
    value, spread = b_crit(trials([300.0, 301.0, 299.0, 300.0]))
    assert (value, spread) == (
        # A factor of 4 is the prior's width, whatever the trials agree on.
        pytest.approx(300.0, rel=1e-2),
        pytest.approx(math.log(4.0), rel=1e-2),
    )
    unsure = trials([150.0, 600.0, 250.0, 400.0, 280.0])
    estimate = noise_scale_prior.measured_noise_scale(unsure)[0]
    (value, spread) = b_crit(unsure)
    assert value == pytest.approx(estimate.noise_scale)
    assert spread == pytest.approx(
        math.hypot(math.log(4.0), 0.5 * math.log(estimate.high / estimate.low))
    )
    assert b_crit(unsure, noise_scale=50.0) == (pytest.approx(50.0), math.log(4.0))
    # None, too few and undetermined: the wide prior of a factor of 6.
    for scales in ([], [100.0] * 3, LOST):
        assert b_crit(trials(scales)) == (pytest.approx(2**MIDDLE), math.log(6.0))


def many_trials(count=120, seed=3):
    """Trials that the model made, and the prior they are read with."""
    prior = make(others=1)
    rng = np.random.default_rng(seed)
    truth = frontier_law.draw_prior(prior, 1, rng)[0]
    return simulated(truth, prior, rng, count), prior


def test_many_trials_are_read_in_another_order_and_on_nodes_to_a_thousandth():
    """Of log S; the discrepancy, whose knots are nodes, is exact between them."""
    data, prior = many_trials(400)
    theta = frontier_law.draw_prior(prior, 60, np.random.default_rng(0))
    many = data.rearranged(prior)
    assert many.points.nodes is not None
    assert many.columns == (
        slice(0, many.bound.argmax()),
        slice(many.bound.argmax(), 400),
        slice(0, 0),
    )
    order = np.argsort(data.bound, kind="stable")
    for whole, near in (
        (
            frontier_law.frontier(theta, data.points, prior),
            frontier_law.frontier(theta, many.points, prior),
        ),
        (
            frontier_law.optimum(theta, data.points, prior),
            frontier_law.optimum(theta, many.points, prior),
        ),
    ):
        # Of log S: far below the noise from seed to seed.
        assert np.abs(whole[:, order] - near).max() < 0.003
        assert np.abs(whole[:, order] - near).mean() < 2e-4
    few = data.take(np.arange(20))
    assert few.rearranged(prior).points.nodes is None
    beyond = replace(
        data, points=prior.points_at(data.points.x + 9.0, data.points.z, data.points.other)
    )
    assert beyond.rearranged(prior).points.nodes is None


def test_parameters_are_worked_out_some_at_a_time(monkeypatch):
    data, prior = many_trials(30)
    theta = frontier_law.draw_prior(prior, 50, np.random.default_rng(0))
    whole = likelihood.log_likelihood(theta, data, prior)
    # Seven trials' worth at a time, so that 50 draws need several.
    monkeypatch.setattr(likelihood, "CACHED_VALUES", 7 * 30)
    np.testing.assert_array_equal(likelihood.log_likelihood(theta, data, prior), whole)


@cache
def from_the_prior(count):
    """Sample the posterior of so many trials, from the prior on."""
    data, prior = many_trials(count)
    return monte_carlo.sample_posterior(data, prior, np.random.default_rng(2), 800, 12)


@pytest.mark.parametrize(
    "fewer",
    [pytest.param(50, marks=pytest.mark.soak), pytest.param(75, marks=pytest.mark.slow)],
)
def test_a_posterior_from_that_of_fewer_trials_is_the_one_from_the_prior(fewer):
    """Whose estimates of some trials were others: what they said then is left behind."""
    data, prior = many_trials(90)
    before = data.take(np.arange(fewer))
    # Every fifth estimate was 20% higher then.
    before = replace(before, y=before.y + np.where(np.arange(fewer) % 5 == 0, 0.2, 0.0))
    start_theta = monte_carlo.sample_posterior(before, prior, np.random.default_rng(1), 400, 8)
    start = monte_carlo.Start(start_theta, before.rearranged(prior), prior)
    scratch = from_the_prior(90)
    found = monte_carlo.sample_posterior(data, prior, np.random.default_rng(3), 500, 20, start)
    assert found.shape == (500, prior.mean.size)
    for place in (LEVEL, B_CRIT, SHIFT, frontier_law.NOISE, OTHER):
        mean = scratch[:, place].mean()
        deviation = scratch[:, place].std()
        assert found[:, place].mean() == pytest.approx(mean, abs=0.3 * deviation)
        assert found[:, place].std() == pytest.approx(deviation, rel=0.25)


@pytest.mark.slow
def test_a_start_of_the_prior_alone_and_of_another_prior_do():
    data, prior = many_trials(40)
    other = make(others=1, noise_scale=1000.0)
    nothing = data.take(np.arange(0))
    drawn = frontier_law.draw_prior(other, 500, np.random.default_rng(0))
    start = monte_carlo.Start(drawn, nothing.rearranged(other), other)
    found = monte_carlo.sample_posterior(data, prior, np.random.default_rng(3), 500, 30, start)
    scratch = from_the_prior(40)
    for place in (LEVEL, B_CRIT, SHIFT):
        mean = scratch[:, place].mean()
        deviation = scratch[:, place].std()
        assert found[:, place].mean() == pytest.approx(mean, abs=0.3 * deviation)
