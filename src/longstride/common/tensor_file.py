"""Safetensors files: a writer that writes each tensor straight from its memory, and a check of what was read.

The writer of the safetensors package first copies all tensors into one bytes object and holds the GIL meanwhile: 2 s for
640 MB, in which training launches nothing.
"""

import json
from math import isfinite
from pathlib import Path

import torch
from torch import Tensor

from longstride.common.checks import short_repr

NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
ALIGNED = 8
"""The tensors start at a multiple of this many bytes."""


def save_file(tensors: dict[str, Tensor], path: str | Path, metadata: dict[str, str] | None = None) -> None:
    """Writes CPU tensors as a file that the safetensors package reads."""
    header: dict[str, object] = {} if metadata is None else {"__metadata__": metadata}
    end = 0
    # The widest dtypes first, as in the safetensors package: so each tensor is aligned to its element size.
    ordered = sorted(tensors.items(), key=lambda pair: (-pair[1].element_size(), pair[0]))
    for name, x in ordered:
        begin, end = end, end + x.numel() * x.element_size()
        header[name] = {"dtype": NAMES[x.dtype], "shape": list(x.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % ALIGNED)
    with Path(path).open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, x in ordered:
            if x.numel():
                file.write(x.detach().contiguous().flatten().view(torch.uint8).numpy().data)


def check_finite(path: str | Path, name: str, x: Tensor) -> None:
    """Raises ValueError if the tensor `name` of that file has NaN or infinity. One pass, without a copy."""
    if not x.numel():
        return
    for extreme in x.aminmax():  # NaN if any value is.
        if not isfinite(extreme):
            raise ValueError(
                f"{path}: {short_repr(name)} has a value of {float(extreme)}; all must be finite, as they are saved"
            )
