"""Pace: how the engine shares a device's time between prompts and turns.

Prompts get as much time as turns; up to MOST_SHARE times as much if more streams wait for their prompts than run. A GPU
reads prompts long after it was asked to. Until their time is known, it is estimated by the time for each byte of those
before; what the estimate got wrong is made up for afterwards.
"""

from dataclasses import dataclass

from longstride.sampling.marks import HostMark, Mark
from longstride.sampling.places import Places

MOST_SHARE = 4.0
"""The most time that prompts get for each second of turns."""
READING_SECONDS = 0.05
"""Time for which prompts are read, if no sample is being made, before the engine looks for those that come and leave."""
HOST_BOUND = 1.5
"""A reading that took less than this times the host's time for it may have waited for the host."""


@dataclass
class Reading:
    """Parts of prompts that are read between two turns."""

    begin: Mark
    host_begin: HostMark
    share: float
    """Time that prompts get for each second of turns."""
    most: float
    """Seconds after which no other part is begun."""
    bytes: int = 0
    """Of the parts that were launched."""
    is_plain: bool = True
    """Whether all parts were launched, and none was waited for."""
    owed: float = 0.0
    """Seconds of turns that were to follow, by the estimate."""
    end: Mark | None = None
    host_seconds: float = 0.0
    """That the host took for it."""


class Pace:
    def __init__(self, places: Places) -> None:
        self.places = places
        self.turn_seconds = 0.0
        """Of the last turn."""
        self._owed = 0.0
        """Seconds for which turns are taken before prompts are read again, as these took longer than a turn."""
        self._byte_seconds: float | None = None if places.runs_ahead else 0.0
        """Of a GPU, for each byte of a part; None: not known yet. 0 for a CPU, whose parts the host's clock times."""

    def begin(self, reading: int, running: int) -> Reading | None:
        """Begins to read prompts before the next turn; None if there are none, or if turns have to catch up. reading,
        running: streams that wait for their prompts, and that turns extend."""
        if running and self._owed > self.turn_seconds:
            self._owed -= self.turn_seconds
            return None
        if not reading:
            return None
        share = min(MOST_SHARE, max(1.0, reading / running)) if running else 1.0
        most = share * self.turn_seconds if running else READING_SECONDS
        return Reading(self.places.mark(), HostMark(), share, most)

    def has_time(self, reading: Reading, size: int, running: int) -> bool:
        """Whether another part may be read, after one that was launched for so many bytes; 0: it was waited for."""
        reading.bytes += size
        reading.is_plain &= size > 0
        if running:  # Perhaps since a moment ago.
            reading.most = min(reading.most, reading.share * self.turn_seconds)
        return self._byte_seconds is not None and self._estimate(reading) <= reading.most

    def end(self, reading: Reading) -> None:
        """Ends a reading, whose time may not be known yet."""
        reading.end = self.places.mark()
        reading.host_seconds = HostMark().seconds_since(reading.host_begin)
        reading.owed = self._owed_after(reading, self._estimate(reading))
        self._owed = reading.owed or self._owed

    def settle(self, reading: Reading) -> None:
        """Corrects what is owed by the time that a reading took. Waits for its end."""
        assert reading.end is not None
        seconds = reading.end.seconds_since(reading.begin)
        self._owed = max(0.0, self._owed + self._owed_after(reading, seconds) - reading.owed)
        if self.places.runs_ahead and reading.is_plain and reading.bytes:
            known, found = self._byte_seconds, seconds / reading.bytes
            # A GPU that has waited for the host may be faster: short prompts say little of many that are read together.
            has_waited = seconds < HOST_BOUND * reading.host_seconds
            self._byte_seconds = min(known, found) if has_waited and known is not None else found

    def _estimate(self, reading: Reading) -> float:
        """The host's time is that of many short parts, which a GPU waits for."""
        host = HostMark().seconds_since(reading.host_begin)
        return max(host, reading.bytes * (self._byte_seconds or 0.0))

    def _owed_after(self, reading: Reading, seconds: float) -> float:
        return seconds / reading.share if seconds > reading.most else 0.0
