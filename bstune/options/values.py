"""What every section of options is made of: types of values with their bounds, and the section."""

import math
import unicodedata
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

from bstune.core.records import FastMode
from bstune.system.files import expand_home

MOST_THREADS = 1024
# The largest size of a metric's value.
LARGEST_VALUE = 1e15


def _not_bool(value: object) -> object:
    """Refuse true and false, which pydantic takes for 1 and 0."""
    if isinstance(value, bool):
        raise PydanticCustomError("number_type", "Input should be a number")
    return value


NUMBER = BeforeValidator(_not_bool)


def auto_or_count(value: object) -> object:
    """Give ``auto`` or a number of threads as it is; ValueError for anything else.

    It runs before pydantic's own check of the union, which would report two errors for one value.
    """
    is_count = isinstance(value, int) and not isinstance(value, bool)
    if value == "auto" or (is_count and 1 <= value <= MOST_THREADS):  # type: ignore[operator]
        return value
    raise ValueError(f"must be auto or 1 to {MOST_THREADS}, but got {value!r}")


def auto_or_number(value: object) -> object:
    """Give ``auto`` as it is, and a number as a float; ValueError for anything else."""
    if value == "auto":
        return value
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        number = math.nan
    # NaN fails every comparison.
    if isinstance(value, bool) or not abs(number) <= LARGEST_VALUE:
        raise ValueError(
            f"must be a number of at most {LARGEST_VALUE:g} in size, or auto, but got {value!r}"
        )
    return number


# Every number has a range. Its ends are far from what one needs; beyond them arithmetic or memory
# ends. An end of a metric's range is the one without, as it may be infinite.
Number = Annotated[float, NUMBER]
# A number of examples or steps: a float holds every one.
Count = Annotated[int, Field(ge=0, le=10**15), NUMBER]
Positive = Annotated[int, Field(ge=1, le=10**15), NUMBER]
Few = Annotated[int, Field(ge=0, le=10**6), NUMBER]
PositiveFew = Annotated[int, Field(ge=1, le=10**6), NUMBER]
SomeFew = Annotated[list[PositiveFew], Field(min_length=1, max_length=1000)]
WholeTo1000 = Annotated[int, Field(ge=0, le=1000), NUMBER]
OneTo1000 = Annotated[int, Field(ge=1, le=1000), NUMBER]
Bytes = Annotated[int, Field(ge=1, le=2**60), NUMBER]
# A seed in the range that numpy and Lightning take.
Seed = Annotated[int, Field(ge=0, le=2**32 - 1), NUMBER]
Finite = Annotated[float, Field(ge=-1e15, le=1e15, allow_inf_nan=False), NUMBER]
PositiveFinite = Annotated[float, Field(ge=1e-15, le=1e15, allow_inf_nan=False), NUMBER]
# A batch size from which others are scaled; it need not be whole.
BatchSize = Annotated[float, Field(ge=1, le=1e15, allow_inf_nan=False), NUMBER]
Seconds = Annotated[float, Field(ge=0.0, le=1e9, allow_inf_nan=False), NUMBER]
PositiveSeconds = Annotated[float, Field(ge=1e-6, le=1e9, allow_inf_nan=False), NUMBER]
Sigma = Annotated[float, Field(ge=0.01, le=100.0, allow_inf_nan=False), NUMBER]
Factor = Annotated[float, Field(ge=1e-6, le=1e6, allow_inf_nan=False), NUMBER]
Weight = Annotated[float, Field(ge=0.0, le=1e6, allow_inf_nan=False), NUMBER]
OverOne = Annotated[float, Field(gt=1, le=1e6, allow_inf_nan=False), NUMBER]
Share = Annotated[float, Field(ge=0.0, le=1.0, allow_inf_nan=False), NUMBER]
PositiveShare = Annotated[float, Field(ge=1e-6, le=1.0, allow_inf_nan=False), NUMBER]
BelowOne = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False), NUMBER]
# YAML reads off as false.
Fast = Annotated[FastMode, BeforeValidator(lambda value: "off" if value is False else value)]
Precision = Literal["auto", "32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true"]


def _is_text(value: str) -> str:
    """Refuse an empty text, and characters that no file name, database or terminal takes."""
    if not value.strip():
        raise PydanticCustomError("text", "must not be empty")
    # Control characters, such as NUL, and surrogates, which stand for bytes that no text decodes.
    if any(unicodedata.category(character) in ("Cc", "Cs") for character in value):
        raise PydanticCustomError("text", "must not contain control characters")
    return value


def _is_name(value: str) -> str:
    """Refuse a name that cannot be a path within a folder, such as ``../a``, ``a//b`` or ``/a``.

    200 bytes leave room for the endings that bstune adds; file systems allow 255.
    """
    parts = value.split("/")
    if any(part.strip() in ("", ".", "..") or len(part.encode()) > 200 for part in parts):
        raise PydanticCustomError(
            "text", "must be a name, or names with / between, of at most 200 bytes each"
        )
    return value


def _is_one_name(value: str) -> str:
    """Refuse what is no name, and names with / between."""
    if "/" in _is_name(value):
        raise PydanticCustomError("text", "must be a name without /")
    return value


def _is_uri(value: str) -> str:
    """Refuse a text that is no URL."""
    try:
        # Reading the port raises a ValueError if the address is malformed.
        urlsplit(value).port  # noqa: B018
    except ValueError as error:
        raise PydanticCustomError(
            "text", "must be a URL: {reason}", {"reason": str(error)}
        ) from error
    return value


# Types of texts, and what they refuse.
Text = Annotated[str, Field(max_length=4000), AfterValidator(_is_text)]
Name = Annotated[str, Field(max_length=400), AfterValidator(_is_text), AfterValidator(_is_name)]
OneName = Annotated[
    str, Field(max_length=200), AfterValidator(_is_text), AfterValidator(_is_one_name)
]
# A path, or a SQLite URL, with ~ for the home directory.
HomePath = Annotated[Text, AfterValidator(expand_home)]
# The address of a service; empty: none.
Uri = Annotated[str, Field(max_length=4000), AfterValidator(_is_uri), AfterValidator(expand_home)]
# What Hydra builds: a target and its arguments.
Node = dict[str, Any]


class Section(BaseModel):
    """A group of options; unknown ones are mistakes, and none changes once it is checked."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        coerce_numbers_to_str=True,
        use_attribute_docstrings=True,
    )
