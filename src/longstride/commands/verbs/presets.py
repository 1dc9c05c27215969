"""longstride presets"""

ORDER = 30


def main(dense: bool = False) -> None:
    """List the presets with their size and cost. Example: longstride presets

    Args:
        dense: Also list their forms with full attention.
    """
    from longstride.commands.presets import show

    show(dense)
