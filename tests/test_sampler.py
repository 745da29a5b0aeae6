import logging
import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import optuna
import pytest
from optuna.distributions import FloatDistribution, IntDistribution
from optuna.trial import TrialState, create_trial
from synthetic import Law
from test_coordinates import coordinates_of
from toolbox import make_result

from bstune.core.errors import ConfigError
from bstune.core.objectives import OBJECTIVES
from bstune.core.records import Target
from bstune.search import posterior
from bstune.search import sampler as frontier
from bstune.search.acquisition import suggest
from bstune.search.coordinates import Coordinates
from bstune.search.posterior import FIRST_START, start_sizes
from bstune.search.sampler import (
    NEEDED,
    RECORD,
    RESUMED_FROM,
    FrontierSampler,
    trial_result,
)

optuna.logging.set_verbosity(optuna.logging.ERROR)

# The time is least at B = 283.
LAW = Law(s_min=300.0, b_crit=400.0, lr=0.1, batch_size=128.0)
BEST = LAW.frontier(283) * LAW.tau(283)
TARGET = Target("error", 0.1, "min")
SPACE = {
    # The range of the synthetic law's batch sizes; rates around its best ones.
    "batch_size": IntDistribution(8, 4096, log=True),
    "lr": FloatDistribution(1e-3, 2.0, log=True),
}


def sqrt_rule(batch_size):
    return 0.1 * math.sqrt(batch_size / 128.0)


def answer(trial, batch_size, lr, factor=1.0):
    """The seconds that LAW says, with what the sampler needs to know; raise TrialPruned past a limit."""
    # A limit of the sampler's is kept as a trial that is stopped.
    max_steps = trial.study.sampler.max_steps(trial.number)
    steps = LAW.steps(batch_size, lr)
    trial.set_user_attr("seconds_per_step", LAW.tau(batch_size))
    if steps is None:
        trial.set_user_attr("steps", 20)
        trial.set_user_attr("status", "diverged")
        raise optuna.TrialPruned
    steps *= factor
    if max_steps is not None and steps > max_steps:
        trial.set_user_attr("steps", max_steps)
        raise optuna.TrialPruned
    trial.set_user_attr("steps", round(steps))
    return round(steps) * LAW.tau(batch_size)


def size(trial):
    return trial.suggest_int("batch_size", 8, 4096, log=True)


def rate(trial):
    return trial.suggest_float("lr", 1e-3, 2.0, log=True)


def plain(trial):
    return answer(trial, size(trial), rate(trial))


def run(objective, count, sampler=None, **arguments):
    study = optuna.create_study(sampler=sampler or FrontierSampler(seed=0), **arguments)
    study.optimize(objective, n_trials=count)
    return study


def distinct(study, name):
    return len({trial.params[name] for trial in study.trials})


def batch_sizes(trials):
    return [trial.params["batch_size"] for trial in trials]


def test_define_by_run_without_a_known_space_and_by_workers_in_threads():
    study = run(plain, 14)
    # The first one lies in the middle: sqrt(8 x 4096) = 181.
    assert study.trials[0].params == {
        "batch_size": 181,
        "lr": pytest.approx(math.sqrt(2e-3)),
    }
    assert distinct(study, "batch_size") > 10
    # A quarter above the least time that there is.
    assert study.best_value < 1.25 * BEST
    study = optuna.create_study(sampler=FrontierSampler(seed=0))
    # Two workers decide with one trial unknown to each.
    study.optimize(plain, n_trials=14, n_jobs=2)
    assert len(study.get_trials(states=[TrialState.COMPLETE, TrialState.PRUNED])) == 14
    assert study.best_value < 1.4 * BEST


class OnlyOnceIndependent(FrontierSampler):
    """Refuses to fall back: Optuna asks for an independent value where a proposed one is not on the grid."""

    def sample_independent(self, study, trial, *arguments):
        assert trial.number == 0
        return super().sample_independent(study, trial, *arguments)


def around_the_rule(trial):
    batch_size = size(trial)
    return batch_size, sqrt_rule(batch_size) * 2 ** trial.suggest_float("delta", -3.0, 3.0)


