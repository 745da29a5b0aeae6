"""Whole training steps as replays of one CUDA graph: forward, backward and the optimizer's step in a single launch.

A graph repeats the same kernels on the same memory, with the numbers that the host gave them when it was captured. So
a step is captured only where nothing differs from one step to the next but the batch, which is copied to where the
graph reads it, the learning rates, which lie in tensors, and the device's random numbers, which a graph draws on. What
else may differ is looked for in the first steps, which run as they are, and a first replay is compared with the step
that it repeats. Where anything differs, all steps are eager, and ``reason`` says why.

Tests on a CPU record the operators of a step in a graph's place.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils._pytree import tree_flatten, tree_unflatten

from bstune.core.records import FastMode
from bstune.trial.batches import random_state
from bstune.trial.fast.compile import USER_CODE_ERRORS, first_line, is_out_of_memory, warn_once
from bstune.trial.fast.watch import Number, watching

Step = Callable[[Any, int], Any]
DEVICES = ("cuda",)
# The first makes the optimizer's state, cuDNN's choices and compiled code; the second is watched for what it changes on
# the host, as is the third, which the first replay repeats.
WARM_STEPS = 3
# A step that changes so often, each time before as many replays, stays eager: a momentum with a schedule is one.
MAX_CAPTURES, WORTH = 4, 32
# A replay may differ from its step by this share of the step's change of a tensor: kernels that add up in no fixed
# order do by some tenths of a percent in half precision, of which Muon's orthogonalisation may make some percent.
TOLERANCE = 0.05
ROUNDING = 1e-6  # and by this share of the tensor itself
GLOBAL_HOOKS = (_global_optimizer_pre_hooks, _global_optimizer_post_hooks)
PLAIN = (bool, int, float, complex, str, bytes, type(None))


def captures(mode: FastMode, device: torch.device) -> bool:
    """Return whether steps on this device are captured, if they can be."""
    return mode == "graph" and device.type in DEVICES


def eager_steps(mode: FastMode, device: torch.device) -> int:
    """Return how many steps of a trial come before the first replay."""
    return WARM_STEPS if captures(mode, device) else 0


class CapturedSteps:
    """Takes the steps of one fit: eagerly first, then by replays of a graph, if a step can be captured.

    Args:
        module: set up for the fit, on its device.
        optimizer: its only one. Where a step can be captured it becomes fused or capturable. Its groups' ``lr`` stay
            the numbers that schedules see; within a step they are tensors.
        eager: called with a batch on the device and its number, takes a whole step, the gradients' removal before it
            included, and returns what ``training_step`` did; it may be called in a capture.
        around: makes a context for what is no step of the training, as one that stops a clock.

    A call takes a step on a batch and returns what ``training_step`` did. Where memory runs out in a capture, the error
    is raised, as that of an eager step is.
    """

    def __init__(
        self,
        module: LightningModule,
        optimizer: Optimizer,
        eager: Step,
        around: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self.reason: str | None = (
            None  # why steps are eager; None as long as they are, or may be, captured
        )
        self._module, self._optimizer, self._eager, self._around = module, optimizer, eager, around
        self._rates: list[Tensor] = []
        self._filled: list[float] = []  # what the rates hold
        self._signature: Any = None  # of the latest step
        self._parameters: list[Tensor] = []
        self._places: list[int] = []  # of parameters and buffers, when they were last looked at
        self._warm = self._changes = (
            0  # eager steps of this signature, and signatures so far that were not worth it
        )
        self._replays = 0  # of this signature
        self._host: dict[str, list[Any]] = {}  # as it was when the step was captured
        self._looks = True  # whether the module is looked at before the next step
        self._replay: Callable[[], None] | None = None
        self._inputs: list[Tensor] = []
        self._output: Any = None
        reason = make_capturable(optimizer, module.device)
        if reason is not None:
            self._give_up(reason)
            return
        self._rates = [torch.zeros((), device=module.device) for _ in optimizer.param_groups]
        self._filled = [0.0] * len(self._rates)

    def __call__(self, batch: Any, index: int) -> Any:
        """Take a step on the batch of this number."""
        if self.reason is not None:
            return self._eager(batch, index)
        leaves, structure = tree_flatten(batch)
        if not self._fits(structure, leaves):
            return self._eager(batch, index)
        self._fill_rates()
        if self._replay is not None:
            _copy(self._inputs, leaves)
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
        """Before the next step, look whether the module is as it was: hooks of an epoch or an evaluation have run."""
        self._looks = True

    def _fits(self, structure: object, leaves: Sequence[Any]) -> bool:
        """Begin anew where what a graph fixes is no longer as it was: shapes, places, the optimizer's options."""
        other = next((type(leaf).__name__ for leaf in leaves if not isinstance(leaf, Tensor)), None)
        if other is not None:
            self._give_up(f"a batch holds more than tensors ({other})")
            return False
        groups = [
            [
                (name, id(v) if isinstance(v, Tensor) else v)
                for name, v in group.items()
                if name not in ("params", "lr")
            ]
            for group in self._optimizer.param_groups
        ]
        batch = [(leaf.shape, leaf.stride(), leaf.dtype, leaf.device) for leaf in leaves]
        if self._looks:
            self._look()
        frozen = [
            parameter.requires_grad for parameter in self._parameters
        ]  # a schedule may freeze some at any step
        signature = structure, batch, groups, frozen, self._places
        if signature != self._signature:
            self._changes = 1 if self._replays >= WORTH else self._changes + 1
            self._signature, self._replay, self._output, self._warm, self._replays = (
                signature,
                None,
                None,
                0,
                0,
            )
        if self._changes > MAX_CAPTURES:
            self._give_up(
                "the module, the optimizer's options, tensors' places or shapes change again and again"
            )
        return self._changes <= MAX_CAPTURES

    def _look(self) -> None:
        self._looks = False
        self._parameters = list(self._module.parameters())
        self._places = [
            tensor.data_ptr() for tensor in (*self._parameters, *self._module.buffers())
        ]
        if self._replay is not None:
            host = _host_state(self._module, self._optimizer)
            self._signature = self._signature if _first_change(self._host, host) is None else None

    def _fill_rates(self) -> None:
        # One small kernel a group whose rate has changed, and none while it is constant: unlike a table of all rates
        # this holds for any schedule. Filling waits for nothing.
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

    def _watched(self, batch: Any, index: int) -> Any:
        """Take an eager step, and give up if its result depends on the host's state, or changes it."""
        asked: list[str] = []
        before, random = (
            _host_state(self._module, self._optimizer),
            _host_random(self._module.device),
        )
        with self._tensor_rates(), watching(self._module, asked):
            output = self._eager(batch, Number(index, asked))
        self._host = _host_state(self._module, self._optimizer)
        changed = _first_change(before, self._host)
        loss = output.get("loss") if isinstance(output, Mapping) else output
        if asked:
            self._give_up(f"training_step uses {asked[0]}, which differs from step to step")
        elif changed is not None:
            self._give_up(f"training_step changes {changed} on the host")
        elif not _same(random, _host_random(self._module.device)):
            self._give_up("training_step draws random numbers on the host")
        elif not isinstance(loss, Tensor):
            self._give_up("training_step returns no loss")
        return output

    def _capture(self, batch: Any, index: int, leaves: Sequence[Tensor], structure: Any) -> Any:
        """Take an eager step, capture it, and compare a replay with it; a step may take its batch apart."""
        state = _State(self._module, self._optimizer)
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
                state.restore(
                    before
                )  # a capture runs nothing, but one that fails may leave anything
                if self._replay is not None:
                    self._replay()
                    self._compare(state, before, after, output)
            finally:
                state.restore(after)
        return output

    def _record(
        self,
        leaves: Sequence[Tensor],
        structure: Any,
        index: int,
        generators: Sequence[torch.Generator],
    ) -> None:
        self._inputs = [leaf.clone() for leaf in leaves]  # keeps memory formats

        def step() -> None:
            # Another number than the step's own, so that a result that goes by it shows when the two are compared.
            self._output = self._eager(tree_unflatten(self._inputs, structure), index + 1)

        try:
            with self._tensor_rates():
                self._replay = record(step, generators)
        except USER_CODE_ERRORS as error:
            # Ending a capture that has failed raises an error of its own, on top of the one that says why.
            errors: list[BaseException] = [error]
            while (inner := errors[-1].__context__) is not None:
                errors.append(inner)
            for one in errors:
                if is_out_of_memory(one):
                    raise one from None
            self._give_up(f"{type(errors[-1]).__name__} in its capture: {first_line(errors[-1])}")

    def _compare(self, state: "_State", before: "_Copy", after: "_Copy", output: Any) -> None:
        losses = [
            one["loss"] if isinstance(one, Mapping) else one for one in (output, self._output)
        ]
        names = [*state.names, "the loss"]
        replayed, taken = [*state.tensors, losses[1]], [*after.tensors, losses[0]]
        different = _first_difference(
            names, replayed, taken, [*before.tensors, torch.zeros_like(losses[0])]
        )
        if different is not None:
            self._give_up(f"a replayed step differs from the step itself in {different}")

    def _give_up(self, reason: str) -> None:
        self.reason = reason
        self._replay, self._output, self._inputs = None, None, []
        warn_once(f"protocol.fast=graph: steps are not captured, as {reason}")


