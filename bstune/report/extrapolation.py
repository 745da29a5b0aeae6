"""The result of ``bstune extrapolate``: typed, as a table and lines, and as a card for trainers.

A scale is a size of the model, of the data or of the training, such as the parameters. A study is a
row, at its scale. Each quantity that enough rows have gets a law (:mod:`bstune.core.scale_law`):
a power of the scale, with its exponent and its value at the wanted scale.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

import yaml
from rich.table import Table

from bstune.core.records import dump_json
from bstune.core.scale_law import LAW_LEVEL, Estimate, ScaleLaw
from bstune.core.scaling import beta2_of, shrinkage_of
from bstune.system.console import format_number, plural, wrapped

Quantity = Literal[
    "critical_batch_size", "batch_size", "lr", "beta2_half_life", "weight_decay_half_life"
]
HEADINGS: Mapping[Quantity, str] = {
    "critical_batch_size": "critical batch size",
    "batch_size": "best batch size",
    "lr": "best learning rate",
    "beta2_half_life": "beta2's half-life",
    "weight_decay_half_life": "weight decay's half-life",
}
HALF_LIFE_QUANTITIES: tuple[Quantity, ...] = ("beta2_half_life", "weight_decay_half_life")
# A wanted scale this many times the largest one gets a caution: a law that bends so far beyond the
# studies is not seen in them.
WARN_BEYOND = 30.0
# Upper end over lower: an interval this wide gets a caution, as it is no recommendation.
WIDE_RATIO = 30.0
# A law may predict more than any number of examples: a card's batch size ends here.
LARGEST_CARD_SIZE = 1e15
# The most doublings of the batch size within a training.
MOST_DOUBLINGS = 40
# Halvings of the range in which a scale is sought: 2^-40 of its logarithm's span is left.
SCALE_HALVINGS = 40
# The width of a card's comments.
CARD_COLUMNS = 100
# From this batch size on a card rounds to multiples of 8.
COARSE_FROM = 32
SCHEDULE_SOURCE = "https://github.com/NVIDIA/Megatron-LM/pull/4411"


@dataclass(frozen=True)
class Reading:
    """A quantity in one study, with its interval. An end is None where the study leaves it open."""

    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class ScaleRow:
    """The quantities that a study tells, at its scale."""

    study: str
    scale: float
    readings: Mapping[Quantity, Reading]


@dataclass(frozen=True)
class QuantityLaw:
    """A quantity as a power of the scale, and what it comes to at the wanted one."""

    exponent: Estimate
    """Exponent of the power."""
    wanted: Estimate
    """The quantity at the wanted scale."""
    scales: int
    """How many different scales have the quantity."""
    largest: float
    """The largest of these scales."""


@dataclass(frozen=True)
class SizeStep:
    """A step of a schedule: the batch size that a training has from some point on."""

    start: float
    """Examples or tokens that the training has seen when the step begins."""
    batch_size: int
    """Examples of a step from then on."""


@dataclass(frozen=True)
class Extrapolation:
    """Studies over a scale, and what is predicted at the wanted one."""

    scale: str
    """The scale's name, as in ``--at``."""
    meaning: str
    """What the scale measures in these studies, in words."""
    wanted: float
    """The scale at which the quantities are predicted."""
    rows: tuple[ScaleRow, ...]
    """The studies, from the smallest scale."""
    laws: Mapping[Quantity, QuantityLaw]
    """The laws of the quantities that at least three scales have."""
    size_to_use: Quantity
    """The batch size to use: the best one or the critical one. The learning rate goes with it."""
    fixed: Mapping[Quantity, float]
    """Half-lives that all studies share, in examples."""
    schedule: tuple[SizeStep, ...]
    """A batch size that grows within the training. Empty where the law gives none."""
    notes: tuple[str, ...]
    """Sentences that a reader has to know, such as what a law leaves out."""

    @property
    def beyond(self) -> float:
        """The wanted scale over the largest scale of the studies."""
        return self.wanted / max(row.scale for row in self.rows)

    @property
    def batch_size(self) -> Estimate | None:
        """The batch size to use; None where it has no law."""
        law = self.laws.get(self.size_to_use)
        if law is None:
            return None
        return law.wanted

    def to_json(self) -> str:
        """Give all of it as JSON."""
        return dump_json({**asdict(self), "beyond": self.beyond, "level": LAW_LEVEL}, indent=1)


