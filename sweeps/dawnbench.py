"""The DAWNBench ladder: tricks of training turned on one by one, and the gain of each.

Page 2018-2019, How to Train Your ResNet, part 8, and Jordan 2024, 94% on CIFAR-10 in 3.29 Seconds
on a Single GPU (arXiv 2404.00498), each went from one trick to the next: a little more accuracy,
then fewer epochs. A rung here is what its source trained: settings on top of those of all rungs
before it, with its own epochs, batch size and peak learning rate. Each is trained once per seed,
with a target that is never met, and evaluated at its end.

A rung is compared with the one before it on the same seeds: the mean difference in accuracy with an
interval by Student's t over the pairs. The p-values are corrected for the number of rungs (Holm's),
since one of twenty rungs without any effect would stand out by chance.

Without a GPU the whole ladder takes too long, so there is a reduced setting: one number of steps
and one batch size for all rungs, and narrower networks. Then the rungs differ only in their tricks,
not in epochs.

A trial, and the seconds of the first rung's batches, are kept as they end, so that the same command
goes on (:mod:`bstune.sweeps.unit_log`).
"""

import functools
import json
import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from pydantic import TypeAdapter

from bstune.config import Composed, with_settings
from bstune.core.errors import ConfigError
from bstune.core.records import Budget, Target, TrialProtocol, TrialResult, TrialSpec
from bstune.options import StudyOptions, option_at
from bstune.sweeps.dawnbench_report import (
    CONFIDENCE,
    RungRow,
    RungTrial,
    paint,
    printed_row,
    sentence,
)
from bstune.sweeps.harness import Finding
from bstune.sweeps.statistics import NO_PAIRS, compare_pairs, holm_corrected
from bstune.sweeps.unit_log import UnitLog, UnitPlan, check_only, read_trial
from bstune.system.console import format_seconds
from bstune.trial.devices.device import device_name, device_of, synchronize
from bstune.trial.loop import Workload, run_trial
from bstune.trial.workload import (
    build_workload,
    checked_protocol,
    load_data,
    resolve,
    train_examples,
)

if TYPE_CHECKING:
    from lightning.pytorch import LightningDataModule
    from rich.console import Console

# In a rung's settings it stands for the ${ of the rung's own config; ${ itself is resolved before.
LATER = "%{"
# So many batches are timed for what preparing and moving them takes.
TIMED_BATCHES = 20
# The name of the unit that is no trial: the seconds of these batches.
BATCHES_UNIT = "batches"
# The share of evaluation with which no trial is evaluated before its end.
NO_EVALUATION = 1e-9
# Parameters that no trial depends on: they choose trials, order them, or judge them.
NOT_OF_A_TRIAL = ("seeds", "order_seed", "level")
LADDER_PANEL_INCHES = 4.2
LADDER_ROW_INCHES = 0.34


@dataclass(frozen=True)
class Rung:
    """One rung of the ladder."""

    name: str
    # The source's training time and accuracy; None where it gives none.
    seconds: float | None
    accuracy: float | None
    # Examples that a trial trains on, over those of the training data.
    epochs: float
    batch_size: int
    # The peak of the schedule.
    lr: float
    # Values and nodes by the dotted key of the config whose place they take, on top of those of all
    # rungs before. A leading + adds a key that is not there; %{trial.lr} refers to the rung's own
    # config.
    set: dict[str, Any]


@dataclass  # not frozen: OmegaConf could not fill it in
class Reduced:
    """A smaller setting of all rungs, for a machine without a GPU."""

    enabled: bool
    # The steps and the batch size of every trial.
    steps: int
    batch_size: int
    # Learning rates by rung. The other rungs follow the linear rule, lr x batch_size / their own.
    lr: dict[str, float]
    # Settings by rung, on top of the rung's own; they stay for the rungs after it.
    set: dict[str, dict[str, Any]]
    # Rungs that differ from the one before only in their epochs, which are the same here.
    left_out: list[str]


@dataclass(frozen=True)
class BuiltRung:
    """A rung that can be trained here, with its workload and its protocol."""

    rung: Rung
    workload: Workload
    protocol: TrialProtocol
    steps: int
    batch_size: int
    lr: float


@dataclass(frozen=True)
class BatchSeconds:
    """Seconds of one of a rung's batches: means of TIMED_BATCHES."""

    # In which it is drawn, augmented and normalised on the device: all that it needs before its
    # step.
    made: float
    # In which it is moved to the device as bytes, and as fp32; None on a CPU.
    moved_as_bytes: float | None
    moved_as_fp32: float | None