def record(step: Callable[[], None], generators: Sequence[torch.Generator]) -> Callable[[], None]:
    """Capture a step that draws on these generators, and return what replays it."""
    graph = torch.cuda.CUDAGraph()
    for generator in generators:
        graph.register_generator_state(generator)
    # Of this thread alone: another one may allocate meanwhile, as that of a DataLoader that pins its batches.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        step()
    return graph.replay


def make_capturable(optimizer: Optimizer, device: torch.device) -> str | None:
    """Let an optimizer read its rates and counts on the device; return why it cannot, None where it can.

    Of torch's optimizers a group's ``fused`` and ``capturable`` are set. One of another kind says that it can by
    ``capturable = True`` on its class: its step then takes an ``lr`` that is a tensor, and changes nothing on the host.
    """
    name = type(optimizer).__name__
    kinds = (
        optimizer._optimizer_step_pre_hooks,
        optimizer._optimizer_step_post_hooks,
        *GLOBAL_HOOKS,
    )
    if any(kinds):
        return f"the steps of {name} have hooks, which a graph does not call"
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            return f"a learning rate of {name} is a tensor already"
        if group.get("differentiable"):
            return f"{name} is differentiable"
        if not {"fused", "capturable"} & group.keys() and not getattr(
            type(optimizer), "capturable", False
        ):
            return f"the steps of {name} are neither fused nor capturable"
    for group in optimizer.param_groups:
        if "fused" in group:
            group |= {"fused": True, "foreach": False}
        if "capturable" in group:
            group["capturable"] = device.type != "cpu"  # where torch refuses it
        for parameter in group["params"]:
            count = optimizer.state[parameter].get("step") if parameter in optimizer.state else None
            if isinstance(count, Tensor):  # of a resumed trial
                optimizer.state[parameter]["step"] = count.to(parameter.device, torch.float32)
    return None


