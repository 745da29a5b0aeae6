"""A workload's survey of the hardware: from the cache, or measured and then kept there.

A survey is measured once for a workload, a device and its versions.
"""

import hashlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from bstune.config import Composed, compose
from bstune.core.errors import ConfigError, HardwareError, InputError, StudyError
from bstune.core.records import TrialProtocol, TrialSpec
from bstune.core.search_space import Space
from bstune.hardware.survey import Survey, measure, usable_sizes
from bstune.hardware.threads import ThreadChoice
from bstune.hardware.workload_steps import HowTimed, how_timed, reference_outside
from bstune.options import StudyOptions
from bstune.recipe import Recipe
from bstune.system.console import format_seconds, plural, quieten
from bstune.system.files import write_text
from bstune.system.inputs import read_bytes
from bstune.system.watchdog import watching
from bstune.trial.backend import make_space
from bstune.trial.checks.loaders import check_loaders
from bstune.trial.devices.device import device_name, processor, versions
from bstune.trial.lightning.installed import LightningDataModule, LightningModule
from bstune.trial.loop import Workload
from bstune.trial.processes.fork_server import start_server
from bstune.trial.workload import (
    build_module,
    build_workload,
    check_largest,
    checked_protocol,
    load_data,
    resolve,
    train_examples,
)

logger = logging.getLogger(__name__)
SURVEYS = TypeAdapter(Survey)
# A survey that had too little time is measured again where there is so many times as much.
MORE_TIME = 1.5
# The options of a workload that change nothing that is measured.
IRRELEVANT = {"trials", "budget", "target", "reference", "tunable"}


def compose_survey(arguments: Sequence[str]) -> Composed:
    """Give the options and the recipe of a command line's arguments.

    ConfigError for a workload of recorded runs, which is not trained.
    """

    def refuse(workload: Mapping[str, object]) -> dict[str, object]:
        raise ConfigError(
            "recorded runs have no hardware to survey: name a workload that is trained"
        )

    return compose(arguments, refuse)


def survey_of(
    options: StudyOptions, recipe: Recipe, log: Callable[[str], None]
) -> tuple[Survey, bool]:
    """Give the survey of a workload, and whether it was in the cache.

    ``log`` takes lines of progress.
    """
    quieten()
    # The server of processes imports torch while this process reads the data.
    start_server()
    options, recipe = resolve(options, recipe)
    space = make_space(options)
    protocol = checked_protocol(options, recipe)
    with watching(log, options.protocol.trial_seconds) as say:
        data = load_data(options, recipe)
        check_loaders(
            data, is_given=recipe.data_at is not None, how_to_give=recipe.how_to_give_data
        )
        check_largest(space.high, train_examples(data))
        build = partial(build_workload, options, recipe, data)
        return cached_survey(options, recipe, space, protocol, data, build, say)


def cached_survey(
    options: StudyOptions,
    recipe: Recipe,
    space: Space,
    protocol: TrialProtocol,
    data: LightningDataModule,
    build: Callable[[], Workload],
    log: Callable[[str], None],
) -> tuple[Survey, bool]:
    """Give the survey of a workload whose data is loaded, and whether it was in the cache.

    For the arguments see :func:`~bstune.hardware.survey.measure`.
    """
    examples = train_examples(data)
    key, how = survey_key(options, recipe, space, protocol, examples)

    def measured() -> Survey:
        return measure(options, recipe, space, protocol, examples, build, log)

    return cached(options, key, how, measured, log)


def survey_key(
    options: StudyOptions,
    recipe: Recipe,
    space: Space,
    protocol: TrialProtocol,
    examples: int,
) -> tuple[str, HowTimed]:
    """Give the key of a workload's survey in the cache, and how its steps are timed.

    Both depend on the module, which is built for it. ``examples`` counts the training data.
    """
    # At delta 0 the learning rate is the scaling rule's own.
    spec = TrialSpec(
        number=0,
        trial_index=0,
        batch_size=space.low,
        lr=space.lr(space.low, delta=0.0),
        delta=None,
        seed=0,
    )
    module = build_module(options, recipe, spec)
    return cache_key(options, space, protocol, module, examples), how_timed(options, module)


def cached(
    options: StudyOptions,
    key: str,
    how: HowTimed,
    measured: Callable[[], Survey],
    log: Callable[[str], None],
) -> tuple[Survey, bool]:
    """Give the survey with ``key``, and whether it was in the cache.

    A survey that is not in the cache is measured and kept. It is measured again, after a line to
    ``log``, where the steps of the cached one were timed otherwise than ``how``, or where it had
    too little time and ``options.hardware.seconds`` are more.
    """
    known, difference = _read_kept(options, key, how)
    if known is not None:
        if difference is None:
            return known, True
        log(f"the cached survey of the hardware is not used, it is measured again: {difference}")
    survey = measured()
    # Where the survey cannot be written the study goes on, and the next one measures again.
    path = _path(options, key)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, SURVEYS.dump_json(survey).decode())
    except (OSError, StudyError) as error:
        logger.warning("the survey of the hardware is not cached: %s", error)
    return survey, False


