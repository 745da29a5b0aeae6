"""The two packages of Lightning: of which of them a thing is, and the same class in either.

``lightning.pytorch`` and ``pytorch_lightning`` are the same code with different classes: the
Trainer of either takes modules, data modules and call-backs of its own package alone.
"""

import sys
from importlib import import_module
from typing import Any

from bstune.core.errors import ConfigError
from bstune.system.lightning_package import installed_lightning

# Each with its fabric.
PACKAGES = {"lightning.pytorch": "lightning.fabric", "pytorch_lightning": "lightning_fabric"}


def is_lightning(thing: object, name: str) -> bool:
    """Return whether a thing is of the class of this name, such as LightningModule, of either package."""
    imported = [package for package in PACKAGES if package in sys.modules]
    classes = tuple(getattr(sys.modules[package], name) for package in imported)
    return isinstance(thing, classes)


def package_of(*things: object) -> str:
    """Return the package that the classes of Lightning objects are from, the installed one where they tell none.

    A ConfigError says that they are mixed.
    """
    found: dict[str, str] = {}
    for thing in things:
        names = (base.__module__ for base in type(thing).__mro__)
        packages = (
            package for name in names for package in PACKAGES if name.startswith(f"{package}.")
        )
        package = next(packages, None)
        # bstune's own call-backs work under both.
        if package is not None and not type(thing).__module__.startswith("bstune.trial."):
            found.setdefault(package, type(thing).__name__)
    if len(found) > 1:
        kinds = " and ".join(f"{name} is of {package}" for package, name in found.items())
        raise ConfigError(
            f"{kinds}: the two packages have different classes of the same names, so that no "
            "Trainer takes both; import all of them from one package"
        )
    return next(iter(found), installed_lightning())


def of_package(package: str, place: str) -> Any:
    """Find what ``place``, such as ``utilities.exceptions.SIGTERMException``, names in a package, or its fabric."""
    top, _, rest = place.partition(".")
    path = f"{PACKAGES[package]}.{rest}" if top == "fabric" else f"{package}.{place}"
    module, _, name = path.rpartition(".")
    return getattr(import_module(module), name)


def is_overridden(name: str, thing: object) -> bool:
    """Return whether a module, data module or call-back has a method of its own in place of Lightning's."""
    check = of_package(package_of(thing), "utilities.model_helpers.is_overridden")
    return bool(check(name, thing))
