"""What MLflow is given of a study and its trials: names, parameters, metrics, the note and the data set."""

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

KIND = "bstune.kind"  # tag of a run: of a study, or of a trial
Value = tuple[str, int, float | None]  # a metric's name, its step and its value
# mlflow.utils.validation: names of 250 characters, parameters of 6000; tags of 5000 before mlflow 3 and 8000 since.
KEY_LENGTH, PARAM_LENGTH, TAG_LENGTH = 250, 6000, 5000
TRIAL_PARAMS = ("batch_size", "lr", "delta", "seed", "trial_index", "replicate_of")
_SECONDS = (
    "train_seconds",
    "eval_seconds",
    "startup_seconds",
    "wall_seconds",
)  # of a trial without those it continues
_ENDS = {
    "reached": "reached {} steps",
    "stopped": "stopped at {} steps",
    "diverged": "diverged at {} steps",
}
_ENDS |= {"out of memory": "out of memory", "failed": "failed"}
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
    """Return ``digits · cpu · val/loss<=0.1``."""
    target = str(prepared.protocol.target).replace(" ", "")
    if option_at(prepared.options, "search.objective") == "loss":
        target = question_of(prepared.options)
    return cut(f"{prepared.options.study} · {prepared.backend.device} · {target}", KEY_LENGTH)


def study_params(prepared: PreparedStudy, commit: str | None) -> dict[str, str]:
    """Return what a study is, in a few parameters."""
    values = {name: option_at(prepared.options, option) for name, option in _OPTIONS.items()}
    values = {name: value for name, value in values.items() if value is not None}
    for name in ("scaling", "sampler"):
        if name in values:
            values[name] = str(values[name]).rpartition(".")[2]
    is_for_loss = option_at(prepared.options, "search.objective") == "loss"
    target = question_of(prepared.options) if is_for_loss else str(prepared.protocol.target)
    values |= {"target": target, "device": prepared.backend.device}
    values |= {} if commit is None else {"git_commit": commit}
    return {name: cut(str(value), PARAM_LENGTH) for name, value in values.items()}


def study_values(result: StudyResult) -> list[Value]:
    """Give a study's metrics: gain, critical batch size, winner on fresh seeds, tests and curves.

    Where the baseline was stopped before the target, ``gain/ratio`` is the least that it can be
    and has no interval. A study in which no trial reached the target has no winner, and so none
    of the metrics that begin with ``best/``.
    """
    critical, gain, winner = result.critical_batch_size, result.gain, result.winner
    named = dict[str, float | None]()
    if gain is not None:
        named["gain/ratio"] = gain.ratio
        named["gain/low"] = gain.low
        named["gain/high"] = gain.high
    if critical is not None:
        named["critical_batch_size/value"] = critical.value
        named["critical_batch_size/low"] = critical.low
        named["critical_batch_size/high"] = critical.high
    if winner is not None and result.use is not None:
        fresh = winner.confirmed
        low, high = (None, None) if fresh is None else fresh.ends("time")
        named["best/batch_size"] = winner.batch_size
        named["best/lr"] = winner.lr
        named["best/steps"] = winner.steps
        named["best/seconds"] = winner.time_to_target
        named["best/seconds_low"] = low
        named["best/seconds_high"] = high
        named["best/reached_of_n"] = None if fresh is None else fresh.reached / fresh.runs
        for metric, value in result.test.get(result.use, {}).items():
            named[f"test/{metric.removeprefix('test/')}"] = value
    if result.at_budget is not None:
        named |= _named_at_budget(result.at_budget)
    values = list[Value]()
    for name, number in named.items():
        # Six digits, as columns show all that there are.
        values.append((name, 0, None if number is None else float(f"{number:.6g}")))
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
    """Yield the curves, whose step is the batch size: the frontier's points, and S*(B) as all trials have it."""
    for name, value_of in _POINTS.items():
        lowest = dict[int, float]()
        for point in result.points:
            value = value_of(point)
            if value is not None and value <= lowest.get(point.batch_size, math.inf):
                lowest[point.batch_size] = value
        for batch_size in sorted(lowest):
            yield f"curve/{name}", batch_size, lowest[batch_size]
    if result.at_budget is not None:
        for one in result.at_budget.curve:
            yield "curve/metric_at_budget", one.batch_size, one.value
    fitted = result.curve
    if fitted is None:
        return
    # Of several batch sizes that round to one, the last counts.
    places = {round(size): i for i, size in enumerate(fitted.batch_size)}
    for batch_size, i in places.items():
        steps, tau = fitted.steps[i], fitted.seconds_per_step
        yield "curve/steps_to_target_fit", batch_size, steps
        yield "curve/time_to_target_fit", batch_size, None if tau is None else steps * tau[i]
        yield "curve/examples_to_target_fit", batch_size, steps * batch_size


