"""What is refused before torch is imported, which takes 5 to 30 s.

A device that is not there, a learning rate that nothing takes, an output folder that cannot be
used, options that the study did not begin with, a limit that has no time for another trial, and
data that are missing and cannot be downloaded.
"""

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from bstune.core.errors import ConfigError, InputError, StudyError
from bstune.hydra_recipe import mappings_in
from bstune.options import StudyOptions, TrainedWorkload, flat_settings
from bstune.recipe import Recipe
from bstune.system.files import Identity, Output, check_owner, check_writable
from bstune.system.inputs import parse_yaml, read_text
from bstune.system.watchdog import waiting_for, watching

# Its loaders' files are known without reading them.
DATASETS = "bstune.workloads.datasets"
# How a node of options refers to the study's own folder of data.
ROOT = "${data.root}"
# The sections whose options a study must not change: one that is left out has changed, too.
OPTION_SECTIONS = ("workload.", "scaling.", "prior.", "protocol.", "trainer.", "search.")


def check_early(options: StudyOptions, say: Callable[[str], None]) -> None:
    """Refuse a study's device and its output folder, and download its data where they are missing.

    It does without torch, which takes seconds to import; checks that need torch come later.

    Raises:
        ConfigError: for a CUDA device where torch was built without CUDA.
        StudyError: for an output folder that cannot be written, or is another study's; for options
            that must not change and differ from those with which the study began; for a wall time
            that is over before another trial could begin.
        DataError: for data that are missing and cannot be downloaded.
    """
    device = options.device
    # Where torch is imported already, the later check of the device comes as soon.
    if device.startswith("cuda") and "torch" not in sys.modules and is_built_without_cuda():
        raise ConfigError(
            f"device={device}, but this torch is built without CUDA: use device=auto or device=cpu"
        )
    check_output(options)
    check_unchanged(options)
    check_time_left(options)
    if not isinstance(options.workload, TrainedWorkload):
        return
    for loader, root in known_loaders(options.workload.data):
        fetch = importlib.import_module(DATASETS).fetch
        folder = options.data.root if root == ROOT else root
        # A download is no training step: it has no limit, and only lines say that it goes on.
        with watching(say, seconds=None), waiting_for("the download"):
            fetch(loader, folder, say)


def check_takes_rate(options: StudyOptions, recipe: Recipe) -> None:
    """Raise a ConfigError for a workload in which nothing takes the trial's learning rate."""
    if options.scaling.override_lr or recipe.takes("lr"):
        return
    raise ConfigError(
        "nothing in the workload takes ${trial.lr}, so every learning rate would train alike: "
        f"{recipe.advice_on_rate()}; or give {recipe.override}, which sets the rate in the "
        "optimizer"
    )


def check_output(options: StudyOptions) -> None:
    """Check that a study, or the one trial that is asked for, can write its output folder.

    Raises:
        StudyError: if it cannot, or if the folder of a study holds anything that is not its own.
    """
    output = Output(Path(options.output).absolute())
    check_writable(output.root / "trials.jsonl", f"output={options.output}")
    # A single trial's folder is checked as the trial begins.
    if options.trial.batch_size is None:
        check_owner(output, Identity.of(options.study, options.storage))


def check_unchanged(options: StudyOptions) -> None:
    """Refuse options that a study which has begun must not change, before anything is measured.

    What this machine and the workload's code add to them is compared once the study is opened.

    Raises:
        StudyError: where an option or the output folder is another one, and where the storage does
            not answer.
    """
    # A single trial is not part of the study, and may have other options.
    if options.trial.batch_size is not None:
        return
    # These import Optuna, which other checks need not wait for.
    from bstune.study.storage.opening import (
        begun_study,
        check_same_output,
        refuse_changes,
        settings_of,
    )

    study = begun_study(options.study, options.storage)
    if study is None:
        return
    began = settings_of(study)
    now = {**flat_settings(options), **_stated_machine(options, began)}
    # Settings that are known only later, such as the digest of the code, are neither in ``now`` nor
    # compared. An option that ``now`` lacks is compared, as the study began with it.
    compared: dict[str, object] = {}
    for key, value in began.items():
        if key in now or key.startswith(OPTION_SECTIONS):
            compared[key] = value
    refuse_changes(study, compared, now)
    check_same_output(study, Path(options.output).absolute())


