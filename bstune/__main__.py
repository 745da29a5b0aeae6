"""The command ``bstune [tune] | lightning | worker | survey | ...``, see VERBS, and how it ends.

A run composes its config once, by Hydra's compose API. The other uses of Hydra's own command line
(``--cfg``, ``--multirun``, ``hydra.*`` options, ...) are left to ``hydra.main``. Slow imports come
late, once an interruption ends in a line.
"""

import atexit
import faulthandler
import importlib
import io
import os
import re
import signal
import sys
import tempfile
import textwrap
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import (
    AbstractContextManager,
    contextmanager,
    nullcontext,
    redirect_stdout,
    suppress,
)
from dataclasses import asdict
from functools import partial
from importlib.metadata import version
from itertools import pairwise, takewhile
from pathlib import Path
from typing import TYPE_CHECKING

from bstune.core.clock import process_seconds
from bstune.core.errors import BstuneError, ConfigError, Interrupted, StudyError, UserCodeError
from bstune.core.option_names import are_timed
from bstune.core.search_space import OVERRIDE_LR
from bstune.system import interruption
from bstune.system.console import plain_console, quieten
from bstune.system.exits import is_interruption, os_exit_as_users_error, sys_exit_error
from bstune.system.failures import cause, described
from bstune.system.files import expand_home, full_disk, unusable_name
from bstune.system.inputs import one_line, open_regular, read_text
from bstune.system.loading import loading
from bstune.system.openmp import spin_shortly
from bstune.system.secrets import (
    redact_values,
    remember,
    remember_environment,
    secret_options,
)
from bstune.system.shipped import CONFIG_MODULE, workload_names
from bstune.system.terminal import ArgumentParser, filtered, printable, write_error, write_out
from bstune.system.user import name_user

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from bstune.config import Composed

# The function of each verb. It is called with the arguments after the verb; errors are raised.
VERBS = {
    "tune": "bstune.__main__:tune",
    "lightning": "bstune.__main__:lightning",
    "worker": "bstune.__main__:worker",
    "survey": "bstune.hardware.report:main",
    "fit": "bstune.__main__:fit",
    "report": "bstune.study.verbs.retarget:main",
    "compare": "bstune.__main__:compare",
    "extrapolate": "bstune.study.verbs.extrapolate:main",
    "record": "bstune.study.verbs.record:main",
    "branch": "bstune.study.verbs.branch:main",
    "sweep": "bstune.sweeps.harness:main",
}
JSON = "--json"
JSON_VERBS = ("tune", "lightning", "report", "fit", "extrapolate", "branch")
# The verbs that read studies, and what to give them.
STUDIES = "give studies' output folders, such as outputs/digits"
OF_STUDIES = {
    "report": "give a study's output folder, such as outputs/digits",
    "compare": STUDIES,
    "extrapolate": STUDIES,
}
HYDRAS_OWN = {
    *(
        "--help",
        "-h",
        "--hydra-help",
        "--version",
        "--cfg",
        "-c",
        "--info",
        "-i",
        "--multirun",
        "-m",
        "--resolve",
    ),
    *(
        "--package",
        "-p",
        "--shell-completion",
        "-sc",
        "--config-path",
        "-cp",
        "--config-name",
        "-cn",
        "--run",
        "-r",
    ),
}


