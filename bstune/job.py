"""Runs a checked job: a study from its plan to its report, or one trial by itself."""

import math
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import optuna
import yaml
from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from bstune.building import flatten, plain
from bstune.curve import CurveError, CurveFit, fit_curve, frontier_points, predict_steps
from bstune.errors import StudyError
from bstune.estimate import remaining_seconds
from bstune.figure import draw_curve
from bstune.hardware.scale_out import ScaleOut, draw_scale_out, scale_out_table
from bstune.held import which_rule_held
from bstune.output import Output, locked, redact, write_text
from bstune.preflight import Job
from bstune.progress import Progress, plan_text
from bstune.records import TrialResult, TrialSpec, dump_json
from bstune.report import format_count, print_final, summarize, winners
from bstune.scale_out_plan import scale_out
from bstune.search.confirm import contenders, next_confirmation
from bstune.search.foretell import ideal_value
from bstune.search.frontier import Coordinates
from bstune.search.hint import study_prior
from bstune.search.known import Known, learn
from bstune.search.mapping import b_crit_quantiles
from bstune.search.study import (
    STUDY_ID,
    ask,
    ask_confirmation,
    build_sampler,
    distributions,
    ended_by_themselves,
    fail_one,
    finish_abandoned,
    next_slot,
    open_study,
    results,
    run_trial_of,
    running,
    warn_cut_short,
)
from bstune.tunable import overrides
from bstune.workers import Ended, Workers, alone

if TYPE_CHECKING:
    from bstune.tracking import Tracking

TESTS = "bstune:tests"  # attribute in the storage: test metrics by trial number
INTERVAL = (0.05, 0.95)  # of B_crit's posterior, for search.precision
MOST_CERTAIN_AFTER = 6  # reached trials, before the search may end by search.precision
ABANDONED_AT = 1.2  # times the best trial's time or steps: a stopped trial that has taken more is not continued
MOST_STATES = 32
CERTAIN_PARTICLES, REPORT_PARTICLES = 400, 1000  # of the posterior, while the search goes on and for its report
REPORT_MOVES = 10  # of its sampler: at the few of a decision, intervals come out too narrow
MOST_DEATHS = 3  # of the processes that train one slot side by side with others, before the study ends
CERTAIN_EVERY = 4  # slots between looks at search.precision
CURVE_LADDER = 48  # batch sizes at which the fitted curve is sent to MLflow


def run_study(job: Job, arguments: Sequence[str], console: Console) -> None:
    """Run the study, or go on with it, and write its report.

    Args:
        job: from :func:`bstune.preflight.prepare`.
        arguments: of the command line, for the command that trains the winner again.
        console: where the plan, the progress and the final table go.

    Raises:
        StudyError: if the study cannot be opened, or another process runs it.
    """
    with locked(job.output):
        study = open_study(job.config.study, job.config.storage, job.plan.objective, job.fingerprint, job.output.root)
        finish_abandoned(study, job.plan.objective)
        done = results(study)
        console.print(plan_text(job, done, _estimate(job, done)), soft_wrap=True)
        job.output.checkpoints.mkdir(exist_ok=True)
        write_text(job.output.config, shareable_yaml(job.config))
        if job.runner.survey is not None:
            from bstune.hardware.survey_report import write_survey

            write_survey(job.runner.survey, job.output)
        tracking = _open_tracking(job, study)
        try:
            ended = _run_slots(job, study, tracking, console)
        finally:  # a trial that was cut short is a record too
            write_trials(job.output, results(study))
        console.print(ended)
        _report(job, study, tracking, ended, arguments, console)


def run_single(job: Job, spec: TrialSpec, console: Console) -> TrialResult:
    """Run one trial by itself, and write its record and what else it leaves."""
    output = job.output.single_trial(spec.batch_size, spec.lr, spec.seed)
    with locked(output):
        output.checkpoints.mkdir(exist_ok=True)
        result = job.runner.train(spec, output, None)
        write_text(output.record, result.to_json() + "\n")
        write_text(output.config, shareable_yaml(job.config))
    console.print(Progress.line(result, None), soft_wrap=True)
    if result.reached:
        for name, value in job.runner.test(spec, output).items():
            console.print(f"{name} {value:.4g}")
    console.print(f"record {output.record}", soft_wrap=True)
    return result


