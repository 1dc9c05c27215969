"""Markdown pages as the tests read them: commands, Python blocks, links, headings, marked sections."""

import re
import shlex
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
GUIDES = [page for page in PAGES if page.name not in ("log.md", "CHANGELOG.md")]
"""Pages about the present; log and changelog may name commands and files of the past."""


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.M | re.S)


def commands(page: Path) -> list[str]:
    """Each `longstride ...` of a page, in code blocks and inline. Lines that are indented further continue a command."""
    text = re.sub(r"^```python\n.*?^```", "", page.read_text(), flags=re.M | re.S)
    found: list[str] = []
    for line in re.findall(r"^ {4}(.*)$", text, re.M):
        if line.startswith(" ") and found:
            found[-1] += " " + line.strip()
        else:
            found.append(line.removeprefix("$ "))
    inline = re.findall(r"(?<!`)`([^`]+)`(?!`)", re.sub(r"^ {4}.*$", "", text, flags=re.M))
    found += [" ".join(span.split()) for span in inline]
    found = [re.sub(r"^.*torchrun .*-m longstride ", "longstride ", line) for line in found]
    return [line for line in found if line.startswith("longstride ")]


def words_of(command: str) -> list[str]:
    return shlex.split(command, comments=True)[1:]


def make_targets(page: Path) -> set[str]:
    return set(re.findall(r"(?:^ {4}|`|&& )make ([a-z-]+)", page.read_text(), re.M))


def links(page: Path) -> list[str]:
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    return re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`]*`", "", text))


def anchors(page: Path) -> set[str]:
    """Of the headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def section(page: Path, name: str) -> str:
    """What stands between the comments `name: begin` and `name: end`."""
    found = re.search(rf"<!-- {name}: begin[^>]*-->\n(.*?)<!-- {name}: end -->", page.read_text(), re.S)
    assert found, f"{page} has no section {name}"
    return found[1]


def replace_section(page: Path, name: str, text: str) -> None:
    begin, end = re.search(rf"<!-- {name}: begin[^>]*-->\n", page.read_text()), f"<!-- {name}: end -->"
    assert begin
    before, _, rest = page.read_text().partition(begin[0])
    page.write_text(before + begin[0] + text + end + rest.partition(end)[2])
