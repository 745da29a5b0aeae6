"""Looks up other values of the config that checked options come from."""

from collections.abc import Mapping
from typing import Protocol

from pydantic import ValidationInfo


class Lookup(Protocol):
    """The config that checked values come from, as checks ask for it: pydantic's ``context``."""

    def value_at(self, key: str) -> object:
        """Give the value at a dotted key.

        Where there is none, it is the text ``nothing``: messages read "but got nothing there".
        """

    def is_reference(self, section: str, name: str) -> bool:
        """Whether a value of a section refers to another one, which is checked where it stands."""


class PlainLookup:
    """The lookup of values without references, as a study's folder holds them."""

    def __init__(self, values: Mapping[str, object]) -> None:
        self._values = values

    def value_at(self, key: str) -> object:
        """Give the value at a dotted key; the text ``nothing`` where there is none."""
        value: object = self._values
        for part in key.split("."):
            if not isinstance(value, Mapping) or part not in value:
                return "nothing"
            value = value[part]
        return value

    def is_reference(self, section: str, name: str) -> bool:
        """Whether a value is a reference: none is here."""
        return False


def lookup_of(info: ValidationInfo) -> Lookup:
    """Give the lookup with which options are checked, pydantic's context."""
    lookup: Lookup | None = info.context
    if lookup is None:
        raise TypeError("options are checked with a Lookup as the context")
    return lookup
