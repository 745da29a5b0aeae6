"""What is the same in all tests is computed once in a process, and nothing of theirs is waited for.

It was a third of a small study's time. Nothing of bstune's own is kept from one test to the next.
"""

import copy
import sqlite3
import sys
from collections import defaultdict
from functools import cache
from typing import Any

import omegaconf._utils
import omegaconf.base
import omegaconf.grammar_parser
import sqlalchemy
from hydra.core.plugins import Plugins
from optuna.storages._rdb.storage import _VersionManager

from bstune.trial.processes import workers

SOURCE = (
    "hydra._internal.core_plugins.importlib_resources_config_source.ImportlibResourcesConfigSource"
)
# What the processes of most tests import, seconds of each: toolbox.py's, and the digits'.
PRELOAD = [
    *("pytest", "sklearn.datasets", "bstune.workloads.classifier", "bstune.hardware.survey"),
    *("bstune.study.planning.replicates", "bstune.study.training", "bstune.study.study"),
]


def keep() -> None:
    """Keep configs of packages, parsed references, Optuna's migrations, and what packages say of themselves."""
    _keep_files_of_packages()
    _keep_parsed_references()
    omegaconf.base.Metadata.__deepcopy__ = _copy_of_metadata
    _keep_migrations()
    _keep_entry_points()
    sqlalchemy.event.listen(sqlalchemy.Engine, "connect", _without_waiting_for_the_disk)
    workers.PRELOAD += PRELOAD


def _without_waiting_for_the_disk(connection: Any, _: Any) -> None:
    """A test's SQLite database need not outlive the machine: half the time of what writes to one was waiting."""
    if isinstance(connection, sqlite3.Connection):
        connection.execute("PRAGMA synchronous=OFF")


def _keep_files_of_packages() -> None:
    # It imports its plugins anew, once.
    source_of_packages = Plugins.instance().class_name_to_class[SOURCE]
    load, found = source_of_packages.load_config, {}

    def load_once(source: Any, config_path: str) -> Any:
        key = source.provider, source.path, config_path
        if key not in found:
            found[key] = load(source, config_path)
        # Hydra changes what it has read.
        return copy.deepcopy(found[key])

    source_of_packages.load_config = load_once


def _keep_parsed_references() -> None:
    parse = cache(omegaconf.grammar_parser.parse)
    omegaconf._utils.parse = omegaconf.base.parse = parse


def _copy_of_metadata(metadata: Any, memo: object) -> Any:
    """Copy what OmegaConf keeps of a node: types, a key and flags; a third of a composition went into them."""
    copied = object.__new__(type(metadata))
    resolved = copy.deepcopy(metadata.resolver_cache) if metadata.resolver_cache else {}
    own = {"flags": dict(metadata.flags), "resolver_cache": defaultdict(dict, resolved)}
    vars(copied).update(vars(metadata) | own)
    return copied


def _keep_migrations() -> None:
    create, made = _VersionManager._create_alembic_script, []

    def create_once(manager: Any) -> Any:
        if not made:
            made.append(create(manager))
        return made[0]

    _VersionManager._create_alembic_script = create_once


def _keep_entry_points() -> None:
    """Lightning looks for call-backs in all packages whenever it makes a Trainer."""
    for name in ("lightning.fabric.utilities.registry", "lightning_fabric.utilities.registry"):
        if (registry := sys.modules.get(name)) is not None:
            registry.entry_points = cache(registry.entry_points)
