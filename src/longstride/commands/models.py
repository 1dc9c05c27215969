"""The table of the trained models that come with longstride: longstride models"""

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from longstride.model.card import Card, read_card
from longstride.model.shipped import NAMES, is_here, model_folder, why_absent


def show(console: Console | None = None) -> None:
    """Prints the models with their bits per byte, size and licence, and those that are not here with the reason."""
    console = console or Console()
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for heading in ("model", "trained on", "licence"):
        table.add_column(heading, overflow="fold")
    for heading in ("million\nweights", "MB", "bits per\nbyte"):
        table.add_column(heading, justify="right", overflow="fold")
    missing = [name for name in NAMES if not is_here(name)]
    for name in NAMES:
        if name not in missing:
            table.add_row(*_row(name, read_card(model_folder(name)) or Card(name, "")))
    if table.row_count:
        console.print(table)
    for name in missing:
        console.print(f"{name} is not here: {why_absent(name)}", highlight=False, markup=False, soft_wrap=True)
    for name in NAMES:
        if name not in missing:
            console.print(f"{name}: {model_folder(name)}", highlight=False, markup=False, soft_wrap=True)
    console.print("A name stands where a run does: longstride sample text --prompt 'The '", highlight=False, soft_wrap=True)


def _row(name: str, card: Card) -> list[str]:
    bits = "" if card.bits_per_byte is None else f"{card.bits_per_byte:.3f}"
    data = card.data.partition(". ")[0].rstrip(".")
    return [name, data, card.licence, f"{card.parameters / 1e6:.1f}", f"{card.size / 1e6:.1f}", bits]