MAY_BE_SECRET = re.compile("://|pass|pw|secret|token|auth|key|sig|cookie|cred|bearer|dsn|sas", re.I)
WITH_VALUE = {
    *(
        "--config-dir",
        "-cd",
        "--cfg",
        "-c",
        "--info",
        "-i",
        "--package",
        "-p",
        "--config-path",
        "-cp",
    ),
    *("--config-name", "-cn", "--shell-completion", "-sc"),
}
# The first words of a workload that was made of a LightningCLI's file.
MADE = "# Made by bstune lightning"
WRITTEN = "options are written NAME=VALUE; bstune --help shows the most useful ones"
# A line that ends with a backslash goes on in the next one.
HELP = """\
usage: bstune [tune] +workload=NAME [OPTION=VALUE ...]    a study: which batch size and learning \
rate to use
       bstune {verbs} --help

Examples
  bstune +workload=digits                                       a study of a minute or two, on a CPU
  bstune +workload=digits search.trials=100                     goes on with it
  bstune +workload=digits trial.batch_size=64 trial.lr=0.5      one trial instead of a study
  bstune --config-dir my_configs +workload=mine                 your own workload, \
my_configs/workload/mine.yaml
  bstune survey +workload=digits                                what the hardware allows, \
without a search
  bstune report outputs/digits target=0.12                      what its trials say of another \
target
  bstune compare outputs/*                                      studies side by side
  bstune extrapolate outputs/* --at examples=1e9                what they say of a larger scale

Options that matter most
  search.objective=time                                  time, steps, both, curve (the critical \
batch size) or loss
  search.trials=64 search.wall_seconds=600               how many configurations are tried; how \
long it may take
  search.batch_size.low=8 search.batch_size.high=1024    where it looks
  target=0.1                                             what has to be reached
  device=auto precision=32-true devices=1 sampler=frontier scaling=sqrt mlflow.enabled=true

Workloads: {workloads}
With --json standard output is the result alone. All options with their values:
bstune --cfg job +workload=NAME; Hydra's own: bstune --hydra-help.
"""


def command() -> None:
    """Run the command as a process of its own, which SIGINT and SIGTERM end within seconds.

    It never returns: it exits with the status of :func:`main`.
    """
    try:
        # The user's modules are found as with python -m. If the folder is gone, main() says so.
        if not sys.flags.safe_path and "" not in sys.path:
            with suppress(OSError):
                sys.path.insert(0, os.getcwd())
        # Both set environment variables, which must be there before torch is imported.
        spin_shortly(os.environ)
        name_user(os.environ)
        interruption.install()
        atexit.register(interruption.leave_last)
        for stream in (sys.stdout, sys.stderr):
            # A terminal may lack letters of a name.
            stream.reconfigure(errors="replace")  # type: ignore[union-attr]
        # A crash of the user's code in this process, as in the preflight, says where it was.
        faulthandler.enable()
        status = main()
    # An interruption may come just before main() handles it, or just after.
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        status = interruption.status() or Interrupted.exit_status
    # There is nothing left to clean up: from here on a signal may end the process at once.
    for number in interruption.SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    # After an interruption nothing is waited for, not even exit functions.
    if interruption.received is not None:
        sys.stdout.flush()
        interruption.leave(status)
    # leave_last, which runs after the other exit functions, ends the process with it.
    interruption.last_status = status
    sys.exit(status)


def main() -> int:
    """Run the command in ``sys.argv``, and give its exit status.

    It is 0; 1 for an error of the user's code, or a fault of bstune's; 2 for options and files that
    cannot be used; 130 or 143 if interrupted.
    """
    arguments = sys.argv[1:]
    if arguments == ["--version"]:
        write_out(f"bstune {version('bstune')}")
        return 0
    verb = arguments.pop(0) if arguments and arguments[0] in VERBS else "tune"
    try:
        # The verb's function is imported only when it is called.
        module, function = VERBS[verb].split(":")
        _check_working_directory()
        remember_environment()
        check_secrets(arguments)
        check_paths(verb, arguments)
        with _json_on_stdout(verb, arguments) as write_json, filtered(), os_exit_as_users_error():
            write_json(getattr(importlib.import_module(module), function)(arguments))
    except Interrupted as error:
        explain(error)
        return interruption.status() or error.exit_status
    except BaseException as error:
        status = interruption.status()
        # A library may have made another error of an interruption.
        if status is not None or isinstance(error, KeyboardInterrupt):
            sys.stderr.write("interrupted\n")
            return status or Interrupted.exit_status
        if isinstance(error, SystemExit):
            message, frames = described(sys_exit_error(error))
            # The exit is argparse's own, as after --help.
            if not frames:
                raise
            error = UserCodeError(
                f"the user's code ended the command: {message}\n{frames}".rstrip()
            )
        if not isinstance(error, Exception):
            raise
        debug = any(argument.lower() in ("debug=true", "debug=1") for argument in arguments)
        # A full disk, or a name that no file can have, gets an error in plain words.
        return explain(full_disk(error) or unusable_name(error) or error, debug)
    return 0


