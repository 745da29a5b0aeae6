"""``mlflow``: what is logged to MLflow."""

from typing import Annotated

from pydantic import Field

from bstune.options.values import NUMBER, PositiveFew, Seconds, Section, Text, Uri


class MlflowOptions(Section):
    """The address of MLflow, and the most seconds that a trial, a run and a request wait for it."""

    enabled: bool
    """Log to MLflow."""
    experiment: Text
    """MLflow's experiment of the studies; the trials' has -trials after it."""
    uri: Uri | None
    """MLflow's address; null: mlflow.db in the working directory."""
    seconds: Seconds
    """Most seconds that a trial waits for MLflow; the next run sends the rest."""
    study_seconds: Seconds
    """Most seconds that a run waits for MLflow."""
    request_seconds: PositiveFew
    """Time limit of one HTTP request, in seconds."""
    retries: Annotated[int, Field(ge=0, le=10), NUMBER]
    """Retries of one HTTP request."""
