"""What stays fixed in every trial of a study, whether it is trained or answered from a table."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig

from bstune.cadence import Cadence
from bstune.errors import ConfigError
from bstune.records import Target

COMPILE_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
CUDA_GRAPH_MODES = ("reduce-overhead", "max-autotune")


@dataclass(frozen=True)
class Budget:
    """A trial ends without its target once ``steps`` steps are applied and ``examples`` examples are trained on."""

    steps: int
    examples: int

    def __post_init__(self) -> None:
        if self.steps < 1 or self.examples < 1:
            raise ConfigError(
                f"budget.steps and budget.examples must be at least 1, but got {self.steps} and {self.examples}"
            )

    def last_step(self, batch_size: int) -> int:
        """Return the steps after which both are spent: the frontier's own shape, flat in steps, then in examples."""
        return max(self.steps, math.ceil(self.examples / batch_size))


def budget_of(config: DictConfig) -> Budget:
    """Return the budget that a config states.

    Raises:
        ConfigError: for an impossible one.
    """
    return Budget(config.budget.steps, config.budget.examples)


@dataclass(frozen=True)
class Protocol:
    """What stays fixed in every trial of a study.

    Args:
        target: what to reach.
        budget: when to give up.
        cadence: when to evaluate.
        micro_batch_size: a larger batch is accumulated from micro-batches of this many examples; None: never.
        warmup_steps: steps in a segment of their own at the start, left out of tau(B).
        divergence: diverged is a trial whose metric is this many times as far from its goal as at the start.
        noise_scale_every: steps between measurements of the gradient noise scale; None: it is not measured.
        compile: the mode of ``torch.compile`` in which the module is compiled; None: it is not.
        trainer: further arguments of the Lightning Trainer, such as ``accelerator`` and ``precision``.

    Raises:
        ConfigError: if ``noise_scale_every`` is below 1; for a mode that there is not, or one that records CUDA graphs
            where gradients are accumulated.
    """

    target: Target
    budget: Budget
    cadence: Cadence
    micro_batch_size: int | None
    warmup_steps: int
    divergence: float
    noise_scale_every: int | None
    compile: str | None
    trainer: Mapping[str, Any]

    def __post_init__(self) -> None:
        if self.noise_scale_every is not None and self.noise_scale_every < 1:
            raise ConfigError(
                "protocol.noise_scale_every must be at least 1 step, or null to leave the noise scale unmeasured, but"
                f" got {self.noise_scale_every}"
            )
        if self.compile is not None and self.compile not in COMPILE_MODES:
            raise ConfigError(f"compile must be null or one of {', '.join(COMPILE_MODES)}, but got {self.compile!r}")
        on_cuda = self.trainer.get("accelerator") == "cuda"
        if on_cuda and self.compile in CUDA_GRAPH_MODES and self.micro_batch_size is not None:
            raise ConfigError(
                f"compile={self.compile} replays CUDA graphs, which overwrite the gradients of one micro-batch with the"
                " next one's: set compile=max-autotune-no-cudagraphs or default, or protocol.micro_batch_size=null"
            )
