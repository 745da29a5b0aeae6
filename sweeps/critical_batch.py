"""B_crit, the curve's slopes at its ends and the best rate's exponent, from a dense table's runs.

At each target the frontier is the best cell of each half octave, by the median over its seeds, and
B_crit is fitted to it (:func:`bstune.core.curve.fit_curve`). The best learning rate at a batch size
is the bottom of a parabola through log steps at the best cell and its neighbours. Its exponent is
the least-squares slope of its logarithm over that of B, with Student's t of as many batch sizes.
Easier targets are read from the same runs.

The row of a table at one target is kept as soon as it is computed (:mod:`bstune.sweeps.unit_log`).
"""

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np
from scipy.special import stdtrit

from bstune.core.curve import CurveError, CurveFit, fit_curve, log_slope
from bstune.core.errors import ConfigError, TableError
from bstune.core.records import Target
from bstune.report.drawing import INK, PURPLE, log_axis, log_limits
from bstune.result import CriticalAtTarget, Growth
from bstune.study.analysis.critical import FINE, MAX_COARSE, growth_over_target
from bstune.sweeps.harness import Finding
from bstune.sweeps.search_benchmark import find_sources, find_target, read_stoppable_runs
from bstune.sweeps.search_problem import dense_points, median_steps
from bstune.sweeps.unit_log import UnitLog, UnitPlan, check_only
from bstune.system.console import format_number
from bstune.trial.recorded_run import Run
from bstune.trial.replay import Table, read_index

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# The slope at an end is that of a line through so many batch sizes.
SIZES_AT_END = 3
TABLE_MARKERS = "osD^vPX*"


class CriticalRow(TypedDict):
    """A table's row in result.json, read at one target. A value that it leaves open is None."""

    table: str
    metric: str
    target: float
    smallest: float
    largest: float
    slope_small: float
    slope_large: float
    b_crit: float | None
    b_crit_low: float | None
    b_crit_high: float | None
    lr_exponent: float | None
    lr_low: float | None
    lr_high: float | None
    fit: dict[str, object]


@dataclass(frozen=True)
class TableRecord:
    """A table read at one target: a row, or why there is none."""

    row: CriticalRow | None
    # Why there is no row; None if there is one.
    left_out: str | None


def _read_record(values: Mapping[str, Any]) -> TableRecord:
    """Make a record of JSON's values; LookupError or ValueError for another form."""
    row = values["row"]
    if row is not None and set(row) != set(CriticalRow.__annotations__):
        raise ValueError(f"a row has the columns {', '.join(CriticalRow.__annotations__)}")
    return TableRecord(row, values["left_out"])


@dataclass(frozen=True)
class TableAtTarget:
    """The name of a table, and a target at which it is read."""

    table: str
    target: Target


def run(
    log: UnitLog,
    *,
    tables: list[str],
    target: float | None,
    easier: list[float],
    level: float,
    only: list[str],
) -> Finding:
    """Read each table at its target and at easier ones, and show how B_crit depends on the target.

    Args:
        log: keeps the rows.
        tables: names or files; empty: all that ship.
        target: its value; None: that of each table.
        easier: multiples of the target, 1 or more.
        level: the nominal coverage of the intervals, between 0 and 1.
        only: the units to read now; empty: all.
    """
    if not easier or not all(math.isfinite(multiple) and multiple >= 1.0 for multiple in easier):
        raise ConfigError(
            f"sweep.experiment.easier must be multiples of the target, 1 or more, but got {easier}"
        )
    if not 0.0 < level < 1.0:
        raise ConfigError(f"sweep.experiment.level must be between 0 and 1, but got {level}")
    planned = _plan_tables(tables, target, easier)
    readings = planned.readings
    check_only(only, list(readings))
    # Recorded runs are read: no device takes part.
    log.begin(device=None, may_change=("tables", "target", "easier"))

    def read_unit(unit: str) -> dict[str, object]:
        reading = readings[unit]
        record = table_record(reading.table, planned.tables[reading.table], reading.target, level)
        return vars(record)

    plan = UnitPlan(
        names=list(readings),
        only=only,
        noun="target",
        read=_read_record,
        inputs=planned.inputs,
    )
    records = log.measure(plan, read_unit)
    log.check_finished(plan.names, records)
    rows = list[CriticalRow]()
    notes = list[str]()
    for unit, record in records.items():
        if record.row is not None:
            rows.append(record.row)
        else:
            reading = readings[unit]
            notes.append(f"{reading.table}, {reading.target} is left out: {record.left_out}")
    if not rows:
        raise TableError(f"no table determines anything: {'; '.join(notes)}")
    return Finding(
        sentence=sentence(rows),
        rows=list(map(row_as_texts, rows)),
        # The fewest seeds of a recorded point in any table.
        n=min(min(map(len, table.cells.values())) for table in planned.tables.values()),
        device="recorded runs",
        paint=functools.partial(_paint_over_targets, rows, level),
        inches=(7.0, 4.6),
        notes=notes,
        details={"numbers": rows},
    )