READ_BATCHES = TypeAdapter(BatchSeconds)


def run(
    composed: Composed,
    console: "Console",
    log: UnitLog,
    *,
    rungs: list[Rung],
    seeds: list[int],
    order_seed: int,
    metric: str,
    level: float,
    reduced: Reduced,
    only: list[str],
    trainer: Callable[[Workload, TrialSpec, TrialProtocol], TrialResult] = run_trial,
) -> Finding:
    """Train each rung on each seed, in shuffled order, and compare it with the rung before.

    A rung has settings on top of those of all rungs before it. One in a precision that the device
    lacks is left out, and the rungs after it go on without its settings.

    Args:
        composed: the workload.
        console: for lines.
        log: keeps the trials, and the seconds of the first rung's batches.
        rungs: from the first to the last.
        seeds: of the trials.
        order_seed: of the order.
        metric: the error whose value at the end counts.
        level: an accuracy; a rung's row has the share of seeds that reach it.
        reduced: the smaller setting.
        only: the units to run now; empty: all.
        trainer: trains a trial; tests replace it.
    """
    _check_ladder(rungs, seeds, level, reduced)
    # Every trial trains to its end, where its error counts: it has a target that is never met,
    # whatever its value.
    target = Target(metric, value=0.0, mode="min").never_met
    # Every rung is built before the first is trained, so that mistakes in the last are found now.
    built_rungs, left_out = build_rungs(composed, rungs, reduced, target)
    for reason in left_out.values():
        console.print(reason, soft_wrap=True, markup=False)
    if not built_rungs:
        raise ConfigError(f"no rung is left: {'; '.join(left_out.values())}")
    planned = _shuffled_trials(built_rungs, seeds, order_seed)
    unit_names = [*planned, BATCHES_UNIT]
    check_only(only, unit_names)
    device = device_name(built_rungs[0].protocol.trainer)
    log.begin(device, NOT_OF_A_TRIAL)
    results = _train(built_rungs, planned, only, log, trainer)
    batches = _measure_batches(built_rungs[0], only, unit_names, log)
    log.check_finished(unit_names, {*results, *batches})
    trials: list[dict[int, TrialResult]] = [{} for _ in built_rungs]
    for name, result in results.items():
        trial = planned[name]
        trials[trial.rung_index][trial.seed] = result
    rows = make_rows(built_rungs, trials, level)
    title = f"{composed.options.workload.name} on {device}, {len(seeds)} seeds"
    panels = 3
    if reduced.enabled:
        title += f"; reduced: {reduced.steps} steps of {reduced.batch_size} at every rung"
        panels = 2
    # The time of a batch is compared with that of a step, if a step was timed.
    taus = _known(trial.seconds_per_step for trial in trials[0].values())
    notes = list[str]()
    if taus:
        tau = statistics.median(taus)
        notes.append(data_note(built_rungs[0], batches[BATCHES_UNIT], tau))
    return Finding(
        sentence=sentence(rows, level, len(seeds), list(left_out)),
        rows=list(map(printed_row, rows)),
        n=len(seeds),
        device=device,
        paint=functools.partial(paint, rows, level, title, reduced.enabled),
        inches=(1.8 + LADDER_PANEL_INCHES * panels, 1.6 + LADDER_ROW_INCHES * len(rows)),
        notes=notes,
    )


@dataclass(frozen=True)
class PlannedTrial:
    """A trial of a rung, by the rung's place among those that were built."""

    rung_index: int
    seed: int


def _shuffled_trials(
    built_rungs: Sequence[BuiltRung], seeds: Sequence[int], order_seed: int
) -> dict[str, PlannedTrial]:
    """Plan a trial for each rung and each seed, by the trial's name, in the order to run."""
    rng = np.random.default_rng(order_seed)
    planned = dict[str, PlannedTrial]()
    for seed in seeds:
        # Each seed has a new order, so that a disturbance of the machine hits every rung alike.
        for rung_index in rng.permutation(len(built_rungs)).tolist():
            name = f"{built_rungs[rung_index].rung.name}/{seed}"
            planned[name] = PlannedTrial(rung_index, seed)
    return planned


