"""The DAWNBench ladder: tricks of training turned on one by one, and what each of them gives.

Page 2018-2019, How to Train Your ResNet, part 8, and Jordan 2024, 94% on CIFAR-10 in 3.29 Seconds on a Single GPU
(arXiv 2404.00498), each went from one trick to the next: a little more accuracy, then fewer epochs. A rung here is what
its source trained: settings on top of those of all rungs before it, with its own epochs, batch size and peak learning
rate. Each is trained once a seed, with a target that is never met, and evaluated at its end.

A rung is compared with the one before it on the same seeds: the mean difference in accuracy with an interval by
Student's t over the pairs. The p-values are corrected for the number of rungs (Holm's), since one of twenty rungs
without any effect would stand out by chance.

Where there is no GPU the whole ladder is too long, so there is a reduced setting: one number of steps and one batch
size for all rungs, and narrower networks. Then the rungs differ in what they turn on alone, not in epochs.
"""

import functools
import json
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from bstune.config import Composed, with_settings
from bstune.core.errors import ConfigError
from bstune.core.records import Budget, Target, TrialProtocol, TrialResult, TrialSpec
from bstune.options import StudyOptions, option_at
from bstune.sweeps.dawnbench_report import CONFIDENCE, paint, sentence, shown
from bstune.sweeps.harness import Finding
from bstune.sweeps.statistics import Difference, compare, holm
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

LATER = "%{"  # in a rung's settings, for ${ of the rung's own config: ${ itself is resolved before there is a rung
TIMED_BATCHES = 20  # of what preparing and moving them takes
SHARE_OF_EVALUATION = 1e-9  # no trial is evaluated before its end
PANEL_INCHES, ROW_INCHES = 4.2, 0.34


@dataclass(frozen=True)
class Rung:
    """One rung of the ladder."""

    name: str
    seconds: float | None  # the source's training time and accuracy, None where it gives none
    accuracy: float | None
    epochs: float  # training examples seen, over those that there are
    batch_size: int
    lr: float  # the peak of the schedule
    # Values and nodes by the dotted key of the config whose place they take, on top of all rungs before. A leading +
    # adds a key that is not there; %{trial.lr} refers to the rung's own config.
    set: dict[str, Any]


@dataclass  # not frozen: OmegaConf could not fill it in
class Reduced:
    """A smaller setting of all rungs, for a machine without a GPU."""

    enabled: bool
    steps: int  # of every trial
    batch_size: int
    lr: dict[
        str, float
    ]  # by rung; all others follow the linear rule, lr x batch_size / the rung's own
    set: dict[
        str, dict[str, Any]
    ]  # by rung, on top of the rung's; they stay for the rungs after it
    left_out: list[
        str
    ]  # rungs that differ from the one before in their epochs alone, which are the same here


@dataclass(frozen=True)
class BuiltRung:
    """A rung that can be trained here, with its workload and its protocol."""

    rung: Rung
    workload: Workload
    protocol: TrialProtocol
    steps: int
    batch_size: int
    lr: float


