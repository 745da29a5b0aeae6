"""A workload built from its config: its data once per study, its module once per trial.

Any LightningDataModule and LightningModule will do. A data module may have

* ``train_batches(batch_size, micro_batch_size, seed)``: returns a trial's endless stream of
  batches, each of exactly ``batch_size`` examples, in micro-batches of at most ``micro_batch_size``
  (None: in one piece). A stream with an attribute ``stream``, a
  :class:`bstune.trial.batches.index_stream.IndexStream`, lets trials be stopped and continued. Such
  a data module has ``train_size``, known once ``prepare_data()`` has run, and ``validation_size``,
  numbers of examples; its ``setup()`` is put off until the data are used, so that they may stay off
  the device. Without this method the DataLoader of ``train_dataloader()`` is read in other batches,
  see :func:`bstune.trial.batches.loader.rebatch`.
* ``validates_on_test``: True if the target is measured on the published test set.
* ``first_images(count)``: returns the first training images as batches have them, without
  augmentation.

A module may have

* ``initial_images`` and ``initialise_from(images)``: the number of first images that the module
  starts from (0: none), and the method that takes them and draws no random numbers. Later trials
  with the same hyperparameters get the state that it has set without another call.
* ``check_batch(batch_size, micro_batch_size)``: raises a ConfigError for sizes that it, or any
  module inside it, cannot be trained with.

Data are set up once per process, with all generators seeded from ``seed``, so that a random split
is the same everywhere. ``teardown`` is not called, and DataLoader workers stay.
:mod:`bstune.trial.lightning.trainer` describes the Trainer that a module gets.
"""

import functools
import logging
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Protocol, TypeGuard, runtime_checkable

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from bstune.core.errors import ConfigError, StateError, UserCodeError
from bstune.core.records import TrialProtocol, TrialResult, TrialSpec
from bstune.options import StudyOptions, flatten, option_at, with_option, with_tuned
from bstune.options.workload import NO_DATA_MODULE
from bstune.recipe import Recipe, TrialValues
from bstune.system.console import quieten_lightning
from bstune.system.failures import cause, described, in_users_code, optional
from bstune.system.files import Output, is_own, make_inside, remove_own
from bstune.system.processor_wait import processors
from bstune.system.watchdog import waiting_for
from bstune.trial.backend import TrialBackend, chooses_horizons, make_protocol
from bstune.trial.batches.counted_stream import CountedStream, has_no_length
from bstune.trial.batches.epochs import epoch_length
from bstune.trial.batches.given_batches import GivenBatches, GivenStream
from bstune.trial.batches.half_lives import follow_batch_size
from bstune.trial.batches.loader import loaders_of, not_rebatchable, rebatch
from bstune.trial.checks.given_data import note_on_given_batches, refuse_options_that_cut_batches
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
from bstune.trial.lightning.trainer import (
    BATCH_HOOKS,
    check_arguments,
    make_trainer,
    serving,
    without_recording_or_stopping,
)
from bstune.trial.loop import Workload, run_trial
from bstune.trial.own_project.override_rate import override_rate
from bstune.trial.own_project.python_recipe import Loaders
from bstune.trial.parts.checkpoint import PlainFiles, Stopped

# Opens the training batches of a trial.
OpenBatches = Callable[[TrialSpec], Iterable[Any]]
# Builds the user's data module for a batch size.
OpenData = Callable[[int], LightningDataModule]
# A trial of fewer steps may end within a schedule's warm-up, or so soon after it that hardly any
# rate differs.
TELLING_STEPS = 50
logger = logging.getLogger(__name__)


class BatchData(LightningDataModule):
    """A data module that hands out batches of any size itself.

    Any data module with a method ``train_batches`` is taken for one. The sizes, in examples, are
    known once ``prepare_data()`` has run.
    """

    train_size: int
    validation_size: int

    def train_batches(
        self, batch_size: int, micro_batch_size: int | None, seed: int
    ) -> Iterable[Any]:
        """Yield batches of exactly ``batch_size`` examples, without end.

        Each comes in micro-batches of at most ``micro_batch_size`` examples; None: in one piece.
        """
        raise NotImplementedError


