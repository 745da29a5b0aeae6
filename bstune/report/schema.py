"""What is read of a study's folder: ``curve.json`` whole, ``hardware.json`` as the page shows it.

    result = read_result(text, "outputs/digits/curve.json")

A folder may come from anybody. So everything that is read of it passes through models first, and
the code behind them meets no text where it counts and no negative batch size. ``hardware.json``
holds the whole survey; what of it is not named here is dropped.
"""

from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, Field, ValidationError

from bstune.core.errors import InputError, StudyError
from bstune.result import (
    SCHEMA_NUMBER,
    BatchSize,
    Count,
    Items,
    NotNegative,
    Positive,
    Real,
    StudyResult,
    Text,
)
from bstune.system.inputs import one_line, parse_json

PerSecond = Annotated[float, Field(gt=0.0, le=1e30)]
"""Operations or bytes a second."""


class SurveyPart(BaseModel, strict=True, extra="ignore", frozen=True):
    """A part of ``hardware.json``: no value is converted, unknown keys are dropped."""


class ProbeRow(SurveyPart, frozen=True):
    """A batch size whose memory was measured."""

    batch_size: BatchSize
    """Examples of a step."""
    outcome: Text
    """Whether it fits."""
    limit: Count | None = None
    """Bytes that there were."""
    peak_bytes: Count | None = None
    """Bytes that it took."""


class SurveyedMemory(SurveyPart, frozen=True):
    """Bytes of a training step: ``base`` and so many an example."""

    base: Real
    """Bytes that no example takes."""
    per_example: Real
    """Bytes."""


class CeilingAt(SurveyPart, frozen=True):
    """The largest batch size that fits."""

    batch_size: BatchSize
    """Examples of a step."""
    limit: Count | None = None
    """Bytes that there were."""


class SurveyedCeiling(SurveyPart, frozen=True):
    """The memory ceiling and the probes that found it."""

    at: CeilingAt
    """The ceiling itself."""
    smallest: BatchSize
    """The smallest batch size that was asked for."""
    model: SurveyedMemory | None = None
    """None where the device has no figures."""
    probes: Items[ProbeRow] = ()
    """Batch sizes that were tried."""


class Timing(SurveyPart, frozen=True):
    """Seconds of a step at a batch size, with quartiles."""

    batch_size: BatchSize
    """Examples of a step."""
    seconds: Positive
    """Median."""
    low: NotNegative
    """Lower quartile."""
    high: NotNegative
    """Upper quartile."""
    visits: Count = 1
    """At which they were timed."""
    bare: NotNegative | None = None
    """Without what the framework adds."""


class SurveyedSteps(SurveyPart, frozen=True):
    """The timed steps."""

    timings: Items[Timing] = ()
    """From the smallest batch size."""
    waited: NotNegative = 0.0
    """Share of the seconds for which the timing waited for a processor."""


class Threads(SurveyPart, frozen=True):
    """The number of threads that trains."""

    threads: BatchSize
    """Of torch."""


class Limits(SurveyPart, frozen=True):
    """What the device can do in a second."""

    flops_per_second: PerSecond
    """Operations."""
    bytes_per_second: PerSecond
    """Bytes moved."""


class SurveyedShare(SurveyPart, frozen=True):
    """How near steps at a batch size come to the device's peak."""

    batch_size: BatchSize
    """Examples of a step."""
    share_of_peak: NotNegative
    """Operations a second over the device's."""
    intensity: NotNegative | None = None
    """Operations per byte moved."""


class Derived(SurveyPart, frozen=True):
    """What the survey concludes."""

    achieved: Items[SurveyedShare] = ()
    """From the smallest batch size."""
    bound: Text | None = None
    """What bounds a step, in a sentence."""
    advice: Items[Text] = ()
    """A sentence each."""


class HardwareFile(SurveyPart, frozen=True):
    """The content of ``hardware.json`` as far as the page shows it."""

    device: Text = "?"
    """The device's name."""
    precision: Text = "?"
    """As Lightning names it."""
    high: BatchSize
    """The largest batch size that was asked for."""
    ceiling: SurveyedCeiling
    """What memory allows."""
    measured: SurveyedSteps
    """What time it takes."""
    limits: Limits | None = None
    """None where they could not be measured."""
    threads: Threads | None = None
    """None where a CPU does not train."""
    seconds_of: Literal["trainer", "lean"] = "lean"
    """Whose steps were timed."""
    derived: Derived = Derived()
    """What follows."""


File = TypeVar("File", bound=BaseModel)


def checked(model: type[File], text: str, what: str) -> File:
    """Parse a file of JSON and check it against its model.

    InputError where it is no JSON. StudyError names ``what`` and the first value that the file may
    not hold.
    """
    # It bounds the depth, and says what no JSON is in the words of all other files.
    parse_json(text, what)
    try:
        return model.model_validate_json(text)
    except ValidationError as error:
        # One fault is enough: a file of something else has one for each of its values.
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        reason = first["msg"]
        if where:
            reason = f"{where}: {reason}"
        raise StudyError(
            f"{what} is no file of this version of bstune: {one_line(reason)}"
        ) from error


def read_result(text: str, what: str) -> StudyResult:
    """Read the content of a ``curve.json``.

    StudyError, with ``what``, where it is no JSON, of another schema number or no study's result.
    """
    try:
        values = parse_json(text, what)
    except InputError as error:
        raise StudyError(str(error)) from error
    # Before the values: those of another schema would be called faulty for what they are.
    if isinstance(values, dict) and values.get("schema_number") != SCHEMA_NUMBER:
        # A file from anybody may have any text there, of any length.
        number = one_line(str(values.get("schema_number", "no number")))[:20]
        raise StudyError(
            f"{what} has schema {number}, and this version of bstune reads {SCHEMA_NUMBER}: "
            "run the same command under another name, study=NAME"
        )
    return checked(StudyResult, text, what)