def quantity_law(law: ScaleLaw, wanted: float) -> QuantityLaw:
    """Give the parts of a law that are shown: its exponent, its value at the ``wanted`` scale."""
    scales = len({point.scale for point in law.points})
    return QuantityLaw(
        exponent=law.exponent,
        wanted=law.at(wanted),
        scales=scales,
        largest=law.largest,
    )


def size_schedule(law: ScaleLaw, wanted: float) -> tuple[SizeStep, ...]:
    """Give a schedule that doubles the batch size whenever the critical one has doubled.

    Args:
        law: the critical batch size over the examples that a training has seen.
        wanted: examples of the whole training.

    Returns:
        The steps of the schedule. Empty where the law does not surely grow, or the training ends
        before the first doubling.
    """
    if law.exponent.low <= 0.0 or wanted <= law.smallest:
        return ()
    at_smallest = law.at(law.smallest).value
    at_wanted = law.at(wanted).value
    steps = [SizeStep(0.0, rounded_batch_size(at_smallest))]
    for doublings in range(1, MOST_DOUBLINGS):
        goal = at_smallest * 2.0**doublings
        if at_wanted < goal:
            break
        start = _scale_at(law, goal, wanted)
        steps.append(SizeStep(float(round(start)), steps[0].batch_size * 2**doublings))
    # A single size is no schedule.
    if len(steps) == 1:
        return ()
    return tuple(steps)


def _scale_at(law: ScaleLaw, goal: float, wanted: float) -> float:
    """Give the scale at which a growing law has the value ``goal``.

    It is found by bisection between the law's smallest scale and the ``wanted`` one.
    """
    log_low = math.log(law.smallest)
    log_high = math.log(wanted)
    for _ in range(SCALE_HALVINGS):
        log_middle = (log_low + log_high) / 2.0
        if law.at(math.exp(log_middle)).value < goal:
            log_low = log_middle
        else:
            log_high = log_middle
    return math.exp(log_high)


def rounded_batch_size(value: float) -> int:
    """Round a batch size as a person would choose it: to a multiple of 8, unless it is small."""
    # A law may predict less than one example, or more than any number of them.
    value = min(max(value, 1.0), LARGEST_CARD_SIZE)
    if value < COARSE_FROM:
        return round(value)
    return 8 * round(value / 8.0)


def extrapolation_table(extrapolation: Extrapolation) -> Table:
    """Lay out a table: a row for each study, one for the prediction, and one for the exponents.

    Intervals stand in brackets.
    """
    known_quantities = set[Quantity]()
    for row in extrapolation.rows:
        known_quantities.update(row.readings)
    names = [name for name in HEADINGS if name in known_quantities]
    table = Table(title=f"over {extrapolation.meaning}")
    table.add_column("study")
    table.add_column(extrapolation.scale, justify="right")
    for name in names:
        table.add_column(HEADINGS[name], justify="right")
    for row in extrapolation.rows:
        readings = [_reading_text(row.readings.get(name)) for name in names]
        table.add_row(row.study, format_number(row.scale), *readings)
    table.add_section()
    predictions = list[str]()
    exponents = list[str]()
    for name in names:
        predictions.append(_prediction_text(extrapolation, name))
        exponents.append(_exponent_text(extrapolation, name))
    table.add_row("predicted", format_number(extrapolation.wanted), *predictions)
    table.add_row("exponent", "", *exponents)
    return table


def _reading_text(reading: Reading | None) -> str:
    """Write ``512 (340 to 770)``, or ``-`` for a study that does not have the quantity."""
    if reading is None:
        return "-"
    value = format_number(reading.value, 3)
    if reading.low is None and reading.high is None:
        return value
    return f"{value} ({_end_text(reading.low)} to {_end_text(reading.high)})"


def _end_text(end: float | None) -> str:
    """Write an end of an interval: None is ``open``."""
    if end is None:
        return "open"
    return format_number(end, 2)


