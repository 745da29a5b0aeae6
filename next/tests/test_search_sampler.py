import doctest
import math

import optuna
import pytest
from search_records import QUESTION, record, step_time

from bstune.core.errors import InputError
from bstune.search import sampler as module
from bstune.search.decide import propose
from bstune.search.sampler import FrontierSampler, record_of

optuna.logging.set_verbosity(optuna.logging.WARNING)
COMPLETE = optuna.trial.TrialState.COMPLETE
PRUNED = optuna.trial.TrialState.PRUNED
DISTRIBUTIONS = {
    "batch_size": optuna.distributions.IntDistribution(8, 512, log=True),
    "lr": optuna.distributions.FloatDistribution(0.001, 1.0, log=True),
}


def make_sampler(**arguments):
    given = {"target": QUESTION.target, "budget": 4000, "batch_size": (8, 512), "lr": (0.001, 1.0)}
    return FrontierSampler(**(given | {"step_time": step_time} | arguments))


def finished(state=PRUNED, **fields):
    """A finished trial of a study."""
    value = 1.0 if state == COMPLETE else None
    study = optuna.create_study()
    study.add_trial(optuna.create_trial(state=state, value=value, **fields))
    return study.trials[0]


def ask(study):
    trial = study.ask()
    batch_size = trial.suggest_int("batch_size", 8, 512, log=True)
    return trial, batch_size, trial.suggest_float("lr", 0.001, 1.0, log=True)


def test_the_docstring_s_example_runs():
    assert doctest.testmod(module).attempted >= 8
    assert doctest.testmod(module).failed == 0


def test_the_baseline_is_the_first_trial():
    sampler = make_sampler(baseline=(100, 0.02))
    study = optuna.create_study(sampler=sampler)
    trial, *pair = ask(study)
    assert pair == [100, 0.02]
    assert sampler.proposal_of(trial.number).max_steps == 4000
    # The second one counts the first, which still runs, as done.
    running = [record(0, batch_size=100, lr=0.02)]
    expected = propose(QUESTION, sampler.space, step_time, [], 0, running)
    assert ask(study)[1:] == (expected.batch_size, expected.lr)
    assert expected != propose(QUESTION, sampler.space, step_time, [], 0)


def test_a_trial_that_ended_without_a_report_does_not_run():
    sampler = make_sampler()
    study = optuna.create_study(sampler=sampler)
    for state in (PRUNED, optuna.trial.TrialState.FAIL):
        study.tell(ask(study)[0], state=state)
    assert ask(study)[1:] == ask(optuna.create_study(sampler=make_sampler()))[1:]


def test_ranges_that_do_not_hold_the_proposal():
    trial = optuna.create_study(sampler=make_sampler()).ask()
    with pytest.raises(InputError):
        trial.suggest_int("batch_size", 1000, 2000, log=True)


HISTORY = {10: 0.9, 20: 0.3, 30: 0.2}


@pytest.mark.parametrize(
    ("state", "values", "status", "steps", "steps_low"),
    [
        (COMPLETE, HISTORY | {40: 0.1, 50: 0.2}, "reached", 40, 30),
        (COMPLETE, HISTORY, "pruned", 30, 20),
        (COMPLETE, HISTORY | {4000: 0.2}, "missed", 4000, 30),
        (PRUNED, HISTORY | {40: math.nan}, "diverged", 40, 30),
    ],
)
def test_how_a_trial_of_one_s_own_ended(state, values, status, steps, steps_low):
    trial = finished(
        state,
        params={"batch_size": 32, "lr": 0.1},
        distributions=DISTRIBUTIONS,
        intermediate_values=values,
        user_attrs={"seconds_per_step": 0.25},
    )
    got = record_of(trial, QUESTION)
    assert (got.status, got.steps, got.steps_low) == (status, steps, steps_low)
    assert (got.batch_size, got.lr, got.seconds_per_step) == (32, 0.1, 0.25)


@pytest.mark.parametrize(
    "arguments", [{"lr": None}, {"target": "error < 0.1"}, {"scaling": "square root"}]
)
def test_arguments_that_cannot_be_used(arguments):
    with pytest.raises(InputError):
        make_sampler(**arguments)
