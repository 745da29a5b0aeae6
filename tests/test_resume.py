"""What a trial puts back that goes on from a stopped one, once and no later than its first batch."""

import pytest
import torch
from lightning.pytorch import LightningModule
from made_parts import make_stopped, make_trainer
from torch import nn, tensor

from bstune.trial.parts import resume as resuming
from bstune.trial.parts.resume import Resume


class TwoLayers(LightningModule):
    """Two weights of 1.0 and a buffer."""

    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(torch.ones(2))
        self.b = nn.Parameter(torch.ones(2))
        self.register_buffer("mean", torch.zeros(()))


@pytest.fixture
def accumulations(monkeypatch):
    """Note what is accumulated on, in place of Lightning's own collection."""
    noted = []
    monkeypatch.setattr(
        resuming, "restore_metrics", lambda trainer, module, state: noted.append(state)
    )
    return noted


def overwrite(module, value):
    with torch.no_grad():
        module.a.fill_(value)
        module.mean.fill_(value)


def test_a_fresh_trial_puts_nothing_back(accumulations):
    module = TwoLayers()
    trainer = make_trainer()
    resume = Resume(None)
    resume.keep_weights(module)
    overwrite(module, 3.0)
    resume.begin(trainer, has_epochs=True)
    assert not resume.lacks_evaluation(at_epoch_end=True)
    resume.before_batch(trainer, module)
    assert (trainer.val_check_batch, trainer._logger_connector._first_loop_iter) == (1, None)
    assert torch.equal(module.a, torch.full((2,), 3.0))
    assert accumulations == []


def test_weights_that_hooks_reset_are_put_back_once(accumulations):
    module = TwoLayers()
    trainer = make_trainer()
    resume = Resume(make_stopped())
    resume.keep_weights(module)
    overwrite(module, 3.0)
    resume.begin(trainer, has_epochs=False)
    resume.before_batch(trainer, module)
    assert torch.equal(module.a, torch.ones(2))
    assert module.mean == 0.0
    # As training does after the first batch.
    overwrite(module, 5.0)
    resume.before_batch(trainer, module)
    assert torch.equal(module.a, torch.full((2,), 5.0))


def test_weights_of_another_shape_and_new_ones_are_left_alone():
    module = TwoLayers()
    resume = Resume(make_stopped())
    resume.keep_weights(module)
    # As hooks may, which build the module for the data that they see.
    module.a = nn.Parameter(torch.full((3,), 2.0))
    del module.b
    module.c = nn.Parameter(torch.full((2,), 4.0))
    resume.put_back_stopped_state(make_trainer(), module)
    assert module.a.tolist() == [2.0] * 3
    assert module.c.tolist() == [4.0] * 2


@pytest.mark.parametrize("frozen", [(), ("a",), ("a", "b")])
@pytest.mark.parametrize("before", [(), ("b",)])
def test_the_same_parameters_are_frozen(frozen, before):
    module = TwoLayers()
    trainer = make_trainer()
    for name in before:
        getattr(module, name).requires_grad_(False)
    resume = Resume(make_stopped(frozen=frozen))
    resume.begin(trainer, has_epochs=False)
    resume.before_batch(trainer, module)
    found = [name for name, weight in module.named_parameters() if not weight.requires_grad]
    assert tuple(found) == frozen
    # What a call-back unfreezes later stays so.
    module.requires_grad_(True)
    resume.before_batch(trainer, module)
    assert module.a.requires_grad
    assert module.b.requires_grad


@pytest.mark.parametrize("has_epochs", [True, False])
def test_it_begins_where_it_was_stopped(has_epochs, accumulations):
    epoch = {"logged": {}}
    value = tensor(0.3)
    trainer = make_trainer()
    trainer.fit_loop.batch_idx = 4
    resume = Resume(make_stopped(epoch=epoch, metrics={"val/error": value}))
    resume.begin(trainer, has_epochs)
    assert trainer.callback_metrics == {"val/error": value}
    assert trainer.val_check_batch == 5
    for _ in range(2):
        resume.before_batch(trainer, TwoLayers())
    assert accumulations == ([epoch] if has_epochs else [])
    assert trainer._logger_connector._first_loop_iter == (False if has_epochs else None)


@pytest.mark.parametrize(
    ("steps", "due_step", "at_epoch_end", "has_epochs", "lacks"),
    [
        (30, 30, False, True, True),
        (29, 30, False, True, False),
        # It was stopped where an epoch is evaluated at its end, due or not.
        (29, 30, True, True, True),
        # Without epochs nothing looks at an evaluation.
        (30, 30, True, False, False),
    ],
)
def test_an_evaluation_that_the_state_lacks_runs_again(
    steps, due_step, at_epoch_end, has_epochs, lacks
):
    resume = Resume(make_stopped(steps, due_step=due_step))
    resume.begin(make_trainer(), has_epochs)
    assert resume.lacks_evaluation(at_epoch_end) == lacks


def test_lightning_begins_with_the_evaluation():
    trainer = make_trainer()
    resume = Resume(make_stopped())
    resume.evaluate_again(trainer)
    validation = trainer.fit_loop.epoch_loop.val_loop
    assert resume.evaluates_again
    assert (validation.restarting, validation._restart_stage) == (False, "restarted_mid_evaluation")


def test_at_an_epochs_end_all_is_put_back_and_lightning_does_not_restart(accumulations):
    module = TwoLayers()
    trainer = make_trainer()
    resume = Resume(make_stopped(epoch={"logged": {}}, frozen=("a",)))
    resume.begin(trainer, has_epochs=True)
    resume.end_epoch(trainer, module)
    assert accumulations == [{"logged": {}}]
    assert not module.a.requires_grad
    assert trainer.fit_loop._restarting is False
    # The next batch begins an epoch, which Lightning accumulates anew.
    resume.before_batch(trainer, module)
    assert trainer._logger_connector._first_loop_iter is None
