"""Functions side by side in threads of which one runs at a time, so that waits are tested, and repeatable."""

import random
import threading
from collections.abc import Callable, Sequence
from typing import Any


class StuckError(AssertionError):
    """All wait for ever."""


class Turns:
    """Functions that take turns where one waits, in an order that follows from the seed."""

    def __init__(self, seed: int, unblock: Callable[[], bool] = lambda: False) -> None:
        """unblock: is called where all wait; returns whether it has changed anything."""
        self.random, self.unblock = random.Random(seed), unblock
        self.now = 0
        """Which function runs."""
        self.ready: list[Callable[[], bool] | None] = [None]
        """Of each, what it waits for; None: it does not wait."""
        self._over = [False]
        self._woken = [threading.Semaphore(0)]
        self._error: BaseException | None = None

    def run(self, functions: Sequence[Callable[[], Any]]) -> None:
        """Runs all to their end. The first error of one ends all."""
        count = len(functions)
        self.ready, self._over = [None] * count, [False] * count
        self._woken = [threading.Semaphore(0) for _ in functions]
        threads = [threading.Thread(target=self._run, args=one) for one in enumerate(functions)]
        for thread in threads:
            thread.start()
        self._wake_one()
        for thread in threads:
            thread.join()
        self.now, self.ready, self._over = 0, [None], [False]
        if self._error is not None:
            raise self._error

    def wait(self, ready: Callable[[], bool]) -> None:
        """Lets others go on until it is ready."""
        while not ready():
            self.give_way(ready)

    def give_way(self, ready: Callable[[], bool] | None = None) -> None:
        """Lets another go on, if one can."""
        me = self.now
        self.ready[me] = ready
        if len(self.ready) == 1:
            if ready is not None and not self.unblock():
                raise StuckError("it waits for ever")
            return
        self._wake_one(last=me)
        self._woken[me].acquire()
        if self._error is not None:
            raise StuckError("another one failed")
        self.ready[me] = None

    def _run(self, number: int, function: Callable[[], Any]) -> None:
        self._woken[number].acquire()
        try:
            if self._error is None:
                function()
        except BaseException as error:  # `run` raises it.
            self._error = self._error or error
        self._over[number] = True
        self._wake_one()

    def _can_go_on(self, number: int) -> bool:
        ready = self.ready[number]
        return not self._over[number] and (self._error is not None or ready is None or ready())

    def _wake_one(self, last: int | None = None) -> None:
        while not all(self._over):
            able = [number for number in range(len(self._over)) if self._can_go_on(number)]
            if able:
                self.now = self.random.choice([number for number in able if number != last] or able)
                self._woken[self.now].release()
                return
            if not self.unblock():
                self._error = StuckError("all wait for ever")
