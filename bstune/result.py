"""A study's result: what it found, and what its trials say of another question."""

import base64
import html
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field, PrivateAttr

from bstune.core.errors import InputError
from bstune.core.question import Question
from bstune.core.records import Budget, Record, Target
from bstune.options import with_question
from bstune.recipe.recipe import Recipe, settings_of
from bstune.report.answer import render
from bstune.report.compare import Comparison, compare_results
from bstune.study.analysis import StudyFacts, analyse
from bstune.study.commands import stored_commands
from bstune.study.estimates import step_time_of
from bstune.study.folder import read_asked, read_records, read_result
from bstune.study.make_plan import plan_of
from bstune.study.result import StudyResult
from bstune.study.retarget import retargeted
from bstune.system.files import StudyFolder
from bstune.system.ticker import say
from bstune.trial.table import find_table

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


class Result(StudyResult):
    """What a study found, with its folder."""

    folder: Path = Field(exclude=True)
    _recipe: Recipe | None = PrivateAttr(default=None)

    @property
    def records(self) -> list[Record]:
        """All trials, in order of their numbers."""
        return read_records(self.folder)

    def at(
        self,
        target: str | float | Target | None = None,
        *,
        budget: Budget | Mapping[str, float] | int | None = None,
    ) -> "Result":
        """What the same trials say of another target, or of the best metric in a smaller budget.

        Args:
            target: such as ``"val/loss <= 0.2"``, or another goal of the same metric.
            budget: in place of a target: ``{"seconds": 30}``, or steps, or examples.

        Raises:
            InputError: they do not tell.
        """
        given = {"target": target, "budget": budget}
        asked = {key: it for key, it in given.items() if it is not None}
        return ask_again(self.folder, asked).of_project(self._recipe)

    def train(self, **trainer: Any) -> "tuple[LightningModule, Trainer]":
        """Train the best in this process, as its trials were: the same batches, rate and schedule.

        It makes exactly ``train_steps`` of :attr:`best` or, where there are none, as many optimizer
        steps as its runs took in the median, rounded up. The Trainer has its own logger,
        call-backs, progress bar and evaluations, but for call-backs that choose length, batch size
        or rate, such as EarlyStopping, and writes to ``best`` in the study's folder unless it has a
        ``default_root_dir``; its checkpoint ``best.ckpt`` is a model of the study's run in MLflow.
        What the study shared among devices is trained on one. Then ``test_step``, where there is
        one, sees the data's ``test_dataloader`` once: its metrics are in
        ``trainer.callback_metrics``.

        Args:
            trainer: arguments of the Trainer in place of the study's, such as ``logger``.

        Returns:
            The trained module and its Trainer.

        Raises:
            InputError: the result was loaded, without the project, or has no best.
        """
        best = self.best
        if best is None:
            why = f"the study lacks {self.missing}"
            if self.objective == "curve":
                why = "objective=curve seeks none"
            raise InputError(f"there is no best to train: {why}")
        own, machine, origin = read_asked(self.folder)
        if self._recipe is None:
            train = stored_commands(origin.way, origin.command, own, own).train
            how = self.train_command or train(best.batch_size, best.lr, best.train_steps)
            if origin.way == "tune":
                how = "bstune.tune(...).train(), as the same call reads a finished study again"
            raise InputError(f"a folder has no project to train: use {how}")
        recipe = replace(self._recipe, threads=machine.threads, devices=1, noise_scale=False)
        if own.micro_batch_size == "auto" and machine.survey is not None:
            recipe = replace(recipe, micro_batch_size=machine.survey.largest_fit)
        steps = best.train_steps or math.ceil(best.steps)
        total = best.train_steps or own.budget.last_step(best.batch_size)
        trial = settings_of(best.batch_size, best.lr, total, own.trial.seed, best.values)
        # It imports torch.
        from bstune.trial.train_best import train_best

        module, trained = train_best(recipe, trial, steps, self.folder / "best", trainer)
        weights = Path(trained.default_root_dir) / "best.ckpt"
        trained.save_checkpoint(weights)
        if own.mlflow.uri is not None:
            from bstune.tracking.mlflow import log_weights

            place = {"uri": own.mlflow.uri, "experiment": own.mlflow.experiment}
            folder = StudyFolder(self.folder)
            warning = log_weights(self, self.records, folder, weights, **place)
            if warning is not None:
                say(f"MLflow: {warning}")
        return module, trained

    def of_project(self, recipe: Recipe | None) -> "Result":
        """Keep the recipe by which :meth:`train` trains; None: a result that was loaded."""
        self._recipe = recipe
        return self

    def trials_dataframe(self) -> Any:
        """The trials as a pandas DataFrame, a row each, as Optuna calls it."""
        import pandas

        left_out = {"values", "history", "noise_scale"}
        rows = [one.model_dump(exclude=left_out) | one.values for one in self.records]
        return pandas.DataFrame(rows)

    def __str__(self) -> str:
        return render(self)

    def _repr_html_(self) -> str:
        """What a notebook shows: the answer and the figure."""
        from bstune.report.figure import curve_figure

        file = io.BytesIO()
        curve_figure(self, self.records).savefig(file, format="png", dpi=80)
        image = base64.b64encode(file.getvalue()).decode()
        return f'<pre>{html.escape(str(self))}</pre><img src="data:image/png;base64,{image}">'


