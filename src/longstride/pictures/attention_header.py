"""Header of an attention picture: the byte that is predicted, the model's best guesses, and the data before the byte."""

from typing import TYPE_CHECKING

import numpy as np
from matplotlib.patches import Rectangle
from numpy.typing import NDArray

from longstride.common.figures import EDGE, GAP, INK, MONO, QUIET, add_axes, add_text, characters_that_fit
from longstride.model.inspection import Inspection
from longstride.pictures.attention_example import Example
from longstride.pictures.attention_panels import MARK, UNKNOWN_GREY, has_glyph, percent, pixels

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PICTURE, WAVE = 1.6, 0.95
SIZE, LINE = 8, 0.165
"""Font size and line height of the text before the byte."""
LINES = 4
GUESSES = 4


def header_height(example: Example, position: int, width: float) -> float:
    if example.item:
        return EDGE + 0.25 + PICTURE
    if example.kind.signal(example.tokens) is not None:
        return EDGE + 0.7 + WAVE + 0.25
    return EDGE + 0.75 + len(_text_before(example, position, width)) * LINE


def draw_header(figure: "Figure", example: Example, position: int, inspection: Inspection) -> None:
    true = int(example.tokens[position])
    likely = inspection.probabilities.argsort(descending=True)[:GUESSES].tolist()
    guesses = ", ".join(
        f"{example.kind.byte_label(byte)} {percent(float(inspection.probabilities[byte]))}" for byte in likely
    )
    truth = f"It is {example.kind.byte_label(true)}; the model gave it {percent(float(inspection.probabilities[true]))}"
    if example.item:
        _draw_image(figure, example, position, [truth, f"Most likely: {guesses}"])
        return
    width = figure.get_figwidth() - 2 * EDGE
    title = f"{example.name}: attention weights for the prediction of byte {position:,}"
    add_text(figure, EDGE, EDGE + 0.15, title, 12, within=width)
    add_text(figure, EDGE, EDGE + 0.37, f"{example.data}.  {truth}.", 8, QUIET, within=width)
    add_text(figure, EDGE, EDGE + 0.53, f"Most likely: {guesses}.", 8, QUIET, within=width)
    signal = example.kind.signal(example.tokens)
    if signal is not None:
        _draw_wave(figure, signal, example.kind.rate or 1, position)
    else:
        _draw_text(figure, example, position)


def mark_pixel(axes: "Axes", example: Example, position: int) -> None:
    row, column = divmod(position // example.item[2], example.item[1])
    axes.add_patch(Rectangle((column - 0.5, row - 0.5), 1, 1, fill=False, edgecolor=MARK, linewidth=1.5))


def _draw_image(figure: "Figure", example: Example, position: int, guesses: list[str]) -> None:
    height, width, channels = example.item
    tall, wide = (PICTURE * size / max(height, width) for size in (height, width))
    whole = position - position % channels  # A pixel without its last channels would have a colour that is not its own.
    for number, (known, name) in enumerate(((whole, "generated so far"), (len(example.tokens), "the whole image"))):
        left = EDGE + number * (wide + GAP)
        axes = add_axes(figure, left, EDGE + 0.2, wide, tall)
        axes.imshow(pixels(example.tokens, example.item, known, UNKNOWN_GREY), interpolation="nearest")
        mark_pixel(axes, example, position)
        add_text(figure, left, EDGE + 0.14, name, 7, colour=QUIET)
    row, column = divmod(position // channels, width)
    lines = [
        (example.name, 12, INK),
        ("attention weights for the prediction of", 9, INK),
        (f"row {row}, column {column}, channel {position % channels}", 9, INK),
        (f"byte {position:,} of {example.data}", 8, QUIET),
        *((line, 8, QUIET) for line in guesses),
    ]
    left = EDGE + 2 * (wide + GAP) + 0.1
    for number, (line, size, colour) in enumerate(lines):
        add_text(
            figure, left, EDGE + 0.4 + number * 0.23, line, size, colour, within=figure.get_figwidth() - left - EDGE
        )  # fmt: skip


def _draw_wave(figure: "Figure", wave: NDArray[np.float64], rate: int, position: int) -> None:
    seconds = np.arange(len(wave)) / rate
    axes = add_axes(figure, EDGE + 0.3, EDGE + 0.65, figure.get_figwidth() - 2 * EDGE - 0.35, WAVE, bare=False)
    axes.plot(seconds[position:], wave[position:], color="#c8d0d8", linewidth=0.6)
    axes.plot(seconds[: position + 1], wave[: position + 1], color=INK, linewidth=0.6)
    axes.axvline(float(seconds[position]), color=MARK, linewidth=1.2)
    axes.set_xlim(0, max(float(seconds[-1]), 1 / rate))
    axes.tick_params(labelsize=6, length=2)
    axes.set_xlabel("seconds", fontsize=7, labelpad=1)


def _draw_text(figure: "Figure", example: Example, position: int) -> None:
    """Draws the last lines before the byte, and the byte itself, highlighted."""
    lines = _text_before(example, position, figure.get_figwidth())
    for number, line in enumerate(lines):
        add_text(figure, EDGE, EDGE + 0.85 + number * LINE, line, SIZE, family="monospace")
    true = example.kind.spell_byte(int(example.tokens[position]))
    add_text(
        figure, EDGE + len(lines[-1]) * MONO * SIZE / 72, EDGE + 0.85 + (len(lines) - 1) * LINE, true, SIZE,
        family="monospace", bbox={"facecolor": MARK, "edgecolor": "none", "pad": 1, "alpha": 0.6},
    )  # fmt: skip


def _text_before(example: Example, position: int, width: float) -> list[str]:
    """Returns the last lines before the byte: characters of text, or bytes in hexadecimal."""
    across = characters_that_fit(width - 2 * EDGE, SIZE)
    across -= across % example.kind.letters_per_byte
    first = max(0, position - LINES * across // example.kind.letters_per_byte)
    shown = example.kind.spell(example.tokens, first, position, has_glyph)
    lines = [shown[start : start + across] for start in range(0, len(shown) + 1, across)]
    return lines[-LINES:]
