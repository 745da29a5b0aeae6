"""``search``: how a study spends its trials."""

from typing import Annotated

from pydantic import Field

from bstune.core.objectives import Objective
from bstune.options.values import (
    NUMBER,
    OneTo1000,
    OverOne,
    Positive,
    PositiveFew,
    PositiveFinite,
    PositiveSeconds,
    Section,
    Share,
    Text,
    WholeTo1000,
)
from bstune.options.workload import BatchSizeRange


class SearchedBatchSizes(BatchSizeRange):
    """The batch sizes that a study searches."""

    multiple: Positive | None
    """Batch sizes are multiples of this; null: 8 under mixed precision on CUDA, else 1."""


class SearchOptions(Section):
    """How a study spends its trials."""

    objective: Objective
    """time (steps x seconds per step), steps, both (Pareto), curve (B_crit), or loss (best
    metric within a budget)."""
    trials: PositiveFew
    """Configurations to try, over all runs of the command; a continued one counts once."""
    seconds: PositiveSeconds | None
    """Training seconds, a sum over all trials and workers; trials under way finish; null: no
    limit."""
    wall_seconds: PositiveSeconds | None
    """Wall time of all runs of the command, reports included; null: no limit."""
    precision: OverOne | None
    """Factor that ends the search once B_crit's 90% interval is narrower; null: never."""
    least_gain: PositiveFinite | None
    """Expected gain, in scatters of a seed, at which objective=loss ends; null: never."""
    replicates: WholeTo1000
    """Fresh seeds on which a winner runs again, after the search."""
    candidates: OneTo1000
    """Most configurations that run again; the next one does if it is predicted to be better."""
    baseline: bool
    """Trial 0 runs the reference pair, over which the answer states the gain."""
    tune: list[Text]
    """Further hyper-parameters to search, by their names under workload.tunable."""
    workers: WholeTo1000
    """Trials side by side, each in its own process; 0: in this process, to debug."""
    lease_seconds: Annotated[float, Field(ge=0.1, le=1e6, allow_inf_nan=False), NUMBER]
    """Silence of another machine's process, in seconds, after which its trials run again."""
    stratified: Share
    """Share of trials whose B is spread evenly over log B, under samplers that stop none."""
    batch_size: SearchedBatchSizes
    """The range of the search."""