# A parameter with one value is not varied.
@pytest.mark.parametrize(
    ("suggest", "grid", "varied", "within"),
    [
        (
            lambda trial: (trial.suggest_int("batch_size", 16, 512, step=16), rate(trial)),
            16,
            {"batch_size", "lr"},
            1.6,
        ),
        (
            lambda trial: (size(trial), trial.suggest_float("lr", 0.01, 1.0, step=0.01)),
            1,
            {"batch_size", "lr"},
            1.6,
        ),
        (
            lambda trial: (
                trial.suggest_int("batch_size", 3, 512),
                trial.suggest_float("lr", 0.01, 1.0),
            ),
            1,
            {"batch_size", "lr"},
            1.6,
        ),
        # The best batch size itself is given.
        (
            lambda trial: (trial.suggest_int("batch_size", 283, 283, log=True), rate(trial)),
            1,
            {"lr"},
            1.25,
        ),
        (
            lambda trial: (size(trial), trial.suggest_float("lr", 0.1487, 0.1487, log=True)),
            1,
            {"batch_size"},
            1.25,
        ),
        (around_the_rule, 1, {"batch_size", "delta"}, 1.25),
    ],
    ids=[
        "steps of batch size",
        "steps of lr",
        "linear",
        "one batch size",
        "one lr",
        "delta with a rule",
    ],
)
def test_spaces_of_all_kinds_are_searched(suggest, grid, varied, within):
    sampler = OnlyOnceIndependent(seed=0, rule=sqrt_rule if "delta" in varied else None)
    study = run(lambda trial: answer(trial, *suggest(trial)), 11, sampler)
    found = {name for name in study.best_params if distinct(study, name) > 6}
    assert found == varied
    assert not np.any(np.array(batch_sizes(study.trials)) % grid)
    assert study.best_value < within * BEST


@pytest.mark.slow
def test_other_hyper_parameters_are_searched_as_well():
    def objective(trial):
        decay = trial.suggest_float("decay", 1e-5, 1e-1, log=True)
        kind = trial.suggest_categorical("kind", ["a", "b", "c"])
        trial.suggest_categorical("only", ["x"])
        trial.suggest_int("layers", 1, 7, step=2)
        factor = math.exp(
            # The best decay is 1e-3 and the best kind b: each decade or other kind costs time.
            0.3 * math.log10(decay / 1e-3) ** 2 + {"a": 0.8, "b": 0.0, "c": 0.8}[kind]
        )
        return answer(trial, size(trial), rate(trial), factor)

    study = run(objective, 26, FrontierSampler(seed=1))
    assert study.best_params["kind"] == "b"
    assert study.best_value < 1.6 * BEST
    late = study.trials[13:]
    kinds = [trial.params["kind"] for trial in late]
    assert kinds.count("b") > len(late) / 2
    decays = np.array([trial.params["decay"] for trial in late])
    # Within a decade of the best on average.
    assert abs(np.median(np.log10(decays / 1e-3))) < 1.0
    for trial in study.trials:
        assert trial.params["layers"] in (1, 3, 5, 7)


def test_parameters_that_not_all_trials_have_are_sampled_anywhere():
    def objective(trial):
        if trial.suggest_categorical("kind", ["sgd", "adam"]) == "sgd":
            trial.suggest_float("momentum", 0.0, 1.0)
        return plain(trial)

    values = []
    for trial in run(objective, 16).trials:
        if "momentum" in trial.params:
            values.append(trial.params["momentum"])
    assert len(set(values)) == len(values) > 3


def test_a_history_that_is_reported_is_extrapolated():
    sampler = FrontierSampler(seed=0, target=TARGET, ideal=0.0, search_space=SPACE)
    study = optuna.create_study(sampler=sampler)
    trial = study.ask(SPACE)
    for step in range(10, 1001, 10):
        # This power law reaches the target at step 3000.
        trial.report(0.1 * (step / 3000) ** -0.4, step)
    study.tell(trial, state=TrialState.PRUNED)
    (one,) = sampler.posterior(study).observations
    assert (one.status, one.steps) == ("stopped", 1000)
    # 3000/1000.
    assert one.log_factor == pytest.approx(math.log(3.0), abs=one.log_factor_spread)


def test_a_first_trial_that_fails_is_not_asked_for_ever():
    def objective(trial):
        value = plain(trial)
        # The middle batch size of the first trial is 181.
        if trial.params["batch_size"] > 150:
            raise MemoryError
        return value

    study = optuna.create_study(sampler=FrontierSampler(seed=0))
    study.optimize(objective, n_trials=20, catch=(MemoryError,))
    states = [trial.state for trial in study.trials]
    assert states[0] == TrialState.FAIL
    assert TrialState.COMPLETE in states
    # The search goes on elsewhere after each of them.
    assert distinct(study, "batch_size") > 10


