"""What a kernel's settings are for, and what they set: the words of `settings.py` and of a user's file."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


class TileKey(NamedTuple):
    """A kernel that passes over tiles: forward, dq, or dkv."""

    kernel: str
    summary: bool
    """Whether it has summary cells; for dkv, whether the keys are those."""
    width: int
    """The larger of the head dimensions, as the power of two that it is padded to."""
    dtype: torch.dtype


class TileSetting(NamedTuple):
    rows: int
    """Queries of a tile."""
    columns: int
    """Keys of a tile."""
    warps: int
    stages: int


class LaneKey(NamedTuple):
    """A kernel for lanes that fit into a tile whole: lane_forward or lane_backward."""

    kernel: str
    lane: int
    """Rows of the tile."""
    later: bool
    """Whether it goes on from an earlier pass, whose results it then also holds."""
    width: int
    dtype: torch.dtype


class LaneSetting(NamedTuple):
    warps: int
    stages: int
    per_processor: int
    """Programs that a multiprocessor holds at a time."""


Key = TileKey | LaneKey
Setting = TileSetting | LaneSetting
KERNELS: dict[str, tuple[type[Key], type[Setting]]] = {
    "forward": (TileKey, TileSetting),
    "dq": (TileKey, TileSetting),
    "dkv": (TileKey, TileSetting),
    "lane_forward": (LaneKey, LaneSetting),
    "lane_backward": (LaneKey, LaneSetting),
}
TRUTH: tuple[Any, ...] = (False, True)
ALLOWED: dict[type[Key], dict[str, tuple[Any, ...]]] = {
    TileKey: {
        "summary": TRUTH,
        "width": (16, 32, 64, 128, 256),
        "dtype": tuple(DTYPES),
        "rows": (16, 32, 64, 128, 256),
        "columns": (16, 32, 64, 128, 256),
        "warps": (1, 2, 4, 8, 16),
        "stages": (1, 2, 3, 4, 5, 6),
    },
    # In float32, and in wider heads, whole lanes do not fit into a multiprocessor.
    LaneKey: {
        "lane": (32, 64, 128),
        "later": TRUTH,
        "width": (16, 32, 64, 128),
        "dtype": ("bfloat16", "float16"),
        "warps": (1, 2, 4, 8, 16),
        "stages": (1, 2, 3, 4, 5, 6),
        "per_processor": tuple(range(1, 17)),
    },
}
"""The values that a field can have."""


def as_row(key: Key, setting: Setting) -> dict[str, Any]:
    """Key and setting as a row of a file."""
    row = {**key._asdict(), **setting._asdict()}
    return {name: str(value).removeprefix("torch.") if name == "dtype" else value for name, value in row.items()}


def from_row(row: Mapping[str, Any]) -> tuple[Key, Setting]:
    """The same backwards; what is wrong with a row is an error that begins with the field's name."""
    kernel = row.get("kernel")
    if not isinstance(kernel, str) or kernel not in KERNELS:
        raise ValueError(f"kernel = {kernel!r} must be one of {', '.join(KERNELS)}")
    key_type, setting_type = KERNELS[kernel]
    allowed = ALLOWED[key_type]
    for name in row.keys() - allowed.keys() - {"kernel"}:
        raise ValueError(f"{name} is no field of {kernel}, which has {', '.join(allowed)}")
    for name, choices in allowed.items():
        if name not in row:
            raise ValueError(f"{name} is missing; it must be one of {', '.join(map(_as_json, choices))}")
        # As 1 == True in Python, the type is compared too.
        if not any(type(row[name]) is type(choice) and row[name] == choice for choice in choices):
            raise ValueError(f"{name} = {_as_json(row[name])} must be one of {', '.join(map(_as_json, choices))}")
    plain = {**row, "dtype": DTYPES[row["dtype"]]}
    return (
        key_type(**{name: plain[name] for name in key_type._fields}),
        setting_type(**{name: plain[name] for name in setting_type._fields}),
    )


def _as_json(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value)
