"""``mlflow``: what is logged to MLflow."""

from typing import Annotated

from pydantic import Field

from bstune.options.values import NUMBER, PositiveFew, Seconds, Section, Text, Uri


class MlflowOptions(Section):
    """What is logged to MLflow."""

    enabled: bool
    """Log to MLflow."""
    experiment: Text
    """MLflow's experiment of studies; that of trials adds -trials."""
    uri: Uri | None
    """MLflow's address; null: sqlite:///mlflow.db in the working directory."""
    seconds: Seconds
    """Most seconds of sending in one trial; the next run sends the rest."""
    study_seconds: Seconds
    """Most seconds that a run waits for MLflow in all."""
    request_seconds: PositiveFew
    """Seconds until one HTTP request times out."""
    retries: Annotated[int, Field(ge=0, le=10), NUMBER]
    """Retries of one HTTP request; MLflow allows at most 10."""
