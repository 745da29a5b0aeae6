"""What a study came to, in Python: the winner, the critical batch size, the curve, the trials.

>>> result = bstune.load("outputs/digits")  # doctest: +SKIP
>>> result.best.batch_size, result.critical_batch_size.value  # doctest: +SKIP
(64, 53.1)
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from bstune.core.errors import ConfigError, StudyError
from bstune.core.objectives import SOUGHT
from bstune.core.records import TrialResult
from bstune.options import StudyOptions
from bstune.recipe import Recipe
from bstune.report.answer import answer
from bstune.report.budget_figure import budget_figure
from bstune.report.compare import Comparison, read_studies
from bstune.report.compare import compare as compared
from bstune.report.figure import curve_figure
from bstune.report.lines.unreached import unreached_advice
from bstune.report.notebook import answer_html
from bstune.report.page import write_page
from bstune.report.spelling import with_options_as_called
from bstune.report.study_folder import read_study
from bstune.result import Best, CriticalInterval, Gain, GainAtBudget, StudyResult
from bstune.study.folder_config import options_of_folder
from bstune.study.planning.replicates import fresh_runs, run_to_train
from bstune.study.report import Findings
from bstune.study.showing.outcome import outcome_line
from bstune.study.storage.opening import find_study
from bstune.study.verbs.retarget import study_so_far
from bstune.system.console import plain_console, print_line, quieten
from bstune.system.files import Output

if TYPE_CHECKING:
    import optuna
    import pandas
    from lightning.pytorch import LightningModule, Trainer

    from bstune.report.picture import Picture
    from bstune.study.given import Data, Module

ALT = "steps and time to target over batch size"
# Columns of the trials' table; further hyper-parameters follow the learning rate.
TRIAL_COLUMNS = (
    "number",
    "batch_size",
    "lr",
    "status",
    "value",
    "steps",
    "time_to_target",
    "train_seconds",
    "seed",
    "resumed_from",
    "replicate_of",
    "message",
)
# Mappings: hyper-parameters have columns of their own.
NOT_COLUMNS = ("versions", "hyperparameters")
# The types of columns that may be empty.
KINDS = {
    "resumed_from": "Int64",
    "replicate_of": "Int64",
    "horizon": "Int64",
    "time_to_target": "float64",
    "value": "float64",
}


@dataclass(frozen=True, repr=False)
class Result:
    """What a study came to, as far as it has gone: the winner, the gain, the curve, the trials.

    Args:
        folder: the study's own, which holds trials.jsonl, curve.json, curve.png, best.yaml and
            checkpoints.
        summary: the answer, a :class:`bstune.result.StudyResult`, whose fields say their units;
            ``curve.json`` is its dump.
        records: of the trials, in order of their numbers.
        options: the study's, typed and frozen; None where its folder does not tell them.
        recipe: of what it trains; None where it was read from its folder, or trains nothing.
        notes: what could not be read from the folder.
    """

    folder: Path
    summary: StudyResult
    records: Sequence[TrialResult]
    options: StudyOptions | None
    recipe: Recipe | None
    notes: tuple[str, ...] = ()

    @classmethod
    def from_findings(cls, findings: Findings, recipe: Recipe | None) -> "Result":
        """Make the result of a study that has just been run."""
        prepared = findings.prepared
        folder = prepared.files.root
        return cls(folder, findings.result, findings.trials, prepared.options, recipe)

    @property
    def study(self) -> "optuna.Study":
        """The study in its storage, as Optuna's plots take it; StudyError where it is not there."""
        options = self._known_options()
        return find_study(options.study, options.storage)

    def _recipe_to_train(self, module: "Module | None", data: "Data | None") -> Recipe:
        """Give the recipe of a module and data that are given, or else the study's own.

        ConfigError where there is neither.
        """
        # It imports torch and Lightning.
        from bstune.study.given import recipe_of

        if module is not None and data is not None:
            return recipe_of(module, data, self._known_options())
        if self.recipe is None:
            raise ConfigError(
                "a study's folder holds no code: give result.train(module=..., data=...), as "
                "bstune.Study takes them"
            )
        return self.recipe

    def _known_options(self) -> StudyOptions:
        """Give the study's options; StudyError where its folder did not tell them."""
        if self.options is None:
            raise StudyError(
                f"{self.folder} does not tell the study's options: {'; '.join(self.notes)}"
            )
        return self.options

    @property
    def best(self) -> Best:
        """The winner, or the best point so far.

        StudyError where no trial has a value of the metric.
        """
        # The objective loss seeks no merit; any name then gives its one best point.
        merits = SOUGHT[self.summary.objective].merits or ("time",)
        best = self.summary.best_by(merits[0])
        if best is None:
            raise StudyError(with_options_as_called(self.summary, unreached_advice(self.summary)))
        return best

    @property
    def gain(self) -> Gain | GainAtBudget | None:
        """How much better the winner is than the reference; None where they cannot be compared.

        For a target it is how many times as fast the winner is. For the objective loss it is by
        how much the winner's metric is better at the budget's end.
        """
        if self.summary.at_budget is not None:
            return self.summary.at_budget.gain
        return self.summary.gain

    @property
    def critical_batch_size(self) -> CriticalInterval:
        """The batch size up to which more data parallelism pays, over all trials."""
        found = self.summary.critical_batch_size
        if found is None:
            return CriticalInterval()
        if found.note is None:
            return found
        # In a study of Python objects the note names arguments, not options of the command line.
        return found.model_copy(update={"note": with_options_as_called(self.summary, found.note)})

    @cached_property
    def curve(self) -> "pandas.DataFrame":
        """S*(B) with its band: batch_size, steps, low, high.

        It is empty where no trial reached the target.
        """
        # pandas takes half a second to import, and the command never needs it.
        import pandas

        names = ("batch_size", "steps", "low", "high")
        curve = self.summary.curve
        columns: dict[str, list[float]] = {name: [] for name in names}
        if curve is not None:
            columns = {name: list(getattr(curve, name)) for name in names}
        return pandas.DataFrame(columns)

    @property
    def trials(self) -> "pandas.DataFrame":
        """The trials as a table of pandas: :meth:`trials_table` with its columns ``needed``."""
        return self.trials_table()

    def trials_table(self, columns: Literal["needed", "all"] = "needed") -> "pandas.DataFrame":
        """Give the trials as a table of pandas, a row each in order of their numbers.

        Args:
            columns: ``needed`` are batch size, learning rate and the further hyper-parameters; how
                the trial ended and after how many steps; seconds and seed; which trial it continues
                or repeats; the horizon, where schedules end with the trial. ``all`` are those of
                :class:`bstune.TrialResult` but its versions. In both ``value`` is the last one of
                the target's metric.

        Raises:
            ConfigError: of other columns.
        """
        # pandas takes long to import, and only a frame needs it.
        import pandas

        if columns not in ("needed", "all"):
            raise ConfigError(f"columns is 'needed' or 'all', but got {columns!r}")
        rows = [_row(trial) for trial in self.records]
        searched = dict[str, float]()
        for trial in self.records:
            searched |= trial.hyperparameters
        if columns == "needed":
            # Searched hyper-parameters follow the number, batch size and learning rate.
            names = [*TRIAL_COLUMNS[:3], *searched, *TRIAL_COLUMNS[3:]]
            # A schedule that ends with its trial is a part of what the trial was.
            if any(trial.horizon is not None for trial in self.records):
                names.append("horizon")
        else:
            names = [field.name for field in fields(TrialResult) if field.name not in NOT_COLUMNS]
            names += [*searched, "time_to_target", "value"]
        # One column of a name, even where a hyper-parameter is called as another one.
        table = pandas.DataFrame(rows, columns=list(dict.fromkeys(names)))
        # These types take an empty value and keep whole numbers whole.
        return table.astype({name: kind for name, kind in KINDS.items() if name in names})

    def plot(self) -> "Picture":
        """Draw ``curve.png`` as a matplotlib figure, which a notebook shows as a cell's value."""
        if self.summary.objective == "loss":
            return budget_figure(self.records, self.summary)
        return curve_figure(self.records, self.summary)

    def report(self, path: str | Path) -> Path:
        """Write the study's page, one HTML file that needs no network, and return its path."""
        write_page(read_study(self.folder), Path(path))
        return Path(path)

    def _repr_html_(self) -> str:
        """Show the answer and the curve in a notebook."""
        return answer_html(answer(self.summary), self.plot(), ALT)

    def __repr__(self) -> str:
        return f"Result({answer(self.summary).headline})"

    def train(
        self,
        module: "Module | None" = None,
        data: "Data | None" = None,
        *,
        fast: bool = False,
        **trainer: Any,
    ) -> "tuple[LightningModule, Trainer]":
        """Train the winner again with its seed, as a plain ``Trainer.fit``.

        It trains for as many steps as the winner did. Where schedules end with the trial it trains
        for the winner's horizon, with a seed that reached the target by it, if there is one. A line
        says what the metric came to, and whether that meets the target. Torch has as many threads
        as OMP_NUM_THREADS says; else as many as in the study, or one where a few steps in this
        process are faster with it.

        Args:
            module: as :class:`bstune.Study` takes it, for a result that was read from a folder. The
                study's arguments of the Trainer are read there, too, but for call-backs, loggers
                and other objects: a line names those that are not given in ``trainer``.
            data: likewise.
            fast: whether the lean loop takes the steps where it can: the same steps, in less time.
            trainer: further arguments of the Trainer.

        Returns:
            The module and its Trainer, whose ``callback_metrics`` have what the validation at the
            end logged.

        Raises:
            ConfigError: where nothing says what to train.
            StudyError: where no trial has a value of the metric.
        """
        # torch and Lightning take 4 s to import.
        import torch

        from bstune.hardware.workload_steps import threads_of_fit
        from bstune.study.given import line_on_lacking_objects
        from bstune.trial.parts.metric import metric
        from bstune.trial.plain import fit
        from bstune.trial.processes.restored import restored
        from bstune.trial.workload import load_workload

        best = self.best
        options = self._known_options()
        recipe = self._recipe_to_train(module, data)
        if recipe is not self.recipe:
            line = line_on_lacking_objects(options, trainer)
            if line is not None:
                print_line(plain_console(), line)
        trial_of_search = next(trial for trial in self.records if trial.number == best.number)
        runs = fresh_runs(self.records).get(best.number, ())
        trial = run_to_train(trial_of_search, runs, best.horizon)
        spec = trial.again(max_steps=best.horizon)
        # torch's settings and random states are the caller's again afterwards.
        with restored():
            workload, protocol = load_workload(options, recipe)
            timing = self.summary.timing
            threads_of_study = None if timing is None else timing.threads
            # The number of threads is chosen by timing steps of the loop that the fit will use.
            timed_protocol = protocol if fast else replace(protocol, fast="off")
            # What these steps log, set and draw stays out of the fit.
            with restored():
                quieten()
                threads = threads_of_fit(options, workload, timed_protocol, trial, threads_of_study)
            if threads is not None:
                torch.set_num_threads(threads)
            steps = best.horizon or trial.steps
            trained, fitted = fit(workload, spec, protocol, steps, fast, **trainer)
        # Under manual optimization Lightning counts the steps of each optimizer, which are not
        # those of the training: the line then says the steps that were asked for.
        if trained.automatic_optimization:
            # The call's own arguments of the Trainer may end it earlier.
            steps = fitted.global_step
        metric_name = protocol.target.metric
        value: float | None = None
        if metric_name in fitted.callback_metrics:
            value = metric(fitted, metric_name)
        print_line(plain_console(), outcome_line(protocol.target, value, steps))
        return trained, fitted


