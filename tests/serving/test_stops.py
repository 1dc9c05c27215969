"""Stop sequences, whatever the borders between pieces."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from longstride.serving.stops import Stops

letters = st.text(alphabet="ab", max_size=12).map(str.encode)
sequences = st.lists(st.text(alphabet="ab", min_size=1, max_size=4).map(str.encode), min_size=1, max_size=3)


@given(letters, sequences, st.lists(st.integers(0, 12), max_size=6))
def test_shows_all_before_the_first_sequence(text, given_sequences, borders):
    stops, shown = Stops(given_sequences), b""
    borders = sorted({0, len(text), *(min(border, len(text)) for border in borders)})
    for start, stop in itertools.pairwise(borders):
        shown += stops.push(text[start:stop])
        if stops.found:
            break
        assert not any(sequence in shown for sequence in given_sequences)
    else:
        shown += stops.flush()
    one_by_one, expected = Stops(given_sequences), b""
    for byte in text:
        expected += one_by_one.push(bytes([byte]))
        if one_by_one.found:
            break
    assert stops.found == one_by_one.found == any(sequence in text for sequence in given_sequences)
    assert shown == expected + one_by_one.flush()
    assert text.startswith(shown)


def test_byte_by_byte():
    stops = Stops([b"END", b"\n\n"])
    assert [stops.push(bytes([byte])) for byte in b"aE\nENx"] == [b"a", b"", b"E", b"\n", b"", b"ENx"]
    assert [stops.push(bytes([byte])) for byte in b"END"] == [b"", b"", b""]
    assert stops.found


def test_nothing_is_held_back_without_sequences():
    assert Stops([]).push(b"abc") == b"abc"
