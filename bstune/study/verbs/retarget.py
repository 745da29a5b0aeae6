"""``bstune report``: a study's page, and what its histories answer for another target.

A trial that passed an easier target on its way is a trial of that target, ended there. One that
reached the study's own target bounds the steps to a harder one, and its history is extrapolated as
a stopped trial's is.
"""

import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bstune.core.errors import ConfigError, StudyError, TableError
from bstune.core.metric_names import parse_target
from bstune.core.records import Target, TrialResult
from bstune.core.search_space import SizeLimits
from bstune.core.step_time_law import StepTimeLaw, fit_step_time_law, law_of_trials
from bstune.core.step_timings import own_steps
from bstune.options import GivenOptions, ReplayedWorkload, with_option
from bstune.report.answer import answer
from bstune.report.page import write_page
from bstune.report.spelling import with_options_as_called
from bstune.report.study_folder import StudyFiles, StudyFolder, read_curve, read_files, read_study
from bstune.result import CriticalAtTarget, SoFar, StudyResult
from bstune.search.fixed_budget import shortened
from bstune.search.frontier_findings import best_learning_rate, steps_band
from bstune.search.posterior import Posterior
from bstune.study.analysis.analyse import analyse
from bstune.study.analysis.at_budget import analyse_at_budget
from bstune.study.analysis.critical import (
    INTERVAL,
    at_target_value,
    ended_where_met,
    too_few_passed,
)
from bstune.study.analysis.model import REPORT_PARTICLES, ideal_of, study_posterior
from bstune.study.analysis.step_times import with_common_step_time
from bstune.study.analysis.summary import Analysis, Asked, OverTarget, summarize
from bstune.study.folder_config import options_of_folder
from bstune.study.planning.baseline import baseline_of
from bstune.study.prepare import search_budget
from bstune.study.prepared import PreparedStudy
from bstune.study.report import asked_of
from bstune.study.showing.printed import show
from bstune.system.console import format_count, format_number, format_seconds, plain_console
from bstune.system.files import Output
from bstune.system.terminal import ArgumentParser
from bstune.trial.backend import Timed, TrialBackend, make_protocol, make_space
from bstune.trial.replay import ReplayBackend

# An argument that asks for a shorter budget begins so.
SHORTER_BUDGET = "budget.seconds="
# How many batch sizes extrapolation compares.
LADDER = 33
# So many times too low were the extrapolated steps at the place of least time, against a study of
# the harder target: 1.9 for fashion_mlp from 0.16 to 0.14, 3.5 for cifar_mlp from 0.6 to 0.55.
TOO_LOW = "2 to 4 times"
# The harder one of these targets lay so many times as far from the ideal value as the easier one.
# Farther on, a curve may level off before the target, which its history does not tell.
CHECKED_SHARE = 0.14 / 0.16


def main(arguments: list[str]) -> str:
    """Run ``bstune report``: print a study's answer, write its page, and give its JSON.

    The answer is for the study's own target, or for the one that the arguments ask for.
    """
    parser = ArgumentParser(
        prog="bstune report",
        description="Prints the answer of a finished study and writes its page, report.html, "
        "without training. With target=VALUE: what the same trials say of another target, and what "
        "would have to be run for it.",
    )
    parser.add_argument(
        "study", type=Path, metavar="STUDY", help="its output folder, such as outputs/digits"
    )
    parser.add_argument(
        "target",
        nargs="?",
        metavar="target=VALUE",
        help="another goal of the study's metric, which may be named, target='METRIC<=VALUE'; of "
        "search.objective=loss budget.seconds=SECONDS, a shorter budget",
    )
    parser.add_argument(
        "--trust",
        action="store_true",
        help="call what the folder's config names: a scaling rule or a sampler of your own",
    )
    options = parser.parse_intermixed_args(arguments)
    question = options.target
    goal: Goal | None = None
    if question is not None and question.startswith(SHORTER_BUDGET):
        study, page = _at_shorter_budget(options.study, question, options.trust)
    else:
        if question is not None:
            goal = _goal(question)
        study, page = _study_and_page(options.study, goal, options.trust)
    write_page(study, page)
    console = plain_console()
    notes = list(study.files.notes)
    # Where the histories do not suffice for a target that is near, a note says what it would take.
    if goal is not None:
        notes += study.result.notes
    for note in notes:
        console.print(note, soft_wrap=True, highlight=False, markup=False)
    show(answer(study.result), console, [("page", (shlex.quote(str(page)),))])
    return study.result.to_json()


