"""``python -m bstune.hardware +workload=NAME``: what the hardware allows for a workload, without a search."""

import sys
from pathlib import Path

from omegaconf import DictConfig

from bstune.__main__ import asks_to_debug, compose_checked, exit_status
from bstune.config import is_replayed
from bstune.core.console import quieten
from bstune.core.errors import ConfigError
from bstune.core.files import Output, check_writable, locked
from bstune.hardware.memory import Ask, probe_server
from bstune.study.prepare import check_hardware, check_workers


def main() -> int:
    """Run the command in ``sys.argv`` and return its exit status: 0, 2 for what the user can mend, or 130."""
    arguments = sys.argv[1:]
    if {"--help", "-h"} & set(arguments):
        sys.stdout.write(
            "usage: python -m bstune.hardware +workload=NAME [OPTION=VALUE ...]\n"
            "options are those of python -m bstune --help; hardware.* are the survey's own\n"
        )
        return 0
    return exit_status(lambda: run(compose_checked(arguments)), asks_to_debug(arguments))


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
    check_hardware(config)
    check_workers(config, search=False)
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


if __name__ == "__main__":
    sys.exit(main())
