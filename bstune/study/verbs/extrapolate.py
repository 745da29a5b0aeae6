"""``bstune extrapolate``: what studies of small scales say of a larger one; a card for trainers.

    bstune extrapolate outputs/n300 outputs/n600 outputs/n1200 --at examples=10000 --card card.yaml

The law is that of :mod:`bstune.core.scale_law`, over three scales at least. ``--at`` names the
scale (:mod:`bstune.study.verbs.scales`): ``examples=N`` or ``tokens=N``, ``parameters=N`` that are
trained, ``seconds=N`` of the budget, ``width=N`` or another option by the end of its name. Recorded
runs tell no scale: ``--values n6000=6000,n18000=18000`` gives it.

The batch size to use is the critical one, and of a budget the best one; the rate is that at this
batch size. Beyond 30 times the largest scale there is a caution. The card is YAML: batch size,
rate, their intervals, half-lives with the beta2 and the weight decay they come to. Where B_crit
surely grows within a training, it has a schedule that doubles the batch size whenever B_crit has
doubled, also as Megatron-LM's ``--step-batch-size-schedule``. Easier targets of one study show
that, or ``bstune branch ... --json`` at three checkpoints of a run, as ``--branches 1.json 2.json
3.json``.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from bstune.core.errors import ConfigError, StudyError
from bstune.core.scale_law import FEWEST_SCALES, UNTOLD_ERROR, ScaleLaw, ScalePoint, fit_scale_law
from bstune.report.extrapolation import (
    HALF_LIFE_QUANTITIES,
    HEADINGS,
    Extrapolation,
    Quantity,
    QuantityLaw,
    Reading,
    ScaleRow,
    SizeStep,
    card,
    extrapolation_lines,
    extrapolation_table,
    quantity_law,
    size_schedule,
)
from bstune.report.study_folder import StudyFolder, each_study
from bstune.result import INTERVAL_QUANTILE
from bstune.study.verbs.branch_scales import extrapolate_branches, read_branches
from bstune.study.verbs.scales import (
    LARGEST_SCALE,
    SMALLEST_SCALE,
    CommonScale,
    check_alike,
    common_scale,
    defining_settings,
    log_error,
    number_of,
    rate_at,
)
from bstune.system.console import format_number, listing, plain_console
from bstune.system.files import check_writable, write_text
from bstune.system.inputs import one_line
from bstune.system.terminal import ArgumentParser

SIZES: tuple[Quantity, ...] = ("batch_size", "critical_batch_size")


def main(arguments: list[str]) -> str:
    """Run ``bstune extrapolate``: print the prediction at another scale, and give it as JSON.

    It writes the card, too, if it is asked for.
    """
    options = _parser().parse_args(arguments)
    name, wanted = _scale("--at", options.at)
    values: dict[str, float] | None = None
    if options.values is not None:
        values = _values(options.values)
    # A path that cannot be written is told before all studies are read.
    if options.card is not None:
        check_writable(options.card, f"--card {options.card}")
    if options.branches is not None:
        if options.studies or values is not None:
            raise ConfigError("--branches stands in place of studies and their --values")
        branches = [read_branches(path) for path in options.branches]
        extrapolation = extrapolate_branches(branches, name, wanted)
        tokens = branches[0].tokens
    else:
        left_out = list[str]()
        studies = [study for _, study in each_study(options.studies, left_out)]
        extrapolation = extrapolate(studies, name, wanted, values, left_out)
        tokens = studies[0].result.tokens
    # A card for which the studies tell too little is refused before anything is printed.
    if options.card is not None and extrapolation.batch_size is None:
        lines = [f"there is no batch size for --card {options.card}", *extrapolation.notes]
        raise StudyError("\n".join(lines))
    console = plain_console()
    say = partial(console.print, soft_wrap=True, highlight=False, markup=False)
    console.print(extrapolation_table(extrapolation))
    for line in extrapolation_lines(extrapolation):
        say(line)
    if options.card is not None:
        write_text(options.card, card(extrapolation, tokens))
        say(f"card      {options.card}")
    return extrapolation.to_json()


def _parser() -> ArgumentParser:
    """Make the parser of the verb's arguments."""
    parser = ArgumentParser(
        prog="bstune extrapolate",
        description="The critical batch size, the best batch size and the best learning rate as "
        "powers of a scale in which studies differ, and what they come to at another one. Easier "
        "targets and shorter budgets of one study count as scales, too.",
    )
    parser.add_argument(
        "studies", nargs="*", metavar="STUDY", help="studies' output folders, such as outputs/*"
    )
    parser.add_argument(
        "--branches",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="in place of studies: what `bstune branch ... --json` printed at checkpoints of one "
        "run",
    )
    parser.add_argument(
        "--at",
        required=True,
        metavar="SCALE=N",
        help="where to look: examples, tokens, parameters, seconds (of a budget), or an option "
        "that differs",
    )
    parser.add_argument(
        "--values",
        metavar="STUDY=N,STUDY=N,...",
        help="the scale of each study by its name, where the folders do not tell it",
    )
    parser.add_argument(
        "--card", type=Path, metavar="FILE", help="write what to enter into a trainer, as YAML"
    )
    return parser


