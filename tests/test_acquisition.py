import math
from dataclasses import replace

import numpy as np
import pytest
from synthetic import Law
from toolbox import make_result, numbers, statuses

from bstune.core.errors import ConfigError
from bstune.search import acquisition
from bstune.search.acquisition import LEAST_GROWTH, MIN_STEPS, suggest
from bstune.search.candidates import Candidates, Domain, Suggestion
from bstune.search.frontier_findings import b_crit_quantiles, log_b_crit
from bstune.search.frontier_law import make_prior
from bstune.search.likelihood import log_likelihood
from bstune.search.posterior import infer
from bstune.search.sampler import default_policy

LOW = 8
HIGH = 4096
# The time is least at B = 283.
LAW = Law(s_min=300.0, b_crit=400.0, lr=0.1, batch_size=128.0)
# Few draws for quick tests, and no decisions for the curve unless a test wants them.
POLICY = replace(default_policy(), particles=96, moves=2, candidates=80, curve_share=0.0)
BUDGET = 20_000.0


# Steps over the rule: a root through 0.1 at a batch size of 2^7.
def make(others=0, low=LOW, high=HIGH, budget=BUDGET):
    study = {
        "low": low,
        "high": high,
        "rule": lambda x: np.log2(0.1) + 0.5 * (x - 7.0),
        "others": others,
    }
    return make_prior(
        **study, log_budget=math.log(budget), sigma=1.0, exponent_sigma=0.3, noise_scale=None
    )


def domain(snap=round, others=0):
    return Domain(
        LOW, HIGH, snap, lambda x: (np.full(x.shape, -10.0), np.full(x.shape, 0.0)), others
    )


def snap(batch_size):
    # Multiples of 24, as a machine might ask for.
    return max(24, min(4096, 24 * round(batch_size / 24)))


def inferred(trials, seed=0, others=None, **changes):
    settings = {
        "prior": make(),
        "target": None,
        "ideal": None,
        "step_time": LAW.tau,
        "in_examples": False,
    }
    settings |= {
        "particles": POLICY.particles,
        "moves": POLICY.moves,
        "rng": np.random.default_rng(seed),
    }
    return infer(trials, others or {}, **(settings | changes))


def decided(posterior, seed=0, pending=(), **changes):
    settings = {
        "objective": "time",
        "domain": domain(),
        "budget": lambda batch_size: BUDGET,
        "policy": POLICY,
    }
    settings |= {"resumable": lambda number: True, "rng": np.random.default_rng(seed)}
    return suggest(posterior, pending, **(settings | changes))


def tried(number, batch_size, lr, max_steps=math.inf, resumed_from=None):
    """A trial that LAW answers, stopped at ``max_steps``."""
    needed = LAW.steps(batch_size, lr)
    tau = LAW.tau(batch_size)
    # A trial that diverges does so within ten steps.
    steps = 10 if needed is None else round(min(needed, max_steps))
    status = "diverged" if needed is None else "reached" if needed <= max_steps else "stopped"
    made = {
        "number": number,
        "batch_size": batch_size,
        "lr": lr,
        "status": status,
        "resumed_from": resumed_from,
    }
    return make_result(
        **made,
        steps=steps,
        steps_low=steps,
        train_seconds=steps * tau,
        seconds_per_step=tau,
        history=(),
    )


def tried_at_best_rates(*batch_sizes, octaves=0.0):
    """A trial at each batch size, at its best learning rate or so many octaves above it."""
    trials = []
    for number, batch_size in enumerate(batch_sizes):
        trials.append(tried(number, batch_size, 2.0**octaves * LAW.best_lr(batch_size)))
    return trials


def decisions(posterior, seeds, **changes):
    """The decision that each of so many seeds comes to."""
    return [decided(posterior, seed, **changes) for seed in range(seeds)]


def results_of(played):
    return [result for _, result in played]


def play(count, seed, answer=tried, **changes):
    """The suggestions of a study and what LAW answered."""
    played = []
    # The posterior of what was answered so far, with a seed for each decision.
    for number in range(count):
        posterior = inferred(results_of(played), 1000 * seed + number)
        suggestion = decided(posterior, 1000 * seed + number, **changes)
        batch_size = round(2**suggestion.x)
        lr = 2**suggestion.z
        played.append(
            (
                suggestion,
                answer(number, batch_size, lr, suggestion.max_steps, suggestion.resumed_from),
            )
        )
    return played


