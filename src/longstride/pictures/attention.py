"""The paper's figure 2: attention weights for the prediction of one byte, a panel for each layer and head."""

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from longstride.common.atomic import check_output
from longstride.common.checks import whole_number
from longstride.common.device import choose_device
from longstride.common.figures import EDGE, GAP, MONO, QUIET, add_axes, add_text, new_figure, picture_path, write_figure
from longstride.model.inspection import Inspection, check_indices, evenly_spaced, inspect_attention
from longstride.patterns import Pattern
from longstride.pictures.attention_example import OWNER, Example, open_example
from longstride.pictures.attention_panels import LINE_LENGTH, LINES, Weights, largest_weights

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DEFAULT_COUNT = 8
"""Layers and heads that are drawn by default, at most."""
MOST_PANELS = 256
"""The most panels of a picture."""
MIN_WIDTH = 7.5
MAXIMUM_LABEL = 14
"""Characters of a caption after the pattern: the largest weight."""
LABEL, CAPTION, LINE = 0.75, 0.2, 0.125
"""Inches, as all sizes here: left of a row of panels, above each panel, and of a line of text below it."""
IMAGE_LEGEND = (
    "White: large attention weights, summed over channels. Black: not generated yet. Cyan: the pixel that is predicted."
)
LEGEND_SIZE, LETTER = 7, 0.052
"""Of the legend: font size, and inches that a letter takes on average."""


def plot_attention(
    folder: str | Path,
    positions: Sequence[int] = (),
    layers: Sequence[int] = (),
    heads: Sequence[int] = (),
    data: str | Path | None = None,
    split: str = "valid",
    item: int = 0,
    out: str | Path = "attention.png",
    force: bool = False,
) -> list[Path]:
    """Draws the attention weights of a run or a saved model. Each of several positions gets a picture with it in its name.

    `force`: replace existing files.
    """
    out = picture_path(OWNER, out)
    new_figure(OWNER, 1, 1)  # Fails early if matplotlib is missing.
    device = choose_device(OWNER, "auto")
    example = open_example(Path(folder), None if data is None else Path(data), split, item, device)
    positions = [_check_position(example, position) for position in positions or [example.default_position]]
    layers = _select_indices("layers", layers, example.model.config.layers)
    heads = _select_indices("heads", heads, example.model.config.heads)
    if len(layers) * len(heads) > MOST_PANELS:
        raise ValueError(
            f"{OWNER}: {len(layers)} layers of {len(heads)} heads are {len(layers) * len(heads)} panels; "
            f"name at most {MOST_PANELS} by --layers and --heads"
        )
    paths = [out] if len(positions) == 1 else [out.with_stem(f"{out.stem}-{position}") for position in positions]
    for path in paths:
        check_output(OWNER, "out", path, may_replace=force)
    tokens = torch.from_numpy(example.tokens).to(device)
    for position, path in zip(positions, paths):
        inspection = inspect_attention(example.model, tokens, position, layers, heads)
        write_figure(draw(example, position, inspection, layers, heads), path)
    return paths


def draw(example: Example, position: int, inspection: Inspection, layers: Sequence[int], heads: Sequence[int]) -> "Figure":
    """Returns a figure with a row of panels for each layer and a column for each head."""
    from longstride.pictures.attention_header import draw_header, header_height

    wide, tall, below = _panel_size(example, len(heads))
    width = max(MIN_WIDTH, LABEL + len(heads) * (wide + GAP) + 2 * EDGE)
    step = CAPTION + tall + below + GAP
    top = header_height(example, position, width) + 0.4
    bottom = top + len(layers) * step
    panels = []
    figure = new_figure(OWNER, width, bottom + 0.5)
    draw_header(figure, example, position, inspection)
    patterns = {(layer, head): example.model.config.patterns(layer)[head] for layer in layers for head in heads}
    # One font size for all captions: the one at which the longest fits.
    longest = max(len(pattern.text) for pattern in patterns.values()) + (MAXIMUM_LABEL if example.item else 0)
    size = min(7.0, wide * 72 / (MONO * longest))
    for column, head in enumerate(heads):
        left = EDGE + LABEL + column * (wide + GAP)
        add_text(figure, left + wide / 2, top - 0.06, f"head {head}", 9, ha="center", weight="bold")
    for row, layer in enumerate(layers):
        down = top + row * step + CAPTION
        add_text(figure, EDGE, down + tall / 2, f"layer {layer}", 9, weight="bold")
        for column, head in enumerate(heads):
            box = (EDGE + LABEL + column * (wide + GAP), down, wide, tall)
            weights = inspection.weights[row, column].float().cpu().numpy()
            panels.append((weights, patterns[layer, head]))
            _draw_panel(figure, box, example, *panels[-1], size)
    shown = "".join(text.get_text() for text in figure.texts)
    legend = textwrap.wrap(_legend(example, panels, shown), int((width - 2 * EDGE) / LETTER))
    add_text(figure, EDGE, bottom + 0.15, "\n".join(legend), LEGEND_SIZE, QUIET, va="top")
    return figure


