"""The command line: options are composed and checked before Hydra takes over, and errors end in plain lines."""

import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import hydra
from hydra import compose, initialize_config_module
from hydra._internal.utils import get_args_parser
from hydra.core.config_loader import ConfigLoader
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from bstune.config import check_settings, is_replayed
from bstune.core.console import quieten, redact
from bstune.core.errors import BstuneError, ConfigError, Interrupted

CONFIG_MODULE, CONFIG_NAME, HYDRA_VERSION = "bstune.conf", "config", "1.3"


def main() -> int:
    """Run the command in ``sys.argv`` (Hydra reads it too) and return its exit status.

    It is 0, or 2 for what the user can mend, or 130 after an interruption.
    """
    arguments = sys.argv[1:]

    def job() -> None:
        if not _asks_hydra(arguments):
            compose_checked(arguments)
        _hydra_main()

    return exit_status(job, asks_to_debug(arguments))


def asks_to_debug(arguments: Sequence[str]) -> bool:
    """Return whether the command line asks for tracebacks, whether or not it can be composed."""
    return any(argument.lower() in ("debug=true", "debug=1") for argument in arguments)


def exit_status(job: Callable[[], None], debug: bool = False) -> int:
    """Do a command's work and return its exit status: 0, that of an error of ours, or 130 after an interruption.

    An error ends in plain lines, or, to debug, in its traceback.
    """
    try:
        job()
    except BstuneError as error:
        if debug:
            raise
        return explain(error)
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return Interrupted.exit_status
    return 0


@hydra.main(version_base=HYDRA_VERSION, config_path=f"pkg://{CONFIG_MODULE}", config_name=CONFIG_NAME)
def _hydra_main(config: DictConfig) -> None:
    """Run one job; Hydra would print a traceback for an error of ours, so that ends here."""
    try:
        run(config, command_line())
    except BstuneError as error:
        if config.get("debug"):
            raise
        sys.exit(explain(error))


def explain(error: BstuneError) -> int:
    """Write an error as plain lines, without passwords, and return its exit status."""
    sys.stderr.write(f"error: {redact(str(error))}\n")
    return error.exit_status


def command_line() -> list[str]:
    """Return the arguments that give the running job's config again, from any folder."""
    hydra_config = HydraConfig.get()
    arguments = []
    for source in hydra_config.runtime.config_sources:
        if source.provider == "command-line":
            arguments += ["--config-dir", str(Path(source.path).absolute())]
    if hydra_config.job.config_name != CONFIG_NAME:
        arguments += ["--config-name", str(hydra_config.job.config_name)]
    return [*arguments, *hydra_config.overrides.task]


def run(config: DictConfig, arguments: Sequence[str]) -> None:
    """Check and run one composed config.

    Raises:
        BstuneError: one of its kinds.
    """
    checked = check_settings(config)
    quieten(training=not is_replayed(checked))
    from rich.console import Console

    from bstune.study.prepare import prepare
    from bstune.study.run import run_single, run_study

    try:
        console = Console()
        prepared = prepare(checked, lambda line: console.print(line, highlight=False, soft_wrap=True))
        if prepared.trial is None:
            run_study(prepared, arguments, console)
        else:
            run_single(prepared, prepared.trial, console)
    except (KeyboardInterrupt, SystemExit) as error:  # Lightning turns the first into the second
        raise Interrupted(
            "interrupted: every finished trial is stored; the same command continues the study"
        ) from error


def _asks_hydra(arguments: Sequence[str]) -> bool:
    """Return whether Hydra is asked for something else than a run, or for several runs at once."""
    hydras_own = {"--help", "-h", "--hydra-help", "--version", "--cfg", "-c", "--info", "-i", "--multirun", "-m"}
    names = {argument.split("=", 1)[0] for argument in arguments}
    return bool(names & (hydras_own | {"--resolve", "--package", "-p", "--shell-completion", "-sc"}))


def compose_checked(arguments: Sequence[str]) -> DictConfig:
    """Compose the command line's config and check it, writing nothing.

    Raises:
        ConfigError: for an unknown workload (with the ones that there are), option, group or value.
    """
    parsed = get_args_parser().parse_args(list(arguments))
    overrides = list(parsed.overrides)
    if parsed.config_dir:
        overrides.append(f"hydra.searchpath=[file://{parsed.config_dir}]")
    with initialize_config_module(CONFIG_MODULE, version_base=HYDRA_VERSION):
        _check_workload(overrides)
        return check_settings(compose_plainly(parsed.config_name or CONFIG_NAME, overrides))


def compose_plainly(config_name: str, overrides: Sequence[str]) -> DictConfig:
    """Compose a config with Hydra initialised by the caller.

    Raises:
        ConfigError: in place of what Hydra, OmegaConf and the YAML parser raise, without their internals.
    """
    try:
        return compose(config_name, list(overrides))
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(_plain(error)) from error
    except YAMLError as error:
        raise ConfigError(f"a config file is not YAML: {' '.join(str(error).split())}") from error


def _check_workload(overrides: Sequence[str]) -> None:
    known = _config_loader(overrides)
    names = [override.split("=", 1)[1] for override in overrides if override.startswith(("+workload=", "workload="))]
    listing = "workloads: " + ", ".join(known) + "\nrun one with: python -m bstune +workload=NAME"
    if not names:
        raise ConfigError(f"no workload was given\n{listing}")
    if names[-1] not in known:
        raise ConfigError(f"there is no workload {names[-1]!r}\n{listing}")
    if not any(override.startswith("+workload=") for override in overrides):
        raise ConfigError(f"write +workload={names[-1]}, with a plus\n{listing}")


def _config_loader(overrides: Sequence[str]) -> list[str]:
    loader: ConfigLoader = GlobalHydra.instance().config_loader()
    own = [override for override in overrides if override.startswith("hydra.searchpath=")]
    return loader.get_group_options("workload", config_name=CONFIG_NAME, overrides=own)


def _plain(error: Exception) -> str:
    """Return Hydra's message without its search path and its advice on Hydra's internals."""
    message = str(error) or str(error.__cause__)
    unknown = re.match(r"Could not override '([^']+)'", message)
    if unknown:
        return f"unknown option {unknown[1]}; --help lists the options"
    lines = [line.strip() for line in message.split("Config search path")[0].splitlines() if line.strip()]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