@pytest.mark.parametrize("resumable", [lambda number: True, None])
def test_limits_grow_in_proportion_to_what_was_spent(resumable):
    # Nothing ever reaches the target.
    def never(*arguments):
        result = tried(*arguments)
        return replace(result, status="stopped", steps=arguments[3], steps_low=arguments[3])

    played = play(25, 0, never, resumable=resumable)
    share = max(POLICY.max_growth, POLICY.max_first_growth, 0.4)
    results = results_of(played)
    spent = [inferred(results[:number]).spent for number in range(26)]
    for (suggestion, _), before in zip(played[1:], spent[1:], strict=False):
        step = LAW.tau(2**suggestion.x)
        resumed_from = suggestion.resumed_from
        # A continuation pays only for what it adds.
        cost = step * (
            suggestion.max_steps - (0 if resumed_from is None else played[resumed_from][1].steps)
        )
        most = max(share * before, POLICY.initial_fraction * BUDGET * step)
        # A limit is rounded up to whole steps.
        assert cost <= most * 1.001 + 2 * step
        # A trial that ends with its budget costs less.
        if suggestion.max_steps < BUDGET:
            assert cost >= min(POLICY.max_first_growth, POLICY.max_growth) * before * 0.999
    assert spent[-1] > 10 * spent[1]
    assert played[0][0].max_steps <= math.ceil(POLICY.initial_fraction * BUDGET)


@pytest.mark.slow
def test_nothing_is_spent_past_the_margin_once_something_has_reached_the_target():
    for seed in range(4):
        best = math.inf
        played = play(20, seed)
        for number, (suggestion, result) in enumerate(played):
            if best < math.inf:
                step = LAW.tau(2**suggestion.x)
                # The incumbent is a mean over the trials around it: not quite the least time seen.
                most = 1.4 * POLICY.stop_factor * best / step + 1
                # A trial just below the margin still goes on by the least growth.
                if suggestion.resumed_from is not None:
                    done = played[suggestion.resumed_from][1].steps
                    most = max(most, LEAST_GROWTH * done + 1)
                assert suggestion.max_steps <= most, number
            if result.reached:
                best = min(best, result.steps * result.seconds_per_step)
        assert best < math.inf


@pytest.mark.parametrize("objective", ["time", "steps", "curve"])
def test_no_new_trial_is_shorter_than_its_start_is_worth(objective):
    """A probe, for the objective ``curve`` too: a share of four steps would cost more to set up than to train."""
    seen = []
    for number, batch_size in enumerate((64, 256, 1024)):
        # Trials of four steps of 10 ms: starting one would take longer.
        result = make_result(
            number=number,
            batch_size=batch_size,
            lr=0.14,
            status="reached",
            steps=4,
            steps_low=3,
            seconds_per_step=0.01,
            history=(),
        )
        seen.append(result)
    posterior = inferred(seen)
    for suggestion in decisions(posterior, 12, objective=objective):
        assert suggestion.resumed_from is not None or suggestion.max_steps >= MIN_STEPS


def test_a_new_trial_is_looked_at_before_it_gets_all():
    posterior = inferred([tried(0, 256, 0.14)])
    # The margin: what the incumbent takes, times stop_factor.
    most = POLICY.stop_factor * LAW.steps(256, 0.14) * LAW.tau(256)

    def shares(resumable):
        seconds = []
        for suggestion in decisions(posterior, 30, resumable=resumable):
            seconds.append(suggestion.max_steps * LAW.tau(2**suggestion.x))
        return np.array(seconds) / most

    looks = shares(lambda number: True)
    whole = shares(None)
    # The incumbent is a mean over a few draws: nearly, not quite, the time seen.
    assert np.median(whole) == pytest.approx(1.0, abs=0.1)
    # A look first, all of it where nothing can be continued.
    assert np.median(looks) < 1.1 * POLICY.probe_fraction
    assert (looks <= whole).all()


def resumed(posterior, **changes):
    """The suggestions over 60 seeds that continue a trial, and the numbers of the trials."""
    continued = []
    for suggestion in decisions(posterior, 60, **changes):
        if suggestion.resumed_from is not None:
            continued.append(suggestion)
    return continued, {suggestion.resumed_from for suggestion in continued}


