"""The models that a study's folder is read through: ``curve.json``, parts of ``hardware.json``.

    result = read_result(text, "outputs/digits/curve.json")

A folder may come from anybody. So everything that is read of it passes through models first, and
the code behind them meets no text where it counts and no negative batch size. ``hardware.json``
holds the whole survey: the parts that no page shows are dropped.
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
"""Operations or bytes per second."""


class SurveyPart(BaseModel, strict=True, extra="ignore", frozen=True):
    """A part of ``hardware.json``: no value is converted, unknown keys are dropped."""


class ProbeRow(SurveyPart, frozen=True):
    """A batch size whose memory was measured."""

    batch_size: BatchSize
    """Examples of a step."""
    outcome: Text
    """Whether it fits, in words."""
    limit: Count | None = None
    """Bytes that the device had for it. None where the device does not say."""
    peak_bytes: Count | None = None
    """Bytes that it took at most. None where the device does not say."""


class SurveyedMemory(SurveyPart, frozen=True):
    """Bytes of a training step by its batch size: ``base`` + ``per_example`` x B."""

    base: Real
    """Bytes that a step takes at any batch size."""
    per_example: Real
    """Bytes that each example adds."""


class CeilingAt(SurveyPart, frozen=True):
    """The largest batch size that fits."""

    batch_size: BatchSize
    """Examples of a step."""
    limit: Count | None = None
    """Bytes that the device had. None where the device does not say."""


class SurveyedCeiling(SurveyPart, frozen=True):
    """The memory ceiling and the probes that found it."""

    at: CeilingAt
    """The largest probe that fits."""
    smallest: BatchSize
    """The smallest batch size that was asked for."""
    model: SurveyedMemory | None = None
    """Memory by batch size. None where the device gives no figures."""
    probes: Items[ProbeRow] = ()
    """The batch sizes that were tried."""
    predicted: BatchSize | None = None
    """The largest batch size by the model. None where the largest one was probed."""

    @property
    def batch_size(self) -> int:
        """The ceiling itself, in examples."""
        return self.at.batch_size if self.predicted is None else self.predicted


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
    """How often the survey came back to time this batch size."""
    bare: NotNegative | None = None
    """Seconds of a step without the framework's part. None where they were not measured."""


class SurveyedSteps(SurveyPart, frozen=True):
    """The steps that were timed."""

    timings: Items[Timing] = ()
    """A row for each batch size, from the smallest."""
    waited: NotNegative = 0.0
    """Share of the seconds for which the timed steps waited for a processor."""


class Threads(SurveyPart, frozen=True):
    """The number of threads that train."""

    threads: BatchSize
    """Threads of torch."""


class Limits(SurveyPart, frozen=True):
    """The most that the device can do in a second."""

    flops_per_second: PerSecond
    """Floating-point operations per second."""
    bytes_per_second: PerSecond
    """Bytes moved a second."""


class SurveyedShare(SurveyPart, frozen=True):
    """How near steps at a batch size come to the device's peak."""

    batch_size: BatchSize
    """Examples of a step."""
    share_of_peak: NotNegative
    """Operations per second over the most that the device can do."""
    intensity: NotNegative | None = None
    """Operations per byte moved. None where the bytes are not known."""


class Derived(SurveyPart, frozen=True):
    """The conclusions of the survey."""

    achieved: Items[SurveyedShare] = ()
    """A row for each batch size, from the smallest."""
    bound: Text | None = None
    """A sentence that says what bounds a step. None where that is not known."""
    advice: Items[Text] = ()
    """Advice, a sentence each."""


class HardwareFile(SurveyPart, frozen=True):
    """The parts of ``hardware.json`` that the page shows."""

    device: Text = "?"
    """The device's name."""
    precision: Text = "?"
    """The precision by Lightning's name."""
    high: BatchSize
    """The largest batch size that was asked for."""
    ceiling: SurveyedCeiling
    """The memory ceiling."""
    measured: SurveyedSteps
    """The seconds of steps."""
    limits: Limits | None = None
    """The device's limits. None where they could not be measured."""
    threads: Threads | None = None
    """The threads that train. None where no CPU trains."""
    seconds_of: Literal["trainer", "lean"] = "lean"
    """Whose steps were timed: ``Trainer.fit``'s, or the lean loop's."""
    derived: Derived = Derived()
    """The survey's conclusions."""


File = TypeVar("File", bound=BaseModel)


def parse_checked(model: type[File], text: str, what: str) -> File:
    """Parse the ``text`` of a JSON file and check it against its model.

    InputError where the text is not JSON. StudyError, with the first value that the model refuses.
    Both errors name the file by ``what``.
    """
    # JSON that is nested too deeply, or is none, is refused here, in the words for all files.
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
    """Read the ``text`` of a ``curve.json``.

    StudyError, which names the file by ``what``, where the text is not JSON, has another schema
    number, or is not a study's result.
    """
    try:
        values = parse_json(text, what)
    except InputError as error:
        raise StudyError(str(error)) from error
    # The number is checked before the values: those of another schema would be called faulty.
    if isinstance(values, dict) and values.get("schema_number") != SCHEMA_NUMBER:
        # A file from anybody may have any text there, of any length.
        number = one_line(str(values.get("schema_number", "no number")))[:20]
        raise StudyError(
            f"{what} has schema {number}, and this version of bstune reads {SCHEMA_NUMBER}: "
            "run the same command under another name, study=NAME"
        )
    return parse_checked(StudyResult, text, what)
