"""Config files of Lightning's command line, LightningCLI, read as it reads them: by jsonargparse.

:func:`workload_of` makes a workload of such a file. The workload's nodes call :func:`build_module` and
:func:`build_data`, which check and build the file's ``model`` (with its ``optimizer`` and ``lr_scheduler``) and its
``data`` as LightningCLI does: nested classes, callables and conversions by type hints included.
"""

import math
import re
from argparse import ArgumentError
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from types import MethodType
from typing import Any

import yaml
from torch.utils.data import DataLoader

from bstune.core.errors import ConfigError
from bstune.hydra_recipe import instantiate_partial
from bstune.options import Node
from bstune.system.inputs import one_line, parse_yaml, read_text
from bstune.trial.backend import OWNED
from bstune.trial.batches.epochs import epoch_length

RATES = ("lr", "learning_rate")
IGNORED = (
    "seed_everything",
    "ckpt_path",
    "verbose",
    "weights_only",
)  # a study has seeds of its own
PRECISIONS = {"32": "32-true", "16": "16-mixed", "bf16": "bf16-mixed"}  # short forms
# Words in the name of a metric that say which way is better.
LESS = ("loss", "error", "err", "mse", "rmse", "mae", "nll", "perplexity", "ppl")
MORE = ("acc", "accuracy", "f1", "auc", "auroc", "precision", "recall", "iou", "dice", "r2")
BELOW, ABOVE = 8, 16  # batch sizes that are searched, as factors of the file's own
TRIALS = 40


@dataclass(frozen=True)
class Chosen:
    """What the command line adds to a file."""

    target: str
    model: str | None = None  # classes, where the file names none
    data: str | None = None
    lr: str | None = None  # the key of the learning rate
    name: str | None = None


def build_module(model: Mapping[str, Any], optimizer: Any = None, lr_scheduler: Any = None) -> Any:
    """Return the LightningModule of a file's ``model``, whose optimizer and schedule are those that the file names."""
    parser, sections = (
        _parser(_package(model)),
        {"model": model, "optimizer": optimizer, "lr_scheduler": lr_scheduler},
    )
    parsed = _parsed(parser, {name: value for name, value in sections.items() if value is not None})
    module = parser.instantiate(parsed).model
    if optimizer is not None:
        cli = import_module(f"{_package(model)}.cli")

        def configured(module: Any) -> Any:
            rule = cli.instantiate_class(module.parameters(), parsed.optimizer.as_dict())
            schedule = lr_scheduler and cli.instantiate_class(rule, parsed.lr_scheduler.as_dict())
            return cli.LightningCLI.configure_optimizers(module, rule, schedule)

        module.configure_optimizers = MethodType(configured, module)
    return module


def build_data(data: Mapping[str, Any]) -> Any:
    """Return the LightningDataModule of a file's ``data``."""
    parser = _parser(_package(data))
    return parser.instantiate(_parsed(parser, {"data": data})).data