def note(answer: str, run_id: str, figure: str | None, trials_page: str, studies_page: str) -> str:
    """Write a study's description in Markdown: the answer as it is printed, the figure, links."""
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", answer)), default=0))
    parts = [f"{fence}text\n{{}}\n{fence}"]
    if figure is not None:
        query = urlencode({"path": figure, "run_uuid": run_id})
        parts.append(f"![steps and seconds to target over batch size](get-artifact?{query})")
    parts.append(f"[the study's trials]({trials_page}) · [all studies]({studies_page})")
    text = "\n\n".join(parts)
    return text.format(cut(answer, TAG_LENGTH - len(text)))


def trial_name(result: TrialResult) -> str:
    """Return ``B 204 · lr 1.13 · reached 56 steps``."""
    end = _ENDS[result.status].format(format_count(result.steps))
    seed = ["fresh seed"] if result.replicate_of is not None else []
    return " · ".join(
        [f"B {format_count(result.batch_size)}", f"lr {format_number(result.lr)}", *seed, end]
    )


def trial_values(chain: Sequence[TrialResult], metric: str) -> list[Value]:
    """Return the metrics of a trial, the last one of ``chain``; the others are those that it continues.

    What they have sent of its history is left out, its seconds are those of all of them.
    """
    result, before = chain[-1], chain[-2] if len(chain) > 1 else None
    names = ("steps", "steps_low", "examples", "time_to_target", "seconds_per_step")
    values: list[Value] = [(name, 0, getattr(result, name)) for name in names]
    values += [(name, 0, sum(getattr(one, name) for one in chain)) for name in _SECONDS]
    if result.reached:
        values += [("steps_to_target", 0, result.steps), ("examples_to_target", 0, result.examples)]
    values += [
        (metric, step, value)
        for step, value in result.history[len(before.history) if before else 0 :]
    ]
    for last in range(1 + len(before.noise_scale) if before else 1, 1 + len(result.noise_scale)):
        estimate = moving_estimate(result.noise_scale[:last])
        estimated = {"": estimate.noise_scale, "_low": estimate.low, "_high": estimate.high}
        values += [
            (f"noise_scale{end}", result.noise_scale[last - 1][0], value)
            for end, value in estimated.items()
        ]
    return values


def metrics(values: Iterable[Value], milliseconds: int) -> list[Metric]:
    """Return MLflow's metrics of (name, step, value); a value that is None or not finite is left out."""
    finite = [
        (name, step, value)
        for name, step, value in values
        if value is not None and math.isfinite(value)
    ]
    return [Metric(key(name), float(value), milliseconds, step) for name, step, value in finite]


def data_set(prepared: PreparedStudy) -> DatasetInput:
    """Return the training data as MLflow's data set: what reads it, and a digest of that, not of its bytes."""
    workload = prepared.options.workload
    read_by: Mapping[str, Any] = {"workload": workload.name}
    if isinstance(workload, TrainedWorkload):
        # Where the data lie stands there as a reference: their checksums are pinned.
        read_by = workload.data
    if table := prepared.backend.frozen_settings.get("workload.table"):  # a replayed study's
        read_by = {"table": table}
    source = json.dumps(redact_values(read_by), default=str)
    digest = hashlib.sha256(source.encode()).hexdigest()[:8]
    profile = json.dumps(
        {
            "train_examples": prepared.backend.train_examples,
            "digest": "of the source, not of the data",
        }
    )
    name = cut(workload.name, KEY_LENGTH)
    return DatasetInput(
        Dataset(name, digest, "bstune", source, profile=profile),
        [InputTag("mlflow.data.context", "training")],
    )


def key(name: str) -> str:
    """Return ``name`` as MLflow allows it: letters, digits and ``_-. /`` in a path that is already normal."""
    return posixpath.normpath(re.sub(r"[^/\w.\- ]", "_", name)).lstrip("./")[:KEY_LENGTH] or "_"


def cut(text: str, length: int) -> str:
    """Return a text of at most ``length`` letters, which says so where it was cut."""
    mark = " ... (cut)"
    return text if len(text) <= length else text[: length - len(mark)] + mark