def _at_shorter_budget(path: Path, argument: str, trust: bool) -> tuple[StudyFolder, Path]:
    """Give a study as if its budget had been shorter, and the path of the page for that.

    ``argument``: ``budget.seconds=SECONDS``.
    """
    try:
        seconds = float(argument.removeprefix(SHORTER_BUDGET))
    except ValueError:
        seconds = math.nan
    if not seconds > 0.0 or not math.isfinite(seconds):
        raise ConfigError(f"{SHORTER_BUDGET}SECONDS must be a positive number, but got {argument}")
    files = _output_of(path)
    # The study's own page stays: this one is beside it, named by what was asked.
    return within_seconds(files, seconds, trust), files.root / f"report-{seconds:g}s.html"


def within_seconds(files: Output, seconds: float, trust: bool = False) -> StudyFolder:
    """Give a study of the objective loss as if its budget had been shorter.

    Args:
        files: of the study.
        seconds: of the shorter budget.
        trust: call a scaling rule or a sampler that its config names.

    Raises:
        StudyError: where its objective is another one, or its budget is not of seconds, or shorter
            than ``seconds``; and where schedules end with the trial.
    """
    content = _files_that_tell(files)
    prepared, _ = _prepared(files, content, goal=None, trust=trust)
    if prepared.budget.objective != "loss":
        raise StudyError(
            f"{files.root} is a study of search.objective={prepared.budget.objective}, which has "
            f"no budget of seconds: {SHORTER_BUDGET}SECONDS is of search.objective=loss"
        )
    if prepared.backend.horizon:
        raise StudyError(
            f"{files.root}: its schedules end with the trial, so that what they had on the way "
            f"tells nothing of {seconds:g} s: run that, "
            f"search.objective=loss budget.seconds={seconds:g}"
        )
    own_seconds = prepared.options.budget.seconds
    if own_seconds is None or seconds > own_seconds:
        what = "no budget of seconds"
        if own_seconds is not None:
            what = f"a budget of {own_seconds:g} s"
        raise StudyError(
            f"{files.root} has {what}, which tells nothing of {seconds:g} s: run that, "
            f"search.objective=loss budget.seconds={seconds:g}"
        )
    result = _result_of(files)
    # Other seconds of a step than the study's own would turn the budget into other steps.
    prepared = _with_own_times(prepared, result)
    options = with_option(prepared.options, "budget.seconds", seconds)
    prepared = replace(prepared, options=options)
    last_step = prepared.last_step
    trials = shortened(content.trials, lambda batch_size: float(last_step(batch_size)), share=1.0)
    return _at_budget(prepared, replace(content, trials=tuple(trials)), result)


def _with_own_times(prepared: PreparedStudy, result: StudyResult | None) -> PreparedStudy:
    """Give a study with the seconds of a step that turn its budget of seconds into steps.

    They are those in its result, as a new survey may have timed others. A study with another
    budget is given back as it is.

    ``result``: what the study has found so far; None before it has found anything.

    Raises:
        StudyError: where neither the result nor the folder tells the seconds.
    """
    if result is not None and result.at_budget is not None and result.at_budget.times:
        times = tuple((time.batch_size, time.seconds) for time in result.at_budget.times)
        return replace(prepared, budget_times=times)
    own_seconds = prepared.options.budget.seconds
    if own_seconds is not None and prepared.backend.step_time is None:
        raise StudyError(
            f"{prepared.files.root} does not tell the seconds of a step, by which its budget of "
            f"{own_seconds:g} s is counted: its command goes on with it"
        )
    return prepared


def _at_budget(
    prepared: PreparedStudy, content: StudyFiles, earlier: StudyResult | None
) -> StudyFolder:
    """Analyse the trials of ``content`` at their budget's end, and give the study with the result.

    ``earlier``: the result in the folder; None before there is one.
    """
    analysis = Analysis(at_budget=analyse_at_budget(prepared, content.trials))
    asked = _asked(prepared, earlier)
    result = summarize(content.trials, asked, analysis, notes=prepared.caveats)
    return StudyFolder(result, replace(content, best=None))


