"""What tests share: options and recipes of a command line, and results.

Results are a whole one of any trials, and its parts with the values that a test does not care for.

result_of([make_trial()], critical=hand_critical(67.0, 41.0, 110.0), train="bstune +workload=digits")
"""

import json
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import pytest
from toolbox import best_of, leave_blank, made_table, make_trial

from bstune.__main__ import main
from bstune.config import read_yaml
from bstune.core.records import Budget, Merit, Target, TrialResult
from bstune.options import MlflowOptions, StudyOptions
from bstune.recipe import Recipe
from bstune.result import (
    AsGoodAtBudget,
    AtBudget,
    BaselineResult,
    Confirmed,
    CriticalBatchSize,
    Curve,
    DevicePlan,
    FreshValues,
    GainAtBudget,
    Growth,
    LearningRateLaw,
    MeasuredNoiseScale,
    Part,
    PointAtBudget,
    Reference,
    SearchPlan,
    SizeAtBudget,
    StudyResult,
)
from bstune.study.analysis.summary import Analysis, Asked, summarize
from bstune.study.planning.replicates import Winner
from bstune.study.prepare import compose_checked, prepare
from bstune.study.prepared import PreparedStudy
from bstune.trial.backend import TrialBackend

if TYPE_CHECKING:
    from bstune.core.records import TrialProtocol
    from bstune.trial.loop import Workload

TARGET = Target("val/error", 0.1, "min")
RULES = {"none": 0.0, "sqrt": 0.5, "linear": 1.0}
AnyPart = TypeVar("AnyPart", bound=Part)


@dataclass(frozen=True)
class SizeTiming:
    """The timings of a batch size: seconds of a step, median and quartiles over some visits."""

    batch_size: float
    seconds: float
    low: float
    high: float
    visits: int


def changed(part: AnyPart, **changes: Any) -> AnyPart:
    """A part with other values, checked as those of a file are."""
    return type(part).model_validate(
        {name: getattr(part, name) for name in type(part).model_fields} | changes
    )


def asked_of(target: Target = TARGET, budget: Budget | None = None, **changes: Any) -> Asked:
    """The question of a study for time."""
    values: Mapping[str, Any] = {
        "study": "s",
        "workload": "digits",
        "tokens": None,
        "objective": "time",
        "target": target,
        "budget": budget or Budget(100, 10_000),
        "search": SearchPlan(trials=32, replicates=3, limit=None),
        "reference": Reference(batch_size=256, lr=0.1, rule="sqrt"),
    }
    return Asked(**{**values, **changes})


def result_of(
    trials: Iterable[TrialResult],
    sought: Target = TARGET,
    budget: Budget | None = None,
    best: Mapping[Merit, Winner] | None = None,
    **changes: Any,
) -> StudyResult:
    """The result of a study of these trials, with other values of its attributes where they are given."""
    trials = list(trials)
    analysis = Analysis(
        critical=changes.pop("critical", None),
        best=best_of(trials) if best is None else best,
    )
    return changed(summarize(trials, asked_of(sought, budget), analysis), **changes)


def hand_critical(
    b_crit: float | None,
    low: float | None,
    high: float | None,
    smallest: int = 16,
    largest: int = 4096,
    **changes: Any,
) -> CriticalBatchSize:
    """A critical batch size with this interval, of S = 100 (1 + B_crit/B)."""
    values: Mapping[str, Any] = {
        "value": b_crit,
        "low": low,
        "high": high,
        "level": 0.9,
        "s_min": 100.0,
        # E_min = S_min B_crit.
        "e_min": None if b_crit is None else 100.0 * b_crit,
        "b_opt": None,
        "b_opt_low": None,
        "b_opt_high": None,
        # Where the slope of log S over log B is -0.9; at 9 B_crit it is -0.1.
        "perfect_scaling_below": None if b_crit is None else b_crit / 9,
        "maximal_data_parallelism_above": None if b_crit is None else b_crit * 9,
        "smallest": smallest,
        "largest": largest,
        "next_trials": (),
        "note": None,
    }
    return CriticalBatchSize(**{**values, **changes})


def make_law(**changes: Any) -> LearningRateLaw:
    """A law of the best learning rate over the batch size."""
    values: Mapping[str, Any] = {
        "exponent": 0.22,
        "low": 0.16,
        "high": 0.27,
        "prior_low": -1.0,
        "prior_high": 2.0,
        "start": 4.0,
        "end": 1024.0,
        "reached": 9,
        "octaves": 7.0,
        "identified": True,
        "rules": RULES,
        "below_b_crit": None,
        "level": 0.9,
    }
    return LearningRateLaw(**{**values, **changes})