def _prediction_text(extrapolation: Extrapolation, name: Quantity) -> str:
    """Write the prediction of a quantity at the wanted scale, or ``-`` where it has no law."""
    law = extrapolation.laws.get(name)
    if law is None:
        return "-"
    return estimate_text(law.wanted)


def estimate_text(estimate: Estimate) -> str:
    """Write ``512 (340 to 770)``: an estimate with its interval."""
    low = format_number(estimate.low, 2)
    high = format_number(estimate.high, 2)
    return f"{format_number(estimate.value, 3)} ({low} to {high})"


def _exponent_text(extrapolation: Extrapolation, name: Quantity) -> str:
    """Write the exponent of a quantity's law with its interval, or ``-`` where it has no law."""
    law = extrapolation.laws.get(name)
    if law is None:
        return "-"
    exponent = law.exponent
    return f"{exponent.value:z.2f} ({exponent.low:z.2f} to {exponent.high:z.2f})"


def extrapolation_lines(extrapolation: Extrapolation) -> list[str]:
    """Give the answer in lines: what to use at the wanted scale, cautions, and notes."""
    lines = [f"USE       {_use_text(extrapolation)}"]
    for caution in extrapolation_cautions(extrapolation):
        lines.append(f"CAUTION   {caution}")
    for note in extrapolation.notes:
        lines.append(f"NOTE      {note}")
    return lines


def _use_text(extrapolation: Extrapolation) -> str:
    """Write the batch size and the learning rate to use at the wanted scale."""
    wanted_scale = f"{extrapolation.scale} = {format_number(extrapolation.wanted)}"
    if extrapolation.batch_size is None:
        return f"no batch size can be told at {wanted_scale}"
    point = f"B = {rounded_batch_size(extrapolation.batch_size.value)}"
    rate = extrapolation.laws.get("lr")
    if rate is not None:
        point += f", lr = {format_number(rate.wanted.value, 3)}"
    beyond = f"{format_number(extrapolation.beyond, 2)} times the largest"
    return f"{point} at {wanted_scale}, {beyond}: B is the {HEADINGS[extrapolation.size_to_use]}"


def extrapolation_cautions(extrapolation: Extrapolation) -> list[str]:
    """Give a caution for a scale far beyond the studies', and one for a very wide interval."""
    lines = list[str]()
    if extrapolation.beyond > WARN_BEYOND:
        wanted_scale = f"{extrapolation.scale} = {format_number(extrapolation.wanted)}"
        beyond = f"{format_number(extrapolation.beyond, 2)} times the largest that was measured"
        lines.append(
            f"{wanted_scale} is {beyond}: a law that bends there is not seen here, so run a study "
            "between"
        )
    size = extrapolation.batch_size
    if size is not None and size.high > WIDE_RATIO * size.low:
        ratio = format_number(size.high / size.low, 2)
        lines.append(
            f"the interval of the batch size spans a factor of {ratio}: studies of more scales, "
            "further apart, would narrow it"
        )
    return lines


def card(extrapolation: Extrapolation, tokens: int | None) -> str:
    """Write the values to enter into a trainer of one's own, as YAML with comments.

    Args:
        extrapolation: the studies' laws. The batch size must have one.
        tokens: tokens of an example, in which the schedule then counts. None for other data.
    """
    # The caller has checked it.
    assert extrapolation.batch_size is not None  # noqa: S101
    values = _card_values(extrapolation, extrapolation.batch_size)
    if extrapolation.schedule:
        values["batch_size_schedule"] = [asdict(step) for step in extrapolation.schedule]
        tokens_per_unit = 1
        # A schedule over a scale of tokens counts tokens already.
        if tokens is not None and extrapolation.scale != "tokens":
            tokens_per_unit = tokens
        values["megatron_lm"] = megatron_flags(extrapolation.schedule, tokens_per_unit)
    rows = list[str]()
    for comment in _card_comments(extrapolation, counts_tokens=tokens is not None):
        rows += wrapped(f"# {comment}", CARD_COLUMNS, "# ")
    header = "\n".join(rows)
    text: str = yaml.safe_dump(values, sort_keys=False, width=100, allow_unicode=True)
    return f"{header}\n{text}"