def _files_that_tell(files: Output) -> StudyFiles:
    """Read a study's files; StudyError where they do not tell what its trials were."""
    content = read_files(files)
    if not content.trials or content.config is None:
        raise StudyError(
            f"{files.root} does not tell what its trials were: {'; '.join(content.notes)}"
        )
    return content


def _result_of(files: Output) -> StudyResult | None:
    """Read the result in a study's folder; None before there is one."""
    if not files.curve.exists():
        return None
    return read_curve(files.curve)


@dataclass(frozen=True)
class Goal:
    """Another target of a study's metric."""

    value: float
    # Where the metric is named, too.
    target: Target | None = None

    def check(self, own: Target) -> None:
        """Refuse another metric, or another way to be better, than those of a study's own target.

        Raises:
            StudyError: for either; the message names those of the study.
        """
        named = self.target
        if named is not None and (named.metric, named.mode) != (own.metric, own.mode):
            raise StudyError(
                f"target={str(named)!r}, but the study's own target is {own}: ask for another "
                f"value of {own.metric}, target={self.value:g}"
            )


def _goal(argument: str) -> Goal:
    """Parse ``target=VALUE``, or a target in full such as ``target=val_acc>=0.9``."""
    name, _, value = argument.partition("=")
    if name != "target":
        raise ConfigError(f"target=VALUE may stand after a study, but got {argument}")
    target: Target | None = None
    if any(sign in value for sign in "<>="):
        target = Target(*parse_target(value, "target"))
        goal = target.value
    else:
        try:
            goal = float(value)
        except ValueError:
            goal = math.nan
    if not math.isfinite(goal):
        raise ConfigError(f"target must be a finite number, but got {argument}")
    return Goal(goal, target)


def _study_and_page(path: Path, goal: Goal | None, trust: bool) -> tuple[StudyFolder, Path]:
    """Read the study at a path as if its target had been ``goal``, and name the file of its page.

    Without a goal it is read at its own target, with what it has found so far if it has not ended.

    Args:
        path: the study's folder, or its ``curve.json``.
        goal: another target; None: the study's own.
        trust: call a scaling rule or a sampler that its config names.
    """
    files = _output_of(path)
    if path.is_file() and path != files.curve:
        raise StudyError(f"{path} is no study: give its output folder, such as outputs/digits")
    if goal is not None:
        return at_target(files, goal, trust), files.root / f"report-{goal.value:g}.html"
    return study_so_far(path, trust), files.report


def study_so_far(path: Path, trust: bool = False) -> StudyFolder:
    """Read a study's folder: its result, or what its trials say so far if it has not ended.

    Args:
        path: the folder, or its ``curve.json``.
        trust: where the study has not ended, call a scaling rule or a sampler that its config
            names.

    Raises:
        StudyError: where there is no study, or its files do not tell what its trials were.
    """
    files = _output_of(path)
    if files.curve.exists() or not files.trials.exists():
        # Without either file this raises the error that there is no study.
        study = read_study(path)
        reported = study.result.trials + study.result.continued
        # With more trials than its result reports, it has gone on since and has not ended. Trials
        # that were cut short with their process are in no result.
        ran = [trial for trial in study.files.trials if not trial.was_cut_short]
        if len(ran) <= reported:
            return study
    study = at_target(files, None, trust)
    notes = ("the study has not ended: this is what its trials say so far", *study.files.notes)
    return replace(study, files=replace(study.files, notes=notes))


def read_at_target(path: str, argument: str) -> StudyFolder:
    """Give the study of a folder as if its target had been another one.

    Args:
        path: the folder, or its ``curve.json``.
        argument: ``target=VALUE``.
    """
    goal = _goal(argument)
    return at_target(_output_of(Path(path)), goal)


def _output_of(path: Path) -> Output:
    """Give the files of a study, by its folder or by a file in it."""
    return Output(path.parent if path.is_file() else path)


