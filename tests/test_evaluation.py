"""What a trial does around an evaluation, with its real parts and a stand-in for the Trainer."""

import math
from types import SimpleNamespace

import pytest
import torch
from made_parts import make_trainer
from test_parts import begin
from toolbox import EVERY_STEP, make_protocol
from torch import tensor
from torch.utils.data import DataLoader

from bstune.core.clock import Phase
from bstune.core.errors import ConfigError
from bstune.core.evaluation_schedule import EvaluationSchedule
from bstune.trial.parts.evaluation import begin_evaluation, end_evaluation, is_evaluation_due

# Evaluations are due at steps 10, 20 and so on.
SELDOM = EvaluationSchedule(ratio=1.05, share=0.25, cost=0.5, near=1.5)
NAME = "val/error"


def trained(steps, schedule=SELDOM, **changes):
    """The parts of a trial of 50 steps that has taken some, and a Trainer."""
    parts = begin(protocol=make_protocol(50, evaluation_schedule=schedule))
    parts.phases.begin_training()
    parts.state.steps = steps
    return parts, make_trainer(**changes)


@pytest.mark.parametrize(
    ("steps", "changes", "loop", "ends_epoch", "due"),
    [
        (9, {}, {}, False, False),
        (10, {}, {}, False, True),
        (9, {"should_stop": True}, {}, False, True),
        (9, {}, {}, True, True),
        (9, {}, {"max_steps": 12, "global_step": 12}, False, True),
        (9, {}, {"max_steps": 12, "global_step": 11}, False, False),
        # Under manual optimization it has no limit.
        (9, {}, {"max_steps": -1, "global_step": 12}, False, False),
    ],
)
def test_an_evaluation_is_due_by_the_cadence_or_where_something_ends(
    steps, changes, loop, ends_epoch, due
):
    parts, trainer = trained(steps, **changes)
    vars(trainer.fit_loop.epoch_loop).update(loop)
    parts.epoch_ends.evaluates = lambda trainer: ends_epoch
    assert is_evaluation_due(parts, trainer) == due


def test_the_last_step_is_evaluated():
    parts, trainer = trained(9)
    parts.state.last_step = 9
    assert is_evaluation_due(parts, trainer)


def test_an_evaluation_draws_none_of_the_trainings_random_numbers():
    parts, trainer = trained(10)
    begin_evaluation(parts, trainer, SimpleNamespace())
    assert parts.clock.segments == [(10, 0.0)]
    expected = torch.rand(3)
    trainer.callback_metrics[NAME] = tensor(0.9)
    end_evaluation(parts, trainer, lean_loop_runs=False)
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize(
    ("value", "loss", "steps", "asked", "status", "stops", "due"),
    [
        (0.9, 1.0, 10, False, "stopped", False, 20),
        (0.05, 1.0, 10, False, "reached", True, 10),
        (math.nan, 1.0, 10, False, "diverged", True, 10),
        (0.9, math.nan, 10, False, "diverged", True, 10),
        (0.9, 1.0, 50, False, "stopped", True, 10),
        # Another one is due at no step where something else stops it.
        (0.9, 1.0, 10, True, "stopped", True, 10),
    ],
)
def test_an_evaluation_ends_the_trial_or_says_when_the_next_one_is_due(
    value, loss, steps, asked, status, stops, due
):
    parts, trainer = trained(steps, should_stop=asked)
    parts.state.loss = tensor(loss)
    parts.metric.before_evaluation(trainer)
    trainer.callback_metrics[NAME] = tensor(value)
    end_evaluation(parts, trainer, lean_loop_runs=False)
    assert (parts.state.status, trainer.should_stop) == (status, stops)
    assert parts.cadence.due_step == due
    assert parts.state.history == [(steps, None if math.isnan(value) else value)]


@pytest.mark.parametrize(
    ("value", "lean_loop_runs", "phase"),
    [
        (0.9, False, Phase.TRAINING),
        # It starts the clock once Lightning is done with the evaluation.
        (0.9, True, Phase.EVALUATION),
        (0.05, False, Phase.CLOSING),
        (0.05, True, Phase.CLOSING),
    ],
)
def test_the_clock_goes_on(value, lean_loop_runs, phase):
    parts, trainer = trained(10, EVERY_STEP)
    trainer.callback_metrics[NAME] = tensor(value)
    begin_evaluation(parts, trainer, SimpleNamespace())
    entered = []
    parts.clock.enter, enter = entered.append, parts.clock.enter
    end_evaluation(parts, trainer, lean_loop_runs)
    parts.clock.enter = enter
    assert entered == ([] if phase is Phase.EVALUATION else [phase])


@pytest.mark.parametrize(("steps", "stops", "due"), [(10, False, 11), (50, True, 10)])
def test_an_evaluation_without_the_metric_is_left_out(steps, stops, due):
    parts, trainer = trained(steps)
    trainer.callback_metrics[NAME] = tensor(0.05)
    parts.metric.before_evaluation(trainer)
    end_evaluation(parts, trainer, lean_loop_runs=False)
    assert (parts.state.status, parts.state.history) == ("stopped", [])
    assert (parts.cadence.due_step, trainer.should_stop) == (due, stops)


def test_the_stopped_trials_evaluation_is_judged_once():
    parts, trainer = trained(10)
    parts.resume.evaluates_again = True
    trainer.callback_metrics[NAME] = tensor(0.9)
    end_evaluation(parts, trainer, lean_loop_runs=False)
    assert (parts.state.history, parts.cadence.due_step) == ([], 10)
    end_evaluation(parts, trainer, lean_loop_runs=False)
    assert parts.state.history == [(10, 0.9)]


@pytest.mark.parametrize(
    ("value", "checked", "gap"),
    [
        (0.9, 3, pytest.approx(0.8)),
        # The first batches alone may hold one class only.
        (0.9, 2, None),
        (0.0, 2, None),
        (math.nan, 3, None),
        # A module may log nothing there.
        (None, 3, None),
    ],
)
def test_the_start_is_measured_in_the_sanity_check(value, checked, gap):
    parts, trainer = trained(0, sanity_checking=True)
    trainer.val_dataloaders = DataLoader(range(3))
    trainer.num_sanity_val_batches = [checked]
    if value is not None:
        trainer.callback_metrics[NAME] = tensor(value)
    end_evaluation(parts, trainer, lean_loop_runs=False)
    assert parts.verdict.start_gap == gap
    assert (parts.state.history, trainer.should_stop) == ([], False)


def test_a_later_evaluation_has_to_log_the_metric():
    parts, trainer = trained(10)
    with pytest.raises(ConfigError, match="the module logs nothing in validation"):
        end_evaluation(parts, trainer, lean_loop_runs=False)


def test_what_processes_agree_on_counts(monkeypatch):
    """Another one's metric is not finite."""
    monkeypatch.setattr(
        "bstune.trial.devices.distributed.agree", lambda value, loss, stop: (None, loss, stop)
    )
    parts, trainer = trained(10)
    trainer.callback_metrics[NAME] = tensor(0.9)
    end_evaluation(parts, trainer, lean_loop_runs=False)
    assert (parts.state.status, trainer.should_stop) == ("diverged", True)
    assert parts.state.ended
