"""What is the same in all tests is computed once in a process, and nothing of theirs is waited for.

It was a third of a small study's time. Nothing of bstune's own is kept from one test to the next.
"""

import copy
import sqlite3
import sys
from functools import cache
from typing import Any

import omegaconf._utils
import omegaconf.base
import omegaconf.grammar_parser
import sqlalchemy
from hydra._internal.core_plugins.importlib_resources_config_source import (
    ImportlibResourcesConfigSource,
)
from optuna.storages._rdb.storage import _VersionManager

from bstune.trial.processes import workers


def keep() -> None:
    """Keep configs of packages, parsed references, Optuna's migrations, and what packages say of themselves."""
    _keep_files_of_packages()
    _keep_parsed_references()
    _keep_migrations()
    _keep_entry_points()
    sqlalchemy.event.listen(sqlalchemy.Engine, "connect", _without_waiting_for_the_disk)
    # What nearly all processes of tests import, a second each.
    workers.PRELOAD += ["toolbox", "sklearn.datasets", "bstune.workloads.classifier"]


def _without_waiting_for_the_disk(connection: Any, _: Any) -> None:
    """A test's SQLite database need not outlive the machine: half the time of what writes to one was waiting."""
    if isinstance(connection, sqlite3.Connection):
        connection.execute("PRAGMA synchronous=OFF")


def _keep_files_of_packages() -> None:
    load, found = ImportlibResourcesConfigSource.load_config, {}

    def load_once(source: Any, config_path: str) -> Any:
        key = source.provider, source.path, config_path
        if key not in found:
            found[key] = load(source, config_path)
        # Hydra changes what it has read.
        return copy.deepcopy(found[key])

    ImportlibResourcesConfigSource.load_config = load_once


def _keep_parsed_references() -> None:
    parse = cache(omegaconf.grammar_parser.parse)
    omegaconf._utils.parse = omegaconf.base.parse = parse


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
