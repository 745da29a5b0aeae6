"""``report.html``: a study's answer, how far to trust it, and all that it rests on.

It is made from the files of the study's folder. ``bstune report STUDY`` writes it again, also for a
study that was cut short: a line names each file that is missing.

The page asks nothing of the network and follows the browser's theme. Printed, or without
JavaScript, each chart is a picture of the same traces, and all trials are there. A screen reader is
told what each chart shows. The winner is marked "use" and trial 0 "yours". Scaling rules go through
one point: the best learning rate at the middle of the curve.
"""

from collections.abc import Sequence
from pathlib import Path

import yaml

from bstune.core.records import TrialResult
from bstune.report.answer import Answer, Line, answer
from bstune.report.charts.at_budget import metric_at_budget
from bstune.report.charts.frontier import frontier_charts
from bstune.report.charts.hardware import hardware_section
from bstune.report.charts.learning_curves import learning_curves
from bstune.report.charts.learning_rates import learning_rates
from bstune.report.charts.over_target import over_target
from bstune.report.charts.progress import progress
from bstune.report.charts.traces import trial_with_origin
from bstune.report.html import Cell, Section, json_script, page, paragraph, resource, table, text
from bstune.report.study_folder import StudyFolder
from bstune.report.trust import Trust, trust
from bstune.result import Curve, StudyResult
from bstune.system.console import format_count, format_number, format_seconds, plural
from bstune.system.files import write_text

# The page is passed on without its README: it says its terms itself.
GLOSSARY = {
    "batch size B": (
        "examples per applied optimizer step, over all devices and all accumulated micro-batches"
    ),
    "target": "a validation metric and its goal; reached at the first evaluation that meets it",
    "steps to target S": (
        "optimizer steps applied until the target; known as an interval, from the last evaluation "
        "that missed it to the first that met it. S*(B) is the least at a batch size, over "
        "learning rates"
    ),
    "time to target T": (
        "S times the seconds per training step, which the survey measured beforehand; evaluation, "
        "compilation and start-up are measured apart and not in it"
    ),
    "critical batch size": (
        "the batch size at which the slope of log S* over log B is -1/2: of S*(B) = S_min (1 + "
        "B_crit/B) it is B_crit. Well below it twice the batch halves the steps, well above it "
        "more gains nothing"
    ),
    "90% interval": (
        "where the critical batch size lies with a probability of 90%, by all trials; an end that "
        "only the prior sets is left open"
    ),
    "fresh seeds": (
        "the winner is run again on seeds that took no part in the choice; what is reported of it "
        "is their median and range, as the best of many noisy runs is a lucky one"
    ),
    "configuration": (
        "a batch size, a learning rate and what else is searched: search.trials counts them"
    ),
    "trial": (
        "one configuration on one seed; each part of one that was stopped and continued has a "
        "number and a row of its own"
    ),
    "stopped": (
        "a trial that ended before the target, as it could no longer change the answer or its "
        "budget was spent: its steps are a lower bound"
    ),
    "continued": "a stopped trial that went on from its checkpoint; its learning curve is one line",
    "noise scale": (
        "the gradient's variance over its square, in examples: a hint of the critical batch size, "
        "which can miss it by several times"
    ),
    "roofline": (
        "the rate at which a device can compute, over the operations per byte moved: below the "
        "ridge memory limits it, above it arithmetic does"
    ),
}


def write_page(study: StudyFolder, path: Path) -> None:
    """Write the page of a study. The file is whole or not there."""
    write_text(path, study_page(study))


def study_page(study: StudyFolder) -> str:
    """Give the page of a study as HTML. A section without content is left out."""
    result = study.result
    beside = study.files
    study_answer = answer(result)
    sections = [
        Section("", _answer_html(study_answer, trust(result), beside.notes)),
        _over_batch_size(study),
        Section("What the trials say besides", lines_html(study_answer.details, "answer details")),
        Section("Learning rate", learning_rates(study)),
        Section("Critical batch size over the target", over_target(result)),
        Section("Learning curves", learning_curves(study)),
        Section("Progress of the search", progress(study)),
        Section("Hardware", hardware_section(beside.hardware)),
        Section("Several devices", _devices_html(result)),
        Section("Trials", trials_table(beside.trials)),
        Section("Config and versions", _config_html(study)),
        Section("Glossary", _glossary_html()),
    ]
    shown = [section for section in sections if section.body]
    scripts = list[str]()
    # The form of the calculator is there only where the seconds of a step are known.
    if result.curve is not None and result.curve.seconds_per_step is not None:
        scripts.append(resource("calculator.js"))
    return page(study_answer.title, shown, scripts)


