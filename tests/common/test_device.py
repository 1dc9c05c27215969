import ctypes
from types import SimpleNamespace

import pytest

from longstride.common.device import keep_freed_memory


@pytest.mark.parametrize(
    ("largest", "thresholds", "kept"),
    [(2**31, [2**30], True), (2**25, [2**30, 2**25], True), (0, [2**30, 2**25], False)],
)
def test_freed_memory_is_kept_as_far_as_the_c_library_allows(largest, thresholds, kept, monkeypatch):
    asked = []

    def mallopt(option, value):
        asked.append((option, value))
        return int(option == -1 or value <= largest)

    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(mallopt=mallopt))
    assert keep_freed_memory() is kept
    assert asked == [(-1, 2**31 - 1), *((-3, value) for value in thresholds)]


def test_another_c_library(monkeypatch):
    def refuse(name):
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", refuse)
    assert keep_freed_memory() is False
