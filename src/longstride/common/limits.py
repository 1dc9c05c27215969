"""Upper limits on numbers from files and arguments, checked before memory or time is spent on them.

A config.json of 300 bytes can ask for a million layers. Each limit is far above ordinary use. The environment variable
LONGSTRIDE_LIMITS raises them:

    LONGSTRIDE_LIMITS='layers=10000 width=4194304' longstride train ...
"""

import os
from dataclasses import dataclass, fields

VARIABLE = "LONGSTRIDE_LIMITS"


@dataclass(frozen=True)
class Limits:
    layers: int = 4096
    width: int = 2**20
    """Width of a model."""
    heads: int = 4096
    positions: int = 2**40
    """A model's context, the length n of a sequence, and every parameter of a pattern."""
    parameters: int = 10**12
    """Weights of a model, computed from its config in closed form."""
    batch: int = 2**20
    """Sequences of a training step."""
    last_bytes: int = 256
    """Bytes before a position that have an embedding there."""
    placed: int = 2**15
    """Blocks in a model's cycle of patterns, times heads; also the number of patterns in one text."""
    leaves: int = 256
    """Leaves of a union."""
    dimensions: int = 16
    """The p of grid(n, p)."""
    text: int = 2**13
    """Characters of a model's pattern or embedding."""
    table: int = 2**16
    """The length n of a mask, which has n x n entries, and the n of `connects`."""
    pair_steps: int = 2**29
    """Steps of the pass that counts the pairs of a union without a closed form: positions times leaves."""


def read_limits(text: str) -> Limits:
    """Returns the limits with the changes in `text`, such as 'layers=10000 width=4194304'."""
    changes = {}
    for word in text.replace(",", " ").split():
        name, _, number = word.partition("=")
        if name not in (field.name for field in fields(Limits)) or not (number.isdecimal() and len(number) < 20):
            known = ", ".join(field.name for field in fields(Limits))
            raise ValueError(f"{VARIABLE}: cannot read {word[:80]!r}; write it like layers=10000, with one of {known}")
        changes[name] = int(number)
    return Limits(**changes)


PROBLEM = ""
"""Why the environment variable cannot be read. Raised at the first check, since an import should not fail."""
try:
    LIMITS = read_limits(os.environ.get(VARIABLE, ""))
except ValueError as error:
    LIMITS, PROBLEM = Limits(), str(error)


def check_limit(owner: str, what: str, value: int, limit: str) -> None:
    """Raises ValueError if `value` exceeds the limit of that name. `what` describes the value in the error."""
    if PROBLEM:
        raise ValueError(PROBLEM)
    most = getattr(LIMITS, limit)
    if value > most:
        given = f"{value:,}" if value < 10**30 else "far more"
        raise ValueError(f"{owner}: {what} must be at most {most:,}, got {given}; {VARIABLE}={limit}=N sets another limit")
