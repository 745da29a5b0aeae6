"""The two packages of Lightning: which of them an object is of, and the same class in either.

``lightning.pytorch`` and ``pytorch_lightning`` are the same code with different classes: the
Trainer of either takes modules, data modules and call-backs of its own package alone.
"""

import sys
from importlib import import_module
from typing import Any

from bstune.core.errors import ConfigError
from bstune.system.lightning_package import installed_lightning

# Each package with the name of its fabric.
PACKAGES = {"lightning.pytorch": "lightning.fabric", "pytorch_lightning": "lightning_fabric"}


def is_lightning(thing: object, name: str) -> bool:
    """Whether an object is of the class ``name``, such as LightningModule, of either package.

    The packages are ``lightning`` and ``pytorch_lightning``.
    """
    classes = list[type]()
    for package in PACKAGES:
        # No object can be of a package that nobody has imported.
        if package in sys.modules:
            classes.append(getattr(sys.modules[package], name))
    return isinstance(thing, tuple(classes))


def package_of(*things: object) -> str:
    """Name the package of some Lightning objects, ``lightning`` or ``pytorch_lightning``.

    Without any such object it is the installed one. A ConfigError says that both are mixed.
    """
    examples: dict[str, str] = {}
    for thing in things:
        package = _package_of_class(type(thing))
        # bstune's own call-backs work under both.
        if package is not None and not type(thing).__module__.startswith("bstune.trial."):
            examples.setdefault(package, type(thing).__name__)
    if len(examples) > 1:
        kinds = " and ".join(f"{name} is of {package}" for package, name in examples.items())
        raise ConfigError(
            f"{kinds}: the two packages have different classes of the same names, so that no "
            "Trainer takes both; import all of them from one package"
        )
    return next(iter(examples), installed_lightning())


def _package_of_class(kind: type) -> str | None:
    """Name the package of the first class of Lightning's among a class and its bases.

    None where none of them is Lightning's.
    """
    for base in kind.__mro__:
        for package in PACKAGES:
            if base.__module__.startswith(f"{package}."):
                return package
    return None


def of_package(package: str, dotted_path: str) -> Any:
    """Import a class or function of a package of Lightning, or of its fabric.

    Args:
        package: one of ``PACKAGES``.
        dotted_path: below the package, such as ``utilities.exceptions.SIGTERMException``; below the
            fabric it begins with ``fabric.``.
    """
    top, _, rest = dotted_path.partition(".")
    # The fabric is a package of its own.
    full_path = f"{PACKAGES[package]}.{rest}" if top == "fabric" else f"{package}.{dotted_path}"
    module, _, name = full_path.rpartition(".")
    return getattr(import_module(module), name)


def is_overridden(name: str, owner: object) -> bool:
    """Whether a module, data module or call-back has a method of its own in Lightning's place."""
    check = of_package(package_of(owner), "utilities.model_helpers.is_overridden")
    return bool(check(name, owner))
