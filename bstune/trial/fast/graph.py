"""Captures a whole training step in a CUDA graph, and replays the graph for the steps after it.

The forward pass, the backward pass and the optimizer's step are then a single launch.

A graph repeats the same kernels on the same memory, with the numbers that the host gave them when
it was captured. Three things may differ from one step to the next: the batch, which is copied to
where the graph reads it; the learning rates, which lie in tensors; and the device's random numbers,
which a graph draws on. The first steps run as they are, and are watched for anything else that
differs. The first replay is compared with the step that it repeats. Where anything differs, all
steps are eager, and ``reason`` says why.

So a step is not captured where it uses ``batch_idx``, the Trainer or ``self.log``, changes
attributes, or draws random numbers on the host. An optimizer of your own has to say ``capturable =
True``. A step that reads objects which are no attributes of a module is not noticed.

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

# Takes a step on a batch, given its number, and returns what training_step returned.
Step = Callable[[Any, int], Any]
# Kinds of devices on which steps are captured.
DEVICES = ("cuda",)
# Eager steps before the first replay. The first makes the optimizer's state, cuDNN's choices and
# compiled code. The second and the third are watched for changes on the host, and the first replay
# repeats the third.
WARM_STEPS = 3
# The most captures of a step that changes each time before it was replayed often enough to be worth
# one. After them steps stay eager, as with a momentum that has a schedule.
MAX_CAPTURES = 4
REPLAYS_WORTH_A_CAPTURE = 32


def captures(mode: FastMode, device: torch.device) -> bool:
    """Whether steps on this device are captured where they can be."""
    return mode == "graph" and device.type in DEVICES


class CapturedSteps:
    """Takes the steps of one fit: eagerly at first, then by replays of a CUDA graph if possible.

    A call takes a step on a batch and returns what ``training_step`` returned. Where memory runs
    out in a capture, the error is raised, as that of an eager step is.

    Args:
        module: set up for the fit, on its device.
        optimizer: the module's only one. Where a step can be captured it becomes fused or
            capturable. The ``lr`` of its groups stays the number that schedules see; within a step
            it is a tensor.
        eager: takes a whole step, from the removal of gradients on, given a batch on the device and
            its number. It returns what ``training_step`` returned, and may be called in a capture.
        around: makes a context for work that is no step of the training, such as one that stops a
            clock.

    Attributes:
        reason: why steps are eager; None as long as they are captured, or may be.
    """

    def __init__(
        self,
        module: LightningModule,
        optimizer: Optimizer,
        eager: Step,
        around: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self.reason: str | None = None
        self._module = module
        self._optimizer = optimizer
        self._eager = eager
        self._around = around
        # The learning rate of each parameter group, in a tensor on the device, and as the number
        # that the tensor holds.
        self._rates: list[Tensor] = []
        self._rates_on_device: list[float] = []
        # All that a graph fixes, as it was at the latest step.
        self._signature: Any = None
        self._parameters: list[Tensor] = []
        # The addresses of parameters and buffers when they were last read.
        self._addresses: list[int] = []
        # The number of eager steps with this signature, and of replays.
        self._warm_steps = 0
        self._replays = 0
        # The number of signatures in a row that were not worth a capture.
        self._changes = 0
        # The host's state when the step was captured.
        self._host: dict[str, list[object]] = {}
        # Whether the module is checked before the next step.
        self._is_check_due = True
        # Replays the captured step; None: none is captured.
        self._replay: Callable[[], None] | None = None
        # The tensors that the graph reads its batch from, and the output that it writes.
        self._inputs: list[Tensor] = []
        self._output: Any = None
        reason = make_capturable(optimizer, module.device)
        if reason is not None:
            self._give_up(reason)
            return
        self._rates = [torch.zeros((), device=module.device) for _ in optimizer.param_groups]
        self._rates_on_device = [0.0] * len(self._rates)

    def __call__(self, batch: object, index: int) -> Any:
        """Take a step on a batch, whose number in the epoch is ``index``."""
        # Captures were given up.
        if self.reason is not None:
            return self._eager(batch, index)
        leaves, structure = tree_flatten(batch)
        if not self._may_capture(structure, leaves):
            return self._eager(batch, index)
        self._write_rates_to_device()
        if self._replay is not None:
            copy_values(self._inputs, leaves)
            self._replay()
            self._replays += 1
            return self._output
        self._warm_steps += 1
        # The first step makes the optimizer's state, which would look like a change on the host.
        if self._warm_steps == 1:
            with self._tensor_rates():
                return self._eager(batch, index)
        if self._warm_steps < WARM_STEPS:
            return self._watched_step(batch, index)
        return self._capture(batch, index, leaves, structure)

    def check_module_at_next_step(self) -> None:
        """Check the module before the next step: hooks of an epoch or an evaluation have run."""
        self._is_check_due = True

    def _may_capture(self, structure: TreeSpec, leaves: Sequence[object]) -> bool:
        """Whether a step on this batch is, or may be, captured.

        Where something has changed that a graph fixes, the captured step is dropped, and the eager
        steps that come before a capture begin anew. A graph fixes the shapes of the batch, the
        addresses of tensors, the optimizer's options, and which parameters are trained.

        Args:
            structure: how the batch's tuples, lists and dicts hold its tensors.
            leaves: the batch's tensors, if it holds nothing else.
        """
        batch = list[tuple[object, ...]]()
        for leaf in leaves:
            if not isinstance(leaf, Tensor):
                self._give_up(f"a batch holds more than tensors ({type(leaf).__name__})")
                return False
            batch.append((leaf.shape, leaf.stride(), leaf.dtype, leaf.device))
        groups = [_fixed_options(group) for group in self._optimizer.param_groups]
        if self._is_check_due:
            self._check_module()
        # A schedule may freeze parameters at any step.
        trained = [parameter.requires_grad for parameter in self._parameters]
        signature = structure, batch, groups, trained, self._addresses
        if signature != self._signature:
            # After enough replays the capture was worth its time, and changes count from 0 again.
            if self._replays >= REPLAYS_WORTH_A_CAPTURE:
                self._changes = 0
            self._changes += 1
            self._signature = signature
            self._replay = None
            self._output = None
            self._warm_steps = 0
            self._replays = 0
        if self._changes > MAX_CAPTURES:
            self._give_up(
                "the module, the optimizer's options, tensors' places or shapes change again and "
                "again"
            )
        return self._changes <= MAX_CAPTURES

    def _check_module(self) -> None:
        """Read the module's parameters and addresses anew.

        A replay repeats what the step did on the device, by the state of the module and optimizer
        on the host at its capture. Where that has changed since, the signature is forgotten, so
        that the captured step is dropped.
        """
        self._is_check_due = False
        self._parameters = list(self._module.parameters())
        tensors = (*self._parameters, *self._module.buffers())
        self._addresses = [tensor.data_ptr() for tensor in tensors]
        if self._replay is not None:
            host = host_state(self._module, self._optimizer)
            if first_change(self._host, host) is not None:
                self._signature = None

    def _write_rates_to_device(self) -> None:
        """Write the learning rates that have changed since the last step to the device.

        That is one small kernel for each such group, which waits for nothing. Unlike a table of all
        rates it serves any schedule.
        """
        groups = self._optimizer.param_groups
        for index, (group, rate) in enumerate(zip(groups, self._rates, strict=True)):
            if group["lr"] != self._rates_on_device[index]:
                self._rates_on_device[index] = group["lr"]
                rate.fill_(group["lr"])

    @contextmanager
    def _tensor_rates(self) -> Iterator[None]:
        """Within the context, the ``lr`` of each parameter group is its tensor on the device."""
        numbers = [group["lr"] for group in self._optimizer.param_groups]
        for group, rate in zip(self._optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate
        try:
            yield
        finally:
            for group, number in zip(self._optimizer.param_groups, numbers, strict=True):
                group["lr"] = number

    def _watched_step(self, batch: object, index: int) -> Any:
        """Take an eager step; give up captures if it depends on the host's state or changes it."""
        uses: list[str] = []
        before = host_state(self._module, self._optimizer)
        random_before = host_random(self._module.device)
        with self._tensor_rates(), watching_uses(self._module, uses):
            output = self._eager(batch, WatchedNumber(index, uses))
        # Later changes of this state drop the captured step.
        self._host = host_state(self._module, self._optimizer)
        changed = first_change(before, self._host)
        loss = _loss(output)
        if uses:
            self._give_up(f"training_step uses {uses[0]}, which differs from step to step")
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

        The replay changes nothing: the state after the eager step is put back.

        Args:
            batch: of the step.
            index: its number.
            leaves: the batch's tensors, in the order of torch's ``tree_flatten``. They are taken
                before the step, which may change the batch's containers.
            structure: how the batch's tuples, lists and dicts hold them, as ``tree_flatten`` tells.
        """
        state = DeviceState(self._module, self._optimizer)
        with self._around():
            before = state.copy()
        output = self._watched_step(batch, index)
        # The step has shown that no replay could do the same: captures are given up.
        if self.reason is not None:
            return output
        with self._around():
            after = state.copy()
            state.restore(before)
            try:
                self._record(leaves, structure, index, state.generators)
                # A capture runs no kernels, but a failed one may leave any state.
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
        """Capture a step on copies of the batch's tensors; give up captures if that fails.

        Args:
            leaves: the batch's tensors.
            structure: how the batch's tuples, lists and dicts hold them.
            index: the batch's number.
            generators: that the step may draw from.
        """
        # Clones keep memory formats.
        self._inputs = [leaf.clone() for leaf in leaves]

        def step() -> None:
            # The capture has another batch number than the eager step, so that a result which
            # depends on the number shows when the two are compared.
            self._output = self._eager(tree_unflatten(self._inputs, structure), index + 1)

        try:
            with self._tensor_rates():
                self._replay = record(step, generators)
        except USER_CODE_ERRORS as error:
            # The end of a failed capture raises an error of its own. The cause is the error before
            # it, which Python keeps as its context.
            cause: BaseException = error
            while True:
                if is_out_of_memory(cause):
                    raise cause from None
                if cause.__context__ is None:
                    break
                cause = cause.__context__
            self._give_up(f"{type(cause).__name__} in its capture: {first_line(cause)}")

    def _compare(self, state: DeviceState, before: Copy, after: Copy, output: object) -> None:
        """Give up captures if the replay has had another result than the eager step.

        Args:
            state: as the replay has left it.
            before: the state before either.
            after: the state after the eager step.
            output: of the eager step.
        """
        taken_loss = _loss(output)
        # The tolerance of a tensor goes by how much the step changed it. There is no loss before
        # the step: 0 stands for it, so that the tolerance goes by the size of the loss.
        different = first_difference(
            [*state.names, "the loss"],
            [*state.tensors, _loss(self._output)],
            [*after.tensors, taken_loss],
            [*before.tensors, torch.zeros_like(taken_loss)],
        )
        if different is not None:
            self._give_up(f"a replayed step differs from the step itself in {different}")

    def _give_up(self, reason: str) -> None:
        """Take all steps eagerly from here on, and warn why."""
        self.reason = reason
        self._replay = None
        self._output = None
        self._inputs = []
        warn_once(f"protocol.fast=graph: steps are not captured, as {reason}")


def _loss(output: object) -> Any:
    """Give the loss in what ``training_step`` returned; None where there is none."""
    if isinstance(output, Mapping):
        return output.get("loss")
    return output


def _fixed_options(group: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Give the options of a parameter group that a graph fixes, to be compared.

    A tensor is given by its identity, as a graph reads its value anew; other options by value.
    """
    options = list[tuple[str, Any]]()
    for name, value in group.items():
        if name in ("params", "lr"):
            continue
        fixed = id(value) if isinstance(value, Tensor) else value
        options.append((name, fixed))
    return options


def record(step: Callable[[], None], generators: Sequence[torch.Generator]) -> Callable[[], None]:
    """Capture a step that may draw from these generators, and return a function to replay it."""
    graph = torch.cuda.CUDAGraph()
    for generator in generators:
        graph.register_generator_state(generator)
    # The mode lets other threads allocate meanwhile, as that of a DataLoader does that pins its
    # batches.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        step()
    return graph.replay
