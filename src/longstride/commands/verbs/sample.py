"""longstride sample"""

from pathlib import Path
from typing import Annotated

import tyro

from longstride.sampling.request import OWNER, Request

ORDER = 90


def main(
    folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN_OR_MODEL")],
    request: Annotated[Request, tyro.conf.arg(name="")],
) -> None:
    """Sample text, images or sound, or complete some. Example: longstride sample RUN --prompt 'The ' --temperature 0.8

    Args:
        folder: A run, of which the best weights are used, one of its checkpoints, a saved model, or the name of a model that
            comes with longstride, such as text; longstride models lists them.
    """
    from longstride.model.saved_config import find_settings

    request.check()
    find_settings(OWNER, folder)

    from longstride.commands.sample import sample as run

    run(folder, request)
