"""Tile sizes, warps and stages of the plain Triton kernels. Nothing is tuned during a call.

A launch takes the setting of the user's file (`saved.py`) or else the shipped one. The shipped ones were measured on an H200
(docs/log.md); GPUs with less shared memory get smaller tiles. `longstride bench tune` searches better ones for a GPU.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from typing import NamedTuple

import torch

from longstride.attention.kernels.launch import forget_plans
from longstride.attention.kernels.saved import Key, Setting, in_force
from longstride.patterns.geometry import LANE

LEAST = 16
"""The smallest side that a matrix instruction takes."""
LANE_MEMORY = 220 * 2**10
"""Shared memory that tiles of whole lanes need. GPUs with less of it use the other kernels."""


class Gpu(NamedTuple):
    name: str
    shared_memory: int
    """Of one program at most, in bytes."""


@lru_cache(maxsize=16)
def gpu(device: torch.device) -> Gpu:
    if device.type != "cuda":
        return Gpu("Triton's interpreter", LANE_MEMORY)
    from triton.runtime import driver  # Imported here because Triton is optional.

    memory = driver.active.utils.get_device_properties(device.index or 0)["max_shared_mem"]
    return Gpu(torch.cuda.get_device_name(device), int(memory))


@lru_cache(maxsize=16)
def processors(device: torch.device) -> int:
    """Multiprocessors; without a GPU a few, so that a program has more than one turn."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def padded(size: int, least: int = LEAST) -> int:
    """The smallest power of two that is at least `size` and `least`."""
    return max(least, 1 << (size - 1).bit_length())


def tile_setting(kernel: str, summary: bool, width: int, dtype: torch.dtype, longest: int, on: Gpu) -> Setting:
    """The setting of forward, dq or dkv. `longest`: of the lanes; tiles are not longer, except where they cross lanes."""
    setting = _choose(Key(kernel, width, dtype, summary), on)
    assert setting is not None
    rows = setting.rows if summary and kernel == "dkv" else min(setting.rows, padded(longest))
    columns = setting.columns if summary else min(setting.columns, padded(longest))
    return setting._replace(rows=rows, columns=columns)


def lane_setting(
    kernel: str, accumulate: bool, width_qk: int, width_v: int, dtype: torch.dtype, longest: int, on: Gpu
) -> Setting | None:
    """The setting of lane_forward or lane_backward; None if they are not used for lanes of this length."""
    key = Key(kernel, max(width_qk, width_v), dtype, lane=padded(longest, LANE // 4), accumulate=accumulate)
    return _choose(key, on, width_qk)


_trial: tuple[Mapping[Key, Setting | None], set[Key]] | None = None


@contextmanager
def trial(settings: Mapping[Key, Setting | None]) -> Iterator[set[Key]]:
    """Context that launches kernels with these settings (None: the lane kernel is not used), and with the shipped ones for
    other keys, in all threads: PyTorch computes gradients in others. Yields the set of keys that are looked up."""
    global _trial
    before, used = _trial, set[Key]()
    _trial = settings, used
    forget_plans()
    try:
        yield used
    finally:
        _trial = before
        forget_plans()


def reload() -> None:
    """Reads the user's file again at the next launch."""
    in_force.cache_clear()
    forget_plans()


def _choose(key: Key, on: Gpu, width_qk: int | None = None) -> Setting | None:
    settings, used = _trial or (in_force().get(on.name, {}), set())
    used.add(key)
    return settings[key] if key in settings else shipped(key, on, width_qk)


def shipped(key: Key, on: Gpu, width_qk: int | None = None) -> Setting | None:
    """The shipped setting; None if this lane kernel is not used. `width_qk`: of queries and keys, if less than key.width."""
    if key.lane:
        return _shipped_lanes(key, on, width_qk or key.width)
    setting = _measured(key)
    while _shared_memory(key, setting) > on.shared_memory and max(setting[:2]) > LEAST:
        longer = "rows" if setting.rows >= setting.columns else "columns"
        setting = setting._replace(**{longer: getattr(setting, longer) // 2})
    return setting


def _shipped_lanes(key: Key, on: Gpu, width_qk: int) -> Setting | None:
    backward = key.kernel == "lane_backward"
    most = LANE if key.width <= 64 or (not backward and width_qk <= 64) else LANE // 2
    if on.shared_memory < LANE_MEMORY or key.lane > most or key.dtype == torch.float32 or key.width > 128:
        return None
    stages = (3 if key.width <= 32 else 2) if backward else (4 if key.width <= 32 else 3)
    if key.width > 64 and key.accumulate and key.lane > LANE // 4:
        stages -= 1
    warps = 8 if key.lane == LANE or (key.lane == LANE // 2 and key.width > 64) else 4
    per_processor = {LANE: 1, LANE // 2: 2}.get(key.lane, 2 if backward else 3)
    return Setting(key.lane, key.lane, warps, stages, per_processor)


def _shared_memory(key: Key, tile: Setting) -> int:
    """Bytes of shared memory that a kernel takes before Hopper, at most: as Triton reports for the shipped tiles on 8.9.

    The tiles that stay are held once (forward: q; dq: q and d_output; dkv: k and v), the two that the loop loads once per
    stage in flight, and the weights between two products.
    """
    stays, passes = (tile.columns, tile.rows) if key.kernel == "dkv" else tile[:2]
    held = stays * (1 if key.kernel == "forward" else 2) + passes * 2 * max(1, tile.stages - 1)
    return (held * key.width + tile.rows * tile.columns) * key.dtype.itemsize


def _measured(key: Key) -> Setting:
    if key.dtype == torch.float32:  # No matrix units: with larger tiles the sums do not fit into registers.
        return Setting(32, 32, 4, 1) if key.width <= 64 else Setting(16, 16, 4, 1)
    if key.width > 64:
        return Setting(64, 64, 4, 2) if key.width <= 128 else Setting(64, 32, 8, 2)
    return {
        "forward": (Setting(64, 64, 4, 2), Setting(128, 64, 4, 3)),
        "dq": (Setting(64, 64, 4, 1), Setting(64, 64, 4, 3)),
        "dkv": (Setting(32, 64, 4, 1), Setting(128, 64, 4, 2)),
    }[key.kernel][key.summary]
