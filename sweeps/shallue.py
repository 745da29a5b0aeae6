"""Studies that differ in one factor, compared: what moves the critical batch size, and by how much.

Shallue et al. 2018 (arXiv 1811.03600) tuned each batch size of 35 workloads and compared how far
steps to target kept falling over models, algorithms, data sets and regularisation. Here each of a
sweep's studies is an ordinary study of bstune, with its own folder; the same command continues
those that have not ended (:mod:`bstune.sweeps.unit_log` keeps which have), and ends in one
comparison.

The figure has each study's curve with its regimes, and all of them on one law
(:mod:`bstune.sweeps.shallue_panel`); the comparison's own figure stands beside it in the folder.
One panel is below them: the fewest steps within a budget of examples. A larger batch takes fewer
steps for more examples, so S*(B) over E(B) = B S*(B) is what a budget of examples buys (McCandlish
et al. 2018, arXiv 1812.06162, section 2.3). It is drawn from the batch size with the fewest
examples on: below it both would be wasted.
"""

import functools
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console

from bstune.config import Composed
from bstune.core.errors import ConfigError, Interrupted, StudyError
from bstune.report.compare import Comparison, compare
from bstune.report.compare_console import write_comparison
from bstune.report.compare_figure import looks
from bstune.report.compared_pairs import Pair
from bstune.report.compared_study import Compared, compared_study
from bstune.report.drawing import log_axis, log_limits
from bstune.report.study_folder import read_study
from bstune.result import StudyResult
from bstune.study.prepare import compose_checked
from bstune.study.run import run as run_study
from bstune.sweeps.harness import Finding
from bstune.sweeps.shallue_panel import law_text, paint_panel, panel_curve, panel_inches
from bstune.sweeps.unit_log import UnitLog, UnitPlan, check_only
from bstune.system.console import format_count, format_number, plural, quieten
from bstune.system.files import Output

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# A slope at an end of the curve is taken over this factor of the batch size.
END_SPAN = 4.0
BUDGET_INCHES = 3.0
# What the errors of a study advise, where a study of another name would do; a sweep names its own.
OWN_NAME = "study=NAME"
# A text that Hydra takes without quotes.
UNQUOTED = re.compile(r"[\w./:-]+")


def run(
    console: Console,
    log: UnitLog,
    *,
    factor: str,
    folder: str,
    common: list[str],
    studies: dict[str, list[str]],
    options: list[str],
    only: list[str],
) -> Finding:
    """Run or continue each study, and compare them.

    Args:
        console: takes the lines of the studies.
        log: keeps which studies have ended.
        factor: the words for what the studies differ in.
        folder: has the studies' folders and their storage.
        common: arguments of every study, as on the command line.
        studies: further arguments of each study, by its name.
        options: arguments of every study, after all others.
        only: the studies to run now; empty: all.

    Raises:
        ConfigError: before any study runs, if there is none or one cannot be composed.
        Interrupted: says where the finished trials are kept.
        StudyError: if a study cannot go on, as with other settings.
    """
    if not studies:
        raise ConfigError("this sweep compares studies, but sweep.experiment.studies has none")
    root = Path(folder).absolute()
    arguments = dict[str, list[str]]()
    for name, own_arguments in studies.items():
        arguments[name] = [*common, *own_arguments, *options, *_kept_within(name, root)]
    composed = _compose_studies(arguments)
    check_only(only, list(composed))
    # A study whose arguments have changed is run again. It checks for itself which options may
    # change, and continues or refuses.
    # No seconds are compared, so that another device may go on with the sweep.
    log.begin(device=None, may_change=("factor", "folder", "common", "studies", "options"))
    root.mkdir(parents=True, exist_ok=True)
    quieten(training=True)
    # A study whose folder has been moved away since runs again.
    log.drop(lambda record: not Output(root / record.unit).curve.exists())

    def run_to_its_end(name: str) -> int:
        study = composed[name]
        number = list(composed).index(name) + 1
        console.print(
            f"\n{factor} {name}, study {number} of {len(composed)}", soft_wrap=True, markup=False
        )
        _run_or_continue(study, arguments[name], root, console)
        return read_study(root / name).result.trials

    plan = UnitPlan(
        names=list(composed),
        only=only,
        noun="study",
        # The log has a study's number of trials.
        read=int,
        inputs=arguments,
        # No time to go is predicted, as a study of another model or data set may take many times as
        # long.
        work=None,
        shown=lambda trials: plural(trials, "trial"),
    )
    ended = log.measure(plan, run_to_its_end)
    log.check_finished(plan.names, ended)
    results = {name: read_study(root / name).result for name in composed}
    compared = list[Compared]()
    for name, result in results.items():
        compared.append(replace(compared_study(result, str(root / name)), name=name))
    comparison = compare(compared)
    console.print()
    write_comparison(comparison, root, console)
    return _make_finding(factor, comparison, results, arguments)


