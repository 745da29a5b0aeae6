"""The report of a study: its files, its answer, the winners on the test set, the tracker."""

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import optuna
from rich.console import Console

from bstune.core.records import WENT_ON_WITHOUT, TrialResult
from bstune.options import GivenOptions, StudyOptions
from bstune.report.answer import Line, answer
from bstune.report.budget_figure import draw_budget
from bstune.report.figure import draw_curve
from bstune.report.lines import at_budget as budget_lines
from bstune.report.lines import next_steps
from bstune.report.page import write_page
from bstune.report.running_page import is_running_page
from bstune.report.spelling import with_options_as_called
from bstune.report.study_folder import read_study
from bstune.result import WINNERS, AtBudget, Reference, SearchPlan, StudyResult, WorkloadSize
from bstune.result.values import TrialPoint
from bstune.search.posterior import Posterior
from bstune.study.analysis.analyse import analyse, easier_targets_of
from bstune.study.analysis.at_budget import analyse_at_budget
from bstune.study.analysis.model import REPORT_PARTICLES, study_posterior
from bstune.study.analysis.step_times import with_common_step_time
from bstune.study.analysis.summary import Analysis, Asked, OverTarget, summarize, winner_to_use
from bstune.study.at_budget import question_of
from bstune.study.commands import best_yaml, study_arguments, train_command
from bstune.study.planning.plan import SearchEnd
from bstune.study.planning.replicates import Winner
from bstune.study.prepared import PreparedStudy
from bstune.study.showing.printed import from_here, places, show, show_places
from bstune.study.storage.trials import results
from bstune.study.winners import checkpoints_elsewhere, mark_winners, metrics_of_winners
from bstune.system.console import plural, print_line
from bstune.system.failures import optional
from bstune.system.files import Output, write_text
from bstune.system.watchdog import waiting_for, watching
from bstune.trial.backend import JobCommand, TrialBackend

if TYPE_CHECKING:
    from bstune.tracking.runs import Tracking

# Seconds without a line after the answer, after which one says what is waited for. On a machine
# with 13 processes on its two cores the figures take 10 s; with nothing beside them, 0.7 s.
SILENCE_AFTER_ANSWER = 4.0


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
    """Write, print and log a study's results, and give them.

    Where a part fails that the study can do without, such as a figure, a line says so.

    Args:
        prepared: the study.
        study: with its trials.
        tracking: what the study is logged to, such as MLflow; None where it is off.
        end: what ended the search.
        arguments: of the command line, which run the winners again; None for Python objects.
        console: where the answer is printed.
        sampled: the trials of which the search last sampled a posterior, and that posterior; None
            where it sampled none.
        missing: a line for each part that failed before.
    """
    recorded = results(study)
    files = prepared.files
    done = with_common_step_time(prepared, recorded)
    missing = [*missing, *missing_in_trials(done)]
    analysis = _analysis_of(prepared, done, sampled, missing)
    over_target = OverTarget()
    if prepared.budget.objective != "loss":
        with optional("no critical batch size at easier targets", missing):
            over_target = easier_targets_of(prepared, done, analysis.critical)
    test = metrics_of_winners(prepared, study, analysis.best, missing)
    mark_winners(study, analysis.best)
    elsewhere = checkpoints_elsewhere(prepared, study, analysis.best)
    notes = [*prepared.caveats, *elsewhere]
    arguments_of_study: list[str] | None = None
    if arguments is not None:
        arguments_of_study = study_arguments(arguments)
    result = summarize(
        done,
        asked_of(prepared, end),
        analysis,
        stop_reason=end.sentence,
        over_target=over_target,
        test=test,
        arguments=arguments_of_study,
        train=_command_to_train(prepared, analysis, done, arguments),
        notes=[*notes, *missing],
    )
    # A finished study asked again has this file.
    if not has_figures_of(result, files):
        write_text(files.curve, result.to_json())
    write_text(files.best, best_yaml(analysis.best, result, arguments, prepared))
    # What follows takes seconds, and a tracker's server may take longer: the answer comes first.
    show(answer(result), console, _next_in_python(prepared, result, arguments))
    tracked = _draw_and_track(prepared, tracking, done, result, notes, missing, console)
    # Figures, page and tracker may have failed since the result was made.
    result = result.with_notes([*notes, *missing])
    show_places(places(files, tracked), [*elsewhere, *missing], console)
    return Findings(prepared, recorded, result)


