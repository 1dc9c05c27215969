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
    ],
)
def test_other_text_is_refused(text, message):
    with pytest.raises(ValueError, match=f"config: {message}"):
        config(layers=3, recompute=text)