def _train(
    built_rungs: Sequence[BuiltRung],
    planned: Mapping[str, PlannedTrial],
    only: Sequence[str],
    log: UnitLog,
    trainer: Callable[[Workload, TrialSpec, TrialProtocol], TrialResult],
) -> dict[str, TrialResult]:
    """Train the planned trials that are not kept yet, and give the results by name.

    Args:
        built_rungs: from the first to the last.
        planned: the trials, by name.
        only: the names of the units, or of the rungs, to run now; empty: all.
        log: keeps the trials.
        trainer: trains a trial.
    """
    names = list(planned)
    # A trial's examples, to which its time is in proportion, by its name.
    work = dict[str, float]()
    for name, trial in planned.items():
        built = built_rungs[trial.rung_index]
        work[name] = float(built.steps * built.batch_size)

    def train(name: str) -> dict[str, object]:
        trial = planned[name]
        built = built_rungs[trial.rung_index]
        number = names.index(name)
        spec = TrialSpec(
            number=number,
            trial_index=number,
            batch_size=built.batch_size,
            lr=built.lr,
            delta=None,
            seed=trial.seed,
        )
        return asdict(trainer(built.workload, spec, built.protocol))

    plan = UnitPlan(
        names=names,
        only=only,
        noun="trial",
        read=read_trial,
        # ``only`` may also name the unit that times the batches, which is no trial.
        choices=[*names, BATCHES_UNIT],
        work=work,
        shown=_trial_text,
    )
    return log.measure(plan, train)


def _trial_text(result: TrialResult) -> str:
    """Write a trial's accuracy, its status and its seconds."""
    accuracy_at_end = accuracy(result)
    accuracy_text = "no accuracy"
    if accuracy_at_end is not None:
        accuracy_text = f"accuracy {accuracy_at_end:.4f}"
    text = f"{accuracy_text}, {result.status}"
    training_seconds = seconds(result)
    if training_seconds is not None:
        text += f", {training_seconds:.2f} s of training"
    return text


def _measure_batches(
    built: BuiltRung, only: Sequence[str], unit_names: Sequence[str], log: UnitLog
) -> dict[str, BatchSeconds]:
    """Time a rung's batches, unless the log has their seconds; give these by the unit's name.

    ``only``: the units to run now, of those of ``unit_names``; empty: all. It is an empty mapping
    where the batches are not among them, and were not timed before.
    """
    plan = UnitPlan(
        names=[BATCHES_UNIT],
        only=only,
        noun="measurement",
        read=READ_BATCHES.validate_python,
        choices=unit_names,
    )
    return log.measure(plan, lambda name: asdict(time_batches(built)))


def time_batches(built: BuiltRung, now: Callable[[], float] = time.perf_counter) -> BatchSeconds:
    """Time how long a rung's batches take to prepare, and how long moving them to a GPU takes.

    Images are moved as bytes, and once more in fp32. On a CPU both of these times are None.

    Args:
        built: the rung.
        now: the clock; tests replace it.
    """
    device = device_of(built.protocol.trainer)
    spec = TrialSpec(
        number=0, trial_index=0, batch_size=built.batch_size, lr=built.lr, delta=None, seed=0
    )
    batches = iter(built.workload.train_batches(spec))

    def timed(call: Callable[[], object]) -> float:
        """Give the mean seconds of a call."""
        # Libraries load in the first call.
        call()
        synchronize(device)
        began = now()
        for _labels in range(TIMED_BATCHES):
            call()
        synchronize(device)
        return (now() - began) / TIMED_BATCHES

    made = timed(lambda: next(batches))
    if device.type == "cpu":
        return BatchSeconds(made, moved_as_bytes=None, moved_as_fp32=None)
    (images, *_labels) = next(batches)

    def time_to_move(dtype: torch.dtype) -> float:
        on_host = torch.ones(images.shape, dtype=dtype)
        return timed(functools.partial(on_host.to, device))

    as_bytes = time_to_move(torch.uint8)
    as_fp32 = time_to_move(torch.float32)
    return BatchSeconds(made, moved_as_bytes=as_bytes, moved_as_fp32=as_fp32)


