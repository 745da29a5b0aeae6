"""``torch.compile`` of what a trial's steps call, outside of its training clock, with a fall-back to eager.

What is compiled is ``training_step`` as a whole, the loss with the model, where it logs nothing and asks the Trainer
nothing: its answers change from step to step. Else, and in evaluation, what is compiled, in place, are the modules with
parameters that the step calls from outside of any other module: the LightningModule where it calls ``self(x)``, the
model where ``self.model(x)``. The number of examples is a variable of the code, as far as the module allows it, so that
another batch size takes the same code from torch's cache on the disk.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils._pytree import tree_leaves

from bstune.core.clock import Phase, TrialClock
from bstune.core.errors import ConfigError
from bstune.core.records import CUDA_GRAPH_MODES
from bstune.trial.devices.errors import USER_CODE_ERRORS, first_line, is_out_of_memory, warn_once
from bstune.trial.fast.watch import WatchedNumber, watching
from bstune.trial.noise_scale import (
    gradients_of,
    loss_scale,
    optimized_parameters,
    step_arguments,
    untouched,
)

# Of a new shape: with CUDA graphs the first is not recorded, the second is, the third is as all that follow.
PASSES = 3
# Of one piece of code, in a trial: by batch shape, in training and in evaluation.
RECOMPILE_LIMIT = 64
# What maybe_mark_dynamic sets of a tensor; torch has nothing that takes it back.
MARKS = ("_dynamo_weak_dynamic_indices", "_has_dynamo_dim_marking")


class Compiling:
    """Compiles a trial's module for each new shape of its batches, ahead of the step or the evaluation that needs it.

    It counts as start-up: the passes that make torch compile leave the training as it was. Where it fails, the trial
    goes on eagerly, and ``failed`` says why. Without a mode nothing is compiled.
    (The CUDA graphs of ``reduce-overhead`` and ``max-autotune`` are not tested: there was no such device.)
    """

    def __init__(self, mode: str | None, clock: TrialClock) -> None:
        self.failed: str | None = None
        self._mode = mode
        self._clock = clock
        self._modules: list[nn.Module] = []
        # The module with its training step as it was before that was compiled; None: it was not.
        self._step: tuple[LightningModule, Callable[..., Any]] | None = None
        # Whether the training step can be compiled as a whole.
        self._whole = True
        # Whether code holds for any number of examples; a graph is recorded for each number anyway.
        self._free = mode not in CUDA_GRAPH_MODES
        self._warm: set[tuple[str, tuple[torch.Size, ...], tuple[bool, ...]]] = set()
        self._compiled_stages: set[str] = set()
        self._expected = compiled_graphs()

    def before_training_step(
        self, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Compile forward and backward, if this is the first batch of its shape."""
        if not self._is_new("training", module, batch):
            return
        if not module.automatic_optimization:
            raise ConfigError(
                f"compile={self._mode} warms a step up before the clock runs, but {type(module).__name__} steps its"
                " optimizers itself (manual optimization): set compile=null"
            )
        asked: list[str] = []
        arguments = step_arguments(module.training_step, batch, WatchedNumber(batch_idx, asked))
        forward = partial(trainer.strategy.training_step, *arguments)
        parameters = optimized_parameters(trainer, module)
        scale = loss_scale(trainer)

        def step(later: int) -> object:
            return gradients_of(trainer, module, parameters, batch, batch_idx + later, scale)

        with self._clock.interrupt_segment(Phase.STARTUP):
            self._warm_up("training", trainer, module, forward, step, asked)
        if not self._modules and self._step is None and self.failed is None:
            raise ConfigError(
                f"compile={self._mode} does not apply to {type(module).__name__}: its training_step calls no module"
                " with parameters, as self(x) or self.model(x) would: call one, or set compile=null"
            )

    def before_validation_step(
        self, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Compile the forward pass of the evaluation, if this is the first batch of its shape."""
        if not self._is_new("validation", module, batch):
            return
        forward = partial(
            trainer.strategy.validation_step,
            *step_arguments(module.validation_step, batch, batch_idx),
        )
        self._clock.enter(Phase.STARTUP)
        self._warm_up("validation", trainer, module, forward, lambda later: forward(), [])
        self._clock.enter(Phase.EVALUATION)

    def eagerly(self) -> AbstractContextManager[object]:
        """Run what is inside without the compiled code, whose shapes it does not have."""
        return nullcontext() if self._mode is None else torch.compiler.set_stance("force_eager")

    def end(self) -> None:
        """Undo all of it, and warn if torch compiled in between, where the clock may have run."""
        if self._mode is None:
            return
        more = compiled_graphs() - self._expected
        if more and self.failed is None:
            times = f"{more} more time{'s' if more > 1 else ''}"
            warn_once(
                f"torch compiled the module {times} in the course of its training or evaluation (something in it"
                " changes from step to step): the seconds may hold that"
            )
        self._undo()

    def _undo(self) -> None:
        self._restore_step()
        undo(self._modules)

    def _restore_step(self) -> None:
        if self._step is not None:
            module, step = self._step
            module.training_step = step  # type: ignore[method-assign]
            self._step = None

    def _is_new(self, stage: str, module: LightningModule, batch: Any) -> bool:
        if self._mode is None or self.failed is not None:
            return False
        self._begin_step()
        shapes = tuple(leaf.shape for leaf in tree_leaves(batch) if isinstance(leaf, Tensor))
        # Where parameters are frozen in the course of training, as a whitening's bias is, the code is another one.
        key = stage, shapes, tuple(parameter.requires_grad for parameter in module.parameters())
        new = key not in self._warm
        self._warm.add(key)
        return new

    def _begin_step(self) -> None:
        # What the last step's graphs returned may be overwritten.
        if self._mode in CUDA_GRAPH_MODES:
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]

    def _warm_up(
        self,
        stage: str,
        trainer: Trainer,
        module: LightningModule,
        forward: Callable[[], object],
        step: Callable[[int], object],
        asked: list[str],
    ) -> None:
        """Run a step until all is compiled; an error ends the compiling, and not the trial.

        ``forward`` runs its forward pass, and ``step`` all of it, as if it came so many batches later.
        """
        before = compiled_graphs()
        called: list[nn.Module] = []
        for fail in (self._fix_lengths, self._fail) if self._free else (self._fail,):
            with failing(fail):
                with self.eagerly(), untouched(trainer, module), watching(module, asked):
                    called = called_modules(module, forward)
                if not called:
                    break
                if stage == "training" and self._compile_step(trainer, module, step, asked):
                    break
                self._compile_modules(called)
                self._passes(trainer, module, step)
                break
        made = compiled_graphs() - before
        self._expected += made
        if made:
            self._compiled_stages.add(stage)
        elif called and self.failed is None and stage not in self._compiled_stages:
            self._fail("torch found nothing in the module that it can compile")

    def _compile_modules(self, called: list[nn.Module]) -> None:
        for part in called:
            if part not in self._modules:
                self._modules.append(part)
                compile_in_place(part, self._mode, self._free)

    def _compile_step(
        self,
        trainer: Trainer,
        module: LightningModule,
        step: Callable[[int], object],
        asked: list[str],
    ) -> bool:
        """Compile the training step as a whole and run it; return whether that is possible."""
        # The weights of accumulated micro-batches go by their number.
        if not self._whole or asked or trainer.accumulate_grad_batches > 1:
            return False
        if self._step is None:
            self._step = module, module.training_step
            compiled = _compiled(module.training_step, self._mode, self._free)
            module.training_step = compiled  # type: ignore[method-assign]
        if self._passes(trainer, module, step):
            # It is compiled anew for each number of a batch.
            self._whole = False
            self._restore_step()
        return self._whole

    def _passes(
        self, trainer: Trainer, module: LightningModule, step: Callable[[int], object]
    ) -> int:
        """Run a step some times, and return how many graphs were compiled after the first time."""
        first = 0
        for later in range(PASSES):
            self._begin_step()
            with (
                untouched(trainer, module),
                torch._dynamo.config.patch(recompile_limit=RECOMPILE_LIMIT),
            ):
                step(later)
            first = first or compiled_graphs()
        return compiled_graphs() - first

    def _fix_lengths(self, reason: str) -> None:
        """Begin anew with code for fixed numbers of examples: a compiler may fail with others."""
        self._free = False
        self._warm.clear()
        self._undo()

    def _fail(self, reason: str) -> None:
        self.failed = f"trained eagerly, as compile={self._mode} failed: {reason}"
        warn_once(
            f"compile={self._mode} fails, so the training is eager (compile=null leaves it out): {reason}"
        )
        self._undo()


@contextmanager
def compiled(mode: str | None, module: nn.Module, loss: Callable[[], Tensor]) -> Iterator[None]:
    """Compile what ``loss``, a forward pass, calls of a module; where that fails, it runs eagerly, as a trial does."""
    if mode is None:
        yield
        return
    parts = called_modules(module, loss)

    def fail(reason: str) -> None:
        warn_once(f"compile={mode} fails in the bare loop that trials are compared with: {reason}")
        undo(parts)

    try:
        with failing(fail):
            for part in parts:
                compile_in_place(part, mode)
            for _ in range(PASSES):
                loss().backward()  # type: ignore[no-untyped-call]
        yield
    finally:
        undo(parts)


@contextmanager
def failing(fail: Callable[[str], None]) -> Iterator[None]:
    """Call ``fail`` with the reason where the module or the compiler raises an error, unless memory ran out."""
    try:
        yield
    except USER_CODE_ERRORS as error:
        # torch wraps the compiler's error in its own.
        innermost: BaseException = error
        while isinstance(inner := getattr(innermost, "inner_exception", None), BaseException):
            innermost = inner
        if is_out_of_memory(innermost):
            raise innermost from None
        fail(f"{type(innermost).__name__}: {first_line(innermost)}")


def compile_in_place(part: nn.Module, mode: str | None, free: bool = False) -> None:
    """Compile a module's call, forward pass and hooks, with a ``free`` number of examples; its own names stay."""

    # Not nn.Module.compile: of one of torch's own modules, such as a Sequential, it compiles nothing.
    def call(*args: Any, **kwargs: Any) -> Any:
        return part._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]

    part._compiled_call_impl = _compiled(call, mode, free)