def _estimate(job: Job, done: Sequence[TrialResult]) -> tuple[float, bool]:
    """Return seconds, and whether they are a bound from timed steps (or what the study's own trials suggest)."""
    remaining = remaining_seconds(job.plan, done)
    if remaining is not None:
        return remaining / job.config.search.workers, False
    return job.runner.most_seconds, True


def _run_slots(job: Job, study: optuna.Study, tracking: "Tracking | None", console: Console) -> str:
    """Search, then confirm the winners; return, in words, what ended the search."""
    with Progress(job.plan.trials, job.protocol.target, console) as progress:
        workers = job.runner.workers
        if workers is None:
            ended = _search(job, study, tracking, progress)
        else:
            ended = _search_side_by_side(job, study, tracking, progress, workers)
        while True:  # alone, whoever trained the finalists: their seconds are measured
            done = _write(job, study, progress)
            due = next_confirmation(done, job.plan.objective, job.plan.confirmations, job.plan.finalists)
            if due is None:
                return ended
            asked = ask_confirmation(study, *due, job.plan, job.space, job.runner.stops)
            _run(job, study, asked, done, tracking)


def _search(job: Job, study: optuna.Study, tracking: "Tracking | None", progress: Progress) -> str:
    """Run the search's trials one after another; return, in words, what ended it."""
    while True:
        done = _write(job, study, progress)
        slot = next_slot(study, job.plan)
        if slot is None:
            return _plan_done(job)
        ended = _ended(job, done)
        if ended is not None:
            return ended
        _run(job, study, _ask(job, study, slot), done, tracking)


def _search_side_by_side(
    job: Job,
    study: optuna.Study,
    tracking: "Tracking | None",
    progress: Progress,
    open_workers: Callable[[], Workers],
) -> str:
    """Run several of the search's trials at a time; return, in words, what ended it.

    What a slot is asked depends on the trials that are done by then, and these on which of those that run ends first:
    it is another study than one after another, and not the same one twice. What comes of a spec is the same.

    Raises:
        StudyError: if the processes of one slot die ``MOST_DEATHS`` times.
    """
    asked: dict[int, tuple[optuna.Trial, TrialSpec]] = {}
    deaths: Counter[int] = Counter()
    ended: str | None = None
    looked = 0

    def store(trial: Ended) -> None:
        def train(spec: TrialSpec) -> TrialResult:
            return alone(trial.future.result(), job.runner.step_time)

        result = run_trial_of(study, asked[trial.spec.number], job.plan.objective, job.protocol.target, train)
        if tracking is not None:
            tracking.send_trial(result)

    with open_workers() as workers:
        whole = False
        try:
            while True:
                done = _write(job, study, progress)
                ended = ended or _spent(job, done)
                settled = _first_slots(_searched(done))
                if ended is None and len(settled) > looked:
                    looked = len(settled)
                    ended = _certain(job, settled)
                while ended is None and workers.free and (slot := next_slot(study, job.plan)) is not None:
                    trial, spec = asked_now = _ask(job, study, slot)
                    asked[trial.number] = asked_now
                    workers.start(spec, job.output, _parent(spec, done))
                if not workers.running:
                    whole = True
                    return ended or _plan_done(job)
                over = workers.wait()
                if over.died is None:
                    store(over)
                    continue
                deaths[over.spec.slot] += 1
                fail_one(study, over.spec, over.died)
                if deaths[over.spec.slot] == MOST_DEATHS:
                    raise StudyError(
                        f"the process that trained B = {over.spec.batch_size}, lr = {over.spec.lr:g} {over.died}, "
                        f"{MOST_DEATHS} times: lower search.workers or search.batch_size.high where memory is short; "
                        "the finished trials are stored, and the same command with search.workers=1 continues the study"
                    )
        finally:
            if not whole:  # an error or an interruption: what has ended meanwhile is stored all the same
                for over in workers.over():
                    if over.died is None and over.future.exception() is None:
                        store(over)
                for spec in running(study):
                    warn_cut_short(spec)
                finish_abandoned(study, job.plan.objective)


def _plan_done(job: Job) -> str:
    return f"the plan is done: search.trials={job.plan.trials}"