def hands_out_batches(data: LightningDataModule) -> TypeGuard[BatchData]:
    """Whether a data module hands out batches itself: one that has ``train_batches`` does."""
    return hasattr(data, "train_batches")


@runtime_checkable
class ChecksBatches(Protocol):
    """A module, or a part of one, that refuses batch sizes that it cannot be trained with."""

    def check_batch(self, batch_size: int, micro_batch_size: int | None) -> None:
        """Raise a ConfigError for sizes that it cannot be trained with."""


def resolve(options: StudyOptions, recipe: Recipe) -> tuple[StudyOptions, Recipe]:
    """Replace ``auto`` by this machine's device and precision, in the options and the recipe.

    A ConfigError refuses a device, a precision or a number of threads that the machine lacks.
    """
    check_threads(options)
    device = str(resolve_device(options.device, "device"))
    precision = resolve_precision(options.precision, device)
    options = with_option(with_option(options, "device", device), "precision", precision)
    if precision == "16-mixed" and option_at(options, "workload.module.optimizer.fused"):
        raise ConfigError(
            "precision=16-mixed skips steps whose gradients overflow, after which the momentum of "
            "a fused optimizer is wrong: set workload.module.optimizer.fused=false, or use "
            "precision=bf16-mixed"
        )
    return options, recipe.on(device, precision)


def check_threads(options: StudyOptions) -> None:
    """Raise a ConfigError for more threads than this machine has processors."""
    most = processors()
    if options.threads == "auto" or options.threads <= most:
        return
    raise ConfigError(
        f"threads={options.threads}, but this machine has {most} processors: use threads=auto or "
        f"at most threads={most}"
    )


def resolve_precision(precision: str, device: str) -> str:
    """Give the precision to train in: bf16-mixed on CUDA and 32-true elsewhere for ``auto``.

    On a GPU without bfloat16 ``auto`` is 32-true. A ConfigError refuses a precision that the device
    lacks.
    """
    cuda = device.startswith("cuda")
    if precision == "auto":
        return "bf16-mixed" if cuda and has_bfloat16(device) else "32-true"
    kind, _, rest = precision.partition("-")
    # Lightning would turn 16-mixed on a CPU into bf16 without a word.
    if kind == "16" and not cuda:
        raise ConfigError(
            f"precision={precision} needs a CUDA device, but this is {device}: use bf16-{rest} or "
            "32-true"
        )
    if kind == "bf16" and cuda and not has_bfloat16(device):
        raise ConfigError(
            f"precision={precision}: {torch.cuda.get_device_name(device)} has no bfloat16: use "
            f"16-{rest} or 32-true"
        )
    return precision


def load_workload(options: StudyOptions, recipe: Recipe) -> tuple[Workload, TrialProtocol]:
    """Load a study's workload and protocol anew, for a process that trains the study's trials."""
    options, recipe = resolve(options, recipe)
    protocol = checked_protocol(options, recipe)
    return build_workload(options, recipe), protocol


def checked_protocol(options: StudyOptions, recipe: Recipe) -> TrialProtocol:
    """Make the protocol, and try whether a Trainer takes its arguments.

    Args:
        options: whose device and precision are resolved.
        recipe: builds the user's arguments of the Trainer.

    Raises:
        ConfigError: names the argument that a Trainer refuses.
        UserCodeError: for one that an error in the user's code refuses.
    """
    check_devices(options)
    protocol = make_protocol(options, recipe)
    check_arguments(protocol.trainer)
    error = _error_of_trainer(protocol.trainer)
    if error is None:
        return protocol
    # Each argument is tried alone, to name the one that is refused. Where none is refused alone,
    # several are together.
    refused_option = "trainer"
    device = {key: protocol.trainer[key] for key in ("accelerator", "devices")}
    for name, value in protocol.trainer.items():
        error_alone = _error_of_trainer({**device, name: value})
        if error_alone is not None:
            refused_option = f"trainer.{name}"
            error = error_alone
            break
    if in_users_code(error):
        message, frames = described(error)
        raise UserCodeError(
            f"{refused_option} cannot be used: {message}\n{frames}".rstrip()
        ) from error
    raise ConfigError(f"{refused_option}: {cause(error)}") from error


