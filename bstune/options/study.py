"""Every option of a study: its sections, and the checks of one against another."""

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator

from bstune.core.records import CompileMode
from bstune.options.budget import TrialBudgetOptions
from bstune.options.data import DataOptions
from bstune.options.hardware import HardwareOptions
from bstune.options.lookup import Lookup, lookup_of
from bstune.options.mlflow import MlflowOptions
from bstune.options.prior import PriorOptions
from bstune.options.protocol import ProtocolOptions
from bstune.options.sampler import check_sampler
from bstune.options.scaling import ScalingOptions
from bstune.options.search import SearchOptions
from bstune.options.trial import TrialOptions
from bstune.options.values import (
    MOST_THREADS,
    NUMBER,
    HomePath,
    Name,
    Node,
    Precision,
    Section,
    Seed,
    Text,
    auto_or_count,
)
from bstune.options.workload import (
    GivenWorkload,
    ReplayedWorkload,
    TrainedWorkload,
    WorkloadOptions,
)


class StudyOptions(Section):
    """Every option of a study, checked."""

    study: Name
    """Name of the study; the same name and settings continue it."""
    seed: Seed
    """Seed of the study, from which those of its trials follow."""
    output: HomePath
    """Folder of the study's files."""
    storage: HomePath
    """Optuna's storage: URL of SQLite, PostgreSQL or a gRPC proxy."""
    device: Text
    """cpu, cuda, or auto: CUDA where there is one."""
    devices: Annotated[int, Field(ge=1, le=1024), NUMBER]
    """Devices that share each batch by DDP; on a CPU, processes."""
    precision: Precision
    """Precision of the Trainer; auto: bf16-mixed on CUDA, else 32-true."""
    threads: Annotated[
        Literal["auto"] | Annotated[int, Field(ge=1, le=MOST_THREADS)],
        BeforeValidator(auto_or_count),
    ]
    """Threads of torch on a CPU; auto: OMP_NUM_THREADS, or by a survey one, half or all."""
    seconds_of: Literal["auto", "trainer", "lean"]
    """Loop whose steps are timed: lean (bstune's own) or trainer (Lightning's); auto: trainer for
    your modules."""
    compile: CompileMode | None
    """Mode of torch.compile, which needs larger hardware.seconds and hardware.memory.probe_seconds;
    null: eager."""
    quick: bool = False
    """Take some 120 s, unless search.wall_seconds is given."""
    debug: bool
    """Show a traceback instead of a plain message."""
    workload: WorkloadOptions
    """What is trained, and what is to be reached."""
    budget: TrialBudgetOptions
    """When one trial gives up."""
    scaling: ScalingOptions
    """The rule of the learning rate."""
    prior: PriorOptions
    """The prior of the posterior."""
    protocol: ProtocolOptions
    """What stays fixed in every trial."""
    trial: TrialOptions
    """One trial in place of a study."""
    data: DataOptions
    """Data sets."""
    trainer: Node
    """Further arguments of Lightning's Trainer."""
    hardware: HardwareOptions
    """The survey."""
    mlflow: MlflowOptions
    """Tracking."""
    sampler: Node
    """An optuna.samplers.BaseSampler and its arguments."""
    search: SearchOptions
    """The search; last, as its check reads the others."""

    @field_validator("sampler")
    @classmethod
    def _has_numbers_in_range(cls, sampler: Node, info: ValidationInfo) -> Node:
        """Refuse numbers of a sampler that are out of their range."""
        check_sampler(sampler, lookup_of(info))
        return sampler

    @field_validator("search")
    @classmethod
    def _goes_with_the_rest(cls, search: SearchOptions, info: ValidationInfo) -> SearchOptions:
        """Refuse options of the search that do not go with those of other sections.

        A section that was refused itself is None here.
        """
        protocol = info.data.get("protocol")
        workload = info.data.get("workload")
        budget = info.data.get("budget")
        if budget is not None and budget.seconds is not None and search.objective != "loss":
            raise ValueError(
                f"budget.seconds={budget.seconds:g} is of search.objective=loss, but got "
                f"search.objective={search.objective}: a trial for a target ends by budget.steps "
                "and budget.examples"
            )
        if protocol is not None:
            _check_own_process(search, protocol)
        if workload is not None:
            _check_tune(search, workload, lookup_of(info))
            trial = info.data.get("trial")
            hardware = info.data.get("hardware")
            if trial is not None and hardware is not None:
                _check_workers(search, workload, trial, hardware)
        return search