def run(
    composed: Composed,
    console: "Console",
    *,
    rungs: list[Rung],
    seeds: list[int],
    order_seed: int,
    metric: str,
    level: float,
    reduced: Reduced,
    trainer: Callable[[Workload, TrialSpec, TrialProtocol], TrialResult] = run_trial,
) -> Finding:
    """Train each rung on each seed, in shuffled order, and compare it with the rung before.

    A rung of a precision that the device lacks is left out; those after it go on without its settings. Tests replace
    ``trainer``.
    """
    _check(rungs, seeds, level, reduced)
    steps, left_out = climb(composed, rungs, reduced, Target(metric, 0.0, "min").never_met)
    for reason in left_out.values():
        console.print(reason, soft_wrap=True, markup=False)
    if not steps:
        raise ConfigError(f"no rung is left: {'; '.join(left_out.values())}")
    rng = np.random.default_rng(order_seed)
    plan = [(place, seed) for seed in seeds for place in rng.permutation(len(steps)).tolist()]
    trials: list[dict[int, TrialResult]] = [{} for _ in steps]
    for number, (place, seed) in enumerate(plan):
        step = steps[place]
        spec = TrialSpec(number, number, step.batch_size, step.lr, None, seed)
        result = trials[place][seed] = trainer(step.workload, spec, step.protocol)
        reached = "no accuracy" if (share := accuracy(result)) is None else f"accuracy {share:.4f}"
        line = f"{number + 1} of {len(plan)}, {step.rung.name}, seed {seed}: {reached}, {result.status}"
        if (took := seconds(result)) is not None:
            line += f", {took:.2f} s of training"
        console.print(line, soft_wrap=True, markup=False, highlight=False)
    rows = make_rows(steps, trials, level)
    device = device_name(steps[0].protocol.trainer)
    text = sentence(rows, level, len(seeds), list(left_out))
    size = (
        f"; reduced: {reduced.steps} steps of {reduced.batch_size} at every rung"
        if reduced.enabled
        else ""
    )
    title = f"{composed.options.workload.name} on {device}, {len(seeds)} seeds{size}"
    panels = 2 if reduced.enabled else 3
    inches = (1.8 + PANEL_INCHES * panels, 1.6 + ROW_INCHES * len(rows))
    painter = functools.partial(paint, rows, level, title, reduced.enabled)
    taus = [
        trial.seconds_per_step for trial in trials[0].values() if trial.seconds_per_step is not None
    ]
    notes = [data_note(steps[0], statistics.median(taus))] if taus else []
    return Finding(text, [shown(row) for row in rows], len(seeds), device, painter, inches, notes)


def data_note(
    step: BuiltRung, seconds_per_step: float, now: Callable[[], float] = time.perf_counter
) -> str:
    """Return what preparing a rung's batches takes of its steps, and what it would take to move them to a GPU.

    Page's first gains were these two: all images moved at once, as bytes, and prepared on the device. Tests replace the
    clock.
    """
    place = device_of(step.protocol.trainer)
    batches = iter(step.workload.train_batches(TrialSpec(0, 0, step.batch_size, step.lr, None, 0)))

    def timed(call: Callable[[], object]) -> float:
        call()  # libraries load
        synchronize(place)
        began = now()
        for _ in range(TIMED_BATCHES):
            call()
        synchronize(place)
        return (now() - began) / TIMED_BATCHES

    made = timed(lambda: next(batches))
    epoch = math.ceil(step.workload.train_examples / step.batch_size)
    text = (
        f"{step.rung.name}: an epoch's {epoch} batches are drawn, augmented and normalised on the device in "
        f"{format_seconds(epoch * made)}, {made / seconds_per_step:.0%} of its steps' time"
    )
    if place.type != "cpu":
        (images, *_) = next(batches)
        taken = [
            timed(functools.partial(torch.ones(images.shape, dtype=dtype).to, place))
            for dtype in (torch.uint8, torch.float32)
        ]
        parts = [format_seconds(epoch * seconds) for seconds in taken]
        text += f"; to move them there batch by batch would take {parts[0]} as bytes, {parts[1]} as fp32"
    return f"{text} (means of {TIMED_BATCHES} batches)"


