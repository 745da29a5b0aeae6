"""What :func:`bstune.tune` returns: the winner, the critical batch size, the curve, the trials, and what to do next."""

import base64
import html
import io
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bstune.core.errors import ConfigError, StudyError
from bstune.core.records import TrialSpec
from bstune.recipe import Recipe
from bstune.report.answer import answer, block, unreached_advice
from bstune.report.figure import curve_figure
from bstune.report.page import write_page
from bstune.report.study_folder import read_study
from bstune.result import Best, CriticalInterval, Gain, StudyResult
from bstune.study.replicates import MERITS
from bstune.study.report import Findings
from bstune.trial.plain import fit
from bstune.trial.process import restored
from bstune.trial.workload import load

if TYPE_CHECKING:
    import pandas
    from lightning.pytorch import LightningModule, Trainer
    from matplotlib.figure import Figure

ALT = "steps and time to target over batch size"


@dataclass(frozen=True, repr=False)
class Result:
    """A study's results, as far as it has gone: the same call of :func:`bstune.tune` continues it.

    Args:
        findings: the study, its trials, its result, and the curve.
        recipe: of what it trains; None: nothing.
    """

    findings: Findings
    recipe: Recipe | None

    @property
    def folder(self) -> Path:
        """Where the study's files are: trials.jsonl, curve.json, curve.png, best.yaml, checkpoints."""
        return self.findings.prepared.files.root

    @property
    def summary(self) -> StudyResult:
        """The content of ``curve.json``."""
        return self.findings.result

    @property
    def best(self) -> Best:
        """The winner, or the best point so far; StudyError where no trial has a value of the metric."""
        best = self.summary.best_by(MERITS[self.findings.prepared.budget.objective][0])
        if best is None:
            raise StudyError(unreached_advice(self.summary))
        return best

    @property
    def gain(self) -> Gain | None:
        """How many times as fast the winner is as the reference; None where they cannot be compared."""
        return self.summary.gain

    @property
    def critical_batch_size(self) -> CriticalInterval:
        """The batch size up to which more data parallelism pays, over all trials."""
        return self.summary.critical or CriticalInterval()

    @cached_property
    def curve(self) -> "pandas.DataFrame":
        """S*(B) with its band: batch_size, steps, low, high; empty where no trial reached the target."""
        # half a second, which a command never needs
        import pandas

        names = ("batch_size", "steps", "low", "high")
        band = self.findings.band
        return pandas.DataFrame(
            {name: [] if band is None else getattr(band, name) for name in names}
        )

    @cached_property
    def trials(self) -> "pandas.DataFrame":
        """The trials, a row each in order of their numbers, with the last value of the target's metric as ``value``."""
        # as above
        import pandas

        rows = []
        for trial in self.findings.trials:
            row = {
                name: value
                for name, value in asdict(trial).items()
                if name not in ("versions", "hyperparameters")
            }
            last = trial.history[-1][1] if trial.history else None
            rows.append(
                {
                    **row,
                    **trial.hyperparameters,
                    "time_to_target": trial.time_to_target,
                    "value": last,
                }
            )
        return pandas.DataFrame(rows)

    def plot(self) -> "Figure":
        """Return ``curve.png`` as a matplotlib figure, which a notebook shows."""
        return curve_figure(self.findings.trials, self.summary)

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

    def train(self, **trainer: Any) -> "tuple[LightningModule, Trainer]":
        """Train the winner again, with its seed and for its steps or its horizon, as a plain ``Trainer.fit``.

        Its batch size changes as the winner's did, if that did. The keyword arguments are further ones of the Trainer.
        Returned are the module and its Trainer, whose ``callback_metrics`` have what the validation at the end logged.
        """
        best, prepared = self.best, self.findings.prepared
        if self.recipe is None:
            raise ConfigError("recorded runs have nothing to train")
        trial = next(trial for trial in self.findings.trials if trial.number == best.number)
        spec = TrialSpec(
            **{
                name: getattr(trial, name)
                for name in ("number", "trial_index", "batch_size", "lr", "delta", "seed")
            },
            max_steps=best.horizon,
            hyperparameters=trial.hyperparameters,
        )
        with restored():
            steps = best.horizon or trial.steps
            workload, protocol = load(prepared.options, self.recipe)
            return fit(workload, spec, protocol, steps, **trainer)
