"""Damaged files of every format: each ends with a result or a ValueError of one line, and does nothing else.

1,000 cases in `make test`, 30,000 in `make test-all`. A failure names the command that runs its case again.
"""

import pytest

from tests.hostile.formats import FORMATS
from tests.hostile.fuzz import ALL, QUICK, Server, replay, shares

BLOCK = 250


def rest() -> list[tuple[str, int]]:
    """The cases of `make test-all`, a block at a time."""
    quick, most = shares(QUICK), shares(ALL)
    return [(name, first) for name in FORMATS for first in range(quick[name], most[name], BLOCK)]


@pytest.mark.parametrize("name", FORMATS)
def test_damaged_files_are_read_or_refused(name, server):
    check(server, name, range(shares(QUICK)[name]))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "first"), rest())
def test_many_damaged_files_are_read_or_refused(name, first, server):
    check(server, name, range(first, min(first + BLOCK, shares(ALL)[name])))


def check(server: Server, name: str, numbers: range) -> None:
    found = [(number, one) for number, one in server.outcomes(name, numbers) if one.kind == "failed"]
    lines = [f"{replay(name, number)}\n    {one.reason}: {one.detail[:300]}" for number, one in found]
    assert not lines, f"{len(lines)} of {len(numbers)} cases of {name} failed:\n" + "\n".join(lines)