def check_time_left(options: StudyOptions) -> None:
    """Refuse to continue a study that has an answer, where the limit cannot hold another start.

    A command with the limit that its last one had is not refused: it asks for the answer as it is.

    Raises:
        StudyError: where the wall time is over before another trial could begin.
    """
    limit = options.search.wall_seconds
    files = Output(Path(options.output).absolute())
    # Without an answer the command is worth its start: it gives one.
    if limit is None or options.trial.batch_size is not None or not files.curve.exists():
        return
    if limit == _last_limit(files.config):
        return
    # These import Optuna, which other checks need not wait for.
    from bstune.study.planning.next_start import limit_to_continue
    from bstune.study.planning.wall import TimeTaken
    from bstune.study.storage.opening import begun_study

    study = begun_study(options.study, options.storage)
    enough = None if study is None else limit_to_continue(options, study)
    if study is None or enough is None:
        return
    taken = TimeTaken.of(study)
    raise StudyError(
        f"search.wall_seconds={limit:g} leaves no time for another trial: the study has taken "
        f"{taken.seconds:.0f} s, and its shortest start took {taken.shortest_start:.0f} s; give "
        f"search.wall_seconds={enough}, and a multiple of it for a search; the answer so far is in "
        f"{options.output}: bstune report {options.output} prints it"
    )


def _last_limit(config: Path) -> object:
    """Read the limit on wall time of a study's last command; None where it is not known."""
    try:
        content = parse_yaml(read_text(config, "the config"), "the config")
    except InputError:
        return None
    search = content.get("search") if isinstance(content, dict) else None
    return search.get("wall_seconds") if isinstance(search, dict) else None


def _stated_machine(options: StudyOptions, began: Mapping[str, object]) -> dict[str, object]:
    """Give compile, precision and threads, where the options state what the study recorded.

    ``began`` are the settings with which the study began. With ``auto`` an option leaves its value
    to this machine: it is not known yet, and is left out.
    """
    # It imports Optuna.
    from bstune.study.storage.attributes import THREADS_ARE_OPEN

    stated: dict[str, object] = {}
    if "compile" in began:
        stated["compile"] = options.compile
    if "precision" in began and options.precision != "auto":
        stated["precision"] = options.precision
    # A study on CUDA, or on several devices, has no threads to compare, and a study may still have
    # to choose them.
    study_has_threads = began.get("threads") is not None and not began.get(THREADS_ARE_OPEN)
    if study_has_threads and options.threads != "auto":
        stated["threads"] = options.threads
    return stated


def is_built_without_cuda() -> bool:
    """Whether the torch that would be imported has neither CUDA nor HIP, by its version file."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return False
    try:
        text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return False
    values = dict(_assignments(text))
    return values.get("cuda") == "None" and values.get("hip") == "None"


def _assignments(text: str) -> Iterator[tuple[str, str]]:
    """Read the names and values, as texts, that lines such as ``cuda: str = '12.4'`` assign."""
    for line in text.splitlines():
        name, equals, value = line.partition("=")
        if equals:
            yield name.partition(":")[0].strip(), value.strip()


def known_loaders(node: object) -> Iterator[tuple[str, object]]:
    """Find the loaders of bstune's own data sets in a node of options, with the root of each."""
    for mapping in mappings_in(node):
        module, _, loader = str(mapping.get("_target_")).rpartition(".")
        if module == DATASETS and "root" in mapping:
            yield loader, mapping["root"]
