"""The ends of epochs: where they are evaluated, and where another epoch is added to the last one."""

import pytest
from lightning.pytorch import LightningModule
from made_parts import make_state, make_trainer
from torch.utils.data import DataLoader

from bstune.trial.parts.epoch_ends import EpochEnds

SIX = DataLoader(range(6))
ENDLESS = iter(())


class Scheduled:
    """Lightning's note on a schedule, which looks at metrics."""

    reduce_on_plateau = True


def begun(batches, looks, state=None, adds_epochs=True):
    """The part after the start of a training, and its Trainer."""
    trainer = make_trainer(
        train_dataloader=batches, lr_scheduler_configs=[Scheduled()] if looks else []
    )
    ends = EpochEnds(make_state() if state is None else state, adds_epochs)
    ends.begin(trainer, LightningModule())
    return ends, trainer


@pytest.mark.parametrize(
    ("batches", "looks", "batch_idx", "exist", "evaluates"),
    [
        (SIX, True, 5, True, True),
        (SIX, True, 4, True, False),
        # Nothing there looks at what an evaluation logs.
        (SIX, False, 5, True, False),
        (ENDLESS, True, 5, False, False),
    ],
)
def test_an_epoch_is_evaluated_where_something_looks_at_its_end(
    batches, looks, batch_idx, exist, evaluates
):
    ends, trainer = begun(batches, looks)
    trainer.fit_loop.batch_idx = batch_idx
    assert (ends.epochs_end, ends.evaluates(trainer)) == (exist, evaluates)


def test_before_the_start_nothing_is_evaluated():
    ends = EpochEnds(make_state(), adds_epochs=True)
    trainer = make_trainer()
    trainer.fit_loop.batch_idx = 5
    assert not ends.epochs_end
    assert not ends.evaluates(trainer)


@pytest.mark.parametrize(
    ("batches", "adds_epochs", "changes", "steps", "max_epochs"),
    [
        # The last one of three: steps were left out, as the trial is not over.
        (SIX, True, {"current_epoch": 2}, 17, 4),
        (SIX, True, {"current_epoch": 1}, 17, 3),
        # An epoch without a step would be followed by others without end.
        (SIX, True, {"current_epoch": 2}, 12, 3),
        (SIX, True, {"current_epoch": 2, "should_stop": True}, 17, 3),
        # A horizon ends the Trainer.
        (SIX, False, {"current_epoch": 2}, 17, 3),
        (ENDLESS, True, {"current_epoch": 2}, 17, 3),
    ],
)
def test_an_epoch_is_added_while_the_trial_lacks_steps(
    batches, adds_epochs, changes, steps, max_epochs
):
    state = make_state(12)
    ends, trainer = begun(batches, False, state, adds_epochs)
    vars(trainer).update(changes, max_epochs=3)
    trainer.fit_loop.max_epochs = 3
    state.steps = steps
    ends.end(trainer)
    assert trainer.fit_loop.max_epochs == max_epochs


def test_each_epoch_has_to_have_steps_of_its_own():
    state = make_state(0)
    ends, trainer = begun(SIX, False, state)
    added = []
    for steps in (5, 10, 10):
        trainer.current_epoch = trainer.max_epochs - 1
        state.steps = steps
        ends.end(trainer)
        added.append(trainer.fit_loop.max_epochs > trainer.max_epochs)
        trainer.max_epochs = trainer.fit_loop.max_epochs
    assert added == [True, True, False]
