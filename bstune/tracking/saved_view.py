"""The views that MLflow's pages open with: the studies' curves over each other, and the trials.

MLflow keeps a view that somebody shares as a tag of the experiment, which its pages read: the
tag's name is the key in the address, its value the pages' own state. That is no documented
interface. Tried with mlflow 3.17.2: a later one that does not know the tag shows its usual page.
A view that is there stays, as people change it.

What MLflow 3.17.2 cannot do: the axis of a metric's steps is called "Step", whatever a step is, and
over another metric, whose name it would show, it cannot be logarithmic. So titles and the section
name the batch size. A column has its metric's key above it, a legend has it after each run.
"""

import base64
import json
import zlib
from typing import Any, Literal

# A new view takes a new one: a view that is there is not written over.
VIEW_KEY = "bstune-2"
TAG = f"mlflow.sharedViewState.{VIEW_KEY}"
# A chart each, with its title: over the batch size, which is the metric's step.
_CURVES = {
    "curve/steps_to_target_fit": "Steps to target over batch size",
    "curve/time_to_target_fit": "Seconds to target over batch size",
    "curve/steps_to_target": "Steps to target of the best trials",
    "curve/time_to_target": "Seconds to target of the best trials",
}
_BARS = {
    "gain/ratio": "Gain: times as fast as the baseline",
    "critical_batch_size/value": "Critical batch size",
    "best/batch_size": "Batch size to use",
    "best/seconds": "Seconds to target with it",
}
# Columns and their widths in pixels, in which their names are seen whole.
_METRICS = {
    "best/batch_size": 125,
    "best/lr": 110,
    "best/seconds": 110,
    "gain/ratio": 95,
    "gain/low": 90,
    "gain/high": 95,
    "critical_batch_size/value": 175,
    "critical_batch_size/low": 170,
    "critical_batch_size/high": 175,
    "best/steps": 100,
    "best/seconds_low": 140,
    "best/seconds_high": 145,
    "best/reached_of_n": 145,
}
_PARAMS = {"workload": 140, "target": 140, "device": 100}
_OF_TRIALS = {
    "tags.`bstune.study`": 150,
    "tags.`bstune.status`": 130,
    "params.`batch_size`": 105,
    "params.`lr`": 110,
    "metrics.`steps`": 90,
    "metrics.`steps_to_target`": 135,
    "metrics.`time_to_target`": 135,
}
# MLflow adds a chart for each metric that is no chart's key, unless it was deleted.
_DELETED = {"curve/examples_to_target", "curve/examples_to_target_fit", *_METRICS, *_BARS}
# Names of columns in MLflow's pages.
_NAME = "attributes.`Run Name`"
_CREATED = "runDateAndNestInfo"
_DATA = "attributes.`Dataset`"
# A part of the pages' state, as JSON has it.
State = dict[str, Any]


def runs_page(experiment_id: str) -> str:
    """Name the page of an experiment's runs, relative to MLflow's address.

    Without the type of workflow MLflow 3.17.2 opens what the switch in its sidebar stands at, at
    first "GenAI", whose pages show traces; it does not look at ``mlflow.experimentKind``.
    """
    return f"#/experiments/{experiment_id}/runs?workflowType=machine_learning"


def page(experiment_id: str, mode: Literal["CHART", "TABLE"]) -> str:
    """Name the page of an experiment in its view: the curves over each other, or the columns."""
    return f"{runs_page(experiment_id)}&compareRunsMode={mode}&viewStateShareKey={VIEW_KEY}"


def links(studies_id: str, trials_id: str) -> str:
    """Write the experiments' description in Markdown: all their pages show it, empty ones too."""
    curves = page(studies_id, "CHART")
    table = page(studies_id, "TABLE")
    trials = page(trials_id, "TABLE")
    return f"Studies: [curves]({curves}) · [table]({table}). Trials: [table]({trials})."


def studies_view(milliseconds: int) -> str:
    """Give the tag's value in the experiment of studies, made at this time."""
    curves = "bstune-curves"
    answers = "bstune-answers"
    charts = list[State]()
    for metric, title in _CURVES.items():
        charts.append(_line(curves, metric, title))
    for metric, title in _BARS.items():
        charts.append(_bar(answers, metric, title))
    for metric in sorted(_DELETED):
        charts.append(_deleted(answers, metric))
    widths = dict[str, int]()
    for metric, width in _METRICS.items():
        widths[f"metrics.`{metric}`"] = width
    for param, width in _PARAMS.items():
        widths[f"params.`{param}`"] = width
    widths[_DATA] = 140
    state = _columns(widths) | {
        "searchFilter": "tags.`bstune.kind` = 'study'",
        "runsHiddenMode": "FIRST_20_RUNS",
        "compareRunCharts": charts,
        "compareRunSections": [
            _section(curves, "Curves (Step = batch size)"),
            _section(answers, "What to use"),
        ],
        # What MLflow adds, such as tests, comes last.
        "isAccordionReordered": True,
        "hideEmptyCharts": True,
    }
    return _tag("bstune: curves over batch size", state, milliseconds)


def trials_view(milliseconds: int) -> str:
    """Give the tag's value in the experiment of trials, made at this time."""
    state = _columns(_OF_TRIALS) | {"searchFilter": "tags.`bstune.kind` = 'trial'"}
    return _tag("bstune: trials", state, milliseconds)


def _tag(name: str, state: State, milliseconds: int) -> str:
    """Pack a view as MLflow's pages do, made at this time."""
    packed = base64.b64encode(zlib.compress(json.dumps(state).encode(), 9)).decode()
    times = {"createdAt": milliseconds, "updatedAt": milliseconds}
    return json.dumps({"name": name, **times, "state": f"deflate;{packed}"})


def _columns(widths: dict[str, int]) -> State:
    return {
        "selectedColumns": list(widths),
        "columnOrder": [_NAME, *widths, _CREATED],
        "columnWidths": {_NAME: 310, **widths, _CREATED: 140},
    }


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
    return {
        "uuid": uuid,
        "metricSectionId": section,
        "deleted": False,
        "isGenerated": False,
        "runsCountToCompare": 20,
    }


def _line(section: str, metric: str, title: str) -> State:
    return _chart(f"{section}-{metric}", section) | {
        "type": "LINE",
        "metricKey": metric,
        "selectedMetricKeys": [metric],
        # The page of runs shows a title of one's own for what it takes for a system metric of a
        # node, and the metric's key for others; nothing else there depends on it.
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
        # Points stand for trials; a fitted curve has none.
        "displayPoints": not metric.endswith("_fit"),
        "useGlobalXaxisKey": False,
        "useGlobalLineSmoothing": False,
    }


def _bar(section: str, metric: str, title: str) -> State:
    # The title of a bar chart is its metric's key, unless another key tells where the values are.
    keys = {"metricKey": title, "dataAccessKey": metric}
    return _chart(f"{section}-{metric}", section) | {"type": "BAR", **keys}


def _deleted(section: str, metric: str) -> State:
    chart = _chart(f"deleted-{metric}", section)
    return chart | {"type": "BAR", "metricKey": metric, "deleted": True}
