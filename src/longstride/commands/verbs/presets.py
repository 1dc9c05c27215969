"""longstride presets"""


def presets(dense: bool = False) -> None:
    """List the networks that have a name, with what they cost. Example: longstride presets

    Args:
        dense: Also their dense forms, with full attention.
    """
    from longstride.commands.presets import show

    show(dense)
