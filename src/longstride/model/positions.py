"""Text notation for position embeddings: the dimensions of a position, each with its own embedding (section 5.3).

matrix(128)         d_attn = 2: row and column in a matrix as wide as the stride; for text and audio
image(32, 32, 3)    d_data = 3: row, column and channel of each byte of an image
rotary              none of these: queries and keys are rotated by their position (`model.rotary`); for text and audio
"""

import ast
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from longstride.common.checks import short_repr, whole_number
from longstride.common.limits import check_limit
from longstride.patterns.notation import read_syntax

if TYPE_CHECKING:
    from torch import Tensor


ROTARY = "rotary"


class Positions(NamedTuple):
    """Names and sizes of the dimensions; the last varies fastest. Rotary positions have none."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]

    def indices(self, position: "Tensor") -> "tuple[Tensor, ...]":
        """Returns the index in each dimension, as torch.unravel_index, which a CUDA graph cannot capture."""
        indices = []
        for size in reversed(self.sizes):
            indices.append(position % size)
            position = position // size
        return tuple(reversed(indices))


@lru_cache(maxsize=256)
def positions(text: str, context: int) -> Positions:
    """Parses `text`, such as 'matrix(128)', for a model of this context."""
    check_limit("embedding", "the length of the text", len(text), "text")
    if text.strip().lower() == ROTARY:
        return Positions((), ())
    name, sizes = _read(text)
    owner = f"embedding {short_repr(text)}"
    if name == "matrix" and len(sizes) == 1:
        width = whole_number(owner, "the width", sizes[0], 1, limit="positions")
        return Positions(("row", "column"), (-(-context // width), width))
    if name == "image" and len(sizes) == 3:
        names = ("row", "column", "channel")
        for what, size in zip(("height", "width", "channels"), sizes):
            whole_number(owner, what, size, 1, limit="positions")
        count = sizes[0] * sizes[1] * sizes[2]
        if count != context:
            raise ValueError(
                f"{owner} has {count:,} bytes and context is {context:,}; context must be height * width * channels"
            )
        return Positions(names, tuple(sizes))
    raise ValueError(f"{owner} must be matrix(width), image(height, width, channels) or rotary")


def _read(text: str) -> tuple[str, list[Any]]:
    """Returns the name and the arguments of the call in `text`."""
    try:
        node = read_syntax(text.strip())
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
            return node.func.id.lower(), [ast.literal_eval(argument) for argument in node.args]
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        pass
    raise ValueError(f"embedding {short_repr(text)} does not read as one; write matrix(128), image(32, 32, 3) or rotary")