def _draw_and_track(
    prepared: PreparedStudy,
    tracking: "Tracking | None",
    done: Sequence[TrialResult],
    result: StudyResult,
    notes: Sequence[str],
    missing: list[str],
    console: Console,
) -> Line | None:
    """Draw a study's figures, write its page and log its result.

    A line says what takes long. ``missing`` gets a line for each part that fails.

    Returns:
        The line on the tracker that has the result; None without one.
    """
    missing_before_figures = len(missing)
    tracked: Line | None = None
    # ``seconds`` limits a training step; none runs here.
    with watching(partial(print_line, console), seconds=None, silence=SILENCE_AFTER_ANSWER):
        with waiting_for("the figures"):
            # A finished study asked again has its figures already.
            if not has_figures_of(result, prepared.files):
                _draw(prepared, done, result, missing)
        # The page is made of the folder's files: it shows a note once curve.json has it.
        if len(missing) > missing_before_figures:
            result = result.with_notes([*notes, *missing])
            write_text(prepared.files.curve, result.to_json())
        with waiting_for("the page"):
            _write_page(prepared, missing)
        if tracking is not None:
            with (
                optional(f"{tracking.name} lacks the results", missing),
                waiting_for(tracking.name),
            ):
                tracked = tracking.name, _track(prepared, tracking, result)
    return tracked


def _next_in_python(
    prepared: PreparedStudy, result: StudyResult, arguments: Sequence[str] | None
) -> list[Line]:
    """Give the line NEXT of a study of Python objects: the call that trains its winner.

    A loop of the user's takes the winner's values in place of a trial's, and a sweep's application
    takes them as overrides. Advice to keep the user's own configuration, if the gain suggests it,
    stands before that. There is no line without a winner, nor for a study of a command line, whose
    line NEXT is a command.
    """
    has_winner = result.winner is not None or result.at_budget is not None
    if arguments is not None or not has_winner:
        return []
    if prepared.recipe is not None:
        how_to_train = ["result.train()"]
    elif prepared.backend.job_command is not None:
        how_to_train = [_command_of_job(prepared, prepared.backend.job_command, result)]
    elif prepared.backend.trains_in_loop:
        how_to_train = how_to_train_loop(prepared.files.root, prepared.options, result)
    else:
        return []
    advice = next_steps.advice_to_keep(result)
    if result.at_budget is not None:
        advice = budget_lines.advice_to_keep(result)
    if advice is not None:
        how_to_train.insert(0, with_options_as_called(result, advice))
    return [("NEXT", tuple(how_to_train))]


def _command_of_job(prepared: PreparedStudy, command: JobCommand, result: StudyResult) -> str:
    """Write the application's own command, with the winner's values as overrides."""
    winner = result.winner if result.at_budget is None else result.at_budget.winner
    assert winner is not None  # noqa: S101 (there is one of the two)
    return command(winner, prepared.last_step(winner.batch_size))


def how_to_train_loop(folder: Path, options: StudyOptions, result: StudyResult) -> list[str]:
    """Write how a loop of the user's trains the winner: what reads it, its values, and how long.

    Args:
        folder: the study's own.
        options: of the study.
        result: of the study.
    """
    values = ["best.batch_size", "best.lr"]
    for name in options.search.tune:
        values.append(f"best.hyperparameters[{name!r}]")
    length = "a schedule stays as long as in the trials"
    best: TrialPoint | None = result.winner or result.so_far
    if result.at_budget is not None:
        best = result.at_budget.winner
    # The horizon is the length of a schedule that ends with its trial.
    if best is not None and best.horizon is not None:
        values.append("best.horizon as max_steps")
        length = "its schedule ends at max_steps"
    lines = [
        f"best = bstune.load({str(from_here(folder))!r}).best",
        f"train your loop with {', '.join(values)} in place of the trial's",
    ]
    if result.at_budget is not None:
        lines.append(f"it takes best.steps steps, the whole budget; {length}")
    # Where half of the fresh seeds missed the target, its steps are not known.
    elif result.winner is not None and result.winner.steps is not None:
        lines.append(f"it ends at {result.target}, after about best.steps steps; {length}")
    return lines


def has_figures_of(result: StudyResult, files: Output) -> bool:
    """Whether the folder has this result, and figures that were drawn since it was written.

    A command that was killed between the two leaves figures of an earlier result, which are older.
    """
    figures = (files.figure, files.vector_figure)
    try:
        written = files.curve.stat().st_mtime_ns
        are_newer = all(figure.stat().st_mtime_ns >= written for figure in figures)
        return are_newer and files.curve.read_text() == result.to_json()
    except (OSError, ValueError):
        # A file is missing, or holds no text.
        return False


def _draw(
    prepared: PreparedStudy, done: Sequence[TrialResult], result: StudyResult, missing: list[str]
) -> None:
    """Draw ``curve.png`` and ``curve.svg``."""
    files = prepared.files
    with optional("no figure of the curve", missing):
        if result.objective == "loss":
            draw_budget(done, result, files.figure, files.vector_figure)
        else:
            draw_curve(done, result, files.figure, files.vector_figure)


