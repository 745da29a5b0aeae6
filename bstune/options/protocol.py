"""``protocol``: what stays fixed in every trial."""

from bstune.options.values import (
    Count,
    Fast,
    OverOne,
    Positive,
    PositiveFinite,
    PositiveSeconds,
    PositiveShare,
    Section,
)


class ProtocolOptions(Section):
    """What stays fixed in every trial."""

    evaluation_ratio: OverOne
    """Near the target, ratio of the steps of successive evaluations."""
    evaluation_share: PositiveShare
    """Near the target, the most that evaluation costs, as a share of training."""
    evaluation_cost: PositiveFinite
    """Cost of an evaluated example, in trained ones."""
    close_to_target: OverOne
    """Near the target: it is predicted within so many times the steps so far."""
    micro_batch_size: Positive | None
    """Examples of the micro-batches from which larger batches are accumulated; null: none."""
    warmup_steps: Count
    """First steps that the seconds per step leave out."""
    trial_seconds: PositiveSeconds | None
    """Wall time after which a trial has failed; null: no limit."""
    divergence: PositiveFinite
    """Diverged: so many times as far from the target as at the start."""
    noise_scale_every: Positive | None
    """Steps between measurements of the noise scale; null: none."""
    fast: Fast
    """auto: bstune's lean loop where the result is the same; off: Lightning's loop; graph: steps
    as CUDA graphs."""
