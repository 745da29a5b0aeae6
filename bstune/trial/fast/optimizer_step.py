"""A step of an optimizer without torch's label around it, and the removal of gradients.

By torch's private members.

Around each step torch puts a label for its profiler and the calls of hooks, which take longer than
a small step. Where the profiler runs, or the step is not torch's own, the optimizer's functions are
called as they are.
"""

from collections.abc import Callable
from typing import Any

from torch._C._autograd import _profiler_enabled
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

# The code that torch puts around the step of a class.
LABELLED = Optimizer.profile_hook_step(lambda: None).__code__


class OptimizerStep:
    """Takes the steps of an optimizer.

    At each of them it may be another one, or have another step.

    Attributes:
        optimizer: of the step that is being taken.
    """

    def __init__(self) -> None:
        self.optimizer: Any = None
        # The optimizer's attribute ``step`` when its step was last looked for.
        self._step_of_object: Any = None
        # The step of the optimizer's class as it was written; None: its own ``step`` is called.
        self._unlabelled: Callable[..., Any] | None = None

    def take(self, optimizer: Any, closure: Callable[[], object]) -> None:
        """Take a step, which calls the closure.

        Some do so several times, or change the weights before.
        """
        step_of_object = vars(optimizer).get("step")
        if optimizer is not self.optimizer or step_of_object is not self._step_of_object:
            self.optimizer = optimizer
            self._step_of_object = step_of_object
            self._unlabelled = _without_label(optimizer)
        if self._unlabelled is None:
            optimizer.step(closure=closure)
        else:
            _step_without_label(self._unlabelled, optimizer, closure=closure)


def _without_label(optimizer: Optimizer) -> Callable[..., Any] | None:
    """Find the step of an optimizer's class as it was written.

    None where it may be another one that is called.
    """
    of_class = type(optimizer).step
    of_object = vars(optimizer).get("step")
    if getattr(of_class, "__code__", None) is not LABELLED:
        return None
    if of_object is not None:
        # A schedule puts a function that notes the call into the optimizer itself; another one may
        # do anything.
        is_schedules = hasattr(of_object, "_wrapped_by_lr_sched")
        if not is_schedules or getattr(of_object, "__wrapped__", None) is not of_class:
            return None
        optimizer._opt_called = True  # type: ignore[attr-defined]
    step: Callable[..., Any] = of_class.__wrapped__  # type: ignore[attr-defined]
    return step


def _step_without_label(step: Callable[..., Any], optimizer: Optimizer, **options: Any) -> None:
    """Take a step and call its hooks as torch does, but for its label.

    The label is there while torch's profiler runs.
    """
    if optimizer._optimizer_step_pre_hooks or _global_optimizer_pre_hooks or _profiler_enabled():
        optimizer.step(**options)
        return
    step(optimizer, **options)
    for hooks in (optimizer._optimizer_step_post_hooks, _global_optimizer_post_hooks):
        for hook in hooks.values():
            hook(optimizer, (optimizer,), options)


def remove_gradients(optimizer: Optimizer) -> None:
    """Call ``zero_grad``; where it is torch's, do what that does without its label."""
    is_torchs = type(optimizer).zero_grad is Optimizer.zero_grad
    if not is_torchs or "zero_grad" in vars(optimizer) or _profiler_enabled():
        optimizer.zero_grad()
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None


def has_step_hooks(optimizer: Optimizer) -> bool:
    """Tell whether somebody is called before or after an optimizer's steps, or those of all."""
    hooks = (
        optimizer._optimizer_step_pre_hooks,
        optimizer._optimizer_step_post_hooks,
        _global_optimizer_pre_hooks,
        _global_optimizer_post_hooks,
    )
    return any(hooks)
