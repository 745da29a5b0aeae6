"""The report of a job's study: its files, its answer, the winners on the test set, its curve in MLflow."""

import re
import shlex
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import chdir
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import optuna
import yaml
from numpy.typing import NDArray
from rich.console import Console
from rich.text import Text

from bstune.core.curve import CurveBand, CurveError, CurveFit, fit_curve, frontier_points
from bstune.core.records import Merit, TrialResult, TrialSpec, dump_json
from bstune.options import overrides
from bstune.report.answer import INDENT, WIDTH, Answer, Line, answer, block
from bstune.report.figure import draw_curve
from bstune.report.page import write_page
from bstune.report.rows import WINNERS, Summary
from bstune.report.study_folder import read_study
from bstune.search.acquisition import best_learning_rates, steps_band
from bstune.search.observations import Posterior, fresh_horizons, fresh_steps
from bstune.study.baseline import baseline_row, baseline_runs, gain_row
from bstune.study.critical import (
    INTERVAL,
    ROOM,
    CriticalBatch,
    critical_batch,
    growth,
    no_easier_target,
    over_targets,
)
from bstune.study.model import (
    REPORT_PARTICLES,
    fit_lr_exponent,
    ideal_of,
    sampler_context,
    seed_scatter,
    study_posterior,
)
from bstune.study.prepare import PreparedStudy
from bstune.study.replicates import MERITS, Winner, left_out, winners
from bstune.study.scale_out import ScaleOut, draw_scale_out, scale_out, scale_out_table, step_times
from bstune.study.storage import TESTS, results, trained_by
from bstune.study.summary import summarize, winner_row
from bstune.study.unreached import so_far_row
from bstune.system.console import format_count, format_number, plural
from bstune.system.failures import optional
from bstune.system.files import Output, is_own, write_text
from bstune.system.secrets import redact_values

if TYPE_CHECKING:
    from bstune.tracking.runs import Tracking

TARGET_PARTICLES = 400  # of the posterior at each easier target
MIN_TIMED = 10  # trials, each of as many steps, that say how far steps at one batch size differ
CURVE_LADDER = 48  # batch sizes at which the fitted curve is sent to MLflow
MIN_WIDTH = 80  # columns of the answer: a narrower terminal breaks its lines itself
OF_A_STUDY = (
    "trial.",
    "search.",
    "mlflow.",
    "hardware.",
    "sampler",
    "prior.",
    "seed=",
    "debug=",
)  # options


@dataclass(frozen=True)
class Findings:
    """A study, its trials, what ``curve.json`` says of them, and S*(B); None where nothing reached the target."""

    prepared: PreparedStudy
    trials: list[TrialResult]
    summary: Summary
    band: CurveBand | None


def report_study(
    prepared: PreparedStudy,
    study: optuna.Study,
    tracking: "Tracking | None",
    stop_reason: str,
    arguments: Sequence[str] | None,
    console: Console,
    sampled: tuple[Sequence[TrialResult], Posterior] | None = None,
    missing: Sequence[str] = (),
) -> Findings:
    """Write, print, track and return a study's results; ``arguments`` of a command line run the winners again.

    ``sampled``: the posterior of these trials, if it is at hand; ``missing``: a line for each part that failed before.
    Parts that fail here, which the study can do without, become such lines too.
    """
    done, files = results(study), prepared.files
    missing = [*missing, *missing_in_trials(done)]
    if sampled is None or sampled[0] != done:
        sampled = done, study_posterior(prepared, done, REPORT_PARTICLES)
    summary, band, best = summary_of(prepared, done, sampled[1], stop_reason, missing)
    with optional("no critical batch size at easier targets", missing):
        summary |= _over_target(prepared, done, summary["critical"])
    summary["test"] = _test_winners(prepared, study, best, missing)
    if arguments is not None:
        summary["arguments"] = _again(arguments)
    if summary["use"] is not None and arguments is not None:
        summary["train"] = train_command(best[WINNERS[summary["use"]].merit], arguments, prepared)
    notes = [*prepared.caveats, *_elsewhere(prepared, study, best)]
    summary["notes"] = [*notes, *missing]
    write_text(files.curve, dump_json(summary, indent=2) + "\n")
    write_text(files.best, best_yaml(best, arguments, prepared))
    # What follows takes seconds, and MLflow's server may take longer: the answer comes before it.
    show(answer(summary), console)
    answered = len(missing)
    with optional("no figure of the curve", missing):
        draw_curve(done, summary, files.figure, files.vector_figure)
    if prepared.options.hardware.scale_out.show:
        _show_plan(prepared, summary, missing, console)
    if len(missing) > answered:
        summary["notes"] = [*notes, *missing]
        write_text(files.curve, dump_json(summary, indent=2) + "\n")
    with optional("no page of the study", missing):
        write_page(read_study(files.root), files.report)
    mlflow: Sequence[str] = ()
    if tracking is not None:
        with optional("MLflow lacks the results", missing):
            mlflow = _track(prepared, tracking, summary)
    summary["notes"] = [*notes, *missing]  # of what failed since, too
    show_places(places(files, mlflow), missing[answered:], console)
    return Findings(prepared, done, summary, band)


