"""A workload built from its config: its data once a study, its module once a trial.

Any LightningDataModule and LightningModule will do. A data module may have

* ``train_batches(batch_size, micro_batch_size, seed)``: returns a trial's endless stream of batches, each of exactly
  ``batch_size`` examples, in micro-batches of at most ``micro_batch_size`` (None: in one piece). A stream with an
  attribute ``stream``, a :class:`bstune.trial.batches.index_stream.IndexStream`, lets trials be stopped and continued.
  Such a data module has ``train_size``, known once ``prepare_data()`` has run, and ``validation_size``, numbers of
  examples; its ``setup()`` is put off until the data are used, so that they may stay off the device. Without this
  method the DataLoader of ``train_dataloader()`` is read in other batches, see
  :func:`bstune.trial.batches.loader.rebatch`.
* ``validates_on_test``: True if the target is measured on the published test set.
* ``first_images(count)``: returns the first training images as batches have them, without augmentation.

A module may have

* ``initial_images`` and ``initialise_from(images)``: how many of these images it starts from (0: none), and what takes
  them, without random numbers. Later trials of the same hyperparameters get what it changes in the module's state.
* ``check_batch(batch_size, micro_batch_size)``: raises a ConfigError for sizes that it, or any module inside it, cannot
  be trained with.

Data are set up once a process, with all generators seeded from ``seed``, so that a random split is the same
everywhere. ``teardown`` is not called, and DataLoader workers stay. What a module finds in its Trainer is told in
:mod:`bstune.trial.lightning.trainer`.
"""

import functools
import logging
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from bstune.core.errors import ConfigError, StateError, UserCodeError
from bstune.core.records import TrialProtocol, TrialResult, TrialSpec
from bstune.options import StudyOptions, flatten, option_at, with_option, with_tuned
from bstune.recipe import Recipe, TrialValues
from bstune.system.console import quieten_lightning
from bstune.system.failures import cause, described, in_users_code, optional
from bstune.system.files import Output, is_own, make_inside, remove_own
from bstune.system.processor_wait import processors
from bstune.system.watchdog import waiting_for
from bstune.trial.backend import TrialBackend, chooses_horizons, make_protocol
from bstune.trial.batches.epochs import epoch_length
from bstune.trial.batches.given_batches import GivenBatches, GivenStream
from bstune.trial.batches.half_lives import follow_batch_size
from bstune.trial.batches.loader import loaders_of, not_rebatchable, rebatch
from bstune.trial.checks.given_data import check_taken, taken_note
from bstune.trial.checks.start import depends_on_length
from bstune.trial.devices.device import (
    device_name,
    has_bfloat16,
    processor,
    resolve_device,
    versions,
)
from bstune.trial.devices.distributed import check_devices, count
from bstune.trial.devices.randomness import host_states, set_host_states
from bstune.trial.lightning.installed import (
    LightningDataModule,
    LightningModule,
    Trainer,
    seed_everything,
    sized_len,
)
from bstune.trial.lightning.packages import is_lightning, is_overridden
from bstune.trial.lightning.trainer import check_types, make_trainer, serving, without_monitors
from bstune.trial.loop import Workload, run_trial
from bstune.trial.own_project.override_rate import override_rate
from bstune.trial.own_project.python_recipe import Loaders
from bstune.trial.parts.checkpoint import PlainFiles, Stopped

BATCH_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
logger = logging.getLogger(__name__)


def resolve(options: StudyOptions, recipe: Recipe) -> tuple[StudyOptions, Recipe]:
    """Return options and a recipe with this machine's device and precision in place of ``auto``."""
    check_threads(options)
    device = str(resolve_device(options.device, "device"))
    precision = resolve_precision(options.precision, device)
    options = with_option(with_option(options, "device", device), "precision", precision)
    if precision == "16-mixed" and option_at(options, "workload.module.optimizer.fused"):
        raise ConfigError(
            "precision=16-mixed skips steps whose gradients overflow, after which the momentum of a fused optimizer is "
            "wrong: set workload.module.optimizer.fused=false, or use precision=bf16-mixed"
        )
    return options, recipe.on(device, precision)


def check_threads(options: StudyOptions) -> None:
    """Refuse more threads than this machine has processors."""
    most = processors()
    if options.threads == "auto" or options.threads <= most:
        return
    raise ConfigError(
        f"threads={options.threads}, but this machine has {most} processors: use threads=auto or at "
        f"most threads={most}"
    )


