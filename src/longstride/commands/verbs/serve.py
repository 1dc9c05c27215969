"""longstride serve"""

from pathlib import Path
from typing import Annotated

import tyro

from longstride.serving.settings import OWNER, ServeSettings

ORDER = 92


def main(
    folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN_OR_MODEL")],
    settings: Annotated[ServeSettings, tyro.conf.arg(name="")],
) -> None:
    """Serve a model by an API that OpenAI clients know, and a page to look at it. Example: longstride serve RUN --port 8000

    SIGTERM or Ctrl-C finishes the answers under way; a second Ctrl-C does not wait for them.

    Args:
        folder: A run, of which the best weights are used, one of its checkpoints, a saved model, or the name of a model that
            comes with longstride, such as text; longstride models lists them.
    """
    from longstride.model.saved_config import find_settings

    settings.check()
    find_settings(OWNER, folder)

    from longstride.commands.serve import serve as run

    run(folder, settings)