def summary_of(
    prepared: PreparedStudy,
    done: Sequence[TrialResult],
    posterior: Posterior,
    stop_reason: str | None,
    missing: list[str],
) -> tuple[Summary, CurveBand | None, dict[Merit, Winner]]:
    """Return the content of ``curve.json``, S*(B), and the winners, of trials and their posterior.

    Nothing is trained, written or printed. ``missing`` gets a line for each part that fails.
    """
    options, space, budget, target = (
        prepared.options,
        prepared.space,
        prepared.budget,
        prepared.protocol.target,
    )
    ranking = done, fresh_steps(posterior), budget.objective, budget.replicates, budget.candidates
    horizons = fresh_horizons(posterior)
    best = {
        merit: replace(winner, predicted_horizon=horizons.get(winner.trial.number))
        for merit, winner in winners(*ranking).items()
    }
    critical = critical_batch(posterior, budget.objective != "steps")
    b_crit = None if critical is None else critical.b_crit
    exponent = fit_lr_exponent(
        posterior, space.low, space.high, b_crit, options.scaling.noise_scale
    )
    band = None if critical is None else _band(posterior, critical)
    ideal, real = _plan(prepared, posterior, critical, missing)
    use = MERITS[budget.objective][0]
    runs = baseline_runs(done, prepared.baseline)
    scatter = seed_scatter(posterior)
    merits = sorted(WINNERS, key=lambda name: WINNERS[name].merit not in MERITS[budget.objective])
    rule = options.scaling.rule["_target_"].rpartition(".")[2]
    summary = {
        "study": options.study,
        "workload": options.workload.name,
        "tokens": options.workload.tokens,
        "objective": budget.objective,
        **summarize(
            done,
            target,
            _fit(done),
            exponent,
            stop_reason,
            critical,
            best,
            prepared.protocol.budget,
        ),
        "use": next((name for name in merits if WINNERS[name].merit in best), None),
        "train": None,
        "arguments": None,
        "search": {
            "trials": budget.trials,
            "replicates": budget.replicates,
            "limit": _limit(stop_reason),
        },
        "reference": {
            "batch_size": options.scaling.batch_size,
            "lr": options.scaling.lr,
            "rule": rule,
        },
        "curve": None
        if band is None
        else curve_rows(
            posterior, band, step_times(posterior, space.high, prepared.backend.step_time)
        ),
        "load": load(done),
        "seed_scatter": None if critical is None else scatter,
        "baseline": baseline_row(runs, target, ideal_of(prepared)),
        "so_far": so_far_row(done, target, None if runs is None else runs.first, posterior),
        "gain": gain_row(runs, best.get(use), use, scatter["scatter"]),
        "not_run_again": _not_run_again(left_out(*ranking), budget.candidates),
        "over_target": [],
        "over_target_note": None,
        "over_target_growth": None,
        "test": {},
        "scale_out": {
            "ideal": [asdict(row) for row in ideal],
            "with_all_reduce": [asdict(row) for row in real],
        },
        "notes": [],
    }
    return summary, band, best


