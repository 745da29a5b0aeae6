import doctest

import optuna
import pytest
from refusals import cases
from search_records import QUESTION, history, record, step_time

from bstune.core.errors import InputError
from bstune.search import sampler as module
from bstune.search.decide import propose
from bstune.search.sampler import FrontierSampler, record_of

optuna.logging.set_verbosity(optuna.logging.WARNING)


def make_sampler(**arguments):
    given = {"target": QUESTION.target, "budget": 4000, "batch_size": (8, 512), "lr": (0.001, 1.0)}
    return FrontierSampler(**(given | {"step_time": step_time} | arguments))


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


def test_ranges_that_do_not_hold_the_proposal():
    sampler = make_sampler()
    study = optuna.create_study(sampler=sampler)
    with pytest.raises(InputError):
        study.ask().suggest_int("batch_size", 1000, 2000, log=True)
    # What has ended without a report does not run.
    study.tell(0, state=optuna.trial.TrialState.FAIL)
    assert ask(study)[1:] == ask(optuna.create_study(sampler=make_sampler()))[1:]


@cases("""
evaluations | status | steps | steps_low
10 0.9, 20 0.3, 40 0.1, 50 0.2 | reached | 40 | 20
10 0.9, 20 0.3 | pruned | 20 | 10
10 0.9, 20 0.3, 4000 0.2 | missed | 4000 | 20
10 0.9, 20 0.3, 40 nan | diverged | 40 | 20
""")
def test_how_a_trial_of_one_s_own_ended(evaluations, status, steps, steps_low):
    study = optuna.create_study(sampler=make_sampler())
    trial, batch_size, lr = ask(study)
    trial.set_user_attr("seconds_per_step", 0.25)
    for step, value in history(evaluations):
        trial.report(value, step)
    study.tell(trial, state=optuna.trial.TrialState.PRUNED)
    got = record_of(study.trials[0], QUESTION)
    assert (got.status, got.steps, got.steps_low) == (status, steps, steps_low)
    assert (got.batch_size, got.lr, got.seconds_per_step) == (batch_size, lr, 0.25)


@cases("""
arguments
{lr: null}
{target: error < 0.1}
{scaling: square root}
""")
def test_arguments_that_cannot_be_used(arguments):
    with pytest.raises(InputError):
        make_sampler(**arguments)
