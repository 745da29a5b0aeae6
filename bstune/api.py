"""What people call: tune a workload, or survey it."""

import time
from collections.abc import Mapping
from typing import Any

from pydantic import Field

from bstune import __version__
from bstune.config import options_from_python
from bstune.core.errors import InputError
from bstune.core.records import Budget, Target
from bstune.hardware.survey import Survey
from bstune.options import Options
from bstune.report.hardware import survey_text
from bstune.result import Result
from bstune.run_study import run_study
from bstune.study.begin import begin
from bstune.study.commands import call_commands
from bstune.study.once import survey_once
from bstune.study.workload import Workload, config_of
from bstune.system.ticker import say


class ProjectSurvey(Survey):
    """What a machine allows a project; ``print()`` shows its table."""

    was_kept: bool = Field(exclude=True)
    """From an earlier time."""

    def __str__(self) -> str:
        return survey_text(self, self.was_kept)


def tune(
    module: Any,
    data: Any,
    *,
    target: str | Target | None = None,
    baseline: tuple[int, float] | None = None,
    batch_size: tuple[int, int] | None = None,
    budget: Budget | Mapping[str, int] | int | None = None,
    name: str | None = None,
    trainer: Mapping[str, Any] | None = None,
    **options: Any,
) -> Result:
    """Find the batch size and learning rate with which a project reaches its target fastest.

    What is not given is looked up in the project, and said: its batch size and rate, the length of
    its training (``trainer={"max_epochs": 10}``) and the metric that its validation logs. A target
    that is not given is what it reaches in a thirtieth of ``wall_seconds``, or in 10 s.

    Args:
        module: a LightningModule's class with an argument for the learning rate, or a function of
            the trial that builds one, ``lambda trial: MyModule(lr=trial.lr)``; one whose rate is a
            literal with ``override_lr=True``.
        data: a LightningDataModule, or a pair of a train and a validation DataLoader, or a function
            of ``batch_size`` that makes one, as streams need that make their own batches. Training
            batches are made of its data set; of several loaders the first one has B examples.
            Validation keeps the loader's own batch size in all trials; for a network that needs
            batches of B give ``validation_batch_size="trial"``.
        target: such as ``"val/loss <= 0.1"``.
        baseline: batch size and rate that are used today.
        batch_size: the smallest and the largest to try; from a sixteenth of the baseline's to 32
            times as many, up to the training set.
        budget: of a trial that does not reach the target: steps, or steps and examples.
        name: of the study; the module's name.
        trainer: further arguments of Lightning's Trainer.
        options: any other option of ``conf/config.yaml``, such as ``trials=32, wall_seconds=120``.

    Returns:
        The result; ``print(result)`` shows the answer.

    Raises:
        bstune.core.errors.BstuneError: for what cannot be used, in one line.
    """
    began = time.monotonic()
    given = dict(options, target=target, baseline=baseline, batch_size=batch_size, budget=budget)
    checked, workload = _options_and_workload(module, data, name, trainer, given)
    result = run_study(checked, workload, begin(checked, began))
    return result.of_project(workload.recipe)


def survey(
    module: Any,
    data: Any,
    *,
    name: str | None = None,
    trainer: Mapping[str, Any] | None = None,
    **options: Any,
) -> ProjectSurvey:
    """Measure which batch sizes fit into memory, what their steps take and what bounds them.

    Args:
        module, data, name, trainer, options: as of :func:`tune`, such as
            ``batch_size=(8, 4096), survey="refresh"``.

    Returns:
        The survey; ``print(survey)`` shows its table.

    Raises:
        bstune.core.errors.BstuneError: for what cannot be used, in one line.
    """
    checked, workload = _options_and_workload(module, data, name, trainer, options)
    found, was_kept = survey_once(checked, workload)
    return ProjectSurvey(**found.model_dump(), was_kept=was_kept)


def _options_and_workload(
    module: Any,
    data: Any,
    name: str | None,
    trainer: Mapping[str, Any] | None,
    given: Mapping[str, Any],
) -> tuple[Options, Workload]:
    """The options and the workload of a project of Python objects."""
    study = name or _type_name(module)
    say(f"bstune {__version__}: {study}")
    if study == "<lambda>":
        raise InputError("name is missing: a function without a name needs one, as name='STUDY'")
    checked = options_from_python(workload=study, **given)
    # It imports torch, which commands leave to the worker.
    from bstune.recipe.project import recipe_of_project

    recipe = recipe_of_project(module, data, trainer=trainer, options=checked)
    workload = Workload(
        name=study,
        settings={"data": _type_name(data), "trainer": sorted(trainer or {})},
        config=config_of(checked),
        commands=call_commands("tune", study),
        recipe=recipe,
    )
    return checked, workload


def _type_name(part: Any) -> str:
    """Name a class or a function, or the class of another object."""
    return str(getattr(part, "__name__", type(part).__name__))