def kept(options: StudyOptions, key: str, how: HowTimed) -> Survey | None:
    """Give the survey that :func:`cached` would take from the cache; None if it would measure."""
    known, difference = _read_kept(options, key, how)
    return known if difference is None else None


def _read_kept(options: StudyOptions, key: str, how: HowTimed) -> tuple[Survey | None, str | None]:
    """Read the survey with ``key`` from the cache, and say why it is not to be used.

    The survey is None where the cache has none, or where the user asks for a fresh one. The reason
    is None where the survey may be used, or is None.
    """
    if options.hardware.refresh:
        return None, None
    known = read_survey(_path(options, key))
    if known is None:
        return None, None
    return known, _difference(how, known) or _lack_of_time(known, options.hardware.seconds)


def _path(options: StudyOptions, key: str) -> Path:
    """Where a survey is kept."""
    # The workload's name is for people: the key alone tells surveys apart.
    return Path(options.hardware.cache) / f"{options.workload.name}-{key}.json"


def _difference(how: HowTimed, survey: Survey) -> str | None:
    """Say in what a cached survey was timed otherwise than ``how``; None if in nothing."""
    if survey.seconds_of != how.seconds_of:
        return f"its seconds are those of {survey.seconds_of}, not of {how.seconds_of}"
    return _threads_difference(how.thread_counts, survey.threads)


def _lack_of_time(survey: Survey, seconds: float) -> str | None:
    """Say what a cached survey had no time for; None if nothing, or ``seconds`` are hardly more."""
    sizes_cut_short = len(survey.measured.left_out) + len(survey.measured.cut)
    if sizes_cut_short == 0 or seconds < MORE_TIME * survey.allowed:
        return None
    return (
        f"in {format_seconds(survey.allowed)} it had no time for "
        f"{plural(sizes_cut_short, 'batch size')}, or for several visits to them"
    )


def _threads_difference(counts: Sequence[int], choice: ThreadChoice | None) -> str | None:
    """Say why a cached survey's choice of threads does not hold here; None if it does.

    Args:
        counts: the numbers of threads that can be chosen here; empty: torch's threads are left
            alone.
        choice: that of the survey; None: it left torch's threads alone.
    """
    if choice is None:
        return "its number of threads was left alone" if counts else None
    threads = plural(choice.threads, "thread")
    if not counts:
        return f"its steps ran on {threads}, which is left alone here"
    if choice.threads not in counts:
        wanted = " or ".join(str(count) for count in counts)
        return f"its steps ran on {threads}, and this study's run on {wanted}"
    # A number that was given, not chosen by its timing, says nothing of the others.
    if len(counts) > 1 and not choice.timings:
        return f"its steps ran on {threads}, and no other number was tried"
    return None


def read_survey(path: Path) -> Survey | None:
    """Read the survey in a file.

    None where there is no file, where it cannot be read, and where it holds no survey that
    this version knows how to read.
    """
    try:
        return SURVEYS.validate_json(read_bytes(path, "the survey"))
    except (InputError, ValidationError, HardwareError):
        return None


def _device_kind(options: StudyOptions, protocol: TrialProtocol) -> str:
    """Give the device's name, without the number of threads: a survey chooses that."""
    if options.device == "cpu" and options.devices == 1:
        return "cpu"
    return device_name(protocol.trainer, protocol.devices)


def cache_key(
    options: StudyOptions,
    space: Space,
    protocol: TrialProtocol,
    module: LightningModule,
    train_examples: int,
) -> str:
    """16 hexadecimal digits that change with each thing that the survey depends on."""
    # The user's arguments of the Trainer count as they were written, here or in the workload's
    # options below. The text of the objects that are built from them may differ from process to
    # process, as where it has an address.
    user_arguments = {**options.trainer, **options.workload.trainer}
    user_arguments |= getattr(options.workload, "given_trainer", {})
    trainer = {
        name: value for name, value in protocol.trainer.items() if name not in user_arguments
    }
    trainer |= options.trainer
    # Edits of the model's code change its layers or parameters, and so this text.
    module_text = [repr(module)]
    for name, parameter in module.named_parameters():
        module_text.append(f"{name} {tuple(parameter.shape)}")
    largest, _notes = usable_sizes(space.high, protocol.budget)
    depends: dict[str, object] = {
        "workload": options.workload.model_dump(exclude=IRRELEVANT),
        "module": module_text,
        "examples": train_examples,
        "range": [space.low, largest, space.multiple],
        "device": [_device_kind(options, protocol), processor()],
        "trainer": {name: str(value) for name, value in trainer.items()},
        "micro_batch_size": protocol.micro_batch_size,
        "compile": protocol.compile,
        "fast": protocol.fast,
        "versions": dict(versions()),
        "survey": options.hardware.model_dump(exclude={"cache", "enabled", "refresh"}),
    }
    outside = reference_outside(options, space)
    if outside is not None:
        # Its steps are timed beside those of the range.
        depends["reference"] = outside
    if options.search.workers > 1:
        # Trials that run at once share the memory.
        depends["workers"] = options.search.workers
    document = json.dumps(depends, sort_keys=True, default=str)
    return hashlib.sha256(document.encode()).hexdigest()[:16]
