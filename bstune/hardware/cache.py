"""Surveys that are kept, by workload, device and versions: measured once, read in milliseconds."""

import hashlib
import json
import logging
import platform
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningDataModule, LightningModule
from omegaconf import DictConfig, OmegaConf
from pydantic import TypeAdapter, ValidationError

from bstune.building import plain
from bstune.errors import HardwareError
from bstune.hardware.ceiling import Ask
from bstune.hardware.survey import Survey, survey
from bstune.output import write_text
from bstune.protocol import Protocol
from bstune.records import TrialSpec
from bstune.search.space import Space
from bstune.trial import device_name, versions
from bstune.workload import Workload, build_module, train_examples

logger = logging.getLogger(__name__)

FORM = TypeAdapter(Survey)


def surveyed(
    config: DictConfig,
    space: Space,
    protocol: Protocol,
    data: LightningDataModule,
    build: Callable[[], Workload],
    say: Callable[[str], None],
    ask: Ask | None = None,
) -> tuple[Survey, bool]:
    """Return the survey that is kept for this workload, device and versions, or a new one, and whether it was kept.

    ``hardware.refresh`` measures anew. A file that cannot be read counts as none; one that cannot be written is logged,
    and the survey stands all the same.

    Args:
        config: the composed and checked config, device and precision settled.
        space: the range of batch sizes and the learning rates.
        protocol: of the trials.
        data: of the workload, for their number.
        build: builds the workload; called only if it is measured.
        say: is told what goes on, a line each.
        ask: from :func:`bstune.hardware.ceiling.probe_server`; None: one is started where it is needed.

    Raises:
        HardwareError, ConfigError: as the survey does.
    """
    module = build_module(config, TrialSpec(0, 0, space.low, space.lr(space.low, 0.0), None, 0))
    name = identity(config, space, protocol, module, train_examples(data))
    path = Path(config.hardware.cache).expanduser() / f"{config.workload.name}-{name}.json"
    found = None if config.hardware.refresh else read(path)
    if found is not None:
        return found, True
    found = survey(config, space, protocol, train_examples(data), build, say, ask)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, FORM.dump_json(found).decode())
    except OSError as error:
        logger.warning("the survey of the hardware is not kept: %s cannot be written (%s)", path, error.strerror)
    return found, False


def read(path: Path) -> Survey | None:
    """Return the survey in a file; None where there is none, or one of another form."""
    try:
        return FORM.validate_json(path.read_bytes())
    except (OSError, ValidationError, HardwareError):
        return None


def identity(config: DictConfig, space: Space, protocol: Protocol, module: LightningModule, train_examples: int) -> str:
    """Return 16 hexadecimal digits that change with whatever the survey depends on.

    That is the workload as the config and its module have it (its layers and the shapes of its parameters, so that
    editing the model is seen), the data's length, the range of batch sizes, device, precision, how it is compiled,
    versions, how many trials share the memory, and how the survey is made. Targets, budgets and trials do not matter.
    """
    depends: dict[str, Any] = {
        "workload": OmegaConf.to_container(config.workload, resolve=False),
        "module": [repr(module), *(f"{name} {tuple(p.shape)}" for name, p in module.named_parameters())],
        "examples": train_examples,
        "range": [space.low, space.high, space.multiple],
        "device": [device_name(protocol.trainer), _processor()],
        "trainer": {key: str(value) for key, value in protocol.trainer.items()},
        "micro_batch_size": protocol.micro_batch_size,
        "compile": protocol.compile,
        "versions": dict(versions()),
        "survey": _without(plain(config.hardware), ("cache", "enabled", "refresh")),
    }
    if config.search.workers > 1:  # they share the memory
        depends["workers"] = config.search.workers
    depends["workload"] = _without(depends["workload"], ("trials", "budget", "target", "reference", "tunable"))
    return hashlib.sha256(json.dumps(depends, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _without(values: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in names}


def _processor() -> str:
    """Return the processor's model where the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