def at_target(files: Output, goal: Goal | None, trust: bool = False) -> StudyFolder:
    """Analyse the trials of a study as if its target had been ``goal``.

    Args:
        files: of the study.
        goal: the other target; None: its own.
        trust: call a scaling rule or a sampler that its config names.

    Raises:
        StudyError: where its files do not tell what its trials were; where a ``goal`` is given to a
            study of search.objective=loss, or is of another metric; or where it is another target
            than the study's own, and schedules end with the trial or every trial met it at its
            first evaluation.
    """
    content = _files_that_tell(files)
    earlier = _result_of(files)
    try:
        prepared, own_target = _prepared(files, content, goal, trust)
    except (ConfigError, TableError) as error:
        raise StudyError(f"{files.config}: {error}") from error
    if prepared.budget.objective == "loss":
        if goal is not None:
            raise StudyError(
                f"{files.root} is a study of search.objective=loss, which has no target: "
                f"{SHORTER_BUDGET}SECONDS answers for a shorter budget"
            )
        return _at_budget(_with_own_times(prepared, earlier), content, earlier)
    target = prepared.protocol.target
    is_own = target == own_target
    recorded = list(content.trials)
    if not is_own:
        recorded = _ended_at_other(prepared, content.trials, own_target, earlier)
    trials = with_common_step_time(prepared, recorded)
    posterior = study_posterior(prepared, trials, REPORT_PARTICLES)
    notes = list[str]()
    analysis = analyse(prepared, trials, posterior, notes, ran_for_target=is_own)
    best = content.best
    if is_own:
        asked = _asked(prepared, earlier)
        result = summarize(
            trials, asked, analysis, ran_for_target=True, notes=[*prepared.caveats, *notes]
        )
    else:
        result = _result_at_other(prepared, trials, posterior, analysis, own_target, earlier, notes)
        # best.yaml is of the study's own target.
        best = None
    return StudyFolder(result, replace(content, trials=tuple(recorded), best=best))


def _result_at_other(
    prepared: PreparedStudy,
    trials: Sequence[TrialResult],
    posterior: Posterior,
    analysis: Analysis,
    own_target: Target,
    earlier: StudyResult | None,
    notes: Sequence[str],
) -> StudyResult:
    """Make the result of a study at another target than its own.

    Args:
        prepared: the study, at the other target.
        trials: as if they had ended at that target.
        posterior: of these trials.
        analysis: of these trials.
        own_target: the study's own.
        earlier: the study's own result, if it has any.
        notes: a line for each part of the analysis that failed.
    """
    target = prepared.protocol.target
    few_passed = too_few_passed(trials, target)
    run_for_target: str | None = None
    if few_passed is not None:
        run_for_target = _what_to_run(prepared, earlier)
    if analysis.so_far is not None:
        # A note tells, by extrapolation, what a near target takes. Before one that is farther off
        # the metric may level off.
        if is_near(analysis.so_far.value, target, ideal_of(prepared)):
            notes = [_extrapolated(prepared, trials, posterior), *notes]
        # The line USE says what was measured, so that the steps and seconds predicted are dropped.
        analysis = replace(analysis, so_far=_not_predicted(analysis.so_far))
    return summarize(
        trials,
        _asked(prepared, earlier),
        analysis,
        ran_for_target=False,
        # How B_crit grows with the target is known from the study's own result.
        over_target=_over_target(earlier, own_target),
        few_passed=few_passed,
        run_for_target=run_for_target,
        notes=[*prepared.caveats, *notes],
    )


def _ended_at_other(
    prepared: PreparedStudy,
    trials: Sequence[TrialResult],
    own_target: Target,
    earlier: StudyResult | None,
) -> list[TrialResult]:
    """Give a study's records as if its trials had ended at another target than its own.

    What a trial did after it met an easier target is no part of that target's study.

    Args:
        prepared: the study, at the other target.
        trials: as they are recorded.
        own_target: at which they ended.
        earlier: the study's own result, if it has any; it tells how options are called.

    Raises:
        StudyError: where schedules end with the trial, or every trial met the other target at its
            first evaluation.
    """
    target = prepared.protocol.target
    folder = prepared.files.root
    if prepared.backend.horizon:
        advice = f"workload.target.value={target.value:g} study=NAME"
        if earlier is not None:
            advice = with_options_as_called(earlier, advice)
        raise StudyError(
            f"{folder}: its schedules end with the trial, so that what they did before "
            f"{own_target} tells nothing of {target}: run that as another study, {advice}"
        )
    ended = ended_at(trials, target)
    if all_met_at_first(ended):
        raise StudyError(
            f"{folder}: every trial met {target} at its first evaluation, so that none "
            "tells how many steps it takes: ask for a harder target; the study's own is "
            f"{own_target}"
        )
    return ended


