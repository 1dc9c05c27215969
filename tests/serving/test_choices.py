"""Choices: text is valid UTF-8 at every moment, and logprobs say where each byte is in it."""

import itertools
import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from longstride.sampling.scores import Score, Scores
from longstride.serving.answers import Piece
from longstride.serving.choices import Choice, token


def chunks(data, borders, prompt=b"", echo=False, scores=False):
    borders = sorted({0, len(data), *(min(border, len(data)) for border in borders)})
    choice = Choice(0, prompt, echo, 1 if scores else None)
    pieces = [Piece(data[start:stop], [Score(-1.0, [])] * (stop - start)) for start, stop in itertools.pairwise(borders)]
    pieces.append(Piece(finish="length"))
    if echo and scores:
        likely = torch.full((len(prompt), 1), 65, dtype=torch.uint8), torch.full((len(prompt), 1), -0.5)
        pieces[0].prompt_scores = Scores(torch.full((len(prompt),), -2.0), *likely)
    return [chunk for piece in pieces for chunk in choice.chunks(piece)]


@given(st.binary(max_size=30) | st.text(max_size=12).map(str.encode), st.lists(st.integers(0, 30), max_size=8))
def test_text_is_valid_and_whole_wherever_pieces_end(data, borders):
    made = chunks(data, borders)
    text = "".join(chunk["text"] for chunk in made)
    assert text == data.decode("utf-8", "replace")
    assert b"".join(bytes(chunk["byte_ids"]) for chunk in made) == data
    for chunk in made:
        chunk["text"].encode()  # No lone surrogates.
    assert [chunk["finish_reason"] for chunk in made] == [None] * (len(made) - 1) + ["length"]


def test_a_character_is_shown_when_it_is_complete():
    made = chunks("a€b".encode(), range(6))
    assert [chunk["text"] for chunk in made] == ["a", "", "", "€", "b", ""]


@given(st.text(max_size=12), st.lists(st.integers(0, 40), max_size=8))
def test_offsets_are_those_of_characters(text, borders):
    made = chunks(text.encode(), borders, scores=True)
    offsets = [offset for chunk in made for offset in chunk["logprobs"]["text_offset"]]
    assert offsets == [index for index, character in enumerate(text) for _ in character.encode()]


def test_bytes_that_are_no_text_have_offsets_too():
    ((chunk, _),) = [chunks(b"\xe4\xeea\xffb", [], scores=True)]
    offsets, text = chunk["logprobs"]["text_offset"], chunk["text"]
    assert [text[offset] for offset in offsets] == ["�", "�", "a", "�", "b"]


def test_echo_comes_first():
    first, *rest = chunks(b"def", [1], prompt=b"abc", echo=True, scores=True)
    assert first["text"] == "abcd"
    assert first["byte_ids"] == list(b"abcd")
    assert first["logprobs"]["token_logprobs"] == [-2.0, -2.0, -2.0, -1.0]
    assert first["logprobs"]["top_logprobs"][0] == {"A": -0.5}
    assert [chunk["text"] for chunk in rest] == ["ef", ""]


@given(st.binary(max_size=40), st.binary(max_size=40), st.integers(0, 70))
def test_long_pieces_are_split(prompt, data, most):
    whole = chunks(data, [], prompt, echo=True, scores=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("longstride.serving.choices.MOST_NUMBERS", most)
        parts = chunks(data, [], prompt, echo=True, scores=True)
    assert all(3 * len(part["byte_ids"]) <= max(3, most) for part in parts)
    for name in ("text", "byte_ids"):
        joined = [one for part in parts for one in part[name]]
        assert joined == [one for part in whole for one in part[name]]
    for name in whole[0]["logprobs"]:
        joined = [one for part in parts for one in part["logprobs"][name]]
        assert joined == [one for part in whole for one in part["logprobs"][name]]
        assert len(joined) == len(prompt + data)
    assert [part["finish_reason"] for part in parts] == [None] * (len(parts) - 1) + ["length"]


def test_tokens_are_distinct_and_printable_as_json():
    tokens = [token(byte) for byte in range(256)]
    assert len(set(tokens)) == 256
    assert (token(65), token(0xC3)) == ("A", "bytes:\\xc3")
    json.dumps(tokens).encode()