def _row(trial: TrialResult) -> dict[str, Any]:
    """Give a trial's values by the names of the table's columns."""
    row = asdict(trial) | dict(trial.hyperparameters)
    row["time_to_target"] = trial.time_to_target
    row["value"] = trial.history[-1][1] if trial.history else None
    return row


def load(folder: str | Path, *, trust: bool = False) -> Result:
    """Open a study by its output folder, whoever ran it: one that has ended, or one that runs.

    A folder is data: nothing that it names is imported or called, but with ``trust``. It holds no
    code either, so that :meth:`Result.train` of it asks for module and data.

    Args:
        folder: such as ``outputs/digits``.
        trust: call what its config names, such as a scaling rule of your own, where the study has
            not ended.

    Returns:
        The result, whose ``notes`` say what could not be read.

    Raises:
        StudyError: where there is no study, or its files are not of this version of bstune.
    """
    path = Path(folder)
    study = study_so_far(path, trust)
    notes = list(study.files.notes)
    options: StudyOptions | None = None
    if study.files.config is not None:
        try:
            options = options_of_folder(study.files.config, Output(path).config, trust)
        except StudyError as error:
            notes.append(str(error))
    return Result(
        folder=path,
        summary=study.result,
        records=study.files.trials,
        options=options,
        recipe=None,
        notes=tuple(notes),
    )


def compare(*studies: str | Path | Result) -> Comparison:
    """Compare studies: what each says to use, and which critical batch sizes differ.

    Args:
        studies: output folders, such as ``outputs/digits``, or results.

    Returns:
        The comparison, which a notebook shows with its picture.

    Raises:
        StudyError: of a folder that is not there, or where no study can be read.
    """
    paths = list[str]()
    for study in studies:
        folder = study.folder if isinstance(study, Result) else study
        paths.append(str(folder))
    return compared(*read_studies(paths))