@dataclass(frozen=True)
class _PlannedTables:
    """The tables of a sweep, and the targets at which they are read.

    Args:
        tables: by name.
        readings: a table and a target at which it is read, by the name of the unit.
        inputs: what each reading depends on, by the same names.
    """

    tables: dict[str, Table]
    readings: dict[str, TableAtTarget]
    inputs: dict[str, object]


def _plan_tables(
    tables: Sequence[str], target: float | None, easier: Sequence[float]
) -> _PlannedTables:
    """Read the tables, and pair each with its target and with easier ones."""
    readings = dict[str, TableAtTarget]()
    inputs = dict[str, object]()
    read_tables = dict[str, Table]()
    for name, (file, shipped) in find_sources(tables, read_index()).items():
        table = read_stoppable_runs(file)
        goal = find_target(file, shipped, target)
        if goal.mode != "min":
            raise TableError(
                f"{file}: its target {goal} is to be exceeded, and easier ones are multiples of a "
                "loss or error"
            )
        read_tables[name] = table
        digest = sha256(file.read_bytes()).hexdigest()[:16]
        for multiple in sorted(set(easier)):
            easier_goal = replace(goal, value=goal.value * multiple)
            unit = f"{name}/{multiple:g}"
            readings[unit] = TableAtTarget(name, easier_goal)
            # A table that is recorded anew, or has another target, is read again.
            inputs[unit] = {"digest": digest, "target": [goal.metric, easier_goal.value]}
    return _PlannedTables(tables=read_tables, readings=readings, inputs=inputs)


def table_record(name: str, table: Table, target: Target, level: float) -> TableRecord:
    """Give the row of a table at one target, or the reason why the table does not determine it.

    ``level``: the nominal coverage of the row's intervals.
    """
    why = too_coarse(table, target)
    if why is None:
        try:
            return TableRecord(row=row(name, table, target, level), left_out=None)
        except CurveError as error:
            why = str(error)
    return TableRecord(row=None, left_out=why)


def row_as_texts(row: CriticalRow) -> dict[str, str]:
    """Write a row as texts, for the printed table."""
    b_crit = "undetermined"
    if row["b_crit"] is not None:
        b_crit = format_number(row["b_crit"], 3)
    interval = f"{_end(row['b_crit_low'])} to {_end(row['b_crit_high'])}"
    exponent = "-"
    if row["lr_low"] is not None:
        exponent = f"{row['lr_exponent']:.2f} ({row['lr_low']:.2f} to {row['lr_high']:.2f})"
    # With z a slope that rounds to 0 has no sign.
    return {
        "table": row["table"],
        "target": f"{row['metric']} {format_number(row['target'])}",
        "batch sizes": f"{row['smallest']} to {row['largest']}",
        "slope at each end": f"{row['slope_small']:.2f}, {row['slope_large']:z.2f}",
        "B_crit": f"{b_crit} ({interval})",
        "lr's exponent": exponent,
    }


def _end(b_crit: float | None) -> str:
    """Write an end of B_crit's interval; None is open."""
    return format_number(b_crit, 3) if b_crit else "open"


