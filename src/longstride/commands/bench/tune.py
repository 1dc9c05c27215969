"""Searches kernel settings for this GPU, and saves those that are faster than the shipped ones.

longstride bench tune --widths 64 --dtypes bfloat16
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import product
from math import inf
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor

from longstride import attend
from longstride.attention.kernels import saved
from longstride.attention.kernels.saved import Key, Setting
from longstride.attention.kernels.settings import gpu, reload, shipped, trial
from longstride.commands.bench.measure import seconds_each
from longstride.commands.bench.report import print_lines, reason_of
from longstride.commands.bench.settings import TuneBenchmark
from longstride.common.atomic import check_writable
from longstride.common.checks import whole_number
from longstride.patterns import Block, Column, Dense, Local, Pattern, Summary

TIMED, ODD = (2, 8, 12_288), (1, 2, 1537)
"""Batch, heads and n of timed calls (the paper's n for enwik8), and of calls with an n that no tile divides."""
NOISE = 1.03
"""A setting counts as faster if it is so by more than this factor."""
HALF_ROUNDINGS, FLOAT_ROUNDINGS = (2, 16), (32, 256)
"""Largest errors, as multiples of the dtype's rounding: of the whole tensor, and of any row. Correct results have 0.4 and 2,
in float32 3 and 9. Results that miss one pair per query have 10 or more over the whole tensor, in any dtype."""


def run(settings: TuneBenchmark, console: Console | None = None) -> None:
    """Searches settings for the given kernels, prints a line for each, and saves the faster ones."""
    keys = _keys(settings)
    if not torch.cuda.is_available():
        raise ValueError("bench tune: it times kernels on a CUDA GPU, and torch sees none here")
    path = saved.place()
    if path is None:
        raise ValueError(f"bench tune: {saved.VARIABLE} is empty, which means no file; unset it, or name the file to write")
    before = saved.read(path) if check_writable("bench tune", saved.VARIABLE, path).exists() else {}
    device = torch.device("cuda", torch.cuda.current_device())
    console = console or Console()
    faster: dict[Key, Setting | None] = {}
    for key in track(keys, "tuning", console=console, transient=True):
        bench = Workbench(key, device)
        line = "this GPU has another kernel for it"
        if bench.is_launched():
            faster[key], line = search(bench, settings.repeats)
        print_lines(console, [f"{key}: {line}"])
        del bench  # Frees its tensors before those of the next are made.
    print_lines(console, [save(path, gpu(device).name, before, faster)])


def _keys(settings: TuneBenchmark) -> list[Key]:
    whole_number("bench tune", "repeats", settings.repeats, 1)
    dtypes = [getattr(torch, name) for name in settings.dtypes]
    wanted = set(product(settings.kernels, settings.widths, dtypes))
    keys = [key for key in saved.KEYS.values() if key[:3] in wanted]
    if not keys:
        raise ValueError("bench tune: whole lanes are for float16 and bfloat16 and widths up to 128; there is nothing to do")
    return keys


def search(bench: "Workbench", repeats: int) -> tuple[Setting | None, str]:
    """Moves from the shipped setting to the fastest of its neighbours, and on from there while that is faster.

    Returns the last one, None if that is the shipped one, and a line about it.
    """
    best = bench.shipped
    problems = {best: bench.problem(best)}
    while True:
        fresh = [setting for setting in neighbours(bench.key, best) if setting not in problems]
        problems |= {setting: bench.problem(setting) for setting in fresh}
        usable = [setting for setting in dict.fromkeys([bench.shipped, best, *fresh]) if problems[setting] is None]
        times = dict(zip(usable, bench.seconds(usable, repeats)))
        for setting in sorted(usable, key=lambda setting: times[setting]):
            if NOISE * times[setting] < times.get(best, inf):
                problems[setting] = bench.problem_elsewhere(setting)
                if problems[setting] is None:
                    best = setting
                    break
        else:
            break
    before, after = (times.get(setting, inf) for setting in (bench.shipped, best))
    # The fastest of many is partly luck: the last round has measured it again, beside the shipped one.
    faster = best if NOISE * after < before else None
    line = f"shipped {before * 1e3:.3f} ms" + (f", {after * 1e3:.3f} ms with {faster}" if faster else " is best")
    left_out = Counter(problem for problem in problems.values() if problem)
    return faster, "; ".join([line, *(f"{count} left out: {problem}" for problem, count in left_out.items())])


def neighbours(key: Key, setting: Setting | None) -> set[Setting]:
    """The setting, and those that differ in one field, by one step of its allowed values."""
    start = setting or Setting(key.lane, key.lane, 4, 1, 2)
    settings = {start}
    for name, allowed in saved.choices(key).items():
        index = allowed.index(getattr(start, name))
        settings |= {start._replace(**{name: value}) for value in allowed[max(0, index - 1) : index + 2]}
    return settings


def save(path: Path, name: str, before: saved.ByGpu, found: Mapping[Key, Setting | None]) -> str:
    """Replaces the file's settings for these kernels on the GPU of this name. Returns a line that says so."""
    old = before.get(name, {})
    new = {key: setting for key, setting in {**old, **found}.items() if setting is not None}
    if new == old:
        return "no faster settings were found; nothing is written"
    saved.write(path, {**before, name: new})
    reload()
    return f"wrote {path}: {len(new)} settings for {name}"


class Workbench:
    """A kernel in one call of `attend`, to run with different settings. `pattern`: left out, the one to time."""

    def __init__(self, key: Key, device: torch.device, pattern: Pattern | None = None) -> None:
        batch, heads, n = ODD if pattern else TIMED
        self.key, self.device, self.pattern = key, device, pattern or patterns(key, n)[0]
        self.shipped = shipped(key, gpu(device))
        generator = torch.Generator(device).manual_seed(0)
        values = torch.randn(4, batch, heads, n, key.width, generator=generator, device=device)
        tensors = values.to(key.dtype).unbind()
        exact = torch.float64 if key.dtype == torch.float32 else torch.float32
        with trial({}):
            self.call = self._prepare(tensors, "triton")
        self.expected = self._prepare([x.to(exact) for x in tensors], "blocked")()

    def _prepare(self, tensors: Sequence[Tensor], impl: str) -> Callable[[], Sequence[Tensor]]:
        """Returns a call that launches the kernel and returns what it computes."""
        q, k, v, d_output = tensors
        if self.key.kernel in ("forward", "lane_forward"):
            return lambda: [attend(q, k, v, self.pattern, impl=impl)]
        inputs = [x.requires_grad_() for x in {"dq": (q,), "dkv": (k, v)}.get(self.key.kernel, (q, k, v))]
        output = attend(q, k, v, self.pattern, impl=impl)
        return lambda: torch.autograd.grad(output, inputs, d_output, retain_graph=True)

    def is_launched(self) -> bool:
        """Whether `attend` launches this kernel here, and no other one for the architecture."""
        with trial({}) as used, suppress(Exception):
            self.call()
        return self.key in used

    def problem(self, setting: Setting | None) -> str | None:
        """Why a setting cannot be used, if so."""
        before = torch.are_deterministic_algorithms_enabled()
        # Fills new tensors with NaN: results of an earlier call in reused memory must not pass for this one's.
        torch.use_deterministic_algorithms(True)
        try:
            with trial({self.key: setting}):
                results = self.call()
            right = all(map(_agrees, results, self.expected))
            return None if right else f"WRONG result for {self.pattern} with {setting}"
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # Compiler errors have no common type.
            return reason_of(error).partition(",")[0]
        finally:
            torch.use_deterministic_algorithms(before)

    def problem_elsewhere(self, setting: Setting | None) -> str | None:
        """As `problem`, at an odd length, for a pattern of each branch of the kernel that accesses memory differently."""
        cases = (Workbench(self.key, self.device, pattern) for pattern in patterns(self.key, ODD[2]))
        return next(filter(None, (case.problem(setting) for case in cases)), None)

    def seconds(self, settings: Sequence[Setting | None], repeats: int) -> list[float]:
        calls = {str(setting): self.call for setting in settings}
        within = {str(setting): partial(trial, {self.key: setting}) for setting in settings}
        return list(seconds_each(calls, repeats, self.device, within=within).values())


def patterns(key: Key, n: int) -> list[Pattern]:
    """Patterns that launch the kernel, one for each of its branches. The first is the one to time."""
    if key.summary:
        fixed = [Block(128) | Summary(128, 32), Block(96) | Summary(96, 8)]
        return [*fixed, Summary(40, 8), Local(9) | Block(11) | Summary(11, 3)]
    if not key.lane:
        return [Local(128), Dense(), Block(300), Local(100) | Column(7), Column(4) | Column(6)]
    step = -(-n // key.lane)
    if key.accumulate:  # The first pass is cheap, so that the later one dominates the time.
        return [Local(1) | Column(step), Column(step) | Column(step + 1)]
    return [Column(step), {32: Column(3 * step), 64: Column(step + 5), 128: Block(32)}[key.lane]]


def _agrees(ours: Tensor, exact: Tensor) -> bool:
    rounding = torch.finfo(ours.dtype).eps
    whole, row = FLOAT_ROUNDINGS if ours.dtype == torch.float32 else HALF_ROUNDINGS
    error, size = (x.norm(dim=-1) for x in (ours.to(exact.dtype) - exact, exact))  # [batch, heads, n]
    typical = size.square().mean().sqrt()
    rows_agree = error <= row * rounding * (size + typical)  # False for NaN
    return bool(rows_agree.all() and error.square().mean().sqrt() <= whole * rounding * typical)
