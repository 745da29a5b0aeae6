"""What is the same in all tests is computed once in a process, and nothing of theirs is waited for.

It was a third of a small study's time, and two thirds of a composition's. Nothing of bstune's own is
kept from one test to the next.
"""

import copy
import inspect
import os
import sqlite3
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import alembic.util
import omegaconf._utils
import omegaconf.base
import omegaconf.grammar_parser
import sklearn.datasets._base
import sqlalchemy
from hydra._internal import config_loader_impl, config_repository, defaults_list
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from optuna.storages._rdb.storage import _VersionManager
from sqlalchemy.dialects.sqlite.pysqlite import SQLiteDialect_pysqlite

from bstune.study.analysis import model
from bstune.trial.processes import fork_server

SOURCE = (
    "hydra._internal.core_plugins.importlib_resources_config_source.ImportlibResourcesConfigSource"
)
PROJECTS = Path(__file__).parent / "projects"
# What the processes of most tests import, seconds of each: toolbox.py's, and the digits'.
PRELOAD = [
    *("pytest", "sklearn.datasets", "bstune.workloads.classifier", "bstune.hardware.survey"),
    *("bstune.study.planning.replicates", "bstune.study.training", "bstune.study.study"),
]
# Moves of the posterior of a report took a tenth of the tests' time, and few tests read an interval
# of it.
FEW_MOVES = 2
MOVES_OF_A_REPORT = model.MOVES


def keep() -> None:
    """Keep configs of packages, what was parsed, Optuna's migrations, and what packages say of themselves."""
    _keep_files_of_packages()
    _keep_search_paths()
    _keep_choices_of_files()
    _keep_compositions()
    _keep_parsed_options()
    _keep_parsed_references()
    omegaconf.base.Metadata.__deepcopy__ = _copy_of_metadata
    omegaconf.AnyNode.__deepcopy__ = _copy_of_value
    _keep_migrations()
    _keep_revisions()
    _keep_statements()
    _keep_entry_points()
    _keep_signatures()
    _keep_results_where_they_are()
    _keep_digits()
    _take_values_as_plain()
    _seed_what_is_there()
    # A test's files need not outlive the machine either.
    os.fsync = lambda descriptor: None
    sqlalchemy.event.listen(sqlalchemy.Engine, "connect", _without_waiting_for_the_disk)
    fork_server.PRELOAD += PRELOAD
    model.MOVES = FEW_MOVES


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


def _keep_search_paths() -> None:
    """Look for a search path once in a config that no test changes.

    It was read anew for each composition, to see that it has none.
    """
    # A repository gives itself other sources, and changes none.
    config_repository.ConfigRepository.__deepcopy__ = lambda repository, memo: copy.copy(repository)
    loader = config_loader_impl.ConfigLoaderImpl
    process, without = loader._process_config_searchpath, set()

    def process_once(self: Any, config_name: str, overrides: Sequence[Any], repo: Any) -> None:
        sources = _sources_of(repo)
        named = any(override.get_key_element() == "hydra.searchpath" for override in overrides)
        if sources is None or named:
            process(self, config_name, overrides, repo)
            return
        if (sources, config_name) in without:
            return
        process(self, config_name, overrides, repo)
        if _sources_of(repo) == sources:
            without.add((sources, config_name))

    loader._process_config_searchpath = process_once


def _sources_of(repository: Any) -> tuple[str, ...] | None:
    """What a composition takes its files from; None where a test may change them.

    A package's files stay as they are, and so do those of tests/projects. What a program has stored
    beside Hydra's own, as a study of objects stores its workload, is given with its values.
    """
    places = [source.full_path() for source in repository.get_sources()]
    unchanging = ("pkg://", "structured://", f"file://{PROJECTS}")
    if not all(place.startswith(unchanging) for place in places):
        return None
    stored = []
    for name, node in ConfigStore.instance().repo.items():
        if name != "hydra":
            stored.append(f"{name}: {node!r}")
    return (*places, *stored)


def _keep_choices_of_files() -> None:
    """Choose the files of a composition once for the options that name one; the others are values."""
    choose, found = config_loader_impl.create_defaults_list, {}

    def choose_once(
        repo: Any,
        config_name: str,
        overrides_list: Sequence[Any],
        prepend_hydra: bool,
        skip_missing: bool,
    ) -> Any:
        sources = _sources_of(repo)
        if sources is None:
            return choose(repo, config_name, overrides_list, prepend_hydra, skip_missing)
        named = []
        for override in overrides_list:
            if repo.group_exists(override.key_or_group):
                named.append(override.input_line)
        key = sources, config_name, tuple(named), prepend_hydra, skip_missing
        if key not in found:
            found[key] = choose(repo, config_name, overrides_list, prepend_hydra, skip_missing)
        values = defaults_list.Overrides(repo, overrides_list).config_overrides
        return replace(found[key], config_overrides=values)

    config_loader_impl.create_defaults_list = choose_once


def _keep_compositions() -> None:
    """Merge the same files once; the values of options are put into a copy."""
    loader = config_loader_impl.ConfigLoaderImpl
    merge, found = loader._compose_config_from_defaults_list, {}

    def merge_once(self: Any, defaults: Sequence[Any], repo: Any) -> Any:
        sources = _sources_of(repo)
        if sources is None:
            return merge(self, defaults, repo)
        key = sources, repr(defaults)
        if key not in found:
            found[key] = merge(self, defaults, repo)
        return copy.deepcopy(found[key])

    loader._compose_config_from_defaults_list = merge_once


