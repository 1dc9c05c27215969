"""longstride doctor"""

import sys
from typing import Annotated

import tyro


def doctor(model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="[RUN_OR_MODEL_OR_PRESET]")] = "") -> None:
    """Show versions, devices, what `auto` picks and why; and what sampling costs. Example: longstride doctor enwik8

    Args:
        model: A run, a saved model or a preset: also what sampling from it costs, in weights, cache and keys.
    """
    from longstride.commands.doctor import examine

    if not examine(model):
        sys.exit(1)
