"""longstride plot attention"""

from pathlib import Path
from typing import Annotated

import tyro

ORDER = 110


def main(
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
        folder: A run, one of its checkpoints, a saved model, or the name of a model that comes with
            longstride, such as text.
        position: The byte that is predicted; one picture for each; by default about two thirds down. Row r, column c of an
            image is (r * width + c) * channels.
        layers: The layers, as rows of panels; by default up to 8, evenly spaced.
        heads: The heads, as columns of panels; by default up to 8, evenly spaced.
        data: The data that the model reads, a store or a source as for training; by default the run's own, or
            the bundled sample that the model's card names.
        split: train, valid or test.
        item: The number of the image, or of the window as long as the context.
        out: The picture to write, PNG or SVG by its ending.
        force: Replace files that exist.
    """
    from longstride.common.figures import picture_path
    from longstride.common.files import check_source
    from longstride.model.saved_config import find_settings

    picture_path("plot attention", out)
    find_settings("plot attention", folder)
    if data is not None:
        check_source(data)

    from longstride.pictures.attention import plot_attention

    for path in plot_attention(folder, position, layers, heads, data, split, item, out, force):
        print(f"wrote {path}")
