"""Loss over seconds at several batch sizes: larger ones take longer steps, and fewer of them.

Zhang, Lipton, Li and Smola, Dive into Deep Learning, 12.5.4: gradient descent, SGD with one example
a step and two minibatches on the same linear regression. Each is a trial of bstune's own, with a
target that is never met and a budget of its epochs, so that its history is the loss over steps. A
step's time is the trial's tau(B), which leaves evaluation, start-up and the first steps out. The
book takes its batches from a DataLoader, row by row; here rows live on the device, and a step is
timed either way.

A trial, and a round of those timings, is kept as it ends (:mod:`bstune.sweeps.unit_log`).
"""

import functools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, NotRequired, TypedDict

import numpy as np
from pydantic import TypeAdapter

from bstune.config import Composed, with_settings
from bstune.core.errors import ConfigError
from bstune.core.records import Budget, Target, TrialProtocol, TrialResult, TrialSpec
from bstune.hardware.timing import time_trial
from bstune.options import option_at
from bstune.report.drawing import BLUE, GREY, INK, PURPLE, VERMILION
from bstune.sweeps.harness import Finding
from bstune.sweeps.statistics import QUARTILES
from bstune.sweeps.unit_log import UnitLog, UnitPlan, check_only, read_trial
from bstune.system.console import (
    format_count,
    format_number,
    format_seconds,
    plural,
    time_unit,
)
from bstune.trial.devices.device import device_name
from bstune.trial.loop import Workload, run_trial
from bstune.trial.workload import load_workload

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LOSS_FIGURE_INCHES = (8.0, 5.0)
SERIES_COLOURS = (INK, VERMILION, BLUE, PURPLE, GREY)
ROW_BY_ROW = "workload.data.row_by_row"
# Up to so many evaluations are each drawn as a point.
MOST_POINTS = 40
# Parameters that no trial and no round depends on: they choose or order them, or judge trials.
NOT_OF_A_UNIT = ("seeds", "order_seed", "level", "loader.rounds")
# Mean seconds of a step in a round, by source of rows and by run.
RoundMeans = list[list[float]]
READ_ROUND: TypeAdapter[RoundMeans] = TypeAdapter(RoundMeans)


class LossCurve(TypedDict):
    """Loss over seconds: median and quartiles over seeds, at the steps that all trials share."""

    steps: list[int]
    seconds: list[float]
    loss: list[float]
    loss_low: list[float]
    loss_high: list[float]


class SeriesRow(TypedDict):
    """The row of a series in result.json: medians over its trials, one for each seed."""

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
    # Milliseconds of a step, with rows that live on the device, and with rows that a DataLoader
    # takes out one by one.
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
    """How steps with either source of rows are timed: resident ones, and one by one."""

    # A round times each run with each source once, in shuffled order.
    rounds: int
    # The steps that are timed at a time.
    steps: int


