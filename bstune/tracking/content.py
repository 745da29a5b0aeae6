"""The content of runs in MLflow: names, parameters, metrics, notes and data sets of studies."""

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
from bstune.study.prepared import PreparedStudy
from bstune.system.console import format_count, format_number
from bstune.system.secrets import redact_values

# The tag of a run that says whether it is a study's or a trial's.
KIND = "bstune.kind"
Value = tuple[str, int, float | None]
"""A metric's name, its step and its value. None is not sent."""
# The most characters that mlflow.utils.validation allows: of names, of parameters' values, and of
# tags before mlflow 3 (8000 since).
KEY_LENGTH = 250
PARAM_LENGTH = 6000
TAG_LENGTH = 5000
CUT_MARK = " ... (cut)"
TRIAL_PARAMS = ("batch_size", "lr", "delta", "seed", "trial_index", "replicate_of")
# Attributes of a part of a trial: seconds that leave out the parts that it continues.
_PART_SECONDS = ("train_seconds", "eval_seconds", "startup_seconds", "wall_seconds")
# How the name of a trial's run tells its status; {} stands for its steps.
_STATUS_WORDS = {
    "reached": "reached {} steps",
    "stopped": "stopped at {} steps",
    "diverged": "diverged at {} steps",
    "out of memory": "out of memory",
    "failed": "failed",
}
# The parameters of a study's run, with the options that they show. The whole config is an artifact.
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
# The curves through the frontier's points, and the value of a point in each.
_POINTS: Mapping[str, Callable[[CurvePoint], float | None]] = {
    "steps_to_target": lambda point: point.steps,
    "time_to_target": lambda point: point.time_to_target,
    "examples_to_target": lambda point: point.examples,
}


def study_name(prepared: PreparedStudy) -> str:
    """Name a study's run: ``digits · cpu · val/loss<=0.1``.

    A study of the objective loss has no target: it seeks the best metric within a budget. There its
    question stands, such as ``least val/loss within 500 steps``.
    """
    target = str(prepared.protocol.target).replace(" ", "")
    if option_at(prepared.options, "search.objective") == "loss":
        target = question_of(prepared.options)
    return shortened(f"{prepared.options.study} · {prepared.backend.device} · {target}", KEY_LENGTH)


def study_params(prepared: PreparedStudy, commit: str | None) -> dict[str, str]:
    """Give a study's most telling options as parameters of its run, by name.

    ``commit``: the commit of the git repository in which it runs, or None.
    """
    values = dict[str, object]()
    for name, option in _OPTIONS.items():
        value = option_at(prepared.options, option)
        if value is None:
            continue
        # The last name of a dotted path tells enough.
        if name in ("scaling", "sampler"):
            value = str(value).rpartition(".")[2]
        values[name] = value
    # MLflow lets no parameter change: what is not settled is sent with the results.
    if prepared.backend.objective_is_open:
        del values["objective"]
    values["target"] = str(prepared.protocol.target)
    # The objective loss has no target: it asks for the best metric when a budget ends.
    if option_at(prepared.options, "search.objective") == "loss":
        values["target"] = question_of(prepared.options)
    values["device"] = prepared.backend.device
    if commit is not None:
        values["git_commit"] = commit
    return {name: shortened(str(value), PARAM_LENGTH) for name, value in values.items()}