def test_stopped_trials_are_continued_at_their_own_point():
    trials = []
    for number, batch_size in enumerate((128, 256, 512)):
        # Half way to the target.
        stops_at = 0.5 * LAW.frontier(batch_size)
        trials.append(tried(number, batch_size, LAW.best_lr(batch_size), stops_at))
    # This one has reached the target, and is as good as they are.
    trials.append(tried(3, 200, 2.0 * LAW.best_lr(200)))
    posterior = inferred(trials)
    continued, _ = resumed(posterior)
    assert len(continued) > 10
    for suggestion in continued:
        before = trials[suggestion.resumed_from]
        assert (suggestion.x, suggestion.z) == (math.log2(before.batch_size), math.log2(before.lr))
        assert suggestion.max_steps > before.steps
    # Trial 1 runs already, and 0 has left no state.
    running = [(math.log2(256), math.log2(trials[1].lr), 1)]
    assert resumed(posterior, pending=running, resumable=lambda number: number != 0)[1] == {2}
    assert not resumed(posterior, resumable=None)[1]
    again = []
    for trial in trials[:3]:
        again.append(replace(trial, number=4 + trial.number, resumed_from=trial.number))
    # They were continued without a further step.
    stuck = inferred([*trials, *again])
    assert numbers(stuck.observations) == [3, 4, 5, 6]
    slow = inferred(
        # 64 times too low a rate, so that it lies far behind.
        [tried(0, 8, LAW.best_lr(8) / 64, 3.0 * LAW.frontier(8)), tried(1, 256, LAW.best_lr(256))]
    )
    # It is past the margin.
    assert slow.observations[0].status == "stopped"
    assert not resumed(stuck)[1] | resumed(slow)[1]


@pytest.mark.parametrize("objective", ["time", "steps", "curve"])
def test_points_are_snapped_and_within_their_bounds(objective):
    # Multiples of 24, as snap gives.
    trials = tried_at_best_rates(24, 240, 2400, 48)
    # Two further hyper-parameters, near the ends of their range.
    others = dict.fromkeys(range(4), (0.01, 0.99))
    options = {"objective": objective, "domain": domain(snap, 2), "pending": [(8.0, -4.0, None)]}
    for posterior in (inferred([], prior=make(2)), inferred(trials, others=others, prior=make(2))):
        for suggestion in decisions(posterior, 25, **options):
            size = 2**suggestion.x
            assert size == pytest.approx(snap(size), rel=1e-12)
            assert -10.0 <= suggestion.z <= 0.0
            assert suggestion.max_steps >= 1
            assert len(suggestion.other) == 2
            assert min(suggestion.other) >= 0.0
            assert max(suggestion.other) <= 1.0


# The next multiple of 24 below.
@pytest.mark.parametrize(("too_large", "largest"), [(240, 216), (48, 24)])
@pytest.mark.parametrize("random_fraction", [0.0, 1.0])
def test_no_batch_size_is_tried_beyond_one_that_ran_out_of_memory(
    too_large, largest, random_fraction
):
    trials = [
        tried(0, 24, LAW.best_lr(24)),
        replace(tried(1, too_large, 0.1), status="out of memory", steps=0),
    ]
    options = {"domain": domain(snap), "policy": replace(POLICY, random_fraction=random_fraction)}
    for suggestion in decisions(inferred(trials), 25, **options):
        assert round(2.0**suggestion.x) <= largest


@pytest.mark.slow
def test_the_curve_is_looked_at_on_both_sides_of_b_crit():
    played = [play(24, seed, objective="curve") for seed in range(3)]
    sizes = []
    for study in played:
        # The first eight look for the target anywhere.
        sizes += [2**suggestion.x for suggestion, _ in study[8:]]
    # B_crit is 400: its regimes begin at 400/9 = 44 and 9 x 400 = 3600.
    assert min(sizes) < 150
    assert max(sizes) > 1200
    # 90% of the draws of B_crit after 24 trials hold the truth, and they are not the prior's.
    low, middle, high = b_crit_quantiles(inferred(results_of(played[0])), (0.05, 0.5, 0.95))
    assert 200 < middle < 800
    assert high / low < 8.0