def resolve_precision(precision: str, device: str) -> str:
    """Return the precision: bf16-mixed on CUDA and 32-true elsewhere for ``auto``; refuse one the device lacks."""
    # Lightning would turn 16-mixed on a CPU into bf16 without a word.
    cuda = device.startswith("cuda")
    if precision == "auto":
        return "bf16-mixed" if cuda and has_bfloat16(device) else "32-true"
    kind, _, rest = precision.partition("-")
    if kind == "16" and not cuda:
        raise ConfigError(
            f"precision={precision} needs a CUDA device, but this is {device}: use bf16-{rest} or 32-true"
        )
    if kind == "bf16" and cuda and not has_bfloat16(device):
        raise ConfigError(
            f"precision={precision}: {torch.cuda.get_device_name(device)} has no bfloat16: use 16-{rest} or 32-true"
        )
    return precision


def load(options: StudyOptions, recipe: Recipe) -> tuple[Workload, TrialProtocol]:
    """Return a study's workload and protocol, in a process that trains for another."""
    options, recipe = resolve(options, recipe)
    protocol = checked_protocol(options, recipe)
    return build_workload(options, recipe), protocol


def checked_protocol(options: StudyOptions, recipe: Recipe) -> TrialProtocol:
    """Return the protocol; a Trainer is built to find arguments that it does not take.

    The options' device and precision are resolved.
    """
    check_devices(options)
    protocol = make_protocol(options, recipe)
    check_types(protocol.trainer)
    refused = _refused(protocol.trainer)
    if refused is None:
        return protocol
    # One option after another, to name the one that is refused: it may also be several together.
    own = {name: protocol.trainer[name] for name in ("accelerator", "devices")}
    alone = ((name, _refused({**own, name: value})) for name, value in protocol.trainer.items())
    name, error = next(((name, error) for name, error in alone if error is not None), ("", refused))
    place = f"trainer.{name}" if name else "trainer"
    if in_users_code(error):
        message, frames = described(error)
        raise UserCodeError(f"{place} cannot be used: {message}\n{frames}".rstrip()) from error
    raise ConfigError(f"{place}: {cause(error)}") from error


def _refused(options: Mapping[str, Any]) -> Exception | None:
    """Build a Trainer of the options; tell what it raises."""
    try:
        make_trainer(options)
    except Exception as error:  # noqa: BLE001 (Lightning and the user's call-backs may raise anything)
        return error
    return None


def check_largest(
    largest: int, data: LightningDataModule, option: str = "search.batch_size.high"
) -> None:
    """Refuse a batch size, given by an option, over the data's length."""
    examples = train_examples(data)
    if 0 < examples < largest:
        raise ConfigError(
            f"batch size {largest} is larger than the training data ({examples} examples): "
            f"set {option} to at most {examples}"
        )


def load_data(options: StudyOptions, recipe: Recipe) -> LightningDataModule:
    """Build the data module and let it read its data; one that hands out batches is not yet set up."""
    with seeded(options.seed):
        with waiting_for(f"{recipe.data_name}()"):
            data = recipe.data()
        quieten_lightning()
        if not is_lightning(data, "LightningDataModule"):
            raise ConfigError(
                f"workload.data must build a LightningDataModule, but got {type(data).__name__}"
            )
        with waiting_for(f"{type(data).__name__}.prepare_data()"):
            data.prepare_data()
    if not hasattr(data, "train_batches"):
        _set_up(data, "fit", options.seed)
    return data


def _set_up(data: LightningDataModule, stage: str, seed: int) -> None:
    # Seeded each time: what is split again for another stage is split alike.
    with seeded(seed), waiting_for(f"{type(data).__name__}.setup({stage!r})"):
        data.setup(stage)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed all generators from the study's seed meanwhile: a random split is alike in all processes."""
    before = host_states()
    try:
        seed_everything(seed, workers=False, verbose=False)
        yield
    finally:
        set_host_states(before)


def train_examples(data: Any) -> int:
    """Return how many examples there are to train on; 0 where the user's loaders have no length that says it."""
    if hasattr(data, "train_batches"):
        return int(data.train_size)
    return _examples_if_known(data.train_dataloader())


def build_workload(
    options: StudyOptions, recipe: Recipe, data: LightningDataModule | None = None
) -> Workload:
    """Put the data, from :func:`load_data`, where they are used, and return what trials need."""
    loaded: Any = load_data(options, recipe) if data is None else data
    return _workload_of(options, recipe, loaded)


