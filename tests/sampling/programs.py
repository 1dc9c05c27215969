"""Programs of a kernel side by side in Triton's interpreter, which runs one after the other: those that wait for others."""

import ctypes
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

from triton.runtime import interpreter
from triton.runtime.interpreter import GridExecutor, interpreter_builder

from longstride.sampling import resident
from longstride.sampling.kernels import whole
from tests import addresses
from tests.turns import Turns

_one_after_the_other = GridExecutor.__call__


@contextmanager
def side_by_side(programs: int, seed: int = 0) -> Iterator[None]:
    """Context in which `make_bytes` has so many programs for each phase, and they take turns where one waits or arrives."""
    turns = Turns(seed)

    def enter(run: Any, memory: addresses.Memory, program: int) -> None:
        addresses.allow(memory)
        interpreter_builder.set_grid_idx(program, 0, 0)
        run()

    def wait(counter: Any, target: Any) -> None:
        place, least = ctypes.c_int32.from_address(int(counter.handle.data.item())), int(target)
        turns.wait(lambda: place.value >= least)
        interpreter_builder.set_grid_idx(turns.now, 0, 0)

    arrive = whole.arrive

    def arrive_and_give_way(counter: Any) -> None:
        arrive(counter)
        turns.give_way()
        interpreter_builder.set_grid_idx(turns.now, 0, 0)

    def execute(self: GridExecutor, *given: Any, **named: Any) -> None:
        if self.fn.__name__ != whole.make_bytes.fn.__name__:
            _one_after_the_other(self, *given, **named)
            return
        known = inspect.getfullargspec(self.fn).args
        named = {name: x for name, x in named.items() if name in known}
        hosts, named_hosts = self._init_args_hst(given, named)
        scope = interpreter._patch_lang(self.fn)
        try:
            arguments = inspect.getcallargs(self.fn, *hosts, **named_hosts)
            arguments = {
                name: x if name in self.constexprs else interpreter._implicit_cvt(x) for name, x in arguments.items()
            }
            interpreter_builder.set_grid_dim(*self.grid, 1, 1)
            run = partial(self.fn, **arguments)
            turns.run([partial(enter, run, addresses.allowed(), program) for program in range(self.grid[0])])
        finally:
            scope.restore()
        self._restore_args_dev(given, hosts, named, named_hosts)

    with (
        patch.object(GridExecutor, "__call__", execute),
        patch.object(whole, "wait", wait),
        patch.object(whole, "arrive", arrive_and_give_way),
        patch.object(resident, "_program_count", lambda config, device: programs),
    ):
        yield