def run(
    composed: Composed,
    log: UnitLog,
    *,
    metric: str,
    level: float,
    seeds: list[int],
    order_seed: int,
    loader: LoaderTiming,
    runs: list[Series],
    only: list[str],
    timer: Callable[..., tuple[float, ...]] = time_trial,
) -> Finding:
    """Train each of ``runs`` on each seed, in shuffled order, and show the loss over seconds.

    Args:
        composed: the workload.
        log: keeps the trials and the rounds.
        metric: the loss.
        level: a loss. The seconds until trials first come down to it are compared.
        seeds: of the trials.
        order_seed: of the order of trials, and of timings within a round.
        loader: how steps are timed with rows that live on the device, and with a DataLoader's.
        runs: the lines of the figure, each with a batch size, a learning rate and epochs.
        only: the units to measure now; empty: all.
        timer: tests replace it.
    """
    workload, protocol = load_workload(composed.options, composed.trained_recipe)
    # A trial that ended at the level would have no curve beyond it.
    protocol = replace(protocol, target=Target(metric, level, "min").never_met)
    _check_series(runs, seeds, loader, workload.train_examples)
    # The same data, which a DataLoader takes out row by row. A workload that cannot do that is
    # refused now, before anything is trained.
    from_loader = row_by_row(composed)
    loader_workload, _same_protocol = load_workload(from_loader.options, from_loader.trained_recipe)
    planned = _shuffled_trials(workload.train_examples, runs, seeds, order_seed)
    round_names = [f"loader/{number}" for number in range(1, loader.rounds + 1)]
    unit_names = [*planned, *round_names]
    check_only(only, unit_names)
    device = device_name(protocol.trainer)
    # These parameters may differ from those of the units that the log already has.
    log.begin(device, NOT_OF_A_UNIT)

    # A step takes nearly the same time at all of these batch sizes: the work is in proportion to
    # the steps.
    work = {name: float(trial.steps) for name, trial in planned.items()}
    trial_plan = UnitPlan(
        names=list(planned),
        only=only,
        noun="trial",
        read=read_trial,
        choices=unit_names,
        work=work,
    )

    def train(name: str) -> dict[str, object]:
        return _train_planned(planned[name], workload, protocol)

    results = log.measure(trial_plan, train)
    sources = (workload, loader_workload)
    orders = _orders_of_rounds(round_names, len(sources) * len(runs), order_seed)

    def time_round(name: str) -> RoundMeans:
        return loader_round(sources, protocol, runs, loader.steps, orders[name], timer)

    loader_plan = UnitPlan(
        names=round_names,
        only=only,
        noun="round",
        read=READ_ROUND.validate_python,
        choices=unit_names,
    )
    rounds = log.measure(loader_plan, time_round)
    log.check_finished(unit_names, {*results, *rounds})
    # The trials of each of ``runs``, one for each seed.
    trials: list[list[TrialResult]] = [[] for _ in runs]
    for name, result in results.items():
        trials[planned[name].place].append(result)
    rows = _rows_of_series(runs, trials, list(rounds.values()), level)
    title = (
        f"{composed.options.workload.name} on {device}: medians and quartiles over "
        f"{len(seeds)} seeds"
    )
    return Finding(
        sentence=f"{sentence(rows, level, len(seeds))} {loader_sentence(rows, loader.rounds)}",
        rows=rows,
        n=len(seeds),
        device=device,
        paint=functools.partial(_paint_losses, rows, level, metric, title),
        inches=LOSS_FIGURE_INCHES,
    )


def _rows_of_series(
    runs: Sequence[Series],
    trials: Sequence[Sequence[TrialResult]],
    rounds: Sequence[RoundMeans],
    level: float,
) -> list[SeriesRow]:
    """Make the row of each series.

    It has the milliseconds of a step with data that lives on the device, and with data that a
    DataLoader takes out row by row.
    """
    resident, one_by_one = _medians_over_rounds(rounds)
    rows = list[SeriesRow]()
    for place, series in enumerate(runs):
        series_row = row(series, trials[place], level)
        series_row["ms_resident"] = 1e3 * resident[place]
        series_row["ms_row_by_row"] = 1e3 * one_by_one[place]
        rows.append(series_row)
    return rows


@dataclass(frozen=True)
class PlannedTrial:
    """A trial of a series."""

    # The place of its series among all.
    place: int
    spec: TrialSpec
    steps: int


def _shuffled_trials(
    train_examples: int, runs: Sequence[Series], seeds: Sequence[int], order_seed: int
) -> dict[str, PlannedTrial]:
    """Plan a trial for each of ``runs`` and each seed, by the trial's name, in the order to run."""
    rng = np.random.default_rng(order_seed)
    planned = dict[str, PlannedTrial]()
    for seed in seeds:
        # Each seed has a new order, so that a disturbance of the machine hits every run alike.
        for place in rng.permutation(len(runs)).tolist():
            series = runs[place]
            number = len(planned)
            steps = math.ceil(series.epochs * train_examples / series.batch_size)
            spec = TrialSpec(
                number=number,
                trial_index=number,
                batch_size=series.batch_size,
                lr=series.lr,
                delta=None,
                seed=seed,
            )
            planned[f"{series.name}/{seed}"] = PlannedTrial(place, spec, steps)
    return planned


def _train_planned(
    trial: PlannedTrial, workload: Workload, protocol: TrialProtocol
) -> dict[str, object]:
    """Train a planned trial for its steps, and give the values of its result."""
    # A trial gives up once its steps and its examples are both spent. One example is spent by the
    # first step, so that the steps decide.
    budget = Budget(steps=trial.steps, examples=1)
    return asdict(run_trial(workload, trial.spec, replace(protocol, budget=budget)))


