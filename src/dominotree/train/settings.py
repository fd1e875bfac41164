"""Settings by name: of what kind each is, what it may be, and what is said of one that will not do."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Self

from dominotree.errors import InvalidRequest

__all__ = ["Check", "Settings", "number", "one_of", "whole"]

Check = tuple[Callable[[Any], bool], str]
"""Whether a value will do, and what is expected."""


def whole(low: int) -> Check:
    """A whole number from `low` on."""
    return lambda value: type(value) is int and value >= low, f"a whole number of at least {low}"


def number(low: float, high: float = math.inf) -> Check:
    """A number from `low` to `high`."""
    expected = f"a number of at least {low:g}" if high == math.inf else f"a number from {low:g} to {high:g}"
    return lambda value: type(value) in (int, float) and low <= value <= high and math.isfinite(value), expected


def one_of(*values: str | bool) -> Check:
    """One of a few values."""
    expected = " or ".join(str(value).lower() for value in values)
    return lambda value: isinstance(value, (str, bool)) and value in values, expected


@dataclass(frozen=True)
class Settings:
    """Base of settings that are chosen by name, with a check for each field; defaults always will do.

    Raises `InvalidRequest`, in one line, for a value that will not.
    """

    noun: ClassVar[str]
    checks: ClassVar[Mapping[str, Check]]

    def __post_init__(self) -> None:
        for field in fields(self):
            value, (fits, expected) = getattr(self, field.name), self.checks[field.name]
            if value is not field.default and not fits(value):
                raise InvalidRequest(f"{self.noun} setting {field.name} is {value!r}, expected {expected}.")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Settings by name; `InvalidRequest` names one that does not exist too."""
        known = [field.name for field in fields(cls)]
        for name in values:
            if name not in known:
                raise InvalidRequest(f"{cls.noun} setting {name!r} does not exist: expected one of {', '.join(known)}.")
        return cls(**values)