def make_confirmed(reached: int = 3, runs: int = 3, **changes: Any) -> Confirmed:
    """The outcome of so many of a winner's runs on fresh seeds."""
    values: Mapping[str, Any] = {
        "seeds": tuple(range(runs)),
        "reached": reached,
        "runs": runs,
        "time_median": 2.0,
        "time_low": 1.0,
        "time_high": 3.0,
        "steps_median": 110.0,
        "steps_low": 90.0,
        "steps_high": 130.0,
    }
    return Confirmed(**{**values, **changes})


def hand_budget_point(
    batch_size: int, value: float, values: tuple[float, ...] | None = None, number: int = 0
) -> PointAtBudget:
    """A point of the objective loss, with these values of fresh seeds."""
    fresh = None
    if values is not None:
        mean = sum(values) / len(values)
        fresh = FreshValues(
            seeds=tuple(range(len(values))),
            values=values,
            mean=mean,
            low=min(values),
            high=max(values),
            level=0.9,
            broken=0,
        )
    return PointAtBudget(
        number=number,
        seed=0,
        batch_size=batch_size,
        lr=0.1,
        hyperparameters={},
        horizon=None,
        steps=100,
        value=value,
        predicted=value + 0.01,
        fresh=fresh,
    )


def hand_at_budget(**changes: Any) -> AtBudget:
    """The answer of a study of the objective loss."""
    values: Mapping[str, Any] = {
        "seconds": 60.0,
        "examples": None,
        "steps": None,
        "times": (),
        "winner": hand_budget_point(128, 0.28, (0.29, 0.3, 0.31), number=1),
        "baseline": hand_budget_point(64, 0.4, (0.41, 0.42, 0.43)),
        # 0.42 - 0.30, of the two means.
        "gain": GainAtBudget(difference=0.12, low=0.1, high=0.14, level=0.9, seeds=3, share=0.41),
        "as_good": AsGoodAtBudget(
            low=64, high=256, lr_low=0.1, lr_high=0.2, is_low_open=False, is_high_open=True
        ),
        "curve": tuple(
            SizeAtBudget(batch_size=size, value=value, low=value - 0.01, high=value + 0.01, lr=0.1)
            for size, value in ((32, 0.5), (64, 0.4), (128, 0.3), (256, 0.31))
        ),
        "growth": None,
        "same": None,
        "gain_left": 0.001,
        "gain_left_at_most": 0.002,
        "seed_scatter": 0.01,
    }
    return AtBudget(**{**values, **changes})


def make_curve(
    sizes: Sequence[float], steps: Sequence[float], spread: float = 0.1, **changes: Any
) -> Curve:
    """S*(B) at these batch sizes with an interval of so much on either side."""
    values: Mapping[str, Any] = {
        "batch_size": tuple(sizes),
        "steps": tuple(steps),
        "low": tuple((1.0 - spread) * value for value in steps),
        "high": tuple((1.0 + spread) * value for value in steps),
        "lr_low": (0.05,) * len(sizes),
        "lr": (0.1,) * len(sizes),
        "lr_high": (0.2,) * len(sizes),
        "seconds_per_step": None,
    }
    return Curve(**{**values, **changes})


def make_baseline(**changes: Any) -> BaselineResult:
    """A baseline that reached the target."""
    values: Mapping[str, Any] = {
        "number": 0,
        "batch_size": 16,
        "lr": 0.1,
        "hyperparameters": {},
        "status": "reached",
        "steps": 500,
        "seconds": 5.0,
        "value": 0.1,
        "telling_target": None,
        "runs": 0,
        "reached": 0,
    }
    return BaselineResult(**{**values, **changes})


def make_plan(devices: int, efficiency: float = 1.0) -> DevicePlan:
    """The plan for so many devices."""
    return DevicePlan(
        devices=devices,
        device_batch_size=1,
        batch_size=devices,
        lr=1.0,
        steps=1.0,
        seconds_per_step=1.0,
        seconds=1.0,
        seconds_low=1.0,
        seconds_high=1.0,
        device_seconds=float(devices),
        speed_up=devices * efficiency,
        efficiency=efficiency,
    )


def make_growth(**changes: Any) -> Growth:
    """A law of the critical batch size over the target: it grows as that gets harder."""
    values: Mapping[str, Any] = {
        "exponent": -4.31,
        "low": -5.0,
        "high": -3.5,
        "level": 0.9,
        "ideal": 0.0,
        "start": 2.6,
        "end": 2.0,
    }
    return Growth(**{**values, **changes})


