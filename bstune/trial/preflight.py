"""What could make a study wrong, seen in the worker before it begins, by a few steps of training.

Rate, metric, seeds and schedules are seen of a training that is set up and takes no step; schedules
by calling their ``step`` alone. That a resumed trial equals one that was never stopped is seen by
the weights of both, as a schedule may be hidden in a hook.
"""

import copy
import math
import pickle
import statistics
import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.optim.lr_scheduler import LRScheduler

from bstune.core.clock import processor_wait
from bstune.core.errors import InputError
from bstune.core.records import Budget, Record, Spec, Target
from bstune.recipe.recipe import Recipe, TrialSettings, settings_of
from bstune.system.failures import one_line
from bstune.trial.checks import Checks, Schedule
from bstune.trial.lightning import StopAtTarget, fit
from bstune.trial.look_up import STEPS, Looked, is_sgd, look, train_loader_of
from bstune.trial.noise_beside import NoiseBesideTraining
from bstune.trial.trainer import base_rates
from bstune.trial.trial import Trial, may_be_of_size
from bstune.trial.worker import tell_progress

# Steps before and after a resumption.
STEPS_EACH = 3
# A resumed trial may differ so many times as much as one that is repeated, where that differs.
REPEATS = 4
# A rate of this part of its highest is none: OneCycleLR ends at 4e-6 of it.
ZERO = 1e-4
# The most calls of a schedule's ``step``, some 10 us each.
MOST_MOVES = 20_000
# Schedules without a length: those that come to zero again and again, and those that decay.
ENDLESS = (
    *("CosineAnnealingWarmRestarts", "CyclicLR"),
    *("StepLR", "MultiStepLR", "ExponentialLR", "MultiplicativeLR"),
)
# The argument of a schedule that is its length.
LENGTHS = {
    "OneCycleLR": "total_steps",
    "CosineAnnealingLR": "T_max",
    "LinearLR": "total_iters",
    "PolynomialLR": "total_iters",
}
# A batch and its parts, of the same examples, tell a sum from a mean. Its loss may differ by so
# much from the sum of theirs, as layers see other batches.
PARTS = 4
SUM_MARGIN = 0.2
# A rate of this part of the baseline's changes no weights.
STILL = 1e-9
# The first length of a pilot whose project has none, in steps, and how much it may grow at once.
FIRST_PILOT = 50
GROWTH = 10.0
# A pilot is run again where it may be at least so many times as long.
WORTHWHILE = 2.0
# What a pilot may take in all, and wait for a processor, over its seconds of training.
WITH_EVALUATIONS = 2.0

# What has to be said of a project.
SAME_WEIGHTS = (
    "initial weights are the same on each seed, so that new seeds tell less than they should: "
    "leave out seed_everything in {}, unless it loads trained weights"
)
NO_TIME = "stopped trials start afresh: there was no time to see whether they resume"
STARTS_AFRESH = (
    "stopped trials start afresh, as a resumed one differs from one that was never stopped: what "
    "changes in training has to be in the checkpoint, in plain data, such as a schedule that "
    "configure_optimizers returns"
)
READS_TRAINING = (
    "stopped trials start afresh, as {} reads {}, whose mean over an epoch no checkpoint keeps: "
    "let it monitor a metric of validation"
)
IS_SUM = (
    "the training loss is a sum over the batch, so that the best lr grows by a factor of 1/B less "
    "than a mean's: scaling=none is expected, unless another rule is given"
)

Weights = Mapping[str, torch.Tensor]


class _Losses(Callback):
    """Keeps the losses of the first batches, of each the one that is first, and ends the fit."""

    def __init__(self, count: int) -> None:
        self._count = count
        self.losses: list[float] = []

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        trainer.limit_val_batches = 0

    def on_before_backward(
        self, trainer: Trainer, pl_module: LightningModule, loss: torch.Tensor
    ) -> None:
        if len(self.losses) == trainer.fit_loop.total_batch_idx:
            self.losses.append(loss.item())
        tell_progress()
        trainer.should_stop = len(self.losses) == self._count