def _run_or_continue(study: Composed, arguments: list[str], root: Path, console: Console) -> None:
    """Run or continue a study of the sweep. Its errors are worded for the sweep in ``root``."""
    try:
        run_study(study.options, study.recipe, arguments, console)
    # Lightning turns a KeyboardInterrupt into a SystemExit.
    except (KeyboardInterrupt, SystemExit) as error:
        raise Interrupted(
            f"interrupted: {root} keeps all finished trials; the same command goes on"
        ) from error
    except StudyError as error:
        # Some errors advise to name another study, which in a sweep is not the user's to do.
        if OWN_NAME not in str(error):
            raise
        raise StudyError(
            f"{error}\nin a sweep sweep.output=DIR takes the place of {OWN_NAME}, for all of its "
            "studies"
        ) from error


def _make_finding(
    factor: str,
    comparison: Comparison,
    results: Mapping[str, StudyResult],
    arguments: Mapping[str, list[str]],
) -> Finding:
    """Make the finding of a comparison, with a row for each study.

    ``results`` and ``arguments`` are those of the studies, by name.
    """
    width, height = panel_inches(len(comparison.studies))
    notes = list(comparison.notes)
    on_law = law_text(list(map(panel_curve, comparison.studies)))
    if on_law is not None:
        notes.append(on_law)
    return Finding(
        sentence=sentence(factor, comparison),
        rows=[row(study, results[study.name]) for study in comparison.studies],
        # Each study is run once.
        n=1,
        device=", ".join(dict.fromkeys(study.device for study in comparison.studies)),
        paint=functools.partial(_paint_studies, comparison),
        inches=(width, height + BUDGET_INCHES),
        notes=notes,
        details={"pairs": list(map(str, comparison.pairs)), "arguments": arguments},
    )


def _compose_studies(arguments: Mapping[str, list[str]]) -> dict[str, Composed]:
    """Compose each study from its arguments, by its name. ConfigError names the first wrong one."""
    composed = dict[str, Composed]()
    for name, study_arguments in arguments.items():
        try:
            composed[name] = compose_checked(study_arguments)
        except ConfigError as error:
            raise ConfigError(f"sweep.experiment.studies.{name}: {error}") from error
    return composed


def _kept_within(name: str, root: Path) -> list[str]:
    """Give the arguments that keep a study and its trials within the sweep's folder, ``root``.

    Nothing is sent to MLflow. A value that Hydra would not take as plain text stands in quotes.
    """
    values = {"study": name, "output": root / name, "storage": f"sqlite:///{root}/studies.db"}
    arguments = list[str]()
    for key, value in values.items():
        text = str(value)
        if not UNQUOTED.fullmatch(text):
            text = f"'{text}'"
        arguments.append(f"{key}={text}")
    return [*arguments, "mlflow.enabled=false"]


def row(study: Compared, result: StudyResult) -> dict[str, object]:
    """Make the row of a study.

    Slopes are those of log S*(B) over log B, over a factor of 4 at the small and at the large end
    of the batch sizes that reached the target: -1 is perfect scaling, 0 no gain. ``steps`` and
    ``examples`` are the least of the trials that reached the target. ``searched`` has the winner's
    values of other searched hyper-parameters, such as a momentum.
    """
    small, large = end_slopes(study)
    searched = dict[str, float | None]()
    if result.winner is not None:
        searched.update(result.winner.hyperparameters)
    sizes = list[float]()
    steps = list[float]()
    examples = list[float]()
    for point in study.points:
        sizes.append(point.batch_size)
        steps.append(point.steps)
        examples.append(point.steps * point.batch_size)
    reached_at = "-"
    if sizes:
        reached_at = f"{format_count(min(sizes))} to {format_count(max(sizes))}"
    slopes = "-"
    if small is not None:
        slopes = f"{small:.2f}, {large:.2f}"
    return {
        "study": study.name,
        "B_crit": study.critical,
        "slopes": slopes,
        "exponent of lr": study.exponent_text,
        "searched": _searched_text(searched),
        "reached at B": reached_at,
        "steps": min(steps, default=None),
        "examples": min(examples, default=None),
        "reached": f"{result.statuses['reached']} of {result.trials}",
        "details": {
            "b_crit": study.b_crit,
            "b_crit_low": study.b_crit_low,
            "b_crit_high": study.b_crit_high,
            "level": study.level,
            "exponent": study.exponent,
            "slope_small": small,
            "slope_large": large,
            "target": study.target,
            "seconds": study.spend_seconds,
            "searched": searched,
        },
    }


def _searched_text(values: Mapping[str, float | None]) -> str:
    """Write hyper-parameters that were searched, by name: ``momentum 0.93``.

    Those that were not are None. If none was, beside batch size and learning rate, it is a dash.
    """
    texts = list[str]()
    for name, value in values.items():
        if value is not None:
            texts.append(f"{name} {format_number(value)}")
    return ", ".join(texts) or "-"


