"""How the critical batch size grows within a run, from branches at several checkpoints.

A file is what ``bstune branch ... --json`` printed, and is data.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from bstune.core.branching import Branches
from bstune.core.errors import ConfigError, StudyError
from bstune.core.scale_law import FEWEST_SCALES, ScalePoint, fit_scale_law
from bstune.report.extrapolation import (
    Extrapolation,
    Reading,
    ScaleRow,
    quantity_law,
    size_schedule,
)
from bstune.result import INTERVAL_QUANTILE
from bstune.study.verbs.scales import log_error
from bstune.system.console import format_number, listing
from bstune.system.inputs import one_line, read_text

_BRANCHES = TypeAdapter(Branches)
PROGRESS_SCALES = ("examples", "tokens")


@dataclass(frozen=True)
class BranchPoint:
    """The critical batch size at one checkpoint."""

    checkpoint: str
    """Its path."""
    scale: float
    """The examples or tokens that the run had seen."""
    reading: Reading


def read_branches(path: Path) -> Branches:
    """Read a file of ``bstune branch ... --json``; StudyError where it is none."""
    text = read_text(path, "the branches")
    try:
        return _BRANCHES.validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"]) or "the file"
        raise StudyError(
            f"--branches {path} is not what `bstune branch ... --json` prints: {one_line(place)}: "
            f"{one_line(first['msg'])}"
        ) from error


def extrapolate_branches(
    checkpoints: Sequence[Branches], name: str, wanted: float
) -> Extrapolation:
    """Predict the critical batch size of a run at a later point, and a schedule until there.

    Args:
        checkpoints: the branches of at least three checkpoints of one run.
        name: of the scale, one of ``PROGRESS_SCALES``.
        wanted: examples or tokens that the run will have seen.

    Raises:
        ConfigError: for another scale.
        StudyError: where the branches differ in more than the checkpoint, or tell fewer than
            three points.
    """
    if name not in PROGRESS_SCALES:
        raise ConfigError(
            f"branches tell how far a run is in {listing(PROGRESS_SCALES)}, but got --at "
            f"{one_line(name)}"
        )
    _check_one_run(checkpoints)
    points, notes = _points(checkpoints, name)
    if len({point.scale for point in points}) < FEWEST_SCALES:
        reason = (
            f"a law takes at least {FEWEST_SCALES} different {name} of a run, but the branches "
            f"tell {len(points)}"
        )
        raise StudyError("\n".join([reason, *notes]))

    # Each checkpoint has branches of its own, so that their errors are independent.
    scale_points = list[ScalePoint]()
    for point in points:
        error = log_error(point.reading, INTERVAL_QUANTILE)
        scale_points.append(
            ScalePoint(
                scale=point.scale, value=point.reading.value, error=error, study=point.checkpoint
            )
        )
    law = fit_scale_law(scale_points)
    schedule = size_schedule(law, wanted)
    exponent = checkpoints[0].lr_exponent
    # With the exponent 0 the rate stays the run's: there is nothing to follow.
    if schedule and exponent:
        notes.append(
            f"the branches' learning rates were the run's times (B/B0)^{format_number(exponent)}: "
            "let yours follow each step of the schedule so"
        )
    rows = list[ScaleRow]()
    for point in sorted(points, key=lambda point: point.scale):
        rows.append(ScaleRow(point.checkpoint, point.scale, {"critical_batch_size": point.reading}))
    return Extrapolation(
        scale=name,
        meaning=f"{name} that the run had seen",
        wanted=wanted,
        rows=tuple(rows),
        laws={"critical_batch_size": quantity_law(law, wanted)},
        size_to_use="critical_batch_size",
        fixed={},
        schedule=schedule,
        notes=tuple(notes),
    )


def _check_one_run(checkpoints: Sequence[Branches]) -> None:
    """Refuse branches whose largest batch size means something else in each."""
    for field in ("metric", "tolerance", "lr_exponent", "tokens"):
        texts = [str(getattr(branches, field)) for branches in checkpoints]
        # Each value is taken once, in the order of the files.
        values = list(dict.fromkeys(texts))
        if len(values) > 1:
            raise StudyError(
                f"the branches differ in more than the checkpoint: {field} is "
                f"{one_line(listing(values))}"
            )


def _points(checkpoints: Sequence[Branches], name: str) -> tuple[list[BranchPoint], list[str]]:
    """Read the point that each checkpoint tells; give a line, too, for each that tells none.

    ``name``: of the scale.
    """
    points = list[BranchPoint]()
    left_out = list[str]()
    for branches in checkpoints:
        checkpoint = one_line(branches.checkpoint)
        largest = branches.largest
        seeds = len({branch.seed for branch in branches.branches})
        scale = branches.examples_seen
        if name == "tokens":
            if branches.tokens is None:
                raise StudyError(f"examples of {checkpoint} have no tokens: give --at examples=N")
            if scale is not None:
                scale *= branches.tokens
        if scale is None:
            left_out.append(f"{checkpoint} is left out: its steps do not tell what it has seen")
        # No seed lost anything up to the largest branch, so that there is only a lower bound.
        elif largest.unbounded == seeds:
            left_out.append(
                f"{checkpoint} is left out: its critical batch size is over "
                f"{format_number(largest.batch_size)}, the largest one of its branches"
            )
        else:
            reading = Reading(value=largest.batch_size, low=largest.low, high=largest.high)
            points.append(BranchPoint(checkpoint, scale, reading))
    return points, left_out
