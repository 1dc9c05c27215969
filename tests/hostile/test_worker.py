"""The worker notices what a reader must not do. Else the fuzzer would show nothing."""

import pytest

from tests.hostile.fuzz import Server
from tests.hostile.misdeeds import MISDEEDS


@pytest.mark.parametrize("number", range(len(MISDEEDS)), ids=MISDEEDS)
def test_what_a_reader_must_not_do_is_noticed(number, server: Server):
    ((_, found),) = server.outcomes("misdeeds", range(number, number + 1))
    _, reason = list(MISDEEDS.values())[number]
    assert found.kind == "failed"
    assert found.reason.startswith(reason)