def _over_batch_size(study: StudyFolder) -> Section:
    """Give the section with the charts over batch size: of the metric, or of steps and time."""
    if study.result.objective == "loss":
        return Section("Metric at the budget's end", metric_at_budget(study))
    return Section("Steps and time to target", frontier_charts(study))


def _answer_html(study_answer: Answer, trusted: Sequence[Trust], notes: Sequence[str]) -> str:
    """Show the answer's lines, how far its parts can be trusted, and what to do next.

    ``notes`` are lines on files that are missing or cannot be read.
    """
    warnings = "".join(paragraph(note, "warning") for note in notes)
    badges = "".join(map(_badge, trusted))
    actions = "".join(map(_action, study_answer.actions))
    return f'{warnings}{lines_html(study_answer.lines)}<ul class="badges">{badges}</ul>{actions}'


def _badge(part: Trust) -> str:
    """Show how far a part of the answer can be trusted, as a badge of one of two colours."""
    look = "good" if part.good else "fair"
    return f'<li class="{look}"><b>{text(part.name)}</b>{text(part.text)}</li>'


def lines_html(lines: Sequence[Line], kind: str = "answer") -> str:
    """Show lines of the answer as a list of labels and texts. Empty without a line.

    ``kind``: the list's class in the style sheet.
    """
    if not lines:
        return ""
    rows = list[str]()
    for name, texts in lines:
        shown = "".join(f"<div>{text(words)}</div>" for words in texts)
        rows.append(f"<dt>{text(name)}</dt><dd>{shown}</dd>")
    return f'<dl class="{kind}">{"".join(rows)}</dl>'


def _action(line: Line) -> str:
    """Show what to do next. The page's script adds a button to a command, which copies it."""
    name, texts = line
    parts = [f"<h3>{text(name)}</h3>"]
    for words in texts:
        # A command stands in a line of its own, to be copied as it is.
        if words.startswith("bstune "):
            parts.append(f'<div class="do"><pre class="command">{text(words)}</pre></div>')
        else:
            parts.append(paragraph(words))
    return "".join(parts)


def _devices_html(result: StudyResult) -> str:
    """Show the plans for several devices and the calculator. Empty where there is no plan."""
    curve = result.curve
    if not result.scale_out:
        return ""
    heads = ["devices", "batch size", "each", "learning rate", "steps", "time"]
    heads += ["speed-up", "efficiency", "device time"]
    rows = list[list[Cell]]()
    for plan in result.scale_out:
        cells = [
            _count(plan.devices),
            _count(plan.batch_size),
            _count(plan.device_batch_size),
            _measure(plan.lr),
            _count(plan.steps),
            _seconds(plan.seconds),
            _measure(plan.speed_up),
            Cell(f"{plan.efficiency:.0%}", plan.efficiency),
            _seconds(plan.device_seconds),
        ]
        rows.append(cells)
    words = paragraph(
        "Predicted from S*(B) and tau(B), each device as fast as this one, without an all-reduce."
    )
    if curve is not None and curve.seconds_per_step is not None:
        words += _calculator(curve)
    return words + table(heads, rows, sortable=False, name="several devices")


def _calculator(curve: Curve) -> str:
    """Give a form for a number of devices of one's own. ``calculator.js`` predicts their time."""
    fields = (
        ("devices", "devices", 4),
        ("memory", "examples that fit on one", ""),
        ("sync", "all-reduce (ms a step)", 0),
    )
    inputs = ""
    for name, words, value in fields:
        inputs += (
            f'<div><label for="calculator-{name}">{text(words)}</label>'
            f'<input id="calculator-{name}" name="{name}" type="number" min="0" step="any" '
            f'value="{value}"></div>'
        )
    data = json_script(
        {
            "batch_size": curve.batch_size,
            "steps": curve.steps,
            "seconds_per_step": curve.seconds_per_step,
            "lr": curve.lr,
        }
    )
    # The script shows the form, which does nothing without it.
    form = f'<form id="calculator" hidden>{inputs}{data}</form>'
    return f'{form}<output for="calculator" aria-live="polite"></output>'