def _keep_parsed_options() -> None:
    parse, found = OverridesParser.parse_rule, {}

    def parse_once(self: Any, text: str, rule_name: str) -> Any:
        key = text, rule_name
        if key not in found:
            found[key] = parse(self, text, rule_name)
        # What is composed of it may get a list longer.
        return copy.deepcopy(found[key])

    OverridesParser.parse_rule = parse_once


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


def _copy_of_value(node: Any, memo: object) -> Any:
    """Copy a value's node without checking its value anew; half of a composition's time are copies."""
    copied = object.__new__(omegaconf.AnyNode)
    own = {"_metadata": _copy_of_metadata(node._metadata, memo), "_flags_cache": None}
    vars(copied).update(vars(node) | own)
    return copied


def _take_values_as_plain() -> None:
    """Ask whether a value is a dataclass's where its type is none of Python's own: most are."""
    plain = {type(None), bool, int, float, str, list, tuple, dict}
    plain |= {omegaconf.DictConfig, omegaconf.ListConfig, omegaconf.AnyNode}
    ask = omegaconf._utils.is_structured_config

    def is_structured_config(value: Any) -> bool:
        return type(value) not in plain and ask(value)

    for name, module in list(sys.modules.items()):
        if name.startswith("omegaconf.") and hasattr(module, "is_structured_config"):
            module.is_structured_config = is_structured_config


def _seed_what_is_there() -> None:
    """Let a seed for devices that are not there remember no traceback of who gave it."""
    for name in ("torch.cuda", "torch.xpu", "torch.mtia"):
        if (devices := sys.modules.get(name)) is not None:
            devices.traceback = SimpleNamespace(format_stack=list)


def _keep_migrations() -> None:
    create, made = _VersionManager._create_alembic_script, []

    def create_once(manager: Any) -> Any:
        if not made:
            made.append(create(manager))
        return made[0]

    _VersionManager._create_alembic_script = create_once


def _keep_revisions() -> None:
    """Each new database of MLflow's reads the files of its revisions several times."""
    load, found = alembic.util.load_python_file, {}

    def load_once(folder: Any, filename: Any) -> Any:
        # It acts as it is read; the others define functions.
        if filename == "env.py":
            return load(folder, filename)
        key = str(folder), str(filename)
        if key not in found:
            found[key] = load(folder, filename)
        return found[key]

    alembic.util.load_python_file = load_once


def _keep_statements() -> None:
    """Compile each statement once for all SQLite databases, not once for each of a test's own."""
    dialect, make = SQLiteDialect_pysqlite, sqlalchemy.Engine.__init__
    # What was compiled is found by the dialect. Each engine has one, with the same settings.
    dialect.__eq__ = lambda one, other: type(one) is type(other)
    dialect.__hash__ = lambda one: hash(type(one))
    compiled = sqlalchemy.util.LRUCache(5_000)

    def make_with_statements(self: Any, *arguments: Any, **options: Any) -> None:
        make(self, *arguments, **options)
        if isinstance(self.dialect, dialect):
            self._compiled_cache = compiled

    sqlalchemy.Engine.__init__ = make_with_statements


def _keep_digits() -> None:
    """Each trial of the digits reads a text of 1,797 images anew."""
    read, found = sklearn.datasets._base.load_gzip_compressed_csv_data, {}

    def read_once(name: str = "", **options: Any) -> Any:
        # The name stands alone or among the options.
        given = {"data_file_name": name, **options}
        key = tuple(sorted(given.items()))
        if key not in found:
            found[key] = read(**given)
        return copy.deepcopy(found[key])

    sklearn.datasets._base.load_gzip_compressed_csv_data = read_once


def _keep_entry_points() -> None:
    """Lightning looks for call-backs in all packages whenever it makes a Trainer."""
    for name in ("lightning.fabric.utilities.registry", "lightning_fabric.utilities.registry"):
        if (registry := sys.modules.get(name)) is not None:
            registry.entry_points = cache(registry.entry_points)


def _keep_signatures() -> None:
    """Lightning asks each hook anew, at each step, which arguments it takes."""
    ask = cache(inspect.getfullargspec)

    def ask_once(hook: Any) -> Any:
        # Each access to a method makes another one of the same function, and the same arguments.
        return ask(getattr(hook, "__func__", hook))

    for package in ("lightning.pytorch", "pytorch_lightning"):
        if (signatures := sys.modules.get(f"{package}.utilities.signature_utils")) is not None:
            signatures.inspect = SimpleNamespace(getfullargspec=ask_once)


def _keep_results_where_they_are() -> None:
    """Lightning copies all that it knows of a metric, at each value, to move it to where it is."""
    for package in ("lightning.pytorch", "pytorch_lightning"):
        name = f"{package}.trainer.connectors.logger_connector.result"
        if (results := sys.modules.get(name)) is not None:
            results._ResultMetric.to = _moved_from_elsewhere(results._ResultMetric.to)


def _moved_from_elsewhere(move: Any) -> Any:
    def to(self: Any, device: Any) -> Any:
        for value in vars(self).values():
            # A tensor or a metric of torchmetrics has a device.
            if str(getattr(value, "device", device)) != str(device):
                return move(self, device)
        return self

    return to
