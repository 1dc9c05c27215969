import signal
import threading

import pytest

from longstride.training.interrupts import SIGNALS, Interrupts


@pytest.mark.parametrize("one", SIGNALS)
def test_the_first_is_noted_and_the_second_ends(one, monkeypatch):
    """But not what comes at once, which is the same request by another way."""
    now = [100.0]
    monkeypatch.setattr("longstride.training.interrupts.monotonic", lambda: now[0])
    before = [signal.getsignal(each) for each in SIGNALS]
    with Interrupts() as interrupts:
        assert not interrupts.requested
        signal.raise_signal(one)
        assert interrupts.requested
        for again in SIGNALS:
            signal.raise_signal(again)
        now[0] += 2.1
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(one)
    assert [signal.getsignal(each) for each in SIGNALS] == before


def test_what_another_process_heard_is_the_same_request(monkeypatch):
    """The signal of this one may come a moment later. After that it is a second one."""
    now = [100.0]
    monkeypatch.setattr("longstride.training.interrupts.monotonic", lambda: now[0])
    with Interrupts() as interrupts:
        interrupts.mark_requested()
        assert interrupts.requested
        now[0] += 1.5
        interrupts.mark_requested()
        signal.raise_signal(signal.SIGTERM)
        now[0] += 0.6
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)


def test_handlers_are_back_after_an_error():
    before = [signal.getsignal(each) for each in SIGNALS]
    with pytest.raises(KeyError), Interrupts():
        {}["missing"]
    assert [signal.getsignal(each) for each in SIGNALS] == before


def test_in_another_thread_it_asks_for_nothing():
    found = []

    def work():
        with Interrupts() as interrupts:
            found.append(interrupts.requested)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [False]
