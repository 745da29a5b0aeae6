"""bstune tunes the batch size and learning rate of a workload, and maps its critical batch size.

>>> import bstune
>>> bstune.survey("workload=digits").ceiling.batch_size  # doctest: +SKIP
1200
>>> bstune.tune(module=LitModel, data=MyDataModule(), ...).best.batch_size  # doctest: +SKIP
64

Importing this package is cheap: each name is imported when it is first used, and torch, lightning,
optuna and mlflow with those that need them.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bstune.core.curve import FrontierPoint, fit_curve
    from bstune.core.records import Budget, Target, TrialResult
    from bstune.core.scaling import lr_of
    from bstune.search.sampler import FrontierSampler
    from bstune.study.result import compare, load
    from bstune.study.study import Study
    from bstune.study.tune import survey, tune
    from bstune.trial.loop_noise_scale import LoopNoiseScale
    from bstune.trial.noise_scale import NoiseScale
    from bstune.trial.stop_at_target import StopAtTarget

__all__ = [
    "Budget",
    "FrontierPoint",
    "FrontierSampler",
    "LoopNoiseScale",
    "NoiseScale",
    "StopAtTarget",
    "Study",
    "Target",
    "TrialResult",
    "__version__",
    "compare",
    "fit_curve",
    "load",
    "lr_of",
    "survey",
    "tune",
]

_MODULES = {
    "Budget": "bstune.core.records",
    "FrontierPoint": "bstune.core.curve",
    "FrontierSampler": "bstune.search.sampler",
    "LoopNoiseScale": "bstune.trial.loop_noise_scale",
    "NoiseScale": "bstune.trial.noise_scale",
    "StopAtTarget": "bstune.trial.stop_at_target",
    "Study": "bstune.study.study",
    "Target": "bstune.core.records",
    "TrialResult": "bstune.core.records",
    "compare": "bstune.study.result",
    "fit_curve": "bstune.core.curve",
    "load": "bstune.study.result",
    "lr_of": "bstune.core.scaling",
    "survey": "bstune.study.tune",
    "tune": "bstune.study.tune",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        # It takes 15 of the 17 ms that this package takes to import.
        from importlib.metadata import PackageNotFoundError, version

        try:
            found = version("bstune")
        # A source tree that is not installed has no version.
        except PackageNotFoundError:
            found = "unknown"
        # The record of each trial asks for it, at 2 ms each without this.
        globals()[name] = found
        return found
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(_imported(_MODULES[name]), name)


def _imported(module: str) -> ModuleType:
    """Import a module of bstune's. Where that takes ten seconds and more, lines say so."""
    if module in sys.modules:
        return import_module(module)
    # It starts a thread, which a module that is there does not need.
    from bstune.system.loading import loading

    # An import by itself does not say that it loads PyTorch: scripts import names at their top.
    with loading(training=False):
        return import_module(module)


def __dir__() -> list[str]:
    return sorted(__all__)
