"""Argument and field validation. Each error is one line with the owner, the field, the value and the allowed values."""

import difflib
import operator
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, fields
from math import inf, isfinite
from typing import Any, Protocol

from longstride.common.limits import check_limit

LARGEST_INTEGER = 2**62
"""The largest integer argument: positions and seeds are 64-bit integers on a device."""
LONGEST_REPR = 160
"""The most characters of a value that an error message quotes."""
REPLACEMENT = "\ufffd"
"""Stands for a character that cannot be printed."""


def short_repr(value: object) -> str:
    """Returns the value's repr on one line, truncated to LONGEST_REPR characters."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # An int beyond Python's digit limit, or deeply nested lists.
        text = f"a very long {type(value).__name__}"
    if "\n" in text:
        text = " ".join(text.split())
    return text if len(text) <= LONGEST_REPR else f"{text[: LONGEST_REPR - 20]}... ({len(text):,} characters)"


def printable(text: str, kept: str = "") -> str:
    """Replaces control characters, with which a file's name could move a terminal's cursor or change its settings. `kept`:
    control characters to leave in."""
    return "".join(x if x.isprintable() or x in kept else REPLACEMENT for x in text)


def short_reason(error: BaseException) -> str:
    """Returns a library's error message on one line, truncated; the type of the error if the message is empty."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 2 * LONGEST_REPR else f"{text[: 2 * LONGEST_REPR]}..."


def whole_number(owner: str, name: str, value: object, least: int, limit: str | None = None) -> int:
    """Returns `value` as an int; ValueError if it is no integer or out of range. `limit`: the name of a `Limits` field."""
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise ValueError(f"{owner}: {name} must be a whole number of at least {least}, got {short_repr(value)}") from None
    if number < least:
        raise ValueError(f"{owner}: {name} must be at least {least}, got {short_repr(number)}")
    if limit is not None:
        check_limit(owner, name, number, limit)
    elif number > LARGEST_INTEGER:
        raise ValueError(f"{owner}: {name} must be at most 2 ** 62, got {short_repr(number)}")
    return number


def finite_number(owner: str, name: str, value: Any) -> float:
    """Returns `value` as a finite float. Accepts any numeric type, but neither text nor bool."""
    try:
        if isinstance(value, str | bytes | bool):
            raise TypeError
        number = float(value)
        if isfinite(number):
            return number
    except (TypeError, ValueError, OverflowError, RuntimeError):
        pass
    raise ValueError(f"{owner}: {name} must be a finite number, got {short_repr(value)}")


class Rule(Protocol):
    """Validation rule for one field of a config."""

    def check(self, owner: str, name: str, value: Any) -> Any:
        """Returns the value as the config stores it, or raises ValueError."""


@dataclass(frozen=True)
class Whole:
    """An integer of at least `least`, up to the named limit."""

    least: int
    limit: str | None = None

    def check(self, owner: str, name: str, value: Any) -> int:
        return whole_number(owner, name, value, self.least, self.limit)


@dataclass(frozen=True)
class Real:
    """A number from `least` to `most`. `below` and `above` exclude that end; `infinite` also allows inf."""

    least: float
    most: float
    below: bool = False
    above: bool = False
    infinite: bool = False

    def check(self, owner: str, name: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"{owner}: {name} must be a number, got {short_repr(value)}")
        if value == inf and self.infinite:
            return inf
        inside = value > self.least if self.above else value >= self.least
        inside &= value < self.most if self.below else value <= self.most
        if not inside:  # NaN fails both comparisons.
            least = f"{'more than' if self.above else 'at least'} {self.least:,}"
            most = f"{'less than' if self.below else 'at most'} {self.most:,}"
            raise ValueError(f"{owner}: {name} must be {least} and {most}, got {short_repr(value)}")
        return value


