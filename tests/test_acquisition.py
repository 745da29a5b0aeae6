import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from synthetic import Law

from bstune.core.errors import ConfigError
from bstune.core.records import Target, TrialResult
from bstune.search.acquisition import Domain, Suggestion, b_crit_quantiles, suggest
from bstune.search.observations import Observation, Posterior, infer, likelihood_data
from bstune.search.posterior import Array, Prior, make_prior
from bstune.search.sampler import default_policy

LOW, HIGH = 8, 4096
LAW = Law(s_min=300.0, b_crit=400.0, lr=0.1, batch_size=128.0)  # T is least at B = 283
POLICY = replace(default_policy(), particles=96, moves=2, candidates=80)
BUDGET = 20_000.0

Make = Callable[..., TrialResult]


def rule(x: Array) -> Array:
    return np.log2(0.1) + 0.5 * (x - 7.0)


def make(others: int = 0) -> Prior:
    return make_prior(
        low=LOW,
        high=HIGH,
        rule=rule,
        log_budget=math.log(BUDGET),
        sigma=1.0,
        exponent_sigma=0.3,
        noise_scale=None,
        others=others,
    )


def lrs(x: Array) -> tuple[Array, Array]:
    return np.full(x.shape, -10.0), np.full(x.shape, 0.0)


def domain(snap: Callable[[float], int] = round, others: int = 0) -> Domain:
    return Domain(LOW, HIGH, snap, lrs, others)


def inferred(trials: Sequence[TrialResult], seed: int = 0, **changes: object) -> Posterior:
    others = changes.pop("others", {})
    settings = {
        "prior": make(),
        "target": None,
        "ideal": None,
        "step_time": LAW.tau,
        "in_examples": False,
        "particles": POLICY.particles,
        "moves": POLICY.moves,
        "rng": np.random.default_rng(seed),
    }
    return infer(trials, others, **(settings | changes))  # type: ignore[arg-type]


def decided(posterior: Posterior, seed: int = 0, **changes: object) -> Suggestion:
    pending = changes.pop("pending", ())
    settings = {
        "objective": "time",
        "domain": domain(),
        "budget": lambda batch_size: BUDGET,
        "resumable": lambda number: True,
        "policy": POLICY,
        "rng": np.random.default_rng(seed),
    }
    return suggest(posterior, pending, **(settings | changes))  # type: ignore[arg-type]


@pytest.fixture
def tried(make_result: Make) -> Callable[..., TrialResult]:
    """Return a trial at (number, batch size, lr) that LAW answers, stopped at ``limit``."""

    def make(
        number: int, batch_size: int, lr: float, max_steps: float = math.inf, resumed_from: int | None = None
    ) -> TrialResult:
        needed = LAW.steps(batch_size, lr)
        status = "diverged" if needed is None else "reached" if needed <= max_steps else "censored"
        steps = 10 if needed is None else round(min(needed, max_steps))
        return make_result(
            number=number,
            batch_size=batch_size,
            lr=lr,
            status=status,
            steps=steps,
            steps_low=steps,
            train_seconds=steps * LAW.tau(batch_size),
            seconds_per_step=LAW.tau(batch_size),
            history=(),
            resumed_from=resumed_from,
        )

    return make


def play(
    tried: Callable[..., TrialResult], count: int, seed: int, **changes: object
) -> list[tuple[Suggestion, TrialResult]]:
    """Return the decisions of a study and what LAW answered."""
    played: list[tuple[Suggestion, TrialResult]] = []
    for number in range(count):
        posterior = inferred([result for _, result in played], 1000 * seed + number)
        suggestion = decided(posterior, 1000 * seed + number, **changes)
        batch_size, lr = round(2**suggestion.x), 2**suggestion.z
        played.append((suggestion, tried(number, batch_size, lr, suggestion.max_steps, suggestion.resumed_from)))
    return played


def added(played: Sequence[tuple[Suggestion, TrialResult]]) -> list[float]:
    """Return what each trial's limit would have cost, in seconds, without what its parent had spent."""
    steps = [
        suggestion.max_steps - (0 if suggestion.resumed_from is None else played[suggestion.resumed_from][1].steps)
        for suggestion, _ in played
    ]
    return [LAW.tau(2**suggestion.x) * count for (suggestion, _), count in zip(played, steps, strict=True)]


def spent(played: Sequence[tuple[Suggestion, TrialResult]]) -> float:
    return inferred([result for _, result in played]).spent


