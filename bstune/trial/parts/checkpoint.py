"""The training state that a stopped trial leaves, and from which another one is resumed.

The file is Lightning's own checkpoint with what Lightning leaves out: the random number generators,
the position in the stream of batches, and bstune's own progress. It is loaded as plain data:
nothing in it is executed.
"""

import io
import pickle
import struct
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bstune.core.clock import Phase, TrialClock
from bstune.core.errors import ConfigError, StateError
from bstune.core.records import TrialResult, TrialSpec
from bstune.system.files import (
    create_partial,
    may_take,
    own_mark,
    partial_of,
    put_in_place,
    sync_file,
)
from bstune.trial.batches.index_stream import Position, Stream
from bstune.trial.devices import distributed
from bstune.trial.devices.randomness import GeneratorStates
from bstune.trial.lightning.installed import Callback, LightningModule, Trainer
from bstune.trial.lightning.internals import argument_of_hyper_parameters

KEY = "bstune"
# Of a trial on several devices what differs from process to process, by rank.
OF_RANKS = "ranks"
DIFFERS = ("stream", "generators", "epoch", "metrics")
# Of modules and data modules, which are built anew: they may hold any object, and none of these
# loads as plain data.
UNUSED = (
    "hyper_parameters",
    "hparams_type",
    "datamodule_hyper_parameters",
    "datamodule_hparams_type",
)
# Errors of reading an archive that is damaged.
DAMAGED = (OSError, EOFError, zipfile.BadZipFile, zlib.error, struct.error)
# Errors of reading a state from one that is not, but is none or another one's.
UNREADABLE = (
    *DAMAGED,
    RuntimeError,
    LookupError,
    TypeError,
    ValueError,
    pickle.UnpicklingError,
)


@dataclass(frozen=True)
class Own:
    """The storage options that mark a file of bstune's own."""

    # The name that it gets once it is whole.
    path: Path


