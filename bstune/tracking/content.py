"""What MLflow is given of a study and its trials: names, parameters, metrics, note, data set."""

import hashlib
import json
import math
import posixpath
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import urlencode

from mlflow.entities import Dataset, DatasetInput, InputTag, Metric

from bstune.core.noise_scale import moving_estimate
from bstune.core.records import TrialResult
from bstune.options import TrainedWorkload, option_at
from bstune.result import AtBudget, CurvePoint, StudyResult
from bstune.study.at_budget import question_of
from bstune.study.prepare import PreparedStudy
from bstune.system.console import format_count, format_number
from bstune.system.secrets import redact_values

# The tag of a run that says whether it is a study's or a trial's.
KIND = "bstune.kind"
Value = tuple[str, int, float | None]
"""A metric's name, its step and its value."""
# What mlflow.utils.validation allows, in characters: of names, of parameters' values, and of tags
# before mlflow 3 (8000 since).
KEY_LENGTH = 250
PARAM_LENGTH = 6000
TAG_LENGTH = 5000
CUT_MARK = " ... (cut)"
TRIAL_PARAMS = ("batch_size", "lr", "delta", "seed", "trial_index", "replicate_of")
# Of a trial, without those of the parts that it continues.
_PART_SECONDS = ("train_seconds", "eval_seconds", "startup_seconds", "wall_seconds")
_ENDS = {
    "reached": "reached {} steps",
    "stopped": "stopped at {} steps",
    "diverged": "diverged at {} steps",
    "out of memory": "out of memory",
    "failed": "failed",
}
# Parameters of a study by the options that they are of; the whole config is an artifact.
_OPTIONS = {
    "workload": "workload.name",
    "study": "study",
    "seed": "seed",
    "objective": "search.objective",
    "trials": "search.trials",
    "batch_size.low": "search.batch_size.low",
    "batch_size.high": "search.batch_size.high",
    "budget.steps": "budget.steps",
    "budget.examples": "budget.examples",
    "reference.batch_size": "scaling.batch_size",
    "reference.lr": "scaling.lr",
    "scaling": "scaling.rule._target_",
    "sampler": "sampler._target_",
    "precision": "precision",
    "devices": "devices",
}
_POINTS: Mapping[str, Callable[[CurvePoint], float | None]] = {
    "steps_to_target": lambda point: point.steps,
    "time_to_target": lambda point: point.time_to_target,
    "examples_to_target": lambda point: point.examples,
}


def study_name(prepared: PreparedStudy) -> str:
    """Name a study's run: ``digits · cpu · val/loss<=0.1``."""
    target = str(prepared.protocol.target).replace(" ", "")
    if option_at(prepared.options, "search.objective") == "loss":
        target = question_of(prepared.options)
    return cut(f"{prepared.options.study} · {prepared.backend.device} · {target}", KEY_LENGTH)


def study_params(prepared: PreparedStudy, commit: str | None) -> dict[str, str]:
    """Say what a study is, in a few parameters; ``commit``: of the repository that it runs in."""
    values = dict[str, object]()
    for name, option in _OPTIONS.items():
        value = option_at(prepared.options, option)
        if value is None:
            continue
        # Of a dotted path the name tells enough.
        if name in ("scaling", "sampler"):
            value = str(value).rpartition(".")[2]
        values[name] = value
    values["target"] = str(prepared.protocol.target)
    if option_at(prepared.options, "search.objective") == "loss":
        values["target"] = question_of(prepared.options)
    values["device"] = prepared.backend.device
    if commit is not None:
        values["git_commit"] = commit
    return {name: cut(str(value), PARAM_LENGTH) for name, value in values.items()}


