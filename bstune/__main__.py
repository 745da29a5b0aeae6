"""The command: ``bstune [tune] | survey | fit | record | sweep``, and the one way in which it ends.

A run composes its config once, by Hydra's compose API. What Hydra's own command line does besides (``--help``,
``--cfg``, ``--multirun``, ``hydra.*`` options, ...) is left to ``hydra.main``.
"""

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from bstune.config import (
    CONFIG_MODULE,
    CONFIG_NAME,
    HYDRA_VERSION,
    is_replayed,
    parse,
    plain_error,
    validate,
    with_choices,
    without_plus,
)
from bstune.core.console import quieten, redact
from bstune.core.errors import BstuneError, ConfigError, Interrupted
from bstune.core.files import expand_home
from bstune.core.records import dump_json

VERBS = {  # each is called with what stands after it, and raises what ends it
    "tune": "bstune.__main__:tune",
    "worker": "bstune.__main__:worker",
    "survey": "bstune.hardware.report:main",
    "fit": "bstune.__main__:fit",
    "record": "bstune.study.record:main",
    "sweep": "bstune.sweeps.harness:main",
}
HYDRAS_OWN = {
    *("--help", "-h", "--hydra-help", "--version", "--cfg", "-c", "--info", "-i", "--multirun", "-m", "--resolve"),
    *("--package", "-p", "--shell-completion", "-sc", "--config-path", "-cp", "--config-name", "-cn", "--run", "-r"),
}


def main() -> int:
    """Run the command in ``sys.argv`` and return its exit status: 0, 2 for a user's error, 130 if interrupted."""
    arguments = sys.argv[1:]
    verb = arguments.pop(0) if arguments and arguments[0] in VERBS else "tune"
    try:
        module, function = VERBS[verb].split(":")
        getattr(importlib.import_module(module), function)(arguments)
    except BstuneError as error:
        if any(argument.lower() in ("debug=true", "debug=1") for argument in arguments):
            raise
        return explain(error)
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return Interrupted.exit_status
    return 0


def explain(error: BstuneError) -> int:
    """Write an error as plain lines, without passwords, and return its exit status."""
    sys.stderr.write(f"error: {redact(str(error))}\n")
    return error.exit_status


def tune(arguments: list[str]) -> None:
    """Run a study, or one trial; or do what is asked of Hydra's command line."""
    names = {argument.split("=", 1)[0].lstrip("+~") for argument in arguments}
    if not names & HYDRAS_OWN and not any(name.startswith("hydra.") for name in names):
        # a replayed study must not wait for what trains
        from bstune.study.prepare import compose_checked

        config = compose_checked(arguments)
        parsed = parse(arguments)
        folder = ["--config-dir", str(Path(parsed.config_dir).absolute())] if parsed.config_dir else []
        return run(config, [*folder, *parsed.overrides])
    arguments = with_choices(without_plus(arguments))
    if names & {"--help", "-h"} and "workload" not in names:
        arguments.append("workload=digits")  # the help shows a config, which is one of a workload
    sys.argv = [sys.argv[0], *arguments]  # Hydra reads it
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises what it would print, so that it ends as everything else
    try:
        _hydra_main()
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(plain_error(error)) from error


@hydra.main(version_base=HYDRA_VERSION, config_path=f"pkg://{CONFIG_MODULE}", config_name=CONFIG_NAME)
def _hydra_main(config: DictConfig) -> None:
    """Run one of Hydra's jobs; a launcher may run it in a process of its own, so errors end here."""
    from bstune.trial.replay import complete  # as above

    try:
        run(validate(config, complete=complete), _job_arguments())
    except BstuneError as error:
        if config.get("debug"):
            raise
        sys.exit(explain(error))


def _job_arguments() -> list[str]:
    """Return the arguments that give the running Hydra job's config again, from any folder."""
    hydra_config = HydraConfig.get()
    arguments = []
    for source in hydra_config.runtime.config_sources:
        if source.provider == "command-line":
            arguments += ["--config-dir", str(Path(source.path).absolute())]
    if hydra_config.job.config_name != CONFIG_NAME:
        arguments += ["--config-name", str(hydra_config.job.config_name)]
    return [*arguments, *hydra_config.overrides.task]


def run(config: DictConfig, arguments: Sequence[str]) -> None:
    """Run the study, or the one trial, of a validated config; the arguments give that config again."""
    quieten(training=not is_replayed(config))
    # optuna, rich and, to train, lightning: not for --help or a mistake
    from rich.console import Console

    from bstune.study.prepare import prepare
    from bstune.study.run import run_single, run_study

    try:
        console = Console()
        prepared = prepare(config, lambda line: console.print(line, highlight=False, soft_wrap=True))
        if prepared.trial is None:
            run_study(prepared, arguments, console)
        else:
            run_single(prepared, prepared.trial, console)
    except (KeyboardInterrupt, SystemExit) as error:  # Lightning turns the first into the second
        raise Interrupted(
            "interrupted: every finished trial is stored; the same command continues the study"
        ) from error


def worker(arguments: list[str]) -> None:
    """Join a study that another process has begun, and run trials of it."""
    if not arguments or {"--help", "-h"} & set(arguments):
        sys.stdout.write(
            "usage: bstune worker storage=URL study=NAME [OPTION=VALUE ...]\n\n"
            "Runs trials of a study that bstune tune began, on this machine or another one, until none is left.\n"
            "Its options are those of the study; give those that this machine has its own of: data.root, device,\n"
            "output, search.workers. Start as many as you like; the process that began the study reports.\n"
        )
        return
    # optuna: not for --help
    from rich.console import Console

    from bstune.study.prepare import compose_checked, prepare
    from bstune.study.run import run_worker
    from bstune.study.storage import ARGUMENTS, find_study

    given = dict(argument.split("=", 1) for argument in arguments if "=" in argument)
    if not {"storage", "study"} <= given.keys():
        got = " ".join(arguments)
        raise ConfigError(f"bstune worker needs storage=URL and study=NAME of the study to join, but got {got}")
    try:
        url = expand_home(given["storage"])
    except ValueError as error:
        raise ConfigError(f"storage: {error}") from error
    study = find_study(given["study"], url)
    config = compose_checked([*study.user_attrs[ARGUMENTS], *arguments])
    quieten(training=not is_replayed(config))
    console = Console()
    run_worker(prepare(config, lambda line: console.print(line, highlight=False, soft_wrap=True)), study, console)


def fit(arguments: list[str]) -> None:
    """Print the fit of a CSV file of points as JSON."""
    from bstune.core.curve import fit_curve, read_points  # scipy, which a mistake need not wait for

    parser = argparse.ArgumentParser(prog="bstune fit", description="Fits S*(B) = S_min (1 + B_crit/B) to points.")
    parser.add_argument("points", type=Path, help="CSV file: batch_size, steps, and optionally censored (0 or 1)")
    print(dump_json(asdict(fit_curve(read_points(parser.parse_args(arguments).points))), indent=2))


if __name__ == "__main__":
    sys.exit(main())