def _ask(job: Job, study: optuna.Study, slot: int) -> tuple[optuna.Trial, TrialSpec]:
    sampler = build_sampler(job.config.sampler, job.plan, slot, own_arguments(job, ended_by_themselves(study)))
    return ask(study, slot, job.plan, job.space, sampler, job.runner.stops)


def _ended(job: Job, done: Sequence[TrialResult]) -> str | None:
    """Return which limit or which certainty ends the search, in words; None if none."""
    return _spent(job, done) or _certain(job, _searched(done))


def _spent(job: Job, done: Sequence[TrialResult]) -> str | None:
    spent = job.plan.spent(done)
    return None if spent is None else f"stopped: {spent}"


def _searched(done: Sequence[TrialResult]) -> list[TrialResult]:
    # Of the search alone: a study that is continued while its winners run again, or after it, has ended here before.
    return [trial for trial in done if trial.confirms is None and trial.status != "failed"]


def _certain(job: Job, searched: Sequence[TrialResult]) -> str | None:
    reached = sum(trial.reached for trial in searched)
    if job.plan.precision is None or reached < MOST_CERTAIN_AFTER or len(searched) % CERTAIN_EVERY:
        return None
    low, _, high = b_crit_interval(job, known_of(job, searched, CERTAIN_PARTICLES))
    if high / low >= job.plan.precision:
        return None
    return (
        f"stopped: B_crit lies between {format_count(low)} and {format_count(high)}, "
        f"within search.precision={job.plan.precision:g}"
    )


def _first_slots(searched: Sequence[TrialResult]) -> list[TrialResult]:
    """Return the trials of the first slots, a multiple of ``CERTAIN_EVERY`` of them, that are all done.

    Side by side others end while these do: what is certain must not depend on how many, or on when one looks.
    """
    slots = {trial.slot for trial in searched}
    whole = next(slot for slot in range(len(slots) + 1) if slot not in slots)
    whole -= whole % CERTAIN_EVERY
    return [trial for trial in searched if trial.slot < whole]


def _write(job: Job, study: optuna.Study, progress: Progress) -> list[TrialResult]:
    """Write what has been done, show it, delete the files that nothing needs any more, and return the trials."""
    done = results(study)
    write_trials(job.output, done)
    kept = [*winners(done).values(), *contenders(done, job.plan.objective, job.plan.finalists)]
    now = running(study)
    writing = {spec.number for spec in now}
    job.output.keep_checkpoints({trial.number for trial in kept}, writing)
    read = {spec.parent for spec in now if spec.parent is not None}
    job.output.keep_states(worth_continuing(done, job.plan.objective) | read, writing)
    progress.show(done)
    return done


def worth_continuing(done: Sequence[TrialResult], objective: str) -> set[int]:
    """Return the numbers of the stopped trials that may still be continued: ``MOST_STATES`` of them.

    First come those that may win, then those that only the curve needs, as they have taken more than the best trial:
    seconds for ``time``, steps for ``steps``, both of the two for ``both``. Of either kind the newest are kept. A state
    is as large as the model and its optimizer.
    """
    parents = {trial.parent for trial in done if trial.status != "failed"}  # what was cut short is asked again
    reached = [trial for trial in done if trial.reached and trial.confirms is None]
    fastest = min((time for trial in reached if (time := trial.time_to_target) is not None), default=math.inf)
    fewest = min((trial.steps for trial in reached), default=math.inf)

    def may_win(trial: TrialResult) -> bool:
        by_time = trial.steps * (trial.seconds_per_step or 0.0) < ABANDONED_AT * fastest
        by_steps = trial.steps < ABANDONED_AT * fewest
        return {"time": by_time, "steps": by_steps, "both": by_time or by_steps, "curve": True}[objective]

    ends = [trial for trial in done if trial.status == "budget" and trial.number not in parents]
    last = sorted((t for t in ends if t.confirms is None), key=lambda trial: (may_win(trial), trial.number))
    return {trial.number for trial in last[-MOST_STATES:]}