@dataclass(frozen=True)
class Text:
    """Text of at most as many characters as the named limit."""

    limit: str | None = None

    def check(self, owner: str, name: str, value: Any) -> str:
        if not isinstance(value, str):
            raise ValueError(f"{owner}: {name} must be text, got {short_repr(value)}")
        if self.limit is not None:
            check_limit(owner, f"the length of {name}", len(value), self.limit)
        return value


@dataclass(frozen=True)
class PathText:
    """A path, stored as text."""

    def check(self, owner: str, name: str, value: Any) -> str:
        path = os.fspath(value) if isinstance(value, os.PathLike) else value
        if not isinstance(path, str):
            raise ValueError(f"{owner}: {name} must be a path, got {short_repr(value)}")
        return path


@dataclass(frozen=True)
class Boolean:
    """True or False; values that are merely truthy are refused."""

    def check(self, owner: str, name: str, value: Any) -> bool:
        if not isinstance(value, bool):
            raise ValueError(f"{owner}: {name} must be true or false, got {short_repr(value)}")
        return value


@dataclass(frozen=True)
class Size:
    """A number of bytes as text, such as 16GB; or empty."""

    def check(self, owner: str, name: str, value: Any) -> str:
        if not isinstance(value, str):
            raise ValueError(f"{owner}: {name} must be a size such as 16GB or 80GiB, got {short_repr(value)}")
        if value:
            size_in_bytes(owner, name, value)
        return value


def size_in_bytes(owner: str, name: str, text: str) -> int:
    """Parses a size: 16GB is 16 * 10^9 bytes, and 16GiB is 16 * 2^30."""
    match = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?) *([kmgt]?)(i?)b", text.strip().lower())
    if match is None or float(match[1]) == 0 or (match[3] and not match[2]):
        raise ValueError(f"{owner}: {name} must be a size such as 16GB or 80GiB, got {short_repr(text)}")
    return int(float(match[1]) * (1024 if match[3] else 1000) ** " kmgt".index(match[2] or " "))


class Choice:
    """One of a fixed set of names."""

    def __init__(self, *names: str) -> None:
        self.names = names

    def check(self, owner: str, name: str, value: Any) -> str:
        if not isinstance(value, str) or value not in self.names:
            raise ValueError(f"{owner}: {name} must be one of {', '.join(self.names)}, got {short_repr(value)}")
        return value


@dataclass(frozen=True)
class InstanceOf:
    """An instance of a class, such as a nested config."""

    expected: type

    def check(self, owner: str, name: str, value: Any) -> Any:
        if not isinstance(value, self.expected):
            raise ValueError(f"{owner}: {name} must be a {self.expected.__name__}, got {short_repr(value)}")
        return value


def check_fields(owner: str, config: Any, rules: Mapping[str, Rule]) -> None:
    """Checks every field of a frozen dataclass by its rule, and stores the value that the rule returns."""
    for field in fields(config):
        value = rules[field.name].check(owner, field.name, getattr(config, field.name))
        object.__setattr__(config, field.name, value)


def suggest(name: str, known: Iterable[str]) -> str:
    """Returns a hint for a misspelt name: the closest known name, or all known names."""
    known = list(known)
    matches = difflib.get_close_matches(name[:LONGEST_REPR], known, n=1)
    return f"did you mean {matches[0]!r}?" if matches else f"the names are {', '.join(known)}"


def check_field_names(given: Any, owner: str, config: Any) -> dict[str, Any]:
    """Returns `given`, an object from JSON, if its names are fields of the dataclass `config`, with all required ones."""
    if not isinstance(given, dict):
        raise ValueError(f"{owner} must hold an object with the config's fields, got {type(given).__name__}")
    known = {field.name: field for field in fields(config)}
    for name in given:
        if name not in known:
            raise ValueError(f"{owner}: there is no field {short_repr(name)}; {suggest(name, known)}")
    required = [name for name, field in known.items() if field.default is MISSING and field.default_factory is MISSING]
    missing = [name for name in required if name not in given]
    if missing:
        raise ValueError(f"{owner}: {', '.join(missing)} must be given")
    return given
