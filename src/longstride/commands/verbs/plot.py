"""longstride plot patterns, plot attention, plot run"""

from pathlib import Path
from typing import Annotated

import tyro

from longstride.common.lazy import import_optional
from longstride.patterns.notation import parse


def plot_run(
    runs: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN [RUN ...]")],
    out: Path | None = None,
    force: bool = False,
) -> None:
    """Draw a run on one page: curves, settings, samples; or compare several. Example: longstride plot run RUN

    Args:
        runs: The run's folder. Several runs are compared: their curves, and the settings that differ.
        out: The picture to write, PNG or SVG by its ending; by default page.png in the run, or runs.png here for several.
        force: Replace a file that exists.
    """
    from longstride.pictures.run import plot_run

    print(f"wrote {plot_run(runs, out, force)}")


def plot_attention(
    folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN_OR_MODEL")],
    position: tuple[int, ...] = (),
    layers: tuple[int, ...] = (),
    heads: tuple[int, ...] = (),
    data: Path | None = None,
    split: str = "valid",
    item: int = 0,
    out: Path = Path("attention.png"),
    force: bool = False,
) -> None:
    """Draw what each layer and head looks at: the paper's figure 2. Example: longstride plot attention RUN --layers 0 5

    Args:
        folder: A run, one of its checkpoints, or a saved model.
        position: The byte that is predicted; one picture for each; by default about two thirds down. Row r, column c of an
            image is (r * width + c) * channels.
        layers: The layers, as rows of panels; by default up to 8, evenly spaced.
        heads: The heads, as columns of panels; by default up to 8, evenly spaced.
        data: The data that the model reads, a store or a source as for training; by default the run's own.
        split: train, valid or test.
        item: The number of the image, or of the window as long as the context.
        out: The picture to write, PNG or SVG by its ending.
        force: Replace files that exist.
    """
    from longstride.pictures.attention import plot_attention

    for path in plot_attention(folder, position, layers, heads, data, split, item, out, force):
        print(f"wrote {path}")


def plot_patterns(
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
