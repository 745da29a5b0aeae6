"""The training state that a stopped trial leaves, and from which another one is resumed.

The file is a checkpoint of Lightning's with three more parts: the states of the random number
generators, the position in the stream of batches, and bstune's own progress. It is loaded as plain
data: nothing in it is executed.
"""

import io
import logging
import pickle
import struct
import zipfile
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
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
from bstune.trial.devices.device import without_threads
from bstune.trial.devices.randomness import GeneratorStates
from bstune.trial.lightning.installed import Callback, LightningModule, Trainer
from bstune.trial.lightning.internals import argument_of_hyper_parameters
from bstune.trial.lightning.packages import of_package, package_of

logger = logging.getLogger(__name__)

# The key of bstune's own part in the checkpoint.
KEY = "bstune"
# The key in it of those values that each process of a trial on several devices has of its own, and
# their names.
OF_RANKS = "ranks"
PER_PROCESS = ("stream", "generators", "epoch", "metrics")
# Hyper-parameters, which are left out: they may hold any object, which plain data cannot. Modules
# and data modules are built anew with theirs.
LEFT_OUT_OF_CHECKPOINTS = (
    "hyper_parameters",
    "hparams_type",
    "datamodule_hyper_parameters",
    "datamodule_hparams_type",
)
# Errors of reading an archive that is damaged.
DAMAGED = (OSError, EOFError, zipfile.BadZipFile, zlib.error, struct.error)
# Errors of reading a state from any file that is not the right one.
UNREADABLE = (
    *DAMAGED,
    RuntimeError,
    LookupError,
    TypeError,
    ValueError,
    pickle.UnpicklingError,
)


@dataclass(frozen=True)
class OwnFile:
    """A Trainer's storage options, by which a checkpoint is known as a file of bstune's own."""

    # The name that the file gets once it is whole.
    path: Path