def row(name: str, table: Table, target: Target, level: float) -> CriticalRow:
    """Make the row of a table at one target, with intervals of nominal coverage ``level``.

    It has B_crit, the slope of log steps over log batch size at each end, and the exponent by which
    the best learning rate grows. CurveError if too few batch sizes reached the target.
    """
    points = dense_points(table, target)
    fit = fit_curve(points, level)
    # A stopped point is a bound: nothing reached the target at batch sizes near it.
    reached = [point for point in points if not point.stopped]
    exponent, low, high = lr_exponent(best_rates(table, target), level)
    return {
        "table": name,
        "metric": target.metric,
        "target": target.value,
        "smallest": reached[0].batch_size,
        "largest": reached[-1].batch_size,
        "slope_small": log_slope(reached[:SIZES_AT_END]),
        "slope_large": log_slope(reached[-SIZES_AT_END:]),
        "b_crit": fit.critical_batch_size,
        "b_crit_low": fit.critical_batch_size_low,
        "b_crit_high": fit.critical_batch_size_high,
        "lr_exponent": exponent,
        "lr_low": low,
        "lr_high": high,
        "fit": _fit_as_values(fit),
    }


def _fit_as_values(fit: CurveFit) -> dict[str, object]:
    """Give the fit as nested values, which go to result.json alone."""
    values = dict(vars(fit))
    # The points come last, below the numbers that follow from them.
    del values["points"]
    values["points"] = list(map(vars, fit.points))
    return values


def too_coarse(table: Table, target: Target) -> str | None:
    """Say that too many runs were evaluated too seldom to know when they passed a target.

    None where most were evaluated often enough.
    """
    ratios = list[float]()
    for run in table.runs:
        ratio = _last_miss_over_hit(run, target)
        if ratio is not None:
            ratios.append(ratio)
    # A run passes the target somewhere between its last miss and its first hit. If the last miss
    # came much earlier than the hit, it is not known where.
    coarse = sum(ratio < FINE for ratio in ratios)
    if coarse <= MAX_COARSE * len(ratios):
        return None
    return f"{coarse} of {len(ratios)} runs that passed it were not evaluated closely there"


def _last_miss_over_hit(run: Run, target: Target) -> float | None:
    """Give the last evaluated step that missed the target over the first that met it.

    None where the run never met it.
    """
    hit = run.steps_to(target)
    if hit is None:
        return None
    return max((step for step in run.steps if step < hit), default=0) / hit


def best_rates(table: Table, target: Target) -> dict[int, float]:
    """Give the learning rate of the fewest steps, by batch size, where the target was reached.

    It lies between recorded rates, at the bottom of a parabola through the best and its neighbours.
    """
    best = dict[int, float]()
    for batch_size in table.batch_sizes:
        steps = median_steps_over_rates(table, target, batch_size)
        rates = sorted(steps)
        fastest = min(range(len(rates)), key=lambda place: steps[rates[place]])
        if not math.isfinite(steps[rates[fastest]]):
            continue
        best[batch_size] = rates[fastest]
        near_rates = rates[max(fastest - 1, 0) : fastest + 2]
        near_steps = list(map(steps.__getitem__, near_rates))
        # The best rate stands where a neighbour was not recorded, or missed the target.
        if len(near_rates) == 3 and all(map(math.isfinite, near_steps)):
            log_rates = np.log(near_rates)
            log_middle = log_rates[1]
            curvature, slope, _height = np.polyfit(log_rates - log_middle, np.log(near_steps), 2)
            # Three equal numbers of steps have no bottom.
            if curvature > 0:
                log_bottom = log_middle - slope / (2.0 * curvature)
                best[batch_size] = float(np.exp(np.clip(log_bottom, log_rates[0], log_rates[2])))
    return best


def median_steps_over_rates(table: Table, target: Target, batch_size: int) -> dict[float, float]:
    """Give the median steps to target at a batch size, by learning rate.

    They are infinite where half of the seeds miss it.
    """
    medians = dict[float, float]()
    for (size, rate), runs in table.cells.items():
        if size != batch_size:
            continue
        medians[rate] = median_steps(runs, target)
    return medians


