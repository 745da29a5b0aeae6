"""The view of an experiment that MLflow's pages open with: the studies' curves over each other, on log axes.

MLflow keeps a view that somebody shares as a tag of the experiment, which its pages read: the tag's name is the key in
the address, its value the pages' own state. That is no documented interface. Tried with mlflow 3.17.2: a later one that
does not know the tag shows its usual page. A view that is there stays, as people change it.
"""

import base64
import json
import zlib
from typing import Any

KEY = "bstune-1"  # a new one for a new view
TAG = f"mlflow.sharedViewState.{KEY}"
STUDIES = "tags.`bstune.kind` = 'study'"
# A chart each, whose title is the metric's name: over the batch size, which is the metric's step.
_CURVES = [f"curve/{name}_to_target{fit}" for fit in ("_fit", "") for name in ("steps", "time")]
_BARS = ("critical_batch/value", "best/batch_size", "best/seconds")
_COLUMNS = [f"critical_batch/{name}" for name in ("value", "low", "high")]
_COLUMNS += [
    f"best/{name}"
    for name in ("batch_size", "lr", "seconds", "seconds_low", "seconds_high", "reached_of_n")
]
_HIDDEN = ["curve/examples_to_target", "curve/examples_to_target_fit", "best/steps"]
_HIDDEN += [name for name in _COLUMNS if name not in _BARS]
_NAME, _CREATED = (
    "attributes.`Run Name`",
    "runDateAndNestInfo",
)  # of columns, as MLflow's pages call them


def page(experiment_id: str) -> str:
    """Return the page of an experiment's studies, relative to MLflow's address."""
    query = f"workflowType=machine_learning&compareRunsMode=CHART&viewStateShareKey={KEY}"
    return f"#/experiments/{experiment_id}/runs?{query}"


def saved_view(milliseconds: int) -> str:
    """Return the tag's value, made at this time."""
    state = base64.b64encode(zlib.compress(json.dumps(_state()).encode(), 9)).decode()
    times = {"createdAt": milliseconds, "updatedAt": milliseconds}
    return json.dumps(
        {"name": "bstune: curves over batch size", **times, "state": f"deflate;{state}"}
    )


def _state() -> dict[str, Any]:
    curves, answers = "bstune-curves", "bstune-answers"
    charts = [_line(f"{curves}-{i}", curves, metric) for i, metric in enumerate(_CURVES)]
    charts += [_bar(f"{answers}-{i}", answers, metric) for i, metric in enumerate(_BARS)]
    # MLflow adds a chart for each metric without one, unless it was deleted.
    charts += [
        _bar(f"hidden-{i}", answers, metric) | {"deleted": True} for i, metric in enumerate(_HIDDEN)
    ]
    sections = {curves: "Curves", answers: "Critical batch size, and what to use"}
    columns = [
        *(f"metrics.`{name}`" for name in _COLUMNS),
        *(f"params.`{name}`" for name in ("workload", "device")),
    ]
    columns += ["attributes.`Dataset`"]
    return {
        "searchFilter": STUDIES,
        "selectedColumns": columns,
        "columnOrder": [_NAME, *columns, _CREATED],
        "columnWidths": {_NAME: 320, **dict.fromkeys(columns, 140), _CREATED: 140},
        "runsHiddenMode": "FIRST_20_RUNS",
        "compareRunCharts": charts,
        "compareRunSections": [
            {
                "uuid": uuid,
                "name": name,
                "display": True,
                "isReordered": True,
                "columns": 2,
                "cardHeight": 360,
            }
            for uuid, name in sections.items()
        ],
        "isAccordionReordered": True,  # what MLflow adds, such as tests, comes last
        "hideEmptyCharts": True,
    }


def _chart(uuid: str, section: str) -> dict[str, Any]:
    return {
        "uuid": uuid,
        "metricSectionId": section,
        "deleted": False,
        "isGenerated": False,
        "runsCountToCompare": 20,
    }


def _line(uuid: str, section: str, metric: str) -> dict[str, Any]:
    return _chart(uuid, section) | {
        "type": "LINE",
        "metricKey": metric,
        "selectedMetricKeys": [metric],
        "xAxisKey": "step",
        "xAxisScaleType": "log",
        "scaleType": "log",
        "yAxisKey": "metric",
        "yAxisExpressions": [],
        "selectedXAxisMetricKey": "",
        "lineSmoothness": 0,
        "range": {},
        "ignoreOutliers": False,
        "displayPoints": True,
        "useGlobalXaxisKey": False,
        "useGlobalLineSmoothing": False,
    }


def _bar(uuid: str, section: str, metric: str) -> dict[str, Any]:
    return _chart(uuid, section) | {"type": "BAR", "metricKey": metric}