def _error_of_trainer(arguments: Mapping[str, Any]) -> Exception | None:
    """Build a Trainer with these arguments, and give the error that it raises; None if none."""
    try:
        make_trainer(arguments)
    # Lightning and the user's call-backs may raise anything.
    except Exception as error:  # noqa: BLE001
        return error
    return None


def check_largest(largest: int, examples: int, option: str = "search.batch_size.high") -> None:
    """Raise a ConfigError for a batch size, set by ``option``, of more examples than the data.

    ``examples``: of the training data; 0: not known, so that nothing is refused.
    """
    if 0 < examples < largest:
        raise ConfigError(
            f"batch size {largest} is larger than the training data ({examples} examples): "
            f"set {option} to at most {examples}"
        )


def load_data(options: StudyOptions, recipe: Recipe) -> LightningDataModule:
    """Build the user's data module, prepare its data and set it up.

    One that hands out batches is not set up yet, so that its data may stay off the device. A
    ConfigError refuses an object that is no data module.
    """
    with seeded(options.seed):
        with waiting_for(f"{recipe.data_name}()"):
            data = recipe.data()
        # The user's code may just have imported Lightning, which sets its log level.
        quieten_lightning()
        if not is_lightning(data, "LightningDataModule"):
            built = type(data).__name__
            raise ConfigError(f"workload.data: {NO_DATA_MODULE.format(got=built)}")
        with waiting_for(f"{type(data).__name__}.prepare_data()"):
            data.prepare_data()
    if not hands_out_batches(data):
        _set_up(data, "fit", options.seed)
    return data


def _set_up(data: LightningDataModule, stage: Literal["fit", "test"], seed: int) -> None:
    """Call the data module's ``setup``, with all generators seeded from the study's seed.

    They are seeded each time, so that data which are split again for another stage are split alike.
    """
    with seeded(seed), waiting_for(f"{type(data).__name__}.setup({stage!r})"):
        data.setup(stage)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Within the context, all random number generators are seeded from the study's seed.

    A random split is then the same in each process. Afterwards the generators are as before.
    """
    states = host_states()
    try:
        seed_everything(seed, workers=False, verbose=False)
        yield
    finally:
        set_host_states(states)


def train_examples(data: LightningDataModule) -> int:
    """Give the number of training examples; 0 where the user's loaders have no length."""
    # A data module that hands out batches itself says how many examples it has.
    if hands_out_batches(data):
        return int(data.train_size)
    return _examples_if_known(data.train_dataloader())