def curve_rows(
    posterior: Posterior,
    band: CurveBand,
    tau: Callable[[NDArray[np.float64]], NDArray[np.float64]] | None,
) -> dict[str, list[float | None]]:
    """Return S*(B), tau(B) and the best learning rate with its interval, on the curve's ladder of batch sizes.

    ``tau`` in seconds is not the posterior's, which counts examples where the objective is steps; None: not timed.
    """
    rates = best_learning_rates(posterior, band.batch_size, INTERVAL)
    named = {"batch_size": band.batch_size, "steps": band.steps, "low": band.low, "high": band.high}
    named |= dict(zip(("lr_low", "lr", "lr_high"), rates, strict=True))
    seconds = [None] * len(band.batch_size) if tau is None else tau(band.batch_size).tolist()
    return {
        **{name: values.tolist() for name, values in named.items()},
        "seconds_per_step": seconds,
    }


def _limit(stop_reason: str | None) -> str | None:
    """Return the option that ended the search before its trials were through."""
    found = re.match(r"stopped: (search\.\w*seconds)=", stop_reason or "")
    return None if found is None else found[1]


def places(files: Output, mlflow: Sequence[str]) -> list[Line]:
    """Return where the results are, as lines of the console's block."""
    root = _short(files.root)
    own = (files.figure, files.vector_figure, files.curve, files.trials, files.best)
    kept = [path.name for path in own if path.exists()]
    places: list[Line] = [("report", (_short(files.report),))] if files.report.exists() else []
    places.append(("files", (f"{root}/{{{','.join(kept)}}}",)))
    if any(path != files.curve for path in files.root.parent.glob("*/curve.json")):
        places.append(("compare", (f"bstune compare {_short(files.root.parent)}/*",)))
    return [*places, ("MLflow", tuple(mlflow))] if mlflow else places


def _short(path: Path) -> str:
    """Return a path as it is typed here, in quotes where the shell needs them."""
    here = Path.cwd()
    return shlex.quote(str(path.relative_to(here) if path.is_relative_to(here) else path))


def show(found: Answer, console: Console, places: Sequence[Line] = ()) -> None:
    """Print the answer, as at most 25 lines; its labels are bold on a terminal."""
    width = max(MIN_WIDTH, min(WIDTH, console.width)) if console.is_terminal else WIDTH
    rows = ["", *block(found, places, width)]
    if not rows[-1]:
        rows.pop()
    lines = [Text(line) for line in rows]
    for text in lines[2:]:  # below the title
        style = "bold red" if text.plain.startswith("WARNING") else "bold"
        text.stylize(style, 0, INDENT if text.plain[:1].strip() else 0)
    console.print(Text("\n").join(lines), soft_wrap=True)


def show_places(places: Sequence[Line], missing: Sequence[str], console: Console) -> None:
    """Print where the results are, and what could not be made of them after the answer."""
    rows = [Text("")]
    for label, texts in [*places, *(("NOTE", (line,)) for line in missing)]:
        for place, text in enumerate(texts):
            start = label if place == 0 else ""
            row = Text(f"{start:<{INDENT}}{text}")
            row.stylize("bold", 0, INDENT)
            rows.append(row)
    console.print(Text("\n").join(rows), soft_wrap=True)


def _show_plan(
    prepared: PreparedStudy, summary: Summary, missing: list[str], console: Console
) -> None:
    """Draw and print the plan for several devices, if there is one."""
    ideal, real = ([ScaleOut(**row) for row in rows] for rows in summary["scale_out"].values())
    if not ideal:
        return
    with optional("no figure of the plan for several devices", missing):
        draw_scale_out(ideal, real, summary["workload"], prepared.files.scale_out)
    link, largest = (
        "with the" if real else "without an",
        format_count(round(ROOM * summary["critical"]["largest"])),
    )
    title = f"several devices, each as fast as this one, {link} all-reduce\n(up to B = {largest})"
    console.print(scale_out_table(real or ideal, title))