class PlainFiles:
    """A Trainer's way to write and read checkpoints (its ``checkpoint_io``).

    Bstune's own checkpoints hold weights and plain data alone; all others are left to the Trainer's
    former way. Hyper-parameters, which may hold any object, are left out of bstune's own. When one
    is loaded, it gets those of the module that it is loaded into, which was built alike.
    """

    def __init__(self, trainer: Trainer, module: LightningModule) -> None:
        self._trainer = trainer
        self._module = module
        self._others = trainer.strategy.checkpoint_io

    def __getattr__(self, name: str) -> Any:
        # All other methods, such as remove_checkpoint, are the Trainer's former ones.
        return getattr(self._others, name)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: object = None
    ) -> None:
        """Write a checkpoint; the error of a full disk names the file.

        The ``storage_options`` of a checkpoint of bstune's own are an :class:`OwnFile`.
        """
        if not isinstance(storage_options, OwnFile):
            self._others.save_checkpoint(checkpoint, path, storage_options)
            return
        # Hyper-parameters are left out, as they may be no plain data.
        buffer = io.BytesIO()
        plain = {
            name: value for name, value in checkpoint.items() if name not in LEFT_OUT_OF_CHECKPOINTS
        }
        torch.save(plain, buffer)
        _add_comment(buffer, own_mark(storage_options.path))
        try:
            # It is written in the folder where it is to be: Lightning would write it in the
            # system's temporary folder and move it.
            with create_partial(Path(path)) as file:
                file.write(buffer.getbuffer())
                sync_file(file)
        except OSError as error:
            error.filename = str(storage_options.path)
            raise

    def load_checkpoint(
        self, path: str | Path, map_location: object = "cpu", weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read one of bstune's own files, and add the hyper-parameters, which hooks may look for.

        A ConfigError says that the user's ``on_save_checkpoint`` has added more than plain data.
        """
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
        # Call-backs that write checkpoints go on in this trial's folders.
        _set_own_folders(checkpoint, self._trainer)
        return checkpoint


def _set_own_folders(checkpoint: dict[str, Any], trainer: Trainer) -> None:
    """Put this trial's folders into the states of call-backs that write checkpoints.

    Where the user names no folder, each trial has a folder of its own, and the files of the stopped
    trial are gone. Their paths and scores are left out of the states, so that Lightning saves anew
    and never compares with the score of a lost file.
    """
    model_checkpoint = of_package(package_of(trainer), "callbacks.ModelCheckpoint")
    states = checkpoint.get("callbacks", {})
    for callback in trainer.checkpoint_callbacks:
        state = states.get(callback.state_key, {})
        # The states of other call-backs have other keys.
        if isinstance(callback, model_checkpoint) and "dirpath" in state:
            # Lightning would warn that the folder is another one.
            state["dirpath"] = callback.dirpath
            _leave_out_lost(state, partial(callback.file_exists, trainer=trainer))


def _leave_out_lost(state: dict[str, Any], exists: Callable[[str], bool]) -> None:
    """Leave the paths for which ``exists`` is false, and their scores, out of a state.

    ``state``: that of Lightning's ModelCheckpoint, which is changed in place.
    """
    if not exists(state["best_model_path"]):
        state |= {"best_model_path": "", "best_model_score": None}
    # A call-back whose state lacks these entries keeps its initial values.
    if not exists(state["kth_best_model_path"]):
        del state["kth_best_model_path"], state["kth_value"]
    if not exists(state["last_model_path"]):
        del state["last_model_path"]
    best = state["best_k_models"]
    state["best_k_models"] = {path: score for path, score in best.items() if exists(path)}


def _add_comment(archive: io.BytesIO, comment: bytes) -> None:
    """Add a comment at the end of a ZIP archive that has none."""
    # The last two bytes of the archive are the comment's length.
    archive.seek(-2, io.SEEK_END)
    archive.write(len(comment).to_bytes(2, "little") + comment)


@dataclass(frozen=True)
class Stopped:
    """A stopped trial that can be resumed, and the file with its state."""

    record: TrialResult
    state: Path


@dataclass(frozen=True)
class StoppedState:
    """bstune's own part of a stopped trial's state, from before the trial's last evaluation."""

    number: int
    batch_size: int
    lr: float
    seed: int
    # Optimizer steps applied, those of the trials that it continues included.
    steps: int
    # Further steps, which a gradient scaler has skipped.
    skipped: int
    # How far from the target the trial was before training; None if that was not measured on all
    # validation data.
    start_gap: float | None
    # Whether the trial has been near its target at an evaluation that was due.
    near: bool
    # The step at which the next evaluation is due.
    due_step: int
    # The steps of evaluations that were not due: at an epoch's end, or where the trial stopped.
    forced: tuple[int, ...]
    # The metrics that were logged last. Lightning steps schedules by them after the evaluation.
    metrics: Mapping[str, torch.Tensor]
    # The metrics that the epoch has accumulated so far (bstune.trial.parts.accumulated); empty for
    # an endless epoch.
    epoch: Mapping[str, Any]
    # The position in the stream of batches.
    stream: Position
    # The states of the random generators (bstune.trial.devices.randomness.random_state).
    generators: GeneratorStates
    # The names of frozen parameters, as a call-back may freeze and unfreeze them.
    frozen: tuple[str, ...]
    device: str
    versions: Mapping[str, str]


class StateWriter(Callback):
    """Writes a trial's state at the start of an evaluation, before other call-backs do anything.

    They may replace the weights by an average. The file has a temporary name until :meth:`keep`.

    Args:
        path: of the file.
        stream: of the trial's batches.
        clock: the trial's; writing counts neither as training nor as evaluation.
    """

    def __init__(self, path: Path, stream: Stream, clock: TrialClock) -> None:
        self._path = path
        self._partial = partial_of(path)
        self._stream = stream
        self._clock = clock
        self._state: StoppedState | None = None

    def prepare(self, last: bool) -> None:
        """Let the stream remember its position if the ``last`` step is next."""
        # By the end of that step Lightning has fetched one more batch, and the stream has moved on.
        self._stream.remembers = last

    def position(self, batches: int) -> Position:
        """Give the stream's position after ``batches`` batches."""
        return self._stream.position(batches)

    def take(self, state: StoppedState) -> None:
        """Take the state to be written when the evaluation starts."""
        self._state = state

    def keep(self) -> None:
        """Give the file its name, if it was written and no file of someone else has that name."""
        if self._partial.exists() and distributed.is_first() and may_take(self._path):
            put_in_place(self._partial, self._path)

    def discard(self) -> None:
        """Remove the file, if it was written and not kept."""
        if distributed.is_first():
            self._partial.unlink(missing_ok=True)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the state, if one was taken; the seconds do not count as evaluation."""
        if self._state is not None:
            self._clock.enter(Phase.CLOSING)
            # The trial may have been about to stop at an earlier evaluation, and gone on.
            self.discard()
            own = OwnFile(self._path)
            trainer.save_checkpoint(self._partial, weights_only=False, storage_options=own)
            # Checkpoints that other call-backs write later do not get the state.
            self._state = None
            self._clock.enter(Phase.EVALUATION)

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Add the state to the checkpoint that this writer saves, and nothing to other ones."""
        # A state waits only while this writer saves.
        if self._state is not None:
            checkpoint[KEY] = dict(vars(self._state))
            of_process = {name: checkpoint[KEY][name] for name in PER_PROCESS}
            # The first process alone writes the file: it needs what the others have.
            of_ranks = distributed.gather(of_process)
            if of_ranks is not None:
                checkpoint[KEY][OF_RANKS] = of_ranks


def read_state(
    stopped: Stopped, spec: TrialSpec, device: str, versions: Mapping[str, str]
) -> StoppedState:
    """Read the state that a stopped trial has left.

    Args:
        stopped: the trial and its file.
        spec: of the trial that is to go on from it.
        device: the name of this trial's device, which must be that of the state. A CPU may have
            another number of torch's threads: only the last digits differ, and a warning says so.
        versions: of the packages, which must be those of the state.

    Raises:
        StateError: says why the trial cannot go on from the state.
    """
    try:
        # The archive is checked first: for damaged bytes torch may raise an error of any type.
        with zipfile.ZipFile(stopped.state) as archive:
            damaged = archive.testzip()
        if damaged is not None:
            raise _unreadable(stopped, f"{damaged} in it is damaged")
        checkpoint = torch.load(stopped.state, map_location="cpu", weights_only=True)
        values = checkpoint[KEY]
        of_ranks = values.pop(OF_RANKS, None)
        place = distributed.place()
        # The values are those of the first process, which wrote the file.
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
    is_same_device = without_threads(state.device) == without_threads(device)
    if dict(state.versions) != dict(versions) or not is_same_device:
        written = ", ".join(map(str, (*state.versions.values(), state.device)))
        now = ", ".join((*versions.values(), device))
        raise _unreadable(stopped, f"it was written by {written}, not {now}")
    if state.device != device:
        logger.warning(
            "trial %s goes on from trial %s on %s, not %s: its last digits may differ",
            spec.number,
            record.number,
            device,
            state.device,
        )
    return state


def _reason(error: Exception) -> str:
    """Give the reason in a few words why a file could not be read."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    # torch's advice to load the file all the same is left out.
    if isinstance(error, pickle.UnpicklingError):
        line = str(error).rpartition("WeightsUnpickler error: ")[2].splitlines()[0]
        return f"it holds more than plain data: {line.partition('. Please use')[0]}"
    return f"{type(error).__name__} {error}".splitlines()[0]


def _unreadable(stopped: Stopped, reason: str) -> StateError:
    """Make the error that says why a trial cannot go on from a state."""
    return StateError(
        f"the state of trial {stopped.record.number} at {stopped.state} cannot be read: {reason}; "
        "it starts afresh"
    )