def _run(
    job: Job,
    study: optuna.Study,
    asked: tuple[optuna.Trial, TrialSpec],
    done: Sequence[TrialResult],
    tracking: "Tracking | None",
) -> None:
    """Run a trial that was asked for, from where the trial that it continues was stopped, if it names one."""

    def train(spec: TrialSpec) -> TrialResult:
        return job.runner.train(spec, job.output, _parent(spec, done))

    result = run_trial_of(study, asked, job.plan.objective, job.protocol.target, train)
    if tracking is not None:
        tracking.send_trial(result)


def _parent(spec: TrialSpec, done: Sequence[TrialResult]) -> TrialResult | None:
    return next((result for result in done if result.number == spec.parent), None)


def own_arguments(job: Job, ended: Collection[int] = ()) -> dict[str, Any]:
    """Return what bstune's own sampler is told of the job, where ``ended`` trials go no further."""
    space = job.space

    def resumable(number: int) -> bool:
        return number not in ended and job.runner.resumable(number, job.output)

    return {
        "objective": job.plan.objective,
        "rule": space.rule,
        "budget": lambda batch_size: float(job.protocol.budget.last_step(round(batch_size))),
        "target": job.protocol.target,
        "ideal": _ideal(job),
        "resumable": resumable if job.runner.stops else None,
        "snap": space.snap,
        "lr_range": (space.lr_low, space.lr_high),
        "step_time": job.runner.step_time,
        "search_space": distributions(space),
    }


def _ideal(job: Job) -> float | None:
    bounds = job.config.workload.target.bounds
    return ideal_value(job.protocol.target, None if bounds is None else list(bounds))


def known_of(job: Job, done: Sequence[TrialResult], particles: int) -> Known:
    """Return the posterior of the frontier after these trials, whatever sampler asked them."""
    space = job.space
    coordinates = Coordinates(distributions(space), space.rule, space.snap, (space.lr_low, space.lr_high))
    prior = study_prior(
        done,
        low=space.low,
        high=space.high,
        rule=coordinates.log_rule,
        budget=lambda batch_size: job.protocol.budget.last_step(round(batch_size)),
        sigma=job.config.scaling.level_sigma,
        exponent_sigma=job.config.scaling.exponent_sigma,
        noise_scale=job.config.scaling.noise_scale,
        others=coordinates.columns,
    )
    return learn(
        [trial for trial in done if trial.status != "failed"],
        {trial.number: coordinates.others(trial.settings) for trial in done},
        prior=prior,
        target=job.protocol.target,
        ideal=_ideal(job),
        step_time=job.runner.step_time,
        in_examples=False,
        particles=particles,
        moves=REPORT_MOVES,
        rng=np.random.default_rng(job.plan.seed),
    )


def b_crit_interval(job: Job, known: Known) -> list[float]:
    """Return the low end, the median and the high end of B_crit's interval, in examples."""
    rng = np.random.default_rng([job.plan.seed, len(known.arms)])
    return [float(value) for value in b_crit_quantiles(known, (INTERVAL[0], 0.5, INTERVAL[1]), rng)]


def write_trials(output: Output, done: Sequence[TrialResult]) -> None:
    """Write ``trials.jsonl``: one record a trial, in order of their numbers."""
    write_text(output.trials, "".join(result.to_json() + "\n" for result in done))


def _report(
    job: Job,
    study: optuna.Study,
    tracking: "Tracking | None",
    ended: str,
    arguments: Sequence[str],
    console: Console,
) -> None:
    done = results(study)
    fit = _fit(done)
    known = known_of(job, done, REPORT_PARTICLES)
    posterior = b_crit_interval(job, known)
    held = which_rule_held(known, job.space.low, job.space.high, posterior[1])
    summary = summarize(done, job.protocol.target, fit, held, ended, posterior)
    tests = _test_winners(job, study, winners(done))
    output, workload = job.output, job.config.workload.name
    ideal, real = scale_out(job, known) if any(trial.reached for trial in done) else ([], [])
    plans = {"ideal": [asdict(row) for row in ideal], "with_all_reduce": [asdict(row) for row in real]}
    summary = {"study": job.config.study, "workload": workload, **summary, "test": tests, "scale_out": plans}
    write_text(output.curve, dump_json(summary, indent=2) + "\n")
    write_text(output.best, best_yaml(winners(done), arguments, output, job.runner.stops, job.config))
    curve = fit if isinstance(fit, CurveFit) else None
    draw_curve(done, summary, curve, workload, output.figure)
    if ideal:
        draw_scale_out(ideal, real, workload, output.scale_out)
    ui = "not logged (mlflow.enabled=false)"
    if tracking is not None:
        from bstune.tracking import ui_command

        tracking.finish_study(curves(summary, curve), scalars(summary), _artifacts(output))
        ui = ui_command(_mlflow_uri(job.config))
    files = {"figure": output.figure, "curve": output.curve, "trials": output.trials, "winners": output.best}
    if ideal:
        files["devices"] = output.scale_out
        console.print(scale_out_table(real or ideal, _scale_out_title(real)))
    print_final(console, summary, tests, files, ui)
    for caveat in job.runner.caveats:
        console.print(caveat, soft_wrap=True)


