"""A study's result: all that a finished study found, as one typed, frozen value.

    result = StudyResult.model_validate_json(path.read_text())
    result.critical_batch_size.value if result.critical_batch_size else None  # examples

It is built once, at the end of a study. ``curve.json`` is its dump and reads back to an equal
value; the console, the pages, the figures, comparisons and MLflow read its attributes.

A file has the parts of one topic, and :mod:`bstune.result.study_result` the whole; public names are
imported from here.

A folder may come from anybody. So every value has its type and its bounds here, no value is
converted to another type and an unknown key is refused: the code behind meets no text where it
counts, no negative batch size and no list of another length.
"""

# It is here for whoever reads a result's intervals, too.
from bstune.core.interval import INTERVAL_LEVEL, INTERVAL_QUANTILE
from bstune.result.asked import Reference, SearchPlan, Spend, WorkloadSize
from bstune.result.at_budget import (
    AsGoodAtBudget,
    AtBudget,
    BestSizeAtShare,
    BestSizeLater,
    FreshValues,
    GainAtBudget,
    PointAtBudget,
    SameAtBudget,
    SizeAtBudget,
    SizeGrowthOverBudget,
    SizeSeconds,
)
from bstune.result.baseline import BaselineResult, Gain
from bstune.result.critical import (
    DIMINISHING_RETURNS,
    MAXIMAL_DATA_PARALLELISM,
    PERFECT_SCALING,
    CriticalAtTarget,
    CriticalBatchSize,
    CriticalInterval,
    Growth,
    MeasuredNoiseScale,
    NextTrial,
    Regime,
    RegimeName,
)
from bstune.result.curve import Curve, CurvePoint
from bstune.result.devices import DevicePlan
from bstune.result.learning_rate import Exponent, LearningRateLaw
from bstune.result.scatter import SeedScatter, StepTiming
from bstune.result.study_result import SCHEMA_NUMBER, StudyResult
from bstune.result.unreached import AtEqualSeconds, ClosestTrial, Failures, SoFar, Unreached
from bstune.result.values import (
    LARGEST_COUNT,
    MAX_ITEMS,
    MAX_TEXT,
    BatchSize,
    Command,
    Count,
    FromOne,
    Hyperparameters,
    Items,
    Level,
    NotNegative,
    Part,
    Positive,
    Real,
    Share,
    Text,
    Whole,
    finite,
)
from bstune.result.winners import (
    WINNERS,
    AsGood,
    Best,
    Confirmed,
    Criterion,
    NotRunAgain,
    Reaching,
    SingleRun,
    UntoldOthers,
    WinnerName,
    WinnerResult,
)

__all__ = [
    "DIMINISHING_RETURNS",
    "INTERVAL_LEVEL",
    "INTERVAL_QUANTILE",
    "LARGEST_COUNT",
    "MAXIMAL_DATA_PARALLELISM",
    "MAX_ITEMS",
    "MAX_TEXT",
    "PERFECT_SCALING",
    "SCHEMA_NUMBER",
    "WINNERS",
    "AsGood",
    "AsGoodAtBudget",
    "AtBudget",
    "AtEqualSeconds",
    "BaselineResult",
    "BatchSize",
    "Best",
    "BestSizeAtShare",
    "BestSizeLater",
    "ClosestTrial",
    "Command",
    "Confirmed",
    "Count",
    "Criterion",
    "CriticalAtTarget",
    "CriticalBatchSize",
    "CriticalInterval",
    "Curve",
    "CurvePoint",
    "DevicePlan",
    "Exponent",
    "Failures",
    "FreshValues",
    "FromOne",
    "Gain",
    "GainAtBudget",
    "Growth",
    "Hyperparameters",
    "Items",
    "LearningRateLaw",
    "Level",
    "MeasuredNoiseScale",
    "NextTrial",
    "NotNegative",
    "NotRunAgain",
    "Part",
    "PointAtBudget",
    "Positive",
    "Reaching",
    "Real",
    "Reference",
    "Regime",
    "RegimeName",
    "SameAtBudget",
    "SearchPlan",
    "SeedScatter",
    "Share",
    "SingleRun",
    "SizeAtBudget",
    "SizeGrowthOverBudget",
    "SizeSeconds",
    "SoFar",
    "Spend",
    "StepTiming",
    "StudyResult",
    "Text",
    "Unreached",
    "UntoldOthers",
    "Whole",
    "WinnerName",
    "WinnerResult",
    "WorkloadSize",
    "finite",
]