class _Copy:
    """The values of a state at one time."""

    def __init__(self, tensors: Sequence[Tensor], generators: Sequence[torch.Generator]) -> None:
        self.tensors = [tensor.detach().clone() for tensor in tensors]
        self.generators = [generator.get_state() for generator in generators]


class _State:
    """What a step changes on the device: weights, buffers, the optimizer's state and generators."""

    def __init__(self, module: LightningModule, optimizer: Optimizer) -> None:
        own = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        of_parameters = [
            (i, key, value)
            for i, s in enumerate(optimizer.state.values())
            for key, value in s.items()
        ]
        own |= {
            f"{key} of the optimizer's parameter {i}": v
            for i, key, v in of_parameters
            if isinstance(v, Tensor)
        }
        self.names, self.tensors = list(own), [tensor.detach() for tensor in own.values()]
        self.generators = _generators(module)

    def copied(self) -> _Copy:
        return _Copy(self.tensors, self.generators)

    @torch.no_grad()
    def restore(self, copy: _Copy) -> None:
        _copy(self.tensors, copy.tensors)
        for generator, state in zip(self.generators, copy.generators, strict=True):
            generator.set_state(state)


def _generators(module: LightningModule) -> list[torch.Generator]:
    """Return the generators of the module's device that a step may draw from: torch's own, and the module's."""
    device = module.device
    values = [value for part in module.modules() for value in vars(part).values()]
    found = [
        value
        for value in values
        if isinstance(value, torch.Generator) and value.device.type == device.type
    ]
    default = (
        torch.default_generator
        if device.type == "cpu"
        else torch.cuda.default_generators[device.index or 0]
    )
    return [default, *dict.fromkeys(found)]


def _first_difference(
    names: Sequence[str],
    replayed: Sequence[Tensor],
    taken: Sequence[Tensor],
    before: Sequence[Tensor],
) -> str | None:
    """Return the name of the first tensor that a replay changed otherwise than the step; the device is waited for."""
    for name, a, b, start in zip(names, replayed, taken, before, strict=True):
        if not b.is_floating_point():
            if not torch.equal(a, b):
                return name
            continue
        wide = [x.detach().to(torch.promote_types(x.dtype, torch.float32)) for x in (a, b, start)]
        error, change, size = (
            (x.norm().item()) for x in (wide[0] - wide[1], wide[1] - wide[2], wide[1])
        )
        if math.isfinite(size) and not error <= TOLERANCE * change + ROUNDING * size:
            return name
    return None


def _copy(to: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    if to:
        torch._foreach_copy_(list(to), list(values))


def _host_state(module: LightningModule, optimizer: Optimizer) -> dict[str, list[Any]]:
    """Return what modules and the optimizer's state hold, by name, containers by their contents."""
    state = {
        f"{name}.{key}" if name else key: _contents(value)
        for name, part in module.named_modules()
        for key, value in vars(part).items()
    }
    for i, values in enumerate(optimizer.state.values()):
        state |= {
            f"{key} of the optimizer's parameter {i}": _contents(value)
            for key, value in values.items()
        }
    return state


def _first_change(before: Mapping[str, Any], after: Mapping[str, Any]) -> str | None:
    return next(
        (name for name in {**before, **after} if not _same(before.get(name), after.get(name))), None
    )


def _contents(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return [*value, *value.values()]
    return list(value) if isinstance(value, list | tuple | set) else [value]


def _same(before: Any, after: Any) -> bool:
    """Return whether two lists hold the same objects, or numbers and texts that are equal."""
    if before is None or after is None or len(before) != len(after):
        return False
    pairs = zip(before, after, strict=True)
    return all(a is b or (type(a) is type(b) and isinstance(a, PLAIN) and a == b) for a, b in pairs)


def _host_random(device: torch.device) -> list[str]:
    """Return the states of the generators of Python, numpy and torch on the host, unless that is the device."""
    state = random_state()
    numpy = [part.tolist() if isinstance(part, Tensor) else part for part in state["numpy"]]
    torchs = [] if device.type == "cpu" else state["torch"].tolist()
    return [repr(state["python"]), repr(numpy), repr(torchs)]
