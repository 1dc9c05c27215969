"""Figures of docs/results.md, README and the model cards are those of the committed results."""

import json
import re
from itertools import pairwise

import pytest

from longstride.commands.reproduce.results import budget_of, read_results
from longstride.model.card import read_card
from longstride.model.shipped import NAMES
from tests.pages import ROOT

RESULTS = ROOT / "benchmarks/results"
PAGE = (ROOT / "docs/results.md").read_text()
README = (ROOT / "README.md").read_text()
TABLE_2 = read_results(RESULTS / "table2-h200.json").rows
ABLATIONS = read_results(RESULTS / "ablations-h200.json").rows


def section(title: str) -> str:
    return PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]


def cells(text: str) -> list[list[str]]:
    """The rows of all tables, and their headings."""
    lines = [line for line in text.splitlines() if line.startswith("|") and not line.startswith("| ---")]
    return [[cell.strip().strip("*") for cell in line.strip("|").split("|")] for line in lines]


def evaluated(name: str) -> dict[int, float]:
    rows = json.loads((RESULTS / f"eval-{name}.json").read_text())["rows"]
    return {row["min_context"]: row["bits_per_byte"] for row in rows}


@pytest.mark.parametrize("data", ["enwik8", "cifar10"])
def test_table_2(data):
    rows = [row for row in TABLE_2 if row.name.startswith(data)]
    seconds = budget_of(rows).seconds
    shown = cells(section("Table 2: dense, fixed and strided").split("What they learn")[1])
    first = next(place for place, line in enumerate(shown) if line[0].startswith(data.replace("cifar10", "CIFAR-10")))
    for row, line in zip(rows, shown[first : first + 3], strict=True):
        assert row.name.removeprefix(f"{data}-") in line[0]
        assert line[1:4] == [f"{1e3 * row.step_seconds:.1f} ms", f"{row.bits:.3f}", f"{row.bits_at_seconds(seconds):.2f}"]


def test_the_shares_of_steps_at_equal_seconds():
    dense, fixed, strided = (row.seconds for row in TABLE_2 if row.data == "text")
    assert f"fixed has had {strided / fixed:.0%} and dense {strided / dense:.0%}".replace("%", " %") in PAGE


def test_ablations():
    shown = section("One change at a time")
    for row in ABLATIONS:
        assert re.search(rf"\b{row.bits:.3f}\b", shown), row.name
    assert len(re.findall(r"\b\d\.\d{3}\b", shown)) == len(ABLATIONS)
    minutes = sum(row.wall_seconds for row in ABLATIONS) / 60
    assert f"The times\nof the {len(ABLATIONS)} runs add up to {minutes:.0f} minutes" in shown


def test_table_3():
    found = evaluated("h200-text-modern-512-contexts")
    shown = {
        int(line[0].replace(",", "")): line[2] for line in cells(section("Table 3: bits per byte by least context"))[1:]
    }
    assert shown == {least: f"{bits:.4f}" for least, bits in found.items()}
    assert all(before > after for before, after in pairwise(found[least] for least in sorted(found)))


def test_seven_minutes():
    shown = section("Enwik8 in seven minutes")
    for name in ("contest-h200-512", "contest-h200-dense-1024"):
        for row in read_results(RESULTS / f"{name}.json").rows:
            both = [f"{score.bits_per_byte:.4f}" for score in row.scores]
            assert any(line[1:3] == both for line in cells(shown)), row.name
            assert f"{row.steps:,}" in PAGE
    older = json.loads((RESULTS / "contest-h200.json").read_text())["bits_per_byte_by_minimum_context"]
    assert ["width 768, all 5 MB", *(f"{bits:.4f}" for bits in older.values())] in cells(shown)
    seeds = [row.bits for row in read_results(RESULTS / "contest-h200-512.json").rows]
    assert " and ".join(f"{bits:.3f}" for bits in seeds) in README


@pytest.mark.parametrize("name", NAMES)
def test_models(name):
    found, folder = evaluated(f"h200-{name}-valid"), NAMES[name] / name
    card = read_card(folder)
    assert {figure.min_context: figure.bits_per_byte for figure in card.figures} == found
    for page in (PAGE, (ROOT / "docs/models.md").read_text()):
        assert f"{found[0]:.3f}" in page
    for bits in (*found.values(), card.check.bits_per_byte):
        assert f"| {bits:.4f} |" in (folder / "README.md").read_text()