def build_workload(
    options: StudyOptions, recipe: Recipe, data: LightningDataModule | None = None
) -> Workload:
    """Build what trials train, and open the data that they are evaluated on.

    Args:
        options: whose device and precision are resolved.
        recipe: builds the user's modules and data.
        data: from :func:`load_data`; None: they are loaded here.
    """
    if data is None:
        data = load_data(options, recipe)
    notes = list(recipe.notes)
    # A data module may hand out batches of any size itself. Only such a one is not set up yet, to
    # keep its data off the device until now.
    if hands_out_batches(data):
        _set_up(data, "fit", options.seed)
    # The loaders are opened before setup("test"), in which the user's code may split the data anew
    # by a random generator that bstune does not seed.
    training, validation = _open_loaders(data, options.seed)
    test = _open_test_loader(data, options.seed, notes)
    if hands_out_batches(data):
        open_batches = _batches_of_data_module(data, options)
        examples = int(data.train_size)
        validation_examples = data.validation_size
    else:
        is_plain = isinstance(data, Loaders)
        open_batches = _batches_of_loaders(training, is_plain, options, recipe, notes)
        examples = _examples_if_known(training)
        validation_examples = sum(map(_examples, loaders_of(validation)))
    # Some modules start from training images, as one whose first layer whitens them.
    images = _InitialImages(data)

    def build(spec: TrialSpec) -> LightningModule:
        return images.give(build_module(options, recipe, spec), spec.hyperparameters)

    return Workload(
        build_module=build,
        train_batches=open_batches,
        validation_batches=validation,
        validation_examples=validation_examples,
        test_batches=None if sized_len(test) == 0 else test,
        train_examples=examples,
        validates_on_test=getattr(data, "validates_on_test", False),
        data_module=data if _has_hooks(data) else None,
        notes=tuple(notes),
        overrides_lr=options.scaling.override_lr,
        override=recipe.override,
    )


def _open_loaders(data: LightningDataModule, seed: int) -> tuple[object, Any]:
    """Open a data module's loaders; ``seed`` is the study's.

    Returns:
        The training loaders (None where the data module hands out batches itself), and the
        validation loaders. A validation stream without a length is read once, to count it.
    """
    name = type(data).__name__
    training: object = None
    with seeded(seed), waiting_for(f"the loaders of {name}"):
        if not hands_out_batches(data):
            training = data.train_dataloader()
        validation: Any = data.val_dataloader()
    # A data module that hands out batches says how many examples it has.
    if not hands_out_batches(data) and has_no_length(validation):
        with seeded(seed), waiting_for(f"the end of {name}'s validation data, a stream"):
            validation = CountedStream(validation)
    return training, validation


def _open_test_loader(
    data: LightningDataModule, seed: int, notes: list[str]
) -> Iterable[Any] | None:
    """Open a data module's test loader; None where it has none.

    An error of the user's code there becomes a line in ``notes``. ``seed`` is the study's.
    """
    test: Iterable[Any] | None = None
    name = type(data).__name__
    with optional(f"no test metrics, as {name}.setup('test') or test_dataloader() fails", notes):
        _set_up(data, "test", seed)
        with waiting_for(f"{name}.test_dataloader()"):
            if is_overridden("test_dataloader", data):
                test = data.test_dataloader()
    return test


def _has_hooks(data: LightningDataModule) -> bool:
    """Whether a Trainer needs the data module itself, besides its batches, to call its hooks.

    A data module without hooks on batches is left out, as Lightning looks for them at each batch.
    """
    if isinstance(data, Loaders):
        return False
    if hands_out_batches(data):
        return any(is_overridden(hook, data) for hook in BATCH_HOOKS)
    return True


def _batches_of_data_module(data: BatchData, options: StudyOptions) -> OpenBatches:
    """Make the function that gives a trial its batches: those the data module hands out itself."""
    micro_batch_size = options.protocol.micro_batch_size
    return lambda spec: data.train_batches(spec.batch_size, micro_batch_size, spec.seed)


