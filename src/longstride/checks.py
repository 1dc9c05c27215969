"""Arguments that are looked at before they are used."""

import difflib
import operator
from collections.abc import Iterable

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


def suggest(name: str, known: Iterable[str]) -> str:
    """What was probably meant, or what there is."""
    known = list(known)
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {near[0]!r}?" if near else f"the names are {', '.join(known)}"
