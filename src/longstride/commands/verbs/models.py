"""longstride models"""

ORDER = 33


def main() -> None:
    """List the trained models that come with longstride. Example: longstride models"""
    from longstride.commands.models import show

    show()
