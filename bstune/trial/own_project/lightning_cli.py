"""Reads config files of LightningCLI, Lightning's command line, by jsonargparse as it does itself.

:func:`workload_of` makes a workload of such a file. The workload's nodes call :func:`build_module`
and :func:`build_data`, which check and build the file's ``model`` (with its ``optimizer`` and
``lr_scheduler``) and its ``data`` as LightningCLI does: nested classes, callables and conversions
by type hints included.
"""

from argparse import ArgumentError
from contextlib import suppress
from dataclasses import replace
from functools import cache
from importlib import import_module
from types import MethodType
from typing import Any

import yaml

from bstune.core.errors import ConfigError
from bstune.core.metric_names import parse_target
from bstune.hydra_recipe import instantiate_partial
from bstune.options import Node
from bstune.recipe import left_to_bstune
from bstune.system.inputs import one_line
from bstune.system.lightning_package import OTHER, installed_lightning
from bstune.trial.backend import OWNED, refuse_rate_and_batch_size_finders
from bstune.trial.lightning.installed import LightningDataModule, LightningModule
from bstune.trial.own_project.cli_file import (
    LENGTHS,
    NEEDS_JSONARGPARSE,
    Chosen,
    CliFile,
    named_rates,
    numbers_of,
    which_rate,
)
from bstune.trial.own_project.own_values import (
    MOST_EPOCHS,
    OwnBatches,
    OwnMetric,
    check_trained_size,
    own_batches,
    own_examples,
    own_metric,
    rate_of_optimizers,
)

SHORT_PRECISIONS = {"32": "32-true", "16": "16-mixed", "bf16": "bf16-mixed"}
# The range of batch sizes, as factors below and above the file's own.
FACTOR_BELOW = 8
FACTOR_ABOVE = 16
# The trials of a study of such a file.
CLI_TRIALS = 40


def build_module(
    model: Node, optimizer: Node | None = None, lr_scheduler: Node | None = None
) -> LightningModule:
    """Build the LightningModule of a file's section ``model``.

    Where the file has a section ``optimizer``, the module's ``configure_optimizers`` builds that
    optimizer, with the schedule of ``lr_scheduler`` if there is one.
    """
    # Lightning has two packages, each with a LightningCLI for its own modules.
    package = _package(model)
    parser = _parser(package)
    sections = {"model": model}
    if optimizer is not None:
        sections["optimizer"] = optimizer
    if lr_scheduler is not None:
        sections["lr_scheduler"] = lr_scheduler
    parsed = _parsed(parser, sections)
    module: LightningModule = parser.instantiate(parsed).model
    if optimizer is not None:
        cli = import_module(f"{package}.cli")

        def configured(module: LightningModule) -> object:
            built = cli.instantiate_class(module.parameters(), parsed.optimizer.as_dict())
            # Where this is None, LightningCLI gives the optimizer alone.
            schedule: object = lr_scheduler
            if lr_scheduler:
                schedule = cli.instantiate_class(built, parsed.lr_scheduler.as_dict())
            return cli.LightningCLI.configure_optimizers(module, built, schedule)

        module.configure_optimizers = MethodType(configured, module)  # type: ignore[method-assign]
    return module


def build_data(data: Node) -> LightningDataModule:
    """Build the LightningDataModule of a file's section ``data``."""
    parser = _parser(_package(data))
    built: LightningDataModule = parser.instantiate(_parsed(parser, {"data": data})).data
    return built


