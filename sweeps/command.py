"""``bstune sweep [NAME [SETTING=VALUE ...]]``: list the sweeps, or run one."""

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ConfigDict, ValidationError, validate_call

from bstune.config import CONF
from bstune.core.errors import InputError
from bstune.system.console import guess, wrap
from bstune.system.files import whole_file, write_text

SWEEPS = {file.stem: file for file in sorted((CONF / "sweep").glob("*.yaml"))}
# What a sweep's file has beside settings.
OF_FILE = ("run", "source")


def command(arguments: Sequence[str]) -> None:
    """Run a sweep, print its table, and write ``table.csv`` and ``figure.png`` to its folder.

    A sweep is the function that ``run`` of its file names, as ``MODULE.FUNCTION`` of this package.
    It is called with ``output``, its folder, and the other settings of the file, and gives a
    DataFrame and a Figure. The same command goes on where it was interrupted.

    Raises:
        InputError: there is no such sweep, or a setting is none of it, in one line.
    """
    if not arguments:
        for name, file in SWEEPS.items():
            print(f"{name}\n{wrap('', str(OmegaConf.load(file).source))}")
        return
    name, *given = arguments
    settings = _settings(name, [one for one in given if one not in ("--cfg", "job")])
    if "--cfg" in given:
        print(yaml.safe_dump(settings, sort_keys=False), end="")
        return
    module, function = settings.pop("run").split(".")
    source = settings.pop("source")
    run = getattr(importlib.import_module(f"bstune.sweeps.{module}"), function)
    checked = validate_call(config=ConfigDict(arbitrary_types_allowed=True))(run)
    try:
        table, figure = checked(**settings)
    except ValidationError as error:
        raise InputError(_mistakes(name, error)) from error
    output = Path(settings["output"])
    write_text(output / "table.csv", table.to_csv(index=False))
    with whole_file(output / "figure.png") as picture:
        figure.savefig(picture, format="png", dpi=120)
    print(wrap("Source", source))
    print(table.to_string(index=False, float_format="{:.4g}".format))
    print(wrap("Files", f"{output}/table.csv, figure.png"))


def _settings(name: str, given: Sequence[str]) -> dict[str, Any]:
    """The settings of a sweep's file, with those of the command line in their place."""
    if name not in SWEEPS:
        meant = guess(name, SWEEPS)
        hint = f"did you mean {meant}?" if meant else f"there are {', '.join(SWEEPS)}"
        raise InputError(f"there is no sweep {name}: {hint}")
    settings: Any = OmegaConf.load(SWEEPS[name])
    settings.setdefault("output", f"outputs/sweeps/{name}")
    OmegaConf.set_struct(settings, True)
    for one in given:
        key, equals, value = one.partition("=")
        try:
            if not equals or key in OF_FILE:
                raise InputError(f"{name} takes SETTING=VALUE, but got {one}")
            OmegaConf.update(settings, key, OmegaConf.create(f"value: {value}").value)
        except (OmegaConfBaseException, yaml.YAMLError) as error:
            raise InputError(
                f"{one} is no setting of {name}: python -m bstune sweep {name} --cfg job lists them"
            ) from error
    values: Any = OmegaConf.to_container(settings)
    return dict(values)


def _mistakes(name: str, error: ValidationError) -> str:
    """Write errors of pydantic, a line each."""
    lines = []
    for details in error.errors():
        setting = ".".join(map(str, details["loc"]))
        lines.append(f"{name}: {setting}: {details['msg']}, but got {details['input']!r:.200}")
    return "\n".join(lines)
