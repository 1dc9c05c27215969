from collections.abc import Iterator

import pytest

from tests.hostile.fuzz import Server


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    with Server() as started:
        yield started
