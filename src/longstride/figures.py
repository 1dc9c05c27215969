"""What pictures share: matplotlib, which is optional, and files that are there whole or not at all."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from longstride.atomic import atomic_path

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMATS = (".png", ".svg")


def picture_path(owner: str, path: str | Path) -> Path:
    """`path`, if it ends as a picture that can be written."""
    path = Path(path)
    if path.suffix.lower() not in FORMATS:
        raise ValueError(f"{owner}: {path} must end in {' or '.join(FORMATS)}")
    return path


def new_figure(owner: str, width: float, height: float, **options: Any) -> "Figure":
    """An empty figure of that many inches, or an error that says what to install."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ValueError(f"{owner} needs {error.name}, which is not installed: pip install 'longstride[plot]'") from None
    return Figure(figsize=(width, height), **options)


def write_figure(figure: "Figure", path: Path, dpi: int = 150) -> None:
    with atomic_path(path) as temporary:
        figure.savefig(temporary, dpi=dpi)
