"""The report of a job's study: its files, its tables, the winners on the test set, its curve in MLflow."""

import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import optuna
import yaml
from omegaconf import DictConfig
from rich.console import Console

from bstune.config import overrides
from bstune.core.console import redact
from bstune.core.curve import CurveError, CurveFit, fit_curve, frontier_points, predict_steps
from bstune.core.files import Output, write_text
from bstune.core.records import TrialResult, TrialSpec, dump_json
from bstune.study.figure import draw_curve
from bstune.study.model import b_crit_interval, known_of, which_rule_held
from bstune.study.prepare import PreparedStudy
from bstune.study.scale_out import ScaleOut, draw_scale_out, scale_out, scale_out_table
from bstune.study.storage import results
from bstune.study.summary import print_final, summarize, winners

if TYPE_CHECKING:
    from bstune.study.tracking import Tracking

TESTS = "bstune:tests"  # attribute in the storage: test metrics by trial number
REPORT_PARTICLES = 1000  # of the posterior for the report
CURVE_LADDER = 48  # batch sizes at which the fitted curve is sent to MLflow


def report_study(
    prepared: PreparedStudy,
    study: optuna.Study,
    tracking: "Tracking | None",
    ended: str,
    arguments: Sequence[str],
    console: Console,
) -> None:
    """Write and print what a study found.

    Args:
        prepared: from :func:`bstune.study.prepare.prepare`.
        study: all of whose trials have ended.
        tracking: to send the curve to; None where MLflow is off.
        ended: what ended the search, in words.
        arguments: of the command line, for the command that trains the winner again.
        console: where the tables go.
    """
    done = results(study)
    fit = _fit(done)
    known = known_of(prepared, done, REPORT_PARTICLES)
    posterior = b_crit_interval(prepared, known)
    held = which_rule_held(known, prepared.space.low, prepared.space.high, posterior[1])
    summary = summarize(done, prepared.protocol.target, fit, held, ended, posterior)
    tests = _test_winners(prepared, study, winners(done))
    output, workload = prepared.files, prepared.config.workload.name
    ideal, real = scale_out(prepared, known) if any(trial.reached for trial in done) else ([], [])
    plans = {"ideal": [asdict(row) for row in ideal], "with_all_reduce": [asdict(row) for row in real]}
    summary = {"study": prepared.config.study, "workload": workload, **summary, "test": tests, "scale_out": plans}
    write_text(output.curve, dump_json(summary, indent=2) + "\n")
    write_text(output.best, best_yaml(winners(done), arguments, output, prepared.backend.stops, prepared.config))
    curve = fit if isinstance(fit, CurveFit) else None
    draw_curve(done, summary, curve, workload, output.figure)
    if ideal:
        draw_scale_out(ideal, real, workload, output.scale_out)
    ui = "not logged (mlflow.enabled=false)"
    if tracking is not None:
        from bstune.study.tracking import tracking_uri, ui_command  # mlflow takes seconds to import

        tracking.finish_study(curves(summary, curve), scalars(summary), _artifacts(output))
        ui = ui_command(tracking_uri(prepared.config.mlflow))
    files = {"figure": output.figure, "curve": output.curve, "trials": output.trials, "winners": output.best}
    if ideal:
        files["devices"] = output.scale_out
        console.print(scale_out_table(real or ideal, _scale_out_title(real)))
    print_final(console, summary, tests, files, ui)
    for caveat in prepared.caveats:
        console.print(caveat, soft_wrap=True)


def _scale_out_title(real: Sequence[ScaleOut]) -> str:
    return f"several devices, each as fast as this one, {'with the' if real else 'without an'} all-reduce"


def _fit(done: Sequence[TrialResult]) -> CurveFit | str:
    try:
        return fit_curve(frontier_points(done))
    except CurveError as error:
        return str(error)