def _workload_of(options: StudyOptions, recipe: Recipe, data: Any) -> Workload:
    seed = options.seed
    draws_batches = hasattr(data, "train_batches")
    if draws_batches:
        _set_up(data, "fit", seed)
    plain = isinstance(data, Loaders)
    with seeded(seed), waiting_for(f"the loaders of {type(data).__name__}"):
        # Before setup("test"), which may split the data anew, by a generator of its own.
        training = None if draws_batches else data.train_dataloader()
        validation, test, notes = data.val_dataloader(), None, list[str]()
    with optional(
        f"no test metrics, as {type(data).__name__}.setup('test') or test_dataloader() fails", notes
    ):
        _set_up(data, "test", seed)
        with waiting_for(f"{type(data).__name__}.test_dataloader()"):
            test = data.test_dataloader() if is_overridden("test_dataloader", data) else None
    if draws_batches:
        draw = _own_batches(data, options)
    elif recipe.data_at is not None and not_rebatchable(training) is not None:
        check_taken(options)
        draw = _taken_batches(recipe.data_at, seed)
        notes.append(taken_note(training))
    else:
        # Refuses what cannot be read in other batches, before the first trial.
        rebatch(training, count(), None, 0)
        at = recipe.data_at if plain else None
        draw = _read_batches(training, at, options)
    images = _InitialImages(data)
    return Workload(
        build_module=lambda spec: images.give(
            build_module(options, recipe, spec), spec.hyperparameters
        ),
        train_batches=draw,
        validation_batches=validation,
        validation_examples=data.validation_size
        if draws_batches
        else sum(map(_examples, loaders_of(validation))),
        test_batches=None if sized_len(test) == 0 else test,
        train_examples=train_examples(data) if draws_batches else _examples_if_known(training),
        validates_on_test=getattr(data, "validates_on_test", False),
        # Without hooks on batches it is left out: Lightning looks for them at each batch.
        data_module=None
        if plain or (draws_batches and not any(is_overridden(h, data) for h in BATCH_HOOKS))
        else data,
        notes=tuple(notes),
        overrides_lr=options.scaling.override_lr,
        override=recipe.override,
    )


# Gives the batches of a trial.
Draw = Callable[[TrialSpec], Iterable[Any]]


def _own_batches(data: Any, options: StudyOptions) -> Draw:
    """Take the batches of a data module that hands them out itself."""
    size = options.protocol.micro_batch_size
    return lambda spec: data.train_batches(spec.batch_size, size, spec.seed)


def _read_batches(
    training: object, data_at: Callable[[int], Any] | None, options: StudyOptions
) -> Draw:
    """Read a loader in other batches: the one, or that of the trial's own batch size."""
    size = options.protocol.micro_batch_size

    def draw(spec: TrialSpec) -> Iterable[Any]:
        loader = training
        if data_at is not None:
            with seeded(options.seed):
                loader = data_at(spec.batch_size).train_dataloader()
        return rebatch(loader, spec.batch_size, size, spec.seed)

    return draw


def _taken_batches(data_at: Callable[[int], Any], seed: int) -> Draw:
    """Take the batches that the user's loaders give at a batch size, as they come."""

    def open_loaders(batch_size: int) -> Any:
        # As for the data that are evaluated, so that a random split is that one.
        with seeded(seed):
            data = data_at(batch_size)
            data.prepare_data()
        _set_up(data, "fit", seed)
        with seeded(seed):
            return data.train_dataloader()

    def draw(spec: TrialSpec) -> Iterable[Any]:
        opened = functools.partial(open_loaders, spec.batch_size)
        return GivenBatches(GivenStream(opened, spec.batch_size, spec.seed))

    return draw


def build_module(options: StudyOptions, recipe: Recipe, spec: TrialSpec) -> LightningModule:
    """Return a trial's Lightning module, before it sees any data."""
    options = with_tuned(options, spec.hyperparameters)
    total_steps = spec.max_steps or options.budget.budget.last_step(spec.batch_size)
    values = TrialValues(spec.batch_size, spec.lr, spec.seed, total_steps, spec.hyperparameters)
    with waiting_for(f"{recipe.module_name}()"):
        module = recipe.module(values)
    quieten_lightning()
    if not is_lightning(module, "LightningModule"):
        raise ConfigError(
            f"workload.module must build a LightningModule, but got {type(module).__name__}"
        )
    for part in module.modules():
        if hasattr(part, "check_batch"):
            part.check_batch(spec.batch_size, options.protocol.micro_batch_size)  # type: ignore[operator]
    lr = spec.lr if options.scaling.override_lr else None
    half_lives = {
        "beta2_half_life": options.scaling.beta2_half_life,
        "weight_decay_half_life": options.scaling.weight_decay_half_life,
    }
    _configure_with(module, lr, spec.batch_size, half_lives)
    return module


