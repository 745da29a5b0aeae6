"""``python -m bstune.hardware +workload=NAME``: what the hardware allows for a workload, without a search."""

import sys
from pathlib import Path

from omegaconf import DictConfig

from bstune.config import is_replayed
from bstune.core.console import quieten
from bstune.core.errors import ConfigError
from bstune.core.files import Output, check_writable, locked
from bstune.hardware.memory import Ask, probe_server
from bstune.study.prepare import compose_checked


def main(arguments: list[str]) -> None:
    """Survey the hardware for a workload."""
    if {"--help", "-h"} & set(arguments):
        sys.stdout.write(
            "usage: bstune survey workload=NAME [OPTION=VALUE ...]\n\nMeasures what the hardware allows for a workload, "
            "without a search. The options are those of bstune --help;\nhardware.* are the survey's own.\n"
        )
        return
    run(compose_checked(arguments))


def run(config: DictConfig) -> None:
    """Survey the hardware for a composed and checked config, print what was found, and write it with its figure.

    Raises:
        BstuneError: one of its kinds; nothing is written then.
    """
    if is_replayed(config):
        raise ConfigError(
            f"workload {config.workload.name} is answered from recorded runs: there is no hardware to survey; name a "
            "workload that is trained"
        )
    output = Output(Path(config.output))
    check_writable(output.survey, f"output={config.output}")
    with locked(output), probe_server() as ask:  # it imports what we do next, at the same time
        _survey(config, output, ask)


def _survey(config: DictConfig, output: Output, ask: Ask) -> None:
    quieten()
    from rich.console import Console

    from bstune.hardware.report import survey_tables, write_survey
    from bstune.hardware.survey import surveyed
    from bstune.trial.backend import make_space
    from bstune.trial.workload import build_workload, check_largest, checked_protocol, load_data, resolve

    console = Console()
    config = resolve(config)
    protocol, space = checked_protocol(config), make_space(config)
    data = load_data(config)
    check_largest(space.high, data)
    found, kept = surveyed(
        config,
        space,
        protocol,
        data,
        lambda: build_workload(config, data),
        lambda line: console.print(line, highlight=False, soft_wrap=True),
        ask,
    )
    write_survey(found, output)
    console.print(survey_tables(found))
    if kept:
        console.print("kept from before; measure again with hardware.refresh=true")
    for path in (output.survey, output.roofline):
        if path.exists():
            console.print(f"written {path}", soft_wrap=True)

