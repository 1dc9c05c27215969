"""What stands above the panels: what is predicted, and from what."""

from typing import TYPE_CHECKING

import numpy as np
from matplotlib.patches import Rectangle
from numpy.typing import NDArray

from longstride.common.figures import EDGE, GAP, INK, MONO, QUIET, add_axes, add_text, letters
from longstride.model.inspection import Look
from longstride.pictures.panels import GREYED, MARK, has_glyph, pixels, share
from longstride.pictures.scene import Scene

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PICTURE, WAVE = 1.6, 0.95
SIZE, LINE = 8, 0.165
"""Of the text before the byte."""
LINES = 4
GUESSES = 4


def header_height(scene: Scene, position: int, width: float) -> float:
    if scene.item:
        return EDGE + 0.25 + PICTURE
    if scene.kind.signal(scene.tokens) is not None:
        return EDGE + 0.7 + WAVE + 0.25
    return EDGE + 0.75 + len(_before(scene, position, width)) * LINE


def draw_header(figure: "Figure", scene: Scene, position: int, found: Look) -> None:
    true = int(scene.tokens[position])
    likely = found.probabilities.argsort(descending=True)[:GUESSES].tolist()
    guesses = ", ".join(f"{scene.kind.byte_label(byte)} {share(float(found.probabilities[byte]))}" for byte in likely)
    truth = f"It is {scene.kind.byte_label(true)}; the model gave that {share(float(found.probabilities[true]))}"
    if scene.item:
        _images(figure, scene, position, [truth, f"Most likely to it: {guesses}"])
        return
    width = figure.get_figwidth() - 2 * EDGE
    title = f"{scene.name}: where its heads look while it predicts byte {position:,}"
    add_text(figure, EDGE, EDGE + 0.15, title, 12, within=width)
    add_text(figure, EDGE, EDGE + 0.37, f"{scene.data}.  {truth}.", 8, QUIET, within=width)
    add_text(figure, EDGE, EDGE + 0.53, f"Most likely to it: {guesses}.", 8, QUIET, within=width)
    signal = scene.kind.signal(scene.tokens)
    if signal is not None:
        _wave(figure, signal, scene.kind.rate or 1, position)
    else:
        _text(figure, scene, position)


def mark_pixel(axes: "Axes", scene: Scene, position: int) -> None:
    row, column = divmod(position // scene.item[2], scene.item[1])
    axes.add_patch(Rectangle((column - 0.5, row - 0.5), 1, 1, fill=False, edgecolor=MARK, linewidth=1.5))


def _images(figure: "Figure", scene: Scene, position: int, said: list[str]) -> None:
    height, width, channels = scene.item
    tall, wide = (PICTURE * size / max(height, width) for size in (height, width))
    for number, (known, name) in enumerate(((position, "what is there so far"), (len(scene.tokens), "the whole image"))):
        left = EDGE + number * (wide + GAP)
        axes = add_axes(figure, left, EDGE + 0.2, wide, tall)
        axes.imshow(pixels(scene.tokens, scene.item, known, GREYED), interpolation="nearest")
        mark_pixel(axes, scene, position)
        add_text(figure, left, EDGE + 0.14, name, 7, colour=QUIET)
    row, column = divmod(position // channels, width)
    lines = [
        (scene.name, 12, INK),
        ("where its heads look while it predicts", 9, INK),
        (f"row {row}, column {column}, channel {position % channels}", 9, INK),
        (f"byte {position:,} of {scene.data}", 8, QUIET),
        *((line, 8, QUIET) for line in said),
    ]
    left = EDGE + 2 * (wide + GAP) + 0.1
    for number, (line, size, colour) in enumerate(lines):
        add_text(
            figure, left, EDGE + 0.4 + number * 0.23, line, size, colour, within=figure.get_figwidth() - left - EDGE
        )  # fmt: skip


def _wave(figure: "Figure", wave: NDArray[np.float64], rate: int, position: int) -> None:
    seconds = np.arange(len(wave)) / rate
    axes = add_axes(figure, EDGE + 0.3, EDGE + 0.65, figure.get_figwidth() - 2 * EDGE - 0.35, WAVE, bare=False)
    axes.plot(seconds[position:], wave[position:], color="#c8d0d8", linewidth=0.6)
    axes.plot(seconds[: position + 1], wave[: position + 1], color=INK, linewidth=0.6)
    axes.axvline(float(seconds[position]), color=MARK, linewidth=1.2)
    axes.set_xlim(0, max(float(seconds[-1]), 1 / rate))
    axes.tick_params(labelsize=6, length=2)
    axes.set_xlabel("seconds", fontsize=7, labelpad=1)


def _text(figure: "Figure", scene: Scene, position: int) -> None:
    """The last lines before the byte, and the byte itself, which the model does not know."""
    lines = _before(scene, position, figure.get_figwidth())
    for number, line in enumerate(lines):
        add_text(figure, EDGE, EDGE + 0.85 + number * LINE, line, SIZE, family="monospace")
    true = scene.kind.spell_byte(int(scene.tokens[position]))
    add_text(
        figure, EDGE + len(lines[-1]) * MONO * SIZE / 72, EDGE + 0.85 + (len(lines) - 1) * LINE, true, SIZE,
        family="monospace", bbox={"facecolor": MARK, "edgecolor": "none", "pad": 1, "alpha": 0.6},
    )  # fmt: skip


def _before(scene: Scene, position: int, width: float) -> list[str]:
    across = letters(width - 2 * EDGE, SIZE)
    across -= across % scene.kind.letters_per_byte
    first = max(0, position - LINES * across // scene.kind.letters_per_byte)
    shown = scene.kind.spell(scene.tokens, first, position, has_glyph)
    lines = [shown[start : start + across] for start in range(0, len(shown) + 1, across)]
    return lines[-LINES:]