class _OneBatch(Callback):
    """Evaluates one batch of the validation data in place of all."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        trainer.limit_val_batches = 1


def preflight(
    recipe: Recipe,
    sizes: tuple[int, int, int],
    lr: float,
    budget: Budget | None,
    target: Target,
    until: float | None = None,
) -> Checks:
    """See that rate, metric, seeds, schedule and resumption are what a study takes them for.

    A new study's worker calls it once, after the look-up.

    Args:
        recipe: of the project.
        sizes: the smallest batch size, the baseline's and the largest.
        lr: of the baseline.
        budget: of a trial; None: it is found later.
        target: of the study; one that is found later has no goal.
        until: the ``time.monotonic()`` at which a resumption is no longer tried; None: no limit.

    Raises:
        InputError: the rate does not reach the optimizer, the metric is not logged, untrained
            weights meet the target, the noise scale cannot be measured, or a schedule has an end of
            its own; with what to write.
        Exception: whatever the user's code raises.
    """
    low, batch_size, high = sizes
    budget = budget or Budget(steps=STEPS, examples=STEPS * batch_size)
    looked = _look_and_check(recipe, batch_size, lr, target)
    trainer = looked.trainer
    other = look(recipe, settings_of(batch_size, 2.0 * lr, STEPS, seed=1)).trainer
    _check_rate(recipe, trainer, other, batch_size, lr, target)
    if recipe.noise_scale:
        fit(copy.deepcopy(recipe), settings_of(batch_size, lr, 1), [NoiseBesideTraining()])
    lines = []
    if _are_equal(_weights(trainer), _weights(other)):
        lines.append(SAME_WEIGHTS.format(type(other.lightning_module).__name__))
    schedules = schedules_of(recipe, batch_size, lr, budget)
    if not all(schedule.follows for schedule in schedules):
        _check_schedules(recipe, sizes, lr, budget)
    if low == batch_size:
        _check_validation(recipe, high, lr, batches=1)
    resumes = _resumes_at_a_size(recipe, (low, batch_size), lr, budget, target, until)
    read_training = _schedules_that_read_training(looked)
    # Without time for a resumption there is none for this.
    may_sum = resumes is not None and is_sgd(other.optimizers)
    is_sum = may_sum and _is_sum(recipe, batch_size, lr)
    lines += [f"{one.state}: {one.remedy}" for one in schedules if one.is_unmoved]
    if resumes is None:
        lines.append(NO_TIME)
    elif not resumes:
        lines.append(STARTS_AFRESH)
    else:
        lines += read_training
    if is_sum:
        lines.append(IS_SUM)
    return Checks(
        resumes=bool(resumes) and not read_training,
        is_sum=is_sum,
        schedules=tuple(schedules),
        lines=tuple(lines),
    )


def _look_and_check(recipe: Recipe, batch_size: int, lr: float, target: Target) -> Looked:
    """Set a training up and evaluate it; InputError where the metric or validation cannot serve."""
    batches = 1 if target.goal is None else -1
    try:
        looked = look(recipe, settings_of(batch_size, lr, STEPS), batches)
    except Exception as error:
        if may_be_of_size(error):
            # The last batch may be smaller.
            _check_validation(recipe, batch_size, lr, batches)
        raise
    _check_metric(looked.metrics, target)
    return looked


def _schedules_that_read_training(looked: Looked) -> list[str]:
    """What to say of schedules that step by a mean over an epoch of training."""
    return [
        READS_TRAINING.format(type(config.scheduler).__name__, config.monitor)
        for config in looked.trainer.lr_scheduler_configs
        if config.reduce_on_plateau
        and config.interval == "epoch"
        and config.monitor not in looked.metrics
    ]


def _check_schedules(
    recipe: Recipe, sizes: tuple[int, int, int], lr: float, budget: Budget
) -> None:
    """InputError where a schedule has an end of its own within a trial of some size."""
    for size in sizes:
        try:
            for schedule in schedules_of(recipe, size, lr, budget):
                _check_schedule(schedule, size)
        # The trials will tell which sizes the project takes.
        except Exception as error:
            if not may_be_of_size(error):
                raise


def _resumes_at_a_size(
    recipe: Recipe,
    sizes: tuple[int, int],
    lr: float,
    budget: Budget,
    target: Target,
    until: float | None,
) -> bool | None:
    """As :func:`_resumes`, at the smallest batch size or, where that fails, at the baseline's.

    BatchNorm trains on no batch of 1, and some samplers give none.
    """
    low, batch_size = sizes
    try:
        return _resumes(recipe, low, lr, budget, target, until)
    except Exception as error:
        if low == batch_size or not may_be_of_size(error):
            raise
    _check_validation(recipe, low, lr, batches=1)
    return _resumes(recipe, batch_size, lr, budget, target, until)


def _check_metric(metrics: Mapping[str, float], target: Target) -> None:
    """InputError where the metric is not logged, or untrained weights meet the target."""
    if target.metric not in metrics:
        raise InputError(
            f"the target's metric is {target.metric!r}, but validation logs "
            f"{', '.join(sorted(metrics)) or 'none'}: give one that it logs, as "
            f"target='{replace(target, metric='METRIC')}'"
        )
    value = metrics[target.metric]
    if target.reached(value):
        raise InputError(
            f"untrained weights meet the target {target}: {target.metric} is {value:.4g} before "
            f"the first step; give a harder goal"
        )


def _check_validation(recipe: Recipe, batch_size: int, lr: float, batches: int) -> None:
    """InputError where validation works in batches of the trial's size, and in no others."""
    settings = settings_of(batch_size, lr, STEPS)
    error = _error_of_look(recipe, settings, batches)
    if error is None or _error_of_look(
        replace(recipe, validation_batch_size="trial"), settings, batches
    ):
        return
    raise InputError(
        f"validation raised {one_line(error)} at batch size {batch_size}, but not in batches of "
        f"that size: give validation_batch_size=trial, which makes them so"
    )


