"""What is refused before torch is imported, which takes 5 to 30 s.

A device that is not there, an output folder that cannot be used, and data that are missing and
cannot be downloaded.
"""

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from bstune.core.errors import ConfigError
from bstune.options import StudyOptions, TrainedWorkload
from bstune.system.files import Identity, Output, check_owner, check_writable
from bstune.system.watchdog import waiting_for, watching

# Its loaders' files are known without reading them.
DATASETS = "bstune.workloads.datasets"
# A node's root that is the study's.
ROOT = "${data.root}"


def check_early(options: StudyOptions, say: Callable[[str], None]) -> None:
    """Refuse a study's device and its output folder, and download its data where they are missing.

    What is not known without torch is left to what follows.

    Raises:
        ConfigError: for a CUDA device where torch was built without CUDA.
        StudyError: for an output folder that cannot be written, or is another study's.
        DataError: for data that are missing and cannot be downloaded.
    """
    device = options.device
    # Once torch is imported, what follows asks it as quickly.
    if device.startswith("cuda") and "torch" not in sys.modules and is_built_without_cuda():
        raise ConfigError(
            f"device={device}, but this torch is built without CUDA: use device=auto or device=cpu"
        )
    check_output(options)
    if not isinstance(options.workload, TrainedWorkload):
        return
    for loader, root in known_loaders(options.workload.data):
        fetch = importlib.import_module(DATASETS).fetch
        folder = options.data.root if root == ROOT else root
        with watching(say, seconds=None), waiting_for("the download"):
            fetch(loader, folder, say)


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
    if isinstance(node, list):
        for value in node:
            yield from known_loaders(value)
    if not isinstance(node, dict):
        return
    module, _, loader = str(node.get("_target_")).rpartition(".")
    if module == DATASETS and "root" in node:
        yield loader, node["root"]
    for value in node.values():
        yield from known_loaders(value)