@contextmanager
def _json_on_stdout(verb: str, arguments: list[str]) -> Iterator[Callable[[str | None], None]]:
    """Take ``--json`` out of the arguments, and yield the function that takes a verb's JSON.

    With ``--json`` standard output gets the JSON alone. All that is printed within the ``with``
    block, by other processes too, goes to standard error. Without it the JSON is dropped.
    """
    if JSON not in arguments:
        yield lambda text: None
        return
    if verb not in JSON_VERBS:
        raise ConfigError(f"{JSON} is of {', '.join(JSON_VERBS)}: leave it out")
    arguments.remove(JSON)
    texts = list[str | None]()
    sys.stdout.flush()
    stdout_copy = os.dup(1)
    # Other processes print to where this process's descriptor leads.
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield texts.append
    finally:
        os.dup2(stdout_copy, 1)
        os.close(stdout_copy)
    text = texts[0]
    if text is None:
        raise ConfigError(f"there is no JSON of this: {JSON} is of one study or one trial")
    write_out(text.rstrip())


def _check_working_directory() -> None:
    """Refuse to run where relative paths lead nowhere."""
    try:
        os.getcwd()
    except OSError as error:
        raise StudyError(
            f"the working directory cannot be found ({error.strerror}): change to one that exists"
        ) from error


def explain(error: Exception, debug: bool = False) -> int:
    """Write an error, and give its exit status.

    An error of bstune's is written as plain lines, any other one, or with ``debug``, as a
    traceback. An interruption is no error.
    """
    if isinstance(error, Interrupted):
        write_error(str(error))
    elif isinstance(error, BstuneError) and not debug:
        write_error(f"error: {error}")
    else:
        write_error("".join(traceback.format_exception(error)))
    return error.exit_status if isinstance(error, BstuneError) else 1


def check_secrets(arguments: Sequence[str]) -> None:
    """Refuse a password or token among the arguments.

    All users of the machine can read a command line, and its shell keeps it.
    """
    suspicious = [argument for argument in arguments if MAY_BE_SECRET.search(argument)]
    if not suspicious:
        return
    # Hydra takes a quarter of a second to import.
    from bstune.config import secret_option

    for option in map(secret_option, suspicious):
        # None: the argument holds no secret. An empty text: it does, and is no option.
        if option is None:
            continue
        variable = "BSTUNE_" + re.sub(r"\W+", "_", option or "secret").upper()
        in_place = f"${{oc.env:{variable}}}"
        if option:
            in_place = f"{option}={in_place}"
        raise ConfigError(
            f"{option or 'an argument'} holds a password or token, which others read from a "
            "command line (ps): put the whole value into an environment variable, such as "
            f"{variable}, and give '{in_place}' in its place"
        )


def check_paths(verb: str, arguments: Sequence[str]) -> None:
    """Refuse a path that is not there before a verb imports its libraries, which takes seconds.

    These are the paths before all options. The verb itself checks those that stand elsewhere.
    """
    paths = list[str]()
    for argument in takewhile(lambda argument: not argument.startswith("-"), arguments):
        # target=VALUE may stand among studies.
        if "=" not in argument:
            paths.append(argument)
    if verb == "lightning" and paths:
        os.close(open_regular(Path(paths[0]), "the config file"))
    if verb not in OF_STUDIES:
        return
    for path in paths:
        try:
            os.lstat(path)
        except FileNotFoundError as error:
            raise StudyError(f"there is no {one_line(path)}: {OF_STUDIES[verb]}") from error
        # The verb tells why it cannot read what is there.
        except OSError:
            continue


