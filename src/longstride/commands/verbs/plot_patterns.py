"""longstride plot patterns"""

from pathlib import Path

from longstride.common.lazy import import_optional
from longstride.patterns.notation import parse

ORDER = 120


def main(
    patterns: tuple[str, ...] = (),
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
        patterns: One column of the figure for each text, which has a pattern for every head. By default full, strided and
            fixed attention with the width as their stride, as in the paper.
        height: Rows of the image.
        width: Bytes in a row of the image.
        row: The row of the pixel whose keys are drawn; by default about two thirds down.
        column: The column of that pixel; by default the middle.
        out: The picture to write, PNG or SVG by its ending.
        force: Replace a file that exists.
    """
    import_optional("matplotlib", "plot patterns", "plot")
    from longstride.pictures.patterns import Scheme, plot_patterns

    texts = {text: text for text in patterns} or {
        "Transformer": "dense()",
        "Sparse Transformer (strided)": f"strided({width})",
        "Sparse Transformer (fixed)": f"fixed({width}, 1)",
    }
    plot_patterns([Scheme(name, parse(text)) for name, text in texts.items()], out, height, width, row, column, force)
    print(f"wrote {out}")
