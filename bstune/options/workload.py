"""``workload``: what is trained or replayed, and what is to be reached."""

from collections.abc import Mapping
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, field_validator, model_validator

from bstune.core.records import Target
from bstune.core.search_space import BUDGET, HALF_LIVES, MODULE
from bstune.options.budget import WorkloadBudgetOptions
from bstune.options.values import (
    BatchSize,
    Fast,
    Finite,
    Node,
    Number,
    OneName,
    Positive,
    PositiveFew,
    PositiveFinite,
    Precision,
    Section,
    Text,
    auto_or_number,
)

# Targets that build several loaders, or none.
COLLECTIONS = ("builtins.dict", "builtins.list", "builtins.tuple")
# The message on a workload.data that builds loaders.
NO_DATA_MODULE = (
    "must build a LightningDataModule, but builds {got}: let _target_ be "
    "lightning.pytorch.LightningDataModule.from_datasets, with train_dataset and val_dataset; in "
    "Python, bstune.tune takes loaders as they are: data=(train, val)"
)


class ReferenceOptions(Section):
    """A pair that goes together."""

    batch_size: BatchSize
    """Batch size, in examples."""
    lr: PositiveFinite
    """Learning rate that goes with it."""


class BatchSizeRange(Section):
    """The batch sizes that are searched."""

    low: Positive
    """Smallest batch size, in examples."""
    high: Positive
    """Largest batch size, always a candidate itself."""

    @model_validator(mode="after")
    def _is_range(self) -> Self:
        """Refuse a range whose low end is above its high end."""
        _check_range(self.low, self.high)
        return self


class TargetOptions(Section):
    """The value of a metric that a trial is to reach; auto: the reference's within its budget."""

    metric: Text
    """Name of a metric that the module logs in validation."""
    value: Annotated[Finite | Literal["auto"], BeforeValidator(auto_or_number)]
    """Value to reach; auto: the one that the reference reaches within its budget."""
    mode: Literal["min", "max"]
    """min: less is better; max: more is."""
    bounds: list[Number] | None = None
    """Range of the metric by definition, such as [0, 1] for an error."""

    @model_validator(mode="after")
    def _can_be_reached(self) -> Self:
        """Refuse a target that no value within the bounds meets, or that each of them meets."""
        if self.bounds is None:
            return self
        if len(self.bounds) != 2 or not self.bounds[0] < self.bounds[1]:
            raise ValueError(f"bounds must be two increasing numbers, but got {self.bounds}")
        target = self.target
        # The value of an automatic target is not known yet.
        if target.is_open:
            return self
        low, high = self.bounds
        best = low if self.mode == "min" else high
        worst = high if self.mode == "min" else low
        if target.gap(best) > 0:
            raise ValueError(
                f"the target {target} cannot be reached: {target.metric} lies in {self.bounds}"
            )
        if target.gap(worst) <= 0:
            raise ValueError(
                f"the target {target} is met by every value in {self.bounds}: check mode and value"
            )
        return self

    @property
    def target(self) -> Target:
        """The target as trials have it: one that is never met if its value is ``auto``."""
        if self.value == "auto":
            return Target(self.metric, value=0.0, mode=self.mode).never_met
        return Target(self.metric, self.value, self.mode)


