"""``scaling``: the rule of the learning rate."""

from typing import Annotated

from pydantic import Field

from bstune.options.values import NUMBER, Node, PositiveFinite, Section


class ScalingOptions(Section):
    """The rule of the learning rate, which the search begins from."""

    batch_size: PositiveFinite
    """Batch size of the pair that the rule passes through."""
    lr: PositiveFinite
    """Learning rate of that pair."""
    noise_scale: PositiveFinite | None
    """Noise scale in examples, which the rules saturating and surge need."""
    beta2_half_life: PositiveFinite | None
    """Half-life of Adam's second moments, in examples: beta2 is 2^(-B / this); null: unchanged."""
    weight_decay_half_life: PositiveFinite | None
    """Half-life of a weight without gradient, in examples; null: weight decay is unchanged."""
    override_lr: bool
    """Set the trial's rate in the module's optimizers, whose own stands in configure_optimizers."""
    lr_octaves_sigma: Annotated[float, Field(ge=0.001, le=30.0, allow_inf_nan=False), NUMBER]
    """Sigma of delta = log2(lr / rule(B)), in octaves; Optuna's samplers search +-3 sigma."""
    lr_octaves: Annotated[float, Field(ge=0.001, le=100.0, allow_inf_nan=False), NUMBER]
    """Octaves on each side of the rule that bstune's own sampler searches."""
    rule: Node
    """The function that gives the learning rate of a batch size."""
