"""Attention weights of one head, as a panel of colours and as lines of text.

A panel has the shape of the image, or of a matrix whose rows are as long as the stride. As in the paper's figure 2, white
marks large weights and black marks bytes that are not generated yet. The weight of key j is drawn at position j; the input
there is byte j - 1.
"""

import unicodedata
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.colors import to_rgb

from longstride.data.plan import Bytes
from longstride.pictures.attention_example import Example

Weights = npt.NDArray[np.float32]
UNSEEN, SEEN, MARK = "#1d2a36", "#41576b", "#00cfff"
DARKEST, DIM = 0.13, 0.4
"""Brightness range of the image behind the weights; never as black as bytes that are not generated yet."""
MATRIX_LEGEND = ("Blue: visible to the head.", "Dark blue: hidden by its pattern.", "Black: not generated yet.")
BLUE = 0.35
"""A cell less white than this looks blue."""
UNKNOWN_GREY = 0.86
MOST_CELLS = 192
"""The most rows and columns of a panel. A larger matrix is downsampled; each cell shows the largest of its weights."""

Colours = npt.NDArray[np.float64]


def brightness(weights: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """Returns weights / the largest weight. Linear: a square root would make flat heads look like sharp ones."""
    largest = max(float(weights.max(initial=0)), float(np.finfo(np.float32).tiny))
    shown: npt.NDArray[np.float64] = weights / largest
    return shown


def image_panel(weights: Weights, tokens: Bytes, item: tuple[int, ...]) -> Colours:
    """Returns the image so far, darkened, with the weights on top in white, summed over each pixel's channels."""
    share = brightness(pixel_weights(weights, item))[..., None]
    known = (np.arange(len(tokens)) < len(weights) - 1).reshape(item).any(-1, keepdims=True)
    behind = (DARKEST + DIM * pixels(tokens, item, len(weights) - 1, 0)) * known
    return behind * (1 - share) + share


def pixel_weights(weights: Weights, item: tuple[int, ...]) -> npt.NDArray[np.float64]:
    """Returns the weights summed over each pixel's channels, [height, width]."""
    padded = np.zeros(item)
    padded.reshape(-1)[: len(weights)] = weights
    together: npt.NDArray[np.float64] = padded.sum(-1)
    return together


def pixels(tokens: Bytes, item: tuple[int, ...], known: int, rest: float) -> Colours:
    """Returns the image as RGB from 0 to 1, with `rest` in place of the bytes from `known` on."""
    bytes_shown = tokens / 255
    bytes_shown[known:] = rest
    image: Colours = bytes_shown.reshape(item)
    return image[..., :3] if item[2] >= 3 else image[..., :1].repeat(3, axis=-1)


def matrix_panel(weights: Weights, seen: npt.NDArray[np.bool_], context: int, columns: int) -> Colours:
    """Returns positions as a matrix with `columns` per row; keys that the pattern lets the head see are lighter."""
    level, white = _matrix_cells(weights, seen, context, columns)
    base = np.array([to_rgb(UNSEEN), to_rgb(SEEN), (0, 0, 0)])[level]  # -1 is the last
    panel: Colours = base * (1 - white[..., None]) + white[..., None]
    return panel


def matrix_legend(weights: Weights, seen: npt.NDArray[np.bool_], context: int, columns: int) -> list[str]:
    """Returns explanations of the colours that the matrix panel shows, besides white."""
    level, white = _matrix_cells(weights, seen, context, columns)
    shown = ((level == 1) & (white < BLUE), level == 0, level == -1)
    return [text for text, cells in zip(MATRIX_LEGEND, shown) if cells.any()]


def _matrix_cells(
    weights: Weights, seen: npt.NDArray[np.bool_], context: int, columns: int
) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.float64]]:
    """Returns the cells of a matrix panel: -1 for not generated yet, 0 for hidden from the head, 1 for seen; and how white
    they are, from 0 to 1."""
    rows = -(-context // columns)
    level = np.full(rows * columns, -1, np.int8)
    level[: len(seen)] = seen
    share = np.zeros(rows * columns)
    share[: len(weights)] = brightness(weights)
    return _downsampled(level.reshape(rows, columns)), _downsampled(share.reshape(rows, columns))


def _downsampled(matrix: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Returns at most MOST_CELLS rows and columns, each cell the maximum of its entries: thin lines do not vanish."""
    down, across = (-(-size // MOST_CELLS) for size in matrix.shape)
    padding = [(0, -size % step) for size, step in zip(matrix.shape, (down, across))]
    padded = np.pad(matrix, padding, constant_values=-1)
    joined: npt.NDArray[Any] = padded.reshape(padded.shape[0] // down, down, -1, across).max(axis=(1, 3))
    return joined


LINES = 3
LINE_LENGTH = 36
"""The most characters of a line of text."""


@cache
def _font_code_points() -> frozenset[int]:
    from matplotlib.font_manager import findfont, get_font

    return frozenset(get_font(findfont("monospace")).get_charmap())


def has_glyph(letter: str) -> bool:
    """Whether the monospaced font has the letter, at the usual width and written left to right."""
    return (
        letter.isprintable()
        and ord(letter) in _font_code_points()
        and not unicodedata.combining(letter)
        and unicodedata.east_asian_width(letter) not in "WF"
        and unicodedata.bidirectional(letter) not in ("R", "AL", "AN")
    )


def largest_weights(example: Example, weights: Weights) -> list[str]:
    """Returns lines for the largest weights of a head. Key j is described by byte j - 1, its input; key 0 by the start."""
    position = len(weights) - 1
    largest = [int(key) for key in (-weights).argsort(kind="stable")[:LINES] if weights[key] > 0]
    return [f"{percent(weights[key]):>4} {_key_text(example, key, position)}" for key in largest]


def percent(weight: float) -> str:
    """Formats a fraction as a percentage, with one decimal below 10 %."""
    return f"{weight:.0%}" if weight >= 0.095 else f"{weight:.1%}"


def _key_text(example: Example, key: int, position: int) -> str:
    if key == 0:
        return f"{'the start':>10}"
    return example.kind.describe_place(example.tokens, key - 1, position, has_glyph)
