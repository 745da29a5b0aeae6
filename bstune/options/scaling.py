"""``scaling``: the rule of the learning rate."""

from typing import Annotated

from pydantic import Field

from bstune.options.values import NUMBER, BatchSize, Node, PositiveFinite, Section


class ScalingOptions(Section):
    """The rule that gives the search its prior of the learning rate at each batch size."""

    batch_size: BatchSize
    """Batch size of a pair that the rule passes through."""
    lr: PositiveFinite
    """Learning rate of that pair."""
    noise_scale: PositiveFinite | None
    """Noise scale in examples, where the rule takes one."""
    beta2_half_life: PositiveFinite | None
    """Half-life of Adam's second moments in examples, which sets beta2; null: beta2 as given."""
    weight_decay_half_life: PositiveFinite | None
    """Half-life of a weight without gradient in examples, which sets weight decay; null: as
    given."""
    override_lr: bool
    """Set the trial's rate in the optimizers of a module that takes none."""
    lr_octaves_sigma: Annotated[float, Field(ge=0.001, le=30.0, allow_inf_nan=False), NUMBER]
    """Optuna's samplers search three times so many octaves on each side of the rule."""
    lr_octaves: Annotated[float, Field(ge=0.001, le=100.0, allow_inf_nan=False), NUMBER]
    """bstune's own sampler searches so many octaves on each side of the rule."""
    rule: Node
    """The function that gives the learning rate of a batch size."""

    @property
    def whole_batch_size(self) -> int:
        """The pair's batch size in whole examples, at which the user's own configuration runs."""
        return round(self.batch_size)