def _batches_of_loaders(
    training: object, is_plain: bool, options: StudyOptions, recipe: Recipe, notes: list[str]
) -> OpenBatches:
    """Make the function that gives a trial its batches from the user's loaders.

    The loaders' data are put together in the trial's batch size. Loaders whose data cannot be are
    opened at that size, and their batches are taken as they come.

    Args:
        training: the loader or loaders.
        is_plain: whether the user gave loaders, and no data module.
        options: of the study.
        recipe: builds the user's loaders.
        notes: gets a line about what is assumed of batches that are taken as they come.

    Raises:
        ConfigError: where the loaders can be used in neither way.
    """
    # ``data_at`` opens the user's data at a batch size; None: they are no function of it.
    if recipe.data_at is not None and not_rebatchable(training) is not None:
        refuse_options_that_cut_batches(options)
        notes.append(note_on_given_batches(training))
        return _batches_as_given(recipe.data_at, options.seed)
    # Refuses a loader that cannot be read in other batches, before the first trial. It is tried in
    # the smallest batch, which has an example for each process of a trial.
    processes = count()
    rebatch(training, batch_size=processes, micro_batch_size=None, seed=0)
    # Plain loaders that a function of the batch size makes are made anew for each trial. A data
    # module's loader serves all of them.
    data_at = recipe.data_at if is_plain else None
    return _batches_in_other_sizes(training, data_at, options)


def _batches_in_other_sizes(
    training: object, data_at: OpenData | None, options: StudyOptions
) -> OpenBatches:
    """Make the function that gives a trial its batches: a loader's data in its own batch size.

    Args:
        training: the loader.
        data_at: opens data anew at each trial's batch size, whose loader is read instead; None: the
            one loader serves all trials.
        options: of the study.
    """
    micro_batch_size = options.protocol.micro_batch_size

    def open_batches(spec: TrialSpec) -> Iterable[Any]:
        loader = training
        if data_at is not None:
            with seeded(options.seed):
                loader = data_at(spec.batch_size).train_dataloader()
        return rebatch(loader, spec.batch_size, micro_batch_size, spec.seed)

    return open_batches


def _batches_as_given(data_at: OpenData, seed: int) -> OpenBatches:
    """Make the function that gives a trial its batches: those of the user's loaders, as they come.

    The loaders are opened at the trial's batch size. ``seed`` is the study's.
    """

    def open_loaders(batch_size: int) -> object:
        # The generators are seeded as for the data that are evaluated, so that a random split is
        # the same one.
        with seeded(seed):
            data = data_at(batch_size)
            data.prepare_data()
        _set_up(data, "fit", seed)
        with seeded(seed):
            return data.train_dataloader()

    def open_batches(spec: TrialSpec) -> Iterable[Any]:
        open_at = functools.partial(open_loaders, spec.batch_size)
        return GivenBatches(GivenStream(open_at, spec.batch_size, spec.seed))

    return open_batches


def build_module(options: StudyOptions, recipe: Recipe, spec: TrialSpec) -> LightningModule:
    """Build a trial's Lightning module, before it sees any data.

    A ConfigError refuses an object that is no module, and batch sizes that the module refuses.
    """
    options = with_tuned(options, spec.hyperparameters)
    # The steps that the module's schedule may end with.
    total_steps = spec.max_steps or options.budget.budget.last_step(spec.batch_size)
    values = TrialValues(
        batch_size=spec.batch_size,
        lr=spec.lr,
        seed=spec.seed,
        total_steps=total_steps,
        hyperparameters=spec.hyperparameters,
    )
    with waiting_for(f"{recipe.module_name}()"):
        module = recipe.module(values)
    # The user's code may just have imported Lightning, which sets its log level.
    quieten_lightning()
    if not is_lightning(module, "LightningModule"):
        raise ConfigError(
            f"workload.module must build a LightningModule, but got {type(module).__name__}"
        )
    for part in module.modules():
        if isinstance(part, ChecksBatches):
            part.check_batch(spec.batch_size, options.protocol.micro_batch_size)
    lr = spec.lr if options.scaling.override_lr else None
    half_lives = {
        "beta2_half_life": options.scaling.beta2_half_life,
        "weight_decay_half_life": options.scaling.weight_decay_half_life,
    }
    _adjust_optimizers(module, lr, spec.batch_size, half_lives)
    return module