def data_note(built: BuiltRung, batches: BatchSeconds, seconds_per_step: float) -> str:
    """Say what an epoch's batches take, from the seconds of one.

    The first two gains of Page's ladder were to move all images to the device at once, as bytes,
    and to prepare batches there. Every rung here does both: the line says what that saves.

    Args:
        built: the rung.
        batches: the seconds of one of its batches.
        seconds_per_step: of its trials.
    """
    batches_of_epoch = math.ceil(built.workload.train_examples / built.batch_size)
    seconds_of_epoch = format_seconds(batches_of_epoch * batches.made)
    share = batches.made / seconds_per_step
    text = (
        f"{built.rung.name}: an epoch's {batches_of_epoch} batches are drawn, augmented and "
        f"normalised on the device in {seconds_of_epoch}, {share:.0%} of its steps' time"
    )
    if batches.moved_as_bytes is not None and batches.moved_as_fp32 is not None:
        as_bytes = format_seconds(batches_of_epoch * batches.moved_as_bytes)
        as_fp32 = format_seconds(batches_of_epoch * batches.moved_as_fp32)
        text += (
            f"; to move them there batch by batch would take {as_bytes} as bytes, {as_fp32} as fp32"
        )
    return f"{text} (means of {TIMED_BATCHES} batches)"


def _check_ladder(
    rungs: Sequence[Rung], seeds: Sequence[int], level: float, reduced: Reduced
) -> None:
    """Refuse a ladder's settings that are out of their range, and names that no rung has.

    A rung has settings on top of those of all rungs before it. ``level``: an accuracy, for which
    seeds are counted. ``reduced``: a smaller setting of all rungs, for a machine without a GPU.
    """
    if not rungs or not seeds or min(seeds) < 0 or len(set(seeds)) < len(seeds):
        raise ConfigError(
            f"this sweep needs rungs, and seeds from 0, each once, but got {len(rungs)} rungs and "
            f"seeds {list(seeds)}"
        )
    if not 0.0 < level < 1.0:
        raise ConfigError(f"sweep.experiment.level must lie between 0 and 1, but got {level}")
    names = [rung.name for rung in rungs]
    twice = sorted(name for name, count in Counter(names).items() if count > 1)
    if twice:
        raise ConfigError(
            f"every rung needs a name of its own, but {', '.join(map(repr, twice))} stands twice"
        )
    for rung in rungs:
        if rung.batch_size < 1 or not _is_positive(rung.lr) or not _is_positive(rung.epochs):
            raise ConfigError(
                f"a rung needs a batch size from 1, and a positive lr and epochs, but got {rung}"
            )
    if reduced.steps < 1 or reduced.batch_size < 1:
        raise ConfigError(
            "sweep.experiment.reduced needs steps and a batch size from 1, but got "
            f"steps={reduced.steps} and batch_size={reduced.batch_size}"
        )
    for name, lr in reduced.lr.items():
        if not _is_positive(lr):
            raise ConfigError(
                f"sweep.experiment.reduced.lr must be positive, but got {lr} for {name!r}"
            )
    unknown = sorted({*reduced.lr, *reduced.set, *reduced.left_out} - set(names))
    if reduced.enabled and unknown:
        raise ConfigError(
            f"sweep.experiment.reduced names {', '.join(map(repr, unknown))}, which is no rung; "
            f"rungs: {', '.join(map(repr, names))}"
        )


def _is_positive(number: float) -> bool:
    """Tell whether a number is over 0 and finite."""
    return 0.0 < number < math.inf


def build_rungs(
    composed: Composed, rungs: Sequence[Rung], reduced: Reduced, target: Target
) -> tuple[list[BuiltRung], dict[str, str]]:
    """Build the rungs that can be trained on this device.

    A rung has settings on top of those of all rungs before it. Rungs with the same data share them.

    Returns:
        The built rungs, and by name the reasons why others are left out. Rungs that the reduced
        setting leaves out are in neither.
    """
    # A missing device is reported before any rung, as it is the mistake of none.
    resolve(composed.options, composed.trained_recipe)
    built_rungs = list[BuiltRung]()
    left_out = dict[str, str]()
    data: dict[str, LightningDataModule] = {}
    # The study with the settings of all rungs so far that are not left out.
    rung_below = composed
    for rung in rungs:
        try:
            composed_rung = with_rung_settings(rung_below, rung.set)
            if reduced.enabled:
                composed_rung = with_rung_settings(composed_rung, reduced.set.get(rung.name, {}))
            # Rungs after one that is left out go on from the one before it.
            why = _lacks_precision(composed_rung, rung_below)
            if why is not None:
                left_out[rung.name] = (
                    f"{rung.name} is left out, and the rungs after it go on without it: {why}"
                )
                continue
            rung_below = composed_rung
            if not (reduced.enabled and rung.name in reduced.left_out):
                built_rungs.append(_build(rung, composed_rung, reduced, target, data))
        except ConfigError as error:
            raise ConfigError(f"the rung {rung.name!r}: {error}") from error
    return built_rungs, left_out


