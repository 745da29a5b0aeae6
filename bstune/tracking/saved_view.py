"""The views that MLflow's pages open with: the studies' curves over each other, and the trials.

MLflow keeps a view that somebody shares as a tag of the experiment, which its pages read: the
tag's name ends in the key that is in the address, and its value is the pages' own state. This
interface is not documented. It was tried with mlflow 3.17.2: a later MLflow that does not know the
tag shows its usual page. A view that is there stays, as people change it.

MLflow 3.17.2 has two limits. The axis of a metric's steps is called "Step", whatever a step is. An
axis of another metric would have that metric's name, but cannot be logarithmic. So titles and the
section name the batch size. A column has its metric's key above it, a legend has it after each run.
"""

import base64
import json
import zlib
from typing import Any, Literal

# A changed view needs a new key: a view that is there is not written over.
VIEW_KEY = "bstune-2"
TAG = f"mlflow.sharedViewState.{VIEW_KEY}"
# The line charts by their metrics, with their titles: over batch size, which is the metric's step.
_CURVES = {
    "curve/steps_to_target_fit": "Steps to target over batch size",
    "curve/time_to_target_fit": "Seconds to target over batch size",
    "curve/steps_to_target": "Steps to target of the best trials",
    "curve/time_to_target": "Seconds to target of the best trials",
}
# The bar charts by their metrics, with their titles.
_BARS = {
    "gain/ratio": "Gain: times as fast as the baseline",
    "critical_batch_size/value": "Critical batch size",
    "best/batch_size": "Batch size to use",
    "best/seconds": "Seconds to target with it",
}
# Columns of metrics, of parameters, and of the table of trials, each with a width in pixels at
# which its name is seen whole.
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
_TRIAL_COLUMNS = {
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
State = dict[str, Any]
"""A part of the state of MLflow's pages, as JSON has it."""


def runs_page(experiment_id: str) -> str:
    """Give the address of the page with an experiment's runs, relative to MLflow's address.

    It states the type of workflow. Without it MLflow 3.17.2 opens the pages that the switch in its
    sidebar stands at, at first "GenAI", which show traces: ``mlflow.experimentKind`` is ignored.
    """
    return f"#/experiments/{experiment_id}/runs?workflowType=machine_learning"


def page(experiment_id: str, mode: Literal["CHART", "TABLE"]) -> str:
    """Give the address of an experiment's view: its charts, or its table."""
    return f"{runs_page(experiment_id)}&compareRunsMode={mode}&viewStateShareKey={VIEW_KEY}"


def links(studies_id: str, trials_id: str) -> str:
    """Write the description of both experiments in Markdown: links to their views.

    All pages of an experiment show it, empty ones too.
    """
    curves = page(studies_id, "CHART")
    table = page(studies_id, "TABLE")
    trials = page(trials_id, "TABLE")
    return f"Studies: [curves]({curves}) · [table]({table}). Trials: [table]({trials})."


def studies_view(milliseconds: int) -> str:
    """Give the view of the studies as a tag's value. ``milliseconds``: the time of its making."""
    curves = "bstune-curves"
    answers = "bstune-answers"
    charts = list[State]()
    for metric, title in _CURVES.items():
        charts.append(_line(curves, metric, title))
    for metric, title in _BARS.items():
        charts.append(_bar(answers, metric, title))
    # MLflow would add a chart of each of these metrics by itself.
    for metric in sorted(_DELETED):
        charts.append(_deleted(answers, metric))
    # Columns of the table, with their widths in pixels.
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
        # Charts that MLflow adds, such as those of tests, come last.
        "isAccordionReordered": True,
        "hideEmptyCharts": True,
    }
    return _tag("bstune: curves over batch size", state, milliseconds)


def trials_view(milliseconds: int) -> str:
    """Give the view of the trials as a tag's value. ``milliseconds``: the time of its making."""
    state = _columns(_TRIAL_COLUMNS) | {"searchFilter": "tags.`bstune.kind` = 'trial'"}
    return _tag("bstune: trials", state, milliseconds)


def _tag(name: str, state: State, milliseconds: int) -> str:
    """Pack a view's state into a tag's value, as MLflow's pages do."""
    packed = base64.b64encode(zlib.compress(json.dumps(state).encode(), 9)).decode()
    times = {"createdAt": milliseconds, "updatedAt": milliseconds}
    return json.dumps({"name": name, **times, "state": f"deflate;{packed}"})


def _columns(widths: dict[str, int]) -> State:
    """Give the state of a table: its columns in order, with their widths in pixels.

    A run's name stands before the columns in ``widths``, and its time behind them.
    """
    return {
        "selectedColumns": list(widths),
        "columnOrder": [_NAME, *widths, _CREATED],
        "columnWidths": {_NAME: 310, **widths, _CREATED: 140},
    }


def _section(uuid: str, name: str) -> State:
    """Give the state of a section of charts. ``uuid``: the name by which charts refer to it."""
    return {
        "uuid": uuid,
        "name": name,
        "display": True,
        "isReordered": True,
        "columns": 2,
        "cardHeight": 360,
    }


def _chart(uuid: str, section: str) -> State:
    """Give the state that all charts have in common. ``section``: the uuid of their section."""
    return {
        "uuid": uuid,
        "metricSectionId": section,
        "deleted": False,
        "isGenerated": False,
        "runsCountToCompare": 20,
    }


def _line(section: str, metric: str, title: str) -> State:
    """Give the state of a line chart: a metric over its steps, both axes logarithmic."""
    return _chart(f"{section}-{metric}", section) | {
        "type": "LINE",
        "metricKey": metric,
        "selectedMetricKeys": [metric],
        # MLflow's page of runs shows a title of one's own only above a chart of a system metric, so
        # this chart states to be one. Nothing else there depends on it.
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
    """Give the state of a bar chart: a metric of each run."""
    # The title of a bar chart is its metric's key, unless another key tells where the values are.
    keys = {"metricKey": title, "dataAccessKey": metric}
    return _chart(f"{section}-{metric}", section) | {"type": "BAR", **keys}


def _deleted(section: str, metric: str) -> State:
    """Give the state of a chart that a user has deleted, so that MLflow does not add it."""
    chart = _chart(f"deleted-{metric}", section)
    return chart | {"type": "BAR", "metricKey": metric, "deleted": True}