def _card_comments(extrapolation: Extrapolation, counts_tokens: bool) -> list[str]:
    """Write the comments above a card's values. ``counts_tokens``: whether its schedule does."""
    comments = [
        f"Made by bstune extrapolate of {plural(len(extrapolation.rows), 'row')}, over "
        f"{extrapolation.meaning}.",
        f"Intervals hold {LAW_LEVEL:.0%}; half-lives are in examples.",
    ]
    if extrapolation.schedule:
        unit = "samples, so without --seq-length"
        if counts_tokens:
            unit = "tokens, with --seq-length"
        comments.append(
            f"megatron_lm: thresholds are in {unit}; each batch size must be a multiple of the "
            f"micro-batch size times the data-parallel size ({SCHEDULE_SOURCE})."
        )
    else:
        comments.append(
            "No schedule of batch sizes: easier targets of one study, or bstune branch at "
            "checkpoints of a run, tell how the critical one grows within a training, where it "
            "surely grows."
        )
    for caution in extrapolation_cautions(extrapolation):
        comments.append(f"CAUTION: {caution}.")
    return comments


def _card_values(extrapolation: Extrapolation, batch_size: Estimate) -> dict[str, object]:
    """Give what to train with at the wanted scale, as a card: names and values of a config.

    Batch size, learning rate, beta2 and weight decay are there, as far as the studies have a law of
    them or share their value.
    """
    rate = extrapolation.laws.get("lr")
    size = rounded_batch_size(batch_size.value)
    values: dict[str, object] = {
        "scale": {
            extrapolation.scale: extrapolation.wanted,
            "times_the_largest": _to_four_digits(extrapolation.beyond),
        },
        "batch_size": size,
        "batch_size_interval": [
            rounded_batch_size(batch_size.low),
            rounded_batch_size(batch_size.high),
        ],
        "batch_size_is": HEADINGS[extrapolation.size_to_use],
    }
    if rate is not None:
        values["lr"] = _to_four_digits(rate.wanted.value)
        values["lr_interval"] = [
            _to_four_digits(rate.wanted.low),
            _to_four_digits(rate.wanted.high),
        ]
    half_lives = _half_lives(extrapolation)
    for name, half_life in half_lives.items():
        values[name] = _to_four_digits(half_life)
    if "beta2_half_life" in half_lives:
        values["beta2"] = float(f"{beta2_of(size, half_lives['beta2_half_life']):.6f}")
    if "weight_decay_half_life" in half_lives and rate is not None:
        # AdamW shrinks the weights by lr x weight decay in a step.
        share = shrinkage_of(size, half_lives["weight_decay_half_life"])
        values["weight_decay"] = _to_four_digits(share / rate.wanted.value)
    return values


def megatron_flags(schedule: Sequence[SizeStep], tokens_per_unit: int) -> str:
    """Write a schedule as Megatron-LM's flag: ``THRESHOLD:BATCH_SIZE`` for each step.

    A threshold is a step's start times the tokens of one unit of the schedule. 1 leaves it in
    samples, or in tokens if these are the unit. Since April 2026 the flag takes the place of
    ``--rampup-batch-size`` and of ``--global-batch-size``.
    """
    steps = list[str]()
    for step in schedule:
        threshold = round(step.start) * tokens_per_unit
        steps.append(f"{threshold}:{step.batch_size}")
    return f'--step-batch-size-schedule "{" ".join(steps)}"'


def _half_lives(extrapolation: Extrapolation) -> dict[Quantity, float]:
    """Give the half-lives of beta2 and of weight decay that are known at the wanted scale.

    A half-life is the number of examples over which what decays halves: Adam's average of squared
    gradients, or a weight without gradient. All studies share it, or a law predicts it.
    """
    half_lives = dict(extrapolation.fixed)
    for name in HALF_LIFE_QUANTITIES:
        if name in extrapolation.laws:
            half_lives[name] = extrapolation.laws[name].wanted.value
    return half_lives


def _to_four_digits(value: float) -> float:
    """Round a number to four digits, as a person would enter it."""
    return float(f"{value:.4g}")
