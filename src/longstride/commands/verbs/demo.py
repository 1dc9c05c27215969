"""longstride demo"""

from pathlib import Path

ORDER = 20


def main(folder: Path = Path("demo"), steps: int = 640) -> None:
    """Let a trained model write, train a small one, and compare both with gzip and xz. Example: longstride demo

    Args:
        folder: The folder for the data and the runs.
        steps: Steps of training; 640 take about two minutes on two cores.
    """
    from longstride.commands.demo import demo as run

    run(folder, steps)