def _orders_of_rounds(
    round_names: Sequence[str], pairs: int, order_seed: int
) -> dict[str, list[int]]:
    """Draw the order in which each round times its pairs of a source of rows and a run.

    Gives the numbers of the pairs from 0, by the round's name. All rounds' orders are drawn, so
    that each round has the same one whichever rounds are kept.
    """
    rng = np.random.default_rng(order_seed)
    return {name: rng.permutation(pairs).tolist() for name in round_names}


def row_by_row(composed: Composed) -> Composed:
    """Give the study with data that a DataLoader takes out row by row.

    ConfigError for a workload whose data cannot do that.
    """
    if option_at(composed.options, ROW_BY_ROW) is None:
        raise ConfigError(
            "this sweep is of the workload airfoil, whose data have row_by_row; "
            f"{composed.options.workload.name} has not"
        )
    return with_settings(composed, {ROW_BY_ROW: True})


def loader_round(
    sources: Sequence[Workload],
    protocol: TrialProtocol,
    runs: Sequence[Series],
    steps: int,
    order: Sequence[int],
    timer: Callable[..., tuple[float, ...]],
) -> RoundMeans:
    """Time each run with each source of rows once, and give the mean seconds of a step.

    Args:
        sources: workloads with either source of rows.
        protocol: of the trials.
        runs: the series.
        steps: timed at a time.
        order: the numbers of all pairs of a source and a run, as they are timed; pair ``source *
            len(runs) + place`` is of that source and that run.
        timer: times steps.
    """
    means: RoundMeans = [[math.nan] * len(runs) for _ in sources]
    for index in order:
        source, place = divmod(index, len(runs))
        series = runs[place]
        seconds = timer(sources[source], protocol, series.batch_size, series.lr, steps)
        means[source][place] = statistics.mean(seconds)
    return means


def _medians_over_rounds(rounds: Sequence[RoundMeans]) -> RoundMeans:
    """Give the median over rounds of a step's seconds, by source of rows and by run."""
    medians = list[list[float]]()
    # First the rounds of each source of rows, then the values of each run in them.
    for rounds_of_source in zip(*rounds, strict=True):
        medians.append(
            [
                statistics.median(values_of_run)
                for values_of_run in zip(*rounds_of_source, strict=True)
            ]
        )
    return medians


def _check_series(
    runs: Sequence[Series], seeds: Sequence[int], loader: LoaderTiming, examples: int
) -> None:
    """Refuse series, seeds and timings out of their range, for ``examples`` of training data."""
    if loader.rounds < 1 or loader.steps < 1:
        raise ConfigError(
            f"sweep.experiment.loader needs rounds and steps from 1, but got {loader}"
        )
    if not runs or not seeds or min(seeds) < 0 or len(set(seeds)) < len(seeds):
        raise ConfigError(
            f"this sweep needs runs, and seeds from 0, each once, but got {len(runs)} runs and "
            f"seeds {list(seeds)}"
        )
    names = [series.name for series in runs]
    # The trials of a series are known by its name.
    if len(set(names)) < len(names):
        raise ConfigError(f"every run needs a name of its own, but got {', '.join(names)}")
    for series in runs:
        fits = 1 <= series.batch_size <= examples
        if not fits or not 0.0 < series.lr < math.inf or not 0.0 < series.epochs < math.inf:
            raise ConfigError(
                f"a run needs a batch size from 1 to {examples}, and a positive lr and epochs, but "
                f"got {series}"
            )