def _adjust_optimizers(
    module: LightningModule,
    lr: float | None,
    batch_size: int,
    half_lives: Mapping[str, float | None],
) -> None:
    """Let the module's ``configure_optimizers`` build optimizers with bstune's rate and half-lives.

    An error of an optimizer or a schedule about its options becomes a ConfigError that names it.

    Args:
        module: whose method is replaced.
        lr: the learning rate to set; None: the module's own stays.
        batch_size: of the trial, at which half-lives in examples become decays per step.
        half_lives: in examples, by the names of arguments of
            :func:`bstune.trial.batches.half_lives.follow_batch_size`; None: what it sets stays.
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
                f"workload.module: {type(module).__name__} cannot build its optimizers from these "
                f"options: {error} ({type(error).__name__} in {Path(frame.filename).name}, line "
                f"{frame.lineno})"
            ) from error

    module.configure_optimizers = configured  # type: ignore[method-assign]


class _InitialImages:
    """Hands each trial's module the training images that it starts from.

    The state that the module makes of them is kept for later trials with the same hyperparameters.
    """

    def __init__(self, data: LightningDataModule) -> None:
        self._data = data
        # The state and the hyperparameters of one trial alone, the latest: a search has many.
        self._hyperparameters: Mapping[str, float] | None = None
        self._state: dict[str, Tensor] = {}

    def give(
        self, module: LightningModule, hyperparameters: Mapping[str, float]
    ) -> LightningModule:
        """Initialise the module from the first training images if it asks for them, and return it.

        A ConfigError says that the data have no images to start from.
        """
        wanted = 0
        if hasattr(module, "initialise_from"):
            wanted = getattr(module, "initial_images", 0)
        if not wanted:
            return module
        if not hasattr(self._data, "first_images"):
            raise ConfigError(
                f"the module starts from {wanted} training images, for its whitening say, but "
                f"workload.data is {type(self._data).__name__}, which has no first_images(count): "
                "set workload.module.model.whitening=null, or use bstune.workloads.images.ImageData"
            )
        # A module with the same hyperparameters has the same layers, and the images give them the
        # same values as before.
        if hyperparameters == self._hyperparameters:
            module.load_state_dict(self._state, strict=False)
            return module
        former_state = {name: value.clone() for name, value in module.state_dict().items()}
        module.initialise_from(self._data.first_images(wanted))  # type: ignore[operator]
        # Only what the images have changed is kept: all else comes from the trial's own seed.
        self._state.clear()
        for name, value in module.state_dict().items():
            if not torch.equal(value, former_state[name]):
                self._state[name] = value.clone()
        self._hyperparameters = hyperparameters
        return module


def _examples(loader: object) -> int:
    """Give the examples that one pass over a loader gives; a ConfigError where it has no length."""
    if isinstance(loader, CountedStream):
        return loader.examples
    if _has_length(loader):
        return epoch_length(loader)
    raise ConfigError(
        "the data module must return a torch DataLoader over a data set with a length, but got "
        f"{type(loader).__name__}"
    )


def _examples_if_known(loader: object) -> int:
    """Give the examples that one pass over a loader gives; 0 where it has no length."""
    return _examples(loader) if _has_length(loader) else 0


def _has_length(loader: object) -> "TypeGuard[DataLoader[object]]":
    """Whether it is torch's DataLoader, over a data set with a length."""
    return isinstance(loader, DataLoader) and sized_len(loader.dataset) is not None


def on_device(workload: Workload, module: LightningModule, batch: Any, device: torch.device) -> Any:
    """Move a batch to a device as a Trainer does, through the hooks on batches, and return it."""
    data = workload.data_module
    for name in BATCH_HOOKS:
        # Lightning calls the data module's hook where there is one, else the module's.
        owner: object = module
        if data is not None and is_overridden(name, data):
            owner = data
        hook = getattr(owner, name)
        # The last argument is the loader's place among several.
        batch = hook(batch, device, 0) if name == "transfer_batch_to_device" else hook(batch, 0)
    return batch