def test_the_fewest_steps_are_looked_for_where_the_frontier_has_them():
    # At B = 4096 a trial takes 329 steps, at 1024 417, and four times the examples.
    trials = tried_at_best_rates(64, 256, 512, 1024, 2048)
    posterior = inferred(trials, in_examples=True)
    sizes = [2**suggestion.x for suggestion in decisions(posterior, 40, objective="steps")]
    # Above 2048, where no trial has been.
    assert np.mean(np.array(sizes) > 2048) > 0.5


def test_another_worker_is_sent_elsewhere():
    posterior = inferred(tried_at_best_rates(64, 128, 256, 512, 300, 200))

    def points(pending):
        chosen = decisions(posterior, 60, pending=pending)
        return np.array([(suggestion.x, suggestion.z) for suggestion in chosen])

    alone = points([])
    x, z = np.median(alone, axis=0)
    # The place that it would choose itself.
    beside = points([(float(x), float(z), None)])
    near = np.mean(np.abs(alone - [x, z]).max(axis=1) < 0.3)
    left = np.mean(np.abs(beside - [x, z]).max(axis=1) < 0.3)
    assert near > 0.1
    assert left < 0.7 * near


def test_a_place_where_all_diverged_is_left():
    # Four octaves above the best rate LAW diverges.
    trials = tried_at_best_rates(16, 64, 256, 1024, octaves=4.0)
    assert set(statuses(trials)) == {"diverged"}
    above_best = []
    for seed in range(20):
        suggestion = decided(inferred(trials, seed), seed)
        above_best.append(2**suggestion.z / LAW.best_lr(2**suggestion.x))
    assert np.median(above_best) < 4.0


def test_chains_are_joined_and_paid_once_and_failures_passed_over():
    chain = [
        tried(0, 128, 0.1, 100),
        tried(1, 128, 0.1, 250, resumed_from=0),
        tried(2, 128, 0.1, resumed_from=1),
    ]
    trials = [*chain, tried(3, 64, 0.05, 50)]
    posterior = inferred(trials)
    assert numbers(posterior.observations) == [2, 3]
    # The whole chain counts once, by its last steps.
    assert posterior.spent == pytest.approx(chain[2].steps * LAW.tau(128) + 50 * LAW.tau(64))
    # What failed has no steps to learn from.
    broken = replace(tried(4, 64, 0.1), steps=0)
    failed = [replace(broken, status="failed"), replace(broken, status="out of memory")]
    np.testing.assert_array_equal(inferred([*trials, *failed]).theta, posterior.theta)
    # Costs can be counted in examples, whatever the clock says.
    trials[3] = replace(trials[3], seconds_per_step=17.0, train_seconds=1e6)
    assert (
        inferred(trials, in_examples=True, step_time=None).spent == chain[2].steps * 128 + 50 * 64
    )


def test_trials_that_repeat_a_recorded_run_count_as_one():
    # The third one was stopped at step 30, the last one diverged at a rate of 60.
    points = ((64, 0.05, math.inf), (256, 0.1, math.inf), (64, 0.1, 30), (256, 60.0, math.inf))
    trials = []
    for number, point in enumerate(points):
        history = ((5, 0.5), (6 + number, 0.4))
        trials.append(replace(tried(number, *point), history=history))
    assert statuses(trials) == ["reached", "reached", "stopped", "diverged"]
    # Nothing says that these two are the same run: they have no history.
    silent = [replace(trials[3], number=4, history=()), replace(trials[3], number=5, history=())]
    copies = []
    # Each of the four trials twice more.
    for number in range(8):
        copies.append(replace(trials[number % 4], number=6 + number))
    once = inferred([*trials, *silent])
    repeated = [*trials, *silent, *copies]

    def likelihood(posterior):
        return log_likelihood(once.theta, posterior.data, posterior.prior)

    expected = likelihood(once)
    found = likelihood(inferred(repeated, independent=False))
    wrong = likelihood(inferred(repeated))
    np.testing.assert_allclose(found, expected)
    # Counted apart they would count three times.
    assert not np.allclose(wrong, expected)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("particles", 1, "at least 10, but got 1"),
        ("moves", 0, "at least 1, but got 0"),
        ("stop_factor", 0.9, "above 1, but got 0.9"),
        ("max_growth", math.nan, "above 0, but got nan"),
        ("random_fraction", 1.5, "at most 1, but got 1.5"),
        ("steps_cost_power", 1.5, "at most 1, but got 1.5"),
        ("cost_weight", -1.0, "at least 0, but got -1.0"),
    ],
)
def test_a_policy_that_cannot_be_is_refused(name, value, said):
    with pytest.raises(ConfigError, match=f"sampler.policy.{name} must .* {said}"):
        replace(POLICY, **{name: value})