def check_words(arguments: Sequence[str]) -> None:
    """Refuse arguments that are neither NAME=VALUE nor Hydra's own.

    The ConfigError names the nearest verb, workload or option.
    """
    # Hydra takes a quarter of a second to import.
    from bstune.config import nearest, option_names

    for previous, argument in pairwise(["", *arguments]):
        is_hydras = previous in WITH_VALUE or argument in HYDRAS_OWN | WITH_VALUE
        if is_hydras or "=" in argument or argument.startswith("~"):
            continue
        if argument in VERBS:
            raise ConfigError(
                f"unknown word {argument}: a verb stands before all else, as in bstune {argument} "
                "..."
            )
        word = argument.lstrip("-+")
        options = [f"{name}=VALUE" for name in nearest(word.replace("-", "_"), option_names())]
        names = list[str]()
        # A verb stands first.
        if argument is arguments[0]:
            names += [f"bstune {verb}" for verb in nearest(word, VERBS)]
        names += [f"+workload={name}" for name in nearest(word, workload_names())]
        kind = "word"
        meant = names or options
        if argument.startswith("-"):
            kind = "option"
            meant = options or names
        question = f": did you mean {' or '.join(meant)}?" if meant else ""
        raise ConfigError(f"unknown {kind} {argument}{question}\n{WRITTEN}")


def tune(arguments: list[str]) -> str | None:
    """Run a study or one trial, and give its JSON; or leave the arguments to Hydra's command line.

    None where Hydra's command line or the help was asked for.
    """
    names = {argument.split("=", 1)[0].lstrip("+~") for argument in arguments}
    if names & {"--help", "-h"}:
        verbs = " | ".join(verb for verb in VERBS if verb != "tune")
        workloads = textwrap.fill(", ".join(workload_names()), 90, subsequent_indent=" " * 11)
        sys.stdout.write(HELP.format(verbs=verbs, workloads=workloads))
        return None
    # Hydra takes half a second to import, which the help need not wait for.
    from bstune.config import expand_shorthands, parse, quote_for_hydra

    check_words(arguments)
    if names & HYDRAS_OWN or any(name.startswith("hydra.") for name in names):
        _run_hydra(names, quote_for_hydra(expand_shorthands(arguments)))
        return None
    write_out(f"bstune: reading {_workload_named(arguments)}")
    # compose_checked of bstune.study does the same, but it would import optuna and scipy. They take
    # seconds, which a refusal need not wait for.
    from bstune.config import compose
    from bstune.trial.replay import options_from_table

    composed = compose(arguments, from_table=options_from_table)
    # The study's other processes compose the config again, by the same arguments. Their working
    # directory may be another one.
    parsed = parse(arguments)
    same_arguments = list(parsed.overrides)
    if parsed.config_dir:
        same_arguments = ["--config-dir", str(Path(parsed.config_dir).absolute()), *same_arguments]
    return run(composed, same_arguments)


def _run_hydra(names: set[str], arguments: Sequence[str]) -> None:
    """Run Hydra's own command line, such as ``--cfg job`` or ``--multirun``.

    Secrets are left out of what Hydra prints. ``names`` are the arguments without their values.
    """
    # Hydra reads the arguments from there.
    sys.argv = [sys.argv[0], *arguments]
    # With it Hydra raises its errors, which are then explained as bstune's are. Else it would print
    # them itself, and exit.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    # Hydra takes a quarter of a second to import.
    import hydra
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    from bstune import hydra_versions
    from bstune.config import CONFIG_NAME, config_shown, plain_error

    hydra_main = hydra.main(
        config_path=f"pkg://{CONFIG_MODULE}",
        config_name=CONFIG_NAME,
        **hydra_versions.VERSION_ARGUMENTS,
        **hydra_versions.ALLOW_ALL_TARGETS_OF_MAIN,
    )
    # What Hydra prints of a config may hold passwords; what its jobs print is shown as it comes.
    printed = io.StringIO()
    output: AbstractContextManager[object] = redirect_stdout(printed)
    is_multirun = bool(names & {"--multirun", "-m"})
    # Options alone, such as hydra.run.dir, run one job. With its other flags, such as --cfg, Hydra
    # only prints.
    if is_multirun or not names & HYDRAS_OWN:
        output = nullcontext()
    try:
        with output:
            hydra_main(_job)()
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(plain_error(error)) from error
    except BstuneError:
        raise
    # A job ends by sys.exit: this error is of Hydra's own options, such as hydra.run.dir.
    except Exception as error:
        raise ConfigError(f"Hydra cannot run with these options: {cause(error)}") from error
    finally:
        sys.stdout.write(printable(config_shown(printed.getvalue())))


