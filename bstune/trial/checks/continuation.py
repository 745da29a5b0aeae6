"""Compares a trial that goes on from its checkpoint with one that was never stopped.

A few steps of both are compared by their weights, their learning rates and the metrics of an
evaluation, to the bit on a CPU. Where they differ, the checkpoint lacks some state. A training that
differs when it is repeated tells nothing. Neither do weights where the batches differ, as those do
that DataLoader workers change at random.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bstune.system.console import listing, plural
from bstune.trial.checks.attributes import Attribute

# Elsewhere than on a CPU kernels may round in another way. There a larger share than this counts as
# a difference: of the distance that the weights moved, and of a metric.
ROUNDING_SHARE = 0.01
LEARNING_RATES = "learning rates"
WEIGHTS = "weights"
# The most attributes that a message names.
MAX_NAMED = 3
HOW_TO_SAVE = "save it in on_save_checkpoint and load it in on_load_checkpoint"
# Lightning itself saves a schedule that it is given.
OR_SCHEDULE = ", or let configure_optimizers return a schedule"
HOW_TO_RESTORE = "let state_dict hold it, and load_state_dict set it or on_fit_start after that"


@dataclass(frozen=True)
class Course:
    """The last steps of a short trial; in a trial that was stopped, those after the stop.

    Args:
        steps: the number of these steps.
        attributes: the training's plain attributes before the first of them, by path.
        batches: fingerprints of the steps' batches.
        rates: learning rates after the last one, of each group of each optimizer.
        start: weights before the first of them; empty where they are not known.
        weights: weights after the last one.
        metrics: of an evaluation then, by name.
        exact: whether equal trainings have equal results to the bit.
        has_schedule: whether configure_optimizers has returned a schedule.
    """

    steps: int
    attributes: Mapping[str, Attribute]
    batches: tuple[str, ...]
    rates: tuple[float, ...]
    start: Mapping[str, Tensor]
    weights: Mapping[str, Tensor]
    metrics: Mapping[str, float]
    exact: bool
    has_schedule: bool = False


@dataclass(frozen=True)
class LostState:
    """The difference of a trial that goes on from one that was not stopped.

    Args:
        steps: after which the difference was seen.
        effects: names of what differed: learning rates, weights, or metrics.
        attributes: those that differed before these steps, by their paths.
        has_schedule: whether configure_optimizers has returned a schedule.
    """

    steps: int
    effects: tuple[str, ...]
    attributes: Mapping[str, Attribute]
    has_schedule: bool = False

    def text(self, module: str) -> str:
        """Word the difference in a line, with advice; ``module`` is the name of its class."""

        def rank_and_path(path: str) -> tuple[int, str]:
            return self.attributes[path].rank, path

        # A training depends likeliest on the attributes of the lowest rank.
        likeliest = sorted(self.attributes, key=rank_and_path)
        # A call-back's state is in the checkpoint: what differs was not in it, or not restored.
        unsaved = [path for path in likeliest if not self.attributes[path].has_state]
        unrestored = [path for path in likeliest if self.attributes[path].has_state]
        seen = (
            f"{plural(self.steps, 'step')} after its checkpoint {module} has other "
            f"{listing(self.effects)} than without the stop"
        )
        if not likeliest:
            return f"{seen}, though none of its attributes shows why"
        causes = list[str]()
        if unsaved:
            how = HOW_TO_SAVE if self.has_schedule else HOW_TO_SAVE + OR_SCHEDULE
            causes.append(f"the checkpoint does not hold {self._named(unsaved)}; {how}")
        if unrestored:
            owners = sorted({path.partition(".")[0] for path in unrestored})
            causes.append(
                f"the checkpoint holds the state of {listing(owners)}, but loading it does not "
                f"restore {self._named(unrestored)}; {HOW_TO_RESTORE}"
            )
        return f"{seen}: {'; '.join(causes)}"

    def _named(self, paths: Sequence[str]) -> str:
        """Name the first few of some attributes, with their types, and count the rest."""
        named = [f"{path} ({self.attributes[path].kind})" for path in paths[:MAX_NAMED]]
        if len(paths) > MAX_NAMED:
            named.append(f"{len(paths) - MAX_NAMED} more")
        return ", ".join(named)


def lost_state(
    straight: Course, resumed: Course, again: Callable[[], tuple[Course | None, Course | None]]
) -> LostState | None:
    """Give the difference of a resumed trial from one that was not stopped.

    Args:
        straight: the steps of the one that was not stopped.
        resumed: the same steps of the resumed one.
        again: runs both once more, in this order. It is called only where they differ.

    Returns:
        Those differences that do not also appear between two runs of the same trial. None where
        there are none, or where runs of the same trial differ too much to tell.
    """
    effects = differences(straight, resumed)
    if not effects:
        return None
    straight_again, resumed_again = again()
    if straight_again is None or resumed_again is None:
        return None
    chance = {*differences(straight, straight_again), *differences(resumed, resumed_again)}
    repeated = tuple(effect for effect in effects if effect not in chance)
    # A training whose weights differ from run to run shows nothing of what a stop does.
    if not repeated or chance & {LEARNING_RATES, WEIGHTS}:
        return None
    lost = dict[str, Attribute]()
    for path in straight.attributes.keys() | resumed.attributes.keys():
        of_straight = straight.attributes.get(path)
        of_resumed = resumed.attributes.get(path)
        straight_repeats = of_straight == straight_again.attributes.get(path)
        resumed_repeats = of_resumed == resumed_again.attributes.get(path)
        # An attribute that a run of the same trial changes says nothing of the resuming.
        is_telling = straight_repeats and resumed_repeats
        shown = of_straight or of_resumed
        if is_telling and of_straight != of_resumed and shown is not None:
            lost[path] = shown
    return LostState(resumed.steps, repeated, lost, straight.has_schedule)


def differences(course: Course, other: Course) -> tuple[str, ...]:
    """Name the differences between two courses: learning rates, weights, or metrics by their names.

    A course is the record of some steps of a trial: their batches, and what they led to. Where the
    batches of the two differ, only learning rates are compared.
    """
    names = list[str]()
    if course.rates != other.rates:
        names.append(LEARNING_RATES)
    if course.batches != other.batches:
        return tuple(names)
    if _weights_differ(course, other):
        names.append(WEIGHTS)
    tolerance = 0.0 if course.exact and other.exact else ROUNDING_SHARE
    for name in sorted(course.metrics.keys() & other.metrics.keys()):
        value = course.metrics[name]
        other_value = other.metrics[name]
        both_undefined = math.isnan(value) and math.isnan(other_value)
        if not both_undefined and not math.isclose(value, other_value, rel_tol=tolerance):
            names.append(name)
    return tuple(names)


def _weights_differ(course: Course, other: Course) -> bool:
    """Whether the weights differ after two courses, which are records of some steps of a trial.

    Where equal trainings have equal results to the bit (``exact``), any difference counts; else one
    that is larger than rounding makes.
    """
    weights = course.weights
    if weights.keys() != other.weights.keys():
        return True
    if course.exact and other.exact:
        return any(not _same(weights[name], other.weights[name]) for name in weights)
    # Only a course that begins with its trial has the weights before these steps. Without them it
    # is not known how far weights move, and any difference counts.
    start = course.start or other.start
    moved = 0.0
    if start:
        moved = max(_distance(start, weights), _distance(start, other.weights))
    return _distance(weights, other.weights) > ROUNDING_SHARE * moved


def _same(tensor: Tensor, other: Tensor) -> bool:
    """Whether two tensors are equal, where NaN equals NaN."""
    if tensor.shape != other.shape:
        return False
    both_undefined = tensor.isnan() & other.isnan()
    return bool(((tensor == other) | both_undefined).all())


def _distance(weights: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> float:
    """Give the Euclidean distance between weights of the same names."""
    squares = 0.0
    for name in weights.keys() & others.keys():
        difference = weights[name].double() - others[name].double()
        squares += float(torch.sum(difference**2))
    return math.sqrt(squares)
