"""Takes the step of an optimizer without torch's label for its profiler, and removes gradients.

Around each step torch puts the label and the calls of hooks, which take longer than a small step.
Where the profiler runs, or the step is not torch's own, the optimizer's functions are called as
they are. The functions here use private members of torch.
"""

from collections.abc import Callable
from typing import Any

from torch._C._autograd import _profiler_enabled
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

# The code that torch puts around the step of a class.
LABELLED = Optimizer.profile_hook_step(lambda: None).__code__


class OptimizerStep:
    """Takes optimizers' steps, where it can without the label that torch puts around each.

    The label is for torch's profiler, and takes longer than a small step. Whether an optimizer's
    step can go without it is found out once.

    Attributes:
        optimizer: the last one that took a step; None before.
    """

    def __init__(self) -> None:
        self.optimizer: Any = None
        # The function ``step`` in the optimizer object itself at its last step; None: it has none.
        self._step_of_object: Any = None
        # The step of the optimizer's class without torch's label; None: ``step`` itself is called.
        self._unlabelled: Callable[..., Any] | None = None

    def take(self, optimizer: Any, closure: Callable[[], object]) -> None:
        """Take a step of an optimizer, which calls the closure: mostly once, and at its start."""
        # A function in the object itself, such as a schedule's, replaces the step of its class.
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
    """Find the step of an optimizer's class as it was written, without torch's label.

    The label is a ``record_function`` for torch's profiler around each step. None where torch has
    put no label there, or a call of ``step`` may lead to another function.
    """
    of_class = type(optimizer).step
    of_object = vars(optimizer).get("step")
    if getattr(of_class, "__code__", None) is not LABELLED:
        return None
    if of_object is not None:
        # A schedule of torch puts a function that notes the call into the optimizer object. Any
        # other function there may do anything.
        is_of_schedule = hasattr(of_object, "_wrapped_by_lr_sched")
        if not is_of_schedule or getattr(of_object, "__wrapped__", None) is not of_class:
            return None
        # The class's step goes past that function, so what it notes is set here, once for all.
        optimizer._opt_called = True  # type: ignore[attr-defined]
    step: Callable[..., Any] = of_class.__wrapped__  # type: ignore[attr-defined]
    return step


def _step_without_label(step: Callable[..., Any], optimizer: Optimizer, **options: Any) -> None:
    """Take a step and call its hooks as torch does, but without the label for its profiler.

    Where hooks come before the step, or torch's profiler runs, torch's own function is called.
    """
    if optimizer._optimizer_step_pre_hooks or _global_optimizer_pre_hooks or _profiler_enabled():
        optimizer.step(**options)
        return
    step(optimizer, **options)
    for hooks in (optimizer._optimizer_step_post_hooks, _global_optimizer_post_hooks):
        for hook in hooks.values():
            hook(optimizer, (optimizer,), options)


def remove_gradients(optimizer: Optimizer) -> None:
    """Set the gradients of an optimizer's parameters to None.

    It does what torch's ``zero_grad`` does, without the label for torch's profiler, which takes
    time. An optimizer with a ``zero_grad`` of its own is called.
    """
    is_torchs = type(optimizer).zero_grad is Optimizer.zero_grad
    if not is_torchs or "zero_grad" in vars(optimizer) or _profiler_enabled():
        optimizer.zero_grad()
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None


def has_step_hooks(optimizer: Optimizer) -> bool:
    """Whether hooks are called before or after the steps of this optimizer, or of all."""
    hooks = (
        optimizer._optimizer_step_pre_hooks,
        optimizer._optimizer_step_post_hooks,
        _global_optimizer_pre_hooks,
        _global_optimizer_post_hooks,
    )
    return any(hooks)