@pytest.mark.parametrize("resumable", [lambda number: True])
def test_limits_grow_in_proportion_to_what_was_spent(
    tried: Callable[..., TrialResult], resumable: Callable[[int], bool] | None
) -> None:
    def never(*arguments: object) -> TrialResult:
        result = tried(*arguments)
        return replace(result, status="censored", steps=arguments[3], steps_low=arguments[3])  # type: ignore[arg-type]

    played = play(never, 25, 0, resumable=resumable)
    share = max(POLICY.max_growth, POLICY.max_first_growth, 0.4)
    for number, cost in enumerate(added(played)[1:], start=1):
        suggestion, _ = played[number]
        before, step = spent(played[:number]), LAW.tau(2**suggestion.x)
        most = max(share * before, POLICY.initial_fraction * BUDGET * step)
        assert cost <= most * 1.001 + 2 * step
        assert cost >= min(POLICY.max_first_growth, POLICY.max_growth) * before * 0.999
    assert spent(played) > 10 * spent(played[:1])
    assert played[0][0].max_steps <= math.ceil(POLICY.initial_fraction * BUDGET)


def test_nothing_is_spent_past_the_margin_once_something_has_reached_the_target(
    tried: Callable[..., TrialResult],
) -> None:
    for seed in range(4):
        played = play(tried, 20, seed)
        best = math.inf
        for number, (suggestion, result) in enumerate(played):
            if best < math.inf:
                step = LAW.tau(2**suggestion.x)
                # The incumbent is a mean over the trials around it: not quite the least time seen.
                assert suggestion.max_steps * step <= 1.4 * POLICY.stop_factor * best + step, number
            if result.reached:
                best = min(best, result.steps * result.seconds_per_step)
        assert best < math.inf


def test_a_new_trial_is_looked_at_before_it_gets_all(tried: Callable[..., TrialResult]) -> None:
    posterior = inferred([tried(0, 256, 0.14)])
    best = LAW.steps(256, 0.14) * LAW.tau(256)

    def costs(resumable: Callable[[int], bool] | None) -> Array:
        chosen = [decided(posterior, seed, resumable=resumable) for seed in range(30)]
        return np.array([suggestion.max_steps * LAW.tau(2**suggestion.x) for suggestion in chosen]) / (
            POLICY.stop_factor * best
        )

    looks, whole = costs(lambda number: True), costs(None)
    # The incumbent is a mean over a few draws: nearly, not quite, the time seen.
    assert np.median(whole) == pytest.approx(1.0, abs=0.1)
    assert np.median(looks) < 1.1 * POLICY.probe_fraction
    assert (looks <= whole).all()


def stopped(tried: Callable[..., TrialResult]) -> list[TrialResult]:
    """Return trials that were stopped half-way on the best line, and one that is as good and has reached."""
    trials = [tried(i, size, LAW.best_lr(size), 0.5 * LAW.frontier(size)) for i, size in enumerate((128, 256, 512))]
    return [*trials, tried(3, 200, 2.0 * LAW.best_lr(200))]


def test_stopped_trials_are_continued_at_their_own_point(tried: Callable[..., TrialResult]) -> None:
    trials = stopped(tried)
    posterior = inferred(trials)
    suggestions = [decided(posterior, seed) for seed in range(60)]
    continued = [suggestion for suggestion in suggestions if suggestion.resumed_from is not None]
    assert len(continued) > 10
    for suggestion in continued:
        resumed_from = trials[suggestion.resumed_from]
        assert (suggestion.x, suggestion.z) == (math.log2(resumed_from.batch_size), math.log2(resumed_from.lr))
        assert suggestion.max_steps > resumed_from.steps
    assert all(suggestion.resumed_from != 3 for suggestion in suggestions)  # it has reached the target


def test_trials_that_run_or_cannot_be_continued_are_not(tried: Callable[..., TrialResult]) -> None:
    trials = stopped(tried)
    posterior = inferred(trials)
    running = [(math.log2(trials[1].batch_size), math.log2(trials[1].lr), 1)]
    suggestions = [
        decided(posterior, seed, pending=running, resumable=lambda number: number != 0) for seed in range(60)
    ]
    assert {suggestion.resumed_from for suggestion in suggestions} == {None, 2}
    alone = [decided(posterior, seed, resumable=None) for seed in range(20)]
    assert {suggestion.resumed_from for suggestion in alone} == {None}


def test_a_trial_that_did_not_get_on_is_not_continued_again(tried: Callable[..., TrialResult]) -> None:
    trials = stopped(tried)
    again = [replace(trial, number=4 + i, resumed_from=trial.number) for i, trial in enumerate(trials[:3])]
    posterior = inferred([*trials, *again])
    assert [one.number for one in posterior.observations] == [3, 4, 5, 6]
    assert all(decided(posterior, seed).resumed_from is None for seed in range(40))