def test_trials_that_run_are_pending(monkeypatch):
    seen = []

    def spy(posterior, pending, **arguments):
        seen.append(list(pending))
        return suggest(posterior, pending, **arguments)

    monkeypatch.setattr(frontier, "suggest", spy)
    study = run(plain, 4, FrontierSampler(seed=0, search_space=SPACE))
    running = [study.ask(SPACE), study.ask(SPACE)]
    # A running trial may be a continuation.
    running[1].set_user_attr(RESUMED_FROM, 2)
    # This trial has no parameters yet.
    study.ask()
    study.ask(SPACE)
    points = []
    for trial, resumed_from in zip(running, (None, 2), strict=True):
        x = math.log2(trial.params["batch_size"])
        z = math.log2(trial.params["lr"])
        points.append((x, z, resumed_from))
    # The fourth call had no trial beside it.
    assert (seen[3], seen[-1]) == ([], points)


def test_two_directions_are_searched_in_turn():
    def objective(trial):
        batch_size = size(trial)
        lr = rate(trial)
        # A trial that diverges has far more steps than any.
        steps = LAW.steps(batch_size, lr) or 1e7
        return steps, steps * LAW.tau(batch_size)

    sampler = FrontierSampler(objective="both", seed=0)
    study = optuna.create_study(sampler=sampler, directions=["minimize", "minimize"])
    study.optimize(objective, n_trials=20)
    found = sampler.posterior(study)
    assert len(found.observations) == 20
    assert float(found.tau(np.array(512.0))) == pytest.approx(LAW.tau(512), rel=0.05)
    late = study.trials[10:]
    # Trials of even numbers are asked for the one, those of odd numbers for the other.
    times = batch_sizes(late[::2])
    steps = batch_sizes(late[1::2])
    # Time is least at 283; steps fall with every batch size.
    assert np.median(times) < 0.7 * np.median(steps)
    assert min(trial.values[1] for trial in late) < 1.3 * BEST


def test_a_decision_is_a_function_of_the_trials_and_the_seed():
    study = optuna.create_study(sampler=FrontierSampler(seed=5))
    again = optuna.create_study(sampler=FrontierSampler(seed=5))
    for _ in range(8):
        study.optimize(plain, n_trials=1)
        again.optimize(plain, n_trials=1)
        # To look at the posterior changes nothing.
        again.sampler.posterior(again)
    points = [trial.params for trial in study.trials]
    assert points == [trial.params for trial in again.trials]
    asked = []
    for _ in range(2):
        # Another object with the same seed asks the same.
        study.sampler = FrontierSampler(seed=5)
        trial = study.ask(SPACE)
        asked.append(trial.params)
        study.tell(trial, state=TrialState.FAIL)
    assert asked[0] == asked[1]
    assert asked[0] not in points


def test_the_posterior_of_a_study_is_that_of_its_records():
    study = run(plain, 8)
    sampler = FrontierSampler(seed=0, search_space=SPACE)
    coordinates = Coordinates(SPACE, None, round, None)
    records = [trial_result(trial, coordinates, "time") for trial in study.trials]
    options = {"particles": 32, "moves": 2}
    # The same draws.
    first = sampler.posterior(study, **options, rng=np.random.default_rng(3))
    second = sampler.posterior(records, **options, rng=np.random.default_rng(3))
    np.testing.assert_array_equal(first.theta, second.theta)
    assert first.theta.shape[0] == 32
    assert (first.observations, first.spent) == (second.observations, second.spent)
    failed = [*records, replace(records[0], number=9, status="failed")]
    assert sampler.posterior(failed, **options).observations == first.observations
    # Its parameters are not known yet.
    assert FrontierSampler(seed=0).posterior(optuna.create_study()) is None


