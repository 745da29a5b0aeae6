"""Reads back the results that studies logged to MLflow: the ``curve.json`` of each study's run."""

import os
import tempfile
from pathlib import Path

from mlflow import MlflowClient
from mlflow.entities import Run
from mlflow.store.tracking import SEARCH_MAX_RESULTS_THRESHOLD

from bstune.config import mlflow_options
from bstune.core.errors import ConfigError, InputError, StudyError
from bstune.report.compare import LoggedCurve
from bstune.system.files import Output
from bstune.system.inputs import read_text
from bstune.system.secrets import remember
from bstune.tracking.address import check_uri, database_path, tracking_uri
from bstune.tracking.content import KIND
from bstune.tracking.exchange import FAILURES, short_requests

CURVE = Output(Path()).curve.name


def logged_curves(experiment: str, uri: str | None = None) -> list[LoggedCurve]:
    """Read the ``curve.json`` of each study in an experiment of MLflow, the oldest study first.

    A run without that file is in the list, too, with the reason.

    Args:
        experiment: name of MLflow's experiment.
        uri: MLflow's address. None: the one that studies log to by default, which is
            ``MLFLOW_TRACKING_URI`` or ``mlflow.db`` in this folder.

    Raises:
        StudyError: if MLflow does not answer, or has no such experiment or no study in it.
    """
    try:
        settings = mlflow_options(uri)
    except ConfigError as error:
        # The address may be a reference that cannot be resolved, such as ${oc.env:NAME}.
        raise StudyError(f"--uri: {error}") from error
    address = tracking_uri(settings)
    # A password in the address is hidden in all that is printed from now on.
    remember(address)
    check_uri(address)
    path = database_path(address)
    # MLflow would make a database where there is none.
    if path is not None and not path.is_file():
        raise StudyError(
            f"there is no MLflow database {path}: give its address, --uri URI or "
            "MLFLOW_TRACKING_URI"
        )
    try:
        with short_requests(settings), tempfile.TemporaryDirectory() as folder:
            client = MlflowClient(address)
            runs = _study_runs(client, experiment, address)
            return [_logged_curve(client, run, folder) for run in runs]
    except FAILURES as error:
        lines = str(error).strip().splitlines()
        reason = lines[0] if lines else repr(error)
        raise StudyError(f"MLflow at {address} does not answer: {reason}") from error


def _study_runs(client: MlflowClient, experiment: str, address: str) -> list[Run]:
    """Find the runs of an experiment's studies, the oldest first.

    StudyError if there is no such experiment, or no study in it. ``address``: MLflow's, for errors.
    """
    known = client.get_experiment_by_name(experiment)
    if known is None:
        there = ", ".join(repr(other.name) for other in client.search_experiments())
        raise StudyError(
            f"MLflow at {address} has no experiment {experiment!r}, but {there or 'none at all'}"
        )
    page = client.search_runs(
        [known.experiment_id],
        f"tags.`{KIND}` = 'study'",
        max_results=SEARCH_MAX_RESULTS_THRESHOLD,
        order_by=["start_time"],
    )
    runs = list(page)
    if not runs:
        raise StudyError(f"the experiment {experiment!r} of MLflow at {address} has no study")
    return runs


def _logged_curve(client: MlflowClient, run: Run, folder: str) -> LoggedCurve:
    """Download the ``curve.json`` of a study's run to a folder and read it, or say why not."""
    name = f"MLflow run {run.info.run_id[:8]}"
    artifacts = {artifact.path for artifact in client.list_artifacts(run.info.run_id)}
    if CURVE not in artifacts:
        return LoggedCurve(name, text=None, missing=f"no {CURVE}: it has not finished")
    # MLflow would show a progress bar for one small file.
    os.environ["MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR"] = "false"
    path = Path(client.download_artifacts(run.info.run_id, CURVE, folder))
    try:
        return LoggedCurve(name, text=read_text(path, "its"))
    except InputError as error:
        return LoggedCurve(name, text=None, missing=str(error))
