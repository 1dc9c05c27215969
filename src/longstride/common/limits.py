"""Upper limits on numbers from files and arguments, compared before memory or time is taken.

A config.json of 300 bytes can ask for a million layers. Each limit is far above honest use; where one is in the way, the
environment variable LONGSTRIDE_LIMITS sets others:

    LONGSTRIDE_LIMITS='layers=10000 width=4194304' longstride train ...
"""

import os
from dataclasses import dataclass, fields

VARIABLE = "LONGSTRIDE_LIMITS"


@dataclass(frozen=True)
class Limits:
    layers: int = 4096
    width: int = 2**20
    """Of a model."""
    heads: int = 4096
    positions: int = 2**40
    """A model's context, the length n of a sequence, and every number of a pattern."""
    parameters: int = 10**12
    """Weights of a model, which follow from its config in closed form."""
    batch: int = 2**20
    """Sequences of a training step."""
    placed: int = 2**15
    """Blocks of a model's cycle of patterns times heads; also the patterns that one text names."""
    leaves: int = 256
    """Leaves of a union."""
    dimensions: int = 16
    """The p of grid(n, p)."""
    text: int = 2**13
    """Characters of a model's pattern or embedding."""
    table: int = 2**16
    """The length n of a mask, which has n x n entries, and of what `connects` looks at."""
    pair_steps: int = 2**29
    """Steps that count the pairs of unions for which there is no closed form: positions times leaves."""


def read_limits(text: str) -> Limits:
    """The limits with the changes that `text` names, as 'layers=10000 width=4194304'."""
    changes = {}
    for word in text.replace(",", " ").split():
        name, _, number = word.partition("=")
        if name not in (field.name for field in fields(Limits)) or not (number.isdecimal() and len(number) < 20):
            known = ", ".join(field.name for field in fields(Limits))
            raise ValueError(f"{VARIABLE}: cannot read {word[:80]!r}; write it like layers=10000, with one of {known}")
        changes[name] = int(number)
    return Limits(**changes)


PROBLEM = ""
"""What is wrong with the environment variable. Kept, and raised where a limit is needed: an import should not fail."""
try:
    LIMITS = read_limits(os.environ.get(VARIABLE, ""))
except ValueError as error:
    LIMITS, PROBLEM = Limits(), str(error)


def check_limit(owner: str, what: str, value: int, limit: str) -> None:
    """Raises ValueError if `value`, which `what` names, is above the limit of that name."""
    if PROBLEM:
        raise ValueError(PROBLEM)
    most = getattr(LIMITS, limit)
    if value > most:
        given = f"{value:,}" if value < 10**30 else "far more"
        raise ValueError(f"{owner}: {what} must be at most {most:,}, got {given}; {VARIABLE}={limit}=N sets another limit")
