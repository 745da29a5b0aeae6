"""Optimizers of other libraries, which the extra ``bstune[optimizers]`` installs."""

import importlib
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from bstune.core.errors import ConfigError


def schedule_free_adamw(params: ParamsT, **options: Any) -> Optimizer:
    """Make schedulefree's AdamW (Defazio et al. 2024, arXiv 2405.15682).

    It trains at other weights than those that it gives
    (:class:`bstune.workloads.averaging.OptimizersAverage`).

    Raises:
        ConfigError: without that library.
    """
    optimizer: Optimizer = _of_library("schedulefree", "AdamWScheduleFree")(params, **options)
    return optimizer


def soap(params: ParamsT, **options: Any) -> Optimizer:
    """Make pytorch_optimizer's SOAP, Adam in Shampoo's eigenbasis (Vyas et al. 2024, arXiv 2409.11321).

    Raises:
        ConfigError: without that library.
    """
    optimizer: Optimizer = _of_library("pytorch_optimizer", "SOAP")(params, **options)
    return optimizer


def _of_library(library: str, name: str) -> Any:
    try:
        module = importlib.import_module(library)
    except ImportError as error:
        raise ConfigError(
            f"{name} comes from {library}, which cannot be imported ({error}): pip install "
            "'bstune[optimizers]'"
        ) from error
    return getattr(module, name)
