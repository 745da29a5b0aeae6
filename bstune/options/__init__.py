"""Every option: its type, its bounds, its cross-checks. The defaults are all in ``conf/``.

A file has the section of its name: ``search.trials`` stands in ``search.py``. Those without a
section, such as ``seed``, stand in ``study.py``.
"""

from bstune.options.data import DataOptions
from bstune.options.hardware import StepTimeOptions
from bstune.options.lookup import PlainLookup
from bstune.options.mistakes import mistake, options_of_section
from bstune.options.mlflow import MlflowOptions
from bstune.options.refusal import shown
from bstune.options.search import SearchOptions
from bstune.options.settings import (
    flat_settings,
    flatten,
    option_at,
    overrides,
    with_option,
    with_tuned,
)
from bstune.options.study import (
    OPTION_NAMES,
    GivenOptions,
    ReplayedOptions,
    StudyOptions,
    TrainedOptions,
    kind_of_options,
)
from bstune.options.values import Node, Section
from bstune.options.workload import (
    GivenWorkload,
    ReplayedWorkload,
    TrainedWorkload,
    WorkloadOptions,
)

__all__ = [
    "OPTION_NAMES",
    "DataOptions",
    "GivenOptions",
    "GivenWorkload",
    "MlflowOptions",
    "Node",
    "PlainLookup",
    "ReplayedOptions",
    "ReplayedWorkload",
    "SearchOptions",
    "Section",
    "StepTimeOptions",
    "StudyOptions",
    "TrainedOptions",
    "TrainedWorkload",
    "WorkloadOptions",
    "flat_settings",
    "flatten",
    "kind_of_options",
    "mistake",
    "option_at",
    "options_of_section",
    "overrides",
    "shown",
    "with_option",
    "with_tuned",
]