def _workload_named(arguments: Sequence[str]) -> str:
    """Name the workload in the arguments, for a line that is written before Hydra is imported."""
    for argument in arguments:
        name, _, value = argument.lstrip("+").partition("=")
        if name == "workload":
            return f"the workload {value}"
    return "the options"


def _job(config: "DictConfig") -> None:
    """Run one of the jobs of Hydra's command line, and exit with its status on an error.

    A launcher may run it in a process of its own, so errors end here.
    """
    # Hydra, which it imports, runs this job, and so is imported by now.
    from bstune.config import groups_in, parse, validate
    from bstune.trial.replay import options_from_table

    try:
        with filtered():
            arguments = _job_arguments()
            groups = groups_in(parse(arguments).config_dir)
            # validate changes the config that it is given, and this one is Hydra's.
            copy = config.copy()
            run(
                validate(copy, from_table=options_from_table, groups=groups, arguments=arguments),
                arguments,
            )
    # All errors are caught, as Hydra would print the job's options with them.
    except Exception as error:
        # A library may have made this error of an interruption, which main() then reports.
        if interruption.status() is not None and not isinstance(error, BstuneError):
            raise KeyboardInterrupt from error
        sys.exit(explain(full_disk(error) or error, bool(config.get("debug"))))


def _job_arguments() -> list[str]:
    """Give the arguments that compose the running Hydra job's config again, from any folder."""
    # Hydra runs this job, and so is imported by now.
    from hydra.core.hydra_config import HydraConfig

    from bstune.config import CONFIG_NAME

    hydra_config = HydraConfig.get()
    arguments = []
    for source in hydra_config.runtime.config_sources:
        # Hydra calls the folder of --config-dir so.
        if source.provider == "command-line":
            arguments += ["--config-dir", str(Path(source.path).absolute())]
    if hydra_config.job.config_name != CONFIG_NAME:
        arguments += ["--config-name", str(hydra_config.job.config_name)]
    return [*arguments, *hydra_config.overrides.task]


def run(composed: "Composed", arguments: Sequence[str]) -> str:
    """Run the study, or the one trial, that was composed, and give its JSON.

    ``arguments`` are those of a command line that compose it again, in other processes.
    """
    options = composed.options
    is_trained = composed.recipe is not None
    if composed.recipe is not None:
        # It imports Hydra, which the help need not wait for.
        from bstune.study.early_checks import check_early, check_takes_rate

        # What can be refused without torch is refused before torch is imported.
        composed.recipe.check_targets()
        check_takes_rate(options, composed.recipe)
        check_early(options, write_out)
    try:
        with loading(training=is_trained):
            if is_trained and options.trial.batch_size is None and options.search.workers > 0:
                # It imports multiprocessing, which the help need not wait for.
                from bstune.trial.processes.fork_server import start_server

                # The server imports torch and Lightning for the trials' processes, which takes 3 s,
                # while this process imports them for itself.
                start_server()
            quieten(training=is_trained)
            # Optuna, Rich and, to train, Lightning take 4 s and more: help does not wait.
            from bstune.study.study import Study

        study = Study.from_composed(composed, arguments)
        # The study's wall time counts from the start of this process on.
        result = study.run_on(plain_console(), elapsed=process_seconds)
    except (KeyboardInterrupt, SystemExit) as error:
        if not is_interruption(error):
            raise
        raise Interrupted(interruption.text()) from error
    return result.to_json()