def _test_winners(
    prepared: PreparedStudy, study: optuna.Study, best: Mapping[str, TrialResult]
) -> dict[str, dict[str, float]]:
    """Return the winners' metrics on the test set; each trial is tested once, however often the study goes on."""
    known: dict[str, dict[str, float]] = dict(study.user_attrs.get(TESTS, {}))
    for result in best.values():
        if str(result.number) not in known and (metrics := prepared.backend.test(_spec(result), prepared.files)):
            known[str(result.number)] = dict(metrics)
    study.set_user_attr(TESTS, known)
    return {name: known[str(result.number)] for name, result in best.items() if str(result.number) in known}


def _spec(result: TrialResult) -> TrialSpec:
    return TrialSpec(
        result.number,
        result.trial_index,
        result.batch_size,
        result.lr,
        result.delta,
        result.seed,
        hyperparameters=result.hyperparameters,
    )


def best_yaml(
    best: Mapping[str, TrialResult], arguments: Sequence[str], output: Output, stops: bool, config: DictConfig
) -> str:
    """Return the winners as YAML, each with its checkpoint, if it left one, and the command that runs it again.

    Where trials ``stops`` early, what was evaluated depends on their limits: the command's budget ends with the winner.
    """
    values: dict[str, Any] = {}
    for name, result in best.items():
        own = [f"trial.batch_size={result.batch_size}", f"trial.lr={result.lr!r}", f"trial.seed={result.seed}"]
        own += [f"budget.steps={result.steps}", "budget.examples=1"] if stops else []
        own += overrides(config, result.hyperparameters)
        kept = [redact(argument) for argument in arguments if not argument.startswith("trial.")]
        checkpoint = output.checkpoint(result.number)
        fields = ("number", "batch_size", "lr", "hyperparameters", "seed", "steps", "steps_low", "seconds_per_step")
        values[name] = {
            **{field: value for field, value in asdict(result).items() if field in fields},
            "time_to_target": result.time_to_target,
            "checkpoint": str(checkpoint.absolute()) if checkpoint.exists() else None,
            "command": shlex.join([sys.executable, "-m", "bstune", *kept, *own]),
        }
    return yaml.safe_dump(values, sort_keys=False)


def curves(summary: Mapping[str, Any], fit: CurveFit | None) -> dict[str, list[tuple[int, float | None]]]:
    """Return the curves to log over batch size: the frontier points', and the fit's at a ladder of batch sizes."""
    points = [point for point in summary["points"] if not point["censored"]]
    named: dict[str, list[tuple[int, float | None]]] = {
        name: [(round(point["batch_size"]), point[field]) for point in points]
        for name, field in (
            ("steps_to_target", "steps"),
            ("time_to_target", "time_to_target"),
            ("examples_to_target", "examples"),
        )
    }
    if fit is None or not points:
        return named
    low, high = (edge(point["batch_size"] for point in summary["points"]) for edge in (min, max))
    ladder = sorted({round(low * (high / low) ** (i / CURVE_LADDER)) for i in range(CURVE_LADDER + 1)})
    band = predict_steps(fit, ladder)
    named["steps_to_target_fit"] = [(size, float(steps)) for size, steps in zip(ladder, band.steps, strict=True)]
    named["examples_to_target_fit"] = [(size, size * float(s)) for size, s in zip(ladder, band.steps, strict=True)]
    return named


def scalars(summary: Mapping[str, Any]) -> dict[str, float | None]:
    """Return the numbers of a study to log: the fit's, and the winners'."""
    fit = summary["fit"] or {}
    named = {name: fit.get(name) for name in ("s_min", "b_crit", "b_crit_low", "b_crit_high", "e_min")}
    for winner in ("best_by_time", "best_by_steps"):
        row = summary[winner] or {}
        for field in ("batch_size", "lr", "steps", "time_to_target"):
            named[f"{winner}/{field}"] = row.get(field)
    return named


def _artifacts(output: Output) -> list[Path]:
    files = [output.figure, output.trials, output.curve, output.best, output.config]
    return [*files, *(path for path in (output.scale_out, output.survey, output.roofline) if path.exists())]
