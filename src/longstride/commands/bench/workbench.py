"""Checks and times launch settings of the kernels: do they run, are the results right, how long do they take.

A kernel is timed at one shape, that of enwik8 in the paper with fewer heads, so settings do not depend on n.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from longstride.attention.blocked import LOG2_E
from longstride.attention.kernels.launches import Key, LaneKey, Setting, TileKey
from longstride.attention.kernels.settings import Gpu, gpu, shipped, shipped_lanes, trial
from longstride.commands.bench.measure import seconds_each

NEEDED = {"dq": (True, False, False), "dkv": (False, True, True), "lane_backward": (True, True, True)}
"""The gradients that a kernel computes."""
ODD = 1537
"""A length that no tile divides."""
HALF_ROUNDINGS, FLOAT_ROUNDINGS = (2, 16), (32, 256)
"""Largest errors, as multiples of the dtype's rounding: of the whole tensor, and of any row. Correct results have 0.4 and 2,
in float32 3 and 9. Results that miss one pair per query have 10 or more over the whole tensor, in any dtype."""


@dataclass(frozen=True)
class Problem:
    """Why a setting cannot be used: wrong results, or a failed launch."""

    wrong: bool
    reason: str


@dataclass(frozen=True)
class Case:
    pattern: str
    call: tuple[str, float]
    """The patterns of all heads, and the scale."""
    inputs: tuple[Tensor, Tensor, Tensor]
    slopes: Tensor
    output: Tensor
    log_sum_exp: Tensor
    expected: list[Tensor]


class Workbench:
    """Runs kernels with given settings. Holds the tensors of one kernel at a time."""

    def __init__(self, device: torch.device, repeats: int, batch: int = 2, heads: int = 8, n: int = 12_288) -> None:
        # Imported here because Triton is optional.
        from longstride.attention.kernels.ops import triton_backward, triton_forward

        self.forward, self.backward = triton_forward, triton_backward
        self.device = device
        self.repeats = repeats
        self.shape = batch, heads, n
        self.key: Key | None = None
        self.timed: Case | None = None

    @property
    def gpu(self) -> Gpu:
        return gpu(self.device)

    def shipped(self, key: Key) -> Setting | None:
        if isinstance(key, TileKey):
            return shipped(key, self.gpu)
        return shipped_lanes(key, key.width, self.gpu)

    def launched(self, key: Key) -> bool:
        """Whether the operator launches this kernel on this device."""
        self._look_at(key)
        with trial({}) as used:
            self._attempt(key, self.shipped(key), lambda: self._results(key, self._timed()))
        return key in used

    def problem(self, key: Key, setting: Setting | None, thorough: bool) -> Problem | None:
        """The problem of a setting, if any: at the timed shape or, if `thorough`, in every branch of the kernel."""
        self._look_at(key)
        for case in self._more_cases(key) if thorough else [self._timed()]:
            with trial({key: setting}), _poisoned():
                actual = self._attempt(key, setting, partial(self._results, key, case))
            if isinstance(actual, Problem):
                return actual
            for name, ours, true in zip(("first", "second", "third"), actual, case.expected):
                if not _agrees(ours, true):
                    return Problem(True, f"the {name} result for {case.pattern} is wrong")
        return None

    def seconds(self, key: Key, settings: Sequence[Setting | None]) -> list[float]:
        """The time of the operator with each setting."""
        self._look_at(key)
        case = self._timed()

        def call(setting: Setting | None) -> Callable[[], Any]:
            def run() -> None:
                with trial({key: setting}):
                    self._results(key, case)

            return run

        times = seconds_each({repr(setting): call(setting) for setting in settings}, self.repeats, self.device)
        return [times[repr(setting)] for setting in settings]

    def _look_at(self, key: Key) -> None:
        if key != self.key:
            self.key, self.timed = key, None  # Frees the last kernel's tensors before new ones are allocated.
            self.timed = self._case(key, _timed_pattern(key, self.shape[2]), *self.shape)

    def _timed(self) -> Case:
        assert self.timed is not None
        return self.timed

    def _more_cases(self, key: Key) -> Iterator[Case]:
        """Cases for every branch with its own memory accesses: odd lengths, later passes, pairs to leave out."""
        n = ODD
        if isinstance(key, LaneKey):
            step = -(-n // key.lane)
            if key.later:
                patterns = [f"local(3) | column({step})", f"column({step}) | column({step + 1})"]
            else:
                several = {32: f"column({3 * step})", 64: f"column({step + 5})", 128: "block(32)"}
                patterns = [f"column({step})", several[key.lane]]
        elif key.summary:
            patterns = ["block(96) | summary(96, 8)", "summary(40, 8)", "local(9) | block(11) | summary(11, 3)"]
        else:
            patterns = ["dense()", "block(300)", "local(100) | column(7)", "column(4) | column(6)"]
        for pattern in patterns:
            yield self._case(key, pattern, 1, 2, n)

    def _case(self, key: Key, pattern: str, batch: int, heads: int, n: int) -> Case:
        generator = torch.Generator(self.device).manual_seed(0)
        q, k, v, slopes = (
            torch.randn(batch, heads, n, key.width, generator=generator, device=self.device).to(key.dtype) for _ in range(4)
        )
        call = ", ".join([pattern] * heads), key.width**-0.5
        wide = [x.double() if key.dtype == torch.float32 else x.float() for x in (q, k, v, slopes)]
        output, largest, weight = torch.ops.longstride.blocked_forward(*wide[:3], *call)
        expected = [output]
        if key.kernel in NEEDED:
            needed = list(NEEDED[key.kernel])
            expected = torch.ops.longstride.blocked_backward(wide[3], *wide[:3], output, largest, weight, *call, needed)
            expected = [x for x, wanted in zip(expected, needed) if wanted]
        # Backward gets the results of a correct forward, independent of forward's settings. A query that sees no key
        # has the lowest finite number as its largest score, which becomes -inf.
        log_sum_exp = (largest * LOG2_E + weight.log2()).float()
        return Case(pattern, call, (q, k, v), slopes, output.to(key.dtype), log_sum_exp, expected)

    def _results(self, key: Key, case: Case) -> list[Tensor]:
        if key.kernel not in NEEDED:
            return [self.forward(*case.inputs, *case.call)[0]]
        needed = list(NEEDED[key.kernel])
        gradients = self.backward(case.slopes, *case.inputs, case.output, case.log_sum_exp, *case.call, needed)
        return [x for x, wanted in zip(gradients, needed) if wanted]

    def _attempt(self, key: Key, setting: Setting | None, call: Callable[[], list[Tensor]]) -> list[Tensor] | Problem:
        try:
            results = call()
            self._synchronize()
            return results
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # Compiler errors have no common type.
            reason = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:200]}"
        try:
            self._synchronize()
            return Problem(False, reason)
        except RuntimeError:  # An illegal memory access makes the GPU unusable for this process.
            raise RuntimeError(f"bench tune: {setting} of {key} made the GPU unusable, nothing is saved: {reason}") from None

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _timed_pattern(key: Key, n: int) -> str:
    if isinstance(key, LaneKey):
        columns = f"column({n // key.lane})"
        # A cheap first pass, so that the later one dominates the time.
        return f"local(1) | {columns}" if key.later else columns
    return "block(128) | summary(128, 32)" if key.summary else "local(128)"


@contextmanager
def _poisoned() -> Iterator[None]:
    """Fills new tensors with NaN: reused memory must not pass the last candidate's results for this one's."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def _agrees(ours: Tensor, true: Tensor) -> bool:
    rounding = torch.finfo(ours.dtype).eps
    together, alone = FLOAT_ROUNDINGS if ours.dtype == torch.float32 else HALF_ROUNDINGS
    off = (ours.to(true.dtype) - true).norm(dim=-1)  # [batch, heads, n]
    size = true.norm(dim=-1)
    typical = size.square().mean().sqrt()
    every_row = off <= alone * rounding * (size + typical)  # False for NaN
    return bool(every_row.all() and off.square().mean().sqrt() <= together * rounding * typical)
