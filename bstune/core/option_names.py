"""How an option is written: on the command line, in a call of ``bstune.Study``, and in a sweep.

Texts name options as the command line takes them. A study of Python objects shows them through
:func:`in_python`, and a sweep of Hydra's through :func:`in_hydra`:

>>> in_python("search.trials=128 looks further")
'trials=128 looks further'
>>> in_python("measure again with hardware.refresh=true")
"measure again with options=['hardware.refresh=true']"
>>> in_hydra("search.trials=128 looks further")
'hydra.sweeper.n_trials=128 looks further'
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from bstune.core.search_space import OVERRIDE_LR

# The options that arguments of Study set, by the argument's name.
ARGUMENT_OPTIONS = {
    "name": "study",
    "objective": "search.objective",
    "trials": "search.trials",
    "seconds": "search.seconds",
    "wall_seconds": "search.wall_seconds",
    "workers": "search.workers",
    "precision": "precision",
    "device": "device",
    "seed": "seed",
    "output": "output",
    "storage": "storage",
    "survey": "hardware.enabled",
    "override_lr": OVERRIDE_LR,
    "mlflow": "mlflow.enabled",
}
# Options that end a study by its seconds.
TIMED = ("search.seconds=", "search.wall_seconds=", "quick=true")
# The parts of Study's arguments that options set, by the option's name on the command line.
PART_ARGUMENTS = {
    "workload.batch_size": "batch_sizes",
    "workload.batch_size.low": "batch_sizes[0]",
    "workload.batch_size.high": "batch_sizes[1]",
    "workload.reference.batch_size": "reference[0]",
    "workload.reference.lr": "reference[1]",
    "search.batch_size.low": "batch_sizes[0]",
    "search.batch_size.high": "batch_sizes[1]",
    "scaling.batch_size": "reference[0]",
    "scaling.lr": "reference[1]",
    "workload.target.value": "target",
    "workload.target.mode": "target",
    "budget.steps": "budget",
    "budget.examples": "budget",
}
# The keys below hydra.sweeper that set options, by the option's name on the command line.
SWEEPER = "hydra.sweeper"
SWEEPER_KEYS = {
    "budget.examples": "budget.examples",
    "budget.steps": "budget.steps",
    "search.objective": "objective",
    "search.trials": "n_trials",
    "search.workers": "n_jobs",
    "scaling.batch_size": "reference",
    "scaling.lr": "reference",
    "workload.reference.batch_size": "reference",
    "workload.reference.lr": "reference",
    "workload.target.mode": "mode",
    "workload.target.value": "target",
}
# The ends of a range are no keys of their own there.
SWEEPER_RANGES = {
    "search.batch_size.low": "low end of the batch size in hydra.sweeper.params",
    "search.batch_size.high": "high end of the batch size in hydra.sweeper.params",
}
# What the names of further options begin with.
SECTIONS = (
    "budget",
    "hardware",
    "mlflow",
    "protocol",
    "sampler",
    "scaling",
    "search",
    "trainer",
    "workload",
)
# Other names of this section are attributes of a loop's trial, such as trial.max_steps.
OPTIONS_OF_TRIAL = {"trial.batch_size", "trial.lr", "trial.seed", "trial.total_steps"}
# An option with its value, or alone, that stands neither in quotes nor in a path or a longer name.
OPTION = re.compile(
    r"(?<![\w./'\"\[])(?P<name>[a-z_]+(?:\.[a-z_][a-z0-9_]*)+)\b(?![\w/(])"
    r"(?:=(?P<value>[^\s,;:()]*[^\s,;:().]))?"
)
# Both ends of a trial in a row are one argument.
BUDGET = re.compile(r"budget\.steps=(\d+) budget\.examples=(\d+)")
WORDS = {"true": "True", "True": "True", "false": "False", "False": "False", "null": "None"}


@dataclass(frozen=True)
class PythonTerms:
    """The parts of a study's arguments that one option alone does not tell.

    Args:
        metric: the target's metric.
        sign: between the metric and its value, ``<=`` or ``>=``.
        batch_size: the reference's.
    """

    metric: str
    sign: str
    batch_size: int


def in_python(text: str, terms: PythonTerms | None = None) -> str:
    """Rewrite the options in a text as arguments of a call of :class:`bstune.Study`.

    An option for which there is no argument goes into the argument ``options``.

    Args:
        text: with options as the command line takes them, such as ``search.trials=128``.
        terms: the study's metric, sign and reference batch size, without which a target and a
            learning rate cannot be written; None: these options go into ``options``, too.
    """
    # This option has no section, by which the others are found.
    named = text.replace("study=NAME", "name=NAME")
    # These two options are one argument.
    named = named.replace("budget.steps or budget.examples", "budget")
    # A study of Python objects is begun by a call.
    named = named.replace("the same command", "the same call")
    budgets = BUDGET.sub(r"budget=bstune.Budget(steps=\1, examples=\2)", named)

    def argument(match: re.Match[str]) -> str:
        """Rewrite one option, with its value if it has one."""
        if match["value"] is None:
            return _argument_of(match["name"])
        return _option_with_value(match["name"], match["value"], terms) or match[0]

    return OPTION.sub(argument, budgets)


def in_hydra(text: str, terms: PythonTerms | None = None) -> str:
    """Rewrite the options in a text as overrides of an application whose sweeper is bstune's.

    Args:
        text: with options as the command line takes them, such as ``search.trials=128``.
        terms: the study's metric, sign and reference batch size, as for :func:`in_python`.
    """
    # This option has no section, by which the others are found.
    named = text.replace("study=NAME", f"{SWEEPER}.study_name=NAME")
    # These two options are one key.
    named = named.replace("budget.steps or budget.examples", f"{SWEEPER}.budget")

    def override(match: re.Match[str]) -> str:
        """Rewrite one option, with its value if it has one."""
        name = match["name"]
        if match["value"] is None:
            if name in SWEEPER_KEYS:
                return f"{SWEEPER}.{SWEEPER_KEYS[name]}"
            # An option that no key of the sweep sets keeps its name.
            return SWEEPER_RANGES.get(name, name)
        return _override_with_value(name, match["value"], terms) or match[0]

    return OPTION.sub(override, named)


def _override_with_value(name: str, value: str, terms: PythonTerms | None) -> str | None:
    """Write an option with its value as an override of a sweep; None if it is no option.

    What the shell would read is in quotes.
    """
    if terms is not None and name == "workload.target.value":
        goal = "" if value == "auto" else f"{terms.sign}{value}"
        return f"'{SWEEPER}.target=\"{terms.metric}{goal}\"'"
    if terms is not None and name == "scaling.lr":
        return f"'{SWEEPER}.reference=[{terms.batch_size},{value}]'"
    # A sweep runs jobs again on fresh seeds once it names the key by which a job takes its seed:
    # without that key no number of replicates has an effect.
    if name == "search.replicates":
        return f"{SWEEPER}.seed=KEY"
    key = SWEEPER_KEYS.get(name)
    # The value of an option is only a part of the key ``reference`` (a batch size and a rate), or
    # of ``target`` (a metric and its value). Such an option goes into ``options``.
    if key not in (None, "reference", "target"):
        return f"{SWEEPER}.{key}={value}"
    if _is_option(name):
        return f"'{SWEEPER}.options=[\"{name}={value}\"]'"
    return None


def _argument_of(option: str) -> str:
    """Give the argument of Study that sets an option (``search.trials``: ``trials``).

    It is the option itself if no argument sets it.
    """
    for argument, argument_option in ARGUMENT_OPTIONS.items():
        if argument_option == option:
            return argument
    return PART_ARGUMENTS.get(option, option)


def _option_with_value(name: str, value: str, terms: PythonTerms | None) -> str | None:
    """Write an option with its value as an argument of Study; None if it is no option.

    ``terms`` are the study's metric and reference, which some arguments need; None: these options
    go into ``options``.
    """
    if terms is not None and name == "workload.target.value":
        # A target without a value is the automatic one.
        goal = "" if value == "auto" else f"{terms.sign}{value}"
        return f'target="{terms.metric}{goal}"'
    if terms is not None and name == "scaling.lr":
        return f"reference=({terms.batch_size}, {value})"
    if name in ("budget.steps", "budget.examples"):
        return f"budget=bstune.Budget({name.removeprefix('budget.')}={value})"
    for argument, option in ARGUMENT_OPTIONS.items():
        if option == name:
            return f"{argument}={_python_value(value)}"
    if _is_option(name):
        return f"options=['{name}={value}']"
    return None


def _is_option(name: str) -> bool:
    """Whether a name that a text has with a value is an option's."""
    return name in OPTIONS_OF_TRIAL or name.split(".")[0] in SECTIONS


def _python_value(value: str) -> str:
    """Write an option's value, such as ``null`` or ``0.1``, as a Python literal."""
    try:
        float(value)
    except ValueError:
        return WORDS.get(value, repr(value))
    return value


def are_timed(options: Iterable[str]) -> bool:
    """Whether some options, written as on the command line, limit a study by seconds."""
    # Hydra's options may begin with + or ++.
    return any(str(option).lstrip("+").startswith(TIMED) for option in options)
