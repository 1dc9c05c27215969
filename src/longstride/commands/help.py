"""Help texts: what tyro prints in boxes, as plain sections that fit the terminal."""

import re
import shutil
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field

WIDEST = 120
"""Columns of the longest line on a wide terminal."""
COLUMN = 26
"""Where descriptions begin; on narrow terminals they begin below the flag."""
NARROW = 70
"""Columns of a narrow terminal."""
INDENT = 2
YES_NO = {"True": "yes", "False": "no"}


@dataclass
class Section:
    """A box of tyro's help: a group of flags."""

    title: str
    about: str = ""
    entries: list[tuple[str, str]] = field(default_factory=list)
    """Flags and their descriptions."""


def terminal_width() -> int:
    return min(shutil.get_terminal_size().columns, WIDEST)


def format_help(text: str, width: int) -> str:
    """The help that tyro printed, without boxes and in lines of this width at most, where words allow it."""
    before = _without_none(text.split("╭", 1)[0]).replace(" Example: ", "\nExample: ", 1)
    lines: list[str] = []
    for paragraph in before.strip().splitlines():
        lines += _wrapped(paragraph, width, "", "    " if paragraph.startswith("usage: ") else "")
    for section in sections(text):
        lines += ["", f"{section.title}:"]
        if section.about:
            lines += _wrapped(section.about, width, " " * INDENT)
        for flags, description in section.entries:
            lines += format_entry(flags, description, width)
    return "\n".join(lines)


def format_entry(name: str, description: str, width: int, column: int = COLUMN) -> list[str]:
    """Lines with a name on the left and its description on the right."""
    if width < NARROW:
        column = 3 * INDENT
    if len(name) + 2 * INDENT > column:
        return _wrapped(name, width, " " * INDENT, " " * column) + _wrapped(description, width, " " * column)
    return _wrapped(description, width, (" " * INDENT + name).ljust(column), " " * column)


def sections(text: str) -> Iterator[Section]:
    """The boxes of tyro's help. Joins the lines of a description, which end where the docstring in the source has them."""
    for title, box in re.findall(r"^╭─ (.*?) ─*╮\n(.*?)^╰", _without_colours(text), re.M | re.S):
        section = Section(title.strip())
        rows: list[str] = []
        for line in box_lines(box):
            if set(line.strip()) == {"─"}:
                section.about, rows = " ".join(rows), []
            elif line.startswith(" ") and rows:
                rows[-1] += f"  {line.strip()}"
            else:
                rows.append(line)
        for row in rows:
            flags, _, description = row.partition("  ")
            section.entries.append((_without_none(flags), _description(flags, " ".join(description.split()))))
        yield section


def box_lines(box: str) -> list[str]:
    """The lines inside of boxes, without their sides and colours."""
    return [line[2:-1].rstrip() for line in _without_colours(box).splitlines() if line.startswith("│")]


def _description(flags: str, text: str) -> str:
    """The description of a flag, with yes or no for True or False, without empty defaults, and with (required)."""
    text = re.sub(r" ?\(default: (?:None|'')?\)$", "", text)
    text = re.sub(r"\(default: (True|False)\)$", lambda default: f"(default: {YES_NO[default[1]]})", text)
    is_required = flags[:1] not in "-[" and not text.endswith("(required)")
    return f"{text} (required)" if is_required else text


def _without_none(flags: str) -> str:
    """The flag's choices without None, which cannot be typed: it is the value if the flag is left out."""
    return flags.replace("{None}|", "").replace("{None,", "{")


def _without_colours(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def _wrapped(text: str, width: int, first: str = "", later: str | None = None) -> list[str]:
    later = first if later is None else later
    wrapped = textwrap.wrap(
        text, width, initial_indent=first, subsequent_indent=later, break_long_words=False, break_on_hyphens=False
    )
    return wrapped or [first.rstrip()]