def _values(argument: str) -> dict[str, float]:
    """Parse ``--values``: the scale of each study, by its name."""
    pairs = [_scale("--values", pair) for pair in argument.split(",")]
    values = dict(pairs)
    if len(values) < len(pairs):
        raise ConfigError(f"--values names a study twice: {one_line(argument)}")
    return values


def _scale(option: str, argument: str) -> tuple[str, float]:
    """Parse ``NAME=N``: a scale to predict at, of ``--at``, or a study's own, of ``--values``."""
    name, _, text = argument.rpartition("=")
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not name:
        form = "SCALE=N, such as examples=1e9" if option == "--at" else "STUDY=N,STUDY=N,..."
        raise ConfigError(f"{option} takes {form}, but got {one_line(argument)}")
    if not SMALLEST_SCALE <= value <= LARGEST_SCALE:
        raise ConfigError(
            f"{option} {one_line(name)}=N takes a positive number, but got {one_line(text)}"
        )
    return name, value


def extrapolate(
    studies: Sequence[StudyFolder],
    name: str,
    wanted: float,
    values: Mapping[str, float] | None = None,
    left_out: Sequence[str] = (),
) -> Extrapolation:
    """Predict from studies of several scales what holds at another one.

    Args:
        studies: that differ in the scale alone.
        name: of the scale.
        wanted: the scale at which to predict.
        values: the scale of each study by its name; None: its folder tells it.
        left_out: lines on folders that were no study.

    Raises:
        ConfigError: for an unknown scale.
        StudyError: where the studies differ in more, or tell fewer than three scales.
    """
    if not studies:
        raise StudyError("\n".join(["there is no study to extrapolate", *left_out]))
    scale = common_scale(name, studies, values)
    differ = check_alike(scale, studies)
    notes = list(left_out)
    rows = list[ScaleRow]()
    # Two studies may have the same name: a key tells whose a row is.
    keys = list[str]()
    by_key = {str(place): study for place, study in enumerate(studies)}
    for key, rows_of_study in zip(by_key, scale.rows, strict=True):
        rows += rows_of_study
        keys += [key] * len(rows_of_study)
    _check_scales(scale, rows, left_out)
    if _is_on_several_devices(studies):
        rows = [_without_best_size(row) for row in rows]
        notes.append("the studies ran on different devices: their best batch sizes are left out")
    rows, size_to_use = _with_rates(rows, keys, by_key)
    laws, law_of_critical = _laws(rows, keys, wanted)
    schedule: tuple[SizeStep, ...] = ()
    if law_of_critical is not None and scale.grows_within:
        schedule = size_schedule(law_of_critical, wanted)
    if len(differ) > 1:
        notes.append(f"the scale is set by {listing(differ)}, which all differ")
    notes += _why_no_law(laws, rows)
    return Extrapolation(
        scale=name,
        meaning=scale.meaning,
        wanted=wanted,
        rows=tuple(sorted(rows, key=lambda row: row.scale)),
        laws=laws,
        size_to_use=size_to_use,
        fixed=_fixed_half_lives(studies),
        schedule=schedule,
        notes=tuple(notes),
    )


def _check_scales(scale: CommonScale, rows: Sequence[ScaleRow], left_out: Sequence[str]) -> None:
    """Refuse studies that tell too few different scales for a law.

    ``left_out``: lines on folders that were no study, which the error repeats.
    """
    distinct = sorted({row.scale for row in rows})
    if len(distinct) < FEWEST_SCALES:
        shown = listing([format_number(value) for value in distinct]) or "none"
        reason = (
            f"a law takes at least {FEWEST_SCALES} different {scale.name}, but the studies tell "
            f"{len(distinct)}: {shown} ({scale.meaning})"
        )
        raise StudyError("\n".join([reason, *left_out]))


def _is_on_several_devices(studies: Sequence[StudyFolder]) -> bool:
    """Whether the studies' best batch sizes are of different devices.

    A best batch size is that of a device where seconds count: for any objective but the loss.
    """
    counts_seconds = any(study.result.objective != "loss" for study in studies)
    return counts_seconds and len({study.result.devices for study in studies}) > 1


def _without_best_size(row: ScaleRow) -> ScaleRow:
    """Copy a row without its best batch size."""
    readings = dict(row.readings)
    readings.pop("batch_size", None)
    return replace(row, readings=readings)


