"""The report of a job's study: its files, its answer, the winners on the test set, its curve in MLflow."""

import math
import re
import shlex
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import chdir
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import optuna
import yaml
from numpy.typing import NDArray
from rich.console import Console
from rich.text import Text

from bstune.core.curve import CurveBand, CurveError, CurveFit, fit_curve, frontier_points
from bstune.core.objectives import SOUGHT
from bstune.core.records import Merit, TrialResult
from bstune.core.step_time_law import StepTimeLaw
from bstune.options import overrides
from bstune.report.answer import INDENT, Answer, Line, answer, block, labelled_rows
from bstune.report.figure import draw_curve
from bstune.report.page import write_page
from bstune.report.study_folder import read_study
from bstune.result import (
    INTERVAL_QUANTILE,
    WINNERS,
    AsGood,
    CriticalAtTarget,
    CriticalBatchSize,
    Curve,
    DevicePlans,
    NotRunAgain,
    Reaching,
    Reference,
    SearchPlan,
    StepTiming,
    StudyResult,
    WinnerName,
    finite,
)
from bstune.search.acquisition import best_learning_rates, steps_band
from bstune.search.observations import (
    Posterior,
    chance_of_reaching,
    fresh_horizons,
    fresh_steps,
)
from bstune.search.posterior import frontier
from bstune.study.as_good import as_good
from bstune.study.baseline import baseline_result, baseline_runs, gain_of
from bstune.study.common_step_time import common_law, own_step_times, with_common_step_time
from bstune.study.critical import (
    INTERVAL,
    ROOM,
    at_target_value,
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
from bstune.study.plan import SearchEnd
from bstune.study.prepare import PreparedStudy
from bstune.study.replicates import Winner, confirmed, confirmed_points, left_out, winners
from bstune.study.scale_out import draw_scale_out, scale_out, scale_out_table, step_times
from bstune.study.storage import TESTS, WINNER, results, trained_by
from bstune.study.summary import (
    Analysis,
    Asked,
    OverTarget,
    summarize,
    winner_result,
    winner_to_use,
)
from bstune.study.unreached import best_so_far
from bstune.system.console import format_count, line_width, plural
from bstune.system.failures import optional
from bstune.system.files import Output, is_own, write_text
from bstune.system.processor_wait import processors
from bstune.system.secrets import redact_values

if TYPE_CHECKING:
    from bstune.tracking.runs import Tracking

TARGET_PARTICLES = 400  # of the posterior at each easier target
# Standard deviation of the log of two batch sizes' ratio of seconds: from here on timing is what blurs them.
BLURRED = 0.1
CURVE_LADDER = 48  # batch sizes at which the fitted curve is sent to MLflow
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
    """A study that has been run, its trials and its result."""

    prepared: PreparedStudy
    trials: list[TrialResult]
    result: StudyResult

    def to_json(self) -> str:
        """Give the content of ``curve.json``."""
        return self.result.to_json()


def report_study(
    prepared: PreparedStudy,
    study: optuna.Study,
    tracking: "Tracking | None",
    end: SearchEnd,
    arguments: Sequence[str] | None,
    console: Console,
    sampled: tuple[Sequence[TrialResult], Posterior] | None = None,
    missing: Sequence[str] = (),
) -> Findings:
    """Write, print, track and return a study's results; ``arguments`` of a command line run the winners again.

    ``sampled``: the posterior of these trials, if it is at hand; ``missing``: a line for each part that failed before.
    Parts that fail here, which the study can do without, become such lines too.
    """
    recorded, files = results(study), prepared.files
    done = with_common_step_time(prepared, recorded)
    missing = [*missing, *missing_in_trials(done)]
    if sampled is None or sampled[0] != done:
        sampled = done, study_posterior(prepared, done, REPORT_PARTICLES)
    analysis = analyse(prepared, done, sampled[1], missing)
    best = analysis.best
    over_target = OverTarget()
    with optional("no critical batch size at easier targets", missing):
        over_target = _over_target(prepared, done, analysis.critical)
    test = _test_winners(prepared, study, best, missing)
    _mark_winners(study, best)
    elsewhere = _elsewhere(prepared, study, best)
    notes = [*prepared.caveats, *elsewhere]
    result = summarize(
        done,
        asked_of(prepared, end),
        analysis,
        stop_reason=end.sentence,
        over_target=over_target,
        test=test,
        arguments=None if arguments is None else _again(arguments),
        train=_train(prepared, best, arguments),
        notes=[*notes, *missing],
    )
    write_text(files.curve, result.to_json())
    write_text(files.best, best_yaml(best, arguments, prepared))
    # What follows takes seconds, and MLflow's server may take longer: the answer comes before it.
    found = answer(result)
    # A study of Python objects has no command.
    in_python = list[Line]()
    if arguments is None and result.winner is not None:
        in_python.append(("NEXT", ("result.train()",)))
    show(found, console, in_python)
    answered = len(missing)
    with optional("no figure of the curve", missing):
        draw_curve(done, result, files.figure, files.vector_figure)
    if prepared.options.hardware.scale_out.show:
        _show_plan(prepared, result, missing, console)
    if len(missing) > answered:
        result = result.with_notes([*notes, *missing])
        write_text(files.curve, result.to_json())
    with optional("no page of the study", missing):
        write_page(read_study(files.root), files.report)
    mlflow: Sequence[str] = ()
    if tracking is not None:
        with optional("MLflow lacks the results", missing):
            mlflow = _track(prepared, tracking, result)
    result = result.with_notes([*notes, *missing])  # of what failed since, too
    show_places(places(files, mlflow), [*elsewhere, *missing], console)
    return Findings(prepared, recorded, result)


def asked_of(prepared: PreparedStudy, end: SearchEnd | None) -> Asked:
    """Tell what a study was asked for, and the option that ended its search."""
    options, budget = prepared.options, prepared.budget
    return Asked(
        study=options.study,
        workload=options.workload.name,
        tokens=options.workload.tokens,
        objective=budget.objective,
        target=prepared.protocol.target,
        budget=prepared.protocol.budget,
        search=SearchPlan(
            trials=budget.trials,
            replicates=budget.replicates,
            limit=None if end is None else end.limit,
        ),
        reference=Reference(
            batch_size=options.scaling.batch_size,
            lr=options.scaling.lr,
            rule=options.scaling.rule["_target_"].rpartition(".")[2],
        ),
    )


def analyse(
    prepared: PreparedStudy,
    done: Sequence[TrialResult],
    posterior: Posterior,
    missing: list[str],
) -> Analysis:
    """Tell what trials and their posterior say: the critical batch size, S*(B), the winners and what follows.

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
    best = dict[Merit, Winner]()
    for merit, found in winners(*ranking).items():
        foreseen = replace(found, predicted_horizon=horizons.get(found.trial.number))
        if found.trial.number in horizons:
            foreseen = replace(foreseen, reaching=reaching_of(posterior, foreseen))
        best[merit] = foreseen
    critical = critical_batch(posterior, budget.objective != "steps")
    b_crit = None if critical is None else critical.value
    exponent = fit_lr_exponent(
        posterior, space.low, space.high, b_crit, options.scaling.noise_scale
    )
    band = None if critical is None else _band(posterior, critical)
    plans = _plan(prepared, posterior, critical, missing)
    use = SOUGHT[budget.objective].merits[0]
    law = law_of(prepared, done)
    again = confirmed_points(done, budget.replicates)
    runs = baseline_runs(done, prepared.baseline)
    scatter = seed_scatter(posterior)
    curve = None
    if band is not None:
        tau = step_times(posterior, space.high, prepared.backend.step_time)
        curve = curve_of(posterior, band, tau, law)
    winner = best.get(use)
    good: AsGood | None = None
    if curve is not None and winner is not None and (use == "steps" or curve.seconds_per_step):
        drawn = merit_draws(posterior, curve, use, law)
        good = as_good(curve.batch_size, curve.lr, drawn, winner.trial, use)
    return Analysis(
        fit=_fit(done),
        critical=critical,
        best=best,
        lr_exponent=exponent,
        curve=curve,
        seed_scatter=None if critical is None else scatter,
        baseline=baseline_result(runs, target, ideal_of(prepared)),
        so_far=best_so_far(done, target, None if runs is None else runs.first, posterior),
        gain=gain_of(runs, winner, use, scatter.scatter),
        as_good=good,
        timing=timing_of(prepared, law, winner, again),
        not_run_again=_not_run_again(left_out(*ranking), budget.candidates),
        scale_out=plans,
    )


def reaching_of(posterior: Posterior, winner: Winner) -> Reaching | None:
    """Tell how likely further seeds reach the target at a winner whose schedule ends with the trial."""
    horizon = winner.advised_horizon
    if horizon is None:
        return None
    number = winner.trial.number
    longest = horizon
    if posterior.budget is not None:
        longest = max(horizon, math.floor(posterior.budget(winner.trial.batch_size)))
    return Reaching(
        chance=chance_of_reaching(posterior, number, horizon),
        best_chance=chance_of_reaching(posterior, number, longest),
        longest=longest,
    )


def curve_of(
    posterior: Posterior,
    band: CurveBand,
    tau: Callable[[NDArray[np.float64]], NDArray[np.float64]] | None,
    law: StepTimeLaw | None = None,
) -> Curve:
    """S*(B), tau(B) and the best learning rate with its interval, on the curve's ladder of batch sizes.

    ``tau`` in seconds is not the posterior's, which counts examples where the objective is steps; None: not timed.
    """
    lr_low, lr, lr_high = best_learning_rates(posterior, band.batch_size, INTERVAL)
    seconds_per_step = None
    if tau is not None:
        seconds_per_step = tuple(tau(band.batch_size).tolist())
    seconds_error = None
    if law is not None:
        seconds_error = tuple(law.relative_error(size) for size in band.batch_size.tolist())
    return Curve(
        batch_size=tuple(band.batch_size.tolist()),
        steps=tuple(band.steps.tolist()),
        low=tuple(band.low.tolist()),
        high=tuple(band.high.tolist()),
        lr_low=tuple(lr_low.tolist()),
        lr=tuple(lr.tolist()),
        lr_high=tuple(lr_high.tolist()),
        seconds_per_step=seconds_per_step,
        seconds_error=seconds_error,
    )


def merit_draws(
    posterior: Posterior, curve: Curve, merit: Merit, law: StepTimeLaw | None
) -> NDArray[np.float64]:
    """Draw the log of the steps or seconds at each batch size of a curve: shape (draws, batch sizes)."""
    sizes = np.array(curve.batch_size)
    drawn = frontier(posterior.theta, posterior.prior.at(np.log2(sizes)), posterior.prior)
    if merit == "steps" or curve.seconds_per_step is None:
        return drawn
    drawn = drawn + np.log(curve.seconds_per_step)
    if law is None:
        return drawn
    step_times = law.draws(len(drawn), np.random.default_rng(0))
    return np.asarray(drawn + np.log(step_times.over_law(sizes)))


def law_of(prepared: PreparedStudy, done: Sequence[TrialResult]) -> StepTimeLaw | None:
    """Give tau(B) with its error, the survey's or that of all trials.

    None where it is recorded, or too few trials were timed.
    """
    surveyed = prepared.backend.step_time
    if not isinstance(surveyed, StepTimeLaw):
        return common_law(prepared, done)
    timed = prepared.backend.timed
    same_loop = timed is None or timed.seconds_of == "lean"
    return surveyed.seen_by_trials(own_step_times(done), same_loop)


def timing_of(
    prepared: PreparedStudy,
    law: StepTimeLaw | None,
    winner: Winner | None,
    confirmed_winners: Sequence[Winner],
) -> StepTiming | None:
    """Tell what the seconds of a step are, how well they are known at the winner, and what they do not tell."""
    if law is None:
        return None
    batch_size = prepared.options.scaling.batch_size if winner is None else winner.trial.batch_size
    timed = prepared.backend.timed
    return StepTiming(
        seconds_of="lean" if timed is None else timed.seconds_of,
        surveyed=timed is not None,
        relative_error=law.relative_error(batch_size),
        waited=0.0 if timed is None else timed.waited,
        threads=None if timed is None else timed.threads,
        not_told_apart=() if winner is None else not_told_apart(law, winner, confirmed_winners),
    )


def not_told_apart(
    law: StepTimeLaw, winner: Winner, confirmed_winners: Sequence[Winner]
) -> tuple[int, ...]:
    """Give the batch sizes that ran on fresh seeds whose times lie nearer to the winner's than steps are timed.

    Those that steps are timed well enough for, and whose seeds alone do not tell them apart, are no matter of timing.
    """
    own = confirmed(winner.runs)
    found = set[int]()
    for other in confirmed_winners:
        size = other.trial.batch_size
        error = law.ratio_error(size, winner.trial.batch_size)
        fresh = confirmed(other.runs)
        if error < BLURRED or own is None or fresh is None:
            continue
        if own.time_median is None or fresh.time_median is None:
            continue
        if abs(math.log(fresh.time_median / own.time_median)) < INTERVAL_QUANTILE * error:
            found.add(size)
    return tuple(sorted(found - {winner.trial.batch_size}))


def places(files: Output, mlflow: Sequence[str]) -> list[Line]:
    """Give where the results are: the page, or the folder; the comparison; MLflow's view."""
    page = files.report if files.report.exists() else files.root
    found: list[Line] = [("page", (_short(page),))]
    if any(path != files.curve for path in files.root.parent.glob("*/curve.json")):
        found.append(("compare", (f"bstune compare {_short(files.root.parent)}/*",)))
    if mlflow:
        found.append(("MLflow", tuple(mlflow)))
    return found


def _short(path: Path) -> str:
    """Return a path as it is typed here, in quotes where the shell needs them."""
    here = Path.cwd()
    return shlex.quote(str(path.relative_to(here) if path.is_relative_to(here) else path))


def show(found: Answer, console: Console, further: Sequence[Line] = ()) -> None:
    """Print the answer; its labels are bold on a terminal."""
    rows = ["", *block(found, further, line_width(console))]
    if not console.encoding.lower().startswith("utf"):
        # The title's dots are no letters of a name: they need not become question marks.
        rows = [row.replace("·", "-") for row in rows]
    lines = [Text(line) for line in rows]
    # The title, between the first two empty rows, has no label.
    for text in lines[rows.index("", 1) :]:
        style = "bold red" if text.plain.startswith("CAUTION") else "bold"
        is_labelled = bool(text.plain[:1].strip())
        text.stylize(style, 0, INDENT if is_labelled else 0)
    console.print(Text("\n").join(lines), soft_wrap=True)


def show_places(places: Sequence[Line], missing: Sequence[str], console: Console) -> None:
    """Print where the results are, and what could not be made of them after the answer."""
    rows = list[Text]()
    for label, texts in [*places, *(("NOTE", (line,)) for line in missing)]:
        for line in labelled_rows(label, texts, None):
            row = Text(line)
            row.stylize("bold", 0, INDENT)
            rows.append(row)
    console.print(Text("\n").join(rows), soft_wrap=True)


def _show_plan(
    prepared: PreparedStudy, result: StudyResult, missing: list[str], console: Console
) -> None:
    """Draw and print the plan for several devices, if there is one."""
    plans, critical = result.scale_out, result.critical_batch_size
    if not plans.ideal or critical is None:
        return
    with optional("no figure of the plan for several devices", missing):
        draw_scale_out(
            plans.ideal, plans.with_all_reduce, result.workload, prepared.files.scale_out
        )
    link = "with the" if plans.with_all_reduce else "without an"
    largest = format_count(round(ROOM * critical.largest))
    title = f"several devices, each as fast as this one, {link} all-reduce\n(up to B = {largest})"
    console.print(scale_out_table(plans.told, title))


def _plan(
    prepared: PreparedStudy,
    posterior: Posterior,
    critical: CriticalBatchSize | None,
    missing: list[str],
) -> DevicePlans:
    """Give the plan for several devices; it starts from the seconds of one.

    There is none where an end of the critical batch size's interval is open: the curve does not allow it.
    """
    if critical is None or prepared.options.devices > 1:
        return DevicePlans()
    if critical.is_open:
        if prepared.options.hardware.scale_out.show:
            missing.append(
                "no plan for several devices: the critical batch size's interval has an open end"
            )
        return DevicePlans()
    plans = DevicePlans()
    with optional("no plan for several devices", missing):
        plans = scale_out(prepared, posterior, round(ROOM * critical.largest))
    return plans  # noqa: RET504 (empty where that failed)


def _fit(done: Sequence[TrialResult]) -> CurveFit | str:
    """Return the fit to the frontier's points, or why there is none."""
    try:
        return fit_curve(frontier_points(done))
    except CurveError as error:
        return str(error)


def _not_run_again(left: Winner | None, max_candidates: int) -> NotRunAgain | None:
    """Give the point, predicted to be better than the winner, that ``search.candidates`` kept from fresh seeds."""
    if left is None:
        return None
    return NotRunAgain(
        batch_size=left.trial.batch_size, lr=left.trial.lr, candidates=max_candidates
    )


def missing_in_trials(done: Sequence[TrialResult]) -> list[str]:
    """Return a line for each thing that trials went on without, such as the noise scale, and in how many."""
    messages = Counter(
        trial.message for trial in done if trial.message and trial.status in ("reached", "stopped")
    )
    return [f"{message} (in {plural(count, 'trial')})" for message, count in messages.items()]


def _track(prepared: PreparedStudy, tracking: "Tracking", result: StudyResult) -> tuple[str, ...]:
    """Send the results and files to MLflow; return what opens its page of the studies."""
    files = prepared.files
    kept = [files.figure, files.trials, files.curve, files.best, files.config]
    kept += [files.vector_figure, files.report, files.scale_out, files.survey, files.roofline]
    tracking.finish_study(result, [path for path in kept if path.exists()])
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


def _band(posterior: Posterior, critical: CriticalBatchSize) -> CurveBand:
    """Return S*(B) where the study looked: between the batch sizes that reached the target."""
    ratio = critical.largest / critical.smallest
    ladder = sorted(
        {round(critical.smallest * ratio ** (i / CURVE_LADDER)) for i in range(CURVE_LADDER + 1)}
    )
    return steps_band(posterior, ladder, INTERVAL)


def _over_target(
    prepared: PreparedStudy, done: Sequence[TrialResult], critical: CriticalBatchSize | None
) -> OverTarget:
    """B_crit at easier targets and how it grows, or why there is none."""
    target = prepared.protocol.target
    ideal = sampler_context(prepared)["ideal"]
    horizon = prepared.backend.horizon
    rows = list[CriticalAtTarget]()
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
        reached = sum(trial.reached for trial in done)
        found = growth([*rows, at_target_value(critical, target.value, reached)], ideal)
    return OverTarget(rows, note, found)


def _test_winners(
    prepared: PreparedStudy, study: optuna.Study, best: Mapping[Merit, Winner], missing: list[str]
) -> dict[WinnerName, dict[str, float | None]]:
    """Return the winners' metrics on the test set; each trial is tested once, however often the study goes on.

    Where the user's code fails there, a line says so.
    """
    tests: dict[str, dict[str, float]] = dict(study.user_attrs.get(TESTS, {}))
    untested = [one.trial for one in best.values() if str(one.trial.number) not in tests]
    for trial in untested:
        with (
            optional(f"no test metrics of trial {trial.number}", missing),
            chdir("."),
        ):  # that code may leave the folder
            if metrics := prepared.backend.test(trial.again(), prepared.files):
                tests[str(trial.number)] = dict(metrics)
    if untested:
        study.set_user_attr(TESTS, tests)
    numbers = {
        name: str(best[one.merit].trial.number)
        for name, one in WINNERS.items()
        if one.merit in best
    }
    found = dict[WinnerName, dict[str, float | None]]()
    for name, number in numbers.items():
        if number in tests:
            found[name] = {metric: finite(value) for metric, value in tests[number].items()}
    return found


def _mark_winners(study: optuna.Study, best: Mapping[Merit, Winner]) -> None:
    """Store the winners where Optuna's dashboard shows them: with the study, as no trial that has ended is changed."""
    shown = dict[str, dict[str, int | float]]()
    for criterion in WINNERS.values():
        if criterion.merit in best:
            trial = best[criterion.merit].trial
            point = {"trial": trial.number, "batch_size": trial.batch_size, "lr": trial.lr}
            shown[criterion.heading] = point
    if study.user_attrs.get(WINNER, {}) != shown:
        study.set_user_attr(WINNER, shown)


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
            **winner_result(best[criterion.merit]).model_dump(mode="json"),
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


def _train(
    prepared: PreparedStudy, best: Mapping[Merit, Winner], arguments: Sequence[str] | None
) -> str | None:
    """Give the command that trains the winner to use; None without a winner, or of Python objects."""
    use = winner_to_use(prepared.budget.objective, best)
    if use is None or arguments is None:
        return None
    return train_command(best[WINNERS[use].merit], arguments, prepared)


def train_command(winner: Winner, arguments: Sequence[str], prepared: PreparedStudy) -> str:
    """Return the command that trains the winner's point, on the config's own seed, to the target."""
    trial, space = winner.trial, prepared.space
    tunables = {one.name: one for one in space.tunables}
    kept = [one for one in _again(arguments) if not one.lstrip("+~").startswith(OF_A_STUDY)]
    lr = rounded_within(trial.lr, space.lr_low, space.lr_high)
    values = dict[str, float]()
    for name, value in trial.hyperparameters.items():
        one = tunables.get(name)
        values[name] = value if one is None else rounded_within(value, one.low, one.high)
    own = [f"trial.batch_size={trial.batch_size}", f"trial.lr={lr!r}"]
    horizon = winner.advised_horizon
    if not prepared.backend.stops and horizon is not None:
        own += [f"budget.steps={horizon}", "budget.examples=1"]
    own += _threads_option(prepared)
    return shlex.join(["bstune", *kept, *own, *overrides(prepared.options, values)])


def _threads_option(prepared: PreparedStudy) -> list[str]:
    """Give the option of the threads that a survey chose; none where a single trial has as many by itself."""
    timed = prepared.backend.timed
    if timed is None or timed.threads is None or prepared.options.threads != "auto":
        return []
    return [] if timed.threads == processors() else [f"threads={timed.threads}"]


def rounded_within(value: float, low: float, high: float) -> float:
    """Give a value with four digits, as it is shown; the value itself where that leaves its range."""
    if isinstance(value, int):
        return value
    shown = float(f"{value:.3e}")
    return shown if low <= shown <= high else value


def _again(arguments: Sequence[str]) -> list[str]:
    """Return the arguments that give the study again, without a trial's own."""
    return [argument for argument in arguments if not argument.startswith("trial.")]
