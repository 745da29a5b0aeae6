"""``hardware``: the survey of what the machine allows, and the plan for several devices."""

from typing import Annotated

from pydantic import Field

from bstune.options.values import (
    NUMBER,
    BelowOne,
    Bytes,
    Few,
    HomePath,
    OneTo1000,
    PositiveFew,
    PositiveSeconds,
    PositiveShare,
    Section,
    SomeFew,
    WholeTo1000,
)


class RelativePrecision(Section):
    """Precision of the largest batch size that fits, as a share of it; 0: exact."""

    cpu: BelowOne
    """Precision of a CPU's ceiling, as a share of it; 0: exact."""
    cuda: BelowOne
    """Precision of a CUDA device's ceiling, as a share of it; 0: exact."""


class MemoryOptions(Section):
    """The probes for the largest batch size that fits."""

    limit: Bytes | None
    """Bytes that all processes share; null: the device's, or a CPU's free memory."""
    free_share: PositiveShare
    """Share that is used of a CPU's free memory."""
    relative: RelativePrecision
    """Precision of the ceiling."""
    steps: PositiveFew
    """Steps of a probe; the optimizer's state exists from the second on."""
    verify: WholeTo1000
    """Further probes that the ceiling has to pass."""
    probe_seconds: PositiveSeconds
    """Seconds after which a probe has failed."""


class StepTimeOptions(Section):
    """How seconds per step are measured."""

    rungs: Annotated[int, Field(ge=2, le=1000), NUMBER]
    """Batch sizes to time, evenly over log B, both ends included."""
    repeats: OneTo1000
    """Visits to each, in shuffled order."""
    visit_seconds: PositiveSeconds
    """Timed seconds of a visit, within min_steps and max_steps."""
    min_steps: PositiveFew
    """Fewest steps of a visit."""
    max_steps: PositiveFew
    """Most steps of a visit."""
    warmup_steps: Few
    """Untimed steps before a visit."""


class CeilingOptions(Section):
    """How the device's ceilings for the roofline are measured."""

    seconds: PositiveSeconds
    """Seconds for each kind of ceiling."""
    matrix_sizes: Annotated[
        list[Annotated[int, Field(ge=1, le=2**15), NUMBER]], Field(min_length=1, max_length=1000)
    ]
    """Sizes of square products, as far as time allows."""
    copy_bytes: Annotated[
        list[Annotated[int, Field(ge=1, le=2**36), NUMBER]], Field(min_length=1, max_length=1000)
    ]
    """Bytes of the copies that measure memory bandwidth."""
    traced_batch_sizes: SomeFew
    """Two batch sizes whose steps give FLOPs and bytes; batch normalisation needs 2 or more."""


class ScaleOutOptions(Section):
    """The plan for several devices, after a study."""

    devices: SomeFew
    """Numbers of devices to plan for."""
    candidate_ratio: Annotated[float, Field(ge=1.001, le=1e6, allow_inf_nan=False), NUMBER]
    """Largest ratio between neighbouring candidates of batch size per device."""


class HardwareOptions(Section):
    """The survey of what the hardware allows, before a study or alone."""

    enabled: bool
    """Survey before a study; false: search the range as it is given."""
    seconds: PositiveSeconds
    """Seconds of a survey, at most a tenth of search.wall_seconds; a quarter with
    budget.seconds."""
    refresh: bool
    """Measure again instead of reading the cache."""
    cache: HomePath
    """Folder of the surveys that are kept."""
    memory: MemoryOptions
    """The largest batch size that fits."""
    step_time: StepTimeOptions
    """Seconds per step."""
    ceilings: CeilingOptions
    """The ceilings of the device itself."""
    scale_out: ScaleOutOptions
    """The plan for several devices."""