def workload_of(path: Path, chosen: Chosen) -> tuple[dict[str, Any], list[str]]:
    """Return the workload of a file, as its YAML is to be, and lines about what it takes from the file.

    The data are loaded once, to learn how many there are and the batch size that the learning rate goes with.
    """
    if chosen.name is not None and not re.fullmatch(r"\w[\w.-]*", chosen.name):
        raise ConfigError(
            f"--name must be letters, digits, and - . _ between them, but got {chosen.name!r}"
        )
    sections = _sections(path, chosen)
    parser = _parser(_package(sections["model"]))
    parsed = yaml.safe_load(parser.dump(_parsed(parser, sections), skip_unset=False))
    defaults = yaml.safe_load(parser.dump(parser.get_defaults(), skip_unset=False))["trainer"]
    trainer = {name: value for name, value in parsed["trainer"].items() if value != defaults[name]}
    key, lr = _learning_rate(parsed, chosen.lr)
    own = {name: parsed[name] for name in ("model", "optimizer", "lr_scheduler") if parsed[name]}
    of_trials = with_value(own, key, "${trial.lr}")
    batch_size, examples = _batch_size(parsed["data"])
    batch_size *= parsed["trainer"].get("accumulate_grad_batches") or 1
    budget = _examples(path, parsed["trainer"], batch_size, examples)
    metric, value, mode = parse_target(chosen.target)
    left_out = [
        f"trainer.{name}"
        for name in trainer
        if name in OWNED and name not in ("max_epochs", "max_steps")
    ]
    precision = str(trainer.get("precision") or 32)
    here = f"{build_module.__module__}."
    module = {"_target_": f"{here}build_module", "_recursive_": False, **of_trials}
    workload = {
        "name": chosen.name or parsed["model"]["class_path"].rpartition(".")[2],
        "precision": PRECISIONS.get(precision, precision),
        "trials": TRIALS,
        "reference": {"batch_size": batch_size, "lr": lr},
        "batch_size": {
            "low": max(1, batch_size // BELOW),
            "high": min(examples, batch_size * ABOVE),
        },
        "budget": {"steps": max(1, budget // (BELOW * batch_size)), "examples": budget},
        "target": {"metric": metric, "value": value, "mode": mode},
        "data": {"_target_": f"{here}build_data", "_recursive_": False, "data": parsed["data"]},
        "module": module,
        "trainer": {name: value for name, value in trainer.items() if name not in OWNED},
    }
    lines = [
        f"{key} is the learning rate: {lr:g} at batch size {batch_size}",
        f"{examples} training examples",
    ]
    if left_out:
        lines.append(f"left to bstune: {', '.join(left_out)}")
    return workload, lines


def with_value(node: Node, key: str, value: object) -> Node:
    """Copy nested mappings with another value at a dotted key."""
    name, _, rest = key.partition(".")
    if rest:
        value = with_value(node[name], rest, value)
    return {**node, name: value}


def parse_target(text: str) -> tuple[str, float, str]:
    """Return the metric, the value and the mode (min or max) of ``val_loss<=0.1``, ``val_acc>=0.9``, ``val_loss=0.1``.

    Where neither sign says which way is better, the metric's name must.
    """
    found = re.fullmatch(r"\s*([^<>=\s]+)\s*(<=|>=|=)\s*(\S+)\s*", text)
    try:
        if found is None:
            raise ValueError
        metric, sign, value = found[1], found[2], float(found[3])
    except ValueError as error:
        raise ConfigError(
            f"--target must be a metric and a number, such as val_loss=0.1, 'val_loss<=0.1' or 'val_acc>=0.9', but got "
            f"{text}"
        ) from error
    words = set(re.split(r"[^a-z0-9]+", metric.lower()))
    modes = [mode for mode, names in (("min", LESS), ("max", MORE)) if words.intersection(names)]
    if sign == "=" and len(modes) != 1:
        raise ConfigError(
            f"--target {text}: the name does not say which way is better: write '{metric}<={value:g}' or "
            f"'{metric}>={value:g}', in quotes"
        )
    return metric, value, modes[0] if sign == "=" else "min" if sign == "<=" else "max"


def _sections(path: Path, chosen: Chosen) -> dict[str, Any]:
    """Return what LightningCLI reads of a file, with the classes that it names or the command line does."""
    content = parse_yaml(read_text(path, "the config file"), one_line(str(path)))
    if isinstance(content, dict):
        content = content.get("fit", content)
    if not isinstance(content, dict):
        raise ConfigError(
            f"{path} must hold LightningCLI's trainer, model and data, but holds {content!r:.100}"
        )
    known = ("trainer", "model", "data", "optimizer", "lr_scheduler")
    others = [name for name in content if name not in (*known, *IGNORED)]
    if others:
        raise ConfigError(
            f"{path}: {', '.join(map(str, others))} is none of {', '.join(known)}: what a project's own LightningCLI "
            "adds is not known here; put call-backs under trainer.callbacks, other arguments under model and data"
        )
    sections = {name: content[name] for name in known if content.get(name) is not None}
    for name, given in (("model", chosen.model), ("data", chosen.data)):
        section = sections.get(name, {})
        if isinstance(section, str):
            section = {"class_path": section}
        if "class_path" not in section:
            if given is None:
                raise ConfigError(
                    f"{path} names no class for its {name}: give it, as --{name} my_project.MyClass"
                )
            section = {"class_path": given, "init_args": section}
        sections[name] = section
    return sections


def _package(section: Mapping[str, Any]) -> str:
    """Return the package whose LightningModule, or data module, a section's class is."""
    found = instantiate_partial({"_target_": section["class_path"]}, section["class_path"])
    names = [base.__module__ for base in getattr(found.func, "__mro__", ())]
    return (
        "pytorch_lightning"
        if any(name.startswith("pytorch_lightning.") for name in names)
        else "lightning.pytorch"
    )


@cache
def _parser(package: str) -> Any:
    """Return LightningCLI's parser of any model and data."""
    try:
        import jsonargparse  # noqa: F401  # a part of LightningCLI that pip installs apart
    except ModuleNotFoundError as error:
        raise ConfigError(
            "files of LightningCLI are read by jsonargparse, as LightningCLI itself does: "
            "pip install 'bstune[lightning-cli]'"
        ) from error
    lightning = import_module(package)
    parser = import_module(f"{package}.cli").LightningArgumentParser(exit_on_error=False)
    parser.add_lightning_class_args(lightning.Trainer, "trainer")
    parser.add_lightning_class_args(
        lightning.LightningModule, "model", subclass_mode=True, required=False
    )
    parser.add_lightning_class_args(
        lightning.LightningDataModule, "data", subclass_mode=True, required=False
    )
    parser.add_optimizer_args()
    parser.add_lr_scheduler_args()
    return parser


def _parsed(parser: Any, sections: Mapping[str, Any]) -> Any:
    try:
        return parser.parse_object(sections)
    except (ArgumentError, TypeError, ValueError) as error:
        # With all that a value might have been instead, it is pages long.
        raise ConfigError(
            f"LightningCLI does not take this config: {' '.join(str(error).split())[:600]}"
        ) from error


def _learning_rate(parsed: Mapping[str, Any], given: str | None) -> tuple[str, float]:
    """Return the key of the learning rate, by its name unless it is given, and its value."""
    rates = dict(_numbers({name: parsed[name] for name in ("optimizer", "model") if parsed[name]}))
    named = [key for key in rates if key.rpartition(".")[2] in RATES]
    optimizers = [
        key for key in named if key.startswith("optimizer.")
    ]  # it takes the place of the model's own
    keys = [given] if given else optimizers or named
    if len(keys) != 1 or keys[0] not in rates:
        found = f"there is no number {given}" if given else f"found {', '.join(keys) or 'none'}"
        raise ConfigError(
            f"which number is the learning rate? {found}: give its key, as --lr model.init_args.my_rate "
            f"(numbers: {', '.join(rates) or 'none'})"
        )
    return keys[0], float(rates[keys[0]])


def _numbers(value: Any, key: str = "") -> Iterator[tuple[str, float]]:
    """Yield each number below a mapping, with its key; lists are passed over."""
    for name, one in value.items():
        if isinstance(one, dict):
            yield from _numbers(one, f"{key}{name}.")
        elif isinstance(one, int | float) and not isinstance(one, bool):
            yield f"{key}{name}", one


def _batch_size(data: Mapping[str, Any]) -> tuple[int, int]:
    """Return the batch size of the training loader and the number of its examples."""
    module = build_data(data)
    module.prepare_data()
    module.setup("fit")
    loader = module.train_dataloader()
    if not isinstance(loader, DataLoader) or loader.batch_size is None:
        raise ConfigError(
            f"{data['class_path']}.train_dataloader() must return a torch DataLoader with a batch size, but returned "
            f"{type(loader).__name__}"
        )
    return loader.batch_size, epoch_length(loader)


def _examples(path: Path, trainer: Mapping[str, Any], batch_size: int, examples: int) -> int:
    """Return how many examples the file's own training would take."""
    epochs, steps = trainer.get("max_epochs") or -1, trainer.get("max_steps") or -1
    limits = [one for one in (epochs * examples, steps * batch_size) if one > 0]
    if not limits:
        raise ConfigError(
            f"{path}: how long is a trial at most? set trainer.max_epochs or trainer.max_steps in it"
        )
    return math.ceil(min(limits))
