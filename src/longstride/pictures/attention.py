"""The paper's figure 2: a panel for each layer and head with what it looks at while one byte is predicted."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from longstride.common.atomic import check_output
from longstride.common.checks import whole_number
from longstride.common.device import choose_device
from longstride.common.figures import EDGE, GAP, MONO, QUIET, add_axes, add_text, new_figure, picture_path, write_figure
from longstride.model.inspection import Look, chosen, look
from longstride.patterns import Pattern
from longstride.pictures.panels import LINES, LONGEST, Weights, lines
from longstride.pictures.scene import OWNER, Scene, open_scene

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FEW = 8
"""Layers and heads that are drawn, if nobody says which."""
MOST = 256
"""Panels of a picture."""
NARROWEST = 7.5
MEASURED = 14
"""Letters that follow a pattern in a caption: the largest weight."""
LABEL, CAPTION, LINE = 0.75, 0.2, 0.125
"""Inches, as all sizes here: beside a row of panels, above each, and for a line of text below."""
IN_IMAGES = "White: where the head looks, channels together. Black: not generated yet. Cyan: the pixel that is predicted."
IN_MATRICES = (
    "Rows as wide as the stride, the first position at the top left. White: where the head looks. Blue: what its pattern\n"
    "lets it see; dark blue: what not. Black: not there yet. Cyan: the slot that predicts."
)


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
    """Draws what a run's or a model's heads look at. Several positions get a picture each, with the position in its name.

    `force`: files that are there may be replaced.
    """
    out = picture_path(OWNER, out)
    new_figure(OWNER, 1, 1)  # Without matplotlib it ends here, and not after the work.
    device = choose_device(OWNER, "auto")
    scene = open_scene(Path(folder), None if data is None else Path(data), split, item, device)
    positions = [_position(scene, position) for position in positions or [scene.default_position]]
    layers = _chosen("layers", layers, scene.model.config.layers)
    heads = _chosen("heads", heads, scene.model.config.heads)
    if len(layers) * len(heads) > MOST:
        raise ValueError(
            f"{OWNER}: {len(layers)} layers of {len(heads)} heads are {len(layers) * len(heads)} panels; "
            f"name at most {MOST} by --layers and --heads"
        )
    paths = [out] if len(positions) == 1 else [out.with_stem(f"{out.stem}-{position}") for position in positions]
    for path in paths:
        check_output(OWNER, "out", path, may_replace=force)
    tokens = torch.from_numpy(scene.tokens).to(device)
    for position, path in zip(positions, paths):
        write_figure(draw(scene, position, look(scene.model, tokens, position, layers, heads), layers, heads), path)
    return paths


def evenly(count: int, most: int = FEW) -> list[int]:
    """Up to `most` of the numbers below count, from the first to the last."""
    return [round(number) for number in np.linspace(0, count - 1, min(most, count)).tolist()]


def draw(scene: Scene, position: int, found: Look, layers: Sequence[int], heads: Sequence[int]) -> "Figure":
    """A row of panels for each layer, a column for each head."""
    from longstride.pictures.header import draw_header, header_height

    wide, tall, below = _panel_size(scene, len(heads))
    width = max(NARROWEST, LABEL + len(heads) * (wide + GAP) + 2 * EDGE)
    step = CAPTION + tall + below + GAP
    top = header_height(scene, position, width) + 0.4
    bottom = top + len(layers) * step
    figure = new_figure(OWNER, width, bottom + 0.5)
    draw_header(figure, scene, position, found)
    patterns = {(layer, head): scene.model.config.patterns(layer)[head] for layer in layers for head in heads}
    # All captions have one size: that of the longest.
    longest = max(len(pattern.text) for pattern in patterns.values()) + (MEASURED if scene.item else 0)
    size = min(7.0, wide * 72 / (MONO * longest))
    for column, head in enumerate(heads):
        left = EDGE + LABEL + column * (wide + GAP)
        add_text(figure, left + wide / 2, top - 0.06, f"head {head}", 9, ha="center", weight="bold")
    for row, layer in enumerate(layers):
        down = top + row * step + CAPTION
        add_text(figure, EDGE, down + tall / 2, f"layer {layer}", 9, weight="bold")
        for column, head in enumerate(heads):
            box = (EDGE + LABEL + column * (wide + GAP), down, wide, tall)
            weights = found.weights[row, column].float().cpu().numpy()
            _panel(figure, box, scene, weights, patterns[layer, head], size)
    add_text(figure, EDGE, bottom + 0.15, _legend(scene), 7, QUIET, va="top")
    return figure


def _legend(scene: Scene) -> str:
    if scene.item:
        return IN_IMAGES
    return f"{IN_MATRICES} {scene.kind.legend}".rstrip()


def _panel_size(scene: Scene, heads: int) -> tuple[float, float, float]:
    """Width, height, and what the lines below take."""
    if scene.item:
        wide = 2.1 if heads <= 4 else 1.5
        return wide, wide * scene.item[0] / scene.item[1], 0.0
    wide = min(2.7, max(1.9, 11 / heads))
    return wide, wide * min(1.0, max(0.35, scene.rows / scene.columns)), LINES * LINE + 0.04


def _panel(
    figure: "Figure", box: tuple[float, float, float, float], scene: Scene, weights: Weights, pattern: Pattern, size: float
) -> None:  # fmt: skip
    from longstride.pictures.header import mark_pixel
    from longstride.pictures.panels import MARK, by_pixel, image_panel, matrix_panel

    left, down, wide, tall = box
    position = len(weights) - 1
    seen = np.asarray(pattern.sees(position, np.arange(position + 1)))
    axes = add_axes(figure, *box)
    caption = pattern.text if seen.any() else f"{pattern.text}   sees nothing yet"
    if scene.item:
        axes.imshow(image_panel(weights, scene.tokens, scene.item), interpolation="nearest")
        mark_pixel(axes, scene, position)
        caption += f"   most: {by_pixel(weights, scene.item).max():.1%}" if seen.any() else ""
    else:
        colours = matrix_panel(weights, seen, len(scene.tokens), scene.columns)
        axes.imshow(colours, interpolation="nearest", aspect="auto", extent=(0, scene.columns, scene.rows, 0))
        row, column = divmod(position, scene.columns)
        axes.plot(
            column + 0.5, row + 0.5, marker="s", markersize=5, markerfacecolor="none", markeredgecolor=MARK, clip_on=False
        )  # fmt: skip
        for number, line in enumerate(lines(scene, weights), 1):
            small = min(6.5, wide * 72 / (MONO * LONGEST))
            add_text(figure, left, down + tall + number * LINE, line, small, family="monospace")
    add_text(figure, left, down - 0.04, caption, size, QUIET, within=wide)


def _chosen(name: str, given: Sequence[int], count: int) -> list[int]:
    try:
        return chosen(name, given, count) if given else evenly(count)
    except ValueError as error:
        raise ValueError(f"{OWNER}: {str(error).removeprefix('look: ')}") from None


def _position(scene: Scene, position: int) -> int:
    position = whole_number(OWNER, "position", position, 0)
    if position >= len(scene.tokens):
        raise ValueError(f"{OWNER}: position must be 0 to {len(scene.tokens) - 1:,}, got {position:,}")
    return position
