"""A winner's checkpoint as a model in MLflow, which loads back where bstune and the module's own code are installed.

A module that builds its layers once it has a Trainer takes the data as well.
"""

import json
import platform
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from mlflow import MlflowClient
from mlflow.entities import LoggedModelOutput
from mlflow.models import Model

from bstune.core.records import TrialResult, TrialSpec
from bstune.result import StudyResult
from bstune.study.prepare import PreparedStudy
from bstune.system.files import is_own

LOADER = "bstune.trial.restore"


def send_model(
    client: MlflowClient,
    experiment_id: str,
    run_id: str,
    prepared: PreparedStudy,
    trials: Mapping[int, TrialResult],
    result: StudyResult,
) -> str | None:
    """Send the winner of a study's run and return the model's id; None where there is no checkpoint.

    A study of Python objects has none that loads back: what builds its module is no config. Its ``train`` is None.
    """
    winner = result.winner
    if winner is None or result.train is None:
        return None
    checkpoint = prepared.files.checkpoint(winner.number)
    if not is_own(checkpoint):
        return None
    trial = trials[winner.number]
    names = ("number", "trial_index", "batch_size", "lr", "delta", "seed", "hyperparameters")
    spec = TrialSpec(**{name: getattr(trial, name) for name in names}, max_steps=trial.horizon)
    params = {"batch_size": str(trial.batch_size), "lr": str(trial.lr), "seed": str(trial.seed)}
    name = f"{prepared.config.workload.name}-winner"
    logged = client.create_logged_model(experiment_id, _model_name(name), run_id, params=params)
    with tempfile.TemporaryDirectory() as folder:
        model = Model(
            model_id=logged.model_id, run_id=run_id, artifact_path=logged.artifact_location
        )
        # What mlflow.pyfunc's own add_to_model does, whose import warns.
        model.add_flavor(
            "python_function", loader_module=LOADER, python_version=platform.python_version()
        )
        model.save(str(Path(folder) / "MLmodel"))
        written = {"spec": asdict(spec), "checkpoint": checkpoint.name}
        (Path(folder) / "trial.json").write_text(json.dumps(written, indent=2), encoding="utf-8")
        client.log_model_artifacts(logged.model_id, folder)
    for path in (prepared.files.config, checkpoint):
        client.log_model_artifact(logged.model_id, str(path))
    client.finalize_logged_model(logged.model_id, "READY")
    client.log_outputs(run_id, [LoggedModelOutput(logged.model_id, 0)])
    return str(logged.model_id)


def _model_name(name: str) -> str:
    """Return a name that MLflow allows: it refuses some marks."""
    return "".join("-" if mark in "/:.%\"'" else mark for mark in name)