def _check(rungs: Sequence[Rung], seeds: Sequence[int], level: float, reduced: Reduced) -> None:
    if not rungs or not seeds or min(seeds) < 0 or len(set(seeds)) < len(seeds):
        raise ConfigError(
            f"this sweep needs rungs, and seeds from 0, each once, but got {len(rungs)} rungs and seeds {list(seeds)}"
        )
    if not 0.0 < level < 1.0:
        raise ConfigError(f"sweep.experiment.level must lie between 0 and 1, but got {level}")
    names = [rung.name for rung in rungs]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(
            f"every rung needs a name of its own, but {', '.join(map(repr, twice))} stands twice"
        )
    for rung in rungs:
        if not (rung.batch_size >= 1 and _positive(rung.lr) and _positive(rung.epochs)):
            raise ConfigError(
                f"a rung needs a batch size from 1, and a positive lr and epochs, but got {rung}"
            )
    if reduced.steps < 1 or reduced.batch_size < 1:
        raise ConfigError(
            "sweep.experiment.reduced needs steps and a batch size from 1, but got "
            f"steps={reduced.steps} and batch_size={reduced.batch_size}"
        )
    for name, lr in reduced.lr.items():
        if not _positive(lr):
            raise ConfigError(
                f"sweep.experiment.reduced.lr must be positive, but got {lr} for {name!r}"
            )
    if reduced.enabled and (
        unknown := sorted({*reduced.lr, *reduced.set, *reduced.left_out} - set(names))
    ):
        raise ConfigError(
            f"sweep.experiment.reduced names {', '.join(map(repr, unknown))}, which is no rung; "
            f"rungs: {', '.join(map(repr, names))}"
        )


def _positive(number: float) -> bool:
    return 0.0 < number < math.inf


def climb(
    composed: Composed, rungs: Sequence[Rung], reduced: Reduced, target: Target
) -> tuple[list[BuiltRung], dict[str, str]]:
    """Return the rungs that can be trained here, each built once, and why others are left out, by name.

    Rungs with the same data share them. Those that the reduced setting leaves out are in neither.
    """
    # A missing device is no rung's fault.
    resolve(composed.options, composed.trained)
    steps: list[BuiltRung] = []
    left_out: dict[str, str] = {}
    data: dict[str, LightningDataModule] = {}
    reached = composed
    for rung in rungs:
        try:
            own = applied(reached, rung.set)
            if reduced.enabled:
                own = applied(own, reduced.set.get(rung.name, {}))
            try:
                resolve(own.options, own.trained)
            except ConfigError as error:
                if own.options.precision == reached.options.precision:
                    raise
                left_out[rung.name] = (
                    f"{rung.name} is left out, and the rungs after it go on without it: {error}"
                )
                continue
            reached = own
            if not (reduced.enabled and rung.name in reduced.left_out):
                steps.append(_build(rung, own, reduced, target, data))
        except ConfigError as error:
            raise ConfigError(f"the rung {rung.name!r}: {error}") from error
    return steps, left_out


def _build(
    rung: Rung,
    composed: Composed,
    reduced: Reduced,
    target: Target,
    data: "dict[str, LightningDataModule]",
) -> BuiltRung:
    options, recipe = resolve(composed.options, composed.trained)
    key = _data_key(options)
    if key not in data:
        data[key] = load_data(options, recipe)
    size, lr = rung.batch_size, rung.lr
    if reduced.enabled:
        size, lr = (
            reduced.batch_size,
            reduced.lr.get(rung.name, rung.lr * reduced.batch_size / rung.batch_size),
        )
    examples = train_examples(data[key])
    if size > examples:
        raise ConfigError(
            f"its batch size {size} is larger than the training data ({examples} examples)"
        )
    # Rounded, as 9.74848 epochs of 50,000 images are 476 steps of 1024 and a last digit.
    steps = reduced.steps if reduced.enabled else math.ceil(round(rung.epochs * examples / size, 6))
    # Its budget is a schedule's horizon too.
    own = with_settings(composed, {"budget.steps": steps, "budget.examples": 1})
    options, recipe = resolve(own.options, own.trained)
    protocol = checked_protocol(options, recipe)
    protocol = replace(
        protocol,
        target=target,
        budget=Budget(steps, 1),
        evaluation_schedule=replace(protocol.evaluation_schedule, share=SHARE_OF_EVALUATION),
        # The value before training would only be compared with a target that is never met.
        trainer={**protocol.trainer, "num_sanity_val_steps": 0},
    )
    workload = build_workload(options, recipe, data[key])
    workload.build_module(TrialSpec(0, 0, size, lr, None, 0))
    return BuiltRung(rung, workload, protocol, steps, size, lr)


