"""What a study puts back in the user's process: generators, flags, folder, loggers, environment."""

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import chdir, contextmanager
from typing import Any

import torch

from bstune.trial.devices.randomness import host_states, set_host_states

CUDNN_FLAGS = ("benchmark", "deterministic", "enabled")


@contextmanager
def restored() -> Iterator[None]:
    """At the end of the context, restore the state of this process that training changes.

    It is the environment, the working directory, warnings, loggers, torch's flags, and the states
    of the random number generators.
    """
    environment = dict(os.environ)
    flags = _torch_flags()
    generators = host_states()
    cuda_generators = _cuda_generators()
    loggers = _loggers()
    with warnings.catch_warnings(), chdir("."):
        try:
            yield
        finally:
            os.environ.clear()
            os.environ.update(environment)
            _set_torch_flags(flags)
            set_host_states(generators)
            if cuda_generators is not None:
                torch.cuda.set_rng_state_all(cuda_generators)
            for logger, settings in loggers.items():
                vars(logger).update(settings)
            # Loggers cache which levels are enabled, by their former settings.
            logging.getLogger().manager._clear_cache()  # type: ignore[attr-defined]


def _loggers() -> dict[logging.Logger, dict[str, Any]]:
    """Copy the attributes of every logger that training may change."""
    loggers: list[logging.Logger] = [logging.root]
    # The dict also has placeholders, for names that are only parents of loggers.
    for entry in logging.root.manager.loggerDict.values():
        if isinstance(entry, logging.Logger):
            loggers.append(entry)
    settings = dict[logging.Logger, dict[str, Any]]()
    for logger in loggers:
        settings[logger] = {
            "level": logger.level,
            "propagate": logger.propagate,
            "disabled": logger.disabled,
            # Copies, as the lists are changed in place.
            "handlers": list(logger.handlers),
            "filters": list(logger.filters),
        }
    return settings


def _cuda_generators() -> list[torch.Tensor] | None:
    """Read the states of the generators of all CUDA devices; None where CUDA is not in use."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return torch.cuda.get_rng_state_all()
    return None


def _products_precision() -> str | None:
    """Give the precision in which torch multiplies float32 matrices.

    None where it was set for each device and operator, which torch 2.9 allows.
    """
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return None


def _torch_flags() -> dict[str, Any]:
    """Read torch's settings of this process, by names of our own."""
    # Where nothing has used CUDA, asking for the current device would open a context.
    device = None
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        device = torch.cuda.current_device()
    return {
        "threads": torch.get_num_threads(),
        "dtype": torch.get_default_dtype(),
        "precision": _products_precision(),
        "device": device,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "grad": torch.is_grad_enabled(),
        "anomaly": torch.is_anomaly_enabled(),
        "cudnn": {name: getattr(torch.backends.cudnn, name) for name in CUDNN_FLAGS},
    }


def _set_torch_flags(flags: dict[str, Any]) -> None:
    """Set torch's settings to those that :func:`_torch_flags` has read."""
    torch.set_num_threads(flags["threads"])
    torch.set_default_dtype(flags["dtype"])
    if flags["precision"] is not None:
        torch.set_float32_matmul_precision(flags["precision"])
    if flags["device"] is not None:
        torch.cuda.set_device(flags["device"])
    torch.use_deterministic_algorithms(flags["deterministic"], warn_only=flags["warn_only"])
    torch.set_grad_enabled(flags["grad"])
    torch.autograd.set_detect_anomaly(flags["anomaly"])
    for name, value in flags["cudnn"].items():
        setattr(torch.backends.cudnn, name, value)
