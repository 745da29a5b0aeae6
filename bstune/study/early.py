"""What is refused before torch is imported, which takes 5 to 30 s.

A device that is not there, and data that are missing and cannot be downloaded.
"""

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf

from bstune.core.errors import ConfigError
from bstune.system.watchdog import waiting_for, watching

DATASETS = "bstune.workloads.datasets"  # whose loaders' files are known without reading them


def check_early(config: DictConfig, say: Callable[[str], None]) -> None:
    """Refuse a composed config's device, and download its data where they are missing.

    What is not known without torch is left to what follows.

    Raises:
        ConfigError: for a CUDA device where torch was built without CUDA.
        DataError: for data that are missing and cannot be downloaded.
    """
    device = str(config.device)
    if device.startswith("cuda") and "torch" not in sys.modules and is_built_without_cuda():
        raise ConfigError(
            f"device={device}, but this torch is built without CUDA: use device=auto or device=cpu"
        )
    for loader, root in known_loaders(config.workload.get("data")):
        fetch = importlib.import_module(DATASETS).fetch
        with watching(say, None), waiting_for("the download"):
            fetch(loader, root, say)


def is_built_without_cuda() -> bool:
    """Say whether the torch that would be imported has neither CUDA nor HIP, by its version file."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return False
    try:
        text = Path(found.origin).with_name("version.py").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return False
    values = dict(_assignments(text))
    return values.get("cuda") == "None" and values.get("hip") == "None"


def _assignments(text: str) -> Iterator[tuple[str, str]]:
    for line in text.splitlines():
        name, equals, value = line.partition("=")
        if equals:
            yield name.partition(":")[0].strip(), value.strip()


def known_loaders(node: Any) -> Iterator[tuple[str, Any]]:
    """Find the loaders of bstune's own data sets in a config's node, with the root of each."""
    if isinstance(node, ListConfig):
        for value in node:
            yield from known_loaders(value)
    if not isinstance(node, DictConfig):
        return
    module, _, loader = str(node.get("_target_")).rpartition(".")
    if module == DATASETS and "root" in node:
        yield loader, node.root
    for name in map(str, node):
        # A reference to elsewhere, such as to the module's learning rate, is nothing to follow.
        if not OmegaConf.is_interpolation(node, name) and not OmegaConf.is_missing(node, name):
            yield from known_loaders(node[name])