def worker(arguments: list[str]) -> None:
    """Join a study that another process has begun, and run trials of it."""
    if not arguments or {"--help", "-h"} & set(arguments):
        sys.stdout.write(
            "usage: bstune worker storage=URL study=NAME [OPTION=VALUE ...]\n\n"
            "Runs trials of a study that bstune tune began, on this machine or another one, "
            "until none is left.\n"
            "Its options are those of the study; give those that this machine has its own of: "
            "data.root, device,\n"
            "output, search.workers. Start as many as you like; the process that began the study "
            "reports.\n"
        )
        return
    # It imports Hydra, which the help need not wait for.
    from bstune.config import resolved

    options = dict(argument.split("=", 1) for argument in arguments if "=" in argument)
    if not {"storage", "study"} <= options.keys():
        got = " ".join(arguments)
        raise ConfigError(
            f"bstune worker needs storage=URL and study=NAME of the study to join, but got {got}"
        )
    try:
        # It may be ${oc.env:...}.
        url = expand_home(resolved(options["storage"]))
    except (ConfigError, ValueError) as error:
        raise ConfigError(f"storage: {str(error).splitlines()[0]}") from error
    remember(url)
    # It imports Optuna and, to train, Lightning.
    from bstune.study.study import Study

    Study.join(options["study"], url, arguments, plain_console())


def _lightning_parser() -> ArgumentParser:
    """Make the parser of ``bstune lightning``."""
    parser = ArgumentParser(
        prog="bstune lightning",
        description=(
            "Tunes what a config file of LightningCLI trains. The file becomes a workload, written "
            "to bstune_conf/workload/, whose learning rate is the trial's; the data are read in "
            "batches of every size."
        ),
    )
    parser.add_argument(
        "config", type=Path, help="YAML file with trainer, model and data; - is standard input"
    )
    parser.add_argument(
        "--target",
        help=(
            "val_loss=0.1, 'val_loss<=0.1' or 'val_acc>=0.9'; or target=val_loss=0.1 (default: "
            "what the file's own configuration comes to)"
        ),
    )
    for section in ("model", "data"):
        parser.add_argument(
            f"--{section}",
            metavar="CLASS",
            help=f"the class of the {section}, where the file names none",
        )
    parser.add_argument(
        "--lr", metavar="KEY", help="the learning rate's key, where its name does not tell it"
    )
    parser.add_argument("--name", help="of the workload (default: the model's class)")
    parser.add_argument("overrides", nargs="*", metavar="OPTION=VALUE", help="options of bstune")
    return parser


def lightning(arguments: list[str]) -> str | None:
    """Make a workload of a config file of LightningCLI, tune it, and give the study's JSON."""
    options = _lightning_parser().parse_intermixed_args(arguments)
    if options.target is None:
        options.target, options.overrides = _target_among(options.overrides)
    if options.target is not None and "search.objective=loss" in options.overrides:
        raise ConfigError(
            "search.objective=loss seeks the best metric within a budget, and --target "
            f"{options.target} a target: leave one of them out"
        )
    # It imports PyYAML and Pydantic, which the help need not wait for.
    from bstune.trial.own_project.cli_file import Chosen, read_file

    named = {name: getattr(options, name) for name in ("target", "model", "data", "lr", "name")}
    chosen = Chosen(
        **named,
        is_timed=are_timed(options.overrides),
        overrides_lr=f"{OVERRIDE_LR}=true" in [option.lower() for option in options.overrides],
        options=tuple(options.overrides),
    )
    # What the file lacks is refused before the libraries are loaded.
    file = read_file(options.config, chosen)
    with loading(training=True):
        quieten()
        # Lightning takes 4 s to import.
        from bstune.study.prepare import compose_checked
        from bstune.system.files import write_text
        from bstune.trial.own_project.lightning_cli import workload_of

    workload, lines = workload_of(file)
    text = _workload_text(workload, options.config)
    written = Path("bstune_conf", "workload", f"{workload['name']}.yaml")
    if os.path.lexists(written) and not read_text(written, "the workload").startswith(MADE):
        raise ConfigError(
            f"{written} is there and was not made by bstune lightning: choose another name, --name "
            "NAME"
        )
    composed = [f"workload={workload['name']}", *options.overrides]
    # Mistakes are found before anything is written.
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "workload").mkdir()
        Path(folder, "workload", written.name).write_text(text, encoding="utf-8")
        compose_checked(["--config-dir", folder, *composed])
    written.parent.mkdir(parents=True, exist_ok=True)
    write_text(written, f"{MADE} {one_line(str(options.config))}.\n{text}")
    indented = [f"  {line}" for line in lines]
    write_out("\n".join([f"{written}, made of {options.config}:", *indented]))
    return tune(["--config-dir", str(written.parent.parent), *composed])