def _lacks_precision(composed: Composed, rung_below: Composed) -> str | None:
    """Say why the device cannot train in a rung's own precision; None if it can.

    ``rung_below`` is the rung before, in whose precision the device can train. If both have the
    same precision, a mistake in the rung is another one, and its ConfigError is raised.
    """
    try:
        resolve(composed.options, composed.trained_recipe)
    except ConfigError as error:
        if composed.options.precision == rung_below.options.precision:
            raise
        return str(error)
    return None


def _build(
    rung: Rung,
    composed: Composed,
    reduced: Reduced,
    target: Target,
    data: "dict[str, LightningDataModule]",
) -> BuiltRung:
    """Build a rung's workload and protocol, with the data of an earlier rung if they are the same.

    A rung has settings on top of those of all rungs before it, which ``composed`` has already.
    ``data`` has the data modules of earlier rungs, and the rung's own is added. ``reduced``: a
    smaller setting of all rungs, if it is enabled.
    """
    options, recipe = resolve(composed.options, composed.trained_recipe)
    key = _data_key(options)
    if key not in data:
        data[key] = load_data(options, recipe)
    batch_size, lr = _size_and_rate(rung, reduced)
    examples = train_examples(data[key])
    if batch_size > examples:
        raise ConfigError(
            f"its batch size {batch_size} is larger than the training data ({examples} examples)"
        )
    steps = reduced.steps
    if not reduced.enabled:
        # A rung's epochs may come to a whole number of steps and a little more, by rounding alone:
        # 9.74848 of 50,000 images are 476 steps of 1024. That little is no further step.
        steps = math.ceil(round(rung.epochs * examples / batch_size, 6))
    # A trial's learning-rate schedule ends with its budget. A budget lasts until both of its limits
    # are spent; the first step spends one example, so that the steps decide.
    composed = with_settings(composed, {"budget.steps": steps, "budget.examples": 1})
    options, recipe = resolve(composed.options, composed.trained_recipe)
    protocol = checked_protocol(options, recipe)
    protocol = replace(
        protocol,
        target=target,
        budget=Budget(steps=steps, examples=1),
        # Only the error at the end counts.
        evaluation_schedule=replace(protocol.evaluation_schedule, share=NO_EVALUATION),
        # The value before training would only be compared with a target that is never met.
        trainer={**protocol.trainer, "num_sanity_val_steps": 0},
    )
    workload = build_workload(options, recipe, data[key])
    # Building a module shows its mistakes before anything is trained.
    spec = TrialSpec(number=0, trial_index=0, batch_size=batch_size, lr=lr, delta=None, seed=0)
    workload.build_module(spec)
    return BuiltRung(
        rung=rung, workload=workload, protocol=protocol, steps=steps, batch_size=batch_size, lr=lr
    )


def _size_and_rate(rung: Rung, reduced: Reduced) -> tuple[int, float]:
    """Give a rung's batch size and learning rate, in the reduced setting if it is enabled."""
    if not reduced.enabled:
        return rung.batch_size, rung.lr
    # The rung's rate was tuned for another batch size.
    by_linear_rule = rung.lr * reduced.batch_size / rung.batch_size
    return reduced.batch_size, reduced.lr.get(rung.name, by_linear_rule)


def _data_key(options: StudyOptions) -> str:
    """Give a text that is the same for rungs with the same data.

    It is the data's part of the config, with its references to device, precision and folder filled
    in.
    """
    text = json.dumps(option_at(options, "workload.data"), sort_keys=True, default=str)
    for name in ("device", "precision", "data.root"):
        text = text.replace(f"${{{name}}}", str(option_at(options, name)))
    return text


def with_rung_settings(composed: Composed, settings: Mapping[str, Any]) -> Composed:
    """Give the study with a rung's settings in place of its own, by dotted key.

    A %{...} in a setting becomes a reference to the study's config. ConfigError for a key that is
    not there and has no leading +.
    """
    referring = dict[str, object]()
    for key, value in settings.items():
        referring[key] = _referring(value)
    return with_settings(composed, referring)


