"""longstride doctor"""

import sys
from typing import Annotated

import tyro

ORDER = 10


def main(model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="[RUN_OR_MODEL_OR_PRESET]")] = "") -> None:
    """Show versions, devices, what `auto` selects and why; and the cost of sampling. Example: longstride doctor enwik8

    Args:
        model: A run, a saved model, a model that comes with longstride, or a preset, for the cost of sampling from it:
            weights, cache and keys.
    """
    if model:
        from longstride.model.saved_config import find_config

        find_config("doctor", model)

    from longstride.commands.doctor import examine

    if not examine(model):
        sys.exit(1)