def _plan(
    prepared: PreparedStudy,
    posterior: Posterior,
    critical: CriticalBatch | None,
    missing: list[str],
) -> tuple[list[ScaleOut], list[ScaleOut]]:
    """Return the plan for several devices, without an all-reduce and with it; it starts from the seconds of one.

    There is none where an end of the critical batch size's interval is open: the curve does not allow it.
    """
    ideal, real = list[ScaleOut](), list[ScaleOut]()
    if critical is None or prepared.options.devices > 1:
        return ideal, real
    if critical.b_crit_low is None or critical.b_crit_high is None:
        if prepared.options.hardware.scale_out.show:
            missing.append(
                "no plan for several devices: the critical batch size's interval has an open end"
            )
        return ideal, real
    with optional("no plan for several devices", missing):
        ideal, real = scale_out(prepared, posterior, round(ROOM * critical.largest))
    return ideal, real


def _fit(done: Sequence[TrialResult]) -> CurveFit | str:
    """Return the fit to the frontier's points, or why there is none."""
    try:
        return fit_curve(frontier_points(done))
    except CurveError as error:
        return str(error)


def _not_run_again(left: Winner | None, max_candidates: int) -> dict[str, Any] | None:
    """Return the point, predicted to be better than the winner, that ``search.candidates`` kept from fresh seeds."""
    if left is None:
        return None
    return {"batch_size": left.trial.batch_size, "lr": left.trial.lr, "candidates": max_candidates}


def missing_in_trials(done: Sequence[TrialResult]) -> list[str]:
    """Return a line for each thing that trials went on without, such as the noise scale, and in how many."""
    messages = Counter(
        trial.message for trial in done if trial.message and trial.status in ("reached", "censored")
    )
    return [f"{message} (in {plural(count, 'trial')})" for message, count in messages.items()]


def _track(prepared: PreparedStudy, tracking: "Tracking", summary: Summary) -> tuple[str, ...]:
    """Send the results and files to MLflow; return what opens its page of the studies."""
    files = prepared.files
    kept = [files.figure, files.trials, files.curve, files.best, files.config]
    kept += [files.vector_figure, files.report, files.scale_out, files.survey, files.roofline]
    tracking.finish_study(summary, [path for path in kept if path.exists()])
    return tracking.opening


def _elsewhere(
    prepared: PreparedStudy, study: optuna.Study, best: Mapping[Merit, Winner]
) -> list[str]:
    """Return a line for each winner whose checkpoint another machine has."""
    files, numbers = prepared.files, {one.trial.number for one in best.values()}
    if prepared.backend.train_examples is None:
        return []
    return [
        f"the checkpoint of trial {number} is not in {files.checkpoints}, but with {trained_by(study, number)}"
        for number in sorted(numbers)
        if not is_own(files.checkpoint(number))
    ]


def _band(posterior: Posterior, critical: CriticalBatch) -> CurveBand:
    """Return S*(B) where the study looked: between the batch sizes that reached the target."""
    ratio = critical.largest / critical.smallest
    ladder = sorted(
        {round(critical.smallest * ratio ** (i / CURVE_LADDER)) for i in range(CURVE_LADDER + 1)}
    )
    return steps_band(posterior, ladder, INTERVAL)