class TrainedOptions(StudyOptions):
    """The options of a study whose trials are trained."""

    workload: TrainedWorkload
    """What is trained, and what is to be reached."""


class ReplayedOptions(StudyOptions):
    """The options of a study whose trials are answered from a table."""

    workload: ReplayedWorkload
    """What is replayed, and what is to be reached."""


class GivenOptions(StudyOptions):
    """The options of a study whose trials train Python objects."""

    workload: GivenWorkload
    """What is trained, and what is to be reached."""


OPTION_NAMES = frozenset(StudyOptions.model_fields)


def kind_of_options(workload: object) -> type[StudyOptions]:
    """Choose the class of options by a workload's keys: replayed, given in Python, or trained."""
    keys = set(workload) if isinstance(workload, Mapping) else set()
    if "table" in keys:
        return ReplayedOptions
    if "given_module" in keys:
        return GivenOptions
    return TrainedOptions


def _check_own_process(search: SearchOptions, protocol: ProtocolOptions) -> None:
    """Refuse a time limit of trials that run in this process, which cannot end them."""
    if search.workers == 0 and protocol.trial_seconds is not None:
        raise ValueError(
            f"search.workers=0 runs trials in this process, which cannot end one after "
            f"protocol.trial_seconds={protocol.trial_seconds:g}: use search.workers=1, or "
            "protocol.trial_seconds=null"
        )


def _check_tune(search: SearchOptions, workload: WorkloadOptions, lookup: Lookup) -> None:
    """Refuse names in ``search.tune`` that are no tunable, stand twice, or set no number."""
    for name in search.tune:
        named = f"search.tune names {name!r}"
        if name not in workload.tunable:
            listed = ", ".join(workload.tunable) or "nothing"
            instead = ""
            # The horizon, the step at which a trial's schedule ends, is searched but is no tunable.
            if name == "horizon":
                instead = "; the search chooses each trial's horizon without it"
            raise ValueError(
                f"{named}, but the workload {workload.name} lists {listed} under "
                f"workload.tunable{instead}"
            )
        if search.tune.count(name) > 1:
            raise ValueError(f"{named} twice")
        if isinstance(workload, GivenWorkload):
            # The arguments of a Python object do not stand in the config.
            continue
        key = workload.tunable[name].key
        value = lookup.value_at(key)
        # It is null where the part that it tunes is off.
        if type(value) not in (int, float, type(None)):
            raise ValueError(
                f"workload.tunable.{name}.key={key} must name a number of the config, or null, "
                f"but got {value} there"
            )


def _check_workers(
    search: SearchOptions,
    workload: WorkloadOptions,
    trial: TrialOptions,
    hardware: HardwareOptions,
) -> None:
    """Refuse several trials side by side where none is trained, or no survey times the steps."""
    # With trial.batch_size a single trial is trained by itself, without a search.
    if search.workers <= 1 or trial.batch_size is not None:
        return
    reason = None
    if isinstance(workload, ReplayedWorkload):
        reason = f"workload {workload.name} is answered from recorded runs, which need no training"
    elif not hardware.enabled:
        # Trials slow each other down.
        reason = "seconds per step are the survey's, measured alone: it needs hardware.enabled=true"
    if reason is not None:
        raise ValueError(f"search.workers={search.workers}: {reason}; or use search.workers=1")