def worth(posterior, max_steps=200, continues=None, **changes):
    """The chance of a trial for the curve beside another objective."""
    stopped = tuple(one for one in posterior.observations if one.number == continues)
    nothing = np.zeros((len(stopped), 0))
    place = np.full(len(stopped), 7.0)
    steps = np.array([observation.steps for observation in stopped])
    options = Candidates(stopped, place, place, nothing, steps)
    suggestion = Suggestion(7.0, -3.0, (), max_steps, continues)
    return acquisition._chance_for_curve(
        posterior, suggestion, options, replace(SPENDING, **changes)
    )


# As the defaults, but for a tenth of the cost.
SPENDING = replace(POLICY, curve_share=0.3, curve_cost=0.1, curve_width=3.0)


def test_decisions_for_the_curve_cost_a_stated_share_and_less_once_its_interval_is_narrow():
    posterior = inferred([tried(number, 64, 0.05) for number in range(4)])
    wide = log_b_crit(posterior.theta, posterior.prior).std()
    assert posterior.trials == 4
    # The two ends of a 90% interval lie 3.29 standard deviations apart: it is not narrow.
    assert math.exp(3.29 * wide) > 3.0
    # Of 200 steps at a batch size of 2^7.
    cost = 200 * LAW.tau(128)
    # By chance x share of the decisions, what is spent is the share that it may cost of an average
    # decision.
    for spent, share, expected in (
        (4 * cost, 0.3, 0.1 / 0.3),
        (4 * cost, 0.2, 0.1 / 0.2),
        # Half as much was spent, so half as much may be.
        (2 * cost, 0.3, 0.05 / 0.3),
        (400 * cost, 0.3, 1.0),
    ):
        found = worth(replace(posterior, spent=spent), curve_share=share)
        assert found == pytest.approx(expected, rel=0.01)
    spent = replace(posterior, spent=4 * cost)
    assert worth(spent, curve_cost=0.05) == pytest.approx(0.5 * worth(spent))
    # A trial that goes on pays for what it adds.
    stopped = [replace(tried(number, 64, 0.05, 100), steps=100) for number in range(4)]
    again = replace(inferred(stopped), spent=4 * cost)
    assert worth(again, continues=2) == pytest.approx(2.0 * worth(again), rel=0.01)
    # Four times the standard deviation is narrow by a sixteenth of the variance.
    width = math.exp(4.0 * 3.29 * wide)
    assert worth(spent, curve_width=width) == pytest.approx(worth(spent) / 16.0, rel=0.02)


@pytest.mark.slow
def test_what_is_spent_on_the_curve_beside_the_time_is_bounded(monkeypatch):
    """At next to no share of the cost it is nothing, at a tenth about a tenth, without a bound much more."""
    original = acquisition._suggest_for_curve
    for_curve = []

    def watched(*arguments):
        for_curve.append(original(*arguments))
        return for_curve[-1]

    monkeypatch.setattr(acquisition, "_suggest_for_curve", watched)
    shares = []
    for curve_cost in (1e-6, 0.1, 1e6):
        # A width of 1.01 is never reached, so that the share stays.
        policy = replace(SPENDING, curve_cost=curve_cost, curve_after=0.0, curve_width=1.01)
        on_curve = spent = 0.0
        played = play(40, 0, policy=policy)
        for suggestion, result in played:
            before = 0
            if suggestion.resumed_from is not None:
                before = played[suggestion.resumed_from][1].steps
            cost = (result.steps - before) * LAW.tau(2**suggestion.x)
            spent += cost
            if any(suggestion is one for one in for_curve):
                on_curve += cost
        shares.append(on_curve / spent)
    assert shares[0] == 0.0
    assert 0.0 < shares[1] < 0.2
    assert shares[2] > 1.5 * shares[1]
