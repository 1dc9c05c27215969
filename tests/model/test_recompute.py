import pytest

from longstride.model import recompute
from tests.model.small import config


@pytest.mark.parametrize(
    ("text", "choices"),
    [
        ("off", ["off"] * 3),
        ("auto", ["on"] * 3),
        ("off + 2*host", ["off", "host", "host"]),
        (" 1 * on+parts + selective ", ["on", "parts", "selective"]),
        ("3*on", ["on"] * 3),
        ("parts + 2*again", ["parts", "again", "again"]),
        ("1*(host + again) + parts", ["host", "again", "parts"]),
        ("parts+1 * ( host+1*again )", ["parts", "host", "again"]),
    ],
)
def test_text_is_read(text, choices):
    assert list(config(layers=3, recompute=text).recomputed) == choices


@pytest.mark.parametrize("choices", [["on"] * 3, ["off", "off", "on"], ["host", "parts", "host"]])
def test_what_is_written_reads_the_same(choices):
    assert list(recompute.read(recompute.write(choices), 3)) == choices


def test_equal_choices_are_written_as_one():
    assert recompute.write(["on"] * 4) == "on"
    assert recompute.write(["off"] * 4 + ["on"]) == "4*off + on"


@pytest.mark.parametrize(
    ("first", "length", "text"),
    [
        ("host", 2, "5*(host + again)"),
        ("parts", 3, "3*(parts + 2*again) + parts"),
        ("host", 4, "2*(host + 3*again) + host + again"),
        ("host", 7, "host + 6*again + host + 2*again"),
        ("host", 10, "host + 9*again"),
    ],
)
def test_segments_of_ten_blocks(first, length, text):
    assert recompute.segments(first, length, 10) == text
    choices = recompute.read(text, 10)
    assert [slices.stop - slices.start for slices in recompute.segment_slices(choices)][:-1] == [length] * (
        (10 - 1) // length
    )
    assert [choice != "again" for choice in choices] == [block % length == 0 for block in range(10)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("2*off", "recompute = '2\\*off' is for 2 blocks, and layers = 3"),
        (
            "off + nothing",
            "recompute must be one of off, selective, on, parts, host, auto, or a sum .*, got 'off \\+ nothing'",
        ),
        ("", "recompute must be one of"),
        ("999999999999*off", "recompute must be one of"),
        ("auto + 2*on", "recompute must be one of"),
        ("again", "recompute = 'again' has 'again' without 'parts' or 'host' before it"),
        ("parts + on + again", "recompute = .* has 'again' without"),
        ("3*()", "recompute must be one of"),
        ("(host + (again + again))", "recompute must be one of"),
        ("2*(host + again)", "recompute = .* is for 4 blocks, and layers = 3"),
        ("999999999*(999999999*on)", "recompute = .* is for 999,999,998,000,000,001 blocks"),
    ],
)
def test_other_text_is_refused(text, message):
    with pytest.raises(ValueError, match=f"config: {message}"):
        config(layers=3, recompute=text)