def test_a_trial_past_the_margin_is_not_continued(tried: Callable[..., TrialResult]) -> None:
    slow = tried(0, 8, LAW.best_lr(8) / 64, 3.0 * LAW.frontier(8))
    posterior = inferred([slow, tried(1, 256, LAW.best_lr(256))])
    assert slow.status == "censored"
    assert all(decided(posterior, seed).resumed_from is None for seed in range(40))


@pytest.mark.parametrize("objective", ["time", "steps", "curve"])
def test_points_are_snapped_and_within_their_bounds(tried: Callable[..., TrialResult], objective: str) -> None:
    def snap(batch_size: float) -> int:
        return max(24, min(4096, 24 * round(batch_size / 24)))

    trials = [tried(i, size, LAW.best_lr(size)) for i, size in enumerate((24, 240, 2400, 48))]
    for posterior in (inferred([]), inferred(trials)):
        for seed in range(25):
            suggestion = decided(posterior, seed, objective=objective, domain=domain(snap), pending=[(8.0, -4.0, None)])
            size = 2**suggestion.x
            assert size == pytest.approx(snap(size), rel=1e-12)
            assert -10.0 <= suggestion.z <= 0.0
            assert suggestion.max_steps >= 1


def test_other_hyper_parameters_stay_in_their_range(tried: Callable[..., TrialResult]) -> None:
    trials = [tried(i, size, LAW.best_lr(size)) for i, size in enumerate((24, 240, 2400))]
    others = dict.fromkeys(range(3), (0.01, 0.99))
    posterior = inferred(trials, prior=make(2), others=others)
    for seed in range(20):
        suggestion = decided(posterior, seed, domain=domain(others=2))
        assert len(suggestion.other) == 2
        assert all(0.0 <= value <= 1.0 for value in suggestion.other)


@pytest.mark.parametrize("objective", ["time", "steps", "curve"])
def test_the_same_generator_gives_the_same_decision(tried: Callable[..., TrialResult], objective: str) -> None:
    trials = stopped(tried)
    first, second = (decided(inferred(trials, 1), 2, objective=objective) for _ in range(2))
    assert first == second
    assert any(decided(inferred(trials, 1), seed, objective=objective) != first for seed in (3, 4, 5, 6))


def test_decisions_close_in_on_the_least_time_and_on_the_fewest_steps(tried: Callable[..., TrialResult]) -> None:
    sizes = {}
    for objective in ("time", "steps"):
        last = [p for seed in range(3) for p, _ in play(tried, 24, seed, objective=objective)[-8:]]
        sizes[objective] = float(np.median([2**p.x for p in last]))
        off = [p.z - math.log2(LAW.best_lr(2**p.x)) for p in last]
        assert abs(np.median(off)) < 1.0
    assert 80 < sizes["time"] < 1000  # 283
    assert sizes["steps"] > 2 * sizes["time"]  # the larger the fewer


def test_the_curve_is_looked_at_on_both_sides_of_b_crit(tried: Callable[..., TrialResult]) -> None:
    sizes = [2**p.x for seed in range(3) for p, r in play(tried, 24, seed, objective="curve")[8:]]
    assert min(sizes) < 150
    assert max(sizes) > 1500
    # 90% of the draws of B_crit after 24 trials hold the truth, and they are not the prior's.
    results = [result for _, result in play(tried, 24, 0, objective="curve")]
    low, middle, high = b_crit_quantiles(inferred(results), (0.05, 0.5, 0.95), np.random.default_rng(0))
    assert 200 < middle < 800
    assert high / low < 8.0


def test_another_worker_is_sent_elsewhere(tried: Callable[..., TrialResult]) -> None:
    trials = [tried(i, size, LAW.best_lr(size)) for i, size in enumerate((64, 128, 256, 512, 300, 200))]
    posterior = inferred(trials)

    def points(pending: Sequence[tuple[float, float, None]]) -> Array:
        chosen = [decided(posterior, seed, pending=pending) for seed in range(60)]
        return np.array([[suggestion.x, suggestion.z] for suggestion in chosen])

    alone = points([])
    x, z = np.median(alone, axis=0)
    beside = points([(float(x), float(z), None)])
    near, left = (np.mean(np.abs(found - [x, z]).max(axis=1) < 0.3) for found in (alone, beside))
    assert near > 0.15
    assert left < 0.7 * near