def _referring(value: object) -> object:
    """Replace %{ by ${ at each depth of a rung's value.

    A rung refers to its own config by %{...}. A ${...} would refer to the sweep's, and be resolved
    before.
    """
    if isinstance(value, Mapping):
        return dict(zip(value, map(_referring, value.values()), strict=True))
    if isinstance(value, list | tuple):
        return list(map(_referring, value))
    if isinstance(value, str):
        return value.replace(LATER, "${")
    return value


def accuracy(trial: TrialResult) -> float | None:
    """Give the accuracy at a trial's end; None for a trial that did not get there."""
    # As its target is never met, a trial that has trained all of its steps is a stopped one.
    if trial.status != "stopped" or not trial.history or trial.history[-1][1] is None:
        return None
    # It is rounded, so that it is 0.94 at an error of 0.06.
    return round(1.0 - trial.history[-1][1], 12)


def seconds(trial: TrialResult) -> float | None:
    """Give the seconds of training, steps x tau(B), of a trial that got to its end; else None.

    tau(B) is that of steps after the warm-up. The clock's seconds would have the first steps, too,
    which take longer.
    """
    if accuracy(trial) is None or trial.seconds_per_step is None:
        return None
    return trial.steps * trial.seconds_per_step


def make_rows(
    built_rungs: Sequence[BuiltRung], trials: Sequence[Mapping[int, TrialResult]], level: float
) -> list[RungRow]:
    """Make a row for each rung; means and deviations are over the ``n`` trials that got to the end.

    A rung has settings on top of those of all rungs before it. ``at_level`` is the fraction of all
    seeds whose accuracy is at least ``level``. ``difference`` is the gain over the rung before,
    paired by seed, with its interval and a ``p`` that is corrected for the number of rungs. These
    are None where there are too few trials.
    """
    by_seed = list[dict[int, float | None]]()
    for rung_trials in trials:
        by_seed.append(dict(zip(rung_trials, map(accuracy, rung_trials.values()), strict=True)))
    # Nothing comes before the first rung.
    differences = [NO_PAIRS]
    for before, after in pairwise(by_seed):
        differences.append(compare_pairs(before, after, CONFIDENCE))
    # By the rung's place; a rung without enough pairs has no p.
    p_values = dict[int, float]()
    for place, difference in enumerate(differences):
        if difference.p is not None:
            p_values[place] = difference.p
    corrected = dict(zip(p_values, holm_corrected(list(p_values.values())), strict=True))
    rows = list[RungRow]()
    measured = zip(built_rungs, trials, differences, strict=True)
    for place, (built, rung_trials, difference) in enumerate(measured):
        accuracies = _known(map(accuracy, rung_trials.values()))
        times = _known(map(seconds, rung_trials.values()))
        # The share is of all seeds: a trial that did not get to its end is not at the level.
        at_level = sum(value >= level for value in accuracies) / len(rung_trials)
        rows.append(
            {
                "rung": built.rung.name,
                "epochs": built.steps * built.batch_size / built.workload.train_examples,
                "batch_size": built.batch_size,
                "lr": built.lr,
                "steps": built.steps,
                "seconds": _mean(times),
                "seconds_sd": _deviation(times),
                "source_seconds": built.rung.seconds,
                "accuracy": _mean(accuracies),
                "accuracy_sd": _deviation(accuracies),
                "source_accuracy": built.rung.accuracy,
                "n": len(accuracies),
                "at_level": at_level,
                "difference": difference.mean,
                "difference_low": difference.low,
                "difference_high": difference.high,
                "p": corrected.get(place),
                "pairs": {"n": difference.pairs, "p_uncorrected": difference.p},
                "trials": [_trial_row(seed, trial) for seed, trial in sorted(rung_trials.items())],
            }
        )
    return rows


def _trial_row(seed: int, trial: TrialResult) -> RungTrial:
    """Give the values of a trial that go to result.json."""
    return {
        "seed": seed,
        "status": trial.status,
        "accuracy": accuracy(trial),
        "seconds": seconds(trial),
        "train_seconds": trial.train_seconds,
        "seconds_per_step": trial.seconds_per_step,
        "message": trial.message,
    }


def _known(values: Iterable[float | None]) -> list[float]:
    """Leave out the values that are None."""
    return [value for value in values if value is not None]


def _mean(values: Sequence[float]) -> float | None:
    """Give the mean; None for no values."""
    if not values:
        return None
    return statistics.fmean(values)


def _deviation(values: Sequence[float]) -> float | None:
    """Give the standard deviation; None for fewer than two values."""
    if len(values) < 2:
        return None
    return statistics.stdev(values)
