"""Models that come with longstride, by name: a folder each, in the package or in the repository.

What may be used freely is in the package. A model whose data has another licence is in the repository's folder `models`, and
is found there by a package that is installed from it (`pip install --editable`). Imported without torch.
"""

from pathlib import Path

PACKAGE = Path(__file__).parent
"""The folder of the models in the package."""
REPOSITORY = Path(__file__).parents[4] / "models"
"""The folder of the other models, if the package is in a copy of the repository."""
NAMES = {"text": PACKAGE, "images32": REPOSITORY, "piano": REPOSITORY}
"""The models, and the folder that each is in."""


def find_model(given: str | Path) -> Path:
    """Returns the folder of a model that comes with longstride, if `given` is its name; otherwise `given` as a path.

    A run or a saved model of that name in the working folder comes first.
    """
    folder = Path(given)
    if str(folder) not in NAMES or (folder / "config.json").is_file() or not is_here(str(folder)):
        return folder
    return model_folder(str(folder))


def model_folder(name: str) -> Path:
    """Returns the place of a model that comes with longstride, whether it is there or not."""
    return NAMES[name] / name


def is_here(name: str) -> bool:
    return (model_folder(name) / "config.json").is_file()


def why_absent(name: str) -> str:
    """Says, of a model that is not here, what its name stands for and where its folder is found."""
    if NAMES[name] == PACKAGE:
        return f"it is a model of longstride, and {model_folder(name)} is not there: install longstride again"
    return (
        f"it is a model of longstride that the installed package leaves out for its licence: take the folder models/{name} "
        "of the repository, and give its path"
    )