def evaluate(
    workload: Workload,
    module: LightningModule,
    protocol: TrialProtocol,
    checkpoint: Path | None = None,
    **batches: Iterable[Any],
) -> Trainer:
    """Evaluate a module, and return the Trainer, which holds the metrics.

    Args:
        workload: whose data module is used.
        module: that is evaluated.
        protocol: has the arguments of the Trainer.
        checkpoint: the file with the weights to load; None: the module's own.
        batches: the batches, as either ``val=`` or ``test=``.
    """
    trainer = make_trainer(without_recording_or_stopping(protocol.trainer), module)
    # It reads a checkpoint of bstune's, which holds plain data alone.
    trainer.strategy.checkpoint_io = PlainFiles(trainer, module)  # type: ignore[assignment]
    ((stage, iterable),) = batches.items()
    run = trainer.validate if stage == "val" else trainer.test
    options: dict[str, Any] = {}
    if workload.data_module is None:
        options["dataloaders"] = iterable
    else:
        options["datamodule"] = serving(workload.data_module, micro_batch_size=None, **batches)
    if checkpoint is not None:
        options["ckpt_path"] = checkpoint
        options["weights_only"] = True
    run(module, verbose=False, **options)
    return trainer


def sizes_that_show_schedules(
    options: StudyOptions, train_examples: int | None, last_step: Callable[[int], int]
) -> list[int]:
    """Choose the batch sizes of the trials that show whether schedules depend on their length.

    The largest one has the fewest steps. The user's own one shows what comes after a warm-up of a
    fixed length. Where that has few steps, as a batch size beside the data's number of examples
    has, the smallest one shows more.

    Args:
        options: of the study.
        train_examples: how many there are; None or 0: that is not known.
        last_step: gives the step at which a trial's budget is spent, by batch size.
    """
    if options.trial.batch_size is not None:
        return [options.trial.batch_size]
    sizes = options.search.batch_size
    largest = min(sizes.high, train_examples or sizes.high)
    own = min(options.scaling.whole_batch_size, largest)
    chosen = [largest, own]
    if last_step(own) < TELLING_STEPS:
        chosen.append(min(sizes.low, largest))
    return list(dict.fromkeys(chosen))


