"""Model cards: what a saved model was trained on, its licence, its bits per byte, its limits.

card.json in the model's folder has the fields, and README.md beside it shows them. Imported without torch.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from longstride.common.atomic import atomic_path
from longstride.common.checks import Real, Rule, Text, Whole, check_field_names, check_fields, short_repr
from longstride.common.files import read_json
from longstride.model.config import ModelConfig

FILE, PAGE = "card.json", "README.md"
SETTINGS = "train.json"
"""The settings of the run that a saved model comes from, beside its card."""


@dataclass(frozen=True)
class Figure:
    """Bits per byte on some data."""

    data: str
    """The data in words; for `Card.check` the name of a bundled sample."""
    bytes: int
    """How many bytes were scored, from the first on."""
    min_context: int
    """The least bytes before each scored byte, except in the first window."""
    bits_per_byte: float

    def __post_init__(self) -> None:
        check_fields("card", self, FIGURE_RULES)


@dataclass(frozen=True)
class Card:
    name: str
    kind: str
    """What its bytes are: a kind of data, such as text."""
    title: str = ""
    """What the model is, in a sentence."""
    data: str = ""
    """What it was trained on."""
    licence: str = ""
    """The licence of the weights, in a few words: a column of a table."""
    terms: str = ""
    """Whose the data is, and what that means for the weights."""
    command: str = ""
    """The command that trained it."""
    steps: int = 0
    """Steps after which the weights were taken; 0 if they are not known."""
    planned_steps: int = 0
    """Steps of the whole run."""
    parameters: int = 0
    dtype: str = "float32"
    """Of the weights in their file."""
    size: int = 0
    """Bytes of model.safetensors."""
    sha256: str = ""
    """Of model.safetensors."""
    figures: tuple[Figure, ...] = ()
    """Bits per byte, that which is quoted first."""
    check: Figure | None = None
    """Bits per byte on a sample that is bundled with longstride, so that everybody can repeat it."""
    samples: str = ""
    """How good its samples are."""
    limits: str = ""

    def __post_init__(self) -> None:
        check_fields("card", self, RULES)

    @property
    def bits_per_byte(self) -> float | None:
        """The figure that is quoted; None if there is none."""
        return self.figures[0].bits_per_byte if self.figures else None


class Figures:
    """A list of figures."""

    def check(self, owner: str, name: str, value: Any) -> tuple[Figure, ...]:
        if not isinstance(value, tuple | list):
            raise ValueError(f"{owner}: {name} must be a list, got {short_repr(value)}")
        return tuple(_figure(owner, name, figure) for figure in value)


class OneFigure:
    """A figure, or none."""

    def check(self, owner: str, name: str, value: Any) -> Figure | None:
        return None if value is None else _figure(owner, name, value)


def _figure(owner: str, name: str, value: Any) -> Figure:
    return value if isinstance(value, Figure) else Figure(**check_field_names(value, f"{owner}: {name}", Figure))


FIGURE_RULES: dict[str, Rule] = {
    "data": Text("text"),
    "bytes": Whole(1),
    "min_context": Whole(0),
    "bits_per_byte": Real(0, 1e30),
}
WORDS = ("name", "kind", "title", "data", "licence", "terms", "command", "dtype", "sha256", "samples", "limits")
RULES: dict[str, Rule] = {
    **{name: Text("text") for name in WORDS},
    **{name: Whole(0) for name in ("steps", "planned_steps", "parameters", "size")},
    "figures": Figures(),
    "check": OneFigure(),
}


def read_card(folder: Path) -> Card | None:
    """Reads the card of a saved model; None if it has none."""
    path = folder / FILE
    if not path.is_file():
        return None
    given = check_field_names(read_json(path), str(path), Card)
    try:
        return Card(**given)
    except ValueError as error:
        raise ValueError(f"{path}: {str(error).removeprefix('card: ')}") from None


def write_card(folder: Path, card: Card, config: ModelConfig) -> None:
    """Writes card.json and README.md."""
    for name, text in ((FILE, json.dumps(asdict(card), indent=2) + "\n"), (PAGE, card_page(card, config))):
        with atomic_path(folder / name) as path:
            path.write_text(text, encoding="utf-8", errors="replace")  # The name of the data may be no text.


def card_page(card: Card, config: ModelConfig, use: str = "") -> str:
    """The card as a page of Markdown. `use`: how to load the model, a section of its own."""
    parts = [f"# {card.name}", card.title]
    parts.append(
        f"A Sparse Transformer of {card.parameters:,} weights, {card.size:,} bytes in {card.dtype}: layers {config.layers}, "
        f"width {config.width}, heads {config.heads}, context {config.context:,} bytes, pattern `{config.pattern}`, "
        f"embedding `{config.embedding}`. The SHA-256 of model.safetensors is {card.sha256}."
    )
    parts += ["## Use", use] if use else []
    rows = [_row(figure.data, figure) for figure in card.figures]
    if card.check is not None:
        rows.append(_row(f"`{card.check.data}`, bundled with longstride", card.check))
    if rows:
        header = ["| data | bytes | least context | bits per byte |", "| --- | ---: | ---: | ---: |"]
        parts += ["## Bits per byte", "\n".join([*header, *rows])]
    if card.check is not None:
        parts.append(f"Repeat the last row: `longstride eval {card.name} --most-bytes {card.check.bytes}`")
    licence = " ".join(filter(None, (card.licence and f"{card.licence}.", card.terms)))
    planned = f" of {card.planned_steps:,}" if card.planned_steps > card.steps else ""
    steps = f"{card.steps:,}{planned} steps; " if card.steps else ""
    training = f"{steps}train.json has all settings:\n\n    {card.command}" if card.command else ""
    texts = {"Data": card.data, "Licence": licence, "Training": training, "Samples": card.samples, "Limits": card.limits}
    for title, text in texts.items():
        parts += [f"## {title}", text] if text else []
    return "\n\n".join(filter(None, parts)) + "\n"


def _row(data: str, figure: Figure) -> str:
    return f"| {data} | {figure.bytes:,} | {figure.min_context:,} | {figure.bits_per_byte:.4f} |"
