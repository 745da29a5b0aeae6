"""Loss over seconds of training at several batch sizes: what a batch size costs a step and what it saves in steps.

Zhang, Lipton, Li and Smola, Dive into Deep Learning, 12.5.4: gradient descent, SGD with one example a step and two
minibatches on the same linear regression. Each is a trial of bstune's own, with a target that is never met and a budget
of its epochs, so that its history is the loss over steps. A step's time is the trial's tau(B), which leaves evaluation,
start-up and the first steps out. The book takes its batches from a DataLoader, row by row; here rows live on the
device, and a step is timed either way.
"""

import functools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NotRequired, TypedDict

import numpy as np
from rich.console import Console
from rich.progress import track

from bstune.config import Composed, with_settings
from bstune.core.errors import ConfigError
from bstune.core.records import Budget, Target, TrialProtocol, TrialResult, TrialSpec
from bstune.hardware.timing import time_trial
from bstune.options import option_at
from bstune.report.drawing import BLUE, GREY, INK, PURPLE, VERMILION
from bstune.sweeps.harness import Finding
from bstune.sweeps.statistics import QUARTILES
from bstune.system.console import format_count, format_number, format_seconds, time_unit
from bstune.trial.devices.device import device_name
from bstune.trial.loop import Workload, run_trial
from bstune.trial.workload import load_workload

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LOSS_FIGURE_INCHES = (8.0, 5.0)
SERIES_COLOURS = (INK, VERMILION, BLUE, PURPLE, GREY)
ROW_BY_ROW = "workload.data.row_by_row"
# Evaluations, up to which each is drawn as a point.
MOST_POINTS = 40


class LossCurve(TypedDict):
    """Loss over seconds: the median over seeds and its quartiles, at the steps that all trials share."""

    steps: list[int]
    seconds: list[float]
    loss: list[float]
    loss_low: list[float]
    loss_high: list[float]


class SeriesRow(TypedDict):
    """The medians of a series over its trials, in result.json."""

    run: str
    batch_size: int
    lr: float
    epochs: float
    ms_per_step: float
    last_loss: float | None
    steps_to_level: float | None
    seconds_to_level: float | None
    curve: LossCurve
    trials: list[dict[str, object]]
    # Of a step, with rows that live on the device, and with rows that a DataLoader takes out one by
    # one.
    ms_resident: NotRequired[float]
    ms_row_by_row: NotRequired[float]


@dataclass(frozen=True)
class Series:
    """One line of the figure: a batch size with its learning rate and its epochs."""

    name: str
    batch_size: int
    lr: float
    epochs: float


@dataclass  # not frozen: OmegaConf could not fill it in
class LoaderTiming:
    """How steps are timed whose rows come one by one."""

    rounds: int  # of all runs with either source of rows, in shuffled order
    steps: int  # in each


def run(
    composed: Composed,
    console: Console,
    *,
    metric: str,
    level: float,
    seeds: list[int],
    order_seed: int,
    loader: LoaderTiming,
    runs: list[Series],
    timer: Callable[..., tuple[float, ...]] = time_trial,
) -> Finding:
    """Train each of ``runs`` on each seed, in shuffled order, and show the loss over seconds.

    Tests replace ``timer``.
    """
    workload, protocol = load_workload(composed.options, composed.trained)
    protocol = replace(protocol, target=Target(metric, level, "min").never_met)
    _check_series(runs, seeds, loader, workload.train_examples)
    trials = _train_series(workload, protocol, runs, seeds, order_seed, console)
    from_loader = row_by_row(composed)
    loader_workload, _ = load_workload(from_loader.options, from_loader.trained)
    order = np.random.default_rng(order_seed)
    sources = (workload, loader_workload)
    resident, one_by_one = loader_seconds(sources, protocol, runs, loader, order, timer)
    rows = list[SeriesRow]()
    for place, series in enumerate(runs):
        series_row = row(series, trials[place], level)
        series_row["ms_resident"] = 1e3 * resident[place]
        series_row["ms_row_by_row"] = 1e3 * one_by_one[place]
        rows.append(series_row)
    device = device_name(protocol.trainer)
    title = (
        f"{composed.options.workload.name} on {device}: medians and quartiles over {len(seeds)} "
        "seeds"
    )
    return Finding(
        sentence=f"{sentence(rows, level, len(seeds))} {loader_sentence(rows, loader.rounds)}",
        rows=rows,
        n=len(seeds),
        device=device,
        paint=functools.partial(_paint_losses, rows, level, metric, title),
        inches=LOSS_FIGURE_INCHES,
    )


