"""The view that MLflow's pages open with: the studies' curves over each other.

MLflow keeps a view that somebody shares as a tag of the experiment, which its pages read: the tag's
name ends in the key that is in the address, its value is the pages' own state. This is not
documented; it was tried with mlflow 3.17.2, and one that does not know the tag shows its usual
page. There the axis of a metric's steps is called "Step", whatever a step is: titles name it.
"""

import base64
import json
import zlib
from collections.abc import Iterable
from typing import Any

# A changed view needs a new key: people may have changed the one that is there.
KEY = "bstune-1"
NAME = f"mlflow.sharedViewState.{KEY}"
CURVES, ANSWERS = "bstune-curves", "bstune-answers"
# Titles of the line charts, by their metrics.
LINES = {
    "batch_size_curve/steps": "Steps to target, or best metric, over batch size",
    "batch_size_curve/seconds": "Seconds to target over batch size",
    "batch_size_curve/lr": "Best learning rate over batch size",
}
# Titles of the bar charts, by their metrics.
BARS = {
    "critical_batch_size/value": "Critical batch size",
    "speedup/value": "Times as fast as the baseline",
    "best/batch_size": "Best batch size",
    "best/seconds": "Seconds to target with it",
}
# Columns of the table, with widths in pixels at which their names are seen whole.
COLUMNS = {
    "tags.`bstune.verdict`": 120,
    "metrics.`best/batch_size`": 125,
    "metrics.`best/lr`": 100,
    "metrics.`best/seconds`": 110,
    "metrics.`speedup/value`": 115,
    "metrics.`speedup/low`": 110,
    "metrics.`speedup/high`": 115,
    "metrics.`critical_batch_size/value`": 175,
    "metrics.`critical_batch_size/low`": 170,
    "metrics.`critical_batch_size/high`": 175,
    "params.`workload`": 140,
    "params.`target`": 140,
    "params.`device`": 100,
}
RUN_NAME, CREATED = "attributes.`Run Name`", "runDateAndNestInfo"

State = dict[str, Any]
"""A part of the state of MLflow's pages, as JSON has it."""


def address(experiment_id: str) -> str:
    """Give the address of the view, relative to MLflow's.

    It states the type of workflow: without it mlflow 3.17.2 opens the pages of traces.
    """
    return (
        f"#/experiments/{experiment_id}/runs?workflowType=machine_learning"
        f"&compareRunsMode=CHART&viewStateShareKey={KEY}"
    )


def tag(filter_of_studies: str, metrics: Iterable[str], milliseconds: int) -> str:
    """Give the view as the value of tag ``NAME``, packed as MLflow's pages do.

    Args:
        filter_of_studies: MLflow's search for the runs of studies.
        metrics: all that a study may log beside its curve: MLflow adds a chart of each that was not
            deleted.
        milliseconds: now.
    """
    charts = [_line(metric, title) for metric, title in LINES.items()]
    charts += [_bar(metric, title) for metric, title in BARS.items()]
    charts += [_bar(metric, metric) | {"deleted": True} for metric in metrics]
    state = {
        "selectedColumns": list(COLUMNS),
        "columnOrder": [RUN_NAME, *COLUMNS, CREATED],
        "columnWidths": {RUN_NAME: 240, **COLUMNS, CREATED: 140},
        "searchFilter": filter_of_studies,
        "runsHiddenMode": "FIRST_20_RUNS",
        "compareRunCharts": charts,
        "compareRunSections": [
            _section(CURVES, "Curves (Step = batch size)"),
            _section(ANSWERS, "Best and critical batch size"),
        ],
        "isAccordionReordered": True,
        "hideEmptyCharts": True,
    }
    packed = base64.b64encode(zlib.compress(json.dumps(state).encode(), 9)).decode()
    times = {"createdAt": milliseconds, "updatedAt": milliseconds}
    return json.dumps({"name": "bstune: curves", **times, "state": f"deflate;{packed}"})


def _section(uuid: str, name: str) -> State:
    return {
        "uuid": uuid,
        "name": name,
        "display": True,
        "isReordered": True,
        "columns": 2,
        "cardHeight": 360,
    }


def _chart(uuid: str, section: str) -> State:
    """What all charts have in common."""
    return {
        "uuid": uuid,
        "metricSectionId": section,
        "deleted": False,
        "isGenerated": False,
        "runsCountToCompare": 20,
    }


def _line(metric: str, title: str) -> State:
    """A line chart of a metric over its steps, both axes logarithmic."""
    return _chart(f"{CURVES}-{metric}", CURVES) | {
        "type": "LINE",
        "metricKey": metric,
        "selectedMetricKeys": [metric],
        # A title of one's own stands above system metrics alone: this states to be one.
        "displayName": title,
        "nodeLevelSystemMetricConfiguration": {"metric": metric, "type": "node"},
        "xAxisKey": "step",
        "xAxisScaleType": "log",
        "scaleType": "log",
        "yAxisKey": "metric",
        "yAxisExpressions": [],
        "selectedXAxisMetricKey": "",
        "lineSmoothness": 0,
        "range": {},
        "ignoreOutliers": False,
        "displayPoints": False,
        "useGlobalXaxisKey": False,
        "useGlobalLineSmoothing": False,
    }


def _bar(metric: str, title: str) -> State:
    """A bar chart; its title is its key unless another one tells where the values are."""
    keys = {"type": "BAR", "metricKey": title, "dataAccessKey": metric}
    return _chart(f"{ANSWERS}-{metric}", ANSWERS) | keys