def make_noise_scale(noise_scale: float | None) -> MeasuredNoiseScale:
    """A gradient noise scale with an interval from 91 to 110."""
    return MeasuredNoiseScale(
        noise_scale=noise_scale,
        low=91.0,
        high=110.0,
        level=0.9,
        trials=5,
        steps=100,
        undetermined=None if noise_scale is not None else "|G|^2 does not differ from 0",
    )


# The trials of a study that ended with fresh seeds of its two best points

LUCKY = make_trial(0, 64, 0.1, steps=400)
STEADY = make_trial(1, 256, 0.4, steps=420)


def fresh(number: int, steps: int = 440, of: TrialResult = LUCKY, **changes: Any) -> TrialResult:
    """A run of a trial's point on a fresh seed."""
    return make_trial(number, of.batch_size, of.lr, steps=steps, replicate_of=of.number, **changes)


# The lucky point is slower on fresh seeds than the steady one.
CONFIRMED = (
    LUCKY,
    STEADY,
    # It has the fewest steps, and takes the longest: 9 s.
    make_trial(2, 4096, 0.8, steps=90, tau=0.1),
    fresh(3, 440),
    fresh(4, 460),
    fresh(5, 480),
    fresh(6, 430, STEADY),
    fresh(7, 450, STEADY),
    fresh(8, 410, STEADY),
)


# Options and recipes


def options_of(*arguments: str) -> StudyOptions:
    """Compose the options alone."""
    return compose_checked(arguments).options


def mlflow_options(uri: str | None) -> MlflowOptions:
    """The default options of MLflow with another address; None: that of the environment."""
    values = {**read_yaml("config.yaml")["mlflow"], "uri": uri}
    return MlflowOptions.model_validate(values)


def options_and_recipe(*arguments: str) -> tuple[StudyOptions, Recipe]:
    """Compose the options and the recipe of a workload that is trained."""
    composed = compose_checked(arguments)
    return composed.options, composed.trained_recipe


def prepared_study(
    *arguments: str,
    backend: TrialBackend | None = None,
    elapsed: Callable[[], float] | None = None,
) -> PreparedStudy:
    """Prepare the study of a command line, on a backend of the test's own or the workload's.

    ``elapsed``: says how many seconds ago the command began; None: it begins now.
    """
    composed = compose_checked(arguments)
    return prepare(composed.options, composed.recipe, backend=backend, elapsed=elapsed)


def loaded(*arguments: str) -> "tuple[Workload, TrialProtocol]":
    """Load the workload and the protocol of a command line, as a process that trains does."""
    # 4 s, which tests of replayed studies need not wait for.
    from bstune.trial.workload import load_workload

    return load_workload(*options_and_recipe(*arguments))


def resolved(*arguments: str) -> tuple[StudyOptions, Recipe]:
    """Compose the options and the recipe for this machine's device and precision."""
    from bstune.trial.workload import resolve

    return resolve(*options_and_recipe(*arguments))


# Studies that ran once for several tests


def run_command(folder: Path, *arguments: str, drawn: bool = False) -> str:
    """Run a study in a folder, without a survey; it must end well. Give what it printed.

    Its pictures are those of a study where they are to be ``drawn``, else files without any.
    """
    printed = StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(printed):
        patch.chdir(folder)
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        patch.setattr(sys, "argv", ["bstune", *arguments, "hardware.enabled=false"])
        if not drawn:
            leave_blank(patch)
        status = main()
    assert status == 0, printed.getvalue()
    return printed.getvalue()


def moved_study(
    tmp_path_factory: pytest.TempPathFactory, *arguments: str, drawn: bool = False
) -> Path:
    """Run a study of the made table, and move its folder: what goes on there must not need the old place."""
    made = tmp_path_factory.mktemp("made")
    begun = made / "begun"
    begun.mkdir()
    made_table(begun)
    run_command(begun, *arguments, drawn=drawn)
    return begun.rename(made / "moved")


def copy_of_study(begun: Path, folder: Path, output: str) -> Path:
    """Copy the folder that a study ran in, which was moved from there; give the study's own folder.

    The same command continues the study in the copy: its storage is not where it was.
    """
    shutil.copytree(begun, folder, dirs_exist_ok=True)
    identity = folder / output / "study.json"
    place = {"storage": f"sqlite:///{folder}/bstune.db"}
    identity.write_text(json.dumps(json.loads(identity.read_text()) | place))
    return folder / output