def _asked(prepared: PreparedStudy, earlier: StudyResult | None) -> Asked:
    """Describe what a study was asked for.

    The size of its workload is that of its earlier result.
    """
    asked = asked_of(prepared, end=None)
    # Here neither data nor module are at hand.
    if earlier is None:
        return replace(asked, size=None)
    return replace(asked, size=earlier.size)


def ended_at(trials: Sequence[TrialResult], target: Target) -> list[TrialResult]:
    """Give the records as if each trial had ended where it first met ``target``.

    A trial that continues one that met it is left out. A trial that reached the study's own,
    easier target without meeting this one counts as stopped. A run on a fresh seed of a trial that
    is left out is one of the trial that met the target.
    """
    ended = list[TrialResult]()
    # The number of the trial that met the target, by its own and those of what continues it.
    beyond = dict[int, int]()
    for trial in sorted(trials, key=lambda trial: trial.number):
        if trial.resumed_from in beyond:
            beyond[trial.number] = beyond[trial.resumed_from]
            continue
        record = ended_where_met(trial, target)
        # It gives the trial itself where that never met the target.
        if record is not trial:
            beyond[trial.number] = trial.number
        elif trial.reached:
            record = replace(trial, status="stopped", steps_low=trial.steps)
        if trial.replicate_of in beyond:
            record = replace(record, replicate_of=beyond[trial.replicate_of])
        ended.append(record)
    return ended


def all_met_at_first(records: Sequence[TrialResult]) -> bool:
    """Whether each record met its target at the first evaluation, which untrained weights may, too.

    Records without a finite evaluation do not count; False where all are such.
    """
    evaluated = list[TrialResult]()
    for record in records:
        if any(step > 0 and value is not None for step, value in record.history):
            evaluated.append(record)
    return bool(evaluated) and all(record.reached and not record.steps_low for record in evaluated)


def _over_target(earlier: StudyResult | None, own_target: Target) -> OverTarget:
    """Collect the critical batch sizes that a study has found, at its own and easier targets."""
    if earlier is None:
        return OverTarget()
    rows = list[CriticalAtTarget](earlier.over_target)
    critical = earlier.critical_batch_size
    if critical is not None:
        reached = earlier.statuses["reached"]
        rows.append(at_target_value(critical, own_target.value, reached))
    return OverTarget(rows, None, earlier.over_target_growth)


def _prepared(
    files: Output, content: StudyFiles, goal: Goal | None, trust: bool
) -> tuple[PreparedStudy, Target]:
    """Prepare the study that its files describe, for an analysis alone; give its own target, too.

    ``goal``: the target in place of its own; None: its own.
    """
    assert content.config is not None  # noqa: S101 (the caller has looked)
    options = options_of_folder(content.config, files.config, trust)
    own_target = options.workload.target.target
    if goal is not None:
        goal.check(own_target)
        options = with_option(options, "workload.target.value", goal.value)
    protocol = make_protocol(options, recipe=None)
    backend = _surveyed(content, options.search.workers)
    if isinstance(options.workload, ReplayedWorkload):
        backend = ReplayBackend(options, protocol)
    # A trial has a horizon where its schedule ended with it.
    backend.horizon = any(trial.horizon is not None for trial in content.trials)
    space = make_space(options, backend.lr_range)
    if content.hardware is not None:
        # Batch sizes that do not fit into memory were not searched.
        ceiling = content.hardware.ceiling
        high = min(space.high, ceiling.batch_size)
        space = replace(space, low=ceiling.smallest, high=high)
    # Whether its batch size fitted need not be known: where it did not, no trial is the baseline's.
    baseline = baseline_of(options, space, SizeLimits())
    prepared = PreparedStudy(
        options=options,
        recipe=None,
        budget=search_budget(options),
        space=space,
        protocol=protocol,
        backend=backend,
        files=files,
        trial=None,
        frozen_settings={},
        survey=None,
        open_processes=None,
        training=None,
        notes=[],
        elapsed=lambda: 0.0,
        baseline=baseline,
    )
    return prepared, own_target


