"""Compiles a trial's steps with ``torch.compile``, outside of its training clock.

Where that fails, the steps run eagerly.

``training_step`` is compiled as a whole, the loss with the model, where it logs nothing and asks
the Trainer nothing (the Trainer's answers change from step to step). Otherwise, and in evaluation,
modules are compiled in place: those with parameters that the step calls from outside of any other
module. That is the LightningModule where the step calls ``self(x)``, and the model where it calls
``self.model(x)``. The number of examples is a variable of the code, as far as the module allows it,
so that another batch size takes the same code from torch's cache on the disk.

Neither of the two ways serves all steps.

* A whole step that asks the Trainer gives the right result, but is compiled within the clock. Of
  seven modules at three batch sizes, 20 steps each, one that reads ``self.global_step`` was
  compiled 8 more times, which is torch's limit, after which it runs eagerly without a word. One
  that asks for ``batch_idx % 7`` was compiled once more. The modules that the steps call took one
  graph in training, one in evaluation, and none within the clock. (With a backend without machine
  code; ``self.log`` was a break of the graph.)
* A whole step that asks nothing saves time in its loss. With a vocabulary of 8,192, forward and
  backward of 1,024 tokens took 296 ms, with the modules alone 356, eagerly 367. With a vocabulary
  of 65 it was 164, 163 and 170. (Medians of 8, CPU time on one core of a busy machine, torch 2.13.)
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils._pytree import tree_leaves

from bstune.core.clock import Phase, TrialClock
from bstune.core.errors import ConfigError
from bstune.core.records import CUDA_GRAPH_MODES, NOT_COMPILED
from bstune.trial.devices.errors import USER_CODE_ERRORS, first_line, is_out_of_memory, warn_once
from bstune.trial.fast.watch import watching_uses
from bstune.trial.lightning.installed import LightningModule, Trainer
from bstune.trial.noise_scale import (
    gradients_of,
    loss_scale,
    optimized_parameters,
    step_arguments,
    untouched,
)

# Passes of a step at a new shape: with CUDA graphs the first is not recorded, the second is, and
# the third is like all that follow.
PASSES = 3
# How often torch may compile one piece of code in a trial: for each batch shape, in training and in
# evaluation.
RECOMPILE_LIMIT = 64
# Attributes of a module where compiled code is put.
STEP = "training_step"
CALL = "_compiled_call_impl"
# Attributes that maybe_mark_dynamic sets in a tensor; torch has no function that removes them.
MARKS = ("_dynamo_weak_dynamic_indices", "_has_dynamo_dim_marking")


class Compiling:
    """Compiles a trial's module with torch.compile for each new shape of its batches.

    It does so ahead of the step or the evaluation that needs it, and its seconds count as start-up.
    The passes that make torch compile leave the training as it was. Where compiling fails, the
    trial goes on eagerly. (The CUDA graphs of ``reduce-overhead`` and ``max-autotune`` are not
    tested: there was no such device.)

    Args:
        mode: of torch.compile; None: nothing is compiled.
        clock: the trial's.

    Attributes:
        failed: why compiling has failed; None: it has not.
    """

    def __init__(self, mode: str | None, clock: TrialClock) -> None:
        self.failed: str | None = None
        self._mode = mode
        self._clock = clock
        # With CUDA graphs, code for any number of examples would save nothing: a graph is recorded
        # for each number.
        self._code = CompiledCode(mode, any_length=mode not in CUDA_GRAPH_MODES)
        # Whether the training step may be compiled as a whole.
        self._may_be_whole = True
        # The cases that are compiled: the stage, the shapes of a batch, and which parameters are
        # trained.
        self._compiled_cases: set[tuple[str, tuple[torch.Size, ...], tuple[bool, ...]]] = set()
        self._compiled_stages: set[str] = set()
        # The graphs that torch compiled in this process before the trial, and since then ahead of
        # its steps, outside the clock. Any graph beyond this number was compiled within it.
        self._expected_graphs = compiled_graphs()

    def before_training_step(
        self, trainer: Trainer, module: LightningModule, batch: object, batch_idx: int
    ) -> None:
        """Compile the forward and the backward pass, if this is the first batch of its shape.

        That counts as start-up, and not as training.
        """
        if not self._is_new("training", module, batch):
            return
        if not module.automatic_optimization:
            raise ConfigError(
                f"compile={self._mode} warms a step up before the clock runs, but "
                f"{type(module).__name__} steps its optimizers itself (manual optimization): set "
                "compile=null"
            )
        arguments = step_arguments(module.training_step, batch, batch_idx)
        forward = partial(trainer.strategy.training_step, *arguments)
        parameters = optimized_parameters(trainer, module)
        scale = loss_scale(trainer)

        # The warm-up runs the step at several batch numbers. A step that depends on its number is
        # compiled anew for each, which has to be seen before the clock runs.
        def step(batches_later: int) -> object:
            index = batch_idx + batches_later
            return gradients_of(trainer, module, parameters, batch, index, scale)

        with self._clock.interrupt_segment(Phase.STARTUP):
            self._warm_up("training", trainer, module, forward, step)
        if self._code.is_empty and self.failed is None:
            raise ConfigError(
                f"compile={self._mode} does not apply to {type(module).__name__}: its "
                "training_step calls no module with parameters, as self(x) or self.model(x) "
                "would: call one, or set compile=null"
            )

    def before_validation_step(
        self, trainer: Trainer, module: LightningModule, batch: object, batch_idx: int
    ) -> None:
        """Compile the forward pass of the evaluation, if this is the first batch of its shape.

        That counts as start-up, and not as evaluation.
        """
        if not self._is_new("validation", module, batch):
            return
        forward = partial(
            trainer.strategy.validation_step,
            *step_arguments(module.validation_step, batch, batch_idx),
        )
        self._clock.enter(Phase.STARTUP)
        # A pass of the evaluation needs no gradients, and has this batch's number each time.
        self._warm_up("validation", trainer, module, forward, lambda batches_later: forward())
        self._clock.enter(Phase.EVALUATION)

    def eagerly(self) -> AbstractContextManager[object]:
        """Make a context within which the module runs eagerly: no other shape is compiled there."""
        if self._mode is None:
            return nullcontext()
        eager: AbstractContextManager[object] = torch.compiler.set_stance("force_eager")
        return eager

    def end(self) -> None:
        """Make the module eager again; warn if torch compiled while the clock may have run."""
        if self._mode is None:
            return
        unexpected = compiled_graphs() - self._expected_graphs
        if unexpected and self.failed is None:
            plural = "s" * (unexpected > 1)
            times = f"{unexpected} more time{plural}"
            warn_once(
                f"torch compiled the module {times} in the course of its training or evaluation "
                "(something in it changes from step to step): the seconds may hold that"
            )
        self._code.undo()

    def _is_new(self, stage: str, module: LightningModule, batch: object) -> bool:
        """Whether a batch needs code that is not compiled yet; from here on it counts as compiled.

        ``stage`` is ``training`` or ``validation``.
        """
        if self._mode is None or self.failed is not None:
            return False
        # A step begins here, whether it compiles anything or not.
        self._let_graphs_overwrite_outputs()
        shapes = tuple(leaf.shape for leaf in tree_leaves(batch) if isinstance(leaf, Tensor))
        # Parameters that are frozen in the course of training, as a whitening's bias is, need other
        # code.
        trained = tuple(parameter.requires_grad for parameter in module.parameters())
        case = stage, shapes, trained
        is_new = case not in self._compiled_cases
        self._compiled_cases.add(case)
        return is_new

    def _let_graphs_overwrite_outputs(self) -> None:
        """Tell torch's CUDA graphs that they may overwrite what the last step's returned."""
        if self._mode in CUDA_GRAPH_MODES:
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]

    def _warm_up(
        self,
        stage: str,
        trainer: Trainer,
        module: LightningModule,
        forward: Callable[[], object],
        step: Callable[[int], object],
    ) -> None:
        """Run a step until all its code is compiled; an error ends the compiling, not the trial.

        Args:
            stage: ``training`` or ``validation``.
            trainer: of the trial.
            module: that is compiled.
            forward: runs the step's forward pass.
            step: runs the whole step; its argument is added to the number of the batch
                (``batch_idx``), so that what varies with the number is compiled for it.
        """
        before = compiled_graphs()
        called: list[nn.Module] = []

        def compile_and_run() -> None:
            nonlocal called
            uses: list[str] = []
            with self.eagerly(), untouched(trainer, module), watching_uses(module, uses):
                called = called_modules(module, forward)
            if not called:
                return
            # A step that uses values of the Trainer, which vary from step to step, is compiled
            # module by module and not as a whole. With accumulation each step varies: its loss is
            # weighted by the number of the micro-batch.
            varies = bool(uses) or trainer.accumulate_grad_batches > 1
            if stage == "training" and not varies and self._compile_step(trainer, module, step):
                return
            for part in called:
                self._code.compile_call(part)
            self._run_passes(trainer, module, step)

        error = error_of(compile_and_run)
        # Where code for any number of examples fails, code for each number is tried.
        if error is not None and self._code.any_length:
            self._fix_lengths()
            error = error_of(compile_and_run)
        if error is not None:
            self._fail(error)
        made = compiled_graphs() - before
        self._expected_graphs += made
        if made:
            self._compiled_stages.add(stage)
        elif called and self.failed is None and stage not in self._compiled_stages:
            self._fail("torch found nothing in the module that it can compile")

    def _compile_step(
        self, trainer: Trainer, module: LightningModule, step: Callable[[int], object]
    ) -> bool:
        """Compile the training step as a whole and run it, and say whether one compilation serves.

        Where torch compiles it anew for each batch number, the step is made eager again.

        ``step`` runs the step; its argument is added to the number of the batch.
        """
        if self._may_be_whole:
            self._code.compile_step(module)
            self._may_be_whole = self._run_passes(trainer, module, step) == 0
        if not self._may_be_whole:
            self._code.restore_step(module)
        return self._may_be_whole

    def _run_passes(
        self, trainer: Trainer, module: LightningModule, step: Callable[[int], object]
    ) -> int:
        """Run a step ``PASSES`` times, so that all its code is compiled.

        Gives the number of graphs that torch compiled after the first pass. It is 0 for a step that
        does not depend on the number of its batch.

        ``step`` runs the step; its argument is added to the number of the batch.
        """
        after_first = 0
        for batches_later in range(PASSES):
            self._let_graphs_overwrite_outputs()
            # Each batch shape is compiled anew, perhaps more often than torch allows by default.
            with (
                untouched(trainer, module),
                torch._dynamo.config.patch(recompile_limit=RECOMPILE_LIMIT),
            ):
                step(batches_later)
            if batches_later == 0:
                after_first = compiled_graphs()
        return compiled_graphs() - after_first

    def _fix_lengths(self) -> None:
        """Begin anew with code for fixed numbers of examples, as code for any number has failed.

        The user is not told of the failure, as the trial still compiles.
        """
        self._code.undo()
        self._code.any_length = False
        self._compiled_cases.clear()

    def _fail(self, reason: str) -> None:
        """End the compiling for a reason, and let the module run eagerly."""
        self.failed = f"{NOT_COMPILED}, as compile={self._mode} failed: {reason}"
        warn_once(
            f"compile={self._mode} fails, so the training is eager (compile=null leaves it out): "
            f"{reason}"
        )
        self._code.undo()


class CompiledCode:
    """Compiled code in the place of a module's own functions, until :meth:`undo`.

    Args:
        mode: of torch.compile; None is its default.
        any_length: whether one code serves any number of examples; else each number has its own.
    """

    def __init__(self, mode: str | None, any_length: bool = False) -> None:
        self.any_length = any_length
        self._mode = mode
        # The original function of each module and attribute that was replaced.
        self._replaced: dict[tuple[nn.Module, str], Any] = {}

    @property
    def is_empty(self) -> bool:
        """Whether nothing is compiled."""
        return not self._replaced

    def compile_step(self, module: LightningModule) -> None:
        """Compile a training step as a whole."""
        self._replace_by_compiled(module, STEP, module.training_step)

    def restore_step(self, module: LightningModule) -> None:
        """Make a training step eager again."""
        if (module, STEP) in self._replaced:
            setattr(module, STEP, self._replaced.pop((module, STEP)))

    def compile_call(self, part: nn.Module) -> None:
        """Compile a module's call in place: its forward pass with its hooks."""

        # nn.Module.compile would compile nothing in torch's own modules, such as a Sequential.
        def call(*args: object, **kwargs: object) -> object:
            return part._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]

        self._replace_by_compiled(part, CALL, call)

    def _replace_by_compiled(
        self, owner: nn.Module, name: str, function: Callable[..., Any]
    ) -> None:
        """Put a compiled ``function`` in the place of an attribute, unless that is compiled."""
        if (owner, name) not in self._replaced:
            self._replaced[owner, name] = getattr(owner, name)
            setattr(owner, name, _compiled(function, self._mode, self.any_length))

    def undo(self) -> None:
        """Put the original functions back, and have torch forget the code that it compiled.

        torch would keep the code for ever. Past its limit of recompilations it would run later
        trials eagerly without a word.
        """
        # Imported here, as it takes a second that only compiled trials need.
        from torch._inductor.codecache import PyCodeCache

        for (owner, name), original in self._replaced.items():
            setattr(owner, name, original)
        self._replaced.clear()
        torch.compiler.reset()
        # This drops the generated modules that torch keeps; their files stay. The finalizers that
        # torch's guards hang on classes such as Linear stay too: some 250 KiB for each trial of a
        # small network (tests/benchmarks/bench_flat_memory.py).
        PyCodeCache.cache_clear()