def trials_table(trials: Sequence[TrialResult]) -> str:
    """Show the trials as a table. A column that no trial fills is left out."""
    if not trials:
        return ""
    names = sorted({name for trial in trials for name in trial.hyperparameters})
    # With momentum m a step goes lr/(1 - m) along a gradient that stays the same.
    has_effective_lr = any(trial.effective_lr is not None for trial in trials)
    # A horizon is the step at which a trial's learning-rate schedule ends.
    has_horizon = any(trial.horizon is not None for trial in trials)
    heads = ["trial", "batch size", "learning rate"]
    if has_effective_lr:
        heads.append("lr/(1 - m)")
    heads += names
    if has_horizon:
        heads.append("horizon")
    heads += ["status", "steps", "missed at", "time to target", "a step"]
    heads += ["last value", "seed", "took", "remark"]
    rows = list[list[Cell | str]]()
    for trial in trials:
        cells: list[Cell | str] = [
            Cell(str(trial.number), trial.number),
            _count(trial.batch_size),
            _measure(trial.lr),
        ]
        if has_effective_lr:
            cells.append(_measure(trial.effective_lr))
        cells += [_measure(trial.hyperparameters.get(name)) for name in names]
        if has_horizon:
            cells.append(_count(trial.horizon))
        cells.append(trial.outcome)
        rows.append(cells + _outcome_cells(trial))
    return table(heads, rows, name="trials")


def _outcome_cells(trial: TrialResult) -> list[Cell | str]:
    """Give a trial's cells from its steps on: how far it came, how long it took, and remarks."""
    last: float | None = None
    for _, value in trial.history:
        if value is not None:
            last = value
    # What follows the trial's number, which has a column of its own: such as "continues 7".
    _, _, relation = trial_with_origin(trial).partition(", ")
    remarks = [remark for remark in (relation, trial.message) if remark]
    return [
        _count(trial.steps),
        _count(trial.steps_low),
        _seconds(trial.time_to_target),
        _seconds(trial.seconds_per_step),
        _measure(last),
        Cell(str(trial.seed), trial.seed),
        _seconds(trial.wall_seconds),
        ", ".join(remarks),
    ]


def _count(value: float | None) -> Cell:
    """Give the cell of a count: whole, in groups of three digits."""
    return Cell(format_count(value), value)


def _measure(value: float | None) -> Cell:
    """Give the cell of a measured number: it shows a few digits, and is sorted by all of them."""
    return Cell(format_number(value), value)


def _seconds(value: float | None) -> Cell:
    """Give the cell of a time in seconds, shown in a unit that suits it."""
    return Cell(format_seconds(value), value)


def _config_html(study: StudyFolder) -> str:
    """Show the versions of packages, the training loops, ``best.yaml`` and ``config.yaml``."""
    parts = list[str]()
    # A study that went on after an upgrade has trials of several versions: the last ones count.
    versions: dict[str, str] = {}
    for trial in study.files.trials:
        versions |= trial.versions
    if versions:
        names = [f"{name} {versions[name]}" for name in sorted(versions)]
        parts.append(paragraph(", ".join(names)))
    loops = list[str]()
    for name, count in study.result.training_loops.items():
        loops.append(f"{name} ({plural(count, 'trial')})")
    if loops:
        parts.append(paragraph(f"training loop: {', '.join(loops)}"))
    parts.append(_folded_yaml("the winners (best.yaml)", study.files.best))
    parts.append(_folded_yaml("the whole config (config.yaml)", study.files.config))
    return "".join(parts)


def _folded_yaml(name: str, values: object) -> str:
    """Show a file's values as YAML, folded up. Empty for a file that is not there."""
    if values is None:
        return ""
    dumped = yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
    return f"<details><summary>{text(name)}</summary><pre>{text(dumped)}</pre></details>"


def _glossary_html() -> str:
    """Show the terms of the page with their meanings."""
    terms = ""
    for term, meaning in GLOSSARY.items():
        terms += f"<dt>{text(term)}</dt><dd>{text(meaning)}</dd>"
    return f'<dl class="terms">{terms}</dl>'