def study_values(result: StudyResult) -> list[Value]:
    """Give a study's metrics: gain, critical batch size, winner on fresh seeds, tests and curves.

    Where the baseline was stopped before the target, ``gain/ratio`` is the least that it can be
    and has no interval. A study in which no trial reached the target has no winner, and so none
    of the metrics that begin with ``best/``.
    """
    named = dict[str, float | None]()
    gain = result.gain
    if gain is not None:
        named["gain/ratio"] = gain.ratio
        named["gain/low"] = gain.low
        named["gain/high"] = gain.high
    critical = result.critical_batch_size
    if critical is not None:
        named["critical_batch_size/value"] = critical.value
        named["critical_batch_size/low"] = critical.low
        named["critical_batch_size/high"] = critical.high
    winner = result.winner
    if winner is not None and result.use is not None:
        named["best/batch_size"] = winner.batch_size
        named["best/lr"] = winner.lr
        named["best/steps"] = winner.steps
        named["best/seconds"] = winner.time_to_target
        if winner.confirmed is not None:
            low, high = winner.confirmed.interval_by("time")
            named["best/seconds_low"] = low
            named["best/seconds_high"] = high
            named["best/reached_of_n"] = winner.confirmed.reached / winner.confirmed.runs
        for metric, value in result.test.get(result.use, {}).items():
            named[f"test/{metric.removeprefix('test/')}"] = value
    if result.at_budget is not None:
        named |= _named_at_budget(result.at_budget)
    values = list[Value]()
    for name, number in named.items():
        # Six digits, as columns show all that there are. What is None is not sent.
        if number is not None:
            values.append((name, 0, float(f"{number:.6g}")))
    return [*values, *_curves(result)]


def _named_at_budget(found: AtBudget) -> dict[str, float | None]:
    """Give the metrics of a study of the objective loss."""
    named: dict[str, float | None] = {
        "best/batch_size": found.winner.batch_size,
        "best/lr": found.winner.lr,
        "best/steps": found.winner.steps,
        "best/metric": found.winner.expected,
    }
    if found.gain is not None:
        named["gain/metric"] = found.gain.difference
        named["gain/metric_low"] = found.gain.low
        named["gain/metric_high"] = found.gain.high
        named["gain/share"] = found.gain.share
    return named


def _curves(result: StudyResult) -> Iterator[Value]:
    """Yield curves, whose step is the batch size: the frontier's points, S*(B) of all trials."""
    for name, value_of in _POINTS.items():
        lowest = dict[int, float]()
        for point in result.points:
            value = value_of(point)
            if value is not None and value <= lowest.get(point.batch_size, math.inf):
                lowest[point.batch_size] = value
        for batch_size in sorted(lowest):
            yield f"curve/{name}", batch_size, lowest[batch_size]
    if result.at_budget is not None:
        for at_size in result.at_budget.curve:
            yield "curve/metric_at_budget", at_size.batch_size, at_size.value
    fitted = result.curve
    if fitted is None:
        return
    # Of several batch sizes that round to one, the last counts.
    places = {round(size): i for i, size in enumerate(fitted.batch_size)}
    for batch_size, i in places.items():
        steps = fitted.steps[i]
        yield "curve/steps_to_target_fit", batch_size, steps
        if fitted.seconds_per_step is not None:
            yield "curve/time_to_target_fit", batch_size, steps * fitted.seconds_per_step[i]
        yield "curve/examples_to_target_fit", batch_size, steps * batch_size


def note(answer: str, run_id: str, figure: str | None, trials_page: str, studies_page: str) -> str:
    """Write a study's description in Markdown: the answer as it is printed, the figure, links."""
    # A fence of Markdown is longer than any row of backticks in it, and has three at least.
    longest = max((len(backticks) for backticks in re.findall("`+", answer)), default=0)
    fence = "`" * max(3, 1 + longest)
    parts = [f"{fence}text\n{{}}\n{fence}"]
    if figure is not None:
        query = urlencode({"path": figure, "run_uuid": run_id})
        parts.append(f"![steps and seconds to target over batch size](get-artifact?{query})")
    parts.append(f"[the study's trials]({trials_page}) · [all studies]({studies_page})")
    text = "\n\n".join(parts)
    return text.format(cut(answer, TAG_LENGTH - len(text)))