@pytest.mark.parametrize("budget", [None, lambda size: 50_000.0])
def test_stopped_trials_are_continued_where_they_can_be(budget):
    sampler = FrontierSampler(
        # What is resumable may depend on the trial: every third is not.
        seed=0,
        search_space=SPACE,
        budget=budget,
        resumable=lambda number: number % 3 != 0,
    )
    study = optuna.create_study(sampler=sampler)
    parents = []
    for _ in range(16):
        trial = study.ask(SPACE)
        max_steps = sampler.max_steps(trial.number)
        resumed_from = sampler.resumed_from(trial.number)
        # Without a budget there is no limit until something has reached the target.
        assert (max_steps is None) == (
            budget is None and not study.get_trials(states=[TrialState.COMPLETE])
        )
        if resumed_from is not None:
            before = study.trials[resumed_from]
            trial.set_user_attr(RESUMED_FROM, resumed_from)
            assert resumed_from % 3 != 0
            assert before.params == trial.params
            assert max_steps is None or max_steps > before.user_attrs["steps"]
            assert resumed_from not in parents
            parents.append(resumed_from)
        # Beyond all limits.
        needed = LAW.steps(**trial.params) or 1e9
        tau = LAW.tau(trial.params["batch_size"])
        steps = min(needed, 300 * (trial.number + 1) if max_steps is None else max_steps)
        trial.set_user_attr("steps", round(steps))
        trial.set_user_attr("seconds_per_step", tau)
        study.tell(trial, *((None, TrialState.PRUNED) if steps < needed else (needed * tau,)))
    assert parents


@pytest.mark.parametrize(
    ("suggest", "said"),
    [
        (
            lambda trial: size(trial) + trial.suggest_float("learning_rate", 0.1, 1.0),
            "learning_rate",
        ),
        (lambda trial: size(trial) + trial.suggest_float("delta", -1.0, 1.0), "and a rule"),
        (lambda trial: trial.suggest_float("lr", 0.1, 1.0), "batch_size"),
        (
            lambda trial: (
                trial.suggest_categorical("batch_size", [8, 64])
                + trial.suggest_float("lr", 0.1, 1.0)
            ),
            "use suggest_int",
        ),
        (lambda trial: size(trial) + trial.suggest_float("lr", 0.0, 1.0), "lr must lie above 0"),
        (lambda trial: size(trial) + trial.suggest_int("lr", 1, 2), "lr must be a float"),
    ],
)
def test_a_space_that_it_cannot_search_is_refused(suggest, said):
    with pytest.raises(ConfigError, match=said):
        run(suggest, 3)


def test_other_mistakes_are_refused():
    with pytest.raises(ConfigError, match="time, steps, both, curve, loss, but got 'speed'"):
        FrontierSampler(objective="speed")
    with pytest.raises(ConfigError, match="sigma must be a positive number, but got 0"):
        FrontierSampler(sigma=0)
    with pytest.raises(ConfigError, match="maximizes"):
        run(plain, 1, direction="maximize")


@pytest.mark.parametrize(
    ("objective", "value", "attributes"),
    [
        ("time", 3.0, {}),
        ("time", 0.0, {"steps": 100}),
        ("time", math.inf, {"steps": 100}),
        ("steps", math.inf, {}),
        # Steps of 0.2 are none.
        ("steps", 0.2, {}),
        ("time", 3.0, {"steps": 100, "seconds_per_step": -1.0}),
    ],
)
def test_trials_that_say_nothing_are_passed_over_and_the_first_is_named(
    caplog, objective, value, attributes
):
    def silent(trial):
        size(trial), rate(trial)
        for name, given in attributes.items():
            trial.set_user_attr(name, given)
        return value

    sampler = FrontierSampler(objective=objective, seed=0)
    with caplog.at_level(logging.WARNING, "bstune"):
        study = run(silent, 4, sampler)
    lines = []
    for record in caplog.records:
        if record.name.startswith("bstune"):
            lines.append(record.getMessage())
    assert len(lines) == 1
    assert lines[0].startswith("trial 0 is passed over")
    assert NEEDED[objective] in lines[0]
    assert sampler.posterior(study).observations == ()


@pytest.mark.parametrize(
    ("objective", "values", "attributes", "seconds"),
    [
        # Seconds of 0.03 are the value: 100 steps of 0.3 ms.
        ("time", [0.03], {"steps": 100}, 3e-4),
        ("curve", [0.03], {"steps": 100}, 3e-4),
        ("time", [0.03], {"steps": 100, "seconds_per_step": 0.5}, 0.5),
        ("steps", [100.0], {}, None),
        ("both", [100.0, 0.03], {}, 3e-4),
    ],
)
def test_a_trial_that_tells_what_is_needed_counts(objective, values, attributes, seconds):
    assert set(NEEDED) == set(OBJECTIVES)
    trial = create_trial(
        params={"batch_size": 64, "lr": 0.125},
        distributions=SPACE,
        values=values,
        user_attrs=attributes,
    )
    result = trial_result(trial, coordinates_of(), objective)
    assert (result.status, result.steps) == ("reached", 100)
    assert result.seconds_per_step == (None if seconds is None else pytest.approx(seconds))


