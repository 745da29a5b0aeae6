"""Checks that the target's metric is logged in validation, as trials end by it."""

from collections.abc import Mapping

from bstune.core.errors import ConfigError
from bstune.trial.checks.start import how_to_log


def check_metric(
    name: str, logged: Mapping[str, object], in_training: Mapping[str, object], where_to: str = ""
) -> None:
    """Raise a ConfigError for a target whose metric is not logged in validation.

    Args:
        name: of the target's metric.
        logged: the metrics that were logged in validation, by name.
        in_training: those that were logged in training.
        where_to: the file and line of the module's validation_step, as text; empty if not known.
    """
    if name in logged:
        return
    where = "in training alone" if name in in_training else "nowhere"
    if not logged:
        raise ConfigError(
            f"the target's metric {name!r} is logged {where}, and nothing in "
            f"validation_step{where_to}: {how_to_log(name)}"
        )
    raise ConfigError(
        f"the target's metric {name!r} is logged {where}; in validation the module logs "
        f"{', '.join(sorted(logged))}: make one of them the target's (target='METRIC<=VALUE' in "
        f"Python, workload.target.metric=METRIC), or log it in validation_step{where_to}"
    )
