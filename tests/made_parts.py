"""What the tests of a trial's parts share: a state, what a stopped trial left, and stand-ins for a Trainer."""

from types import SimpleNamespace
from typing import Any

from bstune.trial.parts.checkpoint import StoppedState
from bstune.trial.parts.state import TrialState


def make_state(steps: int = 0, **changes: Any) -> TrialState:
    """The state of a trial after some steps, of 100 in all; ``first_step`` is 0."""
    return TrialState(**{"first_step": 0, "last_step": 100, "steps": steps, **changes})


def make_stopped(steps: int = 20, **changes: Any) -> StoppedState:
    """The state of a trial that was stopped after some steps, when its next evaluation was due at 30."""
    values: dict[str, Any] = {
        "number": 1,
        "batch_size": 4,
        "lr": 0.1,
        "seed": 0,
        "steps": steps,
        "skipped": 0,
        "start_gap": None,
        "near": False,
        "due_step": 30,
        "forced": (),
        "metrics": {},
        "epoch": {},
        "stream": {},
        "generators": {},
        "frozen": (),
        "device": "cpu (1 thread)",
        "versions": {},
    }
    return StoppedState(**values | changes)


def make_trainer(**changes: Any) -> Any:
    """A stand-in for a Trainer that trains one endless epoch, with all that a part may ask; it has taken one batch."""
    # -1: Lightning's word for no limit.
    loop = SimpleNamespace(max_steps=-1, global_step=1, val_loop=SimpleNamespace(restarting=True))
    fit_loop = SimpleNamespace(
        batch_idx=0, epoch_loop=loop, max_epochs=1, restarting=False, _restarting=True
    )
    values: dict[str, Any] = {
        "fit_loop": fit_loop,
        "_logger_connector": SimpleNamespace(_first_loop_iter=None),
        "callback_metrics": {},
        "callbacks": [],
        "current_epoch": 0,
        "max_epochs": 1,
        "max_steps": -1,
        "num_training_batches": 6,
        "optimizers": [],
        "precision_plugin": SimpleNamespace(),
        "sanity_checking": False,
        "should_stop": False,
        "train_dataloader": iter(()),
        "val_check_batch": 1,
    }
    return SimpleNamespace(**values | changes)