def _configure_with(
    module: LightningModule,
    lr: float | None,
    batch_size: int,
    half_lives: Mapping[str, float | None],
) -> None:
    """Make ``configure_optimizers`` set a rate in place of its own, unless it is None, and apply half-lives.

    What an optimizer or a schedule refuses of its options is named.
    """
    configure = module.configure_optimizers

    @functools.wraps(configure)
    def configured() -> Any:
        try:
            built = configure()
            if lr is not None:
                override_rate(built, module, lr)
            follow_batch_size(built, batch_size, **half_lives)
            return built
        except (TypeError, ValueError) as error:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            raise ConfigError(
                f"workload.module: {type(module).__name__} cannot build its optimizers from these options: {error} "
                f"({type(error).__name__} in {Path(frame.filename).name}, line {frame.lineno})"
            ) from error

    module.configure_optimizers = configured  # type: ignore[method-assign]


class _InitialImages:
    """Hands each trial's module the training images that it starts from, and keeps the state that came of them."""

    def __init__(self, data: LightningDataModule) -> None:
        self._data = data
        self._hyperparameters: Mapping[str, float] | None = (
            None  # of the trial that the state is from
        )
        self._state: dict[str, Tensor] = {}

    def give(
        self, module: LightningModule, hyperparameters: Mapping[str, float]
    ) -> LightningModule:
        wanted = getattr(module, "initial_images", 0) if hasattr(module, "initialise_from") else 0
        if not wanted:
            return module
        if not hasattr(self._data, "first_images"):
            raise ConfigError(
                f"the module starts from {wanted} training images, for its whitening say, but workload.data is "
                f"{type(self._data).__name__}, which has no first_images(count): set "
                "workload.module.model.whitening=null, or use bstune.workloads.images.ImageData"
            )
        if hyperparameters == self._hyperparameters:
            module.load_state_dict(self._state, strict=False)
            return module
        before = {name: value.clone() for name, value in module.state_dict().items()}
        module.initialise_from(self._data.first_images(wanted))  # type: ignore[operator]
        after = module.state_dict()
        self._state = {
            name: v.clone() for name, v in after.items() if not torch.equal(v, before[name])
        }
        self._hyperparameters = hyperparameters  # the last ones alone: a search has many
        return module


def _examples(loader: Any) -> int:
    if _has_length(loader):
        return epoch_length(loader)
    raise ConfigError(
        f"the data module must return a torch DataLoader over a data set with a length, but got {type(loader).__name__}"
    )


def _examples_if_known(loader: Any) -> int:
    return _examples(loader) if _has_length(loader) else 0


def _has_length(loader: Any) -> bool:
    return isinstance(loader, DataLoader) and sized_len(loader.dataset) is not None


def on_device(workload: Workload, module: LightningModule, batch: Any, device: torch.device) -> Any:
    """Return a batch as a Trainer would hand it to the module: moved, and through the hooks on batches."""
    owners = [owner for owner in (workload.data_module, module) if owner is not None]
    for name, more in zip(BATCH_HOOKS, ((), (device,), ()), strict=True):
        owner = next((owner for owner in owners if is_overridden(name, owner)), module)
        batch = getattr(owner, name)(batch, *more, 0)
    return batch


def evaluate(
    workload: Workload,
    module: LightningModule,
    protocol: TrialProtocol,
    checkpoint: Path | None = None,
    **batches: Iterable[Any],
) -> Trainer:
    """Evaluate a module, with a checkpoint's weights, on ``val`` or ``test`` batches, and return its Trainer."""
    trainer = make_trainer(without_monitors(protocol.trainer), module)
    trainer.strategy.checkpoint_io = PlainFiles(trainer, module)  # type: ignore[assignment]
    ((stage, iterable),) = batches.items()
    run = trainer.validate if stage == "val" else trainer.test
    served = (
        None if workload.data_module is None else serving(workload.data_module, None, **batches)
    )
    options: dict[str, Any] = (
        {} if checkpoint is None else {"ckpt_path": checkpoint, "weights_only": True}
    )
    run(
        module,
        dataloaders=iterable if served is None else None,
        datamodule=served,
        verbose=False,
        **options,
    )
    return trainer


