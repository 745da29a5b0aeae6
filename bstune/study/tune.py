"""``bstune.tune`` and ``bstune.survey``: what a study and a survey are in one call."""

import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ParamSpec

from bstune.core.errors import ConfigError
from bstune.core.records import Budget, Target
from bstune.study.result import Result
from bstune.study.study import Study, compose_objects, users_errors
from bstune.system.arguments import without_unknown_arguments
from bstune.system.exits import os_exit_as_users_error
from bstune.system.failures import without_own_frames
from bstune.system.loading import loading
from bstune.system.terminal import filtered
from bstune.system.watchdog import waiting_for
from bstune.trial.processes.messages import PICKLE_ERRORS

# torch and lightning take 4 s to import, and a name's import prints no line: the calls import them.
if TYPE_CHECKING:
    from bstune.hardware.survey import Survey
    from bstune.options import StudyOptions
    from bstune.recipe import Recipe
    from bstune.study.given import Data, Module

# A value that no metric meets.
UNMET = -1e15
# A survey only times steps: any small learning rate will do as its reference.
SMALL_LR = 1e-3
# The name of a survey in lines that say what is waited for.
SURVEY = "the survey of the hardware"

Arguments = ParamSpec("Arguments")


def _make_and_run(make_study: Callable[Arguments, Study]) -> Callable[Arguments, Result]:
    """Make the function that takes the arguments of ``make_study`` and runs the study it makes."""

    @without_own_frames
    def tune(*arguments: Arguments.args, **options: Arguments.kwargs) -> Result:
        """Search batch size and learning rate of a Lightning module; give the :class:`Result`.

        It is ``bstune.Study(...).run()``: the arguments and what is raised are those of
        :class:`bstune.Study` and its ``run``. The same call continues the study.
        """
        return make_study(*arguments, **options).run()

    # This is the signature that help() and editors show.
    tune.__signature__ = inspect.signature(make_study)  # type: ignore[attr-defined]
    return tune


tune = _make_and_run(Study)


@without_own_frames
@without_unknown_arguments
@loading(training=True)
def survey(
    *arguments: str,
    module: "Module | None" = None,
    data: "Data | None" = None,
    metric: str | None = None,
    batch_sizes: tuple[int, int] | None = None,
    trainer: Mapping[str, Any] | None = None,
) -> "Survey":
    """Measure what this machine allows for a workload: batch sizes that fit, seconds, roofline.

    Nothing is written but its cache. The workload is one that a config names,
    ``survey("workload=digits")``, or a module and data:

    >>> found = bstune.survey(  # doctest: +SKIP
    ...     "hardware.seconds=5",
    ...     module=MyModule,
    ...     data=MyData(32),
    ...     metric="val/accuracy",
    ...     batch_sizes=(8, 512),
    ... )
    >>> print(found.ceiling.batch_size)  # the largest that fits, of the range  # doctest: +SKIP
    >>> print(found.step_time(64.0))  # seconds  # doctest: +SKIP
    >>> print([(row.batch_size, row.seconds) for row in found.measured.timings])  # doctest: +SKIP

    Args:
        arguments: as on the command line: ``workload=NAME`` first, unless objects are given, then
            ``OPTION=VALUE``, such as ``device=cuda``, ``precision=bf16-mixed``,
            ``hardware.seconds=20`` or ``hardware.refresh=true`` (measures again).
        module: a function of a trial, or a class, as :func:`tune` takes it.
        data: as :func:`tune` takes it.
        metric: that the module logs in validation, which is evaluated too.
        batch_sizes: the smallest and the largest one to look at.
        trainer: further arguments of the Lightning Trainer.

    Returns:
        The survey: ``ceiling.batch_size`` in examples, ``step_time(B)`` in seconds, ``limits`` and
        ``cost`` of the roofline, ``notes`` with what could not be measured.

    Raises:
        ConfigError: for an argument that cannot be used, a workload that is answered from a table,
            or one that cannot be built.
        DataError: if the data cannot be read.
        HardwareError: if no batch size fits or runs, or the device is lost.
    """
    # torch and lightning take 4 s to import.
    from bstune.hardware.survey_cache import compose_survey
    from bstune.study.given import GivenObjects
    from bstune.trial.processes.restored import restored

    if module is None:
        composed = compose_survey(arguments)
        with waiting_for(SURVEY):
            return _survey_in_silence(composed.options, composed.trained_recipe)
    if data is None or metric is None or batch_sizes is None:
        stated = {"data": data, "metric": metric, "batch_sizes": batch_sizes}
        missing = [name for name, value in stated.items() if value is None]
        raise ConfigError(f"survey of a module needs {' and '.join(missing)} besides")
    # No trial is run: target, learning rate and budget, here one of steps alone, are any that a
    # study could have.
    given = GivenObjects(
        target=Target(metric, UNMET, "min"),
        batch_sizes=batch_sizes,
        reference=(batch_sizes[0], SMALL_LR),
        budget=Budget(steps=1000, examples=1),
        module=module,
        data=data,
        trainer=trainer,
        # The module need not take a rate, as a survey compares none.
        overrides_lr=True,
    )
    with restored(), filtered():
        options, recipe = compose_objects(given, arguments, {})
        assert recipe is not None  # noqa: S101 (a module is given)
        try:
            # Reading this property pickles module and data.
            _ = recipe.pickled
        except PICKLE_ERRORS as error:
            raise ConfigError(
                f"module and data must be pickled, as memory is probed in other processes: {error}"
            ) from error
        with users_errors(), os_exit_as_users_error(), waiting_for(SURVEY):
            return _survey_in_silence(options, recipe)


def _survey_in_silence(options: "StudyOptions", recipe: "Recipe") -> "Survey":
    """Measure a workload, or take its survey from the cache; print no lines of progress."""
    # torch and lightning take 4 s to import.
    from bstune.hardware.survey_cache import survey_of

    found, _is_cached = survey_of(options, recipe, lambda line: None)
    return found
