"""Runs a checked job: a study from its plan to its report, or one trial by itself."""

from collections.abc import Sequence

from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from bstune.estimate import remaining_seconds
from bstune.job_report import report_study
from bstune.job_search import run_slots, write_trials
from bstune.job_tracking import open_job_tracking
from bstune.output import locked, redact, write_text
from bstune.preflight import Job
from bstune.progress import Progress, plan_text
from bstune.records import TrialResult, TrialSpec
from bstune.search.study import finish_abandoned, open_study, results


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
        tracking = open_job_tracking(job, study)
        try:
            ended = run_slots(job, study, tracking, console)
        finally:  # a trial that was cut short is a record too
            write_trials(job.output, results(study))
        console.print(ended)
        report_study(job, study, tracking, ended, arguments, console)


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


def shareable_yaml(config: DictConfig) -> str:
    """Return the composed config as YAML, without passwords; values from the environment stay references to it."""
    return redact(OmegaConf.to_yaml(config))