class LightningBackend(TrialBackend):
    """Trains each trial with a Lightning Trainer.

    Args:
        options: whose device and precision are resolved.
        recipe: that the workload was built by.
        workload: which trials train.
        protocol: of all of them.
    """

    def __init__(
        self, options: StudyOptions, recipe: Recipe, workload: Workload, protocol: TrialProtocol
    ) -> None:
        self.workload = workload
        self.protocol = protocol
        self._options = options
        largest = options.trial.batch_size or options.search.batch_size.high
        if options.trial.batch_size is None and workload.train_examples:
            largest = min(largest, workload.train_examples)
        self.versions = versions()
        sample = TrialSpec(0, 0, largest, options.scaling.lr, None, 0)
        ends_with_trial = recipe.takes("total_steps")
        self.horizon = ends_with_trial or depends_on_length(workload, sample, protocol)
        self.stops = not self.horizon
        self.validates_on_test = workload.validates_on_test
        self.evaluation_share = protocol.evaluation_schedule.share
        self.train_examples = workload.train_examples or None
        self.notes = workload.notes
        # Where schedules end with the budget, it is part of the workload; a chosen horizon stands in the record.
        budget = flatten({"budget": options.budget.model_dump()})
        if self.stops or chooses_horizons(options):
            budget = {}
        self._frozen = {"precision": options.precision, "compile": options.compile, **budget}
        self.name_device()

    def name_device(self) -> None:
        """Name the device with the threads that torch has now."""
        options = self._options
        is_cpu = options.device == "cpu"
        self.device = device_name(self.protocol.trainer, self.protocol.devices)
        self.device_kind = f"{self.device} of {processor()}" if is_cpu else self.device
        self.description = f"{self.device} in {options.precision}"
        # Several processes share them out.
        is_alone = is_cpu and options.devices == 1
        threads = torch.get_num_threads() if is_alone else None
        self.frozen_settings = {**self._frozen, "device": self.device, "threads": threads}

    def run(
        self, spec: TrialSpec, folder: Output | None, resumed_from: TrialResult | None
    ) -> TrialResult:
        """Train one trial; one whose earlier state is gone, or cannot be used, is trained again from the start.

        Where the user's code refuses the values of this trial alone, its own error is raised: the preflight has passed.
        """
        try:
            return self._run(spec, folder, resumed_from)
        except ConfigError as error:
            first: BaseException = error
            while first.__cause__ is not None:
                first = first.__cause__
            raise first from None

    def _run(
        self, spec: TrialSpec, folder: Output | None, resumed_from: TrialResult | None
    ) -> TrialResult:
        protocol = self.protocol_of(spec)
        checkpoint = None if folder is None else folder.checkpoint(spec.number)
        if self.horizon:
            horizon = spec.max_steps or protocol.last_step(spec.batch_size)
            return replace(
                run_trial(self.workload, spec, protocol, checkpoint, horizon=horizon),
                horizon=horizon,
            )
        if spec.max_steps is None or folder is None:
            return run_trial(self.workload, spec, protocol, checkpoint)
        make_inside(folder.states)
        state = folder.state(spec.number)
        if resumed_from is not None:
            stopped = Stopped(resumed_from, folder.state(resumed_from.number))
            try:
                return run_trial(
                    self.workload, spec, protocol, checkpoint, state=state, resume=stopped
                )
            except StateError as error:
                logger.warning("%s", error)
                remove_own(stopped.state)  # it would be tried again and again
        return run_trial(
            self.workload, replace(spec, resumed_from=None), protocol, checkpoint, state=state
        )

    def protocol_of(self, spec: TrialSpec) -> TrialProtocol:
        """Return a trial's protocol: its hyper-parameters may be the budget."""
        if not spec.hyperparameters:
            return self.protocol
        tuned = with_tuned(self._options, spec.hyperparameters)
        return replace(self.protocol, budget=tuned.budget.budget)

    def test(self, spec: TrialSpec, folder: Output) -> Mapping[str, float]:
        """Return a trial's metrics on the test set, from its checkpoint; empty without such a set or checkpoint."""
        checkpoint = folder.checkpoint(spec.number)
        if self.workload.test_batches is None or not is_own(checkpoint):
            return {}
        module = self.workload.build_module(spec)
        trainer = evaluate(
            self.workload, module, self.protocol, checkpoint, test=self.workload.test_batches
        )
        return {name: float(value) for name, value in trainer.callback_metrics.items()}

    def resumable(self, number: int, folder: Output) -> bool:
        """Return whether the stopped trial's state is there."""
        return is_own(folder.state(number))
