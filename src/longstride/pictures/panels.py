"""One head's weights, as colours and in words.

A panel is laid out as the image, or as a matrix as wide as the stride. As in the paper's figure 2, white is where a head
looks and black is what is not generated yet. A weight is drawn at the slot that it goes to, which has read the byte before
it.
"""

import unicodedata
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.colors import to_rgb

from longstride.data.plan import Bytes
from longstride.pictures.scene import Scene

Weights = npt.NDArray[np.float32]
UNSEEN, SEEN, MARK = "#1d2a36", "#41576b", "#00cfff"
DARKEST, DIM = 0.13, 0.4
"""How bright the image is behind the weights; never as black as what is not there yet."""
GREYED = 0.86
FINEST = 192
"""Rows and columns of a matrix that a panel can show; more are joined, each cell with the largest of its weights."""

Colours = npt.NDArray[np.float64]


def strength(weights: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """Brightness: what a weight is of the largest one. A root of it would make flat heads look like sharp ones."""
    largest = max(float(weights.max(initial=0)), float(np.finfo(np.float32).tiny))
    shown: npt.NDArray[np.float64] = weights / largest
    return shown


def image_panel(weights: Weights, tokens: Bytes, item: tuple[int, ...]) -> Colours:
    """The image so far, dark, with the weights of each pixel's channels together in white above it."""
    share = strength(by_pixel(weights, item))[..., None]
    known = (np.arange(len(tokens)) < len(weights) - 1).reshape(item).any(-1, keepdims=True)
    behind = (DARKEST + DIM * pixels(tokens, item, len(weights) - 1, 0)) * known
    return behind * (1 - share) + share


def by_pixel(weights: Weights, item: tuple[int, ...]) -> npt.NDArray[np.float64]:
    """[height, width]: the weights of each pixel's channels together."""
    padded = np.zeros(item)
    padded.reshape(-1)[: len(weights)] = weights
    together: npt.NDArray[np.float64] = padded.sum(-1)
    return together


def pixels(tokens: Bytes, item: tuple[int, ...], known: int, rest: float) -> Colours:
    """The image as RGB from 0 to 1, with `rest` for bytes from `known` on."""
    bytes_shown = tokens / 255
    bytes_shown[known:] = rest
    image: Colours = bytes_shown.reshape(item)
    return image[..., :3] if item[2] >= 3 else image[..., :1].repeat(3, axis=-1)


def matrix_panel(weights: Weights, seen: npt.NDArray[np.bool_], context: int, columns: int) -> Colours:
    """Rows as wide as the stride, from the first position on; what the pattern lets the head see is lighter."""
    rows = -(-context // columns)
    level = np.full(rows * columns, -1, np.int8)  # -1: not there yet, 0: hidden from the head, 1: seen
    level[: len(seen)] = seen
    share = np.zeros(rows * columns)
    share[: len(weights)] = strength(weights)
    base = np.array([to_rgb(UNSEEN), to_rgb(SEEN), (0, 0, 0)])[_joined(level.reshape(rows, columns))]  # -1 is the last
    white = _joined(share.reshape(rows, columns))[..., None]
    panel: Colours = base * (1 - white) + white
    return panel


def _joined(matrix: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Cells put together until they can be shown, by the largest, so that thin lines do not vanish."""
    down, across = (-(-size // FINEST) for size in matrix.shape)
    padding = [(0, -size % step) for size, step in zip(matrix.shape, (down, across))]
    padded = np.pad(matrix, padding, constant_values=-1)
    joined: npt.NDArray[Any] = padded.reshape(padded.shape[0] // down, down, -1, across).max(axis=(1, 3))
    return joined


LINES = 3
LONGEST = 36
"""Letters of a line."""


@cache
def _font_characters() -> frozenset[int]:
    from matplotlib.font_manager import findfont, get_font

    return frozenset(get_font(findfont("monospace")).get_charmap())


def has_glyph(one: str) -> bool:
    """Whether the font has it, as wide as the others, and left to right."""
    return (
        one.isprintable()
        and ord(one) in _font_characters()
        and not unicodedata.combining(one)
        and unicodedata.east_asian_width(one) not in "WF"
        and unicodedata.bidirectional(one) not in ("R", "AL", "AN")
    )


def lines(scene: Scene, weights: Weights) -> list[str]:
    """The largest weights of a head. A slot stands for the byte before it, which it has read; the first has read none."""
    position = len(weights) - 1
    largest = [int(slot) for slot in (-weights).argsort(kind="stable")[:LINES] if weights[slot] > 0]
    return [f"{share(weights[slot]):>4} {_where(scene, slot, position)}" for slot in largest]


def share(weight: float) -> str:
    """As a percentage, with a digit more where it is small."""
    return f"{weight:.0%}" if weight >= 0.095 else f"{weight:.1%}"


def _where(scene: Scene, slot: int, position: int) -> str:
    if slot == 0:
        return f"{'the start':>10}"
    return scene.kind.describe_place(scene.tokens, slot - 1, position, has_glyph)
