"""How large tiles are and how many warps work on one: chosen by what is computed, never by trying it out in a user's call.

The user's file (`saved.py`) comes first, then what is shipped for the GPU's architecture. The shipped numbers were found by
`docs/log.md`'s measurements on the GPU that it names; other architectures get the same ones, with tiles that fit into their
shared memory. `longstride bench tune` finds better ones for the GPU at hand.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import torch

from longstride.attention.kernels.launch import forget_plans
from longstride.attention.kernels.launches import Key, LaneKey, LaneSetting, Setting, TileKey, TileSetting
from longstride.attention.kernels.saved import in_force
from longstride.patterns.geometry import LANE

__all__ = [
    "Gpu",
    "LaneTiles",
    "TileSetting",
    "gpu",
    "lane_tiles",
    "tile_setting",
    "padded",
    "processors",
    "reload",
    "shipped",
    "shipped_lanes",
    "trial",
]

LEAST = 16
"""The smallest side that a matrix instruction takes."""
LANE_MEMORY = 220 * 2**10
"""The shared memory that whole lanes count on. GPUs with less of it compute them as windows."""


class Gpu(NamedTuple):
    name: str
    capability: tuple[int, int]
    shared_memory: int
    """The most that a program can have, in bytes."""


def padded(d: int) -> int:
    """The power of two that a row of d numbers is padded to."""
    return max(LEAST, 1 << (d - 1).bit_length())


INTERPRETER = Gpu("Triton's interpreter", (9, 0), LANE_MEMORY)
"""Without a GPU the kernels are tried out as they are where their settings were found."""


@lru_cache(maxsize=16)
def gpu(device: torch.device) -> Gpu:
    if device.type != "cuda":
        return INTERPRETER
    from triton.runtime import driver  # Here, as this file is also read where Triton is not installed.

    index = torch.cuda.current_device() if device.index is None else device.index
    properties = torch.cuda.get_device_properties(index)
    memory = int(driver.active.utils.get_device_properties(index)["max_shared_mem"])
    return Gpu(properties.name, (properties.major, properties.minor), memory)


@lru_cache(maxsize=16)
def processors(device: torch.device) -> int:
    """Multiprocessors; without a GPU a few, so that programs have more than one turn."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def tile_setting(kernel: str, summary: bool, width: int, dtype: torch.dtype, longest: int, on: Gpu) -> TileSetting:
    """Settings for a kernel, where `width` is the larger of the head dimensions and `longest` the longest lane."""
    key = TileKey(kernel, summary, width, dtype)
    found = _chosen(key, on, shipped(key, on))
    assert isinstance(found, TileSetting)
    # A lane that is shorter than a tile would leave the rest of it idle.
    most = max(LEAST, 1 << (longest - 1).bit_length())
    if kernel == "forward" or kernel == "dq":
        return found._replace(rows=min(found.rows, most), columns=found.columns if summary else min(found.columns, most))
    return found if summary else found._replace(rows=min(found.rows, most), columns=min(found.columns, most))


class LaneTiles(NamedTuple):
    """Settings for lanes that fit into a tile whole."""

    rows: int
    together: int
    """Lanes of a tile."""
    warps: int
    stages: int
    per_processor: int
    """Programs that a multiprocessor holds at a time."""


