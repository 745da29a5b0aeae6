"""Whole training steps as replays of one CUDA graph.

Forward, backward and the optimizer's step are a single launch.

A graph repeats the same kernels on the same memory, with the numbers that the host gave them when
it was captured. So a step is captured only where nothing differs from one step to the next but the
batch, which is copied to where the graph reads it, the learning rates, which lie in tensors, and
the device's random numbers, which a graph draws on. What else may differ is looked for in the first
steps, which run as they are, and a first replay is compared with the step that it repeats. Where
anything differs, all steps are eager, and ``reason`` says why.

So a step is not captured where it uses ``batch_idx``, the Trainer or ``self.log``, changes
attributes, or draws random numbers on the host. An optimizer of your own says ``capturable =
True``. What a step reads of objects that are no attributes of a module is not seen.

Tests on a CPU record the operators of a step in a graph's place.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from bstune.core.records import FastMode
from bstune.trial.devices.errors import USER_CODE_ERRORS, first_line, is_out_of_memory, warn_once
from bstune.trial.fast.capturable import make_capturable
from bstune.trial.fast.device_state import Copy, DeviceState, copy_values, first_difference
from bstune.trial.fast.host_state import first_change, holds_the_same, host_random, host_state
from bstune.trial.fast.watch import WatchedNumber, watching_uses
from bstune.trial.lightning.installed import LightningModule

Step = Callable[[Any, int], Any]
DEVICES = ("cuda",)
# The first makes the optimizer's state, cuDNN's choices and compiled code; the second is watched
# for what it changes on the host, as is the third, which the first replay repeats.
WARM_STEPS = 3
# A step that changes so often, each time before as many replays, stays eager: a momentum with a
# schedule is one.
MAX_CAPTURES = 4
REPLAYS_WORTH_A_CAPTURE = 32


def captures(mode: FastMode, device: torch.device) -> bool:
    """Tell whether steps on this device are captured, if they can be."""
    return mode == "graph" and device.type in DEVICES


class CapturedSteps:
    """Takes the steps of one fit: eagerly first, then by replays of a graph.

    It does so if a step can be captured.

    Args:
        module: set up for the fit, on its device.
        optimizer: its only one. Where a step can be captured it becomes fused or capturable. Its
            groups' ``lr`` stay the numbers that schedules see; within a step they are tensors.
        eager: called with a batch on the device and its number, takes a whole step, the gradients'
            removal before it included, and returns what ``training_step`` did; it may be called in
            a capture.
        around: makes a context for what is no step of the training, as one that stops a clock.

    A call takes a step on a batch and returns what ``training_step`` did. Where memory runs out in
    a capture, the error is raised, as that of an eager step is.
    """

    def __init__(
        self,
        module: LightningModule,
        optimizer: Optimizer,
        eager: Step,
        around: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        # Why steps are eager; None as long as they are, or may be, captured.
        self.reason: str | None = None
        self._module = module
        self._optimizer = optimizer
        self._eager = eager
        self._around = around
        # Each group's rate, on the device, and the number that it holds.
        self._rates: list[Tensor] = []
        self._filled: list[float] = []
        # Of the latest step, what a graph fixes.
        self._signature: Any = None
        self._parameters: list[Tensor] = []
        # Addresses of parameters and buffers, when they were last looked at.
        self._places: list[int] = []
        # Eager steps of this signature, and its replays.
        self._warm = 0
        self._replays = 0
        # Signatures so far that were not worth a capture.
        self._changes = 0
        # The host's state when the step was captured.
        self._host: dict[str, list[object]] = {}
        # Whether the module is looked at before the next step.
        self._looks = True
        self._replay: Callable[[], None] | None = None
        self._inputs: list[Tensor] = []
        self._output: Any = None
        reason = make_capturable(optimizer, module.device)
        if reason is not None:
            self._give_up(reason)
            return
        self._rates = [torch.zeros((), device=module.device) for _ in optimizer.param_groups]
        self._filled = [0.0] * len(self._rates)

    def __call__(self, batch: object, index: int) -> Any:
        """Take a step on the batch of this number."""
        if self.reason is not None:
            return self._eager(batch, index)
        leaves, structure = tree_flatten(batch)
        if not self._fits(structure, leaves):
            return self._eager(batch, index)
        self._fill_rates()
        if self._replay is not None:
            copy_values(self._inputs, leaves)
            self._replay()
            self._replays += 1
            return self._output
        self._warm += 1
        if self._warm == 1:
            with self._tensor_rates():
                return self._eager(batch, index)
        if self._warm < WARM_STEPS:
            return self._watched(batch, index)
        return self._capture(batch, index, leaves, structure)

    def look_again(self) -> None:
        """Before the next step, look whether the module is as it was.

        Hooks of an epoch or an evaluation have run.
        """
        self._looks = True

    def _fits(self, structure: TreeSpec, leaves: Sequence[object]) -> bool:
        """Begin anew where what a graph fixes is no longer as it was.

        That is shapes, places, the optimizer's options.
        """
        batch = list[tuple[object, ...]]()
        for leaf in leaves:
            if not isinstance(leaf, Tensor):
                self._give_up(f"a batch holds more than tensors ({type(leaf).__name__})")
                return False
            batch.append((leaf.shape, leaf.stride(), leaf.dtype, leaf.device))
        groups = [_options(group) for group in self._optimizer.param_groups]
        if self._looks:
            self._look()
        # A schedule may freeze some at any step.
        trained = [parameter.requires_grad for parameter in self._parameters]
        signature = structure, batch, groups, trained, self._places
        if signature != self._signature:
            # Only changes that come soon after each other count.
            if self._replays >= REPLAYS_WORTH_A_CAPTURE:
                self._changes = 0
            self._changes += 1
            self._signature = signature
            self._replay = None
            self._output = None
            self._warm = 0
            self._replays = 0
        if self._changes > MAX_CAPTURES:
            self._give_up(
                "the module, the optimizer's options, tensors' places or shapes change again and "
                "again"
            )
        return self._changes <= MAX_CAPTURES

    def _look(self) -> None:
        self._looks = False
        self._parameters = list(self._module.parameters())
        tensors = (*self._parameters, *self._module.buffers())
        self._places = [tensor.data_ptr() for tensor in tensors]
        if self._replay is not None:
            host = host_state(self._module, self._optimizer)
            if first_change(self._host, host) is not None:
                self._signature = None

    def _fill_rates(self) -> None:
        # One small kernel a group whose rate has changed, and none while it is constant: unlike a
        # table of all rates this holds for any schedule. Filling waits for nothing.
        groups = self._optimizer.param_groups
        for place, (group, rate) in enumerate(zip(groups, self._rates, strict=True)):
            if group["lr"] != self._filled[place]:
                self._filled[place] = group["lr"]
                rate.fill_(group["lr"])

    @contextmanager
    def _tensor_rates(self) -> Iterator[None]:
        numbers = [group["lr"] for group in self._optimizer.param_groups]
        for group, rate in zip(self._optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate
        try:
            yield
        finally:
            for group, number in zip(self._optimizer.param_groups, numbers, strict=True):
                group["lr"] = number

    def _watched(self, batch: object, index: int) -> Any:
        """Take an eager step, and give up if it depends on the host's state, or changes it."""
        asked: list[str] = []
        before = host_state(self._module, self._optimizer)
        random_before = host_random(self._module.device)
        with self._tensor_rates(), watching_uses(self._module, asked):
            output = self._eager(batch, WatchedNumber(index, asked))
        self._host = host_state(self._module, self._optimizer)
        changed = first_change(before, self._host)
        loss = _loss(output)
        if asked:
            self._give_up(f"training_step uses {asked[0]}, which differs from step to step")
        elif changed is not None:
            self._give_up(f"training_step changes {changed} on the host")
        elif not holds_the_same(random_before, host_random(self._module.device)):
            self._give_up("training_step draws random numbers on the host")
        elif not isinstance(loss, Tensor):
            self._give_up("training_step returns no loss")
        return output

    def _capture(
        self, batch: object, index: int, leaves: Sequence[Tensor], structure: TreeSpec
    ) -> Any:
        """Take an eager step, capture it, and compare a replay with it.

        A step may take its batch apart.
        """
        state = DeviceState(self._module, self._optimizer)
        with self._around():
            before = state.copied()
        output = self._watched(batch, index)
        if self.reason is not None:
            return output
        with self._around():
            after = state.copied()
            state.restore(before)
            try:
                self._record(leaves, structure, index, state.generators)
                # A capture runs nothing, but one that fails may leave anything.
                state.restore(before)
                if self._replay is not None:
                    self._replay()
                    self._compare(state, before, after, output)
            finally:
                state.restore(after)
        return output

    def _record(
        self,
        leaves: Sequence[Tensor],
        structure: TreeSpec,
        index: int,
        generators: Sequence[torch.Generator],
    ) -> None:
        # Clones keep memory formats.
        self._inputs = [leaf.clone() for leaf in leaves]

        def step() -> None:
            # Another number than the step's own, so that a result that goes by it shows when the
            # two are compared.
            self._output = self._eager(tree_unflatten(self._inputs, structure), index + 1)

        try:
            with self._tensor_rates():
                self._replay = record(step, generators)
        except USER_CODE_ERRORS as error:
            # Ending a capture that has failed raises an error of its own, on top of the one that
            # says why.
            first: BaseException = error
            while True:
                if is_out_of_memory(first):
                    raise first from None
                if first.__context__ is None:
                    break
                first = first.__context__
            self._give_up(f"{type(first).__name__} in its capture: {first_line(first)}")

    def _compare(self, state: DeviceState, before: Copy, after: Copy, output: object) -> None:
        taken_loss = _loss(output)
        different = first_difference(
            [*state.names, "the loss"],
            [*state.tensors, _loss(self._output)],
            [*after.tensors, taken_loss],
            [*before.tensors, torch.zeros_like(taken_loss)],
        )
        if different is not None:
            self._give_up(f"a replayed step differs from the step itself in {different}")

    def _give_up(self, reason: str) -> None:
        self.reason = reason
        self._replay = None
        self._output = None
        self._inputs = []
        warn_once(f"protocol.fast=graph: steps are not captured, as {reason}")


def _loss(output: object) -> Any:
    """Give the loss of what a step returned; None where it has none."""
    if isinstance(output, Mapping):
        return output.get("loss")
    return output


def _options(group: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Give what a graph fixes of a group of parameters: tensors themselves, all else by value."""
    options = list[tuple[str, Any]]()
    for name, value in group.items():
        if name in ("params", "lr"):
            continue
        fixed = id(value) if isinstance(value, Tensor) else value
        options.append((name, fixed))
    return options


def record(step: Callable[[], None], generators: Sequence[torch.Generator]) -> Callable[[], None]:
    """Capture a step that draws on these generators, and return what replays it."""
    graph = torch.cuda.CUDAGraph()
    for generator in generators:
        graph.register_generator_state(generator)
    # Of this thread alone: another one may allocate meanwhile, as that of a DataLoader that pins
    # its batches.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        step()
    return graph.replay