def trial_name(result: TrialResult) -> str:
    """Name a trial's run: ``B 204 · lr 1.13 · reached 56 steps``."""
    parts = [f"B {format_count(result.batch_size)}", f"lr {format_number(result.lr)}"]
    if result.replicate_of is not None:
        parts.append("fresh seed")
    parts.append(_ENDS[result.status].format(format_count(result.steps)))
    return " · ".join(parts)


def trial_values(chain: Sequence[TrialResult], metric: str) -> list[Value]:
    """Give the metrics of a trial, the last of ``chain``; the others are those that it continues.

    What they have sent of its history is left out, its seconds are those of all of them.
    """
    result = chain[-1]
    sent_evaluations = 0
    sent_noise_scales = 0
    if len(chain) > 1:
        sent_evaluations = len(chain[-2].history)
        sent_noise_scales = len(chain[-2].noise_scale)
    values = list[Value]()
    for name in ("steps", "steps_low", "examples", "time_to_target", "seconds_per_step"):
        values.append((name, 0, getattr(result, name)))
    for name in _PART_SECONDS:
        values.append((name, 0, sum(getattr(part, name) for part in chain)))
    if result.reached:
        values.append(("steps_to_target", 0, result.steps))
        values.append(("examples_to_target", 0, result.examples))
    for step, value in result.history[sent_evaluations:]:
        values.append((metric, step, value))
    for count in range(1 + sent_noise_scales, 1 + len(result.noise_scale)):
        # As it was known then: of the measurements so far.
        estimate = moving_estimate(result.noise_scale[:count])
        step = result.noise_scale[count - 1][0]
        values.append(("noise_scale", step, estimate.noise_scale))
        values.append(("noise_scale_low", step, estimate.low))
        values.append(("noise_scale_high", step, estimate.high))
    return values


def metrics(values: Iterable[Value], milliseconds: int) -> list[Metric]:
    """Give MLflow's metrics of (name, step, value), without what is None or not finite."""
    finite = list[Metric]()
    for name, step, value in values:
        if value is not None and math.isfinite(value):
            finite.append(Metric(key(name), float(value), milliseconds, step))
    return finite


def data_set(prepared: PreparedStudy) -> DatasetInput:
    """Describe the training data as MLflow's data set: what reads it, and a digest of that alone.

    The bytes of the data have no part in it.
    """
    workload = prepared.options.workload
    read_by: Mapping[str, Any] = {"workload": workload.name}
    if isinstance(workload, TrainedWorkload):
        # Where the data lie stands there as a reference: their checksums are pinned.
        read_by = workload.data
    # A replayed study reads a table in place of data.
    table = prepared.backend.frozen_settings.get("workload.table")
    if table:
        read_by = {"table": table}
    source = json.dumps(redact_values(read_by), default=str)
    digest = hashlib.sha256(source.encode()).hexdigest()[:8]
    about = {
        "train_examples": prepared.backend.train_examples,
        "digest": "of the source, not of the data",
    }
    profile = json.dumps(about)
    name = cut(workload.name, KEY_LENGTH)
    return DatasetInput(
        Dataset(name, digest, "bstune", source, profile=profile),
        [InputTag("mlflow.data.context", "training")],
    )


def key(name: str) -> str:
    """Write a name as MLflow allows it: letters, digits and ``_-. /`` in a path that is normal."""
    allowed = re.sub(r"[^/\w.\- ]", "_", name)
    return posixpath.normpath(allowed).lstrip("./")[:KEY_LENGTH] or "_"


def cut(text: str, length: int) -> str:
    """Shorten a text to at most ``length`` letters; one that was cut says so at its end."""
    if len(text) <= length:
        return text
    return text[: length - len(CUT_MARK)] + CUT_MARK
