"""Arguments that are looked at before they are used."""

import difflib
import json
import operator
from collections.abc import Iterable
from dataclasses import MISSING, fields
from math import isfinite
from typing import Any

MOST = 2**62  # Positions are 64-bit integers on a device.


def whole_number(owner: str, name: str, value: object, least: int) -> int:
    """`value` as an int, or an error that names whose argument it is and what it can be."""
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise ValueError(f"{owner}: {name} must be a whole number of at least {least}, got {value!r}") from None
    if number < least:
        raise ValueError(f"{owner}: {name} must be at least {least}, got {number}")
    if number > MOST:
        raise ValueError(f"{owner}: {name} must be at most 2 ** 62, got {number}")
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
    raise ValueError(f"{owner}: {name} must be a finite number, got {value!r}")


def suggest(name: str, known: Iterable[str]) -> str:
    """What was probably meant, or what there is."""
    known = list(known)
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {near[0]!r}?" if near else f"the names are {', '.join(known)}"


def read_fields(text: str, owner: str, kind: Any) -> dict[str, Any]:
    """The fields of a dataclass from JSON: known ones, and all that have no default. `owner` names the file in errors."""
    try:
        given = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{owner} is not JSON: {error}") from None
    if not isinstance(given, dict):
        raise ValueError(f"{owner} must hold an object with the config's fields, got {type(given).__name__}")
    known = {field.name: field for field in fields(kind)}
    for name in given:
        if name not in known:
            raise ValueError(f"{owner}: there is no field {name!r}; {suggest(name, known)}")
    needed = [name for name, field in known.items() if field.default is MISSING and field.default_factory is MISSING]
    missing = [name for name in needed if name not in given]
    if missing:
        raise ValueError(f"{owner}: {', '.join(missing)} must be given")
    return given
