"""Learning-rate schedules: functions of an optimizer that make a scheduler, stepped each step."""

import math

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR


def warmup_then_constant(optimizer: Optimizer, warmup_examples: int, batch_size: int) -> LambdaLR:
    """Make a linear warm-up over ``warmup_examples`` examples, then a constant rate.

    Step t (from 0) uses lr min(1, (t + 1)/n) with n = ceil(warmup_examples/batch_size).
    """
    steps = max(1, math.ceil(warmup_examples / batch_size))
    return LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / steps))