def _legend(example: Example, panels: Sequence[tuple[Weights, Pattern]], shown: str) -> str:
    """Explains the colours of the panels and the signs in the text, as far as the figure has them."""
    from longstride.pictures.attention_panels import MATRIX_LEGEND, matrix_legend

    if example.item:
        return IMAGE_LEGEND
    notes = {
        note
        for weights, pattern in panels
        for note in matrix_legend(weights, _seen(weights, pattern), len(example.tokens), example.columns)
    }
    colours = [note for note in MATRIX_LEGEND if note in notes]
    signs = [f"{sign}: {meaning}." for sign, meaning in example.kind.signs if sign in shown]
    first = "One row per stride, position 0 at the top left. White: large attention weights."
    return " ".join([first, *colours, "Cyan: the position that predicts.", *signs])


def _seen(weights: Weights, pattern: Pattern) -> NDArray[np.bool_]:
    """Whether the last position sees each key."""
    return np.asarray(pattern.sees(len(weights) - 1, np.arange(len(weights))))


def _panel_size(example: Example, heads: int) -> tuple[float, float, float]:
    """Returns the width and height of a panel, and the height of the text below it."""
    if example.item:
        wide = 2.1 if heads <= 4 else 1.5
        return wide, wide * example.item[0] / example.item[1], 0.0
    wide = min(2.7, max(1.9, 11 / heads))
    return wide, wide * min(1.0, max(0.35, example.rows / example.columns)), LINES * LINE + 0.04


def _draw_panel(
    figure: "Figure", box: tuple[float, float, float, float], example: Example, weights: Weights, pattern: Pattern,
    size: float,
) -> None:  # fmt: skip
    from longstride.pictures.attention_header import mark_pixel
    from longstride.pictures.attention_panels import MARK, image_panel, matrix_panel, pixel_weights

    left, down, wide, tall = box
    position = len(weights) - 1
    seen = _seen(weights, pattern)
    axes = add_axes(figure, *box)
    caption = pattern.text if seen.any() else f"{pattern.text}   sees no key yet"
    if example.item:
        axes.imshow(image_panel(weights, example.tokens, example.item), interpolation="nearest")
        mark_pixel(axes, example, position)
        caption += f"   max {pixel_weights(weights, example.item).max():.1%}" if seen.any() else ""
    else:
        colours = matrix_panel(weights, seen, len(example.tokens), example.columns)
        axes.imshow(colours, interpolation="nearest", aspect="auto", extent=(0, example.columns, example.rows, 0))
        row, column = divmod(position, example.columns)
        axes.plot(
            column + 0.5, row + 0.5, marker="s", markersize=5, markerfacecolor="none", markeredgecolor=MARK, clip_on=False
        )  # fmt: skip
        for number, line in enumerate(largest_weights(example, weights), 1):
            small = min(6.5, wide * 72 / (MONO * LINE_LENGTH))
            add_text(figure, left, down + tall + number * LINE, line, small, family="monospace")
    add_text(figure, left, down - 0.04, caption, size, QUIET, within=wide)


def _select_indices(name: str, given: Sequence[int], count: int) -> list[int]:
    try:
        return check_indices(name, given, count) if given else evenly_spaced(count, DEFAULT_COUNT)
    except ValueError as error:
        raise ValueError(f"{OWNER}: {str(error).removeprefix('inspect_attention: ')}") from None


def _check_position(example: Example, position: int) -> int:
    position = whole_number(OWNER, "position", position, 0)
    if position >= len(example.tokens):
        raise ValueError(f"{OWNER}: position must be 0 to {len(example.tokens) - 1:,}, got {position:,}")
    return position
