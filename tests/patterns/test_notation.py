import doctest

import pytest
from hypothesis import given
from hypothesis import strategies as st

import longstride.patterns.notation
from longstride.patterns import Block, Column, Dense, Dilated, Local, Summary, fixed, grid, strided
from longstride.patterns.notation import parse, write
from tests.strategies import patterns


@given(st.lists(patterns(), min_size=1, max_size=4))
def test_what_is_written_reads_back(heads):
    assert parse(write(heads)) == tuple(heads)


@pytest.mark.parametrize(
    ("text", "heads"),
    [
        ("local(128) | column(128)", (Local(128) | Column(128),)),
        ("Local(128)|Column(128)", (Local(128) | Column(128),)),
        ("strided(64)", strided(64)),
        ("fixed(128, 32), dense", (*fixed(128, 32), Dense())),
        ("merged(fixed(128, c=32))", (Block(128) | Summary(128, 32),)),
        ("fixed(8, 2) | local(3)", (Block(8) | Summary(8, 2) | Local(3),)),
        ("grid(4096, 3)", grid(4096, 3)),
        ("summary(16, 4, part=2)", (Summary(16, 4, 2),)),
        ("dilated(4, None)", (Column(4),)),
        ("dilated(4, 12)", (Dilated(4, 12),)),
        (" dense ( ) ,", (Dense(),)),
    ],
)
def test_text_a_person_would_type(text, heads):
    assert parse(text) == heads


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "does not read as patterns"),
        ("local(128", "does not read as patterns"),
        ("local(128) column(128)", "does not read as patterns"),
        ("lokal(128)", "there is no pattern 'lokal'; did you mean 'local'?"),
        ("xyz(1)", "the names are dense, local"),
        ("local()", r"local takes \(l\)"),
        ("local(1, 2)", r"local takes \(l\)"),
        ("local(x)", "'x' must be a whole number"),
        ("local(1.5)", "'1.5' must be a whole number"),
        ("local(*[1])", "must be a whole number"),
        ("local(**{'l': 1})", "must be a whole number"),
        ("local(1) & column(2)", "cannot read"),
        ("__import__('os').system('true')", "cannot read"),
        ("summary(8, 9)", "c = 9 cells do not fit"),
        ("merged()", "no pattern was given"),
        ("merged(local(3), x=column(2))", "merged takes patterns without names, got 'x'"),
    ],
)
def test_mistakes_are_named(text, says):
    with pytest.raises(ValueError, match=says):
        parse(text)


def test_the_examples_in_the_module_hold():
    assert doctest.testmod(longstride.patterns.notation).failed == 0
