"""The report of a job's study: its files, its answer, the winners on the test set, its curve in MLflow."""

import re
import shlex
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import chdir, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import optuna
import yaml
from rich.console import Console
from rich.text import Text

from bstune.core.records import Merit, TrialResult
from bstune.options import overrides
from bstune.report.answer import INDENT, Answer, Line, answer, block, labelled_rows
from bstune.report.budget_figure import draw_budget
from bstune.report.figure import draw_curve
from bstune.report.page import write_page
from bstune.report.running_page import is_running_page
from bstune.report.study_folder import read_study
from bstune.result import (
    WINNERS,
    AtBudget,
    Reference,
    SearchPlan,
    StudyResult,
    WinnerName,
    WorkloadSize,
    finite,
)
from bstune.search.observations import Posterior
from bstune.study.analysis.analyse import analyse, easier_targets_of
from bstune.study.analysis.at_budget import analyse_at_budget
from bstune.study.analysis.critical import ROOM
from bstune.study.analysis.model import (
    REPORT_PARTICLES,
    study_posterior,
)
from bstune.study.analysis.scale_out import draw_scale_out, scale_out_table
from bstune.study.analysis.step_times import with_common_step_time
from bstune.study.analysis.summary import (
    Analysis,
    Asked,
    OverTarget,
    summarize,
    winner_result,
    winner_to_use,
)
from bstune.study.at_budget import question_of
from bstune.study.planning.plan import SearchEnd
from bstune.study.planning.replicates import Winner
from bstune.study.prepare import PreparedStudy
from bstune.study.storage.attributes import TESTS, WINNER
from bstune.study.storage.trials import results, trained_by
from bstune.system.console import format_count, line_width, plural
from bstune.system.failures import optional
from bstune.system.files import Output, is_own, write_text
from bstune.system.processor_wait import processors
from bstune.system.secrets import redact_values
from bstune.trial.backend import TrialBackend

if TYPE_CHECKING:
    from bstune.tracking.runs import Tracking

NO_TARGET = "the objective loss has no target"
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
    analysis = _analysis_of(prepared, done, sampled, missing)
    best = analysis.best
    over_target = OverTarget()
    if prepared.budget.objective != "loss":
        with optional("no critical batch size at easier targets", missing):
            over_target = easier_targets_of(prepared, done, analysis.critical)
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
        train=_train(prepared, analysis, done, arguments),
        notes=[*notes, *missing],
    )
    write_text(files.curve, result.to_json())
    write_text(files.best, best_yaml(best, arguments, prepared))
    # What follows takes seconds, and MLflow's server may take longer: the answer comes before it.
    found = answer(result)
    # A study of Python objects has no command.
    in_python = list[Line]()
    has_winner = result.winner is not None or result.at_budget is not None
    if arguments is None and has_winner and prepared.recipe is not None:
        in_python.append(("NEXT", ("result.train()",)))
    show(found, console, in_python)
    answered = len(missing)
    with optional("no figure of the curve", missing):
        draw = draw_budget if result.objective == "loss" else draw_curve
        draw(done, result, files.figure, files.vector_figure)
    if prepared.options.hardware.scale_out.show:
        _show_plan(prepared, result, missing, console)
    if len(missing) > answered:
        result = result.with_notes([*notes, *missing])
        write_text(files.curve, result.to_json())
    drawn = len(missing)
    with optional("no page of the study", missing):
        write_page(read_study(files.root), files.report)
    if len(missing) > drawn and is_running_page(files.report):
        # It would say that the study runs.
        with suppress(OSError):
            files.report.unlink()
    mlflow: Sequence[str] = ()
    if tracking is not None:
        with optional("MLflow lacks the results", missing):
            mlflow = _track(prepared, tracking, result)
    result = result.with_notes([*notes, *missing])  # of what failed since, too
    show_places(places(files, mlflow), [*elsewhere, *missing], console)
    return Findings(prepared, recorded, result)


def _analysis_of(
    prepared: PreparedStudy,
    done: Sequence[TrialResult],
    sampled: tuple[Sequence[TrialResult], Posterior] | None,
    missing: list[str],
) -> Analysis:
    """Tell what the trials say; ``sampled``: the posterior of some trials, which may be these."""
    if prepared.budget.objective == "loss":
        at_budget: AtBudget | None = None
        with optional("no answer for the budget's end", missing):
            at_budget = analyse_at_budget(prepared, done)
        return Analysis(fit=NO_TARGET, at_budget=at_budget)
    if sampled is None or sampled[0] != done:
        sampled = done, study_posterior(prepared, done, REPORT_PARTICLES)
    return analyse(prepared, done, sampled[1], missing)


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
        question=question_of(options) if budget.objective == "loss" else None,
        size=_size_of(prepared.backend),
        overrides_lr=options.scaling.override_lr,
    )


def _size_of(backend: TrialBackend) -> WorkloadSize | None:
    if not backend.train_examples or not backend.parameters:
        return None
    return WorkloadSize(examples=backend.train_examples, parameters=backend.parameters)


def places(files: Output, mlflow: Sequence[str]) -> list[Line]:
    """Give where the results are: the page, or the folder; the comparison; MLflow's view."""
    page = files.report if files.report.exists() else files.root
    found: list[Line] = [("page", (short_path(page),))]
    if any(path != files.curve for path in files.root.parent.glob("*/curve.json")):
        found.append(("compare", (f"bstune compare {short_path(files.root.parent)}/*",)))
    if mlflow:
        found.append(("MLflow", tuple(mlflow)))
    return found


def short_path(path: Path) -> str:
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
        f"the checkpoint of trial {number} is not in {files.checkpoints}, but with "
        f"{trained_by(study, number)}"
        for number in sorted(numbers)
        if not is_own(files.checkpoint(number))
    ]


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
    kept = _with_known_target(_again(arguments or ()), prepared)
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
        # Where trials stop early, what was evaluated depends on their limits; elsewhere the
        # schedule does.
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
    prepared: PreparedStudy,
    analysis: Analysis,
    done: Sequence[TrialResult],
    arguments: Sequence[str] | None,
) -> str | None:
    """Give the command that trains the winner to use; None without a winner, or of Python objects."""
    best = analysis.best
    if analysis.at_budget is not None and arguments is not None:
        number = analysis.at_budget.winner.number
        trial = next(trial for trial in done if trial.number == number)
        return train_command(Winner(trial, float(trial.steps)), arguments, prepared)
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
    kept = _with_known_target(kept, prepared)
    own = [f"trial.batch_size={trial.batch_size}", f"trial.lr={lr!r}"]
    horizon = winner.advised_horizon
    if prepared.budget.objective == "loss":
        kept = [one for one in kept if not one.startswith("budget.")]
        own.append("search.objective=loss")
        own += [f"budget.steps={prepared.last_step(trial.batch_size)}", "budget.examples=1"]
    elif not prepared.backend.stops and horizon is not None:
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


def _with_known_target(arguments: Sequence[str], prepared: PreparedStudy) -> list[str]:
    """Give the arguments with the target that the study's first trial has set, where it has."""
    if prepared.goal is None:
        return list(arguments)
    named = ("target=", "workload.target.value=")
    kept = [one for one in arguments if not one.lstrip("+").startswith(named)]
    # Ahead of the trial's own, after the workload.
    return [*kept, f"target={prepared.goal.value!r}"]