def lr_exponent(
    best: Mapping[int, float], level: float
) -> tuple[float | None, float | None, float | None]:
    """Give the exponent of the best learning rate over B, and both ends of its interval.

    ``best`` has the rate by batch size, and ``level`` is the interval's nominal coverage. All three
    are None for fewer than three batch sizes.
    """
    if len(best) < 3:
        return None, None, None
    log_sizes = np.log(list(best))
    log_rates = np.log(list(best.values()))
    # Least squares: two degrees of freedom go to the slope and the height of the line.
    degrees_of_freedom = len(log_sizes) - 2
    deviations = log_sizes - log_sizes.mean()
    slope = float(deviations @ log_rates / (deviations @ deviations))
    residual = log_rates - log_rates.mean() - slope * deviations
    standard_error = math.sqrt(residual @ residual / degrees_of_freedom / (deviations @ deviations))
    # Student's t at the interval's upper end.
    half_width = standard_error * stdtrit(degrees_of_freedom, (1.0 + level) / 2.0)
    return slope, slope - half_width, slope + half_width


def growth_of(table_rows: Iterable[Mapping[str, Any]]) -> Growth | None:
    """Give how B_crit changes with the target, from the rows of one table.

    None where B_crit is known at too few targets.
    """
    points = list[CriticalAtTarget]()
    for row in table_rows:
        points.append(
            CriticalAtTarget(
                target=row["target"],
                # How many trials passed the target does not count in the fit.
                passed=0,
                value=row["b_crit"],
                low=row["b_crit_low"],
                high=row["b_crit_high"],
            )
        )
    # The metrics of these tables are losses and errors.
    return growth_over_target(points, ideal=0.0)


def sentence(rows: Sequence[CriticalRow]) -> str:
    """Say how B_crit depends on the target, table by table."""
    texts = list[str]()
    for name, table_rows in _by_table(rows).items():
        growth = growth_of(table_rows)
        if growth is None:
            texts.append(f"{name}: too few targets have a critical batch size with both ends")
            continue
        # A negative power is a rise: harder targets are smaller values.
        moves = "neither surely rises nor falls"
        if growth.high < 0:
            moves = "rises"
        elif growth.low > 0:
            moves = "falls"
        ends_text = f"{format_number(growth.start)} to {format_number(growth.end)}"
        texts.append(
            f"{name}: from {table_rows[0]['metric']} {ends_text} B_crit {moves}, as its power "
            f"{growth.exponent:.2f} ({growth.level:.0%}: {growth.low:.2f} to {growth.high:.2f})"
        )
    return "; ".join(texts) + "."


def _by_table(rows: Sequence[CriticalRow]) -> dict[str, list[CriticalRow]]:
    """Group rows by their table, in their order."""
    by_table = dict[str, list[CriticalRow]]()
    for row in rows:
        by_table.setdefault(row["table"], []).append(row)
    return by_table


def _paint_over_targets(rows: Sequence[CriticalRow], level: float, figure: "Figure") -> None:
    """Draw B_crit with its interval over the target, a line for each table."""
    # Only drawing waits for matplotlib.
    from matplotlib import colormaps

    axes = figure.subplots()
    by_table = _by_table(rows)
    values = list[float]()
    for i, (name, table_rows) in enumerate(by_table.items()):
        points = list[tuple[float, float, float, float]]()
        for row in table_rows:
            b_crit = row["b_crit"]
            if b_crit is not None:
                # An open end is drawn with no length.
                low_end = row["b_crit_low"] or b_crit
                high_end = row["b_crit_high"] or b_crit
                points.append((row["target"], b_crit, low_end, high_end))
        if not points:
            continue
        targets, middle, low, high = np.array(points, dtype=np.float64).T
        colour: str | tuple[float, float, float, float] = PURPLE
        if len(by_table) > 1:
            # Colours go up to 0.9: viridis ends in a yellow that is hard to see on white.
            colour = colormaps["viridis"](0.9 * i / len(by_table))
        axes.errorbar(
            targets,
            middle,
            [middle - low, high - middle],
            label=f"{name}, {table_rows[0]['metric']}",
            color=colour,
            marker=TABLE_MARKERS[i % len(TABLE_MARKERS)],
            capsize=3.0,
            lw=1.0,
        )
        values += [*low.tolist(), *high.tolist()]
    log_axis(axes, "y", log_limits(values, (0.05, 0.08)))
    axes.set_xscale("log")
    axes.set_xlabel("target, harder to the left")
    axes.set_ylabel(f"critical batch size, {level:.0%} interval")
    axes.grid(color=INK, alpha=0.07, linewidth=0.6)
    axes.legend(fontsize=8.0)