class TunableOptions(Section):
    """A further hyper-parameter that a search may tune."""

    key: Text
    """Dotted key of the number that it sets."""
    low: Finite
    """Smallest value."""
    high: Finite
    """Largest value."""
    log: bool = False
    """Search on a log scale."""
    integer: bool = False
    """Search whole numbers alone."""
    complement: bool = False
    """Search 1 - value, as for a momentum."""
    own: Finite | None = None
    """The user's own value; null: the one at the key."""

    @model_validator(mode="after")
    def _is_searchable(self) -> Self:
        """Refuse a key that no trial sets, and a range that cannot be searched on its scale."""
        ends_text = f"low={self.low:g} and high={self.high:g}"
        # The module and the budget are made anew for each trial, so a trial may set their parts. It
        # also sets the optimizer's options that stand for these half-lives.
        places = (MODULE, BUDGET)
        if not self.key.startswith(places) and self.key not in HALF_LIVES:
            half_lives = " or ".join(HALF_LIVES)
            raise ValueError(
                f"key must lie below workload.module or budget, or be {half_lives}, "
                f"but got {self.key!r}"
            )
        if not self.low < self.high:
            raise ValueError(f"low must be less than high, but got {ends_text}")
        if self.log and not self.complement and not self.low > 0:
            raise ValueError(f"low must be over 0 on a log scale, but got {ends_text}")
        if self.log and self.complement and not self.high < 1:
            raise ValueError(
                "high must be less than 1 where its complement is on a log scale, but got "
                f"{ends_text}"
            )
        if self.integer and self.complement:
            raise ValueError("a whole number has no complement: leave out complement or integer")
        if self.integer and not (self.low.is_integer() and self.high.is_integer()):
            raise ValueError(f"low and high of a whole number must be whole, but got {ends_text}")
        return self


class WorkloadOptions(Section):
    """What a workload states, whether it is trained or answered from a table."""

    name: OneName
    """Name of the workload."""
    precision: Precision
    """Precision, as the study's."""
    trials: PositiveFew
    """Configurations to try."""
    reference: ReferenceOptions
    """The batch size and learning rate that its user runs today."""
    batch_size: BatchSizeRange
    """The batch sizes that are worth a try."""
    budget: WorkloadBudgetOptions
    """When a trial gives up."""
    target: TargetOptions
    """What a trial is to reach."""
    evaluation_cost: PositiveFinite | None = Field(default=None, exclude=True)
    """Cost of an evaluated example, in trained ones."""
    fast: Fast | None = Field(default=None, exclude=True)
    """How steps are taken, as in protocol.fast."""
    tokens: Positive | None = Field(default=None, exclude=True)
    """Tokens of an example: answers then state batch sizes in tokens, too."""
    trainer: Node = {}  # noqa: RUF012 (pydantic copies it)
    """Further arguments of Lightning's Trainer."""
    tunable: dict[str, TunableOptions] = {}  # noqa: RUF012 (pydantic copies it)
    """Hyper-parameters that search.tune may name."""

    @field_validator("tunable")
    @classmethod
    def _has_free_names(cls, tunable: dict[str, TunableOptions]) -> dict[str, TunableOptions]:
        """Refuse names of tunables that a study's own parameters have."""
        taken = sorted({"batch_size", "lr", "delta"} & tunable.keys())
        if taken:
            raise ValueError(f"a study has {', '.join(taken)} already: choose another name")
        return tunable


class TrainedWorkload(WorkloadOptions):
    """A workload whose trials are trained: what its YAML states."""

    data: Node
    """Node that builds the LightningDataModule."""
    module: Node
    """Node that builds a trial's LightningModule."""

    @field_validator("data", mode="before")
    @classmethod
    def _is_no_loader(cls, data: object) -> object:
        """Refuse a node that builds loaders, by the name of its target.

        Other nodes that build no data module are known only once they are built.
        """
        target = ""
        if isinstance(data, Mapping):
            target = str(data.get("_target_") or data.get("class_path") or "")
        is_loader = target.rpartition(".")[2] == "DataLoader" or target in COLLECTIONS
        if is_loader or isinstance(data, list | tuple):
            raise ValueError(NO_DATA_MODULE.format(got=target or "a list"))
        return data


class ReplayedWorkload(WorkloadOptions):
    """A workload whose trials are answered from recorded runs."""

    table: Text
    """The name of a table that ships, or the path of one."""


class GivenWorkload(WorkloadOptions):
    """A workload of Python objects; what they are stands here in words alone."""

    given_data: Text
    """The class of the data module."""
    given_module: Text
    """The class of the modules."""
    given_trainer: Node
    """Further arguments of Lightning's Trainer, objects by their classes."""


def _check_range(low: float, high: float) -> None:
    """Refuse a low end above the high end."""
    if low > high:
        raise ValueError(f"low must be at most high, but got low={low:g} and high={high:g}")
