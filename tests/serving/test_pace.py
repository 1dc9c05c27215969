"""The pace of prompts and turns, by a clock of the device that shows a reading's time only after a while."""

from types import SimpleNamespace

import pytest

from longstride.serving.pace import READING_SECONDS, Pace
from tests.serving.test_engine import Moment


@pytest.fixture
def clock(monkeypatch):
    """Of the device and of the host, which are advanced by hand."""
    made = SimpleNamespace(device=0.0, host=0.0, runs_ahead=True)
    made.mark = lambda: Moment(made.device)
    monkeypatch.setattr("longstride.sampling.marks.time", SimpleNamespace(perf_counter=lambda: made.host))
    return made


def read(pace, clock, parts, seconds_per_byte, size=100, running=1, waiting=1):
    """Launches up to so many parts. Returns the reading and how many there was time for; (None, 0) if for none."""
    reading = pace.begin(waiting, running)
    if reading is None:
        return None, 0
    count, has_time = 0, True
    while has_time and count < parts:
        clock.device += size * seconds_per_byte
        count += 1
        has_time = pace.has_time(reading, size, running)
    pace.end(reading)
    return reading, count


def test_a_gpu_reads_one_part_until_it_is_timed(clock):
    pace = Pace(clock)
    pace.turn_seconds = 1.0
    first, count = read(pace, clock, 99, 0.001)
    assert count == 1
    _, count = read(pace, clock, 99, 0.001)
    assert count == 1
    pace.settle(first)
    assert read(pace, clock, 99, 0.001)[1] == 11  # 0.1 s each, until the time of a turn has passed.


def test_turns_catch_up_with_what_a_reading_took(clock):
    """Whatever the estimate was."""
    pace = Pace(clock)
    pace.turn_seconds = 1.0
    reading, _ = read(pace, clock, 1, 0.001)
    pace.settle(reading)
    reading, count = read(pace, clock, 5, 0.1)  # A hundred times slower than the ones before: 50 s.
    assert count == 5
    assert read(pace, clock, 1, 0.1)[1] == 1  # Nothing is known yet.
    pace.settle(reading)
    turns = 0
    while pace.begin(1, 1) is None:
        turns += 1
    assert turns == 49
    reading, count = read(pace, clock, 99, 0.001)
    assert count == 1  # Each is expected to take 10 s.
    assert pace.begin(1, 1) is None
    pace.settle(reading)
    assert pace.begin(1, 1) is not None  # It took 0.1 s.


def test_many_short_parts_end_with_the_time_of_their_launches(clock):
    pace = Pace(clock)
    pace.turn_seconds = 1.0
    pace.settle(read(pace, clock, 1, 1e-9)[0])
    reading = pace.begin(1, 1)
    for _ in range(4):
        clock.host += 0.25
        assert pace.has_time(reading, 1, 1)
    clock.host += 0.25
    assert not pace.has_time(reading, 1, 1)


def test_a_short_prompt_that_waited_for_the_host_says_nothing_of_many_that_are_read_together(clock):
    pace = Pace(clock)
    pace.turn_seconds = 1.0
    pace.settle(read(pace, clock, 1, 0.001)[0])
    reading = pace.begin(1, 1)
    clock.host += 0.5
    clock.device += 0.5
    pace.has_time(reading, 1, 1)
    pace.end(reading)
    pace.settle(reading)
    assert read(pace, clock, 99, 0.001)[1] == 11


def test_parts_that_were_waited_for_say_nothing_of_those_that_are_launched(clock):
    pace = Pace(clock)
    pace.turn_seconds = 1.0
    pace.settle(read(pace, clock, 1, 0.001)[0])
    reading = pace.begin(1, 1)
    pace.has_time(reading, 100, 1)
    pace.has_time(reading, 0, 1)
    pace.end(reading)
    pace.settle(reading)
    assert read(pace, clock, 99, 0.001)[1] == 11


def test_a_cpu_is_timed_by_the_clock_of_the_host(clock):
    clock.runs_ahead = False
    pace = Pace(clock)
    reading = pace.begin(1, 0)
    assert reading.most == READING_SECONDS
    assert pace.has_time(reading, 10**9, 0)
    clock.host = clock.device = 2 * READING_SECONDS
    assert not pace.has_time(reading, 1, 0)
    pace.end(reading)
    pace.turn_seconds = READING_SECONDS
    assert pace.begin(1, 1) is None
    assert pace.begin(1, 1) is not None


def test_time_passes_while_nothing_is_read(clock):
    pace = Pace(clock)
    pace.turn_seconds = 1.0
    pace.settle(read(pace, clock, 1, 0.05)[0])
    assert [pace.begin(0, 1) for _ in range(5)] == [None] * 5
    assert pace.begin(1, 1) is not None