def _train_series(
    workload: Workload,
    protocol: TrialProtocol,
    runs: Sequence[Series],
    seeds: Sequence[int],
    order_seed: int,
    console: Console,
) -> list[list[TrialResult]]:
    """Train each of ``runs`` on each seed; give the trials of each."""
    rng = np.random.default_rng(order_seed)
    plan = list[tuple[int, int]]()
    for seed in seeds:
        # Shuffled anew: what the machine does meanwhile is to hit every run.
        plan += [(place, seed) for place in rng.permutation(len(runs)).tolist()]
    trials: list[list[TrialResult]] = [[] for _ in runs]
    progress = track(
        list(enumerate(plan)),
        "training",
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    for number, (place, seed) in progress:
        series = runs[place]
        steps = math.ceil(series.epochs * workload.train_examples / series.batch_size)
        spec = TrialSpec(number, number, series.batch_size, series.lr, None, seed)
        trials[place].append(run_trial(workload, spec, replace(protocol, budget=Budget(steps, 1))))
    return trials


def row_by_row(composed: Composed) -> Composed:
    """Have a DataLoader take the rows out one by one."""
    if option_at(composed.options, ROW_BY_ROW) is None:
        raise ConfigError(
            "this sweep is of the workload airfoil, whose data have row_by_row; "
            f"{composed.options.workload.name} has not"
        )
    return with_settings(composed, {ROW_BY_ROW: True})


def loader_seconds(
    sources: Sequence[Workload],
    protocol: TrialProtocol,
    runs: Sequence[Series],
    loader: LoaderTiming,
    rng: np.random.Generator,
    timer: Callable[..., tuple[float, ...]],
) -> list[list[float]]:
    """Time a step of each run with each source of rows: medians over rounds of a round's means.

    A round times each of them once, in an order of its own.
    """
    pairs = [(source, place) for source in range(len(sources)) for place in range(len(runs))]
    means: dict[tuple[int, int], list[float]] = {pair: [] for pair in pairs}
    for _ in range(loader.rounds):
        for index in rng.permutation(len(pairs)).tolist():
            source, place = pairs[index]
            series = runs[place]
            steps = timer(sources[source], protocol, series.batch_size, series.lr, loader.steps)
            means[source, place].append(statistics.mean(steps))
    seconds = list[list[float]]()
    for source in range(len(sources)):
        seconds.append([statistics.median(means[source, place]) for place in range(len(runs))])
    return seconds


def _check_series(
    runs: Sequence[Series], seeds: Sequence[int], loader: LoaderTiming, examples: int
) -> None:
    if loader.rounds < 1 or loader.steps < 1:
        raise ConfigError(
            f"sweep.experiment.loader needs rounds and steps from 1, but got {loader}"
        )
    if not runs or not seeds or min(seeds) < 0:
        raise ConfigError(
            f"this sweep needs runs, and seeds from 0, but got {len(runs)} runs and seeds "
            f"{list(seeds)}"
        )
    for series in runs:
        fits = 1 <= series.batch_size <= examples
        if not fits or not 0.0 < series.lr < math.inf or not 0.0 < series.epochs < math.inf:
            raise ConfigError(
                f"a run needs a batch size from 1 to {examples}, and a positive lr and epochs, but "
                f"got {series}"
            )


def row(series: Series, trials: Sequence[TrialResult], level: float) -> SeriesRow:
    """Give the medians of a series over its trials, one a seed.

    ``steps_to_level`` and ``seconds_to_level``, those steps x tau(B), are None where the median trial does not reach
    the level. The curve holds the steps at which every trial was evaluated and had a finite loss.
    """
    histories = list[dict[int, float]]()
    for trial in trials:
        histories.append({step: loss for step, loss in trial.history if loss is not None})
    tau = statistics.median(trial.seconds_per_step or math.inf for trial in trials)
    curve = _loss_curve(histories, tau)
    reached = statistics.median(_steps_to(history, level) for history in histories)
    reaches = math.isfinite(reached) and math.isfinite(tau)
    return {
        "run": series.name,
        "batch_size": series.batch_size,
        "lr": series.lr,
        "epochs": series.epochs,
        "ms_per_step": 1e3 * tau,
        "last_loss": curve["loss"][-1] if curve["loss"] else None,
        "steps_to_level": reached if reaches else None,
        "seconds_to_level": reached * tau if reaches else None,
        "curve": curve,
        "trials": [_trial_values(trial) for trial in trials],
    }


def _loss_curve(histories: Sequence[Mapping[int, float]], tau: float) -> LossCurve:
    steps = sorted(set.intersection(*map(set, histories)))
    curve: LossCurve = {
        "steps": steps,
        "seconds": [step * tau for step in steps],
        "loss": [],
        "loss_low": [],
        "loss_high": [],
    }
    for step in steps:
        losses = [history[step] for history in histories]
        low, middle, high = np.quantile(losses, QUARTILES).tolist()
        curve["loss"].append(middle)
        curve["loss_low"].append(low)
        curve["loss_high"].append(high)
    return curve


def _trial_values(trial: TrialResult) -> dict[str, object]:
    return {
        "seed": trial.seed,
        "status": trial.status,
        "seconds_per_step": trial.seconds_per_step,
        "history": trial.history,
    }


def _steps_to(history: Mapping[int, float], level: float) -> float:
    """Give the step of the first evaluation at or below ``level``; infinity if there is none."""
    return min((step for step, loss in history.items() if loss <= level), default=math.inf)


def sentence(rows: Sequence[SeriesRow], level: float, n: int) -> str:
    """Put the finding into words: which run gets to ``level`` first, and how much later the others do."""
    there = list[tuple[float, SeriesRow]]()
    absent = list[str]()
    for series_row in rows:
        if series_row["seconds_to_level"]:
            there.append((series_row["seconds_to_level"], series_row))
        else:
            absent.append(series_row["run"])
    plural = "s" if n > 1 else ""
    medians = f"(medians, n = {n} seed{plural})"
    if not there:
        return f"No run reaches a loss of {format_number(level)} in its epochs {medians}."
    there.sort(key=lambda pair: pair[0])
    (least, first), *rest = there
    text = (
        f"{first['run']} reaches a loss of {format_number(level)} first, in "
        f"{format_seconds(least)} ({_cost_text(first)})"
    )
    for seconds, later in rest:
        times = format_number(seconds / least, 2)
        text += f"; {later['run']} takes {times} times as long ({_cost_text(later)})"
    if absent:
        third_person = "es" if len(absent) == 1 else ""
        text += f"; {' and '.join(absent)} never reach{third_person} it"
    return f"{text[0].upper()}{text[1:]} {medians}."


def _cost_text(row: SeriesRow) -> str:
    steps = format_count(row["steps_to_level"])
    return f"{steps} steps of {format_number(row['ms_per_step'])} ms"


def loader_sentence(rows: Sequence[SeriesRow], rounds: int) -> str:
    """Say how much longer a step takes whose rows a DataLoader takes out one by one."""
    parts = list[str]()
    for series_row in sorted(rows, key=lambda row: row["batch_size"]):
        times = format_number(series_row["ms_row_by_row"] / series_row["ms_resident"])
        parts.append(f"{times} times as long at {series_row['batch_size']}")
    return (
        f"With a DataLoader that takes rows one by one a step lasts {', '.join(parts)} as with "
        f"rows that live on the device (by batch size, medians, n = {rounds} rounds)."
    )


def _paint_losses(
    rows: Sequence[SeriesRow], level: float, metric: str, title: str, figure: "Figure"
) -> None:
    """Draw each run's loss over its seconds on a logarithmic axis, with its quartiles."""
    axes = figure.subplots()
    ends = [row["curve"]["seconds"][-1] for row in rows if row["curve"]["seconds"]]
    scale, unit = time_unit(min(ends, default=1.0))
    for place, row in enumerate(rows):
        curve = row["curve"]
        colour = SERIES_COLOURS[place % len(SERIES_COLOURS)]
        seconds = np.array(curve["seconds"]) / scale
        label = (
            f"{row['run']}, lr {format_number(row['lr'])}, {format_number(row['epochs'])} epochs"
        )
        axes.plot(
            seconds,
            curve["loss"],
            color=colour,
            linewidth=1.6,
            marker="o" if len(seconds) <= MOST_POINTS else "",
            markersize=3.5,
            label=label,
            zorder=3,
        )
        low = curve["loss_low"]
        high = curve["loss_high"]
        axes.fill_between(seconds, low, high, color=colour, alpha=0.18, linewidth=0)
    axes.axhline(
        level,
        color=GREY,
        linewidth=0.9,
        linestyle="--",
        label=f"loss {format_number(level)}",
        zorder=1,
    )
    axes.set_xscale("log")
    axes.set_xlabel(f"{unit} of training (steps x tau(B)), evaluation left out")
    axes.set_ylabel(f"loss on the training data ({metric})")
    axes.grid(color=INK, alpha=0.07, linewidth=0.6)
    axes.legend(frameon=False, fontsize=8.5)
    axes.set_title(title, fontsize=10.5, parse_math=False)