def _surveyed(content: StudyFiles, workers: int) -> TrialBackend:
    """Make a backend that knows the seconds of a step by the study's survey, else its trials.

    ``workers``: how many trials ran at a time.
    """
    backend = TrialBackend()
    hardware = content.hardware
    law: StepTimeLaw | None = None
    if hardware is None:
        own = own_steps(content.trials)
        law = law_of_trials([(steps.batch_size, steps.seconds) for steps in own])
    # One timed batch size tells no law over batch sizes.
    elif len(hardware.measured.timings) > 1:
        of_trainer = hardware.seconds_of == "trainer"
        law = fit_step_time_law(hardware.measured.timings, hardware.measured.waited, of_trainer)
        # The law may later be joined with the seconds that the trials' own steps took. Trials side
        # by side slow each other down: their steps would falsify it.
        if workers > 1:
            law = law.without_trials()
        threads: int | None = None
        if hardware.threads is not None:
            threads = hardware.threads.threads
        backend.timed = Timed(hardware.seconds_of, hardware.measured.waited, threads)
    # None, which the type excludes, stands for seconds that are not known.
    backend.step_time = law  # type: ignore[assignment]
    return backend


def is_near(closest: float, target: Target, ideal: float | None) -> bool:
    """Whether a target that no trial met is as near as those to which extrapolation was checked.

    Args:
        closest: the metric's value that came closest to the target.
        target: the one that was not met.
        ideal: the metric's best value; None: it has none, and no distance counts as near.
    """
    if ideal is None:
        return False
    return abs(target.value - ideal) >= CHECKED_SHARE * abs(closest - ideal)


def _not_predicted(so_far: SoFar) -> SoFar:
    """Give the point that came closest to a target, without what it would take to get there."""
    nothing = {"predicted_steps": None, "predicted_seconds": None, "more_than": None}
    return so_far.model_copy(update={**nothing, "beyond_budget": False})


def _what_to_run(prepared: PreparedStudy, earlier: StudyResult | None) -> str:
    """Write what runs a study for a target that the histories do not suffice for.

    It is a command, if that of the study is known. Else it is the options that change.

    ``earlier``: the study's own result, which has its command; None where there is none.
    """
    target = prepared.protocol.target
    goal = f"workload.target.value={target.value:g}"
    name = f"{prepared.options.study}-{target.value:g}"
    if isinstance(prepared.options, GivenOptions):
        return f"the study's own call with {goal}, name={name!r}"
    if earlier is None or earlier.arguments is None:
        return f"the study's command with {goal} study={shlex.quote(name)}"
    replaced = ("workload.target.value=", "study=", "output=")
    same = list[str]()
    for argument in earlier.arguments:
        if not argument.lstrip("+~").startswith(replaced):
            same.append(argument)
    return shlex.join(["bstune", *same, goal, f"study={name}"])


def _extrapolated(
    prepared: PreparedStudy, trials: Sequence[TrialResult], posterior: Posterior
) -> str:
    """Predict in a line what a target takes that no trial met, by extrapolating the histories."""
    space = prepared.space
    ratio = space.high / space.low
    # The sizes are even in log B. Small ones coincide once they are rounded.
    rounded_sizes = set[int]()
    for place in range(LADDER):
        rounded_sizes.add(round(space.low * ratio ** (place / (LADDER - 1))))
    batch_sizes = sorted(rounded_sizes)
    band = steps_band(posterior, batch_sizes, INTERVAL)
    is_timed = any(trial.seconds_per_step for trial in trials)
    in_seconds = is_timed and prepared.budget.objective != "steps"
    cost = band.steps
    if in_seconds:
        # tau: the seconds of a step at a batch size.
        cost = band.steps * posterior.tau(band.batch_size)
    cheapest = int(cost.argmin())
    steps = f"{format_number(float(band.steps[cheapest]), 2)} steps"
    if in_seconds:
        steps += f", {format_seconds(float(cost[cheapest]))}"
    batch_size = batch_sizes[cheapest]
    lr = best_learning_rate(posterior, batch_size)
    return (
        f"by extrapolation, {TOO_LOW} too low where it was checked, it takes {steps} at "
        f"B = {format_count(batch_size)}, lr = {format_number(lr)}"
    )
