"""longstride plot patterns"""

from operator import itemgetter
from pathlib import Path
from textwrap import fill

from longstride.common.checks import whole_number
from longstride.common.lazy import import_optional
from longstride.model.placement import WORDS, place
from longstride.patterns import Pattern
from longstride.patterns.notation import parse

ORDER = 120
TITLE_WIDTH = 34
"""Characters of a line above a column."""


def main(
    patterns: tuple[str, ...] = (),
    heads: int = 4,
    height: int = 6,
    width: int = 6,
    row: int | None = None,
    column: int | None = None,
    out: Path = Path("patterns.png"),
    force: bool = False,
) -> None:
    """Draw the paper's figure 3 for any patterns and image size.

    Example: longstride plot patterns --patterns 'strided(6)' 'fixed(6, 2)' --out patterns.svg

    Args:
        patterns: One column of the figure for each text, which has a pattern for every head. Or the pattern of a network,
            such as 'interleave(strided(6))': one column for each block that differs. By default full, strided and fixed
            attention with the width as their stride, as in the paper.
        heads: How many heads the blocks of such a network have.
        height: Rows of the image.
        width: Bytes in a row of the image.
        row: The row of the pixel whose keys are drawn; by default about two thirds down.
        column: The column of that pixel; by default the middle.
        out: The picture to write, PNG or SVG by its ending.
        force: Replace a file that exists.
    """
    import_optional("matplotlib", "plot patterns", "plot")
    from longstride.pictures.patterns import Scheme, plot_patterns

    heads = whole_number("plot patterns", "heads", heads, 1)
    columns = {title: block for text in patterns for title, block in _blocks(text, heads).items()} or {
        "Transformer": parse("dense()"),
        "Sparse Transformer (strided)": parse(f"strided({width})"),
        "Sparse Transformer (fixed)": parse(f"fixed({width}, 1)"),
    }
    plot_patterns([Scheme(title, block) for title, block in columns.items()], out, height, width, row, column, force)
    print(f"wrote {out}")


def _blocks(text: str, heads: int) -> dict[str, tuple[Pattern, ...]]:
    """Returns the patterns of the text by a title; of the pattern of a network, those of each block that differs."""
    try:
        return {text: parse(text)}
    except ValueError:
        if not any(word in text for word in ("*", "+", *WORDS)):
            raise
    cycle = [tuple(dict.fromkeys(block)) for block in place(text, heads)]
    first = {block: index for index, block in reversed(list(enumerate(cycle, 1)))}
    title = fill(text, TITLE_WIDTH)
    return {f"{title}\nblock {index} of {len(cycle)}": block for block, index in sorted(first.items(), key=itemgetter(1))}
