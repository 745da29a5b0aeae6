"""What a study came to, in Python: the winner, the critical batch size, the curve, the trials.

>>> result = bstune.load("outputs/digits")  # doctest: +SKIP
>>> result.best.batch_size, result.critical_batch_size.value  # doctest: +SKIP
(64, 53.1)
"""

import base64
import html
import io
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bstune.core.errors import ConfigError, StudyError
from bstune.core.objectives import SOUGHT
from bstune.core.records import TrialResult
from bstune.options import StudyOptions
from bstune.recipe import Recipe
from bstune.report.answer import answer, block, unreached_advice
from bstune.report.budget_figure import budget_figure
from bstune.report.figure import curve_figure
from bstune.report.page import write_page
from bstune.report.study_folder import read_study
from bstune.result import Best, CriticalInterval, Gain, GainAtBudget, StudyResult
from bstune.study.folder_config import options_of_folder
from bstune.study.report import Findings
from bstune.study.retarget import study_so_far
from bstune.study.storage.opening import find_study
from bstune.system.files import Output

if TYPE_CHECKING:
    import optuna
    import pandas
    from lightning.pytorch import LightningModule, Trainer
    from matplotlib.figure import Figure

    from bstune.study.given import Data, Module

ALT = "steps and time to target over batch size"


@dataclass(frozen=True, repr=False)
class Result:
    """A study's results, as far as it has gone: the same call that began it continues it.

    Args:
        folder: of the study's files: trials.jsonl, curve.json, curve.png, best.yaml, checkpoints.
        summary: the answer, which is the content of ``curve.json``.
        records: of the trials, in order of their numbers.
        options: of the study; None where its folder does not tell them.
        recipe: of what it trains; None where it was read of its folder, or trains nothing.
        notes: what could not be read of the folder.
    """

    folder: Path
    summary: StudyResult
    records: Sequence[TrialResult]
    options: StudyOptions | None
    recipe: Recipe | None
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, findings: Findings, recipe: Recipe | None) -> "Result":
        """Make the result of a study that has just been run."""
        prepared = findings.prepared
        folder = prepared.files.root
        return cls(folder, findings.result, findings.trials, prepared.options, recipe)

    @property
    def study(self) -> "optuna.Study":
        """The study in its storage, as Optuna's plots and dashboard take it; StudyError without it."""
        options = self._known_options()
        return find_study(options.study, options.storage)

    def _known_options(self) -> StudyOptions:
        if self.options is None:
            raise StudyError(
                f"{self.folder} does not tell the study's options: {'; '.join(self.notes)}"
            )
        return self.options

    @property
    def best(self) -> Best:
        """The winner, or the best point so far; StudyError where no trial has a value of the metric."""
        merits = SOUGHT[self.summary.objective].merits or ("time",)
        best = self.summary.best_by(merits[0])
        if best is None:
            raise StudyError(unreached_advice(self.summary))
        return best

    @property
    def gain(self) -> Gain | GainAtBudget | None:
        """How much better the winner is than the reference; None where they cannot be compared.

        How many times as fast it is to the target; of the objective loss by how much its metric is
        better at the budget's end.
        """
        if self.summary.at_budget is not None:
            return self.summary.at_budget.gain
        return self.summary.gain

    @property
    def critical_batch_size(self) -> CriticalInterval:
        """The batch size up to which more data parallelism pays, over all trials."""
        return self.summary.critical_batch_size or CriticalInterval()

    @cached_property
    def curve(self) -> "pandas.DataFrame":
        """S*(B) with its band: batch_size, steps, low, high; empty where no trial reached the target."""
        # half a second, which a command never needs
        import pandas

        names = ("batch_size", "steps", "low", "high")
        curve = self.summary.curve
        columns = {name: [] if curve is None else list(getattr(curve, name)) for name in names}
        return pandas.DataFrame(columns)

    @cached_property
    def trials(self) -> "pandas.DataFrame":
        """The trials, a row each in order of their numbers, with the last value of the target's metric as ``value``."""
        # as above
        import pandas

        rows = []
        for trial in self.records:
            row = asdict(trial)
            for name in ("versions", "hyperparameters"):
                del row[name]
            row |= trial.hyperparameters
            row["time_to_target"] = trial.time_to_target
            row["value"] = trial.history[-1][1] if trial.history else None
            rows.append(row)
        return pandas.DataFrame(rows)

    def plot(self) -> "Figure":
        """Return ``curve.png`` as a matplotlib figure, which a notebook shows."""
        if self.summary.objective == "loss":
            return budget_figure(self.records, self.summary)
        return curve_figure(self.records, self.summary)

    def report(self, path: str | Path) -> Path:
        """Write the study's page, one HTML file that needs no network, and return its path."""
        write_page(read_study(self.folder), Path(path))
        return Path(path)

    def _repr_html_(self) -> str:
        """Return the answer and the curve, as a notebook shows the result."""
        png = io.BytesIO()
        self.plot().savefig(png, format="png")
        text, image = (
            html.escape("\n".join(block(answer(self.summary)))),
            base64.b64encode(png.getvalue()).decode(),
        )
        return f'<pre>{text}</pre><img alt="{ALT}" src="data:image/png;base64,{image}">'

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
        """Train the winner again, with its seed and for its steps or its horizon, as a plain ``Trainer.fit``.

        It trains with as many threads of torch as the study.

        Args:
            module: as :class:`bstune.Study` takes it, for a result that was read of a folder.
            data: likewise.
            fast: whether the lean loop takes the steps, where it can: the same, in less time.
            trainer: further arguments of the Trainer.

        Returns:
            The module and its Trainer, whose ``callback_metrics`` have what the validation at the
            end logged.

        Raises:
            ConfigError: where nothing says what to train.
            StudyError: where no trial has a value of the metric.
        """
        # torch and lightning, 4 s
        import torch

        from bstune.study.given import recipe_of
        from bstune.trial.plain import fit
        from bstune.trial.processes.process import restored
        from bstune.trial.workload import load as load_workload

        best = self.best
        options = self._known_options()
        recipe = self.recipe
        if module is not None and data is not None:
            recipe = recipe_of(module, data, options)
        if recipe is None:
            raise ConfigError(
                "a study's folder holds no code: give result.train(module=..., data=...), as "
                "bstune.Study takes them"
            )
        trial = next(trial for trial in self.records if trial.number == best.number)
        spec = trial.again(max_steps=best.horizon)
        with restored():
            timing = self.summary.timing
            if timing is not None and timing.threads is not None:
                torch.set_num_threads(timing.threads)
            workload, protocol = load_workload(options, recipe)
            steps = best.horizon or trial.steps
            return fit(workload, spec, protocol, steps, fast, **trainer)


def load(folder: str | Path, *, trust: bool = False) -> Result:
    """Open a study by its output folder: one that has ended, or one that runs.

    A folder is data: nothing that it names is imported or called, but with ``trust``.

    Args:
        folder: such as ``outputs/digits``.
        trust: call what its config names, such as a scaling rule of your own, where the study has
            not ended.

    Raises:
        StudyError: where there is no study, or its files are not of this version of bstune.
    """
    path = Path(folder)
    found = study_so_far(path, trust)
    notes = list(found.files.notes)
    options: StudyOptions | None = None
    if found.files.config is not None:
        try:
            options = options_of_folder(found.files.config, Output(path).config, trust)
        except StudyError as error:
            notes.append(str(error))
    return Result(path, found.result, found.files.trials, options, None, tuple(notes))