@contextmanager
def compiled(mode: str | None, module: nn.Module, loss: Callable[[], Tensor]) -> Iterator[None]:
    """Within the context, the modules that ``loss``, a forward pass, calls are compiled.

    Where compiling fails, they run eagerly, as in a trial. ``mode`` None compiles nothing.
    """
    if mode is None:
        yield
        return
    code = CompiledCode(mode)
    parts = called_modules(module, loss)

    def compile_and_run() -> None:
        for part in parts:
            code.compile_call(part)
        # torch compiles in the first passes, which must not fall into the context's body.
        for _ in range(PASSES):
            loss().backward()  # type: ignore[no-untyped-call]

    try:
        error = error_of(compile_and_run)
        if error is not None:
            warn_once(
                f"compile={mode} fails in the bare loop that trials are compared with: {error}"
            )
            code.undo()
        yield
    finally:
        code.undo()


def error_of(run: Callable[[], object]) -> str | None:
    """Run code that compiles; give the error of the module or the compiler in a line, or None.

    An error of memory that has run out is raised: it ends the trial.
    """
    try:
        run()
    except USER_CODE_ERRORS as error:
        # torch wraps the compiler's error in its own.
        innermost: BaseException = error
        inner: object = error
        while isinstance(inner, BaseException):
            innermost = inner
            inner = getattr(innermost, "inner_exception", None)
        if is_out_of_memory(innermost):
            raise innermost from None
        return f"{type(innermost).__name__}: {first_line(innermost)}"
    return None