def _workload_text(workload: Mapping[str, object], config_file: Path) -> str:
    """Write a workload as YAML; ConfigError where ``config_file`` has put a secret into it."""
    # It is imported by now, to read the config file.
    from yaml import safe_dump

    secrets = secret_options(workload)
    if secrets:
        raise ConfigError(
            f"{config_file}: {', '.join(secrets)} holds a password or token, which would be "
            "written to the workload: put it into an environment variable, and refer to it in that "
            "file, ${oc.env:NAME}"
        )
    # A secret of the environment may be part of any other text.
    without_secrets = redact_values(workload)
    return str(safe_dump(without_secrets, sort_keys=False, default_flow_style=None, width=110))


def _target_among(overrides: Sequence[str]) -> tuple[str | None, list[str]]:
    """Give the value of the last ``target=...`` among options, and the other options.

    The value is None if there is no target among them.
    """
    target = None
    others = list[str]()
    for option in overrides:
        if option.startswith("target="):
            target = option.removeprefix("target=")
        else:
            others.append(option)
    return target, others


def fit(arguments: list[str]) -> str:
    """Print the fit of a CSV file of points as a sentence and a small table, and give its JSON."""
    # It imports scipy, which a mistake need not wait for.
    from bstune.core.curve import LAWS, fit_curve
    from bstune.core.points_file import parse_points
    from bstune.core.records import dump_json
    from bstune.report.fit import fit_lines

    parser = ArgumentParser(
        prog="bstune fit", description="Fits S*(B) = S_min (1 + B_crit/B + (B_opt/B)^2) to points."
    )
    parser.add_argument(
        "points",
        type=Path,
        help=(
            "CSV file, or - for standard input: batch_size, steps, and optionally stopped (0 or 1)"
        ),
    )
    parser.add_argument(
        "--law",
        choices=LAWS,
        default="auto",
        help="auto: the third term only where the points ask for it",
    )
    options = parser.parse_args(arguments)
    text = read_text(options.points, "the CSV file")
    points = parse_points(text, one_line(str(options.points)))
    curve = fit_curve(points, law=options.law)
    write_out("\n".join(fit_lines(curve)))
    return dump_json(asdict(curve), indent=2)


def _compare_parser() -> ArgumentParser:
    """Make the parser of ``bstune compare``."""
    parser = ArgumentParser(
        prog="bstune compare",
        description=(
            "Compares studies: steps to target, critical batch sizes and whether they differ, "
            "times to target. Writes comparison.html and comparison.png."
        ),
    )
    parser.add_argument(
        "studies",
        nargs="*",
        metavar="STUDY",
        help="a study's output folder, or its curve.json; target=VALUE: at another target",
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path(),
        metavar="FOLDER",
        help="of the two files (default: here)",
    )
    return parser


def compare(arguments: list[str]) -> None:
    """Compare studies: a page, a figure, and their numbers side by side."""
    # It imports numpy, which a mistake need not wait for.
    from bstune.report import compare as comparing
    from bstune.report.compare_console import write_comparison

    parser = _compare_parser()
    options = parser.parse_intermixed_args(arguments)
    target, paths = _target_among(options.studies)
    if not paths:
        parser.error("name studies, such as outputs/*")
    if target is None:
        studies, left_out = comparing.read_studies(paths)
    else:
        # Optuna and scipy take two seconds to import.
        from bstune.study.verbs.retarget import read_at_target

        read = partial(read_at_target, argument=f"target={target}")
        studies, left_out = comparing.read_studies(paths, read)
    write_comparison(comparing.compare(studies, left_out), options.output, plain_console())


if __name__ == "__main__":
    command()