def row(series: Series, trials: Sequence[TrialResult], level: float) -> SeriesRow:
    """Make the row of a series: medians over its trials, one for each seed.

    ``steps_to_level`` and ``seconds_to_level``, which is those steps x tau(B), are None if the
    median trial does not reach the level. The curve has the steps at which every trial was
    evaluated and had a finite loss.
    """
    histories = list[dict[int, float]]()
    taus = list[float]()
    steps_to_level = list[float]()
    for trial in trials:
        history = {step: loss for step, loss in trial.history if loss is not None}
        histories.append(history)
        steps_to_level.append(_steps_to(history, level))
        # A trial without a step has no seconds of one: it counts as infinitely slow.
        taus.append(trial.seconds_per_step or math.inf)
    tau = statistics.median(taus)
    curve = _loss_curve(histories, tau)
    last_loss: float | None = None
    if curve["loss"]:
        last_loss = curve["loss"][-1]
    # None where the median trial misses the level, though others may reach it.
    median_steps: float | None = None
    median_seconds: float | None = None
    middle = statistics.median(steps_to_level)
    if math.isfinite(middle) and math.isfinite(tau):
        median_steps = middle
        median_seconds = middle * tau
    return {
        "run": series.name,
        "batch_size": series.batch_size,
        "lr": series.lr,
        "epochs": series.epochs,
        "ms_per_step": 1e3 * tau,
        "last_loss": last_loss,
        "steps_to_level": median_steps,
        "seconds_to_level": median_seconds,
        "curve": curve,
        "trials": list(map(_trial_values, trials)),
    }


def _loss_curve(histories: Sequence[Mapping[int, float]], tau: float) -> LossCurve:
    """Give the median and the quartiles of the loss at the steps that all histories have.

    ``histories``: the loss by step. ``tau``: the seconds of a step.
    """
    # Trials on other seeds may have ended early, or had a loss that was not finite somewhere.
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
    """Give the values of a trial that go to result.json."""
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
    """Say which run gets to ``level`` first, and how much later the others do."""
    reached_rows = list[tuple[float, SeriesRow]]()
    absent = list[str]()
    for series_row in rows:
        if series_row["seconds_to_level"]:
            reached_rows.append((series_row["seconds_to_level"], series_row))
        else:
            absent.append(series_row["run"])
    medians = f"(medians, n = {plural(n, 'seed')})"
    if not reached_rows:
        return f"No run reaches a loss of {format_number(level)} in its epochs {medians}."
    reached_rows.sort(key=lambda pair: pair[0])
    (least, first), *rest = reached_rows
    text = (
        f"{first['run']} reaches a loss of {format_number(level)} first, in "
        f"{format_seconds(least)} ({_cost_text(first)})"
    )
    for seconds, later in rest:
        times = format_number(seconds / least, 2)
        text += f"; {later['run']} takes {times} times as long ({_cost_text(later)})"
    if len(absent) == 1:
        text += f"; {absent[0]} never reaches it"
    elif absent:
        text += f"; {' and '.join(absent)} never reach it"
    return f"{text[0].upper()}{text[1:]} {medians}."


def _cost_text(row: SeriesRow) -> str:
    """Write the steps to the level, and the time of a step."""
    steps = format_count(row["steps_to_level"])
    return f"{steps} steps of {format_number(row['ms_per_step'])} ms"


def loader_sentence(rows: Sequence[SeriesRow], rounds: int) -> str:
    """Say how much longer a step takes if a DataLoader takes its rows out one by one."""
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
    last_seconds = list[float]()
    for row in rows:
        if row["curve"]["seconds"]:
            last_seconds.append(row["curve"]["seconds"][-1])
    # The unit is that of the shortest curve, which would be lost in a unit of the longest.
    scale, unit = time_unit(min(last_seconds, default=1.0))
    for place, row in enumerate(rows):
        curve = row["curve"]
        colour = SERIES_COLOURS[place % len(SERIES_COLOURS)]
        seconds = np.array(curve["seconds"]) / scale
        # Where there are many evaluations, points would hide the line and each other.
        marker = "o" if len(seconds) <= MOST_POINTS else ""
        label = (
            f"{row['run']}, lr {format_number(row['lr'])}, {format_number(row['epochs'])} epochs"
        )
        axes.plot(
            seconds,
            curve["loss"],
            color=colour,
            linewidth=1.6,
            marker=marker,
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
    # Runs differ by two orders of magnitude in their time to the level.
    axes.set_xscale("log")
    axes.set_xlabel(f"{unit} of training (steps x tau(B)), evaluation left out")
    axes.set_ylabel(f"loss on the training data ({metric})")
    axes.grid(color=INK, alpha=0.07, linewidth=0.6)
    axes.legend(frameon=False, fontsize=8.5)
    axes.set_title(title, fontsize=10.5, parse_math=False)