def workload_of(file: CliFile) -> tuple[dict[str, Any], list[str]]:
    """Make a workload of a LightningCLI file.

    The data are loaded once, to learn how many examples there are, and the batch size that the
    file's learning rate goes with.

    Returns:
        The workload's config, to be written as YAML, and lines for the user about what was taken
        from the file and what was assumed.

    Raises:
        ConfigError: says what the file or the command line lacks.
    """
    chosen = file.chosen
    sections = file.sections
    parser = _parser(_package(sections["model"]))
    # The same sections as plain data, with the default of each value that the file leaves out.
    parsed = yaml.safe_load(parser.dump(_parsed(parser, sections), skip_unset=False))
    defaults = yaml.safe_load(parser.dump(parser.get_defaults(), skip_unset=False))["trainer"]
    trainer, left_out = _split_arguments(parsed["trainer"], defaults)
    # The arguments of build_module.
    built = {name: parsed[name] for name in ("model", "optimizer", "lr_scheduler") if parsed[name]}
    rate_key, lr = _learning_rate(parsed, file)
    # A trial's rate takes the place of the file's. Without a key there is no such place: bstune
    # sets the rate in the optimizers.
    if rate_key is not None:
        built = dict(with_value(built, rate_key, "${trial.lr}"))
    data = build_data(parsed["data"])
    data_name = parsed["data"]["class_path"]
    own = own_batches(data, data_name)
    data_node = parsed["data"]
    size_key: str | None = None
    # Data that make their batches themselves are built for each batch size.
    if own.problem is not None:
        size_key = _batch_size_key(parsed, data_name, own.batch_size)
    if size_key is not None:
        data_node = with_value(parsed, size_key, "${trial.batch_size}")["data"]
        own = replace(own, problem=None)
    own_batch_size = _checked_batch_size(own, data_name, parsed["trainer"])
    examples = own.examples
    accumulated = parsed["trainer"].get("accumulate_grad_batches") or 1
    batch_size = own_batch_size * accumulated
    if examples is not None:
        check_trained_size(batch_size, examples)
    assumed = list[str]()
    trial_budget = _budget_of_trial(parsed["trainer"], batch_size, examples, assumed)
    if chosen.target is None:
        target = _assumed_target(_own_metric(sections, parsed, data), assumed)
    else:
        target = _given_target(chosen.target)
    precision = str(parsed["trainer"].get("precision") or 32)
    this_module = build_module.__module__
    # The range of batch sizes lies around the file's own.
    smallest = max(1, batch_size // FACTOR_BELOW)
    largest = batch_size * FACTOR_ABOVE
    if examples is not None:
        largest = min(examples, largest)
    # LightningCLI's parser builds the classes that are named below these nodes; Hydra must not.
    as_it_is = {"_recursive_": False}
    workload = {
        "name": chosen.name or parsed["model"]["class_path"].rpartition(".")[2],
        "precision": SHORT_PRECISIONS.get(precision, precision),
        "trials": CLI_TRIALS,
        "reference": {"batch_size": batch_size, "lr": lr},
        "batch_size": {"low": smallest, "high": largest},
        "budget": trial_budget,
        "target": target,
        "data": {"_target_": f"{this_module}.build_data", **as_it_is, "data": data_node},
        "module": {"_target_": f"{this_module}.build_module", **as_it_is, **built},
        "trainer": trainer,
    }
    lines = [
        _line_on_rate(rate_key, lr, own_batch_size, accumulated),
        "training data without a length" if examples is None else f"{examples} training examples",
        *_size_key_lines(size_key),
        *_sizes_lines(chosen, smallest, largest),
        *assumed,
    ]
    lengths = _own_lengths(parsed["trainer"])
    if lengths:
        became = f"budget.examples={trial_budget['examples']}"
        lines.append(f"trainer.{' and '.join(lengths)} became {became}")
    left_out += file.ignored
    if left_out:
        lines.append(left_to_bstune(left_out))
    return workload, lines


def _checked_batch_size(own: OwnBatches, data_name: str, trainer: Node) -> int:
    """Give the batch size of a file's own batches.

    Args:
        own: without a problem where a number of the file sets their size.
        data_name: the name of the data, for messages.
        trainer: the Trainer's arguments, by name.

    Raises:
        ConfigError: for batches of which no study can be made; it names all that the file lacks.
    """
    lacks = list[str]()
    if own.problem is not None or own.batch_size is None:
        lacks.append(
            f"{data_name}.train_dataloader() cannot be read in batches of another size: "
            f"{own.problem}; let a number of the section data be its batch size, for each of which "
            "the data are then built"
        )
    # Only the steps of a Trainer tell the length of a run whose data have none.
    if own.examples is None and "max_steps" not in _own_lengths(trainer):
        lacks.append("give trainer.max_steps, as no loader tells how long an epoch is")
    if lacks:
        raise ConfigError("; ".join(lacks))
    assert own.batch_size is not None  # noqa: S101 (it was refused above)
    return own.batch_size


def _batch_size_key(parsed: Node, data_name: str, batch_size: int | None) -> str | None:
    """Find the number of a file's section ``data`` that sets the batch size.

    Args:
        parsed: the file's sections with all values.
        data_name: the name of the data, for messages.
        batch_size: of the data's own batches; None: it is not known.

    Returns:
        Its dotted key: twice the number gives batches of twice the size. None where no number
        does, or the batch size is not known.
    """
    if batch_size is None:
        return None
    numbers = numbers_of(parsed, ["data"])
    equal = [key for key, number in numbers.items() if number == batch_size]
    # One that is named for it is tried before others, as each try sets the data up.
    equal.sort(key=lambda key: "batch" not in key.rpartition(".")[2])
    for key in equal:
        # Data may fail with twice a number that is no batch size, such as one of their classes.
        with suppress(Exception):
            twice = build_data(with_value(parsed, key, 2 * batch_size)["data"])
            if own_batches(twice, data_name).batch_size == 2 * batch_size:
                return key
    return None


def _size_key_lines(key: str | None) -> list[str]:
    """Say which number of the file is the batch size, where the data are built for each one."""
    return [] if key is None else [f"{key} is the batch size, for each of which data are built"]


def _sizes_lines(chosen: Chosen, smallest: int, largest: int) -> list[str]:
    """Say that the range of batch sizes was assumed; no line where the command line gives one."""
    if any(option.startswith("search.batch_size.") for option in chosen.options):
        return []
    return [
        f"batch sizes {smallest} to {largest}: 1/{FACTOR_BELOW} to {FACTOR_ABOVE} times yours, as "
        "far as the data go (search.batch_size.low and search.batch_size.high set others)"
    ]


def _budget_of_trial(
    trainer: Node, batch_size: int, examples: int | None, assumed: list[str]
) -> dict[str, int]:
    """Give the config of a trial's budget, which the length of the file's own run sets.

    Args:
        trainer: the Trainer's arguments, by name.
        batch_size: with which the file trains.
        examples: of an epoch; None: it has no length, and the Trainer's steps limit the run.
        assumed: gets a line on the budget where the file's own run has no length.
    """
    budget = own_examples(trainer, batch_size, examples or 0)
    is_assumed = budget is None
    if budget is None:
        assert examples is not None  # noqa: S101 (_checked_batch_size has refused it)
        budget = _assumed_budget(examples, assumed)
    # A trial ends once both its steps and its examples are spent. These are the steps that the
    # budget's examples come to at ``FACTOR_BELOW`` times the file's batch size: at larger sizes a
    # trial takes as many steps, and so more examples.
    fewest_steps = max(1, budget // (FACTOR_BELOW * batch_size))
    trial_budget = {"steps": fewest_steps, "examples": budget}
    # A study with little time may shorten a budget that was assumed, and tells so in epochs.
    if is_assumed and examples is not None:
        trial_budget["assumed_epoch"] = examples
    return trial_budget


def _own_lengths(trainer: Node) -> list[str]:
    """List the arguments of a file's Trainer that limit the length of its run."""
    # -1 and null set no limit.
    return [name for name in LENGTHS if (trainer.get(name) or -1) > 0]


def _assumed_budget(examples: int, assumed: list[str]) -> int:
    """Give a trial's budget in examples where the study's time alone is limited.

    Args:
        examples: of an epoch.
        assumed: gets a line on the budget.
    """
    budget = MOST_EPOCHS * examples
    assumed.append(
        f"budget: a trial gives up after {MOST_EPOCHS} epochs (budget.examples={budget})"
    )
    return budget


def _given_target(text: str) -> dict[str, float | str]:
    """Give the config of the target that the command line states, such as ``val_loss<=0.1``."""
    metric, value, mode = parse_target(text)
    return {"metric": metric, "value": value, "mode": mode}


def _assumed_target(judged_by: OwnMetric, assumed: list[str]) -> dict[str, float | str]:
    """Give the config of the target that the first trial will set, and add a line on it.

    Args:
        judged_by: the metric by which the file's own configuration is judged.
        assumed: gets the line.
    """
    sign = "<=" if judged_by.mode == "min" else ">="
    assumed.append(
        f"target: what this configuration itself comes to by {judged_by.name}, as {judged_by.why} "
        f"(--target '{judged_by.name}{sign}VALUE' sets another)"
    )
    return {"metric": judged_by.name, "value": "auto", "mode": judged_by.mode}


def _line_on_rate(key: str | None, lr: float, own_batch_size: int, accumulated: int) -> str:
    """Say which number of a file is the learning rate, and the batch size that it goes with.

    Args:
        key: the rate's dotted key; None: it is the optimizers' own.
        lr: the rate.
        own_batch_size: the batch size of the file's data.
        accumulated: how many batches the file's Trainer accumulates for a step.
    """
    rate = key or "the rate in configure_optimizers"
    batch_size = own_batch_size * accumulated
    product = ""
    if accumulated > 1:
        product = f" ({own_batch_size} x {accumulated} accumulated)"
    return f"{rate} is the learning rate: {lr:g} at batch size {batch_size}{product}"


def _split_arguments(arguments: Node, defaults: Node) -> tuple[Node, list[str]]:
    """Split the arguments of a file's Trainer that are not Lightning's defaults in two.

    Returns:
        Those that trials take over, and the names of those that bstune sets itself (``OWNED``), but
        for ``LENGTHS``, which become a trial's budget.
    """
    kept = Node()
    left_out = list[str]()
    for name, value in arguments.items():
        if value == defaults[name]:
            continue
        if name not in OWNED:
            kept[name] = value
        elif name not in LENGTHS:
            left_out.append(f"trainer.{name}")
    return kept, left_out


def _own_metric(sections: Node, parsed: Node, data: LightningDataModule) -> OwnMetric:
    """Choose the metric by which the file's own configuration is judged."""
    model = _model_of(sections)
    cli = import_module(f"{_package(sections['model'])}.cli")
    callbacks = list[Any]()
    for named in parsed["trainer"].get("callbacks") or ():
        # It makes the object of a class_path and its init_args, as the file's own run does.
        callbacks.append(cli.instantiate_class((), named))
    refuse_rate_and_batch_size_finders(callbacks)
    # A CPU is enough for a few batches, and there is one on every machine.
    return own_metric(model, data, {"callbacks": callbacks}, accelerator="cpu")


def _model_of(sections: Node) -> LightningModule:
    """Build the model of a file with the file's own values."""
    return build_module(sections["model"], sections.get("optimizer"), sections.get("lr_scheduler"))


def with_value(node: Node, key: str, value: object) -> Node:
    """Copy nested mappings with ``value`` at a dotted key."""
    name, _, rest = key.partition(".")
    if rest:
        value = with_value(node[name], rest, value)
    return {**node, name: value}


def _package(section: Node) -> str:
    """Name the package of Lightning whose class a section's class extends.

    The section may name a function instead. The class that it builds is not known here, so the
    package is the installed one.
    """
    # Hydra imports the class, without building anything of it.
    build = instantiate_partial({"_target_": section["class_path"]}, section["class_path"])
    names = [base.__module__ for base in getattr(build.func, "__mro__", ())]
    if any(name.startswith(f"{OTHER}.") for name in names):
        return OTHER
    return installed_lightning()


@cache
def _parser(package: str) -> Any:
    """Make LightningCLI's parser for any model and data, of a package of Lightning."""
    lightning = import_module(package)
    make_parser = import_module(f"{package}.cli").LightningArgumentParser
    try:
        parser = make_parser(exit_on_error=False)
    # An installed jsonargparse may be too old, or lack what reads signatures.
    except ModuleNotFoundError as error:
        raise ConfigError(f"{NEEDS_JSONARGPARSE} ({one_line(str(error))})") from error
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


def _parsed(parser: Any, sections: Node) -> Any:
    """Parse a file's sections; a ConfigError says what the parser does not take."""
    try:
        return parser.parse_object(sections)
    except (ArgumentError, TypeError, ValueError) as error:
        # The message is cut, as it may list for pages what a value could have been.
        raise ConfigError(
            f"LightningCLI does not take this config: {' '.join(str(error).split())[:600]}"
        ) from error


def _learning_rate(parsed: Node, file: CliFile) -> tuple[str | None, float]:
    """Find the learning rate in a file.

    Args:
        parsed: the file's sections with all values.
        file: as it is written. The command line may give the rate's key; else it is found by its
            name.

    Returns:
        Its dotted key and its value. The key is None where bstune sets the rate in the optimizers
        and no key was given; the value is then the optimizers' own.

    Raises:
        ConfigError: where there is no such number, or several.
    """
    given_key = file.chosen.lr
    if file.chosen.overrides_lr and given_key is None:
        return None, rate_of_optimizers(_model_of(file.sections))
    numbers = numbers_of(parsed)
    keys = [given_key] if given_key else named_rates(numbers)
    if len(keys) == 1 and keys[0] in numbers:
        return keys[0], float(numbers[keys[0]])
    raise ConfigError(which_rate(file, numbers))