def test_the_record_of_a_trial():
    base = {"params": {"batch_size": 64, "lr": 0.125}, "distributions": SPACE}
    # The attributes that bstune itself writes are preferred.
    record = make_result(number=7, steps=123)
    trial = create_trial(**base, value=1.0, user_attrs={RECORD: record.to_json(), "steps": 5})
    assert trial_result(trial, coordinates_of(), "time") == record
    # A pruned one is stopped at its last report.
    history = {10: 0.5, 20: math.nan, 40: 0.3}
    seconds = {"seconds_per_step": 0.5}
    trial = create_trial(
        **base, state=TrialState.PRUNED, intermediate_values=history, user_attrs=seconds
    )
    result = trial_result(trial, coordinates_of(), "time")
    assert (result.status, result.steps, result.steps_low, result.batch_size) == (
        "stopped",
        40,
        40,
        64,
    )
    assert result.lr == pytest.approx(0.125)
    # 40 steps of 0.5 s.
    assert result.train_seconds == 20.0
    assert result.history == ((10, 0.5), (20, None), (40, 0.3))


def records(count, reached=0.7):
    """Trials of the law with some noise; most have reached the target."""
    rng = np.random.default_rng(0)
    found = []
    for number in range(count):
        batch_size = round(2.0 ** rng.uniform(3.0, 12.0))
        lr = LAW.best_lr(batch_size) * 2.0 ** rng.normal(0.0, 0.7)
        steps = round((LAW.steps(batch_size, lr) or 5000.0) * math.exp(0.1 * rng.normal()))
        status = "reached" if rng.random() < reached else "stopped"
        if status == "stopped":
            # It was stopped half way.
            steps = math.ceil(0.5 * steps)
        found.append(
            make_result(
                number=number,
                batch_size=batch_size,
                lr=lr,
                status=status,
                steps=steps,
                steps_low=steps - 1,
                history=((steps, 0.1 if status == "reached" else 0.2),),
                resumed_from=None,
                hyperparameters={},
            )
        )
    return found


def drawn(trials, **settings):
    sampler = FrontierSampler(seed=0, search_space=SPACE, target=TARGET, ideal=0.0)
    return sampler.posterior(trials, particles=40, moves=1, **settings).theta


def test_the_sizes_at_which_posteriors_are_remembered_grow_evenly_and_leave_the_latest_out():
    assert start_sizes(0) == start_sizes(FIRST_START) == []
    sizes = start_sizes(1000)
    assert sizes[0] == FIRST_START
    for size, larger in pairwise(sizes):
        # About a quarter more each time.
        assert 1.2 < larger / size < 1.3
    assert 700 < sizes[-1] <= 900
    # Whatever is added, the ones before stay where they are: each is made of the one before it.
    for count in range(1000):
        made = start_sizes(count)
        assert made == sizes[: len(made)]
    for place, size in enumerate(sizes):
        assert start_sizes(size) == sizes[:place]


@pytest.mark.slow
def test_a_posterior_of_many_trials_is_a_function_of_them_alone(monkeypatch):
    """Remembered from decision to decision or made anew in a process that goes on with the study: the same bits."""
    trials = records(170)
    monkeypatch.setattr(posterior, "_starts", {})
    anew = drawn(trials)
    # One posterior for each size.
    assert len(posterior._starts) == len(start_sizes(170)) > 1
    monkeypatch.setattr(posterior, "_starts", {})
    for count in range(80, 170, 30):
        drawn(trials[:count])
    remembered = dict(posterior._starts)
    np.testing.assert_array_equal(drawn(trials), anew)
    assert remembered.keys() <= posterior._starts.keys()
    # Not where another trial, target or weight was looked at.
    for changed, settings in (
        ([replace(trials[3], steps=trials[3].steps + 1), *trials[:3], *trials[4:]], {}),
        # Whether records are independent changes the likelihood.
        (trials, {"independent": False}),
    ):
        before = len(posterior._starts)
        drawn(changed, **settings)
        assert len(posterior._starts) == before + len(start_sizes(170))


def test_few_posteriors_are_remembered(monkeypatch):
    monkeypatch.setattr(posterior, "_starts", {})
    monkeypatch.setattr(posterior, "STARTS_KEPT", 2)
    drawn(records(170))
    assert len(posterior._starts) == 2


def test_a_posterior_of_few_trials_remembers_nothing(monkeypatch):
    monkeypatch.setattr(posterior, "_starts", {})
    drawn(records(FIRST_START))
    assert posterior._starts == {}
