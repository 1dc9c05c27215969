"""The table of files in docs/architecture.md, made from the docstrings of the modules: python -m tests.file_map"""

import ast
import re
from pathlib import Path

from tests.pages import ROOT, replace_section
from tests.test_imports import ROOMS

PAGE = ROOT / "docs" / "architecture.md"
PACKAGE = ROOT / "src" / "longstride"


def file_map() -> str:
    """A table for each room: every module with the first sentence of its docstring."""
    tables = [f"### {room}\n\n| file | what it is |\n| --- | --- |\n{rows(PACKAGE / room)}" for room in ROOMS]
    return "\n" + "\n".join(tables) + "\n"


def rows(folder: Path) -> str:
    lines = []
    for path in sorted(folder.rglob("*.py"), key=lambda path: (path.parent, path.name)):
        docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
        lines.append(f"| `{path.relative_to(PACKAGE)}` | {first_sentence(docstring)} |\n")
    return "".join(lines)


def first_sentence(docstring: str) -> str:
    paragraph = " ".join(docstring.split("\n\n")[0].split())
    return re.split(r"(?<=[.]) (?=[A-Z])", paragraph)[0].replace("|", "\\|")


if __name__ == "__main__":
    replace_section(PAGE, "files", file_map())
