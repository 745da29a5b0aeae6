"""How options are written for a study of Python objects."""

import inspect

import pytest

import bstune
from bstune.config import option_names
from bstune.core.option_names import (
    ARGUMENT_OPTIONS,
    OPTIONS_OF_TRIAL,
    SWEEPER_KEYS,
    PythonTerms,
    in_hydra,
    in_python,
)
from bstune.trial.own_loop.loop_trial import LoopTrial, is_name_of_a_trial

TERMS = PythonTerms("val_loss", "<=", 64)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("search.trials=128 looks further", "trials=128 looks further"),
        ("a larger search.wall_seconds runs them", "a larger wall_seconds runs them"),
        (
            "stopped: search.seconds=60 of training are spent",
            "stopped: seconds=60 of training are spent",
        ),
        ("search.replicates=3: more", "options=['search.replicates=3']: more"),
        ("(hardware.refresh=true)", "(options=['hardware.refresh=true'])"),
        ("hardware.enabled=false.", "survey=False."),
        ("search.objective=loss", "objective='loss'"),
        ("budget.steps=80 budget.examples=9: x", "budget=bstune.Budget(steps=80, examples=9): x"),
        ("budget.examples=9", "budget=bstune.Budget(examples=9)"),
        ("budget.seconds=3.5", "options=['budget.seconds=3.5']"),
        ("scaling.beta2_half_life=1000", "options=['scaling.beta2_half_life=1000']"),
        ("such as workload.target.value=0.04", 'such as target="val_loss<=0.04"'),
        ("smaller: scaling.lr=0.01", "smaller: reference=(64, 0.01)"),
        ("a larger search.batch_size.high", "a larger batch_sizes[1]"),
        ("the other direction: workload.target.mode", "the other direction: target"),
        ("begin another one with study=NAME", "begin another one with name=NAME"),
        ("the same command continues", "the same call continues"),
        # An option without an argument of its own keeps its name.
        ("more hardware.seconds", "more hardware.seconds"),
        # Neither a path, nor a module, nor what is written for Python already.
        ("outputs/search.trials/report.html", "outputs/search.trials/report.html"),
        (
            "my.search.trials and bstune.Budget(steps=3)",
            "my.search.trials and bstune.Budget(steps=3)",
        ),
        ("options=['search.trials=3']", "options=['search.trials=3']"),
        ("val/loss 0.1, 3 of 3 seeds", "val/loss 0.1, 3 of 3 seeds"),
    ],
)
def test_options_become_arguments(text, expected):
    assert in_python(text, TERMS) == expected


def test_what_needs_the_studys_terms_is_an_option_without_them():
    found = in_python("workload.target.value=0.04 and scaling.lr=0.01")
    assert found == "options=['workload.target.value=0.04'] and options=['scaling.lr=0.01']"


def test_a_trials_attributes_are_no_options_though_a_section_has_their_name():
    of_section = {name for name in option_names() if name.startswith("trial.")}
    assert of_section == OPTIONS_OF_TRIAL
    attributes = {f"trial.{name}" for name in dir(LoopTrial) if is_name_of_a_trial(name)}
    for name in attributes - of_section:
        text = f"past {name}=61: its further steps"
        assert (in_python(text), in_hydra(text)) == (text, text)


def test_each_argument_is_one_of_study_and_sets_an_option_that_there_is():
    arguments = set(inspect.signature(bstune.Study).parameters)
    assert ARGUMENT_OPTIONS.keys() <= arguments
    assert set(ARGUMENT_OPTIONS.values()) <= set(option_names())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("search.trials=24 looks further", "hydra.sweeper.n_trials=24 looks further"),
        ("more search.workers", "more hydra.sweeper.n_jobs"),
        # A sweep runs its jobs again where it names the key of their seed.
        ("search.replicates=3: more", "hydra.sweeper.seed=KEY: more"),
        (
            "(hardware.seconds=9)",
            "('hydra.sweeper.options=[\"hardware.seconds=9\"]')",
        ),
        (
            "budget.steps=80 budget.examples=9",
            "hydra.sweeper.budget.steps=80 hydra.sweeper.budget.examples=9",
        ),
        (
            "such as workload.target.value=0.04",
            "such as 'hydra.sweeper.target=\"val_loss<=0.04\"'",
        ),
        ("smaller: scaling.lr=0.01", "smaller: 'hydra.sweeper.reference=[64,0.01]'"),
        ("the other direction: workload.target.mode", "the other direction: hydra.sweeper.mode"),
        ("with study=NAME", "with hydra.sweeper.study_name=NAME"),
        # The same command is right there, and so are keys of a sweep.
        ("the same command", "the same command"),
        ("hydra.sweeper.n_jobs=2", "hydra.sweeper.n_jobs=2"),
        ("a larger search.wall_seconds", "a larger search.wall_seconds"),
    ],
)
def test_options_become_keys_of_a_sweep(text, expected):
    assert in_hydra(text, TERMS) == expected


def test_the_keys_of_a_sweep_are_those_that_it_has():
    from bstune.integrations.hydra_plugins.bstune_sweeper.sweeper import BstuneSweeperConf

    names = {key.partition(".")[0] for key in SWEEPER_KEYS.values()}
    assert names <= BstuneSweeperConf.__dataclass_fields__.keys()