def _compiled(
    function: Callable[..., Any], mode: str | None, any_length: bool
) -> Callable[..., Any]:
    """Compile a function; with ``any_length``, the code serves arguments of any length.

    The length is a tensor's size in dimension 0, the number of examples; other sizes are fixed.
    """
    compiled = torch.compile(function, mode=mode, dynamic=False)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        # While a step that calls this one is compiled as a whole, nothing can be marked.
        if not torch.compiler.is_compiling():
            for leaf in tree_leaves((args, kwargs)):
                if isinstance(leaf, Tensor):
                    _mark_length(leaf, any_length)
        return compiled(*args, **kwargs)

    return call


def _mark_length(tensor: Tensor, any_length: bool) -> None:
    """Mark a tensor so that code which is compiled with it serves any size of its dimension 0.

    Without ``any_length``, the mark of an earlier try is removed.
    """
    if not any_length:
        for name in MARKS:
            vars(tensor).pop(name, None)
    elif tensor.dim():
        # torch still fixes the length where the function needs that.
        torch._dynamo.maybe_mark_dynamic(tensor, 0)


def called_modules(module: nn.Module, run: Callable[[], object]) -> list[nn.Module]:
    """List the modules with parameters that ``run`` calls from outside of any other module.

    They are in the order of their first call. ``run`` is called once, to see that.
    """
    called: list[nn.Module] = []
    depth = 0

    def enter(part: nn.Module, arguments: object) -> None:
        nonlocal depth
        if depth == 0 and part not in called and next(part.parameters(), None) is not None:
            called.append(part)
        depth += 1

    def leave(part: nn.Module, arguments: object, output: object) -> None:
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
    """Count the graphs that torch has compiled in this process so far."""
    return int(counters["stats"]["unique_graphs"])
