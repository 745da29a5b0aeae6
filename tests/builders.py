"""Options, recipes and what is built of them, from the arguments of a command line."""

from typing import TYPE_CHECKING

from bstune.options import StudyOptions
from bstune.recipe import Recipe
from bstune.study.prepare import PreparedStudy, compose_checked, prepare
from bstune.trial.backend import TrialBackend

if TYPE_CHECKING:
    from bstune.core.records import TrialProtocol
    from bstune.trial.loop import Workload


def options_of(*arguments: str) -> StudyOptions:
    """Compose the options alone."""
    return compose_checked(arguments).options


def options_and_recipe(*arguments: str) -> tuple[StudyOptions, Recipe]:
    """Compose the options and the recipe of a workload that is trained."""
    composed = compose_checked(arguments)
    return composed.options, composed.trained


def prepared_study(*arguments: str, backend: TrialBackend | None = None) -> PreparedStudy:
    """Prepare the study of a command line, on a backend of the test's own or the workload's."""
    composed = compose_checked(arguments)
    return prepare(composed.options, composed.recipe, backend=backend)


def loaded(*arguments: str) -> "tuple[Workload, TrialProtocol]":
    """Load the workload and the protocol of a command line, as a process that trains does."""
    # 4 s, which tests of replayed studies need not wait for.
    from bstune.trial.workload import load

    return load(*options_and_recipe(*arguments))


def resolved(*arguments: str) -> tuple[StudyOptions, Recipe]:
    """Compose the options and the recipe for this machine's device and precision."""
    from bstune.trial.workload import resolve

    return resolve(*options_and_recipe(*arguments))