def _with_rates(
    rows: Sequence[ScaleRow], keys: Sequence[str], by_key: Mapping[str, StudyFolder]
) -> tuple[list[ScaleRow], Quantity]:
    """Add the best learning rates, and say at which batch size they are: the one to use.

    For studies with a target that is the critical batch size: their best one is the fastest on
    their own device, and training at the wanted scale runs on another. For studies of a budget it
    is the best batch size. Where too few scales tell that size, but enough tell the other one, the
    rates are at the other one.

    Args:
        rows: of all studies.
        keys: the key of each row's study.
        by_key: the studies.
    """
    chosen: Quantity = "critical_batch_size"
    other: Quantity = "batch_size"
    if all(study.result.at_budget is not None for study in by_key.values()):
        chosen = "batch_size"
        other = "critical_batch_size"
    if _scales_with(rows, chosen) < FEWEST_SCALES <= _scales_with(rows, other):
        chosen = other
    complete = list[ScaleRow]()
    for row, key in zip(rows, keys, strict=True):
        result = by_key[key].result
        readings = dict(row.readings)
        # The rates are of the study's own target or budget: of easier ones there are none.
        if row.study == result.study:
            rate = rate_at(result, chosen, row.readings.get(chosen))
            if rate is not None:
                readings["lr"] = rate
        complete.append(replace(row, readings=readings))
    return complete, chosen


def _scales_with(rows: Sequence[ScaleRow], name: Quantity) -> int:
    """Count the different scales at which a quantity is known."""
    return len({row.scale for row in rows if name in row.readings})


def _laws(
    rows: Sequence[ScaleRow], keys: Sequence[str], wanted: float
) -> tuple[dict[Quantity, QuantityLaw], ScaleLaw | None]:
    """Fit the law of each quantity that enough scales tell, and predict it at ``wanted``.

    It also gives the fitted law of the critical batch size, None where too few scales tell it.

    ``keys``: the key of each row's study.
    """
    laws = dict[Quantity, QuantityLaw]()
    critical: ScaleLaw | None = None
    for quantity in HEADINGS:
        points = list[ScalePoint]()
        for row, key in zip(rows, keys, strict=True):
            reading = row.readings.get(quantity)
            if reading is None:
                continue
            error = log_error(reading, INTERVAL_QUANTILE)
            # The range of sizes within 10% of the best is not an interval for the best one, which
            # seeds move: its error is taken to be no smaller than that of a value without one.
            if quantity == "batch_size" and error is not None:
                error = max(error, UNTOLD_ERROR)
            points.append(ScalePoint(scale=row.scale, value=reading.value, error=error, study=key))
        if len({point.scale for point in points}) < FEWEST_SCALES:
            continue
        law = fit_scale_law(points)
        laws[quantity] = quantity_law(law, wanted)
        if quantity == "critical_batch_size":
            critical = law
    return laws, critical


def _why_no_law(laws: Mapping[Quantity, QuantityLaw], rows: Sequence[ScaleRow]) -> list[str]:
    """Say how many scales tell each main quantity that has no law, and which intervals are open."""
    lines = list[str]()
    for name in (*SIZES, "lr"):
        if name not in laws:
            count = _scales_with(rows, name)
            lines.append(
                f"no law of the {HEADINGS[name]}: {count} of {FEWEST_SCALES} scales tell it"
            )
    open_ends = [
        row.study for row in rows if _is_one_sided(row.readings.get("critical_batch_size"))
    ]
    if open_ends:
        lines.append(
            f"of {listing(open_ends)} an end of the critical batch size's interval is open: it is "
            "taken to lie twice as far as the other one"
        )
    return lines


def _is_one_sided(reading: Reading | None) -> bool:
    """Whether a reading has one end of its interval, and not the other."""
    return reading is not None and (reading.low is None) != (reading.high is None)


def _fixed_half_lives(studies: Sequence[StudyFolder]) -> dict[Quantity, float]:
    """Collect the half-lives that the config of the studies sets, in examples.

    Those that were searched are left out.
    """
    # All studies have the same, or they were refused.
    settings = defining_settings(studies[0])
    searched = _searched(settings)
    fixed = dict[Quantity, float]()
    for name in HALF_LIFE_QUANTITIES:
        value = number_of(settings.get(f"scaling.{name}"))
        if value is not None and value > 0 and name not in searched:
            fixed[name] = float(value)
    return fixed


def _searched(settings: Mapping[str, object]) -> Sequence[object]:
    """Read the names of the hyper-parameters that a study searched besides batch size and rate."""
    searched = settings.get("search.tune")
    return searched if isinstance(searched, list) else ()