def load(folder: str | Path) -> Result:
    """Read the result of a study from its folder; InputError if there is none."""
    try:
        root = Path(folder)
    except TypeError as error:
        raise InputError(f"a study's folder must be a path, but got {folder!r:.100}") from error
    return Result(**read_result(root).model_dump(), folder=root)


def ask_again(folder: str | Path, given: Mapping[str, Any]) -> Result:
    """What the trials of a study, which may still run, say of another question; nothing is written.

    Args:
        folder: of the study.
        given: as of :func:`bstune.options.with_question`; nothing asks for the study's own.

    Raises:
        InputError: there is no study, or its trials do not tell.
    """
    root = Path(folder)
    own, machine, origin = read_asked(root)
    options = with_question(own, given)
    records = sorted(read_records(root), key=lambda record: record.number)
    if options == own and StudyFolder(root).result.exists():
        found = load(root)
        # A study that was run again has further trials.
        if found.trials == len(records):
            return found
    step_time = None if origin.table is None else find_table(origin.table).step_time
    plan = plan_of(own, machine, None, step_time, resumable=lambda number: False)
    ran_for = None
    if options != own:
        # A budget of seconds is in the steps that it would have been in the study.
        tau = plan.question.budget_step_time or step_time_of(plan, records)
        question = Question(options.target, options.budget, options.objective, budget_step_time=tau)
        schedule_follows = origin.of_project.schedule_follows
        records = retargeted(plan.question, question, records, schedule_follows)
        plan = replace(plan, question=question)
        ran_for = str(own.target if own.target != options.target else own.budget)
    facts = StudyFacts(
        plan=plan,
        workload=own.workload or own.study_name,
        name=own.study_name,
        machine=machine,
        project=origin.of_project,
        commands=stored_commands(origin.way, origin.command, own, options),
        folder=root,
        ran_for=ran_for,
    )
    return Result(**analyse(facts, records).model_dump(), folder=root)


def compare(
    studies: Sequence["str | Path | Result"],
    *,
    over: str | None = None,
    values: Mapping[str, float] | None = None,
) -> Comparison:
    """Compare studies: what their best takes, their critical batch sizes, and what differs.

    Args:
        studies: two or more, folders or results.
        over: fits a power law of the critical batch size over ``parameters`` or ``examples`` of the
            studies, or over ``values``, whose name this is.
        values: the size of each study, by its name in the table.

    Returns:
        The comparison; ``print(comparison)`` shows its table.

    Raises:
        InputError: a folder has no study, a study is given twice, or they cannot be compared, as by
            :func:`bstune.report.compare.compare_results`.
    """
    if isinstance(studies, str) or not isinstance(studies, Sequence):
        raise InputError(f"compare takes a list of studies, but got {studies!r:.100}")
    if values is not None and not isinstance(values, Mapping):
        raise InputError(f"values must be sizes by the studies' names, but got {values!r:.100}")
    results = [one if isinstance(one, Result) else load(one) for one in studies]
    names = [result.study for result in results]
    if len(set(names)) < len(names):
        names = [str(result.folder) for result in results]
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise InputError(f"compare takes each study once, but got {twice[0]} twice")
    return compare_results(dict(zip(names, results, strict=True)), over, values)
