"""bstune tunes the batch size and learning rate of a workload, and maps its critical batch size."""

from typing import TYPE_CHECKING, Any

__version__ = "1.0.0"

if TYPE_CHECKING:
    from bstune.api import survey, tune
    from bstune.core.records import Budget, Target
    from bstune.core.rules import lr_of
    from bstune.own_loop import Study
    from bstune.result import Result, compare, load
    from bstune.search.sampler import FrontierSampler
    from bstune.study.fit_curve import fit_curve
    from bstune.trial.lightning import StopAtTarget
    from bstune.trial.noise_scale import NoiseScale

__all__ = [
    "Budget",
    "FrontierSampler",
    "NoiseScale",
    "Result",
    "StopAtTarget",
    "Study",
    "Target",
    "__version__",
    "compare",
    "fit_curve",
    "load",
    "lr_of",
    "survey",
    "tune",
]

# Where each public name is: importing bstune alone imports nothing else.
_HOMES = {
    "Budget": "bstune.core.records",
    "FrontierSampler": "bstune.search.sampler",
    "NoiseScale": "bstune.trial.noise_scale",
    "Result": "bstune.result",
    "StopAtTarget": "bstune.trial.lightning",
    "Study": "bstune.own_loop",
    "Target": "bstune.core.records",
    "compare": "bstune.result",
    "fit_curve": "bstune.study.fit_curve",
    "load": "bstune.result",
    "lr_of": "bstune.core.rules",
    "survey": "bstune.api",
    "tune": "bstune.api",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used."""
    if name not in _HOMES:
        raise AttributeError(f"module 'bstune' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