def _scale_out_title(real: Sequence[ScaleOut]) -> str:
    return f"several devices, each as fast as this one, {'with the' if real else 'without an'} all-reduce"


def _fit(done: Sequence[TrialResult]) -> CurveFit | str:
    try:
        return fit_curve(frontier_points(done))
    except CurveError as error:
        return str(error)


def _test_winners(job: Job, study: optuna.Study, best: Mapping[str, TrialResult]) -> dict[str, dict[str, float]]:
    """Return the winners' metrics on the test set; each trial is tested once, however often the study goes on."""
    known: dict[str, dict[str, float]] = dict(study.user_attrs.get(TESTS, {}))
    for result in best.values():
        if str(result.number) not in known and (metrics := job.runner.test(_spec(result), job.output)):
            known[str(result.number)] = dict(metrics)
    study.set_user_attr(TESTS, known)
    return {name: known[str(result.number)] for name, result in best.items() if str(result.number) in known}


def _spec(result: TrialResult) -> TrialSpec:
    return TrialSpec(
        result.number, result.slot, result.batch_size, result.lr, result.delta, result.seed, settings=result.settings
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
        own += overrides(config, result.settings)
        kept = [redact(argument) for argument in arguments if not argument.startswith("trial.")]
        checkpoint = output.checkpoint(result.number)
        fields = ("number", "batch_size", "lr", "settings", "seed", "steps", "steps_low", "seconds_per_step")
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


def _mlflow_uri(config: DictConfig) -> str:
    from bstune.tracking import tracking_uri

    return config.mlflow.uri or tracking_uri()


def _open_tracking(job: Job, study: optuna.Study) -> "Tracking | None":
    """Open MLflow and send the trials that it lacks."""
    config = job.config
    if not config.mlflow.enabled:
        return None
    from bstune.tracking import Limits, StudyTags, open_tracking

    tags = StudyTags(
        study_id=study.user_attrs[STUDY_ID],
        name=config.study,
        workload=config.workload.name,
        metric=job.protocol.target.metric,
        params=logged_config(config),
        versions=job.runner.versions,
        device=job.runner.device,
        commit=_git_commit(),
    )
    limits = Limits(
        request_seconds=config.mlflow.request_seconds,
        retries=config.mlflow.retries,
        trial_seconds=config.mlflow.seconds,
        study_seconds=config.mlflow.study_seconds,
    )
    tracking = open_tracking(_mlflow_uri(config), config.mlflow.experiment, tags, limits)
    for result in results(study):
        tracking.send_trial(result)
    return tracking


def _git_commit() -> str | None:
    """Return the commit of the working directory's repository; None where there is none, or no git."""
    command = ["git", "rev-parse", "HEAD"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True)  # noqa: S603
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip()


def shareable_yaml(config: DictConfig) -> str:
    """Return the composed config as YAML, without passwords; values from the environment stay references to it."""
    return redact(OmegaConf.to_yaml(config))


def logged_config(config: DictConfig) -> dict[str, Any]:
    """Return the composed config, flat, without passwords; the module's own references to the trial stay as such."""
    values = plain(config)
    if "module" in config.workload:
        values["workload"]["module"] = OmegaConf.to_container(config.workload.module, resolve=False)
    for name in ("trial", "mlflow", "storage", "debug"):
        values.pop(name)
    return {name: redact(str(value)) for name, value in flatten(values).items()}