def _data_key(options: StudyOptions) -> str:
    """Tell data modules apart: the data's node, and the values that it refers to."""
    text = json.dumps(option_at(options, "workload.data"), sort_keys=True, default=str)
    for name in ("device", "precision", "data.root"):
        text = text.replace(f"${{{name}}}", str(option_at(options, name)))
    return text


def applied(composed: Composed, settings: Mapping[str, Any]) -> Composed:
    """Put a rung's values and nodes in the places that their dotted keys name.

    ConfigError for a key that is not there and has no leading +.
    """
    return with_settings(composed, {key: _referring(value) for key, value in settings.items()})


def _referring(value: Any) -> Any:
    """Write the references in a rung's value as the config has them."""
    if isinstance(value, Mapping):
        return {key: _referring(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_referring(item) for item in value]
    return value.replace(LATER, "${") if isinstance(value, str) else value


def accuracy(trial: TrialResult) -> float | None:
    """Return the accuracy at a trial's end; None if it did not reach it, as one that diverged."""
    if trial.status != "stopped" or not trial.history or trial.history[-1][1] is None:
        return None
    return round(1.0 - trial.history[-1][1], 12)  # 0.94 at an error of 0.06


def seconds(trial: TrialResult) -> float | None:
    """Return steps x tau(B) of a trial that reached its end: its warm-up costs no more than other steps."""
    if accuracy(trial) is None or trial.seconds_per_step is None:
        return None
    return trial.steps * trial.seconds_per_step


def make_rows(
    steps: Sequence[BuiltRung], trials: Sequence[Mapping[int, TrialResult]], level: float
) -> list[dict[str, Any]]:
    """Return one row a rung. Means and deviations are over the trials that reached their end, ``n`` of them.

    ``at_level`` is the share of all seeds. ``difference`` and its interval are from the rung before, and ``p`` is
    corrected for the number of rungs; None where there are too few trials.
    """
    by_seed = [{seed: accuracy(trial) for seed, trial in own.items()} for own in trials]
    differences = [Difference(0, None, None, None, None)]  # nothing comes before the first rung
    differences += [compare(before, after, CONFIDENCE) for before, after in pairwise(by_seed)]
    corrected = iter(holm([difference.p for difference in differences if difference.p is not None]))
    rows = []
    for step, own, difference in zip(steps, trials, differences, strict=True):
        accuracies = [value for trial in own.values() if (value := accuracy(trial)) is not None]
        times = [value for trial in own.values() if (value := seconds(trial)) is not None]
        rows.append(
            {
                "rung": step.rung.name,
                "epochs": step.steps * step.batch_size / step.workload.train_examples,
                "batch_size": step.batch_size,
                "lr": step.lr,
                "steps": step.steps,
                "seconds": _mean(times),
                "seconds_sd": _deviation(times),
                "source_seconds": step.rung.seconds,
                "accuracy": _mean(accuracies),
                "accuracy_sd": _deviation(accuracies),
                "source_accuracy": step.rung.accuracy,
                "n": len(accuracies),
                "at_level": sum(value >= level for value in accuracies) / len(own),
                "difference": difference.mean,
                "difference_low": difference.low,
                "difference_high": difference.high,
                "p": None if difference.p is None else next(corrected),
                "pairs": {"n": difference.pairs, "p_uncorrected": difference.p},
                "trials": [
                    {
                        "seed": seed,
                        "status": trial.status,
                        "accuracy": accuracy(trial),
                        "seconds": seconds(trial),
                        "train_seconds": trial.train_seconds,
                        "seconds_per_step": trial.seconds_per_step,
                        "message": trial.message,
                    }
                    for seed, trial in sorted(own.items())
                ],
            }
        )
    return rows


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


def _deviation(values: Sequence[float]) -> float | None:
    return statistics.stdev(values) if len(values) > 1 else None
