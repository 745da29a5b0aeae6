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
    """Configurations to try, over all runs of the command."""
    seconds: PositiveSeconds | None
    """Training seconds of all trials together, after which no trial begins; null: no limit."""
    wall_seconds: PositiveSeconds | None
    """Wall time of all runs of the command that began a trial, together; null: no limit."""
    precision: OverOne | None
    """Ends the search once B_crit's 90% interval is narrower than this factor; null: never."""
    least_gain: PositiveFinite | None
    """With objective=loss, ends the search once so little is to be gained, in standard deviations
    over seeds; null: never."""
    replicates: WholeTo1000
    """Fresh seeds on which a winner runs again."""
    candidates: OneTo1000
    """Most configurations that run on fresh seeds."""
    baseline: bool
    """Run the reference pair as trial 0, which the answer's gain needs."""
    tune: list[Text]
    """Further hyper-parameters to search, by their names under workload.tunable."""
    workers: WholeTo1000
    """Trials side by side, each in its own process; 0: in this process, to debug."""
    lease_seconds: Annotated[float, Field(ge=0.1, le=1e6, allow_inf_nan=False), NUMBER]
    """Seconds of a process's silence after which others run its trials again."""
    stratified: Share
    """Under samplers that stop no trial, share of trials spread evenly over log B."""
    batch_size: SearchedBatchSizes
    """The range of the search."""
