"""How a job runs its trials: the same for a workload that is trained and for one that is answered from a table."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from bstune.core.files import Output
from bstune.core.records import TrialProtocol, TrialResult, TrialSpec
from bstune.core.search_space import Space
from bstune.study.plan import SearchBudget

if TYPE_CHECKING:
    from bstune.hardware.survey import Survey
    from bstune.trial.workers import Workers

Train = Callable[[TrialSpec, Output | None, TrialResult | None], TrialResult]
Test = Callable[[TrialSpec, Output], Mapping[str, float]]


@dataclass(frozen=True)
class Runner:
    """What a job needs of its workload, whatever its kind.

    Args:
        train: runs one trial and returns its record. It takes the spec; the folder for what it leaves besides, None
            for nothing; and the record of the trial that it continues, None if it starts afresh.
        test: returns the metrics of a trial that reached the target on the test set, from what it left in the folder;
            empty where there is nothing to test.
        step_time: seconds per step over batch size: good enough for an estimate.
        resumable: whether a stopped trial can be continued, by number, from what it left in the folder.
        most_seconds: of a study in which every trial runs to its end.
        device: name of the device, as in the trials' records.
        place: where trials run, in words.
        versions: of the packages that results depend on.
        identity: flat settings that, beside the config's own, must not change while a study goes on.
        notes: what the plan says besides.
        caveats: what the report says below its table.
        gradient_bytes: that an all-reduce takes; None where nothing is trained.
        train_examples: length of the training data; None where nothing is trained.
        stops: whether a trial may be stopped early; one whose schedule ends with the budget may not.
        batch_sizes: smallest and largest that the hardware takes, within the range that was asked for; None: all of it.
        survey: what the hardware allows; None where it was not surveyed.
        workers: opens the processes that train the trials of a search side by side; None: they run here, one by one.
    """

    train: Train
    test: Test
    resumable: Callable[[int, Output], bool]
    step_time: Callable[[float], float]
    max_seconds: float
    device: str
    place: str
    versions: Mapping[str, str]
    identity: Mapping[str, Any]
    notes: tuple[str, ...] = ()
    caveats: tuple[str, ...] = ()
    gradient_bytes: int | None = None
    train_examples: int | None = None
    stops: bool = True
    batch_sizes: tuple[int, int] | None = None
    survey: "Survey | None" = None
    workers: "Callable[[], Workers] | None" = None


Open = Callable[[DictConfig, SearchBudget, Space, TrialProtocol, TrialSpec | None, Callable[[str], None]], Runner]


@dataclass(frozen=True)
class Settled:
    """What is known of a workload before its data are read.

    Args:
        config: the composed config, device and precision settled.
        trainer: arguments of the Lightning Trainer; empty where nothing is trained.
        lr_range: the learning rates that can be had.
        open: reads the data, makes the last checks and returns the runner. It takes the config, the plan, the space,
            the protocol, the one trial to run instead of a study, if any, and what is told, in lines, what takes long.
    """

    config: DictConfig
    open: Open
    trainer: Mapping[str, Any] = field(default_factory=dict)
    lr_range: tuple[float, float] = (0.0, float("inf"))
