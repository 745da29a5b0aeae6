"""What a trial leaves at its last step, and that no other one leaves anything."""

from types import SimpleNamespace

import pytest
import torch
from made_parts import make_state, make_trainer
from toolbox import TRAINER, make_protocol, make_spec
from torch import nn, tensor

from bstune.trial.parts.cadence import Cadence
from bstune.trial.parts.checkpoint import StoppedState
from bstune.trial.parts.snapshot import Snapshot

SPEC = make_spec(4, 0.1, 7, number=5)
PROTOCOL = make_protocol(trainer=TRAINER)
VERSIONS = {"torch": "2.13.0"}


class Writer:
    """Stands for what writes the file."""

    def __init__(self):
        self.expected = []
        self.taken = []

    def prepare(self, last):
        self.expected.append(last)

    def position(self, batches):
        return {"batches": batches}

    def take(self, state):
        self.taken.append(state)


def take(state, writer, has_epochs=False, metrics=None):
    module = nn.Linear(1, 1)
    module.bias.requires_grad_(False)
    cadence = Cadence(SPEC, PROTOCOL, 10)
    cadence.near = True
    cadence.forced = (3,)
    cadence.due_step = 120
    snapshot = Snapshot(SPEC, PROTOCOL, VERSIONS)
    snapshot.writer = writer
    trainer = make_trainer(callback_metrics=metrics or {})
    trainer.fit_loop.epoch_loop._results = {}
    snapshot.take(state, cadence, 0.8, {"torch": 1}, trainer, module, has_epochs)


def test_it_holds_what_a_trial_goes_on_with():
    writer = Writer()
    loss = tensor(0.5, requires_grad=True)
    take(make_state(100, skipped=2), writer, metrics={"train/loss": loss})
    (state,) = writer.taken
    assert state.metrics["train/loss"].item() == 0.5
    # It is a copy, without a graph.
    assert not state.metrics["train/loss"].requires_grad
    assert state == StoppedState(
        number=5,
        batch_size=4,
        lr=0.1,
        seed=7,
        steps=100,
        skipped=2,
        start_gap=0.8,
        near=True,
        due_step=120,
        forced=(3,),
        metrics=state.metrics,
        epoch={},
        # Skipped steps have taken batches, too.
        stream={"batches": 102},
        generators={"torch": 1},
        frozen=("bias",),
        device=f"cpu ({torch.get_num_threads()} thread{'s' * (torch.get_num_threads() > 1)})",
        versions=VERSIONS,
    )


def test_what_an_epoch_has_accumulated_is_held_where_it_has_an_end():
    writer = Writer()
    take(make_state(100), writer, has_epochs=True)
    assert writer.taken[0].epoch == {"logged": {}, "metrics": {}}


@pytest.mark.parametrize(
    ("steps", "status", "taken"),
    [
        (100, "stopped", 1),
        (101, "stopped", 1),
        (99, "stopped", 0),
        (100, "diverged", 0),
    ],
)
def test_only_a_trial_out_of_steps_leaves_a_state(steps, status, taken):
    writer = Writer()
    take(make_state(steps, status=status), writer)
    assert len(writer.taken) == taken


def test_without_a_file_nothing_is_asked_of_anything():
    snapshot = Snapshot(SPEC, PROTOCOL, VERSIONS)
    snapshot.prepare_if_last_step_is_next(make_state(99))
    nothing = SimpleNamespace()
    snapshot.take(make_state(100), nothing, None, {}, nothing, nothing, has_epochs=True)


@pytest.mark.parametrize(("steps", "is_last"), [(98, False), (99, True), (100, True)])
def test_the_stream_remembers_where_the_last_step_begins(steps, is_last):
    snapshot = Snapshot(SPEC, PROTOCOL, VERSIONS)
    snapshot.writer = Writer()
    snapshot.prepare_if_last_step_is_next(make_state(steps))
    assert snapshot.writer.expected == [is_last]
