"""Argument and field validation: errors of one line that name the owner, the field, the value and what it can be."""

import difflib
import operator
import os
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, fields
from math import inf, isfinite
from typing import Any, Protocol

from longstride.common.limits import check_limit

MOST = 2**62
"""Of any whole number: positions and seeds are 64-bit integers on a device."""
SHOWN = 160
"""Characters of a value that an error repeats."""


def shown(value: object) -> str:
    """The value's repr on one line, cut off where it is long."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # More digits than Python prints, or lists in lists without end.
        text = f"a very long {type(value).__name__}"
    if "\n" in text:
        text = " ".join(text.split())
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 20]}... ({len(text):,} characters)"


def whole_number(owner: str, name: str, value: object, least: int, limit: str | None = None) -> int:
    """`value` as an int, or an error that names whose argument it is and what it can be. `limit`: a name in `limits`."""
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise ValueError(f"{owner}: {name} must be a whole number of at least {least}, got {shown(value)}") from None
    if number < least:
        raise ValueError(f"{owner}: {name} must be at least {least}, got {shown(number)}")
    if limit is not None:
        check_limit(owner, name, number, limit)
    elif number > MOST:
        raise ValueError(f"{owner}: {name} must be at most 2 ** 62, got {shown(number)}")
    return number


def finite_number(owner: str, name: str, value: Any) -> float:
    """`value` as a float, of whatever type it is, but no text and no truth."""
    try:
        if isinstance(value, str | bytes | bool):
            raise TypeError
        number = float(value)
        if isfinite(number):
            return number
    except (TypeError, ValueError, OverflowError, RuntimeError):
        pass
    raise ValueError(f"{owner}: {name} must be a finite number, got {shown(value)}")


class Rule(Protocol):
    """What a field of a config can be."""

    def check(self, owner: str, name: str, value: Any) -> Any:
        """The value as the config keeps it, or ValueError."""


@dataclass(frozen=True)
class Whole:
    """A whole number from `least` up to a limit."""

    least: int
    limit: str | None = None

    def check(self, owner: str, name: str, value: Any) -> int:
        return whole_number(owner, name, value, self.least, self.limit)


@dataclass(frozen=True)
class Real:
    """A number from `least` to `most`; `below`: less than `most`; `above`: more than `least`; `infinite`: or inf."""

    least: float
    most: float
    below: bool = False
    above: bool = False
    infinite: bool = False

    def check(self, owner: str, name: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"{owner}: {name} must be a number, got {shown(value)}")
        if value == inf and self.infinite:
            return inf
        inside = value > self.least if self.above else value >= self.least
        inside &= value < self.most if self.below else value <= self.most
        if not inside:  # NaN neither.
            least = f"{'more than' if self.above else 'at least'} {self.least:,}"
            most = f"{'less than' if self.below else 'at most'} {self.most:,}"
            raise ValueError(f"{owner}: {name} must be {least} and {most}, got {shown(value)}")
        return value


@dataclass(frozen=True)
class Text:
    """Text up to a limit of characters."""

    limit: str | None = None

    def check(self, owner: str, name: str, value: Any) -> str:
        if not isinstance(value, str):
            raise ValueError(f"{owner}: {name} must be text, got {shown(value)}")
        if self.limit is not None:
            check_limit(owner, f"the length of {name}", len(value), self.limit)
        return value


@dataclass(frozen=True)
class PathText:
    """A path, kept as text."""

    def check(self, owner: str, name: str, value: Any) -> str:
        path = os.fspath(value) if isinstance(value, os.PathLike) else value
        if not isinstance(path, str):
            raise ValueError(f"{owner}: {name} must be a path, got {shown(value)}")
        return path


@dataclass(frozen=True)
class Truth:
    """True or false, and nothing that only counts as such."""

    def check(self, owner: str, name: str, value: Any) -> bool:
        if not isinstance(value, bool):
            raise ValueError(f"{owner}: {name} must be true or false, got {shown(value)}")
        return value


class Choice:
    """One of some names."""

    def __init__(self, *names: str) -> None:
        self.names = names

    def check(self, owner: str, name: str, value: Any) -> str:
        if not isinstance(value, str) or value not in self.names:
            raise ValueError(f"{owner}: {name} must be one of {', '.join(self.names)}, got {shown(value)}")
        return value


@dataclass(frozen=True)
class Made:
    """Another config."""

    kind: type

    def check(self, owner: str, name: str, value: Any) -> Any:
        if not isinstance(value, self.kind):
            raise ValueError(f"{owner}: {name} must be a {self.kind.__name__}, got {shown(value)}")
        return value


def check_fields(owner: str, config: Any, rules: Mapping[str, Rule]) -> None:
    """Checks every field of a frozen dataclass by its rule, and stores what the rule makes of it."""
    for field in fields(config):
        value = rules[field.name].check(owner, field.name, getattr(config, field.name))
        object.__setattr__(config, field.name, value)


def suggest(name: str, known: Iterable[str]) -> str:
    """What was probably meant, or what there is."""
    known = list(known)
    near = difflib.get_close_matches(name[:SHOWN], known, n=1)
    return f"did you mean {near[0]!r}?" if near else f"the names are {', '.join(known)}"


def known_fields(given: Any, owner: str, kind: Any) -> dict[str, Any]:
    """The fields of a dataclass as JSON has them: known ones, and all that have no default."""
    if not isinstance(given, dict):
        raise ValueError(f"{owner} must hold an object with the config's fields, got {type(given).__name__}")
    known = {field.name: field for field in fields(kind)}
    for name in given:
        if name not in known:
            raise ValueError(f"{owner}: there is no field {shown(name)}; {suggest(name, known)}")
    needed = [name for name, field in known.items() if field.default is MISSING and field.default_factory is MISSING]
    missing = [name for name in needed if name not in given]
    if missing:
        raise ValueError(f"{owner}: {', '.join(missing)} must be given")
    return given
