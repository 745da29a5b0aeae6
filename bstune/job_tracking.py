"""A job's study as MLflow is told of it."""

import subprocess
from typing import TYPE_CHECKING, Any

import optuna
from omegaconf import DictConfig, OmegaConf

from bstune.building import flatten, plain
from bstune.output import redact
from bstune.preflight import Job
from bstune.search.study import STUDY_ID, results

if TYPE_CHECKING:
    from bstune.tracking import Tracking


def open_job_tracking(job: Job, study: optuna.Study) -> "Tracking | None":
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
    tracking = open_tracking(mlflow_uri(config), config.mlflow.experiment, tags, limits)
    for result in results(study):
        tracking.send_trial(result)
    return tracking


def mlflow_uri(config: DictConfig) -> str:
    """Return where MLflow keeps what it is told: as the config says, or the environment."""
    from bstune.tracking import tracking_uri

    return config.mlflow.uri or tracking_uri()


def _git_commit() -> str | None:
    """Return the commit of the working directory's repository; None where there is none, or no git."""
    command = ["git", "rev-parse", "HEAD"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True)  # noqa: S603
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip()


def logged_config(config: DictConfig) -> dict[str, Any]:
    """Return the composed config, flat, without passwords; the module's own references to the trial stay as such."""
    values = plain(config)
    if "module" in config.workload:
        values["workload"]["module"] = OmegaConf.to_container(config.workload.module, resolve=False)
    for name in ("trial", "mlflow", "storage", "debug"):
        values.pop(name)
    return {name: redact(str(value)) for name, value in flatten(values).items()}