def test_a_place_where_all_diverged_is_left(tried: Callable[..., TrialResult]) -> None:
    trials = [tried(i, size, 16.0 * LAW.best_lr(size)) for i, size in enumerate((16, 64, 256, 1024))]
    assert {trial.status for trial in trials} == {"diverged"}
    chosen = [decided(inferred(trials, seed), seed) for seed in range(20)]
    assert np.median([2**suggestion.z / LAW.best_lr(2**suggestion.x) for suggestion in chosen]) < 4.0


@pytest.mark.parametrize(
    ("status", "log_factor", "spread", "low", "high", "bound"),
    [
        ("reached", None, 0.0, 0.0, 0.0, False),
        ("censored", None, 0.0, 0.0, 0.0, True),  # nothing foretold: it is above what was done
        ("censored", 0.5, 0.2, 0.5, 0.5, False),
        ("censored", 4.0, 3.5, 0.0, 4.0, True),  # far and unsure: a bound, below the estimate
        ("censored", 4.0, 9.0, 0.0, 0.0, True),
    ],
)
def test_what_a_trial_says(
    status: str, log_factor: float | None, spread: float, low: float, high: float, bound: bool
) -> None:
    one = Observation(0, status, 1000, 1e-3, 7.0, -3.0, (), log_factor, spread, stuck=False)
    seen = likelihood_data([one], 0)
    assert low <= seen.y[0] - math.log(1000) <= high
    assert (seen.x[0], seen.z[0], bool(seen.bound[0]), bool(seen.diverged[0])) == (7.0, -3.0, bound, False)
    if status == "reached":
        assert seen.spread[0] == 0.0


def test_a_diverged_trial_is_neither_a_bound_nor_a_value() -> None:
    seen = likelihood_data([Observation(0, "diverged", 10, 1e-3, 7.0, -3.0, (0.5,), None, 0.0, stuck=False)], 1)
    assert seen.diverged.all()
    assert not seen.bound.any()
    assert seen.other.tolist() == [[0.5]]


def test_nothing_observed_has_the_right_shapes() -> None:
    seen = likelihood_data([], 3)
    assert seen.x.shape == seen.y.shape == seen.bound.shape == (0,)
    assert seen.other.shape == (0, 3)


def test_chains_are_joined_and_paid_once(tried: Callable[..., TrialResult]) -> None:
    first = tried(0, 128, 0.1, 100)
    second = tried(1, 128, 0.1, 250, resumed_from=0)
    third = tried(2, 128, 0.1, resumed_from=1)
    other = tried(3, 64, 0.05, 50)
    posterior = inferred([first, second, third, other])
    assert [one.number for one in posterior.observations] == [2, 3]
    assert posterior.spent == pytest.approx(third.steps * LAW.tau(128) + 50 * LAW.tau(64))


def test_trials_that_failed_are_passed_over(tried: Callable[..., TrialResult]) -> None:
    good = tried(0, 128, 0.1)
    failed = replace(tried(1, 64, 0.1), status="failed", steps=0)
    memory = replace(tried(2, 4096, 0.1), status="oom", steps=0)
    posterior = inferred([good, failed, memory])
    assert [one.number for one in posterior.observations] == [0]
    np.testing.assert_array_equal(posterior.theta, inferred([good]).theta)


def test_costs_can_be_counted_in_examples(tried: Callable[..., TrialResult]) -> None:
    trials = [tried(0, 128, 0.1), replace(tried(1, 64, 0.05), seconds_per_step=17.0, train_seconds=1e6)]
    posterior = inferred(trials, in_examples=True, step_time=None)
    assert posterior.spent == trials[0].steps * 128 + trials[1].steps * 64


def test_histories_are_read_where_there_is_a_target(tried: Callable[..., TrialResult]) -> None:
    history = tuple((step, 0.1 * (step / 1000) ** -0.5) for step in range(10, 301, 10))
    trial = replace(tried(0, 128, 0.1, 300), history=history)
    (blind,) = inferred([trial]).observations
    (seeing,) = inferred([trial], target=Target("error", 0.1, "min"), ideal=0.0).observations
    assert blind.log_factor is None
    assert seeing.log_factor == pytest.approx(math.log(1000 / 300), abs=seeing.spread)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("particles", 1, "at least 10, but got 1"),
        ("moves", 0, "at least 1, but got 0"),
        ("stop_factor", 0.9, "above 1, but got 0.9"),
        ("max_growth", math.nan, "above 0, but got nan"),
        ("random_fraction", 1.5, "within 0 and 1, but got 1.5"),
        ("cost_weight", -1.0, "within 0 and inf, but got -1.0"),
    ],
)
def test_a_policy_that_cannot_be_is_refused(name: str, value: float, said: str) -> None:
    with pytest.raises(ConfigError, match=f"sampler.policy.{name} must .* {said}"):
        replace(POLICY, **{name: value})
