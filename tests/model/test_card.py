import json
from dataclasses import replace

import pytest

from longstride.model.card import FILE, PAGE, Card, Figure, read_card, write_card
from tests.model import small

CARD = Card(
    name="mine", kind="text", title="Writes.", data="A book.", licence="CC0", terms="Do what you like.",
    command="longstride", steps=1000, parameters=12, size=24, sha256="ab", dtype="float16", samples="Good.", limits="None.",
    figures=(Figure("book, valid", 4096, 0, 1.25), Figure("book, valid", 4096, 8, 1.125)),
    check=Figure("unseen-text", 512, 0, 1.5),
)  # fmt: skip


def test_a_card_comes_back(tmp_path):
    assert read_card(tmp_path) is None
    write_card(tmp_path, CARD, small.config())
    assert read_card(tmp_path) == CARD
    assert CARD.bits_per_byte == 1.25
    assert Card("mine", "text").bits_per_byte is None


def test_the_page_has_every_field(tmp_path):
    write_card(tmp_path, CARD, small.config())
    page = (tmp_path / PAGE).read_text()
    rows = ["| book, valid | 4,096 | 8 | 1.1250 |", "| `unseen-text`, bundled with longstride | 512 | 0 | 1.5000 |"]
    texts = [
        "# mine",
        "CC0. Do what you like.",
        "12 weights, 24 bytes in float16",
        "`longstride eval mine --most-bytes 512`",
    ]
    texts += ["1,000 steps", "    longstride", "Writes.", "A book.", "Good.", "None.", small.config().pattern, " ab."]
    assert all(text in page for text in rows + texts)
    assert page.index("1.2500") < page.index("1.5000")


def test_the_page_says_how_far_the_run_was(tmp_path):
    for steps, planned, words in (
        (200, 2000, "200 of 2,000 steps; train"),
        (200, 200, "\n200 steps; train"),
        (0, 200, "\ntrain"),
    ):
        write_card(tmp_path, replace(CARD, steps=steps, planned_steps=planned), small.config())
        assert f"{words}.json has all settings" in (tmp_path / PAGE).read_text()


def test_data_whose_name_is_no_text(tmp_path):
    write_card(tmp_path, replace(CARD, data="a\udcff.txt: bytes in order"), small.config())
    assert "a?.txt: bytes in order" in (tmp_path / PAGE).read_text(encoding="utf-8")


def test_a_page_of_a_bare_card(tmp_path):
    write_card(tmp_path, Card("mine", "text"), small.config())
    assert "##" not in (tmp_path / PAGE).read_text()
    assert read_card(tmp_path) == Card("mine", "text")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"size": -1}, "size must be at least 0, got -1"),
        ({"licence": 3}, "licence must be text, got 3"),
        ({"figures": 3}, "figures must be a list, got 3"),
        ({"figures": [3]}, "figures must hold an object"),
        ({"figures": [{"data": "x"}]}, "figures: bytes, min_context, bits_per_byte must be given"),
        ({"check": {"data": "x", "bytes": 0, "min_context": 0, "bits_per_byte": 1}}, "bytes must be at least 1"),
        ({"check": {"data": "x", "bytes": 1, "min_context": 0, "bits_per_byte": "1"}}, "bits_per_byte must be a number"),
        ({"licences": "CC0"}, "there is no field 'licences'; did you mean 'licence'"),
        ({"title": "x" * 9000}, "the length of title"),
    ],
)
def test_a_card_from_others_is_checked(tmp_path, change, message):
    write_card(tmp_path, CARD, small.config())
    (tmp_path / FILE).write_text(json.dumps({**json.loads((tmp_path / FILE).read_text()), **change}))
    with pytest.raises(ValueError, match=rf"card\.json: .*{message}"):
        read_card(tmp_path)