def _write_page(prepared: PreparedStudy, missing: list[str]) -> None:
    """Write ``report.html``. Where that fails, delete the page that says that the study runs."""
    files = prepared.files
    missing_before = len(missing)
    with optional("no page of the study", missing):
        write_page(read_study(files.root), files.report)
    if len(missing) > missing_before and is_running_page(files.report):
        # It would say that the study runs.
        with suppress(OSError):
            files.report.unlink()


def _analysis_of(
    prepared: PreparedStudy,
    done: Sequence[TrialResult],
    sampled: tuple[Sequence[TrialResult], Posterior] | None,
    missing: list[str],
) -> Analysis:
    """Analyse a study's trials, for its target or for its budget's end.

    Args:
        prepared: the study.
        done: its trials.
        sampled: the posterior that the search drew last, and the trials that it is of; None if it
            drew none.
        missing: gets a line for each part that fails.
    """
    if prepared.budget.objective == "loss":
        at_budget: AtBudget | None = None
        with optional("no answer for the budget's end", missing):
            at_budget = analyse_at_budget(prepared, done)
        return Analysis(at_budget=at_budget)
    # Another process may have ended a trial since it was sampled.
    if sampled is None or sampled[0] != done:
        posterior = study_posterior(prepared, done, REPORT_PARTICLES)
    else:
        posterior = sampled[1]
    return analyse(prepared, done, posterior, missing)


def asked_of(prepared: PreparedStudy, end: SearchEnd | None) -> Asked:
    """Describe what a study was asked for, and the option that ended its search.

    ``end``: of the search; None while it goes on.
    """
    options = prepared.options
    budget = prepared.budget
    limit: str | None = None
    limit_value: float | None = None
    least_limit: float | None = None
    if end is not None and end.limit is not None:
        # The answer advises a larger value of these limits. There is none to advise of the third,
        # search.least_gain: a larger one ends a search sooner.
        limit_values = {
            "search.seconds": budget.seconds,
            "search.wall_seconds": budget.wall_seconds,
        }
        limit = end.limit
        limit_value = limit_values.get(limit)
        least_limit = end.least_limit
    # The objective loss asks for the best metric at the budget's end, which takes words of its own.
    # The others ask for the target.
    question: str | None = None
    if budget.objective == "loss":
        question = question_of(options)
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
            limit=limit,
            limit_value=limit_value,
            least_limit=least_limit,
        ),
        reference=Reference(
            batch_size=options.scaling.batch_size,
            lr=options.scaling.lr,
            rule=options.scaling.rule["_target_"].rpartition(".")[2],
        ),
        question=question,
        size=_size_of_workload(prepared.backend),
        overrides_lr=options.scaling.override_lr,
        in_python=isinstance(options, GivenOptions),
        in_hydra=prepared.backend.job_command is not None,
    )


def _size_of_workload(backend: TrialBackend) -> WorkloadSize | None:
    """Give the size of data and module; None for recorded runs, which have neither."""
    if not backend.train_examples or not backend.parameters:
        return None
    return WorkloadSize(examples=backend.train_examples, parameters=backend.parameters)


def missing_in_trials(done: Sequence[TrialResult]) -> list[str]:
    """Give a line for each thing that trials went on without, with the number of these trials.

    The noise scale is one such thing. Why it lacks was told when it came to lack, and stands beside
    each trial on the page. Other messages have a line each. Why a trial failed is said elsewhere.
    """
    counts = Counter[str]()
    for trial in done:
        if trial.message and trial.status in ("reached", "stopped"):
            kind = trial.message
            for head in WENT_ON_WITHOUT:
                if kind.startswith(head):
                    kind = head
            counts[kind] += 1
    return [f"{kind} (in {plural(count, 'trial')})" for kind, count in counts.items()]


def _track(prepared: PreparedStudy, tracking: "Tracking", result: StudyResult) -> tuple[str, ...]:
    """Send the results and files to the tracker; give the lines that say how to open its page."""
    files = prepared.files
    artifacts = [files.figure, files.trials, files.curve, files.best, files.config]
    artifacts += [files.vector_figure, files.report, files.survey, files.roofline]
    # A study without a survey lacks some of them.
    tracking.finish_study(result, [path for path in artifacts if path.exists()])
    return tracking.opening_lines


def _command_to_train(
    prepared: PreparedStudy,
    analysis: Analysis,
    done: Sequence[TrialResult],
    arguments: Sequence[str] | None,
) -> str | None:
    """Give the command that trains the winner to use.

    It is None without a winner, and for a study of Python objects (``arguments`` None).
    """
    best = analysis.best
    if arguments is None:
        return None
    if analysis.at_budget is not None:
        number = analysis.at_budget.winner.number
        trial = next(trial for trial in done if trial.number == number)
        winner = Winner(trial=trial, steps=float(trial.steps))
        return train_command(winner, arguments, prepared)
    use = winner_to_use(prepared.budget.objective, best)
    if use is None:
        return None
    return train_command(best[WINNERS[use].merit], arguments, prepared)