def _over_target(
    prepared: PreparedStudy, done: Sequence[TrialResult], critical: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return B_crit at easier targets and how it grows, or why there is none, as ``curve.json`` has them."""
    target, ideal, horizon = (
        prepared.protocol.target,
        sampler_context(prepared)["ideal"],
        prepared.backend.horizon,
    )
    rows: list[dict[str, Any]] = []
    if not horizon:
        rows = over_targets(
            [trial for trial in done if trial.status != "failed"],
            target,
            ideal,
            lambda trials, easier: study_posterior(prepared, trials, TARGET_PARTICLES, easier),
        )
    note = None if rows else no_easier_target(target, ideal, horizon)
    found = None
    if ideal is not None and critical is not None:
        found = growth([*rows, {"target": target.value, **critical}], ideal)
    return {"over_target": rows, "over_target_note": note, "over_target_growth": found}


def load(done: Sequence[TrialResult]) -> dict[str, float] | None:
    """Return between what trials' own seconds per step, over the survey's, lie: the middle 80% of trials.

    None where there was no survey, or too few trials were long enough to be timed.
    """
    timed = [trial for trial in done if trial.steps >= MIN_TIMED]
    pairs = [(trial.measured_seconds_per_step, trial.seconds_per_step) for trial in timed]
    ratios = sorted(measured / tau for measured, tau in pairs if measured is not None and tau)
    if len(ratios) < MIN_TIMED:
        return None
    return {"low": ratios[len(ratios) // 10], "high": ratios[-1 - len(ratios) // 10]}


def _test_winners(
    prepared: PreparedStudy, study: optuna.Study, best: Mapping[Merit, Winner], missing: list[str]
) -> dict[str, dict[str, float]]:
    """Return the winners' metrics on the test set; each trial is tested once, however often the study goes on.

    Where the user's code fails there, a line says so.
    """
    tests: dict[str, dict[str, float]] = dict(study.user_attrs.get(TESTS, {}))
    for winner in best.values():
        trial = winner.trial
        names = ("number", "trial_index", "batch_size", "lr", "delta", "seed", "hyperparameters")
        spec = TrialSpec(**{name: getattr(trial, name) for name in names})
        if str(trial.number) in tests:
            continue
        with (
            optional(f"no test metrics of trial {trial.number}", missing),
            chdir("."),
        ):  # that code may leave the folder
            if metrics := prepared.backend.test(spec, prepared.files):
                tests[str(trial.number)] = dict(metrics)
    study.set_user_attr(TESTS, tests)
    numbers = {
        name: str(best[one.merit].trial.number)
        for name, one in WINNERS.items()
        if one.merit in best
    }
    return {name: tests[number] for name, number in numbers.items() if number in tests}


def best_yaml(
    best: Mapping[Merit, Winner], arguments: Sequence[str] | None, prepared: PreparedStudy
) -> str:
    """Return the winners as YAML, each with its checkpoint, if it left one, and the command that runs it again.

    A study without ``arguments``, as one of Python objects, has no such command.
    """
    kept = _again(arguments or ())
    values: dict[str, Any] = {}
    for name, criterion in WINNERS.items():
        if criterion.merit not in best:
            continue
        trial = best[criterion.merit].trial
        own = [
            f"trial.batch_size={trial.batch_size}",
            f"trial.lr={trial.lr!r}",
            f"trial.seed={trial.seed}",
        ]
        # Where trials stop early, what was evaluated depends on their limits; elsewhere the schedule does.
        limit = trial.steps if prepared.backend.stops else best[criterion.merit].advised_horizon
        own += [] if limit is None else [f"budget.steps={limit}", "budget.examples=1"]
        own += overrides(prepared.options, trial.hyperparameters)
        checkpoint = prepared.files.checkpoint(trial.number)
        values[name] = {
            **winner_row(best[criterion.merit]),
            "checkpoint": str(checkpoint.absolute()) if is_own(checkpoint) else None,
            "command": None
            if arguments is None
            else shlex.join([sys.executable, "-m", "bstune", *kept, *own]),
        }
    names = sorted(set(re.findall(r"oc\.env:(\w+)", " ".join(kept))))
    comment = ""
    if names:
        comment = f"# The commands read the environment: first set {', '.join(names)}.\n"
    return comment + yaml.safe_dump(redact_values(values), sort_keys=False)


def train_command(winner: Winner, arguments: Sequence[str], prepared: PreparedStudy) -> str:
    """Return the command that trains the winner's point, on the config's own seed, to the target."""
    trial, space = winner.trial, prepared.space
    kept = [one for one in _again(arguments) if not one.lstrip("+~").startswith(OF_A_STUDY)]
    short = float(format_number(trial.lr).replace(",", ""))
    lr = short if space.lr_low <= short <= space.lr_high else trial.lr
    own = [f"trial.batch_size={trial.batch_size}", f"trial.lr={lr!r}"]
    horizon = winner.advised_horizon
    if not prepared.backend.stops and horizon is not None:
        own += [f"budget.steps={horizon}", "budget.examples=1"]
    return shlex.join(["bstune", *kept, *own, *overrides(prepared.options, trial.hyperparameters)])


def _again(arguments: Sequence[str]) -> list[str]:
    """Return the arguments that give the study again, without a trial's own."""
    return [argument for argument in arguments if not argument.startswith("trial.")]
