"""Optimizers of other libraries, which the extra ``bstune[optimizers]`` installs."""

import importlib
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from bstune.core.errors import ConfigError


def schedule_free_adamw(params: ParamsT, **options: Any) -> Optimizer:
    """Make schedulefree's AdamW (Defazio et al. 2024, arXiv 2405.15682).

    It keeps an average of the weights, which is to be evaluated in their place
    (:class:`bstune.workloads.averaging.OptimizersAverage`).

    Raises:
        ConfigError: without that library.
    """
    optimizer: Optimizer = _class_of_library("schedulefree", "AdamWScheduleFree")(params, **options)
    return optimizer


def soap(params: ParamsT, **options: Any) -> Optimizer:
    """Make pytorch_optimizer's SOAP (Vyas et al. 2024, arXiv 2409.11321).

    It is Adam in Shampoo's eigenbasis.

    Raises:
        ConfigError: without that library.
    """
    optimizer: Optimizer = _class_of_library("pytorch_optimizer", "SOAP")(params, **options)
    return optimizer


def _class_of_library(library: str, name: str) -> Any:
    """Import a class of a library that an extra installs; ConfigError where it is not installed."""
    try:
        module = importlib.import_module(library)
    except ImportError as error:
        raise ConfigError(
            f"{name} comes from {library}, which cannot be imported ({error}): pip install "
            "'bstune[optimizers]'"
        ) from error
    return getattr(module, name)