def end_slopes(study: Compared) -> tuple[float | None, float | None]:
    """Give the slopes of log S*(B) over log B at the small and at the large end of the points.

    None for both if there is no curve, or fewer than two batch sizes.
    """
    if not study.steps.size or not study.points:
        return None, None
    low = study.points[0].batch_size
    high = study.points[-1].batch_size
    if low == high:
        return None, None
    # Where the batch sizes that reached the target span less, both slopes are over all of them.
    span = min(END_SPAN, high / low)

    def slope(start: float) -> float:
        log_sizes = np.log([start, start * span])
        log_steps = np.interp(log_sizes, np.log(study.batch_size), np.log(study.steps))
        return float((log_steps[1] - log_steps[0]) / (log_sizes[1] - log_sizes[0]))

    return slope(low), slope(high / span)


def sentence(factor: str, comparison: Comparison) -> str:
    """Name the largest and the smallest critical batch size, and say whether they differ.

    ``factor``: what the studies differ in, in words.
    """
    known = list[tuple[float, Compared]]()
    missing = list[str]()
    for study in comparison.studies:
        if study.b_crit is None:
            missing.append(study.name)
        else:
            known.append((study.b_crit, study))
    unknown = ""
    if missing:
        unknown = f" That of {' and '.join(missing)} is not known."
    if len(known) < 2:
        return (
            f"Of {len(comparison.studies)} studies too few have a critical batch size to compare "
            f"them.{unknown}"
        )
    known.sort(key=lambda pair: pair[0])
    _, small = known[0]
    _, large = known[-1]
    # The comparison has each pair of studies once, in either order.
    end_names = {small.name, large.name}
    pair = next(pair for pair in comparison.pairs if {pair.larger, pair.smaller} == end_names)
    differ = sum(pair.differ is True for pair in comparison.pairs)
    return (
        f"{factor[0].upper()}{factor[1:]}: the critical batch size is largest for {large.name}, "
        f"{large.critical}, and smallest for {small.name}, {small.critical}, {_verdict(pair)}; of "
        f"{len(comparison.pairs)} pairs {differ} differ.{unknown}"
    )


def _verdict(pair: Pair) -> str:
    """Write a pair's ratio, and whether the two are shown to differ."""
    ratio = f"{format_number(pair.ratio, 2)} times as large"
    if pair.differ is None:
        return f"{ratio}, with an open interval"
    verdict = "which are not shown to differ"
    if pair.differ:
        verdict = "which differ"
    return f"{ratio} ({pair.interval}), {verdict}"


def budget_curve(study: Compared) -> tuple[np.ndarray, np.ndarray]:
    """Give the fewest steps to the target over the examples that may be spent, both (n,).

    The first array has the examples, E(B), from the fewest that reach the target on. The second one
    has the steps. Both are empty where there is no curve.
    """
    if not study.steps.size or not study.points:
        return np.empty(0), np.empty(0)
    from_smallest = study.batch_size >= study.points[0].batch_size
    to_largest = study.batch_size <= study.points[-1].batch_size
    seen = from_smallest & to_largest
    examples = (study.batch_size * study.steps)[seen]
    steps = study.steps[seen]
    if not examples.size:
        return examples, steps
    # Below the batch size of the fewest examples, steps and examples would both be wasted.
    start = int(np.argmin(examples))
    return examples[start:], np.minimum.accumulate(steps[start:])


def _paint_studies(comparison: Comparison, figure: "Figure") -> None:
    """Draw each study's curve, all on one law, and the fewest steps within a budget of examples."""
    _width, height = panel_inches(len(comparison.studies))
    (top,), (foot,) = figure.subfigures(2, 1, squeeze=False, height_ratios=[height, BUDGET_INCHES])
    paint_panel(top, list(map(panel_curve, comparison.studies)))
    axes = foot.subplots()
    all_examples = list[np.ndarray]()
    all_steps = list[np.ndarray]()
    for look in looks(comparison.studies):
        examples, steps = budget_curve(look.study)
        if examples.size:
            axes.plot(examples, steps, color=look.colour, linewidth=1.6, label=look.name)
            all_examples.append(examples)
            all_steps.append(steps)
    axes.set(xlabel="examples that may be trained on", ylabel="fewest steps to target")
    axes.set_title("What a budget of examples buys", fontsize=9.0, loc="left")
    if all_examples:
        log_axis(axes, "x", log_limits(np.concatenate(all_examples), (0.05, 0.05)), decimal=True)
        log_axis(axes, "y", log_limits(np.concatenate(all_steps), (0.1, 0.1)))
        axes.legend(frameon=False, fontsize=7.5)