class PlainFiles:
    """A Trainer's checkpoints: bstune's own hold weights and plain data alone.

    All others are left as they are. Hyper-parameters may hold any object, so they are left out of
    bstune's own; what loads one gets those of the module that it is loaded into, which was built
    alike.
    """

    def __init__(self, trainer: Trainer, module: LightningModule) -> None:
        self._trainer = trainer
        self._module = module
        self._others = trainer.strategy.checkpoint_io

    def __getattr__(self, name: str) -> Any:
        return getattr(self._others, name)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: object = None
    ) -> None:
        """Write the file; the error of a full disk says which."""
        if not isinstance(storage_options, Own):
            self._others.save_checkpoint(checkpoint, path, storage_options)
            return
        buffer = io.BytesIO()
        kept = {name: value for name, value in checkpoint.items() if name not in UNUSED}
        torch.save(kept, buffer)
        _add_comment(buffer, own_mark(storage_options.path))
        try:
            # In place: Lightning would write it in the system's temporary folder and move it.
            with create_partial(Path(path)) as file:
                file.write(buffer.getbuffer())
                sync_file(file)
        except OSError as error:
            error.filename = str(storage_options.path)
            raise

    def load_checkpoint(
        self, path: str | Path, map_location: object = "cpu", weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read one of bstune's own files, and add what the user's hooks on loading expect in it."""
        try:
            checkpoint: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            raise ConfigError(
                f"{path} cannot be loaded: {_reason(error)}: let on_save_checkpoint add numbers, "
                "texts, tensors, and lists and dicts of them alone"
            ) from error
        for owner in (self._trainer.datamodule, self._module):  # type: ignore[attr-defined]
            if owner is None or not owner.hparams:
                continue
            checkpoint[owner.CHECKPOINT_HYPER_PARAMS_KEY] = owner.hparams
            checkpoint[owner.CHECKPOINT_HYPER_PARAMS_TYPE] = type(owner.hparams)
            checkpoint |= argument_of_hyper_parameters(owner)
        return checkpoint


def _add_comment(archive: io.BytesIO, comment: bytes) -> None:
    """Let a ZIP archive that has no comment end with one."""
    # Its last two bytes are the comment's length.
    archive.seek(-2, io.SEEK_END)
    archive.write(len(comment).to_bytes(2, "little") + comment)


@dataclass(frozen=True)
class Stopped:
    """A stopped trial that can be resumed, and the file with its state."""

    record: TrialResult
    state: Path


@dataclass(frozen=True)
class StoppedState:
    """bstune's own part of what a stopped trial leaves.

    It is from before the evaluation that ends the trial.
    """

    number: int
    batch_size: int
    lr: float
    seed: int
    # Optimizer steps applied, from the first of the chain.
    steps: int
    # Steps that a gradient scaler skipped, which are not among them.
    skipped: int
    # Of the target before training; None if it was not measured on all validation data.
    start_gap: float | None
    # Whether the target has been near at one of the evaluations that were due.
    near: bool
    # Of the next evaluation.
    due_step: int
    # Steps evaluated though not due: at an epoch's end, or where it was stopped.
    forced: tuple[int, ...]
    # Logged last; Lightning steps schedules on them only after the evaluation.
    metrics: Mapping[str, torch.Tensor]
    # What it has accumulated so far (bstune.trial.parts.accumulated); empty where it has no end.
    epoch: Mapping[str, Any]
    # A position of bstune.trial.batches.index_stream.IndexStream.
    stream: Position
    # Of bstune.trial.devices.randomness.random_state.
    generators: GeneratorStates
    # Parameters without a gradient, as a call-back may freeze and unfreeze them.
    frozen: tuple[str, ...]
    device: str
    versions: Mapping[str, str]


class StateWriter(Callback):
    """Writes a trial's state ahead of what other call-backs do for an evaluation.

    They may average the weights.
    """

    def __init__(self, path: Path, stream: Stream, clock: TrialClock) -> None:
        self._path = path
        self._partial = partial_of(path)
        self._stream = stream
        self._clock = clock
        self._state: StoppedState | None = None

    def prepare(self, last: bool) -> None:
        """Remember the stream's position if the ``last`` step is next."""
        # Lightning fetches one batch ahead meanwhile.
        self._stream.remembers = last

    def position(self, batches: int) -> Position:
        """Give the stream's position after ``batches`` batches."""
        return self._stream.position(batches)

    def take(self, state: StoppedState) -> None:
        """Take a state, which is written when the evaluation starts."""
        self._state = state

    def keep(self) -> None:
        """Give the file its name, if it was written and no other's file has the name."""
        if self._partial.exists() and distributed.is_first() and may_take(self._path):
            put_in_place(self._partial, self._path)

    def discard(self) -> None:
        """Remove what was written and not kept."""
        if distributed.is_first():
            self._partial.unlink(missing_ok=True)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the state, if one is taken; its seconds are no evaluation's."""
        if self._state is not None:
            self._clock.enter(Phase.CLOSING)
            # One of an earlier step.
            self.discard()
            own = Own(self._path)
            trainer.save_checkpoint(self._partial, weights_only=False, storage_options=own)
            # Other call-backs write checkpoints too, which do not have it.
            self._state = None
            self._clock.enter(Phase.EVALUATION)

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Add the state to Lightning's checkpoint."""
        if self._state is not None:
            checkpoint[KEY] = dict(vars(self._state))
            of_ranks = distributed.gather({name: checkpoint[KEY][name] for name in DIFFERS})
            if of_ranks is not None:
                checkpoint[KEY][OF_RANKS] = of_ranks


def read_state(
    stopped: Stopped, spec: TrialSpec, device: str, versions: Mapping[str, str]
) -> StoppedState:
    """Read the state that a trial left.

    A StateError says why ``spec`` cannot be resumed from it on this device.
    """
    try:
        # First that all bytes are as they were written: from others torch makes any error.
        with zipfile.ZipFile(stopped.state) as archive:
            damaged = archive.testzip()
        if damaged is not None:
            raise _unreadable(stopped, f"{damaged} in it is damaged")
        checkpoint = torch.load(stopped.state, map_location="cpu", weights_only=True)
        values = checkpoint[KEY]
        of_ranks = values.pop(OF_RANKS, None)
        place = distributed.place()
        # The first process wrote its own among those that are alike in all.
        if place is not None:
            values |= of_ranks[place.rank]
        state = StoppedState(**values)
    except UNREADABLE as error:
        raise _unreadable(stopped, _reason(error)) from error
    record = stopped.record
    expected = (record.number, spec.batch_size, spec.lr, spec.seed, record.steps)
    stored = (state.number, state.batch_size, state.lr, state.seed, state.steps)
    if stored != expected:
        raise _unreadable(
            stopped, f"its number, batch size, lr, seed and steps are {stored}, not {expected}"
        )
    if dict(state.versions) != dict(versions) or state.device != device:
        written = ", ".join(map(str, (*state.versions.values(), state.device)))
        now = ", ".join((*versions.values(), device))
        raise _unreadable(stopped, f"it was written by {written}, not {now}")
    return state


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    # torch's advice on loading it all the same is left out.
    if isinstance(error, pickle.UnpicklingError):
        line = str(error).rpartition("WeightsUnpickler error: ")[2].splitlines()[0]
        return f"it holds more than plain data: {line.partition('. Please use')[0]}"
    return f"{type(error).__name__} {error}".splitlines()[0]


def _unreadable(stopped: Stopped, reason: str) -> StateError:
    return StateError(
        f"the state of trial {stopped.record.number} at {stopped.state} cannot be read: {reason}; "
        "it starts afresh"
    )