def lane_tiles(
    backward: bool, later: bool, width_qk: int, width_v: int, dtype: torch.dtype, longest: int, on: Gpu
) -> LaneTiles | None:
    """The same for whole lanes, or None where the tiles of `stages` lanes would not fit into shared memory."""
    length = 1 << (longest - 1).bit_length()
    if length > LANE:
        return None
    rows = max(LANE // 4, length)
    key = LaneKey("lane_backward" if backward else "lane_forward", rows, later, max(width_qk, width_v), dtype)
    found = _chosen(key, on, shipped_lanes(key, width_qk, on))
    assert not isinstance(found, TileSetting)
    return None if found is None else LaneTiles(rows, rows // length, *found)


@dataclass
class Trial:
    settings: Mapping[Key, Setting | None]
    used: set[Key] = field(default_factory=set)


_trial: Trial | None = None


@contextmanager
def trial(settings: Mapping[Key, Setting | None]) -> Iterator[set[Key]]:
    """Launches with these settings, and with the shipped ones for all else; the user's file does not count.

    None for whole lanes: they are computed as windows. Yields the keys that have been launched since.
    It holds for the whole process, as PyTorch computes gradients in threads of its own.
    """
    global _trial
    before, _trial = _trial, Trial(settings)
    forget_plans()
    try:
        yield _trial.used
    finally:
        _trial = before
        forget_plans()


def reload() -> None:
    """Has the user's file read again, and plans made anew."""
    in_force.cache_clear()
    forget_plans()


def _chosen(key: Key, on: Gpu, otherwise: Setting | None) -> Setting | None:
    """What a trial, or else the user's file, has for the key."""
    if _trial is not None:
        _trial.used.add(key)
        return _trial.settings.get(key, otherwise)
    return in_force().get(on.name, {}).get(key, otherwise)


def shipped(key: TileKey, on: Gpu) -> TileSetting:
    found = SHIPPED.get(on.capability, _hopper)(key)
    while _shared_memory(key, found) > on.shared_memory and max(found.rows, found.columns) > LEAST:
        longer = "rows" if found.rows >= found.columns else "columns"
        found = found._replace(**{longer: getattr(found, longer) // 2})
    return found


def shipped_lanes(key: LaneKey, width_qk: int, on: Gpu) -> LaneSetting | None:
    """None where whole lanes are not computed as such. `width_qk` is d_qk's, `key.width` the larger one."""
    backward = key.kernel == "lane_backward"
    most = LANE if key.width <= 64 or (not backward and width_qk <= 64) else LANE // 2
    if on.shared_memory < LANE_MEMORY or key.lane > most or key.dtype == torch.float32 or key.width > 128:
        return None
    stages = (3 if key.width <= 32 else 2) if backward else (4 if key.width <= 32 else 3)
    if key.width > 64 and key.later and key.lane > LANE // 4:
        stages -= 1
    warps = 8 if key.lane == LANE or (key.lane == LANE // 2 and key.width > 64) else 4
    per_processor = {LANE: 1, LANE // 2: 2}.get(key.lane, 2 if backward else 3)
    return LaneSetting(warps, stages, per_processor)


def _shared_memory(key: TileKey, tile: TileSetting) -> int:
    """Bytes that a kernel takes at most, before Hopper: what Triton reports when it compiles the shipped tiles for 8.9.

    A tile that stays is held once (forward: queries; dq: queries and slopes; dkv: keys and values), two that are passed
    over as often as they are loaded ahead, and the weights go from one product to the next.
    """
    stays, passes = (tile.columns, tile.rows) if key.kernel == "dkv" else (tile.rows, tile.columns)
    held = stays * (1 if key.kernel == "forward" else 2) + passes * 2 * max(1, tile.stages - 1)
    return (held * key.width + tile.rows * tile.columns) * key.dtype.itemsize


def _hopper(key: TileKey) -> TileSetting:
    if key.dtype == torch.float32:  # No matrix units: small tiles, or the sums do not fit into registers.
        return TileSetting(32, 32, 4, 1) if key.width <= 64 else TileSetting(16, 16, 4, 1)
    if key.width > 64:
        return TileSetting(64, 64, 4, 2) if key.width <= 128 else TileSetting(64, 32, 8, 2)
    return HOPPER_UP_TO_64[key.kernel, key.summary]


HOPPER_UP_TO_64 = {
    ("forward", False): TileSetting(64, 64, 4, 2),
    ("forward", True): TileSetting(128, 64, 4, 3),
    ("dq", False): TileSetting(64, 64, 4, 1),
    ("dq", True): TileSetting(64, 64, 4, 3),
    ("dkv", False): TileSetting(32, 64, 4, 1),
    ("dkv", True): TileSetting(128, 64, 4, 2),
}
SHIPPED = {(9, 0): _hopper}
"""What was measured, by compute capability. Where nothing was, the measured ones are where to begin."""
