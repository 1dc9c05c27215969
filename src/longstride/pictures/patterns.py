"""The paper's figure 3 for any patterns and image size.

It needs matplotlib (`pip install 'longstride[plot]'`).
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from longstride.common.atomic import atomic_path, check_output
from longstride.patterns import Pattern

FORMATS = (".png", ".svg")
# The first two are the paper's. Where several heads see a key, their colours are averaged.
HEADS = ("#2f6fb7", "#a9cbe8", "#e3a857", "#7fb58a", "#b48ead", "#d08770")
QUERY = "#0b2545"
UNSEEN = "#ffffff"
FUTURE = "#ececec"
LARGEST = 16_384
MOST_SCHEMES = 12
LEGEND_BELOW = 3.5
"""Lines between a matrix and its legend, for the axis."""
SQUARES = 400
"""The most squares of a connectivity matrix along a side: its panel has about 470 pixels."""

Image = npt.NDArray[np.float64]


class Scheme(NamedTuple):
    """One column of the figure: a name, and one pattern per head."""

    name: str
    heads: Sequence[Pattern]


def plot_patterns(
    schemes: Sequence[Scheme],
    path: str | Path,
    height: int = 6,
    width: int = 6,
    row: int | None = None,
    column: int | None = None,
    force: bool = False,
) -> None:
    """Draws, for each scheme, what one pixel of an image sees through its heads, and the connectivity matrix below.

    `force`: replace an existing file.
    """
    path = Path(path)
    row = height * 2 // 3 if row is None else row
    column = width // 2 if column is None else column
    _check(schemes, path, height, width, row, column)
    check_output("plot patterns", "out", path, may_replace=force)
    figure = Figure(figsize=(3.6 * len(schemes), 7.6), layout="constrained")
    axes = figure.subplots(2, len(schemes), squeeze=False)
    for (image, matrix), scheme in zip(axes.T, schemes):
        several = _draw_image(image, scheme.heads, height, width, row * width + column)
        several |= _draw_matrix(matrix, scheme.heads, height * width)
        image.set_title(scheme.name, fontsize=12)
        matrix.legend(
            handles=_legend(scheme.heads, several),
            loc="upper center", bbox_to_anchor=(0.5, 0), borderaxespad=LEGEND_BELOW, frameon=False, fontsize=9,
        )  # fmt: skip
    axes[0, 0].set_ylabel(f"what pixel ({row}, {column}) sees", fontsize=10)
    axes[1, 0].set_ylabel("query", fontsize=10)
    with atomic_path(path) as temporary:
        figure.savefig(temporary, dpi=160)


def _check(schemes: Sequence[Scheme], path: Path, height: int, width: int, row: int, column: int) -> None:
    if path.suffix.lower() not in FORMATS:
        raise ValueError(f"plot patterns: out = {str(path)!r} must end in {' or '.join(FORMATS)}")
    if not schemes:
        raise ValueError("plot patterns: no patterns were given; name at least one, such as 'strided(6)'")
    if len(schemes) > MOST_SCHEMES:
        raise ValueError(f"plot patterns: {len(schemes)} columns are too many for a figure; draw at most {MOST_SCHEMES}")
    for name, size in (("height", height), ("width", width)):
        if size < 1:
            raise ValueError(f"plot patterns: {name} must be at least 1, got {size}")
    if height * width > LARGEST:
        raise ValueError(
            f"plot patterns: height * width = {height} * {width} = {height * width} is too much for a connectivity matrix; "
            f"it can be {LARGEST} at most"
        )
    for name, at, size in (("row", row, height), ("column", column, width)):
        if not 0 <= at < size:
            raise ValueError(f"plot patterns: {name} must be 0 to {size - 1}, got {at}")
    for scheme in schemes:
        if len(scheme.heads) > len(HEADS):
            raise ValueError(
                f"plot patterns: {' '.join(scheme.name.split())!r} has {len(scheme.heads)} heads, and there are colours for "
                f"{len(HEADS)}; give fewer --heads, or fewer patterns in a text"
            )


def _legend(heads: Sequence[Pattern], several: bool) -> list[Patch]:
    """Returns an entry for each head, and one for keys that several heads see, if there are any."""
    entries = [Patch(facecolor=colour, label=repr(head)) for head, colour in zip(heads, HEADS)]
    if several:
        mean = np.mean([to_rgb(colour) for colour in HEADS[: len(heads)]], axis=0)
        label = "both heads" if len(heads) == 2 else "several heads: their colours mixed"
        entries.append(Patch(facecolor=tuple(mean), label=label))
    return entries


def _draw_image(axes: Axes, heads: Sequence[Pattern], height: int, width: int, query: int) -> bool:
    """Draws the keys of a query. Returns whether several heads see one of them."""
    n = height * width
    seen = [np.array([pattern.sees(query, key) for key in range(n)]) for pattern in heads]
    colours = _mix(seen, future=np.arange(n) > query)
    axes.imshow(colours.reshape(height, width, 3), interpolation="nearest")
    axes.add_patch(Rectangle((query % width - 0.5, query // width - 0.5), 1, 1, facecolor=QUERY))
    axes.set_xticks([])  # Minor ticks at the place of another would be left out.
    axes.set_yticks([])
    if n <= 1024:
        axes.set_xticks(np.arange(width + 1) - 0.5, minor=True)
        axes.set_yticks(np.arange(height + 1) - 0.5, minor=True)
        axes.grid(which="minor", color="#9aa5b1", linewidth=0.8 if n <= 100 else 0.3)
    axes.tick_params(which="both", length=0, labelleft=False, labelbottom=False)
    return _overlap([np.delete(row, query) for row in seen])  # The query's own key is drawn in another colour.


def _draw_matrix(axes: Axes, heads: Sequence[Pattern], n: int) -> bool:
    """Draws all pairs. Returns whether several heads see one of them."""
    # A square stands for some (query, key) pairs and is coloured if any of them is seen: thin lines do not vanish.
    size = -(-n // SQUARES)
    seen = [_any_in_squares(pattern, n, size) for pattern in heads]
    at = np.arange(len(seen[0]))
    axes.imshow(_mix(seen, future=at[None, :] > at[:, None]), interpolation="nearest", extent=(0, n, n, 0))
    axes.set_xlabel("key", fontsize=10)
    axes.set_xticks([0, n])
    axes.set_yticks([0, n])
    axes.tick_params(labelsize=8)
    return _overlap(seen)


def _overlap(seen: Sequence[npt.NDArray[np.bool_]]) -> bool:
    return bool((np.sum(seen, axis=0) > 1).any())


def _any_in_squares(pattern: Pattern, n: int, size: int) -> npt.NDArray[np.bool_]:
    """Returns the pattern's mask with each size x size square reduced to one entry, one band of queries at a time."""
    count = -(-n // size)
    key = np.arange(count * size)
    bands = []
    for first in range(0, count * size, size):
        query = np.arange(first, first + size)[:, None]
        seen = pattern.sees(query, key) & (query < n)
        bands.append(seen.reshape(size, count, size).any(axis=(0, 2)))
    return np.stack(bands)


def _mix(seen: Sequence[npt.NDArray[np.bool_]], future: npt.NDArray[np.bool_]) -> Image:
    """Returns, for each key, the mean colour of the heads that see it."""
    masks = np.stack(seen)
    total = np.einsum("h...,hc->...c", masks, [to_rgb(colour) for colour in HEADS[: len(seen)]])
    count = masks.sum(axis=0)[..., None]
    plain = np.where(future[..., None], to_rgb(FUTURE), to_rgb(UNSEEN))
    mixed: Image = np.where(count > 0, total / np.maximum(count, 1), plain)
    return mixed
