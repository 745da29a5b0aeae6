"""The trial's own call-backs stand at both ends of a Trainer's."""

import pytest
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from made_parts import make_trainer

from bstune.core.errors import ConfigError
from bstune.trial.parts.callback_order import order_callbacks

FIRST, LAST, A, B = (Callback() for _ in range(4))


@pytest.mark.parametrize(
    ("callbacks", "first", "expected"),
    [
        ([LAST], None, [LAST]),
        ([A, LAST, B], None, [A, B, LAST]),
        ([LAST, A, B], FIRST, [FIRST, A, B, LAST]),
    ],
)
def test_others_keep_their_order(callbacks, first, expected):
    trainer = make_trainer(callbacks=callbacks)
    order_callbacks(trainer, LightningModule(), first, LAST)
    assert trainer.callbacks == expected


def test_steps_of_several_batches_are_refused():
    # A step of four batches is not of the trial's batch size.
    trainer = make_trainer(callbacks=[A, GradientAccumulationScheduler({0: 4}), LAST])
    with pytest.raises(ConfigError, match="makes steps of several batches"):
        order_callbacks(trainer, LightningModule(), None, LAST)
