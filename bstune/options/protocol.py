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
    """Ratio of the steps of successive evaluations, near the target."""
    evaluation_share: PositiveShare
    """Most that evaluation near the target costs, as a share of training, in examples."""
    evaluation_cost: PositiveFinite
    """Cost of an evaluated example, in trained ones."""
    close_to_target: OverOne
    """Near: the target is predicted within this many times the steps so far."""
    micro_batch_size: Positive | None
    """Examples of a micro-batch, of which larger batches are accumulated; null: never."""
    warmup_steps: Count
    """First steps, left out of the seconds per step."""
    trial_seconds: PositiveSeconds | None
    """Wall time after which a trial has failed; null: none, 300 s for a preflight step."""
    divergence: PositiveFinite
    """Distance from the target, over that at the start, from which a trial has diverged."""
    noise_scale_every: Positive | None
    """Steps between measurements of the noise scale, a prior of B_crit; null: none."""
    fast: Fast
    """auto: bstune's lean loop where nothing differs; off: Lightning's; graph: auto, in CUDA
    graphs on CUDA."""
