"""The command line: ``python -m bstune [VERB] ...``; a table maps each verb to a function."""

import argparse
import gc
import importlib
import os
import signal
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

from bstune import __version__
from bstune.core.errors import BstuneError, InputError, Interrupted, print_error
from bstune.system.interruption import interruptible

HELP = """\
usage: python -m bstune [tune] +workload=NAME [OPTION=VALUE ...] [--json]
       python -m bstune +workload=NAME trial.batch_size=B trial.lr=LR
       python -m bstune lightning [main.py] config.yaml [--model.KEY=VALUE ...]
                        [lr_key=model.init_args.lr] [OPTION=VALUE ...]
       python -m bstune worker storage=URL study=NAME [OPTION=VALUE ...]
       python -m bstune survey +workload=NAME [OPTION=VALUE ...] [--json]
       python -m bstune report FOLDER [target='val/loss <= 0.2']
                        [budget.seconds=30] [--json]
       python -m bstune compare FOLDER FOLDER ... [--over parameters]
                        [--values STUDY=SIZE ...] [--output FOLDER] [--json]
       python -m bstune sweep [NAME [SETTING=VALUE ...]]

tune       find the batch size and learning rate that reach the target fastest
lightning  tune what LightningCLI builds from a file, or from main.py and a file
worker     train trials of a study that another process began in that storage
survey     measure which batch sizes fit, their step times and the roofline
report     print a study's answer again, or its answer for another target or
           budget
compare    print studies side by side; --output also writes a page and a figure
sweep      reproduce a published experiment; without a name: list them

tune is the default verb. The same command continues a study. With
trial.batch_size and trial.lr it trains once, without a study.

-m                run one study for each combination of listed values, such as
                  seed=0,1
--json            print the result as JSON instead of the answer
--config-dir DIR  folder in which your own workload/NAME.yaml lies
--cfg job         print the composed config with all defaults, and end
--version, --help

Options, the same on the command line, in a workload's file and in Python:
"""


def tune(arguments: Sequence[str], *, lightning: bool = False) -> int:
    """Run a study, or one trial of it."""
    as_json, rest = _take_flag(arguments, "--json")
    began = time.monotonic()
    from bstune.config import compose

    composed = compose(rest, lightning=lightning)
    if composed.show:
        print(composed.yaml, end="")
        return 0
    print(f"bstune {__version__}: {composed.options.workload}", file=sys.stderr, flush=True)
    options = composed.options
    is_one_run = options.trial.pair is not None
    with ExitStack() as stack:
        begun = None
        if not is_one_run:
            from bstune.study.begin import begin

            begun = begin(options, began, trains=composed.recipe is not None)
            stack.callback(begun.close)
        from bstune.report.answer import files_row, one_run, took_row
        from bstune.run_study import run_study

        workload = composed.workload()
        if is_one_run:
            from bstune.study.once import train_once

            record = train_once(options, workload)
            print(record.model_dump_json() if as_json else one_run(record))
            return 0
        result = run_study(options, workload, begun)
    if as_json:
        print(result.model_dump_json(indent=1))
    else:
        took = took_row(result, time.monotonic() - began)
        print(result, "", files_row(result.folder), took, sep="\n")
    return 0


def report(arguments: Sequence[str]) -> int:
    """Print the answer of a study's folder, or what its trials say of another question."""
    as_json, rest = _take_flag(arguments, "--json")
    if not rest or "=" in rest[0] or not all("=" in argument for argument in rest[1:]):
        raise InputError(
            f"report takes one folder and a question, such as target=0.2, but got "
            f"{' '.join(rest) or 'none'}"
        )
    from bstune.result import ask_again, load
    from bstune.system.files import StudyFolder

    folder = Path(rest[0])
    given = _nested_question(rest[1:])
    has_ended = StudyFolder(folder).result.exists()
    result = load(folder) if has_ended and not given else ask_again(folder, given)
    if not has_ended:
        print("the study has not ended: this is what its trials say so far", file=sys.stderr)
    print(result.model_dump_json(indent=1) if as_json else result)
    return 0


def compare(arguments: Sequence[str]) -> int:
    """Print studies beside each other, and write the page where one is asked for."""
    from bstune.result import compare as compared

    given = _compare_arguments(arguments)
    comparison = compared(given.folders, over=given.over, values=dict(given.values) or None)
    print(comparison.model_dump_json(indent=1) if given.json else comparison)
    if given.output is not None:
        from bstune.report.answer import Row
        from bstune.report.compare_page import write

        write(comparison, given.output)
        print(f"\n{Row('Files', str(given.output))}", file=sys.stderr)
    return 0


def _compare_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """The folders and the options of ``compare``.

    Raises:
        InputError: argparse takes them for wrong.
    """
    parser = argparse.ArgumentParser("bstune compare", add_help=False, exit_on_error=False)
    parser.add_argument("folders", nargs="*", type=Path)
    parser.add_argument("--over")
    parser.add_argument("--values", nargs="+", type=_study_size, default=[], metavar="STUDY=SIZE")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--json", action="store_true")
    try:
        given, unknown = parser.parse_known_args(arguments)
    except argparse.ArgumentError as error:
        raise InputError(f"compare: {error}") from error
    if unknown or not given.folders:
        got = unknown[0] if unknown else "nothing"
        raise InputError(f"compare takes folders, --over, --values and --output, but got {got}")
    return given