def _compiled(function: Callable[..., Any], mode: str | None, free: bool) -> Callable[..., Any]:
    """Return a compiled function; the length of the tensors that it is given may be free, all else is fixed."""
    compiled = torch.compile(function, mode=mode, dynamic=False)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        # A module that is compiled by itself may be called in a step that is: there nothing is marked.
        if not torch.compiler.is_compiling():
            for leaf in tree_leaves((args, kwargs)):
                if isinstance(leaf, Tensor):
                    _mark_length(leaf, free)
        return compiled(*args, **kwargs)

    return call


def _mark_length(tensor: Tensor, free: bool) -> None:
    """Let a tensor's length be free in the code that is compiled with it, or take the mark of an earlier try off it."""
    if not free:
        for name in MARKS:
            vars(tensor).pop(name, None)
    elif tensor.dim():
        # It stays fixed where the function needs that.
        torch._dynamo.maybe_mark_dynamic(tensor, 0)


def undo(parts: list[nn.Module]) -> None:
    """Make the compiled modules eager again, empty their list, and have torch forget what it compiled.

    torch would keep it for ever, and past its limit of recompilations run all else eagerly without a word.
    """
    # A second of imports that only compiled trials need.
    from torch._inductor.codecache import PyCodeCache

    for part in parts:
        part._compiled_call_impl = None
    parts.clear()
    torch.compiler.reset()
    # The generated modules, which torch keeps: their files stay. What is left are finalizers that torch's guards hang
    # on classes, such as Linear: some 250 KiB a trial of a small network (tests/benchmarks/bench_flat_memory.py).
    PyCodeCache.cache_clear()


def called_modules(module: nn.Module, run: Callable[[], object]) -> list[nn.Module]:
    """Return the modules with parameters that ``run`` calls from outside of any other, in the order of first call."""
    called: list[nn.Module] = []
    depth = 0

    def enter(part: nn.Module, arguments: Any) -> None:
        nonlocal depth
        if depth == 0 and part not in called and next(part.parameters(), None) is not None:
            called.append(part)
        depth += 1

    def leave(part: nn.Module, arguments: Any, output: Any) -> None:
        nonlocal depth
        depth -= 1

    parts = list(module.modules())
    handles = [part.register_forward_pre_hook(enter) for part in parts]
    handles += [part.register_forward_hook(leave, always_call=True) for part in parts]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return called


def compiled_graphs() -> int:
    """Return how many graphs torch has compiled in this process so far."""
    return int(counters["stats"]["unique_graphs"])