def study_values(result: StudyResult) -> list[Value]:
    """Give a study's metrics: gain, critical batch size, winner on fresh seeds, tests and curves.

    Where the baseline was stopped before the target, ``gain/ratio`` is a lower bound without an
    interval. A study in which no trial reached the target has no winner, and so no metric that
    begins with ``best/``.
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
        # The winner's runs on fresh seeds.
        if winner.confirmed is not None:
            low, high = winner.confirmed.interval_by("time")
            named["best/seconds_low"] = low
            named["best/seconds_high"] = high
            named["best/reached_of_n"] = winner.confirmed.reached / winner.confirmed.runs
        for metric, value in result.test.get(result.use, {}).items():
            named[f"test/{metric.removeprefix('test/')}"] = value
    if result.at_budget is not None:
        named |= _metrics_at_budget(result.at_budget)
    values = list[Value]()
    for name, number in named.items():
        # Numbers have six digits, as MLflow's columns show all digits. Each is at step 0: only the
        # curves have steps.
        if number is not None:
            values.append((name, 0, float(f"{number:.6g}")))
    return [*values, *_curves(result)]


def _metrics_at_budget(at_budget: AtBudget) -> dict[str, float | None]:
    """Give the metrics of a study of the objective loss, by name.

    Its gain is the winner's over the user's own configuration. The gain's share is the part of the
    budget after which the winner has the metric of that configuration.
    """
    named: dict[str, float | None] = {
        "best/batch_size": at_budget.winner.batch_size,
        "best/lr": at_budget.winner.lr,
        "best/steps": at_budget.winner.steps,
        "best/metric": at_budget.winner.expected,
    }
    if at_budget.gain is not None:
        named["gain/metric"] = at_budget.gain.difference
        named["gain/metric_low"] = at_budget.gain.low
        named["gain/metric_high"] = at_budget.gain.high
        named["gain/share"] = at_budget.gain.share
    return named


def _curves(result: StudyResult) -> Iterator[Value]:
    """Yield the values of curves over batch size, which stands in the place of MLflow's step.

    There are the least values, at each batch size, of the frontier's points, which are the best
    trials of narrow ranges of batch size; the metric when the budget ends; and the fitted curve:
    steps, seconds and examples to the target. What a study lacks is left out.
    """
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


def study_note(
    answer: str, run_id: str, figure: str | None, trials_page: str, studies_page: str
) -> str:
    """Write the note of a study's run in Markdown: the answer, the figure, and two links.

    Args:
        answer: the answer as it is printed, which is cut where the note would be too long.
        run_id: the id of the study's run.
        figure: the name of the figure among the run's files. None without one.
        trials_page: address of the page with the study's trials.
        studies_page: address of the page with all studies.
    """
    # A fence of Markdown must be longer than any row of backticks in it, and has three at least.
    longest = max((len(backticks) for backticks in re.findall("`+", answer)), default=0)
    fence = "`" * max(3, 1 + longest)
    # The answer takes the place of {} once it is known how much room the rest leaves.
    parts = [f"{fence}text\n{{}}\n{fence}"]
    if figure is not None:
        query = urlencode({"path": figure, "run_uuid": run_id})
        parts.append(f"![steps and seconds to target over batch size](get-artifact?{query})")
    parts.append(f"[the study's trials]({trials_page}) · [all studies]({studies_page})")
    text = "\n\n".join(parts)
    return text.format(shortened(answer, TAG_LENGTH - len(text)))


def trial_name(result: TrialResult) -> str:
    """Name a trial's run: ``B 204 · lr 1.13 · reached 56 steps``."""
    parts = [f"B {format_count(result.batch_size)}", f"lr {format_number(result.lr)}"]
    if result.replicate_of is not None:
        parts.append("fresh seed")
    parts.append(_STATUS_WORDS[result.status].format(format_count(result.steps)))
    return " · ".join(parts)


def trial_values(chain: Sequence[TrialResult], metric: str) -> list[Value]:
    """Give the metrics of a trial whose last part has just ended.

    Args:
        chain: the parts of the trial in order. The run has the metrics of all but the last part.
        metric: the name of the target's metric.

    Returns:
        The last part's values, without the history that the run has already. Seconds are those of
        all parts.
    """
    result = chain[-1]
    # The history of a part begins with that of the parts that it continues.
    sent_evaluations = 0
    sent_noise_scales = 0
    if len(chain) > 1:
        sent_evaluations = len(chain[-2].history)
        sent_noise_scales = len(chain[-2].noise_scale)
    values = list[Value]()
    # What is of the trial as a whole has the step 0.
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
        # The estimate is the one that was known at that step: of the measurements until then.
        estimate = moving_estimate(result.noise_scale[:count])
        step = result.noise_scale[count - 1][0]
        values.append(("noise_scale", step, estimate.noise_scale))
        values.append(("noise_scale_low", step, estimate.low))
        values.append(("noise_scale_high", step, estimate.high))
    return values


def metrics(values: Iterable[Value], milliseconds: int) -> list[Metric]:
    """Give values as MLflow's metrics of one moment, without those that are None or not finite."""
    finite = list[Metric]()
    for name, step, value in values:
        if value is not None and math.isfinite(value):
            finite.append(Metric(allowed_key(name), float(value), milliseconds, step))
    return finite


def data_set(prepared: PreparedStudy) -> DatasetInput:
    """Describe the training data as MLflow's data set: the settings that read it, and their digest.

    The bytes of the data are not part of the digest.
    """
    workload = prepared.options.workload
    read_by: Mapping[str, Any] = {"workload": workload.name}
    if isinstance(workload, TrainedWorkload):
        # In these settings the data's folder is a reference: the digest is the same for every
        # folder. The code that reads the data pins their checksums.
        read_by = workload.data
    # A replayed study reads a table in place of data. Its name is among the settings that must not
    # change while the study goes on.
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
    name = shortened(workload.name, KEY_LENGTH)
    return DatasetInput(
        Dataset(name, digest, "bstune", source, profile=profile),
        [InputTag("mlflow.data.context", "training")],
    )


def allowed_key(name: str) -> str:
    """Write a name as MLflow allows it: letters, digits and ``_-. /``, as a normalized path."""
    allowed = re.sub(r"[^/\w.\- ]", "_", name)
    return posixpath.normpath(allowed).lstrip("./")[:KEY_LENGTH] or "_"


def shortened(text: str, length: int) -> str:
    """Cut a text to at most ``length`` letters. A text that was cut says so at its end."""
    if len(text) <= length:
        return text
    return text[: length - len(CUT_MARK)] + CUT_MARK