def _study_size(text: str) -> tuple[str, float]:
    """A study's name and its size, of ``NAME=SIZE``; argparse tells a ValueError."""
    name, _, size = text.partition("=")
    return name, float(size)


def survey(arguments: Sequence[str]) -> int:
    """Measure what the machine allows a workload, or read what was measured before."""
    as_json, rest = _take_flag(arguments, "--json")
    from bstune.config import compose

    composed = compose(rest)
    print(f"bstune {__version__}: survey of {composed.options.workload}", file=sys.stderr)
    from bstune.report.hardware import survey_text
    from bstune.study.once import survey_once

    found, was_kept = survey_once(composed.options, composed.workload())
    print(found.model_dump_json(indent=1) if as_json else survey_text(found, was_kept))
    return 0


# Several studies, as Hydra calls it.
MANY = {"-m", "--multirun"}


def worker(arguments: Sequence[str]) -> int:
    """Train trials of a study that another process began."""
    print(f"bstune {__version__}: worker", file=sys.stderr, flush=True)
    from bstune.join import join

    join(arguments)
    return 0


def sweep(arguments: Sequence[str]) -> int:
    """Run a sweep, or list them."""
    # They stand above the command line, which imports none of them by name.
    importlib.import_module("bstune.sweeps.command").command(arguments)
    return 0


VERBS: dict[str, Callable[[Sequence[str]], int]] = {
    "tune": tune,
    "lightning": partial(tune, lightning=True),
    "worker": worker,
    "survey": survey,
    "report": report,
    "compare": compare,
    "sweep": sweep,
}


def main(arguments: Sequence[str]) -> int:
    """Run a command line; its status is 2 for a mistake, 1 for user code that fails, or 0."""
    if not arguments or "--help" in arguments or "-h" in arguments:
        print(HELP + _options_help())
        return 0
    if "--version" in arguments:
        print(__version__)
        return 0
    verb, rest = "tune", list(arguments)
    is_option = "=" in rest[0] or rest[0].startswith("-")
    if not is_option:
        verb = rest.pop(0)
    return run(verb, rest)


def run(verb: str, arguments: Sequence[str]) -> int:
    """Run a verb, and print an error of bstune's in place of raising it; the status."""
    try:
        if verb not in VERBS:
            from bstune.system.console import guess

            meant = guess(verb, VERBS)
            hint = f"did you mean {meant}?" if meant else "python -m bstune --help lists them"
            raise InputError(f"there is no verb {verb}: {hint}")
        with interruptible():
            if MANY & set(arguments):
                return run_many(verb, [one for one in arguments if one not in MANY])
            return VERBS[verb](arguments)
    except (BstuneError, Interrupted) as error:
        return print_error(error, with_traceback="debug=true" in arguments)


def run_many(verb: str, arguments: Sequence[str]) -> int:
    """Run a verb of ``-m`` for each study in turn, also where one fails; the worst status.

    The first rows of their answers stand below the last.
    """
    from bstune.config import jobs_of_sweep

    statuses, folders = [], []
    for folder, job in jobs_of_sweep(arguments).items():
        statuses.append(run(verb, job))
        folders.append(Path(folder))
        if statuses[-1] == Interrupted.exit_status:
            break
    if "--json" not in arguments:
        print(*map(_first_row, folders), sep="\n")
    return max(statuses)


def _first_row(folder: Path) -> str:
    """A study's folder and, below it, line 1 of its answer; or that it has none."""
    from bstune.report.answer import answer
    from bstune.result import load
    from bstune.system.files import StudyFolder

    if not StudyFolder(folder).result.exists():
        return f"{folder}: no answer"
    first, *_ = answer(load(folder))
    return f"{folder}\n{first}"


def command() -> None:
    """Run the console script ``bstune``."""
    # Before a verb and while Python ends, too, Ctrl-C leaves no traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        status = main(sys.argv[1:])
        print(end="", flush=True)
    # A full disk, or a reader such as ``head`` that has what it wants.
    except OSError as error:
        status = 0
        if not isinstance(error, BrokenPipeError):
            print(error, file=sys.stderr)
            status = 2
        # At its end Python flushes once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    # Python's last look for garbage takes a second, as MLflow's modules are many.
    gc.freeze()
    sys.exit(status)


def _take_flag(arguments: Sequence[str], flag: str) -> tuple[bool, list[str]]:
    """Whether a flag is given, and the arguments without it."""
    return flag in arguments, [argument for argument in arguments if argument != flag]


def _nested_question(arguments: Sequence[str]) -> dict[str, Any]:
    """Nest what ``report`` asks of a study: ``target=0.2``, ``budget.seconds=30``."""
    given: dict[str, Any] = {}
    budget = {}
    for argument in arguments:
        name, _, text = argument.partition("=")
        value: float | str = text
        with suppress(ValueError):
            value = float(text)
        if name.startswith("budget."):
            budget[name.removeprefix("budget.")] = value
        else:
            given[name] = value
    return given | ({"budget": budget} if budget else {})


def _options_help() -> str:
    """Each option with its line of meaning, in 80 columns."""
    from bstune.options import option_meanings

    lines = []
    for name, meaning in option_meanings():
        lines.append(
            textwrap.fill(meaning, 80, initial_indent=f"  {name:<21} ", subsequent_indent=" " * 24)
        )
    return "\n".join(lines)


if __name__ == "__main__":
    command()