class LightningBackend(TrialBackend):
    """Trains each trial with a Lightning Trainer.

    Args:
        options: whose device and precision are resolved.
        recipe: by which the workload was built.
        workload: that the trials train.
        protocol: of all trials.
    """

    def __init__(
        self, options: StudyOptions, recipe: Recipe, workload: Workload, protocol: TrialProtocol
    ) -> None:
        self.workload = workload
        self.protocol = protocol
        self._options = options
        self.versions = versions()
        # The module's schedules are stepped to their end, to see whether they depend on the trial's
        # length.
        sizes = sizes_that_show_schedules(options, workload.train_examples, protocol.last_step)
        # They are of no search: they have no number in it, and no place beside the scaling rule.
        samples = [
            TrialSpec(
                number=0, trial_index=0, batch_size=size, lr=options.scaling.lr, delta=None, seed=0
            )
            for size in sizes
        ]
        # Whether schedules end with their trial. Such a trial has a horizon, the length of its
        # schedule, and is not stopped before its end.
        ends_with_trial = recipe.takes("total_steps")
        self.horizon = ends_with_trial or depends_on_length(workload, samples, protocol)
        self.stops = not self.horizon
        self.validates_on_test = workload.validates_on_test
        self.evaluation_share = protocol.evaluation_schedule.share
        self.train_examples = workload.train_examples or None
        self.notes = workload.notes
        # A budget with which schedules end changes what a trial is. It changes nothing where trials
        # are stopped, or where the sampler chooses each trial's horizon, which its record holds.
        budget = flatten({"budget": options.budget.model_dump()})
        if self.stops or chooses_horizons(options):
            budget = {}
        # These settings must not change while a study goes on.
        self._frozen = {"precision": options.precision, "compile": options.compile, **budget}
        self.name_device()

    def name_device(self) -> None:
        """Set what names the device in records and settings, by the threads that torch has now."""
        options = self._options
        is_cpu = options.device == "cpu"
        self.device = device_name(self.protocol.trainer, self.protocol.devices)
        self.device_kind = f"{self.device} of {processor()}" if is_cpu else self.device
        self.description = f"{self.device} in {options.precision}"
        # Several processes share the threads out, so their number is not torch's here.
        is_one_process = is_cpu and options.devices == 1
        threads = torch.get_num_threads() if is_one_process else None
        self.frozen_settings = {**self._frozen, "device": self.device, "threads": threads}

    def run(
        self, spec: TrialSpec, folder: Output | None, resumed_from: TrialResult | None
    ) -> TrialResult:
        """Train one trial, and give its record.

        A trial whose earlier state cannot be used is trained again from the start. A ConfigError is
        replaced by the error that it comes from: after the preflight only the user's code can
        refuse the values of this trial.
        """
        try:
            return self._run(spec, folder, resumed_from)
        except ConfigError as error:
            original: BaseException = error
            while original.__cause__ is not None:
                original = original.__cause__
            raise original from None

    def _run(
        self, spec: TrialSpec, folder: Output | None, resumed_from: TrialResult | None
    ) -> TrialResult:
        """Train one trial: with a horizon, without a stop, resumed or afresh, as the spec asks."""
        protocol = self.protocol_of(spec)
        checkpoint = None if folder is None else folder.checkpoint(spec.number)
        # The schedule ends with the trial, after as many steps: its horizon.
        if self.horizon:
            horizon = spec.max_steps or protocol.last_step(spec.batch_size)
            record = run_trial(self.workload, spec, protocol, checkpoint, horizon=horizon)
            return replace(record, horizon=horizon)
        # A trial without a limit of its own ends for good, and leaves no state to go on from.
        if spec.max_steps is None or folder is None:
            return run_trial(self.workload, spec, protocol, checkpoint)
        make_inside(folder.states)
        state = folder.state(spec.number)
        if resumed_from is not None:
            stopped = Stopped(resumed_from, folder.state(resumed_from.number))
            try:
                return run_trial(
                    self.workload, spec, protocol, checkpoint, state_file=state, resume=stopped
                )
            except StateError as error:
                logger.warning("%s", error)
                # Later trials would try to resume from the unusable state again.
                remove_own(stopped.state)
        afresh = replace(spec, resumed_from=None)
        return run_trial(self.workload, afresh, protocol, checkpoint, state_file=state)

    def protocol_of(self, spec: TrialSpec) -> TrialProtocol:
        """Give the study's protocol, with the budget that the trial's hyper-parameters may set."""
        if not spec.hyperparameters:
            return self.protocol
        tuned = with_tuned(self._options, spec.hyperparameters)
        return replace(self.protocol, budget=tuned.budget.budget)

    def test(self, spec: TrialSpec, folder: Output) -> Mapping[str, float]:
        """Measure a trial's metrics on the test set, with the weights of its checkpoint.

        Gives their values by name; none where there is no test set, where the module has no
        ``test_step``, or where ``folder`` has no checkpoint of the study's.
        """
        checkpoint = folder.checkpoint(spec.number)
        if self.workload.test_batches is None or not is_own(checkpoint):
            return {}
        module = self.workload.build_module(spec)
        # A data module may have a test set that its module has no step for.
        if not is_overridden("test_step", module):
            return {}
        trainer = evaluate(
            self.workload, module, self.protocol, checkpoint, test=self.workload.test_batches
        )
        return {name: float(value) for name, value in trainer.callback_metrics.items()}

    def resumable(self, number: int, folder: Output) -> bool:
        """Whether the stopped trial's state is in the folder."""
        return is_own(folder.state(number))
