"""What a position is, as text: the dimensions in which it has an index, each with an embedding of its own (section 5.3).

matrix(128)         d_attn = 2: row and column in a matrix as wide as the stride; for text and audio
image(32, 32, 3)    d_data = 3: row, column and channel of each byte of an image
"""

import ast
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longstride.checks import whole_number


class Positions(NamedTuple):
    """Sizes of the dimensions, the last of which runs fastest."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]

    def indices(self, position: Tensor) -> tuple[Tensor, ...]:
        """The index in each dimension."""
        return torch.unravel_index(position, self.sizes)


@lru_cache(maxsize=256)
def positions(text: str, context: int) -> Positions:
    name, sizes = _read(text)
    if name == "matrix" and len(sizes) == 1:
        width = whole_number(f"embedding {text!r}", "the width", sizes[0], 1)
        return Positions(("row", "column"), (-(-context // width), width))
    if name == "image" and len(sizes) == 3:
        names = ("row", "column", "channel")
        for what, size in zip(("height", "width", "channels"), sizes):
            whole_number(f"embedding {text!r}", what, size, 1)
        count = sizes[0] * sizes[1] * sizes[2]
        if count != context:
            raise ValueError(
                f"embedding {text!r} has {count:,} bytes and context is {context:,}; "
                "context must be height * width * channels"
            )
        return Positions(names, tuple(sizes))
    raise ValueError(f"embedding {text!r} must be matrix(width) or image(height, width, channels)")


def _read(text: str) -> tuple[str, list[Any]]:
    """The name and the arguments of a call."""
    try:
        node = ast.parse(text.strip(), mode="eval").body
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
            return node.func.id.lower(), [ast.literal_eval(argument) for argument in node.args]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        pass
    raise ValueError(f"embedding {text!r} does not read as one; write matrix(128) or image(32, 32, 3)")
