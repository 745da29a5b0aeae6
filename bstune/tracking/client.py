"""MLflow's client, which takes secrets out of all texts that are sent.

Files are sent as they are: those that bstune writes hold no secrets.
"""

from collections.abc import Mapping, Sequence

from mlflow import MlflowClient
from mlflow.entities import Metric, Param, Run, RunTag
from mlflow.utils.async_logging.run_operations import RunOperations

from bstune.system.secrets import redact_values


class FilteringClient(MlflowClient):
    """MLflow's client for a study, which takes secrets out of parameters, tags and names of runs.

    Keys and metrics are sent as they are. The signatures are MLflow's.
    """

    def create_run(
        self,
        experiment_id: str,
        start_time: int | None = None,
        tags: Mapping[str, str] | None = None,
        run_name: str | None = None,
    ) -> Run:
        """Create a run in an experiment. ``start_time`` is in milliseconds, and None is now."""
        if run_name is not None:
            run_name = redact_values(run_name)
        return super().create_run(experiment_id, start_time, _without_secrets(tags), run_name)

    def create_experiment(
        self,
        name: str,
        artifact_location: str | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> str:
        """Create an experiment, and give its id."""
        return str(super().create_experiment(name, artifact_location, _without_secrets(tags)))

    def set_tag(
        self, run_id: str, key: str, value: object, synchronous: bool | None = None
    ) -> RunOperations | None:
        """Set a tag of a run."""
        return super().set_tag(run_id, key, redact_values(str(value)), synchronous)

    def log_batch(
        self,
        run_id: str,
        metrics: Sequence[Metric] = (),
        params: Sequence[Param] = (),
        tags: Sequence[RunTag] = (),
        synchronous: bool | None = None,
    ) -> RunOperations | None:
        """Log metrics, parameters and tags of a run."""
        params = [Param(param.key, redact_values(param.value)) for param in params]
        tags = [RunTag(tag.key, redact_values(tag.value)) for tag in tags]
        return super().log_batch(run_id, metrics, params, tags, synchronous)


def _without_secrets(values: Mapping[str, str] | None) -> dict[str, str] | None:
    """Give tags with secrets taken out of their values. None stays None."""
    if values is None:
        return None
    return {key: redact_values(str(value)) for key, value in values.items()}
