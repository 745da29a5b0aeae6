"""Makes an optimizer's steps fit for a capture: it reads rates and step counts on the device."""

import torch
from torch import Tensor
from torch.optim import Optimizer

from bstune.trial.fast.optimizer_step import has_step_hooks


def make_capturable(optimizer: Optimizer, device: torch.device) -> str | None:
    """Let an optimizer read its learning rates and step counts on the device, as a CUDA graph must.

    The options ``fused`` and ``capturable`` of torch's optimizers are set. An optimizer of another
    kind says by ``capturable = True`` on its class that its step takes an ``lr`` that is a tensor,
    and changes nothing on the host.

    Returns:
        Why its steps cannot be captured; None where they can.
    """
    name = type(optimizer).__name__
    if has_step_hooks(optimizer):
        return f"the steps of {name} have hooks, which a graph does not call"
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            return f"a learning rate of {name} is a tensor already"
        if group.get("differentiable"):
            return f"{name} is differentiable"
        has_options = "fused" in group or "capturable" in group
        if not has_options and not getattr(type(optimizer), "capturable", False):
            return f"the steps of {name} are neither fused nor capturable"
    for group in optimizer.param_groups:
        # torch refuses an optimizer that is both.
        if "fused" in group:
            group |= {"fused": True, "foreach": False}
        # On a CPU torch refuses the option.
        if "capturable" in group:
            group["capturable"] = device.type != "cpu"
        for parameter in group["params"]:
            if parameter not in optimizer.state:
                continue
            # A resumed trial has counts already, which may lie on the host.
            count = optimizer.state[parameter].get("step")
            if isinstance(count, Tensor):
                optimizer.state[parameter]["step"] = count.to(parameter.device, torch.float32)
    return None