def _error_of_look(recipe: Recipe, settings: TrialSettings, batches: int) -> Exception | None:
    """What a training raises that is set up, and evaluates so many batches."""
    try:
        look(recipe, settings, batches)
    # The user's code may raise anything.
    except Exception as error:  # noqa: BLE001
        return error
    return None


def _is_sum(recipe: Recipe, batch_size: int, lr: float) -> bool:
    """Whether the training loss of a batch is the sum, not the mean, of those of its parts."""
    part = max(1, batch_size // PARTS)
    means = []
    try:
        for size, count in ((part, PARTS), (PARTS * part, 1)):
            seen = _Losses(count)
            fit(copy.deepcopy(recipe), settings_of(size, STILL * lr, STEPS), [seen])
            means.append(statistics.fmean(seen.losses))
    # The project may not take these sizes.
    except Exception as error:
        if not may_be_of_size(error):
            raise
        return False
    of_part, of_whole = means
    return abs(of_whole - PARTS * of_part) <= SUM_MARGIN * PARTS * abs(of_part)


def _check_rate(
    recipe: Recipe, trainer: Trainer, doubled: Trainer, batch_size: int, lr: float, target: Target
) -> None:
    """InputError where twice the rate changes nothing.

    Args:
        recipe: of the project.
        trainer, doubled: that were set up with the rate and twice the rate.
        batch_size, lr: of the former.
        target: whose metric is logged.
    """
    rates = [base_rates(optimizer) for optimizer in trainer.optimizers]
    others = [base_rates(optimizer) for optimizer in doubled.optimizers]
    # A rate that was put there may be overwritten.
    if rates != others and not recipe.override_lr:
        return
    # A hook may put the rate into the optimizer later.
    runs = []
    for rate in (lr, 2.0 * lr):
        trial = _short_trial(target, batch_size, rate, STEPS, STEPS_EACH)
        runs.append(_weights(_train_shortly(recipe, trial)))
    if _are_equal(*runs):
        kind = type(trainer.lightning_module).__name__
        # A module may have none, or one without parameters.
        own = f", at {rates[0][0]:g}" if any(rates) else ""
        remedy = (
            f"{own}; in configure_optimizers, give self.lr to it or to its schedule, or give "
            f"override_lr=True"
        )
        if recipe.override_lr:
            remedy = "; leave out what sets it later"
        raise InputError(
            f"the rate does not reach the optimizer: {kind} trains the same with lr={lr:g} and "
            f"lr={2 * lr:g}{remedy}"
        )


def _short_trial(
    target: Target, batch_size: int, lr: float, total_steps: int, max_steps: int, **places: Any
) -> Trial:
    """A trial that no metric ends."""
    spec = Spec(
        number=0,
        place="preflight",
        role="search",
        batch_size=batch_size,
        lr=lr,
        seed=0,
        max_steps=max_steps,
    )
    trial = Trial(spec, replace(target, goal=None), total_steps=total_steps, **places)
    trial.on_progress = tell_progress
    return trial


def _train_shortly(recipe: Recipe, trial: Trial) -> Trainer:
    """Train a trial."""
    own = [StopAtTarget(trial), _OneBatch()]
    return fit(copy.deepcopy(recipe), trial, own, resume_from=trial.resume_from)


def _weights(trainer: Trainer) -> Weights:
    """Copy a module's weights and buffers to the CPU."""
    state = trainer.lightning_module.state_dict()
    tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    return {name: value.detach().cpu().clone() for name, value in tensors.items()}


def _are_equal(one: Weights, other: Weights) -> bool:
    """Whether weights are the same, bit for bit."""
    return all(torch.equal(value, other[name]) for name, value in one.items())


def _distance(one: Weights, other: Weights) -> float:
    """The largest difference between weights."""
    return max(
        (float((value.double() - other[name].double()).abs().max()) for name, value in one.items()),
        default=0.0,
    )


def _value_of_first_process(value: Any) -> Any:
    """What the first of the processes that train together has for a value; here, if it is alone."""
    if not torch.distributed.is_initialized():
        return value
    values = [value]
    torch.distributed.broadcast_object_list(values)
    return values[0]


def _resumes(
    recipe: Recipe,
    batch_size: int,
    lr: float,
    budget: Budget,
    target: Target,
    until: float | None,
) -> bool | None:
    """Whether a trial that is stopped and resumed ends with the weights of one that is not.

    Where a repeated one differs as well, as on an accelerator, it may differ as much. None: the
    time was over before that was seen.
    """
    last = 2 * STEPS_EACH
    total = max(budget.last_step(batch_size), last)

    def short_trial(max_steps: int, **places: Any) -> Trial:
        return _short_trial(target, batch_size, lr, total, max_steps, until=until, **places)

    def is_late() -> bool:
        return bool(_value_of_first_process(until is not None and time.monotonic() > until))

    with tempfile.TemporaryDirectory() as folder:
        state = Path(_value_of_first_process(folder)) / "state.ckpt"
        half = short_trial(STEPS_EACH, save_to=state)
        _train_shortly(recipe, half)
        if is_late():
            return None
        rest = short_trial(last, earlier=half.record(), resume_from=state)
        try:
            resumed = _weights(_train_shortly(recipe, rest))
        # Objects of the user's own are not loaded.
        except pickle.UnpicklingError:
            return False
    trainer = _train_shortly(recipe, short_trial(last))
    if _holds_schedule(trainer):
        return False
    whole = _weights(trainer)
    if is_late():
        return None
    if _are_equal(whole, resumed):
        return True
    again = _weights(_train_shortly(recipe, short_trial(last)))
    return None if is_late() else _distance(whole, resumed) <= REPEATS * _distance(whole, again)


def _holds_schedule(trainer: Trainer) -> bool:
    """Whether a module or a call-back steps a schedule that Lightning does not save.

    The steps of a preflight may be too few to see it move.
    """
    saved = [config.scheduler for config in trainer.lr_scheduler_configs]
    owners = [trainer.lightning_module, *getattr(trainer, "callbacks", ())]
    held = [value for owner in owners for value in vars(owner).values()]
    return any(isinstance(one, LRScheduler) and one not in saved for one in held)


def schedules_of(recipe: Recipe, batch_size: int, lr: float, budget: Budget) -> list[Schedule]:
    """How a project's schedules move in a trial, by calling ``step`` of each alone.

    Schedules that Lightning does not step by itself are left out: those that read a metric, and
    those of manual optimization or of a module with a ``lr_scheduler_step`` of its own.

    Args:
        recipe: of the project.
        batch_size, lr: of the trial.
        budget: whose last step is its length.
    """
    steps = budget.last_step(batch_size)
    trainer, longer = (
        look(recipe, settings_of(batch_size, lr, length)).trainer for length in (steps, 2 * steps)
    )
    module = trainer.lightning_module
    is_lightnings = "lightning" in type(module).lr_scheduler_step.__module__.partition(".")[0]
    if not (module.automatic_optimization and is_lightnings):
        return []
    epoch = train_loader_of(trainer).epoch
    schedules = []
    pairs = zip(trainer.lr_scheduler_configs, longer.lr_scheduler_configs, strict=True)
    for config, of_longer in pairs:
        if config.reduce_on_plateau:
            continue
        units = steps
        if config.interval == "epoch":
            # Nothing tells how many epochs a stream will have.
            if epoch.steps is None:
                continue
            units //= epoch.steps
        moves = units // config.frequency
        most = min(steps, MOST_MOVES)
        rates, raised = _rates_by_move(config.scheduler, most)
        # The first moves of a longer trial tell whether the length counts.
        others, _ = _rates_by_move(of_longer.scheduler, min(most, max(moves, STEPS_EACH)))
        # Past its T_max a cosine rises again.
        ends = (_end_of_schedule(rates, raised), getattr(config.scheduler, "T_max", None))
        schedules.append(
            Schedule(
                name=type(config.scheduler).__name__,
                interval=config.interval,
                steps=steps,
                moves=moves,
                rate=max(rates[: moves + 1]) / lr,
                follows=any(one != other for one, other in zip(rates, others, strict=False)),
                end=min((end for end in ends if end is not None), default=None),
            )
        )
    return schedules


def _rates_by_move(scheduler: Any, moves: int) -> tuple[list[float], bool]:
    """The highest rate before and after each call of ``step``, and whether one raised."""
    groups = scheduler.optimizer.param_groups
    rates = [max(float(group["lr"]) for group in groups)]
    with warnings.catch_warnings():
        # torch expects a step of the optimizer before each.
        warnings.simplefilter("ignore")
        for _ in range(moves):
            try:
                scheduler.step()
            # A schedule raises past its end, whatever its author likes.
            except Exception:  # noqa: BLE001
                return rates, True
            rates.append(max(float(group["lr"]) for group in groups))
    return rates, False


def _end_of_schedule(rates: Sequence[float], raised: bool) -> int | None:
    """The move at which a schedule comes to zero, or past which it raises; None: neither."""
    highest = 0.0
    for move, rate in enumerate(rates):
        if rate <= ZERO * highest:
            return move
        highest = max(highest, rate)
    return len(rates) - 1 if raised else None


def _check_schedule(schedule: Schedule, batch_size: int) -> None:
    """InputError for a schedule that ends before its trial, whatever that one's length."""
    name, end = schedule.name, schedule.end
    if schedule.follows or end is None or end >= schedule.moves or name in ENDLESS:
        return
    attribute = "estimated_stepping_batches" if schedule.interval == "step" else "max_epochs"
    length = f"self.trainer.{attribute}"
    remedy = f"compute its length from {length}"
    if name in LENGTHS:
        remedy = f"write {name}(optimizer, ..., {LENGTHS[name]}={length})"
    raise InputError(
        f"{name} ends by {schedule.interval} {end:,}, where a trial at batch size {batch_size} has "
        f"{schedule.moves:,}: let it follow the trial's length, {remedy}, "
        f"or give schedule=cosine"
    )


def pilot(
    recipe: Recipe,
    batch_size: int,
    lr: float,
    seconds: float,
    target: Target,
    length: int | None,
) -> Record:
    """Train the baseline for some seconds, to see what it reaches.

    The worker calls it after the preflight, where nobody gave a target or a budget.

    Args:
        recipe: of the project.
        batch_size, lr: of the baseline.
        seconds: of training.
        target: of which the metric is evaluated; the run does not end there.
        length: of the trial, in steps; None: the one that takes these seconds.

    Returns:
        The last run; its status says whether the user's code failed.

    Raises:
        Exception: whatever the user's code raises.
    """
    steps = length or FIRST_PILOT
    most = WITH_EVALUATIONS * seconds
    waited = processor_wait()
    waited_before = waited()

    def now() -> float:
        # A target that a busy machine made easy would be another one; so much is waited for it.
        return time.monotonic() - min(waited() - waited_before, most)

    until = now() + most
    while True:
        began = now()
        trial = _short_trial(target, batch_size, lr, steps, steps, until=until, now=now)
        fit(copy.deepcopy(recipe), trial, [StopAtTarget(trial)])
        record = trial.record()
        ended = now()
        growth = _value_of_first_process(min(GROWTH, (until - ended) / (ended - began)))
        if length is not None or growth < WORTHWHILE or not record.has_trained:
            return record
        steps = math.ceil(growth * steps)
