"""Kernel settings as records, and the JSON file with a user's own, which `longstride bench tune` writes.

LONGSTRIDE_SETTINGS names the file (empty: none); left out, it is longstride/kernels.json in $XDG_CONFIG_HOME or ~/.config:

    {"NVIDIA H200": {"dq summary d64 bfloat16": {"rows": 64, "columns": 64, "warps": 4, "stages": 3, "per_processor": 0}}}
"""

import json
import os
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch

from longstride.common.atomic import atomic_path
from longstride.common.checks import short_repr
from longstride.common.files import read_json

VARIABLE = "LONGSTRIDE_SETTINGS"
SIDES = (16, 32, 64, 128, 256)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class Key(NamedTuple):
    """The kernel, and the facts that decide which setting it gets."""

    kernel: str
    width: int
    """The larger of the head dimensions, padded to a power of two."""
    dtype: torch.dtype
    summary: bool = False
    """forward, dq, dkv: whether the pass has summary cells; for dkv, whether its keys are those."""
    lane: int = 0
    """lane_forward, lane_backward: rows of a tile, which holds one or more whole lanes."""
    accumulate: bool = False
    """lane_forward, lane_backward: whether it accumulates onto the results of an earlier pass."""

    def __str__(self) -> str:
        facts = "summary " * self.summary + f"{self.lane} " * (self.lane > 0) + "accumulate " * self.accumulate
        return f"{self.kernel} {facts}d{self.width} {str(self.dtype).removeprefix('torch.')}"


class Setting(NamedTuple):
    rows: int
    """Queries of a tile. In a tile of whole lanes, rows and columns are the key's `lane`."""
    columns: int
    """Keys of a tile."""
    warps: int
    stages: int
    per_processor: int = 0
    """lane_forward, lane_backward: programs on a multiprocessor at a time. Other kernels have one program per tile."""


_TILES = product(("forward", "dq", "dkv"), SIDES, DTYPES, (False, True))
# Whole lanes of float32, or of wider heads, do not fit into shared memory.
_LANES = product(("lane_forward", "lane_backward"), SIDES[:-1], DTYPES[:2], (False,), (32, 64, 128), (False, True))
KEYS = {str(key): key for key in (Key(*facts) for facts in (*_TILES, *_LANES))}
"""All keys, by name."""
ByGpu = Mapping[str, Mapping[Key, Setting]]
"""Settings by the GPU's name."""


def choices(key: Key) -> dict[str, Sequence[int]]:
    """The allowed values of each field of the key's setting."""
    sides = (key.lane,) if key.lane else SIDES
    each = range(1, 17) if key.lane else range(1)
    return {"rows": sides, "columns": sides, "warps": (1, 2, 4, 8, 16), "stages": range(1, 7), "per_processor": each}


def place() -> Path | None:
    """The path of the file, whether it exists or not; None if the user wants none."""
    named = os.environ.get(VARIABLE)
    if named is not None:
        return Path(named).expanduser() if named else None
    # By the XDG specification, a relative path does not count.
    home = Path(os.environ.get("XDG_CONFIG_HOME", ""))
    return (home if home.is_absolute() else Path("~/.config").expanduser()) / "longstride" / "kernels.json"


@lru_cache(maxsize=1)
def in_force() -> ByGpu:
    """The settings in the file, read once per process; `settings.reload` reads it again."""
    path = place()
    return {} if path is None or (VARIABLE not in os.environ and not path.exists()) else read(path)


def read(path: Path) -> ByGpu:
    try:
        return {gpu: _settings(f"{path}: {short_repr(gpu)}", rows) for gpu, rows in read_json(path).items()}
    except (OSError, ValueError) as error:
        fix = f"correct the file or {VARIABLE}, or delete the file and run: longstride bench tune"
        raise ValueError(f"settings: {error}; {fix}") from None


def _settings(owner: str, rows: Any) -> dict[Key, Setting]:
    if not isinstance(rows, dict):
        raise ValueError(f"{owner} must be an object with settings by the kernel's name, got {short_repr(rows)}")
    for name, row in rows.items():
        if name not in KEYS:
            raise ValueError(f"{owner}: {short_repr(name)} is no name of a kernel such as 'dq summary d64 bfloat16'")
        if not isinstance(row, dict) or row.keys() != set(Setting._fields):
            raise ValueError(f"{owner}: {name} must be an object with {', '.join(Setting._fields)}, got {short_repr(row)}")
        for field, allowed in choices(KEYS[name]).items():
            if type(row[field]) is not int or row[field] not in allowed:
                values = ", ".join(map(str, allowed))
                raise ValueError(f"{owner}: {name}: {field} must be one of {values}, got {short_repr(row[field])}")
    return {KEYS[name]: Setting(**row) for name, row in rows.items()}


def write(path: Path, settings: ByGpu) -> None:
    rows = {gpu: {str(key): setting._asdict() for key, setting in by_key.items()} for gpu, by_key in settings.items()}
    with atomic_path(path) as temporary:
        temporary.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
